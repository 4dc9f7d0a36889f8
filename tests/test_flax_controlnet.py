"""The old ControlNet classes: the documented example on eight devices, and what they say of what they cannot use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.flax_api import (
    FlaxControlNetModel,
    FlaxStableDiffusionControlNetPipeline,
    FlaxStableDiffusionPipeline,
    make_image_grid,
    replicate,
    shard,
)
from tests.support.control_files import adapter, controlnet, edges
from tests.support.drawing import one_device
from tests.support.small_checkpoint import write_small_checkpoint

pytestmark = pytest.mark.slow  # test_flax_pipelines has the common part


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("model")
    base = write_small_checkpoint(root / "base")
    pipe = canvax.load(base, mesh=one_device())
    adapter(root / "adapter", pipe)
    return base, controlnet(root / "net", pipe, strength=0.5)


@pytest.fixture(scope="module")
def loaded(folders: tuple[Path, Path]) -> tuple[Any, Any]:
    base, net = folders
    network, network_params = FlaxControlNetModel.from_pretrained(net, from_pt=True, dtype=jnp.float32)
    pipe, params = FlaxStableDiffusionControlNetPipeline.from_pretrained(
        base, controlnet=network, revision=None, dtype=jnp.float32, safety_checker=None
    )
    params["controlnet"] = network_params
    return pipe, params


def test_documented_example(loaded: tuple[Any, Any], folders: tuple[Path, Path]) -> None:
    """As in diffusers' documentation of the class, line by line."""
    pipe, params = loaded
    num_samples = jax.device_count()
    assert num_samples == 8
    canny_images = [edges(i) for i in range(num_samples)]
    rng = jax.random.split(jax.random.key(0), jax.device_count())
    prompt_ids = pipe.prepare_text_inputs(["a cat"] * num_samples)
    negative_prompt_ids = pipe.prepare_text_inputs(["blurry"] * num_samples)
    processed_image = pipe.prepare_image_inputs(canny_images)
    assert processed_image.shape == (8, 3, 64, 64)
    assert (processed_image.min(), processed_image.max()) == (0, 1)
    p_params = replicate(params)
    output = pipe(
        prompt_ids=shard(prompt_ids), image=shard(processed_image), params=p_params, prng_seed=rng,
        num_inference_steps=4, neg_prompt_ids=shard(negative_prompt_ids), jit=True,
    ).images  # fmt: skip
    assert output.shape == (8, 1, 64, 64, 3)
    images = pipe.numpy_to_pil(np.asarray(output.reshape((num_samples, *output.shape[-3:]))))
    assert make_image_grid(images, 2, 4).size == (256, 128)
    # Each device alone, without a device axis; and the new pipeline with the same noise.
    one = pipe(
        prompt_ids[3:4], processed_image[3:4], params, rng[3], num_inference_steps=4,
        neg_prompt_ids=negative_prompt_ids[3:4],
    ).images  # fmt: skip
    np.testing.assert_allclose(one[0], output[3, 0], atol=1e-4)
    latents = jnp.moveaxis(jax.random.normal(rng[3], (1, 4, 8, 8)), 1, -1)
    new = canvax.load(folders[0], mesh=one_device(), controlnet=folders[1])
    want = new("a cat", "blurry", control=edges(3), latents=latents, num_inference_steps=4, guidance_scale=7.5,
               progress=False)  # fmt: skip
    np.testing.assert_allclose(one, want.pixels, atol=1e-4)


def test_strength_is_data(loaded: tuple[Any, Any]) -> None:
    pipe, params = loaded
    ids, image, key = pipe.prepare_text_inputs(["a cat"] * 2), pipe.prepare_image_inputs(edges(1)), jax.random.key(1)
    images = [
        pipe(ids, image, params, key, 3, controlnet_conditioning_scale=scale).images for scale in (1.0, 0, [0.0, 1.0])
    ]
    np.testing.assert_allclose(images[2][0], images[1][0], atol=1e-5)
    np.testing.assert_allclose(images[2][1], images[0][1], atol=1e-5)
    assert np.abs(images[0] - images[1]).max() > 1e-3
    (programs,) = pipe._programs.values() if len(pipe._programs) == 1 else [list(pipe._programs.values())[-1]]
    before = len(programs._compiled)
    pipe(ids, pipe.prepare_image_inputs(edges(2)), params, key, 5, 3.0, controlnet_conditioning_scale=0.3)
    assert len(programs._compiled) == before


def test_apply(loaded: tuple[Any, Any]) -> None:
    """The network by itself: a function of arrays, channels first."""
    pipe, params = loaded
    rng = np.random.default_rng(0)
    sample, text = rng.standard_normal((2, 4, 8, 8), np.float32), rng.standard_normal((2, 77, 48), np.float32)
    variables = {"params": params["controlnet"]}
    down, middle = pipe.controlnet.apply(variables, sample, 10, text, rng.random((2, 3, 64, 64), np.float32), 0.5)
    assert [one.shape[1] for one in down] == [32, 32, 32, 64]
    assert middle.shape == (2, 64, 4, 4)
    assert pipe.controlnet.config["cross_attention_dim"] == 48


def test_what_it_says(loaded: tuple[Any, Any], folders: tuple[Path, Path]) -> None:
    pipe, params = loaded
    base, _ = folders
    ids, key = pipe.prepare_text_inputs("a cat"), jax.random.key(1)
    image = pipe.prepare_image_inputs(edges(1))
    without = {name: value for name, value in params.items() if name != "controlnet"}
    for call, message in (
        (lambda: pipe(ids, image, without, key), "params has no controlnet"),
        (lambda: pipe(ids, image[..., :32], params, key), "32 x 64 pixels; both sides are multiples of 64"),
        (lambda: pipe(ids, 2 * image - 1, params, key), r"values that are not in 0\.\.1"),
        (lambda: pipe(ids, image, params, key, controlnet_conditioning_scale="much"), "is not a number"),
        (lambda: pipe(ids, image, params, key, controlnet_conditioning_scale=[1.0, 2.0]), "is not a number, nor one"),
        (lambda: pipe.prepare_image_inputs(Image.new("RGB", (32, 64))), "both sides need 64 pixels"),
        (lambda: pipe.prepare_text_inputs(5), "prompt=5"),
        (lambda: FlaxStableDiffusionControlNetPipeline.from_pretrained(base), "is no FlaxControlNetModel"),
        (lambda: FlaxControlNetModel.from_pretrained(folders[1].parent / "adapter"), "is no ControlNet"),
        (lambda: FlaxControlNetModel.from_pretrained(folders[1], subfolder="x"), "subfolder"),
        (lambda: FlaxStableDiffusionPipeline.from_pretrained(base, controlnet=pipe.controlnet), "controlnet"),
    ):
        with pytest.raises(canvax.InputError, match=message):
            call()


def test_arrays_of_apply_are_named(loaded: tuple[Any, Any]) -> None:
    pipe, params = loaded
    right: dict[str, Any] = {
        "sample": np.zeros((1, 4, 8, 8)), "timesteps": 5, "encoder_hidden_states": np.zeros((1, 77, 48)),
        "controlnet_cond": np.zeros((1, 3, 64, 64)),
    }  # fmt: skip
    wrong = {"sample": np.zeros((1, 3, 3, 3)), "timesteps": "x", "encoder_hidden_states": np.zeros((1, 77, 4))}
    for name, value in (wrong | {"controlnet_cond": np.zeros((1, 3, 8, 8))}).items():
        with pytest.raises(canvax.InputError, match=f"^{name} "):
            pipe.controlnet.apply({"params": params["controlnet"]}, **right | {name: value})
    with pytest.raises(canvax.InputError, match="'params'"):
        pipe.controlnet.apply({}, **right)
