"""Notices that code of a program is the user's: ``replaced`` names of canvax, and ``foreign`` networks and functions.

Programs are traced from that code as it is in this process, under names that mean something else in the next one. So
they are neither stored nor loaded, and a trace of other code is not used for them.
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
"""Modules, and packages with theirs, whose names decide what a trace is."""

_originals: dict[tuple[str, str], tuple[Mapping[str, Any], tuple[Any, ...]]] = {}
"""Of modules ("" as the second name) and of their classes: the names, and what they stood for after the import."""

_replacing: ContextVar[tuple[tuple[Any, ...], ...]] = ContextVar("canvax_replacing", default=())
_kept: dict[int, Any] = {}
"""Replacements by their id, kept alive so that no other object takes it."""


class _Package(ModuleType):
    """A package that remembers what its modules hold when their import ends: there Python assigns each to a name of
    its package. So a replacement before the first call is noticed too, as researchers replace attention."""

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
    """Return names that no longer stand for what they did, with the id of what each stands for now.

    Each begins with (module, class, name, id): functions, methods, classes and constants, but not what was changed
    inside of a value. Names that came later, of modules imported since for one, are not looked at. Every call of a
    pipeline asks: it takes some 50 microseconds.
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
    """Count ``value`` as a replacement within it, in this context alone."""
    _kept[id(value)] = value
    token = _replacing.set((*_replacing.get(), (module, "", name, id(value), *foreign(value))))
    try:
        yield
    finally:
        _replacing.reset(token)


def stand_ins() -> tuple[tuple[Any, ...], ...]:
    """Return what ``replacing`` counts in this context."""
    return _replacing.get()


def _equal(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether the values are the same; Python compares those that are no other objects in no time."""
    try:
        return now == before
    except Exception:  # of an array, which is neither equal nor not
        return False


_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_HOLDERS = (
    *(tuple, list, set, frozenset, dict, MappingProxyType),
    *(partial, MethodType, property, classmethod, staticmethod, cached_property),
)
"""Types of the standard library that are no code themselves."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of code that nobody edits between two calls."""


class _Same:
    """A key of an object that is equal to that of no other, and keeps it alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def foreign(*values: Any) -> tuple[Any, ...]:
    """Return a key of the code in ``values`` that is not canvax's; empty if there is none.

    Searched are records, containers, partials and closures; of the user's code also the members of classes and the
    globals that functions name. So classes of one name have different keys, and so has a function before and after it
    was edited in place, as ``%autoreload`` of notebooks does. Numbers in records do not count: ``==`` tells them.
    """
    keys: list[Any] = []
    visited: dict[int, Any] = {}  # which keeps them alive, so that ids stay theirs
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
    """Return the keys of code, whether the value is none of canvax's, and its parts."""
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
    return [], False, [type(value), *gc.get_referents(value)]


def _constant(value: Any) -> Any:
    """Return a key of a value that code has, or that is a global of it. Pipelines are not kept alive."""
    if type(value) in _SCALARS:
        return repr(value)
    return None if _is_ours(type(value)) else _Same(value)


def _fields(value: Any) -> list[Any]:
    """Return the fields by which a record of canvax is compared; none of what is no record, such as a pipeline."""
    record = is_dataclass(value) and type(value).__hash__ is not object.__hash__
    return [field for field in fields(value) if field.compare] if record else []


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a function names, and of the user's modules what it names in them."""
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
    """Return the name of the module that a class or function is of; of a module its name."""
    return value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""


def _is_ours(value: Any) -> bool:
    return _module(value).partition(".")[0] == "canvax"


def _is_library(value: Any) -> bool:
    name = _module(value)
    if name == "__main__":  # where a notebook's cells are, whatever file started the process
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in sys.stdlib_module_names or file.startswith(_LIBRARIES)
