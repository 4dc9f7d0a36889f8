"""Krea 2 (Krea 2026): a single-stream diffusion transformer, ``Krea2Transformer2DModel`` as pure functions.

A small transformer fuses twelve layers of Qwen3-VL-4B to one text. Text and image are then one sequence for blocks with
grouped heads and gated attention; the blocks share one modulation, to which each adds a learned table. Latents are
those of ``canvax.models.wan_vae``; a token holds 2 x 2 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Depth, Epsilon, Factor, Layers
from canvax.models.denoiser import COLUMNS, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    Modulation,
    Rope,
    axes_faults,
    grid_ids,
    modulated,
    rms_norm,
    rotary_embedding,
    rotated,
    self_attention,
    self_attention_spec,
    sinusoids,
    swiglu,
    swiglu_spec,
)
from canvax.models.text import Conditions
from canvax.nn import Ahead, linear, linear_spec, with_shares, without_shares
from canvax.params import Axis, Param, Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    "{}<|im_end|>\n<|im_start|>assistant\n"
)
"""Chat template of the language model. The first ``DROPPED`` tokens, those of the system prompt, are dropped.

The reference puts padding between the prompt and the last five tokens, masks it and does not count it in positions.
Padding at the end, as here, gives the same result.
"""

DROPPED, TAPS = 34, (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)

PROMPT = DROPPED + 512
"""Maximum number of tokens of a prompt, template included."""

LENGTHS = (128, 256, 512, 768)
"""Text lengths that programs are compiled for."""

OFFSET = 1.0
"""Normalisations store their weights minus 1, in float32."""


@dataclass(frozen=True)
class Krea2Config(Config):
    """``Krea2Transformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "Krea2Transformer2DModel"

    in_channels: Count = 64
    num_layers: Layers = 28
    attention_head_dim: Count = 128
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 12
    intermediate_size: Count = 16384
    timestep_embed_dim: Count = 256
    text_hidden_dim: Count = 2560
    num_text_layers: Count = 12
    text_num_attention_heads: Count = 20
    text_num_key_value_heads: Count = 20
    text_intermediate_size: Count = 6912
    num_layerwise_text_blocks: Depth = 2
    num_refiner_text_blocks: Depth = 2
    axes_dims_rope: tuple[Count, ...] = (32, 48, 48)
    rope_theta: Factor = 1000.0
    norm_eps: Epsilon = 1e-5

    def __post_init__(self) -> None:
        faults = axes_faults(self.axes_dims_rope, 3, self.attention_head_dim)
        if self.num_attention_heads % self.num_key_value_heads:
            faults.append(f"{self.num_attention_heads} heads in {self.num_key_value_heads} groups")
        heads, groups = self.text_num_attention_heads, self.text_num_key_value_heads
        if self.text_hidden_dim % heads or heads % groups:
            faults.append(f"{heads} heads in {groups} groups of width {self.text_hidden_dim} (text)")
        if faults:
            raise CheckpointError("Krea2Config does not support " + "; ".join(faults))

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim


def krea2_spec(cfg: Krea2Config) -> Spec:
    """Declare the transformer's parameters."""
    width, text = cfg.dim, cfg.text_hidden_dim
    heads = cfg.num_attention_heads, cfg.num_key_value_heads
    block: Spec = {"scale_shift_table": Param((6, width), (None, None), init="zeros")}
    block |= _block_spec(width, *heads, cfg.intermediate_size)
    block["attn"] = rotated(block["attn"], cfg.attention_head_dim)
    fusion = _block_spec(text, cfg.text_num_attention_heads, cfg.text_num_key_value_heads, cfg.text_intermediate_size)
    return {
        "img_in": whole(linear_spec(cfg.in_channels, width)),
        "time_embed": whole(
            {"linear_1": linear_spec(cfg.timestep_embed_dim, width), "linear_2": linear_spec(width, width)}
        ),
        "time_mod_proj": whole(linear_spec(width, 6 * width)),
        "text_fusion": {
            "layerwise_blocks": {str(i): fusion for i in range(cfg.num_layerwise_text_blocks)},
            "projector": whole(linear_spec(cfg.num_text_layers, 1, bias=False)),
            "refiner_blocks": {str(i): fusion for i in range(cfg.num_refiner_text_blocks)},
        },
        "txt_in": {
            "norm": _norm_spec(text),
            "linear_1": whole(linear_spec(text, width)),
            "linear_2": whole(linear_spec(width, width)),
        },
        "transformer_blocks": {str(i): block for i in range(cfg.num_layers)},
        "final_layer": {
            "scale_shift_table": Param((2, width), (None, None), init="zeros"),
            "norm": _norm_spec(width),
            "linear": whole(linear_spec(width, cfg.in_channels)),
        },
    }


def _norm_spec(channels: int) -> Spec:
    """Declare the scale of a normalisation, stored as its difference from 1 (``OFFSET``)."""
    return {"weight": Param((channels,), (None,), init="zeros", dtype="float32")}


def _block_spec(width: int, heads: int, groups: int, inner: int) -> Spec:
    head_dim = width // heads
    gate = {"to_gate": linear_spec(width, width, ("embed", Axis("heads", heads)), bias=False)}
    norms = {name: _norm_spec(head_dim) for name in ("norm_q", "norm_k")}
    return {
        "norm1": _norm_spec(width),
        "norm2": _norm_spec(width),
        "attn": self_attention_spec(width, heads, head_dim, groups) | gate | norms,
        "ff": swiglu_spec(width, inner),
    }


class Krea2Context(NamedTuple):
    """Inputs of the transformer besides the image; they are the same in all steps.

    Attributes:
        text: the fused text [B, S, D].
        rope: positions of image, then text.
        lengths: number of image and text tokens to attend to, int32 [B].
    """

    text: Array
    rope: Rope
    lengths: Array


def krea2_context(
    p: Params, text: Array, lengths: Array, width: Array, cfg: Krea2Config, *, tokens: int
) -> Krea2Context:
    """Fuse the layers of the text and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``krea2_spec``.
        text: layers of the language model [B, S, ``num_text_layers``, ``text_hidden_dim``], in the dtype to compute in.
        lengths: number of rows of each text without padding, int32 [B].
        width: width of the images in tokens, int32 [B].
        cfg: the config.
        tokens: L, the number of tokens of an image.
    """
    batch, rows, layers, channels = text.shape
    lengths = jnp.maximum(lengths, 1)  # unused slots of a batch have no prompt
    fusion, ahead = p["text_fusion"], Ahead()
    with scope("text_fusion"):
        h = text.reshape(batch * rows, layers, channels)
        bare, shares = without_shares(fusion)  # of each image, and here each row of its text is one of the batch
        each = with_shares(bare, None if shares is None else jnp.repeat(shares, rows, axis=0))
        for i in range(cfg.num_layerwise_text_blocks):
            block = ahead(each["layerwise_blocks"][str(i)], h)
            h = _block(block, h, None, None, eps=cfg.norm_eps, where=f"layerwise_blocks.{i}")
        h = linear(each["projector"], h.swapaxes(1, 2)).reshape(batch, rows, channels)
        for i in range(cfg.num_refiner_text_blocks):
            block = ahead(fusion["refiner_blocks"][str(i)], h)
            h = _block(block, h, None, lengths, eps=cfg.norm_eps, where=f"refiner_blocks.{i}")
        h = linear(p["txt_in"]["linear_1"], _norm(p["txt_in"]["norm"], h, cfg))
        h = linear(p["txt_in"]["linear_2"], jax.nn.gelu(h, approximate=True))
    row, column = grid_ids(tokens, width)
    image_ids = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
    ids = jnp.pad(image_ids, ((0, 0), (0, rows), (0, 0)))  # all text has position 0
    return Krea2Context(h, rotary_embedding(ids, cfg.axes_dims_rope, cfg.rope_theta), tokens + lengths)


def krea2(p: Params, x: Array, timestep: Array, context: Krea2Context, cfg: Krea2Config) -> Array:
    """Predict the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``krea2_spec``.
        x: latents as tokens [B, L, ``in_channels``], from ``pack`` with channels first, in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: result of ``krea2_context``.
        cfg: the config.

    Returns:
        [B, L, ``in_channels``].
    """
    tokens = x.shape[1]
    time = linear(p["time_embed"]["linear_1"], sinusoids(timestep, cfg.timestep_embed_dim).astype(x.dtype))
    time = linear(p["time_embed"]["linear_2"], jax.nn.gelu(time, approximate=True))
    shared = linear(p["time_mod_proj"], jax.nn.gelu(time, approximate=True)).reshape(x.shape[0], 6, cfg.dim)
    # The image comes first so that the padding of the text comes last; positions are those of the ids.
    h = jnp.concatenate([linear(p["img_in"], x), context.text], axis=1)
    ahead = Ahead()
    for i in range(cfg.num_layers):
        block = ahead(p["transformer_blocks"][str(i)], h)
        modulation = tuple(jnp.split(shared + block["scale_shift_table"][None], 6, axis=1))
        where = f"transformer_blocks.{i}"
        h = _block(block, h, context.rope, context.lengths, modulation, eps=cfg.norm_eps, where=where)
    last = p["final_layer"]
    scale, shift = jnp.split(time[:, None] + last["scale_shift_table"][None], 2, axis=1)
    return linear(last["linear"], modulated(_norm(last["norm"], h[:, :tokens], cfg), shift, scale))


def _norm(p: Params, x: Array, cfg: Krea2Config) -> Array:
    return rms_norm(p, x, eps=cfg.norm_eps, offset=OFFSET)


@outlined
def _block(
    p: Params, x: Array, rope: Rope | None, lengths: Array | None, modulation: Modulation | None = None, *, eps: float
) -> Array:
    """Apply a pre-norm block; ``modulation`` is scale, shift and gate for the attention, then for the feed-forward."""
    scale, shift, gate, ff_scale, ff_shift, ff_gate = modulation or (0.0, 0.0, 1.0) * 2
    h = modulated(rms_norm(p["norm1"], x, eps=eps, offset=OFFSET), shift, scale)
    x = x + gate * self_attention(p["attn"], h, rope, lengths, eps=eps, offset=OFFSET)
    h = modulated(rms_norm(p["norm2"], x, eps=eps, offset=OFFSET), ff_shift, ff_scale)
    return x + ff_gate * swiglu(p["ff"], h)


@dataclass(frozen=True)
class Krea2Denoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
    """

    cfg: Krea2Config

    @property
    def spec(self) -> Spec:
        return krea2_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(native_size=(128, 128), packing=Packing(2, channels_first=True))

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Krea2Context:
        text, columns = conditions["text"][:, DROPPED:].astype(compute_dtype(p)), conditions[COLUMNS]
        text = text.reshape(*text.shape[:2], self.cfg.num_text_layers, self.cfg.text_hidden_dim)
        return krea2_context(p, text, conditions["length"] - DROPPED, columns, self.cfg, tokens=latents[2])

    def apply(self, p: Params, x: Array, row: Row, prepared: Krea2Context, memory: Any) -> tuple[Array, Any]:
        tokens = x[:, 0].astype(compute_dtype(p))
        return krea2(p, tokens, row["timestep"], prepared, self.cfg)[:, None], memory
