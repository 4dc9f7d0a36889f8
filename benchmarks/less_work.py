"""Less work for nearly the same picture: what each option costs in PSNR and saves in time.

    python benchmarks/less_work.py [--model emoji] [--size 64] [--steps 20] [--fast] [--full-size] [--output FOLDER]

Draws 16 prompts with each option, the options taking turns batch by batch, and prints the table of docs/less-work.md:
PSNR of the pictures against those of the full run with the same sampler, and the time of the denoising against its.
Writes less-work.png, some of the pictures side by side. --fast compares quality="fast" with fewer steps instead, at 30
steps: PSNR against the full run of the sampler, and against 1,000 steps of DDIM. --full-size times the UNet of Stable
Diffusion 1.5 on random weights (5 GB): an evaluation in full against one that reuses its deep features and one with
weights of 8 bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter

import canvax
from canvax.families.known import PRESETS
from canvax.models.deep_features import deep_shape, unet_reusing
from canvax.models.unet import unet, unet_context, unet_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten, init_params, unflatten
from canvax.quantize import KINDS, quantize, quantized_spec, scale_of

PROMPTS = (
    *("a red apple", "a cat", "a dog", "a tree", "a yellow car", "a house", "a slice of pizza", "a blue heart"),
    *("a smiling face", "a rocket", "a guitar", "a green frog", "an umbrella", "a star", "a fish", "a birthday cake"),
)
BATCH = 4
RUNS: dict[str, dict[str, Any]] = {
    "full run": {},
    "half the steps": {"halved": True},
    "guidance_interval=(0, 0.8)": {"guidance_interval": (0.0, 0.8)},
    "guidance_interval=(0, 0.5)": {"guidance_interval": (0.0, 0.5)},
    "reuse=2": {"reuse": 2},
    "reuse=3": {"reuse": 3},
    "reuse=5": {"reuse": 5},
    "reuse=3, reuse_layers=3": {"reuse": 3, "reuse_layers": 3},
    **{f"quantize={kind!r}": {"quantize": kind} for kind in KINDS},
    "DPM++ 2M: full run": {"sampler": "dpmpp_2m"},
    "DPM++ 2M: half the steps": {"sampler": "dpmpp_2m", "halved": True},
    "DPM++ 2M: reuse=2": {"sampler": "dpmpp_2m", "reuse": 2},
}
FAST = ("DDIM", "DPM++ 2M", "DPM++ 2M Karras")
"""Samplers of --fast."""
SHOWN = ("full run", "half the steps", "guidance_interval=(0, 0.8)", "reuse=2", "reuse=3", "reuse=5")


def psnr(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each picture [B, H, W, 3] in 0..1."""
    return 10 * np.log10(1 / np.maximum(np.square(got - want).mean((1, 2, 3)), 1e-10))


def ssim(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Structural similarity of each picture, the mean of its channels (Wang et al. 2004, equation 13)."""

    def local(values: np.ndarray) -> np.ndarray:
        return gaussian_filter(values, (0, 1.5, 1.5, 0), truncate=3.5)

    x, y = local(got), local(want)
    spread = local(got**2) - x**2 + local(want**2) - y**2
    shared = local(got * want) - x * y
    of_each = (2 * x * y + 1e-4) * (2 * shared + 9e-4) / ((x**2 + y**2 + 1e-4) * (spread + 9e-4))
    return of_each.mean((1, 2, 3))


def draw(
    pipes: dict[str | None, canvax.Pipeline], first: int, run: dict[str, Any], steps: int, size: int | None
) -> canvax.Result:
    """One batch."""
    options = {name: value for name, value in run.items() if name not in ("sampler", "halved", "quantize", "steps")}
    return pipes[run.get("quantize")](
        list(PROMPTS[first : first + BATCH]),
        seed=first,
        height=size,
        width=size,
        num_inference_steps=run.get("steps", steps // 2 if run.get("halved") else steps),
        sampler=run.get("sampler"),
        options=canvax.Options(progress=False, **options),
    )


def compare(pipes: dict[str | None, canvax.Pipeline], steps: int, size: int | None) -> dict[str, np.ndarray]:
    """Print the table; returns the pictures of each run [B, H, W, 3]."""
    pixels: dict[str, list[np.ndarray]] = {name: [] for name in RUNS}
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    for run in RUNS.values():
        draw(pipes, 0, run, steps, size)  # compiles
    for first in range(0, len(PROMPTS), BATCH):
        for name, run in RUNS.items():
            result = draw(pipes, first, run, steps, size)
            pixels[name].append(result.pixels)
            seconds[name].append(result.timings["denoise"])
    drawn = {name: np.concatenate(parts) for name, parts in pixels.items()}
    print("| | PSNR, mean dB | median | lowest | of | SSIM, mean | lowest | time / full | speed |\n" + "|---" * 9 + "|")
    for name, run in RUNS.items():
        full = "DPM++ 2M: full run" if run.get("sampler") else "full run"
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[full], strict=True))
        each = psnr(drawn[name], drawn[full])
        alike = ssim(drawn[name], drawn[full])
        figures = f"{each.mean():.1f} | {np.median(each):.1f} | {each.min():.1f} | {PROMPTS[each.argmin()]} |"
        figures = "| " * 6 if name == full else f"{figures} {alike.mean():.3f} | {alike.min():.3f} |"
        print(f"| {name} | {figures} {ratio:.2f} | {1 / ratio:.2f} x |", flush=True)
    return drawn


def fast(pipe: canvax.Pipeline, size: int | None, steps: int = 30) -> None:
    """Print three rows for each sampler of FAST: the full run, the fast one, and as many evaluations in full."""
    pipes: dict[str | None, canvax.Pipeline] = {None: pipe}
    draw(pipes, 0, {"steps": 2}, steps, size)  # compiles
    firsts = range(0, len(PROMPTS), BATCH)
    exact = np.concatenate([draw(pipes, first, {"steps": 1000}, steps, size).pixels for first in firsts])
    head = f"| | evaluations | PSNR to {steps} steps, mean dB | lowest | to 1,000 steps | lowest | speed |"
    print(head + "\n" + "|---" * 7 + "|")
    for sampler in FAST:
        fast = {"sampler": sampler, "quality": "fast"}
        fewer = {"sampler": sampler, "steps": evaluations(draw(pipes, 0, fast, steps, size))}
        runs = {"full": {"sampler": sampler}, "fast": fast, "fewer steps": fewer}
        drawn = [{name: draw(pipes, first, run, steps, size) for name, run in runs.items()} for first in firsts]
        pixels = {name: np.concatenate([results[name].pixels for results in drawn]) for name in runs}
        for name in runs:
            speed = statistics.median(one["full"].timings["denoise"] / one[name].timings["denoise"] for one in drawn)
            near, right = psnr(pixels[name], pixels["full"]), psnr(pixels[name], exact)
            figures = [f"{near.mean():.1f}", f"{near.min():.1f}"] if name != "full" else ["", ""]
            figures += [f"{right.mean():.1f}", f"{right.min():.1f}", f"{speed:.2f} x"]
            print("|", " | ".join([f"{sampler}, {name}", str(evaluations(drawn[0][name])), *figures]), "|", flush=True)


def evaluations(result: canvax.Result) -> int:
    """The evaluations of a run."""
    return round(result.timings["denoise"] / result.timings["step"])


def grid(drawn: dict[str, np.ndarray], cell: int = 96, label: int = 200, shown: int = 8) -> Image.Image:
    """A row for each of SHOWN, a column for each of the first prompts."""
    sheet = Image.new("RGB", (label + cell * shown, cell * len(SHOWN)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for i, name in enumerate(SHOWN):
        pen.text((label - 8, cell * (i + 0.5)), name.replace("=(", "\n= ("), "black", font, anchor="rm", align="right")
        for j, one in enumerate(drawn[name][:shown]):
            image = Image.fromarray((one * 255).round().astype(np.uint8))
            image = image.resize((cell - 2, cell - 2), Image.Resampling.LANCZOS)
            sheet.paste(image, (label + cell * j, cell * i))
    return sheet


def full_size(rounds: int = 3) -> None:
    """Print what an evaluation of the UNet takes at 512 x 512, guided, in full and with its deep features reused."""
    cfg = PRESETS["sd15"].config
    params = jax.device_put(init_params(unet_spec(cfg), 0))
    x = np.random.default_rng(0).standard_normal((2, 64, 64, 4)).astype(np.float32)
    arguments = (x, np.full(2, 500.0, np.float32), np.zeros((2, 77, cfg.cross_attention_dim), np.float32))

    def outer(p: Any, x: Any, times: Any, text: Any, deep: Any, layers: int) -> Any:
        context = unet_context(p, x, times, text, cfg)
        return unet_reusing(p, x, context, cfg, layers=layers, recall=lambda compute: (deep, None))[0]

    for layers in (1, 2, 3):
        deep = np.zeros(deep_shape(cfg, x.shape, layers), np.float32)
        programs = {
            True: jax.jit(partial(unet, cfg=cfg)).lower(params, *arguments).compile(),
            False: jax.jit(partial(outer, layers=layers)).lower(params, *arguments, deep).compile(),
        }
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(rounds + 1):
            for full, program in programs.items():
                began = time.perf_counter()
                jax.block_until_ready(program(params, *arguments, *([] if full else [deep])))
                if turn:
                    seconds[full].append(time.perf_counter() - began)
        whole, rest = (statistics.median(seconds[full]) for full in (True, False))
        print(
            f"reuse_layers={layers}: {whole:.2f} s in full, {rest:.2f} s reusing, {rest / whole:.3f} of it; 20 "
            f"evaluations, 8 of them in full: {20 * whole / (8 * whole + 12 * rest):.2f} x as fast",
            flush=True,
        )


def variants(rounds: int = 3) -> None:
    """Print time and memory of the same evaluation with weights of 8 bits, taking turns."""
    cfg = PRESETS["sd15"].config
    spec = unet_spec(cfg)
    noise = np.random.default_rng(0).standard_normal((2, 64, 64, 4)).astype(np.float32)
    text = np.zeros((2, 77, cfg.cross_attention_dim), np.float32)
    arguments = (noise, np.full(2, 500.0, np.float32), text)
    whole = init_params(spec, 0)
    placed = jax.device_put(whole)
    made: dict[str, tuple[Any, Any]] = {}
    for kind in ("as it is", *KINDS):
        params = jax.device_put(narrowed(whole, quantized_spec(spec, kind))) if kind in KINDS else placed
        made[kind] = jax.jit(partial(unet, cfg=cfg)).lower(params, *arguments).compile(), params
    seconds: dict[str, list[float]] = {kind: [] for kind in made}
    for turn in range(rounds + 1):
        for kind, (program, params) in made.items():
            began = time.perf_counter()
            jax.block_until_ready(program(params, *arguments))
            if turn:
                seconds[kind].append(time.perf_counter() - began)
    full = statistics.median(seconds["as it is"])
    for kind, (program, params) in made.items():
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        temporary = program.memory_analysis().temp_size_in_bytes
        median = statistics.median(seconds[kind])
        print(
            f"{kind}: {median:.2f} s, {median / full:.2f} x; weights {held / 1e9:.2f} GB, beside them "
            f"{temporary / 1e9:.2f} GB",
            flush=True,
        )


def narrowed(params: Any, spec: Any) -> Any:
    """Random weights as loading would have quantised them."""
    given, narrow = dict(flatten(params)), {}
    declared = dict(flatten(spec))
    for name, param in declared.items():
        if scale := scale_of(name, declared):
            narrow[name], narrow[scale] = quantize(given[name], param.dtype)
        elif name in given:
            narrow[name] = given[name]
    return unflatten(narrow)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji", help="emoji, a folder, or a Hub id (emoji)")
    parser.add_argument("--size", type=int, help="pixels of a side (the model's own)")
    parser.add_argument("--steps", type=int, default=20, help="of the full run; the lists of RUNS are made for 20")
    parser.add_argument("--fast", action="store_true", help="compare quality='fast' with fewer steps, at 30 steps")
    parser.add_argument("--full-size", action="store_true", help="time Stable Diffusion 1.5's UNet on random weights")
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="a folder (docs/images)")
    options = parser.parse_args(arguments)
    if options.full_size:
        full_size()
        variants()
        return
    mesh = make_mesh(jax.devices()[:1])
    if options.fast:
        fast(canvax.load(options.model, mesh=mesh), options.size)
        return
    pipes = {kind: canvax.load(options.model, mesh=mesh, quantize=kind) for kind in (None, *KINDS)}
    drawn = compare(pipes, options.steps, options.size)
    grid(drawn).quantize(256, dither=Image.Dither.NONE).save(options.output / "less-work.png", optimize=True)


if __name__ == "__main__":
    main()
