"""Executables between processes: kept in the private folder of :mod:`canvax.compile.cache`, loaded without tracing.

JAX's own persistent cache is set up in the same folder. It still needs the trace, but it also knows a program again
after an update of canvax that left that program alone, and it keeps the small functions around ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from canvax.compile import cache, key


@dataclass(frozen=True, eq=False)
class Slot:
    """The place in the cache of one program on these devices, filled or not."""

    path: Any
    header: dict[str, Any]
    devices: Sequence[Any]
    in_tree: Any

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        """What is stored, checked; None if there is nothing of use."""
        return cache.read(self.path, self.header["key"])

    def load(self, header: dict[str, Any], executable: bytes) -> Any | None:
        """The program, ready to be called; None if it cannot be loaded, when it is removed too."""
        try:
            out_tree = jax.tree.structure(_rebuilt(header["out"]))
            client = self.devices[0].client
            return deserialize_and_load(executable, self.in_tree, out_tree, client, self.devices)
        except Exception as error:  # whatever JAX, the plugin and pickle raise, compiling again is the cure
            cache.forget(self.path, f"cannot be loaded ({type(error).__name__}: {error})")
            return None

    def write(self, compiled: Any) -> int:
        """Keep a program; returns bytes on disk, 0 if it cannot be kept."""
        try:
            executable, _, out_tree = serialize(compiled)
        except Exception as error:  # not every backend can
            cache.logger.debug("%s cannot be kept: %s", self.header["about"]["program"], error)
            return 0
        out = _skeleton(jax.tree.unflatten(out_tree, range(out_tree.num_leaves)))
        header = self.header | {"out": out, "created": time.time()}
        return cache.write(self.path, header, executable)


def slot(function: partial[Any], arguments: tuple[Any, ...], mesh: Mesh, about: dict[str, Any], **more: Any) -> Slot | None:
    """Where a program is kept; None if it cannot be: the cache is off, or the devices are not this process's own.

    Args:
        function: what is compiled, with its static keywords.
        arguments: abstract arguments, with shardings.
        mesh: the devices.
        about: what ``canvax cache`` tells of it.
        more: whatever else decides the program.
    """
    devices = list(mesh.devices.flat)
    folder = cache.open_cache() if _own(devices) else None
    if folder is None:
        return None
    environment = key.environment(devices)
    name = key.digest([environment, key.program(function, arguments, mesh, **more)])
    _share_with_jax(folder / "xla" / key.digest([environment["software"]["jaxlib"], environment["devices"]])[:16])
    header = {"key": name, "about": about, **environment}
    return Slot(folder / "programs" / f"{name}.program", header, devices, jax.tree.structure((arguments, {})))


def _own(devices: Sequence[Any]) -> bool:
    """Whether programs for these devices may be loaded here.

    Not those of a topology that is only described. Nor those of several processes, which must either all compile a
    program or all load it, since some compilers let them share the work.
    """
    if jax.process_count() > 1:
        return False
    try:
        return set(devices) <= set(devices[0].client.devices())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _share_with_jax(folder: Any) -> None:
    """Set up JAX's persistent cache, unless the user has done so or wants none."""
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    config.update("jax_compilation_cache_dir", str(folder))
    if config.jax_persistent_cache_min_compile_time_secs == 1.0:  # its default, which would leave small functions out
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _skeleton(tree: Any) -> Any:
    """A tree of dicts, tuples and numbers as JSON, which has no tuples."""
    if isinstance(tree, dict):
        return {"dict": {name: _skeleton(value) for name, value in tree.items()}}
    if isinstance(tree, tuple):
        return {"tuple": [_skeleton(value) for value in tree]}
    return tree


def _rebuilt(skeleton: Any) -> Any:
    if not isinstance(skeleton, dict):
        return skeleton
    if "dict" in skeleton:
        return {name: _rebuilt(value) for name, value in skeleton["dict"].items()}
    return tuple(_rebuilt(value) for value in skeleton["tuple"])
