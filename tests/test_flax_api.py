"""The old Flax names: same pictures as the native pipeline, whichever way they are called."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax import flax_api
from canvax.compile.monitor import compilations
from canvax.flax_api import FlaxStableDiffusionPipeline, replicate, shard, unreplicate
from canvax.flax_api.keys import host_draw
from canvax.types import Params
from tests.support.small_checkpoint import SCHEDULER, write_small_checkpoint

D, B, STEPS = 2, 2, 4
LATENTS = (B, 4, 8, 8)
QUIET = canvax.Options(progress=False)
PROMPTS = ["a fox in the snow", "a bridge", "a teapot", "a map"]


@pytest.fixture(scope="module")
def folder(small_folder: Path) -> Path:
    return small_folder


@pytest.fixture(scope="module")
def old(folder: Path) -> tuple[FlaxStableDiffusionPipeline, Params]:
    return FlaxStableDiffusionPipeline.from_pretrained(folder, safety_checker=None, split_head_dim=True)


@pytest.fixture(scope="module")
def copies(old: tuple[FlaxStableDiffusionPipeline, Params]) -> Params:
    """Parameters on two devices; the guide's tests have eight."""
    return replicate(old[1], jax.devices()[:D])


@pytest.fixture(scope="module")
def native(small: canvax.Pipeline) -> canvax.Pipeline:
    return small


Old = tuple[FlaxStableDiffusionPipeline, Params]


def ids(pipeline: FlaxStableDiffusionPipeline) -> np.ndarray:
    return pipeline.prepare_inputs(PROMPTS).reshape(D, B, 77)


def keys(seed: int = 0) -> Any:
    return jax.random.split(jax.random.PRNGKey(seed), D)


def channels_last(latents: Any) -> np.ndarray:
    """[D, B, C, h, w] -> [D * B, h, w, C]."""
    return np.moveaxis(np.asarray(latents).reshape(-1, *latents.shape[2:]), 1, -1)


def psnr(got: Any, want: Any) -> float:
    return float(10 * np.log10(1 / max(np.mean((np.asarray(got, np.float64) - np.asarray(want)) ** 2), 1e-30)))


def test_prepare_inputs(old: Old) -> None:
    pipeline, _ = old
    assert pipeline.prepare_inputs("a fox").shape == (1, 77)
    assert pipeline.prepare_inputs(["a fox"] * 3).dtype == np.int32
    with pytest.raises(ValueError, match="prompt=3"):
        pipeline.prepare_inputs(3)  # pyright: ignore[reportArgumentType]


def test_every_way_draws_the_same(old: Old, copies: Params, native: canvax.Pipeline) -> None:
    """jit=True, jit=False and the native pipeline, from the same latents."""
    pipeline, params = old
    latents = jax.random.normal(jax.random.key(3), (D, *LATENTS))
    negative = pipeline.prepare_inputs(["grey"] * (D * B)).reshape(D, B, 77)
    choice = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "neg_prompt_ids": negative, "latents": latents}
    stacked = pipeline(ids(pipeline), copies, keys(), **choice, jit=True).images
    assert stacked.shape == (D, B, 64, 64, 3)
    assert stacked.dtype == np.float32
    assert 0 <= stacked.min() < stacked.max() <= 1
    want = native(
        PROMPTS, "grey", num_inference_steps=STEPS, guidance_scale=5.0, options=QUIET, latents=channels_last(latents)
    )
    assert psnr(stacked.reshape(want.pixels.shape), want.pixels) >= 60
    choice |= {"neg_prompt_ids": negative[1], "latents": latents[1]}
    single = pipeline(ids(pipeline)[1], params, jax.random.key(0), **choice).images
    assert single.shape == (B, 64, 64, 3)
    assert psnr(single, stacked[1]) >= 60


def test_nothing_recompiles(old: Old, copies: Params) -> None:
    pipeline, _ = old
    pipeline(ids(pipeline), copies, keys(), STEPS, jit=True)
    before = compilations()
    negative = pipeline.prepare_inputs(["grey"] * (D * B)).reshape(D, B, 77)
    for steps in (3, 25, 70):
        pipeline(ids(pipeline), copies, keys(steps), steps, guidance_scale=3, neg_prompt_ids=negative, jit=True)
    for cls in (flax_api.FlaxEulerDiscreteScheduler, flax_api.FlaxDPMSolverMultistepScheduler):
        state = cls.from_config(SCHEDULER).create_state()
        pipeline(ids(pipeline), {**copies, "scheduler": state}, keys(), STEPS, jit=True)
    assert compilations() == before


def test_old_keys_give_old_latents(old: Old, copies: Params) -> None:
    """Each device's latents are one normal draw from its key; PRNGKey and key are alike."""
    pipeline, _ = old
    want = pipeline(ids(pipeline), copies, keys(5), STEPS, jit=True).images
    latents = np.stack([jax.random.normal(key, LATENTS) for key in keys(5)])
    typed = jax.random.split(jax.random.key(5), D)
    got = pipeline(ids(pipeline), copies, typed, STEPS, latents=latents, jit=True).images
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pipeline(ids(pipeline), copies, typed, STEPS, jit=True).images, want)
    other = pipeline(ids(pipeline), copies, keys(6), STEPS, jit=True).images
    assert np.abs(other - want).max() > 0.01


def test_every_device_heeds_its_key(old: Old) -> None:
    """Also with the generator that is usual on TPUs, which vmap gives the first key alone."""
    shape = (2, 4, 8, 8)
    keys_of = [jax.random.key(i, impl="rbg") for i in range(3)]
    latents, _ = host_draw(jnp.stack(keys_of), shape)
    for i, key in enumerate(keys_of):
        want = jnp.moveaxis(jax.random.normal(key, shape), 1, -1)
        np.testing.assert_array_equal(latents[2 * i : 2 * i + 2], want)


def test_negative_prompts(old: Old, copies: Params) -> None:
    pipeline, _ = old
    plain = pipeline(ids(pipeline), copies, keys(), STEPS, jit=True).images
    for text, changes in (("", False), ("grey, blurred", True)):
        negative = pipeline.prepare_inputs([text] * (D * B)).reshape(D, B, 77)
        images = pipeline(ids(pipeline), copies, keys(), STEPS, neg_prompt_ids=negative, jit=True).images
        assert (np.abs(images - plain).max() > 0.01) == changes


@pytest.mark.weekly
def test_guidance_in_every_form(old: Old, copies: Params) -> None:
    pipeline, _ = old

    def draw(guidance: Any) -> np.ndarray:
        return pipeline(ids(pipeline), copies, keys(), STEPS, guidance_scale=guidance, jit=True).images

    want = draw(3.0)
    for form in (3, np.float32(3), jnp.full((D, 1), 3.0), np.full(D, 3), np.full((D, B), 3.0)):
        np.testing.assert_array_equal(draw(form), want)
    mixed = draw(np.array([[3.0], [9.0]]))
    np.testing.assert_array_equal(mixed[0], want[0])
    assert np.abs(mixed[1] - want[1]).max() > 0.01
    off = draw(1.0)
    np.testing.assert_allclose(draw(np.array([[1.0], [3.0]]))[0], off[0], atol=1e-4)


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.weekly)], ids=["call", "_generate"])
def test_every_image_has_its_own_guidance(ahead: bool, old: Old, copies: Params) -> None:
    """Guidance [D, B]: each image is the one that a call with its scale for all images draws in its place."""
    pipeline, _ = old
    scales = np.array([[3.0, 9.0], [5.0, 2.0]], np.float32)
    mapped = jax.pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])

    def draw(guidance: Any) -> np.ndarray:
        if not ahead:
            return pipeline(ids(pipeline), copies, keys(), STEPS, guidance_scale=guidance, jit=True).images
        return np.asarray(mapped(ids(pipeline), copies, keys(), STEPS, 64, 64, guidance, None, None, False))

    mixed = draw(scales)
    for at, scale in np.ndenumerate(scales):
        np.testing.assert_allclose(mixed[at], draw(np.full_like(scales, scale))[at], atol=1e-5)
    assert np.abs(draw(scales[:, ::-1]) - mixed).max((2, 3, 4)).min() > 0.01


def test_output(old: Old) -> None:
    pipeline, params = old
    some = pipeline.prepare_inputs(["a fox"] * B)
    out = pipeline(some, params, jax.random.key(0), STEPS)
    assert out[0] is out.images is out["images"]
    assert out.nsfw_content_detected is out[1] is False
    images, flagged = pipeline(some, params, jax.random.key(0), STEPS, return_dict=False)
    assert type(images) is np.ndarray
    assert flagged is False
    picture, _ = pipeline.numpy_to_pil(images)
    assert picture.size == (64, 64)
    assert pipeline.numpy_to_pil(jnp.asarray(images[0], jnp.bfloat16))[0].size == (64, 64)
    assert flax_api.make_image_grid([picture] * 4, 1, 4, resize=32).size == (128, 32)


def test_scheduler_is_popped_and_put_back(old: Old) -> None:
    pipeline, params = old
    params = dict(params)
    state = params.pop("scheduler")
    halved = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(halved)} == {jnp.dtype(jnp.bfloat16)}
    halved["scheduler"] = state
    some, key = pipeline.prepare_inputs(["a fox"] * B), jax.random.key(0)
    full = pipeline(some, params, key, STEPS).images
    half = pipeline(some, halved, key, STEPS).images
    assert half.dtype == np.float32
    assert 1e-4 < np.abs(full - half).mean() < 0.1
    assert jax.tree.map(lambda x: x.astype(jnp.bfloat16), old[1])["scheduler"] == state


def test_both_formats_and_dtype(old: Old, tmp_path: Path) -> None:
    flax = write_small_checkpoint(tmp_path / "flax", "flax")
    _, params = FlaxStableDiffusionPipeline.from_pretrained(flax)
    jax.tree.map(np.testing.assert_array_equal, params, old[1] | {"scheduler": params["scheduler"]})
    _, params = FlaxStableDiffusionPipeline.from_pretrained("emoji", dtype=jnp.bfloat16, from_pt=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert params.keys() == {"unet", "vae", "text_encoder", "scheduler"}


SCHEDULERS = {
    "ddim": flax_api.FlaxDDIMScheduler,
    "ddpm": flax_api.FlaxDDPMScheduler,
    "pndm": flax_api.FlaxPNDMScheduler,
    "dpmpp_2m": flax_api.FlaxDPMSolverMultistepScheduler,
    "euler": flax_api.FlaxEulerDiscreteScheduler,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, old: Old, copies: Params, folder: Path, native: canvax.Pipeline) -> None:
    scheduler, state = SCHEDULERS[name].from_pretrained(folder, subfolder="scheduler")
    assert scheduler.config["beta_end"] == state.config["beta_end"] == 0.012
    pipeline, _ = old
    got = pipeline(ids(pipeline), {**copies, "scheduler": state}, keys(), STEPS, jit=True).images
    assert np.isfinite(got).all()
    if name != "ddpm":  # whose step noise comes from other keys here than there
        # A class name fixes nothing, so every option is the file's, as it is for the old class.
        latents = channels_last(np.stack([jax.random.normal(key, LATENTS) for key in keys()]))
        want = native(PROMPTS, num_inference_steps=STEPS, latents=latents, sampler=scheduler.CLASS, options=QUIET)
        assert psnr(got.reshape(want.pixels.shape), want.pixels) >= 60


def test_scheduler_argument(folder: Path) -> None:
    scheduler = flax_api.FlaxDDIMScheduler(beta_schedule="scaled_linear", trained_betas=np.full(1000, 0.01))
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(folder, scheduler=scheduler)
    assert pipeline.scheduler.create_state() == params["scheduler"] == scheduler.create_state()
    assert params["scheduler"].config["trained_betas"][0] == 0.01


def test_ahead_of_time(old: Old, copies: Params) -> None:
    """The way of the SDXL page: lower with the static arguments, call without them."""
    pipeline, _ = old
    negative = pipeline.prepare_inputs(["grey"] * (D * B)).reshape(D, B, 77)
    guidance = jnp.array([5.0] * D, dtype=jnp.float32)[:, None]
    generate = (
        jax.pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])
        .lower(ids(pipeline), copies, keys(), STEPS, 64, 64, guidance, None, negative, False)
        .compile()
    )
    images = generate(ids(pipeline), copies, keys(8), guidance, None, negative)
    images = images.block_until_ready()
    want = pipeline(ids(pipeline), copies, keys(8), STEPS, guidance_scale=5.0, neg_prompt_ids=negative, jit=True)
    assert psnr(images, want.images) >= 60
    flat = images.reshape((images.shape[0] * images.shape[1], *images.shape[-3:]))
    assert len(pipeline.numpy_to_pil(np.array(flat))) == D * B


def test_latents_can_be_returned(old: Old) -> None:
    pipeline, params = old
    key, some = jax.random.key(0), pipeline.prepare_inputs("a fox")

    def latents_of(given: Any) -> Any:
        return jax.eval_shape(
            lambda key: pipeline._generate(some, params, key, STEPS, latents=given, return_latents=True), key
        )

    assert latents_of(None).shape == latents_of(np.zeros((1, 4, 8, 8))).shape == (1, 4, 8, 8)
    with pytest.raises(canvax.InputError, match=r"\(1, 4, 8, 8\)"):
        latents_of(np.zeros((1, 8, 8, 4)))


def test_devices_do_not_talk(old: Old, copies: Params) -> None:
    pipeline, _ = old
    pipeline(ids(pipeline), copies, keys(), STEPS, jit=True)
    (programs,) = (p for key, p in pipeline._programs.items() if key[0])
    own = {name: copies[name] for name in ("unet", "text_encoder")}
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


def stack_on_one_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x] * D), tree)


def through_pmap(tree: Any) -> Any:
    return jax.pmap(lambda x: x)(stack_on_one_device(tree))


def stack_on_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.stack([np.asarray(x)] * D), tree)


@pytest.mark.parametrize("other", [stack_on_one_device, through_pmap, stack_on_host])
def test_any_stacked_parameters(other: Any, old: Old, copies: Params) -> None:
    """What flax.jax_utils.replicate or anybody else made, wherever it lies."""
    pipeline, params = old
    want = pipeline(ids(pipeline), copies, keys(), STEPS, jit=True).images
    got = pipeline(jnp.asarray(ids(pipeline)), other(params), keys(), STEPS, jit=True).images
    np.testing.assert_array_equal(got, want)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no device axis": ({"prompt_ids": np.ones((2, 77), np.int32)}, "shard"),
    "device axis": ({"jit": False}, "pass jit=True"),
    "floats": ({"prompt_ids": np.ones((D, B, 77))}, "float64"),
    "devices": ({"prompt_ids": np.ones((3, B, 77), np.int32), "prng_seed": np.zeros((3, 2), np.uint32)}, "3 devices"),
    "one key": ({"prng_seed": np.zeros(2, np.uint32)}, r"jax.random.split\(prng_seed, 2\)"),
    "negatives": ({"neg_prompt_ids": np.ones((D, 1, 77), np.int32)}, "as many"),
    "latents": ({"latents": np.zeros((D, B, 8, 8, 4))}, r"\(2, 2, 4, 8, 8\)"),
    "NaN": ({"latents": np.full((D, *LATENTS), np.nan)}, "finite"),
    "guidance": ({"guidance_scale": [1.0, 2.0, 3.0]}, r"\[2, 2\]"),
    "height": ({"height": 65}, "64 or 72"),
    "steps": ({"num_inference_steps": 0}, "steps=0"),
    "params": ({"params": {"unet": {}}}, "text_encoder, unet, vae"),
    "large ids": ({"prompt_ids": np.full((D, B, 77), 10**6)}, "the id 1000000, and text_encoder knows 0.."),
    "ragged ids": ({"prompt_ids": [[1], [1, 2]]}, "prompt_ids is not an array"),
    "unknown": ({"prompt_idz": 1}, "did you mean 'prompt_ids'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, old: Old, copies: Params) -> None:
    changes, message = BAD[name]
    pipeline, _ = old
    arguments = {"prompt_ids": ids(pipeline), "params": copies, "prng_seed": keys(), "jit": True} | changes
    with pytest.raises(canvax.InputError, match=message):
        pipeline(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.full((B, 77), 10**6)}, "the id 1000000"),
        ({"prompt_ids": np.ones((B, 76), np.int32)}, r"prepare_inputs makes \[B, 77\]"),
        ({"latents": np.full(LATENTS, np.inf)}, "finite"),
    ],
)
def test_bad_input_while_traced(changes: dict[str, Any], message: str, old: Old) -> None:
    """What is not traced is checked there as well."""
    pipeline, params = old
    arguments = {"prompt_ids": pipeline.prepare_inputs(["a fox"] * B), "params": params, "num_inference_steps": 2}
    with pytest.raises(canvax.InputError, match=message):
        jax.eval_shape(lambda key: pipeline._generate(**arguments | {"prng_seed": key} | changes), jax.random.key(0))


def test_bad_parameters(old: Old, copies: Params) -> None:
    pipeline, params = old
    some, key = pipeline.prepare_inputs("a fox"), jax.random.key(0)
    with pytest.raises(canvax.InputError, match=r"does not fit the model.*without a device axis"):
        pipeline(some, copies, key, STEPS)
    other = {**params, "unet": {**params["unet"], "conv_in": {"weight": np.zeros((3, 3, 9, 32))}}}
    with pytest.raises(canvax.InputError, match=r"conv_in\.bias is missing"):
        pipeline(some, other, key, STEPS)
    with pytest.raises(canvax.InputError, match=r"conv_in.bias is missing.*after replicate"):
        pipeline(ids(pipeline), replicate(other, jax.devices()[:D]), keys(), STEPS, jit=True)
    with pytest.raises(canvax.InputError, match=r"prng_seed is traced by JAX.*pipeline\._generate"):
        jax.jit(lambda key: pipeline(some, params, key, STEPS).images)(key)
    with pytest.raises(canvax.InputError, match="replicate"):
        pipeline(ids(pipeline), params, keys(), STEPS, jit=True)
    with pytest.raises(canvax.InputError, match="params\\['scheduler'\\]"):
        pipeline(ids(pipeline), {**copies, "scheduler": {}}, keys(), STEPS, jit=True)
    with pytest.raises(canvax.InputError, match="multiple of 8"):
        shard(np.ones((3, 77)))
    with pytest.raises(canvax.InputError, match="static_broadcasted_argnums"):
        jax.jit(pipeline._generate)(pipeline.prepare_inputs("a fox"), params, jax.random.key(0), STEPS)


@pytest.mark.parametrize(("version", "side"), [("0.2.2", 512), ("0.9.0", 64), ("0.42.1", 64)])
def test_native_size_of_early_checkpoints(version: str, side: int, tmp_path: Path) -> None:
    """Files from before diffusers 0.9 state a sample size that is not the model's."""
    model = write_small_checkpoint(tmp_path / "model", "flax")
    config = json.loads((model / "unet" / "config.json").read_text())
    # Options of the old classes, which they wrote into the file and which decide nothing.
    also = {"_diffusers_version": version, "split_head_dim": True, "use_memory_efficient_attention": True}
    (model / "unet" / "config.json").write_text(json.dumps(config | also))
    assert canvax.load(model, progress=False).model.native_size == (side, side)
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model)
    some = pipeline.prepare_inputs("a fox")
    shape = jax.eval_shape(lambda key: pipeline._generate(some, params, key, STEPS), jax.random.key(0)).shape
    assert shape == (1, side, side, 3)


def test_bad_loading(folder: Path) -> None:
    for arguments, message in (
        ({"safety_checker": object()}, "safety_checker"),
        ({"torch_dtype": "float16", "dtype": "float16"}, "torch_dtype='float16' cannot be combined with dtype"),
        ({"use_safetensors": False}, "use_safetensors=False: canvax has none"),
        ({"scheduler": (1, 2)}, "pass the first"),
        ({"unet": 1}, r"unet: load the whole model and put edited weights into params \(docs/migrating"),
        ({"revison": "main"}, "did you mean 'revision'"),
        ({"dtype": "int8"}, "dtype"),
    ):
        with pytest.raises(canvax.InputError, match=message):
            FlaxStableDiffusionPipeline.from_pretrained(folder, **arguments)
    with pytest.raises(canvax.InputError, match="beta_schedule"):
        flax_api.FlaxDDIMScheduler(beta_schedule="scaled")
