"""XLA's settings that can only be made in the environment, before JAX looks for devices."""

from __future__ import annotations

import os

LATE_FLATTENING = "--xla_backend_extra_options=xla_cpu_flatten_after_fusion"
"""XLA's CPU compiler copies a function for each of its calls. With this it does so after most of its passes: the
denoiser of SDXL, whose blocks are such calls, compiles in two thirds of the time. The programs are the same."""


def compile_faster() -> None:
    """Ask for :data:`LATE_FLATTENING`, for a process that is canvax's own; what the user has set stays."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {LATE_FLATTENING}".strip()


def without(flags: str) -> str:
    """``flags`` but for :data:`LATE_FLATTENING`."""
    return " ".join(flag for flag in flags.split() if flag != LATE_FLATTENING)
