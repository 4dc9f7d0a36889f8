"""The GGUF container, checked before use. The package ``gguf`` decodes the blocks of quantised arrays.

A file is a header, metadata, one record per array, and the arrays, each at a multiple of the alignment directly after
the previous one. A record has an array's name, its sizes from the last axis to the first, type and offset. Names are
those of the program that wrote the file: of ComfyUI for transformers, of llama.cpp for language models. (Format: ggml's
documentation, "GGUF".)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from canvax.errors import CheckpointError, InputError
from canvax.files import DAMAGED
from canvax.types import HostArray
from canvax.weights.entries import (
    Decode,
    Entry,
    check_head,
    check_name,
    check_shape,
    file_size,
    file_stamp,
    open_weight_file,
)

MAX_HEADER = 100_000_000
"""Largest header that is read, in bytes. A vocabulary takes a tenth of it."""

MAX_ALIGNMENT = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9

_PLAIN = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
    24: np.dtype("i1"),
    25: np.dtype("<i2"),
    26: np.dtype("<i4"),
    27: np.dtype("<i8"),
    28: np.dtype("<f8"),
    30: np.dtype(ml_dtypes.bfloat16),
}
"""Types whose items are numbers."""


def open_gguf(path: Path, *, plain_names: bool = True) -> list[Entry]:
    """Open the arrays of a GGUF file, in file order; no array is read.

    Args:
        path: the file.
        plain_names: refuse names that cannot be a module's.

    Raises:
        CheckpointError: the file is truncated, inconsistent, not a GGUF file, or has arrays of an unsupported type.
        InputError: it has quantised arrays, and the package ``gguf`` is missing.
    """
    with BufferedReader(open_weight_file(path), 1 << 16) as file:  # type: ignore[arg-type]
        stamp, size = file_stamp(file), file_size(file)
        facts, lines, end = _read_header(path, file)
    alignment = facts.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT:
        raise CheckpointError(f"{path}: claims the alignment {str(alignment)[:40]}. {DAMAGED}")
    if facts.get("split.count", 0) not in (0, 1):
        raise CheckpointError(f"{path}: is one of several files of a model; join them with llama-gguf-split --merge.")
    position = end + -end % alignment
    start, entries = position, dict[str, Entry]()
    for name, sizes, kind, offset in lines:
        name = check_name(path, name, plain=plain_names)
        shape = check_shape(path, name, sizes[::-1])
        dtype, decode = (_PLAIN[kind], None) if kind in _PLAIN else _quantized(path, name, kind)
        per = decode.numbers if decode else 1
        if (shape[-1] if shape else 1) % per:
            raise CheckpointError(f"{path}: array {name!r} has rows of {shape[-1:]}, not of whole blocks. {DAMAGED}")
        if name in entries:
            raise CheckpointError(f"{path}: its header names {name!r} twice. {DAMAGED}")
        if start + offset != position:
            raise CheckpointError(f"{path}: array {name!r} does not follow the one before it. {DAMAGED}")
        length = prod(shape) // per * dtype.itemsize
        if position + length > size:
            raise CheckpointError(f"{path}: is truncated: array {name!r} lies behind its end. {DAMAGED}")
        entries[name] = Entry(name, shape, dtype, path, ((position, length),), "torch", stamp, decode)
        position += length + -length % alignment
    return list(entries.values())


def _read_header(path: Path, file: BufferedReader) -> tuple[dict[str, Any], list[tuple[str, list[int], int, int]], int]:
    """Return the metadata with single values, the records (name, sizes, type, offset), and the end of the header."""
    total = left = min(file_size(file), MAX_HEADER)

    def take(count: int) -> bytes:
        nonlocal left
        data = file.read(min(count, left))
        if len(data) < count:
            raise CheckpointError(f"{path}: is truncated: {total} bytes do not even hold its header. {DAMAGED}")
        left -= count
        return data

    def number(code: str) -> Any:
        return struct.unpack(f"<{code}", take(struct.calcsize(code)))[0]

    def text() -> str:
        return take(number("Q")).decode("utf-8", "replace")

    def value(kind: int) -> Any:
        if kind in _SCALARS:
            return number(_SCALARS[kind])
        if kind == _TEXT:
            return text()
        if kind != _LIST:
            raise CheckpointError(f"{path}: its header has a value of the kind {kind}. {DAMAGED}")
        kind, count = number("I"), number("Q")
        if kind in _SCALARS:
            take(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _TEXT:
            for _ in range(count):
                take(int.from_bytes(take(8), "little"))
        else:
            raise CheckpointError(f"{path}: its header has a list of the kind {kind}. {DAMAGED}")
        return None  # a vocabulary, which is not used

    head = file.peek(64)[:64]
    if head[:4] != b"GGUF":
        check_head(path, head)
        raise CheckpointError(f"{path}: is no GGUF file. {DAMAGED}")
    take(4)
    version = number("I")
    if version not in (2, 3):
        what = "is for machines of the other byte order" if version % (1 << 16) == 0 else f"is of version {version}"
        raise CheckpointError(f"{path}: {what}; canvax reads GGUF files of versions 2 and 3, little-endian.")
    arrays, count = number("Q"), number("Q")
    facts: dict[str, Any] = {}
    for _ in range(count):
        name = text()
        facts[name] = value(number("I"))
    lines = []
    for _ in range(arrays):
        name, rank = text(), number("I")
        sizes = list(struct.unpack(f"<{rank}Q", take(8 * rank)))
        lines.append((name, sizes, number("I"), number("Q")))
    return facts, lines, total - left


def _quantized(path: Path, name: str, kind: int) -> tuple[np.dtype, Decode]:
    """Return the storage format and decoder of a block type."""
    try:
        stored = _blocks(kind)
    except ImportError:
        raise InputError(
            f"{path}: has quantized arrays, which the package gguf decodes; install it from canvax's folder: "
            'pip install ".[gguf]"'
        ) from None
    if stored is None:
        raise CheckpointError(
            f"{path}: array {name!r} has the type {kind}, which cannot be read; take a file of another quantization, "
            "such as Q8_0 or Q4_K."
        )
    return stored


@cache
def _blocks(kind: int) -> tuple[np.dtype, Decode] | None:
    """Return items and decoder of a block type; None if the package does not know it or cannot decode it.

    Raises:
        ImportError: the package is missing.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    def begin(_: Entry) -> Callable[[HostArray, int], HostArray]:
        return lambda items, start: numbers_of(items)

    def numbers_of(items: HostArray) -> HostArray:
        # As one row: rows are decoded in groups of sixteen, which is many times slower for single blocks.
        with np.errstate(all="ignore"):  # non-finite scales
            return dequantize(items.view(np.uint8).reshape(1, -1), quantization).reshape(-1)

    try:
        quantization = GGMLQuantizationType(kind)
        numbers, size = GGML_QUANT_SIZES[quantization]
        dtype = np.dtype((np.void, size))
        numbers_of(np.zeros(1, dtype))
    except (ValueError, KeyError, NotImplementedError):
        return None
    return dtype, Decode(numbers, begin, quantization.name)
