"""Names of two layouts as rules that are read in both directions.

External names are those of a file, internal names those of diffusers, which specs use. A table of rules loads a file
(``to_internal``), saves one (``to_external``), and lists the external names of a layer (``external``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from canvax.types import HostArray
from canvax.weights.entries import Entry
from canvax.weights.safetensors import ArrayToSave

Change = Literal["", "transposed", "swapped halves", "1x1 convolution", "six rows in one"]


@dataclass(frozen=True)
class Rule:
    """The names of a module or an array in two layouts.

    Attributes:
        external: a dotted name, in which ``*`` is a number that both names have; its continuation is kept.
        internal: a name as ``external``, or the names of the parts that their array stacks along ``axis``.
        change: difference of their array: swapped axes, swapped halves along the first axis, two more axes of size 1,
            or one axis instead of two.
        rows: relative sizes of the parts, equal by default; 0 for a part that is as large as the array's other axis.
        axis: axis along which parts are stacked; 1 for matrices whose inputs are stacked and whose products are summed.
    """

    external: str
    internal: str | tuple[str, ...]
    change: Change = ""
    rows: tuple[int, ...] = ()
    axis: Literal[0, 1] = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """``internal`` as a tuple."""
        return (self.internal,) if isinstance(self.internal, str) else self.internal


class _Match(NamedTuple):
    """The rules for the longest known prefix of a name, the numbers in it, and the rest of the name."""

    rules: list[tuple[Rule, int]]
    numbers: list[str]
    rest: str

    def named(self, pattern: str) -> str:
        first, *others = pattern.split("*")
        name = first + "".join(number + text for number, text in zip(self.numbers, others, strict=True))
        return f"{name}.{self.rest}" if name and self.rest else name or self.rest


class Names:
    """A table of rules."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._external: dict[str, Any] = {}
        self._internal: dict[str, Any] = {}
        for rule in rules:
            _add(self._external, rule.external, (rule, 0))
            for i, name in enumerate(rule.parts):
                _add(self._internal, name, (rule, i))

    def to_internal(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return entries under internal names, stacked ones split into parts; names without a rule stay."""
        return [internal for entry in entries for internal in self._to_internal(entry)]

    def _to_internal(self, entry: Entry) -> Iterator[Entry]:
        match = _longest(self._external, entry.name.split("."))
        if match is None:
            yield entry
            return
        rule = match.rules[0][0]
        if rule.change == "transposed" and len(entry.shape) == 2:
            entry = replace(entry, order="flax" if entry.order == "torch" else "torch")
        if rule.change == "swapped halves" and entry.shape:
            half = entry.shape[0] // 2
            entry = entry.rows((half, 2 * half), (0, half))
        if rule.change == "six rows in one" and len(entry.shape) == 1 and entry.shape[0] % 6 == 0:
            entry = replace(entry, shape=(6, entry.shape[0] // 6))
        if len(rule.parts) == 1 or not entry.shape or (rule.axis and len(entry.shape) != 2):
            yield replace(entry, name=match.named(rule.parts[0]))
            return
        sizes = _sizes(rule, entry.shape)
        if sum(sizes) != entry.shape[rule.axis]:
            yield entry  # not such a stack; it is reported as unused
            return
        for name, (begin, end) in zip(rule.parts, pairwise(accumulate(sizes, initial=0)), strict=True):
            part = entry.columns(begin, end) if rule.axis else entry.rows((begin, end))
            yield replace(part, name=match.named(name))

    def to_external(self, arrays: Sequence[ArrayToSave]) -> list[ArrayToSave]:
        """Return arrays under external names, parts stacked; names without a rule stay."""
        stacks: dict[str, dict[int, ArrayToSave]] = {}
        rules: dict[str, Rule | None] = {}
        for array in arrays:
            match = _longest(self._internal, array.name.split("."))
            rule, part = match.rules[0] if match else (None, 0)
            name = match.named(rule.external) if match and rule else array.name
            stacks.setdefault(name, {})[part] = array
            rules[name] = rule
        return [_stacked(name, rules[name], [parts[i] for i in sorted(parts)]) for name, parts in stacks.items()]

    def others(self, name: str) -> list[str]:
        """Return the external names of an array, or of the stacks that it is a part of."""
        match = _longest(self._internal, name.split("."))
        return [match.named(rule.external) for rule, _ in match.rules] if match else []

    def external(self, name: str) -> list[tuple[str, tuple[str, ...], Rule]]:
        """Return the external names of a module, or of stacks that begin with it, with all parts and the rule."""
        match = _longest(self._internal, name.split("."))
        rules = [rule for rule, part in match.rules if part == 0] if match else []
        return (
            [(match.named(rule.external), tuple(map(match.named, rule.parts)), rule) for rule in rules] if match else []
        )


def _sizes(rule: Rule, shape: tuple[int, ...]) -> list[int]:
    """Return the sizes of a stack's parts; they do not add up to its axis if it is not a stack of this rule."""
    rows = rule.rows or (1,) * len(rule.parts)
    if 0 in rows and len(shape) != 2:
        return []
    fixed = shape[1 - rule.axis] if 0 in rows else 0
    unit = max(0, shape[rule.axis] - rows.count(0) * fixed) // sum(rows)
    return [unit * part or fixed for part in rows]


def _stacked(name: str, rule: Rule | None, parts: Sequence[ArrayToSave]) -> ArrayToSave:
    first, change = parts[0], rule.change if rule else ""
    axis = rule.axis if rule and len(first.shape) > 1 else 0  # a bias is one part
    total = sum(part.shape[axis] for part in parts) if first.shape else 0
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :]) if len(parts) > 1 else first.shape
    if change == "transposed":
        shape = shape[::-1]
    if change == "1x1 convolution" and len(shape) == 2:
        shape = (*shape, 1, 1)
    if change == "six rows in one":
        shape = (math.prod(shape),)

    def get() -> HostArray:
        array = np.concatenate([part.get() for part in parts], axis) if len(parts) > 1 else first.get()
        if change == "transposed":
            return np.ascontiguousarray(array.T)
        if change == "six rows in one":
            return array.reshape(-1)
        if change == "swapped halves":
            return np.roll(array, array.shape[0] // 2, axis=0)
        return array.reshape(shape)

    return ArrayToSave(name, shape, first.dtype, get)


def _add(node: dict[Any, Any], name: str, value: tuple[Rule, int]) -> None:
    """Put a value into a tree of name components; the key None holds the values of the name that ends there."""
    for step in name.split(".") if name else ():
        node = node.setdefault(step, {})
    node.setdefault(None, []).append(value)


def _longest(node: Mapping[Any, Any], steps: Sequence[str]) -> _Match | None:
    keys = [key for key in ((steps[0], "*") if steps[0].isdecimal() else (steps[0],)) if key in node] if steps else []
    matches = []
    for key in keys:
        if match := _longest(node[key], steps[1:]):
            matches.append(match._replace(numbers=[steps[0], *match.numbers]) if key == "*" else match)
    if matches:
        return min(matches, key=lambda match: len(match.rest))
    return _Match(node[None], [], ".".join(steps)) if None in node else None
