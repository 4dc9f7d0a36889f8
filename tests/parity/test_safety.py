"""CLIP's image encoder and the safety checker, beside PyTorch's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPVisionConfig, CLIPVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import canvax
from canvax.flax_api import FlaxStableDiffusionSafetyChecker
from canvax.images.inputs import clip_square
from canvax.models.clip_vision import MEAN, STD, vision_encoder, vision_encoder_spec
from canvax.models.configs import ClipVisionConfig
from canvax.pipelines import safety
from canvax.weights.location import BUNDLED, Location
from tests.support.drawing import one_device

from .reference import params_of, randomise, relative_error

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"image_size": 28, "patch_size": 7, "projection_dim": 24}
QUIET = canvax.Options(progress=False)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_image_encoder(act: str) -> None:
    theirs = randomise(CLIPVisionModel(CLIPVisionConfig(**SMALL, hidden_act=act)))
    cfg = ClipVisionConfig(**SMALL, hidden_act=act)
    own = "vision_model.pre_layrnorm.weight" in theirs.state_dict()  # newer ones leave the beginning out
    params = params_of(theirs, vision_encoder_spec(cfg), "" if own else "vision_model.")
    images = np.random.default_rng(0).random((2, 28, 28, 3), np.float32)
    normal = torch.from_numpy(((images - MEAN) / STD).astype(np.float32).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        want = theirs(normal, output_hidden_states=True)
    before, pooled = vision_encoder(params, images, cfg)
    assert relative_error(before, want.hidden_states[-2].numpy()) < 1e-4
    assert relative_error(pooled, want.pooler_output.numpy()) < 1e-4


@pytest.mark.parametrize("size", [(64, 64), (300, 224), (101, 57), (512, 768)])
def test_images_are_shown_as_clip_was_shown_them(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (*size[::-1], 3), np.uint8)
    image = Image.fromarray(pixels).resize(size)
    own = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    want = CLIPImageProcessorPil(**own)(image, return_tensors="np").pixel_values[0]
    got = (clip_square(image, 28) - MEAN) / STD
    np.testing.assert_allclose(got.transpose(2, 0, 1), want, atol=2e-6)


def checker(folder: Path) -> StableDiffusionSafetyChecker:
    """A small one, whose thresholds are such that some images pass and others do not."""
    config = CLIPConfig(
        vision_config=SMALL, projection_dim=24, text_config={"hidden_size": 16, "num_attention_heads": 2}
    )
    theirs = randomise(StableDiffusionSafetyChecker(config), 3)
    generator = torch.Generator().manual_seed(5)
    for name, entries in (("concept_embeds", 17), ("special_care_embeds", 3)):
        getattr(theirs, name).data = torch.randn(entries, 24, generator=generator)
        getattr(theirs, f"{name}_weights").data = 0.35 + 0.05 * torch.rand(entries, generator=generator)
    theirs.save_pretrained(folder)
    return theirs


def as_released(path: Path) -> None:
    """With the names, and the numbers that are no weights, of the files that there are."""
    double, start = "vision_model.vision_model.", "vision_model."
    arrays = {name.replace(start, double, 1) if name.startswith(start) else name: array
              for name, array in load_file(path).items()}  # fmt: skip
    assert f"{double}pre_layrnorm.weight" in arrays
    save_file(arrays | {f"{double}embeddings.position_ids": torch.arange(17)[None]}, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StableDiffusionSafetyChecker]:
    """The bundled model with a safety checker."""
    folder = tmp_path_factory.mktemp("checked") / "model"
    shutil.copytree(BUNDLED["emoji"], folder)
    theirs = checker(folder / "safety_checker")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder, theirs


def test_refuses_what_the_original_refuses(model: tuple[Path, StableDiffusionSafetyChecker]) -> None:
    folder, theirs = model
    ours = safety.load_safety_checker(Location(folder))
    rng = np.random.default_rng(2)
    coarse = rng.random((48, 4, 4, 3), np.float32)
    pixels = np.repeat(np.repeat(coarse, 16, 1), 16, 2)
    images = [Image.fromarray((255 * one).round().astype(np.uint8)) for one in pixels]
    as_released(folder / "safety_checker" / "model.safetensors")
    released = safety.load_safety_checker(Location(folder))
    own = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    inputs = CLIPImageProcessorPil(**own)(images, return_tensors="pt").pixel_values
    with torch.no_grad():
        _, want = theirs(images=[np.ones((2, 2, 3))] * len(images), clip_input=inputs)
    assert 5 < sum(want) < 43
    assert ours.flags(pixels) == released.flags(pixels) == [bool(one) for one in want]
    # The old Flax classes, with the images that PyTorch's were shown.
    old, params = FlaxStableDiffusionSafetyChecker.from_pretrained(folder, subfolder="safety_checker")
    assert old(inputs.numpy(), params).tolist() == ours.flags(pixels)
    np.testing.assert_allclose(old.feature_extractor(images).pixel_values, inputs.numpy(), atol=2e-6)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_limits(seed: int) -> None:
    """Rounding, and what a special concept adds, as the original has them: by its own loop."""
    rng = np.random.default_rng(seed)
    special, concepts = rng.uniform(0.18, 0.22, 3), rng.uniform(0.18, 0.21, 17)
    limits = rng.uniform(0.19, 0.22, 3), rng.uniform(0.2, 0.22, 17)
    adjustment, bad = 0.0, False
    for i in range(3):
        if round(special[i] - limits[0][i] + adjustment, 3) > 0:
            adjustment = 0.01
    for i in range(17):
        bad = bad or round(concepts[i] - limits[1][i] + adjustment, 3) > 0
    assert safety.refused(special, concepts, *limits) == bad


@pytest.mark.slow
def test_refused_images_are_black(
    model: tuple[Path, StableDiffusionSafetyChecker], emoji: canvax.Pipeline, tmp_path: Path
) -> None:
    mesh = one_device()
    checker = canvax.load(model[0], safety_checker=True, mesh=mesh, progress=False).safety_checker
    assert checker is not None
    assert canvax.load(model[0], mesh=mesh, progress=False).safety_checker is None
    pipe = canvax.Pipeline(emoji.model, emoji.programs, emoji.params, checker)
    calls = {"num_inference_steps": 3, "seed": 1, "options": QUIET}
    want, got = (one(["a red apple", "a dog face", "a lemon", "a fox"], **calls) for one in (emoji, pipe))
    flags = checker.flags(want.pixels)
    assert [record["nsfw"] for record in got.metadata] == flags
    assert "nsfw" not in want.metadata[0]
    for i, flag in enumerate(flags):
        np.testing.assert_array_equal(got.pixels[i], 0 if flag else want.pixels[i])
        assert np.asarray(got.images[i]).any() != flag
    got.images[0].save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert json.loads(image.info["canvax"])["nsfw"] == flags[0]
    assert pipe(["a pizza"] * 4, **{**calls, "seed": 9}).compilations == 0
    black = safety.SafetyChecker(checker.cfg, {**checker.params, "concept": np.full(17, -2.0)})
    assert not black(want).pixels.any()
    assert not black(want).latents.any()


def test_a_model_without_one() -> None:
    with pytest.raises(canvax.CheckpointError, match="this model has none"):
        canvax.load("emoji", safety_checker=True, progress=False)
    with pytest.raises(canvax.InputError, match="safety_checker"):
        canvax.load("emoji", safety_checker="yes", progress=False)
