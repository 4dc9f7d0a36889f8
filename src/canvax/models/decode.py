"""The last of the three programs: from latents to images, by whichever autoencoder; and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from canvax.kernels.target import batch_shards
from canvax.models.configs import AutoencoderConfig, TinyConfig
from canvax.models.tiny import tiny_decode, tiny_encode, tiny_spec
from canvax.models.vae import divisor, in_tiles, vae_decode, vae_decode_tiled, vae_encode, vae_encode_tiled, vae_spec
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

DECODE_PIXELS = 1024 * 1024
"""Pixels that a device decodes at once, if there is more than one image: one of SDXL's, four of SD 1.5's.

One such image keeps a device busy. More at once only take more memory: 1.2 GiB for each of 1024 x 1024 pixels.
"""


TILE, OVERLAP = 1024, 128
"""Pixels of a tile of the tiny autoencoder, and what neighbours share: more than its convolutions reach."""


def autoencoder_spec(cfg: AutoencoderConfig) -> Spec:
    """Parameters of encoder and decoder."""
    return tiny_spec(cfg) if isinstance(cfg, TinyConfig) else vae_spec(cfg)


def decode_images(params: Params, latents: Array, *, cfg: AutoencoderConfig, tiled: bool = False) -> Array:
    """Latents [B, h, w, C] -> images [B, H, W, 3] float32 in 0..1, computed in the dtype of the parameters.

    In float32 instead where that is float16 and the config says that the VAE overflows in it. No more at once than
    ``DECODE_PIXELS``, where the devices are known.
    """
    params, dtype = _widened(params, cfg)

    def some(latents: Array) -> Array:
        latents = latents.astype(dtype)
        if isinstance(cfg, TinyConfig):
            return jnp.clip(_tiny_decode(params, latents, cfg, tiled=tiled).astype(jnp.float32), 0.0, 1.0)
        images = (vae_decode_tiled if tiled else vae_decode)(params, latents, cfg)
        return jnp.clip(images.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)

    pixels = latents.shape[1] * latents.shape[2] * cfg.factor**2
    return _in_micro_batches(some, latents, most=max(1, DECODE_PIXELS // pixels))


def encode_images(params: Params, images: Array, *, cfg: AutoencoderConfig, tiled: bool = False) -> tuple[Array, Array]:
    """Images [B, H, W, 3] float32 in 0..1 -> mean and standard deviation of their latents, each [B, h, w, C] float32.

    Both are scaled as the denoiser sees latents. Computed in the dtype of the parameters, with the exception of
    ``decode_images``.
    """
    params, dtype = _widened(params, cfg)
    if isinstance(cfg, TinyConfig):
        latents = _tiny_encode(params, images.astype(dtype), cfg, tiled=tiled).astype(jnp.float32)
        return latents, jnp.zeros_like(latents)
    moments = (vae_encode_tiled if tiled else vae_encode)(params, (2 * images - 1).astype(dtype), cfg)
    mean, logvar = (part.astype(jnp.float32) for part in moments)
    return (mean - cfg.shift) / cfg.scale, jnp.exp(logvar / 2) / cfg.scale


def _widened(params: Params, cfg: AutoencoderConfig) -> tuple[Params, DType]:
    """The parameters in the dtype that is computed in."""
    dtype = compute_dtype(params)
    if dtype == jnp.float16 and not isinstance(cfg, TinyConfig) and cfg.force_upcast:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), jnp.dtype(jnp.float32)
    return params, dtype


def _tiny_decode(params: Params, latents: Array, cfg: TinyConfig, *, tiled: bool) -> Array:
    part, factor = partial(tiny_decode, params, cfg=cfg), cfg.factor
    if not tiled:
        return part(latents)
    height, width = latents.shape[1:3]
    return in_tiles(part, latents, (height, width), TILE // factor, OVERLAP // factor, 1, factor, cfg.out_channels)


def _tiny_encode(params: Params, images: Array, cfg: TinyConfig, *, tiled: bool) -> Array:
    part, factor = partial(tiny_encode, params, cfg=cfg), cfg.factor
    if not tiled:
        return part(images)
    height, width = (side // factor for side in images.shape[1:3])
    return in_tiles(part, images, (height, width), TILE // factor, OVERLAP // factor, factor, 1, cfg.latent_channels)


def _in_micro_batches(function: Callable[[Array], Array], x: Array, *, most: int) -> Array:
    """``function`` of images [B, ...], ``most`` of each device's at a time."""
    shards = batch_shards()
    if shards is None or x.shape[0] <= shards * most:
        return function(x)
    each = x.shape[0] // shards
    now = divisor(each, most)

    def regrouped(x: Array, first: int, second: int) -> Array:
        """Its leading axes, of ``first`` x ``second`` x ``now``, with the first two changed about."""
        return x.reshape(first, second, now, *x.shape[-3:]).swapaxes(0, 1)

    turns = each // now
    y = jax.lax.map(function, regrouped(x, shards, turns).reshape(turns, shards * now, *x.shape[1:]))
    return regrouped(y, turns, shards).reshape(x.shape[0], *y.shape[2:])
