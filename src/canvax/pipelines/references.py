"""Reference images of a call: what a model that edits reads beside the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from canvax.errors import NO_VALUE, InputError
from canvax.images.inputs import fingerprint, read_images

MOST_PIXELS = 1024 * 1024
"""Of a reference image; larger ones are made smaller."""

MOST = 10
"""Reference images of a call."""


@dataclass(frozen=True, eq=False)
class References:
    """The reference images of a call.

    Attributes:
        images: RGB. Of each reference one for all images of the call, or one for each, of the same size.
        fingerprints: of those that the call gives, as they were given, for metadata.
    """

    images: list[list[Image.Image]]
    fingerprints: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each."""
        return tuple((references[0].height, references[0].width) for references in self.images)


def check_references(value: Any, step: int) -> References:
    """The references that a call gives as its image, for a model whose sizes are multiples of ``step`` pixels.

    Raises:
        InputError: one cannot be read or is too small, or there are too many.
    """
    several = isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 4
    count = len(value) if several else 1
    if not 1 <= count <= MOST:
        raise InputError("image", NO_VALUE, f"has {count} reference images", f"give 1 to {MOST}")
    images = read_images("image", value, count)
    return References([[_fitted(image, step)] for image in images], [fingerprint(image) for image in images])


def _fitted(image: Image.Image, step: int) -> Image.Image:
    """An image of at most ``MOST_PIXELS``, cut at its edges to multiples of ``step``."""
    if image.width * image.height > MOST_PIXELS:
        scale = math.sqrt(MOST_PIXELS / (image.width * image.height))
        size = int(image.width * scale), int(image.height * scale)
        image = image.resize(size, Image.Resampling.LANCZOS)
    width, height = (side - side % step for side in image.size)
    if not width or not height:
        problem = f"has {image.width} x {image.height} pixels"
        raise InputError("image", NO_VALUE, problem, f"give {step} x {step} pixels or more, of usual proportions")
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
