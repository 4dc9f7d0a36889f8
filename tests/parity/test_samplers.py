"""Sampler tables against the reference schedulers, probed with unit vectors in float64 (see probe.py): the classes that
checkpoints name in their files. The other classes are in test_solvers.py, k-diffusion in test_k_diffusion.py."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest

from canvax.errors import InputError
from canvax.samplers import build_table, from_scheduler_config

from .probe import (
    BASE,
    PREDICTIONS,
    SPACINGS,
    STEPS,
    checkpoint,
    compare,
    in_float64,
    reference_run,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the reference, about itself
    pytest.mark.usefixtures("in_float64"),
]
__all__ = ["in_float64"]
CLASSES = (
    *("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "EulerDiscreteScheduler"),
    *("EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler"),
)


# Every class, prediction type, spacing and variant below, at every step count.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {"clip_sample": False}),
    ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}),
    ("DDIMScheduler", {"clip_sample": False, "steps_offset": 0, "beta_schedule": "squaredcos_cap_v2"}),
    *[("DDPMScheduler", {"clip_sample": False, "variance_type": kind}) for kind in ("fixed_small", "fixed_large")],
    ("DDPMScheduler", {"clip_sample": False, "variance_type": "fixed_small_log", "beta_schedule": "linear"}),
    ("PNDMScheduler", {"skip_prk_steps": True}),
    ("PNDMScheduler", {"skip_prk_steps": True, "set_alpha_to_one": True, "steps_offset": 0}),
    ("PNDMScheduler", {"skip_prk_steps": False}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 10.0}),
    ("EulerDiscreteScheduler", {"use_exponential_sigmas": True, "timestep_type": "continuous"}),
    ("EulerDiscreteScheduler", {"interpolation_type": "log_linear"}),
    ("EulerDiscreteScheduler", {"interpolation_type": "log_linear", "timestep_type": "continuous"}),
    ("EulerDiscreteScheduler", {"final_sigmas_type": "sigma_min", "rescale_betas_zero_snr": True}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("EulerAncestralDiscreteScheduler", {"rescale_betas_zero_snr": True}),
    *[("DPMSolverMultistepScheduler", {"solver_order": order}) for order in (1, 2, 3)],
    ("DPMSolverMultistepScheduler", {"solver_type": "heun", "euler_at_final": True}),
    ("DPMSolverMultistepScheduler", {"solver_order": 3, "lower_order_final": False, "final_sigmas_type": "sigma_min"}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "beta_schedule": "squaredcos_cap_v2"}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 10.0}),
    ("DPMSolverMultistepScheduler", {"use_exponential_sigmas": True}),
    ("DPMSolverMultistepScheduler", {"use_lu_lambdas": True}),
    ("DPMSolverMultistepScheduler", {"lambda_min_clipped": -2.0, "solver_type": "bh2"}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "deis", "final_sigmas_type": "sigma_min"}),
    ("DPMSolverMultistepScheduler", {"rescale_betas_zero_snr": True, "solver_order": 3}),
    *[
        ("DPMSolverMultistepScheduler", {"algorithm_type": algorithm, "solver_type": kind, "final_sigmas_type": final})
        for algorithm, final in (
            ("dpmsolver", "sigma_min"),
            ("sde-dpmsolver", "sigma_min"),
            ("sde-dpmsolver++", "zero"),
            ("sde-dpmsolver++", "sigma_min"),
        )
        for kind in ("midpoint", "heun")
    ],
    (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min", "solver_order": 3},
    ),
]


def reference_failure(name: str, fields: dict[str, Any], prediction: str, steps: int) -> str | None:
    """Why the reference itself cannot run this combination; checked below, never passed over in silence."""
    if name == "PNDMScheduler" and prediction == "sample":
        return "ValueError: PNDM knows epsilon and v only"
    if name == "EulerAncestralDiscreteScheduler" and prediction == "sample":
        return "NotImplementedError"
    if name == "PNDMScheduler" and not fields["skip_prk_steps"] and steps < 4:
        return "ValueError: the Runge-Kutta start reads four timesteps"
    return None


@pytest.mark.parametrize(
    "prediction",
    ["epsilon", *(pytest.param(name, marks=pytest.mark.slow) for name in PREDICTIONS if name != "epsilon")],
)
@pytest.mark.parametrize(("name", "fields"), VARIANTS, ids=lambda value: str(value))
def test_every_coefficient(name: str, fields: dict[str, Any], prediction: str) -> None:
    for spacing in SPACINGS:
        scheduler, config = checkpoint(name, **fields, prediction_type=prediction, timestep_spacing=spacing)
        for steps in STEPS if prediction == "epsilon" else STEPS[:-1]:  # the longest takes most of the time
            if reference_failure(name, fields, prediction, steps):
                zeros = np.zeros((99, 1, 1, 1, 1))
                with pytest.raises((ValueError, NotImplementedError)):
                    reference_run(name, config, steps, zeros[0], lambda r, seen: seen, zeros)
                continue
            compare(build_table(scheduler, steps), name, config, steps)


@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize("spacing", SPACINGS)
def test_ddim_eta(spacing: str, eta: float) -> None:
    for prediction in PREDICTIONS:
        scheduler, config = checkpoint(
            "DDIMScheduler", clip_sample=False, prediction_type=prediction, timestep_spacing=spacing
        )
        for steps in STEPS:
            compare(build_table(scheduler, steps, eta=eta), "DDIMScheduler", config, steps, eta=eta)


@pytest.mark.parametrize("name", ["DDIMScheduler", "DDPMScheduler"])
@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_zero_terminal_snr(name: str, prediction: str) -> None:
    for spacing in SPACINGS:
        fields = {"prediction_type": prediction, "timestep_spacing": spacing, "clip_sample": False}
        scheduler, config = checkpoint(name, **fields, rescale_betas_zero_snr=True)
        for steps in STEPS:
            compare(build_table(scheduler, steps), name, config, steps)


CHECKPOINTS = {
    "stable-diffusion-v1-5": {
        "_class_name": "PNDMScheduler",
        "_diffusers_version": "0.6.0",
        **{"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False},
        **{"num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1},
        "trained_betas": None,
    },
    "stable-diffusion-2-1": {
        "_class_name": "DDIMScheduler",
        "_diffusers_version": "0.8.0",
        **{"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False},
        **{"num_train_timesteps": 1000, "prediction_type": "v_prediction", "set_alpha_to_one": False},
        **{"skip_prk_steps": True, "steps_offset": 1, "trained_betas": None},
    },
    "stable-diffusion-xl-base-1.0": {
        "_class_name": "EulerDiscreteScheduler",
        "_diffusers_version": "0.19.0.dev0",
        **{"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False},
        **{"interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon"},
        **{"sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1},
        **{"timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False},
    },
}


@pytest.mark.parametrize("model", CHECKPOINTS)
def test_switched_sampler(model: str) -> None:
    """Another sampler on a checkpoint is what `OtherClass.from_config(checkpoint.scheduler.config)` does."""
    config = CHECKPOINTS[model]
    scheduler = from_scheduler_config(config)
    own = getattr(diffusers, config["_class_name"]).from_config(config)
    for name in CLASSES:
        switched = dict(getattr(diffusers, name).from_config(own.config).config)
        for steps in (4, 20):
            compare(build_table(scheduler, steps, sampler=name), name, switched, steps)
    compare(build_table(scheduler, 20), config["_class_name"], config, 20)


def test_differences_from_the_reference() -> None:
    """What docs/samplers.md says we do differently, seen on the reference itself."""
    zeros = np.zeros((1, 1, 1, 1))

    def theirs(name: str, steps: int, **fields: Any) -> dict[str, np.ndarray]:
        config = {"_class_name": name, **BASE, **fields}
        ones = np.ones((steps + 1, 1, 1, 1, 1))
        return reference_run(name, config, steps, zeros, lambda r, seen: seen, ones)

    # Its trailing spacing runs one row too many, at timestep -1, for some step counts.
    assert theirs("DDIMScheduler", 61, timestep_spacing="trailing", clip_sample=False)["timesteps"][-1] == -1
    scheduler, _ = checkpoint("DDIMScheduler", timestep_spacing="trailing", clip_sample=False)
    assert len(build_table(scheduler, 61)) == 61
    # Its fixed_large_log is the square root of a logarithm below zero.
    fields = {"variance_type": "fixed_large_log", "clip_sample": False}
    assert np.isnan(theirs("DDPMScheduler", 10, **fields)["samples"]).any()
    large, _ = checkpoint("DDPMScheduler", variance_type="fixed_large", clip_sample=False)
    np.testing.assert_array_equal(build_table(checkpoint("DDPMScheduler", **fields)[0], 10).M, build_table(large, 10).M)
    # It divides by zero where the schedule ends without signal and the network predicts eps.
    fields = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
    with np.errstate(all="ignore"):
        assert not np.isfinite(theirs("DDIMScheduler", 10, **fields)["samples"]).all()
    with pytest.raises(InputError, match="leading"):
        build_table(checkpoint("DDIMScheduler", **fields)[0], 10)


def test_third_order_sde_against_k_diffusion() -> None:
    """The reference has a wrong sign in its third-order SDE step; ours follows k-diffusion's dpmpp_3m_sde formula."""
    fields = {"algorithm_type": "sde-dpmsolver++", "solver_order": 3, "lower_order_final": False}
    table = build_table(checkpoint("DPMSolverMultistepScheduler", **fields)[0], 20)
    level = np.append(table.sigma, 0.0)
    for r in range(2, 19):
        h, h1, h2 = (np.log(level[r - k] / level[r - k + 1]) for k in range(3))
        phi_2 = np.expm1(-2 * h) / (2 * h) + 1
        phi_3 = phi_2 / (2 * h) - 0.5
        d0, d1 = np.array([1, -1, 0]) * h / h1, np.array([0, 1, -1]) * h / h2  # weights of D now, before, earlier
        second = (d0 - d1) * h / (h1 + h2)
        first = d0 + (d0 - d1) * h1 / (h1 + h2)
        expected = phi_2 * first - phi_3 * second + np.array([-np.expm1(-2 * h), 0, 0])
        ours = np.array([table.M[r, 0, 6], table.M[r, 0, 1], table.M[r, 0, 2]]) * np.hypot(1, level[r + 1])
        np.testing.assert_allclose(ours, expected, rtol=1e-9)
