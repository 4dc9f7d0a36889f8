"""The noise schedule of a model's training: how much of the image is left at each training timestep.

All values are float64, computed from the mathematical definition. Training code usually builds the betas in float32;
its `alphas_cumprod` differs from ours by rounding, up to about 1e-6 relative for the 1,000 steps of Stable Diffusion,
far below what a network trained in half precision can notice. Exact values avoid a second float32 rounding later, and
let tests compare with a float64 reference to the last digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from canvax.call import PredictionType
from canvax.errors import InputError, check_count, nearest, shown

TIMESTEP_UNITS = ("index", "quarter_log", "angle")
MOST_TIMESTEPS = 1_000_000
PREDICTION_TYPES = get_args(PredictionType)
BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "exp", "laplace", "sigmoid")

SMALLEST_ALPHA_CUMPROD = 2.0**-24
"""Replaces 0 in the variance-exploding view of a zero-terminal-SNR schedule, where the noise level would be infinite:
sigma becomes 4096, as is usual."""


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """A variance-preserving diffusion, x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) eps, and its network's prediction type.

    alphas_cumprod: a_t at each training timestep, float64, decreasing; 0 at the end for a zero-terminal-SNR schedule.
    prediction_type: "epsilon", "v_prediction" (v = sqrt(a) eps - sqrt(1 - a) x_0), "sample" (x_0), or
    "flow_prediction" (v = eps - x_0), where x_t = (1 - t) x_0 + t eps; `flow` makes these schedules.
    sigma_data: set for EDM models, whose network is preconditioned as in Karras et al. 2022, table 1; made by `edm`.
    timestep_unit: unit of the network's timestep: the "index" of a training timestep, a "quarter_log" of the level
    (EDM), or the "angle" whose tangent is the level, as a fraction of a right angle.
    shift: for flow models, t' = shift * t / (1 + (shift - 1) * t).
    size_shift: for flow models whose shift depends on the image size: how it follows from mu, "exponential" (e^mu) or
    "linear" (mu). `with_mu` sets mu.
    mu_line: tokens of an image and the mu for it, twice: mu of other sizes lies on the line through both, see `mu_of`.
    shift_terminal: for flow models, the time before the last step; the times of a run are stretched to end there.
    even_times: for flow models, whether the times of a run of n steps are 1, (n - 1) / n, ... 1 / n before the shift,
    whatever the sampler; else they are as the sampler's class in diffusers places them.
    run_times: for flow models, the times before the shift of a run with as many steps; other runs have even times.
    Source: Ho et al. 2020 (DDPM), eq. 4; Salimans and Ho 2022 (progressive distillation), section 4 for v; Lipman et
    al. 2023 (flow matching); Esser et al. 2024 (Stable Diffusion 3), eq. 23 for the shift.
    """

    alphas_cumprod: Any  # the argument may be a list, the attribute is an array
    prediction_type: str = "epsilon"
    sigma_data: float | None = None
    timestep_unit: str = "index"
    shift: float = 1.0
    size_shift: Literal["exponential", "linear"] | None = None
    mu_line: tuple[float, float, float, float] = (256, 0.5, 4096, 1.15)
    shift_terminal: float | None = None
    even_times: bool = False
    run_times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        try:
            values = np.asarray(self.alphas_cumprod, np.float64)
        except Exception:  # an arbitrary object can raise anything
            raise InputError("alphas_cumprod", "is not a list of numbers", value=self.alphas_cumprod) from None
        object.__setattr__(self, "alphas_cumprod", values)
        if self.prediction_type not in PREDICTION_TYPES:
            hint = nearest(str(self.prediction_type), PREDICTION_TYPES)
            raise InputError("prediction_type", "is not known", cure=hint, value=self.prediction_type)
        if self.timestep_unit not in TIMESTEP_UNITS:
            hint = nearest(self.timestep_unit, TIMESTEP_UNITS)
            raise InputError("timestep_unit", "is not known", cure=hint, value=self.timestep_unit)
        for name in ("sigma_data", "shift"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(name, "must be more than 0", value=value)
        if values.ndim == 1 and (np.diff(values) > 0).any():
            raise InputError(
                "alphas_cumprod", "rises somewhere", cure="give what is left of the image at each timestep, falling"
            )
        if values.ndim != 1 or values.size == 0 or not np.all((values >= 0) & (values <= 1)):
            raise InputError(
                "alphas_cumprod",
                f"must be a non-empty list of numbers in 0..1, got shape {values.shape}",
                cure="check the betas of the scheduler config",
            )

    @classmethod
    def from_betas(
        cls, betas: np.ndarray | Sequence[float], prediction_type: str = "epsilon", *, zero_terminal_snr: bool = False
    ) -> NoiseSchedule:
        """Make a schedule from `betas`, optionally rescaled to zero terminal SNR."""
        values = np.cumprod(1.0 - np.asarray(betas, np.float64))
        return cls(rescaled_to_zero_terminal_snr(values) if zero_terminal_snr else values, prediction_type)

    @classmethod
    def flow(
        cls,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        *,
        size_shift: Literal["exponential", "linear"] | None = None,
        shift_terminal: float | None = None,
    ) -> NoiseSchedule:
        """Make the schedule of rectified flow: t = 1/n, 2/n, ... 1, shifted."""
        check_count("num_train_timesteps", num_train_timesteps, MOST_TIMESTEPS)
        if not 0 < shift <= 1e6:
            raise InputError("shift", "must be more than 0, and at most 1e6", cure="1 is none", value=shift)
        t = shifted(np.arange(1, num_train_timesteps + 1) / num_train_timesteps, shift)
        remaining = (1 - t) ** 2 / ((1 - t) ** 2 + t**2)
        kind = "flow_prediction"
        return cls(remaining, kind, shift=shift, size_shift=size_shift, shift_terminal=shift_terminal)

    def mu_of(self, tokens: int) -> float:
        """Return `mu` for an image of this many tokens."""
        few, low, many, high = self.mu_line
        return low + (high - low) / (many - few) * (tokens - few)

    def with_mu(self, mu: float) -> NoiseSchedule:
        """Return the schedule of a flow model for the image size that `mu` belongs to."""
        return self.with_shift(float(np.exp(mu)) if self.size_shift == "exponential" else mu)

    def with_shift(self, shift: float) -> NoiseSchedule:
        """Return the schedule of a flow model with another shift."""
        new = NoiseSchedule.flow(self.num_train_timesteps, shift)
        return replace(self, alphas_cumprod=new.alphas_cumprod, shift=shift)

    @classmethod
    def edm(
        cls, sigma_min: float, sigma_max: float, sigma_data: float, prediction_type: str, num_train_timesteps: int
    ) -> NoiseSchedule:
        """Make the schedule of a network with EDM preconditioning between two levels: Karras et al. 2022, table 1."""
        check_count("num_train_timesteps", num_train_timesteps, MOST_TIMESTEPS)
        if not 0 < sigma_min < sigma_max <= 1e6:
            raise InputError("sigma_min", f"and sigma_max={sigma_max} are not in order within 0..1e6", value=sigma_min)
        levels = np.exp(np.linspace(np.log(sigma_min), np.log(sigma_max), num_train_timesteps))
        return cls(1 / (1 + levels**2), prediction_type, sigma_data=sigma_data, timestep_unit="quarter_log")

    @classmethod
    def angular(cls, num_train_timesteps: int = 1000) -> NoiseSchedule:
        """Make the schedule of IPNDM's models: std = sin^2 of even angles, v prediction, angles as timesteps."""
        check_count("num_train_timesteps", num_train_timesteps, MOST_TIMESTEPS)
        std = np.sin(np.arange(1, num_train_timesteps + 1) / num_train_timesteps * np.pi / 2) ** 2
        return cls(1 - std**2, "v_prediction", timestep_unit="angle")

    @property
    def num_train_timesteps(self) -> int:
        return self.alphas_cumprod.size

    @property
    def last_timestep(self) -> int:
        """The noisiest timestep of a network with numbered timesteps; those of flow models are 1000 t."""
        return self.num_train_timesteps - (not self.is_flow)

    @property
    def is_flow(self) -> bool:
        return self.prediction_type == "flow_prediction"

    @cached_property
    def sigmas(self) -> np.ndarray:
        """The noise level sigma of each training timestep: sqrt((1 - a) / a), always finite; t for flow models."""
        if self.is_flow:
            n = self.num_train_timesteps
            return shifted(np.arange(1, n + 1) / n, self.shift)
        remaining = self.alphas_cumprod.copy()
        if remaining[-1] == 0:
            remaining[-1] = SMALLEST_ALPHA_CUMPROD
        return np.sqrt((1.0 - remaining) / remaining)

    @cached_property
    def log_sigmas(self) -> np.ndarray:
        return np.log(self.sigmas)

    def timestep_of(self, sigmas: np.ndarray | Sequence[float] | float) -> np.ndarray:
        """Return the network's timestep at each level; usually a fractional index, linear in log sigma, clamped."""
        sigmas = _numbers("sigmas", sigmas, 0)
        match self.timestep_unit:
            case "quarter_log":
                return 0.25 * np.log(sigmas)
            case "angle":
                return np.arctan(sigmas) * 2 / np.pi
        if self.is_flow:
            return sigmas * self.num_train_timesteps
        return np.interp(np.log(sigmas), self.log_sigmas, np.arange(self.num_train_timesteps))

    def sigma_at(self, timesteps: np.ndarray | Sequence[float] | float) -> np.ndarray:
        """Return the level at fractional timesteps, log-linear between training timesteps."""
        timesteps = _numbers("timesteps", timesteps)
        return np.exp(np.interp(timesteps, np.arange(self.num_train_timesteps), self.log_sigmas))


def _numbers(name: str, values: Any, least: float = -np.inf) -> np.ndarray:
    """Convert levels or timesteps to float64."""
    array = np.asarray(values, np.float64)
    if not np.all((array >= least) & np.isfinite(array)):
        raise InputError(f"{name}={shown(values)} holds what is not a finite number" + " of at least 0" * (least == 0))
    return array


def shifted(t: np.ndarray, shift: float) -> np.ndarray:
    """Shift flow times towards noise: Esser et al. 2024, eq. 23."""
    return shift * t / (1 + (shift - 1) * t)


def make_betas(kind: str, beta_start: float, beta_end: float, num_train_timesteps: int) -> np.ndarray:
    """Return the variance added at each training timestep, float64 [num_train_timesteps].

    linear: Ho et al. 2020, section 4. scaled_linear: linear in sqrt(beta), Rombach et al. 2022 (latent diffusion).
    squaredcos_cap_v2: Nichol and Dhariwal 2021, eq. 17. laplace: Hang et al. 2024. sigmoid: Xu et al. 2022 (GeoDiff).
    """
    n = num_train_timesteps
    match kind:
        case "linear":
            return np.linspace(beta_start, beta_end, n)
        case "scaled_linear":
            return np.linspace(beta_start**0.5, beta_end**0.5, n) ** 2
        case "sigmoid":
            return beta_start + (beta_end - beta_start) / (1.0 + np.exp(-np.linspace(-6.0, 6.0, n)))
        case "squaredcos_cap_v2":
            return _betas_of(np.cos((np.arange(n + 1) / n + 0.008) / 1.008 * np.pi / 2) ** 2)
        case "exp":
            return _betas_of(np.exp(-12.0 * np.arange(n + 1) / n))
        case "laplace":
            u = 0.5 - np.arange(n + 1) / n
            log_snr = -0.5 * np.where(u < 0, -1.0, 1.0) * np.log(1.0 - 2.0 * np.abs(u) + 1e-6)
            snr = np.exp(log_snr)
            return _betas_of(np.sqrt(snr / (1.0 + snr)))
    raise InputError("beta_schedule", "is not known", cure=nearest(str(kind), BETA_SCHEDULES), value=kind)


def _betas_of(remaining: np.ndarray) -> np.ndarray:
    """Return the betas, at most 0.999, whose cumulative product of 1 - beta follows `remaining` [n + 1]."""
    return np.minimum(1.0 - remaining[1:] / remaining[:-1], 0.999)


def rescaled_to_zero_terminal_snr(alphas_cumprod: np.ndarray) -> np.ndarray:
    """Shift and scales a schedule so that the last timestep is pure noise and the first is unchanged.

    Source: Lin et al. 2024, "Common diffusion noise schedules and sample steps are flawed", algorithm 1.
    """
    root = np.sqrt(alphas_cumprod)
    return ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2
