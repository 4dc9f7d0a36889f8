"""What the rows of a run need not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from canvax.denoise import WINDOW
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
    """

    table: SamplerTable
    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, table: SamplerTable, *, guided: bool) -> Self:
        """The work of a run.

        A guidance scale of 1 is the conditional output itself, so that nothing else need be computed
        (Kynkaanniemi et al. 2024); any other one, 0.5 too, needs both halves.

        Args:
            table: the rows.
            guided: whether the run is guided at all.
        """
        stretches, start = [], 0
        for on, rows in groupby(guided and scale != 1 for scale in table.guidance):
            stop = start + len(list(rows))
            stretches.append(Stretch(start, stop, on))
            start = stop
        return cls(table, tuple(stretches))

    def calls(self, chunk: Callable[[int], int]) -> Iterator[tuple[int, int, bool]]:
        """Calls of a program, one after the other: the first row, how many, and whether they are guided.

        Args:
            chunk: asked before each call how many of the rows left it may do.
        """
        for stretch in self.stretches:
            start = stretch.start
            while start < stretch.stop:
                count = min(chunk(len(self.table) - start), stretch.stop - start, WINDOW)
                yield start, count, stretch.guided
                start += count

    @property
    def programs(self) -> list[bool]:
        """Whether the programs it needs are guided, the first one first."""
        return list(dict.fromkeys(stretch.guided for stretch in self.stretches))
