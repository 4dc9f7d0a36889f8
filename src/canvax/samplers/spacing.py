"""Which timesteps and noise levels a run visits.

Each family of schedulers places its timesteps in its own way, and checkpoints depend on it, so the differences are kept
and named here. All results run from noisy to clean.
"""

from __future__ import annotations

import numpy as np

from canvax.errors import InputError, nearest
from canvax.samplers.options import SIGMAS, SPACINGS, SamplerOptions
from canvax.samplers.schedule import NoiseSchedule


def trailing(train: int, steps: int, start: int | None = None) -> np.ndarray:
    """From the last training timestep down in equal strides of train / steps (Lin et al. 2024, table 2)."""
    stride = train / steps
    # arange's rounding may yield one value too many, at -1 (61 steps of 1,000): cut it off.
    return np.arange(train if start is None else start, 0, -stride).round()[:steps] - 1.0


def leading(train: int, steps: int, offset: int) -> np.ndarray:
    """Multiples of the whole stride, from 0 up, plus `offset`."""
    return np.arange(steps)[::-1] * float(train // steps) + offset


def training_timesteps(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> np.ndarray:
    """Whole timesteps for DDIM, DDPM and PNDM, int64 [steps]."""
    train = schedule.num_train_timesteps
    match options.spacing:
        case "leading":
            chosen = leading(train, steps, options.steps_offset)
        case "trailing":
            chosen = trailing(train, steps)
        case "linspace":
            chosen = np.linspace(0, train - 1, steps).round()[::-1]
        case _:
            raise _unknown_spacing(options)
    if chosen[0] >= train or chosen[-1] < 0:
        raise InputError(
            f"steps={steps} with steps_offset={options.steps_offset} reaches timestep {int(chosen.max())}, outside "
            f"0..{train - 1}; use fewer steps or spacing='trailing'"
        )
    return chosen.astype(np.int64)


def euler_sigmas(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    """Timesteps [R] and noise levels [R + 1] for Euler and Euler ancestral; timesteps may be fractional."""
    train = schedule.num_train_timesteps
    match options.spacing:
        case "leading":
            timesteps = leading(train, steps, options.steps_offset)
        case "trailing":
            timesteps = trailing(train, steps)
        case "linspace":
            timesteps = np.linspace(0, train - 1, steps)[::-1]
        case _:
            raise _unknown_spacing(options)
    match options.interpolation_type:
        case "linear":
            sigmas = np.interp(timesteps, np.arange(train), schedule.sigmas)
        case "log_linear":
            # One level more than timesteps: the run ends at the schedule's smallest level, not at the final one.
            sigmas = np.exp(np.linspace(schedule.log_sigmas[-1], schedule.log_sigmas[0], steps + 1))
        case other:
            hint = nearest(str(other), ("linear", "log_linear"))
            raise InputError(f"interpolation_type={other!r} is not known; {hint}")
    if options.sigmas != "normal":
        sigmas = _curve(options, sigmas[0], sigmas[-1], steps)
        timesteps = sigma_to_timestep(schedule, sigmas)
    sigmas = np.append(sigmas, final_sigma(schedule, options))
    if _continuous(schedule, options):
        timesteps = timesteps_of(schedule, sigmas[:-1], options)
    return timesteps, sigmas[: len(timesteps) + 1]


def dpm_sigmas(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> tuple[np.ndarray, np.ndarray]:
    """Timesteps [R] and noise levels [R + 1] for DPM-Solver multistep; timesteps are whole.

    Unlike the others, linspace and leading place steps + 1 timesteps and leave out the cleanest.
    """
    train = schedule.num_train_timesteps
    # log(alpha / sigma) = -log(sigma / alpha); where the config cuts off the noisiest timesteps, start below them.
    last = train - int(np.searchsorted(-schedule.log_sigmas[::-1], options.lambda_min_clipped))
    match options.spacing:
        case "leading":
            timesteps = leading(last, steps + 1, options.steps_offset)[:-1]
        case "trailing":
            timesteps = trailing(train, steps, last)
        case "linspace":
            timesteps = np.linspace(0, last - 1, steps + 1).round()[::-1][:-1]
        case _:
            raise _unknown_spacing(options)
    if options.sigmas == "normal":
        sigmas = np.interp(timesteps, np.arange(train), schedule.sigmas)
    else:
        sigmas = _curve(options, schedule.sigmas[-1], schedule.sigmas[0], steps)
        timesteps = sigma_to_timestep(schedule, sigmas)
        if options.round_timesteps and options.sigmas in ("karras", "lu"):
            timesteps = timesteps.round()
        timesteps = np.floor(timesteps + 1e-6)  # whole, and 998.9999999 is a 999 that went through exp and log
    return timesteps, np.append(sigmas, final_sigma(schedule, options))


def final_sigma(schedule: NoiseSchedule, options: SamplerOptions) -> float:
    """The noise level after the last step."""
    match options.final_sigmas_type:
        case "zero":
            return 0.0
        case "sigma_min":
            return float(schedule.sigmas[0])
    hint = nearest(str(options.final_sigmas_type), ("zero", "sigma_min"))
    raise InputError(f"final_sigmas_type={options.final_sigmas_type!r} is not known; {hint}")


def timesteps_of(schedule: NoiseSchedule, sigmas: np.ndarray, options: SamplerOptions) -> np.ndarray:
    """What an Euler network is told at the given levels: a timestep, or the c_noise of Karras et al. 2022, table 1."""
    return 0.25 * np.log(sigmas) if _continuous(schedule, options) else sigma_to_timestep(schedule, sigmas)


def _continuous(schedule: NoiseSchedule, options: SamplerOptions) -> bool:
    return options.timestep_type == "continuous" and schedule.prediction_type == "v_prediction"


def sigma_to_timestep(schedule: NoiseSchedule, sigmas: np.ndarray) -> np.ndarray:
    """The fractional timestep of each noise level, linear in log sigma between training timesteps, held at the ends."""
    return np.interp(np.log(sigmas), schedule.log_sigmas, np.arange(schedule.num_train_timesteps))


def karras(sigma_max: float, sigma_min: float, steps: int, rho: float = 7.0) -> np.ndarray:
    """Noise levels even in sigma^(1/rho): Karras et al. 2022, eq. 5."""
    ramp = np.linspace(0.0, 1.0, steps)
    return (sigma_max ** (1 / rho) + ramp * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho


def exponential(sigma_max: float, sigma_min: float, steps: int) -> np.ndarray:
    """Noise levels even in log sigma, which is even in the lambda of Lu et al. 2022 (DPM-Solver), section 3.4."""
    return np.exp(np.linspace(np.log(sigma_max), np.log(sigma_min), steps))


def _curve(options: SamplerOptions, sigma_max: float, sigma_min: float, steps: int) -> np.ndarray:
    """Noise levels of the curve asked for, between the config's limits, else the given ones."""
    if options.sigmas == "lu":
        return exponential(sigma_max, sigma_min, steps)
    largest = sigma_max if options.sigma_max is None else options.sigma_max
    smallest = sigma_min if options.sigma_min is None else options.sigma_min
    if not 0 < smallest <= largest:
        raise InputError(f"sigma_min={smallest} and sigma_max={largest} must satisfy 0 < sigma_min <= sigma_max")
    match options.sigmas:
        case "karras":
            return karras(largest, smallest, steps)
        case "exponential":
            return exponential(largest, smallest, steps)
    raise InputError(f"sigmas={options.sigmas!r} is not known; {nearest(str(options.sigmas), SIGMAS)}")


def _unknown_spacing(options: SamplerOptions) -> InputError:
    return InputError(f"spacing={options.spacing!r} is not known; {nearest(str(options.spacing), SPACINGS)}")
