"""Scaled dot-product attention: the plain form, and the choice of a platform's kernel. Models never choose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from canvax.kernels import cpu, gpu, tpu
from canvax.kernels.matmul import matmul
from canvax.kernels.target import on_each_device, target_platform, weight_shards
from canvax.types import Array

Form = Callable[[Array, Array, Array, Array | None], Array]
"""Maps queries, keys, values and lengths to attention's output. It gets one device's part and is never causal."""


def attention(
    q: Array, k: Array, v: Array, *, lengths: Array | None = None, causal: bool = False, upcast: bool = False
) -> Array:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32.

    Args:
        q: queries [B, Tq, N, Dh].
        k: keys [B, Tk, N, Dh]; or of fewer heads, each for a group of neighbouring query heads (Ainslie et al. 2023).
        v: values [B, Tk, N, Dh], of as many heads as the keys.
        lengths: number of keys that each sample attends to, int [B], at least 1; the keys after them are padding.
        causal: a token attends to itself and earlier tokens only.
        upcast: compute the scores in float32 (``upcast_attention`` of Stable Diffusion 2.x).

    Returns:
        [B, Tq, N, Dh] in the dtype of ``v``.
    """
    form = None if causal else _special_form(q, k)  # a kernel does not pay off for the 77 tokens of a text encoder
    groups = k.shape[2]
    if groups != q.shape[2] and not (form is gpu.attend_by_cudnn and groups % weight_shards() == 0):
        k, v = (jnp.repeat(x, q.shape[2] // groups, axis=2) for x in (k, v))
    if upcast and form not in (gpu.attend_by_cudnn, tpu.attend_by_flash):  # their scores are always float32
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if form is not None:
        return _on_each_device(form, q, k, v, lengths)
    return plain_attention(q, k, v, lengths, causal=causal)


def plain_attention(q: Array, k: Array, v: Array, lengths: Array | None = None, *, causal: bool = False) -> Array:
    """Attention as in the paper, with all scores [B, N, Tq, Tk] in memory."""
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        future = jnp.arange(k.shape[1])[None, :] > jnp.arange(q.shape[1])[:, None]
        scores = jnp.where(future[None, None], jnp.finfo(jnp.float32).min, scores)
    if lengths is not None:
        padding = jnp.arange(k.shape[1])[None, None, None] >= lengths[:, None, None, None]
        scores = jnp.where(padding, jnp.finfo(jnp.float32).min, scores)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return matmul(weights, v.swapaxes(1, 2)).swapaxes(1, 2)  # by head: [B, N, Tq, Tk] times [B, N, Tk, Dh]


def _special_form(q: Array, k: Array) -> Form | None:
    """Returns the form that is faster than the plain form on the target platform, or None."""
    platform = target_platform()
    if platform == "cpu" and cpu.many_scores(q, k):
        return cpu.attend_head_by_head
    if platform == "gpu" and gpu.supports_cudnn(q):
        return gpu.attend_by_cudnn
    if platform == "gpu" and gpu.score_bytes(q, k) > gpu.SCORE_BYTES:
        return partial(gpu.attend_in_parts, plain_attention)
    if platform == "tpu" and tpu.supports_flash(q, k):
        return tpu.attend_by_flash
    return None


def _on_each_device(form: Form, q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
    """Runs a form that XLA cannot partition on each device's images and, if the weights are split, on its heads."""
    split = "model" if weight_shards() > 1 and q.shape[2] % weight_shards() == 0 else None
    spec = PartitionSpec("data", None, split, None)
    return on_each_device(form, (spec, spec, spec, PartitionSpec("data")), spec)(q, k, v, lengths)
