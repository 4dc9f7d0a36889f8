"""A server that works for long: its memory stays what it was. CANVAX_SOAK says for how many seconds."""

from __future__ import annotations

import base64
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.serve_process import serving
from tests.server_stub import drawn

SECONDS = float(os.environ.get("CANVAX_SOAK", "30"))
GROWTH = 1.05
"""Of the memory between the first half and the end: caches fill in the beginning."""


def resident(pid: int) -> int:
    """Bytes of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def body(rng: random.Random) -> dict[str, Any]:
    """Any job."""
    words = ("red", "blue", "cat", "dog", "apple", "house", "tree", "face", "small", "two")
    asked: dict[str, Any] = {
        "prompt": " ".join(rng.choice(words) for _ in range(rng.randrange(1, 9))), "seed": rng.randrange(2**32),
        "steps": rng.randrange(4, 20), "n": rng.randrange(1, 4), "sampler": rng.choice(("Euler a", "UniPC", "DDIM")),
        "guidance_scale": rng.choice((1.0, 3.0, 7.5)), "previews": rng.random() < 0.5,
        "format": rng.choice(("png", "jpeg", "webp")),
    }  # fmt: skip
    if rng.random() < 0.3:
        side = rng.randrange(32, 96)
        asked["image"] = base64.b64encode(drawn(rng.randrange(256), (side, 64), "png")).decode()
        asked |= {"n": 1, "upscale": 1.5} if rng.random() < 0.3 else {"strength": 0.5}
    return asked


def client(base: str, number: int, end: float, done: list[str]) -> None:
    """Ask, watch or fetch or give up, again and again."""
    rng = random.Random(number)
    with httpx.Client(base_url=base, timeout=60) as http:
        while time.monotonic() < end:
            answer = http.post("/api/jobs", json=body(rng))
            if answer.status_code == 429:
                time.sleep(0.5)
                continue
            assert answer.status_code == 202, answer.text
            where, kind = f"/api/jobs/{answer.json()['id']}", rng.random()
            if kind < 0.2:
                http.delete(where)
            elif kind < 0.6:
                with http.stream("GET", f"{where}/events") as events:
                    for line in events.iter_lines():
                        if kind < 0.3 and line.startswith("event: step"):
                            break  # a client that goes away
            while (job := http.get(where).json())["status"] in ("queued", "running"):
                time.sleep(0.05)
            assert job["status"] in ("done", "cancelled"), job
            for image in job["images"]:
                assert image["url"] is None or http.get(image["url"]).status_code == 200
            done.append(job["status"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_stays_what_it_was(tmp_path: Path) -> None:
    """Four clients and a journal; results are forgotten after five seconds."""
    samples: list[int] = []
    done: list[str] = []
    with serving("--journal", "jobs.db", "--keep-seconds", "5", cwd=tmp_path) as served, served.ready() as http:
        began = time.monotonic()
        clients = [
            threading.Thread(target=client, args=(served.base, number, began + SECONDS, done)) for number in range(4)
        ]
        for one in clients:
            one.start()
        while any(one.is_alive() for one in clients):
            samples.append(resident(served.process.pid))
            time.sleep(SECONDS / 100)
        metrics = http.get("/metrics").text
    half = len(samples) // 2
    print(f"{len(done)} jobs; MB:", [sample >> 20 for sample in samples[:: len(samples) // 10]])
    assert len(done) >= SECONDS / 2
    assert "canvax_queue_images 0.0" in metrics
    assert max(samples[half:]) <= GROWTH * max(samples[:half])
    assert max((tmp_path / name).stat().st_size for name in ("jobs.db", "jobs.db-wal")) < 64 << 20
