"""Faults that nobody foresaw, and what files and headers of anyone's own do to canvax's own API."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from canvax.samplers import CURVES
from canvax.server.jobs import State
from canvax.server.jobs_api import as_job
from canvax.server.logs import JsonLines
from canvax.server.rates import Rates
from tests.support.serving import Web, check_refused, web


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as running:
        yield running


def test_there_is_no_image_of_a_number_that_python_will_not_read(site: Web) -> None:
    job = site.done(site.submit())
    for index in ("9" * 5000, "1", "-1", "00", "\u0660"):
        answer = site.http.get(f"/api/jobs/{job['id']}/images/{index}")
        assert check_refused("own", answer, 404)["error"]["code"] == "image_not_found"


def described(text: str, keyword: str = "canvax") -> bytes:
    """A PNG with a text of someone's own."""
    out, info = io.BytesIO(), PngInfo()
    info.add_text(keyword, text)
    Image.new("RGB", (8, 8)).save(out, "PNG", pnginfo=info)
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "settings", "missing"),
    [
        ('{"prompt": "a", "negative_prompt": "b", "seed": 5, "width": 64, "height": 64, "sampler": "Euler a", '
         '"model": "stub", "vae": "v", "strength": 0.5, "noise": "given", "image_sha256": "ab"}',
         {"prompt": "a", "negative_prompt": "b", "seed": 5, "width": 64, "height": 64, "sampler": "Euler a",
          "model": "stub", "vae": "v", "strength": 0.5}, ["image", "latents"]),
        ('{"prompt": "a", "options": {"reuse": 2, "denoising_end": 0.4, "clip_skip": 1, "hires": 2}}',
         {"prompt": "a", "options": {"clip_skip": 1, "hires": 2}}, ["options.reuse", "options.denoising_end"]),
        ('{"prompt": "a", "seed": 1, "num_inference_steps": 20, "guidance_scale": 7}',
         {"prompt": "a", "seed": 1, "steps": 20, "guidance_scale": 7}, []),
        ('{"grid": [{"prompt": "a", "other": {"Hires": 2}}]}', {"prompt": "a"}, ["Hires: 2"]),
        ('{"grid": ["a"]}', {}, []),
        ('{"grid": []}', {}, []),
        ('{"prompt": "a", "other": ["b"]}', {"prompt": "a"}, []),
        ('{"prompt": ["a"], "seed": "b", "width": 1e9}', {}, ["prompt", "seed", "width"]),
        ('{"prompt": "a", "num_inference_steps": 99999}', {"prompt": "a"}, ["steps"]),
        ('{"prompt": "a", "options": {"clip_skip": 2}, "image_sha256": "ab"}',
         {"prompt": "a", "options": {"clip_skip": 2}}, ["image"]),
    ],
)  # fmt: skip
def test_settings_of_an_image_are_such_as_a_job_may_have(
    text: str, settings: dict[str, Any], missing: list[str], site: Web
) -> None:
    told = site.http.post("/api/inspect", content=described(text)).json()
    assert (told["settings"], sorted(told["missing"])) == (settings, sorted(missing))
    whole = json.loads(text)
    assert told["metadata"] in (whole, *whole.get("grid", ()))


def test_layers_that_another_program_skipped(site: Web) -> None:
    """SDXL never reads the last one, which A1111 counts."""
    cards = site.engine.cards
    image = described("a fox\nSteps: 5, Sampler: Euler, Seed: 1, Clip skip: 2", "parameters")
    try:
        for changed, skip in (({}, 1), ({"usual_layer": 2}, 0)):
            site.engine.cards = tuple(replace(card, **changed) for card in cards)
            assert site.http.post("/api/inspect", content=image).json()["settings"]["options"]["clip_skip"] == skip
    finally:
        site.engine.cards = cards


@pytest.mark.parametrize(
    ("sampler", "sigmas", "known"),
    [
        ("DPM++ 2M Karras", None, ("dpmpp_2m", "karras")),
        ("dpmpp_2m_karras", "Beta", ("dpmpp_2m", "beta")),  # the option wins
        ("DPM++ 2M", None, ("DPM++ 2M", None)),
        ("EulerDiscreteScheduler", "sgm_uniform", ("EulerDiscreteScheduler", "sgm_uniform")),
        (None, "Align Your Steps", (None, "ays")),
        ("ddim", [14.6, 2.0, 0.0], ("ddim", [14.6, 2.0, 0.0])),
        ("gone k", "gone", (None, "gone")),
    ],
)
def test_the_schedule_of_a_sampler_is_a_setting(
    sampler: str | None, sigmas: Any, known: tuple[str | None, Any]
) -> None:
    """However the image says it: by the names of the curves that /api/models lists."""
    settings = as_job({"prompt": "a fox", "sampler": sampler, "options": {"sigmas": sigmas}})["settings"]
    assert (settings.get("sampler"), settings.get("options", {}).get("sigmas")) == known
    assert known[1] in [None, "gone", [14.6, 2.0, 0.0], *(curve.name for curve in CURVES)]


def test_a_bucket_fills_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a minute's worth leaves a debt."""
    now = [1000.0]
    monkeypatch.setattr("canvax.server.rates.time.monotonic", lambda: now[0])
    rates = Rates(30)
    assert [rates.wait("a") for _ in range(30)] == [0.0] * 30
    assert rates.wait("a") == pytest.approx(2)
    assert rates.wait("b") == 0
    now[0] += 2.01
    assert rates.wait("a") == 0
    assert rates.wait("a") > 1.9
    now[0] += 10_000
    assert rates.wait("a", 60) == 0
    assert rates.wait("a") == pytest.approx(62)
    rates.add("a", 60)
    assert rates.wait("a", 30) == 0


def test_probes_are_logged_when_their_answer_changes(site: Web, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "canvax.server"):
        for path in ("/ready", "/health", "/ready", "/health", "/api/models", "/api/models"):
            assert site.http.get(path).status_code == 200
        site.state = State.DRAINING
        assert {site.http.get("/ready").status_code for _ in range(3)} == {503}
    site.state = State.READY
    paths = [json.loads(line)["path"] for line in caplog.messages]
    assert paths == ["/ready", "/health", "/api/models", "/api/models", "/ready"]


def test_every_line_of_the_log_is_json() -> None:
    out = io.StringIO()
    handler, log = logging.StreamHandler(out), logging.getLogger("canvax.server")
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with web() as site:
            site.done(site.submit())
            log.warning("%s:\n%s", "a", "b")
            try:
                raise RuntimeError("c\nd")
            except RuntimeError:
                log.exception("failed")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all("time" in line for line in lines)
    assert {line["message"] for line in lines if "level" in line} == {"a:\nb", "failed"}
    assert [line for line in lines if "RuntimeError: c\nd" in line.get("traceback", "")]
    assert [line for line in lines if line.get("outcome") == "done"]
