"""A UNet and the networks that read control images, as one ``Denoiser``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from canvax.models.beside import ADAPTERS
from canvax.models.denoiser import UNetDenoiser
from canvax.models.text import Conditions
from canvax.models.unet import Residuals
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType


class Control(Protocol):
    """A network that reads a control image: ``canvax.models.controlnet``, ``canvax.models.t2i_adapter``.

    Like a ``Denoiser`` it is a frozen record whose ``repr`` says all that decides its programs.

    Attributes:
        spec: its parameters.
        layers: how many numbers say how strong it is in one evaluation.
        factor: pixels for a latent.
        pools: whether it adds nothing for the negative prompt.
    """

    @property
    def spec(self) -> Spec: ...

    @property
    def layers(self) -> int: ...

    @property
    def factor(self) -> int: ...

    @property
    def pools(self) -> bool: ...

    def encode(self, p: Params, images: Array) -> tuple[Array, ...]:
        """What the network keeps of control images [B, H, W, 3] float32 in 0..1."""
        ...

    def features(self, latents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Shapes of what ``encode`` gives for latents of shape [B, h, w, C]."""
        ...

    def prepare(self, p: Params, conditions: Conditions) -> Any:
        """What ``residuals`` needs of the conditions [B, ...] and is the same in each step."""
        ...

    def residuals(
        self, p: Params, x: Array, timestep: Array, prepared: Any, features: tuple[Array, ...], scales: Array
    ) -> Residuals:
        """What is added to the UNet's features, each of ``layers`` times its scale [B, L]."""
        ...

    def nothing(self, shape: Sequence[int], dtype: DType) -> Residuals:
        """``residuals`` that are zero, for latents [B, h, w, C]."""
        ...


Strengths = tuple[Array, Array]
"""How strong each network is in one evaluation: scales [B, N, L] float32, and which are needed at all [N] bool."""


@dataclass(frozen=True)
class ControlledDenoiser:
    """The denoiser of a call with control images. Its parameters are ``{"unet": ..., network's name: ...}``.

    Attributes:
        base: the UNet.
        nets: the networks by name. What each has read of an image is among the conditions, under that name.
    """

    base: UNetDenoiser
    nets: tuple[tuple[str, Control], ...]

    @property
    def layers(self) -> int:
        """L: entries of the scales."""
        return max(net.layers for _, net in self.nets)

    def prepare(self, p: Params, conditions: Conditions) -> dict[str, Any]:
        """As ``Denoiser.prepare``."""
        names = [name for name, _ in self.nets]
        told = {name: value for name, value in conditions.items() if name not in names}
        others = {name: value for name, value in told.items() if name != ADAPTERS}  # which are beside the UNet's alone
        own = {name: (net.prepare(p[name], others), conditions[name]) for name, net in self.nets}
        return {**own, self.base.component: self.base.prepare(p[self.base.component], told)}

    def apply(
        self, p: Params, x: Array, timestep: Array, prepared: dict[str, Any], *, control: Strengths, **changed: Any
    ) -> Array:
        """As ``Denoiser.apply``, each network as strong as ``control`` says."""
        scales, needed = control
        found = []
        for i, (name, net) in enumerate(self.nets):
            own, features = prepared[name]

            def read(i: int = i, net: Control = net, name: str = name, own: Any = own, features: Any = features) -> Any:
                return net.residuals(p[name], x, timestep, own, features, scales[:, i])

            def nothing(net: Control = net, features: Any = features) -> Any:
                return net.nothing(x.shape, features[0].dtype)

            found.append(jax.lax.cond(needed[i], read, nothing))
        base = self.base.component
        dtype = compute_dtype(p[base])
        residuals = jax.tree.map(lambda one: one.astype(dtype), summed(found))
        return self.base.apply(p[base], x, timestep, prepared[base], residuals=residuals, **changed)


def encode_control(p: Params, images: Array, *, net: Control) -> tuple[Array, ...]:
    """What a network keeps of control images [B, H, W, 3] float32 in 0..1."""
    return net.encode(p, images)


def summed(found: Sequence[Residuals]) -> Residuals:
    """Of several networks."""

    def total(parts: list[Any]) -> Any:
        given = [part for part in parts if part is not None]
        return sum(given[1:], given[0]) if given else None

    skips = [one.skips for one in found if one.skips]
    within = [one.within or {} for one in found]
    return Residuals(
        tuple(total(list(parts)) for parts in zip(*skips, strict=True)),
        total([one.middle for one in found]),
        {at: total([one.get(at) for one in within]) for at in sorted({at for one in within for at in one})},
    )


def of_halves(column: Array, times: int, *, guided: bool) -> Array:
    """Scales of each image [B, N, 2, L], for the negative prompt and for the others, as [times * B, N, L]."""
    halves = [0] * guided + [1] * (times - guided)
    picked = jnp.moveaxis(column[:, :, jnp.array(halves)], 2, 1)
    return picked.reshape(-1, picked.shape[2], picked.shape[3])
