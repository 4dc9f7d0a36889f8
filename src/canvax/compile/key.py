"""Describe all that an executable depends on: processes with equal descriptions may share it.

Too much here causes a compilation that was not needed. Too little loads a program that is wrong, or that the machine
cannot run. So a value belongs here unless it is surely harmless.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
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
"""Folders of canvax without code of programs: tables of samplers, for example, are their arguments."""

_IN_PROGRAMS = ("samplers/schedule.py", "samplers/table.py")
"""Files in these folders that programs do have."""

_HARMLESS = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_raise_persistent_cache"),
    *("jax_explain_cache", "jax_log", "jax_debug_log", "jax_dump_ir", "jax_traceback", "jax_transfer_guard"),
    *("jax_platforms", "jax_platform_name"),
)
"""Beginnings of the names of JAX's settings that change no program."""


def digest(described: Any) -> str:
    """Return the SHA-256 of plain values (dicts, lists, text, numbers), whatever the order of their keys."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def environment(devices: Sequence[Any]) -> dict[str, Any]:
    """Describe what is outside the program itself: software, settings, the kind of ``devices`` and the machine."""
    return {"software": software(), "settings": _settings(), "devices": _devices(devices)}


def describe(function: partial[Any], arguments: tuple[Any, ...], mesh: Mesh, **decisive: Any) -> dict[str, Any]:
    """Describe a program: its function and static keywords, its arguments' shapes, dtypes and shardings, the mesh.

    Args:
        function: what is compiled, with its static keywords.
        arguments: abstract arguments, with shardings.
        mesh: the devices.
        decisive: whatever else decides the program.
    """
    leaves, structure = jax.tree.flatten(arguments)
    types = [str(kind) for kind in mesh.axis_types]
    return {
        "function": f"{function.func.__module__}.{function.func.__qualname__}",
        "keywords": {name: repr(value) for name, value in function.keywords.items()},
        "structure": str(structure),
        "arguments": [[list(leaf.shape), str(leaf.dtype), _sharding(leaf.sharding, mesh)] for leaf in leaves],
        "mesh": [list(mesh.shape.items()), types, [device.id for device in mesh.devices.flat]],
        **{name: repr(value) for name, value in decisive.items()},
    }


@cache
def software() -> dict[str, str]:
    """Return the versions of all that shapes an executable, and a digest of canvax's sources."""
    total, package = hashlib.sha256(), Path(__file__).parent.parent
    for path in _files():
        total.update(path.relative_to(package).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    versions = {"canvax": __version__, "sources": total.hexdigest()}
    versions |= {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": version("jaxlib")}
    for name in PLUGINS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def edited() -> bool:
    """Return whether canvax's sources were changed after they were imported: the process may run older ones.

    Clocks are not compared: canvax may be younger than the process that imports it, and times of files may come from
    another machine.
    """
    return _changes() != _IMPORTED


def _files() -> list[Path]:
    """Return the sources that can change a program; ``tests/test_layers.py`` compares them with what imports what."""
    package = Path(__file__).parent.parent
    found = (Path(folder, name) for folder, _, names in os.walk(package) for name in names if name.endswith(".py"))
    inner = {path: path.relative_to(package) for path in found}
    return sorted(
        path for path in inner if inner[path].parts[0] not in _APART or inner[path].as_posix() in _IN_PROGRAMS
    )


def _changes() -> list[tuple[str, int, int]]:
    """Return when each source was last changed, and its size."""
    statuses = ((path, path.stat()) for path in _files())
    return [(str(path), status.st_mtime_ns, status.st_size) for path, status in statuses]


_IMPORTED = _changes()


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


def usable_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _cpu() -> dict[str, Any]:
    """Describe what XLA compiles for on the CPU. Instructions that a CPU lacks would end the process, not raise."""
    described: dict[str, Any] = {"machine": platform.machine(), "cores": usable_cores()}
    reported = processor()
    if not reported:
        return described | {"processor": platform.processor(), "host": platform.node()}  # this machine alone
    keys = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part", "isa")
    return described | {name: value for name, value in reported.items() if name in keys}


def _sharding(sharding: Any, mesh: Mesh) -> str:
    """Return the part of a sharding that differs between arguments; the key has the mesh itself once."""
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return f"{sharding.spec} {sharding.memory_kind}"
    return repr(sharding)
