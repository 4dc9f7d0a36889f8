"""ControlNets of the folder of models, and VAEs of other configs: requests name them; each config compiles once."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.compile.monitor import counting
from canvax.models.configs import TinyConfig
from canvax.models.decode import autoencoder_of
from canvax.params import init_params
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.models import Warm
from canvax.weights.data_folder import using
from canvax.weights.load import Component
from canvax.weights.save import save_component
from tests.support.control_files import adapter, controlnet
from tests.support.serving import asked, by_job

SIDE = 64
BODY = {"prompt": "a cat", "seed": 3, "steps": 3, "width": SIDE, "height": SIDE}


def picture(seed: int) -> Image.Image:
    """Some colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8)
    return Image.fromarray(np.kron(colours, np.ones((8, 8, 1), np.uint8)))


def b64(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


ONE, TWO = picture(1), picture(2)


@pytest.fixture(scope="module")
def base(small_folder: Path) -> canvax.Pipeline:
    return canvax.load(small_folder, progress=False, mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, base: canvax.Pipeline) -> Iterator[Path]:
    """Two ControlNets of one config, a T2I-Adapter, a ControlNet for another model; a tiny VAE."""
    folder = tmp_path_factory.mktemp("data")
    nets = folder / "models/ControlNet"
    for i, name in enumerate(("edges", "depth", "lines")):
        controlnet(nets / name, base, seed=i, strength=0.5, sees=30.0)
    adapter(nets / "colours", base)
    controlnet(nets / "alien", base, cross_attention_dim=768)
    cfg = TinyConfig((3), latent_channels=base.model.vae.latent_channels)
    spec = autoencoder_of(cfg).spec
    config = {**vars(cfg), "_class_name": "AutoencoderTiny"}
    save_component(folder / "models/VAE/tiny", Component("", spec, "diffusers"), init_params(spec, 5), config)
    with using(str(folder)):
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path, base: canvax.Pipeline) -> Iterator[tuple[httpx.Client, ImageEngine]]:
    settings = EngineSettings(warm=(Warm((SIDE, SIDE), (1,)),), compile_on_demand=True)
    with asked(settings, load=lambda name: base) as server:
        yield server


def called(pipe: canvax.Pipeline, **more: Any) -> np.ndarray:
    """The same image of a pipeline."""
    call = {"prompt": "a cat", "num_inference_steps": 3, "height": SIDE, "width": SIDE, "seed": 3, **more}
    return np.asarray(pipe(**call, progress=False)[0], np.int16)


def same(image: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(image - other).max() <= 2)


def test_requests_name_them(server: tuple[httpx.Client, ImageEngine], folder: Path, base: canvax.Pipeline) -> None:
    """The pixels of ``with_controlnet``. Another picture or network of the same config compiles nothing."""
    client, engine = server
    nets = folder / "models/ControlNet"
    plain, _ = by_job(client, BODY)
    body = BODY | {"control": b64(ONE), "controlnet": "edges", "control_scale": 0.8}
    found, told = by_job(client, body)
    assert same(found, called(base.with_controlnet(nets / "edges"), control=ONE, control_scale=0.8))
    assert not same(found, plain)
    assert (told["controlnet"], len(told["control_sha256"]), told["model"]) == (["edges"], 1, "emoji")
    with counting() as counts:
        for name in ("depth", "lines", "edges"):
            another, told = by_job(client, body | {"controlnet": name, "control": b64(TWO)})
            assert told["controlnet"] == [name]
            if name == "depth":
                assert same(another, called(base.with_controlnet(nets / "depth"), control=TWO, control_scale=0.8))
        again, _ = by_job(client, body)
        assert same(by_job(client, BODY)[0], plain)
    assert counts.compilations == 0
    assert same(again, found)
    assert set(engine._models.named(None).controlnets.held) == {"lines", "edges"}
    both = {"control": [b64(ONE), b64(TWO)], "controlnet": ["edges", "colours"]}
    pipe = base.with_controlnet([nets / "edges", nets / "colours"])
    assert same(by_job(client, BODY | both)[0], called(pipe, control=[ONE, TWO]))
