"""What a pipeline returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canvax.errors import InputError
from canvax.images.grid import make_grid
from canvax.images.metadata import save_numbered

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Result:
    """Pictures and how they came to be.

    Where several processes draw together, each has the images of its own devices alone: ``indices`` says which.

    Attributes:
        images: PIL images; none if the run was stopped by ``denoising_end``.
        pixels: the same as an array [B, H, W, 3] float32 in 0..1, before rounding to 8 bits.
        latents: what the decoder was given [B, h, w, C] float32; ``latents`` arguments have this layout too. After
            ``denoising_end`` noisy ones, in the variance-preserving frame, to go on from with ``denoising_start``.
        metadata: for each image, everything needed to draw it again.
        timings: seconds of each stage: ``compile`` (or loading what is compiled), ``encode``, ``denoise``, ``step``
            (one evaluation), ``decode``, and ``total``, the whole call; ``first_step`` is from the call to the end of
            its first step, which the command counts from the start of its process.
        compilations: programs that JAX compiled for this call; 0 after the first picture of a size and batch, and in a
            process that finds them in the cache.
        indices: which images of the call these are, counted from 0.
    """

    images: list[Image]
    pixels: np.ndarray = field(repr=False)
    latents: np.ndarray = field(repr=False)
    metadata: list[dict[str, Any]] = field(repr=False)
    timings: dict[str, float]
    compilations: int
    indices: list[int] = field(repr=False)

    def grid(self, rows: int | None = None, cols: int | None = None) -> Image:
        """All images in one, near square unless told otherwise."""
        return make_grid(self.images, rows, cols)

    def save(self, folder: str | Path) -> list[Path]:
        """Write each image as PNG with its metadata into ``folder`` under a free name; returns the paths."""
        if not self.images and self.metadata:
            raise InputError("there are no pictures to save: the run was stopped by denoising_end; go on from latents")
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"folder={str(folder)!r} is a file; give a folder, or use images[0].save(...)")
        folder.mkdir(parents=True, exist_ok=True)
        return [
            save_numbered(folder, image, meta, meta["seed"])
            for image, meta in zip(self.images, self.metadata, strict=True)
        ]
