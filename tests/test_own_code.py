"""What a researcher gives to a call: keys of JAX, samplers and guidance of their own, arrays that stay on devices."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.parallel.mesh import make_mesh
from canvax.pipelines.checks import check_seeds
from canvax.samplers import NoiseSchedule, SamplerOptions, SamplerTable, build_table, find
from canvax.samplers.rows import D, X, column, lag, rows, step_table
from canvax.samplers.spacing import training_path
from tests.support.refusals import refused

QUIET = canvax.Options(progress=False)


def draw(pipe: canvax.Pipeline, prompt: Any = "a cat", **changes: Any) -> canvax.Result:
    return pipe(prompt, **{"num_inference_steps": 3, "seed": 1, "options": QUIET} | changes)


@pytest.mark.parametrize(
    ("keys", "seeds"),
    [
        (jax.random.key(3), [3, 4]),
        (jax.random.PRNGKey(3), [3, 4]),
        (np.array([[1, 2], [0, 7]], np.uint32), [2**32 + 2, 7]),
        (jax.random.split(jax.random.key(3)), [0, 1]),
        ([jax.random.key(3), jax.random.PRNGKey(5)], [3, 5]),
        (np.array([1, 2], np.uint32), [1, 2]),  # NumPy has no keys
    ],
)
def test_keys_are_seeds(keys: Any, seeds: list[int]) -> None:
    if isinstance(keys, jax.Array) and keys.shape == (2,) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        high, low = np.asarray(jax.random.key_data(keys), np.uint64).T
        seeds = [int(word) for word in high << np.uint64(32) | low]
    assert check_seeds(keys, 2) == seeds


def test_keys_of_other_generators() -> None:
    """Their words are more than a seed has bits."""
    first, second = (check_seeds(jax.random.key(n, impl="rbg"), 1) for n in (0, 1))
    assert first != second
    assert check_seeds(jax.random.key(0, impl="rbg"), 1) == first


@pytest.mark.parametrize("keys", [jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.key(0), (2, 1))])
def test_keys_that_are_refused(keys: Any) -> None:
    with pytest.raises(canvax.InputError):
        check_seeds(keys, 2)


def test_a_key_makes_the_image_of_its_seed(emoji: canvax.Pipeline) -> None:
    """The metadata makes it again."""
    key = jax.random.fold_in(jax.random.key(0), 5)
    result = draw(emoji, seed=key, sampler="Euler a")
    seed = result.metadata[0]["seed"]
    assert isinstance(seed, int)
    np.testing.assert_array_equal(draw(emoji, seed=seed, sampler="Euler a").pixels, result.pixels)


def euler(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """A solver that the catalogue does not have by this name."""
    return find("Euler")[0].solver(schedule, steps, options)


def test_a_sampler_by_name_by_spec_by_solver_and_as_a_table(emoji: canvax.Pipeline) -> None:
    spec = dataclasses.replace(find("Euler")[0], name="mine", label="Mine", diffusers_class=None)
    table = build_table(emoji.model.scheduler, 3, sampler="Euler")
    want = draw(emoji, sampler="Euler")
    draw(emoji, sampler=euler)
    for sampler in (euler, spec, find("Euler")[0], table):
        changes = {"num_inference_steps": None} if sampler is table else {}
        result = draw(emoji, sampler=sampler, **changes)
        np.testing.assert_array_equal(result.pixels, want.pixels)
        assert result.compilations == 0
        assert result.metadata[0]["num_inference_steps"] == 3
    assert draw(emoji, sampler=find("Euler")[0]).metadata[0]["sampler"] == "euler"
    assert draw(emoji, sampler=euler).metadata[0].items() >= {"sampler": "custom", "sampler_label": "euler"}.items()
    record = draw(emoji, sampler=table).metadata[0]
    assert (record["sampler"], record["sampler_sha256"]) == ("custom", table.sha256)


def test_guidance_of_a_call_is_for_tables_too(emoji: canvax.Pipeline) -> None:
    table = build_table(emoji.model.scheduler, 3, sampler="Euler")
    for changes in ({"guidance_scale": 2.0}, {"guidance_steps": (5, 3, 2)}, {"guidance_interval": (0.2, 0.8)}):
        want, got = (draw(emoji, sampler=sampler, **changes) for sampler in ("Euler", table))
        np.testing.assert_array_equal(got.pixels, want.pixels)


@pytest.mark.slow
def test_a_solver_reads_settings_and_strength(emoji: canvax.Pipeline) -> None:
    image = np.linspace(0, 1, 64 * 64 * 3, dtype=np.float32).reshape(64, 64, 3)
    changes = {"image": image, "strength": 0.6, "sampler_settings": {"s_churn": 5.0}, "sigmas": "karras"}
    want, got = (draw(emoji, sampler=sampler, num_inference_steps=5, **changes) for sampler in ("Euler", euler))
    np.testing.assert_array_equal(got.pixels, want.pixels)


def test_a_table_begins_where_it_was_built_to(emoji: canvax.Pipeline) -> None:
    """With an image, in place of a strength."""
    image = np.linspace(0, 1, 64 * 64 * 3, dtype=np.float32).reshape(64, 64, 3)
    want = draw(emoji, image=image, strength=0.4, num_inference_steps=5, sampler="DPM++ 2M")
    table = build_table(emoji.model.scheduler, 5, sampler="DPM++ 2M", skip=3)
    got = draw(emoji, image=image, num_inference_steps=None, sampler=table)
    np.testing.assert_array_equal(got.pixels, want.pixels)
    assert got.metadata[0]["steps_run"] == 2


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"num_inference_steps": 4}, "num_inference_steps"),
        ({"strength": 0.5, "image": np.zeros((64, 64, 3))}, "strength"),
        ({"sigmas": "karras"}, "sigmas"),
        ({"eta": 0.5}, "eta"),
        ({"denoising_end": 0.5}, "denoising_end"),
        ({"hires": 2}, "hires"),
    ],
)
def test_what_a_table_leaves_no_place_for(emoji: canvax.Pipeline, changes: Any, argument: str) -> None:
    table = build_table(emoji.model.scheduler, 3, sampler="Euler")
    with pytest.raises(canvax.InputError, match=argument):
        draw(emoji, sampler=table, **{"num_inference_steps": None} | changes)


@pytest.mark.parametrize("sampler", [5, SamplerTable, lambda schedule: None, lambda schedule, steps, options: None])
def test_what_is_no_sampler(emoji: canvax.Pipeline, sampler: Any) -> None:
    with pytest.raises(canvax.InputError, match="sampler"):
        draw(emoji, sampler=sampler)


def of_rows(schedule: NoiseSchedule, steps: int, options: SamplerOptions, slots: Any) -> SamplerTable:
    """A solver on a path whose first alpha is 0 for the bundled model."""
    path = training_path(schedule, steps, options)
    with np.errstate(divide="ignore", invalid="ignore"):
        return step_table(path, rows(steps, slots(path)))


@pytest.mark.parametrize(
    ("argument", "slots"),
    [
        ("sampler", lambda path: {0: X / column(path.alpha[:-1])}),
        ("sampler", lambda path: {0: X, 1: column(np.nan_to_num(lag(1 / path.alpha[:-1], 1), posinf=np.inf)) * D}),
        ("steps", lambda path: {0: X, 1: column(np.where(np.arange(len(path)) == 2, np.nan, 1.0)) * D}),
        ("slots", lambda path: {6: X}),
        ("slots", lambda path: {-1: X}),
        ("slots", lambda path: {0: column(path.std[1:-1]) * X}),
        ("slots", lambda path: {0: column(path.std[1:2]) * X}),
    ],
)
def test_rows_that_cannot_be_run(emoji: canvax.Pipeline, argument: str, slots: Any) -> None:
    """An alpha of 0 is not taken for too many steps."""
    with refused(argument):
        draw(emoji, sampler=partial(of_rows, slots=slots))


def test_a_table_with_guidance_is_refused(emoji: canvax.Pipeline) -> None:
    """Of two scales one would be ignored."""
    table = build_table(emoji.model.scheduler, 3, sampler="Euler", guidance=5.0)
    with pytest.raises(canvax.InputError, match="guidance_scale"):
        draw(emoji, sampler=table, num_inference_steps=None)


def plain(negative: Any, conditional: Any, scale: Any) -> Any:
    """Classifier-free guidance, of denoised images."""
    return negative + scale[:, None, None, None] * (conditional - negative)


@pytest.mark.slow
def test_guidance_of_ones_own(emoji: canvax.Pipeline) -> None:
    """Compiled once for each function object; nothing else compiles again."""
    want = draw(emoji, guidance_scale=4.0)
    got = draw(emoji, guidance_scale=4.0, guidance_method=plain)
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)
    assert got.compilations == 1  # the denoiser
    for changes in ({"guidance_scale": 2.0}, {"sampler": "Heun"}, {"guidance_steps": (4, 3, 2)}, {"seed": 5}):
        assert draw(emoji, **{"guidance_method": plain} | changes).compilations == 0
    other = draw(emoji, guidance_method=lambda negative, conditional, scale: conditional)
    assert other.compilations == 1
    assert got.metadata[0]["options"] == {"guidance_method": "plain"}


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_method": lambda negative, conditional: conditional},
        {"guidance_method": 5},
        {"guidance_method": plain, "guidance_settings": {"eta": 1.0}},
        {"guidance_method": plain, "guidance_rescale": 0.5},
    ],
)
def test_guidance_that_is_refused(emoji: canvax.Pipeline, changes: Any) -> None:
    with pytest.raises(canvax.InputError, match="guidance"):
        draw(emoji, **changes)


def is_on_devices(array: Any, count: int) -> bool:
    return isinstance(array, jax.Array) and len(array.sharding.device_set) == count


def test_images_stay_on_the_devices(emoji: canvax.Pipeline) -> None:
    want = draw(emoji)
    draw(emoji, output_type="jax")
    result = draw(emoji, output_type="jax")
    assert result.compilations == 0
    assert result.images is result.pixels
    np.testing.assert_array_equal(result.pixels, want.pixels)
    np.testing.assert_array_equal(result.latents, want.latents)
    assert is_on_devices(result.pixels, 1)
    assert is_on_devices(result.latents, 1)
    assert result.grid().size == (64, 64)


@pytest.mark.slow
def test_a_mask_and_a_second_pass_on_the_devices(emoji: canvax.Pipeline) -> None:
    image, mask = np.ones((64, 64, 3), np.float32), np.zeros((64, 64), np.float32)
    mask[:32] = 1
    for changes in ({"image": image, "mask": mask}, {"hires": 1.5}):
        want, got = (draw(emoji, output_type=output, **changes) for output in ("np", "jax"))
        assert is_on_devices(got.images, 1)
        np.testing.assert_array_equal(got.images, want.images)


@pytest.mark.weekly
def test_several_devices(emoji: canvax.Pipeline) -> None:
    """Keys, a table, guidance and arrays of one's own together, from an image."""
    pipe = canvax.load("emoji", mesh=make_mesh(jax.devices()[:2]))
    image = np.linspace(0, 1, 64 * 64 * 3, dtype=np.float32).reshape(64, 64, 3)
    keys = jax.random.split(jax.random.key(7), 4)
    changes: dict[str, Any] = {"image": image, "guidance_method": plain, "num_inference_steps": None}
    changes |= {"sampler": build_table(emoji.model.scheduler, 5, sampler="Euler a", skip=2), "output_type": "jax"}
    batch = draw(pipe, ["a cat"] * 4, seed=keys, **changes)
    assert is_on_devices(batch.images, 2)
    assert batch.images.sharding.shard_shape(batch.images.shape) == (2, 64, 64, 3)  # type: ignore[attr-defined]
    alone = draw(emoji, seed=keys[2], **changes)
    np.testing.assert_allclose(batch.latents[2], alone.latents[0], atol=1e-4)
    three = draw(pipe, ["a cat"] * 3, seed=keys[:3], **changes)
    np.testing.assert_allclose(three.pixels, batch.pixels[:3], atol=1e-5)


def test_outputs_that_are_refused(emoji: canvax.Pipeline) -> None:
    for changes in ({"output_type": "pt"}, {"output_type": 5}):
        with pytest.raises(canvax.InputError, match="output_type"):
            draw(emoji, **changes)
    checked = dataclasses.replace(emoji, safety_checker=lambda result: result)  # type: ignore[arg-type]
    with pytest.raises(canvax.InputError, match="output_type"):
        draw(checked, output_type="jax")


def test_the_parameters_of_a_caller_stay_as_they_are(emoji: canvax.Pipeline) -> None:
    pipe = dataclasses.replace(emoji)
    mine = jax.tree.map(np.asarray, emoji.params)
    before = {name: dict(part) for name, part in mine.items()}
    pipe.params = mine
    want = draw(emoji)
    np.testing.assert_array_equal(draw(pipe).pixels, want.pixels)
    assert pipe.params is not mine  # they are on the devices now
    assert draw(pipe).metadata == want.metadata
    assert all(mine[name][key] is leaf for name, part in before.items() for key, leaf in part.items())
