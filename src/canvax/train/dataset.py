"""Samples of several shapes: all samples of an update have one shape, and shape and samples depend on its number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.train.buckets import bucket_of_update
from canvax.train.session import batch_indices, send
from canvax.types import HostArray


@dataclass(frozen=True, eq=False)
class Dataset:
    """The data of ``canvax.train.run``: ``dataset(steps done, state)`` returns the samples of the next step.

    Attributes:
        parts: pytrees of arrays [N, ...], one for each shape of samples.
        batch: samples of a step, ``(B,)``; ``(accumulate, B)`` for ``make_step(accumulate=...)``.
        mesh: the devices; the last number of ``batch`` is split over ``data``.
        seed: seed of the order.
        repeats: for each part, how often each sample comes in an epoch, [N]; by default once.
        changed: ``(part, samples [n], random numbers of the step) -> arrays [n, ...]`` that replace those of the same
            names, in parts that are dicts.
    """

    parts: Sequence[Any]
    batch: tuple[int, ...]
    mesh: Mesh
    seed: int = 0
    repeats: Sequence[Sequence[int]] | None = None
    changed: Callable[[int, HostArray, np.random.Generator], Mapping[str, Any]] | None = None
    ahead: ClassVar[bool] = True
    _rows: list[HostArray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        counts = [{len(leaf) for leaf in jax.tree.leaves(part)} for part in self.parts]
        if not self.parts or any(len(of_part) != 1 for of_part in counts):
            raise InputError("parts", "have arrays of different lengths, or none", value=counts)
        if self.batch[-1] % self.mesh.shape["data"]:
            raise InputError("batch", f"cannot be split over {self.mesh.shape['data']} devices", value=self.batch[-1])
        sizes = [count for (count,) in counts]
        repeats = self.repeats or [np.ones(count, np.int32) for count in sizes]
        if [len(of_part) for of_part in repeats] != sizes or any(min(of_part) < 1 for of_part in repeats):
            raise InputError("repeats", f"are not a number for each sample of parts of {sizes}", value=self.repeats)
        rows = [np.repeat(np.arange(count), times) for count, times in zip(sizes, repeats, strict=True)]
        object.__setattr__(self, "_rows", rows)

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return sum(map(len, self._rows))

    def chosen(self, done: int) -> tuple[int, HostArray]:
        """Return the part of the next step, and its samples there, an array of the shape ``batch``."""
        count, counts = math.prod(self.batch), [len(rows) for rows in self._rows]
        part, earlier = bucket_of_update(self.seed, done, count, counts)
        (places,) = batch_indices(self.seed, earlier, 1, count, counts[part], stream=part)
        return part, self._rows[part][places].reshape(self.batch)

    def __call__(self, done: int, state: Any = None) -> Any:
        """Return the samples of the step after ``done`` ones, on the devices; they do not depend on the state."""
        part, rows = self.chosen(done)
        if self.changed is None:
            return send(self.parts[part], rows, self.mesh)
        random = np.random.Generator(np.random.Philox(key=[self.seed, done], counter=[0, 0, 2, 0]))
        new = self.changed(part, rows.reshape(-1), random)
        kept = {name: tree for name, tree in self.parts[part].items() if name not in new}
        return send(kept, rows, self.mesh) | send(new, np.arange(rows.size).reshape(rows.shape), self.mesh)
