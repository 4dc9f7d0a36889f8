"""T2I-Adapter (Mou et al. 2023): reads an image once, and adds to the UNet's features on the way down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import jax
import jax.numpy as jnp

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Layers, Levels, UNetConfig
from canvax.models.controlled import Control, Features
from canvax.models.controlnet import scaled
from canvax.models.text import Conditions
from canvax.models.unet import Residuals, down_layers
from canvax.nn import conv2d, conv2d_spec, linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

LIGHT, FULL, XL = "light_adapter", "full_adapter", "full_adapter_xl"


@dataclass(frozen=True)
class AdapterConfig(Config):
    """``T2IAdapter``: names and defaults are those of the diffusers config."""

    in_channels: Count = 3
    channels: Levels = (320, 640, 1280, 1280)
    num_res_blocks: Layers = 2
    downscale_factor: Count = 8
    adapter_type: str = FULL

    def __post_init__(self) -> None:
        faults = []
        if self.adapter_type not in (FULL, XL, LIGHT):
            faults.append(f"adapter_type {self.adapter_type!r}")
        if self.in_channels not in (1, 3):
            faults.append(f"in_channels {self.in_channels} (a colour image has 3, a grey one 1)")
        if self.adapter_type == LIGHT and any(channels % 4 for channels in self.channels):
            faults.append(f"channels {self.channels} that are no multiples of 4")
        if faults:
            raise CheckpointError("T2IAdapter does not support " + "; ".join(faults))

    @property
    def blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """Input channels, output channels of each block, and whether it halves the image first."""
        widths = self.channels
        if self.adapter_type == LIGHT:
            first = self.in_channels * self.downscale_factor**2
            # The config names the width of the last two blocks once.
            pairs = [(first, widths[0]), *pairwise(widths), (widths[-1], widths[-1])]
            return tuple((i, o, at > 0) for at, (i, o) in enumerate(pairs))
        if self.adapter_type == XL:
            return tuple((widths[max(0, i - 1)] if i < 3 else widths[i], widths[i], i == 2) for i in range(len(widths)))
        return tuple((widths[max(0, i - 1)], widths[i], i > 0) for i in range(len(widths)))


@dataclass(frozen=True)
class T2IAdapter(Control):
    """A T2I-Adapter: its config and its functions.

    Attributes:
        cfg: its config.
        unet: the UNet whose features it adds to.
    """

    cfg: AdapterConfig
    unet: UNetConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], unet: UNetConfig) -> Self:
        """Read a parsed ``config.json`` of diffusers, for a UNet.

        Raises:
            CheckpointError: naming every field whose value is not supported.
        """
        return cls(AdapterConfig.from_dict(config), unet)

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        return adapter_spec(self.cfg)

    @property
    def layers(self) -> int:
        """Number of the UNet's features that it adds to."""
        return len(self.cfg.blocks)

    @property
    def factor(self) -> int:
        """Pixels per latent, which its first step folds into channels."""
        return self.cfg.downscale_factor // (2 if self.cfg.adapter_type == XL else 1)

    def encode(self, p: Params, images: Array) -> tuple[Array, ...]:
        """Return the features of control images [B, H, W, 3] in 0..1, from the largest to the smallest."""
        return tuple(adapter(p, images, self.cfg))

    def features(self, latents: Sequence[int], dtype: DType) -> Features:
        """Return the shapes of ``encode``'s result for latents of shape [B, h, w, C]."""
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in self.shapes(latents))

    def shapes(self, latents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each feature for latents of shape [B, h, w, C]."""
        batch, *sides = latents[:3]
        height, width = (-(-side * self.factor // self.cfg.downscale_factor) for side in sides)
        shapes = []
        for _, channels, halves in self.cfg.blocks:
            height, width = (-(-height // 2), -(-width // 2)) if halves else (height, width)
            shapes.append((batch, height, width, channels))
        return tuple(shapes)

    def places(self) -> list[int | None]:
        """Layer of the way down after which each feature is added; None for the middle."""
        layers = down_layers(self.unet)
        places: list[int | None] = []
        for i, kind in enumerate(self.unet.down_block_types):
            of_level = [at for at, (block, _, _) in enumerate(layers) if block == i]
            # A level with attention gets the feature at its end, a level without (SDXL's first) after it is halved.
            resizes = layers[of_level[-1]][2] is None and kind == "CrossAttnDownBlock2D"
            places.append(of_level[-2] if resizes else of_level[-1])
        return [*places, None][: self.layers]

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> None:
        """Return nothing: it does not read the text."""

    def residuals(
        self, p: Params, x: Array, timestep: Array, prepared: None, features: tuple[Array, ...], scales: Array
    ) -> Residuals:
        """Return the residuals for the UNet's features: see ``canvax.models.controlled.Control``."""
        del p, x, timestep, prepared
        return self._placed([scaled(feature, scales[:, i]) for i, feature in enumerate(features)])

    def nothing(self, shape: Sequence[int], dtype: DType) -> Residuals:
        """Return zeros of the shapes of ``residuals`` for latents [B, h, w, C]."""
        return self._placed([jnp.zeros(feature_shape, dtype) for feature_shape in self.shapes(shape)])

    def _placed(self, features: Sequence[Array]) -> Residuals:
        placed = dict(zip(self.places(), features, strict=True))
        middle = placed.pop(None, None)
        return Residuals((), middle, {at: feature for at, feature in placed.items() if at is not None})


def fault_for(cfg: AdapterConfig, unet: UNetConfig) -> str | None:
    """Return why the features of an adapter cannot be added to those of a UNet; None if they can."""
    adapter = T2IAdapter(cfg, unet)
    side, sizes = 64, []
    for _, level, j in down_layers(unet):
        side = -(-side // 2) if j is None else side
        sizes.append((side, level.channels))
    wanted = [sizes[-1 if at is None else at] for at in adapter.places()]
    got = [(shape[1], shape[3]) for shape in adapter.shapes((1, 64, 64, 4))]
    if len(unet.block_out_channels) <= len(got) == len(wanted) and got == wanted:
        return None

    def shown(levels: list[tuple[int, int]]) -> str:
        return ", ".join(f"{channels} at 1/{64 // side}" for side, channels in levels)

    return f"its features are {shown(got)}, the UNet's are {shown(wanted)}"


def adapter_spec(cfg: AdapterConfig) -> Spec:
    """Declare the parameters of an adapter, under the names of diffusers."""
    body: Spec = {}
    for i, (inputs, outputs, _) in enumerate(cfg.blocks):
        light = cfg.adapter_type == LIGHT
        width = outputs // 4 if light else outputs
        second = conv2d_spec if light else _one_by_one
        resnets = {
            str(j): {"block1": conv2d_spec(width, width), "block2": second(width, width)}
            for j in range(cfg.num_res_blocks)
        }
        block: Spec = {"in_conv": _one_by_one(inputs, width)} if light or inputs != outputs else {}
        body[str(i)] = {**block, "resnets": resnets, **({"out_conv": _one_by_one(width, outputs)} if light else {})}
    first = {} if cfg.adapter_type == LIGHT else {
        "conv_in": whole(conv2d_spec(cfg.in_channels * cfg.downscale_factor**2, cfg.channels[0]))
    }  # fmt: skip
    return {"adapter": {**first, "body": body}}


def _one_by_one(inputs: int, outputs: int) -> Spec:
    return linear_spec(inputs, outputs, conv=True)


def adapter(p: Params, images: Array, cfg: AdapterConfig) -> list[Array]:
    """Return the features of control images [B, H, W, 3] in 0..1 after each block (section 3.2)."""
    p = p["adapter"]
    with jax.named_scope("t2i_adapter"):
        if cfg.in_channels == 1:
            images = images[..., :1]
        h = unshuffled(images, cfg.downscale_factor).astype(compute_dtype(p))
        if "conv_in" in p:
            h = conv2d(p["conv_in"], h)
        features = []
        for i, (_, _, halves) in enumerate(cfg.blocks):
            block = p["body"][str(i)]
            h = averaged(h) if halves else h
            h = linear(block["in_conv"], h) if "in_conv" in block else h
            for j in range(cfg.num_res_blocks):
                h = h + _inner(block["resnets"][str(j)], h, light=cfg.adapter_type == LIGHT)
            h = linear(block["out_conv"], h) if "out_conv" in block else h
            features.append(h)
        return features


def _inner(p: Params, h: Array, *, light: bool) -> Array:
    h = jax.nn.relu(conv2d(p["block1"], h))
    return conv2d(p["block2"], h) if light else linear(p["block2"], h)


def unshuffled(images: Array, factor: int) -> Array:
    """Fold squares of pixels into channels, [B, H, W, C] -> [B, H / f, W / f, C f f], in PyTorch's order of channels.

    Edge pixels are repeated to fill the last square, as a UNet rounds odd levels up.
    """
    images = jnp.pad(images, ((0, 0), *((0, -side % factor) for side in images.shape[1:3]), (0, 0)), mode="edge")
    batch, height, width, channels = images.shape
    tiles = images.reshape(batch, height // factor, factor, width // factor, factor, channels)
    return jnp.einsum("bhywxc->bhwcyx", tiles).reshape(batch, height // factor, width // factor, -1)


def averaged(h: Array) -> Array:
    """Average each 2 x 2 pixels; at an odd edge, those that exist."""
    ones = jnp.ones((1, *h.shape[1:3], 1), jnp.float32)
    total, count = (
        jax.lax.reduce_window(operand, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        for operand in (h.astype(jnp.float32), ones)
    )
    return (total / count).astype(h.dtype)
