"""The device mesh and the sharding of batches over it.

Two axes: ``data`` splits the batch, ``model`` splits large weights. The default mesh puts every device on ``data``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from canvax.errors import InputError, check_count

AXES = ("data", "model")

_users: list[int] = []
"""The process that uses the devices; empty before the first use."""


def make_mesh(devices: Sequence[Any] | None = None, *, data: int | None = None, model: int = 1) -> Mesh:
    """Make a mesh over JAX devices, for ``canvax.load(..., mesh=)``.

    Args:
        devices: by default all devices of the default backend, including those of other processes.
        data: number of parts that the batch is split into; by default as many as the devices allow.
        model: number of parts that attention heads, feed-forward and residual blocks are split into, for models that
            do not fit on a device, or for less time per image. These devices communicate in every layer.

    Raises:
        InputError: ``data * model`` is not the number of devices.
    """
    try:
        chosen = all_devices() if devices is None else list(devices)
    except TypeError:
        raise InputError("devices", "is not a list of JAX devices, such as jax.devices()[:2]", value=devices) from None
    if not all(hasattr(device, "platform") for device in chosen):
        raise InputError("devices", "are not JAX devices, such as jax.devices()[:2]", value=chosen)
    if not chosen:
        raise InputError("devices", "is empty", cure="give at least one, or None for all of them")
    if len(set(chosen)) < len(chosen):
        raise InputError("devices", "name one twice", cure="give each once", value=chosen)
    data = check_sizes(len(chosen), data, model)
    if model > 1 and chosen[0].platform == "tpu":  # neighbours on the board communicate fastest
        return Mesh(create_device_mesh((data, model), chosen), AXES)
    return Mesh(np.asarray(chosen, dtype=object).reshape(data, model), AXES)


def refuse_fork() -> None:
    """Check that this process may use devices; every function that does calls it.

    Raises:
        InputError: the process was forked from one that uses devices. JAX's threads are missing here: it would hang.
    """
    if not _users:
        _users.append(os.getpid())
    elif _users != [os.getpid()]:
        raise InputError(
            "this process was forked from one in which JAX runs, and JAX does not survive that; start it with "
            "multiprocessing.get_context('spawn'), or load the model in the new process alone"
        )


def all_devices() -> list[Any]:
    """Return ``jax.devices()``.

    Raises:
        InputError: JAX has no device of the requested platform, or this process is a fork.
    """
    refuse_fork()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if the platform is not installed
        asked = jax.config.values.get("jax_platforms")
        if not asked:
            raise
        reason = f" ({str(error).splitlines()[0][:200]})" if str(error) else ""
        raise InputError(
            f"JAX_PLATFORMS={asked}: JAX finds no such device here{reason}; unset it, or install what it needs: "
            'pip install ".[cuda]" for NVIDIA GPUs, ".[tpu]" for TPUs'
        ) from None


def check_sizes(devices: int, data: int | None, model: int) -> int:
    """Return the size of the axis ``data`` for a number of devices.

    Raises:
        InputError: ``data * model`` is not the number of devices.
    """
    for name, value in (("data", data), ("model", model)):
        if value is not None:
            check_count(name, value)
    if data is None:
        if devices % model:
            divisors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise InputError(
                "mesh", f"does not divide {devices} devices", cure=f"use one of {divisors}", value=f"model={model}"
            )
        return devices // model
    if data * model != devices:
        some = ", or name the devices, as in make_mesh(jax.devices()[:2])" if devices > 1 else ""
        there = f"there {'is' if devices == 1 else 'are'} {devices}; leave it out to use them all{some}"
        raise InputError("mesh", f"is one of {data * model} devices, and {there}", value=f"data={data},model={model}")
    return data


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the sizes of the axes from a text, e.g. ``data=4,model=2``.

    Raises:
        InputError: the text has another form.
    """
    text = text.replace(" ", "")
    if not re.fullmatch(r"(data|model)=\d{1,9}(,(data|model)=\d{1,9})?", text, re.ASCII):
        raise InputError("mesh", "is not understood", cure="write data=4,model=2, or one of the two", value=text)
    pairs = [part.split("=") for part in text.split(",")]
    sizes = {name: int(size) for name, size in pairs}
    if len(sizes) < len(pairs):
        raise InputError("mesh", "names an axis twice", cure="write data=4,model=2", value=text)
    if 0 in sizes.values():
        raise InputError("mesh", "has an axis whose size is not a number of at least 1", value=text)
    check_sizes(sizes.get("data", 1) * sizes.get("model", 1), sizes.get("data"), sizes.get("model", 1))
    return sizes


def mesh_of(text: str | None) -> Mesh:
    """Make the mesh that a text describes, e.g. ``data=4,model=2``, over the first devices if there are more.

    Raises:
        InputError: the text has another form, or there are too few devices.
    """
    sizes = parse_mesh(text) if text else {}
    devices = all_devices()
    if "data" in sizes and jax.process_count() == 1:
        devices = devices[: sizes["data"] * sizes.get("model", 1)]
    return make_mesh(devices, **sizes)


def check_mesh(mesh: Mesh) -> Mesh:
    """Return ``mesh`` with both axes, ``data`` and ``model``, and sharding left to the compiler.

    Raises:
        InputError: the mesh has no ``data`` axis, has an axis other than ``data`` and ``model``, or leaves some
            processes out; or this process is a fork.
    """
    if not isinstance(mesh, Mesh):
        raise InputError("mesh", "is not a mesh", cure="make one with canvax.make_mesh(data=4, model=2)", value=mesh)
    if "data" not in mesh.axis_names or not set(mesh.axis_names) <= set(AXES):
        raise InputError("mesh", f"has axes {mesh.axis_names}", cure="name them 'data' and, if wanted, 'model'")
    refuse_fork()
    owners = processes(mesh)
    if jax.process_index() not in owners or (len(owners) > 1 and len(owners) < jax.process_count()):
        raise InputError(
            "mesh",
            f"has devices of the processes {owners} of {jax.process_count()}",
            cure="give it devices of all of them, or of this one alone, as in make_mesh(jax.local_devices())",
        )
    if mesh.axis_names == AXES and all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(np.moveaxis(mesh.devices, mesh.axis_names.index("data"), 0).reshape(mesh.shape["data"], -1), AXES)


def processes(mesh: Mesh) -> list[int]:
    """Return the indices of the processes whose devices are in a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the first axis over ``data``."""
    return NamedSharding(mesh, PartitionSpec("data"))


def padded_batch(batch: int, mesh: Mesh) -> int:
    """Round a batch size up to a multiple of the axis ``data``."""
    size = mesh.shape["data"]
    return -(-batch // size) * size
