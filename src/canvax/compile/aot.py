"""Executables between processes: kept in the private folder of :mod:`canvax.compile.cache`, loaded without tracing.

JAX's own persistent cache is set up in the same folder for whatever else is compiled around them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from canvax.compile import cache, key


@dataclass(frozen=True)
class Build:
    """One program on its way.

    Attributes:
        program: "text encoder", "denoiser" or "decoder".
        cached: loaded from the cache instead of compiled.
        seconds: what it took; None while it goes on.
        size: bytes of it on disk, 0 if it is not kept.
    """

    program: str
    cached: bool
    seconds: float | None = None
    size: int = 0


Announce = Callable[[Build], None]
"""Told when a program begins to be compiled or loaded (``seconds`` None), and when it is done."""


@dataclass(frozen=True, eq=False)
class Slot:
    """The place in the cache of one program on these devices, filled or not."""

    path: Path
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
            self.forget(error)
            return None

    def forget(self, error: Exception) -> None:
        """Remove what is stored, since it failed."""
        cache.forget(self.path, f"cannot be used ({type(error).__name__}: {error})")

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


def slot(
    function: partial[Any], arguments: tuple[Any, ...], mesh: Mesh, about: dict[str, Any], **more: Any
) -> Slot | None:
    """Where a program is kept; None if it cannot be.

    The cache may be off, the devices not this process's own, or canvax's sources no longer those that it runs.

    Args:
        function: what is compiled, with its static keywords.
        arguments: abstract arguments, with shardings.
        mesh: the devices.
        about: what ``canvax cache`` tells of it.
        more: whatever else decides the program.
    """
    devices = list(mesh.devices.flat)
    folder = cache.open_cache() if _own(devices) else None
    if folder is None or key.edited():
        return None
    environment = key.environment(devices)
    name = key.digest([environment, key.program(function, arguments, mesh, **more)])
    machine = {**environment["devices"], "each": None}
    _share_with_jax(folder / "xla" / key.digest([environment["software"]["jaxlib"], machine])[:16])
    header = {"key": name, "about": about, **environment}
    return Slot(folder / "programs" / f"{name}.program", header, devices, jax.tree.structure((arguments, {})))


def obtain(name: str, compile: Callable[[], Any], kept: Slot | None, tell: Announce) -> Callable[..., Any]:
    """A program: from its slot if it is there and good, else compiled, and kept there if there is a slot."""

    def fresh() -> Callable[..., Any]:
        tell(Build(name, cached=False))
        began = time.perf_counter()
        with _undisturbed(), _without_jax_cache() if kept else nullcontext():
            program = compile()
        size = kept.write(program) if kept else 0
        tell(Build(name, False, time.perf_counter() - began, size))
        return program

    began = time.perf_counter()
    found = kept.read() if kept else None
    if kept is None or found is None:
        return _Program(fresh())
    tell(Build(name, cached=True))
    program = kept.load(*found)
    if program is None:
        return _Program(fresh())
    tell(Build(name, True, time.perf_counter() - began, len(found[1])))
    return _Program(program, kept, fresh)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """JAX's settings for finding faults in one's own code are not for programs that break their rules on purpose.

    These are compiled ahead, take small arrays of the host, and add a bias to a batch.
    """
    with jax.disable_jit(False), jax.transfer_guard("allow"), jax.numpy_rank_promotion("allow"):
        yield


class _Program:
    """A program that can be called. If the very first run of one from the cache fails it is made anew.

    Loading does not find all faults: an executable that a backend did not store properly may load, and only say so when
    it runs (jaxlib's CPU backend does that). Running out of memory is no fault of the cache.
    """

    def __init__(self, program: Any, kept: Slot | None = None, fresh: Callable[[], Any] | None = None) -> None:
        self._program = program
        self._trial = (kept, fresh) if kept and fresh else None

    def __call__(self, *arguments: Any) -> Any:
        with _undisturbed():
            if not self._trial:
                return self._program(*arguments)
            kept, fresh = self._trial
            try:
                result = jax.block_until_ready(self._program(*arguments))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" in str(error):
                    raise
                kept.forget(error)
                self._program = fresh()
                result = self._program(*arguments)
            self._trial = None
            return result

    def __getattr__(self, name: str) -> Any:
        """What a compiled program tells of itself, such as ``memory_analysis``."""
        return getattr(self._program, name)


class _Aside:
    """How many compilations want JAX's cache out of the way just now, and what was set before the first of them."""

    lock = threading.Lock()
    count = 0
    enabled = True


@contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Compile for real, with JAX's persistent cache out of the way.

    An executable that JAX has read from its cache cannot be stored again: on the CPU (jaxlib 0.10 to 0.12) the copy
    lacks its machine code. JAX looks at its settings once and remembers, hence the resets.
    """
    with _Aside.lock:
        if _Aside.count == 0:
            _Aside.enabled = jax.config.values["jax_enable_compilation_cache"]
            jax.config.update("jax_enable_compilation_cache", False)
            reset_cache()
        _Aside.count += 1
    try:
        yield
    finally:
        with _Aside.lock:
            _Aside.count -= 1
            if _Aside.count == 0:
                jax.config.update("jax_enable_compilation_cache", _Aside.enabled)
                reset_cache()


def _own(devices: Sequence[Any]) -> bool:
    """Whether programs for these devices may be loaded here.

    Not those of a topology that is only described. Nor those of several processes, which must either all compile a
    program or all load it, since some compilers let them share the work.
    """
    if jax.process_count() > 1:
        return False
    try:
        return set(devices) <= set(jax.local_devices(backend=devices[0].platform))
    except RuntimeError:  # there is no such backend here
        return False


def _share_with_jax(folder: Path) -> None:
    """Set up JAX's persistent cache, unless the user has done so or wants none.

    A folder for each kind of machine: JAX itself does not always tell CPUs apart, and a home may serve several.
    """
    settings = jax.config.values
    wanted = settings["jax_enable_compilation_cache"] and not settings["jax_compilation_cache_dir"]
    if not wanted or not os.access(folder.parent, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if settings["jax_persistent_cache_min_compile_time_secs"] == 1.0:  # the default would leave small functions out
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


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
