"""Files of strangers, made by hypothesis: whatever is in them, only canvax's own errors come out.

``make fuzz`` looks for longer: FUZZ_SECONDS for each kind of file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import canvax
from canvax.cli.images import read_prompt_file
from canvax.families.known import family_of
from canvax.families.read import read_model
from canvax.images.metadata import read_metadata
from canvax.tokenizers.clip import ClipTokenizer
from canvax.weights.flax_msgpack import open_flax_msgpack
from canvax.weights.location import BUNDLED, Location
from canvax.weights.open import open_files
from canvax.weights.safetensors import open_safetensors

EMOJI = BUNDLED["emoji"]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
BRIEF = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 2**31, 2**63, 10**30]))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=12))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def long_run(check: Callable[[Any], None], strategy: st.SearchStrategy[Any]) -> None:
    """Examples for SECONDS, or a few."""
    until = time.monotonic() + SECONDS
    while True:
        BRIEF(given(strategy)(check))()
        if time.monotonic() >= until:
            return


@contextlib.contextmanager
def own_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(canvax.CanvaxError):
            yield


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """``data`` with some bytes replaced, cut or doubled."""

    def change(edits: list[tuple[int, int, bytes]]) -> bytes:
        out = data
        for at, length, new in edits:
            start = at % (len(out) + 1)
            out = out[:start] + new + out[start + length :]
        return out

    edit = st.tuples(st.integers(0, len(data)), st.integers(0, 16), st.binary(max_size=8))
    return st.lists(edit, min_size=1, max_size=4).map(change)


def test_safetensors(tmp_path: Path) -> None:
    entry = st.fixed_dictionaries(
        {}, optional={"dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "F99"]) | scalars,
                      "shape": st.lists(numbers, max_size=3) | scalars, "data_offsets": st.lists(numbers, max_size=3) | scalars}
    )  # fmt: skip
    header = st.dictionaries(st.text(max_size=6), entry | anything, max_size=4)
    whole = st.tuples(
        header.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60),
        st.none() | st.integers(0, 2**64 - 1),
        st.binary(max_size=40),
    )

    def check(parts: tuple[bytes, int | None, bytes]) -> None:
        text, length, data = parts
        path = tmp_path / "a.safetensors"
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        with own_errors():
            open_safetensors(path)

    long_run(check, whole)


def test_msgpack(tmp_path: Path) -> None:
    array = st.tuples(
        st.lists(numbers, max_size=3) | scalars,
        st.sampled_from(["float32", "bfloat16", "O", "nope"]) | scalars,
        st.binary(max_size=16),
    )
    leaf = anything | array.map(lambda parts: msgpack.ExtType(1, _packed(list(parts))))
    tree = st.dictionaries(st.text(max_size=6), st.dictionaries(st.text(max_size=6), leaf, max_size=3), max_size=3)
    data = st.one_of(
        tree.map(_packed), st.binary(max_size=80), tree.map(_packed).flatmap(lambda packed: mutated(packed))
    )

    def check(data: bytes) -> None:
        path = tmp_path / "a.msgpack"
        path.write_bytes(data)
        with own_errors():
            open_flax_msgpack(path)

    long_run(check, data)


def _packed(value: Any) -> bytes:
    try:
        return msgpack.packb(value)
    except (OverflowError, ValueError):
        return b"\x80"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_png_text(tmp_path: Path) -> None:
    settings_ = st.dictionaries(
        st.sampled_from(["prompt", "seed", "options", "sampler", "width", "grid", "model", "canvax", "noise"])
        | st.text(max_size=6),
        anything,
        max_size=5,
    )
    infotext = st.text(max_size=60) | st.lists(
        st.sampled_from(
            [
                "a cat",
                "Negative prompt: x",
                "Steps: 20",
                "Sampler: Euler a",
                "Size: 512x512",
                "<lora:a:1>",
                "\n",
                ", ",
                ":",
            ]
        ),
        max_size=12,
    ).map("".join)
    parts = st.tuples(
        st.sampled_from([b"tEXt", b"iTXt", b"zTXt"]),
        st.sampled_from([b"canvax", b"parameters"]),
        settings_.map(json.dumps) | infotext,
        st.binary(max_size=6),
    )

    def check(parts: tuple[bytes, bytes, str, bytes]) -> None:
        kind, keyword, text, junk = parts
        body = text.encode("utf-8", "replace")
        middle = {b"tEXt": b"\0", b"iTXt": b"\0\0\0\0\0", b"zTXt": b"\0\0"}[kind]
        body = zlib.compress(body) if kind == b"zTXt" else body
        head = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
        path = tmp_path / "a.png"
        path.write_bytes(head + _chunk(kind, keyword + middle + body + junk) + _chunk(b"IEND", b""))
        with own_errors():
            read_metadata(path)

    long_run(check, parts)


def test_configs(tmp_path: Path) -> None:
    model = shutil.copytree(EMOJI, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    files = ["unet/config.json", "vae/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json"]
    originals = {file: (EMOJI / file).read_bytes() for file in files}

    def check(parts: tuple[str, int, Any]) -> None:
        file, index, value = parts
        config = json.loads(originals[file])
        config[sorted(config)[index % len(config)]] = value
        (model / file).write_text(json.dumps(config))
        try:
            with own_errors():
                read_model(open_files(Location(model), accept=family_of), "float32").networks.specs()
        finally:
            (model / file).write_bytes(originals[file])

    long_run(check, st.tuples(st.sampled_from(files), st.integers(0, 40), anything))


def test_prompt_files(tmp_path: Path) -> None:
    line = st.text(max_size=40) | st.dictionaries(
        st.sampled_from(["prompt", "seed", "n", "image"]) | st.text(max_size=5), anything, max_size=4
    ).map(json.dumps)
    text = st.lists(line, max_size=4).map("\n".join).map(lambda text: text.encode("utf-8", "surrogatepass"))

    def check(data: bytes) -> None:
        path = tmp_path / "p.txt"
        path.write_bytes(data)
        with own_errors():
            read_prompt_file(str(path))

    long_run(check, text | st.binary(max_size=60))


def test_tokenizers(tmp_path: Path) -> None:
    folder = shutil.copytree(EMOJI / "tokenizer", tmp_path / "tokenizer")
    small = {"vocab.json": json.dumps({"a": 0, "b</w>": 1, "ab</w>": 2, "<|startoftext|>": 3, "<|endoftext|>": 4}).encode(),
             "merges.txt": b"#version: 0.2\na b</w>\n", "tokenizer_config.json": (folder / "tokenizer_config.json").read_bytes()}  # fmt: skip
    (folder / "tokenizer.json").unlink()

    def check(parts: tuple[str, bytes]) -> None:
        name, data = parts
        for file, content in small.items():
            (folder / file).write_bytes(data if file == name else content)
        with own_errors():
            ClipTokenizer.from_folder(folder)(["ab b a"])

    cases = [
        st.tuples(st.just(name), mutated(data) | anything.map(lambda value: json.dumps(value).encode()))
        for name, data in small.items()
    ]
    long_run(check, st.one_of(*cases))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hypothesis keeps its examples where they are in nobody's way."""
    monkeypatch.chdir(tmp_path)
