"""How well images of the emoji model match their prompts: concepts, styles, colours, pairs, counts, seeds.

Training leaves out the held-out styles, colours and pairs: no image shows these concepts in that style, in that
colour or together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

import canvax
from canvax.images.convert import to_pil
from canvax.images.grid import make_grid
from canvax.models.configs import VaeConfig
from canvax.train.loop import LOG, read_log
from canvax.train.pictures import Pictures, read_pictures
from recipes.emoji.autoencoder import reconstruction_psnr
from recipes.emoji.captions import plain_caption, with_article
from recipes.emoji.quality import (
    Score,
    check_measure,
    choose_pairs,
    draw,
    draw_and_score,
    score,
    score_colours,
    score_places,
    spread,
)
from recipes.emoji.variations import (
    COLOURS,
    bare,
    count_captions,
    held_out_colour,
    held_out_pair,
    main_colour,
    pair_captions,
    plural,
)

NOVEL = (
    "a blue banana", "a purple elephant", "a green apple", "a pink pig face", "a red car", "a yellow umbrella",
    "a cat and a pizza", "a dog and a balloon", "an apple and a lemon", "two apples", "three stars", "two cats",
)  # fmt: skip
"""Combinations that no drawing has."""

OPEN = ("a house", "a flower", "a dog", "a fish", "a car", "a tree", "a cat face", "a rocket", "an owl", "a cake")
"""Prompts that leave the style open, for the spread over seeds."""

BARS = {
    "trained, concept": 0.97, "trained, concept and style": 0.95, "held-out style, concept": 0.60,
    "seen colours": 0.9, "held-out colours": 0.7, "pairs": 0.6, "counts": 0.6,
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what :func:`measure` reads."""
    parser.add_argument("--data", required=True, type=Path, help="what the task data wrote")
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--trained", type=int, default=300, help="trained pairs (300)")
    parser.add_argument("--held-out", type=int, help="held-out pairs (all)")
    parser.add_argument("--combined", type=int, default=100, help="prompts of each kind of combination (100)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders of training, for a chart of losses")
    parser.add_argument("--output", type=Path, help="folder for grids and figures")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Print the figures of a model, write them and the grids to ``options.output``, and return them."""
    pipe = canvax.load(options.model, progress=False)
    assert pipe.params is not None
    drawings = read_pictures(options.data, pipe.model.native_size[0])
    trained, held_out = choose_pairs(drawings, options.trained, options.held_out)
    for name, checked in check_measure(drawings, trained).items():
        print(f"the measure, true drawings {name}: {checked}", flush=True)
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
    keywords = how | {"seed": options.seed, "batch": options.batch, "progress": _line}
    for name, asked in (("trained", trained), ("held out", held_out)):
        scores[name] = draw_and_score(pipe, drawings, asked, **keywords)
        print(f"\r{name}: {scores[name]}", flush=True)
    plain = [with_article(_name(drawings, i)) for i in trained]
    alone = score(draw(pipe, plain, **keywords), trained, drawings).concepts
    seconds = time.perf_counter() - began
    figures = {
        "trained, concept": scores["trained"].concepts,
        "trained, concept and style": scores["trained"].both,
        "label alone, concept": alone,
        "held-out style, concept": scores["held out"].concepts,
        "VAE dB": float(psnr.mean()),
    }
    if options.combined:
        figures |= _combined(pipe, drawings, options.combined, **keywords)
    print("\r" + "; ".join(f"{name}: {value:.3f}" for name, value in figures.items()))
    for name, bar in BARS.items():
        if name not in figures:
            continue
        print(f"{'reached' if figures[name] >= bar else 'MISSED ':<8} {name}: {figures[name]:.3f} (bar {bar})")
    device = jax.devices()[0].device_kind
    print(f"{2 * len(trained) + len(held_out)} pictures in {seconds:.0f} s on {device}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for name, of_one in scores.items():
            _grid(of_one, drawings).save(options.output / f"{name.replace(' ', '-')}.png")
        novel = draw(pipe, [text for text in NOVEL for _ in range(4)], batch=options.batch, **how)
        make_grid(to_pil(novel), cols=8).save(options.output / "novel.png")
        if options.runs:
            _losses(options.runs).save(options.output / "losses.png", optimize=True)
        (options.output / "figures.json").write_text(json.dumps({**figures, "seconds": seconds}, indent=2) + "\n")
    return figures


def _combined(pipe: Any, drawings: Pictures, count: int, **how: Any) -> dict[str, float]:
    """Shares of right colours, pairs and counts, and the spread over seeds."""
    rng, figures = np.random.default_rng(11), {}
    train = [i for i, row in enumerate(drawings.rows) if row.get("split") == "train"]
    order = [train[i] for i in rng.permutation(len(train))]
    mains = {i: main_colour(drawings.pixels[i]) for i in order}
    natural = {(bare(drawings.rows[i]["label"]), main.name) for i, main in mains.items() if main is not None}
    asked: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
    for i, main in mains.items():
        colour = str(rng.choice(list(COLOURS)))
        label = drawings.rows[i]["label"]
        if main is None or colour == main.name:
            continue
        if not (held_out := held_out_colour(label, colour)) or (bare(label), colour) not in natural:
            asked[held_out].append((i, colour))
    for held_out, name in ((False, "seen colours"), (True, "held-out colours")):
        chosen = asked[held_out][:count]
        rows = [(drawings.rows[i], colour) for i, colour in chosen]
        prompts = [plain_caption(f"{colour} {bare(row['label'])}", row["style"]) for row, colour in rows]
        in_colour, right = score_colours(draw(pipe, prompts, **how), chosen, drawings)
        figures |= {name: right, f"{name}, colour alone": in_colour}
    of_style: dict[str, list[int]] = {}
    for i in order:
        of_style.setdefault(drawings.rows[i]["style"], []).append(i)
    held = [
        (a, b)
        for members in of_style.values()
        for a, b in zip(members[::2], members[1::2], strict=False)
        if held_out_pair(_name(drawings, a), _name(drawings, b))
    ]
    held = [held[i] for i in rng.permutation(len(held))[:count]]  # of all styles
    prompts = [pair_captions(_name(drawings, a), _name(drawings, b), drawings.rows[a]["style"])[0] for a, b in held]
    figures["halves of pairs"], figures["pairs"] = score_places(draw(pipe, prompts, **how), held, drawings)
    countable = [i for i in order if plural(_name(drawings, i))][:count]
    several = [(i,) * (2 + k % 2) for k, i in enumerate(countable)]
    prompts = [count_captions(len(g), _name(drawings, g[0]), drawings.rows[g[0]]["style"])[0] for g in several]
    figures["parts of counts"], figures["counts"] = score_places(draw(pipe, prompts, **how), several, drawings)
    pictures = draw(pipe, [text for text in OPEN for _ in range(8)], **how)
    figures["spread"] = spread(pictures.reshape(len(OPEN), 8, *pictures.shape[1:]))
    return figures


def _name(drawings: Pictures, index: int) -> str:
    return str(drawings.rows[index]["label"]).lower()


def _losses(runs: Sequence[Path], smooth: int = 5) -> Image.Image:
    """The denoising loss of runs that went on from each other, over all their steps, and that of the decoder."""
    from benchmarks.lab.chart import line_chart  # matplotlib, which nothing else here needs

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
    return make_grid(to_pil(pairs), cols=2 * columns)
