"""``AutoencoderTiny``: a small convolutional decoder that stands in for the VAE's where a glance is enough.

The architecture is that of TAESD (Ollin Boer Bohan, 2023) as diffusers stores it: blocks of three convolutions and a
sum, doubled by nearest neighbour, no normalisation and no attention. Its latents are those the UNet sees.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from canvax.convolution import convolve
from canvax.models.configs import TinyConfig
from canvax.nn import conv2d_spec, upsample_nearest
from canvax.params import Params, Spec
from canvax.types import Array

REACH = 3.0
"""Latents are bent into -3..3, by three times the tangent of a third."""


def tiny_spec(cfg: TinyConfig) -> Spec:
    """Parameters of encoder and decoder, numbered as the layers of a ``Sequential``, those without weights included."""
    return {"encoder": {"layers": _encoder_spec(cfg)}, "decoder": {"layers": _decoder_spec(cfg)}}


def tiny_decode(p: Params, latents: Array, cfg: TinyConfig) -> Array:
    """Latents -> images.

    Args:
        p: parameters as declared by :func:`tiny_spec`; only ``decoder`` is read.
        latents: [B, h, w, C], scaled as the UNet sees them.
        cfg: the config.

    Returns:
        [B, f h, f w, 3] in about 0..1, f being ``cfg.factor``.
    """
    layers, number = p["decoder"]["layers"], 2
    x = jnp.tanh(latents / REACH) * REACH
    x = jax.nn.relu(_conv(layers["0"], x))
    for level, blocks in enumerate(cfg.num_decoder_blocks):
        for _ in range(blocks):
            x = _block(layers[str(number)], x)
            number += 1
        if level < len(cfg.num_decoder_blocks) - 1:
            x = upsample_nearest(x, 2 * x.shape[1], 2 * x.shape[2])
            number += 1
        x = _conv(layers[str(number)], x)
        number += 1
    return x


def _block(p: Params, x: Array) -> Array:
    h = x
    for number in (0, 2, 4):
        h = _conv(p["conv"][str(number)], h)
        h = h if number == 4 else jax.nn.relu(h)
    return jax.nn.relu(h + x)


def _conv(p: Params, x: Array) -> Array:
    y = convolve(p["weight"], x)
    return y + p["bias"] if "bias" in p else y


def _decoder_spec(cfg: TinyConfig) -> Spec:
    widths = cfg.decoder_block_out_channels
    layers: list[Any] = [conv2d_spec(cfg.latent_channels, widths[0]), None]
    for level, (blocks, width) in enumerate(zip(cfg.num_decoder_blocks, widths, strict=True)):
        last = level == len(widths) - 1
        layers += [_block_spec(width)] * blocks
        layers += [conv2d_spec(width, cfg.out_channels)] if last else [None, _plain(conv2d_spec(width, width))]
    return _numbered(layers)


def _encoder_spec(cfg: TinyConfig) -> Spec:
    widths = cfg.encoder_block_out_channels
    layers: list[Any] = []
    for level, (blocks, width) in enumerate(zip(cfg.num_encoder_blocks, widths, strict=True)):
        layers += [conv2d_spec(cfg.in_channels, width) if level == 0 else _plain(conv2d_spec(width, width))]
        layers += [_block_spec(width)] * blocks
    return _numbered([*layers, conv2d_spec(widths[-1], cfg.latent_channels)])


def _block_spec(width: int) -> Spec:
    conv = conv2d_spec(width, width)
    return {"conv": _numbered([conv, None, conv, None, conv])}


def _plain(spec: Spec) -> Spec:
    return {"weight": spec["weight"]}


def _numbered(layers: list[Any]) -> Spec:
    return {str(i): layer for i, layer in enumerate(layers) if layer is not None}
