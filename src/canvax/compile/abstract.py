"""The abstract arguments of a program: shapes, dtypes and shardings instead of arrays; and one copy for each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.parallel.mesh import over_batch
from canvax.parallel.place import on_device, waits
from canvax.params import Params
from canvax.types import Array


def on_each_device(function: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Run ``function`` on each device with its part of the arguments, the first of which are stacked parameters."""

    def one(params: Params, *rest: Any) -> Any:
        return function(jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), params), *rest)

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=over_batch(mesh).spec, check_vma=False)


def abstract_of(params: Params) -> Any:
    """Return a component's parameters as shapes, dtypes and shardings; those of an offloaded one on the devices."""
    offloaded = waits(params)

    def one(leaf: Array) -> jax.ShapeDtypeStruct:
        sharding = on_device(leaf.sharding) if offloaded else leaf.sharding
        # P("model", None) and P("model") are the same, and not equal.
        if isinstance(sharding, NamedSharding) and len(sharding.spec) and sharding.spec[-1] is None:
            spec = list(sharding.spec)
            while spec and spec[-1] is None:
                spec.pop()
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, params)
