"""Features of texts and images that were encoded before: the same bits as when they are encoded, and never others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import canvax
from canvax.compile.features import Features
from canvax.compile.kinds import Compiled
from canvax.parallel.mesh import make_mesh
from tests.support.adapter_files import Draw, layers, lora, write

ASK: dict[str, Any] = {"seed": 1, "num_inference_steps": 2, "guidance_scale": 3.0, "progress": False}
APPLE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
Count = Callable[[], int]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Return the calls of encoders since it was called last."""
    names: list[str] = []
    run = Compiled.__call__

    def noted(self: Compiled, *arguments: Any) -> Any:
        names.append(self.program.name)
        return run(self, *arguments)

    monkeypatch.setattr(Compiled, "__call__", noted)

    def count() -> int:
        found = sum(name.endswith("encoder") for name in names)
        names.clear()
        return found

    return count


@pytest.fixture
def sd(small: canvax.Pipeline) -> Iterator[canvax.Pipeline]:
    small.programs.features.clear()
    yield small
    small.adapters.remove()
    small.adapters.beside(None)


def pixels(pipe: canvax.Pipeline, prompt: Any = "a cat", **more: Any) -> np.ndarray:
    return pipe(prompt, **ASK | more).pixels


@pytest.mark.parametrize(
    "more",
    [{}, {"image": APPLE, "strength": 0.9}, {"negative_prompt": "blurry"}],
    ids=["text", "image", "negative"],
)
def test_what_is_repeated_is_not_encoded(sd: canvax.Pipeline, encoded: Count, more: dict[str, Any]) -> None:
    first = pixels(sd, **more)
    assert encoded() == 2 + ("image" in more)  # this program reads one text
    np.testing.assert_array_equal(pixels(sd, **more), first)
    assert not encoded()
    pixels(sd, seed=2, num_inference_steps=3, **more)
    assert not encoded()
    pixels(sd, "a dog", **more)
    assert encoded() == 1
    sd.programs.features.clear()
    np.testing.assert_array_equal(pixels(sd, **more), first)


def test_equal_texts_of_a_batch_are_one_row(sd: canvax.Pipeline, encoded: Count) -> None:
    """The prompts and the negative prompt of four images fit into a run; an image is that of any row of it."""
    prompts = ["a cat", "a (red:1.3) dog", "a cat", "a cat"]
    ask: dict[str, Any] = {"seed": [1, 2, 3, 4], "prompt_syntax": "a1111"}
    first = pixels(sd, prompts, **ask)
    assert encoded() == 1
    sd.programs.features.clear()
    pixels(sd)
    encoded()
    turned = pixels(sd, prompts[::-1], **ask | {"seed": [4, 3, 2, 1]})
    np.testing.assert_array_equal(turned[::-1], first)
    assert encoded() == 1  # another program gave what a single image has
    pixels(sd, ["a hen", "a fox", "an owl", "a cat"], **ask)
    assert encoded() == 1


def merged(pipe: canvax.Pipeline, folder: Path) -> dict[str, Any]:
    draw, arrays = Draw(0), {}
    for (component, module), shape in layers(pipe.model.networks.specs()).items():
        if component == "text_encoder":
            arrays |= {f"{component}.{module}{end}": a for end, a in lora(draw, shape).arrays.items()}
    pipe.adapters.load("ink", write(folder / "ink.safetensors", arrays))
    return {}


def beside(pipe: canvax.Pipeline, folder: Path) -> dict[str, Any]:
    """Adapters beside the weights: the weights of an image are inputs."""
    merged(pipe, folder)
    pipe.adapters.remove()
    pipe.adapters.beside(rank=8)
    pipe.adapters.load("ink", folder / "ink.safetensors", 0.0, beside=True)
    pixels(pipe, adapters={"ink": 0.2})
    return {"adapters": {"ink": 1.0}}


def in_place(pipe: canvax.Pipeline, folder: Path) -> dict[str, Any]:
    """Another adapter in the slot of one that was used."""
    more = beside(pipe, folder)
    pixels(pipe, **more)
    pipe.adapters.remove("ink")
    file = folder / "ink.safetensors"
    write(file, {name: array * (1 + name.endswith("up.weight")) for name, array in load_file(file).items()})
    pipe.adapters.load("ink", file, 0.0, beside=True)
    return more


def embedding(pipe: canvax.Pipeline, folder: Path) -> dict[str, Any]:
    """Another one of the same name, whose vectors take the same rows."""
    for seed in (1, 2):
        pipe.adapters.remove()
        file = write(folder / "cat.safetensors", {"emb_params": Draw(seed)(2, pipe.model.text.width) * 3})
        pipe.adapters.load_embedding(file)
        pixels(pipe)
    return {}


def other_params(pipe: canvax.Pipeline, folder: Path) -> dict[str, Any]:
    """Those of the call, with the text encoder's in another order."""
    del folder
    assert pipe.params is not None
    return {
        "params": pipe.params | {"text_encoder": jax.tree.map(lambda leaf: leaf[::-1], pipe.params["text_encoder"])}
    }


@pytest.mark.parametrize(
    "change",
    [
        merged,
        beside,
        in_place,
        embedding,
        other_params,
        lambda *_: {"clip_skip": 1},
        lambda *_: {"prompt": "a (cat:1.4)", "prompt_syntax": "a1111"},
        lambda *_: {"prompt": "a cat " * 60},
    ],
    ids=["merged", "beside", "slot", "embedding", "params", "clip_skip", "syntax", "length"],
)
def test_what_changes_features_is_encoded(
    sd: canvax.Pipeline, tmp_path: Path, change: Callable[[canvax.Pipeline, Path], dict[str, Any]]
) -> None:
    plain = pixels(sd)
    more = change(sd, tmp_path)
    got = pixels(sd, **more)
    sd.programs.features.clear()
    np.testing.assert_array_equal(got, pixels(sd, **more))
    assert np.abs(got - plain).max() > 1e-3


@pytest.mark.slow
def test_features_are_bounded(sd: canvax.Pipeline, encoded: Count) -> None:
    """Those that were used longest ago are dropped first."""
    text = sd.model.text.conditions(1, [np.float32])["text"]
    most = 5 * text.size * 4  # a joined text and the output of the encoder are kept for each prompt
    pipe = canvax.Pipeline(sd.model, replace(sd.programs, features=Features(most)), sd.params)
    for prompt in ("a cat", "a dog", "a cat", "a hen"):
        pixels(pipe, prompt, guidance_scale=1.0)
    assert encoded() == 3
    pixels(pipe, "a cat", guidance_scale=1.0)
    assert encoded() == 0
    pixels(pipe, "a dog", guidance_scale=1.0)
    assert encoded() == 1
    assert pipe.programs.features._bytes <= most


@pytest.mark.slow
def test_on_a_mesh(small_folder: Path, encoded: Count) -> None:
    """One text for each of two devices, in one run."""
    pipe = canvax.load(small_folder, progress=False, mesh=make_mesh(jax.devices()[:2]))
    first = pixels(pipe, ["a cat", "a dog"], seed=[1, 2])
    assert encoded() == 2
    np.testing.assert_array_equal(pixels(pipe, ["a dog", "a cat"], seed=[2, 1])[::-1], first)
    assert encoded() == 0
