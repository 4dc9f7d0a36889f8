"""Examples and notebooks run as they stand, in an empty folder, with files where they ask for some."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import canvax
from tests.support import control_files
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.serving import generating

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script and returns the images that it left."""

    def script(name: str, *arguments: object) -> list[Path]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return sorted(here.rglob("*.png"))

    return script


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image, np.float64)


def test_no_example_is_forgotten() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    tested = Path(__file__).read_text("utf-8")
    assert names == {name for name in names if f'"{name}"' in tested}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert names == {name for name in names if f"({name})" in listed}


@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("text_to_image.py", 1),
        ("new_family.py", 1),
        *(
            pytest.param(*case, marks=pytest.mark.weekly)
            for case in (("your_loop.py", 3), ("edit_image.py", 5), ("several_devices.py", 1))
        ),
    ],
)
def test_scripts(run: Any, name: str, images: int) -> None:
    assert len(run(name)) == images


def test_a_picture_is_inverted(run: Any, here: Path) -> None:
    """Drawn again from its noise it is the same picture; with another prompt the red apple becomes a green one."""
    (path,) = run("invert.py")
    row = pixels_of(path)
    side = len(row)
    drawn, decoded, again, *changed = row.reshape(side, -1, side, 3).swapaxes(0, 1)
    assert -10 * np.log10(np.square((again - decoded) / 255).mean()) > 45
    assert np.square((decoded - drawn) / 255).mean() < 0.02
    middle = slice(side * 7 // 16, side * 11 // 16)
    red, half, green, _ = (image[middle, middle].mean((0, 1)) for image in (again, *changed))
    assert red[0] > 150 > 100 > red[1]
    assert green[1] > 130 > green[0]
    assert red[0] > half[0] > green[0]
    assert min(image[:, : side // 32].mean() for image in (again, changed[1])) > 230


@pytest.mark.weekly
def test_many_prompts(run: Any, here: Path) -> None:
    (here / "prompts.txt").write_text("".join(f"a cat with {i} eyes\n" for i in range(10)), "utf-8")
    assert len(run("many_prompts.py", "prompts.txt")) == 10


@pytest.mark.weekly
def test_server_client(run: Any) -> None:
    with generating() as (url, _):
        (image,) = run("server_client.py", url)
    with Image.open(image) as saved:
        assert saved.info["parameters"]


@pytest.mark.weekly
def test_lora(run: Any, here: Path) -> None:
    draw, specs = Draw(1), canvax.load("emoji", progress=False).model.specs
    arrays = {}
    for (component, module), shape in layers({"unet": specs["unet"]}).items():
        arrays |= {f"{component}.{module}{end}": array for end, array in lora(draw, shape).arrays.items()}
    first, *others = run("lora.py", write(here / "ink.safetensors", arrays))
    assert len(others) == 3
    assert first.read_bytes() != others[0].read_bytes()


@pytest.mark.parametrize("script", ["reward.py", "nft.py"])
@pytest.mark.weekly
def test_rewards(run: Any, here: Path, capsys: pytest.CaptureFixture[str], script: str) -> None:
    after, before = run(script, 8, 8, 4)
    assert after.read_bytes() != before.read_bytes()
    rewards = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.02


@pytest.mark.weekly
def test_preferences(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    after, before = run("dpo.py", 30, 16, 2)
    assert after.read_bytes() != before.read_bytes()
    lines = capsys.readouterr().out.splitlines()
    old, new = (float(line.split()[-1]) for line in lines if line.startswith("reward"))
    assert new > old + 0.1


@pytest.mark.weekly
def test_distillation(run: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run("distil.py", 20, 16)
    height, width, _ = pixels_of(path).shape
    assert width == 2 * height  # six images of teacher, teacher in few steps, student
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses = np.array([[float(line[3].rstrip(",")), float(line[-1])] for line in lines if line[:1] == ["update"]])
    assert (losses[-1] < 0.6 * losses[0]).all()
    assert losses[0, 1] < 0.12  # already near the teacher's images
    call = {"num_inference_steps": 4, "guidance_scale": 1.0}
    assert canvax.load("emoji", progress=False).adapters.load("student", here / "distil.safetensors").suggested == call


@pytest.mark.parametrize("words", [(), ("meanflow", "repa")])
@pytest.mark.weekly
def test_from_scratch(run: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    (path,) = run("from_scratch.py", *words, 40, 2)
    assert pixels_of(path).shape == (4 * 64, 9 * 64, 3)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses = [dict(zip(line[2::2], map(float, line[3::2]), strict=True)) for line in lines if line[:1] == ["update"]]
    assert "error" in losses[0]
    assert all(losses[-1][name] < losses[0][name] for name in losses[0] if name in ("error", "repa"))
    assert len([line for line in lines if line[:1] == ["steps"]]) == 4


@pytest.mark.weekly
def test_control_image(run: Any, here: Path, small_folder: Path) -> None:
    net = control_files.controlnet(here / "canny", canvax.load(small_folder, progress=False))
    photo = Image.linear_gradient("L").resize((64, 64))
    photo.save(here / "photo.jpg")
    assert len(run("control_image.py", small_folder, net, "photo.jpg", "a stone house")) == 3


@pytest.mark.parametrize("name", ["tpu.ipynb", "guidance.ipynb"])
@pytest.mark.weekly
def test_notebooks(here: Path, name: str) -> None:
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / name).read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("%"):
            exec(compile(source, name, "exec"), names)
