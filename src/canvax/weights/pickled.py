"""Tensors in the pickles of PyTorch (``.ckpt``, ``.bin``, ``.pt``, ``.pth``), read without running them.

A pickle is a program for a stack machine that may call any function of Python. Here the machine only moves data: it
knows the few callables by which PyTorch describes a tensor and takes them as descriptions. Some classes that training
leaves in such files are passed over; any other name ends the reading. Nothing is imported, nothing is called.
(Formats: the docstrings of Python's ``pickletools``, and PyTorch's notes on serialization semantics; before PyTorch
1.6 a file was five pickles in a row with the storages behind them, since then it is a zip file.)
"""

from __future__ import annotations

import io
import math
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
from canvax.weights.safetensors import Outgoing

MAX_PROGRAM = 64_000_000
"""The longest pickle that is read, in bytes: tensors are not in it."""

_MAX_ITEMS = 1_000_000
"""Tables, lists and tensors that are looked through."""

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

_STORAGES: dict[str, Any] = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "bool",
}

_PASSED_OVER = ("collections.", "lightning.", "lightning_fabric.", "numpy.", "omegaconf.", "pytorch_lightning.")
"""Beginnings of names that training leaves in such files; what they stand for is not built."""

_HARMLESS = {"_codecs.encode", "argparse.Namespace", "__builtin__.set", "builtins.set", "torch.device", "torch.dtype"}


class _Global(NamedTuple):
    """A name of Python's, which stays a name."""

    name: str


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    numbers: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Opaque:
    """Something that is passed over."""


class _Parameters(dict[Any, Any]):
    """A ``ParameterDict`` of PyTorch: a table of tensors that lies among the attributes of an object."""


_MARK = object()


@dataclass(frozen=True)
class Pickled:
    """What a file holds.

    Attributes:
        arrays: the tensors, under their dotted names; each is read when it is asked for.
        left_out: names of what lies beside them and is no tensor.
        texts: texts at the top, such as the name of an embedding.
    """

    arrays: tuple[Outgoing, ...]
    left_out: tuple[str, ...]
    texts: Mapping[str, str]


def read_pickled(path: Path) -> Pickled:
    """The tensors of a file that ``torch.save`` wrote, without running anything in it.

    Where the top has a ``state_dict``, only that is read.

    Raises:
        CheckpointError: the file is damaged, holds no tensors, or names what no checkpoint needs.
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
        *(OSError, RuntimeError, TypeError, ValueError),
    ) as error:  # of pickletools and zipfile, and of a program that does not fit together
        raise CheckpointError(f"{path}: its pickle cannot be followed ({str(error)[:80]}). {DAMAGED}") from None


Place = tuple[int, int]
"""Where the bytes of a storage begin, and how many there are."""


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
    """Of a member that is stored as it is: behind its own header, whose two names may be of any length."""
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
    """What a pickle describes; ``used`` receives the storages that it names."""
    machine = _Machine(path, {} if used is None else used)
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.step(opcode.name, argument)
    raise EOFError("it has no end")


class _Machine:
    """Moves data as a pickle says, and calls nothing."""

    def __init__(self, path: Path, used: dict[str, _Storage]) -> None:
        self.stack: list[Any] = []
        self._path, self._used, self._memo = path, used, {}

    def step(self, name: str, argument: Any) -> None:
        """One instruction."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in ("PROTO", "FRAME"):
            pass
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self._memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self.stack.append(tuple(self._popped(int(name[-1]))))
        elif (method := getattr(self, f"_{name.lower()}", None)) is not None:
            method(argument)
        else:
            raise CheckpointError(f"{self._path}: its pickle uses {name}, which no tensor needs: it is refused")

    def _popped(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise LookupError("it takes more than there is")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def _since_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                taken = self.stack[i + 1 :]
                del self.stack[i:]
                return taken
        raise LookupError("it has no mark")

    def _mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _list(self, _: Any) -> None:
        self.stack.append(self._since_mark())

    def _dict(self, _: Any) -> None:
        items, table = self._since_mark(), {}
        _fill(table, items)
        self.stack.append(table)

    def _append(self, _: Any) -> None:
        (item,) = self._popped(1)
        if isinstance(self.stack[-1], list):
            self.stack[-1].append(item)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    _additems = _appends

    def _setitem(self, _: Any) -> None:
        _fill(self.stack[-3], self._popped(2))

    def _setitems(self, _: Any) -> None:
        items = self._since_mark()
        _fill(self.stack[-1], items)

    def _global(self, argument: str) -> None:
        self.stack.append(self._known(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        module, name = self._popped(2)
        self.stack.append(self._known(f"{module}.{name}"))

    def _known(self, name: str) -> _Global:
        known = name in (*_CALLS, *_OBJECTS, *_HARMLESS) or name.startswith(_PASSED_OVER)
        if known or _storage_dtype(name) is not None:
            return _Global(name)
        raise CheckpointError(
            f"{self._path}: its pickle asks for {name[:120]}, which no checkpoint needs and an attack might. The "
            "file is refused; nothing of it was run"
        )

    def _reduce(self, _: Any) -> None:
        called, arguments = self._popped(2)
        make = _CALLS.get(called.name) if isinstance(called, _Global) else None
        self.stack.append(_Opaque() if make is None else make(*arguments))

    def _newobj(self, _: Any) -> None:
        called, _arguments = self._popped(2)
        made = _OBJECTS.get(called.name, _Opaque) if isinstance(called, _Global) else _Opaque
        self.stack.append(made())

    def _build(self, _: Any) -> None:
        (attributes,) = self._popped(1)  # of an object, such as the versions of a state_dict
        if isinstance(self.stack[-1], _Parameters) and isinstance(attributes, dict):
            held = attributes.get("_parameters")
            self.stack[-1].update(held if isinstance(held, dict) else {})

    def _binpersid(self, _: Any) -> None:
        (found,) = self._popped(1)
        if len(found) > 1 and found[0] == "module" and isinstance(found[1], _Global):  # a class and its source
            self.stack.append(found[1])
            return
        kind, of, key, _place, count = found[:5]
        dtype = _storage_dtype(of.name) if isinstance(of, _Global) else None
        if kind != "storage" or dtype is None or not isinstance(key, str) or not _is_size(count):
            raise ValueError("a storage is described in another way")
        if len(found) > 5 and found[5] is not None:
            raise ValueError("a view of a storage")  # before PyTorch 0.4
        self.stack.append(self._used.setdefault(key, _Storage(key, dtype, count)))


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": _Opaque,
}
_LITERALS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINSTRING", "BINSTRING", "STRING"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    )
)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _fill(table: Any, items: list[Any]) -> None:
    """Entries of a table under a text or a number; a key of another kind is none that a checkpoint has."""
    if isinstance(table, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        table.update((key, value) for key, value in pairs if type(key) in (str, int))


def _storage_dtype(name: str) -> np.dtype | None:
    own = _STORAGES.get(name.removeprefix("torch.")) if name.startswith("torch.") else None
    return None if own is None else np.dtype(own)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for key, value in pairs:
        _fill(table, [key, value])
    return table


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor is described in another way")
    if not all(map(_is_size, (offset, *shape, *strides))) or len(shape) != len(strides):
        raise ValueError("a tensor with impossible sizes")
    return _Tensor(storage, offset, shape, strides)


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch.nn.parameter.Parameter": lambda tensor, *_: tensor,
    "torch.Size": lambda sizes: tuple(sizes),
}
"""What a tensor is described by; the values are functions of this file."""

_OBJECTS: dict[str, Callable[[], Any]] = {
    "collections.OrderedDict": dict,
    "torch.nn.modules.container.ParameterDict": _Parameters,
}
"""Objects that hold tensors, as tables; embeddings of A1111 have a ``ParameterDict``."""


def _gathered(path: Path, root: Any, place: Callable[[_Storage], Place]) -> Pickled:
    top = root
    if isinstance(root, dict) and isinstance(root.get("state_dict"), dict):
        root = root["state_dict"]
    tensors: dict[str, _Tensor] = {}
    left_out = [str(key) for key in top if key != "state_dict"] if root is not top else []
    waiting, looked = [("", root)], 0
    while waiting:
        prefix, value = waiting.pop()
        looked += 1
        if looked > _MAX_ITEMS or len(prefix) > MAX_NAME:
            raise CheckpointError(f"{path}: its tables lie in each other too deep, or are too many. {DAMAGED}")
        if isinstance(value, _Tensor):
            tensors[prefix or "tensor"] = value
        elif isinstance(value, dict):
            waiting += [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
        elif prefix:
            left_out.append(prefix)
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    size = _size_of(path)
    arrays = [_outgoing(path, name, tensor, place(tensor.storage), size) for name, tensor in sorted(tensors.items())]
    texts = {key: value for key, value in top.items() if isinstance(value, str)} if isinstance(top, dict) else {}
    return Pickled(tuple(arrays), tuple(sorted(left_out)), texts)


def _size_of(path: Path) -> int:
    with open_weight_file(path) as file:
        return file_size(file)


def _outgoing(path: Path, name: str, tensor: _Tensor, place: Place, size: int) -> Outgoing:
    """A tensor whose numbers all lie in its storage, which lies in the file."""
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

    return Outgoing(name, shape, dtype, read)
