"""The web application: the routes of every API and of the page over one engine, behind the guard."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from canvax.server import a1111, history, huggingface, jobs_api, openai
from canvax.server.answers import encoded, json_answer, request_id_of
from canvax.server.guard import Guard, Rules, allowed_hosts, failed
from canvax.server.jobs import Engine, Rejected, State
from canvax.server.keys import Keys
from canvax.server.metrics import CONTENT_TYPE, Metrics
from canvax.server.openapi import description
from canvax.server.rates import Rated, Rates

APIS = (jobs_api, openai, a1111, huggingface)

_APIS: dict[str, ModuleType] = {
    "/api/": jobs_api, "/v1/": openai, "/images/": openai, "/openai/": openai, "/sdapi/": a1111,
    "/controlnet/": a1111, "/models/": huggingface, "/hf": huggingface,
}  # fmt: skip
"""Whose errors are answered where."""

_WITH_IMAGES = (
    "/api/jobs", "/api/control/", "/api/inspect", "/v1/images/edits", "/images/edits", "/openai/", "/sdapi/v1/txt2img",
    "/sdapi/v1/img2img", "/sdapi/v1/extra-single-image", "/sdapi/v1/png-info", "/models/", "/hf",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What an operator decides of the web server.

    Attributes:
        keys: None lets everyone in.
        host: the address that is listened on.
        more_hosts: further names that it is called by.
        origins: other sites whose pages may ask.
        max_body: bytes of a body with images.
        rate: images a minute for each key, or for all without keys; None for no limit.
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
    rate: float | None = None
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
    more: Callable[[Engine], Sequence[BaseRoute]] | None = None,
) -> ASGIApp:
    """The application.

    Args:
        engine: what generates.
        settings: see there.
        state: what the engine does at present.
        metrics: what is counted.
        more: gives further routes.
    """
    engine = Rated(engine, Rates(settings.rate)) if settings.rate else engine
    described_apis = APIS if settings.history is None else (*APIS, history)
    bodies = {path: body for api in described_apis for path, body in api.BODIES.items()}
    described = description(bodies, history=settings.history is not None)
    routes = [*_operations(state, metrics, encoded(described)), *(_page(settings) if settings.page else [])]
    routes += [route for api in APIS for route in api.routes(engine)]
    routes += more(engine) if more else []

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Rejected)
        return wrong(request.url.path)(error, request_id_of(request))

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
        answer = wrong(request.scope["path"])(rejected, request_id_of(request))
        answer.headers.update(error.headers or {})
        return answer

    async def unforeseen(request: Request, error: Exception) -> Response:
        return failed(error, request_id_of(request), wrong(request.scope["path"]))

    answers = {Rejected: refused, HTTPException: not_routed, Exception: unforeseen}
    app = Starlette(routes=routes, exception_handlers=answers)
    app.router.redirect_slashes = False
    rules = Rules(
        settings.keys,
        allowed_hosts(settings.host, settings.more_hosts),
        settings.origins,
        settings.max_body,
        _WITH_IMAGES,
    )
    return Guard(app, rules, wrong, metrics)


def wrong(path: str) -> Callable[[Rejected, str], Response]:
    """What answers errors of a path, in the form of its API."""
    whole = {"/": huggingface, "/models": openai}.get(path)
    return (whole or next((api for prefix, api in _APIS.items() if path.startswith(prefix)), jobs_api)).error


def _operations(state: Callable[[], State], metrics: Metrics, described: bytes) -> list[BaseRoute]:
    async def health(_: Request) -> Response:
        failed = state() is State.FAILED
        return json_answer({"status": "failed" if failed else "ok"}, status=503 if failed else 200)

    async def ready(_: Request) -> Response:
        now = state()
        return json_answer({"status": now}, status=200 if now is State.READY else 503)

    async def measured(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(_: Request) -> Response:
        return Response(described, media_type="application/json")

    endpoints = {"/health": health, "/ready": ready, "/metrics": measured, "/openapi.json": openapi}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]


def _page(settings: Settings) -> list[BaseRoute]:
    """The page and its files, read once: names of a client's never reach the file system."""
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

    routes: list[BaseRoute] = [
        Route("/", index, methods=["GET"]),
        Route("/static/{name}", static, methods=["GET"]),
    ]
    return routes if settings.history is None else [*routes, *history.routes(settings.history, settings.left_out)]
