"""Recorded requests of real clients against the server's protocols: the fields that each of them reads are there."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from PIL import Image
from starlette.applications import Starlette

from canvax.images.infotext import to_infotext
from canvax.images.metadata import save_image
from canvax.samplers import find
from canvax.server import a1111, huggingface, openai
from canvax.server.jobs import Job, JobRequest, Rejected, Status
from tests.support.server_stub import CARD, StubEngine
from tests.support.serving import served, until


@dataclass
class Site:
    """A server of the test's own, its engine, and a client for it."""

    base: str
    engine: StubEngine
    http: httpx.Client

    @property
    def ask(self) -> JobRequest:
        """What came in last."""
        return self.engine.asks[-1]

    def post(self, path: str, body: Any = None, **keywords: Any) -> httpx.Response:
        return self.http.post(path, json=body, **keywords) if body is not None else self.http.post(path, **keywords)

    def generate(self, **body: Any) -> httpx.Response:
        return self.post("/v1/images/generations", {"prompt": "a red apple"} | body)


@pytest.fixture(scope="module")
def running() -> Iterator[Site]:
    engine = StubEngine()
    app = Starlette(routes=[*openai.routes(engine), *a1111.routes(engine), *huggingface.routes(engine)])
    with served(app) as base, httpx.Client(base_url=base, timeout=20) as http:
        yield Site(base, engine, http)


@pytest.fixture
def site(running: Site) -> Site:
    """The server with an engine as new."""
    vars(running.engine).update(vars(StubEngine()))
    return running


def picture(kind: str = "PNG", size: tuple[int, int] = (64, 64), mode: str = "RGB", colour: Any = "red") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, colour).save(out, kind)
    return out.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def opened(text: str | bytes) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(text) if isinstance(text, str) else text))
    image.load()
    return image


def events_of(text: str) -> list[Any]:
    """The JSON of each event, and DONE."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return ["DONE" if line == "[DONE]" else json.loads(line) for line in lines]


def half_request(site: Site, path: str, body: Any) -> socket.socket:
    """A connection that sent a request and has not read the answer."""
    where = urlsplit(site.base)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    connection.sendall(head.encode() + content)
    return connection


# OpenAI. Fields, forms and refusals of all dialects are in ``test_server_dialects.py``.


def test_openai_client_identity_and_idempotency_reach_the_engine(site: Site) -> None:
    site.http.post(
        "/v1/images/generations", json={"prompt": "x"}, headers={"x-client": "key1", "Idempotency-Key": "once"}
    )
    assert (site.ask.client, site.ask.once) == ("key1", "once")


def test_openai_sign_of_life_of_sillytavern(site: Site) -> None:
    answer = site.http.options("/v1/images/generations")
    assert answer.status_code == 204
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("n", [1, 2])
def test_openai_stream(site: Site, n: int) -> None:
    site.engine.pace = 0.05
    answer = site.generate(stream=True, partial_images=3, n=n, seed=9, size="64x64")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-canvax-model"] == "stub"
    assert site.ask.previews == 3
    events = events_of(answer.text)
    assert events[-1] == "DONE"
    partials = [event for event in events[:-1] if event["type"] == "image_generation.partial_image"]
    finals = [event for event in events[:-1] if event["type"] == "image_generation.completed"]
    assert partials
    assert all(event["partial_image_index"] in range(3) for event in partials)
    assert all(event["output_format"] == "jpeg" and opened(event["b64_json"]).format == "JPEG" for event in partials)
    assert sorted(event["seed"] for event in finals) == [9, 10][:n]
    for event in finals:
        assert opened(event["b64_json"]).size == (64, 64)
        assert event["usage"]["total_tokens"] == 0
    for event in (*partials, *finals):
        assert (event["size"], event["quality"], event["background"]) == ("64x64", "auto", "opaque")
        assert isinstance(event["created_at"], int)


def test_openai_stream_without_partial_images_is_one_event(site: Site) -> None:
    events = events_of(site.generate(stream=True).text)
    assert [event if event == "DONE" else event["type"] for event in events] == ["image_generation.completed", "DONE"]


def test_openai_stream_of_a_job_that_was_done_before_anyone_watched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(ask: JobRequest) -> Job:
        job = StubEngine.submit(site.engine, ask)
        until(lambda: job.status.over)
        return job

    monkeypatch.setattr(site.engine, "submit", submit)
    events = events_of(site.generate(stream=True, n=2).text)
    assert [event["seed"] for event in events[:-1]] == [1234, 1235]
    assert len(site.generate(n=2).json()["data"]) == 2


def test_openai_stream_says_that_it_is_alive(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvax.server.answers.PAUSE", 0.05)
    site.engine.pace = 0.2
    text = site.generate(stream=True).text
    assert ": keepalive\n\n" in text
    assert events_of(text)[-1] == "DONE"


def test_openai_stream_reports_a_failure_as_an_error(site: Site) -> None:
    site.engine.fails = ("server_error", "the device is gone")
    *_, failed, last = events_of(site.generate(stream=True).text)
    assert failed["error"] == {"message": "the device is gone", "type": "server_error", "param": None,
                               "code": "server_error"}  # fmt: skip
    assert last == "DONE"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/generations", {"prompt": "x", "steps": 100}),
        ("/v1/images/generations", {"prompt": "x", "steps": 100, "stream": True}),
        ("/sdapi/v1/txt2img", {"prompt": "x", "steps": 100}),
        ("/hf", {"inputs": "x", "parameters": {"num_inference_steps": 100}}),
    ],
)
def test_a_job_is_cancelled_when_the_client_goes(site: Site, path: str, body: dict[str, Any]) -> None:
    site.engine.pace = 0.3
    connection = half_request(site, path, body)
    until(lambda: any(job.status is Status.RUNNING for job in site.engine.jobs()))
    connection.close()
    until(lambda: not site.engine.jobs(), 3)
    assert site.engine.accepted[0].status is Status.CANCELLED


def test_openai_job_with_a_key_of_its_own_goes_on(site: Site) -> None:
    site.engine.pace = 0.1
    with pytest.raises(httpx.ReadTimeout):
        site.post("/v1/images/generations", {"prompt": "x"}, headers={"Idempotency-Key": "k"}, timeout=0.2)
    until(lambda: not site.engine.jobs())
    assert site.engine.accepted[0].status is Status.DONE


EDIT = {"prompt": "a green apple", "n": "1", "model": "gpt-image-2", "seed": "4", "strength": "0.5", "size": "auto"}


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_openai_edit(site: Site, name: str) -> None:
    answer = site.post("/v1/images/edits", data=EDIT, files=[(name, ("../x.png", picture(), "text/html"))])
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["seed"] == 4
    ask = site.ask
    assert ask.image
    assert (ask.prompt, ask.seed, ask.strength, ask.width, ask.height) == ("a green apple", 4, 0.5, 64, 64)
    assert (ask.image.mode, ask.image.size, ask.mask) == ("RGB", (64, 64), None)


def test_openai_transparent_parts_of_a_mask_are_white(site: Site) -> None:
    mask = Image.new("RGBA", (64, 64), "black")
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64))
    out = io.BytesIO()
    mask.save(out, "PNG")
    files = [("image", ("a.png", picture())), ("mask", ("m.png", out.getvalue()))]
    answer = site.post("/v1/images/edits", data=EDIT | {"stream": "true"}, files=files)
    assert [event["type"] for event in events_of(answer.text)[:-1]] == ["image_edit.completed"]
    assert site.ask.mask
    assert (site.ask.mask.mode, site.ask.mask.getpixel((0, 0)), site.ask.mask.getpixel((63, 0))) == ("L", 255, 0)


@pytest.mark.parametrize(("size", "asked"), [((64, 64), (64, 64)), ((600, 400), (96, 64)), ((90, 100), (64, 64))])
def test_openai_edit_takes_the_nearest_size_for_an_image(site: Site, size: Any, asked: Any) -> None:
    site.post("/v1/images/edits", data={"prompt": "x"}, files=[("image", ("a.png", picture(size=size)))])
    assert (site.ask.width, site.ask.height) == asked


ANIMATED = io.BytesIO()
Image.new("RGB", (8, 8)).save(ANIMATED, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])


def test_openai_edits_are_refused_that_lack_a_part(site: Site) -> None:
    def param(files: Any, **fields: str) -> str:
        answer = site.post("/v1/images/edits", data={"prompt": "x"} | fields, files=files)
        assert answer.status_code == 400
        return answer.json()["error"]["param"]

    one = ("image", ("a.png", picture()))
    assert param([("other", ("a.png", b"x"))]) == "image"
    assert param([one, one]) == "image"
    assert param([one, ("mask", ("m.png", picture(size=(32, 32))))]) == "mask"
    assert param([one, ("mask", ("m.png", picture()))]) == "mask"  # opaque
    assert param([one], n="x") == "n"
    assert param([one], prompt="") == "prompt"
    assert param([one], options="{") == "options"
    assert param([one], adapters="{") == "adapters"
    assert param([one, ("n", ("n.txt", b"2"))]) == "n"
    assert param([("x", ("a.png", b"x"))], image="http://169.254.169.254/") == "image"


def test_errors_do_not_repeat_what_was_sent(site: Site) -> None:
    for body in (b'{"x": ' + b"[" * 100_000 + b"}", b'{"prompt": "x", "n": 1' + b"0" * 5000 + b"}"):
        answer = site.post("/v1/images/generations", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, len(answer.content) < 1000) == (400, True)
    assert site.post("/hf", {"inputs": "x" * 40_000}).json()["param"] == "inputs"
    assert len(site.generate(output_format="x" * 100_000).content) < 1000
    assert len(site.generate(size="9" * 100_000).content) < 1000
    assert len(site.post("/sdapi/v1/txt2img", {"sampler_name": "x" * 100_000}).content) < 1000


def test_openai_errors(site: Site) -> None:
    site.engine.refusal = Rejected(429, "queue_full", "the queue is full", retry_after=2.4)
    full = site.generate()
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert full.json()["error"]["type"] == "rate_limit_error"
    site.engine.refusal = Rejected(400, "size_not_ready", "not this size", param="width")
    assert site.generate(stream=True).json()["error"]["param"] == "size"
    site.engine.refusal = None
    site.engine.fails = ("timeout", "it took too long")
    late = site.generate()
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
    assert late.json()["error"]["type"] == "server_error"
    assert site.post("/v1/images/variations").status_code == 404
    assert site.post("/v1/images/generations", data={"prompt": "x"}).status_code == 415
    assert site.post("/v1/images/edits", {"prompt": "x"}).status_code == 415
    broken = site.http.post("/v1/images/edits", content=b"x", headers={"Content-Type": "multipart/form-data"})
    assert broken.status_code == 400
    part = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx'
    cut = site.http.post("/v1/images/edits", content=part, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert "ends in the middle" in cut.json()["error"]["message"]


def test_openai_cancelled_by_another_hand(site: Site) -> None:
    site.engine.pace = 0.1
    threading.Timer(0.3, lambda: [job.cancel() for job in site.engine.jobs()]).start()
    answer = site.generate()
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert answer.json()["error"]["code"] == "cancelled"


# AUTOMATIC1111

OPEN_WEBUI = {"prompt": "a red apple", "batch_size": 2, "width": 64, "height": 64, "steps": 3, "negative_prompt": "b"}
SILLYTAVERN = {
    "url": "http://127.0.0.1:7860", "auth": "user:password", "prompt": "a red apple", "negative_prompt": "blurry",
    "sampler_name": "DPM++ 2M", "scheduler": "Karras", "steps": 3, "cfg_scale": 7, "width": 64, "height": 64,
    "restore_faces": False, "enable_hr": False, "hr_upscaler": "Latent", "hr_scale": 2, "hr_additional_modules": [],
    "denoising_strength": 0.7, "hr_second_pass_steps": 0, "seed": 5,
    "override_settings": {"CLIP_stop_at_last_layers": 2, "sd_vae": "Automatic", "forge_additional_modules": []},
    "override_settings_restore_afterwards": True, "clip_skip": 2, "save_images": True, "send_images": True,
    "do_not_save_grid": False, "do_not_save_samples": False,
}  # fmt: skip
WEBUIAPI = {
    "enable_hr": False, "hr_scale": 2, "hr_upscaler": "Latent", "hr_second_pass_steps": 0, "hr_resize_x": 0,
    "hr_resize_y": 0, "hr_checkpoint_name": None, "hr_sampler_name": None, "hr_scheduler": None, "hr_prompt": "",
    "hr_negative_prompt": "", "denoising_strength": 0.7, "firstphase_width": 0, "firstphase_height": 0,
    "prompt": "a red apple", "styles": [], "seed": 1003, "subseed": -1, "subseed_strength": 0.0,
    "seed_resize_from_h": 0, "seed_resize_from_w": 0, "batch_size": 1, "n_iter": 2, "steps": 3, "cfg_scale": 7.0,
    "width": 64, "height": 64, "restore_faces": False, "tiling": False, "do_not_save_samples": False,
    "do_not_save_grid": False, "negative_prompt": "", "eta": 1.0, "s_churn": 0, "s_tmax": 0, "s_tmin": 0, "s_noise": 1,
    "override_settings": {}, "override_settings_restore_afterwards": True, "sampler_name": "DDIM",
    "scheduler": "automatic", "sampler_index": "Euler a", "script_name": None, "script_args": [], "send_images": True,
    "save_images": False, "alwayson_scripts": {},
}  # fmt: skip


@pytest.mark.parametrize("automatic", [{}, {"scheduler": "Automatic"}, {"scheduler": None}], ids=str)
@pytest.mark.parametrize(
    ("sampler", "curve"),
    [("DPM++ 2M", "karras"), ("DPM++ 2M SDE", "exponential"), ("DPM++ 2M SDE Heun", "exponential"), ("Euler", None),
     ("DPM++ 2M Exponential", "exponential")],
)  # fmt: skip
def test_a1111_schedule_of_the_sampler(site: Site, sampler: str, curve: str | None, automatic: dict[str, Any]) -> None:
    """Without a scheduler A1111 takes the curve of the sampler."""
    body = {"prompt": "a", "sampler_name": sampler, **automatic}
    info = json.loads(site.post("/sdapi/v1/txt2img", body).json()["info"])
    assert find(site.ask.sampler or "")[1].get("sigmas") == curve
    assert info["extra_generation_params"].get("Schedule type", "").lower() == (curve or "")
    site.post("/sdapi/v1/txt2img", {**body, "sampler_name": "Euler", "hr_sampler_name": sampler, "enable_hr": True})
    assert find(site.ask.options["hires_sampler"])[1].get("sigmas") == curve


def test_a1111_schedule_that_is_named(site: Site) -> None:
    site.post("/sdapi/v1/txt2img", {"prompt": "a", "sampler_name": "DPM++ 2M", "scheduler": "Uniform"})
    assert (site.ask.sampler, site.ask.options["sigmas"]) == ("DPM++ 2M", "normal")


def test_a1111_schedule_of_other_models(site: Site) -> None:
    """A flow model, which A1111 does not load, has its levels."""
    site.engine.cards = (dataclasses.replace(CARD, prompt_weights=False),)
    site.post("/sdapi/v1/txt2img", {"prompt": "a", "sampler_name": "DPM++ 2M"})
    assert site.ask.sampler == "DPM++ 2M"


def test_a1111_options_fit_canvax(site: Site) -> None:
    """What is asked of the engine are options that exist."""
    from canvax import Options

    files = {"init_images": [b64(picture())], "mask": b64(picture(mode="L", colour=255))}
    extra = {"subseed_strength": 0.1, "seed_resize_from_h": 64, "seed_resize_from_w": 96, "s_churn": 3, "eta": 0.1}
    for fill in range(4):
        body = SILLYTAVERN | files | extra | {"inpainting_fill": fill, "sampler_name": "Euler a"}
        assert site.post("/sdapi/v1/img2img", body).status_code == 200
        Options(**site.ask.options)


def test_a1111_image_to_image(site: Site) -> None:
    body = WEBUIAPI | {"init_images": ["data:image/png;base64," + b64(picture())], "denoising_strength": 0.4}
    told = site.post("/sdapi/v1/img2img", body).json()
    assert json.loads(told["info"])["denoising_strength"] == 0.4
    assert "init_images" not in told["parameters"]
    back = site.post("/sdapi/v1/img2img", body | {"include_init_images": True}).json()["parameters"]
    assert back["init_images"] == body["init_images"]
    assert site.ask.image
    assert (site.ask.image.size, site.ask.mask, site.ask.strength) == ((64, 64), None, 0.4)
    assert site.ask.options == {"prompt_syntax": "a1111", "strength_rule": "a1111"}
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (0, 0, 16, 32))
    out = io.BytesIO()
    mask.save(out, "PNG")
    body |= {"mask": b64(out.getvalue()), "mask_blur": 2, "inpainting_fill": 2, "inpaint_full_res": True,
             "inpaint_full_res_padding": 8}  # fmt: skip
    assert site.post("/sdapi/v1/img2img", body | {"inpainting_mask_invert": 1}).status_code == 200
    assert site.ask.mask
    assert (site.ask.mask.size, site.ask.mask.getpixel((0, 0)), site.ask.mask.getpixel((63, 0))) == ((64, 64), 0, 255)
    wanted = {"mask_blur": 2, "mask_fill": "noise", "padding_mask_crop": 8}
    assert site.ask.options == {"prompt_syntax": "a1111", "strength_rule": "a1111", **wanted}
    site.post("/sdapi/v1/img2img", body | {"inpaint_full_res": False})
    assert "padding_mask_crop" not in site.ask.options
    assert site.ask.lenient  # as at strength 1, where noise is what it begins from anyway
    site.post("/sdapi/v1/img2img", body | {"denoising_strength": 0})
    assert site.ask.strength == 0.001  # as there, where the last step is run all the same


HIRES = {"enable_hr": True, "hr_scale": 1.5, "denoising_strength": 0.4, "hr_second_pass_steps": 7}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"hires": 1.5, "hires_method": "latent", "hires_strength": 0.4, "hires_steps": 7}),
        ({"hr_upscaler": "Lanczos", "hr_second_pass_steps": 0, "denoising_strength": None, "hr_scale": None},
         {"hires": 2.0, "hires_method": "pixel", "hires_strength": 0.75}),
        ({"hr_resize_x": 96, "hr_resize_y": 96, "hr_sampler_name": "Euler", "hr_prompt": "a pear",
          "hr_scheduler": "Automatic"},
         {"hires": 1.5, "hires_method": "latent", "hires_strength": 0.4, "hires_steps": 7, "hires_sampler": "Euler",
          "hires_prompt": "a pear"}),
        ({"hr_scale": 1.0}, {}),
    ],
)  # fmt: skip
def test_a1111_hires_fix(site: Site, changes: dict[str, Any], options: dict[str, Any]) -> None:
    from canvax import Options

    assert site.post("/sdapi/v1/txt2img", WEBUIAPI | HIRES | changes).status_code == 200
    assert site.ask.options == {"prompt_syntax": "a1111"} | options
    Options(**site.ask.options)


@pytest.mark.parametrize(
    "name", ["hr_upscaler", "hr_scheduler", "hr_checkpoint_name", "hr_negative_prompt", "hr_resize_x"]
)
def test_a1111_hires_fix_that_is_not_there(site: Site, name: str) -> None:
    value = {"hr_resize_x": 96, "hr_resize_y": 64} if name == "hr_resize_x" else {name: "4x-UltraSharp"}
    answer = site.post("/sdapi/v1/txt2img", WEBUIAPI | HIRES | value)
    assert (answer.status_code, answer.json()["body"]) == (422, name)


def test_a1111_extra_single_image(site: Site) -> None:
    body = {"image": b64(picture()), "upscaling_resize": 2, "upscaler_1": "SD upscale", "gfpgan_visibility": 0}
    answer = site.post("/sdapi/v1/extra-single-image", body)
    assert opened(answer.json()["image"]).size == (128, 128)
    assert (site.ask.upscale, site.ask.prompt, site.ask.strength) == (2.0, "", 0.3)
    for name, value in (("codeformer_visibility", 1), ("extras_upscaler_2_visibility", 0.5), ("upscaler_1", "4x+")):
        answer = site.post("/sdapi/v1/extra-single-image", body | {name: value})
        assert (answer.status_code, answer.json()["body"]) == (422, name)


@pytest.mark.parametrize("upscaler", ["None", "Lanczos", "Nearest", "nearest"])
def test_a1111_resizes_without_a_model(site: Site, upscaler: str) -> None:
    asked, image = len(site.engine.asks), Image.new("RGB", (8, 8))
    image.putpixel((3, 3), (255, 255, 255))
    out = io.BytesIO()
    image.save(out, "PNG")
    body = {"image": b64(out.getvalue()), "upscaling_resize": 2.5, "upscaler_1": upscaler}
    larger = opened(site.post("/sdapi/v1/extra-single-image", body).json()["image"])
    assert larger.size == (20, 20)
    assert (len(larger.getcolors(400)) == 2) == (upscaler.lower() == "nearest")
    assert len(site.engine.asks) == asked
    body |= {"image": b64(picture(size=(4000, 2000))), "upscaling_resize": 8}
    assert site.post("/sdapi/v1/extra-single-image", body).json()["body"] == "upscaling_resize"


def test_a1111_crops_to_the_size(site: Site) -> None:
    wide = Image.new("RGB", (128, 64), "red")
    wide.paste((0, 0, 255), (32, 0, 96, 64))
    out = io.BytesIO()
    wide.save(out, "PNG")
    for size in ({"width": 64, "height": 64}, {"width": 64}):
        site.post("/sdapi/v1/img2img", {"init_images": [b64(out.getvalue())], "resize_mode": 1} | size)
        assert site.ask.image
        assert site.ask.image.getcolors() == [(64 * 64, (0, 0, 255))]


def test_a1111_lists(site: Site) -> None:
    def get(name: str) -> Any:
        answer = site.http.get(f"/sdapi/v1/{name}", headers={"Authorization": "Basic dXNlcjpwYXNz"})
        assert answer.status_code == 200
        return answer.json()

    assert get("options")["sd_model_checkpoint"] == get("sd-models")[0]["title"]
    assert "forge_preset" not in get("options")  # by which SillyTavern tells another server
    assert {"title", "model_name", "hash", "sha256", "filename"} <= get("sd-models")[0].keys()
    names = [sampler["name"] for sampler in get("samplers")]
    assert {"Euler a", "DPM++ 2M", "DDIM"} <= set(names)
    assert {"name", "label"} <= get("schedulers")[0].keys()
    assert "Karras" in [scheduler["label"] for scheduler in get("schedulers")]
    assert get("scripts") == {"txt2img": [], "img2img": []}
    assert {kind: list(words) for kind, words in get("embeddings").items()} == {"loaded": ["wool"], "skipped": ["yarn"]}
    assert [upscaler["name"] for upscaler in get("upscalers")] == ["None", "Lanczos", "Nearest", "SD upscale"]
    assert get("latent-upscale-modes") == [{"name": "Latent"}]
    for name in ("sd-vae", "sd-modules", "hypernetworks", "prompt-styles",
                 "face-restorers", "realesrgan-models", "script-info"):  # fmt: skip
        assert get(name) == []
    assert get("loras") == [{"name": "ink", "alias": "ink-v1", "path": "ink.safetensors", "metadata": {}}]
    assert get("cmd-flags") == {}
    assert get("memory").keys() == {"ram", "cuda"}
    assert site.post("/sdapi/v1/refresh-checkpoints").json() is None
    for name in names:  # every name that is listed is taken
        assert site.post("/sdapi/v1/txt2img", {"prompt": "x", "steps": 1, "sampler_name": name}).status_code == 200
    for scheduler in get("schedulers"):
        body = {"prompt": "x", "steps": 1, "scheduler": scheduler["label"]}
        assert site.post("/sdapi/v1/txt2img", body).status_code == 200


def test_a1111_model_is_chosen_as_open_webui_does(site: Site) -> None:
    options = site.http.get("/sdapi/v1/options").json()
    title = site.http.get("/sdapi/v1/sd-models").json()[0]["title"]
    assert site.post("/sdapi/v1/options", options | {"sd_model_checkpoint": title}).status_code == 200
    told = site.post("/sdapi/v1/options", options | {"sd_model_checkpoint": "../../etc/passwd"})
    assert told.status_code == 404
    assert told.json().keys() == {"error", "detail", "body", "errors"}


def test_a1111_clip_skip_is_kept(site: Site) -> None:
    """For later requests of the client, unless they have another."""

    def skipped(**body: Any) -> int:
        assert site.post("/sdapi/v1/txt2img", {"prompt": "x", **body}).status_code == 200
        return site.ask.options.get("clip_skip", 0)

    def choose(layers: Any) -> int:
        return site.post("/sdapi/v1/options", {"CLIP_stop_at_last_layers": layers}).status_code

    try:
        assert choose(2) == 200
        assert site.http.get("/sdapi/v1/options").json()["CLIP_stop_at_last_layers"] == 2
        assert skipped() == 1
        assert skipped(clip_skip=1) == 0
        assert skipped(override_settings={"CLIP_stop_at_last_layers": 3}) == 2
        assert [choose(layers) for layers in (13, -1, "two")] == [422, 422, 422]
        site.engine.cards = (dataclasses.replace(CARD, clip_skip=0),)
        assert skipped() == 0
        assert choose(2) == 200  # as clients send back what they read
        site.engine.cards = (CARD,)
    finally:
        choose(1)
    assert skipped() == 0


@pytest.mark.parametrize(
    ("name", "plain", "other"),
    [("eta_noise_seed_delta", 0, 31337), ("sd_hypernetwork", "None", "anime"), ("randn_source", "GPU", "NV"),
     ("img2img_color_correction", False, True)],
)  # fmt: skip
def test_a1111_settings_that_are_not_applied(site: Site, name: str, plain: Any, other: Any) -> None:
    answer = site.post("/sdapi/v1/options", {name: other})
    assert (answer.status_code, answer.json()["body"]) == (422, name)
    assert site.post("/sdapi/v1/options", {name: plain, "grid_format": "png"}).status_code == 200
    for value in (plain, other):
        answer = site.post("/sdapi/v1/txt2img", {"prompt": "x", "override_settings": {name: value}})
        assert ("hints" in json.loads(answer.json()["info"])) == (value is other)


def test_a1111_progress_shows_the_image_on_its_way(site: Site) -> None:
    idle = site.http.get("/sdapi/v1/progress").json()
    assert (idle["progress"], idle["state"]["job_count"], idle["current_image"]) == (0.0, 0, None)
    site.engine.pace = 0.15
    told: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: told.append(site.post("/sdapi/v1/txt2img", OPEN_WEBUI | {"steps": 8})))
    thread.start()
    seen = []
    until(lambda: seen.append(site.http.get("/sdapi/v1/progress").json()) or seen[-1]["current_image"])
    progress = seen[-1]
    assert opened(progress["current_image"]).size == (16, 16)
    assert 0 < progress["progress"] < 1
    assert (progress["state"]["job_count"], progress["state"]["sampling_steps"]) == (2, 8)
    assert 1 <= progress["state"]["sampling_step"] <= 8
    hidden = site.http.get("/sdapi/v1/progress", params={"skip_current_image": "true"}).json()
    assert hidden["current_image"] is None
    assert site.http.get("/sdapi/v1/progress", params={"skip_current_image": "maybe"}).status_code == 422
    assert site.http.get("/sdapi/v1/progress", headers={"x-client": "other"}).json()["state"]["job_count"] == 0
    thread.join()
    assert len(told[0].json()["images"]) == 2
    assert site.http.get("/sdapi/v1/progress").json()["progress"] == 0.0


def test_previews_are_for_who_asks_for_them(site: Site) -> None:
    site.engine.pace = 0.15
    thread = threading.Thread(target=lambda: site.post("/sdapi/v1/txt2img", OPEN_WEBUI | {"steps": 8}))
    thread.start()
    until(lambda: site.engine.accepted)
    (job,) = site.engine.accepted
    until(lambda: job._watchers)  # which waits for the end
    assert not job.looked_at
    site.http.get("/sdapi/v1/progress", params={"skip_current_image": "true"})
    assert not job.looked_at
    site.http.get("/sdapi/v1/progress")
    assert job.looked_at
    job.cancel()
    thread.join()


@pytest.mark.parametrize("word", ["interrupt", "skip"])
def test_a1111_interrupt(site: Site, word: str) -> None:
    site.engine.pace = 0.1
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(site.post, "/sdapi/v1/txt2img", OPEN_WEBUI | {"steps": 90})
        until(lambda: site.http.get("/sdapi/v1/progress").json()["progress"] > 0)
        assert site.post(f"/sdapi/v1/{word}", headers={"x-client": "other"}).status_code == 200
        assert not site.engine.accepted[-1].status.over  # which is another's
        assert site.post(f"/sdapi/v1/{word}").json() == {}
        answer = asked.result(5)
    assert (answer.status_code, answer.json()["images"]) == (200, [])
    assert json.loads(answer.json()["info"])["all_seeds"] == []


@pytest.mark.parametrize("word", ["interrupt", "skip"])
def test_a1111_interrupt_leaves_what_is_done(site: Site, word: str) -> None:
    site.engine.pace = 0.1
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(site.post, "/sdapi/v1/txt2img", OPEN_WEBUI | {"steps": 90})
        until(lambda: site.http.get("/sdapi/v1/progress").json()["progress"] > 0)
        job = site.engine.accepted[-1]
        job.pictures[0].data, job.pictures[0].status = picture(), Status.DONE
        site.post(f"/sdapi/v1/{word}")
        answer = asked.result(5).json()
    assert [opened(image).size for image in answer["images"]] == [(64, 64)]
    assert json.loads(answer["info"])["all_seeds"] == [job.pictures[0].seed]


LAYERS = "in override_settings it is called CLIP_stop_at_last_layers"


def test_a1111_errors(site: Site) -> None:
    site.engine.refusal = Rejected(503, "draining", "the server stops", retry_after=5)
    answer = site.post("/sdapi/v1/txt2img", OPEN_WEBUI)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    for said, param, field, told in (
        ("n=100 is too many", "n", "batch_size", "batch_size=100 is too many"),
        ("options.variation_seed=-1 is none", "options", "subseed", "subseed=-1 is none"),
        ("options.clip_skip=12 is not in 0..11", "options", "clip_skip", f"clip_skip=13 is not in 1..12; {LAYERS}"),
    ):
        site.engine.refusal = Rejected(400, "invalid_value", said, param=param)
        answer = site.post("/sdapi/v1/txt2img", OPEN_WEBUI).json()
        assert (answer["body"], answer["detail"]) == (field, told)
    site.engine.refusal = None
    site.engine.fails = ("server_error", "the device is gone")
    answer = site.post("/sdapi/v1/txt2img", OPEN_WEBUI)
    assert (answer.status_code, answer.json()["detail"]) == (500, "the device is gone")
    asked = a1111.error(Rejected(401, "invalid_api_key", "no"), "r").headers["www-authenticate"]
    assert asked.startswith("Basic")


def test_a1111_png_info(site: Site, tmp_path: Path) -> None:
    metadata = {"prompt": "a red apple", "num_inference_steps": 3, "sampler_label": "Euler a", "guidance_scale": 7.0,
                "seed": 5, "width": 64, "height": 64, "model": "stub", "options": {"clip_skip": 1}}  # fmt: skip
    for name in ("a.png", "a.jpg", "a.webp"):
        path = save_image(tmp_path / name, Image.new("RGB", (64, 64)), metadata)
        told = site.post("/sdapi/v1/png-info", {"image": "data:image/png;base64," + b64(path.read_bytes())}).json()
        assert told["info"] == told["items"]["parameters"] == to_infotext(metadata)
        assert (told["parameters"]["Seed"], told["parameters"]["Size-1"]) == ("5", "64")
        assert told["parameters"]["Clip skip"] == "2"
    assert site.post("/sdapi/v1/png-info", {"image": b64(picture())}).json()["info"] == ""
    assert site.post("/sdapi/v1/png-info", {"image": "http://127.0.0.1/"}).json()["body"] == "image"
    assert site.post("/sdapi/v1/png-info", {"image": b64(b"x")}).status_code == 422


# Hugging Face


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_hf_image_to_image(site: Site, kind: str) -> None:
    content = b64(picture(kind))
    parameters = {"prompt": "a green apple", "strength": 0.5, "target_size": {"width": 96, "height": 64}}
    parameters["options"] = {"clip_skip": 1}
    assert site.post("/hf", {"inputs": content, "parameters": parameters}).status_code == 200
    assert site.ask.image
    assert site.ask.options == {"clip_skip": 1}
    assert (site.ask.prompt, site.ask.strength, site.ask.image.size) == ("a green apple", 0.5, (64, 64))
    assert (site.ask.width, site.ask.height) == (96, 64)
    assert site.post("/hf", {"inputs": content}).status_code == 200
    assert site.ask.image
    raw = site.http.post("/hf", content=picture(kind), headers={"Content-Type": f"image/{kind.lower()}"})
    assert raw.status_code == 200
    assert site.ask.image


def test_hf_errors(site: Site) -> None:
    assert site.post("/models/black-forest-labs/FLUX.1-dev", {"inputs": "x"}).status_code == 404
    assert site.http.get("/models").json()["object"] == "list"
    site.engine.refusal = Rejected(429, "queue_full", "the queue is full", retry_after=2)
    answer = site.post("/hf", {"inputs": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"] == "the queue is full"
