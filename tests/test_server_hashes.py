"""Hashes of model files, as A1111 names a file, and the size of an image whose request names none."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from PIL import Image

import canvax
from canvax.compile.cache import FOLDER
from canvax.images.formats import INFOTEXT, save_keywords
from canvax.server import hashes
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.hashes import compute_hash, known_hash
from canvax.server.models import Warm
from tests.support.drawing import one_device
from tests.support.serving import asked, by_a1111, until


def test_a_hash_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    file.write_bytes(b"one")
    other.write_bytes(b"two")
    assert known_hash(file) == ""
    for path in (file, other):
        assert compute_hash(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(hashes, "sha256_of", None)
    assert known_hash(file) == compute_hash(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"three")
    assert known_hash(file) == ""
    (tmp_path / "cache/hashes.json").write_text('{"x": 1')
    assert known_hash(other) == ""


def test_without_a_cache_folder_it_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    assert compute_hash(tmp_path / "a") == hashlib.sha256(b"one").hexdigest()
    assert known_hash(tmp_path / "a") == ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    """A model as if it were in one file, with programs for a size that is not its own."""
    file = tmp_path_factory.mktemp("models") / "small.safetensors"
    file.write_bytes(b"weights")

    def load(name: str) -> canvax.Pipeline:
        pipe = canvax.load(name, progress=False, mesh=one_device())
        return replace(pipe, model=replace(pipe.model, files=replace(pipe.model.files, path=file)))

    with asked(EngineSettings(warm=(Warm((96, 64), (1,)),)), load=load) as server:
        yield server


def test_a_file_has_its_hash_in_answers_and_images(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, engine = server
    until(lambda: engine.models()[0].sha256)
    digest = hashlib.sha256(b"weights").hexdigest()
    listed = client.get("/sdapi/v1/sd-models").json()[0]
    assert (listed["hash"], listed["sha256"], listed["title"]) == (digest[:10], digest, f"emoji [{digest[:10]}]")
    answer = client.post("/sdapi/v1/txt2img", json={"prompt": "a cat", "steps": 1}).json()
    assert f'"sd_model_hash":"{digest[:10]}"' in answer["info"].replace(": ", ":")
    with Image.open(io.BytesIO(base64.b64decode(answer["images"][0]))) as image:
        assert f"Model hash: {digest[:10]}, Model: emoji" in image.info[INFOTEXT]


def test_an_image_of_another_file_is_told(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, engine = server
    until(lambda: engine.models()[0].sha256)
    digest = hashlib.sha256(b"weights").hexdigest()
    for model, mark, differs in (
        ("models/Emoji.ckpt", "0" * 64, True),
        ("emoji", digest, False),
        ("emoji", "", False),
        ("other", "0" * 64, False),
    ):
        file, recorded = io.BytesIO(), {"prompt": "a cat", "model": model, "model_sha256": mark, "canvax": "0.1.0"}
        Image.new("RGB", (8, 8)).save(file, "png", **save_keywords("PNG", recorded))
        missing = client.post("/api/inspect", content=file.getvalue()).json()["missing"]
        assert any(digest[:10] in text for text in missing) == differs


def test_without_a_size_it_is_one_that_is_ready(server: tuple[httpx.Client, ImageEngine]) -> None:
    """The model's own where that is ready, else the first of ``--warm``."""
    client, _ = server
    (card,) = client.get("/api/models").json()["models"]
    assert (card["native"], card["size"]) == ([64, 64], [96, 64])
    for more in ({}, {"height": 64}):
        _, told = by_a1111(client, {"prompt": "a cat", "steps": 1, **more})
        assert (told["width"], told["height"]) == (96, 64)
    assert client.post("/api/jobs", json={"prompt": "a cat", "width": 64}).json()["error"]["code"] == "size_not_ready"
