"""Teach a model with a reward and any sampler: python examples/nft.py

DiffusionNFT (Zheng et al. 2025) needs finished images and their rewards, no probabilities of steps, so any sampler
draws them. The model learns to denoise images of much reward; its reflection in the old model learns those of little.
Here a LoRA learns to draw in blue. It needs pip install ".[train]".
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import canvax
from canvax.train import Session, low_rank, make_step, run

ROUNDS, GROUP, STEPS = (int(number) for number in (sys.argv[1:] + ["30", "16", "8"][len(sys.argv) - 1 :]))
# How far the mirror image is from the old model; the part of the old model that a round keeps; noise levels per image.
BETA, KEEP, TIMES = 0.3, 0.5, 4

pipe = canvax.load("emoji")
layers = low_rank.targets({"unet": pipe.model.specs["unet"]}, "attention")
with_lora = partial(low_rank.with_factors, chosen=layers, scale=1.0)
levels = jax.tree.map(jnp.asarray, pipe.start("", num_inference_steps=50, sampler="Euler").table.columns())


def reward(pixels):
    """How blue the colours of images are, -1..1 [B], of pixels [B, H, W, 3] in 0..1. White counts for nothing."""
    red, _, blue = jnp.moveaxis(pixels, -1, 0)
    colour = 1 - pixels.min(axis=-1)
    return (blue - red).sum(axis=(1, 2)) / (colour.sum(axis=(1, 2)) + 1e-3)


@jax.jit
def draw(factors, params, *start):
    latents = canvax.rollout(pipe, with_lora(factors, params), *start).latents
    return {"latents": latents, "rewards": reward(pipe.decode(latents, params=params)), "conditions": start[2][-1]}


def group(number, state):
    start = pipe.start(["a cat"] * GROUP, seed=number * GROUP, num_inference_steps=STEPS, sampler="DPM++ 2M")
    return draw(state["old"], pipe.params, *start[:3], start.table.columns())


def loss(factors, group, shared, key):
    rewards, image = group["rewards"], jnp.repeat(group["latents"], TIMES, axis=0)
    conditions = jax.tree.map(lambda leaf: jnp.repeat(leaf, TIMES, axis=0), group["conditions"])
    row_key, noise_key = jax.random.split(key)
    row = jax.random.randint(row_key, len(image), 0, len(levels["p"]))
    level = {name: levels[name][row] for name in ("alpha", "std", "c_in", "p", "q", "timestep")}
    of_images = {name: value[:, None, None, None] for name, value in level.items()}
    x = of_images["alpha"] * image + of_images["std"] * jax.random.normal(noise_key, image.shape)

    def denoised(factors):
        params = with_lora(factors, shared["params"])
        output = pipe.denoiser(of_images["c_in"] * x, level["timestep"], conditions, params=params)
        return of_images["p"] * x + of_images["q"] * output

    def error(guess):
        difference = guess - image
        size = jax.lax.stop_gradient(jnp.abs(difference).mean(axis=(1, 2, 3)))
        return (difference**2).mean(axis=(1, 2, 3)) / (size + 1e-5)

    new, old = denoised(factors), jax.lax.stop_gradient(denoised(shared["old"]))
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    good = jnp.repeat(0.5 + 0.5 * jnp.clip(advantage, -1, 1), TIMES)
    total = good * error(old + BETA * (new - old)) + (1 - good) * error(old - BETA * (new - old))
    return total.mean() / BETA, {"reward": rewards.mean()}


update = make_step(loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)))


def step(state, group, params, key):
    new, values = update(state["new"], group, {"old": state["old"], "params": params}, key)
    old = jax.tree.map(lambda old, new: KEEP * old + (1 - KEEP) * new, state["old"], new.params)
    return {"new": new, "old": old}, values


def log(number, values, images):
    print(f"round {number}: reward {values['reward']:.3f}", flush=True)


factors = low_rank.new_factors(layers, rank=8, seed=0)
state = {"new": update.init(factors), "old": factors}
state, _ = run(step, state, group, ROUNDS, Session(name="nft", log=log), shared=pipe.params)

file = Path("nft-blue.safetensors")
low_rank.write_factors(file, state["new"].params, layers, alpha=8, names="peft", metadata={})
before = pipe("a cat", seed=1)
pipe.adapters.load("blue", file)
for name, result in {"nft-before.png": before, "nft-after.png": pipe("a cat", seed=1)}.items():
    result.images[0].save(name)
    print(name)
