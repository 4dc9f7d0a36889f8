"""SDXL without a reference: configs, options, runs in parts, damaged checkpoints, low precision."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import canvax
from canvax.cli.again import again
from canvax.cli.arguments import parse
from canvax.cli.images import gather
from canvax.compile.kinds import Kinds
from canvax.compile.monitor import compilations
from canvax.compile.programs import Programs
from canvax.images.metadata import read_metadata
from canvax.models.clip import clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.presets import (
    SDXL_REFINER_UNET,
    SDXL_TEXT,
    SDXL_TEXT_2,
    SDXL_UNET,
    SDXL_VAE,
)
from canvax.models.unet import unet_context, unet_spec
from canvax.models.vae import vae_decode, vae_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import count, init_params
from canvax.weights.data_folder import VARIABLE
from tests.support.checkpoints import write_json
from tests.support.drawing import one_device
from tests.support.small_sdxl import SCHEDULER, TEXT, UNET, VAE, build, build_refiner

QUIET = canvax.Options(progress=False)


def load(folder: Path, devices: int = 1) -> canvax.Pipeline:
    return canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:devices]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("xl") / "base")


@pytest.fixture(scope="module")
def base(folder: Path) -> canvax.Pipeline:
    return load(folder)


@pytest.fixture(scope="module")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    return load(build_refiner(tmp_path_factory.mktemp("xl") / "refiner"))


def draw(pipe: canvax.Pipeline, prompt: Any = "a cat", *, options: Any = None, **arguments: Any) -> canvax.Result:
    options = dataclasses.replace(QUIET, **(options or {}))
    return pipe(prompt, **{"num_inference_steps": 5, "seed": 3, "options": options} | arguments)


def test_layers_that_another_program_skipped(
    base: canvax.Pipeline, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1111 and ComfyUI count the last layer, which SDXL does not read, in Python, in the shell and in its hint."""
    info = PngInfo()
    info.add_text("parameters", "a cat\nSteps: 2, Sampler: Euler, CFG scale: 3, Seed: 4, Size: 64x64, Clip skip: 3")
    Image.new("RGB", (8, 8)).save(image := tmp_path / "a.png", pnginfo=info)
    assert base.again(image, progress=False).metadata[0]["options"]["clip_skip"] == 1
    (call,), _ = gather(parse(["generate", "--from-image", str(image), "-m", str(folder)]))
    assert call.options.clip_skip == 1
    (call,), _ = gather(parse(["generate", "--from-image", str(image), "-m", str(folder), "--clip-skip", "0"]))
    assert call.options.clip_skip == 0
    of_no_model = again(metadata := read_metadata(image))
    assert "--clip-skip 2" in of_no_model.command
    assert of_no_model.losses
    monkeypatch.setenv(VARIABLE, str(folder.parent))
    of_a_model = again(metadata | {"model": folder.name})
    assert "--clip-skip 1" in of_a_model.command
    assert not of_a_model.losses


def test_full_size() -> None:
    """The published sizes, and what the networks are told fits together."""
    text = clip_encoders(SDXL_TEXT, SDXL_TEXT_2)
    assert text.width == SDXL_UNET.cross_attention_dim == 2048
    assert SDXL_UNET.time_ids(text.pooled_width) == 6
    assert SDXL_REFINER_UNET.time_ids(text.pooled_width) == 5
    assert count(unet_spec(SDXL_UNET)) == 2_567_463_684
    assert count(text.specs["text_encoder"]) == 123_060_480
    assert count(text.specs["text_encoder_2"]) == 694_659_840
    assert count(vae_spec(SDXL_VAE)) == 83_653_863


@pytest.mark.slow
def test_defaults(base: canvax.Pipeline) -> None:
    result = draw(base)
    assert result.images[0].size == (64, 64)
    assert result.metadata[0]["guidance_scale"] == 5.0
    assert result.metadata[0]["negative_prompt"] is None
    assert draw(base, negative_prompt="").metadata[0]["negative_prompt"] == ""
    assert base.model.defaults.num_inference_steps == 50
    assert base.model.scheduler.config["clip_sample"] is False


def test_scheduler_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Only Stable Diffusion 1.x and 2.x have their configs put right."""
    shutil.copytree(folder, tmp_path / "copy")
    write_json(tmp_path / "copy" / "scheduler" / "scheduler_config.json", SCHEDULER | {"steps_offset": 0})
    pipe = load(tmp_path / "copy")
    assert pipe.model.scheduler.options.steps_offset == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.weekly)])
def test_low_precision(dtype: str, folder: Path, base: canvax.Pipeline) -> None:
    pipe = canvax.load(folder, dtype=dtype, mesh=one_device())
    options = {"prompt_2": "a dog", "original_size": (1083, 1081)}
    want, got = draw(base, options=options), draw(pipe, options=options)
    assert np.isfinite(got.latents).all()
    assert 0 < np.abs(got.pixels - want.pixels).mean() < 0.05


@pytest.mark.parametrize("what", ["timestep", "sizes"])
def test_numbers_that_16_bits_round_are_embedded_exactly(what: str) -> None:
    """bfloat16 has no 999 and no 1001, which are both its 1000."""
    params = init_params(unet_spec(UNET), 0)
    timesteps = jnp.array([999.0, 1000.0] if what == "timestep" else [500.0, 500.0])
    sizes = jnp.array([[1001.0], [1000.0]] if what == "sizes" else [[1000.0], [1000.0]]) * jnp.ones((1, 6))

    def embedded(dtype: Any) -> np.ndarray:
        p = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
        x, text, pooled = jnp.zeros((2, 8, 8, 4), dtype), jnp.zeros((2, 3, 40), dtype), jnp.zeros((2, 8), dtype)
        return np.asarray(unet_context(p, x, timesteps, text, UNET, pooled, sizes).time, np.float32)

    exact, half = embedded(jnp.float32), embedded(jnp.bfloat16)
    apart = np.abs(exact[0] - exact[1]).max()
    assert np.abs(half - exact).max() < apart / 4


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "DDIM", "DDPM"])
@pytest.mark.parametrize("cut", [0.8, 0.45])
def test_run_in_two_parts(sampler: str, cut: float, emoji: canvax.Pipeline) -> None:
    """A sampler without memory draws the same in two parts, step noise included; nothing compiles for it."""
    whole = draw(emoji, sampler=sampler)
    before = compilations()
    first = draw(emoji, sampler=sampler, options={"denoising_end": cut})
    assert first.images == []
    assert first.pixels.shape == (0, 64, 64, 3)
    second = draw(emoji, sampler=sampler, latents=first.latents, options={"denoising_start": cut})
    np.testing.assert_allclose(second.latents, whole.latents, atol=1e-5)
    assert compilations() == before


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["DPM++ 2M", "PNDM", "DPM++ 2M SDE"])
def test_run_in_two_parts_with_memory(sampler: str, emoji: canvax.Pipeline) -> None:
    """A sampler with memory begins the second part anew: nearly the same picture."""
    whole = draw(emoji, sampler=sampler, num_inference_steps=30, guidance_scale=1.0)
    first = draw(emoji, sampler=sampler, num_inference_steps=30, guidance_scale=1.0, options={"denoising_end": 0.5})
    second = draw(
        emoji, sampler=sampler, num_inference_steps=30, guidance_scale=1.0, latents=first.latents,
        options={"denoising_start": 0.5},
    )  # fmt: skip
    assert np.abs(second.pixels - whole.pixels).mean() < 0.01


@pytest.mark.slow
def test_hand_over_between_samplers(base: canvax.Pipeline, refiner: canvax.Pipeline) -> None:
    first = draw(base, options={"denoising_end": 0.6}, sampler="Euler")
    for sampler in ("Euler", "DPM++ 2M", "DDIM"):
        result = draw(refiner, latents=first.latents, options={"denoising_start": 0.6}, sampler=sampler)
        assert np.isfinite(result.pixels).all()
        assert len(result.images) == 1


def test_bad_calls(refiner: canvax.Pipeline) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (refiner, {}, "is a refiner"),
        (refiner, {"options": {"prompt_2": "a"}}, "it is a refiner"),
        (refiner, {"options": {"target_size": (8, 8)}}, "it is a refiner"),
    ]
    before = compilations()
    for pipe, arguments, message in cases:
        with pytest.raises(canvax.InputError, match=message):
            draw(pipe, **arguments)
    assert compilations() == before


def change(folder: Path, target: Path, file: str, **values: Any) -> Path:
    shutil.copytree(folder, target)
    path = target / file
    write_json(path, json.loads(path.read_text()) | values)
    return target


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("model_index.json", {"requires_aesthetics_score": True}, "6 numbers about an image.*addition_time_embed"),
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "the encoders give 16"),
        ("model_index.json", {"tokenizer_2": [None, None]}, "tokenizer_2 not in its model_index.json"),
        ("model_index.json", {"_class_name": "StableDiffusionXLControlNetPipeline"}, "ControlNetPipeline"),
        ("unet/config.json", {"addition_embed_type": "image"}, "addition_embed_type 'image' unknown"),
        ("unet/config.json", {"addition_time_embed_dim": None}, "addition_time_embed_dim is missing"),
        ("unet/config.json", {"projection_class_embeddings_input_dim": 33}, "input_dim 33 is not pooled text"),
        ("text_encoder_2/config.json", {"eos_token_id": [1, 2]}, r"eos_token_id = .1, 2. .not a whole number"),
        ("text_encoder_2/config.json", {"projection_dim": 10}, "^[^:]*copy: .*width 10 .*projection_dim in text_"),
        ("text_encoder_2/config.json", {"num_hidden_layers": 3}, "text_model.encoder.layers.2"),
    ],
)  # fmt: skip
def test_damaged_checkpoint(file: str, values: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(canvax.CheckpointError, match=message):
        load(change(folder, tmp_path / "copy", file, **values))


def test_flax_files(base: canvax.Pipeline, tmp_path: Path) -> None:
    """The old Flax layout, converted checkpoints' class names included, holds the same model."""
    pipe = load(build(tmp_path / "flax", form="flax"))
    np.testing.assert_array_equal(draw(pipe).latents, draw(base).latents)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "upcast"), [("bfloat16", True), ("float16", True), ("float16", False)])
def test_vae_stays_finite(dtype: str, upcast: bool) -> None:
    """Activations above float16's largest number, which SDXL's own decoder has."""
    cfg = dataclasses.replace(VAE, force_upcast=upcast)
    params = init_params(vae_spec(cfg), 0)
    for block in ("0", "1", "2"):
        conv = params["decoder"]["up_blocks"][block]["upsamplers"]["0"]["conv"]
        conv["weight"] = conv["weight"] * 200
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    programs = Programs(Networks(UNetDenoiser(UNET), cfg, TEXT), one_device())
    latents = np.random.default_rng(0).standard_normal((1, 8, 8, 4), np.float32)
    decode = programs.program("decoder", {"vae": params}, latents.shape, Kinds(guided=()))
    images = np.asarray(decode({"vae": params}, latents))
    overflows = dtype == "float16" and not upcast
    assert np.isfinite(images).all() == (not overflows)
    if not overflows:
        exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        want = np.clip(vae_decode(exact, jnp.asarray(latents), cfg) / 2 + 0.5, 0, 1)
        assert np.abs(images - want).max() < (0.05 if dtype == "bfloat16" else 1e-5)
