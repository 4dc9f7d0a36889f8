"""CLIP's text encoder (Radford et al. 2021): a causal pre-norm transformer over 77 tokens.

Stable Diffusion 1.x and 2.x have one. SDXL has two, which are read one layer earlier and whose features are
concatenated; the second also gives a pooled vector (Podell et al. 2023, section 2.1). SDXL's refiner has only the
second. Longer prompts are encoded in chunks, and the weights of words are applied on the host, so that neither
recompiles the encoder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import ClipTextConfig, ClipVisionConfig
from canvax.models.text import FIRST, SECOND, Conditions, Passes, Shapes, TextEncoder, TextEncoders
from canvax.nn import ACTIVATIONS, Ahead, embedding, embedding_spec, layer_norm, linear, linear_spec, norm_spec
from canvax.params import Axis, Params, Spec, whole
from canvax.prompts.chunks import COUNTS, Chunk, ChunkedWords, Mixture, chunk_count, extended, read_chunks
from canvax.prompts.grammar import Fragment
from canvax.types import Array, DType, HostArray


def text_encoder_spec(cfg: ClipTextConfig, *, projection: bool = False) -> Spec:
    """Declare the encoder's parameters, named as in released checkpoints; with ``projection`` for a pooled output."""
    spec: Spec = {
        "text_model": {
            "embeddings": {
                "token_embedding": embedding_spec(cfg.vocab_size, cfg.hidden_size),
                "position_embedding": embedding_spec(cfg.max_position_embeddings, cfg.hidden_size),
            },
            "encoder": {"layers": {str(i): layer_spec(cfg) for i in range(cfg.num_hidden_layers)}},
            "final_layer_norm": norm_spec(cfg.hidden_size),
        }
    }
    if projection:
        spec["text_projection"] = whole(linear_spec(cfg.hidden_size, cfg.projection_dim, bias=False))
    return spec


def text_encoder(p: Params, ids: Array, cfg: ClipTextConfig, *, skip: Array | int = 0) -> Array:
    """Encode token ids to features after the final layer norm, as Stable Diffusion 1.x and 2.x read them.

    Args:
        p: parameters as declared by ``text_encoder_spec``.
        ids: [B, T] integer ids, T at most ``max_position_embeddings``.
        cfg: the config.
        skip: number of last layers to skip (``clip_skip``), a number or [B]; an input, so its value never recompiles.

    Returns:
        [B, T, D] in the dtype of the parameters.
    """
    chosen, _ = hidden_states(p, ids, cfg, skip=skip)
    return layer_norm(p["text_model"]["final_layer_norm"], chosen, eps=cfg.layer_norm_eps)


def hidden_states(p: Params, ids: Array, cfg: ClipTextConfig, *, skip: Array | int = 0) -> tuple[Array, Array]:
    """Return the output of the layer ``skip`` before the last and of the last layer, each [B, T, D], not normalised."""
    p = p["text_model"]
    positions = p["embeddings"]["position_embedding"]["weight"][None, : ids.shape[1]]
    x = embedding(p["embeddings"]["token_embedding"], ids) + positions
    wanted = cfg.num_hidden_layers - jnp.asarray(skip, jnp.int32).reshape(-1, 1, 1)
    chosen = x
    with scope("text_encoder"):
        ahead = Ahead()
        for i in range(cfg.num_hidden_layers):
            x = layer(ahead(p["encoder"]["layers"][str(i)], x), x, cfg=cfg, where=f"layers.{i}")
            chosen = jnp.where(wanted == i + 1, x, chosen)
    return chosen, x


def end_of_text(p: Params, last: Array, ids: Array, cfg: ClipTextConfig) -> Array:
    """Return the end-of-text token of the last layer [B, T, D], normalised: [B, D]."""
    # Configs from before 2023 say 2, which is not the end of text. In these models it is the largest id of the
    # vocabulary.
    ends = ids if cfg.eos_token_id == 2 else ids == cfg.eos_token_id
    end = jnp.take_along_axis(last, jnp.argmax(ends, axis=1)[:, None, None], axis=1)[:, 0]
    return layer_norm(p["text_model"]["final_layer_norm"], end, eps=cfg.layer_norm_eps)


def pooled_text(p: Params, last: Array, ids: Array, cfg: ClipTextConfig) -> Array:
    """Return ``end_of_text``, projected: [B, P]."""
    return linear(p["text_projection"], end_of_text(p, last, ids, cfg))


def layer_spec(cfg: ClipTextConfig | ClipVisionConfig) -> Spec:
    """Declare one layer of a text or image encoder."""
    d, heads = cfg.hidden_size, Axis("heads", cfg.num_attention_heads)
    return {
        "layer_norm1": norm_spec(d),
        "self_attn": {
            "q_proj": linear_spec(d, d, ("embed", heads)),
            "k_proj": linear_spec(d, d, ("embed", heads)),
            "v_proj": linear_spec(d, d, ("embed", heads)),
            "out_proj": linear_spec(d, d, (heads, "embed")),
        },
        "layer_norm2": norm_spec(d),
        "mlp": {
            "fc1": linear_spec(d, cfg.intermediate_size, ("embed", "mlp")),
            "fc2": linear_spec(cfg.intermediate_size, d, ("mlp", "embed")),
        },
    }


@outlined
def layer(p: Params, x: Array, *, cfg: ClipTextConfig | ClipVisionConfig, causal: bool = True) -> Array:
    """Apply one layer of a text or image encoder, [B, T, D] -> [B, T, D]; ``causal`` masks later tokens."""
    a = p["self_attn"]
    h = layer_norm(p["layer_norm1"], x, eps=cfg.layer_norm_eps)
    split = (*x.shape[:2], cfg.num_attention_heads, -1)
    q, k, v = (linear(a[name], h).reshape(split) for name in ("q_proj", "k_proj", "v_proj"))
    x = x + linear(a["out_proj"], attention(q, k, v, causal=causal).reshape(x.shape))
    h = layer_norm(p["layer_norm2"], x, eps=cfg.layer_norm_eps)
    h = ACTIVATIONS[cfg.hidden_act](linear(p["mlp"]["fc1"], h))
    return x + linear(p["mlp"]["fc2"], h)


@dataclass(frozen=True)
class ClipEncoder(TextEncoder):
    """CLIP's text encoder; one run encodes one chunk of each prompt.

    Attributes:
        component: its key in ``params``.
        cfg: its config.
        early: features are those of the last layer but one, as SDXL was trained.
    """

    component: str
    cfg: ClipTextConfig
    early: bool = False

    @property
    def tokenizer(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.component.replace("text_encoder", "tokenizer")

    @property
    def spec(self) -> Spec:
        return text_encoder_spec(self.cfg, projection=self.component == SECOND)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, 77."""
        return self.cfg.max_position_embeddings

    @property
    def lengths(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(count * self.chunk for count in COUNTS)

    def inputs(self, length: int) -> Shapes:
        del length
        return {"ids": jax.ShapeDtypeStruct((self.chunk,), jnp.int32), "skip": jax.ShapeDtypeStruct((), jnp.int32)}

    def outputs(self, length: int, dtype: DType) -> Shapes:
        text = {"text": jax.ShapeDtypeStruct((length, self.cfg.hidden_size), dtype)}
        pooled = {"pooled": jax.ShapeDtypeStruct((self.cfg.projection_dim,), dtype)}
        return text | pooled if self.component == SECOND else text

    def encode(self, p: Params, ids: Array, skip: Array | int = 0) -> Conditions:
        """Encode a chunk of each prompt: ids [B, T], without the last ``skip`` layers."""
        if not self.early:
            return {"text": text_encoder(p, ids, self.cfg, skip=skip)}
        chosen, last = hidden_states(p, ids, self.cfg, skip=skip + 1)
        pooled = {"pooled": pooled_text(p, last, ids, self.cfg)} if self.component == SECOND else {}
        return {"text": chosen, **pooled}

    def room(self, length: int) -> int:
        return length // self.chunk * (self.chunk - 2)

    def fit(self, needed: Iterable[int], pixels: int | None = None) -> int:
        """Return the length that prompts of ``needed`` tokens are repeated up to."""
        del pixels
        return self.chunk * chunk_count(length // self.chunk for length in needed)

    def words(
        self, tokenizer: Any, pieces: Sequence[Fragment], options: Mapping[str, Any], images: Sequence[Any] = ()
    ) -> ChunkedWords:
        del images
        syntax, skip = options.get("prompt_syntax", "plain"), options.get("clip_skip", 0)
        return read_chunks(tokenizer, pieces, syntax, self.chunk, skip)

    def extended(self, words: ChunkedWords, length: int) -> ChunkedWords:
        return extended(words, length)

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        """Return the inputs of one chunk of each text; longer texts are cut."""
        del length, images
        return {"ids": tokenizer(texts, length=self.chunk), "skip": np.zeros(len(texts), np.int32)}

    def passes(self, tokenizer: Any, words: Sequence[ChunkedWords], length: int) -> Passes:
        del tokenizer
        if length == self.chunk and all(prompt.is_plain for prompt in words):
            return Passes([_inputs([prompt.variants[0].chunks[0] for prompt in words], words)])
        mixture = Mixture(words, length // self.chunk)
        return Passes([_inputs(chunks, words) for chunks in mixture.passes], mixture)

    def lengthened(self, text: HostArray, length: int) -> HostArray:
        return np.tile(text, (1, length // text.shape[1], 1))


@dataclass(frozen=True)
class PooledClip(TextEncoder):
    """CLIP's text encoder for a model that reads only its end-of-text token; longer prompts are cut, with a warning.

    Attributes:
        cfg: its config.
    """

    cfg: ClipTextConfig
    component = FIRST
    tokenizer = "tokenizer"

    @property
    def lengths(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.cfg.max_position_embeddings,)

    def room(self, length: int) -> int:
        return sys.maxsize

    @property
    def spec(self) -> Spec:
        return text_encoder_spec(self.cfg)

    def outputs(self, length: int, dtype: DType) -> Shapes:
        del length
        return {"pooled": jax.ShapeDtypeStruct((self.cfg.hidden_size,), dtype)}

    def count(self, tokenizer: Any, text: str, images: Sequence[Any]) -> int:
        return min(len(tokenizer.ids(text)) + 2, self.lengths[0])

    def encode(self, p: Params, ids: Array) -> Conditions:
        """Encode prompts: ids [B, T]."""
        return {"pooled": end_of_text(p, hidden_states(p, ids, self.cfg)[1], ids, self.cfg)}


def _inputs(chunks: Sequence[Chunk], words: Sequence[ChunkedWords]) -> dict[str, HostArray]:
    """Return the inputs of a chunk of each prompt."""
    arrays = {"ids": [ids for ids, _ in chunks], "skip": [prompt.skip for prompt in words]}
    return {name: np.array(array, np.int32) for name, array in arrays.items()}


def clip_encoders(first: ClipTextConfig | None, second: ClipTextConfig | None = None) -> TextEncoders:
    """Return the encoders of Stable Diffusion 1.x and 2.x (``first``), SDXL (both) or its refiner (``second``)."""
    parts = ((FIRST, first), (SECOND, second))
    early = second is not None
    return TextEncoders(tuple(ClipEncoder(name, cfg, early) for name, cfg in parts if cfg is not None))


def clip_configs(text: TextEncoders) -> dict[str, ClipTextConfig]:
    """Return the configs of the CLIP encoders by component."""
    return {encoder.component: encoder.cfg for encoder in text.encoders if isinstance(encoder, ClipEncoder)}


def usual_layer(text: TextEncoders) -> int:
    """Return the layer that the model reads without ``clip_skip``, counted from the end as A1111 and ComfyUI count."""
    return 2 if any(isinstance(encoder, ClipEncoder) and encoder.early for encoder in text.encoders) else 1


def most_skipped(text: TextEncoders) -> int:
    """Return the largest ``clip_skip``; 0 without CLIP encoders."""
    return min((cfg.num_hidden_layers - 1 for cfg in clip_configs(text).values()), default=0)
