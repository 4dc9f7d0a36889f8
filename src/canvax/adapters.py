"""The changes of a weight by adapters: LoRA and its relatives, each relative to the weight as it was trained.

An adapter changes a weight W, as a checkpoint stores it (out, in, kh, kw), to W + D(W). Several are added up, each with
its weight: W + sum of w_i D_i(W). So neither their order nor adapters merged before matter; a weight of 0 changes
nothing, and 1 is the rule of the paper.

    LoRA       D = a/r up down                 Hu et al. 2021; of convolutions (LoCon), with a core (Tucker)
    LoHa       D = a/r (w1a w1b) * (w2a w2b)   Hyeon-Woo et al. 2022 (FedPara)
    LoKr       D = a/r w1 (x) w2               Edalati et al. 2022 (KronA)
    DoRA       W + D = m (W + D') / |W + D'|   Liu et al. 2024, over any of these three
    full       D itself, or W + D              for biases and normalisations as well
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from canvax.types import HostArray

Shape = tuple[int, ...]
Arrays = Mapping[str, HostArray]
Shapes = Mapping[str, Shape]


class Window(NamedTuple):
    """The part of a stack of layers that is one weight.

    Attributes:
        shape: shape of the stack.
        axis: axis along which layers are stacked.
        begin: begin of the weight along that axis.
        end: end of the weight along that axis, exclusive.
        swapped: True if the weight has the halves of the stack in the other order.
    """

    shape: Shape
    axis: int
    begin: int
    end: int
    swapped: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """The change of one weight by an adapter.

    Attributes:
        kind: a key of ``KINDS``.
        arrays: its numbers by their roles in ``KINDS``, float32.
        scale: factor of D, alpha / rank.
        window: part of the stack of layers whose D a LoKr has, or None.
    """

    kind: str
    arrays: Arrays
    scale: float = 1.0
    window: Window | None = None


class AdapterKind(NamedTuple):
    """A kind of adapter.

    Attributes:
        name: name for people.
        needed: roles that its arrays must have.
        optional: roles that they may have.
        shapes: shapes of the arrays and of the weight -> the shapes that the arrays must have.
        change: function that returns D of a weight [out, in, ...] float32.
    """

    name: str
    needed: frozenset[str]
    optional: frozenset[str]
    shapes: Callable[[Shapes, Shape], dict[str, Shape]]
    change: Callable[[HostArray, Part], HostArray]


DECOMPOSED = ("dora_scale", "magnitude")
"""Roles of DoRA's magnitudes: those with the axis that they belong to, and those that are always of the outputs."""


def change(weight: HostArray, part: Part) -> HostArray:
    """Return D, in the shape of a weight [out, in, ...] float32, for an adapter's weight of 1."""
    delta = KINDS[part.kind].change(weight, part).reshape(weight.shape)
    if "scalar" in part.arrays:
        delta = delta * part.arrays["scalar"].reshape(())
    for role in DECOMPOSED:
        if role in part.arrays:
            return decomposed(weight, delta, part.arrays[role], outputs=role == "magnitude")
    return delta


def decomposed(weight: HostArray, added: HostArray, magnitude: HostArray, *, outputs: bool = False) -> HostArray:
    """Return DoRA's change, which brings ``weight + added`` to the ``magnitude`` of each output, or of each input.

    Magnitudes of outputs have the shape (out, 1, ...), in PEFT (out) or (1, out, 1, 1); those of inputs (1, in, ...).
    """
    merged = weight + added
    axis = 0 if outputs or magnitude.ndim < 2 or magnitude.shape[0] != 1 or weight.shape[0] == 1 else 1
    others = tuple(i for i in range(weight.ndim) if i != axis)
    norm = np.sqrt(np.square(merged, dtype=np.float64).sum(others, keepdims=True))
    ratio = np.divide(magnitude.reshape(norm.shape), norm, out=np.zeros_like(norm), where=norm > 0)
    return merged * ratio.astype(np.float32) - weight


class NotLowRank(ValueError):
    """A change of a weight that is not a product of two small matrices."""


def low_rank(part: Part, shape: Shape) -> tuple[HostArray, HostArray]:
    """Return exact factors of D, ``down`` [r, in, kh, kw] and ``up`` [out, r], for a weight of ``shape``.

    Raises:
        NotLowRank: D depends on the weight, or is not only made of products.
    """
    factors = _FACTORS.get(part.kind)
    if part.window is not None:
        raise NotLowRank(f"{KINDS[part.kind].name} of several layers at once is no low-rank change of each")
    if factors is None or any(role in part.arrays for role in DECOMPOSED):
        raise NotLowRank(f"{KINDS[part.kind].name}{' with DoRA' if factors else ''} is no low-rank change")
    down, up = factors(part, shape)
    scale = part.scale * float(part.arrays["scalar"].reshape(())) if "scalar" in part.arrays else part.scale
    return down.reshape(-1, *shape[1:]), up if scale == 1 else up * np.float32(scale)


def _lora_factors(part: Part, shape: Shape) -> tuple[HostArray, HostArray]:
    up, down = _matrix(part.arrays["up"]), _matrix(part.arrays["down"])
    if "mid" in part.arrays:  # sum over b of mid[a, b, kh, kw] down[b, in]
        mid = part.arrays["mid"]
        down = np.einsum("abk,bi->aik", mid.reshape(*mid.shape[:2], -1), down, optimize=True)
    return _matrix(down), up


def _loha_factors(part: Part, shape: Shape) -> tuple[HostArray, HostArray]:
    """Factor (A B) * (C D) = (A and C by columns) (B and D by rows), of rank r1 r2 (Hyeon-Woo et al. 2022, prop. 1)."""
    if {"hada_t1", "hada_t2"} & part.arrays.keys():
        raise NotLowRank("LoHa with a core is no low-rank change")
    a, b, c, d = (_matrix(part.arrays[f"hada_w{i}_{side}"]) for i in (1, 2) for side in "ab")
    up = np.einsum("or,os->ors", a, c).reshape(len(a), -1)
    return np.einsum("ri,si->rsi", b, d).reshape(up.shape[1], -1), up


def _lokr_factors(part: Part, shape: Shape) -> tuple[HostArray, HostArray]:
    """Factor (A B) (x) (C D) = (A (x) C) (B (x) D), of rank r1 r2."""
    (a, b), (c, d) = (_split(part.arrays, f"w{i}", f"t{i}") for i in (1, 2))
    up = np.einsum("ar,cs->acrs", a, c).reshape(shape[0], -1)
    kernel = math.prod(shape[2:])
    down = np.einsum("rb,sdk->rsbdk", b, d.reshape(len(d), -1, kernel), optimize=True)
    return down.reshape(up.shape[1], -1), up


def _split(arrays: Arrays, name: str, core: str) -> tuple[HostArray, HostArray]:
    """Return a factor [n, m] as a product; a whole one is multiplied by the identity on its smaller side."""
    if name not in arrays and core not in arrays:
        return _matrix(arrays[f"{name}_a"]), _matrix(arrays[f"{name}_b"])
    whole = _matrix(_factor(arrays, name, core))
    rows, columns = whole.shape
    identity = np.eye(min(rows, columns), dtype=np.float32)
    return (identity, whole) if rows <= columns else (whole, identity)


_FACTORS: Mapping[str, Callable[[Part, Shape], tuple[HostArray, HostArray]]] = {
    "lora": _lora_factors,
    "loha": _loha_factors,
    "lokr": _lokr_factors,
}


def faults(kind: str, shapes: Shapes, weight: Shape) -> list[str]:
    """Return the faults in the shapes of an adapter's arrays for a weight of shape (out, in, kh, kw)."""
    try:
        wanted = KINDS[kind].shapes(shapes, weight)
    except (IndexError, ValueError):
        return [f"{role} is {shape}" for role, shape in shapes.items()]
    wrong = [
        f"{role} is {shapes[role]}, not {shape}" for role, shape in wanted.items() if not _alike(shapes[role], shape)
    ]
    out, into = (*weight, *weight)[:2]
    if (shape := shapes.get("dora_scale")) is not None:
        of_inputs = len(shape) > 1 and shape[0] == 1 != out
        if math.prod(shape) != (into if of_inputs else out):
            wrong.append(f"dora_scale is {shape}, not {(out, 1)} or {(1, into)}")
    if (shape := shapes.get("magnitude")) is not None and math.prod(shape) != out:
        wrong.append(f"the magnitude is {shape}, not {(out,)}")
    return wrong


def rank(kind: str, shapes: Shapes, weight: Shape) -> int:
    """Return the rank that alpha is divided by; 0 if there is none, and alpha has no meaning."""
    if kind == "lora":
        return shapes["down"][0]
    if kind == "loha":
        return shapes["hada_w1_b"][0]
    if kind == "lokr":
        return next((shapes[role][0] for role in ("w2_b", "w1_b") if role in shapes), 0)
    return 0


def _alike(shape: Shape, wanted: Shape) -> bool:
    """Return whether shapes are equal, apart from axes of length 1 at the end, and a kernel as one axis."""

    def bare(shape: Shape) -> Shape:
        while shape and shape[-1] == 1:
            shape = shape[:-1]
        return shape

    flat = (wanted[0], math.prod(wanted[1:])) if len(wanted) > 2 else wanted
    return bare(shape) == bare(wanted) or bare(shape) == bare(flat)


def _matrix(array: HostArray) -> HostArray:
    """Reshape [n, ...] to [n, product of the rest]."""
    return array.reshape(array.shape[0], -1)


def _core(core: HostArray, outer: HostArray, inner: HostArray) -> HostArray:
    """Multiply a core [a, b, kh, kw] by [a, out] and [b, in], to [out, in, kh, kw]."""
    a, b, *kernel = core.shape
    half = _matrix(outer).T @ core.reshape(a, -1)  # [out, b kh kw]
    half = half.reshape(-1, b, math.prod(kernel))
    whole = np.matmul(_matrix(inner).T, half)  # [out, in, kh kw]
    return whole.reshape(*whole.shape[:2], *kernel)


def _lora_shapes(s: Shapes, weight: Shape) -> dict[str, Shape]:
    out, into, *kernel = weight
    if "mid" not in s:
        r = s["down"][0]
        return {"up": (out, r), "down": (r, into, *kernel)}
    first, second = s["mid"][:2]
    return {"up": (out, first), "mid": (first, second, *kernel), "down": (second, into)}


def _lora(weight: HostArray, part: Part) -> HostArray:
    up, down = _matrix(part.arrays["up"]), _matrix(part.arrays["down"])
    if "mid" in part.arrays:
        return _core(part.arrays["mid"], up.T * np.float32(part.scale), down)
    # Transposed, as the weight is in memory: what is added to it then lies as it does.
    return (np.ascontiguousarray(down.T) @ np.ascontiguousarray(up.T * np.float32(part.scale))).T


def _loha_shapes(s: Shapes, weight: Shape) -> dict[str, Shape]:
    out, into, *kernel = weight
    shapes: dict[str, Shape] = {}
    for i in ("1", "2"):
        r = s[f"hada_w{i}_b"][0]
        if f"hada_t{i}" in s:
            shapes |= {f"hada_t{i}": (r, r, *kernel), f"hada_w{i}_a": (r, out), f"hada_w{i}_b": (r, into)}
        else:
            shapes |= {f"hada_w{i}_a": (out, r), f"hada_w{i}_b": (r, into, *kernel)}
    return shapes


def _loha(weight: HostArray, part: Part) -> HostArray:
    first, second = (_factor(part.arrays, f"hada_w{i}", f"hada_t{i}") for i in (1, 2))
    return (first * np.float32(part.scale)).reshape(weight.shape) * second.reshape(weight.shape)


def _factor(arrays: Arrays, name: str, core: str) -> HostArray:
    """Compute a factor that is stored whole, as a product, or as a product around a core."""
    if name in arrays:
        return arrays[name]
    a, b = arrays[f"{name}_a"], arrays[f"{name}_b"]
    return _core(arrays[core], a, b) if core in arrays else _matrix(a) @ _matrix(b)


def _lokr_shapes(s: Shapes, weight: Shape) -> dict[str, Shape]:
    out, into, *kernel = weight
    shapes: dict[str, Shape] = {}
    if "w1" in s:
        rows, columns = s["w1"][:2]
        shapes["w1"] = (rows, columns)
    else:
        (rows, r), columns = s["w1_a"][:2], s["w1_b"][1]
        shapes |= {"w1_a": (rows, r), "w1_b": (r, columns)}
    if not rows or not columns or out % rows or into % columns:
        return shapes | {next(iter(shapes)): (out, into)}
    rows, columns = out // rows, into // columns
    if "w2" in s:
        shapes["w2"] = (rows, columns, *kernel)
    elif "t2" in s:
        r = s["w2_b"][0]
        shapes |= {"t2": (r, r, *kernel), "w2_a": (r, rows), "w2_b": (r, columns)}
    else:
        r = s["w2_b"][0]
        shapes |= {"w2_a": (rows, r), "w2_b": (r, columns, *kernel)}
    return shapes


def _lokr(weight: HostArray, part: Part) -> HostArray:
    first = _matrix(_factor(part.arrays, "w1", "t1")) * np.float32(part.scale)
    out, into = part.window.shape if part.window else weight.shape[:2]
    rows, columns = out // first.shape[0], into // first.shape[1]
    second = _factor(part.arrays, "w2", "t2").reshape(rows, columns, -1)
    if part.window is None:
        return np.einsum("ab,cdk->acbdk", first, second, optimize=True)
    _, axis, begin, end, swapped = part.window
    size = second.shape[axis]
    low = begin // size  # the blocks that the weight is in, and of these the weight
    blocks = np.kron(first.take(range(low, -(-end // size)), axis), second[..., 0])
    whole = blocks.take(range(begin - low * size, end - low * size), axis)
    return np.roll(whole, len(whole) // 2, axis=0) if swapped else whole


def _one_shape(role: str) -> Callable[[Shapes, Shape], dict[str, Shape]]:
    return lambda s, weight: {role: weight}


def _full(weight: HostArray, part: Part) -> HostArray:
    return part.arrays["diff"].reshape(weight.shape) * np.float32(part.scale)


def _set(weight: HostArray, part: Part) -> HostArray:
    return part.arrays["set"].reshape(weight.shape) - weight


def _kind(name: str, needed: str, optional: str, shapes: Callable, change: Callable) -> AdapterKind:
    return AdapterKind(name, frozenset(needed.split()), frozenset(optional.split()), shapes, change)


_DORA = "alpha scalar dora_scale magnitude"

KINDS: Mapping[str, AdapterKind] = {
    "lora": _kind("LoRA", "up down", f"mid {_DORA}", _lora_shapes, _lora),
    "loha": _kind("LoHa", "hada_w1_a hada_w1_b hada_w2_a hada_w2_b", f"hada_t1 hada_t2 {_DORA}", _loha_shapes, _loha),
    "lokr": _kind("LoKr", "", f"w1 w1_a w1_b w2 w2_a w2_b t2 {_DORA}", _lokr_shapes, _lokr),
    "full": _kind("full", "diff", "alpha", _one_shape("diff"), _full),
    "set": _kind("full", "set", "", _one_shape("set"), _set),
}
"""All kinds of adapters. LoKr's two factors are each whole or a product."""


def kind_of(roles: frozenset[str]) -> str | None:
    """Return the kind of adapter whose arrays have these roles, or None."""
    for name, kind in KINDS.items():
        if name != "lokr" and kind.needed <= roles <= kind.needed | kind.optional:
            return name
    kind = KINDS["lokr"]
    if roles <= kind.optional and all((f"w{i}" in roles) != ({f"w{i}_a", f"w{i}_b"} <= roles) for i in (1, 2)):
        return "lokr"
    return None
