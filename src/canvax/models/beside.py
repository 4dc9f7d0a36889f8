"""Places for low-rank adapters beside the weights of a network, each image of a batch with a mixture of its own.

    y = x W + sum over places k of w[b, k] (x down_k) up_k

A place is one flat array of a fixed length: the factors of all layers one behind the other, padded with zeros to one
rank. So an adapter is put there by one transfer, whatever it changes, and the program, which cuts the array up before
its loop, is the same for all. The factors of all places of a layer lie side by side along the rank, so that a layer has
two products more, not two for each place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from canvax.nn import LOW_RANK, SHARE
from canvax.params import Axis, Param, Params, Spec, flatten
from canvax.types import Array

ADAPTERS = "adapters"
"""Among the parameters of a network: its places, ``{"0": [n], "1": [n], ...}``. Among the conditions of an image: how
much of each it has [B, K] float32."""

LAYERS: Mapping[str, str] = {
    "attention": "queries, keys, values and outputs of all attention",
    "transformer": "attention, feed-forward and the projections around them",
    "all": "every matrix and convolution",
}
"""Which layers of a network have places."""


@dataclass(frozen=True)
class Places:
    """Room for adapters, which decides the programs.

    Attributes:
        count: K, adapters at a time.
        rank: r, the most that an adapter may have in one layer.
        layers: a key of ``LAYERS``.
    """

    count: int
    rank: int
    layers: str = "all"


class Slot(NamedTuple):
    """Where the factors of a layer lie in a place: ``down`` [r, in, kh, kw] from ``begin``, then ``up`` [out, r].

    They lie as files have them, so that putting them there is copying; the program turns them around.

    Attributes:
        param: the layer's weight.
        begin: index of the first number.
        down: shape.
        up: shape.
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
        """Index behind the last number."""
        return self.middle + math.prod(self.up)


def slots(spec: Spec, places: Places) -> dict[str, Slot]:
    """The layers of a network that have places, by their dotted names, in the order in which they lie there."""
    layers: dict[str, Slot] = {}
    begin = 0
    for name, param in _adaptable(spec, places.layers):
        *kernel, inputs, outputs = param.shape
        layers[name] = slot = Slot(param, begin, (places.rank, inputs, *kernel), (outputs, places.rank))
        begin = slot.end
    return layers


def length(spec: Spec, places: Places) -> int:
    """n: numbers of a place."""
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
    """Parameters with the adapters in their places beside the weights, as ``canvax.nn`` reads them.

    Args:
        p: of a network, with its places under ``ADAPTERS``; or of several by name, one of them ``component``.
        shares: how much of each place every image has [B, K].
        spec: of the network, not quantised.
        places: what there is.
        component: the name of the network.
    """
    if ADAPTERS not in p:
        return {**p, component: with_adapters(p[component], shares, spec, places)}
    flat = [p[ADAPTERS][str(k)] for k in range(places.count)]
    tree = _copied({name: value for name, value in p.items() if name != ADAPTERS})
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


def _copied(tree: Params) -> Params:
    """The dicts are new, the arrays are not."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in tree.items()}
