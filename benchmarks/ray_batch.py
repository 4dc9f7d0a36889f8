"""A batch job on a Ray cluster of three nodes on this machine, beside one plain process; with nodes and actors killed.

    python -m benchmarks.ray_batch --rows 2000 --actor-kills 10 --node-kills 2
    python -m benchmarks.ray_batch --rows 2000 --actors 1 2 3

It prints one JSON object. In a container with several network addresses run it in a namespace with the loopback alone,
as the test does: ``unshare -rn sh -c "ip link set lo up; python -m benchmarks.ray_batch ..."``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
WORDS = ("a red apple", "a dog face", "a lemon", "a house", "a sunflower", "an umbrella", "a fire engine", "a clock")
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}


def write_rows(path: Path, count: int, steps: int) -> Path:
    """A file of rows that differ in prompt, seed, steps, sampler and guidance."""
    rows = [
        {"id": f"r{i}", "prompt": WORDS[i % 8], "steps": steps + i % 3, "sampler": ("Euler", "DPM++ 2M")[i % 2],
         "guidance_scale": 2 + i % 3}
        for i in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def images(folder: Path) -> dict[str, str]:
    """The hash of each image of a job's folder by its id, after a look at the list: every id once, as it says."""
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    found = {line["id"]: hashlib.sha256((folder / line["file"]).read_bytes()).hexdigest() for line in lines}
    assert len(found) == len(lines), "an id is there twice"
    assert all(found[line["id"]] == line["sha256"] for line in lines)
    return found


def cluster() -> Any:
    """Three nodes of one processor each."""
    from ray.cluster_utils import Cluster

    there = Cluster(initialize_head=True, head_node_args=dict(NODE))
    for _ in range(2):
        there.add_node(**{name: value for name, value in NODE.items() if name != "include_dashboard"})
    there.wait_for_nodes()
    return there


def command(file: Path, folder: Path, batch: int, *more: str) -> list[str]:
    """A job as a user starts it."""
    words = [sys.executable, "-m", "canvax", "batch", str(file), "-o", str(folder), "-b", str(batch), "--json", "-q"]
    return [*words, *more]


class Processors:
    """Seconds of a processor that this process's descendants take, by what they are: looked at four times a second."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Processors:
        self._look()
        self._before = {pid: last for pid, (_, last) in self._seconds.items()}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def told(self) -> dict[str, float]:
        """Of the actors, of the command itself, and of all else that Ray runs."""
        found = dict.fromkeys(("actors", "command", "ray"), 0.0)
        for pid, (kind, last) in self._seconds.items():
            found[kind] += last - self._before.get(pid, 0.0)
        return {kind: round(seconds, 1) for kind, seconds in found.items()}

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            self._look()

    def _look(self) -> None:
        import_module("ray")  # which brings the next one along
        psutil = import_module("psutil")
        for process in psutil.Process().children(recursive=True):
            try:
                words, times = " ".join(process.cmdline()), process.cpu_times()
            except psutil.Error:
                continue
            kind = "actors" if "MapWorker" in words else "command" if "canvax batch" in words else "ray"
            self._seconds[process.pid] = kind, times.user + times.system


def run(words: list[str], meanwhile: Callable[[subprocess.Popen[str]], None] | None = None) -> tuple[int, Any]:
    """Run a job; its exit code and report."""
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: list[tuple[str, str]] = []
    reader = threading.Thread(target=lambda: said.append(child.communicate()), daemon=True)
    reader.start()
    if meanwhile:
        meanwhile(child)  # nodes can be added by the main thread alone
    reader.join(7200)
    out, err = said[0]
    try:
        return child.returncode, json.loads(out)
    except ValueError:
        return child.returncode or 1, out[:2000] + err[-2000:]


def killer(there: Any, listed: Path, rows: int, actor_kills: int, node_kills: int, log: list[str]) -> Callable:
    """Kills actors and nodes at even distances of the job; a node that goes is replaced by a new one."""
    import psutil

    def kill(child: subprocess.Popen[str]) -> None:
        events = interleaved(actor_kills, node_kills)
        for number, event in enumerate(events):
            wanted = rows * (number + 1) // (len(events) + 2)
            while child.poll() is None and (not listed.exists() or listed.read_bytes().count(b"\n") < wanted):
                time.sleep(0.05)
            if child.poll() is not None:
                return
            if event == "node":
                there.remove_node(next(iter(there.worker_nodes)), allow_graceful=False)
                there.add_node(**{name: value for name, value in NODE.items() if name != "include_dashboard"})
                log.append("node")
                continue
            actors = [p for p in psutil.process_iter(["cmdline"]) if "MapWorker" in " ".join(p.info["cmdline"] or [])]
            if actors:
                actors[number % len(actors)].send_signal(signal.SIGKILL)
                log.append("actor")

    return kill


def interleaved(actors: int, nodes: int) -> list[str]:
    """Nodes spread evenly among actors."""
    events = ["actor"] * actors
    for i in range(nodes):
        events.insert((i + 1) * len(events) // (nodes + 1), "node")
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--actors", type=int, nargs="+", default=[3])
    parser.add_argument("--actor-kills", type=int, default=0)
    parser.add_argument("--node-kills", type=int, default=0)
    parser.add_argument("--driver-kills", type=int, default=0)
    chosen = parser.parse_args()
    report: dict[str, Any] = {"rows": chosen.rows, "steps": chosen.steps, "batch": chosen.batch, "runs": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_rows(folder / "rows.jsonl", chosen.rows, chosen.steps)
        with Processors() as processors:
            code, plain = run(command(file, folder / "plain", chosen.batch))
        assert code == 0, plain
        report["plain"] = {name: plain[name] for name in ("done", "seconds", "images_per_second")}
        report["plain"]["processors"] = processors.told()
        wanted = images(folder / "plain")
        there = cluster()
        try:
            for actors in chosen.actors:
                log: list[str] = []
                out = folder / f"ray{actors}"
                words = command(file, out, chosen.batch, "--ray", there.address, "--actors", str(actors))
                listed = out / "manifest.jsonl"
                for kill in range(chosen.driver_kills):
                    run(words, driver_killer(listed, chosen.rows * (kill + 1) // (chosen.driver_kills + 1)))
                    log.append("driver")
                kills = killer(there, listed, chosen.rows, chosen.actor_kills, chosen.node_kills, log)
                with Processors() as processors:
                    code, told = run(words, kills)
                assert code == 0, told
                told = {name: told[name] for name in ("done", "skipped", "errors", "seconds", "images_per_second")}
                report["runs"][actors] = told | {
                    "equal": images(out) == wanted, "killed": log, "processors": processors.told()
                }  # fmt: skip
        finally:
            there.shutdown()
    print(json.dumps(report))


def driver_killer(listed: Path, wanted: int) -> Callable[[subprocess.Popen[str]], None]:
    """Kills the job itself when the list has so many lines."""

    def kill(child: subprocess.Popen[str]) -> None:
        while child.poll() is None and (not listed.exists() or listed.read_bytes().count(b"\n") < wanted):
            time.sleep(0.02)
        child.kill()

    return kill


if __name__ == "__main__":
    main()
