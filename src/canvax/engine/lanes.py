"""Batches that are stepped at the same time, each in a thread of its own, with the interface of one.

One program of a small model leaves cores of a CPU idle, since most of its operations are too short to be shared among
them; programs that run side by side fill them. A GPU or a TPU runs one program after the other, and needs one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from jax.sharding import Mesh

from canvax.compile.key import usable_cores
from canvax.engine.batch import Batch, ParkedImage
from canvax.types import HostArray

T = TypeVar("T")


def most_lanes(mesh: Mesh) -> int:
    """Programs at a time that may be of use: as many as there are cores if the mesh is one CPU device, else 1."""
    return usable_cores() if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" else 1


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each of some calls gives, run side by side. Where one raises, the others are waited for."""
    first, *others = calls
    if not others:
        return [first()]
    with ThreadPoolExecutor(len(others), "canvax lane") as pool:
        futures = [pool.submit(call) for call in others]
        return [first(), *(future.result() for future in futures)]


class Lanes:
    """Batches of one size, whose slots are counted through all of them.

    Args:
        batches: at least one.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches, self._each = batches, batches[0].latents[0]

    def join(self, images: Mapping[int, ParkedImage]) -> None:
        """As ``Batch.join``."""
        for lane, batch in enumerate(self._batches):
            if joining := {slot % self._each: image for slot, image in images.items() if slot // self._each == lane}:
                batch.join(joining)

    def carried(self) -> dict[int, ParkedImage]:
        """As ``Batch.carried``."""
        held = [batch.carried() for batch in self._batches]
        return {lane * self._each + slot: image for lane, in_lane in enumerate(held) for slot, image in in_lane.items()}

    def step(self, rows: int = 1) -> list[int]:
        """As ``Batch.step``; where an image finishes no lane goes on, since the others would wait for it."""
        rows = min([rows, *(rest for batch in self._batches if (rest := batch.rows_to_end))])
        done = side_by_side([partial(batch.step, rows) for batch in self._batches])
        return [lane * self._each + slot for lane, slots in enumerate(done) for slot in slots]

    def denoised(self, slot: int) -> HostArray:
        """D of an image in flight at the last row run [h, w, C] float32."""
        batch, at = self._at(slot)
        assert batch.denoised is not None
        return batch.unpacked(np.asarray(batch.denoised)[at])

    def take(self, slot: int) -> HostArray:
        """As ``Batch.take``."""
        batch, at = self._at(slot)
        return batch.take(at)

    def drop(self, slot: int) -> None:
        """As ``Batch.drop``."""
        batch, at = self._at(slot)
        batch.drop(at)

    def left(self, slot: int) -> int:
        """As ``Batch.left``."""
        batch, at = self._at(slot)
        return batch.left(at)

    def _at(self, slot: int) -> tuple[Batch, int]:
        return self._batches[slot // self._each], slot % self._each
