"""Qwen-Image-2.1 against diffusers with the same random weights, float32: images with alpha, and what it sees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers.modular_pipelines as modular
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import canvax
from canvax.call import Call
from canvax.images.convert import on_white
from canvax.images.inputs import fingerprint
from canvax.images.masks import as_floats
from canvax.models.qwen_vision import VisionConfig, vision_tower, vision_tower_spec
from canvax.pipelines.request import make_request
from canvax.pipelines.upscale import Tiles

from .families import (
    PROMPTS,
    QUIET,
    TURBO_TIMES,
    TWO,
    Model,
    arrays_of,
    load,
    picture,
    write,
)
from .reference import nchw, nhwc, psnr, randomise, relative_error
from .transformers_reference import TOLERANCE, params_of, stored, to_torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    return cache(lambda name: Model(name, tmp_path_factory.mktemp("model") / name))


@pytest.fixture
def model(models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr("canvax.models.networks.REFERENCE_BUCKET", 64)
    monkeypatch.setattr("canvax.models.qwen_image.REFERENCE_PIXELS", 128 * 128)
    return models("qwen")


def test_times_of_turbo(models: Callable[[str], Model]) -> None:
    """They are in ``model_index.json``; other numbers of steps have even times."""
    turbo, model = models("qwen-turbo"), models("qwen")
    got = turbo.draw(num_inference_steps=None).pixels
    assert psnr(got, turbo.reference()) > 60
    assert psnr(got, turbo.reference(num_inference_steps=4, sigmas=[1.0, 0.75, 0.5, 0.25])) < 50
    np.testing.assert_allclose(turbo.draw().pixels, model.draw().pixels, atol=1e-5)


@pytest.mark.parametrize(("kind", "times", "steps"), [("", None, 40), ("Turbo", TURBO_TIMES, 4), ("Turbo", None, 8)])
def test_modular_pipelines(
    models: Callable[[str], Model], tmp_path: Path, kind: str, times: list[float] | None, steps: int
) -> None:
    """A folder with the index that diffusers writes for one; without times Turbo has 8 even steps, as there."""
    model, folder = models("qwen-turbo"), tmp_path / "model"
    shutil.copytree(model.folder, folder)
    (folder / "model_index.json").unlink()
    pipe = getattr(modular, f"QwenImage21{kind}AutoBlocks")().init_pipeline()
    index = {"_class_name": type(pipe).__name__, **pipe.config, "sample_sigmas": times}
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    ours = load(folder)
    assert ours.model.defaults.num_inference_steps == steps
    if times:
        np.testing.assert_array_equal(model.draw(ours).pixels, model.draw().pixels)
    ours.save(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / "modular_model_index.json").read_text())["_class_name"] == type(pipe).__name__
    )


@pytest.mark.parametrize("times", [[1.0, 1.0, 0.5], [0.5, 0.7], [1.5, 0.5], [], [1.0, 0.0], "fast", [1.0, None]])
def test_times_that_are_none(model: Model, tmp_path: Path, times: Any) -> None:
    folder = shutil.copytree(model.folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": times}))
    with pytest.raises(canvax.CheckpointError):
        canvax.load(folder, mesh=model.ours.mesh)


def glass(height: int = 64, width: int = 96) -> Image.Image:
    """An image that becomes transparent from left to right."""
    image = picture(height, width)
    image.putalpha(Image.fromarray(np.tile(np.linspace(255, 0, width).astype(np.uint8), (height, 1))))
    return image


def test_images_with_alpha(model: Model, tmp_path: Path) -> None:
    """As images of Pillow, arrays and files; ``info`` makes them again."""
    result = model.draw(prompt="a fox", latents=None, seed=1)
    assert (result.pixels.shape, result.images[0].mode) == ((1, 64, 96, 4), "RGBA")
    assert result.pixels[..., 3].std() > 0.01
    for name in ("np", "jax"):
        assert model.draw(output_type=name).images.shape == (2, 64, 96, 4)
    for name in ("a.png", "a.webp"):
        result.save(tmp_path / name)
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(result.images[0]))
    assert canvax.read_metadata(tmp_path / "a.png")["seed"] == 1


def test_from_an_image_with_alpha(model: Model) -> None:
    """The reference's loop from half noise; an image without alpha is opaque."""
    vae, noise, sigmas = model.theirs.vae, model.noise(), [0.5, 2 / 6, 1 / 6]
    mean, deviation = (np.float32(vae.config[name]) for name in ("latents_mean", "latents_std"))
    mu = model.ours.model.scheduler.schedule.mu_of(24)
    time = float(np.exp(mu) / (np.exp(mu) + 1 / sigmas[0] - 1))
    for image in (glass(), picture(64, 96)):
        pixels = np.asarray(image.convert("RGBA"), np.float32)[None] / 127.5 - 1
        with torch.no_grad():
            clean = (nhwc(vae.encode(nchw(pixels)[:, :, None]).latent_dist.mode()[:, :, 0]) - mean) / deviation
        np.testing.assert_allclose(model.ours.encode_image(image), clean, atol=1e-4)
        want = model.reference(latents=(1 - time) * clean + time * noise, num_inference_steps=3, sigmas=sigmas)
        got = model.draw(image=image, strength=0.5, num_inference_steps=6).pixels
        assert psnr(got, want) > 60
        other = model.draw(image=on_white(image), strength=0.5, num_inference_steps=6).pixels
        assert psnr(other, want) < 40 or image.mode == "RGB"
    request = make_request(model.ours.model, Call("a fox", image=glass(), strength=0.5))
    assert request.init_images is not None
    assert request.init_images.fingerprints["image"] == [fingerprint(on_white(glass()))]


def test_inside_a_mask_with_alpha(model: Model) -> None:
    """What stays is the image, transparency included, also beside a part that is cut out."""
    mask = np.zeros((64, 96), np.uint8)
    mask[:, 64:] = 255
    for more in ({}, {"padding_mask_crop": 8}, {"mask_fill": "fill"}):
        options = canvax.Options(progress=False, **more)
        drawn = model.ours("a fox", image=glass(), mask=mask, strength=0.9, num_inference_steps=2, options=options,
                           **model.small if more else {}).pixels[0]  # fmt: skip
        want = np.asarray(glass(), np.float32) / 255
        np.testing.assert_allclose(drawn[:, :64], want[:, :64], atol=1e-6)
        assert np.abs(drawn[:, 64:] - want[:, 64:]).mean(axis=(0, 1)).min() > 0.01


def test_larger_images_with_alpha(model: Model) -> None:
    """Second passes, and tiles."""
    asked: dict[str, Any] = {"seed": 1, "num_inference_steps": 2}
    for method in ("pixel", "latent"):
        options = canvax.Options(progress=False, hires=2, hires_method=method)
        assert model.ours("a fox", height=32, width=32, options=options, **asked).pixels.shape == (1, 64, 64, 4)
    tiles = Tiles(model.ours.model, glass(), scale=2, overlap=None, seed=1, noise="philox", prompt="")
    assert tiles[0].image.mode == "RGBA"
    tiles.add(0, as_floats(tiles[0].image))
    wanted = glass().resize((192, 128), Image.Resampling.LANCZOS)
    np.testing.assert_allclose(tiles.pixels(), as_floats(wanted), atol=1e-6)


def test_a_refused_image_is_black(model: Model) -> None:
    """And not transparent."""
    from canvax.pipelines.safety import SafetyChecker

    class All(SafetyChecker):
        def flags(self, pixels: Any) -> list[bool]:
            return [True] * len(pixels)

    result = All(None, {})(model.draw())  # pyright: ignore[reportArgumentType]
    assert np.asarray(result.images[0])[0, 0].tolist() == [0, 0, 0, 255]


# Editing. End to end it is compared with the other families that edit.


def test_vision_tower() -> None:
    """Features after each of its layers, of two images of other sizes, as if each were alone."""
    fields = {"depth": 3, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 20,
              "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 2]}  # fmt: skip
    theirs = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel._from_config(
        transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig(**fields), attn_implementation="eager"
    )
    cfg = VisionConfig.from_dict({"vision_config": fields})
    params = params_of(stored(randomise(theirs)), vision_tower_spec(cfg))
    grids, room = np.array([[4, 10], [8, 6]], np.int32), 64
    patches = np.random.default_rng(0).integers(0, 256, (2, room, 768)).astype(np.uint8)
    got = jax.jit(partial(vision_tower, cfg=cfg))(params, jnp.asarray(patches)[:, None], jnp.asarray(grids)[:, None])
    assert len(got) == 4
    for i, (rows, columns) in enumerate(grids):
        pixels = (np.float32(patches[i, : rows * columns]).reshape(-1, 3, 1, 256) - 127.5) / 127.5
        with torch.no_grad():
            seen = theirs(to_torch(np.repeat(pixels, 2, 2)).flatten(1), grid_thw=torch.tensor([[1, rows, columns]]))
        for ours, want in zip(got, [seen.pooler_output, *seen.deepstack_features], strict=True):
            assert relative_error(ours[i, 0, : rows * columns // 4], want.numpy()) < TOLERANCE


def test_editing_with_a_negative_prompt(model: Model) -> None:
    """References, of which one is transparent, are before both prompts; without a size the first gives it."""
    asked: dict[str, Any] = {"image": [glass(150, 200), TWO[1]], "num_inference_steps": 3, "guidance_scale": 3.0}
    asked |= {"negative_prompt": [*model.record.negatives]}
    start = model.noise(96, 160)
    drawn = {**asked, "latents": start, "height": None, "width": None}
    want = model.reference(latents=start, **asked)
    assert psnr(model.draw(**drawn).pixels, want) > 60
    opaque = [on_white(asked["image"][0]), TWO[1]]
    assert psnr(model.draw(**drawn | {"image": opaque}).pixels, want) < 50
    assert psnr(model.draw(**drawn | {"guidance_scale": 1.0}).pixels, want) < 40


def test_what_sees_references(model: Model, tmp_path: Path) -> None:
    """Conditions were made without them; a text encoder without a tower does not see."""
    encoder, words = model.ours.model.text.encoders[0], model.ours.tokenizer
    seen = [glass(), glass()]
    assert encoder.count(words, "a fox", seen) == encoder.read(words, ["a fox"], 128, [seen])["length"][0]
    for image, taken in ((TWO, False), (None, True)):
        asked: dict[str, Any] = {"image": image, "num_inference_steps": 1, "options": QUIET, **model.small}
        if taken:
            model.ours(model.ours.encode(PROMPTS), **asked)
            continue
        with pytest.raises(canvax.InputError) as caught:
            model.ours(model.ours.encode(PROMPTS), **asked)
        assert caught.value.argument == "image"
    blind = {name: array for name, array in arrays_of(model.folder, "text_encoder").items() if "visual" not in name}
    pipe = load(model.folder, text_encoder=write(tmp_path / "lm.safetensors", blind))
    np.testing.assert_array_equal(model.draw(pipe).pixels, model.draw().pixels)
    assert not pipe.model.networks.denoiser.facts.edits
    assert make_request(pipe.model, Call("a fox", image=glass())).references is None
