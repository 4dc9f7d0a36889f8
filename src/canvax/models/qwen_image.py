"""Qwen-Image-2.1 (Qwen Team 2026): ``QwenImage21Transformer2DModel`` as pure functions.

Text, reference images and the image are one causal sequence of single-stream blocks; an image attends to all of itself.
Text and references are at time 0, so that their keys and values in each block are computed once, before the loop,
and a step computes the image alone. Blocks share one modulation, of scales and gates. Latents are those of
``canvax.models.qwen_vae``, a token each; the text is the last layer of Qwen3-VL-8B before its normalisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Epsilon, Layers
from canvax.models.denoiser import COLUMNS, REFERENCES, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    Rope,
    attend_in_order,
    axes_faults,
    centred,
    embedded_time,
    grid_ids,
    layer_norm,
    queries_keys_values,
    reference_grids,
    rms_norm,
    rotary_embedding,
    rotate,
    rotated,
    self_attention_spec,
    swiglu,
    swiglu_spec,
)
from canvax.models.text import Conditions
from canvax.nn import Ahead, linear, linear_spec
from canvax.params import Param, Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array

SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"

TEMPLATE = SYSTEM + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""Chat template of a prompt. The features of its first ``DROPPED`` tokens, those of ``SYSTEM``, are dropped."""

DROPPED = 14

LENGTHS = (128, 256, 512, 1024)
"""Token lengths that programs are made for."""

THETA = 10000.0

REFERENCE_PIXELS = 1024 * 1024
"""References are scaled to about as many pixels, smaller ones too."""

FEED_FORWARD = ("gate_layer", "proj", "out")


@dataclass(frozen=True)
class QwenImageConfig(Config):
    """``QwenImage21Transformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "QwenImage21Transformer2DModel"

    in_channels: Count = 64
    out_channels: Count | None = 64
    num_layers: Layers = 32
    attention_head_dim: Count = 128
    num_attention_heads: Count = 32
    context_in_dim: Count = 4096
    mlp_ratio: Count = 3
    axes_dims_rope: tuple[Count, ...] = (16, 56, 56)
    eps: Epsilon = 1e-6
    causal_condition: bool = True

    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {"patch_size": (1,)}

    def __post_init__(self) -> None:
        faults = axes_faults(self.axes_dims_rope, 3, self.attention_head_dim)
        if self.out_channels not in (None, self.in_channels):
            faults.append(f"out_channels {self.out_channels} with in_channels {self.in_channels}")
        if not self.causal_condition:
            faults.append("causal_condition false")
        if faults:
            raise CheckpointError("QwenImageConfig does not support " + "; ".join(faults))

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim


def qwen_image_spec(cfg: QwenImageConfig) -> Spec:
    """Return the parameters of the transformer, none of which is a bias."""
    width, heads = cfg.dim, cfg.num_attention_heads

    def matrix(inputs: int, outputs: int) -> Spec:
        return whole(linear_spec(inputs, outputs, bias=False))

    block: Spec = {
        "attn": rotated(self_attention_spec(width, heads, cfg.attention_head_dim), cfg.attention_head_dim),
        "img_mlp": swiglu_spec(width, cfg.mlp_ratio * width, FEED_FORWARD),
    }
    return {
        "time_text_embed": {"timestep_embedder": {"linear_1": matrix(256, width), "linear_2": matrix(width, width)}},
        "txt_in": {
            "text_norm": {"weight": Param((cfg.context_in_dim,), (None,), init="zeros")},
            "in_layer": matrix(cfg.context_in_dim, width),
            "out_layer": matrix(width, width),
        },
        "img_in": matrix(cfg.in_channels, width),
        "modulation": {"1": matrix(width, 4 * width)},
        "transformer_blocks": {str(i): block for i in range(cfg.num_layers)},
        "norm_out": {"linear": matrix(width, width)},
        "proj_out": matrix(width, cfg.in_channels),
    }


class QwenContext(NamedTuple):
    """Inputs of a step besides the image, the same in all steps.

    Attributes:
        keys: keys of text and references in each block, after the rotation, [B, S, N, Dh] each.
        values: their values in each block, [B, S, N, Dh] each.
        rope: rotation of the image's positions.
        lengths: number of tokens of image, text and references that are attended to, int32 [B].
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    rope: Rope
    lengths: Array


class _Prefix(NamedTuple):
    """The tokens before the image in sequence, padding last.

    Attributes:
        h: tokens [B, S, D].
        ids: positions [B, S, 3].
        order: place in the sequence [B, S], the same for all tokens of an image; large for padding.
        position: of the image [B].
        lengths: tokens without padding [B].
    """

    h: Array
    ids: Array
    order: Array
    position: Array
    lengths: Array


def _text_alone(h: Array, lengths: Array) -> _Prefix:
    row = jnp.broadcast_to(jnp.arange(h.shape[1])[None], h.shape[:2])
    order = jnp.where(row < lengths[:, None], row, _PADDING)
    return _Prefix(h, jnp.stack([row] * 3, axis=-1), order, lengths, lengths)


def _with_references(text: _Prefix, tokens: Array, starts: Array, ids: Array, count: Array) -> _Prefix:
    """Put reference images between the rows of the text.

    Args:
        text: the text alone.
        tokens: embedded references [B, R, D].
        starts: number of rows of the text before each, int32 [B, N].
        ids: number of its reference, row and column of each token, int32 [B, R, 3].
        count: tokens without padding [B].
    """
    grids = reference_grids(ids, starts.shape[1])
    sizes, steps = grids.height * grids.width, jnp.maximum(grids.height, grids.width)
    first, place = starts + jnp.cumsum(sizes, 1) - sizes, starts + jnp.cumsum(steps, 1) - steps
    before = starts[:, None] <= text.order[:, :, None]  # references before each row of the text
    later = jnp.where(before, jnp.stack([steps, sizes])[:, :, None], 0).sum(-1)
    sides = grids.of(grids.height), grids.of(grids.width)
    grid = jnp.stack([grids.of(place), *centred(ids[..., 1], ids[..., 2], *sides)], axis=-1)
    padding = jnp.arange(ids.shape[1])[None] >= count[:, None]
    order = jnp.concatenate([text.order + later[1], jnp.where(padding, _PADDING, grids.of(first))], axis=1)
    sequence = jnp.argsort(order, axis=1)
    h, ids = (
        jnp.take_along_axis(jnp.concatenate(both, axis=1), sequence[:, :, None], axis=1)
        for both in ((text.h, tokens), (text.ids + later[0][:, :, None], grid))
    )
    order = jnp.take_along_axis(order, sequence, axis=1)
    return _Prefix(h, ids, order, text.position + steps.sum(1), text.lengths + count)


_PADDING = 2**30


def qwen_image_context(
    p: Params,
    text: Array,
    lengths: Array,
    width: Array,
    cfg: QwenImageConfig,
    *,
    tokens: int,
    references: Mapping[str, Array] | None = None,
    starts: Array | None = None,
) -> QwenContext:
    """Compute keys and values of text and references in each block, and the image's positions, once before the loop.

    Args:
        p: parameters as declared by ``qwen_image_spec``.
        text: [B, S, ``context_in_dim``] in the dtype that it computes in.
        lengths: how many rows of each are its text, int32 [B].
        width: how many tokens wide the images are, int32 [B].
        cfg: the config.
        tokens: how many tokens an image has, L.
        references: of ``canvax.models.denoiser.REFERENCES``; None for none.
        starts: number of rows of the text before each reference, int32 [B, N].
    """
    lengths = jnp.maximum(lengths, 1)  # a slot of a batch without an image has no prompt
    h = rms_norm(p["txt_in"]["text_norm"], text, eps=cfg.eps, offset=1.0)
    h = linear(p["txt_in"]["out_layer"], jax.nn.gelu(linear(p["txt_in"]["in_layer"], h), approximate=True))
    prefix = _text_alone(h, lengths)
    if references is not None and starts is not None:
        images = linear(p["img_in"], references["tokens"].astype(text.dtype))
        prefix = _with_references(prefix, images, starts, references["ids"], references["count"])
    h, rope = prefix.h, rotary_embedding(prefix.ids, cfg.axes_dims_rope, THETA)
    modulation = _modulation(p, _time(p, jnp.zeros(text.shape[0]), h))
    keys, values, ahead = [], [], Ahead()
    for i in range(cfg.num_layers):
        block, where = ahead(p["transformer_blocks"][str(i)], h), f"transformer_blocks.{i}"
        if i == cfg.num_layers - 1:  # nothing reads what comes out of it
            _, k, v = _heads(block, h, modulation, rope, cfg.eps)
        else:
            h, k, v = _prefix_block(block, h, modulation, rope, prefix.order, eps=cfg.eps, where=where)
        keys.append(k)
        values.append(v)
    row, column = grid_ids(tokens, width)
    height = tokens // width[:, None]
    frame = jnp.broadcast_to(prefix.position[:, None], row.shape)
    ids = jnp.stack([frame, *centred(row, column, height, width[:, None])], axis=-1)
    rope = rotary_embedding(ids, cfg.axes_dims_rope, THETA)
    return QwenContext(tuple(keys), tuple(values), rope, tokens + prefix.lengths)


def qwen_image(p: Params, x: Array, timestep: Array, context: QwenContext, cfg: QwenImageConfig) -> Array:
    """Return the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``qwen_image_spec``.
        x: latents as tokens [B, L, ``in_channels``] in the dtype that it computes in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: of ``qwen_image_context``.
        cfg: the config.

    Returns:
        [B, L, ``in_channels``].
    """
    h, time = linear(p["img_in"], x), _time(p, timestep, x)
    modulation, ahead = _modulation(p, time), Ahead()
    for i, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
        block, where = ahead(p["transformer_blocks"][str(i)], h), f"transformer_blocks.{i}"
        h = _image_block(block, h, modulation, context.rope, keys, values, context.lengths, eps=cfg.eps, where=where)
    return linear(p["proj_out"], layer_norm(h, eps=cfg.eps) * (1 + linear(p["norm_out"]["linear"], time)))


Modulation = tuple[Array, ...]
"""Scale and gate for the attention, then for the feed-forward, each [B, 1, D]."""


def _time(p: Params, t: Array, x: Array) -> Array:
    """Return the activated time [B, 1, D]."""
    return jax.nn.silu(embedded_time(p["time_text_embed"]["timestep_embedder"], t, x))[:, None]


def _modulation(p: Params, time: Array) -> Modulation:
    scale, gate, ff_scale, ff_gate = jnp.split(linear(p["modulation"]["1"], time), 4, axis=-1)
    return 1 + scale, jnp.tanh(gate), 1 + ff_scale, jnp.tanh(ff_gate)


def _heads(p: Params, x: Array, modulation: Modulation, rope: Rope, eps: float) -> tuple[Array, Array, Array]:
    """Return queries, keys and values of a block, turned by their positions."""
    q, k, v = queries_keys_values(p["attn"], layer_norm(x, eps=eps) * modulation[0], eps=eps)
    return rotate(q, rope), rotate(k, rope), v


def _rest(p: Params, x: Array, attended: Array, modulation: Modulation, eps: float) -> Array:
    """Return a block's output from what its tokens have attended to [B, T, N, Dh]."""
    x = x + modulation[1] * linear(p["attn"]["to_out"]["0"], attended.reshape(*x.shape[:2], -1))
    return x + modulation[3] * swiglu(p["img_mlp"], layer_norm(x, eps=eps) * modulation[2], FEED_FORWARD)


@outlined
def _prefix_block(
    p: Params, x: Array, modulation: Modulation, rope: Rope, order: Array, *, eps: float
) -> tuple[Array, Array, Array]:
    """Return the block's output for text and references [B, S, D], and their keys and values."""
    q, k, v = _heads(p, x, modulation, rope, eps)
    return _rest(p, x, attend_in_order(q, k, v, order), modulation, eps), k, v


@outlined
def _image_block(
    p: Params, x: Array, modulation: Modulation, rope: Rope, keys: Array, values: Array, lengths: Array, *, eps: float
) -> Array:
    """Return the block's output for an image [B, L, D], which attends to itself and to all before it."""
    q, k, v = _heads(p, x, modulation, rope, eps)
    # The image comes first, so that the padding comes last: positions are in the rotation alone.
    k, v = jnp.concatenate([k, keys], axis=1), jnp.concatenate([v, values], axis=1)
    return _rest(p, x, attention(q, k, v, lengths=lengths), modulation, eps)


@dataclass(frozen=True)
class QwenImageDenoiser(TransformerDenoiser):
    """The transformer inside the loop. It gives the velocity of a flow.

    Attributes:
        cfg: its config.
        distilled: whether the model needs no guidance.
        edits: whether its text encoder sees references.
    """

    cfg: QwenImageConfig
    distilled: bool = False
    edits: bool = False

    @property
    def spec(self) -> Spec:
        return qwen_image_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(packing=Packing(1), distilled=self.distilled, edits=self.edits, reference_pixels=REFERENCE_PIXELS)

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> QwenContext:
        text, columns = conditions["text"][:, DROPPED:].astype(compute_dtype(p)), conditions[COLUMNS]
        images: Any = conditions.get(REFERENCES)
        starts = conditions["starts"] - DROPPED if images else None
        with scope("text"):
            length = conditions["length"] - DROPPED
            return qwen_image_context(
                p, text, length, columns, self.cfg, tokens=latents[2], references=images, starts=starts
            )

    def apply(self, p: Params, x: Array, row: Row, prepared: QwenContext, memory: Any) -> tuple[Array, Any]:
        tokens = x[:, 0].astype(compute_dtype(p))
        return qwen_image(p, tokens, row["timestep"], prepared, self.cfg)[:, None], memory
