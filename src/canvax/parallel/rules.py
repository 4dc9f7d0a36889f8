"""Sharding rules: a table from logical axes of parameters to axes of the mesh.

The pattern is Megatron's (Shoeybi et al. 2019, section 3): of two consecutive layers the first is split by its outputs
and the second by its inputs, so that everything between them stays on its device. Attention is split by heads,
feed-forward by its inner width, a residual block by the groups of its second normalisation. Each of these needs only
one communication, the all-reduce of the second layer's sums.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.errors import HintWarning, InputError, warn
from canvax.parallel.place import HOST, put
from canvax.params import Axis, Param, Params, Spec, flatten, map_spec, unflatten
from canvax.types import Array, DType

RULES: Mapping[str, str] = {"heads": "model", "mlp": "model", "hidden": "model"}
"""Logical axis -> axis of the mesh. Axes that are not listed (``embed``, ``conv_in``, ``conv_out``) are never split:
they are the activations that blocks pass to each other."""

AHEAD = 2
"""Layers whose streamed weights are on the devices at a time."""

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The layer in the name of a parameter: single_transformer_blocks.5."""


@dataclass(frozen=True)
class Placement:
    """The placement of a parameter on the devices.

    Attributes:
        shape: shape on the devices: the parameter's shape, where a split axis with ``parts`` becomes two axes.
        spec: for each axis, the mesh axis that splits it.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec

    @property
    def whole(self) -> bool:
        """True if every device has the whole parameter."""
        return not any(self.spec)


def placement(param: Param, sizes: Mapping[str, int]) -> Placement:
    """Return the placement of ``param`` on a mesh whose axes have these ``sizes``.

    An axis whose units cannot be divided evenly stays whole: 10 heads are not split over 4 devices. The paired layer
    has the same units, so its axis stays whole too.
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
    """Check which parameters of the denoiser the axis ``model`` of a mesh can split; ``name`` is the model's.

    A partial split is useful: SDXL on ``model=4`` needs 0.28 of the UNet's memory on each device. So it causes only a
    warning, while a mesh that splits nothing is an error. Both list the sizes that split everything.

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
        raise InputError("mesh", f"splits nothing of {name}", cure=cure, value=f"model={size}")
    counts = ", ".join(map(str, uneven))
    warn(f"mesh model={size} does not divide {counts} heads or groups of {name}, which stay whole; {cure}", HintWarning)


def abstract_params(spec: Spec, dtype: Any, mesh: Mesh) -> Params:
    """Return shapes, dtypes and shardings of a spec's parameters on a mesh, without allocating memory."""

    def abstract(param: Param) -> jax.ShapeDtypeStruct:
        placed = placement(param, mesh.shape)
        sharding = NamedSharding(mesh, placed.spec, memory_kind=HOST if param.host else None)
        return jax.ShapeDtypeStruct(placed.shape, param.dtype_in(dtype), sharding=sharding)

    return map_spec(abstract, spec)


def place(param: Param, leaf: Any, mesh: Mesh, memory_kind: str | None = None) -> Array:
    """Put a parameter on the devices of a mesh; each device receives only its part.

    Args:
        param: its declaration.
        leaf: a host or device array, in the parameter's shape or already placed on a mesh.
        mesh: the devices.
        memory_kind: ``canvax.parallel.place.HOST`` for the host's; by default as the parameter is declared.
    """
    placed = placement(param, mesh.shape)
    sharding = NamedSharding(mesh, placed.spec, memory_kind=memory_kind or (HOST if param.host else None))
    if isinstance(leaf, jax.Array) and leaf.shape == placed.shape and leaf.sharding == sharding:
        return leaf
    if leaf.shape != placed.shape:
        leaf = np.reshape(leaf, placed.shape) if isinstance(leaf, np.ndarray) else leaf.reshape(placed.shape)
    return put(leaf, sharding)


def is_on(params: Params, mesh: Mesh) -> bool:
    """Return whether all parameters, or their abstract shapes, are on a mesh, whatever their sharding."""

    def on_mesh(leaf: Any) -> bool:
        known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer)
        return known and getattr(leaf.sharding, "mesh", None) == mesh

    return all(map(on_mesh, jax.tree.leaves(params)))


def place_all(spec: Spec, params: Params, mesh: Mesh, name: str = "params") -> Params:
    """Call ``place`` for every parameter of a spec.

    Raises:
        InputError: parameters of ``name`` are missing, unknown or have another shape; lists them.
    """
    check_params(spec, params, name)
    leaves = dict(flatten(params))
    return unflatten({key: place(param, leaves[key], mesh) for key, param in flatten(spec)})


def check_params(spec: Spec, params: Any, name: str, *, stacked: bool = False, more: bool = False) -> None:
    """Check that parameters match a spec.

    Args:
        spec: the expected parameters.
        params: the parameters to check.
        name: their name in errors.
        stacked: each array has a device axis in front.
        more: accept additional parameters, e.g. low-rank adapters that are being trained.

    Raises:
        InputError: parameters are missing, unknown, have another shape or are not numbers; lists them.
    """
    if not isinstance(params, Mapping):
        raise InputError("params", f"has {name!r}, which is {type(params).__name__}, not a dict of arrays")
    declared, structure = jax.tree.flatten(spec)
    leaves, got = jax.tree.flatten(params)
    # User-written loops check before each step, so names are built only if something is wrong.
    if structure == got and not any(_unfit(*pair, stacked) for pair in zip(declared, leaves, strict=True)):
        return
    expected, actual = dict(flatten(spec)), dict(flatten(params))
    faults = [f"{key} is missing" for key in expected if key not in actual]
    faults += [f"{key} is not a parameter" for key in actual if key not in expected and not more]
    unfit = {key: _unfit(param, actual[key], stacked) for key, param in expected.items() if key in actual}
    faults += [f"{key} {why}" for key, why in unfit.items() if why]
    if faults:
        rest = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise InputError("params", f"has {name!r}, which does not fit the model: {'; '.join(faults[:8])}{rest}")


def _unfit(param: Param, leaf: Any, stacked: bool) -> str:
    """Return why ``leaf``, which may be traced or abstract, does not match this parameter; "" if it does."""
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return f"is a {type(leaf).__name__}, not an array of NumPy or JAX"
    shape = leaf.shape[1:] if stacked else leaf.shape
    if (shape != param.shape and shape != param.in_parts) or (stacked and not leaf.ndim):
        return f"is {shape}, not {param.shape}"
    # An 8-bit weight must have exactly its dtype; other parameters may have any floating-point dtype.
    if leaf.dtype != param.dtype_in(np.float32) and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"holds {leaf.dtype}, not floating-point numbers"
    return ""


def device_bytes(spec: Spec, dtype: DType, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a spec's parameters on each device of a mesh, in a model of this dtype.

    Those that stay in the host's memory do not count.
    """
    total = 0
    for param in jax.tree.leaves(spec, is_leaf=lambda leaf: isinstance(leaf, Param)):
        if param.host:
            continue
        placed = placement(param, sizes)
        parts = int(np.prod([sizes[axis] for axis in placed.spec if axis]))
        total += param.size * param.dtype_in(dtype).itemsize // parts
    return total


def largest_layer(spec: Spec, size: Callable[[Spec], int]) -> int:
    """Return the bytes of the streamed weights of the largest layer."""
    layers = Counter[str]()
    for name, param in flatten(spec):
        layer = _LAYER.match(name)
        layers[layer[0] if layer else name] += size({"": param}) if param.large else 0
    return max(layers.values(), default=0)
