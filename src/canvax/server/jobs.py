"""What the APIs ask of an engine, and what they hear from it. No HTTP, no JAX."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

from PIL import Image

from canvax.call import HIRES_STRENGTHS
from canvax.errors import shortened
from canvax.images.inputs import fingerprint

Format = Literal["png", "jpeg", "webp"]

LOOKS = 15.0
"""Seconds after asking how a job looks, within which somebody asks again. Previews are made as long."""

LONGEST_MESSAGE = 600
"""Characters of a refusal: it may repeat what was sent."""

MEDIA_TYPES: dict[Format, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


class Rejected(Exception):
    """A request that is not accepted.

    Attributes:
        status: of HTTP: 400, 404, 413, 429 or 503.
        code: in a word: ``invalid_value``, ``model_not_found``, ``size_not_ready``, ``queue_full``, ``draining``.
        message: a sentence for people, which names the cure.
        param: which argument, if it is one.
        retry_after: seconds after which it may be tried again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message := shortened(message, LONGEST_MESSAGE))
        self.status, self.code, self.message, self.param, self.retry_after = status, code, message, param, retry_after


def invalid(param: str | None, message: str) -> Rejected:
    """A value that cannot be used."""
    return Rejected(400, "invalid_value", message, param=param)


@dataclass(frozen=True)
class PromptImage:
    """An image that an IP-Adapter reads beside the prompt.

    Attributes:
        image: decoded and checked for its size in pixels, as all are here.
        scale: how strong it is: a number, or a table by part of the UNet.
        mask: where it acts, white; None for everywhere.
        adapter: which of the server's adapters reads it, from 0.
    """

    image: Image.Image
    scale: Any = 1.0
    mask: Image.Image | None = None
    adapter: int = 0


@dataclass(frozen=True)
class JobRequest:
    """Images that someone wants. What is None is the model's default.

    Attributes:
        prompt: what to show.
        negative_prompt: what to keep away from.
        model: a name that ``Engine.models`` lists; None for the first.
        n: images; image i has ``seed + i``.
        width: pixels.
        height: pixels.
        steps: of the sampler.
        guidance_scale: 1 or less (0 for Z-Image and Krea 2) switches guidance off.
        sampler: any name that ``canvax samplers`` knows.
        seed: None chooses one.
        image: what to begin from, decoded and checked for its size in pixels. Without a mask and a strength a model
            that edits reads it as a reference image.
        references: further reference images.
        mask: white is generated anew.
        strength: 0..1, how much of the run is done.
        upscale: how many times larger than the image, which is gone over tile by tile then; None for another task.
        source_prompt: that the image was generated with, for the metadata of one that is enlarged without a prompt.
        control: control images: one, or of several types a dict; with several networks a list of one for each, None
            for one that is left out. How strong they are is among the options. True with ``upscale``: each tile is its
            own.
        image_prompt: images that IP-Adapters read; None for none.
        options: by name, values of ``canvax.Options``; the engine refuses those that it does not offer.
        lenient: options that change nothing are passed over, and not refused: A1111's clients send whole forms.
        adapters: weights of adapters by name, each a number or a table by network; the prompt may name others.
        vae: an autoencoder that ``ModelCard.vaes`` lists, in place of the model's.
        controlnet: networks that ``ModelCard.controlnets`` lists, in place of those of the start: a name, or a list.
        format: of the finished images.
        quality: of JPEG and WebP, 1..100.
        previews: of each image on its way, at most; 0 for none.
        metadata: whether settings are written into the images.
        client: who asks: the id of an API key, or "" for all who have none. Clients share the engine fairly.
        once: what an Idempotency-Key header said. The same client's next job with it is the first one again.
        seconds: after which the answer is of no use to anyone; the job fails then.
    """

    prompt: str
    negative_prompt: str | None = None
    model: str | None = None
    n: int = 1
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    sampler: str | None = None
    seed: int | None = None
    image: Image.Image | None = None
    references: Sequence[Image.Image] = ()
    mask: Image.Image | None = None
    strength: float | None = None
    upscale: float | None = None
    source_prompt: str = ""
    control: Any = None
    image_prompt: Sequence[PromptImage] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    lenient: bool = False
    adapters: Mapping[str, Any] = field(default_factory=dict)
    vae: str | None = None
    controlnet: str | list[str] | None = None
    format: Format = "png"
    quality: int | None = None
    previews: int = 0
    metadata: bool = True
    client: str = ""
    once: str | None = None
    seconds: float | None = None


def without_pixels(job_request: JobRequest) -> JobRequest:
    """An ask with a text in place of each image: a job that was accepted keeps no pixels.

    With an Idempotency-Key it is the image's fingerprint, so that another try can be compared with the first one.
    """

    def marked(value: Any) -> Any:
        if isinstance(value, Image.Image):
            return fingerprint(value) if job_request.once else "an image"
        if isinstance(value, PromptImage):
            return replace(value, image=marked(value.image), mask=marked(value.mask))
        if isinstance(value, Mapping):
            return {name: marked(entry) for name, entry in value.items()}
        return [marked(entry) for entry in value] if isinstance(value, list | tuple) else value

    names = ("image", "mask", "control", "image_prompt", "references")
    return replace(job_request, **{name: marked(getattr(job_request, name)) for name in names})


class Status(StrEnum):
    """Of a job, and of each of its images."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self in (Status.DONE, Status.FAILED, Status.CANCELLED)


@dataclass
class Picture:
    """One image of a job.

    Attributes:
        index: which one, from 0.
        seed: that it is generated from.
        width: pixels.
        height: pixels.
        steps: evaluations of the denoiser in all.
        step: those that are done.
        status: how far it is.
        data: the file, once it is done.
        metadata: the settings that give it again, as in ``canvax.Result.metadata``.
        file: its name in the server's folder of images; None if it is not saved there.
        not_kept: why it could not be saved there; None where it was, or where the server saves none.
    """

    index: int
    seed: int
    width: int
    height: int
    steps: int
    step: int = 0
    status: Status = Status.QUEUED
    data: bytes | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    not_kept: str | None = None


@dataclass(frozen=True)
class Changed:
    """The job's status is another."""

    status: Status


@dataclass(frozen=True)
class Stepped:
    """An image is further."""

    index: int
    step: int
    steps: int
    seconds_left: float | None


@dataclass(frozen=True)
class Previewed:
    """How an image looks now: a small JPEG or WebP file, or one in the format that was asked for."""

    index: int
    step: int
    steps: int
    data: bytes
    media_type: str
    number: int
    """Of this image's previews, from 0."""


@dataclass(frozen=True)
class Finished:
    """An image is done; ``job.pictures[index].data`` holds it."""

    index: int


Event = Changed | Stepped | Previewed | Finished


class Job:
    """An accepted ask. The engine's thread writes it, those who wait read it from the thread of their event loop."""

    def __init__(
        self,
        job_request: JobRequest,
        model: str,
        pictures: Sequence[Picture],
        *,
        cancel: Callable[[Job], None],
        name: str | None = None,
        created: float | None = None,
    ) -> None:
        self.id = name or uuid.uuid4().hex
        self.request, self.model, self.pictures = job_request, model, list(pictures)
        self.created = time.time() if created is None else created
        self.resumed = created is not None
        """Whether an earlier process accepted it."""
        self.attempts = 0
        """Processes that were killed after they had begun it, while it had no image since."""
        self.status = Status.QUEUED
        self.error: tuple[str, str] | None = None
        """Code and message of a job that failed."""
        self.ahead = 0
        """Images that come before it."""
        self.waits_for = ""
        """What must be done before its images can begin, such as "compiling, 2 of 5 programs"; "" if nothing must."""
        self.hints: tuple[str, ...] = ()
        """What is said to whoever asked, such as words that the model never saw."""
        self.seconds_left: float | None = None
        self._cancel = cancel
        self._lock = threading.Lock()
        self._watchers: set[_Mailbox] = set()
        self._viewers, self._looked = 0, 0.0

    @property
    def looked_at(self) -> bool:
        """Whether anybody would see a preview that is made now."""
        return self._viewers > 0 or time.monotonic() < self._looked

    def look(self, seconds: float = LOOKS) -> None:
        """Somebody will want previews for so many seconds, without watching events."""
        self._looked = max(self._looked, time.monotonic() + seconds)

    def cancel(self) -> None:
        """Give it up: its images leave the batch before the next step. Does nothing where it is over."""
        self._cancel(self)

    def tell(self, event: Event) -> None:
        """Called by the engine, from its thread: tell all who watch."""
        if isinstance(event, Changed):
            self.status = event.status
        with self._lock:
            watchers = list(self._watchers)
        for mailbox in watchers:
            mailbox.post(event)

    async def watch(self, *, previews: bool = True) -> AsyncIterator[Event]:
        """Events from now on, beginning with the present status; ends when the job is over.

        Who reads slowly misses previews and steps, never an image or the end. ``previews``: whether they are of use.
        """
        mailbox = _Mailbox()
        with self._lock:
            self._watchers.add(mailbox)
            self._viewers += previews
        try:
            status = self.status
            yield Changed(status)
            if status.over:
                return
            while True:
                event = await mailbox.next()
                yield event
                if isinstance(event, Changed) and event.status.over:
                    return
        finally:
            with self._lock:
                self._watchers.discard(mailbox)
                self._viewers -= previews

    async def finished(self) -> None:
        """Wait until it is over."""
        async for _ in self.watch(previews=False):
            pass


class _Mailbox:
    """Events for one who watches; used on the thread of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._some = asyncio.Event()

    def post(self, event: Event) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody is there any more
            self._loop.call_soon_threadsafe(self._put, event)

    async def next(self) -> Event:
        await self._some.wait()
        event = self._events.pop(0)
        if not self._events:
            self._some.clear()
        return event

    def _put(self, event: Event) -> None:
        if isinstance(event, Stepped | Previewed):  # in place of one of its kind that nobody has read yet
            for i, other in enumerate(self._events):
                if isinstance(other, type(event)) and other.index == event.index:
                    self._events[i] = event
                    return
        self._events.append(event)
        self._some.set()


@dataclass(frozen=True)
class ControlCard:
    """What clients see of a network that reads control images.

    Attributes:
        name: its file's or its folder's, without those above it.
        kind: "controlnet", "union" or "t2i-adapter".
        types: names of the types of control image that a union takes.
        fault: why it cannot be used with the model; "" if it can.
    """

    name: str
    kind: Literal["controlnet", "union", "t2i-adapter"] = "controlnet"
    types: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class ModelCard:
    """What clients see of a model.

    Attributes:
        id: its name in requests.
        family: such as "Stable Diffusion".
        native: width and height that it was trained for.
        sizes: width and height of those that are ready.
        any_size: whether others may be asked for, which wait for a compiler.
        size_step: widths and heights are divisible by it.
        steps: by default.
        guidance_scale: by default.
        sampler: by default.
        max_images: of one job.
        max_steps: likewise.
        tasks: "text-to-image", "image-to-image", "inpainting", "upscaling", "editing".
        examples: prompts that it is good at.
        prompts: all concepts that it knows; none for most models, which take any prompt.
        styles: words that choose its style, written as ", STYLE style" behind a prompt.
        guided: whether it reads a guidance scale.
        no_guidance: the guidance scale that is none, with which no negative prompt is read.
        negative_prompt: whether it reads one with guidance.
        prompt_weights: whether it reads weights of words, in a syntax other than plain text.
        clip_skip: layers of its text encoder that can be left out, at most.
        references: images that it can edit at once, at most; 0 if it does not edit.
        samplers: names of those that it can use; None for all.
        created: unix seconds.
        sha256: of its file; "" if it is a folder, or until it is computed.
        controls: the networks that read control images, in their order.
        ip_adapters: names of those that read image prompts, likewise.
        vae: the name of the autoencoder that stands in for the model's; "" for its own.
        vaes: names of those that a request may name, with the reason where one cannot be used, else "".
        controlnets: the networks of the folder of models that a request may name.
        hires_strength: of a second pass over the enlarged image, by default.
        file: its place in the folder of models; "" for a model from elsewhere.
    """

    id: str
    family: str
    native: tuple[int, int]
    sizes: tuple[tuple[int, int], ...]
    any_size: bool
    size_step: int
    steps: int
    guidance_scale: float
    sampler: str | None
    max_images: int
    max_steps: int
    tasks: tuple[str, ...]
    examples: tuple[str, ...]
    created: int
    sha256: str = ""
    controls: tuple[ControlCard, ...] = ()
    ip_adapters: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()
    guided: bool = True
    no_guidance: float = 1.0
    negative_prompt: bool = True
    prompt_weights: bool = True
    clip_skip: int = 0
    references: int = 0
    samplers: tuple[str, ...] | None = None
    vae: str = ""
    vaes: Mapping[str, str] = field(default_factory=dict)
    controlnets: tuple[ControlCard, ...] = ()
    hires_strength: float = HIRES_STRENGTHS["pixel"]
    file: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of an image whose request names none."""
        return self.native if self.any_size or self.native in self.sizes else self.sizes[0]


@dataclass(frozen=True)
class AdapterCard:
    """What clients see of an adapter that requests may name.

    Attributes:
        name: that of its file.
        alias: what its trainer called it.
        file: without the folders above it.
    """

    name: str
    alias: str
    file: str


@dataclass(frozen=True)
class EmbeddingCard:
    """What clients see of a textual inversion that prompts may name.

    Attributes:
        name: as prompts write it.
        fault: why it cannot be used with the model; "" if it can.
        vectors: how many it has.
        width: of each.
    """

    name: str
    fault: str = ""
    vectors: int = 0
    width: int = 0


class State(StrEnum):
    """Of an engine."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    NOT_RECORDED = "not_recorded"
    """Ready, but the journal cannot be written."""


_UNREADY = {
    State.STARTING: ("the server is still loading its models; try again soon", 5),
    State.FAILED: ("the server does not work; its log says why", None),
    State.DRAINING: ("the server is shutting down", 10),
}
"""Why nothing is accepted, and after how many seconds it may be."""


def check_ready(state: State, progress: str = "") -> None:
    """Refuse a request that an engine in this state cannot take; ``progress`` says how far it is."""
    if state is not State.READY:
        words, wait = _UNREADY[state]
        raise Rejected(503, state, f"{words} ({progress})" if progress else words, retry_after=wait)


class Engine(Protocol):
    """Whatever generates images: the thread that owns the devices, or a stand-in of the tests."""

    @property
    def starting(self) -> str:
        """How far it is, where it accepts no job yet; else ""."""
        ...

    def models(self) -> Sequence[ModelCard]:
        """The models, the default first.

        Raises:
            Rejected: they are not loaded yet.
        """
        ...

    def adapters(self, model: str | None, *, refresh: bool = False) -> Sequence[AdapterCard]:
        """The adapters that a model's requests may name; ``refresh``: look at the folder again.

        Raises:
            Rejected: there is no such model.
        """
        ...

    def embeddings(self, model: str | None, *, refresh: bool = False) -> Sequence[EmbeddingCard]:
        """The textual inversions that a model's prompts may name; as ``adapters``."""
        ...

    def submit(self, job_request: JobRequest, /) -> Job:
        """Accept a job. Blocks for milliseconds: call it off the event loop.

        Raises:
            Rejected: it cannot be done at all, or not now.
        """
        ...

    def job(self, name: str, client: str) -> Job | None:
        """A job of this client by its id, for ten minutes after it is over.

        Raises:
            Rejected: the jobs of the journal are still to be read, and this may be one of them.
        """
        ...

    def jobs(self, client: str | None = None) -> Sequence[Job]:
        """The jobs that are not over, oldest first: all, or those of a client.

        Raises:
            Rejected: for a client, as ``job``.
        """
        ...
