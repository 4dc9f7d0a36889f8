"""The device mesh and how arrays lie on it.

Two axes: ``data`` splits the batch, ``model`` splits large weights. The default mesh puts every device on ``data``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.errors import InputError

AXES = ("data", "model")


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh over JAX ``devices`` (default: all of the default backend), the batch split over every one of them."""
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise InputError("devices is empty; give at least one, or None for all of them")
    return Mesh(np.asarray(devices, dtype=object).reshape(-1, 1), AXES)


def check_mesh(mesh: Mesh) -> Mesh:
    """The mesh itself, if its axes are those canvax knows.

    Raises:
        InputError: no ``data`` axis, or an axis other than ``data`` and ``model``.
    """
    if "data" not in mesh.axis_names or not set(mesh.axis_names) <= set(AXES):
        raise InputError(f"mesh has axes {mesh.axis_names}; name them 'data' and, if wanted, 'model'")
    return mesh


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
    """The first axis split over ``data``."""
    return NamedSharding(mesh, PartitionSpec("data"))


def padded_batch(batch: int, mesh: Mesh) -> int:
    """The smallest batch of at least ``batch`` that the ``data`` axis divides."""
    size = mesh.shape["data"]
    return -(-batch // size) * size
