"""Executables between processes: stored in the private folder of ``canvax.compile.cache``, loaded without tracing.

What ``compile/`` uses of JAX that is experimental or not documented, and what happens if a later JAX lacks it:

- ``jax.experimental.serialize_executable``: programs are compiled and not stored;
- ``jax.config.values``, ``Device.client`` and its ``platform_version``, for keys: likewise;
- the names of JAX's monitoring events: counts stay 0, and a program that came from JAX's own cache is stored although
  its copy may not run, which the first run shows;
- the names of collectives in the compiler's text (``inspect.py``): they are not counted.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from canvax.compile import cache, key
from canvax.compile.monitor import counting
from canvax.errors import is_out_of_memory
from canvax.originals import replaced


@dataclass(frozen=True)
class Build:
    """One program that is compiled or loaded.

    Attributes:
        program: "text encoder", "denoiser" or "decoder".
        cached: loaded from the cache instead of compiled.
        seconds: what it took; None while it goes on.
        size: bytes of it on disk, 0 if it is not stored.
    """

    program: str
    cached: bool
    seconds: float | None = None
    size: int = 0


BuildCallback = Callable[[Build], None]
"""Called when a program begins to be compiled or loaded (``seconds`` None), and when it is done."""


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """The place of one program for these devices in the cache, whether it is stored yet or not."""

    path: Path
    header: dict[str, Any]
    devices: Sequence[Any]

    def read(self) -> bytes | None:
        """Return what is stored, checked; None if there is nothing of use."""
        return cache.read(self.path, self.header["key"])

    def load(self, executable: bytes) -> Any | None:
        """Return the program, ready to be called; None if it cannot be loaded, when its file is removed too.

        Raises:
            Exception: the device or the host has too little memory, which says nothing against the file.
        """
        try:
            from jax.experimental.serialize_executable import deserialize_and_load

            payload, in_tree, out_tree = pickle.loads(executable)
            return deserialize_and_load(payload, in_tree, out_tree, self.devices[0].client, self.devices)
        except Exception as error:  # whatever JAX, the plugin and pickle raise, compiling again is the cure
            if is_out_of_memory(error):
                raise
            cache.remove(self.path, repr(error))
            return None

    def write(self, program: Any) -> int:
        """Store a compiled program; return bytes on disk, 0 if it cannot be stored."""
        try:
            from jax.experimental.serialize_executable import serialize

            executable = pickle.dumps(serialize(program))
        except Exception as error:  # not every backend can
            cache.logger.debug("%s cannot be stored: %s", self.header["description"]["program"], error)
            return 0
        return self.keep(executable)

    def keep(self, data: bytes) -> int:
        """Store bytes; return bytes on disk, 0 if they cannot be stored."""
        return cache.write(self.path, self.header | {"created": time.time()}, data)

    def derived(self, name: str, others: Sequence[CacheEntry]) -> CacheEntry:
        """Return the place of what is called ``name`` and depends on this program and ``others``."""
        digest = key.digest([name, sorted(entry.header["key"] for entry in (self, *others))])
        header = self.header | {"key": digest, "description": self.header["description"] | {"program": name}}
        return CacheEntry(self.path.with_name(f"{digest}.program"), header, self.devices)


def find_entry(
    function: partial[Any], arguments: tuple[Any, ...], mesh: Mesh, description: dict[str, Any], **decisive: Any
) -> CacheEntry | None:
    """Return the place of a program; None if it cannot be stored.

    The cache may be off, the devices not this process's own, canvax's sources no longer those that it runs, names in
    them may be replaced, or JAX may lack what the key is made of.

    Args:
        function: what is compiled, with its static keywords.
        arguments: abstract arguments, with shardings.
        mesh: the devices.
        description: what ``canvax cache`` shows of it; plain values, ``program`` among them.
        decisive: whatever else decides the program.
    """
    devices = list(mesh.devices.flat)
    folder = cache.open_cache() if _own(devices) else None
    if folder is None or key.edited() or replaced():
        return None
    try:
        environment = key.environment(devices)
        name = key.digest([environment, key.describe(function, arguments, mesh, **decisive)])
    except AttributeError as error:
        cache.logger.debug("%s cannot be stored: %s", description["program"], error)
        return None
    header = {"key": name, "description": description, **environment}
    return CacheEntry(folder / f"{name}.program", header, devices)


def load_or_compile(
    name: str, compile: Callable[[], tuple[Any, bool]], entry: CacheEntry | None, report: BuildCallback
) -> Executable:
    """Return a program: loaded from its entry if it is there and good, else compiled, and stored there.

    Args:
        name: of the program, for ``report``.
        compile: returns the compiled program and whether it may be stored. One that the compiler made worse because of
            a fault of this machine may not: the fault will be mended, and the key does not know of it.
        entry: where it is stored; None if it is not.
        report: called when it begins to be loaded or compiled, and when it is done.
    """

    def compiled() -> Any:
        report(Build(name, cached=False))
        began = time.perf_counter()
        with _plain_settings(), counting() as counts:
            program, keep = compile()
        # A program that JAX read from its own cache cannot be stored again: on the CPU (jaxlib 0.10 to 0.12) the copy
        # lacks its machine code. JAX has it in any case.
        size = entry.write(program) if entry and keep and not counts.cache_hits else 0
        report(Build(name, False, time.perf_counter() - began, size))
        return program

    began = time.perf_counter()
    if entry is None or (stored := entry.read()) is None:
        return Executable(compiled())
    report(Build(name, cached=True))
    if (program := entry.load(stored)) is None:
        return Executable(compiled())
    report(Build(name, True, time.perf_counter() - began, len(stored)))

    def compiled_after(error: Exception) -> Any:
        cache.remove(entry.path, repr(error))
        return compiled()

    return Executable(program, compiled_after)


@contextmanager
def _plain_settings() -> Iterator[None]:
    """Turn off JAX's settings for finding faults in one's own code, whose rules our programs break on purpose.

    They are compiled ahead, and take small arrays of the host.
    """
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


class Executable:
    """A compiled program. If ``replace`` is given and the first run fails, what it returns takes the program's place.

    That is for programs of the cache: an executable that a backend did not store properly may load, and fail when it
    runs (jaxlib's CPU backend does that). Running out of memory is no fault of the cache.
    """

    def __init__(self, program: Any, replace: Callable[[Exception], Any] | None = None) -> None:
        self._program, self._replace, self._lock = program, replace, threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        replace, program = self._replace, self._program  # in this order: another thread changes them in the other
        with _plain_settings():
            if replace is None:
                return program(*arguments)
            try:
                result = jax.block_until_ready(program(*arguments))
            except jax.errors.JaxRuntimeError as error:
                if is_out_of_memory(error):
                    raise
                with self._lock:
                    if self._program is program:
                        self._program = replace(error)
                result = self._program(*arguments)
            self._replace = None
            return result

    def __getattr__(self, name: str) -> Any:
        """Return what else JAX's compiled programs have, such as ``memory_analysis``."""
        return getattr(self._program, name)


def _own(devices: Sequence[Any]) -> bool:
    """Return whether programs for these devices may be loaded here.

    Not those of a topology that is only described. Nor those of several processes, which must either all compile a
    program or all load it, since some compilers let them share the work.
    """
    if jax.process_count() > 1:
        return False
    try:
        return set(devices) <= set(jax.local_devices(backend=devices[0].platform))
    except RuntimeError:  # there is no such backend here
        return False
