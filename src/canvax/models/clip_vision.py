"""CLIP's image encoder (Radford et al. 2021): a vision transformer over patches and a class token."""

from __future__ import annotations

import jax.numpy as jnp

from canvax.kernels.outline import scope
from canvax.models.clip import layer, layer_spec
from canvax.models.configs import ClipVisionConfig
from canvax.nn import Ahead, conv2d, conv2d_spec, embedding_spec, layer_norm, norm_spec
from canvax.params import Param, Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Standard deviation of the pixels that CLIP was trained on; ``MEAN`` is their mean."""


def vision_encoder_spec(cfg: ClipVisionConfig) -> Spec:
    """Declare the encoder's parameters, named as in released checkpoints (``pre_layrnorm`` is their spelling)."""
    return {
        "vision_model": {
            "embeddings": {
                "class_embedding": Param((cfg.hidden_size,), (None,), "normal"),
                "patch_embedding": whole(conv2d_spec(3, cfg.hidden_size, cfg.patch_size, bias=False)),
                "position_embedding": embedding_spec(cfg.tokens, cfg.hidden_size),
            },
            "pre_layrnorm": norm_spec(cfg.hidden_size),
            "encoder": {"layers": {str(i): layer_spec(cfg) for i in range(cfg.num_hidden_layers)}},
            "post_layernorm": norm_spec(cfg.hidden_size),
        }
    }


def vision_encoder(p: Params, images: Array, cfg: ClipVisionConfig) -> tuple[Array, Array]:
    """Encode images.

    Args:
        p: parameters as declared by ``vision_encoder_spec``.
        images: [B, S, S, 3] in 0..1, S the config's ``image_size``.
        cfg: the config.

    Returns:
        Features of all tokens before the last layer [B, 1 + patches, D], and the normalised class token [B, D].
    """
    p = p["vision_model"]
    dtype = compute_dtype(p)
    x = (images - jnp.array(MEAN, images.dtype, ndmin=4)) / jnp.array(STD, images.dtype, ndmin=4)
    x = conv2d(p["embeddings"]["patch_embedding"], x.astype(dtype), stride=cfg.patch_size, padding=(0, 0))
    x = x.reshape(x.shape[0], -1, cfg.hidden_size)
    image = jnp.broadcast_to(p["embeddings"]["class_embedding"], (x.shape[0], 1, cfg.hidden_size))
    x = jnp.concatenate([image, x], axis=1) + p["embeddings"]["position_embedding"]["weight"][None]
    x = layer_norm(p["pre_layrnorm"], x, eps=cfg.layer_norm_eps)
    before = x
    with scope("image_encoder"):
        ahead = Ahead()
        for i in range(cfg.num_hidden_layers):
            before = x
            x = layer(ahead(p["encoder"]["layers"][str(i)], x), x, cfg=cfg, causal=False, where=f"layers.{i}")
    return before, layer_norm(p["post_layernorm"], x[:, 0], eps=cfg.layer_norm_eps)
