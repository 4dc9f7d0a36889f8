"""Control images: what a call says of them, what compiles, what company changes, and files that cannot be used.

Numbers are held against PyTorch diffusers in ``parity/test_controlnet.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image, ImageColor
from safetensors.numpy import load_file, save_file
from scipy import ndimage

import canvax
from canvax.cli import BAD_INPUT, main
from canvax.cli.again import again
from canvax.compile.additions import ReadsControls
from canvax.compile.kinds import Kinds
from canvax.engine.batch import Batch, ParkedImage
from canvax.images.maps import canny, control_map
from canvax.images.metadata import read_metadata
from canvax.models.controlnet import ControlNet, scaled
from canvax.models.t2i_adapter import AdapterConfig, T2IAdapter
from canvax.noise import initial_noise, seed_keys
from canvax.params import init_params
from canvax.pipelines.control import check_control, layer_weights, strengths
from canvax.pipelines.generate import sampler_table
from canvax.pipelines.prepare import columns_of
from canvax.pipelines.request import Call, make_request
from canvax.scale import named_images
from canvax.scale.rows import Row
from canvax.scale.work import Worker
from tests.support.control_files import adapter, config_of, controlnet, edges, union
from tests.support.drawing import draw, far, one_device
from tests.support.parked import parked
from tests.support.small_checkpoint import UNET
from tests.support.small_sdxl import build

QUIET = canvax.Options(progress=False)
LATENTS = (8, 8, 4)
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(small: canvax.Pipeline) -> canvax.Pipeline:
    """A small random model of 64 x 64 pixels."""
    return small


@pytest.fixture(scope="module")
def folders(base: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two ControlNets and a T2I-Adapter for it."""
    root = tmp_path_factory.mktemp("nets")
    nets = [controlnet(root / f"net{i}", base, i, strength=0.5) for i in range(2)]
    return [*nets, adapter(root / "adapter", base)]


@pytest.fixture(scope="module")
def pipe(base: canvax.Pipeline, folders: list[Path]) -> canvax.Pipeline:
    return base.with_controlnet(folders[0])


@pytest.mark.slow
def test_scale_zero_is_no_control(base: canvax.Pipeline, pipe: canvax.Pipeline) -> None:
    want = draw(base).latents
    assert far(draw(pipe, control=edges(1), control_scale=0).latents, want) < 1e-4
    assert far(draw(pipe, control=edges(1)).latents, want) > 1e-2
    assert draw(pipe).compilations == 0  # without a control image it is the model as it was
    np.testing.assert_array_equal(draw(pipe).latents, want)


def test_an_image_in_place_of_control(base: canvax.Pipeline, pipe: canvax.Pipeline) -> None:
    """As PyTorch diffusers' control pipelines are called, where ``image`` is the control image."""
    with pytest.warns(canvax.HintWarning) as caught:
        draw(pipe, image=edges(1))
    assert {getattr(warning.message, "argument", "") for warning in caught} == {"image"}
    draw(pipe, image=edges(1), control=edges(1))  # warnings are errors
    draw(pipe, image=edges(1), strength=0.5)
    draw(base, image=edges(1))


def test_scale_zero_of_what_overflowed() -> None:
    found = jax.jit(scaled)(np.full((2, 1, 1, 3), np.inf, np.float32), np.array([0, 1], np.float32))
    np.testing.assert_array_equal(found[0], 0)
    assert np.isinf(found[1]).all()


def test_nothing_recompiles(pipe: canvax.Pipeline) -> None:
    first = draw(pipe, control=edges(1))
    found = [first.latents]
    for changes in (
        {"control": edges(2)}, {"control": np.asarray(edges(3))}, {"control_scale": 0.5}, {"control_start": 0.3},
        {"control_end": 0.5}, {"control_mode": "guess"}, {"control_mode": "prompt"}, {"control_mode": "control"},
        {"control": edges(4, (200, 96)), "height": 64, "width": 64}, {"sampler": "Heun"}, {"num_inference_steps": 70},
    ):  # fmt: skip
        result = draw(pipe, **{"control": edges(1)} | changes)
        assert result.compilations == 0, changes
        assert all(far(result.latents, other) > 1e-4 for other in found), changes
        found.append(result.latents)


def test_windows_of_a_fast_run_are_steps(pipe: canvax.Pipeline) -> None:
    """Rows that are left out count."""
    options = dataclasses.replace(QUIET, control_end=0.5, quality="fast")
    call = Call("a cat", control=edges(1), num_inference_steps=20, options=options)
    request = make_request(pipe.model, call)
    table = sampler_table(pipe.model, request)
    (columns,) = columns_of(pipe.model, request, table, ["controlnet"])
    np.testing.assert_array_equal(columns["control"][:, 0, 0, 0] > 0, table.step < 10)
    assert len(table) < 20


@pytest.mark.parametrize("kind", ["full_adapter", "full_adapter_xl", "light_adapter"])
def test_an_adapter_reads_any_size(kind: str) -> None:
    """Also sides that its first step cannot divide: those of SDXL's fold 16 pixels, and images are multiples of 8."""
    channels, factor = ([8, 16], 16 if kind == "full_adapter_xl" else 8)
    net = T2IAdapter.from_dict({"channels": channels, "adapter_type": kind, "downscale_factor": factor}, UNET)
    p = init_params(net.spec, 0)
    image = np.random.default_rng(0).random((1, 72, 104, 3), np.float32)
    features = net.encode(p, jax.numpy.asarray(image))
    assert [one.shape for one in features] == list(net.shapes((1, 9, 13, 4)))
    assert all(np.isfinite(one).all() for one in features)


def test_windows_are_rows(pipe: canvax.Pipeline) -> None:
    """As PyTorch diffusers counts them: a row is in if all of it lies within."""
    options = dataclasses.replace(QUIET, control_start=0.2, control_end=0.75, control_scale=0.5)
    control = check_control(pipe.model, edges(1), 1, options)
    assert control is not None
    column = strengths(pipe.model, control, options, 8)
    assert column.shape == (8, 1, 2, 5)
    np.testing.assert_array_equal(column[:, 0, 0, 0], [0, 0, 0.5, 0.5, 0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(column[:, 0, 0], column[:, 0, 1])
    guess = strengths(pipe.model, control, dataclasses.replace(QUIET, control_mode="guess"), 2)
    np.testing.assert_array_equal(guess[:, :, 0], 0)
    np.testing.assert_allclose(guess[0, 0, 1], np.logspace(-1, 0, 5), rtol=1e-6)


def test_soft_weights() -> None:
    """Of A1111's extension: 0.825^(12 - i); SDXL has the first ten of these, an adapter four of its own."""
    sd = ControlNet.from_dict({"cross_attention_dim": 768})
    xl = ControlNet.from_dict({
        "block_out_channels": [320, 640, 1280], "down_block_types": ["DownBlock2D"] + ["CrossAttnDownBlock2D"] * 2,
    })  # fmt: skip
    assert (sd.layers, xl.layers) == (13, 10)
    np.testing.assert_allclose(layer_weights(sd, "prompt"), 0.825 ** np.arange(12, -1, -1))
    np.testing.assert_allclose(layer_weights(xl, "control"), 0.825 ** np.arange(12, 2, -1))
    kind = T2IAdapter(AdapterConfig(), sd.unet)
    np.testing.assert_allclose(layer_weights(kind, "prompt"), [0.25, 0.62, 0.825, 1.0])
    np.testing.assert_allclose(layer_weights(kind, "guess"), np.ones(4))


def test_rows_outside_of_the_window_cost_nothing(pipe: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is not evaluated where no image needs it: the host says so for each row."""
    seen: list[np.ndarray] = []
    original = Batch._window

    def spy(self: Batch, *arguments: Any) -> Any:
        columns, shared = original(self, *arguments)
        seen.append(shared["any control"][:4, 0])
        return columns, shared

    monkeypatch.setattr(Batch, "_window", spy)
    draw(pipe, control=edges(1), control_end=0.5)
    assert [bool(one) for one in seen[0]] == [True, True, False, False]


def test_company_changes_nothing(pipe: canvax.Pipeline) -> None:
    """Images that come and go in one batch, each with a control image, a strength and a window of its own."""
    assert pipe.params is not None
    latents, names = (2, *LATENTS), ("controlnet",)
    ready = pipe.programs.ready(pipe.params, latents, Kinds().adding(ReadsControls(names)))
    batch = Batch(ready, pipe.params, pipe.programs.mesh, latents)

    def carried(seed: int, steps: int, **options: Any) -> ParkedImage:
        from canvax.samplers import build_table

        table = build_table(pipe.model.scheduler, steps, sampler="euler_a", guidance=4.0)
        chosen = dataclasses.replace(QUIET, **options)
        control = check_control(pipe.model, edges(seed), 1, chosen)
        assert control is not None
        (hint,) = ready[names[0]](pipe.params or {}, np.asarray(edges(seed), np.float32)[None] / 255)
        prompts = tuple(
            {"text": np.asarray(pipe.encode(text)["text"]), names[0]: (np.asarray(hint),)} for text in ("", "a cat")
        )
        noise, key = initial_noise([seed], LATENTS)[0], seed_keys([seed])[0]
        column = strengths(pipe.model, control, chosen, len(table))
        return parked(noise, prompts, key, table, columns={"control": column})

    batch.join({0: carried(1, 6, control_end=0.5)})
    batch.step(2)
    batch.join({1: carried(2, 3, control_scale=0.3)})
    found: dict[int, np.ndarray] = {}
    while batch.rows_left:
        moved = batch.carried()  # parked and put back, as a server does
        batch = Batch(ready, pipe.params, pipe.programs.mesh, latents)
        batch.join(moved)
        found |= {slot: batch.take(slot) for slot in batch.step(1)}
    for slot, (seed, steps, options) in enumerate([(1, 6, {"control_end": 0.5}), (2, 3, {"control_scale": 0.3})]):
        alone = draw(pipe, control=edges(seed), seed=seed, num_inference_steps=steps, sampler="euler_a",
                     guidance_scale=4.0, **options)  # fmt: skip
        assert far(found[slot], alone.latents[0]) < 2e-4


@pytest.mark.slow
def test_several_networks(base: canvax.Pipeline, folders: list[Path], pipe: canvax.Pipeline) -> None:
    both = base.with_controlnet(folders[:2])
    one = draw(pipe, control=edges(1)).latents
    assert far(draw(both, control=[edges(1), None]).latents, one) < 1e-5
    assert far(draw(both, control=[edges(1), edges(2)], control_scale=(1, 0)).latents, one) < 1e-4
    assert far(draw(both, control=[edges(1), edges(2)]).latents, one) > 1e-3
    windows = {"control_scale": (1, 0.5), "control_start": (0, 0.5), "control_mode": ("guess", "balanced")}
    result = draw(both, control=[edges(1), [edges(2)]], **windows)
    assert result.compilations == 0
    assert result.metadata[0]["options"] == {name: tuple(value) for name, value in windows.items()}
    assert [*map(bool, draw(both, control=[None, edges(2)]).metadata[0]["control_sha256"])] == [False, True]
    mixed = base.with_controlnet([folders[2], folders[0]])
    assert far(draw(mixed, control=[edges(1), None]).latents, draw(base).latents) > 1e-3
    assert far(draw(mixed, control=[edges(1), edges(1)], control_scale=(0, 1)).latents, one) < 1e-4


def test_weights_are_shared_and_apart(base: canvax.Pipeline, pipe: canvax.Pipeline, tmp_path: Path) -> None:
    assert base.params is not None
    assert pipe.params is not None
    assert "controlnet" not in base.params
    assert pipe.params["unet"] is base.params["unet"]
    assert "controlnet" not in (pipe.with_controlnet(None).params or {})
    assert not list(pipe.save(tmp_path / "saved").glob("controlnet*"))


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_of_a_file(batch: int, pipe: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``canvax batch``: each row with its own control image, or none; a bad one is that row's error."""
    monkeypatch.chdir(tmp_path)
    edges(1).save("one.png")
    edges(2, (200, 160)).save("two.png")
    rows: dict[str, dict[str, Any]] = {
        "one": {"control": "one.png"},
        "two": {"control": "two.png", "height": 64, "width": 64, "steps": 3},
        "weak": {"control": "one.png", "control_scale": 0.5, "seed": 7},
        "made": {"control": ["one.png"], "control_from": "canny"},
        "none": {},
        "lost": {"control": "nowhere.png"},
        "prompt": {"ip_image": "one.png"},
        "alone": {"control_from": "canny"},
    }
    worker = Worker(pipe, batch=batch, defaults={"num_inference_steps": 4})
    made = [one for _, some in worker.run(Row(name, {"prompt": "a cat", **row}) for name, row in rows.items())
            for one in some]  # fmt: skip
    errors = {one.row.id: one.error for one in made if one.error}
    assert errors.keys() == {"lost", "prompt", "alone"}
    assert worker.compilations <= 6  # all rows with an image share their programs, and those without
    found = {one.row.id: one for one in made if not one.error}
    for name, image, changes in (
        ("one", "one.png", {}), ("two", "two.png", {"num_inference_steps": 3}),
        ("weak", "one.png", {"control_scale": 0.5}),
        ("made", control_map("canny", edges(1)), {}), ("none", None, {}),
    ):  # fmt: skip
        record = found[name].record
        call = {"control": image, "seed": record["seed"], "height": 64, "width": 64, **changes}
        want = np.asarray(draw(pipe, **call).images[0], np.int16)
        assert np.abs(np.asarray(found[name].image, np.int16) - want).max() <= 2, name
        assert ("control_sha256" in record) is (image is not None)


def test_larger_by_tiles(pipe: canvax.Pipeline, base: canvax.Pipeline) -> None:
    """Each tile is its own control image."""
    photo = draw(base).images[0]
    given = {"strength": 0.5, "seed": 1, "num_inference_steps": 4, "options": QUIET}
    alone = pipe.upscale(photo, "a cat", scale=1, batch=1, control=True, **given)
    noise = initial_noise([1], LATENTS)
    want = pipe("a cat", image=photo, control=photo, latents=noise, **given)
    np.testing.assert_allclose(alone.pixels, want.pixels, atol=1e-5)
    assert "control_sha256" not in alone.metadata[0]
    words = shlex.split(again(alone.metadata[0]).command)
    assert "--control" not in words
    assert words[words.index("--controlnet") + 1] == alone.metadata[0]["controlnet"][0]
    assert far(pipe.upscale(photo, "a cat", scale=1, batch=1, **given).pixels, alone.pixels) > 1e-3
    with pytest.raises(canvax.InputError, match="has no ControlNet"):
        base.upscale(photo, control=True)


@pytest.mark.slow
def test_compiled_ahead(base: canvax.Pipeline, folders: list[Path]) -> None:
    fresh = canvax.load(base.model.name, mesh=one_device(), controlnet=folders[1])
    built = fresh.compile(control=True, progress=False)
    assert [one.program for one in built] == ["text encoder", "control encoder", "denoiser", "decoder"]
    assert draw(fresh, control=edges(1)).compilations == 0


def test_calls_that_do_not_fit_the_pipeline(base: canvax.Pipeline, folders: list[Path]) -> None:
    with pytest.raises(canvax.InputError, match=r"which has no ControlNet: canvax.load\('.*', controlnet=...\)"):
        draw(base, control=edges(1))
    both = base.with_controlnet(folders[:2])
    for control in (edges(1), [edges(1)] * 3):
        with pytest.raises(canvax.InputError, match="for 2 networks; give a list"):
            draw(both, control=control)


# Files that cannot be used


def rewritten(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Path], Any]:
    """The arrays of a folder, changed."""

    def write(folder: Path) -> None:
        arrays = change(load_file(folder / WEIGHTS))
        save_file(arrays, folder / WEIGHTS)

    return write


def configured(**changes: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return write


def one_file(name: str, arrays: dict[str, np.ndarray]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        save_file(arrays, folder / name)
        return folder / name

    return write


def named(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    rewritten(lambda arrays: {k: v for k, v in arrays.items() if "down_blocks.0" not in k})(folder)


def pickles_alone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "config.json").unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"PK\x03\x04")


ZERO = np.zeros((4, 4), np.float32)
XL = {"cross_attention_dim": 2048, "block_out_channels": [320, 640, 1280], "attention_head_dim": [5, 10, 20],
      "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
      "transformer_layers_per_block": [1, 2, 10], "norm_num_groups": 32, "addition_embed_type": "text_time",
      "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}  # fmt: skip
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config of an SDXL net": (configured(**XL), "is a ControlNet for Stable Diffusion XL.*text of width 2048"),
    "other levels": (configured(block_out_channels=[64, 64]), "made for another kind|is a ControlNet for another kind"),
    "another class": (
        configured(_class_name="UNet2DConditionModel"),
        "canvax reads ControlNetModel, ControlNetUnionModel, FluxControlNetModel and T2IAdapter",
    ),
    "a union": (configured(_class_name="ControlNetUnionModel"), "does not support no addition_time_embed_dim"),
    "another factor": (configured(conditioning_embedding_out_channels=[8, 16]), "one feature of 2 x 2 pixels"),
    "no config and not whole": (without_config, "it lacks"),
    "pickles alone": (pickles_alone, r"holds only diffusion_pytorch_model.bin.*convert \S+model.bin"),
    "a pickle under another name": (named("net.safetensors", b"PK\x03\x04" * 9), "is a pickle"),
    "empty": (one_file("net.safetensors", {}), "is empty"),
    "a ControlLLLite": (one_file("net.safetensors", {"lllite_unet_a.weight": ZERO}), "is a ControlLLLite"),
    "the original code's, cut": (
        one_file("net.safetensors", {"control_model.input_hint_block.0.weight": ZERO}), "is not a whole network"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, pipe: canvax.Pipeline, folders: list[Path], tmp_path: Path) -> None:
    """One clear error each. ``test_bad_networks`` checks that the pipeline stays as it was."""
    folder = tmp_path / "broken"
    shutil.copytree(folders[0], folder)
    change, message = BROKEN[name]
    made = change(folder)
    with pytest.raises(canvax.CheckpointError, match=message) as caught:
        pipe.with_controlnet(made if isinstance(made, Path) else folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there(base: canvax.Pipeline, tmp_path: Path) -> None:
    with pytest.raises(canvax.InputError) as caught:
        base.with_controlnet(tmp_path / "nothing" / "at" / "all")
    assert caught.value.argument == "controlnet"


def test_refused_before_the_model_is_loaded(
    base: canvax.Pipeline, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network for another kind of model is told from its config, before weights of either are read."""
    shutil.copytree(folders[0], folder := tmp_path / "net")
    configured(**XL)(folder)
    (folder / WEIGHTS).unlink()

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("canvax.pipelines.loaded.load_components", never)
    with pytest.raises(canvax.CheckpointError, match="is a ControlNet for Stable Diffusion XL"):
        canvax.load(base.model.name, controlnet=folder)


def test_an_adapter_for_another_model(base: canvax.Pipeline, folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[2], folder := tmp_path / "net")
    configured(adapter_type="full_adapter_xl", downscale_factor=16)(folder)
    with pytest.raises(canvax.CheckpointError, match=r"T2I-Adapter for another kind.*32 at 1/2.*32 at 1/1"):
        base.with_controlnet(folder)
    configured(adapter_type="wide")(folder)
    with pytest.raises(canvax.CheckpointError, match="adapter_type 'wide'"):
        base.with_controlnet(folder)


def test_familiar_names(pipe: canvax.Pipeline, folders: list[Path]) -> None:
    """Those of diffusers, in one call."""
    want = draw(pipe, control=edges(1), control_scale=0.5, control_start=0.1, control_end=0.9, control_mode="guess")
    got = draw(pipe, control_image=edges(1), controlnet_conditioning_scale=0.5, control_guidance_start=0.1,
               control_guidance_end=0.9, guess_mode=True)  # fmt: skip
    np.testing.assert_array_equal(got.latents, want.latents)
    assert got.metadata == want.metadata
    np.testing.assert_array_equal(
        draw(pipe, subseed=3, subseed_strength=0.5).latents,
        draw(pipe, variation_seed=3, variation_strength=0.5).latents,
    )
    assert config_of(pipe.model.unet, 4)["in_channels"] == 4
    assert canvax.load(pipe.model.name, t2i_adapter=folders[2], mesh=pipe.mesh).model.controls


# The page


@pytest.mark.weekly
def test_the_page_runs(
    base: canvax.Pipeline, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of docs/controlnet.md, with small random networks in place of those it names."""
    page = (Path(__file__).parent.parent / "docs" / "controlnet.md").read_text(encoding="utf-8")

    given = canvax.Pipeline.with_controlnet
    sdxl = canvax.load(build(tmp_path / "sdxl"), dtype="float32", mesh=base.mesh)
    typed = given(sdxl, union(tmp_path / "union", sdxl))

    def with_controlnet(self: canvax.Pipeline, controlnet: Any) -> canvax.Pipeline:
        return given(self, folders[: 1 if isinstance(controlnet, str) else len(controlnet)])

    def load(model: str, controlnet: Any = None) -> canvax.Pipeline:
        if controlnet is None:
            return base
        return typed if "union" in controlnet else with_controlnet(base, controlnet)

    monkeypatch.setattr(canvax, "load", load)
    monkeypatch.setattr(canvax.Pipeline, "with_controlnet", with_controlnet)
    names: dict[str, Any] = {"photo": draw(base).images[0], "edges": edges(1), "depth": edges(2), "pose": edges(3)}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        if "FLUX.1" not in block:  # parity/test_flux_controlnet.py runs that one
            exec(block, names)
    assert isinstance(names["result"], canvax.Result)


@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
def test_edges_are_those_of_opencv(size: tuple[int, int]) -> None:
    cv2 = pytest.importorskip("cv2")
    noise = np.random.default_rng(size[0]).random((*size, 3))
    for low, high in ((100, 200), (20, 80)):
        pixels = (ndimage.gaussian_filter(noise, (1.5, 1.5, 0)) * 255).astype(np.uint8)
        np.testing.assert_array_equal(canny(pixels, low, high), cv2.Canny(pixels, low, high) > 0)


def test_edges_of_a_square() -> None:
    """Known without another library: a ring of one pixel, and nothing where the picture is even."""
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[4:12, 4:12] = 255
    found = canny(pixels, 100, 200)
    assert found.any(axis=1).nonzero()[0].tolist() == list(range(3, 12)) or found[4:12].any()
    assert not found[6:10, 6:10].any()
    assert not found[:3].any()
    assert 28 <= found.sum() <= 36


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("depth", {}, "'depth' is not a kind"),
        ("canny", {"radius": 3}, "canny has no 'radius'; it has low, high"),
        ("canny", {"low": 300}, "low=300 is above high=200"),
    ],
)
def test_bad_maps(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(canvax.InputError, match=message):
        control_map(kind, edges(1), **settings)


def test_other_maps() -> None:
    image = edges(1)
    np.testing.assert_array_equal(np.asarray(control_map("invert", image)), 255 - np.asarray(image))
    assert set(np.unique(np.asarray(control_map("threshold", image, at=10)))) == {0, 255}
    assert np.asarray(control_map("blur", image, radius=4)).std() < np.asarray(image).std()


# The command line


@pytest.mark.slow
def test_command_line(
    pipe: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(canvax, "load", lambda *_, **keywords: asked.append(keywords["controlnet"]) or pipe)
    draw(pipe).images[0].save("photo.png")
    assert main(["control", "canny", "photo.png", "edges.png", "--low", "50"]) == 0
    with Image.open("edges.png") as made_of_it:
        assert made_of_it.size == (64, 64)
    fast = ["--controlnet", "net", "--steps", "4", "-s", "1", "-q"]
    assert main(["generate", "a cat", "--control", "edges.png", "--control-scale", "0.8", "-o", "one.png", *fast]) == 0
    assert asked == [["net"]]
    want = draw(pipe, control="edges.png", control_scale=0.8).images[0]
    with Image.open("one.png") as image:
        np.testing.assert_array_equal(np.asarray(image), np.asarray(want))
    made = ["--control", "photo.png", "--control-from", "canny"]
    assert main(["generate", "a cat", *made, "-o", "two.png", *fast]) == 0
    assert "--controlnet ./net0 --control CONTROL1 --control-scale 0.8" in again(read_metadata("one.png")).command
    lines = [{"prompt": "a cat", "control": "edges.png"}, {"prompt": "a dog", "control": ["photo.png"]}]
    Path("prompts.txt").write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", "--prompt-file", "prompts.txt", "-o", "many", *fast]) == 0
    assert len(list(Path("many").iterdir())) == 2
    for words in (
        ["--control", "nowhere.png"],
        ["--control-from", "canny"],
        ["--control", "edges.png", "--control-from", "depth"],
        ["--control", "edges.png", "--control-from", "canny,canny"],
        ["--control", "edges.png", "--control-scale", "much"],
    ):
        assert main(["generate", "a cat", *words, "-o", "no.png", *fast]) == BAD_INPUT, words
    capsys.readouterr()
    assert main(["generate", "a cat", "--control", "edges.png", "-q", "-o", "no.png"]) == BAD_INPUT
    assert "--controlnet" in capsys.readouterr().err
    large = ["upscale", "photo.png", "--scale", "1", "-b", "1", "--strength", "0.5", "--steps", "4", "-s", "1", "-q"]
    assert main([*large, "--controlnet", "net", "--control-scale", "0.5", "-o", "large.png"]) == 0
    assert asked[-1] == ["net"]
    scaled = dataclasses.replace(QUIET, control_scale=0.5)
    given = {"scale": 1, "batch": 1, "strength": 0.5, "seed": 1, "num_inference_steps": 4, "options": scaled}
    with Image.open("large.png") as image:
        want = pipe.upscale("photo.png", control=True, **given).images[0]
        np.testing.assert_array_equal(np.asarray(image), np.asarray(want))
    assert main([*large, "--control-scale", "0.5", "-o", "no.png"]) == BAD_INPUT
    assert "--control-scale" in capsys.readouterr().err


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Images that flags name are kept, for those that share them."""
    file = tmp_path / "a.png"
    for i, colour in enumerate(("red", "blue")):
        Image.new("RGB", (8, 8), colour).save(file)
        os.utime(file, (i, i))
        control, prompt = (named_images.read(name, str(file)) for name in ("control", "ip_image"))
        assert control is named_images.read("control", str(file))
        assert prompt is named_images.read("ip_image", str(file))
        for image in (control, prompt):
            assert image.getcolors() == [(64, ImageColor.getrgb(colour))]
