"""Streams, progress, interrupts and files of the dialects: what one request and its answer do not show.

Fields, forms and refusals are in ``test_server_dialects.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from PIL import Image

from canvax.images.infotext import to_infotext
from canvax.images.metadata import save_image
from canvax.server.jobs import Job, JobRequest, Status
from tests.support.server_stub import CARD, StubEngine
from tests.support.serving import Web, b64, events_of, opened, picture, request, until, web

GENERATIONS, TXT2IMG = "/v1/images/generations", "/sdapi/v1/txt2img"
APPLE = {"prompt": "a red apple", "steps": 8, "batch_size": 2}
OTHER = {"X-Forwarded-For": "192.0.2.1"}
"""Another client of A1111's, behind a proxy on this machine, which uvicorn believes."""


@pytest.fixture(scope="module")
def running() -> Iterator[Web]:
    with web() as site:
        yield site


@pytest.fixture
def site(running: Web) -> Web:
    return running.anew()


def streamed(site: Web, **body: Any) -> list[Any]:
    """The events of an image of OpenAI's API."""
    site.engine.watched = True
    return events_of(site.http.post(GENERATIONS, json={"prompt": "x", "stream": True} | body).text)


def test_openai_stream(site: Web) -> None:
    site.engine.pace = 0.02
    *events, last = streamed(site, partial_images=3, n=2, seed=9, size="64x64", steps=3)
    partials, finals = ([event for event in events if event["type"] == f"image_generation.{kind}"]
                        for kind in ("partial_image", "completed"))  # fmt: skip
    assert (len(partials) + len(finals), last, site.engine.asks[0].previews) == (len(events), "[DONE]", 3)
    assert partials
    assert all(event["partial_image_index"] in range(3) for event in partials)
    assert all(event["output_format"] == "jpeg" and opened(event["b64_json"]).format == "JPEG" for event in partials)
    assert sorted(event["seed"] for event in finals) == [9, 10]
    for event in finals:
        assert opened(event["b64_json"]).size == (64, 64)
        assert event["usage"]["total_tokens"] == 0
    for event in events:
        assert (event["size"], event["quality"], event["background"]) == ("64x64", "auto", "opaque")
        assert isinstance(event["created_at"], int)


@pytest.mark.parametrize("word", ["low", "fast", "high", "auto", "hd", None])
def test_openai_quality(site: Web, word: str | None) -> None:
    """Options of the request's own win; a word that no client knows yet is no error."""
    fast = word in ("low", "fast")
    answer = site.http.post(GENERATIONS, json={"prompt": "x", "quality": word}).json()
    assert answer["quality"] == ("low" if fast else "auto")
    assert site.engine.asks[-1].options == ({"quality": "fast"} if fast else {})
    site.http.post(GENERATIONS, json={"prompt": "x", "quality": word, "options": {"quality": "full"}})
    assert site.engine.asks[-1].options == {"quality": "full"}


def test_openai_stream_of_a_job_that_was_done_before_anyone_watched(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(ask: JobRequest) -> Job:
        job = StubEngine.submit(site.engine, ask)
        until(lambda: job.status.over)
        return job

    monkeypatch.setattr(site.engine, "submit", submit)
    body = {"prompt": "x", "n": 2}
    events = events_of(site.http.post(GENERATIONS, json=body | {"stream": True}).text)
    assert [event["seed"] for event in events[:-1]] == [1234, 1235]
    assert len(site.http.post(GENERATIONS, json=body).json()["data"]) == 2


def test_openai_stream_says_that_it_is_alive(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvax.server.answers.PAUSE", 0.02)
    site.engine.pace, site.engine.watched = 0.1, True
    text = site.http.post(GENERATIONS, json={"prompt": "x", "stream": True, "steps": 1}).text
    assert ": keepalive\n\n" in text
    assert events_of(text)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body"),
    [(GENERATIONS, {"prompt": "x"}), (GENERATIONS, {"prompt": "x", "stream": True}), (TXT2IMG, {"prompt": "x"}),
     ("/hf", {"inputs": "x"})],
)  # fmt: skip
def test_a_job_is_cancelled_when_the_client_goes(site: Web, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = ("Content-Type: application/json", f"Content-Length: {len(content)}")
    with site.engine.paused():
        with site.connect() as connection:
            connection.sendall(request(site.host, f"POST {path} HTTP/1.1", *head, body=content))
            until(lambda: any(job._watchers for job in site.engine.jobs()))
        until(lambda: not site.engine.jobs())
    assert site.engine.accepted[0].status is Status.CANCELLED


def test_openai_job_with_a_key_of_its_own_goes_on(site: Web) -> None:
    with site.engine.paused(), pytest.raises(httpx.ReadTimeout):
        site.http.post(GENERATIONS, json={"prompt": "x"}, headers={"Idempotency-Key": "k"}, timeout=0.1)
    until(lambda: not site.engine.jobs())
    assert site.engine.accepted[0].status is Status.DONE


def test_openai_cancelled_by_another_hand(site: Web) -> None:
    with site.engine.paused(), ThreadPoolExecutor() as pool:
        asked = pool.submit(site.http.post, GENERATIONS, json={"prompt": "x"})
        until(site.engine.jobs)
        site.engine.jobs()[0].cancel()
        answer = asked.result(5)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert answer.json()["error"]["code"] == "cancelled"


# AUTOMATIC1111


def test_a1111_names_that_are_listed_are_taken(site: Web) -> None:
    def get(name: str) -> Any:
        return site.http.get(f"/sdapi/v1/{name}", headers={"Authorization": "Basic dXNlcjpwYXNz"}).json()

    samplers = [sampler["name"] for sampler in get("samplers")]
    labels = [scheduler["label"] for scheduler in get("schedulers")]
    assert {"Euler a", "DPM++ 2M", "DDIM"} <= set(samplers)
    assert "Karras" in labels
    for more in [{"sampler_name": name} for name in samplers] + [{"scheduler": label} for label in labels]:
        assert site.http.post(TXT2IMG, json={"prompt": "x", "steps": 1, **more}).status_code == 200


def test_a1111_clip_skip_is_kept(site: Web) -> None:
    """For later requests of the client, unless they have another. Open WebUI sends back all that it read."""
    options = site.http.get("/sdapi/v1/options").json()

    def skipped(**body: Any) -> int:
        assert site.http.post(TXT2IMG, json={"prompt": "x", **body}).status_code == 200
        return site.engine.asks[-1].options.get("clip_skip", 0)

    def choose(layers: Any) -> int:
        return site.http.post(
            "/sdapi/v1/options", json=options | {"CLIP_stop_at_last_layers": layers}
        ).status_code  # fmt: skip

    try:
        assert choose(2) == 200
        assert site.http.get("/sdapi/v1/options").json()["CLIP_stop_at_last_layers"] == 2
        assert skipped() == 1
        assert skipped(clip_skip=1) == 0
        assert skipped(override_settings={"CLIP_stop_at_last_layers": 3}) == 2
        assert [choose(layers) for layers in (13, -1, "two")] == [422, 422, 422]
        site.engine.cards = (replace(CARD, clip_skip=0),)
        assert skipped() == 0
        assert choose(2) == 200
        site.engine.cards = (replace(CARD, usual_layer=2),)  # SDXL, which never reads the last layer
        assert [skipped(clip_skip=layers) for layers in (1, 2, 4)] == [0, 0, 2]
        assert [choose(layers) for layers in (13, 14)] == [200, 422]
        assert choose(2) == 200
        site.engine.cards = (CARD,)
    finally:
        choose(1)
    assert skipped() == 0


def test_a1111_progress_shows_the_image_on_its_way_to_its_client(site: Web) -> None:
    def progress(**more: Any) -> Any:
        return site.http.get("/sdapi/v1/progress", **more).json()

    site.engine.watched = True
    hidden = {"params": {"skip_current_image": "true"}}
    assert (progress()["progress"], progress()["state"]["job_count"], progress()["current_image"]) == (0.0, 0, None)
    with ThreadPoolExecutor() as pool:
        with site.engine.paused():
            asked = pool.submit(site.http.post, TXT2IMG, json=APPLE)
            until(lambda: site.engine.accepted and site.engine.accepted[0]._watchers)
            job = site.engine.accepted[0]
            assert progress(**hidden)["current_image"] is None
            assert not job.looked_at
            until(lambda: progress()["current_image"])
            assert job.looked_at  # previews are for who asks for them
            found = progress()
            assert opened(found["current_image"]).size == (16, 16)
            assert 0 < found["progress"] < 1
            state = found["state"]
            assert (state["job_count"], state["sampling_steps"], state["sampling_step"]) == (2, 8, 1)
            assert progress(**hidden)["current_image"] is None
            assert progress(headers=OTHER)["state"]["job_count"] == 0
        assert len(asked.result(5).json()["images"]) == 2
    assert progress()["progress"] == 0.0


@pytest.mark.parametrize("word", ["interrupt", "skip"])
def test_a1111_interrupt_leaves_what_is_done(site: Web, word: str) -> None:
    site.engine.watched = True
    with site.engine.paused(), ThreadPoolExecutor() as pool:
        asked = pool.submit(site.http.post, TXT2IMG, json=APPLE)
        until(lambda: site.http.get("/sdapi/v1/progress").json()["progress"] > 0)
        assert site.http.post(f"/sdapi/v1/{word}", headers=OTHER).status_code == 200
        job = site.engine.accepted[0]
        assert not job.status.over  # which is another's
        if word == "skip":
            job.pictures[0].data, job.pictures[0].status = picture(), Status.DONE
        assert site.http.post(f"/sdapi/v1/{word}").json() == {}
        answer = asked.result(5)
    done = [0] if word == "skip" else []
    assert (answer.status_code, len(answer.json()["images"])) == (200, len(done))
    assert json.loads(answer.json()["info"])["all_seeds"] == [job.pictures[i].seed for i in done]


def test_a1111_png_info(site: Web, tmp_path: Path) -> None:
    metadata = {"prompt": "a red apple", "num_inference_steps": 3, "sampler_label": "Euler a", "guidance_scale": 7.0,
                "seed": 5, "width": 64, "height": 64, "model": "stub", "options": {"clip_skip": 1}}  # fmt: skip
    path = save_image(tmp_path / "a.webp", Image.new("RGB", (64, 64)), metadata)
    sent = {"image": "data:image/png;base64," + b64(path.read_bytes())}
    told = site.http.post("/sdapi/v1/png-info", json=sent).json()
    assert told["info"] == told["items"]["parameters"] == to_infotext(metadata)
    assert [told["parameters"][name] for name in ("Seed", "Size-1", "Clip skip")] == ["5", "64", "2"]
