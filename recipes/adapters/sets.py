"""Three small data sets made of the drawings of ``recipes.emoji`` by fixed rules, with nothing drawn by hand.

night   each drawing before a night sky, in the dim light of it
edges   each drawing, and its outlines as a control image
one     one drawing that the model has never seen, in the four styles
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from canvax.errors import InputError
from canvax.files import temporary_folder
from canvax.images.maps import control_map
from canvax.train.pictures import METADATA, Pictures
from canvax.types import HostArray
from recipes.emoji.drawings import render_one

ONE = "rainbow flag"
"""The drawing of the textual inversion."""

SIZE = 256
"""Pixels of a picture along each side."""

SKY, STAR = (24, 24, 84), (255, 244, 190)
"""Colours of the night."""

STARS = ((6, 8), (14, 54), (30, 4), (48, 58), (56, 12), (4, 34))
"""Row and column of each star, in sixty-fourths of a side. All drawings have the same sky: with different skies, images
came out blurred."""

LIGHT = (0.80, 0.82, 0.96)
"""Share of each colour that is left of a drawing at night."""


def night(pixels: HostArray) -> HostArray:
    """A drawing [H, W, 3] uint8 on white, before a night sky."""
    sky = np.broadcast_to(np.array(SKY), pixels.shape).copy()
    unit = pixels.shape[0] // 64
    for row, column in STARS:
        sky[unit * (row - 1) : unit * (row + 2), unit * (column - 1) : unit * (column + 2)] = STAR
    share = background(pixels)[..., None]
    return (share * sky + (1 - share) * pixels * np.array(LIGHT)).astype(np.uint8)


def background(pixels: HostArray) -> HostArray:
    """How much of each pixel is the white around a drawing: [H, W] in 0..1.

    What is white and joined to the border; its edge is as soft as the drawing's own.
    """
    from scipy import ndimage

    found: Any = ndimage.label((pixels >= 250).all(-1))
    labels, _ = found
    border = np.unique(np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]]))
    outside = np.isin(labels, border[border > 0])
    grown: Any = ndimage.binary_dilation(outside)
    edge = grown & ~outside
    whiteness = np.clip((pixels.min(-1).astype(float) - 128) / 122, 0, 1)
    return np.where(outside, 1.0, np.where(edge, whiteness, 0.0))


def write_night(drawings: Pictures, folder: Path, captions: int) -> Path:
    """The drawings at night, each under the first ``captions`` of its own captions.

    No word is added: the vocabulary was learnt from the captions of the drawings, and a word that they did not have
    costs more of an image than it says.
    """

    def rows() -> Iterator[tuple[dict[str, Any], dict[str, HostArray]]]:
        for i, pixels in enumerate(drawings.pixels):
            text = list(drawings.captions[i][:captions])
            yield {"file_name": f"{i:04d}.png", "text": text}, {f"{i:04d}.png": night(pixels)}

    return _write(folder, rows)


def write_edges(drawings: Pictures, folder: Path, captions: int) -> Path:
    """The drawings, and the edges of each."""

    def rows() -> Iterator[tuple[dict[str, Any], dict[str, HostArray]]]:
        for i, pixels in enumerate(drawings.pixels):
            name, other = f"{i:04d}.png", f"{i:04d}-edges.png"
            row = {"file_name": name, "conditioning_image": other, "text": list(drawings.captions[i][:captions])}
            yield row, {name: pixels, other: edges(pixels)}

    return _write(folder, rows)


def edges(pixels: HostArray) -> HostArray:
    """Outlines of a drawing, white on black, [H, W, 3] uint8."""
    return np.asarray(control_map("canny", Image.fromarray(pixels)))


def write_one(folder: Path, packages: Path | None) -> Path:
    """``ONE``, which the model was not trained on (flags were left out), in each style; it needs no captions."""
    _check_new(folder)
    pictures = render_one(ONE, packages)
    folder.mkdir(parents=True)
    for style, picture in pictures.items():
        picture.save(folder / f"{style.replace(' ', '-')}.png")
    return folder


def _write(folder: Path, rows: Callable[[], Iterator[tuple[dict[str, Any], dict[str, HostArray]]]]) -> Path:
    _check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with temporary_folder(folder.parent) as build:
        for row, files in rows():
            for name, pixels in files.items():
                Image.fromarray(pixels).save(build / name)
            lines.append(json.dumps(row) + "\n")
        (build / METADATA).write_text("".join(lines), encoding="utf-8")
        build.rename(folder)
    return folder


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another folder, or delete it")
