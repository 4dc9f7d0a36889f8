"""The msgpack files of Flax models: ``diffusion_flax_model.msgpack`` and ``flax_model.msgpack``.

A file is one nested map. Its leaves are extension objects, type 1 for arrays and type 3 for scalars, whose payload is
the msgpack triple (shape, dtype name, bytes). Arrays over 1 GiB are maps marked ``__msgpack_chunked_array__`` with a
shape and flat chunks. (Format: ``flax.serialization``.)

Only the few bytes around each array are decoded, from small windows of the file: an ordinary ``unpackb`` would hold a
3.4 GB model twice, and would believe any length that a hostile file declares. A streaming ``msgpack.Unpacker`` buffers
an array to skip it, so it would read the whole file before an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import msgpack
import numpy as np

from canvax.errors import CheckpointError
from canvax.files import DAMAGED
from canvax.weights.entries import (
    MAX_NAME,
    MAX_RANK,
    Entry,
    check_head,
    check_name,
    check_shape,
    check_size,
    file_size,
    file_stamp,
    open_weight_file,
)

MAX_DEPTH = 32
MAX_ENTRIES = 100_000
_WINDOW = 4096
_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _SCALAR = 1, 3

_EXT_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXT_SIZED = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_BIN_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4}

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


def open_flax_msgpack(path: Path) -> list[Entry]:
    """Open the arrays of a Flax file, in file order, named by their keys joined with ``/``; no array is read.

    Raises:
        CheckpointError: the file is truncated, inconsistent or not a Flax file.
    """
    with open_weight_file(path) as file:
        check_head(path, file.read(64))
        walker = _Walker(path, file)
        if not walker.at_map():
            raise CheckpointError(f"{path}: is not a Flax checkpoint (no map at its beginning). {DAMAGED}")
        walker.walk_map("", 1)
    if walker.position != walker.size:
        raise CheckpointError(f"{path}: has {walker.size - walker.position} bytes after its last array. {DAMAGED}")
    names = [entry.name for entry in walker.entries]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path}: names {twice!r} twice. {DAMAGED}")
    return walker.entries


@dataclass(frozen=True)
class _Piece:
    """An array object in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    nbytes: int


class _Walker:
    """Walks the maps of a file and skips array bytes."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size, self.stamp = file_size(file), file_stamp(file)
        self.position = 0
        self.entries: list[Entry] = []
        self._items = 0

    def walk_map(self, prefix: str, depth: int) -> None:
        """Collect the arrays of the map that starts here."""
        count = self._map_length(depth)
        for i in range(count):
            step = self._key()
            if i == 0 and step == _CHUNKED:
                return self._chunked(prefix, count, depth)
            name = f"{prefix}/{step}" if prefix else step
            if self.at_map():
                self.walk_map(name, depth + 1)
            else:
                piece = self._piece(name)
                self._add(name, piece.shape, [piece])
        return None

    def at_map(self) -> bool:
        """Return whether the next object is a map."""
        code = self._window(1)[0]
        return 0x80 <= code <= 0x8F or code in (0xDE, 0xDF)

    def _chunked(self, name: str, count: int, depth: int) -> None:
        """Read an array in flat chunks: the rest of a map whose first key was the marker."""
        self._decode("unpack", limit=16)  # the marker's value, always true
        shape, pieces = None, []
        for _ in range(count - 1):
            key = self._key()
            if key == "shape" and self.at_map():
                sizes = [self._decode("unpack", limit=16) for _ in self._numbered(name, depth + 1)]
                shape = check_shape(self.path, name, sizes)
            elif key == "chunks" and self.at_map():
                pieces = [self._piece(name) for _ in self._numbered(name, depth + 1)]
            else:
                self._fail(f"array {name!r} has an unknown part {key!r}")
        if shape is None or not pieces or any(piece.dtype != pieces[0].dtype for piece in pieces):
            self._fail(f"array {name!r} is in chunks that do not belong together")
        self._add(name, shape, pieces)

    def _numbered(self, name: str, depth: int) -> Iterator[int]:
        """Read the keys "0", "1", ... of a map that represents a tuple; the caller reads each value."""
        for i in range(self._map_length(depth)):
            if self._key() != str(i):
                self._fail(f"array {name!r} has its parts out of order")
            yield i

    def _add(self, name: str, shape: tuple[int, ...], pieces: list[_Piece]) -> None:
        check_size(self.path, name, shape, pieces[0].dtype, sum(piece.nbytes for piece in pieces))
        segments = tuple((piece.offset, piece.nbytes) for piece in pieces)
        self.entries.append(Entry(name, shape, pieces[0].dtype, self.path, segments, "flax", self.stamp))

    def _piece(self, name: str) -> _Piece:
        """Return the array object that starts here, and move past it."""
        code, payload, end = self._extension(name)
        if code not in (_ARRAY, _SCALAR):
            self._fail(f"{name!r} holds an object of unknown type {code}")
        self.position = payload
        if self._decode("read_array_header", limit=8) != 3:
            self._fail(f"array {name!r} is not a (shape, dtype, bytes) triple")
        shape = check_shape(self.path, name, self._decode("unpack", limit=16 * MAX_RANK))
        kind = self._decode("unpack", limit=64)
        if not isinstance(kind, str) or kind not in DTYPES:
            self._fail(f"array {name!r} has the unknown dtype {str(kind)[:40]!r}")
        offset, nbytes = self._sized(_BIN_SIZED, f"the bytes of array {name!r}")
        if offset + nbytes != end:
            self._fail(f"array {name!r} claims {nbytes} bytes where its object ends after {end - offset}")
        check_size(self.path, name, shape, DTYPES[kind], nbytes)
        self.position = end
        return _Piece(shape, DTYPES[kind], offset, nbytes)

    def _extension(self, name: str) -> tuple[int, int, int]:
        """Return type code, first byte and end of the extension object that starts here."""
        code = self._window(1)[0]
        if code in _EXT_FIXED:
            start, length = self.position + 1, _EXT_FIXED[code]
        elif code in _EXT_SIZED:
            start, length = self._sized(_EXT_SIZED, f"the array {name!r}")
        else:
            self._fail(f"{name!r} is not an array")
        self.position = start
        kind = self._window(1)[0]
        if start + 1 + length > self.size:
            self._fail(f"is truncated: array {name!r} claims {length} bytes, {self.size - start - 1} are left")
        return kind, start + 1, start + 1 + length

    def _sized(self, widths: dict[int, int], what: str) -> tuple[int, int]:
        """Return first byte and length of an object whose first byte determines the width of its length field."""
        width = widths.get(self._window(1)[0])
        if width is None:
            self._fail(f"{what} are not stored as bytes")
        field = self._window(1 + width)
        return self.position + 1 + width, int.from_bytes(field[1:], "big")

    def _map_length(self, depth: int) -> int:
        """Read a map's header; refuse sizes that no real checkpoint has."""
        count = self._decode("read_map_header", limit=8)
        self._items += count
        if depth > MAX_DEPTH:
            self._fail(f"nests more than {MAX_DEPTH} levels deep")
        if 2 * count > self.size - self.position:
            self._fail(f"claims a map of {count} entries with {self.size - self.position} bytes left")
        if self._items > MAX_ENTRIES:
            self._fail(f"claims more than {MAX_ENTRIES} entries")
        return count

    def _key(self) -> str:
        return check_name(self.path, self._decode("unpack", limit=MAX_NAME + 8))

    def _decode(self, method: str, limit: int) -> Any:
        """Decode a small object at the current position from at most ``limit`` bytes."""
        window = self._window(1, limit)
        unpacker = msgpack.Unpacker(
            max_buffer_size=_WINDOW, max_array_len=MAX_RANK, max_map_len=0, max_ext_len=0, max_bin_len=0, raw=False
        )
        unpacker.feed(window)
        try:
            value = getattr(unpacker, method)()
        except (ValueError, msgpack.UnpackException):
            self._fail(f"cannot be decoded at byte {self.position}")
        self.position += unpacker.tell()
        return value

    def _window(self, need: int, limit: int | None = None) -> bytes:
        """Return at least ``need`` and at most ``limit`` bytes from the current position."""
        self.file.seek(self.position)
        window = self.file.read(limit or need)
        if len(window) < need:
            self._fail(f"is truncated: it ends at byte {self.size}")
        return window

    def _fail(self, fault: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {fault}. {DAMAGED}")
