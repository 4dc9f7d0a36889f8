"""The conditional UNet of Stable Diffusion (Rombach et al. 2022): ``UNet2DConditionModel`` as pure functions.

``unet`` is the way down, the middle and the way up. Each is a separate function, so that a ControlNet can use the first
two and ``canvax.models.deep_features`` can skip the deep layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from canvax.kernels.outline import scope
from canvax.models.blocks import (
    TransformerKV,
    downsample,
    downsample_spec,
    resnet_block,
    resnet_block_spec,
    transformer,
    transformer_kv,
    transformer_spec,
    upsample,
    upsample_spec,
)
from canvax.models.configs import UNetConfig
from canvax.nn import conv2d, conv2d_spec, group_norm, linear, linear_spec, norm_spec
from canvax.params import Params, Spec, whole
from canvax.types import Array

CrossAttentionKV = dict[str, dict[str, Any]]
"""Keys and values of a text for every attention to it, from ``cross_attention_kv``."""


class BlockOptions(NamedTuple):
    """Options of the blocks.

    Attributes:
        remat: for training: store only the activations between blocks, and recompute those within them for the
            gradient.
        perturbed: [B] bool, samples in whose middle each position attends only to itself, for perturbed-attention
            guidance (Ahn et al. 2024); None for none.
    """

    remat: bool = False
    perturbed: Array | None = None


_DEFAULT = BlockOptions()


class Context(NamedTuple):
    """Inputs of every block besides the features.

    Attributes:
        time: time embedding [B, 4 C0] after its activation.
        text: keys and values of the text.
        options: options of the blocks.
    """

    time: Array
    text: CrossAttentionKV
    options: BlockOptions = _DEFAULT


class Residuals(NamedTuple):
    """Residuals that networks for control images add to the features (``canvax.models.controlnet``, ``t2i_adapter``).

    Attributes:
        skips: added to each feature map of the way down before its use on the way up [B, h', w', C']; empty for none.
            In a transformer, added to the image's tokens after each block [B, L, D]; None for a block without.
        middle: added to the output of the middle; None for none.
        within: added to the features after a layer of the way down, by the layer's index; the next layer reads the sum.
    """

    skips: tuple[Any, ...] = ()
    middle: Array | None = None
    within: dict[int, Array] | None = None


@dataclass(frozen=True)
class _Level:
    """One resolution on the way down or up: channels of every resnet, and its attention."""

    inputs: tuple[int, ...]
    channels: int
    heads: int
    depth: int
    attends: bool
    resizes: bool


def _down_levels(cfg: UNetConfig) -> list[_Level]:
    levels, previous = [], cfg.block_out_channels[0]
    for i, channels in enumerate(cfg.block_out_channels):
        inputs = (previous,) + (channels,) * (cfg.layers[i] - 1)
        attends = cfg.down_block_types[i] == "CrossAttnDownBlock2D"
        resizes = i < len(cfg.block_out_channels) - 1
        levels.append(_Level(inputs, channels, cfg.heads[i], cfg.depths[i], attends, resizes))
        previous = channels
    return levels


def _skip_channels(cfg: UNetConfig) -> list[int]:
    """Return the channels of the feature maps of the way down that the way up reads, in order."""
    skips = [cfg.block_out_channels[0]]
    for level in _down_levels(cfg):
        skips += [level.channels] * (len(level.inputs) + level.resizes)
    return skips


def _up_levels(cfg: UNetConfig) -> list[_Level]:
    skips, previous = _skip_channels(cfg), cfg.block_out_channels[-1]
    levels = []
    for i, channels in enumerate(reversed(cfg.block_out_channels)):
        mirror = len(cfg.block_out_channels) - 1 - i
        inputs = []
        for _ in range(cfg.layers[mirror] + 1):
            inputs.append(previous + skips.pop())
            previous = channels
        attends = cfg.up_block_types[i] == "CrossAttnUpBlock2D"
        heads, depth = cfg.heads[mirror], cfg.depths[mirror]
        levels.append(_Level(tuple(inputs), channels, heads, depth, attends, mirror > 0))
    return levels


def unet_spec(cfg: UNetConfig) -> Spec:
    """Declare the parameters of the UNet."""
    first, last = cfg.block_out_channels[0], cfg.block_out_channels[-1]
    time, groups = 4 * first, cfg.norm_num_groups
    return {
        "conv_in": whole(conv2d_spec(cfg.in_channels, first)),
        "time_embedding": whole(_time_spec(cfg)),
        **_addition_spec(cfg),
        "down_blocks": {str(i): _level_spec(level, cfg, "downsamplers") for i, level in enumerate(_down_levels(cfg))},
        "mid_block": {
            "resnets": {str(i): resnet_block_spec(last, last, time, groups=groups) for i in range(2)},
            "attentions": {"0": _attention_spec(last, cfg.heads[-1], cfg.depths[-1], cfg)},
        },
        "up_blocks": {str(i): _level_spec(level, cfg, "upsamplers") for i, level in enumerate(_up_levels(cfg))},
        "conv_norm_out": norm_spec(first),
        "conv_out": whole(conv2d_spec(first, cfg.out_channels)),
    }


def _time_spec(cfg: UNetConfig) -> Spec:
    first = cfg.block_out_channels[0]
    spec = {"linear_1": linear_spec(first, 4 * first), "linear_2": linear_spec(4 * first, 4 * first)}
    if cfg.time_cond_proj_dim:
        spec["cond_proj"] = linear_spec(cfg.time_cond_proj_dim, first, bias=False)
    return spec


def _addition_spec(cfg: UNetConfig) -> Spec:
    if cfg.projection_class_embeddings_input_dim is None:
        return {}
    time = 4 * cfg.block_out_channels[0]
    first = linear_spec(cfg.projection_class_embeddings_input_dim, time)
    return {"add_embedding": whole({"linear_1": first, "linear_2": linear_spec(time, time)})}


def _attention_spec(channels: int, heads: int, depth: int, cfg: UNetConfig) -> Spec:
    return transformer_spec(
        channels, cfg.cross_attention_dim, depth, heads=heads, linear_projection=cfg.use_linear_projection
    )


def _level_spec(level: _Level, cfg: UNetConfig, resizer: str) -> Spec:
    time = 4 * cfg.block_out_channels[0]
    resnets = [resnet_block_spec(c, level.channels, time, groups=cfg.norm_num_groups) for c in level.inputs]
    spec: Spec = {"resnets": {str(j): resnet for j, resnet in enumerate(resnets)}}
    if level.attends:
        spec["attentions"] = {
            str(j): _attention_spec(level.channels, level.heads, level.depth, cfg) for j in range(len(level.inputs))
        }
    if level.resizes:
        spec[resizer] = {"0": (downsample_spec if resizer == "downsamplers" else upsample_spec)(level.channels)}
    return spec


def cross_attention_kv(p: Params, text: Array, cfg: UNetConfig) -> CrossAttentionKV:
    """Return keys and values of text features [B, T, D], which are the same in each step."""

    def of_block(block: Params, heads: int) -> dict[str, TransformerKV]:
        return {j: transformer_kv(attention, text, heads) for j, attention in block.get("attentions", {}).items()}

    def of_levels(blocks: Params, levels: list[_Level]) -> dict[str, dict[str, TransformerKV]]:
        return {str(i): of_block(blocks[str(i)], level.heads) for i, level in enumerate(levels)}

    with jax.named_scope("text_kv"):
        return {
            "down_blocks": of_levels(p["down_blocks"], _down_levels(cfg)),
            "mid_block": of_block(p["mid_block"], cfg.heads[-1]),
            # A ControlNet has no way up.
            "up_blocks": of_levels(p["up_blocks"], _up_levels(cfg)) if "up_blocks" in p else {},
        }


def unet(
    p: Params,
    x: Array,
    timesteps: Array,
    text: Array | CrossAttentionKV,
    cfg: UNetConfig,
    pooled: Array | None = None,
    time_ids: Array | None = None,
    guidance: Array | None = None,
    *,
    options: BlockOptions = _DEFAULT,
    residuals: Residuals | None = None,
) -> Array:
    """Evaluate the network (eps, v or x0, as it was trained) on noisy latents.

    Args:
        p: parameters as declared by ``unet_spec``.
        x: noisy latents [B, h, w, C], any h and w.
        timesteps: [B], may be fractional.
        text: features of the text encoder [B, T, D], or the result of ``cross_attention_kv``.
        cfg: the config.
        pooled: SDXL: pooled text [B, P].
        time_ids: SDXL: size conditions [B, n] float32, with n = ``cfg.time_ids(P)``.
        guidance: guidance scales [B] float32, for a network with this input (``cfg.time_cond_proj_dim``).
        options: options of the blocks.
        residuals: arrays to add to the features.

    Returns:
        [B, h, w, C] in the dtype of ``x``, which is the dtype of the computation.
    """
    context = unet_context(p, x, timesteps, text, cfg, pooled, time_ids, guidance)._replace(options=options)
    skips = [conv2d(p["conv_in"], x)]
    skips += unet_down(p, skips[0], context, cfg, within=residuals and residuals.within)
    h = unet_mid(p, skips[-1], context, cfg)
    if residuals and residuals.skips:
        skips = [skip + added for skip, added in zip(skips, residuals.skips, strict=True)]
    if residuals and residuals.middle is not None:
        h = h + residuals.middle
    h = unet_up(p, h, skips, context, cfg)
    return unet_out(p, h, cfg)


def unet_context(
    p: Params,
    x: Array,
    timesteps: Array,
    text: Array | CrossAttentionKV,
    cfg: UNetConfig,
    pooled: Array | None = None,
    time_ids: Array | None = None,
    guidance: Array | None = None,
    added: Array | None = None,
) -> Context:
    """Compute the blocks' other inputs; arguments as for ``unet``; ``added`` [B, 4 C0] is added to the time."""
    times = _sinusoids(timesteps, cfg.block_out_channels[0], cfg).astype(x.dtype)
    if guidance is not None and cfg.time_cond_proj_dim:
        # Meng et al. 2023 (guided distillation), section 3; released models embed 1000 (scale - 1).
        scales = timestep_embedding(1000 * (guidance - 1), cfg.time_cond_proj_dim, flip_sin_to_cos=False, freq_shift=1)
        times = times + linear(p["time_embedding"]["cond_proj"], scales.astype(x.dtype))
    time = _embed(p["time_embedding"], times)
    if pooled is not None and time_ids is not None:
        # Podell et al. 2023 (SDXL), section 2.2: sizes and crop are embedded as timesteps are, each by its own
        # sinusoids.
        sizes = _sinusoids(time_ids.reshape(-1), cfg.addition_time_embed_dim or 0, cfg)
        sizes = sizes.reshape(time_ids.shape[0], -1)
        both = jnp.concatenate([pooled.astype(x.dtype), sizes.astype(x.dtype)], axis=-1)
        time = time + _embed(p["add_embedding"], both)
    time = time if added is None else time + added
    # Every residual block begins with this activation.
    return Context(jax.nn.silu(time), text if isinstance(text, dict) else cross_attention_kv(p, text, cfg))


def unet_down(
    p: Params,
    h: Array,
    context: Context,
    cfg: UNetConfig,
    layers: slice = slice(None),
    within: Mapping[int, Array] | None = None,
) -> list[Array]:
    """Return the feature map after each layer of the way down.

    Args:
        p: parameters of the UNet.
        h: [B, h, w, C] after the first convolution, or after the layer before ``layers``.
        context: the other inputs of the blocks.
        cfg: the config.
        layers: range of the ``skip_connections(cfg) - 1`` layers to compute.
        within: arrays to add after some of these layers, by index.
    """
    skips = []
    for at, (i, level, j) in enumerate(down_layers(cfg)[layers]):
        block = p["down_blocks"][str(i)]
        with scope(f"down_blocks.{i}"):
            if j is None:
                h = downsample(block["downsamplers"]["0"], h, padding=(1, 1))
            else:
                h = _layer(block, context.text["down_blocks"][str(i)], context, level, j, h, cfg)
        h = h + within[at] if within and at in within else h
        skips.append(h)
    return skips


def unet_mid(p: Params, h: Array, context: Context, cfg: UNetConfig) -> Array:
    """Apply the middle, at the lowest resolution: [B, h, w, C] -> [B, h, w, C]."""
    groups, eps = cfg.norm_num_groups, cfg.norm_eps
    block, kv = p["mid_block"], context.text["mid_block"].get("0")
    with scope("mid_block"):
        h = resnet_block(block["resnets"]["0"], h, context.time, groups=groups, eps=eps)
        if kv is None:  # small ControlNets
            return h
        options = {"upcast": cfg.upcast_attention, "perturbed": context.options.perturbed}
        with scope("attentions.0"):
            h = transformer(block["attentions"]["0"], h, kv, heads=cfg.heads[-1], groups=groups, **options)
        return resnet_block(block["resnets"]["1"], h, context.time, groups=groups, eps=eps)


def unet_up(
    p: Params, h: Array, skips: list[Array], context: Context, cfg: UNetConfig, layers: slice = slice(None)
) -> Array:
    """Apply the way up, in which each layer reads the last unused feature map of the way down.

    Args:
        p: parameters of the UNet.
        h: [B, h, w, C] from the middle, or from the layer before ``layers``.
        skips: the feature maps, including those for layers after ``layers``.
        context: the other inputs of the blocks.
        cfg: the config.
        layers: range of the ``skip_connections(cfg)`` layers to compute.
    """
    skips = list(skips)
    for i, level, j in up_layers(cfg)[layers]:
        block = p["up_blocks"][str(i)]
        with scope(f"up_blocks.{i}"):
            skip = skips.pop()
            h = jnp.concatenate([h, skip], axis=-1)
            h = _layer(block, context.text["up_blocks"][str(i)], context, level, j, h, cfg)
            if level.resizes and j == len(level.inputs) - 1:
                # To the size of the skip it will meet, which is not the double where h or w was odd.
                h = upsample(block["upsamplers"]["0"], h, *skips[-1].shape[1:3])
    return h


def unet_out(p: Params, h: Array, cfg: UNetConfig) -> Array:
    """Apply the last normalisation and convolution: features [B, h, w, C0] -> output [B, h, w, C]."""
    norm = {"groups": cfg.norm_num_groups, "eps": cfg.norm_eps}
    return conv2d(p["conv_out"], group_norm(p["conv_norm_out"], h, **norm, activation=jax.nn.silu))


def skip_connections(cfg: UNetConfig) -> int:
    """Return the number of feature maps of the way down that the way up reads."""
    return len(_skip_channels(cfg))


def down_layers(cfg: UNetConfig) -> list[tuple[int, _Level, int | None]]:
    """Return the layers of the way down after the first convolution: block, level, and layer, None to resize."""
    return [
        (i, level, j)
        for i, level in enumerate(_down_levels(cfg))
        for j in (*range(len(level.inputs)), *([None] if level.resizes else []))
    ]


def up_layers(cfg: UNetConfig) -> list[tuple[int, _Level, int]]:
    """Return the layers of the way up, as ``down_layers``; the last layer of a level resizes."""
    return [(i, level, j) for i, level in enumerate(_up_levels(cfg)) for j in range(len(level.inputs))]


def _layer(
    block: Params, kv: dict[str, TransformerKV], context: Context, level: _Level, j: int, h: Array, cfg: UNetConfig
) -> Array:
    """Apply residual block ``j`` of a level and, if the level attends, attention to the text."""

    def layer(h: Array, time: Array, kv: TransformerKV | None) -> Array:
        groups = cfg.norm_num_groups
        h = resnet_block(block["resnets"][str(j)], h, time, groups=groups, eps=cfg.norm_eps)
        if kv is None:
            return h
        with scope(f"attentions.{j}"):
            upcast = cfg.upcast_attention
            return transformer(block["attentions"][str(j)], h, kv, heads=level.heads, groups=groups, upcast=upcast)

    return (jax.checkpoint(layer) if context.options.remat else layer)(h, context.time, kv.get(str(j)))


def timestep_embedding(timesteps: Array, width: int, *, flip_sin_to_cos: bool, freq_shift: float) -> Array:
    """Embed timesteps [B] as sinusoids (Ho et al. 2020, after Vaswani et al. 2017): [B, width] float32."""
    half = width // 2
    exponent = -math.log(10000.0) * jnp.arange(half, dtype=jnp.float32) / (half - freq_shift)
    angles = timesteps.astype(jnp.float32)[:, None] * jnp.exp(exponent)[None]
    parts = (jnp.cos(angles), jnp.sin(angles)) if flip_sin_to_cos else (jnp.sin(angles), jnp.cos(angles))
    return jnp.pad(jnp.concatenate(parts, axis=-1), ((0, 0), (0, width % 2)))


def _sinusoids(values: Array, width: int, cfg: UNetConfig) -> Array:
    return timestep_embedding(values, width, flip_sin_to_cos=cfg.flip_sin_to_cos, freq_shift=cfg.freq_shift)


def _embed(p: Params, x: Array) -> Array:
    return linear(p["linear_2"], jax.nn.silu(linear(p["linear_1"], x)))
