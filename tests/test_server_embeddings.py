"""Textual inversions of the folder of models: prompts name them, on a server and in the shell; nothing compiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest

import canvax
from canvax.cli import main
from canvax.compile.monitor import counting
from canvax.errors import CheckpointError, InputError
from canvax.images.metadata import read_metadata
from canvax.server.embedding_cache import EmbeddingCache, reading
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import JobRequest
from canvax.server.models import ServedModel, Warm
from canvax.weights.data_folder import embedding_files, using
from canvax.weights.embeddings import read_word
from tests.support.adapter_files import Draw, write
from tests.support.serving import asked, by_a1111

BODY = {"prompt": "a red apple", "seed": 3, "steps": 3}
WIDTH = 160


@pytest.fixture(scope="module")
def emoji() -> canvax.Pipeline:
    return canvax.load("emoji", progress=False, mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A1111's: two for the model, one in its subfolder, one for another model, one pickle with a safetensors file."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "models").mkdir()
    for i, (name, width) in enumerate({"Wool": WIDTH, "yarn": WIDTH, "style/felt": WIDTH, "alien": 768}.items()):
        path = folder / "embeddings" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, {"emb_params": Draw(i)(2 + i, width) * 3})
    (folder / "embeddings/wool_old.pt").write_bytes(b"pickle")
    (folder / "embeddings/Wool.pt").write_bytes(b"pickle")
    with using(str(folder)):
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    with asked(EngineSettings(warm=(Warm(None, (1, 4)),))) as server:
        yield server


def drawn(client: httpx.Client, **more: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """An image of A1111's API and its metadata."""
    return by_a1111(client, BODY | more)


def test_files_have_the_names_of_prompts(folder: Path) -> None:
    assert {name: path.name for name, path in embedding_files().items()} == {
        "wool": "Wool.safetensors",
        "yarn": "yarn.safetensors",
        "felt": "felt.safetensors",
        "alien": "alien.safetensors",
        "wool_old": "wool_old.pt",
    }


def test_each_prompt_has_its_own(
    server: tuple[httpx.Client, ImageEngine], folder: Path, emoji: canvax.Pipeline
) -> None:
    """In one batch as alone, as ``load_embedding`` does it, in each spelling; nothing compiles."""
    client, _ = server
    prompts = ["a red apple", "a wool apple", "a yarn apple", "a (Wool:1.2) yarn apple"]
    with counting() as counts, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: drawn(client, prompt=prompt), prompts))
        alone = [drawn(client, prompt=prompt) for prompt in prompts]
        spelled = [drawn(client, prompt=f"a {word} apple")[0] for word in ("<wool>", "embedding:WOOL.safetensors")]
        against = drawn(client, negative_prompt="felt")
    assert counts.compilations == 0
    for (image, _), (single, _) in zip(together, alone, strict=True):
        assert np.abs(image - single).max() <= 1
    assert [sorted(told.get("embeddings", ())) for _, told in alone] == [[], ["Wool"], ["yarn"], ["Wool", "yarn"]]
    assert alone[1][1]["embeddings"]["Wool"]["file"] == "Wool.safetensors"
    assert against[1]["embeddings"].keys() == {"felt"}
    assert np.abs(against[0] - alone[0][0]).max() > 20
    for image in spelled:
        np.testing.assert_array_equal(image, alone[1][0])
    emoji.adapters.load_embedding(folder / "embeddings/Wool.safetensors")
    result = emoji("a wool apple", seed=3, num_inference_steps=3)
    emoji.adapters.remove()
    assert np.abs(alone[1][0] - np.asarray(result[0], np.int16)).max() <= 1
    assert result.metadata[0]["embeddings"]["Wool"]["sha256"] == alone[1][1]["embeddings"]["Wool"]["sha256"]
    assert np.abs(alone[1][0] - alone[0][0]).max() > 20


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


def test_rows_are_given_away(emoji: canvax.Pipeline, folder: Path) -> None:
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


def test_models_without_weights_read_the_words(folder: Path) -> None:
    """Tokens are counted before a model is loaded."""
    served = ServedModel("emoji", lambda name, weights=True: canvax.load(name, progress=False), weights=False)
    checked = served.check(JobRequest("a wool apple", seed=1))
    assert [word.name for word in checked.beside.words] == ["Wool"]
    second = served.check(JobRequest("a cat", seed=1, options={"hires": 2, "hires_prompt": "yarn"})).stages[1]
    ((read,),) = second.request.texts.stages[0].parts[0]
    assert {*served.embeddings.named(["yarn"])[0][0].rows["text_encoder"]} <= {*read.variants[0].chunks[0][0]}
    served.put_on()
    assert served.loaded_params() is not served.loaded_params(checked.beside.words)


def test_the_shell(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "a wool alien apple", "--negative", "<felt>", "--steps", "2", "--seed", "3", "--json"]
    assert main([*words, "--data-dir", str(folder), "--output", str(tmp_path / "a.png")]) == 0
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
