"""AUTOMATIC1111's API, /sdapi/v1: what Open WebUI, SillyTavern and webuiapi speak.

Prompts are read with that program's brackets. Images, options and interruptions are those of one client: a client sees
and stops only what came from its own key and address.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from canvax.errors import InputError, shown
from canvax.images.formats import INFOTEXT, exif_texts
from canvax.images.infotext import parts_of
from canvax.samplers.curve_names import CURVES
from canvax.samplers.specs import SAMPLERS
from canvax.server.a1111_ask import ImageToImage, TextToImage, ask_of, info_of, parameters_of
from canvax.server.answers import (
    answering,
    asked,
    client_of,
    decoding,
    encoded,
    error_headers,
    failure,
    in_words_of,
    json_answer,
    model_header,
    read_json,
    settled,
)
from canvax.server.images_in import bytes_of_text
from canvax.server.jobs import Engine, Event, Job, ModelCard, Previewed, Refused, Status

_NOT_FOR_TEXT = ("ddim_inverse",)
_FIELDS = {
    "guidance_scale": "cfg_scale",
    "sampler": "sampler_name",
    "n": "batch_size",
    "strength": "denoising_strength",
    "clip_skip": "clip_skip",
    "eta": "eta",
    "sigmas": "scheduler",
    "variation_seed": "subseed",
    "seed_size": "seed_resize_from_h",
    "padding_mask_crop": "inpaint_full_res_padding",
}
"""What an argument of ``Ask`` is called here."""
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_EMPTY: dict[str, Any] = {
    "sd-vae": [],
    "sd-modules": [],
    "latent-upscale-modes": [],
    "embeddings": {"loaded": {}, "skipped": {}},
    "hypernetworks": [],
    "prompt-styles": [],
    "face-restorers": [],
    "realesrgan-models": [],
    "extensions": [],
    "cmd-flags": {},
    "script-info": [],
    "scripts": {"txt2img": [], "img2img": []},
    "memory": {"ram": {"error": "not told"}, "cuda": {"error": "not told"}},
    "upscalers": [{"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 4}],
}
"""Lists that clients ask for, and where there is nothing to choose."""


class Settings(Struct):
    """The body of options: what is read of it."""

    sd_model_checkpoint: Annotated[str, Meta(max_length=200)] | None = None


class ImageInfo(Struct):
    """The body of png-info."""

    image: Annotated[str, Meta(min_length=1)]


BODIES = {
    "/sdapi/v1/txt2img": TextToImage,
    "/sdapi/v1/img2img": ImageToImage,
    "/sdapi/v1/options": Settings,
    "/sdapi/v1/png-info": ImageInfo,
}
"""What is sent where, for those who describe the API."""


def _not_served(name: str) -> Refused:
    said = f"sd_model_checkpoint={name[:80]!r} is not served here; /sdapi/v1/sd-models lists those that are"
    return Refused(404, "model_not_found", said, param="sd_model_checkpoint")


@dataclass
class _Running:
    """A job that a client waits for."""

    job: Job
    owner: tuple[str, str]
    preview: bytes | None = None
    interrupted: bool = False

    def hear(self, event: Event) -> None:
        if isinstance(event, Previewed):
            self.preview = event.data


@dataclass
class _Desk:
    """The engine as these clients see it: one model that is loaded, one job that runs.

    Attributes:
        engine: what generates.
        running: by the ids of their jobs, oldest first.
        chosen: the model that each client chose, by the id of its key.
    """

    engine: Engine
    running: dict[str, _Running] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)

    def card(self, client: str, *names: Any) -> ModelCard:
        """The model by the first of these names that is known, or the one that the client chose, or the default."""
        known = (self.called(name) for name in (*names, self.chosen.get(client)))
        return next((card for card in known if card), self.engine.models()[0])

    def called(self, name: Any) -> ModelCard | None:
        """The model of this name, title or hash."""
        return next((card for card in self.engine.models() if name in _names(card)), None) if name else None

    def current(self, owner: tuple[str, str]) -> _Running | None:
        """The job of a client that runs, or waits longest."""
        own = [running for running in self.running.values() if running.owner == owner and not running.job.status.over]
        return min(own, key=lambda running: running.job.status is not Status.RUNNING, default=None)

    async def generate(self, request: Request, kind: type[TextToImage]) -> Response:
        body = await read_json(request, kind, status=422, strict=False)
        client, owner = client_of(request), _owner(request)
        chosen = (body.override_settings or {}).get("sd_model_checkpoint")
        if not isinstance(chosen, str | None):
            said = (
                f"override_settings: sd_model_checkpoint={shown(chosen)} is not a name; /sdapi/v1/sd-models lists them"
            )
            raise Refused(422, "invalid_value", said, param="override_settings")
        if chosen and self.called(chosen) is None:
            raise _not_served(chosen)
        card = self.card(client, chosen, body.model)
        job = await asked(self.engine, ask_of, body, card, client)
        self.running[job.id] = running = _Running(job, owner)
        try:
            await settled(request, job, running.hear)
        finally:
            del self.running[job.id]
        if job.status is Status.FAILED:
            raise failure(job)
        # One that was interrupted gives what is finished.
        done = [picture for picture in job.pictures if picture.data]
        images = [picture.data for picture in done] if body.send_images is not False else []
        info = await run_in_threadpool(info_of, job, body, card, done)
        answer = {"images": images, "parameters": parameters_of(body), "info": info}
        return json_answer(answer, model_header(job))

    async def text_to_image(self, request: Request) -> Response:
        return await self.generate(request, TextToImage)

    async def image_to_image(self, request: Request) -> Response:
        return await self.generate(request, ImageToImage)

    async def progress(self, request: Request) -> Response:
        running = self.current(_owner(request))
        word = request.query_params.get("skip_current_image", "false").lower()
        if word not in (*_YES, *_NO):
            said = f"skip_current_image={word!r:.80} is neither true nor false"
            raise Refused(422, "invalid_value", said, param="skip_current_image")
        return json_answer(_progress(running, with_image=word in _NO))

    async def interrupt(self, request: Request) -> Response:
        """Stop the job that runs. Skipping is the same: all images of a job are generated together."""
        if running := self.current(_owner(request)):
            running.interrupted = True
            running.job.cancel()
        return json_answer({})

    async def options(self, request: Request) -> Response:
        card = self.card(client_of(request))
        return json_answer(
            {
                "sd_model_checkpoint": _title(card),
                "sd_checkpoint_hash": card.sha256,
                "sd_vae": "Automatic",
                "CLIP_stop_at_last_layers": 1,
                "samples_format": "png",
                "enable_pnginfo": True,
                "live_previews_enable": True,
            }
        )

    async def choose(self, request: Request) -> Response:
        """Options: another model for this client's next images. Others are read and change nothing."""
        name = (await read_json(request, Settings, status=422, strict=False)).sd_model_checkpoint
        client = client_of(request)
        if name:
            card = self.called(name)
            if card is None:
                raise _not_served(name)
            self.chosen[client] = card.id
        return json_answer({})

    async def adapters(self, request: Request) -> Response:
        cards = self.engine.adapters(self.card(client_of(request)).id)
        told = [{"name": one.name, "alias": one.alias, "path": one.file, "metadata": {}} for one in cards]
        return json_answer(told)

    async def refresh_adapters(self, request: Request) -> Response:
        await run_in_threadpool(self.engine.adapters, self.card(client_of(request)).id, refresh=True)
        return json_answer(None)

    async def models(self, _: Request) -> Response:
        return json_answer([_described(card) for card in self.engine.models()])


def routes(engine: Engine) -> list[BaseRoute]:
    """The routes, which these clients expect at the root of the server."""
    desk = _Desk(engine)
    nothing = _always(None)
    gets = {name: _always(value) for name, value in _EMPTY.items()} | {
        "progress": desk.progress,
        "options": desk.options,
        "sd-models": desk.models,
        "loras": desk.adapters,
        "samplers": _always(_samplers()),
        "schedulers": _always(_schedulers()),
    }
    posts = {
        "txt2img": desk.text_to_image,
        "img2img": desk.image_to_image,
        "interrupt": desk.interrupt,
        "skip": desk.interrupt,
        "options": desk.choose,
        "png-info": _png_info,
        **dict.fromkeys(("refresh-checkpoints", "refresh-vae", "refresh-embeddings"), nothing),
        "refresh-loras": desk.refresh_adapters,
    }
    return [
        Route(f"/sdapi/v1/{name}", answering(error, endpoint), methods=[method])
        for method, endpoints in (("GET", gets), ("POST", posts))
        for name, endpoint in endpoints.items()
    ]


def error(refused: Refused, request_id: str) -> Response:
    """A refusal as these clients read it."""
    headers = error_headers(refused, request_id)
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="canvax", charset="UTF-8"'
    message, name = in_words_of(_FIELDS, refused)
    if name == "clip_skip":  # whose layers are counted from 1 here
        message = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), message)
        message += "; in override_settings it is called CLIP_stop_at_last_layers"
    told = {"error": refused.code, "detail": message, "body": name or "", "errors": message}
    return Response(encoded(told), refused.status, headers, media_type="application/json")


def _always(value: Any) -> Callable[[Request], Any]:
    body = encoded(value)

    async def endpoint(_: Request) -> Response:
        return Response(body, media_type="application/json")

    return endpoint


def _owner(request: Request) -> tuple[str, str]:
    """Who may see and stop a job: without keys, those at the same address."""
    return client_of(request), request.client.host if request.client else ""


def _title(card: ModelCard) -> str:
    return f"{card.id} [{card.sha256[:10]}]"


def _names(card: ModelCard) -> tuple[str, ...]:
    return card.id, _title(card), card.sha256, card.sha256[:10]


def _described(card: ModelCard) -> dict[str, Any]:
    names = {"title": _title(card), "model_name": card.id, "filename": card.id}
    return {**names, "hash": card.sha256[:10], "sha256": card.sha256, "config": None}


def _samplers() -> list[dict[str, Any]]:
    return [
        {"name": spec.label, "aliases": [name for name in spec.spellings if name != spec.label], "options": {}}
        for spec in SAMPLERS
        if spec.name not in _NOT_FOR_TEXT
    ]


def _schedulers() -> list[dict[str, Any]]:
    return [
        {"name": curve.name, "label": curve.also[0], "aliases": list(curve.also[1:]), "default_rho": -1.0,
         "need_inner_model": False}
        for curve in CURVES
    ]  # fmt: skip


def _progress(running: _Running | None, *, with_image: bool) -> dict[str, Any]:
    job = running.job if running else None
    pictures = job.pictures if job else []
    at = next((picture for picture in pictures if not picture.status.over), None)
    done, whole = sum(picture.step for picture in pictures), sum(picture.steps for picture in pictures)
    state = {
        "skipped": False,
        "interrupted": bool(running and running.interrupted),
        "stopping_generation": False,
        "job": job.id if job else "",
        "job_count": len(pictures),
        "job_timestamp": "0",
        "job_no": sum(picture.status.over for picture in pictures),
        "sampling_step": at.step if at else 0,
        "sampling_steps": at.steps if at else 0,
    }
    return {
        "progress": round(done / whole, 4) if whole else 0.0,
        "eta_relative": (job.seconds_left if job else None) or 0.0,
        "state": state,
        "current_image": running.preview if running and with_image else None,
        "textinfo": f"{job.ahead} images are before it" if job and job.status is Status.QUEUED and job.ahead else None,
        "current_task": job.id if job else None,
    }


async def _png_info(request: Request) -> Response:
    body = await read_json(request, ImageInfo, status=422, strict=False)
    return json_answer(await decoding(_read_info, body.image))


def _read_info(text: str) -> dict[str, Any]:
    """What an image says of its making; empty where it says nothing, as there."""
    data = bytes_of_text("image", text)
    try:
        with Image.open(BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:  # no pixel is decoded
            kind, found = image.format, image.info.get(INFOTEXT)
        info = found if kind == "PNG" else exif_texts(BytesIO(data), Path("image")).get(INFOTEXT)
    except (OSError, ValueError, SyntaxError, InputError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(
            422, "invalid_image", "image is not a PNG, JPEG or WebP that can be read", param="image"
        ) from None
    info = info if isinstance(info, str) else ""
    return {"info": info, "items": {INFOTEXT: info} if info else {}, "parameters": _named(info) if info else {}}


def _named(info: str) -> dict[str, str]:
    """The settings of a text under their names in it."""
    prompt, negative, settings = parts_of(info)
    width, _, height = settings.pop("Size", "").partition("x")
    size = {"Size-1": width, "Size-2": height} if height else {}
    return {"Prompt": prompt, "Negative prompt": negative, **settings, **size}
