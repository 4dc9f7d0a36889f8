"""What a pipeline returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from canvax.errors import CanvaxError, InputError
from canvax.files import named_path
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage, names_file
from canvax.images.grid import make_grid
from canvax.images.metadata import save_image, save_numbered


@dataclass(frozen=True, eq=False)
class Result:
    """Images and how they came to be. It can be used as the list of its images, and a notebook shows them.

    Where several processes generate together, each has the images of its own devices alone: ``indices`` says which.

    Attributes:
        images: PIL images, which write their metadata when they are saved as PNG, JPEG or WebP; none if the run was
            stopped by ``denoising_end``; arrays if the call had ``output_type``.
        pixels: the same as an array [B, H, W, 3] float32 in 0..1, before rounding to 8 bits. With ``output_type="jax"``
            it is a JAX array on the devices, and so is ``latents``.
        latents: what the decoder was given [B, h, w, C] float32; ``latents`` arguments have this layout too. After
            ``denoising_end`` noisy ones, in the variance-preserving frame, to go on from with ``denoising_start``.
        metadata: for each image, everything needed to generate it again.
        timings: seconds of each stage: ``compile`` (or loading what is compiled), ``encode``, ``denoise``, ``step``
            (one evaluation), ``decode``, and ``total``, the whole call; ``first_step`` is from the call to the end of
            its first step, which the command counts from the start of its process.
        compilations: programs that JAX compiled for this call; 0 after the first image of a size and batch, and in a
            process that finds them in the cache.
        indices: which images of the call these are, counted from 0.
    """

    images: list[Image.Image]
    pixels: np.ndarray = field(repr=False)
    latents: np.ndarray = field(repr=False)
    metadata: list[dict[str, Any]] = field(repr=False)
    timings: dict[str, float]
    compilations: int
    indices: list[int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Image.Image]:
        return iter(self.images)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image.Image]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.images[index]

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: all images in one."""
        if not len(self.images):
            return None
        buffer = BytesIO()
        make_grid(to_pil(self.pixels)).save(buffer, "PNG")
        return buffer.getvalue()

    def _check_finished(self) -> None:
        if not len(self.pixels) and self.metadata:
            raise InputError("there are no images: the run was stopped by denoising_end; go on from result.latents")

    def grid(self, rows: int | None = None, cols: int | None = None) -> Image.Image:
        """All images in one, near square unless ``rows`` or ``cols`` are given, with the metadata of each."""
        self._check_finished()
        return GeneratedImage.of(make_grid(to_pil(self.pixels), rows, cols), {"grid": self.metadata})

    def save(self, path: str | Path) -> list[Path]:
        """Write each image with its metadata; returns the paths.

        Args:
            path: a folder, where each image gets a free name; or the name of one image, ``NAME.png``, ``.jpg`` or
                ``.webp``.

        Raises:
            InputError: there is no image, such a file is there already, or one name was given for several images.
        """
        self._check_finished()
        path, images = named_path("path", path), to_pil(self.pixels)
        if names_file(path):
            if len(images) != 1:
                raise InputError("path", path, f"is one file for {len(images)} images", "give a folder")
            make_folder(path.parent)
            return [save_image(path, images[0], self.metadata[0])]
        if path.exists() and not path.is_dir():
            raise InputError("path", path, "is a file", "give a folder, or a name that ends in .png")
        make_folder(path)
        return [
            save_numbered(path, image, meta, meta["seed"]) for image, meta in zip(images, self.metadata, strict=True)
        ]


def make_folder(path: Path) -> None:
    """The folder ``path``, made if it is not there.

    Raises:
        CanvaxError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CanvaxError(f"{path}: the folder cannot be made ({getattr(error, 'strerror', None) or error})") from None
