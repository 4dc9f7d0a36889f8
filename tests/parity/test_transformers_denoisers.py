"""Transformers against diffusers, where whole pipelines do not reach: the guidance of FLUX.2 dev, far positions."""

from __future__ import annotations

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_flux2

from canvax.models import dit
from canvax.models.dit import rotary_embedding
from canvax.models.flux2 import Flux2Config, flux2, flux2_context, flux2_spec
from canvax.params import halves_first, pairs_together
from tests.support.random_numbers import normal

from .reference import randomise, relative_error
from .transformers_reference import TOLERANCE, params_of, stored, to_torch, unfused


@pytest.mark.slow
def test_flux2_that_embeds_guidance() -> None:
    theirs = randomise(
        diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16,
            joint_attention_dim=96, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=True,
        )
    )  # fmt: skip
    cfg = Flux2Config.from_dict(dict(theirs.config))
    spec = flux2_spec(cfg)
    p = params_of(unfused(stored(theirs), spec), spec)
    times = np.array([981.0, 3.25], np.float32)
    x, text, guidance = normal(2, 15, 16), normal(2, 8, 96), np.array([4.0, 2.5], np.float32)
    y, column = np.mgrid[:3, :5].reshape(2, -1)
    ids = np.stack([0 * y, y, column, 0 * y], axis=-1)
    text_ids = np.pad(np.arange(8)[:, None], ((0, 0), (3, 0)))
    with torch.no_grad():
        want = theirs(
            to_torch(x), to_torch(text), to_torch(times / 1000), to_torch(ids), to_torch(text_ids), to_torch(guidance),
            return_dict=False,
        )[0].numpy()  # fmt: skip

    @jax.jit
    def ours(guidance: np.ndarray) -> jax.Array:
        none = jnp.zeros((2, 0, 16), jnp.float32), jnp.zeros((2, 0, 4), jnp.int32)
        context = flux2_context(p, jnp.asarray(text), jnp.array([5, 5], jnp.int32), *none, cfg, tokens=15)
        return flux2(p, jnp.asarray(x), jnp.asarray(times), context, cfg, guidance=guidance)

    assert relative_error(ours(guidance), want) <= TOLERANCE
    assert relative_error(ours(2 * guidance), want) > 1e-3


def test_rotary_embedding() -> None:
    """Tables and products, at positions that bfloat16 does not have."""
    ids = np.stack([np.arange(500, 530), np.arange(30), np.arange(511, 481, -1), np.zeros(30, int)], -1)
    axes, theta = (4, 6, 4, 2), 2000.0
    cos, sin = transformer_flux2.Flux2PosEmbed(theta, list(axes))(to_torch(ids))
    mine = rotary_embedding(jnp.asarray(ids)[None], axes, theta)
    np.testing.assert_allclose(mine.cos[0], cos[:, ::2], atol=1e-4)
    np.testing.assert_allclose(mine.sin[0], sin[:, ::2], atol=1e-4)
    q, k = normal(1, 30, 2, 16), normal(1, 30, 2, 16)
    theirs = [transformer_flux2.apply_rotary_emb(to_torch(x), (cos, sin), sequence_dim=1).numpy() for x in (q, k)]
    order = halves_first(np.arange(16), 16)
    ours = [np.asarray(dit.rotate(jnp.asarray(x[..., order]), mine)) for x in (q, k)]
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other[..., order]) <= TOLERANCE
    scores = [np.einsum("bqnd,bknd->bnqk", *both) for both in (ours, theirs)]
    assert relative_error(*scores) <= TOLERANCE


def test_the_order_of_rotary_pairs_and_back() -> None:
    x = normal(3 * 16, 5)
    turned = halves_first(x, 16)
    np.testing.assert_array_equal(turned[16:32].reshape(2, 8, 5), np.stack([x[16:32:2], x[17:32:2]]))
    np.testing.assert_array_equal(pairs_together(turned, 16), x)
