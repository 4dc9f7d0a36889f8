"""A denoiser combined with networks that read control images, as a ``Denoiser``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from canvax.models.denoiser import NEGATIVE, PLAIN, DenoiserWrapper, Extensible, Extras, Inputs, Row, Shapes
from canvax.models.text import Conditions
from canvax.models.unet import Residuals
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType, HostArray

Features = tuple[jax.ShapeDtypeStruct, ...]
"""Shapes of what a network reads of the control images of a batch."""


class Control(Protocol):
    """A network that reads a control image: ``canvax.models.controlnet``, ``flux_controlnet``, ``t2i_adapter``.

    Implementations are frozen records whose ``repr`` determines the compiled programs, as for a ``Denoiser``.

    Attributes:
        mixes: an image of a call may have control images of several types.
        names: index of each type that networks of this kind may have.
    """

    mixes: ClassVar[bool] = False
    names: ClassVar[Mapping[str, int]] = {}

    @property
    def encoder(self) -> str:
        """The component whose parameters ``encode`` reads; "" for its own."""
        return ""

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        ...

    @property
    def layers(self) -> int:
        """Number of its scales in one evaluation."""
        ...

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis."""
        ...

    @property
    def pools(self) -> bool:
        """True if its output is averaged over all pixels; it is then not added for the negative prompt."""
        return False

    @property
    def slots(self) -> int:
        """Number of types of images that it tells apart; 0 for a network without types."""
        return 0

    @property
    def types(self) -> Mapping[str, int]:
        """Index of each type by name."""
        return {name: slot for name, slot in self.names.items() if slot < self.slots}

    def encode(self, p: Params, images: Array) -> tuple[Array, ...]:
        """Return the features of control images [B, H, W, 3] float32 in 0..1."""
        ...

    def together(self, read: Sequence[tuple[HostArray, ...]], slots: Sequence[int], weights: Sequence[float]) -> Any:
        """Combine the control images of one image of a call, on the host; the result is that of ``features``, without
        B.

        Args:
            read: result of ``encode`` for each image, without B.
            slots: index of each image's type.
            weights: weight of each image relative to the others.
        """
        del slots, weights
        (only,) = read
        return only

    def features(self, latents: Sequence[int], dtype: DType) -> Features:
        """Return the shapes of what ``residuals`` reads for latents in the loop [B, h, w, C].

        They are those of ``encode``'s result, or of ``together`` for a network with types. ``dtype`` is that of its
        parameters.
        """
        ...

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        """Return the part of the conditions [B, ...] that ``residuals`` needs, once before the loop."""
        ...

    def residuals(
        self, p: Params, x: Array, timestep: Array, prepared: Any, features: tuple[Array, ...], scales: Array
    ) -> Any:
        """Return the residuals for the denoiser's features, each of ``layers`` times its scale [B, L]."""
        ...

    def nothing(self, shape: Sequence[int], dtype: DType) -> Any:
        """Return ``residuals`` of zeros, for latents [B, h, w, C]."""
        ...

    def placed(self, residuals: Any) -> Residuals:
        """Return the result of ``residuals`` where the denoiser adds it."""
        return residuals


@dataclass(frozen=True)
class Controlled(DenoiserWrapper):
    """The denoiser of a call with control images. Its parameters are ``{"unet": ..., network's name: ...}``.

    Attributes:
        base: the denoiser.
        nets: the networks by name. Their features of an image are a condition of the same name.
    """

    base: Extensible
    nets: tuple[tuple[str, Control], ...]

    needs = "residuals"

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        """Add the columns ``control``, the scale of each layer of each network for the negative and the other prompts,
        and ``any control``, the networks that any image of a row needs.
        """
        inner, count = self.base.inputs(latents, text, dtype), len(self.nets)
        features = {name: net.features(latents, dtype(name)) for name, net in self.nets}
        layers = max(net.layers for _, net in self.nets)
        control = jax.ShapeDtypeStruct((count, 2, layers), jnp.float32)
        return replace(
            inner,
            conditions={**inner.conditions, **features},
            columns={**inner.columns, "control": control},
            shared={**inner.shared, "any control": jax.ShapeDtypeStruct((count,), jnp.bool_)},
        )

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> dict[str, Any]:
        names = [name for name, _ in self.nets]
        plain = {name: value for name, value in conditions.items() if name not in names}
        read = {name: (net.prepare(p[name], plain, latents), conditions[name]) for name, net in self.nets}
        base = self.base.prepare(p[self.component], plain, latents)
        return {**read, self.component: base, "prompts": (conditions["role"] != NEGATIVE).astype(jnp.int32)}

    def apply(
        self, p: Params, x: Array, row: Row, prepared: dict[str, Any], memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        """Evaluate the denoiser with the residuals of the networks, scaled by the row."""
        half = prepared["prompts"][:, None, None, None]
        scales = jnp.take_along_axis(row["control"], half, axis=2)[:, :, 0]
        residuals_of_each = []
        for i, (name, net) in enumerate(self.nets):
            condition, features = prepared[name]

            def read(
                i: int = i, net: Control = net, name: str = name, condition: Any = condition, features: Any = features
            ) -> Any:
                return net.residuals(p[name], x, row["timestep"], condition, features, scales[:, i])

            def nothing(net: Control = net, name: str = name) -> Any:
                return net.nothing(x.shape, compute_dtype(p[name]))

            residuals_of_each.append(net.placed(jax.lax.cond(row["any control"][i], read, nothing)))
        dtype = compute_dtype(p[self.component])
        residuals = jax.tree.map(lambda array: array.astype(dtype), sum_residuals(residuals_of_each))
        extras = extras._replace(residuals=residuals)
        return self.base.apply(p[self.component], x, row, prepared[self.component], memory, extras)


def encode_control(p: Params, images: Array, *, net: Control) -> tuple[Array, ...]:
    """Return a network's features of control images [B, H, W, 3] float32 in 0..1."""
    return net.encode(p, images)


def sum_residuals(residuals: Sequence[Residuals]) -> Residuals:
    """Add up the residuals of several networks."""

    def total(parts: list[Any]) -> Any:
        present = [part for part in parts if part is not None]
        return sum(present[1:], present[0]) if present else None

    skips = [residual.skips for residual in residuals if residual.skips]
    within = [residual.within or {} for residual in residuals]
    return Residuals(
        tuple(total(list(parts)) for parts in zip(*skips, strict=True)),
        total([residual.middle for residual in residuals]),
        {at: total([level.get(at) for level in within]) for at in sorted({at for level in within for at in level})},
    )
