"""The jobs of a server: accepted, over, kept for a while, forgotten; with a journal they outlive the process."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from canvax.errors import CanvaxError, InputError, OutOfMemoryError, is_out_of_memory
from canvax.server.jobs import Changed, Finished, Job, JobRequest, Rejected, Status, without_pixels
from canvax.server.journal import Journal
from canvax.server.logs import now
from canvax.server.metrics import Metrics

log = logging.getLogger("canvax.server")

KEPT_BYTES = 512 << 20
"""Bytes of finished files that wait to be fetched."""

PASSING = ("server_error", "out_of_memory", "draining", "model_unavailable")
"""Codes of failures after which a second try may succeed."""

_TIMEOUT = "timeout"
"""Code of a job whose client's deadline passed: no failure of the server."""

MOST_ATTEMPTS = 2
"""Processes that may be killed while they work on a job; then it fails."""

_PATIENCE = 1.0
"""Seconds that an image waits at most for the disk before it begins."""

_PAUSE = 1.0
"""Seconds after which a journal that cannot be written is tried again."""


class JobStore:
    """All known jobs.

    Args:
        metrics: counts the jobs that end.
        journal: file of the jobs; None for none.
        keep: seconds for which a job is kept after its end.
        ended: called with each job that ends, under the lock.
        log_prompts: write prompts into the log.

    Attributes:
        lock: held while several values are read and changed together.
        changed: condition with that lock, notified when an image is done or a job is over.
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
        self.changed = threading.Condition(self.lock)
        self._metrics, self._journal, self._keep, self._ended = metrics, journal, keep, ended
        self._log_prompts = log_prompts
        self._open: OrderedDict[str, Job] = OrderedDict()
        self._over: OrderedDict[str, tuple[float, Job]] = OrderedDict()
        self._once: dict[tuple[str, str], Job] = {}
        self._claimed: set[tuple[str, str]] = set()
        self._limited: dict[str, Job] = {}
        self._held: OrderedDict[str, tuple[float, Job, Rejected]] = OrderedDict()
        self._tries = 0.0
        self._counted: set[str] = set()  # jobs of which the journal counts an attempt of this process
        self._begun: Future[None] | None = None
        self.complete = journal is None
        """True if all jobs of the journal are known."""
        # No thread with the lock may wait for the disk: writes that no client waits for are made in this thread.
        self._later = ThreadPoolExecutor(1, "canvax journal")

    def close(self) -> None:
        """Write what is still to be written, and close the journal."""
        with self.lock:
            self.rests(*self._open.values())
        self._later.shutdown(wait=True)
        if self._journal:
            self._journal.close()

    def records(self) -> bool:
        """Return if the journal can be written. If not, try again in the background, for a later call."""
        if self._journal is None or self._journal.broken is None:
            return True
        if (now := time.monotonic()) >= self._tries:
            self._tries = now + _PAUSE
            self._write_later(self._journal.check)
        return False

    def get(self, name: str, client: str) -> Job | None:
        """Return a job of this client, without the lock, for which an event loop cannot wait."""
        job = self._open.get(name)
        if job is None:
            when, job = self._over.get(name, (0.0, None))
            job = job if time.monotonic() - when <= self._keep else None
        return job if job and job.request.client == client else None

    def open(self) -> Sequence[Job]:
        """Return the jobs that are not over, oldest first."""
        with self.lock:
            return list(self._open.values())

    def earlier(self, job_request: JobRequest) -> Job | None:
        """Return the job of a request's Idempotency-Key; None without one, or if it failed and may be tried again.

        Raises:
            Rejected: the key was used for another request.
        """
        with self.lock:
            self.forget()
            job = self._once.get((job_request.client, job_request.once or ""))
        if job is not None and job.status is Status.FAILED and job.error and job.error[0] in PASSING:
            return None
        if job is not None and without_pixels(job.request) != without_pixels(job_request):
            raise Rejected(422, "key_reused", "this Idempotency-Key was used for another request; choose a new one")
        return job

    @contextmanager
    def claimed(self, job_request: JobRequest) -> Iterator[Job | None]:
        """Yield the result of ``earlier``. Another request with the same Idempotency-Key waits until this one is over.

        Raises:
            Rejected: as ``earlier``.
        """
        if not job_request.once:
            yield None
            return
        key = job_request.client, job_request.once
        with self.changed:
            self.changed.wait_for(lambda: key not in self._claimed)
            self._claimed.add(key)
        try:
            yield self.earlier(job_request)
        finally:
            with self.changed:
                self._claimed.remove(key)
                self.changed.notify_all()

    def record(self, job: Job) -> None:
        """Write a new job into the journal, before ``enter``. It waits for the disk: call it without the lock.

        A job that no client could ask for after a restart is not written.

        Raises:
            Rejected: the job cannot be written.
        """
        if self._journal is None or not _outlives(job):
            return
        try:
            self._journal.accepted(job)
        except CanvaxError as error:
            self._journal.log(error)
            raise Rejected(503, "not_recorded", "the job cannot be recorded; try later", retry_after=30) from None

    def enter(self, job: Job) -> None:
        """Add a new job, which is in the journal already."""
        with self.lock:
            self._open[job.id] = job
            if job.request.once:
                self._once[job.request.client, job.request.once] = job
            if job.request.seconds is not None:
                self._limited[job.id] = job

    def recover(self, cancel: Callable[[Job], None]) -> Iterator[Job]:
        """Yield the jobs of a journal that are not over, each with its images decoded."""
        for job in self._journal.recover(cancel) if self._journal else ():
            self.enter(job)
            if job.status.over:
                del self._open[job.id]
                self._over[job.id] = time.monotonic(), job
            elif job.error:
                self.fail(job, *job.error)
            elif job.attempts >= MOST_ATTEMPTS:
                why = f"the server was killed {job.attempts} times at work on this job, perhaps for lack of memory"
                self.fail(job, "server_killed", f"{why}; ask for a smaller image")
            else:
                yield job
                continue
            job.request = without_pixels(job.request)
        self.complete = True

    def hold(self, job: Job, refused: Rejected) -> None:
        """Keep a job of the journal that this server cannot do. It fails later, if no other server starts first."""
        with self.lock:
            job.hints = (refused.message,)
            self._held[job.id] = time.monotonic() + self._keep, job, refused

    def held(self) -> Sequence[tuple[Job, Rejected]]:
        """Return the jobs that ``hold`` keeps, with the reasons."""
        return [(job, refused) for _, job, refused in self._held.values()]

    def begins(self, job: Job) -> None:
        """Count an attempt before an image of a job begins. Call this with the lock, then ``counted`` without it."""
        if self._journal and job.id not in self._counted:
            self._counted.add(job.id)
            self._begun = self._write_later(self._journal.begun, job)

    def rests(self, *jobs: Job) -> None:
        """Take back attempts at jobs without an image at work: they cannot kill the process now. With the lock."""
        counted = [job for job in jobs if job.id in self._counted]
        if self._journal and counted:
            self._counted -= {job.id for job in counted}
            self._write_later(self._journal.stopped, *counted)

    def counted(self) -> None:
        """Wait for the disk, without the lock and not for long: a process that is killed now has tried these jobs."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with suppress(TimeoutError):
                begun.result(_PATIENCE)

    def finished(self, job: Job, index: int) -> None:
        """Record that an image has its file; after the last one the job is done. Waits for the disk, without lock."""
        if self._journal:
            self._journal.finished(job, index)
        with self.lock:
            if job.over:
                return
            job.pictures[index].status, job.attempts = Status.DONE, 0
            job.tell(Finished(index))
            self.changed.notify_all()
            if all(picture.status is Status.DONE for picture in job.pictures):
                self.end(job, Status.DONE)

    def fail(self, job: Job, code: str, message: str, *, resumes: bool = False) -> None:
        """Fail a job. One that ``resumes`` and is in the journal is parked instead, for the next process."""
        with self.lock:
            if job.over:
                return
            if resumes and self._journal and _outlives(job):
                job.waits_for = "the next start of the server"
                self.end(job, Status.QUEUED, parked=True)
            else:
                job.error = code, message
                self.end(job, Status.FAILED)

    def end(self, job: Job, status: Status, *, parked: bool = False) -> None:
        """End a job that is not over, or park it. A parked one can still be cancelled."""
        with self.lock:
            if job.status.over:
                return
            job.parked = parked
            for picture in job.pictures:
                if not picture.status.over:
                    picture.status = status
            job.seconds_left, job.ahead = None, 0
            if parked:
                self.rests(job)
            self._counted.discard(job.id)
            self._over[job.id] = time.monotonic(), job  # before it leaves the others: ``get`` looks there first
            for jobs in (self._open, self._limited, self._held):
                jobs.pop(job.id, None)
            expired = job.error and job.error[0] == _TIMEOUT
            outcome = "parked" if parked else "expired" if expired else str(status)
            self._metrics.over(job.model, outcome, time.time() - job.created)
            log.info(json.dumps(self._line(job, outcome)))
            self._ended(job)
            if self._journal and not parked:
                job.status = status
                self._write_later(self._journal.over, job)
            job.tell(Changed(status))

    def expire(self) -> None:
        """Fail the jobs whose time is up, and forget those that were kept for long enough."""
        now = time.time()
        with self.lock:
            if self._forgets() <= 0:
                self.forget()
            for until, job, refused in list(self._held.values()):
                if time.monotonic() >= until:
                    self.fail(job, refused.code, refused.message)
            for job in list(self._limited.values()):
                if now - job.created > (job.request.seconds or 0):
                    self.fail(job, _TIMEOUT, f"the images were not done within {job.request.seconds:g} s")

    def until_late(self) -> float | None:
        """Return the seconds until ``expire`` has something to do; None if it never has."""
        now = time.time()
        ends = [job.created + (job.request.seconds or 0) - now for job in self._limited.values()]
        held = [until - time.monotonic() for until, _, _ in self._held.values()]
        wait = min([*ends, *held, self._forgets()])
        return max(0.01, wait) if wait < math.inf else None

    def forget(self) -> None:
        """Drop jobs that are over after a time, or when they hold too much."""
        now, held, gone = time.monotonic(), 0, list[Job]()
        with self.lock:
            for when, job in reversed(list(self._over.values())):
                held += sum(len(picture.data or b"") for picture in job.pictures)
                gone += [job] if held > KEPT_BYTES or now - when > self._keep else []
            self.drop(*gone)

    def drop(self, *jobs: Job) -> None:
        """Drop jobs that are over."""
        with self.lock:
            gone = [job for job in jobs if self._over.pop(job.id, None)]
            for job in gone:
                if self._once.get(key := (job.request.client, job.request.once or "")) is job:
                    del self._once[key]
            recorded = [job for job in gone if not job.parked]
            if self._journal and recorded:
                self._write_later(self._journal.forget, *recorded)

    def unfetched(self) -> Sequence[Job]:
        """Return the jobs that are over, whose results would be lost if the process ended."""
        with self.lock:
            self.forget()
            return [] if self._journal else [job for _, job in self._over.values() if not job.fetched]

    def _forgets(self) -> float:
        """Return the seconds until a job has been kept long enough."""
        when = next((when for when, _ in self._over.values()), math.inf)
        return when + self._keep - time.monotonic()

    def _write_later(self, write: Callable[..., None], *jobs: Job) -> Future[None] | None:
        with suppress(RuntimeError):  # the store is closed
            return self._later.submit(write, *jobs)
        return None

    def _line(self, job: Job, outcome: str) -> dict[str, Any]:
        """Return the line of the log: the request without prompts, unless they are asked for, and without images."""
        job_request, picture = job.request, job.pictures[0]
        line = {
            "time": now(), "job": job.id, "client": job_request.client, "model": job.model,
            "size": f"{picture.width}x{picture.height}", "n": job_request.n, "steps": picture.steps,
            "sampler": job_request.sampler, "seed": picture.seed, "image": job_request.image is not None,
            "control": job_request.control is not None, "image_prompt": job_request.image_prompt is not None,
            "outcome": outcome, "seconds": round(time.time() - job.created, 3),
        }  # fmt: skip
        line |= {"error": job.error[0]} if job.error else {}
        line |= {"files": files} if (files := [picture.file for picture in job.pictures if picture.file]) else {}
        return line | (
            {"prompt": job_request.prompt, "negative_prompt": job_request.negative_prompt} if self._log_prompts else {}
        )


def _outlives(job: Job) -> bool:
    """Return if a client can ask for a job after a restart, by its id or its Idempotency-Key."""
    return bool(job.request.once or not job.request.awaited)


def reason(error: Exception) -> tuple[str, str]:
    """Return the code and the message of a job that an error ends."""
    if is_out_of_memory(error):
        figures = f" ({str(error).partition(';')[0]})" if isinstance(error, OutOfMemoryError) else ""
        return "out_of_memory", f"the devices have too little memory for this image{figures}; ask for a smaller one"
    if isinstance(error, CanvaxError):
        return "invalid_value" if isinstance(error, InputError) else "server_error", str(error)
    return "server_error", "the image could not be generated; the server's log says why"
