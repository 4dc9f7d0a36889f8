"""Adapters of a server's clients: named by request, in one batch, and nothing compiles for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.compile.monitor import counting
from canvax.images.metadata import metadata_in
from canvax.server.adapter_cache import AdapterCache, AdapterSettings, Wanted
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import JobRequest, Rejected
from canvax.server.models import Warm
from canvax.server.work import Beside, check, may_begin
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.serving import generating

NAMES = ("ink", "clay", "wool")
BODY = {"prompt": "a red apple", "seed": 3, "steps": 3}
PLACES = 2


@pytest.fixture(scope="module")
def emoji() -> canvax.Pipeline:
    return canvax.load("emoji", progress=False, mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def folder(emoji: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for i, name in enumerate(NAMES):
        draw, arrays = Draw(i), {}
        for (component, module), shape in layers(emoji.model.networks.specs()).items():
            if component != "vae" and "attn" in module:
                arrays |= {f"{component}.{module}{end}": a * 0.5 for end, a in lora(draw, shape).arrays.items()}
        write(folder / f"{name}.safetensors", arrays, {"ss_output_name": f"{name}-v1"})
    yarn = {"bundle_emb.yarn.string_to_param.*": Draw(7)(2, 160)}
    write(folder / "knit.safetensors", arrays | yarn)
    (folder / "broken.safetensors").write_bytes(b"{}")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    adapters = AdapterSettings(folder, (folder / "ink.safetensors",), places=PLACES)
    with (
        generating(EngineSettings(warm=(Warm(None, (1, 4)),), adapters=adapters)) as (base, engine),
        httpx.Client(base_url=base, timeout=120) as client,
    ):
        yield client, engine


def drawn(client: httpx.Client, **more: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """An image of A1111's API and its metadata."""
    answer = client.post("/sdapi/v1/txt2img", json=BODY | more)
    assert answer.status_code == 200, answer.text
    return opened(base64.b64decode(answer.json()["images"][0]))


def opened(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    return np.asarray(Image.open(io.BytesIO(data)), np.int16), metadata_in(io.BytesIO(data), Path("it"))


@pytest.mark.slow
def test_each_request_has_its_own(
    server: tuple[httpx.Client, ImageEngine], folder: Path, emoji: canvax.Pipeline
) -> None:
    """Six clients at once with three adapters in two places: all images as alone, and nothing compiled."""
    client, _ = server
    asked = ["", "<lora:ink:0.8>", "<lora:clay:1>", "<lora:wool-v1:0.5>", "<lora:ink:0.5><lora:clay:1>", ""]
    with counting() as counts, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda tags: drawn(client, prompt=f"a red apple {tags}"), asked))
        alone = [drawn(client, prompt=f"a red apple {tags}") for tags in asked]
    assert counts.compilations == 0
    for (together, told), (single, _) in zip(found, alone, strict=True):
        assert np.abs(together - single).max() <= 1
        assert told["prompt"].strip() == "a red apple"
    assert [{name: entry["weight"] for name, entry in told.get("adapters", {}).items()} for _, told in found] == [
        {},
        {"ink": 0.8},
        {"clay": 1.0},
        {"wool": 0.5},
        {"ink": 0.5, "clay": 1.0},
        {},
    ]
    assert found[1][1]["adapters"]["ink"]["file"] == "ink.safetensors"  # not where the operator keeps it
    different = [pixels for pixels, _ in found[:5]]
    assert all(np.abs(a - b).max() > 20 for i, a in enumerate(different) for b in different[:i])
    emoji.adapters.load("ink", folder / "ink.safetensors", 0.8)
    merged = np.asarray(emoji("a red apple", seed=3, num_inference_steps=3)[0], np.int16)
    emoji.adapters.remove()
    assert np.abs(found[1][0] - merged).max() <= 2


@pytest.mark.weekly
def test_the_other_apis(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, _ = server
    wanted, _ = drawn(client, prompt="a red apple <lora:ink:0.8>")
    body = {**BODY, "adapters": {"ink": 0.8}}
    answer = client.post("/v1/images/generations", json=body | {"response_format": "b64_json"})
    assert np.abs(opened(base64.b64decode(answer.json()["data"][0]["b64_json"]))[0] - wanted).max() <= 1
    job = client.post("/api/jobs", json=body).json()
    with client.stream("GET", f"/api/jobs/{job['id']}/events") as events:
        assert any("event: done" in line for line in events.iter_lines())
    own = client.get(f"/api/jobs/{job['id']}/images/0").content
    assert np.abs(opened(own)[0] - wanted).max() <= 1
    half, _ = drawn(client, prompt="a red apple <lora:ink:0:0.8>")  # of the UNet alone
    job = client.post("/api/jobs", json=body | {"adapters": {"ink": {"text_encoder": 0, "unet": 0.8}}}).json()
    with client.stream("GET", f"/api/jobs/{job['id']}/events") as events:
        assert any("event: done" in line for line in events.iter_lines())
    assert np.abs(opened(client.get(f"/api/jobs/{job['id']}/images/0").content)[0] - half).max() <= 1
    assert np.abs(half - wanted).max() > 5


def test_the_list(server: tuple[httpx.Client, ImageEngine], folder: Path) -> None:
    client, _ = server
    told = {one["name"]: one for one in client.get("/sdapi/v1/loras").json()}
    assert set(told) == {*NAMES, "knit"}  # a file that is no adapter is not offered
    assert told["ink"] == {"name": "ink", "alias": "ink-v1", "path": "ink.safetensors", "metadata": {}}
    (folder / "ink.safetensors").rename(folder / "tusche.safetensors")
    try:
        assert client.post("/sdapi/v1/refresh-loras").status_code == 200
        assert {one["name"] for one in client.get("/api/adapters").json()["adapters"]} >= {"tusche", "clay"}
        drawn(client, prompt="<lora:tusche>")
    finally:
        (folder / "tusche.safetensors").rename(folder / "ink.safetensors")
        client.post("/sdapi/v1/refresh-loras")


@pytest.mark.parametrize(
    ("adapters", "status", "said"),
    [
        ({"inc": 1.0}, 404, "'inc' is not there"),
        ({"../ink": 1.0}, 404, "is not there"),
        ({"/etc/passwd": 1.0}, 404, "is not there"),
        ({"broken": 1.0}, 400, "broken.safetensors"),
        ({"ink": 1.0, "clay": 1.0, "wool": 1.0}, 400, "3 are more than an image can have here, 2"),
        ({"knit": 1.0}, 400, "textual inversions ('yarn')"),
        ({"ink": {"unet.up_blocks.1": 1.0}}, 400, "for 'unet.up_blocks.1'"),
        ({"ink": 1e9}, 400, "beyond 1000"),
    ],
)
def test_refusals(
    adapters: dict[str, Any], status: int, said: str, server: tuple[httpx.Client, ImageEngine], folder: Path
) -> None:
    answer = server[0].post("/api/jobs", json=BODY | {"adapters": adapters})
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "adapters"
    assert str(folder) not in answer.text
    if list(adapters) == ["inc"]:
        assert server[0].post("/sdapi/v1/txt2img", json=BODY | {"prompt": "<lora:inc>"}).status_code == 404


@dataclass(eq=False)
class Waits:
    """An image, as far as a shelf sees it."""

    shelf: AdapterCache
    adapters: Wanted

    @property
    def beside(self) -> Beside:
        return Beside(self.adapters, self.shelf)


def test_two_files_of_one_name(folder: Path, emoji: canvax.Pipeline, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, source in (("ink", "ink"), ("deep/ink", "clay"), ("deep/wool", "wool")):
        (tmp_path / f"{name}.safetensors").write_bytes((folder / f"{source}.safetensors").read_bytes())
    write(tmp_path / "word.safetensors", {"emb_params": np.ones((2, 160), np.float32)})
    wide = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight"
    write(tmp_path / "of-another-model.safetensors", {wide: np.ones((4, 768), np.float32)})
    shelf = AdapterCache(emoji.model, emoji.mesh, AdapterSettings(tmp_path, places=PLACES))
    assert {card.name for card in shelf.cards()} == {"./ink", "deep/ink", "wool"}
    with pytest.raises(Rejected) as fault:
        shelf.read("ink")
    assert (fault.value.status, fault.value.param) == (400, "adapters")
    assert "./ink" in fault.value.message
    assert "deep/ink" in fault.value.message
    upper, deeper = shelf.read("./ink"), shelf.read("deep/ink")
    assert upper.sha256 != deeper.sha256
    assert shelf.read("deep/wool") is shelf.read("wool")
    _, wanted = shelf.wanted("a <lora:./ink:0.5><lora:deep/ink:0.8> fox", {})
    told = shelf.shares(wanted).records[0]
    assert {name: entry["sha256"] for name, entry in told.items()} == {
        "./ink": upper.sha256,
        "deep/ink": deeper.sha256,
    }
    assert {entry["a1111_hash"] for entry in told.values()} == {upper.a1111_hash, deeper.a1111_hash}


def test_places_are_held_until_images_are_over(folder: Path, emoji: canvax.Pipeline) -> None:
    """Who needs a place when all are held waits, later ones with adapters behind it; others do not."""
    shelf = AdapterCache(emoji.model, emoji.mesh, AdapterSettings(folder, places=PLACES))
    assert (shelf.bank.places.layers, shelf.bank.places.rank) == ("attention", 8)  # as the files have it
    ink, clay, wool = (Waits(shelf, {shelf.read(name): {"": 1.0}}) for name in NAMES)
    again, plain = Waits(shelf, ink.adapters), Waits(shelf, {})

    def may(*images: Waits) -> list[Waits]:
        items: Any = images
        return may_begin(items)  # type: ignore[return-value]

    for image in (ink, clay):
        assert may(image) == [image]
        shelf.slots.pin(image.adapters)
        shelf.shares(image.adapters)
    held = dict(shelf.slots.held)
    assert may(wool, again, plain) == [plain]  # there is a place for ``again``; it would keep wool out
    assert may(again, wool, plain) == [again, plain]  # wool is not asked for: nobody remembers it
    shelf.slots.unpin(clay.adapters)
    assert may(wool, again, plain) == [wool, again, plain]
    shelf.slots.pin(wool.adapters)
    rows = shelf.shares(wool.adapters).weights["unet"]
    (where,) = np.flatnonzero(rows[0])
    assert where == next(place for entry, place in held.items() if entry.name == "clay")  # which nobody holds
    assert may(again) == [again]
    assert may(clay) == []
    before = jax.tree.map(np.asarray, shelf.bank.arrays)
    shelf.take_off()  # as when another model needs the memory
    assert not jax.tree.leaves(shelf.bank.arrays)
    shelf.put_on()
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, shelf.bank.arrays))


def test_a_place_that_cannot_be_written_is_not_held(
    folder: Path, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next image would have the weights of another adapter, or none."""
    shelf = AdapterCache(emoji.model, emoji.mesh, AdapterSettings(folder, places=PLACES))
    ink = {shelf.read("ink"): {"": 1.0}}

    def fail(place: int, packed: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(shelf.bank, "put", fail)
        with pytest.raises(RuntimeError):
            shelf.shares(ink)
    assert not shelf.slots.held
    shelf.shares(ink)
    assert any(np.any(np.asarray(array)) for array in jax.tree.leaves(shelf.bank.arrays))


def test_without_adapters(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has none says so, and flags are checked before anything is loaded."""
    from canvax.cli import main

    monkeypatch.setattr("canvax.cli.serve._log_to_stderr", lambda quiet: None)  # of this process, for good

    model = canvax.load("emoji", mesh=canvax.make_mesh(jax.devices()[:1])).model
    with pytest.raises(Rejected, match="offers none; it was started without --lora-dir"):
        check(JobRequest("a red apple", adapters={"ink": 1.0}), "emoji", model)
    assert check(JobRequest("a <lora:ink> apple"), "emoji", model).request.prompts == ["a <lora:ink> apple"]
    twice = [str(tmp_path / name / "ink.safetensors") for name in "ab"]
    for file in map(Path, twice):
        file.parent.mkdir()
        write(file, {"x": np.zeros(1, np.float32)})
    for flags, said in (
        (["--lora-dir", str(tmp_path / "none")], "is not a folder"),
        (["--lora", str(tmp_path / "none.safetensors")], "is not a safetensors file"),
        (["--lora-dir", str(tmp_path), "--lora-places", "0"], "--lora-places 0"),
        (["--lora", *twice], "ink"),
    ):
        assert main(["serve", *flags, "--port", "0"]) == 2
        assert said in capsys.readouterr().err
