"""T5's encoder (Raffel et al. 2020, version 1.1): ``T5EncoderModel`` as pure functions.

Attention has no scale and no positions but a bias for each distance of two tokens, which all layers share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Epsilon, Ids, Layers
from canvax.models.dit import rms_norm, rms_norm_spec
from canvax.models.text import FIRST, Conditions, Shapes, TextEncoder
from canvax.nn import Ahead, embedding, embedding_spec, linear, linear_spec
from canvax.params import Axis, Params, Spec
from canvax.types import Array, DType, HostArray

TEMPLATE = "{}</s>"
"""The end of a text follows it."""

_SHRINK = 1 / 64
"""Factor of the feed-forward's inner values in float16, whose sums overflow in the largest encoder."""


@dataclass(frozen=True)
class T5Config(Config):
    """``T5EncoderModel``: names and defaults are those of the transformers config, sizes those of the XXL encoder."""

    vocab_size: Ids = 32128
    d_model: Count = 4096
    d_kv: Count = 64
    d_ff: Count = 10240
    num_layers: Layers = 24
    num_heads: Count = 64
    relative_attention_num_buckets: Count = 32
    relative_attention_max_distance: Count = 128
    layer_norm_epsilon: Epsilon = 1e-6

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "model_type": ("t5",), "feed_forward_proj": ("gated-gelu",), "dense_act_fn": ("gelu_new", "gelu_pytorch_tanh"),
    }  # fmt: skip
    # Other fields of a transformers config concern training and the decoder.
    STRICT = False


def t5_spec(cfg: T5Config) -> Spec:
    """Declare the encoder's parameters; none is a bias."""
    d, inner, heads = cfg.d_model, cfg.num_heads * cfg.d_kv, Axis("heads", cfg.num_heads)

    def block(first: bool) -> Spec:
        projections = {name: linear_spec(d, inner, ("embed", heads), bias=False) for name in "qkv"}
        table = {"relative_attention_bias": embedding_spec(cfg.relative_attention_num_buckets, cfg.num_heads)}
        products = {name: linear_spec(d, cfg.d_ff, ("embed", "mlp"), bias=False) for name in ("wi_0", "wi_1")}
        return {"layer": {
            "0": {
                "SelfAttention": projections | {"o": linear_spec(inner, d, (heads, "embed"), bias=False)}
                | (table if first else {}),
                "layer_norm": rms_norm_spec(d),
            },
            "1": {
                "DenseReluDense": products | {"wo": linear_spec(cfg.d_ff, d, ("mlp", "embed"), bias=False)},
                "layer_norm": rms_norm_spec(d),
            },
        }}  # fmt: skip

    blocks: Spec = {str(i): block(i == 0) for i in range(cfg.num_layers)}
    return {
        "shared": embedding_spec(cfg.vocab_size, d),
        "encoder": {"block": blocks, "final_layer_norm": rms_norm_spec(d)},
    }


def distance_buckets(tokens: int, cfg: T5Config) -> HostArray:
    """Return the row of the table of biases for each query and key, int32 [T, T].

    The second half of the rows is for later keys. The first half of either is for small distances, the second for
    logarithmic ranges up to ``relative_attention_max_distance``.
    """
    each = cfg.relative_attention_num_buckets // 2
    exact = each // 2
    distance = np.arange(tokens)[None] - np.arange(tokens)[:, None]
    size = np.abs(distance)
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / exact) / np.float32(
        math.log(cfg.relative_attention_max_distance / exact)
    )
    far = np.minimum(exact + (ratio * (each - exact)).astype(np.int32), each - 1)
    return (each * (distance > 0) + np.where(size < exact, size, far)).astype(np.int32)


def t5(p: Params, ids: Array, cfg: T5Config, *, lengths: Array | None = None) -> Array:
    """Encode token ids [B, T] to features [B, T, D] in the dtype of the parameters.

    The residual stream is float32. No token attends to those after the first ``lengths`` [B]; None for all.
    """
    table = p["encoder"]["block"]["0"]["layer"]["0"]["SelfAttention"]["relative_attention_bias"]
    h = embedding(p["shared"], ids)
    bias = embedding(table, jnp.asarray(distance_buckets(ids.shape[1], cfg))).transpose(2, 0, 1)[None]
    dtype, h = h.dtype, h.astype(jnp.float32)
    with scope("text_encoder"):
        ahead = Ahead()
        for i in range(cfg.num_layers):
            block = ahead(p["encoder"]["block"][str(i)]["layer"], h)
            h = _block(block, h, bias, lengths, cfg=cfg, dtype=dtype, where=f"block.{i}")
    return rms_norm(p["encoder"]["final_layer_norm"], h, eps=cfg.layer_norm_epsilon).astype(dtype)


@outlined
def _block(p: Params, x: Array, bias: Array, lengths: Array | None, *, cfg: T5Config, dtype: DType) -> Array:
    """Apply one pre-norm block to the residual stream [B, T, D] float32; products are of ``dtype``."""
    a, ff, eps = p["0"]["SelfAttention"], p["1"]["DenseReluDense"], cfg.layer_norm_epsilon
    h = rms_norm(p["0"]["layer_norm"], x, eps=eps).astype(dtype)
    q, k, v = (linear(a[name], h).reshape(*x.shape[:2], cfg.num_heads, cfg.d_kv) for name in "qkv")
    h = attention(q, k, v, bias=bias, scale=1.0, lengths=lengths)
    x = x + linear(a["o"], h.reshape(*x.shape[:2], -1)).astype(jnp.float32)
    h = rms_norm(p["1"]["layer_norm"], x, eps=eps).astype(dtype)
    shrink = _SHRINK if dtype == jnp.float16 else 1.0
    inner = jax.nn.gelu(linear(ff["wi_0"], h), approximate=True) * (linear(ff["wi_1"], h) * shrink)
    return x + linear(ff["wo"], inner).astype(jnp.float32) / shrink


@dataclass(frozen=True)
class T5Encoder(TextEncoder):
    """T5 as a text encoder.

    Attributes:
        cfg: its config.
        component: its key in ``params``.
        lengths: see ``TextEncoder``.
        masked: no token attends to padding, and the output has the ``length`` of each text. Otherwise padding is read.
    """

    cfg: T5Config
    component: str = FIRST
    lengths: tuple[int, ...] = (512,)
    masked: bool = False

    @property
    def tokenizer(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.component.replace("text_encoder", "tokenizer")

    @property
    def spec(self) -> Spec:
        return t5_spec(self.cfg)

    def inputs(self, length: int) -> Shapes:
        return super().inputs(length) | ({"length": jax.ShapeDtypeStruct((), jnp.int32)} if self.masked else {})

    def outputs(self, length: int, dtype: DType) -> Shapes:
        text = {"text": jax.ShapeDtypeStruct((length, self.cfg.d_model), dtype)}
        return text | ({"length": jax.ShapeDtypeStruct((), jnp.int32)} if self.masked else {})

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        arrays = super().read(tokenizer, texts, length, images)
        lengths = np.array([len(tokenizer.ids(text)) for text in texts], np.int32)
        return arrays | ({"length": lengths} if self.masked else {})

    def encode(self, p: Params, ids: Array, length: Array | None = None) -> Conditions:
        """Encode prompts: ids [B, T], of which the first ``length`` [B] are the prompt."""
        text = {"text": t5(p, ids, self.cfg, lengths=None if length is None else jnp.maximum(length, 1))}
        return text if length is None else text | {"length": length}
