"""Writing the diffusers layout, so that PyTorch diffusers, transformers and canvax itself can load the result.

Nothing appears under its final name before it is complete, and nothing is replaced unless asked for.
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

from canvax.errors import NO_VALUE, CanvaxError, InputError
from canvax.files import temporary_folder, written
from canvax.params import Param, flatten
from canvax.tokenizers.concepts import FILE as CONCEPTS
from canvax.types import DType, HostArray, Params
from canvax.weights.cast import cast_into
from canvax.weights.folder import DEFAULTS, INDEX, INDICES, MODULAR, STEMS, config_file, modular, plain_files
from canvax.weights.load import Component
from canvax.weights.safetensors import Outgoing, write_safetensors

MAX_SHARD = 10_000_000_000
"""Bytes of arrays in one file; larger components are split, with an index."""

_METADATA = {"format": "pt"}  # what transformers insists on


def save_component(
    folder: str | Path,
    component: Component,
    params: Params,
    config: Mapping[str, Any],
    *,
    dtype: DType | None = None,
    rest: Sequence[Outgoing] = (),
) -> None:
    """Write one component's weights and ``config.json`` into ``folder``.

    Args:
        folder: the component's own folder (``.../unet``), which is made.
        component: name, spec and kind, as for loading.
        params: nested dict with exactly the spec's parameters.
        config: what to write as ``config.json``.
        dtype: dtype of the written arrays; each array's own if not given.
        rest: arrays of the component that canvax does not read.

    Raises:
        InputError: params do not fit the spec; nothing has been written then.
    """
    folder = Path(folder)
    outgoing = component.outgoing([*outgoing_of(component, params, dtype), *rest])
    shards, stem = _shards(outgoing), STEMS[component.kind]
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, _METADATA)
    if len(shards) > 1:
        where = {array.name: name for name, shard in zip(names, shards, strict=True) for array in shard}
        total = sum(array.nbytes for array in outgoing)
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
    copy_from: Callable[[str], Path] | None = None,
    dtype: DType | None = None,
    overwrite: bool = False,
    rest: Mapping[str, Sequence[Outgoing]] | None = None,
) -> Path:
    """Write a whole checkpoint: weights, configs, tokenizers and ``model_index.json``.

    The checkpoint is put together in a temporary folder beside ``folder``, or inside it if it is there already, and
    moved into place when complete.

    Args:
        folder: where to write.
        components: the components with weights; all of ``params``.
        params: ``{component name: nested dict}``.
        index: ``model_index.json``. Components that are not written (``safety_checker``) become null in it, and
            class names of the old Flax pipelines become those of PyTorch.
        configs: config of every component in ``components``, and of the scheduler.
        copy_from: gives the folder of a component, of which tokenizer files are copied; of "", that of the model, of
            which ``canvax.json`` and ``concepts.json`` are.
        dtype: dtype of the written arrays; each array's own if not given.
        overwrite: write into a folder that is not empty, replacing files of the same names.
        rest: arrays of each component that canvax does not read.

    Returns:
        The folder.

    Raises:
        InputError: the folder is not empty, or params do not fit the specs.
        CanvaxError: the disk refuses.
    """
    folder = Path(os.path.abspath(folder))  # "." has no name to put another one beside
    if folder.exists() and not folder.is_dir():
        raise InputError("folder", str(folder), "is a file", "choose another name")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError("folder", str(folder), "is not empty", "choose another one, or pass {overwrite=True}")
    _check_parts([part.name for part in components], params, configs)
    # Beside a folder that is there may be another disk: it is a mount point, or a link.
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
        if copy_from is not None:
            names += _copy_tokenizers([name for name in index if plain_files(name)], copy_from, build)
            for path in (copy_from("") / name for name in (DEFAULTS, CONCEPTS)):
                if path.is_file():
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
    """Inside, the argument ``name`` is written, and its parent is there; a disk that refuses is an error of canvax."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CanvaxError(f"{name}={str(path)!r} cannot be written ({error.strerror or error}).") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object under a temporary name, then rename it."""
    with written(path) as temporary:
        temporary.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")


def outgoing_of(component: Component, params: Params, dtype: DType | None) -> list[Outgoing]:
    """What to write of a component as PyTorch diffusers has it, after checking it; no array is moved yet.

    Raises:
        InputError: params do not fit the spec.
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
        raise InputError("params", NO_VALUE, what)
    return [
        Outgoing(
            name,
            param.checkpoint_shapes[0],
            np.dtype(arrays[name].dtype if dtype is None else dtype),
            partial(_to_checkpoint, param, arrays[name], dtype),
        )
        for name, param in wanted.items()
    ]


def _to_checkpoint(param: Param, leaf: Any, dtype: DType | None) -> HostArray:
    # A jax.Array keeps the host copy that numpy makes of it. Through the CPU backend the copy is ours to drop, so that
    # saving from a GPU holds one array on the host and not the model. (There may be no CPU backend: JAX_PLATFORMS.)
    # What waits in the host's memory is there already.
    waits = isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == "pinned_host"
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and not waits:
        with suppress(RuntimeError):
            leaf = jax.device_put(leaf, jax.local_devices(backend="cpu")[0])
    array = _whole(leaf).reshape(param.shape)
    if dtype is not None and array.dtype != dtype:
        array = narrowed(array, dtype)
    return param.to_checkpoint(array)


def narrowed(array: HostArray, dtype: DType) -> HostArray:
    """An array in another dtype.

    Raises:
        InputError: a number does not fit into it.
    """
    out = np.empty(array.shape, dtype)
    try:
        with np.errstate(over="raise"):
            cast_into(out, np.ascontiguousarray(array).reshape(array.shape))
    except FloatingPointError:
        raise InputError(
            "dtype", np.dtype(dtype).name, "cannot hold a number of a parameter", "save bfloat16"
        ) from None
    return out


def _whole(leaf: Any) -> HostArray:
    """An array on the host, put together from its parts if it is split over devices of several processes."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    parts = {str(shard.index): shard for shard in leaf.addressable_shards}
    if sum(shard.data.size for shard in parts.values()) < leaf.size:
        problem = "are split over several processes, and none has all of them"
        raise InputError("params", NO_VALUE, problem, "to save, load with model=1 in the mesh")
    out = np.empty(leaf.shape, leaf.dtype)
    for shard in parts.values():
        out[shard.index] = shard.data
    return out


def _shards(arrays: Sequence[Outgoing]) -> list[list[Outgoing]]:
    """Split in order, so that no part exceeds ``MAX_SHARD`` unless a single array does."""
    shards: list[list[Outgoing]] = [[]]
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
        raise InputError("params", NO_VALUE, problem, f"give both {sorted(names)}")


def _copy_tokenizers(components: Sequence[str], source: Callable[[str], Path], target: Path) -> list[str]:
    """Copy the tokenizer files that canvax knows; returns the components copied."""
    copied = []
    for component in components:
        files = [source(component) / name for name in plain_files(component)]
        files = [file for file in files if file.is_file()]
        if component == "scheduler" or not files:
            continue
        (target / component).mkdir()
        for file in files:
            shutil.copyfile(file, target / component / file.name)
        copied.append(component)
    return copied


def _index(index: Mapping[str, Any], written: Sequence[str]) -> dict[str, Any]:
    """``model_index.json`` with PyTorch's class names and only the components that were written."""
    result = _without_flax(index)
    for name, value in result.items():
        if not isinstance(value, list) or name.startswith("_"):
            continue
        if name not in written:
            result[name] = [None, None]
        elif len(value) == 2 and isinstance(value[1], str):
            result[name] = [value[0], value[1].removeprefix("Flax")]
    absent = [name for name in written if name not in result]
    if absent:
        raise InputError("index", NO_VALUE, f"does not name {', '.join(absent)}", "add [library, class] for each")
    if "safety_checker" in result and "requires_safety_checker" in result:
        result["requires_safety_checker"] = False
    return result


def _without_flax(config: Mapping[str, Any]) -> dict[str, Any]:
    name = config.get("_class_name")
    return {**config, "_class_name": name.removeprefix("Flax")} if isinstance(name, str) else dict(config)


def _with_dtype(config: dict[str, Any], params: Params, dtype: DType | None) -> dict[str, Any]:
    """A transformers config names the dtype of the weights beside it, and the weights are read as that."""
    names = {np.dtype(leaf.dtype if dtype is None else dtype).name for leaf in jax.tree.leaves(params)}
    if len(names) > 1:
        return config
    return {key: next(iter(names)) if key in ("dtype", "torch_dtype") else value for key, value in config.items()}


def _move_into_place(build: Path, folder: Path) -> None:
    """Move a finished checkpoint to its name; into an existing folder file by file, the index last."""
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
            (folder / part / name).unlink(missing_ok=True)  # a tokenizer's or defaults that would be read with these


def _drop_other_forms(folder: Path, written: Collection[str]) -> None:
    """Remove weights of an older save, one file or shards, that would be read in place of those just written."""
    for stem in STEMS.values():
        form = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        if any(map(form.fullmatch, written)):
            for old in list(folder.iterdir()):
                if old.name not in written and form.fullmatch(old.name):
                    old.unlink()
