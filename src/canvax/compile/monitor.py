"""Counts traces and compilations through JAX's own monitoring events, and knows the age of the process."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import jax.monitoring

_COMPILE = "/jax/core/compile/backend_compile_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_counts: Counter[str] = Counter()
_IMPORTED = time.perf_counter()


def _listen(event: str, duration_secs: float, **_: object) -> None:
    if event in (_COMPILE, _TRACE):
        _counts[event] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs that JAX's backend has compiled in this process since canvax was imported, canvax's or not.

    One that comes from JAX's persistent cache counts, one that canvax loads ready-made does not.
    """
    return _counts[_COMPILE]


def traces() -> int:
    """Functions that JAX has traced in this process since canvax was imported, canvax's or not."""
    return _counts[_TRACE]


def process_age() -> float:
    """Seconds since this process began; where the system does not tell, since this module was imported."""
    since_import = time.perf_counter() - _IMPORTED
    with suppress(OSError, AttributeError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after the machine did
        return max(since_import, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return since_import
