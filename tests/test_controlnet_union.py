"""Control images by type: what a call says of them, what compiles, company, files and the command.

Numbers are held against PyTorch diffusers in ``parity/test_features.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import canvax
from canvax.cli import BAD_INPUT, main
from canvax.cli.again import again
from canvax.scale.named_images import named_control
from tests.support.control_files import controlnet, edges, union
from tests.support.drawing import draw, far, one_device
from tests.support.refusals import refused
from tests.support.small_sdxl import build

pytestmark = pytest.mark.slow

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    folder = build(tmp_path_factory.mktemp("model") / "base")
    return canvax.load(folder, dtype="float32", mesh=one_device())


@pytest.fixture(scope="module")
def folder(base: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return union(tmp_path_factory.mktemp("nets") / "union", base)


@pytest.fixture(scope="module")
def pipe(base: canvax.Pipeline, folder: Path) -> canvax.Pipeline:
    return base.with_controlnet(folder)


def test_types_are_data(base: canvax.Pipeline, pipe: canvax.Pipeline) -> None:
    found = [draw(base, height=64, width=64).latents]
    draw(pipe, control={"depth": edges(1)})
    for control in (
        {"depth": edges(1)}, {"canny": edges(1)}, {0: edges(1)}, {"depth": edges(1), "canny": edges(2)},
        {"depth:0.5": edges(1), "canny": edges(2)}, {"depth": edges(1), "tile": edges(2), "repaint": edges(3)},
    ):  # fmt: skip
        result = draw(pipe, control=control)
        assert result.compilations == 0, control
        assert all(far(result.latents, other) > 1e-4 for other in found), control
        found.append(result.latents)
    # Names of one type, and the order in which types are named, change nothing.
    assert far(draw(pipe, control={"LineArt ": edges(1)}).latents, found[2]) < 1e-6
    assert far(draw(pipe, control={"canny": edges(2), "1": edges(1)}).latents, found[4]) < 1e-5
    assert far(draw(pipe, control={"depth": edges(1)}, control_scale=0).latents, found[0]) < 1e-4


def test_company_changes_nothing(pipe: canvax.Pipeline) -> None:
    """Images of one call with other images, other types and another number of them."""
    shown: list[dict[Any, Any]] = [{"depth": edges(1)}, {"tile": edges(2), "depth": edges(3)}]
    both = draw(pipe, ["a cat", "a dog"], control=shown, seed=[1, 2])
    for i, prompt in enumerate(("a cat", "a dog")):
        alone = draw(pipe, prompt, control=shown[i], seed=i + 1)
        assert far(both.latents[i], alone.latents[0]) < 1e-4
        assert both.metadata[i]["control_sha256"] == alone.metadata[0]["control_sha256"]
    lists = draw(pipe, ["a cat", "a dog"], control={"depth": [edges(1), edges(3)]}, seed=[1, 2])
    assert far(lists.latents[0], both.latents[0]) < 1e-4
    assert list(both.metadata[1]["control_sha256"][0]) == ["tile", "depth"]


def test_larger_by_tiles(pipe: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(type(pipe), "__call__", lambda self, *_, control, **__: seen.append(control) or stop())

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe.upscale(edges(1), scale=1, batch=1, control=True)
    assert [list(one) for one in seen[0]] == [["tile"]]


@pytest.mark.weekly
def test_beside_a_controlnet(base: canvax.Pipeline, folder: Path, pipe: Any, tmp_path: Path) -> None:
    mixed = base.with_controlnet([controlnet(tmp_path / "plain", base, 1), folder])
    want = draw(pipe, control={"depth": edges(1)}).latents
    assert far(draw(mixed, control=[None, {"depth": edges(1)}]).latents, want) < 1e-4
    assert far(draw(mixed, control=[edges(2), {"depth": edges(1)}]).latents, want) > 1e-3
    with refused("control"):
        draw(mixed, control=[{"depth": edges(1)}, None])


def test_six_types(base: canvax.Pipeline, tmp_path: Path) -> None:
    """The first released network has no tile and no repaint."""
    pipe = base.with_controlnet(union(tmp_path / "six", base, types=6))
    with pytest.raises(canvax.InputError, match=r"no type of this network.*5 segment$"):
        draw(pipe, control={"tile": edges(1)})


def test_files(base: canvax.Pipeline, folder: Path, pipe: Any, tmp_path: Path) -> None:
    want = draw(pipe, control={"depth": edges(1)}).latents
    one = tmp_path / "net.safetensors"
    one.write_bytes((folder / WEIGHTS).read_bytes())
    assert far(draw(base.with_controlnet(one), control={"depth": edges(1)}).latents, want) == 0
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"_class_name": "ControlNetModel"}, None),  # as the first released files have it
        ({"num_trans_channel": 16}, "num_trans_channel"),
        ({"num_control_type": 7}, r"task_embedding.*\(8, 8\)"),
        ({"num_control_type": "all"}, "num_control_type"),
        ({"addition_time_embed_dim": None}, "addition_time_embed_dim"),
    ):
        changed = tmp_path / str(message)[:12].replace(" ", "_").replace("\\", "")
        changed.mkdir()
        (changed / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
        (changed / "config.json").write_text(json.dumps(config | change))
        if message is None:
            assert far(draw(base.with_controlnet(changed), control={"depth": edges(1)}).latents, want) == 0
            continue
        with pytest.raises(canvax.CheckpointError, match=message):
            base.with_controlnet(changed)
    arrays = load_file(folder / WEIGHTS)
    save_file({k: v for k, v in arrays.items() if not k.startswith("transformer")}, tmp_path / "part.safetensors")
    with pytest.raises(canvax.CheckpointError):
        base.with_controlnet(tmp_path / "part.safetensors")


def test_flags() -> None:
    assert named_control({"control": "a.png"}) == ((("", "a.png", None),),)
    assert named_control({"control": "./a=b.png"}) == ((("", "./a=b.png", None),),)
    typed = named_control({"control": ["depth=a, b.png,canny:+5e-1=c.png", "none"], "control_from": "blur,none"})
    assert typed == ((("depth", "a, b.png", "blur"), ("canny:+5e-1", "c.png", "blur")), None)


def test_command(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: pipe)
    for i in (1, 2):
        edges(i).save(f"{i}.png")
    shown = ["--controlnet", "net", "--control", "depth=1.png,tile:0.5=2.png", "-q"]
    assert main(["generate", "a cat", *shown, "--steps", "4", "-s", "1", "-o", "one.png"]) == 0
    want = draw(pipe, control={"depth": edges(1), "tile:0.5": edges(2)})
    with Image.open("one.png") as image:
        np.testing.assert_array_equal(np.asarray(image), np.asarray(want.images[0]))
    assert [*want.metadata[0]["control_sha256"][0]] == ["depth", "tile:0.5"]
    assert "--control depth=CONTROL1,tile:0.5=CONTROL2" in again(want.metadata[0]).command
    capsys.readouterr()
    for flag in ("depth=nowhere.png", "1.png", "hed=1.png,ted=2.png", "tile=1.png,tile=2.png"):
        assert main(["generate", "a cat", *shown[:3], flag, "-q", "-o", "no.png"]) == BAD_INPUT
        assert "--control" in capsys.readouterr().err
