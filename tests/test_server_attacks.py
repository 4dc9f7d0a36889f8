"""Attacks on the web server. Each is answered with a refusal in the form of its API, gets nothing, and others are
served afterwards.

The server is the whole one, with the stub in place of a model; what the model's own checks must stop is tried on them.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import resource
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from PIL import Image

from canvax.images.metadata import save_image
from canvax.server import a1111, huggingface, jobs_api, openai
from canvax.server import keys as keys_module
from canvax.server.answers import _decoded
from canvax.server.app import Settings
from canvax.server.guard import LARGEST_QUESTION
from canvax.server.jobs import JobRequest, Rejected
from canvax.server.keys import Keys
from canvax.server.work import check
from tests.support.server_stub import StubEngine
from tests.support.serving import (
    APIS,
    Web,
    b64,
    check_refused,
    heard,
    picture,
    png,
    request,
    status_of,
    until,
    web,
)
from tests.support.timing import processor_seconds

JSON = {"Content-Type": "application/json"}
SECRET = "alices-long-secret"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def open_site() -> Iterator[Web]:
    with web() as site:
        yield site


@pytest.fixture(scope="module")
def closed_site() -> Iterator[Web]:
    import hashlib

    known = {name: hashlib.sha256(f"{name}s-long-secret".encode()).digest() for name in ("alice", "bob", "carol")}
    with web(Settings(keys=Keys(known))) as site:
        yield site


def fresh(site: Web) -> Iterator[Web]:
    """The server with an engine as new; it must answer afterwards."""
    yield site.anew()
    assert site.http.get("/health", timeout=2).json() == {"status": "ok"}


@pytest.fixture
def site(open_site: Web) -> Iterator[Web]:
    yield from fresh(open_site)


@pytest.fixture
def closed(closed_site: Web) -> Iterator[Web]:
    """One that asks for keys."""
    yield from fresh(closed_site)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# Bodies of JSON. All APIs read them with the same function.

BODIES: dict[str, bytes] = {
    "deep options": f'{{"prompt": "x", "options": {{"a": {nested(100_000)}}}, "b": 1}}'.encode(),
    "NaN": b'{"prompt": "x", "seed": NaN}',
    "a number of a million digits": f'{{"prompt": "x", "seed": {"9" * 100_000}}}'.encode() + b"]",
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xc0\xaf"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "two bodies": b'{"prompt": "x"}' * 2,
    "null": b"null",
}


@pytest.mark.parametrize("attack", BODIES)
def test_json(site: Web, attack: str) -> None:
    check_refused("own", site.http.post("/api/jobs", content=BODIES[attack], headers=JSON), 400)
    assert site.engine.asks == []


def test_numbers_that_no_json_can_hold_do_not_come_back(site: Web) -> None:
    """What is given back to the client may hold numbers and depths that were read and cannot be written."""
    for value in (str(10**40), nested(200), nested(900), '{"a":' * 480 + "0" + "}" * 480):
        content = f'{{"prompt": "x", "override_settings": {{"a": {value}}}}}'.encode()
        answer = site.http.post("/sdapi/v1/txt2img", content=content, headers=JSON)
        if answer.status_code != 200:
            check_refused("a1111", answer, 422)
        for path in ("/api/jobs", "/v1/images/generations", "/hf"):
            body = f'{{"prompt": "x", "inputs": "x", "options": {{"a": {value}}}, "parameters": {{}}}}'.encode()
            assert site.http.post(path, content=body, headers=JSON).status_code in (200, 202, 400, 422)


ODD = (
    "null", "true", "-1", "7", "0.5", "1e308", "1e309", str(10**40), str(10**400), '""', '" "', '"20"', '"nan"', '"x"',
    f'"{"y" * 40_000}"', "[]", "[1]", '["x"]', "[[null]]", "{}", '{"a": 1}', '{"a": {"b": []}}', nested(300), "NaN",
)  # fmt: skip
RECORDS = {
    operation.body: api
    for api in (jobs_api, openai, a1111, huggingface)
    for path in api.routes(StubEngine())
    for operation in path.operations.values()
    if operation.body not in (None, bytes)
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_with_any_value(kind: type[msgspec.Struct]) -> None:
    """What is refused is named, and its value told, in a line."""
    fields = msgspec.structs.fields(kind)
    least = {one.name: ["x"] if one.name == "init_images" else "x" for one in fields if one.required}
    for name, value in itertools.product((one.name for one in fields), ODD):
        why = None
        try:
            _decoded(json.dumps(least | {name: "here"}).replace('"here"', value).encode(), kind, 400, strict=True)
        except Rejected as refused:
            why = refused
        if why and value == "NaN":
            assert f'"{name}": NaN' in why.message
        elif why:
            assert len(why.message) < 400
            assert (why.param or "").split(".")[0] == name, value
            assert re.match(rf"{name}(\S*=|: number out of range|\S* is (missing|not known))", why.message), value


def test_a_hundred_thousand_fields(site: Web) -> None:
    content = json.dumps({"prompt": "x"} | {f"f{i}": i for i in range(10_000)}).encode()
    began = time.process_time()
    check_refused("own", site.http.post("/api/jobs", content=content, headers=JSON), 400)
    assert site.http.post("/sdapi/v1/txt2img", content=content, headers=JSON).status_code == 200
    assert time.process_time() - began < 3


CODE_OPTIONS: list[dict[str, Any]] = [{"__class__": "x"}, {"timesteps": list(range(10_000))}, {"\ud800": 1}]
"""``golden/errors.txt`` has others."""


@pytest.fixture(scope="module")
def model() -> Any:
    import canvax

    return canvax.load("emoji", progress=False).model


@pytest.mark.parametrize("options", CODE_OPTIONS, ids=lambda options: next(iter(options))[:20])
def test_options_that_name_code_or_make_no_sense(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as refused:
        check(JobRequest("a red apple", options=options), "emoji", model)
    assert refused.value.status == 400
    assert len(refused.value.message) < 1000
    refused.value.message.encode()


PROMPTS = {
    "brackets": "(" * 16_000, "emoji": "😀" * 16_000, "zero": "a\0b", "a surrogate": "\ud800", "AND": "a AND " * 2600,
    "plus": "a" + "+" * 15_900, "weights": "(a:1e308)", "too long": "x" * 16_001, "html": "<script>alert(1)</script>",
    "schedule": "[a:b:0.5]" * 1700,
}  # fmt: skip


@pytest.mark.parametrize("syntax", ["plain", "a1111", "compel", "comfy"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(model: Any, name: str, syntax: str) -> None:
    why: Rejected | None = None

    def ask() -> None:
        nonlocal why
        try:
            check(JobRequest(PROMPTS[name], negative_prompt="x", options={"prompt_syntax": syntax}), "emoji", model)
        except Rejected as refused:
            why = refused

    assert processor_seconds(ask) < 1.5
    if why:
        assert (why.status, why.param) == (400, "prompt")
        assert len(why.message.encode()) < 2000


# Bodies that are too large, or lie about it.

LIMITS = {"openai": LARGEST_QUESTION, "own": 32 * MEGABYTE}


@pytest.mark.parametrize("api", LIMITS)
def test_a_body_that_says_it_is_too_large(site: Web, api: str) -> None:
    for length in (LIMITS[api] + 1, 10**15, 10**19):
        head = request(site.host, f"POST {APIS[api]} HTTP/1.1", "Content-Type: application/json",
                       f"Content-Length: {length}", "Expect: 100-continue")  # fmt: skip
        answer = site.raw(head)  # before a byte of it was sent
        assert status_of(answer) == 413
        assert b"100 Continue" not in answer
        assert b'"' in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(("key", "status", "client"), [(SECRET, 413, "alice"), ("wrong", 401, "")])
def test_the_key_is_checked_before_the_size(
    closed: Web, key: str, status: int, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So the log has the client of a body that is too large. Without a key nothing of the body is read either."""
    caplog.set_level("INFO", "canvax.server")
    head = "POST /api/jobs HTTP/1.1", "Content-Length: 1000000000", "Expect: 100-continue", f"X-Request-Id: of-{key}"
    answer = closed.raw(request(closed.host, *head, f"Authorization: Bearer {key}"))
    assert status_of(answer) == status
    assert b"100 Continue" not in answer

    def lines() -> list[dict[str, Any]]:
        return [line for line in map(json.loads, caplog.messages) if line.get("id") == f"of-{key}"]

    until(lines)
    assert [(line["status"], line["client"]) for line in lines()] == [(status, client)]


@pytest.mark.parametrize("api", LIMITS)
def test_a_body_that_does_not_say_that_it_is_too_large(site: Web, api: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(2 * LIMITS[api] // MEGABYTE + 2):
            yield b" " * MEGABYTE

    check_refused(api, site.http.post(APIS[api], content=endless(), headers=JSON), 413)


@pytest.mark.parametrize("path", ["/api/inspect", "/v1/images/edits", "/sdapi/v1/png-info"])
def test_a_file_that_does_not_say_that_it_is_too_large(site: Web, path: str) -> None:
    kind = "application/json" if "sdapi" in path else "multipart/form-data; boundary=x"
    api = {"/api/inspect": "own", "/v1/images/edits": "openai"}.get(path, "a1111")
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'

    def endless() -> Iterator[bytes]:
        yield head
        for _ in range(40):
            yield bytes(MEGABYTE)

    check_refused(api, site.http.post(path, content=endless(), headers={"Content-Type": kind}), 413)


@pytest.mark.weekly  # of h11
def test_a_body_that_is_longer_than_it_says_or_never_comes(site: Web) -> None:
    head = "POST /api/jobs HTTP/1.1", "Content-Type: application/json"
    answer = site.raw(request(site.host, *head, "Content-Length: 2", body=b'{}{"prompt": "smuggled"}'))
    assert status_of(answer) == 400
    for end in (False, True):
        with site.connect() as connection:
            connection.sendall(request(site.host, *head, "Content-Length: 1000", body=b'{"prompt": "x"}'))
            if end:
                connection.shutdown(socket.SHUT_WR)
                assert heard(connection)[9:12] in (b"400", b"")
    assert site.engine.asks == []


def test_compressed_bodies(site: Web) -> None:
    bomb = zlib.compress(b" " * (50 * MEGABYTE))
    for coding in ("gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP", "x"):
        answer = site.http.post("/api/jobs", content=bomb, headers=JSON | {"Content-Encoding": coding})
        check_refused("own", answer, 415)


# Pages of other sites, and other names of this one.

FOREIGN = {
    "another site": {"Origin": "https://evil.example"},
    "a page without a site": {"Origin": "null"},
    "a longer name": {"Origin": "http://HOST.evil.example"},
    "a name that is not closed": {"Origin": "http://[::1"},
    "a browser that says so": {"Sec-Fetch-Site": "cross-site"},
}


@pytest.mark.parametrize("attack", FOREIGN)
def test_pages_of_other_sites(site: Web, attack: str) -> None:
    headers = {name: value.replace("HOST", site.host) for name, value in FOREIGN[attack].items()}
    answer = site.http.post("/api/jobs", json={"prompt": "x"}, headers=headers)
    check_refused("own", answer, 403)
    assert "access-control-allow-origin" not in answer.headers
    for method, path in (("POST", "/sdapi/v1/interrupt"), ("DELETE", "/api/jobs/x"), ("POST", "/"), ("PUT", "/x")):
        assert site.http.request(method, path, headers=headers).status_code == 403
    assert site.engine.asks == []


def test_asking_first_gives_other_sites_nothing(site: Web) -> None:
    for origin in ("https://evil.example", "null", "http://localhost", f"http://{site.host}.evil.example"):
        for method in ("POST", "DELETE", "GET", "PATCH", "*"):
            asked = {"Origin": origin, "Access-Control-Request-Method": method}
            asked |= {"Access-Control-Request-Private-Network": "true"}
            answer = site.http.options("/api/jobs", headers=asked)
            assert answer.status_code in (204, 403)
            assert not [name for name in answer.headers if name.startswith("access-control")]


HOSTS = [
    "evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil", "127.1", "2130706433", "0.0.0.0:PORT",
    "[::ffff:127.0.0.1]:PORT", "", "169.254.169.254",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_others(site: Web, host: str) -> None:
    name = host.replace("PORT", str(site.address[1]))
    for path in ("/", "/api/models", "/metrics", "/static/main.js"):
        answer = site.raw(request(name, f"GET {path} HTTP/1.1", "Connection: close"))
        assert status_of(answer) in (421, 400), path
        assert b"canvax_" not in answer
        assert b"<html" not in answer


@pytest.mark.parametrize(("path", "answer"), [("/health", '{"status":"ok"}'), ("/ready", '{"status":"ready"}')])
def test_probes_of_any_host(site: Web, path: str, answer: str) -> None:
    """A kubelet sends the address of the pod. The answer is the same for everyone."""
    assert site.raw(request("10.1.2.3:7860", f"GET {path} HTTP/1.1", "Connection: close")).endswith(answer.encode())


RAW_HOSTS = {
    "no host in an old request": (b"GET /api/models HTTP/1.0\r\n\r\n", (421,)),
    "two hosts": (b"GET /api/models HTTP/1.1\r\nHost: HOST\r\nHost: evil.example\r\n\r\n", (400,)),
    "the whole address": (b"GET http://evil.example/api/models HTTP/1.1\r\nHost: HOST\r\n\r\n", (404, 421)),
    "a right address, another host": (b"GET http://HOST/api/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", (421,)),
    "two slashes": (b"GET //evil.example/%2f.. HTTP/1.1\r\nHost: HOST\r\n\r\n", (404,)),
}


@pytest.mark.parametrize("attack", RAW_HOSTS)
def test_requests_for_others(site: Web, attack: str) -> None:
    content, statuses = RAW_HOSTS[attack]
    answer = site.raw(content.replace(b"HOST", site.host.encode()))
    assert status_of(answer) in statuses
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"location" not in head
    assert b"a=b" not in answer
    assert b'"models"' not in answer


def test_names_in_other_headers_change_nothing(site: Web) -> None:
    others = {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https", "Forwarded": "host=evil.example",
              "X-Original-URL": "/metrics", "X-Rewrite-URL": "/metrics", "X-HTTP-Method-Override": "DELETE",
              "X-Forwarded-For": "1.2.3.4", "X-Forwarded-Prefix": "/evil"}  # fmt: skip
    answer = site.http.post("/api/jobs", json={"prompt": "x"}, headers=others)
    assert answer.status_code == 202
    assert answer.headers["location"].startswith("/api/jobs/")
    assert "evil" not in str(answer.headers) + answer.text
    forwarded = request("evil.example", "GET /api/models HTTP/1.1", f"X-Forwarded-Host: {site.host}")
    assert status_of(site.raw(forwarded)) == 421


# Ways out of folders and into other people's things.

UP = ["..", "%2e%2e", "..%00", "%252e%252e", "%c0%ae%c0%ae", "%5c..%5c"]  # fmt: skip
TARGETS = [
    "/static/{up}/app.py", "/static/{up}%2fapp.py", "/static//etc/passwd", "/static/index.html%00.js",
    "/{up}/{up}/{up}/etc/passwd", "/models/{up}/{up}/etc/passwd", "/api/jobs/{up}/{up}/etc/passwd",
    "/api/jobs/x/images/{up}", "/api/{up}/metrics", "/static/main.js/{up}/{up}/app.py",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_ways_out_of_folders(site: Web, target: str) -> None:
    for up in UP if "{up}" in target else [""]:
        answer = site.raw(request(site.host, f"GET {target.format(up=up)} HTTP/1.1", "Connection: close"))
        assert status_of(answer) in (404, 405), (target, up)
        assert answer.partition(b"\r\n\r\n")[2].startswith(b'{"'), answer
        assert b"root:" not in answer
        assert b"import " not in answer
        assert b"location:" not in answer.lower()


def test_models_are_no_paths(site: Web, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    names = [str(tmp_path), "/etc/passwd", "../../etc/passwd", "file:///etc/passwd", "owner/name", "http://evil.example/m",
             "\\\\evil\\share", "~", ".", "stub/../stub", "stub\0", "CON", "x" * 299]  # fmt: skip
    for name in names:
        check_refused("own", site.http.post("/api/jobs", json={"prompt": "x", "model": name}), 404)
        answer = site.http.post("/sdapi/v1/options", json={"sd_model_checkpoint": name[:200]})
        check_refused("a1111", answer, 404)
    body = {"prompt": "x", "override_settings": {"sd_model_checkpoint": str(tmp_path)}}
    check_refused("a1111", site.http.post("/sdapi/v1/txt2img", json=body), 404)
    assert site.http.post("/v1/images/generations", json={"prompt": "x", "model": str(tmp_path)}).status_code == 200
    assert site.engine.asks[-1].model == "stub"  # OpenAI's clients name OpenAI's models
    for path in ("/models//etc/passwd", "/models/%2e%2e%2fstub", "/models/owner/name", "/hf/file:%2f%2f%2fetc%2f"):
        content = b'{"inputs": "x"}'
        head = [f"POST {path} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(content)}"]
        assert status_of(site.raw(request(site.host, *head, body=content))) == 404


def test_jobs_of_others_cannot_be_guessed_or_seen(closed: Web) -> None:
    alice, bob = ({"X-API-Key": f"{name}s-long-secret"} for name in ("alice", "bob"))
    jobs = [closed.submit(alice, seed=1)["id"] for _ in range(20)]
    assert len(set(jobs)) == 20
    assert len({job[:8] for job in jobs}) == 20
    for name in (jobs[0], jobs[0].upper(), f"{jobs[0]}%00", f"{jobs[0]}%20", f"../jobs/{jobs[0]}", "*", "' OR 1=1 --"):
        for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/images/0")):
            check_refused("own", closed.http.request(method, f"/api/jobs/{name}{end}", headers=bob), 404)
            check_refused("own", closed.http.request(method, f"/api/jobs/{name}{end}"), 401)
    told = closed.http.get("/sdapi/v1/progress", headers=bob).json()
    assert told["state"]["job"] == ""
    mine = closed.done({"id": jobs[0]}, alice)
    for path in (f"/api/jobs/{jobs[0]}/events", mine["images"][0]["url"]):
        assert closed.http.get(path, headers=alice).status_code == 200


def test_a_neighbour_neither_sees_nor_stops_what_is_drawn(closed: Web) -> None:
    alice, bob = ({"X-API-Key": f"{name}s-long-secret"} for name in ("alice", "bob"))
    with ThreadPoolExecutor() as pool:
        with closed.engine.paused():
            asked = pool.submit(closed.http.post, "/sdapi/v1/txt2img", json={"prompt": "x"}, headers=alice)
            until(closed.engine.jobs)
            for headers in (bob, bob | {"X-Forwarded-For": "127.0.0.1"}):
                assert closed.http.get("/sdapi/v1/progress", headers=headers).json()["state"]["job_count"] == 0
                assert closed.http.post("/sdapi/v1/interrupt", headers=headers).status_code == 200
        assert len(asked.result(5).json()["images"]) == 1


# Bytes that servers and proxies read differently.

SMUGGLED = b"POST /api/jobs HTTP/1.1\r\nHost: HOST\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
SMUGGLED += b'{"prompt": "s"}'
HEAD = b"POST /api/jobs HTTP/1.1\r\nHost: HOST\r\nContent-Type: application/json\r\n"
SMUGGLING = {
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
    "a length in other digits": HEAD + b"Content-Length: \xb2\r\n\r\n" + SMUGGLED,
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a bare return": HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + SMUGGLED,
    "a header of a megabyte": HEAD + b"X: " + b"a" * MEGABYTE + b"\r\n\r\n",
    "a hundred thousand headers": HEAD + b"X: a\r\n" * 100_000 + b"\r\n",
}


@pytest.mark.parametrize(
    "attack",
    [attack if "length" in attack else pytest.param(attack, marks=pytest.mark.weekly) for attack in SMUGGLING],
)  # h11 refuses the others
def test_smuggling(site: Web, attack: str) -> None:
    answer = site.raw(SMUGGLING[attack].replace(b"HOST", site.host.encode()), whole=True)
    assert status_of(answer) in (400, 431, 501, 505), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1, answer  # nothing behind it was taken for a request
    assert site.engine.asks == []


def test_no_header_of_an_answer_can_be_written(site: Web) -> None:
    for value in (
        "a\r\nSet-Cookie: x=1",
        "a%0d%0aSet-Cookie: x=1",
        "a\rSet-Cookie: x=1",
        "a\nSet-Cookie: x=1",
        "é\u2028",
    ):
        lines = "POST /api/jobs HTTP/1.1", "Content-Length: 0", "Connection: close"
        raw = request(site.host, *lines).removesuffix(b"\r\n") + f"x-request-id: {value}\r\n\r\n".encode()
        answer = site.raw(raw)
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert not re.search(rb"^set-cookie", head, re.MULTILINE), value
        assert status_of(answer) in (400, 415)
    for path in ("/v1/models/a%0d%0aSet-Cookie:%20x=1", "/static/a%0d%0aX:%201", "/nothing%0d%0aX:%201"):
        answer = site.http.get(path)
        assert answer.status_code == 404
        assert not {"set-cookie", "x"} & answer.headers.keys()


# Files that are no images, or want to be more.


def animated(kind: str) -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(40)]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=10)
    return out.getvalue()


def saved(kind: str, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, kind)
    return out.getvalue()


def jpeg_of(width: int, height: int) -> bytes:
    """One that claims a size."""
    data = bytearray(picture("JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_of(width: int, height: int) -> bytes:
    """One whose canvas claims a size, in its extended form."""
    plain = picture("WEBP", lossless=True)[12:]
    head = b"VP8X" + struct.pack("<I", 10) + bytes([0x02, 0, 0, 0]) + (width - 1).to_bytes(3, "little")
    body = b"WEBP" + head + (height - 1).to_bytes(3, "little") + plain
    return b"RIFF" + struct.pack("<I", len(body)) + body


@cache
def bomb() -> bytes:
    """What unpacks to a thousand times as much."""
    return zlib.compress(bytes(200 * MEGABYTE), 9)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://HOST/x.png"/><script>x</script></svg>'
FILES: dict[str, Callable[[], bytes]] = {
    "30,000 x 30,000": lambda: png((b"IDAT", zlib.compress(bytes(10 * MEGABYTE))), size=(30_000, 30_000)),
    "no width": lambda: png((b"IDAT", zlib.compress(b"\0")), size=(0, 64)),
    "fewer pixels than it says": lambda: png((b"IDAT", zlib.compress(b"\0" * 100)), size=(4000, 4000)),
    "a text that unpacks to more": lambda: png((b"zTXt", b"parameters\0\0" + bomb()), (b"IDAT", b"")),
    "a profile that does": lambda: png((b"iCCP", b"icc\0\0" + bomb()), (b"IDAT", b"")),
    "a moving PNG": lambda: animated("PNG"), "half a PNG": lambda: picture()[:50],
    "a large JPEG": lambda: jpeg_of(65_500, 65_500),
    "a WebP with a canvas of terabytes": lambda: webp_of(1 << 24, 1 << 24), "a GIF": lambda: saved("GIF"),
    "an SVG": lambda: SVG, "the colours of a printer": lambda: saved("JPEG", "CMYK"),
}  # fmt: skip

Sent = Callable[[Web, bytes], httpx.Response]


def sent_as_form(site: Web, data: bytes) -> httpx.Response:
    files = {"image": ("a.png", data, "image/png")}
    return site.http.post("/v1/images/edits", data={"prompt": "x"}, files=files)


FIELDS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "image": ("own", "/api/jobs", lambda text: {"prompt": "x", "image": text}),
    "mask": ("own", "/api/jobs", lambda text: {"prompt": "x", "image": b64(picture()), "mask": text}),
    "init_images": ("a1111", "/sdapi/v1/img2img", lambda text: {"init_images": [text]}),
    "A1111's mask": ("a1111", "/sdapi/v1/img2img", lambda text: {"init_images": [b64(picture())], "mask": text}),
    "png-info": ("a1111", "/sdapi/v1/png-info", lambda text: {"image": text}),
    "inputs": ("huggingface", "/hf", lambda text: {"inputs": text, "parameters": {"prompt": "x"}}),
}


def in_field(path: str, body: Callable[[str], Any]) -> Sent:
    """Send a file as text."""
    return lambda site, data: site.http.post(path, json=body(b64(data)))


DOORS: dict[str, tuple[str, Sent]] = {
    **{name: (api, in_field(path, body)) for name, (api, path, body) in FIELDS.items()},
    "the body": ("huggingface", lambda site, data: site.http.post(
        "/", content=data, headers={"Content-Type": "image/png"})),
    "a form": ("openai", sent_as_form),
    "inspect": ("own", lambda site, data: site.http.post("/api/inspect", content=data)),
}  # fmt: skip


def memory() -> int:
    """The most that this process ever used, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize(
    ("attack", "doors"),
    [("an SVG", [*DOORS]), *((attack, ["image"]) for attack in FILES),
     *(pytest.param(attack, [*DOORS], marks=pytest.mark.weekly) for attack in FILES)],
)  # fmt: skip
def test_files(site: Web, attack: str, doors: list[str]) -> None:
    """Each at one door, and one at each: all open them with the same function."""
    data, before = FILES[attack](), memory()
    for door in doors:
        api, send = DOORS[door]
        began = time.process_time()
        answer = send(site, data)
        assert time.process_time() - began < 5, door
        if door == "png-info" and answer.status_code == 200:  # it looks for texts alone, and finds none
            assert not answer.json()["info"], door
        else:
            check_refused(api, answer, 400, 422)
            assert "0x" not in answer.text
    assert site.engine.asks == []
    assert memory() - before < 400 * MEGABYTE


def test_pixels_that_unpack_to_more_than_the_image_are_left(site: Web) -> None:
    before = memory()
    site.done(site.submit(image=b64(png((b"IDAT", bomb()), size=(2000, 2000))), width=64, height=64))
    assert memory() - before < 100 * MEGABYTE


def test_an_image_that_is_something_else_as_well(site: Web) -> None:
    """Only pixels get in, and none of the bytes come out again."""
    payload = b"<?php system($_GET[0]); ?><script>alert(1)</script>"
    pixels = b"IDAT", zlib.compress(bytes(64 * (64 * 3 + 1)))
    for data in (picture() + payload, picture("JPEG", comment=payload), png((b"tEXt", b"Comment\0" + payload), pixels)):
        job = site.done(site.submit(image=b64(data)))
        image = site.engine.asks[-1].image
        assert image is not None
        assert type(image) is Image.Image
        assert payload.decode() not in str(image.info)
        assert payload not in site.http.get(job["images"][0]["url"]).content


SETTINGS = {
    "a list": "[1, 2]", "a grid of lists": '{"grid": [[]]}',
    "another that is a list": '{"other": [1, 2], "prompt": "x"}',
    "a number beyond 64 bits": '{"seed": ' + "9" * 100 + "}",
    "half a surrogate pair": '{"prompt": "\\ud800", "\\udfff": 1}', "deeper lists": '{"prompt": ' + nested(950) + "}",
    "NaN": '{"seed": NaN, "guidance_scale": Infinity}',
    "another kind of value": '{"prompt": {"a": [1]}, "seed": "x", "options": [1], "width": null}',
}  # fmt: skip


@contextmanager
def deep_lists() -> Iterator[None]:
    """The stack of a test is deeper than that of a client, and both read lists within it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 1000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("attack", SETTINGS)
def test_settings_in_images(site: Web, attack: str) -> None:
    text = SETTINGS[attack].encode()
    for data in (
        png((b"tEXt", b"canvax\0" + text)),
        png((b"iTXt", b"canvax\0\0\0\0\0" + text), (b"zTXt", b"parameters\0\0" + zlib.compress(text))),
    ):
        answer = site.http.post("/api/inspect", content=data)
        if answer.status_code == 200:
            with deep_lists():
                assert set(answer.json()) == {"settings", "missing", "metadata"}
        else:
            check_refused("own", answer, 400)


INFOTEXTS = [
    "a: " * 300_000, '"' * 500_000, "\n" * 900_000, "Steps: " + "9" * 500_000,
    "Steps: 20, Seed: " + "9" * 5000 + ", CFG scale: 1e999, Size: 99999999999x1",
    "Steps: 20, Sampler: x, Size: 1x1x1, a: {\"b\": [" + "[" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(INFOTEXTS)))
def test_settings_of_other_programs(site: Web, number: int) -> None:
    data = png((b"zTXt", b"parameters\0\0" + zlib.compress(INFOTEXTS[number].encode())))
    began = time.process_time()
    assert site.http.post("/api/inspect", content=data).status_code in (200, 400)
    assert site.http.post("/sdapi/v1/png-info", json={"image": b64(data)}).status_code in (200, 422)
    assert time.process_time() - began < 3


# Addresses: nothing is fetched, nothing is opened.


@pytest.fixture
def trap() -> Iterator[tuple[str, Callable[[], bool]]]:
    """An address on this machine, and whether anyone came."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def visited() -> bool:
            try:
                listener.accept()[0].close()
            except TimeoutError:
                return False
            return True

        yield f"127.0.0.1:{listener.getsockname()[1]}", visited


def addresses(host: str, file: Path) -> list[str]:
    own = [
        f"http://{host}/a.png",
        f"//{host}/a.png",
        f"file://{file}",
        str(file),
        f"data:image/png,{host}",
    ]  # of each kind
    schemes = ["https", "ftp", "gopher", "dict", "ldap", "ws", "HTTP", "jar:http", "php", "s3", "git+http"]
    own += [f"{scheme}://{host}/a.png" for scheme in schemes]
    own += [f" http://{host}/a.png", f"\thttp://{host}", f"http:{host}", f"http:\\\\{host}\\a.png", f"file:{file}"]
    own += [f"../../../../../../..{file}", f"\\\\{host}\\share\\a.png", "data:,", "data:", "data:x;base64"]
    own += ["data:text/html;base64," + b64(b"<script>"), f"data:;base64,{b64(SVG)}", "javascript:alert(1)"]
    own += ["data:image/svg+xml;base64," + b64(SVG.replace(b"HOST", host.encode()))]
    own += [f"data:image/png;base64,http://{host}/a.png", "data:image/png;charset=utf-8,%89PNG"]
    return own


@pytest.mark.parametrize("field", FIELDS)
def test_addresses(site: Web, field: str, trap: tuple[str, Callable[[], bool]], tmp_path: Path) -> None:
    (host, visited), (api, path, body) = trap, FIELDS[field]
    file = tmp_path / "private.png"
    save_image(file, Image.new("RGB", (64, 64), (1, 2, 3)), {"prompt": "a private zebra"})
    for address in addresses(host, file)[: None if field == "image" else 5]:
        answer = site.http.post(path, json=body(address))
        check_refused(api, answer, 400, 422)
        assert "zebra" not in answer.text
    assert not visited()
    assert site.engine.asks == []


def test_addresses_elsewhere(site: Web, trap: tuple[str, Callable[[], bool]], tmp_path: Path) -> None:
    host, visited = trap
    for address in addresses(host, tmp_path / "a")[:5]:
        check_refused("own", site.http.post("/api/inspect", content=address.encode()), 400)
        for fields in ({"image": address}, {"image[]": address}, {"image": "", "mask": address}):
            files = {"image": ("a.png", picture(), "image/png")} if "mask" in fields else {"x": ("", b"", "")}
            answer = site.http.post("/v1/images/edits", data={"prompt": "x", **fields}, files=files)
            check_refused("openai", answer, 400)
        body = {"prompt": "x"} | dict.fromkeys(("url", "callback_url", "webhook", "image_url", "address"), address)
        for path in ("/v1/images/generations", "/sdapi/v1/txt2img"):
            assert site.http.post(path, json=body).status_code == 200
        check_refused("own", site.http.post("/api/jobs", json=body), 400)
    for headers in ({"Referer": f"http://{host}/"}, {"X-Callback": f"http://{host}/"}, {"Link": f"<http://{host}/>"}):
        assert site.http.get("/", headers=headers).status_code == 200
    assert not visited()


# Forms.


def form(*parts: tuple[str, bytes], boundary: str = "x") -> bytes:
    """A multipart body: headers and content of each part."""
    body = b"".join(f"--{boundary}\r\n{head}\r\n\r\n".encode("latin-1") + data + b"\r\n" for head, data in parts)
    return body + f"--{boundary}--\r\n".encode()


def field(name: str, value: bytes, more: str = "") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"{more}', value


def file(name: str = "image", filename: str = "a.png", data: bytes | None = None) -> tuple[str, bytes]:
    return field(name, picture() if data is None else data, f'; filename="{filename}"')


PROMPT = field("prompt", b"x")
FORMS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ten thousand fields": ("boundary=x", lambda: form(*[field(f"f{i}", b"x") for i in range(10_000)])),
    "a large field": ("boundary=x", lambda: form(field("prompt", b"x" * (2 * MEGABYTE)), file())),
    "no boundary": ("", lambda: form(PROMPT, file())), "no end": ("boundary=x", lambda: form(PROMPT, file())[:-40]),
    "no name": ("boundary=x", lambda: form(("Content-Disposition: form-data", b"x"), PROMPT, file())),
    "a header of 100,000": ("boundary=x", lambda: form(("X: " + "a" * 100_000, b"x"), PROMPT, file())),
    "two images": ("boundary=x", lambda: form(PROMPT, file(), file("image[]"))),
    "no image": ("boundary=x", lambda: form(PROMPT)),
    "options that are no JSON": ("boundary=x", lambda: form(PROMPT, file(), field("options", b"{'a': 1}"))),
    "a number that is none": ("boundary=x", lambda: form(PROMPT, file(), field("guidance_scale", b"nan"))),
    "a coding that makes surrogates": (
        "boundary=x; charset=unicode_escape", lambda: form(field("prompt", b"\\ud800"), file())),
    "a coding that is slow": (
        "boundary=x; charset=punycode", lambda: form(field("prompt", (b"-" + b"zz9a" * 250_000)[:900_000]), file())),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Starlette's, of parts that never end
@pytest.mark.parametrize("attack", FORMS)
def test_forms(site: Web, attack: str) -> None:
    parameters, content = FORMS[attack]
    headers = {"Content-Type": f"multipart/form-data; {parameters}".rstrip("; ")}
    began = time.process_time()
    answer = site.http.post("/v1/images/edits", content=content(), headers=headers)
    check_refused("openai", answer, 400, 415)
    assert time.process_time() - began < 2
    assert site.engine.asks == []


# Keys.


def test_every_key_is_compared_whatever_was_sent(closed: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    for sent in ("alices-long-secret", "carols-long-secret", "wrong", "a" * 10_000, "é"):
        compared.clear()
        closed.http.get("/api/models", headers={"Authorization": f"Bearer {sent}".encode()})
        assert compared == [(32, 32)] * 3, sent


def test_keys_in_other_places(closed: Web, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "canvax.server")
    for path in (f"/api/models?key={SECRET}", f"/api/models?api_key={SECRET}",
                 f"/api/models?Authorization=Bearer%20{SECRET}",
                 f"/api/models?access_token={SECRET}&x-api-key={SECRET}"):  # fmt: skip
        assert closed.http.get(path).status_code == 401
    wrong = check_refused("own", closed.http.get("/api/models", headers={"Authorization": "Bearer none"}), 401)
    assert "is not known here" in wrong["error"]["message"]
    assert closed.http.post("/api/jobs", json={"prompt": "x", "key": SECRET, "api_key": SECRET}).status_code == 401
    headers = {"Cookie": f"Authorization={SECRET}", "Proxy-Authorization": f"Bearer {SECRET}", "X-Auth": SECRET}
    assert closed.http.get("/api/models", headers=headers).status_code == 401
    answer = closed.http.get("/api/models", headers={"Authorization": f"Bearer {SECRET}"})
    assert answer.status_code == 200
    assert SECRET not in answer.text + str(answer.headers)
    assert caplog.text
    assert SECRET not in caplog.text


KEYLESS = {
    "two slashes": "GET //api/models",
    "back, encoded": "GET /static/%2e%2e/api/models",
    "a name of the page": "GET /static/main.js/../../metrics",
    "an address": "GET http://HOST/static/../metrics",
    "another method": "HEAD /metrics",
    "asking first": "OPTIONS /api/models",
    "a post to a probe": "POST /health",
}


@pytest.mark.parametrize("attack", KEYLESS)
def test_ways_around_keys(closed: Web, attack: str) -> None:
    line = KEYLESS[attack].replace("HOST", closed.host)
    body = b'{"inputs": "x"}'
    headers = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"]
    answer = closed.raw(request(closed.host, f"{line} HTTP/1.1", *(headers if "POST" in line else headers[2:])) + (
        body if "POST" in line else b""))  # fmt: skip
    assert status_of(answer) in (401, 404, 405, 400), answer[:200]
    assert b"canvax_" not in answer
    assert b'"models"' not in answer
    assert closed.engine.asks == []


BAD_KEYS = [
    "Bearer", "Basic Og==", "Basic " + b64(b":"), "Bearer " + "x" * 60_000, "Bearer \xff\xfe",
    f"Bearer {SECRET}, Bearer {SECRET}", "Basic " + "A" * 60_000,
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_KEYS, ids=lambda value: value[:20])
def test_keys_that_are_none(closed: Web, value: str) -> None:
    for name in ("Authorization", "X-API-Key"):
        answer = closed.raw(request(closed.host, "GET /api/models HTTP/1.1", f"{name}: {value}", "Connection: close"))
        assert status_of(answer) in (400, 401, 431)
        assert SECRET.encode() not in answer


def test_an_idempotency_key_opens_nothing(closed: Web) -> None:
    alice, bob = ({"X-API-Key": f"{name}s-long-secret", "Idempotency-Key": "1"} for name in ("alice", "bob"))
    mine = closed.submit(alice, seed=1)
    assert (
        closed.submit(alice | {"Idempotency-Key": "2"}, seed=1)["id"]
        != mine["id"]
        == closed.submit(alice, seed=1)["id"]
    )
    assert closed.submit(bob, seed=1)["id"] != mine["id"]
    for body in (
        {"seed": 2},
        {"seed": 1, "image": b64(picture())},
        {"seed": 1, "n": 2},
        {"prompt": "other", "seed": 1},
    ):
        answer = closed.http.post("/api/jobs", json={"prompt": "a red apple"} | body, headers=alice)
        assert check_refused("own", answer, 422)["error"]["code"] == "key_reused"
        assert mine["id"] not in answer.text
    for key in ("x" * 129, "é", "a\tb", "\x7f", "x" * 60_000):
        headers = alice | {"Idempotency-Key": key.encode("latin-1")}
        check_refused("own", closed.http.post("/api/jobs", json={"prompt": "x"}, headers=headers), 400)
    once = alice | {"Idempotency-Key": "at the same time"}
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: closed.submit(once, seed=3)["id"], range(8)))) == 1


# Those who are slow, and those who are many.


def served_meanwhile(site: Web) -> None:
    """Others get a whole image, quickly."""
    began = time.process_time()
    with httpx.Client(base_url=site.base, timeout=5) as other:
        assert other.get("/health").status_code == 200
        assert other.post("/v1/images/generations", json={"prompt": "x"}).status_code == 200
    assert time.process_time() - began < 3


def test_slow_requests(site: Web) -> None:
    beginnings = [
        b"GET /api/mod",
        b"POST /api/jobs HTTP/1.1\r\nHost: " + site.host.encode() + b"\r\nX: ",
        request(site.host, "POST /api/jobs HTTP/1.1", "Content-Type: application/json", "Content-Length: 999") + b"{",
        request(site.host, "POST /hf HTTP/1.1", "Content-Type: application/json", "Transfer-Encoding: chunked") + b"1",
        request(site.host, "POST /v1/images/edits HTTP/1.1", "Content-Type: multipart/form-data; boundary=x",
                "Content-Length: 9999") + b"--x\r\nContent-Disposition: form-",
    ]  # fmt: skip
    with ExitStack() as stack:
        connections = [stack.enter_context(site.connect()) for _ in range(100)]
        for i, connection in enumerate(connections):
            connection.sendall(beginnings[i % len(beginnings)])
        for connection in connections:
            connection.sendall(b"a")
        served_meanwhile(site)
    assert [ask.prompt for ask in site.engine.asks] == ["x"]


def test_a_body_that_pauses_for_too_long(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvax.server.guard.PATIENCE", 0.05)
    head = request(site.host, "POST /api/jobs HTTP/1.1", "Content-Type: application/json", "Content-Length: 999")
    assert status_of(site.raw(head + b'{"prompt": "')) == 408
    assert site.engine.asks == []


def test_readers_that_leave(site: Web) -> None:
    with site.engine.paused():
        job = site.submit(previews=True)
        for _ in range(50):
            with site.connect() as connection:
                connection.sendall(request(site.host, f"GET /api/jobs/{job['id']}/events HTTP/1.1"))
                assert connection.recv(1)
    assert site.done(job)["status"] == "done"
    until(lambda: not site.engine.accepted[-1]._watchers, 5)


def test_metrics_do_not_grow_with_what_is_asked(site: Web) -> None:
    def lines() -> set[str]:
        text = site.http.get("/metrics").text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    for path in (
        "/nothing",
        "/static/none",
        "/api/none",
        "/v1/none",
        "/sdapi/none",
        "/models/none",
        "/hf",
        "/images/none",
    ):
        for method in ("GET", "POST", "PUT"):
            site.http.request(method, path)
    site.done(site.submit())
    site.http.post("/api/jobs", json={"prompt": "x", "model": "none"})
    lines()
    before = lines()
    for i in range(15):
        for path in (f"/{i}", f"/static/{i}", f"/api/jobs/{i}", f"/v1/models/{i}", f"/models/{i}", f"/sdapi/v1/{i}"):
            site.http.get(path, headers={"User-Agent": f"agent {i}", "x-request-id": f"id{i}"})
        site.http.request(f"METHOD{i}", "/api/jobs")
        site.http.post("/api/jobs", json={"prompt": f"prompt {i}", "model": f"model {i}"})
    grown = {line for line in lines() - before if not re.search(r'status="(404|405|401|400)"', line)}
    assert not grown
    assert len(lines() - before) < 10


def test_accept_headers_of_any_length(site: Web) -> None:
    began = time.process_time()
    for accept in (
        "image/png;q=" + "9" * 5000,
        "a/b;q=nan," * 4000,
        ";" * 50_000,
        ",;=" * 15_000,
        "image/webp;q=1e999",
    ):
        answer = site.http.post("/hf", json={"inputs": "x"}, headers={"Accept": accept})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("image/")
    assert time.process_time() - began < 3


def test_a_data_url_that_takes_long_to_read(site: Web) -> None:
    began = time.process_time()
    for text in ("data:" + ";" * MEGABYTE, "data:" + "a" * MEGABYTE, " " * MEGABYTE, "=" * MEGABYTE, "A" * MEGABYTE,
                 "a:" * (MEGABYTE // 2), "\u2028" * 100_000, "é" * 100_000):  # fmt: skip
        check_refused("own", site.http.post("/api/jobs", json={"prompt": "x", "image": text}), 400)
    assert time.process_time() - began < 5
