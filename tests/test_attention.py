"""Keys behind a length and grouped heads: each platform's form against attention to the keys that count."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from canvax.kernels import gpu
from canvax.kernels.attention import attention, plain_attention
from canvax.kernels.target import compiling_for
from canvax.parallel.mesh import make_mesh, over_batch
from tests.support.random_numbers import rng

ROUNDING = 1e-5


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def attend_one_by_one(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> np.ndarray:
    """Each sample with its real keys alone, and each key head copied for its group."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.stack([np.asarray(x)[:, :, n // group] for n in range(q.shape[2])], 2) for x in (k, v))
    return np.concatenate(
        [
            plain_attention(q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length])
            for i, length in enumerate(lengths)
        ]
    )


# Sizes for which each platform takes its special form: many scores on a CPU, a wide head on a GPU, 512 keys on a TPU.
CASES = {"none": (8, 12, 16), "cpu": (700, 800, 16), "gpu": (50, 40, 136), "tpu": (512, 600, 32)}


@pytest.mark.parametrize("platform", CASES)
def test_lengths_and_grouped_heads(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = 2
    queries, keys, width = CASES[platform]
    mesh = make_mesh(jax.devices()[:devices])
    monkeypatch.setattr(gpu, "SCORE_BYTES", 4 * 40 * 3 * 16)
    shapes = (2, queries, 4, width), (2, keys, 2, width), (2, keys, 2, width)
    q, k, v = (jax.device_put(normal(*shape), over_batch(mesh)) for shape in shapes)
    lengths = jnp.array([keys // 3, keys])
    with compiling_for(platform, mesh), pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda q, k, v, n: attention(q, k, v, lengths=n))(q, k, v, lengths)
    np.testing.assert_allclose(got, attend_one_by_one(q, k, v, lengths), atol=ROUNDING)


def test_cudnn_reads_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernel is for a GPU; JAX's plain form of the same call takes its place."""
    plain = jax.nn.dot_product_attention

    def dot_product_attention(*qkv: jax.Array, implementation: str, **how: Any) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # which this form needs, and cuDNN's does not
            return plain(*qkv, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    q, k, v = (normal(2, length, heads, 16).astype(jnp.bfloat16) for length, heads in ((9, 4), (12, 2), (12, 2)))
    lengths = jnp.array([5, 12])
    with compiling_for("gpu", capability="9.0"):
        got = attention(q, k, v, lengths=lengths)
    want = attend_one_by_one(*(x.astype(jnp.float32) for x in (q, k, v)), lengths)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


def test_causal_attention_to_a_padded_prompt() -> None:
    """Padding behind a prompt is no key, for later padding neither."""
    q, k, v = normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8)
    lengths = jnp.array([3, 7])
    got = attention(q, k, v, lengths=lengths, causal=True)
    for t in (0, 2, 4, 6):
        want = attend_one_by_one(q[:, t : t + 1], k, v, jnp.minimum(lengths, t + 1))
        np.testing.assert_allclose(got[:, t : t + 1], want, atol=ROUNDING)
