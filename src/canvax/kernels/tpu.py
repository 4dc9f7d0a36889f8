"""Kernels for TPU v4 and newer: JAX's flash attention, and convolutions as sums of matmuls, one per tap.

They were chosen by the estimates of the TPU compiler (docs/design/experiments.md, "Kernels on a TPU") and have not been
timed on a TPU. Older generations, which can no longer be rented, use the plain forms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from canvax.kernels.common import (
    LAYOUT,
    Padding,
    convolve_pairs,
    in_strips,
    pair_weights,
    with_reference_vjp,
)
from canvax.kernels.target import target_kind, weight_shards
from canvax.types import Array

RETIRED = ("TPU v2", "TPU v3")
"""The compiler refuses bfloat16 flash attention for these, and their on-chip memory is too small for the sums."""

LANES = 128
"""Width of a TPU's registers in numbers; block lengths are multiples of it."""

MIN_KEYS = 512
"""Keys from which flash attention outweighs the cost of its call (v5e); the 77 keys of a prompt do not."""

QUERIES_AT_ONCE, KEYS_AT_ONCE = 256, 4096
"""Queries and keys per block of flash attention (v5e); a quarter as many keys for heads wider than ``LANES``."""

LONG_BLOCK = 1536
"""Most keys per block if all keys are more than ``KEYS_AT_ONCE``. Blocks of equal length need less padding than blocks
of 1,024: 4,608 keys (klein and Krea 2 at 1024 x 1024) were computed as 5,120, and 4,224 (Z-Image) too."""

MIN_CHANNELS = 64
"""Channels from which a convolution is worth writing as matmuls (v5e)."""

ACCUMULATOR_BYTES = 48 * 2**20
"""Bytes of a convolution's float32 sums at a time. They are read and written nine times, which is free as long as they
stay in vector memory (128 MiB on v5e)."""

STRIP_BYTES = 28 * 2**20
"""Bytes of float32 sums of a strip in ``canvax.kernels.convolution.by_strips``, besides which its features must stay in
vector memory too."""

_BACKWARD_BLOCKS = (
    "block_q_major_dkv", "block_k_major_dkv", "block_q_dkv", "block_k_dkv", "block_k_major_dq", "block_k_dq",
    "block_q_dq",
)  # fmt: skip


def supports_flash(q: Array, k: Array) -> bool:
    """Return whether flash attention compiles for this dtype and head size, and pays off."""
    width = q.shape[-1]
    compiles = q.dtype in (jnp.float32, jnp.bfloat16) and (width < LANES or width % LANES == 0)
    return compiles and k.shape[1] >= MIN_KEYS and target_kind() not in RETIRED


def attend_by_flash(
    q: Array, k: Array, v: Array, mask: Array | None = None, bias: Array | None = None, *, scale: float
) -> Array:
    """Compute attention with online softmax (Dao et al. 2022) by JAX's kernel; no score leaves the chip's VMEM.

    Up to 4,096 keys, as in Stable Diffusion at 512 x 512 and SDXL at 1024 x 1024, form a single block, whose softmax
    needs one pass. Other lengths are padded to equal blocks. The padding is masked, as are keys outside ``mask``.
    """
    # Imported here because it takes as long as the rest of canvax, and only TPU programs need it.
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention

    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    block_k = key_block(keys, width)
    block_q = min(QUERIES_AT_ONCE, _ceil(queries, LANES))
    padded_q, padded_k = _ceil(queries, block_q), _ceil(keys, block_k)

    def by_head(x: Array, length: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)

    ids = None
    if padded_k > keys or mask is not None:
        # Tokens with equal ids attend to each other: queries and real keys have id 0, other keys 1.
        hidden = jnp.zeros((batch, keys), bool) if mask is None else ~mask
        hidden = jnp.pad(hidden, ((0, 0), (0, padded_k - keys)), constant_values=True)
        ids = SegmentIds(jnp.zeros((batch, padded_q), jnp.int32), hidden.astype(jnp.int32))
    if bias is not None:  # the kernel adds it to the scores before it scales them
        bias = jnp.broadcast_to(bias.astype(jnp.float32) / scale, (batch, heads, queries, keys))
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, padded_q - queries), (0, padded_k - keys)))
    backward = dict.fromkeys(_BACKWARD_BLOCKS, LANES)
    sizes = BlockSizes(block_b=1, block_q=block_q, block_k_major=block_k, block_k=block_k, **backward)
    out = flash_attention(
        by_head(q, padded_q), by_head(k, padded_k), by_head(v, padded_k), bias, ids, sm_scale=scale, block_sizes=sizes
    )
    return out.swapaxes(1, 2)[:, :queries]


def key_block(keys: int, width: int) -> int:
    """Return the keys per block of flash attention: equal blocks with as little padding as possible, then as few."""
    most, long = (KEYS_AT_ONCE, LONG_BLOCK) if width <= LANES else (KEYS_AT_ONCE // 4, KEYS_AT_ONCE // 4)
    if _ceil(keys, LANES) <= most:
        return _ceil(keys, LANES)
    return min(range(long, long // 4, -LANES), key=lambda block: _ceil(keys, block))


def _ceil(length: int, multiple: int) -> int:
    """Round ``length`` up to a multiple."""
    return -(-length // multiple) * multiple


def supports_taps(weight: Array, stride: int, padding: tuple[int, int]) -> bool:
    """Return whether ``convolve_by_taps`` supports this convolution and pays off."""
    same = (weight.shape[:2], stride, padding) == ((3, 3), 1, (1, 1))
    return same and min(weight.shape[2:]) >= MIN_CHANNELS and by_taps_here()


def by_taps_here() -> bool:
    """Return whether convolutions run by taps on the target, whose on-chip memory has room for their sums."""
    return weight_shards() == 1 and target_kind() not in RETIRED


def _by_xla(weight: Array, x: Array, stride: int, padding: Padding) -> Array:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=LAYOUT)


def _by_xla_3x3(weight: Array, x: Array) -> Array:
    return _by_xla(weight, x, 1, ((1, 1), (1, 1)))


@with_reference_vjp(_by_xla_3x3)
def convolve_by_taps(weight: Array, x: Array) -> Array:
    """Compute a 3x3 convolution with padding 1 as a sum of nine matmuls, one per tap, each with a shifted image.

    With XLA's convolution of few images the TPU compiler cuts each image into strips and spends more time on copies
    than on products. Here, by the compiler's estimate for v5e, it multiplies at 83 % of the peak if channels are
    multiples of 128, including padding and shifts. It also compiles faster: one matmul, without a search for a good
    form of the whole convolution.
    """

    def part(x: Array, first: Array | int, rows: int) -> Array:
        return _taps(weight, x, (first, 0), rows)

    return in_strips(x, weight.shape[-1], part, ACCUMULATOR_BYTES)


def convolve_doubled(weight: Array, x: Array) -> Array:
    """Compute ``canvax.kernels.convolution.convolve_doubled`` as four 2x2 convolutions (see ``pair_weights``)."""
    kernels = pair_weights(weight, x.dtype)
    return _pairs_by_taps(jnp.array(kernels), x) if by_taps_here() else convolve_pairs(kernels, x, _by_xla)


@with_reference_vjp(lambda kernels, x: convolve_pairs(kernels, x, _by_xla))
def _pairs_by_taps(kernels: Array, x: Array) -> Array:
    """Compute ``convolve_pairs`` by taps, with the four weights as ``kernels`` [2, 2, 2, 2, Cin, Cout]."""

    def part(x: Array, first: Array | int, rows: int) -> Array:
        def place(number: Array | int) -> Array:
            i, j = number // 2, number % 2
            return _taps(kernels[i, j], x, (first + i, j), rows)

        y = jax.lax.map(place, jnp.arange(4)).reshape(2, 2, x.shape[0], rows, x.shape[2], -1)
        return y.transpose(2, 3, 0, 4, 1, 5).reshape(x.shape[0], 2 * rows, 2 * x.shape[2], -1)

    return in_strips(x, kernels.shape[-1], part, ACCUMULATOR_BYTES)


def _taps(kernel: Array, x: Array, corner: tuple[Array | int, Array | int], rows: int) -> Array:
    """Compute ``rows`` rows of the sum over the taps of ``kernel`` [kh, kw, Cin, Cout], each times the shifted image.

    ``corner`` is the row and column, in the image padded by one zero on each side, where the first tap begins.
    """
    b, _, w, c = x.shape
    width = kernel.shape[1]
    taps = kernel.shape[0] * width

    def tap(number: Array | int) -> Array:
        # Padding and shift are repeated for each tap, so that the compiler fuses them with reading the operand.
        i, j = number // width, number % width
        rimmed = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        moved = jax.lax.dynamic_slice(rimmed, (0, corner[0] + i, corner[1] + j, 0), (b, rows, w, c))
        return jnp.matmul(moved, kernel[i, j], preferred_element_type=jnp.float32)

    # The last tap is outside the loop, so that operations after the convolution are fused with writing the result.
    sums = jnp.zeros((b, rows, w, kernel.shape[-1]), jnp.float32)
    sums = jax.lax.fori_loop(0, taps - 1, lambda number, sums: sums + tap(number), sums)
    return (sums + tap(taps - 1)).astype(x.dtype)
