"""The safety checker of the old Flax pipelines: from where it comes, what it does to images, and how it is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.errors import HintWarning
from canvax.flax_api import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionPipeline,
    FlaxStableDiffusionSafetyChecker,
    replicate,
)
from canvax.pipelines.safety import COMPONENT, SafetyChecker, safety_spec
from tests.support.small_checkpoint import CHECKER, write_small_checker, write_small_checkpoint

pytestmark = pytest.mark.slow  # test_flax_pipelines has the common part

PROMPTS = ["a fox in the snow", "a bridge", "a teapot", "a map"]
Checked = tuple[FlaxStableDiffusionPipeline, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_small_checkpoint(tmp_path_factory.mktemp("checked") / "model")
    write_small_checker(found / COMPONENT)
    return found


@pytest.fixture(scope="module")
def checked(folder: Path) -> Checked:
    return FlaxStableDiffusionPipeline.from_pretrained(folder)


def draw(checked: Checked, params: dict[str, Any] | None = None, jit: bool = False) -> Any:
    pipeline, own = checked
    ids = pipeline.prepare_inputs(PROMPTS)
    key = jax.random.PRNGKey(3)
    if jit:
        ids, key = ids.reshape(2, 2, 77), jax.random.split(key, 2)
    latents = np.random.default_rng(0).standard_normal((*ids.shape[:-1], 4, 8, 8)).astype(np.float32)
    return pipeline(ids, params or own, key, 2, latents=latents, jit=jit)


def with_limit(checked: Checked, limit: float) -> dict[str, Any]:
    """The parameters with another threshold of all concepts."""
    own = checked[1][COMPONENT]
    limits = np.full_like(own["concept_embeds_weights"], limit)
    return {**checked[1], COMPONENT: {**own, "concept_embeds_weights": limits}}


def some_refused(checked: Checked) -> tuple[dict[str, Any], list[bool]]:
    """A threshold that two of the four images are beyond, and which these are."""
    pixels = np.asarray(draw(checked).images)
    for limit in np.linspace(-0.5, 1, 301):
        params = with_limit(checked, float(limit))
        flags = SafetyChecker.of(CHECKER, params[COMPONENT]).flags(pixels)
        if sum(flags) == 2:
            return params, flags
    raise AssertionError("the images look alike")


def test_the_checkpoints_own(checked: Checked) -> None:
    """Alone and on several devices: the same images, those that are refused in black, and the answers of all."""
    pipeline, params = checked
    assert isinstance(pipeline.safety_checker, FlaxStableDiffusionSafetyChecker)
    assert params[COMPONENT].keys() == safety_spec(CHECKER).keys()
    plain = draw(checked)
    assert plain.nsfw_content_detected == [False] * 4
    params, flags = some_refused(checked)
    with pytest.warns(HintWarning, match=r"refused 2 of 4 images"):
        got = draw(checked, params)
    assert got.nsfw_content_detected == got["nsfw_content_detected"] == flags
    for image, want, flag in zip(got.images, plain.images, flags, strict=True):
        np.testing.assert_array_equal(image, 0 * want if flag else want)
    again = draw(checked, replicate(params, jax.devices()[:2]), jit=True)
    assert again.nsfw_content_detected == flags
    assert again.images.shape == (2, 2, *got.images.shape[1:])
    np.testing.assert_allclose(again.images.reshape(got.images.shape), got.images, atol=1e-5)
    images, answers = pipeline(pipeline.prepare_inputs(PROMPTS), params, jax.random.key(0), 1, return_dict=False)
    assert len(images) == len(answers) == 4


def test_answers_one_by_one(checked: Checked, folder: Path) -> None:
    """``feature_extractor`` and the checker as old scripts call them; numbers of another dtype are looked at alike."""
    pipeline, _ = checked
    params, flags = some_refused(checked)
    images = [Image.fromarray(pixels) for pixels in np.rint(255 * np.asarray(draw(checked).images)).astype(np.uint8)]
    checker, extractor = pipeline.safety_checker, pipeline.feature_extractor
    assert checker is not None
    assert extractor is not None
    values = extractor(images, return_tensors="np").pixel_values
    assert values.shape == (4, 3, 28, 28)
    assert checker(values, params[COMPONENT]).tolist() == flags
    assert checker(extractor(images[0])["pixel_values"], params[COMPONENT]).tolist() == flags[:1]
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params[COMPONENT])
    assert checker(values, half).shape == (4,)
    loaded, own = FlaxStableDiffusionSafetyChecker.from_pretrained(folder, subfolder=COMPONENT)
    alone, same = FlaxStableDiffusionSafetyChecker.from_pretrained(folder / COMPONENT)
    for other in (own, same):
        jax.tree.map(np.testing.assert_array_equal, other, checked[1][COMPONENT])
    assert loaded.config == alone.config
    with pytest.raises(canvax.InputError, match=r"clip_input has shape \(1, 28, 28, 3\)"):
        checker(np.zeros((1, 28, 28, 3)), own)
    with pytest.raises(canvax.InputError, match="write 'np'"):
        extractor(images, return_tensors="pt")


@pytest.mark.weekly
def test_left_out_and_put_in(checked: Checked, folder: Path, tmp_path: Path) -> None:
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    assert pipeline.safety_checker is pipeline.feature_extractor is None
    assert COMPONENT not in params
    plain = draw((pipeline, params))
    assert plain.nsfw_content_detected is False
    checker, own = FlaxStableDiffusionSafetyChecker.from_pretrained(folder, subfolder=COMPONENT)
    pipeline, params = FlaxStableDiffusionImg2ImgPipeline.from_pretrained(folder, safety_checker=checker)
    assert pipeline.safety_checker is checker
    ids, images = pipeline.prepare_inputs("a", Image.new("RGB", (64, 64), "red"))
    arguments: Any = (images, params, jax.random.key(0))
    with pytest.raises(canvax.InputError, match=r"params has no safety_checker.*safety_checker=None"):
        pipeline(ids, *arguments)
    broken = {**own, "concept_embeds": own["concept_embeds"][:3]}
    with pytest.raises(canvax.InputError, match="concept_embeds"):
        pipeline(ids, images, {**params, COMPONENT: broken}, jax.random.key(0))
    assert pipeline(ids, images, {**params, COMPONENT: own}, jax.random.key(0), 0.5, 2).nsfw_content_detected == [False]
    checked[0].save_pretrained(tmp_path / "saved", checked[1])
    assert json.loads((tmp_path / "saved" / "model_index.json").read_text())[COMPONENT] == [None, None]


def test_where_it_is_not(tmp_path: Path) -> None:
    """A folder that was copied without it, which is said; and one that holds something else."""
    folder = write_small_checkpoint(tmp_path / "model", "flax")
    with pytest.warns(HintWarning, match="names a safety checker, but the folder has none"):
        pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(folder)
    assert pipeline.safety_checker is None
    write_small_checker(folder / COMPONENT, "flax")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(folder, dtype=jnp.bfloat16)
    assert params[COMPONENT]["concept_embeds"].dtype == np.float32
    assert params["unet"]["conv_in"]["weight"].dtype == jnp.bfloat16
    (folder / COMPONENT / "config.json").write_text("{}")
    with pytest.raises(canvax.CheckpointError, match=r"no vision_config.*safety_checker=None leaves it out"):
        FlaxStableDiffusionPipeline.from_pretrained(folder)
    for value in (object(), True, "other"):
        wrong: Any = value
        with pytest.raises(canvax.InputError, match="leave it out for the checkpoint's own"):
            FlaxStableDiffusionPipeline.from_pretrained(folder, safety_checker=wrong)
    with pytest.raises(canvax.InputError, match="feature_extractor"):
        FlaxStableDiffusionPipeline.from_pretrained(folder, feature_extractor=wrong)
