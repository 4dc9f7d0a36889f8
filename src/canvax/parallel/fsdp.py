"""Fully sharded data parallelism: devices that split a batch also split parameters (Rajbhandari et al. 2020, ZeRO).

Each large array is split over ``data`` along its largest axis that can be divided evenly. The rule looks at shapes
only, so that an optimizer's moments are split as their parameters are, whatever the optimizer.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.parallel.mesh import replicated
from canvax.parallel.place import put
from canvax.types import DType

Tree = TypeVar("Tree")

_SMALL = 2**12
"""Arrays of fewer elements are not split: to gather them takes longer than they are worth."""


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return the sharding of each array."""
    size = mesh.shape["data"]

    def sharding(leaf: Any) -> NamedSharding:
        axes = [axis for axis, length in enumerate(leaf.shape) if length % size == 0]
        if size == 1 or not axes or leaf.size < _SMALL:
            return replicated(mesh)
        axis = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return jax.tree.map(sharding, tree)


def split(tree: Tree, mesh: Mesh, dtype: DType) -> Tree:
    """Put copies of arrays on the devices, each of which receives only its part; every process has the whole ones."""
    return jax.tree.map(lambda leaf, place: put(np.array(leaf, dtype), place), tree, shardings(tree, mesh))


def constrained(tree: Tree, mesh: Mesh) -> Tree:
    """Split arrays within a program."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def gathered(tree: Tree, mesh: Mesh) -> Tree:
    """Gather split arrays within a program.

    Without it the compiler may choose to exchange activations instead, in many small transfers.
    """
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))
