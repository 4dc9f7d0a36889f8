"""Classifier-free guidance against its formulas, written down once more in numpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.guidance import (
    NEGATIVE,
    PERTURBED,
    PROMPT,
    Evaluated,
    Number,
    columns_of,
    conditions_of,
    guide,
    guided,
    memory_of,
    off,
    per_image,
    rule_of,
)
from canvax.models.denoiser import Facts
from canvax.originals import foreign
from canvax.samplers import SLOTS, build_table

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
    rule = rule_of(method, perturbs=perturbs)
    row |= {"timestep": np.full(2, 500, np.float32)} | {name: np.ones(2, np.float32) for name in columns_of(rule)}
    row |= {"guidance pag_adaptive_scale": np.full(2, 0.001, np.float32)}
    x = jnp.asarray(CONDITIONAL)
    memory = jnp.ones((2, memory_of(rule), *x.shape[1:]))
    together, kept = guided(rule, x, jnp.asarray(outputs), row, memory)
    want, _ = guided(off(rule), x, jnp.asarray(outputs[:, 1:]), row, memory)
    np.testing.assert_array_equal(kept[0], memory[0])
    assert method != "apg" or np.abs(kept[1] - memory[1]).max() > 1e-2
    np.testing.assert_array_equal(together[0], want[0])
    assert np.abs(together[1] - want[1]).max() > 1e-2


KINDS: list[dict[str, Any]] = [
    {"guidance_method": "apg", "guidance_settings": {"eta": 0.5, "norm": 3.0}},
    {"guidance_method": "apg", "guidance_settings": {"norm": 0, "momentum": -0.5}},
    {"guidance_method": "cfg_zero", "guidance_settings": {"zero_steps": 1}},
    {"pag_scale": 2.0, "pag_adaptive_scale": 0.001},
]


def draw(emoji: canvax.Pipeline, **changes: Any) -> canvax.Result:
    return emoji("a fox", **{"seed": 1, "num_inference_steps": 4, "guidance_scale": 5.0, "progress": False} | changes)


@pytest.mark.slow
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


@pytest.mark.slow
def test_momentum_is_of_each_image(emoji: canvax.Pipeline) -> None:
    """In a batch of images with other prompts, in parts of the run with and without guidance, and in a rollout."""
    call: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": 5.0, "guidance_method": "apg"}
    call |= {"guidance_settings": {"norm": 0, "momentum": -0.75}, "guidance_steps": [5.0, 3.0, 1.0, 5.0, 4.0]}
    together = emoji(["a fox", "a hen"], seed=[1, 2], progress=False, **call).latents
    alone = emoji("a hen", seed=2, progress=False, **call).latents
    np.testing.assert_allclose(together[1:], alone, atol=1e-4)
    start = emoji.start("a hen", seed=2, **call)
    run = canvax.rollout(emoji, emoji.params, *start, record=lambda seen: (seen.state, seen.denoised))
    np.testing.assert_allclose(run.latents, alone, atol=1e-4)
    without = emoji("a hen", seed=2, progress=False, **call | {"guidance_settings": {"norm": 0}}).latents
    assert np.abs(alone - without).max() > 1e-2


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


@dataclass(frozen=True)
class Away:
    """Perturbed-attention guidance, written as a user would."""

    samples = NEGATIVE, PROMPT, PERTURBED
    columns: ClassVar[Any] = {"strength": Number(2.0, 0.0, 10.0)}

    def denoised(self, seen: Evaluated) -> Any:
        negative, conditional, perturbed = (seen.image(role) for role in self.samples)
        guided = negative + per_image(seen.column("guidance")) * (conditional - negative)
        return guided + per_image(seen.column("strength")) * (conditional - perturbed)


@pytest.mark.slow
def test_a_rule_with_three_roles(emoji: canvax.Pipeline) -> None:
    """Compiled once, by what it is equal to, whatever its numbers."""
    want = [draw(emoji, pag_scale=scale).latents for scale in (2.0, 1.0)]
    first = draw(emoji, guidance=Away())
    second = draw(emoji, guidance=Away(), guidance_settings={"strength": 1})
    np.testing.assert_allclose([first.latents, second.latents], want, atol=1e-4)
    assert (first.compilations, second.compilations) == (1, 0)
    assert second.metadata[0]["options"]["guidance_method"] == "Away"
    alone = draw(emoji, guidance=Away(), guidance_steps=[1.0] * 4)
    np.testing.assert_array_equal(alone.latents, draw(emoji, guidance_scale=1.0).latents)


@dataclass(frozen=True)
class Smoothed:
    """A difference averaged over the rows, written as a user would."""

    samples = NEGATIVE, PROMPT
    columns: ClassVar[Any] = {"share": Number(0.3, 0.0, 1.0)}
    memory = 2

    def denoised(self, seen: Evaluated) -> Any:
        share, conditional = per_image(seen.column("share")), seen.image(PROMPT)
        average = share * seen.memory[:, 0] + (1 - share) * (conditional - seen.image(NEGATIVE))
        guided = conditional + per_image(seen.column("guidance") - 1) * average
        return guided, jnp.stack([average, seen.memory[:, 1] + 1], axis=1)


@pytest.mark.slow
def test_a_rule_with_a_memory(emoji: canvax.Pipeline) -> None:
    """The memory is zero before the run, and that of the row before in each row."""
    call: dict[str, Any] = {"seed": 1, "num_inference_steps": 4, "guidance_scale": 5.0, "sampler": "DPM++ 2M"}
    start = emoji.start("a fox", guidance=Smoothed(), **call)
    run = canvax.rollout(emoji, emoji.params, *start, record=lambda seen: seen.state[:, -2:])
    states = np.asarray(run.record)
    np.testing.assert_array_equal(states[:, 0, 1, 0, 0, 0], range(4))
    assert not states[0].any()
    assert states[1:, :, 0].any(axis=(1, 2, 3, 4)).all()
    np.testing.assert_allclose(draw(emoji, guidance=Smoothed(), **call).latents, run.latents, atol=1e-4)
    ordinary = draw(emoji, guidance=Smoothed(), guidance_settings={"share": 0}, **call)
    np.testing.assert_allclose(ordinary.latents, draw(emoji, **call).latents, atol=1e-3)
    assert np.abs(run.latents - ordinary.latents).max() > 1e-2
    around = rule_of(Smoothed(), perturbs=True, parts=2)
    assert memory_of(around) == memory_of(off(around)) == 2
    np.testing.assert_array_equal(
        draw(emoji, guidance=Smoothed(), guidance_steps=[1.0] * 4).latents, draw(emoji, guidance_scale=1.0).latents
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["DDIM", "Euler", "Euler a"])
def test_cfg_pp(sampler: str, emoji: canvax.Pipeline) -> None:
    """Chung et al. 2024, algorithm 2, in float64: the image is guided, the noise of the step is the unguided one."""
    call: dict[str, Any] = {"seed": 1, "num_inference_steps": 5, "sampler": sampler, "negative_prompt": "a hen"}
    draw(emoji, **call)
    got = draw(emoji, guidance_method="cfg_pp", **call | {"guidance_scale": 0.7})
    assert got.compilations == 0  # it is the program of ordinary guidance
    assert got.metadata[0]["guidance_scale"] == 0.7
    assert got.metadata[0]["options"]["guidance_method"] == "cfg_pp"
    start = emoji.start("a fox", guidance_method="cfg_pp", guidance_scale=0.7, **call)
    seen = canvax.rollout(emoji, emoji.params, *start, record=lambda seen: seen.transition).record
    table = start.table
    for row in range(len(table)):
        x = np.asarray(seen[0][row, :, 0], np.float64)
        negative, conditional = (
            table.p[row] * x
            + table.q[row] * np.asarray(emoji.denoiser(table.c_in[row] * x.astype(np.float32), table.timestep[row], c))
            for c in start.conditions
        )
        image = negative + 0.7 * (conditional - negative)
        noise = (x - table.alpha[row] * negative) / table.std[row]
        a, c, fresh = table.M[row, 0, [0, SLOTS, SLOTS + 1]]
        # A row of the sampler is w D + a std eps, of any eps with x = alpha D + std eps.
        want = (c + a * table.alpha[row]) * image + a * table.std[row] * noise
        if not fresh:
            np.testing.assert_allclose(seen[1][row], want, atol=2e-4)
    np.testing.assert_allclose(seen[1][-1], got.latents, atol=1e-4)
    everywhere = draw(emoji, guidance_method="cfg_pp", **call | {"guidance_steps": [0.7] * 5})
    np.testing.assert_array_equal(everywhere.latents, got.latents)
    half = emoji.start("a fox", guidance_method="cfg_pp", guidance_interval=(0, 0.5), **call)
    assert (half.table.guidance[3:] == 1).all()


def test_where_cfg_pp_cannot_be_used(emoji: canvax.Pipeline) -> None:
    """A sampler that remembers images; the usual scale of ordinary guidance. The usual lambda is used without one."""
    for argument, changes in (("sampler", {"sampler": "DPM++ 2M", "guidance_scale": 0.5}), ("guidance_scale", {})):
        with pytest.raises(canvax.InputError) as caught:
            draw(emoji, guidance_method="cfg_pp", **{"sampler": "DDIM", **changes})
        assert caught.value.argument == argument
    image = emoji("a fox", guidance_method="cfg_pp", sampler="DDIM", num_inference_steps=1, seed=1, progress=False)
    assert image.metadata[0]["guidance_scale"] == 0.6


@dataclass(frozen=True)
class Weaker:
    """Autoguidance (Karras et al. 2024): away from a weaker network, which is a role of its own."""

    samples = PROMPT, 3
    columns: ClassVar[Any] = {}

    def denoised(self, seen: Evaluated) -> Any:
        weak, strong = seen.image(3), seen.image(PROMPT)
        return weak + per_image(seen.column("guidance")) * (strong - weak)


def test_a_role_of_a_network_of_ones_own(emoji: canvax.Pipeline) -> None:
    """Refused by name where the network does not know it."""
    with pytest.raises(canvax.InputError) as caught:
        draw(emoji, guidance=Weaker())
    assert caught.value.argument == "guidance"
    assert "role 3" in str(caught.value)
    networks = emoji.model.networks
    known = SimpleNamespace(component="unet", facts=Facts(roles=(*networks.denoiser.facts.roles, 3)))
    dataclasses.replace(networks, denoiser=known).check_roles(Weaker.samples)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_second_set_of_weights(emoji: canvax.Pipeline) -> None:
    """The page's autoguidance is its formula, of two networks apart, for images of a batch; off, it is one network."""
    page = (Path(__file__).parents[1] / "docs/guidance.md").read_text().partition("## Guidance by a weaker network")[2]
    scope: dict[str, Any] = {"pipe": emoji, **globals()}
    exec(page.partition("```python")[2].partition("```")[0].partition("both = ")[0], scope)
    weights = {"strong": scope["strong"], "weak": scope["weak"]}
    both = emoji.with_denoiser(scope["WithWeaker"](emoji.model.networks.denoiser), weights)
    start = both.start(["a fox", "a hen"], seed=[1, 2], guidance_scale=2.0, guidance=scope["Autoguidance"](),
                       num_inference_steps=3, sampler="DDIM")  # fmt: skip
    run = canvax.rollout(both, both.params, *start, record=lambda seen: (seen.x, seen.denoised))
    table = start.table
    for row in range(3):
        x, got = (array[row] for array in run.record)
        strong, weak = (
            table.p[row] * x
            + table.q[row]
            * emoji.denoiser(table.c_in[row] * x, table.timestep[row], start.conditions[1], params={"unet": weights[n]})
            for n in ("strong", "weak")
        )
        np.testing.assert_allclose(got, weak + 2 * (strong - weak), atol=1e-3)
    call: dict[str, Any] = {"guidance": scope["Autoguidance"](), "guidance_scale": 1.0}
    np.testing.assert_allclose(draw(both, **call).latents, draw(emoji, guidance_scale=1.0).latents, atol=1e-4)


def test_rules_around_a_rule_of_the_user() -> None:
    """AND needs the negative prompt though the rule does not, and perturbed attention adds to its image."""
    rule = rule_of(Weaker(), perturbs=True, parts=2)
    assert rule.samples == (NEGATIVE, PROMPT, PROMPT, 3, PERTURBED)
    assert off(rule).samples == (NEGATIVE, PROMPT, PROMPT, PERTURBED)
    outputs = jnp.asarray(rng.standard_normal((2, 5, 6, 5, 3)), jnp.float32)
    row: Any = {name: jnp.full(2, value) for name, value in {"p": 0.9, "q": -0.5, "timestep": 500.0}.items()}
    row |= {"guidance": jnp.array([1.0, 3.0]), "guidance weights": jnp.array([[1.0, 0.5]] * 2)}
    row |= {"guidance pag_scale": jnp.full(2, 2.0), "guidance pag_adaptive_scale": jnp.zeros(2)}
    negative, first, second, weak, perturbed = (outputs[:, i] for i in range(5))
    total = negative + (first - negative) + 0.5 * (second - negative)
    further = 2 * (first - perturbed)
    want = [total[0] + further[0], weak[1] + 3 * (total[1] - weak[1]) + further[1]]
    x = jnp.asarray(CONDITIONAL)
    got, _ = guided(rule, x, outputs, row, x[:, None][:, :0])
    np.testing.assert_allclose(got, 0.9 * x - 0.5 * jnp.stack(want), atol=1e-5)


def test_conditions_of_roles() -> None:
    prompts: Any = [{"text": jnp.full((1, 1), i)} for i in range(3)]
    rule = rule_of(Weaker(), parts=2)
    got = [(int(each["text"][0, 0]), int(each["role"][0])) for each in conditions_of(rule, prompts, 1)]
    assert got == [(0, NEGATIVE), (1, PROMPT), (2, PROMPT), (1, 3)]
    alone = conditions_of(off(rule_of(Away())), prompts[1:2], 1)
    assert [(int(each["text"][0, 0]), int(each["role"][0])) for each in alone] == [(1, PROMPT)]


@pytest.mark.slow
def test_guidance_by_its_short_name(emoji: canvax.Pipeline) -> None:
    """A number is the scale, as before; anything else is the rule."""
    np.testing.assert_array_equal(draw(emoji, guidance="apg").latents, draw(emoji, guidance_method="apg").latents)
    assert emoji("a fox", guidance=3.0, num_inference_steps=1, progress=False).metadata[0]["guidance_scale"] == 3.0


@pytest.mark.parametrize(
    ("members", "settings"),
    [
        ({"samples": (NEGATIVE,)}, {}),
        ({"samples": (PROMPT, PROMPT)}, {}),
        ({"samples": [NEGATIVE, PROMPT]}, {}),
        ({"samples": (PROMPT, "weak")}, {}),
        ({"columns": {"strength": 2.0}}, {}),
        ({"columns": None}, {}),
        ({"denoised": lambda self: None}, {}),
        ({"__hash__": None}, {}),
        ({"memory": -1}, {}),
        ({"memory": True}, {}),
        ({}, {"strength": 11}),
        ({}, {"strength": [1, 2]}),
        ({}, {"weights": 1}),
    ],
)
def test_rules_that_are_refused(members: dict[str, Any], settings: dict[str, Any]) -> None:
    rule = type("Mine", (Away,), members)()
    with pytest.raises(canvax.InputError) as caught:
        canvax.Options(guidance_method=rule, guidance_settings=settings)
    assert caught.value.argument == ("guidance_settings" if settings else "guidance_method")
    with pytest.raises(canvax.InputError) as caught:
        canvax.Options(guidance_method=Away(), reuse=2)
    assert caught.value.argument == "reuse"


class Written:
    """A rule of attributes, equal to itself alone."""

    columns: ClassVar[Any] = {}
    samples = NEGATIVE, PROMPT

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    "rule",
    [
        lambda negative, conditional, scale: conditional[..., :1],
        lambda negative, conditional, scale: 0.0,
        Written(denoised=lambda seen: seen.image(2)),
        Written(denoised=lambda seen: seen.image(1), memory=1),
        Written(denoised=lambda seen: seen.image(1) * seen.column("gone")),
    ],
)
def test_what_a_rule_must_return(emoji: canvax.Pipeline, rule: Any) -> None:
    with pytest.raises(canvax.InputError) as caught:
        emoji("a red apple", guidance=rule, num_inference_steps=1, height=64, width=64, progress=False)
    assert caught.value.argument == "guidance"
    assert "hashed" not in str(caught.value)


def test_an_attribute_of_a_rule_is_in_its_key() -> None:
    rule: Any = Written(part=1.0)
    key = foreign(rule_of(rule))
    rule.part = 0.5
    assert foreign(rule_of(rule)) != key
    rule.part = 1.0
    assert foreign(rule_of(rule)) == key


@pytest.mark.slow
def test_a_changed_rule_compiles_again(emoji: canvax.Pipeline) -> None:
    rule: Any = Written(denoised=lambda seen: seen.image(PROMPT) * rule.part, part=1.0)
    whole = draw(emoji, guidance=rule)
    rule.part = 0.5
    half = draw(emoji, guidance=rule)
    assert half.compilations == 1
    assert np.abs(half.latents - whole.latents).max() > 0.1
    rule.part = 1.0
    again = draw(emoji, guidance=rule)
    assert again.compilations == 0
    np.testing.assert_array_equal(again.latents, whole.latents)


@pytest.mark.slow
def test_an_image_of_a_rule_again(emoji: canvax.Pipeline) -> None:
    """The rule is given anew, under either of its names; the scale is that of the image."""

    def rule(negative: Any, conditional: Any, scale: Any) -> Any:
        return negative + scale[:, None, None, None] * (conditional - negative)

    size: dict[str, Any] = {"height": 64, "width": 64, "progress": False}
    made = emoji("a red apple", guidance=rule, guidance_scale=6.0, num_inference_steps=2, seed=7, **size)
    for name in ("guidance", "guidance_method"):
        again: Any = emoji.again(made.metadata[0], **{name: rule}, progress=False)
        np.testing.assert_array_equal(again.latents, made.latents)
