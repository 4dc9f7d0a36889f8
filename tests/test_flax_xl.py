"""The old SDXL class: the same pictures as the native pipeline, whichever way it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.compile.monitor import compilations
from canvax.flax_api import FlaxDDIMScheduler, FlaxStableDiffusionPipeline, FlaxStableDiffusionXLPipeline, replicate
from canvax.parallel.mesh import make_mesh
from canvax.types import Params
from tests.support.small_checkpoint import write_small_checkpoint
from tests.support.small_sdxl import build, build_refiner

pytestmark = pytest.mark.slow  # test_flax_api has the common part

D, B, STEPS = 2, 2, 4
LATENTS = (B, 4, 8, 8)
QUIET = canvax.Options(progress=False)
PROMPTS = ["a fox in the snow", "a bridge", "a teapot", "a map"]
Old = tuple[FlaxStableDiffusionXLPipeline, Params]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old") / "xl")


@pytest.fixture(scope="module")
def old(folder: Path) -> Old:
    return FlaxStableDiffusionXLPipeline.from_pretrained(folder, split_head_dim=True)


@pytest.fixture(scope="module")
def copies(old: Old) -> Params:
    return replicate(old[1], jax.devices()[:D])


@pytest.fixture(scope="module")
def native(folder: Path) -> canvax.Pipeline:
    return canvax.load(folder, mesh=make_mesh(jax.devices()[:1]))


def ids(pipeline: FlaxStableDiffusionXLPipeline, prompts: list[str] = PROMPTS) -> np.ndarray:
    return pipeline.prepare_inputs(prompts).reshape(D, B, 2, 77)


def keys(seed: int = 0) -> Any:
    return jax.random.split(jax.random.PRNGKey(seed), D)


def latents(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((D, *LATENTS), np.float32)


def psnr(got: Any, want: Any) -> float:
    return float(10 * np.log10(1 / max(np.mean((np.asarray(got, np.float64) - np.asarray(want)) ** 2), 1e-30)))


def test_prepare_inputs(old: Old) -> None:
    pipeline, _ = old
    assert pipeline.prepare_inputs("a fox").shape == (1, 2, 77)
    assert pipeline.prepare_inputs(["a fox"] * 3).dtype == np.int32


@pytest.mark.parametrize("negative", [*(pytest.param(given, marks=pytest.mark.weekly) for given in (None, "")), "grey"])
def test_every_way_draws_the_same(negative: str | None, old: Old, copies: Params, native: canvax.Pipeline) -> None:
    """jit=True, jit=False, ``_generate`` and the native pipeline; without a negative prompt zeros, with "" its text."""
    pipeline, params = old
    given = latents()
    negative_ids = None if negative is None else ids(pipeline, [negative] * (D * B))
    choice = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "neg_prompt_ids": negative_ids, "latents": given}
    stacked = pipeline(ids(pipeline), copies, keys(), **choice, jit=True).images
    assert stacked.shape == (D, B, 64, 64, 3)
    flat = np.moveaxis(given.reshape(-1, *LATENTS[1:]), 1, -1)
    want = native(PROMPTS, negative, num_inference_steps=STEPS, guidance_scale=5.0, options=QUIET, latents=flat)
    assert psnr(stacked.reshape(want.pixels.shape), want.pixels) >= 60
    one = choice | {"latents": given[1], "neg_prompt_ids": None if negative_ids is None else negative_ids[1]}
    single = pipeline(ids(pipeline)[1], params, jax.random.key(0), **one).images
    assert psnr(single, stacked[1]) >= 60
    made = jax.jit(pipeline._generate, static_argnums=(3, 4, 5, 9))(
        ids(pipeline)[1], params, jax.random.key(0), STEPS, 64, 64, 5.0, given[1], one["neg_prompt_ids"]
    )
    assert psnr(made, stacked[1]) >= 60


def test_no_negative_is_not_an_empty_one(old: Old) -> None:
    pipeline, params = old
    some, key = pipeline.prepare_inputs(PROMPTS), jax.random.key(0)
    plain = pipeline(some, params, key, STEPS).images
    empty = pipeline(some, params, key, STEPS, neg_prompt_ids=pipeline.prepare_inputs([""] * 4)).images
    assert np.abs(plain - empty).max() > 0.01


def test_zeros_are_what_the_checkpoint_says(tmp_path: Path) -> None:
    folder = build(tmp_path / "xl", force_zeros_for_empty_prompt=False)
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(folder)
    some, key = pipeline.prepare_inputs("a fox"), jax.random.key(0)
    plain = pipeline(some, params, key, STEPS).images
    empty = pipeline(some, params, key, STEPS, neg_prompt_ids=pipeline.prepare_inputs("")).images
    np.testing.assert_array_equal(plain, empty)


def test_scheduler_configs_mean_what_they_say(old: Old) -> None:
    """Only those of Stable Diffusion 1.x and 2.x are put right."""
    pipeline, _ = old
    scheduler = FlaxDDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=0)
    assert list(pipeline._table({"scheduler": scheduler.create_state()}, 4).timestep) == [750, 500, 250, 0]


def test_latents_can_be_returned(old: Old, copies: Params) -> None:
    """They decode to the images of the same call."""
    pipeline, _ = old
    choice = {"num_inference_steps": STEPS, "latents": latents(), "jit": True}
    want = pipeline(ids(pipeline), copies, keys(), **choice).images
    drawn = pipeline(ids(pipeline), copies, keys(), **choice, output_type="latent")
    assert drawn[0] is drawn.images is drawn["images"]
    assert drawn.images.shape == (D, *LATENTS)
    (programs,) = (p for key, p in pipeline._programs.items() if key[0])
    flat = np.moveaxis(drawn.images.reshape(-1, *LATENTS[1:]), 1, -1)
    decode = programs.program("decoder", copies, flat.shape)
    decoded = decode(copies, jax.device_put(flat, want_sharding(programs)))
    np.testing.assert_allclose(np.asarray(decoded).reshape(want.shape), want, atol=1e-5)
    with pytest.raises(canvax.InputError, match="output_type='pil'"):
        pipeline(ids(pipeline), copies, keys(), **choice, output_type="pil")


def want_sharding(programs: Any) -> Any:
    from canvax.parallel.mesh import over_batch

    return over_batch(programs.mesh)


def test_nothing_recompiles(old: Old, copies: Params) -> None:
    pipeline, _ = old
    pipeline(ids(pipeline), copies, keys(), STEPS, jit=True)
    before = compilations()
    for steps in (3, 25, 70):
        negative = ids(pipeline, ["grey"] * (D * B)) if steps > 3 else None
        pipeline(ids(pipeline), copies, keys(steps), steps, guidance_scale=3, neg_prompt_ids=negative, jit=True)
    assert compilations() == before


def test_other_sizes_are_told_to_the_model(old: Old, native: canvax.Pipeline) -> None:
    pipeline, params = old
    given = np.random.default_rng(1).standard_normal((1, 4, 8, 12), np.float32)
    choice = {"num_inference_steps": STEPS, "height": 64, "width": 96, "guidance_scale": 5.0}
    got = pipeline(pipeline.prepare_inputs("a fox"), params, jax.random.key(0), latents=given, **choice).images
    want = native("a fox", latents=np.moveaxis(given, 1, -1), options=QUIET, **choice)
    assert psnr(got, want.pixels) >= 60


def test_each_class_refuses_the_others_checkpoints(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(canvax.CheckpointError, match="FlaxStableDiffusionXLPipeline"):
        FlaxStableDiffusionPipeline.from_pretrained(folder)
    with pytest.raises(canvax.CheckpointError, match="FlaxStableDiffusionPipeline"):
        FlaxStableDiffusionXLPipeline.from_pretrained(write_small_checkpoint(tmp_path / "one"))
    with pytest.raises(canvax.CheckpointError, match=r"canvax\.load"):
        FlaxStableDiffusionXLPipeline.from_pretrained(build_refiner(tmp_path / "refiner"))


def test_bad_input(old: Old, copies: Params) -> None:
    pipeline, _ = old
    arguments: dict[str, Any] = {"prompt_ids": ids(pipeline), "params": copies, "prng_seed": keys(), "jit": True}
    bad: dict[str, tuple[Any, str]] = {
        "prompt_ids": (ids(pipeline)[:, :, 0], r"\[D, B, 2, 77\]"),
        "neg_prompt_ids": (ids(pipeline)[:, :1], "as many"),
        "neg_prompt_ids ": (np.full((D, B, 2, 77), 10**6), "neg_prompt_ids has the id 1000000, and text_encoder knows"),
        "height": (65, "64 or 72"),
        "params": ({"unet": {}}, "text_encoder, text_encoder_2, unet, vae"),
    }
    for name, (value, message) in bad.items():
        with pytest.raises(canvax.InputError, match=message):
            pipeline(**arguments | {name.strip(): value})
