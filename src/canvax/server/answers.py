"""Code that all protocols share: reading and checking bodies, waiting for jobs, writing answers."""

from __future__ import annotations

import asyncio
import math
import re
import string
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args, get_origin
from urllib.parse import quote

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from canvax.call import OptionRecord
from canvax.errors import InputError, nearest, shown
from canvax.familiar import CALL
from canvax.server.jobs import DRAINED, Engine, Event, Job, JobRequest, ModelCard, Rejected, Status, invalid
from canvax.settings import offered

Body = TypeVar("Body")
Endpoint = Callable[[Request], Awaitable[Response]]

PAUSE = 15.0
"""Seconds of silence after which a stream says that it is alive: proxies give up after 60."""
MOST_FILES, MOST_FIELDS, LONGEST_FIELD = 16, 100, 1 << 20
"""Limits of a form."""

MOST_VALUES = 100_000
"""Limit of a JSON body: each value takes far more memory than its bytes."""

DECODERS = 4
"""Images that are decoded at the same time: each may take a few hundred megabytes meanwhile."""

_decoders: RunVar[anyio.CapacityLimiter] = RunVar("decoders")
_readers: RunVar[anyio.CapacityLimiter] = RunVar("readers")
_CHARSET = re.compile(r"\bcharset\*?\d*\*?\s*=\s*\"?([^\";\s]*)")
_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_HEAD = re.compile(r"(?:options\.)?([a-z_0-9]+)(?=[=: ])")
_FIELD = re.compile(r"(missing required|unknown) field `([^`]*)")
_BYTE = re.compile(r"\(byte (\d+)\)")
_STATUSES = {"cancelled": 409, "timeout": 504, "deadline": 504, "too_late": 504, "out_of_memory": 503, "draining": 503,
             "model_unavailable": 503}  # fmt: skip
"""HTTP status of a failed job by its code; 500 for other codes."""


def client_of(request: Request) -> str:
    """Return the client: the id of an API key, or "" without a key."""
    return getattr(request.state, "client", "")


def request_id_of(request: Request) -> str:
    """Return the id of the request in logs and answers."""
    return getattr(request.state, "request_id", "") or uuid.uuid4().hex


def answering(error: Callable[[Rejected, str], Response], endpoint: Endpoint) -> Endpoint:
    """Return an endpoint whose refusals, and errors about an argument, are answered in the format of its API."""

    @wraps(endpoint)
    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Rejected as refused:
            return refusal(request, refused, error)
        except InputError as fault:
            return refusal(request, invalid(fault.argument or None, str(fault)), error)
        except ClientDisconnect:  # in the middle of its body, so no client reads this
            return Response(status_code=400)

    return answered


def refusal(request: Request, refused: Rejected, error: Callable[[Rejected, str], Response]) -> Response:
    """Answer a refusal in the format of an API, with its code and argument in the request's line of the log."""
    request.state.log = getattr(request.state, "log", {}) | refused.logged
    return error(refused, request_id_of(request))


def once_of(request: Request) -> str | None:
    """Return the value of the header Idempotency-Key.

    Raises:
        Rejected: the value is too long or not printable.
    """
    once = request.headers.get("idempotency-key", "")
    if len(once) > 128 or not (once.isascii() and once.isprintable()):
        raise Rejected(400, "invalid_value", "Idempotency-Key: at most 128 printable characters of ASCII")
    return once or None


def model_header(job: Job) -> dict[str, str]:
    """Return the header with the model's name. Headers are ASCII, so other characters and % are percent-encoded as
    UTF-8."""
    safe = (string.punctuation + " ").replace("%", "")
    return {"x-canvax-model": quote(job.model, safe, errors="surrogateescape")}


def error_headers(refused: Rejected, request_id: str) -> dict[str, str]:
    """Return the headers of a refusal."""
    headers = {"x-request-id": request_id, **({"WWW-Authenticate": "Bearer"} if refused.status == 401 else {})}
    if refused.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refused.retry_after)))
    if refused.status in (409, 504):  # clients would ask again by themselves, and pay for the image twice
        headers["x-should-retry"] = "false"
    return headers


async def read_json(request: Request, kind: type[Body], *, status: int = 400, strict: bool = True) -> Body:
    """Read the body as a record; unknown fields are ignored.

    Args:
        request: the request.
        kind: a msgspec.Struct.
        status: HTTP status if a field is wrong.
        strict: if true, "20" is no number.

    Raises:
        Rejected: the body is not JSON, or a field has the wrong type or is out of its range.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        # Browsers send other types across sites without asking first.
        message = f"Content-Type={media_type!r:.80}: send JSON, with the header Content-Type: application/json"
        raise Rejected(415, "unsupported_media_type", message)
    # In no other thread: msgspec keeps Python's lock, so that the event loop would wait all the same.
    return _decoded(await request.body(), kind, status, strict)


def _decoded(body: bytes, kind: type[Body], status: int, strict: bool) -> Body:
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise Rejected(status, "too_many_values", f"the body holds more than {MOST_VALUES} values; send fewer")
    try:
        return msgspec.json.decode(body, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        sent = None
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            sent = msgspec.json.decode(body)
        raise field_error(error, kind, sent, status) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        at = _fault_at(body, error)
        near = "" if at is None else f" near {body[max(0, at - 40) : at + 10].decode(errors='replace')!r}"
        message = f"the body is not JSON that can be read{near}; send an object in UTF-8"
        raise Rejected(status, "invalid_json", message) from None


def _fault_at(body: bytes, error: Exception) -> int | None:
    """Return the first byte that is not UTF-8, else the byte that msgspec names, if it names one."""
    try:
        body.decode()
    except UnicodeDecodeError as invalid:
        return invalid.start
    match = _BYTE.search(str(error))
    return int(match[1]) if match else None


def field_error(error: msgspec.ValidationError, kind: Any, sent: Any, status: int = 400) -> Rejected:
    """Return a refusal that names the field, its value and the values that it takes.

    Args:
        error: the error of msgspec.
        kind: the type of the record.
        sent: the values that the client sent.
        status: HTTP status.
    """
    where, message = _WHERE.search(str(error)), _WHERE.sub("", str(error)).replace(" | null", "")
    path = where[1] if where else ""
    if odd := _FIELD.search(message):
        path = f"{path}.{odd[2]}".lstrip(".")
        meant = CALL[path].becomes if path in CALL else ""
        meant = {"num_inference_steps": "steps", "num_images_per_prompt": "n"}.get(meant or path, meant)
        if meant in kind.__struct_fields__:
            cure = f"send {meant!r}"
        elif "options" in kind.__struct_fields__ and path in _options():
            cure = f'send it in options, {{"options": {{"{path}": ...}}}}'
        else:
            cure = nearest(path[:100], kind.__struct_fields__) if "." not in path else "leave it out"
        message = f"{path} is not known; {cure}" if odd[1] == "unknown" else f"{path} is missing; send it"
    else:
        choices = _choices(kind, path) if "enum" in message else []
        wants = f" is not {' or '.join(choices)}" if choices else f": {message[:1].lower()}{message[1:]}"
        message = (_value_at(path, sent) if path else "the body") + wants
        if message.endswith(("expected `object`, got `array`", "expected `object`, got `str`")):
            message += '; send {"NAME": VALUE}' if path else '; send an object, such as {"prompt": "a cat"}'
    return Rejected(status, "invalid_value", message, param=path.split("[")[0].rstrip(".")[:80] or None)


def _options() -> set[str]:
    """Return the names that ``options`` of a body may contain."""
    return set(offered(OptionRecord, "server"))


def _choices(kind: Any, name: str) -> list[str]:
    """Return the words that a field of a record takes."""
    hint = next((field.type for field in msgspec.structs.fields(kind) if field.name == name), None)
    return [word for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part)]


_LONG = 80
"""Characters of a text in a list above which only the number of entries is shown."""


def _value_at(path: str, value: Any) -> str:
    """Return a path of msgspec, in which [...] is any entry of a table, with the value there if clients may see it."""
    try:
        for step in re.findall(r"\.\.\.|[^.\[\]]+", path):
            if step == "...":
                ((name, value),) = value.items()
                path = path.replace("[...]", f".{name}", 1)
            else:
                value = value[int(step) if isinstance(value, list) else step]
    except (LookupError, TypeError, ValueError, AttributeError):  # a field that was sent twice, or several entries
        return path
    if isinstance(value, list) and any(isinstance(text, str) and len(text) > _LONG for text in value):
        return f"{path}=[{len(value)} entries]"  # images
    return f"{path}={shown(value)}"


async def read_form(request: Request) -> tuple[list[tuple[str, str]], list[tuple[str, bytes]]]:
    """Return the texts of a multipart form and its files, in order with the names of their fields.

    Raises:
        Rejected: the body is not a form, is damaged or has too many parts.
    """
    media_type, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    if media_type.strip() != "multipart/form-data":
        message = f"Content-Type={media_type!r:.80}: send a form, with the header Content-Type: multipart/form-data"
        raise Rejected(415, "unsupported_media_type", message)
    if set(_CHARSET.findall(parameters)) - {"utf-8", "utf8"}:
        # Others would be decoded with whatever Python knows by that name, some of which takes minutes.
        raise Rejected(415, "unsupported_charset", "send the form in UTF-8")
    if "boundary=" not in parameters:
        message = (
            "Content-Type: multipart/form-data has no boundary; leave the header to the library that makes the form"
        )
        raise Rejected(400, "invalid_form", message)
    if not (await request.body()).rstrip().endswith(b"--"):
        raise Rejected(400, "invalid_form", "the form cannot be read: it ends in the middle; send all of it")
    try:
        async with request.form(max_files=MOST_FILES + 1, max_fields=MOST_FIELDS, max_part_size=LONGEST_FIELD) as form:
            return await _parts(form)
    except (MultiPartException, HTTPException) as error:
        if isinstance(error, HTTPException) and error.status_code != 400:
            raise
        reason = error.detail if isinstance(error, HTTPException) else error.message
        raise Rejected(400, "invalid_form", f"the form cannot be read: {reason}") from None


async def _parts(form: FormData) -> tuple[list[tuple[str, str]], list[tuple[str, bytes]]]:
    fields: list[tuple[str, str]] = []
    files: list[tuple[str, bytes]] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            files.append((name, await value.read()))
        elif value:  # an empty field is one that was not filled in
            fields.append((name, value))
    return fields, files


def model_named(engine: Engine, name: str | None) -> ModelCard:
    """Return the model of this name, or the default: most clients only know names of models of other servers."""
    cards = engine.models()
    return next((card for card in cards if card.id == name), cards[0])


def nearest_size(card: ModelCard, size: tuple[int, int]) -> tuple[int, int]:
    """Return the ready size (width, height) with the most similar proportions, then area."""

    def apart(other: tuple[int, int]) -> tuple[float, float]:
        proportions = abs(math.log(other[0] / other[1] * size[1] / size[0]))
        return round(proportions, 3), abs(math.log(other[0] * other[1] / (size[0] * size[1])))

    return min(card.sizes or (card.native,), key=apart)


def size_of(card: ModelCard, image: Image.Image) -> tuple[int, int]:
    """Return the size (width, height) of an image if the model can make it, else the nearest that is ready."""
    return image.size if card.can_make(image.size) else nearest_size(card, image.size)


async def decoding(function: Callable[..., Body], *arguments: Any) -> Body:
    """Call a function that decodes images off the event loop, a few at a time."""
    return await anyio.to_thread.run_sync(function, *arguments, limiter=_limiter(_decoders, DECODERS))


async def reading(function: Callable[..., Body], *arguments: Any) -> Body:
    """Call a function that reads many files off the event loop, one at a time, since they read the same files."""
    return await anyio.to_thread.run_sync(function, *arguments, limiter=_limiter(_readers, 1))


def _limiter(limits: RunVar[anyio.CapacityLimiter], count: int) -> anyio.CapacityLimiter:
    """Return the limiter of the running event loop."""
    try:
        return limits.get()
    except LookupError:
        limits.set(limit := anyio.CapacityLimiter(count))
        return limit


async def asked(
    request: Request, engine: Engine, make: Callable[..., JobRequest], *arguments: Any, awaited: bool = True
) -> Job:
    """Submit the job request that ``make`` returns. ``make`` decodes images; few decoded images wait, since the job is
    submitted in the same thread. ``awaited``: the answer is the images.

    Raises:
        Rejected: the request cannot be used, or the job was not accepted.
    """
    return _logged(request, await decoding(lambda: engine.submit(replace(make(*arguments), awaited=awaited))))


async def submitted(request: Request, engine: Engine, job_request: JobRequest) -> Job:
    """Submit a job request whose answer is the images.

    Raises:
        Rejected: the job was not accepted.
    """
    return _logged(request, await run_in_threadpool(engine.submit, replace(job_request, awaited=True)))


def _logged(request: Request, job: Job) -> Job:
    """Put the id of a job into the request's line of the log."""
    request.state.log = {"job": job.id}
    return job


def failure(job: Job) -> Rejected:
    """Return the reason why a job that is over has no images."""
    if job.parked:
        why = "the server stopped; send the request again with its Idempotency-Key, for the same job"
        return Rejected(503, "draining", why, retry_after=DRAINED)
    if job.status is Status.CANCELLED:
        return Rejected(409, "cancelled", "the job was cancelled before its images were done")
    code, message = job.error or ("server_error", "the images could not be generated")
    return Rejected(_STATUSES.get(code, 500), code, message, retry_after=DRAINED if code == "draining" else None)


async def settled(request: Request, job: Job, hear: Callable[[Event], None] | None = None) -> None:
    """Wait until a job is over; cancel it when the client disconnects, since no client would read the answer.

    Args:
        request: the request, whose body was read.
        job: the job. A job with an Idempotency-Key is not cancelled: its client may return for the answer.
        hear: called with each event.
    """
    # A plain endpoint is not cancelled when its client goes, so that has to be waited for as well.
    async with anyio.create_task_group() as tasks:

        async def listen() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        try:
            tasks.start_soon(listen)
            async with aclosing(_events(job, previews=False)) as events:
                async for event in events:
                    if hear:
                        hear(event)
            tasks.cancel_scope.cancel()
        finally:
            give_up(job)


async def completed(request: Request, job: Job) -> None:
    """Wait for a job as ``settled`` does.

    Raises:
        Rejected: the job failed, or was cancelled.
    """
    await settled(request, job)
    if job.status is not Status.DONE:
        raise failure(job)


def give_up(job: Job) -> None:
    """Cancel a job whose client is gone, unless it is over or may be asked for again. Does not wait for it."""
    if not job.over and not job.request.once:
        asyncio.get_running_loop().run_in_executor(None, job.cancel)


async def cancelled(job: Job) -> None:
    """Cancel a job. The engine may hold its lock for long, as while it starts: the event loop does not wait for it."""
    await run_in_threadpool(job.cancel)


def _events(job: Job, *, previews: bool) -> AsyncGenerator[Event, None]:
    return cast(AsyncGenerator[Event, None], job.watch(previews=previews))


async def watched(job: Job) -> AsyncIterator[Event | None]:
    """Yield the events of a job, and None after each ``PAUSE`` seconds without an event."""
    async with aclosing(_events(job, previews=True)) as events:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=PAUSE)
                if not done:
                    yield None
                    continue
                event = coming.result()
                if event is None:
                    return
                yield event
                coming = asyncio.ensure_future(anext(events, None))
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError):
                await coming


class EventStream(StreamingResponse):
    """Server-sent events of a job, which is given up when the client goes."""

    def __init__(self, job: Job, content: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        # Proxies would keep events back until there are many.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # here, since an iterator that was never begun does not run its own
            give_up(self._job)


def sent_event(name: str, value: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encoded(value) + b"\n\n"


def encoded(value: Any) -> bytes:
    """Encode JSON. Bytes become base64 at once, in a tenth of the time that megabytes of text take."""
    return msgspec.json.encode(value)


def data_url(media_type: str, data: bytes) -> msgspec.Raw:
    """Return a file as the JSON text of a data: URL."""
    return msgspec.Raw(b'"data:' + media_type.encode() + b";base64," + msgspec.json.encode(data)[1:])


def json_answer(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(encoded(value), status, dict(headers or {}), media_type="application/json")


def one_of(body: Any, *names: str) -> Any:
    """Return the value of a field that has several names.

    Raises:
        Rejected: two names have different values.
    """
    values = without_none((name, getattr(body, name)) for name in names)
    if len(set(values.values())) > 1:
        message = " and ".join(f"{name}={value}" for name, value in values.items())
        raise Rejected(400, "invalid_value", f"{message} say different things; send one of them", param=min(values))
    return next(iter(values.values()), None)


def in_words_of(fields: Mapping[str, str], refused: Rejected) -> tuple[str, str | None]:
    """Return message and field of a refusal. The first word of the message may have another name in an API."""
    head = _HEAD.match(refused.message)
    if head and head[1] in fields:
        return fields[head[1]] + refused.message[head.end() :], fields[head[1]]
    return refused.message, fields.get(refused.param or "", refused.param)


def without_none(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return names and values without those that are None."""
    return {name: value for name, value in pairs if value is not None}
