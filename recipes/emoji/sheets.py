"""The pictures of the docs that the bundled model draws.

python -m recipes.emoji sheets -o docs/images
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

import canvax
from canvax.images.convert import to_pil
from canvax.images.grid import make_grid
from canvax.types import HostArray
from recipes.emoji.quality import draw

SIXTY = (
    "a red apple", "a dog face", "a lemon", "a house", "a sunflower", "an umbrella", "a fire engine", "a clock",
    "a Christmas tree", "a cat", "a pizza", "a hamburger", "a rocket", "an octopus", "a panda", "a fox", "a rose",
    "a guitar", "a bicycle", "a sailboat", "a snowman", "a castle", "an owl", "a penguin", "a cactus", "a tomato",
    "a strawberry", "a birthday cake", "an ice cream", "a crown", "a key", "a pencil", "a book", "a bell", "a fish",
    "a butterfly", "a rainbow", "the sun with a face", "a grinning face", "an alien", "a robot", "a ghost",
    "a rocket in the style of noto", "a rocket in the style of fluent flat", "a cat face in the style of twemoji",
    "a cat face in the style of fluent", "a blue banana", "a purple elephant", "a green apple", "a pink car",
    "a yellow umbrella", "a red fish", "a cat and a pizza", "a dog and a balloon", "an apple and a lemon",
    "two apples", "three stars", "two cats", "three cherries", "a blue house",
)  # fmt: skip
"""Prompts of the sheet that shows what the model can do, and what it cannot."""

QUIET = canvax.Options(progress=False)


def write_sheets(folder: Path, model: str | Path = "emoji") -> list[Path]:
    """Write ``emoji-sixty``, ``emoji-grid``, ``image-to-image``, ``larger`` and ``guidance``, each as WebP."""
    folder.mkdir(parents=True, exist_ok=True)
    pipe = canvax.load(model, progress=False)
    sixty = to_pil(draw(pipe, SIXTY, seed=1, options=QUIET))
    sheets = {
        "emoji-sixty": tiled(sixty, 10, 128),
        "emoji-grid": tiled(sixty[:32], 8, 128),
        "image-to-image": image_to_image(pipe),
        "larger": larger(pipe),
        "guidance": guidance(pipe),
    }
    for name, sheet in sheets.items():
        sheet.save(folder / f"{name}.webp", quality=90)
    return [folder / f"{name}.webp" for name in sheets]


def image_to_image(pipe: canvax.Pipeline) -> Image.Image:
    """A lemon that becomes a tangerine, by strength; an apple whose upper part is another's, by mask."""
    lemon = pipe("a lemon", seed=2, options=QUIET).images[0]
    strengths = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    first = [lemon] + [
        pipe("a tangerine", image=lemon, strength=strength, seed=2, options=QUIET).images[0] for strength in strengths
    ]
    apple = pipe("a red apple", seed=1, options=QUIET).images[0]
    rows = np.arange(apple.height)[:, None] / apple.height
    modes: dict[Literal["hard", "soft", "graded"], HostArray] = {
        "hard": rows < 0.5, "soft": 2.5 - 4 * rows, "graded": 1 - rows
    }  # fmt: skip
    second = [apple, Image.fromarray(np.repeat(255 * modes["hard"].astype(np.uint8), apple.width, axis=1))]
    for mode, ramp in modes.items():
        mask = np.repeat((255 * np.clip(ramp, 0, 1)).astype(np.uint8), apple.width, axis=1)
        options = canvax.Options(progress=False, mask_mode=mode)
        for strength in (1.0, 0.8):
            made = pipe("a green apple", image=apple, mask=mask, strength=strength, seed=1, options=options)
            second.append(made.images[0])
    return tiled([*first, *second], 8, 128)


def larger(pipe: canvax.Pipeline) -> Image.Image:
    """Outpainting, second passes, variations."""
    house = pipe("a house", seed=4, options=QUIET).images[0]
    wide = [
        pipe("a house", image=house, outpaint="left=64,right=64", seed=seed, options=QUIET).images[0] for seed in (1, 2)
    ]
    fox = {"prompt": "a fox", "seed": 4, "options": QUIET}
    seconds = [
        pipe(**fox).images[0],
        *(pipe(**fox, hires=2, hires_strength=strength).images[0] for strength in (0.2, 0.4)),
        pipe(**fox, hires=2, hires_method="latent", hires_strength=0.7).images[0],
        pipe(**fox, height=512, width=512).images[0],
    ]
    others = [
        pipe(**fox, variation_seed=9, variation_strength=strength).images[0] for strength in (0.1, 0.3, 0.5, 0.7, 1.0)
    ]
    rows = [[house, *wide], seconds, others]
    return stacked([[image.resize((160 * image.width // image.height, 160)) for image in row] for row in rows])


def guidance(pipe: canvax.Pipeline) -> Image.Image:
    """Scales 3 and 10 with each kind of guidance, a row for each prompt."""
    kinds = ("cfg", "cfg_zero", "apg")
    images = [
        pipe(prompt, seed=1, guidance_scale=scale, guidance_method=kind, options=QUIET).images[0]
        for prompt in ("a fox", "a bicycle", "a red apple")
        for scale in (3.0, 10.0)
        for kind in kinds
    ]
    return tiled(images, 6, 128)


def tiled(images: Sequence[Image.Image], columns: int, side: int) -> Image.Image:
    """Images in rows, each ``side`` pixels wide and high."""
    return make_grid([image.convert("RGB").resize((side, side)) for image in images], cols=columns)


def stacked(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Rows of images of one height and any widths, from the left, on white."""
    width = max(sum(image.width for image in row) for row in rows)
    sheet = Image.new("RGB", (width, sum(row[0].height for row in rows)), "white")
    top = 0
    for row in rows:
        left = 0
        for image in row:
            sheet.paste(image, (left, top))
            left += image.width
        top += row[0].height
    return sheet
