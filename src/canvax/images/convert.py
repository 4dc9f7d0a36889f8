"""Arrays to PIL pictures and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from canvax.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image


def to_uint8(pixels: np.ndarray) -> np.ndarray:
    """Pixels in 0..1 as bytes: clipped, multiplied by 255 and rounded half to even.

    Values that are not numbers become black, with a warning: they mean that a dtype was too narrow.

    Args:
        pixels: [B, H, W, 3] of any float dtype; bytes are returned as they are.

    Returns:
        [B, H, W, 3] uint8.

    Raises:
        InputError: another shape.
    """
    pixels = np.asarray(pixels)
    if pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise InputError(f"pixels has shape {pixels.shape}; pictures are [B, H, W, 3]")
    if pixels.dtype == np.uint8:
        return pixels
    pixels = pixels.astype(np.float32, copy=False)
    broken = np.isnan(pixels).any(axis=(1, 2, 3))
    if broken.any():
        which = ", ".join(map(str, np.flatnonzero(broken)))
        warnings.warn(
            f"picture {which} of {len(pixels)} has pixels that are not numbers, drawn black; float16 overflows in some "
            "models: load with dtype='bfloat16' or 'float32'",
            RuntimeWarning,
            stacklevel=2,
        )
        pixels = np.nan_to_num(pixels, nan=0.0)
    return np.rint(np.clip(pixels, 0, 1) * np.float32(255)).astype(np.uint8)


def to_pil(pixels: np.ndarray) -> list[Image]:
    """PIL pictures of an array [B, H, W, 3], floats in 0..1 or bytes (see :func:`to_uint8`)."""
    from PIL import Image

    return [Image.fromarray(one) for one in to_uint8(pixels)]


def from_pil(images: Image | Sequence[Image]) -> np.ndarray:
    """Pictures of one size as an array [B, H, W, 3] float32 in 0..1; transparency and palettes are resolved to RGB.

    Raises:
        InputError: no picture, or pictures of several sizes.
    """
    many = list(images) if isinstance(images, Sequence) else [images]
    check_sizes(many)
    return np.stack([np.asarray(one.convert("RGB"), np.float32) for one in many]) / np.float32(255)


def check_sizes(images: Sequence[Image]) -> tuple[int, int]:
    """Width and height that all pictures share.

    Raises:
        InputError: no picture, or pictures of several sizes.
    """
    if not images:
        raise InputError("images is empty; give at least one picture")
    sizes = list(dict.fromkeys(one.size for one in images))
    if len(sizes) > 1:
        said = ", ".join(f"{w}x{h}" for w, h in sizes[:5])
        raise InputError(f"images have several sizes ({said}); resize them to one size first")
    return sizes[0]
