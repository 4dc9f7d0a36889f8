"""The conditional UNet of Stable Diffusion (Rombach et al. 2022): ``UNet2DConditionModel`` as pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from canvax.models.blocks import (
    Attended,
    attended_text,
    downsample,
    downsample_spec,
    resnet_block,
    resnet_block_spec,
    transformer,
    transformer_spec,
    upsample,
    upsample_spec,
)
from canvax.models.configs import UNetConfig
from canvax.models.merging import Merging, partition
from canvax.nn import conv2d, conv2d_spec, group_norm, linear, linear_spec, norm_spec
from canvax.params import Params, Spec
from canvax.types import Array

Recall = Callable[[Callable[[], Array]], tuple[Array, Any]]
"""Given a function that computes the deep features: those to use, and what to remember; see :func:`unet_reusing`."""

TextKeys = dict[str, dict[str, Any]]
"""Keys and values of a text for every attention to it, as :func:`text_keys` makes them."""


@dataclass(frozen=True)
class _Level:
    """One resolution on the way down or up: channels of every resnet, and its attention."""

    inputs: tuple[int, ...]
    channels: int
    heads: int
    depth: int
    attends: bool
    finest: bool
    resizes: bool


def _down_levels(cfg: UNetConfig) -> list[_Level]:
    levels, previous = [], cfg.block_out_channels[0]
    for i, channels in enumerate(cfg.block_out_channels):
        inputs = (previous,) + (channels,) * (cfg.layers[i] - 1)
        attends = cfg.down_block_types[i] == "CrossAttnDownBlock2D"
        finest = attends and not any(level.attends for level in levels)
        resizes = i < len(cfg.block_out_channels) - 1
        levels.append(_Level(inputs, channels, cfg.heads[i], cfg.depths[i], attends, finest, resizes))
        previous = channels
    return levels


def _skip_channels(cfg: UNetConfig) -> list[int]:
    """Channels of the feature maps kept on the way down, in order."""
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
        finest = attends and "CrossAttnUpBlock2D" not in cfg.up_block_types[i + 1 :]
        heads, depth = cfg.heads[mirror], cfg.depths[mirror]
        levels.append(_Level(tuple(inputs), channels, heads, depth, attends, finest, mirror > 0))
    return levels


def unet_spec(cfg: UNetConfig) -> Spec:
    """Parameters of the UNet."""
    first, last = cfg.block_out_channels[0], cfg.block_out_channels[-1]
    time, groups = 4 * first, cfg.norm_num_groups
    return {
        "conv_in": conv2d_spec(cfg.in_channels, first),
        "time_embedding": {"linear_1": linear_spec(first, time), "linear_2": linear_spec(time, time)},
        **_addition_spec(cfg),
        "down_blocks": {str(i): _level_spec(level, cfg, "downsamplers") for i, level in enumerate(_down_levels(cfg))},
        "mid_block": {
            "resnets": {str(i): resnet_block_spec(last, last, time, groups=groups) for i in range(2)},
            "attentions": {"0": _attention_spec(last, cfg.heads[-1], cfg.depths[-1], cfg)},
        },
        "up_blocks": {str(i): _level_spec(level, cfg, "upsamplers") for i, level in enumerate(_up_levels(cfg))},
        "conv_norm_out": norm_spec(first),
        "conv_out": conv2d_spec(first, cfg.out_channels),
    }


def _addition_spec(cfg: UNetConfig) -> Spec:
    if cfg.projection_class_embeddings_input_dim is None:
        return {}
    time = 4 * cfg.block_out_channels[0]
    first = linear_spec(cfg.projection_class_embeddings_input_dim, time)
    return {"add_embedding": {"linear_1": first, "linear_2": linear_spec(time, time)}}


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


def timestep_embedding(timesteps: Array, width: int, *, flip_sin_to_cos: bool, freq_shift: float) -> Array:
    """Sinusoids of the timestep (Ho et al. 2020, after Vaswani et al. 2017, section 3.5): [B] -> [B, width] float32."""
    half = width // 2
    exponent = -math.log(10000.0) * jnp.arange(half, dtype=jnp.float32) / (half - freq_shift)
    angles = timesteps.astype(jnp.float32)[:, None] * jnp.exp(exponent)
    waves = (jnp.cos(angles), jnp.sin(angles)) if flip_sin_to_cos else (jnp.sin(angles), jnp.cos(angles))
    return jnp.pad(jnp.concatenate(waves, axis=-1), ((0, 0), (0, width % 2)))


def text_keys(p: Params, text: Array, cfg: UNetConfig) -> TextKeys:
    """What all attentions to a text see of its features [B, T, D]: the same in each step, so a loop makes it once."""

    def of_block(block: Params, heads: int) -> dict[str, Attended]:
        return {j: attended_text(attention, text, heads) for j, attention in block.get("attentions", {}).items()}

    def of_levels(blocks: Params, levels: list[_Level]) -> dict[str, dict[str, Attended]]:
        return {str(i): of_block(blocks[str(i)], level.heads) for i, level in enumerate(levels)}

    with jax.named_scope("text_keys"):
        return {
            "down_blocks": of_levels(p["down_blocks"], _down_levels(cfg)),
            "mid_block": of_block(p["mid_block"], cfg.heads[-1]),
            "up_blocks": of_levels(p["up_blocks"], _up_levels(cfg)),
        }


def unet(
    p: Params,
    x: Array,
    timesteps: Array,
    text: Array | TextKeys,
    cfg: UNetConfig,
    pooled: Array | None = None,
    time_ids: Array | None = None,
    *,
    merging: Merging | None = None,
    remat: bool = False,
) -> Array:
    """Network output (eps, v or x0, whichever it was trained for) for noisy latents.

    Args:
        p: parameters as declared by :func:`unet_spec`.
        x: noisy latents [B, h, w, C], any h and w.
        timesteps: [B], may be fractional.
        text: features of the text encoder [B, T, D], or what :func:`text_keys` makes of them.
        cfg: the config.
        pooled: SDXL: pooled text [B, P].
        time_ids: SDXL: numbers about the picture [B, n] float32, ``cfg.time_ids(P)`` of them.
        merging: merge tokens for self-attention at the finest level that has any, where it takes longest.
        remat: for training: keep only what lies between the blocks, and compute their insides again for the gradient.

    Returns:
        [B, h, w, C] in the dtype of ``x``, which is the dtype computed in.
    """
    output, _ = unet_reusing(p, x, timesteps, text, cfg, pooled, time_ids, merging=merging, remat=remat)
    return output


def unet_reusing(
    p: Params,
    x: Array,
    timesteps: Array,
    text: Array | TextKeys,
    cfg: UNetConfig,
    pooled: Array | None = None,
    time_ids: Array | None = None,
    *,
    layers: int = 1,
    recall: Recall = lambda compute: (compute(), None),
    merging: Merging | None = None,
    remat: bool = False,
) -> tuple[Array, Any]:
    """:func:`unet`, whose deep features may be those of another evaluation (DeepCache: Ma et al. 2024, section 3.2).

    Args:
        p: see :func:`unet`, likewise all up to ``time_ids``.
        x: [B, h, w, C].
        timesteps: [B].
        text: [B, T, D], or keys and values.
        cfg: the config.
        pooled: [B, P] or None.
        time_ids: [B, n] or None.
        layers: what is computed in any case: the outermost skip connections, so many of ``skip_connections(cfg)``, and
            all that lies outside of them.
        recall: given a function that computes the deep features, what comes up to the innermost of these
            connections, returns them or others in their place, of :func:`deep_shape`, and what to remember.
        merging: see :func:`unet`.
        remat: likewise.

    Returns:
        The network's output, and what ``recall`` remembers.
    """
    groups, eps = cfg.norm_num_groups, cfg.norm_eps
    time = _time_features(p, timesteps, x.dtype, cfg, pooled, time_ids)
    keys = text if isinstance(text, dict) else text_keys(p, text, cfg)

    def level_step(block: Params, seen: dict[str, Attended], level: _Level, j: int, h: Array) -> Array:
        h = resnet_block(block["resnets"][str(j)], h, time, groups=groups, eps=eps)
        if level.attends:
            merge = merging if level.finest else None
            h = attend_text(block["attentions"][str(j)], seen[str(j)], h, level.heads, merge)
        return h

    def attend_text(block: Params, seen: Attended, h: Array, heads: int, merging: Merging | None = None) -> Array:
        merge = {"order": partition(merging.keys, *h.shape[1:3]), "ratio": merging.ratio} if merging else {}
        return transformer(block, h, seen, heads=heads, groups=groups, upcast=cfg.upcast_attention, **merge)

    if remat:
        level_step = jax.checkpoint(level_step, static_argnums=(2, 3))

    def go_down(skips: list[Array], steps: list[tuple[int, _Level, int | None]]) -> None:
        for i, level, j in steps:
            block, seen, h = p["down_blocks"][str(i)], keys["down_blocks"][str(i)], skips[-1]
            with jax.named_scope(f"down_{i}"):
                resizes = j is None
                h = (
                    downsample(block["downsamplers"]["0"], h, padding=(1, 1))
                    if resizes
                    else level_step(block, seen, level, j, h)
                )
            skips.append(h)

    def go_up(h: Array, skips: list[Array], steps: list[tuple[int, _Level, int]]) -> Array:
        for i, level, j in steps:
            block, seen = p["up_blocks"][str(i)], keys["up_blocks"][str(i)]
            with jax.named_scope(f"up_{i}"):
                h = level_step(block, seen, level, j, jnp.concatenate([h, skips.pop()], axis=-1))
                if level.resizes and j == len(level.inputs) - 1:
                    # To the size of the skip it will meet, which is not the double where h or w was odd.
                    h = upsample(block["upsamplers"]["0"], h, *skips[-1].shape[1:3])
        return h

    down, up = _down_steps(cfg), _up_steps(cfg)
    outer = [conv2d(p["conv_in"], x)]
    go_down(outer, down[: layers - 1])

    def deep() -> Array:
        skips = list(outer)
        go_down(skips, down[layers - 1 :])
        with jax.named_scope("mid"):
            block = p["mid_block"]
            h = resnet_block(block["resnets"]["0"], skips[-1], time, groups=groups, eps=eps)
            h = attend_text(block["attentions"]["0"], keys["mid_block"]["0"], h, cfg.heads[-1])
            h = resnet_block(block["resnets"]["1"], h, time, groups=groups, eps=eps)
        return go_up(h, skips, up[:-layers])

    h, memory = recall(deep)
    h = go_up(h, outer, up[-layers:])
    h = group_norm(p["conv_norm_out"], h, groups=groups, eps=eps, activation=jax.nn.silu)
    return conv2d(p["conv_out"], h), memory


def skip_connections(cfg: UNetConfig) -> int:
    """How many feature maps are kept on the way down for the way up."""
    return len(_skip_channels(cfg))


def deep_shape(cfg: UNetConfig, latents: Sequence[int], layers: int) -> tuple[int, int, int, int]:
    """Shape of the deep features of :func:`unet_reusing`, for latents of shape [B, h, w, C]."""
    batch, height, width, _ = latents
    for step in _down_steps(cfg)[: layers - 1]:
        if step[2] is None:
            height, width = -(-height // 2), -(-width // 2)
    _, level, j = _up_steps(cfg)[-layers]
    return batch, height, width, level.inputs[j] - _skip_channels(cfg)[layers - 1]


def _down_steps(cfg: UNetConfig) -> list[tuple[int, _Level, int | None]]:
    """The way down after the first convolution: index of the block, its level, and which layer, None to resize."""
    return [
        (i, level, j)
        for i, level in enumerate(_down_levels(cfg))
        for j in (*range(len(level.inputs)), *([None] if level.resizes else []))
    ]


def _up_steps(cfg: UNetConfig) -> list[tuple[int, _Level, int]]:
    """The way up, likewise; the last layer of a level resizes."""
    return [(i, level, j) for i, level in enumerate(_up_levels(cfg)) for j in range(len(level.inputs))]


def _time_features(
    p: Params, timesteps: Array, dtype: jnp.dtype, cfg: UNetConfig, pooled: Array | None, time_ids: Array | None
) -> Array:
    """Time embedding [B, 4 C0] after the activation that every residual block applies to it."""
    time = _embed(p["time_embedding"], _waves(timesteps, cfg.block_out_channels[0], cfg).astype(dtype))
    if pooled is not None and time_ids is not None:
        # Podell et al. 2023 (SDXL), section 2.2: sizes and crop are told as timesteps are, each by its own sinusoids.
        width = cfg.addition_time_embed_dim or 0
        picture = _waves(time_ids.reshape(-1), width, cfg).reshape(time_ids.shape[0], -1)
        time = time + _embed(
            p["add_embedding"], jnp.concatenate([pooled.astype(dtype), picture.astype(dtype)], axis=-1)
        )
    return jax.nn.silu(time)


def _waves(values: Array, width: int, cfg: UNetConfig) -> Array:
    return timestep_embedding(values, width, flip_sin_to_cos=cfg.flip_sin_to_cos, freq_shift=cfg.freq_shift)


def _embed(p: Params, x: Array) -> Array:
    return linear(p["linear_2"], jax.nn.silu(linear(p["linear_1"], x)))
