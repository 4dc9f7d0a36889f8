"""The program that decodes latents to images, for any autoencoder, and the one that encodes images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from canvax.errors import InputError, shown
from canvax.kernels.target import batch_shards
from canvax.models.configs import AutoencoderConfig, TinyConfig, VaeConfig
from canvax.models.denoiser import Packing
from canvax.models.tiny import tiny_decode, tiny_encode, tiny_spec
from canvax.models.vae import divisor, in_tiles, vae_decode, vae_decode_tiled, vae_encode, vae_encode_tiled, vae_spec
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

DECODE_PIXELS = 1024 * 1024
"""Pixels that a device decodes at once if there are several images: one of SDXL's, four of SD 1.5's.

One SDXL image keeps a device busy. More at once only take more memory: 1.2 GiB each.
"""


TILE, OVERLAP = 1024, 128
"""Pixels of the tiny autoencoder's tiles, and of their overlap, larger than its receptive field."""


class Autoencoder(Protocol):
    """An autoencoder: a frozen record whose ``repr`` determines its programs.

    It scales, shifts and packs latents for the denoiser.
    """

    @property
    def spec(self) -> Spec:
        """Parameters of encoder and decoder."""
        ...

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis."""
        ...

    @property
    def latent_channels(self) -> int:
        """C of the latents [B, h, w, C]."""
        ...

    @property
    def channels(self) -> int:
        """Channels of the images that it decodes: 3, or 4 with alpha."""
        return 3

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        """Decode latents [B, h, w, C] float32 to images [B, H, W, channels] float32, 0..1 up to rounding."""
        ...

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        """Encode images [B, H, W, 3] float32 in 0..1 to mean and deviation of latents, [B, h, w, C] float32."""
        ...


@dataclass(frozen=True)
class _Configured(Autoencoder):
    """Base of autoencoders whose config declares the shape of the latents."""

    cfg: AutoencoderConfig

    @property
    def factor(self) -> int:
        return self.cfg.factor

    @property
    def latent_channels(self) -> int:
        return self.cfg.latent_channels


@dataclass(frozen=True)
class KL(_Configured):
    """The autoencoder of latent diffusion; in float32 if its weights are float16 and it overflows in float16."""

    cfg: VaeConfig

    @property
    def spec(self) -> Spec:
        return vae_spec(self.cfg)

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        p, dtype = widened(p, upcast=self.cfg.force_upcast)
        images = (vae_decode_tiled if tiled else vae_decode)(p, latents.astype(dtype), self.cfg)
        return images.astype(jnp.float32) / 2 + 0.5

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        p, dtype = widened(p, upcast=self.cfg.force_upcast)
        moments = (vae_encode_tiled if tiled else vae_encode)(p, (2 * images - 1).astype(dtype), self.cfg)
        mean, logvar = (part.astype(jnp.float32) for part in moments)
        scale, shift = (jnp.array(each, mean.dtype, ndmin=4) for each in (self.cfg.scale, self.cfg.shift))
        return (mean - shift) / scale, jnp.exp(logvar / 2) / scale


def widened(p: Params, *, upcast: bool) -> tuple[Params, DType]:
    """Return the parameters in the dtype to compute in: with ``upcast``, float32 instead of float16."""
    dtype = compute_dtype(p)
    if dtype == jnp.float16 and upcast:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), p), jnp.dtype(jnp.float32)
    return p, dtype


@dataclass(frozen=True)
class Tiny(_Configured):
    """TAESD: a small autoencoder whose latents have no variance."""

    cfg: TinyConfig

    @property
    def spec(self) -> Spec:
        return tiny_spec(self.cfg)

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        latents = latents.astype(compute_dtype(p))
        part, factor = partial(tiny_decode, p, cfg=self.cfg), self.factor
        if tiled:
            (height, width), channels = latents.shape[1:3], self.cfg.out_channels
            images = in_tiles(part, latents, (height, width), TILE // factor, OVERLAP // factor, 1, factor, channels)
        else:
            images = part(latents)
        return images.astype(jnp.float32)

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        images = images.astype(compute_dtype(p))
        part, factor = partial(tiny_encode, p, cfg=self.cfg), self.factor
        if tiled:
            height, width = (side // factor for side in images.shape[1:3])
            tile, overlap, channels = TILE // factor, OVERLAP // factor, self.latent_channels
            latents = in_tiles(part, images, (height, width), tile, overlap, factor, 1, channels)
        else:
            latents = part(images)
        latents = latents.astype(jnp.float32)
        return latents, jnp.zeros_like(latents)


def autoencoder_of(cfg: AutoencoderConfig | Autoencoder) -> Autoencoder:
    """Return the autoencoder of a config; an ``Autoencoder`` is returned unchanged."""
    if isinstance(cfg, TinyConfig):
        return Tiny(cfg)
    return KL(cfg) if isinstance(cfg, VaeConfig) else cfg


def decode_images(
    params: Params, latents: Array, *, cfg: AutoencoderConfig | Autoencoder, tiled: bool = False
) -> Array:
    """Decode latents [B, h, w, C] to images [B, H, W, 3] float32 in 0..1, computed in the dtype of the parameters.

    If the devices are known, each decodes at most ``DECODE_PIXELS`` at once.

    Raises:
        InputError: the autoencoder returns other shapes than it declares.
    """
    autoencoder = autoencoder_of(cfg)

    def some(latents: Array) -> Array:
        images, (batch, height, width, _) = autoencoder.decode(params, latents, tiled=tiled), latents.shape
        sides = height * autoencoder.factor, width * autoencoder.factor
        images = _checked(autoencoder, "decode", images, (batch, *sides, channels_of(autoencoder)))
        return jnp.clip(images, 0.0, 1.0)

    pixels = latents.shape[1] * latents.shape[2] * autoencoder.factor**2
    return _in_micro_batches(some, latents, most=max(1, DECODE_PIXELS // pixels))


def decode_packed(params: Params, packed: Array, *, packing: Packing, size: tuple[int, int], **options: Any) -> Array:
    """Decode latents of ``size`` in the layout of the denoising loop, as ``decode_images``."""
    return decode_images(params, packing.unpack(packed, *size), **options)


def encode_images(
    params: Params, images: Array, *, cfg: AutoencoderConfig | Autoencoder, tiled: bool = False
) -> tuple[Array, Array]:
    """Encode images [B, H, W, 3] float32 in 0..1 to mean and deviation of latents, [B, h, w, C] float32.

    Both are scaled as the denoiser sees latents. Computed in the dtype of the parameters.

    Raises:
        InputError: the autoencoder returns other shapes than it declares.
    """
    autoencoder, (batch, height, width, _) = autoencoder_of(cfg), images.shape
    moments = autoencoder.encode(params, images, tiled=tiled)
    if not isinstance(moments, tuple | list) or len(moments) != 2:
        problem = f"returns {shown(moments)} from {type(autoencoder).__name__}.encode"
        raise InputError("vae", problem, cure="return (mean, deviation)")
    sides = height // autoencoder.factor, width // autoencoder.factor
    mean, deviation = (
        _checked(autoencoder, "encode", moment, (batch, *sides, autoencoder.latent_channels)) for moment in moments
    )
    return mean, deviation


def channels_of(autoencoder: Autoencoder) -> int:
    """Return the channels of its images; 3 for an autoencoder that does not declare them."""
    return getattr(autoencoder, "channels", 3)


def _checked(autoencoder: Autoencoder, method: str, array: Any, shape: tuple[int, ...]) -> Array:
    """Return an array from a method of a user's autoencoder as float32, after checking its shape.

    Raises:
        InputError: the shape is another.
    """
    if jnp.shape(array) != shape:
        kind = type(autoencoder).__name__
        problem = f"returns {shown(array)} from {kind}.{method}, and {[*shape]} follows from its attributes"
        cure = f"correct one of them, factor={autoencoder.factor} or latent_channels={autoencoder.latent_channels}"
        raise InputError("vae", problem, cure=cure)
    return jnp.asarray(array, jnp.float32)


def _in_micro_batches(function: Callable[[Array], Array], x: Array, *, most: int) -> Array:
    """Apply ``function`` to [B, ...], at most ``most`` images of each device at a time."""
    shards = batch_shards()
    if shards is None or x.shape[0] <= shards * most:
        return function(x)
    each = x.shape[0] // shards
    now = divisor(each, most)

    def regrouped(x: Array, first: int, second: int) -> Array:
        """Swap the first two of the leading axes ``first`` x ``second`` x ``now``."""
        return x.reshape(first, second, now, *x.shape[-3:]).swapaxes(0, 1)

    turns = each // now
    y = jax.lax.map(function, regrouped(x, shards, turns).reshape(turns, shards * now, *x.shape[1:]))
    return regrouped(y, turns, shards).reshape(x.shape[0], *y.shape[2:])
