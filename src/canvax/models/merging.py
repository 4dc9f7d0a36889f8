"""Token merging: self-attention over fewer tokens, those that are alike as one (Bolya & Hoffman 2023)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.types import Array


class Merging(NamedTuple):
    """What an evaluation of the UNet merges.

    Attributes:
        ratio: the part of the tokens that goes, 0..0.75.
        keys: threefry key words of each image [B, 2] uint32; images that share them keep tokens at the same places.
    """

    ratio: float
    keys: Array


def partition(keys: Array, height: int, width: int) -> Array:
    """Which tokens stay: in each window of two by two one, at random (section 4.1 of the paper).

    Args:
        keys: [B, 2] uint32.
        height: rows of tokens.
        width: tokens of a row.

    Returns:
        The numbers of all tokens [B, T] int32: those that stay, ``h // 2 * (w // 2)`` of them, then the others.
    """
    rows, columns = height // 2, width // 2
    numbers = np.arange(height * width, dtype=np.int32).reshape(height, width)
    inner = numbers[: 2 * rows, : 2 * columns].reshape(rows, 2, columns, 2).swapaxes(1, 2).reshape(-1, 4)
    outer = np.concatenate([numbers[: 2 * rows, 2 * columns :].ravel(), numbers[2 * rows :].ravel()])

    def one(key: Array) -> Array:
        corner = jax.random.randint(key, (len(inner), 1), 0, 4, jnp.int32)
        turned = jnp.take_along_axis(jnp.asarray(inner), (corner + jnp.arange(4, dtype=jnp.int32)) % 4, axis=1)
        return jnp.concatenate([turned[:, 0], turned[:, 1:].ravel(), outer])

    with jax.threefry_partitionable(True):
        return jax.vmap(one)(jax.random.wrap_key_data(keys, impl="threefry2x32"))


def group(x: Array, order: Array, height: int, width: int, *, ratio: float) -> Array:
    """Group tokens that are alike (section 3 of the paper, bipartite soft matching).

    Each token that may go has its like among those that stay, by the cosine between them. The ``ratio`` of all tokens
    that are closest to theirs join it; every other token is a group of its own.

    Args:
        x: tokens [B, T, C].
        order: of :func:`partition` [B, T].
        height: rows of tokens.
        width: tokens of a row.
        ratio: the part of them that goes.

    Returns:
        The group of each token [B, T] int32, numbered from 0 without a gap.
    """
    stay = height // 2 * (width // 2)
    others = height * width - stay
    gone = merged_tokens(height, width, ratio)
    if gone == 0:
        return jnp.broadcast_to(jnp.arange(height * width), order.shape)

    def one(x: Array, order: Array) -> Array:
        x = x.astype(jnp.float32)
        x = (x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-12))[order]
        cosines, kept = x[stay:] @ x[:stay].T, jnp.arange(stay)
        best = cosines.max(-1)
        like = jnp.where(cosines == best[:, None], kept, stay - 1).min(-1)  # argmax, in a quarter of the CPU's time
        rank = jnp.zeros(others, jnp.int32).at[jnp.argsort(-best)].set(jnp.arange(others))
        groups = jnp.concatenate([kept, jnp.where(rank < gone, like, stay + rank - gone)])
        return jnp.zeros_like(groups).at[order].set(groups)

    return jax.vmap(one)(x, order)


def merged_tokens(height: int, width: int, ratio: float) -> int:
    """How many tokens go; none of a single row, where no window of two by two is."""
    tokens, stay = height * width, height // 2 * (width // 2)
    return min(math.floor(tokens * ratio), tokens - stay) if stay else 0


def means(x: Array, groups: Array, count: int) -> Array:
    """Mean of each group: [B, T, C] and [B, T] -> [B, count, C]."""

    def one(x: Array, groups: Array) -> Array:
        sizes = jax.ops.segment_sum(jnp.ones_like(groups, jnp.float32), groups, count)
        return jax.ops.segment_sum(x.astype(jnp.float32), groups, count) / sizes[:, None]

    return jax.vmap(one)(x, groups).astype(x.dtype)


def spread(y: Array, groups: Array) -> Array:
    """What each token has of its group: [B, count, C] and [B, T] -> [B, T, C]."""
    return jnp.take_along_axis(y, groups[..., None], axis=1)
