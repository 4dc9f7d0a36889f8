"""Random work through the server's queue, adapters, models, engine and journal, on a clock that only the work moves.

The batch, the weights and the files are stubs that may fail in any call, or end the process; all that decides who runs
when is real, and so is the journal from which the next process goes on.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from canvax import Options
from canvax.compile.aot import Build
from canvax.compile.features import Features
from canvax.compile.kinds import Kinds
from canvax.server import engine, group, job_store, jobs, models, writing
from canvax.server.adapter_cache import Slots
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.group import Group, Timings
from canvax.server.jobs import Job, JobRequest, Picture, Rejected, State, Status
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.models import ServedModel
from canvax.server.part_cache import PLAIN
from canvax.server.work import Beside, GroupKey, Item, Stage

MODELS = ("a", "b", "c")
FITTING = 2
"""Models whose weights fit on the devices."""

SIZES = (64, 96, 128)
"""The first is ready at the start."""

MOST_GROUPS = 2
PLACES = 2
HELD, FINISHED = 2, 3
"""Images and previews that the writer holds, and images that wait for it before no rows are run."""

ADAPTERS = ("ink", "clay", "wool")
LOAD, DECODE, OVERHEAD = 0.5, 0.1, 0.05
ROW = {1: 1.0, 2: 1.2}
"""Seconds of loading, decoding, a turn, and a row of each batch."""

CALLS = (
    "look",
    "encode",
    "place",
    "batch",
    "join",
    "carried",
    "step",
    "take",
    "preview",
    "load",
    "decode",
    "write",
    "build",
)
"""What may fail."""

ALWAYS = 1 << 30

KEEP = 5.0
"""Seconds for which the server keeps results, and jobs that it cannot do."""

DEADLY = "deadly"
"""The prompt of images that end the process in their first step."""


class Killed(BaseException):
    """The process ends."""


class World:
    """The time, and which calls fail.

    Attributes:
        now: seconds.
        fails: the number of calls that fail next, by name.
        kills: after how many calls of a name the process ends.
        meanwhile: done in the next call of a name.
        fired: whether anything failed.
    """

    def __init__(self) -> None:
        self.now, self.active, self.fired = 1000.0, False, False
        self.fails: dict[str, tuple[int, str]] = {}
        self.kills: dict[str, int] = {}
        self.meanwhile: dict[str, Callable[[], None]] = {}

    def call(self, name: str, seconds: float = 0.0) -> None:
        """A call that takes some seconds and may fail."""
        self.now += seconds
        if not self.active:
            return
        if name in self.kills:
            self.kills[name] -= 1
            if not self.kills[name]:
                del self.kills[name]
                raise Killed
        if act := self.meanwhile.pop(name, None):
            self.active = False
            act()
            self.active = True
        count, message = self.fails.pop(name, (0, ""))
        if count:
            if count > 1:
                self.fails[name] = count - 1, message
            self.fired = True
            raise RuntimeError(message)


WORLD = World()
FILES = SimpleNamespace(index={}, configs={}, path=Path("nowhere"))
CLOCK = SimpleNamespace(**dict.fromkeys(("monotonic", "perf_counter", "time"), lambda: WORLD.now))


class StubBatch:
    def __init__(self, size: int) -> None:
        WORLD.call("batch")
        self._runs: list[list[int] | None] = [None] * size

    def join(self, images: Mapping[int, Any]) -> None:
        WORLD.call("join")
        for slot, image in images.items():
            assert self._runs[slot] is None
            self._runs[slot] = [image.run.row, image.run.rows]

    def carried(self) -> dict[int, Any]:
        WORLD.call("carried")
        return {slot: standing(*run) for slot, run in enumerate(self._runs) if run}

    def step(self, rows: int) -> list[int]:
        rows = min([rows, *(run[1] - run[0] for run in self._runs if run)])
        WORLD.call("step", rows * ROW[len(self._runs)])
        for run in self._runs:
            if run:
                run[0] += rows
        return [slot for slot, run in enumerate(self._runs) if run and run[0] == run[1]]

    def left(self, slot: int) -> int:
        run = self._runs[slot]
        return run[1] - run[0] if run else 0

    denoised = np.zeros(64)

    def unpacked(self, packed: Any) -> Any:
        WORLD.call("preview")
        return packed

    def take(self, slot: int) -> np.ndarray:
        WORLD.call("take")
        self._runs[slot] = None
        return np.zeros(())

    def drop(self, slot: int) -> None:
        self._runs[slot] = None


def standing(row: int, rows: int) -> Any:
    """Where an image stands, between batches."""
    return SimpleNamespace(run=SimpleNamespace(row=row, rows=rows))


class StubGroup(Group):
    """Its images are seated and moved on as always."""

    def __init__(self, key: GroupKey, batches: Sequence[int]) -> None:
        self.key, self.used, self.alone, self.batches = key, 0.0, 1, list(batches)
        self.timings = Timings({batch: ROW[batch] for batch in batches}, 0.0, DECODE)
        text = SimpleNamespace(shortest=key.kinds.lengths)
        self._programs: Any = SimpleNamespace(networks=SimpleNamespace(text=text), features=Features())
        self._batch, self._seats = None, []

    def step(self) -> Any:
        if any(item.job.request.prompt == DEADLY for item in self.seated):
            raise Killed
        return super().step()

    def begin(self, item: Item) -> Any:
        if item.carried is None:
            WORLD.call("encode")
            assert item.beside.shelf is not None
            item.beside.shelf.shares(item.beside.adapters)
            item.carried = standing(0, len(item.table))
        return item.carried

    def _new_batch(self, images: int) -> Any:
        return StubBatch(images)

    def _params(self, **_: Any) -> Any: ...

    def lacks(self, item: Item) -> bool:
        return False

    def summary(self) -> str:
        return ""

    def _decode(self, params: Any, latents: Sequence[np.ndarray]) -> Any:
        WORLD.call("decode", DECODE)
        return [np.zeros((8, 8, 3), np.float32) for _ in latents]


class StubShelf:
    """The real slots, and what was written into them."""

    def __init__(self) -> None:
        self.adapters = {name: SimpleAdapter(name) for name in ADAPTERS}
        self.slots, self.written, self.summary = Slots(PLACES), dict[int, Any](), str

    def shares(self, adapters: Any) -> None:
        self.slots.place(adapters, self._put)

    def take_off(self) -> None:
        self.written = {}

    def put_on(self) -> None:
        for entry, place in self.slots.held.items():
            self._put(place, entry)

    def _put(self, place: int, entry: Any) -> None:
        self.written.pop(place, None)
        WORLD.call("place")
        self.written[place] = entry


class StubServed(ServedModel):
    bytes = 1

    def __init__(self, name: str, load: Callable[[str], Any], *_: Any, weights: bool = True, **__: Any) -> None:
        denoiser = SimpleNamespace(facts=SimpleNamespace(edits=False))
        networks = SimpleNamespace(controls=(), ip_adapters=(), denoiser=denoiser)
        defaults = SimpleNamespace(num_inference_steps=20)
        model: Any = SimpleNamespace(networks=networks, revision=None, defaults=defaults, files=FILES, streamed=False)
        model.text = SimpleNamespace(names=(), encoders=())
        self.name, self.params, self.model, self.on_request = name, {} if weights else None, model, not weights
        self.groups, self.used, self.failed, self.retry, self.load_seconds = {}, 0.0, 0, 0.0, LOAD
        self.safety_checker, self.sha256, self.shelf, self._load = None, "", StubShelf(), load  # type: ignore[assignment]
        self.colours = SimpleNamespace(learn=lambda *_: None, pixels=lambda latents: latents)  # type: ignore[assignment]
        self.embeddings = SimpleNamespace(summary=str)  # type: ignore[assignment]
        self.vaes = self.controlnets = SimpleNamespace(held={}, bytes=0, take_off=lambda: None)  # type: ignore[assignment]
        self._controls, self.unfit = [], {}
        self._varied = {PLAIN: SimpleNamespace(model=model)}  # type: ignore[dict-item]

    def check(self, ask: JobRequest) -> Any:
        return StubChecked(ask, self.name, self.model, self.shelf)

    @property
    def loaded(self) -> bool:
        WORLD.call("look")
        return self.params is not None

    def sizes(self, warm: Any) -> Iterator[Any]:
        yield (SIZES[0], SIZES[0]), tuple(ROW)

    def build(self, key: GroupKey, batches: Sequence[int], announce: Any, *, image: bool = True) -> Group:
        WORLD.call("build")
        return StubGroup(key, batches)

    def time(self, *_: Any) -> None: ...

    def card(self, *_: Any, **options: Any) -> Any:
        return SimpleNamespace(id=self.name, size=(SIZES[0], SIZES[0]))


class StubItem(Item):
    def encoded(self) -> None: ...

    def inputs(self) -> Iterator[Any]:
        return iter(())

    def metadata(self, model: Any) -> dict[str, Any]:
        return {}


class StubStage(Stage):
    rows = property(lambda stage: len(stage.table))


class StubChecked:
    input_bytes, tiles, hints = 0, True, ()  # no images are sent, and hints are those of a real model

    def __init__(self, ask: JobRequest, name: str, model: Any = None, shelf: StubShelf | None = None) -> None:
        adapters: Any = {shelf.adapters[adapter]: scale for adapter, scale in ask.adapters.items()} if shelf else {}
        self.images, self.beside = ask.n, Beside(adapters, cast("Any", shelf))
        self.request: Any = SimpleNamespace(
            guided=True, embedded=False, init_images=None, options=Options(**ask.options, progress=False)
        )
        table: Any = range(ask.steps or 1)
        heights = (ask.height or SIZES[0], *(SIZES[-1:] if ask.options else ()))
        self.stages = [
            StubStage(self.request, table, GroupKey(name, height, SIZES[0], Kinds()), None if last else then)
            for height, last in zip(heights, (len(heights) == 1, True), strict=False)
        ]
        self.group = self.stages[0].group

    def job(self, ask: JobRequest, cancel: Callable[[Job], None]) -> Job:
        return Job(ask, self.group.model, self.pictures(), cancel=cancel)

    def pictures(self) -> list[Picture]:
        rows = sum(len(stage.table) for stage in self.stages)
        return [Picture(i, i, SIZES[0], self.group.height, rows) for i in range(self.images)]

    def items(self, job: Job, picture: Picture) -> list[Item]:
        previews = tuple(range(1, min(job.request.previews, picture.steps - 1) + 1))
        return [StubItem(job, picture, [*self.stages], job.request.client, self.beside, previews=previews)]


def alone(item: Item) -> float:
    """Seconds of the stages of an image from its present one on."""
    return sum(seconds for seconds, _ in item.costs[item.at :])


def then(request: Any, pixels: Any, latents: Any) -> Any:
    """The second stage's request, as it is."""
    return request


class Later:
    """The writer's threads: files are made when the machine says."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        self.calls.append(lambda: call(*args))

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def close(self, seconds: float) -> None:
        self.run()


class AtOnce:
    """The journal's thread: what is to be written is written."""

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        call(*args)
        done = Future[None]()
        done.set_result(None)
        return done

    def shutdown(self, *, wait: bool) -> None: ...


class Nothing:
    """Any metric, and any method of one."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: object) -> Any:
        return self


class Silent(Metrics):
    """Counts nothing, which takes less time."""

    def __init__(self) -> None: ...

    def __getattribute__(self, name: str) -> Any:
        return Nothing()


class Faults(logging.Handler):
    """The log of the server: its last exception, for whoever has to find out why a job failed."""

    last = "nothing"

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = logging.Formatter().formatException(record.exc_info)


FAULTS = Faults()


class Asleep(BaseException):
    """The engine waits although there is work."""


class Server(RuleBasedStateMachine):
    """A server and its clients.

    Attributes:
        engine: of the present process.
        files: that its writer has still to make.
        jobs: those that were not over, with the time at which each has to be.
        known: all jobs by id, as the last process that had each left it.
        tried: processes that were killed while a job ran, since its last image.
        struck: jobs that ran when a process was killed by something else than a job.
        kills: processes that each deadly job has ended.
        fewer: whether a process was started without a model.
    """

    def __init__(self) -> None:
        super().__init__()
        WORLD.__init__()
        self.hangs, self.turns, self.jobs, self.known = 0, 0, list[tuple[Job, float]](), dict[str, Job]()
        self.tried, self.kills, self.struck, self.fewer = Counter[str](), Counter[str](), set[str](), False
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk is slow to say that it has all
        self._folder = tempfile.TemporaryDirectory(prefix="canvax-machine-", dir=memory)
        self._start(MODELS)

    def _start(self, names: Sequence[str]) -> None:
        """A new process, which goes on with what its journal holds."""
        WORLD.fails, WORLD.kills, WORLD.meanwhile = {}, {}, {}
        limits = EngineSettings(
            on_request=names[2:], compile_on_demand=True, queue_seconds=1e9, memory=FITTING, keep_seconds=KEEP
        )
        journal = Journal(Path(self._folder.name, "jobs.db"))
        self.files = Later()
        self.engine = ImageEngine(names[:2], limits, Silent(), self._load, journal=journal)
        self.engine._compile_missing = lambda: None  # type: ignore[method-assign]
        self.engine._wake.wait = self._sleep  # type: ignore[method-assign]
        self.engine._writer._threads = self.files  # type: ignore[assignment]
        self.engine._writer._count = 1
        self.engine._book._later = AtOnce()  # type: ignore[assignment]
        self.engine._begin()

    def _restart(self, names: Sequence[str] = MODELS) -> None:
        """The process has ended: another one begins, and clients find their jobs again."""
        self.fewer = self.fewer or names != MODELS
        self._start(names)
        before, self.jobs = self.jobs, []
        seconds = sum(alone(item) for item in self.engine._queue)
        for job, _ in before:
            again = self.engine.job(job.id, job.request.client)
            assert again is not None, job.status
            self.known[job.id] = again
            self.jobs.append((again, WORLD.now + 40 + KEEP + 4 * seconds))

    def _act(self, call: Callable[[], None]) -> None:
        """What may fail, or end the process."""
        try:
            with acting():
                call()
        except Killed:
            self._killed()

    def _killed(self) -> None:
        self.every_job_ends()
        ran = [job for job, _ in self.jobs if job.status is Status.RUNNING]
        killers = {item.job.id for key in self.engine._models.groups() for item in self._seated(key)}
        killers &= {job.id for job in ran if job.request.prompt == DEADLY}
        self.kills.update(killers)
        self.tried.update(job.id for job in ran)
        self.struck |= set() if killers else {job.id for job in ran}
        assert not killers or max(self.kills[name] for name in killers) <= job_store.MOST_ATTEMPTS
        self.engine._book._journal.close()  # type: ignore[union-attr]
        self._restart()

    def _seated(self, key: GroupKey) -> Sequence[Item]:
        return self.engine._models.group(key).seated

    @rule(
        model=st.sampled_from(MODELS), client=st.sampled_from(("alice", "bob", "")), steps=st.integers(1, 5),
        n=st.integers(1, 2), size=st.sampled_from((0, 0, 0, 1, 2)),
        adapters=st.sets(st.sampled_from(ADAPTERS), max_size=PLACES), previews=st.integers(0, 2),
        seconds=st.sampled_from((None, None, 20.0, 40.0)), hires=st.sampled_from((0, 0, 2)),
        prompt=st.sampled_from(("", "", "", "", "", DEADLY)),
    )  # fmt: skip
    def submit(
        self, model: str, client: str, steps: int, n: int = 1, size: int = 0, adapters: Any = (), previews: int = 0,
        seconds: float | None = None, hires: int = 0, prompt: str = "",
    ) -> None:  # fmt: skip
        ask = JobRequest(
            prompt, model=model, client=client, steps=steps, n=n, height=SIZES[size], previews=previews,
            adapters=dict.fromkeys(adapters, 1.0), seconds=seconds, options={"hires": hires} if hires else {},
        )  # fmt: skip
        before = sum(alone(item) for item in self.engine._queue)
        try:
            job = self.engine.submit(ask)
        except Rejected as refused:
            allowed = ("too_late", "model_unavailable", *(["model_not_found"] if self.fewer else []))
            assert refused.code in allowed, refused.code  # noqa: PT017
            assert seconds or WORLD.fired or self.fewer
        else:
            job.look()
            seconds = before + sum(
                sum(alone for alone, _ in item.costs[item.at :]) for item in self.engine._items[job.id]
            )
            self.known[job.id] = job
            self.jobs.append((job, WORLD.now + 40 + 4 * seconds))

    @rule(
        model=st.sampled_from(MODELS), client=st.sampled_from(("alice", "bob", "")), steps=st.integers(1, 5),
        adapters=st.sets(st.sampled_from(ADAPTERS), max_size=PLACES), turns=st.sampled_from((5, 20, 70)),
    )  # fmt: skip
    def stream(self, model: str, client: str, steps: int, adapters: Any, turns: int) -> None:
        """A client who asks for the next image before the last one is done."""
        for i in range(turns):
            waiting = sum(item.client == client and item.group.model == model for item in self.engine._queue)
            if waiting < 3:
                self.submit(model, client, max(1, steps - i % 2), adapters=adapters)
            self._turn()

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if self.jobs:
            self.jobs[which % len(self.jobs)][0].cancel()

    @rule(name=st.sampled_from(CALLS), which=st.integers(0, 9))
    def cancel_meanwhile(self, name: str, which: int) -> None:
        """While the engine is in a call."""
        if name != "look":
            WORLD.meanwhile[name] = lambda: self.cancel(which)

    @rule()
    def build_meanwhile(self) -> None:
        """A program is ready while the engine looks for work."""
        WORLD.meanwhile["look"] = self._build

    @rule(
        name=st.sampled_from(CALLS), count=st.sampled_from((1, 2, 3, ALWAYS)),
        message=st.sampled_from(("broken", "RESOURCE_EXHAUSTED")),
    )  # fmt: skip
    def fail(self, name: str, count: int, message: str) -> None:
        WORLD.fails[name] = min(count, 3) if name == "look" else count, message

    @rule(name=st.sampled_from(CALLS), count=st.integers(1, 9))
    def kill(self, name: str, count: int) -> None:
        """The process ends in one of the next calls."""
        WORLD.kills = {name: count}

    @rule(names=st.sampled_from((MODELS, MODELS, MODELS[:1])))
    def restart(self, names: Sequence[str]) -> None:
        """A stop that is meant, with another start, perhaps with fewer models."""
        self.every_job_ends()
        self.engine.drain(0.0)
        self.engine.close()
        self._restart(names)

    @rule(turns=st.integers(1, 9))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self._turn()

    @rule()
    def build(self) -> None:
        self._build()

    @rule()
    def write(self) -> None:
        if self.turns >= self.hangs:
            self._act(self.files.run)

    @rule(turns=st.sampled_from((5, 40)))
    def hang(self, turns: int) -> None:
        """No file is made for a while."""
        self.hangs = self.turns + turns

    @invariant()
    def something_can_run(self) -> None:
        """Or be decoded, or the writer is full. A job that is to run alone waits for those that have begun.

        They may wait for the programs of their second passes, and then for files.
        """
        ready, engine = self.engine._models.groups(), self.engine
        if any(item.group in ready for item in engine._queue) and not (
            engine._suspects and (self._unwritten() or engine._at_work())
        ):
            assert self._is_full() or engine._can_decode() or engine._leader() is not None

    @invariant()
    def all_is_counted_and_bounded(self) -> None:
        engine, writer = self.engine, self.engine._writer
        assert writer.images + writer._previews == len(self.files.calls) <= HELD
        assert len(engine._to_decode) < FINISHED + max(ROW)
        left = sum(not picture.status.over for job in engine.jobs() for picture in job.pictures)
        held = sum(not picture.status.over for job, _ in engine._book.held() for picture in job.pictures)
        assert left <= engine._images() + held

    @invariant()
    def nothing_is_lost(self) -> None:
        """The images of a job that is not over wait, run, are decoded or written."""
        places = Counter(item.job.id for item in [*self.engine._queue, *self.engine._in_decoder()])
        held = [job for job, _ in self.engine._book.held()]
        for job in self.engine.jobs():
            if job in held:
                continue
            images = sum(not picture.status.over for picture in job.pictures)
            assert images <= places[job.id] + len(self.files.calls), job.status

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.engine._models.loaded() <= FITTING

    @invariant()
    def adapters_are_where_images_have_them(self) -> None:
        for name in self.engine._models._served:
            model: Any = self.engine._models.named(name)
            items = [item for item in self.engine._queue.begun if item.group.model == name]
            assert model.shelf.slots._pins == Counter(entry for item in items for entry in item.beside.adapters)
            assert len(model.shelf.slots._pins) <= PLACES
            for entry in (entry for item in items if item.carried and model.loaded for entry in item.beside.adapters):
                assert model.shelf.written[model.shelf.slots.held[entry]] is entry

    @invariant()
    def every_job_ends(self) -> None:
        for job, late in self.jobs:
            assert job.status.over or WORLD.now < late, (job.request.model, job.request.client, WORLD.now - job.created)
            if job.pictures[0].status is Status.DONE or any(picture.data for picture in job.pictures):
                self.tried[job.id] = 0
            if job.status is Status.FAILED and not WORLD.fired:
                expected = job.error in [("timeout", ANY), *self._deserved(job)]
                assert expected, f"{job.error}, after the server logged:\n{FAULTS.last}"
        self.jobs = [(job, late) for job, late in self.jobs if not job.status.over]

    def _deserved(self, job: Job) -> Iterator[tuple[str, Any]]:
        """Errors that a job may have for what happened to it."""
        if self.fewer:
            yield "model_not_found", ANY
        if job.request.prompt == DEADLY or (job.id in self.struck and self.tried[job.id] >= job_store.MOST_ATTEMPTS):
            yield "server_killed", ANY

    def _unwritten(self) -> bool:
        return bool(self.files.calls or self.engine._in_decoder())

    def teardown(self) -> None:
        """Nothing is left when all is done."""
        with suppress(Exception) if self.engine.failure else self._folder:
            self._end()

    def _end(self) -> None:
        while self.engine.jobs():
            self._turn()
            self.check_invariants_now()
        self.files.run()
        assert self.engine._images() == self.engine._seconds() == 0
        queue, shelves = self.engine._queue, [served.shelf for served in self.engine._models._served.values()]
        assert self.engine.state is State.READY
        assert (len(queue), queue.seconds, queue._active, self.engine._items) == (0, 0.0, {}, {})
        assert not any(shelf.slots._pins for shelf in shelves if shelf)
        self.engine._models.trim(set)
        warm = len(self.engine._models._kept)
        assert len(self.engine._models.groups()) <= MOST_GROUPS * len(MODELS) + warm
        assert all(item.over for key in self.engine._models.groups() for item in self._seated(key))
        self.engine.close()

    def check_invariants_now(self) -> None:
        self.something_can_run()
        self.nothing_is_lost()
        self.every_job_ends()

    def _turn(self) -> None:
        """A turn of the engine, if it has work, and now and then of the threads beside it."""
        WORLD.now += OVERHEAD
        self.turns += 1
        if self.turns % 5 == 0:
            self.build()
            self.write()
        if self.engine._can_decode() or self.engine._leader() is not None:
            try:
                self._act(self.engine._next_turn)
            except Asleep:  # its job was cancelled, or its model waits for the writer; others wait for a program
                assert self._is_full() or self.engine._missing() is not None
            assert not self.engine._can_decode()  # before more rows
        else:
            self.engine._book.expire()
        self.every_job_ends()

    def _is_full(self) -> bool:
        """Whether images are finished that the writer has no room for."""
        return bool(self.engine._in_decoder()) and not self.engine._writer.room

    def _build(self) -> None:
        if key := self.engine._missing():
            self._act(lambda: self.engine._build(key))

    def _load(self, name: str) -> Any:
        WORLD.call("load", LOAD)
        return SimpleNamespace(params={}, safety_checker=None, model=SimpleNamespace(files=FILES))

    def _sleep(self, seconds: float | None) -> None:
        if seconds != 0:
            raise Asleep


class SimpleAdapter(str):
    """An adapter; two of the same name are two."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@contextmanager
def acting() -> Iterator[None]:
    """Calls may fail."""
    before, WORLD.active = WORLD.active, True
    try:
        yield
    finally:
        WORLD.active = before


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (engine, group, job_store, jobs, models, writing):
        monkeypatch.setattr(module, "time", CLOCK)
    memory = SimpleNamespace(memory_stats=lambda: None)
    monkeypatch.setattr(engine, "jax", SimpleNamespace(local_devices=lambda: [memory]))
    monkeypatch.setattr(models, "ServedModel", StubServed)
    monkeypatch.setattr(
        models, "sample", lambda name, _, width, height, **options: StubChecked(JobRequest("", height=height), name)
    )
    monkeypatch.setattr(models, "MOST_GROUPS", MOST_GROUPS)
    monkeypatch.setattr(writing, "HELD", HELD)
    monkeypatch.setattr(engine, "MOST_FINISHED", FINISHED)
    monkeypatch.setattr(writing, "image_file", lambda *_: (WORLD.call("write"), b"file")[1])
    monkeypatch.setattr(writing, "preview_file", lambda *_: b"preview")
    log = logging.getLogger("canvax.server")
    monkeypatch.setattr(log, "handlers", [FAULTS])
    before = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(before)


class Waits(Silent):
    """What an operator sees of waiting."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __getattribute__(self, name: str) -> Any:
        seconds = object.__getattribute__(self, "seconds")
        if name == "waited":
            return SimpleNamespace(observe=seconds.append)
        return seconds if name == "seconds" else super().__getattribute__(name)


def ran(server: Server, *, until: Callable[[], bool]) -> None:
    for _ in range(1000):
        if until():
            return
        server._turn()
    raise AssertionError([(job.id, job.status) for job, _ in server.jobs])


@pytest.fixture
def server(stubs: None) -> Iterator[Server]:
    server = Server()
    yield server
    server.teardown()


def submitted(server: Server, prompt: str = "", client: str = "alice", steps: int = 3, **more: Any) -> str:
    server.submit("a", client, steps, prompt=prompt, **more)
    return server.jobs[-1][0].id


def test_a_job_that_kills_two_processes_fails_and_others_are_done(server: Server) -> None:
    """The third process does it no more; those that ran beside it run again, and what waited is done first."""
    deadly = submitted(server, DEADLY)
    names = [submitted(server, client=client) for client in ("alice", "bob") * 3]
    ran(server, until=lambda: sum(server.kills.values()) == 1)
    waited = [name for name in names if not server.known[name].attempts]
    assert 0 < len(waited) < len(names)
    ran(server, until=lambda: sum(server.kills.values()) == 2)
    assert {server.known[name].status for name in waited} == {Status.DONE}
    ran(server, until=lambda: not server.engine.jobs())
    assert server.known[deadly].error == ("server_killed", ANY)
    assert {server.known[name].status for name in names} == {Status.DONE}
    assert server.kills == {deadly: 2}


def test_a_job_that_may_have_killed_a_process_has_no_company(server: Server) -> None:
    for _ in range(4):
        submitted(server)
    ran(server, until=lambda: len(server.engine._queue.begun) == 2)
    WORLD.kills = {"step": 1}
    server._turn()
    names = {job.id for job, _ in server.jobs}
    for i in range(80):
        if i % 3 == 0:
            submitted(server, client="bob", steps=2)
        server._turn()
        begun = {item.job.id for item in server.engine._queue.begun}
        assert not begun & {job.id for job, _ in server.jobs if job.attempts} or len(begun) == 1
    assert {server.known[name].status for name in names} == {Status.DONE}


def test_a_model_that_cannot_be_loaded_costs_its_jobs(server: Server) -> None:
    """And is not asked for again at once, since every try takes the others off the devices."""
    WORLD.fails["load"] = ALWAYS, "no such file"
    server.submit("c", "alice", 3)
    job, _ = server.jobs[0]
    ran(server, until=lambda: job.status.over)
    assert job.error == ("model_unavailable", ANY)
    with pytest.raises(Rejected) as refused:
        server.engine.submit(JobRequest("", model="c"))
    assert (refused.value.status, refused.value.code) == (503, "model_unavailable")
    assert refused.value.retry_after
    WORLD.fails, WORLD.now = {}, WORLD.now + refused.value.retry_after
    server.submit("c", "alice", 3)
    job, _ = server.jobs[0]
    ran(server, until=lambda: job.status is Status.DONE)


def test_a_join_that_fails_costs_its_jobs(server: Server) -> None:
    WORLD.fails["join"] = ALWAYS, "broken"
    names = [submitted(server) for _ in range(3)]
    ran(server, until=lambda: all(server.known[name].status.over for name in names))
    assert [server.known[name].error for name in names] == [("server_error", ANY)] * 3
    WORLD.fails = {}
    name = submitted(server)
    ran(server, until=lambda: server.known[name].status is Status.DONE)


def test_an_engine_without_progress_counts_as_failed(server: Server) -> None:
    """While it has work; not while it is idle. It is ready again when it goes on."""
    codes, most = list[str](), EngineSettings().stall_seconds

    def stall() -> None:
        WORLD.now += most + 1
        with pytest.raises(Rejected) as refused:
            server.engine.submit(JobRequest("", model="a"))
        codes.append(refused.value.code)

    name = submitted(server)
    server.jobs.clear()  # it is late
    WORLD.meanwhile["step"] = stall
    ran(server, until=lambda: server.known[name].status is Status.DONE)
    assert codes == ["failed"]
    with pytest.raises(Asleep):  # there is nothing to do
        server.engine._next_turn()
    WORLD.now += most + 1
    assert server.engine.state is State.READY


@pytest.mark.parametrize("where", ["_turn", "_start_over"])
def test_an_engine_that_only_fails_gives_up(server: Server, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It never ends in silence: jobs fail, nothing is accepted, and whoever watches hears of it."""

    def fail() -> None:
        raise KeyError("broken")

    for name in {"_turn", where}:
        monkeypatch.setattr(server.engine, name, fail)
    monkeypatch.setattr(server.engine, "_begin", lambda: None)
    submitted(server)
    (job, _), *_ = server.jobs
    server.jobs.clear()
    server.engine._run()
    assert isinstance(server.engine.failure, KeyError)
    assert (server.engine.state, job.parked, job.error) == (State.FAILED, True, None)  # the journal has it
    with pytest.raises(Rejected) as refused:
        server.engine.submit(JobRequest("", model="a"))
    assert (refused.value.status, refused.value.code) == (503, "failed")
    server.engine.close()
    server._folder.cleanup()


def test_a_start_that_compiles_says_so() -> None:
    """Loading programs is no compiling, and what is not stored is compiled again the next time."""
    announcer = models.Announcer(lambda line: None, lambda build: None, lambda: None)
    assert announcer.starting == "loading its models"
    announcer.expect(3)
    announcer(Build("text encoder", cached=True))
    announcer(Build("text encoder", True, 0.1, 5))
    assert ("compiling" in announcer.starting, "1 of 3" in announcer.starting) == (False, True)
    announcer(Build("decoder", cached=False))
    assert ("compiling" in announcer.starting, "1 of 3" in announcer.starting) == (True, True)
    announcer(Build("decoder", False, 2.0, 0))
    assert "kept" not in announcer.starting
    announcer(Build("denoiser", False, 2.0, 5))
    assert ("kept" in announcer.starting, "3 of 3" in announcer.starting) == (True, True)
    announcer.expect(2)
    assert ("compiling" in announcer.starting, "0 of 2" in announcer.starting) == (False, True)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_job_of_the_journal_is_not_unknown_while_the_server_starts(
    stubs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: bool
) -> None:
    """A client that asks for it tries again. Closing meanwhile is no fault of the journal."""
    loading, sizes = threading.Event(), StubServed.sizes
    monkeypatch.setattr(StubServed, "sizes", lambda served, warm: (loading.wait(60), sizes(served, warm))[1])
    journal = Journal(tmp_path / "jobs.db") if recorded else None
    engine = ImageEngine(["a"], EngineSettings(), Silent(), lambda name: None, journal=journal)
    engine.start()
    for asks in (lambda: engine.job("1234", ""), lambda: engine.jobs("")):
        with pytest.raises(Rejected) if recorded else nullcontext() as refused:
            assert not asks()
        if refused:
            assert (refused.value.status, refused.value.code) == (503, "starting")
            assert refused.value.retry_after
    assert engine.drain(1.0)
    engine.close()
    loading.set()
    engine._thread.join(60)
    assert engine.failure is None


def test_what_was_made_at_the_start_stays(stubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = range(64, 64 + 8 * 18, 8)
    monkeypatch.setattr(StubServed, "sizes", lambda served, warm: (((64, size), (1,)) for size in sizes))
    server = Server()
    made = set(server.engine._models.groups())
    assert len(made) == 18 * 2
    for height in (512, 520, 528, 536):
        server.engine._models.add(StubGroup(GroupKey("a", height, 64, Kinds()), (1,)))
    server.engine._models.trim(set)
    kept = set(server.engine._models.groups())
    assert made < kept
    assert len(kept - made) == MOST_GROUPS
    server._folder.cleanup()


def test_a_stop_that_is_meant_is_no_attempt(server: Server) -> None:
    name = submitted(server, n=2)
    for _ in range(2 * job_store.MOST_ATTEMPTS):
        ran(server, until=lambda: server.known[name].status is Status.RUNNING)
        server.restart(MODELS)
    ran(server, until=lambda: server.known[name].status is Status.DONE)


def test_an_image_that_is_done_clears_its_job(server: Server) -> None:
    """Of many images, each process has done one before it was killed."""
    name = submitted(server, n=8)

    def done() -> int:
        return sum(picture.data is not None for picture in server.known[name].pictures)

    for _ in range(job_store.MOST_ATTEMPTS + 1):
        before = done()
        ran(server, until=lambda before=before: done() > before)  # type: ignore[misc]
        WORLD.kills = {"step": 1}
        ran(server, until=lambda: not WORLD.kills)
    assert server.known[name].status is Status.QUEUED
    ran(server, until=lambda: server.known[name].status is Status.DONE)


def test_jobs_wait_for_a_model_that_a_start_lacks(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.submit("b", "alice", 3)
    name = server.jobs[-1][0].id
    server.restart(MODELS[:1])
    assert [record.levelno for record in caplog.records if "model='b'" in record.getMessage()] == [logging.WARNING]
    assert server.known[name].status is Status.QUEUED
    assert server.engine._book.until_late() is not None
    server.restart(MODELS)
    ran(server, until=lambda: server.known[name].status is Status.DONE)
    server.submit("b", "alice", 3)
    name = server.jobs[-1][0].id
    server.restart(MODELS[:1])
    before = WORLD.now
    ran(server, until=lambda: server.known[name].status.over)
    assert server.known[name].error == ("model_not_found", ANY)
    assert KEEP <= WORLD.now - before < KEEP + 1
    server.restart(MODELS)
    again = server.engine.job(name, "alice")
    assert again
    assert again.status is Status.FAILED


def test_waiting_is_seen_once_for_each_image(server: Server) -> None:
    """Not for second passes, and not for the time in which there was no server."""
    server.engine._metrics = waits = Waits()
    submitted(server, n=2, hires=2)
    ran(server, until=lambda: not server.engine.jobs())
    assert len(waits.seconds) == 2
    submitted(server)
    server.jobs.clear()
    WORLD.now += 3600.0
    server.restart(MODELS)
    server.engine._metrics = waits = Waits()
    ran(server, until=lambda: not server.engine.jobs())
    assert not waits.seconds


def machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Server,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_whatever_happens_every_job_ends(stubs: None) -> None:
    machine(15, 40)


@pytest.mark.weekly
def test_whatever_happens_every_job_ends_at_length(stubs: None) -> None:
    machine(1000, 60)


def test_a_job_that_fails_shows_what_was_logged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that some stub does not have, say."""
    with monkeypatch.context() as patch:
        patch.setattr(StubItem, "metadata", lambda self, model: self.request.options.zebra)
        submitted(server, steps=1)
        with pytest.raises(AssertionError, match="zebra"):
            server.run(9)
    server.jobs.clear()
