"""The fleet simulation of ``benchmarks`` against queueing theory."""

from __future__ import annotations

import pytest

from benchmarks.lab.fleet import Load, Speed, simulate

pytestmark = pytest.mark.slow

SPEED = Speed({1: 0.02, 2: 0.03, 4: 0.05}, encode=0.01, decode=0.05, between=0.002)


@pytest.mark.parametrize("busy", [0.6, *(pytest.param(busy, marks=pytest.mark.weekly) for busy in (0.3, 0.8))])
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


def test_the_same_seed_is_the_same_run() -> None:
    one, two, other = (simulate(SPEED, Load(2.0), 2, seconds=60, seed=seed).latencies for seed in (1, 1, 2))
    assert one == two != other
