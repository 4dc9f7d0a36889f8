"""Z-Image (Tongyi Lab 2025): a single-stream diffusion transformer, ``ZImageTransformer2DModel`` as pure functions.

Two blocks each refine caption and image, which are then one sequence for thirty more blocks. Latents are those of
FLUX.1's autoencoder, of 16 channels; captions are the last layer but one of Qwen3-4B (``canvax.models.decoder_lm``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Depth, Epsilon, Factor, Layers
from canvax.models.denoiser import COLUMNS, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    Modulation,
    Rope,
    grid_ids,
    layer_norm,
    rms_norm,
    rms_norm_spec,
    rotary_embedding,
    sandwich_block,
    sandwich_block_spec,
    sinusoids,
)
from canvax.models.text import Conditions
from canvax.nn import Ahead, linear, linear_spec
from canvax.params import Param, Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""Chat template of the language model. Its last layer but one, without padding, is the caption."""

MULTIPLE = 32
"""Image and caption are each padded to a multiple of this with a learned token, which takes part in attention."""

TIME_WIDTH, TIME_INNER = 256, 1024

QK_EPS = 1e-5
"""Epsilon of the normalisations of queries and keys, independent of ``norm_eps``."""

SIZE = "2-1"
"""Suffix in the names of the first and last layer: patches of 2 x 2 latents of one frame."""


@dataclass(frozen=True)
class ZImageConfig(Config):
    """``ZImageTransformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "ZImageTransformer2DModel"

    in_channels: Count = 16
    dim: Count = 3840
    n_layers: Layers = 30
    n_refiner_layers: Depth = 2
    n_heads: Count = 30
    n_kv_heads: Count = 30
    norm_eps: Epsilon = 1e-5
    qk_norm: bool = True
    cap_feat_dim: Count = 2560
    rope_theta: Factor = 256.0
    t_scale: Factor = 1000.0
    axes_dims: tuple[Count, ...] = (32, 48, 48)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "all_patch_size": ((2,),),
        "all_f_patch_size": ((1,),),
    }
    # Sizes of rotary tables; the angles are computed here.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"axes_lens"})

    def __post_init__(self) -> None:
        faults = [] if self.qk_norm else ["qk_norm false"]
        if self.n_kv_heads != self.n_heads:
            faults.append(f"n_kv_heads {self.n_kv_heads} with n_heads {self.n_heads}")
        if len(self.axes_dims) != 3 or sum(self.axes_dims) * self.n_heads != self.dim:
            faults.append(f"axes_dims {self.axes_dims} with dim {self.dim} and n_heads {self.n_heads}")
        if any(axis % 2 for axis in self.axes_dims):
            faults.append(f"axes_dims {self.axes_dims}, which are not even")
        if faults:
            raise CheckpointError("ZImageConfig does not support " + "; ".join(faults))

    @property
    def time_width(self) -> int:
        """Width of the embedding of the time."""
        return min(self.dim, TIME_WIDTH)


def z_image_spec(cfg: ZImageConfig) -> Spec:
    """Declare the transformer's parameters."""
    width, features = cfg.dim, 4 * cfg.in_channels
    token = Param((1, width), (None, None), init="normal")

    def blocks(count: int, *, modulated: bool = True) -> Spec:
        return {str(i): _block_spec(cfg, modulated=modulated) for i in range(count)}

    return {
        "all_x_embedder": {SIZE: whole(linear_spec(features, width))},
        "noise_refiner": blocks(cfg.n_refiner_layers),
        "context_refiner": blocks(cfg.n_refiner_layers, modulated=False),
        "t_embedder": whole(
            {"mlp": {"0": linear_spec(TIME_WIDTH, TIME_INNER), "2": linear_spec(TIME_INNER, cfg.time_width)}}
        ),
        "cap_embedder": {"0": rms_norm_spec(cfg.cap_feat_dim), "1": whole(linear_spec(cfg.cap_feat_dim, width))},
        "x_pad_token": token,
        "cap_pad_token": token,
        "layers": blocks(cfg.n_layers),
        "all_final_layer": {
            SIZE: whole(
                {
                    "linear": linear_spec(width, features),
                    "adaLN_modulation": {"1": linear_spec(cfg.time_width, width)},
                }
            )
        },
    }


def _block_spec(cfg: ZImageConfig, *, modulated: bool) -> Spec:
    spec = sandwich_block_spec(cfg.dim, cfg.n_heads, int(cfg.dim / 3 * 8))
    if modulated:
        spec["adaLN_modulation"] = {"0": whole(linear_spec(cfg.time_width, 4 * cfg.dim))}
    return spec


class ZImageContext(NamedTuple):
    """Inputs of the transformer besides the image; they are the same in all steps.

    Attributes:
        caption: the refined caption [B, S, D].
        image_rope: positions of the image's tokens.
        rope: positions of image, then caption.
        lengths: number of image and caption tokens to attend to, int32 [B].
    """

    caption: Array
    image_rope: Rope
    rope: Rope
    lengths: Array


def z_image_context(
    p: Params, text: Array, lengths: Array, width: Array, cfg: ZImageConfig, *, tokens: int
) -> ZImageContext:
    """Refine captions and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``z_image_spec``.
        text: features of the captions [B, S, ``cap_feat_dim``], S a multiple of 32, in the dtype to compute in.
        lengths: number of rows of each caption without padding, int32 [B].
        width: width of the images in tokens, int32 [B].
        cfg: the config.
        tokens: L, the number of tokens of an image.
    """
    batch, rows, _ = text.shape
    if rows % MULTIPLE:
        raise ValueError(f"z_image_context: text of {rows} rows, which is no multiple of {MULTIPLE}")
    filled = -(-jnp.maximum(lengths, 1) // MULTIPLE) * MULTIPLE  # unused slots of a batch have no prompt
    index = jnp.arange(rows)
    caption = linear(p["cap_embedder"]["1"], rms_norm(p["cap_embedder"]["0"], text, eps=cfg.norm_eps))
    caption = jnp.where(index[None, :, None] < lengths[:, None, None], caption, p["cap_pad_token"][None])

    zeros = jnp.zeros_like(index)
    caption_ids = jnp.broadcast_to(jnp.stack([1 + index, zeros, zeros], axis=-1), (batch, rows, 3))
    row, column = grid_ids(tokens, width)
    image_ids = jnp.stack([jnp.broadcast_to(filled[:, None] + 1, row.shape), row, column], axis=-1)
    image_ids = jnp.pad(image_ids, ((0, 0), (0, -tokens % MULTIPLE), (0, 0)))  # padding has position 0

    image_rope, caption_rope = (
        rotary_embedding(ids, cfg.axes_dims, cfg.rope_theta) for ids in (image_ids, caption_ids)
    )
    with jax.named_scope("context_refiner"):
        ahead = Ahead()
        for i in range(cfg.n_refiner_layers):
            options = {**_eps(cfg), "where": f"context_refiner.{i}"}
            block = ahead(p["context_refiner"][str(i)], caption)
            caption = sandwich_block(block, caption, caption_rope, filled, **options)
    rope = Rope(*(jnp.concatenate(both, axis=1) for both in zip(image_rope, caption_rope, strict=True)))
    return ZImageContext(caption, image_rope, rope, image_ids.shape[1] + filled)


def z_image(p: Params, x: Array, timestep: Array, context: ZImageContext, cfg: ZImageConfig) -> Array:
    """Predict the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``z_image_spec``.
        x: latents as tokens [B, L, 4 * ``in_channels``], from ``pack`` with channels last, in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: result of ``z_image_context``.
        cfg: the config.

    Returns:
        [B, L, 4 * ``in_channels``].
    """
    tokens = x.shape[1]
    # This model counts time from noise to image, and predicts image minus noise.
    time = sinusoids((1 - timestep / 1000) * cfg.t_scale, TIME_WIDTH).astype(x.dtype)
    time = linear(p["t_embedder"]["mlp"]["2"], jax.nn.silu(linear(p["t_embedder"]["mlp"]["0"], time)))
    image = linear(p["all_x_embedder"][SIZE], x)
    filling = jnp.broadcast_to(p["x_pad_token"], (x.shape[0], -tokens % MULTIPLE, cfg.dim))
    image = jnp.concatenate([image, filling.astype(image.dtype)], axis=1)
    ahead = Ahead()
    for i in range(cfg.n_refiner_layers):
        block = ahead(p["noise_refiner"][str(i)], image)
        options = {**_eps(cfg), "where": f"noise_refiner.{i}"}
        image = sandwich_block(block, image, context.image_rope, None, _modulation(block, time), **options)
    h = jnp.concatenate([image, context.caption], axis=1)
    for i in range(cfg.n_layers):
        block = ahead(p["layers"][str(i)], h)
        options = {**_eps(cfg), "where": f"layers.{i}"}
        h = sandwich_block(block, h, context.rope, context.lengths, _modulation(block, time), **options)
    last = p["all_final_layer"][SIZE]
    scale = linear(last["adaLN_modulation"]["1"], jax.nn.silu(time))[:, None]
    return -linear(last["linear"], layer_norm(h[:, :tokens]) * (1 + scale))


def _eps(cfg: ZImageConfig) -> dict[str, float]:
    return {"eps": cfg.norm_eps, "qk_eps": QK_EPS}


def _modulation(p: Params, time: Array) -> Modulation:
    """Return scale and gate for the attention, then for the feed-forward, of the time embedding [B, 256]."""
    scale, gate, ff_scale, ff_gate = jnp.split(linear(p["adaLN_modulation"]["0"], time)[:, None], 4, axis=-1)
    return scale, jnp.tanh(gate), ff_scale, jnp.tanh(ff_gate)


@dataclass(frozen=True)
class ZImageDenoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
    """

    cfg: ZImageConfig

    @property
    def spec(self) -> Spec:
        return z_image_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(native_size=(128, 128), packing=Packing(2))

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> ZImageContext:
        text, columns = conditions["text"].astype(compute_dtype(p)), conditions[COLUMNS]
        return z_image_context(p, text, conditions["length"], columns, self.cfg, tokens=latents[2])

    def apply(self, p: Params, x: Array, row: Row, prepared: ZImageContext, memory: Any) -> tuple[Array, Any]:
        tokens = x[:, 0].astype(compute_dtype(p))
        return z_image(p, tokens, row["timestep"], prepared, self.cfg)[:, None], memory
