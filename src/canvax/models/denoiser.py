"""What a family of models gives the loop: the network that denoises, as one record.

A record is a frozen dataclass over a config: hashable, and with a ``repr`` that says all that decides its programs,
since both are part of a compiled program's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp

from canvax.models.beside import ADAPTERS, Places, with_adapters
from canvax.models.configs import UNetConfig
from canvax.models.deep_features import Recall, deep_shape, unet_reusing
from canvax.models.text import IMAGE_PROMPTS, Conditions
from canvax.models.unet import (
    Residuals,
    Special,
    cross_attention_kv,
    skip_connections,
    unet,
    unet_context,
    unet_spec,
)
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array


class Denoiser(Protocol):
    """The network inside the loop.

    Attributes:
        component: its key in ``params``, which is its folder in a checkpoint.
        spec: its parameters.
        deep_layers: how many numbers of layers ``apply_reusing`` can be told, 0 if it cannot be called.
    """

    @property
    def component(self) -> str: ...

    @property
    def spec(self) -> Spec: ...

    @property
    def deep_layers(self) -> int: ...

    def prepare(self, p: Params, conditions: Conditions) -> Any:
        """What ``apply`` needs of the conditions [B, ...] and is the same in each step; once before the loop."""
        ...

    def apply(self, p: Params, x: Array, timestep: Array, prepared: Any, *, perturbed: int = 0) -> Array:
        """Network output [B, h, w, C] for scaled noisy latents [B, h, w, C] float32 and timesteps [B].

        ``perturbed`` is that of ``canvax.models.unet.Special``.
        """
        ...

    def apply_reusing(
        self,
        p: Params,
        x: Array,
        timestep: Array,
        prepared: Any,
        *,
        layers: int,
        recall: Recall,
        perturbed: int = 0,
    ) -> tuple[Array, Any]:
        """``apply`` with deep features that ``recall`` may take from elsewhere, and what it remembers."""
        ...

    def deep_shape(self, latents: Sequence[int], layers: int) -> tuple[int, ...]:
        """Shape of these features for latents of shape [B, h, w, C]."""
        ...


@dataclass(frozen=True)
class UNetDenoiser:
    """The UNet of Stable Diffusion 1.x, 2.x and XL as a ``Denoiser``.

    Attributes:
        cfg: its config.
        places: for adapters beside its weights: they are in the parameters then, and each image's part of each of them
            is among its conditions.
    """

    cfg: UNetConfig
    places: Places | None = None

    @property
    def component(self) -> str:
        return "unet"

    @property
    def spec(self) -> Spec:
        return unet_spec(self.cfg)

    @property
    def deep_layers(self) -> int:
        return skip_connections(self.cfg)

    def prepare(self, p: Params, conditions: Conditions) -> dict[str, Any]:
        beside: dict[str, Any] = {}
        if self.places is not None:
            conditions = dict(conditions)
            p = beside[ADAPTERS] = with_adapters(p, conditions.pop(ADAPTERS), self.spec, self.places)
        # Of the blocks, which are calls on the CPU, the compiler would not move the keys and values out of the loop.
        kv = cross_attention_kv(p, conditions["text"].astype(compute_dtype(p)), self.cfg)
        prepared: dict[str, Any] = {**conditions, "text": kv, **beside}
        if (prompts := prepared.pop(IMAGE_PROMPTS, None)) is not None:
            from canvax.models.ip_adapter import with_image_prompts  # which most calls never need

            prepared["text"] = with_image_prompts(kv, prompts, self.cfg)
        return prepared

    def _input(self, p: Params, x: Array, prepared: dict[str, Any]) -> tuple[Params, Array, dict[str, Any]]:
        """What the UNet is given: an inpainting one the mask and the masked image behind the latents."""
        rest = {name: value for name, value in prepared.items() if name not in ("masked", ADAPTERS)}
        x = jnp.concatenate([x, prepared["masked"]], axis=-1) if "masked" in prepared else x
        return prepared.get(ADAPTERS, p), x.astype(compute_dtype(p)), rest

    def apply(
        self,
        p: Params,
        x: Array,
        timestep: Array,
        prepared: dict[str, Any],
        *,
        perturbed: int = 0,
        residuals: Residuals | None = None,
    ) -> Array:
        p, x, prepared = self._input(p, x, prepared)
        special = Special(perturbed=perturbed)
        return unet(p, x, timestep, cfg=self.cfg, special=special, residuals=residuals, **prepared)

    def apply_reusing(
        self,
        p: Params,
        x: Array,
        timestep: Array,
        prepared: dict[str, Any],
        *,
        layers: int,
        recall: Recall,
        perturbed: int = 0,
    ) -> tuple[Array, Any]:
        p, x, prepared = self._input(p, x, prepared)
        context = unet_context(p, x, timestep, cfg=self.cfg, **prepared)
        context = context._replace(special=Special(perturbed=perturbed))
        return unet_reusing(p, x, context, self.cfg, layers=layers, recall=recall)

    def deep_shape(self, latents: Sequence[int], layers: int) -> tuple[int, ...]:
        return deep_shape(self.cfg, latents, layers)
