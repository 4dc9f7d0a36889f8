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
from canvax.errors import CanvaxError, InputError
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
    """The parameters of a pipeline that adapters have changed, and what they were before."""

    def __init__(self, specs: Mapping[str, Spec], mesh: Mesh) -> None:
        """``specs`` of all components, quantised as the parameters are."""
        self._mesh = mesh
        self._declared: dict[Key, Param] = {
            (component, name): param for component, spec in specs.items() for name, param in flatten(spec)
        }
        self._kept: dict[Key, _Kept] = {}

    def apply(self, params: Params, changes: Mapping[Key, Change]) -> None:
        """Change parameters in place, from what they were without adapters; all of them, or none with an error.

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
            for name, array in arrays.items():
                *parents, last = name.split(".")
                _inner(params[key[0]], parents)[last] = array
            if changes[key].parts or changes[key].rows:
                self._kept[key] = kept[key]._replace(ours=arrays[key[1]])
            else:
                self._kept.pop(key, None)

    def _base(self, params: Params, key: Key) -> _Kept:
        """A parameter without adapters: what is kept, or what is there now if it is not ours."""
        component, name = key
        *parents, last = name.split(".")
        layer = _inner(params[component], parents)
        now = layer[last]
        if key in self._kept and self._kept[key].ours is now:
            return self._kept[key]
        if not now.is_fully_addressable and not now.is_fully_replicated:
            raise InputError("adapters: the mesh splits weights over several processes; load with model=1")
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


def _inner(node: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        node = node[step]
    return node
