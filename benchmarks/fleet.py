"""The figures of docs/capacity.md: fleets of all sizes, what else limits them, and the simulation beside a server.

python -m benchmarks.fleet sizes --plot docs/images/fleet.png    # replicas for a load; latency as a fleet fills up
python -m benchmarks.fleet limits                                # files, HTTP, the journal: each on one processor
python -m benchmarks.fleet check                                 # canvax serve, measured, and the same load simulated
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import io
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lab.fleet import ARRIVALS, Load, Speed, simulate, smallest_fleet
from benchmarks.lab.traffic import MIXES, Answer, Mix, Request, capacity, closed_loop, open_loop, requests, summary
from benchmarks.serve_load import Server, _free_port, _ready

V5E = Speed({1: 0.0896}, encode=0.004, decode=0.175, outside=0.3)
"""A chip of TPU v5e, SDXL at 1024 x 1024: the compiler's estimate (docs/tpu.md); two at once take twice as long."""

STEPS, P95 = 20, 8.0
RATES, LOADS = (1.0, 10.0, 100.0), (0.3, 0.5, 0.7, 0.85)
FILLED = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


def sizes(arguments: argparse.Namespace) -> None:
    """Replicas for each rate and kind of arrivals, and latency by how full a fleet is."""
    each = V5E.most(STEPS)
    print(f"a full replica: {each:.3f} images a second\n")
    print("| images a second | busy all the time | " + " | ".join(ARRIVALS) + " |\n" + "|---" * 5 + "|")
    for rate in arguments.rates:
        cells = []
        for kind in ARRIVALS:
            seconds = {"steady": 90.0, "daily": 200.0, "bursty": 400.0}[kind] if rate >= 100 else None
            count, outcome = smallest_fleet(V5E, Load(rate, kind, {STEPS: 1.0}), P95, seconds=seconds)
            cells.append(f"{count} (p50 {outcome.percentile(50):.1f}, busy {outcome.busy:.0%})")
        print(f"| {rate:g} | {rate / each:.0f} | " + " | ".join(cells) + " |", flush=True)
    series = {}
    for replicas in (1, 4, 16, 64):
        points = []
        for part in FILLED:
            load = Load(part * replicas * each, steps={STEPS: 1.0})
            points.append(
                (100 * part, simulate(V5E, load, replicas, seconds=max(3000 / load.rate, 120)).percentile(95))
            )
        series[f"{replicas} replica{'s' * (replicas > 1)}"] = points
        print(replicas, [round(value, 1) for _, value in points], flush=True)
    if arguments.plot:
        from benchmarks.lab.chart import line_chart

        line_chart(
            series, title="SDXL, 20 steps, on chips of TPU v5e", x_label="load, % of what the fleet can do",
            y_label="95th percentile of latency, seconds", log_y=True, size=(900, 480),
        ).save(arguments.plot)  # fmt: skip


def limits(_: argparse.Namespace) -> None:
    """What does not grow with chips: seconds of a processor for an image."""
    from PIL import Image

    from canvax.images.formats import GeneratedImage

    rng, took = np.random.default_rng(0), {}
    smooth = Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).resize((1024, 1024), Image.Resampling.BICUBIC)
    pixels = np.clip(np.asarray(smooth, np.int16) + rng.integers(-6, 7, (1024, 1024, 3)), 0, 255).astype(np.uint8)
    image = GeneratedImage.of(Image.fromarray(pixels), {"prompt": "a red apple", "seed": 1})
    for kind in ("png", "jpeg", "webp"):
        began, out = time.process_time(), io.BytesIO()
        for _turn in range(3):
            out = io.BytesIO()
            image.save(out, kind.upper())
        took[kind] = (time.process_time() - began) / 3
        print(f"{kind}: {1e3 * took[kind]:.0f} ms, {len(out.getvalue()) / 1e6:.2f} MB of 1024 x 1024", flush=True)
    from canvax.server.app import Settings, create_app
    from canvax.server.jobs import State
    from canvax.server.journal import Journal
    from canvax.server.metrics import Metrics
    from tests.support.server_stub import StubEngine
    from tests.support.serving import served

    with tempfile.TemporaryDirectory() as folder:
        for name, journal in (("HTTP", None), ("HTTP and the journal", Journal(Path(folder) / "journal.db"))):
            metrics = Metrics()
            app = create_app(
                StubEngine(metrics=metrics, journal=journal), Settings(), state=lambda: State.READY, metrics=metrics
            )
            due = requests(1.0, 1000.0, clients=1, seed=0, mix=MIXES["alike"])
            with served(app) as base:
                answers = asyncio.run(closed_loop(base, due, 8, 10.0))
            print(f"{name}: {sum(one.status == 200 for one in answers) / 10:.0f} answers a second, client included")


def check(arguments: argparse.Namespace) -> None:
    """A server under Poisson load of equal images, and the same arrivals simulated.

    What everything takes is what the server's metrics say of that time: a shared machine is faster at one time than at
    another, and 3 % of speed are 10 % of a percentile.
    """
    mix, port = MIXES["alike"], _free_port()
    command = ["-m", "canvax", "serve", "emoji", "--port", str(port), "--no-keys", "--warm", "256x256:1,2,4,8"]
    command += ["--queue-images", "100000", "--queue-seconds", "100000"]
    with tempfile.NamedTemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, *command], stdout=said, stderr=said)
        server = Server("canvax", f"http://127.0.0.1:{port}")
        try:
            while not _ready(server):
                time.sleep(0.2)
            said.seek(0)
            speed = _warm(said.read())
            asked = [Request(0.0, 0, False, one.body) for one in requests(1.0, 60.0, clients=1, seed=5, mix=mix)[:30]]
            before = _sums(server.base)
            alone = [asyncio.run(open_loop(server.base, [one], jobs=False))[0].seconds for one in asked]
            by_itself = _with_means(speed, before, _sums(server.base)).image(STEPS)
            speed = replace(speed, outside=max(0.0, statistics.mean(alone) - by_itself))
            most = capacity(asyncio.run(_closed(server.base, mix)), CLOSED)
            print(f"{speed}\n{most:.2f} images a second at most; simulated {speed.most(STEPS):.2f}", flush=True)
            for part in arguments.loads:
                rate, seconds = part * most, arguments.seconds
                due = requests(rate, seconds, clients=1, seed=1, mix=mix)
                answers, looked = asyncio.run(_watched(server.base, due))
                found, now = summary(answers, rate, seconds), _with_means(speed, looked[0][1], looked[-1][1])
                load, times = Load(rate, steps={STEPS: 1.0}, clients=1), [one.at for one in due]
                outcome = simulate(now, load, 1, seconds=seconds, times=times, pace=_pace(now, looked))
                print(now, file=sys.stderr)
                cells = [f"{part:.0%}", f"{rate:.2f}", str(len(due))]
                for percent in (50, 95):
                    real, made = found[f"p{percent}"], outcome.percentile(percent)
                    cells += [f"{real:.2f}", f"{made:.2f}", f"{made / real:.2f}"]
                print(f"| {' | '.join(cells)} |", flush=True)
        finally:
            process.terminate()
            process.wait(60)


CLOSED = 20.0
"""Seconds of the closed loop that finds what a server can do."""


async def _closed(base: str, mix: Mix) -> list[Answer]:
    return await closed_loop(base, requests(1.0, 1000.0, clients=1, seed=7, mix=mix), 16, CLOSED)


Times = Mapping[tuple[str, str, str], float]


def _sums(base: str) -> Times:
    """Seconds ("sum") and how many ("count") until now, by a metric's name and batch."""
    return {
        (family.name, sample.labels.get("batch", ""), sample.name.rpartition("_")[2]): sample.value
        for family in text_string_to_metric_families(httpx.get(f"{base}/metrics").text)
        for sample in family.samples
    }


def _change(before: Times, after: Times, name: str, batch: str = "") -> tuple[float, float]:
    """Seconds of a metric in between, and of how many."""
    keys = [(f"canvax_{name}_seconds", batch, kind) for kind in ("sum", "count")]
    seconds, count = (after.get(key, 0.0) - before.get(key, 0.0) for key in keys)
    return seconds, count


def _with_means(speed: Speed, before: Times, after: Times) -> Speed:
    """With what everything took on average in between."""

    def mean(name: str, usual: float, batch: str = "") -> float:
        seconds, count = _change(before, after, name, batch)
        return seconds / count if count else usual

    return replace(
        speed,
        row={batch: mean("step", seconds, str(batch)) for batch, seconds in speed.row.items()},
        encode=mean("encode", speed.encode),
        decode=mean("decode", speed.decode),
        between=mean("turn_overhead", speed.between),
    )


LOOK = 5.0
"""Seconds after which the metrics are read again: a shared machine may be slow for some of them."""


async def _watched(base: str, due: Sequence[Request]) -> tuple[list[Answer], list[tuple[float, Times]]]:
    """The answers, and the metrics now and then, with the seconds since the first of them."""
    began, looked = time.perf_counter(), [(0.0, _sums(base))]
    running = asyncio.ensure_future(open_loop(base, due, jobs=False))
    while not running.done():
        await asyncio.wait([running], timeout=LOOK)
        looked.append((time.perf_counter() - began, await asyncio.to_thread(_sums, base)))
    return running.result(), looked


def _pace(speed: Speed, looked: Sequence[tuple[float, Times]]) -> Callable[[float], float]:
    """How many times as long as on average steps took from one look at the metrics to the next."""
    ends, paces = [], []
    for (_, before), (end, after) in itertools.pairwise(looked):
        took = usual = 0.0
        for batch, seconds in speed.row.items():
            spent, count = _change(before, after, "step", str(batch))
            took, usual = took + spent, usual + count * seconds
        ends.append(end)
        paces.append(took / usual if usual else 1.0)
    return lambda now: paces[min(bisect.bisect_left(ends, now), len(paces) - 1)]


def _warm(said: str) -> Speed:
    """The figures of the line "256x256 is warm: a step of a batch of 1: 10.2 ms, 2: 16.9 ms; decoding 13 ms"."""
    match = re.search(r"is warm: a step of a batch of (.*); decoding ([\d.]+) ms", said)
    assert match, said
    row = {int(batch): float(ms) / 1e3 for batch, ms in re.findall(r"(\d+): ([\d.]+) ms", match[1])}
    return Speed(row, encode=0.005, decode=float(match[2]) / 1e3)


PARTS = {"sizes": sizes, "limits": limits, "check": check}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="images a second, for sizes")
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS, help="of check: parts of the most")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each load of check")
    arguments = parser.parse_args()
    PARTS[arguments.part](arguments)


if __name__ == "__main__":
    main()
