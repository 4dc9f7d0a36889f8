"""One ``attention()`` over several kernels; models never choose, the size and the platform compiled for do."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from canvax.target import target_platform
from canvax.types import Array

CHUNK_SCORES = 2 * 1024 * 1024
"""Scores of one head that are held at once on the CPU: 8 MiB in float32, which stay in the caches."""


def attention(q: Array, k: Array, v: Array, *, causal: bool = False, upcast: bool = False) -> Array:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32.

    Args:
        q: queries [B, Tq, N, Dh].
        k: keys [B, Tk, N, Dh].
        v: values [B, Tk, N, Dh].
        causal: a token sees itself and what comes before it.
        upcast: compute the scores in float32 (``upcast_attention`` of Stable Diffusion 2.x).

    Returns:
        [B, Tq, N, Dh] in the dtype of ``v``.
    """
    if upcast:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if not causal and target_platform() == "cpu" and q.shape[1] * k.shape[1] > CHUNK_SCORES // 4:
        return _attend_head_by_head(q, k, v)
    return _attend(q, k, v, causal=causal)


def _attend(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        future = jnp.arange(k.shape[1])[None, :] > jnp.arange(q.shape[1])[:, None]
        scores = jnp.where(future, jnp.finfo(jnp.float32).min, scores)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


def _attend_head_by_head(q: Array, k: Array, v: Array) -> Array:
    """Long sequences on the CPU: one head and a chunk of its queries at a time, plain matrices all the way.

    The whole score matrix (1 GiB for 4,096 tokens, 8 heads and guidance) never exists. A chunk of queries sees all
    keys, so its softmax needs no second pass. A column of ones appended to the values makes the matmul that gathers
    the values sum the weights as well, and the division is done on the narrow result.
    """
    batch, queries, heads, width = q.shape
    chunk = max(1, min(queries, CHUNK_SCORES // k.shape[1]))
    padded = -(-queries // chunk) * chunk

    def by_head(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], -1)

    scale = jnp.asarray(width**-0.5, q.dtype)
    chunks = by_head(jnp.pad(q * scale, ((0, 0), (0, padded - queries), (0, 0), (0, 0))))
    chunks = chunks.reshape(batch * heads, padded // chunk, chunk, width)
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)

    def head(operands: tuple[Array, Array, Array]) -> Array:
        chunks, k, v = operands

        def one(q: Array) -> Array:
            scores = jnp.matmul(q, k.T, preferred_element_type=jnp.float32)
            weights = jnp.exp(scores - scores.max(-1, keepdims=True)).astype(v.dtype)
            sums = jnp.matmul(weights, v, preferred_element_type=jnp.float32)
            return (sums[:, :-1] / sums[:, -1:]).astype(v.dtype)

        # The gradient computes a chunk's weights again; kept, they would be the whole score matrix after all.
        return jax.lax.map(jax.checkpoint(one), chunks)

    out = jax.lax.map(head, (chunks, by_head(k), by_head(jnp.concatenate([v, ones], axis=-1))))
    return out.reshape(batch, heads, padded, -1)[:, :, :queries].swapaxes(1, 2)
