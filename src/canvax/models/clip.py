"""CLIP's text encoder (Radford et al. 2021): a causal pre-norm transformer over 77 tokens."""

from __future__ import annotations

import jax.numpy as jnp

from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import ClipTextConfig, ClipVisionConfig
from canvax.nn import ACTIVATIONS, embedding, embedding_spec, layer_norm, linear, linear_spec, norm_spec
from canvax.params import Axis, Params, Spec, whole
from canvax.types import Array


def text_encoder_spec(cfg: ClipTextConfig, *, projection: bool = False) -> Spec:
    """Parameters of the encoder, named as in the released checkpoints; ``projection`` for a pooled output."""
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
    """Token ids -> token features after the final layer norm, as Stable Diffusion 1.x and 2.x read them.

    Args:
        p: parameters as declared by ``text_encoder_spec``.
        ids: [B, T] integer ids, T at most ``max_position_embeddings``.
        cfg: the config.
        skip: layers left out at the end (``clip_skip``); data, so another value never compiles again.

    Returns:
        [B, T, D] in the dtype of the parameters.
    """
    chosen, _ = hidden_states(p, ids, cfg, skip=skip)
    return layer_norm(p["text_model"]["final_layer_norm"], chosen, eps=cfg.layer_norm_eps)


def hidden_states(p: Params, ids: Array, cfg: ClipTextConfig, *, skip: Array | int = 0) -> tuple[Array, Array]:
    """Output of the layer ``skip`` before the last and of the last one, both [B, T, D] and not normalised."""
    p = p["text_model"]
    positions = p["embeddings"]["position_embedding"]["weight"][None, : ids.shape[1]]
    x = embedding(p["embeddings"]["token_embedding"], ids) + positions
    wanted = cfg.num_hidden_layers - jnp.asarray(skip, jnp.int32)
    chosen = x
    with scope("text_encoder"):
        for i in range(cfg.num_hidden_layers):
            x = layer(p["encoder"]["layers"][str(i)], x, cfg=cfg, where=f"layers.{i}")
            chosen = jnp.where(wanted == i + 1, x, chosen)
    return chosen, x


def pooled_text(p: Params, last: Array, ids: Array, cfg: ClipTextConfig) -> Array:
    """The end-of-text token of the last layer [B, T, D], normalised and projected: [B, P], one vector for a prompt."""
    # Configs from before 2023 say 2, which is no end of text; there the largest id is, which CLIP's vocabulary ends in.
    ends = ids if cfg.eos_token_id == 2 else ids == cfg.eos_token_id
    end = jnp.take_along_axis(last, jnp.argmax(ends, axis=1)[:, None, None], axis=1)[:, 0]
    return linear(p["text_projection"], layer_norm(p["text_model"]["final_layer_norm"], end, eps=cfg.layer_norm_eps))


def layer_spec(cfg: ClipTextConfig | ClipVisionConfig) -> Spec:
    """Parameters of one layer of either encoder."""
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
    """One layer of either encoder, [B, T, D] -> [B, T, D]; ``causal``: a token sees those before it alone."""
    a = p["self_attn"]
    h = layer_norm(p["layer_norm1"], x, eps=cfg.layer_norm_eps)
    split = (*x.shape[:2], cfg.num_attention_heads, -1)
    q, k, v = (linear(a[name], h).reshape(split) for name in ("q_proj", "k_proj", "v_proj"))
    x = x + linear(a["out_proj"], attention(q, k, v, causal=causal).reshape(x.shape))
    h = layer_norm(p["layer_norm2"], x, eps=cfg.layer_norm_eps)
    h = ACTIVATIONS[cfg.hidden_act](linear(p["mlp"]["fc1"], h))
    return x + linear(p["mlp"]["fc2"], h)
