"""FLUX.3 image klein (Black Forest Labs 2026): ``Flux3Transformer2DModel`` as pure functions.

The image, the reference images and the text are three modes. Each passes through parallel blocks with weights of its
mode, then all pass through joint blocks. Reference images and text always have time 0, so that their part of the first
blocks is computed once per image unless the model is a flow map. A flow map (the distilled models) also reads the time
that a step leads to. Latents are those of ``canvax.models.flux2_vae``; the text is eight layers of Qwen3-VL-4B,
concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Depth, Epsilon, Factor
from canvax.models.denoiser import COLUMNS, REFERENCES, Facts, Inputs, Packing, Row, Shapes, TransformerDenoiser
from canvax.models.dit import (
    Rope,
    axes_faults,
    chunks,
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
from canvax.types import Array, DType

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""Chat template of the language model."""

WINDOW = 80
"""A text is padded to a multiple of this many tokens. The transformer attends to this padding."""

LENGTHS = tuple(WINDOW * 2**i for i in range(5))
"""Text lengths that programs are compiled for."""

WHOLE_REFERENCE = 4 * 1024 * 1024
"""Maximum pixels of a single reference image that is not cropped."""

PAD_POSITION = 1
"""Position of all padding in the language model."""

TARGET = "target"
"""Column of a table's row with the time that its step leads to."""

IMAGE, REFERENCE, TEXT = "image", "image_cond", "txt"
MODES = IMAGE, REFERENCE, TEXT


@dataclass(frozen=True)
class Flux3Config(Config):
    """``Flux3Transformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "Flux3Transformer2DModel"

    in_channels: Count = 128
    cond_in_channels: Count = 128
    num_layers: Depth = 5
    num_single_layers: Depth = 28
    attention_head_dim: Count = 128
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 20480
    timestep_channels: Count = 256
    mlp_ratio: Factor = 3.0
    axes_dims_rope: tuple[Count, ...] = (32, 32, 32, 32)
    rope_theta: Factor = 10000
    eps: Epsilon = 1e-6
    flow_map: bool = False

    def __post_init__(self) -> None:
        faults = axes_faults(self.axes_dims_rope, 4, self.attention_head_dim)
        if self.cond_in_channels != self.in_channels:
            faults.append(f"cond_in_channels {self.cond_in_channels} with in_channels {self.in_channels}")
        if faults:
            raise CheckpointError("Flux3Config does not support " + "; ".join(faults))

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim


def flux3_spec(cfg: Flux3Config) -> Spec:
    """Declare the transformer's parameters; none is a bias."""
    width = cfg.dim

    def matrix(inputs: int, outputs: int) -> Spec:
        return linear_spec(inputs, outputs, bias=False)

    block = parallel_block_spec(width, cfg.num_attention_heads, int(width * cfg.mlp_ratio))
    early: Spec = {str(i): block for i in range(cfg.num_layers)}
    embedder = whole({"linear_1": matrix(cfg.timestep_channels, width), "linear_2": matrix(width, width)})
    modulations: Spec = {mode: {"linear": whole(matrix(width, 3 * width))} for mode in MODES}
    return {
        "timestep_embedder": embedder,
        **({"target_timestep_embedder": embedder} if cfg.flow_map else {}),
        "early_stream_modulations": modulations,
        "single_stream_modulations": modulations,
        "x_embedders": {mode: whole(matrix(cfg.in_channels, width)) for mode in (IMAGE, REFERENCE)},
        "context_embedder": whole(matrix(cfg.joint_attention_dim, width)),
        "mode_blocks": dict.fromkeys((IMAGE, REFERENCE), early),
        "txt_mode_blocks": early,
        "single_transformer_blocks": {str(i): block for i in range(cfg.num_single_layers)},
        "norm_out": {"linear": whole(matrix(width, 2 * width))},
        "proj_out": whole(matrix(width, cfg.in_channels)),
    }


def reference_ids(ids: Array) -> Array:
    """Return positions [B, R, 4] int32 of reference tokens from their index, row and column [B, R, 3]."""
    number, row, column = ids[..., 0], ids[..., 1], ids[..., 2]
    return jnp.stack([jnp.zeros_like(row), row, column, -number], axis=-1)


class Mode(NamedTuple):
    """Tokens of the image, of the references or of the text.

    Attributes:
        tokens: [B, T, D], after the blocks of their mode unless the model is a flow map.
        rope: their positions.
        lengths: number of tokens to attend to, int32 [B]; None for all.
    """

    tokens: Array
    rope: Rope
    lengths: Array | None = None


class Flux3Context(NamedTuple):
    """Inputs of the transformer besides the image; they are the same in all steps.

    Attributes:
        text: tokens of the text: its window, and padding that is not read.
        references: tokens of the references; None for none.
        image_rope: positions of the image.
        rope: positions of all tokens in the order of the joint blocks.
        order: index of each token of the joint blocks among image, references and text, int32 [B, T]: padding that is
            not read comes last; None to keep the order.
        lengths: number of tokens to attend to, int32 [B].
    """

    text: Mode
    references: Mode | None
    image_rope: Rope
    rope: Rope
    order: Array | None
    lengths: Array


def flux3_context(
    p: Params,
    text: Array,
    length: Array,
    width: Array,
    cfg: Flux3Config,
    *,
    tokens: int,
    references: Array | None = None,
    ids: Array | None = None,
    count: Array | None = None,
) -> Flux3Context:
    """Embed text and references and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``flux3_spec``.
        text: [B, S, ``joint_attention_dim``] in the dtype to compute in.
        length: number of tokens of each text, int32 [B]; the rest of its window is read, too.
        width: width of the images in tokens, int32 [B].
        cfg: the config.
        tokens: L, the number of tokens of an image.
        references: latents of reference images as tokens [B, R, ``in_channels``].
        ids: their positions, from ``reference_ids``, int32 [B, R, 4].
        count: number of reference tokens without padding, int32 [B].
    """
    batch, rows, _ = text.shape
    window = jnp.clip(-(-length // WINDOW), 1) * WINDOW
    row, column = grid_ids(tokens, width)
    zeros = jnp.zeros_like(row)
    places = [jnp.stack([zeros, row, column, zeros], axis=-1)]
    in_text = jnp.pad(jnp.broadcast_to(jnp.arange(rows)[None, :, None], (batch, rows, 1)), ((0, 0), (0, 0), (3, 0)))
    embedded = linear(p["context_embedder"], text)
    time = jax.nn.silu(_time(p, jnp.zeros(batch), text))
    mode, order, lengths = None, None, tokens + window
    if references is not None and ids is not None and count is not None:
        places.append(ids)
        references = linear(p["x_embedders"][REFERENCE], references.astype(text.dtype))
        mode = Mode(references, _rope(ids, cfg), jnp.maximum(count, 1))  # a slot without references reads padding
        mode = mode if cfg.flow_map else _early(p, REFERENCE, mode, time, cfg)
        index, image = jnp.arange(tokens + ids.shape[1] + rows)[None], tokens + ids.shape[1]
        unread = ((index >= tokens + count[:, None]) & (index < image)) | (index >= image + window[:, None])
        order, lengths = jnp.argsort(unread, axis=1, stable=True), lengths + count
    lines = Mode(embedded, _rope(in_text, cfg), window)
    lines = lines if cfg.flow_map else _early(p, TEXT, lines, time, cfg)
    joint = jnp.concatenate([*places, in_text], axis=1)
    if order is not None:
        joint = jnp.take_along_axis(joint, order[..., None], axis=1)
    return Flux3Context(lines, mode, _rope(places[0], cfg), _rope(joint, cfg), order, lengths)


def flux3(
    p: Params,
    x: Array,
    timestep: Array,
    context: Flux3Context,
    cfg: Flux3Config,
    *,
    target: Array | None = None,
) -> Array:
    """Predict the velocity (noise minus image) of noisy latents; a flow map predicts its mean over a step.

    Args:
        p: parameters as declared by ``flux3_spec``.
        x: latents as tokens [B, L, ``in_channels``] in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: result of ``flux3_context``.
        cfg: the config.
        target: the time that the step leads to [B], for a flow map.

    Returns:
        [B, L, ``in_channels``].
    """
    time, rest = _time(p, timestep, x), _time(p, jnp.zeros_like(timestep), x)
    if cfg.flow_map:
        assert target is not None
        leap = embedded_time(p["target_timestep_embedder"], target, x)[:, None]
        time, rest = time + leap, rest + leap
    now, clean = jax.nn.silu(time), jax.nn.silu(rest)
    tokens = x.shape[1]
    h = linear(p["x_embedders"][IMAGE], x)
    image = _early(p, IMAGE, Mode(h, context.image_rope), now, cfg)
    text, references = context.text, context.references
    if cfg.flow_map:
        text = _early(p, TEXT, text, clean, cfg)
        if references is not None:
            references = _early(p, REFERENCE, references, clean, cfg)
    modes = [(IMAGE, image, now), *([(REFERENCE, references, clean)] if references else []), (TEXT, text, clean)]
    h = jnp.concatenate([mode.tokens for _, mode, _ in modes], axis=1)
    kind = jnp.repeat(jnp.arange(len(modes)), np.array([mode.tokens.shape[1] for _, mode, _ in modes]))[None]
    if context.order is not None:
        h = jnp.take_along_axis(h, context.order[..., None], axis=1)
        kind = jnp.take_along_axis(jnp.broadcast_to(kind, context.order.shape), context.order, axis=1)
    each = [chunks(p["single_stream_modulations"][name], at, 3) for name, _, at in modes]
    modulation = tuple(_select(kind, list(parts)) for parts in zip(*each, strict=True))
    ahead = Ahead()
    for i in range(cfg.num_single_layers):
        block, where = ahead(p["single_transformer_blocks"][str(i)], h), f"single_transformer_blocks.{i}"
        h = parallel_block(block, h, modulation, context.rope, context.lengths, eps=cfg.eps, where=where)
    return output_layer(p, h[:, :tokens], now, eps=cfg.eps)


def _rope(ids: Array, cfg: Flux3Config) -> Rope:
    """Compute the rotary embedding; rows and columns count half."""
    positions = ids.astype(jnp.float32) * jnp.array([[[1.0, 0.5, 0.5, 1.0]]])
    return rotary_embedding(positions, cfg.axes_dims_rope, cfg.rope_theta)


def _time(p: Params, t: Array, x: Array) -> Array:
    return embedded_time(p["timestep_embedder"], t, x)[:, None]


def _early(p: Params, name: str, mode: Mode, time: Array, cfg: Flux3Config) -> Mode:
    """Apply the blocks of a mode, in which only tokens of that mode attend to each other."""
    h, ahead = mode.tokens, Ahead()
    path = "txt_mode_blocks" if name == TEXT else f"mode_blocks.{name}"
    blocks = p["txt_mode_blocks"] if name == TEXT else p["mode_blocks"][name]
    modulation = chunks(p["early_stream_modulations"][name], time, 3)
    for i in range(cfg.num_layers):
        block, where = ahead(blocks[str(i)], h), f"{path}.{i}"
        h = parallel_block(block, h, modulation, mode.rope, mode.lengths, eps=cfg.eps, where=where)
    return mode._replace(tokens=h)


def _select(kind: Array, parts: Sequence[Array]) -> Array:
    """Return the part [B, 1, D] of each token's mode: [B, T, D]."""
    chosen = parts[0]
    for i, part in enumerate(parts[1:], 1):
        chosen = jnp.where(kind[..., None] == i, part, chosen)
    return chosen


@dataclass(frozen=True)
class Flux3Denoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow, or its mean over a step.

    Attributes:
        cfg: its config.
    """

    cfg: Flux3Config

    @property
    def spec(self) -> Spec:
        return flux3_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        leaps = self.cfg.flow_map
        return Facts(packing=Packing(1), distilled=leaps, flow_map=leaps, edits=True, whole_reference=WHOLE_REFERENCE)

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        del latents, text, dtype
        return Inputs(columns={TARGET: jax.ShapeDtypeStruct((), jnp.float32)} if self.cfg.flow_map else {})

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Flux3Context:
        images: dict[str, Any] = {}
        if REFERENCES in conditions:
            references: Any = conditions[REFERENCES]
            images = {
                "references": references["tokens"],
                "ids": reference_ids(references["ids"]),
                "count": references["count"],
            }
        text, columns = conditions["text"].astype(compute_dtype(p)), conditions[COLUMNS]
        return flux3_context(p, text, conditions["length"], columns, self.cfg, tokens=latents[2], **images)

    def apply(self, p: Params, x: Array, row: Row, prepared: Flux3Context, memory: Any) -> tuple[Array, Any]:
        tokens, time = x[:, 0].astype(compute_dtype(p)), row["timestep"]
        target = row.get(TARGET, time) if self.cfg.flow_map else None  # by default the velocity at this time
        return flux3(p, tokens, time, prepared, self.cfg, target=target)[:, None], memory
