"""ControlNets of the folder of models, and VAEs of other configs: requests name them; each config compiles once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest

import canvax
from canvax.compile.monitor import counting
from canvax.errors import CheckpointError, InputError
from canvax.models.configs import TinyConfig
from canvax.models.decode import autoencoder_of
from canvax.params import flatten, init_params
from canvax.server.adapter_cache import AdapterSettings
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.models import Announcer, ModelSet, Warm
from canvax.weights.data_folder import using
from canvax.weights.load import Component
from canvax.weights.location import Location
from canvax.weights.save import save_component
from tests.support.adapter_files import Draw, lora, write
from tests.support.control_files import adapter, controlnet
from tests.support.serving import asked, b64, by_a1111, by_job, some_colours, until

pytestmark = pytest.mark.slow

SIDE = 64
QUERY = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
BODY = {"prompt": "a cat", "seed": 3, "steps": 3, "width": SIDE, "height": SIDE}


ONE, TWO = some_colours(1), some_colours(2)


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
            assert not same(another, found)
        again, _ = by_job(client, body)
        assert same(by_job(client, BODY)[0], plain)
    assert counts.compilations == 0
    assert same(again, found)
    assert set(engine._models.named(None).controlnets.held) == {"lines", "edges"}
    both = {"control": [b64(ONE), b64(TWO)], "controlnet": ["edges", "colours"]}
    pipe = base.with_controlnet([nets / "edges", nets / "colours"])
    assert same(by_job(client, BODY | both)[0], called(pipe, control=[ONE, TWO]))


def test_units_of_a1111(server: tuple[httpx.Client, ImageEngine], base: canvax.Pipeline) -> None:
    client, _ = server
    assert client.get("/controlnet/model_list").json() == {"model_list": ["colours", "depth", "edges", "lines"]}
    assert "canny" in client.get("/controlnet/module_list").json()["module_list"]

    def drawn(*units: dict[str, Any]) -> np.ndarray:
        return by_a1111(client, BODY | {"alwayson_scripts": {"controlnet": {"args": units}}})[0]

    unit = {"image": b64(ONE), "model": "edges [d14c016b]", "module": "none", "weight": 0.8, "guidance_end": 0.7}
    job = BODY | {"controlnet": "edges", "control_scale": 0.8, "control_end": 0.7}
    assert same(drawn(unit), by_job(client, job | {"control": b64(ONE)})[0])
    made = drawn(unit | {"module": "canny", "control_mode": "ControlNet is more important"})
    job |= {"control": b64(ONE), "control_from": "canny", "control_mode": "control"}
    assert same(made, by_job(client, job)[0])
    assert same(drawn(unit | {"resize_mode": "Resize and Fill"}), drawn(unit))
    plain = drawn(unit | {"enabled": False})
    assert not same(made, plain)
    assert same(plain, by_job(client, BODY)[0])
    off = {"ControlNet": {"args": [False]}, "ADetailer": {"args": [False, False, {"ad_model": "face"}]}}
    for scripts, status in ((off, 200), (off | {"ADetailer": {"args": [True, False]}}, 422)):
        assert client.post("/sdapi/v1/txt2img", json=BODY | {"alwayson_scripts": scripts}).status_code == status
    for wrong in ({"model": "None"}, {"model": "gone"}, {"module": "openpose"}, {"image": None}, {"resize_mode": 7},
                  {"resize_mode": 2, "image": b64(ONE.resize((SIDE, 80)))}, {"mask": b64(TWO)},
                  {"control_mode": 7}):  # fmt: skip
        scripts = {"ControlNet": {"args": [unit | wrong]}}
        assert client.post("/sdapi/v1/txt2img", json=BODY | {"alwayson_scripts": scripts}).status_code in (404, 422)


def test_what_is_there_is_listed(server: tuple[httpx.Client, ImageEngine]) -> None:
    client, _ = server
    (card,) = client.get("/api/models").json()["models"]
    assert [(net["name"], net["kind"], bool(net["fault"])) for net in card["controlnets"]] == [
        ("colours", "t2i-adapter", False), ("depth", "controlnet", False), ("edges", "controlnet", False),
        ("lines", "controlnet", False), ("alien", "controlnet", True),
    ]  # fmt: skip
    shown = {"control": b64(ONE)}
    for changes, status, param in (
        ({"controlnet": "gone", **shown}, 404, "controlnet"),
        ({"controlnet": "alien", **shown}, 400, "controlnet"),
        ({"controlnet": "edges"}, 400, "controlnet"),
        ({"controlnet": ["edges", "depth"], **shown}, 400, "control"),
        (shown, 400, "control"),
    ):
        answer = client.post("/api/jobs", json=BODY | changes)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_vae_of_another_config(
    server: tuple[httpx.Client, ImageEngine], folder: Path, small_folder: Path, base: canvax.Pipeline
) -> None:
    """Alone and beside a ControlNet, reading an image as well; the second time nothing compiles."""
    client, _ = server
    (card,) = client.get("/api/models").json()["models"]
    assert card["vaes"] == {"tiny": ""}
    pipe = canvax.load(small_folder, vae=folder / "models/VAE/tiny", progress=False, mesh=base.mesh)
    found, told = by_job(client, BODY | {"vae": "tiny"})
    assert same(found, called(pipe))
    assert told["vae"] == "tiny"
    assert not same(found, by_job(client, BODY)[0])
    sent = {"vae": "tiny", "controlnet": "edges", "control": b64(ONE), "image": b64(TWO), "strength": 0.7}
    steered = called(pipe.with_controlnet(folder / "models/ControlNet/edges"), control=ONE, image=TWO, strength=0.7)
    assert same(by_job(client, BODY | sent)[0], steered)
    with counting() as counts:
        assert same(by_job(client, BODY | {"vae": "tiny"})[0], found)
        assert same(by_job(client, BODY | sent)[0], steered)
    assert counts.compilations == 0


def test_a_strict_server_exchanges_weights(folder: Path, base: canvax.Pipeline) -> None:
    """Those of its ControlNet's config, within ``--memory``; others are refused, with the flags to start it with."""
    nets = folder / "models/ControlNet"
    pipe = base.with_controlnet(nets / "edges")
    one = sum(leaf.nbytes for leaf in jax.tree.leaves(pipe.params))
    room = sum(leaf.nbytes for leaf in jax.tree.leaves(pipe.params["controlnet"]))
    settings = EngineSettings(warm=(Warm((SIDE, SIDE), (1,)),), memory=one + room * 3 // 2)
    with asked(settings, load=lambda name: pipe) as (client, engine):
        (card,) = client.get("/api/models").json()["models"]
        usable = [net["name"] for net in card["controlnets"] if not net["fault"]]
        assert (usable, bool(card["vaes"]["tiny"])) == (["depth", "edges", "lines"], True)
        held = engine._models.named(None).controlnets.held
        of_nets = {name: called(base.with_controlnet(nets / name), control=TWO) for name in ("depth", "lines")}
        plain = called(pipe, control=TWO)
        with counting() as counts:
            for name, expected in of_nets.items():
                assert same(by_job(client, BODY | {"control": b64(TWO), "controlnet": name})[0], expected)
                assert set(held) == {name}
            assert same(by_job(client, BODY | {"control": b64(TWO)})[0], plain)
        assert counts.compilations == 0
        for changes, param in (
            ({"controlnet": "colours", "control": b64(ONE)}, "controlnet"),
            ({"vae": "tiny"}, "vae"),
        ):
            answer = client.post("/api/jobs", json=BODY | changes)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_each_model_has_the_controlnets_that_fit(
    folder: Path, base: canvax.Pipeline, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one fits no model, or a further model is refused, nothing compiles."""
    edges, alien = (Location(str(folder / "models/ControlNet" / name)) for name in ("edges", "alien"))
    said, compiled = list[str](), list[str]()

    def load(name: str, *, weights: bool = True, **pinned: Any) -> canvax.Pipeline:
        if name == "broken":
            raise InputError("model", "is broken")
        return base if name == "small" else emoji

    def groups(models: ModelSet, served: Any, *, image: bool) -> Iterator[Any]:
        compiled.append(served.name)
        return iter(())

    def begun(*names: str, controlnets: tuple[Location, ...] = (edges,), **more: Any) -> ModelSet:
        settings = EngineSettings(controlnets=controlnets, **more)
        made = ModelSet(names, load, settings, said.append, Announcer(said.append, lambda build: None, lambda: None))
        made.begin()
        return made

    monkeypatch.setattr(ModelSet, "_groups", groups)
    for names, later in ((("small", "emoji"), ()), (("emoji",), ("small",))):
        made = begun(*names, on_request=later)
        assert [(net.name, bool(net.fault)) for net in made.card("small").controls] == [("edges", False)]
        assert [(net.name, bool(net.fault)) for net in made.card("emoji").controls] == [("edges", True)]
        assert str(folder) not in made.card("emoji").controls[0].fault
        (line,) = [line for line in said if edges.text in line]
        assert "emoji" in line
        assert ": small" not in line
        small, other = (made.named(name) for name in ("small", "emoji"))
        small.put_on()
        wanted = dict(flatten(base.with_controlnet(edges.text).params["controlnet"]))
        for name, leaf in flatten(small.loaded_params()["controlnet"]):
            np.testing.assert_array_equal(leaf, wanted[name])
        other.put_on()
        assert "controlnet" not in other.loaded_params()
        said.clear()
    compiled.clear()
    for error, names, networks in (
        (CheckpointError, ("small", "emoji"), (edges, alien)),
        (CheckpointError, ("emoji",), (edges,)),
        (InputError, ("small", "broken"), ()),
    ):
        with pytest.raises(error):
            begun(*names, controlnets=networks)
    assert not compiled


def test_a_file_that_is_gone_costs_its_jobs_alone(folder: Path, base: canvax.Pipeline, tmp_path: Path) -> None:
    """Beside an adapter, in two passes, too; a file with the name of the model as well."""
    nets = tmp_path / "models/ControlNet"
    for name in ("kept", "emoji"):
        shutil.copytree(folder / "models/ControlNet/edges", nets / name)
    shape = dict(flatten(base.model.networks.denoiser.spec))[QUERY + ".weight"].shape
    arrays = lora(Draw(0), shape).arrays
    (tmp_path / "models/Lora").mkdir()
    write(tmp_path / "models/Lora/ink.safetensors", {f"unet.{QUERY}{end}": array for end, array in arrays.items()})
    settings = EngineSettings(
        warm=(Warm((SIDE, SIDE), (1,)),), compile_on_demand=True, adapters=AdapterSettings(tmp_path / "models/Lora"),
    )  # fmt: skip
    with using(str(tmp_path)), asked(settings, load=lambda name: base) as (client, _):
        shutil.rmtree(nets / "emoji")
        long = client.post("/api/jobs", json=BODY | {"steps": 200, "n": 64}).json()["id"]
        job = client.post("/api/jobs", json=BODY | {"controlnet": "emoji", "control": b64(ONE)}).json()
        until(lambda: client.get(f"/api/jobs/{job['id']}").json()["status"] == "failed", 120)
        assert "emoji" in client.get(f"/api/jobs/{job['id']}").json()["error"]["message"]
        assert client.get(f"/api/jobs/{long}").json()["status"] in ("queued", "running")
        client.delete(f"/api/jobs/{long}")
        more = {"controlnet": "kept", "control": b64(ONE), "adapters": {"ink": 1.0}}
        found, _ = by_job(client, BODY | more | {"options": {"hires": 2}})
    pipe = base.with_controlnet(nets / "kept")
    pipe.adapters.load("ink", tmp_path / "models/Lora/ink.safetensors", beside=True)
    assert same(found, called(pipe, control=ONE, hires=2, adapters={"ink": 1.0}))
    assert not same(found, called(pipe, control=ONE, hires=2, adapters={}))
