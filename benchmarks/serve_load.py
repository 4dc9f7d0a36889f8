"""Load on ``canvax serve``: how many images, how soon, beside other ways to serve the same model on this machine.

    python -m benchmarks.serve_load                            # batching not at all, by requests, by steps
    python -m benchmarks.serve_load --peer-path LIBRARIES      # also PyTorch diffusers behind FastAPI (serve_peer.py)
    python -m benchmarks.serve_load --closed 1 8               # so many clients who wait: what it does at most
    python -m benchmarks.serve_load --beside 1 3 --mix "short and long"    # short requests beside so many long ones
    python -m benchmarks.serve_load --url http://127.0.0.1:7860 --rate 2   # a server that runs already

Requests arrive at random, at a rate that rises until the 95th percentile of latency is beyond the last of ``--limits``;
how many images a second a server gives within each limit is compared. All servers get the same requests at the same
times: mixed sizes, steps, samplers, one image or two, with guidance and without, from clients with a key each. Every
server is a process of its own. They take turns, rate by rate, since machines grow faster and slower; the others have
nothing to do meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.lab.others import Others
from benchmarks.lab.traffic import (
    MIXES,
    Answer,
    Mix,
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

GROWTH = 1.15
"""From one rate to the next."""

FIRST = 0.5
"""With ``--rate auto``: the first rate, as a part of what the first server can do."""

LOWER = 12
"""How many rates below the first are tried, where that is too much already."""

Row = dict[str, float]


@dataclass(frozen=True)
class Server:
    """One of those compared.

    Attributes:
        name: for people.
        base: its address.
        command: that starts it; empty where it runs already.
        own: whether it is canvax.
        keys: of the clients.
        libraries: a folder of more of them for its process.
        process: its id, if it was started here.
    """

    name: str
    base: str
    command: Sequence[str] = ()
    own: bool = True
    keys: Sequence[str] = ()
    libraries: str = ""
    process: int | None = None

    def get(self, path: str) -> httpx.Response:
        """Ask as its first client."""
        headers = {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        return httpx.get(f"{self.base}{path}", headers=headers, timeout=60)

    def counters(self) -> Row:
        """Compilations, and steps of slots with an image and without."""
        found = {"compilations": 0.0, "used": 0.0, "padded": 0.0}
        for line in self.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == "canvax_compilations":
                found["compilations"] = float(value)
            for state in ("used", "padded"):
                if name.startswith("canvax_slot_steps_total") and f'state="{state}"' in name:
                    found[state] += float(value)
        return found


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server in a process of its own, when it is ready."""
    if not server.command:
        yield server
        return
    paths = [path for path in (server.libraries, os.environ.get("PYTHONPATH")) if path]
    environment = {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(server.command, stdout=said, stderr=said, env=environment)
        try:
            while not _ready(server):
                if process.poll() is not None:
                    said.seek(0)
                    raise SystemExit(f"{' '.join(server.command)} ended:\n{said.read().decode()[-2000:]}")
                time.sleep(0.25)
            yield replace(server, process=process.pid)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def servers(arguments: argparse.Namespace, folder: Path) -> Iterator[Server]:
    """Those to compare; the first is what the others are compared with."""
    if arguments.url:
        keys = [line.partition(":")[2] for line in arguments.keys.read_text().split()] if arguments.keys else []
        server = Server(arguments.url.rstrip("/"), arguments.url.rstrip("/"), keys=keys)
        yield Server(server.name, server.base, own=server.get("/api/models").status_code == 200, keys=keys)
        return
    keys, file = [secrets.token_hex(16) for _ in range(max(arguments.clients))], folder / "keys.txt"
    file.touch(0o600)
    file.write_text("".join(f"client{i}:{key}\n" for i, key in enumerate(keys)))
    sizes = [size for size, _ in _mix(arguments).sizes]
    for kind in arguments.batching:
        port, batches = _free_port(), "1" if kind == "none" else ",".join(map(str, arguments.batches))
        command = [sys.executable, "-m", "canvax", "serve", arguments.model, "--port", str(port), "--keys", str(file)]
        command += ["-q", "--queue-images", "100000", "--queue-seconds", "100000", "--batching", kind]
        command += ["--warm", *(f"{size}:{batches}" for size in sizes)]
        yield Server(f"canvax, {kind}", f"http://127.0.0.1:{port}", command, keys=keys)
    if arguments.peer_path is not None:
        import canvax

        model = Path(canvax.__file__).parent / "assets" / "emoji" if arguments.model == "emoji" else arguments.model
        script, port = Path(__file__).with_name("serve_peer.py"), _free_port()
        command = [sys.executable, str(script), "--model", str(model), "--port", str(port)]
        base = f"http://127.0.0.1:{port}"
        yield Server("diffusers, FastAPI", base, command, own=False, libraries=arguments.peer_path)


class Sweep:
    """Rates of one list of requests, for one server after the other.

    Args:
        arguments: of the command.
        clients: who share the requests.
    """

    def __init__(self, arguments: argparse.Namespace, clients: int) -> None:
        self._arguments, self._clients = arguments, clients
        self._first: float | None = None if arguments.rate == "auto" else float(arguments.rate)

    def of(self, server: Server) -> Generator[None, None, list[Row]]:
        """Rates that rise until latency is beyond every limit; from a lower one where the first is too much already.

        Yields after each of them, so that servers can take turns.
        """
        if self._first is None:
            self._first = FIRST * self.most(server, 8)["requests_per_s"]
        worst, rows, number = self._arguments.limits[-1], {}, 0
        while True:
            rows[number] = self.run(server, self._rate(number))
            yield
            if _fits(rows[number], worst) or number <= -LOWER:
                break
            number -= 3
        while _fits(rows[number], worst):
            number += 1
            if number not in rows:
                rows[number] = self.run(server, self._rate(number))
                yield
        return [rows[number] for number in sorted(rows)]

    def run(self, server: Server, rate: float) -> Row:
        """One rate. "others" is how many processors something else kept busy: nothing should."""
        seconds = self._arguments.seconds
        before = server.counters() if server.own else {}
        others = _others(server)
        answers = asyncio.run(open_loop(server.base, self._due(rate, seconds), server.keys, jobs=server.own))
        row = summary(answers, rate, seconds)
        if server.own:
            change = {name: value - before[name] for name, value in server.counters().items()}
            row |= {"fill": change["used"] / max(1.0, change["used"] + change["padded"])}
            row |= {"compilations": int(change["compilations"])}
        if others:
            row |= {"others": others.processors()}
        print(f"{server.name}, {self._clients} clients: {_in_words(row)}", file=sys.stderr)
        return row

    def most(self, server: Server, clients: int) -> Row:
        """Requests a second that it answers at most, asked by so many clients who wait, and how long they wait."""
        seconds, due = min(20.0, self._arguments.seconds), self._due(10.0, 100.0)
        asyncio.run(closed_loop(server.base, due, clients, min(3.0, seconds), server.keys))  # first calls are slower
        others = _others(server)
        (answers,) = self._closed(server, [(due, clients)])
        row = {"requests_per_s": capacity(answers, seconds)} | _waited(answers)
        return row | ({"others": others.processors()} if others else {})

    def beside(self, server: Server, clients: int) -> list[Row]:
        """How long the mix's shortest requests take beside ``clients`` who ask for its longest, and both kinds alone.

        One client asks for short ones, one after the other.
        """
        due = self._due(10.0, 100.0)
        kinds = [[one for one in due if one.body["steps"] == steps] for steps in _ends(due)]
        asyncio.run(closed_loop(server.base, due, clients + 1, min(3.0, self._arguments.seconds), server.keys))
        others = _others(server)
        alone = [self._closed(server, [(kind, 1)])[0] for kind in kinds]
        together = self._closed(server, [(kinds[0], 1), (kinds[1], clients)])
        rows: list[Row] = []
        for kind, by_itself, mixed in zip(kinds, alone, together, strict=True):
            row, waited = {"steps": kind[0].body["steps"], "count": len(mixed)} | _waited(mixed), _waited(by_itself)
            row |= {f"alone_{name}": value for name, value in waited.items()}
            rows.append(row | {"p95_over_alone": row["p95"] / waited["p95"]})
        return [row | ({"others": others.processors()} if others else {}) for row in rows]

    def _closed(self, server: Server, groups: Sequence[tuple[Sequence[Request], int]]) -> list[list[Answer]]:
        """What groups of clients who wait get at the same time: requests, and how many clients ask for them."""
        seconds = min(20.0, self._arguments.seconds)

        async def run() -> list[list[Answer]]:
            loops = (closed_loop(server.base, due, clients, seconds, server.keys) for due, clients in groups)
            return await asyncio.gather(*loops)

        answers = asyncio.run(run())
        if failed := [one.status for group in answers for one in group if one.status != 200]:
            raise SystemExit(f"{server.name}: {len(failed)} of {sum(map(len, answers))} requests failed, {failed[0]}")
        return answers

    def _rate(self, number: int) -> float:
        """The same ones for every server."""
        assert self._first is not None
        return self._first * GROWTH**number

    def _due(self, rate: float, seconds: float) -> list[Request]:
        own = self._arguments
        return requests(
            rate, seconds, clients=self._clients, seed=own.seed, mix=_mix(own), previews=own.previews
        )  # fmt: skip


def report(results: Mapping[str, Sequence[Row]], limits: Sequence[float]) -> Iterator[str]:
    """Images a second within each limit, against the first server's; then every run, as Markdown."""
    yield f"| images a second | {' | '.join(f'p95 within {limit:g} s' for limit in limits)} |"
    yield "|---" * (len(limits) + 1) + "|"
    base: dict[tuple[str, float], float] = {}
    for name, rows in results.items():
        clients, cells = name.rpartition(", ")[2], []
        for limit in limits:
            value = most_within(rows, limit)
            first = base.setdefault((clients, limit), value)
            cells.append(f"{value:.2f} ({value / first:.2f} x)" if value and first else f"{value:.2f}")
        yield f"| {name} | {' | '.join(cells)} |"
    for name, rows in results.items():
        yield f"\n{name}\n"
        yield from markdown(rows)


def plot(results: Mapping[str, Sequence[Row]], file: Path) -> None:
    """The 95th percentile of latency over images a second."""
    from benchmarks.lab.chart import line_chart

    series = {name: [(row["images asked for a second"], row["p95"]) for row in rows] for name, rows in results.items()}
    line_chart(
        series, title="Latency under load", x_label="images asked for, a second", y_label="95th percentile, seconds",
        log_y=True, size=(900, 480),
    ).save(file)  # fmt: skip


def main() -> None:
    """See the top of the file."""
    arguments = _parser().parse_args()
    arguments.limits.sort()
    results: dict[str, list[Row]] = {}
    waiting: dict[str, list[Any]] = {"closed": [], "beside": []}
    sweeps = {clients: Sweep(arguments, clients) for clients in arguments.clients}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        turns: dict[str, Generator[None, None, list[Row]]] = {}
        for one in servers(arguments, Path(folder)):
            server = stack.enter_context(running(one))
            if arguments.closed or arguments.beside:
                sweep = sweeps[arguments.clients[0]]
                for clients in arguments.closed or ():
                    _add(waiting["closed"], server, clients, sweep.most(server, clients))
                for clients in arguments.beside or ():
                    for row in sweep.beside(server, clients):
                        _add(waiting["beside"], server, clients, row)
            else:
                if server.command:  # its first calls are slower
                    warm = requests(2.0, 4.0, clients=1, seed=99, mix=_mix(arguments))
                    asyncio.run(open_loop(server.base, warm, server.keys, jobs=False))
                turns |= {f"{server.name}, {clients} clients": sweep.of(server) for clients, sweep in sweeps.items()}
        results = {name: [] for name in turns}
        while turns:
            for name, turn in list(turns.items()):
                try:
                    next(turn)
                except StopIteration as end:
                    results[name] = end.value
                    del turns[name]
    if results:
        print("\n".join(report(results, arguments.limits)))
    if arguments.json:
        arguments.json.write_text(json.dumps(results or waiting, indent=1))
    if results and arguments.plot:
        plot(results, arguments.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already, in place of those that are compared")
    parser.add_argument("--keys", type=Path, help="with --url: file with its keys, as for canvax serve")
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--batching", nargs="*", default=["none", "requests", "steps"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8], help="images at once")
    parser.add_argument("--peer-path", help="folder with FastAPI, or '': also measure the peer")
    parser.add_argument("--rate", default="auto", help="requests a second at first (a part of the first one's most)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals at each rate")
    parser.add_argument("--limits", nargs="+", type=float, default=[1.0, 2.0], help="seconds of the 95th percentile")
    parser.add_argument("--clients", nargs="+", type=int, default=[16])
    parser.add_argument("--mix", choices=list(MIXES), default="default")
    parser.add_argument("--size", help="of all images, such as 512x512, in place of the mix's sizes")
    parser.add_argument("--previews", type=float, default=0.1, help="part of the requests that watch (canvax alone)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--closed", nargs="+", type=int, metavar="N", help="N clients who wait for each answer")
    parser.add_argument(
        "--beside", nargs="+", type=int, metavar="N", help="one client of the mix's shortest requests, N of its longest"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="file for a plot, such as docs/images/serve-load.png")
    return parser


def _mix(arguments: argparse.Namespace) -> Mix:
    mix = MIXES[arguments.mix]
    return replace(mix, sizes=((arguments.size, 1.0),)) if arguments.size else mix


def _ends(due: Sequence[Request]) -> tuple[int, int]:
    """The fewest and the most steps."""
    steps = {one.body["steps"] for one in due}
    if len(steps) < 2:
        raise SystemExit("--beside needs a --mix of requests with few steps and with many, such as 'short and long'")
    return min(steps), max(steps)


def _waited(answers: Sequence[Answer]) -> Row:
    return {f"p{p}": percentile([one.seconds for one in answers], p) for p in (50, 95)}


def _others(server: Server) -> Others | None:
    return Others(server.process) if server.process and sys.platform == "linux" else None


def _add(rows: list[Any], server: Server, clients: int, row: Row) -> None:
    """Print a row and keep it; beside the first server's, where that was asked by as many clients."""
    found = {"server": server.name, "clients": clients} | row
    if "requests_per_s" in row:
        first = next((one for one in rows if one["clients"] == clients), found)
        found["over_first"] = row["requests_per_s"] / first["requests_per_s"] if first["requests_per_s"] else None
    print(json.dumps(found), flush=True)
    rows.append(found)


def _fits(row: Row, limit: float) -> bool:
    return row["p95"] <= limit and not row["refused"] and not row["failed"]


def _in_words(row: Row) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in row.items())


def _ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server that is measured goes, too
    main()
