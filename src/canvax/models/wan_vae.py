"""The autoencoder of Qwen-Image and Wan 2.1 (Wan Team 2025) for one frame: ``AutoencoderKLQwenImage`` without time.

Its convolutions over frames are causal: for one frame each uses only its last tap in time, and layers that change the
number of frames have no effect. Checkpoints hold all taps; ``from_video`` selects those of one frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
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
        faults = [
            f"{name} of {len(getattr(self, name))} channels with z_dim {self.z_dim}"
            for name in ("latents_mean", "latents_std")
            if len(getattr(self, name)) != self.z_dim
        ]
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


def from_video(array: HostArray) -> HostArray:
    """Select one frame's part of a checkpoint's array: [O, I, 3, 3, 3] -> [O, I, 3, 3], [C, 1, 1, 1] -> [C]."""
    if array.ndim == 5:
        return array[:, :, -1]
    return array.reshape(-1) if array.shape[1:] in ((1, 1), (1, 1, 1)) else array


def wan_vae_spec(cfg: WanVaeConfig) -> Spec:
    """Declare the parameters of encoder and decoder, without those over time."""
    first, last, moments = cfg.widths[0], cfg.widths[-1], 2 * cfg.z_dim
    down: list[Spec] = []
    for i, (before, width) in enumerate(pairwise((first, *cfg.widths))):
        down += [_resnet_spec(before if j == 0 else width, width) for j in range(cfg.num_res_blocks)]
        if i < len(cfg.widths) - 1:
            down.append({"resample": {"1": conv2d_spec(width, width)}})
    up: list[Spec] = []
    for i, width in enumerate(cfg.widths[::-1]):
        before = last if i == 0 else cfg.widths[-i] // 2
        resnets = [_resnet_spec(before if j == 0 else width, width) for j in range(cfg.num_res_blocks + 1)]
        up.append({"resnets": _numbered(resnets)})
        if i < len(cfg.widths) - 1:
            up[-1]["upsamplers"] = {"0": {"resample": {"1": conv2d_spec(width, width // 2)}}}
    return {
        "encoder": {
            "conv_in": conv2d_spec(cfg.input_channels, first),
            "down_blocks": _numbered(down),
            "mid_block": _mid_spec(last),
            "norm_out": _norm_spec(last),
            "conv_out": conv2d_spec(last, moments),
        },
        "quant_conv": linear_spec(moments, moments, conv=True),
        "post_quant_conv": linear_spec(cfg.z_dim, cfg.z_dim, conv=True),
        "decoder": {
            "conv_in": conv2d_spec(cfg.z_dim, last),
            "mid_block": _mid_spec(last),
            "up_blocks": _numbered(up),
            "norm_out": _norm_spec(first),
            "conv_out": conv2d_spec(first, cfg.input_channels),
        },
    }


def _numbered(specs: list[Spec]) -> Spec:
    return {str(i): spec for i, spec in enumerate(specs)}


def _norm_spec(channels: int) -> Spec:
    return {"gamma": Param((channels,), (None,), init="ones")}


def _resnet_spec(inputs: int, outputs: int) -> Spec:
    shortcut = {"conv_shortcut": linear_spec(inputs, outputs, conv=True)} if inputs != outputs else {}
    return {
        "norm1": _norm_spec(inputs),
        "conv1": conv2d_spec(inputs, outputs),
        "norm2": _norm_spec(outputs),
        "conv2": conv2d_spec(outputs, outputs),
        **shortcut,
    }


def _mid_spec(channels: int) -> Spec:
    attention = {
        "norm": _norm_spec(channels),
        "to_qkv": linear_spec(channels, 3 * channels, conv=True),
        "proj": linear_spec(channels, channels, conv=True),
    }
    return {"resnets": _numbered([_resnet_spec(channels, channels)] * 2), "attentions": {"0": attention}}


def wan_vae_decode(p: Params, latents: Array, cfg: WanVaeConfig, *, tile: int | None = None) -> Array:
    """Decode latents as the denoiser sees them [B, h, w, C] to images [B, 8h, 8w, 3] in -1..1.

    With ``tile``, decode in tiles of this many pixels, as ``canvax.models.vae.vae_decode_tiled``.
    """
    centre, deviation = _statistics(cfg, latents)
    z, p = linear(p["post_quant_conv"], latents * deviation + centre), p["decoder"]
    h, rise = _mid_block(p["mid_block"], conv2d(p["conv_in"], z)), partial(_rise, p, cfg=cfg)
    if tile is None:
        return rise(h)
    size, sides = (latents.shape[1], latents.shape[2]), (tile // cfg.factor, OVERLAP // cfg.factor)
    return in_tiles(rise, h, size, *sides, 1, cfg.factor, cfg.input_channels).astype(latents.dtype)


def wan_vae_encode(p: Params, images: Array, cfg: WanVaeConfig, *, tile: int | None = None) -> tuple[Array, Array]:
    """Encode images [B, 8h, 8w, 3] in -1..1 to mean and log-variance of normalised latents, [B, h, w, C]."""
    encoder = p["encoder"]
    fall = partial(_fall, encoder)
    if tile is None:
        h = fall(images)
    else:
        size = images.shape[1] // cfg.factor, images.shape[2] // cfg.factor
        sides = tile // cfg.factor, OVERLAP // cfg.factor
        h = in_tiles(fall, images, size, *sides, cfg.factor, 1, cfg.widths[-1]).astype(images.dtype)
    h = _head(encoder, _mid_block(encoder["mid_block"], h))
    mean, logvar = jnp.split(linear(p["quant_conv"], h), 2, axis=-1)
    centre, deviation = _statistics(cfg, mean)
    return (mean - centre) / deviation, jnp.clip(logvar, -30.0, 20.0) - 2 * jnp.log(deviation)


def _statistics(cfg: WanVaeConfig, x: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of the latents, each [1, 1, 1, C] in the dtype of ``x``."""
    return jnp.array(cfg.latents_mean, x.dtype, ndmin=4), jnp.array(cfg.latents_std, x.dtype, ndmin=4)


def _rise(p: Params, h: Array, cfg: WanVaeConfig) -> Array:
    """Map features [B, h, w, C] to pixels [B, 8h, 8w, 3]."""
    for i in range(len(cfg.widths)):
        block = p["up_blocks"][str(i)]
        with jax.named_scope(f"decoder_up_{i}"):
            for j in range(cfg.num_res_blocks + 1):
                h = _resnet(block["resnets"][str(j)], h)
            if "upsamplers" in block:
                h = conv2d_of_doubled(block["upsamplers"]["0"]["resample"]["1"], h)
    return jnp.clip(_head(p, h), -1.0, 1.0)


def _fall(p: Params, images: Array) -> Array:
    """Map pixels [B, 8h, 8w, 3] to features [B, h, w, C]."""
    h = conv2d(p["conv_in"], images)
    for i in range(len(p["down_blocks"])):
        layer = p["down_blocks"][str(i)]
        with jax.named_scope(f"encoder_down_{i}"):
            h = (
                conv2d(layer["resample"]["1"], h, stride=2, padding=(0, 1))
                if "resample" in layer
                else _resnet(layer, h)
            )
    return h


def _head(p: Params, h: Array) -> Array:
    return conv2d(p["conv_out"], jax.nn.silu(_norm(p["norm_out"], h)))


def _norm(p: Params, x: Array) -> Array:
    """Apply root-mean-square normalisation over the channels of a pixel, in float32."""
    x32 = x.astype(jnp.float32)
    length = jnp.maximum(jnp.linalg.norm(x32, axis=-1, keepdims=True), 1e-12)
    return (x32 / length * (x.shape[-1] ** 0.5 * p["gamma"].astype(jnp.float32)[None, None, None])).astype(x.dtype)


@outlined
def _resnet(p: Params, x: Array) -> Array:
    """Apply a residual block, [B, h, w, Cin] -> [B, h, w, Cout]."""
    h = conv2d(p["conv1"], jax.nn.silu(_norm(p["norm1"], x)))
    h = conv2d(p["conv2"], jax.nn.silu(_norm(p["norm2"], h)))
    return h + (linear(p["conv_shortcut"], x) if "conv_shortcut" in p else x)


def _mid_block(p: Params, x: Array) -> Array:
    """Apply two residual blocks with single-head attention between them."""
    with scope("vae.mid_block"):
        x, a = _resnet(p["resnets"]["0"], x), p["attentions"]["0"]
        b, h, w, c = x.shape
        qkv = linear(a["to_qkv"], _norm(a["norm"], x)).reshape(b, h * w, 3, 1, c)
        y = attention(*(qkv[:, :, i] for i in range(3)))
        return _resnet(p["resnets"]["1"], x + linear(a["proj"], y.reshape(b, h, w, c)))


@dataclass(frozen=True)
class WanAutoencoder(Autoencoder):
    """The autoencoder for one frame; computed in float32 if its weights are float16."""

    cfg: WanVaeConfig

    @property
    def spec(self) -> Spec:
        return wan_vae_spec(self.cfg)

    @property
    def factor(self) -> int:
        return self.cfg.factor

    @property
    def latent_channels(self) -> int:
        return self.cfg.z_dim

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        p, dtype = widened(p, upcast=True)
        images = wan_vae_decode(p, latents.astype(dtype), self.cfg, tile=TILE if tiled else None)
        return images.astype(jnp.float32) / 2 + 0.5

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        p, dtype = widened(p, upcast=True)
        moments = wan_vae_encode(p, (2 * images - 1).astype(dtype), self.cfg, tile=TILE if tiled else None)
        mean, logvar = (part.astype(jnp.float32) for part in moments)
        return mean, jnp.exp(logvar / 2)
