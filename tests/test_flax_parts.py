"""The networks, tokenizers and schedulers of an old pipeline one by one, and names that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax import flax_api
from canvax.compile.monitor import counting
from canvax.familiar import FLAX, FLAX_ATTRIBUTES, FLAX_CALL, FLAX_LOAD
from canvax.flax_api import FlaxStableDiffusionPipeline, FlaxStableDiffusionXLPipeline
from canvax.types import Params
from tests.support.refusals import refused
from tests.support.small_sdxl import build

STEPS, LATENTS = 4, (2, 4, 8, 8)
SCHEDULERS = ["FlaxDDIMScheduler", "FlaxDDPMScheduler", "FlaxPNDMScheduler", "FlaxDPMSolverMultistepScheduler",
              "FlaxEulerDiscreteScheduler"]  # fmt: skip
Old = tuple[FlaxStableDiffusionPipeline, Params]
OldXL = tuple[FlaxStableDiffusionXLPipeline, Params]


@pytest.fixture(scope="module")
def folder(small_folder: Path) -> Path:
    return small_folder


@pytest.fixture(scope="module")
def old(folder: Path) -> Old:
    return FlaxStableDiffusionPipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def old_xl(tmp_path_factory: pytest.TempPathFactory) -> OldXL:
    return FlaxStableDiffusionXLPipeline.from_pretrained(build(tmp_path_factory.mktemp("parts") / "xl"))


def own_loop(scheduler: Any, state: Any, network: Any, key: Any) -> Any:
    """As in the old scripts: latents after all steps, inside ``jax.jit``."""
    state = scheduler.set_timesteps(state, num_inference_steps=STEPS, shape=LATENTS)

    def body(i: Any, carry: Any) -> Any:
        latents, state = carry
        t = jnp.array(state.timesteps)[i]
        output = network(scheduler.scale_model_input(state, latents, t), t)
        return scheduler.step(state, output, t, latents, key=key).to_tuple()

    latents = jax.random.normal(key, LATENTS) * state.init_noise_sigma
    return jax.jit(lambda carry: jax.lax.fori_loop(0, len(state.timesteps), body, carry))((latents, state))[0]


@pytest.mark.parametrize(
    "name", [*SCHEDULERS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULERS[2:])]
)
def test_own_loop_draws_the_same(name: str, old: Old, folder: Path) -> None:
    pipeline, params = old
    scheduler, state = getattr(flax_api, name).from_pretrained(folder, subfolder="scheduler")
    prompts, key = ["a fox", "a map"], jax.random.key(3)
    want = pipeline(pipeline.prepare_inputs(prompts), {**params, "scheduler": state}, key, STEPS, guidance_scale=1.0)
    tokens = pipeline.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="np")
    text = pipeline.text_encoder(tokens.input_ids, params=params["text_encoder"], train=False)[0]

    def network(sample: Any, t: Any) -> Any:
        return pipeline.unet.apply({"params": params["unet"]}, sample, t, encoder_hidden_states=text, train=True).sample

    latents = own_loop(scheduler, state, network, key) / pipeline.vae.config.scaling_factor
    images = pipeline.vae.apply({"params": params["vae"]}, latents, method=pipeline.vae.decode).sample
    images = np.moveaxis(np.asarray(images), 1, -1) / 2 + 0.5
    np.testing.assert_allclose(images.clip(0, 1), want.images, atol=2e-4)


@pytest.mark.parametrize("name", ["FlaxEulerDiscreteScheduler", "FlaxDDPMScheduler"])
def test_own_loop_without_jit_compiles_a_step_once(name: str, folder: Path) -> None:
    """Whatever the number of steps; and its latents are those of a loop that is compiled."""
    scheduler, begun = getattr(flax_api, name).from_pretrained(folder, subfolder="scheduler")
    key = jax.random.key(3)

    def run(steps: int) -> Any:
        state = scheduler.set_timesteps(begun, steps, LATENTS)
        latents = jax.random.normal(key, LATENTS) * state.init_noise_sigma
        for t in state.timesteps:
            output = jnp.sin(scheduler.scale_model_input(state, latents, t))
            latents, state = scheduler.step(state, output, t, latents, key=key)
        return latents

    run(2)
    with counting() as counts:
        run(5)
    assert counts.compilations == 0
    compiled = own_loop(scheduler, begun, lambda sample, _: jnp.sin(sample), key)
    np.testing.assert_allclose(run(STEPS), compiled, atol=1e-4)


@pytest.mark.weekly
def test_own_loop_of_sdxl(old_xl: OldXL) -> None:
    pipeline, params = old_xl
    ids, key = pipeline.prepare_inputs(["a fox", "a map"]), jax.random.key(3)
    want = pipeline(ids, params, key, STEPS, guidance_scale=1.0, output_type="latent").images
    names = ("text_encoder", "text_encoder_2")
    one, two = (
        getattr(pipeline, name)(ids[:, i], params=params[name], output_hidden_states=True)
        for i, name in enumerate(names)
    )
    text = jnp.concatenate([one["hidden_states"][-2], two["hidden_states"][-2]], axis=-1)
    added = {"text_embeds": two[0], "time_ids": jnp.array([[64, 64, 0, 0, 64, 64]] * 2, jnp.float32)}
    np.testing.assert_array_equal(pipeline.tokenizer_2(["a fox", "a map"]).input_ids, ids[:, 1])

    def network(sample: Any, t: Any) -> Any:
        return pipeline.unet.apply({"params": params["unet"]}, sample, t, text, added_cond_kwargs=added)[0]

    got = own_loop(pipeline.scheduler, params["scheduler"], network, key)
    np.testing.assert_allclose(got, want, atol=2e-4)
    with pytest.raises(canvax.InputError, match="added_cond_kwargs has no text_embeds and time_ids"):
        pipeline.unet(want, 1, text, params=params["unet"])


@pytest.mark.slow
def test_encoder_and_noise_for_training(old: Old) -> None:
    """What a training script does with its images before the loss."""
    pipeline, params = old
    vae, variables = pipeline.vae, {"params": params["vae"]}
    images = np.random.default_rng(0).uniform(-1, 1, (2, 3, 64, 64)).astype(np.float32)
    latents = vae.apply(variables, images, deterministic=True, method="encode").latent_dist
    assert latents.mode().shape == (2, 8, 8, 4)
    spread = latents.sample(jax.random.key(0)) - latents.mean
    np.testing.assert_allclose(np.std(spread / jnp.exp(latents.logvar / 2)), 1, atol=0.1)
    again = vae.apply(variables, images).sample
    np.testing.assert_allclose(again, vae.decode(jnp.moveaxis(latents.mean, -1, 1), params=params["vae"])[0], atol=1e-5)
    clean, noise = np.ones(LATENTS, np.float32), np.zeros(LATENTS, np.float32)
    noisy = pipeline.scheduler.add_noise(params["scheduler"], clean, noise, jnp.array([0, 999]))
    kept = pipeline.model.scheduler.schedule.alphas_cumprod[[0, 999]]
    np.testing.assert_allclose(noisy[:, 0, 0, 0], np.sqrt(kept), rtol=1e-5)


def test_save_pretrained(old: Old, tmp_path: Path) -> None:
    pipeline, params = old
    pipeline.save_pretrained(tmp_path / "again", params)
    _, again = FlaxStableDiffusionPipeline.from_pretrained(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.raises(canvax.InputError, match="without a device axis"):
        pipeline.save_pretrained(tmp_path / "third", flax_api.replicate(params))


def test_bad_calls_of_parts(old: Old) -> None:
    pipeline, params = old
    sample, text = np.zeros(LATENTS), np.zeros((2, 77, 48))
    bad: list[tuple[Any, str]] = [
        (lambda: pipeline.unet.apply(params["unet"], sample, 1, text), "no 'params' in it"),
        (lambda: pipeline.unet.apply({"params": params["vae"]}, sample, 1, text), "unet.*does not fit"),
        (lambda: pipeline.unet(np.moveaxis(sample, 1, -1), 1, text, params=params["unet"]), "channels first"),
        (lambda: pipeline.unet(sample, 1, text[..., :9], params=params["unet"]), r"encoder_hidden_states.*48\]"),
        (lambda: pipeline.text_encoder(np.full((1, 77), -1), params=params["text_encoder"]), "has the id -1"),
        (lambda: pipeline.text_encoder(np.ones((1, 78), int), params=params["text_encoder"]), "T up to 77"),
        (lambda: pipeline.tokenizer("a", return_tensors="pt"), "return_tensors='pt'"),
        (lambda: pipeline.tokenizer("a", max_length=78), "max_length=78 is more than 77"),
        (lambda: pipeline.scheduler.step(params["scheduler"], sample, 1, sample), "set_timesteps"),
        (lambda: pipeline.scheduler.set_timesteps(params["scheduler"], 4), r"shape=\(\)"),
        (lambda: pipeline.scheduler.set_timesteps(params["scheduler"], 0, LATENTS), "steps=0"),
    ]
    for call, message in bad:
        with pytest.raises(canvax.InputError, match=message):
            call()
    ddpm = flax_api.FlaxDDPMScheduler()
    with pytest.raises(canvax.InputError, match="pass key="):
        ddpm.step(ddpm.set_timesteps(ddpm.create_state(), 4, LATENTS), sample, 1, sample)


def test_every_class_has_an_answer() -> None:
    for name in FLAX:
        with pytest.raises(ImportError, match=f"^{name}: "):
            exec(f"from canvax.flax_api import {name}")
        with pytest.raises(AttributeError):
            getattr(canvax, name if name.startswith("Flax") else "FlaxDDIMScheduler")


def test_every_attribute_has_an_answer(old: Old) -> None:
    pipeline, _ = old
    holders = (pipeline, pipeline.unet, pipeline.tokenizer, pipeline.scheduler)
    for name in FLAX_ATTRIBUTES:
        holder = next(holder for holder in holders if not hasattr(holder, name))
        with pytest.raises(AttributeError, match=f"^{name}: "):
            getattr(holder, name)


def test_names_that_nobody_knows(old: Old) -> None:
    pipeline, _ = old
    with pytest.raises(AttributeError, match="did you mean 'prepare_inputs'"):
        pipeline.prepare_input  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'shard'"):
        flax_api.shardd  # noqa: B018


def test_every_argument_has_an_answer(old: Old, folder: Path) -> None:
    for name in (name for name, entry in FLAX_CALL.items() if entry.answer):
        with refused(name):
            old[0](**{name: 7})
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": folder, "dtype": "float32", "token": "x"}
    for name in FLAX_LOAD:
        with pytest.raises(canvax.InputError, match=f"^{name}[:=]"):
            FlaxStableDiffusionPipeline.from_pretrained(**arguments, **{name: 7})


Z = np.zeros(LATENTS, np.float32)
TIMES, WORDS = Z[:1].astype("datetime64[s]"), np.full(LATENTS, "x", object)
