"""Solvers of dy / dsigma = (y - D) / sigma, the probability-flow ODE of Karras et al. 2022, and their stochastic forms.

Notation: `level` is sigma before a step, `after` sigma after it, d = (X - D) / sigma. A stochastic step goes below the
next level and adds fresh noise to reach it. Two-stage solvers need two evaluations per step, but only one for a step to
level zero: 2n - 1 for n steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from canvax.errors import InputError
from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Frame, Path
from canvax.samplers.rows import NOISE, S1, S2, S3, D, X, column, history, interleave, lag, rows, ve_table
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.spacing import euler_path
from canvax.samplers.table import SamplerTable
from canvax.samplers.weights import lagrange_weights


def euler(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Euler's method: Karras et al. 2022, algorithm 2.

    With s_churn > 0 the noise of a step is added at the end of the previous row (for row 0, in the initial noise), so
    that the network gets the raised level, as in the paper. With stochastic_sampling a flow model gets fresh noise in
    every step.
    """
    path = euler_path(schedule, steps, options)
    if schedule.is_flow and options.stochastic_sampling:
        return _renoised(path)
    levels = _ChurnLevels(path, options)
    N = rows(len(path), {0: X + column(levels.after - levels.level) * levels.slope + column(levels.up) * NOISE})
    return levels.table(levels.timesteps, levels.level, levels.left, N)


def _renoised(path: Path) -> SamplerTable:
    """Make the table of x' = (1 - t') D + t' noise."""
    t = path.sigmas
    N = rows(len(path), {0: column(1 - t[1:]) * D + column(t[1:]) * NOISE})
    return ve_table(path, Frame(path.schedule), path.timesteps, t[:-1], t[1:], N)


def heun(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Heun's method: Karras et al. 2022, algorithm 2. Slots: 1 y before the step, 2 its slope."""
    c = _ChurnLevels(euler_path(schedule, steps, options), options)
    both, dt = c.after > 0, column(c.after - c.level)
    noise = column(c.up) * NOISE
    first = rows(len(c), {0: X + dt * c.slope + column(~both) * noise, 1: X, 2: c.slope})
    second = rows(len(c), {0: S1 + dt / 2 * (S2 + (X - D) / _divisor(c.after)) + noise})
    next_timesteps = np.append(c.path.timesteps[1:], np.nan)
    inner = np.where(np.isnan(next_timesteps), c.frame.timestep(np.where(both, c.after, c.level)), next_timesteps)
    return _two_stages(c, first, second, c.after, c.left, both, inner)


def dpm2(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Return the midpoint method, with the midpoint in log sigma: DPM-Solver-2 (Lu et al. 2022, algorithm 1) as in
    k-diffusion. Slot 1: y before the step."""
    c = _ChurnLevels(euler_path(schedule, steps, options), options)
    both, noise = c.after > 0, column(c.up) * NOISE
    middle = np.where(both, np.sqrt(c.level * c.after), c.after)
    first = rows(len(c), {0: X + column(middle - c.level) * c.slope + column(~both) * noise, 1: X})
    second = rows(len(c), {0: S1 + column(c.after - c.level) * (X - D) / _divisor(middle) + noise})
    return _two_stages(c, first, second, middle, c.left, both)


def euler_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Euler steps below the next level, then fresh noise up to it: ancestral sampling in the variance-exploding frame.

    Source: Song et al. 2021 (score SDE), appendix F; levels as in k-diffusion; eta scales the fresh noise.
    """
    a = _AncestralLevels(euler_path(schedule, steps, options), options)
    N = rows(len(a), {0: X + column(a.down - a.level) * a.slope + column(a.up) * NOISE})
    return a.table(a.timesteps, a.level, a.after, N)


def dpm2_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """`dpm2` to below the next level, then fresh noise up to it. Slot 1: y before the step."""
    if schedule.is_flow:
        # The first step begins at 2^24, goes down to almost 0, and uses the slope at the next level. The error of that
        # slope times 2^24 is far larger than the data.
        raise InputError(
            "sampler",
            "diverges on flow models, which begin without any signal",
            cure="use 'dpm2' or 'dpmpp_2s_a'",
            value="dpm2_a",
        )
    a = _AncestralLevels(euler_path(schedule, steps, options), options)
    both, noise = a.down > 0, column(a.up) * NOISE
    middle = np.where(both, np.sqrt(a.level * a.down), a.down)
    first = rows(len(a), {0: X + column(middle - a.level) * a.slope, 1: X})
    second = rows(len(a), {0: S1 + column(a.down - a.level) * (X - D) / _divisor(middle) + noise})
    return _two_stages(a, first, second, middle, a.after, both)


def dpmpp_2s_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver++(2S), Lu et al. 2022b, algorithm 1 with r = 1/2, to below the next level, then fresh noise.

    Slot 1: y before the step.
    """
    a = _AncestralLevels(euler_path(schedule, steps, options), options)
    both = a.down > 0
    middle = np.where(both, np.sqrt(a.level * a.down), a.down)
    first = rows(len(a), {0: _lerp(D, X, middle / a.level), 1: X})
    second = rows(len(a), {0: _lerp(D, S1, a.down / a.level) + column(a.up) * NOISE})
    return _two_stages(a, first, second, middle, a.after, both)


def dpmpp_sde(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver++ (SDE) of k-diffusion, r = 1/2: both stages follow the same Brownian path.

    The noise of the whole step combines the noise of its first half, stored in slot 2, and fresh noise for the second
    half, weighted by the variance of each. Slot 1: y before the step.
    """
    a = _AncestralLevels(euler_path(schedule, steps, options), options)
    both = a.after > 0
    middle = np.where(both, np.sqrt(a.level * a.after), a.after)
    half, half_up = _ancestral_step(a.level, middle, a.eta)
    half_up = half_up * options.s_noise
    shared = np.sqrt((a.level - middle) / np.where(both, a.level - a.after, np.inf))
    whole = column(shared) * S2 + column(np.sqrt(1 - shared**2)) * NOISE
    first = rows(
        len(a), {0: _lerp(D, X, half / a.level) + column(half_up) * NOISE, 1: X, 2: column(half_up > 0) * NOISE}
    )
    second = rows(len(a), {0: _lerp(D, S1, a.down / a.level) + column(a.up) * whole})
    return _two_stages(a, first, second, middle, a.after, both)


def lms(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Linear multistep of order 4: integrates the interpolating polynomial of the slopes in sigma over the step.

    Source: Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, section III.1 (Adams methods).
    Slots 1 to 3: earlier slopes, newest first.
    """
    path = euler_path(schedule, steps, options)
    level, after = path.sigmas[:-1], path.sigmas[1:]
    nodes = np.stack([lag(level, k) - level for k in range(4)], axis=1)
    moments = np.stack([(after - level) ** (k + 1) / (k + 1) for k in range(4)], axis=1)
    weights = lagrange_weights(nodes, moments, history(len(path), 4))
    return _slopes(path, options, weights)


def ipndm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Improved PNDM: combines slopes with the fixed Adams-Bashforth weights of equal steps.

    Source: Zhang and Chen 2023 (DEIS), section 3.4 (iPNDM). Slots 1 to 3: earlier slopes, newest first.
    """
    path = euler_path(schedule, steps, options)
    weights = ADAMS_BASHFORTH[history(len(path), 4) - 1] * column(path.sigmas[1:] - path.sigmas[:-1])
    return replace(_slopes(path, options, weights), scale=np.ones(()))  # diffusers' class holds x


ADAMS_BASHFORTH = np.array(
    [
        (1.0, 0.0, 0.0, 0.0),
        (3 / 2, -1 / 2, 0.0, 0.0),
        (23 / 12, -16 / 12, 5 / 12, 0.0),
        (55 / 24, -59 / 24, 37 / 24, -9 / 24),
    ]
)


def _slopes(path: Path, options: SamplerOptions, weights: np.ndarray) -> SamplerTable:
    """Make the table of y' = y + weights . (slope, three earlier slopes)."""
    levels = _Levels(path, options, Frame(path.schedule), path.sigmas)
    moved = X + column(weights[:, 0]) * levels.slope + weights[:, 1:] @ np.stack([S1, S2, S3])
    N = rows(len(path), {0: moved, 1: levels.slope, 2: S1, 3: S2})
    return levels.table(levels.timesteps, levels.level, levels.after, N)


class _Levels:
    """The levels of a run in a frame, and the construction of its table."""

    def __init__(self, path: Path, options: SamplerOptions, frame: Frame, sigmas: np.ndarray) -> None:
        self.path, self.options, self.frame = path, options, frame
        self.timesteps = path.timesteps
        self.level, self.after = sigmas[:-1], sigmas[1:]

    def __len__(self) -> int:
        return len(self.path)

    @property
    def slope(self) -> np.ndarray:
        """The form (X - D) / sigma of each row."""
        return (X - D) / column(self.level)

    def table(
        self, timesteps: np.ndarray, level: np.ndarray, left: np.ndarray, N: np.ndarray, step: np.ndarray | None = None
    ) -> SamplerTable:
        """Make the table of rows N. y starts as noise of the first level; with leading spacing, its variance is larger
        by 1, as if it contained an image of unit variance."""
        start, schedule = float(max(level[0], left.max())), self.path.schedule
        if schedule.timestep_unit != "index" or (self.options.spacing == "leading" and not schedule.is_flow):
            start = float(np.hypot(1, start))
        return ve_table(self.path, self.frame, timesteps, level, left, N, step=step, init_scale=start)


class _ChurnLevels(_Levels):
    """Levels raised by noise in each step (s_churn); `left` is the level after a step, with the next step's noise."""

    def __init__(self, path: Path, options: SamplerOptions) -> None:
        super().__init__(path, options, Frame(path.schedule), path.sigmas)
        if not options.s_churn:
            self.left, self.up = self.after, np.zeros_like(self.after)
            return
        churns = (self.level >= options.s_tmin) & (self.level <= options.s_tmax)
        self.level = self.level * (1 + np.where(churns, min(options.s_churn / path.total, np.sqrt(2) - 1), 0.0))
        self.timesteps = self.frame.timestep(self.level)
        self.left = np.append(self.level[1:], self.after[-1])
        self.up = options.s_noise * np.sqrt(np.maximum(self.left**2 - self.after**2, 0.0))


class _AncestralLevels(_Levels):
    """Levels in the exploding frame; `down` is the level below `after` that a step goes to, `up` the noise it adds."""

    def __init__(self, path: Path, options: SamplerOptions) -> None:
        super().__init__(path, options, Frame(path.schedule, exploding=True), path.ratios)
        self.eta = 1.0 if options.eta is None else options.eta
        self.down, up = _ancestral_step(self.level, self.after, self.eta)
        self.up = up * options.s_noise


def _ancestral_step(level: np.ndarray, after: np.ndarray, eta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the level to go down to, and the noise that leads from there up to `after`."""
    up = eta * after * np.sqrt(np.maximum(1 - (after / level) ** 2, 0.0))
    return np.sqrt(after**2 - up**2), up


def _lerp(target: np.ndarray, form: np.ndarray, share: np.ndarray) -> np.ndarray:
    return column(share) * form + column(1 - share) * target


def _divisor(level: np.ndarray) -> np.ndarray:
    """Return a column to divide by; the rows at level 0 are removed later by `interleave`."""
    return column(np.where(level > 0, level, np.inf))


def _two_stages(
    levels: _ChurnLevels | _AncestralLevels,
    first: np.ndarray,
    second: np.ndarray,
    middle: np.ndarray,
    left: np.ndarray,
    both: np.ndarray,
    middle_timesteps: np.ndarray | None = None,
) -> SamplerTable:
    """Make the table of steps with two rows: from `level` to `middle`, and from there to `left`."""
    level = interleave(levels.level, middle, both)
    inner = np.where(both, middle, left)
    if middle_timesteps is None:
        middle_timesteps = levels.frame.timestep(np.where(both, middle, levels.level))
    step = interleave(np.arange(len(levels)), np.arange(len(levels)), both)
    return levels.table(
        interleave(levels.timesteps, middle_timesteps, both),
        level,
        interleave(inner, left, both),
        interleave(first, second, both),
        step,
    )
