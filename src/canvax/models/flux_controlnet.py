"""ControlNets of FLUX.1 (InstantX, Shakker Labs, XLabs 2024): some of its blocks, which read a control image too.

The control image is encoded by the model's autoencoder, in XLabs' networks by a few convolutions. Its tokens are added
to those of the noisy image. The image's tokens after each block, projected, are added after one or several blocks of
the model. A union reads the type of the control image as a token before the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.kernels.outline import scope
from canvax.models.configs import Count
from canvax.models.controlled import Control, Features
from canvax.models.controlnet import HintConfig, embedded_hint, hint_spec, scaled
from canvax.models.decode import encode_images
from canvax.models.denoiser import REFERENCES, Packing
from canvax.models.dit import Rope
from canvax.models.flux import FluxConfig, FluxContext, flux_blocks, flux_context, flux_spec
from canvax.models.text import Conditions
from canvax.models.unet import Residuals
from canvax.nn import embedding, embedding_spec, linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType, HostArray

TYPES: Mapping[str, int] = {
    "canny": 0, "tile": 1, "depth": 2, "blur": 3, **dict.fromkeys(("pose", "openpose"), 4),
    **dict.fromkeys(("gray", "grey"), 5), **dict.fromkeys(("lq", "low_quality"), 6),
}  # fmt: skip
"""Index of each type in the unions of InstantX and Shakker Labs."""

HINT = HintConfig(conditioning_embedding_out_channels=(16, 16, 16, 16))
"""Convolutions of XLabs' networks."""

GUIDANCE = 3.5
"""Guidance scale that a network trained for dev reads with a model that has none, such as schnell."""

_PACKING = Packing(2, channels_first=True)


@dataclass(frozen=True)
class FluxControlConfig(FluxConfig):
    """``FluxControlNetModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "FluxControlNetModel"

    num_mode: Count | None = None
    conditioning_embedding_channels: Count | None = None

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1, 2)}  # the network only reads tokens of 2 x 2

    def __post_init__(self) -> None:
        super().__post_init__()
        channels = self.conditioning_embedding_channels
        if self.masked or not self.blocks or (channels and 4 * channels != self.in_channels):
            raise CheckpointError(
                f"FluxControlNetModel does not support in_channels {self.in_channels} with out_channels "
                f"{self.out_channels}, conditioning_embedding_channels {channels} and {self.blocks} blocks"
            )

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.num_layers + self.num_single_layers


@dataclass(frozen=True)
class FluxControlNet(Control):
    """A ControlNet of FLUX.1: its config and its functions.

    Attributes:
        cfg: its config.
        base: config of the transformer that it adds to.
        vae: the autoencoder that encodes control images.
    """

    cfg: FluxControlConfig
    base: FluxConfig
    vae: Any
    names = TYPES

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], base: FluxConfig, vae: Any) -> Self:
        """Read a parsed ``config.json`` of diffusers.

        Raises:
            CheckpointError: naming every field whose value is not supported, or does not fit the transformer.
        """
        cfg = FluxControlConfig.from_dict(config)
        names = ("dim", "features", "joint_attention_dim", "pooled_projection_dim")
        sizes = [(name, getattr(cfg, name), getattr(base, name)) for name in names]
        if faults := [f"{name} {got} instead of {want}" for name, got, want in sizes if got != want]:
            raise CheckpointError(f"is a ControlNet for another transformer ({'; '.join(faults)})")
        return cls(cfg, base, vae)

    @property
    def encoder(self) -> str:
        """The autoencoder; "" for XLabs' networks."""
        return "" if self._convolves else "vae"

    @property
    def _convolves(self) -> bool:
        return self.cfg.conditioning_embedding_channels is not None

    @property
    def spec(self) -> Spec:
        return flux_control_spec(self.cfg)

    @property
    def layers(self) -> int:
        return self.cfg.blocks

    @property
    def factor(self) -> int:
        return 8 if self._convolves else self.vae.factor

    @property
    def slots(self) -> int:
        return self.cfg.num_mode or 0

    def encode(self, p: Params, images: Array) -> tuple[Array, ...]:
        """Return the tokens of control images [B, H, W, 3] in 0..1: ([B, 1, L, C] float32,)."""
        if self._convolves:
            latents = embedded_hint(p["input_hint_block"], (2 * images - 1).astype(compute_dtype(p)), HINT)
        else:
            latents, _ = encode_images(p, images, cfg=self.vae)
        return (_PACKING.pack(latents).astype(jnp.float32),)

    def together(self, read: Sequence[tuple[HostArray, ...]], slots: Sequence[int], weights: Sequence[float]) -> Any:
        (only,), (slot,), (weight,) = read, slots, weights
        return (*only, np.int32(slot), np.float32(weight)) if self.slots else only

    def features(self, latents: Sequence[int], dtype: DType) -> Features:
        """Return the shapes of the control image's tokens and, for a union, of its type [B] and its weight [B]."""
        del dtype
        tokens = jax.ShapeDtypeStruct((*latents[:3], self.cfg.features), jnp.float32)
        each = [jax.ShapeDtypeStruct(tuple(latents[:1]), kind) for kind in (jnp.int32, jnp.float32)]
        return (tokens, *each) if self.slots else (tokens,)

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> FluxContext:
        """Embed the text and compute all positions, once before the loop."""
        given = {name: value for name, value in conditions.items() if name != REFERENCES}
        given.setdefault("guidance", jnp.full(latents[0], GUIDANCE, jnp.float32))
        return flux_context(p, given, compute_dtype(p), self.cfg, tokens=latents[2])

    def residuals(
        self, p: Params, x: Array, timestep: Array, prepared: FluxContext, features: tuple[Array, ...], scales: Array
    ) -> tuple[Array, ...]:
        """Return the projected tokens of the image after each block [B, L, D], each times its scale [B, N]."""
        dtype, context = compute_dtype(p), prepared
        tokens, *typed = features
        if typed:
            mode, weight = typed
            scales = scales * weight[:, None]
            token = embedding(p["controlnet_mode_embedder"], mode[:, None]).astype(dtype)
            rope = Rope(*(jnp.concatenate([part[:, :1], part], axis=1) for part in context.rope))  # of a token of text
            context = context._replace(text=jnp.concatenate([token, context.text], axis=1), rope=rope)
        image = linear(p["x_embedder"], x[:, 0].astype(dtype))
        image = image + linear(p["controlnet_x_embedder"], tokens[:, 0].astype(dtype))
        outputs: list[Array] = []

        def after(i: int, h: Array, first: int) -> Array:
            double = i < self.cfg.num_layers
            name, at = ("controlnet_blocks", i) if double else ("controlnet_single_blocks", i - self.cfg.num_layers)
            outputs.append(scaled(linear(p[name][str(at)], h[:, first:]), scales[:, i]))
            return h

        with scope("controlnet"):
            flux_blocks(p, timestep, image, context, self.cfg, after)
        return tuple(outputs)

    def nothing(self, shape: Sequence[int], dtype: DType) -> tuple[Array, ...]:
        """Return zeros of the shapes of ``residuals`` for latents in the loop [B, 1, L, C]."""
        return (jnp.zeros((shape[0], shape[2], self.cfg.dim), dtype),) * self.layers

    def placed(self, residuals: tuple[Array, ...]) -> Residuals:
        """Return the residuals of all blocks of the transformer: one for several in a row; in turn for XLabs."""

        def spread(few: tuple[Array, ...], blocks: int, *, in_turn: bool = False) -> list[Array | None]:
            if not few:
                return [None] * blocks
            each = -(-blocks // len(few))
            return [few[i % len(few) if in_turn else i // each] for i in range(blocks)]

        double, single = residuals[: self.cfg.num_layers], residuals[self.cfg.num_layers :]
        placed = spread(double, self.base.num_layers, in_turn=self._convolves)
        return Residuals((*placed, *spread(single, self.base.num_single_layers)))


def flux_control_spec(cfg: FluxControlConfig) -> Spec:
    """Declare the parameters under the names of diffusers."""
    width = cfg.dim
    spec = {name: part for name, part in flux_spec(cfg).items() if name not in ("norm_out", "proj_out") and part}
    for name, count in (("controlnet_blocks", cfg.num_layers), ("controlnet_single_blocks", cfg.num_single_layers)):
        spec |= {name: {str(i): linear_spec(width, width) for i in range(count)}} if count else {}
    if cfg.num_mode:
        spec["controlnet_mode_embedder"] = embedding_spec(cfg.num_mode, width)
    if cfg.conditioning_embedding_channels:
        spec["input_hint_block"] = hint_spec(HINT, cfg.conditioning_embedding_channels)
    return spec | {"controlnet_x_embedder": whole(linear_spec(cfg.in_channels, width))}
