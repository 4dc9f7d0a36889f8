"""Reference images of a call, which models that edit read in addition to the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from canvax.call import MAX_SIDE
from canvax.errors import InputError, check_count
from canvax.images.convert import on_white
from canvax.images.inputs import fingerprint, read_images
from canvax.models.networks import Networks
from canvax.types import HostArray

MOST_PIXELS = 1024 * 1024
"""The most pixels of a reference image; larger images are made smaller."""

MIN_SIDE_WHOLE, MAX_SIDE_WHOLE = 64, 4096
"""Sides of a reference image that is read whole."""


@dataclass(frozen=True, eq=False)
class References:
    """The reference images of a call.

    Attributes:
        images: with the channels that the autoencoder reads. For each reference, one for all images of the call, or
            one for each of the same size.
        views: the same as the text encoder sees them.
        fingerprints: hashes of the caller's images, for metadata.
    """

    images: list[list[Image.Image]]
    views: list[list[Image.Image]]
    fingerprints: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each."""
        return tuple((references[0].height, references[0].width) for references in self.images)

    def of(self, index: int) -> tuple[Image.Image, ...]:
        """Return the references of an image of the call, as the text encoder sees them."""
        return tuple(views[index % len(views)] for views in self.views)


def check_references(value: Any, networks: Networks, further: str = "image") -> References:
    """Read the reference images of a call and bring them to sizes that the networks read.

    ``further`` is the argument of those after the first, for errors: the command and the server have two.

    Raises:
        InputError: an image cannot be read or is too small, or there are too many.
    """
    count = len(value) if _are_several(value) else 1
    most = networks.denoiser.facts.most_references
    if not 1 <= count <= most:
        cure = f"give 1 to {most}" if most > 1 else "give 1"
        raise InputError(further if count else "image", f"makes {count} reference images", cure=cure)
    images = read_references(value, further, alpha=networks.image_mode == "RGBA")
    fitted = [_fitted(image, networks, count, further if i else "image") for i, image in enumerate(images)]
    views = [networks.text.view(*both) for both in zip(images, fitted, strict=True)]
    prints = [fingerprint(on_white(image)) for image in images]
    return References([[image] for image in fitted], [[view] for view in views], prints)


def read_references(value: Any, further: str = "image", *, alpha: bool = False) -> list[Image.Image]:
    """Read the reference images of a call; ``further`` as for ``check_references``.

    Raises:
        InputError: an image cannot be read.
    """
    if not _are_several(value):
        return read_images("image", value, 1, alpha=alpha)
    return [read_images(further if i else "image", [each], 1, alpha=alpha)[0] for i, each in enumerate(value)]


def _are_several(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 4


def masked_reference(images: list[Image.Image], networks: Networks) -> References:
    """Return the image of each image of a call, inside whose mask it is drawn, as its reference."""
    scaled = networks.denoiser.facts.reference_pixels
    fitted = [_fitted(image, networks, 1) for image in images] if scaled else images
    return References([fitted], [[networks.text.view(*both) for both in zip(images, fitted, strict=True)]])


def reference_grids(sizes: Sequence[tuple[int, int]], step: int) -> HostArray:
    """Return ``ids`` of the condition ``canvax.models.denoiser.REFERENCES`` for references of these sizes [R, 3].

    ``step`` is the side of a token in pixels.
    """
    ids = []
    for number, size in enumerate(sizes, 1):
        grid = np.indices([side // step for side in size], np.int32).reshape(2, -1).T
        ids.append(np.pad(grid, ((0, 0), (1, 0)), constant_values=number))
    return np.concatenate(ids)


def check_editing(networks: Networks, name: str) -> None:
    """Refuse reference images for a model that reads none.

    Raises:
        InputError: naming the model.
    """
    if not networks.denoiser.facts.edits:
        why = f"are for models that edit, and {name} is none"
        raise InputError("references", why, cure="leave them out")


def reference_sizes(
    value: int | Sequence[tuple[int, int]], size: tuple[int, int], networks: Networks
) -> tuple[tuple[int, int], ...]:
    """Return height and width of reference images as the model reads them.

    Args:
        value: their number, each of the height and width ``size``; or the height and width of each.
        size: height and width of the generated image.
        networks: networks of the model.

    Raises:
        InputError: there are too many, or a size cannot be used.
    """
    most = networks.denoiser.facts.most_references
    sizes = value if isinstance(value, list | tuple) else [size] * check_count("references", value, most)
    if len(sizes) > most:
        raise InputError("references", f"has {len(sizes)} sizes", cure=f"give 1 to {most}")
    read, step = [], networks.size_step
    for pair in sizes:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError("references", "is not a height and a width in pixels", value=pair)
        tall, wide = (check_count("references", side, MAX_SIDE) for side in pair)
        width, height = _size_read(wide, tall, networks, len(sizes))
        if not width or not height:
            raise InputError("references", f"is too small for multiples of {step} pixels", value=pair)
        read.append((height, width))
    return tuple(read)


def _size_read(width: int, height: int, networks: Networks, count: int) -> tuple[int, int]:
    """Return the width and height in which the model reads one of ``count`` references; 0 if it is too narrow."""
    facts, step = networks.denoiser.facts, networks.size_step
    if facts.reference_pixels:  # an even number of steps
        wide, double = math.sqrt(facts.reference_pixels * (width / height)), 2 * step
        return round(wide / double) * double, round(wide / (width / height) / double) * double
    if facts.reference_sizes:  # of two that are as near the narrower
        tall, wide = min(facts.reference_sizes, key=lambda size: (abs(width / height - size[1] / size[0]), size[1]))
        return wide, tall
    if whole := _whole(networks, count):
        return _canvas(width, height, step, whole)[1]
    width, height = _within(width, height)
    return width - width % step, height - height % step


def _within(width: int, height: int) -> tuple[int, int]:
    """Return width and height of an image, made smaller if it has more than ``MOST_PIXELS``."""
    scale = math.sqrt(MOST_PIXELS / (width * height))
    return (width, height) if scale >= 1 else (int(width * scale), int(height * scale))


def _whole(networks: Networks, count: int) -> int:
    """Return the most pixels of a single reference, which some models read whole; 0 if references are cut."""
    return networks.denoiser.facts.whole_reference if count == 1 else 0


def _canvas(width: int, height: int, step: int, pixels: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size that an image is resized to, and that of at most ``pixels`` that it is padded to.

    Both are width and height; the second are multiples of ``step``.
    """
    scale = min(1.0, math.sqrt(pixels / (width * height)), MAX_SIDE_WHOLE / max(width, height))
    while True:
        size = max(1, round(width * scale)), max(1, round(height * scale))
        wide, tall = (min(MAX_SIDE_WHOLE, max(MIN_SIDE_WHOLE, -(-side // step) * step)) for side in size)
        if wide * tall <= pixels:
            return size, (wide, tall)
        scale *= 0.995  # rounding up needs more room


def _padded(image: Image.Image, step: int, pixels: int) -> Image.Image:
    """Pad an image with its reflection to sides that are multiples of ``step``."""
    size, (width, height) = _canvas(*image.size, step, pixels)
    image = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
    if image.size == (width, height):
        return image
    left, top = (width - image.width) // 2, (height - image.height) // 2
    margins = (top, height - image.height - top), (left, width - image.width - left), (0, 0)
    mode = "reflect" if min(image.size) > step else "symmetric"
    return Image.fromarray(np.pad(np.asarray(image), margins, mode=mode))


def _fitted(image: Image.Image, networks: Networks, count: int, name: str = "image") -> Image.Image:
    """Bring one of ``count`` references to the size in which the model reads it: padded, resized, or cut at its edges.

    Raises:
        InputError: the image, in the argument ``name``, is too small or too narrow.
    """
    image, step, facts = image.convert(networks.image_mode), networks.size_step, networks.denoiser.facts
    if whole := _whole(networks, count):
        return _padded(image, step, whole)
    width, height = _size_read(*image.size, networks, count)
    if not width or not height:
        problem = f"has {image.width} x {image.height} pixels"
        raise InputError(name, problem, cure=f"give {step} x {step} pixels or more, of usual proportions")
    size = (width, height) if facts.reference_pixels or facts.reference_sizes else _within(*image.size)
    image = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
