"""The options of samplers: a frozen record shared by the solvers and the catalogue, and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from canvax.call import Spacing
from canvax.errors import FLOAT32_MAX, InputError, nearest, shown
from canvax.samplers.curve_names import NAMES

SPACINGS = get_args(Spacing)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "spacing": SPACINGS,
    "algorithm_type": ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver", "deis"),
    "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),
    "interpolation_type": ("linear", "log_linear"),
    "timestep_type": ("discrete", "continuous"),
    "final_sigmas_type": ("zero", "sigma_min", "repeated"),
    "sigma_schedule": ("karras", "exponential"),
    "sigmas": NAMES,
    "variance_type": (None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
}
LIMITS: dict[str, tuple[float, float]] = {
    "eta": (0, 1),
    "steps_offset": (0, 100_000),
    "beta_start": (0, 0.9999),
    "beta_end": (1e-9, 0.9999),
    "solver_order": (1, 3),
    "predictor_order": (1, 4),
    "corrector_order": (1, 4),
    "s_churn": (0, FLOAT32_MAX),
    "s_tmin": (0, FLOAT32_MAX),
    "s_tmax": (0, math.inf),
    "s_noise": (0, FLOAT32_MAX),
    "rho": (0.1, 1000),
    "sigma_min": (1e-6, 1e6),
    "sigma_max": (1e-6, 1e6),
    "sigma_data": (1e-6, 1e6),
    "shift": (1e-6, 1e6),
    "flow_shift": (1e-6, 1e6),
    "mu": (-13, 13),  # keeps the shift e^mu within its limits
    "shift_terminal": (0, 0.9999),
    "lambda_min_clipped": (-math.inf, 0),
    "timestep_scaling": (0, math.inf),
    "restart": (0, 100_000),
}


def fault_of(name: str, value: Any, default: Any, choices: Mapping[str, tuple[str | None, ...]] = CHOICES) -> str:
    """Check a value of the field `name`, whose type follows from its default.

    Returns what the field should contain instead, or "" if `value` is valid.
    """
    if name in choices:
        known = (value is None or isinstance(value, str)) and value in choices[name]
        return "" if known else nearest(shown(value), [str(choice) for choice in choices[name]])
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, list | tuple):
        good = isinstance(value, list | tuple) and all(isinstance(number, Integral) for number in value)
        return "" if good else "a list of whole numbers"
    whole = isinstance(default, int)
    low, high = LIMITS.get(name, (1, 100_000) if whole else (-FLOAT32_MAX, FLOAT32_MAX))
    number: Any = value if isinstance(value, Integral if whole else Real) and not isinstance(value, bool) else math.nan
    if low <= number <= high and (abs(number) <= FLOAT32_MAX or number in (-math.inf, math.inf)):
        return ""
    return f"a {'whole ' if whole else ''}number in {low:g}..{high:g}"


@dataclass(frozen=True)
class SamplerOptions:
    """Options of a sampler; solvers ignore the fields they do not use.

    Fields have the names of diffusers' scheduler_config.json, except `spacing` (timestep_spacing) and `sigmas`
    (use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas, use_lu_lambdas). `sigmas` is a name in
    `canvax.samplers.CURVES` or a list of levels; with "automatic" they follow from `spacing`. `timesteps` is a list of
    timesteps. `eta` None is the solver's default: 0 for DDIM, 1 for ancestral samplers, 0.3 for TCD.
    """

    spacing: str = "leading"
    steps_offset: int = 0
    sigmas: str | tuple[float, ...] = "automatic"
    timesteps: tuple[float, ...] | None = None
    eta: float | None = None
    solver_order: int = 2
    solver_type: str = "midpoint"

    # Karras et al. 2022, algorithm 2: amount of noise added in each step, the levels between which it is, its scale.
    s_churn: float = 0.0
    s_tmin: float = 0.0
    s_tmax: float = float("inf")
    s_noise: float = 1.0

    # Noise levels: `rho` of the Karras (7) and polyexponential (1) curves, limits of a curve, the last level.
    rho: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    interpolation_type: str = "linear"
    timestep_type: str = "discrete"
    final_sigmas_type: str = "zero"
    lambda_min_clipped: float = float("-inf")
    round_timesteps: bool = True
    sigma_schedule: str = "karras"

    # DDIM, DDPM, PNDM, LCM, TCD
    set_alpha_to_one: bool = True
    variance_type: str | None = None
    skip_prk_steps: bool = True
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0

    # DPM-Solver, DEIS, UniPC, SA-Solver
    algorithm_type: str = "dpmsolver++"
    lower_order_final: bool = True
    euler_at_final: bool = False
    predict_x0: bool = True
    disable_corrector: tuple[int, ...] = ()
    predictor_order: int = 2
    corrector_order: int = 2

    # Flow models
    flow_from_one: bool = False
    stochastic_sampling: bool = False

    restart: int = 0
    """Number of initial steps that an earlier run has done; this run has no memory of them."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("sigmas", "timesteps") and not isinstance(value, str | None):
                object.__setattr__(self, name, falling(name, value))
            elif value is not None or getattr(SamplerOptions, name) is not None:
                check_option(name, value)
                if isinstance(value, Integral) and not isinstance(getattr(SamplerOptions, name), int):
                    object.__setattr__(self, name, float(value))  # NumPy makes integers above 64 bits objects


def check_option(name: str, value: Any, default: Any = None) -> None:
    """Raise InputError for an invalid value of a field of `SamplerOptions`, or of a setting with this default."""
    if fault := fault_of(name, value, getattr(SamplerOptions, name, default)):
        raise InputError(name, f"cannot be used ({fault})", value=value)


def falling(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Convert noise levels or timesteps to floats, after checking that they fall."""
    try:
        bools = any(isinstance(value, bool) for value in values)
        numbers = np.empty(0) if bools else np.asarray(values, np.float64)
    except Exception:  # an arbitrary object can raise anything
        numbers = np.empty(0)
    if numbers.ndim != 1 or numbers.size == 0 or not np.all((numbers >= 0) & (numbers <= 1e6)):
        raise InputError(name, "is not a list of numbers in 0..1e6", value=values)
    if np.any(np.diff(numbers) >= 0) or numbers[0] <= 0:
        raise InputError(name, "does not fall from noise to image", cure="sort it from the largest down", value=values)
    return tuple(float(number) for number in numbers)
