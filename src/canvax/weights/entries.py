"""An array in a weight file: where it is, and how to read it without reading the whole file.

All file formats are opened as lists of ``Entry``. Opening checks every statement of the file about itself, so reading
an entry only copies bytes. Files are read, not memory-mapped: truncating or replacing a file while it is loaded causes
an error message, where a mapping would end the process with SIGBUS.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from canvax.errors import CheckpointError
from canvax.files import DAMAGED, open_regular
from canvax.types import HostArray

MAX_NAME = 512
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+\-]*")

MAX_RANK = 16

WEIGHTS = (".safetensors", ".gguf")
"""Suffixes of files that may hold a model or a part of one."""

PICKLES = (".ckpt", ".bin", ".pt", ".pth", ".pkl", ".pickle")
"""Suffixes of files that are not opened, since reading them can run code."""

UPSCALER = "an upscaler, which canvax does not use"
_UPSCALERS = ("dat", "esrgan", "ldsr", "realesrgan", "scunet", "swinir", "upscale_models")
"""Folders of A1111 and ComfyUI for upscalers."""
_UPSCALER = re.compile(r"esrgan|ultrasharp|^[248]x[-_]|x[248]plus", re.IGNORECASE)


class Decode(NamedTuple):
    """Conversion of stored items to numbers.

    Attributes:
        numbers: number of values per item: 1, or those of a block.
        begin: called with the entry before reading; returns a function (items, index of the first number) -> float32.
        name: display name of the quantisation; "" if the dtype of the items is enough.
    """

    numbers: int
    begin: Callable[[Entry], Callable[[HostArray, int], HostArray]]
    name: str = ""


@dataclass(frozen=True)
class Entry:
    """One array of a weight file.

    Attributes:
        name: name in the file: dotted in safetensors, keys joined by ``/`` in Flax files.
        shape: shape in numbers.
        dtype: dtype of the stored items (little-endian; bfloat16 and float8 through ``ml_dtypes``).
        path: the file.
        segments: (offset, length) in bytes of the pieces that make up the array, in order.
        order: ``torch`` stores (out, in, ...), ``flax`` stores arrays as they are in memory.
        stamp: ``file_stamp`` of the file whose header was read.
        decode: for quantised arrays, the conversion to numbers.
        companions: arrays that ``decode`` reads, such as scales.
        stored_as: name in the file, for errors of loading, which changes ``name``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    path: Path
    segments: tuple[tuple[int, int], ...]
    order: Literal["torch", "flax"]
    stamp: tuple[int, ...] = ()
    decode: Decode | None = None
    companions: Mapping[str, Entry] = field(default_factory=dict, hash=False)
    stored_as: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return math.prod(self.shape) // (self.decode.numbers if self.decode else 1) * self.dtype.itemsize

    @property
    def number_dtype(self) -> np.dtype:
        """Dtype of the numbers that ``read`` returns."""
        return np.dtype(np.float32) if self.decode else self.dtype

    @property
    def stored(self) -> str:
        """Storage format, for display."""
        return (self.decode.name if self.decode else "") or self.dtype.name

    @property
    def is_float(self) -> bool:
        """True if the numbers are real floating-point numbers."""
        return self.number_dtype.kind in "fV"  # ml_dtypes are of kind V

    def rows(self, *ranges: tuple[int, int]) -> Entry:
        """Return these ranges of the first axis, concatenated, as an entry; nothing is read."""
        count = self.shape[0]
        size = self.nbytes // count if count else 0
        segments = [piece for begin, end in ranges for piece in self._pieces(begin * size, end * size)]
        companions = {
            name: entry.rows(*ranges) if entry.shape[:1] == (count,) and count > 1 else entry
            for name, entry in self.companions.items()
        }
        shape = (sum(end - begin for begin, end in ranges), *self.shape[1:])
        return replace(self, shape=shape, segments=tuple(segments), companions=companions)

    def columns(self, begin: int, end: int) -> Entry:
        """Return a range of the last axis of a matrix as an entry; nothing is read.

        Raises:
            CheckpointError: the range ends inside a block.
        """
        rows, count = self.shape
        size, per = self.dtype.itemsize, self.decode.numbers if self.decode else 1
        if begin % per or end % per:
            raise CheckpointError(
                f"{self.path}: array {self.name!r} is stored in blocks of {per} numbers, one of which belongs to two "
                "layers. Take a file of another quantization."
            )
        starts = (row * count // per for row in range(rows))
        pieces = (self._pieces(size * (at + begin // per), size * (at + end // per)) for at in starts)
        return replace(self, shape=(rows, end - begin), segments=tuple(name for row in pieces for name in row))

    def read(self) -> HostArray:
        """Return the whole array in new memory."""
        out = np.empty(self.shape, self.number_dtype)
        self.read_into(out)
        return out

    def read_into(self, out: HostArray) -> None:
        """Fill ``out``, contiguous and of the same dtype and size, without allocating memory."""
        if out.size != math.prod(self.shape) or out.dtype != self.number_dtype:
            raise ValueError(f"read_into: {out.dtype}{out.shape} cannot hold {self.number_dtype}{self.shape}")
        if self.decode is None:
            with self._open() as file:
                self._fill(file, out, 0)
        else:
            flat = out.reshape(-1)
            for start, block in self.blocks(1 << 17):
                flat[start : start + len(block)] = block

    def blocks(self, most: int) -> Iterator[tuple[int, HostArray]]:
        """Yield ``(first index, block)`` for the flattened array, ``most`` numbers at a time.

        The memory of a block is reused for the next one, so that a caller that converts block by block never holds the
        whole array in its stored form.
        """
        per = self.decode.numbers if self.decode else 1
        decoded = self.decode.begin(self) if self.decode else None
        size, step = self.nbytes // self.dtype.itemsize, most // per
        block = np.empty(min(step, size), self.dtype)
        with self._open() as file:
            for start in range(0, size, step):
                part = block[: min(step, size - start)]
                self._fill(file, part, start * self.dtype.itemsize)
                yield start * per, part if decoded is None else decoded(part, start * per)

    def _open(self) -> BinaryIO:
        file = open_weight_file(self.path)
        if self.stamp and file_stamp(file) != self.stamp:
            file.close()
            raise CheckpointError(f"{self.path}: was replaced while it was being loaded. Load it again.")
        return file

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (offset in the file, length) of the bytes from ``start`` to ``end`` of the array."""
        for offset, length in self.segments:
            if start < min(length, end):
                yield offset + start, min(length, end) - start
            start, end = max(0, start - length), end - length

    def _fill(self, file: BinaryIO, out: HostArray, start: int) -> None:
        """Read ``out.nbytes`` bytes of the array from byte ``start`` on, across segments."""
        buffer = out.reshape(-1).view(np.uint8).data
        for offset, length in self._pieces(start, start + out.nbytes):
            file.seek(offset)
            piece, buffer = buffer[:length], buffer[length:]
            while len(piece):
                count = file.readinto(piece)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{self.path}: ended while {self.name!r} was being read. {DAMAGED}")
                piece = piece[count:]


def check_name(path: Path, name: object, *, plain: bool = True) -> str:
    """Return the name if it is a plausible array name; path tricks and control characters are refused.

    Unless ``plain``, any printable characters are allowed: such a name is only displayed, never used as a path.
    """
    if (
        not isinstance(name, str)
        or len(name) > MAX_NAME
        or (not _NAME.fullmatch(name) or ".." in name if plain else not name.isprintable())
    ):
        raise CheckpointError(f"{path}: holds an array with the unusable name {str(name)[:80]!r}. {DAMAGED}")
    return name


def check_shape(path: Path, name: str, shape: object) -> tuple[int, ...]:
    """Return the shape if it is a list of at most 16 non-negative integers."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_RANK or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{path}: array {name!r} claims the shape {str(shape)[:80]}. {DAMAGED}")
    return tuple(shape)


def check_size(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, nbytes: int) -> None:
    """Refuse an array whose shape and dtype do not match its number of bytes."""
    expected = math.prod(shape) * dtype.itemsize
    if expected != nbytes:
        raise CheckpointError(
            f"{path}: array {name!r} claims shape {shape} of {dtype.name} ({expected} bytes) but holds {nbytes} bytes. "
            f"{DAMAGED}"
        )


def open_weight_file(path: Path) -> BinaryIO:
    """Open a weight file for reading.

    Raises:
        CheckpointError: it cannot be opened, or is not a regular file.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None


def file_size(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def file_stamp(file: BinaryIO) -> tuple[int, ...]:
    """Return an identity of an open file that changes if the file is replaced or modified."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_pickle(head: bytes) -> bool:
    """Return whether a file begins like those of ``torch.save``.

    Safetensors files whose length has the same first bytes are excluded.
    """
    is_safetensors = head[4:9] == b"\0\0\0\0{"
    return (
        head.startswith((b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))) and not is_safetensors
    )


def is_upscaler(path: Path) -> bool:
    """Return whether a file is an upscaler by its folder or its name."""
    return path.parent.name.lower() in _UPSCALERS or _UPSCALER.search(path.name) is not None


def is_replaced(path: Path) -> bool:
    """Return whether a file is a pickle with a safetensors file of the same name next to it."""
    return path.suffix.lower() in PICKLES and path.with_suffix(".safetensors").is_file()


def pickle_refused(path: str | Path) -> str:
    """Return the error for a pickle, with the safetensors file next to it, or the command that makes that file."""
    old, new = shlex.quote(str(path)), shlex.quote(str(Path(path).with_suffix(".safetensors")))
    why = "canvax does not open pickles (.ckpt, .bin, .pt), which can run code."
    if is_replaced(Path(path)):
        return f"{why} Use the file next to it: {new}"
    return f"{why} Take the tensors out, without running anything: canvax convert {old} {new}"


def foreign(head: bytes) -> str:
    """Return the other known format that the first bytes of a file are of, with the cure; "" for none."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` in that folder"
    if is_pickle(head):
        return "a pickle (.ckpt/.bin) under another name; canvax convert FILE NEW.safetensors takes its tensors out"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "a web page, not the file that was asked for: download it again"
    if head.startswith(b"GGUF"):
        return "a GGUF file under another name: let its name end in .gguf"
    return ""


def check_head(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes are those of another known format, and name it."""
    if name := foreign(head):
        raise CheckpointError(f"{path}: is {name}.")
