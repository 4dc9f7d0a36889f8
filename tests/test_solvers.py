"""What every solver must do, whatever its formulas: finite tables, the right end, the right order, the right spread."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betainc

from canvax.errors import InputError
from canvax.samplers import (
    CURVES,
    SAMPLERS,
    SLOTS,
    SamplerTable,
    Scheduler,
    build_table,
    find,
    from_scheduler_config,
    run,
)

SD15 = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "skip_prk_steps": True,
    "set_alpha_to_one": True,
    "clip_sample": False,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "clip_sample": False}
NAMES = [spec.name for spec in SAMPLERS if spec.curves]
NOT_ON_THE_PICTURE = ("pndm", "pndm_prk", "lms", "ipndm")
"""Combine slopes even in their last step, so that their last row is not D, though a constant D ends on itself."""
NOT_FOR_FLOW = ("pndm", "pndm_prk", "tcd", "dpm2_a", "ddim_inverse")
RANDOM = [spec.name for spec in SAMPLERS if spec.stochastic]
EVALUATIONS = {"n": (1, 0), "n + 1": (1, 1), "n + 9": (1, 9), "2n - 1": (2, -1)}

names, spacings = st.sampled_from(NAMES), st.sampled_from(["leading", "trailing", "linspace"])
curves = st.sampled_from([curve.name for curve in CURVES])
predictions, step_counts = st.sampled_from(["epsilon", "v_prediction", "sample"]), st.integers(1, 200)


def scheduler_config(**fields: Any) -> dict[str, Any]:
    return {**SD15, **fields}


def scheduler(**fields: Any) -> Scheduler:
    return from_scheduler_config(scheduler_config(**fields))


def any_table(name: str, steps: int, curve: str, spacing: str, prediction: str, **fields: Any) -> SamplerTable:
    model = scheduler(prediction_type=prediction, **fields)
    return build_table(model, steps, sampler=name, sigmas=curve, spacing=spacing)


@settings(max_examples=600, deadline=None)
@given(names, step_counts, curves, spacings, predictions)
def test_every_table(name: str, steps: int, curve: str, spacing: str, prediction: str) -> None:
    table = any_table(name, steps, curve, spacing, prediction)
    assert table.finite
    assert all(np.isfinite(value).all() for value in table.window(0, 8).values())
    assert table.step[-1] == steps - 1
    begins = table.sigma[np.searchsorted(table.step, np.arange(steps))]
    assert (np.diff(begins) < 0).all()
    several, more = EVALUATIONS[find(name)[0].evaluations]
    if steps >= 4:
        assert len(table) == several * steps + more
    if name not in NOT_ON_THE_PICTURE:
        last = table.M[-1, 0].copy()
        assert last[6] == pytest.approx(1.0)
        last[6] = 0.0
        assert np.abs(last).max() < 1e-9  # the last row is the denoised image, and nothing else


@settings(max_examples=300, deadline=None)
@given(names, step_counts, curves, spacings, predictions)
def test_a_network_that_knows_the_picture_ends_there(
    name: str, steps: int, curve: str, spacing: str, prediction: str
) -> None:
    if name.startswith("pndm") and prediction == "v_prediction":
        prediction = "sample"  # PNDM combines the v of several levels, which differ even where the picture does not
    if name.startswith("pndm") and curve == "automatic":
        curve = "normal"  # its own steps of whole timesteps miss the levels that the network is told, a little
    table = any_table(name, steps, curve, spacing, prediction)
    rng = np.random.default_rng(steps)
    x0, x = rng.standard_normal((2, 1, 4))
    noises = rng.standard_normal((len(table), 1, 4))
    final = run(table, lambda seen, t, r: (x0 - table.p[r] * seen) / table.q[r], x, noises)[-1]
    np.testing.assert_allclose(final, x0, atol=1e-7)


@settings(max_examples=200, deadline=None)
@given(names, st.integers(2, 200), curves, spacings)
def test_zero_terminal_snr_stays_finite(name: str, steps: int, curve: str, spacing: str) -> None:
    table = any_table(name, steps, curve, spacing, "v_prediction", rescale_betas_zero_snr=True)
    assert table.finite
    assert np.abs(table.M).max() < 1e5


@settings(max_examples=200, deadline=None)
@given(names, step_counts, curves)
def test_flow_models(name: str, steps: int, curve: str) -> None:
    if name in NOT_FOR_FLOW:
        return  # refused by name, see test_samplers
    if curve.startswith("ays"):
        with pytest.raises(InputError, match="flow"):
            build_table(from_scheduler_config(FLOW), steps, sampler=name, sigmas=curve)
        return
    table = build_table(from_scheduler_config(FLOW), steps, sampler=name, sigmas=curve)
    assert table.finite
    rng = np.random.default_rng(steps)
    x0, x = rng.standard_normal((2, 1, 4))
    noises = rng.standard_normal((len(table), 1, 4))
    final = run(table, lambda seen, t, r: (x0 - table.p[r] * seen) / table.q[r], x, noises)[-1]
    np.testing.assert_allclose(final, x0, atol=1e-5)


@pytest.mark.parametrize("curve", ["automatic", "karras"])
@pytest.mark.parametrize("name", NAMES)
def test_flow_models_give_back_the_spread_of_gaussian_data(name: str, curve: str) -> None:
    """One known image, which test_flow_models ends on, hides slopes that are multiplied by too much."""
    for steps in (10, 20, 50):
        try:
            table = build_table(from_scheduler_config(FLOW), steps, sampler=name, sigmas=curve)
        except InputError:
            assert name in NOT_FOR_FLOW
            return
        units = np.eye(1 + len(table)).reshape(1 + len(table), 1, -1)  # linear: how much of each noise is in the end
        ends = run(table, gaussian_network(table, 0.0, 0.8), units[0], units[1:])[-1]
        # LCM noises anew what an exact denoiser has made too smooth.
        assert (0.4 if name == "lcm" else 0.55) < np.linalg.norm(ends) < 1.1, steps


FRAMES = {
    "epsilon": scheduler_config(),
    "v_prediction": scheduler_config(prediction_type="v_prediction"),
    "zero terminal SNR": scheduler_config(prediction_type="v_prediction", rescale_betas_zero_snr=True),
    "sample": scheduler_config(prediction_type="sample"),
    "flow": FLOW,
    "EDM": {"_class_name": "EDMEulerScheduler"},
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("name", NAMES)
def test_noised_latents_are_what_a_run_denoises(name: str, frame: str) -> None:
    """For a network that answers with the noise (or v) that was put in, D is x0 in every row; and where no fresh noise
    comes in, each row leaves what `noised` gives for the next."""
    spec, model = find(name)[0], from_scheduler_config(FRAMES[frame])
    if (frame == "flow" and name in NOT_FOR_FLOW) or (frame == "EDM" and name in ("pndm", "pndm_prk", "tcd")):
        return
    x0, eps = np.random.default_rng(0).standard_normal((2, 1, 4))

    def answer(table: SamplerTable, r: int) -> np.ndarray:
        alpha, std, data = table.alpha[r], table.std[r], 0.5
        match frame:
            case "epsilon":
                return eps
            case "sample":
                return x0
            case "flow":
                return eps - x0
            case "EDM":  # Karras et al. 2022, table 1: y = x0 + level * eps, D = c_skip * y + c_out * F
                level = std / alpha
                skip = data**2 / (level**2 + data**2)
                return (x0 - skip * (x0 + level * eps)) * np.hypot(level, data) / (level * data)
        return alpha * eps - std * x0

    for start in (0.0, 0.5):
        table = build_table(model, 12, sampler=name, sigmas="normal", start=start, eta=0.0 if spec.eta else None)
        sums = table.alpha + table.std if frame == "flow" else table.alpha**2 + table.std**2
        np.testing.assert_allclose(sums, 1)
        noised = np.array([table.noised(x0, eps, r) for r in range(len(table))])
        for r, x in enumerate(noised):
            np.testing.assert_allclose(table.p[r] * x + table.q[r] * answer(table, r), x0, atol=1e-9)
        # PNDM combines the v of several levels, which differ even where the image does not.
        if not draws_noise(table) and not (name.startswith("pndm") and frame not in ("epsilon", "sample")):
            after = run(table, lambda seen, t, r, table=table: answer(table, r), noised[0] / table.init_scale)
            np.testing.assert_allclose(after[:-1], noised[1:], atol=1e-7)


def test_initial_noise_has_the_level_of_the_first_row() -> None:
    for name, spacing in itertools.product(NAMES, ("leading", "trailing", "linspace")):
        table = build_table(scheduler(), 30, sampler=name, spacing=spacing)
        sigma = table.sigma[0]
        assert table.init_scale == pytest.approx(1.0, abs=0.01), name
        assert table.init_scale in (pytest.approx(1.0), pytest.approx(sigma / np.hypot(1, sigma))), name


def test_stochastic_is_said_as_it_is() -> None:
    for spec in SAMPLERS:
        assert draws_noise(build_table(scheduler(), 10, sampler=spec.name)) == spec.stochastic, spec.name
        if spec.eta:
            assert not draws_noise(build_table(scheduler(), 10, sampler=spec.name, eta=0.0)), spec.name


def draws_noise(table: SamplerTable) -> bool:
    return bool(table.M[:, :, SLOTS + 1].any())


# ---- accuracy, where the solution is known: data are Gaussian, so the best denoiser is a formula

SPREAD = np.array([0.5, 2.0])
"""Standard deviations of the data in two directions."""
MEAN = np.array([1.0, -0.5])


def gaussian_network(table: SamplerTable, mean: Any = MEAN, spread: Any = SPREAD) -> Any:
    """The network that predicts the posterior mean of Gaussian data, exactly."""

    def network(seen: np.ndarray, timestep: float, row: int) -> np.ndarray:
        alpha, std = table.alpha[row], table.std[row]
        gain = alpha * spread**2 / (alpha**2 * spread**2 + std**2)
        denoised = mean + gain * (seen - alpha * mean)
        return (denoised - table.p[row] * seen) / table.q[row]

    return network


def end_of(y: np.ndarray, start: float, end: float) -> np.ndarray:
    """Where the probability-flow ODE leads y from one level to another."""
    return MEAN + np.sqrt((SPREAD**2 + end**2) / (SPREAD**2 + start**2)) * (y - MEAN)


ORDERS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("ddim", 1, {}),
    ("euler", 1, {}),
    ("euler_a", 1, {"eta": 0.0}),
    ("tcd", 1, {"eta": 0.0}),
    ("edm_euler", 1, {}),
    ("flow_euler", 1, {}),
    ("heun", 2, {}),
    ("flow_heun", 2, {}),
    ("dpm2", 2, {}),
    ("dpm2_a", 2, {"eta": 0.0}),
    ("dpmpp_2s_a", 2, {"eta": 0.0}),
    ("dpmpp_sde", 2, {"eta": 0.0}),
    ("dpmpp_2m", 2, {}),
    ("edm_dpmpp_2m", 2, {}),
    ("dpmpp_2m_sde", 2, {"eta": 0.0}),
    ("dpmpp_2m_sde_heun", 2, {"eta": 0.0}),
    # As published, the multistep formula of order 3 takes half of its second difference, and so converges with order 2.
    # (See the test below, which puts the other half back.)
    ("dpmpp_3m", 2, {}),
    ("dpmpp_3m_sde", 2, {"eta": 0.0}),
    ("dpm_single_2", 2, {}),
    ("dpm_single_3", 3, {}),
    *[("deis", order, {"settings": {"solver_order": order}}) for order in (1, 2, 3)],
    # UniC raises the order of UniP by one: Zhao et al. 2023, theorem 3.1.
    *[
        (name, order + 1, {"settings": {"solver_order": order, "lower_order_final": False}})
        for name in ("unipc", "unipc_bh2")
        for order in (1, 2, 3)
    ],
    *[
        ("sa_solver", order, {"eta": 0.0, "settings": {"predictor_order": order, "corrector_order": order}})
        for order in (1, 2, 3)
    ],
    ("lms", 4, {}),
    # Fixed weights over uneven steps: Liu et al. 2022, theorem in section 3.4.
    ("ipndm", 2, {}),
    ("pndm", 2, {}),
    ("pndm_prk", 2, {}),
)


def test_the_catalogue_names_measured_orders() -> None:
    measured = {(name, order) for name, order, _ in ORDERS} | {("ddim_inverse", 1)}  # which is DDIM, backwards
    assert {(spec.name, int(spec.order.split()[0])) for spec in SAMPLERS if spec.order} <= measured


def from_the_solution(table: SamplerTable, levels: np.ndarray, y: np.ndarray, *, corrects: bool) -> np.ndarray:
    """x after the last row, of a run whose first three steps, of lower order for want of a history, are put right."""
    network, state = gaussian_network(table), np.zeros((6, *y.shape))
    state[0] = y / np.hypot(1, levels[0])
    rows_in_steps = len(table) == table.step[-1] + 1
    for r in range(len(table)):
        denoised = table.p[r] * state[0] + table.q[r] * network(table.c_in[r] * state[0], 0.0, r)
        state = np.tensordot(table.M[r], np.stack([*state, denoised, 0 * y]), axes=1)
        if rows_in_steps and r < 3:
            state[0] = end_of(y, levels[0], levels[r + 1]) / np.hypot(1, levels[r + 1])
            if corrects:  # slot 1 is the corrected x that the row began with
                state[1] = end_of(y, levels[0], levels[r]) / np.hypot(1, levels[r])
    return state[0]


COUNTS = (60, 120, 240)


def errors_of(name: str, change: Any = None, **options: Any) -> np.ndarray:
    """Errors over a smooth stretch of levels for each of COUNTS; `change` makes another M of a table and its levels."""
    errors = []
    for steps in COUNTS:
        levels = np.exp(np.linspace(np.log(8.0), np.log(0.5), steps + 1))
        table = build_table(scheduler(), None, sampler=name, sigmas=levels, **options)
        part = table.take(0, int(np.sum(table.step < steps)))
        if change is not None:
            part = replace(part, M=change(part.M, levels))
        y = np.array([[3.0, -4.0]])
        x = from_the_solution(part, levels, y, corrects=name.startswith(("unipc", "sa_")))
        errors.append(np.abs(x * np.hypot(1, 0.5) - end_of(y, 8.0, 0.5)).max())
    return np.array(errors)


def slope(errors: np.ndarray) -> float:
    """Order of convergence in steps."""
    return float(np.polyfit(np.log(COUNTS), -np.log(errors), 1)[0])


@pytest.mark.parametrize(("name", "order", "options"), ORDERS, ids=str)
def test_order_of_convergence(name: str, order: float, options: dict[str, Any]) -> None:
    assert slope(errors_of(name, **options)) == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize(("name", "options"), [("dpmpp_3m", {}), ("dpmpp_3m_sde", {"eta": 0.0})], ids=str)
def test_half_of_the_second_difference_is_all_that_3m_lacks_of_order_3(name: str, options: dict[str, Any]) -> None:
    """The published formula multiplies half of D'' by what belongs to the whole. With the other half: order 3."""

    def whole(M: np.ndarray, levels: np.ndarray) -> np.ndarray:
        M = M.copy()
        h = np.diff(-np.log(levels))
        for r in range(2, len(M)):
            h0, h1, h2 = h[r], h[r - 1], h[r - 2]
            phi_3 = (1 - h0 + h0**2 / 2 - np.exp(-h0)) / h0**2
            d0, d1 = np.array([1, -1, 0]) / h1, np.array([0, 1, -1]) / h2  # of D now, before and earlier
            half = h0**2 * (d0 - d1) / (h1 + h2)  # Newton's divided difference is f'' / 2
            M[r, 0, [6, 1, 2]] += phi_3 / np.hypot(1, levels[r + 1]) * half
        return M

    published, third = errors_of(name, **options), errors_of(name, whole, **options)
    assert slope(third) == pytest.approx(3, abs=0.2)
    assert np.all(third < published / 3)
    assert np.all(published < errors_of("dpmpp_2m"))


@pytest.mark.parametrize("name", RANDOM)
def test_random_solvers_have_the_mean_and_covariance_of_the_data(name: str) -> None:
    if name in ("lcm", "tcd"):
        pytest.skip("made for networks that jump to the end; the exact denoiser is not one")
    steps, samples = 400, 10_000
    table = build_table(scheduler(), steps, sampler=name, sigmas="karras" if name != "ddpm" else "normal")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((samples, 2))
    state = run_random(table, x, rng)
    error = SPREAD / np.sqrt(samples)
    assert np.all(np.abs(state.mean(axis=0) - MEAN) < 3 * error), (state.mean(axis=0) - MEAN) / error
    covariance = np.cov(state.T)
    expected = np.diag(SPREAD**2)
    scale = np.sqrt((np.outer(SPREAD**2, SPREAD**2) + expected**2) / samples)
    assert np.all(np.abs(covariance - expected) < 3 * scale), (covariance - expected) / scale


def run_random(table: SamplerTable, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`run`, its noise drawn row by row."""
    network = gaussian_network(table)
    state = np.zeros((6, *x.shape))
    state[0] = table.init_scale * x
    for r in range(len(table)):
        denoised = table.p[r] * state[0] + table.q[r] * network(table.c_in[r] * state[0], 0.0, r)
        state = np.tensordot(table.M[r], np.stack([*state, denoised, rng.standard_normal(x.shape)]), axes=1)
    return state[0]


def test_ddim_inversion_comes_back() -> None:
    model = scheduler(timestep_spacing="leading", set_alpha_to_one=False, steps_offset=0)
    picture = np.array([[0.3, -1.2]])
    there = build_table(model, 500, sampler="ddim inversion")
    back = build_table(model, 500, sampler="ddim")
    noise = run(there, gaussian_network(there), picture)[-1]
    again = run(back, gaussian_network(back), noise)[-1]
    np.testing.assert_allclose(again, picture, atol=0.02)
    assert abs(noise).max() < 4


# ---- what a step may carry


def test_guidance_of_each_step_and_interval() -> None:
    table = build_table(scheduler(), 4, sampler="heun", guidance=[1.0, 5.0, 6.0, 7.0])
    assert table.guidance.tolist() == [1, 1, 5, 5, 6, 6, 7]
    table = build_table(scheduler(), 10, sampler="euler", guidance=7.5, guidance_interval=(0.2, 0.6))
    assert table.guidance.tolist() == [1.0] * 2 + [7.5] * 4 + [1.0] * 4
    part = build_table(scheduler(), 10, sampler="heun", guidance=7.5, guidance_interval=(0.2, 0.6), start=0.5)
    whole = build_table(scheduler(), 10, sampler="heun", guidance=7.5, guidance_interval=(0.2, 0.6))
    assert part.guidance.tolist() == whole.guidance[-len(part) :].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("middle", [0.3, 0.55])
def test_a_run_in_two_parts(name: str, middle: float) -> None:
    """Steps are never cut in two, levels go on where they stopped, and noise is that of the rows of the whole run."""
    whole, first, second = (
        build_table(scheduler(), 12, sampler=name, sigmas="normal", **part)
        for part in ({}, {"end": middle}, {"start": middle})
    )
    assert first.step[-1] + 1 == second.step[0]
    assert second.step[-1] == 11
    assert second.first_row == len(first)
    np.testing.assert_array_equal(first.M, whole.M[: len(first)])
    assert second.sigma[0] == pytest.approx(whole.sigma[len(first)])
    assert second.init_scale == 1.0
    assert np.abs(second.M[0, 0, 1:6]).max() == 0  # remembers nothing
    x0, x = np.random.default_rng(0).standard_normal((2, 1, 4))

    def knows(table: SamplerTable) -> Any:
        return lambda seen, t, r: (x0 - table.p[r] * seen) / table.q[r]

    noises = np.zeros((len(whole) + 9, 1, 4))
    between = run(first, knows(first), x, noises)[-1]
    np.testing.assert_allclose(run(second, knows(second), between, noises)[-1], x0, atol=1e-7)


@pytest.mark.parametrize("steps", [12, 20])
@pytest.mark.parametrize("name", ["dpmpp_2m", "dpmpp_3m", "dpmpp_3m_sde", "deis", "unipc", "sa_solver", "lms", "ipndm"])
def test_a_second_part_ends_like_the_whole_run(name: str, steps: int) -> None:
    """Once it has seen as many rows as it remembers. Where orders fall at the end, the whole run's length decides."""
    whole, second = (
        build_table(scheduler(), steps, sampler=name, sigmas="normal", **part) for part in ({}, {"start": 0.5})
    )
    rest = len(second) - 3
    assert rest >= 3
    np.testing.assert_allclose(second.M[-rest:], whole.M[-rest:], atol=1e-12)


@pytest.mark.parametrize("name", ["euler", "heun", "dpm2"])
def test_churn_goes_on_in_the_second_part(name: str) -> None:
    """As much as in the whole run, though fewer steps are left."""
    whole, second = (
        build_table(scheduler(), 20, sampler=name, settings={"s_churn": 5.0}, **part) for part in ({}, {"start": 0.5})
    )
    np.testing.assert_allclose(second.sigma, whole.sigma[-len(second) :])


def test_corrector_switched_off_in_the_second_part() -> None:
    for off in (2, 12):
        whole, plain = (
            build_table(scheduler(), 20, sampler="unipc", settings={"disable_corrector": listed})
            for listed in ([off], [])
        )
        part, plain_part = (
            build_table(scheduler(), 20, sampler="unipc", start=0.5, settings={"disable_corrector": listed})
            for listed in ([off], [])
        )
        changed = set(whole.step[(whole.M != plain.M).any((1, 2))])
        assert set(part.step[(part.M != plain_part.M).any((1, 2))]) == {step for step in changed if step > part.step[0]}


def test_guidance_interval_of_an_inversion() -> None:
    """It is of the noise levels, whichever way they are gone through."""
    there, back = (
        build_table(scheduler(), 10, sampler=name, guidance=7.5, guidance_interval=(0.0, 0.3))
        for name in ("ddim", "ddim_inverse")
    )
    assert there.timestep[there.guidance > 1].min() > 600
    assert back.timestep[back.guidance > 1].min() > 600


def test_levels_and_timesteps_of_ones_own() -> None:
    levels = [10.0, 4.0, 1.0, 0.2]
    for own in (levels, [*levels, 0.0]):
        table = build_table(scheduler(), None, sampler="dpm++ 2m", sigmas=own)
        np.testing.assert_allclose(table.sigma, levels)
        assert table.M[-1, 0, 6] == 1.0
    assert build_table(scheduler(), 4, sampler="euler", sigmas=levels).sigma == pytest.approx(levels)
    for name in NAMES:
        table = build_table(scheduler(), None, sampler=name, settings={"timesteps": [900, 600, 300, 20]})
        assert table.timestep[0] == pytest.approx(900), name
        assert table.step[-1] == 3
    with pytest.raises(InputError, match="does not fall"):
        build_table(scheduler(), None, settings={"timesteps": [300, 600]})


AYS = {
    "ays": [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029],
    "ays_sdxl": [14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029],
}
AYS_TIMESTEPS = {
    "ays": [999, 850, 736, 645, 545, 455, 343, 233, 124, 24],
    "ays_sdxl": [999, 845, 730, 587, 443, 310, 193, 116, 53, 13],
}
"""As Sabour et al. 2024 publish them on the page of Align Your Steps."""


@pytest.mark.parametrize("name", AYS)
def test_align_your_steps(name: str) -> None:
    published = AYS[name]
    table = build_table(scheduler(), 10, sampler=f"dpm++ 2m {name.replace('_', ' ')}")
    np.testing.assert_allclose(table.sigma, published[:-1])
    np.testing.assert_allclose(table.timestep, AYS_TIMESTEPS[name], atol=2.0)
    twice = build_table(scheduler(), 20, sampler="dpm++ 2m", sigmas=name).sigma
    np.testing.assert_allclose(twice[::2], published[:-1])
    np.testing.assert_allclose(twice[1::2] ** 2, np.multiply(published[:-1], published[1:]))


@pytest.mark.parametrize("steps", [10, 25, 30, 40])
def test_curves_by_their_definitions(steps: int) -> None:
    """The definitions are those of ComfyUI (comfy/samplers.py), for the 1000 timesteps of Stable Diffusion."""

    def timesteps(curve: str) -> np.ndarray:
        return build_table(scheduler(), steps, sampler="euler", sigmas=curve).timestep

    counted = range(steps)
    np.testing.assert_allclose(timesteps("simple"), [999 - int(n * 1000 / steps) for n in counted], atol=1e-6)
    np.testing.assert_allclose(timesteps("sgm_uniform"), [999 - n * 999 / steps for n in counted], atol=1e-6)
    ddim = [1 + n * (1000 // steps) for n in reversed(counted)]
    np.testing.assert_allclose(timesteps("ddim_uniform"), ddim, atol=1e-6)
    # The share of a beta(0.6, 0.6) distribution below each timestep falls evenly: Lee et al. 2024, section 4.
    shares = betainc(0.6, 0.6, np.minimum(timesteps("beta") / 999, 1.0))
    np.testing.assert_allclose(shares, [1 - n / steps for n in counted], atol=1e-6)


def test_kl_optimal_by_its_definition() -> None:
    """Sabour et al. 2024, theorem 3.1: atan(sigma) is a mean of those of the largest and the smallest level."""
    limits = {"sigma_max": 10.0, "sigma_min": 0.1}
    table = build_table(scheduler(), 5, sampler="euler", sigmas="kl_optimal", settings=limits)
    angles = [math.atan(10.0) * (1 - part) + math.atan(0.1) * part for part in (0, 0.25, 0.5, 0.75, 1)]
    np.testing.assert_allclose(table.sigma, [math.tan(angle) for angle in angles])
