"""The sheets of ``docs/adapters.md``: what the model generates without and with each adapter, from the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

import canvax
from canvax.images.convert import upright_rgb
from canvax.train.pictures import Pictures
from canvax.types import HostArray
from recipes.adapters.sets import SIZE, background, edges

QUIET = canvax.Options(progress=False)
PROMPTS = (
    "a red apple in the style of noto", "an octopus in the style of twemoji", "a house in the style of fluent",
    "a rocket in the style of fluent flat", "a slice of pizza", "a cat face in the style of twemoji", "a sailboat",
    "a grinning face in the style of noto",
)  # fmt: skip
WITH_WORD = (
    "<rainbow-flag>", "<rainbow-flag>", "<rainbow-flag> in the style of noto", "<rainbow-flag> in the style of twemoji",
    "<rainbow-flag> in the style of fluent", "<rainbow-flag> in the style of fluent flat", "a flag of a rainbow",
    "rainbow flag",
)  # fmt: skip
OUTLINES = (
    ("a red apple", "an orange"), ("a cat face", "a panda face"), ("a house", "a castle"), ("a rocket", "a carrot"),
    ("a gem stone", "a red heart"), ("an umbrella", "a mushroom"),
)  # fmt: skip
"""What the outlines are of, and what is asked for along them."""


def draw_sheets(folder: Path, images: Path) -> None:
    """Write ``adapters-night.webp``, ``adapters-word.webp`` and ``adapters-edges.webp``."""
    images.mkdir(parents=True, exist_ok=True)
    save(images / "adapters-night.webp", night_rows(folder / "trained" / "night" / "pytorch_lora_weights.safetensors"))
    save(images / "adapters-word.webp", word_rows(folder))
    save(images / "adapters-edges.webp", edge_rows(folder / "trained" / "edges" / "controlnet"))


def night_rows(file: Path) -> list[HostArray]:
    """Without the LoRA, with half of it, with all of it."""
    pipe = canvax.load("emoji")
    rows = [pixels_of(pipe, PROMPTS)]
    for weight in (0.6, 1.0):
        pipe.adapters.load("night", file, weight)
        rows.append(pixels_of(pipe, PROMPTS))
        pipe.adapters.remove("night")
    return rows


def word_rows(folder: Path) -> list[HostArray]:
    """What it was trained on, and images with the word."""
    paths = sorted((folder / "one").glob("*.png"))
    shown = [np.asarray(upright_rgb(Image.open(path)).resize((SIZE, SIZE))) for path in paths]
    pipe = canvax.load("emoji")
    blank = [np.full_like(shown[0], 255)] * (len(WITH_WORD) - len(shown))
    pipe.adapters.load_embedding(folder / "trained" / "rainbow-flag" / "learned_embeds.safetensors")
    return [np.stack([*shown, *blank]), pixels_of(pipe, WITH_WORD)]


def edge_rows(folder: Path) -> list[HostArray]:
    """Drawings of the model, their edges, others without and with the network, and those of no prompt with it."""
    plain = canvax.load("emoji")
    drawn = pixels_of(plain, [first for first, _ in OUTLINES])
    outlines = np.stack([edges(image) for image in drawn])
    pipe = canvax.load("emoji", controlnet=folder)
    asked = [second for _, second in OUTLINES]
    control = [Image.fromarray(one) for one in outlines]
    return [
        drawn, outlines, pixels_of(plain, asked, 7), pixels_of(pipe, asked, 7, control),
        pixels_of(pipe, [""] * len(asked), 7, control),
    ]  # fmt: skip


def covered(folder: Path, drawings: Pictures, count: int = 64, model: str | Path = "emoji") -> dict[str, float]:
    """How well images cover the drawings whose edges were given: intersection over union of what is not background.

    For ``count`` drawings, with their first captions and with empty ones, without and with the network. A network that
    does nothing leaves the figures without it.
    """
    chosen = np.random.default_rng(0).permutation(len(drawings))[:count]
    true = drawings.pixels[chosen]
    control = [Image.fromarray(edges(image)) for image in true]
    captions = [str(drawings.captions[i][0]) for i in chosen]
    pipes = {"without": canvax.load(model), "with": canvax.load(model, controlnet=folder)}
    found = {}
    said: dict[str, list[str]] = {"captions": captions, "no prompt": [""] * count}
    for text, prompts in said.items():
        for name, pipe in pipes.items():
            images = pixels_of(pipe, prompts, 0, control if name == "with" else None)
            both = [
                (background(image) < 0.5, background(other) < 0.5) for image, other in zip(images, true, strict=True)
            ]
            overlap = [(one & other).sum() / max(1, (one | other).sum()) for one, other in both]
            found[f"{text}, {name} the network"] = float(np.mean(overlap))
    return found


def pixels_of(
    pipe: canvax.Pipeline, prompts: Sequence[str], seed: int = 3, control: Sequence[Image.Image] | None = None
) -> HostArray:
    """[N, H, W, 3] uint8, each prompt from a seed of its own, and along a control image of its own."""
    found = []
    for i in range(0, len(prompts), 16):
        some = slice(i, i + 16)
        seeds = list(range(seed + i, seed + i + len(prompts[some])))
        shown = None if control is None else list(control[some])
        found += pipe(list(prompts[some]), seed=seeds, control=shown, options=QUIET).images
    return np.stack([np.asarray(image) for image in found])


def save(path: Path, rows: Sequence[HostArray]) -> None:
    """Rows of images as one, of half size."""
    whole = Image.fromarray(np.concatenate([np.concatenate(list(row), axis=1) for row in rows]))
    whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS).save(path, quality=90)
