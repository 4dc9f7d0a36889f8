"""Notices that a name of the code that programs are traced from was replaced, as researchers do with attention.

What a module holds is remembered when its import ends, so that a replacement before the first call is noticed too. A
program of replaced code is neither stored nor loaded, and a trace of other code is not used for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

TRACED = (
    *("canvax.adapters", "canvax.compile.programs", "canvax.denoise", "canvax.guidance", "canvax.kernels"),
    *("canvax.models", "canvax.nn", "canvax.params", "canvax.quantize"),
)
"""Modules, and packages with theirs, whose names decide what a trace is."""


class _Originals(NamedTuple):
    """The names of a module or a class, and what they stood for when its import ended."""

    names: Mapping[str, Any]
    values: tuple[Any, ...]


_originals: dict[tuple[str, str], _Originals] = {}
_kept: dict[int, Any] = {}
"""Replacements by their id, kept alive so that no other object takes it."""


def replaced() -> tuple[tuple[str, str, str, int], ...]:
    """Names that no longer stand for what they did, and the id of what each stands for: (module, class, name, id).

    Functions, methods, classes and constants, but not what was changed inside of a value. Names that came later, of
    modules imported since for one, are not looked at. Every call of a pipeline asks: it takes some 50 microseconds.
    """
    changed = []
    for (module, owner), (names, values) in tuple(_originals.items()):
        now = tuple(names.values())[: len(values)]
        if not _equal(now, values):
            for name, value, original in zip(tuple(names), now, values, strict=False):
                if value is not original:
                    _kept[id(value)] = value
                    changed.append((module, owner, name, id(value)))
    return tuple(changed)


def _equal(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether the values are the same; Python compares those that are no other objects in no time."""
    try:
        return now == before
    except Exception:  # of an array, which is neither equal nor not
        return False


def _remember(module: ModuleType) -> None:
    """Take down what a module and its classes hold."""
    name, names = module.__name__, vars(module)
    _originals[name, ""] = _Originals(names, tuple(names.values()))
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == name:
            _originals[name, value.__qualname__] = _Originals(vars(value), tuple(vars(value).values()))


class _Finder:
    """Finds the modules of ``TRACED`` as all other finders do, and has them remembered."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(name == traced or name.startswith(f"{traced}.") for traced in TRACED):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _remembering(spec.loader.exec_module)  # pyright: ignore[reportAttributeAccessIssue]
        return spec


def _remembering(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _remember(module)

    return exec_module


def watch() -> None:
    """Remember the modules that are imported from now on; called before any of them is."""
    sys.meta_path.insert(0, _Finder())
