"""Checks before all routes: host, origin, key, size and number of requests. Writes one line of log for each request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canvax.server.jobs import Rejected
from canvax.server.keys import Keys
from canvax.server.logs import now
from canvax.server.metrics import Metrics

log = logging.getLogger("canvax.server")

LARGEST_QUESTION = 256 << 10
"""Bytes of a body that holds no image."""

PATIENCE = 30.0
"""Seconds without a byte of a body, after which the request fails."""

LONGEST = 300.0
"""Seconds in which all of a body has to come."""

BODIES = 32
"""Times ``Rules.max_body``: bytes of all bodies at a time. A body is held until its request is answered."""

MOST_REQUESTS = 1000
"""Requests that are answered at a time, without those for ``_MONITORS``."""

_BUSY = 5.0
"""Seconds after which a client that was one too many may try again."""

_CLIENT_GONE = 499
"""Status in the log for a client that disconnected before its answer, as in nginx. It is never sent."""

_SAFE = ("GET", "HEAD", "OPTIONS")
_PROBES = ("/health", "/ready")
_PUBLIC = ("/", *_PROBES)
_MONITORS = (*_PROBES, "/metrics")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": _POLICY,
}
_ALLOWED_HEADERS = "authorization, content-type, idempotency-key, x-api-key, x-request-id"

Wrong = Callable[[str], Callable[[Rejected, str], Response]]
"""Gives what answers refusals of a path."""


@dataclass(frozen=True)
class Rules:
    """Limits of requests.

    Attributes:
        keys: API keys; None to let everyone in.
        hosts: host names of the server; "*" for any.
        origins: other sites whose pages may send requests.
        max_body: bytes of a body with images.
        with_images: predicate: may bodies sent to a path contain images?
        prefixes: beginnings of paths that metrics count together.
    """

    keys: Keys | None
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    max_body: int
    with_images: Callable[[str], bool]
    prefixes: tuple[str, ...]


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, rules: Rules, wrong: Wrong, metrics: Metrics) -> None:
        self._app, self._rules, self._wrong, self._metrics = app, rules, wrong, metrics
        metrics.expect(routes=("/", *rules.prefixes, "other"))
        self._probed: dict[str, int] = {}
        self._load = _Load(BODIES * rules.max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        sent_id = headers.get("x-request-id", "")
        name = sent_id if _ID.fullmatch(sent_id) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state |= {"request_id": name, "client": ""}
        status, whole = 0, False

        async def reply(message: Message) -> None:
            nonlocal status, whole, left
            if message["type"] == "http.response.start":
                status, left = message["status"], limited.gone
                self._mark(answer := MutableHeaders(raw=message["headers"]), headers, name)
                if status == 408 or ("content-length" in headers and "transfer-encoding" in headers):
                    answer["connection"] = "close"  # where the next request begins is not known
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        limited = _Limited(receive, self._limit(scope["path"]), self._load)
        left = False  # before there was an answer
        counts = scope["path"] not in _MONITORS
        self._load.requests += counts
        try:
            try:
                if counts and self._load.requests > MOST_REQUESTS:
                    raise busy()
                self._check(scope, headers, state)
                early = self._preflight(scope, headers)
                await (early or self._app)(scope, limited.receive, reply)
            except Rejected as refused:
                state["log"] = state.get("log", {}) | refused.logged
                await self._wrong(scope["path"])(refused, name)(scope, limited.receive, reply)
            except Exception as error:
                # The app has answered and logged its own faults, and Starlette raises them again. A half answer must
                # not look like a whole one: there the connection breaks.
                if not status:
                    await failed(error, name, self._wrong(scope["path"]))(scope, limited.receive, reply)
                elif not whole:
                    raise
        finally:
            self._load.requests -= counts
            self._load.bytes -= limited.size
            seconds = time.perf_counter() - began
            status = status or 500
            if left:  # its refusal has no reader, and is no error of the server
                status, state["log"] = _CLIENT_GONE, state.get("log", {}) | {"code": "client_gone"}
            self._metrics.request(self._route(scope["path"]), status, seconds)
            if not self._as_before(scope["path"], status):
                _write_log(scope, state, status, seconds)

    def _as_before(self, path: str, status: int) -> bool:
        """Check if a probe has the same answer as last time: logging every probe would fill the log."""
        if path not in _PROBES:
            return False
        before, self._probed[path] = self._probed.get(path), status
        return status == before

    def _check(self, scope: Scope, headers: Headers, state: dict[str, Any]) -> None:
        """Refuse what may not be.

        Raises:
            Rejected: for another host, another site, without a key, or with too large a body.
        """
        rules, path = self._rules, scope["path"]
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may read the other of them, and take a part of the body for the next request.
            raise Rejected(400, "two_lengths", "a request has Content-Length or Transfer-Encoding, not both")
        host = _host(headers.get("host", ""))
        # A kubelet probes the address of its pod; no answer of a probe depends on who asks.
        if path not in _PROBES and "*" not in rules.hosts and host not in rules.hosts:
            raise Rejected(
                421,
                "wrong_host",
                f"Host={host!r:.80}: this server is not called that; start it with --allow-host {host:.80}",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in rules.origins and scope["method"] not in _SAFE:
            if origin.partition("://")[2].lower() != headers.get("host", "").lower() or "://" not in origin:
                raise _wrong_origin("Origin", origin)
        elif headers.get("sec-fetch-site") == "cross-site" and scope["method"] not in _SAFE and origin is None:
            raise _wrong_origin("Sec-Fetch-Site", "cross-site")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Rejected(415, "unsupported_encoding", "bodies are sent as they are, without Content-Encoding")
        preflight = scope["method"] == "OPTIONS"  # browsers and SillyTavern send it without a key
        if rules.keys is not None and not (_is_public(scope) or preflight):
            client = rules.keys.client(headers.get("authorization", ""), headers.get("x-api-key", ""))
            if client is None:
                sent = headers.get("authorization") or headers.get("x-api-key")
                why = "the API key that was sent is not known here" if sent else "this needs an API key"
                raise Rejected(401, "invalid_api_key", f"{why}: Authorization: Bearer KEY")
            state["client"] = client
        with suppress(ValueError):
            if int(headers.get("content-length", "0")) > self._limit(path):
                raise too_large(self._limit(path))

    def _limit(self, path: str) -> int:
        return self._rules.max_body if self._rules.with_images(path) else LARGEST_QUESTION

    def _route(self, path: str) -> str:
        """Return the route of a path in metrics, which never contain text of clients."""
        return path if path == "/" else next((name for name in self._rules.prefixes if path.startswith(name)), "other")

    def _preflight(self, scope: Scope, headers: Headers) -> Response | None:
        """Answer a browser's preflight request for pages of allowed sites."""
        asked = headers.get("access-control-request-method")
        if scope["method"] == "OPTIONS" and asked and (origin := headers.get("origin")):
            if origin not in self._rules.origins:
                raise _wrong_origin("Origin", origin)
            methods = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Max-Age": "600"}
            return Response(None, 204, {**methods, "Access-Control-Allow-Headers": _ALLOWED_HEADERS})
        return None

    def _mark(self, answer: MutableHeaders, headers: Headers, name: str) -> None:
        answer["x-request-id"] = name
        for header, value in _HEADERS.items():
            answer.setdefault(header, value)
        if (origin := headers.get("origin")) in self._rules.origins and origin:
            answer["access-control-allow-origin"] = origin
            answer["access-control-expose-headers"] = "location, retry-after, x-request-id, x-canvax-model"
            answer["cross-origin-resource-policy"] = "cross-origin"
            answer.add_vary_header("Origin")


@dataclass
class _Load:
    """Present load of all requests.

    Attributes:
        most: limit of ``bytes``.
    """

    most: int
    bytes: int = 0
    requests: int = 0


class _Limited:
    """Counts a body that does not say how long it is, and does not wait for one that does not come.

    Attributes:
        gone: whether the client closed the connection.
        size: bytes that came.
    """

    def __init__(self, receive: Receive, most: int, load: _Load) -> None:
        self._receive, self._most, self._load, self._whole = receive, most, load, False
        self._end = time.monotonic() + LONGEST
        self.gone, self.size = False, 0

    async def receive(self) -> Message:
        left = self._end - time.monotonic()
        try:
            async with asyncio.timeout(None if self._whole else min(PATIENCE, left)):
                message = await self._receive()
        except TimeoutError:
            what = f"nothing of the body came for {PATIENCE:g} s"
            what = what if left > PATIENCE else f"the body did not come within {LONGEST:g} s"
            raise Rejected(408, "timeout", f"{what}; send it again") from None
        self.gone = self.gone or message["type"] == "http.disconnect"
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.size += size
            self._load.bytes += size
            if self.size > self._most:
                raise too_large(self._most)
            if self._load.bytes > self._load.most:
                raise busy()
            self._whole = not message.get("more_body", False)
        return message


def busy() -> Rejected:
    """Return a refusal of one request too many."""
    return Rejected(503, "busy", "too many requests at a time; try again soon", retry_after=_BUSY)


def too_large(most: int) -> Rejected:
    """Return a refusal of a body with too many bytes."""
    return Rejected(413, "too_large", f"the body is larger than {most} bytes; send less, or a smaller image")


def failed(error: Exception, name: str, wrong: Callable[[Rejected, str], Response]) -> Response:
    """Answer an unexpected error; only the log contains it."""
    log.error("request %s failed", name, exc_info=error)
    return wrong(Rejected(500, "server_error", f"the server failed; its log knows it as {name}"), name)


def _is_public(scope: Scope) -> bool:
    """Check if a request needs no key, as those of browsers and probes. This depends on the method: a POST to /
    generates."""
    path = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in _PUBLIC or path.startswith("/static/"))


def _wrong_origin(header: str, value: str) -> Rejected:
    message = f"{header}={value[:80]!r}: pages of other sites may not ask; start the server with --allow-origin URL"
    return Rejected(403, "wrong_origin", message)


def _host(header: str) -> str:
    """Return the name in a Host header, without the port."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:/\s@]+)(?::\d{1,5})?", header)
    return match[1].lower().rstrip(".") if match else ""


def _write_log(scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
    """Log one JSON object, without query strings and headers, since they may contain keys by mistake.

    An address is personal data: only a refusal for lack of rights has it, so that it can be blocked.
    """
    line = {
        "time": now(),
        "id": state["request_id"], "client": state["client"], "method": scope["method"], "path": scope["path"][:200],
        "status": status, "seconds": round(seconds, 4), **state.get("log", {}),
    }  # fmt: skip
    line |= {"address": scope["client"][0]} if status in (401, 403) and scope.get("client") else {}
    log.info(json.dumps(line))


def allowed_hosts(host: str, others: Sequence[str]) -> tuple[str, ...]:
    """Return the host names of a server that listens on ``host``."""
    names = ["localhost", "127.0.0.1", "[::1]", *others]
    if host not in ("0.0.0.0", "::", ""):
        names.append(f"[{host}]" if ":" in host else host)
    return tuple(dict.fromkeys(name.lower() for name in names))
