"""Rows of a table and their programs: with guidance or without, the whole network or its outer layers alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np

from canvax.denoise import WINDOW
from canvax.guidance import OFF
from canvax.samplers import SamplerTable


def guided_rows(table: SamplerTable, *, guided: bool = True) -> np.ndarray:
    """Return the rows that need the negative prompt, [R] bool.

    A guidance scale of 1 is the conditional output itself, so nothing else need be computed (Kynkaanniemi et al. 2024);
    any other scale, 0.5 too, needs both halves. Without ``guided`` no row needs it.
    """
    return np.logical_and(guided, table.guidance != OFF)


def segments(rows: np.ndarray) -> list[tuple[int, int]]:
    """Return the start and the stop of each run of equal values in ``rows``."""
    parts, start = [], 0
    for _, same in groupby(rows):
        stop = start + len(list(same))
        parts.append((start, stop))
        start = stop
    return parts


@dataclass(frozen=True, eq=False)
class DeepPlan:
    """Rows that compute the deep features of the network, and weights with which the other rows use them.

    Attributes:
        full: rows that compute them, [R] bool.
        weights: weights of the features of the last two full rows for each row, [R, 2] float32.
        layers: layers that every row computes; see ``canvax.models.denoiser.Reusing``.
        starts: rows at which another program begins, which has no features of rows before.
    """

    full: np.ndarray
    weights: np.ndarray
    layers: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, table: SamplerTable, guided: np.ndarray, every: int, layers: int) -> Self | None:
        """Return the plan in which every ``every``-th row is full; None if all rows are.

        The first row of a segment is full, and so is the second, since a line needs two points.

        Args:
            table: the rows.
            guided: rows with guidance, [R] bool.
            every: ``reuse`` of ``canvax.Options``.
            layers: ``reuse_layers`` of ``canvax.Options``.
        """
        full, parts = np.zeros(len(table), bool), segments(guided)
        for start, stop in parts:
            full[start] = True
            full[start + 1 : stop : every] = True
        weights = _weights(table.timestep, full, parts)
        return None if full.all() else cls(full, weights, layers, tuple(start for start, _ in parts))

    def window(self, row: int) -> dict[str, np.ndarray]:
        """Return the columns that ``canvax.models.denoiser.Reusing`` shares, for a call from ``row`` on."""
        held = len(self.full) - row
        full, weights = np.ones(WINDOW, bool), np.zeros((WINDOW, 2), np.float32)
        full[:held] = self.full[row : row + WINDOW]
        weights[:held] = self.weights[row : row + WINDOW]
        return {"recompute": full, "reuse": weights}


def _weights(timestep: np.ndarray, full: np.ndarray, parts: list[tuple[int, int]]) -> np.ndarray:
    """Return the weights of the last two full rows for each row: (1, 0) takes the last as it is.

    The line through both is extrapolated to the timestep of the row (TaylorSeer: Liu et al. 2025, equation 3 with m =
    1, over timesteps instead of rows, which need not be even).
    """
    weights = np.tile(np.array([1, 0], np.float32), (len(full), 1))
    for start, stop in parts:
        past: list[float] = []
        for row in range(start, stop):
            if full[row]:
                past = [timestep[row], *past[:1]]
            elif len(past) == 2 and past[0] != past[1]:
                ahead = (past[0] - timestep[row]) / (past[1] - past[0])
                weights[row] = 1 + ahead, -ahead
    return weights
