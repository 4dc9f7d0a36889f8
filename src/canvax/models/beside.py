"""Low-rank adapters beside the weights of a network; each image of a batch has its own mixture of them.

    y = x W + sum over slots k of w[b, k] (x down_k) up_k

Each slot is one flat array of fixed length: the factors of all layers end to end, padded with zeros to one rank. One
transfer fills a slot, whatever layers the adapter changes, and the compiled program, which cuts the array up before its
loop, is the same for every adapter. The factors of all slots of a layer are concatenated along the rank, so that a
layer has two more products, not two per slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from canvax.nn import LOW_RANK, SHARE
from canvax.params import Axis, Param, Params, Spec, copied, flatten
from canvax.types import Array

ADAPTERS = "adapters"
"""Key of the slots in a network's parameters, ``{"0": [n], "1": [n], ...}``, and of the weight of each slot in an
image's conditions, [B, K] float32.
"""

LAYERS: Mapping[str, str] = {
    "attention": "queries, keys, values and outputs of all attention",
    "transformer": "attention, feed-forward and the projections around them",
    "all": "every matrix and convolution",
}
"""Layers of a network that have slots, by the name of the choice."""


@dataclass(frozen=True)
class Places:
    """Number and size of the adapter slots; they determine the compiled programs.

    Attributes:
        count: K, the number of slots.
        rank: r, the largest rank of an adapter in any layer.
        layers: a key of ``LAYERS``.
    """

    count: int
    rank: int
    layers: str = "all"


class Slot(NamedTuple):
    """Position of a layer's factors in the flat array: ``down`` [r, in, kh, kw] from ``begin``, then ``up`` [out, r].

    The factors have the layout of the files, so that filling a slot is a copy; the program transposes them.

    Attributes:
        param: the layer's weight.
        begin: index of the first number.
        down: shape of ``down``.
        up: shape of ``up``.
    """

    param: Param
    begin: int
    down: tuple[int, ...]
    up: tuple[int, ...]

    @property
    def middle(self) -> int:
        """Index where ``up`` begins."""
        return self.begin + math.prod(self.down)

    @property
    def end(self) -> int:
        """Index after the last number."""
        return self.middle + math.prod(self.up)


def slots(spec: Spec, places: Places) -> dict[str, Slot]:
    """Return the positions of all layers that have slots, by dotted name, in the order of the flat array."""
    layers: dict[str, Slot] = {}
    begin = 0
    for name, param in _adaptable(spec, places.layers):
        *kernel, inputs, outputs = param.shape
        layers[name] = slot = Slot(param, begin, (places.rank, inputs, *kernel), (outputs, places.rank))
        begin = slot.end
    return layers


def length(spec: Spec, places: Places) -> int:
    """Return n, the length of a slot's array."""
    return max((slot.end for slot in slots(spec, places).values()), default=0)


def _adaptable(spec: Spec, layers: str) -> Iterator[tuple[str, Param]]:
    for path, param in flatten(spec):
        name = path.removesuffix(".weight")
        if name == path or param.layout == "plain":
            continue
        axes = {axis.name if isinstance(axis, Axis) else axis for axis in param.axes}
        attention = "heads" in axes
        transformer = attention or "mlp" in axes or ".attentions." in name  # whose projections have no such axis
        if {"attention": attention, "transformer": transformer, "all": True}[layers]:
            yield name, param


def with_adapters(p: Params, shares: Array, spec: Spec, places: Places, component: str = "") -> Params:
    """Return parameters with the adapters of the slots beside the weights, as ``canvax.nn`` reads them.

    Args:
        p: parameters of a network, with its slots under ``ADAPTERS``; or of several by name, one of them ``component``.
        shares: weight of each slot for each image [B, K].
        spec: of the network, without quantisation.
        places: number and size of the slots.
        component: the name of the network.
    """
    if ADAPTERS not in p:
        return {**p, component: with_adapters(p[component], shares, spec, places)}
    flat = [p[ADAPTERS][str(k)] for k in range(places.count)]
    tree = copied({name: value for name, value in p.items() if name != ADAPTERS})
    share = jnp.repeat(shares, places.rank, axis=1).astype(flat[0].dtype)
    for name, slot in slots(spec, places).items():
        layer = tree
        for step in name.split("."):
            layer = layer[step]
        down = [row[slot.begin : slot.middle].reshape(slot.down) for row in flat]
        up = [row[slot.middle : slot.end].reshape(slot.up) for row in flat]
        # [K r, in, kh, kw] and [out, K r], turned to [kh, kw, in, K r] and [K r, out]
        inner, outer = jnp.concatenate(down, 0), jnp.concatenate(up, 1)
        inner = jnp.moveaxis(inner, (0, 1), (-1, -2))
        layer[LOW_RANK] = {"down": inner, "up": outer.T, SHARE: share}
    return tree
