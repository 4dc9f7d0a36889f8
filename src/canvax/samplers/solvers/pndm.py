"""PNDM: pseudo numerical methods for diffusion models, Liu et al. 2022."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from canvax.samplers.options import SamplerOptions
from canvax.samplers.path import Path
from canvax.samplers.rows import S1, S2, S3, S4, S5, D, X, column, demand_numbered, demand_signal, rows, table_of
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.solvers.derivative import ADAMS_BASHFORTH
from canvax.samplers.solvers.training import remaining_at
from canvax.samplers.spacing import training_path
from canvax.samplers.table import SamplerTable

AFTER_THE_END = -1.0
"""The timestep after the last."""


class _Stage(NamedTuple):
    """An evaluation of PNDM at `timestep`. It moves the x in slot `base` from level `start` to level `end` along
    weights . (output, slots 3-5) + summed * (slot 2)."""

    timestep: float
    start: float
    end: float
    step: int
    weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    summed: float = 0.0
    base: int = 0
    anchors: bool = False  # slot 1 becomes x
    keep: float = 1.0  # slot 2 becomes keep * slot 2 + add * output
    add: float = 0.0
    pushes: bool = True  # the output is pushed to slots 3-5


def pndm(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
    """PNDM: Liu et al. 2022, algorithm 2, with its Runge-Kutta start (eq. 14) and linear multistep (eq. 12).

    With skip_prk_steps (also called PLMS) the start is a predictor and a corrector, in total steps + 1 evaluations and
    rows. Otherwise three Runge-Kutta steps of four evaluations come first.
    Slots: 1 the x at the start of a multi-stage step, 2 the Runge-Kutta sum, 3-5 earlier outputs, newest first.
    With v prediction the solver combines v over time, not the implied eps: checkpoints were tuned with that.
    """
    demand_numbered(schedule, "pndm")
    path = training_path(schedule, steps, options)
    stages_of = _plms_stages if options.skip_prk_steps else _prk_stages
    stages = stages_of(path, schedule.num_train_timesteps // steps)
    timesteps, start, end, step, weights, summed, base, anchors, keep, add, pushes = (
        np.array(values) for values in zip(*stages, strict=True)
    )
    remaining = _remaining(path, timesteps, options)
    a, s = np.sqrt(remaining), np.sqrt(1 - remaining)
    demand_signal(schedule, a, "pndm", combines_eps=True)
    # Recovers the network's output from x and D.
    velocity = schedule.prediction_type == "v_prediction"
    output = (column(a) * X - D) / column(s) if velocity else (X - column(a) * D) / column(s)
    carry, gain = _transfer(_remaining(path, start, options), _remaining(path, end, options), velocity)
    along = column(weights[:, 0]) * output + weights[:, 1:] @ np.stack([S3, S4, S5]) + column(summed) * S2
    slots = {
        0: column(carry) * np.where(column(base == 1), S1, X) + column(gain) * along,
        1: np.where(column(anchors), X, S1),
        2: column(keep) * S2 + column(add) * output,
        3: np.where(column(pushes), output, S3),
        4: np.where(column(pushes), S3, S4),
        5: np.where(column(pushes), S4, S5),
    }
    return table_of(schedule, timesteps, a, s, rows(len(stages), slots), step=step)


def _remaining(path: Path, timesteps: np.ndarray, options: SamplerOptions) -> np.ndarray:
    """Return alphas_cumprod at the timesteps of a stage, log-linear in the level along a curve."""
    exact = remaining_at(path.schedule, timesteps, options)
    return exact if path.even else np.where(timesteps < 0, exact, 1 / (1 + path.schedule.sigma_at(timesteps) ** 2))


def _after(path: Path, stride: int) -> list[float]:
    """Return the timestep where each step ends: a stride further, or along a curve the next timestep."""
    return list(path.timesteps - stride) if path.even else [*path.timesteps[1:], AFTER_THE_END]


def _plms_stages(path: Path, stride: int) -> list[_Stage]:
    """Return predictor, corrector (at the second timestep, like the next stage), then Adams-Bashforth stages."""
    t, after = list(path.timesteps), _after(path, stride)
    stages = [_Stage(t[0], t[0], after[0], 0, anchors=True)]
    if len(t) > 1:
        start = t[1] + stride if path.even else t[0]
        stages.append(_Stage(t[1], start, t[1], 1, (0.5, 0.5, 0.0, 0.0), base=1, pushes=False))
    for i in range(1, len(t)):
        stages.append(_Stage(t[i], t[i], after[i], i, tuple(ADAMS_BASHFORTH[min(i, 3)])))
    return stages


def _prk_stages(path: Path, stride: int) -> list[_Stage]:
    """Return three Runge-Kutta steps over the first four timesteps (fewer in short runs), then Adams-Bashforth."""
    t, end = list(path.timesteps), _after(path, stride)
    started = min(3, len(t) - 1)
    stages = []
    for i in range(started):
        begin, after = t[i], t[i + 1]
        half = stride // 2 if path.even else (begin - after) / 2
        middle = after + half
        stages += [
            _Stage(begin, begin, begin - half, i, anchors=True, add=1 / 6),
            _Stage(middle, begin, middle, i, base=1, add=1 / 3, pushes=False),
            _Stage(middle, begin, middle - half, i, base=1, add=1 / 3, pushes=False),
            _Stage(after, begin, after, i, (1 / 6, 0.0, 0.0, 0.0), summed=1.0, base=1, keep=0.0, pushes=False),
        ]
    rest = range(started, len(t))
    return stages + [_Stage(t[i], t[i], end[i], i, tuple(ADAMS_BASHFORTH[min(i, 3)])) for i in rest]


def _transfer(start: np.ndarray, end: np.ndarray, velocity: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of x and of the network's output in a step between two alphas_cumprod.

    Liu et al. 2022, eq. 11: x0 and eps are computed at `start` and combined again at `end`.
    """
    a, s, a_to, s_to = np.sqrt(start), np.sqrt(1 - start), np.sqrt(end), np.sqrt(1 - end)
    if velocity:
        return a_to * a + s_to * s, s_to * a - a_to * s
    return a_to / a, s_to - a_to * s / a
