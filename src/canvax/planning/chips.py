"""How fast chips can be at best, so that a figure can be told as a share of it."""

from __future__ import annotations

from canvax.planning.targets import CHIPS, GPUS

_DENSE_16_BIT = {
    "GH200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "A10": 125e12,
    "A30": 165e12,
    **{name.partition("-")[0].upper().replace("RTX", "RTX "): gpu.flops for name, gpu in GPUS.items()},
}
"""FLOP/s of NVIDIA's data sheets, dense, bfloat16 or float16 with sums in float32; part of JAX's ``device_kind``."""

_TPUS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}


def peak_flops(kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device in a dtype; None where the data sheet says nothing, as of CPUs and float32.

    Args:
        kind: JAX's ``device_kind``, such as "NVIDIA H100 80GB HBM3".
        dtype: of weights and activations.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    if kind in _TPUS:
        return CHIPS[_TPUS[kind]].flops
    words = f" {kind.replace('-', ' ')} "
    return next((flops for name, flops in _DENSE_16_BIT.items() if f" {name} " in words), None)
