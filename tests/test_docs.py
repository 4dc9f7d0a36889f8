"""The pages for users: their Python runs, their links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from test_reference import commands

import canvax
from canvax.cli import main
from canvax.extend import ClipEncoder, ClipTextConfig, VaeConfig
from canvax.families import known
from canvax.models.text import TextEncoders
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params
from canvax.samplers import build_table, from_scheduler_config
from canvax.train import task
from canvax.weights.location import Location
from canvax.weights.open import open_files
from examples import new_family
from tests.support.serve_process import serving
from tests.support.serving import by_job

ROOT = Path(__file__).parent.parent
FLOW = "FlowMatchEulerDiscreteScheduler"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code(page: Path) -> None:
    """Every block is Python, and the names of canvax in it are there."""
    for block in blocks(page):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "canvax":
                getattr(canvax, node.attr)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "canvax":
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


def test_the_names_of_examples_are_in_the_reference() -> None:
    """Those that examples and pages import, except old Flax classes, and all of canvax.nn and canvax.train."""
    page, described = (ROOT / "docs" / "api.md").read_text("utf-8"), set[str]()
    for path, options in re.findall(r"^::: canvax\.(\S+)\n((?:    .*\n)*)", page, re.M):
        members = re.search(r"members: \[(.*?)\]", options)
        described |= {path.rpartition(".")[2], *re.findall(r"\w+", members[1] if members else "")}
        if path == "rollouts":
            described |= vars(importlib.import_module("canvax.rollouts")).keys()
    texts = [block for page in PAGES for block in blocks(page)]
    texts += [path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    used = {name for module in ("nn", "train") for name in importlib.import_module(f"canvax.{module}").__all__}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "canvax":
            used.add(node.attr)
        if isinstance(node, ast.ImportFrom) and re.match(r"canvax(?!\.flax_api)\b", node.module or ""):
            used |= {name.name for name in node.names}
    assert used <= described | {"extend"}


@pytest.mark.weekly
def test_under_the_pipeline(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs; the loop gives what the pipeline gives, the derivatives agree with each other."""
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "under-the-pipeline.md"):
        exec(block, names)
    want = emoji("a red apple", sampler="DPM++ 2M", num_inference_steps=20, guidance_scale=3.0,
                 latents=names["noise"], progress=False)  # fmt: skip
    np.testing.assert_allclose(names["images"], want.pixels, atol=1e-3)
    assert float(names["along"]) == pytest.approx(float((names["slope"] ** 2).sum()), rel=1e-3)
    assert names["result"].latents.shape == (1, 8, 8, 32)
    assert int(names["state"].step) == 10
    always = names["EarlySharper"](emoji.model.networks.denoiser, until=-1)
    sharp = emoji.with_denoiser(always, emoji.params["unet"])("a red apple", seed=1, progress=False)
    np.testing.assert_allclose(sharp.latents, names["sharp"].latents, atol=1e-3)
    assert np.abs(names["early"].latents - sharp.latents).max() > 1e-2


def test_the_solver_of_the_page_is_ddim() -> None:
    scheduler = from_scheduler_config({"_class_name": "DDIMScheduler", "timestep_spacing": "trailing"})
    tables: dict[str, Any] = {"pipe": lambda *_, sampler, **__: build_table(scheduler, 20, sampler=sampler)}
    exec(blocks(ROOT / "docs" / "samplers.md")[-1], tables)
    np.testing.assert_allclose(tables["result"].M, build_table(scheduler, 20, sampler="DDIM").M, atol=1e-12)


def test_the_page_of_a_new_family() -> None:
    """It shows the whole example, and the blocks after it run; the network of the toy model takes 25 public lines."""
    *shown, toy, packed, _, _, _ = blocks(ROOT / "docs" / "new-family.md")
    example = (ROOT / "examples" / "new_family.py").read_text("utf-8")
    code = [line for block in shown for line in block.splitlines() if line]
    assert code == [line for line in example.splitlines()[1:] if line]
    names: dict[str, Any] = {}
    exec(shown[0], names)
    exec(toy, names)
    assert np.abs(np.asarray(names["image"], np.int32)).max() > 0
    assert len([line for line in toy.splitlines() if line.strip()]) <= 25
    assert set(re.findall(r"from (canvax\S*)", toy)) == {"canvax.extend", "canvax.nn"}
    assert not re.findall(r"\b_[a-z]", toy + packed)
    exec(packed, names)
    tokens = names["tokens"]
    pipe = names["pipe"].with_denoiser(tokens, init_params(tokens.spec, seed=0))
    conditions, latents = pipe.encode("a fox"), np.ones((1, 4, 8, names["small"].channels), np.float32)
    wide, tall = (
        np.sort(pipe.denoiser(latents.reshape(1, *size, -1), 500.0, conditions), None) for size in ((4, 8), (8, 4))
    )
    assert np.abs(wide - tall).max() > 1e-3  # of equal tokens in other places


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[canvax.Pipeline, Path]:
    """The family of the page in an installed package; a pipeline of it, and its folder."""
    page, site = ROOT / "docs" / "new-family.md", tmp_path / "site"
    (site / "toy-1.dist-info").mkdir(parents=True)
    (entries,) = re.findall(r"^```toml\n\[project\.entry-points\.(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    (site / "toy-1.dist-info/entry_points.txt").write_text("[" + entries.replace('"', ""), "utf-8")
    (site / "toy-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n", "utf-8")
    code = (ROOT / "examples" / "new_family.py").read_text("utf-8") + "".join(blocks(page)[-3:])
    (site / "toy_canvax.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delitem(sys.modules, "toy_canvax", raising=False)
    monkeypatch.setattr(known, "_registered", {})
    known._register_installed.cache_clear()
    family = known.family_of({"_class_name": "ToyPipeline"})
    networks = new_family.Networks(
        new_family.Mlp(), new_family.Squares(), TextEncoders((new_family.Letters("text_encoder", (9,)),))
    )
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(networks.specs().items())}
    made = canvax.pipeline_of(networks, params, FLOW, family=family, mesh=make_mesh(jax.devices()[:1]))
    made.save(tmp_path / "toy")
    (tmp_path / "toy/text_encoder/config.json").write_text('{"max_length": 9}', "utf-8")
    return made, tmp_path / "toy"


def test_the_family_of_the_page_is_loaded(toy: tuple[canvax.Pipeline, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that the page describes, by an installed package; its rules name layers of files and LoRAs."""
    made, folder = toy
    index = re.search(r"model_index\.json +(\{.*?\})$", (ROOT / "docs/new-family.md").read_text("utf-8"), re.M | re.S)
    assert index
    assert json.loads((folder / "model_index.json").read_text("utf-8")) == json.loads(index[1])
    want = made("a fox", seed=1, progress=False).pixels
    weights = folder / "mlp/diffusion_pytorch_model.safetensors"
    named = {name.replace("x.", "net.first."): array for name, array in load_file(weights).items()}
    for arrays in (load_file(weights), named):
        save_file(arrays, weights)
        loaded = canvax.load(folder, mesh=made.mesh)
        assert loaded.model.text.encoders[0].lengths == (9,)
        np.testing.assert_allclose(loaded("a fox", seed=1, progress=False).pixels, want, atol=1e-5)
    lora = {
        "net.last.lora_A.weight": np.ones((1, 8), np.float32),
        "net.last.lora_B.weight": np.ones((3, 1), np.float32),
    }
    save_file(lora, folder / "lora.safetensors")
    loaded.adapters.load("style", folder / "lora.safetensors")
    np.testing.assert_allclose(
        loaded.params["mlp"]["out"]["weight"], made.params["mlp"]["out"]["weight"] + 1, atol=1e-5
    )
    monkeypatch.chdir(folder.parent)
    assert main(["generate", "a fox", "-m", "toy", "--seed", "1", "-o", "fox.png", "-q"]) == 0
    got = np.asarray(Image.open(folder.parent / "fox.png"), np.float32)
    np.testing.assert_allclose(got / 255, want[0], atol=0.01)


def test_the_scheduler_of_the_page(toy: tuple[canvax.Pipeline, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default sampler is the solver of another page; the network reads indices of its noise levels."""
    made, folder = toy
    module = sys.modules["toy_canvax"]
    exec(blocks(ROOT / "docs" / "samplers.md")[-1].partition("result =")[0], vars(module))
    classes = {**module.CLASSES, "scheduler": ("ToyScheduler",)}
    known.register(dataclasses.replace(module.TOY, scheduler=module.noise, classes=classes))
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["toy", "ToyScheduler"]}), "utf-8")
    (folder / "scheduler/scheduler_config.json").write_text('{"power": 2}', "utf-8")
    loaded = canvax.load(folder, mesh=made.mesh)
    scheduler = loaded.model.scheduler
    table = build_table(scheduler, 4)
    np.testing.assert_array_equal(table.timestep, [999, 749, 499, 249])
    assert scheduler.schedule.prediction_type == "v_prediction"
    np.testing.assert_allclose(scheduler.schedule.alphas_cumprod[[0, -1]], [0.999**2, 0.001**2])
    np.testing.assert_allclose(table.M, build_table(scheduler, 4, sampler="DDIM", spacing="trailing").M, atol=1e-12)
    assert loaded("a fox", seed=1, progress=False).metadata[0]["sampler_label"] == "my_ddim"


def test_clip_and_an_autoencoder_of_the_package(
    toy: tuple[canvax.Pipeline, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of the page reads them from a folder, as it is saved, with the files of the tokenizer."""
    made, folder = toy
    family = known.register(sys.modules["toy_canvax"].STOCK)
    (folder / "model_index.json").unlink()
    clip = ClipTextConfig(2500, new_family.WIDTH, 16, 1, 2)
    vae = VaeConfig(block_out_channels=(8, 8), latent_channels=new_family.CHANNELS, norm_num_groups=4,
                    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip
    networks = new_family.Networks(new_family.Mlp(), vae, TextEncoders((ClipEncoder("text_encoder", clip),)))
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(networks.specs().items())}
    tokenizers = canvax.load("emoji").model.tokenizers
    stock = canvax.pipeline_of(networks, params, FLOW, family=family, tokenizers=tokenizers, mesh=made.mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", canvax.HintWarning)
        stock.save(folder, overwrite=True)
    loaded = canvax.load(folder, mesh=made.mesh)
    assert (loaded.model.vae, loaded.model.text) == (vae, networks.text)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, stock.params)
    np.testing.assert_array_equal(loaded.encode("a fox")["text"], stock.encode("a fox")["text"])
    with_word = {"text_encoder": dataclasses.replace(tokenizers["text_encoder"], added={"<toy>": (7,)})}
    other = canvax.pipeline_of(networks, params, FLOW, family=family, tokenizers=with_word, mesh=made.mesh)
    with pytest.warns(canvax.HintWarning, match="CLIPTokenizer") as caught:
        other.save(folder.parent / "without")
    assert len(caught) == 1


def test_an_edited_family_takes_the_place_of_the_installed(
    toy: tuple[canvax.Pipeline, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``stacks`` keep the names of files."""
    made, folder = toy
    monkeypatch.setattr(known, "_registered", {})
    known._register_installed.cache_clear()
    family = known.register(dataclasses.replace(made.model.family, stacks=made.model.family.names))
    loaded = canvax.load(folder, mesh=made.mesh)
    assert loaded.model.family is family
    names = load_file(loaded.save(folder.parent / "again") / "mlp/diffusion_pytorch_model.safetensors").keys()
    assert names >= {"net.first.weight", "net.last.weight"}
    again = canvax.load(folder.parent / "again", mesh=made.mesh)
    jax.tree.map(np.testing.assert_array_equal, again.params, made.params)


def test_classes_of_other_libraries(toy: tuple[canvax.Pipeline, Path]) -> None:
    """A registered family may name its classes with its library; other classes of this library are refused."""
    _, folder = toy
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    for kind, is_known in {"Mlp": True, "Other": False, "UNet2DConditionModel": False}.items():
        (folder / "model_index.json").write_text(json.dumps(index | {"mlp": ["toy", kind]}), "utf-8")
        with nullcontext() if is_known else pytest.raises(canvax.CheckpointError):
            assert open_files(Location(folder)).components["mlp"] == kind
    assert "UNet2DConditionModel" not in known.known_components()["unet"]


@pytest.mark.slow
def test_the_family_of_the_page_is_served(toy: tuple[canvax.Pipeline, Path]) -> None:
    made, folder = toy
    with serving(str(folder), cwd=folder.parent) as served, served.ready() as client:
        got, _ = by_job(client, {"prompt": "a fox", "seed": 1})
    want = made("a fox", seed=1, progress=False).pixels[0]
    np.testing.assert_allclose(got / 255, want, atol=0.01)


def test_families_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of canvax keep their names, and a family without files is not for ``canvax.load``."""
    monkeypatch.setattr(known, "_registered", {})
    for family in (dataclasses.replace(known.FAMILIES[0], pipelines=("OtherPipeline",)), new_family.FAMILY):
        with pytest.raises(canvax.InputError) as caught:
            known.register(family)
        assert caught.value.argument == "family"
    again = [dataclasses.replace(known.FAMILIES[0], name="mine", models=text) for text in ("", "edited")]
    assert [known.register(family) for family in again] == again
    index = {"_class_name": again[0].pipelines[0]}
    assert known.family_of(index) is again[1]


def test_an_installed_family_with_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning names it, and other models are loaded."""
    (tmp_path / "bad-1.dist-info").mkdir()
    (tmp_path / "bad-1.dist-info/entry_points.txt").write_text("[canvax.families]\nbad = no_module:BAD\n", "utf-8")
    (tmp_path / "bad-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    known._register_installed.cache_clear()
    with pytest.warns(canvax.HintWarning, match="no_module:BAD"):
        assert known.families() == known.FAMILIES


PICTURED = ("image-to-image", "guidance", "coming-from-diffusers")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["prompts", *(pytest.param(page, marks=pytest.mark.weekly) for page in PICTURED)])
def test_tutorials(page: str, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs, one after another, and generates images."""
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / f"{page}.md"):
        exec(block, names)
    images = [value for value in names.values() if isinstance(value, canvax.Result | Image.Image)]
    assert len(images) >= 2 - (page == "guidance")


def test_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first block runs; the trained numbers are those of the data. The second has arguments of ``train``."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    block, from_checkpoint = blocks(ROOT / "docs" / "training.md")
    with jax.numpy_rank_promotion("allow"):
        exec(block, names)
    calls, signature = [], inspect.signature(task.train)
    monkeypatch.setattr(task, "train", lambda *args, **more: calls.append(signature.bind(*args, **more).arguments))
    exec(from_checkpoint, names)
    assert calls[0]["training"].folder == Path("out/ink")
    assert calls[0]["log"] is names["log"]
    np.testing.assert_allclose(names["trained"]["w"], range(8), atol=0.05)


@pytest.mark.slow
def test_first_images(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every line works in an empty folder, after those before it; the page alone is only understood."""
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "first-images.md"
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "generate":
            words += ["--steps", "2", "-b", "1"]  # one program for all
        assert words == ["ui"] or main(words) == 0, command
    written = set(re.findall(r"-o (\S+\.png)", page.read_text(encoding="utf-8")))
    assert len(written) > 8
    assert written <= {path.name for path in tmp_path.iterdir()}
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(block, names)
    assert names["green"].size == (64, 64)
