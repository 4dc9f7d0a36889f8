"""Weights of 8 bits: half the memory of bfloat16, a quarter of that of float32.

Each output channel of a matrix or convolution has a scale of its own. Its weights are that times a whole number from
-127 to 127 (``int8``; Jacob et al. 2018, section 2.1, symmetric), or times a number of 8 bits (``float8``, e4m3;
Micikevicius et al. 2022, section 3). The scale multiplies the product, so that no weight is rounded; activations keep
their dtype.

What is small, or what every number passes through (the first and last convolution, the time and size embeddings),
stays as it is, and so do biases, normalisations and the autoencoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, nearest
from canvax.params import Param, Params, Spec, flatten
from canvax.types import DType, HostArray

KINDS: Mapping[str, str] = {"int8": "int8", "float8": "float8_e4m3fn"}
"""What weights can be quantised to, and the dtype of it."""

SCALE = "scale"
"""Name of the scales, beside ``weight``."""

_WHOLE = frozenset(
    ("conv_in", "conv_out", "time_embedding", "add_embedding", "time_emb_proj", "text_projection", "embeddings")
)


def scale_of(weight: str) -> str:
    """Dotted name of the scales of a weight, "a.b.weight" -> "a.b.scale"."""
    return weight.removesuffix("weight") + SCALE


def compute_dtype(p: Params) -> DType:
    """The dtype that a network with parameters ``p`` computes in: that of its weights which are not of 8 bits."""
    return next(leaf.dtype for name, leaf in flatten(p) if name.endswith("weight") and leaf.dtype.itemsize > 1)


def check_kind(kind: str | None) -> str | None:
    """``kind`` if it is known, or None.

    Raises:
        InputError: it is not.
    """
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise InputError("quantize", kind, "is not known", nearest(str(kind), list(KINDS)))
    return kind


def quantized_specs(specs: Mapping[str, Spec], kind: str | None) -> dict[str, Spec]:
    """Specs of a model's components with weights of ``kind``; as they are for None."""
    return {name: spec if kind is None or name == "vae" else quantized_spec(spec, kind) for name, spec in specs.items()}


def quantized_spec(spec: Spec, kind: str) -> Spec:
    """The spec of the same network with weights of ``kind`` and their scales."""

    def one(name: str, value: Any) -> Any:
        if isinstance(value, Param) or name in _WHOLE:
            return value
        inner = {key: one(key, part) for key, part in value.items()}
        weight = inner.get("weight")
        if isinstance(weight, Param) and weight.layout != "plain":
            inner["weight"] = replace(weight, dtype=KINDS[kind])
            inner[SCALE] = Param(weight.shape[-1:], weight.axes[-1:], init="ones", dtype="float32")
        return inner

    return one("", spec)


def quantize(weight: HostArray, dtype: Any) -> tuple[HostArray, HostArray]:
    """Nearest weights in ``dtype`` and the scale of each output channel.

    Args:
        weight: [..., out], floating point.
        dtype: int8 or a float8.

    Returns:
        The weights in ``dtype`` and scales [out] float32, whose product is nearest to ``weight``.
    """
    dtype = jnp.dtype(dtype)
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(tuple(range(weight.ndim - 1))) / np.float32(most)
    scale[scale < np.finfo(np.float32).tiny] = 1.0  # channels that are dead become 0, where their ratios would overflow
    divided = weight / scale
    return (np.rint(divided, out=divided) if whole else divided).astype(dtype), scale
