"""Grids and labelled sheets of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from canvax.errors import InputError, check_count
from canvax.images.convert import check_equal_sizes, on_white

if TYPE_CHECKING:
    from PIL.Image import Image


_MOST_PIXELS = 1 << 30


def make_grid(images: Sequence[Image], rows: int | None = None, cols: int | None = None) -> Image:
    """Arrange ``images`` row by row in one image; unused cells are white. Transparent images stay so.

    Without ``rows`` and ``cols`` the grid is as square as possible, wider rather than higher. With one of them, the
    other is as small as possible.

    Raises:
        InputError: there are no images, their sizes differ, or there are more images than cells.
    """
    from PIL import Image

    if not isinstance(images, Sequence) or not all(isinstance(image, Image.Image) for image in images):
        raise InputError("images", "is not a list of PIL images", value=images)
    if not images:
        raise InputError("images", "is empty", cure="a grid needs at least one")
    check_equal_sizes(images)
    rows, cols = _layout(len(images), rows, cols)
    width, height = images[0].size
    _check_pixels("rows", rows, cols * width, rows * height)
    mode = "RGBA" if any(image.has_transparency_data for image in images) else "RGB"
    grid = Image.new(mode, (cols * width, rows * height), "white")
    for i, image in enumerate(images):
        grid.paste(image.convert(mode), (i % cols * width, i // cols * height))
    return grid


def make_sheet(images: Sequence[Image | None], columns: Sequence[str], rows: Sequence[str] = ()) -> Image:
    """Arrange ``images`` row by row, with a label above each column and, if ``rows`` are given, left of each row.

    All cells have the size of the largest image, and the other images are in the middle of theirs. A cell of None
    stays white, and transparent parts are on white.

    Raises:
        InputError: the sheet is too large.
    """
    from PIL import Image, ImageDraw, ImageFont

    width, height = (max(sides) for sides in zip(*(image.size for image in images if image), strict=True))
    font = ImageFont.load_default(size=max(10, min(24, width // 8)))
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1))).textbbox
    boxes = {text: [*map(math.ceil, measure((0, 0), text, font=font))] for text in (*columns, *rows)}
    pad, line = 6, max(box[3] for box in boxes.values()) + 6
    left = max((boxes[text][2] + 2 * pad for text in rows), default=0)
    # A column is at least as wide as its label.
    cell = max(width, *(boxes[text][2] + pad for text in columns))
    size = left + cell * len(columns), line + height * math.ceil(len(images) / len(columns))
    _check_pixels("images", len(images), *size)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, text in enumerate(columns):
        draw.text((left + i * cell + (cell - boxes[text][2]) // 2, 2), text, "black", font)
    for i, text in enumerate(rows):
        draw.text((pad, line + i * height + (height - boxes[text][3]) // 2), text, "black", font)
    for i, image in enumerate(images):
        row, column = divmod(i, len(columns))
        if image:
            x, y = (cell - image.width) // 2, (height - image.height) // 2
            sheet.paste(on_white(image), (left + column * cell + x, line + row * height + y))
    return sheet


def _check_pixels(name: str, value: int, width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise InputError(name, f"make {width} x {height} pixels, which are too many", cure="give fewer", value=value)


def _layout(count: int, rows: int | None, cols: int | None) -> tuple[int, int]:
    for name, value in (("rows", rows), ("cols", cols)):
        if value is not None:
            check_count(name, value)
    if cols is None:
        cols = math.ceil(count / rows) if rows else math.ceil(math.sqrt(count))
    if rows is None:
        rows = math.ceil(count / cols)
    if rows * cols < count:
        raise InputError(
            "rows",
            f"and cols={cols} make {rows * cols} cells for {count} images",
            cure="leave one of the two out",
            value=rows,
        )
    return rows, cols
