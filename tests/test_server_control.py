"""Control images and image prompts of a server's clients: by request, in one batch, and nothing compiles for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.cli.arguments import parse
from canvax.cli.loading import load_of, load_with
from canvax.compile.monitor import counting
from canvax.scale.serve import Images, ServeArgs
from canvax.server.adapter_cache import AdapterSettings
from canvax.server.control import cards, publicly
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.job_store import JobStore
from canvax.server.jobs import Job, JobRequest, Picture, PromptImage, Rejected, Status
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.models import Warm
from canvax.server.work import check
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.control_files import adapter, controlnet, union
from tests.support.ip_adapter_files import encoder, ip_adapter
from tests.support.serving import asked, b64, by_job, some_colours
from tests.support.small_checkpoint import UNET, write_small_checkpoint
from tests.support.small_sdxl import build

BODY = {"prompt": "a cat", "seed": 3, "steps": 4, "width": 64, "height": 64}
QUIET = canvax.Options(progress=False)


def left() -> Image.Image:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :32] = 255
    return Image.fromarray(mask)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def pipe(root: Path) -> canvax.Pipeline:
    """A small random model with a ControlNet, a T2I-Adapter and two IP-Adapters."""
    base = canvax.load(write_small_checkpoint(root / "base"), mesh=canvax.make_mesh(jax.devices()[:1]))
    nets = [controlnet(root / "edges", base, strength=0.5, sees=30.0), adapter(root / "colours", base)]
    encoder(root / "ip" / "image_encoder")
    prompts = [ip_adapter(root / "ip" / f"{kind}.safetensors", kind, UNET) for kind in ("plain", "plus")]
    return base.with_controlnet(nets).with_ip_adapter(prompts)


@pytest.fixture(scope="module")
def server(pipe: canvax.Pipeline) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    settings = EngineSettings(warm=(Warm(None, (1, 4)),))
    with asked(settings, load=lambda name: pipe) as server:
        yield server


def drawn(client: httpx.Client, **more: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """An image of canvax's own API, and its metadata."""
    return by_job(client, BODY | more)


ONE, TWO = some_colours(1), some_colours(2)
CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"control": [b64(ONE), None]}, {"control": [ONE, None]}),
    ({"control": [None, b64(TWO)], "control_scale": 0.7}, {"control": [None, TWO], "control_scale": 0.7}),
    (
        {"control": [b64(TWO), b64(ONE)], "control_scale": [0.5, 1], "control_end": [0.5, 1], "control_mode": "guess"},
        {"control": [TWO, ONE], "control_scale": (0.5, 1), "control_end": (0.5, 1), "control_mode": "guess"},
    ),
    ({"guidance_scale": 1.0}, {"guidance_scale": 1.0}),
    ({"control": [b64(ONE), None], "guidance_scale": 1.0}, {"control": [ONE, None], "guidance_scale": 1.0}),
    ({"image": b64(TWO), "strength": 0.75, "control": [b64(ONE), None], "control_start": 0.4},
     {"image": TWO, "strength": 0.75, "control": [ONE, None], "control_start": 0.4}),
    ({"image_prompt": b64(ONE)}, {"image_prompt": ONE}),
    ({"image_prompt": {"image": b64(ONE), "scale": 0.5, "mask": b64(left()), "adapter": 1}},
     {"image_prompt": canvax.ImagePrompt(ONE, 0.5, left(), 1)}),
    ({"image_prompt": [{"image": b64(ONE), "scale": {"down": 0.5}}, {"image": b64(TWO), "adapter": 1}],
      "control": [None, b64(ONE)]},
     {"image_prompt": [canvax.ImagePrompt(ONE, {"down": 0.5}), canvax.ImagePrompt(TWO, adapter=1)],
      "control": [None, ONE]}),
    ({"prompt": "a [cat:dog:0.5]", "options": {"prompt_syntax": "a1111"}, "control": [b64(TWO), None]},
     {"prompt": "a [cat:dog:0.5]", "prompt_syntax": "a1111", "control": [TWO, None]}),
]  # fmt: skip


def called(pipe: canvax.Pipeline, **more: Any) -> np.ndarray:
    """What the pipeline itself generates."""
    call = {"prompt": "a cat", "num_inference_steps": 4, "height": 64, "width": 64, **more}
    return np.asarray(pipe(**call, seed=3, progress=False)[0], np.int16)


@pytest.mark.parametrize("some", [(0, 3, 9), pytest.param(range(len(CALLS)), marks=pytest.mark.weekly)])
@pytest.mark.slow
def test_each_request_has_its_own(
    some: Sequence[int], server: tuple[httpx.Client, ImageEngine], pipe: canvax.Pipeline
) -> None:
    """All at once, with images and without: the pixels of the pipeline, and nothing compiled."""
    client, engine = server
    calls = [CALLS[i] for i in some]
    expected = [called(pipe, **call) for _, call in calls]
    with counting() as counts, ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(lambda one: drawn(client, **one[0]), calls))
    assert counts.compilations == 0
    assert len(engine._models.groups()) == 1
    for i, ((pixels, _), wanted) in enumerate(zip(found, expected, strict=True)):
        assert np.abs(pixels - wanted).max() <= 2, i
        assert all(np.abs(wanted - other).max() > 4 for other in expected[:i]), i
    told = found[list(some).index(3)][1]
    assert told["controlnet"] == ["edges", "colours"]  # not where the operator keeps them
    assert len(told["control_sha256"]) == 2
    assert told["options"]["control_scale"] == [0.5, 1]
    told = found[list(some).index(9)][1]
    assert [one["adapter"] for one in told["image_prompts"]] == [0, 1]
    assert told["ip_adapter"] == ["plain", "plus"]


@pytest.mark.slow
def test_larger_by_tiles(server: tuple[httpx.Client, ImageEngine], pipe: canvax.Pipeline) -> None:
    """Each tile is its own control image."""
    large = {"image": b64(some_colours(5, (72, 64))), "upscale": 1.25, "strength": 0.5, "width": None, "height": None}
    with counting() as counts:
        found, told = drawn(server[0], **large, control=True, control_scale=[0.7, 0.4])
        plain, _ = drawn(server[0], **large)
    assert counts.compilations == 0
    call = {"scale": 1.25, "strength": 0.5, "seed": 3, "num_inference_steps": 4, "batch": 1}
    options = canvax.Options(progress=False, control_scale=(0.7, 0.4))
    wanted = pipe.upscale(some_colours(5, (72, 64)), "a cat", options=options, control=True, **call)
    assert found.shape == (80, 90, 3)
    assert np.abs(found - np.asarray(wanted[0], np.int16)).max() <= 3
    assert np.abs(found - plain).max() > 8
    assert "control_sha256" not in told


@pytest.mark.weekly
def test_types_adapters_and_several_prompts(tmp_path: Path) -> None:
    """SDXL with a ControlNet-Union beside LoRAs of clients; and what has no programs yet waits for them, if it may."""
    base = canvax.load(build(tmp_path / "sdxl"), dtype="float32", mesh=canvax.make_mesh(jax.devices()[:1]))
    net = union(tmp_path / "all", base, sees=30.0)
    encoder(tmp_path / "ip" / "image_encoder")
    prompts = ip_adapter(tmp_path / "ip" / "plus.safetensors", "plus", base.model.unet)
    pipe = base.with_controlnet(net).with_ip_adapter(prompts)
    draw, arrays = Draw(0), {}
    for (component, module), shape in layers(base.model.networks.specs()).items():
        if component == "unet" and "attn" in module:
            arrays |= {f"{component}.{module}{end}": a * 0.5 for end, a in lora(draw, shape).arrays.items()}
    (tmp_path / "loras").mkdir()
    write(tmp_path / "loras" / "ink.safetensors", arrays)
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"control": {"depth": b64(ONE), "canny:0.5": b64(TWO)}}, {"control": {"depth": ONE, "canny:0.5": TWO}}),
        ({}, {}),
        ({"control": {"tile": b64(TWO)}, "adapters": {"ink": 0.8}},
         {"control": {"tile": TWO}, "adapters": {"ink": 0.8}}),
        ({"image_prompt": [{"image": b64(ONE)}, {"image": b64(TWO), "scale": 0.5}]},
         {"image_prompt": [canvax.ImagePrompt(ONE), canvax.ImagePrompt(TWO, 0.5)]}),
    ]  # fmt: skip
    adapters = AdapterSettings(tmp_path / "loras", places=1)
    settings = EngineSettings(warm=(Warm((64, 64), (1, 2)),), adapters=adapters, compile_on_demand=True)
    with asked(settings, load=lambda name: pipe) as (client, engine), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: drawn(client, **one[0]), calls))
        assert len(engine._models.groups()) == 2  # several image prompts of one adapter have programs of their own
        told = client.get("/api/models").json()["models"][0]["controls"][0]
        assert (told["name"], told["kind"], "tile" in told["types"]) == ("all", "union", True)
    pipe.adapters.load("ink", tmp_path / "loras" / "ink.safetensors", beside=True)
    for (pixels, _), (_, call) in zip(found, calls, strict=True):
        wanted = called(pipe, **{"adapters": {}, **call})
        assert np.abs(pixels - wanted).max() <= 3, call.keys()


def test_what_is_there_is_told(server: tuple[httpx.Client, ImageEngine]) -> None:
    (card,) = server[0].get("/api/models").json()["models"]
    assert card["controls"] == [
        {"name": "edges", "kind": "controlnet", "types": [], "fault": ""},
        {"name": "colours", "kind": "t2i-adapter", "types": [], "fault": ""},
    ]  # fmt: skip
    assert card["ip_adapters"] == ["plain", "plus"]


def test_flags(root: Path, pipe: canvax.Pipeline) -> None:
    """Of the command, and of a replica of Ray Serve."""
    nets = [root / name for name in ("edges", "colours")]
    prompts = [root / "ip" / f"{kind}.safetensors" for kind in ("plain", "plus")]
    words = ["--controlnet", nets[0], "--controlnet", nets[1], "--ip-adapter", prompts[0], "--ip-adapter", prompts[1]]
    arguments = parse(["serve", str(root / "base"), "--quiet", *map(str, words)])
    listed = [",".join(map(str, names)) for names in (nets, prompts)]
    replica: Any = SimpleNamespace(_wanted=ServeArgs.of({"controlnet": listed[0], "ip_adapter": listed[1]}))
    with_flags = load_with(arguments, load_of(arguments, model=str(root / "base")))
    for loaded in (with_flags, Images._load(replica, str(root / "base"))):
        assert cards(loaded.model, {}) == cards(pipe.model, {})


def test_the_size_is_that_of_the_control_image(server: tuple[httpx.Client, ImageEngine]) -> None:
    """Or of those that are ready, the nearest: nobody waits for a compiler."""
    control = [b64(some_colours(1, (200, 160))), None]
    assert drawn(server[0], control=control, width=None, height=None)[0].shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"control": b64(ONE)}, "control", "control has one for 2 networks"),
        ({"control": {"depth": b64(ONE)}}, "control", "control has one for 2 networks"),
        ({"control": [{"depth": b64(ONE)}, None]}, "control", "ControlNet-Union"),
        ({"control": [b64(ONE), "http://169.254.169.254/x"]}, "control", "nothing is fetched here"),
        ({"control": ["/etc/passwd", None]}, "control", "is not"),
        ({"control": [b64(ONE), None], "control_scale": [1, 1, 1]}, "control_scale", "3 entries for 2 networks"),
        ({"control": [b64(ONE), None], "image": b64(ONE), "upscale": 2}, "control", "does not go with upscale"),
        ({"control": True}, "control", "is for upscale"),
        ({"control": [b64(ONE), None], "image": b64(ONE), "mask": b64(left()), "options": {"padding_mask_crop": 4}},
         "control", "padding_mask_crop"),
        ({"image_prompt": {"image": b64(ONE), "scale": {"sideways": 1}}}, "image_prompt", "parts of the UNet"),
        ({"image_prompt": [{"image": b64(ONE)}, {"image": b64(TWO)}]}, "image_prompt", "has no programs for that"),
        ({"image_prompt": "aGVsbG8="}, "image_prompt", "is not a PNG"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], param: str, said: str, server: tuple[httpx.Client, ImageEngine]) -> None:
    body = BODY | changes | ({"width": None, "height": None} if "upscale" in changes else {})
    answer = server[0].post("/api/jobs", json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_pixels_are_counted_together(server: tuple[httpx.Client, ImageEngine]) -> None:
    """Before they are decoded: a file of a few bytes may claim any number."""
    large = b64(Image.new("L", (3000, 3000)))
    answer = server[0].post("/api/jobs", json=BODY | {"control": [large, large]})
    assert answer.status_code == 400
    assert "with the images before it, more than 16777216 pixels" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A model without any of them."""
    return canvax.load("emoji", progress=False).model


def test_without_networks(plain: Any) -> None:
    with pytest.raises(Rejected, match="--controlnet"):
        check(JobRequest("a red apple", control=ONE), "emoji", plain)
    with pytest.raises(Rejected, match="--ip-adapter"):
        check(JobRequest("a red apple", image_prompt=[PromptImage(ONE)]), "emoji", plain)


def test_options_that_change_nothing(plain: Any) -> None:
    """Refused, but for clients that send whole forms."""
    ask = JobRequest("a red apple", options={"mask_blur": 4.0})
    with pytest.raises(Rejected) as refused:
        check(ask, "emoji", plain)
    assert refused.value.param == "options"
    check(replace(ask, lenient=True), "emoji", plain)


def test_a_journal_keeps_the_images(tmp_path: Path) -> None:
    """A job that a killed server had accepted is the same job again, also for its Idempotency-Key."""
    ask = JobRequest(
        "a cat", control=[ONE, {"depth": TWO}], options={"control_scale": [0.5, 1]}, once="key",
        image_prompt=[PromptImage(TWO, {"down": 0.5}, left(), 1)],
    )  # fmt: skip
    journal = Journal(tmp_path / "jobs.db")
    journal.accepted(Job(ask, "m", [Picture(0, 1, 64, 64, 4)], cancel=lambda job: None))
    journal.close()
    journal = Journal(tmp_path / "jobs.db")
    book = JobStore(Metrics(), journal, 600.0, lambda job: None)
    (again,) = book.recover(lambda job: None)
    assert again.request.control[0].tobytes() == ONE.tobytes()
    assert book.earlier(ask) is again
    with pytest.raises(Rejected, match="was used for another request"):
        book.earlier(replace(ask, control=[TWO, {"depth": TWO}]))
    with pytest.raises(Rejected, match="was used for another request"):
        book.earlier(replace(ask, image_prompt=[PromptImage(TWO, {"down": 0.5}, None, 1)]))
    book.end(again, Status.CANCELLED)
    journal.close()


def test_metadata_has_no_folders() -> None:
    told = {"model": "/srv/ada/sd", "vae": "/srv/ada/vae", "controlnet": ["/srv/ada/net", "/srv/bob/net"]}
    told |= {"adapters": {"ink": {"file": "/srv/ada/ink.safetensors"}}, "embeddings": {"wool": "/srv/ada/wool"}}
    found = publicly(told)
    assert "/srv" not in str(found)
    assert found["controlnet"] == ["net", "net-2"]
