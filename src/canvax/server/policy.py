"""Order of images, and sizes of batches. Plain numbers: no JAX, no threads, no clock.

Clients take turns. Each has a count of the seconds it was given, and the client with the lowest count comes first, so a
client with thousands of images in the queue delays another client by one turn (start-time fair queueing: Goyal, Vin and
Cheng 1996). Among one client's images the earliest deadline comes first. A deadline is some multiple of an image's own
seconds after its arrival, so short work overtakes long work, but only for a limited time.

An image whose weights are not on the devices waits while images with loaded weights have work, until its deadline is
over: then no other image begins, those that have begun are finished, and its weights are loaded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

PATIENCE = 3.0
"""A deadline is so many times an image's own seconds after its arrival, and again after it has begun."""

WORTH_IT = 0.95
"""A larger batch must take less than this part of the smaller one's time for each image."""

MUCH_SHORTER = 0.5
"""An image interrupts one that has begun if it needs less than this part of what the other has left."""


class Work(Protocol):
    """One image that is to be generated.

    Attributes:
        group: images of one group can be in one batch.
        client: whose it is.
        deadline: when it should be done.
        turn: seconds that its client had been given when it began, or when its deadline passed while it waited; None
            before that.
        adapted: whether it needs places for adapters; images without pass those that wait for places.
    """

    client: str
    deadline: float
    turn: float | None

    @property
    def group(self) -> Hashable: ...

    @property
    def adapted(self) -> bool: ...

    @property
    def left(self) -> float:
        """Seconds that it still needs."""
        ...


WorkT = TypeVar("WorkT", bound=Work)

Groups = Mapping[Any, float | None]
"""The groups that can run. None: the weights are on the devices. Else the time from which they may take the place of
weights that are in use, for an image whose deadline is over."""


def best_batch(seconds: Mapping[int, float], waiting: int) -> int:
    """Return the batch that finishes so many images first; of equal ones the smallest, in which each image is done
    sooner.

    Args:
        seconds: seconds of one step for each batch that is ready.
        waiting: number of images, at least 1.
    """
    sizes = sorted(seconds)
    best = sizes[0]
    for size in sizes[1:]:
        if seconds[size] / min(size, waiting) < WORTH_IT * seconds[best] / min(best, waiting):
            best = size
    return best


@dataclass(eq=False)
class _Line(Generic[WorkT]):
    """Images of one client and group that wait, with adapters or without, by their deadlines."""

    order: list[tuple[float, int]] = field(default_factory=list)
    works: dict[tuple[float, int], WorkT] = field(default_factory=dict)


class Queue(Generic[WorkT]):
    """All images that are not done: those that wait, and those that have begun.

    Args:
        cost: seconds that a work still costs where many wait: less than ``left`` if several are done at a time.
    """

    def __init__(self, cost: Callable[[WorkT], float] = lambda work: work.left) -> None:
        self._cost = cost
        self.begun: list[WorkT] = []
        self._lines: dict[tuple[str, Hashable, bool], _Line[WorkT]] = {}
        self._entries: dict[int, tuple[float, int]] = {}
        self._given: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._numbers = itertools.count()
        self._waiting = 0.0

    def __len__(self) -> int:
        return len(self.begun) + len(self._entries)

    def __iter__(self) -> Iterator[WorkT]:
        """Iterate over images that have begun, then over those that wait, by deadline."""
        yield from self.begun
        entries = sorted((entry, line) for line in self._lines.values() for entry in line.order)
        yield from (line.works[entry] for entry, line in entries)

    @property
    def seconds(self) -> float:
        """Seconds of work that is not done."""
        waiting = max(0.0, self._waiting) if self._entries else 0.0  # sums of floats do not come back to nothing
        return waiting + sum(self._cost(work) for work in self.begun)

    def add(self, work: WorkT) -> None:
        """Add an image that waits, for its first stage or for a later one."""
        work.turn = None
        self._waiting += self._cost(work)
        if not self._active.get(work.client):  # time in which it asked for nothing is no credit
            others = [self._given[client] for client, count in self._active.items() if count]
            self._given[work.client] = max([self._given.get(work.client, 0.0), *([min(others)] if others else [])])
        self._active[work.client] = self._active.get(work.client, 0) + 1
        line = self._lines.setdefault((work.client, work.group, work.adapted), _Line())
        entry = work.deadline, next(self._numbers)
        bisect.insort(line.order, entry)
        line.works[entry] = work
        self._entries[id(work)] = entry

    def begin(self, work: WorkT, now: float) -> None:
        """Begin an image that has a slot now: its client has had its turn.

        Its deadline is counted from now. The deadline of an image at the end of a long queue has passed by then, and
        short work of other clients would wait for all of it.
        """
        self._take_out(work)
        work.deadline = max(work.deadline, now + PATIENCE * work.left)
        work.turn = self._turn(work)
        self._given[work.client] += work.left
        self.begun.append(work)

    def remove(self, work: WorkT) -> None:
        """Remove an image that is over."""
        if id(work) in self._entries:
            self._take_out(work)
        elif work in self.begun:
            self.begun.remove(work)
        else:
            return
        self._active[work.client] -= 1
        if not self._active[work.client]:
            del self._active[work.client]
            if not self._active:
                self._given.clear()

    def first(
        self, groups: Groups, now: float, may: Callable[[Sequence[WorkT]], Sequence[WorkT]] = lambda works: works
    ) -> WorkT | None:
        """Return the image that decides what is done next, of the groups that can run; None if there is none.

        Args:
            groups: the groups that can run.
            now: the time, on the clock of the deadlines.
            may: filters waiting images, first come first: those that can begin.
        """
        works = self._runnable(groups, now, may)
        if not works:
            return None
        leader = min(works, key=lambda work: (groups[work.group] is not None, self._rank(work)))
        hasty = [work for work in works if work is not leader and self._interrupts(work, leader, groups)]
        return min(hasty, key=self._rank) if hasty else leader

    def next(
        self,
        group: Hashable,
        groups: Groups,
        now: float,
        may: Callable[[Sequence[WorkT]], Sequence[WorkT]] = lambda works: works,
    ) -> WorkT | None:
        """Return the first waiting image of a group that can begin; see ``first``."""
        works = self._runnable(groups, now, may)
        return next((work for work in works if work.group == group and self.waits(work)), None)

    def waits(self, work: WorkT) -> bool:
        """Check if an image is in the queue and has not begun."""
        return id(work) in self._entries

    def waiting(self, group: Hashable) -> int:
        """Return how many images of a group wait."""
        return sum(len(line.order) for (_, name, _), line in self._lines.items() if name == group)

    def ranked(self, works: Iterable[WorkT]) -> list[WorkT]:
        """Return images in their order."""
        return sorted(works, key=self._rank)

    def _runnable(self, groups: Groups, now: float, may: Callable[[Sequence[WorkT]], Sequence[WorkT]]) -> list[WorkT]:
        """Return the images that can continue or begin: those that have begun, then those that wait, first come
        first."""
        heads = [line.works[line.order[0]] for (_, group, _), line in self._lines.items() if group in groups]
        for work in heads:
            if work.turn is None and now > work.deadline:
                work.turn = self._given[work.client]  # what begins later in another group does not pass it any more
        begun = [work for work in self.begun if work.group in groups]
        works = [*begun, *may(self.ranked(heads))]
        due = [work for work in works if (after := groups[work.group]) is not None and now > max(after, work.deadline)]
        if not due:
            return works
        return [work for work in begun if groups[work.group] is None] or due

    def _rank(self, work: WorkT) -> tuple[float, float]:
        return self._turn(work), work.deadline

    def _turn(self, work: WorkT) -> float:
        return self._given[work.client] if work.turn is None else work.turn

    def _interrupts(self, work: WorkT, leader: WorkT, groups: Groups) -> bool:
        return (
            work.left < MUCH_SHORTER * leader.left
            and work.deadline < leader.deadline
            and (work.client == leader.client or self._turn(work) <= self._given[leader.client])
            and groups[work.group] is None
        )

    def _take_out(self, work: WorkT) -> None:
        self._waiting -= self._cost(work)
        entry = self._entries.pop(id(work))
        key = work.client, work.group, work.adapted
        line = self._lines[key]
        del line.order[bisect.bisect_left(line.order, entry)], line.works[entry]
        if not line.order:
            del self._lines[key]
