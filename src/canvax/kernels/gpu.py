"""Forms for NVIDIA GPUs: cuDNN's fused attention, and some of the queries at a time where it has no kernel.

Chosen by what XLA's CUDA compiler makes of whole programs, and timed on an H100 (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from canvax.kernels.target import target_capability
from canvax.types import Array

SCORE_BYTES = 256 * 2**20
"""Float32 scores held at once where cuDNN has no kernel for the head. All of the VAE's at 1024 x 1024 are 1 GiB an
image, beside 24 GiB of the smallest GPUs that SDXL is run on."""


def cudnn_takes(q: Array) -> bool:
    """Whether cuDNN's fused attention compiles: NVIDIA's Ampere or newer, 16 bits, heads of 8, 16, ... 128."""
    width = q.shape[-1]
    return q.dtype.itemsize == 2 and width <= 128 and width % 8 == 0 and target_capability() >= 8.0


def attend_by_cudnn(q: Array, k: Array, v: Array, lengths: Array | None = None) -> Array:
    """cuDNN's fused attention; scores are float32 and never leave the chip.

    For the 77 keys of a prompt as well: XLA would turn queries and results around in memory, and write the scores there
    twice. A step of SDXL at 1024 x 1024 moves 4.7 GB less so, in 280 kernels less: 6 % of its time on an H100.
    """
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")


def score_bytes(q: Array, k: Array) -> int:
    """What the float32 scores of all heads would take."""
    return 4 * q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]


def attend_in_parts(attend: Callable[..., Array], q: Array, k: Array, v: Array, lengths: Array | None = None) -> Array:
    """``attend`` with some of the queries of all heads at a time, as for the one wide head of the VAE.

    Args:
        attend: the plain form.
        q: queries [B, Tq, N, Dh].
        k: keys [B, Tk, N, Dh].
        v: values [B, Tk, N, Dh].
        lengths: keys of each sample that are attended to [B].
    """
    batch, queries, heads, width = q.shape
    parts = -(-score_bytes(q, k) // SCORE_BYTES)
    each = -(-queries // parts)
    filled = jnp.pad(q, ((0, 0), (0, parts * each - queries), (0, 0), (0, 0)))

    # The gradient computes a part's weights again; kept, they would be the whole score matrix after all.
    @jax.checkpoint
    def one(q: Array) -> Array:
        return attend(q, k, v, lengths)

    out = jax.lax.map(one, filled.reshape(batch, parts, each, heads, width).swapaxes(0, 1))
    return out.swapaxes(0, 1).reshape(batch, parts * each, heads, -1)[:, :queries]
