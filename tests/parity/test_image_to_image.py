"""Image to image against PyTorch diffusers: same checkpoint, same image, same noise."""

from __future__ import annotations

from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image

import canvax
from canvax.compile.additions import ReadsImage
from canvax.compile.kinds import Kinds
from canvax.denoise import step_noise
from canvax.flax_api import FlaxStableDiffusionImg2ImgPipeline
from canvax.flax_api.keys import encoding_noise, host_draw
from canvax.noise import initial_noise, seed_keys
from canvax.parallel.mesh import make_mesh

from .reference import given_noise, nchw, nhwc, psnr, relative_error
from .test_pipeline import NEGATIVE, PROMPTS, SEEDS, build

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of diffusers' DEIS
QUIET = canvax.Options(progress=False)
SIZE, LATENTS = 128, (16, 16, 4)
SAMPLERS = {
    "DDIM": ("DDIMScheduler", {}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DEISMultistepScheduler": ("DEISMultistepScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
}
CASES = [("DDIM", 0.75), ("DPM++ 2M Karras", 0.5), ("Euler a", 0.3), ("Heun", 0.75), ("DDIM", 1.0)]
"""The strength decides at which row of the sampler's table a run begins."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    folder = build(tmp_path_factory.mktemp("model") / "base", "epsilon")
    theirs = diffusers.StableDiffusionImg2ImgPipeline.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    theirs.own_config = theirs.scheduler.config  # a config made of another scheduler's keeps its fields
    return theirs, canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


def photo(seed: int, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """Something smooth with noise on it."""
    y, x = np.mgrid[: size[1], : size[0]] / 16
    pixels = np.stack([np.sin(x + seed), np.cos(y - seed), np.sin(x * y / 4)], axis=-1) * 0.4 + 0.5
    noisy = pixels + 0.05 * np.random.default_rng(seed).standard_normal(pixels.shape)
    return Image.fromarray(np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8))


def replay(theirs: Any, scheduler: str, changes: dict[str, Any], first_row: int, patch: pytest.MonkeyPatch) -> None:
    """The reference draws our noise: first that of the start, then a row's for each step."""
    theirs.scheduler = getattr(diffusers, scheduler).from_config(dict(theirs.own_config), **changes)
    rows = iter(range(first_row, 1000))

    def start(*_: Any, **__: Any) -> Any:
        return nchw(initial_noise(SEEDS, LATENTS))

    def of_step(*_: Any, **__: Any) -> Any:
        return nchw(np.asarray(step_noise(seed_keys(SEEDS), np.full(2, next(rows), np.int32), LATENTS)))

    patch.setattr("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img.randn_tensor", start)
    module = __import__(type(theirs.scheduler).__module__, fromlist=["randn_tensor"])
    if hasattr(module, "randn_tensor"):
        patch.setattr(module, "randn_tensor", of_step)


@pytest.mark.parametrize(("name", "strength"), CASES)
def test_same_image(name: str, strength: float, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    steps = 10
    rows = (steps - int(steps * strength)) * (2 if name == "Heun" else 1)
    replay(theirs, *SAMPLERS[name], rows, monkeypatch)
    moments = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    monkeypatch.setattr(moments, "sample", lambda self, *_: self.mode())  # their noise of the encoder, left out
    seen = []
    with torch.no_grad():
        want = theirs(
            PROMPTS, image=[photo(1), photo(2)], negative_prompt=[NEGATIVE] * 2, strength=strength,
            num_inference_steps=steps, guidance_scale=5.0, output_type="np",
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        ).images  # fmt: skip
    got = ours(
        PROMPTS, NEGATIVE, image=[photo(1), photo(2)], strength=strength, num_inference_steps=steps,
        guidance_scale=5.0, seed=SEEDS, sampler=name, options=QUIET,
    )  # fmt: skip
    assert psnr(got.pixels, want) >= 60
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3


@pytest.mark.weekly
def test_old_class(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old Flax name, also with the noise of the encoding."""
    theirs, _ = pair
    theirs.scheduler = diffusers.DDIMScheduler.from_config(dict(theirs.own_config))
    pipeline, params = FlaxStableDiffusionImg2ImgPipeline.from_pretrained(theirs.name_or_path)
    key, images = jax.random.key(7), [photo(1), photo(2)]
    noise, encoding = host_draw(key[None], (2, 4, 16, 16))[0], encoding_noise(key[None], (2, 4, 16, 16))
    moments = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    monkeypatch.setattr(moments, "sample", lambda self, *_: self.mean + self.std * nchw(encoding))
    where = "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img.randn_tensor"
    monkeypatch.setattr(where, lambda *_, **__: nchw(noise))
    choice = {"strength": 0.75, "num_inference_steps": 10, "guidance_scale": 5.0}
    with torch.no_grad():
        want = theirs(PROMPTS, image=images, negative_prompt=[NEGATIVE] * 2, **choice, output_type="np").images
    (ids, pixels), (negative, _) = (pipeline.prepare_inputs(text, images) for text in (PROMPTS, [NEGATIVE] * 2))
    got = pipeline(ids, pixels, params, key, neg_prompt_ids=negative, **choice).images
    assert psnr(got, want) >= 60


@pytest.mark.parametrize("task", ["Img2Img", "Inpaint"])
def test_a_generator_draws_as_there(task: str, pair: Any) -> None:
    """First the encoder's sample, then the noise; nothing of the reference is replaced."""
    base, ours = pair
    theirs = getattr(diffusers, f"StableDiffusion{task}Pipeline")(**base.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    theirs.scheduler = diffusers.DDIMScheduler.from_config(dict(base.own_config))
    square = Image.new("L", (SIZE, SIZE), 0)
    square.paste(255, (32, 16, 96, 80))
    masked = task == "Inpaint"
    more: dict[str, Any] = {"mask_image": [square] * 2, "height": SIZE, "width": SIZE} if masked else {}
    choice = {"image": [photo(1), photo(2)], "strength": 0.75, "num_inference_steps": 6, "guidance_scale": 5.0}
    seen: list[Any] = []
    with torch.no_grad():
        theirs(
            PROMPTS, negative_prompt=[NEGATIVE] * 2, generator=generators(), output_type="latent", **choice, **more,
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    more = {"mask": square, "mask_blend": "renoised"} if masked else {}
    got = ours(PROMPTS, NEGATIVE, generator=generators(), sampler="DDIM", progress=False, **choice, **more)
    assert psnr(got.latents, nhwc(seen[-1]), peak=float(seen[-1].abs().max())) >= 80


def generators() -> list[Any]:
    return [torch.Generator().manual_seed(seed) for seed in SEEDS]


def test_moments(pair: Any) -> None:
    theirs, ours = pair
    image = np.asarray(photo(3), np.float32) / 255
    with torch.no_grad():
        want = theirs.vae.encode(torch.from_numpy(np.moveaxis(2 * image - 1, -1, 0)[None])).latent_dist
    factor = theirs.vae.config.scaling_factor
    latents = ours.model.networks.latent_shape(1, SIZE, SIZE)
    program = ours.programs.program("image encoder", ours.params, latents, Kinds().adding(ReadsImage("whole")))
    mean, deviation = program(ours.params, image[None])
    assert relative_error(mean, nhwc(want.mean) * factor) < 1e-5
    assert relative_error(deviation, nhwc(want.std) * factor) < 1e-5


@pytest.mark.weekly
def test_image_encoding(pair: Any) -> None:
    """A sample is another for each seed, and the same for the same."""
    _, ours = pair

    def latents(**changes: Any) -> np.ndarray:
        return ours("a cat", image=photo(1), strength=0.2, num_inference_steps=5, progress=False, **changes).latents

    mean, one, other = (latents(seed=1), *(latents(seed=seed, image_encoding="sample") for seed in (1, 2)))
    assert relative_error(one, mean) > 1e-4
    assert relative_error(one, other) > 1e-4
    np.testing.assert_array_equal(one, latents(seed=1, image_encoding="sample"))


@pytest.mark.slow
def test_nothing_recompiles(pair: Any) -> None:
    _, ours = pair
    first = {"image": photo(1), "seed": 1, "num_inference_steps": 4, "progress": False}
    ours("a cat", **first)
    ours("a cat", **first, mask=Image.new("L", (SIZE, SIZE), 255))
    for changes in (
        {"strength": 0.5}, {"strength": 1.0, "sampler": "DPM++ 2M"}, {"image": np.asarray(photo(4))},
        {"strength_rule": "a1111", "strength": 0.1}, {"strength_rule": "exact", "strength": 0.4},
        {"image": photo(5, (200, 90)), "height": SIZE, "width": SIZE}, {"image_encoding": "sample"},
        {"mask": photo(6)}, {"mask": photo(7), "mask_mode": "graded", "mask_blur": 3},
    ):  # fmt: skip
        assert ours("a dog", **first | changes).compilations == 0


def mask(seed: int) -> Image.Image:
    """A disc, with grey at its edge."""
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2 + 4 * seed
    return Image.fromarray(np.uint8(np.clip(40 - np.hypot(x, y), 0, 1) * 255))


@pytest.fixture(scope="module")
def of_nine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    """A small model whose UNet has 9 channels."""
    folder = build(tmp_path_factory.mktemp("model") / "inpainting", "epsilon", in_channels=9)
    theirs = diffusers.StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    theirs.own_config = theirs.scheduler.config
    return theirs, canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


@pytest.mark.parametrize(
    ("strength", "sampler"),
    [(0.6, "Euler"), pytest.param(1.0, "DPM++ 2M Karras", marks=pytest.mark.weekly)],
)
@pytest.mark.slow
def test_inpainting_unet(
    strength: float, sampler: str, of_nine: tuple[Any, canvax.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UNet of 9 channels, which sees the mask and the masked image."""
    theirs, ours = of_nine
    cls, changes = SAMPLERS[sampler]
    theirs.scheduler = getattr(diffusers, cls).from_config(dict(theirs.own_config), **changes)
    given_noise(monkeypatch, theirs, initial_noise(SEEDS, LATENTS))
    images, masks = [photo(1), photo(2)], [mask(1), mask(3)]
    seen = []
    with torch.no_grad():
        theirs(
            PROMPTS, image=images, mask_image=masks, height=SIZE, width=SIZE, negative_prompt=[NEGATIVE] * 2,
            strength=strength, num_inference_steps=6, guidance_scale=5.0, output_type="np",
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    choice = {"seed": SEEDS, "num_inference_steps": 6, "guidance_scale": 5.0, "sampler": sampler, "options": QUIET}
    got = ours(PROMPTS, NEGATIVE, image=images, mask=masks, strength=strength, **choice)
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3
    kept = np.asarray(masks[0]) == 0
    np.testing.assert_array_equal(np.asarray(got.images[0])[kept], np.asarray(images[0])[kept])
    # Without an image all of it is masked, and with another image nothing compiles.
    assert np.isfinite(ours(PROMPTS, **choice).pixels).all()
    assert ours(PROMPTS, image=photo(5), mask=masks[0], **choice).compilations == 0
    assert "strength" not in ours(PROMPTS, **choice).metadata[0]


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.slow
def test_a_generator_draws_as_there_for_an_inpainting_unet(strength: float, of_nine: Any) -> None:
    """At full strength the noise comes first, since the image is not encoded; the masked image is always last."""
    theirs, ours = of_nine
    theirs.scheduler = diffusers.DDIMScheduler.from_config(dict(theirs.own_config))
    choice = {"image": [photo(1), photo(2)], "strength": strength, "num_inference_steps": 6, "guidance_scale": 5.0}
    masks: list[Any] = [mask(1), mask(3)]
    seen: list[Any] = []
    with torch.no_grad():
        theirs(
            PROMPTS, mask_image=masks, height=SIZE, width=SIZE, negative_prompt=[NEGATIVE] * 2, generator=generators(),
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values, **choice,
        )  # fmt: skip
    got = ours(PROMPTS, NEGATIVE, mask=masks, generator=generators(), sampler="DDIM", progress=False, **choice)
    assert psnr(got.latents, nhwc(seen[-1]), peak=float(seen[-1].abs().max())) >= 80


INPAINTED = [(1.0, "DDIM"), (0.5, "Euler"), (0.75, "DPM++ 2M"), (0.5, "DEISMultistepScheduler")]


@pytest.mark.parametrize(("strength", "sampler"), INPAINTED)
def test_inpainting_of_diffusers(
    strength: float, sampler: str, pair: tuple[Any, canvax.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UNet of 4 channels, where diffusers puts the known latents with their noise in after each step."""
    base, ours = pair
    theirs = diffusers.StableDiffusionInpaintPipeline(**base.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    cls, changes = SAMPLERS[sampler]
    theirs.scheduler = getattr(diffusers, cls).from_config(dict(base.own_config), **changes)
    given_noise(monkeypatch, theirs, initial_noise(SEEDS, LATENTS))
    square = Image.new("L", (SIZE, SIZE), 0)
    square.paste(255, (32, 16, 96, 80))  # of whole latents: diffusers takes every eighth pixel of a mask
    images, seen = [photo(1), photo(2)], []
    with torch.no_grad():
        theirs(
            PROMPTS, image=images, mask_image=[square] * 2, height=SIZE, width=SIZE, negative_prompt=[NEGATIVE] * 2,
            strength=strength, num_inference_steps=6, guidance_scale=5.0, output_type="np",
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    choice = {"seed": SEEDS, "num_inference_steps": 6, "guidance_scale": 5.0, "sampler": sampler, "progress": False}
    choice |= {"image": images, "mask": square, "strength": strength}
    got = ours(PROMPTS, NEGATIVE, **choice, mask_blend="renoised")
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3
    apart = relative_error(ours(PROMPTS, NEGATIVE, **choice).latents, nhwc(seen[-1]))
    if sampler in ("DDIM", "DEISMultistepScheduler"):  # whose last level is not 0 here, so that its noise stays
        assert apart > 1e-3
    elif strength < 1:  # known latents in place of D leave the same noise in x: one form is the other
        assert apart < 1e-4
