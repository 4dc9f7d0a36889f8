"""Whether a job is accepted: decided once, with room that nobody else can take before the job is in the queue."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import Job, JobRequest, Rejected, State
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.models import Warm
from canvax.server.work import check
from tests.support.drawing import small_emoji
from tests.support.serving import until

PIPE = small_emoji()
APPLE = Image.new("RGB", (64, 64), "red")


@contextmanager
def started(journal: Journal | None = None, **settings: Any) -> Iterator[ImageEngine]:
    """An engine that accepts jobs and begins none."""
    own = EngineSettings(warm=(Warm(None, (1,)),), **settings)
    engine = ImageEngine(["emoji"], own, Metrics(), lambda name: PIPE, journal=journal)
    engine._leader = lambda: None
    engine.start()
    until(lambda: engine.state is State.READY, 300)
    yield engine
    engine.close()


@contextmanager
def recording(engine: ImageEngine, fails: bool = False) -> Iterator[list[Job]]:
    """Recording the first job takes until this is left; the jobs that are recorded."""
    seen, go_on, record = list[Job](), threading.Event(), engine._book.record

    def slowly(job: Job) -> None:
        seen.append(job)
        if len(seen) == 1:
            go_on.wait(60)
        if fails:
            raise Rejected(503, "not_recorded", "no")
        record(job)

    engine._book.record = slowly
    try:
        yield seen
    finally:
        engine._book.record = record
        go_on.set()


def test_images_keep_their_proportions() -> None:
    image, mask = Image.new("RGB", (300, 200), "blue"), Image.new("L", (300, 200), 0)
    for picture, white in ((image, "red"), (mask, 255)):
        picture.paste(white, (50, 0, 250, 200))  # the middle square
    request = JobRequest("a red apple", image=image, mask=mask, width=64, height=64)
    whole = dataclasses.replace(request, options={"padding_mask_crop": 8})
    checked, stretched, outside = (
        check(each, "emoji", PIPE.model) for each in (request, dataclasses.replace(request, lenient=True), whole)
    )
    (cut,), (cut_mask,) = (getattr(checked.request.init_images, name) for name in ("images", "masks"))
    assert (cut.getcolors(), cut_mask.getextrema()) == ([(64 * 64, (255, 0, 0))], (255, 255))
    assert [hint.argument for hint in checked.hints] == ["image"]
    for other in (stretched, outside):  # as A1111 does; only the part under the mask is resized
        assert len(other.request.init_images.images[0].getcolors(1 << 16)) > 1
        assert not other.hints
    nearly = check(dataclasses.replace(request, image=image.resize((65, 64)), mask=None), "emoji", PIPE.model)
    assert not nearly.hints


def outcomes(calls: Sequence[Future[Job]]) -> list[str]:
    """Ids of jobs that were accepted, and codes of refusals."""
    faults = {call: call.exception(60) for call in calls}
    return [fault.code if isinstance(fault, Rejected) else call.result().id for call, fault in faults.items()]


def code_of(engine: ImageEngine, request: JobRequest) -> str:
    with pytest.raises(Rejected) as refused:
        engine.submit(request)
    assert refused.value.retry_after or refused.value.status < 429
    return refused.value.code


@pytest.mark.parametrize(
    ("settings", "request_"), [({"queue_images": 3}, JobRequest("a dog face", n=2)),
                               ({"queue_seconds": 1e-9}, JobRequest("a dog face"))],
)  # fmt: skip
def test_a_job_that_is_recorded_has_its_room(settings: dict[str, Any], request_: JobRequest) -> None:
    with started(**settings) as engine, ThreadPoolExecutor() as threads:
        with recording(engine) as seen:
            first = threads.submit(engine.submit, request_)
            until(lambda: seen)
            assert not engine.jobs()
            assert code_of(engine, request_) == "queue_full"
        assert outcomes([first]) == [engine.jobs()[0].id]
        assert engine._images() == request_.n
        assert code_of(engine, request_) == "queue_full"


def test_a_client_without_jobs_is_not_shut_out() -> None:
    """By another with many: twice the room is for it. Clients without keys are one client."""
    with started(queue_images=2) as engine:
        for _ in range(2):
            engine.submit(JobRequest("a lemon", client="alice"))
        for client in ("alice", ""):
            assert code_of(engine, JobRequest("a lemon", client=client)) == "queue_full"
        engine.submit(JobRequest("a lemon", client="bob"))
        assert code_of(engine, JobRequest("a lemon", client="bob")) == "queue_full"
        assert code_of(engine, JobRequest("a lemon", client="carol", n=2)) == "queue_full"
        engine._settings = replace(engine._settings, queue_images=99, queue_seconds=engine._seconds())
        assert code_of(engine, JobRequest("a lemon", client="alice")) == "queue_full"
        engine.submit(JobRequest("a lemon", client="carol"))


def test_a_deadline_is_for_all_images_of_a_job() -> None:
    with started() as engine:
        engine.submit(JobRequest("a lemon", seed=1))
        seconds = 4 * engine._seconds()  # of one image
        assert code_of(engine, JobRequest("a lemon", n=8, seconds=seconds)) == "too_late"
        assert code_of(engine, JobRequest("", image=APPLE.copy(), upscale=4.0, seconds=seconds)) == "too_late"
        engine.submit(JobRequest("a lemon", n=2, seconds=seconds))


def test_images_of_a_job_that_is_recorded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvax.server.engine.INPUT_BYTES", 64 * 64 * 3)
    with started() as engine, ThreadPoolExecutor() as threads, recording(engine) as seen:
        first = threads.submit(engine.submit, JobRequest("a lemon", image=APPLE.copy()))
        until(lambda: seen)
        assert code_of(engine, JobRequest("a lemon", image=APPLE.copy())) == "queue_full"
        assert not first.done()


def test_a_full_server_refuses_before_it_encodes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(Journal(tmp_path / "jobs.db"), queue_images=1) as engine:
        engine.submit(JobRequest("a lemon"))
        monkeypatch.setattr("canvax.server.journal._packed", lambda image: pytest.fail("encoded"))
        assert code_of(engine, JobRequest("a lemon", image=APPLE.copy())) == "queue_full"


def test_room_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, reserved = [], ImageEngine._reserved
    monkeypatch.setattr(ImageEngine, "_reserved", lambda *args: (calls.append(args), reserved(*args))[1])
    with started() as engine:
        engine.submit(JobRequest("a lemon", once="k"))
        engine.submit(JobRequest("a lemon", once="k"))
    assert len(calls) == 1


def test_equal_keys_at_once_are_one_job() -> None:
    with started() as engine, ThreadPoolExecutor() as threads:
        with recording(engine) as seen:
            request = JobRequest("a lemon", once="k")
            calls = [threads.submit(engine.submit, request) for _ in range(2)]
            until(lambda: seen)
            other = threads.submit(engine.submit, JobRequest("a lemon", once="k", client="other"))
            until(lambda: len(seen) == 2)
            assert not any(call.done() for call in calls)  # before the job is recorded no client hears of it
        first, again, apart = outcomes([*calls, other])
        assert first == again != apart
        assert len(seen) == len(engine.jobs()) == 2


def test_a_job_that_cannot_be_recorded_takes_nothing() -> None:
    """No room, no key, and nothing of its client's rate."""
    with started(queue_images=2, rate=2) as engine, ThreadPoolExecutor() as threads:
        with recording(engine, fails=True) as seen:
            request = JobRequest("a lemon", n=2, once="k")
            call = threads.submit(engine.submit, request)
            until(lambda: seen)
        assert outcomes([call]) == ["not_recorded"]
        assert (engine._images(), engine.jobs()) == (0, [])
        assert engine.submit(request).id == engine.jobs()[0].id


def test_a_job_of_a_draining_server_is_over() -> None:
    with started() as engine, ThreadPoolExecutor() as threads:
        with recording(engine) as seen:
            call = threads.submit(engine.submit, JobRequest("a lemon"))
            until(lambda: seen)
            engine.drain(0)
        assert call.result(60).error == ("draining", "the server stopped before the images were done; ask again")


def test_a_rate_counts_images_that_are_accepted() -> None:
    """Tiles too; neither refused requests nor the same job again."""
    with started(rate=4, queue_images=12) as engine:
        for _ in range(3):
            assert code_of(engine, JobRequest("a lemon", sampler="none")) == "invalid_value"
            assert code_of(engine, JobRequest("a lemon", n=13)) == "invalid_value"
        assert len({engine.submit(JobRequest("a lemon", n=3, once="k")).id for _ in range(2)}) == 1
        with pytest.raises(Rejected) as refused:
            engine.submit(JobRequest("a lemon", n=2))
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert "4 images" in refused.value.message
        assert refused.value.retry_after == pytest.approx(15, abs=1)
        engine.submit(JobRequest("a lemon"))
        engine.submit(JobRequest("a lemon", image=APPLE.copy(), upscale=1.5, steps=2, client="other"))
        assert code_of(engine, JobRequest("a lemon", client="other")) == "rate_limit_exceeded"
