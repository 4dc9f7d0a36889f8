"""Reads diffusers' scheduler_config.json: the fields of each class, their defaults, and unsupported values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from canvax.errors import did_you_mean
from canvax.samplers.options import CHOICES, LIMITS, SPACINGS, SamplerOptions, fault_of
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
_USUAL: dict[str, Any] = {
    **{field.name: field.default for field in fields(SamplerOptions)},
    **dict.fromkeys(("clip_sample", "thresholding", "use_flow_sigmas", "use_dynamic_shifting", "invert_sigmas"), False),
    **dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"), False),
    **dict.fromkeys(("noise_sampler_seed", "shift_terminal", "solver_p", "tau_func"), None),
    "timestep_spacing": "linspace",
    "disable_corrector": [],
    "time_shift_type": "exponential",
    "shift": 1.0,
    "flow_shift": 1.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
"""Defaults of fields, from which those of some classes differ."""


def _class(*names: str, **others: Any) -> dict[str, Any]:
    """Return the fields of a class with their defaults: ``names`` have the usual ones, ``others`` theirs."""
    return {**{name: _USUAL[name] for name in names}, **others}


_SPACING = ("timestep_spacing", "steps_offset")
_CLIPPING = ("clip_sample", "thresholding")
_CURVE_FLAGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_CURVE = (*_CURVE_FLAGS, "sigma_min", "sigma_max")
_K = (*_SPACING, *_CURVE)
_FLOW = ("use_flow_sigmas", "flow_shift", "use_dynamic_shifting", "time_shift_type")
_SOLVER = ("algorithm_type", "solver_order", "solver_type")
_DPM = (*_CURVE, *_FLOW, "thresholding", "lambda_min_clipped", "variance_type", *_SOLVER, "final_sigmas_type")
_DISTILLED = (*_SPACING, "original_inference_steps", "set_alpha_to_one", "timestep_scaling")
_LEADING = {"timestep_spacing": "leading"}
_K_BETAS = {"beta_start": 0.00085, "beta_end": 0.012}
_LATENT_BETAS = {**_K_BETAS, "beta_schedule": "scaled_linear"}
_EDM = _class("sigma_schedule", "final_sigmas_type", sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0)
_MATCHING = _class(
    *("shift", *_CURVE_FLAGS, "use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len"),
    *("max_image_seq_len", "invert_sigmas", "shift_terminal", "time_shift_type", "stochastic_sampling"),
)

CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "DDIMScheduler": _class(*_SPACING, *_CLIPPING, "set_alpha_to_one", **_LEADING),
    "DDIMInverseScheduler": _class(*_SPACING, "clip_sample", "set_alpha_to_one", **_LEADING),
    "DDPMScheduler": _class(*_SPACING, *_CLIPPING, **_LEADING, variance_type="fixed_small"),
    "PNDMScheduler": _class(*_SPACING, **_LEADING, skip_prk_steps=False, set_alpha_to_one=False),
    "EulerDiscreteScheduler": _class(*_K, "final_sigmas_type", "interpolation_type", "timestep_type"),
    "EulerAncestralDiscreteScheduler": _class(*_SPACING),
    "HeunDiscreteScheduler": _class(*_K, "clip_sample", **_K_BETAS),
    "KDPM2DiscreteScheduler": _class(*_K, **_K_BETAS),
    "KDPM2AncestralDiscreteScheduler": _class(*_K, **_K_BETAS),
    "LMSDiscreteScheduler": _class(*_K),
    "DPMSolverSDEScheduler": _class(*_K, "noise_sampler_seed", **_K_BETAS),
    "IPNDMScheduler": {},
    "DPMSolverMultistepScheduler": _class(*_SPACING, *_DPM, "use_lu_lambdas", "lower_order_final", "euler_at_final"),
    "DPMSolverSinglestepScheduler": _class(*_DPM, lower_order_final=False),
    "DEISMultistepScheduler": _class(
        *(*_K, *_FLOW, "thresholding", "solver_order", "lower_order_final"), algorithm_type="deis", solver_type="logrho"
    ),
    "UniPCMultistepScheduler": _class(
        *(*_K, *_FLOW, "thresholding", "shift_terminal", "predict_x0", "solver_order", "solver_p"),
        *("disable_corrector", "lower_order_final", "final_sigmas_type"),
        solver_type="bh2",
    ),
    "SASolverScheduler": _class(
        *(*_K, "use_flow_sigmas", "flow_shift", "thresholding", "lambda_min_clipped", "variance_type"),
        *("predictor_order", "corrector_order", "tau_func", "lower_order_final"),
        algorithm_type="data_prediction",
    ),
    "LCMScheduler": _class(*_DISTILLED, *_CLIPPING, **_LATENT_BETAS, **_LEADING),
    "TCDScheduler": _class(*_DISTILLED, **_LATENT_BETAS, **_LEADING),
    "EDMEulerScheduler": _EDM,
    "EDMDPMSolverMultistepScheduler": _EDM | _class("thresholding", *_SOLVER, "lower_order_final", "euler_at_final"),
    "FlowMatchEulerDiscreteScheduler": _MATCHING,
    "FlowMatchHeunDiscreteScheduler": _class("shift"),
}
"""The fields that each class reads besides the noise schedule, with their defaults."""

ALIASES = {"DDIMParallelScheduler": "DDIMScheduler", "DDPMParallelScheduler": "DDPMScheduler"}
"""Classes whose tables equal those of another class."""

KNOWN_CLASSES = frozenset({*CLASS_DEFAULTS, *ALIASES})
"""Every scheduler class whose files are read."""

# Fields of other classes. A config keeps them when its class was changed; the current class ignores them.
_FOREIGN_DEFAULTS = {name: default for fields in CLASS_DEFAULTS.values() for name, default in fields.items()}
_FOREIGN = {name for fields in CLASS_DEFAULTS.values() for name in fields} | {
    *("clip_denoised", "eta", "noise_sampler_seed", "solver_p", "tau_func", "tensor_format"),
    *("clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value"),
}
# Fields that are not options of a sampler: the noise of a step comes from the image's seed, the shift of a flow model
# belongs to its noise schedule.
_NOTHING_HERE = (
    *("noise_sampler_seed", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
    *("tau_func", "solver_p", "invert_sigmas", "use_flow_sigmas", "flow_shift", "shift", "sigma_data"),
    *("use_dynamic_shifting", "time_shift_type", "shift_terminal", "clip_sample", "thresholding"),
)

_FLOW_TYPE = "flow_prediction"
_CURVES = {
    "use_beta_sigmas": "beta_sigmas",
    "use_exponential_sigmas": "exponential",
    "use_lu_lambdas": "lu",
    "use_karras_sigmas": "karras",
}
_REFUSED = {
    "solver_p": "another solver as predictor is not supported; remove it",
    "tau_func": "a function cannot be read from a file; remove it for the usual one",
    "clip_sample": "limits on the image are for models of pixels; set it to false",
    "thresholding": "limits on the image are for models of pixels; set it to false",
    "invert_sigmas": "runs from image to noise are not supported; set it to false",
}
_CHOICES: dict[str, tuple[str | None, ...]] = {
    **CHOICES,
    "time_shift_type": ("exponential", "linear"),
    "timestep_spacing": SPACINGS,
    "prediction_type": PREDICTION_TYPES,
    "beta_schedule": BETA_SCHEDULES,
    "final_sigmas_type": ("zero", "sigma_min"),
    "algorithm_type": (*CHOICES["algorithm_type"], "data_prediction", "noise_prediction"),
}


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the numbers and lists that are null, which have the defaults of the class then."""
    defaults = {**_FOREIGN_DEFAULTS, **_SCHEDULE_DEFAULTS}

    def has_default(name: str) -> bool:
        default = defaults.get(name)
        return isinstance(default, int | float | list) and not isinstance(default, bool)

    return {name: value for name, value in config.items() if value is not None or not has_default(name)}


def faults_of(config: Mapping[str, Any], class_name: str) -> list[str]:
    """List every unsupported field and value of `config`, each with its cure.

    In the config of a family's scheduler class only fields of samplers count: the rest is for the family's code.
    """
    if str(config.get("_class_name")).removeprefix("Flax") not in KNOWN_CLASSES:
        config = {key: value for key, value in config.items() if key in _FOREIGN - {*_SCHEDULE_DEFAULTS, *_FLOW}}
    fields = {**_SCHEDULE_DEFAULTS, **CLASS_DEFAULTS[class_name]}
    faults = []
    for key, value in config.items():
        if key in fields:
            faults += _field_faults(key, value, fields[key], class_name)
        elif (
            value is not None
            and key in _FOREIGN_DEFAULTS
            and (  # fields of another sampler, which a call may select
                key in LIMITS or (isinstance(_FOREIGN_DEFAULTS[key], bool) and not isinstance(value, bool))
            )
        ):
            faults += _field_faults(key, value, _FOREIGN_DEFAULTS[key], class_name)
        elif key.startswith("_") or key in _FOREIGN or value is None or value is False:
            continue
        elif not (key == "predict_epsilon" and value is True):  # the old form of prediction_type "epsilon"
            meant = (near := did_you_mean(key, list(fields))) and f"{near} else "
            faults.append(f"unknown field {key}={value!r} ({meant}remove it from the file)")
    curves = [key for key in _CURVES if key in fields and config.get(key)]
    if len(curves) > 1:
        faults.append(f"{' and '.join(curves)} together (keep one)")
    if "use_flow_sigmas" in fields and config.get("use_flow_sigmas") and config.get("prediction_type") != _FLOW_TYPE:
        faults.append(f"use_flow_sigmas=True (of models whose prediction_type is {_FLOW_TYPE!r} alone)")
    first, last = (config.get(name, fields[name]) for name in ("beta_start", "beta_end"))
    if not faults and first > last and config.get("trained_betas") is None:
        faults.append(f"beta_start={first!r} above beta_end={last!r} (noise grows from the first to the last)")
    few, many = (config.get(name, _MATCHING[name]) for name in ("base_image_seq_len", "max_image_seq_len"))
    if config.get("use_dynamic_shifting") and few == many:
        faults.append(f"base_image_seq_len={few!r} and max_image_seq_len={many!r} (they must differ)")
    betas, train = config.get("trained_betas"), config.get("num_train_timesteps", 1000)
    if isinstance(betas, list | tuple) and len(betas) != train:
        faults.append(f"trained_betas has {len(betas)} values (num_train_timesteps={train!r} must be the same)")
    return faults


def _field_faults(key: str, value: Any, default: Any, class_name: str) -> list[str]:
    """Return the faults of a known field's value."""
    if value is None and (default is None or isinstance(default, bool)):
        return []
    if key in _REFUSED:
        fault = _REFUSED[key] if value else ""
    elif key == "trained_betas":
        numbers = isinstance(value, list | tuple) and not any(fault_of(key, beta, 0.0) for beta in value)
        fault = "" if numbers else "a list of numbers in 0..1"
    elif key == "variance_type" and "learned" in str(value):
        fault = "only fixed variances: the network predicts none"
    elif key == "prediction_type" and value == "original_sample" and class_name == "EulerDiscreteScheduler":
        fault = ""
    else:
        fault = fault_of(key, value, default, _CHOICES)
    return [f"{key}={value!r:.80} ({fault})"] if fault else []


def schedule_of(config: Mapping[str, Any], class_name: str | None = None) -> NoiseSchedule:
    """Read the noise schedule of a model's training from its config; missing fields have the class's defaults."""
    defaults = CLASS_DEFAULTS.get(class_name or "", {})
    values = {**_SCHEDULE_DEFAULTS, **{name: defaults[name] for name in _SCHEDULE_DEFAULTS if name in defaults}}
    values |= {name: config[name] for name in values if name in config}
    train = values["num_train_timesteps"]
    kind = "sample" if values["prediction_type"] == "original_sample" else values["prediction_type"]
    match class_name:
        case "EDMEulerScheduler" | "EDMDPMSolverMultistepScheduler":
            fields = {name: config.get(name, _EDM[name]) for name in ("sigma_min", "sigma_max", "sigma_data")}
            return NoiseSchedule.edm(**fields, prediction_type=kind, num_train_timesteps=train)
        case "IPNDMScheduler":
            return NoiseSchedule.angular(train)
        case "FlowMatchEulerDiscreteScheduler" | "FlowMatchHeunDiscreteScheduler":
            return _flow_schedule(config, defaults, train, "shift")
    if kind == "flow_prediction":
        return _flow_schedule(config, defaults, train, "flow_shift")
    betas = values["trained_betas"]
    if betas is None:
        betas = make_betas(values["beta_schedule"], values["beta_start"], values["beta_end"], train)
    return NoiseSchedule.from_betas(betas, kind, zero_terminal_snr=bool(values["rescale_betas_zero_snr"]))


def _flow_schedule(config: Mapping[str, Any], defaults: Mapping[str, Any], train: int, shift: str) -> NoiseSchedule:
    """Read the noise schedule of a flow model; `shift` is the name of the field with a constant shift."""
    fields = {name: config.get(name, default) for name, default in defaults.items()}
    terminal = fields.get("shift_terminal")
    if fields.get("use_dynamic_shifting"):
        schedule = NoiseSchedule.flow(train, size_shift=fields["time_shift_type"], shift_terminal=terminal)
        ends = ("base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift")
        few, low, many, high = ({**_MATCHING, **fields}[name] for name in ends)
        return replace(schedule, mu_line=(few, low, many, high))
    return NoiseSchedule.flow(train, config.get(shift, 1.0), shift_terminal=terminal)


def options_of(config: Mapping[str, Any], class_name: str, implied: Mapping[str, Any]) -> SamplerOptions:
    """Read the options of `config` for `class_name`, with the class's defaults; `implied` fields take precedence."""
    values = {key: config.get(key, default) for key, default in CLASS_DEFAULTS[class_name].items()}
    sigmas = "automatic"
    for flag, curve in _CURVES.items():
        sigmas = curve if values.pop(flag, False) else sigmas
    for key in (*_NOTHING_HERE, *_SCHEDULE_DEFAULTS):
        values.pop(key, None)
    values["spacing"] = values.pop("timestep_spacing", "linspace")
    match class_name:
        case "DPMSolverMultistepScheduler":
            values["round_timesteps"] = config.get("beta_schedule") != "squaredcos_cap_v2"
        case "DEISMultistepScheduler":
            values["final_sigmas_type"] = "repeated"
            values.pop("algorithm_type")
        case "UniPCMultistepScheduler":
            values["flow_from_one"] = True
            values["disable_corrector"] = tuple(values["disable_corrector"])
            values["final_sigmas_type"] = "repeated" if values["final_sigmas_type"] == "sigma_min" else "zero"
        case "SASolverScheduler":
            values["final_sigmas_type"] = "repeated"
            values["predict_x0"] = values.pop("algorithm_type") != "noise_prediction"
        case "TCDScheduler":
            values["final_sigmas_type"] = "sigma_min"
        case "EDMEulerScheduler" | "EDMDPMSolverMultistepScheduler":
            values["sigma_min"] = values["sigma_max"] = None  # they are the ends of the schedule
            if class_name == "EDMEulerScheduler" and values["final_sigmas_type"] == "sigma_min":
                values["final_sigmas_type"] = "repeated"
        case "HeunDiscreteScheduler" | "LMSDiscreteScheduler" | "EulerDiscreteScheduler" | "DPMSolverSDEScheduler":
            values["round_timesteps"] = False
        case _:
            pass
    return SamplerOptions(**{"sigmas": sigmas, **values, **implied})
