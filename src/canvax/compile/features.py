"""Outputs of encoders by content: a text or an image that was encoded is not encoded again.

A prompt and an image that are repeated give the same bits as before, because an entry is found only for the same
program, the same parameter arrays and the same input.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from canvax.compile.kinds import Compiled
from canvax.parallel.place import local_indices, local_rows, put
from canvax.params import Params
from canvax.types import Array, HostArray

MOST_BYTES = 2**28
"""The most bytes of features in the host's memory; those that were used longest ago are dropped first."""

MOST_SOURCES = 32
"""The most pairs of a program and its parameters that have features."""


class _Source(NamedTuple):
    """A program and its parameters, as weak references: features keep no weights in memory."""

    executable: Any
    leaves: list[weakref.ref[Any]]

    def is_of(self, executable: Any, leaves: Sequence[Any]) -> bool:
        """Check that the same arrays of parameters go through the same program."""
        same = self.executable is executable and len(self.leaves) == len(leaves)
        return same and all(ref() is leaf for ref, leaf in zip(self.leaves, leaves, strict=True))


class Features:
    """A cache of the outputs of encoders. Each of several processes that generate together has the same entries:
    nothing but the order of calls and the size of the features decides what is dropped.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._counts: Counter[str] = Counter()
        self._most_bytes, self._bytes = most_bytes, 0
        self._sources: OrderedDict[int, _Source] = OrderedDict()
        self._kept: OrderedDict[tuple[int, bytes], Any] = OrderedDict()
        self._last = 0
        self._lock = threading.Lock()

    def __call__(self, compiled: Compiled, params: Params, *inputs: Any) -> list[Any]:
        """Return the outputs of an encoder for each row, as arrays of the host.

        Args:
            compiled: the encoder's program, whose outputs for a row depend on that row alone.
            params: the parameters of all components.
            inputs: trees of arrays [n, ...] of the host; n need not be the program's batch.
        """
        leaves, structure = jax.tree.flatten(inputs)
        rows = list(zip(*leaves, strict=True))
        source = self._source(compiled, params)
        keys = [(source, _digest(row)) for row in rows]
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            missing = {key: i for i, key in enumerate(keys) if key not in found}
            self._counts += Counter(hit=len(rows) - len(missing), miss=len(missing))
        specs = jax.tree.leaves(compiled.program.inputs)
        batch, split = specs[0].shape[0], specs[0].sharding
        # Each process encodes every row on its devices, so that it has the features of all.
        local = local_indices(batch, split)
        for start in range(0, len(missing), len(local)):
            chunk = dict(list(missing.items())[start : start + len(local)])
            each = [*chunk.values()]
            each += each[-1:] * (len(local) - len(each))
            placed = []
            for leaf, spec in zip(leaves, specs, strict=True):
                whole = np.zeros(spec.shape, spec.dtype)
                whole[local] = leaf[each]
                placed.append(put(whole, split))
            outputs = compiled(params, *jax.tree.unflatten(structure, placed))
            host = jax.tree.map(lambda array: local_rows(array, shared=True)[1], outputs)
            found |= {key: jax.tree.map(lambda array, i=i: array[i].copy(), host) for i, key in enumerate(chunk)}
        if source:
            self._keep({key: found[key] for key in keys})
        return [found[key] for key in keys]

    def taken(self) -> dict[str, int]:
        """Return how many rows were found ("hit") and encoded ("miss") since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def clear(self) -> None:
        """Drop all features."""
        with self._lock:
            self._kept.clear()
            self._sources.clear()
            self._bytes = 0

    def _source(self, compiled: Compiled, params: Params) -> int:
        """Return the number of a program and its parameters; 0 if these can change in place."""
        leaves = jax.tree.leaves(compiled.program.weights(params))
        if not all(isinstance(leaf, Array) for leaf in leaves):
            return 0
        with self._lock:
            number = next((i for i, it in self._sources.items() if it.is_of(compiled.executable, leaves)), 0)
            if not number:
                self._last += 1
                number = self._last
                self._sources[number] = _Source(compiled.executable, [weakref.ref(leaf) for leaf in leaves])
            self._sources.move_to_end(number)
            while len(self._sources) > MOST_SOURCES:
                gone, _ = self._sources.popitem(last=False)
                for key in [key for key in self._kept if key[0] == gone]:
                    self._drop(key)
            return number

    def _keep(self, used: dict[tuple[int, bytes], Any]) -> None:
        with self._lock:
            for key, features in used.items():
                if key in self._kept:
                    self._kept.move_to_end(key)
                else:
                    self._kept[key] = features
                    self._bytes += _size(features)
            while self._bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[int, bytes]) -> None:
        self._bytes -= _size(self._kept.pop(key))


def _digest(row: Sequence[HostArray]) -> bytes:
    """Return a digest of the arrays of a row; the program determines their shapes and dtypes."""
    digest = hashlib.blake2b(digest_size=16)
    for array in row:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _size(features: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(features))
