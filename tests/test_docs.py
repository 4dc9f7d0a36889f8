"""The pages for users: their Python runs, their links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from test_reference import commands

import canvax
from canvax.cli import main
from canvax.families.known import FAMILIES
from canvax.models.text import TextEncoders
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params
from canvax.samplers import build_table, from_scheduler_config
from canvax.weights.folder import library_of
from canvax.weights.load import Component
from canvax.weights.save import save_checkpoint
from examples import new_family

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


def test_the_solver_of_the_page_is_ddim() -> None:
    scheduler = from_scheduler_config({"_class_name": "DDIMScheduler", "timestep_spacing": "trailing"})
    tables: dict[str, Any] = {"pipe": lambda *_, sampler, **__: build_table(scheduler, 20, sampler=sampler)}
    exec(blocks(ROOT / "docs" / "samplers.md")[-1], tables)
    np.testing.assert_allclose(tables["result"].M, build_table(scheduler, 20, sampler="DDIM").M, atol=1e-12)


def test_the_page_of_a_new_family() -> None:
    """It shows all of the example, and the blocks after it run; a network of one's own takes 25 public lines."""
    *shown, around, own, _ = blocks(ROOT / "docs" / "new-family.md")
    example = (ROOT / "examples" / "new_family.py").read_text("utf-8")
    code = [line for block in shown for line in block.splitlines() if line]
    assert code == [line for line in example.splitlines()[1:] if line]
    names: dict[str, Any] = {}
    exec(around, names)
    assert np.abs(np.asarray(names.pop("image"), np.int32)).max() > 0
    exec(own, names)
    assert np.abs(np.asarray(names["image"], np.int32)).max() > 0
    assert len([line for line in own.splitlines() if line.strip()]) <= 25
    assert set(re.findall(r"from (canvax\S*)", own)) == {"canvax.extend", "canvax.nn"}
    assert not re.findall(r"\b_[a-z]", own)


def test_the_family_of_the_page_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that the page describes."""
    page = ROOT / "docs" / "new-family.md"
    names = dict(vars(new_family))
    exec(blocks(page)[-1], names)
    index = re.search(r"model_index\.json +(\{.*?\})$", page.read_text(encoding="utf-8"), re.M | re.S)
    assert index
    networks = new_family.Networks(
        new_family.Mlp(), new_family.Squares(), TextEncoders((new_family.Letters("text_encoder", (9,)),))
    )
    specs = networks.specs()
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    save_checkpoint(
        tmp_path / "toy",
        [Component(name, spec, library_of(name)) for name, spec in specs.items()],
        params,
        index=json.loads(index[1]),
        configs={"mlp": {}, "vae": {}, "text_encoder": {"max_length": 9}, "scheduler": {"_class_name": FLOW}},
    )
    monkeypatch.setattr("canvax.families.known.FAMILIES", (*FAMILIES, names["TOY"]))
    loaded = canvax.load(tmp_path / "toy", mesh=make_mesh(jax.devices()[:1]))
    assert loaded.model.text.encoders[0].lengths == (9,)
    made = canvax.pipeline_of(networks, params, FLOW, family=names["TOY"], mesh=loaded.mesh)
    got, want = (pipe("a fox", seed=1, progress=False).pixels for pipe in (loaded, made))
    np.testing.assert_allclose(got, want, atol=1e-5)


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
    """The block runs; the trained numbers are those of the data."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (block,) = blocks(ROOT / "docs" / "training.md")
    with jax.numpy_rank_promotion("allow"):
        exec(block, names)
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
