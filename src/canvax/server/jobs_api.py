"""canvax's own API: submit a job, watch it step by step, fetch its images, cancel it. The page speaks it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from canvax.call import OptionRecord
from canvax.errors import InputError, nearest
from canvax.images.keys import keys_of, list_in
from canvax.images.maps import SETTINGS as MAPS
from canvax.images.maps import control_map
from canvax.images.metadata import UnreadError, metadata_in, prompt_in
from canvax.models.denoiser import MOST_REFERENCES
from canvax.pipelines.again import lost_settings, missing_embeddings, other_hash, skipped, unknown_settings
from canvax.pipelines.control import OPTIONS
from canvax.samplers import CURVES, SAMPLERS, curve_named, find
from canvax.server.answers import (
    asked,
    cancelled,
    client_of,
    data_url,
    decoding,
    error_headers,
    json_answer,
    model_named,
    once_of,
    read_json,
    reading,
    sent_event,
    size_of,
    watched,
)
from canvax.server.control import public_names
from canvax.server.fields import Scale, Seed, Side, Strength, Times
from canvax.server.images_in import Pixels, bytes_of_text
from canvax.server.jobs import (
    MEDIA_TYPES,
    Changed,
    Engine,
    Event,
    Finished,
    Job,
    JobRequest,
    ModelCard,
    Picture,
    Previewed,
    PromptImage,
    Rejected,
    Stepped,
)
from canvax.server.paths import ApiPath, Operation
from canvax.server.work import INVERSE, LONGEST_PROMPT, MOST_IMAGES, MOST_STEPS, NOT_OFFERED
from canvax.settings import offered
from canvax.weights.data_folder import stem_of

PREVIEWS = 8
"""Previews of an image, if its client asked for previews."""

COMES = 2.0
"""Seconds within which such a client begins to watch its job."""

_FIELDS = {
    "prompt": "prompt", "negative_prompt": "negative_prompt", "seed": "seed", "width": "width", "height": "height",
    "num_inference_steps": "steps", "guidance_scale": "guidance_scale", "sampler": "sampler", "strength": "strength",
    "options": "options", "model": "model", "vae": "vae",
}  # fmt: skip
"""Names of settings in metadata, and the fields of a job that they become."""


_SAME = ("prompt", "negative_prompt", "n", "steps", "guidance_scale", "sampler", "strength", "upscale", "controlnet",
         "format", "quality", "metadata", "seconds")  # fmt: skip
"""Fields of a body that a job request has under the same name."""

Text = Annotated[str, Meta(max_length=40)]
FileName = Annotated[str, Meta(max_length=300)]
Typed = Annotated[dict[Text, str], Meta(max_length=16)]
"""Control images by their types."""


class NewPrompt(Struct, forbid_unknown_fields=True):
    """An image that an IP-Adapter reads."""

    image: str
    scale: float | dict[Text, Any] = 1.0
    mask: str | None = None
    adapter: Annotated[int, Meta(ge=0, le=63)] = 0


class NewJob(Struct, forbid_unknown_fields=True):
    """The body of POST /api/jobs."""

    prompt: Annotated[str, Meta(max_length=LONGEST_PROMPT)]
    negative_prompt: Annotated[str, Meta(max_length=LONGEST_PROMPT)] | None = None
    model: Annotated[str, Meta(max_length=300)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_IMAGES)] = 1
    width: Side | None = None
    height: Side | None = None
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] | None = None
    guidance_scale: Scale | None = None
    sampler: Annotated[str, Meta(max_length=100)] | None = None
    seed: Seed | None = None
    image: str | None = None
    references: Annotated[list[str], Meta(max_length=MOST_REFERENCES - 1)] = []
    mask: str | None = None
    strength: Strength | None = None
    upscale: Times | None = None
    control: bool | str | Typed | Annotated[list[str | Typed | None], Meta(max_length=8)] | None = None
    control_from: Text | None = None
    control_scale: float | Annotated[list[float], Meta(max_length=8)] | None = None
    control_start: float | Annotated[list[float], Meta(max_length=8)] | None = None
    control_end: float | Annotated[list[float], Meta(max_length=8)] | None = None
    control_mode: Text | Annotated[list[Text], Meta(max_length=8)] | None = None
    image_prompt: str | NewPrompt | Annotated[list[NewPrompt], Meta(max_length=16)] | None = None
    format: Literal["png", "jpeg", "webp"] = "png"
    quality: Annotated[int, Meta(ge=1, le=100)] | None = None
    previews: bool = False
    metadata: bool = True
    seconds: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    options: dict[str, Any] | None = None
    adapters: Annotated[dict[str, float | dict[str, float]], Meta(max_length=16)] | None = None
    vae: FileName | None = None
    controlnet: FileName | Annotated[list[FileName], Meta(min_length=1, max_length=8)] | None = None


_TYPES = {field.name: field.type for field in msgspec.structs.fields(NewJob)}
PREFIXES = ("/api/",)


def routes(engine: Engine) -> list[ApiPath]:
    """Return the paths under /api."""

    async def models(_: Request) -> Response:
        cards = [_card(card, default=i == 0) for i, card in enumerate(engine.models())]
        samplers = [
            {"name": spec.name, "label": spec.label, "when": spec.when} for spec in SAMPLERS if spec.name != INVERSE
        ]
        curves = [{"name": curve.name, "label": curve.also[0], "when": curve.when} for curve in CURVES]
        return json_answer({"models": cards, "samplers": samplers, "curves": curves, "starting": engine.starting})

    async def prompts(request: Request) -> Response:
        return json_answer({"prompts": model_named(engine, request.query_params.get("model")).prompts})

    async def adapters(request: Request) -> Response:
        model = request.query_params.get("model")
        names = ("name", "alias", "trigger_words", "suggested", "without_effect", "fault")
        cards = await reading(engine.adapters, model)
        listed = [{name: getattr(card, name) for name in names} for card in cards]
        words = [{"name": card.name, "fault": card.fault} for card in await reading(engine.embeddings, model)]
        return json_answer({"adapters": listed, "embeddings": words})

    async def jobs(request: Request) -> Response:
        found = await run_in_threadpool(engine.jobs, client_of(request))
        return json_answer({"jobs": [job_json(job) for job in found]})

    async def new_job(request: Request) -> Response:
        body = await read_json(request, NewJob)
        job = await asked(request, engine, _ask, body, engine, client_of(request), once_of(request), awaited=False)
        job.look(COMES)
        return json_answer(job_json(job), {"Location": f"/api/jobs/{job.id}"}, 202)

    def job_of(request: Request) -> Job:
        job = engine.job(request.path_params["name"], client_of(request))
        if job is None:
            message = f"there is no job {request.path_params['name']!r:.80}; results are kept for some minutes"
            raise Rejected(404, "job_not_found", message)
        return job

    async def one_job(request: Request) -> Response:
        return json_answer(job_json(job_of(request)))

    async def cancel(request: Request) -> Response:
        if not (job := job_of(request)).status.over:
            await cancelled(job)
            return json_answer(job_json(job))
        await run_in_threadpool(engine.forget, job)
        answer = job_json(job)
        return json_answer(answer | {"images": [image | {"url": None} for image in answer["images"]]})

    async def image(request: Request) -> Response:
        job, index = job_of(request), request.path_params["index"]
        picture = next((picture for picture in job.pictures if str(picture.index) == index), None)
        if picture is None or picture.data is None:
            message = f"image {index!r:.80} is not there, or not yet; the job lists the urls of those that are done"
            raise Rejected(404, "image_not_found", message)
        picture.fetched |= request.method == "GET"
        headers = {"Cache-Control": "private, max-age=600, immutable"}
        return Response(picture.data, headers=headers, media_type=MEDIA_TYPES[job.request.format])

    async def events(request: Request) -> Response:
        # The job continues when its watcher disconnects: only DELETE cancels it.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(job_of(request)), headers=headers, media_type="text/event-stream")

    async def inspect(request: Request) -> Response:
        data, cards = await request.body(), list[ModelCard]()
        with suppress(Rejected):  # while they load
            cards += engine.models()
        return Response(await decoding(_inspected, data, cards), media_type="application/json")

    async def control_image(request: Request) -> Response:
        data = await request.body()
        return Response(await decoding(_control_image, data, request.path_params["kind"]), media_type="image/png")

    how, mapped = "How an image was made.", "The control image by `control_from`, as PNG."
    return [
        ApiPath(
            "/api/jobs",
            error,
            POST=Operation(new_job, "Begin a job.", NewJob, images=True, status=202),
            GET=Operation(jobs, "The client's jobs that are not over, oldest first."),
        ),
        ApiPath(
            "/api/jobs/{name}",
            error,
            GET=Operation(one_job, "A job."),
            DELETE=Operation(cancel, "Cancel a job; delete one that is over."),
        ),
        ApiPath("/api/jobs/{name}/events", error, GET=Operation(events, "Its events, as they happen.")),
        ApiPath("/api/jobs/{name}/images/{index}", error, GET=Operation(image, "One of its images.")),
        ApiPath("/api/inspect", error, POST=Operation(inspect, how, bytes, images=True)),
        ApiPath("/api/control/{kind}", error, POST=Operation(control_image, mapped, bytes, images=True)),
        ApiPath("/api/models", error, GET=Operation(models, "Models and samplers.")),
        ApiPath("/api/prompts", error, GET=Operation(prompts, "All concepts that a small model knows.")),
        ApiPath("/api/adapters", error, GET=Operation(adapters, "Adapters and embeddings of a model.")),
    ]


def error(refused: Rejected, request_id: str) -> Response:
    """Format a refusal."""
    content = {"error": {"message": refused.message, "code": refused.code, "param": refused.param}}
    return json_answer(content, error_headers(refused, request_id), refused.status)


def job_json(job: Job) -> dict[str, Any]:
    """Return a job as JSON values for its client, and note that the client has read how the job ended."""
    job.read |= job.status.over
    code_message = job.error and {"code": job.error[0], "message": job.error[1]}
    return {
        "id": job.id,
        "status": job.status,
        "created": job.created,
        "model": job.model,
        "ahead": job.ahead,
        "seconds_left": None if job.waits_for else _rounded(job.seconds_left),  # for an unknown time
        "waits_for": job.waits_for or None,
        "images": [_picture_json(job, picture) for picture in job.pictures],
        "error": code_message,
        "hints": job.hints,
    }


def _picture_json(job: Job, picture: Picture) -> dict[str, Any]:
    names = ("index", "status", "step", "steps", "seed", "width", "height", "file", "not_kept")
    return {name: getattr(picture, name) for name in names} | {"url": _url(job, picture)}


def _url(job: Job, picture: Picture) -> str | None:
    return f"/api/jobs/{job.id}/images/{picture.index}" if picture.data is not None else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds, 2)


def _card(card: ModelCard, *, default: bool) -> dict[str, Any]:
    names = ("native", "size", "sizes", "any_size", "size_step", "steps", "guidance_scale", "sampler", "max_images",
             "max_steps", "tasks", "examples", "styles", "family", "guided", "no_guidance", "negative_prompt",
             "prompt_weights", "clip_skip", "references", "samplers", "vae", "vaes", "hires_strength", "controls",
             "controlnets", "ip_adapters")  # fmt: skip
    fields = {name: getattr(card, name) for name in names}
    return {"id": card.id, "name": card.id, "default": default, **fields}


def _ask(body: NewJob, engine: Engine, client: str, once: str | None) -> JobRequest:
    """Make a job request of a body. Call this off the event loop: it decodes images."""
    card = model_named(engine, body.model)
    if body.quality is not None and body.format == "png":
        problem = f"quality={body.quality}: PNG loses nothing; leave it out, or ask for format='webp'"
        raise Rejected(400, "invalid_value", problem, param="quality")
    steady = "guidance_steps" not in (body.options or {})
    if body.negative_prompt and steady and body.guidance_scale is not None and body.guidance_scale <= card.no_guidance:
        cure = f"leave it out, or send more than {card.no_guidance:g}"
        problem = f"negative_prompt: guidance_scale={body.guidance_scale:g} reads none; {cure}"
        raise Rejected(400, "invalid_value", problem, param="negative_prompt")
    if twice := [name for name in OPTIONS if getattr(body, name) is not None and name in (body.options or {})]:
        raise Rejected(400, "invalid_value", f"{twice[0]} is in options as well; send it once", param=twice[0])
    image, mask, source_prompt = None, None, ""
    if body.image is not None:
        data = bytes_of_text("image", body.image)
        image = Pixels().read("image", data)
        source_prompt = prompt_in(io.BytesIO(data)) if body.upscale is not None and not body.prompt else ""
    if body.mask is not None:
        mask = Pixels().read("mask", body.mask, grey=True)
        if image is not None and mask.size != image.size:
            sizes = f"{mask.width} x {mask.height} pixels, image {image.width} x {image.height}"
            raise Rejected(400, "invalid_value", f"mask has {sizes}; they must be of the same size", param="mask")
    pixels = Pixels()
    control, image_prompt = _control(body.control, pixels), _image_prompt(body.image_prompt, pixels)
    if body.control_from is not None:
        control = _mapped(control, body.control_from)
    width, height = body.width, body.height
    reads = "editing" in card.tasks and mask is None and body.strength is None
    later = body.upscale is not None or (body.options or {}).get("outpaint") or (card.any_size and reads)
    seen = _first(control) if image is None else image
    if seen is not None and (width, height) == (None, None) and not later:
        width, height = size_of(card, seen)
    control_options = {name: value for name in OPTIONS if (value := getattr(body, name)) is not None}
    return JobRequest(
        **{name: getattr(body, name) for name in _SAME},
        model=card.id if body.model is None else body.model,
        width=width,
        height=height,
        seed=None if body.seed == -1 else body.seed,
        image=image,
        references=tuple(pixels.read("references", reference) for reference in body.references),
        mask=mask,
        source_prompt=source_prompt,
        control=control,
        image_prompt=image_prompt,
        options={**(body.options or {}), **control_options},
        adapters=body.adapters or {},
        vae=body.vae or None,
        previews=PREVIEWS if body.previews else 0,
        client=client,
        once=once,
    )


def _control(value: Any, pixels: Pixels) -> Any:
    """Decode control images, in the form in which they were sent."""
    if isinstance(value, list):
        return [_control(entry, pixels) for entry in value]
    if isinstance(value, dict):
        return {label: pixels.read("control", text) for label, text in value.items()}
    if isinstance(value, bool):
        return value or None
    return None if value is None else pixels.read("control", value)


def _mapped(control: Any, kind: str) -> Any:
    """Make control images of the images that were sent, such as their edges.

    Raises:
        Rejected: there is no such kind, or no image.
    """
    if isinstance(control, list):
        return [None if entry is None else _mapped(entry, kind) for entry in control]
    if isinstance(control, dict):
        return {label: _mapped(image, kind) for label, image in control.items()}
    if not isinstance(control, Image.Image):
        raise Rejected(400, "invalid_value", "control_from: needs a control image", param="control_from")
    try:
        return control_map(kind, control)
    except InputError:
        message = f"control_from: {nearest(kind, list(MAPS))}"
        raise Rejected(400, "invalid_value", message, param="control_from") from None


def _first(control: Any) -> Image.Image | None:
    """Return the first control image, whose size is the default size of the images."""
    control = None if control is True else control
    while isinstance(control, list | dict):
        control = next((entry for entry in (control.values() if isinstance(control, dict) else control) if entry), None)
    return control


def _image_prompt(value: str | NewPrompt | list[NewPrompt] | None, pixels: Pixels) -> list[PromptImage] | None:
    """Decode image prompts."""
    if value is None:
        return None
    prompts = [NewPrompt(value)] if isinstance(value, str) else value if isinstance(value, list) else [value]
    name = "image_prompt"
    return [
        PromptImage(
            pixels.read(name, prompt.image),
            prompt.scale,
            None if prompt.mask is None else pixels.read(f"{name}.mask", prompt.mask, grey=True),
            prompt.adapter,
        )
        for prompt in prompts
    ]


async def _events(job: Job) -> AsyncIterator[bytes]:
    """Yield server-sent events, first the present state of the job and its finished images."""
    sent: set[int] = set()
    began = None if job.over else Changed(job.status)
    yield sent_event("job", job_json(job))
    async for event in watched(job):
        if event is None:
            yield b": keepalive\n\n"
            continue
        for picture in job.pictures:  # some were done before anyone watched
            if picture.data is not None and picture.index not in sent:
                sent.add(picture.index)
                yield sent_event("image", _image_json(job, picture))
        late = isinstance(event, Stepped | Previewed) and event.index in sent
        if not (late or isinstance(event, Finished) or event == began):
            yield _as_sent(job, event)
        began = None  # later ones of the same status say how many are ahead


def _as_sent(job: Job, event: Event) -> bytes:
    match event:
        case Changed(status) if status.over:
            return sent_event(str(status), job_json(job))
        case Changed():
            return sent_event("job", job_json(job))
        case Stepped(index, step, steps, left):
            return sent_event("step", {"index": index, "step": step, "steps": steps, "seconds_left": _rounded(left)})
        case Previewed(index, step, steps, data, media_type):
            where = {"index": index, "step": step, "steps": steps}
            return sent_event("preview", {**where, "image": data_url(media_type, data)})
        case Finished(index):
            return sent_event("image", _image_json(job, job.pictures[index]))


def _image_json(job: Job, picture: Picture) -> dict[str, Any]:
    names = ("index", "seed", "width", "height", "file", "not_kept")
    return {name: getattr(picture, name) for name in names} | {"url": _url(job, picture)}


def _inspected(data: bytes, cards: Sequence[ModelCard]) -> bytes:
    """Return the settings of an image as a job that makes it again; no pixel is decoded."""
    try:
        metadata = metadata_in(io.BytesIO(data), Path("the image"))
        job, recorded = as_job(metadata), recorded_in(metadata)
        name = _stem(str(recorded.get("model")))
        named = [card for card in cards if name in (_stem(card.id), _stem(card.file))]
        if "clip_skip" in job["settings"].get("options", {}):
            layer = min((card.usual_layer for card in named or cards), default=1)
            job["settings"]["options"]["clip_skip"] = skipped(recorded, layer)
        if found := other_hash(recorded, [card.sha256 for card in named]):
            job["missing"].append(f"the model file with the {found}")
        # Not by msgspec: prompts may hold what UTF-8 cannot, and Python writes that as escapes.
        return json.dumps({**job, "metadata": recorded}).encode()
    except InputError as unknown:
        inside = data.lstrip()[:1] in (b"{", b"-")  # JSON, a form
        cure = "; send the bytes of its file as the body, with nothing around them" if inside or not data else ""
        code = "unread_settings" if isinstance(unknown, UnreadError) else "no_settings"
        raise Rejected(400, code, f"{unknown}{cure}") from None
    except (ValueError, RecursionError):
        raise Rejected(400, "no_settings", "the image: holds settings that cannot be read") from None


def _stem(name: str) -> str:
    """Return the name of a model without folders and ending, in lower case."""
    return stem_of(name.replace("\\", "/").rpartition("/")[2]).lower()


def _control_image(data: bytes, kind: str) -> bytes:
    """Return a control image of an image file, as ``control_from`` makes it, as PNG."""
    file = io.BytesIO()
    _mapped(Pixels().read("image", data), kind).save(file, "png")
    return file.getvalue()


def recorded_in(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded settings of an image; for a grid those of its first image."""
    grid = metadata.get("grid")
    return grid[0] if isinstance(grid, list) and grid and isinstance(grid[0], dict) else metadata


def as_job(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``settings``, fields of a job that makes an image again, and ``missing``, names of its other settings."""
    recorded = recorded_in(metadata)
    lost = lost_settings(recorded)
    given = {name: value for name, value in recorded.items() if name in _FIELDS and name not in lost}
    fields = {_FIELDS[name]: value for name, value in given.items() if value not in (None, "", {})}
    if isinstance(enlarged := recorded.get("upscale"), dict):  # its size is that of the image, so many times
        fields = {name: value for name, value in fields.items() if name not in ("width", "height")}
        fields["upscale"] = enlarged.get("scale")
    if isinstance(adapters := recorded.get("adapters"), dict):
        fields["adapters"] = {name: entry.get("weight") for name, entry in adapters.items() if isinstance(entry, dict)}
    if isinstance(vae := fields.get("vae"), str):
        fields["vae"] = public_names([vae])[0]
    options = fields.get("options")
    left_out = []
    if curve := _curve_in(fields):  # as a separate setting
        fields["options"] = options = {**(options if isinstance(options, dict) else {}), "sigmas": curve}
    if isinstance(options, dict):
        left_out = [name for name in options if name in NOT_OFFERED]
        fields["options"] = {
            name: value
            for name, value in options.items()
            if name in offered(OptionRecord, "server") and name not in lost
        }
    settings = {name: value for name, value in fields.items() if value != {} and _fits(name, value)}
    missing = [name for name in fields if name not in settings and fields[name] != {}]
    missing += [f"options.{name}" for name in left_out]
    for name, key in keys_of("images").items():
        if name in recorded:
            count = sum(mark is not None for mark in list_in(recorded, name))
            missing.append(f"{count} {key.noun}s" if count > 1 else key.noun)
    missing += [*lost, *missing_embeddings(recorded), *unknown_settings(recorded)]
    return {"settings": settings, "missing": missing}


def _curve_in(fields: dict[str, Any]) -> str | None:
    """Return the sigma curve that the options or the sampler's name have; the name loses it."""
    sampler, options = fields.get("sampler"), fields.get("options")
    named, curve = None, options.get("sigmas") if isinstance(options, dict) else None
    with suppress(InputError):
        if isinstance(sampler, str) and (named := find(sampler)[1].get("sigmas")):
            fields["sampler"] = find(sampler)[0].name
        return curve_named(curve) if isinstance(curve, str) else None if curve else named
    return None


def _fits(field: str, value: Any) -> bool:
    """Check if a field of a job may have a value."""
    try:
        msgspec.convert(value, _TYPES[field])
    except msgspec.ValidationError:
        return False
    return True
