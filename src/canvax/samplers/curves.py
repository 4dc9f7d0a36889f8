"""Sigma curves, which A1111 calls schedule types and ComfyUI schedulers.

Each returns the falling levels of `steps` steps; the last step then goes to zero (or as the config says). Curves of the
first group run between the largest and smallest level of a scheduler's spacing, those of the second group use the whole
noise schedule.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from canvax.errors import InputError, nearest
from canvax.samplers.curve_names import NAMES
from canvax.samplers.options import SamplerOptions
from canvax.samplers.schedule import NoiseSchedule

# The authors' published sigmas for 10 steps.
_AYS = {
    "ays": (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029),
    "ays_sdxl": (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029),
}
BETA_SHAPE = 0.6


def curve_levels(
    schedule: NoiseSchedule, steps: int, options: SamplerOptions, largest: float, smallest: float
) -> np.ndarray:
    """Return the levels [steps] of the curve `options.sigmas`; `largest` and `smallest` are those of the spacing."""
    name = options.sigmas
    if name == "lu":
        return exponential(largest, smallest, steps)
    if name in _BETWEEN:
        largest = largest if options.sigma_max is None else options.sigma_max
        smallest = smallest if options.sigma_min is None else options.sigma_min
        if not 0 < smallest <= largest:
            raise InputError(
                "sigma_min", f"and sigma_max={largest} must satisfy 0 < sigma_min <= sigma_max", value=smallest
            )
        return _BETWEEN[name](largest, smallest, steps, options.rho)
    if name in _WHOLE:
        return _WHOLE[name](schedule, steps)
    raise InputError("sigmas", "is not known", cure=nearest(str(name), NAMES), value=name)


def karras(largest: float, smallest: float, steps: int, rho: float | None = None) -> np.ndarray:
    """Space noise levels evenly in sigma^(1/rho): Karras et al. 2022, eq. 5."""
    rho = 7.0 if rho is None else rho
    ramp = np.linspace(0.0, 1.0, steps)
    return (largest ** (1 / rho) + ramp * (smallest ** (1 / rho) - largest ** (1 / rho))) ** rho


def exponential(largest: float, smallest: float, steps: int, rho: float | None = None) -> np.ndarray:
    """Space noise levels evenly in log sigma, and so in lambda: Lu et al. 2022 (DPM-Solver), section 3.4."""
    return np.exp(np.linspace(np.log(largest), np.log(smallest), steps))


def polyexponential(largest: float, smallest: float, steps: int, rho: float | None = None) -> np.ndarray:
    """Space noise levels so that log sigma falls as a power of an even ramp."""
    ramp = np.linspace(1.0, 0.0, steps) ** (1.0 if rho is None else rho)
    return np.exp(ramp * (np.log(largest) - np.log(smallest)) + np.log(smallest))


def beta_sigmas(largest: float, smallest: float, steps: int, rho: float | None = None) -> np.ndarray:
    """Place noise levels at the quantiles of a beta distribution over sigma."""
    return smallest + (largest - smallest) * beta_quantile(1.0 - np.linspace(0.0, 1.0, steps))


def kl_optimal(largest: float, smallest: float, steps: int, rho: float | None = None) -> np.ndarray:
    """Space noise levels evenly in atan(sigma): Sabour et al. 2024 (Align Your Steps), theorem 3.1."""
    return np.tan(np.linspace(np.arctan(largest), np.arctan(smallest), steps))


_BETWEEN: dict[object, Callable[[float, float, int, float | None], np.ndarray]] = {
    "karras": karras,
    "exponential": exponential,
    "polyexponential": polyexponential,
    "beta_sigmas": beta_sigmas,
    "kl_optimal": kl_optimal,
}


def normal(schedule: NoiseSchedule, steps: int) -> np.ndarray:
    """Space timesteps evenly from the last to the first."""
    return schedule.sigma_at(np.linspace(schedule.num_train_timesteps - 1, 0, steps))


def sgm_uniform(schedule: NoiseSchedule, steps: int) -> np.ndarray:
    """Return `normal` with one more step, without its last level."""
    return schedule.sigma_at(np.linspace(schedule.num_train_timesteps - 1, 0, steps + 1)[:-1])


def simple(schedule: NoiseSchedule, steps: int) -> np.ndarray:
    """Take every n-th training timestep from the noisiest down, n = train / steps."""
    train = schedule.num_train_timesteps
    return schedule.sigmas[train - 1 - (np.arange(steps) * (train / steps)).astype(int)]


def ddim_uniform(schedule: NoiseSchedule, steps: int) -> np.ndarray:
    """Take every n-th training timestep from the second up, n = train // steps."""
    train = schedule.num_train_timesteps
    chosen = 1 + np.arange(steps)[::-1] * (train // steps)
    return schedule.sigmas[np.minimum(chosen, train - 1)]


def beta(schedule: NoiseSchedule, steps: int) -> np.ndarray:
    """Place fractional timesteps at quantiles of a beta distribution: Lee et al. 2024 (Beta sampling), section 4."""
    u = 1.0 - np.arange(steps) / steps
    return schedule.sigma_at((schedule.num_train_timesteps - 1) * beta_quantile(u))


def align_your_steps(name: str) -> Callable[[NoiseSchedule, int], np.ndarray]:
    """Return a curve through the published levels, log-linear between them for other numbers of steps."""

    def levels(schedule: NoiseSchedule, steps: int) -> np.ndarray:
        table = np.log(_AYS[name])
        at = np.linspace(0.0, 1.0, steps + 1)[:-1]
        return np.exp(np.interp(at, np.linspace(0.0, 1.0, table.size), table))

    return levels


_WHOLE: dict[object, Callable[[NoiseSchedule, int], np.ndarray]] = {
    "normal": normal,
    "simple": simple,
    "sgm_uniform": sgm_uniform,
    "ddim_uniform": ddim_uniform,
    "beta": beta,
    "ays": align_your_steps("ays"),
    "ays_sdxl": align_your_steps("ays_sdxl"),
}


def beta_quantile(u: np.ndarray) -> np.ndarray:
    """Invert the distribution function of beta(0.6, 0.6)."""
    from scipy.special import betaincinv  # slow to import, and rarely needed

    return betaincinv(BETA_SHAPE, BETA_SHAPE, u)
