"""Autoencoders of the folder of models: requests name one in place of the model's; nothing compiles."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import canvax
from canvax.compile.monitor import counting
from canvax.images.infotext import from_infotext, settings_left
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import Rejected
from canvax.server.jobs_api import as_job
from canvax.server.models import Warm
from canvax.server.part_cache import KEPT, vae_cache
from canvax.weights.data_folder import using, vae_files
from canvax.weights.location import BUNDLED
from tests.support.serving import asked, by_a1111

BODY = {"prompt": "a red apple", "seed": 3, "steps": 3}
NAMES = ("soft", "hard", "odd")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Iterator[Path]:
    """Four autoencoders with the config of the model's, of which "reader" decodes alike; one with another config."""
    folder = tmp_path_factory.mktemp("data")
    for i, name in enumerate((*NAMES, "reader")):
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
def server(folder: Path) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    with asked(EngineSettings(warm=(Warm(None, (1, 4)),))) as server:
        yield server


def drawn(client: httpx.Client, vae: str | None = None, path: str = "txt2img", **more: Any) -> tuple[np.ndarray, Any]:
    """An image of A1111's API and its metadata."""
    settings = {"override_settings": {"sd_vae": vae}} if vae else {}
    return by_a1111(client, BODY | settings | more, path)


def test_each_request_has_its_own(server: tuple[httpx.Client, ImageEngine], folder: Path) -> None:
    """In one batch as alone, with more of them than are kept, as ``--vae`` does it; nothing compiles."""
    client, _ = server
    named = [None, *NAMES, None]
    with counting() as counts, ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda vae: drawn(client, vae), named))
        alone = [drawn(client, vae) for vae in named]
    assert counts.compilations == 0
    for (image, _), (single, _) in zip(together, alone, strict=True):
        assert np.abs(image - single).max() <= 1
    assert [told.get("vae") for _, told in alone] == named
    assert all(np.abs(alone[0][0] - image).max() > 5 for image, _ in alone[1:4])
    pipe = canvax.load("emoji", vae=folder / "models/VAE/hard", progress=False)
    image = pipe(BODY["prompt"], seed=3, num_inference_steps=3)[0]
    assert np.abs(np.asarray(image, np.int16) - alone[2][0]).max() <= 1


def test_input_images_are_read_by_it(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, _ = server
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(file, "png")
    sent = {"init_images": [base64.b64encode(file.getvalue()).decode()], "denoising_strength": 0.3, "path": "img2img"}
    assert np.abs(drawn(client, **sent)[0] - drawn(client, "reader", **sent)[0]).max() > 5


def test_what_is_there_is_listed(server: tuple[httpx.Client, ImageEngine]) -> None:
    """Clients of A1111 choose one for all that follows; others name it in each request."""
    client, _ = server
    (card,) = client.get("/api/models").json()["models"]
    assert (card["vae"], {name: bool(fault) for name, fault in card["vaes"].items()}) == (
        "",
        {"hard": False, "odd": False, "soft": False, "reader": False, "other": True},
    )
    assert {one["model_name"] for one in client.get("/sdapi/v1/sd-vae").json()} == {*NAMES, "reader"}
    assert client.post("/sdapi/v1/options", json={"sd_vae": "gone"}).status_code == 404
    assert client.post("/sdapi/v1/options", json={"sd_vae": "soft.safetensors"}).status_code == 200
    assert drawn(client)[1]["vae"] == "soft"
    assert "vae" not in drawn(client, "Automatic")[1]
    client.post("/sdapi/v1/options", json={"sd_vae": "Automatic"})
    for name, status in (("gone", 404), ("other", 400)):
        answer = client.post("/api/jobs", json=BODY | {"vae": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "vae")


def test_few_stay_on_the_devices(folder: Path, small_folder: Path) -> None:
    pipe = canvax.load("emoji", progress=False)
    cache = vae_cache(pipe.model, pipe.mesh, vae_files())
    first = cache.weights("soft", pipe.params)
    for name in NAMES:
        cache.weights(name, pipe.params)
        assert len(cache.held) <= KEPT
    assert cache.weights("soft", pipe.params) is not first
    with pytest.raises(Rejected):
        cache.find("gone")


def test_a_file_alone_fits(small_folder: Path, tmp_path: Path) -> None:
    """Which has no config; its arrays say what it would."""
    (tmp_path / "models/VAE").mkdir(parents=True)
    shutil.copy(small_folder / "vae" / WEIGHTS, tmp_path / "models/VAE/vae-ft-mse.safetensors")
    pipe = canvax.load(small_folder, progress=False)
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
