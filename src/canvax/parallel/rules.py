"""From the logical axes of parameters to the axes of the mesh: one table says which weights are split, and how.

The pattern is Megatron's (Shoeybi et al. 2019, section 3): of two layers in a row the first is split by its outputs and
the second by its inputs, so that all in between stays on its device and only the sum behind the second crosses devices.
Attention is split by heads, feed-forward by its inner width, a residual block by the groups of its second
normalisation. That is one all-reduce for each of these, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.errors import NO_VALUE, HintWarning, InputError, warn
from canvax.parallel.place import put
from canvax.params import Axis, Param, Params, Spec, flatten, map_spec, unflatten
from canvax.types import Array, DType

RULES: Mapping[str, str] = {"heads": "model", "mlp": "model", "hidden": "model"}
"""Logical axis -> axis of the mesh. Axes that are not here (``embed``, ``conv_in``, ``conv_out``) are whole everywhere:
they are what blocks hand on to each other."""


@dataclass(frozen=True)
class Placement:
    """How a parameter lies on the devices.

    Attributes:
        shape: its shape there: that of the parameter, but for an axis with ``parts`` that is split, which is two axes.
        spec: which mesh axis splits which axis.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec

    @property
    def whole(self) -> bool:
        """Whether every device has all of it."""
        return not any(self.spec)


def placement(param: Param, sizes: Mapping[str, int]) -> Placement:
    """How ``param`` lies on a mesh with axes of these ``sizes``.

    An axis that cannot be cut between its units stays whole, and so does the axis of the layer it is paired with, which
    has the same units: 10 heads are not split over 4 devices.
    """
    shape: list[int] = []
    spec: list[str | None] = []
    for length, axis in zip(param.shape, param.axes, strict=True):
        name, units, parts = axis if isinstance(axis, Axis) else (axis, length, 1)
        over = RULES.get(name) if name else None
        if over is None or sizes.get(over, 1) == 1 or units % sizes[over]:
            over, parts = None, 1
        shape += [parts, length // parts] if parts > 1 else [length]
        spec += [None, over] if parts > 1 else [over]
    return Placement(tuple(shape), PartitionSpec(*spec) if any(spec) else PartitionSpec())


def check_split(spec: Spec, sizes: Mapping[str, int], name: str) -> None:
    """Compare the axis ``model`` of a mesh with what it splits in the parameters of a network.

    A split that is partly possible is useful: SDXL on ``model=4`` needs 0.28 of the UNet's memory on each device. So it
    is a warning, and a mesh that splits nothing is an error. Both list the sizes that split everything.

    Args:
        spec: of the denoiser.
        sizes: of the axes of the mesh.
        name: of the model.

    Raises:
        InputError: the axis splits nothing, so that every device would do the same work.
    """
    size = sizes.get("model", 1)
    units = set[int]()
    for _, param in flatten(spec):
        for length, axis in zip(param.shape, param.axes, strict=True):
            logical = axis.name if isinstance(axis, Axis) else axis
            if RULES.get(logical or "") == "model":
                units.add(axis.units if isinstance(axis, Axis) else length)
    uneven = sorted(count for count in units if count % size)
    if not uneven:
        return
    whole = [str(number) for number in range(1, math.gcd(*units) + 1) if math.gcd(*units) % number == 0]
    cure = f"sizes that split all of it: {', '.join(whole)}"
    if len(uneven) == len(units):
        raise InputError("mesh", f"model={size}", f"splits nothing of {name}", cure)
    counts = ", ".join(map(str, uneven))
    warn(f"mesh model={size} does not divide {counts} heads or groups of {name}, which stay whole; {cure}", HintWarning)


def abstract_params(spec: Spec, dtype: Any, mesh: Mesh) -> Params:
    """Shapes, dtypes and shardings of a spec's parameters as they lie on a mesh, without memory."""

    def one(param: Param) -> jax.ShapeDtypeStruct:
        placed = placement(param, mesh.shape)
        return jax.ShapeDtypeStruct(placed.shape, param.dtype_in(dtype), sharding=NamedSharding(mesh, placed.spec))

    return map_spec(one, spec)


def place(param: Param, leaf: Any, mesh: Mesh) -> Array:
    """A parameter on the devices of a mesh, each of which receives its own part alone.

    Args:
        param: its declaration.
        leaf: host array or device array, whole or as it lies on a mesh.
        mesh: the devices.
    """
    placed = placement(param, mesh.shape)
    sharding = NamedSharding(mesh, placed.spec)
    if isinstance(leaf, jax.Array) and leaf.shape == placed.shape and leaf.sharding == sharding:
        return leaf
    if leaf.shape != placed.shape:
        leaf = np.reshape(leaf, placed.shape) if isinstance(leaf, np.ndarray) else leaf.reshape(placed.shape)
    return put(leaf, sharding)


def is_on(params: Params, mesh: Mesh) -> bool:
    """Whether all parameters, or their abstract shapes, lie on the devices of a mesh, split in whatever way."""

    def one(leaf: Any) -> bool:
        known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer)
        return known and getattr(leaf.sharding, "mesh", None) == mesh

    return all(map(one, jax.tree.leaves(params)))


def place_all(spec: Spec, params: Params, mesh: Mesh, name: str = "params") -> Params:
    """Every parameter of a spec by ``place``.

    Raises:
        InputError: some are missing, unknown or of another shape; naming them, below ``name``.
    """
    check_params(spec, params, name)
    given = dict(flatten(params))
    return unflatten({key: place(param, given[key], mesh) for key, param in flatten(spec)})


def check_params(spec: Spec, params: Any, name: str, *, stacked: bool = False, more: bool = False) -> None:
    """Refuse parameters that are not those of a spec; ``stacked``: each is under a device axis.

    ``more``: others may lie beside them, as low-rank adapters do that somebody trains.

    Raises:
        InputError: some are missing, unknown, of another shape or no numbers; naming them, below ``name``.
    """
    if not isinstance(params, Mapping):
        raise InputError("params", NO_VALUE, f"has {name!r}, which is {type(params).__name__}, not a dict of arrays")
    declared, structure = jax.tree.flatten(spec)
    leaves, found = jax.tree.flatten(params)
    # Loops of one's own come here before each step: names are put together only where something is wrong.
    if structure == found and not any(_unfit(*pair, stacked) for pair in zip(declared, leaves, strict=True)):
        return
    wanted, given = dict(flatten(spec)), dict(flatten(params))
    faults = [f"{key} is missing" for key in wanted if key not in given]
    faults += [f"{key} is not a parameter" for key in given if key not in wanted and not more]
    unfit = {key: _unfit(param, given[key], stacked) for key, param in wanted.items() if key in given}
    faults += [f"{key} {why}" for key, why in unfit.items() if why]
    if faults:
        rest = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise InputError(
            "params", NO_VALUE, f"has {name!r}, which does not fit the model: {'; '.join(faults[:8])}{rest}"
        )


def _unfit(param: Param, leaf: Any, stacked: bool) -> str:
    """Why something is not this parameter; "" if it is, be it traced or only described."""
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return f"is a {type(leaf).__name__}, not an array of NumPy or JAX"
    shape = leaf.shape[1:] if stacked else leaf.shape
    if (shape != param.shape and shape != param.in_parts) or (stacked and not leaf.ndim):
        return f"is {shape}, not {param.shape}"
    # A weight of 8 bits has that dtype in any case; of others any number with a point does.
    if leaf.dtype != param.dtype_in(np.float32) and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"holds {leaf.dtype}, not floating-point numbers"
    return ""


def device_bytes(spec: Spec, dtype: DType, sizes: Mapping[str, int]) -> int:
    """Bytes that each device of a mesh holds of the parameters of a spec, in a model of this dtype."""
    total = 0
    for param in jax.tree.leaves(spec, is_leaf=lambda leaf: isinstance(leaf, Param)):
        placed = placement(param, sizes)
        parts = int(np.prod([sizes[axis] for axis in placed.spec if axis]))
        total += param.size * param.dtype_in(dtype).itemsize // parts
    return total
