"""The engine: one thread that owns the devices and generates all images, a few rows at a time.

Images join and leave the batch between two calls of the denoiser, so no image waits for the end of another one.
Requests are checked in the threads that bring them, and files are written by further threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import jax

from canvax.errors import CanvaxError, InputError
from canvax.pipelines.hints import hints
from canvax.server.embedding_cache import reading
from canvax.server.group import Group
from canvax.server.job_store import JobStore, reason
from canvax.server.jobs import (
    AdapterCard,
    Changed,
    EmbeddingCard,
    Job,
    JobRequest,
    ModelCard,
    Rejected,
    State,
    Status,
    check_ready,
    invalid,
    without_pixels,
)
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.models import Announcer, EngineSettings, Loaded, ModelSet, ServedModel, unavailable
from canvax.server.policy import PATIENCE, Queue
from canvax.server.rates import Rates
from canvax.server.work import Checked, Cost, GroupKey, Item, byte_size, may_begin
from canvax.server.writing import Writer
from canvax.types import HostArray

log = logging.getLogger("canvax.server")

_TELLING = 50
"""Places in the queue are sent again after this many times what sending them takes."""

_PAUSE = 0.1
"""Seconds between two looks at what clients have fetched."""

INPUT_BYTES = 1 << 30
"""Bytes of the decoded input images of all jobs that are not over."""
MOST_FAULTS = 10
"""Consecutive turns that may fail unexpectedly; after one more the engine stops."""

MOST_FINISHED = 64
"""Images whose rows are done and that wait for the writer; with more no rows are run."""

CHEAP_PREVIEWS = 0.25
"""Part of an image's own time that its previews may take with the real decoder; else a linear map makes them."""

_STOPPED = "the server stopped before the images were done; ask again"

Costs = tuple[Cost, ...]
"""Costs of the stages of an image."""


class _Room(NamedTuple):
    """Room in the queue: images, the engine's seconds for them, and bytes of their decoded inputs."""

    images: int
    seconds: float
    bytes: int


class ImageEngine:
    """The engine. Call ``start``, and at the end ``drain`` and ``close``.

    Args:
        names: names of the models; the first is the default.
        settings: the operator's settings.
        metrics: the server's metrics.
        load: loads a model by its name (see ``ServedModel``).
        journal: file of accepted jobs; None for none.
        say: called with lines for the operator.

    Attributes:
        failure: the error that stopped the engine; None for none.
    """

    def __init__(
        self,
        names: Sequence[str],
        settings: EngineSettings,
        metrics: Metrics,
        load: Callable[..., Loaded],
        *,
        journal: Journal | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._state = State.STARTING
        self.failure: BaseException | None = None
        self._settings, self._metrics, self._say = settings, metrics, say
        self._announcer = Announcer(say, metrics.built, self._tell_compiling)
        self._models = ModelSet(names, load, settings, say, self._announcer)
        self._book = JobStore(metrics, journal, settings.keep_seconds, self._ended, log_prompts=settings.log_prompts)
        self._wake = self._book.changed
        self._queue: Queue[Item] = Queue(lambda item: item.cost)
        metrics.expect((*names, *settings.on_request))
        metrics.journal.set_function(self._book.records)
        self._items: dict[str, list[Item]] = {}
        self._suspects: list[Job] = []
        self._to_decode: list[tuple[Item, HostArray]] = []
        self._rates = Rates(settings.rate) if settings.rate else None
        self._entering: dict[str, _Room] = {}
        self._closed, self._tells, self._began, self._worked = False, 0.0, 0.0, 0.0
        self._progress: float | None = None
        self._faults = 0
        self._leading: Item | None = None
        self._compiler: threading.Thread | None = None
        self._building: GroupKey | None = None
        self._thread = threading.Thread(target=self._run, name="canvax engine", daemon=True)
        self._writer = Writer(self._book, metrics, settings.output, self._freed)
        metrics.queued.set_function(self._images)
        metrics.queue_cost.set_function(self._seconds)
        metrics.undecoded.set_function(lambda: len(self._to_decode))
        metrics.writing.set_function(lambda: self._writer.images)
        metrics.oldest.set_function(lambda: self._writer.oldest)

    @property
    def state(self) -> State:
        """The present state.

        If the devices make no progress for ``stall_seconds``, or a file takes that long, the engine counts as failed
        until there is progress again.
        """
        progress, most = self._progress, self._settings.stall_seconds
        stalled = progress is not None and time.monotonic() - progress > most
        return State.FAILED if stalled or self._writer.oldest > most else self._state

    def start(self) -> None:
        """Begin to load; ``state`` says when it is ready."""
        self._thread.start()

    @property
    def starting(self) -> str:
        """See ``Engine``."""
        return self._announcer.starting if self._state is State.STARTING else ""

    def models(self) -> Sequence[ModelCard]:
        """See ``Engine``."""
        if not self._models.cards:
            check_ready(self.state, self._announcer.starting)
        return self._models.cards

    def adapters(self, model: str | None, *, refresh: bool = False) -> Sequence[AdapterCard]:
        """See ``Engine``."""
        self.models()
        return _listed(self._models.named(model).shelf, refresh)

    def embeddings(self, model: str | None, *, refresh: bool = False) -> Sequence[EmbeddingCard]:
        """See ``Engine``."""
        self.models()
        return _listed(self._models.named(model).embeddings, refresh)

    def job(self, name: str, client: str) -> Job | None:
        """See ``Engine``."""
        job = self._book.get(name, client)
        if job is None and not self._book.complete:  # it may be one of those that are still to be read
            check_ready(self.state)
        return job

    def jobs(self, client: str | None = None) -> Sequence[Job]:
        """See ``Engine``."""
        if client is not None and not self._book.complete:
            check_ready(self.state)
        return [job for job in self._book.open() if client in (None, job.request.client)]

    def forget(self, job: Job) -> None:
        """See ``Engine``."""
        self._book.drop(job)

    def drain(self, seconds: float) -> bool:
        """Accept no more jobs and finish the accepted ones. Return if all were done in time; the others fail."""
        with self._wake:
            if self._state is State.STARTING:  # nothing was accepted yet
                return True
            if self._state is not State.FAILED:
                self._state = State.DRAINING
            for job, _ in self._book.held():  # this server cannot do them
                self._book.fail(job, "draining", _STOPPED, resumes=True)
            done = self._wake.wait_for(lambda: not self.jobs() or self._closed, seconds)
            for job in self.jobs():
                self._book.fail(job, "draining", _STOPPED, resumes=True)
        return done

    def await_fetches(self, seconds: float) -> None:
        """Wait after ``drain``, at most so many seconds, until clients have fetched the results."""
        end = time.monotonic() + seconds
        with self._wake:
            if jobs := self._book.unfetched():
                self._say(f"waiting for clients to fetch finished jobs: {len(jobs)}")
            while self._book.unfetched() and not self._closed and (left := end - time.monotonic()) > 0:
                self._wake.wait(min(_PAUSE, left))

    def close(self, seconds: float = 60.0) -> None:
        """Stop at once. Jobs in a journal continue after the next start.

        The thread is left behind if it does not return within ``seconds``: loading weights and compiling cannot be
        interrupted.
        """
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join(0 if self._state is State.STARTING else seconds)
        self._writer.close(seconds)
        self._book.close()

    def readiness(self) -> State:
        """Return the state for load balancers: a server whose journal cannot be written is not ready."""
        return self.state if self.state is not State.READY or self._book.records() else State.NOT_RECORDED

    def submit(self, job_request: JobRequest) -> Job:
        """See ``Engine``."""
        try:
            check_ready(self.state, self._announcer.starting)
            with self._book.claimed(job_request) as earlier:
                return earlier or self._accept(job_request)
        except Rejected as refused:
            self._metrics.refused.labels(refused.code).inc()
            raise

    # Accepting, in the threads of requests.

    def _accept(self, job_request: JobRequest) -> Job:
        """Check a request, reserve room for it, record it, and put its images into the queue.

        The job is decided once, when room is reserved. The engine's lock is free while the journal is written.
        """
        served, checked = self._models.check(job_request)
        job = checked.job(job_request, self._cancel)
        with self._wake:
            costs = self._costs(checked)
            self._entering[job.id] = self._reserved(job_request, checked, costs)
        try:
            model = reading(served.model, checked.beside.words)
            trained = chain.from_iterable(entry.trained for entry in checked.beside.adapters)
            of_model = () if checked.tiles else hints(model, checked.request, trained)
            job.hints = tuple(map(str, (*checked.hints, *of_model)))
            self._book.record(job)
            with self._wake:
                del self._entering[job.id]
                self._book.enter(job)
                self._add(job, checked, costs)
                if self.state is not State.READY:
                    self._book.fail(job, "draining", _STOPPED, resumes=True)
        finally:
            with self._wake:
                room = self._entering.pop(job.id, None)
            if room and self._rates:  # the job was not entered
                self._rates.add(job_request.client, room.images)
        job.request = without_pixels(job_request)  # the items hold what is still needed
        self._metrics.submitted.labels(job.model).inc()
        return job

    def _costs(self, checked: Checked) -> Costs:
        """Return the costs of the stages of an image.

        Raises:
            Rejected: its programs are not ready (see ``ModelSet.expected``).
        """
        costs: Costs = ()
        for stage in checked.stages:
            try:
                costs += (self._models.expected(stage, of_tiles=checked.tiles is not None),)
            except Rejected as refused:
                if not costs:
                    raise
                message = f"options.hires={checked.request.options.hires:g}: {refused.message}"
                raise Rejected(refused.status, refused.code, message, param="options") from None
        return costs

    def _add(self, job: Job, checked: Checked, costs: Costs) -> None:
        """Put the images of a job that are not done into the queue."""
        arrived, job.ahead, before = time.monotonic(), len(self._queue), self._seconds()
        self._items[job.id] = items = []
        self._suspects += [job] if job.attempts else []
        for picture in job.pictures:
            for item in [] if picture.status.over else checked.items(job, picture):
                item.costs = costs
                item.client = f"\0{job.id}" if job.attempts else item.client  # its images wait apart from others
                item.deadline = arrived + PATIENCE * _alone(costs) * (len(items) + 1)
                items.append(item)
                self._queue.add(item)
        job.seconds_left = before + _seconds(items)
        self._compile_missing()
        self._tell_compiling()
        self._wake.notify_all()

    def _images(self) -> int:
        """Return how many images are not done: a job's images count until their files are written."""
        entering = sum(room.images for room in list(self._entering.values()))
        return entering + len(self._queue) + len(self._to_decode) + self._writer.images

    def _seconds(self) -> float:
        """Return the seconds of work in these images."""
        entering = sum(room.seconds for room in list(self._entering.values()))
        return entering + self._queue.seconds + (len(self._to_decode) + self._writer.images) * self._writer.pace

    def _reserved(self, job_request: JobRequest, checked: Checked, costs: Costs) -> _Room:
        """Return the room that a job takes. Call this with the lock.

        Raises:
            Rejected: the job would wait too long, hold too much memory, or exceed the rate of its client.
        """
        alone, most = _alone(costs), self._settings.queue_images
        room = _Room(images := checked.images, images * sum(shared for _, shared in costs), checked.input_bytes)
        seconds, count = self._seconds(), self._images()
        wait = min(max(1.0, seconds / 4), 60.0)
        if room.bytes > INPUT_BYTES:
            raise Rejected(413, "too_large", "the images of this request take too much memory; send smaller ones")
        if images > most:  # however long it waits
            raise invalid("n", f"n: {images} images or tiles are more than the {most} that may wait; ask for less")
        least = max(alone, room.seconds)  # in the best batches
        if job_request.seconds is not None and least > job_request.seconds:
            subject = "an image takes" if images == 1 else f"{images} images or tiles take"
            why = f"seconds={job_request.seconds:g}: {subject} about {least:.1f} s; allow more"
            raise Rejected(400, "too_late", why, param="seconds")

        def exceeds(times: int) -> bool:
            longest = self._settings.queue_seconds * times
            return count + images > most * times or (count > 0 and seconds + room.seconds > longest)

        # Clients with jobs leave room for a client without: a second queue. Most requests do not ask who is new.
        if exceeds(1) and (exceeds(2) or not self._is_new(job_request.client)):
            waits = f"{count} images are" if count + images > most else f"{seconds:.0f} seconds of work are"
            raise Rejected(429, "queue_full", f"{waits} waiting; try again later", retry_after=wait)
        if room.bytes:
            held = byte_size(image for items in self._items.values() for item in items for image in item.inputs())
            if room.bytes + held + sum(room.bytes for room in self._entering.values()) > INPUT_BYTES:
                why = "the images that were sent for jobs that wait take too much memory; try again later"
                raise Rejected(429, "queue_full", why, retry_after=wait)
        if self._rates and (wait := self._rates.wait(job_request.client, images)):
            why = f"a client may ask for {self._settings.rate:g} images a minute; see Retry-After"
            raise Rejected(429, "rate_limit_exceeded", why, retry_after=wait)
        return room

    def _is_new(self, client: str) -> bool:
        """Return if a client has a key, and no job that is not over."""
        return client != "" and all(job.request.client != client for job in self.jobs())

    def _cancel(self, job: Job) -> None:
        self._book.end(job, Status.CANCELLED)

    def _ended(self, job: Job) -> None:
        """Remove the images of a job that is over."""
        for item in self._items.pop(job.id, []):
            self._remove(item)
        self._wake.notify_all()

    def _remove(self, item: Item) -> None:
        """Remove an image that is over, so that other images can use the slots of its adapters."""
        self._queue.remove(item)
        item.let_go()

    # The engine's own thread.

    def _run(self) -> None:
        try:
            self._begin()
            while not self._closed:
                self._next_turn()
        except BaseException as error:
            if not isinstance(error, CanvaxError):  # which the command says itself
                log.exception("the engine failed")
            self._give_up(error)

    def _next_turn(self) -> None:
        """Wait for work, and do a part of it. An error fails the jobs in work; the engine continues."""
        try:
            if self._wait():
                self._turn()
        except Exception:
            log.exception("a turn of the engine failed")
            self._faults += 1
            if self._faults > MOST_FAULTS:
                raise
            self._start_over()
        else:
            self._faults = 0

    def _give_up(self, error: BaseException) -> None:
        """Stop the engine for good: refuse new jobs and fail the accepted ones."""
        with self._wake:
            self.failure, self._state, self._progress = error, State.FAILED, None
            for job in self.jobs():
                self._book.fail(job, "server_error", "the server failed; ask again", resumes=True)
            self._wake.notify_all()

    def _begin(self) -> None:
        """Load and warm up, then take up what a journal still holds."""
        began = time.perf_counter()
        self._models.begin()
        with self._wake:
            for job in self._book.recover(self._cancel):
                self._resume(job)
            if self._closed:
                return
            if self._state is State.STARTING:
                self._state = State.READY
            self._wake.notify_all()
        for why, count in Counter(refused.message for _, refused in self._book.held()).items():
            seconds = self._settings.keep_seconds
            jobs = "1 recorded job waits" if count == 1 else f"{count} recorded jobs wait"
            log.warning("%s for another start of the server until %g s are over: %s", jobs, seconds, why)
        self._say(f"ready in {time.perf_counter() - began:.1f} s")

    def _resume(self, job: Job) -> None:
        """Go on with a job of a server that was killed."""
        try:
            # With the seed that the API has answered, where the request named none.
            _, checked = self._models.check(replace(job.request, model=job.model, seed=job.pictures[0].seed))
            costs = self._costs(checked)
        except Rejected as refused:
            self._book.hold(job, refused)
        except Exception:  # one job is no reason not to start
            log.exception("a recorded job cannot be resumed")
            self._book.fail(job, "server_error", "the server cannot go on with it; ask again")
        else:
            self._add(job, checked, costs)
            job.request = without_pixels(job.request)
            if all(picture.status.over for picture in job.pictures):
                self._book.end(job, Status.DONE)

    def _freed(self) -> None:
        """Wake the engine: the writer has room for another image."""
        with self._wake:
            self._wake.notify_all()

    def _wait(self) -> bool:
        """Wait until there is something to do. Return False when it is time to stop."""
        self._began, self._worked = time.perf_counter(), 0.0
        with self._wake:
            while not self._closed and not self._can_decode() and self._leader() is None:
                self._progress = None  # no job waits for it
                self._wake.wait(self._book.until_late())
                self._began, self._progress = time.perf_counter(), time.monotonic()
                self._book.expire()
                self._book.forget()
            self._progress = time.monotonic()
            return not self._closed

    def _leader(self) -> Item | None:
        """Return the image that decides what is done next; None if there is none, or finished images must be written
        first."""
        finished = len(self._in_decoder())
        if finished >= MOST_FINISHED:
            return None
        groups = self._models.groups()
        leader = self._queue.first(groups, time.monotonic(), self._may_begin)
        # Weights stay on the devices until all is decoded that they are for.
        waits = leader is not None and finished and groups[leader.group] is not None and not self._writer.room
        return None if waits else leader

    def _can_decode(self) -> bool:
        return bool(self._in_decoder()) and self._writer.room > 0

    def _may_begin(self, items: Sequence[Item]) -> Sequence[Item]:
        """Filter images as ``may_begin``. A job that killed an earlier process begins after the journal's other jobs,
        and alone."""
        self._suspects = [job for job in self._suspects if job.attempts and not job.over]
        items = [item for item in items if not self._models.lacks(item)]
        waiting = [item.job for item in items if item.job.attempts]
        if not self._suspects:
            return may_begin(items)
        begun = self._at_work()
        tried = next((job for job in self._suspects if job in begun), None)
        if tried is None:
            ready = self._models.groups()
            others = any(item.job.resumed and not item.job.attempts and item.group in ready for item in self._queue)
            if others or not waiting:
                return may_begin(item for item in items if not item.job.attempts)
            if begun:
                return []
            tried = waiting[0]
        return may_begin(item for item in items if item.job is tried)

    def _at_work(self) -> set[Job]:
        """Return the jobs with images on the devices, to be decoded, or in the writer."""
        images = [item for items in self._items.values() for item in items]
        return {item.job for item in images if item.status is Status.RUNNING and not self._queue.waits(item)}

    def _turn(self) -> None:
        """Run some rows of one batch, and decode finished images."""
        self._leading = None
        with self._wake:
            self._book.expire()
            self._models.trim(lambda: {item.group for item in (*self._queue, *self._in_decoder())})
            self._leading = leader = self._leader()
        if leader is not None and (served := self._put_on(leader.group)):
            group = self._models.group(leader.group)
            if self._seat(group, leader):
                self._step(group, served)
        self._decode_all()
        self._tell_queue()
        if leader is not None:
            self._metrics.turned.observe(time.perf_counter() - self._began - self._worked)

    def _in_decoder(self) -> list[Item]:
        """Return the images that wait to be decoded, without those that are over."""
        if any(item.over for item, _ in self._to_decode):
            self._to_decode = [(item, latents) for item, latents in self._to_decode if not item.over]
        return [item for item, _ in self._to_decode]

    def _put_on(self, key: GroupKey) -> ServedModel | None:
        """Put a model's weights on the devices. Return None if they cannot be loaded, and then the jobs fail, or if
        finished images must be decoded first."""
        if missing := self._models.missing(key):
            self._decode_all()  # while their weights are there
            if self._in_decoder():
                return None
        self._progress = None  # loading may take as long as it takes
        waits = self._lacking(key)
        if missing:
            self._tell_waits(waits, f"loading {missing}")
        try:
            return self._models.put_on(key)
        except Exception:
            log.exception("a model cannot be loaded again")
            with self._wake:
                missing = self._models.missing(key)
                for item in filter(self._lacking(key), list(self._queue)):
                    self._book.fail(item.job, "model_unavailable", unavailable(missing))
            return None
        finally:
            self._progress = time.monotonic()
            if missing:
                self._tell_waits(waits, "")
                self._tell_compiling()  # some of them still lack programs

    def _lacking(self, key: GroupKey) -> Callable[[Item], bool]:
        """Return a predicate: does an image need weights that are missing for a key, of its model or ControlNets?"""
        loaded = self._models.named(key.model).loaded
        return lambda item: item.group.model == key.model and not (loaded and item.group.variant != key.variant)

    def _since(self, began: float) -> float:
        """Return the seconds since ``began``, which are not overhead of this turn."""
        self._worked += (took := time.perf_counter() - began)
        self._progress = time.monotonic()
        return took

    def _seat(self, group: Group, leader: Item) -> bool:
        """Choose the images of the batch. Return False if there are none."""
        whole = self._settings.batching == "requests" and [item for item in group.seated if not item.over]
        with self._wake:
            if leader.over:  # cancelled a moment ago
                return False
            groups, now = self._models.groups(), time.monotonic()
            begun = [item for item in self._queue.begun if item.group == group.key]
            size = group.size if whole else group.batch_for(len(begun) + self._queue.waiting(group.key))
            chosen = whole or [leader, *(item for item in self._queue.ranked(begun) if item is not leader)][:size]
            if self._queue.waits(leader) and leader in chosen:
                self._start(leader)
            while not whole and len(chosen) < size:
                item = self._queue.next(group.key, groups, now, self._may_begin)
                if item is None:
                    break
                chosen.append(item)
                self._start(item)
        self._book.counted()
        ready = [item for item in chosen if self._encoded(group, item)]
        self._on_devices(group, lambda: group.seat(ready, size))
        return bool(group.seated)

    def _start(self, item: Item) -> None:
        """Begin a waiting image."""
        self._queue.begin(item, time.monotonic())
        item.hold()
        if item.picture.status is Status.QUEUED and not item.job.resumed:  # not for a second pass, or while nothing ran
            self._metrics.waited.observe(time.time() - item.job.created)
        item.status = item.picture.status = Status.RUNNING
        self._book.begins(item.job)
        if item.job.status is Status.QUEUED:
            item.job.ahead = 0
            item.job.tell(Changed(Status.RUNNING))

    def _encoded(self, group: Group, item: Item) -> bool:
        """Encode an image's prompt; what cannot be done is that job's fault alone."""
        began = time.perf_counter()
        try:
            if not item.over and item.carried is None:
                group.begin(item)
                item.encoded()
                self._metrics.encoded.observe(self._since(began))
                for cache, rows in group.looked_up().items():
                    self._metrics.conditions.labels(cache).inc(rows)
        except Exception as error:
            if not isinstance(error, InputError):
                log.exception("encoding failed")
            self._book.fail(item.job, *reason(error))
        return not item.over

    def _step(self, group: Group, served: ServedModel) -> None:
        seated, began = group.seated, time.perf_counter()
        before = {id(item): item.row for item in seated}
        finished = self._on_devices(group, group.step)
        if finished is None:
            return
        rows = max(item.row - before[id(item)] for item in seated)
        self._metrics.stepped(group.key.size, group.size, len(seated), rows, self._since(began))
        done, row = {id(item) for item, _ in finished}, group.timings.row
        slower = row[group.size] / row[min(row)]
        for item in (item for item in seated if not item.over):
            event = item.progress(slower)
            item.job.seconds_left = event.seconds_left
            if item.picture.step in item.stops and id(item) not in done and not served.safety_checker:
                self._preview(group, served, item)
            item.job.tell(event)
        with self._wake:
            for item, _ in finished:
                self._remove(item)
                item.carried = None
            self._to_decode += finished

    def _preview(self, group: Group, served: ServedModel, item: Item) -> None:
        """Make a preview of an image: decoded if that is cheap, else with a linear map of colours."""
        try:
            latents = group.denoised(item)
            if item.decodes is None:
                item.decodes = len(item.previews) * group.timings.decode <= CHEAP_PREVIEWS * item.costs[item.at][0]
            pixels = group.decode([latents], item.beside.vae)[0] if item.decodes else None
        except Exception:  # the image itself may still succeed
            log.exception("a preview cannot be made")
        else:
            self._writer.preview(served, item, pixels, latents)

    def _decode_all(self) -> None:
        """Decode what is finished, before more rows are run; where the writer is full, later."""
        while self._can_decode():
            self._decode()

    def _decode(self) -> None:
        """Decode the images that have waited longest, as many as one call takes and the writer has room for."""
        waiting = self._to_decode
        key, vae = waiting[0][0].group, waiting[0][0].beside.vae
        group, served = self._models.group(key), self._models.named(key.model)
        chosen = [entry for entry in waiting if (entry[0].group, entry[0].beside.vae) == (key, vae)][
            : min(group.alone, self._writer.room)
        ]
        began = time.perf_counter()
        try:
            pixels = group.decode([latents for _, latents in chosen], vae)
        except Exception as error:
            log.exception("decoding failed")
            for item, _ in chosen:
                self._book.fail(item.job, *reason(error))
            return
        self._metrics.decoded.observe(self._since(began))
        with self._wake:  # each is counted once
            for (item, latents), image in zip(chosen, pixels, strict=True):
                self._staged(served, item, image, latents)
            self._to_decode = [entry for entry in self._to_decode if not any(entry is other for other in chosen)]

    def _staged(self, served: ServedModel, item: Item, pixels: HostArray, latents: HostArray) -> None:
        """Send an image whose stage is done to its next stage, or to the writer."""
        step = item.picture.step
        if not item.advance(pixels, latents):
            self._writer.image(served, item, pixels, latents)
            return
        if step in item.stops and not served.safety_checker:
            self._writer.preview(served, item, pixels, latents)
        if not item.over:
            item.deadline = time.monotonic() + PATIENCE * item.left
            self._queue.add(item)
            if item.job not in self._at_work():
                self._book.rests(item.job)
            self._compile_missing()

    # Faults, and the events that watchers get.

    def _on_devices(self, group: Group, run: Callable[[], Any]) -> Any:
        """Return the result of ``run``; None if the devices failed. The images then begin again, in a smaller batch
        after a lack of memory."""
        try:
            return run()
        except Exception as error:
            code, message = reason(error)
            smaller = code == "out_of_memory" and group.size in group.batches[1:]
            log.warning("%s: %s", group.key.size, error)
            for item in group.clear(smaller=smaller):
                if not smaller:
                    item.faults += 1
                if item.faults > 1:
                    self._book.fail(item.job, code, message)
            return None

    def _start_over(self) -> None:
        """Fail everything that has begun or was about to, after an unexpected error."""
        self._models.clear()
        with self._wake:
            for item in (*self._queue.begun, *self._in_decoder(), *([self._leading] if self._leading else ())):
                self._book.fail(item.job, "server_error", "the server failed; ask again")
        self._to_decode, self._leading = [], None

    # Programs that requests wait for are compiled in a separate thread, one group after the other.

    def _compile_missing(self) -> None:
        """Start the thread, if there is something for it to do and it does not run."""
        if self._compiler is None and self._missing() is not None:
            self._compiler = threading.Thread(target=self._compile, name="canvax compiler", daemon=True)
            self._compiler.start()

    def _missing(self) -> GroupKey | None:
        """Return a group of which programs are missing that images wait for."""
        waiting = (item for items in self._items.values() for item in items if self._queue.waits(item))
        return next((item.group for item in waiting if self._models.lacks(item)), None)

    def _compile(self) -> None:
        while True:
            with self._wake:
                key = self._missing()
                if key is None or self._closed:
                    self._compiler = None
                    return
            self._build(key)

    def _build(self, key: GroupKey) -> None:
        """Make a group's programs; where they cannot be made its jobs fail."""
        self._building = key
        with self._wake:
            image = any(item.group == key and item.request.init_images is not None for item in self._queue)
        try:
            group = self._models.build(key, image=image)
        except Exception as fault:
            log.exception("compiling failed")
            of_compiler = "server_error", "its programs cannot be compiled"
            code, message = reason(fault) if isinstance(fault, CanvaxError) else of_compiler
            with self._wake:
                for item in [item for item in self._queue if item.group == key and self._models.lacks(item)]:
                    self._book.fail(item.job, code, message)
            return
        finally:
            self._building = None
        with self._wake:
            self._models.add(group)
            self._wake.notify_all()
        self._tell_waits(lambda item: item.group == key, "")

    def _tell_compiling(self) -> None:
        """Tell those who lack programs for whom the compiler works, and how many programs are ready."""
        if (key := self._building) is not None:
            lacks, progress = self._models.lacks, self._announcer.progress
            self._tell_waits(lambda item: item.group != key and lacks(item), f"compiling for another job, {progress}")
            self._tell_waits(lambda item: item.group == key and lacks(item), f"compiling, {progress}")

    def _tell_waits(self, waits: Callable[[Item], bool], what: str) -> None:
        """Tell the jobs of images in the queue what must be done before they can begin."""
        with self._wake:
            jobs = {item.job.id: item.job for item in self._queue if waits(item)}
            for job in jobs.values():
                job.waits_for = what
                job.tell(Changed(job.status))

    def _tell_queue(self) -> None:
        """Tell clients how long they will wait: once a second, and less often if the queue is long, so that it costs
        little."""
        if (now := time.monotonic()) < self._tells:
            return
        seconds = 0.0
        with self._wake:
            for ahead, item in enumerate(list(self._queue)):
                job = item.job
                items = self._items[job.id]
                if job.status is Status.QUEUED and item is items[0] and job.ahead != ahead:
                    job.ahead, job.seconds_left = ahead, seconds + _seconds(items)
                    job.tell(Changed(Status.QUEUED))
                seconds += item.cost
            self._book.forget()
        self._tells = now + max(1.0, _TELLING * (time.monotonic() - now))
        self._metrics.models.set(self._models.loaded())
        for device in jax.local_devices():
            if (used := (device.memory_stats() or {}).get("bytes_in_use")) is not None:  # a CPU does not tell
                self._metrics.memory.labels(str(device.id)).set(used)


def _listed(cache: Any, refresh: bool) -> Sequence[Any]:
    """Return the cards of a cache of files; ``refresh``: look into the folder at once."""
    if cache:
        (cache.refresh if refresh else cache.renew)()
    return cache.cards() if cache else ()


def _alone(costs: Costs) -> float:
    return sum(alone for alone, _ in costs)


def _seconds(items: Sequence[Item]) -> float:
    """Return the seconds until all images of a job are done, from its turn on: at least those of its slowest image
    alone."""
    return max([sum(item.cost for item in items), *(item.left for item in items)])
