"""Loading and saving checkpoints: every form they come in, strictness, memory, and PyTorch as a reader."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from canvax.errors import CheckpointError, InputError
from canvax.nn import linear_spec
from canvax.params import Param, flatten, map_spec
from canvax.quantize import quantized_spec
from canvax.types import Array, HostArray
from canvax.weights import save as weights_save
from canvax.weights.files import open_weights
from canvax.weights.load import THREADS, Component, load_components, stored_components
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import open_safetensors, read_metadata
from canvax.weights.save import save_checkpoint, save_component
from tests.support.checkpoints import (
    BFLOAT16,
    INDEX,
    file_arrays,
    flax_bytes,
    flax_tree,
    toy_components,
    toy_params,
    write_checkpoint,
)
from tests.support.refusals import refused

UNET = Path("unet") / "diffusion_pytorch_model.safetensors"


def put(param: Param, array: HostArray) -> Array:
    assert array.shape == param.shape
    return jax.device_put(array)


def load(folder: Path, dtype: Any = np.float32) -> dict[str, Any]:
    return load_components(open_files(Location(folder)), toy_components(), dtype=dtype, place=put)


def assert_same(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    got_leaves, wanted_leaves = dict(flatten(got)), dict(flatten(wanted))
    assert got_leaves.keys() == wanted_leaves.keys()
    for name, leaf in wanted_leaves.items():
        np.testing.assert_array_equal(np.asarray(got_leaves[name]), leaf, err_msg=name)


# Loading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch", "old", "flax"])
def test_every_form_loads_the_same(tmp_path: Path, form: str) -> None:
    params = toy_params()
    assert_same(load(write_checkpoint(tmp_path, params, form=form)), params)


@pytest.mark.parametrize("form", ["torch", "flax"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, BFLOAT16, np.float64])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, BFLOAT16])
def test_casting(tmp_path: Path, form: str, stored: Any, wanted: Any) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(stored), toy_params())
    loaded = load(write_checkpoint(tmp_path, params, form=form), wanted)
    assert_same(loaded, jax.tree.map(lambda leaf: leaf.astype(wanted), params))
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(wanted)}


@pytest.mark.parametrize("stored", [np.float32, BFLOAT16])
def test_what_does_not_fit_is_an_error(tmp_path: Path, stored: Any) -> None:
    """Never an infinity, neither when loading nor when saving."""
    params = jax.tree.map(lambda leaf: leaf.astype(stored), toy_params())
    params["unet"]["conv_in"]["weight"][0, 0, 0, 0] = 1e30
    source = write_checkpoint(tmp_path / "source", params)
    with pytest.raises(CheckpointError, match="float16"):
        load(source, np.float16)
    with refused("dtype"):
        save(tmp_path / "saved", params, source, dtype=np.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_loaded_arrays_outlive_the_file(tmp_path: Path) -> None:
    params = toy_params()
    write_checkpoint(tmp_path, params)
    loaded = load(tmp_path)
    size = (tmp_path / UNET).stat().st_size
    (tmp_path / UNET).write_bytes(b"\xff" * size)
    assert_same(loaded, params)


# Checkpoints that do not fit ------------------------------------------------------------------------------------------


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_params())
    arrays = load_file(tmp_path / UNET)
    arrays["conv_in.weight"] = arrays["conv_in.weight"][:, :3].copy()
    arrays["time_embedding.linear_1.bias"] = arrays["time_embedding.linear_1.bias"].astype(np.int32)
    del arrays["down_blocks.0.attentions.0.norm.bias"]
    arrays["class_embedding.weight"] = np.zeros((2, 2), np.float32)
    save_file(arrays, tmp_path / UNET)
    vae = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    twice = load_file(vae)
    twice["decoder.mid_block.attentions.0.query.bias"] = twice["decoder.mid_block.attentions.0.to_q.bias"].copy()
    save_file(twice, vae)
    text = tmp_path / "text_encoder" / "model.safetensors"
    text.write_bytes(text.read_bytes()[:-1])
    placed: list[Param] = []
    with pytest.raises(CheckpointError) as caught:
        load_components(
            open_files(Location(tmp_path)),
            toy_components(),
            dtype=np.float32,
            place=lambda param, _: placed.append(param),
        )
    message = str(caught.value)
    assert not placed
    assert "1 missing" in message
    assert "unet.down_blocks.0.attentions.0.norm.bias (6,)" in message
    assert "1 unused" in message
    assert "class_embedding.weight in unet/diffusion_pytorch_model.safetensors (2, 2)" in message
    assert "1 misshapen" in message
    assert (
        "unet.conv_in.weight: conv_in.weight in unet/diffusion_pytorch_model.safetensors is (6, 3, 3, 3), "
        "the config asks for (6, 4, 3, 3)" in message
    )
    assert "1 mistyped" in message
    assert "time_embedding.linear_1.bias in unet/diffusion_pytorch_model.safetensors is int32" in message
    assert "decoder.mid_block.attentions.0.to_q.bias: as" in message
    assert "decoder.mid_block.attentions.0.query.bias" in message
    assert "text_encoder" in message
    assert "truncated" in message
    assert "download the checkpoint again" in message


def test_a_stack_of_another_shape_has_the_name_of_its_file(tmp_path: Path) -> None:
    spec = {name: linear_spec(4, 4, bias=False) for name in ("to_q", "to_k")}
    names = Names([Rule("both", ("to_q", "to_k"))])
    save_file({"both.weight": np.zeros((8, 3), np.float32)}, tmp_path / "a.safetensors")
    files: Any = SimpleNamespace(entries=lambda _: open_weights(tmp_path / "a.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        stored_components(files, [Component("net", spec, "diffusers", names.to_internal)])
    assert str(caught.value).count("both.weight") == 2


def test_missing_in_flax_files_names_the_flax_path(tmp_path: Path) -> None:
    params = toy_params()
    write_checkpoint(tmp_path, params, form="flax")
    part = toy_components()[0]
    tree = flax_tree(part, params["unet"])
    del tree["down_blocks_0"]["attentions_0"]["transformer_blocks_0"]["attn1"]["to_out_0"]["kernel"]
    (tmp_path / "unet" / "diffusion_flax_model.msgpack").write_bytes(flax_bytes(tree))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "attn1.to_out.0.weight (down_blocks_0/attentions_0/transformer_blocks_0/attn1/to_out_0/kernel" in str(
        caught.value
    )


@pytest.mark.parametrize("leaf", ["scale", "alpha"])
@pytest.mark.parametrize("form", ["torch", "flax"])
def test_scale_and_alpha_are_names_like_others(tmp_path: Path, leaf: str, form: str) -> None:
    """A parameter of that name is loaded; an array of that name that no config asks for is a fault."""
    part, params = toy_components()[0], toy_params()
    write_checkpoint(tmp_path, params, form=form)
    own = np.arange(6, dtype=np.float32)
    with_leaf = dataclasses.replace(part, spec={**part.spec, "q_norm": {leaf: Param((6,), (None,))}})
    values = {**params["unet"], "q_norm": {leaf: own}}
    path = tmp_path / "unet" / ("diffusion_flax_model.msgpack" if form == "flax" else UNET.name)
    if form == "flax":
        path.write_bytes(flax_bytes({**flax_tree(part, params["unet"]), "q_norm": {leaf: own}}))
    else:
        save_file(file_arrays(with_leaf, values), path)
    loaded = load_components(open_files(Location(tmp_path)), [with_leaf], dtype=np.float32, place=put)
    assert_same(loaded["unet"], values)
    with pytest.raises(CheckpointError, match=rf"1 unused(.|\n)*q_norm[./]{leaf}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["conv_in.num_batches_tracked", "conv_in.position_ids"])
def test_leftovers_of_other_networks_are_faults(tmp_path: Path, name: str) -> None:
    """Only the embeddings of a text or image encoder carry numbers that nobody reads."""
    write_checkpoint(tmp_path, toy_params())
    save_file(load_file(tmp_path / UNET) | {name: np.zeros((), np.float32)}, tmp_path / UNET)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_scales_of_quantised_weights_are_in_no_file(tmp_path: Path) -> None:
    """They are made while loading, and found in a file they are a fault."""
    part, params = toy_components()[0], toy_params()
    quantised = dataclasses.replace(part, spec=quantized_spec(part.spec, "int8"))
    write_checkpoint(tmp_path, params)
    loaded = load_components(open_files(Location(tmp_path)), [quantised], dtype=np.float32, place=put)["unet"]
    leaf = loaded["down_blocks"]["0"]["attentions"]["0"]["proj_in"]
    assert (leaf["weight"].dtype, leaf["scale"].dtype) == (np.int8, np.float32)
    arrays = load_file(tmp_path / UNET)
    save_file(arrays | {"down_blocks.0.attentions.0.proj_in.scale": np.ones(6, np.float32)}, tmp_path / UNET)
    with pytest.raises(CheckpointError, match=r"1 unused(.|\n)*proj_in\.scale"):
        load_components(open_files(Location(tmp_path)), [quantised], dtype=np.float32, place=put)


def test_a_dtype_of_its_own_is_not_quantised(tmp_path: Path) -> None:
    part, params = toy_components()[0], toy_params()
    spec = {
        **part.spec,
        "conv_in": map_spec(lambda param: dataclasses.replace(param, dtype="float32"), part.spec["conv_in"]),
    }
    write_checkpoint(tmp_path, params)
    own = dataclasses.replace(part, spec=spec)
    loaded = load_components(open_files(Location(tmp_path)), [own], dtype=BFLOAT16, place=put)["unet"]
    assert loaded["conv_in"]["weight"].dtype == np.float32
    assert loaded["time_embedding"]["linear_1"]["weight"].dtype == BFLOAT16
    np.testing.assert_array_equal(loaded["conv_in"]["weight"], params["unet"]["conv_in"]["weight"])


def test_long_lists_of_faults_are_cut(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_params())
    arrays = {f"extra.{i}": np.zeros(1, np.float32) for i in range(1000)}
    save_file({**load_file(tmp_path / UNET), **arrays}, tmp_path / UNET)
    with pytest.raises(CheckpointError, match="1000 unused") as caught:
        load(tmp_path)
    assert "... and 992 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 20


# Memory ---------------------------------------------------------------------------------------------------------------

MEMORY_SCRIPT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from canvax.nn import conv2d_spec, linear_spec
from canvax.weights.open import open_files
from canvax.weights.rules import Names, Rule
from canvax.weights.location import Location
from canvax.weights.load import Component, load_components

def status(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field))

kinds = {"unet": "diffusers", "vae": "diffusers", "text_encoder": "transformers"}
parts = [Component(n, {str(i): SPEC for i in range(12)}, k) for n, k in kinds.items()]
files = open_files(Location(sys.argv[1]))
token = jax.block_until_ready(jnp.zeros(()))
place = (lambda param, array: token) if sys.argv[2] == "elsewhere" else (lambda param, array: jax.device_put(array))
before = status("VmRSS")
params = load_components(files, parts, dtype=np.dtype(sys.argv[3]), place=place)
jax.block_until_ready(params)
print(status("VmHWM") - before)
"""
SPEC = "linear_spec(1024, 2048, bias=False)"
ONE = 1024 * 2048 * 4  # bytes of one array as stored: float32
COMPONENT = 12 * ONE


def write_large(folder: Path, form: str) -> None:
    """Three components of 12 arrays of 8 MiB: 300 MB."""
    write_checkpoint(folder, toy_params())
    rng = np.random.default_rng(0)
    array = rng.standard_normal((2048, 1024), np.float32)
    for part in toy_components():
        (weights,) = (folder / part.name).glob("*.safetensors")
        if form == "torch":
            save_file({f"{i}.weight": array for i in range(12)}, weights)
        else:
            weights.unlink()
            name = "flax_model" if part.kind == "transformers" else "diffusion_flax_model"
            tree = {str(i): {"kernel": array.reshape(1024, 2048)} for i in range(12)}
            (weights.parent / f"{name}.msgpack").write_bytes(flax_bytes(tree))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_peak_host_memory(tmp_path: Path) -> None:
    def peak(where: str, dtype: str) -> int:
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        script = MEMORY_SCRIPT.replace("SPEC", SPEC)
        command = [sys.executable, "-c", script, str(tmp_path), where, dtype]
        return int(subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=100).stdout)

    slack = THREADS * ONE + 16 * 2**20
    write_large(tmp_path, "torch")
    # With the arrays on another device, the host holds an array of each thread; on the CPU, the model as well.
    assert peak("elsewhere", "float32") < slack < 1.2 * COMPONENT
    assert peak("here", "float32") < 3 * COMPONENT + slack
    write_large(tmp_path, "flax")
    assert peak("elsewhere", "float16") < slack


# Saving ---------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "unet": {"_class_name": "FlaxUNet2DConditionModel", "sample_size": 8},
    "vae": {"_class_name": "AutoencoderKL"},
    "text_encoder": {"model_type": "clip_text_model", "torch_dtype": "float16"},
    "scheduler": {"_class_name": "DDIMScheduler", "steps_offset": 1},
}


def save(folder: Path, params: Any, source: Path, **options: Any) -> Path:
    given = {"index": INDEX, "configs": CONFIGS, "copy_from": lambda component: source / component}
    return save_checkpoint(folder, toy_components(), params, **given, **options)


def test_what_is_saved_loads_again(tmp_path: Path) -> None:
    params = toy_params()
    source = write_checkpoint(tmp_path / "source", params)
    saved = save(tmp_path / "saved", load(source), source)
    assert_same(load(saved), params)
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert files == wanted
    for part in toy_components():
        (path,) = (saved / part.name).glob("*.safetensors")
        arrays = file_arrays(part, params[part.name])
        got = load_file(path)
        assert got.keys() == arrays.keys()
        assert all(np.array_equal(got[name], arrays[name]) for name in arrays)
        assert read_metadata(path) == {"format": "pt"}
    index = json.loads((saved / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    assert index["requires_safety_checker"] is False
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    assert json.loads((saved / "unet" / "config.json").read_text())["_class_name"] == "UNet2DConditionModel"
    assert json.loads((saved / "text_encoder" / "config.json").read_text())["torch_dtype"] == "float32"
    assert json.loads((saved / "scheduler" / "scheduler_config.json").read_text()) == CONFIGS["scheduler"]


def test_saving_in_another_dtype_and_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_save, "MAX_SHARD", 600)
    params = toy_params()
    whole = write_checkpoint(tmp_path / "whole", params)
    (whole / UNET).unlink()
    save_component(whole / "unet", toy_components()[0], params["unet"], {"a": 1}, dtype=BFLOAT16)
    shards = sorted(path.name for path in (whole / "unet").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"diffusion_pytorch_model-00001-of-{len(shards):05d}.safetensors"
    index = whole / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    assert set(json.loads(index.read_text())["weight_map"].values()) == set(shards)
    index.rename(index.with_name("diffusion_pytorch_model.safetensors.index.bf16.json"))
    files = open_files(Location(whole, variant="bf16"))
    loaded = load_components(files, toy_components(), dtype=np.float32, place=put)
    assert_same(loaded["unet"], jax.tree.map(lambda leaf: leaf.astype(BFLOAT16).astype(np.float32), params["unet"]))


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    params = toy_params()
    source = write_checkpoint(tmp_path / "source", params)
    before = (source / UNET).read_bytes()
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    with refused("folder"):
        save(source, other, source)
    (tmp_path / "file").write_text("")
    with refused("folder"):
        save(tmp_path / "file", other, source)
    assert (source / UNET).read_bytes() == before
    (source / "notes.txt").write_text("mine")
    (source / "tokenizer").mkdir(exist_ok=True)
    stale = [source / "canvax.json", source / "tokenizer" / "tokenizer.json"]
    plain = write_checkpoint(tmp_path / "plain", params)
    (plain / "tokenizer").mkdir(exist_ok=True)
    (plain / "tokenizer" / "vocab.json").write_text("{}")
    for path in stale:
        path.write_text("{}")
        (plain / path.relative_to(source)).unlink(missing_ok=True)
    save(source, other, plain, overwrite=True)
    assert not any(path.exists() for path in stale)
    assert (source / "tokenizer" / "vocab.json").is_file()
    assert_same(load(source), other)
    assert (source / "notes.txt").read_text() == "mine"


def test_the_other_form_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file and shards of the same weights would both be there, and the older might be read."""
    source = write_checkpoint(tmp_path / "source", toy_params())
    for limit in (10**9, 1000, 10**9):
        monkeypatch.setattr(weights_save, "MAX_SHARD", limit)
        folder = save(tmp_path / "saved", toy_params(), source, overwrite=True) / "unet"
        index = list(folder.glob("*.index.json"))
        files = {path.name for path in folder.glob("*.safetensors")}
        if limit == 1000:
            assert files == set(json.loads(index[0].read_text())["weight_map"].values())
        else:
            assert (files, index) == ({UNET.name}, [])


def test_saving_into_a_link_to_another_disk(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", toy_params())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        (tmp_path / "link").symlink_to(elsewhere)
        assert_same(load(save(tmp_path / "link", toy_params(), source)), toy_params())
        assert not [path for path in Path(elsewhere).iterdir() if path.name.startswith(".")]


def test_a_file_replaced_while_it_is_loaded(tmp_path: Path) -> None:
    one, other = (write_checkpoint(tmp_path / name, toy_params()) / UNET for name in ("one", "other"))
    entries = open_safetensors(one)
    entries[0].read()
    os.replace(other, one)
    with pytest.raises(CheckpointError, match="was replaced while it was being loaded"):
        entries[1].read()


def test_failed_saving_leaves_nothing(tmp_path: Path) -> None:
    params = toy_params()
    del params["vae"]["decoder"]["mid_block"]["attentions"]["0"]["to_q"]["bias"]
    with pytest.raises(InputError, match=r"to_q\.bias is missing"):
        save(tmp_path / "saved", params, tmp_path)
    params = toy_params()
    params["unet"]["conv_in"]["weight"] = np.zeros((3, 3, 4, 5), np.float32)
    with pytest.raises(InputError, match=r"conv_in\.weight is \(3, 3, 4, 5\), not \(3, 3, 4, 6\)"):
        save(tmp_path / "saved", params, tmp_path)
    del params["unet"]
    with pytest.raises(InputError, match="params has"):
        save(tmp_path / "saved", params, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
def test_pytorch_loads_what_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    from canvax.models.clip import text_encoder_spec
    from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
    from canvax.models.unet import unet_spec
    from canvax.models.vae import vae_spec

    files = open_files(Location("emoji"))
    configs = {name: files.config(name) for name in ("unet", "vae", "text_encoder", "scheduler")}
    parts = [
        Component("unet", unet_spec(UNetConfig.from_dict(configs["unet"])), "diffusers"),
        Component("vae", vae_spec(VaeConfig.from_dict(configs["vae"])), "diffusers"),
        Component("text_encoder", text_encoder_spec(ClipTextConfig.from_dict(configs["text_encoder"])), "transformers"),
    ]
    params = load_components(files, parts, dtype=np.float32, place=put)
    saved = save_checkpoint(
        tmp_path / "saved", parts, params, index=files.index, configs=configs, copy_from=files.folder
    )
    ours = diffusers.StableDiffusionPipeline.from_pretrained(saved)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(files.folder())
    for name in ("unet", "vae", "text_encoder"):
        got, wanted = getattr(ours, name).state_dict(), getattr(theirs, name).state_dict()
        assert got.keys() == wanted.keys()
        assert all((got[key].float() == wanted[key].float()).all() for key in wanted), name
    alone = transformers.CLIPTextModel.from_pretrained(saved / "text_encoder")
    assert str(alone.dtype) == "torch.float32"
