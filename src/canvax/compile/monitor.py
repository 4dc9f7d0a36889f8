"""Count traces and compilations through JAX's own monitoring events, and tell the age of the process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import jax.monitoring


@dataclass
class Counts:
    """Counts of JAX's work.

    Attributes:
        compilations: programs that its backend compiled, or that came from JAX's persistent cache.
        traces: functions that it traced.
        cache_hits: programs that came from JAX's persistent cache.
    """

    compilations: int = 0
    traces: int = 0
    cache_hits: int = 0


_EVENTS = {
    "/jax/core/compile/backend_compile_duration": "compilations",
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/compilation_cache/cache_hits": "cache_hits",
}
_IMPORTED = time.perf_counter()
_process = Counts()
_scopes: ContextVar[tuple[Counts, ...]] = ContextVar("canvax_counts", default=())
_lock = threading.Lock()  # threads that share a scope


def _count(event: str, *_: object, **__: object) -> None:
    name = _EVENTS.get(event)
    if name:
        with _lock:
            for counts in (_process, *_scopes.get()):
                setattr(counts, name, getattr(counts, name) + 1)


jax.monitoring.register_event_duration_secs_listener(_count)
jax.monitoring.register_event_listener(_count)


@contextmanager
def counting() -> Iterator[Counts]:
    """Count in this block alone: in its thread, and in threads that were started in a copy of its context."""
    counts = Counts()
    token = _scopes.set((*_scopes.get(), counts))
    try:
        yield counts
    finally:
        _scopes.reset(token)


def compilations() -> int:
    """Return the number of programs, in any thread, that JAX has compiled since canvax was imported.

    Programs of other code and of JAX's persistent cache count; programs that canvax's cache holds do not.
    """
    return _process.compilations


def traces() -> int:
    """Return the number of functions, in any thread, that JAX has traced since canvax was imported."""
    return _process.traces


def process_age() -> float:
    """Return the seconds since this process began or, on systems that do not tell, since this module was imported."""
    since_import = time.perf_counter() - _IMPORTED
    with suppress(OSError, AttributeError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after the machine did
        return max(since_import, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return since_import
