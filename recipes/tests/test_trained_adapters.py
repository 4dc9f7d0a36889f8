"""The adapters of ``recipes/adapters``, and the rules by which their data are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import canvax
from canvax.train.pictures import Pictures, read_pictures
from recipes.adapters.sets import SKY, background, night, write_edges, write_night
from recipes.adapters.sheets import covered

pytestmark = pytest.mark.slow

FILES = Path(__file__).parents[1] / "adapters" / "files"


def disc() -> np.ndarray:
    """A red disc with a white middle, on white."""
    rows, columns = np.mgrid[:64, :64] - 31.5
    radius = np.hypot(rows, columns)
    picture = np.full((64, 64, 3), 255, np.uint8)
    picture[(radius < 20) & (radius > 8)] = (200, 0, 0)
    return picture


def test_the_white_around_a_drawing_is_its_background() -> None:
    share = background(disc())
    assert share[0, 0] == 1
    assert share[32, 32] == 0  # the white middle is the drawing's
    assert share[32, 17] == 0
    dark = night(disc())
    assert tuple(dark[20, 2]) == SKY
    assert dark[32, 32].min() > 190
    assert dark[32, 17, 0] < 200


def test_data_sets(tmp_path: Path) -> None:
    drawings = Pictures(np.stack([disc()] * 2), [["a", "b", "c"], ["d"]], [{}, {}], np.zeros((2, 4), np.int32))
    found = read_pictures(write_night(drawings, tmp_path / "night", 2), 64)
    assert [list(texts) for texts in found.captions] == [["a", "b"], ["d"]]
    np.testing.assert_array_equal(found.pixels[0], night(disc()))
    pairs = read_pictures(write_edges(drawings, tmp_path / "edges", 2), 64, control_column="conditioning_image")
    assert 0.02 < (pairs.control[0] == 255).mean() < 0.2


def test_sizes() -> None:
    """Small enough for a checkout; none is in the wheel."""
    assert (FILES / "night.safetensors").stat().st_size < 1e6
    assert (FILES / "rainbow-flag.safetensors").stat().st_size < 5000
    assert (FILES / "edges" / "diffusion_pytorch_model.safetensors").stat().st_size < 8e6


def test_they_do_what_they_were_trained_for(packaged: canvax.Pipeline) -> None:
    options = canvax.Options(progress=False)
    plain = packaged("a rocket", seed=3, options=options).pixels
    assert plain.shape == (1, 256, 256, 3)
    packaged.adapters.load("night", FILES / "night.safetensors")
    dark = packaged("a rocket", seed=3, options=options).pixels
    packaged.adapters.remove()
    corners = (slice(None), slice(0, 16), slice(80, 160))
    assert plain[corners].mean() > 0.9
    assert dark[corners].mean() < 0.5
    words = packaged.adapters.load_embedding(FILES / "rainbow-flag.safetensors")
    assert words == ("<rainbow-flag>",)
    flag = packaged("<rainbow-flag>", seed=3, options=options).pixels[0]
    packaged.adapters.remove()
    middle = flag[80:176, 32:224]
    assert middle.std(axis=(0, 1)).max() > 0.1


@pytest.mark.weekly
def test_images_follow_edges(packaged: canvax.Pipeline) -> None:
    """Without a prompt, of twelve shapes: most of each is covered, and more than without the network."""
    prompts = [
        "a gem stone", "an umbrella", "a red apple", "a cat face", "a house", "a rocket", "a lemon", "a red heart",
        "a penguin", "a cactus", "a bell", "a mushroom",
    ]  # fmt: skip
    shapes = np.stack([np.asarray(image) for image in packaged(prompts, seed=3).images])
    drawings = Pictures(shapes, [["a thing"]] * 12, [{}] * 12, np.zeros((12, 4), np.int32))
    found = covered(FILES / "edges", drawings, 12, model=packaged.model.files.folder())
    assert found["no prompt, with the network"] > max(0.8, found["no prompt, without the network"] + 0.1)
