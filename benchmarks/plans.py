"""Plans for TPUs beside published figures, and for GPUs: makes the tables of docs/tpu.md and docs/gpu.md.

    python benchmarks/plans.py tpu [--only v5e] [--output plans.json]
    python benchmarks/plans.py gpu

Needs ``pip install 'canvax[tpu]'`` or ``'canvax[cuda]'`` and no device. An SDXL plan takes some three minutes for a TPU
on two cores, half of one for a GPU; what the same code has compiled before is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import canvax

# (model, target, batch, side, steps, seconds published for the batch, who measured)
BLOG = "diffusers Flax, SDXL on TPU v5e, 2023"
GUIDE = "diffusers Flax, Stable Diffusion guide, 2022"
TPU: list[tuple[str, str, int, int, int, float | None, str]] = [
    ("sd14", "tpu-v2:2x2", 8, 512, 50, 7.0, GUIDE),
    ("sdxl", "tpu-v5e:2x2", 4, 1024, 20, 2.33, BLOG),
    ("sdxl", "tpu-v5e:2x4", 8, 1024, 20, None, ""),
    ("sdxl", "tpu-v4:2x2x1", 4, 1024, 20, 2.16, BLOG),
    ("sdxl", "tpu-v5e:2x2", 8, 1024, 20, 4.99, BLOG),
    ("sdxl", "tpu-v4:2x2x1", 8, 1024, 20, 4.17, BLOG),
    ("sdxl", "tpu-v6e:2x2", 4, 1024, 20, None, ""),
    ("sdxl", "tpu-v5p:2x2x1", 4, 1024, 20, None, ""),
]
GPU: list[tuple[str, str, int, int, int, float | None, str]] = [
    *(("sd15", f"gpu-{name}", 1, 512, 50, None, "") for name in ("l4", "rtx4090", "a100-40gb", "h100")),
    *(("sdxl", f"gpu-{name}", 1, 1024, 30, None, "") for name in ("l4", "rtx4090", "a100-40gb", "h100")),
    *(("sdxl", f"gpu-{name}", 8, 1024, 20, None, "") for name in ("l4", "a100-40gb", "h200")),
    ("sdxl", "gpu-h100:8", 8, 1024, 30, None, ""),
]
GIB = 2**30


def main() -> None:
    """Plan each case, writing the results as they come; the tables go to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["tpu", "gpu"])
    parser.add_argument("--only", default="", help="cases whose model, target and batch contain this")
    parser.add_argument("--output", type=Path, help="also write everything as JSON")
    arguments = parser.parse_args()
    results = []
    for model, target, batch, side, steps, published, source in TPU if arguments.platform == "tpu" else GPU:
        if arguments.only not in f"{model} {target} {batch}":
            continue
        plan = canvax.plan(
            model, target, batch=batch, height=side, width=side, steps=steps, guided=True, announce=progress
        )
        for program in plan.programs:
            if program.collectives_in_loop:
                raise SystemExit(f"{model} on {target}: {program.collectives_in_loop} in the loop over steps")
        results.append({**plan.to_dict(), "published_seconds": published, "published_by": source})
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for table in (whole(results), parts(results)):
        print("\n".join(table), end="\n\n")


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
