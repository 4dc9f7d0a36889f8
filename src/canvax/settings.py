"""The declaration of a setting: a field of a dataclass with its help, limits and names.

    @dataclass(frozen=True)
    class Options:
        eta: float | None = setting(None, "noise that the sampler adds", low=0, high=1, infotext="Eta")

The annotation gives the kind of a value. The checks of ``check_all``, flags, columns, the JSON schema of the server,
rows of the docs and hints are derived from the record, so none of them is written by hand.
``canvax.call`` has the records.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from itertools import islice
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from canvax.errors import InputError, nearest, needs, plain, refuse_tracers

if TYPE_CHECKING:
    import argparse

EntryPoint = Literal["command", "file", "server"]
"""Entry points of settings besides Python: a flag or a line of a prompt file, a row of a batch job, a request."""

MOST_NUMBERS = 10_000
"""The most numbers of a list: more than any run has steps. So endless iterators are not read to their end."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        help: its effect, for --help, the docs and the server's schema.
        low: the smallest value, for a list of each entry; None for no limit.
        high: the largest value.
        above: True if the value must be larger than ``low``.
        below: True if the value must be smaller than ``high``.
        length: entries of a list; 0 for any number.
        cure: end of the error about a wrong value: "4 is usual".
        unset: meaning of None: "the model's default".
        also: names in other programs, which Python, files and the server take as well.
        flags: flags of the command line; by default ``--name``.
        repeats: True if the flag may be given several times.
        const: value of a flag that is given without a value.
        metavar: name of the value in --help.
        group: group in which it is listed.
        hint_without: other settings, or conditions of ``hints.idle``, without which a hint says that it has no effect.
        error_without: a setting, with a value, without which it is an error: "hires=2".
        per_image: True if images of one batch may have different values.
        infotext: its name in A1111's text in a PNG.
        closed: entry points that do not take it, with the reason.
        read: a function of name and value that reads values that no annotation describes.
    """

    help: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    length: int = 0
    cure: str = ""
    unset: str = ""
    also: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    repeats: bool = False
    const: Any = None
    metavar: str | tuple[str, str] = ""
    group: str = "settings"
    hint_without: tuple[str, ...] = ()
    error_without: str = ""
    per_image: bool = False
    infotext: str = ""
    closed: Mapping[EntryPoint, str] = dataclasses.field(default_factory=dict)
    read: Callable[[str, Any], Any] | None = None

    @property
    def limits(self) -> str:
        """Text of the range; empty without one."""
        low, high = (None if end is None else _as_text(end) for end in (self.low, self.high))
        if low is None or high is None:
            return "" if low is None else f"{low} or more"
        return f"{low}..{high}" + f", without {low}" * self.above + f", without {high}" * self.below

    def takes(self, number: float) -> bool:
        """Return True if a number is finite and within the limits."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        at_end = (self.above and number == low) or (self.below and number == high)
        return math.isfinite(number) and low <= number <= high and not at_end


def _as_text(end: float) -> str:
    """Format a limit: 2**64-1 is easier to read than its digits."""
    large = end > 2**30 and isinstance(end, int) and (end + 1).bit_count() == 1
    return f"2**{end.bit_length()}-1" if large else f"{end:.10g}"  # type: ignore[union-attr]


def setting(default: Any = MISSING, help: str = "", **declared: Any) -> Any:
    """Make a field of a record of settings; ``declared`` are attributes of ``Setting``."""
    metadata = {"setting": Setting(help=help, **declared)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ValueKind:
    """The values that an annotation allows.

    Attributes:
        value_type: int, float, str or bool, of a value or of a list's entries; None if only ``Setting.read`` knows.
        entry_type: type of the entries of a list.
        choices: the values of a Literal.
        scalar: True if a value outside of a list is allowed.
        sequence: True if a list is allowed.
        mapping: True if a table is allowed.
        length: number of entries of a tuple.
        optional: True if None is allowed.
    """

    value_type: type | None
    entry_type: type | None = None
    choices: tuple[Any, ...] = ()
    scalar: bool = True
    sequence: bool = False
    mapping: bool = False
    length: int = 0
    optional: bool = False

    @classmethod
    def read(cls, annotation: Any) -> ValueKind:
        """Return the kind of an annotation."""
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        lists = [member for member in members if get_origin(member) in (Sequence, tuple)]
        tables = [member for member in members if get_origin(member) is Mapping]
        single = [member for member in members if member not in (*lists, *tables, type(None))]
        entries = _type_of(get_args(lists[0])[0]) if lists else None
        choices = tuple(word for member in single for word in _choices(member))
        return cls(
            _type_of(single[-1]) if single else entries,
            entries,
            choices,
            bool(single),
            bool(lists),
            bool(tables),
            len(get_args(lists[0])) if lists and get_origin(lists[0]) is tuple else 0,
            type(None) in members,
        )


def _type_of(annotation: Any) -> type | None:
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return type(words[0]) if words else annotation if annotation in (int, float, str, bool) else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    return (True, False) if annotation is bool else get_args(annotation) if get_origin(annotation) is Literal else ()


class Declared:
    """A setting with the field that declares it."""

    def __init__(self, declared: Field[Any], annotation: Any) -> None:
        self.name, self.default = declared.name, declared.default
        self.setting: Setting = declared.metadata["setting"]
        self.kind = ValueKind.read(annotation)
        self.length = self.setting.length or self.kind.length
        self.flags = self.setting.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def flag(self) -> str:
        """Flag to write in a command."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    @property
    def is_switch(self) -> bool:
        """True if it is off by default, and its flags take no value; each of its ``words`` has a separate flag."""
        return self.kind.value_type is bool and not self.default

    @property
    def words(self) -> dict[str, str]:
        """Words that a switch can be besides on, by flag: --offload-layers for "layers"."""
        words = [choice for choice in self.kind.choices if isinstance(choice, str)] if self.is_switch else []
        return {f"{self.flag}-{word}": word for word in words}

    @property
    def is_text(self) -> bool:
        """True if a table without types, such as CSV, has it as text."""
        return self.kind.value_type in (None, str) and not self.setting.read

    @property
    def default_text(self) -> str:
        """Text of the default; empty if it needs none."""
        if self.default is None:
            return self.setting.unset
        return "" if self.is_switch or self.default in (MISSING, ()) else text_of(self.default)


@cache
def declared(record: type) -> dict[str, Declared]:
    """Return the settings of a record by name."""
    hints = get_type_hints(record)
    return {field.name: Declared(field, hints[field.name]) for field in fields(record) if "setting" in field.metadata}


def offered(record: type, entry_point: EntryPoint) -> dict[str, Declared]:
    """Return the settings that an entry point takes."""
    return {name: field for name, field in declared(record).items() if entry_point not in field.setting.closed}


def grouped(record: type, group: str) -> dict[str, Declared]:
    """Return the settings of a group."""
    return {name: field for name, field in declared(record).items() if field.setting.group == group}


def aliases(*records: type) -> dict[str, str]:
    """Return the names in other programs, with the names here."""
    return {also: name for record in records for name, field in declared(record).items() for also in field.setting.also}


# Values


def check_all(record: Any) -> None:
    """Check each setting of a frozen record, and keep it as a plain value.

    Raises:
        InputError: a value is of another kind, is out of range, or needs another setting.
    """
    for name, field in declared(type(record)).items():
        if (value := getattr(record, name)) is not field.default:
            object.__setattr__(record, name, check(field, value))
    for name, field in declared(type(record)).items():
        needed = field.setting.error_without.partition("=")[0]
        if needed and _differs(record, field) and not _differs(record, declared(type(record))[needed]):
            raise needs(name, field.setting.error_without, value=getattr(record, name))


def _differs(record: Any, field: Declared) -> bool:
    return getattr(record, field.name) != field.default


def check_setting(record: type, name: str, value: Any) -> Any:
    """Check a value of a setting of a record."""
    return check(declared(record)[name], value)


def check(field: Declared, value: Any) -> Any:
    """Check a value and return it as a plain one.

    Raises:
        InputError: it is of another kind, or out of range.
    """
    name, kind = field.name, field.kind
    value = plain(value, name)
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | Mapping):
        refuse_tracers(name, value)
    if value is None and kind.optional:
        return None
    if field.setting.read:
        return field.setting.read(name, value)
    if kind.value_type is None:
        return value
    if kind.sequence:
        return _several(field, value)
    return _single(field, value, value)


def _single(field: Declared, value: Any, whole: Any) -> Any:
    """Check a value, or an entry of the list ``whole``."""
    setting, kind = field.setting, field.kind
    if kind.choices:
        if not any(value == choice and type(value) is type(choice) for choice in kind.choices):
            words = [choice for choice in kind.choices if isinstance(choice, str)]
            if not words:
                raise InputError(field.name, "is neither True nor False", cure=setting.cure, value=whole)
            listing = f"choose one of {', '.join(map(repr, kind.choices))}"
            cure = nearest(value, words) if isinstance(value, str) else setting.cure or listing
            raise InputError(field.name, "is not known", cure=cure, value=whole)
        return value
    if kind.value_type is str:
        if not isinstance(value, str):
            raise InputError(field.name, "is not text", cure=setting.cure, value=whole)
        return value
    if not (is_whole(value) if kind.value_type is int else is_number(value)) or not setting.takes(value):
        wanted = "a whole number" if kind.value_type is int else "a number" if setting.limits else "a finite number"
        joint = " of at least " if setting.high is None else " in "
        limits = joint + setting.limits.removesuffix(" or more") if setting.limits else ""
        raise InputError(field.name, f"is not {wanted}{limits}", cure=setting.cure, value=whole)
    return value


def _several(field: Declared, value: Any) -> Any:
    """Check a list, or a single value if that is allowed as well."""
    setting, kind = field.setting, field.kind
    if kind.value_type is str and not kind.choices:
        texts = [value] if isinstance(value, str) and kind.scalar else value
        if not (isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)):
            raise InputError(field.name, "is neither text nor a list of texts", cure=setting.cure, value=value)
        return value if isinstance(value, str) else tuple(value)
    if kind.scalar:
        entries = listed(value)
        for entry in entries or ("",):
            _single(field, entry, value)
        return entries[0] if len(entries) == 1 else entries
    numbers = numbers_of(value)
    if len(numbers) > MOST_NUMBERS:
        raise InputError(field.name, f"has more than {MOST_NUMBERS} numbers", cure="give one for each step")
    whole = kind.value_type is int
    fits = len(numbers) == field.length if field.length else bool(numbers)
    if not fits or not all(setting.takes(number) and (not whole or is_whole(number)) for number in numbers):
        if isinstance(setting.metavar, tuple):
            wanted = f"({', '.join(setting.metavar).lower()}), whole numbers"
        else:
            wanted = f"{field.length} numbers" if field.length else "a list of numbers"
        wanted += f" in {setting.limits}" * bool(setting.limits)
        raise InputError(field.name, f"is not {wanted}", cure=setting.cure, value=value)
    return numbers if whole else tuple(map(float, numbers))


def is_number(value: Any) -> bool:
    """Return True for a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Return True for a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def listed(value: Any) -> tuple[Any, ...]:
    """Return numbers or words as a tuple, from one, several, or text with commas."""
    if isinstance(value, str):
        return tuple(plain_value(part.strip()) for part in value.split(","))
    return tuple(map(plain, value)) if isinstance(value, Sequence) else (value,)


def numbers_of(value: Any) -> tuple[Any, ...]:
    """Return the numbers of a list, also from text with commas; empty if it is not a list of numbers."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, bytes | set | frozenset | Mapping):  # they iterate as well, with another meaning
        return ()
    try:
        return tuple(_number(entry) for entry in islice(value or (), MOST_NUMBERS + 1))
    except (TypeError, ValueError, OverflowError):
        return ()


def _number(value: Any) -> Any:
    value = plain(value)
    whole = is_whole(value) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal())
    return math.nan if isinstance(value, bool) else int(value) if whole else float(value)


_NUMBER = re.compile(r"[+-]?(\d{1,99}(?:\.\d{0,99})?|\.\d{1,99})(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)


def plain_value(text: str) -> Any:
    """Read a number, true, false, a list with or without its brackets, or a word."""
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except ValueError:
            continue
        except RecursionError:
            raise InputError("sampler_settings", "is nested too deeply", value=text[:40]) from None
    inner = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    parts = [part.strip() for part in inner.split(",")]
    if all(map(_NUMBER.fullmatch, parts)):  # .5, 1. and +0.5 are not JSON
        numbers = [int(part) if part.lstrip("+-").isdigit() else float(part) for part in parts]
        return numbers if "," in text or inner != text else numbers[0]
    return {"True": True, "False": False}.get(text, text)


def check_once(name: str, parts: Iterable[str]) -> None:
    """Refuse a part that is given twice, since one of the two would be dropped silently."""
    seen: set[str] = set()
    for part in parts:
        if part in seen:
            raise InputError(f"{name} has {part!r} twice; keep one")
        seen.add(part)


# Derived from a record


def described(field: Declared, usual: Any = None) -> str:
    """Return the line of --help; ``usual`` is a command's default, if it differs from the record's."""
    setting, otherwise = field.setting, field.default_text if usual is None else text_of(usual)
    narrow = setting.high is not None and setting.high <= 16 and field.kind.value_type is float
    return (f"{setting.limits}, " if narrow else "") + setting.help + (f" ({otherwise})" if otherwise else "")


def add_flags(parser: argparse.ArgumentParser | Any, record: type, *, group: str | None = None,
              names: Iterable[str] | None = None, without: Iterable[str] = (),
              help: Mapping[str, str] | None = None, usual: Mapping[str, Any] | None = None) -> None:  # fmt: skip
    """Add the flags of a record's settings: all of them, those of a group, or those of some names.

    Args:
        parser: a parser or a group of arguments.
        record: the record.
        group: the group of settings.
        names: names of settings.
        without: names of settings that are left out.
        help: help by name that replaces the record's.
        usual: defaults by name that replace the record's.
    """
    for name, field in offered(record, "command").items():
        if group in (None, field.setting.group) and (names is None or name in names) and name not in without:
            keywords: dict[str, Any] = {"help": (help or {}).get(name) or described(field, (usual or {}).get(name))}
            if field.setting.const is not None or field.is_switch:
                const = True if field.setting.const is None else field.setting.const
                keywords |= {"action": "store_const", "default": field.default}
                parser.add_argument(*field.flags, dest=name, const=const, **keywords)
                for flag, word in field.words.items():
                    keywords["help"] = f"{name}={word!r}, see {field.flag}"
                    parser.add_argument(flag, dest=name, const=word, **keywords)
                continue
            keywords["metavar"] = field.setting.metavar or "X"
            number = field.kind.value_type if field.kind.value_type in (int, float) else None
            if field.setting.repeats:
                keywords["action"] = "append"
            elif isinstance(field.setting.metavar, tuple):
                keywords |= {"type": number, "nargs": 2}
            elif number and not field.kind.sequence:
                keywords["type"] = number
            parser.add_argument(*field.flags, dest=name, **keywords)


def as_flags(field: Declared, value: Any) -> list[str]:
    """Return the words of a command line that give a setting a value; none for None."""
    if value is None or value in ([], ()):
        return []
    if field.setting.const is not None or field.is_switch:
        if value in (True, field.setting.const):
            return [field.flag]
        return [flag for flag, word in field.words.items() if value == word]
    values = list(value) if isinstance(value, list | tuple) else [value]
    if field.setting.repeats:
        return [f"{field.flag}={each}" for each in values]
    words = [str(each) for each in values] if isinstance(field.setting.metavar, tuple) else [",".join(map(str, values))]
    return [f"{field.flag}={words[0]}"] if words[0].startswith("-") else [field.flag, *words]


def json_schema(record: type, entry_point: EntryPoint) -> dict[str, Any]:
    """Return the JSON schema of the settings that an entry point takes."""
    properties = {name: _schema_of(field) for name, field in offered(record, entry_point).items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _schema_of(field: Declared) -> dict[str, Any]:
    setting, kind = field.setting, field.kind
    bounds = {
        "exclusiveMinimum" if setting.above else "minimum": setting.low,
        "exclusiveMaximum" if setting.below else "maximum": setting.high,
    }
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}

    def form(of: type) -> dict[str, Any]:
        name = {int: "integer", float: "number", str: "string", bool: "boolean"}[of]
        return (
            {"enum": list(kind.choices)} if kind.choices else {"type": name, **(bounds if of in (int, float) else {})}
        )

    forms = [form(kind.value_type)] if kind.scalar and kind.value_type else []
    if kind.sequence and kind.entry_type:
        counts = {"minItems": field.length, "maxItems": field.length} if field.length else {}
        forms.append({"type": "array", "items": form(kind.entry_type), **counts})
    if kind.mapping:
        forms.append({"type": "object"})
    forms += [{"type": "null"}] if kind.optional else []
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms} if forms else {}
    default = {} if field.default in (None, MISSING) else {"default": field.default}
    return {"description": setting.help, **schema, **default}


def markdown(record: type) -> str:
    """Return the settings of a record as tables, one for each group; then those that the server does not take."""
    parts = []
    for group in dict.fromkeys(field.setting.group for field in declared(record).values()):
        rows = [_row(field) for field in grouped(record, group).values()]
        title = group.partition(" (")[0]
        parts.append("\n".join([f"**{title[:1].upper()}{title[1:]}**", "", "| option | default | values | meaning |",
                                "|---|---|---|---|", *rows]))  # fmt: skip
    closed: dict[str, list[str]] = {}
    for name, field in declared(record).items():
        if why := field.setting.closed.get("server"):
            closed.setdefault(why, []).append(f"`{name}`")
    if closed:
        lines = [f"- {', '.join(names)}: {why}" for why, names in closed.items()]
        parts.append("\n".join(["The server does not take", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _row(field: Declared) -> str:
    words = ", ".join(f"`{choice}`" for choice in field.kind.choices)
    default = text_of(field.default) if field.is_switch and field.default is not None else field.default_text
    kind = {int: "whole number", float: "number", str: "text"}.get(field.kind.value_type or object, "")
    if field.length or (field.kind.sequence and not field.kind.scalar):
        kind = f"{field.length or ''} {kind}s".strip()
    kind = "names with values" if field.kind.mapping and field.setting.repeats else kind
    values = words or ", ".join(filter(None, (kind, field.setting.limits)))
    return f"| `{field.name}` | {default} | {values} | {field.setting.help} |"


def text_of(value: Any) -> str:
    """Format a default as help shows it."""
    if isinstance(value, tuple):
        return ",".join(map(text_of, value))
    return f"{value:g}" if type(value) is float else str(value)


def idle(record: Any, there: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """Yield the settings that have no effect, each with the condition that it needs.

    Args:
        record: the values.
        there: conditions that are not settings of the record, and whether they hold.
    """
    known = declared(type(record))
    for name, field in known.items():
        for needed in field.setting.hint_without if _differs(record, field) else ():
            holds = there[needed] if needed in there else _differs(record, known[needed])
            if not holds:
                yield name, needed
                break
