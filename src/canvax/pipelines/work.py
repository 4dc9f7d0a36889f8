"""What the rows of a run need not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np

from canvax.denoise import WINDOW, Reuse
from canvax.errors import InputError
from canvax.samplers import SamplerTable


@dataclass(frozen=True)
class Stretch:
    """Rows start..stop of a table, run by one program: with guidance, or without it for half the work."""

    start: int
    stop: int
    guided: bool


@dataclass(frozen=True, eq=False)
class Work:
    """A table, and how its rows are run.

    Attributes:
        table: the rows.
        stretches: all of them in order.
        full: [R] bool, rows that compute the deep features of the UNet; None if all do.
        weights: [R, 2] float32, what each row makes of the features of the last two full rows before it, or of its own.
    """

    table: SamplerTable
    stretches: tuple[Stretch, ...]
    full: np.ndarray | None = None
    weights: np.ndarray | None = None

    @classmethod
    def of(cls, table: SamplerTable, *, guided: bool, reuse: int | Sequence[int] = 1, order: int = 1) -> Self:
        """The work of a run.

        A guidance scale of 1 is the conditional output itself, so that nothing else need be computed
        (Kynkaanniemi et al. 2024); any other one, 0.5 too, needs both halves.

        Args:
            table: the rows.
            guided: whether the run is guided at all.
            reuse: as in :class:`canvax.Options`.
            order: ``reuse_order`` of the same.

        Raises:
            InputError: ``reuse`` names evaluations that the run has not.
        """
        stretches, start = [], 0
        for on, rows in groupby(guided and scale != 1 for scale in table.guidance):
            stop = start + len(list(rows))
            stretches.append(Stretch(start, stop, on))
            start = stop
        full = _full_rows(len(table), stretches, reuse, order)
        if full.all():
            return cls(table, tuple(stretches))
        return cls(table, tuple(stretches), full, _weights(table.timestep, full, stretches, order))

    def calls(self, chunk: Callable[[int], int]) -> Iterator[tuple[Stretch, int, int]]:
        """Calls of a program, one after the other: the stretch, the first row, and how many.

        Args:
            chunk: asked before each call how many of the rows left it may do.
        """
        for stretch in self.stretches:
            start = stretch.start
            while start < stretch.stop:
                count = min(chunk(len(self.table) - start), stretch.stop - start, WINDOW)
                yield stretch, start, count
                start += count

    @property
    def reuses(self) -> bool:
        """Whether any row reuses the deep features of others."""
        return self.full is not None

    def reuse(self, start: int, features: Any) -> Reuse | None:
        """For a call from row ``start`` on, with the features that the last call left; None if all rows compute."""
        if self.full is None or self.weights is None:
            return None
        held = len(self.table) - start
        full, weights = np.ones(WINDOW, bool), np.zeros((WINDOW, 2), np.float32)
        full[:held] = self.full[start : start + WINDOW]
        weights[:held] = self.weights[start : start + WINDOW]
        return Reuse(features, full, weights)

    @property
    def programs(self) -> list[bool]:
        """Whether the programs it needs are guided, the first one first."""
        return list(dict.fromkeys(stretch.guided for stretch in self.stretches))


def _full_rows(count: int, stretches: Sequence[Stretch], reuse: int | Sequence[int], order: int) -> np.ndarray:
    """Rows that compute everything. The first of a stretch does, and the second where a line needs two points."""
    full = np.zeros(count, bool)
    if not isinstance(reuse, int):
        if reuse[-1] >= count:
            raise InputError(
                f"reuse={reuse!r} names evaluation {reuse[-1]}, but the run has {count}, counted from 0; name earlier "
                "ones, or give one number"
            )
        full[list(reuse)] = True
    for stretch in stretches:
        full[stretch.start] = True
        if isinstance(reuse, int):
            full[stretch.start + order : stretch.stop : reuse] = True
    return full


def _weights(timestep: np.ndarray, full: np.ndarray, stretches: Sequence[Stretch], order: int) -> np.ndarray:
    """What each row makes of the last two full rows: (1, 0) takes the last as it is.

    With order 1 the line through both is followed to the timestep of the row (TaylorSeer: Liu et al. 2025, equation 3
    with m = 1, over timesteps instead of rows, which need not be even).
    """
    weights = np.tile(np.array([1, 0], np.float32), (len(full), 1))
    for stretch in stretches:
        past: list[float] = []
        for row in range(stretch.start, stretch.stop):
            if full[row]:
                past = [timestep[row], *past[:1]]
            elif order and len(past) == 2 and past[0] != past[1]:
                ahead = (past[0] - timestep[row]) / (past[1] - past[0])
                weights[row] = 1 + ahead, -ahead
    return weights
