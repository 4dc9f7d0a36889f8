"""Attention on NVIDIA GPUs: cuDNN's fused kernel, or a part of the queries at a time where cuDNN has no kernel.

Both were chosen by looking at whole programs as XLA's CUDA compiler compiles them, and timed on an H100
(docs/design/experiments.md, "Kernels on a GPU").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from canvax.kernels.target import target_capability
from canvax.types import Array

SCORE_BYTES = 256 * 2**20
"""Bytes of float32 scores in memory at a time where cuDNN has no kernel for the head size. All scores of the VAE at
1024 x 1024 take 1 GiB per image; the smallest GPUs that run SDXL have 24 GiB."""


def supports_cudnn(q: Array) -> bool:
    """Return whether cuDNN's fused attention compiles: NVIDIA's Ampere or newer, 16 bits, head sizes 8, 16, ... 128."""
    width = q.shape[-1]
    return q.dtype.itemsize == 2 and width <= 128 and width % 8 == 0 and target_capability() >= 8.0


def attend_by_cudnn(
    q: Array, k: Array, v: Array, mask: Array | None = None, bias: Array | None = None, *, scale: float
) -> Array:
    """Compute attention by cuDNN's fused kernel; the scores are float32 and never leave the chip.

    It pays off for the 77 keys of a prompt too: XLA would transpose queries and results in memory, and write the scores
    there twice. A step of SDXL at 1024 x 1024 moves 4.7 GB less and runs 280 fewer kernels: 6 % of its time on an H100.
    Keys may have fewer heads. The mask may be lengths of prefixes, int [B], which cost nothing; another one is read
    from memory, as is a bias. JAX has no gradient for odd numbers of queries or keys: one more is added for it.
    """
    attend = partial(_cudnn, scale=scale)
    if q.shape[1] % 2 == k.shape[1] % 2 == 0:
        return attend(q, k, v, mask, bias)
    odd = jax.custom_vjp(attend)
    odd.defvjp(lambda *operands: jax.vjp(partial(_made_even, attend), *operands), lambda gradient, g: gradient(g))
    return odd(q, k, v, mask, bias)


def _made_even(
    attend: Callable[..., Array], q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None
) -> Array:
    """Call ``attend`` with even numbers of queries and keys; a key that is added is masked."""
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    if mask is None and keys % 2:
        mask = jnp.full(len(q), keys, jnp.int32)
    elif mask is not None and mask.ndim > 1:
        mask = jnp.pad(mask, ((0, 0), (0, keys % 2)))
    if bias is not None:
        rows, columns = (size % 2 if size > 1 else 0 for size in bias.shape[2:])
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, rows), (0, columns)))
    return attend(q, k, v, mask, bias)[:, :queries]


def _cudnn(q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None, *, scale: float) -> Array:
    lengths = mask if mask is not None and mask.ndim == 1 else None
    if mask is not None and lengths is None:
        mask = jnp.broadcast_to(mask[:, None, None], (mask.shape[0], 1, q.shape[1], k.shape[1]))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], q.shape[1], k.shape[1])).astype(q.dtype)
    terms = {"mask": None if lengths is not None else mask, "bias": bias, "scale": scale}
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn", **terms)


def score_bytes(q: Array, k: Array) -> int:
    """Return the bytes that the float32 scores of all heads would take."""
    return 4 * q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]


def attend_in_parts(
    attend: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    scale: float,
) -> Array:
    """Call ``attend``, the plain form, with a part of the queries of all heads at a time.

    The VAE needs it, whose single head is too wide for cuDNN.
    """
    batch, queries, heads, width = q.shape
    parts = -(-score_bytes(q, k) // SCORE_BYTES)
    each = -(-queries // parts)
    filled = jnp.pad(q, ((0, 0), (0, parts * each - queries), (0, 0), (0, 0)))
    biases = None
    if bias is not None:
        biases = jnp.broadcast_to(bias, (*bias.shape[:2], queries, k.shape[1]))
        biases = jnp.pad(biases, ((0, 0), (0, 0), (0, parts * each - queries), (0, 0)))
        biases = jnp.moveaxis(biases.reshape(*bias.shape[:2], parts, each, -1), 2, 0)

    # The gradient computes a part's weights again: storing them would take as much memory as the whole score matrix.
    @jax.checkpoint
    def attend_part(operands: tuple[Array, Array | None]) -> Array:
        q, bias = operands
        return attend(q, k, v, mask=mask, bias=bias, scale=scale)

    filled = filled.reshape(batch, parts, each, heads, width).swapaxes(0, 1)
    out = jax.lax.map(attend_part, (filled, biases))
    return out.swapaxes(0, 1).reshape(batch, parts * each, heads, -1)[:, :queries]
