"""Qwen-Image, 2512 and Edit (Qwen Team 2025): ``QwenImageTransformer2DModel`` as pure functions.

It has double-stream blocks only, those of FLUX.1 (``canvax.models.flux``), whose modulation follows from the time.
Positions of an image are centred on 0, and those of the text follow its longer side. A token holds 2 x 2 latents of
``canvax.models.wan_vae``; the text is the last state of Qwen2.5-VL-7B. Tokens of references follow those of the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Layers
from canvax.models.denoiser import COLUMNS, MOST_REFERENCES, REFERENCES, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    Modulation,
    Rope,
    axes_faults,
    centred,
    chunks,
    double_block,
    double_block_spec,
    embedded_time,
    grid_ids,
    output_layer,
    reference_grids,
    rms_norm,
    rms_norm_spec,
    rotary_embedding,
)
from canvax.models.text import Conditions
from canvax.nn import Ahead, linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

EPS, THETA, TIME_WIDTH = 1e-6, 1e4, 256

PATCH = 2
"""Latents along a side of a token."""

REFERENCE_PIXELS = 1024 * 1024
"""References are scaled to about as many pixels, smaller ones too."""


@dataclass(frozen=True)
class QwenImage1Config(Config):
    """``QwenImageTransformer2DModel``: names and defaults are those of the diffusers config.

    Attributes:
        zero_cond_t: references are at time 0, and not at that of the image.
    """

    CLASS: ClassVar[str] = "QwenImageTransformer2DModel"

    in_channels: Count = 64
    out_channels: Count | None = 16
    num_layers: Layers = 60
    attention_head_dim: Count = 128
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 3584
    axes_dims_rope: tuple[Count, ...] = (16, 56, 56)
    zero_cond_t: bool = False

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
        references: embedded references [B, R, D]; R is 0 for none.
        rope: positions of image, references, then text.
        lengths: number of image and text tokens to attend to [B]; with references, which tokens, bool [B, T].
    """

    text: Array
    references: Array
    rope: Rope
    lengths: Array


def qwen_image_1_context(
    p: Params, conditions: Mapping[str, Any], dtype: DType, cfg: QwenImage1Config, *, tokens: int
) -> QwenImage1Context:
    """Embed the text and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``qwen_image_1_spec``.
        conditions: ``text`` [B, S, ``joint_attention_dim``], ``length`` [B], the tokens of each text, ``COLUMNS``, and
            perhaps ``REFERENCES``.
        dtype: dtype to compute in.
        cfg: the config.
        tokens: L, the number of tokens of an image.
    """
    text, width = conditions["text"].astype(dtype), conditions[COLUMNS][:, None]
    batch, rows, _ = text.shape
    row, column = grid_ids(tokens, width[:, 0])
    height = tokens // width
    ids = [jnp.stack([jnp.zeros_like(row), *centred(row, column, height, width)], axis=-1)]
    longest = jnp.maximum(height, width)
    lengths = jnp.maximum(conditions["length"], 1)  # unused slots of a batch have no prompt
    references = jnp.zeros((batch, 0, cfg.dim), dtype)
    if REFERENCES in conditions:
        seen = conditions[REFERENCES]
        references = linear(p["img_in"], seen["tokens"].astype(dtype))
        grids, (number, row, column) = reference_grids(seen["ids"], MOST_REFERENCES), jnp.moveaxis(seen["ids"], -1, 0)
        sides = grids.of(grids.height), grids.of(grids.width)
        ids.append(jnp.stack([number, *centred(row, column, *sides)], axis=-1))
        longest = jnp.maximum(longest, jnp.maximum(grids.height, grids.width).max(-1, keepdims=True))
        parts = (tokens, jnp.full(batch, tokens)), (references.shape[1], seen["count"]), (rows, lengths)
        lengths = jnp.concatenate([jnp.arange(size)[None] < count[:, None] for size, count in parts], axis=1)
    else:
        lengths = tokens + lengths
    after = longest // 2 + jnp.arange(rows)[None]
    rope = rotary_embedding(jnp.concatenate([*ids, jnp.stack([after] * 3, axis=-1)], axis=1), cfg.axes_dims_rope, THETA)
    text = linear(p["txt_in"], rms_norm(p["txt_norm"], text, eps=EPS))
    return QwenImage1Context(text, references, rope, lengths)


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
    embedder, text, of_image = p["time_text_embed"]["timestep_embedder"], context.text, x.shape[1]
    time = jax.nn.silu(embedded_time(embedder, timestep, x))[:, None]
    image = jnp.concatenate([linear(p["img_in"], x), context.references], axis=1)
    times = time
    if cfg.zero_cond_t and context.references.shape[1]:
        clean = jax.nn.silu(embedded_time(embedder, jnp.zeros_like(timestep), x))[:, None]
        times = jnp.concatenate([time, clean], axis=1)
    ahead = Ahead()
    for i in range(cfg.num_layers):
        block, where = ahead(p["transformer_blocks"][str(i)], image), f"transformer_blocks.{i}"
        for_image = _by_token(chunks(block["norm1"], times, 6), of_image, image.shape[1])
        for_text = chunks(block["norm1_context"], time, 6)
        image, text = double_block(
            block, image, text, for_image, for_text, context.rope, context.lengths, eps=EPS, text_last=True, where=where
        )
    return output_layer(p, image[:, :of_image], time, eps=EPS)


def _by_token(modulation: Modulation, of_image: int, tokens: int) -> Modulation:
    """Return the modulation of each token, if it has vectors of two times, of image and references [B, 2, D]."""
    if modulation[0].shape[1] == 1:
        return modulation
    is_image = (jnp.arange(tokens) < of_image)[None, :, None]
    return tuple(jnp.where(is_image, each[:, :1], each[:, 1:]) for each in modulation)


@dataclass(frozen=True)
class QwenImage1Denoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
        dropped: tokens of the chat template before the prompt, whose features are not read.
        most_references: see ``Facts``.
        edits: whether the model reads references.
    """

    cfg: QwenImage1Config
    dropped: int
    most_references: int = MOST_REFERENCES
    edits: bool = False

    @property
    def spec(self) -> Spec:
        return qwen_image_1_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(
            (128, 128),
            Packing(PATCH, channels_first=True),
            edits=self.edits,
            only_edits=self.edits,
            reference_pixels=REFERENCE_PIXELS if self.edits else 0,
            most_references=self.most_references,
        )

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> QwenImage1Context:
        rest = {"text": conditions["text"][:, self.dropped :], "length": conditions["length"] - self.dropped}
        return qwen_image_1_context(p, {**conditions, **rest}, compute_dtype(p), self.cfg, tokens=latents[2])

    def apply(self, p: Params, x: Array, row: Row, prepared: QwenImage1Context, memory: Any) -> tuple[Array, Any]:
        return qwen_image_1(p, x[:, 0].astype(compute_dtype(p)), row["timestep"], prepared, self.cfg)[:, None], memory
