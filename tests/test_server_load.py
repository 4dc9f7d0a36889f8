"""Probes, streams and cancels answer whatever others do: the event loop waits for no lock and no disk, and what all
requests hold is bounded."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx2 as httpx
import pytest

from canvax.server import guard
from canvax.server.app import Settings
from tests.support.serving import APIS, Web, body_of, check_refused, heard, request, status_of, until, web


@pytest.fixture
def site() -> Iterator[Web]:
    with web() as running:
        yield running


def answers(site: Web, path: str = "/health") -> None:
    """A path is answered at once."""
    assert httpx.get(site.base + path, timeout=1.0).status_code == 200


@pytest.mark.parametrize("api", ["own", "a1111", "gone"])
def test_the_event_loop_does_not_wait_for_the_engines_lock(site: Web, api: str) -> None:
    body, path = b'{"prompt": "x"}', "/api/jobs" if api == "own" else "/sdapi/v1/txt2img"
    head = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with site.engine.paused(), site.connect() as connection:
        connection.sendall(request(site.host, f"POST {path} HTTP/1.1", *head) + body)
        until(site.engine.jobs)
        (job,) = site.engine.accepted
        until(lambda: job.status == "running")
        if api == "a1111":  # its route may hear of the job later than the engine
            until(lambda: site.http.get("/sdapi/v1/progress").json()["state"]["job_count"])
        act = {
            "own": lambda: site.http.delete(f"/api/jobs/{job.id}"),
            "a1111": lambda: site.http.post("/sdapi/v1/interrupt"),
            "gone": connection.close,
        }[api]
        with site.engine.book.lock:
            thread = threading.Thread(target=act)
            thread.start()
            time.sleep(0.1)
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
    reading, read = threading.Semaphore(10), threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        with reading:
            at_once.append(10 - reading._value)
            read.wait(10)
            time.sleep(0.02)
        return ()

    monkeypatch.setattr(site.engine, "adapters", slow)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(httpx.get, site.base + path) for _ in range(3)]
        until(lambda: at_once)
        answers(site)
        read.set()
        assert {one.result(5).status_code for one in asked} == {200}
    assert at_once == [1, 1, 1]  # one reads, the others find it read


def test_a_job_is_found_at_any_moment_of_its_end(site: Web) -> None:
    """It goes from one table to another, which are read without the lock."""
    missing, stop = list[str](), threading.Event()

    def look() -> None:
        while not stop.is_set():
            missing.extend(job.id for job in list(site.engine.accepted) if site.engine.job(job.id, "") is not job)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(15):
        site.submit(steps=1)
    stop.set()
    thread.join(5)
    assert not missing


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the guards of servers count."""
    made, kind = [], guard._Load
    monkeypatch.setattr(guard, "_Load", lambda most: made.append(kind(most)) or made[-1])
    return made


@pytest.fixture
def small(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A server for bodies of 100 kB, two of them at a time."""
    monkeypatch.setattr(guard, "BODIES", 2)
    with web(Settings(max_body=100_000)) as running:
        yield running


def upload(stack: ExitStack, site: Web, *more: str) -> socket.socket:
    """A connection that has sent most of a body."""
    connection = stack.enter_context(site.connect())
    head = request(site.host, "POST /api/jobs HTTP/1.1", "Content-Type: application/json", *more)
    connection.sendall(head + (b"" if more[0].startswith("Content") else b"%x\r\n" % 90_000) + b" " * 90_000)
    return connection


@pytest.mark.parametrize("length", ["Content-Length: 99999", "Transfer-Encoding: chunked"])
def test_bodies_of_all_requests_are_bounded(small: Web, loads: list[Any], length: str) -> None:
    with ExitStack() as stack:
        first, _ = (upload(stack, small, length) for _ in range(2))
        until(lambda: sum(load.bytes for load in loads) == 2 * 90_000)
        answer = heard(upload(stack, small, length))
        assert status_of(answer) == 503
        assert b"\r\nretry-after: " in answer.lower()
        assert b'"busy"' in answer
        for path in ("/health", "/ready", "/metrics"):
            answers(small, path)
        assert small.http.get("/api/models").status_code == 200
        first.close()
        until(lambda: small.http.post("/api/jobs", json={"prompt": "x" * 15_000}).status_code == 202)


def test_requests_at_a_time_are_bounded(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_REQUESTS", 3)
    with site.engine.paused(), ExitStack() as stack:
        job = site.submit()
        for _ in range(3):
            connection = stack.enter_context(site.connect())
            connection.sendall(request(site.host, f"GET /api/jobs/{job['id']}/events HTTP/1.1"))
            assert b" 200 " in connection.recv(100)
        for api, path in APIS.items():
            answer = site.http.post(path, json=body_of(api))
            check_refused(api, answer, 503)
            assert int(answer.headers["retry-after"]) > 0
        for path in ("/health", "/ready", "/metrics"):
            answers(site, path)
    until(lambda: site.http.get("/api/models").status_code == 200)


def test_a_body_that_comes_for_too_long(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no silence, and no reason to wait for ever."""
    monkeypatch.setattr(guard, "LONGEST", 0.2)
    head = request(site.host, "POST /api/jobs HTTP/1.1", "Content-Type: application/json", "Content-Length: 999")
    with site.connect() as connection:
        connection.sendall(head)
        connection.settimeout(0.05)
        answer, end = b"", time.monotonic() + 5
        while not answer and time.monotonic() < end:
            with suppress(TimeoutError):
                connection.sendall(b"a")
                answer = connection.recv(1 << 12)
    assert status_of(answer) == 408


@pytest.mark.parametrize("api", ["own", "huggingface"])
def test_lines_of_a_request_and_its_job_have_an_id_in_common(
    site: Web, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "canvax.server")
    assert site.http.post(APIS[api], json=body_of(api)).status_code in (200, 202)
    (job,) = site.engine.accepted
    until(lambda: len(caplog.messages) == 2)
    lines = [json.loads(line) for line in caplog.messages]
    assert [line["job"] for line in lines] == [job.id] * 2
    assert sum(line.get("path") == APIS[api] for line in lines) == 1
