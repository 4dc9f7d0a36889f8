"""Images and masks of the old pipelines: made arrays [B, C, H, W], checked, and their latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from PIL import Image

from canvax.errors import InputError
from canvax.flax_api.keys import LatentsShape, encoding_noise, wrap_keys
from canvax.images.given import read_images
from canvax.images.masks import as_floats, pixels_resized, resized
from canvax.pipelines.checks import floats

STEP, CONTROL_STEP = 32, 64
"""Pixels that the sides of a prepared image, and of a control image, are a multiple of, as they were."""


@dataclass(frozen=True, eq=False)
class Given:
    """The images of a call. D is 1 without a device axis; b is B, or 1 for one image for all of a device's.

    pixels [D, b, H, W, 3] in 0..1, masks [N, h, w, 1] of 0 and 1 or None, and the noise of the encoding [N, h, w, C].
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
        """What ``check_given`` returned, at the size of latents [B, C, h, w] with ``factor`` pixels each."""
        batch, _, *small = shape
        height, width = (side * factor for side in small)
        masks, devices = None, lead[0] if len(lead) == 2 else 1
        if pixels.shape[2:4] != (height, width):
            flat = [pixels_resized(one, height, width) for one in pixels.reshape(-1, *pixels.shape[2:])]
            pixels = np.stack(flat).reshape(*pixels.shape[:2], height, width, 3)
        if mask is not None:
            rows, columns = (
                np.arange(wanted) * own // wanted for wanted, own in zip((height, width), mask.shape[2:4], strict=True)
            )
            mask = mask[:, :, rows][:, :, :, columns] >= 0.5
            pixels = np.where(mask, np.float32(0.5), pixels)
            mask = mask[:, :, ::factor, ::factor].astype(np.float32)
            masks = np.broadcast_to(mask, (devices, batch, *mask.shape[2:])).reshape(-1, *mask.shape[2:])
        keys = wrap_keys(prng_seed, devices if len(lead) == 2 else None).reshape(devices)
        return cls(pixels, masks, encoding_noise(keys, shape))

    def encoded(self, encode: Callable[[np.ndarray], Any], devices: int) -> np.ndarray:
        """Latents [N, h, w, C], drawn from what ``encode`` gives for an image of each device [D, H, W, 3]."""
        pixels = np.broadcast_to(self.pixels, (devices, *self.pixels.shape[1:]))
        moments = [jax.device_get(encode(pixels[:, i])) for i in range(pixels.shape[1])]
        means, deviations = (np.stack(parts, axis=1) for parts in zip(*moments, strict=True))
        noise = self.noise.reshape(devices, -1, *self.noise.shape[1:])
        return (means + deviations * noise).reshape(self.noise.shape)


def prepare_images(name: str, value: Any, count: int, *, grey: bool = False, step: int = STEP) -> np.ndarray:
    """Images for ``count`` prompts, [count, 3, H, W] float32 in 0..1, with ``grey`` [count, 1, H, W].

    Sides are brought down to multiples of ``step`` by Lanczos resampling.

    Raises:
        InputError: not images, not one for all or one for each, too small or of several sizes.
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


def check_given(given: Mapping[str, Any], lead: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """The image [D, b, H, W, 3] in 0..1 and the mask [D, b, H, W, 1] or None, float32; ``lead`` is [B], or [D, B].

    ``given`` holds them under their names, the image first.

    Raises:
        InputError: naming the argument, what is wrong with it and the cure.
    """
    (name, image), *others = given.items()
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
    """The control images of a call [D, b, H, W, 3] in 0..1, and how strong each is [N] float32; as in ``Given``."""

    pixels: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(cls, image: Any, scale: Any, lead: tuple[int, ...], step: int = CONTROL_STEP) -> Self:
        """The arguments of a call, checked.

        Raises:
            InputError: naming the argument, what is wrong with it and the cure.
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
            said = f"controlnet_conditioning_scale={scale!r:.80} is not a number, nor one for each image"
            raise InputError(f"{said} of {list(lead)}")
        return cls(pixels, scales.astype(np.float32))

    def read(self, encode: Callable[[np.ndarray], Any], devices: int, count: int) -> tuple[np.ndarray, ...]:
        """What a network keeps of each of ``count`` images [N, ...]; ``encode`` reads an image of each device."""
        pixels = np.broadcast_to(self.pixels, (devices, *self.pixels.shape[1:]))
        found = [jax.device_get(encode(pixels[:, i])) for i in range(pixels.shape[1])]
        kept = []
        for parts in zip(*found, strict=True):
            whole = np.stack(parts, axis=1)  # [D, b, ...]
            whole = np.broadcast_to(whole, (devices, count // devices, *whole.shape[2:]))
            kept.append(whole.reshape(-1, *whole.shape[2:]))
        return tuple(kept)


def _checked(name: str, value: Any, lead: tuple[int, ...], channels: int, least: int) -> np.ndarray:
    """[D, b, H, W, C] float32 of an array [(D,) b, C, H, W] with values in ``least``..1."""
    try:
        array = floats(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # as of deleted arrays, numbers of any length
        raise InputError(f"{name} is not an array of numbers; pass what prepare_inputs returned") from None
    given, wanted = array.shape[: len(lead)], array.shape[len(lead) : len(lead) + 1]
    counts = all(count in (1, most) for count, most in zip(given, lead, strict=False))
    if (
        array.ndim != len(lead) + 3
        or wanted != (channels,)
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
