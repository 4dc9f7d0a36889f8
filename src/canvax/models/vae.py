"""The autoencoder of latent diffusion (Rombach et al. 2022): ``AutoencoderKL`` as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from canvax.kernels.outline import scope
from canvax.models.blocks import (
    attend_kv,
    attention_spec,
    downsample,
    downsample_spec,
    keys_and_values,
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

ATTENTION_QUERIES = 4096
"""Tokens that attend at once when an image is decoded in tiles: attention scores dominate the middle's memory."""


def vae_spec(cfg: VaeConfig) -> Spec:
    """Declare the parameters of encoder and decoder."""
    moments, latents = 2 * cfg.latent_channels, cfg.latent_channels
    spec: Spec = {"encoder": _encoder_spec(cfg), "decoder": _decoder_spec(cfg)}
    if cfg.use_quant_conv:
        spec["quant_conv"] = linear_spec(moments, moments, conv=True)
    if cfg.use_post_quant_conv:
        spec["post_quant_conv"] = linear_spec(latents, latents, conv=True)
    return spec


def vae_decode(p: Params, latents: Array, cfg: VaeConfig) -> Array:
    """Decode latents as the diffusion model sees them to images.

    Args:
        p: parameters as declared by ``vae_spec``; only ``decoder`` and ``post_quant_conv`` are read.
        latents: [B, h, w, C], scaled (unit variance).
        cfg: the config.

    Returns:
        [B, 8h, 8w, 3] in about -1..1 (8 is ``cfg.factor``).
    """
    return _rise(p["decoder"], vae_middle(p, latents, cfg), cfg)


def vae_decode_tiled(p: Params, latents: Array, cfg: VaeConfig, *, tile: int = 1024, overlap: int = 128) -> Array:
    """Decode as ``vae_decode``, in memory that grows only by the image itself.

    The middle, whose attention spans the image, is computed once at the size of the latents. The layers from there to
    pixels are computed tile by tile. Neighbours are blended over an overlap wider than the receptive field of the
    convolutions. Normalisations see one tile only, so the image differs slightly from that of ``vae_decode``.

    Args:
        p: see ``vae_decode``.
        latents: [B, h, w, C].
        cfg: the config.
        tile: maximum pixels of a tile's side; smaller images are not cut.
        overlap: minimum pixels that neighbours share.

    Returns:
        [B, 8h, 8w, 3].
    """
    height, width = latents.shape[1:3]
    h = vae_middle(p, latents, cfg, rows=divisor(height, ATTENTION_QUERIES // width))
    part = partial(_rise, p["decoder"], cfg=cfg)
    sides = (tile // cfg.factor, overlap // cfg.factor)
    return in_tiles(part, h, (height, width), *sides, 1, cfg.factor, cfg.out_channels).astype(latents.dtype)


def in_tiles(
    function: Callable[[Array], Array],
    x: Array,
    size: tuple[int, int],
    tile: int,
    overlap: int,
    inner: int,
    outer: int,
    channels: int,
) -> Array:
    """Apply ``function`` to [B, H, W, C] tile by tile, blended over the overlap, float32.

    ``size``, ``tile`` and ``overlap`` are in units of ``inner`` pixels of ``x`` and ``outer`` pixels of the result.
    """
    (tall, tops), (wide, lefts) = (even_tiles(length, tile, overlap) for length in size)
    down, across = (_ramp(side * outer, overlap * outer) for side in (tall, wide))
    corners = jnp.array([(top, left) for top in tops for left in lefts], jnp.int32)

    def add(whole: Array, corner: Array) -> tuple[Array, None]:
        begin = (0, corner[0] * inner, corner[1] * inner, 0)
        part = jax.lax.dynamic_slice(x, begin, (x.shape[0], tall * inner, wide * inner, x.shape[-1]))
        made = function(part).astype(jnp.float32) * down[None, :, None, None] * across[None, None, :, None]
        at = (0, corner[0] * outer, corner[1] * outer, 0)
        before = jax.lax.dynamic_slice(whole, at, made.shape)
        return jax.lax.dynamic_update_slice(whole, before + made, at), None

    with jax.named_scope("tiles"):
        blank = jnp.zeros((x.shape[0], size[0] * outer, size[1] * outer, channels), jnp.float32)
        whole, _ = jax.lax.scan(add, blank, corners)
        # Axis by axis: the product of both would be a constant of the image's size in the program.
        whole /= _covered(size[0] * outer, outer, tops, down)[None, :, None, None]
        return whole / _covered(size[1] * outer, outer, lefts, across)[None, None, :, None]


def even_tiles(size: int, tile: int, overlap: int) -> tuple[int, list[int]]:
    """Return the side of the fewest equal tiles of at most ``tile`` that cover an axis, and where they begin."""
    count = 1 if size <= tile else -(-(size - overlap) // (tile - overlap))
    side = -(-(size + (count - 1) * overlap) // count)
    return side, [round(i * (size - side) / max(count - 1, 1)) for i in range(count)]


def _ramp(size: int, overlap: int) -> np.ndarray:
    """Return the weight of each pixel along a tile's side; it rises over the overlap and is never 0."""
    inside = np.minimum(np.arange(size), np.arange(size)[::-1]) + 0.5
    return np.minimum(inside / overlap, 1.0).astype(np.float32)


def _covered(size: int, factor: int, starts: list[int], ramp: np.ndarray) -> np.ndarray:
    """Return the sum of the weights of all tiles at each pixel along an axis."""
    total = np.zeros(size, np.float32)
    for start in starts:
        total[start * factor :][: len(ramp)] += ramp
    return total


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``."""
    return next(size for size in range(max(1, min(number, most)), 0, -1) if number % size == 0)


def _unscaled(latents: Array, cfg: VaeConfig) -> Array:
    """Undo the scaling of latents to about unit variance."""
    if cfg.latents_std is not None:
        latents = latents * jnp.array(cfg.latents_std, latents.dtype, ndmin=4)
    latents = latents / cfg.scaling_factor + (cfg.shift_factor or 0.0)
    return latents if cfg.latents_mean is None else latents + jnp.array(cfg.latents_mean, latents.dtype, ndmin=4)


def vae_middle(p: Params, latents: Array, cfg: VaeConfig, rows: int | None = None) -> Array:
    """Compute the features before the upsampling layers, of the same height and width as the latents."""
    z = _unscaled(latents, cfg)
    if cfg.use_post_quant_conv:
        z = linear(p["post_quant_conv"], z)
    p = p["decoder"]
    return _mid_block(p["mid_block"], conv2d(p["conv_in"], z), cfg, rows)


def _rise(p: Params, h: Array, cfg: VaeConfig) -> Array:
    """Map features [B, h, w, C] to pixels [B, 8h, 8w, 3]."""
    return vae_head(p, up_blocks(p["up_blocks"], h, cfg), cfg)


def up_blocks(p: Params, h: Array, cfg: VaeConfig) -> Array:
    """Apply some or all of the decoder's blocks."""
    for i in sorted(p, key=int):
        with jax.named_scope(f"decoder_up_{i}"):
            h = _resnets(p[i], h, cfg)
            if "upsamplers" in p[i]:
                h = upsample(p[i]["upsamplers"]["0"], h, 2 * h.shape[1], 2 * h.shape[2])
    return h


def vae_encode(p: Params, images: Array, cfg: VaeConfig) -> tuple[Array, Array]:
    """Encode images [B, 8h, 8w, 3] in -1..1 to mean and log-variance of the latents, each [B, h, w, C], unscaled.

    The log-variance is clipped to -30..20 as the model was trained. Only ``encoder`` and ``quant_conv`` are read.
    """
    return _moments(p, _fall(p["encoder"], images, cfg), cfg)


def vae_encode_tiled(
    p: Params, images: Array, cfg: VaeConfig, *, tile: int = 1024, overlap: int = 128
) -> tuple[Array, Array]:
    """Encode as ``vae_encode``, in memory that does not grow with the image: tiles, then the middle."""
    height, width = (side // cfg.factor for side in images.shape[1:3])
    part = partial(_fall, p["encoder"], cfg=cfg)
    sides = (tile // cfg.factor, overlap // cfg.factor)
    h = in_tiles(part, images, (height, width), *sides, cfg.factor, 1, cfg.block_out_channels[-1])
    return _moments(p, h.astype(images.dtype), cfg, rows=divisor(height, ATTENTION_QUERIES // width))


def _fall(p: Params, images: Array, cfg: VaeConfig) -> Array:
    """Map pixels [B, 8h, 8w, 3] to features [B, h, w, C]."""
    return down_blocks(p["down_blocks"], conv2d(p["conv_in"], images), cfg)


def down_blocks(p: Params, h: Array, cfg: VaeConfig) -> Array:
    """Apply some or all of the encoder's blocks."""
    for i in sorted(p, key=int):
        with jax.named_scope(f"encoder_down_{i}"):
            h = _resnets(p[i], h, cfg)
            if "downsamplers" in p[i]:
                h = downsample(p[i]["downsamplers"]["0"], h, padding=(0, 1))
    return h


def _moments(p: Params, h: Array, cfg: VaeConfig, rows: int | None = None) -> tuple[Array, Array]:
    encoder = p["encoder"]
    moments = vae_head(encoder, _mid_block(encoder["mid_block"], h, cfg, rows), cfg)
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


def _mid_block(p: Params, h: Array, cfg: VaeConfig, rows: int | None = None) -> Array:
    """Apply two residual blocks with attention between them, for ``rows`` rows of the image at a time if not None."""
    with scope("vae.mid_block"):
        h = resnet_block(p["resnets"]["0"], h, None, groups=cfg.norm_num_groups, eps=NORM_EPS)
        if "attentions" in p:
            a = p["attentions"]["0"]
            tokens = group_norm(a["group_norm"], h, groups=cfg.norm_num_groups, eps=NORM_EPS)
            tokens = tokens.reshape(h.shape[0], -1, h.shape[-1])
            k, v = keys_and_values(a, tokens, heads=1)
            if rows is None:
                h = h + attend_kv(a, tokens, k, v).reshape(h.shape)
            else:
                parts = jnp.moveaxis(tokens.reshape(h.shape[0], -1, rows * h.shape[2], h.shape[-1]), 1, 0)
                parts = jax.lax.map(lambda part: attend_kv(a, part, k, v), parts)
                h = h + jnp.moveaxis(parts, 0, 1).reshape(h.shape)
        return resnet_block(p["resnets"]["1"], h, None, groups=cfg.norm_num_groups, eps=NORM_EPS)


def vae_head(p: Params, h: Array, cfg: VaeConfig) -> Array:
    """Apply the last normalisation and convolution of the encoder or the decoder."""
    norm = {"groups": cfg.norm_num_groups, "eps": NORM_EPS}
    return conv2d(p["conv_out"], group_norm(p["conv_norm_out"], h, **norm, activation=jax.nn.silu))
