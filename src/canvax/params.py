"""Parameters are a nested dict of arrays, declared once.

A model's *spec* is a nested dict of ``Param``. Everything else follows from it: abstract shapes, random
initialisation, strict loading, saving, sharding and counts. Keys along a path are the diffusers checkpoint's own dotted
name, so ``down_blocks.0.resnets.1.conv1.weight`` is ``params["down_blocks"]["0"]["resnets"]["1"]["conv1"]["weight"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.types import DType, HostArray, Params

Layout = Literal["plain", "linear", "conv", "conv1x1"]
Init = Literal["fan_in", "normal", "zeros", "ones"]
Spec = dict[str, Any]
"""Nested dict whose leaves are ``Param``."""


class Axis(NamedTuple):
    """A logical axis that may not be cut just anywhere.

    Attributes:
        name: its logical name.
        units: equal runs that stay whole: heads of an attention, groups of a normalisation.
        parts: sections side by side that are cut alike: 2 where a gate lies behind the values that it opens.
    """

    name: str
    units: int
    parts: int = 1


AxisName = str | Axis | None


@dataclass(frozen=True)
class Param:
    """One parameter: what it is in memory, and how a checkpoint stores it.

    Attributes:
        shape: shape in memory.
        axes: a logical name for each axis (``None`` for no name), which the sharding rules map to mesh axes; an
            ``Axis`` where it matters between which entries a cut goes.
        init: ``fan_in`` is normal with variance 1/fan_in over all axes but the last, ``normal`` has std 0.02.
        layout: checkpoint form. ``linear`` is stored (out, in), ``conv`` (out, in, kh, kw), ``conv1x1`` is a linear map
            that the checkpoint stores as a convolution (out, in, 1, 1), ``plain`` is stored as it is in memory.
        dtype: name of the dtype it has in any case; None for that of the model.
    """

    shape: tuple[int, ...]
    axes: tuple[AxisName, ...]
    init: Init = "fan_in"
    layout: Layout = "plain"
    dtype: str | None = None

    def __post_init__(self) -> None:
        rank = {"plain": len(self.shape), "linear": 2, "conv1x1": 2, "conv": 4}[self.layout]
        if len(self.shape) != rank or len(self.axes) != len(self.shape):
            raise ValueError(f"Param: shape {self.shape}, axes {self.axes} do not suit layout {self.layout!r}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def dtype_in(self, model: DType) -> np.dtype:
        """Its dtype in a model of dtype ``model``."""
        return jnp.dtype(self.dtype or model)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """The shape with an axis of its own for the ``parts`` of an axis, which devices need to share such an axis."""
        shape: list[int] = []
        for length, axis in zip(self.shape, self.axes, strict=True):
            parts = axis.parts if isinstance(axis, Axis) else 1
            shape += [parts, length // parts] if parts > 1 else [length]
        return tuple(shape)

    @property
    def checkpoint_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes accepted from a checkpoint; the first is the one written by ``save``.

        1x1 convolutions and linear maps are the same thing, and real files mix the two forms: Stable Diffusion 1.x
        projects with 1x1 convolutions, the original VAE stores its attention that way too.
        """
        if self.layout == "conv":
            kh, kw, i, o = self.shape
            return ((o, i, kh, kw),)
        if self.layout in ("linear", "conv1x1"):
            i, o = self.shape
            both = ((o, i), (o, i, 1, 1))
            return both if self.layout == "linear" else both[::-1]
        return (self.shape,)

    def from_checkpoint(self, array: HostArray) -> HostArray:
        """View of a checkpoint array in memory layout (a strided view, not yet contiguous)."""
        if self.layout == "conv":
            return array.transpose(2, 3, 1, 0)
        if self.layout in ("linear", "conv1x1"):
            return array.reshape(array.shape[:2]).T
        return array

    def to_checkpoint(self, array: HostArray) -> HostArray:
        """Inverse of ``from_checkpoint``, in the first of ``checkpoint_shapes``."""
        return np.ascontiguousarray(self.turned(array)).reshape(self.checkpoint_shapes[0])

    def turned(self, array: HostArray) -> HostArray:
        """View of an array in memory layout with the axes in a checkpoint's order, outputs first."""
        if self.layout == "conv":
            return array.transpose(3, 2, 0, 1)
        return array.T if self.layout in ("linear", "conv1x1") else array


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted name, leaf)`` of a nested dict, in order."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


def unflatten(items: Iterator[tuple[str, Any]] | Mapping[str, Any]) -> dict[str, Any]:
    """Nested dict from ``(dotted name, leaf)`` pairs."""
    tree: dict[str, Any] = {}
    for name, leaf in items.items() if isinstance(items, Mapping) else items:
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def map_spec(fn: Callable[[Param], Any], spec: Spec) -> Any:
    """Apply ``fn`` to every ``Param`` of a spec, keeping the nesting."""
    return jax.tree.map(fn, spec, is_leaf=lambda leaf: isinstance(leaf, Param))


def count(spec: Spec) -> int:
    """Number of scalar parameters a spec declares."""
    return sum(param.size for _, param in flatten(spec))


def init_params(spec: Spec, seed: int, dtype: DType = np.float32) -> Params:
    """Random host parameters (nested dict of numpy arrays), reproducible from ``seed``."""
    rng = np.random.default_rng(seed)
    return map_spec(lambda param: init_param(param, rng, dtype), spec)


def init_param(
    param: Param, rng: np.random.Generator, dtype: DType = np.float32, shape: tuple[int, ...] | None = None
) -> HostArray:
    """One random parameter; ``shape`` is how it is laid out, if not as ``param.shape``."""
    shape = param.shape if shape is None else shape
    if param.init in ("zeros", "ones"):
        return np.full(shape, param.init == "ones", dtype)
    std = 0.02 if param.init == "normal" else math.prod(param.shape[:-1]) ** -0.5
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return values.astype(dtype)
