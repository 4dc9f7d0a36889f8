"""How much memory a program will take beside its arguments, from its trace alone.

A trace lists every operation in order. Compilers do not store what is cheap to compute on the way to its consumer, so
an elementwise result counts only where something needs it whole: a matrix product, a convolution, a loop, or several
consumers for which keeping it is cheaper than keeping what it is made of. With that, the largest sum of arrays alive at
once is an estimate of the compiler's own figure, in the time of a trace (seconds, where compiling takes minutes).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from canvax.kernels.target import traced

_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"}
_STORED = {"conv_general_dilated", "dot_general", "while", "scan", "cond", "gather", "scatter", "scatter-add", "sort"}
_STORED |= {"concatenate", "random_bits", "threefry2x32", "shard_map", "pallas_call", "custom_call", "ffi_call"}
"""Operations that read whole arrays from memory and write a whole array."""

_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "argmax", "reduce_or", "reduce_and", "cumsum"}
"""Operations that write their (small) result, and can compute what they read on the way."""


def peak_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Estimated bytes that ``function`` holds at its peak beside its arguments, its results among them.

    Args:
        function: traceable by JAX; it is traced, not run.
        arguments: nests of anything with a shape and a dtype.
    """
    return _peak(traced(function, *arguments))


@dataclass(frozen=True)
class _Operation:
    name: str
    inputs: list[Any]
    outputs: list[Any]
    inside: int
    """Peak of the programs inside, for a loop or a branch."""


def _peak(jaxpr: Any) -> int:
    operations, results = _flat(jaxpr, {})
    stored = _stored(operations, results)
    roots: dict[Any, frozenset[Any]] = {}
    last: dict[Any, int] = {}
    for i, operation in enumerate(operations):
        beneath = _beneath(operation, roots)
        for root in beneath:
            last[root] = i
        for out in operation.outputs:
            roots[out] = frozenset([out]) if out in stored else beneath
            if out in stored:
                last[out] = i
    for out in results:
        for root in roots.get(out, ()):
            last[root] = len(operations)
    freed: dict[int, list[Any]] = {}
    for root, when in last.items():
        freed.setdefault(when, []).append(root)
    alive = peak = 0
    for i, operation in enumerate(operations):
        alive += sum(_bytes(out) for out in operation.outputs if out in stored)
        peak = max(peak, alive + operation.inside)
        alive -= sum(_bytes(root) for root in freed.get(i, ()))
    return peak


def _stored(operations: Sequence[_Operation], results: Sequence[Any]) -> set[Any]:
    """The values that are kept in memory as they are."""
    stored, uses = set(results), Counter()
    for operation in operations:
        uses.update(set(operation.inputs))
        if operation.name in _STORED:
            stored.update(operation.inputs)
        if operation.name in _STORED or operation.name in _REDUCTIONS:
            stored.update(operation.outputs)
    roots: dict[Any, frozenset[Any]] = {}
    for operation in operations:
        beneath = _beneath(operation, roots)
        for out in operation.outputs:
            if uses[out] > 1 and sum(map(_bytes, beneath)) > _bytes(out):
                stored.add(out)
            roots[out] = frozenset([out]) if out in stored else beneath
    return stored


def _beneath(operation: _Operation, roots: Mapping[Any, frozenset[Any]]) -> frozenset[Any]:
    """The stored values that an operation's inputs are computed from."""
    return frozenset().union(*(roots.get(one, frozenset()) for one in operation.inputs))


class _Value:
    """A value inside a call that is written out: the same trace may be called more than once."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


def _flat(jaxpr: Any, names: dict[Any, Any]) -> tuple[list[_Operation], list[Any]]:
    """The operations of a trace with its calls written out, and its results; literals are left out.

    ``names`` has what stands for the trace's own variables.
    """

    def known(values: Sequence[Any]) -> list[Any]:
        return [names.get(value, value) for value in values if not isinstance(value, Literal)]

    operations: list[_Operation] = []
    for equation in jaxpr.eqns:
        inner = _called(equation)
        if inner is None:
            inside = max((_peak(sub) for sub in _inside(equation)), default=0)
            operations.append(
                _Operation(equation.primitive.name, known(equation.invars), known(equation.outvars), inside)
            )
            continue
        scope: dict[Any, Any] = {out: _Value(out.aval) for eqn in inner.eqns for out in eqn.outvars}
        for var, value in zip(inner.invars, equation.invars, strict=True):
            scope[var] = _Value(value.aval) if isinstance(value, Literal) else names.get(value, value)
        operations += _flat(inner, scope)[0]
        for var, value in zip(equation.outvars, inner.outvars, strict=True):
            names[var] = _Value(value.aval) if isinstance(value, Literal) else scope.get(value, value)
    return operations, known(jaxpr.outvars)


def _called(equation: Any) -> Any | None:
    """The trace that an operation merely calls."""
    if equation.primitive.name not in _CALLS:
        return None
    found = next(equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params)
    return getattr(found, "jaxpr", found)


def _inside(equation: Any) -> list[Any]:
    """The traces that a loop or a branch runs."""
    if equation.primitive.name not in ("while", "scan", "cond", "shard_map"):
        return []
    found = [equation.params.get(key) for key in ("body_jaxpr", "jaxpr")] + [*equation.params.get("branches", ())]
    return [getattr(one, "jaxpr", one) for one in found if one is not None]


def _bytes(value: Any) -> int:
    aval = value.aval
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
