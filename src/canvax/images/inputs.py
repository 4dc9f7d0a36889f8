"""Reads the image arguments of a call and turns them upright. This module knows no model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from canvax.errors import InputError, miscounted, reading
from canvax.files import open_regular
from canvax.images.convert import on_white, upright, upright_mask, upright_rgb
from canvax.images.formats import FORMATS
from canvax.types import HostArray

T = TypeVar("T")

LONGEST = 8
"""Aspect ratio above which ``clip_square`` crops an image before it resizes."""

MOST_PIXELS = 1 << 26
"""Pixels of the largest image that is read, 8192 x 8192: a file of a few bytes can declare any size."""


def read_images(name: str, value: Any, count: int, *, grey: bool = False, alpha: bool = False) -> list[Image.Image]:
    """Read an argument's images, one for each of ``count`` or a single image; upright, RGB or with ``grey`` L.

    Args:
        name: the argument's name, for errors.
        value: a PIL image, a path, an array, or a list of these. Arrays are [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]
            (a batch has another axis in front), uint8 or floats in 0..1.
        count: number of images that the call generates.
        grey: return images with one channel.
        alpha: return images with an alpha channel as RGBA, not on white.

    Raises:
        InputError: an image cannot be read, or the number of images is neither 1 nor ``count``.
    """
    return [_upright(name, entry, grey=grey, alpha=alpha) for entry in _entries(name, value, count)]


def _entries(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return the entries of an argument, after checking that there is one, or one for each of ``count`` images."""
    value = _as_array(name, value) if _is_array(value) else value
    if isinstance(value, Image.Image | str | Path) or (_is_array(value) and value.ndim < 4):
        values: Sequence[Any] = [value]
    elif isinstance(value, list | tuple) or _is_array(value):
        values = list(value)
    else:
        images = getattr(value, "images", None)  # a canvax.Result, or the result of another library
        cure = "give its images, such as result.images[0]" if images is not None else "nor a list of these"
        raise InputError(name, "is not an image, a path or an array", cure=cure, value=value)
    if len(values) not in (1, count):
        raise miscounted(name, len(values), count)
    return values


def entry(values: Sequence[T], index: int) -> T:
    """Return the entry of an image: its own, or the one for all images."""
    return values[index if len(values) > 1 else 0]


def fingerprint(image: Image.Image) -> str:
    """Return the SHA-256 of an upright image's pixels and size; it does not depend on the file."""
    return hashlib.sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).hexdigest()


def clip_square(image: Image.Image, side: int) -> HostArray:
    """Return CLIP's input for an image: its central square [side, side, 3] float32 in 0..1, on white.

    The bicubic resize is rounded to 8 bits, as in CLIP's image processor.
    """
    image, short = on_white(image), min(image.size)
    if max(image.size) > LONGEST * short:  # saves resizing parts that are cropped away
        sides = [min(length, LONGEST * short) for length in image.size]
        left, top = ((whole - length) // 2 for whole, length in zip(image.size, sides, strict=True))
        image = image.crop((left, top, left + sides[0], top + sides[1]))
    wide, tall = image.size
    size = (side * wide // short, side * tall // short)
    image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return np.asarray(image.crop((left, top, left + side, top + side)), np.float32) / 255


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, Image.Image)


def _as_array(name: str, value: Any) -> np.ndarray:
    with reading(name):
        return np.asarray(value)


def _upright(name: str, value: Any, *, grey: bool, alpha: bool) -> Image.Image:
    if isinstance(value, str) and value[:5].lower() == "data:":
        cure = "open it first: Image.open(io.BytesIO(base64.b64decode(value.partition(',')[2])))"
        raise InputError(name, "is a data URL, not a file", cure=cure, value=value[:40])
    if isinstance(value, str) and re.match(r"[a-z0-9+.-]{2,}:/", value, re.IGNORECASE):
        raise InputError(
            name, "is an address, and none is fetched", cure="download the image and give its file", value=value
        )
    if isinstance(value, str) and not value:
        raise InputError(name, "names no file", cure="give the file's name, or leave it out", value=value)
    if isinstance(value, str | Path):
        image = _from_file(name, Path(value))
    elif isinstance(value, Image.Image):
        image = value
    elif _is_array(value):
        array = _as_array(name, value)
        if array.size > 4 * MOST_PIXELS:  # a broadcast view can have any size
            raise InputError(name, f"is an array of shape {array.shape}, more than {MOST_PIXELS} pixels")
        image = _from_array(name, array)
    else:
        raise InputError(name, "is not an image, a path or an array", value=value)
    if min(image.size) < 2 or image.width * image.height > MOST_PIXELS:
        raise InputError(
            name,
            f"has {image.width} x {image.height} pixels",
            cure=f"give 2 x 2 pixels or more, and at most {MOST_PIXELS}",
        )
    if image.mode == "CMYK":
        raise InputError(name, "is CMYK", cure="convert it to RGB with its profile")
    if image.mode == "F":  # PIL would clip it to 0..255, whatever its range
        raise InputError(
            name, "has the mode F, numbers of any range", cure="give np.asarray(image) with floats in 0..1"
        )
    try:
        return (upright_mask if grey else upright if alpha else upright_rgb)(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(name, f"cannot be read ({error})") from None


def _from_file(name: str, path: Path) -> Image.Image:
    try:
        with open_regular(path.expanduser()) as file, Image.open(file, formats=tuple(set(FORMATS.values()))) as image:
            if image.width * image.height > MOST_PIXELS:
                raise InputError(name, f"has {image.width} x {image.height} pixels, which is too many", value=path)
            if image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False):
                raise InputError(name, "is animated", cure="save one of its frames as an image", value=path)
            image.load()
            return image
    except UnidentifiedImageError:
        raise InputError(name, "is not a PNG, JPEG or WebP", value=path) from None
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(name, f"has more than {MOST_PIXELS} pixels", cure="give a smaller one", value=path) from None
    except (OSError, ValueError, SyntaxError, RuntimeError) as error:
        raise InputError(name, f"cannot be read ({getattr(error, 'strerror', None) or error})", value=path) from None


def _from_array(name: str, array: np.ndarray) -> Image.Image:
    if 0 in array.shape:
        raise InputError(name, f"is an array of shape {array.shape}, which is empty", cure="give an image with pixels")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        problem = f"{name} is an array of shape {array.shape}; an image is [H, W], [H, W, 3] or [H, W, 4]"
        raise InputError(f"{problem}; of latents pipe.decode makes one")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.bool_:
        array = array.astype(np.float32)
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
            raise InputError(name, f"is an array of {array.dtype}", cure="give uint8, or floats in 0..1")
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise InputError(name, "has values that are not finite (NaN or infinity)", cure="give floats in 0..1")
        if array.min() < 0 or array.max() > 1:
            raise InputError(name, "has values outside of 0..1", cure="of -1..1 give (x + 1) / 2, of 0..255 give uint8")
        array = np.rint(array * np.float32(255)).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))
