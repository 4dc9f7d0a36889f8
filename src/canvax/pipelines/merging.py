"""Merge adapters into the weights of a pipeline, and take them out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.adapters import Part, change
from canvax.errors import CanvaxError, InputError
from canvax.parallel.rules import place
from canvax.params import Param, Params, Spec, flatten
from canvax.quantize import quantize, scale_of
from canvax.types import Array, HostArray
from canvax.weights.load import THREADS
from canvax.weights.lora import Key


@dataclass(frozen=True)
class Change:
    """The change of one parameter, possibly empty.

    Attributes:
        parts: adapters, each with its weight.
        rows: vectors of rows of an embedding table.
    """

    parts: Sequence[tuple[Part, float]] = ()
    rows: Mapping[int, HostArray] = field(default_factory=dict)


class _Kept(NamedTuple):
    """A parameter without adapters.

    Attributes:
        weight: the weight on the host, in its dtype.
        scale: scales of an 8-bit weight, by dotted name; empty for others.
        ours: the array that replaces it now; any other array there is the user's.
    """

    weight: HostArray
    scale: Mapping[str, HostArray]
    ours: Any


class Merging:
    """The parameters of a pipeline that adapters have changed, with their original weights."""

    def __init__(self, specs: Mapping[str, Spec], mesh: Mesh) -> None:
        """Begin without changes. ``specs`` are those of all components, quantised as the parameters are."""
        self._mesh = mesh
        self._declared: dict[Key, Param] = {
            (component, name): param for component, spec in specs.items() for name, param in flatten(spec)
        }
        self._kept: dict[Key, _Kept] = {}

    def handed_to(self, other: Merging) -> None:
        """Copy the kept weights into ``other``, for a pipeline with the same parameters."""
        other._kept = dict(self._kept)

    def apply(self, params: Params, changes: Mapping[Key, Change]) -> Params:
        """Return parameters with these changes, made from the weights without adapters.

        ``params`` are not changed, for calls that read them in other threads: dicts are copied, other arrays are not.

        Raises:
            CanvaxError: a weight overflows its dtype.
            InputError: the weights are spread over several processes.
        """
        kept = {key: self._base(params, key) for key in changes}

        def one(key: Key) -> dict[str, Array]:
            base, change = kept[key], changes[key]
            return self._merged(key, base, change) if change.parts or change.rows else self._whole(key, base)

        with ThreadPoolExecutor(THREADS, "canvax-merge") as pool:
            arrays_by_key = dict(zip(changes, pool.map(one, changes), strict=True))
        for key, arrays in arrays_by_key.items():
            if changes[key].parts or changes[key].rows:
                self._kept[key] = kept[key]._replace(ours=arrays[key[1]])
            else:
                self._kept.pop(key, None)
        return with_arrays(params, arrays_by_key)

    def without(self, params: Params, component: str) -> Params:
        """Return the parameters of a component without adapters."""
        kept = {key: self._base(params, key) for key in self._kept if key[0] == component}
        originals = {key: self._whole(key, array) for key, array in kept.items() if array is self._kept[key]}
        return with_arrays(params, originals)[component]

    def _base(self, params: Params, key: Key) -> _Kept:
        """Return a parameter without adapters: the kept one, or the current one if it is not ours."""
        component, name = key
        *parents, last = name.split(".")
        layer = node_at(params[component], parents)
        now = layer[last]
        if key in self._kept and self._kept[key].ours is now:
            return self._kept[key]
        if not now.is_fully_addressable and not now.is_fully_replicated:
            raise InputError(
                "adapters",
                "cannot change weights that the mesh splits over several processes",
                cure="load with {model=1}",
            )
        scale = scale_of(last, layer)
        kept = {".".join([*parents, scale]): np.asarray(layer[scale])} if scale else {}
        return _Kept(np.asarray(now), kept, now)

    def _merged(self, key: Key, kept: _Kept, change_: Change) -> dict[str, Array]:
        """Return the arrays of a parameter with adapters, by name; 8-bit weights are rounded once more."""
        param, name = self._declared[key], key[1]
        base = kept.weight.reshape(param.shape).astype(np.float32, copy=False)
        for scale in kept.scale.values():
            base = base * scale
        merged: HostArray | None = None
        for part, factor in change_.parts:  # every pass over a weight is a part of the time of a swap
            added = param.from_checkpoint(change(param.turned(base), part))
            if factor != 1:
                added *= np.float32(factor)
            merged = np.add(base if merged is None else merged, added, out=added)  # which is ours: no other memory
        merged = base.copy() if merged is None else merged
        for i, vector in change_.rows.items():
            merged[i] = vector
        if kept.scale:
            weight, scale = quantize(merged, kept.weight.dtype)
            return self._placed(key[0], {name: weight, **dict.fromkeys(kept.scale, scale)}, kept.ours)
        if not max(merged.max(), -merged.min()) <= float(jnp.finfo(kept.weight.dtype).max):  # NaN is not, either
            raise CanvaxError(
                f"{'.'.join(key)}: overflows in {kept.weight.dtype} with these adapters; give them smaller weights, or "
                "load the model in float32"
            )
        return self._placed(key[0], {name: merged.astype(kept.weight.dtype, copy=False)}, kept.ours)

    def _whole(self, key: Key, kept: _Kept) -> dict[str, Array]:
        return self._placed(key[0], {key[1]: kept.weight, **kept.scale}, kept.ours)

    def _placed(self, component: str, arrays: Mapping[str, HostArray], like: Array) -> dict[str, Array]:
        """Put arrays where the parameter is that they replace."""
        kind = like.sharding.memory_kind
        return {name: place(self._declared[component, name], array, self._mesh, kind) for name, array in arrays.items()}


def with_arrays(params: Params, arrays_by_key: Mapping[Key, Mapping[str, Array]]) -> Params:
    """Return ``params`` with the arrays of ``arrays_by_key``, by component and name."""
    changed = {component for component, _ in arrays_by_key}
    new = {name: _copied(tree) if name in changed else tree for name, tree in params.items()}
    for (component, _), arrays in arrays_by_key.items():
        for name, array in arrays.items():
            *parents, last = name.split(".")
            node_at(new[component], parents)[last] = array
    return new


def _copied(node: Any) -> Any:
    """Copy nested dicts, but not their arrays."""
    return {name: _copied(inner) for name, inner in node.items()} if isinstance(node, Mapping) else node


def node_at(node: Any, steps: Sequence[str]) -> Any:
    """Return the node of nested dicts at the end of this path."""
    for step in steps:
        node = node[step]
    return node
