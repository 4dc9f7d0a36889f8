"""Hugging Face's form of text-to-image and image-to-image: JSON in, the bytes of an image out."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from canvax.server.answers import (
    asked,
    client_of,
    completed,
    error_headers,
    in_words_of,
    json_answer,
    model_header,
    read_json,
)
from canvax.server.fields import Scale, Seed, Side, Steps, Strength
from canvax.server.images_in import Pixels
from canvax.server.jobs import MEDIA_TYPES, Engine, Format, JobRequest, Rejected
from canvax.server.paths import ApiPath, Operation

_FORMATS: dict[str, Format] = {media_type: kind for kind, media_type in MEDIA_TYPES.items()}
_JSON = "application/json"
_BEGINNINGS = ("data:image/", "iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")
"""First characters of images as base64: PNG, JPEG, WebP, and GIF, which is refused with a reason."""
_FIELDS = {"prompt": "inputs", "steps": "num_inference_steps", "sampler": "scheduler", "image": "inputs"}
"""Arguments of ``JobRequest``, and their names in this API."""

Text = Annotated[str, Meta(max_length=32_000)]


class Size(Struct):
    """Pixels."""

    width: Side
    height: Side


class Parameters(Struct):
    """Settings; ``prompt`` where ``inputs`` is an image."""

    prompt: Text | None = None
    negative_prompt: Text | None = None
    width: Side | None = None
    height: Side | None = None
    target_size: Size | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Scale | None = None
    scheduler: Annotated[str, Meta(max_length=100)] | None = None
    seed: Seed | None = None
    strength: Strength | None = None
    options: dict[str, Any] | None = None


class Body(Struct):
    """A prompt, or an image as base64."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: Parameters | None = None


PREFIXES = ("/models/", "/hf")


def routes(engine: Engine) -> list[ApiPath]:
    """Return the paths: /models/NAME for a model by its name, /hf and / for the default model."""

    async def generate(request: Request) -> Response:
        name = request.path_params.get("name")
        media_type = _accepted(request.headers.get("accept", ""))
        kind = _FORMATS.get(media_type, "png")
        if request.headers.get("content-type", "").lower().startswith("image/"):  # image to image without parameters
            content: Body | bytes = await request.body()
        else:
            content = await read_json(request, Body, status=422, strict=False)
        job = await asked(request, engine, _ask, content, name, kind, client_of(request))
        await completed(request, job)
        picture = job.pictures[0]
        headers = {**model_header(job), "x-canvax-seed": str(picture.seed)}
        if media_type == _JSON:
            return json_answer({"data": [{"b64_json": picture.data, "seed": picture.seed}]}, headers)
        return Response(picture.data, 200, headers, media_type=MEDIA_TYPES[kind])

    posted = Operation(generate, "A prompt, or an image as base64.", Body, images=True)
    paths = ("/models/{name:path}", "/hf/{name:path}", "/hf", "/")
    return [ApiPath(path, error, alias=path == paths[1], POST=posted) for path in paths]


def error(refused: Rejected, request_id: str) -> Response:
    """Format a refusal for Hugging Face's clients."""
    message, param = in_words_of(_FIELDS, refused)
    content = {"error": message, "error_type": refused.code, "param": param}
    return json_answer(content, error_headers(refused, request_id), refused.status)


def _accepted(accept: str) -> str:
    """Return the media type of the answer: PNG, unless the header prefers another known type."""
    best, liked = "image/png", 0.0
    for part in accept.split(","):
        media_type, *parameters = (word.strip().lower() for word in part.split(";"))
        weight = next((word[2:] for word in parameters if word.startswith("q=")), "1")
        try:
            quality = float(weight)
        except ValueError:
            continue
        if (media_type == _JSON or media_type in _FORMATS) and quality > liked:
            best, liked = media_type, quality
    return best


def _ask(body: Body | bytes, name: str | None, kind: Format, client: str) -> JobRequest:
    if isinstance(body, bytes):
        return JobRequest("", model=name or None, image=Pixels().read("inputs", body), format=kind, client=client)
    parameters = body.parameters or Parameters()
    image, prompt = None, body.inputs
    if parameters.prompt is not None or body.inputs.startswith(_BEGINNINGS):
        image, prompt = Pixels().read("inputs", body.inputs), parameters.prompt or ""
    if len(prompt) > 32_000:
        raise Rejected(422, "invalid_value", "inputs: more than 32000 characters; shorten it", param="inputs")
    for side in ("width", "height"):
        mine, its = getattr(parameters, side), getattr(parameters.target_size, side, None)
        if None not in (mine, its) and mine != its:
            problem = f"parameters.{side}={mine} and target_size.{side}={its} differ; send one of them"
            raise Rejected(422, "invalid_value", problem, param=f"parameters.{side}")
    size = parameters.target_size
    return JobRequest(
        prompt,
        negative_prompt=parameters.negative_prompt,
        model=name or None,
        width=parameters.width or (size and size.width),
        height=parameters.height or (size and size.height),
        steps=parameters.num_inference_steps,
        guidance_scale=parameters.guidance_scale,
        sampler=parameters.scheduler,
        seed=None if parameters.seed == -1 else parameters.seed,
        image=image,
        strength=parameters.strength,
        options=parameters.options or {},
        format=kind,
        client=client,
    )
