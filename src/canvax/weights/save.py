"""Writes the diffusers layout, so that PyTorch diffusers, transformers and canvax itself can load the result.

Files get their final names only when complete, and nothing is overwritten without ``overwrite``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from canvax.errors import CanvaxError, InputError
from canvax.files import temporary_folder, written
from canvax.params import Param, flatten
from canvax.tokenizers.concepts import FILE as CONCEPTS
from canvax.types import DType, HostArray, Params
from canvax.weights.cast import cast_into
from canvax.weights.folder import DEFAULTS, INDEX, INDICES, MODULAR, STEMS, config_file, modular, plain_files
from canvax.weights.load import Component
from canvax.weights.safetensors import ArrayToSave, write_safetensors

MAX_SHARD = 10_000_000_000
"""Largest size of a file's arrays in bytes; larger components are split, with an index."""

_METADATA = {"format": "pt"}  # required by transformers


def save_component(
    folder: str | Path,
    component: Component,
    params: Params,
    config: Mapping[str, Any],
    *,
    dtype: DType | None = None,
    rest: Sequence[ArrayToSave] = (),
) -> None:
    """Write one component's weights and ``config.json`` into ``folder``.

    Args:
        folder: the component's folder (``.../unet``), which is created.
        component: name, spec and kind, as for loading.
        params: nested dict with exactly the spec's parameters.
        config: content of ``config.json``.
        dtype: dtype of the written arrays; None for each array's.
        rest: arrays of the component that canvax does not use.

    Raises:
        InputError: params do not match the spec; nothing is written.
    """
    folder = Path(folder)
    to_save = component.to_save([*arrays_of(component, params, dtype), *rest])
    shards, stem = _shards(to_save), STEMS[component.kind]
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, _METADATA)
    if len(shards) > 1:
        where = {array.name: name for name, shard in zip(names, shards, strict=True) for array in shard}
        total = sum(array.nbytes for array in to_save)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    write_json(folder / "config.json", config)


def save_checkpoint(
    folder: str | Path,
    components: Sequence[Component],
    params: Params,
    *,
    index: Mapping[str, Any],
    configs: Mapping[str, Mapping[str, Any]],
    copy_from: Callable[[str], Path | None] = lambda _: None,
    dtype: DType | None = None,
    overwrite: bool = False,
    rest: Mapping[str, Sequence[ArrayToSave]] | None = None,
) -> Path:
    """Write a whole checkpoint: weights, configs, tokenizers and ``model_index.json``.

    The checkpoint is written to a temporary folder next to ``folder``, or inside it if it exists, and moved into place
    when complete.

    Args:
        folder: destination.
        components: the components with weights, those of ``params``.
        params: ``{component name: nested dict}``.
        index: ``model_index.json``. Components that are not written (``safety_checker``) become null in it, and
            class names of the old Flax pipelines become those of PyTorch.
        configs: config of every component in ``components``, and of the scheduler.
        copy_from: returns the folder of a component, for copying tokenizer files, or None; for "", that of the model,
            for ``canvax.json`` and ``concepts.json``.
        dtype: dtype of the written arrays; None for each array's.
        overwrite: write into a folder that is not empty, replacing files of the same names.
        rest: arrays of each component that canvax does not use.

    Returns:
        The folder.

    Raises:
        InputError: the folder is not empty, or params do not match the specs.
        CanvaxError: the disk cannot be written.
    """
    folder = Path(os.path.abspath(folder))  # "." has no parent to put the temporary folder into
    if folder.exists() and not folder.is_dir():
        raise InputError("folder", "is a file", cure="choose another name", value=str(folder))
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            "folder", "is not empty", cure="choose another one, or pass {overwrite=True}", value=str(folder)
        )
    _check_parts([part.name for part in components], params, configs)
    # An existing folder may be a mount point or a link, so its parent may be on another disk.
    with writing("folder", folder), temporary_folder(folder if folder.exists() else folder.parent) as build:
        names = [part.name for part in components]
        for part in components:
            config = _with_dtype(_without_flax(configs[part.name]), params[part.name], dtype)
            other = (rest or {}).get(part.name, ())
            save_component(build / part.name, part, params[part.name], config, dtype=dtype, rest=other)
        if "scheduler" in configs:
            (build / "scheduler").mkdir()
            write_json(build / "scheduler" / config_file("scheduler"), _without_flax(configs["scheduler"]))
            names.append("scheduler")
        names += _copy_tokenizers([name for name in index if plain_files(name)], copy_from, build)
        for path in _files_in(copy_from(""), (DEFAULTS, CONCEPTS)):
            shutil.copyfile(path, build / path.name)
        index = _index(index, names)
        if str(index.get("_class_name")).endswith("ModularPipeline"):
            write_json(build / MODULAR, modular(index))
        else:
            write_json(build / INDEX, index)
        _move_into_place(build, folder)
    return folder


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Create the parent folder of the argument ``name``'s path; convert disk errors of the block to CanvaxError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CanvaxError(f"{name}={str(path)!r} cannot be written ({error.strerror or error}).") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object under a temporary name, then rename it."""
    with written(path) as temporary:
        temporary.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")


def arrays_of(component: Component, params: Params, dtype: DType | None) -> list[ArrayToSave]:
    """Return the arrays to write of a component, as PyTorch diffusers stores them, after checking it; no array is
    moved.

    Raises:
        InputError: params do not match the spec.
    """
    wanted: dict[str, Param] = dict(flatten(component.spec))
    arrays: dict[str, Any] = dict(flatten(params))
    faults = [f"{name} is missing" for name in wanted.keys() - arrays.keys()]
    faults += [f"{name} is not a parameter" for name in arrays.keys() - wanted.keys()]
    faults += [
        f"{name} is {np.shape(leaf)}, not {wanted[name].shape}"
        for name, leaf in arrays.items()
        if name in wanted and np.shape(leaf) not in (wanted[name].shape, wanted[name].in_parts)
    ]
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        what = f"of {component.name!r} do not fit their spec: {'; '.join(sorted(faults)[:8])}{more}"
        raise InputError("params", what)
    return [
        ArrayToSave(
            name,
            param.checkpoint_shapes[0],
            np.dtype(arrays[name].dtype if dtype is None else dtype),
            partial(_to_checkpoint, param, arrays[name], dtype),
        )
        for name, param in wanted.items()
    ]


def _to_checkpoint(param: Param, leaf: Any, dtype: DType | None) -> HostArray:
    # numpy's host copy of a jax.Array lives as long as the array. A copy through the CPU backend can be dropped, so
    # that saving from a GPU holds one array on the host, not the model. (JAX_PLATFORMS may exclude the CPU backend.)
    # Offloaded arrays are in the host's memory already.
    waits = isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == "pinned_host"
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and not waits:
        with suppress(RuntimeError):
            leaf = jax.device_put(leaf, jax.local_devices(backend="cpu")[0])
    array = _whole(leaf).reshape(param.shape)
    if dtype is not None and array.dtype != dtype:
        array = narrowed(array, dtype)
    return param.to_checkpoint(array)


def narrowed(array: HostArray, dtype: DType) -> HostArray:
    """Cast an array to another dtype.

    Raises:
        InputError: a number is too large for the dtype.
    """
    out = np.empty(array.shape, dtype)
    try:
        with np.errstate(over="raise"):
            cast_into(out, np.ascontiguousarray(array).reshape(array.shape))
    except FloatingPointError:
        raise InputError(
            "dtype", "cannot hold a number of a parameter", cure="save bfloat16", value=np.dtype(dtype).name
        ) from None
    return out


def _whole(leaf: Any) -> HostArray:
    """Return an array on the host, gathered if it is split over the devices of several processes."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    parts = {str(shard.index): shard for shard in leaf.addressable_shards}
    if sum(shard.data.size for shard in parts.values()) < leaf.size:
        problem = "are split over several processes, and none has all of them"
        raise InputError("params", problem, cure="to save, load with model=1 in the mesh")
    out = np.empty(leaf.shape, leaf.dtype)
    for shard in parts.values():
        out[shard.index] = shard.data
    return out


def _shards(arrays: Sequence[ArrayToSave]) -> list[list[ArrayToSave]]:
    """Split arrays in order, so that no part exceeds ``MAX_SHARD`` unless a single array does."""
    shards: list[list[ArrayToSave]] = [[]]
    size = 0
    for array in arrays:
        if shards[-1] and size + array.nbytes > MAX_SHARD:
            shards.append([])
            size = 0
        shards[-1].append(array)
        size += array.nbytes
    return shards


def _check_parts(names: Sequence[str], params: Params, configs: Mapping[str, Any]) -> None:
    without = [name for name in names if name not in configs]
    if set(names) != params.keys() or without:
        problem = f"has {sorted(params)} and configs has {sorted(configs)}"
        raise InputError("params", problem, cure=f"give both {sorted(names)}")


def _files_in(folder: Path | None, names: Sequence[str]) -> list[Path]:
    return [] if folder is None else [folder / name for name in names if (folder / name).is_file()]


def _copy_tokenizers(components: Sequence[str], source: Callable[[str], Path | None], target: Path) -> list[str]:
    """Copy the tokenizer files that canvax knows; return the components copied."""
    copied = []
    for component in components:
        files = _files_in(source(component), plain_files(component))
        if component == "scheduler" or not files:
            continue
        (target / component).mkdir()
        for file in files:
            shutil.copyfile(file, target / component / file.name)
        copied.append(component)
    return copied


def _index(index: Mapping[str, Any], written: Sequence[str]) -> dict[str, Any]:
    """Return ``model_index.json`` with PyTorch's class names and only the components that were written."""
    result = _without_flax(index)
    for name, value in result.items():
        is_part = isinstance(value, list) and all(isinstance(entry, str | dict | None) for entry in value)
        if not is_part or name.startswith("_"):
            continue
        if name not in written:
            result[name] = [None, None]
        elif len(value) == 2 and isinstance(value[1], str):
            result[name] = [value[0], value[1].removeprefix("Flax")]
    absent = [name for name in written if name not in result]
    if absent:
        raise InputError("index", f"does not name {', '.join(absent)}", cure="add [library, class] for each")
    if "safety_checker" in result and "requires_safety_checker" in result:
        result["requires_safety_checker"] = False
    return result


def _without_flax(config: Mapping[str, Any]) -> dict[str, Any]:
    name = config.get("_class_name")
    return {**config, "_class_name": name.removeprefix("Flax")} if isinstance(name, str) else dict(config)


def _with_dtype(config: dict[str, Any], params: Params, dtype: DType | None) -> dict[str, Any]:
    """Return a transformers config that names the dtype of the weights, which determines how they are read."""
    names = {np.dtype(leaf.dtype if dtype is None else dtype).name for leaf in jax.tree.leaves(params)}
    if len(names) > 1:
        return config
    return {key: next(iter(names)) if key in ("dtype", "torch_dtype") else value for key, value in config.items()}


def _move_into_place(build: Path, folder: Path) -> None:
    """Move a finished checkpoint to its final name; into an existing folder file by file, the index last."""
    if not folder.exists():
        os.replace(build, folder)
        return
    files = sorted((path for path in build.rglob("*") if path.is_file()), key=lambda path: path.name in INDICES)
    for file in files:
        target = folder / file.relative_to(build)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
    names: dict[Path, set[str]] = {}
    for file in files:
        names.setdefault(file.parent.relative_to(build), set()).add(file.name)
    for part, new in names.items():
        _drop_other_forms(folder / part, new)
        others = (DEFAULTS, CONCEPTS, *INDICES) if part == Path() else plain_files(part.name)
        for name in set(others) - new:
            (folder / part / name).unlink(
                missing_ok=True
            )  # a tokenizer's files or defaults, which would be read with the new ones


def _drop_other_forms(folder: Path, written: Collection[str]) -> None:
    """Remove weights of an earlier save, as one file or shards, that would be read instead of the new ones."""
    for stem in STEMS.values():
        form = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        if any(map(form.fullmatch, written)):
            for old in list(folder.iterdir()):
                if old.name not in written and form.fullmatch(old.name):
                    old.unlink()
