"""Whole models in one file, beside the same in the diffusers layout, and as diffusers itself reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import canvax
from canvax.cli import main
from canvax.families.known import PRESETS
from canvax.families.read import read_model, read_networks
from canvax.models.clip import clip_configs
from canvax.params import flatten
from canvax.weights.entries import Entry
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.single_file import REFINER, SD1, SD2, UNET, VAE, XL, Layout, single_files
from tests.support.drawing import one_device
from tests.support.ldm_files import hf, ldm_unet, ldm_vae, open_clip

pytestmark = pytest.mark.slow

QUIET = canvax.Options(progress=False)
KINDS = ("sd1", "sd2", "xl", "refiner")
Made = Callable[[str], tuple[Path, Path]]


def load(path: Path) -> canvax.Pipeline:
    return canvax.load(path, mesh=one_device(), dtype="float32", progress=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*a guess:UserWarning")
def test_every_array_is_that_of_the_folder(kind: str, made: Made) -> None:
    folder, file = made(kind)
    want, got = (dict(flatten(load(path).params)) for path in (folder, file))
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("kind", ["sd1", "xl"])
def test_diffusers_reads_the_same_from_the_file(kind: str, made: Made) -> None:
    """The file is one that others take for what canvax takes it for."""
    folder, file = made(kind)
    cls = {"sd1": diffusers.StableDiffusionPipeline, "xl": diffusers.StableDiffusionXLPipeline}[kind]
    theirs = cls.from_single_file(str(file), config=str(folder), local_files_only=True)
    for name in ("unet", "vae", "text_encoder"):
        ours = dict(flatten(load(file).params[name]))
        state = getattr(theirs, name).state_dict()
        assert len(ours) == len([key for key in state if not key.endswith("position_ids")]), name
    ours = np.asarray(dict(flatten(load(file).params))["unet.conv_in.weight"])
    np.testing.assert_array_equal(ours, theirs.unet.conv_in.weight.detach().numpy().transpose(2, 3, 1, 0))


@pytest.mark.parametrize("kind", ["sd1", "sd2", "xl"])
@pytest.mark.filterwarnings("ignore:.*a guess:UserWarning")
def test_same_image(kind: str, made: Made) -> None:
    """Sizes, heads, activations, schedule and tokenizer are read off the file."""
    settings = {"num_inference_steps": 3, "seed": 1, "guidance_scale": 4.0, "height": 64, "width": 64}
    want, got = (load(path)("a cat on a mat", **settings, options=QUIET).pixels for path in made(kind))
    np.testing.assert_array_equal(got, want)


def test_same_image_as_diffusers(made: Made) -> None:
    folder, file = made("sd1")
    theirs = diffusers.StableDiffusionPipeline.from_single_file(str(file), config=str(folder), local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    latents = np.random.default_rng(1).standard_normal((1, 8, 8, 4)).astype(np.float32)
    settings = {"num_inference_steps": 4, "guidance_scale": 4.0, "height": 64, "width": 64}
    want = theirs("a cat", latents=torch.from_numpy(latents.transpose(0, 3, 1, 2).copy()), **settings, output_type="np")
    got = load(file)("a cat", latents=latents, **settings, options=QUIET).pixels
    assert 10 * np.log10(1 / np.mean((got - want.images) ** 2)) >= 60


def test_saved_as_a_folder(made: Made, tmp_path: Path) -> None:
    """What ``pipe.save`` writes is what diffusers loads."""
    folder, file = made("sd1")
    load(file).save(tmp_path / "folder")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == sorted(
        path.name for path in folder.iterdir()
    )
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "folder")
    assert type(theirs.scheduler).__name__ == "PNDMScheduler"
    ids = theirs.tokenizer(["a photo of a cat"]).input_ids[0]
    assert ids == [49406, 320, 1125, 539, 320, 2368, 49407]


@pytest.mark.filterwarnings("ignore:.*a guess:UserWarning")
def test_openclip_is_filled_up_with_exclamation_marks(made: Made, tmp_path: Path) -> None:
    pipe = load(made("sd2")[1])
    assert (pipe.tokenizer.pad, load(made("sd1")[1]).tokenizer.pad) == (0, 49407)
    pipe.save(tmp_path / "folder")
    assert load(tmp_path / "folder").tokenizer.pad == 0


@pytest.mark.parametrize(
    ("preset", "kind"),
    [("sd15", SD1), ("sd21", SD2), ("sdxl", XL), ("sdxl-refiner", REFINER)],
    ids=["sd15", "sd21", "sdxl", "refiner"],
)
def test_sizes_of_the_released_models(preset: str, kind: Layout) -> None:
    """Their files are not here; of diffusers' models of their sizes only names and shapes are made."""
    networks = PRESETS[preset]
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(dataclasses.asdict(networks.denoiser.cfg))
        vae = diffusers.AutoencoderKL.from_config(dataclasses.asdict(networks.vae))
    arrays = {f"{UNET}{name}": array for name, array in ldm_unet(unet.state_dict()).items()}
    arrays |= {f"{VAE}{name}": array for name, array in ldm_vae(vae.state_dict()).items()}
    for name, start in kind.encoders.items():
        cls = {"text_encoder_2": CLIPTextModelWithProjection}.get(name, CLIPTextModel)
        with torch.device("meta"):
            encoder = cls(CLIPTextConfig(**dataclasses.asdict(clip_configs(networks.text)[name])))
        ways = {True: lambda state: open_clip(state, extra=kind is SD2), False: hf}
        arrays |= {start + key: array for key, array in ways[name in kind.open_clip](encoder.state_dict()).items()}
    entries = [
        Entry(name, tuple(array.shape), np.dtype(np.float16), Path("x"), ((0, 2 * array.numel()),), "torch")
        for name, array in arrays.items()
    ]
    prediction = "v_prediction" if preset == "sd21" else "epsilon"
    files = single_files("x", Path("x"), kind, entries, (prediction, ""), zero_snr=False)
    found = read_networks(files)
    assert found.denoiser.cfg == networks.denoiser.cfg
    assert found.vae == networks.vae
    parts = clip_configs(networks.text)
    if "text_encoder" in parts:  # it projects nothing
        parts["text_encoder"] = dataclasses.replace(parts["text_encoder"], projection_dim=512)
    assert clip_configs(found.text) == parts
    assert {entry.name for entry in files.entries("unet")} == set(unet.state_dict())
    assert {entry.name for entry in files.entries("vae")} == set(vae.state_dict())


def test_what_it_predicts(made: Made, tmp_path: Path) -> None:
    arrays = load_file(made("sd2")[1])
    path = tmp_path / "x.safetensors"

    def prediction(metadata: dict[str, str] | None = None, **more: Any) -> str:
        save_file({**arrays, **more}, path, metadata=metadata)
        return load(path).model.scheduler.schedule.prediction_type

    assert prediction() == "epsilon"
    assert prediction({"modelspec.prediction_type": "v"}) == "v_prediction"
    assert prediction({"modelspec.prediction_type": "v_prediction"}) == "v_prediction"
    with pytest.warns(UserWarning, match=r"modelspec\.prediction_type='velocity', which canvax does not know"):
        assert prediction({"modelspec.prediction_type": "velocity"}) == "epsilon"
    assert prediction(v_pred=torch.zeros(())) == "v_prediction"


@pytest.mark.parametrize(("spread", "predicts"), [(0.04, "epsilon"), (0.14, "v_prediction")])
def test_what_a_released_2_x_predicts(spread: float, predicts: str, made: Made, tmp_path: Path) -> None:
    """Released files say so by the spread of this bias alone: 0.04 in the base models, 0.14 in the others."""
    arrays = load_file(made("sd2")[1])
    bias = spread * torch.tensor([-1.0, 1.0]).repeat(160)
    arrays[f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"] = bias
    save_file(arrays, tmp_path / "model.safetensors")
    files = open_files(Location(tmp_path / "model.safetensors"))
    with pytest.warns(UserWarning, match=predicts):
        read_model(files, "float32")
    assert files.config("scheduler")["prediction_type"] == predicts


def test_what_is_no_model_of_these(made: Made, tmp_path: Path) -> None:
    arrays = load_file(made("sd1")[1])
    path = tmp_path / "x.safetensors"

    def fault(changes: dict[str, Any], without: str = "nothing") -> str:
        save_file({name: a for name, a in {**arrays, **changes}.items() if not name.startswith(without)}, path)
        with pytest.raises(canvax.CheckpointError) as caught:
            load(path)
        return str(caught.value)

    assert "lacks an autoencoder" in fault({}, "first_stage_model.")
    assert "lacks a UNet." in fault({}, "model.diffusion_model.")
    assert "lacks a text encoder" in fault({}, "cond_stage_model.")
    assert "no use for: strange.weight" in fault({"strange.weight": torch.zeros(1)})
    assert "1 missing" in fault({}, "model.diffusion_model.middle_block.0.in_layers.0.bias")
    assert "unused" in fault({"model.diffusion_model.middle_block.3.weight": torch.zeros(1)})
    first = "model.diffusion_model.input_blocks.0.0.weight"
    assert "edits images by instructions" in fault({first: torch.zeros(64, 8, 3, 3)})
    assert "Playground" in fault({"edm_mean": torch.zeros(4), "edm_std": torch.ones(4)})


def test_command_line(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(made("sd1")[1])]) == 0
    told = capsys.readouterr().out
    assert "StableDiffusionPipeline" in told
    assert "epsilon" in told


@pytest.mark.weekly
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_files_of_strangers(data: st.DataObject, made: Made) -> None:
    """Names as in a model, of which some are lost, and numbers in them changed, with shapes that say nothing."""
    file = made(data.draw(st.sampled_from(KINDS)))[1]
    path = file.with_name("strange.safetensors")
    with safe_open(file, "np") as opened:
        names = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    lost = data.draw(st.sets(st.sampled_from(sorted(names)), max_size=5))
    numbers = {name: re.sub(r"\d+", str(data.draw(st.integers(0, 10**9))), name)
               for name in data.draw(st.sets(st.sampled_from(sorted(names)), max_size=3))}  # fmt: skip
    sides = data.draw(st.lists(st.integers(0, 3), max_size=5))
    shapes = dict.fromkeys(data.draw(st.sets(st.sampled_from(sorted(names)), max_size=3)), tuple(sides))
    header, at = {}, 0
    for name in names.keys() - lost:
        shape = shapes.get(name, names[name])
        header[numbers.get(name, name)] = {
            "dtype": "F16",
            "shape": shape,
            "data_offsets": [at, at := at + 2 * math.prod(shape)],
        }
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)  # zeros that take no room on the disk
    with suppress(canvax.CheckpointError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = open_files(Location(path))
        read_networks(files)
        for component in files.components:
            files.folder(component)
