"""Which platform a trace is compiled for, so that kernels are chosen by the target and not by the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_platform: ContextVar[str | None] = ContextVar("canvax_target_platform", default=None)


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Choose kernels for ``platform`` ("cpu", "gpu", "tpu") while tracing, whatever machine does the tracing."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def target_platform() -> str:
    """Platform that the current trace is compiled for; JAX's default backend outside :func:`compiling_for`."""
    return _platform.get() or jax.default_backend()
