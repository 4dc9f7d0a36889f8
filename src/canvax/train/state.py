"""The state of a run and its file, with everything that the next step depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError, InputError, nearest, shown
from canvax.parallel.place import is_split, put, whole
from canvax.params import Params
from canvax.train.objectives import cast
from canvax.types import Array, DType, HostArray
from canvax.weights.cast import parse_dtype
from canvax.weights.safetensors import ArrayToSave, open_safetensors, read_metadata, write_safetensors

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that changes from step to step.

    Attributes:
        step: number of steps done, int32.
        params: the trained parameters, float32.
        average: the exponential moving average of ``params``, used for inference; None for no averaging.
        optimizer: the state of the optimiser.
    """

    step: Array
    params: Params
    average: Params | None
    optimizer: Any


def apart(tree: Tree, other: Any) -> Tree:
    """Copy the arrays of a tree that are also in another one, which a step overwrites."""
    held = {id(leaf) for leaf in jax.tree.leaves(other)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in held else leaf, tree)


def check_arrays(name: str, tree: Any, *, trained: bool = False) -> None:
    """Raise InputError, naming the leaf, if a leaf of a tree is not an array of numbers, or ``trained`` and not of
    floats."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=(lambda leaf: leaf is None) if trained else None)
    for path, leaf in leaves:
        where = name + jax.tree_util.keystr(path)
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape") or np.dtype(dtype).kind in "OSUmMc":
            raise InputError(f"{where}={shown(leaf)} is not an array of numbers")
        if trained and not jnp.issubdtype(dtype, jnp.floating):
            raise InputError(f"{where} holds {dtype}, which has no gradient; give floats")
    if trained and not leaves:
        raise InputError(name, "holds no array: there is nothing to train")


def save_state(path: Path, state: Any, facts: Mapping[str, Any]) -> None:
    """Write a state, or any tree of arrays, atomically: to a temporary file that is then renamed."""
    check_arrays("state", state)
    arrays = [
        ArrayToSave(name, leaf.shape or (1,), np.dtype(leaf.dtype), partial(_on_host, leaf))
        for name, leaf in _named(state)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, arrays, {"canvax": json.dumps(dict(facts))})


def read_facts(path: Path) -> dict[str, Any]:
    """Read the ``facts`` that ``save_state`` wrote."""
    try:
        return json.loads(read_metadata(path)["canvax"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a state of a training run; delete it to begin again.") from error


def load_state(path: Path, like: Tree) -> Tree:
    """Read a tree with the structure, shapes, dtypes and devices of ``like``, a tree of device arrays.

    Raises:
        CheckpointError: the file belongs to another model or optimiser.
    """
    check_arrays("like", like)
    entries = {entry.name: entry for entry in open_safetensors(path)}
    expected = _named(like)
    faults = [
        name
        for name, leaf in expected
        if name not in entries or (entries[name].shape, entries[name].dtype) != (leaf.shape or (1,), leaf.dtype)
    ]
    if faults or len(entries) != len(expected):
        first = faults[0] if faults else "more arrays than the model has"
        raise CheckpointError(f"{path}: belongs to another model ({first}); delete it to begin again.")
    leaves = [put(entries[name].read().reshape(leaf.shape), leaf.sharding) for name, leaf in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(state: Any) -> list[tuple[str, Array]]:
    """Return every array with its path: ``params.unet.conv_in.weight``, ``optimizer.1.mu.unet.conv_in.weight``."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _on_host(leaf: Array) -> HostArray:
    return np.asarray(leaf).reshape(leaf.shape or (1,))


def on_host(state: Tree) -> Tree:
    """Copy a tree of device arrays to the host; those that are split over processes are gathered one by one."""
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        if not is_split(leaf):
            leaf.copy_to_host_async()
    # On the CPU a NumPy array of a device array is the same memory, which a step overwrites.
    shared = leaves[0].sharding.device_set.copy().pop().platform == "cpu"
    return jax.tree.map(lambda leaf: np.array(whole(leaf), copy=shared or None), state)


def in_dtype(params: Params, names: Sequence[str], dtype: DType) -> Params:
    """Cast components of ``params`` in place, so that there is only one copy of each; return these components."""
    dtype = parse_dtype(dtype)
    for name in names:
        if name not in params:
            raise InputError("names", f"has {name!r}, which params do not have", cure=nearest(name, list(params)))
        check_arrays(f"params[{name!r}]", params[name])
        params[name] = cast(params[name], dtype)
    return {name: params[name] for name in names}
