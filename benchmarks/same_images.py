"""The same images before and after a change of the code: some sixty calls, recorded once and compared later.

    python -m benchmarks.same_images record FILE.npz
    python -m benchmarks.same_images compare FILE.npz [--only WORD]

Records the latents and the pixels of calls of the public API alone, so that the same script runs on older and newer
code: set PYTHONPATH to the `src` of another checkout. `compare` prints a line for each call and ends with 1 if latents
differ by more than 1e-5 of their largest value, or pixels of 0..1 by more than 1e-3; where a call gives no latents its
pixels are held to what latents are. On another machine or with another JAX the last bits differ.

The models are the one in the package and a tiny SDXL with its refiner, whose random weights are made here from names
and shapes alone. All runs on the CPU, whose eight virtual devices stand for eight of a real machine.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CANVAX_CACHE_DIR"] = "off"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import canvax
from benchmarks.lab.tiny_xl import tiny_xl
from canvax import flax_api

TOLERANCE = 1e-5
"""Of the largest latent."""

PIXELS = 1e-3
"""Where there are latents too: a quarter of a step of eight bits."""

APPLE = "a red apple"
THREE = ["a red apple", "a dog face", "a lemon"]
EIGHT = [*THREE, "a house", "a sunflower", "an umbrella", "a fire engine", "a clock"]
LEVELS = (14.6, 9.0, 5.0, 2.5, 1.0, 0.4, 0.0)


@dataclass(frozen=True)
class Drawn:
    """What a call gave: latents [..., h, w, C] or [..., C, h, w], pixels [..., H, W, 3]; None for what it did not."""

    latents: Any = None
    pixels: Any = None

    def arrays(self) -> dict[str, np.ndarray]:
        """Both by name, as float32."""
        return {name: np.asarray(one, np.float32) for name, one in vars(self).items() if one is not None}


# The models


@cache
def pipeline(model: str) -> canvax.Pipeline:
    """The model on one device; "emoji int8" and the like in its variants, "emoji 4x2" on a mesh of data=4, model=2."""
    name, _, variant = model.partition(" ")
    more: dict[str, Any] = {"mesh": canvax.make_mesh(jax.devices()[:1])}
    if "x" in variant:
        data, ways = map(int, variant.split("x"))
        more = {"mesh": canvax.make_mesh(data=data, model=ways)}
    elif variant:
        more |= {"quantize": variant} if variant == "int8" else {"dtype": variant}
    return canvax.load(name if name == "emoji" else tiny_xl(name), **more, progress=False)


# The calls

CALLS: dict[str, Callable[[], Drawn]] = {}
"""Each by its name; none depends on another."""


def draw(
    model: str = "emoji", prompt: Any = APPLE, steps: int = 6, guidance: float = 7.0, seed: Any = 7, **keywords: Any
) -> Any:
    """One call of a pipeline; what the call itself does not take are options."""
    names = ("negative_prompt", "height", "width", "num_images_per_prompt", "sampler", "latents")
    arguments = {name: keywords.pop(name) for name in names if name in keywords}
    options = canvax.Options(progress=False, **keywords)
    return pipeline(model)(
        prompt, num_inference_steps=steps, guidance_scale=guidance, seed=seed, options=options, **arguments
    )


def call(name: str, model: str = "emoji", **keywords: Any) -> None:
    """Add one plain call to :data:`CALLS`."""

    def made() -> Drawn:
        result = draw(model, **keywords)
        return Drawn(result.latents, result.pixels if len(result.images) else None)

    CALLS[name] = made


def special(name: str) -> Callable[[Callable[[], Drawn]], Callable[[], Drawn]]:
    """Add a call that is more than one line."""

    def kept(made: Callable[[], Drawn]) -> Callable[[], Drawn]:
        CALLS[name] = made
        return made

    return kept


call("the checkpoint's own sampler")
for sampler in ("ddim", "pndm", "euler", "euler_a", "dpmpp_2m", "DPM++ 2M Karras", "dpmpp_2m_sde", "unipc", "deis"):
    call(f"{sampler}, 6 steps", sampler=sampler)
for sampler in ("heun", "dpm2", "dpm2_a", "dpmpp_2s_a", "dpmpp_sde"):
    call(f"{sampler}, 4 steps", sampler=sampler, steps=4)
for sampler in ("lms", "sa_solver", "dpmpp_3m_sde", "dpm_single_3"):
    call(f"{sampler}, 8 steps", sampler=sampler, steps=8)
for sampler in ("lcm", "tcd", "ipndm", "ddpm"):
    call(f"{sampler}, 5 steps, guidance 1", sampler=sampler, steps=5, guidance=1.0)
call("more steps than one window: 21", steps=21, sampler="dpmpp_2m")

call("negative prompt", negative_prompt="a green leaf")
call("guidance 1", guidance=1.0)
call("clip_skip", clip_skip=1)
call("noise of PyTorch", noise="torch")
call("guidance_steps", guidance_steps=(9, 7, 5, 3, 2, 1.5))
call("guidance_interval", guidance_interval=(0.2, 0.7), steps=8)
call("guidance_rescale", guidance_rescale=0.7)
call("eta of DDIM", sampler="ddim", eta=0.7)
call("eta of Euler a", sampler="euler_a", eta=0.3)
call("own levels", sampler="euler", sigmas=LEVELS)
call("a curve", sampler="unipc", sigmas="exponential")
call("spacing linspace", sampler="euler", spacing="linspace")
call("spacing leading", sampler="ddim", spacing="leading")
call("s_churn", sampler="heun", steps=4, sampler_settings={"s_churn": 2})
call("own timesteps", sampler="ddim", steps=4, sampler_settings={"timesteps": [999, 700, 400, 150]})
call("reuse=2", reuse=2, steps=8)
call("reuse=3", reuse=3, steps=8)
call("reuse=3, dpmpp_2m, guidance 1", reuse=3, steps=8, sampler="dpmpp_2m", guidance=1.0)
call("reuse=2, reuse_layers=2", reuse=2, reuse_layers=2, steps=8)
call("reuse=3, reuse_layers=2", reuse=3, reuse_layers=2, steps=8, sampler="euler_a")
call("reuse=2, guidance_interval", reuse=2, steps=8, guidance_interval=(0.0, 0.5))
call("first part of a run", denoising_end=0.6, sampler="euler")
call("latents given", latents=np.random.default_rng(5).standard_normal((1, 8, 8, 32), np.float32))

call("64 x 96", height=64, width=96)
call("128 x 64", height=128, width=64)
call("1088 x 64 in two tiles", height=1088, width=64, tiling="on", guidance=1.0, steps=2)
call("three prompts", prompt=THREE, negative_prompt=["", "a cat", "a green leaf"], sampler="euler_a")
call("two prompts, two images each, own seeds", prompt=THREE[:2], num_images_per_prompt=2, seed=[3, 1, 4, 1])
call("int8", "emoji int8")
call("bfloat16", "emoji bfloat16")
call("data=8", "emoji 8x1", prompt=EIGHT)
call("data=8, three images", "emoji 8x1", prompt=THREE, sampler="euler_a")
call("data=4, model=2", "emoji 4x2", prompt=EIGHT[:4], sampler="dpmpp_2m")

call("SDXL", "sdxl", steps=4)
call("SDXL, guidance 1", "sdxl", steps=4, guidance=1.0)
call("SDXL, empty negative prompt", "sdxl", steps=4, negative_prompt="")
call("SDXL, clip_skip", "sdxl", steps=4, clip_skip=1, negative_prompt="a cat", sampler="dpmpp_2m")
call(
    "SDXL, second prompts and sizes", "sdxl", steps=4, negative_prompt="a cat", prompt_2="oil on canvas",
    negative_prompt_2="a photo", original_size=(96, 128), crops_coords_top_left=(8, 16), target_size=(64, 80),
    negative_original_size=(32, 32), negative_crops_coords_top_left=(4, 0), negative_target_size=(48, 64),
)  # fmt: skip
call("SDXL, three prompts", "sdxl", prompt=THREE, prompt_2=THREE[::-1], steps=4)
call("SDXL, reuse=2", "sdxl", reuse=2, steps=6)


@special("latents handed over")
def _handed_over() -> Drawn:
    half = draw(denoising_end=0.6, sampler="euler_a")
    result = draw(denoising_start=0.6, sampler="euler_a", latents=half.latents)
    return Drawn(result.latents, result.pixels)


@special("SDXL to its refiner")
def _refined() -> Drawn:
    half = draw("sdxl", steps=8, denoising_end=0.7)
    result = draw(
        "refiner", steps=8, denoising_start=0.7, latents=half.latents, aesthetic_score=7.0, negative_aesthetic_score=2.0
    )
    return Drawn(result.latents, result.pixels)


@special("what a callback sees")
def _seen() -> Drawn:
    """Noisy latents as latents, what the network takes the picture to be as pixels; of each step."""
    steps: list[canvax.Step] = []
    draw(callback=steps.append, sampler="heun", steps=3)
    return Drawn(np.stack([step.latents for step in steps]), np.stack([step.denoised for step in steps]))


@special("parameters of one's own")
def _own_parameters() -> Drawn:
    pipe = pipeline("emoji")
    assert pipe.params is not None
    params = pipe.params | {"unet": jax.tree.map(lambda leaf: 0.99 * leaf, pipe.params["unet"])}
    options = canvax.Options(progress=False)
    result = pipe(APPLE, num_inference_steps=6, guidance_scale=7.0, seed=7, options=options, params=params)
    return Drawn(result.latents, result.pixels)


# The names of the old Flax pipelines


@cache
def flax_pipeline(xl: bool = False) -> tuple[Any, Any]:
    """Pipeline and parameters."""
    if xl:
        return flax_api.FlaxStableDiffusionXLPipeline.from_pretrained(tiny_xl("sdxl"))
    return flax_api.FlaxStableDiffusionPipeline.from_pretrained("emoji")


@special("flax: jit=False")
def _flax_plain() -> Drawn:
    pipe, params = flax_pipeline()
    ids, negative = pipe.prepare_inputs(THREE), pipe.prepare_inputs(["a cat"] * 3)
    key = jax.random.PRNGKey(3)
    return Drawn(pixels=pipe(ids, params, key, num_inference_steps=6, neg_prompt_ids=negative).images)


@special("flax: jit=False, another scheduler, guidance of each image")
def _flax_scheduler() -> Drawn:
    pipe, params = flax_pipeline()
    scheduler, state = flax_api.FlaxDPMSolverMultistepScheduler.from_pretrained("emoji", subfolder="scheduler")
    del scheduler
    ids, scales = pipe.prepare_inputs(THREE), jnp.array([2.0, 4.0, 7.0])
    params = params | {"scheduler": state}
    images = pipe(ids, params, jax.random.key(3), num_inference_steps=5, guidance_scale=scales).images
    return Drawn(pixels=images)


@special("flax: jit=True on eight devices")
def _flax_sharded() -> Drawn:
    pipe, params = flax_pipeline()
    ids, keys = flax_api.shard(pipe.prepare_inputs(EIGHT)), jax.random.split(jax.random.PRNGKey(0), 8)
    return Drawn(pixels=pipe(ids, flax_api.replicate(params), keys, num_inference_steps=5, jit=True).images)


@special("flax: _generate under jax.jit")
def _flax_generate() -> Drawn:
    pipe, params = flax_pipeline()
    generate = jax.jit(pipe._generate, static_argnums=(3, 4, 5, 9))
    given = (pipe.prepare_inputs([APPLE]), params, jax.random.PRNGKey(3), 4, 256, 256, jnp.float32(5.0), None, None)
    return Drawn(generate(*given, True), generate(*given, False))


@special("flax XL: jit=False")
def _flax_xl() -> Drawn:
    pipe, params = flax_pipeline(xl=True)
    ids, key = pipe.prepare_inputs(THREE[:2]), jax.random.PRNGKey(3)
    latents = pipe(ids, params, key, num_inference_steps=4, output_type="latent").images
    return Drawn(latents, pipe(ids, params, key, num_inference_steps=4).images)


@special("flax XL: jit=True on eight devices")
def _flax_xl_sharded() -> Drawn:
    pipe, params = flax_pipeline(xl=True)
    ids, negative = (flax_api.shard(pipe.prepare_inputs(one)) for one in (EIGHT, ["a cat"] * 8))
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    keywords = {"num_inference_steps": 4, "neg_prompt_ids": negative, "output_type": "latent", "jit": True}
    return Drawn(pipe(ids, flax_api.replicate(params), keys, **keywords).images)


# Recording and comparing


def record(file: Path) -> int:
    """Draw everything and write it down."""
    arrays = {}
    for name, made in CALLS.items():
        began = time.perf_counter()
        drawn = made().arrays()
        shapes = ", ".join(f"{kind} {'x'.join(map(str, array.shape))}" for kind, array in drawn.items())
        print(f"{name:<58} {time.perf_counter() - began:6.1f} s  {shapes}", flush=True)
        if not all(np.isfinite(array).all() for array in drawn.values()):
            print(f"{name}: not finite", file=sys.stderr)
            return 1
        arrays |= {f"{name}|{kind}": array for kind, array in drawn.items()}
    np.savez_compressed(file, **arrays)
    return 0


def compare(file: Path, only: str | None) -> int:
    """Draw everything again and say what differs."""
    with np.load(file) as recorded:
        old = dict(recorded)
    wrong, same = [], 0
    for name, made in CALLS.items():
        if only and only.lower() not in name.lower():
            continue
        told, good = _compared(name, made, old)
        same += "differ" not in told and good
        print(f"{name:<58} {told}{'' if good else '   <-- WRONG'}", flush=True)
        if not good:
            wrong.append(name)
    lost = sorted({name.partition("|")[0] for name in old} - CALLS.keys())
    for name in lost:
        print(f"{name:<58} recorded, but no call of this script")
    print(f"{same} the same bits; {len(wrong)} wrong{': ' + '; '.join(wrong) if wrong else ''}")
    return 1 if wrong or lost else 0


def _compared(name: str, made: Callable[[], Drawn], old: dict[str, np.ndarray]) -> tuple[str, bool]:
    """A line about one call, and whether it is as it was."""
    try:
        new = made().arrays()
    except Exception:
        traceback.print_exc()
        return "failed", False
    before = {kind: old[key] for kind in ("latents", "pixels") if (key := f"{name}|{kind}") in old}
    if before.keys() != new.keys():
        return f"has {', '.join(new) or 'nothing'}; recorded {', '.join(before) or 'nothing'}", False
    good, told = True, []
    for kind, was in before.items():
        now = new[kind]
        if was.shape != now.shape:
            return f"{kind} {now.shape}; recorded {was.shape}", False
        if np.array_equal(was, now):
            told.append(f"{kind} same bits      ")
            continue
        off = float(np.abs(was - now).max())
        told.append(f"{kind} differ {off:8.1e}")
        decisive = kind == "latents" or "latents" not in before
        good &= off <= (TOLERANCE * float(np.abs(was).max()) if decisive else PIXELS)
    return "  ".join(told), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", metavar="WORD", help="compare the calls alone that have this in their names")
    arguments = parser.parse_args()
    if arguments.only and arguments.what == "record":
        parser.error("--only is for compare")
    print(f"canvax of {Path(canvax.__file__).parent}, JAX {jax.__version__}")
    began = time.perf_counter()
    status = record(arguments.file) if arguments.what == "record" else compare(arguments.file, arguments.only)
    print(f"{len(CALLS)} calls, {time.perf_counter() - began:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
