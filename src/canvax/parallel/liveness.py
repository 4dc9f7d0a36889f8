"""How much memory a program will take beside its arguments, from its trace alone.

A trace lists every operation in order. Compilers do not store what is cheap to compute on the way to its consumer, so
an elementwise result counts only where something needs it whole: a matrix product, a convolution, a loop, or several
consumers for which keeping it is cheaper than keeping what it is made of. With that, the largest sum of arrays alive at
once is an estimate of the compiler's own figure, in the time of a trace (seconds, where compiling takes minutes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

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
    return _peak(jax.make_jaxpr(function)(*arguments).jaxpr)


@dataclass(frozen=True)
class _Operation:
    name: str
    inputs: list[Any]
    outputs: list[Any]
    inside: int
    """Peak of the programs inside, for a loop or a branch."""


def _peak(jaxpr: Any) -> int:
    operations, results = _flat(jaxpr)
    stored = _stored(operations, results)
    roots: dict[Any, frozenset[Any]] = {}
    last: dict[Any, int] = {}
    for i, operation in enumerate(operations):
        beneath = frozenset().union(*(roots.get(one, frozenset()) for one in operation.inputs))
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
    beneath: dict[Any, int] = {}
    roots: dict[Any, frozenset[Any]] = {}
    for operation in operations:
        below = frozenset().union(*(roots.get(one, frozenset()) for one in operation.inputs))
        for out in operation.outputs:
            if out not in stored and uses[out] > 1 and sum(map(_bytes, below)) > _bytes(out):
                stored.add(out)
            roots[out] = frozenset([out]) if out in stored else below
    del beneath
    return stored


def _flat(jaxpr: Any, names: dict[Any, Any] | None = None) -> tuple[list[_Operation], list[Any]]:
    """The operations of a trace with its calls written out, and its results; literals are left out."""
    names = {} if names is None else names

    def known(values: Sequence[Any]) -> list[Any]:
        return [names.get(value, value) for value in values if not hasattr(value, "val")]

    operations: list[_Operation] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr") or equation.params["fun_jaxpr"]
            inner = getattr(inner, "jaxpr", inner)
            scope = {
                var: names.get(value, value)
                for var, value in zip(inner.invars, equation.invars, strict=True)
                if not hasattr(value, "val")
            }
            fresh = {var: object_of(var) for eqn in inner.eqns for var in eqn.outvars}
            scope |= fresh
            more, outputs = _flat(inner, scope)
            operations += more
            for var, value in zip(equation.outvars, inner.outvars, strict=True):
                if not hasattr(value, "val"):
                    names[var] = scope.get(value, value)
            del outputs
            continue
        inside = max((_peak(getattr(sub, "jaxpr", sub)) for sub in _inside(equation)), default=0)
        operations.append(_Operation(name, known(equation.invars), [names.get(v, v) for v in equation.outvars], inside))
    return operations, known(jaxpr.outvars)


class object_of:
    """A value of a call that is written out; the same trace may be called more than once."""

    def __init__(self, var: Any) -> None:
        self.aval = var.aval


def _inside(equation: Any) -> list[Any]:
    if equation.primitive.name == "pallas_call":
        return []
    found = []
    for key in ("body_jaxpr", "jaxpr", "branches"):
        value = equation.params.get(key)
        found += list(value) if isinstance(value, tuple | list) else [value] if value is not None else []
    return found


def _bytes(value: Any) -> int:
    aval = value.aval
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    size = 1
    for length in aval.shape:
        size *= length
    return size * aval.dtype.itemsize
