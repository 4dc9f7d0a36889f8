"""Teach a model with a reward instead of images: python examples/reward.py

A LoRA learns to draw what a function of the pixels likes, here blue. Each round draws a group of images, and makes
the steps of those with more reward than the group's mean more likely: the policy gradient of DDPO (Black et al. 2023)
with the advantages of GRPO (Liu et al. 2025, "Flow-GRPO"). It needs pip install '.[train]'.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import canvax
from canvax.train import low_rank

ROUNDS, GROUP, STEPS = (int(number) for number in (sys.argv[1:] + ["20", "16", "6"][len(sys.argv) - 1 :]))
ASKED = {"num_inference_steps": STEPS, "sampler": "Euler a"}

pipe = canvax.load("emoji")
denoiser = pipe.model.networks.denoiser
layers = low_rank.targets({denoiser.component: denoiser.spec}, "attention", pipe.model.family.stacks)
factors = low_rank.new_factors(layers, rank=8, seed=0)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
state = optimizer.init(factors)
with_lora = partial(low_rank.with_factors, chosen=layers, scale=1.0)


def reward(pixels):
    """How blue the colours of images are, -1..1 [B], of pixels [B, H, W, 3] in 0..1. White counts for nothing."""
    red, _, blue = jnp.moveaxis(pixels, -1, 0)
    colour = 1 - pixels.min(axis=-1)
    return (blue - red).sum(axis=(1, 2)) / (colour.sum(axis=(1, 2)) + 1e-3)


@jax.jit
def draw(factors, params, start, columns):
    run = canvax.rollout(pipe, with_lora(factors, params), *start, columns, record=lambda seen: seen.transition)
    return reward(pipe.decode(run.latents, params=params)), run.record


@jax.jit
def improve(factors, state, params, start, columns, along, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def loss(factors):
        run = {"along": along, "record": lambda seen: seen.log_prob, "remat": True}
        log_prob = canvax.rollout(pipe, with_lora(factors, params), *start, columns, **run).record
        return -(advantages * log_prob).mean() / start[0][0].size

    changes, state = optimizer.update(jax.grad(loss)(factors), state)
    return optax.apply_updates(factors, changes), state


for number in range(ROUNDS):
    start = pipe.start(["a cat"] * GROUP, seed=number * GROUP, **ASKED)
    arrays, columns = start[:3], start.table.columns()
    rewards, along = draw(factors, pipe.params, arrays, columns)
    factors, state = improve(factors, state, pipe.params, arrays, columns, along, rewards)
    print(f"round {number + 1}: reward {rewards.mean():.3f}", flush=True)

file = Path("blue.safetensors")
low_rank.write_factors(file, factors, layers, alpha=8, names="peft", metadata={})
before = pipe("a cat", seed=1)
pipe.adapters.load("blue", file)
for name, result in {"before.png": before, "after.png": pipe("a cat", seed=1)}.items():
    result.images[0].save(name)
    print(name)
