"""A server that works for long: its memory stays what it was. CANVAX_SOAK says for how many seconds."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from benchmarks.serve_soak import Soak, resident
from tests.support.serve_process import serving

SECONDS = float(os.environ.get("CANVAX_SOAK", "30"))
GROWTH = 1.05
"""Of the memory between the first half and the end: caches fill in the beginning."""


@pytest.mark.weekly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_stays_what_it_was(tmp_path: Path) -> None:
    """Four clients and a journal; results are forgotten after five seconds."""
    samples: list[float] = []
    with serving("--journal", "jobs.db", "--keep-seconds", "5", cwd=tmp_path) as served, served.ready() as http:
        soak = Soak(served.base, time.monotonic() + SECONDS, models=("emoji",), adapters=(), keys=())
        clients = [threading.Thread(target=soak.run, args=(number,)) for number in range(4)]
        for one in clients:
            one.start()
        while any(one.is_alive() for one in clients):
            samples.append(resident(served.process.pid))
            time.sleep(SECONDS / 100)
        metrics = http.get("/metrics").text
    half = len(samples) // 2
    print(soak.statuses, "MB:", [round(sample) for sample in samples[:: len(samples) // 10]])
    assert not soak.problems
    assert not soak.statuses["failed"]
    assert soak.statuses["done"] + soak.statuses["cancelled"] >= SECONDS / 2
    assert "canvax_queue_images 0.0" in metrics
    assert max(samples[half:]) <= GROWTH * max(samples[:half])
    assert max((tmp_path / name).stat().st_size for name in ("jobs.db", "jobs.db-wal")) < 64 << 20
