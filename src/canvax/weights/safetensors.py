"""The safetensors container, checked before use.

A file is an 8-byte little-endian length, that many bytes of JSON, and the arrays end to end. The JSON gives the dtype,
shape and byte range of each array. All of it is verified: sizes are multiplied as Python integers, ranges must tile the
file exactly, and names must be plausible. (Format: the safetensors documentation, "Format".)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from canvax.errors import CheckpointError
from canvax.files import DAMAGED, written
from canvax.types import HostArray
from canvax.weights.entries import (
    Entry,
    check_head,
    check_name,
    check_shape,
    check_size,
    file_size,
    file_stamp,
    open_weight_file,
)

MAX_HEADER = 100_000_000
"""Largest JSON header that is read, in bytes."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
    "C64": np.dtype("<c8"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def open_safetensors(path: Path, *, plain_names: bool = True) -> list[Entry]:
    """Open the arrays of a safetensors file, in file order; no array is read.

    With ``plain_names``, names that cannot be a module's are refused. Names of embeddings are free text.

    Raises:
        CheckpointError: the file is truncated, inconsistent or not a safetensors file.
    """
    with open_weight_file(path) as file:
        stamp, size = file_stamp(file), file_size(file)
        header, data_start = _read_header(path, file)
    entries = []
    ranges: list[tuple[int, int, str]] = []
    for name, claim in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _check_claim(path, check_name(path, name, plain=plain_names), claim)
        ranges.append((begin, end, name))
        entries.append(Entry(name, shape, dtype, path, ((data_start + begin, end - begin),), "torch", stamp))
    _check_ranges(path, sorted(ranges), size - data_start)
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """Return the free-form text in a safetensors file, usually ``{"format": "pt"}``."""
    with open_weight_file(path) as file:
        metadata = _read_header(path, file)[0].get("__metadata__") or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: its metadata is not a table of text. {DAMAGED}")
    return {str(key): str(value) for key, value in metadata.items()}


@dataclass(frozen=True)
class ArrayToSave:
    """An array to write: its name, shape and dtype; ``get`` returns its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    get: Callable[[], HostArray]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_safetensors(path: Path, arrays: Iterable[ArrayToSave], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, holding one array at a time in memory.

    The file appears under its name only when complete: it is written under a temporary name in the same folder first.
    """
    ordered = sorted(arrays, key=lambda array: (-array.dtype.itemsize, array.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for array in ordered:
        offsets = [position, position + array.nbytes]
        header[array.name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays start at a multiple of 8
    with written(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in ordered:
            data = np.asarray(array.get(), array.dtype, order="C")  # ascontiguousarray gives a scalar an axis
            if data.shape != array.shape:
                raise ValueError(f"write_safetensors: {array.name!r} is {data.shape}, announced as {array.shape}")
            file.write(data.reshape(-1).view(np.uint8).data)


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the parsed JSON header, and the offset of the first array byte."""
    size = file_size(file)
    head = file.read(64)
    check_head(path, head)
    length = int.from_bytes(head[:8], "little")
    if size < 8 or (length <= MAX_HEADER and 8 + length > size):
        raise CheckpointError(f"{path}: is truncated: {size} bytes do not even hold its header. {DAMAGED}")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path}: claims a header of {length} bytes: not a safetensors file. {DAMAGED}")
    file.seek(8)
    text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except _Duplicate as error:
        raise CheckpointError(f"{path}: its header names {str(error)[:80]!r} twice. {DAMAGED}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: its header is not valid JSON. {DAMAGED}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a table of arrays. {DAMAGED}")
    return header, 8 + length


class _Duplicate(Exception):
    """A key occurs twice in one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        raise _Duplicate(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return table


def _check_claim(path: Path, name: str, claim: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape and byte range of one header record, if they are consistent."""
    if not isinstance(claim, dict) or not {"dtype", "shape", "data_offsets"} <= claim.keys():
        raise CheckpointError(f"{path}: the header line of {name!r} lacks dtype, shape or data_offsets. {DAMAGED}")
    code, offsets = claim["dtype"], claim["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(
            f"{path}: array {name!r} has the dtype {str(code)[:40]!r}, which canvax cannot read; known are "
            + ", ".join(DTYPES)
            + ". Convert the file to float16, bfloat16 or float32."
        )
    shape = check_shape(path, name, claim["shape"])
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int or n < 0 for n in offsets):
        raise CheckpointError(f"{path}: array {name!r} claims the byte range {str(offsets)[:80]}. {DAMAGED}")
    begin, end = offsets
    check_size(path, name, shape, DTYPES[code], end - begin)
    return DTYPES[code], shape, begin, end


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], size: int) -> None:
    """Check that the sorted byte ranges tile the file from first to last byte."""
    position = 0
    for begin, end, name in ranges:
        if begin != position:
            fault = (
                "overlaps another array" if begin < position else f"leaves {begin - position} bytes before it unused"
            )
            raise CheckpointError(f"{path}: array {name!r} {fault}. {DAMAGED}")
        position = end
    if position > size:
        raise CheckpointError(
            f"{path}: is truncated: its header describes {position} bytes of arrays, the file has {size}. {DAMAGED}"
        )
    if position < size:
        raise CheckpointError(f"{path}: has {size - position} bytes that its header does not describe. {DAMAGED}")
