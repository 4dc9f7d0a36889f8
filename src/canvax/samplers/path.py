"""The timesteps and noise levels of a run, from noisy to clean, in the frame of a solver's equations.

    x = alpha * x0 + std * eps     used in tables: alpha^2 + std^2 = 1, for flow models alpha + std = 1
    y = x / scale                  used by k-diffusion's solvers: dy / dsigma = (y - D) / sigma

For most models scale = alpha and sigma = std / alpha. Flow models obey the same equations with scale = 1 and sigma = t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from canvax.samplers.schedule import NoiseSchedule

SMALLEST_ALPHA = 2.0**-24
"""Replaces alpha = 0, a flow model's pure noise, in the variance-exploding frame."""


@dataclass(frozen=True, eq=False)
class Frame:
    """Converts the levels of a solver's equation to alpha, std, scale and timestep.

    exploding: y = x / alpha even for flow models, as in the equations of solvers that add noise.
    """

    schedule: NoiseSchedule
    exploding: bool = False

    def alpha_std(self, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of the image and of the noise in x."""
        if self.schedule.is_flow:
            t = level / (1 + level) if self.exploding else level
            return 1 - t, t
        with np.errstate(invalid="ignore"):
            alpha = 1 / np.hypot(1, level)
            return alpha, np.where(np.isinf(level), 1.0, level * alpha)

    def scale(self, level: np.ndarray) -> np.ndarray:
        """Return the scale of y = x / scale."""
        alpha, _ = self.alpha_std(level)
        return np.ones_like(alpha) if self.schedule.is_flow and not self.exploding else alpha

    def timestep(self, level: np.ndarray) -> np.ndarray:
        """Return the network's timestep at a level."""
        level = level / (1 + level) if self.schedule.is_flow and self.exploding else level
        return self.schedule.timestep_of(level)


@dataclass(frozen=True, eq=False)
class Path:
    """The n steps of a run.

    timesteps [n]      input of the network in each step
    sigmas    [n + 1]  the level before each step and after the last: std / alpha, or t for flow models
    total              number of steps of the whole run, of which these may be the last
    even               whether the timesteps come from `spacing`, a whole stride apart
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
        """Weight of the image in x [n + 1]."""
        return Frame(self.schedule).alpha_std(self.sigmas)[0]

    @property
    def std(self) -> np.ndarray:
        """Weight of the noise in x [n + 1]."""
        return Frame(self.schedule).alpha_std(self.sigmas)[1]

    @property
    def lambdas(self) -> np.ndarray:
        """log(alpha / std) [n + 1], half the log of the signal-to-noise ratio; infinite at level zero."""
        with np.errstate(divide="ignore"):
            return np.log(self.alpha) - np.log(self.std)

    @property
    def ratios(self) -> np.ndarray:
        """Levels std / alpha [n + 1] in the exploding frame, finite even at a flow model's pure noise."""
        return self.std / np.maximum(self.alpha, SMALLEST_ALPHA) if self.schedule.is_flow else self.sigmas

    def after(self, steps: int) -> Path:
        """Return the path without its first `steps` steps."""
        return replace(self, timesteps=self.timesteps[steps:], sigmas=self.sigmas[steps:])
