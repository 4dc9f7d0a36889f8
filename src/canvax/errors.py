"""The exceptions that canvax raises on purpose.

Every message names the argument, its value and the cure, so that the command line can print it unchanged.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, overload


class CanvaxError(Exception):
    """Base class of all errors that canvax raises on purpose. Messages are one line, even with a long value."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(" ".join(str(message).split())))


class NoValue:
    """The placeholder for the value of an argument in errors that show none."""


NO_VALUE = NoValue()

Write = Callable[[str, str | None], str]
"""A function with which an entry point writes an argument, from its name and the text of its value, or None."""


_ARGUMENT = re.compile(r"\{(\w+)(?:=([^}]*))?\}")
"""An argument in a clause. Templates, since sentences of strings and objects would be hard to read."""


class _AboutArgument(Exception):
    """The record in errors and hints about an argument, which each entry point formats as a sentence.

    Args:
        argument: name of the argument in the Python call.
        problem: a clause whose subject is the argument. ``{name}`` and ``{name=value}`` in it and in the cure are
            arguments too, which each entry point writes differently: ``hires=2`` in Python, ``--hires 2`` on the
            command line, ``options.hires=2`` in requests.
        cure: advice, as an imperative.
        value: the argument's value, if the message shows it.
    """

    argument: str
    value: Any
    problem: str
    cure: str

    @overload
    def __init__(self, sentence: str, /) -> None: ...
    @overload
    def __init__(self, argument: str, problem: str, /, *, cure: str = "", value: Any = NO_VALUE) -> None: ...
    def __init__(self, *clauses: str, cure: str = "", value: Any = NO_VALUE) -> None:
        self.argument, self.problem = clauses if len(clauses) == 2 else ("", *clauses)
        self.cure, self.value = cure, value
        super().__init__(self.format(in_python))

    def format(self, write: Write) -> str:
        """Return the message as an entry point writes it."""
        if not self.argument:
            return self.problem
        subject = write(self.argument, None if self.value is NO_VALUE else shown(self.value))
        clauses = f"{self.problem}; {self.cure}" if self.cure else self.problem
        return f"{subject} {_ARGUMENT.sub(lambda match: write(match[1], match[2]), clauses)}"


class InputError(_AboutArgument, CanvaxError, ValueError):
    """An argument cannot be used; raised before anything is downloaded, traced or compiled.

        raise InputError("hires_steps", "is more than 1000", cure="leave it out", value=5000)

    An error about several arguments is one sentence: ``InputError("sentence")``. The arguments are those of
    ``_AboutArgument``.
    """

    def about(self, argument: str) -> InputError:
        """Return this error under another name of its argument."""
        return InputError(argument, self.problem, cure=self.cure, value=self.value) if self.argument else self


def conflict(
    argument: str, *others: str, why: str = "", cure: str = "leave one out", value: Any = NO_VALUE
) -> InputError:
    """Return the error about arguments that exclude each other; other ones may have a value, ``name=value``."""
    problem = f"cannot be combined with {_either(others)}"
    return InputError(argument, f"{problem}: {why}" if why else problem, cure=cure, value=value)


def needs(argument: str, *others: str, cure: str = "", value: Any = NO_VALUE) -> InputError:
    """Return the error about an argument that needs another one, or one of several."""
    return InputError(argument, f"needs {_either(others)}", cure=cure, value=value)


def miscounted(argument: str, count: int, wanted: int, noun: str = "images") -> InputError:
    """Return the error about a list that has neither one entry nor one for each of the ``wanted`` things."""
    return InputError(argument, f"has {count} entries for {wanted} {noun}", cure="give one, or one for each")


def _either(arguments: Sequence[str]) -> str:
    return " or ".join(f"{{{argument}}}" for argument in arguments)


def shown(value: Any) -> str:
    """Return a value's text for an error, at most 80 characters, even if its ``repr`` fails."""
    try:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
            with suppress(TypeError):  # of a tracer, which has no number
                value = value.item()
        arrayed = not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "ndim")
        text = f"<array {value.dtype} {list(value.shape)}>" if arrayed else re.sub(r" at 0x\w+", "", repr(value))
        text = f"the class {value.__name__}" if isinstance(value, type) else text
    except Exception:
        text = f"<{type(value).__name__} that cannot be read>"
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def in_python(argument: str, value: str | None) -> str:
    """Write an argument as a Python call does."""
    return argument if value is None else f"{argument}={value}"


class CheckpointError(CanvaxError):
    """A checkpoint is missing, damaged, refused for safety, or does not fit its config."""


class HubError(CanvaxError):
    """The model hub could not be reached or does not have the file."""


class OutOfMemoryError(CanvaxError, MemoryError):
    """A device has too little memory; the message says what would fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error of JAX or Python means that there was too little memory.

    XLA's CPU backend does not say so if one of YNNPACK's operations gets no memory.
    """
    text = str(error)
    words = ("RESOURCE_EXHAUSTED" in text, "out of memory" in text.lower(), "YNNPACK operation failed" in text)
    return isinstance(error, MemoryError) or any(words)


class Cancelled(CanvaxError):
    """A callback asked to stop between two steps."""


class HintWarning(_AboutArgument, UserWarning):
    """The call works, but probably does not do what was meant. Its arguments are those of ``InputError``."""


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the calling line outside of canvax, which users can change."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "canvax":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def to_stderr(text: str) -> None:
    """Write to stderr; ignore a closed (2>&-) or full one."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


LONGEST_WORD, LONGEST_MESSAGE = 200, 4000
"""Characters of a word and of a message beyond which the middle is left out."""


def shortened(message: str, most: int = LONGEST_MESSAGE) -> str:
    """Cut the middle out of words that are too long, then out of a message that still is."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _cut(word[0], LONGEST_WORD), message)
    return _cut(words, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn another library's error in converting an array or tensor into an error about an argument.

    A JAX array whose buffer was donated and a tensor without data raise errors that name no argument.

    Raises:
        InputError: the conversion failed.
        OutOfMemoryError: it needs too much memory.
    """
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(f"{name} is too large ({error}); give less at a time") from error
    except Exception as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise InputError(name, problem, cure="give plain values") from error


def refuse_tracers(name: str, value: Any) -> None:
    """Refuse tracers, which calls inside ``jax.jit``, ``jax.grad`` or ``jax.vmap`` get: host code cannot read them.

    Args:
        name: name of the argument.
        value: its value, or a pytree.

    Raises:
        InputError: JAX traces it.
    """
    import jax.core  # here, since `canvax --help` does not import JAX

    if any(isinstance(leaf, jax.core.Tracer) for leaf in _leaves(value)):
        raise InputError(
            name,
            "is traced by JAX: the pipeline calls jit itself, so call it outside of jit, grad and vmap",
            cure="docs/under-the-pipeline.md has the functions to use inside them",
        )


def _leaves(value: Any) -> list[Any]:
    import jax

    if isinstance(value, Iterator):  # JAX warns of iterators; reading one would consume it
        return []
    try:
        return jax.tree.leaves(value)
    except ValueError:  # a table in it has names that cannot be sorted: {"depth": ..., 3: ...}
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return [leaf for part in inside for leaf in _leaves(part)]


def plain(value: Any, name: str = "a number") -> Any:
    """Return a 0-d array of any library as a Python number; return any other value unchanged.

    Raises:
        InputError: a whole number has hundreds of digits, which Python refuses to print; or JAX traces the value.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        refuse_tracers(name, value)  # one of jax.grad has a value, and its gradient would be a silent 0
        if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):  # NumPy counts times among whole numbers
            raise InputError(name, "is a time, not a number", value=str(value))
        with reading(name):
            value = value.item()
    if isinstance(value, int) and value.bit_length() > 1024:
        raise InputError(name, f"is a whole number of {value.bit_length()} bits, which is too large")
    return value


def check_count(name: str, value: Any, most: int = 2**31 - 1) -> int:
    """Return ``value`` as an int, if it is a whole number in 1..``most``.

    Raises:
        InputError: it is not.
    """
    value = plain(value, name)
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(name, "is not a whole number of at least 1", value=value)
    count = int(value)
    if count > most:
        raise InputError(name, f"is more than {most}", value=count)
    return count


def check_flag(name: str, value: Any) -> bool:
    """Return ``value``, if it is True or False: other values would silently count as one of them.

    Raises:
        InputError: it is not.
    """
    if not isinstance(plain(value, name), bool):
        raise InputError(name, "is neither True nor False", value=value)
    return value


def check_number(name: str, value: Any, cure: str = "") -> float:
    """Return ``value`` as a float, if it is a finite number that float32 can hold.

    Raises:
        InputError: it is not.
    """
    value = plain(value, name)
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise InputError(name, "is not a finite number", cure=cure, value=value)
    return number


def check_function(name: str, function: Any, count: int, arguments: str, keywords: Sequence[str] = ()) -> None:
    """Refuse a callback that cannot be called with ``count`` arguments and these keywords, before anything runs.

    Args:
        name: name of the argument.
        function: its value.
        count: number of arguments of a call.
        arguments: names of these arguments for the error.
        keywords: names of keyword arguments of a call.

    Raises:
        InputError: the function cannot be called so.
    """
    if not callable(function):
        raise InputError(name, "is not a function", cure=f"it is called with {arguments}", value=function)
    if inspect.iscoroutinefunction(function):
        raise InputError(name, "is an async function", cure="give one without async", value=function)
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(keywords))
    except ValueError:  # functions of C may have no signature
        return
    except TypeError:
        raise InputError(name, f"cannot be called with {arguments}", value=function) from None


def refuse_others(others: Mapping[str, Any], cure: str) -> None:
    """Refuse keywords that tokenizers do not have.

    Raises:
        InputError: there are any.
    """
    for name in others:
        raise InputError(name, "is not an argument of the tokenizer", cure=cure)


def check_utf8(name: str, text: str) -> str:
    """Return ``text``, if UTF-8 can hold it.

    Raises:
        InputError: the text has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            name, "is not UTF-8 text", cure="check the encoding of where it comes from", value=text
        ) from None
    return text


FLOAT32_MAX = 3.4028235e38
"""The largest number that float32 holds."""

LISTED = 10
"""The most names that an error lists."""


def slip(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that an unknown ``name`` may be with typing errors; None if it is another word.

    A typing error is a letter that is wrong, missing or added, or two swapped letters. One is allowed for every five
    letters, at least one. Case, hyphens, underscores and spaces do not count. The first letter of names of up to four
    letters must be right, and all of names of two. A word of 7 or more letters in any other order has one error.
    """
    folded = {_folded(choice): choice for choice in reversed(list(choices))}
    wanted = _folded(name)
    near = []
    for close in get_close_matches(wanted, list(folded), n=5, cutoff=0.75 if len(wanted) > 7 else 0.6):
        letters = len(close.removesuffix("scheduler"))  # all of diffusers' classes end so
        most = 0 if len(wanted) < 3 else max(1, letters // 5)
        if (slips := _slips(wanted, close)) <= most and (len(wanted) > 4 or wanted[:1] == close[:1]):
            near.append((slips, len(near), folded[close]))
    return min(near)[2] if near else None


def _folded(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


def _slips(a: str, b: str) -> int:
    """Count letters that are wrong, missing, added, or swapped with their neighbour (optimal string alignment)."""
    if len(a) > 6 and a != b and sorted(a) == sorted(b):
        return 1
    before, last = [0], list(range(len(b) + 1))
    for i, x in enumerate(a):
        row = [i + 1]
        for j, y in enumerate(b):
            row.append(min(last[j + 1] + 1, row[j] + 1, last[j] + (x != y)))
            if i and j and (x, a[i - 1]) == (b[j - 1], y):
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]


def did_you_mean(name: str, choices: Sequence[str]) -> str:
    """Return the question for an unknown ``name``; empty if no choice is near."""
    near = slip(name, choices)
    return f"did you mean {near!r}?" if near is not None else ""


def nearest(name: str, choices: Sequence[str], lists: str = "") -> str:
    """Return a ``did you mean`` clause for an unknown ``name``, or the choices; ``lists`` names a list of all."""
    if near := did_you_mean(name, choices):
        return near
    known, where = [repr(choice) for choice in dict.fromkeys(choices)], lists and f": {lists} lists them"
    if len(known) > LISTED:
        return f"there are {', '.join(known[:LISTED])} and {len(known) - LISTED} more{where}"
    return f"choose one of {', '.join(known)}{where}"
