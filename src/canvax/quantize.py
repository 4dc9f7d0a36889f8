"""8-bit weights, half the memory of bfloat16 and a quarter of that of float32; and products of 8 bits.

Each output channel of a matrix or convolution has its scale. A weight is the scale times an integer from -127 to 127
(``int8``; Jacob et al. 2018, section 2.1, symmetric), or times an 8-bit float (``float8``, e4m3; Micikevicius et al.
2022, section 3). The scale multiplies the product, so weights are not rounded when they are used. Activations keep
their dtype.

With ``int8-w8a8`` and ``float8-w8a8`` the linear layers of the denoiser round their inputs to 8 bits, too, with a scale
for each token (Yao et al. 2022, section 4.1), and the hardware multiplies numbers of 8 bits, at up to twice the rate
of 16. Programs for other batch sizes or meshes differ in the last bits of activations, so some numbers are rounded to
the next of 8 bits, and images differ by about as much as from those of full precision. Convolutions and text encoders
have 8-bit weights only.

Small layers and layers that all activations pass through (the first and last convolution, the time and size
embeddings) are not quantised: specs declare them with ``canvax.params.whole``. Nor are biases, normalisations and the
autoencoder.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.call import Load
from canvax.errors import InputError
from canvax.params import Param, Params, Spec
from canvax.settings import check_setting
from canvax.types import DType, HostArray

KINDS: Mapping[str, str] = {
    "int8": "int8", "float8": "float8_e4m3fn", "int8-w8a8": "int8", "float8-w8a8": "float8_e4m3fn",
}  # fmt: skip
"""Kind of quantisation -> dtype of the weights."""

_PRODUCTS = "-w8a8"
"""Suffix of the kinds that quantise activations, too."""

SCALE = "scale"
"""Key of the scales, in the same layer as ``weight``."""

PRODUCT_SCALE = "product_scale"
"""The same key in layers that quantise their inputs, too."""


def scale_of(weight: str, names: Container[str]) -> str | None:
    """Return which of the dotted ``names`` is that of a weight's scales; None if the weight is not quantised.

    "a.b.weight" -> "a.b.scale".
    """
    keys = (weight.removesuffix("weight") + key for key in (SCALE, PRODUCT_SCALE))
    return next((key for key in keys if weight.endswith("weight") and key in names), None)


def compute_dtype(p: Params) -> DType:
    """Return the dtype that a network with parameters ``p`` computes in: the narrowest float of more than 8 bits.

    A few parameters of a network may be float32 whatever the model's dtype is (``Param.dtype``). A network without
    parameters computes in float32.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(p) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return min((dtype for dtype in dtypes if dtype.itemsize > 1), key=_width, default=jnp.dtype(jnp.float32))


def _width(dtype: DType) -> tuple[int, str]:
    return dtype.itemsize, dtype.name


def check_kind(kind: str | None, *, trained: bool = False) -> str | None:
    """Return ``kind`` if it is a key of ``KINDS`` or None. With ``trained`` gradients are needed.

    Raises:
        InputError: ``kind`` is unknown, or rounds activations, which then have no gradient.
    """
    check_setting(Load, "quantize", kind)
    if trained and kind is not None and kind.endswith(_PRODUCTS):
        raise InputError(
            "quantize", "rounds activations, which then have no gradient", cure="take int8 or float8", value=kind
        )
    return kind


def quantized_specs(specs: Mapping[str, Spec], kind: str | None) -> dict[str, Spec]:
    """Return the specs of a model's components with weights of ``kind``; unchanged for None."""

    def quantized(name: str, spec: Spec) -> Spec:
        if kind is None or name == "vae":
            return spec
        return quantized_spec(spec, kind.removesuffix(_PRODUCTS) if name.startswith("text_") else kind)

    return {name: quantized(name, spec) for name, spec in specs.items()}


def quantized_spec(spec: Spec, kind: str) -> Spec:
    """Return the spec of the same network with weights of ``kind`` and their scales."""

    def quantized(value: Any) -> Any:
        if isinstance(value, Param):
            return value
        inner = {key: quantized(part) for key, part in value.items()}
        weight = inner.get("weight")
        if isinstance(weight, Param) and weight.large:
            inner["weight"] = replace(weight, dtype=KINDS[kind])
            key = PRODUCT_SCALE if kind.endswith(_PRODUCTS) and weight.layout != "conv" else SCALE
            inner[key] = Param(weight.shape[-1:], weight.axes[-1:], init="ones", dtype="float32")
        return inner

    return quantized(spec)


def quantize(weight: HostArray, dtype: Any) -> tuple[HostArray, HostArray]:
    """Quantise ``weight`` [..., out] to ``dtype``, int8 or a float8.

    Returns:
        The weights in ``dtype`` and scales [out] float32, whose product is nearest to ``weight``.
    """
    dtype = jnp.dtype(dtype)
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(tuple(range(weight.ndim - 1))) / np.float32(most)
    scale[scale < np.finfo(np.float32).tiny] = 1.0  # dead channels become 0; their ratios would overflow
    divided = weight / scale
    return (np.rint(divided, out=divided) if whole else divided).astype(dtype), scale
