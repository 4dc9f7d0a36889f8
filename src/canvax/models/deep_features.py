"""A UNet evaluation that takes its deep features, most of its work, from another one (DeepCache: Ma et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from canvax.models.configs import UNetConfig
from canvax.models.unet import Context, down_layers, unet_down, unet_mid, unet_out, unet_up, up_layers
from canvax.nn import conv2d
from canvax.params import Params
from canvax.types import Array

Recall = Callable[[Callable[[], Array]], tuple[Array, Any]]
"""Given a function that computes the deep features: those to use, and what to remember of them."""


def unet_reusing(
    p: Params, x: Array, context: Context, cfg: UNetConfig, *, layers: int, recall: Recall
) -> tuple[Array, Any]:
    """``canvax.models.unet.unet``, whose deep features ``recall`` may take from elsewhere (section 3.2).

    Args:
        p: parameters of the UNet.
        x: noisy latents [B, h, w, C].
        context: what the blocks see beside them.
        cfg: the config.
        layers: what is computed in any case: so many of the outermost ``skip_connections(cfg)``, and all that lies
            outside of them.
        recall: given a function that computes what comes up to the innermost of these connections, returns that or
            something else of ``deep_shape`` in its place, and what to remember.

    Returns:
        The network's output [B, h, w, C], and what ``recall`` remembers.
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
    """Shape of the deep features of ``unet_reusing``, for latents of shape [B, h, w, C]."""
    batch, height, width, _ = latents
    skip = cfg.block_out_channels[0]
    for _, level, j in down_layers(cfg)[: layers - 1]:
        skip = level.channels
        if j is None:
            height, width = -(-height // 2), -(-width // 2)
    _, level, j = up_layers(cfg)[-layers]
    return batch, height, width, level.inputs[j] - skip
