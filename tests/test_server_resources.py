"""What a server holds and for how long, and names and paths that leave it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.testclient import TestClient

from canvax.errors import CanvaxError, InputError
from canvax.server.app import Settings, create_app
from canvax.server.control import publicly
from canvax.server.job_store import PASSING, JobStore
from canvax.server.jobs import Job, JobRequest, Picture, Rejected, State, Status
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.models import ServedModel, Warm, model_names
from canvax.server.work import check
from tests.support.drawing import small_emoji
from tests.support.server_stub import CARD, StubEngine, accept
from tests.support.serving import counted, events, request, until, web

PIPE = small_emoji()
MODEL = PIPE.model

# Names.


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("модель", "%D0%BC%D0%BE%D0%B4%D0%B5%D0%BB%D1%8C"),
        ("a\nb", "a%0Ab"),
        ("100%", "100%25"),
        ("owner/my model", "owner/my model"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/images/generations", {"prompt": "x"}), ("/v1/images/generations", {"prompt": "x", "stream": True}),
     ("/sdapi/v1/txt2img", {"prompt": "x"}), ("/hf", {"inputs": "x"})],
)  # fmt: skip
def test_any_model_name_fits_into_a_header(path: str, body: dict[str, Any], name: str, header: str) -> None:
    engine = StubEngine()
    engine.cards = (replace(CARD, id=name),)
    app = create_app(engine, Settings(), state=lambda: State.READY, metrics=Metrics())
    answer = TestClient(app, base_url="http://localhost").post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-canvax-model"] == header


def test_a_model_on_the_disk_is_named_without_its_folders(tmp_path: Path) -> None:
    file, folder = tmp_path / "anime.v2.safetensors", tmp_path / "photo"
    save_file({"model.diffusion_model.x": np.zeros(2, np.float32)}, file)
    folder.mkdir()
    asked = [str(file), str(folder), "owner/name", "emoji"]
    assert model_names(asked) == dict(zip(["anime.v2", "photo", "owner/name", "emoji"], asked, strict=True))
    (tmp_path / "anime.v2").mkdir()
    with pytest.raises(InputError) as caught:
        model_names([str(file), str(tmp_path / "anime.v2")])
    assert caught.value.argument == "models"
    assert model_names([str(file), f"v2={tmp_path / 'anime.v2'}"]) == {
        "anime.v2": str(file), "v2": str(tmp_path / "anime.v2"),
    }  # fmt: skip


def test_the_metadata_of_an_image_names_no_folder_of_the_server() -> None:
    model: Any = MODEL
    asked = check(JobRequest("a red apple", seed=1), "public", model)
    job = Job(JobRequest("a red apple"), "public", asked.pictures(), cancel=lambda job: None)
    assert asked.item(job, job.pictures[0]).metadata(model)["model"] == "public"
    found = publicly({"controlnet": ["/home/alice/canny"], "vae": "/home/alice/fine.safetensors", "seed": 1})
    assert found == {"controlnet": ["canny"], "vae": "fine", "seed": 1}


@pytest.mark.parametrize("revision", [None, "0123abcd"])
def test_a_model_is_loaded_again_at_the_commit_of_its_first_load(revision: str | None) -> None:
    calls: list[dict[str, Any]] = []

    def load(name: str, **keywords: Any) -> Any:
        calls.append(keywords)
        model = replace(MODEL, files=replace(MODEL.files, revision=revision))
        return SimpleNamespace(model=model, programs=PIPE.programs, params={}, safety_checker=None)

    served = ServedModel("x", load)
    served.take_off()
    served.put_on()
    assert calls == [{}, {"revision": revision} if revision else {}]


@pytest.mark.parametrize("fills", [False, True])
def test_the_first_task_of_a_model_that_fills_masks(fills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MODEL.networks), "inpaints", fills)
    served = ServedModel("emoji", lambda name, weights=True: PIPE, weights=False)
    first = served.card([Warm((64, 64), (1,))], any_size=True, references=0).tasks[0]
    assert first == ("inpainting" if fills else "text-to-image")


def test_another_model_at_the_same_place_is_not_taken_for_the_first() -> None:
    """Its weights would be run by the programs, and with the noise schedule, of the other."""
    models = [MODEL, replace(MODEL, files=replace(MODEL.files, configs={**MODEL.files.configs, "scheduler": {"a": 1}}))]

    def load(name: str, **_: Any) -> Any:
        return SimpleNamespace(model=models.pop(0), programs=PIPE.programs, params={}, safety_checker=None)

    served = ServedModel("x", load)
    served.take_off()
    with pytest.raises(CanvaxError):
        served.put_on()
    assert not served.loaded


# The journal beside the engine.


def job_of(ask: JobRequest | None = None) -> Job:
    return Job(ask or JobRequest("a secret prompt"), "emoji", [Picture(0, 1, 64, 64, 4)], cancel=lambda job: None)


@contextmanager
def booked(path: Path | None, keep: float = 600.0) -> Iterator[JobStore]:
    journal = Journal(path) if path else None
    book = JobStore(Metrics(), journal, keep, lambda job: None)
    try:
        yield book
    finally:
        book.close()


def test_the_engine_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the journal writes: the lock that the engine needs between two steps is free meanwhile."""
    held = threading.Event()
    write = Journal._write

    def slow(journal: Journal, *given: Any, **more: Any) -> None:
        assert held.wait(10)
        write(journal, *given, **more)

    with booked(tmp_path / "jobs.db", keep=0.0) as book:
        monkeypatch.setattr(Journal, "_write", slow)
        one = job_of()
        for step in (
            lambda: accept(book, one),
            lambda: book.finished(one, 0),
            lambda: book.end(one, Status.DONE),
            lambda: book.forget(),
        ):
            held.clear()
            thread = threading.Thread(target=step)
            thread.start()
            time.sleep(0.05)
            free = threading.Thread(target=book.open)
            free.start()
            free.join(5)
            assert not free.is_alive()
            held.set()
            thread.join(5)
            assert not thread.is_alive()


def test_the_log_names_the_files_of_a_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "canvax.server")
    with booked(None) as book:
        for name in ("00000-1.png", None):
            accept(book, job := job_of())
            job.pictures[0].file = name
            book.end(job, Status.DONE)
    assert [json.loads(line).get("files") for line in caplog.messages] == [["00000-1.png"], None]


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture, asked: bool) -> None:
    caplog.set_level(logging.INFO, "canvax.server")
    with closing(JobStore(Metrics(), None, 600.0, lambda job: None, log_prompts=asked)) as book:
        accept(book, one := job_of())
        book.end(one, Status.DONE)
    assert one.id in caplog.text
    assert ("a secret prompt" in caplog.text) is asked


def test_an_idle_server_forgets_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jobs.db"
    now = [1000.0]
    monkeypatch.setattr("canvax.server.job_store.time.monotonic", lambda: now[0])
    with booked(path, keep=60.0) as book:
        one = job_of()
        accept(book, one)
        assert b"secret prompt" in files_of(path)
        assert book.until_late() is None
        book.end(one, Status.CANCELLED)
        assert book.until_late() == 60.0
        now[0] += 61.0
        book.expire()
        assert book.get(one.id, "") is None
        monkeypatch.undo()
        until(lambda: b"secret prompt" not in files_of(path))


def files_of(path: Path) -> bytes:
    """The bytes of a journal, its write-ahead log included."""
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


@pytest.mark.parametrize("code", [*PASSING, "timeout", "invalid_value", "server_killed"])
def test_a_failure_that_may_pass_frees_its_idempotency_key(code: str) -> None:
    ask = JobRequest("x", once="k", client="a")
    with booked(None, keep=600.0) as book:
        accept(book, first := job_of(ask))
        assert book.earlier(ask) is first
        book.fail(first, code, "")
        if code not in PASSING:
            assert book.earlier(ask) is first
            return
        assert book.earlier(ask) is None
        accept(book, second := job_of(ask))
        book._keep = -1.0
        book.forget()
        assert book.earlier(ask) is second


@pytest.mark.parametrize("journal", [True, False])
def test_a_job_that_goes_on_after_a_restart_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, journal: bool
) -> None:
    caplog.set_level("INFO", "canvax.server")
    outcome = "parked" if journal else "failed"
    with booked(tmp_path / "jobs.db" if journal else None) as book:
        accept(book, one := job_of())
        book.fail(one, "draining", "", resumes=True)
        assert one.status is (Status.QUEUED if journal else Status.FAILED)
        assert f'canvax_jobs_total{{model="emoji",outcome="{outcome}"}} 1.0' in book._metrics.text().decode()
        assert json.loads(caplog.messages[-1])["outcome"] == outcome


def test_a_deadline_of_a_client_is_no_failure() -> None:
    """No alert of the operator."""
    with booked(None) as book:
        accept(book, one := job_of(JobRequest("x", seconds=1.0)))
        one.created -= 2.0
        book.expire()
        assert (one.status, one.error and one.error[0]) == (Status.FAILED, "timeout")
        assert counted(book._metrics, "canvax_jobs_total") == {("emoji", "expired"): 1}


@pytest.mark.parametrize(
    ("job_request", "outlives"),
    [
        (JobRequest("x"), True),
        (JobRequest("x", awaited=True), False),
        (JobRequest("x", awaited=True, once="k"), True),
    ],
)
def test_only_jobs_that_a_client_can_ask_for_outlive_a_server(
    tmp_path: Path, job_request: JobRequest, *, outlives: bool
) -> None:
    """By their id or their key. Others fail, and are not done again for no client."""
    with booked(tmp_path / "jobs.db") as book:
        accept(book, one := job_of(job_request))
        book.fail(one, "draining", "", resumes=True)
        assert (one.parked, one.status, bool(one.error)) == (
            outlives, Status.QUEUED if outlives else Status.FAILED, not outlives,
        )  # fmt: skip
        book._keep = -1.0
        book.forget()  # nobody asks this process for it, and the journal keeps it
    with booked(tmp_path / "jobs.db") as book:
        assert [job.id for job in book.recover(lambda job: None)] == [one.id] * outlives


def test_a_parked_job_can_be_cancelled(tmp_path: Path) -> None:
    with booked(tmp_path / "jobs.db") as book:
        accept(book, one := job_of())
        book.fail(one, "draining", "", resumes=True)
        book.end(one, Status.CANCELLED)
    with booked(tmp_path / "jobs.db") as book:
        assert list(book.recover(lambda job: None)) == []
        assert [job.status for _, job in book._over.values()] == [Status.CANCELLED]


def test_clients_of_a_stopped_server(tmp_path: Path) -> None:
    """The stream of a job ends without an end of the job. A request that waits is refused, for another try."""
    body, key = {"prompt": "a red apple"}, {"Idempotency-Key": "k"}
    with web() as site, booked(tmp_path / "jobs.db") as site.engine.book, ThreadPoolExecutor() as threads:
        with site.engine.paused():
            job = site.submit()
            texts = [
                threads.submit(site.http.get, f"/api/jobs/{job['id']}/events"),
                threads.submit(site.http.post, "/v1/images/generations", json=body, headers=key),
                threads.submit(site.http.post, "/v1/images/generations", json=body),
                threads.submit(site.http.post, "/sdapi/v1/txt2img", json=body),
                threads.submit(site.http.post, "/models/stub", json={"inputs": "x"}),
            ]
            until(lambda: sum(bool(job._watchers) for job in site.engine.jobs()) == 5)
            assert [job.request.awaited for job in site.engine.jobs()].count(True) == 4
            for waiting in site.engine.jobs():
                site.engine.book.fail(waiting, "draining", "", resumes=True)
            stream, *answers = [text.result(10) for text in texts]
        told = site.http.get(f"/api/jobs/{job['id']}").json()
    (_, last) = events(stream.text)[-1]
    assert [(one["status"], one["waits_for"], one["error"]) for one in (last, told)] == [
        ("queued", "the next start of the server", None)
    ] * 2
    assert [answer.status_code for answer in answers] == [503] * 4
    assert all("retry-after" in answer.headers for answer in answers)


OVER = {
    "lost": (JobRequest("x"), {}, {}, Status.DONE, True),
    "half of it": (JobRequest("x"), {"fetched": True}, {}, Status.DONE, True),
    "fetched": (JobRequest("x"), {"fetched": True}, {"fetched": True}, Status.DONE, False),
    "saved where its client cannot see it": (JobRequest("x"), {"file": "0.png"}, {"fetched": True}, Status.DONE, True),
    "answered": (JobRequest("x", awaited=True), {}, {}, Status.DONE, False),
    "failed": (JobRequest("x"), {"fetched": True}, {"fetched": True}, Status.FAILED, True),
    "failure answered": (JobRequest("x", awaited=True), {}, {}, Status.FAILED, False),
    "cancelled": (JobRequest("x"), {}, {}, Status.CANCELLED, False),
}
"""The state of the two images of a job that is over, and whether a stop waits for its client."""


@pytest.mark.parametrize("case", OVER)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_stop_waits_for_results_that_are_nowhere_else(case: str, recorded: bool, tmp_path: Path) -> None:
    ask, first, second, status, waits = OVER[case]
    with booked(tmp_path / "jobs.db" if recorded else None) as book:
        job = Job(ask, "a", [Picture(i, i, 64, 64, 4) for i in range(2)], cancel=lambda job: None)
        accept(book, job)
        assert not book.unfetched()
        for picture, values in zip(job.pictures, (first, second), strict=True):
            vars(picture).update(values)
        if status is Status.FAILED:
            book.fail(job, "out_of_memory", "")
        else:
            book.end(job, status)
        assert bool(book.unfetched()) is (waits and not recorded)


def test_a_stop_does_not_wait_for_what_is_forgotten() -> None:
    with booked(None, keep=0.05) as book:
        accept(book, job := job_of())
        book.end(job, Status.DONE)
        assert book.unfetched()
        until(lambda: not book.unfetched(), 2)


def test_a_client_reads_results() -> None:
    """By a GET of each image; a failure by the job or its events."""
    with web() as site:
        done = site.done(site.submit(n=2))
        for image in done["images"]:
            site.http.head(image["url"])
            assert site.engine.book.unfetched()
            site.http.get(image["url"])
        assert not site.engine.book.unfetched()
        site.engine.fails = ("out_of_memory", "too large")
        for path in ("", "/events"):
            with site.engine.paused():
                job = site.submit()
            until(lambda: not site.engine.jobs())
            assert site.engine.book.unfetched()
            site.http.get(f"/api/jobs/{job['id']}{path}")
            assert not site.engine.book.unfetched()


def test_a_job_that_is_over_can_be_deleted(tmp_path: Path) -> None:
    key, path = {"Idempotency-Key": "k"}, tmp_path / "jobs.db"
    with web() as site, booked(path) as site.engine.book:
        done = site.done(site.submit(key, prompt="a secret prompt"))
        deleted = site.http.delete(f"/api/jobs/{done['id']}")
        assert deleted.status_code == 200
        assert (deleted.json()["status"], deleted.json()["images"][0]["url"]) == ("done", None)
        for method, rest in (("GET", ""), ("GET", "/images/0"), ("DELETE", "")):
            answer = site.http.request(method, f"/api/jobs/{done['id']}{rest}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
        until(lambda: b"secret prompt" not in files_of(path))
        assert site.submit(key, prompt="another")["id"] != done["id"]


def test_a_journal_that_cannot_be_written_makes_the_server_unready_until_it_can(tmp_path: Path) -> None:
    with booked(tmp_path / "jobs.db") as book:
        assert book._journal is not None
        base = book._journal._base
        accept(book, job_of())
        assert book.records()
        base.execute(f"PRAGMA max_page_count = {base.execute('PRAGMA page_count').fetchone()[0] + 2}")
        with pytest.raises(Rejected):
            accept(book, job_of(JobRequest("x" * 100_000)))
        assert not book.records()
        accept(book, job_of(JobRequest("x")))  # a short job may still fit
        assert not book.records()
        book._tries = 0.0
        assert not book.records()  # tries, in vain
        book._later.submit(lambda: None).result()
        base.execute("PRAGMA max_page_count = 100000")
        assert not book.records()
        book._tries = 0.0
        until(book.records)
        assert base.execute("SELECT count(*) FROM probe").fetchone() == (0,)


# Rates, recovery, and clients that are gone.


@pytest.mark.parametrize("api", ["/v1/images/generations", "/api/jobs"])
def test_a_client_that_is_gone_is_logged_as_such(api: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "canvax.server")
    waits = api.startswith("/v1")
    with web() as site, site.engine.paused():
        body = b'{"prompt": "x"}'
        head = request(site.host, f"POST {api} HTTP/1.1", "Content-Type: application/json", "Content-Length: 15")
        with site.connect() as connection:
            connection.sendall(head + body)
            if waits:
                until(lambda: any(job._watchers for job in site.engine.jobs()))
            else:
                assert b" 202 " in connection.recv(4096)

        def logged() -> list[tuple[int, str]]:
            lines = [json.loads(line) for line in caplog.messages]
            return [(line["status"], line.get("code")) for line in lines if line.get("path") == api]

        until(logged)
        assert logged() == [(499, "client_gone") if waits else (202, None)]
