"""Computes the timesteps and noise levels of a run, from noisy to clean.

Each family of schedulers places its timesteps differently, and checkpoints depend on it, so every variant has a
function here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canvax.errors import InputError
from canvax.samplers.curves import curve_levels, exponential, karras
from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Path
from canvax.samplers.schedule import NoiseSchedule, shifted

MOST_NOISE = 1 - 1e-6
"""Largest level of flow models for solvers that take the logarithm of the signal."""
SMALLEST_SIGNAL = 2.0**-48
"""Smallest alpha^2 of models whose timestep is an angle."""

Base = Callable[[NoiseSchedule, int, SamplerOptions], tuple[np.ndarray, np.ndarray]]
"""Returns the timesteps [n] of a spacing, and their levels [n]."""


def training_path(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> Path:
    """Return the path of DDIM, DDPM and PNDM: whole timesteps with exact levels, infinite where no signal is left."""
    return _path(schedule, steps, options, _training_base, family="training")


def euler_path(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> Path:
    """Return the path of k-diffusion's solvers, whose timesteps can be fractional."""
    return _path(schedule, steps, options, _euler_base, family="euler")


def dpm_path(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> Path:
    """Return the path of DPM-Solver and related solvers, whose timesteps are whole.

    Unlike the other paths, linspace and leading place steps + 1 timesteps and leave out the cleanest.
    """
    return _path(schedule, steps, options, _dpm_base, family="dpm")


def distilled_path(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> Path:
    """Return the path of LCM and TCD: a subset of the timesteps of the distillation, or of all if these are too few.

    Source: Luo et al. 2023 (Latent Consistency Models), section 4.3.
    """
    return _path(schedule, steps, options, _distilled_base, family="distilled")


def _path(schedule: NoiseSchedule, steps: int, options: SamplerOptions, base: Base, *, family: str) -> Path:
    even = False
    if options.timesteps is not None:
        timesteps = np.asarray(options.timesteps, np.float64)
        sigmas = _level_at(schedule, timesteps, exact=family == "training")
    elif not isinstance(options.sigmas, str):
        sigmas = np.asarray(options.sigmas, np.float64)
        sigmas = sigmas[: len(sigmas) - (sigmas[-1] == 0)]
        timesteps = schedule.timestep_of(sigmas)
    elif schedule.is_flow:
        timesteps, sigmas = _flow(schedule, steps, options, family)
    elif schedule.timestep_unit != "index" and options.sigmas == "automatic":
        sigmas = _unnumbered_levels(schedule, steps, options)
        timesteps = schedule.timestep_of(sigmas)
    else:
        timesteps, sigmas = base(schedule, steps, options)
        even = options.sigmas == "automatic"
        if even:
            _demand_trained(schedule, timesteps, steps, options)
        else:
            full = (schedule.sigmas[-1], schedule.sigmas[0])
            ends = (sigmas[0], sigmas[-1]) if family == "euler" else full
            sigmas = curve_levels(schedule, steps, options, float(ends[0]), float(ends[1]))
            timesteps = _curve_timesteps(schedule, sigmas, options, family)
    if schedule.is_flow and family == "dpm":
        sigmas = np.minimum(sigmas, MOST_NOISE)
    if _continuous(schedule, options):
        timesteps = 0.25 * np.log(sigmas)
    sigmas = np.append(sigmas, final_sigma(schedule, options, sigmas))[: len(timesteps) + 1]
    return Path(schedule, timesteps, sigmas, len(timesteps), even).after(options.restart)


def _curve_timesteps(schedule: NoiseSchedule, sigmas: np.ndarray, options: SamplerOptions, family: str) -> np.ndarray:
    """Return the timesteps of a curve: fractional, except where diffusers rounds those of its curves."""
    timesteps = schedule.timestep_of(sigmas)
    if options.sigmas not in ("karras", "exponential", "lu", "beta_sigmas"):
        return timesteps
    if family == "euler":
        return timesteps.round() if options.round_timesteps and options.sigmas == "karras" else timesteps
    if family != "dpm":
        return timesteps
    if options.round_timesteps and options.sigmas in ("karras", "lu"):
        timesteps = timesteps.round()
    return np.floor(timesteps + 1e-6)  # 998.9999999 is 999 after exp and log


def trailing(train: int, steps: int, start: int | None = None) -> np.ndarray:
    """Place timesteps from the last down, in equal strides of train / steps (Lin et al. 2024, table 2)."""
    stride = train / steps
    chosen = np.arange(train if start is None else start, 0, -stride).round() - 1.0
    # Rounding can give an additional value at -1 (61 steps of 1,000, or with a lower start): remove it.
    return chosen[chosen >= 0]


def leading(train: int, steps: int, offset: int) -> np.ndarray:
    """Place timesteps at multiples of the whole stride, from 0 up, plus `offset`."""
    return np.arange(steps)[::-1] * float(train // steps) + offset


def _training_base(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    train = schedule.num_train_timesteps
    match options.spacing:
        case "leading":
            chosen = leading(train, steps, options.steps_offset)
        case "trailing":
            chosen = trailing(train, steps)
        case _:
            chosen = np.linspace(0, train - 1, steps).round()[::-1]
    return chosen, _level_at(schedule, chosen, exact=True)


def _euler_base(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    train = schedule.num_train_timesteps
    match options.spacing:
        case "leading":
            timesteps = leading(train, steps, options.steps_offset)
        case "trailing":
            timesteps = trailing(train, steps)
        case _:
            timesteps = np.linspace(0, train - 1, steps)[::-1]
    if options.interpolation_type == "linear":
        return timesteps, _level_at(schedule, timesteps)
    # One more level than timesteps: the run ends at the schedule's smallest level, not at the final level.
    return timesteps, np.exp(np.linspace(schedule.log_sigmas[-1], schedule.log_sigmas[0], steps + 1))


def _dpm_base(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    train = schedule.num_train_timesteps
    # log(alpha / sigma) = -log(sigma / alpha); start below the noisiest timesteps if the config cuts them off.
    last = train - int(np.searchsorted(-schedule.log_sigmas[::-1], options.lambda_min_clipped))
    match options.spacing:
        case "leading":
            timesteps = leading(last, steps + 1, options.steps_offset)[:-1]
        case "trailing":
            timesteps = trailing(train, steps, last)
        case _:
            timesteps = np.linspace(0, last - 1, steps + 1).round()[::-1][:-1]
    return timesteps, _level_at(schedule, timesteps)


def _distilled_base(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    train = schedule.num_train_timesteps
    grid = options.original_inference_steps if steps <= options.original_inference_steps <= train else train
    chosen = np.floor(np.linspace(0, grid, steps, endpoint=False))
    timesteps = (grid - chosen) * (train // grid) - 1.0
    return timesteps, _level_at(schedule, timesteps, exact=True)


def _flow(schedule: NoiseSchedule, steps: int, options: SamplerOptions, family: str) -> tuple[np.ndarray, np.ndarray]:
    """Return timesteps and times of a flow model; diffusers' classes differ in the even times before the shift."""
    train, shift = schedule.num_train_timesteps, schedule.shift
    if options.sigmas in ("ays", "ays_sdxl"):
        raise InputError(
            "sigmas", "was made for Stable Diffusion, not for flow models", cure="use 'beta'", value=options.sigmas
        )
    if options.sigmas in ("normal", "simple", "sgm_uniform", "ddim_uniform", "beta"):
        sigmas = _to_terminal(schedule, curve_levels(schedule, steps, options, 1.0, 1.0))
        return schedule.timestep_of(sigmas), sigmas
    if len(schedule.run_times) == steps:
        sigmas = shifted(np.array(schedule.run_times), shift)
    elif schedule.even_times:
        sigmas = shifted(np.arange(steps, 0, -1) / steps, shift)
    elif family != "dpm":
        # A constant shift is applied twice to the last time, as in the reference.
        cleanest = 1 / train if schedule.size_shift else schedule.sigmas[0]
        sigmas = shifted(np.linspace(1.0, cleanest, steps), shift)
    elif options.flow_from_one:
        sigmas = shifted(np.linspace(1.0, 1 / train, steps + 1)[:-1], shift)
    else:
        sigmas = shifted(1 - np.linspace(1.0, 1 / train, steps + 1), shift)[:0:-1]
    sigmas = _to_terminal(schedule, sigmas)
    if options.sigmas != "automatic":
        sigmas = curve_levels(schedule, steps, options, float(sigmas[0]), float(sigmas[-1]))
    timesteps = schedule.timestep_of(sigmas)
    if family == "dpm":
        timesteps = np.floor(np.minimum(sigmas, MOST_NOISE) * train + 1e-9)
    return timesteps, sigmas


def _to_terminal(schedule: NoiseSchedule, times: np.ndarray) -> np.ndarray:
    """Stretch the times of a run so that the last step begins at the schedule's `shift_terminal`."""
    if not schedule.shift_terminal or times[-1] == 1:
        return times
    left = 1 - times
    return 1 - left * ((1 - schedule.shift_terminal) / left[-1])


def _unnumbered_levels(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> np.ndarray:
    """Return the default levels of models that are not trained on numbered timesteps."""
    if schedule.timestep_unit == "angle":
        std = np.sin(np.linspace(1, 0, steps + 1)[:-1] * np.pi / 2) ** 2
        return std / np.sqrt(np.maximum(1 - std**2, SMALLEST_SIGNAL))
    curve = karras if options.sigma_schedule == "karras" else exponential
    return curve(float(schedule.sigmas[-1]), float(schedule.sigmas[0]), steps, options.rho)


def final_sigma(schedule: NoiseSchedule, options: SamplerOptions, sigmas: np.ndarray) -> float:
    """Return the noise level after the last step; with "repeated", the last step of a curve keeps its level."""
    if not isinstance(options.sigmas, str) and options.sigmas[-1] == 0:
        return 0.0
    if options.final_sigmas_type == "zero":
        return 0.0
    smallest = options.final_sigmas_type == "sigma_min"
    smallest |= options.sigmas == "automatic" and schedule.timestep_unit == "index"
    return float(schedule.sigmas[0] if smallest and not schedule.is_flow else sigmas[-1])


def _level_at(schedule: NoiseSchedule, timesteps: np.ndarray, *, exact: bool = False) -> np.ndarray:
    """Return levels at timesteps, linear between training timesteps; `exact` levels can be infinite (no signal)."""
    if schedule.is_flow:
        return timesteps / schedule.num_train_timesteps
    train = np.arange(schedule.num_train_timesteps)
    if not exact:
        return np.interp(timesteps, train, schedule.sigmas)
    with np.errstate(divide="ignore"):
        remaining = np.interp(timesteps, train, schedule.alphas_cumprod)
        return np.sqrt((1 - remaining) / remaining)


def _demand_trained(schedule: NoiseSchedule, timesteps: np.ndarray, steps: int, options: SamplerOptions) -> None:
    """Refuse timesteps that the network was not trained on."""
    last = schedule.num_train_timesteps - 1
    beyond = timesteps[(timesteps < 0) | (timesteps > last)]
    if beyond.size:
        raise InputError(
            "steps",
            f"with steps_offset={options.steps_offset} reaches timestep {beyond[0]:g}, outside 0..{last}",
            cure="use fewer steps, a smaller steps_offset or {spacing='trailing'}",
            value=steps,
        )


def _continuous(schedule: NoiseSchedule, options: SamplerOptions) -> bool:
    """Return whether the network's timestep is the c_noise of Karras et al. 2022, table 1 (Euler with v prediction)."""
    return options.timestep_type == "continuous" and schedule.prediction_type == "v_prediction"
