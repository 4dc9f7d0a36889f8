"""Parameters are a nested dict of arrays, declared once.

A model's *spec* is a nested dict of ``Param``. Abstract shapes, random initialisation, strict loading, saving, sharding
and counts are derived from it. The keys along a path form the tensor's name in a diffusers checkpoint:
``down_blocks.0.resnets.1.conv1.weight`` is ``params["down_blocks"]["0"]["resnets"]["1"]["conv1"]["weight"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    """A logical axis that may be split only between certain entries.

    Attributes:
        name: its logical name.
        units: number of equal runs that must stay whole: attention heads, or groups of a normalisation.
        parts: number of consecutive sections that are split in the same way: 2 for the values and the gate of a GEGLU.
    """

    name: str
    units: int
    parts: int = 1


AxisName = str | Axis | None


@dataclass(frozen=True)
class Param:
    """The declaration of a parameter: its form in memory and in a checkpoint.

    Attributes:
        shape: shape in memory.
        axes: a logical name for each axis (``None`` for no name), which the sharding rules map to mesh axes; an
            ``Axis`` if it may be split only between certain entries.
        init: ``fan_in`` is normal with variance 1/fan_in over all axes but the last, ``normal`` has std 0.02.
        layout: checkpoint form. ``linear`` is stored (out, in), ``conv`` (out, in, kh, kw), ``conv1x1`` is a linear map
            that the checkpoint stores as a convolution (out, in, 1, 1), ``plain`` is stored as in memory.
        dtype: name of a fixed dtype; None for the model's dtype.
        pairs: width of a head whose rotary pairs are neighbours in a checkpoint. In memory the first of each pair come
            before the second of each, see ``canvax.models.dit.rotate``. 0 for other parameters.
        whole: small, or all activations pass through it, see ``whole``: it is not one of the ``large`` weights.
        host: stays in the host's memory; programs copy it to the devices when its layer runs.
    """

    shape: tuple[int, ...]
    axes: tuple[AxisName, ...]
    init: Init = "fan_in"
    layout: Layout = "plain"
    dtype: str | None = None
    pairs: int = 0
    whole: bool = False
    host: bool = False

    def __post_init__(self) -> None:
        rank = {"plain": len(self.shape), "linear": 2, "conv1x1": 2, "conv": 4}[self.layout]
        if len(self.shape) != rank or len(self.axes) != len(self.shape):
            raise ValueError(f"Param: shape {self.shape}, axes {self.axes} do not suit layout {self.layout!r}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def large(self) -> bool:
        """True for the matrices and convolutions that can have 8 bits or be streamed; only ``canvax.nn`` reads them."""
        return self.layout != "plain" and not self.whole

    def dtype_in(self, model: DType) -> np.dtype:
        """Return the parameter's dtype in a model of dtype ``model``."""
        return jnp.dtype(self.dtype or model)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """The shape with ``parts`` as a separate axis, which lets devices split each part in the same way."""
        shape: list[int] = []
        for length, axis in zip(self.shape, self.axes, strict=True):
            parts = axis.parts if isinstance(axis, Axis) else 1
            shape += [parts, length // parts] if parts > 1 else [length]
        return tuple(shape)

    @property
    def checkpoint_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes accepted from a checkpoint; ``save`` writes the first.

        1x1 convolutions and linear maps are equivalent, and real files mix the two forms: Stable Diffusion 1.x
        projects with 1x1 convolutions, and the original VAE stores its attention that way too.
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
        """Return a checkpoint array in memory layout: a strided view that is not contiguous, a copy with ``pairs``."""
        if self.pairs:
            array = halves_first(array, self.pairs)
        if self.layout == "conv":
            return array.transpose(2, 3, 1, 0)
        if self.layout in ("linear", "conv1x1"):
            return array.reshape(array.shape[:2]).T
        return array

    def to_checkpoint(self, array: HostArray) -> HostArray:
        """Invert ``from_checkpoint``; the result has the first of ``checkpoint_shapes``."""
        return np.ascontiguousarray(self.turned(array)).reshape(self.checkpoint_shapes[0])

    def turned(self, array: HostArray) -> HostArray:
        """Return an array in memory layout with its axes in checkpoint order, outputs first; a copy with ``pairs``."""
        if self.layout == "conv":
            return array.transpose(3, 2, 0, 1)
        array = array.T if self.layout in ("linear", "conv1x1") else array
        return pairs_together(array, self.pairs) if self.pairs else array


def halves_first(array: HostArray, head_dim: int) -> HostArray:
    """Reorder outputs [N * Dh, ...] of a checkpoint: the first of each pair of a head before the second of each."""
    pairs = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def pairs_together(array: HostArray, head_dim: int) -> HostArray:
    """Invert ``halves_first``."""
    halves = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted name, leaf)`` for each leaf of a nested dict, in order."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


def unflatten(items: Iterator[tuple[str, Any]] | Mapping[str, Any]) -> dict[str, Any]:
    """Build a nested dict from ``(dotted name, leaf)`` pairs."""
    tree: dict[str, Any] = {}
    for name, leaf in items.items() if isinstance(items, Mapping) else items:
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def copied(tree: Params) -> Params:
    """Copy the dicts of a tree, but not its leaves."""
    return {name: copied(value) if isinstance(value, dict) else value for name, value in tree.items()}


def whole(spec: Spec) -> Spec:
    """Return ``spec`` with parameters that keep their precision when the network is quantised, and are not streamed.

    It is used for layers that are small or that all activations pass through.
    """
    return {key: replace(part, whole=True) if isinstance(part, Param) else whole(part) for key, part in spec.items()}


def on_host(spec: Spec) -> Spec:
    """Return ``spec`` with its large weights in the host's memory."""
    return map_spec(lambda param: replace(param, host=param.large), spec)


def map_spec(fn: Callable[[Param], Any], spec: Spec) -> Any:
    """Apply ``fn`` to every ``Param`` of a spec, keeping the nesting."""
    return jax.tree.map(fn, spec, is_leaf=lambda leaf: isinstance(leaf, Param))


def count(spec: Spec) -> int:
    """Count the scalar parameters that a spec declares."""
    return sum(param.size for _, param in flatten(spec))


def init_params(spec: Spec, seed: int, dtype: DType = np.float32) -> Params:
    """Return random host parameters (a nested dict of numpy arrays), reproducible from ``seed``."""
    rng = np.random.default_rng(seed)
    return map_spec(lambda param: init_param(param, rng, dtype), spec)


def init_param(
    param: Param, rng: np.random.Generator, dtype: DType = np.float32, shape: tuple[int, ...] | None = None
) -> HostArray:
    """Return a random parameter; ``shape`` is its layout, by default ``param.shape``."""
    shape = param.shape if shape is None else shape
    if param.init in ("zeros", "ones"):
        return np.full(shape, param.init == "ones", dtype)
    std = 0.02 if param.init == "normal" else math.prod(param.shape[:-1]) ** -0.5
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return values.astype(dtype)
