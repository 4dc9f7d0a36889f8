"""Plots sigma and timestep of each step, for sigma curves and spacings of a sampler.

python -m benchmarks.plot_curves karras ays trailing --steps 12 --output levels.png    # needs matplotlib
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.lab.chart import line_chart
from canvax.samplers import CURVES, build_table, find, from_scheduler_config
from canvax.samplers.options import SPACINGS

STABLE_DIFFUSION = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
"""The noise schedule of Stable Diffusion 1.x, 2.x and XL."""


def plot_curves(curves: Sequence[str], steps: int, sampler: str = "euler") -> Image.Image:
    """Two charts side by side: sigma and timestep of each step. ``curves`` are names of sigma curves or spacings."""
    scheduler = from_scheduler_config(STABLE_DIFFUSION)
    sigmas, timesteps = {}, {}
    for name in curves:
        chosen: dict[str, Any] = {"spacing": name, "sigmas": "automatic"} if name in SPACINGS else {"sigmas": name}
        table = build_table(scheduler, steps, sampler=sampler, **chosen)
        begins = np.searchsorted(table.step, np.arange(table.step[-1] + 1))
        sigmas[name] = list(enumerate(table.sigma[begins]))
        timesteps[name] = list(enumerate(table.timestep[begins]))
    title = f"{steps} steps of {find(sampler)[0].label}"
    left = line_chart(sigmas, title=title, x_label="step", y_label="sigma", log_y=True)
    right = line_chart(timesteps, title=title, x_label="step", y_label="timestep")
    image = Image.new("RGB", (left.width + right.width, left.height), "white")
    image.paste(left, (0, 0))
    image.paste(right, (left.width, 0))
    return image


def main() -> None:
    """Write the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", default=[*SPACINGS, *(curve.name for curve in CURVES)])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampler", default="euler")
    parser.add_argument("--output", type=Path, default=Path("schedules.png"))
    options = parser.parse_args()
    plot_curves(options.curves, options.steps, options.sampler).save(options.output)


if __name__ == "__main__":
    main()
