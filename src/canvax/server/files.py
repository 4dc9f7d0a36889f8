"""Image files of finished images and of previews. Runs in separate threads."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from canvax.errors import CanvaxError
from canvax.images.convert import on_white, to_pil
from canvax.images.formats import quality_keywords, save_keywords, storable
from canvax.server.jobs import Format
from canvax.types import HostArray

PREVIEW_SIDE = 512
"""Pixels of a preview's longer side, at most."""

_LEARNT_FROM = 16
"""Images; a linear map does not get better by more."""


def image_file(pixels: HostArray, kind: Format, quality: int | None, metadata: Mapping[str, Any]) -> bytes:
    """Return the file of an image.

    Args:
        pixels: [H, W, C] float32 in 0..1.
        kind: format of the file.
        quality: quality of JPEG and WebP; None for the usual best.
        metadata: written into the file; empty for none.

    Raises:
        CanvaxError: pixels are not finite.
    """
    if not np.isfinite(pixels).all():
        raise CanvaxError(
            "the image has values that are not finite: the model overflowed its dtype; serve it with --dtype bfloat16 "
            "or float32, or lower the guidance scale"
        )
    name = kind.upper()
    out, image = io.BytesIO(), storable(to_pil(pixels[None])[0], name)
    image.save(out, name, **save_keywords(name, metadata) | quality_keywords(name, quality))
    return out.getvalue()


def preview_file(pixels: HostArray, size: tuple[int, int]) -> bytes:
    """Return a small JPEG of an unfinished image [H, W, C] float32, enlarged to at most ``size`` (width, height)."""
    image = on_white(to_pil(np.clip(np.nan_to_num(pixels), 0, 1)[None])[0])
    scale = min(1.0, PREVIEW_SIDE / max(size))
    small = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
    if image.size != small:
        image = image.resize(small, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return out.getvalue()


class Colours:
    """A linear map from latents to colours on white, learnt from images that were decoded: a preview in no time.

    Each latent pixel has one colour, so it shows composition and colours, not details.
    """

    def __init__(self, channels: int) -> None:
        self._lock = threading.Lock()
        self._xx, self._xy = np.eye(channels + 1) * 1e-3, np.zeros((channels + 1, 3))
        self._seen = 0

    @property
    def known(self) -> bool:
        """True after the first image."""
        return self._seen > 0

    def learn(self, latents: HostArray, pixels: HostArray) -> None:
        """Learn from an image: latents [h, w, C] and pixels [H, W, 3 or 4] float32 in 0..1."""
        if self._seen >= _LEARNT_FROM or not np.isfinite(pixels).all():
            return
        height, width, _ = latents.shape
        pixels, alpha = pixels[..., :3], pixels[..., 3:]
        pixels = alpha * pixels + 1 - alpha if alpha.size else pixels
        tiles = pixels.reshape(height, pixels.shape[0] // height, width, pixels.shape[1] // width, 3)
        x, y = _with_one(latents), tiles.mean(axis=(1, 3)).reshape(-1, 3)
        with self._lock:
            self._xx += x.T @ x
            self._xy += x.T @ y
            self._seen += 1

    def pixels(self, latents: HostArray) -> HostArray:
        """Return pixels [h, w, 3] float32 of latents [h, w, C]."""
        with self._lock:
            weights = np.linalg.solve(self._xx, self._xy)
        return (_with_one(latents) @ weights).reshape(*latents.shape[:2], 3).astype(np.float32)


def _with_one(latents: HostArray) -> HostArray:
    flat = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
    return np.concatenate([flat, np.ones((len(flat), 1))], axis=1)
