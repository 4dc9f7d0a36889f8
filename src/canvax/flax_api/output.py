"""The outputs of the pipelines, and their conversion to PIL images."""

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
    """Implement ``__getitem__`` of a named tuple whose fields are also available as keys."""
    return getattr(fields, key) if isinstance(key, str) else tuple.__getitem__(fields, key)


class FlaxStableDiffusionXLPipelineOutput(NamedTuple):
    """The output of the SDXL pipeline; the field is available as attribute, by index and by key.

    Attributes:
        images: float32 in 0..1, [B, H, W, 3], or [D, B, H, W, 3] with a device axis; latents with
            output_type="latent".
    """

    images: np.ndarray

    __getitem__ = by_name_or_index


class FlaxStableDiffusionPipelineOutput(NamedTuple):
    """The output of a pipeline; fields are available as attributes, by index and by key.

    Attributes:
        images: float32 in 0..1, [B, H, W, 3], or [D, B, H, W, 3] with a device axis.
        nsfw_content_detected: for each image [D * B], whether the safety checker refused it and made it black; False
            without a safety checker.
    """

    images: np.ndarray
    nsfw_content_detected: bool | list[bool]

    __getitem__ = by_name_or_index


def numpy_to_pil(images: Any) -> list[Image]:
    """Convert floats in 0..1 [B, H, W, 3] or [H, W, 3], in NumPy or JAX of any float dtype, to PIL images."""
    return to_pil(images)


def make_image_grid(images: Sequence[Image], rows: int, cols: int, resize: int | None = None) -> Image:
    """Arrange images row by row in one image; ``resize`` first makes each a square of this side."""
    if resize is not None:
        check_count("resize", resize, 1 << 14)
    return make_grid([image.resize((resize, resize)) for image in images] if resize else images, rows, cols)
