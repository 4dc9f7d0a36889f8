"""The leading device axis: arrays [D, ...] whose entry d is on device d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from canvax.errors import InputError, shown
from canvax.parallel.mesh import make_mesh, over_batch, replicated
from canvax.types import Array, Params


def replicate(tree: Any, devices: Sequence[Any] | None = None) -> Any:
    """Copy each array to each device: [...] becomes [D, ...], with entry d on device d.

    ``flax.jax_utils.replicate`` stacks D copies first; this function sends the same array to every device. On the CPU
    all entries share the memory of the original, so do not modify a NumPy array after replicating it. ``devices`` are
    by default those of this process.
    """
    mesh = make_mesh(jax.local_devices() if devices is None else devices)
    everywhere, stacked = replicated(mesh), over_batch(mesh)

    def replicate_leaf(leaf: Any) -> Array:
        if isinstance(leaf, Tracer) or np.asarray(leaf).dtype.kind in "OSUmM":
            raise InputError(f"replicate: {shown(leaf)} is not an array of numbers")
        copies = jax.device_put(_with_device_axis(leaf), everywhere)
        shards = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays((mesh.size, *copies.shape[1:]), stacked, shards)

    return jax.tree.map(replicate_leaf, tree)


def unreplicate(tree: Any) -> Any:
    """Return the first entry of each array with a device axis, from the device that has it."""

    def first_entry(leaf: Any) -> Any:
        if not getattr(leaf, "ndim", 0):
            raise InputError(f"unreplicate: {shown(leaf)} has no device axis; give what replicate returned")
        return leaf.addressable_shards[0].data[0] if isinstance(leaf, jax.Array) else leaf[0]

    return jax.tree.map(first_entry, tree)


def shard(tree: Any) -> Any:
    """Split the first axis over the devices of this process: [D * B, ...] becomes [D, B, ...].

    Raises:
        InputError: the first axis is not a multiple of the number of devices.
    """
    devices = jax.local_device_count()

    def shard_leaf(leaf: Any) -> Any:
        if not hasattr(leaf, "ndim"):
            cure = "; of text pipeline.prepare_inputs makes one" if isinstance(leaf, str) else ""
            raise InputError(f"shard: {shown(leaf)} is not an array{cure}")
        if leaf.ndim == 0 or leaf.shape[0] % devices:
            raise InputError(
                f"shard: an array of shape {leaf.shape} cannot be split over {devices} devices; make its first axis a "
                f"multiple of {devices}, for instance with [prompt] * jax.device_count()"
            )
        return leaf.reshape(devices, -1, *leaf.shape[1:])

    return jax.tree.map(shard_leaf, tree)


def stacked_devices(params: Params, count: int) -> list[Any]:
    """Return the devices of the entries of stacked ``params``, in order.

    Raises:
        InputError: the parameters have no leading axis of length ``count``.
    """
    leaves = jax.tree.leaves(params)
    for leaf in leaves:
        if np.ndim(leaf) == 0 or leaf.shape[0] != count:
            raise InputError(
                f"params holds an array of shape {np.shape(leaf)}, and prompt_ids is for {count} devices; with "
                "jit=True pass replicate(params), and shard(prompt_ids) for the same devices"
            )
    first = leaves[0]
    if isinstance(first, jax.Array) and len(first.sharding.device_set) == count:
        shards = sorted(first.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return [shard.device for shard in shards]
    if count > jax.local_device_count():
        raise InputError(
            f"prompt_ids and params are for {count} devices, and there are {jax.local_device_count()}; the leading "
            "axis is the device axis, images of one device go into the second"
        )
    return jax.local_devices()[:count]


def home_device(params: Params) -> Any:
    """Return the device for parameters without a device axis: their accelerator, or else the first device."""
    first = jax.tree.leaves(params)[0]
    if isinstance(first, jax.Array) and len(first.devices()) == 1:
        (device,) = first.devices()
        if device.platform == jax.default_backend():
            return device
    return jax.local_devices()[0]


def host_device() -> Any:
    """Return the CPU device, which has loaded parameters until they are replicated."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves no CPU backend
        return jax.local_devices()[0]


def on_host(params: Params) -> Params:
    """Detach ``params`` from the mesh of ``host_device``: the result has the same buffers, and can be used anywhere.

    On a machine with only CPUs the arrays are not committed to a device either, so that ``jax.pmap`` accepts arrays
    computed from them. With an accelerator they are committed: otherwise the first cast would move them there.
    """
    device = host_device()
    if device.platform != jax.default_backend():
        return jax.device_put(params, device)
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), params)


def _with_device_axis(leaf: Any) -> Any:
    """Add a leading axis of length 1, without copying host arrays."""
    if isinstance(leaf, jax.Array) and any(device.platform != "cpu" for device in leaf.devices()):
        return leaf[None]
    return np.asarray(leaf)[None]
