"""Solvers of dy / dsigma = (y - D) / sigma, the probability-flow ODE of Karras et al. 2022, and their random forms.

Notation: `level` sigma before a step, `after` behind it, d = (X - D) / sigma. A random step goes down to below the next
level and adds fresh noise up to it. Solvers of two stages take two evaluations a step, but one where the run ends at
zero: 2n - 1 for n steps.
"""

from __future__ import annotations

import numpy as np

from canvax.errors import InputError
from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Frame, Path
from canvax.samplers.rows import NOISE, S1, S2, S3, D, X, before, col, framed, history, pairs, rows
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.spacing import euler_path
from canvax.samplers.table import SamplerTable
from canvax.samplers.weights import lagrange_weights


def euler(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Euler's method: Karras et al. 2022, algorithm 2.

    With s_churn > 0 the noise of a step is added at the end of the row before it (before row 0: in the initial noise),
    so that the network sees the raised level, as in the paper. Flow models may ask for fresh noise in every step
    (stochastic_sampling).
    """
    path = euler_path(schedule, steps, options)
    if schedule.is_flow and options.stochastic_sampling:
        return _renewed(path)
    churned = _Churned(path, options)
    N = rows(len(path), {0: X + col(churned.after - churned.level) * churned.slope + col(churned.up) * NOISE})
    return churned.table(churned.timesteps, churned.level, churned.left, N)


def _renewed(path: Path) -> SamplerTable:
    """x' = (1 - t') D + t' noise."""
    t = path.sigmas
    N = rows(len(path), {0: col(1 - t[1:]) * D + col(t[1:]) * NOISE})
    return framed(path, Frame(path.schedule), path.timesteps, t[:-1], t[1:], N)


def heun(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Heun's method: Karras et al. 2022, algorithm 2. Slots: 1 y before the step, 2 its slope."""
    c = _Churned(euler_path(schedule, steps, options), options)
    both, dt = c.after > 0, col(c.after - c.level)
    noise = col(c.up) * NOISE
    first = rows(len(c), {0: X + dt * c.slope + col(~both) * noise, 1: X, 2: c.slope})
    second = rows(len(c), {0: S1 + dt / 2 * (S2 + (X - D) / _divisor(c.after)) + noise})
    onward = np.append(c.path.timesteps[1:], np.nan)
    inner = np.where(np.isnan(onward), c.frame.timestep(np.where(both, c.after, c.level)), onward)
    return _two_stages(c, first, second, c.after, c.left, both, inner)


def dpm2(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """The midpoint method, its midpoint even in log sigma: DPM-Solver-2 (Lu et al. 2022, algorithm 1) as k-diffusion
    has it. Slot 1: y before the step."""
    c = _Churned(euler_path(schedule, steps, options), options)
    both, noise = c.after > 0, col(c.up) * NOISE
    middle = np.where(both, np.sqrt(c.level * c.after), c.after)
    first = rows(len(c), {0: X + col(middle - c.level) * c.slope + col(~both) * noise, 1: X})
    second = rows(len(c), {0: S1 + col(c.after - c.level) * (X - D) / _divisor(middle) + noise})
    return _two_stages(c, first, second, middle, c.left, both)


def euler_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Euler steps to below the next level, then fresh noise up to it: ancestral sampling seen from the exploding frame.

    Source: Song et al. 2021 (score SDE), appendix F; levels as in k-diffusion, eta scaling the fresh noise.
    """
    a = _Ancestral(euler_path(schedule, steps, options), options)
    N = rows(len(a), {0: X + col(a.down - a.level) * a.slope + col(a.up) * NOISE})
    return a.table(a.timesteps, a.level, a.after, N)


def dpm2_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """`dpm2` down to below the next level, then fresh noise up to it. Slot 1: y before the step."""
    if schedule.is_flow:
        # A first step begins at 2^24, goes down to almost 0, and takes the slope at the next level: 2^24 times that is
        # wrong by far more than the data's own size.
        raise InputError(
            "sampler='dpm2_a' diverges on flow models, which begin without any signal; use 'dpm2' or 'dpmpp_2s_a'"
        )
    a = _Ancestral(euler_path(schedule, steps, options), options)
    both, noise = a.down > 0, col(a.up) * NOISE
    middle = np.where(both, np.sqrt(a.level * a.down), a.down)
    first = rows(len(a), {0: X + col(middle - a.level) * a.slope, 1: X})
    second = rows(len(a), {0: S1 + col(a.down - a.level) * (X - D) / _divisor(middle) + noise})
    return _two_stages(a, first, second, middle, a.after, both)


def dpmpp_2s_ancestral(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver++(2S), Lu et al. 2022b, algorithm 1 with r = 1/2, down to below the next level, then fresh noise.

    Slot 1: y before the step.
    """
    a = _Ancestral(euler_path(schedule, steps, options), options)
    both = a.down > 0
    middle = np.where(both, np.sqrt(a.level * a.down), a.down)
    first = rows(len(a), {0: _towards(D, X, middle / a.level), 1: X})
    second = rows(len(a), {0: _towards(D, S1, a.down / a.level) + col(a.up) * NOISE})
    return _two_stages(a, first, second, middle, a.after, both)


def dpmpp_sde(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """DPM-Solver++ (SDE) of k-diffusion, r = 1/2: both stages ride on one Brownian path.

    The noise of the whole step is that of its first half, which slot 2 keeps, and fresh noise for the second, in
    proportion to the variance of each. Slot 1: y before the step.
    """
    a = _Ancestral(euler_path(schedule, steps, options), options)
    both = a.after > 0
    middle = np.where(both, np.sqrt(a.level * a.after), a.after)
    half, half_up = _below(a.level, middle, a.eta)
    half_up = half_up * options.s_noise
    shared = np.sqrt((a.level - middle) / np.where(both, a.level - a.after, np.inf))
    whole = col(shared) * S2 + col(np.sqrt(1 - shared**2)) * NOISE
    first = rows(len(a), {0: _towards(D, X, half / a.level) + col(half_up) * NOISE, 1: X, 2: col(half_up > 0) * NOISE})
    second = rows(len(a), {0: _towards(D, S1, a.down / a.level) + col(a.up) * whole})
    return _two_stages(a, first, second, middle, a.after, both)


def lms(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Linear multistep of order 4: the slopes' interpolating polynomial in sigma, integrated over the step.

    Source: Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, section III.1 (Adams methods).
    Slots 1 to 3: earlier slopes, newest first.
    """
    path = euler_path(schedule, steps, options)
    level, after = path.sigmas[:-1], path.sigmas[1:]
    nodes = np.stack([before(level, k) - level for k in range(4)], axis=1)
    moments = np.stack([(after - level) ** (k + 1) / (k + 1) for k in range(4)], axis=1)
    weights = lagrange_weights(nodes, moments, history(len(path), 4))
    return _slopes(path, options, weights)


def ipndm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """Improved PNDM: the fixed weights of Adams and Bashforth over slopes, as if all steps were equal.

    Source: Zhang and Chen 2023 (DEIS), section 3.4 (iPNDM). Slots 1 to 3: earlier slopes, newest first.
    """
    path = euler_path(schedule, steps, options)
    weights = ADAMS_BASHFORTH[history(len(path), 4) - 1] * col(path.sigmas[1:] - path.sigmas[:-1])
    return _slopes(path, options, weights)


ADAMS_BASHFORTH = np.array(
    [
        (1.0, 0.0, 0.0, 0.0),
        (3 / 2, -1 / 2, 0.0, 0.0),
        (23 / 12, -16 / 12, 5 / 12, 0.0),
        (55 / 24, -59 / 24, 37 / 24, -9 / 24),
    ]
)


def _slopes(path: Path, options: SamplerOptions, weights: np.ndarray) -> SamplerTable:
    """y' = y + weights . (slope, three earlier slopes)."""
    walk = _Walk(path, options, Frame(path.schedule), path.sigmas)
    moved = X + col(weights[:, 0]) * walk.slope + weights[:, 1:] @ np.stack([S1, S2, S3])
    N = rows(len(path), {0: moved, 1: walk.slope, 2: S1, 3: S2})
    return walk.table(walk.timesteps, walk.level, walk.after, N)


class _Walk:
    """Levels of a run in one frame, and the table of its rows."""

    def __init__(self, path: Path, options: SamplerOptions, frame: Frame, sigmas: np.ndarray) -> None:
        self.path, self.options, self.frame = path, options, frame
        self.timesteps = path.timesteps
        self.level, self.after = sigmas[:-1], sigmas[1:]

    def __len__(self) -> int:
        return len(self.path)

    @property
    def slope(self) -> np.ndarray:
        """The form (X - D) / sigma of each row."""
        return (X - D) / col(self.level)

    def table(
        self, timesteps: np.ndarray, level: np.ndarray, left: np.ndarray, N: np.ndarray, step: np.ndarray | None = None
    ) -> SamplerTable:
        """The table of rows N, whose y starts as noise of the first level, or, with leading spacing, as if an image
        of unit variance were in it."""
        start, schedule = float(max(level[0], left.max())), self.path.schedule
        if schedule.timestep_unit != "index" or (self.options.spacing == "leading" and not schedule.is_flow):
            start = float(np.hypot(1, start))
        return framed(self.path, self.frame, timesteps, level, left, N, step=step, init_scale=start)


class _Churned(_Walk):
    """Levels raised by noise in each step (s_churn); `left` is where a step ends with the noise of the next in it."""

    def __init__(self, path: Path, options: SamplerOptions) -> None:
        super().__init__(path, options, Frame(path.schedule), path.sigmas)
        if not options.s_churn:
            self.left, self.up = self.after, np.zeros_like(self.after)
            return
        stirred = (self.level >= options.s_tmin) & (self.level <= options.s_tmax)
        self.level = self.level * (1 + np.where(stirred, min(options.s_churn / path.total, np.sqrt(2) - 1), 0.0))
        self.timesteps = self.frame.timestep(self.level)
        self.left = np.append(self.level[1:], self.after[-1])
        self.up = options.s_noise * np.sqrt(np.maximum(self.left**2 - self.after**2, 0.0))


class _Ancestral(_Walk):
    """Levels in the exploding frame, the level below `after` that a step goes down to, and the noise added there."""

    def __init__(self, path: Path, options: SamplerOptions) -> None:
        super().__init__(path, options, Frame(path.schedule, exploding=True), path.ratios)
        self.eta = 1.0 if options.eta is None else options.eta
        self.down, up = _below(self.level, self.after, self.eta)
        self.up = up * options.s_noise


def _below(level: np.ndarray, after: np.ndarray, eta: float) -> tuple[np.ndarray, np.ndarray]:
    """The level to go down to, and the noise that leads up to `after` from there."""
    up = eta * after * np.sqrt(np.maximum(1 - (after / level) ** 2, 0.0))
    return np.sqrt(after**2 - up**2), up


def _towards(target: np.ndarray, form: np.ndarray, share: np.ndarray) -> np.ndarray:
    return col(share) * form + col(1 - share) * target


def _divisor(level: np.ndarray) -> np.ndarray:
    """A column to divide by; rows at level 0 are left out by `pairs`."""
    return col(np.where(level > 0, level, np.inf))


def _two_stages(
    walk: _Churned | _Ancestral,
    first: np.ndarray,
    second: np.ndarray,
    middle: np.ndarray,
    left: np.ndarray,
    both: np.ndarray,
    middle_timesteps: np.ndarray | None = None,
) -> SamplerTable:
    """The table of steps of two rows: from `level` to `middle`, and from there to `left`."""
    level = pairs(walk.level, middle, both)
    inner = np.where(both, middle, left)
    if middle_timesteps is None:
        middle_timesteps = walk.frame.timestep(np.where(both, middle, walk.level))
    step = pairs(np.arange(len(walk)), np.arange(len(walk)), both)
    return walk.table(
        pairs(walk.timesteps, middle_timesteps, both), level, pairs(inner, left, both), pairs(first, second, both), step
    )
