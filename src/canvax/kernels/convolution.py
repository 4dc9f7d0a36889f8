"""Convolutions [B, H, W, Cin] by [kh, kw, Cin, Cout]: the plain form, and the choice of a platform's kernel."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from canvax.kernels import cpu, tpu
from canvax.kernels.common import LAYOUT
from canvax.kernels.target import batch_shards, target_platform
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


def by_strips(function: Callable[[Array], Array], x: Array, *, reach: int) -> Array:
    """Return ``function(x)`` of an image [B, H, W, C] -> [B, H, W, C'], on TPUs strip by strip if the image is large.

    Each row of the result must depend only on rows at most ``reach`` away. The intermediate results of a strip stay on
    the chip: a residual block of 96 channels at 1024 x 1024 takes half of the time and less than a third of the
    transfers. Strips overlap by what they reach; the first and the last end where the image ends, so the result is the
    same.
    """
    if target_platform() != "tpu" or not tpu.by_taps_here():
        return function(x)
    b, h, w, c = x.shape
    images, widest = max(1, b // (batch_shards() or 1)), max(c, jax.eval_shape(function, x).shape[-1])
    most = tpu.STRIP_BYTES // (4 * images * w * widest) - 2 * reach
    if h <= most + 2 * reach:
        return function(x)
    most = max(1, most)
    rows = max(n for n in range(1, most + 1) if h % n == 0)
    if 2 * rows <= most:  # the height has no good divisors
        rows = -(-h // -(-h // most))
    strips, span = -(-h // rows), min(rows + 2 * reach, h)

    def strip(number: Array) -> Array:
        first = jnp.minimum(number * rows, h - rows)
        begin = jnp.clip(first - reach, 0, h - span)
        y = function(jax.lax.dynamic_slice(x, (0, begin, 0, 0), (b, span, w, c)))
        return jax.lax.dynamic_slice(y, (0, first - begin, 0, 0), (b, rows, w, y.shape[-1]))

    y = jnp.moveaxis(jax.lax.map(strip, jnp.arange(strips)), 0, 1).reshape(b, strips * rows, w, -1)
    last, twice = (strips - 1) * rows, strips * rows - h  # rows of the last strip that the one before has, too
    return jnp.concatenate([y[:, :last], y[:, last + twice :]], 1) if twice else y
