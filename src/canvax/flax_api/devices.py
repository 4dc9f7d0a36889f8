"""The leading device axis: arrays [D, ...] whose entry d lies on device d."""

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
    """A copy of each array for each device: [...] becomes [D, ...], entry d on device d.

    ``flax.jax_utils.replicate`` stacks the D copies in one place first; here every device is sent the one array there
    is; on the CPU all entries share its memory, so do not write into a NumPy array that was replicated. ``devices`` are
    those of this process if not given.
    """
    mesh = make_mesh(jax.local_devices() if devices is None else devices)
    everywhere, stacked = replicated(mesh), over_batch(mesh)

    def one(leaf: Any) -> Array:
        if isinstance(leaf, Tracer) or np.asarray(leaf).dtype.kind in "OSUmM":
            raise InputError(f"replicate: {shown(leaf)} is not an array of numbers")
        copies = jax.device_put(_one_entry(leaf), everywhere)
        shards = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays((mesh.size, *copies.shape[1:]), stacked, shards)

    return jax.tree.map(one, tree)


def unreplicate(tree: Any) -> Any:
    """The first entry of each array with a leading device axis, from the device that has it."""

    def one(leaf: Any) -> Any:
        if not getattr(leaf, "ndim", 0):
            raise InputError(f"unreplicate: {shown(leaf)} has no device axis; give what replicate returned")
        return leaf.addressable_shards[0].data[0] if isinstance(leaf, jax.Array) else leaf[0]

    return jax.tree.map(one, tree)


def shard(tree: Any) -> Any:
    """Split the first axis over the devices of this process: [D * B, ...] becomes [D, B, ...].

    Raises:
        InputError: the first axis is not a multiple of the number of devices.
    """
    devices = jax.local_device_count()

    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "ndim"):
            cure = "; of text pipeline.prepare_inputs makes one" if isinstance(leaf, str) else ""
            raise InputError(f"shard: {shown(leaf)} is not an array{cure}")
        if leaf.ndim == 0 or leaf.shape[0] % devices:
            raise InputError(
                f"shard: an array of shape {leaf.shape} cannot be split over {devices} devices; make its first axis a "
                f"multiple of {devices}, for instance with [prompt] * jax.device_count()"
            )
        return leaf.reshape(devices, -1, *leaf.shape[1:])

    return jax.tree.map(one, tree)


def stacked_devices(params: Params, count: int) -> list[Any]:
    """The devices that hold the entries of stacked ``params``, in order.

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
    """Where to run parameters without a device axis: on their own accelerator, else on the first device."""
    first = jax.tree.leaves(params)[0]
    if isinstance(first, jax.Array) and len(first.devices()) == 1:
        (device,) = first.devices()
        if device.platform == jax.default_backend():
            return device
    return jax.local_devices()[0]


def host_device() -> Any:
    """The device whose memory is the host's, where loaded parameters wait until they are replicated."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves no CPU backend
        return jax.local_devices()[0]


def on_host(params: Params) -> Params:
    """``params`` from a mesh of ``host_device`` alone as arrays of no mesh: the same buffers, for any use.

    Where the CPU is all there is, they are bound to no device either, so that ``jax.pmap`` takes what is made of them.
    Beside an accelerator they are: else the first cast would move them there.
    """
    device = host_device()
    if device.platform != jax.default_backend():
        return jax.device_put(params, device)
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), params)


def _one_entry(leaf: Any) -> Any:
    """``leaf`` with a leading axis of length 1; of a host array no copy is made."""
    if isinstance(leaf, jax.Array) and any(device.platform != "cpu" for device in leaf.devices()):
        return leaf[None]
    return np.asarray(leaf)[None]
