"""Building blocks of the solvers: linear forms for rows, and functions that make tables of them.

A form is a vector of weights over [state; D; noise], float64 [8], or [n, 8] for n rows. Solvers read like their papers:
with the forms `X`, `D`, `NOISE` and `S1` .. `S5` below, `X + column(dt) * (X - D) / column(sigma)` is an Euler step in
every row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from canvax.errors import FLOAT32_MAX, InputError
from canvax.samplers.path import SMALLEST_ALPHA, Frame, Path
from canvax.samplers.schedule import SMALLEST_ALPHA_CUMPROD, NoiseSchedule
from canvax.samplers.table import DENOISED, SLOTS, SamplerTable
from canvax.samplers.table import NOISE as NOISE_COLUMN

X = np.eye(SLOTS + 2)[0]
"""The form of the sample x, slot 0 of the state."""
S1, S2, S3, S4, S5 = np.eye(SLOTS, SLOTS + 2)[1:]
D = np.eye(SLOTS + 2)[DENOISED]
"""The form of the denoised image."""
NOISE = np.eye(SLOTS + 2)[NOISE_COLUMN]
"""The form of fresh noise."""


def column(values: np.ndarray) -> np.ndarray:
    """Make a column of numbers [n], to multiply forms [n, 8] by."""
    return np.asarray(values)[:, None]


def rows(count: int, slots: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return M [count, K, K + 2] that sets each slot in `slots` to its form and keeps the other slots.

    Raises:
        InputError: there is no such slot, or a form has another shape than [8] or [count, 8].
    """
    M = np.zeros((count, SLOTS, SLOTS + 2))
    M[:, range(SLOTS), range(SLOTS)] = 1.0
    for slot, form in slots.items():
        if slot not in range(SLOTS):
            raise InputError("slots", f"has the slot {slot}, which is not in 0..{SLOTS - 1}")
        if np.shape(form) not in (M.shape[2:], whole := (count, SLOTS + 2)):
            raise InputError("slots", f"has a form of shape {np.shape(form)} for slot {slot}, not {whole}")
        M[:, slot] = form
    return M


def interleave(first: np.ndarray, second: np.ndarray, both: np.ndarray) -> np.ndarray:
    """Interleave two arrays: first[0], second[0], first[1], ...; omits second[i] where `both[i]` is False."""
    merged = np.stack([first, second], axis=1).reshape(-1, *first.shape[1:])
    return merged[np.stack([np.ones_like(both), both], axis=1).ravel()]


def history(count: int, limit: int) -> np.ndarray:
    """Return how many values each row [count] can combine: all so far, at most `limit`."""
    return np.minimum(np.arange(count) + 1, limit)


def lag(values: np.ndarray, k: int) -> np.ndarray:
    """Shift `values` by k rows: each row gets the value of k rows earlier, NaN where there is none."""
    return np.concatenate([np.full(k, np.nan), values])[: len(values)]


def step_table(path: Path, M: np.ndarray) -> SamplerTable:
    """Make the table of a solver with one row per step whose equations are in x."""
    scale: np.ndarray | float = 1.0
    if path.schedule.sigma_data is not None:
        M[-1, 0] /= path.alpha[-1]  # the sample of an EDM model is y, not x
        scale = np.append(path.alpha[1:-1], 1.0)
    return table_of(path.schedule, path.timesteps, path.alpha[:-1], path.std[:-1], M, scale=scale)


def ve_table(
    path: Path,
    frame: Frame,
    timesteps: np.ndarray,
    level: np.ndarray,
    after: np.ndarray,
    N: np.ndarray,
    *,
    step: np.ndarray | None = None,
    init_scale: float | None = None,
) -> SamplerTable:
    """Make the table of rows N whose equations are in y, with the timestep, level before and level after each row.

    The last row returns y, the sample of these solvers. y starts as noise of the first level.
    """
    alpha, std = frame.alpha_std(level)
    now, behind = frame.scale(level), frame.scale(after)
    if frame.exploding and path.schedule.is_flow:
        now = np.maximum(now, SMALLEST_ALPHA)
    behind[-1] = 1.0
    M = N.copy()
    M[:, 0] *= column(behind)
    M[:, :, 0] /= column(now)
    start = float(level[0]) if init_scale is None else init_scale
    return table_of(path.schedule, timesteps, alpha, std, M, step=step, init_scale=start * float(now[0]), scale=behind)


def demand_signal(schedule: NoiseSchedule, alpha: np.ndarray, name: str, *, combines_eps: bool = False) -> None:
    """Refuse rows at pure noise (alpha 0, or its replacement along a curve), where eps does not determine the image.

    combines_eps: the sampler computes images from eps even if the network predicts images.
    """
    no_signal = SMALLEST_ALPHA_CUMPROD * (1 + 1e-9) if schedule.alphas_cumprod[-1] == 0 else 0.0
    if not np.any(alpha**2 <= no_signal):
        return
    where = f"the last timestep of a zero-terminal-SNR schedule, which sampler={name!r} visits here"
    lower = "" if name in ("lcm", "tcd") else "spacing='leading' without a curve, or "  # they begin at pure noise
    if schedule.prediction_type == "epsilon":
        raise InputError(
            "prediction_type",
            f"says nothing about the image at {where}",
            cure=f"use {lower}{{sampler='euler'}}",
            value="epsilon",
        )
    if schedule.prediction_type == "sample" and combines_eps:
        raise InputError(
            "prediction_type",
            f"is turned into eps by PNDM, which says nothing about the image at {where}",
            cure=f"use {lower}{{sampler='ddim'}}",
            value="sample",
        )


def demand_numbered(schedule: NoiseSchedule, name: str) -> None:
    """Refuse models that are not trained on numbered timesteps of a variance-preserving process."""
    if schedule.is_flow or schedule.timestep_unit != "index":
        raise InputError(
            "sampler",
            "steps between numbered training timesteps, which flow and EDM models do not have",
            cure="use {sampler='euler'} or 'heun'",
            value=name,
        )


def table_of(
    schedule: NoiseSchedule,
    timesteps: np.ndarray,
    alpha: np.ndarray,
    std: np.ndarray,
    M: np.ndarray,
    *,
    step: np.ndarray | None = None,
    init_scale: float = 1.0,
    scale: np.ndarray | float = 1.0,
) -> SamplerTable:
    """Make the table of rows at levels alpha, std. Only this function depends on the prediction type."""
    count = len(timesteps)
    c_in, p, q = _reading(schedule, alpha, std)
    table = SamplerTable(
        timestep=np.asarray(timesteps, np.float64),
        c_in=c_in,
        p=p,
        q=q,
        M=M,
        guidance=np.ones(count),
        rescale=np.zeros(count),
        alpha=alpha,
        std=std,
        step=np.arange(count) if step is None else step,
        init_scale=init_scale,
        scale=np.asarray(scale, np.float64),
    )
    if not table.finite:
        raise _not_finite(table)
    return table


def _not_finite(table: SamplerTable) -> InputError:
    """Return the error of a table with numbers that are not finite; it names the first row of M with one."""
    faults = np.flatnonzero(~(np.abs(table.M) <= FLOAT32_MAX).all(axis=(1, 2)))
    where = f": row {faults[0]} of M is not finite" if faults.size else ""
    if faults.size and not table.alpha[max(faults[0] - 1, 0) : faults[0] + 1].all():  # a memory has the row before
        problem = f"cannot be run{where}, and alpha is 0 in row {np.argmin(table.alpha)}"
        return InputError("sampler", problem, cure="divide by np.maximum(alpha, std / 4096), or take another path")
    return InputError(
        "steps",
        f"gives this sampler two rows at one noise level, or a level it cannot leave{where}",
        cure="use fewer steps or another {spacing}",
        value=int(table.step[-1]) + 1,
    )


def _reading(schedule: NoiseSchedule, alpha: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return c_in, p and q of each row."""
    unit = np.ones_like(alpha)
    if schedule.sigma_data is not None:
        level = std / alpha
        total = np.hypot(level, schedule.sigma_data)
        sign = -1 if schedule.prediction_type == "v_prediction" else 1
        return (
            1 / (alpha * total),
            (schedule.sigma_data / total) ** 2 / alpha,
            sign * level * schedule.sigma_data / total,
        )
    match schedule.prediction_type:
        case "epsilon":
            return unit, 1 / alpha, -std / alpha
        case "v_prediction":
            return unit, alpha, -std
        case "flow_prediction":
            return unit, unit, -std
    return unit, 0 * unit, unit
