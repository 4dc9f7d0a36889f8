"""Qwen-Image-Edit against diffusers and transformers with the same random weights, float32: the vision tower, what it
sees, and whole edits.
"""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as reference_pipeline
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import canvax
from canvax.call import Call
from canvax.compile.additions import ReadsReferences
from canvax.families.known import PRESETS
from canvax.families.qwen_image_1 import QWEN_IMAGE_1
from canvax.models.decoder_lm import DecoderConfig
from canvax.models.qwen25_vision import WindowedConfig, windowed_tower, windowed_tower_spec
from canvax.models.qwen_vision import SeeingLanguageModel, _patches
from canvax.pipelines.request import make_request
from canvax.server.models import Announcer, EngineSettings, ModelSet, ServedModel, Warm
from canvax.weights.language_model import vision_config

from .families import EDIT_PIXELS, ONE, PROMPTS, QUIET, TWO, Files, Model, arrays_of, half_mask, load, picture, write
from .reference import psnr, randomise, relative_error
from .transformers_reference import TOLERANCE, params_of, same_names_and_shapes, stored, to_torch

pytestmark = pytest.mark.slow

modeling = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 20,
    "window_size": 56, "fullatt_block_indexes": [1],
}  # fmt: skip


FULL = {"depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "window_size": 112, "fullatt_block_indexes": [1]}  # fmt: skip


@pytest.mark.parametrize("fields", [TOWER, pytest.param(FULL, marks=pytest.mark.weekly)], ids=["small", "full size"])
def test_vision_tower(fields: dict[str, Any]) -> None:
    """Of two images of other sizes, as if each were alone; windows are cut at their edges."""
    config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(**fields)
    theirs = modeling.Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation="eager")
    cfg = WindowedConfig.from_dict({"vision_config": fields})
    params = params_of(stored(randomise(theirs)), windowed_tower_spec(cfg))
    grids, room = np.array([[6, 20], [18, 6]], np.int32), 128
    patches = np.random.default_rng(0).integers(0, 256, (2, room, 588)).astype(np.uint8)
    mean, deviation = (np.float32(values)[:, None, None] for values in statistics())
    inputs = jnp.asarray(patches)[:, None], jnp.asarray(grids)[:, None]
    got = jax.jit(partial(windowed_tower, cfg=cfg))(params, *inputs)
    for i, (rows, columns) in enumerate(grids):
        pixels = (np.float32(patches[i, : rows * columns]).reshape(-1, 3, 1, 196) / 255 - mean) / deviation
        with torch.no_grad():
            seen = theirs(to_torch(np.repeat(pixels, 2, 2)).flatten(1), grid_thw=torch.tensor([[1, rows, columns]]))
        assert relative_error(got[i, 0, : rows * columns // 4], seen.pooler_output.numpy()) < TOLERANCE
    for layers in ([*range(cfg.depth)], []):
        changed = WindowedConfig.from_dict({"vision_config": fields | {"fullatt_block_indexes": layers}})
        assert relative_error(windowed_tower(params, *inputs, changed)[0, 0, :30], got[0, 0, :30]) > 0.01


def test_sizes() -> None:
    """Names and shapes of all arrays of the tower, its published count, and the config that is read off shapes."""
    spec, single = WindowedConfig().spec, QWEN_IMAGE_1.single_file
    with torch.device("meta"):
        fields = {"hidden_size": 1280, "out_hidden_size": 3584}
        config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(**fields)
        state = stored(modeling.Qwen2_5_VisionTransformerPretrainedModel._from_config(config))
    declared = same_names_and_shapes(state, spec)
    assert sum(math.prod(param.shape) for param in declared.values()) == 676_550_144
    found = vision_config({f"visual.{name}": array.shape for name, array in state.items()})
    assert single is not None
    assert WindowedConfig.from_dict({"vision_config": single.configs["text_encoder"]["vision_config"] | found}) == (
        WindowedConfig()
    )
    assert PRESETS["qwen-image-edit-2511"].text.specs["text_encoder"]["visual"] == spec


@pytest.mark.parametrize("changes", [
    {"hidden_act": "gelu"}, {"spatial_merge_size": 3}, {"window_size": 100}, {"fullatt_block_indexes": [32]},
    {"num_heads": 7},
])  # fmt: skip
def test_towers_that_are_not_supported(changes: dict[str, Any]) -> None:
    with pytest.raises(canvax.CheckpointError):
        WindowedConfig.from_dict({"vision_config": changes})


def test_positions_that_do_not_fit() -> None:
    lm = DecoderConfig(model_type="qwen2_5_vl_text", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(canvax.CheckpointError):
        SeeingLanguageModel(lm, 3, eyes=WindowedConfig())


def statistics() -> tuple[list[float], list[float]]:
    processor = Qwen2VLImageProcessorPil()
    return processor.image_mean, processor.image_std


@pytest.mark.parametrize(("height", "width"), [(165, 215), (200, 130), (1210, 1010), (90, 1000), (384, 384), (400, 40)])
def test_what_the_tower_sees(height: int, width: int) -> None:
    """The sizes of diffusers' pipeline, and the patches of the released processor, bit for bit."""
    image = picture(height, width)
    sizes = reference_pipeline.calculate_dimensions(reference_pipeline.CONDITION_IMAGE_SIZE, width / height)
    resized = image.resize(sizes, 1)
    want = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384})(resized)
    viewed = WindowedConfig().view(image, None)
    rows, columns = viewed.height // 14, viewed.width // 14
    assert want["image_grid_thw"].tolist() == [[1, rows, columns]]
    assert rows * columns // 4 <= WindowedConfig().tokens((0, 0))
    mean, deviation = (np.float32(values)[:, None, None] for values in statistics())
    pixels = (np.float32(_patches(viewed, 14)).reshape(-1, 3, 1, 196) / 255 - mean) / deviation
    np.testing.assert_allclose(np.repeat(pixels, 2, 2).reshape(len(pixels), -1), want["pixel_values"], atol=1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen-edit", tmp_path_factory.mktemp("model") / "qwen-edit")


@pytest.fixture
def model(made: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr("canvax.models.networks.REFERENCE_BUCKET", 64)
    monkeypatch.setattr("canvax.models.qwen_image_1.REFERENCE_PIXELS", EDIT_PIXELS["VAE_IMAGE_SIZE"])
    monkeypatch.setattr("canvax.models.qwen25_vision.VIEWED_PIXELS", EDIT_PIXELS["CONDITION_IMAGE_SIZE"])
    return made


def test_without_guidance_at_the_size_of_the_first(model: Model) -> None:
    """Three references, which are seen in order."""
    three = [*TWO, picture(90, 100, 1.0)]
    asked: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 1.0}
    start = model.noise(128, 160)
    want = model.reference(latents=start, image=three, **asked)
    drawn = {**asked, "latents": start, "height": None, "width": None}
    assert psnr(model.draw(image=three, **drawn).pixels, want) > 60
    assert psnr(model.draw(image=[three[0], *three[:0:-1]], **drawn).pixels, want) < 50
    assert psnr(model.draw(image=three, prompt=[*model.record.prompts[::-1]], **drawn).pixels, want) < 40


def test_guided_by_a_negative_prompt(model: Model) -> None:
    """Which sees the references, too."""
    asked: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 3.0, "image": TWO}
    negatives = ["blurry", "a lighthouse"]
    want = model.reference(negative_prompt=negatives, **asked)
    drawn = {**asked, **model.small}
    assert psnr(model.draw(negative_prompt=negatives, **drawn).pixels, want) > 60
    assert psnr(model.draw(**drawn).pixels, want) < 50
    assert psnr(model.draw(negative_prompt=negatives, **drawn | {"guidance_method": "cfg"}).pixels, want) < 50


def test_references_at_the_time_of_the_image(model: Model, tmp_path: Path) -> None:
    """As in 2509, whose config does not say that they are at time 0."""
    folder = shutil.copytree(model.folder, tmp_path / "model")
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"zero_cond_t": False}))
    asked: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 1.0, "image": ONE}
    want = model.reference(pipe=model.record.open(folder), **asked)
    assert psnr(model.draw(load(folder), **asked, **model.small).pixels, want) > 60
    assert psnr(model.draw(**asked, **model.small).pixels, want) < 50


def test_the_first_edit(model: Model, tmp_path: Path) -> None:
    """It has one reference, which is seen in the size in which the transformer reads it."""
    first = Model("qwen-edit-first", tmp_path / "model")
    asked: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 3.0, "image": ONE}
    asked["negative_prompt"] = ["blurry", "a lighthouse"]
    want = first.reference(**asked)
    assert psnr(first.draw(**asked, **first.small).pixels, want) > 60
    path = first.folder / "model_index.json"
    path.write_text(path.read_text().replace("QwenImageEditPipeline", "QwenImageEditPlusPipeline"))
    assert psnr(first.draw(load(first.folder), **asked, **first.small).pixels, want) < 40
    with pytest.raises(canvax.InputError) as caught:
        first.draw(**{**asked, "image": TWO})
    assert caught.value.argument == "image"


@pytest.mark.parametrize(("on_demand", "lengths"), [(False, {128, 256}), (True, {128})])
def test_lengths_of_a_server(model: Model, monkeypatch: pytest.MonkeyPatch, on_demand: bool, lengths: set[int]) -> None:
    """Prompts of two chunks are made ready by default, with references and without."""
    served = ServedModel("edit", lambda name, **_: model.loaded(), weights=False)
    monkeypatch.setattr(ServedModel, "build", lambda served, key, *_, **__: key)
    settings = EngineSettings(warm=(Warm((80, 48)),), compile_on_demand=on_demand)
    set_ = ModelSet(["edit"], model.loaded, settings, print, Announcer(print, lambda _: None, lambda: None))
    keys: list[Any] = [key for _, key in set_._groups(served, image=True)]
    made = [(key.kinds.lengths[0], key.kinds.of(ReadsReferences) is not None) for key in keys]
    assert sorted(made) == sorted((length, reads) for length in lengths for reads in (False, True))


def test_what_sees_references(model: Model) -> None:
    """Conditions were made without them."""
    encoder, words = model.ours.model.text.encoders[0], model.ours.tokenizer
    views = [encoder.view(image, None) for image in TWO]
    read = encoder.read(words, ["a fox"], 128, [views])
    slots = sum((view.height // 28) * (view.width // 28) for view in views)
    assert encoder.count(words, "a fox", views) + slots == read["length"][0]
    asked: dict[str, Any] = {"num_inference_steps": 1, "options": QUIET, **model.small}
    model.ours(model.ours.encode(PROMPTS), **asked)
    with pytest.raises(canvax.InputError) as caught:
        model.ours(model.ours.encode(PROMPTS), image=TWO, **asked)
    assert caught.value.argument == "image"


def test_inside_a_mask(model: Model) -> None:
    """The image is a reference, too, also at a size that is scaled to be one."""
    asked: dict[str, Any] = {"mask": half_mask(48), "seed": 1, "num_inference_steps": 2, "options": QUIET}
    asked |= {"guidance_scale": 1.0}
    drawn = model.ours("a fox", image=picture(), **asked).pixels[0]
    want = np.asarray(picture(), np.float32) / 255
    np.testing.assert_allclose(drawn[:, :48], want[:, :48], atol=1e-6)
    request = make_request(model.ours.model, Call("a fox", image=picture(), mask=asked["mask"]))
    assert request.references is not None
    (reference,), (view,) = request.references.images[0], request.references.of(0)
    assert (reference.size, view.size) == ((160, 96), (280, 168))
    seen = make_request(model.ours.model, Call("a fox", image=picture())).references
    assert seen is not None
    np.testing.assert_array_equal(np.asarray(seen.of(0)[0]), np.asarray(view))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files("qwen-edit", tmp_path_factory.mktemp("files"))


def test_files_of_edit(files: Files, tmp_path: Path) -> None:
    """The name or an array of a file says which model it is; a text encoder without a tower does not see."""
    assert files.load().model.networks == files.wanted.model.networks
    mark = {"__index_timestep_zero__": np.zeros(0, np.float32)}
    for name, more, most, zero in (
        ("qwen_image_edit_2509_bf16", {}, 10, False), ("Qwen_Image_Edit-Q8_0", {}, 1, False),
        ("another", mark, 10, True), ("another", {}, 0, False),
    ):  # fmt: skip
        path = write(tmp_path / f"{name}.safetensors", files.arrays() | more)
        networks = files.load(path).model.networks
        facts = networks.denoiser.facts
        assert (facts.edits and facts.most_references, networks.config.zero_cond_t) == (most, zero), name
    pipe = files.load(text_encoder=blind(files, tmp_path))
    assert not pipe.model.networks.denoiser.facts.edits
    assert make_request(pipe.model, Call("a fox", image=picture())).references is None
    assert pipe.tokenizer.ids("a fox") == files.wanted.tokenizer.ids("a fox")


def blind(files: Files, folder: Path) -> Path:
    seen = files.arrays("text_encoder").items()
    return write(folder / "lm.safetensors", {name: array for name, array in seen if "visual" not in name})


def test_edits_of_files(files: Files, model: Model, tmp_path: Path) -> None:
    """They are those of the folder, also when saved; without a reference those of a text encoder without a tower."""
    asked: dict[str, Any] = {"num_inference_steps": 1, "seed": 1, "options": QUIET, **model.small}
    want, plain = (files.wanted("a fox", image=image, **asked).pixels for image in (ONE, None))
    np.testing.assert_array_equal(files.load()("a fox", image=ONE, **asked).pixels, want)
    files.load().save(tmp_path / "saved")
    assert arrays_of(tmp_path / "saved", "text_encoder").keys() == arrays_of(files.folder, "text_encoder").keys()
    np.testing.assert_array_equal(load(tmp_path / "saved")("a fox", image=ONE, **asked).pixels, want)
    np.testing.assert_array_equal(files.load(text_encoder=blind(files, tmp_path))("a fox", **asked).pixels, plain)


def test_a_narrow_image_is_refused() -> None:
    for size in ((4000, 10), (10, 4000)):
        with pytest.raises(canvax.InputError) as caught:
            WindowedConfig().view(picture(*size), None)
        assert caught.value.argument == "image"
