"""Peak performance of chips, so that a measurement can be reported as a fraction of it."""

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
"""Part of JAX's ``device_kind`` -> dense 16-bit FLOP/s with float32 sums, from NVIDIA's data sheets."""

_TPUS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}


def peak_flops(kind: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device in a dtype; None without a data sheet value, as for CPUs and float32.

    ``kind`` is JAX's ``device_kind``, e.g. "NVIDIA H100 80GB HBM3".
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    if kind in _TPUS:
        return CHIPS[_TPUS[kind]].flops
    words = f" {kind.replace('-', ' ')} "
    return next((flops for name, flops in _DENSE_16_BIT.items() if f" {name} " in words), None)
