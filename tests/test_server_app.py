"""The web server over the stub: canvax's own API, the page, keys, limits, health, metrics, logs, and errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from canvax.errors import InputError
from canvax.images.maps import control_map
from canvax.images.metadata import save_image
from canvax.server import a1111, app, huggingface, jobs_api, openai
from canvax.server.answers import read_json
from canvax.server.app import Settings
from canvax.server.guard import LARGEST_QUESTION, Guard, allowed_hosts
from canvax.server.jobs import Changed, Job, JobRequest, Picture, Rejected, State, Status, Stepped
from canvax.server.keys import Keys
from canvax.server.metrics import Metrics
from canvax.server.paths import ApiPath, Operation
from tests.support.server_stub import CARD, StubEngine, accept
from tests.support.serving import (
    APIS,
    Web,
    b64,
    body_of,
    check_refused,
    events,
    heard,
    opened,
    picture,
    request,
    until,
    web,
)

ALICE, BOB = "alices-long-secret", "bobs-even-longer-secret"
SHOP = "https://shop.example"


def keys_of(**secrets: str) -> Keys:
    return Keys({name: hashlib.sha256(secret.encode()).digest() for name, secret in secrets.items()})


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def running() -> Iterator[Web]:
    with web() as site:
        yield site


@pytest.fixture
def site(running: Web) -> Web:
    """A server that lets everyone in, with an engine as new."""
    return running.anew()


@pytest.fixture(scope="module")
def running_guarded() -> Iterator[Web]:
    with web(Settings(keys=keys_of(alice=ALICE, bob=BOB), origins=(SHOP,))) as site:
        yield site


@pytest.fixture
def guarded(running_guarded: Web) -> Web:
    """One that asks for a key, and lets pages of one other site ask."""
    return running_guarded.anew()


# canvax's own API. Its fields and refusals are in ``test_server_dialects.py``.


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_a_job_from_submitting_to_fetching(site: Web, kind: str) -> None:
    job = site.done(site.submit(n=2, seed=7, width=96, height=64, format=kind))
    assert (job["status"], job["error"]) == ("done", None)
    assert [(one["index"], one["seed"], one["status"]) for one in job["images"]] == [(0, 7, "done"), (1, 8, "done")]
    answer = site.http.get(job["images"][1]["url"])
    assert answer.headers["content-type"] == f"image/{kind}"
    assert "private" in answer.headers["cache-control"]
    image = opened(answer.content)
    assert (image.format, image.size) == (kind.upper(), (96, 64))
    assert kind == "webp" or image.getpixel((0, 0)) == (8, 128, 64)


def test_images_are_turned_as_their_exif_says(site: Web) -> None:
    """A camera that is held upright writes its rows from right to left and says so: orientation 6."""
    image, exif, out = Image.new("RGB", (96, 64), "red"), Image.Exif(), io.BytesIO()
    image.paste("blue", (0, 0, 96, 32))  # of the upright image the right half
    exif[0x0112] = 6
    image.save(out, "PNG", exif=exif)
    site.submit(image=b64(out.getvalue()))
    given = site.engine.asks[-1].image
    assert given is not None
    assert (given.size, given.getpixel((0, 48)), given.getpixel((63, 48))) == ((64, 96), (255, 0, 0), (0, 0, 255))


def test_an_image_that_is_enlarged_brings_its_prompt(site: Web, tmp_path: Path) -> None:
    """For the metadata of the new one, where its tiles have none."""
    data = save_image(tmp_path / "a.png", Image.new("RGB", (64, 64)), {"prompt": "a fox", "seed": 1}).read_bytes()
    body = {"prompt": "", "image": base64.b64encode(data).decode(), "upscale": 2}
    for changes, known in (({}, "a fox"), ({"prompt": "a cat"}, ""), ({"image": b64(picture())}, "")):
        assert site.http.post("/api/jobs", json=body | changes).status_code == 202
        assert site.engine.asks[-1].source_prompt == known


def test_events_begin_with_the_state_and_end_with_the_job(site: Web) -> None:
    site.engine.pace, site.engine.watched = 0.01, True
    job = site.submit(n=2, previews=True)
    answer = site.http.get(f"/api/jobs/{job['id']}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    told = events(answer.text)
    names = [name for name, _ in told]
    assert (names[0], names[-1], names.count("image")) == ("job", "done", 2)
    assert {"job", "step", "preview", "image", "done"} == set(names)
    assert told[-1][1]["images"][0]["url"] == told[names.index("image")][1]["url"]
    head, _, data = told[names.index("preview")][1]["image"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).format == "JPEG"
    # later it says the same in short
    again = [name for name, _ in events(site.http.get(f"/api/jobs/{job['id']}/events").text)]
    assert again == ["job", "image", "image", "done"]


def test_events_tell_how_many_are_ahead(site: Web) -> None:
    job = Job(JobRequest("x"), "stub", [Picture(0, 0, 64, 64, 4)], cancel=lambda job: None)
    accept(site.engine.book, job)
    with site.http.stream("GET", f"/api/jobs/{job.id}/events") as answer:
        parts = answer.iter_text()
        text = next(parts)
        until(lambda: bool(job._watchers))
        for ahead in (2, 1):
            job.ahead = ahead
            job.tell(Changed(Status.QUEUED))
            text += next(parts)
        site.engine.book.end(job, Status.CANCELLED)
        text += "".join(parts)
    told = [(name, data["ahead"]) for name, data in events(text)]
    assert told == [("job", 0), ("job", 2), ("job", 1), ("cancelled", 0)]


def test_cancelling(site: Web) -> None:
    with site.engine.paused():
        job = site.submit()
        told = site.http.delete(f"/api/jobs/{job['id']}").json()
    assert told["status"] == "cancelled"
    assert [one["status"] for one in told["images"]] == ["cancelled"]
    assert events(site.http.get(f"/api/jobs/{job['id']}/events").text)[-1][0] == "cancelled"


def test_a_job_that_fails_says_why(site: Web) -> None:
    site.engine.fails = ("out_of_memory", "too large")
    job = site.submit()
    assert site.done(job)["error"] == {"code": "out_of_memory", "message": "too large"}
    assert events(site.http.get(f"/api/jobs/{job['id']}/events").text)[-1][0] == "failed"


def test_a_control_image_is_made_before_a_job_uses_it(site: Web) -> None:
    answer = site.http.post("/api/control/invert", content=picture())
    image = Image.open(io.BytesIO(picture()))
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).tobytes() == control_map("invert", image).tobytes()
    large = picture(size=(320, 320), compress_level=0)
    assert len(large) > LARGEST_QUESTION
    assert site.http.post("/api/control/invert", content=large).status_code == 200


def test_models_and_samplers(site: Web) -> None:
    told = site.http.get("/api/models").json()
    card = told["models"][0]
    told_of = [card[name] for name in ("id", "default", "native", "sizes")]
    assert told_of == ["stub", True, [64, 64], [[64, 64], [96, 64]]]
    assert (card["max_images"], card["tasks"], card["examples"]) == (10, list(CARD.tasks), ["a red apple"])
    assert {"name", "label", "when"} == set(told["samplers"][0])
    assert "ddim_inverse" not in [sampler["name"] for sampler in told["samplers"]]


def test_folders_in_a_name_of_a_model_count(site: Web) -> None:
    """Files of one name in several folders, and a file whose name is its own."""
    files = {"SDXL/aom3": "checkpoints/SDXL", "sd15/aom3": "checkpoints/sd15", "ink": "checkpoints/sd15"}
    cards = [
        replace(CARD, id=name, sha256="", file=f"models/{folder}/{name.split('/')[-1]}.safetensors")
        for name, folder in files.items()
    ]
    site.engine.cards = tuple(cards)

    def chosen(name: str) -> str | None:
        answer = site.http.post("/sdapi/v1/options", json={"sd_model_checkpoint": name})
        assert answer.status_code in (200, 404)
        return site.http.get("/sdapi/v1/options").json()["sd_model_checkpoint"] if answer.is_success else None

    for name in ("SDXL\\aom3.safetensors", "SDXL/aom3.ckpt [0123456789]", "SDXL_aom3.safetensors", "SDXL_aom3",
                 "sd/models/checkpoints/SDXL/aom3.safetensors"):  # fmt: skip
        assert chosen(name) == "SDXL/aom3"
    for name in ("ink.safetensors", "sd15/ink", "models\\checkpoints\\sd15\\ink.safetensors"):
        assert chosen(name) == "ink"
    for name in ("aom3.safetensors", "SDXL/ink.safetensors", "other/aom3", "other/SDXL_aom3"):
        assert chosen(name) is None
    listed = site.http.get("/sdapi/v1/sd-models").json()
    assert [(one["title"], one["hash"]) for one in listed] == [(name, None) for name in files]


def test_a_field_model_that_is_not_used_is_a_hint(site: Web) -> None:
    """A1111 ignores the field, and clients for several servers send it."""
    site.engine.cards = CARD, replace(CARD, id="other")
    for sent, used, hints in ("other", "other", 0), ("nope", "stub", 1), ("", "stub", 0):
        answer = site.http.post("/sdapi/v1/txt2img", json={"prompt": "x", "model": sent})
        info = json.loads(answer.json()["info"])
        assert (info["sd_model_name"], len(info.get("hints", []))) == (used, hints)
    settings = {"model": "other", "override_settings": {"sd_model_checkpoint": "stub"}}
    info = json.loads(site.http.post("/sdapi/v1/txt2img", json={"prompt": "x"} | settings).json()["info"])
    assert (info["sd_model_name"], len(info["hints"])) == ("stub", 1)


@pytest.mark.parametrize("kind", ["adapters", "embeddings"])
def test_files_are_refreshed_for_every_model(site: Web, kind: str) -> None:
    refreshed = []
    setattr(site.engine, kind, lambda model, *, refresh=False: refreshed.append((model, refresh)))
    site.engine.cards = CARD, replace(CARD, id="other")
    name = "loras" if kind == "adapters" else kind
    assert site.http.post(f"/sdapi/v1/refresh-{name}").status_code == 200
    assert refreshed == [("stub", True), ("other", True)]


# Operations.


@pytest.mark.parametrize("state", State)
def test_health_and_readiness(site: Web, state: State) -> None:
    site.state = state
    answer, dead = site.http.get("/health"), state is State.FAILED
    assert (answer.status_code, answer.json()) == (503 if dead else 200, {"status": "failed" if dead else "ok"})
    answer = site.http.get("/ready")
    assert (answer.status_code, answer.json()) == (200 if state is State.READY else 503, {"status": str(state)})
    assert site.http.get("/").status_code == 200


SECRET_PROMPT = "a zebra that nobody may read about"


def test_metrics_are_text_without_prompts(site: Web) -> None:
    """Their names are in ``test_server_metrics.py``."""
    site.done(site.submit(prompt=SECRET_PROMPT))
    answer = site.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'canvax_requests_total{route="/api/",status="202"}' in answer.text
    assert "zebra" not in answer.text


def test_the_description_is_whole(site: Web) -> None:
    answer = site.http.get("/openapi.json")
    told = answer.json()
    assert told["openapi"].startswith("3.1")
    assert set(told) <= {"openapi", "info", "paths", "components", "security", "servers"}

    def resolve(value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                resolve(one)
        elif isinstance(value, dict):
            for name, one in value.items():
                if name == "$ref":
                    target: Any = told
                    for part in one.removeprefix("#/").split("/"):
                        target = target[part]
                resolve(one)

    resolve(told)
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            assert method in ("get", "post", "delete"), path
            assert operation["summary"], path
            assert operation["responses"], path
            named = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            assert all(one["required"] for one in operation["parameters"] if one["in"] == "path")


_WITHOUT_A_BODY = {"/sdapi/v1/interrupt", "/sdapi/v1/skip", "/v1/images/variations"} | {
    f"/sdapi/v1/refresh-{what}" for what in ("checkpoints", "vae", "loras", "embeddings")
}


def test_every_route_is_described_but_aliases_and_empty_ones(site: Web) -> None:
    described = site.http.get("/openapi.json").json()["paths"]
    found = [route for api in (jobs_api, openai, a1111, huggingface) for route in api.routes(site.engine)]
    for route in found:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}").replace(":int}", "}")
        if path.startswith(("/images/", "/openai/")) or path == "/hf/{name}":
            path = {"/hf/{name}": "/models/{name}"}.get(path) or "/v1/images" + path.partition("/images")[2]  # aliases
        if "POST" in (route.methods or ()) and path not in _WITHOUT_A_BODY:
            assert "requestBody" in described[path]["post"], path
        if "GET" in (route.methods or ()) and path.removeprefix("/sdapi/v1/") not in a1111._EMPTY:
            assert "get" in described[path.replace("/models", "/v1/models") if path.startswith("/models") else path], (
                path
            )
    assert {"/sdapi/v1/interrupt", "/sdapi/v1/skip", "/sdapi/v1/refresh-loras"} <= described.keys()
    edits = described["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert {"image", "mask"} <= set(json.dumps(edits).split('"'))


def test_an_api_is_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits, its form of errors, its description and its count follow from what it declares."""

    class Echo(msgspec.Struct):
        image: str

    class Echoes:
        PREFIXES = ("/echo/",)

        def error(self, refused: Rejected, request_id: str) -> Response:
            return Response(f"ECHO {refused.code}", refused.status)

        def routes(self, engine: Any) -> list[ApiPath]:
            async def echo(request: Request) -> Response:
                return Response((await read_json(request, Echo)).image)

            return [ApiPath("/echo/{size}", self.error, POST=Operation(echo, "Echo an image.", Echo, images=True))]

    monkeypatch.setattr(app, "APIS", (*app.APIS, Echoes()))
    web_app = app.create_app(StubEngine(), Settings(), state=lambda: State.READY, metrics=Metrics())
    http, image = TestClient(web_app, base_url="http://localhost"), "x" * (2 * LARGEST_QUESTION)
    assert http.post("/echo/large", json={"image": image}).text == image
    assert (http.post("/echo/large", json={}).text, http.get("/echo/large").text, http.get("/echo/a/b").text) == (
        "ECHO invalid_value", "ECHO method_not_allowed", "ECHO not_found",
    )  # fmt: skip
    described = http.get("/openapi.json").json()
    operation = described["paths"]["/echo/{size}"]["post"]
    assert (operation["summary"], operation["parameters"][0]["name"]) == ("Echo an image.", "size")
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Echo")
    assert 'canvax_requests_total{route="/echo/",status="200"} 1.0' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("error", "status", "param"), [(InputError("n", "is 9"), 400, "n"), (ValueError("n"), 500, None)]
)
def test_an_error_about_an_argument_is_a_refusal(error: Exception, status: int, param: str | None) -> None:
    async def broken(_: Request) -> Response:
        raise error

    web_app = app.create_app(
        StubEngine(), Settings(), state=lambda: State.READY, metrics=Metrics(),
        more=lambda _: [ApiPath("/broken", jobs_api.error, GET=Operation(broken))],
    )  # fmt: skip
    answer = TestClient(web_app, base_url="http://localhost", raise_server_exceptions=False).get("/broken")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


# Keys.


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ALICE),
        {"Authorization": f"bearer   {ALICE}"},
        {"X-API-Key": ALICE},
        {"Authorization": "Basic " + b64(f"anyone:{ALICE}".encode())},
        {"Authorization": "", "X-API-Key": ALICE},
    ],
)
def test_right_keys(guarded: Web, headers: dict[str, str]) -> None:
    assert guarded.http.get("/api/models", headers=headers).status_code == 200
    guarded.submit(headers)
    assert guarded.engine.asks[-1].client == "alice"


WRONG_KEYS = [
    {}, bearer("wrong"), bearer(ALICE[:-1]), bearer(ALICE.upper()), {"Authorization": ALICE},
    {"Authorization": "Basic !!!"}, {"Authorization": "Basic " + b64(b"\xff:\xff")},
    bearer(hashlib.sha256(ALICE.encode()).hexdigest()),
]  # fmt: skip


@pytest.mark.parametrize("headers", WRONG_KEYS)
def test_wrong_keys(guarded: Web, headers: dict[str, str]) -> None:
    check_refused("own", guarded.http.post("/api/jobs", json={"prompt": "x"}, headers=headers), 401)
    assert guarded.engine.asks == []


def test_each_api_asks_for_a_key(guarded: Web) -> None:
    for api, path in APIS.items():
        answer = guarded.http.post(path, json=body_of(api))
        check_refused(api, answer, 401)
        assert answer.headers["www-authenticate"].startswith("Basic" if api == "a1111" else "Bearer")
    assert guarded.engine.asks == []


PRIVATE = ["/api/models", "/v1/models", "/models", "/sdapi/v1/options", "/metrics", "/openapi.json", "/nothing"]


def test_what_needs_no_key(guarded: Web) -> None:
    for path in ("/", "/static/main.js", "/health", "/ready"):
        assert guarded.http.get(path).status_code == 200, path
    for path in PRIVATE:
        assert guarded.http.get(path).status_code == 401, path
    assert guarded.http.options("/v1/images/generations").status_code == 204
    for path in ("/", "/hf", "/models/stub", "/static/main.js", "/health"):
        assert guarded.http.post(path, json={"inputs": "x"}).status_code == 401, path
    assert guarded.engine.asks == []


def test_jobs_that_are_not_over_are_listed(guarded: Web) -> None:
    """To their client."""
    guarded.engine.watched = True  # by nobody, so they stay
    first, second = (guarded.submit(bearer(ALICE))["id"] for _ in range(2))

    def listed(key: str) -> list[str]:
        return [job["id"] for job in guarded.http.get("/api/jobs", headers=bearer(key)).json()["jobs"]]

    assert listed(ALICE) == [first, second]
    assert listed(BOB) == []
    guarded.http.delete(f"/api/jobs/{first}", headers=bearer(ALICE))
    assert listed(ALICE) == [second]
    guarded.http.delete(f"/api/jobs/{second}", headers=bearer(ALICE))
    check_refused("own", guarded.http.get("/api/jobs"), 401)


def keys_in(tmp_path: Path, text: str, encoding: str = "utf-8") -> Keys | None:
    path = tmp_path / "keys.txt"
    path.write_text(text, encoding=encoding)
    path.chmod(0o600)
    return Keys.read(path)


def test_a_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    text = f"# a, b\n\nalice: {ALICE}  # the first\r\nbob:sha256:{digest.upper()}\ncarol:with#hash-and:colon\n"
    keys = keys_in(tmp_path, text, "utf-8-sig")
    assert keys is not None
    assert keys.client("", ALICE) == "alice"
    assert keys.client(f"Bearer {BOB}", "") == "bob"
    assert keys.client("", "with#hash-and:colon") == "carol"
    assert keys.client("", "with") is None
    assert keys.client("", digest) is None
    monkeypatch.setenv("CANVAX_KEYS", "dave:another-long-secret, erin:sha256:" + "00" * 32)
    keys = keys_in(tmp_path, text)
    assert keys is not None
    assert keys.client("", "another-long-secret") == "dave"
    alone = Keys.read(None)
    assert alone is not None
    assert alone.client("", ALICE) is None
    monkeypatch.setenv("CANVAX_KEYS", text)  # as a Secret of that file
    alone = Keys.read(None)
    assert alone is not None
    assert [alone.client("", key) for key in (ALICE, BOB, "with#hash-and:colon")] == ["alice", "bob", "carol"]
    monkeypatch.delenv("CANVAX_KEYS")
    assert Keys.read(None) is None


def test_keys_are_read_again(tmp_path: Path) -> None:
    """A file that is wrong changes nothing: a server does not lose its clients by a slip."""
    keys = keys_in(tmp_path, f"alice:{ALICE}\n")
    assert keys is not None
    keys_in(tmp_path, f"bob:{BOB}\n")
    assert [keys.client("", key) for key in (ALICE, BOB)] == ["alice", None]
    keys.reread()
    assert [keys.client("", key) for key in (ALICE, BOB)] == [None, "bob"]
    for text in ("", "bob"):
        (tmp_path / "keys.txt").write_text(text)
        with pytest.raises(InputError):
            keys.reread()
        assert [keys.client("", key) for key in (ALICE, BOB)] == [None, "bob"]


def test_keys_of_the_variable_cannot_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process does not change, so SIGHUP must not claim a success."""
    monkeypatch.setenv("CANVAX_KEYS", f"alice:{ALICE}")
    keys = Keys.read(None)
    assert keys is not None
    with pytest.raises(InputError):
        keys.reread()
    assert keys.client("", ALICE) == "alice"


@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no modes of files")
def test_a_group_reads_the_keys_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts a Secret so. The group of a user's files may be many others."""
    path = tmp_path / "keys.txt"
    path.write_text(f"alice:{ALICE}\n")
    user = path.stat().st_uid
    for euid, mode, warns in ((user, 0o440, True), (user + 1, 0o440, False), (user + 1, 0o444, True)):
        monkeypatch.setattr(os, "geteuid", lambda euid=euid: euid)
        path.chmod(mode)
        with pytest.warns(UserWarning, match="can read it") if warns else nullcontext():
            assert Keys.read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("alice", "line 1: is not id:key"),
        ("a b:a-long-secret-with-a-name", "is not id:key"),
        ("\nalice:short", "line 2: the key of alice is shorter than 16"),
        ("alice:sha256:abc", "not 64 hexadecimal digits"),
        (f"alice:{ALICE}\nalice:{BOB}", "line 2: there is a key of alice already"),
    ],
)
def test_a_file_of_keys_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as told:
        keys_in(tmp_path, text)
    assert ALICE not in str(told.value)


def test_a_file_of_keys_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Keys.read(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be read"):
        Keys.read(tmp_path)
    (tmp_path / "keys").write_bytes(b"alice:\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff\xfe")
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(InputError, match="it is not text"):
        Keys.read(tmp_path / "keys")
    (tmp_path / "open").write_text(f"alice:{ALICE}")
    (tmp_path / "open").chmod(0o644)
    with pytest.warns(UserWarning, match="others on this machine can read it"):
        Keys.read(tmp_path / "open")


# Other sites.


def test_pages_of_other_sites_may_ask_where_they_are_named(guarded: Web) -> None:
    asked = {"Origin": SHOP, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = guarded.http.options("/api/jobs", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == SHOP
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert {"POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert "access-control-allow-credentials" not in answer.headers
    answer = guarded.http.get("/api/models", headers={"Origin": SHOP} | bearer(ALICE))
    assert answer.headers["access-control-allow-origin"] == SHOP
    assert answer.headers["vary"] == "Origin"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    answer = guarded.http.get("/api/models", headers={"Origin": SHOP})  # its page can read why
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, SHOP)
    guarded.submit({"Origin": SHOP, "Sec-Fetch-Site": "cross-site"} | bearer(ALICE))


def test_hosts(site: Web) -> None:
    assert allowed_hosts("127.0.0.1", ()) == ("localhost", "127.0.0.1", "[::1]")
    assert allowed_hosts("::1", ("Draw.example",)) == ("localhost", "127.0.0.1", "[::1]", "draw.example")
    assert allowed_hosts("0.0.0.0", ("*",))[-1] == "*"
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:7860", "localhost."):
        assert site.http.get("/health", headers={"Host": name}).status_code == 200, name
    with web(Settings(more_hosts=("*",))) as anything:
        assert anything.http.get("/health", headers={"Host": "whatever.example:99"}).status_code == 200


# The page.


def test_the_page_and_its_files(site: Web) -> None:
    for path, kind in {"/": "text/html", "/static/main.js": "text/javascript", "/static/style.css": "text/css",
                       "/static/icon.svg": "image/svg+xml"}.items():  # fmt: skip
        answer = site.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["cache-control"] == "no-cache"
        policy = answer.headers["content-security-policy"]
        for rule in ("default-src 'self'", "script-src 'self'", "object-src 'none'", "frame-ancestors 'none'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in answer.headers or "uvicorn" in answer.headers["server"]  # the command leaves it out
    index = site.http.get("/").text
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', index):
        assert site.http.get(name).status_code == 200, name
    answer = site.http.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_server_without_a_page() -> None:
    with web(Settings(page=False)) as site:
        check_refused("own", site.http.get("/static/main.js"), 404)
        assert site.http.get("/").status_code == 405
        assert site.http.post("/", json={"inputs": "x"}).headers["content-type"] == "image/png"


# Errors.


@pytest.mark.parametrize("where", ["engine", "guard"])
@pytest.mark.parametrize("api", APIS)
def test_a_failure_of_the_server_tells_nothing(
    site: Web, api: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the routes, and before them."""

    def broken(*_: Any) -> None:
        raise RuntimeError(f"/home/someone/secret.py at 0x7f00: {SECRET_PROMPT}")

    with monkeypatch.context() as patch:
        patch.setattr(*((site.engine, "submit") if where == "engine" else (Guard, "_check")), broken)
        answer = site.http.post(APIS[api], json=body_of(api, SECRET_PROMPT))
    check_refused(api, answer, 500)
    assert answer.headers["x-request-id"] in answer.text
    assert not re.search(r"secret|zebra|0x|RuntimeError|\.py", answer.text)
    assert where == "guard" or answer.headers["x-content-type-options"] == "nosniff"
    assert [record for record in caplog.records if record.exc_info]  # the operator learns more


def test_request_ids(site: Web) -> None:
    for sent in ("abc-123", "x" * 128, '"<&>'):
        assert site.http.get("/health", headers={"x-request-id": sent}).headers["x-request-id"] == sent
    for sent in ("", "a b", "x" * 129, "é", "a\tb"):
        answer = site.http.get("/health", headers={"x-request-id": sent.encode()})
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"]), sent
    first, second = (site.http.get("/nothing").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_one_line_of_log_for_each_request(guarded: Web, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "canvax.server")
    headers = {"x-request-id": "mine"} | bearer(ALICE)
    job = guarded.submit(headers, prompt=SECRET_PROMPT, negative_prompt=SECRET_PROMPT)
    guarded.http.get(f"/api/models?key={ALICE}&prompt=zebra", headers={"x-request-id": "refused"})
    guarded.done(job, bearer(ALICE))

    def lines(name: str, value: str) -> list[dict[str, Any]]:
        # By name: a line is written after the answer is sent, so other tests' servers may still be writing theirs.
        told = [json.loads(record.getMessage()) for record in caplog.records if record.name == "canvax.server"]
        return [line for line in told if line.get(name) == value]

    until(lambda: lines("id", "mine") and lines("id", "refused") and lines("outcome", "done"), 30)
    [mine], [refused] = lines("id", "mine"), lines("id", "refused")
    [ended] = [line for line in lines("job", job["id"]) if "outcome" in line]
    assert set(mine) == {"time", "id", "client", "method", "path", "status", "seconds", "job"}
    assert refused["address"] == "127.0.0.1"
    assert mine["job"] == job["id"]
    assert 0 <= mine["seconds"] < 60
    told = {name: mine[name] for name in ("client", "method", "path", "status")}
    assert told == {"client": "alice", "method": "POST", "path": "/api/jobs", "status": 202}
    assert (refused["path"], refused["status"], refused["client"]) == ("/api/models", 401, "")
    assert {"job", "client", "model", "size", "n", "steps", "seed", "outcome", "seconds"} <= set(ended)
    assert not re.search(f"zebra|{ALICE}|\\?", caplog.text)


def test_the_log_has_code_and_argument_of_a_refusal(guarded: Web, caplog: pytest.LogCaptureFixture) -> None:
    """Refusals of the guard, of a route, of an API with another form, and of a job that was accepted."""
    caplog.set_level(logging.INFO, "canvax.server")
    guarded.engine.fails = "out_of_memory", "too large"
    requests = {
        "guard": (("GET", "/api/models"), {}, {}, {"code": "invalid_api_key"}),
        "nothing": (("GET", "/api/nothing"), bearer(ALICE), {}, {"code": "not_found"}),
        "field": (("POST", "/api/jobs"), bearer(ALICE), {"prompt": "x", "steps": 0}, {"param": "steps"}),
        "form": (("POST", "/sdapi/v1/txt2img"), bearer(ALICE), {"steps": "x"}, {"param": "steps"}),
        "failed": (("POST", "/v1/images/generations"), bearer(ALICE), {"prompt": "x"}, {"code": "out_of_memory"}),
    }
    for name, (route, headers, body, _) in requests.items():
        guarded.http.request(*route, json=body, headers={"x-request-id": name} | headers)
    lines: dict[str, Any] = {}

    def read() -> bool:
        told = [json.loads(record.getMessage()) for record in caplog.records if record.name == "canvax.server"]
        lines.update({line["id"]: line for line in told if "id" in line})
        return requests.keys() <= lines.keys()

    until(read, 30)
    for name, (_, _, _, fields) in requests.items():
        assert {"code": "invalid_value"} | fields == {field: lines[name].get(field) for field in ("code", *fields)}
    assert "job" in lines["failed"]


def test_websockets_and_other_scopes_are_not_served() -> None:
    served = app.create_app(StubEngine(), Settings(), state=lambda: State.READY, metrics=Metrics())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(served({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_slow_watcher_hears_the_last_step_of_each_image() -> None:
    """A step takes the place of an unread one of the same image, and of no other image."""

    async def heard_late() -> list[tuple[int, int]]:
        pictures, seen = [Picture(i, i, 64, 64, 4) for i in range(2)], list[tuple[int, int]]()
        job = Job(JobRequest("x", n=2), "stub", pictures, cancel=lambda job: None)
        watch = job.watch()
        await anext(watch)
        for index, step in ((0, 1), (1, 1), (0, 2)):
            job.tell(Stepped(index, step, 4, None))
        await asyncio.sleep(0)
        job.tell(Changed(Status.DONE))
        async for event in watch:
            if isinstance(event, Stepped):
                seen.append((event.index, event.step))
        return seen

    assert asyncio.run(heard_late()) == [(0, 2), (1, 1)]


def test_slow_readers() -> None:
    """Clients that ask and do not read hold nobody up, and miss steps: what is kept for them does not grow."""
    images, steps = 64, 50
    with web(pace=0.002) as site:
        slow = []
        for _ in range(3):
            job = site.submit(n=images, steps=steps, previews=True)
            connection = site.connect()
            connection.sendall(request(site.host, f"GET /api/jobs/{job['id']}/events HTTP/1.1"))
            slow.append((connection, job))
        asked = time.monotonic()
        assert site.done(site.submit())["status"] == "done"
        assert site.http.get("/health").status_code == 200
        assert time.monotonic() - asked < 10
        for _, job in slow:
            assert site.done(job)["status"] == "done"
        for connection, _ in slow:
            said = heard(connection, 10, lambda said: said.endswith(b"\r\n0\r\n\r\n"))
            assert said.count(b"event: image") == images
            assert said.count(b"event: done") == 1
            assert said.count(b"event: step") < images * steps
            connection.close()
