"""An engine without a model, for tests of the server's protocols: quick images of one colour that the seed decides.

Its jobs are in the server's own book, so that ids, owners and Idempotency-Keys are as they are with a model.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from PIL import Image

from canvax.server.job_store import JobStore
from canvax.server.jobs import (
    MEDIA_TYPES,
    AdapterCard,
    Changed,
    EmbeddingCard,
    Job,
    JobRequest,
    ModelCard,
    Picture,
    Previewed,
    Rejected,
    Status,
    Stepped,
)
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics

CARD = ModelCard(
    id="stub", family="Stable Diffusion", native=(64, 64), sizes=((64, 64), (96, 64)), any_size=False, size_step=8,
    steps=4, guidance_scale=7.5, sampler="Euler a", max_images=10, max_steps=150,
    tasks=("text-to-image", "image-to-image", "inpainting", "upscaling"), examples=("a red apple",),
    created=1_760_000_000, sha256="ab" * 32, clip_skip=11,
)  # fmt: skip

LARGEST_SIDE, MOST_IMAGES = 1024, 64


INK = AdapterCard(
    "ink", "ink-v1", "ink.safetensors", {"ss_output_name": "ink-v1", "ss_tag_frequency": '{"3_ink": {"ink": 3}}'},
    ("ink",), {"sampler": "LCM", "num_inference_steps": 4}, {"prediction_type": "v_prediction"},
)  # fmt: skip


class StubEngine:
    """Runs each job in a thread of its own.

    Attributes:
        asks: what came in.
        accepted: the jobs of them.
        refusal: raised for the next jobs, if not None.
        pace: seconds of a step.
        fails: what the next jobs fail with, code and message.
        cards: of its models.
        shelf: adapters of each.
        words: textual inversions of all.
        starting: how far it is, while it accepts no job.
        watched: whether jobs begin when somebody watches them.
        paint: returns the file of a finished image.
        turn: held by each job that runs.
        seed: returns the seed of a job that has none.
        hints: of each job that is accepted.
    """

    starting = ""
    watched = False
    hints: tuple[str, ...] = ()

    cards: tuple[ModelCard, ...] = (CARD,)
    shelf: Mapping[str, Sequence[AdapterCard]] = {CARD.id: (INK,)}

    words: Sequence[EmbeddingCard] = (
        EmbeddingCard("wool", "", 2, 768),
        EmbeddingCard("yarn", "yarn.safetensors is for another model"),
    )

    def __init__(self, *, pace: float = 0.0, metrics: Metrics | None = None, journal: Journal | None = None) -> None:
        self.asks: list[JobRequest] = []
        self.accepted: list[Job] = []
        self.refusal: Rejected | None = None
        self.fails: tuple[str, str] | None = None
        self.pace = pace
        self.paint: Callable[[JobRequest, Picture], bytes] = plain
        self.turn: AbstractContextManager[object] = nullcontext()
        self.seed: Callable[[], int] = lambda: 1234
        self._go_on = threading.Event()
        self._go_on.set()
        self.book = JobStore(metrics or Metrics(), journal, 600.0, lambda job: None)

    def renew(self, other: StubEngine) -> None:
        """Become as another one is."""
        for name in vars(self).keys() - vars(other).keys():
            delattr(self, name)
        vars(self).update(vars(other))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Jobs stop after a step, and go on at the end of this."""
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()

    def models(self) -> Sequence[ModelCard]:
        return self.cards

    def adapters(self, model: str | None, *, refresh: bool = False) -> Sequence[AdapterCard]:
        return self.shelf[model or CARD.id]

    def embeddings(self, model: str | None, *, refresh: bool = False) -> Sequence[EmbeddingCard]:
        return self.words

    def submit(self, ask: JobRequest) -> Job:
        self.asks.append(ask)
        if self.refusal:
            raise self.refusal
        if ask.model not in (None, *(card.id for card in self.cards)):
            raise Rejected(
                404, "model_not_found", f"model={ask.model!r} is not served here; ask for 'stub'", param="model"
            )
        steps, seed = ask.steps or CARD.steps, self.seed() if ask.seed is None else ask.seed
        width, height = ask.width or 64, ask.height or 64
        if ask.upscale and ask.image:
            width, height = (round(side * ask.upscale) for side in ask.image.size)
        if max(width, height) > LARGEST_SIDE or ask.n > MOST_IMAGES:
            raise Rejected(400, "invalid_value", f"{ask.n} images of {width}x{height} are too many pixels", param="n")
        if not 0 <= seed < 2**64:
            raise Rejected(400, "invalid_value", "seed must be in 0..2**64-1", param="seed")
        pictures = [Picture(i, (seed + i) % 2**64, width, height, steps) for i in range(ask.n)]
        job = Job(ask, ask.model or self.cards[0].id, pictures, cancel=self._cancel)
        job.hints = self.hints
        with self.book.lock:
            if earlier := self.book.earlier(ask):
                return earlier
            accept(self.book, job)
        self.accepted.append(job)
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return job

    def job(self, name: str, client: str) -> Job | None:
        return self.book.get(name, client)

    def forget(self, job: Job) -> None:
        self.book.drop(job)

    def jobs(self, client: str | None = None) -> Sequence[Job]:
        return [job for job in self.book.open() if client in (None, job.request.client)]

    def _cancel(self, job: Job) -> None:
        self.book.end(job, Status.CANCELLED)

    def _run(self, job: Job) -> None:
        go_on = self._go_on
        while self.watched and not job._watchers:
            time.sleep(0.001)
        with self.turn:
            self._draw(job, go_on)

    def _draw(self, job: Job, go_on: threading.Event) -> None:
        with self.book.lock:
            if not job.status.over:
                job.tell(Changed(Status.RUNNING))
        for step in range(job.pictures[0].steps):
            time.sleep(self.pace)
            if job.over:
                return
            for picture in job.pictures:
                picture.step, picture.status = step + 1, Status.RUNNING
                job.tell(Stepped(picture.index, step + 1, picture.steps, None))
                if step < job.request.previews:
                    data = drawn(picture.seed, (16, 16), "jpeg")
                    job.tell(Previewed(picture.index, step + 1, picture.steps, data, "image/jpeg", step))
            go_on.wait()
        if job.over:
            return
        if self.fails:
            self.book.fail(job, *self.fails)
            return
        for picture in job.pictures:
            picture.data = self.paint(job.request, picture)
            picture.metadata = {"prompt": job.request.prompt, "seed": picture.seed, "model": job.model}
            picture.status = Status.DONE
            self.book.finished(job, picture.index)


def plain(ask: JobRequest, picture: Picture) -> bytes:
    """An image of one colour."""
    return drawn(picture.seed, (picture.width, picture.height), ask.format)


def drawn(seed: int, size: tuple[int, int], kind: Any) -> bytes:
    """An image file of one colour."""
    assert kind in MEDIA_TYPES
    out = io.BytesIO()
    Image.new("RGB", size, (seed % 256, 128, 64)).save(out, kind)
    return out.getvalue()


def accept(store: JobStore, job: Job) -> Job:
    """Record a new job and enter it, as the engine does."""
    store.record(job)
    store.enter(job)
    return job
