"""The old Flax classes beside ours: same small random checkpoint, same latents, DDIM; PSNR of the images.

    python tests/parity/old_flax.py --flax-python PATH [--steps 20]

PATH is an interpreter with diffusers==0.35.2 jax==0.4.38 flax==0.10.2 transformers==4.49.0. Not part of the test run.
A second comparison gives both the same keys and no latents, with JAX's noise of before 0.5 switched on for us.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

LEAST = 40.0
"""dB: what their tanh GELU and their other epsilon leave."""

BATCH = 2
PROMPTS = ["a fox in the snow", "a bridge in the rain"]
NEGATIVE = "grey"


def draw(pipeline, params, latents, steps: int) -> np.ndarray:
    """Images [1, B, H, W, 3] by either library; None for ``latents`` takes them from the key."""
    import jax

    ids = pipeline.prepare_inputs(PROMPTS)[None]
    negative = pipeline.prepare_inputs([NEGATIVE] * BATCH)[None]
    stacked = jax.tree_util.tree_map(lambda x: np.asarray(x)[None], params)
    keys = jax.random.split(jax.random.PRNGKey(7), 1)
    choice = {"neg_prompt_ids": negative, "guidance_scale": 5.0, "latents": latents, "jit": True}
    return np.asarray(pipeline(ids, stacked, keys, steps, **choice).images)


def draw_both(pipeline, params, folder: Path, name: str, steps: int) -> None:
    """With given latents, and with those of the key."""
    given = np.load(folder / "latents.npy")
    np.savez(
        folder / f"{name}.npz",
        latents=draw(pipeline, params, given, steps),
        keys=draw(pipeline, params, None, steps),
    )


def theirs(folder: Path, steps: int) -> None:
    """In the old environment."""
    from diffusers import FlaxStableDiffusionPipeline

    model = str(folder / "model")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model, safety_checker=None, feature_extractor=None)
    draw_both(pipeline, params, folder, "theirs", steps)


def ours(folder: Path, steps: int) -> None:
    import jax

    from canvax.flax_api import FlaxStableDiffusionPipeline

    jax.config.update("jax_threefry_partitionable", False)
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(folder / "model", safety_checker=None)
    draw_both(pipeline, params, folder, "ours", steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flax-python", help="interpreter that has the old classes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.theirs:
        theirs(args.theirs, args.steps)
        return
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from small_checkpoint import SCHEDULER, write_small_checkpoint

    scheduler = SCHEDULER | {"_class_name": "DDIMScheduler", "clip_sample": False}
    with tempfile.TemporaryDirectory(prefix="canvax-parity-") as scratch:
        folder = Path(scratch)
        write_small_checkpoint(folder / "model", "flax", scheduler)
        latents = np.random.default_rng(0).standard_normal((1, BATCH, 4, 8, 8), dtype=np.float32)
        np.save(folder / "latents.npy", latents)
        command = [args.flax_python, __file__, "--theirs", scratch, "--steps", str(args.steps)]
        subprocess.run(command, check=True)
        ours(folder, args.steps)
        got, want = np.load(folder / "ours.npz"), np.load(folder / "theirs.npz")
        worst = np.inf
        for name in ("latents", "keys"):
            error = np.mean((got[name].astype(np.float64) - want[name]) ** 2)
            decibels = 10 * np.log10(1 / max(error, 1e-30))
            worst = min(worst, decibels)
            print(f"same {name}: PSNR {decibels:.1f} dB, largest difference {np.abs(got[name] - want[name]).max():.1e}")
    if worst < LEAST:
        raise SystemExit(f"below {LEAST} dB")


if __name__ == "__main__":
    main()
