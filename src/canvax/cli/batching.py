"""How many images ``canvax generate`` makes at once: few sizes, so that few programs are compiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from canvax.cli.images import ImageRequest

if TYPE_CHECKING:
    from canvax.pipelines.pipeline import StableDiffusion

BATCH_PIXELS = 512 * 512
"""Pixels that a device generates at once unless --batch-size is given: safe for a full-size model on any device."""

MAX_BATCH = 64


def batch_size(pipe: StableDiffusion, requests: Sequence[ImageRequest]) -> int:
    """Images in a batch: what any device can hold, spread evenly over the batches."""
    native = pipe.model.native_size
    pixels = max((request.height or native[0]) * (request.width or native[1]) for request in requests)
    most = min(max(1, BATCH_PIXELS // pixels), MAX_BATCH) * pipe.programs.mesh.shape["data"]
    largest = max(Counter(request.shared for request in requests).values())
    return math.ceil(largest / math.ceil(largest / most))


def batches(requests: Sequence[ImageRequest], size: int, *, edits: bool = False) -> Iterator[list[ImageRequest]]:
    """Cut the request into batches of at most ``size`` images that share their settings and, where the model ``edits``,
    the image that it reads.

    Images keep their order, except that images with the same settings come together.
    """
    groups: dict[tuple[Any, ...], list[ImageRequest]] = {}
    for request in requests:
        read = request.image if edits and request.strength is None and request.mask is None else None
        groups.setdefault((*request.shared, read), []).append(request)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]
