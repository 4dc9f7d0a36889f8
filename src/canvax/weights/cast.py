"""Casts blocks of weights; 16-bit floats, as most checkpoints have, by table lookup.

There are only 65,536 such numbers. ``astype`` takes twice as long to cast them to float32, and longer than reading from
disk to cast them to bfloat16.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from canvax.errors import InputError, nearest, shown
from canvax.types import DType, HostArray

_HALF, _BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
_SINGLE = np.dtype(np.float32)


def cast_into(out: HostArray, block: HostArray) -> None:
    """Assign ``out[...] = block``, rounded to nearest even; both have the same shape.

    Raises:
        FloatingPointError: a number is too large for ``out``, and ``np.errstate(over="raise")`` is set.
    """
    if block.dtype == _HALF and out.dtype in (_BFLOAT16, _SINGLE):
        np.take(_of_half(out.dtype), block.view(np.uint16), out=out, mode="wrap")  # "raise" would buffer the result
    elif block.dtype == _BFLOAT16 and out.dtype == _HALF:
        out[...] = block.astype(_SINGLE)  # numpy does not report overflow when it casts from bfloat16
    else:
        out[...] = block


@cache
def _of_half(dtype: np.dtype) -> HostArray:
    """Return every float16, indexed by its bits, as ``dtype`` [65536]; all of them fit into it."""
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return np.arange(1 << 16, dtype=np.uint16).view(_HALF).astype(dtype)


_DTYPES = {
    "float32": "float32", "fp32": "float32", "f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16",
}  # fmt: skip


def parse_dtype(dtype: DType, argument: str = "dtype", *, quantizes: bool = False) -> DType:
    """Return a floating-point dtype from a dtype or any of its usual names.

    With ``quantizes``, the error for 8-bit dtypes suggests the argument ``quantize``.

    Raises:
        InputError: not float32, bfloat16 or float16.
    """
    written = isinstance(dtype, str) or type(dtype).__module__ == "torch"
    name = str(dtype).lower().removeprefix("torch.").removeprefix("jnp.") if written else None
    if name is None:
        with suppress(TypeError):
            if not isinstance(dtype, np.ndarray | jax.Array):  # JAX accepts its own dtypes
                name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        name = shown(dtype) if name is None else name
        small = re.fullmatch(r"(u?int|fp|float|f|q|nf)_?[48].*", str(name))
        cure = nearest(str(name), list(dict.fromkeys(_DTYPES.values())))
        cure = "{quantize='int8'} or 'float8' keeps large weights in 8 bits" if small and quantizes else cure
        raise InputError(argument, "is not supported", cure=cure, value=dtype)
    return jnp.dtype(_DTYPES[name])
