"""The two weight file formats: read exactly when sound, refused with one clear message when not."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from canvax.errors import CheckpointError
from canvax.params import Param, flatten
from canvax.weights import flax_msgpack, identify, safetensors
from canvax.weights.cast import cast_into
from canvax.weights.entries import Decode, Entry
from canvax.weights.files import open_weights
from canvax.weights.flax_msgpack import open_flax_msgpack
from canvax.weights.formats import flax_name, spellings
from canvax.weights.load import Scratch, materialise
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import ArrayToSave, open_safetensors, write_safetensors
from canvax.weights.scales import UnreadFormat
from tests.support.checkpoints import (
    BFLOAT16,
    file_arrays,
    flax_bytes,
    flax_tree,
    raw_safetensors,
    toy_components,
    toy_params,
)
from tests.support.comfy_files import mark, matrix

# Sound files ----------------------------------------------------------------------------------------------------------


def test_float8_is_read(tmp_path: Path) -> None:
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        array = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4).astype(dtype)
        code = safetensors._CODES[np.dtype(dtype)]
        header = {"a": {"dtype": code, "shape": [3, 4], "data_offsets": [0, 12]}}
        (tmp_path / "a.safetensors").write_bytes(raw_safetensors(header, array.tobytes()))
        (entry,) = open_safetensors(tmp_path / "a.safetensors")
        got = materialise(Param((4, 3), (None, None), layout="linear"), entry, np.float32, Scratch())
        np.testing.assert_array_equal(got, array.T.astype(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_half_precision_for_every_number(dtype: Any) -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    padded = np.empty((256, 300), dtype)
    cast_into(padded[:, :256], half)
    with np.errstate(invalid="ignore"):
        want = half.astype(dtype)
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(padded[:, :256].view(bits), want.view(bits))


def test_numbers_too_large_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.full((4,), 1e5, np.float32)}, tmp_path / "a.safetensors")
    (entry,) = open_safetensors(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="too large for float16; load with dtype=bfloat16"):
        materialise(Param((4,), (None,)), entry, np.float16, Scratch())


def test_large_arrays_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    conv = rng.standard_normal((130, 5, 3, 3), np.float32)
    linear = rng.standard_normal((129, 7), np.float32)
    plain = rng.standard_normal((1 << 20) + 3, np.float32)
    save_file({"c": conv, "l": linear, "p": plain}, tmp_path / "a.safetensors")
    entries = {entry.name: entry for entry in open_safetensors(tmp_path / "a.safetensors")}
    for dtype in (np.float32, BFLOAT16):
        scratch = Scratch()
        got = materialise(Param((3, 3, 5, 130), (None,) * 4, layout="conv"), entries["c"], dtype, scratch)
        np.testing.assert_array_equal(got, conv.transpose(2, 3, 1, 0).astype(dtype))
        got = materialise(Param((7, 129), (None, None), layout="linear"), entries["l"], dtype, scratch)
        np.testing.assert_array_equal(got, linear.T.astype(dtype))
        got = materialise(Param(plain.shape, (None,)), entries["p"], dtype, scratch)
        np.testing.assert_array_equal(got, plain.astype(dtype))
        assert got.ctypes.data % 64 == 0


def test_what_does_not_turn_is_not_taken_over_from_scratch(tmp_path: Path) -> None:
    """JAX on the CPU takes over what is contiguous and aligned, instead of copying it: that must not be used again."""
    rows = [np.random.default_rng(i).standard_normal((1, 4096), np.float32) for i in range(3)]
    save_file({str(i): row for i, row in enumerate(rows)}, tmp_path / "a.safetensors")
    scratch = Scratch()
    for entry, row in zip(open_safetensors(tmp_path / "a.safetensors"), rows, strict=True):
        host = materialise(Param((4096, 1), (None, None), layout="linear"), entry, np.float32, scratch)
        assert not np.shares_memory(host, scratch.empty(row.shape, row.dtype))
        np.testing.assert_array_equal(host, row.T)


def test_bundled_model_is_read_exactly() -> None:
    folder = open_files(Location("emoji")).folder()
    for path in folder.glob("*/*.safetensors"):
        wanted = load_file(path)
        entries = open_safetensors(path)
        assert {entry.name for entry in entries} == wanted.keys()
        for entry in entries:
            np.testing.assert_array_equal(entry.read(), wanted[entry.name])


# Flax files -----------------------------------------------------------------------------------------------------------

# flax.serialization.to_bytes (flax 0.10.2) of {"a": {"kernel": float32 [2, 3] of 0..5, "b_0": bfloat16 ones [3]},
# "s": np.float32(2.5), "i": int64 [0, 1, 2], "e": float16 zeros [0, 4]}
REAL_FLAX = bytes.fromhex(
    "84a16182a66b65726e656cc7260193920203a7666c6f61743332c418000000000000803f0000004000004040000080400000"
    "a040a3625f30c71401939103a862666c6f61743136c406803f803f803fa173d8039390a7666c6f61743332c40400002040a1"
    "69c72301939103a5696e743634c418000000000000000001000000000000000200000000000000a165c70e0193920004a766"
    "6c6f61743136c400"
)


def test_real_flax_bytes(tmp_path: Path) -> None:
    tree = {
        "a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "b_0": np.ones(3, BFLOAT16)},
        "s": np.float32(2.5),
        "i": np.arange(3, dtype=np.int64),
        "e": np.zeros((0, 4), np.float16),
    }
    assert flax_bytes(tree) == REAL_FLAX
    (tmp_path / "m.msgpack").write_bytes(REAL_FLAX)
    entries = open_flax_msgpack(tmp_path / "m.msgpack")
    assert [entry.name for entry in entries] == ["a/kernel", "a/b_0", "s", "i", "e"]
    for entry in entries:
        leaf: Any = tree
        for step in entry.name.split("/"):
            leaf = leaf[step]
        assert entry.dtype == np.asarray(leaf).dtype
        np.testing.assert_array_equal(entry.read(), leaf)


def chunked(array: np.ndarray, size: int) -> dict[str, Any]:
    flat = array.reshape(-1)
    chunks = [flat[i : i + size] for i in range(0, flat.size, size)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): n for i, n in enumerate(array.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def test_chunked_arrays(tmp_path: Path) -> None:
    array = np.arange(11 * 13, dtype=np.float32).reshape(11, 13)
    path = tmp_path / "m.msgpack"
    path.write_bytes(flax_bytes({"x": {"kernel": chunked(array, 10)}, "y": {"scale": np.ones(2, np.float32)}}))
    first, second = open_flax_msgpack(path)
    assert (first.name, second.name) == ("x/kernel", "y/scale")
    np.testing.assert_array_equal(first.read(), array)
    blocks = [(start, block.copy()) for start, block in first.blocks(50)]
    assert [start for start, _ in blocks] == [0, 50, 100]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), array.ravel())


def test_names_both_ways() -> None:
    for part in toy_components():
        spec = dict(flatten(part.spec))
        assert "linear.1" not in " ".join(spec)
        for name, param in spec.items():
            assert {name, flax_name(name, param)} <= set(spellings(name, param))


def entries_of(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Entry]:
    save_file(arrays, path)
    return {entry.name: entry for entry in open_safetensors(path)}


def test_rows_are_read_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    entry = entries_of(tmp_path / "a.safetensors", {"a": array})["a"]
    swapped = entry.rows((3, 6), (0, 3))
    np.testing.assert_array_equal(swapped.read(), array[[3, 4, 5, 0, 1, 2]])
    np.testing.assert_array_equal(swapped.rows((2, 4)).read(), array[[5, 0]])
    assert [len(block) for _, block in swapped.blocks(7)] == [7, 7, 7, 3]


RULES = Names(
    [
        Rule("blocks.*.qkv", ("layers.*.to_q", "layers.*.to_k", "layers.*.to_v", "layers.*.mlp"), rows=(1, 1, 1, 4)),
        Rule("final.mod", "norm_out", "swapped halves"),
        Rule("projection", "projection.weight", "transposed"),
        Rule("attn.q", "to_q", "1x1 convolution"),
    ]
)


def test_rules_both_ways(tmp_path: Path) -> None:
    """What a table of rules writes is read again as it was, and a name without a rule stays."""
    rng = np.random.default_rng(0)
    rows = {"to_q": 2, "to_k": 2, "to_v": 2, "mlp": 8}
    ours = {f"layers.{i}.{part}.weight": rng.random((n, 3)) for i in range(2) for part, n in rows.items()}
    ours |= {"norm_out.bias": rng.random(6), "projection.weight": rng.random((2, 5)), "to_q.weight": rng.random((4, 4)),
             "other.weight": rng.random(3)}  # fmt: skip
    to_save = [ArrayToSave(name, a.shape, a.dtype, lambda a=a: a) for name, a in ours.items()]
    write_safetensors(tmp_path / "a.safetensors", RULES.to_external(to_save), {})
    theirs = load_file(tmp_path / "a.safetensors")
    assert {name: array.shape for name, array in theirs.items()} == {
        "blocks.0.qkv.weight": (14, 3), "blocks.1.qkv.weight": (14, 3), "final.mod.bias": (6,), "projection": (5, 2),
        "attn.q.weight": (4, 4, 1, 1), "other.weight": (3,),
    }  # fmt: skip
    np.testing.assert_array_equal(theirs["final.mod.bias"], np.roll(ours["norm_out.bias"], 3))
    read = {entry.name: entry for entry in RULES.to_internal(open_safetensors(tmp_path / "a.safetensors"))}
    assert read.keys() == ours.keys()
    assert read["projection.weight"].order == "flax"
    for name, array in ours.items():
        stored = read[name].read()
        np.testing.assert_array_equal(stored.T if name == "projection.weight" else stored.reshape(array.shape), array)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.arange(1, 7, dtype=np.float32)], ids=["one", "rows"])
def test_scales_of_8_bit_weights(scale: np.ndarray, tmp_path: Path) -> None:
    weight = np.linspace(-3, 3, 24).reshape(6, 4).astype(ml_dtypes.float8_e4m3fn)
    arrays = {"scaled_fp8": weight[:0, 0], "a.weight": weight, "a.scale_weight": np.asarray(scale),
              "a.scale_input": np.float32(1).reshape(1), "b.weight": weight}  # fmt: skip
    to_save = [ArrayToSave(name, a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()]
    write_safetensors(tmp_path / "a.safetensors", to_save, {})
    read = {entry.name: entry for entry in open_weights(tmp_path / "a.safetensors")}
    wanted = weight.astype(np.float32) * np.reshape(scale, (-1, 1))
    assert read.keys() == {"a.weight", "b.weight"}
    np.testing.assert_array_equal(read["a.weight"].read(), wanted)
    np.testing.assert_array_equal(read["a.weight"].rows((2, 5)).read(), wanted[2:5])
    assert read["b.weight"].read().dtype == weight.dtype
    linear = Param((4, 6), (None, None), layout="linear")
    loaded = materialise(linear, read["a.weight"], BFLOAT16, Scratch())
    np.testing.assert_array_equal(loaded, wanted.T.astype(BFLOAT16))


CONVROT = {"format": "int8_tensorwise", "convrot": True}


@pytest.mark.parametrize(("group", "how"), [
    (256, CONVROT), (64, CONVROT | {"convrot_groupsize": 64, "per_row": True}),
    (64, {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}),
])  # fmt: skip
@pytest.mark.parametrize("place", ["array", "header", "header without prefix"])
def test_rotated_integers(group: int, how: dict[str, Any], place: str, tmp_path: Path) -> None:
    """Near the weights that were rotated, and exactly the sums of their numbers, in rows and columns too."""
    weight, stem = np.random.default_rng(0).standard_normal((7, 768)), "model.diffusion_model.a."
    arrays, wanted = matrix(stem, weight, "int8 convrot", group)
    arrays.pop(f"{stem}comfy_quant")
    arrays |= {f"{stem}comfy_quant": mark(**how)} if place == "array" else {}
    layer = stem.rstrip(".").removeprefix("model.diffusion_model." if place.endswith("prefix") else "")
    text = json.dumps({"format_version": "1.0", "layers": {} if place == "array" else {layer: how}})
    save_file(arrays, tmp_path / "a.safetensors", {"_quantization_metadata": text})
    (entry,) = open_weights(tmp_path / "a.safetensors")
    assert (entry.name, entry.shape, entry.stored, entry.is_float) == (
        f"{stem}weight",
        (7, 768),
        "int8 (convrot)",
        True,
    )
    assert np.abs(wanted - weight).max() < 0.05
    for part, numbers in (
        (entry, wanted), (entry.rows((4, 6), (1, 2)), wanted[[4, 5, 1]]), (entry.columns(256, 768), wanted[:, 256:]),
    ):  # fmt: skip
        np.testing.assert_array_equal(part.read(), numbers)
    with pytest.raises(CheckpointError):
        entry.columns(32, 768)


@pytest.mark.parametrize(("dtype", "how"), [
    ("uint8", {"format": "nvfp4"}), ("float8_e4m3fn", {"format": "mxfp8"}), ("int8", {"format": "convrot_w4a4"}),
    ("int8", {"format": "int8_blockwise"}), ("uint8", {"format": "float8_e4m3fn"}), ("int8", {"format": []}),
    ("int8", {}), ("float8_e4m3fn", {"format": "float8_e4m3fn", "convrot": True}),
])  # fmt: skip
@pytest.mark.parametrize("header", [False, True])
def test_formats_that_are_not_read(dtype: str, how: dict[str, Any], header: bool, tmp_path: Path) -> None:
    """They are named before anything is read, and so is a file of integers that does not say what they are."""
    arrays = {"a.weight": np.zeros((8, 64), dtype), "a.weight_scale": np.ones((8, 1), np.float32)}
    arrays |= {} if header else {"a.comfy_quant": mark(**how)}
    path = tmp_path / "a.safetensors"
    save_file(arrays, path, {"_quantization_metadata": json.dumps({"layers": {"a": how}})} if header else None)
    with pytest.raises(UnreadFormat):
        open_weights(path)
    part = identify.inspect(path)
    assert part is not None
    assert part.kind is None
    assert part.kind_name != identify.DAMAGED


def test_rotated_convolutions(tmp_path: Path) -> None:
    arrays = {"a.weight": np.zeros((8, 256, 3, 3), np.int8), "a.weight_scale": np.ones((8, 1), np.float32)}
    save_file(arrays | {"a.comfy_quant": mark(**CONVROT)}, tmp_path / "a.safetensors")
    with pytest.raises(UnreadFormat):
        open_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize("change", [
    {"a.comfy_quant": np.frombuffer(b"{", np.uint8)}, {"a.comfy_quant": np.frombuffer(b"[" * 3000, np.uint8)},
    {"a.comfy_quant": np.zeros(5000, np.uint8)}, {"a.comfy_quant": mark(params=3)},
    {"a.comfy_quant": mark(**CONVROT, convrot_groupsize=32)}, {"a.comfy_quant": mark(**CONVROT, convrot_groupsize=4.0)},
    {"a.comfy_quant": mark(**CONVROT)}, {"a.weight_scale": np.ones((8, 4), np.float32)},
    {"a.weight_scale": np.ones(8, np.int8)},
])  # fmt: skip
def test_damaged_marks(change: Any, tmp_path: Path) -> None:
    arrays = {"a.weight": np.zeros((8, 64), np.int8), "a.weight_scale": np.ones((8, 1), np.float32)}
    arrays |= {"a.comfy_quant": mark(**CONVROT, convrot_groupsize=64)}
    save_file(arrays, tmp_path / "a.safetensors")
    open_weights(tmp_path / "a.safetensors")
    save_file(arrays | change, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "a.safetensors")
    assert not isinstance(caught.value, UnreadFormat)


@pytest.mark.parametrize("text", ["{", "3", '{"layers": 3}', '{"layers": {"a": 3}}'])
def test_damaged_header(text: str, tmp_path: Path) -> None:
    arrays = {"a.weight": np.zeros((8, 64), np.int8), "a.weight_scale": np.ones((8, 1), np.float32)}
    save_file(arrays, tmp_path / "a.safetensors", {"_quantization_metadata": text})
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "a.safetensors")
    assert not isinstance(caught.value, UnreadFormat)


def test_blocks_of_numbers_with_a_scale(tmp_path: Path) -> None:
    """As in GGUF's Q8_0, where a half precision scale is in front of 32 numbers of 8 bits."""
    item = np.dtype([("scale", "<f2"), ("numbers", "i1", 32)])
    rng = np.random.default_rng(0)
    stored = np.zeros(4 * 2, item)  # [4, 64]
    stored["scale"], stored["numbers"] = rng.random(8), rng.integers(-127, 128, (8, 32))
    (tmp_path / "a").write_bytes(b"head" + stored.tobytes())

    def begin(entry: Entry) -> Any:
        del entry
        return lambda items, start: (items["scale"].astype(np.float32)[:, None] * items["numbers"]).reshape(-1)

    entry = Entry("a", (4, 64), item, tmp_path / "a", ((4, stored.nbytes),), "torch", decode=Decode(32, begin))
    wanted = (stored["scale"].astype(np.float32)[:, None] * stored["numbers"]).reshape(4, 64)
    np.testing.assert_array_equal(entry.read(), wanted)
    np.testing.assert_array_equal(entry.rows((2, 4), (1, 2)).read(), wanted[[2, 3, 1]])
    np.testing.assert_array_equal(np.concatenate([block.copy() for _, block in entry.blocks(96)]), wanted.ravel())


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("control_model.input_hint_block.0.weight", (16, 3, 3, 3), identify.CONTROLNET),
        ("controlnet_cond_embedding.conv_in.weight", (16, 3, 3, 3), identify.CONTROLNET),
        ("lllite_unet_x.down.0.weight", (4, 4), identify.LLLITE),
        ("ip_adapter.1.to_k_ip.weight", (320, 768), identify.IP_ADAPTER),
        ("lora_unet_conv_in.lora_down.weight", (4, 4, 3, 3), identify.LORA),
        ("model.diffusion_model.out.2.lora_A.weight", (4, 4), identify.LORA),
        ("body.0.block1.weight", (4, 4, 3, 3), identify.T2I_ADAPTER),
        ("<toy>", (2, 768), identify.EMBEDDING),
        ("decoder.conv_in.weight", (4, 4, 3, 3), identify.AUTOENCODER),
        ("down_blocks.0.resnets.0.conv1.weight", (4, 4, 3, 3), identify.UNET_ALONE),
        ("text_model.final_layer_norm.weight", (4,), identify.TEXT_ALONE),
        ("model.diffusion_model.out.2.weight", (4, 4, 3, 3), identify.MODEL),
        ("layers.0.weight", (4, 4), None),
    ],
)
def test_kinds_of_files(name: str, shape: tuple[int, ...], kind: identify.FileKind | None) -> None:
    assert identify.identify({name: shape}) is kind


@pytest.mark.parametrize(
    ("shapes", "family", "width"),
    [
        ({"model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 2048)}, 2048, 2048),
        ({"lora_unet_x_attn2_to_k.lora_down.weight": (4, 768)}, 768, 768),
        ({"lora_unet_x_attn2_to_k.lora_up.weight": (320, 4)}, None, 0),
        ({"ip_adapter.1.to_k_ip.weight": (320, 1024)}, 1024, 1024),
        ({"emb_params": (2, 1024)}, 1024, 0),
        ({"clip_l": (2, 768), "clip_g": (2, 1280)}, 2048, 0),
    ],
)
def test_families_of_files(shapes: dict[str, tuple[int, ...]], family: int | None, width: int) -> None:
    assert identify.family_of(shapes) == (identify.BASES[family] if family else "", width)


# Broken files ---------------------------------------------------------------------------------------------------------


def line(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN_SAFETENSORS = {
    "empty": (b"", "truncated"),
    "shorter than its header": (raw_safetensors({"a": line()}, b"\0" * 8)[:20], "truncated"),
    "shorter than its arrays": (raw_safetensors({"a": line()}, b"\0" * 7), "truncated: its header describes 8 bytes"),
    "header of 2^63 bytes": (raw_safetensors({}, length=1 << 63), "claims a header of"),
    "header not JSON": (raw_safetensors(b"{'a': 1}"), "not valid JSON"),
    "header not UTF-8": (raw_safetensors(b'{"\xff": 1}'), "not valid JSON"),
    "header nested deeply": (raw_safetensors(b'{"a":' * 50_000), "not valid JSON"),
    "header with a huge number": (raw_safetensors(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "header a list": (raw_safetensors([]), "not a table of arrays"),
    "line not a table": (raw_safetensors({"a": 1}), "lacks dtype, shape or data_offsets"),
    "unknown dtype": (raw_safetensors({"a": line(dtype="F4")}, b"\0" * 8), "dtype 'F4'"),
    "dtype not text": (raw_safetensors({"a": line(dtype=[])}, b"\0" * 8), "dtype"),
    "shape overflows": (raw_safetensors({"a": line([1 << 32, 1 << 32])}, b"\0" * 8), "claims shape"),
    "shape negative": (raw_safetensors({"a": line([-2])}, b"\0" * 8), "claims the shape"),
    "shape of fractions": (raw_safetensors({"a": line([2.0])}, b"\0" * 8), "claims the shape"),
    "shape of booleans": (raw_safetensors({"a": line([True, 2])}, b"\0" * 8), "claims the shape"),
    "shape of rank 100": (raw_safetensors({"a": line([1] * 100)}, b"\0" * 8), "claims the shape"),
    "size and shape differ": (raw_safetensors({"a": line([3])}, b"\0" * 8), r"\(12 bytes\) but holds 8 bytes"),
    "range backwards": (raw_safetensors({"a": line([2], (8, 0))}, b"\0" * 8), "but holds -8 bytes"),
    "range negative": (raw_safetensors({"a": line([2], (-8, 0))}, b"\0" * 8), "byte range"),
    "overlap": (raw_safetensors({"a": line(), "b": line([2], (4, 12))}, b"\0" * 12), "'b' overlaps"),
    "hole": (raw_safetensors({"a": line(), "b": line([2], (12, 20))}, b"\0" * 20), "leaves 4 bytes"),
    "more than described": (raw_safetensors({"a": line()}, b"\0" * 9), "1 bytes that its header does not describe"),
    "name twice": (
        raw_safetensors(f'{{"a": {json.dumps(line())}, "a": {json.dumps(line())}}}'.encode(), b"\0" * 8),
        "'a' twice",
    ),
    "name a path": (raw_safetensors({"../../a": line()}, b"\0" * 8), "unusable name '../../a'"),
    "name with control characters": (raw_safetensors({"a\n\x1b[2J": line()}, b"\0" * 8), "unusable name"),
    "name of a million letters": (raw_safetensors({"a" * 1_000_000: line()}, b"\0" * 8), "unusable name"),
    "a pickle in disguise": (b"PK\x03\x04" + b"\0" * 100, "pickle"),
    "a bare pickle in disguise": (b"\x80\x02}q\x00." + b"\0" * 100, "pickle"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "a web page": (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
    "a GGUF file in disguise": (b"GGUF" + b"\3\0\0\0" * 6, "is a GGUF file"),
}


def array_object(shape: Any, dtype: Any = "float32", data: Any = b"\0" * 8, kind: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(kind, msgpack.packb((shape, dtype, data)))


BROKEN_MSGPACK = {
    "empty": (b"", "truncated"),
    "not a map": (msgpack.packb([1, 2]), "no map at its beginning"),
    "truncated": (flax_bytes({"a": np.zeros(8, np.float32)})[:-9], "truncated"),
    "truncated in a name": (b"\x81\xa5ab", "cannot be decoded"),
    "bytes after the end": (flax_bytes({"a": np.zeros(2, np.float32)}) + b"\0", "1 bytes after its last array"),
    "nested deeply": (b"\x81\xa1a" * 100_000, "more than 32 levels deep"),
    "map of 2^32 entries": (b"\xdf\xff\xff\xff\xff" + b"\xa1a" * 10, "claims a map of 4294967295 entries"),
    "object of 2^32 bytes": (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01abc", "claims 4294967295 bytes"),
    "name of 2^32 letters": (b"\x81\xdb\xff\xff\xff\xffabc", "cannot be decoded"),
    "name of a list": (b"\x81\x91\xa1a\x01", "unusable name"),
    "shape lies": (msgpack.packb({"a": array_object((1 << 40,))}), "but holds 8 bytes"),
    "shape overflows": (msgpack.packb({"a": array_object((1 << 32, 1 << 32))}), "but holds 8 bytes"),
    "shape not a list": (msgpack.packb({"a": array_object("22")}), "claims the shape"),
    "shape of 2^32 numbers": (
        msgpack.packb({"a": msgpack.ExtType(1, b"\x93\xdd\xff\xff\xff\xff\x01\x01")}),
        "cannot be decoded",
    ),
    "unknown dtype": (msgpack.packb({"a": array_object((1,), "object")}), "unknown dtype 'object'"),
    "bytes of another length": (
        msgpack.packb({"a": msgpack.ExtType(1, b"\x93\x91\x02\xa7float32\xc6\xff\xff\xff\xff" + b"\0" * 8)}),
        "claims 4294967295 bytes",
    ),
    "not a triple": (msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((1, 2)))}), "triple"),
    "unknown object": (msgpack.packb({"a": msgpack.ExtType(5, b"abcd")}), "unknown type 5"),
    "not an array": (msgpack.packb({"a": 1}), "'a' is not an array"),
    "text for bytes": (msgpack.packb({"a": array_object((2,), data="12345678")}), "not stored as bytes"),
    "name a path": (msgpack.packb({"../a": array_object((2,))}), "unusable name"),
    "name twice": (b"\x82" + 2 * flax_bytes({"a": np.zeros(2, np.float32)})[1:], "'a' twice"),
    "chunks lie": (
        flax_bytes({"a": {**chunked(np.zeros(8, np.float32), 4), "shape": {"0": 1 << 50}}}),
        "but holds 32 bytes",
    ),
    "chunks out of order": (
        flax_bytes({"a": {**chunked(np.zeros(8, np.float32), 4), "shape": {"1": 8}}}),
        "parts out of order",
    ),
    "chunks of nothing": (flax_bytes({"a": {"__msgpack_chunked_array__": True}}), "do not belong together"),
}


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [pytest.param(open_safetensors, *case, id=name) for name, case in BROKEN_SAFETENSORS.items()]
    + [pytest.param(open_flax_msgpack, *case, id=name) for name, case in BROKEN_MSGPACK.items()],
)
def test_broken_files(tmp_path: Path, read: Callable[[Path], Any], content: bytes, message: str) -> None:
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_msgpack_with_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax_msgpack, "MAX_ENTRIES", 10)
    path = tmp_path / "model.msgpack"
    path.write_bytes(flax_bytes({f"a{i}": {"b": np.zeros(1, np.float32)} for i in range(10)}))
    with pytest.raises(CheckpointError, match="claims more than 10 entries"):
        open_flax_msgpack(path)


def test_every_truncation_and_flip_is_an_error_or_the_truth(tmp_path: Path) -> None:
    part = toy_components()[1]
    params = toy_params()["vae"]
    save_file(file_arrays(part, params), tmp_path / "model.safetensors")
    contents = {
        "m.safetensors": (tmp_path / "model.safetensors").read_bytes(),
        "m.msgpack": flax_bytes(flax_tree(part, params)),
    }
    rng = np.random.default_rng(0)
    for name, content in contents.items():
        path = tmp_path / name
        for cut in rng.integers(0, len(content), 60):
            path.write_bytes(content[:cut])
            with pytest.raises(CheckpointError):
                open_weights(path)
        for position in rng.integers(0, len(content), 300):
            damaged = bytearray(content)
            damaged[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            try:
                entries = open_weights(path)
            except CheckpointError:
                continue
            for entry in entries:
                entry.read()


@pytest.mark.parametrize("length", [0x280, 0x580, 0x10280])
def test_a_header_of_a_length_that_looks_like_a_pickle(tmp_path: Path, length: int) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + bytes(4))
    assert [one.name for one in open_safetensors(path)] == ["a"]


def test_file_cut_short_while_loading(tmp_path: Path) -> None:
    save_file({"a": np.zeros((100, 100), np.float32)}, tmp_path / "a.safetensors")
    (entry,) = open_safetensors(tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", 10_000)
    unstamped = dataclasses.replace(entry, stamp=())  # as if it had been cut after it was opened for reading
    for layout in ("linear", "plain"):
        param = Param((100, 100), (None, None), layout=layout)
        with pytest.raises(CheckpointError, match="was replaced while it was being loaded"):
            materialise(param, entry, np.float32, Scratch())
        with pytest.raises(CheckpointError, match="ended while 'a' was being read"):
            materialise(param, unstamped, np.float32, Scratch())
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        entry.read()
