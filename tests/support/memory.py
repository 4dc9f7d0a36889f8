"""Memory of a long run of tests."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

import jax


def forget_programs() -> None:
    """Drop what JAX has compiled, and return the memory to the system: glibc would keep it."""
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)
