"""Several pictures in one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from canvax.errors import InputError
from canvax.images.convert import check_sizes

if TYPE_CHECKING:
    from PIL.Image import Image


def make_grid(images: Sequence[Image], rows: int | None = None, cols: int | None = None) -> Image:
    """All pictures in one, row by row, without gaps; empty places stay white.

    Args:
        images: pictures of one size.
        rows: how many rows; by default what the columns need, or near square.
        cols: how many columns; likewise.

    Raises:
        InputError: no picture, pictures of several sizes, or fewer places than pictures.
    """
    from PIL import Image

    images = list(images)
    width, height = check_sizes(images)
    rows, cols = grid_shape(len(images), rows, cols)
    sheet = Image.new("RGB", (cols * width, rows * height), "white")
    for i, one in enumerate(images):
        sheet.paste(one, (i % cols * width, i // cols * height))
    return sheet


def grid_shape(count: int, rows: int | None = None, cols: int | None = None) -> tuple[int, int]:
    """Rows and columns for ``count`` pictures: as asked, else near square and never taller than wide.

    Raises:
        InputError: fewer places than pictures.
    """
    for name, value in (("rows", rows), ("cols", cols)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name}={value!r} is not a whole number of at least 1")
    if rows is None and cols is None:
        cols = math.ceil(math.sqrt(count))
    if rows is None:
        rows = math.ceil(count / (cols or 1))
    elif cols is None:
        cols = math.ceil(count / rows)
    assert cols is not None
    if rows * cols < count:
        raise InputError(
            f"rows={rows}, cols={cols} have {rows * cols} places for {count} pictures; leave one of the two out"
        )
    return rows, cols
