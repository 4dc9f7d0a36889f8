"""One ``attention()`` over several kernels; models never choose, the size and the platform compiled for do."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from canvax.kernels.matmul import matmul
from canvax.kernels.target import on_each_device, target_capability, target_kind, target_platform, weight_shards
from canvax.types import Array

CHUNK_SCORES = 2 * 1024 * 1024
"""Scores of one head that are held at once on the CPU: 8 MiB in float32, which stay in the caches."""

LEAST_KEYS = 512
"""Keys from which the TPU's kernel is worth what it costs to call; the 77 of a prompt are not."""

LEAST_SCORES = 256 * 2**20
"""Bytes of float32 scores from which a GPU without a kernel for the head looks at some of the queries at a time."""


def attention(q: Array, k: Array, v: Array, *, causal: bool = False, upcast: bool = False) -> Array:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32.

    Args:
        q: queries [B, Tq, N, Dh].
        k: keys [B, Tk, N, Dh].
        v: values [B, Tk, N, Dh].
        causal: a token sees itself and what comes before it.
        upcast: compute the scores in float32 (``upcast_attention`` of Stable Diffusion 2.x).

    Returns:
        [B, Tq, N, Dh] in the dtype of ``v``.
    """
    platform = "" if causal else target_platform()  # no kernel is causal: the text encoders' 77 tokens need none
    if platform == "tpu" and k.shape[1] >= LEAST_KEYS and _flash_takes(q):
        # Its scores are float32 whatever the dtype, so ``upcast`` would change nothing.
        return _on_each_device(_attend_by_flash, q, k, v)
    if platform == "gpu" and _cudnn_takes(q):
        return _on_each_device(_attend_by_cudnn, q, k, v)
    if upcast:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if platform == "cpu" and q.shape[1] * k.shape[1] > CHUNK_SCORES // 4:
        return _on_each_device(_attend_head_by_head, q, k, v)
    if platform == "gpu" and _score_bytes(q, k) > LEAST_SCORES:
        return _on_each_device(_attend_in_parts, q, k, v)
    if platform == "tpu" and k.shape[1] >= LEAST_KEYS and v.shape[-1] % LANES:
        return _attend_summing(q, k, v)
    return _attend(q, k, v, causal=causal)


def _on_each_device(kernel: Callable[..., Array], q: Array, k: Array, v: Array) -> Array:
    """A kernel that XLA cannot split, run by each device on its own images and, if the weights are split, heads."""
    split = "model" if weight_shards() > 1 and q.shape[2] % weight_shards() == 0 else None
    spec = PartitionSpec("data", None, split, None)
    return on_each_device(kernel, (spec,) * 3, spec)(q, k, v)


def _attend(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    scores = _scores(q, k)
    if causal:
        future = jnp.arange(k.shape[1])[None, :] > jnp.arange(q.shape[1])[:, None]
        scores = jnp.where(future, jnp.finfo(jnp.float32).min, scores)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return matmul(weights, v.swapaxes(1, 2)).swapaxes(1, 2)


def _attend_summing(q: Array, k: Array, v: Array) -> Array:
    """Long sequences on TPU v2 and v3: the matmul that gathers the values sums the weights as well, as one column more.

    The matrix units have room for it, unless the heads fill them, and the scores, which are in memory, are read once
    less: by the compiler's estimate for v2, a step of Stable Diffusion 1.4 takes 124 ms in place of 160.
    """
    scores = _scores(q, k)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))).astype(v.dtype)
    values = jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)
    sums = jnp.einsum("bnqk,bknd->bqnd", weights, values, preferred_element_type=jnp.float32)
    return (sums[..., :-1] / sums[..., -1:]).astype(v.dtype)


def _scores(q: Array, k: Array) -> Array:
    """[B, Tq, N, Dh] and [B, Tk, N, Dh] -> [B, N, Tq, Tk] float32."""
    return jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5


def _score_bytes(q: Array, k: Array) -> int:
    return 4 * q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]


def _attend_in_parts(q: Array, k: Array, v: Array) -> Array:
    """Long sequences on a GPU without a kernel for them, as in the VAE: some of the queries of all heads at a time."""
    batch, queries, heads, width = q.shape
    parts = -(-_score_bytes(q, k) // LEAST_SCORES)
    each = -(-queries // parts)
    filled = jnp.pad(q, ((0, 0), (0, parts * each - queries), (0, 0), (0, 0)))

    # The gradient computes a part's weights again; kept, they would be the whole score matrix after all.
    @jax.checkpoint
    def one(q: Array) -> Array:
        return _attend(q, k, v, causal=False)

    out = jax.lax.map(one, filled.reshape(batch, parts, each, heads, width).swapaxes(0, 1))
    return out.swapaxes(0, 1).reshape(batch, parts * each, heads, -1)[:, :queries]


def _attend_head_by_head(q: Array, k: Array, v: Array) -> Array:
    """Long sequences on the CPU: one head and a chunk of its queries at a time, plain matrices all the way.

    The whole score matrix (1 GiB for 4,096 tokens, 8 heads and guidance) never exists. A chunk of queries sees all
    keys, so its softmax needs no second pass; the division is done on the narrow result.
    """
    batch, queries, heads, width = q.shape
    chunk = max(1, min(queries, CHUNK_SCORES // k.shape[1]))
    padded = -(-queries // chunk) * chunk

    def by_head(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], -1)

    scale = jnp.asarray(width**-0.5, q.dtype)
    chunks = by_head(jnp.pad(q * scale, ((0, 0), (0, padded - queries), (0, 0), (0, 0))))
    chunks = chunks.reshape(batch * heads, padded // chunk, chunk, width)

    def head(operands: tuple[Array, Array, Array]) -> Array:
        chunks, k, v = operands

        def one(q: Array) -> Array:
            scores = jnp.matmul(q, k, preferred_element_type=jnp.float32)
            weights = jnp.exp(scores - scores.max(-1, keepdims=True)).astype(v.dtype)
            values = jnp.matmul(weights, v, preferred_element_type=jnp.float32)
            return (values / weights.astype(jnp.float32).sum(-1, keepdims=True)).astype(v.dtype)

        # The gradient computes a chunk's weights again; kept, they would be the whole score matrix after all.
        return jax.lax.map(jax.checkpoint(one), chunks)

    # XLA multiplies bfloat16 as such only where the keys have been turned beforehand, and otherwise in float32.
    out = jax.lax.map(head, (chunks, by_head(k).swapaxes(1, 2), by_head(v)))
    return out.reshape(batch, heads, padded, -1)[:, :, :queries].swapaxes(1, 2)


def _cudnn_takes(q: Array) -> bool:
    """Whether cuDNN's fused attention compiles: NVIDIA's Ampere or newer, 16 bits, heads of 8, 16, ... 128."""
    width = q.shape[-1]
    return q.dtype.itemsize == 2 and width <= 128 and width % 8 == 0 and target_capability() >= 8.0


def _attend_by_cudnn(q: Array, k: Array, v: Array) -> Array:
    """On NVIDIA GPUs: cuDNN's fused attention; scores are float32 and never leave the chip.

    For the 77 keys of a prompt as well: XLA would turn queries and results around in memory, and write the scores there
    twice. By the compiled program, a step of SDXL at 1024 x 1024 moves 4.7 GB less so, in 280 kernels less.
    """
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _flash_takes(q: Array) -> bool:
    """Whether the kernel compiles for these numbers; the matrix units of TPU v2 and v3 take bfloat16 only from XLA."""
    width = q.shape[-1]
    numbers = q.dtype == jnp.float32 or (q.dtype == jnp.bfloat16 and target_kind() not in ("TPU v2", "TPU v3"))
    return numbers and (width < LANES or width % LANES == 0)


LANES = 128
"""Numbers side by side in a TPU's registers; lengths of blocks are multiples of it."""

_QUERIES, _KEYS = 256, 4096
_BACKWARD_BLOCKS = (
    "block_q_major_dkv", "block_k_major_dkv", "block_q_dkv", "block_k_dkv", "block_k_major_dq", "block_k_dq",
    "block_q_dq",
)  # fmt: skip


def _attend_by_flash(q: Array, k: Array, v: Array) -> Array:
    """Long sequences on the TPU: online softmax (Dao et al. 2022) by JAX's own kernel; no score leaves the chip's VMEM.

    Up to 4,096 keys, as many as Stable Diffusion has at 512 x 512 and SDXL at 1024 x 1024, are one block, whose softmax
    needs no second look. Other lengths are filled up, and the filling is masked.
    """
    # Imported here: it takes as long as the rest of canvax, and only a TPU's programs need it.
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention

    batch, queries, _, width = q.shape
    keys = k.shape[1]
    most = _KEYS if width <= LANES else _KEYS // 4
    block_k = _ceil(keys, LANES) if _ceil(keys, LANES) <= most else min(most, 1024)
    block_q = min(_QUERIES, _ceil(queries, LANES))
    padded_q, padded_k = _ceil(queries, block_q), _ceil(keys, block_k)

    def by_head(x: Array, length: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)

    ids = None
    if padded_k > keys:
        # Equal numbers see each other: queries are 0, as real keys are.
        filled = jnp.arange(padded_k) >= keys
        ids = SegmentIds(jnp.zeros((batch, padded_q), jnp.int32), jnp.tile(filled.astype(jnp.int32), (batch, 1)))
    backward = dict.fromkeys(_BACKWARD_BLOCKS, LANES)
    sizes = BlockSizes(block_b=1, block_q=block_q, block_k_major=block_k, block_k=block_k, **backward)
    out = flash_attention(
        by_head(q, padded_q), by_head(k, padded_k), by_head(v, padded_k), segment_ids=ids, sm_scale=width**-0.5,
        block_sizes=sizes,
    )  # fmt: skip
    return out.swapaxes(1, 2)[:, :queries]


def _ceil(length: int, multiple: int) -> int:
    """The smallest multiple that is not below ``length``."""
    return -(-length // multiple) * multiple
