"""Train a small diffusion transformer: python examples/from_scratch.py [meanflow] [repa] [UPDATES [DRAWINGS]]

It learns drawings of the bundled model, from the words "fruit", "animal" and "vehicle", by flow matching (Lipman et al.
2023). With "meanflow" it learns the mean velocity from a time to any earlier one, to draw in one step (Geng et al.
2025). With "repa" a hidden layer also learns features of another network (Yu et al. 2025). Needs the extra "train".
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image
from scipy.spatial.distance import cdist

import canvax
from canvax.extend import Defaults, Denoiser, Facts, Family, Inputs, Networks, Packing, Param, init_params
from canvax.kernels.attention import attention, keep, using
from canvax.nn import gelu, linear, linear_spec
from canvax.samplers import build_table
from canvax.train import Session, averaged, make_step, run

THINGS = {
    "fruit": ("a red apple", "a banana", "grapes", "a watermelon"),
    "animal": ("a cat", "a frog", "a penguin", "a fox"),
    "vehicle": ("a car", "a bus", "a sailboat", "a rocket"),
}
WIDTH, DEPTH, HEADS, TOKENS = 128, 4, 4, 16
BATCH, LEAPS, REPA = 32, 0.5, 0.5  # LEAPS: the part of a batch with r < t; REPA: the weight of its loss


@dataclass(frozen=True)
class Dit(Denoiser):
    """The transformer of Peebles & Xie 2023 (adaLN-Zero) on squares of 2 x 2 latents; the text is a mean of tokens."""

    channels: int
    text: int
    leaps: bool
    component = "dit"

    @property
    def facts(self):
        return Facts(native_size=(8, 8), packing=Packing(2), distilled=True, flow_map=self.leaps)

    @property
    def spec(self):
        def zeros(outputs):
            return linear_spec(WIDTH, outputs) | {"weight": Param((WIDTH, outputs), (None, None), init="zeros")}

        block = {"modulation": zeros(6 * WIDTH), "qkv": linear_spec(WIDTH, 3 * WIDTH), "out": linear_spec(WIDTH, WIDTH)}
        block |= {"up": linear_spec(WIDTH, 4 * WIDTH), "down": linear_spec(4 * WIDTH, WIDTH)}
        inputs = {"x": 4 * self.channels, "t": 64, "leap": 64, "text": self.text}
        return {name: linear_spec(size, WIDTH) for name, size in inputs.items()} | {
            "place": Param((TOKENS, WIDTH), (None, None), init="normal"),
            "blocks": {str(i): block for i in range(DEPTH)},
            "modulation": zeros(2 * WIDTH),
            "output": zeros(4 * self.channels),
        }

    def inputs(self, latents, text, dtype):
        return Inputs(columns={"target": jax.ShapeDtypeStruct((), jnp.float32)} if self.leaps else {})

    def prepare(self, p, conditions, latents):
        return conditions["text"].mean(1)

    def apply(self, p, x, row, prepared, memory):
        t = row["timestep"] / 1000
        r = row["target"] / 1000 if self.leaps and "target" in row else t
        return self.velocity(p, x[:, 0], r, t, prepared)[0][:, None], memory

    def velocity(self, p, x, r, t, text):
        """Return the mean velocity from t to r [B] of tokens [B, L, C], and the features of a hidden layer [B, L, D].

        The last layer predicts the image, which is easier than noise (Li & He 2025).
        """
        h = linear(p["x"], x) + p["place"][None]
        c = linear(p["t"], waves(t)) + linear(p["leap"], waves(t - r)) + linear(p["text"], text)
        c, hidden = jax.nn.silu(c)[:, None], h
        for i in range(DEPTH):
            b = p["blocks"][str(i)]
            shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(linear(b["modulation"], c), 6, axis=-1)
            y = linear(b["qkv"], (1 + scale) * jax.nn.standardize(h) + shift)
            q, k, v = jnp.moveaxis(y.reshape(*h.shape[:2], 3, HEADS, WIDTH // HEADS), 2, 0)
            h = h + gate * linear(b["out"], jax.nn.dot_product_attention(q, k, v).reshape(h.shape))
            y = linear(b["up"], (1 + scale_2) * jax.nn.standardize(h) + shift_2)
            h = h + gate_2 * linear(b["down"], gelu(y))
            hidden = h if i == DEPTH // 2 - 1 else hidden
        shift, scale = jnp.split(linear(p["modulation"], c), 2, axis=-1)
        clean = linear(p["output"], (1 + scale) * jax.nn.standardize(h) + shift)
        return (x - clean) / jnp.maximum(t, 0.05)[:, None, None], hidden


def waves(t):
    """Sines and cosines [B, 64] of times [B] in 0..1."""
    angles = t[:, None] * jnp.exp2(jnp.linspace(-2, 4, 32, dtype=t.dtype))[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def flow_error(u, x, noise, t):
    """Error of the velocity u(z, t, t) at z = (1 - t) x + t noise, and the features, which u also returns."""
    output, hidden = u((1 - t) * x + t * noise, t, t)
    return output - (noise - x), hidden


def mean_flow_error(u, x, noise, r, t):
    """Error of u(z, r, t) by the MeanFlow identity u = v - (t - r) du/dt (eq. 6 and 10), and the features."""
    z, v = (1 - t) * x + t * noise, noise - x
    output, slope, hidden = jax.jvp(u, (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)), has_aux=True)
    return output - jax.lax.stop_gradient(v - (t - r) * slope), hidden


def repa_loss(hidden, features):
    """1 - the cosine of hidden features and those of a frozen network, both [B, L, F] (eq. 8 of REPA)."""
    return 1 - optax.cosine_similarity(hidden, features, epsilon=1e-6).mean()


def loss_of(dit):
    """Return the loss for ``make_step``."""

    def loss(params, samples, shared, key):
        x, (key_times, key_leap, key_noise) = samples["x"], jax.random.split(key, 3)
        times = jax.nn.sigmoid(jax.random.normal(key_times, (2, len(x), 1, 1)) - 0.4)
        r, t = times.min(axis=0), times.max(axis=0)
        noise = jax.random.normal(key_noise, x.shape)

        def u(z, r, t):
            return dit.velocity(params["dit"], z, r[:, 0, 0], t[:, 0, 0], samples["text"])

        if dit.leaps:
            r = jnp.where(jax.random.bernoulli(key_leap, LEAPS, t.shape), r, t)
            error, hidden = mean_flow_error(u, x, noise, r, t)
        else:
            error, hidden = flow_error(u, x, noise, times[0])
        square = jnp.square(error).mean(axis=(1, 2))
        # Targets of MeanFlow have outliers: the loss of each sample is divided by its error (eq. 22, p = 1).
        value = (square / jax.lax.stop_gradient(square + 1e-3)).mean()
        values = {"error": square.mean()}
        if "features" in samples:
            values["repa"] = repa_loss(linear(params["project"], hidden), samples["features"])
            value = value + REPA * values["repa"]
        return value, values

    return loss


def drawings(base, each, seed):
    """Latents of ``each`` drawings of all things, by word [N, 8, 8, C]; replace them with yours by ``encode_image``."""
    settings = {"num_inference_steps": 8, "sampler": "DPM++ 2M", "output_type": "latent"}
    return {w: base([*things] * each, seed=seed, **settings).latents for w, things in THINGS.items()}


def features_of(base, latents):
    """Features [N, L, F] of latents in the bundled UNet: queries of a layer of attention (Tang et al. 2023, "DIFT")."""

    def queries(q, k, v, *, where, **terms):
        keep(where, q.reshape(*q.shape[:2], -1))
        return attention(q, k, v, **terms)

    last = {**build_table(base.model.scheduler, 20).take(19).columns(), "init_scale": np.float32(1)}
    start = base.start([""] * len(latents), num_inference_steps=1)
    with using(queries):
        arrays = latents, start.keys, start.conditions[-1], last
        kept = canvax.rollout(base, base.params, *arrays, record=lambda seen: seen.kept).record
    return next(value[0] for where, value in kept.items() if where.endswith("attn1"))


def distance(a, b):
    """Energy distance of two sets [N, ...] (Szekely & Rizzo 2013): 0 if they come from one distribution."""
    ab, aa, bb = (cdist(x.reshape(len(x), -1), y.reshape(len(y), -1)).mean() for x, y in ((a, b), (a, a), (b, b)))
    return 2 * ab - aa - bb


def main(arguments):
    numbers = [int(word) for word in arguments if word.isdigit()]
    updates, each = numbers + [400, 8][len(numbers) :]
    base = canvax.load("emoji")
    networks = base.model.networks
    text = {word: np.asarray(base.encode(word)["text"].mean(1)) for word in THINGS}
    dit = Dit(networks.vae.latent_channels, text["fruit"].shape[-1], leaps="meanflow" in arguments)
    latents = drawings(base, each, seed=0)
    data = {
        "x": np.concatenate([dit.facts.packing.pack(x)[:, 0] for x in latents.values()]),
        "text": np.concatenate([text[word].repeat(len(x), axis=0) for word, x in latents.items()]),
    }
    params = {"dit": init_params(dit.spec, seed=0)}
    if "repa" in arguments:
        data["features"] = np.asarray(features_of(base, np.concatenate([*latents.values()])))
        params["project"] = init_params(linear_spec(WIDTH, data["features"].shape[-1]), seed=1)

    def log(number, values, images):
        print(f"update {number}:", *(f"{name} {value:.4f}" for name, value in values.items()), flush=True)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, updates)))
    step = make_step(loss_of(dit), optimizer, average=0.99)
    session, chunk = Session(name="from scratch", log=log), max(1, updates // 10)
    state, _ = run(step, step.init(params), data, updates, session, batch=min(BATCH, len(data["x"])), chunk=chunk)

    params = {name: base.params[name] for name in ("vae", "text_encoder")} | {"dit": averaged(state)["dit"]}
    pipe = canvax.pipeline_of(
        Networks(dit, networks.vae, networks.text),
        params,
        "FlowMatchEulerDiscreteScheduler",
        family=Family("dit", defaults=Defaults(num_inference_steps=1 if dit.leaps else 20, guidance_scale=1.0)),
        tokenizers=base.model.tokenizers,
    )
    others = drawings(base, each, seed=10_000)
    rows = []
    for steps in (1, 2, 4, 16):
        drawn = {
            w: pipe([w] * 4 * each, seed=0, num_inference_steps=steps, output_type="latent").latents for w in THINGS
        }
        far = np.mean([distance(drawn[word], others[word]) for word in THINGS])
        print(f"steps {steps}: distance {far:.2f}", flush=True)
        row = np.asarray(pipe.decode(np.concatenate([x[:3] for x in drawn.values()])))
        rows.append(np.concatenate([*row], axis=1))
    Image.fromarray((255 * np.concatenate(rows)).round().astype(np.uint8)).save("from_scratch.png")


if __name__ == "__main__":
    main(sys.argv[1:])
