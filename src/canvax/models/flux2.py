"""FLUX.2 (Black Forest Labs 2025; klein 2026): ``Flux2Transformer2DModel`` as pure functions.

Double-stream blocks are followed by parallel ones; all blocks of a kind share their modulation. Reference images are
tokens after the image. A latent of 128 channels holds 2 x 2 latents of ``canvax.models.flux2_vae``. The text of klein
is layers 9, 18 and 27 of Qwen3, concatenated; all 512 rows are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Depth, Epsilon, Factor
from canvax.models.denoiser import COLUMNS, REFERENCES, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    Rope,
    axes_faults,
    chunks,
    double_block,
    double_block_spec,
    embedded_time,
    grid_ids,
    output_layer,
    parallel_block,
    parallel_block_spec,
    rotary_embedding,
)
from canvax.models.text import Conditions
from canvax.nn import Ahead, linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Chat template of klein's language model, padded to ``ROWS`` tokens."""

ROWS = 512
"""Tokens of a text, padding included."""

REFERENCE_STEP = 10
"""References have times 10, 20, 30, ..., the image has 0."""

TAP = 9
"""Distance of the three layers of the language model that are read."""


def taps(layers: int) -> tuple[int, int, int]:
    """Return the layers of a language model that are read; with fewer than 28 layers they are a quarter apart."""
    step = TAP if layers > 3 * TAP else layers // 4
    return step, 2 * step, 3 * step


@dataclass(frozen=True)
class Flux2Config(Config):
    """``Flux2Transformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "Flux2Transformer2DModel"

    in_channels: Count = 128
    out_channels: Count | None = None
    num_layers: Depth = 8
    num_single_layers: Depth = 48
    attention_head_dim: Count = 128
    num_attention_heads: Count = 48
    joint_attention_dim: Count = 15360
    timestep_guidance_channels: Count = 256
    mlp_ratio: Factor = 3.0
    axes_dims_rope: tuple[Count, ...] = (32, 32, 32, 32)
    rope_theta: Factor = 2000
    eps: Epsilon = 1e-6
    guidance_embeds: bool = True

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,)}

    def __post_init__(self) -> None:
        if self.out_channels not in (None, self.in_channels):
            raise CheckpointError(f"Flux2Config does not support out_channels {self.out_channels}")
        for fault in axes_faults(self.axes_dims_rope, 4, self.attention_head_dim):
            raise CheckpointError(f"Flux2Config does not support {fault}")

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim


def flux2_spec(cfg: Flux2Config) -> Spec:
    """Declare the transformer's parameters; none is a bias.

    Checkpoints store some layers as one; devices split the layers separately: see ``STACKS`` in
    ``canvax.families.flux2``.
    """
    width, inner = cfg.dim, int(cfg.dim * cfg.mlp_ratio)

    def matrix(inputs: int, outputs: int) -> Spec:
        return linear_spec(inputs, outputs, bias=False)

    embedder = {"linear_1": matrix(cfg.timestep_guidance_channels, width), "linear_2": matrix(width, width)}
    embedders = {"timestep_embedder": embedder} | ({"guidance_embedder": embedder} if cfg.guidance_embeds else {})
    block, single = (kind(width, cfg.num_attention_heads, inner) for kind in (double_block_spec, parallel_block_spec))
    return {
        "time_guidance_embed": whole(embedders),
        "double_stream_modulation_img": {"linear": whole(matrix(width, 6 * width))},
        "double_stream_modulation_txt": {"linear": whole(matrix(width, 6 * width))},
        "single_stream_modulation": {"linear": whole(matrix(width, 3 * width))},
        "x_embedder": whole(matrix(cfg.in_channels, width)),
        "context_embedder": whole(matrix(cfg.joint_attention_dim, width)),
        "transformer_blocks": {str(i): block for i in range(cfg.num_layers)},
        "single_transformer_blocks": {str(i): single for i in range(cfg.num_single_layers)},
        "norm_out": {"linear": whole(matrix(width, 2 * width))},
        "proj_out": whole(matrix(width, cfg.in_channels)),
    }


class Flux2Context(NamedTuple):
    """Inputs of the transformer besides the image; they are the same in all steps.

    Attributes:
        text: embedded text [B, S, D].
        references: embedded reference images [B, R, D]; R may be 0.
        rope: positions of text, image and references.
        lengths: number of tokens of text, image and references to attend to [B]; None for all.
    """

    text: Array
    references: Array
    rope: Rope
    lengths: Array | None = None


def reference_ids(ids: Array) -> Array:
    """Return positions [B, R, 4] of tokens of reference images: (number of the reference, row, column) [B, R, 3]."""
    return jnp.pad(ids * jnp.array([[[REFERENCE_STEP, 1, 1]]], jnp.int32), ((0, 0), (0, 0), (0, 1)))


def flux2_context(
    p: Params,
    text: Array,
    width: Array,
    references: Array,
    ids: Array,
    cfg: Flux2Config,
    *,
    tokens: int,
    count: Array | None = None,
) -> Flux2Context:
    """Embed text and references and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``flux2_spec``.
        text: [B, S, ``joint_attention_dim``] in the dtype to compute in, padding included.
        width: width of the images in tokens, int32 [B].
        references: latents of reference images as tokens [B, R, ``in_channels``]; R may be 0.
        ids: their positions, from ``reference_ids``, int32 [B, R, 4].
        cfg: the config.
        tokens: L, the number of tokens of an image.
        count: number of reference tokens without padding [B]; None for all.
    """
    batch, rows, _ = text.shape
    row, column = grid_ids(tokens, width)
    zeros = jnp.zeros_like(row)
    image_ids = jnp.stack([zeros, row, column, zeros], axis=-1)
    text_ids = jnp.pad(jnp.broadcast_to(jnp.arange(rows)[:, None], (batch, rows, 1)), ((0, 0), (0, 0), (3, 0)))
    all_ids = jnp.concatenate([text_ids, image_ids, ids], axis=1)
    return Flux2Context(
        linear(p["context_embedder"], text),
        linear(p["x_embedder"], references.astype(text.dtype)),
        rotary_embedding(all_ids, cfg.axes_dims_rope, cfg.rope_theta),
        None if count is None else rows + tokens + count,
    )


def flux2(
    p: Params, x: Array, timestep: Array, context: Flux2Context, cfg: Flux2Config, *, guidance: Array | None = None
) -> Array:
    """Predict the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``flux2_spec``.
        x: latents as tokens [B, L, ``in_channels``] in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: result of ``flux2_context``.
        cfg: the config.
        guidance: guidance scale [B] of a model with ``guidance_embeds``.

    Returns:
        [B, L, ``in_channels``].
    """
    tokens, rows = x.shape[1], context.text.shape[1]
    time = embedded_time(p["time_guidance_embed"]["timestep_embedder"], timestep, x)
    if cfg.guidance_embeds and guidance is not None:
        time = time + embedded_time(p["time_guidance_embed"]["guidance_embedder"], 1000 * guidance, x)
    time = jax.nn.silu(time)[:, None]
    for_image = chunks(p["double_stream_modulation_img"], time, 6)
    for_text = chunks(p["double_stream_modulation_txt"], time, 6)
    for_both = chunks(p["single_stream_modulation"], time, 3)

    image, text = jnp.concatenate([linear(p["x_embedder"], x), context.references], axis=1), context.text
    ahead = Ahead()
    for i in range(cfg.num_layers):
        block = ahead(p["transformer_blocks"][str(i)], image)
        streams = image, text, for_image, for_text
        where = f"transformer_blocks.{i}"
        image, text = double_block(block, *streams, context.rope, context.lengths, eps=cfg.eps, where=where)
    h = jnp.concatenate([text, image], axis=1)
    for i in range(cfg.num_single_layers):
        block = ahead(p["single_transformer_blocks"][str(i)], h)
        where = f"single_transformer_blocks.{i}"
        h = parallel_block(block, h, for_both, context.rope, context.lengths, eps=cfg.eps, where=where)
    return output_layer(p, h[:, rows : rows + tokens], time, eps=cfg.eps)


@dataclass(frozen=True)
class Flux2Denoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
        is_distilled: see ``Facts.distilled``.
    """

    cfg: Flux2Config
    is_distilled: bool = False

    @property
    def spec(self) -> Spec:
        return flux2_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(packing=Packing(1), distilled=self.is_distilled, edits=True)

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Flux2Context:
        batch, _, length, channels = latents
        if REFERENCES in conditions:
            references: Any = conditions[REFERENCES]
            tokens, ids, count = references["tokens"], reference_ids(references["ids"]), references["count"]
        else:
            tokens, ids, count = jnp.zeros((batch, 0, channels)), jnp.zeros((batch, 0, 4), jnp.int32), None
        text, columns = conditions["text"].astype(compute_dtype(p)), conditions[COLUMNS]
        return flux2_context(p, text, columns, tokens, ids, self.cfg, tokens=length, count=count)

    def apply(self, p: Params, x: Array, row: Row, prepared: Flux2Context, memory: Any) -> tuple[Array, Any]:
        tokens = x[:, 0].astype(compute_dtype(p))
        return flux2(p, tokens, row["timestep"], prepared, self.cfg)[:, None], memory
