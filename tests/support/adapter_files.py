"""Adapters with random numbers in every format, and what each does to a weight, in float64 from the equations alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from canvax.params import Param, flatten
from canvax.weights.formats import unet_rules
from canvax.weights.rules import Names

Arrays = dict[str, np.ndarray]
Delta = Callable[[np.ndarray], np.ndarray]
"""From a weight [out, in, kh, kw] float64 to what is added to it."""


class Made(NamedTuple):
    """The arrays of one module by the ends of their names, and what they do."""

    arrays: Arrays
    delta: Delta


Make = Callable[["Draw", tuple[int, ...]], Made]


class Draw:
    """Random arrays, small enough that the weights stay weights."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 0.3) -> np.ndarray:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def rank(self, most: int = 7) -> int:
        return int(self.rng.integers(2, most))

    def alpha(self) -> np.ndarray:
        return np.float32(self.rng.uniform(0.5, 6.0)).reshape(())


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def ratio(alpha: np.ndarray, rank: int) -> float:
    return float(alpha) / rank


def tucker(core: np.ndarray, outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """core [a, b, h, w], outer [a, out], inner [b, in] -> [out, in, h, w]."""
    return np.einsum("abhw,ao,bi->oihw", wide(core), wide(outer), wide(inner))


def lora(draw: Draw, shape: tuple[int, ...]) -> Made:
    out, into, *kernel = shape
    r, alpha = draw.rank(), draw.alpha()
    down, up = draw(r, into, *kernel), draw(out, r, *[1] * len(kernel))
    product = wide(up).reshape(out, r) @ wide(down).reshape(r, -1)
    return Made(
        {".lora_down.weight": down, ".lora_up.weight": up, ".alpha": alpha},
        lambda w: ratio(alpha, r) * product.reshape(w.shape),
    )


def lora_tucker(draw: Draw, shape: tuple[int, ...]) -> Made:
    out, into, *kernel = shape
    r, alpha = draw.rank(), draw.alpha()
    down, mid, up = draw(r, into, 1, 1), draw(r, r, *kernel), draw(out, r, 1, 1)
    return Made(
        {".lora_down.weight": down, ".lora_mid.weight": mid, ".lora_up.weight": up, ".alpha": alpha},
        lambda w: ratio(alpha, r) * tucker(mid, up[:, :, 0, 0].T, down[:, :, 0, 0]),
    )


def without_alpha(draw: Draw, shape: tuple[int, ...]) -> Made:
    made = lora(draw, shape)
    r, alpha = made.arrays[".lora_down.weight"].shape[0], made.arrays.pop(".alpha")
    return Made(made.arrays, lambda w: made.delta(w) / ratio(alpha, r))


def dora(axis: int, inner: Make = lora) -> Make:
    def make(draw: Draw, shape: tuple[int, ...]) -> Made:
        made = inner(draw, shape)
        sizes = [1] * len(shape)
        sizes[axis] = shape[axis]
        magnitude = np.abs(draw(*sizes)) + np.float32(0.5)

        def delta(w: np.ndarray) -> np.ndarray:
            merged = w + made.delta(w)
            norm = np.stack([np.linalg.norm(np.take(merged, i, axis)) for i in range(shape[axis])]).reshape(sizes)
            return wide(magnitude) * merged / norm - w

        return Made(made.arrays | {".dora_scale": magnitude}, delta)

    return make


def loha(draw: Draw, shape: tuple[int, ...]) -> Made:
    out, into, *kernel = shape
    r, alpha, size = draw.rank(), draw.alpha(), into * math.prod(kernel)
    a, b, c, d = draw(out, r), draw(r, size), draw(out, r), draw(r, size)
    return Made(
        {".hada_w1_a": a, ".hada_w1_b": b, ".hada_w2_a": c, ".hada_w2_b": d, ".alpha": alpha},
        lambda w: ratio(alpha, r) * ((wide(a) @ wide(b)) * (wide(c) @ wide(d))).reshape(w.shape),
    )


def loha_tucker(draw: Draw, shape: tuple[int, ...]) -> Made:
    out, into, *kernel = shape
    r, alpha = draw.rank(), draw.alpha()
    t1, a, b = draw(r, r, *kernel), draw(r, out), draw(r, into)
    t2, c, d = draw(r, r, *kernel), draw(r, out), draw(r, into)
    arrays = {".hada_t1": t1, ".hada_w1_a": a, ".hada_w1_b": b, ".hada_t2": t2, ".hada_w2_a": c, ".hada_w2_b": d}
    return Made(arrays | {".alpha": alpha}, lambda w: ratio(alpha, r) * tucker(t1, a, b) * tucker(t2, c, d))


def lokr(first: str, second: str) -> Callable[[Draw, tuple[int, ...]], Made]:
    """``first`` and ``second``: "whole", "product" or, of the second, "tucker"."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Made:
        out, into, *kernel = shape
        rows, columns = math.gcd(out, 4), math.gcd(into, 2)
        r, alpha, arrays = draw.rank(4), draw.alpha(), {}
        if first == "whole":
            one = wide(arrays.setdefault(".lokr_w1", draw(rows, columns)))
        else:
            arrays |= {".lokr_w1_a": draw(rows, r), ".lokr_w1_b": draw(r, columns)}
            one = wide(arrays[".lokr_w1_a"]) @ wide(arrays[".lokr_w1_b"])
        tall, broad = out // rows, into // columns
        if second == "whole":
            two = wide(arrays.setdefault(".lokr_w2", draw(tall, broad, *kernel)))
        elif second == "product":
            arrays |= {".lokr_w2_a": draw(tall, r), ".lokr_w2_b": draw(r, broad * math.prod(kernel))}
            two = wide(arrays[".lokr_w2_a"]) @ wide(arrays[".lokr_w2_b"])
        else:
            arrays |= {".lokr_t2": draw(r, r, *kernel), ".lokr_w2_a": draw(r, tall), ".lokr_w2_b": draw(r, broad)}
            two = tucker(arrays[".lokr_t2"], arrays[".lokr_w2_a"], arrays[".lokr_w2_b"])
        scale = 1.0 if first == second == "whole" else ratio(alpha, r)
        two = two.reshape(tall, broad, -1)
        product = np.stack([np.kron(one, two[..., k]) for k in range(two.shape[-1])], -1)
        return Made(arrays | {".alpha": alpha}, lambda w: scale * product.reshape(w.shape))

    return make


def full(draw: Draw, shape: tuple[int, ...]) -> Made:
    diff = draw(*shape)
    return Made({".diff": diff}, lambda w: wide(diff))


def replaced(draw: Draw, shape: tuple[int, ...]) -> Made:
    weight = draw(*shape)
    return Made({".set_weight": weight}, lambda w: wide(weight) - w)


def kohya(component: str, module: str, *, xl: bool = False) -> str:
    prefix = {"unet": "lora_unet", "text_encoder": "lora_te1" if xl else "lora_te", "text_encoder_2": "lora_te2"}
    return f"{prefix[component]}_{module.replace('.', '_')}"


def ldm_name(module: str, each: int) -> str:
    """The name in the original code of a layer of a UNet whose levels have ``each`` blocks, sampler included."""
    return Names(unet_rules([f"down_blocks.0.resnets.{each - 2}.conv1", module])).external(module)[0][0]


def kohya_ldm(component: str, module: str, *, each: int) -> str:
    return kohya(component, ldm_name(module, each) if component == "unet" else module, xl=True)


def layers(specs: Mapping[str, Any]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Component and module of every linear map and convolution, and its shape in a checkpoint."""
    found = {}
    for component, spec in specs.items():
        for name, param in flatten(spec):
            if name.endswith(".weight") and param.layout != "plain" and component != "vae":
                found[component, name.removesuffix(".weight")] = param.checkpoint_shapes[0]
    return found


def stored(param: Param, leaf: Any) -> np.ndarray:
    """A parameter as a checkpoint stores it, float64."""
    return wide(param.to_checkpoint(np.asarray(leaf).reshape(param.shape)))


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
    metadata = metadata or {"format": "pt"}
    save_file({name: np.array(array, order="C") for name, array in arrays.items()}, path, dict(metadata))
    return path
