"""Conversion of arrays to PIL images and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from canvax.errors import InputError, warn

if TYPE_CHECKING:
    from PIL.Image import Image

ONE_COLOUR = 8
"""Difference of brightness within one colour: programs round the colours of translucent pixels."""


def to_uint8(images: Any) -> np.ndarray:
    """Convert floats in 0..1 [..., 3] to uint8 of the same shape: clipped, times 255, rounded half to even in float32.

    Accepts anything with an array interface (JAX arrays, bfloat16). The rounding equals that of diffusers, so equal
    floats give equal files. NaN becomes black, with a RuntimeWarning: it means that the model overflowed its dtype.

    Raises:
        InputError: ``images`` are not floating point (uint8 images need no conversion).
    """
    array = np.asarray(images)
    if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
        raise InputError("images", f"must be floats in 0..1, got {array.dtype}")
    if array.dtype.kind in "cmMOSU" or array.dtype.fields is not None:
        raise InputError("images", f"must be floats in 0..1, got {array.dtype}")
    array = array.astype(np.float32, copy=False)
    if np.isnan(array.max(initial=0)):
        warn(
            "an image has values that are not a number, painted black: the model overflowed its dtype; "
            "use bfloat16 or float32",
            RuntimeWarning,
        )
        array = np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=0.0)
    scaled = np.clip(array, 0.0, 1.0)
    scaled *= np.float32(255)
    return np.rint(scaled, out=scaled).astype(np.uint8)


def to_pil(images: Any) -> list[Image]:
    """Convert [B, H, W, C] or [H, W, C], uint8 or floats in 0..1, to PIL images: RGB for 3 channels, RGBA for 4.

    Raises:
        InputError: ``images`` have another shape.
    """
    from PIL import Image

    array = np.asarray(images)
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[-1] not in (3, 4):
        shape = list(np.shape(images))
        raise InputError("images", f"must have the shape [B, H, W, C] or [H, W, C], C of 3 or 4, got {shape}")
    if array.dtype != np.uint8:
        array = to_uint8(array)
    return [Image.fromarray(np.ascontiguousarray(image)) for image in array]


def check_equal_sizes(images: Sequence[Image]) -> None:
    """Raise InputError, naming the first that differs, unless all images have the same size."""
    first = images[0].size
    for i, image in enumerate(images):
        if image.size != first:
            raise InputError(
                "images",
                f"must have one size: image 0 is {first[0]}x{first[1]}, image {i} is {image.width}x{image.height}",
                cure="resize them first",
            )


def upright(image: Image) -> Image:
    """Convert to 8-bit RGB, or RGBA with an alpha channel: apply the EXIF orientation."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255
        grey = np.asarray(image, np.float32) / 257.0
        image = Image.fromarray(np.clip(grey + 0.5, 0, 255).astype(np.uint8))
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def upright_rgb(image: Image) -> Image:
    """Convert to 8-bit RGB: apply the EXIF orientation and put transparent parts on white."""
    return on_white(upright(image))


def on_white(image: Image) -> Image:
    """Convert to RGB: put transparent parts on white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def upright_mask(image: Image) -> Image:
    """Convert to an 8-bit mask with EXIF orientation: the brightness, or the transparency of an image that has some.

    Opaque parts are white if what is visible has one colour, as in a painted layer; transparent parts are white in a
    picture from which a part was erased.
    """
    from PIL import ImageChops

    image = upright(image)
    if image.mode == "RGBA":
        alpha = image.getchannel("A")
        shades, opaque = np.asarray(image.convert("RGB").convert("L")), np.asarray(alpha)
        visible = shades[opaque >= max(1, opaque.max() // 2)]
        painted = np.ptp(visible if visible.size else shades) <= ONE_COLOUR
        if opaque.min() < opaque.max() or (painted and not opaque.max()):
            return alpha if painted else ImageChops.invert(alpha)
    return on_white(image).convert("L")
