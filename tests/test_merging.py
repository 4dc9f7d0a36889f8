"""Token merging: fewer tokens for self-attention, and everything a picture is promised besides."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.models.configs import UNetConfig
from canvax.models.merging import Merging, group, means, merged_tokens, partition, spread
from canvax.models.unet import unet, unet_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params

rng = np.random.default_rng(0)
QUIET = canvax.Options(progress=False)
MERGING = canvax.Options(progress=False, token_merging=0.5)


def draw(pipe: canvax.StableDiffusion, prompts: Any = "a cat", **changes: Any) -> canvax.Result:
    return pipe(prompts, **{"num_inference_steps": 6, "seed": 3, "options": MERGING} | changes)


def keys(count: int) -> jax.Array:
    return jax.random.key_data(jax.random.split(jax.random.key(1), count))


@pytest.mark.parametrize("size", [(8, 8), (6, 10), (5, 7), (1, 4), (2, 3)])
def test_one_of_each_window_stays(size: tuple[int, int]) -> None:
    height, width = size
    order = np.asarray(partition(keys(3), height, width))
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(height * width), (3, 1)))
    stay = order[:, : height // 2 * (width // 2)]
    windows = stay // width // 2 * (width // 2) + stay % width // 2
    np.testing.assert_array_equal(np.sort(windows, axis=1), np.tile(np.arange(stay.shape[1]), (3, 1)))


def test_a_single_row_is_left_alone() -> None:
    order = partition(keys(2), 1, 8)
    assert merged_tokens(1, 8, 0.75) == 0
    np.testing.assert_array_equal(group(np.ones((2, 8, 4)), order, 1, 8, ratio=0.75), np.tile(np.arange(8), (2, 1)))


def test_which_one_is_random_and_up_to_the_image() -> None:
    order = np.asarray(partition(keys(2), 32, 32))[:, :256]
    corners = order // 32 % 2 * 2 + order % 2
    assert (np.bincount(corners.ravel(), minlength=4) > 90).all()
    assert (order[0] != order[1]).mean() > 0.6
    np.testing.assert_array_equal(partition(keys(2)[1:], 32, 32)[0, :256], order[1])


def test_the_most_alike_are_merged() -> None:
    """Against the definition, one token after the other, in NumPy."""
    height, width, ratio = 6, 5, 0.4
    x = rng.standard_normal((2, 30, 8)).astype(np.float32)
    order = np.asarray(partition(keys(2), height, width))
    got = np.asarray(group(x, order, height, width, ratio=ratio))
    count = 30 - merged_tokens(height, width, ratio)
    assert count == 18
    means_got = np.asarray(means(x, got, count))
    for b in range(2):
        unit = x[b] / np.linalg.norm(x[b], axis=-1, keepdims=True)
        stay, others = order[b, :6], order[b, 6:]
        closest = sorted(others, key=lambda token: -(unit[stay] @ unit[token]).max())
        want = {token: {int(token)} for token in (*stay, *closest[12:])}
        for token in closest[:12]:
            want[stay[np.argmax(unit[stay] @ unit[token])]].add(int(token))
        found = [set(np.flatnonzero(got[b] == i).tolist()) for i in range(count)]
        assert sorted(map(sorted, found)) == sorted(map(sorted, want.values()))
        for i, members in enumerate(found):
            np.testing.assert_allclose(means_got[b, i], x[b][list(members)].mean(0), rtol=1e-5, atol=1e-6)
    shared = np.asarray(spread(means_got, got))
    np.testing.assert_array_equal(shared, np.stack([means_got[b][got[b]] for b in range(2)]))


CFG = UNetConfig(
    sample_size=16, block_out_channels=(16, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1, attention_head_dim=2,
    cross_attention_dim=8, norm_num_groups=8,
)  # fmt: skip


def test_none_merged_is_the_model_as_it_is() -> None:
    params = init_params(unet_spec(CFG), 0)
    x, text = rng.standard_normal((2, 16, 16, 4)), rng.standard_normal((2, 5, 8))
    told = (x.astype(np.float32), np.ones(2, np.float32), text.astype(np.float32))
    plain = jax.jit(partial(unet, cfg=CFG))(params, *told)
    nothing = jax.jit(partial(unet, cfg=CFG, merging=Merging(0.001, keys(2))))(params, *told)
    np.testing.assert_allclose(nothing, plain, atol=1e-5)  # the tokens come in another order


def test_one_more_program_for_each_ratio(emoji: canvax.StableDiffusion) -> None:
    plain = draw(emoji, options=QUIET)
    first = draw(emoji)
    assert first.compilations == 1
    for changes in ({"seed": 4}, {"num_inference_steps": 9}, {"guidance_scale": 2.0}, {"sampler": "Euler a"}):
        assert draw(emoji, **changes).compilations == 0
    assert 0.001 < np.abs(first.pixels - plain.pixels).mean() < 0.2
    assert draw(emoji, options=QUIET).compilations == 0
    assert first.metadata[0]["options"] == {"token_merging": 0.5}
    np.testing.assert_array_equal(draw(emoji).pixels, first.pixels)


@pytest.mark.slow
def test_with_reuse_and_guidance_in_a_part_of_the_run(emoji: canvax.StableDiffusion) -> None:
    options = canvax.Options(progress=False, token_merging=0.5, reuse=2, guidance_interval=(0.0, 0.5))
    got = draw(emoji, options=options)
    assert np.isfinite(got.latents).all()
    assert 0.001 < np.abs(got.pixels - draw(emoji).pixels).mean() < 0.3


@pytest.mark.slow
def test_same_picture_on_devices(emoji: canvax.StableDiffusion) -> None:
    """Alone, in a batch, and in one that is split over devices, images and weights."""
    prompts = ["a cat", "a dog", "a red apple"]
    want = draw(emoji, prompts).latents
    np.testing.assert_allclose(draw(emoji, prompts[1], seed=4).latents[0], want[1], atol=1e-4)
    for mesh in (make_mesh(jax.devices()[:2]), make_mesh(jax.devices()[:4], model=2)):
        np.testing.assert_allclose(draw(canvax.load("emoji", mesh=mesh), prompts).latents, want, atol=1e-4)


@pytest.mark.parametrize("ratio", [-0.1, 0.76, 1, float("nan"), True, "0.5", None])
def test_ratios_that_make_no_sense(emoji: canvax.StableDiffusion, ratio: Any) -> None:
    with pytest.raises(canvax.InputError, match=r"token_merging=.* 0\.\.0\.75"):
        canvax.Options(token_merging=ratio)
    with pytest.raises(canvax.InputError, match="token_merging="):
        emoji.compile(token_merging=ratio)


def test_compiled_before(emoji: canvax.StableDiffusion) -> None:
    emoji.compile(token_merging=0.25, progress=False)
    assert draw(emoji, options=canvax.Options(progress=False, token_merging=0.25)).compilations == 0
