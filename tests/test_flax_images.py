"""The old Flax names for images that begin from images: as their documents call them, and as everything else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.compile.monitor import compilations
from canvax.flax_api import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionInpaintPipeline,
    FlaxStableDiffusionPipeline,
    replicate,
    shard,
)
from canvax.flax_api.keys import encoding_noise, host_draw
from canvax.parallel.mesh import make_mesh
from canvax.types import Params
from tests.support.small_checkpoint import UNET, write_small_checkpoint

pytestmark = pytest.mark.slow  # test_flax_api has the common part

D, B, STEPS, SIZE = 2, 2, 4, 64
LATENTS = (B, 4, 8, 8)
QUIET = canvax.Options(progress=False)
PROMPTS = ["a fox in the snow", "a bridge", "a teapot", "a map"]
Old = tuple[FlaxStableDiffusionImg2ImgPipeline, Params]
OldInpaint = tuple[FlaxStableDiffusionInpaintPipeline, Params]


def certain(params: Params) -> Params:
    """Parameters whose image encoder has no spread, so that a sample of its latents is their mean."""
    quant = params["vae"]["quant_conv"]
    weight, bias = np.array(quant["weight"]), np.array(quant["bias"])
    weight[..., 4:], bias[4:] = 0, -30
    vae = {**params["vae"], "quant_conv": {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}}
    return {**params, "vae": vae}


def picture(seed: int, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """Something smooth."""
    y, x = np.mgrid[: size[1], : size[0]] / 16
    pixels = np.stack([np.sin(x + seed), np.cos(y - seed), np.sin(x * y / 4)], axis=-1) * 0.4 + 0.5
    return Image.fromarray(np.rint(pixels * 255).astype(np.uint8))


def disc(seed: int = 0, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """A mask with grey at its edge."""
    y, x = np.mgrid[: size[1], : size[0]] - SIZE / 2 + 4 * seed
    return Image.fromarray(np.uint8(np.clip(20 - np.hypot(x, y), 0, 1) * 255))


IMAGES = [picture(i) for i in range(D * B)]
MASKS = [disc(i) for i in range(D * B)]


@pytest.fixture(scope="module")
def folder(small_folder: Path) -> Path:
    return small_folder


@pytest.fixture(scope="module")
def old(folder: Path) -> Old:
    pipeline, params = FlaxStableDiffusionImg2ImgPipeline.from_pretrained(folder, safety_checker=None)
    return pipeline, certain(params)


@pytest.fixture(scope="module")
def copies(old: Old) -> Params:
    return replicate(old[1], jax.devices()[:D])


@pytest.fixture(scope="module")
def inpainting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unet = dataclasses.replace(UNET, in_channels=9)
    return write_small_checkpoint(tmp_path_factory.mktemp("old") / "inpainting", unet=unet)


@pytest.fixture(scope="module")
def old_inpaint(inpainting: Path) -> OldInpaint:
    pipeline, params = FlaxStableDiffusionInpaintPipeline.from_pretrained(inpainting)
    return pipeline, certain(params)


def stacked(*arrays: np.ndarray) -> list[np.ndarray]:
    """[D * B, ...] -> [D, B, ...]."""
    return [array.reshape(D, B, *array.shape[1:]) for array in arrays]


def keys(seed: int = 0) -> Any:
    return jax.random.split(jax.random.PRNGKey(seed), D)


def normal(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((D, *LATENTS), np.float32)


def channels_last(latents: np.ndarray) -> np.ndarray:
    return np.moveaxis(latents.reshape(-1, *latents.shape[2:]), 1, -1)


def psnr(got: Any, want: Any) -> float:
    return float(10 * np.log10(1 / max(np.mean((np.asarray(got, np.float64) - np.asarray(want)) ** 2), 1e-30)))


# Image to image


@pytest.mark.weekly
def test_documented_call(folder: Path) -> None:
    """The example of the old class, on eight devices."""
    pipeline, params = FlaxStableDiffusionImg2ImgPipeline.from_pretrained(folder, dtype=jnp.bfloat16)
    rng = jax.random.split(jax.random.PRNGKey(0), jax.device_count())
    init_img = picture(1, (100, 70)).resize((96, 64))
    num_samples = jax.device_count()
    prompt_ids, processed_image = pipeline.prepare_inputs(
        prompt=["a valley, oil on canvas"] * num_samples, image=[init_img] * num_samples
    )
    assert processed_image.shape == (8, 3, 64, 96)
    output = pipeline(
        prompt_ids=shard(prompt_ids),
        image=shard(processed_image),
        params=replicate(params),
        prng_seed=rng,
        strength=0.75,
        num_inference_steps=STEPS,
        jit=True,
        height=64,
        width=96,
    ).images
    assert output.shape == (8, 1, 64, 96, 3)
    output_images = pipeline.numpy_to_pil(np.asarray(output.reshape((num_samples, *output.shape[-3:]))))
    assert [image.size for image in output_images] == [(96, 64)] * 8
    assert len({image.tobytes() for image in output_images}) == 8  # each device has its own key


def test_prepared_images(old: Old) -> None:
    pipeline, _ = old
    ids, images = pipeline.prepare_inputs("a fox", picture(1, (100, 70)))
    assert (ids.shape, images.shape, images.dtype) == ((1, 77), (1, 3, 64, 96), np.float32)
    want = np.asarray(picture(1, (100, 70)).resize((96, 64), Image.Resampling.LANCZOS), np.float32)
    np.testing.assert_allclose(np.moveaxis(images[0], 0, -1), want / 127.5 - 1, atol=1e-6)
    assert pipeline.prepare_inputs(["a fox"] * 3, IMAGES[0])[1].shape == (3, 3, SIZE, SIZE)  # one for all, to shard
    black_and_white = np.zeros((32, 64), np.uint8)
    black_and_white[:, 32:] = 255
    assert set(np.unique(pipeline.prepare_inputs("a fox", black_and_white)[1])) == {-1, 1}


@pytest.mark.parametrize("strength", [0.5, pytest.param(1.0, marks=pytest.mark.weekly)])
def test_every_way_draws_the_same(strength: float, old: Old, copies: Params, folder: Path) -> None:
    """jit=True, jit=False and the native pipeline, from the same noise."""
    pipeline, params = old
    ids, images = stacked(*pipeline.prepare_inputs(PROMPTS, IMAGES))
    negative = pipeline.prepare_inputs(["grey"] * (D * B), IMAGES)[0].reshape(ids.shape)
    noise, choice = normal(), {"strength": strength, "num_inference_steps": STEPS, "guidance_scale": 5.0}
    got = pipeline(ids, images, copies, keys(), **choice, noise=noise, neg_prompt_ids=negative, jit=True).images
    native = canvax.load(folder, mesh=make_mesh(jax.devices()[:1]))
    want = native(PROMPTS, "grey", image=IMAGES, **choice, latents=channels_last(noise), options=QUIET)
    assert got.dtype == np.float32
    assert psnr(got.reshape(want.pixels.shape), want.pixels) >= 60
    assert psnr(got[0, 0], got[0, 1]) < 40
    single = pipeline(
        ids[1], images[1], params, jax.random.key(0), **choice, noise=noise[1], neg_prompt_ids=negative[1]
    )
    assert single.nsfw_content_detected is False
    assert psnr(single.images, got[1]) >= 60


def test_nothing_recompiles(old: Old, copies: Params) -> None:
    pipeline, _ = old
    ids, images = stacked(*pipeline.prepare_inputs(PROMPTS, IMAGES))
    pipeline(ids, images, copies, keys(), num_inference_steps=STEPS, jit=True)
    before = compilations()
    for strength, steps, guidance in ((0.3, 10, 7), (1.0, 3, 3.0), (0.99, 70, np.full((D, B), 2.0))):
        pipeline(ids, -images, copies, keys(steps), strength, steps, guidance_scale=guidance, jit=True)
    pipeline(ids, images[:, :1], copies, keys(), num_inference_steps=STEPS, jit=True)
    assert compilations() == before


@pytest.mark.weekly
def test_strength_is_how_much_changes(old: Old) -> None:
    pipeline, params = old
    ids, images = pipeline.prepare_inputs(PROMPTS[:B], IMAGES[:B])

    def draw(strength: float, image: np.ndarray) -> np.ndarray:
        return pipeline(ids, image, params, jax.random.key(0), strength, 10).images

    changes = [np.abs(draw(strength, images) - draw(strength, -images)).mean() for strength in (0.1, 0.5, 1.0)]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < changes[0] / 2


def test_one_image_for_all(old: Old, copies: Params) -> None:
    pipeline, params = old
    ids, images = stacked(*pipeline.prepare_inputs(PROMPTS, IMAGES[0]))

    def draw(image: np.ndarray) -> np.ndarray:
        return pipeline(ids, image, copies, keys(), num_inference_steps=STEPS, jit=True).images

    want = draw(images)
    for few in (images[:, :1], images[:1], images[:1, :1]):
        np.testing.assert_array_equal(draw(few), want)
    key = keys()[1]
    single = [
        pipeline(ids[1], few, params, key, num_inference_steps=STEPS).images for few in (images[0], images[0, :1])
    ]
    np.testing.assert_array_equal(*single)
    assert psnr(single[0], want[1]) >= 60


def test_noise_of_the_encoding_is_another(old: Old, folder: Path) -> None:
    """Latents of an image are a sample, and its noise is not that which is added to them."""
    pipeline, params = old
    some, shape = jax.random.split(jax.random.key(5), 4), (16, 4, 16, 16)
    noise, encoding = host_draw(some, shape)[0], encoding_noise(some, shape)
    assert noise.shape == encoding.shape == (64, 16, 16, 4)
    assert not np.isin(encoding, noise).mean() > 0.1
    assert abs(np.corrcoef(noise.ravel(), encoding.ravel())[0, 1]) < 0.02
    for i, key in enumerate(some):  # the old inpainting class's law
        want = jax.random.normal(jax.random.split(key)[1], (16, 16, 16, 4))
        np.testing.assert_array_equal(encoding[16 * i : 16 * i + 16], want)
    _, wide = FlaxStableDiffusionImg2ImgPipeline.from_pretrained(folder)
    ids, images = pipeline.prepare_inputs("a fox", IMAGES[0])

    def draw(params: Params, seed: int) -> np.ndarray:
        noise = normal()[0, :1]
        key = jax.random.key(seed)
        return pipeline(ids, images, params, key, 0.25, STEPS, noise=noise).images

    np.testing.assert_allclose(draw(params, 1), draw(params, 2), atol=1e-5)
    assert np.abs(draw(wide, 1) - draw(wide, 2)).max() > 1e-3


@pytest.mark.weekly
def test_another_size_than_that_of_the_image(old: Old) -> None:
    pipeline, params = old
    ids, images = pipeline.prepare_inputs("a fox", picture(1, (96, 64)))
    key, choice = jax.random.key(0), {"strength": 0.5, "num_inference_steps": STEPS}
    assert pipeline(ids, images, params, key, **choice).images.shape == (1, 64, 96, 3)
    narrow = pipeline(ids, images, params, key, **choice, height=64, width=64).images
    _, resized = pipeline.prepare_inputs("a fox", picture(1, (96, 64)).resize((64, 64), Image.Resampling.LANCZOS))
    assert psnr(narrow, pipeline(ids, resized, params, key, **choice).images) > 40


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no device axis": ({"image": np.zeros((4, 3, 64, 64))}, r"image has shape \(4, 3, 64, 64\).*shard"),
    "channels last": ({"image": np.zeros((D, B, 64, 64, 3))}, r"takes \[2, 2, 3, H, W\]"),
    "PIL": ({"image": IMAGES[0]}, r"image has shape \(64, 64, 3\).*prepare_inputs"),
    "NaN": ({"image": np.full((D, B, 3, 64, 64), np.nan)}, r"not in -1\.\.1"),
    "bytes": ({"image": np.full((D, B, 3, 64, 64), 255, np.uint8)}, r"not in -1\.\.1"),
    "odd size": ({"image": np.zeros((D, B, 3, 60, 64))}, "height=60 is not divisible by 8"),
    "strength": ({"strength": 1.5}, r"strength=1.5 is not a number in 0\.\.1"),
    "strength of NaN": ({"strength": float("nan")}, "strength=nan"),
    "no step": ({"strength": 0.1}, "less than one step"),
    "noise": ({"noise": np.zeros((D, B, 8, 8, 4))}, r"noise has shape.*\(2, 2, 4, 8, 8\)"),
    "mask": ({"mask": 1}, "FlaxStableDiffusionInpaintPipeline has it"),
    "one key": ({"prng_seed": np.zeros(2, np.uint32)}, r"jax.random.split\(prng_seed, 2\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, old: Old, copies: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = BAD[name]
    pipeline, _ = old
    monkeypatch.setattr(type(pipeline), "_run", None)  # where programs are made
    ids, images = stacked(*pipeline.prepare_inputs(PROMPTS, IMAGES))
    arguments = {"prompt_ids": ids, "image": images, "params": copies, "prng_seed": keys(), "num_inference_steps": 4}
    with pytest.raises(canvax.InputError, match=message):
        pipeline(**arguments | {"jit": True} | changes)


def test_bad_images(old: Old) -> None:
    pipeline, params = old
    for image, message in (
        (Image.new("RGB", (31, 64)), "31 x 64; both sides need 32 pixels"),
        ([picture(0), picture(0, (96, 64))], "several sizes, 64 x 64, 96 x 64"),
    ):
        with pytest.raises(canvax.InputError, match=message):
            pipeline.prepare_inputs(PROMPTS[:2], image)
    with pytest.raises(canvax.InputError, match="prompt=3"):
        pipeline.prepare_inputs(3, picture(0))  # pyright: ignore[reportArgumentType]
    ids, images = pipeline.prepare_inputs("a fox", picture(0))
    with pytest.raises(canvax.InputError, match=r"image has shape.*pass what prepare_inputs returned"):
        pipeline(ids, shard(np.repeat(images, 8, axis=0)), params, jax.random.key(0))
    key = jax.random.key(0)
    with pytest.raises(canvax.InputError, match="image is traced by JAX"):
        jax.jit(lambda image: pipeline(ids, image, params, key).images)(images)
    with pytest.raises(AttributeError, match=r"_generate: with images.*call the pipeline"):
        pipeline._generate  # noqa: B018


# Inpainting


@pytest.mark.weekly
def test_documented_inpainting(inpainting: Path) -> None:
    """The example of the old class, on eight devices."""
    pipeline, params = FlaxStableDiffusionInpaintPipeline.from_pretrained(inpainting)
    num_samples = jax.device_count()
    prompt_ids, processed_masked_images, processed_masks = pipeline.prepare_inputs(
        ["a yellow cat"] * num_samples, num_samples * [picture(1)], num_samples * [disc()]
    )
    images = pipeline(
        shard(prompt_ids),
        shard(processed_masks),
        shard(processed_masked_images),
        replicate(params),
        jax.random.split(jax.random.PRNGKey(0), num_samples),
        STEPS,
        jit=True,
    ).images
    assert images.shape == (8, 1, SIZE, SIZE, 3)
    images = pipeline.numpy_to_pil(np.asarray(images.reshape((num_samples, *images.shape[-3:]))))
    assert len({image.tobytes() for image in images}) == 8


def test_prepared_masks(old_inpaint: OldInpaint) -> None:
    pipeline, _ = old_inpaint
    grey = Image.fromarray(np.repeat(np.uint8([[0, 127, 128, 255]]), 64, axis=0).repeat(16, axis=1))
    ids, images, masks = pipeline.prepare_inputs(["a fox"] * 2, IMAGES[:2], grey)
    assert (ids.shape, images.shape, masks.shape) == ((2, 77), (2, 3, SIZE, SIZE), (2, 1, SIZE, SIZE))
    assert images.dtype == masks.dtype == np.float32
    np.testing.assert_array_equal(masks[0, 0, 0, ::16], [0, 0, 1, 1])
    assert (images[:, :, :, 32:] == 0).all()
    want = np.asarray(IMAGES[1], np.float32)[:, :32] / 127.5 - 1
    np.testing.assert_allclose(np.moveaxis(images[1, :, :, :32], 0, -1), want, atol=1e-6)
    with pytest.raises(canvax.InputError, match="mask is 32 x 64 and image 64 x 64"):
        pipeline.prepare_inputs("a fox", IMAGES[0], disc(0, (32, 64)))


def test_every_way_inpaints_the_same(old_inpaint: OldInpaint, inpainting: Path) -> None:
    pipeline, params = old_inpaint
    ids, images, masks = stacked(*pipeline.prepare_inputs(PROMPTS, IMAGES, MASKS))
    latents, choice = normal(), {"num_inference_steps": STEPS, "guidance_scale": 5.0}
    copies = replicate(params, jax.devices()[:D])
    got = pipeline(ids, masks, images, copies, keys(), **choice, latents=latents, jit=True).images
    native = canvax.load(inpainting, mesh=make_mesh(jax.devices()[:1]))
    want = native(PROMPTS, image=IMAGES, mask=MASKS, **choice, latents=channels_last(latents), options=QUIET)
    got = got.reshape(want.pixels.shape)
    holes = np.stack([np.asarray(mask) >= 128 for mask in MASKS])
    assert psnr(got[holes], want.pixels[holes]) >= 60  # elsewhere the native pipeline pastes the given pixels
    single = pipeline(ids[1], masks[1], images[1], params, jax.random.key(0), **choice, latents=latents[1])
    assert psnr(single.images, got[B:]) >= 60
    before = compilations()
    pipeline(ids, masks[:, ::-1], -images, copies, keys(1), 7, guidance_scale=3, jit=True)
    pipeline(ids[1], masks[0], images[0], params, jax.random.key(1), 9)
    assert compilations() == before
    # One image and one mask for all, and a hole that was not cut out.
    whole = np.moveaxis(np.asarray(IMAGES[2], np.float32) / 127.5 - 1, -1, 0)[None]
    args = {"latents": latents[1], "num_inference_steps": STEPS}
    few = pipeline(ids[1], masks[1, :1], whole, params, jax.random.key(0), **args).images
    many = [np.repeat(array[1, :1], B, axis=0) for array in (masks, images)]
    np.testing.assert_array_equal(pipeline(ids[1], *many, params, jax.random.key(0), **args).images, few)


@pytest.mark.weekly
def test_size_of_an_inpainted_image(old_inpaint: OldInpaint) -> None:
    """The model's own, as it was; masked image and mask are resized to it."""
    pipeline, params = old_inpaint
    ids, images, masks = pipeline.prepare_inputs("a fox", picture(1, (128, 96)), disc(0, (128, 96)))
    key = jax.random.key(0)
    assert pipeline(ids, masks, images, params, key, STEPS).images.shape == (1, SIZE, SIZE, 3)
    assert pipeline(ids, masks, images, params, key, STEPS, height=96, width=128).images.shape == (1, 96, 128, 3)


def test_bad_inpainting(old_inpaint: OldInpaint, folder: Path, inpainting: Path) -> None:
    pipeline, params = old_inpaint
    ids, images, masks = pipeline.prepare_inputs(PROMPTS[:B], IMAGES[:B], MASKS[:B])
    arguments = {"prompt_ids": ids, "mask": masks, "masked_image": images, "params": params}
    for changes, message in (
        ({"mask": images}, r"mask has shape.*takes \[2, 1, H, W\]"),
        ({"mask": masks[:, :, :32]}, "mask is 64 x 32 and masked_image 64 x 64"),
        ({"mask": 255 * masks}, r"mask has values that are not in 0\.\.1"),
        ({"mask": np.full_like(masks, np.nan)}, r"mask has values that are not in 0\.\.1"),
        ({"masked_image": masks}, r"masked_image has shape.*takes \[2, 3, H, W\]"),
        ({"masked_image": np.full_like(images, np.nan)}, "masked_image has values"),
        ({"latents": normal()}, "latents has shape"),
        ({"strength": 0.5}, "FlaxStableDiffusionImg2ImgPipeline has it"),
    ):
        with pytest.raises(canvax.InputError, match=message):
            pipeline(**arguments | {"prng_seed": jax.random.key(0)} | changes)
    with pytest.raises(canvax.CheckpointError, match=r"4 channels and not 9; write pipe = canvax\.load.*image=, mask="):
        FlaxStableDiffusionInpaintPipeline.from_pretrained(folder)
    for cls in (FlaxStableDiffusionPipeline, FlaxStableDiffusionImg2ImgPipeline):
        with pytest.raises(canvax.CheckpointError, match=r"FlaxStableDiffusionInpaintPipeline or canvax\.load"):
            cls.from_pretrained(inpainting)


@pytest.mark.parametrize("name", ["Img2Img", "Inpaint"])
def test_saved_by_the_old_classes(name: str, old: Old, old_inpaint: OldInpaint, tmp_path: Path) -> None:
    """Their names stand in model_index.json."""
    pipeline, params = old if name == "Img2Img" else old_inpaint
    folder = pipeline.save_pretrained(tmp_path / "model", params)
    index = (folder / "model_index.json").read_text()
    (folder / "model_index.json").write_text(
        index.replace('"StableDiffusionPipeline"', f'"FlaxStableDiffusion{name}Pipeline"')
    )
    type(pipeline).from_pretrained(folder)
