"""What a trace is compiled for: the platform, so that kernels are chosen by the target and not by the host, and the
mesh, so that a kernel which XLA cannot split by itself can be told how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from canvax.errors import warn
from canvax.originals import replaced


@dataclass(frozen=True)
class _Target:
    platform: str
    mesh: Mesh | None
    kind: str
    capability: str
    replaced: tuple[Any, ...] = ()


_target = jax.make_user_context(None)
"""The current ``_Target``. JAX counts it among what a trace depends on: none is taken for another target."""


@contextmanager
def compiling_for(platform: str, mesh: Mesh | None = None, kind: str = "", capability: str = "") -> Iterator[None]:
    """Choose kernels for ``platform`` ("cpu", "gpu", "tpu") while tracing, whatever machine does the tracing.

    For "none" everything is computed as models are written down, to count their work.
    ``mesh`` is given where XLA splits the program over several devices; ``kind`` is JAX's ``device_kind``, and
    ``capability`` its ``compute_capability`` of a GPU.
    """
    with _target(_Target(platform, mesh, kind, capability, replaced())):
        yield


def plain_kernels() -> AbstractContextManager[None]:
    """Compute as the models are written down, without kernels of any platform's own.

    Slower, but forward-mode derivatives (``jax.jvp``) pass.
    """
    return compiling_for("none")


def jitted(function: Callable[..., Any], *, static_argnames: str | Sequence[str]) -> Callable[..., Any]:
    """``jax.jit``, whose traces are of canvax's code as it is at each call; static arguments are given by keyword."""

    def inside(code: Any, *arrays: Any, **keywords: Any) -> Any:
        del code
        return function(*arrays, **keywords)

    call = jax.jit(inside, static_argnums=0, static_argnames=static_argnames)
    return lambda *arrays, **keywords: call(replaced(), *arrays, **keywords)


def traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """The jaxpr of ``function`` for the current target."""
    return jax.make_jaxpr(function)(*arguments).jaxpr


def compiling_on(mesh: Mesh, *, split: bool = True, fused: bool = True) -> AbstractContextManager[None]:
    """``compiling_for`` the devices of ``mesh``; without ``split`` the trace is of one device's part.

    Without ``fused`` nothing is said of what a GPU can do, and no kernel is chosen that not all of them have.
    """
    device = mesh.devices.flat[0]
    capability = _capability(device) if fused else ""
    return compiling_for(device.platform, mesh if split else None, device.device_kind, capability)


def _capability(device: Any) -> str:
    return str(getattr(device, "compute_capability", ""))


OPTIONS: Mapping[str, Mapping[str, str | bool]] = {
    # XLA makes one matmul of those of queries, keys and values. Of its result each is then copied out in every step,
    # and the weights side by side are a second copy of theirs: 4 GB to move and 0.4 GiB for SDXL at 1024 x 1024.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": "0"},
}
"""Settings of XLA that a program is compiled with, by platform."""


def compiled_on(mesh: Mesh, function: Callable[..., Any], *arguments: Any, **how: Any) -> Compiled:
    """The program of ``compile_or_fall_back``."""
    return compile_or_fall_back(mesh, function, *arguments, **how)[0]


def compile_or_fall_back(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any, split: bool = True, **how: Any
) -> tuple[Compiled, bool]:
    """``function`` compiled for the devices of ``mesh``, and whether it is the program that was wanted.

    A GPU whose cuDNN is missing, or has no attention for it, gets a program without: slower, but it works. It may not
    be stored for other processes, whose cuDNN may have been mended. ``how`` are arguments of ``jax.jit``.
    """

    def compiled(*, fused: bool) -> Compiled:
        with compiling_on(mesh, split=split, fused=fused):
            lowered = jax.jit(function, **how).lower(*arguments)
            return lowered.compile(dict(OPTIONS.get(target_platform(), {})))

    try:
        return compiled(fused=True), True
    except RuntimeError as error:  # JAX's and XLA's own are kinds of it
        if not re.search("cud(a_d)?nn", str(error), re.IGNORECASE):
            raise
        reason = str(error).splitlines()[0][:200]
        warn(f"cuDNN's attention cannot be used here, and what is used in its place is slower ({reason})")
    return compiled(fused=False), False


def target_platform() -> str:
    """Platform that the current trace is compiled for; JAX's default backend outside ``compiling_for``."""
    target = _target.value
    return target.platform if target else jax.default_backend()


def target_kind() -> str:
    """``device_kind`` of what is compiled for, such as "TPU v3"; "" where ``compiling_for`` was not told."""
    target = _target.value
    return target.kind if target else jax.devices()[0].device_kind


def target_capability() -> float:
    """Compute capability of the NVIDIA GPU that is compiled for, such as 9.0; 0.0 for anything else."""
    target = _target.value
    return _number(target.capability if target else _capability(jax.devices()[0]))


def half_of(device: Any) -> str:
    """The dtype of 16 bits that a TPU or GPU multiplies fast."""
    return fast_half(_number(_capability(device)))


def fast_half(capability: float) -> str:
    """Likewise of a compute capability, 0.0 for what is no NVIDIA GPU: before Ampere (8.0) they have no bfloat16."""
    return "float16" if 0 < capability < 8 else "bfloat16"


def _number(capability: str) -> float:
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0  # AMD's are names: "gfx942"


def target_mesh() -> Mesh | None:
    """Devices that XLA splits the current trace over, or None: one device, or the trace is of one device's part."""
    target = _target.value
    return target.mesh if target and target.mesh is not None and target.mesh.size > 1 else None


def on_each_device(kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``kernel``, which XLA cannot split by itself, run by each device of ``target_mesh`` on its own part."""
    mesh = target_mesh()
    if mesh is None:
        return kernel
    return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def weight_shards() -> int:
    """How many devices share the weights of one copy of the model: the size of ``model``."""
    return _size_of("model")


def batch_shards() -> int | None:
    """How many devices share the batch of the current trace: the size of ``data``; None where nobody has said."""
    return _size_of("data") if _target.value else None


def _size_of(axis: str) -> int:
    mesh = target_mesh()
    return 1 if mesh is None else mesh.shape.get(axis, 1)
