"""Qwen-Image-2.1 (Qwen Team 2026): ``QwenImage21Transformer2DModel`` as pure functions.

Text and image are one causal sequence of single-stream blocks; an image attends to all of itself. The text is at time
0, so that its keys and values in each block are computed once, before the loop, and a step computes the image alone.
Blocks share one modulation, of scales and gates. Latents are those of ``canvax.models.qwen_vae``, a token each; the
text is the last layer of Qwen3-VL-8B before its normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Epsilon, Layers
from canvax.models.denoiser import COLUMNS, Denoiser, Facts, Packing, Row
from canvax.models.dit import (
    Rope,
    axes_faults,
    embedded_time,
    grid_ids,
    layer_norm,
    queries_keys_values,
    rms_norm,
    rotary_embedding,
    rotate,
    rotated,
    self_attention_spec,
    swiglu,
    swiglu_spec,
)
from canvax.models.text import Conditions
from canvax.nn import linear, linear_spec
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
        keys: keys of the text in each block, after the rotation, [B, S, N, Dh] each.
        values: values of the text in each block, [B, S, N, Dh] each.
        rope: rotation of the image's positions.
        lengths: number of tokens of image and text that are attended to, int32 [B].
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    rope: Rope
    lengths: Array


def qwen_image_context(
    p: Params, text: Array, lengths: Array, width: Array, cfg: QwenImageConfig, *, tokens: int
) -> QwenContext:
    """Compute keys and values of the text in each block, and the positions of the image, once before the loop.

    Args:
        p: parameters as declared by ``qwen_image_spec``.
        text: [B, S, ``context_in_dim``] in the dtype that it computes in.
        lengths: how many rows of each are its text, int32 [B].
        width: how many tokens wide the images are, int32 [B].
        cfg: the config.
        tokens: how many tokens an image has, L.
    """
    lengths = jnp.maximum(lengths, 1)  # a slot of a batch without an image has no prompt
    h = rms_norm(p["txt_in"]["text_norm"], text, eps=cfg.eps, offset=1.0)
    h = linear(p["txt_in"]["out_layer"], jax.nn.gelu(linear(p["txt_in"]["in_layer"], h), approximate=True))
    places = jnp.broadcast_to(jnp.arange(text.shape[1])[None, :, None], (1, text.shape[1], 3))
    rope = rotary_embedding(places, cfg.axes_dims_rope, THETA)
    modulation = _modulation(p, _time(p, jnp.zeros(text.shape[0]), h))
    keys, values = [], []
    for i in range(cfg.num_layers):
        block, where = p["transformer_blocks"][str(i)], f"transformer_blocks.{i}"
        if i == cfg.num_layers - 1:  # nothing reads what comes out of it
            _, k, v = _heads(block, h, modulation, rope, cfg.eps)
        else:
            h, k, v = _text_block(block, h, modulation, rope, lengths, eps=cfg.eps, where=where)
        keys.append(k)
        values.append(v)
    row, column = grid_ids(tokens, width)
    height = tokens // width[:, None]
    # An image is behind its text, on a grid around 0 of rows and columns.
    frame = jnp.broadcast_to(lengths[:, None], row.shape)
    ids = jnp.stack([frame, row - (height - height // 2), column - (width - width // 2)[:, None]], axis=-1)
    rope = rotary_embedding(ids, cfg.axes_dims_rope, THETA)
    return QwenContext(tuple(keys), tuple(values), rope, tokens + lengths)


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
    modulation = _modulation(p, time)
    for i, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
        block, where = p["transformer_blocks"][str(i)], f"transformer_blocks.{i}"
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
def _text_block(
    p: Params, x: Array, modulation: Modulation, rope: Rope, lengths: Array, *, eps: float
) -> tuple[Array, Array, Array]:
    """Return the block's output for text [B, S, D], and the keys and values of the text."""
    q, k, v = _heads(p, x, modulation, rope, eps)
    y = attention(q, k, v, lengths=lengths, causal=True)
    return _rest(p, x, y, modulation, eps), k, v


@outlined
def _image_block(
    p: Params, x: Array, modulation: Modulation, rope: Rope, keys: Array, values: Array, lengths: Array, *, eps: float
) -> Array:
    """Return the block's output for an image [B, L, D], which attends to itself and to the text."""
    q, k, v = _heads(p, x, modulation, rope, eps)
    # The image comes first, so that the padding of the text comes last: positions are in the rotation alone.
    k, v = jnp.concatenate([k, keys], axis=1), jnp.concatenate([v, values], axis=1)
    return _rest(p, x, attention(q, k, v, lengths=lengths), modulation, eps)


@dataclass(frozen=True)
class QwenImageDenoiser(Denoiser):
    """The transformer inside the loop. It gives the velocity of a flow.

    Attributes:
        cfg: its config.
        distilled: whether the model needs no guidance.
    """

    cfg: QwenImageConfig
    distilled: bool = False

    @property
    def component(self) -> str:
        return "transformer"

    @property
    def spec(self) -> Spec:
        return qwen_image_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(packing=Packing(1), distilled=self.distilled)

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> QwenContext:
        text, columns = conditions["text"][:, DROPPED:].astype(compute_dtype(p)), conditions[COLUMNS]
        with scope("text"):
            length = conditions["length"] - DROPPED
            return qwen_image_context(p, text, length, columns, self.cfg, tokens=latents[2])

    def apply(self, p: Params, x: Array, row: Row, prepared: QwenContext, memory: Any) -> tuple[Array, Any]:
        tokens = x[:, 0].astype(compute_dtype(p))
        return qwen_image(p, tokens, row["timestep"], prepared, self.cfg)[:, None], memory
