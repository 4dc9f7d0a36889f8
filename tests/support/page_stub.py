"""canvax's own API and the page over an engine without a model, for tests of the page."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, PngImagePlugin
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from canvax.images.maps import control_map
from canvax.images.metadata import save_numbered
from canvax.server import history
from canvax.server.jobs import (
    MEDIA_TYPES,
    Changed,
    ControlCard,
    Event,
    Finished,
    Job,
    JobRequest,
    Picture,
    Previewed,
    Rejected,
    Status,
    Stepped,
)
from tests.support.server_stub import StubEngine

PAGE = Path(__file__).parents[2] / "src" / "canvax" / "server" / "page"
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
)
SAMPLERS = [
    {"name": "euler_a", "label": "Euler a", "when": "Varied and soft images in 20 to 40 steps."},
    {"name": "dpmpp_2m", "label": "DPM++ 2M", "when": "The best default: converged in 20 to 25 steps."},
    {"name": "ddim", "label": "DDIM", "when": "Plain; 30 to 50 steps. With `eta` above 0 it adds noise."},
]
CURVES = [
    {"name": "automatic", "label": "Automatic", "when": "determined by sampler"},
    {"name": "karras", "label": "Karras", "when": "more steps at low noise"},
]
MAY_BE_ASKED = {field.name for field in fields(JobRequest)}

Paint = Callable[[JobRequest, Picture], Image.Image]


def spot(ask: JobRequest, picture: Picture) -> Image.Image:
    """A spot whose colour and place the seed decides, over the input image if there is one."""
    rng = random.Random(picture.seed)
    size = (picture.width, picture.height)
    image = ask.image.convert("RGB").resize(size) if ask.image else Image.new("RGB", size, "white")
    x, y, r = rng.randrange(size[0]), rng.randrange(size[1]), min(size) // 4
    ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


class PaintedEngine(StubEngine):
    """A stub whose images appear step by step, out of coarse ones.

    Attributes:
        paint: the finished image.
        turn: held by the job that is drawn, so that others queue.
        folder: into which finished images are saved, or None.
    """

    folder: Path | None = None

    def __init__(self, *, pace: float = 0.0, paint: Paint = spot) -> None:
        super().__init__(pace=pace)
        self.paint = paint
        self.turn = threading.Lock()

    def _run(self, job: Job) -> None:
        with self.turn:
            if not job.status.over:
                job.tell(Changed(Status.RUNNING))
                self._draw(job)

    def _draw(self, job: Job) -> None:
        finished = [self.paint(job.request, picture) for picture in job.pictures]
        steps = job.pictures[0].steps
        for step in range(1, steps + 1):
            time.sleep(self.pace)
            if job.status.over:
                return
            job.seconds_left = (steps - step) * self.pace
            for picture, image in zip(job.pictures, finished, strict=True):
                picture.step, picture.status = step, Status.RUNNING
                job.tell(Stepped(picture.index, step, steps, job.seconds_left))
                if job.request.previews:
                    side = max(4, 64 * step // steps)
                    data = encoded(image.resize((side, side)), "jpeg")
                    job.tell(Previewed(picture.index, step, steps, data, "image/jpeg", step))
        if self.fails:
            self.book.fail(job, *self.fails)
            return
        for picture, image in zip(job.pictures, finished, strict=True):
            settings = {
                "prompt": job.request.prompt, "seed": picture.seed, "steps": steps, "width": picture.width,
                "height": picture.height, "guidance_scale": job.request.guidance_scale or 7.5,
            }  # fmt: skip
            picture.data = encoded(image, job.request.format, settings)
            if self.folder:
                self.folder.mkdir(exist_ok=True)
                saved = {**settings, "num_inference_steps": steps, "options": dict(job.request.options)}
                picture.file = save_numbered(self.folder, image.convert("RGB"), saved, picture.seed).name
            picture.status = Status.DONE
            self.book.finished(job, picture.index)


def encoded(image: Image.Image, kind: str, settings: dict[str, Any] | None = None) -> bytes:
    """The file, with the settings inside a PNG."""
    out, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add_text("stub", json.dumps(settings))
    image.convert("RGB").save(out, kind, **({"pnginfo": info} if kind == "png" and settings else {}))
    return out.getvalue()


class Stub:
    """The app, and what tests change about it.

    Attributes:
        engine: that draws.
        key: which requests must bear, if not None.
        bodies: of the jobs asked for.
        controls: the networks that read control images.
        ip_adapters: names of those that read image prompts.
        card: what else is said of the model.
        hints: what is said of each job that is accepted.
        slow: seconds that listing the adapters of a model takes.
        starting: what is said until the models are there, once each.
        folder: into which images are saved, and which the page shows.
        syntax: that the page begins with, if it shows a folder.
    """

    def __init__(self, engine: PaintedEngine, *, key: str | None = None, folder: Path | None = None) -> None:
        self.engine, self.key, self.folder = engine, key, folder
        engine.folder = folder
        self.bodies: list[dict[str, Any]] = []
        self.controls: tuple[ControlCard, ...] = ()
        self.ip_adapters: tuple[str, ...] = ()
        self.card: dict[str, Any] = {}
        self.hints: list[str] = []
        self.slow: dict[str, float] = {}
        self.starting: list[str] = []
        self.syntax = "plain"
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/api/models", self.models),
            Route("/api/prompts", self.prompts),
            Route("/api/adapters", self.adapters),
            Route("/api/jobs", self.submit, methods=["POST"]),
            Route("/api/jobs/{id}", self.job, methods=["GET", "DELETE"]),
            Route("/api/jobs/{id}/events", self.events),
            Route("/api/jobs/{id}/images/{index:int}", self.image),
            Route("/api/inspect", self.inspect, methods=["POST"]),
            Route("/api/control/{kind}", self.control, methods=["POST"]),
        ]
        if folder:
            routes += [self.guarded(route) for route in history.routes(folder)]
        self.app = Starlette(routes=routes, exception_handlers={Rejected: refused})
        self.app.mount("/static", StaticFiles(directory=PAGE))

    def check(self, request: Request) -> None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            raise Rejected(401, "invalid_api_key", "This server wants an API key.")

    def guarded(self, route: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            self.check(request)
            return await route.endpoint(request)

        return Route(route.path, endpoint, methods=route.methods)

    def found(self, request: Request) -> Job:
        self.check(request)
        job = self.engine.job(request.path_params["id"], "")
        if job is None:
            raise Rejected(404, "job_not_found", "No such job.")
        return job

    async def page(self, request: Request) -> Response:
        html = (PAGE / "index.html").read_text()
        html = html.replace("<body>", f'<body data-history data-syntax="{self.syntax}">') if self.folder else html
        return HTMLResponse(html, headers={"Content-Security-Policy": POLICY})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self.check(request)
        if self.starting:
            raise Rejected(503, "starting", self.starting.pop(0), retry_after=1)
        usual = self.engine.models()
        cards = [replace(card, controls=self.controls, ip_adapters=self.ip_adapters, **self.card) for card in usual]
        told = [asdict(card) | {"name": card.id, "size": card.size, "default": i == 0} for i, card in enumerate(cards)]
        beside = {"samplers": SAMPLERS, "curves": CURVES, "starting": self.engine.starting}
        return JSONResponse({"models": told, **beside})

    async def prompts(self, request: Request) -> Response:
        self.check(request)
        return JSONResponse({"prompts": self.card.get("prompts", ())})

    async def adapters(self, request: Request) -> Response:
        self.check(request)
        model = request.query_params.get("model")
        await asyncio.sleep(self.slow.get(model or "", 0))
        cards = self.engine.adapters(model)
        words = [{"name": one.name, "fault": one.fault} for one in self.engine.embeddings(model)]
        return JSONResponse(
            {"adapters": [{"name": one.name, "alias": one.alias} for one in cards], "embeddings": words}
        )

    async def submit(self, request: Request) -> Response:
        self.check(request)
        body = await request.json()
        self.bodies.append(dict(body))
        for name in body:
            if name not in MAY_BE_ASKED | {"control_scale", "control_from"}:
                raise Rejected(422, "unknown_field", f"{name} is not a field of a job.", param=name)
        if not body.get("prompt") and not body.get("upscale"):
            raise Rejected(422, "invalid_value", "prompt is empty; say what to show.", param="prompt")
        for name in ("image", "mask"):
            if body.get(name):
                body[name] = opened(body[name])
        body["references"] = tuple(opened(text) for text in body.get("references", ()))
        scale = {"control_scale": body.pop("control_scale")} if "control_scale" in body else {}
        body["options"] = {**body.get("options", {}), **scale}
        body.pop("control_from", None)
        if body.get("seed") in (None, -1):
            body["seed"] = random.randrange(2**32)
        once = request.headers.get("idempotency-key")
        ask = replace(JobRequest("", once=once), **(body | {"previews": 100 if body.get("previews") else 0}))
        return JSONResponse(told(self.engine.submit(ask)) | {"hints": self.hints}, status_code=202)

    async def job(self, request: Request) -> Response:
        job = self.found(request)
        if request.method == "DELETE":
            job.cancel()
        return JSONResponse(told(job))

    async def image(self, request: Request) -> Response:
        job = self.found(request)
        return Response(job.pictures[request.path_params["index"]].data, media_type=MEDIA_TYPES[job.request.format])

    async def events(self, request: Request) -> Response:
        return StreamingResponse(stream(self.found(request)), media_type="text/event-stream")

    async def control(self, request: Request) -> Response:
        image = Image.open(io.BytesIO(await request.body())).convert("RGB")
        return Response(encoded(control_map(request.path_params["kind"], image), "png"), media_type="image/png")

    async def inspect(self, request: Request) -> Response:
        self.check(request)
        image = Image.open(io.BytesIO(await request.body()))
        if "stub" not in image.info:
            raise Rejected(400, "no_settings", "This file holds no settings.")
        settings = json.loads(image.info["stub"])
        return JSONResponse({"settings": settings, "missing": settings.pop("missing", []), "metadata": settings})


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    headers = {"Retry-After": str(round(error.retry_after))} if error.retry_after else None
    body = {"message": error.message, "code": error.code, "param": error.param}
    return JSONResponse({"error": body}, status_code=error.status, headers=headers)


def opened(text: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(base64.b64decode(text.partition(",")[2] or text, validate=True)))
    except (binascii.Error, OSError):
        raise Rejected(422, "invalid_value", "That is no image.") from None


def told(job: Job) -> dict[str, Any]:
    return {
        "id": job.id, "status": job.status, "created": job.created, "ahead": job.ahead,
        "seconds_left": job.seconds_left, "waits_for": job.waits_for or None,
        "images": [shown(job, picture) for picture in job.pictures],
        "error": {"code": job.error[0], "message": job.error[1]} if job.error else None,
    }  # fmt: skip


def shown(job: Job, picture: Picture) -> dict[str, Any]:
    names = ("index", "status", "step", "steps", "seed", "width", "height", "file")
    url = f"/api/jobs/{job.id}/images/{picture.index}" if picture.data else None
    return {name: getattr(picture, name) for name in names} | {"url": url}


async def stream(job: Job) -> AsyncIterator[str]:
    async for event in job.watch():
        name, data = as_sent(job, event)
        yield f"event: {name}\ndata: {json.dumps(data)}\n\n"
        await asyncio.sleep(0)


def as_sent(job: Job, event: Event) -> tuple[str, dict[str, Any]]:
    match event:
        case Changed(status):
            return (status.value if status.over else "job"), told(job)
        case Stepped(index, step, steps, left):
            return "step", {"index": index, "step": step, "steps": steps, "seconds_left": left}
        case Previewed():
            image = f"data:{event.media_type};base64,{base64.b64encode(event.data).decode()}"
            return "preview", {"index": event.index, "step": event.step, "steps": event.steps, "image": image}
        case Finished(index):
            return "image", shown(job, job.pictures[index])
