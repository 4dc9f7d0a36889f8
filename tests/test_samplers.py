"""Samplers without the reference (for that see tests/parity): every table, the names, the reading of configs.

What is refused is in ``golden/errors.txt``.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvax.errors import InputError
from canvax.samplers import (
    SAMPLERS,
    SLOTS,
    NoiseSchedule,
    SamplerOptions,
    SamplerSpec,
    SamplerTable,
    Scheduler,
    build_table,
    find,
    from_scheduler_config,
    run,
    solvers,
    stable_diffusion_config,
)
from canvax.samplers.catalog import IMPOSSIBLE
from canvax.samplers.table import EMPTY
from tests.support.refusals import refused
from tests.support.timing import processor_seconds

SD15 = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
    "trained_betas": None,
}
NAMES = [spec.name for spec in SAMPLERS]
SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def scheduler(**fields: Any) -> Scheduler:
    return from_scheduler_config({**SD15, **fields})


def draws_noise(table: SamplerTable) -> bool:
    return bool(table.M[:, :, SLOTS + 1].any())


def test_churned_euler_is_algorithm_2_of_karras() -> None:
    options = SamplerOptions(spacing="trailing", sigmas="karras", s_churn=8.0)
    schedule = scheduler().schedule
    plain, churned = (solvers.euler(schedule, 20, replace(options, s_churn=c)) for c in (0.0, 8.0))
    rng = np.random.default_rng(0)
    x, noises = rng.standard_normal((1, 4)), rng.standard_normal((20, 1, 4))
    level = np.append(plain.sigma, 0.0)
    raised = level[:-1] * 1.4
    np.testing.assert_allclose(churned.sigma, raised)
    y = raised[0] * x
    for r in range(20):
        y = y + (level[r + 1] - raised[r]) * (y - y / (1 + raised[r] ** 2)) / raised[r]
        if r < 19:
            y = y + np.sqrt(raised[r + 1] ** 2 - level[r + 1] ** 2) * noises[r]
    # The best denoiser of unit-variance data, D = y / (1 + level^2), as an eps-predicting network.
    final = run(churned, lambda seen, t, r: seen * raised[r] / np.hypot(1, raised[r]), x, noises)[-1]
    np.testing.assert_allclose(final, y, rtol=1e-9)


def test_eta_one_is_as_random_as_ddpm_and_zero_is_not() -> None:
    assert not draws_noise(build_table(scheduler(), 10, sampler="ddim"))
    assert not draws_noise(build_table(scheduler(), 10, sampler="euler_a", eta=0.0))
    fields = {"steps_offset": 0, "set_alpha_to_one": True}
    ddim = build_table(scheduler(**fields), 10, sampler="ddim", eta=1.0)
    ddpm = build_table(scheduler(**fields), 10, sampler="ddpm")
    np.testing.assert_allclose(ddim.M[:, 0], ddpm.M[:, 0], atol=1e-9)
    np.testing.assert_allclose(
        build_table(scheduler(), 10, sampler="euler_a", eta=0.0).M, build_table(scheduler(), 10, sampler="euler").M
    )


SDE = {**SD15, "_class_name": "DPMSolverMultistepScheduler", "final_sigmas_type": "sigma_min"}


@pytest.mark.parametrize("solver_type", ["midpoint", "heun"])
def test_eta_of_the_sde_in_eps(solver_type: str) -> None:
    """From the ODE at 0 to the whole noise at 1, and with the right spread of Gaussian data between."""
    model, ode = (
        from_scheduler_config({**SDE, "algorithm_type": algorithm, "solver_type": solver_type})
        for algorithm in ("sde-dpmsolver", "dpmsolver")
    )
    np.testing.assert_array_equal(build_table(model, 10, eta=0.0).M, build_table(ode, 10).M)
    np.testing.assert_array_equal(build_table(model, 10, eta=1.0).M, build_table(model, 10).M)
    assert not draws_noise(build_table(model, 10, eta=0.0))
    for eta in (0.0, 0.5, 1.0):
        table = build_table(model, 200, eta=eta, sigmas="karras")
        # The best denoiser of data of deviation 2, linear: unit vectors show what each noise becomes.
        picture = 4 / (4 + table.sigma**2) * np.hypot(1, table.sigma)
        units = np.eye(201)[:, None]
        gains = run(table, lambda seen, t, r: (picture[r] - table.p[r]) / table.q[r] * seen, units[0], units[1:])[-1]  # noqa: B023
        assert np.linalg.norm(gains) == pytest.approx(2.0, rel=0.02), eta


def test_eta_of_a_class_whose_config_asks_for_an_sde() -> None:
    config = {**SDE, "algorithm_type": "sde-dpmsolver++", "solver_order": 3}
    model = from_scheduler_config(config)
    own = build_table(model, 10, eta=0.5)
    np.testing.assert_array_equal(build_table(model, 10, sampler=config["_class_name"], eta=0.5).M, own.M)
    for name in ("DPMSolverSinglestepScheduler", "EDMDPMSolverMultistepScheduler"):
        model = from_scheduler_config({"_class_name": name, "algorithm_type": "sde-dpmsolver++"})
        assert model.spec.eta
        assert model.spec.stochastic
        assert draws_noise(build_table(model, 10, settings={"s_noise": 0.9}))
        assert not draws_noise(build_table(model, 10, sampler=name, eta=0.0))


# ---- the table itself


def test_windows_continue_a_run_and_padding_changes_nothing() -> None:
    table = build_table(scheduler(), 10, sampler="dpmpp_2m", guidance=7.5, rescale=0.7)
    window = table.window(4, 16)
    assert {key: value.dtype.name for key, value in window.items() if key != "row"} == dict.fromkeys(
        ("timestep", "c_in", "p", "q", "M", "guidance", "rescale", "step", "progress", "target"), "float32"
    )
    assert window["row"].dtype == np.int32
    assert window["row"].tolist() == list(range(4, 20))
    np.testing.assert_array_equal(window["M"][:6], table.M[4:].astype(np.float32))
    np.testing.assert_allclose(window["progress"], [0.4, 0.5, 0.6, 0.7, 0.8, 0.9] + [0] * 10)
    np.testing.assert_array_equal(window["step"], [4, 5, 6, 7, 8, 9] + [0] * 10)
    np.testing.assert_array_equal(window["guidance"], [7.5] * 6 + [1.0] * 10)
    np.testing.assert_array_equal(window["target"], [*table.timestep[5:].astype(np.float32), *[0] * 11])
    np.testing.assert_array_equal(window["M"][6:], np.broadcast_to(np.eye(SLOTS, SLOTS + 2), (10, SLOTS, SLOTS + 2)))
    for key in ("timestep", "c_in", "p", "q", "rescale"):
        assert not window[key][6:].any(), key
    assert not table.window(10, 3)["timestep"].any()
    for name, column in EMPTY.window(0, 3).items():
        np.testing.assert_array_equal(column, table.window(10, 3)[name] if name != "row" else range(3))


def test_progress_is_that_of_the_steps_that_are_run() -> None:
    """A run that begins later, as with an image, goes from 0 to 1 as well."""
    window = build_table(scheduler(), 10, sampler="dpmpp_2m", skip=4).window(0, 8)
    np.testing.assert_allclose(window["progress"][:6], np.arange(6) / 6, rtol=1e-6)


def test_take_and_guidance() -> None:
    table = build_table(scheduler(), 10, sampler="ddim")
    part = table.take(3, 7).with_guidance(np.linspace(1, 4, 4), 0.5)
    assert len(part) == 4
    np.testing.assert_array_equal(part.timestep, table.timestep[3:7])
    np.testing.assert_array_equal(part.guidance, [1, 2, 3, 4])
    assert part.rescale.tolist() == [0.5] * 4
    assert len(table.take(3)) == 7


def test_a_table_checks_its_shapes() -> None:
    table = build_table(scheduler(), 3, sampler="ddim")
    with pytest.raises(InputError, match="M of a sampler table"):
        replace(table, M=table.M[:, :2])
    with pytest.raises(InputError, match="std of a sampler table"):
        replace(table, std=table.std[1:])
    assert not replace(table, p=table.p * np.nan).finite
    assert not replace(table, p=table.p + 1e300).finite  # which float32 cannot hold


# ---- names


@pytest.mark.parametrize(
    ("name", "expected", "sigmas"),
    [
        ("DDIM", "ddim", None),
        ("PLMS", "pndm", None),
        ("k_plms", "pndm", None),
        ("k_euler", "euler", None),
        ("Euler Karras", "euler", "karras"),
        ("EULER A", "euler_a", None),
        ("DPM++ 2M Karras", "dpmpp_2m", "karras"),
        ("dpmpp_2m_karras", "dpmpp_2m", "karras"),
        ("dpmpp_2m_k", "dpmpp_2m", "karras"),
        ("dpm++ 2m sde karras", "dpmpp_2m_sde", "karras"),
        ("EulerDiscreteScheduler", "euler", None),
        ("FlaxEulerDiscreteScheduler", "euler", None),
        ("DPMSolverMultistepScheduler", "dpmpp_2m", None),
        ("uni_pc_bh2", "unipc_bh2", None),
        ("DPM++ 2S a Karras", "dpmpp_2s_a", "karras"),
        ("DPM++ SDE Karras", "dpmpp_sde", "karras"),
        ("DPM2 a", "dpm2_a", None),
        ("DPM++ 2M SGM Uniform", "dpmpp_2m", "sgm_uniform"),
        ("Euler Simple", "euler", "simple"),
        ("DPM++ 2M Align Your Steps", "dpmpp_2m", "ays"),
        ("dpmpp_2m_ays_sdxl", "dpmpp_2m", "ays_sdxl"),
        ("Euler Beta", "euler", "beta"),
        ("Euler KL Optimal", "euler", "kl_optimal"),
        ("LCM", "lcm", None),
        ("DDIMParallelScheduler", "ddim", None),
        ("FlowMatchEulerDiscreteScheduler", "flow_euler", None),
    ],
)
def test_find(name: str, expected: str, sigmas: str | None) -> None:
    spec, implied = find(name)
    assert spec.name == expected
    assert implied.get("sigmas") == sigmas


def test_every_spelling_finds_its_sampler() -> None:
    for spec in SAMPLERS:
        for spelling in spec.spellings:
            assert find(spelling)[0] is spec, spelling


def test_samplers_that_are_said_to_be_missing_are_missing() -> None:
    """By the errors and by the page for users."""
    page = (Path(__file__).parent.parent / "docs" / "samplers.md").read_text(encoding="utf-8")
    listed = re.findall("`(.*?)`", page.partition("**Not in the catalogue**")[2].partition("\n\n")[0])
    assert len(listed) > 3
    for name in {*IMPOSSIBLE, *listed}:
        with refused("sampler"):
            find(name)


# ---- configs


def test_a_config_is_honoured_whole() -> None:
    model = scheduler()
    assert model.spec.name == "pndm"
    assert model.options.set_alpha_to_one is False
    assert model.schedule.num_train_timesteps == 1000
    assert model.schedule.alphas_cumprod[-1] == pytest.approx(0.00466, rel=1e-3)
    own = build_table(model, 50)
    assert len(own) == 51
    assert own.timestep[-1] == 1
    # A class name takes the checkpoint's fields and its own defaults; a sampler's name fixes what it is known for.
    assert len(build_table(scheduler(skip_prk_steps=False), 50)) == 59
    assert len(build_table(scheduler(skip_prk_steps=False), 50, sampler="PLMS")) == 51
    assert build_table(model, 4, sampler="euler").timestep.tolist() == [999, 666, 333, 0]
    assert build_table(model, 4, sampler="euler", spacing="leading").timestep.tolist() == [751, 501, 251, 1]
    assert build_table(scheduler(timestep_spacing="trailing"), 4, sampler="euler").timestep.tolist() == [
        *(999, 749, 499, 249)
    ]


def test_sigmas_of_the_config_can_be_switched_off() -> None:
    model = from_scheduler_config({**SD15, "_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": True})
    assert model.options.sigmas == "karras"
    plain = build_table(model, 10, sigmas="normal")
    np.testing.assert_allclose(plain.sigma, build_table(scheduler(), 10, sampler="euler").sigma)
    automatic = build_table(model, 10, sigmas="automatic", spacing="trailing")
    assert (
        automatic.timestep.tolist()
        == build_table(scheduler(), 10, sampler="euler", spacing="trailing").timestep.tolist()
    )
    np.testing.assert_array_equal(build_table(model, 10).sigma, build_table(scheduler(), 10, sampler="Euler k").sigma)


def test_sde_config_and_old_pipelines_config() -> None:
    fields = {**SD15, "_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}
    model = from_scheduler_config(fields)
    assert model.spec.name == "dpmpp_2m_sde"
    assert draws_noise(build_table(model, 10))
    assert not draws_noise(build_table(model, 10, sampler="DPM++ 2M"))
    assert draws_noise(build_table(model, 10, sampler="DPMSolverMultistepScheduler"))
    old = stable_diffusion_config({"_class_name": "DDIMScheduler"})
    assert build_table(from_scheduler_config(old), 5).timestep[-1] == 1


def test_settings_that_are_right() -> None:
    large = from_scheduler_config({**SD15, "_class_name": "DDPMScheduler", "variance_type": "fixed_large"})
    named = build_table(scheduler(), 10, sampler="ddpm", settings={"variance_type": "fixed_large"})
    np.testing.assert_array_equal(named.M, build_table(large, 10).M)
    assert len(build_table(scheduler(), 4, sampler="lcm", settings={"timestep_scaling": float("inf")})) == 4
    assert len(build_table(scheduler(), None, sigmas="automatic", settings={"timesteps": [900, 500]})) == 3
    # A curve uses no whole timesteps, and so cannot pass the last of them.
    assert build_table(scheduler(), 1000, sampler="Euler Karras", spacing="leading").timestep.max() == 999
    clipped = scheduler(_class_name="DPMSolverMultistepScheduler", lambda_min_clipped=-2.0, timestep_spacing="trailing")
    assert build_table(clipped, 65).timestep.min() >= 0


FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
QWEN = {**FLOW, "use_dynamic_shifting": True, "shift_terminal": 0.02}


def times(config: dict[str, Any], steps: int | None, sampler: str | None = None, **keywords: Any) -> np.ndarray:
    """The time of a flow model before each step."""
    table = build_table(from_scheduler_config(config), steps, sampler=sampler, **keywords)
    return table.std[np.searchsorted(table.step, np.arange(table.step[0], table.step[-1] + 1))]


@pytest.mark.parametrize("sampler", [None, "Euler", "Heun", "Euler a", "DPM++ 2M", "UniPC", "LCM"])
def test_the_shift_of_a_flow_model_is_for_every_sampler(sampler: str | None) -> None:
    """Levels of Qwen-Image for 1024 x 1024 pixels in 4 steps: even times, shifted by e^mu, stretched to 0.02."""
    qwen = times(QWEN, 4, sampler, sigmas="simple", settings={"mu": 0.69355})
    np.testing.assert_allclose(qwen, [1, 0.7667, 0.4556, 0.02], atol=5e-5)
    endless = {**QWEN, "shift_terminal": None}
    whole = times(endless, 4, sampler, sigmas="simple", settings={"mu": 0.69355})
    np.testing.assert_allclose(whole, times({**FLOW, "shift": np.exp(0.69355)}, 4, sampler, sigmas="simple"))
    named = {"mu": 0.69355, "shift_terminal": 0.02}
    np.testing.assert_array_equal(times(endless, 4, sampler, sigmas="simple", settings=named), qwen)


@pytest.mark.parametrize("sampler", [None, "Euler", "Euler a", "DPM++ 2M", "DDIM"])
def test_the_first_timestep_of_a_flow_model(sampler: str | None) -> None:
    """Its timesteps are 1000 t, and t begins at 1."""
    table = build_table(from_scheduler_config(FLOW), None, sampler=sampler, settings={"timesteps": [1000, 500, 250]})
    np.testing.assert_array_equal(table.timestep, [1000, 500, 250])
    np.testing.assert_allclose(table.std, [1, 0.5, 0.25], atol=1e-5)
    with pytest.raises(InputError):
        build_table(scheduler(), None, sampler=sampler, settings={"timesteps": [1000, 500]})


def test_a_zero_snr_schedule_has_an_answer_where_the_network_says_something() -> None:
    """``golden/errors.txt`` has the rest."""
    terminal = {"rescale_betas_zero_snr": True}
    for name in ("DDIM Karras", "DDPM Simple", "PLMS Karras", "LCM Karras", "TCD SGM Uniform"):
        assert build_table(scheduler(**terminal, prediction_type="v_prediction"), 10, sampler=name).finite
    assert build_table(scheduler(**terminal, prediction_type="sample"), 10, sampler="PLMS", spacing="leading").finite


def test_schedules() -> None:
    for kind in ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"):
        schedule = scheduler(beta_schedule=kind).schedule
        assert (np.diff(schedule.alphas_cumprod) < 0).all()
    terminal = scheduler(rescale_betas_zero_snr=True).schedule
    assert terminal.alphas_cumprod[-1] == 0
    assert terminal.alphas_cumprod[0] == pytest.approx(scheduler().schedule.alphas_cumprod[0])
    assert terminal.sigmas[-1] == pytest.approx(4096, rel=1e-6)
    given_betas = scheduler(trained_betas=[0.1, 0.2], num_train_timesteps=2).schedule
    np.testing.assert_allclose(given_betas.alphas_cumprod, [0.9, 0.72])
    for bad in ([], [[0.5]], [1.5], [float("nan")]):
        with pytest.raises(InputError, match="alphas_cumprod"):
            NoiseSchedule(np.array(bad))


def test_tables_are_quick_to_build() -> None:
    model = scheduler()
    for name in NAMES:
        times = [
            processor_seconds(lambda name=name, steps=steps: build_table(model, steps, sampler=name))
            for steps in range(1, 201, 10)
        ]
        assert statistics.median(times) < 0.02, name


@pytest.mark.parametrize("spec", SAMPLERS, ids=lambda spec: spec.name)
def test_evaluations_are_those_of_the_catalogue(spec: SamplerSpec) -> None:
    kind = {"edm": "EDMEulerScheduler", "flow": "FlowMatchEulerDiscreteScheduler"}.get(spec.name.split("_")[0])
    scheduler = from_scheduler_config({"_class_name": kind or "EulerDiscreteScheduler"})
    n = 20
    expected = {"n": n, "n + 1": n + 1, "n + 9": n + 9, "2n - 1": 2 * n - 1}[spec.evaluations]
    assert len(build_table(scheduler, n, sampler=spec.name)) == expected


def test_a_schedule_that_a_training_changed() -> None:
    """The fields of the record are taken; what the family made of the schedule, and what they do not name, stays."""
    base = from_scheduler_config({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    base = replace(base, schedule=replace(base.schedule, even_times=True))
    other = base.trained_with({"shift": 1.5})
    assert (other.schedule.shift, other.schedule.even_times) == (1.5, True)
    np.testing.assert_allclose(other.schedule.sigmas, base.schedule.with_shift(1.5).sigmas)
    assert base.trained_with({}) is base
    sized = base.trained_with({"use_dynamic_shifting": True})
    assert sized.schedule.size_shift == "exponential"
    assert sized.trained_with({"shift": 2.0}).schedule.size_shift == "exponential"
    with pytest.raises(InputError):
        base.trained_with({"shift": "much"})
