"""Teach a model with a reward instead of images: python examples/reward.py

A LoRA learns to draw what a function of the pixels likes, here blue. Each round draws a group of images, and makes
the steps of those with more reward than the group's mean more likely: the policy gradient of DDPO (Black et al. 2023)
with the advantages of GRPO (Liu et al. 2025, "Flow-GRPO"). It needs pip install ".[train]".
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import canvax
from canvax.train import Session, low_rank, make_step, run

ROUNDS, GROUP, STEPS = (int(number) for number in (sys.argv[1:] + ["20", "16", "6"][len(sys.argv) - 1 :]))

pipe = canvax.load("emoji")
layers = low_rank.targets({"unet": pipe.model.specs["unet"]}, "attention")
with_lora = partial(low_rank.with_factors, chosen=layers, scale=1.0)


def reward(pixels):
    """How blue the colours of images are, -1..1 [B], of pixels [B, H, W, 3] in 0..1. White counts for nothing."""
    red, _, blue = jnp.moveaxis(pixels, -1, 0)
    colour = 1 - pixels.min(axis=-1)
    return (blue - red).sum(axis=(1, 2)) / (colour.sum(axis=(1, 2)) + 1e-3)


@jax.jit
def draw(factors, params, *start):
    rollout = canvax.rollout(pipe, with_lora(factors, params), *start, record=lambda seen: seen.transition)
    return {"start": start, "along": rollout.record, "rewards": reward(pipe.decode(rollout.latents, params=params))}


def group(number, state):
    start = pipe.start(["a cat"] * GROUP, seed=number * GROUP, num_inference_steps=STEPS, sampler="Euler a")
    return draw(state.params, pipe.params, *start[:3], start.table.columns())


def loss(factors, group, params, key):
    rewards = group["rewards"]
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    likelihood = {"along": group["along"], "record": lambda seen: seen.log_prob, "remat": True}
    log_prob = canvax.rollout(pipe, with_lora(factors, params), *group["start"], **likelihood).record
    return -(advantages * log_prob.mean(axis=0)).mean() / group["start"][0][0].size, {"reward": rewards.mean()}


def log(number, values, images):
    print(f"round {number}: reward {values['reward']:.3f}", flush=True)


step = make_step(loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)))
start = step.init(low_rank.new_factors(layers, rank=8, seed=0))
state, _ = run(step, start, group, ROUNDS, Session(name="reward", log=log), shared=pipe.params)

file = Path("blue.safetensors")
low_rank.write_factors(file, state.params, layers, alpha=8, names="peft", metadata={})
before = pipe("a cat", seed=1)
pipe.adapters.load("blue", file)
for name, result in {"before.png": before, "after.png": pipe("a cat", seed=1)}.items():
    result.images[0].save(name)
    print(name)
