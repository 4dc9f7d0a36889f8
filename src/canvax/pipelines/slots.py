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
"""Default ranks of places: an adapter's rank is rounded up to one of them."""

LARGEST = BUCKETS[-1]

COUNT = 4
"""Default number of places."""

MOST_PLACES = 64
_LISTED = 3

Packed = Mapping[str, HostArray]
"""An adapter as places have it: one flat array for each network that it changes."""

OwnAdapters = dict[str, Weights]
"""The adapters of one image, by name."""


@dataclass(frozen=True, eq=False)
class Shares:
    """How much of each adapter every image of a call has.

    Attributes:
        places: what there is, for the programs.
        arrays: what lies there: the parameters of ``canvax.models.beside``, by network.
        weights: of each image for each place [n, K] float32, by network.
        records: what the metadata of each image tells.
    """

    places: Places
    arrays: Params
    weights: Mapping[str, HostArray]
    records: Sequence[Mapping[str, Any]]


class Bank:
    """The places of a model on its devices, and what lies there.

    Attributes:
        places: how many, of which rank, at which layers.
        arrays: for the programs; a place that is written anew is another array.
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
        """The networks that have places."""
        return list(self._slots)

    @property
    def bytes(self) -> int:
        """Of all places, on each device."""
        return self.places.count * self.dtype.itemsize * sum(self._lengths.values())

    def pack(self, name: str, adapter: Adapter, factor: Callable[[Key], float] | None = None) -> Packed:
        """An adapter as a place has it; ``factor`` is how strong it is for each parameter, 1 by default.

        Raises:
            InputError: it is not of low rank, of a higher one than the places, or for a layer that has none.
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
            raise InputError(
                "adapter",
                f"has a rank of {most}, and places have {self.places.rank}",
                cure=f"{larger}load it merged, without beside",
                value=name,
            )
        return packed

    def put(self, place: int, packed: Packed) -> None:
        """Put an adapter into a place, whatever was there. Compiles nothing."""
        for component, of in self.arrays.items():
            array = packed.get(component)
            of[str(place)] = self._empty[component] if array is None else put(array, self._sharding)

    def fill(self) -> None:
        """Have empty places; all share one array of zeros for each network."""
        for component, n in self._lengths.items():
            self._empty[component] = empty = put(np.zeros(n, self.dtype), self._sharding)
            self.arrays[component].update({str(k): empty for k in range(self.places.count)})

    def clear(self) -> None:
        """Take everything off the devices."""
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
        """The same adapters in the same places; from then on each changes alone."""
        other = copy(self)
        other.arrays = self.snapshot()
        return other

    def snapshot(self) -> Params:
        """What lies there now, for a call."""
        return {component: dict(of) for component, of in self.arrays.items()}


def _write(flat: HostArray, slot: Slot, down: HostArray, up: HostArray) -> None:
    """The factors of a layer, [r, in, kh, kw] and [out, r], into their slot, the rest of which stays zero."""
    rank = len(down)
    flat[slot.begin : slot.middle].reshape(slot.down)[:rank] = down.reshape(rank, *slot.down[1:])
    flat[slot.middle : slot.end].reshape(slot.up)[:, :rank] = up


def bucket(rank: int) -> int:
    """The rank of places for adapters of this rank, ``LARGEST`` at most."""
    return next((size for size in BUCKETS if size >= rank), LARGEST)


def rank_of(adapter: Adapter, model: Model) -> int:
    """The highest rank that an adapter has beside the weights; 1 if it has none."""
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
            continue  # which ``Bank.pack`` says
    return highest


def check_places(rank: Any, places: Any, layers: Any) -> Places:
    """Places that can be made.

    Raises:
        InputError: naming the argument and the cure.
    """
    check_count("rank", rank, LARGEST)
    check_count("places", places, MOST_PLACES)
    if layers not in LAYERS:
        raise InputError("layers", "is not known", cure=nearest(str(layers), list(LAYERS)), value=layers)
    return Places(places, rank, layers)


def share_rows(images: Sequence[OwnAdapters], places: Mapping[str, int], bank: Bank) -> dict[str, HostArray]:
    """Weights of each image for each place [n, K] float32, by network; ``places`` are those of the names."""
    scales = {component: np.zeros((len(images), bank.places.count), np.float32) for component in bank.components}
    for i, image in enumerate(images):
        for name, weights in image.items():
            for component, rows in scales.items():
                rows[i, places[name]] = weights.get(component, weights.get("", 1.0))
    return scales
