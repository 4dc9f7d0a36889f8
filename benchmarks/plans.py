"""Compile programs for TPUs and GPUs that are not here, for the tables of docs/tpu.md and docs/gpu.md.

    python benchmarks/plans.py tpu [--only v5e] [--output plans.json]
    python benchmarks/plans.py gpu
    JAX_PLATFORMS=cpu python benchmarks/plans.py bounds

``bounds`` compiles nothing: it counts the FLOPs of the denoiser and the decoder as written. The others need ``pip
install ".[tpu]"`` or ``".[cuda]"`` and no device. An SDXL plan takes some three minutes for a TPU on two cores, half of
one for a GPU; what the same code has compiled before is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import canvax
from canvax.compile.programs import Programs
from canvax.families.known import PRESETS
from canvax.models.decode import decode_images
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import abstract_params, device_bytes
from canvax.planning.flops import count_flops, evaluation_flops
from canvax.planning.targets import parse_target


class Case(NamedTuple):
    """What is planned, and the seconds for the batch that ``source`` published."""

    model: str
    target: str
    batch: int
    side: int
    steps: int
    published: float | None = None
    source: str = ""
    guided: bool = True
    quantize: str | None = None


BLOG = "diffusers Flax, SDXL on TPU v5e, 2023"
GUIDE = "diffusers Flax, Stable Diffusion guide, 2022"
MAXDIFFUSION = "MaxDiffusion, 8 chips, an image on each"
TPU = [
    Case("sd14", "tpu-v2:2x2", 8, 512, 50, 7.0, GUIDE),
    Case("sdxl", "tpu-v5e:2x2", 4, 1024, 20, 2.33, BLOG),
    Case("sdxl", "tpu-v5e:2x4", 8, 1024, 20),
    Case("sdxl", "tpu-v4:2x2x1", 4, 1024, 20, 2.16, BLOG),
    Case("sdxl", "tpu-v5e:2x2", 8, 1024, 20, 4.99, BLOG),
    Case("sdxl", "tpu-v4:2x2x1", 8, 1024, 20, 4.17, BLOG),
    Case("sdxl", "tpu-v6e:2x2", 4, 1024, 20),
    Case("sdxl", "tpu-v5p:2x2x1", 4, 1024, 20),
    Case("flux2-klein-4b", "tpu-v6e:1x1", 1, 1024, 4, guided=False),
    Case("z-image", "tpu-v6e:1x1", 1, 1024, 8, 2.24, MAXDIFFUSION, guided=False),
    Case("krea-2", "tpu-v6e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("flux2-klein-4b", "tpu-v5e:1x1", 1, 1024, 4, guided=False, quantize="int8"),
    Case("z-image", "tpu-v5e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("flux1-dev", "tpu-v6e:1x1", 1, 1024, 28, guided=False, quantize="int8"),
    Case("anima", "tpu-v6e:1x1", 1, 1024, 30),
]
BOUNDS = [
    Case("flux1-dev", "gpu-h200", 1, 1024, 28, 3.50, "SGLang", guided=False),
    Case("flux1-dev", "gpu-h100", 1, 1024, 28, 4.30, "xDiT", guided=False),
    Case("flux1-dev", "gpu-rtx4090", 1, 1024, 28, guided=False, quantize="int8"),
    Case("flux1-dev", "tpu-v6e:1x1", 1, 1024, 28, 6.0, "torch_xla, 4 chips, an image on each", guided=False,
         quantize="int8"),
    Case("flux1-dev", "tpu-v5e:1x1", 1, 1024, 28, guided=False, quantize="int8"),
    Case("anima", "gpu-h200", 1, 1024, 30),
    Case("anima", "gpu-rtx4090", 1, 1024, 30),
    Case("anima", "tpu-v6e:1x1", 1, 1024, 30),
    Case("anima", "tpu-v5e:1x1", 1, 1024, 30, 21.0, "a fork of MaxDiffusion"),
]  # fmt: skip
GPU = [
    *(Case("sd15", f"gpu-{name}", 1, 512, 50) for name in ("l4", "rtx4090", "a100-40gb", "h100")),
    *(Case("sdxl", f"gpu-{name}", 1, 1024, 30) for name in ("l4", "rtx4090", "a100-40gb", "h100")),
    *(Case("sdxl", f"gpu-{name}", 8, 1024, 20) for name in ("l4", "a100-40gb", "h200")),
    Case("sdxl", "gpu-h100:8", 8, 1024, 30),
]
GIB = 2**30


def main() -> None:
    """Plan each case, writing the results as they come; the tables go to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["tpu", "gpu", "bounds"])
    parser.add_argument("--only", default="", help="cases whose model, target and batch contain this")
    parser.add_argument("--output", type=Path, help="also write everything as JSON")
    arguments = parser.parse_args()
    if arguments.platform == "bounds":
        print("\n".join(bounds(case for case in BOUNDS if arguments.only in f"{case.model} {case.target}")))
        return
    results = []
    for case in TPU if arguments.platform == "tpu" else GPU:
        if arguments.only not in f"{case.model} {case.target} {case.batch}":
            continue
        plan = canvax.plan(
            case.model,
            case.target,
            batch=case.batch,
            height=case.side,
            width=case.side,
            steps=case.steps,
            guided=case.guided,
            quantize=case.quantize,
            announce=progress,
        )
        for program in plan.programs:
            if program.collectives_in_loop:
                raise SystemExit(f"{case.model} on {case.target}: {program.collectives_in_loop} in the loop over steps")
        results.append({**plan.to_dict(), "published_seconds": case.published, "published_by": case.source})
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for table in (whole(results), parts(results)):
        print("\n".join(table), end="\n\n")


def bounds(cases: Iterable[Case]) -> list[str]:
    """A row for each case: the least time of a step and of decoding, by FLOPs at the peak and weights read once."""
    lines = ["| model | chip | weights | steps | TFLOP a step | a step ms | decoding ms | bound s | published s |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for case in cases:
        networks, chip, mesh = PRESETS[case.model], parse_target(case.target).chip, make_mesh(jax.devices()[:1])
        params = {name: abstract_params(spec, "bfloat16", mesh) for name, spec in networks.specs().items()}
        latents = networks.latent_shape(case.batch, case.side, case.side)
        step = evaluation_flops(Programs(networks, mesh), params, latents, guided=case.guided)
        shape = jax.ShapeDtypeStruct(latents, jnp.float32)
        decoding = count_flops(partial(decode_images, cfg=networks.vae), params["vae"], shape) / chip.flops
        component, one = networks.denoiser.component, {"data": 1, "model": 1}
        weights = device_bytes(networks.specs(case.quantize)[component], jnp.dtype("bfloat16"), one)
        least = max(step / chip.flops, weights / chip.bandwidth)
        lines.append(
            f"| {case.model} | {case.target} | {case.quantize or 'bfloat16'} | {case.steps} | {step / 1e12:.1f} "
            f"| {least * 1e3:.0f} | {decoding * 1e3:.1f} | {case.steps * least + decoding:.2f} "
            f"| {seconds(case.published)} |"
        )
    return lines


def progress(what: str, seconds: float | None) -> None:
    """A line on stderr for each compilation."""
    print(f"{what}: compiling" if seconds is None else f"{what}: {seconds:.0f} s", file=sys.stderr, flush=True)


def whole(results: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each plan: memory and the time of a batch beside what was published."""
    lines = [
        "| model | chips | pictures | GiB of each | fits | bound s | estimate s | published s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        pictures = f"{one['batch']} of {one['width']} x {one['height']}, {one['steps']} steps"
        if one["memory"] is None:
            lines.append(f"| {one['model']} | {one['target']} | {pictures} | | no | | | |")
            continue
        memory = f"{one['memory']['peak_bytes'] / GIB:.1f} of {one['device']['usable_bytes'] / GIB:.2f}"
        lines.append(
            f"| {one['model']} | {one['target']} | {pictures} | {memory} | {'yes' if one['fits'] else 'no'} "
            f"| {one['bound_seconds']:.2f} | {seconds(one['estimated_seconds'])} "
            f"| {seconds(one['published_seconds'])} |"
        )
    return lines


def seconds(amount: float | None) -> str:
    """A figure, or nothing."""
    return "" if amount is None else f"{amount:.2f}"


def parts(results: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each program of each plan, on one device."""
    last = "estimate ms" if any(one["estimated_seconds"] for one in results) else "kernels"
    lines = [
        f"| model, chips, pictures | program | TFLOP | GB moved | temporaries GiB | bound ms | {last} | collectives |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        for program in one["programs"]:
            kinds = ", ".join(f"{count} {name}" for name, count in program["collectives"].items()) or "none"
            figure = program["kernels"] if last == "kernels" else f"{program['seconds'] * 1e3:.1f}"
            lines.append(
                f"| {one['model']}, {one['target']}, {one['batch']} | {program['name']} "
                f"| {program['flops'] / 1e12:.2f} | {program['hbm_bytes'] / 1e9:.1f} "
                f"| {program['temporary_bytes'] / GIB:.2f} | {program['bound_seconds'] * 1e3:.1f} | {figure} "
                f"| {kinds} |"
            )
    return lines


if __name__ == "__main__":
    main()
