"""The autoencoder of Qwen-Image and Wan 2.1 (Wan Team 2025) for one frame: ``AutoencoderKLQwenImage`` without time.

Its convolutions over frames are causal: for one frame each uses only its last tap in time, and layers that change the
number of frames have no effect. Checkpoints hold all taps; ``from_video`` selects those of one frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
from canvax.kernels.convolution import by_strips
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Depth, Factor, Levels, Number
from canvax.models.decode import TILE, Autoencoder, widened
from canvax.models.vae import in_tiles
from canvax.nn import conv2d, conv2d_of_doubled, conv2d_spec, linear, linear_spec
from canvax.params import Param, Params, Spec
from canvax.types import Array, HostArray

OVERLAP = 128
"""Pixels that neighbouring tiles share, more than the receptive field of the convolutions."""

UNUSED = "time_conv"
"""Marks of layers that change the number of frames, in names."""


@dataclass(frozen=True)
class WanVaeConfig(Config):
    """``AutoencoderKLQwenImage``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "AutoencoderKLQwenImage"

    base_dim: Count = 96
    z_dim: Count = 16
    dim_mult: Levels = (1, 2, 4, 4)
    num_res_blocks: Depth = 2
    input_channels: Count = 3
    latents_mean: tuple[Number, ...] = (
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
        -0.9497, 0.2503, -0.2921,
    )  # fmt: skip
    latents_std: tuple[Factor, ...] = (
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
        2.8251, 1.916,
    )  # fmt: skip

    # Halving of frames at a level, in either spelling; and fields of training.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"temperal_downsample", "temporal_downsample", "dropout"})

    def __post_init__(self) -> None:
        faults = statistics_faults(self)
        if any(width % 2 for width in self.widths[1:]):
            faults.append(f"widths {self.widths}, which are halved")
        if faults:
            raise CheckpointError("WanVaeConfig does not support " + "; ".join(faults))

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level."""
        return tuple(self.base_dim * times for times in self.dim_mult)

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis."""
        return 2 ** (len(self.dim_mult) - 1)


def statistics_faults(cfg: FrameConfig) -> list[str]:
    """Return the faults of mean and standard deviation of the latents that are not one for each channel."""
    return [
        f"{name} of {len(values)} channels with z_dim {cfg.z_dim}"
        for name, values in (("latents_mean", cfg.latents_mean), ("latents_std", cfg.latents_std))
        if len(values) != cfg.z_dim
    ]


def from_video(array: HostArray) -> HostArray:
    """Select one frame's part of a checkpoint's array: [O, I, 3, 3, 3] -> [O, I, 3, 3], [C, 1, 1, 1] -> [C]."""
    if array.ndim == 5:
        return array[:, :, -1]
    return array.reshape(-1) if array.shape[1:] in ((1, 1), (1, 1, 1)) else array


def wan_vae_spec(cfg: WanVaeConfig) -> Spec:
    """Declare the parameters of encoder and decoder, without those over time."""
    first, last = cfg.widths[0], cfg.widths[-1]
    down: list[Spec] = []
    for i, (before, width) in enumerate(pairwise((first, *cfg.widths))):
        down += [resnet_spec(before if j == 0 else width, width) for j in range(cfg.num_res_blocks)]
        if i < len(cfg.widths) - 1:
            down.append({"resample": {"1": conv2d_spec(width, width)}})
    up: list[Spec] = []
    for i, width in enumerate(cfg.widths[::-1]):
        before = last if i == 0 else cfg.widths[-i] // 2
        resnets = [resnet_spec(before if j == 0 else width, width) for j in range(cfg.num_res_blocks + 1)]
        up.append({"resnets": numbered(resnets)})
        if i < len(cfg.widths) - 1:
            up[-1]["upsamplers"] = {"0": {"resample": {"1": conv2d_spec(width, width // 2)}}}
    sides = (cfg.widths, cfg.widths)
    return encoder_and_decoder_spec(sides, down, up, pixels=cfg.input_channels, latents=cfg.z_dim)


def encoder_and_decoder_spec(
    sides: tuple[Sequence[int], Sequence[int]], down: Sequence[Spec], up: Sequence[Spec], *, pixels: int, latents: int
) -> Spec:
    """Return the parameters around the levels of encoder and decoder, whose widths are ``sides``."""
    fine, coarse, (first, last) = sides[0][0], sides[0][-1], (sides[1][0], sides[1][-1])
    return {
        "encoder": {
            "conv_in": conv2d_spec(pixels, fine),
            "down_blocks": numbered(down),
            "mid_block": mid_spec(coarse),
            "norm_out": norm_spec(coarse),
            "conv_out": conv2d_spec(coarse, 2 * latents),
        },
        "quant_conv": linear_spec(2 * latents, 2 * latents, conv=True),
        "post_quant_conv": linear_spec(latents, latents, conv=True),
        "decoder": {
            "conv_in": conv2d_spec(latents, last),
            "mid_block": mid_spec(last),
            "up_blocks": numbered(up),
            "norm_out": norm_spec(first),
            "conv_out": conv2d_spec(first, pixels),
        },
    }


def numbered(specs: Sequence[Spec]) -> Spec:
    """Return specs by their numbers."""
    return {str(i): spec for i, spec in enumerate(specs)}


def norm_spec(channels: int) -> Spec:
    """Return the scale of a normalisation."""
    return {"gamma": Param((channels,), (None,), init="ones")}


def resnet_spec(inputs: int, outputs: int) -> Spec:
    """Return the parameters of a residual block."""
    shortcut = {"conv_shortcut": linear_spec(inputs, outputs, conv=True)} if inputs != outputs else {}
    return {
        "norm1": norm_spec(inputs),
        "conv1": conv2d_spec(inputs, outputs),
        "norm2": norm_spec(outputs),
        "conv2": conv2d_spec(outputs, outputs),
        **shortcut,
    }


def mid_spec(channels: int) -> Spec:
    """Return the parameters of the middle."""
    attention = {
        "norm": norm_spec(channels),
        "to_qkv": linear_spec(channels, 3 * channels, conv=True),
        "proj": linear_spec(channels, channels, conv=True),
    }
    return {"resnets": numbered([resnet_spec(channels, channels)] * 2), "attentions": {"0": attention}}


def wan_vae_decode(p: Params, latents: Array, cfg: WanVaeConfig, *, tile: int | None = None) -> Array:
    """Decode latents as the denoiser sees them [B, h, w, C] to images [B, 8h, 8w, 3] in -1..1; see ``decode_frame``."""
    return decode_frame(p, latents, cfg, partial(_rise, p["decoder"], cfg=cfg), cfg.input_channels, tile=tile)


def wan_vae_encode(p: Params, images: Array, cfg: WanVaeConfig, *, tile: int | None = None) -> tuple[Array, Array]:
    """Encode images [B, 8h, 8w, 3] in -1..1 to mean and log-variance [B, h, w, C]; see ``encode_frame``."""
    return encode_frame(p, images, cfg, partial(_fall, p["encoder"]), tile=tile)


class FrameConfig(Protocol):
    """Declare the fields of a config that decoding and encoding read."""

    @property
    def z_dim(self) -> int: ...
    @property
    def latents_mean(self) -> tuple[float, ...]: ...
    @property
    def latents_std(self) -> tuple[float, ...]: ...
    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def factor(self) -> int: ...


def decode_frame(
    p: Params, latents: Array, cfg: FrameConfig, rise: Callable[[Array], Array], channels: int, *, tile: int | None
) -> Array:
    """Decode latents as the denoiser sees them [B, h, w, C] to images [B, H, W, channels] in -1..1.

    ``rise`` maps features to pixels. With ``tile``, decode in tiles of this many pixels, as
    ``canvax.models.vae.vae_decode_tiled``.
    """
    centre, deviation = _statistics(cfg, latents)
    z, p = linear(p["post_quant_conv"], latents * deviation + centre), p["decoder"]
    h = mid_block(p["mid_block"], conv2d(p["conv_in"], z))
    if tile is None:
        return rise(h)
    size, sides = (latents.shape[1], latents.shape[2]), (tile // cfg.factor, OVERLAP // cfg.factor)
    return in_tiles(rise, h, size, *sides, 1, cfg.factor, channels).astype(latents.dtype)


def encode_frame(
    p: Params, images: Array, cfg: FrameConfig, fall: Callable[[Array], Array], *, tile: int | None
) -> tuple[Array, Array]:
    """Encode images in -1..1 to mean and log-variance of normalised latents, each [B, h, w, C].

    ``fall`` maps pixels to features.
    """
    encoder = p["encoder"]
    if tile is None:
        h = fall(images)
    else:
        size = images.shape[1] // cfg.factor, images.shape[2] // cfg.factor
        sides = tile // cfg.factor, OVERLAP // cfg.factor
        h = in_tiles(fall, images, size, *sides, cfg.factor, 1, cfg.widths[-1]).astype(images.dtype)
    h = head(encoder, mid_block(encoder["mid_block"], h))
    mean, logvar = jnp.split(linear(p["quant_conv"], h), 2, axis=-1)
    centre, deviation = _statistics(cfg, mean)
    return (mean - centre) / deviation, jnp.clip(logvar, -30.0, 20.0) - 2 * jnp.log(deviation)


def _statistics(cfg: FrameConfig, x: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of the latents, each [1, 1, 1, C] in the dtype of ``x``."""
    return jnp.array(cfg.latents_mean, x.dtype, ndmin=4), jnp.array(cfg.latents_std, x.dtype, ndmin=4)


def _rise(p: Params, h: Array, cfg: WanVaeConfig) -> Array:
    """Map features [B, h, w, C] to pixels [B, 8h, 8w, 3]."""
    for i in range(len(cfg.widths)):
        block = p["up_blocks"][str(i)]
        with jax.named_scope(f"decoder_up_{i}"):
            for j in range(cfg.num_res_blocks + 1):
                h = resnet(block["resnets"][str(j)], h)
            if "upsamplers" in block:
                h = conv2d_of_doubled(block["upsamplers"]["0"]["resample"]["1"], h)
    return jnp.clip(head(p, h), -1.0, 1.0)


def _fall(p: Params, images: Array) -> Array:
    """Map pixels [B, 8h, 8w, 3] to features [B, h, w, C]."""
    h = conv2d(p["conv_in"], images)
    for i in range(len(p["down_blocks"])):
        layer = p["down_blocks"][str(i)]
        with jax.named_scope(f"encoder_down_{i}"):
            h = conv2d(layer["resample"]["1"], h, stride=2, padding=(0, 1)) if "resample" in layer else resnet(layer, h)
    return h


def head(p: Params, h: Array) -> Array:
    """Return the last convolution of features, normalised and activated."""
    return conv2d(p["conv_out"], jax.nn.silu(norm(p["norm_out"], h)))


def norm(p: Params, x: Array) -> Array:
    """Apply root-mean-square normalisation over the channels of a pixel, in float32."""
    x32 = x.astype(jnp.float32)
    length = jnp.maximum(jnp.linalg.norm(x32, axis=-1, keepdims=True), 1e-12)
    return (x32 / length * (x.shape[-1] ** 0.5 * p["gamma"].astype(jnp.float32)[None, None, None])).astype(x.dtype)


@outlined
def resnet(p: Params, x: Array) -> Array:
    """Apply a residual block, [B, h, w, Cin] -> [B, h, w, Cout]."""

    def block(x: Array) -> Array:
        h = conv2d(p["conv1"], jax.nn.silu(norm(p["norm1"], x)))
        h = conv2d(p["conv2"], jax.nn.silu(norm(p["norm2"], h)))
        return h + (linear(p["conv_shortcut"], x) if "conv_shortcut" in p else x)

    return by_strips(block, x, reach=2)


def mid_block(p: Params, x: Array) -> Array:
    """Apply two residual blocks with single-head attention between them."""
    with scope("vae.mid_block"):
        x, a = resnet(p["resnets"]["0"], x), p["attentions"]["0"]
        b, h, w, c = x.shape
        qkv = linear(a["to_qkv"], norm(a["norm"], x)).reshape(b, h * w, 3, 1, c)
        y = attention(*(qkv[:, :, i] for i in range(3)))
        return resnet(p["resnets"]["1"], x + linear(a["proj"], y.reshape(b, h, w, c)))


class FrameAutoencoder(Autoencoder):
    """Base of autoencoders of videos for one frame; computed in float32 if the weights are float16."""

    cfg: Any

    @property
    def factor(self) -> int:
        return self.cfg.factor

    @property
    def latent_channels(self) -> int:
        return self.cfg.z_dim

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        p, dtype = widened(p, upcast=True)
        images = self.decoded(p, latents.astype(dtype), TILE if tiled else None)
        return images.astype(jnp.float32) / 2 + 0.5

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        p, dtype = widened(p, upcast=True)
        moments = self.encoded(p, (2 * images - 1).astype(dtype), TILE if tiled else None)
        mean, logvar = (part.astype(jnp.float32) for part in moments)
        return mean, jnp.exp(logvar / 2)

    def decoded(self, p: Params, latents: Array, tile: int | None) -> Array:
        """Decode to images in -1..1, in the dtype of the parameters."""
        raise NotImplementedError

    def encoded(self, p: Params, images: Array, tile: int | None) -> tuple[Array, Array]:
        """Encode images in -1..1 to mean and log-variance, in the dtype of the parameters."""
        raise NotImplementedError


@dataclass(frozen=True)
class WanAutoencoder(FrameAutoencoder):
    """The autoencoder of Qwen-Image and Wan 2.1."""

    cfg: WanVaeConfig

    @property
    def spec(self) -> Spec:
        return wan_vae_spec(self.cfg)

    def decoded(self, p: Params, latents: Array, tile: int | None) -> Array:
        return wan_vae_decode(p, latents, self.cfg, tile=tile)

    def encoded(self, p: Params, images: Array, tile: int | None) -> tuple[Array, Array]:
        return wan_vae_encode(p, images, self.cfg, tile=tile)
