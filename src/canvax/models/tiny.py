"""``AutoencoderTiny``: a small convolutional autoencoder instead of the VAE, often for previews.

The architecture is that of TAESD (Ollin Boer Bohan, 2023) as diffusers stores it: residual blocks of three convolutions
and nearest-neighbour doubling, without normalisation and attention. Its latents are those the UNet sees.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from canvax.models.configs import TinyConfig
from canvax.nn import conv2d, conv2d_of_doubled, conv2d_spec
from canvax.params import Params, Spec
from canvax.types import Array

REACH = 3.0
"""Latents are limited to -3..3 by ``3 tanh(x / 3)``."""


def tiny_spec(cfg: TinyConfig) -> Spec:
    """Declare the parameters, numbered as the layers of a ``Sequential``, including those without weights."""
    return {"encoder": {"layers": _encoder_spec(cfg)}, "decoder": {"layers": _decoder_spec(cfg)}}


def tiny_decode(p: Params, latents: Array, cfg: TinyConfig) -> Array:
    """Decode latents to images.

    Args:
        p: parameters as declared by ``tiny_spec``; only ``decoder`` is read.
        latents: [B, h, w, C], scaled as the UNet sees them.
        cfg: the config.

    Returns:
        [B, f h, f w, 3] in about 0..1, f being ``cfg.factor``.
    """
    layers, number = p["decoder"]["layers"], 2
    x = jnp.tanh(latents / REACH) * REACH
    x = jax.nn.relu(conv2d(layers["0"], x))
    for level, blocks in enumerate(cfg.num_decoder_blocks):
        for _ in range(blocks):
            x = _block(layers[str(number)], x)
            number += 1
        if level < len(cfg.num_decoder_blocks) - 1:
            x = conv2d_of_doubled(layers[str(number + 1)], x)
            number += 2
    return conv2d(layers[str(number)], x)


def tiny_encode(p: Params, images: Array, cfg: TinyConfig) -> Array:
    """Encode images [B, f h, f w, 3] in 0..1 to latents [B, h, w, C], scaled as the UNet sees them; deterministic."""
    layers, number, x = p["encoder"]["layers"], 0, images
    for level, blocks in enumerate(cfg.num_encoder_blocks):
        x = conv2d(layers[str(number)], x, stride=2 if level else 1)
        for i in range(blocks):
            x = _block(layers[str(number + 1 + i)], x)
        number += 1 + blocks
    return conv2d(layers[str(number)], x)


def _block(p: Params, x: Array) -> Array:
    h = jax.nn.relu(conv2d(p["conv"]["0"], x))
    h = jax.nn.relu(conv2d(p["conv"]["2"], h))
    return jax.nn.relu(conv2d(p["conv"]["4"], h) + x)


def _decoder_spec(cfg: TinyConfig) -> Spec:
    widths = cfg.decoder_block_out_channels
    layers: list[Any] = [conv2d_spec(cfg.latent_channels, widths[0]), None]
    for level, (blocks, width) in enumerate(zip(cfg.num_decoder_blocks, widths, strict=True)):
        last = level == len(widths) - 1
        layers += [_block_spec(width)] * blocks
        layers += [conv2d_spec(width, cfg.out_channels)] if last else [None, conv2d_spec(width, width, bias=False)]
    return _numbered(layers)


def _encoder_spec(cfg: TinyConfig) -> Spec:
    widths = cfg.encoder_block_out_channels
    layers: list[Any] = []
    for level, (blocks, width) in enumerate(zip(cfg.num_encoder_blocks, widths, strict=True)):
        layers += [conv2d_spec(width if level else cfg.in_channels, width, bias=level == 0)]
        layers += [_block_spec(width)] * blocks
    return _numbered([*layers, conv2d_spec(widths[-1], cfg.latent_channels)])


def _block_spec(width: int) -> Spec:
    conv = conv2d_spec(width, width)
    return {"conv": _numbered([conv, None, conv, None, conv])}


def _numbered(layers: list[Any]) -> Spec:
    return {str(i): layer for i, layer in enumerate(layers) if layer is not None}
