"""One of several processes that draw together. Arguments: PROCESS PROCESSES PORT MODEL CHECKPOINT OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import canvax
from canvax.parallel import multihost

PROMPTS = ["a cat", "a dog", "a red apple", "a pear", "a car", "a tree"]
WEIGHTED = ["a (cat:1.3)", "a dog BREAK a cat", "a [red:green:1] apple", "a pear", "a car AND a cat:0.5", "a tree"]
INTERVAL = (0.0, 0.7)  # two rows guided, one not


def main(process: int, processes: int, port: str, model: int, checkpoint: str, out: Path) -> None:
    multihost.initialize(f"localhost:{port}", processes, process)
    pipe = canvax.load(checkpoint, mesh=canvax.make_mesh(model=model))
    steps: list[int] = []
    options = canvax.Options(
        guidance_interval=INTERVAL, progress=True, callback=lambda step: steps.append(len(step.latents))
    )
    result = pipe(PROMPTS, seed=5, num_inference_steps=3, sampler="Euler a", options=options)
    prompts = [one["prompt"] for one in result.metadata]
    np.savez(
        out / f"{process}.npz", indices=result.indices, latents=result.latents, pixels=result.pixels, prompts=prompts
    )
    result.save(out / "pictures")
    assert steps == [len(result.indices)] * 3
    again = pipe(PROMPTS, seed=5, num_inference_steps=3, sampler="Euler a", guidance_interval=INTERVAL, progress=False)
    assert pipe.programs.features.taken()["hit"] >= 2 * len(PROMPTS)
    np.testing.assert_array_equal(again.latents, result.latents)
    weighted = pipe(WEIGHTED, seed=5, num_inference_steps=2, prompt_syntax="a1111", progress=False)
    np.savez(out / f"weighted{process}.npz", indices=weighted.indices, latents=weighted.latents)
    # Nobody gave a seed: process 0 chooses one for all.
    free = pipe(PROMPTS, num_inference_steps=1, options=canvax.Options(progress=False))
    print("seeds", {i: one["seed"] for i, one in zip(free.indices, free.metadata, strict=True)})
    try:
        pipe(f"for process {process}", seed=1)
    except canvax.InputError as error:
        print("refused", error)
    try:
        pipe.save(out / "saved")
    except canvax.InputError as error:
        print("not saved", error)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], Path(sys.argv[6]))
