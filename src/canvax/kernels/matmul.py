"""Matrix products, in the form that suits the target platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from canvax.kernels.target import target_platform
from canvax.types import Array


def matmul(x: Array, weight: Array, scale: Array | None = None) -> Array:
    """Return ``x @ weight`` in the dtype of ``x``; a ``scale`` multiplies the float32 sums before they are rounded.

    On the CPU a bfloat16 product requests float32 sums, which XLA uses anyway. With this, XLA of jax 0.10 multiplies at
    twice the rate of float32 if the processor can (AVX512-BF16), and below the rate of float32 otherwise.
    """
    if scale is not None:
        y = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
        return (y * jax.lax.broadcast_to_rank(scale, y.ndim)).astype(x.dtype)
    if x.dtype == jnp.bfloat16 and target_platform() == "cpu":
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
    return x @ weight


def matmul_8bit(x: Array, weight: Array, scale: Array) -> Array:
    """Return ``x @ (weight * scale)`` in the dtype of ``x``, which is rounded to the 8 bits of ``weight`` [in, ...].

    Each token, a row of the last axis of ``x``, has its scale: its largest magnitude becomes the largest number of 8
    bits. A CPU multiplies the same numbers in the dtype of ``x``, since XLA has no fast 8-bit product there.
    """
    whole = jnp.issubdtype(weight.dtype, jnp.integer)
    most = float(jnp.iinfo(weight.dtype).max if whole else jnp.finfo(weight.dtype).max)
    wide = x.astype(jnp.float32)
    rows = jnp.abs(wide).max(-1, keepdims=True) / most
    rows = jnp.where(rows < 1e-30, 1.0, rows)  # of nothing but zeros, or nearly: the reciprocal would overflow
    narrow = wide * (1 / rows)  # a division for each number would take longer than the product on a TPU
    narrow = (jnp.rint(narrow) if whole else narrow).astype(weight.dtype)
    sums = jnp.int32 if whole else jnp.float32
    if target_platform() == "cpu":
        narrow, weight, sums = narrow.astype(x.dtype), weight.astype(x.dtype), jnp.float32
    elif not whole and x.dtype == jnp.bfloat16:
        sums = jnp.bfloat16  # which has the range; float32 would take as long to write as to compute
    y = jnp.tensordot(narrow, weight, 1, preferred_element_type=sums).astype(jnp.float32)
    y = y * rows.reshape(*x.shape[:-1], *[1] * scale.ndim)
    return (y * jax.lax.broadcast_to_rank(scale, y.ndim)).astype(x.dtype)
