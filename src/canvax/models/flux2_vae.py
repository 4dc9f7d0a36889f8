"""The autoencoder of FLUX.2: ``AutoencoderKL`` with 2 x 2 latents per token, normalised by stored statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from canvax.models.configs import Config, Count, Epsilon, Layers, Levels, Names, VaeConfig
from canvax.models.decode import Autoencoder, widened
from canvax.models.dit import pack, unpack
from canvax.models.vae import vae_decode, vae_decode_tiled, vae_encode, vae_encode_tiled, vae_spec
from canvax.params import Param, Params, Spec
from canvax.types import Array

UNUSED = ("bn.num_batches_tracked",)
"""Arrays of a checkpoint that are not parameters."""


@dataclass(frozen=True)
class Flux2VaeConfig(Config):
    """``AutoencoderKLFlux2``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "AutoencoderKLFlux2"

    in_channels: Count = 3
    out_channels: Count = 3
    down_block_types: Names = ("DownEncoderBlock2D",) * 4
    up_block_types: Names = ("UpDecoderBlock2D",) * 4
    block_out_channels: Levels = (128, 256, 512, 512)
    decoder_block_out_channels: Levels | None = None
    layers_per_block: Layers = 2
    latent_channels: Count = 32
    norm_num_groups: Count = 32
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    batch_norm_eps: Epsilon = 1e-4

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"act_fn": ("silu",), "patch_size": ((2, 2),)}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"sample_size", "batch_norm_momentum"})

    def __post_init__(self) -> None:
        _ = self.encoder, self.decoder  # of the check below

    @property
    def encoder(self) -> VaeConfig:
        """Config of the encoder, an ``AutoencoderKL`` without a scaling factor: the statistics replace it."""
        shared = {field.name for field in dataclasses.fields(VaeConfig)}
        values = {name: value for name, value in vars(self).items() if name in shared}
        return VaeConfig(**values, scaling_factor=1.0)

    @property
    def decoder(self) -> VaeConfig:
        """Config of the decoder, which may be narrower."""
        channels = self.decoder_block_out_channels or self.block_out_channels
        return dataclasses.replace(self.encoder, block_out_channels=channels)

    @property
    def factor(self) -> int:
        """Pixels per token along an axis: 16."""
        return 2 * self.encoder.factor

    @property
    def channels(self) -> int:
        """Channels of a token: 128."""
        return 4 * self.latent_channels


def flux2_vae_spec(cfg: Flux2VaeConfig) -> Spec:
    """Declare the parameters of encoder and decoder, and the statistics of latents, which are float32."""
    spec = vae_spec(cfg.encoder) | {"decoder": vae_spec(cfg.decoder)["decoder"]}
    mean = Param((cfg.channels,), (None,), init="zeros", dtype="float32")
    return spec | {"bn": {"running_mean": mean, "running_var": dataclasses.replace(mean, init="ones")}}


def flux2_vae_decode(p: Params, latents: Array, cfg: Flux2VaeConfig, *, tiled: bool = False) -> Array:
    """Decode normalised latents [B, h, w, 128] to images [B, 16h, 16w, 3] in about -1..1."""
    mean, deviation = _statistics(p, cfg)
    z = (latents.astype(jnp.float32) * deviation + mean).astype(latents.dtype)
    return (vae_decode_tiled if tiled else vae_decode)(p, unpack(z, channels_first=True), cfg.decoder)


def flux2_vae_encode(p: Params, images: Array, cfg: Flux2VaeConfig, *, tiled: bool = False) -> tuple[Array, Array]:
    """Encode images [B, 16h, 16w, 3] in -1..1 to mean and log-variance of latents, [B, h, w, 128] float32."""
    moments = (vae_encode_tiled if tiled else vae_encode)(p, images, cfg.encoder)
    centre, logvar = (pack(part, channels_first=True).astype(jnp.float32) for part in moments)
    mean, deviation = _statistics(p, cfg)
    return (centre - mean) / deviation, logvar - 2 * jnp.log(deviation)


def _statistics(p: Params, cfg: Flux2VaeConfig) -> tuple[Array, Array]:
    """Return mean and standard deviation of the latents, each [1, 1, 1, 128] float32."""
    mean, variance = (p["bn"][name].astype(jnp.float32)[None, None, None] for name in ("running_mean", "running_var"))
    return mean, jax.lax.sqrt(variance + cfg.batch_norm_eps)


@dataclass(frozen=True)
class Flux2Autoencoder(Autoencoder):
    """The autoencoder, whose latents are tokens."""

    cfg: Flux2VaeConfig

    @property
    def spec(self) -> Spec:
        return flux2_vae_spec(self.cfg)

    @property
    def factor(self) -> int:
        return self.cfg.factor

    @property
    def latent_channels(self) -> int:
        return self.cfg.channels

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        p, dtype = widened(p, upcast=self.cfg.force_upcast)
        return flux2_vae_decode(p, latents.astype(dtype), self.cfg, tiled=tiled).astype(jnp.float32) / 2 + 0.5

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        p, dtype = widened(p, upcast=self.cfg.force_upcast)
        mean, logvar = flux2_vae_encode(p, (2 * images - 1).astype(dtype), self.cfg, tiled=tiled)
        return mean, jnp.exp(logvar / 2)
