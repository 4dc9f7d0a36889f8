"""Matrix products, in the form that suits the target."""

from __future__ import annotations

import jax.numpy as jnp

from canvax.kernels.target import target_platform
from canvax.types import Array


def matmul(x: Array, weight: Array, scale: Array | None = None) -> Array:
    """``x @ weight`` in the dtype of ``x``; a ``scale`` multiplies float32 sums, before they are rounded.

    On the CPU sums of bfloat16 are asked for in float32, which is what they are anyway: XLA of jax 0.10 then multiplies
    at twice the rate of float32 where the processor can (AVX512-BF16), and otherwise at less than it.
    """
    if scale is not None:
        return (jnp.matmul(x, weight, preferred_element_type=jnp.float32) * scale).astype(x.dtype)
    if x.dtype == jnp.bfloat16 and target_platform() == "cpu":
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
    return x @ weight
