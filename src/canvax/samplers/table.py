"""A sampler as data: one row of numbers for each evaluation of the network.

    denoised  D = p * x + q * output,  output = network(c_in * x, timestep)
    state'      = M @ [state; D; noise]            slot 0 of the state is x

`x` is held in the variance-preserving frame, x = alpha * x0 + sigma * eps with alpha^2 + sigma^2 = 1. After the last
row slot 0 is the sample itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from canvax.checked import check_function, checked
from canvax.errors import FLOAT32_MAX, InputError
from canvax.samplers.schedule import SMALLEST_ALPHA_CUMPROD

SLOTS = 6
"""K: how many arrays of latent size a sampler may remember between two evaluations."""

DENOISED, NOISE = SLOTS, SLOTS + 1
"""Columns of M after the state."""

COLUMNS = ("timestep", "c_in", "p", "q", "M", "guidance", "rescale", "step", "alpha", "std")
"""What a table has for each row."""
_PROGRAM = COLUMNS[:8]
"""Those that the denoising program reads."""
_INNER = {"M": (SLOTS, SLOTS + 2)}
"""Shape of a column behind its rows, where it is more than a number."""


@checked
@dataclass(frozen=True, eq=False)
class SamplerTable:
    """The rows of one run. R rows, K = SLOTS; all arrays float64.

    timestep  [R]            input of the network
    c_in      [R]            network input = c_in * x
    p, q      [R]            denoised D = p * x + q * output
    M         [R, K, K + 2]  state' = M @ [state(K); D; noise]
    guidance  [R]            guidance scale of the row
    rescale   [R]            guidance rescale of the row (Lin et al. 2024, section 3.4)
    alpha     [R]            x before the row = alpha * x0 + std * eps
    std       [R]
    step      [R]            int, the step that the row belongs to, from 0; a step may take several evaluations
    init_scale               x before row 0 = init_scale * unit noise
    first_row                index of row 0 in the whole run, from which the noise of a step is derived
    """

    timestep: np.ndarray
    c_in: np.ndarray
    p: np.ndarray
    q: np.ndarray
    M: np.ndarray
    guidance: np.ndarray
    rescale: np.ndarray
    alpha: np.ndarray
    std: np.ndarray
    step: np.ndarray
    init_scale: float = 1.0
    first_row: int = 0

    def __post_init__(self) -> None:
        for name in COLUMNS:
            shape = (np.size(self.timestep), *_INNER.get(name, ()))
            if getattr(self, name).shape != shape:
                raise InputError(f"{name} of a sampler table has shape {getattr(self, name).shape}, not {shape}")

    def __len__(self) -> int:
        return len(self.timestep)

    @property
    def finite(self) -> bool:
        """Whether every number in the table is one that float32, in which it is run, can hold."""
        return all(np.all(np.abs(getattr(self, name)) <= FLOAT32_MAX) for name in (*COLUMNS, "init_scale"))

    @property
    def sigma(self) -> np.ndarray:
        """Noise level std / alpha of x before each row [R]; 4096 stands for pure noise."""
        return self.std / np.where(self.alpha > 0, self.alpha, np.sqrt(SMALLEST_ALPHA_CUMPROD))

    @checked
    def noised(self, x0: np.ndarray, eps: np.ndarray, row: int = 0) -> np.ndarray:
        """x before `row` from clean latents and unit noise of the same shape: where image-to-image begins.

        DDIM inversion is the exception: its x before a row is cleaner than the level of the row.
        """
        if not (isinstance(row, int | np.integer) and -len(self) <= row < len(self)):
            raise InputError(f"row={row!r:.80} is not one of the {len(self)} rows")
        if (shapes := (np.shape(x0), np.shape(eps)))[0] != shapes[1] or isinstance(x0, str):
            raise InputError(f"x0 and eps have shapes {shapes[0]} and {shapes[1]}; give arrays of one shape")
        return self.alpha[row] * x0 + self.std[row] * eps

    @checked
    def with_guidance(self, scale: float | Sequence[float], rescale: float | Sequence[float] = 0.0) -> SamplerTable:
        """The same table with other guidance: one number, or one for each step."""
        first = int(self.step[0])
        steps = int(self.step[-1]) + 1 - first
        for name, value in (("guidance_steps", scale), ("guidance_rescale", rescale)):
            try:
                finite = bool(np.isfinite(np.asarray(value, np.float64)).all())
            except (TypeError, ValueError):
                finite = False
            if not finite:
                raise InputError(f"{name}={value!r:.80} is not a finite number, or a list of them")
            if np.shape(value) not in ((), (steps,)):
                numbers = f"{np.size(value)} numbers" if np.ndim(value) == 1 else f"shape {np.shape(value)}"
                raise InputError(f"{name} has {numbers}; give one, or one for each of {steps} steps")
        each = [
            np.broadcast_to(np.asarray(value, np.float64), (steps,))[self.step - first] for value in (scale, rescale)
        ]
        return replace(self, guidance=each[0], rescale=each[1])

    @checked
    def take(self, lo: int, hi: int | None = None) -> SamplerTable:
        """Rows lo..hi alone. With lo > 0, x begins as `noised` of some image; `init_scale` stays row 0's."""
        if not 0 <= lo <= (len(self) if hi is None else hi) <= len(self):
            raise InputError(f"rows {lo}..{hi} are not in order within 0..{len(self)}")
        columns = {name: getattr(self, name)[lo:hi] for name in COLUMNS}
        return replace(self, first_row=self.first_row + lo, **columns)

    @checked
    def window(self, lo: int, size: int) -> dict[str, np.ndarray]:
        """Rows lo..lo+size as float32 arrays for the denoising program, padded with rows that change nothing.

        `row` (int32) is the index in the whole run, from which the noise of a step is derived; `progress` the part of
        this run that lies before the row's step, 0..1.
        """
        if lo < 0 or size < 0:
            raise InputError(f"lo={lo} and size={size}: a window begins at row 0 or later, and has 0 rows or more")
        out: dict[str, np.ndarray] = {"row": np.arange(lo, lo + size, dtype=np.int32) + self.first_row}
        for name in _PROGRAM:
            values = getattr(self, name)[lo : lo + size]
            out[name] = np.zeros((size, *values.shape[1:]), np.float32)
            out[name][: len(values)] = values
        filled = max(0, min(size, len(self) - lo))
        out["progress"] = np.zeros(size, np.float32)
        if filled:
            first, last = self.step[0], self.step[-1]
            out["progress"][:filled] = (self.step[lo : lo + filled] - first) / (last + 1 - first)
        out["M"][filled:, np.arange(SLOTS), np.arange(SLOTS)] = 1.0
        out["guidance"][filled:] = 1.0
        return out


_NO_ROWS: dict[str, Any] = {name: np.zeros((0, *_INNER.get(name, ()))) for name in COLUMNS}
EMPTY = SamplerTable(**_NO_ROWS)
"""A table of no rows; its windows change nothing."""


Denoise = Callable[[np.ndarray, float, int], np.ndarray]
"""(network input, timestep, row) -> network output, guidance already done."""


@checked
def run(table: SamplerTable, denoise: Denoise, x: np.ndarray, noises: np.ndarray | None = None) -> np.ndarray:
    """Execute `table` in float64 on the host: the definition that the compiled loop must agree with.

    x: unit noise, any shape with the batch first. noises: [R, *x.shape], needed by stochastic tables only.
    Returns x after every row, [R, *x.shape]; the last is the sample.
    Raises InputError: noises are missing or of another shape, or denoise gives another shape than it was given.
    """
    check_function("denoise", denoise, 3, "(network input, timestep, row)")
    if noises is None and table.M[:, :, NOISE].any():
        raise InputError(f"noises=None with a sampler that adds noise; give an array {(len(table), *x.shape)}")
    if noises is not None and (noises.shape[1:] != x.shape or len(noises) < len(table)):
        raise InputError(f"noises has shape {noises.shape}, not {(len(table), *x.shape)}: one for each row")
    state = np.zeros((SLOTS, *x.shape))
    state[0] = table.init_scale * x
    seen = np.empty((len(table), *x.shape))
    for r in range(len(table)):
        output = np.asarray(denoise(table.c_in[r] * state[0], float(table.timestep[r]), r))
        if output.shape != x.shape or output.dtype.kind not in "biuf":
            raise InputError(f"denoise returned {output.dtype} {output.shape}, not numbers of shape {x.shape}")
        denoised = table.p[r] * state[0] + table.q[r] * output
        noise = np.zeros_like(denoised) if noises is None else noises[r]
        state = np.tensordot(table.M[r], np.stack([*state, denoised, noise]), axes=1)
        seen[r] = state[0]
    return seen
