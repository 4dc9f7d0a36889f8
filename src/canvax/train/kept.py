"""Encoded images and texts that are kept on disk, so that each is encoded once, and need not fit into memory.

A file is named by a hash of everything that its numbers depend on: the image or the tokens, the size, and the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from canvax.errors import CheckpointError
from canvax.families.base import Model
from canvax.files import remove_leftovers
from canvax.types import HostArray
from canvax.weights.entries import open_weight_file
from canvax.weights.safetensors import ArrayToSave, open_safetensors, write_safetensors

_VERSION = 1
"""Part of all names; changed when the same image or text is encoded to other numbers."""
ENCODED_AT_ONCE = 4
"""Images or texts of a batch."""
_SAMPLE = 4096
"""Bytes at the beginning and end of each array that tell weights from other weights."""


@dataclass(frozen=True)
class Store:
    """A folder of encoded images and texts. Files appear whole or not at all."""

    folder: Path

    def __post_init__(self) -> None:
        if self.folder.is_dir():
            remove_leftovers(self.folder)

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self.folder / f"{name}.safetensors"

    def missing(self, names: Sequence[str]) -> list[int]:
        """Return the positions of the names without a file; of equal names the first one."""
        first = {name: i for i, name in reversed(list(enumerate(names)))}
        return sorted(i for name, i in first.items() if not self.path(name).is_file())

    def progress(self, missing: Sequence[int], names: Sequence[str], noun: str) -> str:
        """Return a message about the files that are missing."""
        if missing:
            return f"encoding {len(missing)} of {len(names)} {noun} into {self.folder}"
        return f"{len(names)} encoded {noun} are kept in {self.folder}"

    def write(self, name: str, arrays: Mapping[str, HostArray]) -> None:
        """Write the arrays of a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = [ArrayToSave(key, array.shape, array.dtype, partial(_same, array)) for key, array in arrays.items()]
        write_safetensors(self.path(name), saved, {})

    def read(self, name: str) -> dict[str, HostArray]:
        """Read the arrays of a file.

        Raises:
            CheckpointError: it is damaged.
        """
        return {entry.name: entry.read() for entry in self._entries(name)}

    def rows(self, names: HostArray, key: str) -> Lazy:
        """Return the arrays ``key`` of the files ``names``, of any shape, as one array that is read when indexed."""

        def entry_of(name: str) -> Any:
            (entry,) = [entry for entry in self._entries(name) if entry.name == key]
            return entry

        first = entry_of(names.flat[0])

        def row(index: int) -> HostArray:
            arrays = [entry_of(name).read() for name in names[index : index + 1].flat]
            return np.stack(arrays).reshape((*names.shape[1:], *first.shape))

        return Lazy((*names.shape, *first.shape), first.dtype, row)

    def _entries(self, name: str) -> list[Any]:
        try:
            return open_safetensors(self.path(name))
        except CheckpointError as error:
            raise CheckpointError(f"{error} It is made again if you delete it.") from None


@dataclass(frozen=True, eq=False)
class Lazy:
    """An array [N, ...] whose rows are read when they are indexed.

    Attributes:
        shape: shape of the whole array.
        dtype: dtype of the whole array.
        row: returns the row of an index, [...].
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    row: Callable[[int], HostArray]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Any) -> HostArray:
        chosen = np.arange(len(self))[indices]
        rows = np.empty((*chosen.shape, *self.shape[1:]), self.dtype)
        for place in np.ndindex(chosen.shape):
            rows[place] = self.row(int(chosen[place]))
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def in_batches(positions: Sequence[int], key: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """Yield the positions in batches of at most ``ENCODED_AT_ONCE`` with the same ``key``."""
    groups: dict[Hashable, list[int]] = {}
    for position in positions:
        groups.setdefault(key(position), []).append(position)
    for group in groups.values():
        yield from (group[start : start + ENCODED_AT_ONCE] for start in range(0, len(group), ENCODED_AT_ONCE))


def name_of(*parts: Any) -> str:
    """Return the name of a file that depends on these parts: plain values and arrays."""
    digest = hashlib.sha256(str(_VERSION).encode())
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def fingerprint(model: Model, components: Collection[str]) -> str:
    """Return a hash of configs and weights of components: of names, shapes and some bytes of each array."""
    digest = hashlib.sha256()
    for component in sorted(components):
        digest.update(json.dumps([component, model.files.config(component)], sort_keys=True).encode())
        for entry in sorted(model.files.entries(component), key=lambda entry: entry.name):
            digest.update(f"{entry.name} {entry.shape} {entry.stored}".encode())
            (begin, length), (last, size) = entry.segments[0], entry.segments[-1]
            with open_weight_file(entry.path) as file:
                for start, count in ((begin, min(length, _SAMPLE)), (max(last, last + size - _SAMPLE), _SAMPLE)):
                    file.seek(start)
                    digest.update(file.read(min(count, size)))
    return digest.hexdigest()[:16]


def _same(array: HostArray) -> HostArray:
    return array
