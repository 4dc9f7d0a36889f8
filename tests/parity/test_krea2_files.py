"""Krea 2 in the files that people download, and saved again, beside the folder that diffusers wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import safetensors.numpy  # noqa: E402
from diffusers.loaders.single_file_utils import (  # noqa: E402
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_wan_vae_to_diffusers,
)

import canvax  # noqa: E402
from canvax.cli import main  # noqa: E402
from canvax.families.known import PRESETS  # noqa: E402
from canvax.families.krea2 import KREA2, NAMES  # noqa: E402
from canvax.families.language import QWEN3_VL_4B  # noqa: E402
from canvax.models.decoder_lm import DecoderConfig, decoder_lm_spec  # noqa: E402
from canvax.models.krea2 import Krea2Config, krea2_spec  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.params import count  # noqa: E402
from canvax.weights.language_model import language_model_config  # noqa: E402
from canvax.weights.rules import Names  # noqa: E402
from canvax.weights.safetensors import ArrayToSave  # noqa: E402
from canvax.weights.wan_vae import wan_vae_rules  # noqa: E402

from .test_krea2_pipeline import build  # noqa: E402
from .test_z_image_files import Arrays, arrays, shapes_of, write  # noqa: E402

PLACES = [f"decoder.upsamples.{i}.resample.1.weight" for i in (3, 7, 11)] + ["decoder.upsamples.14.residual.0.gamma"]
"""Layers of the decoder that tell how many blocks are between them."""


def original(found: Arrays, names: Names) -> Arrays:
    """Arrays under the names of their authors; tables of a block are one row."""
    to_save = [ArrayToSave(name, array.shape, array.dtype, lambda array=array: array) for name, array in found.items()]
    named = {array.name: array.get() for array in names.to_external(to_save)}
    return {name: array.reshape(-1) if name.endswith("mod.lin") else array for name, array in named.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the released models are the facts that no array tells."""
    return build(tmp_path_factory.mktemp("files") / "krea", released=True, is_distilled=True)


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Transformer, text encoder and autoencoder as files, and the tokenizer's folder."""
    into = tmp_path_factory.mktemp("comfy")
    shutil.copytree(folder / "tokenizer", into / "words")
    text = {f"model.{name}": array for name, array in arrays(folder, "text_encoder").items()}
    return {
        "model": write(into / "krea2_turbo_bf16.safetensors", original(arrays(folder, "transformer"), Names(NAMES))),
        "text_encoder": write(into / "qwen3vl_4b_bf16.safetensors", text),
        "vae": write(
            into / "qwen_image_vae.safetensors", original(arrays(folder, "vae"), Names(wan_vae_rules(PLACES)))
        ),
        "tokenizer": into / "words",
    }


def load(model: Path, files: dict[str, Path] | None = None, **changes: Any) -> canvax.Pipeline:
    parts = {name: path for name, path in {**(files or {}), **changes}.items() if name != "model"}
    return canvax.load(model, dtype="float32", mesh=make_mesh(jax.devices()[:1]), progress=False, **parts)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> canvax.Pipeline:
    return load(folder)


def assert_same(pipe: canvax.Pipeline, wanted: canvax.Pipeline) -> None:
    assert pipe.model.networks == wanted.model.networks
    jax.tree.map(np.testing.assert_array_equal, pipe.params, wanted.params)


def test_single_files(files: dict[str, Path], folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """Weights and configs are those of the folder, and diffusers knows the names; Raw is known by its file's name."""
    named = {name: torch.from_numpy(array) for name, array in safetensors.numpy.load_file(files["model"]).items()}
    converted = convert_krea2_transformer_checkpoint_to_diffusers(named)
    assert converted.keys() == arrays(folder, "transformer").keys()
    assert (
        convert_wan_vae_to_diffusers(safetensors.numpy.load_file(files["vae"])).keys() == arrays(folder, "vae").keys()
    )
    pipe = load(files["model"], files)
    assert_same(pipe, wanted)
    assert pipe.model.scheduler.schedule.shift == wanted.model.scheduler.schedule.shift
    prefixed = {f"model.diffusion_model.{name}": array
                for name, array in safetensors.numpy.load_file(files["model"]).items()}  # fmt: skip
    raw = write(tmp_path / "Krea2_RAW_bf16.safetensors", prefixed)
    pipe = load(raw, files, vae=folder, text_encoder=folder)
    assert_same(pipe, wanted)
    assert (pipe.model.defaults.num_inference_steps, pipe.model.scheduler.schedule.size_shift) == (28, "exponential")


def test_gguf(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Weights are the numbers in the files. The text encoder of a GGUF file has no eyes."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import both

    small, plain = both(files, arrays(folder, "text_encoder"), tmp_path, "Q4_0")
    assert_same(*(load(found["model"], found) for found in (small, plain)))


def test_files_that_do_not_fit(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(canvax.InputError) as caught:
        load(files["model"])
    assert (caught.value.argument, "{text_encoder=" in caught.value.cure) == ("model", True)
    named = safetensors.numpy.load_file(files["model"])
    for name, changed in {
        "missing": {key: array for key, array in named.items() if key != "blocks.1.attn.gate.weight"},
        "stray": {**named, "blocks.1.attn.wx.weight": np.ones(2, np.float32)},
    }.items():
        with pytest.raises(canvax.CheckpointError):
            load(write(tmp_path / f"{name}.safetensors", changed), files)
    vae = {key: array for key, array in safetensors.numpy.load_file(files["vae"]).items() if "conv2" not in key}
    with pytest.raises(canvax.CheckpointError):
        load(files["model"], files, vae=write(tmp_path / "vae.safetensors", vae))


def test_info(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is recognised, with the flag that takes it."""
    for name, flag in {"model": "--model", "text_encoder": "--text-encoder", "vae": "--vae"}.items():
        assert main(["info", str(files[name]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["flag"] == flag
        assert name != "model" or report["family"] == "Krea 2"


def assert_same_files(saved: Path, folder: Path) -> None:
    """Arrays that canvax does not read included: eyes, the last layer, the past of the autoencoder's convolutions."""
    for name in ("transformer", "text_encoder", "vae"):
        one, other = arrays(saved, name), arrays(folder, name)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)
    one, other = (json.loads((path / "model_index.json").read_text()) for path in (saved, folder))
    assert one.get("is_distilled") == other["is_distilled"]


def test_saved(folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """A saved folder has changes of its parameters, and diffusers loads it."""
    wanted.save(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", folder)
    kernel = wanted.params["vae"]["decoder"]["conv_in"]["weight"]
    changed = {**wanted.params, "vae": {**wanted.params["vae"], "decoder": {**wanted.params["vae"]["decoder"]}}}
    changed["vae"]["decoder"]["conv_in"] = {**changed["vae"]["decoder"]["conv_in"], "weight": 2 * kernel}
    wanted.model.save(tmp_path / "changed", changed)
    theirs = diffusers.Krea2Pipeline.from_pretrained(tmp_path / "changed")
    state, before = theirs.vae.state_dict(), arrays(folder, "vae")["decoder.conv_in.weight"]
    after = state["decoder.conv_in.weight"].numpy()
    np.testing.assert_array_equal(after[:, :, -1], 2 * before[:, :, -1])
    np.testing.assert_array_equal(after[:, :, :-1], before[:, :, :-1])
    text = {name: array.numpy() for name, array in theirs.text_encoder.state_dict().items()}
    assert all(np.array_equal(text[name], array) for name, array in arrays(folder, "text_encoder").items())


def test_converted(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Files become a folder, without a device."""
    flags = {"--vae": "vae", "--text-encoder": "text_encoder", "--tokenizer": "tokenizer"}
    words = [word for flag, name in flags.items() for word in (flag, str(files[name]))]
    assert main(["convert", str(files["model"]), str(tmp_path / "folder"), "-q", *words]) == 0
    assert_same_files(tmp_path / "folder", folder)


def test_sizes_of_the_released_files() -> None:
    """Names and shapes of all arrays of both layouts, the configs that shapes tell, and the published counts."""
    with torch.device("meta"):
        transformer, vae = diffusers.Krea2Transformer2DModel(), diffusers.AutoencoderKLQwenImage()
    for theirs, names, convert, total in (
        (transformer, Names(NAMES), convert_krea2_transformer_checkpoint_to_diffusers, 430),
        (vae, Names(wan_vae_rules(PLACES)), convert_wan_vae_to_diffusers, 194),
    ):
        state = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
        empty = [ArrayToSave(name, shape, np.dtype("float32"), lambda: np.zeros(0)) for name, shape in state.items()]
        released = {array.name: torch.empty(array.shape, device="meta") for array in names.to_external(empty)}
        assert len(released) == total
        assert {name: tuple(tensor.shape) for name, tensor in convert(dict(released)).items()} == state
    shapes = shapes_of(krea2_spec(Krea2Config()))
    layout = KREA2.single_file
    assert layout is not None
    assert Krea2Config.from_dict(layout.config(shapes)) == Krea2Config()
    found = language_model_config(shapes_of(decoder_lm_spec(QWEN3_VL_4B, 36)))
    config = {"text_config": {**layout.configs["text_encoder"]["text_config"], **found}}
    assert DecoderConfig.from_dict(config) == QWEN3_VL_4B
    sizes = {name: count(spec) / 1e9 for name, spec in PRESETS["krea-2"].specs().items()}
    assert sizes == pytest.approx({"transformer": 12.820, "text_encoder": 3.922, "vae": 0.0446}, abs=5e-4)
