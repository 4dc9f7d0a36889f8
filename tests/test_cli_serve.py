"""``canvax serve`` and ``canvax ui``: flags and their errors, signals, what they say."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import pytest

from canvax._version import __version__
from canvax.cli import BAD_INPUT, FAILED, main
from canvax.cli.arguments import parse
from canvax.cli.serve import answer, byte_count, listen, run, tell_watchdog
from canvax.errors import InputError
from canvax.images.metadata import read_metadata
from canvax.server.app import Settings, create_app
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import Job, JobRequest, Picture, State, Status
from canvax.server.metrics import Metrics
from tests.support.serve_process import serving
from tests.support.server_stub import accept
from tests.support.serving import until

KEY = "a-secret-of-alices"


@pytest.fixture(autouse=True)
def nothing_starts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come before any model is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CANVAX_KEYS", raising=False)
    monkeypatch.setattr("canvax.server.logs.log_to_stderr", lambda quiet: None)  # of this process, for good
    monkeypatch.setattr("canvax.cli.serve._GPU", tmp_path / "no gpu")
    monkeypatch.setattr("canvax.cli.serve.shutil.which", lambda name: None)
    if "slow" not in request.keywords:

        def started(self: Any) -> None:
            raise AssertionError("the engine was started")

        monkeypatch.setattr("canvax.server.engine.ImageEngine.start", started)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command is refused with."""
    code = main(["serve", "--port", "0", *arguments])
    told = capsys.readouterr()
    assert (code, told.out) == (BAD_INPUT, ""), told.err
    lines = [line for line in told.err.splitlines() if not line.startswith("canvax: warning:")]
    assert lines[0].startswith("canvax: error: "), told.err
    assert "Traceback" not in told.err
    return told.err


WRONG = "--host 192.0.2.1 --no-keys", "--host no.such.host.invalid --no-keys", "--batching all"
"""What systems and versions of Python word in several ways; ``golden/errors.txt`` has the others."""


@pytest.mark.parametrize("line", WRONG)
def test_flags_that_are_wrong(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert line.split()[0] in refused(capsys, *line.split())


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"--port {port}" in refused(capsys, "--port", port)


def started_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, Any]:
    """The port and the settings of the engine with which a command would start."""
    seen: list[Any] = []

    class Started(Exception):
        pass

    def start(engine: Any) -> None:
        seen.append(engine)
        raise Started

    real = socket.socket.bind
    monkeypatch.setattr("canvax.server.engine.ImageEngine.start", start)
    ports: list[int] = []

    def bind(listener: socket.socket, address: Any) -> None:
        real(listener, address)
        ports.append(listener.getsockname()[1])

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(Started):
        run(parse(list(arguments)), {})
    return ports[-1], seen[0]._settings


def test_the_start_names_the_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started_with(monkeypatch, "ui", "--port", "0")
    said = capsys.readouterr().err
    assert f"devices: {len(jax.devices())} x cpu" in said
    assert __version__ in said
    started_with(monkeypatch, "ui", "--port", "0", "--mesh", "data=1")
    assert "devices: 1 x cpu" in capsys.readouterr().err
    monkeypatch.setattr("canvax.cli.serve._GPU", tmp_path)
    with pytest.warns(UserWarning, match="NVIDIA"):
        started_with(monkeypatch, "ui", "--port", "0")


def test_the_page_has_one_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A browser keeps the history of images by address and port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    monkeypatch.setattr("canvax.cli.serve.PORT", free)
    assert started_with(monkeypatch, "ui")[0] == free
    assert started_with(monkeypatch, "ui", "--port", "0")[0] != free
    with socket.create_server(("127.0.0.1", free)):
        capsys.readouterr()
        assert started_with(monkeypatch, "ui")[0] != free
        assert str(free) in capsys.readouterr().err
        for arguments in (["ui", "--port", str(free)], ["serve"]):
            assert main(arguments) == BAD_INPUT


def test_where_images_are_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "canvax.server")
    for arguments, folder in (
        (["ui"], "out"),
        (["ui", "--output", "mine"], "mine"),
        (["ui", "--no-output"], None),
        (["serve"], None),
        (["serve", "-o", "mine"], "mine"),
    ):
        _, settings = started_with(monkeypatch, *arguments, "--port", "0")
        assert settings.output == (folder and Path(folder))
        said = capsys.readouterr().err + caplog.text
        assert (str(tmp_path / (folder or "out")) in said) == bool(folder)
        caplog.clear()
    (tmp_path / "file").touch()
    for arguments in (["-o", "file"], ["-o", "a.png"], ["-o", "mine", "--no-output"]):
        assert main(["ui", "--port", "0", *arguments]) == BAD_INPUT
        assert "output" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_extra_that_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uvicorn", "starlette", "msgspec", "python_multipart", "prometheus_client"):
        with monkeypatch.context() as hidden:
            hidden.setitem(sys.modules, name, None)
            told = refused(capsys)
            assert f'canvax serve needs {name}; install it from canvax\'s folder: pip install ".[serve]"' in told
            assert main(["ui"]) == BAD_INPUT
            told = capsys.readouterr().err
        assert f"canvax ui needs {name}" in told
        assert '".[serve]"' in told


@pytest.mark.filterwarnings("default")
def test_keys_in_a_file_that_others_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(f"alice:{KEY}\n")
    file.chmod(0o644)
    told = refused(capsys, "--keys", str(file), "--max-body", "x")
    assert "others on this machine can read it" in told
    assert KEY not in told
    file.write_text("alice:short\n")
    file.chmod(0o600)
    told = refused(capsys, "--keys", str(file))
    assert "line 1: the key of alice is shorter than 16" in told
    assert "others on this machine" not in told
    monkeypatch.setenv("CANVAX_KEYS", KEY)
    told = refused(capsys)
    assert "CANVAX_KEYS, line 1: is not id:key" in told
    assert KEY not in told


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_from_a_healthy_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, abstract: bool
) -> None:
    name = f"@canvax-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0"))
        systemd.settimeout(0.1)
        tell_watchdog(State.READY)  # no systemd
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        tell_watchdog(State.FAILED)
        with pytest.raises(TimeoutError):
            systemd.recv(64)
        for state in (State.STARTING, State.READY, State.DRAINING):
            tell_watchdog(state)
            assert systemd.recv(64) == b"WATCHDOG=1"
    tell_watchdog(State.READY)  # systemd is gone


def test_a_journal_that_another_server_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from canvax.server.journal import Journal

    journal = Journal(tmp_path / "jobs.db")
    assert "another server has it" in refused(capsys, "--journal", "jobs.db")
    journal.close()
    (tmp_path / "notes.txt").write_text("not a database\n" * 100)
    assert "is not a journal" in refused(capsys, "--journal", "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "not a database\n" * 100


def test_sizes_in_bytes() -> None:
    assert [byte_count("x", text) for text in ("1", "2k", "3KB", "1.5 MiB", "20GB", ".5k", "1.k")] == [
        1, 2048, 3072, 1_572_864, 20 << 30, 512, 1024,
    ]  # fmt: skip
    for text in ("", "GB", "1TB", "1,5GB", "1GBB", "NaN", "١GB", "0.0001"):
        with pytest.raises(InputError):
            byte_count("x", text)


slow = pytest.mark.slow


@slow
def test_sigterm_finishes_what_was_accepted(tmp_path: Path) -> None:
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    environment = {"CANVAX_KEYS": f"alice:{KEY}", "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with (
        systemd,
        serving("--drain-seconds", "300", cwd=tmp_path, environment=environment) as served,
        served.ready() as http,
    ):
        assert systemd.recv(64) == b"WATCHDOG=1"
        http.headers["X-API-Key"] = KEY
        body = {"prompt": "a zebra", "n": 2, "steps": 100, "seed": 1}
        job = http.post("/api/jobs", json=body, headers={"x-request-id": "mine"}).json()
        with http.stream("GET", f"/api/jobs/{job['id']}/events") as events:
            served.send(signal.SIGTERM)
            until(lambda: http.get("/ready").status_code == 503)
            assert http.get("/ready").json() == {"status": "draining"}
            assert http.get("/health").status_code == 200
            refused = http.post("/api/jobs", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            told = "".join(events.iter_text())
        assert told.rpartition("event: ")[2].startswith("done")
        until(lambda: "waiting for clients" in served.said)
        assert [http.get(f"/api/jobs/{job['id']}/images/{i}").status_code for i in range(2)] == [200, 200]
        assert served.ended() == 0
        assert "SIGTERM: finishing what was accepted" in served.said
        assert "Traceback" not in served.said
        assert "zebra" not in served.said
        assert KEY not in served.said
        assert "server" not in refused.headers
        lines = [json.loads(line) for line in served.lines]
        assert len([line for line in lines if line.get("path") == "/ready"]) <= 4  # not one for each probe
        mine = next(line for line in lines if line.get("id") == "mine")
        assert (mine["path"], mine["status"], mine["client"]) == ("/api/jobs", 202, "alice")
        assert next(line for line in lines if "outcome" in line)["outcome"] == "done"


@slow
def test_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    """Without keys it is a SIGTERM."""
    file = tmp_path / "keys.txt"
    file.touch(0o600)
    file.write_text(f"alice:{KEY}\n")
    with serving("--keys", str(file), cwd=tmp_path) as served, served.ready() as http:
        file.write_text(f"bob:{KEY[::-1]}\n")
        served.send(signal.SIGHUP)
        until(lambda: "read again" in served.said)
        file.write_text("bob:short\n")
        served.send(signal.SIGHUP)
        until(lambda: "former keys" in served.said)
        for key, status in ((KEY, 401), (KEY[::-1], 200)):
            assert http.get("/api/models", headers={"X-API-Key": key}).status_code == status
        served.send(signal.SIGTERM)
        assert served.ended() == 0
    with serving("--no-keys", cwd=tmp_path) as served, served.ready():
        served.send(signal.SIGHUP)
        assert served.ended() == 0
        assert "SIGHUP: finishing" in served.said


@slow
@pytest.mark.weekly
def test_a_second_signal_ends_at_once_and_jobs_are_told(tmp_path: Path) -> None:
    with serving("--drain-seconds", "600", cwd=tmp_path) as served, served.ready() as http:
        for seed in range(8):
            http.post("/api/jobs", json={"prompt": "x", "n": 64, "steps": 250, "seed": seed})
        served.send(signal.SIGINT)
        until(lambda: http.get("/ready").status_code == 503)
        assert "SIGINT: finishing" in served.said
        served.send(signal.SIGINT)
        assert served.ended(20) == 0
        assert "Traceback" not in served.said


@slow
@pytest.mark.weekly
def test_a_drain_that_takes_too_long_fails_what_is_left(tmp_path: Path) -> None:
    with serving("--drain-seconds", "1", "--quiet", "--port", "0", cwd=tmp_path) as served:
        until(lambda: served.process.poll() is not None or bool(port_of(served.process.pid)), 60)
        served.lines.append(f"starting on http://127.0.0.1:{port_of(served.process.pid)}\n")  # --quiet does not say it
        with served.ready() as http:
            job = http.post("/api/jobs", json={"prompt": "x", "n": 64, "steps": 250}).json()
            with http.stream("GET", f"/api/jobs/{job['id']}/events") as events:
                served.send(signal.SIGTERM)
                told = "".join(events.iter_text()).rpartition("event: ")[2]
            assert told.startswith("failed")
            assert "the server stopped before the images were done" in told
        assert served.ended() == 0
        assert len(served.lines) == 1  # nothing else was said


def test_finished_jobs_are_answered_until_they_are_fetched() -> None:
    """The second of two servers is stopped with nothing to fetch."""
    for fetches in (2, 0):
        metrics, said = Metrics(), list[str]()
        engine = ImageEngine(["a"], EngineSettings(), metrics, pytest.fail, say=said.append)
        pictures = [Picture(i, i, 64, 64, 4, data=b"image") for i in range(fetches)]
        job = Job(JobRequest("x"), "a", pictures, cancel=lambda job: None)
        if fetches:
            accept(engine._book, job)
            engine._book.end(job, Status.DONE)
        began = time.monotonic()
        with listen("127.0.0.1", 0) as listener, httpx.Client(timeout=10) as http:
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"

            def stop_and_fetch(
                base: str = base, http: httpx.Client = http, job: Job = job, said: Any = said
            ) -> list[int]:
                listener.listen()
                http.get(f"{base}/health")
                os.kill(os.getpid(), signal.SIGTERM)
                if not job.pictures:
                    return []
                until(lambda: len(said) == 1)
                assert http.get(f"{base}/api/jobs/{job.id}").json()["status"] == "done"
                time.sleep(0.3)
                return [http.get(f"{base}/api/jobs/{job.id}/images/{i}").status_code for i in range(2)]

            with ThreadPoolExecutor(1) as threads:
                app = create_app(engine, Settings(), state=engine.readiness, metrics=metrics)
                client = threads.submit(stop_and_fetch)
                answer(app, listener, engine, 30.0, lambda text: None)
                assert client.result(10) == [200] * fetches
        assert time.monotonic() - began < 5


def port_of(process: int) -> int:
    """Which a process listens on; 0 for none."""
    sockets = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            sockets.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in sockets:
            return int(fields[1].partition(":")[2], 16)
    return 0


@slow
def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words in (["./empty"], ["--mesh", "data=3"]):
        with serving(*words, "--journal", "jobs.db", cwd=tmp_path) as served:
            assert served.ended() in (BAD_INPUT, FAILED), served.said
            last = served.lines[-1]
            if words == ["./empty"]:  # after the start a program reads what is logged
                assert json.loads(last)["level"] == "error"
            else:
                assert last.startswith("canvax: error: ")
            assert "Traceback" not in served.said
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@slow
def test_ui_opens_the_page(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(stat.S_IRWXU)
    with serving("ui", cwd=tmp_path, environment={"BROWSER": str(browser)}) as served, served.ready() as http:
        until(lambda: (tmp_path / "opened").exists(), 30)
        assert (tmp_path / "opened").read_text().strip() == served.base
        assert "<html" in http.get("/").text
        body = {"prompt": "a red apple", "steps": 2, "seed": 5, "format": "webp"}
        job = http.post("/api/jobs", json=body).json()
        until(lambda: http.get(f"/api/jobs/{job['id']}").json()["status"] == "done", 60)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["00000-5.png"]
        assert read_metadata(tmp_path / "out" / "00000-5.png")["prompt"] == "a red apple"
        assert http.get(f"/api/jobs/{job['id']}").json()["images"][0]["file"] == "00000-5.png"
        assert [image["file"] for image in http.get("/api/images").json()["images"]] == ["00000-5.png"]
        served.send(signal.SIGTERM)
        assert served.ended() == 0
