"""Control images and image prompts of a server's clients: by request, in one batch, and nothing compiles for them."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import jax
import msgspec
import numpy as np
import pytest
from adapter_files import Draw, layers, lora, write
from control_files import adapter, controlnet, union
from ip_adapter_files import encoder, ip_adapter
from PIL import Image
from small_checkpoint import UNET, write_small_checkpoint
from small_sdxl import build

import canvax
from canvax.cli.arguments import parse
from canvax.cli.serve import _load
from canvax.compile.monitor import counting
from canvax.images.maps import control_map
from canvax.images.metadata import metadata_in
from canvax.scale.serve import Images, Wanted
from canvax.server.a1111_ask import ImageToImage, TextToImage, ask_of
from canvax.server.book import Book
from canvax.server.control import cards, publicly
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import Ask, ControlCard, Job, ModelCard, Picture, PromptImage, Refused, Status
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.served import Warm
from canvax.server.shelf import AdapterSettings
from canvax.server.work import check
from tests.server_stub import CARD as STUB
from tests.serving import generating

BODY = {"prompt": "a cat", "seed": 3, "steps": 4, "width": 64, "height": 64}
QUIET = canvax.Options(progress=False)


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Some colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    return Image.fromarray(np.kron(colours, np.ones((8, 8, 1), np.uint8)))


def left() -> Image.Image:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :32] = 255
    return Image.fromarray(mask)


def b64(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def pipe(root: Path) -> canvax.StableDiffusion:
    """A small random model with a ControlNet, a T2I-Adapter and two IP-Adapters."""
    base = canvax.load(write_small_checkpoint(root / "base"), mesh=canvax.make_mesh(jax.devices()[:1]))
    nets = [controlnet(root / "edges", base, strength=0.5, sees=30.0), adapter(root / "colours", base)]
    encoder(root / "ip" / "image_encoder")
    prompts = [ip_adapter(root / "ip" / f"{kind}.safetensors", kind, UNET) for kind in ("plain", "plus")]
    return base.with_controlnet(nets).with_ip_adapter(prompts)


@pytest.fixture(scope="module")
def server(pipe: canvax.StableDiffusion) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    settings = EngineSettings(warm=(Warm(None, (1, 4)),))
    with (
        generating(settings, load=lambda name: pipe) as (base, engine),
        httpx.Client(base_url=base, timeout=120) as client,
    ):
        yield client, engine


def drawn(client: httpx.Client, **more: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """An image of canvax's own API, and its metadata."""
    answer = client.post("/api/jobs", json=BODY | more)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    with client.stream("GET", f"/api/jobs/{job['id']}/events") as events:
        assert any("event: done" in line for line in events.iter_lines()), client.get(f"/api/jobs/{job['id']}").text
    data = client.get(f"/api/jobs/{job['id']}/images/0").content
    return np.asarray(Image.open(io.BytesIO(data)), np.int16), metadata_in(io.BytesIO(data), Path("it"))


ONE, TWO = picture(1), picture(2)
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


def called(pipe: canvax.StableDiffusion, **more: Any) -> np.ndarray:
    """What the pipeline itself generates."""
    call = {"prompt": "a cat", "num_inference_steps": 4, "height": 64, "width": 64, **more}
    return np.asarray(pipe(**call, seed=3, progress=False)[0], np.int16)


@pytest.mark.parametrize("some", [(0, 3, 9), pytest.param(range(len(CALLS)), marks=pytest.mark.slow)])
def test_each_request_has_its_own(
    some: Sequence[int], server: tuple[httpx.Client, ImageEngine], pipe: canvax.StableDiffusion
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


def test_larger_by_tiles(server: tuple[httpx.Client, ImageEngine], pipe: canvax.StableDiffusion) -> None:
    """Each tile is its own control image."""
    large = {"image": b64(picture(5, (72, 64))), "upscale": 1.25, "strength": 0.5, "width": None, "height": None}
    with counting() as counts:
        found, told = drawn(server[0], **large, control=True, control_scale=[0.7, 0.4])
        plain, _ = drawn(server[0], **large)
    assert counts.compilations == 0
    call = {"scale": 1.25, "strength": 0.5, "seed": 3, "num_inference_steps": 4, "batch": 1}
    options = canvax.Options(progress=False, control_scale=(0.7, 0.4))
    wanted = pipe.upscale(picture(5, (72, 64)), "a cat", options=options, control=True, **call)
    assert found.shape == (80, 90, 3)
    assert np.abs(found - np.asarray(wanted[0], np.int16)).max() <= 3
    assert np.abs(found - plain).max() > 8
    assert "control_sha256" not in told


@pytest.mark.slow
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
    with (
        generating(settings, load=lambda name: pipe) as (url, engine),
        httpx.Client(base_url=url, timeout=300) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        found = list(pool.map(lambda one: drawn(client, **one[0]), calls))
        assert len(engine._models.groups()) == 2  # several image prompts of one adapter have programs of their own
        told = client.get("/api/models").json()["models"][0]["controls"][0]
        assert (told["name"], told["kind"], "tile" in told["types"]) == ("all", "union", True)
        answer = client.post("/sdapi/v1/txt2img", json=units(unit(TWO, model="all", union_control_type="tile")))
        assert answer.status_code == 200, answer.text
    pipe.adapters.load("ink", tmp_path / "loras" / "ink.safetensors", beside=True)
    for (pixels, _), (_, call) in zip(found, calls, strict=True):
        wanted = called(pipe, **{"adapters": {}, **call})
        assert np.abs(pixels - wanted).max() <= 3, call.keys()


def test_what_is_there_is_told(server: tuple[httpx.Client, ImageEngine]) -> None:
    (card,) = server[0].get("/api/models").json()["models"]
    assert card["controls"] == [
        {"name": "edges", "kind": "controlnet", "types": []}, {"name": "colours", "kind": "t2i-adapter", "types": []},
    ]  # fmt: skip
    assert card["ip_adapters"] == ["plain", "plus"]
    assert server[0].get("/controlnet/model_list").json() == {"model_list": ["edges", "colours", "plain", "plus"]}
    assert server[0].get("/sdapi/v1/scripts").json() == {"txt2img": ["controlnet"], "img2img": ["controlnet"]}


def test_flags(root: Path, pipe: canvax.StableDiffusion) -> None:
    """Of the command, and of a replica of Ray Serve."""
    nets = [root / name for name in ("edges", "colours")]
    prompts = [root / "ip" / f"{kind}.safetensors" for kind in ("plain", "plus")]
    words = ["--controlnet", nets[0], "--controlnet", nets[1], "--ip-adapter", prompts[0], "--ip-adapter", prompts[1]]
    arguments = parse(["serve", str(root / "base"), "--quiet", *map(str, words)])
    listed = [",".join(map(str, names)) for names in (nets, prompts)]
    replica: Any = SimpleNamespace(_wanted=Wanted.of({"controlnet": listed[0], "ip_adapter": listed[1]}))
    for loaded in (_load(str(root / "base"), arguments), Images._load(replica, str(root / "base"))):
        assert cards(loaded.model) == cards(pipe.model)


def test_the_size_is_that_of_the_control_image(server: tuple[httpx.Client, ImageEngine]) -> None:
    """Or of those that are ready, the nearest: nobody waits for a compiler."""
    control = [b64(picture(1, (200, 160))), None]
    assert drawn(server[0], control=control, width=None, height=None)[0].shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"control": b64(ONE)}, "control", "control has one for 2 networks"),
        ({"control": {"depth": b64(ONE)}}, "control", "control has one for 2 networks"),
        ({"control": [{"depth": b64(ONE)}, None]}, "control", "is no ControlNet-Union"),
        ({"control": [b64(ONE), "http://169.254.169.254/x"]}, "control", "nothing is fetched here"),
        ({"control": ["/etc/passwd", None]}, "control", "is not"),
        ({"control": [b64(ONE), None], "control_scale": 99}, "control_scale", "is not a number in -10..10"),
        ({"control": [b64(ONE), None], "control_scale": [1, 1, 1]}, "control_scale", "3 entries for 2 networks"),
        ({"control": [b64(ONE), None], "control_start": 0.5, "control_end": 0.5}, "control_start", "is not before"),
        ({"control_scale": 0.5}, "control_scale", "without a control image"),
        ({"control": [b64(ONE), None], "image": b64(ONE), "upscale": 2}, "control", "does not go with upscale"),
        ({"control": True}, "control", "is for upscale"),
        ({"control": [b64(ONE), None], "image": b64(ONE), "mask": b64(left()), "options": {"padding_mask_crop": 4}},
         "control", "padding_mask_crop"),
        ({"image_prompt": {"image": b64(ONE), "adapter": 2}}, "image_prompt", "is not one of 0..1"),
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


def test_without_networks() -> None:
    model = canvax.load("emoji", mesh=canvax.make_mesh(jax.devices()[:1])).model
    with pytest.raises(Refused, match="without --controlnet"):
        check(Ask("a red apple", control=ONE), "emoji", model)
    with pytest.raises(Refused, match="without --ip-adapter"):
        check(Ask("a red apple", image_prompt=[PromptImage(ONE)]), "emoji", model)


def test_options_that_change_nothing() -> None:
    """Refused, but for clients that send whole forms."""
    model = canvax.load("emoji", mesh=canvax.make_mesh(jax.devices()[:1])).model
    ask = Ask("a red apple", options={"mask_blur": 4.0})
    with pytest.raises(Refused, match=r"options\.mask_blur without a mask: changes nothing; leave it out"):
        check(ask, "emoji", model)
    check(replace(ask, lenient=True), "emoji", model)


def test_a_journal_keeps_the_images(tmp_path: Path) -> None:
    """A job that a killed server had accepted is the same job again, also for its Idempotency-Key."""
    ask = Ask(
        "a cat", control=[ONE, {"depth": TWO}], options={"control_scale": [0.5, 1]}, once="key",
        image_prompt=[PromptImage(TWO, {"down": 0.5}, left(), 1)],
    )  # fmt: skip
    journal = Journal(tmp_path / "jobs.db")
    journal.accepted(Job(ask, "m", [Picture(0, 1, 64, 64, 4)], cancel=lambda job: None))
    journal.close()
    journal = Journal(tmp_path / "jobs.db")
    book = Book(Metrics(), journal, 600.0, lambda job: None)
    (again,) = book.recover(lambda job: None)
    assert again.ask.control[0].tobytes() == ONE.tobytes()
    assert book.earlier(ask) is again
    with pytest.raises(Refused, match="was used for another request"):
        book.earlier(replace(ask, control=[TWO, {"depth": TWO}]))
    with pytest.raises(Refused, match="was used for another request"):
        book.earlier(replace(ask, image_prompt=[PromptImage(TWO, {"down": 0.5}, None, 1)]))
    book.end(again, Status.CANCELLED)
    journal.close()


# Units of sd-webui-controlnet.


def unit(image: Image.Image | str | None = ONE, **more: Any) -> dict[str, Any]:
    sent = b64(image) if isinstance(image, Image.Image) else image
    return {"input_image": sent, "module": "none", "model": "edges", "weight": 1.0, **more}


def units(*args: Any, **more: Any) -> dict[str, Any]:
    return BODY | {"alwayson_scripts": {"controlnet": {"args": args}}} | more


def test_units_are_control_images(server: tuple[httpx.Client, ImageEngine]) -> None:
    """As the same job of canvax's own API."""
    client, _ = server
    wanted, _ = drawn(
        client, control=[b64(control_map("canny", ONE)), b64(TWO)], control_scale=[0.7, 0.5], control_end=[1, 0.5],
        control_mode=["prompt", "control"], image_prompt={"image": b64(TWO), "scale": 0.5, "adapter": 1},
    )  # fmt: skip
    body = units(
        unit(module="canny", weight=0.7, threshold_a=-1, control_mode="My prompt is more important", pixel_perfect=True,
             processor_res=512, low_vram=False, resize_mode="Just Resize"),
        {"enabled": True, "image": {"image": b64(TWO)}, "model": "colours [d14c016b]", "weight": 0.5, "control_mode": 2,
         "guidance_end": 0.5},
        unit(TWO, module="ip-adapter-auto", model="plus", weight=0.5),
        unit(TWO, model="of another server", enabled=False),
    )  # fmt: skip
    answer = client.post("/sdapi/v1/txt2img", json=body)
    assert answer.status_code == 200, answer.text
    assert "input_image" not in answer.text
    (image,) = answer.json()["images"]
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))), np.int16)
    assert np.abs(found - wanted).max() <= 2


CARD = replace(
    STUB, controls=(ControlCard("edges", "controlnet"), ControlCard("all", "union", ("depth", "canny", "softedge"))),
    ip_adapters=("plain",),
)  # fmt: skip


def asked(body: dict[str, Any], kind: type[TextToImage] = TextToImage, card: ModelCard = CARD) -> Ask:
    return ask_of(msgspec.convert(body, kind, strict=False), card, "")


def test_what_units_mean() -> None:
    ask = asked(units(unit(guessmode=True, guidance="0.5", threshold_a=64)))
    assert (ask.control[1], ask.options["control_mode"], ask.options["control_end"]) == (
        None, ["guess", "balanced"], [0.5, 1.0],
    )  # fmt: skip
    kinds = [unit(model="all", union_control_type="Depth"), unit(model="ALL", module="canny")]
    assert list(asked(units(*kinds)).control[1]) == ["depth", "canny"]
    alone = replace(CARD, controls=CARD.controls[:1], ip_adapters=())
    assert asked(units({"input_image": b64(ONE)}), card=alone).control[0].size == (64, 64)
    from_image = asked(units(unit(None), init_images=[b64(TWO)]), ImageToImage)
    assert from_image.control[0].tobytes() == TWO.tobytes()
    assert asked({"prompt": "x", "alwayson_scripts": {"ADetailer": {"args": []}}}).control is None


@pytest.mark.parametrize(
    ("mode", "white"), [(0, 16), ("Just Resize", 16), (None, 32), (1, 32), ("Crop and Resize", 32), ("2", 16)]
)
def test_units_are_brought_to_the_size(mode: Any, white: int) -> None:
    """Stretched, cropped, or with the colour of its edge around it."""
    wide = Image.new("RGB", (128, 64))
    wide.paste((255, 255, 255), (48, 16, 80, 48))
    found = asked(units(unit(wide, resize_mode=mode))).control[0].convert("L")
    assert found.size == (64, 64)
    assert sum(level > 128 for level in found.crop((0, 32, 64, 33)).tobytes()) == white
    assert sum(level > 128 for level in found.crop((32, 0, 33, 64)).tobytes()) == (16 if mode == "2" else 32)


@pytest.mark.parametrize(
    ("args", "param", "said"),
    [
        ([unit(model="depths")], "model", "/controlnet/model_list lists edges, all, plain"),
        ([unit(model=None)], "model", "is missing, and there are several; /controlnet/model_list lists edges"),
        ([unit(module="openpose_full")], "module", "send its finished map with none"),
        ([unit(None)], "image", "there is none"),
        ([unit("http://169.254.169.254/x")], "image", "nothing is fetched here"),
        ([unit(control_mode=3)], "control_mode", "send 0, 1 or 2"),
        ([unit(resize_mode=3)], "resize_mode", "send 0, 1 or 2"),
        ([unit(guidance_start=0.5, guidance_end=0.5)], "guidance_start", "is not before"),
        ([unit(mask=b64(ONE))], "mask", "not offered"),
        ([unit(advanced_weighting=[1.0] * 13)], "advanced_weighting", "not offered"),
        ([unit(), unit(TWO)], "model", "in two units"),
        ([unit(model="all")], "union_control_type", "no type of all"),
        ([unit(model="all", module="canny"), unit(model="all", module="canny")], "union_control_type", "two images"),
        ([unit(model="all", module="canny", weight=0.5), unit(model="all", union_control_type="Depth")], "weight",
         "of which it has one"),
        ([unit(model="plain", module="canny")], "module", "does not go with an IP-Adapter"),
        ([unit(model="plain", guidance_end=0.5)], "guidance_start", "the whole run"),
        ([unit()] * 11, "alwayson_scripts", "more than 10"),
        ([True, "canny"], "alwayson_scripts", "each an object"),
    ],
)  # fmt: skip
def test_bad_units(args: list[Any], param: str, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)) as caught:
        asked(units(*args))
    assert (caught.value.param, caught.value.status) in ((param, 422), (param, 400))


def test_a_unit_without_a_list() -> None:
    with pytest.raises(Refused, match="put it into a list"):
        asked(BODY | {"alwayson_scripts": {"controlnet": {"image": b64(ONE)}}})


def test_units_of_a_size_that_is_not_ready() -> None:
    """Nothing is made that large."""
    for size, card, said in (
        ({"width": 16384, "height": 16384}, CARD, "16384x16384 is not ready here; ask for 64x64 or 96x64"),
        ({"width": 16384, "height": 512}, replace(CARD, any_size=True), "more than 4194304 pixels"),
    ):
        with pytest.raises(Refused, match=said):
            asked(units(unit(), **size), card=card)
    large = {"init_images": [b64(ONE)], "resize_mode": 1, "width": 16384, "height": 16384}
    with pytest.raises(Refused, match="more than 16777216 pixels"):
        asked({"prompt": "x", **large}, ImageToImage)


def test_units_and_only_masked() -> None:
    """AUTOMATIC1111 generates the masked part alone unless told otherwise; a control image is of the whole."""
    body = units(unit(), init_images=[b64(TWO)], mask=b64(left()))
    with pytest.raises(Refused, match="inpaint_full_res"):
        asked(body, ImageToImage)
    assert asked(body | {"inpaint_full_res": False}, ImageToImage).control


def test_metadata_has_no_folders() -> None:
    told = {"model": "/srv/ada/sd", "vae": "/srv/ada/vae", "controlnet": ["/srv/ada/net", "/srv/bob/net"]}
    told |= {"adapters": {"ink": {"file": "/srv/ada/ink.safetensors"}}, "embeddings": {"wool": "/srv/ada/wool"}}
    found = publicly(told)
    assert "/srv" not in str(found)
    assert found["controlnet"] == ["net", "net-2"]


def test_lists(server: tuple[httpx.Client, ImageEngine]) -> None:
    assert server[0].get("/controlnet/version").json() == {"version": 3}
    told = server[0].get("/controlnet/module_list").json()
    assert {"none", "canny"} <= set(told["module_list"])
    assert [one and one["value"] for one in told["module_detail"]["canny"]["sliders"]] == [None, 100, 200]
    assert server[0].get("/controlnet/nothing").json().keys() == {"error", "detail", "body", "errors"}
