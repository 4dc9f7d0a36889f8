"""The target of a trace: the platform, which determines kernels, and the mesh.

Kernels are chosen for the target, not for the host. A kernel that XLA cannot partition needs the mesh.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from canvax.errors import warn
from canvax.originals import foreign, replaced


@dataclass(frozen=True)
class _Target:
    platform: str
    mesh: Mesh | None
    kind: str
    capability: str
    replaced: tuple[Any, ...] = ()


_target = jax.make_user_context(None)
"""The current ``_Target``. It is part of JAX's trace context, so no trace is reused for another target."""


@contextmanager
def compiling_for(platform: str, mesh: Mesh | None = None, kind: str = "", capability: str = "") -> Iterator[None]:
    """Choose kernels for ``platform`` while tracing, whatever machine does the tracing.

    Args:
        platform: "cpu", "gpu" or "tpu"; "none" uses no platform's kernels, which is how a model's work is counted.
        mesh: the devices that XLA splits the program over, if several.
        kind: JAX's ``device_kind``.
        capability: JAX's ``compute_capability`` of a GPU.
    """
    with _target(_Target(platform, mesh, kind, capability, replaced())):
        yield


def plain_kernels() -> AbstractContextManager[None]:
    """Use no platform-specific kernels: slower, but forward-mode derivatives (``jax.jvp``) work."""
    return compiling_for("none")


def jitted(function: Callable[..., Any], *, static_argnames: str | Sequence[str]) -> Callable[..., Any]:
    """Apply ``jax.jit``, but trace again if code of canvax was replaced or a static argument's code was edited.

    Static arguments must be passed by keyword.
    """
    names = [static_argnames] if isinstance(static_argnames, str) else static_argnames

    def inside(code: Any, *arrays: Any, **keywords: Any) -> Any:
        del code
        return function(*arrays, **keywords)

    call = jax.jit(inside, static_argnums=0, static_argnames=static_argnames)

    def jitted_call(*arrays: Any, **keywords: Any) -> Any:
        static = [keywords[name] for name in names if name in keywords]
        return call((replaced(), foreign(static)), *arrays, **keywords)

    return jitted_call


def traced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the jaxpr of ``function`` for the current target."""
    return jax.make_jaxpr(function)(*arguments).jaxpr


def compiling_on(mesh: Mesh, *, split: bool = True, fused: bool = True) -> AbstractContextManager[None]:
    """Choose kernels for the devices of ``mesh``, as ``compiling_for``.

    Args:
        mesh: the devices.
        split: XLA splits the program over the mesh; otherwise the trace is of one device's part.
        fused: use the GPU's compute capability; otherwise only kernels that every GPU has are chosen.
    """
    device = mesh.devices.flat[0]
    capability = _capability(device) if fused else ""
    return compiling_for(device.platform, mesh if split else None, device.device_kind, capability)


def _capability(device: Any) -> str:
    return str(getattr(device, "compute_capability", ""))


OPTIONS: Mapping[str, Mapping[str, str | bool]] = {
    # XLA merges the matmuls of queries, keys and values. Each is then copied out of the result in every step, and the
    # concatenated weights are a second copy: for SDXL at 1024 x 1024 that is 4 GB to move and 0.4 GiB of memory.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": "0"},
}
"""XLA's compiler options for each platform."""

STREAMING: Mapping[str, Mapping[str, str | bool]] = {
    # By default XLA waits for each copy from the host's memory. With this scheduler it computes meanwhile.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
"""Further options for programs that read weights in the host's memory."""


def compiled_on(mesh: Mesh, function: Callable[..., Any], *arguments: Any, **options: Any) -> Compiled:
    """Return the program that ``compile_or_fall_back`` compiles."""
    return compile_or_fall_back(mesh, function, *arguments, **options)[0]


def compile_or_fall_back(
    mesh: Mesh,
    function: Callable[..., Any],
    *arguments: Any,
    check: Callable[[Any], None] | None = None,
    split: bool = True,
    streams: bool = False,
    **options: Any,
) -> tuple[Compiled, bool]:
    """Compile ``function`` for the devices of ``mesh``; also return whether no fallback was needed.

    If a GPU's cuDNN is missing or has no attention for the GPU, the program is compiled without cuDNN: slower, but it
    works. The caller must not store that program for later processes, whose cuDNN may be repaired. ``options`` are
    arguments of ``jax.jit``. ``check`` reads the jaxpr before it is compiled. With ``streams`` the program copies
    weights from the host's memory while it runs.
    """

    def compiled(*, fused: bool) -> Compiled:
        with compiling_on(mesh, split=split, fused=fused):
            program = jax.jit(function, **options).trace(*arguments)
            if check is not None:
                check(program.jaxpr.jaxpr)
            lowered = program.lower()
            chosen = [OPTIONS, STREAMING] if streams else [OPTIONS]
            return lowered.compile({name: x for each in chosen for name, x in each.get(target_platform(), {}).items()})

    try:
        return compiled(fused=True), True
    except RuntimeError as error:  # the base class of JAX's and XLA's errors
        if not re.search("cud(a_d)?nn", str(error), re.IGNORECASE):
            raise
        reason = str(error).splitlines()[0][:200]
        warn(f"cuDNN's attention cannot be used here, and what is used in its place is slower ({reason})")
    return compiled(fused=False), False


def code_of(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any, split: bool = True, **options: Any
) -> str | None:
    """Return the SHA-256 of the lowered code of the program that ``compile_or_fall_back`` compiles.

    None if JAX passes its constants as arguments, since the code does not include these.

    Raises:
        AttributeError: JAX does not say which constants are arguments.
    """
    with compiling_on(mesh, split=split):
        lowered: Any = jax.jit(function, **options).trace(*arguments).lower()
        code = f"{lowered.as_text()}{lowered.out_tree}"
    return None if lowered._lowering.const_args else hashlib.sha256(code.encode()).hexdigest()


def target_platform() -> str:
    """Return the platform of the current trace's target; outside ``compiling_for`` JAX's default backend."""
    target = _target.value
    return target.platform if target else jax.default_backend()


def target_kind() -> str:
    """Return the target's ``device_kind``, e.g. "TPU v3"; "" if ``compiling_for`` got none."""
    target = _target.value
    return target.kind if target else jax.devices()[0].device_kind


def target_capability() -> float:
    """Return the compute capability of the target, e.g. 9.0; 0.0 unless it is an NVIDIA GPU."""
    target = _target.value
    return _number(target.capability if target else _capability(jax.devices()[0]))


@cache
def processor() -> dict[str, str]:
    """Return what Linux reports of the first processor in ``/proc/cpuinfo``, such as "flags"; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def fast_16bit_dtype_of(device: Any) -> str:
    """Return the 16-bit dtype that a TPU or GPU multiplies fast."""
    return fast_16bit_dtype(_number(_capability(device)))


def fast_16bit_dtype(capability: float) -> str:
    """Return the fast 16-bit dtype for a compute capability, 0.0 if it is not an NVIDIA GPU.

    NVIDIA GPUs before Ampere (8.0) have no bfloat16.
    """
    return "float16" if 0 < capability < 8 else "bfloat16"


def _number(capability: str) -> float:
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0  # AMD has names: "gfx942"


def target_mesh() -> Mesh | None:
    """Return the devices that XLA splits the current trace over; None if the trace is for one device."""
    target = _target.value
    return target.mesh if target and target.mesh is not None and target.mesh.size > 1 else None


def on_each_device(kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Run ``kernel``, which XLA cannot partition, on each device of ``target_mesh`` with that device's part."""
    mesh = target_mesh()
    if mesh is None:
        return kernel
    return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def weight_shards() -> int:
    """Return how many devices share the weights of a copy of the model: the size of the axis ``model``."""
    return _size_of("model")


def batch_shards() -> int | None:
    """Return how many devices share the batch, the size of the axis ``data``; None outside ``compiling_for``."""
    return _size_of("data") if _target.value else None


def _size_of(axis: str) -> int:
    mesh = target_mesh()
    return 1 if mesh is None else mesh.shape.get(axis, 1)
