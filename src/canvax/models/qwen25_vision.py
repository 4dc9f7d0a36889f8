"""The vision tower of Qwen2.5-VL (Qwen Team 2025): most layers attend within windows, some to the whole image.

The tower of Qwen-Image-Edit sees a small copy of each reference, of about ``VIEWED_PIXELS`` pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from PIL import Image

from canvax.errors import InputError
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Count, Depth, Layers
from canvax.models.dit import Rope, rms_norm, rms_norm_spec, swiglu, swiglu_spec
from canvax.models.qwen_vision import (
    FIXED_OF_TOWERS,
    MERGE,
    TowerConfig,
    attended,
    embedded,
    places_of,
    rope_of,
    squares,
)
from canvax.nn import Ahead, gelu, linear, linear_spec
from canvax.params import Axis, Param, Params, Spec
from canvax.types import Array, HostArray

PICTURE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
"""An image before the prompt of Qwen-Image-Edit, with its number."""

VIEWED_PIXELS = 384 * 384
"""Pixels that the copy of a reference is scaled to, before its sides become multiples of a token's."""

FIRST_STEP = 32
"""Sides of that copy are first multiples of this."""

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Statistics of the images of CLIP (Radford et al. 2021), red, green and blue."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class WindowedConfig(TowerConfig):
    """``Qwen2_5_VisionTransformerPretrainedModel``.

    Attributes:
        copies: it sees small copies of references, and not the images that the transformer reads.
        window_size: side of a window in pixels.
        fullatt_block_indexes: layers that attend to the whole image.
    """

    depth: Layers = 32
    hidden_size: Count = 1280
    intermediate_size: Count = 3420
    num_heads: Count = 16
    patch_size: Count = 14
    out_hidden_size: Count = 3584
    mrope_section: tuple[Depth, ...] = (16, 24, 24)
    copies: bool = True
    window_size: Count = 112
    fullatt_block_indexes: tuple[Depth, ...] = (7, 15, 23, 31)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",), "in_chans": (3,), **FIXED_OF_TOWERS}

    def _faults(self) -> list[str]:
        faults = super()._faults()
        if self.window_size % (MERGE * self.patch_size):
            faults.append(f"window_size {self.window_size} with patch_size {self.patch_size}")
        if not {*self.fullatt_block_indexes} <= {*range(self.depth)}:
            faults.append(f"fullatt_block_indexes {self.fullatt_block_indexes} with depth {self.depth}")
        return faults

    @property
    def spec(self) -> Spec:
        return windowed_tower_spec(self)

    def features(self, p: Params, patches: Array, grids: Array) -> list[Array]:
        return [windowed_tower(p, patches, grids, self)]

    def axes(self, width: int) -> HostArray:
        return np.repeat(np.arange(3), self.mrope_section)

    def tokens(self, size: tuple[int, int]) -> int:
        side = MERGE * self.patch_size
        if not self.copies:
            return math.prod(_rounded(size, side)) // side**2
        return 5 * VIEWED_PIXELS // (4 * side**2)  # at no usual proportions has a copy more

    def view(self, image: Any, fitted: Any) -> Any:
        """Return the small copy of an image, or ``fitted`` with sides of whole tokens.

        Raises:
            InputError: the image is too narrow.
        """
        ratio, side = image.width / image.height, MERGE * self.patch_size
        if not self.copies:
            return fitted.resize(_rounded(fitted.size, side), Image.Resampling.BICUBIC)
        wide = math.sqrt(VIEWED_PIXELS * ratio)
        first = _rounded((wide, wide / ratio), FIRST_STEP)
        last = _rounded(first, side)
        if not all(last) or math.prod(last) > self.tokens(last) * side**2:
            problem = f"has {image.width} x {image.height} pixels"
            raise InputError("image", problem, cure="give an image of usual proportions")
        for size, filtered in ((first, Image.Resampling.LANCZOS), (last, Image.Resampling.BICUBIC)):
            image = image if size == image.size else image.resize(size, filtered)
        return image


def _rounded(size: tuple[float, float], step: int) -> tuple[int, int]:
    wide, tall = size
    return round(wide / step) * step, round(tall / step) * step


def windowed_tower_spec(cfg: WindowedConfig) -> Spec:
    """Declare the tower's parameters, named as in released checkpoints."""
    width, square, heads = cfg.hidden_size, MERGE**2 * cfg.hidden_size, Axis("heads", cfg.num_heads)
    block: Spec = {
        "norm1": rms_norm_spec(width),
        "norm2": rms_norm_spec(width),
        "attn": {"qkv": linear_spec(width, 3 * width), "proj": linear_spec(width, width, (heads, "embed"))},
        "mlp": swiglu_spec(width, cfg.intermediate_size, PROJECTIONS, bias=True),
    }
    merged = linear_spec(square, square, ("embed", "mlp")), linear_spec(square, cfg.out_hidden_size, ("mlp", "embed"))
    return {
        "patch_embed": {"proj": {"weight": Param((width, 3, 2, cfg.patch_size, cfg.patch_size), (None,) * 5)}},
        "blocks": {str(i): block for i in range(cfg.depth)},
        "merger": {"ln_q": rms_norm_spec(width), "mlp": {"0": merged[0], "2": merged[1]}},
    }


def windowed_tower(p: Params, patches: Array, grids: Array, cfg: WindowedConfig) -> Array:
    """Return the features of images.

    Args:
        p: parameters as declared by ``windowed_tower_spec``.
        patches: of n images [B, n, P, 3 x side x side] uint8, padding after those of an image.
        grids: rows and columns of patches of each, int32 [B, n, 2].
        cfg: the config.

    Returns:
        [B, n, P / 4, D].
    """
    places, count = places_of(patches, grids), patches.shape[2]
    mean, deviation = (
        jnp.array(np.repeat(np.array(values, np.float32), cfg.patch_size**2), ndmin=4) for values in (MEAN, DEVIATION)
    )
    h = embedded(p["patch_embed"]["proj"], (patches.astype(jnp.float32) / 255 - mean) / deviation)
    rope, lengths = rope_of(places, cfg), jnp.maximum(grids.prod(-1), 1).reshape(-1)
    window = (places // (cfg.window_size // cfg.patch_size)).reshape(-1, count, 2)
    apart = (window[:, :, None] != window[:, None]).any(-1)
    within = jnp.where(apart, -1e30, 0.0)[:, None]
    with scope("vision_tower"):
        ahead = Ahead()
        for i in range(cfg.depth):
            bias = None if i in cfg.fullatt_block_indexes else within
            h = _block(ahead(p["blocks"][str(i)], h), h, rope, lengths, bias, heads=cfg.num_heads, where=f"blocks.{i}")
        merger = p["merger"]
        h = squares(rms_norm(merger["ln_q"], h, eps=1e-6))
        return linear(merger["mlp"]["2"], gelu(linear(merger["mlp"]["0"], h)))


@outlined
def _block(p: Params, x: Array, rope: Rope, lengths: Array, bias: Array | None, *, heads: int) -> Array:
    """Apply one pre-norm layer to patches [B, n, P, D], each image by itself."""
    x = x + attended(p["attn"], rms_norm(p["norm1"], x, eps=1e-6), rope, lengths, heads=heads, bias=bias)
    return x + swiglu(p["mlp"], rms_norm(p["norm2"], x, eps=1e-6), PROJECTIONS)
