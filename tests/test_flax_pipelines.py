"""The old Flax pipelines: the same pictures as the native pipeline, whichever way they are called.

``guide`` has the documents' own scripts. ``test_flax_parts`` has the networks one by one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax import flax_api
from canvax.compile.monitor import counting
from canvax.flax_api import replicate, shard, unreplicate
from canvax.flax_api.keys import encoding_noise, host_draw
from canvax.parallel.mesh import over_batch
from canvax.types import Params
from tests.support.drawing import one_device, psnr
from tests.support.refusals import refused
from tests.support.small_checkpoint import UNET, write_small_checkpoint
from tests.support.small_sdxl import build, build_refiner

D, B, STEPS, SIZE = 2, 2, 4, 64
LATENTS = (B, 4, 8, 8)
PROMPTS = ["a fox in the snow", "a bridge", "a teapot", "a map"]
KEY = jax.random.PRNGKey


def picture(seed: int, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """Something smooth."""
    y, x = np.mgrid[: size[1], : size[0]] / 16
    pixels = np.stack([np.sin(x + seed), np.cos(y - seed), np.sin(x * y / 4)], axis=-1) * 0.4 + 0.5
    return Image.fromarray(np.rint(pixels * 255).astype(np.uint8))


def disc(seed: int = 0, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """A mask with grey at its edge."""
    y, x = np.mgrid[: size[1], : size[0]] - SIZE / 2 + 4 * seed
    return Image.fromarray(np.uint8(np.clip(20 - np.hypot(x, y), 0, 1) * 255))


IMAGES, MASKS = ([make(i) for i in range(D * B)] for make in (picture, disc))


def keys(seed: int = 0) -> Any:
    return jax.random.split(KEY(seed), D)


def normal(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((D, *LATENTS), np.float32)


def channels_last(latents: Any) -> np.ndarray:
    """[D, B, C, h, w] -> [D * B, h, w, C]."""
    return np.moveaxis(np.asarray(latents).reshape(-1, *latents.shape[2:]), 1, -1)


@dataclass
class Old:
    """An old pipeline of a folder, what it is given, and the native pipeline.

    Attributes:
        kind: text, image, mask or xl.
        noise: its argument for the noise.
    """

    kind: str
    folder: Path
    pipeline: Any = field(init=False)
    params: Params = field(init=False)

    def __post_init__(self) -> None:
        cls = getattr(flax_api, CLASSES[self.kind])
        self.pipeline, self.params = cls.from_pretrained(self.folder, safety_checker=None)
        if self.kind in ("image", "mask"):
            self.params = certain(self.params)
        self.noise = "noise" if self.kind == "image" else "latents"

    @cached_property
    def copies(self) -> Params:
        """Parameters on two devices; the guide's tests have eight."""
        return replicate(self.params, jax.devices()[:D])

    @cached_property
    def native(self) -> canvax.Pipeline:
        return canvax.load(self.folder, mesh=one_device(), progress=False)

    def prepared(self, prompts: list[str], images: Any = IMAGES, masks: Any = MASKS) -> dict[str, np.ndarray]:
        """Return arrays without a device axis."""
        names = {"image": ["image"], "mask": ["masked_image", "mask"]}.get(self.kind, [])
        given = [images, masks][: len(names)]
        arrays = self.pipeline.prepare_inputs(prompts, *given)
        return dict(zip(["prompt_ids", *names], arrays if names else [arrays], strict=True))

    def arrays(self, device: int | None = None) -> dict[str, np.ndarray]:
        """Return what the call of all devices takes, or of one."""
        stacked = {name: one.reshape(D, B, *one.shape[1:]) for name, one in self.prepared(PROMPTS).items()}
        return stacked if device is None else {name: one[device] for name, one in stacked.items()}

    def negative(self, text: str = "grey") -> np.ndarray:
        ids = self.prepared([text] * (D * B))["prompt_ids"]
        return ids.reshape(D, B, *ids.shape[1:])

    def __call__(self, **changes: Any) -> Any:
        """Draw on both devices."""
        usual = {"params": self.copies, "prng_seed": keys(), "num_inference_steps": STEPS, "jit": True}
        return self.pipeline(**self.arrays() | usual | changes).images

    def alone(self, device: int = 1, **changes: Any) -> Any:
        """Draw what one device draws, without a device axis."""
        usual = {"params": self.params, "prng_seed": keys()[device], "num_inference_steps": STEPS}
        return self.pipeline(**self.arrays(device) | usual | changes).images

    def want(self, negative: str | None, noise: np.ndarray, **changes: Any) -> np.ndarray:
        """Draw with the native pipeline."""
        given = {"image": {"image": IMAGES}, "mask": {"image": IMAGES, "mask": MASKS}}.get(self.kind, {})
        call = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "progress": False, **given, **changes}
        return self.native(PROMPTS, negative, latents=channels_last(noise), **call).pixels


CLASSES = {
    "text": "FlaxStableDiffusionPipeline", "image": "FlaxStableDiffusionImg2ImgPipeline",
    "mask": "FlaxStableDiffusionInpaintPipeline", "xl": "FlaxStableDiffusionXLPipeline",
}  # fmt: skip
KINDS = ["text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("image", "mask", "xl"))]
every_kind = pytest.mark.parametrize("kind", KINDS)


def certain(params: Params) -> Params:
    """Parameters whose image encoder has no spread, so that a sample of its latents is their mean."""
    quant = params["vae"]["quant_conv"]
    weight, bias = np.array(quant["weight"]), np.array(quant["bias"])
    weight[..., 4:], bias[4:] = 0, -30
    vae = {**params["vae"], "quant_conv": {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}}
    return {**params, "vae": vae}


class Olds(dict[str, Old]):
    def __init__(self, root: Path, small: Path) -> None:
        super().__init__()
        self.root, self.small = root, small

    def __missing__(self, kind: str) -> Old:
        folder = self.small
        if kind == "mask":
            folder = write_small_checkpoint(self.root / kind, unet=dataclasses.replace(UNET, in_channels=9))
        elif kind == "xl":
            folder = build(self.root / kind)
        self[kind] = Old(kind, folder)
        return self[kind]


@pytest.fixture(scope="module")
def olds(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Olds:
    return Olds(tmp_path_factory.mktemp("old"), small_folder)


@pytest.fixture
def old(olds: Olds) -> Old:
    return olds["text"]


@pytest.mark.slow
@every_kind
def test_every_way_draws_the_same(kind: str, olds: Olds) -> None:
    """jit=True, jit=False, ``_generate`` and the native pipeline, from the same noise; nothing compiles twice."""
    old, noise = olds[kind], normal()
    choice: dict[str, Any] = {"guidance_scale": 5.0, old.noise: noise, "neg_prompt_ids": old.negative()}
    more = {"strength": 0.5} if kind == "image" else {}
    stacked = old(**choice, **more)
    assert (stacked.shape, stacked.dtype) == ((D, B, SIZE, SIZE, 3), np.float32)
    assert 0 <= stacked.min() < stacked.max() <= 1
    want = old.want("grey", noise, **more)
    flat = stacked.reshape(want.shape)
    if kind == "mask":  # the native pipeline pastes the given pixels elsewhere
        holes = np.stack([np.asarray(mask) >= 128 for mask in MASKS])
        assert psnr(flat[holes], want[holes]) >= 60
    else:
        assert psnr(flat, want) >= 60
    one = {name: value[1] if isinstance(value, np.ndarray) else value for name, value in choice.items()}
    assert psnr(old.alone(**one, **more), stacked[1]) >= 60
    if kind == "xl":  # test_ahead_of_time is about the other one
        made = jax.jit(old.pipeline._generate, static_argnums=(3, 4, 5, 9))(
            old.arrays(1)["prompt_ids"], old.params, keys()[1], STEPS, SIZE, SIZE, 5.0, one["latents"],
            one["neg_prompt_ids"],
        )  # fmt: skip
        assert psnr(made, stacked[1]) >= 60
    images = {name: -array for name, array in old.arrays().items() if "image" in name}
    masks = {name: array[:, ::-1] for name, array in old.arrays().items() if name == "mask"}
    with counting() as counts:
        for steps, guidance in ((3, 3), (70, np.full((D, B), 2.0))):
            old(num_inference_steps=steps, prng_seed=keys(steps), guidance_scale=guidance, **images, **masks)
        old.alone(num_inference_steps=9, **({"strength": 0.99} if more else {}))
    assert counts.compilations == 0


@every_kind
def test_prepared_inputs(kind: str, olds: Olds) -> None:
    old = olds[kind]
    prepared = old.prepared(["a fox"] * 3, IMAGES[0], MASKS[0])
    assert prepared["prompt_ids"].dtype == np.int32
    shapes = {"prompt_ids": (3, 2, 77) if kind == "xl" else (3, 77), "mask": (3, 1, SIZE, SIZE)}
    for name, array in prepared.items():
        assert array.shape == shapes.get(name, (3, 3, SIZE, SIZE))
        assert name == "prompt_ids" or array.dtype == np.float32


def test_old_keys_give_old_latents(old: Old) -> None:
    """Each device's latents are one normal draw from its key; PRNGKey and key are alike."""
    want = old(prng_seed=keys(5))
    latents = np.stack([jax.random.normal(key, LATENTS) for key in keys(5)])
    typed = jax.random.split(jax.random.key(5), D)
    np.testing.assert_array_equal(old(prng_seed=typed, latents=latents), want)
    np.testing.assert_array_equal(old(prng_seed=typed), want)
    assert np.abs(old(prng_seed=keys(6)) - want).max() > 0.01


def test_every_device_heeds_its_key() -> None:
    """Also with the generator that is usual on TPUs, which vmap gives the first key alone."""
    keys_of = [jax.random.key(i, impl="rbg") for i in range(3)]
    latents, _ = host_draw(jnp.stack(keys_of), LATENTS)
    for i, key in enumerate(keys_of):
        want = jnp.moveaxis(jax.random.normal(key, LATENTS), 1, -1)
        np.testing.assert_array_equal(latents[2 * i : 2 * i + 2], want)


@pytest.mark.parametrize("kind", ["text", pytest.param("xl", marks=pytest.mark.slow)])
def test_negative_prompts(kind: str, olds: Olds) -> None:
    """No negative prompt is an empty one, but zeros for SDXL."""
    old = olds[kind]
    plain = old()
    for text, changes in (("", kind == "xl"), ("grey, blurred", True)):
        assert (np.abs(old(neg_prompt_ids=old.negative(text)) - plain).max() > 0.01) == changes
    if kind == "xl":
        other = Old("xl", build(olds.root / "without zeros", force_zeros_for_empty_prompt=False))
        np.testing.assert_array_equal(other.alone(), other.alone(neg_prompt_ids=other.negative("")[1]))


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.weekly)], ids=["call", "_generate"])
def test_every_image_has_its_own_guidance(ahead: bool, old: Old) -> None:
    """In whichever form: each image is the one that a call with its scale for all images draws in its place."""
    mapped = jax.pmap(old.pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])

    def draw(guidance: Any) -> np.ndarray:
        if not ahead:
            return old(guidance_scale=guidance)
        ids = old.arrays()["prompt_ids"]
        return np.asarray(mapped(ids, old.copies, keys(), STEPS, SIZE, SIZE, guidance, None, None, False))

    scales = np.array([[3.0, 9.0], [5.0, 2.0]], np.float32)
    mixed = draw(scales)
    for at, scale in np.ndenumerate(scales):
        np.testing.assert_allclose(mixed[at], draw(np.full_like(scales, scale))[at], atol=1e-5)
    assert np.abs(draw(scales[:, ::-1]) - mixed).max((2, 3, 4)).min() > 0.01
    if not ahead:
        want = draw(3.0)
        for form in (np.float32(3), jnp.full((D, 1), 3.0), np.full(D, 3)):
            np.testing.assert_array_equal(draw(form), want)
        np.testing.assert_allclose(draw(np.array([[1.0], [3.0]]))[0], draw(1.0)[0], atol=1e-4)


def test_output(old: Old) -> None:
    pipeline, params = old.pipeline, old.params
    some, key = pipeline.prepare_inputs(["a fox"] * B), jax.random.key(0)
    out = pipeline(some, params, key, STEPS)
    assert out[0] is out.images is out["images"]
    assert out.nsfw_content_detected is out[1] is False
    images, flagged = pipeline(some, params, key, STEPS, return_dict=False)
    assert (type(images), flagged) == (np.ndarray, False)
    picture, _ = pipeline.numpy_to_pil(images)
    assert picture.size == (SIZE, SIZE)
    assert pipeline.numpy_to_pil(jnp.asarray(images[0], jnp.bfloat16))[0].size == (SIZE, SIZE)
    assert flax_api.make_image_grid([picture] * 4, 1, 4, resize=32).size == (128, 32)


@pytest.mark.slow
def test_scheduler_is_popped_and_put_back(old: Old) -> None:
    """As in the guides, where all other parameters are halved."""
    params = dict(old.params)
    state = params.pop("scheduler")
    halved = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(halved)} == {jnp.dtype(jnp.bfloat16)}
    half = old.alone(params={**halved, "scheduler": state})
    assert half.dtype == np.float32
    assert 1e-4 < np.abs(old.alone() - half).mean() < 0.1
    assert jax.tree.map(lambda x: x.astype(jnp.bfloat16), old.params)["scheduler"] == state


def test_both_formats_and_dtype(old: Old, tmp_path: Path) -> None:
    load = flax_api.FlaxStableDiffusionPipeline.from_pretrained
    _, params = load(write_small_checkpoint(tmp_path / "flax", "flax"))
    jax.tree.map(np.testing.assert_array_equal, params, old.params | {"scheduler": params["scheduler"]})
    _, params = load("emoji", dtype=jnp.bfloat16, from_pt=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert params.keys() == {"unet", "vae", "text_encoder", "scheduler"}


@pytest.mark.parametrize("name", ["DDIM", "DDPM", "PNDM", "DPMSolverMultistep", "EulerDiscrete"])
def test_schedulers(name: str, old: Old) -> None:
    scheduler, state = getattr(flax_api, f"Flax{name}Scheduler").from_pretrained(old.folder, subfolder="scheduler")
    assert scheduler.config["beta_end"] == state.config["beta_end"] == 0.012
    old()
    with counting() as counts:
        got = old(params={**old.copies, "scheduler": state})
    assert counts.compilations == 0
    assert np.isfinite(got).all()
    if name != "DDPM":  # whose step noise comes from other keys here than there
        # A class name fixes nothing, so every option is the file's, as it is for the old class.
        latents = np.stack([jax.random.normal(key, LATENTS) for key in keys()])
        want = old.want(None, latents, sampler=scheduler.CLASS, guidance_scale=7.5)
        assert psnr(got.reshape(want.shape), want) >= 60


def test_scheduler_argument(old: Old, olds: Olds) -> None:
    """Its config means what it says; only those of the files of Stable Diffusion 1.x and 2.x are put right."""
    scheduler = flax_api.FlaxDDIMScheduler(beta_schedule="scaled_linear", trained_betas=np.full(1000, 0.01))
    pipeline, params = type(old.pipeline).from_pretrained(old.folder, scheduler=scheduler)
    assert pipeline.scheduler.create_state() == params["scheduler"] == scheduler.create_state()
    assert params["scheduler"].config["trained_betas"][0] == 0.01
    given = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 0}
    state = flax_api.FlaxDDIMScheduler(**given).create_state()
    assert list(olds["xl"].pipeline._table({"scheduler": state}, 4).timestep) == [750, 500, 250, 0]


@pytest.mark.slow
def test_ahead_of_time(old: Old) -> None:
    """The way of the SDXL page: lower with the static arguments, call without them."""
    ids, negative = old.arrays()["prompt_ids"], old.negative()
    guidance = jnp.array([5.0] * D, dtype=jnp.float32)[:, None]
    mapped = jax.pmap(old.pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])
    generate = mapped.lower(ids, old.copies, keys(), STEPS, SIZE, SIZE, guidance, None, negative, False).compile()
    images = generate(ids, old.copies, keys(8), guidance, None, negative).block_until_ready()
    assert psnr(images, old(prng_seed=keys(8), guidance_scale=5.0, neg_prompt_ids=negative)) >= 60
    flat = images.reshape((images.shape[0] * images.shape[1], *images.shape[-3:]))
    assert len(old.pipeline.numpy_to_pil(np.array(flat))) == D * B


def test_latents_can_be_returned(old: Old) -> None:
    some = old.pipeline.prepare_inputs("a fox")

    def latents_of(given: Any) -> Any:
        generate = old.pipeline._generate
        return jax.eval_shape(
            lambda key: generate(some, old.params, key, STEPS, latents=given, return_latents=True), jax.random.key(0)
        )

    assert latents_of(None).shape == latents_of(np.zeros((1, 4, 8, 8))).shape == (1, 4, 8, 8)
    with refused("latents"):
        latents_of(np.zeros((1, 8, 8, 4)))


@pytest.mark.slow
def test_latents_of_sdxl_can_be_returned(olds: Olds) -> None:
    """They decode to the images of the same call."""
    old = olds["xl"]
    want = old(latents=normal())
    drawn = old(latents=normal(), output_type="latent")
    assert drawn.shape == (D, *LATENTS)
    (programs,) = (p for key, p in old.pipeline._programs.items() if key[0])
    flat = channels_last(drawn)
    decode = programs.program("decoder", old.copies, flat.shape)
    decoded = decode(old.copies, jax.device_put(flat, over_batch(programs.mesh)))
    np.testing.assert_allclose(np.asarray(decoded).reshape(want.shape), want, atol=1e-5)
    with refused("output_type"):
        old(output_type="pil")


@pytest.mark.slow
def test_devices_do_not_talk(old: Old) -> None:
    old()
    (programs,) = (p for key, p in old.pipeline._programs.items() if key[0])
    own = {name: old.copies[name] for name in ("unet", "text_encoder")}
    program: Any = programs.program("guided denoiser", own, (D * B, 8, 8, 4))
    text = program.executable.as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert collective not in text


def test_replicate_makes_no_copies_on_the_host() -> None:
    tree = {"a": np.ones((512, 1024), np.float32), "b": jnp.arange(3)}
    tracemalloc.start()
    try:
        out = replicate(tree)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < tree["a"].nbytes
    assert out["a"].shape == (8, 512, 1024)
    assert len({shard.device for shard in out["a"].addressable_shards}) == 8
    np.testing.assert_array_equal(out["b"], np.stack([np.arange(3)] * 8))
    np.testing.assert_array_equal(unreplicate(out)["a"], tree["a"])
    np.testing.assert_array_equal(unreplicate({"a": np.ones((8, 2))})["a"], np.ones(2))


STACKS: dict[str, Any] = {
    "on one device": lambda tree: jax.tree.map(lambda x: jnp.stack([x] * D), tree),
    "through pmap": lambda tree: jax.pmap(lambda x: x)(STACKS["on one device"](tree)),
    "on the host": lambda tree: jax.tree.map(lambda x: np.stack([np.asarray(x)] * D), tree),
}


@pytest.mark.parametrize("way", STACKS)
def test_any_stacked_parameters(way: str, old: Old) -> None:
    """What flax.jax_utils.replicate or anybody else made, wherever it lies."""
    np.testing.assert_array_equal(old(params=STACKS[way](old.params)), old())


# From images


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "mask"])
def test_one_image_for_all(kind: str, olds: Olds) -> None:
    """In the place of one for each; and a hole that was not cut out."""
    old = olds[kind]
    first = {name: np.broadcast_to(array[:1, :1], array.shape) for name, array in old.arrays().items()
             if name != "prompt_ids"}  # fmt: skip
    few = {name: array[:1, :1] for name, array in first.items()}
    np.testing.assert_array_equal(old(**few), old(**first))
    few = {name: array[0, :1] for name, array in first.items()}
    if kind == "mask":
        few["masked_image"] = np.moveaxis(np.asarray(IMAGES[0], np.float32) / 127.5 - 1, -1, 0)[None]
    np.testing.assert_array_equal(old.alone(**few), old.alone(**{name: array[0] for name, array in first.items()}))


def test_prepared_images(olds: Olds) -> None:
    """Sides become multiples of 32; what a mask has as white is cut out."""
    old = olds["image"]
    images = old.prepared(["a fox"], picture(1, (100, 70)))["image"]
    want = np.asarray(picture(1, (100, 70)).resize((96, 64), Image.Resampling.LANCZOS), np.float32)
    np.testing.assert_allclose(np.moveaxis(images[0], 0, -1), want / 127.5 - 1, atol=1e-6)
    grey = np.repeat(np.uint8([[0, 127, 128, 255]]), 64, axis=0).repeat(16, axis=1)
    assert set(np.unique(old.prepared(["a fox"], 255 * (grey > 127).astype(np.uint8))["image"])) == {-1, 1}
    _, images, masks = olds["mask"].prepared(["a fox"] * 2, IMAGES[:2], Image.fromarray(grey)).values()
    np.testing.assert_array_equal(masks[0, 0, 0, ::16], [0, 0, 1, 1])
    assert (images[:, :, :, 32:] == 0).all()
    want = np.asarray(IMAGES[1], np.float32)[:, :32] / 127.5 - 1
    np.testing.assert_allclose(np.moveaxis(images[1, :, :, :32], 0, -1), want, atol=1e-6)


@pytest.mark.slow
def test_noise_of_the_encoding_is_another(olds: Olds) -> None:
    """Latents of an image are a sample, and its noise is not that which is added to them."""
    some, shape = jax.random.split(jax.random.key(5), 4), (16, 4, 16, 16)
    noise, encoding = host_draw(some, shape)[0], encoding_noise(some, shape)
    assert noise.shape == encoding.shape == (64, 16, 16, 4)
    assert not np.isin(encoding, noise).mean() > 0.1
    assert abs(np.corrcoef(noise.ravel(), encoding.ravel())[0, 1]) < 0.02
    for i, key in enumerate(some):  # the old inpainting class's law
        want = jax.random.normal(jax.random.split(key)[1], (16, 16, 16, 4))
        np.testing.assert_array_equal(encoding[16 * i : 16 * i + 16], want)
    old = olds["image"]
    _, wide = type(old.pipeline).from_pretrained(old.folder)

    def apart(params: Params) -> float:
        one, other = (
            old.alone(params=params, strength=0.25, prng_seed=jax.random.key(seed), noise=normal()[0])
            for seed in (1, 2)
        )
        return float(np.abs(one - other).max())

    assert apart(old.params) < 1e-5
    assert apart(wide) > 1e-3


@pytest.mark.weekly
def test_strength_and_size(olds: Olds) -> None:
    """How much changes; and another size than that of the image, to which masks are resized too."""
    old = olds["image"]
    images = old.arrays(1)["image"]
    changes = [
        np.abs(np.subtract(*(old.alone(strength=strength, image=sign * images) for sign in (1, -1)))).mean()
        for strength in (0.25, 0.5, 1.0)
    ]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < changes[0] / 2
    key = {"params": old.params, "prng_seed": jax.random.key(0), "num_inference_steps": STEPS}
    narrow = {"height": 64, "width": 64}
    given = old.prepared(["a fox"], picture(1, (96, 64)))
    assert old.pipeline(**given, **key).images.shape == (1, 64, 96, 3)
    resized = old.prepared(["a fox"], picture(1, (96, 64)).resize((64, 64), Image.Resampling.LANCZOS))
    assert psnr(old.pipeline(**given, **key, **narrow).images, old.pipeline(**resized, **key).images) > 40
    old, sizes = olds["mask"], (128, 96)
    given = old.prepared(["a fox"], picture(1, sizes), disc(0, sizes))
    assert old.pipeline(**given, **key | {"params": old.params}).images.shape == (1, SIZE, SIZE, 3)
    shape = old.pipeline(**given, **key | {"params": old.params}, height=96, width=128).images.shape
    assert shape == (1, 96, 128, 3)


@pytest.mark.slow
def test_other_sizes_are_told_to_sdxl(olds: Olds) -> None:
    old, given = olds["xl"], np.random.default_rng(1).standard_normal((1, 4, 8, 12), np.float32)
    size = {"height": 64, "width": 96, "guidance_scale": 5.0, "num_inference_steps": STEPS}
    ids = old.pipeline.prepare_inputs("a fox")
    got = old.pipeline(ids, old.params, jax.random.key(0), latents=given, **size).images
    want = old.native("a fox", latents=np.moveaxis(given, 1, -1), progress=False, **size)
    assert psnr(got, want.pixels) >= 60


@pytest.mark.weekly
def test_documented_calls(olds: Olds) -> None:
    """The examples of the old classes with images, on eight devices."""
    count = jax.device_count()
    pipeline, params = flax_api.FlaxStableDiffusionImg2ImgPipeline.from_pretrained(
        olds["image"].folder, dtype=jnp.bfloat16
    )
    prompt_ids, processed_image = pipeline.prepare_inputs(
        prompt=["a valley, oil on canvas"] * count, image=[picture(1, (100, 70)).resize((96, 64))] * count
    )
    output = pipeline(
        prompt_ids=shard(prompt_ids), image=shard(processed_image), params=replicate(params),
        prng_seed=jax.random.split(KEY(0), count), strength=0.75, num_inference_steps=STEPS, jit=True, height=64,
        width=96,
    ).images  # fmt: skip
    assert output.shape == (8, 1, 64, 96, 3)
    images = pipeline.numpy_to_pil(np.asarray(output.reshape((count, *output.shape[-3:]))))
    assert [image.size for image in images] == [(96, 64)] * 8
    assert len({image.tobytes() for image in images}) == 8  # each device has its own key
    pipeline, params = flax_api.FlaxStableDiffusionInpaintPipeline.from_pretrained(olds["mask"].folder)
    prompt_ids, masked_images, masks = pipeline.prepare_inputs(
        ["a yellow cat"] * count, count * [picture(1)], count * [disc()]
    )
    images = pipeline(
        shard(prompt_ids), shard(masks), shard(masked_images), replicate(params), jax.random.split(KEY(0), count),
        STEPS, jit=True,
    ).images  # fmt: skip
    assert images.shape == (8, 1, SIZE, SIZE, 3)
    assert len({image.tobytes() for image in np.asarray(images)}) == 8


# What cannot be


def test_bad_input(olds: Olds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of ``golden/errors_flax.txt``, as in ``test_errors``; nothing is compiled."""
    names = globals() | {kind: olds[kind] for kind in CLASSES}
    text: Old = names["text"]
    names["other"] = text.params | {"unet": text.params["unet"] | {"conv_in": {"weight": np.zeros((3, 3, 9, 32))}}}
    names |= {
        "FEW": np.ones((2, 77), np.int32),
        "MANY": np.full((D, B, 77), 10**6),
        "NAN": np.full((D, *LATENTS), np.nan),
    }
    usual = {**text.arrays(1), "params": text.params, "num_inference_steps": 2}
    names["traced"] = lambda **changes: jax.eval_shape(
        lambda key: text.pipeline._generate(**usual | {"prng_seed": key} | changes), jax.random.key(0)
    )
    for old in olds.values():
        monkeypatch.setattr(type(old.pipeline), "_run", None)  # where programs are made
    golden = Path(__file__).parent / "golden" / "errors_flax.txt"
    lines: list[str] = []
    for source in golden.read_text().splitlines():
        if not source.startswith(" "):
            with pytest.raises((canvax.InputError, AttributeError)) as caught:
                eval(source, names)
            lines += [source, f"    {getattr(caught.value, 'argument', '')}: {caught.value}"]
    if os.environ.get("CANVAX_WRITE_GOLDEN"):
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()


def test_native_size_of_early_checkpoints(tmp_path: Path) -> None:
    """Files from before diffusers 0.9 state a sample size that is not the model's."""
    model, side = write_small_checkpoint(tmp_path / "model", "flax"), 0
    config = json.loads((model / "unet" / "config.json").read_text())
    for version, side in (("0.9.0", 64), ("0.42.1", 64), ("0.2.2", 512)):
        # Options of the old classes, which they wrote into the file and which decide nothing.
        also = {"_diffusers_version": version, "split_head_dim": True, "use_memory_efficient_attention": True}
        (model / "unet" / "config.json").write_text(json.dumps(config | also))
        assert canvax.load(model, progress=False).model.native_size == (side, side)
    pipeline, params = flax_api.FlaxStableDiffusionPipeline.from_pretrained(model)
    some = pipeline.prepare_inputs("a fox")
    shape = jax.eval_shape(lambda key: pipeline._generate(some, params, key, STEPS), jax.random.key(0)).shape
    assert shape == (1, side, side, 3)


def test_bad_loading(old: Old) -> None:
    for arguments in (
        {"safety_checker": object()}, {"torch_dtype": "float16", "dtype": "float16"}, {"use_safetensors": False},
        {"scheduler": (1, 2)}, {"unet": 1}, {"revison": "main"}, {"dtype": "int8"},
    ):  # fmt: skip
        with refused(*arguments):
            type(old.pipeline).from_pretrained(old.folder, **arguments)
    with refused("beta_schedule"):
        flax_api.FlaxDDIMScheduler(beta_schedule="scaled")


def test_each_class_refuses_the_others_checkpoints(olds: Olds, tmp_path: Path) -> None:
    """Each names the class that takes it."""
    folders = {kind: olds[kind].folder for kind in ("text", "mask", "xl")}
    folders["refiner"] = build_refiner(tmp_path / "refiner")
    for kind, other, named in (
        ("text", "xl", CLASSES["xl"]), ("xl", "text", CLASSES["text"]), ("xl", "refiner", r"canvax\.load"),
        ("text", "mask", CLASSES["mask"]), ("image", "mask", CLASSES["mask"]), ("mask", "text", r"canvax\.load"),
    ):  # fmt: skip
        with pytest.raises(canvax.CheckpointError, match=named):
            getattr(flax_api, CLASSES[kind]).from_pretrained(folders[other])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "mask"])
def test_saved_by_the_old_classes(kind: str, olds: Olds, tmp_path: Path) -> None:
    """Their names stand in model_index.json."""
    old = olds[kind]
    index = old.pipeline.save_pretrained(tmp_path / "model", old.params) / "model_index.json"
    index.write_text(index.read_text().replace('"StableDiffusionPipeline"', f'"{CLASSES[kind]}"'))
    type(old.pipeline).from_pretrained(tmp_path / "model")
