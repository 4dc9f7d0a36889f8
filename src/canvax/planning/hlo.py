"""What a program costs, read from the text that the compiler leaves.

``cost_analysis`` of a compiled program is not enough: it counts the body of a loop once, takes one second off for each
custom call that it has no cost for, and counts what is fetched into on-chip memory twice. The text has each
instruction's shapes, which memory they are in, and, for TPUs, the compiler's own estimate of its cycles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property

from canvax.planning.targets import Chip

_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ROLES = "calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"({_ROLES})=(%[\w.\-]+|\{{[^}}]*\}})")
_KERNELS = re.compile(r'custom_call_target="(tpu_custom_call|__cu)')
"""Custom calls that do something: a Pallas kernel, cuDNN's and cuBLAS's."""

_FREE = frozenset({
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("copy-done", "slice-done", "async-done", "optimization-barrier", "iota", "partition-id"),
})  # fmt: skip
"""Instructions that move nothing themselves."""


@dataclass(frozen=True)
class Work:
    """What running some instructions takes.

    Attributes:
        seconds: the compiler's estimate, and for custom kernels the roofline of what they say they do.
        bytes: to and from the chip's memory (HBM).
        kernels: instructions that do something, one after another.
        unpriced: what has no estimate and is missing in ``seconds``.
    """

    seconds: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    unpriced: tuple[str, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> Work:
        """The same, ``count`` times."""
        return Work(self.seconds * count, self.bytes * count, self.kernels * count, self.unpriced)


@dataclass(frozen=True)
class Instruction:
    """One line: ``name = shape opcode(operands) rest``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    line: str

    def called(self, role: str) -> list[str]:
        """Computations it names as its ``role``: calls, body, condition, ..."""
        return [
            n for key, names in _CALLED.findall(self.rest) if key == role for n in re.findall(r"%([\w.\-]+)", names)
        ]


Computation = dict[str, Instruction]
"""Instructions by name, in order."""


@dataclass(frozen=True)
class Module:
    """The text of a compiled program, taken apart as far as it is looked at."""

    text: str
    chip: Chip

    @cached_property
    def _lines(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        here: list[str] = []
        for line in self.text.splitlines():
            if line.endswith("{") and (header := _HEADER.match(line)):
                here = found[header[2]] = []
                if header[1]:
                    found[""] = here
            elif line.startswith("  "):
                here.append(line)
        return found

    @cached_property
    def _parsed(self) -> dict[str, Computation]:
        return {}

    def computation(self, name: str) -> Computation:
        """A computation; the program's own is the one with the name ""."""
        if name not in self._parsed:
            lines = self._lines[name]
            self._parsed[name] = {one.name: one for one in map(_instruction, lines) if one is not None}
        return self._parsed[name]

    def steps(self) -> Instruction | None:
        """The first loop of the program whose length is not known before it runs: over the rows of a table."""
        loops = [one for one in self.computation("").values() if one.opcode == "while"]
        return next((loop for loop in loops if self._trips(loop, self.computation("")) is None), None)

    def whole(self) -> Work:
        """Work of the program; a loop of unknown length counts once, and is named as unpriced."""
        return self._work("")

    def setup(self) -> Work:
        """Work outside of ``steps``."""
        loop = self.steps()
        return self._work("", skip=loop.name if loop else None)

    def step(self) -> Work:
        """Work of one turn of ``steps``."""
        loop = self.steps()
        return Work() if loop is None else self._turn(loop)

    def step_text(self) -> str:
        """The text of one turn of ``steps``, with all that it calls."""
        loop = self.steps()
        return "" if loop is None else "\n".join(self._reached(loop.called("body") + loop.called("condition"), set()))

    def _reached(self, names: list[str], seen: set[str]) -> Iterator[str]:
        for name in names:
            if name not in seen and name in self._lines:
                seen.add(name)
                lines = self._lines[name]
                yield from lines
                yield from self._reached(re.findall(r"[=,{ ]%([\w.\-]+)", "\n".join(lines)), seen)

    def _work(self, name: str, skip: str | None = None) -> Work:
        seconds, size, kernels, unpriced = 0.0, 0.0, 0, []
        inner = Work()
        computation = self.computation(name)
        for one in computation.values():
            if one.name == skip:
                continue
            if one.opcode == "while":
                trips = self._trips(one, computation)
                unpriced += [f"turns of the loop {one.name}"] if trips is None else []
                inner += self._turn(one).times(trips or 1)
            elif one.opcode == "call":
                for callee in one.called("to_apply"):
                    inner += self._work(callee)
            elif one.opcode == "conditional":
                roles = ("branch_computations", "true_computation", "false_computation")
                branches = [self._work(branch) for role in roles for branch in one.called(role)]
                inner += max(branches, key=lambda work: (work.seconds, work.bytes))
            price = self._seconds(one)
            if price is None:
                unpriced.append(one.name)
            seconds += price or 0.0
            if _does_something(one):
                size += self._bytes(one, computation)
                kernels += 1
        return Work(seconds, size, kernels, tuple(unpriced)) + inner

    def _turn(self, loop: Instruction) -> Work:
        return self._work(loop.called("body")[0])

    def _seconds(self, one: Instruction) -> float | None:
        """The compiler's estimate; nothing for what takes no time, None for what should have one."""
        if cycles := _CYCLES.search(one.rest):
            return int(cycles[1]) / self.chip.clock
        if one.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.rest:
            if kernel := _KERNEL.search(one.rest):
                return max(int(kernel[1]) / self.chip.flops, int(kernel[2]) / self.chip.bandwidth)
            return None
        return None if one.opcode.removesuffix("-start") in _COLLECTIVES else 0.0

    def _trips(self, loop: Instruction, computation: Computation) -> int | None:
        """How often a loop turns, if the compiler says so or its condition compares a counter with a constant."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = self.computation(loop.called("condition")[0])
        compare = next((one for one in reversed(condition.values()) if one.opcode == "compare"), None)
        if compare is None or "direction=LT" not in compare.rest:
            return None
        limit = condition.get(compare.operands[1])
        if limit is not None and limit.opcode == "get-tuple-element":
            start = computation.get(loop.operands[0])
            index = re.search(r"index=(\d+)", limit.rest)
            if start is None or start.opcode != "tuple" or index is None:
                return None
            limit = computation.get(start.operands[int(index[1])])
        if limit is None or limit.opcode != "constant":
            return None
        return int(value[1]) if (value := re.search(r" constant\((\d+)\)", limit.line)) else None

    def _bytes(self, one: Instruction, computation: Computation) -> float:
        if one.opcode in ("copy-start", "slice-start"):
            # (from, to, mark): a slice reads no more than it writes.
            if one.opcode == "copy-start":
                return hbm_bytes(one.shape)
            kind, sides, layout = _ARRAY.findall(one.shape)[-2]
            return _size(kind, sides) * (1 if _SPACE.search(layout) else 2)
        written = self._written(one, computation)
        return written + sum(self._read(one, i, computation) for i in range(len(one.operands)))

    def _written(self, one: Instruction, computation: Computation) -> float:
        """Bytes that an instruction writes: of an array that it updates in place, the update alone."""
        whole = hbm_bytes(one.shape)
        if whole and one.opcode == "fusion":  # what it writes is its root's
            computation = self.computation(one.called("calls")[0])
            one = next((inner for inner in computation.values() if inner.line.lstrip().startswith("ROOT")), one)
        if one.opcode != "dynamic-update-slice" or one.operands[1] not in computation:
            return whole
        return min(whole, _all_bytes(computation[one.operands[1]].shape))

    def _read(self, one: Instruction, index: int, computation: Computation) -> float:
        """Bytes that an instruction reads of an operand: a slice of it alone, if that is all it looks at."""
        operand = computation.get(one.operands[index])
        whole = hbm_bytes(operand.shape) if operand else 0
        if not whole:
            return 0
        if one.opcode == "dynamic-slice" and index == 0:
            return min(whole, _all_bytes(one.shape))
        if one.opcode == "dynamic-update-slice" and index == 0:
            return 0
        if one.opcode != "fusion":
            return whole
        inside = self.computation(one.called("calls")[0])
        inner = next((p for p in inside.values() if p.opcode == "parameter" and f" parameter({index})" in p.line), None)
        if inner is None:
            return whole
        users = [(user, user.operands.index(inner.name)) for user in inside.values() if inner.name in user.operands]
        return min(whole, sum(self._read(user, at, inside) for user, at in users)) if users else 0


def _does_something(one: Instruction) -> bool:
    return one.opcode not in _FREE and (one.opcode != "custom-call" or _KERNELS.search(one.rest) is not None)


_COLLECTIVES = frozenset({
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast"),
})  # fmt: skip


def hbm_bytes(shape: str) -> float:
    """Bytes of the arrays of a shape that are in the chip's main memory, space 0."""
    return sum(
        _size(kind, sides)
        for kind, sides, layout in _ARRAY.findall(shape)
        if (space := _SPACE.search(layout)) is None or space[1] == "0"
    )


def _all_bytes(shape: str) -> float:
    return sum(_size(kind, sides) for kind, sides, _ in _ARRAY.findall(shape))


def _size(kind: str, sides: str) -> float:
    bits = _BITS.get(kind)
    if bits is None:
        digits = re.search(r"\d+", kind)
        bits = int(digits[0]) if digits else 0
    return math.prod(int(side) for side in sides.split(",") if side) * bits / 8


def _instruction(line: str) -> Instruction | None:
    named = _NAMED.match(line)
    if named is None:
        return None
    begin = named.end()
    end = _closing(line, begin) if line[begin] == "(" else line.index(" ", begin)
    shape = line[begin:end]
    opening = line.index("(", end)
    opcode = line[end + 1 : opening]
    closing = _closing(line, opening)
    operands = tuple(re.findall(r"%([\w.\-]+)", line[opening:closing]))
    return Instruction(named[1], shape, opcode, operands, line[closing:], line)


def _closing(line: str, start: int) -> int:
    """Index after the bracket that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)
