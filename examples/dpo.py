"""Teach a model with pairs of images, of which one is preferred: python examples/dpo.py

Diffusion-DPO (Wallace et al. 2023) needs no reward model and draws nothing during training: the model learns to denoise
the preferred image of a pair better than the old model does, by more than the other image. Here the model draws the
pairs, and the bluer image wins; a LoRA learns from them. It needs pip install ".[train]".
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import canvax
from canvax.train import Session, low_rank, make_step, run

BETA = 500.0  # how fast the preference of a pair saturates: how near the model stays to the old one


def dpo_loss(new, old, beta):
    """Equation 14 of Diffusion-DPO, from squared errors of the noise, of the (preferred, other) images [B] each.

    ``new`` are errors of the model, ``old`` of the model before training; both saw the same noisy images.
    """
    return -jax.nn.log_sigmoid(-beta * ((new[0] - old[0]) - (new[1] - old[1]))).mean()


def blueness(pixels):
    """How blue the colours of images are, -1..1 [B], of pixels [B, H, W, 3] in 0..1. White counts for nothing."""
    red, _, blue = jnp.moveaxis(pixels, -1, 0)
    colour = 1 - pixels.min(axis=-1)
    return (blue - red).sum(axis=(1, 2)) / (colour.sum(axis=(1, 2)) + 1e-3)


def main(arguments):
    updates, group, groups = (int(number) for number in (arguments + ["100", "16", "4"][len(arguments) :]))
    pipe = canvax.load("emoji")
    layers = low_rank.targets({"unet": pipe.model.specs["unet"]}, "attention")
    with_lora = partial(low_rank.with_factors, chosen=layers, scale=1.0)
    levels = jax.tree.map(jnp.asarray, pipe.start("", num_inference_steps=50, sampler="Euler").table.columns())

    @jax.jit
    def draw(factors, params, *start):
        latents = canvax.rollout(pipe, with_lora(factors, params), *start).latents
        return latents, blueness(pipe.decode(latents, params=params))

    def drawn(factors, seed):
        start = pipe.start(["a bird"] * group, seed=seed, num_inference_steps=8, sampler="DPM++ 2M")
        return draw(factors, pipe.params, *start[:3], start.table.columns())

    def loss(factors, pairs, shared, key):
        row_key, noise_key = jax.random.split(key)
        count = len(pairs["preferred"])
        row = jax.random.randint(row_key, count, 0, len(levels["p"]))
        level = {name: levels[name][row] for name in ("alpha", "std", "c_in", "p", "q", "timestep")}
        of_images = {name: value[:, None, None, None] for name, value in level.items()}
        noise = jax.random.normal(noise_key, pairs["other"].shape)  # the same for both images of a pair
        text = {name: jnp.repeat(value, count, axis=0) for name, value in shared["text"].items()}

        def error(factors, image):
            x = of_images["alpha"] * image + of_images["std"] * noise
            params = with_lora(factors, shared["params"])
            output = pipe.denoiser(of_images["c_in"] * x, level["timestep"], text, params=params)
            denoised = of_images["p"] * x + of_images["q"] * output
            return jnp.square((x - of_images["alpha"] * denoised) / of_images["std"] - noise).mean(axis=(1, 2, 3))

        both = pairs["preferred"], pairs["other"]
        new, old = ([error(chosen, image) for image in both] for chosen in (factors, shared["old"]))
        margin = (old[0] - new[0]) - (old[1] - new[1])
        return dpo_loss(new, old, BETA), {"right": (margin > 0).mean(dtype=jnp.float32)}

    factors = low_rank.new_factors(layers, rank=8, seed=0)
    many = [drawn(factors, seed=number * group) for number in range(groups)]
    latents, rewards = (jnp.concatenate(part) for part in zip(*many, strict=True))
    other, preferred = jnp.split(latents[jnp.argsort(rewards)], 2)

    def log(number, values, images):
        print(f"update {number}: loss {values['loss']:.3f}, right {values['right']:.2f}", flush=True)

    step = make_step(loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3)))
    pairs = {"preferred": preferred, "other": other}
    shared = {"old": factors, "params": pipe.params, "text": pipe.encode("a bird")}
    session, chunk = Session(name="preferences", log=log), max(1, updates // 10)
    state, _ = run(step, step.init(factors), pairs, updates, session, batch=group // 2, shared=shared, chunk=chunk)
    for name, chosen in {"before": factors, "after": state.params}.items():
        print(f"reward of new images {name}: {drawn(chosen, seed=10_000)[1].mean():.3f}")

    file = Path("dpo-blue.safetensors")
    low_rank.write_factors(file, state.params, layers, alpha=8, names="peft", metadata={})
    before = pipe("a bird", seed=10_000)
    pipe.adapters.load("blue", file)
    for name, result in {"dpo-before.png": before, "dpo-after.png": pipe("a bird", seed=10_000)}.items():
        result.images[0].save(name)
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
