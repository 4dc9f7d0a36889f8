"""OpenAI's Images API, for openai-python, litellm, LangChain, n8n, Open WebUI and the AI SDK.

These fields have no effect here: ``style``, ``moderation``, ``user``, ``safety_identifier`` and ``input_fidelity``.
``quality`` low is canvax's fast; all other words are the full quality, which answers call auto. canvax adds seed,
negative_prompt, steps, guidance_scale, sampler, strength, options. An unknown model is the default one, since many
clients only know the names of OpenAI's.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response

from canvax.call import OptionRecord
from canvax.models.denoiser import MOST_REFERENCES
from canvax.server.answers import (
    EventStream,
    asked,
    client_of,
    completed,
    data_url,
    error_headers,
    failure,
    field_error,
    json_answer,
    model_header,
    model_named,
    nearest_size,
    once_of,
    one_of,
    read_form,
    read_json,
    sent_event,
    size_of,
    submitted,
    watched,
)
from canvax.server.fields import Scale, Seed, Side, Steps, Strength
from canvax.server.images_in import Pixels, colours, transparent_mask
from canvax.server.jobs import (
    MEDIA_TYPES,
    Engine,
    Format,
    Job,
    JobRequest,
    ModelCard,
    Picture,
    Previewed,
    Rejected,
    Status,
)
from canvax.server.paths import ApiPath, Operation
from canvax.settings import offered, plain_value

_OPENAI_SIZES = {(256, 256), (512, 512), (1024, 1024), (1024, 1536), (1536, 1024), (1024, 1792), (1792, 1024)}
"""Sizes of OpenAI's models. Clients that only know these mean no more by it than the proportions."""
_PREFIXES = ("/v1", "", "/openai/deployments/{deployment}")
_FIELDS = {"width": "size", "height": "size", "format": "output_format", "quality": "output_compression"}
"""Arguments of ``JobRequest``, and their names in this API."""
_ENTRY = re.compile(r"(options|adapters)\[([^\[\]]+)\](?:\[([^\[\]]+)\])?(\[\])?")
"""The name of a form's field that is an entry of an object, ``options[mask_blur]``."""
_NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
}
"""Token counts, which clients need and which have no meaning here."""


class Generation(Struct):
    """The body of /images/generations; for /images/edits the fields without the files."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=1000)] | None = None
    size: Annotated[str, Meta(max_length=20)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    quality: Annotated[str, Meta(max_length=20)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    # canvax's own, and the names that others have for them
    seed: Seed | None = None
    negative_prompt: Annotated[str, Meta(max_length=32_000)] | None = None
    steps: Steps | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Scale | None = None
    cfg_scale: Scale | None = None
    cfg: Scale | None = None
    sampler: Annotated[str, Meta(max_length=100)] | None = None
    strength: Strength | None = None
    width: Side | None = None
    height: Side | None = None
    options: dict[str, Any] | None = None
    adapters: Annotated[dict[str, float | dict[str, float]], Meta(max_length=16)] | None = None


PREFIXES = ("/v1/", "/images/", "/openai/")


def routes(engine: Engine) -> list[ApiPath]:
    """Return the paths, with /v1, without it, and under the names of deployments."""

    async def sign_of_life(_: Request) -> Response:  # for SillyTavern; no word on other origins
        return Response(status_code=204, headers={"Allow": "POST, OPTIONS"})

    async def generate(request: Request) -> Response:
        body = await read_json(request, Generation)
        if body.strength is not None:
            message = f"strength={body.strength!r} without an image: images are sent to /v1/images/edits"
            raise Rejected(400, "invalid_value", message, param="strength")
        job_request = _ask(request, engine, body)
        return await _answer(request, await submitted(request, engine, job_request), body, "image_generation")

    async def edit(request: Request) -> Response:
        body, images, masks = _parts_of(*await read_form(request))
        job = await asked(request, engine, lambda: _ask(request, engine, body, *_decoded(images, masks)))
        return await _answer(request, job, body, "image_edit")

    async def vary(_: Request) -> Response:
        raise Rejected(404, "not_found", "variations are not offered; send the image to /v1/images/edits with a prompt")

    async def models(_: Request) -> Response:
        return json_answer({"object": "list", "data": [_described(card) for card in engine.models()]})

    async def model(request: Request) -> Response:
        name, cards = request.path_params["name"], engine.models()
        for card in cards:
            if card.id == name:
                return json_answer(_described(card))
        known = " or ".join(card.id for card in cards)
        message = f"the model {name!r:.200} is not served here; ask for {known}"
        raise Rejected(404, "model_not_found", message, param="model")

    edits = Operation(edit, "Images of a prompt and an image.", Generation, images=True, form=True)
    paths = {
        "/images/generations": {
            "POST": Operation(generate, "Images of a prompt.", Generation),
            "OPTIONS": Operation(sign_of_life),
        },
        "/images/edits": {"POST": edits},
        "/images/variations": {"POST": Operation(vary)},
        "/models": {"GET": Operation(models, "Models.")},
        "/models/{name:path}": {"GET": Operation(model, "A model.")},
    }
    return [
        ApiPath(prefix + path, error, alias=prefix != _PREFIXES[0], **operations)
        for prefix in _PREFIXES
        for path, operations in paths.items()
        if path.startswith("/images/") or prefix in _PREFIXES[:2]
    ]


def error(refused: Rejected, request_id: str) -> Response:
    """Format a refusal for OpenAI's clients."""
    return json_answer({"error": _error_of(refused)}, error_headers(refused, request_id), refused.status)


def _error_of(refused: Rejected) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(refused.status, kind)
    param = _FIELDS.get(refused.param, refused.param) if refused.param else None
    return {"message": refused.message, "type": kind, "param": param, "code": refused.code}


def _described(card: ModelCard) -> dict[str, Any]:
    return {"id": card.id, "object": "model", "created": card.created, "owned_by": "canvax"}


def _ask(
    request: Request,
    engine: Engine,
    body: Generation,
    images: Sequence[Image.Image] = (),
    mask: Image.Image | None = None,
) -> JobRequest:
    card = model_named(engine, body.model or request.path_params.get("deployment"))
    _check_together(body, card)
    if len(images) > 1 and (mask is not None or body.strength is not None):
        raise _wrong_number(f"{len(images)} images with a mask or a strength", "send one")
    if len(images) > 1 and "editing" not in card.tasks:
        raise _wrong_number(f"{len(images)} images", f"{card.id} reads one")
    image = images[0] if images else None
    width, height = _size(body, card, image)
    kind: Format = body.output_format or "png"
    return JobRequest(
        body.prompt,
        negative_prompt=body.negative_prompt,
        model=card.id,
        n=body.n or 1,
        width=width,
        height=height,
        steps=one_of(body, "steps", "num_inference_steps"),
        guidance_scale=one_of(body, "guidance_scale", "cfg_scale", "cfg"),
        sampler=body.sampler,
        seed=None if body.seed == -1 else body.seed,
        image=image,
        references=tuple(images[1:]),
        mask=mask,
        strength=body.strength,
        options=({"quality": "fast"} if body.quality in ("low", "fast") else {}) | (body.options or {}),
        adapters=body.adapters or {},
        format=kind,
        # 100 is the least compression, which others call the best quality
        quality=max(1, body.output_compression) if body.output_compression is not None and kind != "png" else None,
        previews=(body.partial_images or 0) if body.stream else 0,
        client=client_of(request),
        once=once_of(request),
    )


def _check_together(body: Generation, card: ModelCard) -> None:
    """Refuse fields that have no effect with the model or the other fields, instead of ignoring them."""
    lossless = body.output_format in (None, "png") and body.output_compression not in (None, 100)
    opaque = not card.alpha or body.output_format == "jpeg"
    for name, idle, why in (
        ("background", body.background == "transparent" and opaque, "there is no transparency here; leave it out"),
        ("output_compression", lossless, "PNG loses nothing; leave it out, or ask for output_format='webp'"),
        ("partial_images", body.partial_images and not body.stream, "they come in a stream; send stream=true as well"),
        ("response_format", body.stream and body.response_format == "url", "a stream holds base64; leave one out"),
    ):
        if idle:
            raise Rejected(400, "invalid_value", f"{name}={getattr(body, name)!r}: {why}", param=name)


def _size(body: Generation, card: ModelCard, image: Image.Image | None) -> tuple[int | None, int | None]:
    """Return width and height. A size that only OpenAI's models have becomes the nearest one of this model."""
    if body.size in (None, "", "auto"):
        if image is None or body.width or body.height or (body.options or {}).get("outpaint"):
            return body.width, body.height
        return size_of(card, image)
    match = re.fullmatch(r"(\d{1,5})\s*[x×]\s*(\d{1,5})", body.size, re.ASCII | re.IGNORECASE)
    if not match or not all(map(int, match.groups())):
        raise Rejected(400, "invalid_value", f"size={body.size!r} is not WIDTHxHEIGHT, such as 512x512", param="size")
    size = int(match[1]), int(match[2])
    if (body.width or size[0], body.height or size[1]) != size:
        message = f"size={body.size!r} and width={body.width}, height={body.height} differ; send one or the other"
        raise Rejected(400, "invalid_value", message, param="size")
    return size if card.can_make(size) or size not in _OPENAI_SIZES else nearest_size(card, size)


def _objects_of(fields: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a form. ``options`` and ``adapters`` are objects: JSON, or a field for each value.

    OpenAI's clients send ``{"options": {"mask_blur": 6}}`` as ``options[mask_blur]=6``, and a list as several fields
    ``options[guidance_steps][]``.
    """
    values: dict[str, Any] = dict(fields)
    for name in {"options", "adapters"} & values.keys():
        try:
            values[name] = msgspec.json.decode(values[name])
        except (msgspec.DecodeError, RecursionError):
            message = f"{name}={values[name]!r:.80} is not JSON; send an object"
            raise Rejected(400, "invalid_value", message, param=name) from None
    for name, text in fields:
        if not name.startswith(("options[", "adapters[")):
            continue
        match = _ENTRY.fullmatch(name)
        whole, outer, inner, several = match.groups() if match else ("", "", "", "")
        table = values.setdefault(whole, {}) if whole else None
        if inner and isinstance(table, dict):
            table = table.setdefault(outer, {})
        key = inner or outer
        if not isinstance(table, dict) or (key in table and not several):
            cure = "send the object as JSON in one field"
            raise Rejected(400, "invalid_value", f"{name[:80]} cannot be read; {cure}", param=name.partition("[")[0])
        field = offered(OptionRecord, "server").get(outer) if whole == "options" else None
        value = text if field and field.is_text else plain_value(text)
        table[key] = [*table.get(key, ()), value] if several else value
    return values


def _parts_of(
    fields: Sequence[tuple[str, str]], files: Sequence[tuple[str, bytes]]
) -> tuple[Generation, list[bytes], list[bytes]]:
    """Return the fields of a form, its images, and at most one mask."""
    values = _objects_of(fields)
    try:
        body = msgspec.convert(values, Generation, strict=False)
    except msgspec.ValidationError as problem:
        raise field_error(problem, Generation, values) from None
    for name, _ in files:
        if name in Generation.__struct_fields__:
            raise Rejected(400, "invalid_value", f"{name}: is a file; send it as text, without a filename", param=name)
    images = [data for name, data in files if name in ("image", "image[]")]
    masks = [data for name, data in files if name == "mask"]
    if {"image", "image[]", "mask"} & values.keys():
        raise Rejected(400, "invalid_image", "image and mask are to be sent as files of the form", param="image")
    if not 1 <= len(images) <= MOST_REFERENCES:
        raise _wrong_number(f"{len(images)} images", f"send one, or up to {MOST_REFERENCES} to a model that edits")
    if len(masks) > 1:
        raise _wrong_number(f"{len(masks)} masks", "send at most one")
    return body, images, masks


def _decoded(images: Sequence[bytes], masks: Sequence[bytes]) -> tuple[list[Image.Image], Image.Image | None]:
    """Decode images and their mask. Call this off the event loop."""
    pixels = Pixels()
    decoded = [pixels.decode("image", data) for data in images]
    image, shown = decoded[0], [colours("image", image) for image in decoded]
    if not masks:
        return shown, None
    mask = Pixels().decode("mask", masks[0])
    if mask.size != image.size:
        sizes = f"{mask.width} x {mask.height} pixels, image {image.width} x {image.height}"
        raise Rejected(400, "invalid_image", f"mask has {sizes}; make them of one size", param="mask")
    return shown, transparent_mask("mask", mask)


def _wrong_number(number: str, cure: str) -> Rejected:
    return Rejected(400, "invalid_image", f"{number}; {cure}", param="image")


async def _answer(request: Request, job: Job, body: Generation, kind: str) -> Response:
    headers = model_header(job)
    if body.stream:
        return EventStream(job, _events(job, kind), headers)
    await completed(request, job)
    # DALL-E's default was a URL, and clients that name it and no format, such as LangChain's, read nothing else.
    usual = "url" if (body.model or "").startswith("dall-e-") else "b64_json"
    as_url = (body.response_format or usual) == "url"
    images = [_image(job, picture, as_url=as_url) for picture in job.pictures]
    shared = _shared(job, job.pictures[0])
    return json_answer({"created": int(job.created), "data": images, **shared, "usage": _NO_USAGE}, headers)


def _image(job: Job, picture: Picture, *, as_url: bool) -> dict[str, Any]:
    # Never both: some clients read the URL first, and cannot fetch it.
    data = cast(bytes, picture.data)
    content = {"url": data_url(MEDIA_TYPES[job.request.format], data)} if as_url else {"b64_json": data}
    return {**content, "seed": picture.seed}


def _shared(job: Job, picture: Picture) -> dict[str, Any]:
    size = f"{picture.width}x{picture.height}"
    quality = "low" if job.request.options.get("quality") == "fast" else "auto"
    return {"background": "opaque", "output_format": job.request.format, "quality": quality, "size": size}


async def _events(job: Job, kind: str) -> AsyncIterator[bytes]:
    """Yield the events of a job: previews and finished images, several if n is more than 1."""
    sent: set[int] = set()
    async for event in watched(job):
        if event is None:
            yield b": keepalive\n\n"
        if isinstance(event, Previewed) and event.index not in sent:
            yield _partial(job, event, kind)
        # Not by ``Finished`` alone: images may have been done before anyone watched.
        for picture in job.pictures:
            if picture.data and picture.index not in sent:
                sent.add(picture.index)
                yield _completed(job, picture, kind)
    if job.status is not Status.DONE:
        yield sent_event("error", {"error": _error_of(failure(job))})
    yield b"data: [DONE]\n\n"


def _partial(job: Job, event: Previewed, kind: str) -> bytes:
    picture = job.pictures[event.index]
    shape = event.media_type.removeprefix("image/")  # of the preview, whatever was asked for
    fields = {**_shared(job, picture), "output_format": shape, "seed": picture.seed, "image_index": event.index}
    name = f"{kind}.partial_image"
    index = {"partial_image_index": event.number, "created_at": int(time.time())}
    return sent_event(name, {"type": name, "b64_json": event.data, **index, **fields})


def _completed(job: Job, picture: Picture, kind: str) -> bytes:
    name = f"{kind}.completed"
    fields = {**_shared(job, picture), "seed": picture.seed, "image_index": picture.index, "usage": _NO_USAGE}
    return sent_event(name, {"type": name, "b64_json": picture.data, "created_at": int(time.time()), **fields})
