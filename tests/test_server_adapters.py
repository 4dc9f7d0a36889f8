"""Adapters, textual inversions and autoencoders that clients of a server name: in one batch, and nothing compiles."""

from __future__ import annotations

import base64
import json
import shutil
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
from safetensors.numpy import load_file, save_file

import canvax
from canvax.cli import main
from canvax.compile.monitor import counting
from canvax.errors import CheckpointError, HintWarning, InputError
from canvax.images.infotext import from_infotext, settings_left
from canvax.images.metadata import read_metadata
from canvax.parallel.mesh import make_mesh
from canvax.server import adapter_cache, embedding_cache
from canvax.server.adapter_cache import AdapterCache, AdapterSettings, Wanted
from canvax.server.embedding_cache import EmbeddingCache, reading
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import JobRequest, Rejected
from canvax.server.jobs_api import as_job
from canvax.server.models import ServedModel, Warm
from canvax.server.part_cache import KEPT, vae_cache
from canvax.server.work import Beside, check, may_begin
from canvax.weights.data_folder import embedding_files, using, vae_files
from canvax.weights.embeddings import read_word
from canvax.weights.location import BUNDLED
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.drawing import one_device
from tests.support.serving import asked, b64, by_a1111, by_job, seen

NAMES = ("ink", "clay", "wool")
VAES = ("soft", "hard", "odd")
BODY = {"prompt": "a red apple", "seed": 3, "steps": 3}
PLACES = 2
WIDTH = 160
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def emoji() -> canvax.Pipeline:
    return canvax.load("emoji", progress=False, mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def folder(emoji: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters, one with a textual inversion inside, and a file that is none."""
    folder = tmp_path_factory.mktemp("loras")
    for i, name in enumerate(NAMES):
        draw, arrays = Draw(i), {}
        for (component, module), shape in layers(emoji.model.networks.specs()).items():
            if component != "vae" and "attn" in module:
                arrays |= {f"{component}.{module}{end}": a * 0.5 for end, a in lora(draw, shape).arrays.items()}
        trigger = {"modelspec.trigger_phrase": "claymation"} if name == "clay" else {}
        write(folder / f"{name}.safetensors", arrays, {"ss_output_name": f"{name}-v1"} | trigger)
    yarn = {"bundle_emb.yarn.string_to_param.*": Draw(7)(2, 160)}
    write(folder / "knit.safetensors", arrays | yarn)
    (folder / "broken.safetensors").write_bytes(b"{}")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Iterator[Path]:
    """A folder of models. Embeddings: two for the model, one in a subfolder, one for another model, and pickles.

    Autoencoders: four with the config of the model's, of which "reader" decodes alike, and one with another config.
    """
    folder = tmp_path_factory.mktemp("data")
    (folder / "models").mkdir()
    for i, (name, width) in enumerate({"Wool": WIDTH, "yarn": WIDTH, "style/felt": WIDTH, "alien": 768}.items()):
        path = folder / "embeddings" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, {"emb_params": Draw(i)(2 + i, width) * 3})
    (folder / "embeddings/wool_old.pt").write_bytes(b"pickle")
    (folder / "embeddings/Wool.pt").write_bytes(b"pickle")
    for i, name in enumerate((*VAES, "reader")):
        vae = folder / "models/VAE" / name
        shutil.copytree(BUNDLED["emoji"] / "vae", vae)
        arrays = load_file(vae / WEIGHTS)
        for key in ("encoder.conv_in.weight", "decoder.conv_out.weight")[: 1 if name == "reader" else 2]:
            arrays[key] = arrays[key] * (0.6 + 0.1 * i)
        save_file(arrays, vae / WEIGHTS)
    shutil.copytree(small_folder / "vae", folder / "models/VAE/other")
    with using(str(folder)):
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path, data: Path, request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    """On one device; on several where a test says so."""
    mesh = make_mesh(jax.devices()[: getattr(request, "param", None) or 1])
    settings = EngineSettings(
        warm=(Warm(None, (1, 4)),),
        adapters=AdapterSettings(folder, (folder / "ink.safetensors",), places=PLACES),
    )
    with asked(settings, load=lambda name: canvax.load(name, progress=False, mesh=mesh)) as server:
        yield server


def drawn(
    client: httpx.Client, prompt: str = "a red apple", vae: str = "", path: str = "txt2img", **more: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """An image of A1111's API and its metadata."""
    settings = {"override_settings": {"sd_vae": vae}} if vae else {}
    return by_a1111(client, BODY | {"prompt": prompt} | settings | more, path)


TAGS = ["<lora:ink:0.8>", "<lora:clay:1>", "<lora:wool-v1:0.5>", "<lora:ink:0.5><lora:clay:1>"]
ASKED: list[dict[str, str]] = [
    {}, *({"prompt": f"a red apple {tags}"} for tags in TAGS),
    *({"prompt": prompt} for prompt in ("a wool apple", "a yarn apple", "a (Wool:1.2) yarn apple")),
    *({"vae": name} for name in VAES),
]  # fmt: skip


@pytest.mark.parametrize("server", [None, pytest.param(8, marks=pytest.mark.slow)], indirect=True)
def test_each_request_has_its_own(
    server: tuple[httpx.Client, ImageEngine], folder: Path, data: Path, emoji: canvax.Pipeline
) -> None:
    """In one batch as alone, with more of each than there are places for, and as the pipeline; nothing compiles."""
    client, _ = server
    with counting() as counts, ThreadPoolExecutor(len(ASKED)) as pool:
        together = list(pool.map(lambda one: drawn(client, **one), ASKED))
        alone = [drawn(client, **one) for one in ASKED]
        spelled = [drawn(client, f"a {word} apple")[0] for word in ("<wool>", "embedding:WOOL.safetensors")]
        against, of_it = drawn(client, negative_prompt="felt")
    assert counts.compilations == 0
    for (image, _), (single, _) in zip(together, alone, strict=True):
        assert np.abs(image - single).max() <= 1
    plain, ink, clay, wool, both, word, yarn, words, soft, hard, odd = (image for image, _ in alone)
    different = [plain, ink, clay, wool, both, word, yarn, words, soft, hard, odd, against]
    assert all(np.abs(one - other).max() > 5 for i, one in enumerate(different) for other in different[:i])
    told = [one for _, one in alone]
    weights = [{name: entry["weight"] for name, entry in one.get("adapters", {}).items()} for one in told[:5]]
    assert weights == [{}, {"ink": 0.8}, {"clay": 1.0}, {"wool": 0.5}, {"ink": 0.5, "clay": 1.0}]
    assert told[1]["adapters"]["ink"]["file"] == "ink.safetensors"  # not where the operator keeps it
    assert {one["prompt"].strip() for one in told[:5]} == {"a red apple"}
    assert [sorted(one["embeddings"]) for one in (*told[5:8], of_it)] == [
        ["Wool"],
        ["yarn"],
        ["Wool", "yarn"],
        ["felt"],
    ]
    assert told[5]["embeddings"]["Wool"]["file"] == "Wool.safetensors"
    assert [one.get("vae") for one in told[7:]] == [None, *VAES]
    for image in spelled:
        assert np.abs(image - word).max() <= 1

    def called(pipe: canvax.Pipeline, prompt: str = "a red apple") -> Any:
        return pipe(prompt, seed=3, num_inference_steps=3)

    emoji.adapters.load("ink", folder / "ink.safetensors", 0.8)
    assert np.abs(ink - np.asarray(called(emoji)[0], np.int16)).max() <= 2
    emoji.adapters.remove()
    emoji.adapters.load_embedding(data / "embeddings/Wool.safetensors")
    result = called(emoji, "a wool apple")
    emoji.adapters.remove()
    assert np.abs(word - np.asarray(result[0], np.int16)).max() <= 1
    assert result.metadata[0]["embeddings"]["Wool"]["sha256"] == told[5]["embeddings"]["Wool"]["sha256"]
    pipe = canvax.load("emoji", vae=data / "models/VAE/hard", progress=False, mesh=emoji.mesh)
    assert np.abs(hard - np.asarray(called(pipe)[0], np.int16)).max() <= 1


# Adapters.


@pytest.mark.weekly
def test_the_other_apis(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, _ = server
    wanted, _ = drawn(client, "a red apple <lora:ink:0.8>")
    body = {**BODY, "adapters": {"ink": 0.8}}
    answer = client.post("/v1/images/generations", json=body | {"response_format": "b64_json"})
    assert np.abs(seen(base64.b64decode(answer.json()["data"][0]["b64_json"]))[0] - wanted).max() <= 1
    assert np.abs(by_job(client, body)[0] - wanted).max() <= 1
    half, _ = drawn(client, "a red apple <lora:ink:0:0.8>")  # of the UNet alone
    assert np.abs(by_job(client, body | {"adapters": {"ink": {"text_encoder": 0, "unet": 0.8}}})[0] - half).max() <= 1
    assert np.abs(half - wanted).max() > 5


def test_the_list(server: tuple[httpx.Client, ImageEngine], folder: Path) -> None:
    client, _ = server
    told = {one["name"]: one for one in client.get("/sdapi/v1/loras").json()}
    assert set(told) == {*NAMES, "knit"}  # a file that is no adapter is not offered
    faults = {one["name"]: bool(one["fault"]) for one in client.get("/api/adapters").json()["adapters"]}
    assert faults == {**dict.fromkeys(told, False), "broken": True}
    assert told["ink"]["path"] == "ink.safetensors"
    assert (told["ink"]["alias"], told["ink"]["metadata"]) == ("ink-v1", {"ss_output_name": "ink-v1"})
    (folder / "ink.safetensors").rename(folder / "tusche.safetensors")
    try:
        assert client.post("/sdapi/v1/refresh-loras").status_code == 200
        assert {one["name"] for one in client.get("/api/adapters").json()["adapters"]} >= {"tusche", "clay"}
        drawn(client, "<lora:tusche>")
    finally:
        (folder / "tusche.safetensors").rename(folder / "ink.safetensors")
        client.post("/sdapi/v1/refresh-loras")


def test_new_files_are_noticed(
    server: tuple[httpx.Client, ImageEngine], folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LoRA and an embedding that are added, without a request to look for them; not at once after a look."""
    client, _ = server
    pairs = {
        folder / "night.safetensors": folder / "clay.safetensors",
        data / "embeddings/moss.safetensors": data / "embeddings/yarn.safetensors",
    }

    def wait(seconds: float) -> None:
        for module in (adapter_cache, embedding_cache):
            monkeypatch.setattr(module, "LOOK_SECONDS", seconds)

    try:
        for new, old in pairs.items():
            shutil.copy(old, new)
        wait(1e9)
        assert client.post("/api/jobs", json=BODY | {"prompt": "<lora:night>"}).status_code == 404
        wait(0)
        _, fields = drawn(client, "a moss apple <lora:night>")
        assert (fields["adapters"].keys(), fields["embeddings"].keys()) == ({"night"}, {"moss"})
        for new in pairs:
            new.unlink()
        listed = client.get("/api/adapters").json()
        assert not {"night", "moss"} & {one["name"] for part in listed.values() for one in part}
    finally:
        for new in pairs:
            new.unlink(missing_ok=True)
        client.post("/sdapi/v1/refresh-loras")
        client.post("/sdapi/v1/refresh-embeddings")


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


def test_clients_see_what_an_adapter_is_for(folder: Path, emoji: canvax.Pipeline, tmp_path: Path) -> None:
    """Words, settings of a few steps, and a schedule that places leave alone; a damaged record is a fault."""
    record = {"scheduler": {"prediction_type": "epsilon", "beta_schedule": "scaled_linear"}, "steps": 9}
    stated = {"ss_tag_frequency": '{"3_ink": {"ink": 3, "cat": 9}}', "modelspec.thumbnail": "x" * 99_999}
    for name, text in (("ink-lcm", json.dumps(record)), ("bad", "[]")):
        arrays = load_file(folder / "ink.safetensors")
        save_file(arrays, tmp_path / f"{name}.safetensors", {**stated, "canvax.training": text, "other": "o"})
    bad, card = AdapterCache(emoji.model, emoji.mesh, AdapterSettings(tmp_path, places=PLACES)).cards()
    assert (bad.name, bool(bad.fault), card.fault) == ("bad", True, "")
    assert (card.name, card.alias, list(card.trigger_words)) == ("ink-lcm", "ink-lcm", ["cat", "ink"])
    assert card.suggested["sampler"] == "LCM"
    assert card.without_effect == {"prediction_type": "epsilon"}  # the other is the model's
    assert card.metadata.keys() == {"ss_tag_frequency", "canvax.training"}


def test_words_of_its_training_are_no_strange_words(
    server: tuple[httpx.Client, ImageEngine], folder: Path, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = server
    prompts = [f"a claymation apple {tags}" for tags in ("", "<lora:ink:1>", "<lora:clay:1>")]
    hints = [client.post("/api/jobs", json=BODY | {"prompt": prompt}).json()["hints"] for prompt in prompts]
    assert ["claymation" in str(each) for each in hints] == [True, True, False]
    emoji.adapters.load("clay", folder / "clay.safetensors")
    monkeypatch.delattr("canvax.pipelines.pipeline.text_to_image")  # which needs programs
    with pytest.raises(NameError), pytest.warns(HintWarning, match="zorpoid") as warned:
        emoji("a claymation zorpoid")
    emoji.adapters.remove()
    assert "claymation" not in str(warned[0].message)


def test_files_that_cannot_be_used_are_shown_to_all(folder: Path, emoji: canvax.Pipeline, tmp_path: Path) -> None:
    """The operator in the log, clients in the list, and whoever names one: without a path or a call of Python."""
    for name in ("ink", "broken"):
        shutil.copy(folder / f"{name}.safetensors", tmp_path)
    cache = AdapterCache(emoji.model, emoji.mesh, AdapterSettings(tmp_path, rank=4, places=PLACES))
    faults = {card.name: card.fault for card in cache.cards()}
    assert [name for name, fault in faults.items() if fault] == ["broken", "ink"]
    assert "--lora-rank 8" in faults["ink"]
    first, *lines = cache.summary().splitlines()
    assert first.startswith("usable adapters: 0;")
    assert [line.partition(" ")[0] for line in lines] == ["broken", "ink"]

    def message(name: str) -> str:
        with pytest.raises(Rejected) as refused:
            cache.read(name)
        assert refused.value.code == "adapter_unusable"
        return refused.value.message

    high = message("ink")
    assert "--lora-rank 8" in high
    (tmp_path / "ink.safetensors").unlink()
    gone = message("ink")
    assert "ink.safetensors" in gone
    assert {card.name: bool(card.fault) for card in cache.cards()} == {"broken": True, "ink": True}
    faults = [card.fault for card in cache.cards()]
    assert not any(text in said for said in (high, gone, *faults) for text in ("pipe.", "[Errno", str(tmp_path)))


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

    monkeypatch.setattr("canvax.server.logs.log_to_stderr", lambda quiet: None)  # of this process, for good

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


# Textual inversions.


def test_files_have_the_names_of_prompts(data: Path) -> None:
    assert {name: path.name for name, path in embedding_files().items()} == {
        "wool": "Wool.safetensors",
        "yarn": "yarn.safetensors",
        "felt": "felt.safetensors",
        "alien": "alien.safetensors",
        "wool_old": "wool_old.pt",
    }


def test_others_are_said_where_the_user_looks(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, _ = server
    job = client.post("/api/jobs", json=BODY | {"prompt": "an alien wool_old apple"}).json()
    assert len([hint for hint in job["hints"] if "alien.safetensors" in hint or "wool_old.pt" in hint]) == 2
    assert not any(
        "wool" in hint for hint in client.post("/api/jobs", json=BODY | {"prompt": "<wool>"}).json()["hints"]
    )
    answer = client.post("/sdapi/v1/txt2img", json=BODY | {"prompt": "an alien"}).json()
    assert "alien.safetensors" in str(json.loads(answer["info"])["hints"])
    listed = {one["name"]: bool(one["fault"]) for one in client.get("/api/adapters").json()["embeddings"]}
    assert listed == {"Wool": False, "yarn": False, "felt": False, "alien": True, "wool_old": True}
    kinds = client.get("/sdapi/v1/embeddings").json()
    assert (kinds["loaded"].keys(), kinds["skipped"].keys()) == ({"Wool", "yarn", "felt"}, {"alien", "wool_old"})
    assert (kinds["loaded"]["Wool"]["vectors"], kinds["loaded"]["Wool"]["shape"]) == (2, WIDTH)


def test_rows_are_given_away(emoji: canvax.Pipeline, data: Path) -> None:
    """Where all are taken, those of the word that was named longest ago, which can still be written."""
    cache = EmbeddingCache(emoji.model, emoji.mesh)
    cache._spare = {part: ids[:6] for part, ids in cache._spare.items()}
    (wool,), _ = cache.named(["wool"])
    (felt,), _ = cache.named(["felt"])  # 2 and 4 rows
    assert cache.named(["wool"])[0] == (wool,)
    (yarn,), _ = cache.named(["yarn"])  # those of felt
    assert cache.named(["wool"])[0] == (wool,)
    (again,), _ = cache.named(["felt"])
    assert again is not felt
    with pytest.raises(InputError) as caught:
        cache.named(["felt wool yarn"])
    assert caught.value.argument == "prompt"
    params = emoji.params
    for word in (wool, felt, yarn, again, wool):
        params = cache.fill(params, (word,))
        assert cache.fill(params, (word,)) is params
        table = np.asarray(params["text_encoder"]["text_model"]["embeddings"]["token_embedding"]["weight"])
        for i, vector in word.rows["text_encoder"].items():
            np.testing.assert_array_equal(table[i], vector)
    assert cache.fill(emoji.params, (felt,)) is not emoji.params  # after weights were loaded again
    assert len(cache.summary().splitlines()) == 1 + len({"alien", "wool_old"})
    ids = reading(emoji.model, (felt,)).tokenizers["text_encoder"].ids("felt")
    assert ids == list(felt.rows["text_encoder"])


def test_models_without_weights_read_the_words(data: Path) -> None:
    """Tokens are counted before a model is loaded."""
    served = ServedModel("emoji", lambda name, weights=True: canvax.load(name, progress=False), weights=False)
    checked = served.check(JobRequest("a wool apple", seed=1))
    assert [word.name for word in checked.beside.words] == ["Wool"]
    second = served.check(JobRequest("a cat", seed=1, options={"hires": 2, "hires_prompt": "yarn"})).stages[1]
    ((read,),) = second.request.texts.stages[0].parts[0]
    assert {*served.embeddings.named(["yarn"])[0][0].rows["text_encoder"]} <= {*read.variants[0].chunks[0][0]}
    served.put_on()
    assert served.loaded_params() is not served.loaded_params(checked.beside.words)


@pytest.mark.slow
def test_the_shell(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "a wool alien apple", "--negative", "<felt>", "--steps", "2", "--seed", "3", "--json"]
    assert main([*words, "--data-dir", str(data), "--output", str(tmp_path / "a.png")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["metadata"][0]["embeddings"].keys() == {"Wool", "felt"}
    assert "alien.safetensors" in err
    assert read_metadata(tmp_path / "a.png")["embeddings"]["Wool"]["file"] == "./Wool.safetensors"


def test_two_encoders_want_vectors_each(tmp_path: Path) -> None:
    widths = {"text_encoder": 12, "text_encoder_2": 16}
    both = write(tmp_path / "both.safetensors", {"clip_l": Draw()(2, 12), "clip_g": Draw()(2, 16)})
    assert read_word(both, "both", widths).vectors.keys() == widths.keys()
    with pytest.raises(CheckpointError):
        read_word(write(tmp_path / "one.safetensors", {"emb_params": Draw()(2, 12)}), "one", widths)


# Autoencoders.


def test_input_images_are_read_by_it(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, _ = server
    image = Image.effect_noise((64, 64), 90).convert("RGB")
    sent: dict[str, Any] = {"init_images": [b64(image)], "denoising_strength": 0.3, "path": "img2img"}
    assert np.abs(drawn(client, **sent)[0] - drawn(client, vae="reader", **sent)[0]).max() > 5


def test_what_is_there_is_listed(server: tuple[httpx.Client, ImageEngine]) -> None:
    """Clients of A1111 choose one for all that follows; others name it in each request."""
    client, _ = server
    (card,) = client.get("/api/models").json()["models"]
    assert (card["vae"], {name: bool(fault) for name, fault in card["vaes"].items()}) == (
        "",
        {"hard": False, "odd": False, "soft": False, "reader": False, "other": True},
    )
    assert {one["model_name"] for one in client.get("/sdapi/v1/sd-vae").json()} == {*VAES, "reader"}
    assert client.post("/sdapi/v1/options", json={"sd_vae": "gone"}).status_code == 404
    assert client.post("/sdapi/v1/options", json={"sd_vae": "soft.safetensors"}).status_code == 200
    assert drawn(client)[1]["vae"] == "soft"
    assert "vae" not in drawn(client, vae="Automatic")[1]
    client.post("/sdapi/v1/options", json={"sd_vae": "Automatic"})
    for name, status in (("gone", 404), ("other", 400)):
        answer = client.post("/api/jobs", json=BODY | {"vae": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "vae")


def test_few_stay_on_the_devices(data: Path, small_folder: Path) -> None:
    pipe = canvax.load("emoji", progress=False, mesh=one_device())
    cache = vae_cache(pipe.model, pipe.mesh, vae_files())
    first = cache.weights("soft", pipe.params)
    for name in VAES:
        cache.weights(name, pipe.params)
        assert len(cache.held) <= KEPT
    assert cache.weights("soft", pipe.params) is not first
    with pytest.raises(Rejected):
        cache.find("gone")


def test_a_file_alone_fits(small_folder: Path, tmp_path: Path) -> None:
    """Which has no config; its arrays say what it would."""
    (tmp_path / "models/VAE").mkdir(parents=True)
    shutil.copy(small_folder / "vae" / WEIGHTS, tmp_path / "models/VAE/vae-ft-mse.safetensors")
    pipe = canvax.load(small_folder, progress=False, mesh=one_device())
    with using(str(tmp_path)):
        cache = vae_cache(pipe.model, pipe.mesh, vae_files())
    assert cache.names == {"vae-ft-mse": ""}
    assert cache.find("VAE-ft-mse.ckpt") == "vae-ft-mse"


def test_an_image_of_a1111_names_its_own() -> None:
    text = "a fox\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 64x64, VAE: {}, Version: v1.10.1"
    read = from_infotext(text.format("vae-ft-mse-840000.safetensors"))
    assert settings_left(read) == {}
    assert as_job(read)["settings"]["vae"] == "vae-ft-mse-840000"
    assert "vae" not in as_job(from_infotext(text.format("Automatic")))["settings"]
