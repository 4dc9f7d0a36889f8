"""How many images ``canvax generate`` makes at once: few sizes, so that few programs are compiled."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from canvax.cli.images import ImageRequest
from canvax.errors import CanvaxError

if TYPE_CHECKING:
    from canvax.pipelines.pipeline import StableDiffusion

BATCH_PIXELS = 512 * 512
"""Pixels that a device generates at once unless --batch-size is given: safe for a full-size model on any device."""

MAX_BATCH = 64

_SHARE_OF_PEAK = 0.4
_CPU_FLOPS = 2.5e10
"""FLOP/s of one core, about: only to tell seconds from minutes."""
_UNKNOWN_FLOPS = 2e13
"""FLOP/s of a device without a published peak, about."""


def batch_size(pipe: StableDiffusion, requests: Sequence[ImageRequest]) -> int:
    """Images in a batch: what any device can hold, spread evenly over the batches.

    Another size is taken where its programs are stored, and where the images that fill it up take less time than
    compiling. The images are the same, within rounding.
    """
    native = pipe.model.native_size
    pixels = max((request.height or native[0]) * (request.width or native[1]) for request in requests)
    most = min(max(1, BATCH_PIXELS // pixels), MAX_BATCH) * pipe.programs.mesh.shape["data"]
    groups = Counter(request.shared for request in requests)
    largest = max(groups.values())
    even = math.ceil(largest / math.ceil(largest / most))
    if len(groups) == 1:
        with suppress(CanvaxError):  # the call itself tells of a fault
            return _stored_size(pipe, requests[0], largest, even, most)
    return even


def batches(requests: Sequence[ImageRequest], size: int) -> Iterator[list[ImageRequest]]:
    """Cut the request into batches of at most ``size`` images that share their settings.

    Images keep their order, except that images with the same settings come together.
    """
    groups: dict[tuple[Any, ...], list[ImageRequest]] = {}
    for request in requests:
        groups.setdefault(request.shared, []).append(request)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _stored_size(pipe: StableDiffusion, first: ImageRequest, count: int, even: int, most: int) -> int:
    """``even``, or the size of stored programs with which ``count`` images like the first are done sooner."""
    from canvax.compile import cache
    from canvax.parallel.mesh import padded_batch
    from canvax.pipelines.text_to_image import work

    request, params = first.checked(pipe.model), pipe.params
    assert params is not None  # canvax.load has read them
    table, _, kinds = work(pipe.model, request)

    def stored(size: int) -> list[dict[str, Any]] | None:
        shape = (padded_batch(size, pipe.programs.mesh), *request.shape[1:])
        return pipe.programs.stored(params, pipe.programs.wanted(params, shape, kinds))

    if stored(even):
        return even
    best, most_saved = even, 0.0
    for size in sorted({program.batch for program in cache.programs()}):
        if even / 4 <= size <= most and (headers := stored(size)):
            filled_up = math.ceil(count / size) * size - count
            flops = max(header["flops"] for header in headers) / size * filled_up * len(table)
            saved = sum(header["seconds"] for header in headers) - flops / _flops_per_second(pipe)
            if saved > most_saved:
                best, most_saved = size, saved
    return best


def _flops_per_second(pipe: StableDiffusion) -> float:
    from canvax.planning.chips import peak_flops

    device = pipe.programs.mesh.devices.flat[0]
    if device.platform == "cpu":
        return _CPU_FLOPS * (os.cpu_count() or 1)
    return _SHARE_OF_PEAK * (peak_flops(device.device_kind, pipe.model.dtype) or _UNKNOWN_FLOPS)
