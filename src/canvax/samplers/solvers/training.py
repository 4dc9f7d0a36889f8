"""Solvers that step between training timesteps: DDIM and its inverse, DDPM, LCM, TCD.

Notation: `a` and `s` are the weights of image and noise before a row, `a_to` and `s_to` after it; eps = (X - a D) / s.
"""

from __future__ import annotations

import numpy as np

from canvax.errors import InputError
from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Frame
from canvax.samplers.rows import NOISE, D, X, column, demand_numbered, demand_signal, rows, table_of
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.spacing import distilled_path, training_path
from canvax.samplers.table import SamplerTable


def remaining_at(schedule: NoiseSchedule, timesteps: np.ndarray, options: SamplerOptions) -> np.ndarray:
    """Return alphas_cumprod at fractional timesteps; past the end (t < 0) it is 1 with set_alpha_to_one, otherwise the
    value of the first timestep."""
    final = 1.0 if options.set_alpha_to_one else schedule.alphas_cumprod[0]
    whole = np.interp(timesteps, np.arange(schedule.num_train_timesteps), schedule.alphas_cumprod)
    return np.where(timesteps >= 0, whole, final)


def ddim(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DDIM: Song et al. 2021, eq. 12, with eta of eq. 16.

    A step goes from t to t - train // steps whatever the spacing, the convention with which checkpoints were tuned. The
    last step ends the run. Along a curve, steps go from level to level.
    """
    eta = options.eta or 0.0
    path = training_path(schedule, steps, options)
    a, s, a_to, s_to = path.alpha[:-1], path.std[:-1], path.alpha[1:], path.std[1:]
    demand_signal(schedule, a, "ddim")
    if path.even:
        after = np.append(path.timesteps[:-1] - schedule.num_train_timesteps // steps, -1.0)
        remaining = remaining_at(schedule, after, options)
        a_to, s_to = np.sqrt(remaining), np.sqrt(1 - remaining)
    std = eta * _posterior(a, s, a_to, s_to)
    direction = np.sqrt(s_to**2 - std**2)
    towards = column(a_to) * D + column(std) * NOISE
    M = rows(len(path), {0: towards + column(direction / s) * (X - column(a) * D)})
    return table_of(schedule, path.timesteps, a, s, M)


def _posterior(a: np.ndarray, s: np.ndarray, a_to: np.ndarray, s_to: np.ndarray) -> np.ndarray:
    """Return the standard deviation of x at the next level for known x and x0: Ho et al. 2020, eq. 7."""
    return s_to / s * np.sqrt(np.maximum(s**2 - (a / a_to * s_to) ** 2, 0.0))


def ddim_inverse(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DDIM in reverse: from an image to the noise that generates it. x starts as the image's latents.

    Source: Song et al. 2021, eq. 14, towards noise. As in the reference, the network's timestep is the one at the end
    of the step; D is the network's image for x at this timestep.
    """
    demand_numbered(schedule, "ddim_inverse")
    if options.spacing == "linspace":
        raise InputError(
            "spacing", "is not defined for DDIM inversion", cure="use 'leading' or 'trailing'", value="linspace"
        )
    path = training_path(schedule, steps, options)
    timesteps, sigmas = path.timesteps[::-1], path.sigmas[-2::-1]
    a_to, s_to = Frame(schedule).alpha_std(sigmas)
    stride = schedule.num_train_timesteps // steps
    remaining = remaining_at(schedule, timesteps - stride, options)
    a, s = np.sqrt(remaining), np.sqrt(1 - remaining)
    demand_signal(schedule, a_to, "ddim_inverse")
    match schedule.prediction_type:
        case "epsilon":
            eps = (X - column(a_to) * D) / column(s_to)
            image = (X - column(s) * eps) / column(a)
        case "v_prediction":
            velocity = (column(a_to) * X - D) / column(s_to)
            eps, image = column(a) * velocity + column(s) * X, column(a) * X - column(s) * velocity
        case _:
            if np.any(s == 0):
                raise InputError(
                    "prediction_type",
                    "says nothing about the noise of a clean image, where DDIM inversion starts",
                    cure="set_alpha_to_one=False starts at the first timestep",
                    value=schedule.prediction_type,
                )
            eps, image = (X - column(a) * D) / column(s), D
    M = rows(steps, {0: column(a_to) * image + column(s_to) * eps})
    return table_of(schedule, timesteps, a_to, s_to, M)


def ddpm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Ancestral sampling of DDPM between the timesteps of the run: Ho et al. 2020, eq. 7; the last step returns x0."""
    path = training_path(schedule, steps, options)
    a, s, a_to, s_to = path.alpha[:-1], path.std[:-1], path.alpha[1:], path.std[1:]
    demand_signal(schedule, a, "ddpm")
    ratio = a / a_to
    on_x = ratio * (s_to / s) ** 2
    small = _posterior(a, s, a_to, s_to)
    large = np.sqrt(np.maximum(s**2 - (ratio * s_to) ** 2, 0.0))
    std = large if options.variance_type in ("fixed_large", "fixed_large_log") else small
    std = np.where(path.timesteps > 0 if schedule.timestep_unit == "index" else s_to > 0, std, 0.0)
    M = rows(len(path), {0: column(on_x) * X + column(a_to - on_x * a) * D + column(std) * NOISE})
    return table_of(schedule, path.timesteps, a, s, M)


def lcm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Latent consistency: D with fresh noise of the next level. Luo et al. 2023, algorithm 3.

    A finite `timestep_scaling` blends in x near timestep 0 (eq. 9).
    """
    path = distilled_path(schedule, steps, options)
    a, s, a_to, s_to = path.alpha[:-1], path.std[:-1], path.alpha[1:], path.std[1:]
    demand_signal(schedule, a, "lcm")
    far = (
        np.maximum(path.timesteps, 0.0) * options.timestep_scaling if np.isfinite(options.timestep_scaling) else np.inf
    )
    on_d = 1 / np.hypot(1, 0.5 / np.where(far == 0, 1e-300, far)) * np.ones_like(a)
    image = column(on_d) * D + column(1 - on_d**2) * X
    to = np.append(a_to[:-1], 1.0)
    M = rows(len(path), {0: column(to) * image + column(np.append(s_to[:-1], 0.0)) * NOISE})
    return table_of(schedule, path.timesteps, a, s, M)


def tcd(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Trajectory consistency: steps along the trajectory to 1 - eta of the next timestep, then adds fresh noise.

    Source: Zheng et al. 2024 (TCD), algorithm 4, whose gamma is eta. By a checkpoint's settings a run ends at training
    timestep 0, with final_sigmas_type "zero" at the image.
    """
    demand_numbered(schedule, "tcd")
    eta = 0.3 if options.eta is None else options.eta
    path = distilled_path(schedule, steps, options)
    a, s, a_to, s_to = path.alpha[:-1], path.std[:-1], path.alpha[1:].copy(), path.std[1:].copy()
    demand_signal(schedule, a, "tcd")
    after = np.append(path.timesteps[1:], 0.0)
    if path.even:
        remaining = remaining_at(schedule, np.floor((1 - eta) * after), options)
    else:
        remaining = 1 / (1 + schedule.sigma_at((1 - eta) * after) ** 2)
    if path.sigmas[-1] == 0:
        remaining[-1] = 1.0
    else:
        a_to[-1], s_to[-1] = np.sqrt(remaining[-1]), np.sqrt(1 - remaining[-1])
    eps = (X - column(a) * D) / column(s)
    down = column(np.sqrt(remaining)) * D + column(np.sqrt(1 - remaining)) * eps
    signal = a_to / np.sqrt(remaining)
    fresh = np.sqrt(np.maximum(1 - signal**2, 0.0))
    if eta == 0:
        signal, fresh = np.ones_like(signal), np.zeros_like(fresh)
    M = rows(len(path), {0: column(signal) * down + column(fresh) * NOISE})
    return table_of(schedule, path.timesteps, a, s, M)
