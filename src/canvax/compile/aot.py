"""Share executables between processes: store them in the folder of ``canvax.compile.cache``, load them untraced.

``compile/`` uses these experimental or undocumented parts of JAX. If a later JAX lacks one, then:

- ``jax.experimental.serialize_executable``: programs are compiled and not stored;
- ``jax.config.values``, ``Device.client`` and its ``platform_version``, for keys: programs are not stored;
- the names of JAX's monitoring events: counts stay 0, and a program from JAX's own cache is stored although its copy
  may not run, which the first run shows;
- ``const_args`` of a lowered program: programs with code of users are not stored;
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
    """A program that is compiled or loaded.

    Attributes:
        program: "text encoder", "denoiser" or "decoder".
        cached: loaded from the cache instead of compiled.
        seconds: its time; None while it is compiled or loaded.
        size: its bytes on disk, 0 if it is not stored.
    """

    program: str
    cached: bool
    seconds: float | None = None
    size: int = 0


BuildCallback = Callable[[Build], None]
"""A function that is called when compiling or loading a program begins (``seconds`` None) and ends."""


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """The place of one program for these devices in the cache, whether it is stored yet or not."""

    path: Path
    header: dict[str, Any]
    devices: Sequence[Any]

    def read(self) -> bytes | None:
        """Return the stored executable, checked; None if it is missing or cannot be used."""
        return cache.read(self.path, self.header["key"])

    def load(self, executable: bytes) -> Any | None:
        """Return the program, ready to be called; None if it cannot be loaded, when its file is removed too.

        Raises:
            Exception: the device or the host has too little memory, which is no fault of the file.
        """
        try:
            from jax.experimental.serialize_executable import deserialize_and_load

            payload, in_tree, out_tree = pickle.loads(executable)
            return deserialize_and_load(payload, in_tree, out_tree, self.devices[0].client, self.devices)
        except Exception as error:  # compiling again helps against all errors of JAX, the plugin and pickle
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
        """Return the place of an entry ``name`` that depends on this program and ``others``."""
        digest = key.digest([name, sorted(entry.header["key"] for entry in (self, *others))])
        header = self.header | {"key": digest, "description": self.header["description"] | {"program": name}}
        return CacheEntry(self.path.with_name(f"{digest}.program"), header, self.devices)


def find_entry(
    function: partial[Any], arguments: tuple[Any, ...], mesh: Mesh, description: dict[str, Any], **decisive: Any
) -> CacheEntry | None:
    """Return the place of a program; None if it cannot be stored.

    That is so if the cache is off, the devices belong to other processes too, canvax's sources or names have changed
    since they were imported, or JAX lacks something that the key needs.

    Args:
        function: the function to compile, with its static keywords.
        arguments: abstract arguments, with shardings.
        mesh: the devices.
        description: plain values for ``canvax cache``, including ``program``.
        decisive: further values that decide the program.
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
        name: name of the program for ``report``.
        compile: returns the compiled program and whether it may be stored. A program that is slower because of a fault
            of this machine may not: the fault can be mended, and it is not in the key.
        entry: its place in the cache; None if it is not stored.
        report: called when loading or compiling begins and ends.
    """

    def compiled() -> Any:
        report(Build(name, cached=False))
        began = time.perf_counter()
        with plain_settings(), counting() as counts:
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
def plain_settings() -> Iterator[None]:
    """Turn off JAX's debugging settings, whose rules our programs break on purpose.

    The programs are compiled ahead, and take small arrays of the host.
    """
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


class Executable:
    """A compiled program. If the first run fails, the result of ``replace`` takes the program's place.

    This is for programs of the cache: an executable that a backend did not store properly may load and then fail when
    it runs, as with jaxlib's CPU backend. Running out of memory is no fault of the cache.
    """

    def __init__(self, program: Any, replace: Callable[[Exception], Any] | None = None) -> None:
        self._program, self._replace, self._lock = program, replace, threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        replace, program = self._replace, self._program  # in this order: another thread changes them in the other
        with plain_settings():
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
        """Return other attributes of JAX's compiled programs, such as ``memory_analysis``."""
        return getattr(self._program, name)


def _own(devices: Sequence[Any]) -> bool:
    """Return whether programs for these devices may be loaded here.

    Programs for a described topology may not. Nor may those of several processes, which must all compile a program or
    all load it, since some compilers let them share the work.
    """
    if jax.process_count() > 1:
        return False
    try:
        return set(devices) <= set(jax.local_devices(backend=devices[0].platform))
    except RuntimeError:  # there is no such backend here
        return False
