"""What a trace is compiled for: the platform, so that kernels are chosen by the target and not by the host, and the
mesh, so that a kernel which XLA cannot split by itself can be told how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import Mesh

_platform: ContextVar[str | None] = ContextVar("canvax_target_platform", default=None)
_mesh: ContextVar[Mesh | None] = ContextVar("canvax_target_mesh", default=None)
_kind: ContextVar[str] = ContextVar("canvax_target_kind", default="")


@contextmanager
def compiling_for(platform: str, mesh: Mesh | None = None, kind: str = "") -> Iterator[None]:
    """Choose kernels for ``platform`` ("cpu", "gpu", "tpu") while tracing, whatever machine does the tracing.

    For "none" everything is computed as models are written down, to count their work.
    ``mesh`` is given where XLA splits the program over several devices; ``kind`` is JAX's ``device_kind``.
    """
    tokens = _platform.set(platform), _mesh.set(mesh), _kind.set(kind)
    try:
        yield
    finally:
        _platform.reset(tokens[0])
        _mesh.reset(tokens[1])
        _kind.reset(tokens[2])


def traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """The jaxpr of ``function`` for the current target.

    Of a function, not of a new one that calls it, JAX would give the trace that it has, for whichever target that was.
    """
    return jax.make_jaxpr(lambda *arguments: function(*arguments))(*arguments).jaxpr


def compiling_on(mesh: Mesh, *, split: bool = True) -> AbstractContextManager[None]:
    """:func:`compiling_for` the devices of ``mesh``; without ``split`` the trace is of one device's part."""
    device = mesh.devices.flat[0]
    return compiling_for(device.platform, mesh if split else None, device.device_kind)


def target_platform() -> str:
    """Platform that the current trace is compiled for; JAX's default backend outside :func:`compiling_for`."""
    return _platform.get() or jax.default_backend()


def target_kind() -> str:
    """``device_kind`` of what is compiled for, such as "TPU v3"; "" where :func:`compiling_for` was not told."""
    return _kind.get() if _platform.get() else jax.devices()[0].device_kind


def target_mesh() -> Mesh | None:
    """Devices that XLA splits the current trace over, or None: one device, or the trace is of one device's part."""
    mesh = _mesh.get()
    return mesh if mesh is not None and mesh.size > 1 else None


def on_each_device(kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``kernel``, which XLA cannot split by itself, run by each device of :func:`target_mesh` on its own part."""
    mesh = target_mesh()
    if mesh is None:
        return kernel
    return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def weight_shards() -> int:
    """How many devices share the weights of one copy of the model: the size of ``model``."""
    mesh = target_mesh()
    return 1 if mesh is None else mesh.shape.get("model", 1)
