"""The transformer families in the files that people download, and saved again, beside the folder that diffusers wrote.

A test goes over the models of ``families.RECORDS`` that it is for; what one family alone has follows.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from diffusers.loaders.single_file_utils import (
    convert_chroma_transformer_checkpoint_to_diffusers,
    convert_cosmos_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_wan_vae_to_diffusers,
)

import canvax
from canvax.adapters import change
from canvax.call import Call
from canvax.cli import main
from canvax.cli.arguments import build_parser
from canvax.cli.loading import load_with
from canvax.families.anima import ANIMA, QWEN3_06B
from canvax.families.convert import convert
from canvax.families.flux import CHROMA, FLUX
from canvax.families.flux2 import FLUX2
from canvax.families.flux3 import FLUX3
from canvax.families.flux3 import NAMES as FLUX3_NAMES
from canvax.families.known import PRESETS
from canvax.families.krea2 import KREA2
from canvax.families.krea2 import NAMES as KREA2_NAMES
from canvax.families.language import QWEN3_VL_4B
from canvax.families.local_models import local_models
from canvax.families.qwen_image import QWEN3_VL_8B, QWEN_IMAGE
from canvax.families.qwen_image_1 import QWEN25_VL_7B, QWEN_IMAGE_1
from canvax.families.z_image import Z_IMAGE
from canvax.models.anima import AdapterConfig, CosmosConfig
from canvax.models.clip import clip_encoders
from canvax.models.configs import ClipTextConfig
from canvax.models.decoder_lm import DecoderConfig, decoder_lm_spec
from canvax.models.flux2 import Flux2Config, flux2_spec
from canvax.models.flux2_vae import Flux2VaeConfig, flux2_vae_spec
from canvax.models.flux3 import Flux3Config, flux3_spec
from canvax.models.krea2 import Krea2Config, krea2_spec
from canvax.models.qwen_image import QwenImageConfig, qwen_image_spec
from canvax.models.qwen_image_1 import QwenImage1Config
from canvax.models.qwen_vae import QwenVaeConfig, qwen_vae_spec
from canvax.models.qwen_vision import VisionConfig, vision_tower_spec
from canvax.models.t5 import T5Config, t5_spec
from canvax.models.z_image import ZImageConfig, z_image_spec
from canvax.params import count, flatten
from canvax.pipelines.generate import sampler_table
from canvax.pipelines.request import make_request
from canvax.planning.plan import architecture
from canvax.weights.data_folder import find_named, using
from canvax.weights.entries import Entry
from canvax.weights.formats import whole_name
from canvax.weights.identify import T5
from canvax.weights.language_model import language_model_config, t5_config, vision_config
from canvax.weights.lora import read_adapter
from canvax.weights.overrides import Overrides
from canvax.weights.rules import Names
from canvax.weights.safetensors import ArrayToSave
from canvax.weights.single_file import vae_config
from canvax.weights.wan_vae import of_one_frame, wan_vae_config, wan_vae_rules
from tests.support.comfy_files import KINDS, mark, matrix

from .families import (
    QUIET,
    WAN_PLACES,
    Arrays,
    Files,
    arrays_of,
    assert_same,
    flux2_factors,
    load,
    one_family,
    qwen_vae_original,
    write,
    write_factors,
)

PARTS = ("transformer", "text_encoder", "vae")
FLAGS = {"model": "--model", "text_encoder": "--text-encoder", "vae": "--vae"}
ALL = ["z-image", "flux2", "flux3", "krea2-turbo", "qwen", "qwen-1", "flux-dev", "chroma", "anima"]
SIZE = ["-W", "32", "-H", "32", "--dtype", "float32", "--mesh", "data=1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    return one_family(lambda name: Files(name, tmp_path_factory.mktemp("files")))


@pytest.fixture
def files(request: pytest.FixtureRequest, made: Callable[[str], Files]) -> Files:
    return made(request.param)


def over(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("files", names or ALL, indirect=True)


def draw(pipe: canvax.Pipeline) -> np.ndarray:
    return pipe("a fox", seed=1, num_inference_steps=2, height=32, width=32, options=QUIET).pixels


def same_model(pipe: canvax.Pipeline, wanted: canvax.Pipeline) -> None:
    """Weights, configs and the schedule of an image are those, bit for bit."""
    assert pipe.model.networks == wanted.model.networks
    call = Call("a fox", height=64, width=64, num_inference_steps=4)
    tables = [sampler_table(one.model, make_request(one.model, call)) for one in (pipe, wanted)]
    np.testing.assert_array_equal(tables[0].timestep, tables[1].timestep)
    assert_same(pipe.params, wanted.params)


@over()
def test_single_files(files: Files) -> None:
    pipe = files.load()
    same_model(pipe, files.wanted)
    assert pipe.model.defaults == files.wanted.model.defaults
    assert pipe.model.overrides.keys() == files.files.keys() - {"model"}


@pytest.mark.parametrize(("files", "stem", "stray", "steps", "shift"), [
    ("z-image", "z-base", "norm_final.weight", 50, None),
    ("flux2", "FLUX-2-klein-Base-4b", "", 50, None),
    ("flux3", "mine", "repa_projectors.0.weight", 16, 6.93),
    ("krea2-turbo", "Krea2_RAW_bf16", "", 28, None),
    ("qwen", "mine", "", 40, None),
    ("qwen-1", "mine", "", 50, None),
    ("anima", "mine", "pos_embedder.seq", 30, 3.0),
], indirect=["files"])  # fmt: skip
def test_files_of_comfyui(files: Files, tmp_path: Path, stem: str, stray: str, steps: int, shift: float | None) -> None:
    """Behind a prefix, with other names of norms and heads for training; the base model is known by its file's name."""
    named = {name.replace("norm.scale", "norm.weight") if files.name == "flux2" else name: array
             for name, array in files.arrays().items()}  # fmt: skip
    named |= {stray: np.ones((64,) if files.name == "z-image" else (2, 2), np.float32)} if stray else {}
    prefix = "net" if files.name == "anima" else "model.diffusion_model"
    model = write(tmp_path / f"{stem}.safetensors", {f"{prefix}.{name}": named[name] for name in named})
    pipe = files.load(model, vae=files.folder, text_encoder=files.folder)
    assert_same(pipe.params, files.wanted.params)
    assert pipe.model.defaults.num_inference_steps == steps
    assert shift is None or pipe.model.scheduler.schedule.shift == shift
    assert files.name != "krea2-turbo" or pipe.model.scheduler.schedule.size_shift == "exponential"
    assert files.name != "flux2" or not pipe.model.networks.denoiser.facts.distilled


@pytest.mark.parametrize(("files", "texts", "small"), [
    ("flux-dev", {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"}, True),
    ("flux-dev", {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"}, False),
    ("chroma", {"text_encoder": "t5xxl"}, False),
    ("z-image", {"text_encoder": "qwen3_4b"}, False),
], indirect=["files"])  # fmt: skip
def test_checkpoints_of_comfyui(
    files: Files, texts: dict[str, str], small: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts in one file, the transformer and T5 in 8 bits; another autoencoder may be named."""
    prefixes = {"model": "model.diffusion_model", "vae": "vae"}
    prefixes |= {part: f"text_encoders.{name}.transformer" for part, name in texts.items()}
    plain = {f"{prefix}.{name}": array for part, prefix in prefixes.items()
             for name, array in files.arrays(part).items()}  # fmt: skip
    stored, numbers = dict(plain), dict(plain)
    for name, array in plain.items():
        if small and array.ndim == 2 and not name.startswith(("vae.", "text_encoders.clip_l.")):
            stored[name] = array.astype(ml_dtypes.float8_e4m3fn)
            numbers[name] = stored[name].astype(np.float32)
    noise = {f"text_encoders.{name}.logit_scale": np.ones((), np.float32) for name in texts.values()}
    path = write(tmp_path / "z-turbo.safetensors", stored | noise)
    given: dict[str, Any] = {"tokenizer": files.files["tokenizer"]}
    pipe = load(path, **given)
    wanted = files.wanted
    if small:
        parts = {part: write(tmp_path / f"{part}.safetensors", {
            name.removeprefix(f"{prefix}."): array for name, array in numbers.items() if name.startswith(f"{prefix}.")
        }) for part, prefix in prefixes.items()}  # fmt: skip
        wanted = load(parts.pop("model"), **parts, **given)
    same_model(pipe, wanted)
    same_model(load(path, vae=files.files["vae"], **given), wanted)
    without = {name: array for name, array in stored.items() if not name.startswith("vae.")}
    with pytest.raises(canvax.InputError) as caught:
        load(write(tmp_path / "without.safetensors", without), **given)
    assert caught.value.argument == "model"
    assert pipe.model.reasons["vae"] == "in the same file"
    assert main(["info", str(path)]) == 0
    assert f"{path}: a model" in capsys.readouterr().out


def test_a_base_model_by_its_arrays(made: Callable[[str], Files], tmp_path: Path) -> None:
    """FLUX.3's distilled model reads the time that it goes to."""
    files = made("flux3")
    base = {name: array for name, array in files.arrays().items() if not name.startswith("ref_time_in.")}
    pipe = files.load(write(tmp_path / "base.safetensors", base))
    assert (pipe.model.defaults.num_inference_steps, pipe.model.networks.denoiser.facts.distilled) == (50, False)


@over()
def test_diffusers_knows_the_names(files: Files) -> None:
    """Of the transformer's file, and of Krea 2's autoencoder."""
    wanted = arrays_of(files.folder, "transformer")
    if files.name == "krea2-turbo":
        named = {name: torch.from_numpy(array) for name, array in files.arrays().items()}
        assert convert_krea2_transformer_checkpoint_to_diffusers(named).keys() == wanted.keys()
        assert convert_wan_vae_to_diffusers(files.arrays("vae")).keys() == arrays_of(files.folder, "vae").keys()
        return
    if files.name == "anima":
        found = {f"net.{name}": array for name, array in files.arrays().items() if not name.startswith("llm_adapter.")}
        assert convert_cosmos_transformer_checkpoint_to_diffusers(found).keys() == wanted.keys()
        return
    if files.record.title in ("FLUX.1", "Chroma"):  # whose conversion is of the released sizes: test_sizes_of_flux
        return
    kinds = {"z-image": "ZImage", "flux2": "Flux2", "flux3": "Flux3", "qwen": "QwenImage21",
             "qwen-1": "QwenImage"}  # fmt: skip
    kind = getattr(diffusers, f"{kinds[files.name]}Transformer2DModel")
    theirs = kind.from_single_file(str(files.files["model"]), config=str(files.folder / "transformer")).state_dict()
    for name, array in wanted.items():
        np.testing.assert_array_equal(theirs[name].numpy(), array)


BASE = {"scheduler": {"shift": 6.0}}


@pytest.mark.parametrize(("files", "stem", "given", "steps", "guessed"), [
    ("z-image", "turbo", {}, 8, False), ("z-image", "base", {}, 50, False), ("z-image", "mine", {}, 8, True),
    ("z-image", "mine", BASE, 50, False), ("z-image", "z_image_turbo_bf16", BASE, 50, False),
    ("qwen", "mine", {}, 40, False), ("qwen", "qwen_image_2.1_turbo", {}, 8, True),
    ("flux2", "my-klein", {}, 4, False), ("flux2", "mine-base", {}, 50, False), ("flux2", "mine", {}, 4, True),
    ("anima", "mine", {}, 30, False), ("anima", "anima-turbo-v1.0", {}, 10, False),
], indirect=["files"])  # fmt: skip
def test_the_name_of_a_file_tells_what_its_arrays_do_not(
    files: Files, tmp_path: Path, stem: str, given: dict[str, Any], steps: int, guessed: bool
) -> None:
    """Where neither it nor the caller does, the model is taken for the distilled one, with a warning."""
    model = shutil.copy(files.files["model"], tmp_path / f"{stem}.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = files.load(model, **given)
    assert [one.category for one in caught] == [canvax.HintWarning] * guessed
    assert pipe.model.defaults.num_inference_steps == steps
    assert pipe.model.networks.denoiser.facts.distilled == (steps == 4)


@over()
def test_parts_that_are_folders(files: Files) -> None:
    """A part may be a folder as well; the tokenizer beside a text encoder need not be named."""
    folder = files.folder
    second = {"text_encoder_2": folder} if "text_encoder_2" in files.parts else {}
    for given in (
        {"text_encoder": folder / "text_encoder", "vae": folder, "tokenizer": folder / files.record.words},
        {"text_encoder": folder, "tokenizer": None, **second},
    ):
        same_model(files.load(**given), files.wanted)
    same_model(load(folder, text_encoder=files.files["text_encoder"]), files.wanted)


@pytest.mark.parametrize(("files", "kind"), [
    ("z-image", "Q8_0"), ("flux2", "Q5_1"), ("flux3", "Q4_0"), ("krea2-turbo", "Q4_0"),
    ("qwen", "Q8_0"), ("qwen-1", "Q8_0"), ("chroma", "Q8_0"), ("flux-dev", "Q5_0"), ("anima", "Q8_0"),
], indirect=["files"])  # fmt: skip
def test_gguf(
    files: Files, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are the numbers in the files, in 8 bits too; commands find them in a folder of models."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import both

    part = files.parts[-1] if files.name == "flux-dev" else "text_encoder"  # CLIP's are not read
    small, plain = both(files.files, arrays_of(files.folder, part), tmp_path, kind, part)
    for quantize in (None, "int8") if files.name == "flux2" else (None,):
        one, other = (files.load(**found, quantize=quantize) for found in (small, plain))
        same_model(one, other)
    if files.name != "z-image":
        return
    monkeypatch.setenv("CANVAX_DATA_DIR", str(tmp_path))
    words = ["a fox", "-m", small["model"].name, "--text-encoder", small["text_encoder"].name, *SIZE]
    words += ["--vae", str(small["vae"]), "--tokenizer", str(small["tokenizer"]), "--steps", "1"]
    assert main(["generate", *words, "-q", "-o", str(tmp_path / "a.png")]) == 0
    for part in ("model", "text_encoder"):
        capsys.readouterr()
        assert main(["info", str(small[part]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["flag"], "Q8_0" in report["stored"]) == (FLAGS[part], True)
    for wrong in ({**small, "model": small["text_encoder"]}, {"text_encoder": small["model"]}):
        with pytest.raises(canvax.CheckpointError):
            files.load(**wrong)


@over()
def test_a_transformer_alone(files: Files) -> None:
    """One error names all that is missing, and of the parts that are given none."""
    encoders = tuple(part for part in files.parts if part.startswith("text_encoder"))
    for given, left in (({}, (*encoders, "vae")), ({"vae": files.files["vae"]}, encoders)):
        with pytest.raises(canvax.InputError) as caught:
            load(files.files["model"], **given)
        assert caught.value.argument == "model"
        names = [name for name in files.parts if name != "transformer"]
        assert [f"{{{name}=" in caught.value.cure for name in names] == [name in left for name in names]


@over()
def test_files_that_do_not_fit(files: Files, tmp_path: Path) -> None:
    """A part of another kind, a stray array, a missing one, one of a wrong size: all before anything is read."""
    paths, named, layer = files.files, files.arrays(), files.record.layer
    for wrong in ({"text_encoder": paths["vae"]}, {"vae": paths["text_encoder"]}, {"text_encoder": paths["model"]}):
        with pytest.raises(canvax.CheckpointError):
            files.load(**wrong)
    changed = {
        "stray": {**named, layer.replace("weight", "wx.weight"): np.ones(2, np.float32)},
        "missing": {name: array for name, array in named.items() if name != layer},
        "ragged": {**named, layer: np.concatenate([named[layer], named[layer][:1]])},
    }
    if files.name == "flux2":  # FLUX.2 dev
        changed["dev"] = {**named, "guidance_in.in_layer.weight": named["time_in.in_layer.weight"]}
    for name, found in changed.items():
        with pytest.raises(canvax.CheckpointError):
            files.load(write(tmp_path / f"{name}.safetensors", found))
    lacks = {"flux2": "bn.", "krea2-turbo": "conv2", "anima": "conv2", "qwen": "conv2", "qwen-1": "conv2"}.get(
        files.name, "decoder.conv_in"
    )
    vae = {name: array for name, array in files.arrays("vae").items() if lacks not in name}
    with pytest.raises(canvax.CheckpointError):
        files.load(vae=write(tmp_path / "vae.safetensors", vae))
    if files.record.title not in ("FLUX.1", "Chroma"):  # T5 has the vocabulary of the released one here
        with pytest.raises(canvax.CheckpointError):  # that of the package has more words than this text encoder
            files.load(tokenizer=None)
    with pytest.raises(canvax.InputError) as caught:
        canvax.load("emoji", text_encoder=paths["text_encoder"])
    assert caught.value.argument == "text_encoder"


@over()
def test_info(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is recognised, with the flag that takes it; so is the folder."""
    for name, flag in FLAGS.items():
        assert main(["info", str(files.files[name]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["flag"] == (T5.flag if (files.name, name) == ("chroma", "text_encoder") else flag)
        assert name != "model" or report["family"] == files.record.title
    assert main(["info", str(files.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["defaults"]["num_inference_steps"] == files.record.steps[0]


def same_files(saved: Path, files: Files, *, eyes: bool = True) -> None:
    """diffusers loads the same arrays, those that canvax does not read included.

    ``eyes``: the config of a text encoder that sees is that of the checkpoint, not that of the released models.
    """
    for part in files.parts:
        one, other = (
            {whole_name(re.sub(r"^(model|text_model)\.", "", name)) if part == "text_encoder" else name: array
             for name, array in arrays_of(path, part).items()} for path in (saved, files.folder)
        )  # fmt: skip
        assert one.keys() == other.keys(), part
        assert all(np.array_equal(one[name], other[name]) for name in one), part
    parts, original = files.parts if eyes else ("transformer", "vae"), files.record.open(files.folder)
    if files.name in ("flux3", "anima"):
        theirs, kind = diffusers.ModularPipeline.from_pretrained(str(saved)), type(original).__name__
        assert type(theirs).__name__ == kind
        assert type(theirs.blocks).__name__ == kind.replace("ModularPipeline", "AutoBlocks")
        theirs.load_components(names=[*parts])
    else:
        none: dict[str, Any] = {} if eyes else {"text_encoder": None}
        none |= {"processor": original.processor} if files.name == "qwen" else {}
        theirs = type(original).from_pretrained(saved, **none)
        assert theirs.config.get("is_distilled") == original.config.get("is_distilled")
    for part in parts:
        one, other = (getattr(pipe, part).state_dict() for pipe in (theirs, original))
        assert one.keys() == other.keys(), part
        assert all(torch.equal(one[name], other[name]) for name in one), part


def saved(files: Files, folder: Path) -> Path:
    """A saved folder, in which something was before."""
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    (files.wanted if files.sees else files.load()).save(folder, overwrite=True)
    return folder


@over()
def test_saved(files: Files, tmp_path: Path) -> None:
    """A saved folder is the same model in diffusers."""
    same_files(saved(files, tmp_path / "saved"), files)


@over()
def test_saved_and_loaded(files: Files, tmp_path: Path) -> None:
    """A saved folder is the same model in canvax; so is one that is saved of that."""
    first, again = saved(files, tmp_path / "saved"), tmp_path / "again"
    pipe = load(first)
    same_model(pipe, files.wanted)
    pipe.save(again)
    same_files(again, files)
    indices = [{path.name: path.read_text() for path in folder.glob("*.json")} for folder in (first, again)]
    assert files.name != "flux3" or indices[0] == indices[1]


@over()
def test_converted(files: Files, tmp_path: Path) -> None:
    """Files become a folder bit for bit, without a device, which is a model of a folder of models."""
    folder = tmp_path / "folder"
    assert main(["convert", str(files.files["model"]), str(folder), "-q", *files.flags()]) == 0
    same_files(folder, files, eyes=not files.sees)
    with using(str(tmp_path)):
        assert local_models().models == {"folder": folder}
        assert find_named("folder", "model") == folder
    with pytest.raises(canvax.InputError) as caught:  # a model of several files cannot become one
        convert(folder, tmp_path / "one.safetensors")
    assert caught.value.argument == "output"


def quantised(found: Arrays, kind: str) -> tuple[Arrays, Arrays]:
    """Large weights as ComfyUI has them, in a kind of ``comfy_files.KINDS``; and the numbers that these are."""
    small, plain = Arrays(), dict(found)
    for name, array in found.items():
        if array.ndim != 2 or min(array.shape) < 32 or array.shape[1] % 16:
            small[name] = array
            continue
        stored, plain[name] = matrix(name.removesuffix("weight"), array, kind, group=16)
        small |= stored
    small["blocks.0.attn.comfy_attention.config"] = mark(attention="comfy_kitchen_int8")
    if kind == "scale_weight":
        small["scaled_fp8"] = np.zeros(0, ml_dtypes.float8_e4m3fn)
    return small, plain


@pytest.mark.parametrize("kind", KINDS)
@over()
def test_quantised_files(files: Files, tmp_path: Path, kind: str) -> None:
    """Weights are the numbers times their scales, rotated back, in layers that are stacked along either axis too."""
    pipes, parts = [], [name for name in files.files if name not in ("vae", "tokenizer")]
    both = {part: quantised(files.arrays(part), kind) for part in parts}
    assert sum(array.dtype.itemsize == 1 and array.ndim == 2 for array in both["model"][0].values()) > 5
    for i in range(2):
        paths = {part: write(tmp_path / str(i) / f"{part}.safetensors", found[i]) for part, found in both.items()}
        pipes.append(files.load(paths.pop("model"), **paths))
    assert_same(pipes[0].params, pipes[1].params)
    if kind == "int8 convrot":
        (rows, columns), before = files.arrays()[files.record.layer].shape, pipes[0].params
        factors = {files.record.layer.removesuffix(".weight"): (np.ones((rows, 2)), np.ones((2, columns)))}
        lora = write_factors(tmp_path / "style.safetensors", "comfy", factors)
        for pipe in pipes:
            pipe.adapters.load("style", lora)
        assert_same(pipes[0].params, pipes[1].params)
        with pytest.raises(AssertionError):
            assert_same(pipes[0].params, before)


@over("chroma")
def test_files_of_t5(files: Files, tmp_path: Path) -> None:
    """With both names of the embedding or the other alone, and with a decoder; the tokenizer is in the package."""
    text = files.arrays("text_encoder")
    embedding = text.pop("shared.weight")
    for i, more in enumerate(({}, {"shared.weight": embedding, "decoder.block.0.wx.weight": np.ones(2, np.float32)})):
        path = write(tmp_path / f"{i}.safetensors", text | {"encoder.embed_tokens.weight": embedding} | more)
        pipe = files.load(text_encoder=path, tokenizer=None)
        same_model(pipe, files.wanted)
        assert pipe.tokenizer.ids("a fox") == files.wanted.tokenizer.ids("a fox")


@over("flux-dev")
def test_other_files_of_flux(files: Files, tmp_path: Path) -> None:
    """Kontext is known by the name of its file, schnell and Fill by their arrays; CLIP has a name for its parts."""
    clip = {f"text_model.{name}": array for name, array in files.arrays("text_encoder").items()}
    text = write(tmp_path / "clip_l.safetensors", clip | {"logit_scale": np.ones((), np.float32)})
    kontext = files.load(
        shutil.copy(files.files["model"], tmp_path / "flux1-dev-Kontext_fp8.safetensors"), text_encoder=text
    )
    assert_same(kontext.params, files.wanted.params)
    assert (kontext.model.networks.denoiser.facts.edits, kontext.model.defaults.guidance_scale) == (True, 2.5)
    found = files.arrays()
    schnell = {name: array for name, array in found.items() if not name.startswith("guidance_in.")}
    pipe = files.load(write(tmp_path / "mine.safetensors", schnell))
    assert (pipe.model.defaults.num_inference_steps, pipe.model.text.rows((77, 256))) == (4, 256)
    assert not pipe.model.scheduler.schedule.size_shift
    wide = np.zeros((found["img_in.weight"].shape[0], 288), np.float32)
    fill = files.load(write(tmp_path / "fill.safetensors", found | {"img_in.weight": wide}))
    assert (fill.model.networks.inpaints, fill.model.defaults.guidance_scale) == (True, 30.0)
    with pytest.raises(canvax.CheckpointError):  # a model of depths
        files.load(write(tmp_path / "depth.safetensors", found | {"img_in.weight": wide[:, :32]}))


# Of FLUX.2: commands, and offloading.


@over("flux2")
def test_commands_that_take_the_parts(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """They know the model by its files: ``info`` and ``plan``, ``compile`` and ``serve``, which has them for one."""
    model, wanted = files.files["model"], files.wanted.model
    assert main(["info", str(model), *files.flags(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["components"].keys() >= {*PARTS}
    assert report["defaults"]["num_inference_steps"] == 4
    parts = {name: path for name, path in files.files.items() if name != "model"}
    assert architecture(model, Overrides.of(**parts)) == wanted.networks
    words = ["compile", str(model), *files.flags(), "--dtype", "float32", "-q"]
    assert load_with(build_parser().parse_args(words), weights=False).model.networks == wanted.networks
    assert main(["serve", str(model), "emoji", *files.flags(), "--port", "0"]) == 2


@over("flux2")
def test_a_padding_token_with_its_properties(files: Files, tmp_path: Path) -> None:
    """Older releases of transformers write tokens so; without any the checkpoint is refused."""
    words = Path(shutil.copytree(files.folder / "tokenizer", tmp_path / "words"))
    config = json.loads((words / "tokenizer_config.json").read_text())
    for pad in ({"__type": "AddedToken", "content": config["pad_token"], "lstrip": False}, None):
        (words / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": pad}))
        if pad:
            assert load(files.folder, tokenizer=words).tokenizer.pad == files.wanted.tokenizer.pad
        else:
            with pytest.raises(canvax.CheckpointError):
                load(files.folder, tokenizer=words)


def on_devices(pipe: canvax.Pipeline, others: set[int]) -> set[str]:
    """Components a weight of which is on the devices now, ``others`` aside."""
    held = {(array.shape, str(array.dtype)) for array in jax.live_arrays()
            if array.ndim == 2 and array.sharding.memory_kind == "device" and id(array) not in others}  # fmt: skip
    shapes = {
        name: {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
        for name, params in pipe.params.items()
    }
    return {name for name, alone in shapes.items()
            if held & (alone - set().union(*(shapes[other] for other in shapes.keys() - {name})))}  # fmt: skip


@over("flux2", "z-image")
@pytest.mark.slow
def test_offloading(files: Files, tmp_path: Path) -> None:
    """While denoising only the transformer is on the devices, afterwards nothing, and the image is the same."""
    asked: dict[str, Any] = {"seed": 1, "num_inference_steps": 2, "height": 32, "width": 32, "progress": False}
    usual = load(files.folder)
    want, sizes = usual("a fox", **asked).pixels, usual.memory(32, 32)
    kept = jax.live_arrays()
    others = set(map(id, kept))
    assert on_devices(usual, set()) == usual.params.keys()
    pipe, seen = load(files.folder, offload=True), []
    assert on_devices(pipe, others) == set()
    got = pipe("a fox", callback=lambda step: seen.append(on_devices(pipe, others)), **asked)
    np.testing.assert_array_equal(got.pixels, want)
    assert seen == [{"transformer"}] * 2
    gc.collect()
    assert on_devices(pipe, others) == set()
    if files.name == "flux2":
        pipe.adapters.load("style", write_factors(tmp_path / "style.safetensors", "peft", flux2_factors()))
        assert on_devices(pipe, others) == set()
    assert pipe("a hen", **asked).compilations == 0
    assert pipe.memory(32, 32).total == sizes.offloaded < sizes.total
    pipe.save(tmp_path / "saved")
    assert pipe.encode("a fox")["text"].sharding.memory_kind == "device"


@over()
@pytest.mark.slow
def test_streaming(files: Files) -> None:
    """Every large weight passes through ``canvax.nn``, so that each family is the same layer by layer."""
    pipe = load(files.folder, offload="layers")
    np.testing.assert_array_equal(draw(pipe), draw(files.wanted))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(pipe.params["transformer"])}
    assert kinds == {"device", "pinned_host"}


def test_lokr_of_stacked_layers(tmp_path: Path) -> None:
    """Products of which layers are rows or columns, whose ends are not those of blocks, and one with swapped halves."""
    cfg = Flux2Config(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
                      joint_attention_dim=48, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False)  # fmt: skip
    rng, found, wanted = np.random.default_rng(0), {}, {}
    single, double = "transformer.single_transformer_blocks.1.", "transformer.transformer_blocks.0."
    stacks: dict[str, tuple[tuple[int, int], tuple[int, int], int, list[str]]] = {
        "single_blocks.1.linear1": ((18, 4), (16, 8), 0, ["attn.to_q", "attn.to_k", "attn.to_v", "ff.gate", "ff.up"]),
        "single_blocks.1.linear2": ((4, 2), (8, 64), 1, ["attn.to_out.0", "ff.down"]),
        "double_blocks.0.img_attn.qkv": ((4, 4), (24, 8), 0, ["attn.to_q", "attn.to_k", "attn.to_v"]),
        "final_layer.adaLN_modulation.1": ((8, 4), (8, 8), 0, []),
    }
    for name, (one, other, axis, layers) in stacks.items():
        w1, w2 = (rng.standard_normal(shape).astype(np.float32) for shape in (one, other))
        found |= {f"diffusion_model.{name}.lokr_w1": w1, f"diffusion_model.{name}.lokr_w2": w2}
        whole, begin = np.kron(w1, w2), 0
        for layer in layers:
            size = 96 if layer.startswith("ff") else 32
            stem = single if name.startswith("single") else double
            wanted[f"{stem}{layer}"] = whole.take(range(begin, begin + size), axis)
            begin += size
        if not layers:
            wanted["transformer.norm_out.linear"] = np.roll(whole, 32, axis=0)
    adapter = read_adapter(write(tmp_path / "lokr.safetensors", found), {"transformer": flux2_spec(cfg)})
    parts = {".".join(key).removesuffix(".weight"): part for key, part in adapter.parts.items()}
    assert parts.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(change(np.zeros_like(array), parts[name]), array, rtol=1e-6, err_msg=name)


# Of Z-Image: commands that name parts, and folders of models.


@over("z-image")
def test_command_line(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags of the parts, metadata that repeats them, and the missing ones by their flags."""
    monkeypatch.chdir(files.files["model"].parent)
    words = ["generate", "a fox", "-m", "z_image_turbo_bf16.safetensors", *SIZE, "--steps", "1", "-s", "1", "-q"]
    given = ["--text-encoder", "qwen_3_4b.safetensors", "--vae", "ae.safetensors", "--tokenizer", "words"]
    assert main([*words, "--json", *given, "-o", str(tmp_path / "a.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metadata"][0]["tokenizer"] == "words"
    again = ["generate", "--from-image", str(tmp_path / "a.png"), "-o", str(tmp_path / "b.png"), "-q"]
    assert main([*again, "--mesh", "data=1"]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    capsys.readouterr()
    assert main([*words, "--json", "-o", str(tmp_path / "c.png")]) == 2
    assert "--text-encoder" in capsys.readouterr().err


@over("z-image")
def test_files_as_comfyui_has_them(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A transformer in a folder of models is one model with the text encoder and the autoencoder that fit it."""
    text = files.arrays("text_encoder")
    words = text["model.embed_tokens.weight"]
    text["model.embed_tokens.weight"] = np.resize(words, (151936, words.shape[1]))
    models = tmp_path / "ComfyUI" / "models"
    write(models / "diffusion_models" / "z.safetensors", files.arrays())
    write(models / "text_encoders" / "qwen.safetensors", text)
    write(models / "text_encoders" / "a_vl.safetensors", text)  # a model of vision has other weights
    narrow = {name: array[tuple(slice(side // 2) for side in array.shape)] for name, array in text.items()}
    write(models / "text_encoders" / "a_narrow.safetensors", narrow)
    vae = files.arrays("vae")
    write(models / "vae" / "ae.safetensors", vae)
    write(models / "vae" / "a_half.safetensors", {name: array for name, array in vae.items() if "encoder" in name})
    given = {"text_encoder": models / "text_encoders" / "qwen.safetensors", "vae": models / "vae" / "ae.safetensors"}
    wanted = draw(load(models / "diffusion_models" / "z.safetensors", **given))
    beside = load(models / "diffusion_models" / "z.safetensors")  # without a folder of models: those beside it
    np.testing.assert_array_equal(draw(beside), wanted)
    monkeypatch.setenv("CANVAX_DATA_DIR", str(tmp_path / "ComfyUI"))
    assert local_models().models.keys() == {"z"}
    pipe = load("z")
    np.testing.assert_array_equal(draw(pipe), wanted)
    assert pipe.model.overrides == {"text_encoder": "qwen", "vae": "ae"}
    words = ["generate", "a fox", "-m", "z", *SIZE, "--steps", "1", "-s", "1"]
    assert main([*words, "-o", str(tmp_path / "a.png")]) == 0
    assert "text encoder: qwen" in capsys.readouterr().err
    assert main(["generate", "--from-image", str(tmp_path / "a.png"), "-o", str(tmp_path / "b.png"), "-q"]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    (models / "vae" / "ae.safetensors").unlink()
    models_now, left_out = local_models()
    assert (set(models_now), "z.safetensors" in left_out) == (set(), True)
    with pytest.raises(canvax.InputError) as caught:
        load("z")
    assert (caught.value.argument, caught.value.value) == ("model", "z")


@over("z-image")
def test_info_of_a_model(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """A language model reads a prompt at once, and has no layers to leave out; memory is that of each part."""
    assert main(["info", str(files.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"]["tokens"], report["text"]["layers"]) == (512, None)
    assert main(["info", str(files.folder), "--memory", "--json", *SIZE]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["components"].keys() == {*PARTS}
    assert sum(memory["components"].values()) == memory["weights"]
    assert files.wanted.model.text.room((256,)) == 256  # chunks are 128 tokens here, and 75 of CLIP's 77
    assert clip_encoders(ClipTextConfig()).room((154,)) == 150


# Of FLUX.3 and Krea 2: folders.


@over("flux3")
def test_a_component_in_another_repository(files: Files, tmp_path: Path) -> None:
    """One that is read is asked for by its name; the prompt upsampler is left out, with a warning."""
    model = Path(shutil.copytree(files.folder, tmp_path / "model"))
    index = json.loads((model / "modular_model_index.json").read_text())
    elsewhere = {"pretrained_model_name_or_path": "someone/else", "subfolder": "", "revision": None, "variant": None}
    index["prompt_upsampler"] = [None, None, {"type_hint": ["transformers", "Qwen3_5Model"], **elsewhere}]
    (model / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.warns(canvax.HintWarning, match="prompt_upsampler"):
        load(model)
    index["text_encoder"] = [None, None, index["text_encoder"][2] | elsewhere]
    (model / "modular_model_index.json").write_text(json.dumps(index))
    shutil.rmtree(model / "text_encoder")
    with pytest.raises(canvax.CheckpointError, match=r"text_encoder.*someone/else"):
        load(model)


@over("krea2-turbo")
def test_changed_parameters_are_saved(files: Files, tmp_path: Path) -> None:
    """Of a convolution with time only the last slice is ours; diffusers loads it, and eyes are those of before."""
    vae = files.wanted.params["vae"]
    kernel = vae["decoder"]["conv_in"]["weight"]
    decoder = {**vae["decoder"], "conv_in": {**vae["decoder"]["conv_in"], "weight": 2 * kernel}}
    changed = {**files.wanted.params, "vae": {**vae, "decoder": decoder}}
    files.wanted.model.save(tmp_path / "changed", changed)
    theirs = diffusers.Krea2Pipeline.from_pretrained(tmp_path / "changed")
    before = arrays_of(files.folder, "vae")["decoder.conv_in.weight"]
    after = theirs.vae.state_dict()["decoder.conv_in.weight"].numpy()
    np.testing.assert_array_equal(after[:, :, -1], 2 * before[:, :, -1])
    np.testing.assert_array_equal(after[:, :, :-1], before[:, :, :-1])
    text = {name: array.numpy() for name, array in theirs.text_encoder.state_dict().items()}
    assert all(np.array_equal(text[name], array) for name, array in arrays_of(files.folder, "text_encoder").items())


# Sizes of the released files: how many arrays, and the configs that are read off shapes.

Shapes = dict[str, tuple[int, ...]]


def under(names: Names, shapes: Shapes) -> Shapes:
    """Shapes under the names of a file."""
    nothing = np.zeros(0, np.float32)
    empty = [ArrayToSave(name, shape, nothing.dtype, lambda: nothing) for name, shape in shapes.items()]
    return {one.name: one.shape for one in names.to_external(empty)}


def shapes_of(spec: Any) -> Shapes:
    return {name: param.checkpoint_shapes[0] for name, param in flatten(spec)}


def config_of(family: Any, spec: Any) -> Any:
    assert family.single_file is not None
    return family.single_file.config(shapes_of(spec))


def on_no_device(kind: str, **config: Any) -> Shapes:
    with torch.device("meta"):
        state = getattr(diffusers, kind)(**config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_sizes_of_z_image() -> None:
    spec = z_image_spec(ZImageConfig())
    assert len(under(Names(Z_IMAGE.names), shapes_of(spec))) == 453
    assert ZImageConfig.from_dict(config_of(Z_IMAGE, spec)) == ZImageConfig()
    qwen = DecoderConfig(head_dim=128)
    assert Z_IMAGE.single_file is not None
    config = Z_IMAGE.single_file.configs["text_encoder"] | language_model_config(shapes_of(decoder_lm_spec(qwen, 36)))
    assert DecoderConfig.from_dict(config) == qwen


@pytest.mark.parametrize(("layers", "heads", "text", "count"), [((5, 20), 24, 7680, 169), ((8, 24), 32, 12288, 233)])
def test_sizes_of_flux2(layers: tuple[int, int], heads: int, text: int, count: int) -> None:
    """Of klein 4B and 9B."""
    cfg = Flux2Config(num_layers=layers[0], num_single_layers=layers[1], num_attention_heads=heads,
                      joint_attention_dim=text, guidance_embeds=False)  # fmt: skip
    spec = flux2_spec(cfg)
    assert len(under(Names(FLUX2.stacks), shapes_of(spec))) == count
    assert Flux2Config.from_dict(config_of(FLUX2, spec)) == cfg


@pytest.mark.parametrize("cfg", [Flux2VaeConfig(), Flux2VaeConfig(decoder_block_out_channels=(96, 192, 384, 384))])
def test_sizes_of_autoencoders_of_flux2(cfg: Flux2VaeConfig) -> None:
    """The usual one, and the one with a small decoder."""
    assert Flux2VaeConfig.from_dict(vae_config(shapes_of(flux2_vae_spec(cfg)), {})) == cfg


@pytest.mark.parametrize(("flow_map", "count"), [(False, 357), (True, 359)])
def test_sizes_of_flux3(flow_map: bool, count: int) -> None:
    cfg = Flux3Config(flow_map=flow_map)
    shapes = shapes_of(flux3_spec(cfg))
    assert under(Names(FLUX3.stacks), shapes) == on_no_device("Flux3Transformer2DModel", flow_map=flow_map)
    assert len(under(Names(FLUX3_NAMES), shapes)) == count
    assert Flux3Config.from_dict(config_of(FLUX3, flux3_spec(cfg))) == cfg


def test_sizes_of_krea2() -> None:
    """Names and shapes of all arrays of both layouts, and the published counts."""
    for kind, names, back, total in (
        ("Krea2Transformer2DModel", Names(KREA2_NAMES), convert_krea2_transformer_checkpoint_to_diffusers, 430),
        ("AutoencoderKLQwenImage", Names(wan_vae_rules(WAN_PLACES)), convert_wan_vae_to_diffusers, 194),
    ):
        state = on_no_device(kind)
        released = {name: torch.empty(shape, device="meta") for name, shape in under(names, state).items()}
        assert len(released) == total
        assert {name: tuple(tensor.shape) for name, tensor in back(dict(released)).items()} == state
    assert Krea2Config.from_dict(config_of(KREA2, krea2_spec(Krea2Config()))) == Krea2Config()
    assert KREA2.single_file is not None
    found = language_model_config(shapes_of(decoder_lm_spec(QWEN3_VL_4B, 36)))
    config = {"text_config": {**KREA2.single_file.configs["text_encoder"]["text_config"], **found}}
    assert DecoderConfig.from_dict(config) == QWEN3_VL_4B
    sizes = {name: count(spec) / 1e9 for name, spec in PRESETS["krea-2"].specs().items()}
    assert sizes == pytest.approx({"transformer": 12.820, "text_encoder": 3.922, "vae": 0.0446}, abs=5e-4)


def test_sizes_of_flux() -> None:
    """Names and shapes of all arrays of both layouts, and the published counts."""
    for name, kind, back, config in (
        ("flux1-dev", "FluxTransformer2DModel", convert_flux_transformer_checkpoint_to_diffusers,
         {"guidance_embeds": True}),
        ("flux1-schnell", "FluxTransformer2DModel", convert_flux_transformer_checkpoint_to_diffusers, {}),
        ("chroma1", "ChromaTransformer2DModel", convert_chroma_transformer_checkpoint_to_diffusers, {}),
    ):  # fmt: skip
        family = CHROMA if name == "chroma1" else FLUX
        state, denoiser = on_no_device(kind, **config), PRESETS[name].denoiser
        assert under(Names(family.stacks), shapes_of(denoiser.spec)) == state
        without_stacks = [rule for rule in family.names if rule not in family.stacks]
        released = under(Names(without_stacks), shapes_of(denoiser.spec))
        tensors = {name: torch.empty(shape, device="meta") for name, shape in released.items()}
        assert {name: tuple(tensor.shape) for name, tensor in back(tensors).items()} == state
        assert type(denoiser.cfg).from_dict(config_of(family, denoiser.spec)) == denoiser.cfg
    counts = {name: count(PRESETS[name].specs()["transformer"]) for name in ("flux1-dev", "flux1-schnell", "chroma1")}
    assert counts == {"flux1-dev": 11_901_408_320, "flux1-schnell": 11_891_178_560, "chroma1": 8_899_983_424}
    sizes = {name: count(spec) for name, spec in PRESETS["flux1-dev"].specs().items()}
    assert (sizes["text_encoder"], sizes["text_encoder_2"], sizes["vae"]) == (123_060_480, 4_762_310_656, 83_819_683)
    assert T5Config.from_dict(t5_config(shapes_of(t5_spec(T5Config())))) == T5Config()


def test_sizes_of_anima() -> None:
    """Names and shapes of all arrays of both layouts, and the published counts."""
    networks, single = PRESETS["anima"], ANIMA.single_file
    sizes = {"num_attention_heads": 16, "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
    state, specs = on_no_device("CosmosTransformer3DModel", **sizes), networks.specs()
    assert shapes_of(specs["transformer"]) == state
    released = under(Names(ANIMA.names), state)
    tensors = {f"net.{name}": torch.empty(shape, device="meta") for name, shape in released.items()}
    theirs = convert_cosmos_transformer_checkpoint_to_diffusers(tensors)
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == state
    assert CosmosConfig.from_dict(config_of(ANIMA, specs["transformer"])) == CosmosConfig()
    adapter = shapes_of(specs["text_conditioner"])
    assert adapter == on_no_device("AnimaTextConditioner")
    assert single is not None
    assert (len(state), len(adapter)) == (567, 118)
    assert AdapterConfig.from_dict(single.inside["text_conditioner"][1](adapter)) == AdapterConfig()
    found = language_model_config(shapes_of(decoder_lm_spec(QWEN3_06B, 28)))
    assert DecoderConfig.from_dict({**single.configs["text_encoder"], **found}) == QWEN3_06B
    counts = {name: count(spec) for name, spec in specs.items()}
    assert counts == {
        "transformer": 1_956_405_248, "text_conditioner": 134_663_680, "text_encoder": 596_049_920, "vae": 44_599_603,
    }  # fmt: skip


def test_sizes_of_qwen_image_1() -> None:
    """Names and shapes of all arrays, the published counts, and the configs that are read off shapes."""
    networks, single = PRESETS["qwen-image"], QWEN_IMAGE_1.single_file
    state, specs = on_no_device("QwenImageTransformer2DModel"), networks.specs()
    assert (under(Names(QWEN_IMAGE_1.stacks), shapes_of(specs["transformer"])), len(state)) == (state, 1933)
    assert QwenImage1Config.from_dict(config_of(QWEN_IMAGE_1, specs["transformer"])) == QwenImage1Config()
    assert single is not None
    text, config = single.configs["text_encoder"], transformers.Qwen2_5_VLConfig(
        text_config={"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                     "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
    )  # fmt: skip
    with torch.device("meta"):
        theirs = transformers.Qwen2_5_VLForConditionalGeneration(config).model.language_model.state_dict()
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in theirs.items()}
    assert shapes_of(specs["text_encoder"]) == shapes
    found = language_model_config(shapes)
    assert DecoderConfig.from_dict({"text_config": {**text["text_config"], **found}}) == QWEN25_VL_7B
    counts = {name: count(spec) for name, spec in specs.items()}
    assert counts == {"transformer": 20_430_401_088, "text_encoder": 7_070_619_136, "vae": 44_599_603}


def test_sizes_of_qwen_image() -> None:
    """Names and shapes of all arrays, of which the autoencoder's over time are not read, and what is read off them."""
    spec, single = qwen_image_spec(QwenImageConfig()), QWEN_IMAGE.single_file
    assert shapes_of(spec) == on_no_device("QwenImage21Transformer2DModel")
    assert QwenImageConfig.from_dict(config_of(QWEN_IMAGE, spec)) == QwenImageConfig()
    stored = on_no_device("AutoencoderKLQwenImage21")
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in stored.items()}
    for layout in (arrays, qwen_vae_original(arrays)):
        empty = [Entry(name, array.shape, np.dtype(np.float32), Path(), (), "torch") for name, array in layout.items()]
        assert {entry.name: entry.shape for entry in of_one_frame(empty)} == shapes_of(qwen_vae_spec(QwenVaeConfig()))
        assert QwenVaeConfig.from_dict(wan_vae_config(empty)) == QwenVaeConfig()
    assert single is not None
    found = language_model_config(shapes_of(decoder_lm_spec(QWEN3_VL_8B, 36)))
    config = single.configs["text_encoder"]
    assert DecoderConfig.from_dict({"text_config": {**config["text_config"], **found}}) == QWEN3_VL_8B
    eyes = vision_tower_spec(VisionConfig())
    with torch.device("meta"):
        theirs = transformers.Qwen3VLConfig(**config).vision_config
        tower = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel(theirs).state_dict()
    assert shapes_of(eyes) == {name: tuple(tensor.shape) for name, tensor in tower.items()}
    seen = vision_config({f"visual.{name}": shape for name, shape in shapes_of(eyes).items()})
    assert VisionConfig.from_dict(config | {"vision_config": config["vision_config"] | seen}) == VisionConfig()
    sizes = {name: count(spec) / 1e9 for name, spec in PRESETS["qwen-image-2.1"].specs().items()}
    assert sizes == pytest.approx({"transformer": 7.12, "text_encoder": 8.767 - 0.622, "vae": 0.331}, abs=5e-3)
