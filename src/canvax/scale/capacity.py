"""What one replica takes: measured here, or as a compiler estimates it for chips that are not here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from canvax.errors import InputError
from canvax.planning.plan import Plan, plan
from canvax.scale.fleet import Load, Outcome, Speed, smallest_fleet
from canvax.server.policy import WORTH_IT

BATCHES = (1, 2, 4, 8)
"""Images at once that are tried."""

ROUNDS = 3


@dataclass(frozen=True)
class Fleet:
    """How many replicas a load needs.

    Attributes:
        speed: of each.
        load: what is asked for.
        p95: seconds that were allowed.
        chips: of each replica.
        replicas: how many.
        outcome: with so many.
        price: of a chip for an hour, in any currency.
        at_least: the speed is a bound that no chip reaches, and so is the number.
    """

    speed: Speed
    load: Load
    p95: float
    chips: int
    replicas: int
    outcome: Outcome
    price: float | None = None
    at_least: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        chips = self.replicas * self.chips
        hourly = None if self.price is None else chips * self.price
        return {
            "rate": self.load.rate, "arrivals": self.load.arrivals, "p95_allowed": self.p95, "replicas": self.replicas,
            "chips": chips, "p50": self.outcome.percentile(50), "p95": self.outcome.percentile(95),
            "p99": self.outcome.percentile(99), "busy": self.outcome.busy, "images_in_a_batch": self.outcome.filled,
            "images_per_second_of_a_full_replica": self.speed.most(math.ceil(self.load.mean_steps)),
            "per_hour": hourly, "per_1000_images": None if hourly is None else hourly / (3.6 * self.load.rate),
            "row_seconds": {str(batch): seconds for batch, seconds in self.speed.row.items()},
            "encode_seconds": self.speed.encode, "decode_seconds": self.speed.decode, "at_least": self.at_least,
        }  # fmt: skip


def size_fleet(
    speed: Speed,
    load: Load,
    p95: float,
    *,
    chips: int = 1,
    price: float | None = None,
    at_least: bool = False,
    announce: Callable[[int, Outcome], None] | None = None,
) -> Fleet:
    """The smallest fleet for a load; arguments as in ``Fleet``.

    Raises:
        InputError: no fleet is enough, or an argument cannot be used.
        CanvaxError: simpy is not installed.
    """
    replicas, outcome = smallest_fleet(speed, load, p95, announce=announce)
    return Fleet(speed, load, p95, chips, replicas, outcome, price, at_least)


def planned_speed(model: str, target: str, **how: Any) -> tuple[Speed, Plan]:
    """A replica on chips that are not here, and the plan for one image; arguments as in ``canvax.plan``.

    For TPUs the compiler's estimate; for GPUs, whose compiler makes none, the least that the data sheet allows.

    Raises:
        InputError: not even one image fits.
    """
    row: dict[int, float] = {}
    first: Plan | None = None
    encode = decode = 0.0
    for times in BATCHES:
        found = plan(model, target, batch=None if first is None else times * first.batch, **how)
        if not found.fits and first is None:
            raise InputError(f"{model} does not fit on {target}: {found.why_not}")
        if not found.fits:
            break
        programs = {program.name: program for program in found.programs}
        chip = found.target.chip
        took = {
            name: program.bound_seconds(chip) if program.seconds is None else program.seconds
            for name, program in programs.items()
        }
        if first is None:  # one image on each chip, and an image by itself takes as long
            first, row[1] = found, took["denoise"]
            encode = programs["encode"].evaluations * took["encode"] + programs["denoise"].setup_seconds
            decode = took["decode"]
        elif took["denoise"] / found.batch > WORTH_IT * row[max(row)] / max(row):
            break
        row[found.batch] = took["denoise"]
    assert first is not None
    return Speed(row, encode, decode), first


def measured_speed(pipe: Any, *, steps: int, announce: Callable[[str], None] | None = None, **call: Any) -> Speed:
    """This machine as one replica: a pipeline's own times at several batches.

    Args:
        pipe: the pipeline.
        steps: of the runs that are timed.
        announce: told what is done.
        call: further arguments of the calls, such as height and width.
    """
    row: dict[int, float] = {}
    encode = decode = outside = 0.0
    for batch in BATCHES:
        if announce:
            announce(f"measuring {batch} at once")
        say = {**call, "num_inference_steps": steps, "progress": False, "seed": 0}
        timings = [pipe(["a red apple"] * batch, **say).timings for _ in range(ROUNDS + 1)][1:]
        median = {name: statistics.median(one[name] for one in timings) for name in timings[0]}
        if row and median["step"] / batch > WORTH_IT * row[max(row)] / max(row):
            break
        row[batch] = median["step"]
        if batch == 1:
            encode, decode = median["encode"], median["decode"]
            outside = max(0.0, median["total"] - sum(median[name] for name in ("encode", "denoise", "decode")))
    return Speed(row, encode, decode, outside)
