"""Convolutions [B, H, W, Cin] by [kh, kw, Cin, Cout]: the plain form, and the choice of a platform's kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from canvax.kernels import cpu, tpu
from canvax.kernels.common import LAYOUT
from canvax.kernels.target import target_platform
from canvax.types import Array


def convolve(weight: Array, x: Array, *, stride: int = 1, padding: tuple[int, int] = (1, 1)) -> Array:
    """Apply a 2-D convolution without bias, [B, H, W, Cin] -> [B, H', W', Cout].

    ``padding`` is (before, after) on both axes.
    """
    platform = target_platform()
    if platform == "cpu":
        return cpu.convolve(weight, x, stride, padding)
    if platform == "tpu" and tpu.supports_taps(weight, stride, padding):
        return tpu.convolve_by_taps(weight, x)
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), (padding, padding), dimension_numbers=LAYOUT)


def convolve_doubled(weight: Array, x: Array) -> Array:
    """Apply a 3x3 convolution without bias after nearest-neighbour doubling: [B, h, w, Cin] -> [B, 2h, 2w, Cout].

    On CPUs and TPUs the doubled image is never computed: its pixels are copies of each other, so this saves at least
    half of the work.
    """
    platform = target_platform()
    if platform == "cpu":
        return cpu.convolve_doubled(weight, x)
    if platform == "tpu":
        return tpu.convolve_doubled(weight, x)
    return convolve(weight, doubled(x))


def doubled(x: Array) -> Array:
    """Double [B, h, w, C] -> [B, 2h, 2w, C] by nearest neighbour, as a broadcast."""
    b, h, w, c = x.shape
    return jnp.broadcast_to(x[:, :, None, :, None, :], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)
