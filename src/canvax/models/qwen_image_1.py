"""Qwen-Image and Qwen-Image-2512 (Qwen Team 2025): ``QwenImageTransformer2DModel`` as pure functions.

It has double-stream blocks only, those of FLUX.1 (``canvax.models.flux``), whose modulation follows from the time.
Positions of an image are centred on 0, and those of the text follow its longer side. A token holds 2 x 2 latents of
``canvax.models.wan_vae``; the text is the last state of Qwen2.5-VL-7B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Layers
from canvax.models.denoiser import COLUMNS, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    Rope,
    axes_faults,
    chunks,
    double_block,
    double_block_spec,
    embedded_time,
    grid_ids,
    layer_norm,
    modulated,
    rms_norm,
    rms_norm_spec,
    rotary_embedding,
)
from canvax.models.text import Conditions
from canvax.nn import linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

EPS, THETA, TIME_WIDTH = 1e-6, 1e4, 256

PATCH = 2
"""Latents along a side of a token."""


@dataclass(frozen=True)
class QwenImage1Config(Config):
    """``QwenImageTransformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "QwenImageTransformer2DModel"

    in_channels: Count = 64
    out_channels: Count | None = 16
    num_layers: Layers = 60
    attention_head_dim: Count = 128
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 3584
    axes_dims_rope: tuple[Count, ...] = (16, 56, 56)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (PATCH,)}

    def __post_init__(self) -> None:
        faults = axes_faults(self.axes_dims_rope, 3, self.attention_head_dim)
        if self.in_channels != PATCH**2 * (self.out_channels or self.in_channels):
            faults.append(f"out_channels {self.out_channels} with in_channels {self.in_channels}")
        if faults:
            raise CheckpointError("QwenImage1Config does not support " + "; ".join(faults))

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim


def qwen_image_1_spec(cfg: QwenImage1Config) -> Spec:
    """Declare the transformer's parameters; ``NAMES`` in ``canvax.families.qwen_image_1`` has diffusers' names."""
    width = cfg.dim

    def dense(inputs: int, outputs: int) -> Spec:
        return whole(linear_spec(inputs, outputs))

    modulation = {"linear": linear_spec(width, 6 * width, ("mlp", "embed"))}  # a third of all parameters
    block = double_block_spec(width, cfg.num_attention_heads, 4 * width, bias=True)
    block |= {"norm1": modulation, "norm1_context": modulation}
    return {
        "time_text_embed": {
            "timestep_embedder": {"linear_1": dense(TIME_WIDTH, width), "linear_2": dense(width, width)}
        },
        "txt_norm": rms_norm_spec(cfg.joint_attention_dim),
        "img_in": dense(cfg.in_channels, width),
        "txt_in": dense(cfg.joint_attention_dim, width),
        "transformer_blocks": {str(i): block for i in range(cfg.num_layers)},
        "norm_out": {"linear": dense(width, 2 * width)},
        "proj_out": dense(width, cfg.in_channels),
    }


class QwenImage1Context(NamedTuple):
    """Inputs of the transformer besides the image; they are the same in all steps.

    Attributes:
        text: embedded text [B, S, D].
        rope: positions of image, then text.
        lengths: number of image and text tokens to attend to [B].
    """

    text: Array
    rope: Rope
    lengths: Array


def qwen_image_1_context(
    p: Params, conditions: Mapping[str, Any], dtype: DType, cfg: QwenImage1Config, *, tokens: int
) -> QwenImage1Context:
    """Embed the text and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``qwen_image_1_spec``.
        conditions: ``text`` [B, S, ``joint_attention_dim``], ``length`` [B], the tokens of each text, and ``COLUMNS``.
        dtype: dtype to compute in.
        cfg: the config.
        tokens: L, the number of tokens of an image.
    """
    text, width = conditions["text"].astype(dtype), conditions[COLUMNS][:, None]
    row, column = grid_ids(tokens, width[:, 0])
    height = tokens // width
    grid = jnp.stack([jnp.zeros_like(row), row - (height - height // 2), column - (width - width // 2)], axis=-1)
    after = jnp.maximum(height, width) // 2 + jnp.arange(text.shape[1])[None]
    ids = jnp.concatenate([grid, jnp.stack([after] * 3, axis=-1)], axis=1)
    text = linear(p["txt_in"], rms_norm(p["txt_norm"], text, eps=EPS))
    lengths = tokens + jnp.maximum(conditions["length"], 1)  # unused slots of a batch have no prompt
    return QwenImage1Context(text, rotary_embedding(ids, cfg.axes_dims_rope, THETA), lengths)


def qwen_image_1(p: Params, x: Array, timestep: Array, context: QwenImage1Context, cfg: QwenImage1Config) -> Array:
    """Predict the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``qwen_image_1_spec``.
        x: latents as tokens [B, L, ``in_channels``], from ``pack`` with channels first, in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: result of ``qwen_image_1_context``.
        cfg: the config.

    Returns:
        [B, L, ``in_channels``].
    """
    time = jax.nn.silu(embedded_time(p["time_text_embed"]["timestep_embedder"], timestep, x))[:, None]
    image, text = linear(p["img_in"], x), context.text
    for i in range(cfg.num_layers):
        block, where = p["transformer_blocks"][str(i)], f"transformer_blocks.{i}"
        by = chunks(block["norm1"], time, 6), chunks(block["norm1_context"], time, 6)
        image, text = double_block(
            block, image, text, *by, context.rope, context.lengths, eps=EPS, text_last=True, where=where
        )
    scale, shift = chunks(p["norm_out"], time, 2)  # scale before shift, only here
    return linear(p["proj_out"], modulated(layer_norm(image, eps=EPS), shift, scale))


@dataclass(frozen=True)
class QwenImage1Denoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
        dropped: tokens of the chat template before the prompt, whose features are not read.
    """

    cfg: QwenImage1Config
    dropped: int

    @property
    def spec(self) -> Spec:
        return qwen_image_1_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(native_size=(128, 128), packing=Packing(PATCH, channels_first=True))

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> QwenImage1Context:
        rest = {"text": conditions["text"][:, self.dropped :], "length": conditions["length"] - self.dropped}
        return qwen_image_1_context(p, {**conditions, **rest}, compute_dtype(p), self.cfg, tokens=latents[2])

    def apply(self, p: Params, x: Array, row: Row, prepared: QwenImage1Context, memory: Any) -> tuple[Array, Any]:
        return qwen_image_1(p, x[:, 0].astype(compute_dtype(p)), row["timestep"], prepared, self.cfg)[:, None], memory
