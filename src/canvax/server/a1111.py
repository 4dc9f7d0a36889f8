"""AUTOMATIC1111's API, /sdapi/v1: what Open WebUI, SillyTavern and webuiapi speak.

Prompts are read with the brackets of AUTOMATIC1111. A client (an API key and an address) sees and stops only its jobs.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from PIL import Image, ImageChops, ImageOps
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from canvax import __version__
from canvax.call import MAX_SIDE
from canvax.errors import InputError, shown
from canvax.images.formats import INFOTEXT, texts_of_exif
from canvax.images.infotext import parts_of, to_infotext
from canvax.images.maps import control_map
from canvax.samplers.catalog import curve_named, find, with_a1111_curve
from canvax.samplers.curve_names import CURVES, curve_label
from canvax.samplers.specs import SAMPLERS, SamplerSpec
from canvax.server.answers import (
    asked,
    cancelled,
    client_of,
    completed,
    decoding,
    encoded,
    error_headers,
    failure,
    in_words_of,
    json_answer,
    model_header,
    read_json,
    reading,
    settled,
    without_none,
)
from canvax.server.fields import Fraction, Scale, Seed, SideOrNone, Steps
from canvax.server.images_in import MOST_PIXELS, Pixels, bytes_of_text, colours
from canvax.server.jobs import Engine, Event, Job, JobRequest, ModelCard, Picture, Previewed, Rejected, Status
from canvax.server.part_cache import CONTROLNET
from canvax.server.paths import ApiPath, Operation
from canvax.server.work import INVERSE, MOST_IMAGES
from canvax.weights.data_folder import flat_names, stem_of

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
    "vae": "sd_vae",
    "control_scale": "weight",
    "control_start": "guidance_start",
    "control_end": "guidance_end",
}
"""Arguments of ``JobRequest``, and their names in this API."""
_RESIZES = {
    "None": Image.Resampling.LANCZOS,
    "Lanczos": Image.Resampling.LANCZOS,
    "Nearest": Image.Resampling.NEAREST,
}
"""Upscalers that resize an image and nothing else. A1111's "None" does so, too, where the size is to be another."""
_BY_THE_MODEL = "SD upscale"
"""The upscaler that generates detail, tile by tile, as A1111 calls it; also where a client names none."""
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")
_EMPTY: dict[str, Any] = {
    "sd-modules": [],
    "latent-upscale-modes": [{"name": "Latent"}],
    "hypernetworks": [],
    "prompt-styles": [],
    "face-restorers": [],
    "realesrgan-models": [],
    "extensions": [],
    "cmd-flags": {},
    "script-info": [],
    "scripts": {"txt2img": [], "img2img": []},
    "memory": {"ram": {"error": "not available"}, "cuda": {"error": "not available"}},
    "upscalers": [
        {"name": name, "model_name": None, "model_path": None, "model_url": None, "scale": 4}
        for name in (*_RESIZES, _BY_THE_MODEL)
    ],
}
"""Lists that clients ask for, and where there is little or nothing to choose."""


PREVIEWS = 6
"""Previews of each image while its client asks for them: about one each second."""
_FILLS = ("fill", "original", "noise", "nothing")
_CHURN = (("s_churn", 0.0), ("s_tmin", 0.0), ("s_tmax", 0.0), ("s_noise", 1.0))
"""And what clients send that mean nothing by it."""
_UPSCALERS = ("", "none", "latent", "latent (nearest-exact)", "latent (bicubic)", "lanczos")
"""Ways of enlarging a first pass that are those of canvax, or so near that the second pass levels them."""
_SAME = ("", "use same sampler")
_ENLARGED = 0.3
"""Share of an enlarged image that is generated anew: enough for detail, too little for other objects."""
_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "canny": ("canny", ("low", "high")),
    "invert": ("invert", ()),
    "invert (from white bg & black line)": ("invert", ()),
    "threshold": ("threshold", ("at",)),
    "blur_gaussian": ("blur", ("radius",)),
}
"""Preprocessors of the ControlNet extension: the map that each makes, and what its thresholds are called here."""
_CONTROL_MODES = {
    "0": "balanced", "balanced": "balanced", "1": "prompt", "my prompt is more important": "prompt", "2": "control",
    "controlnet is more important": "control",
}  # fmt: skip
_STRETCHES, _CROPS, _PADS = ("0", "just resize"), ("1", "crop and resize"), ("2", "resize and fill")
_NO_PADDING = "is offered only for an image in the proportions of the output; send 0 to stretch or 1 to crop"
_RESIZE_MODES = "0 stretches, 1 crops, 2 is for images in the proportions of the output, 3 for those of its size"
_CLIP_SKIP = "CLIP_stop_at_last_layers"
_PLAIN_VAES = ("", "automatic", "none")
_PLAIN_SCHEDULERS = ("", "automatic", "default", "none", "use same scheduler")

Prompt = Annotated[str, Meta(max_length=32_000)]
Name = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=1, le=1000)]
Number = Annotated[float, Meta(ge=0, le=1_000_000)]


class Script(Struct):
    """The arguments of an extension."""

    args: Any = None

    @property
    def is_on(self) -> bool:
        """True unless there are no arguments, or the first is false: extensions begin with their switch."""
        return bool(self.args) and not (isinstance(self.args, list) and self.args[0] is False)


class ControlUnit(Struct, kw_only=True):
    """A unit of the ControlNet extension: what is read of its fields."""

    enabled: bool = True
    image: str | dict[str, Any] | None = None
    input_image: str | None = None
    model: Name = ""
    module: Name = "none"
    weight: float = 1.0
    guidance_start: Fraction = 0.0
    guidance_end: Fraction = 1.0
    control_mode: int | Name = 0
    resize_mode: int | Name = 1
    union_control_type: Name = ""
    threshold_a: float | None = None
    threshold_b: float | None = None
    # refused where they ask for something
    mask: Any = None
    mask_image: Any = None
    effective_region_mask: Any = None
    advanced_weighting: Any = None


class TextToImage(Struct, kw_only=True):
    """The body of txt2img: what is read of its fields."""

    prompt: Prompt | None = None
    negative_prompt: Prompt | None = None
    model: Name | None = None
    seed: Seed | None = None
    subseed: Seed | None = None
    subseed_strength: Fraction | None = None
    seed_resize_from_h: SideOrNone | None = None
    seed_resize_from_w: SideOrNone | None = None
    sampler_name: Name | None = None
    sampler_index: Name | None = None
    scheduler: Name | None = None
    batch_size: Count | None = None
    n_iter: Count | None = None
    steps: Steps | None = None
    cfg_scale: Scale | None = None
    width: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    height: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    eta: Fraction | None = None
    s_churn: Number | None = None
    s_tmin: Number | None = None
    s_tmax: Number | None = None
    s_noise: Annotated[float, Meta(ge=0, le=1000)] | None = None
    clip_skip: Annotated[int, Meta(ge=0, le=100)] | None = None
    override_settings: dict[str, Any] | None = None
    send_images: bool | None = None
    enable_hr: bool | None = None
    hr_scale: Annotated[float, Meta(gt=0, le=16)] | None = None
    hr_resize_x: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    hr_resize_y: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    hr_upscaler: Name | None = None
    hr_second_pass_steps: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    hr_sampler_name: Name | None = None
    hr_prompt: Prompt | None = None
    denoising_strength: Fraction | None = None
    # refused where they ask for something
    init_images: list[str] | None = None
    styles: list[str] | None = None
    hr_negative_prompt: Prompt | None = None
    hr_scheduler: Name | None = None
    hr_checkpoint_name: Name | None = None
    tiling: bool | None = None
    restore_faces: bool | None = None
    refiner_checkpoint: Name | None = None
    script_name: Name | None = None
    alwayson_scripts: dict[Name, Script] | None = None


class ImageToImage(TextToImage, kw_only=True):
    """The body of img2img."""

    init_images: Annotated[list[str], Meta(min_length=1, max_length=1)]  # type: ignore[assignment]
    mask: str | None = None
    resize_mode: Annotated[int, Meta(ge=0, le=3, description=_RESIZE_MODES)] | None = None
    mask_blur: Annotated[float, Meta(ge=0, le=1000)] | None = None
    mask_blur_x: Annotated[float, Meta(ge=0, le=1000)] | None = None
    inpainting_fill: Annotated[int, Meta(ge=0, le=3)] | None = None
    inpaint_full_res: bool | None = None
    inpaint_full_res_padding: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    inpainting_mask_invert: Annotated[int, Meta(ge=0, le=1)] | None = None
    include_init_images: bool | None = None


class Enlargement(Struct):
    """The body of extra-single-image: what is read of its fields."""

    image: Annotated[str, Meta(min_length=1)]
    upscaling_resize: Annotated[float, Meta(ge=1, le=8)] = 2.0
    upscaler_1: Name = _BY_THE_MODEL
    # refused where they ask for something
    resize_mode: Annotated[int, Meta(ge=0, le=1)] = 0
    gfpgan_visibility: Fraction = 0
    codeformer_visibility: Fraction = 0
    extras_upscaler_2_visibility: Fraction = 0


class Settings(Struct):
    """The body of options: what is read of it."""

    sd_model_checkpoint: Annotated[str, Meta(max_length=200)] | None = None
    sd_vae: Annotated[str, Meta(max_length=200)] | None = None
    CLIP_stop_at_last_layers: Annotated[int, Meta(ge=0, le=100)] | None = None
    # refused with other values than these, which change no image
    always_discard_next_to_last_sigma: Any = False
    comma_padding_backtrack: Any = 20
    eta_ancestral: Any = 1
    eta_ddim: Any = 0
    eta_noise_seed_delta: Any = 0
    img2img_color_correction: Any = False
    initial_noise_multiplier: Any = 1
    randn_source: Any = "GPU"
    s_min_uncond: Any = 0
    sd_hypernetwork: Any = "None"
    token_merging_ratio: Any = 0
    use_old_karras_scheduler_sigmas: Any = False


_NOT_APPLIED = {
    setting.name: setting.default for setting in msgspec.structs.fields(Settings) if setting.default is not None
}
"""Settings of A1111 that change its images and that canvax does not have, with the values that ask for nothing."""


class ImageInfo(Struct):
    """The body of png-info."""

    image: Annotated[str, Meta(min_length=1)]


PREFIXES = ("/sdapi/", "/controlnet/")


def _not_served(name: str) -> Rejected:
    message = f"sd_model_checkpoint={name[:80]!r} is not served here; /sdapi/v1/sd-models lists those that are"
    return Rejected(404, "model_not_found", message, param="sd_model_checkpoint")


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
class _Session:
    """An engine as these clients see it: with one loaded model and one running job.

    Attributes:
        engine: the engine.
        running: the running jobs by id, oldest first.
        chosen: the model that each client chose, by the id of the client's key.
        kept: settings that each client chose, by the same id. A request can override them.
    """

    engine: Engine
    running: dict[str, _Running] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    def card(self, client: str, *names: Any) -> ModelCard:
        """Return the model of the first known name, else the one that the client chose, else the default."""
        known = (self.called(name) for name in (*names, self.chosen.get(client)))
        return next((card for card in known if card), self.engine.models()[0])

    def called(self, name: Any) -> ModelCard | None:
        """Return the model with this name, title or hash. A file name may have its extension and its folders."""
        if not name:
            return None
        cards = self.engine.models()
        if exact := next((card for card in cards if name in _names(card)), None):
            return exact
        wanted = _parts(str(name))
        if not {"", ".", ".."}.isdisjoint(wanted):
            return None
        like = [card for card in cards if _is_called(card, wanted)]
        like = like or [card for card in cards if "/".join(wanted) in flat_names(_parts(card.file or card.id))]
        return like[0] if len(like) == 1 else None

    def current(self, owner: tuple[str, str]) -> _Running | None:
        """Return the client's running job, else the job that waits longest."""
        jobs = [running for running in self.running.values() if running.owner == owner and not running.job.status.over]
        return min(jobs, key=lambda running: running.job.status is not Status.RUNNING, default=None)

    async def generate(self, kind: type[TextToImage], request: Request) -> Response:
        body = await read_json(request, kind, status=422, strict=False)
        client, owner = client_of(request), _owner(request)
        chosen = (body.override_settings or {}).get("sd_model_checkpoint")
        if not isinstance(chosen, str | None):
            message = (
                f"override_settings: sd_model_checkpoint={shown(chosen)} is not a name; /sdapi/v1/sd-models lists them"
            )
            raise Rejected(422, "invalid_value", message, param="override_settings")
        if chosen and self.called(chosen) is None:
            raise _not_served(chosen)
        card = self.card(client, chosen, body.model)
        job = await asked(request, self.engine, request_of, body, card, client, self.kept.get(client))
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
        hints = [f"{name} of override_settings is not applied" for name in _not_applied(body.override_settings or {})]
        if body.model and self.called(body.model) != card:
            hints.append(f"model={shown(body.model)} is not used, {card.id} is; see /sdapi/v1/sd-models")
        info = await run_in_threadpool(info_of, job, body, card, done, hints)
        answer = {"images": images, "parameters": parameters_of(body), "info": info}
        return json_answer(answer, model_header(job))

    async def enlarge(self, request: Request) -> Response:
        """Enlarge an image: resize it, or generate its detail tile by tile."""
        body, client = await read_json(request, Enlargement, status=422, strict=False), client_of(request)
        if body.upscaler_1 != _BY_THE_MODEL:
            return json_answer({"html_info": "", "image": await decoding(_resized, body)})
        job = await asked(request, self.engine, enlargement_of, body, self.card(client), client)
        await completed(request, job)
        return json_answer({"html_info": "", "image": job.pictures[0].data}, model_header(job))

    async def progress(self, request: Request) -> Response:
        running = self.current(_owner(request))
        word = request.query_params.get("skip_current_image", "false").lower()
        if word not in (*_YES, *_NO):
            message = f"skip_current_image={word!r:.80} is neither true nor false"
            raise Rejected(422, "invalid_value", message, param="skip_current_image")
        if running and word in _NO:
            running.job.look()
        return json_answer(_progress(running, with_image=word in _NO))

    async def interrupt(self, request: Request) -> Response:
        """Stop the job that runs. Skipping is the same: all images of a job are generated together."""
        if running := self.current(_owner(request)):
            running.interrupted = True
            await cancelled(running.job)
        return json_answer({})

    async def options(self, request: Request) -> Response:
        card = self.card(client_of(request))
        return json_answer(
            {
                "sd_model_checkpoint": _title(card),
                "sd_checkpoint_hash": card.sha256 or None,
                "sd_vae": "Automatic",
                _CLIP_SKIP: 1,
                **self.kept.get(client_of(request), {}),
                "samples_format": "png",
                "enable_pnginfo": True,
                "live_previews_enable": True,
            }
        )

    async def choose(self, request: Request) -> Response:
        """Set the model, the VAE and the clip skip of this client's next images; ignore settings that have no effect.

        Raises:
            Rejected: a setting changes images in A1111 and is not supported here.
        """
        body, client = await read_json(request, Settings, status=422, strict=False), client_of(request)
        for name in _not_applied(msgspec.structs.asdict(body)):
            raise _refused(name, "is not offered by this server; leave it out")
        kept = self.kept.setdefault(client, {})
        if name := body.sd_model_checkpoint:
            card = self.called(name)
            if card is None:
                raise _not_served(name)
            self.chosen[client] = card.id
        if (vae := body.sd_vae) is not None:
            if vae.lower() not in _PLAIN_VAES and stem_of(vae) not in map(stem_of, self.card(client).vaes):
                message = f"sd_vae={vae[:80]!r} is not served here; /sdapi/v1/sd-vae lists those that are"
                raise Rejected(404, "vae_not_found", message, param="sd_vae")
            kept["sd_vae"] = vae
        if (layers := body.CLIP_stop_at_last_layers) not in (None, kept.get(_CLIP_SKIP, 1)):
            card = self.card(client)
            if layers > (most := card.clip_skip + card.usual_layer):
                raise _refused(_CLIP_SKIP, f"{layers} is not in 1..{most}, the layers of {card.id}")
            kept[_CLIP_SKIP] = layers
        return json_answer({})

    async def autoencoders(self, request: Request) -> Response:
        names = [name for name, fault in self.card(client_of(request)).vaes.items() if not fault]
        return json_answer([{"model_name": name, "filename": name} for name in names])

    async def controlnets(self, request: Request) -> Response:
        """Return the networks of the start, and those of the folder of models that a unit may name."""
        card = self.card(client_of(request))
        names = [net.name for net in (*card.controls, *card.controlnets) if not net.fault]
        return json_answer({"model_list": list(dict.fromkeys(names))})

    async def adapters(self, request: Request) -> Response:
        cards = await reading(self.engine.adapters, self.card(client_of(request)).id)
        return json_answer([
            {"name": card.name, "alias": card.alias, "path": card.file, "suggested": card.suggested}
            | {"metadata": {key: _table_in(text) for key, text in card.metadata.items()}}
            for card in cards if not card.fault
        ])  # fmt: skip

    async def refresh(self, kind: Literal["adapters", "embeddings"], _: Request) -> Response:
        for card in self.engine.models():
            await reading(partial(getattr(self.engine, kind), card.id, refresh=True))
        return json_answer(None)

    async def embeddings(self, request: Request) -> Response:
        cards = await reading(self.engine.embeddings, self.card(client_of(request)).id)
        kinds: dict[str, dict[str, Any]] = {"loaded": {}, "skipped": {}}
        nothing = dict.fromkeys(("step", "sd_checkpoint", "sd_checkpoint_name"))
        for card in cards:
            entry = {**nothing, "shape": card.width, "vectors": card.vectors}
            kinds["skipped" if card.fault else "loaded"][card.name] = entry
        return json_answer(kinds)

    async def models(self, _: Request) -> Response:
        return json_answer([_described(card) for card in self.engine.models()])


def routes(engine: Engine) -> list[ApiPath]:
    """Return the paths, which these clients expect at the root of the server."""
    session = _Session(engine)
    nothing, both = Operation(_always(None)), "Images of a prompt and an image."
    gets = {name: Operation(_always(value)) for name, value in _EMPTY.items()} | {
        "progress": Operation(session.progress, "How far the client's images are."),
        "options": Operation(session.options, "Settings."),
        "samplers": Operation(_always(_samplers()), "Samplers."),
        "schedulers": Operation(_always(_schedulers()), "Sigma schedules."),
        "sd-models": Operation(session.models, "Models."),
        "loras": Operation(session.adapters, "Adapters."),
        "embeddings": Operation(session.embeddings, "Embeddings."),
        "sd-vae": Operation(session.autoencoders, "VAEs that requests may name."),
    }
    posts = {
        "txt2img": Operation(partial(session.generate, TextToImage), "Images of a prompt.", TextToImage, images=True),
        "img2img": Operation(partial(session.generate, ImageToImage), both, ImageToImage, images=True),
        "extra-single-image": Operation(session.enlarge, "An image made larger.", Enlargement, images=True),
        "options": Operation(session.choose, "Choose the model.", Settings),
        "png-info": Operation(_png_info, "How an image was made.", ImageInfo, images=True),
        "interrupt": Operation(session.interrupt, "Cancel the job that runs."),
        "skip": Operation(session.interrupt, "Cancel the job that runs."),
        "refresh-loras": Operation(partial(session.refresh, "adapters"), "Look for new adapters."),
        "refresh-embeddings": Operation(partial(session.refresh, "embeddings"), "Look for new embeddings."),
        **dict.fromkeys(("refresh-checkpoints", "refresh-vae"), nothing),
    }
    modules = _always({"module_list": ["none", *_MODULES]})
    controlnets = {
        "model_list": Operation(session.controlnets, "ControlNets that requests may name."),
        "module_list": Operation(modules, "Ways to prepare a control image."),
    }
    paths = [ApiPath(f"/sdapi/v1/{name}", error, POST=operation) for name, operation in posts.items()]
    paths += [ApiPath(f"/sdapi/v1/{name}", error, GET=operation) for name, operation in gets.items()]
    return paths + [ApiPath(f"/controlnet/{name}", error, GET=operation) for name, operation in controlnets.items()]


def error(refused: Rejected, request_id: str) -> Response:
    """Format a refusal for these clients."""
    headers = error_headers(refused, request_id)
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="canvax", charset="UTF-8"'
    message, name = in_words_of(_FIELDS, refused)
    if name == "clip_skip":  # whose layers are counted from 1 here
        message = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), message)
        message += "; in override_settings it is called CLIP_stop_at_last_layers"
    content = {"error": refused.code, "detail": message, "body": name or "", "errors": message}
    return json_answer(content, headers, refused.status)


def _always(value: Any) -> Callable[[Request], Any]:
    body = encoded(value)

    async def endpoint(_: Request) -> Response:
        return Response(body, media_type="application/json")

    return endpoint


def _owner(request: Request) -> tuple[str, str]:
    """Return who may see and stop a job: without keys, the clients with the same address."""
    return client_of(request), request.client.host if request.client else ""


def _title(card: ModelCard) -> str:
    return f"{card.id} [{card.sha256[:10]}]" if card.sha256 else card.id


def _names(card: ModelCard) -> tuple[str, ...]:
    return card.id, _title(card), card.sha256, card.sha256[:10]


def _parts(name: str) -> list[str]:
    """Split a file name as A1111 writes it into folders and name: ``sd15\\deliberate_v2.safetensors [4b56e31647]``."""
    return stem_of(re.sub(r" \[[0-9a-f]{10}\]$", "", name.strip())).replace("\\", "/").split("/")


def _is_called(card: ModelCard, wanted: list[str]) -> bool:
    """Check if the parts of a name are those of the model's file. Either may begin at a folder farther up."""
    parts = _parts(card.file or card.id)
    shorter = min(len(parts), len(wanted))
    return wanted == _parts(card.id) or wanted[-shorter:] == parts[-shorter:]


def _table_in(text: str) -> Any:
    """Return a text of metadata, or the table that it is in JSON."""
    try:
        return msgspec.json.decode(text) if text.startswith("{") else text
    except (msgspec.DecodeError, RecursionError):
        return text


def _described(card: ModelCard) -> dict[str, Any]:
    names = {"title": _title(card), "model_name": card.id, "filename": card.id}
    return {**names, "hash": card.sha256[:10] or None, "sha256": card.sha256 or None, "config": None}


def _samplers() -> list[dict[str, Any]]:
    return [
        {
            "name": spec.label,
            "aliases": [name for name in spec.spellings if name != spec.label],
            "options": {"scheduler": spec.a1111_curve} if spec.a1111_curve else {},
        }
        for spec in SAMPLERS
        if spec.name != INVERSE
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
    """Return the settings that an image contains; with empty values, as A1111 does, if it has none."""
    data = bytes_of_text("image", text)
    try:
        with Image.open(BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:  # no pixel is decoded
            kind, written = image.format, image.info.get(INFOTEXT)
        info = written if kind == "PNG" else texts_of_exif(BytesIO(data), Path("image")).get(INFOTEXT)
    except (OSError, ValueError, SyntaxError, InputError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected(
            422, "invalid_image", "image is not a PNG, JPEG or WebP that can be read", param="image"
        ) from None
    info = info if isinstance(info, str) else ""
    return {"info": info, "items": {INFOTEXT: info} if info else {}, "parameters": _named(info) if info else {}}


def _named(info: str) -> dict[str, str]:
    """Return the settings of an infotext by their names in it."""
    prompt, negative, settings = parts_of(info)
    width, _, height = settings.pop("Size", "").partition("x")
    size = {"Size-1": width, "Size-2": height} if height else {}
    return {"Prompt": prompt, "Negative prompt": negative, **settings, **size}


def request_of(body: TextToImage, card: ModelCard, client: str, kept: Mapping[str, Any] | None = None) -> JobRequest:
    """Make a job request of a body. Call this off the event loop: it decodes images.

    Args:
        body: the body of the request.
        card: the model's card.
        client: the id of the client's key.
        kept: settings that the client chose before.

    Raises:
        Rejected: a field cannot be used.
    """
    _check_offered(body)
    sampler = body.sampler_name or body.sampler_index or None
    spec = spec_of(sampler or card.sampler)
    if sampler and spec is None:
        field = "sampler_name" if body.sampler_name else "sampler_index"
        raise _refused(field, f"{sampler!r} is not known; /sdapi/v1/samplers lists them")
    settings = {**(kept or {}), **(body.override_settings or {})}
    vae = settings.get("sd_vae")
    if not isinstance(vae, str | None):
        raise _refused("override_settings", f"sd_vae={shown(vae)} is not a name; /sdapi/v1/sd-vae lists them")
    options = {"prompt_syntax": "a1111", **dict(_options(body, spec))}
    options |= dict(_clip_skip(body, card, kept or {}))
    if body.enable_hr and not isinstance(body, ImageToImage):
        options |= _second_pass(body, card)
    if (body.scheduler or "").strip().lower() in ("", "automatic") and card.prompt_weights:  # A1111 knows such models
        sampler = sampler and with_a1111_curve(sampler)
        options |= {name: with_a1111_curve(options[name]) for name in ("hires_sampler",) if name in options}
    image = mask = strength = None
    if isinstance(body, ImageToImage):
        image, mask = _source_images(body)
        # There, 0 runs the last step all the same; the smallest strength does so here.
        strength = 0.75 if body.denoising_strength is None else max(body.denoising_strength, 0.001)
        if "editing" in card.tasks and mask is None and body.denoising_strength in (None, 1):
            strength = None  # of 1 nothing of the image would be left
        options |= ({"strength_rule": "a1111"} if strength else {}) | (_mask_options(body) if mask else {})
    controls = _controls(body, card, image)
    options |= controls.pop("options", {})
    images = (body.batch_size or 1) * (body.n_iter or 1)
    if images > MOST_IMAGES and body.n_iter:
        product = f"{body.batch_size or 1} times n_iter={body.n_iter} are {images} images, more than {MOST_IMAGES}"
        raise _refused("batch_size", f"{product}; send several requests")
    return JobRequest(
        body.prompt or "",
        negative_prompt=body.negative_prompt or None,
        model=card.id,
        n=images,
        width=body.width or None,
        height=body.height or None,
        steps=body.steps,
        guidance_scale=body.cfg_scale,
        sampler=sampler,
        seed=None if body.seed == -1 else body.seed,
        image=image,
        mask=mask,
        strength=strength,
        options=options,
        **controls,
        vae=None if (vae or "").lower() in _PLAIN_VAES else vae,
        lenient=True,
        previews=PREVIEWS,
        client=client,
    )


def _check_offered(body: TextToImage) -> None:
    """Refuse options that would change the image and are not offered."""
    if body.enable_hr:
        for name, plain in (("hr_negative_prompt", ""), ("hr_scheduler", None), ("hr_checkpoint_name", None)):
            value = getattr(body, name) or ""
            if value.strip().lower() not in (*_PLAIN_SCHEDULERS, "use same checkpoint", plain):
                raise _refused(name, "is not offered by this server; leave it out")
        if (body.hr_upscaler or "").strip().lower() not in _UPSCALERS:
            raise _refused("hr_upscaler", f"{body.hr_upscaler!r} is not offered by this server; send Latent or Lanczos")
    if body.init_images and not isinstance(body, ImageToImage):
        raise _refused("init_images", "are for /sdapi/v1/img2img; send them there")
    for name in ("styles", "tiling", "restore_faces", "refiner_checkpoint", "script_name"):
        if getattr(body, name):
            raise _refused(name, "is not offered by this server; leave it out")
    scripts = (body.alwayson_scripts or {}).items()
    if names := [name for name, script in scripts if script.is_on and name.lower() != CONTROLNET]:
        raise _refused("alwayson_scripts", f"{names[0][:60]!r} is not offered by this server; leave it out")


def _controls(body: TextToImage, card: ModelCard, image: Image.Image | None) -> dict[str, Any]:
    """Return the fields of a job request for the active units of the ControlNet extension; {} if there are none.

    Raises:
        Rejected: a unit has no image or no model, or an option that is not offered.
    """
    scripts = [one for name, one in (body.alwayson_scripts or {}).items() if name.lower() == CONTROLNET and one.is_on]
    try:
        units = [msgspec.convert(unit, ControlUnit, strict=False) for script in scripts for unit in script.args]
    except (msgspec.ValidationError, TypeError) as fault:
        raise _of_unit(f"cannot be read: {fault}") from None
    units = [unit for unit in units if unit.enabled]
    if not units:
        return {}
    width, height = image.size if image else card.native
    size, pixels, usual = (body.width or width, body.height or height), Pixels(), ControlUnit()
    named = [(re.sub(r" \[[0-9a-f]+\]$", "", unit.model.strip()), unit) for unit in units]
    at_start = [net.name for net in card.controls if not net.fault]
    names = [name for name, _ in named]
    entries: list[tuple[str, ControlUnit | None]] = [*named]
    if len({*names}) == len(names) and {*names} <= {*at_start}:  # networks of the start are there together
        entries = [(name, dict(named).get(name)) for name in at_start]
    shown_images = [_shown(unit, name, card, pixels, image, size) if unit else None for name, unit in entries]
    fields = {"control_scale": "weight", "control_start": "guidance_start", "control_end": "guidance_end"}
    columns = {name: [getattr(unit or usual, own) for _, unit in entries] for name, own in fields.items()}
    columns["control_mode"] = [_CONTROL_MODES.get(str((unit or usual).control_mode).lower(), "") for _, unit in entries]
    if "" in columns["control_mode"]:
        raise _of_unit("has a control_mode that is not known; send 0, 1 or 2")
    several = len(entries) > 1
    return {
        "control": shown_images if several else shown_images[0],
        "controlnet": names if entries == named else None,
        "options": {name: values if several else values[0] for name, values in columns.items()},
    }


def _shown(
    unit: ControlUnit, name: str, card: ModelCard, pixels: Pixels, image: Image.Image | None, size: tuple[int, int]
) -> Any:
    """Return a unit's control image, by default the ``image`` of img2img; for a ControlNet-Union with its type."""
    for left_out in ("mask", "mask_image", "effective_region_mask", "advanced_weighting"):
        if getattr(unit, left_out):
            raise _of_unit(f"has a {left_out}, which is not offered by this server; leave it out")
    if name.lower() in ("", "none"):
        raise _of_unit("names no model; /controlnet/model_list lists them")
    sent = unit.image.get("image") if isinstance(unit.image, dict) else unit.image or unit.input_image
    made = pixels.read("alwayson_scripts", sent) if isinstance(sent, str) else image
    if made is None:
        raise _of_unit("has no image; send it as image")
    if (mode := str(unit.resize_mode).lower()) in _CROPS:
        made = ImageOps.fit(made, size, Image.Resampling.LANCZOS)
    elif mode in _PADS and not _has_shape(made, size):
        raise _of_unit(f"has a resize_mode that {_NO_PADDING}")
    elif mode not in (*_STRETCHES, *_PADS):
        raise _of_unit("has a resize_mode that is not known; send 0, 1 or 2")
    if (module := unit.module.strip().lower()) not in ("", "none"):
        if module not in _MODULES:
            raise _of_unit(f"names the module {unit.module!r:.80}; /controlnet/module_list lists them")
        kind, settings = _MODULES[module]
        values = {name: getattr(unit, f"threshold_{letter}") for name, letter in zip(settings, "ab", strict=False)}
        try:
            made = control_map(kind, made, **{name: value for name, value in values.items() if (value or -1) >= 0})
        except InputError as fault:
            raise _of_unit(f"has a threshold that cannot be used: {fault}") from None
    if any(net.types for net in (*card.controls, *card.controlnets) if net.name == name):
        return {unit.union_control_type.lower().partition("/")[0]: made}
    return made


def _of_unit(why: str) -> Rejected:
    return _refused("alwayson_scripts", f"controlnet: a unit {why}")


def _options(body: TextToImage, spec: SamplerSpec | None) -> Iterator[tuple[str, Any]]:
    """Yield names and values of ``canvax.Options``."""
    named = body.sampler_name or body.sampler_index
    # There as here a curve in the sampler's name wins, and samplers that take no curve leave the scheduler unread.
    open_to_curves = (spec is None or spec.curves) and not (named and spec and "sigmas" in find(named)[1])
    if (body.scheduler or "").strip().lower() not in _PLAIN_SCHEDULERS and open_to_curves:
        try:
            yield "sigmas", curve_named(body.scheduler or "")
        except InputError:
            raise _refused("scheduler", f"{body.scheduler!r} is not known; /sdapi/v1/schedulers lists them") from None
    # webuiapi sends eta 1 with every request. That is what the ancestral samplers do anyway, and would turn DDIM into
    # another sampler, which the client did not mean. With another value, samplers that have an eta take it.
    if body.eta not in (None, 1.0) and spec is not None and spec.eta:
        yield "eta", body.eta
    churn = {name: value for name, usual in _CHURN if (value := getattr(body, name)) not in (None, usual)}
    if spec is not None and (taken := {name: value for name, value in churn.items() if name in spec.settings}):
        yield "sampler_settings", taken
    if body.subseed_strength:
        yield "variation_seed", secrets.randbits(32) if body.subseed in (None, -1) else body.subseed
        yield "variation_strength", body.subseed_strength
    if (body.seed_resize_from_h or 0) > 0 and (body.seed_resize_from_w or 0) > 0:
        yield "seed_size", (body.seed_resize_from_h, body.seed_resize_from_w)


def _clip_skip(body: TextToImage, card: ModelCard, kept: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    usual = kept.get(_CLIP_SKIP) if card.clip_skip and body.clip_skip is None else body.clip_skip
    layers = (body.override_settings or {}).get(_CLIP_SKIP, usual)
    if layers is not None and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 0):
        raise _refused("override_settings", f"{_CLIP_SKIP}={layers!r:.80} is not a whole number from 0 on, such as 2")
    if layers is not None and layers > card.usual_layer:
        yield "clip_skip", layers - card.usual_layer  # there, 1 is the last layer


def _not_applied(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of A1111's settings that would change images there and change nothing here."""
    return [name for name, plain in _NOT_APPLIED.items() if settings.get(name, plain) not in (None, plain)]


def _second_pass(body: TextToImage, card: ModelCard) -> dict[str, Any]:
    """Return the hires fix as ``canvax.Options``; omitted fields have the defaults of AUTOMATIC1111."""
    width, height = body.width or card.size[0], body.height or card.size[1]
    by_side = [new / old for new, old in ((body.hr_resize_x, width), (body.hr_resize_y, height)) if new]
    if len(by_side) == 2 and abs(by_side[0] - by_side[1]) > 0.01:
        raise _refused("hr_resize_x", "has another shape than the image; send hr_scale")
    scale = by_side[0] if by_side else body.hr_scale or 2.0
    if scale <= 1:
        return {}
    options = {
        "hires": scale,
        "hires_method": "latent" if (body.hr_upscaler or "latent").lower().startswith("latent") else "pixel",
        "hires_strength": 0.75 if body.denoising_strength is None else max(body.denoising_strength, 0.001),
        "hires_steps": body.hr_second_pass_steps or None,
        "hires_sampler": None if (body.hr_sampler_name or "").lower() in _SAME else body.hr_sampler_name,
        "hires_prompt": body.hr_prompt or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def enlargement_of(body: Enlargement, card: ModelCard, client: str) -> JobRequest:
    """Make a job request of a body of extra-single-image. Call this off the event loop: it decodes an image.

    Raises:
        Rejected: a field cannot be used.
    """
    image = _source(body)
    return JobRequest(
        "", model=card.id, image=image, upscale=body.upscaling_resize, strength=_ENLARGED,
        guidance_scale=card.no_guidance, client=client,
    )  # fmt: skip


def _source(body: Enlargement) -> Image.Image:
    """Return the image of extra-single-image."""
    for name in ("resize_mode", "gfpgan_visibility", "codeformer_visibility", "extras_upscaler_2_visibility"):
        if getattr(body, name):
            raise _refused(name, "is not offered by this server; send 0")
    return Pixels().read("image", body.image)


def _resized(body: Enlargement) -> bytes:
    """Return the image of extra-single-image as a PNG, resized by an upscaler without a model."""
    method = next((way for name, way in _RESIZES.items() if name.lower() == body.upscaler_1.lower()), None)
    if method is None:
        there = ", ".join((*_RESIZES, _BY_THE_MODEL))
        raise _refused("upscaler_1", f"{body.upscaler_1!r:.80} is not known; send one of {there}")
    image = _source(body)
    width, height = (round(side * body.upscaling_resize) for side in image.size)
    if width * height > MOST_PIXELS:
        raise _refused("upscaling_resize", f"makes {width} x {height} pixels, more than {MOST_PIXELS}; send less")
    file = BytesIO()
    image.resize((width, height), method).save(file, "PNG")
    return file.getvalue()


def spec_of(sampler: str | None) -> SamplerSpec | None:
    """Return the sampler of a name, or None."""
    try:
        return find(sampler)[0] if sampler else None
    except InputError:
        return None


def _mask_of(text: str) -> Image.Image:
    """Return the mask: the brightness, or the alpha channel if a part is transparent, as A1111 reads it."""
    mask = Pixels().read("mask", text)
    transparent = mask.mode == "RGBA" and mask.getchannel("A").getextrema() != (255, 255)
    return mask.getchannel("A") if transparent else colours("mask", mask, grey=True)


def _source_images(body: ImageToImage) -> tuple[Image.Image, Image.Image | None]:
    """Return the image and the mask, in which white is generated anew."""
    image = Pixels().read("init_images", body.init_images[0])
    mask = _mask_of(body.mask) if body.mask else None
    if mask is not None and mask.size != image.size:
        mask = mask.resize(image.size, Image.Resampling.LANCZOS)
    if mask is not None and body.inpainting_mask_invert:
        mask = ImageChops.invert(mask)
    size = body.width or image.width, body.height or image.height
    if body.resize_mode == 2 and not _has_shape(image, size):
        raise _refused("resize_mode", f"2 {_NO_PADDING}")
    if body.resize_mode == 3 and size != image.size:
        raise _refused("resize_mode", "3 is offered only for an image of the size of the output; send 0")
    if body.resize_mode == 1 and size != image.size:
        if size[0] * size[1] > MOST_PIXELS:
            raise _refused("width", f"{size[0]} x {size[1]} are more than {MOST_PIXELS} pixels; ask for fewer")
        image = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
        mask = mask and ImageOps.fit(mask, size, Image.Resampling.LANCZOS)
    return image, mask


def _has_shape(image: Image.Image, size: tuple[int, int]) -> bool:
    """Return whether an image of a size needs no padding and no cropping: at most a part of a pixel."""
    return abs(image.width * size[1] - image.height * size[0]) < min(image.size)


def _mask_options(body: ImageToImage) -> dict[str, Any]:
    """Return the options of a mask; omitted fields have the defaults of AUTOMATIC1111."""
    blur = next((value for value in (body.mask_blur, body.mask_blur_x) if value is not None), 4.0)
    options: dict[str, Any] = {"mask_blur": blur, "mask_fill": _FILLS[body.inpainting_fill or 0]}
    if body.inpaint_full_res is not False:
        options["padding_mask_crop"] = body.inpaint_full_res_padding or 0
    return options


def _refused(param: str, why: str) -> Rejected:
    return Rejected(422, "invalid_value", f"{param}: {why}", param=param)


def parameters_of(body: TextToImage) -> dict[str, Any]:
    """Return the fields of a request that A1111's answers contain: no unknown ones, and images only if asked for."""
    fields = msgspec.structs.asdict(body)
    images = () if fields.get("include_init_images") else ("init_images", "mask")
    left_out = (*images, "model", "alwayson_scripts")
    return {name: value for name, value in fields.items() if name not in left_out}


def info_of(job: Job, body: TextToImage, card: ModelCard, pictures: Sequence[Picture], hints: Sequence[str]) -> str:
    """Return the JSON text that clients read seeds and settings of the images from."""
    job_request = job.request
    sampler = job_request.sampler or card.sampler or ""
    spec = spec_of(sampler)
    curve = job_request.options.get("sigmas") or (find(sampler)[1].get("sigmas") if spec else None)
    picture = pictures[0] if pictures else job.pictures[0]
    negative = job_request.negative_prompt or ""
    subseed = job_request.options.get("variation_seed", -1)
    hints = [*hints, *job.hints]
    info = {
        "prompt": job_request.prompt,
        "all_prompts": [job_request.prompt] * len(pictures),
        "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(pictures),
        "seed": picture.seed,
        "all_seeds": [picture.seed for picture in pictures],
        "subseed": subseed,
        "all_subseeds": [subseed] * len(pictures),
        "subseed_strength": job_request.options.get("variation_strength", 0),
        "width": picture.width,
        "height": picture.height,
        "sampler_name": spec.label if spec else sampler,
        "cfg_scale": card.guidance_scale if job_request.guidance_scale is None else job_request.guidance_scale,
        "steps": job_request.steps or card.steps,
        "batch_size": body.batch_size or 1,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": card.id,
        "sd_model_hash": card.sha256[:10] or None,
        "sd_vae_name": job_request.vae,
        "sd_vae_hash": None,
        "seed_resize_from_w": body.seed_resize_from_w or -1,
        "seed_resize_from_h": body.seed_resize_from_h or -1,
        "denoising_strength": job_request.strength,
        "extra_generation_params": without_none([("Schedule type", curve and curve_label(curve))]),
        "index_of_first_image": 0,
        "infotexts": [to_infotext(picture.metadata) for picture in pictures],
        "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.localtime(job.created)),
        "clip_skip": job_request.options.get("clip_skip", 0) + card.usual_layer,
        "is_using_inpainting_conditioning": False,
        "version": f"canvax {__version__}",
        **({"hints": hints} if hints else {}),
    }
    return encoded(info).decode()
