"""A server on a free port, in a thread, for tests of what goes over the wire."""

from __future__ import annotations

import base64
import inspect
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import uvicorn
from PIL import Image
from starlette.types import ASGIApp, Receive, Scope, Send

import canvax
from canvax.images.metadata import metadata_in
from canvax.server.app import Settings, create_app
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import State
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics


class Named:
    """Takes the header x-client for the id of an API key, as the server's own checks would find it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            scope.setdefault("state", {})["client"] = headers.get(b"x-client", b"").decode()
        await self.app(scope, receive, send)


@contextmanager
def served(app: ASGIApp, *, named: bool = True) -> Iterator[str]:
    """The address of ``app`` while it runs; ``named``: behind ``Named``."""
    config = uvicorn.Config(
        Named(app) if named else app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5,
        http="h11", ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until ``true()`` holds; fail with its source after so many ``seconds``."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {inspect.getsource(true).strip()}"
        time.sleep(0.01)


@contextmanager
def held(engine: ImageEngine) -> Iterator[None]:
    """Keep an engine between two turns: jobs submitted meanwhile wait side by side, however fast it is."""
    go_on, turn = threading.Event(), engine._turn

    def wait_and_turn() -> None:
        go_on.wait()
        turn()

    engine._turn = wait_and_turn
    try:
        yield
    finally:
        engine._turn = turn
        go_on.set()


@contextmanager
def generating(
    settings: EngineSettings | None = None,
    web: Settings | None = None,
    journal: Journal | None = None,
    load: Callable[[str], Any] = lambda name: canvax.load(name, progress=False),
) -> Iterator[tuple[str, ImageEngine]]:
    """The address of a whole server and its engine, by default with the model in the package."""
    metrics = Metrics()
    engine = ImageEngine(
        ["emoji"], settings or EngineSettings(), metrics, load, journal=journal,
    )  # fmt: skip
    engine.start()
    until(lambda: engine.state is not State.STARTING, 300)
    assert engine.failure is None
    try:
        app = create_app(engine, web or Settings(), state=engine.readiness, metrics=metrics)
        with served(app, named=False) as base:
            yield base, engine
    finally:
        engine.close()


@contextmanager
def asked(*arguments: Any, **named: Any) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    """A client of the server that ``generating`` starts, and its engine."""
    with generating(*arguments, **named) as (base, engine), httpx.Client(base_url=base, timeout=300) as client:
        yield client, engine


def by_job(client: httpx.Client, body: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """An image of canvax's API, and its metadata."""
    answer = client.post("/api/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    with client.stream("GET", f"/api/jobs/{job['id']}/events") as events:
        assert any("event: done" in line for line in events.iter_lines()), client.get(f"/api/jobs/{job['id']}").text
    return _seen(client.get(f"/api/jobs/{job['id']}/images/0").content)


def by_a1111(client: httpx.Client, body: dict[str, Any], path: str = "txt2img") -> tuple[np.ndarray, dict[str, Any]]:
    """An image of A1111's API, and its metadata."""
    answer = client.post(f"/sdapi/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return _seen(base64.b64decode(answer.json()["images"][0]))


def _seen(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    return np.asarray(Image.open(io.BytesIO(data)), np.int16), metadata_in(io.BytesIO(data), Path("it"))
