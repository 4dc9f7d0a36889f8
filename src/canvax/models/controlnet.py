"""ControlNet (Zhang et al. 2023): a copy of the UNet's way down that reads an image and adds to the UNet's features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.kernels.outline import scope
from canvax.models.blocks import resnet_block_spec
from canvax.models.configs import Config, Count, Levels, UNetConfig
from canvax.models.controlled import Control, Features
from canvax.models.text import Conditions
from canvax.models.unet import (
    Context,
    Residuals,
    cross_attention_kv,
    down_layers,
    unet_context,
    unet_down,
    unet_mid,
    unet_spec,
)
from canvax.nn import conv2d, conv2d_spec, linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

NO_ATTENTION = "UNetMidBlock2D"
"""``mid_block_type`` of a middle with a single residual block."""


@dataclass(frozen=True)
class HintConfig(Config):
    """Fields of ``ControlNetModel`` besides the UNet's: names and defaults are those of the diffusers config."""

    conditioning_channels: Count = 3
    conditioning_embedding_out_channels: Levels = (16, 32, 96, 256)
    controlnet_conditioning_channel_order: str = "rgb"
    global_pool_conditions: bool = False
    mid_block_type: str = "UNetMidBlock2DCrossAttn"

    def __post_init__(self) -> None:
        faults = []
        if self.controlnet_conditioning_channel_order not in ("rgb", "bgr"):
            faults.append(f"controlnet_conditioning_channel_order {self.controlnet_conditioning_channel_order!r}")
        if self.mid_block_type not in ("UNetMidBlock2DCrossAttn", NO_ATTENTION):
            faults.append(f"mid_block_type {self.mid_block_type!r}")
        if self.conditioning_channels != 3:
            faults.append(f"conditioning_channels {self.conditioning_channels} (an image has 3)")
        if faults:
            raise CheckpointError("ControlNetModel does not support " + "; ".join(faults))


@dataclass(frozen=True)
class ControlNet(Control):
    """A ControlNet: its config and its functions.

    Attributes:
        unet: config of the way down and of the middle, which are those of the UNet it was made from.
        hint: config of the layers that read the image.
    """

    unet: UNetConfig
    hint: HintConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed ``config.json`` of diffusers.

        Raises:
            CheckpointError: naming every field whose value is not supported.
        """
        hint = {name: config[name] for name in HintConfig.__dataclass_fields__ if name in config}
        others = (*HintConfig.__dataclass_fields__, "_class_name")  # of a network, which is no UNet
        rest = {name: value for name, value in config.items() if name not in others}
        blocks = rest.get("down_block_types")
        rest["up_block_types"] = ["UpBlock2D"] * (len(blocks) if isinstance(blocks, list | tuple) else 4)
        parts: list[Any] = []
        faults = []
        for kind, values in ((UNetConfig, rest), (HintConfig, hint)):
            try:
                parts.append(kind.from_dict(values))
            except CheckpointError as error:
                faults.append(str(error).replace("UNetConfig", "ControlNetModel"))
        if faults:
            raise CheckpointError("; ".join(faults))
        return cls(*parts)

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        return controlnet_spec(self)

    @property
    def layers(self) -> int:
        """Number of the UNet's features that it adds to, including the middle."""
        return len(down_layers(self.unet)) + 2

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis."""
        return 2 ** (len(self.hint.conditioning_embedding_out_channels) - 1)

    @property
    def pools(self) -> bool:
        """True if its output is averaged over all pixels; it is then not added for the negative prompt."""
        return self.hint.global_pool_conditions

    def encode(self, p: Params, images: Array) -> tuple[Array, ...]:
        """Return the features of control images [B, H, W, 3] in 0..1: ([B, h, w, C0],)."""
        return (embedded_hint(p["controlnet_cond_embedding"], images.astype(compute_dtype(p)), self.hint),)

    def features(self, latents: Sequence[int], dtype: DType) -> Features:
        """Return the shape of ``encode``'s result for latents of shape [B, h, w, C]."""
        return (jax.ShapeDtypeStruct((*latents[:3], self.unet.block_out_channels[0]), dtype),)

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> dict[str, Any]:
        """Return the part of the conditions [B, ...] that ``residuals`` needs, once before the loop."""
        added = {name: conditions[name] for name in ("pooled", "time_ids") if name in conditions}
        if self.unet.addition_embed_type is None:
            added = {}
        return {**added, "text": cross_attention_kv(p, conditions["text"].astype(compute_dtype(p)), self.unet)}

    def residuals(
        self, p: Params, x: Array, timestep: Array, prepared: dict[str, Any], features: tuple[Array, ...], scales: Array
    ) -> Residuals:
        """Return the residuals for the UNet's features.

        Args:
            p: the parameters.
            x: noisy latents [B, h, w, C] as the UNet sees them.
            timestep: [B].
            prepared: result of ``prepare``.
            features: result of ``encode`` for each image.
            scales: scale of each of the ``layers`` [B, L] float32.
        """
        channels = self.unet.in_channels
        x = x[..., :channels].astype(compute_dtype(p))
        return scaled_outputs(controlnet(p, x, timestep, features[0], self, **prepared), scales, self)

    def nothing(self, shape: Sequence[int], dtype: DType) -> Residuals:
        """Return zeros of the shapes of ``residuals`` for latents [B, h, w, C]."""
        batch, height, width, _ = shape
        shapes = [(batch, height, width, self.unet.block_out_channels[0])]
        for _, level, j in down_layers(self.unet):
            if j is None:
                height, width = -(-height // 2), -(-width // 2)
            shapes.append((batch, height, width, level.channels))
        if self.pools:
            shapes = [(batch, 1, 1, channels) for *_, channels in shapes]
        return Residuals(tuple(jnp.zeros(shape, dtype) for shape in shapes), jnp.zeros(shapes[-1], dtype))


_OF_UNET = ("conv_in", "time_embedding", "add_embedding", "down_blocks", "mid_block")
"""Parts that a ControlNet shares with the UNet."""


def controlnet_spec(net: ControlNet) -> Spec:
    """Declare the parameters of a ControlNet, under the names of diffusers."""
    unet = unet_spec(net.unet)
    spec: Spec = {name: unet[name] for name in _OF_UNET if name in unet}
    first, last = net.unet.block_out_channels[0], net.unet.block_out_channels[-1]
    if net.hint.mid_block_type == NO_ATTENTION:
        resnet = resnet_block_spec(last, last, 4 * first, groups=net.unet.norm_num_groups)
        spec["mid_block"] = {"resnets": {"0": resnet}}
    spec["controlnet_cond_embedding"] = hint_spec(net.hint, first)
    skips = [first, *(level.channels for _, level, _ in down_layers(net.unet))]
    spec["controlnet_down_blocks"] = {str(i): linear_spec(c, c, conv=True) for i, c in enumerate(skips)}
    spec["controlnet_mid_block"] = linear_spec(last, last, conv=True)
    return spec


def hint_spec(cfg: HintConfig, channels: int) -> Spec:
    """Declare the parameters of the layers that read the image."""
    widths, blocks = cfg.conditioning_embedding_out_channels, {}
    for i in range(len(widths) - 1):
        blocks[str(2 * i)] = conv2d_spec(widths[i], widths[i])
        blocks[str(2 * i + 1)] = conv2d_spec(widths[i], widths[i + 1])
    return {
        "conv_in": whole(conv2d_spec(cfg.conditioning_channels, widths[0])),
        **({"blocks": blocks} if blocks else {}),
        "conv_out": whole(conv2d_spec(widths[-1], channels)),
    }


def embedded_hint(p: Params, images: Array, cfg: HintConfig) -> Array:
    """Embed control images [B, H, W, 3] in 0..1 -> [B, h, w, C0] (section 3.2, "a tiny network")."""
    with jax.named_scope("control_image"):
        if cfg.controlnet_conditioning_channel_order == "bgr":
            images = images[..., ::-1]
        h = jax.nn.silu(conv2d(p["conv_in"], images))
        for i in range(2 * (len(cfg.conditioning_embedding_out_channels) - 1)):
            h = jax.nn.silu(conv2d(p["blocks"][str(i)], h, stride=1 + i % 2))
        return conv2d(p["conv_out"], h)


def controlnet(
    p: Params,
    x: Array,
    timesteps: Array,
    hint: Array,
    net: ControlNet,
    text: Any = None,
    pooled: Array | None = None,
    time_ids: Array | None = None,
) -> list[Array]:
    """Return the residuals for each skip connection of the UNet and, last, for its middle (section 3.1).

    Args:
        p: parameters as declared by ``controlnet_spec``.
        x: noisy latents [B, h, w, C].
        timesteps: [B].
        hint: result of ``embedded_hint`` [B, h, w, C0].
        net: the record.
        text: as in ``canvax.models.unet.unet``.
        pooled: pooled text [B, P], or None.
        time_ids: size conditions [B, n] float32, or None.

    Returns:
        ``net.layers`` arrays [B, h', w', C'] in the dtype of ``x``.
    """
    context = unet_context(p, x, timesteps, text, net.unet, pooled, time_ids)
    return outputs_of(p, conv2d(p["conv_in"], x) + hint, context, net)


def outputs_of(p: Params, first: Array, context: Context, net: ControlNet) -> list[Array]:
    """Return the residuals as ``controlnet``, from the input of the way down [B, h, w, C0]."""
    with scope("controlnet"):
        skips = [first]
        skips += unet_down(p, skips[0], context, net.unet)
        middle = unet_mid(p, skips[-1], context, net.unet)
        outputs = [linear(p["controlnet_down_blocks"][str(i)], skip) for i, skip in enumerate(skips)]
        return [*outputs, linear(p["controlnet_mid_block"], middle)]


def scaled_outputs(outputs: list[Array], scales: Array, net: ControlNet) -> Residuals:
    """Return the outputs of ``outputs_of``, each times its scale of [B, L]."""
    if net.pools:
        outputs = [output.mean((1, 2), keepdims=True, dtype=jnp.float32).astype(output.dtype) for output in outputs]
    *skips, middle = (scaled(output, scales[:, i]) for i, output in enumerate(outputs))
    return Residuals(tuple(skips), middle)


def scaled(output: Array, scale: Array) -> Array:
    """Multiply [B, ...] by [B]; the result is zero where the scale is zero, even where the output overflowed."""
    scale = jnp.expand_dims(scale, tuple(range(1, output.ndim)))
    return jnp.where(scale == 0, 0, output.astype(jnp.float32) * scale).astype(output.dtype)
