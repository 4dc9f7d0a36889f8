"""Requests of each HTTP dialect, what the engine is asked for, and the answers: ``golden/http_*.json``.

A request may set attributes of the stub (``engine``), send a form with files, or bytes (``data``). Images are
described: "IMAGE RGB 64x64 red/blue PNG" has a red and a blue half. ``CANVAX_WRITE_GOLDEN=1`` writes the results anew;
review them as a diff.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor
from starlette.testclient import TestClient

from canvax import Options
from canvax._version import __version__
from canvax.server.app import Settings, create_app
from canvax.server.jobs import JobRequest, Rejected, State
from canvax.server.jobs_api import NewJob
from canvax.server.metrics import Metrics
from tests.support.server_stub import CARD, StubEngine
from tests.support.serving import b64, events_of

FOLDER = Path(__file__).parent / "golden"
DEFAULTS = {field.name: field.default for field in dataclasses.fields(JobRequest)}
TIMES = ("created", "created_at", "job_timestamp")
HEADERS = (
    "content-type", "location", "retry-after", "www-authenticate", "x-canvax-model", "x-canvax-seed", "x-should-retry",
    "allow", "access-control-allow-origin",
)  # fmt: skip
METHODS = "(?:DELETE|GET|HEAD|OPTIONS|POST)"
DESCRIBED = re.compile(r"IMAGE (\w+) (\d+)x(\d+) (\S+) (\w+)")


def file_of(words: re.Match[str]) -> bytes:
    """The file of a description, with a stripe of each colour."""
    mode, stripes, out = words[1], words[4].split("/"), io.BytesIO()
    width, height = int(words[2]), int(words[3])
    image = Image.new(mode, (width, height))
    for i, colour in enumerate(stripes):
        image.paste(ImageColor.getcolor(colour, mode), (i * width // len(stripes), 0, width, height))
    image.save(out, words[5])
    return out.getvalue()


def sent(value: Any) -> Any:
    """A value with images in place of their descriptions."""
    if isinstance(value, Mapping):
        return {name: sent(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [sent(entry) for entry in value]
    return DESCRIBED.sub(lambda words: b64(file_of(words)), value) if isinstance(value, str) else value


def seen(image: Image.Image) -> str:
    """Size and colours of an image."""
    corners = [image.getpixel((x, 0)) for x in (0, image.width - 1)]
    return f"{image.mode} {image.width}x{image.height}, {corners[0]} to {corners[1]}"


def plain(value: Any) -> Any:
    """A value without what differs from run to run, and with images described."""
    if isinstance(value, Image.Image):
        return seen(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(vars(value))
    if isinstance(value, Mapping):
        if "parameters" in value:  # of A1111: what was sent comes back, among fifty names of what was not
            value = value | {"parameters": {name: one for name, one in value["parameters"].items() if one is not None}}
        return {name: 0 if name in TIMES else plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if len(value) > 80 and re.fullmatch(r"(data:[\w/]+;base64,)?[\w+/]+=*", value):
        head, _, data = value.rpartition(",")
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        few = image.convert("RGB").getcolors(4)
        return f"{head or 'base64'}: {image.format} {image.width}x{image.height}, {len(few) if few else 'many'} colours"
    if value.startswith("{"):  # A1111's info is JSON in a text
        return plain(json.loads(value))
    value = re.sub(rf"{METHODS}(, {METHODS})+", lambda methods: ", ".join(sorted(methods[0].split(", "))), value)
    return re.sub(r"[0-9a-f]{32}", "ID", value.replace(f"canvax {__version__}", "canvax VERSION"))


def engine_of(wanted: Mapping[str, Any]) -> StubEngine:
    """A stub that waits until somebody watches, so that the first answer of a job is always the same."""
    engine = StubEngine()
    engine.watched = True
    engine.cards = (dataclasses.replace(CARD, **wanted.get("card", {})),)
    engine.fails = wanted.get("fails")
    if refusal := wanted.get("refusal"):
        engine.refusal = Rejected(refusal["status"], refusal["code"], refusal["message"],
                                  param=refusal.get("param"), retry_after=refusal.get("retry_after"))  # fmt: skip
    return engine


def content_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a client of Python is given for the body of a request."""
    headers = entry.get("headers", {})
    if "files" in entry or "form" in entry:
        files = [(name, (f"../{name}.png", file_of(DESCRIBED.fullmatch(words)) if DESCRIBED.fullmatch(words) else b"x",
                         "text/html")) for name, words in entry.get("files", [])]  # fmt: skip
        return {"files": files or {"": ("", b"")}, "data": sent(entry.get("form", {})), "headers": headers}
    if "data" in entry:
        return {"content": file_of(DESCRIBED.fullmatch(entry["data"])), "headers": headers}
    body = entry.get("body")
    content = body.encode("latin-1") if isinstance(body, str) else None if body is None else json.dumps(sent(body))
    return {"content": content, "headers": {"content-type": "application/json"} | headers}


def told(answer: Any) -> Any:
    """What an answer says."""
    kind = answer.headers.get("content-type", "")
    if kind == "application/json":
        return answer.json()
    if kind.startswith("image/"):
        image = Image.open(io.BytesIO(answer.content))
        return f"{image.format} {image.width}x{image.height}"
    return events_of(answer.text)


def lines(value: Any, margin: str = "") -> str:
    """JSON with as many lines as a diff of it needs: what fits into one has one."""
    text = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or len(margin + text) <= 120:
        return text
    inner = margin + " "
    if isinstance(value, dict):
        parts, ends = [f"{json.dumps(name)}: {lines(entry, inner)}" for name, entry in value.items()], "{}"
    else:
        parts, ends = [lines(entry, inner) for entry in value], "[]"
    return ends[0] + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{margin}{ends[1]}"


def replayed(http: TestClient, engine: StubEngine, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one request to a server with an engine as new."""
    engine.renew(engine_of(entry.get("engine", {})))
    answer = http.request(entry.get("method", "POST"), entry["path"], **content_of(entry))
    for job in engine.jobs():
        job.cancel()
    asked = [
        {
            name: plain(value)
            for name, value in vars(request).items()
            if name != "awaited" and value not in (DEFAULTS.get(name), {})
        }
        for request in engine.asks
    ]
    for request in engine.asks:
        Options(**request.options)  # there are no others
    headers = {name: plain(answer.headers[name]) for name in HEADERS if name in answer.headers}
    return {"asked": asked, "status": answer.status_code, "headers": headers, "answer": plain(told(answer))}


@pytest.mark.parametrize("dialect", ["own", "openai", "a1111", "huggingface"])
def test_dialect(dialect: str) -> None:
    file = FOLDER / f"http_{dialect}.json"
    requests = [entry["request"] for entry in json.loads(file.read_text())]
    engine = StubEngine()
    app = create_app(engine, Settings(), state=lambda: State.READY, metrics=Metrics())
    with TestClient(app, base_url="http://localhost") as http:
        results = [{"request": entry} | json.loads(json.dumps(replayed(http, engine, entry))) for entry in requests]
    if os.environ.get("CANVAX_WRITE_GOLDEN"):
        file.write_text(lines(results) + "\n")
    for entry, result in zip(json.loads(file.read_text()), results, strict=True):
        assert result == entry, entry["request"]


def test_every_field_of_a_job_is_sent() -> None:
    (entry, *_) = json.loads((FOLDER / "http_own.json").read_text())
    assert entry["request"]["body"].keys() == set(NewJob.__struct_fields__)
