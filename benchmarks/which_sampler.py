"""The pictures of docs/which-sampler.md, drawn with the model in the package.

    python benchmarks/which_sampler.py

writes docs/images/samplers-grid.png (samplers by steps, one seed), samplers-convergence.png (distance to a solution of
1,000 steps of DDIM, against evaluations of the network) and schedules.png, and prints the table of the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import canvax
from benchmarks.lab.chart import line_chart
from benchmarks.plot_curves import plot_curves
from canvax.samplers import SAMPLERS, build_table, find

PROMPTS = ("a red apple", "a cat")
SEED = 1
GRID_STEPS = (5, 10, 20, 40)
ELSEWHERE = ("edm_euler", "edm_dpmpp_2m", "flow_euler", "flow_heun", "ddim_inverse", "lcm", "tcd")
"""Others under another name here, or made for models of their own."""
CONVERGENT = (
    *("ddim", "pndm", "heun", "dpm2", "lms", "dpmpp_2m", "dpmpp_3m", "dpm_single_2"),
    *("dpm_single_3", "unipc", "unipc_bh2", "deis", "ipndm"),
)
"""All on Karras levels, and DPM++ 2M once more on the checkpoint's own, which are trailing."""
CONVERGENCE_STEPS = (5, 7, 10, 14, 20, 28, 40)
CELL, LABEL, BLOCKS = 72, 136, 3


def draw(pipe: canvax.Pipeline, sampler: str, steps: int, **settings: object) -> canvax.Result:
    """The two pictures."""
    # Karras levels of the solvers of k-diffusion lie between the ends of the spacing: linspace has the model's own.
    spacing = "linspace" if "karras" in sampler else None
    options = canvax.Options(progress=False, sampler_settings=settings, spacing=spacing)
    return pipe(list(PROMPTS), seed=SEED, num_inference_steps=steps, sampler=sampler, options=options)


def grid(pipe: canvax.Pipeline) -> Image.Image:
    """A row for each sampler, a column for each number of steps, in blocks beside each other."""
    specs = [spec for spec in SAMPLERS if spec.name not in ELSEWHERE]
    tall = -(-len(specs) // BLOCKS)
    width = LABEL + CELL * len(GRID_STEPS)
    sheet = Image.new("RGB", (width * BLOCKS, 24 + CELL * tall), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for block in range(BLOCKS):
        for j, steps in enumerate(GRID_STEPS):
            at = block * width + LABEL + CELL * j + CELL / 2
            pen.text((at, 12), f"{steps} steps" if j == 0 else str(steps), "black", font, anchor="mm")
    for i, spec in enumerate(specs):
        left, top = i // tall * width, 24 + i % tall * CELL
        pen.text(
            (left + LABEL - 8, top + CELL / 2), spec.label.replace("-Solver++ ", "++\n"), "black", font, anchor="rm"
        )
        for j, steps in enumerate(GRID_STEPS):
            image = draw(pipe, spec.name, steps).images[1].resize((CELL - 2, CELL - 2), Image.Resampling.LANCZOS)
            sheet.paste(image, (left + LABEL + CELL * j, top))
    return sheet


def convergence(pipe: canvax.Pipeline) -> dict[str, list[tuple[float, float]]]:
    """Root mean square distance of the final latents to the solution, for each number of evaluations."""
    solution = draw(pipe, "ddim", 1000, set_alpha_to_one=True).latents
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in (*(f"{name} karras" for name in CONVERGENT), "dpmpp_2m"):
        spec, implied = find(name)
        settings = {"set_alpha_to_one": True} if "set_alpha_to_one" in spec.settings else {}
        label = spec.label if "sigmas" in implied else f"{spec.label}, trailing"
        for steps in CONVERGENCE_STEPS:
            evaluations = len(build_table(pipe.model.scheduler, steps, sampler=name))
            latents = draw(pipe, name, steps, **settings).latents
            distance = float(np.sqrt(np.mean((latents - solution) ** 2) / np.mean(solution**2)))
            lines.setdefault(label, []).append((evaluations, distance))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="a folder (docs/images)")
    folder = parser.parse_args(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    pipe = canvax.load("emoji")
    lines = convergence(pipe)
    chart = line_chart(
        lines,
        title="distance to 1,000 steps of DDIM, Karras levels",
        x_label="evaluations of the network",
        y_label="relative distance of the latents",
        size=(900, 560),
        log_x=True,
        log_y=True,
    )
    chart.save(folder / "samplers-convergence.png", optimize=True)
    for name, points in lines.items():
        print(f"| {name} |", " | ".join(f"{distance:.3f} ({evaluations})" for evaluations, distance in points), "|")
    shown = ["leading", "trailing", "karras", "exponential", "normal", "sgm_uniform", "beta", "kl_optimal", "ays"]
    plot_curves(shown, 20).save(folder / "schedules.png", optimize=True)
    sheet = grid(pipe).quantize(256, dither=Image.Dither.NONE)
    sheet.save(folder / "samplers-grid.png", optimize=True)


if __name__ == "__main__":
    main()
