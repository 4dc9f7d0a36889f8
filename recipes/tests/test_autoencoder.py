"""How the autoencoder of the model in the package is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from canvax.errors import InputError
from canvax.models.configs import VaeConfig
from canvax.models.vae import vae_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params
from canvax.train.encoding import encode_pictures
from canvax.train.loop import LOG, Plan, Session, read_log
from recipes.emoji.autoencoder import (
    LEAST,
    VARIANCE,
    _pixel_gram,
    in_pixel_metric,
    reconstruction_psnr,
    train_autoencoder,
    train_decoder,
)

pytestmark = pytest.mark.weekly

SMALL_VAE = VaeConfig(
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    block_out_channels=(8, 8),
    norm_num_groups=4,
    scaling_factor=1.0,
)
PLAN = Plan(steps=120, batch=8, chunk=20, warmup=5, learning_rate=3e-3, average=0.9)
PICTURES = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), np.uint8).repeat(4, axis=1).repeat(4, axis=2)


def test_autoencoder_learns_and_measures_like_pixels(tmp_path: Path) -> None:
    session = Session(tmp_path, "autoencoder", make_mesh(jax.devices()[:1]))
    params, finished = train_autoencoder(PICTURES, SMALL_VAE, PLAN, session, crop=8)
    assert finished
    losses = [line["mse"] for line in read_log(tmp_path / LOG)]
    assert losses[-1] < 0.7 * losses[0]
    mesh = make_mesh(jax.devices()[:1])
    turned = in_pixel_metric(jax.device_get(params), PICTURES, SMALL_VAE, mesh)
    latents = encode_pictures(turned, PICTURES, SMALL_VAE, mesh)
    np.testing.assert_allclose(latents.mean((0, 1, 2)), 0, atol=1e-4)
    covariance = np.cov(latents.reshape(-1, latents.shape[-1]), rowvar=False)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-3)
    assert np.trace(covariance) / len(covariance) == pytest.approx(VARIANCE, rel=1e-2)
    # A small change of any channel changes the pixels by as much; of those that hardly show, by less.
    gram, variances = _pixel_gram(turned, latents, SMALL_VAE, mesh, seed=0), np.diag(covariance)
    shows = variances > 1.01 * LEAST * variances.max()
    np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-3 * gram.max())
    np.testing.assert_allclose(np.diag(gram)[shows], gram.max(), rtol=1e-3)
    assert shows.sum() >= 2
    before = reconstruction_psnr(params, PICTURES, SMALL_VAE, mesh)
    np.testing.assert_allclose(reconstruction_psnr(turned, PICTURES, SMALL_VAE, mesh), before, atol=1e-3)


def test_decoder_learns_whole_pictures(tmp_path: Path) -> None:
    """It gets better, mirrored pictures too; what makes latents stays, and so do they."""
    mesh, begun = make_mesh(jax.devices()[:1]), init_params(vae_spec(SMALL_VAE), 0)
    got, finished = train_decoder(begun, PICTURES, SMALL_VAE, PLAN, Session(tmp_path, "decoder", mesh))
    assert finished
    for part in ("encoder", "quant_conv"):
        jax.tree.map(np.testing.assert_array_equal, begun[part], got[part])
    for shown in (PICTURES, np.ascontiguousarray(PICTURES[:, :, ::-1])):
        before, after = (reconstruction_psnr(p, shown, SMALL_VAE, mesh).mean() for p in (begun, got))
        assert after > before + 3
    with pytest.raises(InputError, match="batch was 8, now 4"):
        train_decoder(begun, PICTURES, SMALL_VAE, replace(PLAN, batch=4), Session(tmp_path, "decoder", mesh))
