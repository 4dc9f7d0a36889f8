"""How many replicas a load needs: the simulation against queueing theory, and the command."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec

import pytest

import canvax
from canvax.cli import main
from canvax.scale.capacity import planned_speed
from canvax.scale.fleet import ARRIVALS, Load, Speed, simulate, smallest_fleet

pytest.importorskip("simpy")

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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Speed({2: 0.1}), "lacks a batch of 1"), (lambda: Speed({1: 0.0}), "finite and positive"),
        (lambda: Load(0.0), "rate=0"), (lambda: Load(float("nan")), "rate"), (lambda: Load(1.0, "weekly"), "weekly"),  # type: ignore[arg-type]
        (lambda: smallest_fleet(SPEED, Load(1.0), 0.1), "an image by itself takes"),
        (lambda: Speed({1: "fast"}), "row="), (lambda: Load(1.0, steps={}), "steps="),  # type: ignore[dict-item]
        (lambda: Load(1.0, steps={20: -1.0}), "steps="), (lambda: Load(1.0, clients=0), "clients=0"),
        (lambda: smallest_fleet(SPEED, Load(1.0), float("nan")), "p95=nan"),
        (lambda: simulate(SPEED, Load(1.0), 0), "replicas=0"),
        (lambda: simulate(SPEED, Load(1.0), 1, seconds=-5.0), "seconds=-5"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(make: object, words: str) -> None:
    with pytest.raises(canvax.InputError, match=words):
        make()  # type: ignore[operator]


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (("--rate 0", "rate"), ("--rate 1 --p95 0", "p95"), ("--rate 1 --price -1", "price"),
                         ("--rate 1 --arrivals x", "arrivals"), ("--rate x", "rate")):  # fmt: skip
        assert main(["plan", "emoji", "--target", "here", *flags.split()]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured here: twice the load needs about twice as many."""
    command = ["plan", "emoji", "--target", "here", "--steps", "10", "--rate", "40", "--p95", "5"]
    assert main([*command, "--price", "2", "--json", "-q"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["per_hour"] == 2 * told["chips"]
    assert told["p95"] <= 5
    assert told["replicas"] >= 40 / told["images_per_second_of_a_full_replica"] * 0.9
    assert main(command) == 0
    assert "images a second (steady), 95 of 100 within 5 s" in capsys.readouterr().out


@pytest.mark.slow
def test_chips_that_are_not_here() -> None:
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    speed, first = planned_speed("emoji", "tpu-v5e:1x1", steps=10)
    assert first.target.devices == 1
    assert speed.encode > 0 < speed.decode
    assert 1 in speed.row
