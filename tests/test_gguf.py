"""GGUF files: their numbers beside those of the package ``gguf``, and broken ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from canvax.errors import CheckpointError, InputError  # noqa: E402
from canvax.weights import gguf as reader  # noqa: E402
from canvax.weights.entries import Entry  # noqa: E402
from canvax.weights.files import open_weights  # noqa: E402
from canvax.weights.gguf import open_gguf  # noqa: E402
from canvax.weights.identify import inspect  # noqa: E402
from canvax.weights.location import Location  # noqa: E402
from canvax.weights.open import open_files  # noqa: E402
from tests.support.gguf_files import write  # noqa: E402

KINDS = [kind for kind in gguf.GGMLQuantizationType if gguf.GGML_QUANT_SIZES[kind][0] > 1]
NOT_DECODED = {"Q8_1", "Q8_K", "Q1_0"}


def raw(*tensors: tuple[str, list[int], int, int], facts: bytes = b"", count: int = 0, data: bytes = b"") -> bytes:
    """A file by hand; a tensor is a name, sizes from the last on, a type and an offset."""
    lines = b"".join(
        struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, at)
        for name, sizes, kind, at in tensors
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + facts + lines
    return head + b"\0" * (-len(head) % 32) + data


def fact(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def opened(path: Path) -> dict[str, Entry]:
    return {entry.name: entry for entry in open_weights(path)}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_files_of_the_package(kind: str, tmp_path: Path) -> None:
    """Whole arrays, rows and columns are the numbers that the package gives, and names and shapes as in PyTorch."""
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (6, 4096 * 9), "a.bias": (5,), "b.weight": (8, 3, 3, 64), "c.weight": (4, 7)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    wanted = write(tmp_path / "a.gguf", arrays, kind)
    read = opened(tmp_path / "a.gguf")
    assert list(read) == list(arrays)
    assert read["a.weight"].stored == {"F16": "float16", "BF16": "bfloat16"}.get(kind, kind)
    for name, array in wanted.items():
        np.testing.assert_array_equal(read[name].read().astype(np.float32), array)
    matrix, numbers = read["a.weight"], wanted["a.weight"]
    np.testing.assert_array_equal(matrix.rows((4, 6), (1, 2)).read().astype(np.float32), numbers[[4, 5, 1]])
    np.testing.assert_array_equal(matrix.columns(64, 128).read().astype(np.float32), numbers[:, 64:128])
    if matrix.decode:
        with pytest.raises(CheckpointError):
            matrix.columns(0, 48)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_quantization(kind: Any, tmp_path: Path) -> None:
    """Blocks of any bytes become the numbers of the package, which decodes all but a few kinds."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(1).integers(0, 256, (3, 2 * size), np.uint8)
    path = tmp_path / "a.gguf"
    path.write_bytes(raw(("a", [2 * numbers, 3], kind.value, 0), data=stored.tobytes()))
    if kind.name in NOT_DECODED:
        with pytest.raises(CheckpointError):
            open_gguf(path)
        return
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(stored, kind)
    np.testing.assert_array_equal(opened(path)["a"].read(), wanted)


def q8_0(block: bytes) -> list[float]:
    (d,) = struct.unpack_from("<e", block)
    return [d * q for q in struct.unpack_from("<32b", block, 2)]


def q4_0(block: bytes) -> list[float]:
    (d,) = struct.unpack_from("<e", block)
    return [d * (q - 8) for q in (*(byte & 15 for byte in block[2:]), *(byte >> 4 for byte in block[2:]))]


def q5_1(block: bytes) -> list[float]:
    d, m, high = struct.unpack_from("<eeI", block)
    low = *(byte & 15 for byte in block[8:]), *(byte >> 4 for byte in block[8:])
    return [d * (q + 16 * (high >> i & 1)) + m for i, q in enumerate(low)]


def q4_k(block: bytes) -> list[float]:
    """Eight parts of 32, each with a scale and a minimum of 6 bits; two parts share bytes."""
    d, m = struct.unpack_from("<ee", block)
    packed, low = block[4:16], block[16:]
    pairs = [(packed[i] & 63, packed[i + 4] & 63) for i in range(4)]
    pairs += [(packed[i + 8] & 15 | packed[i] >> 6 << 4, packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4)
              for i in range(4)]  # fmt: skip
    return [
        d * scale * (byte >> 4 * (part % 2) & 15) - m * least
        for part, (scale, least) in enumerate(pairs)
        for byte in low[32 * (part // 2) : 32 * (part // 2 + 1)]
    ]


@pytest.mark.parametrize(
    ("kind", "by_hand", "halves"), [("Q8_0", q8_0, 1), ("Q4_0", q4_0, 1), ("Q5_1", q5_1, 2), ("Q4_K", q4_k, 2)]
)
def test_numbers_by_their_formulas(kind: str, by_hand: Any, halves: int, tmp_path: Path) -> None:
    """As ggml defines its blocks, without the package; each begins with scales of 16 bits."""
    quantization = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[quantization]
    rng = np.random.default_rng(2)
    stored = rng.integers(0, 256, (4, size), np.uint8)
    stored[:, : 2 * halves] = rng.uniform(0.01, 0.1, (4, halves)).astype("<f2").view(np.uint8)
    path = tmp_path / "a.gguf"
    path.write_bytes(raw(("a", [2 * numbers, 2], quantization.value, 0), data=stored.tobytes()))
    wanted = np.array([by_hand(block.tobytes()) for block in stored]).reshape(2, 2 * numbers)
    np.testing.assert_allclose(opened(path)["a"].read(), wanted, rtol=1e-5, atol=1e-6)


TWO = b"\0" * 64
BROKEN = {
    "empty": b"",
    "another file": b"GGML" + b"\0" * 100,
    "a web page": b"<!DOCTYPE html><html></html>",
    "half a header": raw(("a", [2], 0, 0), data=b"\0" * 8)[:40],
    "version 1": b"GGUF\1\0\0\0" + b"\0" * 60,
    "the other byte order": b"GGUF\0\0\0\3" + b"\0" * 60,
    "2^60 facts": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
    "2^60 arrays": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "a fact of 2^60 letters": raw(facts=struct.pack("<Q", 1 << 60), count=1),
    "a list of 2^60 numbers": raw(facts=fact("a", 9, struct.pack("<IQ", 4, 1 << 60)), count=1),
    "a list of 2^60 texts": raw(facts=fact("a", 9, struct.pack("<IQ", 8, 1 << 60)), count=1),
    "a list of lists": raw(facts=fact("a", 9, struct.pack("<IQ", 9, 1)), count=1),
    "a value of no kind": raw(facts=fact("a", 77, b""), count=1),
    "an alignment of 0": raw(facts=fact("general.alignment", 4, b"\0" * 4), count=1),
    "an alignment of text": raw(facts=fact("general.alignment", 8, struct.pack("<Q", 1) + b"4"), count=1),
    "one of three": raw(facts=fact("split.count", 2, b"\3\0"), count=1),
    "2^31 axes": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 1 << 31),
    "20 axes": raw(("a", [1] * 20, 0, 0), data=b"\0" * 4),
    "a size that overflows": raw(("a", [1 << 62, 4], 0, 0), data=TWO),
    "an unknown type": raw(("a", [32], 99, 0), data=TWO),
    "half a block": raw(("a", [16, 4], 8, 0), data=TWO),
    "cut short": raw(("a", [8], 0, 0), data=b"\0" * 31),
    "overlap": raw(("a", [8], 0, 0), ("b", [8], 0, 0), data=TWO),
    "hole": raw(("a", [8], 0, 0), ("b", [8], 0, 64), data=TWO * 2),
    "a name twice": raw(("a", [8], 0, 0), ("a", [8], 0, 32), data=TWO),
    "a name that is a path": raw(("../a", [8], 0, 0), data=TWO),
    "a name with control characters": raw(("a\n\x1b[2J", [8], 0, 0), data=TWO),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(BROKEN[case])
    with pytest.raises(CheckpointError):
        open_gguf(path, plain_names=True)
    assert inspect(path) is not None


def test_a_file_that_is_no_part_of_a_model(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", {"conv.weight": np.ones((4, 4))})
    with pytest.raises(CheckpointError):
        open_files(Location(tmp_path / "a.gguf"))
    with pytest.raises(CheckpointError, match=r"a\.gguf"):
        open_files(Location(tmp_path))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of plain numbers need nothing; quantized ones name what to install."""
    for name, kind in (("plain", "BF16"), ("small", "Q8_0")):
        write(tmp_path / f"{name}.gguf", {"a.weight": np.ones((4, 32))}, kind)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    reader._blocks.cache_clear()
    assert opened(tmp_path / "plain.gguf")["a.weight"].read().shape == (4, 32)
    with pytest.raises(InputError, match="the package gguf"):
        open_gguf(tmp_path / "small.gguf")
    part = inspect(tmp_path / "small.gguf")
    assert part is not None
    assert part.kind is None
