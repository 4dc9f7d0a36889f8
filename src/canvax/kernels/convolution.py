"""Convolutions, in the form that suits the target and the size: [B, H, W, Cin] with weights [kh, kw, Cin, Cout]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from canvax.kernels.matmul import matmul
from canvax.kernels.target import on_each_device, target_kind, target_platform, weight_shards
from canvax.types import Array

FEW_PIXELS = 0.5
"""Pixels of a batch that comes out, over its channels, up to which one matmul is faster on a CPU than XLA's
convolution: 2.4 times at 2 x 8 x 8 pixels, 1.2 times at 2 x 16 x 16 (float32, 1280 channels). Beyond it the nine
shifted images no longer stay in the caches."""

WIDE = 64
"""Channels from which a convolution is worth writing as matmuls."""

SUMS = 48 * 2**20
"""Bytes of float32 sums that :func:`_by_taps` keeps at a time. They are read and written nine times, which is free as
long as they stay in a TPU's vector memory. On a CPU, of the products of :func:`_doubled_products`."""

SUMS_ON_CPU, WIDE_ON_CPU = 2 * 2**20, 256
"""Likewise on a CPU, for bfloat16: sums that stay in its caches; and the channels from which they are faster than XLA's
convolution, which is one of float32 there."""

TILES, LEAST_TILES = 256, 64
"""Tiles of 4 x 4 pixels that :func:`_by_tiles` takes at a time, whose matmuls are large and stay in the caches; and the
fewest of a batch that are worth what has to be done to the weight."""

WIDE_TILES = 256
"""Input channels, and twice the output channels, from which tiles take 0.4 to 0.8 of the time of XLA's convolution. Up
to as many output channels, four times as many tiles are taken at a time. Half as many inputs do for bfloat16, which XLA
would widen in memory first."""

PIXELS_BY_TAPS = 16
"""Pixels of a batch of bfloat16, over output channels, up to which it is faster by taps."""

IN_PARTS, NOT_AT_ALL = ("TPU v5 lite", "TPU v6 lite"), ("TPU v2", "TPU v3")
"""Where sums of :data:`SUMS` and the image they are of stay on the chip for certain (128 MiB of vector memory), so that
it pays to go through larger ones part by part; and where there is so little of it that XLA's convolution is faster."""

FEW_IMAGES = 4
"""Images of a batch up to which XLA cuts each into strips for the TPU, and parts pay elsewhere too: on v4, of at least
256 channels, 0.7 to 1.0 of the time; for doubled images on v4 and v5p 0.5 to 0.8."""

_LAYOUT = ("NHWC", "HWIO", "NHWC")

Padding = tuple[tuple[int, int], tuple[int, int]]


def convolve(weight: Array, x: Array, *, stride: int = 1, padding: tuple[int, int] = (1, 1)) -> Array:
    """2-D convolution, [B, H, W, Cin] -> [B, H', W', Cout], no bias; ``padding`` is (before, after) on both axes."""
    inputs, outputs = weight.shape[2:]
    if weight.shape[:2] == (3, 3) and weight_shards() == 1:
        if _cpu() and inputs >= WIDE and math.prod(x.shape[:3]) <= FEW_PIXELS * stride**2 * outputs:
            return _as_matmul(weight, x, stride, padding)
        if (stride, padding) == (1, (1, 1)):
            if _tpu() and min(inputs, outputs) >= WIDE:
                return _by_taps(weight, x)
            if _tiles_on_cpu(weight, x):
                return _by_tiles(weight, x)
            if _sums_on_cpu(weight, x):
                return _by_taps(weight, x)
    return _xla(weight, x, stride, (padding, padding))


def convolve_doubled(weight: Array, x: Array) -> Array:
    """3x3 convolution of the image doubled by nearest neighbour: [B, h, w, Cin] -> [B, 2h, 2w, Cout], no bias.

    The doubled image is never made. On a CPU products are doubled in its place, which leaves a quarter of the work.
    Elsewhere neighbours that are copies share a weight, which leaves four ninths: a 2x2 convolution for each of the
    four places in a doubled pixel.
    """
    if weight_shards() == 1 and _cpu():
        batch = PartitionSpec("data")
        return on_each_device(_doubled_products, (PartitionSpec(), batch), batch)(weight, x)
    wide = weight.astype(jnp.float32)
    kernels = [[_pair(_pair(wide, i, axis=0), j, axis=1).astype(x.dtype) for j in (0, 1)] for i in (0, 1)]
    if weight_shards() == 1 and _tpu():
        return _doubled_by_taps(jnp.array(kernels), x)
    return _doubled(kernels, x)


def _tpu() -> bool:
    return target_platform() == "tpu" and target_kind() not in NOT_AT_ALL


def _cpu() -> bool:
    return target_platform() == "cpu"


def _sums_on_cpu(weight: Array, x: Array) -> bool:
    return _cpu() and x.dtype == jnp.bfloat16 and min(weight.shape[2:]) >= WIDE_ON_CPU


def _tiles_on_cpu(weight: Array, x: Array) -> bool:
    inputs, outputs = weight.shape[2:]
    if x.dtype == jnp.bfloat16:
        inputs, fewest = 2 * inputs, PIXELS_BY_TAPS * outputs
    else:
        fewest = 16 * LEAST_TILES
    return _cpu() and min(inputs, 2 * outputs) >= WIDE_TILES and math.prod(x.shape[:3]) >= fewest


def _doubled(kernels: Array | Sequence[Sequence[Array]], x: Array) -> Array:
    """A 2x2 convolution for each place in a doubled pixel; ``kernels`` [2, 2, 2, 2, Cin, Cout]."""
    y = [[_xla(kernels[i][j], x, 1, ((1 - i, i), (1 - j, j))) for j in (0, 1)] for i in (0, 1)]
    b, h, w, _ = x.shape
    return jnp.stack([jnp.stack(row, axis=3) for row in y], axis=2).reshape(b, 2 * h, 2 * w, -1)


def _pair(weight: Array, place: int, axis: int) -> Array:
    """Three taps over doubled pixels as two over the pixels themselves, for the first or second place in a double."""
    first, second, third = jnp.split(weight, 3, axis)
    taps = (first, second + third) if place == 0 else (first + second, third)
    return jnp.concatenate(taps, axis)


def _xla(weight: Array, x: Array, stride: int, padding: Padding) -> Array:
    """XLA's convolution; on the CPU always in float32, since in 16 bits it takes up to four times as long there."""
    if not _cpu():
        return _direct(weight, x, stride, padding)
    return _on_cpu(weight.astype(jnp.float32), x.astype(jnp.float32), stride, padding).astype(x.dtype)


def _xla_3x3(weight: Array, x: Array) -> Array:
    return _xla(weight, x, 1, ((1, 1), (1, 1)))


def _direct(weight: Array, x: Array, stride: int, padding: Padding) -> Array:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=_LAYOUT)


def _backward_on_cpu(stride: int, padding: Padding, given: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    """To the image: a convolution of the slope with the turned weight. To the weight: a matmul for each tap."""
    weight, x = given
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


_on_cpu = jax.custom_vjp(_direct, nondiff_argnums=(2, 3))
"""XLA's convolution with a gradient of our own: of the convolutions that XLA makes of it inside a larger program some
are not of the layout that its fast CPU convolution knows, and training takes ten times as long."""
_on_cpu.defvjp(lambda weight, x, stride, padding: (_direct(weight, x, stride, padding), (weight, x)), _backward_on_cpu)


def _as_matmul(weight: Array, x: Array, stride: int, padding: tuple[int, int]) -> Array:
    """3x3 convolution as one matmul: the nine shifted images side by side times the weight (im2col)."""
    padded = jnp.pad(x, ((0, 0), padding, padding, (0, 0)))
    _, h, w, c = padded.shape
    moved = [padded[:, i : h - 2 + i : stride, j : w - 2 + j : stride] for i in range(3) for j in range(3)]
    columns = jnp.concatenate(moved, axis=-1)
    return matmul(columns, weight.reshape(9 * c, -1))


def _with_gradient_of(
    plain: Callable[[Array, Array], Array], pays: Callable[[Array], bool] = lambda _: True
) -> Callable[..., Callable[[Array, Array], Array]]:
    """A decorator: on each device its own images, and the gradient that of ``plain``, which is the same function.

    ``pays`` says of weights whether parts of few images are faster than ``plain``.
    """

    def decorate(by_taps: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
        def on_one(weight: Array, x: Array) -> Array:
            whole = 4 * math.prod(x.shape[:3]) * weight.shape[-1] <= SUMS
            parts = _cpu() or target_kind() in IN_PARTS or (x.shape[0] <= FEW_IMAGES and pays(weight))
            return (by_taps if whole or parts else plain)(weight, x)

        @jax.custom_vjp
        def on_devices(weight: Array, x: Array) -> Array:
            batch = PartitionSpec("data")
            return on_each_device(on_one, (PartitionSpec(), batch), batch)(weight, x)

        def backward(given: tuple[Array, Array], slope: Array) -> tuple[Array, ...]:
            return jax.vjp(plain, *given)[1](slope)

        on_devices.defvjp(lambda weight, x: (on_devices(weight, x), (weight, x)), backward)
        return on_devices

    return decorate


@_with_gradient_of(
    _xla_3x3,
    pays=lambda weight: target_kind() == "TPU v4" and weight.shape[-1] >= 256,
)
def _by_taps(weight: Array, x: Array) -> Array:
    """3x3 convolution with padding 1 as a sum of nine matmuls, one for each tap, of the image moved by it.

    For XLA's own convolution of few images the TPU's compiler cuts each into strips, and moves about more than it
    multiplies. Here, by the compiler's estimate for v5e, it multiplies at 83 % of the peak where channels are multiples
    of 128, padding and moving included; and one matmul is compiled in place of a search for a good form of the whole.
    """
    sums = SUMS_ON_CPU if _cpu() else SUMS
    return _in_parts(x, weight.shape[-1], lambda part, first, rows: _taps(weight, part, (first, 0), rows), sums)


@_with_gradient_of(lambda kernels, x: _doubled(kernels, x))
def _doubled_by_taps(kernels: Array, x: Array) -> Array:
    """:func:`convolve_doubled` likewise, with ``kernels`` [2, 2, 2, 2, Cin, Cout] for the four places."""

    def part(x: Array, first: Array | int, rows: int) -> Array:
        def place(number: Array | int) -> Array:
            i, j = number // 2, number % 2
            return _taps(kernels[i, j], x, (first + i, j), rows)

        y = jax.lax.map(place, jnp.arange(4)).reshape(2, 2, x.shape[0], rows, x.shape[2], -1)
        return y.transpose(2, 3, 0, 4, 1, 5).reshape(x.shape[0], 2 * rows, 2 * x.shape[2], -1)

    return _in_parts(x, kernels.shape[-1], part, SUMS)


def _doubled_products(weight: Array, x: Array) -> Array:
    """:func:`convolve_doubled` on a CPU: each tap's product of the small image, doubled and moved, and their sum.

    For four pixels of the doubled image that is 9 products; of the image itself it would be 36, and 16 where copies
    share a weight.
    """

    def part(x: Array, first: Array | int, rows: int) -> Array:
        def tap(i: int, j: int) -> Array:
            y = jnp.matmul(x, weight[i, j], preferred_element_type=jnp.float32)
            doubled = jnp.repeat(jnp.repeat(y, 2, axis=1), 2, axis=2)
            return jax.lax.pad(doubled, jnp.float32(0), ((0, 0, 0), (1 - i, i - 1, 0), (1 - j, j - 1, 0), (0, 0, 0)))

        y = sum((tap(i, j) for i in range(3) for j in range(3) if i + j), tap(0, 0)).astype(x.dtype)
        return jax.lax.dynamic_slice_in_dim(y, 2 * first, 2 * rows, axis=1)

    return _in_parts(x, 9 * weight.shape[-1], part, SUMS)


def _in_parts(x: Array, outputs: int, convolve: Callable[[Array, Array | int, int], Array], sums: int) -> Array:
    """A convolution as many images at a time as keep their sums within some bytes, or as many rows of one image.

    Args:
        x: [B, H, W, Cin].
        outputs: float32 numbers that are made for each pixel of ``x`` at a time.
        convolve: given images [B', H', W, Cin], a row and how many: what comes of these rows [B', n * rows, ...].
        sums: bytes that they may take.
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
    if 2 * rows <= most:  # a height without good divisors
        rows = max(1, most // 8 * 8)
    strips = math.ceil(h / rows)
    if strips * rows < rows + 2:
        strips += 1
    x = jnp.pad(x, ((0, 0), (0, strips * rows - h), (0, 0), (0, 0)))

    def strip(number: Array) -> Array:
        first = number % strips * rows
        begin = jnp.clip(first - 1, 0, strips * rows - rows - 2)  # the row above it and that below, if there are any
        part = jax.lax.dynamic_slice(x, (number // strips, begin, 0, 0), (1, rows + 2, w, c))
        return convolve(part, first - begin, rows)

    y = jax.lax.map(strip, jnp.arange(b * strips))
    times = y.shape[2] // rows
    return y.reshape(b, strips * rows * times, *y.shape[3:])[:, : h * times]


def _taps(kernel: Array, x: Array, corner: tuple[Array | int, Array | int], rows: int) -> Array:
    """``rows`` rows of the sum over the taps of ``kernel`` [kh, kw, Cin, Cout], each times the image moved by it.

    ``corner`` is where the first tap begins: row and column of the image with a rim of zeros.
    """
    b, _, w, c = x.shape
    width = kernel.shape[1]
    taps = kernel.shape[0] * width

    def tap(number: Array | int) -> Array:
        # The rim and the move are said anew for each tap, so that the compiler makes them part of reading the operand.
        i, j = number // width, number % width
        rimmed = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        moved = jax.lax.dynamic_slice(rimmed, (0, corner[0] + i, corner[1] + j, 0), (b, rows, w, c))
        return jnp.matmul(moved, kernel[i, j], preferred_element_type=jnp.float32)

    if _cpu():  # loops are what costs there
        return sum((tap(number) for number in range(1, taps)), tap(0)).astype(x.dtype)
    # The last tap is outside of the loop, where what comes after the convolution becomes part of writing the result.
    sums = jnp.zeros((b, rows, w, kernel.shape[-1]), jnp.float32)
    sums = jax.lax.fori_loop(0, taps - 1, lambda number, sums: sums + tap(number), sums)
    return (sums + tap(taps - 1)).astype(x.dtype)


def _winograd(*points: float) -> list[np.ndarray]:
    """Matrices for a 3x3 kernel and tiles of 4 x 4 pixels by five points of an axis, and infinity.

    Of Lavin & Gray 2016, section 4.3.

    Returns:
        From the nine taps to the kernel's values at 36 points of a plane [36, 9]; from a tile of 6 x 6 pixels to its
        values there [36, 36]; from the products of these to 4 x 4 pixels [16, 36].
    """
    p = np.array(points)
    others = [np.delete(p, i) for i in range(len(p))]
    scale = np.array([[np.prod(one - rest)] for one, rest in zip(p, others, strict=True)])
    kernel = np.vstack([np.vander(p, 3, increasing=True) / scale, [0, 0, 1]])
    tile = np.array([*([*np.poly(rest)[::-1], 0] for rest in others), np.poly(p)[::-1]])
    pixels = np.hstack([np.vander(p, 4, increasing=True).T, [[0], [0], [0], [1]]])
    return [np.kron(axis, axis).astype(np.float32) for axis in (kernel, tile, pixels)]


TO_KERNEL, TO_POINTS, TO_PIXELS = _winograd(0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)
"""By points that are each other's inverse, with which float32 loses less than with 1, -1, 2 and -2 (Barabasz et al.
2020, "Error analysis and improving the accuracy of Winograd convolution")."""


@_with_gradient_of(_xla_3x3)
def _by_tiles(weight: Array, x: Array) -> Array:
    """3x3 convolution with padding 1 on a CPU by Winograd's method: 36 products in float32 for 16 pixels, not 144.

    All three maps are matmuls, and tiles are gathered pixel by pixel, which compiles in a tenth of a second. Stacked of
    strided slices they take XLA seven times as long.
    """
    outputs = weight.shape[-1]
    kernel = jnp.matmul(TO_KERNEL, weight.astype(jnp.float32).reshape(9, -1)).reshape(36, -1, outputs)
    b, h, w, c = x.shape
    down, across = -(-h // 4), -(-w // 4)
    rimmed = jnp.pad(x, ((0, 0), (1, 1 + 4 * down - h), (1, 1 + 4 * across - w), (0, 0)))
    height, width = rimmed.shape[1:3]
    # As bits, since XLA would widen the whole image before it gathers bfloat16.
    bits = jax.lax.bitcast_convert_type(rimmed.reshape(-1, c), f"u{x.dtype.itemsize}")
    i, j, column = np.ix_(range(6), range(6), range(across))
    inside = (width * i + 4 * column + j)[:, :, None]

    def rows_of_tiles(first: Array | np.ndarray) -> Array:
        """[n, 4, 4 * across, outputs] for the rows of tiles that begin with the pixels ``first`` [n]."""
        pixels = (first[:, None] + inside).reshape(36, -1)
        tiles = jax.lax.bitcast_convert_type(bits.at[pixels].get(mode="promise_in_bounds"), x.dtype).astype(jnp.float32)
        points = jnp.matmul(TO_POINTS, tiles.reshape(36, -1)).reshape(36, -1, c)
        y = jnp.matmul(TO_PIXELS, (points @ kernel).reshape(36, -1)).reshape(4, 4, -1, across, outputs)
        return y.transpose(2, 0, 3, 1, 4).reshape(-1, 4, 4 * across, outputs).astype(x.dtype)

    first = width * np.add.outer(height * np.arange(b), 4 * np.arange(down)).reshape(-1)
    parts = -(-len(first) * across // (TILES if outputs > WIDE_TILES else 4 * TILES))
    each = -(-len(first) // parts)
    filled = np.pad(first, (0, parts * each - len(first)), mode="edge").reshape(parts, each)
    y = rows_of_tiles(first) if parts == 1 else jax.lax.map(rows_of_tiles, filled)
    return y.reshape(-1, 4 * across, outputs)[: 4 * len(first)].reshape(b, 4 * down, -1, outputs)[:, :h, :w]
