"""A sampler as data: one row of numbers for each evaluation of the network.

    denoised  D = p * x + q * output,  output = network(c_in * x, timestep)
    state'      = M @ [state; D; noise]            slot 0 of the state is x

`x` is held in the variance-preserving frame, x = alpha * x0 + sigma * eps with alpha^2 + sigma^2 = 1. After the last
row slot 0 is the sample itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from canvax.errors import InputError

SLOTS = 6
"""K: how many arrays of latent size a sampler may remember between two evaluations."""

DENOISED, NOISE = SLOTS, SLOTS + 1
"""Columns of M after the state."""


@dataclass(frozen=True)
class Clip:
    """Limits on the denoised image, for pixel models. Hashable: it decides a program.

    Without `ratio`, D is clamped to -range..range. With it, dynamic thresholding: s is the `ratio` quantile of |D| over
    one image, held within 1..range (never above range), and D becomes clamp(D, -s, s) / s.
    Source: Saharia et al. 2022 (Imagen), section 2.3.
    """

    range: float
    ratio: float | None = None

    def apply(self, denoised: np.ndarray) -> np.ndarray:
        """The limited `denoised`, whose first axis is the batch. Plain numpy, for tests and as the definition."""
        if self.ratio is None:
            return np.clip(denoised, -self.range, self.range)
        size = np.quantile(np.abs(denoised).reshape(len(denoised), -1), self.ratio, axis=1)
        size = np.minimum(np.maximum(size, 1.0), self.range).reshape((-1,) + (1,) * (denoised.ndim - 1))
        return np.clip(denoised, -size, size) / size


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """The rows of one run. R rows, K = SLOTS; all arrays float64.

    timestep  [R]            what the network is told
    c_in      [R]            network input = c_in * x
    p, q      [R]            denoised D = p * x + q * output
    M         [R, K, K + 2]  state' = M @ [state(K); D; noise]
    raw       [R, K] | None  weight of the unclipped D, added to state'; only where `clip` is set
    guidance  [R]            guidance scale of the row
    rescale   [R]            guidance rescale of the row (Lin et al. 2024, section 3.4)
    init_scale               x before row 0 = init_scale * unit noise
    sigma     [R]            noise level sigma / alpha of x before the row; 4096 stands for pure noise
    step      [R]            int, the step that the row belongs to, from 0; a step may take several evaluations
    clip                     limits on D, or None
    first_row                index of row 0 in the whole run, from which the noise of a step is derived
    """

    timestep: np.ndarray
    c_in: np.ndarray
    p: np.ndarray
    q: np.ndarray
    M: np.ndarray
    raw: np.ndarray | None
    guidance: np.ndarray
    rescale: np.ndarray
    init_scale: float
    sigma: np.ndarray
    step: np.ndarray
    clip: Clip | None = None
    first_row: int = 0

    def __post_init__(self) -> None:
        rows = len(self.timestep)
        shapes = {"M": (rows, SLOTS, SLOTS + 2), "raw": (rows, SLOTS)}
        for name in ("timestep", "c_in", "p", "q", "M", "raw", "guidance", "rescale", "sigma", "step"):
            value = getattr(self, name)
            if value is not None and value.shape != shapes.get(name, (rows,)):
                raise InputError(f"{name} of a sampler table has shape {value.shape}, not {shapes.get(name, (rows,))}")
        if (self.raw is None) != (self.clip is None):
            raise InputError("raw and clip of a sampler table go together: give both or neither")

    def __len__(self) -> int:
        return len(self.timestep)

    @property
    def finite(self) -> bool:
        """Whether every number in the table is one."""
        arrays = (self.timestep, self.c_in, self.p, self.q, self.M, self.raw, self.guidance, self.rescale, self.sigma)
        return all(np.isfinite(value).all() for value in arrays if value is not None) and bool(
            np.isfinite(self.init_scale)
        )

    @property
    def stochastic(self) -> bool:
        """Whether any row uses noise."""
        return bool(np.any(self.M[:, :, NOISE]))

    def with_guidance(self, scale: float | np.ndarray, rescale: float | np.ndarray = 0.0) -> SamplerTable:
        """The same table with other guidance: one number, or one for each step."""
        first = int(self.step[0])
        steps = int(self.step[-1]) + 1 - first
        for name, value in (("guidance", scale), ("rescale", rescale)):
            if np.shape(value) not in ((), (steps,)):
                raise InputError(
                    f"{name} has shape {np.shape(value)}; give one number, or one for each of {steps} steps"
                )
        each = [
            np.broadcast_to(np.asarray(value, np.float64), (steps,))[self.step - first] for value in (scale, rescale)
        ]
        return replace(self, guidance=each[0], rescale=each[1])

    def take(self, lo: int, hi: int | None = None) -> SamplerTable:
        """Rows lo..hi alone. With lo > 0 the caller makes x at `sigma[lo]` himself; `init_scale` stays row 0's."""
        part = slice(lo, len(self) if hi is None else hi)
        names = ("timestep", "c_in", "p", "q", "M", "guidance", "rescale", "sigma", "step")
        return replace(
            self,
            raw=None if self.raw is None else self.raw[part],
            first_row=self.first_row + lo,
            **{name: getattr(self, name)[part] for name in names},
        )

    def window(self, lo: int, size: int) -> dict[str, np.ndarray]:
        """Rows lo..lo+size as float32 arrays for the denoising program, padded with rows that change nothing.

        `row` (int32) is the index in the whole run, from which the noise of a step is derived. `raw` is zeros when
        there is no clip, so that the structure never changes.
        """
        held = np.arange(lo, min(lo + size, len(self)))
        raw = np.zeros((len(self), SLOTS)) if self.raw is None else self.raw
        out: dict[str, np.ndarray] = {"row": np.arange(lo, lo + size, dtype=np.int32) + self.first_row}
        for name in ("timestep", "c_in", "p", "q", "M", "raw", "guidance", "rescale"):
            values = raw if name == "raw" else getattr(self, name)
            padded = np.zeros((size, *values.shape[1:]), np.float32)
            padded[: len(held)] = values[held]
            out[name] = padded
        out["M"][len(held) :, np.arange(SLOTS), np.arange(SLOTS)] = 1.0
        out["guidance"][len(held) :] = 1.0
        return out


def batched_window(tables: Sequence[SamplerTable], at: Sequence[int], size: int) -> dict[str, np.ndarray]:
    """The windows of several images [B, size, ...], each at its own row of its own table.

    All tables must have the same `clip`, which decides the program.
    """
    if len({table.clip for table in tables}) != 1:
        raise InputError("the tables of one batch clip the denoised image differently; draw them in separate batches")
    windows = [table.window(lo, size) for table, lo in zip(tables, at, strict=True)]
    return {name: np.stack([window[name] for window in windows]) for name in windows[0]}


Denoise = Callable[[np.ndarray, float, int], np.ndarray]
"""(network input, timestep, row) -> network output, guidance already done."""


def run(table: SamplerTable, denoise: Denoise, x: np.ndarray, noises: np.ndarray | None = None) -> np.ndarray:
    """Execute `table` in float64 on the host: the definition that the compiled loop must agree with.

    x: unit noise, any shape with the batch first. noises: [R, *x.shape], needed by stochastic tables only.
    Returns x after every row, [R, *x.shape]; the last is the sample.
    """
    state = np.zeros((SLOTS, *x.shape))
    state[0] = table.init_scale * x
    seen = np.empty((len(table), *x.shape))
    for r in range(len(table)):
        output = denoise(table.c_in[r] * state[0], float(table.timestep[r]), r)
        raw = table.p[r] * state[0] + table.q[r] * output
        denoised = raw if table.clip is None else table.clip.apply(raw)
        noise = np.zeros_like(raw) if noises is None else noises[r]
        state = np.tensordot(table.M[r], np.stack([*state, denoised, noise]), axes=1)
        if table.raw is not None:
            state += np.multiply.outer(table.raw[r], raw)
        seen[r] = state[0]
    return seen
