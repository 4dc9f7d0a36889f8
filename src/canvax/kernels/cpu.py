"""Kernels for CPUs: attention head by head, and convolutions by im2col, taps, Winograd's tiles or doubled products.

The constants were measured on three machines (docs/design/experiments.md, "Kernels on a CPU"): "Zen 4" is two cores of
an EPYC with AVX512-BF16, "EPYC" is two cores of an older EPYC with AVX-512, "Xeon" is two cores of an Emerald Rapids
with AMX.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from canvax.kernels.common import (
    LAYOUT,
    Padding,
    convolve_pairs,
    in_strips,
    on_each_image,
    pair_weights,
    with_reference_vjp,
)
from canvax.kernels.matmul import matmul
from canvax.kernels.target import processor, weight_shards
from canvax.types import Array

CHUNK_SCORES = 2 * 2**20
"""Scores of a head in memory at a time: 8 MiB in float32, which stay in the caches (EPYC)."""

IM2COL_PIXELS = 0.5
"""Output pixels of a batch, divided by output channels, up to which one matmul is faster than XLA's convolution (EPYC):
2.4 times at 2 x 8 x 8 pixels, 1.2 times at 2 x 16 x 16 (float32, 1280 channels). Above this the nine shifted images no
longer stay in the caches."""

IM2COL_CHANNELS = 64
"""Input channels from which that matmul pays off (EPYC)."""

IM2COL_FEW_CHANNELS = 4
"""Input channels up to which that matmul always pays off, as in first layers: 0.35 of the time of XLA's convolution at
64 x 64 pixels and 3 -> 24 channels, 0.6 at 64 x 64 and 4 -> 320, 0.86 at 512 x 512 and 3 -> 128 (EPYC)."""

TILE_CHANNELS = 256
"""Input channels, and twice the output channels, from which Winograd's tiles take 0.4 to 0.8 of the time of XLA's
convolution (Zen 4). For bfloat16, which XLA would first widen in memory, half as many input channels suffice."""

MIN_TILES = 64
"""Tiles of 4 x 4 pixels in a batch from which transforming the weight pays off (Zen 4)."""

TILES_AT_ONCE = 256
"""Tiles computed at a time, so that their matmuls are large but stay in the caches (Zen 4); four times as many for up
to ``TILE_CHANNELS`` output channels."""

TAP_CHANNELS = 256
"""Input channels from which nine bfloat16 matmuls with AMX take 0.3 to 0.9 of the time of Winograd's float32 tiles, and
0.7 of im2col's (Xeon)."""

TAP_BYTES = 4 * 2**20
"""Bytes of float32 sums that ``_by_taps`` has in memory at a time; they stay in the second-level caches (Xeon)."""

PRODUCT_BYTES = 48 * 2**20
"""Bytes of float32 products that ``_doubled_products`` has in memory at a time (Zen 4)."""


def many_scores(q: Array, k: Array) -> bool:
    """Return whether the scores of a head [Tq, Tk] are too many for the caches, which other data also needs."""
    return q.shape[1] * k.shape[1] > CHUNK_SCORES // 4


def attend_head_by_head(
    q: Array, k: Array, v: Array, mask: Array | None = None, bias: Array | None = None, *, scale: float
) -> Array:
    """Compute attention for long sequences on the CPU: one chunk of a head's queries at a time, as plain matrices.

    The whole score matrix (1 GiB for 4,096 tokens, 8 heads and guidance) never exists. A chunk of queries sees all
    keys, so its softmax needs no second pass. The result is divided, not the scores, since it is narrower.
    """
    batch, queries, heads, _ = q.shape
    chunks = -(-queries // max(1, CHUNK_SCORES // k.shape[1]))
    chunk = -(-queries // chunks)
    padded = chunks * chunk

    def by_head(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], -1)

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padded - queries), (0, 0)))
        return x.reshape(batch * heads, chunks, chunk, x.shape[2])

    # In float32 the queries are scaled; in 16 bits the scores, for which scaling the queries would add a rounding.
    early, late = (scale, 1.0) if q.dtype == jnp.float32 else (1.0, scale)
    if bias is not None:
        bias = in_chunks(jnp.broadcast_to(bias, (batch, heads, queries, k.shape[1])).reshape(-1, queries, k.shape[1]))

    def head(operands: tuple[Array, Array, Array, Array | None, Array | None]) -> Array:
        parts, k, v, mask, bias = operands

        def attend_chunk(operands: tuple[Array, Array | None]) -> Array:
            q, bias = operands
            scores, factor = jnp.matmul(q, k, preferred_element_type=jnp.float32), late
            if bias is not None:
                scores, factor = scores * late + bias.astype(jnp.float32), 1.0
            if mask is not None:
                scores = jnp.where(mask[None], scores, jnp.finfo(jnp.float32).min)
            scores = scores - scores.max(-1, keepdims=True)
            weights = jnp.exp(scores if factor == 1.0 else scores * factor).astype(v.dtype)
            values = jnp.matmul(weights, v, preferred_element_type=jnp.float32)
            return (values / weights.astype(jnp.float32).sum(-1, keepdims=True)).astype(v.dtype)

        # The gradient computes a chunk's weights again: storing them would take the memory of the whole score matrix.
        return jax.lax.map(jax.checkpoint(attend_chunk), (parts, bias))

    # XLA multiplies in bfloat16 only if the keys are transposed beforehand, and otherwise in float32.
    per_head = None if mask is None else jnp.repeat(mask, heads, axis=0)
    parts = in_chunks(by_head(q if early == 1.0 else q * jnp.asarray(early, q.dtype)))
    out = jax.lax.map(head, (parts, by_head(k).swapaxes(1, 2), by_head(v), per_head, bias))
    return out.reshape(batch, heads, padded, -1)[:, :, :queries].swapaxes(1, 2)


def convolve(weight: Array, x: Array, stride: int, padding: tuple[int, int]) -> Array:
    """Compute ``canvax.kernels.convolution.convolve`` in the form that is fastest for these sizes."""
    inputs, outputs = weight.shape[2:]
    same_size = (stride, padding) == (1, (1, 1))
    if weight.shape[:2] == (3, 3) and weight_shards() == 1:
        if same_size and x.dtype == jnp.bfloat16 and inputs >= TAP_CHANNELS and has_amx():
            return _by_taps(weight, x)
        small = inputs >= IM2COL_CHANNELS and math.prod(x.shape[:3]) <= IM2COL_PIXELS * stride**2 * outputs
        if small or inputs <= IM2COL_FEW_CHANNELS:
            return _by_im2col(weight, x, stride, padding)
        if same_size and _supports_tiles(weight, x):
            return _by_tiles(weight, x)
    return by_xla(weight, x, stride, (padding, padding))


def convolve_doubled(weight: Array, x: Array) -> Array:
    """Compute ``canvax.kernels.convolution.convolve_doubled`` by doubling products, with a quarter of the work."""
    if weight_shards() > 1:
        return convolve_pairs(pair_weights(weight, x.dtype), x, by_xla)
    return on_each_image(_doubled_products)(weight, x)


def by_xla(weight: Array, x: Array, stride: int, padding: Padding) -> Array:
    """Compute XLA's convolution, always in float32, since 16 bits take up to four times as long on a CPU."""
    return _direct_with_vjp(weight.astype(jnp.float32), x.astype(jnp.float32), stride, padding).astype(x.dtype)


def _by_xla_3x3(weight: Array, x: Array) -> Array:
    return by_xla(weight, x, 1, ((1, 1), (1, 1)))


def _direct(weight: Array, x: Array, stride: int, padding: Padding) -> Array:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=LAYOUT)


def _backward(stride: int, padding: Padding, operands: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    """Return the gradients of ``_direct``, given ``slope``, the gradient of its result.

    The weight's gradient is a matmul for each tap, the image's a convolution of the slope with the flipped weight.
    """
    weight, x = operands
    kernel, sizes = weight.shape[:2], x.shape[1:3]
    spread = [
        (k - 1 - before, size - (n - 1) * stride - 1 + before, stride - 1)
        for k, size, n, (before, _) in zip(kernel, sizes, slope.shape[1:3], padding, strict=True)
    ]
    spread_slope = jax.lax.pad(slope, jnp.zeros((), slope.dtype), ((0, 0, 0), *spread, (0, 0, 0)))
    turned = jnp.flip(weight, (0, 1)).swapaxes(2, 3)
    to_x = _direct(turned, spread_slope, 1, ((0, 0), (0, 0)))
    b, h, w, outputs = slope.shape
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))

    def tap(i: int, j: int) -> Array:
        moved = padded[:, i : i + (h - 1) * stride + 1 : stride, j : j + (w - 1) * stride + 1 : stride]
        return moved.reshape(b * h * w, -1).T @ slope.reshape(b * h * w, outputs)

    taps = [tap(i, j) for i in range(kernel[0]) for j in range(kernel[1])]
    return jnp.stack(taps).reshape(weight.shape), to_x


_direct_with_vjp = jax.custom_vjp(_direct, nondiff_argnums=(2, 3))
"""XLA's convolution with a custom gradient. XLA's gradient convolutions in a larger program partly have a layout that
its fast CPU convolution does not support, which makes training ten times slower."""
_direct_with_vjp.defvjp(lambda weight, x, *static: (_direct(weight, x, *static), (weight, x)), _backward)


def _by_im2col(weight: Array, x: Array, stride: int, padding: tuple[int, int]) -> Array:
    """Compute a 3x3 convolution as one matmul: the nine shifted images side by side times the weight (im2col)."""
    padded = jnp.pad(x, ((0, 0), padding, padding, (0, 0)))
    _, h, w, c = padded.shape
    moved = [padded[:, i : h - 2 + i : stride, j : w - 2 + j : stride] for i in range(3) for j in range(3)]
    columns = jnp.concatenate(moved, axis=-1)
    return matmul(columns, weight.reshape(9 * c, -1))


def has_amx() -> bool:
    """Return whether this processor multiplies bfloat16 matrices with AMX.

    XLA's matmuls are then 3 to 5 times as fast as in float32, but its convolutions do not use AMX.
    """
    return "amx_bf16" in processor().get("flags", "")


@with_reference_vjp(_by_xla_3x3)
def _by_taps(weight: Array, x: Array) -> Array:
    """Compute a 3x3 convolution with padding 1 as a sum of nine matmuls, one per tap, each with a shifted image."""

    def part(x: Array, first: Array | int, rows: int) -> Array:
        w = x.shape[2]
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        padded = jax.lax.dynamic_slice_in_dim(padded, first, rows + 2, axis=1)
        taps = [(padded[:, i : i + rows, j : j + w], weight[i, j]) for i in range(3) for j in range(3)]
        products = [jnp.matmul(*tap, preferred_element_type=jnp.float32) for tap in taps]
        return sum(products[1:], products[0]).astype(x.dtype)

    return in_strips(x, weight.shape[-1], part, TAP_BYTES)


def _supports_tiles(weight: Array, x: Array) -> bool:
    inputs, outputs = weight.shape[2:]
    if x.dtype == jnp.bfloat16:
        inputs = 2 * inputs
    return min(inputs, 2 * outputs) >= TILE_CHANNELS and math.prod(x.shape[:3]) >= 16 * MIN_TILES


def _winograd(*points: float) -> list[np.ndarray]:
    """Return Winograd's matrices for a 3x3 kernel and tiles of 4 x 4 pixels (Lavin & Gray 2016, section 4.3).

    They use five ``points`` of an axis, and infinity.

    Returns:
        Matrices from the nine taps to the kernel's values at 36 points of a plane [36, 9], from a tile of 6 x 6 pixels
        to its values at these points [36, 36], and from the products of both to 4 x 4 pixels [16, 36].
    """
    p = np.array(points)
    others = [np.delete(p, i) for i in range(len(p))]
    scale = np.array([[np.prod(point - rest)] for point, rest in zip(p, others, strict=True)])
    kernel = np.vstack([np.vander(p, 3, increasing=True) / scale, [0, 0, 1]])
    tile = np.array([*([*np.poly(rest)[::-1], 0] for rest in others), np.poly(p)[::-1]])
    pixels = np.hstack([np.vander(p, 4, increasing=True).T, [[0], [0], [0], [1]]])
    return [np.kron(axis, axis).astype(np.float32) for axis in (kernel, tile, pixels)]


TO_KERNEL, TO_POINTS, TO_PIXELS = _winograd(0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)
"""Reciprocal points lose less in float32 than 1, -1, 2 and -2 (Barabasz et al. 2020, "Error analysis and improving the
accuracy of Winograd convolution")."""


@with_reference_vjp(_by_xla_3x3)
def _by_tiles(weight: Array, x: Array) -> Array:
    """Compute a 3x3 convolution with padding 1 by Winograd's method: 36 float32 products for 16 pixels, not 144.

    All three maps are matmuls, and tiles are gathered pixel by pixel, which compiles in a tenth of a second. Stacking
    strided slices takes XLA seven times as long.
    """
    outputs = weight.shape[-1]
    kernel = jnp.matmul(TO_KERNEL, weight.astype(jnp.float32).reshape(9, -1)).reshape(36, -1, outputs)
    b, h, w, c = x.shape
    down, across = -(-h // 4), -(-w // 4)
    rimmed = jnp.pad(x, ((0, 0), (1, 1 + 4 * down - h), (1, 1 + 4 * across - w), (0, 0)))
    height, width = rimmed.shape[1:3]
    # Gathers integers, since XLA would widen the whole image before gathering bfloat16.
    bits = jax.lax.bitcast_convert_type(rimmed.reshape(-1, c), f"u{x.dtype.itemsize}")
    i, j, column = np.ix_(range(6), range(6), range(across))
    inside = (width * i + 4 * column + j)[:, :, None]

    def rows_of_tiles(first: Array | np.ndarray) -> Array:
        """Return [n, 4, 4 * across, outputs] for the rows of tiles that begin with the pixels ``first`` [n]."""
        pixels = (first[None, None, :, None] + inside).reshape(36, -1)
        tiles = jax.lax.bitcast_convert_type(bits.at[pixels].get(mode="promise_in_bounds"), x.dtype).astype(jnp.float32)
        points = jnp.matmul(TO_POINTS, tiles.reshape(36, -1)).reshape(36, -1, c)
        y = jnp.matmul(TO_PIXELS, (points @ kernel).reshape(36, -1)).reshape(4, 4, -1, across, outputs)
        return y.transpose(2, 0, 3, 1, 4).reshape(-1, 4, 4 * across, outputs).astype(x.dtype)

    first = width * np.add.outer(height * np.arange(b), 4 * np.arange(down)).reshape(-1)
    parts = -(-len(first) * across // (TILES_AT_ONCE if outputs > TILE_CHANNELS else 4 * TILES_AT_ONCE))
    each = -(-len(first) // parts)
    filled = np.pad(first, (0, parts * each - len(first)), mode="edge").reshape(parts, each)
    y = rows_of_tiles(first) if parts == 1 else jax.lax.map(rows_of_tiles, filled)
    return y.reshape(-1, 4 * across, outputs)[: 4 * len(first)].reshape(b, 4 * down, -1, outputs)[:, :h, :w]


def _doubled_products(weight: Array, x: Array) -> Array:
    """Compute ``convolve_doubled``: doubles and shifts each tap's product with the small image, and add them up.

    This takes 9 products for four pixels of the doubled image. Convolving the doubled image would take 36, and 16 with
    the weights of ``pair_weights``.
    """

    def part(x: Array, first: Array | int, rows: int) -> Array:
        def tap(i: int, j: int) -> Array:
            y = jnp.matmul(x, weight[i, j], preferred_element_type=jnp.float32)
            doubled = jnp.repeat(jnp.repeat(y, 2, axis=1), 2, axis=2)
            return jax.lax.pad(doubled, jnp.float32(0), ((0, 0, 0), (1 - i, i - 1, 0), (1 - j, j - 1, 0), (0, 0, 0)))

        y = sum((tap(i, j) for i in range(3) for j in range(3) if i + j), tap(0, 0)).astype(x.dtype)
        return jax.lax.dynamic_slice_in_dim(y, 2 * first, 2 * rows, axis=1)

    return in_strips(x, 9 * weight.shape[-1], part, PRODUCT_BYTES)
