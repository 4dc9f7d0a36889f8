"""Which prompts an image is drawn from, with several prompts, several images of each, and two text encoders."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.parallel.mesh import make_mesh
from canvax.pipelines.request import Call, make_request
from tests.support.small_sdxl import build

SECOND = {"prompt_2": ["c", "d"], "negative_prompt_2": ["u", "v"]}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    folder = build(tmp_path_factory.mktemp("prompts") / "model")
    return canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


def draw(
    pipe: canvax.Pipeline, prompt: Any, negative: Any, images: int, seed: int, second: dict[str, Any]
) -> canvax.Result:
    options = canvax.Options(progress=False, **second)
    return pipe(prompt, negative, num_images_per_prompt=images, num_inference_steps=3, seed=seed, options=options)


def test_negative_prompts_may_be_an_array(emoji: canvax.Pipeline) -> None:
    texts = [np.array(["a cat", "a dog"]), np.array(["red", "blue"])]
    request = make_request(emoji.model, Call(*texts, seed=1))
    assert (request.prompts, request.negatives) == (["a cat", "a dog"], ["red", "blue"])


def test_two_prompts_and_two_images_of_each(pipe: canvax.Pipeline) -> None:
    """The metadata says aabb and xxyy, and each image is the one that its own prompts draw alone."""
    result = draw(pipe, ["a", "b"], ["x", "y"], 2, 5, SECOND)
    said = [(entry["prompt"], entry["negative_prompt"], entry["seed"]) for entry in result.metadata]
    assert said == [("a", "x", 5), ("a", "x", 6), ("b", "y", 7), ("b", "y", 8)]
    assert [entry["options"]["prompt_2"] for entry in result.metadata] == ["c", "c", "d", "d"]
    assert [entry["options"]["negative_prompt_2"] for entry in result.metadata] == ["u", "u", "v", "v"]
    assert len({latents.tobytes() for latents in result.latents}) == 4
    for entry, latents in zip(result.metadata, result.latents, strict=True):
        alone = draw(pipe, entry["prompt"], entry["negative_prompt"], 1, entry["seed"], entry["options"])
        np.testing.assert_allclose(latents, alone.latents[0], atol=1e-4)


@pytest.mark.parametrize("name", ["negative_prompt", "prompt_2", "negative_prompt_2"])
def test_every_prompt_decides(pipe: canvax.Pipeline, name: str) -> None:
    """None of them could be left out, or given to another image, without another image coming out."""
    usual = {"negative_prompt": "x", "prompt_2": "c", "negative_prompt_2": "u"}

    def latents(changes: dict[str, str]) -> np.ndarray:
        said = usual | changes
        return draw(pipe, "a", said.pop("negative_prompt"), 1, 5, said).latents

    assert np.abs(latents({name: "something else"}) - latents({})).max() > 1e-3


@pytest.mark.slow
def test_the_second_encoder_reads_the_first_prompts_unless_it_has_its_own(pipe: canvax.Pipeline) -> None:
    plain = draw(pipe, ["a", "b"], ["x", "y"], 2, 5, {})
    same = draw(pipe, ["a", "b"], ["x", "y"], 2, 5, {"prompt_2": ["a", "b"], "negative_prompt_2": ["x", "y"]})
    np.testing.assert_array_equal(plain.latents, same.latents)
