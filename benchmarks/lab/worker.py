"""One contender of a benchmark in a process of its own. Standard library and numpy alone: peers have other Pythons.

    python worker.py JOB.json BEGAN

JOB is what :meth:`benchmarks.lab.job.Job.write` wrote, BEGAN the time at which the process was started. For ``load``
and ``start``, whose subject is a fresh process, it does its work once and prints one line of JSON. For the other parts
it gets ready, runs a few times to warm up, writes its outputs and prints a line of JSON; after that each line on stdin
is a turn: it runs, and prints the seconds.

A contender is a module with

    prepare(job, inputs) -> (run, outputs, facts)    run() works and waits for the device, outputs(run()) are arrays
    once(job, began) -> (facts, check)               check() tells, when the clock is off, what was done
    device_peak(job) -> bytes or None
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

TURN = 0.2
"""Seconds that a turn lasts at least, so that what takes milliseconds is run many times."""

WARM_UP = 3
"""Runs before the first turn on a GPU: CUDA graphs are recorded in the second. On the CPU one is enough."""

BLOCK = 1 << 24

Job = dict[str, Any]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = _keep_stdout()
    contender = _contender(job["contender"])

    def answer(facts: dict[str, Any]) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    if job["part"] in ("load", "start"):
        facts, check = contender.once(job, float(sys.argv[2]))
        facts["host_peak_bytes"] = host_peak()
        answer(facts | ({"check": check()} if job["check"] else {}))
        return
    with np.load(job["inputs"]) as file:
        inputs = dict(file)
    run, outputs, facts = contender.prepare(job, inputs)
    began = time.perf_counter()
    result = run()
    facts["first_s"] = time.perf_counter() - began
    for _ in range(1, WARM_UP if job["device"] != "cpu" else 1):
        result = run()
    np.savez(job["outputs"], **outputs(result))
    del result
    answer(facts)
    for _ in sys.stdin:
        seconds = _turn(run)
        answer({"seconds": seconds, "host_peak_bytes": host_peak(), "device_peak_bytes": contender.device_peak(job)})


def host_peak() -> int:
    """The most memory that this process has had, in bytes; ``ru_maxrss`` would count the process it was started by."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read(job: Job, began: float, *, keep: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """Every weight file from its first byte to its last: into the same memory, or into memory that is kept.

    The latter shows what a loader has to pay beside reading: a first touch of memory takes time too.
    """
    del began
    kept, start = [], time.perf_counter()
    block = memoryview(bytearray(BLOCK))
    for path in job["files"]:
        with open(path, "rb", buffering=0) as file:
            if not keep:
                while file.readinto(block):
                    pass
                continue
            whole = memoryview(np.empty(os.path.getsize(path), np.uint8))  # type: ignore[arg-type]
            kept.append(whole)
            while len(whole) and (count := file.readinto(whole[:BLOCK])):
                whole = whole[count:]
    return {"seconds": time.perf_counter() - start}, lambda: None


def _turn(run: Callable[[], Any]) -> float:
    """The median of as many runs as fill a turn."""
    seconds: list[float] = []
    while not seconds or sum(seconds) < TURN:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def _contender(name: str) -> Any:
    """The module of a contender; without this file's folder among those where modules are looked for."""
    here = Path(__file__).resolve()
    if name in ("read", "read and keep"):
        return SimpleNamespace(once=partial(read, keep=name != "read"))
    if name.startswith("canvax"):
        sys.path[0] = str(here.parents[2])
        return importlib.import_module("benchmarks.lab.ours")
    del sys.path[0]
    spec = importlib.util.spec_from_file_location("benchmark_peers", here.with_name("peers.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CONTENDERS[name]


def _keep_stdout() -> Any:
    """A file for answers on what was stdout; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
