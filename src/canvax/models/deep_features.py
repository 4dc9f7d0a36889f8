"""A UNet evaluation that reuses the deep features of another evaluation (DeepCache: Ma et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from canvax.models.configs import UNetConfig
from canvax.models.unet import Context, down_layers, unet_down, unet_mid, unet_out, unet_up, up_layers
from canvax.nn import conv2d
from canvax.params import Params
from canvax.types import Array

Recall = Callable[[Callable[[], Array]], tuple[Array, Any]]
"""Function that takes a function computing the deep features, and returns the features to use and what to remember."""


def unet_reusing(
    p: Params, x: Array, context: Context, cfg: UNetConfig, *, layers: int, recall: Recall
) -> tuple[Array, Any]:
    """Evaluate ``canvax.models.unet.unet`` with deep features that ``recall`` may take from elsewhere (section 3.2).

    Args:
        p: parameters of the UNet.
        x: noisy latents [B, h, w, C].
        context: the other inputs of the blocks.
        cfg: the config.
        layers: number of the outermost ``skip_connections(cfg)`` that are always computed, with the layers outside
            them.
        recall: gets a function that computes the features at the innermost of these connections; returns these or
            other features of ``deep_shape``, and what to remember.

    Returns:
        The network's output [B, h, w, C], and what ``recall`` returned to be remembered.
    """
    outer = [conv2d(p["conv_in"], x)]
    outer += unet_down(p, outer[0], context, cfg, slice(layers - 1))

    def deep() -> Array:
        skips = outer + unet_down(p, outer[-1], context, cfg, slice(layers - 1, None))
        h = unet_mid(p, skips[-1], context, cfg)
        return unet_up(p, h, skips, context, cfg, slice(-layers))

    h, memory = recall(deep)
    h = unet_up(p, h, outer, context, cfg, slice(-layers, None))
    return unet_out(p, h, cfg), memory


def deep_shape(cfg: UNetConfig, latents: Sequence[int], layers: int) -> tuple[int, int, int, int]:
    """Return the shape of the deep features of ``unet_reusing``, for latents of shape [B, h, w, C]."""
    batch, height, width, _ = latents
    skip = cfg.block_out_channels[0]
    for _, level, j in down_layers(cfg)[: layers - 1]:
        skip = level.channels
        if j is None:
            height, width = -(-height // 2), -(-width // 2)
    _, level, j = up_layers(cfg)[-layers]
    return batch, height, width, level.inputs[j] - skip
