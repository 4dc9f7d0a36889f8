"""Does the emoji model draw what it is told? Trained pairs, held-out pairs, the autoencoder, and the measure itself.

    python -m recipes.emoji data out/emoji.zip
    python -m recipes.emoji quality --data out/emoji.zip --model emoji --output out/quality

The bars: of 300 trained (concept, style) pairs at least 90 % of the concepts and 85 % of concepts with style; of the
held-out pairs at least 60 % of the concepts; 30 dB for held-out drawings through the autoencoder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import Image

import canvax
from benchmarks.lab.chart import line_chart
from canvax.models.configs import VaeConfig
from canvax.train.loop import LOG, read_log
from canvax.train.pictures import Pictures, read_pictures
from recipes.emoji.autoencoder import reconstruction_psnr
from recipes.emoji.quality import Score, check_measure, choose_pairs, draw_and_score

NOVEL = ("a blue banana", "a cat and a pizza", "a green heart with a rocket", "a purple elephant", "two apples")
BARS = {"trained, concept": 0.90, "trained, concept and style": 0.85, "held out, concept": 0.60, "VAE dB": 30.0}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="what the task data wrote")
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--trained", type=int, default=300, help="trained pairs (300)")
    parser.add_argument("--held-out", type=int, help="held-out pairs (all)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders of training, for a chart of losses")
    parser.add_argument("--output", type=Path, help="folder for grids and figures")
    options = parser.parse_args(arguments)

    pipe = canvax.load(options.model, progress=False)
    assert pipe.params is not None
    drawings = read_pictures(options.data, pipe.model.native_size[0])
    trained, held_out = choose_pairs(drawings, options.trained, options.held_out)
    for name, score in check_measure(drawings, trained).items():
        print(f"the measure, true drawings {name}: {score}", flush=True)
    vae = pipe.model.vae
    assert isinstance(vae, VaeConfig)
    psnr = reconstruction_psnr(pipe.params["vae"], drawings.pixels[held_out], vae, pipe.programs.mesh)
    print(f"autoencoder: {psnr.mean():.2f} dB on {len(psnr)} held-out drawings", flush=True)

    how = {
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance,
        "sampler": options.sampler,
        "options": canvax.Options(progress=False),
    }
    began = time.perf_counter()
    scores = {}
    for name, asked in (("trained", trained), ("held out", held_out)):
        scores[name] = draw_and_score(
            pipe, drawings, asked, seed=options.seed, batch=options.batch, progress=_line, **how
        )
        print(f"\r{name}: {scores[name]}", flush=True)
    seconds = time.perf_counter() - began
    figures = {
        "trained, concept": scores["trained"].concepts,
        "trained, concept and style": scores["trained"].both,
        "held out, concept": scores["held out"].concepts,
        "VAE dB": float(psnr.mean()),
    }
    for name, bar in BARS.items():
        print(f"{'reached' if figures[name] >= bar else 'MISSED ':<8} {name}: {figures[name]:.3f} (bar {bar})")
    device = jax.devices()[0].device_kind
    print(f"{len(trained) + len(held_out)} pictures in {seconds:.0f} s on {device}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for name, score in scores.items():
            _grid(score, drawings).save(options.output / f"{name.replace(' ', '-')}.png")
        novel = pipe([text for text in NOVEL for _ in range(4)], seed=list(range(4)) * len(NOVEL), **how).pixels
        _tiled(novel, 4).save(options.output / "novel.png")
        if options.runs:
            _losses(options.runs).save(options.output / "losses.png", optimize=True)
        (options.output / "figures.json").write_text(json.dumps({**figures, "seconds": seconds}, indent=2) + "\n")


def _losses(runs: Sequence[Path], smooth: int = 5) -> Image.Image:
    """The denoising loss of runs that went on from each other, over all their steps, and that of the decoder."""
    series: dict[str, list[tuple[float, float]]] = {}
    for stage in ("diffusion", "decoder"):
        begin, points = 0, []
        for run in runs:
            lines = read_log(run / stage / LOG)
            values = [line["mse"] for line in lines]
            for i in range(smooth, len(lines) + 1, smooth):
                points.append((begin + lines[i - 1]["step"], sum(values[i - smooth : i]) / smooth))
            begin += int(lines[-1]["step"]) if lines else 0
        if points:
            series[stage] = points
    return line_chart(series, title="training", x_label="steps", y_label="mean squared error", log_y=True)


def _line(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text} ")


def _grid(score: Score, drawings: Pictures, rows: int = 8, columns: int = 8) -> Image.Image:
    """Drawn, and beside each the true drawing."""
    count = min(rows * columns, len(score.asked))
    true = drawings.pixels[score.asked[:count]].astype(np.float32) / 255
    pairs = np.stack([score.pictures[:count], true], axis=1).reshape(-1, *true.shape[1:])
    return _tiled(pairs, 2 * columns)


def _tiled(pictures: np.ndarray, columns: int) -> Image.Image:
    missing = -len(pictures) % columns
    filled = np.concatenate([pictures, np.ones((missing, *pictures.shape[1:]), np.float32)])
    rows = [np.concatenate(list(row), axis=1) for row in filled.reshape(-1, columns, *pictures.shape[1:])]
    return Image.fromarray((255 * np.concatenate(rows, axis=0) + 0.5).astype(np.uint8))
