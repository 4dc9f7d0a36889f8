"""Loads weight files to a nested dict of device arrays, strictly and one array at a time.

First all components are compared with their specs, by names, shapes and dtypes; all faults are reported together. Only
then are arrays read, by a few threads, in blocks that are cast on the way. Arrays that must be transposed for the
device are cast into memory that each thread reuses, and transposed by JAX during the transfer: touching new memory
costs more than reading.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from canvax.errors import CheckpointError
from canvax.params import Param, Spec, flatten, unflatten
from canvax.quantize import quantize, scale_of
from canvax.types import Array, DType, HostArray, Params
from canvax.weights.cast import cast_into
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles, open_weights
from canvax.weights.folder import Library, find_weights, library_of
from canvax.weights.formats import LEFTOVER, accepted_shapes, flax_name, spellings
from canvax.weights.safetensors import ArrayToSave

Place = Callable[[Param, HostArray], Array]
"""Puts a host array in memory layout on its device or devices."""

LISTED = 8
"""Faults of one kind that are listed; the others are counted."""

_ALIGNMENT = 64
"""Alignment in bytes with which XLA's CPU client uses a host buffer without copying it."""

_ELEMENTS = 1 << 17
"""Numbers that are read and cast at once; they stay in the CPU's caches."""

THREADS = min(8, 2 * (os.cpu_count() or 2))
"""Each thread holds one array. Two per processor, since some wait for new memory."""


@dataclass(frozen=True)
class Component:
    """A part of a checkpoint with weights.

    Attributes:
        name: its folder, and its key in the loaded params.
        spec: its declared parameters.
        kind: library whose file names it uses, ``diffusers`` or ``transformers``.
        entries: the arrays of its files under the names of the spec, without unused ones.
        to_save: arrays under the names of the spec as its files have them.
        other_names: other names of an array in files, for errors.
    """

    name: str
    spec: Spec
    kind: Library
    entries: Callable[[Sequence[Entry]], Sequence[Entry]] = list
    to_save: Callable[[Sequence[ArrayToSave]], Sequence[ArrayToSave]] = list
    other_names: Callable[[str], Sequence[str]] = lambda name: ()


class Files(Protocol):
    """Interface of a model's files for loading; ``str()`` of it names the model in errors."""

    def entries(self, component: str) -> Sequence[Entry]:
        """Return the arrays in a component's weight files."""
        ...


@dataclass
class Faults:
    """Faults of a checkpoint, collected over all components."""

    unreadable: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)

    _TITLES = (
        ("unreadable", "cannot be read"),
        ("missing", "missing: the config asks for them, no file has them"),
        ("unused", "unused: a file has them, the config does not ask for them"),
        ("misshapen", "misshapen"),
        ("mistyped", "mistyped: not floating point numbers"),
        ("ambiguous", "given more than once"),
    )

    def report(self, source: str) -> str | None:
        """Return one message for all faults, or None if there are none."""
        lines: list[str] = []
        for name, title in self._TITLES:
            faults: list[str] = getattr(self, name)
            if faults:
                lines.append(f"  {len(faults)} {title}")
                lines += [f"    {line}" for line in faults[:LISTED]]
                if len(faults) > LISTED:
                    lines.append(f"    ... and {len(faults) - LISTED} more")
        if not lines:
            return None
        cure = "Check that weights and config.json belong together, or download the checkpoint again."
        return "\n".join([f"{source}: the weights cannot be used:", *lines, cure])


def load_components(
    files: Files, components: Sequence[Component], *, dtype: DType, place: Place, finite: Collection[str] = ()
) -> Params:
    """Load ``components`` as ``{component name: nested dict of arrays}`` in ``dtype``.

    Args:
        files: those of the model, weights included.
        components: the parts to load, with their specs.
        dtype: floating point dtype of the loaded arrays.
        place: called with each parameter and its finished host array, which is not touched again.
        finite: names of the components whose numbers must be finite, such as those from another source than the model.

    Raises:
        CheckpointError: listing all missing, unused, misshapen and mistyped arrays of all components; or numbers are
            not finite.
    """
    declared: dict[str, dict[str, Param]] = {part.name: dict(flatten(part.spec)) for part in components}
    matches = _matched(files, components)
    wanted = [(name, dotted, *pair) for name, match in matches.items() for dotted, pair in match.items()]
    wanted.sort(key=lambda match: (match[3].path, match[3].segments))  # a disk is read from front to back
    scratch = Scratch()

    def load(name: str, dotted: str, param: Param, entry: Entry) -> dict[tuple[str, str], Array]:
        if scale := scale_of(dotted, declared[name]):
            array = materialise(param, entry, np.float32, scratch)
            if name in finite:
                check_finite(files, array)
            weight, scales = quantize(array, param.dtype_in(dtype))
            arrays = {(name, dotted): place(param, weight), (name, scale): place(declared[name][scale], scales)}
        else:
            array = materialise(param, entry, param.dtype_in(dtype), scratch)
            if name in finite:
                check_finite(files, array)
            arrays = {(name, dotted): place(param, array)}
        for array in arrays.values():
            array.block_until_ready()  # from here on the scratch memory may hold another array
        return arrays

    placed: dict[tuple[str, str], Array] = {}
    with ThreadPoolExecutor(THREADS, "canvax-load") as pool:
        loading = [pool.submit(load, *match) for match in wanted]
        try:
            for future in loading:
                placed |= future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {name: unflatten({dotted: placed[name, dotted] for dotted in names}) for name, names in declared.items()}


@dataclass(frozen=True)
class Stored:
    """A parameter that stays in its file, in its stored dtype, until numpy reads it.

    Attributes:
        param: its declaration.
        entry: its array in the file.
    """

    param: Param
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in memory."""
        return self.param.shape

    @property
    def dtype(self) -> np.dtype:
        """Stored dtype."""
        return self.entry.number_dtype

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> HostArray:
        """Read the parameter."""
        del copy
        return materialise(self.param, self.entry, self.dtype if dtype is None else dtype, Scratch())


def stored_components(files: Files, components: Sequence[Component]) -> Params:
    """Check as ``load_components``, but read nothing: each parameter is a ``Stored``.

    Raises:
        CheckpointError: as ``load_components``.
    """
    matches = _matched(files, components)
    return {name: unflatten({key: Stored(*pair) for key, pair in match.items()}) for name, match in matches.items()}


def load_params(folder: str | Path, specs: Mapping[str, Spec]) -> Params:
    """Load parameters that ``pipe.save`` wrote, as arrays of numpy in their stored dtypes.

    Args:
        folder: the folder, with a folder for each component.
        specs: the declared parameters by component, as ``networks.specs()`` returns them.

    Raises:
        CheckpointError: files are missing or damaged, or their arrays do not fit the specs; the error lists all.
    """

    def arrays(component: str) -> list[Entry]:
        files = find_weights(Path(folder) / component, library_of(component), None)
        return [entry for file in files for entry in open_weights(file)]

    files = replace(ModelFiles.none(str(folder)), arrays=arrays)
    parts = [Component(name, spec, library_of(name)) for name, spec in specs.items()]
    return jax.tree.map(np.asarray, stored_components(files, parts))


class Scratch(threading.local):
    """Memory of a thread for temporary arrays; only the latest array is valid."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> HostArray:
        """Return an uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._memory.nbytes:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype).reshape(shape)


def materialise(param: Param, entry: Entry, dtype: DType, scratch: Scratch) -> HostArray:
    """Read a parameter: [param.shape] in ``dtype``.

    It is in fresh, aligned memory, or, if its axes have another order in the file, a view of ``scratch`` with strides.

    Raises:
        CheckpointError: the file has been cut short, or a number is too large for ``dtype``.
    """
    dtype = np.dtype(dtype)
    turned = entry.order == "torch" and (param.layout != "plain" or param.pairs > 0)
    out = scratch.empty(entry.shape, dtype) if turned else aligned(np.empty, param.shape, dtype)
    try:
        if entry.number_dtype == dtype:
            entry.read_into(out)
        else:
            flat = out.reshape(-1)
            with np.errstate(over="raise"):  # of this thread
                for start, block in entry.blocks(_ELEMENTS):
                    cast_into(flat[start : start + len(block)], block)
    except FloatingPointError:
        raise CheckpointError(
            f"{entry.path}: array {entry.name!r} holds numbers too large for {dtype.name}; load with dtype=bfloat16 or "
            "float32."
        ) from None
    if not turned:
        return out
    view = param.from_checkpoint(out)
    # JAX would use an array without copying if its transposition does not move data, such as a single row.
    return view.copy() if view.flags.c_contiguous else view


def check_finite(files: Files, array: HostArray) -> None:
    """Refuse an array with NaN or infinity.

    Raises:
        CheckpointError: names the files.
    """
    if not np.isfinite(array).all():
        raise CheckpointError(f"{files}: holds numbers that are not finite (NaN or infinity); download it again")


def _matched(files: Files, components: Sequence[Component]) -> dict[str, dict[str, tuple[Param, Entry]]]:
    """Return the parameters of each component with their arrays, after checking all components for faults."""
    faults = Faults()
    matches = {part.name: _match(files, part, faults) for part in components}
    if report := faults.report(str(files)):
        raise CheckpointError(report)
    return matches


def _match(files: Files, part: Component, faults: Faults) -> dict[str, tuple[Param, Entry]]:
    """Pair each parameter of a component with its array in a file, in the spec's order."""
    declared: dict[str, Param] = dict(flatten(part.spec))
    scales = {scale_of(name, declared) for name in declared}  # made while loading, not stored in files
    wanted = {name: param for name, param in declared.items() if name not in scales}
    try:
        entries = part.entries([replace(entry, stored_as=entry.name) for entry in files.entries(part.name)])
    except CheckpointError as error:
        faults.unreadable.append(str(error))
        return {}
    known = {spelled: name for name, param in wanted.items() for spelled in spellings(name, param)}
    known |= {name: name for name in wanted}
    matched: dict[str, Entry] = {}
    inside, folder = (f"{part.name}.", f"{part.name}/") if part.name else ("", "")
    for entry in entries:
        name = known.get(entry.name)
        where = f"{entry.stored_as} in {folder}{entry.path.name}"
        if name is None:
            if not LEFTOVER.fullmatch(entry.name.replace("/", ".")):
                faults.unused.append(f"{where} {entry.shape}")
        elif name in matched:
            faults.ambiguous.append(f"{inside}{name}: as {matched[name].name} and as {where}")
        else:
            matched[name] = entry = _with_axes_of_one(wanted[name], entry)
            _check(f"{inside}{name}", where, wanted[name], entry, faults)
    is_flax = bool(entries) and all(entry.order == "flax" for entry in entries)
    for name, param in wanted.items():
        if name not in matched:
            alias = f" ({flax_name(name, param)} in a Flax file)" if is_flax else ""
            others = "".join(f" or {other}" for other in part.other_names(name))
            faults.missing.append(f"{inside}{name}{others}{alias} {param.checkpoint_shapes[0]}")
    return {name: (param, matched[name]) for name, param in wanted.items() if name in matched}


def _with_axes_of_one(param: Param, entry: Entry) -> Entry:
    """Return the entry in the shape of ``param`` if it only lacks leading axes of size 1, which GGUF drops."""
    for shape in accepted_shapes(param, entry):
        if shape == (1,) * (len(shape) - len(entry.shape)) + entry.shape:
            return replace(entry, shape=shape)
    return entry


def _check(name: str, where: str, param: Param, entry: Entry, faults: Faults) -> None:
    shapes = accepted_shapes(param, entry)
    if entry.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        faults.misshapen.append(f"{name}: {where} is {entry.shape}, the config asks for {wanted}")
    if not entry.is_float:
        faults.mistyped.append(f"{name}: {where} is {entry.dtype.name}")


def aligned(make: Callable[..., HostArray], shape: tuple[int, ...], dtype: np.dtype) -> HostArray:
    """Make an array that JAX uses without copying on a CPU; it must not be modified afterwards."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = make(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
