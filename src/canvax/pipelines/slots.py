"""Adapters that are not merged into the weights: the slot of each, and the weight of each for every image of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.adapters import NotLowRank, low_rank
from canvax.errors import InputError, check_count, nearest
from canvax.families.base import Model
from canvax.models.beside import LAYERS, Places, Slot, length, slots
from canvax.parallel.mesh import replicated
from canvax.parallel.place import put
from canvax.params import Params, halves_first
from canvax.pipelines.adapter_weights import Weights
from canvax.types import Array, HostArray
from canvax.weights.load import aligned
from canvax.weights.lora import Adapter, Key

BUCKETS = (4, 8, 16, 32, 64, 128, 256)
"""Default ranks of slots: an adapter's rank is rounded up to one of them."""

LARGEST = BUCKETS[-1]

COUNT = 4
"""Default number of slots."""

MOST_PLACES = 64
_LISTED = 3

Packed = Mapping[str, HostArray]
"""An adapter in the form of slots: one flat array for each network that it changes."""

OwnAdapters = dict[str, Weights]
"""The adapters of one image, by name."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The weights of adapters in each image of a call.

    Attributes:
        places: number, rank and layers of the slots, for the programs.
        arrays: contents of the slots: the parameters of ``canvax.models.beside``, by network.
        weights: weight of each slot in each image [n, K] float32, by network.
        records: adapters in the metadata of each image.
    """

    places: Places
    arrays: Params
    weights: Mapping[str, HostArray]
    records: Sequence[Mapping[str, Any]]


class RankTooHigh(InputError):
    """The rank of an adapter is higher than that of the slots.

    Attributes:
        rank: that of the adapter.
    """

    rank: int


class Bank:
    """The slots of a model on its devices, and their contents.

    Attributes:
        places: their number, rank and layers.
        arrays: inputs of the programs; writing a slot makes a new array.
    """

    def __init__(self, model: Model, mesh: Mesh, places: Places) -> None:
        self.places = places
        self.dtype = jnp.dtype(model.dtype)
        self._sharding = replicated(mesh)
        networks = model.networks
        specs = {**networks.text.specs, networks.denoiser.component: networks.denoiser.spec}
        self._slots = {name: slots(spec, places) for name, spec in specs.items()}
        self._lengths = {name: length(spec, places) for name, spec in specs.items()}
        self.arrays: Params = {name: {} for name in specs}
        self._empty: dict[str, Array] = {}
        self.fill()

    @property
    def components(self) -> list[str]:
        """Networks that have slots."""
        return list(self._slots)

    @property
    def bytes(self) -> int:
        """Bytes of all slots on each device."""
        return self.places.count * self.dtype.itemsize * sum(self._lengths.values())

    def pack(self, name: str, adapter: Adapter, factor: Callable[[Key], float] | None = None) -> Packed:
        """Bring an adapter into the form of a slot; ``factor`` is its strength for each parameter, 1 by default.

        Raises:
            RankTooHigh: it has a higher rank than the slots.
            InputError: it is not of low rank, or is for a layer without slots.
        """
        packed: dict[str, HostArray] = {}
        faults: list[str] = []
        most = 0
        for key, part in adapter.parts.items():
            component, path = key
            slot = self._slots.get(component, {}).get(path.removesuffix(".weight"))
            if slot is None:
                faults.append(f"{component}.{path} has no place in layers={self.places.layers!r}")
                continue
            try:
                down, up = low_rank(part, slot.param.checkpoint_shapes[0])
            except NotLowRank as fault:
                faults.append(f"{component}.{path}: {fault}")
                continue
            up = halves_first(up, slot.param.pairs) if slot.param.pairs else up
            most = max(most, len(down))
            if len(down) <= self.places.rank:
                if component not in packed:
                    packed[component] = aligned(np.zeros, (self._lengths[component],), self.dtype)
                _write(packed[component], slot, down, up if factor is None else up * np.float32(factor(key)))
        if faults:
            rest = f" and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
            raise InputError(
                "adapter",
                f"cannot be beside the weights: {'; '.join(faults[:_LISTED])}{rest}",
                cure="load it merged, with pipe.adapters.load without beside",
                value=name,
            )
        if most > self.places.rank:
            larger = f"make them larger with pipe.adapters.beside(rank={bucket(most)}), or " if most <= LARGEST else ""
            problem = f"has a rank of {most}, and places have {self.places.rank}"
            error = RankTooHigh("adapter", problem, cure=f"{larger}load it merged, without beside", value=name)
            error.rank = most
            raise error
        return packed

    def put(self, place: int, packed: Packed) -> None:
        """Put an adapter into a slot, without compiling; it replaces the present one."""
        for component, of in self.arrays.items():
            array = packed.get(component)
            of[str(place)] = self._empty[component] if array is None else put(array, self._sharding)

    def fill(self) -> None:
        """Make all slots empty; they share one array of zeros for each network."""
        for component, n in self._lengths.items():
            self._empty[component] = empty = put(np.zeros(n, self.dtype), self._sharding)
            self.arrays[component].update({str(k): empty for k in range(self.places.count)})

    def clear(self) -> None:
        """Remove all arrays from the devices."""
        for of in (self._empty, *self.arrays.values()):
            of.clear()

    @property
    def shapes(self) -> Params:
        """Shapes, dtypes and shardings of ``arrays``."""
        names = [str(k) for k in range(self.places.count)]
        shapes = {
            component: jax.ShapeDtypeStruct((n,), self.dtype, sharding=self._sharding)
            for component, n in self._lengths.items()
        }
        return {component: dict.fromkeys(names, shape) for component, shape in shapes.items()}

    def copy(self) -> Bank:
        """Copy the slots with their adapters; later changes affect one copy only."""
        other = copy(self)
        other.arrays = self.snapshot()
        return other

    def snapshot(self) -> Params:
        """Return the present contents for a call."""
        return {component: dict(of) for component, of in self.arrays.items()}


def _write(flat: HostArray, slot: Slot, down: HostArray, up: HostArray) -> None:
    """Write the factors of a layer, [r, in, kh, kw] and [out, r], into their slot, whose rest stays zero."""
    rank = len(down)
    flat[slot.begin : slot.middle].reshape(slot.down)[:rank] = down.reshape(rank, *slot.down[1:])
    flat[slot.middle : slot.end].reshape(slot.up)[:, :rank] = up


def bucket(rank: int) -> int:
    """Return the rank of slots for adapters of this rank, at most ``LARGEST``."""
    return next((size for size in BUCKETS if size >= rank), LARGEST)


def rank_of(adapter: Adapter, model: Model) -> int:
    """Return the highest rank of an adapter beside the weights; 1 if it has none."""
    declared = model.networks.specs()
    shapes = {(component, name): slot.param.checkpoint_shapes[0]
              for component, spec in declared.items()
              for name, slot in slots(spec, Places(1, 1)).items()}  # fmt: skip
    highest = 1
    for (component, path), part in adapter.parts.items():
        shape = shapes.get((component, path.removesuffix(".weight")))
        try:
            highest = max(highest, len(low_rank(part, shape)[0])) if shape else highest
        except NotLowRank:
            continue  # ``Bank.pack`` refuses it
    return highest


def check_places(rank: Any, places: Any, layers: Any) -> Places:
    """Check and return a description of slots.

    Raises:
        InputError: an argument cannot be used.
    """
    check_count("rank", rank, LARGEST)
    check_count("places", places, MOST_PLACES)
    if layers not in LAYERS:
        raise InputError("layers", "is not known", cure=nearest(str(layers), list(LAYERS)), value=layers)
    return Places(places, rank, layers)


def share_rows(images: Sequence[OwnAdapters], places: Mapping[str, int], bank: Bank) -> dict[str, HostArray]:
    """Return the weight of each slot in each image [n, K] float32, by network; ``places`` are the slots by name."""
    scales = {component: np.zeros((len(images), bank.places.count), np.float32) for component in bank.components}
    for i, image in enumerate(images):
        for name, weights in image.items():
            for component, rows in scales.items():
                rows[i, places[name]] = weights.get(component, weights.get("", 1.0))
    return scales
