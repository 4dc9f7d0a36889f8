"""Notice user code in a program: ``replaced`` names of canvax, and ``foreign`` networks and functions.

The next process may have other code under the same names. So programs with replaced names are neither stored nor
loaded, those with foreign code are stored by their lowered code, and a trace of other code is not used for them.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

TRACED = (
    *("canvax.adapters", "canvax.compile.programs", "canvax.denoise", "canvax.guidance", "canvax.kernels"),
    *("canvax.models", "canvax.nn", "canvax.params", "canvax.quantize"),
)
"""Modules and packages whose names decide a trace."""

_originals: dict[tuple[str, str], tuple[Mapping[str, Any], tuple[Any, ...]]] = {}
"""Namespaces of modules ("" as the second name) and of their classes, with their values after the import."""

_replacing: ContextVar[tuple[tuple[Any, ...], ...]] = ContextVar("canvax_replacing", default=())
_kept: dict[int, Any] = {}
"""Replacements by their id, kept alive so that no other object takes it."""


class _Package(ModuleType):
    """A package that records the values of its modules when Python assigns them to its names, after their import.

    So it also notices a replacement before the first call, as researchers replace attention.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}":
            if hasattr(value, "__path__"):
                value.__class__ = _Package
            if value.__name__.startswith(TRACED):
                _remember(value)


def watch(package: str) -> None:
    """Remember the modules of a package, and of those in it, that are imported from now on."""
    sys.modules[package].__class__ = _Package


def _remember(module: ModuleType) -> None:
    names = vars(module)
    _originals[module.__name__, ""] = names, tuple(names.values())
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            _originals[module.__name__, value.__qualname__] = vars(value), tuple(vars(value).values())


def replaced() -> tuple[tuple[Any, ...], ...]:
    """Return names that have another value than after the import, with the id of the new value.

    Each entry begins with (module, class, name, id). Functions, methods, classes and constants are compared, but not
    the inside of values. Names that came later, such as those of modules imported since, are ignored. Every call of a
    pipeline asks this: it takes some 50 microseconds.
    """
    changed: list[tuple[Any, ...]] = [*stand_ins()]
    for (module, owner), (names, values) in tuple(_originals.items()):
        now = tuple(names.values())[: len(values)]
        if not _equal(now, values):
            for name, value, original in zip(tuple(names), now, values, strict=False):
                if value is not original:
                    _kept[id(value)] = value
                    changed.append((module, owner, name, id(value)))
    return tuple(changed)


@contextmanager
def replacing(module: str, name: str, value: Any) -> Iterator[None]:
    """Count ``value`` as a replacement in the ``with`` block, in this context only."""
    _kept[id(value)] = value
    token = _replacing.set((*_replacing.get(), (module, "", name, id(value), *foreign(value))))
    try:
        yield
    finally:
        _replacing.reset(token)


def stand_ins() -> tuple[tuple[Any, ...], ...]:
    """Return the replacements that ``replacing`` counts in this context."""
    return _replacing.get()


def _equal(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether the values are equal; comparing identical objects takes no time."""
    try:
        return now == before
    except Exception:  # of an array, which is neither equal nor not
        return False


_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_HOLDERS = (
    *(tuple, list, set, frozenset, dict, MappingProxyType),
    *(partial, MethodType, property, classmethod, staticmethod, cached_property),
)
"""Types of the standard library that are not code themselves."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of code that does not change between two calls."""


class _Same:
    """A key of an object, which differs from the keys of all others and keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def foreign(*values: Any) -> tuple[Any, ...]:
    """Return a key of the code in ``values`` that is not canvax's; empty if there is none.

    Records, containers, partials and closures are searched; in the user's code also the members of classes and the
    globals that functions name. So classes of the same name have different keys. So has a function before and after it
    was edited in place, as by ``%autoreload`` of notebooks. Numbers in records do not count: ``==`` compares them.
    Those in objects of the user's that are equal to themselves alone do.
    """
    keys: list[Any] = []
    visited: dict[int, Any] = {}  # keeps the objects alive, so that ids stay theirs
    found, waiting = False, [*values]
    while waiting:
        value = waiting.pop()
        if type(value) not in _SCALARS and id(value) not in visited:
            visited[id(value)] = value
            code, theirs, parts = _looked_into(value)
            keys += code
            waiting += parts
            found = found or theirs
    return ("foreign", *keys) if found else ()


def _looked_into(value: Any) -> tuple[list[Any], bool, list[Any]]:
    """Return the keys of code, whether the value is foreign to canvax, and its parts."""
    keys: list[Any] = []
    if isinstance(value, FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held += gc.get_referents(*(value.__closure__ or ()))
        if _is_ours(value):
            return [], False, [*held, vars(value)]
        if not _is_library(value):
            held += _named(value)
        return [_Same(value), value.__code__, *map(_constant, held)], True, [*held, vars(value)]
    if isinstance(value, type):
        if _is_ours(value) or value in (*_SCALARS, *_HOLDERS, object):
            return [], False, []
        if _is_library(value):
            return [_Same(value)], True, []
        members = [member for name, member in vars(value).items() if not name.startswith("__") or callable(member)]
        return [_Same(value), *map(_constant, members)], True, [*value.__bases__, *members]
    if not isinstance(value, _HOLDERS):
        if _is_ours(type(value)):
            return [], False, [getattr(value, field.name) for field in _fields(value)]
        if _is_library(type(value)):  # an array, or a function that ``jax.jit`` wraps
            return [], True, [getattr(value, "__wrapped__", None)]
        if type(value).__hash__ is object.__hash__:
            keys = [_constant(attribute) for attribute in getattr(value, "__dict__", {}).values()]
    return keys, False, [type(value), *gc.get_referents(value)]


def _constant(value: Any) -> Any:
    """Return a key of a constant or global of code. Pipelines are not kept alive."""
    if type(value) in _SCALARS:
        return repr(value)
    return None if _is_ours(type(value)) else _Same(value)


def _fields(value: Any) -> list[Any]:
    """Return the fields by which a record of canvax is compared; empty for other objects, such as a pipeline."""
    record = is_dataclass(value) and type(value).__hash__ is not object.__hash__
    return [field for field in fields(value) if field.compare] if record else []


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a function names, and the names in the user's modules that it uses."""
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += (constant for constant in code.co_consts if isinstance(constant, CodeType))
    spaces = [function.__globals__]
    while spaces:
        space = spaces.pop()
        for value in (space[name] for name in sorted(names & space.keys())):
            if not isinstance(value, ModuleType):
                yield value
            elif not _is_ours(value) and not _is_library(value):
                spaces.append(vars(value))


def _module(value: Any) -> str:
    """Return the name of a module, or of the module of a class or function."""
    return value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""


def _is_ours(value: Any) -> bool:
    return _module(value).partition(".")[0] == "canvax"


def _is_library(value: Any) -> bool:
    name = _module(value)
    if name == "__main__":  # the module of a notebook's cells, whatever file started the process
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in sys.stdlib_module_names or file.startswith(_LIBRARIES)
