"""Blocks of the UNet and the VAE: residual block, spatial transformer, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from canvax.kernels.attention import attention
from canvax.kernels.outline import by_rows, outlined, scope
from canvax.nn import (
    conv2d,
    conv2d_of_doubled,
    conv2d_spec,
    gated_linear,
    gelu,
    group_norm,
    layer_norm,
    linear,
    linear_spec,
    norm_spec,
    upsample_nearest,
    with_shares,
    without_shares,
)
from canvax.params import Axis, Params, Spec, whole
from canvax.types import Array

TRANSFORMER_NORM_EPS = 1e-6


def resnet_block_spec(inputs: int, outputs: int, time_width: int | None, *, groups: int = 32) -> Spec:
    """Declare a residual block; ``time_width`` is None for the VAE, whose blocks have no time embedding.

    Devices may split the channels between its convolutions, in whole normalisation groups.
    """
    hidden = Axis("hidden", groups)
    spec: Spec = {
        "norm1": norm_spec(inputs),
        "conv1": conv2d_spec(inputs, outputs, axes=("conv_in", hidden)),
        "norm2": norm_spec(outputs),
        "conv2": conv2d_spec(outputs, outputs, axes=(hidden, "conv_out")),
    }
    if time_width is not None:
        spec["time_emb_proj"] = whole(linear_spec(time_width, outputs, (None, hidden)))
    if inputs != outputs:
        spec["conv_shortcut"] = linear_spec(inputs, outputs, conv=True)
    return spec


@outlined
def resnet_block(p: Params, x: Array, time: Array | None, *, groups: int, eps: float) -> Array:
    """Apply a residual block (He et al. 2016, pre-activation), which adds the time embedding between its convolutions.

    Args:
        p: parameters.
        x: [B, h, w, Cin].
        time: [B, time_width] time embedding after its activation, or None.
        groups: groups of the normalisation.
        eps: its epsilon.

    Returns:
        [B, h, w, Cout].
    """
    with jax.named_scope("resnet"):
        h = conv2d(p["conv1"], group_norm(p["norm1"], x, groups=groups, eps=eps, activation=jax.nn.silu))
        if time is not None:
            h = h + linear(p["time_emb_proj"], time)[:, None, None, :]
        h = conv2d(p["conv2"], group_norm(p["norm2"], h, groups=groups, eps=eps, activation=jax.nn.silu))
        shortcut = linear(p["conv_shortcut"], x) if "conv_shortcut" in p else x
        return shortcut + h


def transformer_spec(channels: int, context: int, depth: int, *, heads: int, linear_projection: bool) -> Spec:
    """Declare a spatial transformer; SD 1.x stores its linear projections as 1x1 convolutions."""
    conv = not linear_projection
    return {
        "norm": norm_spec(channels),
        "proj_in": linear_spec(channels, channels, conv=conv),
        "transformer_blocks": {str(i): _transformer_block_spec(channels, context, heads) for i in range(depth)},
        "proj_out": linear_spec(channels, channels, conv=conv),
    }


TransformerKV = dict[str, tuple[Any, ...]]
"""Keys and values [B, T, N, Dh] of the text, and of image prompts as ``prompted`` takes them, for each block."""

ImagePrompts = tuple[tuple[Array, Array, Array | None], ...]
"""Keys and values [B, T, N, Dh] of image prompts, or [B, I, T, N, Dh] of I prompts with masks [B, Tq, I]."""


def transformer_kv(p: Params, text: Array, heads: int) -> TransformerKV:
    """Return the keys and values that a transformer's blocks compute from text features [B, T, D]."""
    blocks: Params = p["transformer_blocks"]
    return {i: keys_and_values(block["attn2"], text, heads) for i, block in blocks.items()}


def transformer(
    p: Params,
    x: Array,
    text: TransformerKV,
    *,
    heads: int,
    groups: int,
    upcast: bool,
    perturbed: Array | None = None,
) -> Array:
    """Apply a spatial transformer of latent diffusion (Rombach et al. 2022, section 3.3).

    Args:
        p: parameters.
        x: [B, h, w, C].
        text: result of ``transformer_kv``.
        heads: attention heads.
        groups: groups of the normalisation.
        upcast: compute attention scores in float32.
        perturbed: [B] bool, images in which each position attends only to itself; None for none.

    Returns:
        [B, h, w, C].
    """
    with jax.named_scope("transformer"):
        b, h, w, c = x.shape
        y = group_norm(p["norm"], x, groups=groups, eps=TRANSFORMER_NORM_EPS)
        y = linear(p["proj_in"], y.reshape(b, h * w, c))
        for i in map(str, range(len(text))):
            k, v, *images = text[i]
            y = _transformer_block(
                p["transformer_blocks"][i], y, k, v, *(images or ((),)), perturbed, heads=heads, upcast=upcast,
                where=f"transformer_blocks.{i}",
            )  # fmt: skip
        return x + linear(p["proj_out"], y).reshape(b, h, w, c)


def _transformer_block_spec(channels: int, context: int, heads: int) -> Spec:
    inner = 4 * channels
    return {
        "norm1": norm_spec(channels),
        "attn1": attention_spec(channels, channels, heads=heads),
        "norm2": norm_spec(channels),
        "attn2": attention_spec(channels, context, heads=heads),
        "norm3": norm_spec(channels),
        "ff": {
            "net": {
                "0": {"proj": linear_spec(channels, 2 * inner, ("embed", Axis("mlp", inner, parts=2)))},
                "2": linear_spec(inner, channels, ("mlp", "embed")),
            }
        },
    }


@outlined
def _transformer_block(
    p: Params,
    x: Array,
    k: Array,
    v: Array,
    images: ImagePrompts = (),
    perturbed: Array | None = None,
    *,
    heads: int,
    upcast: bool,
) -> Array:
    """Apply self-attention, attention to the text and a gated feed-forward, each pre-norm and residual."""
    h = layer_norm(p["norm1"], x)
    with scope("attn1"):
        attended = attend(p["attn1"], h, h, heads=heads, upcast=upcast)
    if perturbed is not None:
        attended = jnp.where(
            perturbed[:, None, None], linear(p["attn1"]["to_out"]["0"], linear(p["attn1"]["to_v"], h)), attended
        )
    x = x + attended

    def each_row(p: Params, rows: Any, k: Array, v: Array, images: Any, shares: Any) -> Array:
        p, (x, masks) = with_shares(p, shares), rows
        prompts = [(*kv, mask) for kv, mask in zip(images, masks, strict=True)]
        with scope("attn2"):
            x = x + attend_kv(p["attn2"], layer_norm(p["norm2"], x), k, v, prompts, upcast=upcast)
        h, gate = gated_linear(p["ff"]["net"]["0"]["proj"], layer_norm(p["norm3"], x))
        return x + linear(p["ff"]["net"]["2"], h * gelu(gate))  # GEGLU: Shazeer 2020, table 1

    masks = [mask for *_, mask in images]
    p, shares = without_shares(p)
    return by_rows(each_row, p, (x, masks), k, v, [kv for *kv, _ in images], shares)


def attention_spec(channels: int, context: int, *, heads: int, bias: bool = False) -> Spec:
    """Declare attention with queries from ``channels``, keys and values from ``context``; biases only in the VAE."""
    split = Axis("heads", heads)
    return {
        "to_q": linear_spec(channels, channels, ("embed", split), bias=bias),
        "to_k": linear_spec(context, channels, ("embed", split), bias=bias),
        "to_v": linear_spec(context, channels, ("embed", split), bias=bias),
        "to_out": {"0": linear_spec(channels, channels, (split, "embed"))},
    }


def attend(p: Params, x: Array, context: Array, *, heads: int, upcast: bool = False) -> Array:
    """Apply multi-head attention of ``x`` [B, Tq, C] over ``context`` [B, Tk, D] -> [B, Tq, C]."""
    return attend_kv(p, x, *keys_and_values(p, context, heads), upcast=upcast)


def keys_and_values(p: Params, context: Array, heads: int) -> tuple[Array, Array]:
    """Return the keys and values [B, Tk, N, Dh] of ``context`` [B, Tk, D]."""
    k, v = linear(p["to_k"], context), linear(p["to_v"], context)
    shape = (*context.shape[:2], heads, -1)
    return k.reshape(shape), v.reshape(shape)


def attend_kv(
    p: Params, x: Array, k: Array, v: Array, images: Sequence[tuple[Any, ...]] = (), *, upcast: bool = False
) -> Array:
    """Apply multi-head attention of ``x`` [B, Tq, C] over keys and values [B, Tk, N, Dh] -> [B, Tq, C].

    The attention to each of the image prompts ``images`` is added.
    """
    q = linear(p["to_q"], x).reshape(*x.shape[:2], *k.shape[2:])
    y = attention(q, k, v, upcast=upcast)
    for image in images:
        y = y + prompted(q, *image, upcast=upcast)
    return linear(p["to_out"]["0"], y.reshape(x.shape))


def prompted(q: Array, k: Array, v: Array, mask: Array | None, *, upcast: bool) -> Array:
    """Return the attention to image prompts [B, Tq, N, Dh]; with masks [B, Tq, I], only where they are white."""
    if mask is None:
        return attention(q, k, v, upcast=upcast)
    mask = mask.astype(v.dtype)[..., None, None]
    outputs = [mask[:, :, i] * attention(q, k[:, i], v[:, i], upcast=upcast) for i in range(k.shape[1])]
    return sum(outputs[1:], outputs[0])


def downsample_spec(channels: int) -> Spec:
    """Declare a strided 3x3 convolution."""
    return {"conv": conv2d_spec(channels, channels)}


def downsample(p: Params, x: Array, *, padding: tuple[int, int]) -> Array:
    """Halve height and width; ``padding`` (1, 1) in the UNet, (0, 1) in the VAE encoder."""
    return conv2d(p["conv"], x, stride=2, padding=padding)


upsample_spec = downsample_spec


def upsample(p: Params, x: Array, height: int, width: int) -> Array:
    """Resize to ``height`` x ``width`` by nearest neighbour, then apply a 3x3 convolution."""
    if (height, width) == (2 * x.shape[1], 2 * x.shape[2]):
        return conv2d_of_doubled(p["conv"], x)
    return conv2d(p["conv"], upsample_nearest(x, height, width))
