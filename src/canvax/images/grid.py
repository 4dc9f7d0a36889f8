"""Several images in one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from canvax.errors import InputError, check_count
from canvax.images.convert import check_equal_sizes

if TYPE_CHECKING:
    from PIL.Image import Image


def make_grid(images: Sequence[Image], rows: int | None = None, cols: int | None = None) -> Image:
    """All ``images`` on one sheet, row by row; cells left over are white.

    Without ``rows`` and ``cols`` the grid is as near to square as it can be, rather wide than high; with one of them,
    the other is as small as it can be.

    Raises:
        InputError: no images, images of unequal size, or more of them than cells.
    """
    from PIL import Image

    if not images:
        raise InputError("images is empty; a grid needs at least one")
    check_equal_sizes(images)
    rows, cols = _layout(len(images), rows, cols)
    width, height = images[0].size
    grid = Image.new("RGB", (cols * width, rows * height), "white")
    for i, image in enumerate(images):
        grid.paste(image, (i % cols * width, i // cols * height))
    return grid


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
            f"rows={rows}, cols={cols} is {rows * cols} cells for {count} images; leave one of the two out"
        )
    return rows, cols
