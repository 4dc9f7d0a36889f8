"""Reading diffusers' scheduler_config.json: which fields a class has, their defaults, and what cannot be honoured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from canvax.errors import nearest
from canvax.samplers.options import SPACINGS, SamplerOptions
from canvax.samplers.schedule import BETA_SCHEDULES, PREDICTION_TYPES, NoiseSchedule, make_betas

_SCHEDULE_DEFAULTS: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
    "prediction_type": "epsilon",
}
_THRESHOLDING = {"thresholding": False, "dynamic_thresholding_ratio": 0.995, "sample_max_value": 1.0}
_CLIPPING = {"clip_sample": True, "clip_sample_range": 1.0, **_THRESHOLDING}
_LEADING = {"timestep_spacing": "leading", "steps_offset": 0}
_LINSPACE = {"timestep_spacing": "linspace", "steps_offset": 0}
_SIGMAS = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "sigma_min": None,
    "sigma_max": None,
    "final_sigmas_type": "zero",
}

CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "DDIMScheduler": {**_LEADING, **_CLIPPING, "set_alpha_to_one": True},
    "DDPMScheduler": {**_LEADING, **_CLIPPING, "variance_type": "fixed_small"},
    "PNDMScheduler": {**_LEADING, "skip_prk_steps": False, "set_alpha_to_one": False},
    "EulerDiscreteScheduler": {
        **_LINSPACE,
        **_SIGMAS,
        "interpolation_type": "linear",
        "timestep_type": "discrete",
    },
    "EulerAncestralDiscreteScheduler": _LINSPACE,
    "DPMSolverMultistepScheduler": {
        **_LINSPACE,
        **_SIGMAS,
        **_THRESHOLDING,
        "use_lu_lambdas": False,
        "use_flow_sigmas": False,
        "use_dynamic_shifting": False,
        "lambda_min_clipped": -math.inf,
        "variance_type": None,
        "algorithm_type": "dpmsolver++",
        "solver_order": 2,
        "solver_type": "midpoint",
        "lower_order_final": True,
        "euler_at_final": False,
    },
}
"""What each class reads beyond the schedule, and its value where the file says nothing."""

RELATIVES = frozenset(
    f"{name}Scheduler"
    for name in (
        *("DDIMInverse", "DDIMParallel", "DDPMParallel", "DEISMultistep", "DPMSolverMultistepInverse", "DPMSolverSDE"),
        *("DPMSolverSinglestep", "HeunDiscrete", "KDPM2AncestralDiscrete", "KDPM2Discrete", "LCM"),
        *("LMSDiscrete", "SASolver", "TCD", "UniPCMultistep"),
    )
)
"""Classes we have no solver for, but whose files describe the same kind of noise schedule."""

# Fields of sibling classes. A config carries them along when the class was changed; they mean nothing to this one.
_FOREIGN = {name for fields in CLASS_DEFAULTS.values() for name in fields} | {
    *("base_image_seq_len", "base_shift", "clip_denoised", "corrector_order", "disable_corrector", "eta"),
    *("flow_shift", "invert_sigmas", "max_image_seq_len", "max_shift", "noise_sampler_seed"),
    *("original_inference_steps", "predict_x0", "predictor_order", "rho", "s_noise", "shift", "shift_terminal"),
    *("sigma_data", "sigma_schedule", "solver_p", "stochastic_sampling", "tau_func", "tensor_format"),
    *("time_shift_type", "timestep_scaling"),
}

_CURVES = {"use_exponential_sigmas": "exponential", "use_lu_lambdas": "lu", "use_karras_sigmas": "karras"}
_REFUSED = {
    "use_beta_sigmas": "use use_karras_sigmas instead",
    "use_flow_sigmas": "flow models are not supported yet",
    "use_dynamic_shifting": "flow models are not supported yet",
}
_ALLOWED: dict[str, tuple[str, ...]] = {
    "timestep_spacing": SPACINGS,
    "prediction_type": PREDICTION_TYPES,
    "beta_schedule": BETA_SCHEDULES,
    "final_sigmas_type": ("zero", "sigma_min"),
    "interpolation_type": ("linear", "log_linear"),
    "timestep_type": ("discrete", "continuous"),
    "algorithm_type": ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver", "deis"),
    "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),
}


def faults_of(config: Mapping[str, Any], class_name: str) -> list[str]:
    """Every field and value of `config` that cannot be honoured, each with its cure."""
    fields = {**_SCHEDULE_DEFAULTS, **CLASS_DEFAULTS[class_name]}
    faults = []
    for key, value in config.items():
        if key in fields:
            faults += _field_faults(key, value, fields[key], class_name)
        elif key.startswith("_") or key in _FOREIGN or value is None or value is False:
            continue
        elif not (key == "predict_epsilon" and value is True):  # what today's prediction_type "epsilon" was called
            faults.append(f"unknown field {key}={value!r} (remove it from the file)")
    curves = [key for key in _CURVES if key in fields and config.get(key)]
    if len(curves) > 1:
        faults.append(f"{' and '.join(curves)} together (keep one)")
    betas, train = config.get("trained_betas"), config.get("num_train_timesteps", 1000)
    if isinstance(betas, list | tuple) and len(betas) != train:
        faults.append(f"trained_betas has {len(betas)} values (num_train_timesteps={train!r} must be the same)")
    return faults


def _field_faults(key: str, value: Any, default: Any, class_name: str) -> list[str]:
    """What is wrong with one known field."""
    said = f"{key}={value!r}"
    if key in _REFUSED:
        return [f"{said} ({_REFUSED[key]})"] if value else []
    if key == "variance_type":
        return [f"{said} (only fixed variances: the network predicts none)"] if "learned" in str(value) else []
    if key == "trained_betas":
        return [] if value is None or _numbers(value) else [f"{said:.60} (a list of numbers in 0..1)"]
    if key in _ALLOWED:
        euler_sample = value == "original_sample" and class_name == "EulerDiscreteScheduler"
        known = value in _ALLOWED[key] or (key == "prediction_type" and euler_sample)
        return [] if known else [f"{said} ({nearest(str(value), _ALLOWED[key])})"]
    if isinstance(default, bool):
        return [] if value is None or isinstance(value, bool) else [f"{said} (true or false)"]
    if isinstance(default, int):
        lowest = 0 if key == "steps_offset" else 1
        good = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
        return [] if good else [f"{said} (a whole number of at least {lowest})"]
    if default is None and value is None:
        return []
    return [] if _numbers([value]) else [f"{said} (a number)"]


def _numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value) for value in values
    )


def schedule_of(config: Mapping[str, Any]) -> NoiseSchedule:
    """The noise a model was trained with, as its config says, whatever scheduler class the file names."""
    said = {key: config.get(key, default) for key, default in _SCHEDULE_DEFAULTS.items()}
    betas = said["trained_betas"]
    if betas is None:
        betas = make_betas(said["beta_schedule"], said["beta_start"], said["beta_end"], said["num_train_timesteps"])
    kind = "sample" if said["prediction_type"] == "original_sample" else said["prediction_type"]
    return NoiseSchedule.from_betas(betas, kind, zero_terminal_snr=bool(said["rescale_betas_zero_snr"]))


def options_of(config: Mapping[str, Any], class_name: str) -> SamplerOptions:
    """The options of `config` as `class_name` reads it: the fields it has, its own defaults for the missing ones."""
    said = {key: config.get(key, default) for key, default in CLASS_DEFAULTS[class_name].items()}
    sigmas = "normal"
    for flag, curve in _CURVES.items():
        sigmas = curve if said.pop(flag, False) else sigmas
    for key in _REFUSED:
        said.pop(key, None)
    if class_name == "DPMSolverMultistepScheduler":
        said["round_timesteps"] = config.get("beta_schedule") != "squaredcos_cap_v2"
        for limit in ("sigma_min", "sigma_max"):
            said[limit] = config.get(limit)
    return SamplerOptions(spacing=said.pop("timestep_spacing"), sigmas=sigmas, **said)
