"""``canvax bench``: measure how fast this machine generates images. Compile time is reported separately."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from canvax.call import Call
from canvax.cli.arguments import versions
from canvax.cli.loading import load_with
from canvax.cli.plan import check_sides
from canvax.cli.terminal import complain, say, table
from canvax.errors import check_count
from canvax.pipelines.checks import MOST_IMAGES
from canvax.settings import check_setting
from canvax.types import HostArray

PROMPT = "a red apple"
TASKS: dict[str, dict[str, Any]] = {
    "image to image at strength 0.5": {"strength": 0.5, "mask": None},
    "inpainting": {"strength": 1.0},
}
"""The tasks of --tasks that are timed in addition to text to image."""


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Time whole images, text to pixels, and print a table."""
    check_sides(arguments)
    rounds = check_count("rounds", arguments.rounds, 1_000_000)
    batch = check_count("batch", arguments.batch, MOST_IMAGES)
    check_setting(Call, "num_inference_steps", arguments.num_inference_steps)
    import canvax

    if not arguments.quiet:
        complain(f"loading {arguments.model}")
    pipe = load_with(arguments)
    results, others = [], {name: [] for name in TASKS if arguments.tasks}
    usual: dict[str, Any] = {name: getattr(arguments, name) for name in ("height", "width", "num_inference_steps")}
    usual["seed"] = 0
    for turn in range(rounds + 1):  # the first round compiles
        if not arguments.quiet:
            complain("compiling" if turn == 0 else f"round {turn} of {rounds}")
        pipe.programs.features.clear()  # each round encodes
        result = pipe([PROMPT] * batch, **usual, options=canvax.Options(progress=False))
        results.append(result)
        for name, timed in others.items():  # side by side with it in each round
            inputs = {"image": result.pixels[0], "mask": _half(result.pixels[0])} | TASKS[name]
            inputs = {key: value for key, value in inputs.items() if value is not None}
            pipe.programs.features.clear()
            timed.append(pipe([PROMPT] * batch, **usual, **inputs, options=canvax.Options(progress=False)))
    report |= _figures(pipe, results, batch) | {"versions": versions()}
    if others:
        report["tasks"] = {name: _beside(results, timed) for name, timed in others.items()}
    if not arguments.json:
        for line in lines(report):
            say(line)


def _half(pixels: HostArray) -> HostArray:
    """Return a mask [H, W] of the upper half."""
    mask = np.zeros(pixels.shape[:2], np.float32)
    mask[: len(mask) // 2] = 1
    return mask


def _beside(results: list[Any], others: list[Any]) -> dict[str, float]:
    """Return the median ratios of a task's time to that of text to image: batch, denoising, evaluation."""
    pairs = [(ours.timings, other.timings) for ours, other in list(zip(results, others, strict=True))[1:]]
    return {
        name: statistics.median(other[key] / ours[key] for ours, other in pairs)
        for name, key in (("batch", "total"), ("denoising", "denoise"), ("evaluation", "step"))
    }


def _figures(pipe: Any, results: list[Any], batch: int) -> dict[str, Any]:
    """Return the medians over all results except the first, and the share of the devices' peak FLOP/s."""
    from canvax.kernels.target import compiling_for
    from canvax.planning.chips import peak_flops
    from canvax.planning.flops import evaluation_flops

    first, *warm = [result.timings for result in results]
    seconds = [timings["total"] for timings in warm]
    median, evaluation = statistics.median(seconds), statistics.median(timings["step"] for timings in warm)
    metadata, model, devices = results[0].metadata[0], pipe.model, pipe.programs.mesh.devices
    height, width = metadata["height"], metadata["width"]
    guided = model.family.guides(model.networks, metadata["guidance_scale"])
    with compiling_for("none"):  # count the FLOPs of the plain model, whatever kernels the device uses
        latents = model.networks.latent_shape(batch, height, width)
        flops = evaluation_flops(pipe.programs, pipe.params, latents, guided=guided) / evaluation
    kind = devices.flat[0].device_kind
    peak = peak_flops(kind, model.dtype)
    return {
        "model": model.name, "dtype": model.dtype, "width": width, "height": height, "batch": batch,
        "steps": metadata["num_inference_steps"], "sampler": metadata["sampler"],
        "guidance_scale": metadata["guidance_scale"], "mesh": dict(pipe.programs.mesh.shape),
        "device": {"platform": devices.flat[0].platform, "kind": kind, "count": devices.size},
        "compilations": results[0].compilations, "compile_s": first["compile"], "seconds": seconds, "median_s": median,
        "images_per_s": batch / median, "evaluation_s": evaluation, "flops_per_s": flops,
        "share_of_peak": flops / (peak * devices.size) if peak else None,
        "memory_bytes": pipe.memory(height, width, batch, guidance=guided).total,
    }  # fmt: skip


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    device, share = report["device"], report["share_of_peak"]
    spread = f"({min(report['seconds']):.3g}-{max(report['seconds']):.3g})"
    rows = [
        ("images a second", f"{report['images_per_s']:.3g}"),
        ("seconds for a batch", f"{report['median_s']:.3g} {spread}"),
        ("seconds an evaluation", f"{report['evaluation_s']:.3g}"),
        (
            "TFLOP/s in evaluations",
            f"{report['flops_per_s'] / 1e12:.3g}" + (f", {share:.0%} of the peak" if share else ""),
        ),
        ("memory on each device", f"{report['memory_bytes'] / 1e9:.2f} GB"),
        ("compiling (once)" if report["compilations"] else "loading programs (once)", f"{report['compile_s']:.1f} s"),
    ]
    for name, ratio in report.get("tasks", {}).items():
        rows.append((name, f"{ratio['batch']:.2f} of that time; an evaluation {ratio['evaluation']:.3f}"))
    settings = (
        f"{report['steps']} steps of {report['sampler']}, guidance {report['guidance_scale']:g}, {report['dtype']}"
    )
    size = f"{report['batch']} image{'s' if report['batch'] > 1 else ''} of {report['width']} x {report['height']}"
    head = f"{report['model']}: {size}, {settings}; {device['count']} x {device['kind']}"
    return [head, "", *table(rows)]
