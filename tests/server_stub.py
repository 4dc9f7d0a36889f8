"""An engine without a model, for tests of the server's protocols: quick images of one colour that the seed decides."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from typing import Any

from PIL import Image

from canvax.server.jobs import (
    MEDIA_TYPES,
    Ask,
    Changed,
    Finished,
    Job,
    ModelCard,
    Picture,
    Previewed,
    Refused,
    Status,
    Stepped,
)

CARD = ModelCard(
    id="stub", family="Stable Diffusion", native=(64, 64), sizes=((64, 64), (96, 64)), any_size=False, size_step=8,
    steps=4, guidance_scale=7.5, sampler="Euler a", max_images=10, max_steps=150,
    tasks=("text-to-image", "image-to-image", "inpainting"), examples=("a red apple",), created=1_760_000_000,
    sha256="ab" * 32,
)  # fmt: skip


class StubEngine:
    """Runs each job in a thread of its own.

    Attributes:
        asks: what came in.
        refusal: raised for the next jobs, if not None.
        pace: seconds of a step.
        fails: what the next jobs fail with, code and message.
    """

    def __init__(self, *, pace: float = 0.0) -> None:
        self.asks: list[Ask] = []
        self.refusal: Refused | None = None
        self.fails: tuple[str, str] | None = None
        self.pace = pace
        self._jobs: dict[str, Job] = {}

    def models(self) -> Sequence[ModelCard]:
        return (CARD,)

    def submit(self, ask: Ask) -> Job:
        self.asks.append(ask)
        if self.refusal:
            raise self.refusal
        if ask.model not in (None, CARD.id):
            raise Refused(
                404, "model_not_found", f"model={ask.model!r} is not served here; ask for 'stub'", param="model"
            )
        steps, seed = ask.steps or CARD.steps, 1234 if ask.seed is None else ask.seed
        width, height = ask.width or 64, ask.height or 64
        pictures = [Picture(i, seed + i, width, height, steps) for i in range(ask.n)]
        job = Job(ask, CARD.id, pictures, cancel=self._cancel)
        self._jobs[job.id] = job
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return job

    def job(self, name: str, client: str) -> Job | None:
        job = self._jobs.get(name)
        return job if job and job.ask.client == client else None

    def jobs(self) -> Sequence[Job]:
        return [job for job in self._jobs.values() if not job.status.over]

    def _cancel(self, job: Job) -> None:
        if not job.status.over:
            job.tell(Changed(Status.CANCELLED))

    def _run(self, job: Job) -> None:
        time.sleep(self.pace)
        job.tell(Changed(Status.RUNNING))
        for step in range(job.pictures[0].steps):
            time.sleep(self.pace)
            if job.status.over:
                return
            for picture in job.pictures:
                picture.step, picture.status = step + 1, Status.RUNNING
                job.tell(Stepped(picture.index, step + 1, picture.steps, None))
                if step < job.ask.previews:
                    data = drawn(picture.seed, (16, 16), "jpeg")
                    job.tell(Previewed(picture.index, step + 1, picture.steps, data, "image/jpeg", step))
        if self.fails:
            job.error = self.fails
            job.tell(Changed(Status.FAILED))
            return
        for picture in job.pictures:
            picture.data = drawn(picture.seed, (picture.width, picture.height), job.ask.format)
            picture.metadata = {"prompt": job.ask.prompt, "seed": picture.seed, "model": job.model}
            picture.status = Status.DONE
            job.tell(Finished(picture.index))
        job.tell(Changed(Status.DONE))


def drawn(seed: int, size: tuple[int, int], kind: Any) -> bytes:
    """An image file of one colour."""
    assert kind in MEDIA_TYPES
    out = io.BytesIO()
    Image.new("RGB", size, (seed % 256, 128, 64)).save(out, kind)
    return out.getvalue()
