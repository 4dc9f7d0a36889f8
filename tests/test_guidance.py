"""Classifier-free guidance against its formulas, written down once more in numpy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.guidance import Guidance, guide
from canvax.samplers import build_table

rng = np.random.default_rng(0)
SPREADS = np.array([0.5, 4.0]).reshape(2, 1, 1, 1) * np.array([1.0, 0.2, 3.0])  # of images, and of channels
CONDITIONAL = (SPREADS * rng.standard_normal((2, 6, 5, 3)) + 0.7).astype(np.float32)
UNCONDITIONAL = (2.5 * rng.standard_normal((2, 6, 5, 3)) - 0.3).astype(np.float32)
SCALE, RESCALE = np.array([3.0, 9.0], np.float32), np.array([0.3, 0.8], np.float32)


def guided_and_rescaled(image: int) -> np.ndarray:
    """Lin et al. 2024, section 3.4: guidance, then equations 15 and 16, for one image alone."""
    positive, negative = (outputs[image].astype(np.float64) for outputs in (CONDITIONAL, UNCONDITIONAL))
    guided = negative + float(SCALE[image]) * (positive - negative)
    rescaled = guided * np.std(positive) / np.std(guided)
    part = float(RESCALE[image])
    return part * rescaled + (1 - part) * guided


def test_each_image_is_guided_and_rescaled_by_its_own_numbers() -> None:
    got = np.asarray(guide(UNCONDITIONAL, CONDITIONAL, SCALE, RESCALE))  # pyright: ignore[reportArgumentType]
    assert got.dtype == np.float32
    for image in range(2):
        np.testing.assert_allclose(got[image], guided_and_rescaled(image), rtol=1e-5, atol=1e-5)


def test_a_full_rescale_has_the_spread_of_the_conditional_output() -> None:
    got = np.asarray(guide(UNCONDITIONAL, CONDITIONAL, SCALE, np.ones(2, np.float32)))  # pyright: ignore
    np.testing.assert_allclose(got.std((1, 2, 3)), CONDITIONAL.std((1, 2, 3)), rtol=1e-5)


def test_scale_one_is_no_guidance_and_nothing_is_divided_by_zero() -> None:
    none = np.zeros(2, np.float32)
    got = np.asarray(guide(UNCONDITIONAL, CONDITIONAL, np.ones(2, np.float32), none))  # pyright: ignore
    np.testing.assert_allclose(got, CONDITIONAL, atol=2e-6)
    blank = np.zeros_like(CONDITIONAL)
    np.testing.assert_array_equal(guide(blank, blank, SCALE, RESCALE), blank)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("perturbs", [False, True])
@pytest.mark.parametrize("method", ["cfg", "cfg_zero", "apg", lambda negative, prompt, scale: 2 * prompt - negative])
def test_a_row_without_guidance_is_as_if_it_were_alone(method: Any, perturbs: bool) -> None:
    """Beside an image that is guided, whatever the method and its numbers."""
    outputs = np.stack([UNCONDITIONAL, CONDITIONAL, CONDITIONAL**2][: 2 + perturbs], axis=1)
    numbers = {"guidance": [1, 5], "rescale": [0.7, 0.7], "p": [0.9, 0.9], "q": [-0.5, -0.5], "step": [0, 0]}
    row: Any = {name: np.array(value, np.float32) for name, value in numbers.items()}
    row |= {"timestep": np.full(2, 500, np.float32), "method": np.ones((2, 2), np.float32)}
    row["pag"] = np.ones((2, 2), np.float32) * np.array([3, 0.001], np.float32)
    x, alone = jnp.asarray(CONDITIONAL), Guidance(perturbs=perturbs)
    together = Guidance(method, perturbs).denoised(x, jnp.asarray(outputs), row)
    want = alone.denoised(x, jnp.asarray(outputs[:, 1:]), row)
    np.testing.assert_array_equal(together[0], want[0])
    assert np.abs(together[1] - want[1]).max() > 1e-2


KINDS: list[dict[str, Any]] = [
    {"guidance_method": "apg", "guidance_settings": {"eta": 0.5, "norm": 3.0}},
    {"guidance_method": "cfg_zero", "guidance_settings": {"zero_steps": 1}},
    {"pag_scale": 2.0, "pag_adaptive_scale": 0.001},
]


def draw(emoji: canvax.Pipeline, **changes: Any) -> canvax.Result:
    return emoji("a fox", **{"seed": 1, "num_inference_steps": 4, "guidance_scale": 5.0, "progress": False} | changes)


def test_a_rule_that_sees_the_row(emoji: canvax.Pipeline) -> None:
    """Guidance of the first half of the run, by the rule and by the steps."""

    def early(negative: Any, conditional: Any, scale: Any, row: Any) -> Any:
        assert row["timestep"].shape == scale.shape
        scale = jnp.where(row["progress"] < 0.5, scale, 1.0)[:, None, None, None]
        return negative + scale * (conditional - negative)

    call: dict[str, Any] = {"num_inference_steps": 4, "seed": 1, "progress": False}
    got = emoji("a fox", guidance_scale=4.0, guidance_method=early, **call)
    want = emoji("a fox", guidance_steps=[4.0, 4.0, 1.0, 1.0], **call)
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_of_a_kind_compile_nothing(kind: dict[str, Any], emoji: canvax.Pipeline) -> None:
    first = draw(emoji, **kind)
    assert np.abs(first.latents - draw(emoji).latents).max() > 1e-3
    name, value = next(iter(reversed(kind.items())))
    if name == "guidance_settings":
        other = {name: {key: number + 1 for key, number in value.items()}}
    else:
        other = {name: tuple(np.array(value) * 0.9) if isinstance(value, tuple) else value / 2}
    second = draw(emoji, **kind | other, seed=2, num_inference_steps=5)
    assert second.compilations == 0
    assert np.abs(draw(emoji, **kind | other).latents - first.latents).max() > 1e-4


def test_apg_can_be_ordinary_guidance(emoji: canvax.Pipeline) -> None:
    want = draw(emoji).latents
    kind: dict[str, Any] = {"guidance_method": "apg", "guidance_settings": {"eta": 1, "norm": 0}}
    np.testing.assert_allclose(draw(emoji, **kind).latents, want, atol=1e-3)


@pytest.mark.parametrize("sampler", ["Euler", "Heun", "DPM2"])
@pytest.mark.parametrize("count", [1, 2])
def test_zero_steps_are_whole_steps(sampler: str, count: int, emoji: canvax.Pipeline) -> None:
    """The output is 0 in every evaluation of the first steps, so that D is p * x there."""
    seen: list[canvax.Step] = []
    settings = {"guidance_method": "cfg_zero", "guidance_settings": {"zero_steps": count}}
    draw(emoji, sampler=sampler, callback=seen.append, **settings)
    table = build_table(emoji.model.scheduler, 4, sampler=sampler)
    assert len(seen) == len(table)
    for row in range(1, len(table)):
        nothing = np.allclose(seen[row].denoised, table.p[row] * seen[row - 1].latents, rtol=1e-4, atol=1e-4)
        assert nothing == (table.step[row] < count), row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_method": "best"}, "guidance_method='best' is not known"),
        ({"guidance_settings": {"norm": 1}}, "'norm', which cfg does not"),
        (
            {"guidance_method": "apg", "guidance_settings": {"mimic": 1}},
            "'mimic', which apg does not have; it has eta, norm",
        ),
        ({"guidance_method": "apg", "guidance_settings": {"norm": -1}}, "norm=-1"),
        ({"guidance_method": "apg", "guidance_settings": {"norm": "x"}}, "norm='x', which is not"),
        ({"guidance_method": "apg", "guidance_settings": 5}, "guidance_settings=5 are not names with values"),
        ({"guidance_method": "apg", "guidance_rescale": 0.5}, "leave one out"),
        ({"pag_scale": -1}, "pag_scale=-1 is"),
        ({"pag_scale": 1, "reuse": 2}, "^reuse=2"),
    ],
)
def test_bad_kinds(changes: dict[str, Any], message: str, emoji: canvax.Pipeline) -> None:
    with pytest.raises(canvax.InputError, match=message):
        draw(emoji, **changes)
