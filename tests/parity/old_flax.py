"""The old Flax classes beside ours: same small random checkpoints, same latents, DDIM; PSNR of the images.

    python tests/parity/old_flax.py --flax-python PATH [--steps 20]

PATH is an interpreter with diffusers==0.35.2 jax==0.4.38 flax==0.10.2 transformers==4.49.0. Not part of the test run.
A second comparison gives both the same keys and no latents, with JAX's noise of before 0.5 switched on for us. Both are
made with Stable Diffusion and with SDXL, the latter also without a negative prompt.
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


def draw(pipeline, params, latents, negative: str | None, steps: int) -> np.ndarray:
    """Images [1, B, H, W, 3] by either library; None for ``latents`` takes them from the key."""
    import jax

    ids = pipeline.prepare_inputs(PROMPTS)[None]
    neg_prompt_ids = None if negative is None else pipeline.prepare_inputs([negative] * BATCH)[None]
    stacked = jax.tree_util.tree_map(lambda x: np.asarray(x)[None], params)
    keys = jax.random.split(jax.random.PRNGKey(7), 1)
    choice = {"neg_prompt_ids": neg_prompt_ids, "guidance_scale": 5.0, "latents": latents, "jit": True}
    return np.asarray(pipeline(ids, stacked, keys, steps, **choice).images)


def draw_all(cls, folder: Path, name: str, steps: int, **load) -> None:
    """With given latents and with those of the key, and for SDXL with no negative prompt."""
    pipeline, params = cls.from_pretrained(str(folder / "model"), **load)
    given = np.load(folder / "latents.npy")
    drawn = {
        "latents": draw(pipeline, params, given, NEGATIVE, steps),
        "keys": draw(pipeline, params, None, NEGATIVE, steps),
    }
    if "XL" in cls.__name__:
        drawn["latents, no negative prompt"] = draw(pipeline, params, given, None, steps)
    np.savez(folder / f"{name}.npz", **drawn)


def theirs(folder: Path, steps: int, xl: bool) -> None:
    """In the old environment."""
    import diffusers

    load = {} if xl else {"safety_checker": None, "feature_extractor": None}
    draw_all(getattr(diffusers, class_name(xl)), folder, "theirs", steps, **load)


def ours(folder: Path, steps: int, xl: bool) -> None:
    import jax

    import canvax.flax_api

    jax.config.update("jax_threefry_partitionable", False)
    draw_all(getattr(canvax.flax_api, class_name(xl)), folder, "ours", steps)


def class_name(xl: bool) -> str:
    return f"FlaxStableDiffusion{'XL' if xl else ''}Pipeline"


def write_sdxl(folder: Path, scheduler: dict) -> None:
    """The old UNet knew no number of groups but 32."""
    import dataclasses

    from tests.support.small_sdxl import UNET, build

    unet = dataclasses.replace(
        UNET, block_out_channels=(32, 64), norm_num_groups=32, transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
    )  # fmt: skip
    build(folder, unet=unet, form="flax", scheduler=scheduler)


def compare(flax_python: str, steps: int, xl: bool) -> float:
    """The lowest PSNR in dB."""
    from tests.support.small_checkpoint import SCHEDULER, write_small_checkpoint

    scheduler = SCHEDULER | {"_class_name": "DDIMScheduler", "clip_sample": False}
    with tempfile.TemporaryDirectory(prefix="canvax-parity-") as scratch:
        folder = Path(scratch)
        if xl:
            write_sdxl(folder / "model", scheduler)
        else:
            write_small_checkpoint(folder / "model", "flax", scheduler)
        latents = np.random.default_rng(0).standard_normal((1, BATCH, 4, 8, 8), dtype=np.float32)
        np.save(folder / "latents.npy", latents)
        command = [flax_python, __file__, "--theirs", scratch, "--steps", str(steps), *(["--xl"] if xl else [])]
        subprocess.run(command, check=True)
        ours(folder, steps, xl)
        got, want = np.load(folder / "ours.npz"), np.load(folder / "theirs.npz")
        worst = np.inf
        for name in want:
            error = np.mean((got[name].astype(np.float64) - want[name]) ** 2)
            decibels = 10 * np.log10(1 / max(error, 1e-30))
            worst = min(worst, decibels)
            difference = np.abs(got[name] - want[name]).max()
            print(f"{class_name(xl)}, same {name}: PSNR {decibels:.1f} dB, largest difference {difference:.1e}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flax-python", help="interpreter that has the old classes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--xl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.theirs:
        theirs(args.theirs, args.steps, args.xl)
        return
    sys.path.insert(0, str(Path(__file__).parents[2]))
    worst = min(compare(args.flax_python, args.steps, xl) for xl in (False, True))
    if worst < LEAST:
        raise SystemExit(f"below {LEAST} dB")


if __name__ == "__main__":
    main()
