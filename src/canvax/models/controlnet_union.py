"""ControlNet-Union (xinsir 2024): one ControlNet for several types of control image, alone or together.

Each image is embedded as in a ControlNet. A small transformer reads one token per image, the mean of its features plus
an embedding of its type, and its output is added at all positions. The types that are present are added to the time
embedding. A type without an image has weight 0, so that the choice of types never recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, UNetConfig
from canvax.models.controlled import Control, Features
from canvax.models.controlnet import ControlNet, outputs_of, scaled_outputs
from canvax.models.text import Conditions
from canvax.models.unet import Residuals, timestep_embedding, unet_context
from canvax.nn import conv2d, layer_norm, linear, linear_spec, norm_spec, quick_gelu
from canvax.params import Param, Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType, HostArray

TYPES: Mapping[str, int] = {
    "openpose": 0,
    "depth": 1,
    **dict.fromkeys(("softedge", "hed", "pidi", "scribble", "ted"), 2),
    **dict.fromkeys(("canny", "lineart", "anime_lineart", "mlsd"), 3),
    "normal": 4,
    "segment": 5,
    "tile": 6,
    "repaint": 7,
}
"""Index of each type in the released networks; only ProMax has the last two."""


@dataclass(frozen=True)
class UnionConfig(Config):
    """Fields that ``ControlNetUnionModel`` adds to a ControlNet's: names and defaults are those of diffusers."""

    num_control_type: Count = 6
    num_trans_channel: Count = 320
    num_trans_layer: Count = 1
    num_proj_channel: Count = 320


@dataclass(frozen=True)
class UnionNet(Control):
    """A ControlNet-Union, as a ``canvax.models.controlled.Control``.

    Attributes:
        net: the ControlNet that it extends.
        union: config of the layers that fuse the images.
    """

    net: ControlNet
    union: UnionConfig
    mixes = True
    names = TYPES

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed ``config.json`` of diffusers.

        Raises:
            CheckpointError: naming every field whose value is not supported.
        """
        names = UnionConfig.__dataclass_fields__
        unread = (*names, "num_trans_head")  # without effect: each token attends only to itself
        rest = {name: value for name, value in config.items() if name not in unread}
        rest.setdefault("conditioning_embedding_out_channels", (48, 96, 192, 384))
        union = UnionConfig.from_dict({name: config[name] for name in names if name in config})
        net = ControlNet.from_dict(rest)
        first = net.unet.block_out_channels[0]
        faults = []
        if net.unet.addition_time_embed_dim is None:
            faults.append("no addition_time_embed_dim")
        if {union.num_trans_channel, union.num_proj_channel} != {first}:
            faults.append(
                f"num_trans_channel {union.num_trans_channel} and num_proj_channel {union.num_proj_channel} with "
                f"block_out_channels that begin with {first}"
            )
        if faults:
            raise CheckpointError("ControlNetUnionModel does not support " + "; ".join(faults))
        return cls(net, union)

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        return union_spec(self)

    @property
    def unet(self) -> UNetConfig:
        """Config of the way down and of the middle."""
        return self.net.unet

    @property
    def layers(self) -> int:
        """Number of the UNet's features that it adds to, including the middle."""
        return self.net.layers

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis."""
        return self.net.factor

    @property
    def pools(self) -> bool:
        """True if its output is averaged over all pixels; it is then not added for the negative prompt."""
        return self.net.pools

    @property
    def slots(self) -> int:
        """T, the number of types."""
        return self.union.num_control_type

    def encode(self, p: Params, images: Array) -> tuple[Array, ...]:
        """Return the features of images [B, H, W, 3] in 0..1 of any type: ([B, h, w, C0], their means [B, C0])."""
        (hint,) = self.net.encode(p, images)
        return hint, hint.mean((1, 2), dtype=jnp.float32).astype(hint.dtype)

    def together(self, read: Sequence[tuple[HostArray, ...]], slots: Sequence[int], weights: Sequence[float]) -> Any:
        hints, means = zip(*read, strict=True)
        hint = sum(
            np.float32(w) * np.asarray(hint_of_type, np.float32) for w, hint_of_type in zip(weights, hints, strict=True)
        )
        tokens = np.zeros((self.slots, *means[0].shape), means[0].dtype)
        strong = np.zeros(self.slots, means[0].dtype)
        for slot, weight, mean in zip(slots, weights, means, strict=True):
            tokens[slot], strong[slot] = mean, weight
        return np.asarray(hint).astype(hints[0].dtype), tokens, strong

    def features(self, latents: Sequence[int], dtype: DType) -> Features:
        """Return the shapes of the combined control images for latents [B, h, w, C].

        They are the weighted sum of the features of all images [B, h, w, C0]; their means [B, T, C0]; and their weights
        [B, T], 0 for types without an image.
        """
        (hint,), types = self.net.features(latents, dtype), (latents[0], self.slots)
        return hint, jax.ShapeDtypeStruct((*types, hint.shape[-1]), dtype), jax.ShapeDtypeStruct(types, dtype)

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> dict[str, Any]:
        """Return the part of the conditions [B, ...] that ``residuals`` needs, once before the loop."""
        return self.net.prepare(p, conditions, latents)

    def residuals(
        self, p: Params, x: Array, timestep: Array, prepared: dict[str, Any], features: tuple[Array, ...], scales: Array
    ) -> Residuals:
        """Return the residuals for the UNet's features; see ``ControlNet.residuals``."""
        net, conditions = self.net, dict(prepared)
        hint, means, weights = features
        x = x[..., : net.unet.in_channels].astype(compute_dtype(p))
        embedding = type_embedding(p, weights, self).astype(x.dtype)
        context = unet_context(p, x, timestep, conditions.pop("text"), net.unet, **conditions, added=embedding)
        first = conv2d(p["conv_in"], x)
        first = first + hint + fused(p, means, weights, self)[:, None, None]
        return scaled_outputs(outputs_of(p, first, context, net), scales, net)

    def nothing(self, shape: Sequence[int], dtype: DType) -> Residuals:
        """Return zeros of the shapes of ``residuals`` for latents [B, h, w, C]."""
        return self.net.nothing(shape, dtype)


def union_spec(net: UnionNet) -> Spec:
    """Declare the parameters under the names of diffusers, which are those of the released files, typo included."""
    width, types = net.union.num_trans_channel, net.slots
    first = net.unet.block_out_channels[0]
    layer: Spec = {
        "attn": {
            "in_proj_weight": Param((width, 3 * width), (None, None), layout="linear"),
            "in_proj_bias": Param((3 * width,), (None,), init="zeros"),
            "out_proj": linear_spec(width, width),
        },
        "ln_1": norm_spec(width),
        "ln_2": norm_spec(width),
        "mlp": {"c_fc": linear_spec(width, 4 * width), "c_proj": linear_spec(4 * width, width)},
    }
    return {
        **net.net.spec,
        "task_embedding": Param((types, width), (None, None), init="normal"),
        "transformer_layes": {str(i): layer for i in range(net.union.num_trans_layer)},
        "spatial_ch_projs": linear_spec(width, first),
        "control_add_embedding": {
            "linear_1": linear_spec(types * (net.unet.addition_time_embed_dim or 0), 4 * first),
            "linear_2": linear_spec(4 * first, 4 * first),
        },
    }


def type_embedding(p: Params, weights: Array, net: UnionNet) -> Array:
    """Return the embedding of the types that have an image [B, T], added to the time embedding [B, 4 C0]."""
    cfg = net.unet
    present = (weights != 0).astype(jnp.float32).reshape(-1)
    width = cfg.addition_time_embed_dim or 0
    embedding = timestep_embedding(present, width, flip_sin_to_cos=cfg.flip_sin_to_cos, freq_shift=cfg.freq_shift)
    inner = linear(
        p["control_add_embedding"]["linear_1"], embedding.reshape(weights.shape[0], -1).astype(weights.dtype)
    )
    return linear(p["control_add_embedding"]["linear_2"], jax.nn.silu(inner))


def fused(p: Params, means: Array, weights: Array, net: UnionNet) -> Array:
    """Return the images' contribution to all positions [B, C0].

    Args:
        p: the parameters.
        means: mean features of each image [B, T, C0].
        weights: weight of each image [B, T]; 0 for none.
        net: the record.
    """
    with jax.named_scope("control_types"):
        tokens = (means + p["task_embedding"][None]) * weights[..., None]
        for i in range(net.union.num_trans_layer):
            layer = p["transformer_layes"][str(i)]
            tokens = tokens + _attention(layer["attn"], layer_norm(layer["ln_1"], tokens))
            wide = quick_gelu(linear(layer["mlp"]["c_fc"], layer_norm(layer["ln_2"], tokens)))
            tokens = tokens + linear(layer["mlp"]["c_proj"], wide)
        added = linear(p["spatial_ch_projs"], tokens)
        return (added * weights[..., None]).sum(1)


def _attention(p: Params, x: Array) -> Array:
    """Apply attention [B, T, C] in which each token attends only to itself, so that only its value matters.

    diffusers computes this: its attention expects the tokens first, but gets the batch first. There a token attends to
    the tokens of its type in the batch. Both halves of guidance have the same tokens, so for a single image this is the
    token itself. Here the other images of a batch have no effect.
    """
    inner = x.shape[-1]
    values = {"weight": p["in_proj_weight"][:, 2 * inner :], "bias": p["in_proj_bias"][2 * inner :]}
    return linear(p["out_proj"], linear(values, x))
