"""Computes the cost of a program from the HLO text of the compiled program.

The compiler's ``cost_analysis`` is not enough: it counts the body of a loop once, subtracts a second for each custom
call without a known cost, and counts prefetches into on-chip memory twice. The text has the shapes of each instruction,
their memory space and, for TPUs, the compiler's estimate of cycles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property

from canvax.compile.inspect import COLLECTIVES
from canvax.planning.targets import Chip

_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ROLES = "calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"({_ROLES})=(%[\w.\-]+|\{{[^}}]*\}})")
_KERNELS = re.compile(r'custom_call_target="(tpu_custom_call|__cu)')
"""Custom calls that run a kernel: of Pallas, cuDNN or cuBLAS."""

_FREE = frozenset({
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("copy-done", "slice-done", "async-done", "optimization-barrier", "iota", "partition-id"),
})  # fmt: skip
"""Instructions that move no data."""


@dataclass(frozen=True)
class Work:
    """The cost of running instructions.

    Attributes:
        seconds: the compiler's estimate; for custom kernels the roofline of their declared cost.
        bytes: transfers to and from the chip's memory (HBM).
        kernels: number of instructions that run a kernel, one after another.
        unpriced: instructions without an estimate, which ``seconds`` does not include.
    """

    seconds: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    unpriced: tuple[str, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> Work:
        """Return the cost of ``count`` repetitions."""
        return Work(self.seconds * count, self.bytes * count, self.kernels * count, self.unpriced)


@dataclass(frozen=True)
class Instruction:
    """A line of HLO: ``name = shape opcode(operands) rest``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    line: str

    def called(self, role: str) -> list[str]:
        """Return the names of the computations in a ``role``: calls, body, condition, ..."""
        return [
            n for key, names in _CALLED.findall(self.rest) if key == role for n in re.findall(r"%([\w.\-]+)", names)
        ]


Computation = dict[str, Instruction]
"""Name -> instruction, in order."""


@dataclass(frozen=True)
class Module:
    """The HLO text of a compiled program; computations are parsed when they are needed."""

    text: str
    chip: Chip

    @cached_property
    def _lines(self) -> dict[str, list[str]]:
        computations: dict[str, list[str]] = {}
        here: list[str] = []
        for line in self.text.splitlines():
            if line.endswith("{") and (header := _HEADER.match(line)):
                here = computations[header[2]] = []
                if header[1]:
                    computations[""] = here
            elif line.startswith("  "):
                here.append(line)
        return computations

    @cached_property
    def _parsed(self) -> dict[str, Computation]:
        return {}

    def computation(self, name: str) -> Computation:
        """Parse a computation; the entry computation has the name ""."""
        if name not in self._parsed:
            lines = self._lines[name]
            self._parsed[name] = {parsed.name: parsed for parsed in map(_instruction, lines) if parsed is not None}
        return self._parsed[name]

    def steps(self) -> Instruction | None:
        """Find the first loop whose length is not known at compile time: the loop over the rows of a sampler table."""
        loops = [instruction for instruction in self.computation("").values() if instruction.opcode == "while"]
        return next((loop for loop in loops if self._trips(loop, self.computation("")) is None), None)

    def whole(self) -> Work:
        """Return the cost of the program; a loop of unknown length counts once, and is listed as unpriced."""
        return self._work("")

    def setup(self) -> Work:
        """Return the cost outside of the loop ``steps``."""
        loop = self.steps()
        return self._work("", skip=loop.name if loop else None)

    def step(self) -> Work:
        """Return the cost of an iteration of ``steps``."""
        loop = self.steps()
        return Work() if loop is None else self._turn(loop)

    def step_text(self) -> str:
        """Return the HLO text of an iteration of ``steps``, including all computations it calls."""
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
        for instruction in computation.values():
            if instruction.name == skip:
                continue
            if instruction.opcode == "while":
                trips = self._trips(instruction, computation)
                unpriced += [f"turns of the loop {instruction.name}"] if trips is None else []
                inner += self._turn(instruction).times(trips or 1)
            elif instruction.opcode == "call":
                for callee in instruction.called("to_apply"):
                    inner += self._work(callee)
            elif instruction.opcode == "conditional":
                roles = ("branch_computations", "true_computation", "false_computation")
                branches = [self._work(branch) for role in roles for branch in instruction.called(role)]
                inner += max(branches, key=lambda work: (work.seconds, work.bytes))
            price = self._seconds(instruction)
            if price is None:
                unpriced.append(instruction.name)
            seconds += price or 0.0
            if _runs_kernel(instruction):
                size += self._bytes(instruction, computation)
                kernels += 1
        return Work(seconds, size, kernels, tuple(unpriced)) + inner

    def _turn(self, loop: Instruction) -> Work:
        return self._work(loop.called("body")[0])

    def _seconds(self, instruction: Instruction) -> float | None:
        """Return the compiler's estimate of an instruction's time; None if it should have an estimate but has not."""
        if cycles := _CYCLES.search(instruction.rest):
            return int(cycles[1]) / self.chip.clock
        if instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.rest:
            if kernel := _KERNEL.search(instruction.rest):
                return max(int(kernel[1]) / self.chip.flops, int(kernel[2]) / self.chip.bandwidth)
            return None
        return None if instruction.opcode.removesuffix("-start") in COLLECTIVES else 0.0

    def _trips(self, loop: Instruction, computation: Computation) -> int | None:
        """Return a loop's iterations if the compiler states them or the condition compares a counter to a constant."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = self.computation(loop.called("condition")[0])
        compare = next((inner for inner in reversed(condition.values()) if inner.opcode == "compare"), None)
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

    def _bytes(self, instruction: Instruction, computation: Computation) -> float:
        if instruction.opcode in ("copy-start", "slice-start"):
            # The shape is (from, to, mark); a slice reads as much as it writes.
            if instruction.opcode == "copy-start":
                return hbm_bytes(instruction.shape)
            kind, sides, layout = _ARRAY.findall(instruction.shape)[-2]
            return _size(kind, sides) * (1 if _SPACE.search(layout) else 2)
        written = self._written(instruction, computation)
        return written + sum(self._read(instruction, i, computation) for i in range(len(instruction.operands)))

    def _written(self, instruction: Instruction, computation: Computation) -> float:
        """Return the bytes that an instruction writes; for an in-place update only the updated part."""
        whole = hbm_bytes(instruction.shape)
        if whole and instruction.opcode == "fusion":  # a fusion writes its root
            computation = self.computation(instruction.called("calls")[0])
            instruction = next(
                (inner for inner in computation.values() if inner.line.lstrip().startswith("ROOT")), instruction
            )
        if instruction.opcode != "dynamic-update-slice" or instruction.operands[1] not in computation:
            return whole
        return min(whole, _all_bytes(computation[instruction.operands[1]].shape))

    def _read(self, instruction: Instruction, index: int, computation: Computation) -> float:
        """Return the bytes that an instruction reads of an operand; only a slice if it uses no more."""
        operand = computation.get(instruction.operands[index])
        whole = hbm_bytes(operand.shape) if operand else 0
        if not whole:
            return 0
        if instruction.opcode == "dynamic-slice" and index == 0:
            return min(whole, _all_bytes(instruction.shape))
        if instruction.opcode == "dynamic-update-slice" and index == 0:
            return 0
        if instruction.opcode != "fusion":
            return whole
        inside = self.computation(instruction.called("calls")[0])
        inner = next((p for p in inside.values() if p.opcode == "parameter" and f" parameter({index})" in p.line), None)
        if inner is None:
            return whole
        users = [(user, user.operands.index(inner.name)) for user in inside.values() if inner.name in user.operands]
        return min(whole, sum(self._read(user, at, inside) for user, at in users)) if users else 0


def _runs_kernel(instruction: Instruction) -> bool:
    return instruction.opcode not in _FREE and (
        instruction.opcode != "custom-call" or _KERNELS.search(instruction.rest) is not None
    )


def hbm_bytes(shape: str) -> float:
    """Return the bytes of a shape's arrays that are in the chip's main memory, space 0."""
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
    """Return the index after the bracket that matches the bracket at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)
