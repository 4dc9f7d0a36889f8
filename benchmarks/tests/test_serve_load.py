"""The load generator: what it sends, what it measures, against an engine without a model."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import serve_load
from benchmarks.lab.traffic import (
    MIXES,
    Answer,
    Request,
    capacity,
    closed_loop,
    markdown,
    most_within,
    open_loop,
    percentile,
    requests,
    summary,
)
from canvax.server.app import Settings, create_app
from canvax.server.jobs import Rejected, State
from canvax.server.keys import Keys
from canvax.server.metrics import Metrics
from tests.support.server_stub import StubEngine
from tests.support.serving import served

pytestmark = pytest.mark.slow

KEYS = [f"client-{i}-has-a-long-key" for i in range(3)]


@contextmanager
def stub(folder: Path | None = None, *, pace: float = 0.0) -> Iterator[tuple[str, StubEngine]]:
    """The address of a server without a model, and its engine; with a folder it wants ``KEYS``."""
    engine, keys = StubEngine(pace=pace), None
    if folder:
        (folder / "keys.txt").touch(0o600)
        (folder / "keys.txt").write_text("\n".join(f"c{i}:{key}" for i, key in enumerate(KEYS)))
        keys = Keys.read(folder / "keys.txt")
    app = create_app(engine, Settings(keys=keys), state=lambda: State.READY, metrics=Metrics())
    with served(app) as base:
        yield base, engine


# What is sent.


def test_the_same_seed_gives_the_same_requests() -> None:
    one, again, other = (requests(5.0, 60.0, clients=4, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_arrivals_are_poisson() -> None:
    found = requests(20.0, 1000.0, clients=1, seed=0)
    gaps = [later.at - one.at for one, later in itertools.pairwise(found)]
    assert len(found) == pytest.approx(20_000, rel=0.03)
    assert statistics.mean(gaps) == pytest.approx(0.05, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.03)
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)
    counts = Counter(int(one.at) for one in found)
    each = [counts[second] for second in range(1000)]
    assert statistics.variance(each) == pytest.approx(20.0, rel=0.15)


# What is measured.


def test_percentiles_are_values_of_the_list() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, p) for p in (1, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0], 51) == 2.0
    assert percentile([], 95) == math.inf


def test_a_run_in_figures() -> None:
    def answer(at: float, seconds: float, status: int = 200, n: int = 1, preview: float | None = None) -> Answer:
        return Answer(Request(at, 0, preview is not None, {"n": n}), status, seconds, preview)

    early, late = answer(0.5, 9.0), answer(9.5, 2.0)
    good = [answer(i, 0.1 * i, n=2, preview=0.05 * i) for i in range(1, 9)]
    row = summary([early, *good, late, answer(5.0, 0.1, 429), answer(5.0, 0.1, 0)], 1.5, 10.0)
    assert row["images a second"] == pytest.approx((1 + 8 * 2) / 9)  # what comes in the run's time, from whenever
    assert row["images asked for a second"] == pytest.approx((8 * 2 + 3) / 9)
    assert (row["p50"], row["p95"]) == (pytest.approx(0.5), pytest.approx(2.0))
    assert (row["preview p50"], row["preview p95"]) == (pytest.approx(0.2), pytest.approx(0.4))
    assert (row["refused"], row["failed"]) == (1, 1)


def test_the_best_rate_within_a_limit_is_compared() -> None:
    def row(images: float, p95: float, failed: int = 0) -> dict[str, float]:
        return {"images a second": images, "p95": p95, "refused": 0, "failed": failed}

    slow = [row(1.0, 0.5), row(2.0, 1.5), row(2.1, 9.0)]
    quick = [row(2.0, 0.5), row(4.0, 0.9), row(5.0, 1.9, failed=1)]
    assert [most_within(slow, limit) for limit in (0.1, 1.0, 2.0)] == [0.0, 1.0, 2.0]
    lines = list(serve_load.report({"none, 4 clients": slow, "steps, 4 clients": quick}, [1.0, 2.0]))
    assert "| none, 4 clients | 1.00 (1.00 x) | 2.00 (1.00 x) |" in lines
    assert "| steps, 4 clients | 4.00 (4.00 x) | 4.00 (2.00 x) |" in lines
    assert list(markdown([{"rate": 1.234, "failed": 2}, {"rate": 123.4}]))[2:] == ["| 1.23 | 2 |", "| 123 |  |"]


# Against a server.


def test_an_open_loop_waits_for_nobody() -> None:
    due = requests(40.0, 0.5, clients=3, seed=0, mix=MIXES["alike"])
    with stub(pace=0.01) as (base, engine):  # 20 steps: 0.2 s each
        answers = asyncio.run(open_loop(base, due))
    assert [answer.request for answer in answers] == due
    assert {answer.status for answer in answers} == {200}
    assert {ask.seed for ask in engine.asks} == {one.body["seed"] for one in due}
    assert min(answer.seconds for answer in answers) >= 0.2
    assert percentile([answer.seconds for answer in answers], 95) < 1.5
    assert all(answer.preview is None for answer in answers)


def test_who_watches_sees_previews_first(tmp_path: Path) -> None:
    mix = replace(MIXES["default"], sizes=(("64x64", 4.0), ("96x64", 1.0)))  # those that the stub has
    due = requests(25.0, 0.5, clients=3, seed=0, previews=0.5, mix=mix)
    with stub(tmp_path, pace=0.01) as (base, engine):
        answers = asyncio.run(open_loop(base, due, KEYS))
    assert {answer.status for answer in answers} == {200}
    assert {ask.client for ask in engine.asks} == {"c0", "c1", "c2"}
    for answer in answers:
        assert (answer.preview is not None) == answer.request.watched
        assert answer.preview is None or 0 < answer.preview < answer.seconds
    asked = Counter((ask.width, ask.height, ask.steps, ask.n) for ask in engine.asks)
    sent = Counter((*map(int, one.body["size"].split("x")), one.body["steps"], one.body["n"]) for one in due)
    assert asked == sent


def test_refusals_and_faults_are_told_apart() -> None:
    due = requests(40.0, 0.25, clients=1, seed=0, previews=0.3)
    with stub() as (base, engine):
        engine.refusal = Rejected(429, "queue_full", "later")
        assert {one.status for one in asyncio.run(open_loop(base, due))} == {429}
        engine.refusal, engine.fails = None, ("server_error", "broken")
        row = summary(asyncio.run(open_loop(base, due)), 40.0, 0.25)
        assert (row["refused"], row["failed"], row["p95"]) == (0, len(due), math.inf)
    assert {one.status for one in asyncio.run(open_loop(base, due))} == {0}, "nobody is there"


def test_a_closed_loop_has_one_request_of_each_client() -> None:
    due = requests(10.0, 10.0, clients=1, seed=0, mix=MIXES["alike"])
    with stub(pace=0.01) as (base, engine):
        answers = asyncio.run(closed_loop(base, due, 4, 0.5))
        assert not engine.jobs()
    assert 4 <= len(answers) <= 12  # each takes 0.2 s
    assert capacity(answers, 0.5) <= 2 * (len(answers) - 3)  # of the last ones at most one ends in time


def test_an_answer_that_comes_after_the_end_does_not_count() -> None:
    one = requests(10.0, 10.0, clients=1, seed=0, mix=MIXES["alike"])[0]
    answers = [Answer(replace(one, at=at), 200, 2.0) for at in (0.0, 2.0, 4.0, 6.0)]
    assert capacity(answers, 7.0) == pytest.approx(3 / 7)
    assert capacity([*answers, Answer(one, 503, 1.0)], 7.0) == pytest.approx(3 / 7)


def test_a_server_that_runs_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, image = tmp_path / "figures.json", tmp_path / "plot.png"
    with stub(tmp_path) as (base, _):
        command = ["", "--url", base, "--keys", str(tmp_path / "keys.txt"), "--rate", "100", "--seconds", "0.3"]
        command += ["--limits", "0.000001", "--clients", "3", "--json", str(file), "--plot", str(image)]
        monkeypatch.setattr("sys.argv", command)
        monkeypatch.setattr(serve_load, "LOWER", 1)
        serve_load.main()
    said = capsys.readouterr().out
    assert f"| {base}, 3 clients | 0.00 |" in said
    ((_, rows),) = json.loads(file.read_text()).items()
    assert len(rows) == 2
    assert rows[0]["requests a second"] < rows[1]["requests a second"] == 100
    assert {row["compilations"] for row in rows} == {0}
    assert image.stat().st_size > 5000


def test_clients_who_wait_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests a second of a closed loop; then short requests beside long ones, and each kind alone."""
    file = tmp_path / "figures.json"
    with stub(pace=0.005) as (base, engine):
        command = ["", "--url", base, "--closed", "1", "3", "--beside", "2", "--mix", "short and long"]
        command += ["--size", "64x64", "--seconds", "1", "--json", str(file)]
        monkeypatch.setattr("sys.argv", command)
        serve_load.main()
    assert {(ask.width, ask.height) for ask in engine.asks} == {(64, 64)}
    found = json.loads(file.read_text())
    assert [row["clients"] for row in found["closed"]] == [1, 3]
    assert all(row["requests_per_s"] > 0 and row["over_first"] == 1 for row in found["closed"])
    short, long = found["beside"]
    assert (short["steps"], long["steps"], short["clients"]) == (4, 50, 2)
    assert 0.02 <= short["alone_p50"] < 0.25 <= long["alone_p50"]
    assert short["p95_over_alone"] == pytest.approx(short["p95"] / short["alone_p95"])
    assert short["count"] > long["count"] > 2
