"""The journal in trouble: files of others, a full disk, a server that is killed in the middle of its work."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from PIL import Image

import canvax
from canvax.errors import CanvaxError, InputError
from canvax.server.job_store import JobStore
from canvax.server.jobs import Job, JobRequest, Picture, Rejected, Status
from canvax.server.journal import APPLICATION, VERSION, Journal
from canvax.server.metrics import Metrics
from tests.support.serve_process import serving
from tests.support.server_stub import StubEngine, drawn
from tests.support.serving import until


def no_cancel(job: Job) -> None:
    raise AssertionError


def job_of(ask: JobRequest, **more: Any) -> Job:
    pictures = [Picture(i, ((ask.seed or 0) + i) % 2**64, 64, 64, 4) for i in range(ask.n)]
    return Job(ask, "stub", pictures, cancel=no_cancel, **more)


def reopened(path: Path) -> list[Job]:
    journal = Journal(path)
    try:
        return list(journal.recover(no_cancel))
    finally:
        journal.close()


# Files that are something else.


def empty(path: Path) -> None:
    """A journal without jobs, in a file that was there before: one that the journal made would go with it."""
    path.touch()
    Journal(path).close()


def changed(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        empty(path)
        with sqlite3.connect(path) as base:
            base.execute(statement)
        base.close()

    return change


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE jobs (id TEXT)")
    base.close()


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a text": (lambda path: path.write_text("not a database\n" * 100), "is not a journal"),
    "an image": (lambda path: path.write_bytes(drawn(1, (64, 64), "png")), "is not a journal"),
    "half a journal": (lambda path: (empty(path), os.truncate(path, 5000)), "is not a journal"),
    "another program's": (foreign, "database of another program"),
    "a newer one": (changed(f"PRAGMA user_version = {VERSION + 1}"), "of another version"),
    "an older one": (changed("PRAGMA user_version = 0"), "of another version"),
    "a stranger's": (changed(f"PRAGMA application_id = {APPLICATION + 1}"), "of another program"),
    "a folder": (lambda path: path.mkdir(), "cannot be"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "jobs.db"
    make, words = OTHERS[kind]
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    for _ in range(2):  # nothing is held after the first time
        with pytest.raises(InputError, match=words):
            Journal(path)
    assert (path.read_bytes() if path.is_file() else b"") == before


# A disk that is full.


def fill(journal: Journal, pages: int = 0) -> None:
    """No page more than there are now."""
    now = journal._base.execute("PRAGMA page_count").fetchone()[0]
    journal._base.execute(f"PRAGMA max_page_count = {now + pages}")


def test_an_engine_with_a_full_disk_refuses_and_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "jobs.db")
    engine = StubEngine(journal=journal, pace=0.05)
    running = engine.submit(JobRequest("x" * 3000, seed=1))
    fill(journal)
    large = JobRequest("y" * 15_000, image=Image.effect_noise((300, 300), 90).convert("RGB"), once="k", client="a")
    with pytest.raises(Rejected) as refused:
        engine.submit(large)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "not_recorded", 30)
    assert str(tmp_path) not in refused.value.message
    assert engine.jobs() == [running]
    until(lambda: running.status is Status.DONE)
    journal._base.execute("PRAGMA max_page_count = 100000")
    assert engine.submit(large).request.once == "k"  # it was not taken for the one that was refused
    until(lambda: not engine.jobs())
    journal.close()


def test_values_that_cannot_be_written_are_refused_not_raised(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "jobs.db")
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for ask in (JobRequest("\ud800"), JobRequest("x", options={"a": deep}), JobRequest("x", once="\udfff")):
        with pytest.raises(CanvaxError, match="cannot be written"):
            journal.accepted(job_of(ask))
    job = job_of(JobRequest("x"))
    journal.accepted(job)
    job.pictures[0].data, job.pictures[0].metadata = b"x", {"prompt": "\ud800", "deep": deep}
    journal.finished(job, 0)
    assert journal.broken is None  # the disk is as it was
    journal.close()
    assert [one.status for one in reopened(tmp_path / "jobs.db")[0].pictures] == [Status.QUEUED]


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
        time.sleep(seconds)
        child.kill()
        said = first + child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    lines = said.split("\n")[:-1]  # the last one may be half a line
    return {name: int(seed) for name, seed in (line.split() for line in lines)}


def test_a_kill_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    rng, told = random.Random(1), dict[str, int]()
    for _ in range(3):
        told |= killed_child(tmp_path / "jobs.db", rng.uniform(0.05, 0.3))
    journal = Journal(tmp_path / "jobs.db")
    book = JobStore(Metrics(), journal, 600, lambda job: None)
    left = list(book.recover(no_cancel))
    for name, seed in told.items():
        job = book.get(name, "alice")
        assert job is not None
        assert [one.seed for one in job.pictures] == [seed, seed + 1]
        assert book.get(name, "bob") is None
        assert (job in left) == (not job.status.over)
        for one in job.pictures:
            assert (one.data is not None) == (one.status is Status.DONE)
            if one.data is not None:
                assert one.data == drawn(one.seed, (64, 64), "png")
            assert one.status is Status.DONE or job.status is not Status.DONE
        again = replace(job.request, prompt="x")
        assert book.earlier(again) is not None  # its Idempotency-Key still holds
    assert len(told) > 20
    journal.close()


KILLS = int(os.environ.get("CANVAX_KILLS", "1"))
PROMPTS = ("a red apple", "a dog face", "a lemon", "a house")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


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
    pipe = canvax.load("emoji", progress=False, mesh=canvax.make_mesh(__import__("jax").devices()[:1]))
    with serving("--journal", "jobs.db", "--keep-seconds", "86400", cwd=tmp_path) as served, served.ready() as http:
        for name, body in asked.items():
            until(lambda name=name: http.get(f"/api/jobs/{name}").json()["status"] in ("done", "failed"), 120)
            job = http.get(f"/api/jobs/{name}").json()
            assert (job["status"], job["error"]) == ("done", None)
            options = canvax.Options(progress=False)
            settings = {"num_inference_steps": body["steps"], "guidance_scale": 4.0, "options": options}
            for one in job["images"]:
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
    import numpy as np

    return int(np.abs(np.asarray(one.convert("RGB"), int) - np.asarray(other.convert("RGB"), int)).max())
