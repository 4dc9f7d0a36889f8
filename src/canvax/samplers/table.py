"""Samplers as tables: a row of numbers for each evaluation of the network.

    denoised  D = p * x + q * output,  output = network(c_in * x, timestep)
    state'      = M @ [state; D; noise]            slot 0 of the state is x

Before each row x = alpha * x0 + std * eps: alpha^2 + std^2 = 1 in tables of diffusion models (the variance-preserving
frame), alpha + std = 1 in those of flow models. After the last row slot 0 is the sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from canvax.errors import FLOAT32_MAX, InputError, check_function
from canvax.samplers.schedule import SMALLEST_ALPHA_CUMPROD

SLOTS = 6
"""K, the number of arrays of latent size that a sampler can store between two evaluations."""

DENOISED, NOISE = SLOTS, SLOTS + 1
"""Columns of M that follow the state."""

COLUMNS = ("timestep", "c_in", "p", "q", "M", "guidance", "rescale", "step", "alpha", "std")
"""The arrays of a table, with an entry for each row."""
_PROGRAM = COLUMNS[:8]
"""The columns that the denoising program reads."""
_INNER = {"M": (SLOTS, SLOTS + 2)}
"""Shape of a column's entries, for columns whose entries are arrays."""


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """The R rows of a run, with K = SLOTS; all arrays are float64.

    timestep  [R]            input of the network
    c_in      [R]            network input = c_in * x
    p, q      [R]            denoised D = p * x + q * output
    M         [R, K, K + 2]  state' = M @ [state(K); D; noise]
    guidance  [R]            guidance scale of the row
    rescale   [R]            guidance rescale of the row (Lin et al. 2024, section 3.4)
    alpha     [R]            x before the row = alpha * x0 + std * eps
    std       [R]
    step      [R]            int, the step of the row, from 0; a step can have several evaluations
    init_scale               x before row 0 = init_scale * unit noise
    first_row                index of row 0 in the whole run; the noise of a step depends on this index
    scale     [R]            x after the row = scale * y, where y is what diffusers' scheduler of this solver holds;
                             it does not change the run
    target    [R]            timestep of the next row, 0 after the last; networks read it that give the mean of a step
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
    scale: np.ndarray = field(default_factory=lambda: np.ones(()))
    target: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if np.shape(self.target) != np.shape(self.timestep):
            object.__setattr__(self, "target", np.append(self.timestep[1:], 0.0)[: np.size(self.timestep)])
        object.__setattr__(self, "scale", np.broadcast_to(self.scale, np.shape(self.timestep)))
        for name in COLUMNS:
            shape = (np.size(self.timestep), *_INNER.get(name, ()))
            if getattr(self, name).shape != shape:
                raise InputError(name, f"of a sampler table has shape {getattr(self, name).shape}, not {shape}")

    def __len__(self) -> int:
        return len(self.timestep)

    @property
    def finite(self) -> bool:
        """True if every number in the table fits float32, the dtype of the compiled loop."""
        return all(np.all(np.abs(getattr(self, name)) <= FLOAT32_MAX) for name in (*COLUMNS, "init_scale"))

    @property
    def sha256(self) -> str:
        """SHA-256 of all numbers, in hexadecimal."""
        columns = [np.asarray(getattr(self, name), np.float64).tobytes() for name in (*COLUMNS, "init_scale")]
        return hashlib.sha256(b"".join(columns)).hexdigest()

    @property
    def sigma(self) -> np.ndarray:
        """Noise level std / alpha of x before each row [R]; pure noise has 4096."""
        return self.std / np.where(self.alpha > 0, self.alpha, np.sqrt(SMALLEST_ALPHA_CUMPROD))

    def noised(self, x0: np.ndarray, eps: np.ndarray, row: int = 0) -> np.ndarray:
        """Return x before `row`, made of clean latents and unit noise of the same shape, as image-to-image needs.

        It does not apply to DDIM inversion, whose x before a row is cleaner than the level of the row.
        """
        if not (isinstance(row, int | np.integer) and -len(self) <= row < len(self)):
            raise InputError("row", f"is not one of the {len(self)} rows", value=row)
        if (shapes := (np.shape(x0), np.shape(eps)))[0] != shapes[1] or isinstance(x0, str):
            raise InputError(f"x0 and eps have shapes {shapes[0]} and {shapes[1]}; give arrays of one shape")
        return self.alpha[row] * x0 + self.std[row] * eps

    def with_guidance(
        self,
        scale: float | Sequence[float],
        rescale: float | Sequence[float] = 0.0,
        *,
        unguided_noise: bool = False,
    ) -> SamplerTable:
        """Return the table with other guidance and rescale, each a number, or one for each step.

        ``unguided_noise``: the scale is the lambda of CFG++ (see ``guidance_of_lambda``).
        """
        first = int(self.step[0])
        steps = int(self.step[-1]) + 1 - first
        for name, value in (("guidance_steps", scale), ("guidance_rescale", rescale)):
            try:
                finite = bool(np.isfinite(np.asarray(value, np.float64)).all())
            except (TypeError, ValueError):
                finite = False
            if not finite:
                raise InputError(name, "is not a finite number, or a list of them", value=value)
            if np.shape(value) not in ((), (steps,)):
                numbers = f"{np.size(value)} numbers" if np.ndim(value) == 1 else f"shape {np.shape(value)}"
                raise InputError(name, f"has {numbers}", cure=f"give one, or one for each of {steps} steps")
        each = [
            np.broadcast_to(np.asarray(value, np.float64), (steps,))[self.step - first] for value in (scale, rescale)
        ]
        if unguided_noise:
            each[0] = each[0] * self.guidance_of_lambda()
        return replace(self, guidance=each[0], rescale=each[1])

    def guidance_of_lambda(self) -> np.ndarray:
        """Return the guidance scale of each row at lambda = 1 of CFG++ (Chung et al. 2024, algorithm 2), [R].

        CFG++ takes the noise of a step from the unguided image: x' = w D + a (x - alpha D_u) with w = c + a alpha, in a
        row x' = a x + c D. With D = D_u + lambda (D_c - D_u) that is the row itself at the scale lambda w / c.

        Raises:
            InputError: a row combines other images than its own, or does not move.
        """
        a, c = self.M[:, 0, 0], self.M[:, 0, DENOISED]
        if self.M[:, 0, 1:SLOTS].any() or not c.all():
            problem = "remembers earlier images, and guidance_method='cfg_pp' is for samplers without a memory"
            raise InputError(
                "sampler", problem, cure="use {sampler='ddim'}, 'euler', 'euler_a', 'ddpm', 'lcm' or 'tcd'"
            )
        return 1 + a * self.alpha / c

    def take(self, lo: int, hi: int | None = None) -> SamplerTable:
        """Return rows lo..hi. With lo > 0, x must start as `noised` latents, since `init_scale` is that of row 0."""
        if not 0 <= lo <= (len(self) if hi is None else hi) <= len(self):
            raise InputError(f"rows {lo}..{hi} are not in order within 0..{len(self)}")
        columns = {name: getattr(self, name)[lo:hi] for name in COLUMNS}
        columns |= {"scale": self.scale[lo:hi], "target": self.target[lo:hi]}
        return replace(self, first_row=self.first_row + lo, **columns)

    def window(self, lo: int, size: int) -> dict[str, np.ndarray]:
        """Return rows lo..lo+size as float32 arrays for the denoising program, padded with no-op rows.

        `row` (int32) is the index in the whole run, which determines the noise of a step. `progress`, 0..1, is the
        fraction of this run before the row's step.
        """
        if lo < 0 or size < 0:
            raise InputError(f"lo={lo} and size={size}: a window begins at row 0 or later, and has 0 rows or more")
        out: dict[str, np.ndarray] = {"row": np.arange(lo, lo + size, dtype=np.int32) + self.first_row}
        for name in _PROGRAM:
            values = getattr(self, name)[lo : lo + size]
            out[name] = np.zeros((size, *values.shape[1:]), np.float32)
            out[name][: len(values)] = values
        filled = max(0, min(size, len(self) - lo))
        out["target"] = np.zeros(size, np.float32)
        out["target"][:filled] = self.target[lo : lo + filled]
        out["progress"] = np.zeros(size, np.float32)
        if filled:
            first, last = self.step[0], self.step[-1]
            out["progress"][:filled] = (self.step[lo : lo + filled] - first) / (last + 1 - first)
        out["M"][filled:, np.arange(SLOTS), np.arange(SLOTS)] = 1.0
        out["guidance"][filled:] = 1.0
        return out

    def columns(self) -> dict[str, np.ndarray]:
        """Return all rows as ``canvax.rollout`` reads them, each [R, ...], with the number ``init_scale``."""
        levels = {name: np.asarray(getattr(self, name), np.float32) for name in ("alpha", "std", "init_scale")}
        return {**self.window(0, len(self)), **levels}


_NO_ROWS: dict[str, Any] = {name: np.zeros((0, *_INNER.get(name, ()))) for name in COLUMNS}
EMPTY = SamplerTable(**_NO_ROWS)
"""A table without rows; its windows consist of no-op rows."""


Denoise = Callable[[np.ndarray, float, int], np.ndarray]
"""(network input, timestep, row) -> network output after guidance."""


def run(table: SamplerTable, denoise: Denoise, x: np.ndarray, noises: np.ndarray | None = None) -> np.ndarray:
    """Run `table` in float64 on the host. This is the definition that the compiled loop must match.

    x: unit noise, any shape with the batch first. noises: [R, *x.shape], needed only by stochastic tables.
    Returns x after every row, [R, *x.shape]; the last is the sample.
    Raises InputError: noises are missing or have another shape, or denoise returns another shape than its input's.
    """
    check_function("denoise", denoise, 3, "(network input, timestep, row)")
    if noises is None and table.M[:, :, NOISE].any():
        raise InputError(
            "noises",
            "does not go with a sampler that adds noise",
            cure=f"give an array {(len(table), *x.shape)}",
            value=None,
        )
    if noises is not None and (noises.shape[1:] != x.shape or len(noises) < len(table)):
        raise InputError("noises", f"has shape {noises.shape}, not {(len(table), *x.shape)}: one for each row")
    state = np.zeros((SLOTS, *x.shape))
    state[0] = table.init_scale * x
    seen = np.empty((len(table), *x.shape))
    for r in range(len(table)):
        output = np.asarray(denoise(table.c_in[r] * state[0], float(table.timestep[r]), r))
        if output.shape != x.shape or output.dtype.kind not in "biuf":
            raise InputError("denoise", f"returned {output.dtype} {output.shape}, not numbers of shape {x.shape}")
        denoised = table.p[r] * state[0] + table.q[r] * output
        noise = np.zeros_like(denoised) if noises is None else noises[r]
        state = np.tensordot(table.M[r], np.stack([*state, denoised, noise]), axes=1)
        seen[r] = state[0]
    return seen
