"""Autoencoders of current models against diffusers: encode and decode with the same random weights, float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch

from canvax.errors import CheckpointError
from canvax.models.configs import VaeConfig
from canvax.models.decode import decode_images, encode_images
from canvax.models.flux2_vae import (
    UNUSED,
    Flux2VaeConfig,
    flux2_vae_decode,
    flux2_vae_encode,
    flux2_vae_spec,
)
from canvax.models.qwen_vae import QwenAutoencoder, QwenVaeConfig
from canvax.models.vae import vae_spec
from canvax.models.wan_vae import WanVaeConfig, from_video, wan_vae_decode, wan_vae_encode, wan_vae_spec
from tests.support.random_numbers import normal

from .reference import nchw, nhwc, randomise, relative_error
from .transformers_reference import TOLERANCE, params_of, stored

BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


def check(got: Any, want: Any) -> None:
    assert np.shape(got) == np.shape(want)
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.slow
def test_kl_with_a_shift() -> None:
    """As in FLUX.1 and Z-Image: sixteen channels, a shift, and no convolutions next to the latents."""
    theirs: Any = randomise(
        diffusers.AutoencoderKL(
            block_out_channels=(8, 16), layers_per_block=1, latent_channels=16, norm_num_groups=4,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False, **BLOCKS,
        )
    )  # fmt: skip
    cfg = VaeConfig.from_dict(dict(theirs.config))
    p = params_of(stored(theirs), vae_spec(cfg))
    latents, images = normal(2, 6, 10, 16), np.random.default_rng(0).random((2, 12, 20, 3), np.float32)
    with torch.no_grad():
        pixels = nhwc(theirs.decode(nchw(latents) / 0.3611 + 0.1159).sample) / 2 + 0.5
        posterior = theirs.encode(nchw(2 * images - 1)).latent_dist
    np.testing.assert_allclose(decode_images(p, latents, cfg=cfg), np.clip(pixels, 0, 1), atol=TOLERANCE)
    mean, deviation = encode_images(p, images, cfg=cfg)
    check(mean, (nhwc(posterior.mean) - 0.1159) * 0.3611)
    check(deviation, nhwc(posterior.std) * 0.3611)


def flux2_vae(**changes: Any) -> Any:
    theirs: Any = randomise(
        diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, **BLOCKS, **changes
        )
    )
    generator = torch.Generator().manual_seed(1)
    theirs.bn.running_mean.copy_(torch.randn(16, generator=generator))
    theirs.bn.running_var.copy_(torch.rand(16, generator=generator) * 1e-3)  # next to which its epsilon counts
    return theirs


@pytest.mark.parametrize("changes", [{}, {"decoder_block_out_channels": (4, 8)}], ids=["", "small decoder"])
def test_flux2(changes: dict[str, Any]) -> None:
    theirs = flux2_vae(**changes)
    cfg = Flux2VaeConfig.from_dict(dict(theirs.config))
    state = {name: array for name, array in stored(theirs).items() if name not in UNUSED}
    p = params_of(state, flux2_vae_spec(cfg))
    assert (cfg.factor, cfg.channels) == (4, 16)
    latents, images = normal(2, 3, 5, 16), normal(2, 12, 20, 3)
    pipe = diffusers.Flux2KleinPipeline
    with torch.no_grad():
        deviation = torch.sqrt(theirs.bn.running_var + cfg.batch_norm_eps)[:, None, None]
        mean = theirs.bn.running_mean[:, None, None]
        want = nhwc(theirs.decode(pipe._unpatchify_latents(nchw(latents) * deviation + mean)).sample)
        posterior = theirs.encode(nchw(images)).latent_dist
        centre = nhwc((pipe._patchify_latents(posterior.mode()) - mean) / deviation)
        spread = nhwc(pipe._patchify_latents(posterior.std) / deviation)
    check(jax.jit(partial(flux2_vae_decode, cfg=cfg))(p, latents), want)
    mine, logvar = jax.jit(partial(flux2_vae_encode, cfg=cfg))(p, images)
    check(mine, centre)
    check(np.exp(logvar / 2), spread)


def wan_vae(mean: list[float], deviation: list[float]) -> Any:
    return randomise(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
            latents_mean=mean, latents_std=deviation,
        )
    )  # fmt: skip


def test_wan() -> None:
    """One frame, in two dimensions."""
    mean, deviation = [0.5, -0.2, 0.1, 0.7], [2.0, 1.5, 0.7, 1.1]
    theirs = wan_vae(mean, deviation)
    cfg = WanVaeConfig.from_dict(dict(theirs.config))
    p = params_of(frame_of(stored(theirs)), wan_vae_spec(cfg))
    latents, images = normal(2, 3, 5, 4), normal(2, 12, 20, 3)
    with torch.no_grad():
        scaled = latents * np.float32(deviation) + np.float32(mean)
        want = nhwc(theirs.decode(nchw(scaled)[:, :, None]).sample[:, :, 0])
        posterior = theirs.encode(nchw(images)[:, :, None]).latent_dist
        centre = (nhwc(posterior.mode()[:, :, 0]) - np.float32(mean)) / np.float32(deviation)
        spread = nhwc(posterior.std[:, :, 0]) / np.float32(deviation)
    assert np.abs(want).max() > 0.3
    assert np.mean(np.abs(want) == 1) < 0.1
    check(jax.jit(partial(wan_vae_decode, cfg=cfg))(p, latents), want)
    mine, logvar = jax.jit(partial(wan_vae_encode, cfg=cfg))(p, images)
    check(mine, centre)
    check(np.exp(logvar / 2), spread)


def test_qwen() -> None:
    """One frame with alpha, levels whose input is added, and a decoder that is wider than the encoder."""
    mean, deviation = [0.5, -0.2, 0.1, 0.7], [2.0, 1.5, 0.7, 1.1]
    theirs: Any = randomise(
        diffusers.AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1,
            temperal_downsample=[False, True, True], latents_mean=mean, latents_std=deviation, scale_factor_spatial=8,
        )
    )  # fmt: skip
    cfg = QwenVaeConfig.from_dict(dict(theirs.config))
    network = QwenAutoencoder(cfg)
    p = params_of(frame_of(stored(theirs)), network.spec)
    latents, images = normal(2, 3, 5, 4), np.clip(0.5 + 0.2 * normal(2, 24, 40, 4), 0, 1)
    with torch.no_grad():
        scaled = latents * np.float32(deviation) + np.float32(mean)
        want = nhwc(theirs.decode(nchw(scaled)[:, :, None]).sample[:, :, 0]) / 2 + 0.5
        posterior = theirs.encode(nchw(2 * images - 1)[:, :, None]).latent_dist
        centre = (nhwc(posterior.mode()[:, :, 0]) - np.float32(mean)) / np.float32(deviation)
        spread = nhwc(posterior.std[:, :, 0]) / np.float32(deviation)
    assert np.abs(want).max() > 0.3
    assert np.mean((want == 1) | (want == 0)) < 0.2
    check(jax.jit(network.decode)(p, latents), want)
    mine, sigma = jax.jit(network.encode)(p, images)
    check(mine, centre)
    check(sigma, spread)


@pytest.mark.slow
def test_wan_in_tiles() -> None:
    """Far from where tiles meet it is what the whole gives; there they are blended."""
    theirs = wan_vae([0.0] * 4, [1.0] * 4)
    cfg = WanVaeConfig.from_dict(dict(theirs.config))
    p = params_of(frame_of(stored(theirs)), wan_vae_spec(cfg))
    latents = normal(1, 64, 8, 4)
    whole, tiled = (wan_vae_decode(p, latents, cfg, tile=tile) for tile in (None, 192))
    np.testing.assert_allclose(tiled[:, :20], whole[:, :20], atol=1e-5)
    assert 0 < relative_error(tiled, whole) < 0.05
    whole, tiled = (wan_vae_encode(p, whole, cfg, tile=tile) for tile in (None, 192))
    for one, other in zip(tiled, whole, strict=True):
        assert relative_error(one, other) < 0.05


def frame_of(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What one frame needs of a checkpoint for videos."""
    return {name: from_video(array) for name, array in state.items() if "time_conv" not in name}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (WanVaeConfig, {"attn_scales": [1.0]}),
        (WanVaeConfig, {"z_dim": 8}),
        (Flux2VaeConfig, {"patch_size": [4, 4]}),
        (Flux2VaeConfig, {"block_out_channels": [8, 16]}),
    ],
)
def test_what_is_not_supported(kind: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        kind.from_dict(changes)
