"""Define a custom model and generate an image: python examples/new_family.py. See docs/new-family.md."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import canvax
from canvax.extend import Defaults, Denoiser, Facts, Family, Inputs, Networks, TextEncoder, TextEncoders, init_params
from canvax.nn import gelu, linear, linear_spec

WIDTH, CHANNELS, FACTOR = 8, 3, 2  # of the text; of the latents; pixels for a latent, along a side


@dataclass(frozen=True)
class Mlp(Denoiser):
    """Two layers for each latent, which see the mean of the text, the timestep and a number about the image."""

    component = "mlp"
    facts = Facts(native_size=(8, 8))

    @property
    def spec(self):
        widths = {"x": CHANNELS, "text": WIDTH, "time": 1, "hue": 1}
        return {name: linear_spec(width, WIDTH) for name, width in widths.items()} | {
            "out": linear_spec(WIDTH, CHANNELS)
        }

    def inputs(self, latents, text, dtype):
        return Inputs({"hue": jax.ShapeDtypeStruct((latents[0], 1), jnp.float32)})

    def prepare(self, p, conditions, latents):
        return (linear(p["text"], conditions["text"].mean(1)) + linear(p["hue"], conditions["hue"]))[:, None, None]

    def apply(self, p, x, row, prepared, memory):
        time = linear(p["time"], row["timestep"][:, None, None, None] / 1000)
        return linear(p["out"], gelu(linear(p["x"], x) + time + prepared)), memory


@dataclass(frozen=True)
class Letters(TextEncoder):
    """Embeds each letter of a prompt; reads the letters and how many there are."""

    component: str
    lengths: tuple[int, ...]

    @property
    def spec(self):
        return {"embed": linear_spec(256, WIDTH)}

    def inputs(self, length):
        return {"ids": jax.ShapeDtypeStruct((length,), jnp.int32), "count": jax.ShapeDtypeStruct((), jnp.int32)}

    def outputs(self, length, dtype):
        return {"text": jax.ShapeDtypeStruct((length, WIDTH), dtype)}

    def count(self, tokenizer, text, images):
        return len(text)

    def read(self, tokenizer, texts, length, images=()):
        ids = [[*map(ord, text), *[0] * (length - len(text))] for text in texts]
        return {"ids": np.array(ids, np.int32), "count": np.array([len(text) for text in texts], np.int32)}

    def encode(self, p, ids, count):
        letters = jnp.arange(ids.shape[1])[None] < count[:, None]
        return {"text": linear(p["embed"], jax.nn.one_hot(jnp.where(letters, ids, -1), 256))}


class OneAfterAnother(TextEncoders):
    """Joins texts on the axis of the tokens."""

    def join(self, outputs):
        return {"text": jnp.concatenate([output["text"] for output in outputs], axis=1)}


@dataclass(frozen=True)
class Squares:
    """An autoencoder that makes a square of one colour of each latent."""

    factor, latent_channels, spec = FACTOR, CHANNELS, {"colour": linear_spec(CHANNELS, 3)}

    def decode(self, p, latents, *, tiled=False):
        return jax.nn.sigmoid(linear(p["colour"], latents).repeat(FACTOR, 1).repeat(FACTOR, 2))

    def encode(self, p, images, *, tiled=False):
        latents = 4 * images[:, ::FACTOR, ::FACTOR] - 2
        return latents, jnp.zeros_like(latents)


def hues(model, height, width, options):
    """Return the further conditions of the prompt and of the negative prompt."""
    return {"hue": np.ones(1, np.float32)}, {"hue": np.zeros(1, np.float32)}


NETWORKS = Networks(Mlp(), Squares(), OneAfterAnother((Letters("reader", (5, 20)), Letters("speller", (7,)))))
FAMILY = Family("mlp", defaults=Defaults(num_inference_steps=4, guidance_scale=3.0), size_conditions=hues)

if __name__ == "__main__":
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(NETWORKS.specs().items())}
    pipe = canvax.pipeline_of(NETWORKS, params, "FlowMatchEulerDiscreteScheduler", family=FAMILY)
    pipe("a fox", seed=1).images[0].save("fox.png")
    pipe.save("toy")
    params = canvax.extend.load_params("toy", NETWORKS.specs())  # for the same call of pipeline_of
