"""Operations on images and masks before and after inpainting. White pixels of a mask are generated."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter

from canvax.types import HostArray

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels, as in PIL."""

_RADII = (256, 64, 16, 16, 4, 4, 4, 4, 2, 2, 0)
"""Radii of the blurs that fill a hole, from distant colours to near ones."""


def resized(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize an image by Lanczos resampling."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)


def proportioned(image: Image.Image, width: int, height: int) -> Image.Image:
    """Cut the edges of an image to the proportions of a size, around its middle."""
    scale = min(image.width / width, image.height / height)
    wide, tall = (max(1, round(side * scale)) for side in (width, height))
    left, top = (image.width - wide) // 2, (image.height - tall) // 2
    return image if image.size == (wide, tall) else image.crop((left, top, left + wide, top + tall))


def blurred(mask: Image.Image, radius: float) -> Image.Image:
    """Soften a mask's edges by a Gaussian with this standard deviation in pixels."""
    return mask.filter(ImageFilter.GaussianBlur(radius)) if radius else mask


def rounded(mask: Image.Image) -> Image.Image:
    """Round a mask to black and white."""
    return mask.point([0] * 128 + [255] * 128)


def extended(image: Image.Image, sides: Box) -> Image.Image:
    """Extend an image on each side by repeating its edge pixels."""
    left, top, right, bottom = sides
    return Image.fromarray(np.pad(np.asarray(image), ((top, bottom), (left, right), (0, 0)), mode="edge"))


def around(mask: Image.Image | None, size: tuple[int, int], sides: Box) -> Image.Image:
    """Extend the mask of an image of ``size`` (width, height); new pixels are white."""
    left, top, right, bottom = sides
    whole = Image.new("L", (size[0] + left + right, size[1] + top + bottom), 255)
    whole.paste(Image.new("L", size, 0) if mask is None else mask, (left, top))
    return whole


def painted_over(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Fill the masked part of an image with the colours of its surroundings, and with their alpha."""
    if image.mode == "RGBA":
        whole = painted_over(image.convert("RGB"), mask)
        whole.putalpha(painted_over(image.getchannel("A").convert("RGB"), mask).getchannel(0))
        return whole
    kept = np.asarray(mask, np.float32)[..., None] < 127.5
    pixels = np.asarray(image, np.float32)
    painted = np.broadcast_to(pixels[kept[..., 0]].mean(axis=0), pixels.shape) if kept.any() else pixels
    outside = Image.fromarray(np.concatenate([np.where(kept, pixels, 0), 255 * kept], axis=-1).astype(np.uint8))
    for radius in _RADII:
        # Blur with black in the hole, then divide by the blurred share of pixels outside the hole.
        soft = np.asarray(outside.filter(ImageFilter.GaussianBlur(radius)), np.float32)
        weight = soft[..., 3:] / 255
        painted = painted + weight * (soft[..., :3] / np.maximum(weight, 1 / 255) - painted)
    return Image.fromarray(np.where(kept, pixels, np.clip(painted, 0, 255)).astype(np.uint8))


def box_of(mask: Image.Image, padding: int, height: int, width: int) -> Box:
    """Return the crop for inpainting: the masked part with ``padding``, in the aspect ratio of height to width.

    If nothing is masked, it is the whole image.
    """
    masked = mask.getbbox()
    if masked is None:
        return 0, 0, *mask.size
    sides = []
    ends = [(max(masked[i] - padding, 0), min(masked[i + 2] + padding, mask.size[i])) for i in (0, 1)]
    long = max((ends[0][1] - ends[0][0]) / width, (ends[1][1] - ends[1][0]) / height)
    for (begin, end), most, wanted in zip(ends, mask.size, (width, height), strict=True):
        length = min(max(round(long * wanted), end - begin), most)
        first = min(max(begin - (length - (end - begin)) // 2, 0), most - length)
        sides.append((first, first + length))
    return sides[0][0], sides[1][0], sides[0][1], sides[1][1]


def as_floats(image: Image.Image) -> HostArray:
    """Convert an image to [H, W, C] float32 in 0..1."""
    return np.asarray(image, np.float32) / np.float32(255)


def pixels_resized(pixels: HostArray, height: int, width: int) -> HostArray:
    """Resize [H, W, C] float32 in 0..1 by Lanczos resampling."""
    if pixels.shape[:2] == (height, width):
        return pixels
    channels = [resized(Image.fromarray(pixels[..., i]), height, width) for i in range(pixels.shape[2])]
    return np.clip(np.stack([np.asarray(channel) for channel in channels], axis=-1), 0, 1)
