"""Probes, streams and cancels answer whatever others do: the event loop waits for no lock and no disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.serving import until
from tests.support.web_site import Web, request, web


@pytest.fixture
def site() -> Iterator[Web]:
    with web() as running:
        yield running


def answers(site: Web, path: str = "/health") -> None:
    """A path is answered at once."""
    assert httpx.get(site.base + path, timeout=1.0).status_code == 200


@pytest.mark.parametrize("api", ["own", "a1111", "gone"])
def test_the_event_loop_does_not_wait_for_the_engines_lock(site: Web, api: str) -> None:
    site.engine.pace = 0.1
    body, path = b'{"prompt": "x", "steps": 50}', "/api/jobs" if api == "own" else "/sdapi/v1/txt2img"
    head = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with site.connect() as connection:
        connection.sendall(request(site.host, f"POST {path} HTTP/1.1", *head) + body)
        until(site.engine.jobs)
        (job,) = site.engine.accepted
        until(lambda: job.status == "running")
        act = {
            "own": lambda: site.http.delete(f"/api/jobs/{job.id}"),
            "a1111": lambda: site.http.post("/sdapi/v1/interrupt"),
            "gone": connection.close,
        }[api]
        with site.engine.book.lock:
            thread = threading.Thread(target=act)
            thread.start()
            time.sleep(0.2)
            for path in ("/health", "/ready", "/metrics", f"/api/jobs/{job.id}", "/openapi.json"):
                answers(site, path)
            assert not job.status.over
        thread.join(5)
        until(lambda: job.status.over)
    assert job.status == "cancelled"


@pytest.mark.parametrize("path", ["/api/adapters", "/sdapi/v1/loras"])
def test_the_event_loop_does_not_wait_for_headers_of_files(
    site: Web, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []
    reading = threading.Semaphore(10)

    def slow(*_: Any, **__: Any) -> Any:
        with reading:
            at_once.append(10 - reading._value)
            time.sleep(0.4)
        return ()

    monkeypatch.setattr(site.engine, "adapters", slow)
    threads = [threading.Thread(target=httpx.get, args=(site.base + path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: at_once)
    began = time.monotonic()
    answers(site)
    assert time.monotonic() - began < 0.3
    for thread in threads:
        thread.join(5)
    assert at_once == [1, 1, 1]  # one reads, the others find it read


def test_a_job_is_found_at_any_moment_of_its_end(site: Web) -> None:
    """It goes from one table to another, which are read without the lock."""
    missing, stop = list[str](), threading.Event()

    def look() -> None:
        while not stop.is_set():
            missing.extend(job.id for job in list(site.engine.accepted) if site.engine.job(job.id, "") is not job)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(50):
        site.submit(steps=1)
    stop.set()
    thread.join(5)
    assert not missing
