"""Images and masks of the Flax pipelines: conversion to arrays [B, C, H, W], checks, and encoding to latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from PIL import Image

from canvax.errors import InputError
from canvax.flax_api.keys import LatentsShape, encoding_noise, wrap_keys
from canvax.images.inputs import read_images
from canvax.images.masks import as_floats, pixels_resized, resized
from canvax.pipelines.checks import floats

STEP, CONTROL_STEP = 32, 64
"""The sides of prepared images, and of control images, are multiples of these pixels, as in diffusers."""


@dataclass(frozen=True, eq=False)
class SourceImages:
    """The source images of a call. D is 1 without a device axis; b is B, or 1 for an image shared by a device's batch.

    pixels [D, b, H, W, 3] in 0..1, masks [N, h, w, 1] of 0 and 1 or None, noise of the encoding [N, h, w, C].
    """

    pixels: np.ndarray
    masks: np.ndarray | None
    noise: np.ndarray

    @classmethod
    def of(
        cls,
        pixels: np.ndarray,
        mask: np.ndarray | None,
        shape: LatentsShape,
        factor: int,
        prng_seed: Any,
        lead: tuple[int, ...],
    ) -> Self:
        """Resize the result of ``check_images`` to latents of ``shape`` [B, C, h, w], of ``factor`` pixels each."""
        batch, _, *small = shape
        height, width = (side * factor for side in small)
        masks, devices = None, lead[0] if len(lead) == 2 else 1
        if pixels.shape[2:4] != (height, width):
            flat = [pixels_resized(image, height, width) for image in pixels.reshape(-1, *pixels.shape[2:])]
            pixels = np.stack(flat).reshape(*pixels.shape[:2], height, width, 3)
        if mask is not None:
            rows, columns = (
                np.arange(new) * old // new for new, old in zip((height, width), mask.shape[2:4], strict=True)
            )
            mask = mask[:, :, rows][:, :, :, columns] >= 0.5
            pixels = np.where(mask, np.float32(0.5), pixels)
            mask = mask[:, :, ::factor, ::factor].astype(np.float32)
            masks = np.broadcast_to(mask, (devices, batch, *mask.shape[2:])).reshape(-1, *mask.shape[2:])
        keys = wrap_keys(prng_seed, devices if len(lead) == 2 else None).reshape(devices)
        return cls(pixels, masks, encoding_noise(keys, shape))

    def encoded(self, encode: Callable[[np.ndarray], Any], devices: int) -> np.ndarray:
        """Draw latents [N, h, w, C]; ``encode`` maps an image per device [D, H, W, 3] to mean and deviation."""
        pixels = np.broadcast_to(self.pixels, (devices, *self.pixels.shape[1:]))
        moments = [jax.device_get(encode(pixels[:, i])) for i in range(pixels.shape[1])]
        means, deviations = (np.stack(parts, axis=1) for parts in zip(*moments, strict=True))
        noise = self.noise.reshape(devices, -1, *self.noise.shape[1:])
        return (means + deviations * noise).reshape(self.noise.shape)


def prepare_images(name: str, value: Any, count: int, *, grey: bool = False, step: int = STEP) -> np.ndarray:
    """Read images for ``count`` prompts, [count, 3, H, W] float32 in 0..1, with ``grey`` [count, 1, H, W].

    Sides are reduced to multiples of ``step`` by Lanczos resampling.

    Raises:
        InputError: an image cannot be read or is too small, their number is neither 1 nor ``count``, or sizes differ.
    """
    images = []
    for image in read_images(name, value, count, grey=grey):
        height, width = (side // step * step for side in (image.height, image.width))
        if not height or not width:
            raise InputError(f"{name} is {_size(image)}; both sides need {step} pixels or more")
        images.append(resized(image, height, width))
    if len({image.size for image in images}) > 1:
        sizes = ", ".join(sorted({_size(image) for image in images}))
        raise InputError(f"{name}: the images have several sizes, {sizes}; bring them to one with image.resize")
    pixels = np.stack([np.atleast_3d(as_floats(image)) for image in images])
    return np.repeat(np.moveaxis(pixels, -1, 1), count // len(images), axis=0)


def check_images(images: Mapping[str, Any], lead: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the image [D, b, H, W, 3] in 0..1 and the mask [D, b, H, W, 1] or None, float32.

    ``images`` maps argument names to arrays, the image first; ``lead`` is [B], or [D, B].

    Raises:
        InputError: an array has another shape, dtype or range.
    """
    (name, image), *others = images.items()
    pixels = (_checked(name, image, lead, 3, -1) + 1) / 2
    for other, mask in others:
        mask = _checked(other, mask, lead, 1, 0)
        if mask.shape[2:4] != pixels.shape[2:4]:
            raise InputError(
                f"{other} is {mask.shape[3]} x {mask.shape[2]} and {name} {pixels.shape[3]} x {pixels.shape[2]}; "
                "prepare_inputs(prompt, image, mask) makes both"
            )
        return pixels, mask
    return pixels, None


@dataclass(frozen=True, eq=False)
class ControlImage:
    """The control images of a call [D, b, H, W, 3] in 0..1, with D and b as in ``SourceImages``, and scales [N]."""

    pixels: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(cls, image: Any, scale: Any, lead: tuple[int, ...], step: int = CONTROL_STEP) -> Self:
        """Check the arguments of a call and convert them.

        Raises:
            InputError: an argument has another shape, dtype or range.
        """
        pixels = _checked("image", image, lead, 3, 0)
        height, width = pixels.shape[2:4]
        if height % step or width % step:
            raise InputError(f"image is {width} x {height} pixels; both sides are multiples of {step}")
        try:
            scales = np.asarray(scale)
            scales = scales.astype(np.float32) if scales.dtype.kind in "fiu" else np.full(1, np.nan)
            scales = scales[:, None] if scales.ndim == 1 and len(lead) == 2 and len(scales) == lead[0] else scales
            scales = np.broadcast_to(scales, lead).reshape(-1)
        except (TypeError, ValueError):
            scales = np.full(1, np.nan)
        if not np.isfinite(scales).all():
            problem = f"controlnet_conditioning_scale={scale!r:.80} is not a number, nor one for each image"
            raise InputError(f"{problem} of {list(lead)}")
        return cls(pixels, scales.astype(np.float32))

    def read(self, encode: Callable[[np.ndarray], Any], devices: int, count: int) -> tuple[np.ndarray, ...]:
        """Return the network's features of each of ``count`` images [N, ...]; ``encode`` reads an image per device."""
        pixels = np.broadcast_to(self.pixels, (devices, *self.pixels.shape[1:]))
        features = [jax.device_get(encode(pixels[:, i])) for i in range(pixels.shape[1])]
        kept = []
        for parts in zip(*features, strict=True):
            whole = np.stack(parts, axis=1)  # [D, b, ...]
            whole = np.broadcast_to(whole, (devices, count // devices, *whole.shape[2:]))
            kept.append(whole.reshape(-1, *whole.shape[2:]))
        return tuple(kept)


def _checked(name: str, value: Any, lead: tuple[int, ...], channels: int, least: int) -> np.ndarray:
    """Check an array [(D,) b, C, H, W] with values in ``least``..1; return it as [D, b, H, W, C] float32."""
    try:
        array = floats(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # e.g. deleted arrays, huge integers
        raise InputError(f"{name} is not an array of numbers; pass what prepare_inputs returned") from None
    leading, channel_axis = array.shape[: len(lead)], array.shape[len(lead) : len(lead) + 1]
    counts = all(count in (1, most) for count, most in zip(leading, lead, strict=False))
    if (
        array.ndim != len(lead) + 3
        or channel_axis != (channels,)
        or 0 in array.shape
        or not counts
        or array.dtype != np.float32
    ):
        cure = "shard what prepare_inputs returned" if len(lead) == 2 else "pass what prepare_inputs returned"
        axes = ", ".join(map(str, (*lead, channels)))
        raise InputError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; this call takes [{axes}, H, W]: {cure}"
        )
    if not ((array >= least - 1e-3) & (array <= 1 + 1e-3)).all():
        raise InputError(f"{name} has values that are not in {least}..1; pass what prepare_inputs returned")
    array = np.moveaxis(array.clip(least, 1), -3, -1)
    return array if len(lead) == 2 else array[None]


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height}"
