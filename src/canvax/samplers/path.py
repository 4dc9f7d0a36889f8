"""Where a run goes: the timesteps and noise levels of its steps, from noisy to clean, in the frame a solver thinks in.

    x = alpha * x0 + std * eps          what a table holds: alpha^2 + std^2 = 1, of flow models alpha + std = 1
    y = x / scale                       what k-diffusion's solvers hold: dy / dsigma = (y - D) / sigma

For most models scale = alpha and sigma = std / alpha. A flow model obeys the same with scale = 1 and sigma = t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from canvax.samplers.schedule import NoiseSchedule

SMALLEST_ALPHA = 2.0**-24
"""Stands for 0 where a flow model's pure noise is seen from the exploding frame."""


@dataclass(frozen=True, eq=False)
class Frame:
    """How levels are counted: the level of a solver's equation, and what x is there.

    exploding: y = x / alpha even for flow models. Solvers that add noise think so.
    """

    schedule: NoiseSchedule
    exploding: bool = False

    def alpha_std(self, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights of the image and of the noise in x."""
        if self.schedule.is_flow:
            t = level / (1 + level) if self.exploding else level
            return 1 - t, t
        with np.errstate(invalid="ignore"):
            alpha = 1 / np.hypot(1, level)
            return alpha, np.where(np.isinf(level), 1.0, level * alpha)

    def scale(self, level: np.ndarray) -> np.ndarray:
        """y = x / scale."""
        alpha, _ = self.alpha_std(level)
        return np.ones_like(alpha) if self.schedule.is_flow and not self.exploding else alpha

    def timestep(self, level: np.ndarray) -> np.ndarray:
        """The network's timestep at a level."""
        level = level / (1 + level) if self.schedule.is_flow and self.exploding else level
        return self.schedule.timestep_of(level)


@dataclass(frozen=True, eq=False)
class Path:
    """The steps of a run; n of them.

    timesteps [n]      input of the network in each step
    sigmas    [n + 1]  the level before each step and after the last: std / alpha, or t of flow models
    total              steps of the whole run, of which these may be the last
    even               the timesteps are those of `spacing`, a whole stride apart
    """

    schedule: NoiseSchedule
    timesteps: np.ndarray
    sigmas: np.ndarray
    total: int
    even: bool = True

    def __len__(self) -> int:
        return len(self.timesteps)

    @property
    def alpha(self) -> np.ndarray:
        """[n + 1]."""
        return Frame(self.schedule).alpha_std(self.sigmas)[0]

    @property
    def std(self) -> np.ndarray:
        """[n + 1]."""
        return Frame(self.schedule).alpha_std(self.sigmas)[1]

    @property
    def lambdas(self) -> np.ndarray:
        """log(alpha / std) [n + 1], half the log of the signal-to-noise ratio; infinite where a level is zero."""
        with np.errstate(divide="ignore"):
            return np.log(self.alpha) - np.log(self.std)

    @property
    def ratios(self) -> np.ndarray:
        """Levels std / alpha [n + 1] in the exploding frame, finite even where a flow model sees nothing but noise."""
        return self.std / np.maximum(self.alpha, SMALLEST_ALPHA) if self.schedule.is_flow else self.sigmas

    def after(self, steps: int) -> Path:
        """What is left once the first `steps` are done."""
        return replace(self, timesteps=self.timesteps[steps:], sigmas=self.sigmas[steps:])
