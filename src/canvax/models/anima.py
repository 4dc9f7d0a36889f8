"""Anima (CircleStone Labs 2026): Cosmos-Predict2's transformer (NVIDIA 2025) for one frame, and its adapter of texts.

``CosmosTransformer3DModel`` and ``AnimaTextConditioner`` as pure functions. Blocks have self-attention of the image,
cross-attention to the text and a feed-forward, each with a modulation of low rank. The text has a row for each token of
T5's tokenizer: the adapter embeds these and attends to the last state of Qwen3-0.6B. T5 itself is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Factor, Ids, Layers
from canvax.models.denoiser import COLUMNS, Facts, Packing, Row, TransformerDenoiser
from canvax.models.dit import (
    IMAGE,
    Rope,
    grid_ids,
    layer_norm,
    modulated,
    qk_norm_spec,
    rms_norm,
    rms_norm_spec,
    rotary_embedding,
    rotate,
    self_attention_spec,
    sinusoids,
)
from canvax.models.text import Conditions, Shapes, TextEncoder, TextEncoders, TextInputs
from canvax.nn import Ahead, embedding, embedding_spec, gelu, linear, linear_spec
from canvax.params import Axis, Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType, HostArray

ADAPTER = "text_conditioner"
"""Component of the adapter of texts."""

EPS, QK_EPS = 1e-6, 1e-5
"""Epsilons of all normalisations, and of those of the transformer's queries and keys."""

ADAPTER_NAMES = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
"""Names of the adapter's projections and normalisations."""

THETA = 1e4
"""Base of the frequencies of rotary positions."""


@dataclass(frozen=True)
class CosmosConfig(Config):
    """``CosmosTransformer3DModel``: names are those of the diffusers config, defaults are Anima's."""

    CLASS: ClassVar[str] = "CosmosTransformer3DModel"

    in_channels: Count = 16
    out_channels: Count = 16
    num_attention_heads: Count = 16
    attention_head_dim: Count = 128
    num_layers: Layers = 28
    mlp_ratio: Factor = 4.0
    text_embed_dim: Count = 1024
    adaln_lora_dim: Count = 256
    rope_scale: tuple[Factor, ...] = (1.0, 4.0, 4.0)
    concat_padding_mask: bool = True

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": ((1, 2, 2),)}
    # The largest size, and sizes of inputs that are off: other fields turn them on.
    IGNORED: ClassVar[frozenset[str]] = frozenset({
        "max_size", "crossattn_proj_in_channels", "encoder_hidden_states_channels", "img_context_num_tokens",
        "img_context_dim_out",
    })  # fmt: skip

    def __post_init__(self) -> None:
        faults = [f"{self.in_channels} channels in, {self.out_channels} out"] * (self.in_channels != self.out_channels)
        if len(self.rope_scale) != 3:
            faults.append(f"rope_scale of {len(self.rope_scale)} axes")
        if self.attention_head_dim % 2 or self.attention_head_dim < 24:
            faults.append(f"attention_head_dim {self.attention_head_dim}")
        if faults:
            raise CheckpointError("CosmosConfig does not support " + "; ".join(faults))

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class AdapterConfig(Config):
    """``AnimaTextConditioner``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "AnimaTextConditioner"

    source_dim: Count = 1024
    target_dim: Count = 1024
    model_dim: Count = 1024
    num_layers: Layers = 6
    num_attention_heads: Count = 16
    mlp_ratio: Factor = 4.0
    target_vocab_size: Ids = 32128
    use_self_attention: bool = True
    min_sequence_length: Count = 512

    def __post_init__(self) -> None:
        if not self.use_self_attention or self.model_dim % (2 * self.num_attention_heads):
            raise CheckpointError(
                f"AdapterConfig does not support use_self_attention={self.use_self_attention} with "
                f"{self.num_attention_heads} heads of width {self.model_dim}"
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have an embedding."""
        return self.target_vocab_size

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.model_dim // self.num_attention_heads


def cosmos_spec(cfg: CosmosConfig) -> Spec:
    """Declare the transformer's parameters; none is a bias."""
    width, inner, rank = cfg.dim, int(cfg.dim * cfg.mlp_ratio), cfg.adaln_lora_dim
    line, heads = partial(linear_spec, bias=False), Axis("heads", cfg.num_attention_heads)

    def modulation(count: int) -> Spec:
        return whole({"linear_1": line(width, rank), "linear_2": line(rank, count * width)})

    own = self_attention_spec(width, cfg.num_attention_heads, cfg.attention_head_dim)
    block: Spec = {
        **{f"norm{i}": modulation(3) for i in (1, 2, 3)},
        "attn1": own,
        "attn2": own | {name: line(cfg.text_embed_dim, width, ("embed", heads)) for name in ("to_k", "to_v")},
        "ff": {"net": {"0": {"proj": line(width, inner, ("embed", "mlp"))}, "2": line(inner, width, ("mlp", "embed"))}},
    }
    return {
        "patch_embed": {"proj": whole(line(4 * (cfg.in_channels + cfg.concat_padding_mask), width))},
        "time_embed": whole({
            "t_embedder": {"linear_1": line(width, width), "linear_2": line(width, 3 * width)},
            "norm": rms_norm_spec(width),
        }),
        "transformer_blocks": {str(i): block for i in range(cfg.num_layers)},
        "norm_out": modulation(2),
        "proj_out": whole(line(width, 4 * cfg.out_channels)),
    }  # fmt: skip


def adapter_spec(cfg: AdapterConfig) -> Spec:
    """Declare the adapter's parameters."""
    width, inner, heads = cfg.model_dim, int(cfg.model_dim * cfg.mlp_ratio), Axis("heads", cfg.num_attention_heads)

    def attention(source: int) -> Spec:
        inputs = zip(ADAPTER_NAMES, (width, source, source), strict=False)
        return {
            **{name: linear_spec(size, width, ("embed", heads), bias=False) for name, size in inputs},
            "o_proj": linear_spec(width, width, (heads, "embed"), bias=False),
            **qk_norm_spec(cfg.head_dim, ADAPTER_NAMES[3:]),
        }

    block: Spec = {
        **{f"norm_{part}": rms_norm_spec(width) for part in ("self_attn", "cross_attn", "mlp")},
        "self_attn": attention(width),
        "cross_attn": attention(cfg.source_dim),
        "mlp": {"0": linear_spec(width, inner, ("embed", "mlp")), "2": linear_spec(inner, width, ("mlp", "embed"))},
    }
    return {
        "embed": embedding_spec(cfg.target_vocab_size, cfg.target_dim),
        **({"in_proj": linear_spec(cfg.target_dim, width)} if width != cfg.target_dim else {}),
        "blocks": {str(i): block for i in range(cfg.num_layers)},
        "out_proj": linear_spec(width, cfg.target_dim),
        "norm": rms_norm_spec(cfg.target_dim),
    }


def adapter(p: Params, source: Array, source_lengths: Array, ids: Array, lengths: Array, cfg: AdapterConfig) -> Array:
    """Map a text to the rows that the transformer reads.

    Args:
        p: parameters as declared by ``adapter_spec``.
        source: states of the language model [B, S, ``source_dim``].
        source_lengths: rows of it without padding, int32 [B]; for 0 the adapter reads no state.
        ids: ids of T5's tokenizer [B, T].
        lengths: those without padding, int32 [B]; the rows after them are 0.
        cfg: the config.

    Returns:
        [B, T, ``target_dim``].
    """
    source = jnp.where((jnp.arange(source.shape[1])[None] < source_lengths[:, None])[..., None], source, 0)
    source_lengths, at_least_one = jnp.maximum(source_lengths, 1), jnp.maximum(lengths, 1)
    own, others = (
        rotary_embedding(jnp.arange(tokens)[None, :, None], (cfg.head_dim,), THETA)
        for tokens in (ids.shape[1], source.shape[1])
    )
    h = embedding(p["embed"], ids).astype(source.dtype)
    h = linear(p["in_proj"], h) if "in_proj" in p else h
    with scope("text_conditioner"):
        ahead = Ahead()
        for i in range(cfg.num_layers):
            block = ahead(p["blocks"][str(i)], h)
            h = _adapter_block(block, h, source, (own, others), at_least_one, source_lengths, where=f"blocks.{i}")
    h = rms_norm(p["norm"], linear(p["out_proj"], h), eps=EPS)
    return jnp.where((jnp.arange(ids.shape[1])[None] < lengths[:, None])[..., None], h, 0)


@outlined
def _adapter_block(
    p: Params, x: Array, source: Array, ropes: tuple[Rope, Rope], lengths: Array, source_lengths: Array
) -> Array:
    """Apply self-attention [B, T, D], cross-attention to ``source`` [B, S, C] and a feed-forward."""
    h, rest = rms_norm(p["norm_self_attn"], x, eps=EPS), {"names": ADAPTER_NAMES, "eps": EPS}
    y = _attended(p, "self_attn", h, h, (ropes[0], ropes[0]), lengths, **rest)
    x = x + linear(p["self_attn"]["o_proj"], y)
    h = rms_norm(p["norm_cross_attn"], x, eps=EPS)
    y = _attended(p, "cross_attn", h, source, ropes, source_lengths, **rest)
    x = x + linear(p["cross_attn"]["o_proj"], y)
    h = rms_norm(p["norm_mlp"], x, eps=EPS)
    return x + linear(p["mlp"]["2"], gelu(linear(p["mlp"]["0"], h)))


def _attended(
    p: Params, layer: str, x: Array, source: Array, ropes: tuple[Rope, Rope] | None = None,
    lengths: Array | None = None, *, names: tuple[str, ...] = IMAGE, eps: float = QK_EPS,
) -> Array:  # fmt: skip
    """Return attention of ``x`` [B, T, D] to the first ``lengths`` [B] rows of ``source`` [B, S, C], [B, T, D].

    ``ropes`` are the positions of both, and ``names`` those of the projections and normalisations.
    """
    p = p[layer]
    head_dim = p[names[3]]["weight"].shape[0]
    parts = zip(names[:3], (x, source, source), strict=True)
    q, k, v = (linear(p[name], part).reshape(*part.shape[:2], -1, head_dim) for name, part in parts)
    q, k = rms_norm(p[names[3]], q, eps=eps), rms_norm(p[names[4]], k, eps=eps)
    if ropes:
        q, k = rotate(q, ropes[0]), rotate(k, ropes[1])
    with scope(layer):
        return attention(q, k, v, lengths=lengths).reshape(*x.shape[:2], -1)


def positions(tokens: int, width: Array, cfg: CosmosConfig) -> Rope:
    """Compute the positions of an image of ``tokens`` that is ``width`` [B] tokens wide.

    ``rope_scale`` stretches the lowest frequency of an axis by a factor, and the others less.
    """
    row, column = grid_ids(tokens, width)
    side = cfg.attention_head_dim // 6 * 2
    sizes = cfg.attention_head_dim - 2 * side, side, side
    ropes = [
        rotary_embedding(ids[..., None], (size,), THETA * scale ** (size / (size - 2)))
        for ids, size, scale in zip((jnp.zeros_like(row), row, column), sizes, cfg.rope_scale, strict=True)
    ]
    return Rope(*(jnp.concatenate(parts, axis=-1) for parts in zip(*ropes, strict=True)))


def cosmos(p: Params, x: Array, timestep: Array, text: Array, rope: Rope, cfg: CosmosConfig) -> Array:
    """Predict the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``cosmos_spec``.
        x: latents as tokens [B, L, 4 ``in_channels``], from ``pack`` with channels first, in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        text: [B, S, ``text_embed_dim``], all of which is read.
        rope: positions of the image.
        cfg: the config.

    Returns:
        [B, L, 4 ``out_channels``].
    """
    features = sinusoids(timestep / 1000, cfg.dim).astype(x.dtype)
    embedder = p["time_embed"]["t_embedder"]
    shared = linear(embedder["linear_2"], jax.nn.silu(linear(embedder["linear_1"], features)))[:, None]
    time = jax.nn.silu(rms_norm(p["time_embed"]["norm"], features, eps=EPS))[:, None]
    # The mask of padding, which is the last channel, is 0 everywhere.
    h = linear(p["patch_embed"]["proj"], jnp.pad(x, ((0, 0), (0, 0), (0, 4 * cfg.concat_padding_mask))))
    h = h.astype(jnp.float32) if h.dtype == jnp.float16 else h  # its sums exceed float16
    ahead = Ahead()
    for i in range(cfg.num_layers):
        block = ahead(p["transformer_blocks"][str(i)], h)
        h = _block(block, h, time, shared, text, rope, where=f"transformer_blocks.{i}")
    h = linear(p["proj_out"], _modulated(p["norm_out"], h, time, shared)[0])
    # The transformer writes the features of a token in the order (row, column, channel).
    return h.reshape(*h.shape[:2], 4, cfg.out_channels).swapaxes(2, 3).reshape(h.shape)


def _modulated(p: Params, x: Array, time: Array, shared: Array) -> list[Array]:
    """Return ``x`` [B, L, D], normalised, scaled and shifted, and the gate [B, 1, D] if there is one."""
    own = linear(p["linear_2"], linear(p["linear_1"], time))
    shift, scale, *gate = jnp.split(own + shared[..., : own.shape[-1]], own.shape[-1] // x.shape[-1], axis=-1)
    return [modulated(layer_norm(x, eps=EPS).astype(time.dtype), shift, scale), *gate]


@outlined
def _block(p: Params, x: Array, time: Array, shared: Array, text: Array, rope: Rope) -> Array:
    """Apply self-attention [B, L, D], cross-attention to the text and a feed-forward to the residual stream."""
    h, gate = _modulated(p["norm1"], x, time, shared)
    y = linear(p["attn1"]["to_out"]["0"], _attended(p, "attn1", h, h, (rope, rope)))
    x = x + gate.astype(x.dtype) * y.astype(x.dtype)
    h, gate = _modulated(p["norm2"], x, time, shared)
    y = linear(p["attn2"]["to_out"]["0"], _attended(p, "attn2", h, text))
    x = x + gate.astype(x.dtype) * y.astype(x.dtype)
    h, gate = _modulated(p["norm3"], x, time, shared)
    y = linear(p["ff"]["net"]["2"], gelu(linear(p["ff"]["net"]["0"]["proj"], h)))
    return x + gate.astype(x.dtype) * y.astype(x.dtype)


@dataclass(frozen=True)
class TextAdapter(TextEncoder):
    """The adapter as a text encoder, which also reads the output of the language model.

    Attributes:
        cfg: its config.
    """

    cfg: AdapterConfig
    component = ADAPTER
    tokenizer = "t5_tokenizer"

    @property
    def lengths(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.cfg.min_sequence_length,)

    @property
    def spec(self) -> Spec:
        return adapter_spec(self.cfg)

    def inputs(self, length: int) -> Shapes:
        return super().inputs(length) | {"length": jax.ShapeDtypeStruct((), jnp.int32)}

    def outputs(self, length: int, dtype: DType) -> Shapes:
        return {"text": jax.ShapeDtypeStruct((length, self.cfg.target_dim), dtype)}

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        lengths = [len(tokenizer.ids(text)) for text in texts]
        return super().read(tokenizer, texts, length, images) | {"length": np.array(lengths, np.int32)}

    def encode(self, p: Params, ids: Array, length: Array, source: Conditions) -> Conditions:
        """Encode prompts: ids [B, T], of which the first ``length`` [B] are the prompt, with ``source`` of it."""
        return {"text": adapter(p, source["text"], source["length"], ids, length, self.cfg)}


class AnimaText(TextEncoders):
    """A language model, and the adapter that reads its output."""

    def encode(self, p: Params, inputs: TextInputs) -> tuple[Conditions, ...]:
        first, second = self.encoders
        source = first.encode(p[first.component], **inputs[first.component])
        source["text"] = source["text"].astype(compute_dtype(p[second.component]))
        return source, second.encode(p[second.component], **inputs[second.component], source=source)

    def join(self, outputs: Sequence[Any]) -> Any:
        return outputs[-1]

    def is_lengthened(self, lengths: Sequence[int]) -> bool:
        return True  # all texts have the same number of rows


@dataclass(frozen=True)
class CosmosDenoiser(TransformerDenoiser):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
        turbo: it was distilled to few steps without guidance.
    """

    cfg: CosmosConfig
    turbo: bool = False

    @property
    def spec(self) -> Spec:
        return cosmos_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(native_size=(128, 128), packing=Packing(2, channels_first=True))

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> tuple[Array, Rope]:
        return conditions["text"].astype(compute_dtype(p)), positions(latents[2], conditions[COLUMNS], self.cfg)

    def apply(self, p: Params, x: Array, row: Row, prepared: tuple[Array, Rope], memory: Any) -> tuple[Array, Any]:
        return cosmos(p, x[:, 0].astype(compute_dtype(p)), row["timestep"], *prepared, self.cfg)[:, None], memory
