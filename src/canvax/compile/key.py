"""What an executable depends on, written down: where two processes agree on all of it, one may use the other's.

Too much here costs a compilation that was not needed. Too little loads a program that is wrong, or that the machine
cannot run: what is not surely harmless belongs in.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from canvax._version import __version__
from canvax.kernels.target import processor

PLUGINS = (
    *("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas"),
)
"""Packages that compile or compute on TPU and GPU."""

ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_ENABLE_ONEDNN_OPTS")

_APART = ("cli", "planning", "samplers", "scale", "server", "train")
"""Folders of canvax of which programs have no code: tables of samplers, for example, are their arguments."""

_IN_PROGRAMS = ("samplers/schedule.py", "samplers/table.py")
"""Files in these folders that programs do have."""

_HARMLESS = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_raise_persistent_cache"),
    *("jax_explain_cache", "jax_log", "jax_debug_log", "jax_dump_ir", "jax_traceback", "jax_transfer_guard"),
    *("jax_platforms", "jax_platform_name"),
)
"""Beginnings of the names of JAX's settings that change no program."""


def digest(described: Any) -> str:
    """SHA-256 of plain values (dicts, lists, text, numbers), whatever the order of their keys."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def environment(devices: Sequence[Any]) -> dict[str, Any]:
    """Everything outside the program itself: software, settings, the kind of ``devices`` and the machine."""
    return {"software": software(), "settings": _settings(), "devices": _devices(devices)}


def program(function: partial[Any], arguments: tuple[Any, ...], mesh: Mesh, **decisive: Any) -> dict[str, Any]:
    """The program: its function and static keywords, its arguments' shapes, dtypes and shardings, the mesh.

    Args:
        function: what is compiled, with its static keywords.
        arguments: abstract arguments, with shardings.
        mesh: the devices.
        decisive: whatever else decides the program.
    """
    leaves, structure = jax.tree.flatten(arguments)
    return {
        "function": f"{function.func.__module__}.{function.func.__qualname__}",
        "keywords": {name: repr(value) for name, value in function.keywords.items()},
        "structure": str(structure),
        "arguments": [[list(leaf.shape), str(leaf.dtype), _sharding(leaf.sharding, mesh)] for leaf in leaves],
        "mesh": _mesh(mesh),
        **{name: repr(value) for name, value in decisive.items()},
    }


@cache
def software() -> dict[str, str]:
    """Versions of all that shapes an executable; canvax by its sources too, so that no edit is overlooked."""
    versions = {
        "canvax": __version__,
        "sources": _sources(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
    }
    for name in PLUGINS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def edited() -> bool:
    """Whether canvax's sources were changed after they were imported: the process then may not run what they say.

    No clock is asked: canvax may be younger than the process that imports it, and times of files come from elsewhere.
    """
    return _changes() != _IMPORTED


def _files() -> list[Path]:
    """Return the sources that can change a program; ``tests/test_layers.py`` compares them with what imports what."""
    package = Path(__file__).parent.parent
    found = (Path(folder, name) for folder, _, names in os.walk(package) for name in names if name.endswith(".py"))
    decisive = {path: path.relative_to(package) for path in found}
    return sorted(
        path for path, inner in decisive.items() if inner.parts[0] not in _APART or inner.as_posix() in _IN_PROGRAMS
    )


def _changes() -> list[tuple[str, int, int]]:
    """When each source was last changed, and its size."""
    statuses = ((path, path.stat()) for path in _files())
    return [(str(path), status.st_mtime_ns, status.st_size) for path, status in statuses]


_IMPORTED = _changes()


def _sources() -> str:
    package = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in _files():
        total.update(path.relative_to(package).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _settings() -> dict[str, str]:
    values = {name: repr(getattr(jax.config, name, value)) for name, value in jax.config.values.items()}
    values = {name: value for name, value in values.items() if not name.startswith(_HARMLESS)}
    return values | {name: os.environ.get(name, "") for name in ENVIRONMENT}


def _devices(devices: Sequence[Any]) -> dict[str, Any]:
    first = devices[0]
    described = {
        "platform": first.platform,
        "platform_version": first.client.platform_version,
        "kind": first.device_kind,
        "compute_capability": str(getattr(first, "compute_capability", "")),
        "count": len(first.client.devices()),
        "each": [[device.id, str(getattr(device, "coords", ""))] for device in devices],
    }
    return described | {"cpu": _cpu()} if first.platform == "cpu" else described


def cores() -> int:
    """Of the CPU, those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _cpu() -> dict[str, Any]:
    """What XLA compiles for on the CPU. Instructions that a CPU lacks would end the process, not raise."""
    described: dict[str, Any] = {"machine": platform.machine(), "cores": cores()}
    reported = processor()
    if not reported:
        return described | {"processor": platform.processor(), "host": platform.node()}  # this machine alone
    keys = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part", "isa")
    return described | {name: value for name, value in reported.items() if name in keys}


def _mesh(mesh: Mesh) -> list[Any]:
    types = [str(kind) for kind in mesh.axis_types]
    return [list(mesh.shape.items()), types, [device.id for device in mesh.devices.flat]]


def _sharding(sharding: Any, mesh: Mesh) -> str:
    """The part of a sharding that differs between arguments; the mesh itself stands there once."""
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return f"{sharding.spec} {sharding.memory_kind}"
    return repr(sharding)
