"""Casting blocks of weights. Half precision to bfloat16, the usual case on GPU and TPU, is done on the bits.

Through ``astype`` that cast is done number by number and takes longer than reading them from disk.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from canvax.types import HostArray

_HALF, _BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
_SINGLE = np.dtype(np.float32)


def cast_into(out: HostArray, block: HostArray) -> None:
    """``out[...] = block``, rounded to the nearest and to even; both of the same shape.

    Raises:
        FloatingPointError: a number is too large for ``out``, and ``np.errstate(over="raise")`` is set.
    """
    if block.dtype == _HALF and out.dtype == _BFLOAT16:
        _half_to_bfloat16(out.view(np.int16), block.view(np.int16))
    elif block.dtype == _BFLOAT16 and out.dtype == _HALF:
        out[...] = block.astype(_SINGLE)  # numpy says nothing of what does not fit when it casts from bfloat16 itself
    else:
        out[...] = block


def _half_to_bfloat16(out: HostArray, half: HostArray) -> None:
    """Bits of float16 -> bits of bfloat16.

    A normal number keeps its sign, loses three bits of its mantissa and has its exponent raised by 127 - 15. An
    arithmetic shift smears the sign over the bits that a longer exponent needs, from where it is masked. What rounds up
    carries into the exponent, as it must. Subnormal numbers, zeros, infinities and NaN go the slow way.
    """
    np.right_shift(half, 3, out=out)
    np.bitwise_and(out, 1, out=out)
    np.add(out, 3, out=out)
    np.add(out, half, out=out)
    np.right_shift(out, 3, out=out)
    np.bitwise_and(out, np.int16(-0x7001), out=out)  # 0x8FFF
    np.add(out, 0x3800, out=out)
    exponent = np.left_shift(half.view(np.uint16), 1)
    np.subtract(exponent, 0x0800, out=exponent)  # exponent 0 wraps around to the top, where 31 is
    odd = np.flatnonzero(exponent >= 0xF000)  # of several axes, np.nonzero takes longer than all the rest
    if odd.size:
        where = np.unravel_index(odd, half.shape)
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            out[where] = half[where].view(_HALF).astype(_BFLOAT16).view(np.int16)
