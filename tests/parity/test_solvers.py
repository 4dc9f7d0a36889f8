"""The solvers that fewer checkpoints name, against diffusers, probed like those of test_samplers.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
import pytest

from canvax.samplers import build_table, from_scheduler_config

from .probe import (
    BASE,
    SPACINGS,
    STEPS,
    checkpoint,
    compare,
    error,
    in_float64,
    reference_run,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the reference, about itself
    pytest.mark.usefixtures("in_float64"),
]
__all__ = ["in_float64"]
CURVES: tuple[dict[str, Any], ...] = (
    {},
    {"use_karras_sigmas": True},
    {"use_exponential_sigmas": True},
    {"use_beta_sigmas": True},
)
SMALLEST = {"final_sigmas_type": "sigma_min"}

# Solvers on k-diffusion's levels: every spacing and curve.
K_CLASSES = (
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LMSDiscreteScheduler",
    "DPMSolverSDEScheduler",
)
NO_SAMPLE = ("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DPMSolverSDEScheduler")
"""Classes that refuse to read prediction type "sample". They also take seconds a case: their curves are slow tests."""

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, curve) for name in K_CLASSES for curve in CURVES],
    ("HeunDiscreteScheduler", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 10.0}),
    ("HeunDiscreteScheduler", {"beta_schedule": "exp"}),
    *[("DEISMultistepScheduler", {"solver_order": order}) for order in (1, 2, 3)],
    *[("DEISMultistepScheduler", {**curve, "solver_order": 3}) for curve in CURVES[1:]],
    ("DEISMultistepScheduler", {"solver_order": 3, "lower_order_final": False}),
    *[
        ("UniPCMultistepScheduler", {"solver_order": order, "solver_type": kind, **more})
        for order in (1, 2, 3)
        for kind in ("bh1", "bh2")
        for more in (({} if kind == "bh2" else SMALLEST), {"predict_x0": False, **SMALLEST})
    ],
    *[("UniPCMultistepScheduler", {**curve, **SMALLEST}) for curve in CURVES[1:]],
    ("UniPCMultistepScheduler", {"solver_order": 3, "lower_order_final": False, **SMALLEST}),
    ("UniPCMultistepScheduler", {"solver_order": 3, "disable_corrector": [0, 2], "solver_type": "midpoint"}),
    ("UniPCMultistepScheduler", {"rescale_betas_zero_snr": True, "use_karras_sigmas": True, "sigma_max": 20.0}),
    *[("SASolverScheduler", {"predictor_order": p, "corrector_order": c}) for p in (1, 2, 3) for c in (1, 2, 3, 4)],
    *[("SASolverScheduler", curve) for curve in CURVES[1:]],
    ("SASolverScheduler", {"predictor_order": 3, "corrector_order": 3, "algorithm_type": "noise_prediction"}),
    ("SASolverScheduler", {"predictor_order": 3, "lower_order_final": False, "lambda_min_clipped": -2.0}),
    ("LCMScheduler", {}),
    ("LCMScheduler", {"original_inference_steps": 100, "timestep_scaling": 2.0, "set_alpha_to_one": False}),
    ("TCDScheduler", {}),
    ("DDIMParallelScheduler", {"clip_sample": False}),
    ("DDPMParallelScheduler", {"clip_sample": False}),
]
ONE_SPACING = ("LCMScheduler", "TCDScheduler")


def cases() -> Iterator[Any]:
    """All variants, and each solver with all predictions, which meet it in two columns of its table."""
    for name, fields in VARIANTS:
        for prediction in ("epsilon",) if fields else ("epsilon", "v_prediction", "sample"):
            quick = (
                not fields and prediction == "epsilon" and name != "KDPM2DiscreteScheduler"
            )  # k-diffusion has it too
            marks = () if quick else pytest.mark.slow
            yield pytest.param(name, fields, prediction, marks=pytest.mark.weekly if prediction == "sample" else marks)


@pytest.mark.parametrize(("name", "fields", "prediction"), list(cases()), ids=str)
def test_every_coefficient(name: str, fields: dict[str, Any], prediction: str) -> None:
    if prediction == "sample" and name in NO_SAMPLE:
        pytest.skip("the reference does not read this prediction type")
    # What a prediction type decides and what a spacing decides meet nowhere: all spacings for one, one for the others.
    # A curve meets a spacing in its ends alone, which the quick classes see.
    every = prediction == "epsilon" and name not in ONE_SPACING and not (name in NO_SAMPLE and fields)
    spacings = SPACINGS if every else ("leading",)
    for spacing in spacings:
        scheduler, config = checkpoint(name, **fields, prediction_type=prediction, timestep_spacing=spacing)
        for steps in STEPS if not fields and spacing == "leading" else STEPS[:-1]:  # the longest takes most of the time
            compare(build_table(scheduler, steps), name, config, steps)


@pytest.mark.parametrize(
    "prediction", ["epsilon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v_prediction", "sample"))]
)
@pytest.mark.parametrize("final", ["zero", "sigma_min"])
@pytest.mark.parametrize("algorithm", ["dpmsolver++", "dpmsolver", "sde-dpmsolver++"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_singlestep(order: int, algorithm: str, final: str, prediction: str) -> None:
    if algorithm == "dpmsolver" and final == "zero":
        pytest.skip("eps prediction divides by zero there, and the reference refuses it, too")
    for kind in ("midpoint", "heun"):
        if (order, algorithm, kind) == (3, "sde-dpmsolver++", "heun"):
            continue  # a wrong sign of the reference, see test_differences
        fields = {"solver_order": order, "algorithm_type": algorithm, "solver_type": kind, "final_sigmas_type": final}
        for more in ({"lower_order_final": True}, {"lower_order_final": False}, {"use_karras_sigmas": True}):
            scheduler, config = checkpoint("DPMSolverSinglestepScheduler", **fields, **more, prediction_type=prediction)
            for steps in STEPS if prediction == "epsilon" else STEPS[:-1]:
                compare(build_table(scheduler, steps), "DPMSolverSinglestepScheduler", config, steps)


@pytest.mark.parametrize("name", ["EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_edm(name: str, prediction: str) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"sigma_schedule": "exponential", "sigma_data": 1.0},
        {"rho": 5.0, **SMALLEST},
    ]
    if name.startswith("EDMDPM"):
        variants += [{"solver_order": 3}, {"solver_order": 2, "solver_type": "heun"}]
        variants += [{"algorithm_type": "sde-dpmsolver++"}]
    for fields in variants:
        config = {"_class_name": name, "prediction_type": prediction, **fields}
        scheduler = from_scheduler_config(config)
        for steps in STEPS:
            if steps == 1 and "sigma_schedule" in fields:
                continue  # one exponential step of the reference starts at the end, see test_differences
            compare(build_table(scheduler, steps), name, config, steps)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_tcd_eta(eta: float, prediction: str) -> None:
    scheduler, config = checkpoint("TCDScheduler", prediction_type=prediction)
    for steps in STEPS:
        compare(build_table(scheduler, steps, eta=eta), "TCDScheduler", config, steps, eta=eta)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("to_one", [True, False])
def test_ddim_inversion(prediction: str, spacing: str, to_one: bool) -> None:
    if prediction == "sample" and to_one:
        pytest.skip("the reference divides by zero: its first level has no noise to tell")
    fields = {"clip_sample": False, "set_alpha_to_one": to_one, "timestep_spacing": spacing, "steps_offset": 0}
    scheduler, config = checkpoint("DDIMInverseScheduler", prediction_type=prediction, **fields)
    for steps in STEPS:
        if spacing == "trailing" and prediction == "sample" and steps == 3:
            continue  # 999 - 333 = 666, 333, 0: below no level, and zero again
        compare(build_table(scheduler, steps), "DDIMInverseScheduler", config, steps)


FLOWS: list[tuple[str, dict[str, Any]]] = [
    ("FlowMatchEulerDiscreteScheduler", {}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "shift_terminal": 0.1, "use_beta_sigmas": True}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 2.0, "use_karras_sigmas": True}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 2.0, "use_exponential_sigmas": True}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "stochastic_sampling": True}),
    ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    *[
        (name, {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0})
        for name in (
            *("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "DEISMultistepScheduler"),
            *("UniPCMultistepScheduler", "SASolverScheduler"),
        )
    ],
]


@pytest.mark.parametrize(("name", "fields"), FLOWS, ids=str)
def test_flow(name: str, fields: dict[str, Any]) -> None:
    config = {"_class_name": name, **fields}
    for steps in STEPS:
        if steps == 1 and "shift_terminal" in fields:
            continue  # the reference stretches one time by 0 / 0
        compare(build_table(from_scheduler_config(config), steps), name, config, steps)


MU = 1.15
DYNAMIC: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
"""The file of a model whose shift follows the size of the image, such as FLUX.1 dev."""
OWN_FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "use_dynamic_shifting": True}
TERMINAL = {"shift_terminal": 0.02}

DYNAMIC_FLOWS: list[tuple[str, dict[str, Any]]] = [
    *[
        ("FlowMatchEulerDiscreteScheduler", {**DYNAMIC, **fields})
        for fields in (
            *({}, TERMINAL, {"time_shift_type": "linear"}, {"use_karras_sigmas": True, **TERMINAL}),
            *({"use_exponential_sigmas": True}, {"use_beta_sigmas": True}, {"stochastic_sampling": True}),
        )
    ],
    *[
        (name, {"_class_name": name, **OWN_FLOW, **fields})
        for name, fields in (
            ("DPMSolverMultistepScheduler", {}),
            ("DPMSolverSinglestepScheduler", {}),
            ("DEISMultistepScheduler", {}),
            ("UniPCMultistepScheduler", {}),
            ("UniPCMultistepScheduler", {"time_shift_type": "linear", **TERMINAL}),
        )
    ],
]


@pytest.mark.parametrize(("name", "config"), DYNAMIC_FLOWS, ids=str)
def test_flow_whose_shift_follows_the_size(name: str, config: dict[str, Any]) -> None:
    for steps in STEPS:
        if steps == 1 and "shift_terminal" in config:
            continue  # as in test_flow
        table = build_table(from_scheduler_config(config), steps, settings={"mu": MU})
        compare(table, name, config, steps, mu=MU)


@pytest.mark.parametrize("fields", [{}, TERMINAL], ids=str)
@pytest.mark.parametrize("name", sorted({name for name, config in DYNAMIC_FLOWS if "use_flow_sigmas" in config}))
def test_other_samplers_of_a_flow_model(name: str, fields: dict[str, Any]) -> None:
    """The file is FlowMatch's; diffusers' class of the sampler reads the same fields by its names for them."""
    if fields and name != "UniPCMultistepScheduler":
        pytest.skip("the reference has no shift_terminal")
    for steps in STEPS[2:]:
        scheduler = from_scheduler_config({**DYNAMIC, **fields})
        table = build_table(scheduler, steps, sampler=name, settings={"mu": MU})
        compare(table, name, {**OWN_FLOW, **fields}, steps, mu=MU)


def reference_times(steps: int, times: np.ndarray | None, **fields: Any) -> np.ndarray:
    """The times of a run of diffusers' FlowMatchEulerDiscreteScheduler, of its own grid or from unshifted times."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config({**DYNAMIC, **fields})
    scheduler.set_timesteps(**({"num_inference_steps": steps} if times is None else {"sigmas": times.tolist()}), mu=MU)
    return scheduler.sigmas.numpy()[:-1].astype(np.float64)


def times_of(config: dict[str, Any], steps: int, sampler: str, curve: str, **settings: Any) -> np.ndarray:
    """The time before each step."""
    table = build_table(from_scheduler_config(config), steps, sampler=sampler, sigmas=curve, settings=settings)
    return table.std[np.searchsorted(table.step, np.arange(steps))]


@pytest.mark.parametrize("fields", [{}, TERMINAL, {"time_shift_type": "linear", **TERMINAL}], ids=str)
@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "Heun", "DPM2", "DPM++ SDE", "LMS", "LCM", "DDIM"])
def test_every_sampler_visits_the_shifted_times(sampler: str, fields: dict[str, Any]) -> None:
    for steps in (4, 10):
        times = times_of({**DYNAMIC, **fields}, steps, sampler, "automatic", mu=MU)
        np.testing.assert_allclose(times, reference_times(steps, None, **fields), rtol=1e-6)


@pytest.mark.parametrize("fields", [{}, TERMINAL], ids=str)
@pytest.mark.parametrize("curve", ["normal", "simple", "sgm_uniform", "ddim_uniform", "beta"])
@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "Heun", "DPM++ 2M", "UniPC", "LCM"])
def test_curves_of_a_flow_model_are_shifted(sampler: str, curve: str, fields: dict[str, Any]) -> None:
    """Curves choose training times, which the reference shifts if they come from outside."""
    unshifted = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    for steps in (4, 10):
        expected = reference_times(steps, times_of(unshifted, steps, "Euler", curve), **fields)
        times = times_of({**DYNAMIC, **fields}, steps, sampler, curve, mu=MU)
        np.testing.assert_allclose(times, expected, rtol=2e-4)  # levels between training times are interpolated


@pytest.mark.parametrize("curve", ["karras", "exponential"])
@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "Heun"])
def test_curves_between_the_shifted_ends(sampler: str, curve: str) -> None:
    for steps in (4, 10):
        expected = reference_times(steps, None, **{f"use_{curve}_sigmas": True, **TERMINAL})
        times = times_of({**DYNAMIC, **TERMINAL}, steps, sampler, curve, mu=MU)
        np.testing.assert_allclose(times, expected, rtol=1e-6)


def test_ipndm() -> None:
    """All but the first output: at its level of pure noise the reference divides by zero, guarded to 0, where the
    picture that the network predicts should be."""
    config = {"_class_name": "IPNDMScheduler"}
    for steps in STEPS:
        table = build_table(from_scheduler_config(config), steps)
        assert (table.scale == 1).all()  # the reference holds x
        units = np.eye(1 + steps).reshape(1 + steps, 1, 1, 1, 1 + steps)
        outputs = units[1:].copy()
        outputs[0] = 0.0
        expected = reference_run("IPNDMScheduler", config, steps, units[0], lambda r, _: outputs[r], outputs)  # noqa: B023
        ours = []

        def denoise(seen: np.ndarray, timestep: float, row: int) -> np.ndarray:
            ours.append(seen)  # noqa: B023
            return outputs[row]  # noqa: B023

        from canvax.samplers import run

        samples = run(table, denoise, units[0])
        np.testing.assert_allclose(table.timestep, expected["timesteps"], atol=1e-6)
        for r in range(1, steps):
            assert error(ours[r], expected["inputs"][r]) < 1e-6
            if steps > 1:
                assert error(samples[r], expected["samples"][r]) < 1e-6


def test_defaults_of_the_classes_are_the_references() -> None:
    """Every field that a class declares is known, with the value it has where the file says nothing."""
    from canvax.samplers.config import _SCHEDULE_DEFAULTS, ALIASES, CLASS_DEFAULTS

    ours_alone = {"sigma_min", "sigma_max"}  # hidden fields that the reference honours, too
    limits = {"clip_sample", "clip_sample_range", "thresholding", "dynamic_thresholding_ratio", "sample_max_value"}
    for name in (*CLASS_DEFAULTS, *ALIASES):
        declared = {key: value for key, value in getattr(diffusers, name)().config.items() if key not in limits}
        known = {**_SCHEDULE_DEFAULTS, **CLASS_DEFAULTS[ALIASES.get(name, name)]}
        if name == "IPNDMScheduler" or name.startswith(("EDM", "FlowMatch")):
            known = {**CLASS_DEFAULTS[name], **{key: known[key] for key in declared if key in known}}
        extra = {key: value for key, value in declared.items() if key not in known and not key.startswith("_")}
        assert not extra, (name, extra)
        for key, value in declared.items():
            if key in known and key not in ours_alone:
                assert known[key] == value or (known[key] in (None, [], False) and not value), (name, key, value)


def test_differences() -> None:
    """What docs/samplers.md says we do differently, seen on the reference itself."""
    # DPM-Solver singlestep of order 3 has the same wrong sign as the multistep one in its SDE form.
    fields = {"solver_order": 3, "solver_type": "heun", "final_sigmas_type": "sigma_min", "use_karras_sigmas": True}
    name = "DPMSolverSinglestepScheduler"
    scheduler, config = checkpoint(name, algorithm_type="sde-dpmsolver++", **fields)
    with pytest.raises(AssertionError, match="sample after row 2"):
        compare(build_table(scheduler, 9), name, config, 9)
    # Karras levels of LMS and DPM++ SDE pass over sigma_max, which those of Heun and the others keep to.
    limited = {"use_karras_sigmas": True, "sigma_max": 10.0}
    for name in ("LMSDiscreteScheduler", "DPMSolverSDEScheduler"):
        theirs = getattr(diffusers, name).from_config({**BASE, **limited})
        theirs.set_timesteps(10)
        assert float(theirs.sigmas[0]) > 14
        assert build_table(checkpoint(name, **limited)[0], 10).sigma[0] == pytest.approx(10.0)
    # UniPC with B(h) = h has an infinite weight times 0 in a step to zero.
    scheduler, config = checkpoint("UniPCMultistepScheduler", solver_type="bh1")
    with pytest.raises(AssertionError, match="not finite"):
        compare(build_table(scheduler, 5), "UniPCMultistepScheduler", config, 5)
    # One exponential step of an EDM model starts where there is no noise left.
    one = diffusers.EDMEulerScheduler(sigma_schedule="exponential")
    one.set_timesteps(1)
    assert float(one.sigmas[0]) == pytest.approx(0.002)
    # More steps than a model was distilled on: the reference refuses, ours takes every training timestep.
    with pytest.raises(ValueError, match="original"):
        diffusers.LCMScheduler().set_timesteps(51)
    assert len(build_table(checkpoint("LCMScheduler")[0], 51)) == 51
