"""The web server in this process, over the stub or a model, and what its clients send and read."""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import uvicorn
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

import canvax
from canvax.images.metadata import metadata_in
from canvax.server.app import Settings, create_app
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import State
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from tests.support.drawing import one_device
from tests.support.server_stub import StubEngine

APIS = {
    "own": "/api/jobs",
    "openai": "/v1/images/generations",
    "a1111": "/sdapi/v1/txt2img",
    "huggingface": "/models/stub",
}
"""Where each API takes a prompt."""


def body_of(api: str, prompt: str = "x") -> dict[str, str]:
    """The least that it takes."""
    return {"inputs" if api == "huggingface" else "prompt": prompt}


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The address of ``app`` while it runs."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="error",
        timeout_graceful_shutdown=5,
        http="h11",
        ws="none",
        timeout_keep_alive=600,  # a client that waits a while must not meet a connection that closes
    )
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
    load: Callable[[str], Any] = lambda name: canvax.load(name, progress=False, mesh=one_device()),
) -> Iterator[tuple[str, ImageEngine]]:
    """The address of a whole server and its engine, by default with the model in the package on one device."""
    metrics = Metrics()
    engine = ImageEngine(["emoji"], settings or EngineSettings(), metrics, load, journal=journal)
    engine.start()
    until(lambda: engine.state is not State.STARTING, 300)
    assert engine.failure is None
    try:
        app = create_app(engine, web or Settings(), state=engine.readiness, metrics=metrics)
        with served(app) as base:
            yield base, engine
    finally:
        engine.close()


def counted(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by its labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {tuple(one.labels.values()): one.value for family in families for one in family.samples if one.name == name}


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
    return seen(client.get(f"/api/jobs/{job['id']}/images/0").content)


def by_a1111(client: httpx.Client, body: dict[str, Any], path: str = "txt2img") -> tuple[np.ndarray, dict[str, Any]]:
    """An image of A1111's API, and its metadata."""
    answer = client.post(f"/sdapi/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return seen(base64.b64decode(answer.json()["images"][0]))


def seen(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    """Pixels and metadata of a file."""
    return np.asarray(Image.open(io.BytesIO(data)), np.int16), metadata_in(io.BytesIO(data), Path("it"))


@dataclass
class Web:
    """A server, its engine, and a client for it.

    Attributes:
        base: its address.
        state: what its engine claims to do; tests change it.
    """

    base: str
    engine: StubEngine
    metrics: Metrics
    http: httpx.Client
    state: State = State.READY

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.base)
        return parts.hostname or "", parts.port or 0

    @property
    def host(self) -> str:
        """As in the header Host."""
        return f"{self.address[0]}:{self.address[1]}"

    def anew(self) -> Web:
        """The server with an engine as new, ready."""
        self.engine.renew(StubEngine(metrics=self.metrics))
        self.state = State.READY
        return self

    def submit(self, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """A job of canvax's own API, as it was accepted."""
        answer = self.http.post("/api/jobs", json={"prompt": "a red apple"} | body, headers=headers)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def done(self, job: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The same job when it is over."""
        end = time.monotonic() + 10
        while True:
            told = self.http.get(f"/api/jobs/{job['id']}", headers=headers).json()
            if told["status"] in ("done", "failed", "cancelled"):
                return told
            assert time.monotonic() < end, told
            time.sleep(0.01)

    def connect(self) -> socket.socket:
        """A bare connection, which waits ten seconds for an answer at most."""
        return socket.create_connection(self.address, timeout=10)

    def raw(self, request: bytes, *, whole: bool = False) -> bytes:
        """The answer to bytes that need not be HTTP; ``whole``: until the server closes or falls silent."""
        with self.connect() as connection:
            with suppress(ConnectionError):  # it need not read all of it
                connection.sendall(request)
            return heard(connection, ended=None if whole else is_answer)


@contextmanager
def web(settings: Settings | None = None, *, pace: float = 0.0) -> Iterator[Web]:
    """A running server."""
    metrics = Metrics()
    engine = StubEngine(pace=pace, metrics=metrics)
    with httpx.Client(timeout=20) as http:
        site = Web("", engine, metrics, http)
        app = create_app(engine, settings or Settings(), state=lambda: site.state, metrics=metrics)
        with served(app) as base:
            site.base, http.base_url = base, httpx.URL(base)
            yield site
            until(lambda: not engine.jobs())


def heard(connection: socket.socket, silence: float = 0.3, ended: Callable[[bytes], bool] | None = None) -> bytes:
    """What a connection says until it closes, has ``ended``, or says nothing for ``silence`` seconds."""
    said = b""
    while not (ended and ended(said)):
        connection.settimeout(silence if said else 10)
        try:
            some = connection.recv(1 << 16)
        except TimeoutError:
            assert said, "no answer"
            return said
        except ConnectionResetError:
            return said
        if not some:
            return said
        said += some
    return said


def is_answer(said: bytes) -> bool:
    """Whether it is an answer of HTTP with all of its body."""
    head, end, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(end and length) and len(body) >= int(length[1])  # type: ignore[index]


def status_of(answer: bytes) -> int:
    """Of a raw answer."""
    assert answer.startswith(b"HTTP/1.1 "), answer[:80]
    return int(answer[9:12])


def request(host: str, line: str, *headers: str, body: bytes = b"") -> bytes:
    """The bytes of a request; ``Content-Length`` is among the headers where it is wanted."""
    return "\r\n".join([line, f"Host: {host}", *headers, "", ""]).encode("latin-1") + body


def form_of(api: str, answer: Any) -> bool:
    """Whether the JSON of a refusal has the form that the API's clients read."""
    match api:
        case "own":
            return set(answer) == {"error"} and set(answer["error"]) == {"message", "code", "param"}
        case "openai":
            return set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
        case "a1111":
            return set(answer) == {"error", "detail", "body", "errors"} and isinstance(answer["detail"], str)
        case _:
            return set(answer) == {"error", "error_type", "param"} and isinstance(answer["error"], str)


def check_refused(api: str, answer: httpx.Response, *statuses: int) -> Any:
    """An answer refuses with one of the statuses, in its API's form, and tells no secret; gives its JSON."""
    assert answer.status_code in statuses, (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert form_of(api, told), told
    assert "Traceback" not in answer.text
    assert " object at 0x" not in answer.text
    assert len(answer.text) < 2000, answer.text
    return told


def picture(kind: str = "PNG", size: tuple[int, int] = (64, 64), colour: Any = "red", **keywords: Any) -> bytes:
    """An image file."""
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, kind, **keywords)
    return out.getvalue()


def some_colours(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """An image of squares."""
    colours = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    return Image.fromarray(np.kron(colours, np.ones((8, 8, 1), np.uint8)))


def b64(image: bytes | Image.Image) -> str:
    """A file, or an image as a PNG, as text."""
    return base64.b64encode(image if isinstance(image, bytes) else as_png(image)).decode()


def as_png(image: Image.Image) -> bytes:
    """The file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def opened(data: str | bytes) -> Image.Image:
    """An image of a file, or of its base64."""
    image = Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))
    image.load()
    return image


def png(*chunks: tuple[bytes, bytes], size: tuple[int, int] = (64, 64), depth: int = 8) -> bytes:
    """A PNG of any chunks behind its header."""
    head = (b"IHDR", struct.pack(">IIBBBBB", *size, depth, 2, 0, 0, 0))
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (head, *chunks, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def events(text: str) -> list[tuple[str, Any]]:
    """Server-sent events: names and data."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event, where it is JSON decoded."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
