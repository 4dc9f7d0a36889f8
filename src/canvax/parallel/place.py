"""Transfers arrays between the host and the devices of a mesh, which may belong to several processes.

Every process must call these functions with the same arguments; it transfers only the parts of its local devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, Sharding

from canvax.types import Array, HostArray

HOST = "pinned_host"
"""JAX's kind of memory for weights that are not on the devices."""


def on_host(array: Any) -> bool:
    """Return whether an array, or its abstract shape, is in the host's memory."""
    if isinstance(array, Tracer):
        return False
    return getattr(getattr(array, "sharding", None), "memory_kind", None) == HOST


def waits(params: Any) -> bool:
    """Return whether a component is offloaded: all its arrays are in the host's memory.

    If only the large ones are, they are streamed: programs read them there (``canvax.params.Param.host``).
    """
    arrays = _arrays(params)
    return on_host(next(arrays, None)) and all(map(on_host, arrays))


def _arrays(params: Any) -> Iterator[Any]:
    """Yield the arrays of a component one by one: mostly the first one decides, of thousands in each call."""
    if isinstance(params, Mapping):
        for part in params.values():
            yield from _arrays(part)
    else:
        yield from jax.tree.leaves(params)


def kind_of(params: Any) -> str | None:
    """Return the kind of memory of a component's arrays; None for the devices' default."""
    return HOST if waits(params) else None


def on_devices(params: Any) -> Any:
    """Return a component with its offloaded arrays copied to the devices."""
    if not waits(params):
        return params
    return jax.tree.map(lambda leaf: jax.device_put(leaf, on_device(leaf.sharding)), params)


def off_devices(params: Any) -> Any:
    """Return a component with its arrays copied to the host's memory, as an offloaded one."""

    def off_device(leaf: Any) -> Array:
        return put(whole(leaf) if is_split(leaf) else leaf, leaf.sharding.with_memory_kind(HOST))

    return jax.tree.map(off_device, params)


def on_device(sharding: Any) -> Any:
    """Return the sharding of an offloaded array on the devices."""
    return NamedSharding(sharding.mesh, sharding.spec) if sharding.memory_kind == HOST else sharding


def put(array: Any, sharding: Sharding) -> Array:
    """Put an array, which every process has whole, on the devices; each device receives only its part."""
    if len(sharding.device_set) > 1 and isinstance(array, np.ndarray):
        array = np.asarray(array, order="C")  # transposes once, not for each device
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def is_split(array: Any) -> bool:
    """Return whether processes have different parts of an array."""
    return isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)


def whole(array: Array) -> HostArray:
    """Copy an array to the host of every process, gathered if it ``is_split``."""
    return process_allgather(array, tiled=True) if is_split(array) else np.asarray(array)


def put_all(arrays: Any, sharding: Sharding) -> Any:
    """Put a tree of arrays on the devices, in a single transfer if possible: each takes a tenth of a millisecond."""
    if sharding.is_fully_addressable and len(sharding.device_set) == 1:
        return jax.device_put(arrays, sharding)
    return jax.tree.map(lambda array: put(array, sharding), arrays)


def local_indices(count: int, sharding: Sharding) -> list[int]:
    """Return which of ``count`` rows are on this process's devices if ``sharding`` splits the first axis."""
    of_devices = sharding.addressable_devices_indices_map((count,)).values()
    parts = {index[0].indices(count)[:2] for index in of_devices if index is not None}
    return [row for start, stop in sorted(parts) for row in range(start, stop)]


def local_rows(array: Array, count: int | None = None, *, shared: bool = False) -> tuple[list[int], HostArray]:
    """Return the indices and values of a batch's rows that this process is responsible for.

    Args:
        array: [B, ...], split only over the first axis.
        count: number of rows without padding; the others are left out.
        shared: include local rows that another process is responsible for.
    """
    parts = {shard.index[0].start or 0: shard for shard in array.addressable_shards if shared or shard.replica_id == 0}
    shards = [parts[start] for start in sorted(parts)]
    limit = array.shape[0] if count is None else count
    indices: list[int] = []
    rows = [np.zeros((0, *array.shape[1:]), array.dtype)]
    for shard in shards:
        start, stop, _ = shard.index[0].indices(array.shape[0])
        rows_here = range(start, min(stop, limit))
        indices += rows_here
        if rows_here:
            rows.append(jax.device_get(shard.data)[: len(rows_here)])
    return indices, np.concatenate(rows)


def map_parts(function: Callable[[HostArray], HostArray], array: Array) -> Array:
    """Apply ``function`` on the host to each device's part [b, ...] of a batch; the sharding does not change."""
    parts = [(shard.device, function(jax.device_get(shard.data))) for shard in array.addressable_shards]
    shape = (array.shape[0], *parts[0][1].shape[1:])
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    placed = [jax.device_put(part, device) for device, part in parts]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
