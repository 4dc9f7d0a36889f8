"""IP-Adapter (Ye et al. 2023): an image as a prompt, through additional keys and values in the attention to the text.

An image becomes a few tokens, and these become keys and values for every attention to the text, once before the loop.
Only the attention itself runs inside the loop; the scale is multiplied into the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from canvax.kernels.attention import attention
from canvax.kernels.outline import scope
from canvax.models.clip_vision import vision_encoder, vision_encoder_spec
from canvax.models.configs import ClipVisionConfig, UNetConfig
from canvax.models.unet import CrossAttentionKV, down_layers, up_layers
from canvax.nn import gelu, layer_norm, linear, linear_spec, norm_spec
from canvax.params import Param, Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array

Kind = Literal["plain", "plus", "full"]
"""Network that turns an image into tokens: a linear map of CLIP's vector, a resampler of CLIP's features, or a small
network applied to each of these features.
"""

HEAD = 64
"""Width of a head of the resampler."""

ImageKV = dict[str, Any]
"""Features of one adapter's image prompts for the images of a batch:

    kv       for each attention in the file's order: keys and values [B, I, T, N, Dh] of I image prompts
    scale    [B, I, L] float32, the scale of each image prompt in each of the L attentions
    masks    for each level, from the largest: mask of each image prompt [B, h w, I] float32; absent if none has one
"""


class Attention(NamedTuple):
    """An attention to the text.

    Attributes:
        path: path of its keys and values in a ``CrossAttentionKV``: part, block, attention, layer.
        level: index of its resolution, 0 for the largest.
        channels: channels of its keys.
        heads: number of heads.
    """

    path: tuple[str, ...]
    level: int
    channels: int
    heads: int


def attentions_to_text(cfg: UNetConfig) -> list[Attention]:
    """Return all attentions to the text in the order of the files: way down, way up, middle."""
    last = len(cfg.block_out_channels) - 1
    attentions = [
        Attention(("down_blocks", str(i), str(j), str(b)), i, level.channels, level.heads)
        for i, level, j in down_layers(cfg)
        for b in range(level.depth)
        if level.attends and j is not None
    ]
    attentions += [
        Attention(("up_blocks", str(i), str(j), str(b)), last - i, level.channels, level.heads)
        for i, level, j in up_layers(cfg)
        for b in range(level.depth)
        if level.attends
    ]
    middle = [("mid_block", "0", str(b)) for b in range(cfg.depths[-1])]
    return attentions + [Attention(path, last, cfg.block_out_channels[-1], cfg.heads[-1]) for path in middle]


@dataclass(frozen=True)
class ImageEncoder:
    """CLIP's image encoder with its projection."""

    cfg: ClipVisionConfig

    @property
    def spec(self) -> Spec:
        """Parameters of ``CLIPVisionModelWithProjection``."""
        projection = linear_spec(self.cfg.hidden_size, self.cfg.projection_dim, bias=False)
        return {"vision_model": vision_encoder_spec(self.cfg)["vision_model"], "visual_projection": projection}


@dataclass(frozen=True)
class IPAdapter:
    """An IP-Adapter: its sizes, read from its arrays, and its functions.

    Attributes:
        kind: network that makes the tokens.
        reads: width of its input, CLIP's vector or features.
        width: width of a token, which is that of the text.
        tokens: T, the number of tokens of an image.
        unet: config of the UNet it was trained with.
        hidden: inner width of a resampler.
        depth: number of layers of a resampler.
        heads: number of heads of a resampler.
    """

    kind: Kind
    reads: int
    width: int
    tokens: int
    unet: UNetConfig
    hidden: int = 0
    depth: int = 0
    heads: int = 0

    @property
    def spec(self) -> Spec:
        """Declared parameters, under the names of the released files."""
        layers: Spec = {}
        for i, layer in enumerate(self.attentions):
            to = {f"{name}_ip": linear_spec(self.width, layer.channels, bias=False) for name in ("to_k", "to_v")}
            layers[str(2 * i + 1)] = to
        return {"image_proj": self._projection, "ip_adapter": layers}

    @property
    def _projection(self) -> Spec:
        if self.kind == "plain":
            return {"proj": linear_spec(self.reads, self.tokens * self.width), "norm": norm_spec(self.width)}
        if self.kind == "full":
            inner, outer = linear_spec(self.reads, self.reads), linear_spec(self.reads, self.width)
            return {"proj": {"0": inner, "2": outer, "3": norm_spec(self.width)}}
        layer = _resampler_layer_spec(self.hidden, self.heads * HEAD)
        return {
            "latents": Param((1, self.tokens, self.hidden), (None, None, None), "normal"),
            "proj_in": linear_spec(self.reads, self.hidden),
            "layers": {str(i): layer for i in range(self.depth)},
            "proj_out": linear_spec(self.hidden, self.width),
            "norm_out": norm_spec(self.width),
        }

    @property
    def attentions(self) -> list[Attention]:
        """All attentions to the text in the order of the files: way down, way up, middle."""
        return attentions_to_text(self.unet)

    def image_tokens(self, p: Params, embeds: Array) -> Array:
        """Map CLIP's vector [B, R] or features [B, P, R] to tokens [B, T, D]."""
        p = p["image_proj"]
        if self.kind == "plain":
            return layer_norm(p["norm"], linear(p["proj"], embeds).reshape(embeds.shape[0], self.tokens, -1))
        if self.kind == "full":
            return layer_norm(p["proj"]["3"], linear(p["proj"]["2"], gelu(linear(p["proj"]["0"], embeds))))
        x = linear(p["proj_in"], embeds)
        latents = jnp.broadcast_to(p["latents"], (x.shape[0], *p["latents"].shape[1:]))
        for i in range(self.depth):
            latents = _resampler_layer(p["layers"][str(i)], x, latents, self.heads)
        return layer_norm(p["norm_out"], linear(p["proj_out"], latents))

    def keys_and_values(self, p: Params, embeds: Array) -> tuple[tuple[Array, Array], ...]:
        """Return keys and values [B, T, N, Dh] of images for each attention, from their CLIP vectors or features."""
        pairs = []
        with scope("image_prompt"):
            tokens = self.image_tokens(p, embeds.astype(compute_dtype(p)))
            for i, layer in enumerate(self.attentions):
                projections = p["ip_adapter"][str(2 * i + 1)]
                shape = (*tokens.shape[:2], layer.heads, -1)
                k, v = (
                    linear(projections["to_k_ip"], tokens).reshape(shape),
                    linear(projections["to_v_ip"], tokens).reshape(shape),
                )
                pairs.append((k, v))
        return tuple(pairs)


def encode_image_prompt(p: Params, images: Array, *, net: ImageEncoder) -> tuple[Array, Array]:
    """Encode images [B, S, S, 3] in 0..1 to CLIP's vector [B, P] and the features before its last layer [B, T, D]."""
    features, whole = vision_encoder(p, images, net.cfg)
    return linear(p["visual_projection"], whole), features


def read_image_prompt(p: Params, embeds: Array, *, net: IPAdapter) -> tuple[tuple[Array, Array], ...]:
    """Return ``IPAdapter.keys_and_values``, as a program."""
    return net.keys_and_values(p, embeds)


def with_image_prompts(kv: CrossAttentionKV, prompts: Mapping[str, ImageKV], cfg: UNetConfig) -> CrossAttentionKV:
    """Return the keys and values of a text with those of image prompts added, multiplied by their scales.

    Attention to both is softmax(q k_text) v_text + scale softmax(q k_image) v_image (section 3.2.2, eq. 5), so the
    scale can be multiplied into the values. Image prompts of one adapter share a softmax, unless they have masks.
    """
    layers = attentions_to_text(cfg)
    added: dict[tuple[str, ...], list[tuple[Array, Array, Array | None]]] = {layer.path: [] for layer in layers}
    for prompt in prompts.values():
        for i, layer in enumerate(layers):
            k, v = prompt["kv"][i]
            scale = prompt["scale"][:, :, i, None, None, None]
            v = jnp.where(scale == 0, 0, v.astype(jnp.float32) * scale).astype(v.dtype)
            mask = prompt["masks"][layer.level] if "masks" in prompt else None
            if mask is None:
                k, v = (array.reshape(array.shape[0], -1, *array.shape[3:]) for array in (k, v))
            added[layer.path].append((k, v, mask))

    def joined(tree: Any, path: tuple[str, ...]) -> Any:
        if path in added:
            return (*tree, tuple(added[path]))
        return {key: joined(branch, (*path, key)) for key, branch in tree.items()}

    return joined(kv, ())


def masked_levels(cfg: UNetConfig, latents: Sequence[int]) -> list[tuple[int, int]]:
    """Return height and width of the features of each level, for latents of shape [B, h, w, C]."""
    sizes = [(latents[1], latents[2])]
    for _ in cfg.block_out_channels[1:]:
        height, width = sizes[-1]
        sizes.append((-(-height // 2), -(-width // 2)))
    return sizes


def _resampler_layer_spec(width: int, inner: int) -> Spec:
    return {
        "0": {
            "norm1": norm_spec(width),
            "norm2": norm_spec(width),
            "to_q": linear_spec(width, inner, bias=False),
            "to_kv": linear_spec(width, 2 * inner, bias=False),
            "to_out": linear_spec(inner, width, bias=False),
        },
        "1": {
            "0": norm_spec(width),
            "1": linear_spec(width, 4 * width, bias=False),
            "3": linear_spec(4 * width, width, bias=False),
        },
    }


def _resampler_layer(p: Params, x: Array, latents: Array, heads: int) -> Array:
    """Let latents [B, T, D] attend to features [B, P, D] and to themselves (Alayrac et al. 2022, section 3.1.1)."""
    attend, feed = p["0"], p["1"]
    asking = layer_norm(attend["norm2"], latents)
    seen = jnp.concatenate([layer_norm(attend["norm1"], x), asking], axis=1)

    def split(y: Array) -> Array:
        return y.reshape(*y.shape[:2], heads, -1)

    k, v = jnp.split(linear(attend["to_kv"], seen), 2, axis=-1)
    attended = attention(split(linear(attend["to_q"], asking)), split(k), split(v))
    latents = latents + linear(attend["to_out"], attended.reshape(*attended.shape[:2], -1))
    return latents + linear(feed["3"], gelu(linear(feed["1"], layer_norm(feed["0"], latents))))
