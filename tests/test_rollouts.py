"""The loop as a pure function is the pipeline's loop, and its numbers are those of the table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from test_new_family import pipeline_of

import canvax
from canvax.guidance import NEGATIVE, PLAIN, PROMPT, Alone, rule_of
from canvax.samplers import SLOTS
from examples.new_family import NETWORKS
from tests.support.refusals import refused

PROMPTS = ["a fox", "a hen"]


@pytest.fixture(scope="module")
def pipe() -> canvax.Pipeline:
    return pipeline_of(NETWORKS)


def transitions(pipe: canvax.Pipeline, **arguments: Any) -> tuple[canvax.Start, canvax.Rollout]:
    start = pipe.start(PROMPTS, seed=[3, 8], num_inference_steps=6, **arguments)
    return start, canvax.rollout(pipe, pipe.params, *start, record=lambda e: (e.transition, e.denoised, e.log_prob))


@pytest.mark.parametrize("arguments", [
    {"sampler": "Euler a", "guidance_scale": 4.0, "negative_prompt": "a dog"},
    {"sampler": "DPM++ 2M", "guidance_scale": 4.0, "guidance_method": "apg", "guidance_settings": {"norm": 0.1}},
    {"sampler": "Euler a", "guidance_scale": 0.6, "guidance_method": "cfg_pp"},
    {"sampler": "DPM++ 2M SDE", "guidance_scale": 1.0, "height": 24, "width": 16},
    {"sampler": "UniPC", "guidance_scale": 4.0, "guidance_steps": [4, 4, 1, 1, 4, 2]},
], ids=lambda arguments: f"{arguments['sampler']} {arguments.get('guidance_method', 'cfg')}")  # fmt: skip
def test_it_is_the_run_of_the_pipeline(pipe: canvax.Pipeline, arguments: dict[str, Any]) -> None:
    want = pipe(PROMPTS, seed=[3, 8], num_inference_steps=6, progress=False, **arguments)
    got = canvax.rollout(pipe, pipe.params, *pipe.start(PROMPTS, seed=[3, 8], num_inference_steps=6, **arguments))
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-5)


def test_a_start_is_an_argument_of_a_program(pipe: canvax.Pipeline) -> None:
    """Of one program for other prompts, seeds and samplers; its rule of guidance is a part of the program."""
    traced = []

    @jax.jit
    def run(params: Any, start: Any) -> Any:
        traced.append(start)
        return canvax.rollout(pipe, params, *start).latents

    asked: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 3.0}
    starts = [pipe.start(PROMPTS, seed=[3, 8], **asked), pipe.start(PROMPTS, seed=[1, 2], sampler="Euler", **asked)]
    starts.append(pipe.start(PROMPTS, seed=[3, 8], guidance_method="apg", guidance_settings={"eta": 0.5}, **asked))
    for start in starts:
        want = canvax.rollout(pipe, pipe.params, *start).latents
        np.testing.assert_allclose(run(pipe.params, start), want, atol=1e-4)
    assert len(traced) == 2


@pytest.mark.slow
def test_the_bundled_model(emoji: canvax.Pipeline) -> None:
    asked: dict[str, Any] = {"seed": 1, "num_inference_steps": 3, "sampler": "Euler a"}
    want = emoji("a red apple", progress=False, **asked)
    got = canvax.rollout(emoji, emoji.params, *emoji.start("a red apple", **asked))
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)


@pytest.mark.parametrize("sampler", ["Euler a", "DPM++ 2M SDE", "Euler"])
def test_log_probabilities(pipe: canvax.Pipeline, sampler: str) -> None:
    """In float64 from what was recorded; the last step of all three is without noise."""
    start, run = transitions(pipe, sampler=sampler)
    (states, samples), denoised, log_prob = jax.device_get(run.record)
    for row, matrix in enumerate(start.table.M):
        arrays = np.stack([*np.moveaxis(states[row], 1, 0), denoised[row], np.zeros_like(denoised[row])])
        mean, deviation = np.tensordot(matrix[0], arrays.astype(np.float64), axes=1), matrix[0, -1]
        if deviation == 0:
            assert (log_prob[row] == 0).all()
            np.testing.assert_allclose(samples[row], mean, atol=1e-4)
        else:
            want = norm.logpdf(samples[row], mean, deviation).sum(axis=(1, 2, 3))
            np.testing.assert_allclose(log_prob[row], want, rtol=1e-4)
    assert (log_prob != 0).any() == (sampler != "Euler")


@pytest.mark.slow
def test_along_a_recorded_run(pipe: canvax.Pipeline) -> None:
    """Rows stand for themselves: some of them in another order have the same numbers, and other weights others."""
    start, run = transitions(pipe, sampler="Euler a")
    along, _, log_prob = run.record
    rows = jnp.array([3, 1])
    columns, part = start.table.columns(), jax.tree.map(lambda array: array[rows], along)
    columns = {name: array if name == "init_scale" else array[rows] for name, array in columns.items()}

    def chosen(weights: Any) -> Any:
        params = {**pipe.params, "mlp": weights}
        arguments = (start.noise, start.keys, start.conditions, columns)
        return canvax.rollout(pipe, params, *arguments, along=part, record=lambda e: e.log_prob).record

    weights = pipe.params["mlp"]
    np.testing.assert_allclose(chosen(weights), log_prob[rows], rtol=1e-5)
    moved = jax.tree.map(lambda leaf: leaf + 0.05, weights)
    assert jnp.abs(chosen(moved) - log_prob[rows]).min() > 1e-3
    slope = jax.grad(lambda weights: chosen(weights).sum())(moved)
    near = jax.tree.map(lambda leaf, change: leaf + 1e-6 * change, moved, slope)
    rise = sum(float((change**2).sum()) for change in jax.tree.leaves(slope))
    np.testing.assert_allclose(chosen(near).sum() - chosen(moved).sum(), 1e-6 * rise, rtol=0.1)


def test_along_a_run_with_a_memory(pipe: canvax.Pipeline) -> None:
    """The recorded state has the memory of the guidance, so that rows stand for themselves."""
    momentum: dict[str, Any] = {"guidance_method": "apg", "guidance_settings": {"norm": 0, "momentum": -0.5}}
    start, run = transitions(pipe, sampler="Euler a", guidance_scale=4.0, **momentum)
    along, _, log_prob = run.record
    assert along[0].shape[2] == SLOTS + 1
    again = canvax.rollout(pipe, pipe.params, *start, along=along, record=lambda e: e.log_prob).record
    np.testing.assert_allclose(again, log_prob, rtol=1e-5)


@pytest.mark.slow
def test_the_sample_is_a_constant(pipe: canvax.Pipeline) -> None:
    """The gradient of a step that is run is that of the step as recorded."""
    start = pipe.start("a fox", seed=3, num_inference_steps=6, sampler="Euler a")
    one = start._replace(table=start.table.take(0, 1))
    along = canvax.rollout(pipe, pipe.params, *one, record=lambda e: e.transition).record

    def slope(along: Any) -> Any:
        def log_prob(weights: Any) -> Any:
            params = {**pipe.params, "mlp": weights}
            return canvax.rollout(pipe, params, *one, along=along, record=lambda e: e.log_prob).record.sum()

        return jax.grad(log_prob)(pipe.params["mlp"])

    run, recorded = slope(None), slope(along)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(recorded)) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), run, recorded)


def test_one_program_for_all_samplers(pipe: canvax.Pipeline) -> None:
    traced = []

    @jax.jit
    def run(params: Any, start: tuple[Any, ...], columns: Any) -> Any:
        traced.append(1)
        return canvax.rollout(pipe, params, *start, columns).latents

    for sampler in ("Euler", "DPM++ 2M", "Euler a"):
        start = pipe.start(PROMPTS, seed=[3, 8], num_inference_steps=6, sampler=sampler)
        got = run(pipe.params, start[:3], start.table)
        np.testing.assert_allclose(got, canvax.rollout(pipe, pipe.params, *start).latents, atol=1e-5)
        noise = start.noise + 0 * got  # computed with the parameters, and so on their devices
        run(pipe.params, (noise, *start[1:3]), start.table)
    assert len(traced) == 1
    assert run._cache_size() == 1


@pytest.mark.slow
def test_gradients_are_those_without_recomputing(pipe: canvax.Pipeline) -> None:
    start = pipe.start("a fox", seed=3, num_inference_steps=4)

    def energy(noise: Any, *, remat: bool) -> Any:
        return (canvax.rollout(pipe, pipe.params, noise, *start[1:], remat=remat).latents ** 2).sum()

    slopes = [jax.grad(lambda noise, remat=remat: energy(noise, remat=remat))(start.noise) for remat in (False, True)]
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-4, atol=1e-5)
    assert jnp.abs(slopes[0]).max() > 0
    many = jax.vmap(lambda noise: canvax.rollout(pipe, pipe.params, noise[None], *start[1:]).latents[0])
    both = many(jnp.concatenate([start.noise, -start.noise]))
    np.testing.assert_allclose(both[0], canvax.rollout(pipe, pipe.params, *start).latents[0], atol=1e-5)


def test_a_rule_that_the_network_does_not_know(pipe: canvax.Pipeline) -> None:
    """``golden/errors.txt`` has other calls that are refused."""
    start = pipe.start(PROMPTS, num_inference_steps=2)
    with refused("guidance_method"):
        canvax.rollout(pipe, pipe.params, *start[:4], rule_of("cfg", perturbs=True))


class Twice(Alone):
    samples = NEGATIVE, PROMPT, PROMPT  # type: ignore[assignment]


@pytest.mark.slow
def test_conditions_that_a_rule_does_not_read(pipe: canvax.Pipeline) -> None:
    """They are refused, and not ignored; composed prompts are read."""
    start = pipe.start("a fox", num_inference_steps=2, guidance_scale=3.0)
    three = (*start.conditions, pipe.encode("a hen"))

    def run(conditions: Any, rule: Any) -> Any:
        return canvax.rollout(pipe, pipe.params, start.noise, start.keys, conditions, start.table, rule).latents

    for conditions in (three, (), {}, {"text": three[0]["text"]}, (three[0], {})):
        with refused("conditions"):
            run(conditions, PLAIN)
    for rule in (Twice(), "cgf"):
        with refused("guidance_method"):
            run(start.conditions, rule)
    both, first = (run(three[:count], rule_of("cfg", parts=count - 1)) for count in (3, 2))
    assert np.abs(both - first).max() > 1e-3
    np.testing.assert_array_equal(first, run(start.conditions, "cfg"))
