"""The fleet simulation of ``benchmarks`` against queueing theory."""

from __future__ import annotations

import random

import pytest

from benchmarks.lab.fleet import ARRIVALS, Load, Speed, simulate, smallest_fleet

pytestmark = pytest.mark.slow

SPEED = Speed({1: 0.02, 2: 0.03, 4: 0.05}, encode=0.01, decode=0.05, between=0.002)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_at_a_time_waits_as_theory_says(busy: float) -> None:
    """Poisson arrivals, equal work, one server: Pollaczek and Khinchin's mean for M/D/1."""
    speed = Speed({1: 0.02}, encode=0.01, between=0.005)
    own = speed.image(20)
    load = Load(busy / own, steps={20: 1.0}, clients=1)
    outcome = simulate(speed, load, 1, seconds=20_000 * own / busy, batching=False)
    mean = sum(outcome.latencies) / len(outcome.latencies)
    assert mean == pytest.approx(own + busy * own / (2 * (1 - busy)), rel=0.05)
    assert outcome.busy == pytest.approx(busy, rel=0.05)
    assert outcome.filled == 1


def test_a_replica_gives_at_most_what_full_batches_give() -> None:
    load = Load(3 * SPEED.most(20), steps={20: 1.0})
    outcome = simulate(SPEED, load, 1, seconds=600)
    assert outcome.images_per_second == pytest.approx(SPEED.most(20), rel=0.03)
    assert outcome.busy == pytest.approx(1, abs=0.01)
    assert outcome.filled == pytest.approx(4, abs=0.1)


def test_a_machine_that_is_slow_for_a_while() -> None:
    times, own = [10.0, 30.0, 50.0], SPEED.image(20)
    pace = lambda now: 2.0 if 29.0 < now < 40.0 else 1.0  # noqa: E731
    outcome = simulate(SPEED, Load(1.0, steps={20: 1.0}), 1, seconds=60, times=times, pace=pace)
    assert outcome.latencies == pytest.approx([own, 2 * own, own])


def test_more_of_everything() -> None:
    """Batches help; more replicas help; bursts and days need more than an even load."""
    load = Load(0.8 * SPEED.most(20), steps={20: 1.0})
    one, alone, two = (
        simulate(SPEED, load, count, seconds=300, batching=batching).percentile(95)
        for count, batching in ((1, True), (1, False), (2, True))
    )
    assert two < one < alone
    needed = [smallest_fleet(SPEED, Load(10.0, kind, {20: 1.0}), 2.0, seconds=400)[0] for kind in ARRIVALS]
    assert needed[0] < needed[2] < needed[1]
    few, outcome = smallest_fleet(SPEED, Load(20.0, steps={20: 1.0}), 2.0)
    assert outcome.percentile(95) <= 2.0 < simulate(SPEED, Load(20.0, steps={20: 1.0}), few - 1).percentile(95)


@pytest.mark.parametrize("kind", ARRIVALS)
def test_arrivals_are_as_many_as_asked_for(kind: str) -> None:
    times = Load(1.0, kind).times(400_000.0, random.Random(1))  # type: ignore[arg-type]
    assert len(times) / 400_000 == pytest.approx(1.0, rel=0.05)
    assert times == sorted(times)


def test_the_same_seed_is_the_same_run() -> None:
    one, two, other = (simulate(SPEED, Load(2.0), 2, seconds=60, seed=seed).latencies for seed in (1, 1, 2))
    assert one == two != other
