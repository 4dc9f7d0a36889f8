"""Matrix products, in the form that suits the target platform."""

from __future__ import annotations

import jax.numpy as jnp

from canvax.kernels.target import target_platform
from canvax.types import Array


def matmul(x: Array, weight: Array, scale: Array | None = None) -> Array:
    """Returns ``x @ weight`` in the dtype of ``x``; a ``scale`` multiplies the float32 sums before they are rounded.

    On the CPU a bfloat16 product requests float32 sums, which XLA uses anyway. With this, XLA of jax 0.10 multiplies at
    twice the rate of float32 if the processor can (AVX512-BF16), and below the rate of float32 otherwise.
    """
    if scale is not None:
        return (jnp.matmul(x, weight, preferred_element_type=jnp.float32) * scale).astype(x.dtype)
    if x.dtype == jnp.bfloat16 and target_platform() == "cpu":
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
    return x @ weight
