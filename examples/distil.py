"""Distil a model to a few steps without guidance: python examples/distil.py [UPDATES [TRAJECTORIES]]

The teacher is the model in many guided steps, and draws from prompts alone: no images are needed. A LoRA learns to
reach the same latents from the same noise in 4 steps without guidance, after every step: progressive distillation
(Salimans & Ho 2022) of a guided model (Meng et al. 2023), through the whole run. It needs pip install ".[train]".
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

import canvax
from canvax.train import Session, averaged, low_rank, make_step, run

STEPS, EACH = 4, 3  # steps of the student; steps of the teacher for each
BATCH, RANK, RATE = 8, 32, 1e-3
STUDENT = {"num_inference_steps": STEPS, "guidance_scale": 1.0}
TEACHER = {"num_inference_steps": STEPS * EACH, "sampler": "DPM++ 2M"}
COLOURS = ("",) * 16 + ("red ", "blue ", "green ", "yellow ")
STYLES = ("", "", "", "", " in the style of noto", ", twemoji style", " in the style of fluent", ", fluent flat style")


def prompts_of(names, count, seed):
    """Random things of the model, half of them in a style, some in a colour."""
    rng = np.random.default_rng(seed)
    things = [f"{rng.choice(COLOURS)}{name.lower()}{rng.choice(STYLES)}" for name in rng.choice(names, count)]
    return [f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}" for thing in things]


def main(arguments):
    updates, count = (int(number) for number in (arguments + ["2200", "3072"][len(arguments) :]))
    pipe = canvax.load("emoji")
    layers = low_rank.targets({"unet": pipe.model.specs["unet"]}, "all")
    with_lora = partial(low_rank.with_factors, chosen=layers, scale=1.0)
    prompts = prompts_of(pipe.model.concepts.names, count, seed=0)
    few = pipe.start("", **STUDENT).table.columns()

    @jax.jit
    def draw(params, *start):
        """Latents of the teacher where the student is to arrive, [B, STEPS, h, w, C]."""
        path = canvax.rollout(pipe, params, *start, record=lambda seen: seen.sample).record
        return path[EACH - 1 :: EACH].swapaxes(0, 1)

    def drawn(first):
        start = pipe.start(prompts[first : first + BATCH], seed=first, **TEACHER)
        path = draw(pipe.params, *start[:3], start.table.columns())
        return jax.device_get({"start": (*start[:2], start.conditions[-1]), "path": path})

    def loss(factors, samples, params, key):
        student = canvax.rollout(
            pipe, with_lora(factors, params), *samples["start"], few, record=lambda seen: seen.sample
        )
        error = jnp.square(student.record.swapaxes(0, 1) - samples["path"]).mean(axis=(0, 2, 3, 4))
        return error.mean(), {"last": error[-1]}

    def log(number, values, images):
        print(f"update {number}: loss {values['loss']:.4f}, of the images {values['last']:.4f}", flush=True)

    data = jax.tree.map(lambda *parts: np.concatenate(parts), *map(drawn, range(0, count, BATCH)))
    rates = optax.cosine_onecycle_schedule(updates, RATE, pct_start=0.05)
    step = make_step(loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates, b2=0.99)), average=0.99)
    state = step.init(low_rank.new_factors(layers, rank=RANK, seed=0))
    session, chunk = Session("distil", name="distillation", log=log), max(1, min(50, updates // 10))
    state, _ = run(step, state, data, updates, session, batch=BATCH, shared=pipe.params, chunk=chunk)

    file, record = Path("distil.safetensors"), {"canvax.training": json.dumps({"call": STUDENT})}
    low_rank.write_factors(file, averaged(state), layers, alpha=RANK, names="peft", dtype="float16", metadata=record)
    things = ["a red apple", "a fox", "a rocket", "a house", "a butterfly", "a guitar"]
    rows = [pipe(things, seed=1), pipe(things, seed=1, num_inference_steps=STEPS)]
    student = pipe.adapters.load("student", file)
    rows.append(pipe(things, seed=1, **student.suggested))
    pixels = np.concatenate([np.concatenate([*row.pixels], axis=1) for row in rows])
    Image.fromarray((255 * pixels).round().astype(np.uint8)).save("distil.png")
    print("distil.png: the teacher in all its steps, in as few as the student, and the student")


if __name__ == "__main__":
    main(sys.argv[1:])
