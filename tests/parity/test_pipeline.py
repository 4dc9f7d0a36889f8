"""The whole pipeline against PyTorch diffusers: same checkpoint, same initial latents, every sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers

import canvax
from canvax.denoise import step_noise
from canvax.flax_api import FlaxStableDiffusionPipeline
from canvax.noise import initial_noise, seed_keys
from canvax.parallel.mesh import make_mesh
from canvax.samplers import find
from canvax.weights.location import BUNDLED
from tests.support.bundled import LATENTS, VOCABULARY

from .reference import nchw, nhwc, psnr, randomise, relative_error

QUIET = canvax.Options(progress=False)
SEEDS = [11, 12]
PROMPTS = ["a red apple", "two cats & a dog"]
NEGATIVE = "blurry"
STEPS = 10

SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
    "Euler Karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
}


def build(folder: Path, prediction: str, **changes: Any) -> Path:
    """A small random checkpoint in the real layout, written by diffusers itself."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=4, cross_attention_dim=48,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        use_linear_projection=prediction == "v_prediction", **changes,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, norm_num_groups=16,
    )  # fmt: skip
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1, pad_token_id=VOCABULARY - 1,
        )
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, prediction_type=prediction,
    )  # fmt: skip
    diffusers.StableDiffusionPipeline(
        vae=randomise(vae), text_encoder=randomise(text), unet=randomise(unet), scheduler=scheduler,
        tokenizer=transformers.CLIPTokenizer.from_pretrained(BUNDLED["emoji"] / "tokenizer"),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


CASES = [("epsilon", "ddim"), ("epsilon", "pndm"), ("epsilon", "euler_a"), ("epsilon", "DPM++ 2M Karras")]
CASES += [("v_prediction", "ddpm"), ("v_prediction", "Euler Karras")]
"""A sampler is a table of one program: test_samplers.py compares every coefficient of every one."""


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    folder = build(tmp_path_factory.mktemp("model") / request.param, request.param)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    return theirs, canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


def reference_picture(theirs: Any, scheduler: str, changes: dict[str, Any], steps: int, monkeypatch: Any) -> Any:
    """Latents and image of the reference, its step noise replaced by ours: generators differ, the law does not."""
    cls = getattr(diffusers, scheduler)
    theirs.scheduler = cls.from_config(theirs.scheduler.config, **changes)
    shape = (16, 16, 4)
    rows = iter(range(1000))

    def noise(like: Any, **_: Any) -> Any:
        row = next(rows)
        return nchw(np.asarray(step_noise(seed_keys(SEEDS), np.full(2, row, np.int32), shape)))

    module = __import__(cls.__module__, fromlist=["randn_tensor"])
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", noise)
    seen = {}
    with torch.no_grad():
        out = theirs(
            PROMPTS, negative_prompt=[NEGATIVE] * 2, num_inference_steps=steps, guidance_scale=5.0, output_type="np",
            latents=nchw(initial_noise(SEEDS, shape)), height=128, width=128,
            callback_on_step_end=lambda pipe, i, t, k: seen.update(latents=k["latents"]) or {},
        )  # fmt: skip
    return nhwc(seen["latents"]), out.images


@pytest.mark.parametrize(("pair", "name"), [
    pytest.param(*case, marks=() if i % 2 else pytest.mark.slow) for i, case in enumerate(CASES)
], indirect=["pair"])  # fmt: skip
def test_same_picture(name: str, pair: tuple[Any, canvax.Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    scheduler, changes = SAMPLERS[name]
    latents, images = reference_picture(theirs, scheduler, changes, STEPS, monkeypatch)
    got = ours(
        PROMPTS, NEGATIVE, num_inference_steps=STEPS, guidance_scale=5.0, seed=SEEDS[0], sampler=name, options=QUIET
    )
    assert relative_error(got.latents, latents) <= 1e-3
    assert psnr(got.pixels, images) >= 60


@pytest.mark.parametrize("name", ["DDIM", "Euler", "Heun"])
@pytest.mark.parametrize("pair", ["epsilon"], indirect=True)
def test_callbacks_of_diffusers(name: str, pair: tuple[Any, canvax.Pipeline]) -> None:
    """The same callback steers both: it gets the same tensors, and what it returns has the same effect."""
    theirs, ours = pair
    theirs.scheduler = getattr(diffusers, str(find(name)[0].diffusers_class)).from_config(theirs.scheduler.config)
    seen: dict[str, list[Any]] = {"theirs": [], "ours": []}

    def steer(where: str) -> Any:
        def on_step_end(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen[where].append((index, float(timestep), np.array(tensors["latents"])))
            if index == 2:
                tensors["latents"][:, 0] *= 0.5  # a channel, in place
            return {"latents": 0.9 * tensors["latents"]} if index in (1, 4) else tensors

        return on_step_end

    shape = (16, 16, 4)
    choice: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": 5.0, "height": 128, "width": 128}
    with torch.no_grad():
        want = theirs(
            PROMPTS[0], latents=nchw(initial_noise([3], shape)), output_type="np", **choice,
            callback_on_step_end=steer("theirs"),
        ).images  # fmt: skip
    got = ours(PROMPTS[0], seed=3, sampler=name, progress=False, callback_on_step_end=steer("ours"), **choice)
    for there, here in zip(seen["theirs"], seen["ours"], strict=True):
        assert there[0] == here[0]
        assert there[1] == pytest.approx(here[1], abs=1e-3)
        assert relative_error(here[2], there[2]) < 1e-3
    assert psnr(got.pixels, want) >= 60


@pytest.mark.slow
def test_what_we_save_diffusers_draws(tmp_path: Path, emoji: canvax.Pipeline) -> None:
    """The bundled model, saved by canvax and loaded by PyTorch diffusers: the same real picture."""
    folder = emoji.save(tmp_path / "saved")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    noise = initial_noise(SEEDS, LATENTS)
    want = theirs(PROMPTS, num_inference_steps=10, guidance_scale=3.5, output_type="np", latents=nchw(noise)).images
    got = emoji(PROMPTS, num_inference_steps=10, guidance_scale=3.5, seed=SEEDS[0], options=QUIET)
    assert psnr(got.pixels, want) >= 60


@pytest.mark.slow
def test_guidance_as_an_input(tmp_path: Path) -> None:
    """A latent consistency model: the network takes the scale, and no negative prompt is evaluated."""
    folder = build(tmp_path / "lcm", "epsilon", time_cond_proj_dim=24)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))
    noise = initial_noise(SEEDS, (16, 16, 4))
    latents = []
    for scale in (8.5, 1.0, 3.25):
        with torch.no_grad():
            want = theirs(
                PROMPTS, num_inference_steps=4, guidance_scale=scale, latents=nchw(noise), output_type="latent"
            ).images
        got = ours(PROMPTS, num_inference_steps=4, guidance_scale=scale, latents=noise, options=QUIET)
        assert relative_error(got.latents, nhwc(want)) < 1e-4
        assert got.compilations == 0 or not latents
        latents.append(got.latents)
    assert relative_error(latents[0], latents[2]) > 1e-2
    default = ours(PROMPTS, latents=noise, options=QUIET)
    assert default.metadata[0]["num_inference_steps"] == 4
    np.testing.assert_array_equal(default.latents, latents[0])
    again = canvax.load(ours.save(tmp_path / "saved"), dtype="float32", mesh=make_mesh(jax.devices()[:1]))
    np.testing.assert_array_equal(again(PROMPTS, latents=noise, options=QUIET).latents, latents[0])
    with pytest.raises(canvax.InputError) as caught:
        ours(PROMPTS, options=canvax.Options(guidance_steps=(1, 2, 3, 4)))
    assert caught.value.argument == "guidance_steps"
    with pytest.warns(canvax.errors.HintWarning, match="negative_prompt"):
        ours(PROMPTS, NEGATIVE, options=QUIET)
    with pytest.raises(canvax.CheckpointError):
        FlaxStableDiffusionPipeline.from_pretrained(folder)
    conditions = ours.encode(PROMPTS, guidance_scale=3.25)
    assert np.all(np.asarray(conditions["guidance"]) == 3.25)


def test_a_latent_consistency_model_against_its_own_pipeline(tmp_path: Path) -> None:
    """One step of their sampler, which adds no noise."""
    folder = build(tmp_path / "lcm", "epsilon", time_cond_proj_dim=24)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    theirs = diffusers.LatentConsistencyModelPipeline(
        **{**theirs.components, "image_encoder": None}, requires_safety_checker=False
    )
    theirs.scheduler = diffusers.LCMScheduler.from_config(theirs.scheduler.config)
    theirs.set_progress_bar_config(disable=True)
    theirs.save_pretrained(folder := tmp_path / "own")
    noise = initial_noise(SEEDS, (16, 16, 4))
    with torch.no_grad():
        want = theirs(
            PROMPTS, num_inference_steps=1, guidance_scale=8.5, latents=nchw(noise), output_type="latent"
        ).images
    ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))
    got = ours(PROMPTS, num_inference_steps=1, latents=noise, options=QUIET)
    assert relative_error(got.latents, nhwc(want)) < 1e-4
