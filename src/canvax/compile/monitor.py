"""Counts compilations through JAX's own monitoring events."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **_: object) -> None:
    global _count
    if event == _EVENT:
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs that JAX's backend has compiled in this process since canvax was imported, canvax's or not."""
    return _count
