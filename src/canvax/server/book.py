"""The jobs of a server: accepted, over, kept for a while, forgotten; with a journal they outlive the process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from canvax.errors import CanvaxError, InputError
from canvax.server.jobs import Ask, Changed, Finished, Job, Refused, Status
from canvax.server.journal import Journal
from canvax.server.logs import now
from canvax.server.metrics import Metrics

log = logging.getLogger("canvax.server")

KEPT_BYTES = 512 << 20
"""Of finished files that wait to be fetched."""


class Book:
    """All jobs that are known.

    Args:
        metrics: told of those that end.
        journal: where they are written; None for nowhere.
        keep: seconds for which a job can be asked for when it is over.
        ended: called with each job that ends, under the lock.
        log_prompts: whether the log holds them.

    Attributes:
        lock: for whoever reads and changes several things at once.
    """

    def __init__(
        self,
        metrics: Metrics,
        journal: Journal | None,
        keep: float,
        ended: Callable[[Job], None],
        *,
        log_prompts: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self._metrics, self._journal, self._keep, self._ended = metrics, journal, keep, ended
        self._log_prompts = log_prompts
        self._open: OrderedDict[str, Job] = OrderedDict()
        self._over: OrderedDict[str, tuple[float, Job]] = OrderedDict()
        self._once: dict[tuple[str, str], Job] = {}
        self._limited: dict[str, Job] = {}

    def get(self, name: str, client: str) -> Job | None:
        """A job of this client."""
        with self.lock:
            self.forget()
            job = self._open.get(name) or self._over.get(name, (0.0, None))[1]
        return job if job and job.ask.client == client else None

    def open(self) -> Sequence[Job]:
        """Those that are not over, oldest first."""
        with self.lock:
            return list(self._open.values())

    def earlier(self, ask: Ask) -> Job | None:
        """The job that an Idempotency-Key names.

        Raises:
            Refused: it was another request's.
        """
        if not ask.once:
            return None
        with self.lock:
            self.forget()
            job = self._once.get((ask.client, ask.once))
        if job is not None and not _same(job.ask, ask):
            raise Refused(422, "key_reused", "this Idempotency-Key was used for another request; choose a new one")
        return job

    def accept(self, job: Job) -> None:
        """A new job, which is in the journal when this returns.

        Raises:
            Refused: it cannot be written there.
        """
        if self._journal:
            try:
                self._journal.accepted(job)
            except CanvaxError as error:
                log.error("journal: %s", error)
                raise Refused(503, "not_recorded", "the job cannot be recorded; try later", retry_after=30) from None
        self._enter(job)

    def recover(self, cancel: Callable[[Job], None]) -> list[Job]:
        """The jobs that a journal holds; those that are not over, which the caller goes on with."""
        jobs = self._journal.recover(cancel) if self._journal else []
        for job in jobs:
            self._enter(job)
            if job.status.over:
                del self._open[job.id]
                self._over[job.id] = time.monotonic(), job
        return [job for job in jobs if not job.status.over]

    def finished(self, job: Job, index: int) -> None:
        """An image is done; with the last one the job is."""
        with self.lock:
            if self._journal:
                self._journal.finished(job, index)
            job.tell(Finished(index))
            if all(picture.status is Status.DONE for picture in job.pictures):
                self.end(job, Status.DONE)

    def fail(self, job: Job, code: str, message: str, *, resumes: bool = False) -> None:
        """A job fails; one that ``resumes`` stays in the journal, for the next server."""
        with self.lock:
            if not job.status.over:
                job.error = code, message
                self.end(job, Status.FAILED, written=not resumes)

    def end(self, job: Job, status: Status, *, written: bool = True) -> None:
        """A job is over. Does nothing where it was."""
        with self.lock:
            if job.status.over:
                return
            for picture in job.pictures:
                if not picture.status.over:
                    picture.status = status
            job.seconds_left, job.ahead = None, 0
            self._open.pop(job.id, None)
            self._limited.pop(job.id, None)
            self._over[job.id] = time.monotonic(), job
            self._metrics.over(job.model, str(status), time.time() - job.created)
            log.info(json.dumps(self._line(job, status)))
            self._ended(job)
            if self._journal and written:
                job.status = status
                self._journal.over(job)
            job.tell(Changed(status))

    def expire(self) -> None:
        """Fail the jobs whose time is up."""
        now = time.time()
        with self.lock:
            for job in list(self._limited.values()):
                if now - job.created > (job.ask.seconds or 0):
                    self.fail(job, "timeout", f"the images were not done within {job.ask.seconds:g} s")

    def until_late(self) -> float | None:
        """Seconds until a job's time is up; None if none is limited."""
        ends = [job.created + (job.ask.seconds or 0) for job in self._limited.values()]
        return max(0.01, min(ends) - time.time()) if ends else None

    def forget(self) -> None:
        """Drop jobs that are over after a time, or when they hold too much."""
        now, held = time.monotonic(), 0
        with self.lock:
            for when, job in reversed(list(self._over.values())):
                held += sum(len(picture.data or b"") for picture in job.pictures)
                if held > KEPT_BYTES or now - when > self._keep:
                    del self._over[job.id]
                    self._once.pop((job.ask.client, job.ask.once or ""), None)
                    if self._journal:
                        self._journal.forget(job)

    def _line(self, job: Job, status: Status) -> dict[str, Any]:
        """Of the log: what was asked for, without words or pictures unless they are asked for."""
        ask, one = job.ask, job.pictures[0]
        line = {
            "time": now(), "job": job.id, "client": ask.client, "model": job.model,
            "size": f"{one.width}x{one.height}", "n": ask.n, "steps": one.steps,
            "sampler": ask.sampler, "seed": one.seed, "image": ask.image is not None,
            "control": ask.control is not None, "image_prompt": ask.image_prompt is not None,
            "outcome": str(status), "seconds": round(time.time() - job.created, 3),
        }  # fmt: skip
        line |= {"error": job.error[0]} if job.error else {}
        return line | ({"prompt": ask.prompt, "negative_prompt": ask.negative_prompt} if self._log_prompts else {})

    def _enter(self, job: Job) -> None:
        with self.lock:
            self._open[job.id] = job
            if job.ask.once:
                self._once[job.ask.client, job.ask.once] = job
            if job.ask.seconds is not None:
                self._limited[job.id] = job


def reason(error: Exception) -> tuple[str, str]:
    """Code and message for a job that a fault ends."""
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out_of_memory", "the devices have too little memory for this image; ask for a smaller one"
    if isinstance(error, CanvaxError):
        return "invalid_value" if isinstance(error, InputError) else "server_error", text
    return "server_error", "the image could not be generated; the server's log says why"


def _same(one: Ask, other: Ask) -> bool:
    """Whether two asks are for the same images."""

    def plain(ask: Ask) -> list[Any]:
        values = dict(vars(ask))
        images = [values.pop(name) for name in ("image", "mask")]
        return [values, *(image and (image.size, image.mode, image.tobytes()) for image in images)]

    return plain(one) == plain(other)
