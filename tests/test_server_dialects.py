"""Each HTTP dialect's requests, what the engine is asked for, and the answers: ``golden/http_*.json``.

``CANVAX_WRITE_GOLDEN=1`` writes the results anew; review them as a diff.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from canvax._version import __version__
from canvax.server.app import Settings, create_app
from canvax.server.jobs import JobRequest, State
from canvax.server.metrics import Metrics
from tests.support.server_stub import StubEngine
from tests.support.serving import until

FOLDER = Path(__file__).parent / "golden"
DEFAULTS = {field.name: field.default for field in fields(JobRequest)}
TIMES = ("created", "job_timestamp")
HEADERS = ("content-type", "location", "retry-after", "www-authenticate", "x-canvax-model", "x-canvax-seed")


def plain(value: Any) -> Any:
    """A value without what differs from run to run; images become their kind and size."""
    if isinstance(value, Mapping):
        return {name: 0 if name in TIMES else plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.width}x{value.height}"
    if isinstance(value, str) and len(value) > 80 and re.fullmatch(r"(data:[\w/]+;base64,)?[\w+/]+=*", value):
        head, _, data = value.rpartition(",")
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        return f"{head or 'base64'}: {image.format} {image.width}x{image.height}"
    if isinstance(value, str) and value.startswith("{"):  # A1111's info is JSON in a text
        return plain(json.loads(value))
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{32}", "ID", value.replace(f"canvax {__version__}", "canvax VERSION"))
    return value


def replayed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one request to a new server."""
    engine = StubEngine()
    app = create_app(engine, Settings(), state=lambda: State.READY, metrics=Metrics())
    body = entry.get("body")
    content = body.encode("latin-1") if isinstance(body, str) else None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | entry.get("headers", {})
    http = TestClient(app, base_url="http://localhost")
    answer = http.request(entry.get("method", "POST"), entry["path"], content=content, headers=headers)
    until(lambda: not engine.jobs())
    kind = answer.headers.get("content-type", "")
    sent = answer.json() if kind == "application/json" else ""
    if kind.startswith("image/"):
        image = Image.open(io.BytesIO(answer.content))
        sent = f"{image.format} {image.width}x{image.height}"
    asked = [
        {name: plain(value) for name, value in vars(request).items() if value not in (DEFAULTS.get(name), {})}
        for request in engine.asks
    ]
    headers = {name: plain(answer.headers[name]) for name in HEADERS if name in answer.headers}
    return {"asked": asked, "status": answer.status_code, "headers": headers, "answer": plain(sent)}


@pytest.mark.parametrize("dialect", ["openai", "a1111", "huggingface"])
def test_dialect(dialect: str) -> None:
    file = FOLDER / f"http_{dialect}.json"
    entries = json.loads(file.read_text())
    results = [{"request": entry["request"], **replayed(entry["request"])} for entry in entries]
    text = "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in results) + "\n]\n"
    if os.environ.get("CANVAX_WRITE_GOLDEN"):
        file.write_text(text)
    for entry, result in zip(json.loads(file.read_text()), json.loads(text), strict=True):
        assert result == entry, entry["request"]
