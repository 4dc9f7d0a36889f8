"""The whole web server over the stub: every API, the page and the guard, and raw connections to it."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
from PIL import Image

from canvax.server.app import Settings, create_app
from canvax.server.jobs import State
from canvax.server.metrics import Metrics
from tests.support.server_stub import StubEngine
from tests.support.serving import served, until

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

    def raw(self, request: bytes, silence: float = 0.3) -> bytes:
        """All that is answered to bytes that need not be HTTP, until the server closes or falls silent."""
        with self.connect() as connection:
            with suppress(ConnectionError):  # it need not read all of it
                connection.sendall(request)
            return heard(connection, silence)


@contextmanager
def web(settings: Settings | None = None, *, pace: float = 0.0) -> Iterator[Web]:
    """A running server."""
    metrics = Metrics()
    engine = StubEngine(pace=pace, metrics=metrics)
    with httpx.Client(timeout=20) as http:
        site = Web("", engine, metrics, http)
        app = create_app(engine, settings or Settings(), state=lambda: site.state, metrics=metrics)
        with served(app, named=False) as base:
            site.base, http.base_url = base, httpx.URL(base)
            yield site
            until(lambda: not engine.jobs())


def heard(connection: socket.socket, silence: float = 0.3, end: bytes | None = None) -> bytes:
    """What a connection says until it closes, says ``end``, or says nothing for ``silence`` seconds."""
    said = b""
    while end is None or not said.endswith(end):
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


def b64(data: bytes) -> str:
    """Base64 as text."""
    return base64.b64encode(data).decode()


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
