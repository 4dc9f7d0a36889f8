"""Layers and blocks of diffusion transformers (Peebles & Xie 2023): rotary positions, attention with normalised queries
and keys, and double-stream, parallel and sandwich blocks.

Blocks do not compute their modulation: the shifts, scales and gates, each [B, 1, D], are arguments. Positions of tokens
are integer ids, which are inputs: a program depends on the number of tokens, not on height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.kernels.attention import attention, plain_attention
from canvax.kernels.outline import outlined
from canvax.nn import linear, linear_spec
from canvax.params import Axis, Param, Params, Spec, map_spec
from canvax.types import Array

AnyArray = Any
"""An array of NumPy or of JAX."""


class Rope(NamedTuple):
    """Cosines and sines of the rotation angles of channel pairs, each [B, T, Dh / 2] float32."""

    cos: Array
    sin: Array


def rotary_embedding(ids: Array, axes: Sequence[int], theta: float) -> Rope:
    """Compute the rotary position embedding (Su et al. 2021) over several axes.

    Args:
        ids: the position of each token along each axis, integers [B, T, A]; B may be 1.
        axes: number of channels of a head that each axis rotates; their sum is Dh.
        theta: the base of the frequencies.

    Angles are float32: bfloat16 has no integers beyond 256.
    """
    frequencies = [theta ** (-np.arange(0, width, 2, dtype=np.float64) / width) for width in axes]
    positions = ids.astype(jnp.float32)
    angles = jnp.concatenate(
        [positions[..., i, None] * jnp.array(f, jnp.float32, ndmin=3) for i, f in enumerate(frequencies)], axis=-1
    )
    return Rope(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Array, rope: Rope) -> Array:
    """Rotate channels i and i + Dh / 2 of each head as a pair, [B, T, N, Dh], in float32.

    In checkpoints of diffusion transformers the two channels of a pair are neighbours. Loading reorders them (see
    ``rotated``): separating neighbours in each call would take 5 % of a block's time on a TPU.
    """
    cos, sin = (part[:, :, None] for part in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


ROTATED = ("to_q", "to_k", "add_q_proj", "add_k_proj", "norm_q", "norm_k", "norm_added_q", "norm_added_k")
"""Layers of a diffusion transformer whose outputs are reordered when they are loaded. Queries and keys are reordered in
the same way, so that their products do not change.
"""


def rotated(spec: Spec, head_dim: int) -> Spec:
    """Return a spec of attention for ``rotate``, from a checkpoint in which the channels of a pair are neighbours."""
    sort = partial(replace, pairs=head_dim)
    return {name: map_spec(sort, part) if name in ROTATED else part for name, part in spec.items()}


def axes_faults(axes: Sequence[int], count: int, head_dim: int) -> list[str]:
    """Return the fault of ``axes`` unless they are ``count`` even numbers that share the channels of a head."""
    fit = len(axes) == count and sum(axes) == head_dim and not any(axis % 2 for axis in axes)
    return [] if fit else [f"axes_dims_rope {axes} with attention_head_dim {head_dim}"]


def grid_ids(tokens: int, width: Array) -> tuple[Array, Array]:
    """Return the row and column of each token, both [B, T], of images that are ``width`` [B] tokens wide."""
    index = jnp.arange(tokens)[None]
    return index // width[:, None], index % width[:, None]


def centred(row: Array, column: Array, height: Array, width: Array) -> tuple[Array, Array]:
    """Return rows and columns of a grid of this height and width around 0."""
    return row - (height - height // 2), column - (width - width // 2)


class ReferenceGrids(NamedTuple):
    """Sizes of reference images in tokens.

    Attributes:
        height: of each reference [B, N]; 0 for none.
        width: as ``height``.
        owner: True where a token belongs to a reference, bool [B, R, N].
    """

    height: Array
    width: Array
    owner: Array

    def of(self, values: Array) -> Array:
        """Return the entry [B, R] of ``values`` [B, N] for each token's reference."""
        return jnp.where(self.owner, values[:, None], 0).sum(-1)


def reference_grids(ids: Array, count: int) -> ReferenceGrids:
    """Return the sizes of ``count`` references from number (from 1 on), row and column of each token, [B, R, 3]."""
    number, row, column = jnp.moveaxis(ids, -1, 0)
    owner = number[:, :, None] == jnp.arange(1, count + 1)[None, None]
    height, width = (jnp.max(jnp.where(owner, side[:, :, None] + 1, 0), axis=1) for side in (row, column))
    return ReferenceGrids(height, width, owner)


def rms_norm_spec(channels: int) -> Spec:
    """Declare the scale of a root-mean-square normalisation."""
    return {"weight": Param((channels,), (None,), init="ones")}


def rms_norm(p: Params, x: Array, *, eps: float, offset: float = 0.0) -> Array:
    """Apply root-mean-square normalisation (Zhang & Sennrich 2019) over the last axis, in float32.

    ``offset`` is added to the weight, for checkpoints that store its difference from 1.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (y * jax.lax.broadcast_to_rank(p["weight"].astype(jnp.float32) + offset, x.ndim)).astype(x.dtype)


def layer_norm(x: Array, *, eps: float = 1e-6) -> Array:
    """Apply layer normalisation without scale and shift over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)).astype(x.dtype)


def modulated(x: Array, shift: Array | float, scale: Array | float) -> Array:
    """Return ``x`` [B, T, D], scaled and shifted."""
    return x * (1 + scale) + shift


def sinusoids(t: Array, width: int) -> Array:
    """Embed times [B] in 0..1000 as [B, width] float32, cosines first."""
    half = width // 2
    angles = t.astype(jnp.float32)[:, None] * jnp.exp(-np.log(1e4) * jnp.arange(half, dtype=jnp.float32) / half)[None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def embedded_time(p: Params, t: Array, x: Array) -> Array:
    """Embed a time or guidance scale [B] in 0..1000 as a vector [B, D] in the dtype of ``x``."""
    h = sinusoids(t, p["linear_1"]["weight"].shape[0]).astype(x.dtype)
    return linear(p["linear_2"], jax.nn.silu(linear(p["linear_1"], h)))


def swiglu_spec(
    width: int, inner: int, names: tuple[str, str, str] = ("gate", "up", "down"), *, bias: bool = False
) -> Spec:
    """Declare the gate, up and down projections of a gated feed-forward, under the checkpoint's ``names``."""
    gate, up, down = names
    return {
        gate: linear_spec(width, inner, ("embed", "mlp"), bias=bias),
        up: linear_spec(width, inner, ("embed", "mlp"), bias=bias),
        down: linear_spec(inner, width, ("mlp", "embed"), bias=bias),
    }


def swiglu(p: Params, x: Array, names: tuple[str, str, str] = ("gate", "up", "down")) -> Array:
    """Compute ``down(silu(gate x) * up x)`` (Shazeer 2020, eq. 6), [B, T, D] -> [B, T, D]."""
    gate, up, down = names
    return linear(p[down], jax.nn.silu(linear(p[gate], x)) * linear(p[up], x))


def gelu_spec(width: int, inner: int, *, last_bias: bool = True) -> Spec:
    """Declare the two projections of a feed-forward without a gate."""
    return {
        "fc1": linear_spec(width, inner, ("embed", "mlp")),
        "fc2": linear_spec(inner, width, ("mlp", "embed"), bias=last_bias),
    }


def feed_forward(p: Params, x: Array) -> Array:
    """Apply ``swiglu``, or without a gate ``fc2(gelu(fc1 x))``."""
    return swiglu(p, x) if "gate" in p else linear(p["fc2"], jax.nn.gelu(linear(p["fc1"], x), approximate=True))


def qk_norm_spec(head_dim: int, names: tuple[str, str] = ("norm_q", "norm_k")) -> Spec:
    """Declare the normalisations of queries and keys, over the channels of a head."""
    return {name: rms_norm_spec(head_dim) for name in names}


def self_attention_spec(
    width: int, heads: int, head_dim: int, kv_heads: int | None = None, *, bias: bool = False
) -> Spec:
    """Declare attention with normalised queries and keys."""
    queries, keys = Axis("heads", heads), Axis("heads", kv_heads or heads)
    return {
        "to_q": linear_spec(width, heads * head_dim, ("embed", queries), bias=bias),
        "to_k": linear_spec(width, keys.units * head_dim, ("embed", keys), bias=bias),
        "to_v": linear_spec(width, keys.units * head_dim, ("embed", keys), bias=bias),
        "to_out": {"0": linear_spec(heads * head_dim, width, (queries, "embed"), bias=bias)},
        **qk_norm_spec(head_dim),
    }


IMAGE = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
"""Names of a stream's projections and normalisations, in order."""

Heads = tuple[Array, Array, Array]
"""Queries, keys and values [B, T, N, Dh]."""


def queries_keys_values(
    p: Params, x: Array, names: tuple[str, ...] = IMAGE, *, eps: float, offset: float = 0.0
) -> Heads:
    """Return normalised queries and keys, and values, of ``x`` [B, T, D], in heads; keys may have fewer."""
    head_dim = p[names[3]]["weight"].shape[0]
    q, k, v = (linear(p[name], x).reshape(*x.shape[:2], -1, head_dim) for name in names[:3])
    q, k = (rms_norm(p[name], y, eps=eps, offset=offset) for name, y in zip(names[3:], (q, k), strict=True))
    return q, k, v


def attend(q: Array, k: Array, v: Array, rope: Rope | None, lengths: Array | None = None) -> Array:
    """Apply attention with rotary positions; heads are concatenated: [B, T, N * Dh].

    ``lengths`` is the number of tokens to attend to [B], or says which ones, bool [B, T].
    """
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    mask, lengths = (lengths, None) if lengths is not None and lengths.ndim > 1 else (None, lengths)
    return attention(q, k, v, lengths=lengths, mask=mask).reshape(*q.shape[:2], -1)


def attend_in_order(q: Array, k: Array, v: Array, order: Array, at_once: int = 512) -> Array:
    """Apply attention of each token to those whose order [B, T] is not larger: [B, T, N, Dh].

    A few queries at a time, because a sequence with images is so long that all scores take gigabytes.
    """

    def some(queries: Array, own: Array) -> Array:
        bias = jnp.where(order[:, None] > own[:, :, None], -1e30, 0.0)
        return plain_attention(queries, k, v, bias=bias[:, None])

    batch, tokens, *head = q.shape
    if tokens <= 2 * at_once:
        return some(q, order)
    count = -(-tokens // at_once)
    parts = []
    for x in (q, order):
        padded = jnp.pad(x, ((0, 0), (0, count * at_once - tokens), *[(0, 0)] * (x.ndim - 2)))
        parts.append(padded.reshape(batch, count, at_once, *x.shape[2:]).swapaxes(0, 1))
    y = jax.lax.map(lambda part: some(*part), tuple(parts))
    return y.swapaxes(0, 1).reshape(batch, -1, *head)[:, :tokens]


def self_attention(
    p: Params, x: Array, rope: Rope | None, lengths: Array | None, *, eps: float, offset: float = 0.0
) -> Array:
    """Apply attention of ``x`` [B, T, D] to its first ``lengths`` [B] tokens, gated if there is ``to_gate``."""
    y = attend(*queries_keys_values(p, x, eps=eps, offset=offset), rope, lengths)
    if "to_gate" in p:
        y = y * jax.nn.sigmoid(linear(p["to_gate"], x))
    return linear(p["to_out"]["0"], y)


def double_block_spec(width: int, heads: int, inner: int, *, bias: bool = False) -> Spec:
    """Declare a double-stream block: with a gated feed-forward and no bias, or without a gate and with biases."""
    head_dim, split = width // heads, Axis("heads", heads)
    text = {name: linear_spec(width, width, ("embed", split), bias=bias) for name in TEXT[:3]}
    attention = {
        **self_attention_spec(width, heads, head_dim, bias=bias),
        **text,
        "to_add_out": linear_spec(width, width, (split, "embed"), bias=bias),
        **qk_norm_spec(head_dim, ("norm_added_q", "norm_added_k")),
    }
    ff = gelu_spec(width, inner) if bias else swiglu_spec(width, inner)
    return {"attn": rotated(attention, head_dim), "ff": ff, "ff_context": ff}


Modulation = tuple[Array, ...]
"""Shift, scale and gate for the attention, then for the feed-forward, each [B, 1, D]."""


def chunks(p: Params, time: Array, count: int) -> Modulation:
    """Return ``count`` vectors [B, 1, D] of a modulation, from the activated time embedding [B, 1, D]."""
    return tuple(jnp.split(linear(p["linear"], time), count, axis=-1))


def output_layer(p: Params, x: Array, time: Array, *, eps: float) -> Array:
    """Return the network's output [B, T, C] of tokens [B, T, D]: its last normalisation and projection."""
    scale, shift = chunks(p["norm_out"], time, 2)  # scale before shift, only here
    return linear(p["proj_out"], modulated(layer_norm(x, eps=eps), shift, scale))


@outlined
def double_block(
    p: Params,
    image: Array,
    text: Array,
    for_image: Modulation,
    for_text: Modulation,
    rope: Rope,
    lengths: Array | None = None,
    *,
    eps: float,
    text_last: bool = False,
) -> tuple[Array, Array]:
    """Apply a double-stream block (Esser et al. 2024, figure 2b): text and image share only attention.

    Args:
        p: parameters as declared by ``double_block_spec``.
        image: [B, L, D].
        text: [B, S, D].
        for_image: six chunks of modulation.
        for_text: six chunks of modulation.
        rope: positions of text, then image; with ``text_last`` of image, then text.
        lengths: number of these tokens to attend to [B], or which ones, bool [B, T]; None for all.
        eps: epsilon of all normalisations.
        text_last: the text, whose padding is not read, is behind the image.

    Returns:
        Both streams.
    """
    with jax.named_scope("double_block"):
        in_text = queries_keys_values(p["attn"], modulated(layer_norm(text, eps=eps), *for_text[:2]), TEXT, eps=eps)
        in_image = queries_keys_values(p["attn"], modulated(layer_norm(image, eps=eps), *for_image[:2]), eps=eps)
        first, second = (in_image, in_text) if text_last else (in_text, in_image)
        q, k, v = (jnp.concatenate(both, axis=1) for both in zip(first, second, strict=True))
        y = attend(q, k, v, rope, lengths)
        of_first, of_second = jnp.split(y, [first[0].shape[1]], axis=1)
        of_image, of_text = (of_first, of_second) if text_last else (of_second, of_first)
        image = image + for_image[2] * linear(p["attn"]["to_out"]["0"], of_image)
        text = text + for_text[2] * linear(p["attn"]["to_add_out"], of_text)
        image = image + for_image[5] * feed_forward(p["ff"], modulated(layer_norm(image, eps=eps), *for_image[3:5]))
        text = text + for_text[5] * feed_forward(p["ff_context"], modulated(layer_norm(text, eps=eps), *for_text[3:5]))
        return image, text


def parallel_block_spec(width: int, heads: int, inner: int, *, bias: bool = False) -> Spec:
    """Declare a single-stream block whose attention and feed-forward read the same input; ``bias`` as above.

    Both have one bias of the sum, which is that of the attention.
    """
    attention = rotated(self_attention_spec(width, heads, width // heads, bias=bias), width // heads)
    return {"attn": attention, "ff": gelu_spec(width, inner, last_bias=False) if bias else swiglu_spec(width, inner)}


@outlined
def parallel_block(
    p: Params, x: Array, modulation: Modulation, rope: Rope, lengths: Array | None = None, *, eps: float
) -> Array:
    """Apply attention and feed-forward to the same input (Dehghani et al. 2023, eq. 1), with shift, scale and gate."""
    with jax.named_scope("parallel_block"):
        shift, scale, gate = modulation
        h = modulated(layer_norm(x, eps=eps), shift, scale)
        return x + gate * (self_attention(p["attn"], h, rope, lengths, eps=eps) + feed_forward(p["ff"], h))


SANDWICH_NAMES = ("w1", "w3", "w2")
"""Gate, up and down projections of a sandwich block's feed-forward."""


def sandwich_block_spec(width: int, heads: int, inner: int) -> Spec:
    """Declare a single-stream block with normalisations before and after both attention and feed-forward."""
    return {
        "attention": rotated(self_attention_spec(width, heads, width // heads), width // heads),
        "feed_forward": swiglu_spec(width, inner, SANDWICH_NAMES),
        **{name: rms_norm_spec(width) for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")},
    }


@outlined
def sandwich_block(
    p: Params,
    x: Array,
    rope: Rope,
    lengths: Array | None,
    modulation: Modulation | None = None,
    *,
    eps: float,
    qk_eps: float,
) -> Array:
    """Apply a sandwich block (Ding et al. 2021, section 2.3; Lumina-Image 2.0).

    Args:
        p: parameters as declared by ``sandwich_block_spec``.
        x: [B, T, D].
        rope: positions of the tokens.
        lengths: number of tokens to attend to [B]; None for all.
        modulation: scale and gate for the attention, then for the feed-forward; None for 0 and 1.
        eps: epsilon of the normalisations around attention and feed-forward.
        qk_eps: epsilon of the normalisations of queries and keys.
    """
    with jax.named_scope("sandwich_block"):
        scale, gate, ff_scale, ff_gate = modulation or (0.0, 1.0, 0.0, 1.0)
        h = rms_norm(p["attention_norm1"], x, eps=eps) * (1 + scale)
        h = self_attention(p["attention"], h, rope, lengths, eps=qk_eps)
        x = x + gate * rms_norm(p["attention_norm2"], h, eps=eps)
        h = rms_norm(p["ffn_norm1"], x, eps=eps) * (1 + ff_scale)
        h = swiglu(p["feed_forward"], h, SANDWICH_NAMES)
        return x + ff_gate * rms_norm(p["ffn_norm2"], h, eps=eps)


def pack(latents: AnyArray, patch: int = 2, *, channels_first: bool) -> AnyArray:
    """Join squares of ``patch`` x ``patch`` latents: [..., h, w, C] -> [..., h / patch, w / patch, patch * patch * C].

    The features of a square are in the order (channel, row, column) if ``channels_first``, else (row, column, channel).
    Arrays are on the host or on a device.
    """
    *batch, h, w, c = latents.shape
    x = latents.reshape(math.prod(batch), h // patch, patch, w // patch, patch, c)
    x = x.transpose(0, 1, 3, 5, 2, 4) if channels_first else x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(*batch, h // patch, w // patch, patch * patch * c)


def unpack(squares: AnyArray, patch: int = 2, *, channels_first: bool) -> AnyArray:
    """Invert ``pack``."""
    *batch, h, w, features = squares.shape
    c = features // patch**2
    if channels_first:
        x = squares.reshape(math.prod(batch), h, w, c, patch, patch).transpose(0, 1, 4, 2, 5, 3)
    else:
        x = squares.reshape(math.prod(batch), h, w, patch, patch, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(*batch, patch * h, patch * w, c)
