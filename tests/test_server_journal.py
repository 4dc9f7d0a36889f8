"""The journal: what is accepted outlives a kill, a full disk is told, and a file has one server."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.errors import CanvaxError, InputError
from canvax.server.job_store import KEPT_BYTES, JobStore
from canvax.server.jobs import Changed, Job, JobRequest, Picture, PromptImage, Rejected, Status
from canvax.server.journal import APPLICATION, VERSION, Journal
from canvax.server.metrics import Metrics
from tests.support.bundled import PACKAGED
from tests.support.serve_process import serving
from tests.support.server_stub import StubEngine, accept, drawn
from tests.support.serving import b64, counted, until


def image(mode: str) -> Image.Image:
    """Every pixel another one."""
    size = (40, 24)
    noise = [Image.effect_noise(size, 90.0) for _ in Image.new(mode, (1, 1)).getbands()]
    return Image.merge(mode, noise) if len(noise) > 1 else noise[0]


FULL = JobRequest(
    prompt="a red 🍎, \"quoted\"\nand\x00more", negative_prompt="", model="emoji", n=3, width=96, height=64, steps=7,
    guidance_scale=4.25, sampler="Euler a", seed=2**64 - 5, image=image("RGB"), mask=image("L"), strength=0.3,
    references=(image("RGBA"),), upscale=2.0, source_prompt="a fox",
    control=[image("RGB"), {"depth:0.5": image("RGB")}],
    image_prompt=[PromptImage(image("RGB"), {"down": 0.5}, image("L"), 1)],
    options={"variation_seed": 5, "variation_strength": 0.1, "prompt_syntax": "a1111"}, lenient=True, format="webp",
    quality=81, previews=4, metadata=False, client="team", once="again-1", seconds=12.5,
    vae="soft", controlnet=["edges", "depth"], awaited=True,
)  # fmt: skip
"""No field has its default."""


def job(ask: JobRequest | None = None, *, cancel: Any = lambda job: None) -> Job:
    ask = ask or JobRequest("a red apple", seed=1)
    seed = ask.seed or 0
    pictures = [Picture(i, seed + i, ask.width or 64, ask.height or 64, ask.steps or 4) for i in range(ask.n)]
    return Job(ask, ask.model or "emoji", pictures, cancel=cancel)


def done(one: Job, index: int) -> None:
    picture = one.pictures[index]
    picture.data, picture.metadata = b"file %d" % index * 200, {"seed": picture.seed, "prompt": one.request.prompt}
    picture.step, picture.status = picture.steps, Status.DONE


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    with closing(Journal(path)) as journal:
        yield journal


def recovered(path: Path) -> list[Job]:
    with opened(path) as journal:
        return list(journal.recover(lambda job: None))


@pytest.fixture
def path() -> Iterator[Path]:
    """In memory where that is a folder: a disk is slow to say that it has all."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder) / "jobs.db"


# What comes back.


def test_every_field_comes_back(path: Path) -> None:
    assert all(
        getattr(FULL, field.name) != field.default
        for field in fields(JobRequest)
        if field.default is not dataclasses.MISSING
    ), "FULL lacks a field of JobRequest"
    before = job(FULL)
    with opened(path) as journal:
        journal.accepted(before)
    (after,) = recovered(path)
    assert not after.request.awaited
    for field in filter(lambda field: field.compare, fields(JobRequest)):
        was, now = getattr(before.request, field.name), getattr(after.request, field.name)
        if isinstance(was, Image.Image):
            assert (now.size, now.mode, now.tobytes()) == (was.size, was.mode, was.tobytes()), field.name
        else:
            assert (now, type(now)) == (was, type(was)), field.name
    assert (after.id, after.created, after.model, after.status) == (before.id, before.created, "emoji", Status.QUEUED)
    assert after.pictures == before.pictures
    assert [picture.seed for picture in after.pictures] == [2**64 - 5 + i for i in range(3)]


def test_a_job_half_done_goes_on_where_it_was(path: Path) -> None:
    before = job(FULL)
    with opened(path) as journal:
        journal.accepted(before)
        done(before, 1)
        journal.finished(before, 1)
    (after,) = recovered(path)
    assert after.status is Status.QUEUED
    assert [picture.status for picture in after.pictures] == [Status.QUEUED, Status.DONE, Status.QUEUED]
    assert after.pictures[1] == before.pictures[1]
    assert (after.pictures[0].data, after.pictures[0].step) == (None, 0)


def test_a_job_killed_between_its_last_image_and_its_end_is_done(path: Path) -> None:
    before = job(JobRequest(""))
    with opened(path) as journal:
        journal.accepted(before)
        done(before, 0)
        journal.finished(before, 0)
    (after,) = recovered(path)
    assert (after.status, after.request) == (Status.DONE, JobRequest(""))


@pytest.mark.parametrize("end", [Status.DONE, Status.FAILED, Status.CANCELLED])
def test_how_a_job_ended_comes_back(path: Path, end: Status) -> None:
    before = job(JobRequest("a", n=2))
    with opened(path) as journal:
        journal.accepted(before)
        done(before, 0)
        journal.finished(before, 0)
        before.error = ("timeout", "too late: ü") if end is Status.FAILED else None
        before.tell(Changed(end))
        journal.over(before)
    (after,) = recovered(path)
    assert (after.status, after.error) == (end, before.error)
    assert [picture.status for picture in after.pictures] == [Status.DONE, end]
    assert after.pictures[0].data == before.pictures[0].data


def test_a_job_that_the_book_ended_does_not_go_on(path: Path) -> None:
    with closing(JobStore(Metrics(), Journal(path), 600.0, lambda job: None)) as book:
        accept(book, before := job())
        book.end(before, Status.CANCELLED)
    (after,) = recovered(path)
    assert after.status is Status.CANCELLED


def test_jobs_come_back_in_the_order_in_which_they_came(path: Path) -> None:
    jobs = [job(JobRequest("a", seed=i)) for i in range(20)]
    for one in jobs:
        one.created = 1.0  # a clock that stands still, or goes back
    with opened(path) as journal:
        for one in jobs:
            journal.accepted(one)
    assert [one.id for one in recovered(path)] == [one.id for one in jobs]


def test_a_recovered_job_can_be_cancelled(path: Path) -> None:
    before, cancelled = job(), []
    with opened(path) as journal:
        journal.accepted(before)
        (after,) = list(journal.recover(cancelled.append))
    after.cancel()
    assert cancelled == [after]


def test_what_is_forgotten_is_gone_with_its_space(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvax.server.journal.TIDY", 8)
    jobs = [job(JobRequest("a", seed=i)) for i in range(16)]
    with opened(path) as journal:
        for one in jobs:
            journal.accepted(one)
            one.pictures[0].data = os.urandom(100_000)
            journal.finished(one, 0)
    full = path.stat().st_size
    with opened(path) as journal:
        for one in jobs[:-1]:
            journal.forget(one)
        assert journal.broken is None
    assert path.stat().st_size < 0.6 * full
    with opened(path) as journal:
        assert [one.id for one in journal.recover(lambda job: None)] == [jobs[-1].id]
        journal.forget(jobs[-1])
    with closing(sqlite3.connect(path)) as base:
        assert base.execute("SELECT count(*) FROM images").fetchone() == (0,)


def test_a_job_that_fails_at_the_start_is_counted(path: Path) -> None:
    """The alert for failures looks at the count itself then: there was no scrape before."""
    with opened(path) as journal:
        journal.accepted(deadly := job())
        journal.begun(deadly)
        journal.begun(deadly)
    with opened(path) as journal, closing(JobStore(metrics := Metrics(), journal, 600.0, lambda job: None)) as book:
        metrics.expect([deadly.model])
        assert not list(book.recover(lambda job: None))
        assert counted(metrics, "canvax_jobs_total")[deadly.model, "failed"] == 1


def test_an_idempotency_key_outlives_its_server(path: Path) -> None:
    def book(journal: Journal) -> JobStore:
        return JobStore(Metrics(), journal, 600.0, lambda job: None)

    with opened(path) as journal:
        accept(book(journal), first := job(FULL))
    with opened(path) as journal:
        again = book(journal)
        list(again.recover(lambda job: None))
        found = again.earlier(dataclasses.replace(FULL))
        assert found is not None
        assert found.id == first.id
        with pytest.raises(Rejected, match="another request"):
            again.earlier(dataclasses.replace(FULL, prompt="another"))


# Whose file it is.


def test_nobody_else_may_read_the_file(path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(path) as journal:
            journal.accepted(job())
            found = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert set(found.values()) == {0o600}, found


def test_a_second_server_is_refused(path: Path) -> None:
    with opened(path) as journal:
        with pytest.raises(InputError, match="another server has it"):
            Journal(path)
        journal.accepted(job())
    assert len(recovered(path)) == 1


def foreign(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as base:
        for statement in statements:
            base.execute(statement)
        base.commit()


def test_a_journal_of_nothing_goes_if_it_was_made_here(path: Path) -> None:
    Journal(path).close()
    assert not path.exists()
    path.touch()
    Journal(path).close()
    assert path.exists()


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no folder" / "jobs.db"):
        with pytest.raises(InputError, match=r"--journal .*; name another file"):
            Journal(place)


@pytest.mark.parametrize("damage", ["ask = x'7b'", "ask = '{\"n\": 1}'", "image = x'89504e47'", "status = 'odd'"])
def test_a_damaged_journal_is_told(path: Path, damage: str) -> None:
    with opened(path) as journal:
        journal.accepted(job())
    foreign(path, f"UPDATE jobs SET {damage}")
    with opened(path) as journal, pytest.raises(InputError, match=r"is damaged .*; move it away"):
        list(journal.recover(lambda job: None))


@pytest.mark.parametrize(
    "ask",
    [
        "json_set(ask, '$.odd', 1)",
        "json_set(ask, '$.image_prompt[0].odd', 1)",
        """replace(ask, '"prompt"', '"text"')""",
        """replace(ask, '"scale"', '"weight"')""",
        """replace(ask, '[{"image":', '[{"picture":')""",
    ],
)
def test_a_job_of_another_version_fails_alone(path: Path, ask: str) -> None:
    """Its fields are not all known here. The others go on, and a client that sends it again gets a new job."""
    with opened(path) as journal:
        for one in (first := job(FULL), second := job()):
            journal.accepted(one)
    foreign(path, f"UPDATE jobs SET ask = CAST({ask} AS BLOB) WHERE id = '{first.id}'")
    for _ in range(2):
        with closing(JobStore(Metrics(), Journal(path), 600.0, lambda job: None)) as book:
            assert [one.id for one in book.recover(lambda job: None)] == [second.id]
            failed = book.get(first.id, "team")
            assert failed is not None
            assert (failed.status, failed.error and failed.error[0]) == (Status.FAILED, "server_error")
            assert book.earlier(FULL) is None


def test_a_journal_that_is_closed_meanwhile_is_not_damaged(path: Path) -> None:
    journal = Journal(path)
    for _ in range(2):
        journal.accepted(job())
    jobs = journal.recover(lambda job: None)
    next(jobs)
    journal.close()
    assert not list(jobs)
    assert not list(journal.recover(lambda job: None))


def test_attempts_are_counted_until_an_image_is_done(path: Path) -> None:
    first, second = job(JobRequest("a", n=2)), job()
    with opened(path) as journal:
        journal.begun(first)  # which is not there: nothing to count
        assert journal.broken is None
        for one in (first, second):
            journal.accepted(one)
    foreign(path, "DROP TABLE attempts")  # as an earlier version leaves it
    for count in (1, 2, 3):
        with opened(path) as journal:
            journal.begun(first)
        assert [one.attempts for one in recovered(path)] == [count, 0]
    with opened(path) as journal:
        done(first, 0)
        journal.finished(first, 0)
    assert [one.attempts for one in recovered(path)] == [1, 0]
    with opened(path) as journal:
        journal.stopped(first)
    assert [one.attempts for one in recovered(path)] == [0, 0]


def test_an_image_begins_when_its_attempt_is_on_the_disk(path: Path) -> None:
    """Though it does not wait for ever."""
    with closing(JobStore(Metrics(), journal := Journal(path), 600.0, lambda job: None)) as book:
        accept(book, one := job())
        book.begins(one)
        book.counted()
        assert [again.attempts for again in journal.recover(lambda job: None)] == [1]


# A disk that is full.


def accepting(journal: Journal) -> Iterator[Job]:
    """More and more jobs; each is given once it is written."""
    for i in range(1000):
        journal.accepted(one := job(JobRequest("long " * 200, seed=i)))
        yield one


def test_a_full_disk_refuses_new_jobs_and_disturbs_nobody_else(path: Path) -> None:
    jobs = []
    with opened(path) as journal:
        journal._base.execute("PRAGMA max_page_count = 40")
        with pytest.raises(CanvaxError, match=r"jobs\.db: cannot be written \(database or disk is full\)"):
            jobs.extend(accepting(journal))
        assert "disk is full" in str(journal.broken)
        done(jobs[0], 0)
        jobs[0].pictures[0].data = bytes(100_000)
        journal.finished(jobs[0], 0)
        assert "disk is full" in str(journal.broken)
        assert [one.id for one in journal.recover(lambda job: None)] == [one.id for one in jobs]
        for one in jobs[1:]:
            journal.forget(one)
        journal.accepted(another := job())  # there is room again
    assert [one.id for one in recovered(path)] == [jobs[0].id, another.id]


def test_an_image_of_no_recorded_job_does_not_clear_a_full_disk(path: Path) -> None:
    """A request that waits for its image is not recorded, so its end shows nothing about the disk."""
    journal = Journal(path)
    engine = StubEngine(journal=journal)
    journal._base.execute("PRAGMA max_page_count = 1")
    with pytest.raises(Rejected) as refused:
        engine.submit(JobRequest("y" * 15_000))
    assert refused.value.code == "not_recorded"
    waited = engine.submit(JobRequest("x", awaited=True))
    until(lambda: waited.status is Status.DONE)
    journal.stopped(waited)  # more statements without a row
    journal.over(waited)
    assert journal.broken
    assert not engine.book.records()
    journal.close()


def test_a_new_job_waits_for_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a power cut does not undo it, which a test cannot make: SQLite waits where ``synchronous`` is FULL."""
    statements: list[str] = []
    connect = sqlite3.connect

    def watched(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
        base = connect(*arguments, **keywords)
        base.set_trace_callback(statements.append)
        return base

    monkeypatch.setattr(sqlite3, "connect", watched)
    with opened(path) as journal:
        journal.accepted(job())
    inserted = next(i for i, text in enumerate(statements) if text.startswith("INSERT INTO jobs"))
    settings = [text for text in statements[:inserted] if text.startswith("PRAGMA synchronous")]
    assert settings[-1].split()[-1] in ("FULL", "EXTRA")


def test_finished_files_beyond_a_limit_are_forgotten() -> None:
    """The oldest first, though their time is not up."""
    ledger = JobStore(Metrics(), None, 600.0, lambda job: None)
    jobs = [job() for _ in range(4)]
    for one in jobs:
        accept(ledger, one)
        done(one, 0)
        one.pictures[0].data = bytes(KEPT_BYTES * 2 // 5)
        ledger.finished(one, 0)
    ledger.forget()
    assert [ledger.get(one.id, "") for one in jobs] == [None, None, *jobs[2:]]


def test_a_job_with_an_image_is_no_suspect() -> None:
    """Once it has made one it shares batches again: the process was not killed for it."""
    book, one = JobStore(Metrics(), None, 600.0, lambda job: None), job(JobRequest("a", n=2))
    accept(book, one)
    one.attempts = 1
    done(one, 0)
    book.finished(one, 0)
    assert (one.attempts, one.status.over) == (0, False)


def test_a_full_disk_is_logged_once_then_each_minute(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr("canvax.server.journal.time.monotonic", lambda: clock[0])
    with opened(path) as journal:
        for lines in (1, 2, 3):
            journal._base.execute("PRAGMA max_page_count = 40")
            with pytest.raises(CanvaxError):
                journal.accepted(job(JobRequest("long " * 10**5 * lines)))
            for _ in range(3):
                journal.check()
                clock[0] += 1
            assert len(caplog.records) == lines
            clock[0] += 60
            if lines == 2:  # there is room, and then none again
                journal._base.execute("PRAGMA max_page_count = 4000")
                journal.check()
                assert journal.broken is None
                clock[0] -= 60


def test_after_the_end_nothing_is_written_and_nothing_raised(path: Path) -> None:
    journal = Journal(path)
    journal.accepted(one := job())
    journal.close()
    journal.close()
    done(one, 0)
    journal.finished(one, 0)
    journal.over(one)
    assert journal.broken
    with pytest.raises(CanvaxError):
        journal.accepted(job())


# Many.


def test_many_jobs_from_many_threads(path: Path) -> None:
    lists = [[job(JobRequest("a", seed=i)) for i in range(12)] for _ in range(8)]

    def run(journal: Journal, jobs: Sequence[Job]) -> None:
        for one in jobs:
            journal.accepted(one)
            done(one, 0)
            journal.finished(one, 0)
            one.tell(Changed(Status.DONE))
            journal.over(one)

    with opened(path) as journal:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda jobs: run(journal, jobs), lists))
        assert journal.broken is None
    after = recovered(path)
    assert {one.id for one in after} == {one.id for jobs in lists for one in jobs}
    assert {one.status for one in after} == {Status.DONE}


# Files that are something else.


def empty(path: Path) -> None:
    """A journal without jobs, in a file that was there before: one that the journal made would go with it."""
    path.touch()
    Journal(path).close()


def changed(statement: str) -> Callable[[Path], None]:
    return lambda path: (empty(path), foreign(path, statement))[1]


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a text": (lambda path: path.write_text("not a database\n" * 100), "is not a journal"),
    "an image": (lambda path: path.write_bytes(drawn(1, (64, 64), "png")), "is not a journal"),
    "half a journal": (lambda path: (empty(path), os.truncate(path, 5000)), "is not a journal"),
    "another program's": (lambda path: foreign(path, "CREATE TABLE jobs (id TEXT)"), "database of another program"),
    "a newer one": (changed(f"PRAGMA user_version = {VERSION + 1}"), "of another version"),
    "an older one": (changed("PRAGMA user_version = 0"), "of another version"),
    "a stranger's": (changed(f"PRAGMA application_id = {APPLICATION + 1}"), "of another program"),
    "a folder": (lambda path: path.mkdir(), "cannot be"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_left_alone(path: Path, kind: str) -> None:
    make, words = OTHERS[kind]
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    for _ in range(2):  # nothing is held after the first time
        with pytest.raises(InputError, match=words):
            Journal(path)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_an_engine_with_a_full_disk_refuses_and_goes_on(path: Path) -> None:
    journal = Journal(path)
    engine = StubEngine(journal=journal)
    engine._go_on.clear()
    running = engine.submit(JobRequest("x" * 3000, seed=1))
    pages = journal._base.execute("PRAGMA page_count").fetchone()[0]
    journal._base.execute(f"PRAGMA max_page_count = {pages}")
    large = JobRequest("y" * 15_000, image=Image.effect_noise((300, 300), 90).convert("RGB"), once="k", client="a")
    with pytest.raises(Rejected) as refused:
        engine.submit(large)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "not_recorded", 30)
    assert str(path.parent) not in refused.value.message
    assert engine.jobs() == [running]
    assert journal._base.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
    engine._go_on.set()
    until(lambda: running.status is Status.DONE)
    journal._base.execute("PRAGMA max_page_count = 100000")
    assert engine.submit(large).request.once == "k"  # it was not taken for the one that was refused
    until(lambda: not engine.jobs())
    journal.close()


def test_values_that_cannot_be_written_are_refused_not_raised(path: Path) -> None:
    journal = Journal(path)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for ask in (JobRequest("\ud800"), JobRequest("x", options={"a": deep}), JobRequest("x", once="\udfff")):
        with pytest.raises(CanvaxError, match="cannot be written"):
            journal.accepted(job(ask))
    journal.accepted(one := job())
    one.pictures[0].data, one.pictures[0].metadata = b"x", {"prompt": "\ud800", "deep": deep}
    journal.finished(one, 0)
    assert journal.broken is None  # the disk is as it was
    journal.close()
    assert [picture.status for picture in recovered(path)[0].pictures] == [Status.QUEUED]


# Kills.

CHILD = """
    import sys, threading
    from pathlib import Path
    from canvax.server.jobs import JobRequest
    from canvax.server.journal import Journal
    from tests.support.server_stub import StubEngine
    engine = StubEngine(journal=Journal(Path(sys.argv[1])), pace=0.001)
    def submit(first):
        for seed in range(first, first + 100_000):
            job = engine.submit(JobRequest("x", seed=seed, n=2, client="alice", once=str(seed)))
            sys.stdout.write(f"{job.id} {seed}\\n")
            sys.stdout.flush()
    for worker in range(3):
        threading.Thread(target=submit, args=(worker * 1_000_000,)).start()
"""


def killed_child(path: Path, seconds: float) -> dict[str, int]:
    """The jobs that a server said it accepted before it was killed, with their seeds."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        with pytest.raises(InputError):  # another server has it
            Journal(path)
        time.sleep(seconds)
        child.kill()
        said = first + child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    lines = said.split("\n")[:-1]  # the last one may be half a line
    return {name: int(seed) for name, seed in (line.split() for line in lines)}


def test_a_kill_loses_nothing_that_was_accepted(path: Path) -> None:
    rng, told = random.Random(1), dict[str, int]()
    for _ in range(2):
        told |= killed_child(path, rng.uniform(0.05, 0.2))
    journal = Journal(path)
    book = JobStore(Metrics(), journal, 600, lambda job: None)
    left = list(book.recover(lambda job: None))
    for name, seed in told.items():
        found = book.get(name, "alice")
        assert found is not None
        assert [one.seed for one in found.pictures] == [seed, seed + 1]
        assert book.get(name, "bob") is None
        assert (found in left) == (not found.status.over)
        for one in found.pictures:
            assert (one.data is not None) == (one.status is Status.DONE)
            if one.data is not None:
                assert one.data == drawn(one.seed, (64, 64), "png")
            assert one.status is Status.DONE or found.status is not Status.DONE
        again = dataclasses.replace(found.request, prompt="x")
        assert book.earlier(again) is not None  # its Idempotency-Key still holds
    assert len(told) > 20
    journal.close()


KILLS = int(os.environ.get("CANVAX_KILLS", "1"))
PROMPTS = ("a red apple", "a dog face", "a lemon", "a house")


def submitted(http: httpx.Client, rng: random.Random, asked: dict[str, dict[str, Any]]) -> None:
    for _ in range(rng.randrange(2, 6)):
        body = {"prompt": rng.choice(PROMPTS), "n": rng.randrange(1, 4), "seed": rng.randrange(2**32),
                "steps": rng.choice((8, 20)), "guidance_scale": 4.0}  # fmt: skip
        if rng.random() < 0.3:
            body |= {"n": 1, "image": b64(drawn(body["seed"], (48, 64), "png")), "upscale": 2.0}
        answer = http.post("/api/jobs", json=body)
        assert answer.status_code == 202, answer.text
        asked[answer.json()["id"]] = body


@pytest.mark.weekly
def test_kills_of_a_server_in_the_middle(tmp_path: Path) -> None:
    """Every accepted job ends, with the pixels that its seeds give; CANVAX_KILLS says how often it is killed."""
    rng, asked = random.Random(2), dict[str, dict[str, Any]]()
    for _ in range(KILLS):
        with serving("--journal", "jobs.db", "--keep-seconds", "86400", cwd=tmp_path) as served, served.ready() as http:
            submitted(http, rng, asked)
            time.sleep(rng.uniform(0, 1.5))
            served.send(signal.SIGKILL)
            assert served.ended() == -signal.SIGKILL
    pipe = canvax.load(PACKAGED, progress=False, mesh=canvax.make_mesh(jax.devices()[:1]))
    with serving("--journal", "jobs.db", "--keep-seconds", "86400", cwd=tmp_path) as served, served.ready() as http:
        for name, body in asked.items():
            until(lambda name=name: http.get(f"/api/jobs/{name}").json()["status"] in ("done", "failed"), 120)
            told = http.get(f"/api/jobs/{name}").json()
            assert (told["status"], told["error"]) == ("done", None)
            options = canvax.Options(progress=False)
            settings = {"num_inference_steps": body["steps"], "guidance_scale": 4.0, "options": options}
            for one in told["images"]:
                assert one["seed"] == body["seed"] + one["index"]
                image = Image.open(io.BytesIO(http.get(one["url"]).content))
                if "upscale" in body:
                    given = Image.open(io.BytesIO(drawn(body["seed"], (48, 64), "png")))
                    alone = pipe.upscale(given, body["prompt"], scale=2.0, seed=one["seed"], **settings).images[0]
                else:
                    alone = pipe(body["prompt"], seed=one["seed"], **settings).images[0]
                assert differs(image, alone) <= 1, (name, one)
                written = json.loads(image.text["canvax"])
                assert (written["seed"], written["prompt"]) == (one["seed"], body["prompt"])
        served.send(signal.SIGTERM)
        assert served.ended() == 0
    assert len(asked) >= 2 * KILLS


def differs(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of two images, of 255: a batch of another size rounds differently."""
    return int(np.abs(np.asarray(one.convert("RGB"), int) - np.asarray(other.convert("RGB"), int)).max())
