"""Records that the APIs and the engine exchange. No HTTP, no JAX."""

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

LOOK_SECONDS = 1.0
"""Least time between two looks into a folder for new files."""

LARGEST = 4
"""Times the pixels of the largest size of the start, that are compiled on demand."""

LONGEST_MESSAGE = 600
"""Characters of a refusal: it may repeat what was sent."""

_MOST_LINES = 5
"""The most lines about files that cannot be used, at the start."""

MEDIA_TYPES: dict[Format, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


class Rejected(Exception):
    """The refusal of a request.

    Attributes:
        status: HTTP status: 400, 404, 413, 429 or 503.
        code: a word, such as ``invalid_value``, ``model_not_found``, ``size_not_ready``, ``queue_full``, ``draining``.
        message: a sentence with the cure.
        param: the argument that cannot be used; None for no single one.
        retry_after: seconds after which the request may be sent again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message := shortened(message, LONGEST_MESSAGE))
        self.status, self.code, self.message, self.param, self.retry_after = status, code, message, param, retry_after

    @property
    def logged(self) -> dict[str, str]:
        """Fields of the request's line of the log."""
        return {"code": self.code} | ({"param": self.param} if self.param else {})


def invalid(param: str | None, message: str) -> Rejected:
    """Return a refusal of a value that cannot be used."""
    return Rejected(400, "invalid_value", message, param=param)


@dataclass(frozen=True)
class PromptImage:
    """An image that an IP-Adapter reads in addition to the prompt.

    Attributes:
        image: decoded, with a checked number of pixels, as all images here.
        scale: strength: a number, or a table by part of the UNet.
        mask: white where the image acts; None for everywhere.
        adapter: index of the server's adapter that reads it, from 0.
    """

    image: Image.Image
    scale: Any = 1.0
    mask: Image.Image | None = None
    adapter: int = 0


@dataclass(frozen=True)
class JobRequest:
    """A request for images. None means the model's default.

    Attributes:
        prompt: the text of the image.
        negative_prompt: text that the image should not show.
        model: a name that ``Engine.models`` lists; None for the first.
        n: number of images; image i has ``seed + i``.
        width: width in pixels.
        height: height in pixels.
        steps: steps of the sampler.
        guidance_scale: 1 or less (0 for Z-Image and Krea 2) switches guidance off.
        sampler: any name that ``canvax samplers`` knows.
        seed: seed of the first image; None for a random one.
        image: image to begin from, decoded, with a checked number of pixels. Without a mask and a strength a model that
            edits reads it as a reference image.
        references: further reference images.
        mask: white is generated anew.
        strength: 0..1, share of the run that is done.
        upscale: factor by which the image is enlarged, tile by tile; None for other tasks.
        source_prompt: prompt of the image, for the metadata if it is enlarged without a prompt.
        control: control images: one, or a dict by type; with several networks a list with an entry for each, None to
            leave one out. Their strengths are options. True with ``upscale``: each tile is the control image of itself.
        image_prompt: images that IP-Adapters read; None for none.
        options: values of ``canvax.Options`` by name; the engine refuses options that it does not offer.
        lenient: ignore options that change nothing instead of refusing them, since A1111's clients send whole forms;
            and stretch the image to the size, as A1111 does.
        adapters: weights of adapters by name, each a number or a table by network; the prompt may name others.
        vae: an autoencoder that ``ModelCard.vaes`` lists, instead of the model's.
        controlnet: networks that ``ModelCard.controlnets`` lists, instead of those of the start: a name, or a list.
        format: format of the finished images.
        quality: quality of JPEG and WebP, 1..100.
        previews: previews of each image at most; 0 for none.
        metadata: write the settings into the images.
        client: the id of the client's API key, or "" for all clients without a key. Clients share the engine fairly.
        once: value of the header Idempotency-Key. Further requests of the same client with this value are the same job.
        seconds: seconds after which the job fails, since the answer is of no use any more.
        awaited: the request waits for the images. Without ``once`` no client can ask for them after a restart.
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
    awaited: bool = field(default=False, compare=False)


def without_pixels(job_request: JobRequest) -> JobRequest:
    """Return a job request with a text instead of each image: an accepted job keeps no pixels.

    With an Idempotency-Key the text is the image's fingerprint, so that a second request can be compared with the
    first.
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
    """Status of a job, and of each of its images."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """True if nothing more will happen."""
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
        fetched: whether a client has fetched the file.
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
    fetched: bool = False


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
    """A preview of an image: a small JPEG or WebP file, or a file in the requested format."""

    index: int
    step: int
    steps: int
    data: bytes
    media_type: str
    number: int
    """Number among this image's previews, from 0."""


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
        """True if an earlier process accepted the job."""
        self.attempts = 0
        """Number of processes that were killed at work on the job, since its last finished image."""
        self.status = Status.QUEUED
        self.parked = False
        """True if the next process that opens the journal continues the job; nothing more happens in this one."""
        self.error: tuple[str, str] | None = None
        """Code and message of a job that failed."""
        self.read = False
        """True if its client has read that it is over."""
        self.ahead = 0
        """Count of images that come before the job."""
        self.waits_for = ""
        """Work that must be done before its images can begin, such as "compiling, 2 of 5 programs"; "" for none."""
        self.hints: tuple[str, ...] = ()
        """Text of hints to the client, such as words that the model never saw."""
        self.seconds_left: float | None = None
        self._cancel = cancel
        self._lock = threading.Lock()
        self._watchers: set[_Mailbox] = set()
        self._viewers, self._looked = 0, 0.0

    @property
    def over(self) -> bool:
        """True if nothing more will happen in this process."""
        return self.status.over or self.parked

    @property
    def fetched(self) -> bool:
        """True if the job is over, and its client needs nothing more from the memory of this process."""
        if self.request.awaited or self.status is Status.CANCELLED:
            return True
        return self.read if self.error else all(picture.fetched for picture in self.pictures)

    @property
    def looked_at(self) -> bool:
        """True if a client would see a preview that is made now."""
        return self._viewers > 0 or time.monotonic() < self._looked

    def look(self, seconds: float = LOOKS) -> None:
        """Make previews for so many seconds, for a client that does not watch events."""
        self._looked = max(self._looked, time.monotonic() + seconds)

    def cancel(self) -> None:
        """Cancel the job: its images leave the batch before the next step. A job that is over stays as it is."""
        self._cancel(self)

    def tell(self, event: Event) -> None:
        """Send an event to all watchers. For the engine's thread."""
        if isinstance(event, Changed):
            self.status = event.status
        with self._lock:
            watchers = list(self._watchers)
        for mailbox in watchers:
            mailbox.post(event)

    async def watch(self, *, previews: bool = True) -> AsyncIterator[Event]:
        """Yield events from now on, beginning with the present status, until the job is over or parked.

        A slow reader misses previews and steps, never an image or the end. ``previews``: make previews for this
        watcher.
        """
        mailbox = _Mailbox()
        with self._lock:
            self._watchers.add(mailbox)
            self._viewers += previews
        try:
            over = self.over
            yield Changed(self.status)
            if over:
                return
            while True:
                event = await mailbox.next()
                yield event
                if isinstance(event, Changed) and (event.status.over or self.parked):
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
        """Post an event, from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._put, event)

    async def next(self) -> Event:
        await self._some.wait()
        event = self._events.pop(0)
        if not self._events:
            self._some.clear()
        return event

    def _put(self, event: Event) -> None:
        if isinstance(event, Stepped | Previewed):  # instead of an unread event of the same kind
            for i, other in enumerate(self._events):
                if isinstance(other, type(event)) and other.index == event.index:
                    self._events[i] = event
                    return
        self._events.append(event)
        self._some.set()


@dataclass(frozen=True)
class ControlCard:
    """A network that reads control images, as clients see it.

    Attributes:
        name: name of its file or folder, without the folders above.
        kind: "controlnet", "union" or "t2i-adapter".
        types: names of the types of control image that a union takes.
        fault: the reason why the model cannot use it; "" for none.
    """

    name: str
    kind: Literal["controlnet", "union", "t2i-adapter"] = "controlnet"
    types: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class ModelCard:
    """A model as clients see it.

    Attributes:
        id: its name in requests.
        family: title, such as "Stable Diffusion".
        native: width and height that the model was trained for.
        sizes: widths and heights that are ready.
        any_size: other sizes can be requested; they wait for a compiler.
        size_step: divisor of all widths and heights.
        steps: default number of steps.
        guidance_scale: default guidance scale.
        sampler: default sampler.
        max_images: limit of images of a job.
        max_steps: limit of steps of a job.
        tasks: "text-to-image", "image-to-image", "inpainting", "upscaling", "editing"; of a model that was trained to
            fill masks, "inpainting" is the first.
        examples: prompts that suit the model.
        prompts: all concepts that the model knows; empty for most models, which take any prompt.
        styles: words that choose a style, written as ", STYLE style" after a prompt.
        guided: the model reads a guidance scale.
        no_guidance: guidance scale that switches guidance off, and with it the negative prompt.
        negative_prompt: the model reads a negative prompt with guidance.
        prompt_weights: the model reads weights of words, in a syntax other than plain text.
        clip_skip: most layers of its text encoder that can be skipped.
        usual_layer: the layer that it reads without ``clip_skip``, as A1111 counts: 2 for SDXL.
        references: most images that it can edit at once; 0 if it does not edit.
        samplers: names of samplers that it can use; None for all.
        created: unix seconds.
        sha256: hash of its file; "" for a folder, or until it is computed.
        controls: the networks of the start that read control images, in their order; then those that do not fit, with
            the reason.
        ip_adapters: names of the IP-Adapters, in their order.
        vae: name of the autoencoder that replaces the model's; "" for the model's.
        vaes: names of autoencoders that a request may name, with the reason if one cannot be used, else "".
        controlnets: the networks of the folder of models that a request may name.
        hires_strength: default strength of a second pass over the enlarged image.
        file: its place in the folder of models; "" for a model from elsewhere.
        alpha: its images may be transparent.
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
    usual_layer: int = 1
    references: int = 0
    samplers: tuple[str, ...] | None = None
    vae: str = ""
    vaes: Mapping[str, str] = field(default_factory=dict)
    controlnets: tuple[ControlCard, ...] = ()
    hires_strength: float = HIRES_STRENGTHS["pixel"]
    file: str = ""
    alpha: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of an image whose request names none."""
        return self.native if self.can_make(self.native) else self.sizes[0]

    def can_make(self, size: tuple[int, int]) -> bool:
        """Return whether images of a width and height are ready, or compiled on demand."""
        most = LARGEST * max(width * height for width, height in self.sizes or (self.native,))
        fits = size[0] * size[1] <= most and all(side % self.size_step == 0 for side in size)
        return size in self.sizes or (self.any_size and fits)


@dataclass(frozen=True)
class AdapterCard:
    """An adapter that requests may name, as clients see it.

    Attributes:
        name: name of its file.
        alias: name that its trainer gave it.
        file: file name without folders.
        metadata: what trainers wrote into it, by the names of kohya and ModelSpec.
        trigger_words: words that it was trained with.
        suggested: arguments that it was made for; see ``canvax.weights.lora.suggested``.
        without_effect: fields of its training's schedule that differ from the model's, which a server leaves alone.
        fault: the reason why it cannot be used; "" for none.
    """

    name: str
    alias: str
    file: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    trigger_words: Sequence[str] = ()
    suggested: Mapping[str, Any] = field(default_factory=dict)
    without_effect: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class EmbeddingCard:
    """A textual inversion that prompts may name, as clients see it.

    Attributes:
        name: the word in prompts.
        fault: the reason why the model cannot use it; "" for none.
        vectors: number of vectors.
        width: width of each vector.
    """

    name: str
    fault: str = ""
    vectors: int = 0
    width: int = 0


def unusable(cards: Sequence[AdapterCard | EmbeddingCard], noun: str) -> list[str]:
    """Return lines for the operator about files that cannot be used."""
    left = [f"{card.name} cannot be used: {card.fault}" for card in cards if card.fault]
    more = [f"{len(left) - _MOST_LINES} more {noun} cannot be used"] if left[_MOST_LINES:] else []
    return [*left[:_MOST_LINES], *more]


class State(StrEnum):
    """State of an engine."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    NOT_RECORDED = "not_recorded"
    """Ready, but the journal cannot be written."""


DRAINED = 10
"""Seconds after which a server that stops may be replaced."""

_UNREADY = {
    State.STARTING: ("the server is still {starting}; try again soon", 5),
    State.FAILED: ("the server does not work; its log says why", None),
    State.DRAINING: ("the server is shutting down", DRAINED),
}
"""Reasons why nothing is accepted, and seconds until it may be."""


def check_ready(state: State, starting: str = "loading its models") -> None:
    """Refuse a request that an engine in this state cannot take; ``starting`` says what a start does, and how far."""
    if state is not State.READY:
        words, wait = _UNREADY[state]
        raise Rejected(503, state, words.format(starting=starting), retry_after=wait)


class Engine(Protocol):
    """Whatever generates images: the thread that owns the devices, or a stand-in of the tests."""

    @property
    def starting(self) -> str:
        """Progress of the start, while no job is accepted; "" afterwards."""
        ...

    def models(self) -> Sequence[ModelCard]:
        """Return the models, the default first.

        Raises:
            Rejected: the models are not loaded yet.
        """
        ...

    def adapters(self, model: str | None, *, refresh: bool = False) -> Sequence[AdapterCard]:
        """Return the adapters that a model's requests may name; ``refresh``: look into the folder at once.

        Raises:
            Rejected: there is no such model.
        """
        ...

    def embeddings(self, model: str | None, *, refresh: bool = False) -> Sequence[EmbeddingCard]:
        """Return the textual inversions that a model's prompts may name; arguments as of ``adapters``."""
        ...

    def submit(self, job_request: JobRequest, /) -> Job:
        """Accept a job. Blocks for milliseconds: call it off the event loop.

        Raises:
            Rejected: the job cannot be done at all, or not now.
        """
        ...

    def job(self, name: str, client: str) -> Job | None:
        """Return a job of this client by its id, until ten minutes after it is over.

        Raises:
            Rejected: the jobs of the journal are still to be read, and this may be one of them.
        """
        ...

    def forget(self, job: Job) -> None:
        """Forget a job that is over, its images and its Idempotency-Key. Waits for the engine's lock."""
        ...

    def jobs(self, client: str | None = None) -> Sequence[Job]:
        """Return the jobs that are not over, oldest first: all jobs, or those of a client.

        Raises:
            Rejected: for a client, as ``job``.
        """
        ...
