"""Arguments held against their annotations: whatever is given that a function does not take gets a sentence.

    @checked
    def run(table: SamplerTable, steps: int) -> ...

refuses ``run(5, "x")``, ``run(table)`` and ``run(table, stepz=4)`` with an ``InputError`` before anything is done.
Ranges and what several arguments say together remain with the function. A call costs some microseconds.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np

from canvax.errors import InputError, did_you_mean, refuse_tracers, shown

T = TypeVar("T", bound=Callable[..., Any])

Test = Callable[[Any], bool]

LOOKED_AT = 1000
"""Entries of a list whose kind is looked at."""


class Kind(NamedTuple):
    """What an annotation takes: how to tell, and what to call it in an error."""

    takes: Test
    words: str


def checked(function: T) -> T:
    """A decorator of functions, methods and dataclasses: see the module.

    Annotations that say nothing (``Any``, type variables) take everything but arrays that were deleted. A ``float`` is
    finite unless the default is not; NumPy's numbers and arrays of no dimension count as Python's.

    Raises:
        InputError: an argument is of another kind than its annotation, is missing, unknown or given twice.
    """
    return _decorated(function, held=True)


def placed(function: T) -> T:
    """As ``checked`` for what looks at kinds itself: arguments have a place, and none was deleted."""
    return _decorated(function, held=False)


def _decorated(function: Any, *, held: bool) -> Any:
    if isinstance(function, type):
        own: Any = function
        own.__init__ = _checked(own.__init__, own.__name__, own.__module__, held=held)
        return own
    name = "a call" if function.__name__ == "__call__" else function.__name__
    return _checked(function, name, function.__module__, held=held)


def _checked(function: Any, name: str, module: str, *, held: bool) -> Any:
    signature = inspect.signature(function)
    several = [one.name for one in signature.parameters.values() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]

    @cache
    def kinds() -> dict[str, Kind]:  # when first called: annotations may name what is defined later
        names = vars(sys.modules[module]) if held else {}
        found = {one.name: _kind(_hint(one.annotation, names), one.default) for one in signature.parameters.values()}
        return found | {name: _each(found[name]) for name in several}

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            given = signature.bind(*arguments, **keywords).arguments
        except TypeError as error:
            raise InputError(_misfit(name, signature, arguments, keywords, error)) from None
        known = kinds()
        for key, value in given.items():
            refuse_deleted(key, value)
            if not _takes(known[key], value):
                refuse_tracers(key, value)
                what = f" is a {type(value).__name__}," if "token" in key else f"={shown(value)} is"  # secrets stay out
                raise InputError(f"{key}{what} not {known[key].words}{_usual(signature.parameters[key])}")
        return function(*arguments, **keywords)

    return call


def _hint(annotation: Any, names: Mapping[str, Any]) -> Any:
    """An annotation as an object; where it names what is there for type checkers alone, one that says nothing."""
    try:
        return eval(annotation, dict(names)) if isinstance(annotation, str) and names else Any
    except NameError:
        return Any


def _misfit(
    name: str, signature: inspect.Signature, arguments: Sequence[Any], keywords: Mapping[str, Any], error: TypeError
) -> str:
    """What to say of arguments that a function has no place for, or of those that it misses."""
    names = [one for one in signature.parameters if one not in ("self", "cls")]
    for keyword in keywords:
        if keyword not in names:
            listed = f"it takes {', '.join(names) or 'none'}"  # what is spelt alike need not be meant
            near = " ".join(filter(None, (did_you_mean(keyword, names), listed)))
            return f"{name} has no argument {keyword!r:.80}; {near}"
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [one for one in names if signature.parameters[one].kind in by_place]
    if "too many positional" in str(error) and places and len(places) < len(names):
        such = "" if "keywords" in names else f", such as {names[len(places)]}=..."
        return f"{name}: what follows {places[-1]} is given by name{such}; it takes {', '.join(names)}"
    return f"{name}: {error}; it takes {', '.join(names) or 'no arguments'}"


def _usual(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is None:
        return "; leave it out for the default"
    plain = isinstance(default, bool | int | float | str)
    return f"; the default is {default!r}" if plain and default != "" else ""


def check_function(name: str, function: Any, count: int, told: str) -> None:
    """Refuse what cannot be called with ``count`` arguments, which are ``told``, before anything runs.

    Raises:
        InputError: it cannot.
    """
    if not callable(function):
        raise InputError(f"{name}={shown(function)} is not a function; it is called with {told}")
    if inspect.iscoroutinefunction(function):
        raise InputError(f"{name}={shown(function)} is an async function, which nobody awaits; give one without async")
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # a function of C, which does not tell
        return
    except TypeError:
        raise InputError(f"{name}={shown(function)} cannot be called with {told}") from None


def refuse_deleted(name: str, value: Any) -> None:
    """Refuse an array of JAX of which nothing is left.

    Raises:
        InputError: it was deleted, or donated to a call.
    """
    if is_deleted(value):
        raise InputError(f"{name} is an array of JAX that was deleted or donated; give one that is there")


def is_deleted(value: Any) -> bool:
    """Whether it is an array of JAX whose buffer was deleted or donated."""
    # Not by getattr: a pipeline, and its class too, would look for a name like it, which takes a millisecond.
    asked = next((vars(kind)["is_deleted"] for kind in type(value).__mro__ if "is_deleted" in vars(kind)), None)
    if not callable(asked) or _traced(value):  # a tracer takes long to say that it cannot
        return False
    try:
        return asked(value) is True
    except Exception:
        return False


def _takes(kind: Kind, value: Any) -> bool:
    try:
        return not is_deleted(value) and kind.takes(value)
    except Exception:  # what fails when it is looked at
        return False


def _traced(value: Any) -> bool:
    import jax.core  # here: the catalogue of samplers is read without JAX

    return isinstance(value, jax.core.Tracer)


def _number(value: Any) -> Any:
    """A scalar of any library as a Python number; anything else as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return None if _traced(value) or np.dtype(value.dtype).kind in "mM" else value.item()
    return value


def _is_whole(value: Any) -> bool:
    value = _number(value)
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**64


def _is_real(value: Any) -> bool:
    value = _number(value)
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_finite(value: Any) -> bool:
    return _is_real(value) and math.isfinite(_number(value))


def _is_flag(value: Any) -> bool:
    return isinstance(_number(value), bool)


def _is_array(value: Any) -> bool:
    """Whether an array of numbers, on the host or a device; bfloat16 is of NumPy's kind V."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape") or isinstance(value, type):
        return False
    if not isinstance(dtype, np.dtype | str | type):
        return True  # keys of JAX, whose dtype NumPy does not know
    kind = np.dtype(dtype).kind
    return kind in "biuf" or (kind == "V" and np.dtype(dtype).fields is None)


def _is_host_array(value: Any) -> bool:
    return _is_array(value) and (isinstance(value, np.ndarray | np.generic) or not _traced(value))


def _is_list(value: Any) -> bool:
    if isinstance(value, str | bytes | bytearray):
        return False
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim == 1)


_SIMPLE: dict[Any, Kind] = {
    bool: Kind(_is_flag, "True or False"),
    int: Kind(_is_whole, "a whole number"),
    float: Kind(_is_finite, "a finite number"),
    str: Kind(lambda value: isinstance(value, str), "text"),
    bytes: Kind(lambda value: isinstance(value, bytes), "bytes"),
    os.PathLike: Kind(lambda value: isinstance(value, os.PathLike), "a pathlib.Path"),
    type(None): Kind(lambda value: value is None, "None"),
    np.ndarray: Kind(_is_host_array, "an array of numbers"),
    inspect.Parameter.empty: Kind(lambda _: True, ""),
}


def _each(kind: Kind) -> Kind:
    """Of arguments behind a star, or two."""
    return Kind(
        lambda given: all(_takes(kind, one) for one in (given.values() if isinstance(given, dict) else given)),
        f"{kind.words} each",
    )


def _kind(hint: Any, default: Any = inspect.Parameter.empty) -> Kind:
    """What an annotation takes."""
    if hint is float and isinstance(default, float) and not math.isfinite(default):
        return Kind(_is_real, "a number")
    if hint in _SIMPLE if isinstance(hint, type) else False:
        return _SIMPLE[hint]
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_kind(one) for one in inside]
        told = list(dict.fromkeys(one.words for one in kinds if one.words and one.words != "None"))
        return Kind(lambda value: any(one.takes(value) for one in kinds), " or ".join(told))
    if origin is Literal:
        return Kind(lambda value: isinstance(value, str | int) and value in inside, " or ".join(map(repr, inside)))
    if origin is Callable or hint is Callable:
        return Kind(callable, "a function")
    return _of_class(origin or hint, inside)


def _of_class(wanted: Any, inside: tuple[Any, ...]) -> Kind:
    if not isinstance(wanted, type) or issubclass(wanted, np.dtype) or wanted in (object, Any):
        return Kind(lambda _: True, "")
    if getattr(wanted, "_is_protocol", False):
        members = [name for name in dir(wanted) if not name.startswith("_")]
        return Kind(
            lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in members),
            f"one of canvax's kinds of {wanted.__name__} ({', '.join(members)})",
        )
    if issubclass(wanted, Mapping):
        held = _SIMPLE.get(inside[1], _kind(Any)) if inside else _kind(Any)  # of others the function knows more
        return Kind(
            lambda value: isinstance(value, Mapping) and all(map(held.takes, islice(value.values(), LOOKED_AT))),
            "a table of names and values",
        )
    if wanted in (list, tuple, Sequence):
        entry = _kind(inside[0]) if inside else _kind(Any)
        return Kind(
            lambda value: _is_list(value) and all(map(entry.takes, islice(value, LOOKED_AT))),
            f"a list (each {entry.words})" if entry.words else "a list",
        )
    if wanted in (Path, os.PathLike):
        return _SIMPLE[os.PathLike]
    if wanted.__module__.startswith("jax") and wanted.__name__.endswith("Array"):
        return Kind(_is_array, "an array of numbers")
    return Kind(lambda value: isinstance(value, wanted), f"of the class {wanted.__module__}.{wanted.__name__}")
