"""A causal language model as a text encoder: Qwen3 and the text half of Qwen3-VL and Qwen2.5-VL (Qwen Team 2025).

Image models read the residual stream after some of its layers, or the normalised last state, but not the head. The spec
therefore ends at the last layer that is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Epsilon, Ids, Layers, Range
from canvax.models.dit import (
    Rope,
    attend_in_order,
    qk_norm_spec,
    rms_norm,
    rms_norm_spec,
    rotary_embedding,
    rotate,
    swiglu,
    swiglu_spec,
)
from canvax.models.text import FIRST, Conditions, Shapes, TextEncoder
from canvax.nn import Ahead, embedding, embedding_spec, linear, linear_spec
from canvax.params import Axis, Params, Spec
from canvax.types import Array, DType, HostArray

NORMALISED = ("qwen3", "qwen3_vl_text")
"""Model types that normalise queries and keys."""

BIASED = ("qwen2_5_vl_text", "qwen2_5_vl")
"""Model types whose queries, keys and values have biases."""


@dataclass(frozen=True)
class DecoderConfig(Config):
    """``Qwen3Model`` and related models: names are those of the transformers config."""

    model_type: str = "qwen3"
    vocab_size: Ids = 151936
    hidden_size: Count = 2560
    intermediate_size: Count = 9728
    num_hidden_layers: Layers = 36
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count | None = None
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Annotated[float, Range(1, 1e9)] = 1e6

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    # Other fields of a transformers config concern training and generation.
    STRICT = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed ``config.json``; of a vision-language model, its text half.

        Raises:
            CheckpointError: naming every field whose value is not supported.
        """
        config = dict(config.get("text_config") or config)
        # transformers 5 has one field for all settings of positions; earlier versions have a field for the base.
        positions = config.pop("rope_parameters", None) or config.pop("rope_scaling", None) or {}
        if "rope_theta" in positions:
            config["rope_theta"] = positions["rope_theta"]
        kind = positions.get("rope_type", positions.get("type", "default"))
        faults = [f"positions of the type {kind!r}"] if kind not in ("default", "mrope") else []
        faults += [f"{name} true" for name in ("use_sliding_window", "attention_bias") if config.get(name)]
        if faults:
            raise CheckpointError("DecoderConfig does not support " + ", ".join(faults))
        return super().from_dict(config)

    def __post_init__(self) -> None:
        faults = []
        if self.model_type not in NORMALISED + BIASED:
            faults.append(f"model_type {self.model_type!r} (supported: {', '.join(NORMALISED + BIASED)})")
        if self.num_attention_heads % self.num_key_value_heads:
            faults.append(f"{self.num_attention_heads} heads in {self.num_key_value_heads} groups")
        if self.width_of_head % 2 or (self.head_dim is None and self.hidden_size % self.num_attention_heads):
            faults.append(f"{self.num_attention_heads} heads of width {self.hidden_size}")
        if faults:
            raise CheckpointError("DecoderConfig does not support " + ", ".join(faults))

    @property
    def width_of_head(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def decoder_lm_spec(cfg: DecoderConfig, layers: int, *, normalised: bool = True) -> Spec:
    """Declare the embedding and the first ``layers`` layers, named as in ``Qwen3ForCausalLM``.

    If these are all layers, ``normalised`` includes the final normalisation.
    """
    spec: Spec = {
        "embed_tokens": embedding_spec(cfg.vocab_size, cfg.hidden_size),
        "layers": {str(i): _layer_spec(cfg) for i in range(layers)},
    }
    last = normalised and layers == cfg.num_hidden_layers
    return {"model": spec | ({"norm": rms_norm_spec(cfg.hidden_size)} if last else {})}


def _layer_spec(cfg: DecoderConfig) -> Spec:
    d, width = cfg.hidden_size, cfg.width_of_head
    heads, groups = Axis("heads", cfg.num_attention_heads), Axis("heads", cfg.num_key_value_heads)
    bias = cfg.model_type in BIASED
    return {
        "input_layernorm": rms_norm_spec(d),
        "self_attn": {
            "q_proj": linear_spec(d, heads.units * width, ("embed", heads), bias=bias),
            "k_proj": linear_spec(d, groups.units * width, ("embed", groups), bias=bias),
            "v_proj": linear_spec(d, groups.units * width, ("embed", groups), bias=bias),
            "o_proj": linear_spec(heads.units * width, d, (heads, "embed"), bias=False),
            **(qk_norm_spec(width, ("q_norm", "k_norm")) if cfg.model_type in NORMALISED else {}),
        },
        "post_attention_layernorm": rms_norm_spec(d),
        "mlp": swiglu_spec(d, cfg.intermediate_size, PROJECTIONS),
    }


class Seen(NamedTuple):
    """Images in prompts.

    Attributes:
        features: those that replace the embedding, then those that are added after the first layers, [B, S, D] each.
        slots: row of the features of each token [B, T] int32; -1 for text.
        rope: positions of all tokens.
    """

    features: Sequence[Array]
    slots: Array
    rope: Rope

    def added(self, i: int, h: Array) -> Array:
        """Return ``h`` [B, T, D] with the features ``i`` of the images; those for 0 replace the embedding."""
        if i >= len(self.features):
            return h
        rows = jnp.take_along_axis(self.features[i].astype(h.dtype), jnp.maximum(self.slots, 0)[:, :, None], axis=1)
        return jnp.where((self.slots >= 0)[:, :, None], rows + h if i else rows, h)


def decoder_lm(
    p: Params,
    ids: Array,
    lengths: Array,
    cfg: DecoderConfig,
    *,
    taps: tuple[int, ...],
    pad_position: int | None = None,
    seen: Seen | None = None,
) -> Array:
    """Encode token ids to the residual stream after some layers.

    After the model's last layer it is normalised if the parameters have the final normalisation.

    Args:
        p: parameters as declared by ``decoder_lm_spec``.
        ids: [B, T], each prompt followed by padding.
        lengths: tokens of each prompt without padding, int32 [B]. No token attends to padding, but padding has features
            too, which some models read.
        cfg: the config.
        taps: indices of layers, as in transformers' ``hidden_states``; 0 is the embedding.
        pad_position: position of all padding tokens; None to number them after the prompt.
        seen: images in the prompts.

    Returns:
        [B, T, taps, D] in the dtype of the parameters.
    """
    p = p["model"]
    positions = jnp.arange(ids.shape[1])[None]
    if pad_position is not None:
        positions = jnp.where(positions < lengths[:, None], positions, pad_position)
    rope = rotary_embedding(positions[..., None], (cfg.width_of_head,), cfg.rope_theta)
    h = embedding(p["embed_tokens"], ids)
    if seen:
        rope, h = seen.rope, seen.added(0, h)
    stream = [h]
    with scope("text_encoder"):
        ahead = Ahead()
        for i in range(max(taps)):
            layer = ahead(p["layers"][str(i)], h)
            h = _layer(layer, h, rope, lengths, cfg=cfg, long=seen is not None, where=f"layers.{i}")
            h = seen.added(i + 1, h) if seen else h
            stream.append(h)
    if "norm" in p:
        stream[-1] = rms_norm(p["norm"], h, eps=cfg.rms_norm_eps)
    return jnp.stack([stream[tap] for tap in taps], axis=2)


@outlined
def _layer(p: Params, x: Array, rope: Rope, lengths: Array, *, cfg: DecoderConfig, long: bool) -> Array:
    """Apply one pre-norm layer, [B, T, D] -> [B, T, D]."""
    a, eps = p["self_attn"], cfg.rms_norm_eps
    h = rms_norm(p["input_layernorm"], x, eps=eps)
    split = (*x.shape[:2], -1, cfg.width_of_head)
    q, k, v = (linear(a[name], h).reshape(split) for name in ("q_proj", "k_proj", "v_proj"))
    if cfg.model_type in NORMALISED:
        q, k = rms_norm(a["q_norm"], q, eps=eps), rms_norm(a["k_norm"], k, eps=eps)
    q, k = rotate(q, rope), rotate(k, rope)
    if long:
        h = attend_in_order(q, k, v, jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2]))
    else:
        h = attention(q, k, v, lengths=lengths, causal=True)
    x = x + linear(a["o_proj"], h.reshape(*x.shape[:2], -1))
    return x + swiglu(p["mlp"], rms_norm(p["post_attention_layernorm"], x, eps=eps), PROJECTIONS)


SHORT = (32, 64)
"""Text lengths for small images, of models that do not read padding."""


@dataclass(frozen=True)
class LanguageModel(TextEncoder):
    """A language model as a text encoder: the features of some of its layers, concatenated.

    Attributes:
        cfg: its config.
        tap: the last layer that is read, see ``decoder_lm``.
        earlier: the layers read before it.
        lengths: see ``TextEncoder``.
        most: number of tokens of the longest prompt.
        pad_position: see ``decoder_lm``.
        normalised: whether the output of the model's last layer is normalised.
        tokenizer: see ``TextEncoder``.
        short: see ``TextEncoder``.
    """

    cfg: DecoderConfig
    tap: int
    earlier: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (128, 256, 512)
    most: int = 512
    pad_position: int | None = None
    normalised: bool = True
    tokenizer: str = "tokenizer"
    short: tuple[int, ...] = field(default=(), repr=False, compare=False)  # no program depends on the others
    component = FIRST

    @property
    def spec(self) -> Spec:
        return decoder_lm_spec(self.cfg, self.tap, normalised=self.normalised)

    @property
    def width(self) -> int:
        """Channels of its features."""
        return (len(self.earlier) + 1) * self.cfg.hidden_size

    def inputs(self, length: int) -> Shapes:
        return {"ids": jax.ShapeDtypeStruct((length,), jnp.int32), "length": jax.ShapeDtypeStruct((), jnp.int32)}

    def outputs(self, length: int, dtype: DType) -> Shapes:
        text = jax.ShapeDtypeStruct((length, self.width), dtype)
        return {"text": text, "length": jax.ShapeDtypeStruct((), jnp.int32)}

    def room(self, length: int) -> int:
        return min(length, self.most)

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        del images
        lengths = [len(tokenizer.ids(text)) for text in texts]
        return {"ids": tokenizer(texts, length=length), "length": np.array(lengths, np.int32)}

    def encode(self, p: Params, ids: Array, length: Array) -> Conditions:
        """Encode prompts: ids [B, T], of which the first ``length`` [B] are the prompt."""
        taps = (*self.earlier, self.tap)
        text = decoder_lm(p, ids, length, self.cfg, taps=taps, pad_position=self.pad_position)
        return {"text": text.reshape(*ids.shape, self.width), "length": length}
