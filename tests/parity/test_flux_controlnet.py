"""ControlNets of FLUX.1 against diffusers: whole pipelines with one and two networks, their files and full sizes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import canvax
from canvax.cli import main
from canvax.families.flux import NAMES
from canvax.models.flux import FluxConfig
from canvax.models.flux_controlnet import FluxControlNet
from canvax.parallel.place import on_host
from canvax.params import count, flatten
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import JobRequest, State
from canvax.server.metrics import Metrics
from canvax.server.models import Warm
from canvax.weights.identify import inspect
from tests.support.serving import held, until

from .families import FLUX_SIZES, Model, flux_network, flux_original, picture, write
from .reference import given_noise, psnr, randomise
from .transformers_reference import same_names_and_shapes, stored, unfused

pytestmark = pytest.mark.slow

HEIGHT, WIDTH = 48, 80
BLOCKS = {"num_layers": 3, "num_single_layers": 3}
SHOWN = [picture(HEIGHT, WIDTH), picture(HEIGHT, WIDTH, 1.0)]
KINDS: dict[str, dict[str, Any]] = {
    "depth": {},
    "union": {"num_mode": 10},
    "pro-2.0": {"num_single_layers": 0, "guidance_embeds": False},
    "xlabs": {"num_single_layers": 0, "conditioning_embedding_channels": 4, "patch_size": 2},
}
"""As released, but small: fewer blocks than the model, so that the places of their outputs matter."""


def control_network(kind: str = "depth", seed: int = 5) -> Any:
    """A network whose attention is far from even, so that one token more matters."""
    sizes = FLUX_SIZES | {"in_channels": 16, "pooled_projection_dim": 64, "guidance_embeds": True}
    module: Any = randomise(diffusers.FluxControlNetModel(**sizes | KINDS[kind]), seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("norm_q.weight", "norm_added_q.weight", "mode_embedder.weight")):
                weight.mul_(4)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """FLUX.1-dev with three blocks of each kind."""
    made = Model("flux-dev", tmp_path_factory.mktemp("model") / "flux")
    flux_network(pooled_projection_dim=64, guidance_embeds=True, **BLOCKS).save_pretrained(made.folder / "transformer")
    made.theirs, made.ours = made.opened(), made.loaded()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("nets")

    @cache
    def written(kind: str) -> Path:
        control_network(kind).save_pretrained(root / kind)
        return root / kind

    return written


def reference(model: Model, kinds: Sequence[str], monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> np.ndarray:
    nets = [control_network(kind) for kind in kinds]
    parts = {
        name: part
        for name, part in model.theirs.components.items()
        if name not in ("image_encoder", "feature_extractor")
    }
    pipe = diffusers.FluxControlNetPipeline(**parts, controlnet=nets[0] if len(nets) == 1 else nets)
    pipe.set_progress_bar_config(disable=True)
    start = model.noise(HEIGHT, WIDTH)
    given_noise(monkeypatch, pipe, start)
    return model.reference(latents=start, pipe=pipe, num_inference_steps=4, guidance_scale=2.0, **keywords)


def draw(model: Model, pipe: canvax.Pipeline, **keywords: Any) -> canvax.Result:
    start = {"latents": model.noise(HEIGHT, WIDTH), "height": HEIGHT, "width": WIDTH}
    return model.draw(pipe, **start | {"num_inference_steps": 4, "guidance_scale": 2.0} | keywords)


CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "one": (["depth"], {"control_image": SHOWN[0]}, {"control": SHOWN[0]}),
    "union": (["union"], {"control_image": SHOWN[0], "control_mode": 2}, {"control": {"depth": SHOWN[0]}}),
    "pro": (["pro-2.0"], {"control_image": SHOWN[0]}, {"control": SHOWN[0]}),
    "xlabs": (["xlabs"], {"control_image": SHOWN[0]}, {"control": SHOWN[0]}),
    "window": (
        ["depth"],
        {"control_image": SHOWN[0], "controlnet_conditioning_scale": 0.7, "control_guidance_start": 0.2,
         "control_guidance_end": 0.8},
        {"control": SHOWN[0], "control_scale": 0.7, "control_start": 0.2, "control_end": 0.8},
    ),
    "two": (
        ["depth", "union"],
        {"control_image": SHOWN, "control_mode": [None, 4], "controlnet_conditioning_scale": [0.5, 0.9],
         "control_guidance_start": [0.0, 0.3], "control_guidance_end": [0.6, 1.0]},
        {"control": [SHOWN[0], {"pose": SHOWN[1]}], "control_scale": (0.5, 0.9), "control_start": (0.0, 0.3),
         "control_end": (0.6, 1.0)},
    ),
    "one twice": (
        ["union", "union"],
        {"control_image": SHOWN, "control_mode": [0, 4], "controlnet_conditioning_scale": [0.5, 0.9]},
        {"control": [{"canny": SHOWN[0]}, {"4:0.9": SHOWN[1]}], "control_scale": (0.5, 1.0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_same_picture(case: str, model: Model, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts side by side; the control image matters."""
    kinds, theirs, asked = CASES[case]
    pipe = model.ours.with_controlnet([folder(kind) for kind in kinds])
    want = reference(model, kinds, monkeypatch, **theirs)
    assert psnr(draw(model, pipe, **asked).pixels, want) > 60
    assert psnr(draw(model, pipe).pixels, want) < 40
    if case == "one twice":
        assert pipe.params is not None
        assert pipe.params["controlnet_1"] is pipe.params["controlnet"]


def xlabs_original(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays under the names of XLabs' code, by a table that is the test's."""
    named = {name.replace("controlnet_x_embedder", "pos_embed_input"): array for name, array in found.items()}
    places = {"conv_in": 0, **{f"blocks.{i}": 2 * i + 2 for i in range(6)}, "conv_out": 14}
    for ours, theirs in places.items():
        named = {name.replace(f"input_hint_block.{ours}.", f"input_hint_block.{theirs}."): array
                 for name, array in named.items()}  # fmt: skip
    return flux_original(named)


@pytest.mark.parametrize("kind", KINDS)
def test_files(kind: str, model: Model, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A file without a config is the same network as the folder; ``canvax models`` lists it."""
    pipe, module = model.ours.with_controlnet(folder(kind)), control_network(kind)
    arrays = stored(module)
    path = write(tmp_path / "net.safetensors", xlabs_original(arrays) if kind == "xlabs" else arrays)
    other = model.ours.with_controlnet(path)
    found, want = other.model.networks.controls[0][1], pipe.model.networks.controls[0][1]
    assert found == want
    assert pipe.params is not None
    assert other.params is not None
    wanted = dict(flatten(pipe.params["controlnet"]))
    for name, leaf in flatten(other.params["controlnet"]):
        np.testing.assert_array_equal(leaf, wanted[name])
    report = inspect(path)
    assert report is not None
    assert (report.family, report.kind and report.kind.flag) == ("FLUX.1", "--controlnet")


@pytest.mark.parametrize("kind", ["union", "xlabs"])
def test_streamed_weights(kind: str, model: Model, folder: Callable[[str], Path]) -> None:
    """Those of the network wait in the host's memory, too; the image is the same, and nothing compiles anew."""
    pipe, usual = (each.with_controlnet(folder(kind)) for each in (model.loaded(offload="layers"), model.ours))
    control: Any = {"depth": SHOWN[0]} if kind == "union" else SHOWN[0]
    np.testing.assert_array_equal(*(draw(model, each, control=control).pixels for each in (pipe, usual)))
    assert draw(model, pipe, control=control, control_scale=0.5, num_inference_steps=3).compilations == 0
    assert pipe.params is not None
    spec = dict(flatten(pipe.model.networks.controls[0][1].spec))
    leaves = dict(flatten(pipe.params["controlnet"]))
    assert {name for name, leaf in leaves.items() if on_host(leaf)} == {name for name in spec if spec[name].large}


def test_nothing_compiles_twice(model: Model, folder: Callable[[str], Path]) -> None:
    """Another image, type, strength, window and prompt are data."""
    pipe = model.ours.with_controlnet(folder("union"))
    usual: dict[str, Any] = {"control": {"depth": SHOWN[0]}}
    fast = canvax.Options(quality="fast", progress=False)
    found = [draw(model, pipe, **usual).pixels]
    for changes in (
        {"control": {"depth": SHOWN[1]}}, {"control": {"tile": SHOWN[0]}}, {"control": {"depth:0.5": SHOWN[0]}},
        {"control_scale": 0.8}, {"control_end": 0.5}, {"control_start": 0.5}, {"prompt": ["a hen"] * 2},
        {"image": SHOWN[1], "latents": None, "strength": 0.7, "seed": 1}, {"num_inference_steps": 5},
        {"num_inference_steps": 20}, {"num_inference_steps": 20, "options": fast},
    ):  # fmt: skip
        result = draw(model, pipe, **usual | changes)
        assert result.compilations == 0 or "image" in changes, changes  # whose encoder is one more program
        assert all(psnr(result.pixels, other) < 60 for other in found), changes
        found.append(result.pixels)
    without = draw(model, pipe)
    np.testing.assert_allclose(draw(model, pipe, **usual, control_scale=0).pixels, without.pixels, atol=1e-4)


def test_references_and_control(
    folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kontext with a control image: only the image's tokens are changed, so strength 0 is no control."""
    monkeypatch.setattr("canvax.models.networks.REFERENCE_BUCKET", 64)
    monkeypatch.setattr("canvax.models.flux.REFERENCE_SIZES", ((HEIGHT, WIDTH),))
    kontext = Model("flux-kontext", tmp_path_factory.mktemp("kontext") / "model")
    pipe = kontext.ours.with_controlnet(folder("depth"))
    asked: dict[str, Any] = {"image": picture(HEIGHT, WIDTH), "control": SHOWN[1]}
    want = draw(kontext, kontext.ours, image=asked["image"]).pixels
    assert psnr(draw(kontext, pipe, **asked, control_scale=0).pixels, want) > 80
    assert psnr(draw(kontext, pipe, **asked).pixels, want) < 40


def test_refusals(model: Model, small: canvax.Pipeline, folder: Callable[[str], Path], tmp_path: Path) -> None:
    pipe = model.ours.with_controlnet([folder("union"), folder("depth")])
    for argument, changes in (
        ("control", {"control": [SHOWN[0], None]}),
        ("control", {"control": [{"depth": SHOWN[0], "canny": SHOWN[1]}, None]}),
        ("control", {"control": [{"dapth": SHOWN[0]}, None]}),
        ("control", {"control": [{"10": SHOWN[0]}, None]}),
        ("control", {"control": [None, {"depth": SHOWN[0]}]}),
        ("control_mode", {"control": [None, SHOWN[0]], "control_mode": "guess"}),
        ("control_mode", {"control": [None, SHOWN[0]], "control_mode": ("balanced", "prompt")}),
    ):  # fmt: skip
        with pytest.raises(canvax.InputError) as caught:
            draw(model, pipe, **changes)
        assert caught.value.argument == argument, changes
    control_network("depth").save_pretrained(tmp_path / "wide")
    other: Any = diffusers.FluxControlNetModel(
        **FLUX_SIZES | {"in_channels": 16, "pooled_projection_dim": 48, "num_layers": 1, "num_single_layers": 0}
    )
    other.save_pretrained(tmp_path / "other")
    for base, net in ((small, folder("depth")), (model.ours, tmp_path / "other")):
        with pytest.raises(canvax.CheckpointError):
            base.with_controlnet(net)
    unet: Any = diffusers.ControlNetModel(block_out_channels=(32, 64), down_block_types=("DownBlock2D",) * 2)
    unet.save_pretrained(tmp_path / "unet")
    with pytest.raises(canvax.CheckpointError):
        model.ours.with_controlnet(tmp_path / "unet")


def test_commands(model: Model, folder: Callable[[str], Path], tmp_path: Path) -> None:
    picture(HEIGHT, WIDTH).save(tmp_path / "depth.png")
    words = ["generate", "a fox", "-m", str(model.folder), "--controlnet", str(folder("union")), "--steps", "2"]
    words += ["--control", f"depth={tmp_path / 'depth.png'}", "--control-scale", "0.6", "-o", str(tmp_path / "out.png")]
    assert main([*words, "--quiet"]) == 0
    assert (tmp_path / "out.png").is_file()


def test_requests_to_a_server(model: Model, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with a control image and one without share a batch."""
    pipe = model.ours.with_controlnet([folder("union"), folder("depth")])
    monkeypatch.setattr("canvax.server.group.best_batch", lambda row, waiting: 2)
    settings = EngineSettings(warm=(Warm((WIDTH, HEIGHT), (1, 2)),), compile_on_demand=False)
    engine = ImageEngine(["flux"], settings, Metrics(), lambda name, **_: pipe)
    engine.start()
    try:
        until(lambda: engine.state is not State.STARTING, 300)
        assert engine.failure is None
        assert [card.kind for card in engine.models()[0].controls] == ["union", "controlnet"]
        asks: list[dict[str, Any]] = [{"control": [{"tile": SHOWN[0]}, None]}, {}, {"control": [None, SHOWN[1]]}]
        with held(engine):
            usual = {"prompt": "a fox", "steps": 3, "seed": 4, "width": WIDTH, "height": HEIGHT}
            jobs = [engine.submit(JobRequest(**usual, **ask)) for ask in asks]
        for ask, job in zip(asks, jobs, strict=True):
            until(lambda job=job: job.status.over, 300)
            call = {"num_inference_steps": 3, "seed": 4, "height": HEIGHT, "width": WIDTH, "progress": False}
            got = np.asarray(Image.open(io.BytesIO(job.pictures[0].data or b"")), np.float32) / 255
            assert psnr(got, pipe("a fox", **call, **ask).pixels[0]) > 45, ask
    finally:
        engine.close()


RELEASED: dict[str, tuple[dict[str, Any], float]] = {
    "InstantX Union": ({"num_layers": 5, "num_single_layers": 10, "num_mode": 10}, 6.15),
    "Union-Pro-2.0": ({"num_layers": 6, "num_single_layers": 0}, 3.98),
}


@pytest.mark.parametrize("name", RELEASED)
def test_full_size(name: str) -> None:
    """Every name and shape of the reference's checkpoint, and the size of the released file in GiB of bfloat16."""
    fields, size = RELEASED[name]
    with torch.device("meta"):
        theirs = diffusers.FluxControlNetModel(**fields, guidance_embeds=True)
    net = FluxControlNet.from_dict(dict(theirs.config), FluxConfig(guidance_embeds=True), None)
    same_names_and_shapes(unfused(stored(theirs), net.spec, NAMES), net.spec)
    assert 2 * count(net.spec) / 2**30 == pytest.approx(size, abs=0.01)


@pytest.mark.weekly
def test_the_page_runs(model: Model, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/controlnet.md about FLUX.1, with small random networks."""
    page = (Path(__file__).parents[2] / "docs" / "controlnet.md").read_text(encoding="utf-8")
    given = canvax.Pipeline.with_controlnet
    pro, union = folder("pro-2.0"), folder("union")
    monkeypatch.setattr(canvax, "load", lambda _, controlnet: given(model.ours, pro))
    monkeypatch.setattr(canvax.Pipeline, "with_controlnet", lambda pipe, files: given(pipe, [union] * len(files)))
    names: dict[str, Any] = {"canvax": canvax, "pose": SHOWN[0], "depth": SHOWN[1]}
    (block,) = (text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "FLUX.1" in text)
    exec(block, names)
    assert isinstance(names["result"], canvax.Result)
