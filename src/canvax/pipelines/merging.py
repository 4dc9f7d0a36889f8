"""Adapters merged into parameters, in float32 from the trained weights, which are kept on the host meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.adapters import Part, change
from canvax.errors import NO_VALUE, CanvaxError, InputError
from canvax.parallel.rules import place
from canvax.params import Param, Params, Spec, flatten
from canvax.quantize import KINDS as QUANTIZED
from canvax.quantize import quantize, scale_of
from canvax.types import Array, HostArray
from canvax.weights.load import THREADS
from canvax.weights.lora import Key


@dataclass(frozen=True)
class Change:
    """What is done to one parameter; nothing if it is empty.

    Attributes:
        parts: of adapters, each with its weight.
        rows: of an embedding table, that are set to these vectors.
    """

    parts: Sequence[tuple[Part, float]] = ()
    rows: Mapping[int, HostArray] = field(default_factory=dict)


class _Kept(NamedTuple):
    """A parameter without adapters.

    Attributes:
        weight: on the host, in its dtype.
        scale: of a weight of 8 bits.
        ours: what stands in its place now; another array there is the user's.
    """

    weight: HostArray
    scale: HostArray | None
    ours: Any


class Merging:
    """Which parameters of a pipeline adapters have changed, and what these were before."""

    def __init__(self, specs: Mapping[str, Spec], mesh: Mesh) -> None:
        """``specs`` of all components, quantised as the parameters are."""
        self._mesh = mesh
        self._declared: dict[Key, Param] = {
            (component, name): param for component, spec in specs.items() for name, param in flatten(spec)
        }
        self._kept: dict[Key, _Kept] = {}

    def handed_to(self, other: Merging) -> None:
        """Have ``other`` know the same, for a pipeline with the same parameters."""
        other._kept = dict(self._kept)

    def apply(self, params: Params, changes: Mapping[Key, Change]) -> Params:
        """Parameters with these changes, made from what they were without adapters.

        ``params`` stay as they are, for calls that read them in other threads: dicts are copied, other arrays are not.

        Raises:
            CanvaxError: a weight overflows its dtype.
            InputError: the weights are spread over several processes.
        """
        kept = {key: self._base(params, key) for key in changes}

        def one(key: Key) -> dict[str, Array]:
            base, change = kept[key], changes[key]
            return self._merged(key, base, change) if change.parts or change.rows else self._whole(key, base)

        with ThreadPoolExecutor(THREADS, "canvax-merge") as pool:
            found = dict(zip(changes, pool.map(one, changes), strict=True))
        for key, arrays in found.items():
            if changes[key].parts or changes[key].rows:
                self._kept[key] = kept[key]._replace(ours=arrays[key[1]])
            else:
                self._kept.pop(key, None)
        return _replaced(params, found)

    def without(self, params: Params, component: str) -> Params:
        """The parameters of a component as they are without adapters."""
        kept = {key: self._base(params, key) for key in self._kept if key[0] == component}
        found = {key: self._whole(key, one) for key, one in kept.items() if one is self._kept[key]}
        return _replaced(params, found)[component]

    def _base(self, params: Params, key: Key) -> _Kept:
        """A parameter without adapters: what is kept, or what is there now if it is not ours."""
        component, name = key
        *parents, last = name.split(".")
        layer = _inner(params[component], parents)
        now = layer[last]
        if key in self._kept and self._kept[key].ours is now:
            return self._kept[key]
        if not now.is_fully_addressable and not now.is_fully_replicated:
            raise InputError(
                "adapters",
                NO_VALUE,
                "cannot change weights that the mesh splits over several processes",
                "load with {model=1}",
            )
        quantized = self._declared[key].dtype in QUANTIZED.values()
        return _Kept(np.asarray(now), np.asarray(layer[scale_of(last)]) if quantized else None, now)

    def _merged(self, key: Key, kept: _Kept, change_: Change) -> dict[str, Array]:
        """The arrays of a parameter with adapters, by name; of 8 bits, rounded to them once more."""
        param, name = self._declared[key], key[1]
        base = kept.weight.reshape(param.shape).astype(np.float32, copy=False)
        base = base if kept.scale is None else base * kept.scale
        merged: HostArray | None = None
        for part, factor in change_.parts:  # every pass over a weight is a part of the time of a swap
            added = param.from_checkpoint(change(param.turned(base), part))
            if factor != 1:
                added *= np.float32(factor)
            merged = np.add(base if merged is None else merged, added, out=added)  # which is ours: no other memory
        merged = base.copy() if merged is None else merged
        for i, vector in change_.rows.items():
            merged[i] = vector
        if kept.scale is not None:
            weight, scale = quantize(merged, kept.weight.dtype)
            return self._on_devices(key[0], {name: weight, scale_of(name): scale})
        if not max(merged.max(), -merged.min()) <= float(jnp.finfo(kept.weight.dtype).max):  # NaN is not, either
            raise CanvaxError(
                f"{'.'.join(key)}: overflows in {kept.weight.dtype} with these adapters; give them smaller weights, or "
                "load the model in float32"
            )
        return self._on_devices(key[0], {name: merged.astype(kept.weight.dtype, copy=False)})

    def _whole(self, key: Key, kept: _Kept) -> dict[str, Array]:
        scale = {} if kept.scale is None else {scale_of(key[1]): kept.scale}
        return self._on_devices(key[0], {key[1]: kept.weight, **scale})

    def _on_devices(self, component: str, arrays: Mapping[str, HostArray]) -> dict[str, Array]:
        return {name: place(self._declared[component, name], array, self._mesh) for name, array in arrays.items()}


def _replaced(params: Params, found: Mapping[Key, Mapping[str, Array]]) -> Params:
    """``params`` with the arrays of ``found``, by component and name."""
    changed = {component for component, _ in found}
    new = {name: _copied(tree) if name in changed else tree for name, tree in params.items()}
    for (component, _), arrays in found.items():
        for name, array in arrays.items():
            *parents, last = name.split(".")
            _inner(new[component], parents)[last] = array
    return new


def _copied(node: Any) -> Any:
    """Nested dicts anew, with the same arrays."""
    return {name: _copied(inner) for name, inner in node.items()} if isinstance(node, Mapping) else node


def _inner(node: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        node = node[step]
    return node
