"""How many replicas a load needs: the server's own policy, run against a clock that is not real.

Each replica is the engine of ``canvax serve`` without its device: the same queue, the same choice of a batch, calls of
the same length, one image decoded after each. What a call takes is given as figures, of a server that was measured or
of a compiler's estimate. Requests go to the shorter of two queues, which is what Ray Serve does (Mitzenmacher 2001).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from canvax.server.group import rows_at_once
from canvax.server.policy import PATIENCE, Queue, best_batch

Arrivals = Literal["steady", "bursty", "daily"]
ARRIVALS: tuple[Arrivals, ...] = ("steady", "bursty", "daily")

BURST, CALM, BURST_SECONDS = 3.0, 0.5, 20.0
"""In a burst so many times the mean rate, else so much of it; how long it lasts on average: a fifth of the time."""

MOST_REPLICAS = 10_000


@dataclass(frozen=True)
class Speed:
    """What one replica takes, in seconds.

    Attributes:
        row: a step of a batch, by the images in it; 1 must be among them.
        encode: the prompt of an image.
        decode: an image.
        outside: between the engine and whoever asked: HTTP, writing the file. It delays, and holds up nobody else.
        between: what the engine does beside each call of the denoiser: it chooses who is in it, moves images to a batch
            of another size, and tells those who watch.
    """

    row: Mapping[int, float]
    encode: float = 0.0
    decode: float = 0.0
    outside: float = 0.0
    between: float = 0.0

    def __post_init__(self) -> None:
        if 1 not in self.row or min(self.row.values()) <= 0:
            raise ValueError(f"row={dict(self.row)} needs a batch of 1 and positive seconds")

    def image(self, steps: int) -> float:
        """Of an image by itself, on the device."""
        return self.encode + self._denoised(1, steps) + self.decode

    def most(self, steps: int) -> float:
        """Images a second that a replica whose batches are always full gives."""
        return 1 / (self.encode + self.decode + min(self._denoised(batch, steps) / batch for batch in self.row))

    def _denoised(self, batch: int, steps: int) -> float:
        """All steps of a batch whose images begin together."""
        calls = math.ceil(steps / rows_at_once(self.row[batch]))
        return steps * self.row[batch] + calls * self.between


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Attributes:
        rate: images a second, on average.
        arrivals: "steady" (Poisson), "bursty" (three times as many a fifth of the time) or "daily" (a day's wave: at
            noon 1.9 times the average, at midnight a tenth).
        steps: how many, each with how often.
        clients: who take turns.
    """

    rate: float
    arrivals: Arrivals = "steady"
    steps: Mapping[int, float] = field(default_factory=lambda: {30: 1.0})
    clients: int = 100

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate={self.rate:g} is not above 0 images a second")

    @property
    def mean_steps(self) -> float:
        return sum(steps * weight for steps, weight in self.steps.items()) / sum(self.steps.values())

    def times(self, seconds: float, chance: random.Random) -> list[float]:
        """When images are asked for; a day is ``seconds`` long."""
        at, found, most = 0.0, [], self.rate * {"steady": 1.0, "bursty": BURST, "daily": 1.9}[self.arrivals]
        burst, changes = False, 0.0
        while (at := at + chance.expovariate(most)) < seconds:  # those that are too many are left out (thinning)
            while self.arrivals == "bursty" and changes <= at:
                burst = not burst if changes else chance.random() < 0.2
                changes += chance.expovariate(1 / (BURST_SECONDS if burst else 4 * BURST_SECONDS))
            rate = self.rate
            if self.arrivals == "bursty":
                rate *= BURST if burst else CALM
            elif self.arrivals == "daily":
                rate *= 1.0 - 0.9 * math.cos(2 * math.pi * at / seconds)
            if chance.random() < rate / most:
                found.append(at)
        return found


@dataclass(eq=False)
class Image:
    """One that was asked for; ``policy.Work``."""

    client: str
    steps: int
    arrived: float
    expected: float
    deadline: float
    turn: float | None = None
    step: int = 0
    encoded: bool = False
    done: float = math.inf
    group: str = ""
    adapted: bool = False

    @property
    def left(self) -> float:
        """Seconds that it still needs."""
        return self.expected * (1 - self.step / self.steps)


@dataclass(frozen=True)
class Outcome:
    """What became of a load.

    Attributes:
        latencies: seconds of each image, in order of asking, without the first tenth, which finds empty machines.
        images_per_second: that were given in the time in which they were asked for.
        busy: part of the time in which a device works, on average.
        filled: images in a batch, on average.
    """

    latencies: Sequence[float]
    images_per_second: float
    busy: float
    filled: float

    def percentile(self, percent: float) -> float:
        """Of the latencies; infinite where there are none."""
        ordered = sorted(self.latencies)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.inf


class _Replica:
    """An engine and its queue, as a process of simpy."""

    def __init__(
        self, environment: Any, speed: Speed, pace: Callable[[float], float], *, until: float, batching: bool
    ) -> None:
        self.queue: Queue[Image] = Queue()
        self.busy = self.rows = self.filled = 0.0
        self._environment, self._speed, self._pace, self._until = environment, speed, pace, until
        self._row = speed.row if batching else {1: speed.row[1]}
        self._woken = environment.event()
        environment.process(self._run())

    def submit(self, image: Image) -> None:
        self.queue.add(image)
        if not self._woken.triggered:
            self._woken.succeed()

    def _run(self) -> Generator[Any, Any, None]:
        to_decode: list[Image] = []
        while True:
            if not self.queue and not to_decode:
                self._woken = self._environment.event()
                yield self._woken
            if self.queue:
                yield self._work(self._turn())
                to_decode += [image for image in self.queue.begun if image.step == image.steps]
                for image in to_decode:
                    self.queue.remove(image)
            if to_decode:
                yield self._work(self._speed.decode)
                to_decode.pop(0).done = self._environment.now

    def _work(self, seconds: float) -> Any:
        seconds *= self._pace(self._environment.now)
        self.busy += max(0.0, min(seconds, self._until - self._environment.now))
        return self._environment.timeout(seconds)

    def _turn(self) -> float:
        """Some rows of a batch, as in ``ImageEngine``: seconds that they take. Images that end stay in the queue."""
        now, row = self._environment.now, self._row
        groups = {"": None}
        leader = self.queue.first(groups, now)
        assert leader is not None
        size = best_batch(row, len(self.queue))
        chosen = [leader, *(one for one in self.queue.ranked(self.queue.begun) if one is not leader)][:size]
        if self.queue.waits(leader):
            self.queue.begin(leader, now)
        while len(chosen) < size and (image := self.queue.next("", groups, now)) is not None:
            self.queue.begin(image, now)
            chosen.append(image)
        took = sum(self._speed.encode for image in chosen if not image.encoded)
        rows = min([rows_at_once(row[size]), *(image.steps - image.step for image in chosen)])
        for image in chosen:
            image.step, image.encoded = image.step + rows, True
        self.rows, self.filled = self.rows + rows, self.filled + rows * len(chosen)
        return took + rows * row[size] + self._speed.between


def simulate(
    speed: Speed,
    load: Load,
    replicas: int,
    *,
    seconds: float | None = None,
    seed: int = 0,
    batching: bool = True,
    times: Sequence[float] | None = None,
    pace: Callable[[float], float] = lambda now: 1.0,
) -> Outcome:
    """Run a load against so many replicas.

    Args:
        speed: of each.
        load: what is asked for.
        replicas: how many.
        seconds: for how long images are asked for; by default long enough for some 2,000 images, 30 times as long as
            one takes, and ten bursts.
        seed: of the arrivals.
        batching: whether a replica generates several images at once.
        times: at which images are asked for, in place of the load's own.
        pace: from seconds after the beginning to how many times as long everything takes then, as on a shared machine.

    """
    if seconds is None:
        bursts = 50 * BURST_SECONDS if load.arrivals == "bursty" else 0.0
        seconds = max(2000 / load.rate, 30 * speed.image(math.ceil(load.mean_steps)), bursts)
    chance, environment = random.Random(seed), simpy.Environment()
    fleet = [_Replica(environment, speed, pace, until=seconds, batching=batching) for _ in range(replicas)]
    images: list[Image] = []

    def ask() -> Generator[Any, Any, None]:
        for at in load.times(seconds, chance) if times is None else times:
            yield environment.timeout(at - environment.now)
            [steps] = chance.choices(list(load.steps), list(load.steps.values()))
            own = speed.image(steps)
            image = Image(str(chance.randrange(load.clients)), steps, at, own, at + PATIENCE * own)
            images.append(image)
            two = chance.sample(fleet, min(2, replicas))
            min(two, key=lambda one: len(one.queue)).submit(image)

    environment.process(ask())
    environment.run(until=3 * seconds)  # what is not done then would never have been in time
    counted = [image for image in images if image.arrived >= 0.1 * seconds]
    timely = [image for image in images if 0.1 * seconds <= image.done < seconds]
    rows = sum(one.rows for one in fleet)
    return Outcome(
        [image.done - image.arrived + speed.outside for image in counted],
        len(timely) / (0.9 * seconds),
        sum(one.busy for one in fleet) / (replicas * seconds),
        sum(one.filled for one in fleet) / rows if rows else 0.0,
    )


def smallest_fleet(
    speed: Speed, load: Load, p95: float, *, announce: Callable[[int, Outcome], None] | None = None, **how: Any
) -> tuple[int, Outcome]:
    """The fewest replicas with which 95 of 100 images take at most ``p95`` seconds.

    Args:
        speed: of each.
        load: what is asked for.
        p95: seconds.
        announce: told of each number that was tried.
        how: of ``simulate``.

    Raises:
        ValueError: an image by itself takes longer, or more than 10,000 replicas are needed.
    """
    longest = max(speed.image(steps) + speed.outside for steps, weight in load.steps.items() if weight)
    if p95 < longest:
        raise ValueError(f"p95={p95:g}: an image by itself takes {longest:.2f} s; allow more, or choose a faster chip")
    tried: dict[int, Outcome] = {}

    def enough(replicas: int) -> bool:
        tried[replicas] = simulate(speed, load, replicas, **how)
        if announce:
            announce(replicas, tried[replicas])
        return tried[replicas].percentile(95) <= p95

    most = sum(weight for weight in load.steps.values())
    each = 1 / sum(weight / most / speed.most(steps) for steps, weight in load.steps.items())
    low, high = 0, max(1, math.ceil(load.rate / each))
    while not enough(high):
        low, high = high, math.ceil(1.3 * high) + (high < 4)
        if high > MOST_REPLICAS:
            raise ValueError(f"rate={load.rate:g}: more than {MOST_REPLICAS} replicas are needed; choose a faster chip")
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, tried[high]
