"""The autoencoder of Qwen-Image-2.1 (Qwen Team 2026) for one frame: ``AutoencoderKLQwenImage21`` without time.

It is that of Wan 2.2 with a fourth channel for alpha. Each level adds its input, rearranged and averaged or repeated,
to its output. Blocks and layers are those of ``canvax.models.wan_vae``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Depth, Factor, Levels, Number
from canvax.models.wan_vae import (
    FrameAutoencoder,
    decode_frame,
    encode_frame,
    encoder_and_decoder_spec,
    head,
    numbered,
    resnet,
    resnet_spec,
    statistics_faults,
)
from canvax.nn import conv2d, conv2d_of_doubled, conv2d_spec
from canvax.params import Params, Spec
from canvax.types import Array


@dataclass(frozen=True)
class QwenVaeConfig(Config):
    """``AutoencoderKLQwenImage21``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "AutoencoderKLQwenImage21"

    base_dim: Count = 96
    decoder_base_dim: Count | None = 144
    z_dim: Count = 64
    dim_mult: Levels = (1, 2, 4, 8, 8)
    num_res_blocks: Depth = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True, True)
    in_channels: Count = 4
    out_channels: Count = 4
    latents_mean: tuple[Number, ...] = (
        0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722, 1.8873, -1.7177, -0.6510, 0.2732, 0.7562,
        -0.6163, -1.0277, 3.8363, 2.0210, 0.0472, 0.9320, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464, -0.5236, 1.2826,
        3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955, -0.0342, -1.0265, -0.7636, 3.0555, 0.0746, -3.0751, -0.1076,
        1.7376, -1.0914, -1.9435, -0.2784, -1.3680, 0.4809, -0.4433, 0.3764, 0.5729, -2.0595, 1.0960, -1.3260, -2.0211,
        -5.0179, 0.5275, 4.0162, 1.8505, 0.3026, 1.9373, 1.4937, 0.2632, 0.5547, -1.7121, -0.1562, 0.0304,
    )  # fmt: skip
    latents_std: tuple[Factor, ...] = (
        3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.7910, 3.0785, 3.6500, 3.9308, 3.0904, 2.8778, 3.7675,
        3.7320, 5.0756, 3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489, 3.4896, 3.8513, 3.9323, 3.4719,
        3.7498, 4.2830, 3.5694, 4.2467, 3.9037, 3.2947, 5.0770, 3.5075, 3.2700, 3.4767, 2.8063, 5.1125, 3.5327, 4.7833,
        3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875, 3.9624, 4.0168, 3.5643, 4.0550, 5.5614, 4.2963, 4.4080, 3.4959,
        3.8747, 3.7608, 3.5735, 3.1490, 3.7662, 3.6746, 3.4563, 3.8161,
    )  # fmt: skip

    is_residual: bool = True

    IGNORED: ClassVar[frozenset[str]] = frozenset({"dropout", "scale_factor_temporal", "scale_factor_spatial"})

    def __post_init__(self) -> None:
        faults = statistics_faults(self)
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            faults.append(f"temperal_downsample of {len(self.temperal_downsample)} for {len(self.dim_mult)} levels")
        for name, widths in (("base_dim", self.widths), ("decoder_base_dim", self.decoder_widths)):
            if any(wide not in (narrow, 2 * narrow, 4 * narrow) for narrow, wide in pairwise(widths)):
                faults.append(f"{name} and dim_mult that make levels of {widths} channels")
        if not self.is_residual:
            faults.append("is_residual false")
        if self.in_channels != self.out_channels:
            faults.append(f"in_channels {self.in_channels} with out_channels {self.out_channels}")
        if faults:
            raise CheckpointError("QwenVaeConfig does not support " + "; ".join(faults))

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level of the encoder."""
        return tuple(self.base_dim * times for times in self.dim_mult)

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """Channels of each level of the decoder, from the pixels."""
        return tuple((self.decoder_base_dim or self.base_dim) * times for times in self.dim_mult)

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis."""
        return 2 ** (len(self.dim_mult) - 1)


def qwen_vae_spec(cfg: QwenVaeConfig) -> Spec:
    """Return the parameters of encoder and decoder, without those of time."""
    down: list[Spec] = []
    for i, (before, width) in enumerate(pairwise((cfg.widths[0], *cfg.widths))):
        resnets = [resnet_spec(before if j == 0 else width, width) for j in range(cfg.num_res_blocks)]
        down.append({"resnets": numbered(resnets)})
        if i < len(cfg.widths) - 1:
            down[-1]["downsampler"] = {"resample": {"1": conv2d_spec(width, width)}}
    up: list[Spec] = []
    falling = cfg.decoder_widths[::-1]
    for i, (before, width) in enumerate(pairwise((falling[0], *falling))):
        resnets = [resnet_spec(before if j == 0 else width, width) for j in range(cfg.num_res_blocks + 1)]
        up.append({"resnets": numbered(resnets)})
        if i < len(falling) - 1:
            up[-1]["upsampler"] = {"resample": {"1": conv2d_spec(width, width)}}
    sides = (cfg.widths, cfg.decoder_widths)
    return encoder_and_decoder_spec(sides, down, up, pixels=cfg.in_channels, latents=cfg.z_dim)


def average_down(x: Array, channels: int, *, space: int, time: int) -> Array:
    """Rearrange squares of pixels to channels and average groups of them: [B, h, w, C] -> [B, h / s, w / s, channels].

    With ``time`` 2 a frame of zeros comes before the only one. No axis is as short as a square's side, which a TPU
    would pad.
    """
    squares = [x[:, i::space, j::space].astype(jnp.float32) for i in range(space) for j in range(space)]
    frames, parts = [None] * (len(squares) * (time - 1)) + squares, channels // x.shape[-1]
    size, total = len(frames) // parts, jnp.zeros((), jnp.float32)
    for k in range(parts):
        if group := [square for square in frames[k * size : (k + 1) * size] if square is not None]:
            between = [(0, 0, 0)] * 3 + [(k, parts - 1 - k, parts - 1)]
            total = total + jax.lax.pad(sum(group[1:], group[0]) / size, jnp.zeros((), jnp.float32), between)
    return total.astype(x.dtype)


def repeat_up(x: Array, channels: int, *, time: int) -> Array:
    """Repeat channels and rearrange them to squares of pixels: [B, h, w, C] -> [B, 2h, 2w, channels].

    With ``time`` 2 the second of two frames is left. The pixels are put apart and added: a TPU would take five times as
    long to interleave them by axes of two.
    """
    step, total = x.shape[-1] // channels, jnp.zeros((), x.dtype)
    for pixel in range(4):
        square = x[..., (4 * (time - 1) + pixel) * step // (4 * time) :: step]
        apart = [(side, 1 - side, 1) for side in divmod(pixel, 2)]
        total = total + jax.lax.pad(square, jnp.zeros((), x.dtype), [(0, 0, 0), *apart, (0, 0, 0)])
    return total


def _fall(p: Params, images: Array, cfg: QwenVaeConfig) -> Array:
    """Return features [B, h, w, C] of pixels."""
    h, last = conv2d(p["conv_in"], images), len(cfg.widths) - 1
    for i, width in enumerate(cfg.widths):
        block, before = p["down_blocks"][str(i)], h
        with jax.named_scope(f"encoder_down_{i}"):
            for j in range(cfg.num_res_blocks):
                h = resnet(block["resnets"][str(j)], h)
            if i < last:
                h = conv2d(block["downsampler"]["resample"]["1"], h, stride=2, padding=(0, 1))
            time = 1 + (i < last and cfg.temperal_downsample[i])
            h = h + average_down(before, width, space=1 + (i < last), time=time)
    return h


def _rise(p: Params, h: Array, cfg: QwenVaeConfig) -> Array:
    """Return pixels of features [B, h, w, C]."""
    last = len(cfg.decoder_widths) - 1
    for i, width in enumerate(cfg.decoder_widths[::-1]):
        block, before = p["up_blocks"][str(i)], h
        with jax.named_scope(f"decoder_up_{i}"):
            for j in range(cfg.num_res_blocks + 1):
                h = resnet(block["resnets"][str(j)], h)
            if i < last:
                h = conv2d_of_doubled(block["upsampler"]["resample"]["1"], h)
                h = h + repeat_up(before, width, time=1 + cfg.temperal_downsample[::-1][i])
    return jnp.clip(head(p, h), -1.0, 1.0)


@dataclass(frozen=True)
class QwenAutoencoder(FrameAutoencoder):
    """The autoencoder of one frame, whose images have alpha: [B, H, W, 4]."""

    cfg: QwenVaeConfig

    @property
    def spec(self) -> Spec:
        return qwen_vae_spec(self.cfg)

    @property
    def channels(self) -> int:
        return self.cfg.out_channels

    def decoded(self, p: Params, latents: Array, tile: int | None) -> Array:
        rise = partial(_rise, p["decoder"], cfg=self.cfg)
        return decode_frame(p, latents, self.cfg, rise, self.cfg.out_channels, tile=tile)

    def encoded(self, p: Params, images: Array, tile: int | None) -> tuple[Array, Array]:
        opaque = ((0, 0), (0, 0), (0, 0), (0, self.channels - images.shape[-1]))
        images = jnp.pad(images, opaque, constant_values=1)
        fall = partial(_fall, p["encoder"], cfg=self.cfg)
        return encode_frame(p, images, self.cfg, fall, tile=tile)
