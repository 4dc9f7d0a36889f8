"""Images between their last step and their file: counted, bounded, watched, and not lost without a word."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from canvax.server import writing
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.files import image_file
from canvax.server.group import Group
from canvax.server.jobs import Job, JobRequest, Rejected, State, Status
from canvax.server.jobs_api import job_json
from canvax.server.metrics import Metrics
from canvax.server.models import Warm
from tests.support.drawing import small_emoji
from tests.support.serving import until

PIPE = small_emoji()


def started(**settings: Any) -> ImageEngine:
    wanted = EngineSettings(**{"warm": (Warm(None, (1, 4)),), **settings})
    engine = ImageEngine(["emoji"], wanted, Metrics(), lambda _: PIPE)
    engine.start()
    until(lambda: engine.state is not State.STARTING, 300)
    assert engine.failure is None
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[ImageEngine]:
    engine = started()
    yield engine
    engine.close(5.0)


@pytest.fixture
def metric(engine: ImageEngine) -> Callable[[str], float]:
    """What gives a metric of its server."""
    return lambda name: engine._metrics.registry.get_sample_value(name) or 0.0


def limited(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Other settings for a test."""
    monkeypatch.setattr(engine, "_settings", EngineSettings(**settings))


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Files of images take until the end of this; their sizes are those that are being made."""
    going, making = threading.Event(), list[int]()

    def slow(pixels: Any, *arguments: Any) -> bytes:
        making.append(pixels.nbytes)
        assert going.wait(60)
        return image_file(pixels, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "image_file", slow)
        try:
            yield making
        finally:
            going.set()


def ended(jobs: list[Job], status: Status = Status.DONE) -> None:
    until(lambda: all(job.status.over for job in jobs), 60)
    assert {job.status for job in jobs} == {status}, [job.error for job in jobs]


def submitted(engine: ImageEngine) -> list[Job]:
    """Thirty images of a step."""
    return [engine.submit(JobRequest("a dog face", steps=1, n=3, seed=i)) for i in range(10)]


def test_images_behind_their_last_step_are_counted_and_bounded(
    engine: ImageEngine, metric: Callable[[str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs: few images wait for it as pixels, the queue fills, and 429 comes. Cancelled ones leave."""
    limited(engine, monkeypatch, queue_images=30)
    monkeypatch.setattr("canvax.server.engine.MOST_FINISHED", 10)
    writer = engine._writer
    most = writing.HELD * writer._count
    with hanging(monkeypatch) as making:
        jobs = submitted(engine)
        until(lambda: metric("canvax_undecoded_images") >= 10 and metric("canvax_writing_images") == most, 60)
        assert metric("canvax_queue_images") == 30
        assert metric("canvax_queue_cost_seconds") > 0 or not writer.pace
        assert metric("canvax_writing_seconds") > 0
        assert len(making) == writer._count
        assert len(engine._queue) >= 30 - 10 - 4 - most  # a batch more, and no row after it
        with pytest.raises(Rejected) as refused:
            engine.submit(JobRequest("a dog face"))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert refused.value.retry_after
        for job in jobs[5:]:
            job.cancel()
        until(lambda: metric("canvax_undecoded_images") + len(engine._queue) <= 15 - most)
    ended(jobs[:5])
    until(lambda: metric("canvax_queue_images") == 0)
    assert metric("canvax_writing_seconds") == 0


def test_a_file_that_hangs_counts_as_a_failed_engine(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(engine, monkeypatch, stall_seconds=0.1)
    with hanging(monkeypatch):
        job = engine.submit(JobRequest("a red apple", steps=1))
        until(lambda: engine.state is State.FAILED)
    ended([job])
    until(lambda: engine.state is State.READY)


def test_a_file_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(warm=(Warm(None, (1,)),))
    with hanging(monkeypatch):
        engine.submit(JobRequest("a red apple", steps=1))
        until(lambda: engine._writer.images == 1)
        closing = threading.Thread(target=engine.close, args=(0.1,))
        closing.start()
        closing.join(10)
        assert not closing.is_alive()


def test_all_that_is_finished_is_decoded_before_more_rows(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one image is decoded at a time, as on a GPU."""
    events: list[tuple[str, int]] = []
    step, decode = Group.step, Group.decode
    monkeypatch.setattr("canvax.server.policy.WORTH_IT", 100.0)
    monkeypatch.setattr("canvax.server.writing.HELD", 100)

    def stepped(group: Group) -> Any:
        finished = step(group)
        events.append(("finished", len(finished)))
        return finished

    def decoded(group: Group, latents: Any, vae: Any = None) -> Any:
        events.append(("decoded", len(latents)))
        return decode(group, latents, vae)

    monkeypatch.setattr(Group, "step", stepped)
    monkeypatch.setattr(Group, "decode", decoded)
    ended([engine.submit(JobRequest("a dog face", steps=2, n=4, seed=i)) for i in range(3)])
    undecoded, several = 0, False
    for name, count in events:
        assert name == "decoded" or undecoded == 0
        undecoded += count if name == "finished" else -count
        several |= undecoded > 1
    assert several
    assert undecoded == 0


def test_a_file_that_cannot_be_kept_is_counted_and_the_job_says_why(
    engine: ImageEngine, metric: Callable[[str], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secret" / "out"
    monkeypatch.setattr(engine._writer, "_output", folder)
    ended(first := [engine.submit(JobRequest("a red apple", steps=1))])
    image = job_json(first[0])["images"][0]
    assert (folder / image["file"]).exists()
    assert image["not_kept"] is None
    assert metric("canvax_files_failed_total") == 0

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(writing, "save_numbered", full)
    ended(second := [engine.submit(JobRequest("a red apple", steps=1))])
    image = job_json(second[0])["images"][0]
    assert image["file"] is None
    assert "No space left on device" in image["not_kept"]
    assert "secret" not in image["not_kept"]
    assert metric("canvax_files_failed_total") == 1


@pytest.mark.parametrize("who", ["nobody", "waits", "polls", "watches"])
def test_previews_are_made_while_somebody_sees_them(
    engine: ImageEngine, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Else a call of the batch goes on past them, and nothing is decoded."""
    calls: list[str] = []
    decode, step = Group.decode, Group.step
    monkeypatch.setattr(Group, "decode", lambda *given: (calls.append("decode"), decode(*given))[1])
    monkeypatch.setattr(Group, "step", lambda group: (calls.append("step"), step(group))[1])
    monkeypatch.setattr("canvax.server.group.AT_ONCE", 1e9)
    monkeypatch.setattr("canvax.server.engine.CHEAP_PREVIEWS", 1e9)

    async def watched(job: Job) -> None:
        task = asyncio.ensure_future(anext(seen := aiter(job.watch(previews=who == "watches"))))
        await task
        held.release()
        async for _ in seen:
            pass

    held = engine._wake
    held.acquire()  # so that the engine begins when somebody looks
    job = engine.submit(JobRequest("a red apple", steps=12, previews=3))
    if who == "polls":
        job.look()
    if who in ("waits", "watches"):
        asyncio.run(watched(job))
    else:
        held.release()
    ended([job])
    looks = who in ("polls", "watches")
    assert calls.count("decode") == (4 if looks else 1)
    assert calls.count("step") == (4 if looks else 1)


def test_an_idle_server_keeps_few_bytes(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody asks for a job, which is what does not wait for a lock any more."""
    monkeypatch.setattr("canvax.server.job_store.KEPT_BYTES", 0)
    ended([engine.submit(JobRequest("a red apple", steps=1))])
    until(lambda: not engine._book._over)
