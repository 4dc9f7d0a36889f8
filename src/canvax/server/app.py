"""The web application: the routes of every API and of the page over one engine, behind the guard."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from canvax.server import a1111, history, huggingface, jobs_api, openai
from canvax.server.answers import encoded, json_answer, refusal, request_id_of
from canvax.server.guard import Guard, Rules, allowed_hosts, failed
from canvax.server.jobs import Engine, Rejected, State
from canvax.server.keys import Keys
from canvax.server.metrics import CONTENT_TYPE, Metrics
from canvax.server.openapi import description
from canvax.server.paths import Api, ApiPath, ErrorFormat, Operation, takes_images

APIS: tuple[Api, ...] = (jobs_api, openai, a1111, huggingface)
"""The modules that declare an API. Refusals of a path that none of them has are in the form of the first."""

_PREFIXES = ("/static/", "/health", "/ready", "/metrics")
"""Prefixes of the server's own paths, each a separate route in metrics."""


@dataclass(frozen=True)
class Settings:
    """Operator's settings of the web server.

    Attributes:
        keys: API keys; None to let everyone in.
        host: the address that the server listens on.
        more_hosts: further host names of the server.
        origins: other sites whose pages may send requests.
        max_body: bytes of a body with images.
        page: whether there is a page.
        history: the folder of images that the page shows; None for none.
        left_out: files of models that cannot be used, with the reason and the cure, for a page with a ``history``.
        syntax: the prompt syntax that the page begins with.
    """

    keys: Keys | None = None
    host: str = "127.0.0.1"
    more_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: int = 32 << 20
    page: bool = True
    history: Path | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    syntax: str = "plain"


def create_app(
    engine: Engine,
    settings: Settings,
    *,
    state: Callable[[], State],
    metrics: Metrics,
    more: Callable[[Engine], Sequence[ApiPath]] | None = None,
) -> ASGIApp:
    """Return the application.

    Args:
        engine: the engine.
        settings: the operator's settings.
        state: returns the engine's present state.
        metrics: the server's metrics.
        more: returns further paths.
    """
    paths = [path for api in APIS for path in api.routes(engine)] + operations(state, metrics)
    if settings.page and settings.history is not None:
        paths += history.routes(settings.history, settings.left_out)
    paths += more(engine) if more else []
    forms = {path.path: path.error for path in paths if "{" not in path.path}
    prefixes = {prefix: api.error for api in APIS for prefix in api.PREFIXES}

    def wrong(path: str) -> ErrorFormat:
        """Return the format of errors of a path."""
        below = (error for prefix, error in prefixes.items() if path.startswith(prefix))
        return forms.get(path) or next(below, APIS[0].error)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Rejected)
        return refusal(request, error, wrong(request.url.path))

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, methods = request.scope["path"], (error.headers or {}).get("Allow", "another method")
        messages = {
            404: f"there is nothing at {path!r:.80}; /openapi.json lists what there is",
            405: f"{request.method:.20} is not for this path; send {methods}",
        }
        if path == "/" and request.method in ("GET", "HEAD") and not settings.page:
            messages[405] = "this server has no page (--no-page); /openapi.json lists what there is"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        rejected = Rejected(error.status_code, code, messages.get(error.status_code, "the request cannot be read"))
        answer = refusal(request, rejected, wrong(path))
        answer.headers.update(error.headers or {})
        return answer

    async def unforeseen(request: Request, error: Exception) -> Response:
        return failed(error, request_id_of(request), wrong(request.scope["path"]))

    answers = {Rejected: refused, HTTPException: not_routed, Exception: unforeseen}
    routes = [*(_page(settings) if settings.page else []), *paths, _described(paths)]
    app = Starlette(routes=routes, exception_handlers=answers)
    app.router.redirect_slashes = False
    rules = Rules(
        settings.keys,
        allowed_hosts(settings.host, settings.more_hosts),
        settings.origins,
        settings.max_body,
        takes_images(paths),
        (*prefixes, *_PREFIXES),
    )
    return Guard(app, rules, wrong, metrics)


def operations(state: Callable[[], State], metrics: Metrics) -> list[ApiPath]:
    """Return the paths for those who operate a server, and let ``metrics`` read its state."""

    async def health(_: Request) -> Response:
        failed = state() is State.FAILED
        return json_answer({"status": "failed" if failed else "ok"}, status=503 if failed else 200)

    async def ready(_: Request) -> Response:
        now = state()
        return json_answer({"status": now}, status=200 if now is State.READY else 503)

    async def measured(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    metrics.healthy.set_function(lambda: state() is not State.FAILED)
    metrics.ready.set_function(lambda: state() is State.READY)
    works = "Whether the server works: 503 when its engine is dead or makes no progress."
    return [
        ApiPath("/health", jobs_api.error, GET=Operation(health, works)),
        ApiPath("/ready", jobs_api.error, GET=Operation(ready, "Whether it can generate.")),
        ApiPath("/metrics", jobs_api.error, GET=Operation(measured, "Prometheus metrics.")),
    ]


def _described(paths: Sequence[ApiPath]) -> ApiPath:
    """Return the path of the OpenAPI description of other paths."""
    described = encoded(description(paths))

    async def openapi(_: Request) -> Response:
        return Response(described, media_type="application/json")

    return ApiPath("/openapi.json", jobs_api.error, GET=Operation(openapi))


def _page(settings: Settings) -> list[Route]:
    """Return the routes of the page and its files. The files are read once: no path is made from a request."""
    folder = files("canvax.server") / "page"
    contents = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    if settings.history is not None:
        body = f'<body data-history data-syntax="{settings.syntax}">'
        contents["index.html"] = contents["index.html"].replace(b"<body>", body.encode())
    headers = {"Cache-Control": "no-cache"}

    async def index(_: Request) -> Response:
        return Response(contents["index.html"], headers=headers, media_type="text/html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in contents:
            raise HTTPException(404)
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(contents[name], headers=headers, media_type=kind or "application/octet-stream")

    return [Route("/", index, methods=["GET"]), Route("/static/{name}", static, methods=["GET"])]
