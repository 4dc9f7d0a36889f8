"""Tensors in the pickles of PyTorch (``.ckpt``, ``.bin``, ``.pt``, ``.pth``), read without running code from the file.

A pickle may call any function that it names. ``_Unpickler`` therefore resolves names to stand-ins of this module only:
the few functions with which PyTorch describes a tensor return descriptions, some classes that training leaves in such
files become ``_Ignored``, and any other name is an error. Nothing is imported.
(Formats: the docstrings of Python's ``pickletools``, and PyTorch's notes on serialization semantics. Before PyTorch
1.6 a file was five pickles in a row, followed by the storages; since then it is a zip file.)
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from canvax.errors import CheckpointError
from canvax.files import DAMAGED
from canvax.types import HostArray
from canvax.weights.entries import MAX_NAME, check_shape, file_size, open_weight_file
from canvax.weights.safetensors import ArrayToSave

MAX_PROGRAM = 64_000_000
"""Largest pickle that is read, in bytes, without the tensors."""

_MAX_ITEMS = 1_000_000
"""Largest number of tables, lists and tensors that are visited."""

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

_STORAGES: dict[str, Any] = {
    "torch.DoubleStorage": "<f8",
    "torch.FloatStorage": "<f4",
    "torch.HalfStorage": "<f2",
    "torch.BFloat16Storage": ml_dtypes.bfloat16,
    "torch.LongStorage": "<i8",
    "torch.IntStorage": "<i4",
    "torch.ShortStorage": "<i2",
    "torch.CharStorage": "i1",
    "torch.ByteStorage": "u1",
    "torch.BoolStorage": "bool",
}

_IGNORED = ("collections.", "lightning.", "lightning_fabric.", "numpy.", "omegaconf.", "pytorch_lightning.")
"""Prefixes of classes that training leaves in checkpoints. Their objects are not built."""

_HARMLESS = {"_codecs.encode", "argparse.Namespace", "__builtin__.set", "builtins.set", "torch.device", "torch.dtype"}


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    numbers: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageType(NamedTuple):
    """The class of a storage, such as ``torch.FloatStorage``."""

    dtype: np.dtype


class _Ignored:
    """An object that is not read. It accepts all operations of a pickle."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __new__(cls, *_: Any, **__: Any) -> _Ignored:
        return object.__new__(cls)

    def ignore(self, *_: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = ignore


class _Table(dict[Any, Any]):
    """An ``OrderedDict``. Its attributes, such as the versions of a state_dict, are ignored."""

    def __setstate__(self, state: Any) -> None: ...


class _Parameters(_Table):
    """A ``ParameterDict``, which keeps its tensors among its attributes. Embeddings of A1111 have one."""

    def __setstate__(self, state: Any) -> None:
        held = state.get("_parameters") if isinstance(state, dict) else None
        self.update(held if isinstance(held, dict) else {})


class _Function:
    """A function that a pickle may call. Unlike a Python function, it has no attributes that a pickle could set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it sets attributes of a function")


@dataclass(frozen=True)
class Pickled:
    """Contents of a file.

    Attributes:
        arrays: the tensors, under their dotted names; each is read on access.
        left_out: names of the other objects.
        texts: top-level strings, such as the name of an embedding.
    """

    arrays: tuple[ArrayToSave, ...]
    left_out: tuple[str, ...]
    texts: Mapping[str, str]


def read_pickled(path: Path) -> Pickled:
    """Read the tensors of a file that ``torch.save`` wrote.

    If the file has a ``state_dict``, only that is read.

    Raises:
        CheckpointError: the file is damaged, has no tensors, or names a function that no checkpoint needs.
    """
    try:
        with open_weight_file(path) as file:
            root, storages = _zipped(path, file) if file.read(2) == b"PK" else _legacy(path, file)
        return _gathered(path, root, storages)
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: is no whole zip file ({error}). {DAMAGED}") from None
    except (
        *(ArithmeticError, AttributeError, EOFError, LookupError),
        *(MemoryError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError),
    ) as error:  # raised by pickle and zipfile for a damaged file
        raise CheckpointError(f"{path}: its pickle cannot be followed ({str(error)[:80]}). {DAMAGED}") from None


Place = tuple[int, int]
"""Offset of a storage's bytes, and their number."""


def _zipped(path: Path, file: BinaryIO) -> tuple[Any, Callable[[_Storage], Place]]:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        program = next((name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), None)
        if program is None:
            raise CheckpointError(f"{path}: is a zip file without data.pkl: not what torch.save writes")
        start = program.removesuffix("data.pkl")
        if (order := members.get(f"{start}byteorder")) and _member(path, archive, order)[:3] == b"big":
            raise CheckpointError(f"{path}: was written on a big-endian machine, which canvax does not read")
        root = _run(path, io.BytesIO(_member(path, archive, members[program])))
        places = {name.removeprefix(f"{start}data/"): _place(path, file, info) for name, info in members.items()
                  if name.startswith(f"{start}data/")}  # fmt: skip
    return root, lambda storage: places[storage.key]


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > MAX_PROGRAM:
        raise CheckpointError(f"{path}: {info.filename} claims {info.file_size} bytes. {DAMAGED}")
    with archive.open(info) as member:
        return member.read(MAX_PROGRAM)


def _place(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> Place:
    """Return the position of a stored member's data, after its local header, whose two names have any length."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: {info.filename} is compressed, which torch.save never does. {DAMAGED}")
    file.seek(info.header_offset)
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path}: {info.filename} is not where the file says. {DAMAGED}")
    begin = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return begin, info.file_size


def _legacy(path: Path, file: BinaryIO) -> tuple[Any, Callable[[_Storage], Place]]:
    file.seek(0)
    programs = io.BytesIO(file.read(MAX_PROGRAM))
    if _run(path, programs) != _LEGACY_MAGIC:
        raise CheckpointError(f"{path}: is a pickle, but not one that torch.save writes. {DAMAGED}")
    _protocol, system = _run(path, programs), _run(path, programs)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise CheckpointError(f"{path}: was written on a big-endian machine, which canvax does not read")
    used: dict[str, _Storage] = {}
    root, keys = _run(path, programs, used), _run(path, programs)
    position, places = programs.tell(), {}
    for key in keys:
        file.seek(position)
        count = int.from_bytes(file.read(8), "little")
        if key not in used or count != used[key].numbers:
            raise CheckpointError(f"{path}: its storages are not those that it lists. {DAMAGED}")
        places[key] = position + 8, count * used[key].dtype.itemsize
        position += 8 + places[key][1]
    return root, lambda storage: places[storage.key]


def _run(path: Path, program: io.BytesIO, used: dict[str, _Storage] | None = None) -> Any:
    """Return the object that a pickle describes; ``used`` collects the storages that it names."""
    begin = program.tell()
    for opcode, argument, _ in pickletools.genops(program):
        # A large index makes Python allocate a memo of that size; extension codes can bypass find_class.
        if opcode.name.startswith("EXT") or ("PUT" in opcode.name and (argument or 0) > MAX_PROGRAM):
            raise CheckpointError(
                f"{path}: its pickle uses {opcode.name} {argument}, which no checkpoint needs. The file is refused"
            )
    program.seek(begin)
    return _Unpickler(path, program, {} if used is None else used).load()


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves every name to a stand-in of this module, or raises CheckpointError."""

    def __init__(self, path: Path, program: io.BytesIO, used: dict[str, _Storage]) -> None:
        super().__init__(program)
        self._path, self._used = path, used

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _STORAGES:
            return _StorageType(np.dtype(_STORAGES[full]))
        if full in _KNOWN:
            return _KNOWN[full]
        if full in _HARMLESS or full.startswith(_IGNORED):
            return _Ignored
        raise CheckpointError(
            f"{self._path}: its pickle asks for {full[:120]}, which no checkpoint needs and an attack might. The "
            "file is refused; nothing of it was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage, described as ("storage", class, key, device, count).

        Before PyTorch 1.6 it can also be a module with its source.
        """
        if len(pid) > 1 and pid[0] == "module":
            return pid[1]
        kind, of, key, _place, count = pid[:5]
        if kind != "storage" or not isinstance(of, _StorageType) or not isinstance(key, str) or not _is_size(count):
            raise ValueError("a storage is described in an unknown way")
        if len(pid) > 5 and pid[5] is not None:
            raise ValueError("a view of a storage")  # before PyTorch 0.4
        return self._used.setdefault(key, _Storage(key, of.dtype, count))


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor is described in an unknown way")
    if not all(map(_is_size, (offset, *shape, *strides))) or len(shape) != len(strides):
        raise ValueError("a tensor with impossible sizes")
    return _Tensor(storage, offset, shape, strides)


_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": _Table,
    "torch.nn.modules.container.ParameterDict": _Parameters,
    "torch._utils._rebuild_tensor": _Function(_tensor),
    "torch._utils._rebuild_tensor_v2": _Function(_tensor),
    "torch._utils._rebuild_parameter": _Function(lambda tensor, *_: tensor),
    "torch._utils._rebuild_parameter_with_state": _Function(lambda tensor, *_: tensor),
    "torch.nn.parameter.Parameter": _Function(lambda tensor, *_: tensor),
    "torch.Size": _Function(tuple),
}
"""Names that PyTorch uses for tensors and the tables that hold them."""


def _gathered(path: Path, root: Any, place: Callable[[_Storage], Place]) -> Pickled:
    top = root
    if isinstance(root, dict) and isinstance(root.get("state_dict"), dict):
        root = root["state_dict"]
    tensors: dict[str, _Tensor] = {}
    left_out = [str(key) for key in top if type(key) in (str, int) and key != "state_dict"] if root is not top else []
    waiting, looked = [("", root)], 0
    while waiting:
        prefix, value = waiting.pop()
        looked += 1
        if looked > _MAX_ITEMS or len(prefix) > MAX_NAME:
            raise CheckpointError(f"{path}: its tables lie in each other too deep, or are too many. {DAMAGED}")
        if isinstance(value, _Tensor):
            tensors[prefix or "tensor"] = value
        elif isinstance(value, dict):
            pairs = [(key, item) for key, item in value.items() if type(key) in (str, int)]
            waiting += [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in pairs]
        elif prefix:
            left_out.append(prefix)
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    size = _size_of(path)
    arrays = [
        _array_to_save(path, name, tensor, place(tensor.storage), size) for name, tensor in sorted(tensors.items())
    ]
    texts = (
        {key: value for key, value in top.items() if type(key) is str and isinstance(value, str)}
        if isinstance(top, dict)
        else {}
    )
    return Pickled(tuple(arrays), tuple(sorted(left_out)), texts)


def _size_of(path: Path) -> int:
    with open_weight_file(path) as file:
        return file_size(file)


def _array_to_save(path: Path, name: str, tensor: _Tensor, place: Place, size: int) -> ArrayToSave:
    """Return a tensor to write, after checking that its numbers are inside its storage, and that inside the file."""
    (begin, length), dtype = place, tensor.storage.dtype
    shape = check_shape(path, name, tensor.shape)
    last = sum((n - 1) * stride for n, stride in zip(shape, tensor.strides, strict=True)) if 0 not in shape else -1
    if (
        begin + length > size
        or (tensor.offset + last + 1) * dtype.itemsize > length
        or math.prod(shape) > max(1, tensor.storage.numbers)
    ):
        raise CheckpointError(f"{path}: {name[:80]!r} of {shape} does not fit into what the file holds. {DAMAGED}")

    def read() -> HostArray:
        with open_weight_file(path) as file:
            file.seek(begin + tensor.offset * dtype.itemsize)
            data = file.read((last + 1) * dtype.itemsize)
        if len(data) < (last + 1) * dtype.itemsize:
            raise CheckpointError(f"{path}: ended while {name!r} was being read. {DAMAGED}")
        flat = np.frombuffer(data, dtype)
        steps = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False).copy(order="C")

    return ArrayToSave(name, shape, dtype, read)
