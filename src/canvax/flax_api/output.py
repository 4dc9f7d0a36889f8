"""What the pipeline returns, and from there to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from canvax.errors import check_count
from canvax.images.convert import to_pil
from canvax.images.grid import make_grid

if TYPE_CHECKING:
    from PIL.Image import Image


def by_name_or_index(fields: Any, key: Any) -> Any:
    """``__getitem__`` of a named tuple whose fields can be had by their names as well."""
    return getattr(fields, key) if isinstance(key, str) else tuple.__getitem__(fields, key)


class FlaxStableDiffusionXLPipelineOutput(NamedTuple):
    """The field can be had by name, by index, and with its name as key.

    Attributes:
        images: float32 in 0..1, [B, H, W, 3], or [D, B, H, W, 3] with a device axis; latents if those were asked for.
    """

    images: np.ndarray

    __getitem__ = by_name_or_index


class FlaxStableDiffusionPipelineOutput(NamedTuple):
    """Fields can be had by name, by index, and with their names as keys.

    Attributes:
        images: float32 in 0..1, [B, H, W, 3], or [D, B, H, W, 3] with a device axis.
        nsfw_content_detected: whether the safety checker refused each image [D * B], which is black then; False where
            there is none.
    """

    images: np.ndarray
    nsfw_content_detected: bool | list[bool]

    __getitem__ = by_name_or_index


def numpy_to_pil(images: Any) -> list[Image]:
    """PIL images of floats in 0..1, [B, H, W, 3] or [H, W, 3]; a NumPy or JAX array of any float dtype."""
    return to_pil(images)


def make_image_grid(images: Sequence[Image], rows: int, cols: int, resize: int | None = None) -> Image:
    """The images in one, row by row; with ``resize`` each is first made a square of that side."""
    if resize is not None:
        check_count("resize", resize, 1 << 14)
    return make_grid([image.resize((resize, resize)) for image in images] if resize else images, rows, cols)
