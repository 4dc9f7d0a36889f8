"""Parts of convolutions that the kernels of several platforms share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from canvax.kernels.target import on_each_device
from canvax.types import Array, DType

LAYOUT = ("NHWC", "HWIO", "NHWC")

Padding = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns of zeros, each (before, after) the image."""

Convolution = Callable[[Array, Array], Array]
"""Maps a weight and images [B, H, W, Cin] to [B, H', W', Cout]."""


def on_each_image(function: Convolution) -> Convolution:
    """Run ``function``, which XLA cannot partition, on each device's images with the whole weight."""

    def on_devices(weight: Array, x: Array) -> Array:
        batch = PartitionSpec("data")
        return on_each_device(function, (PartitionSpec(), batch), batch)(weight, x)

    return on_devices


def with_reference_vjp(reference: Convolution) -> Callable[[Convolution], Convolution]:
    """Return a decorator for another form of ``reference``: each device runs it on its images, with the gradient of
    ``reference``.

    A gradient through the form would have to keep, or compute again, all its intermediate results.
    """

    def decorate(function: Convolution) -> Convolution:
        @jax.custom_vjp
        def form(weight: Array, x: Array) -> Array:
            return on_each_image(function)(weight, x)

        def backward(operands: tuple[Array, Array], slope: Array) -> tuple[Array, ...]:
            return jax.vjp(reference, *operands)[1](slope)

        form.defvjp(lambda weight, x: (form(weight, x), (weight, x)), backward)
        return form

    return decorate


def pair_weights(weight: Array, dtype: DType) -> list[list[Array]]:
    """Split a 3x3 weight for doubled pixels into four 2x2 weights for the original pixels.

    Each is for one of the four pixels that an original pixel becomes. Taps on copies of the same pixel are added up,
    which leaves four ninths of the work.
    """
    wide = weight.astype(jnp.float32)
    return [[_pair(_pair(wide, i, axis=0), j, axis=1).astype(dtype) for j in (0, 1)] for i in (0, 1)]


def _pair(weight: Array, place: int, axis: int) -> Array:
    """Turn three taps on doubled pixels into two on the original pixels, for the first or second copy of a pixel."""
    first, second, third = jnp.split(weight, 3, axis)
    taps = (first, second + third) if place == 0 else (first + second, third)
    return jnp.concatenate(taps, axis)


def convolve_pairs(
    kernels: Array | Sequence[Sequence[Array]], x: Array, convolve: Callable[[Array, Array, int, Padding], Array]
) -> Array:
    """Convolve a doubled image: calls ``convolve`` with each of the four weights of ``pair_weights``."""
    y = [[convolve(kernels[i][j], x, 1, ((1 - i, i), (1 - j, j))) for j in (0, 1)] for i in (0, 1)]
    b, h, w, _ = x.shape
    return jnp.stack([jnp.stack(row, axis=3) for row in y], axis=2).reshape(b, 2 * h, 2 * w, -1)


def in_strips(x: Array, outputs: int, convolve: Callable[[Array, Array | int, int], Array], sums: int) -> Array:
    """Convolve as many images at a time, or rows of an image, as keep the float32 sums within ``sums`` bytes.

    Args:
        x: [B, H, W, Cin].
        outputs: float32 sums per pixel of ``x`` that are in memory at the same time.
        convolve: maps images [B', H', W, Cin], a first row and a number of rows to the result for these rows
            [B', n * rows, ...].
        sums: limit in bytes.
    """
    b, h, w, c = x.shape
    row = 4 * w * outputs
    if h * row <= sums:
        images = max(n for n in range(1, b + 1) if b % n == 0 and n * h * row <= sums)
        if images == b:
            return convolve(x, 0, h)
        y = jax.lax.map(lambda part: convolve(part, 0, h), x.reshape(b // images, images, h, w, c))
        return y.reshape(b, *y.shape[2:])
    most = max(1, sums // row)
    rows = max(n for n in range(1, most + 1) if h % n == 0)
    if 2 * rows <= most:  # the height has no good divisors
        rows = max(1, most // 8 * 8)
    strips = math.ceil(h / rows)
    if strips * rows < rows + 2:
        strips += 1
    x = jnp.pad(x, ((0, 0), (0, strips * rows - h), (0, 0), (0, 0)))

    def strip(number: Array) -> Array:
        first = number % strips * rows
        begin = jnp.clip(first - 1, 0, strips * rows - rows - 2)  # include the rows above and below, if any
        part = jax.lax.dynamic_slice(x, (number // strips, begin, 0, 0), (1, rows + 2, w, c))
        return convolve(part, first - begin, rows)

    y = jax.lax.map(strip, jnp.arange(b * strips))
    times = y.shape[2] // rows
    return y.reshape(b, strips * rows * times, *y.shape[3:])[:, : h * times]
