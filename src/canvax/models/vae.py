"""The autoencoder of latent diffusion (Rombach et al. 2022): ``AutoencoderKL`` as pure functions."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp

from canvax.models.blocks import (
    attend,
    attention_spec,
    downsample,
    downsample_spec,
    resnet_block,
    resnet_block_spec,
    upsample,
    upsample_spec,
)
from canvax.models.configs import VaeConfig
from canvax.nn import conv2d, conv2d_spec, group_norm, linear, linear_spec, norm_spec
from canvax.params import Params, Spec
from canvax.types import Array

NORM_EPS = 1e-6


def vae_spec(cfg: VaeConfig) -> Spec:
    """Parameters of encoder and decoder."""
    moments, latents = 2 * cfg.latent_channels, cfg.latent_channels
    spec: Spec = {"encoder": _encoder_spec(cfg), "decoder": _decoder_spec(cfg)}
    if cfg.use_quant_conv:
        spec["quant_conv"] = linear_spec(moments, moments, conv=True)
    if cfg.use_post_quant_conv:
        spec["post_quant_conv"] = linear_spec(latents, latents, conv=True)
    return spec


def vae_decode(p: Params, latents: Array, cfg: VaeConfig) -> Array:
    """Latents as the diffusion model sees them -> images.

    Args:
        p: parameters as declared by :func:`vae_spec`; only ``decoder`` and ``post_quant_conv`` are read.
        latents: [B, h, w, C], scaled (unit variance).
        cfg: the config.

    Returns:
        [B, 8h, 8w, 3] in about -1..1 (8 is ``cfg.factor``).
    """
    z = latents / cfg.scaling_factor + (cfg.shift_factor or 0.0)
    if cfg.use_post_quant_conv:
        z = linear(p["post_quant_conv"], z)
    p = p["decoder"]
    h = _mid_block(p["mid_block"], conv2d(p["conv_in"], z), cfg)
    for i in range(len(cfg.block_out_channels)):
        block = p["up_blocks"][str(i)]
        with jax.named_scope(f"decoder_up_{i}"):
            h = _resnets(block, h, cfg)
            if "upsamplers" in block:
                h = upsample(block["upsamplers"]["0"], h, 2 * h.shape[1], 2 * h.shape[2])
    return _head(p, h, cfg)


def vae_encode(p: Params, images: Array, cfg: VaeConfig) -> tuple[Array, Array]:
    """Images in -1..1 [B, 8h, 8w, 3] -> mean and log-variance of the latents, each [B, h, w, C], unscaled.

    The log-variance is clipped to -30..20 as the model was trained. Only ``encoder`` and ``quant_conv`` are read.
    """
    encoder = p["encoder"]
    h = conv2d(encoder["conv_in"], images)
    for i in range(len(cfg.block_out_channels)):
        block = encoder["down_blocks"][str(i)]
        with jax.named_scope(f"encoder_down_{i}"):
            h = _resnets(block, h, cfg)
            if "downsamplers" in block:
                h = downsample(block["downsamplers"]["0"], h, padding=(0, 1))
    moments = _head(encoder, _mid_block(encoder["mid_block"], h, cfg), cfg)
    if cfg.use_quant_conv:
        moments = linear(p["quant_conv"], moments)
    mean, logvar = jnp.split(moments, 2, axis=-1)
    return mean, jnp.clip(logvar, -30.0, 20.0)


def _encoder_spec(cfg: VaeConfig) -> Spec:
    channels = cfg.block_out_channels
    blocks = {}
    for i, (before, c) in enumerate(pairwise((channels[0], *channels))):
        blocks[str(i)] = {"resnets": _resnets_spec(before, c, cfg.layers_per_block, cfg)}
        if i < len(channels) - 1:
            blocks[str(i)]["downsamplers"] = {"0": downsample_spec(c)}
    return {
        "conv_in": conv2d_spec(cfg.in_channels, channels[0]),
        "down_blocks": blocks,
        "mid_block": _mid_spec(channels[-1], cfg),
        "conv_norm_out": norm_spec(channels[-1]),
        "conv_out": conv2d_spec(channels[-1], 2 * cfg.latent_channels),
    }


def _decoder_spec(cfg: VaeConfig) -> Spec:
    channels = cfg.block_out_channels[::-1]
    blocks = {}
    for i, (before, c) in enumerate(pairwise((channels[0], *channels))):
        blocks[str(i)] = {"resnets": _resnets_spec(before, c, cfg.layers_per_block + 1, cfg)}
        if i < len(channels) - 1:
            blocks[str(i)]["upsamplers"] = {"0": upsample_spec(c)}
    return {
        "conv_in": conv2d_spec(cfg.latent_channels, channels[0]),
        "mid_block": _mid_spec(channels[0], cfg),
        "up_blocks": blocks,
        "conv_norm_out": norm_spec(channels[-1]),
        "conv_out": conv2d_spec(channels[-1], cfg.out_channels),
    }


def _resnets_spec(inputs: int, outputs: int, layers: int, cfg: VaeConfig) -> Spec:
    widths = [inputs, *[outputs] * (layers - 1)]
    return {str(j): resnet_block_spec(c, outputs, None, groups=cfg.norm_num_groups) for j, c in enumerate(widths)}


def _resnets(p: Params, h: Array, cfg: VaeConfig) -> Array:
    for j in range(len(p["resnets"])):
        h = resnet_block(p["resnets"][str(j)], h, None, groups=cfg.norm_num_groups, eps=NORM_EPS)
    return h


def _mid_spec(channels: int, cfg: VaeConfig) -> Spec:
    spec: Spec = {"resnets": _resnets_spec(channels, channels, 2, cfg)}
    if cfg.mid_block_add_attention:
        attention = attention_spec(channels, channels, heads=1, bias=True)
        spec["attentions"] = {"0": {"group_norm": norm_spec(channels)} | attention}
    return spec


def _mid_block(p: Params, h: Array, cfg: VaeConfig) -> Array:
    with jax.named_scope("mid"):
        h = resnet_block(p["resnets"]["0"], h, None, groups=cfg.norm_num_groups, eps=NORM_EPS)
        if "attentions" in p:
            a = p["attentions"]["0"]
            tokens = group_norm(a["group_norm"], h, groups=cfg.norm_num_groups, eps=NORM_EPS)
            tokens = tokens.reshape(h.shape[0], -1, h.shape[-1])
            h = h + attend(a, tokens, tokens, heads=1).reshape(h.shape)
        return resnet_block(p["resnets"]["1"], h, None, groups=cfg.norm_num_groups, eps=NORM_EPS)


def _head(p: Params, h: Array, cfg: VaeConfig) -> Array:
    return conv2d(
        p["conv_out"], jax.nn.silu(group_norm(p["conv_norm_out"], h, groups=cfg.norm_num_groups, eps=NORM_EPS))
    )
