"""Device memory: what there is, what a program takes, and an error with the cure before it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.sharding import Mesh

from canvax.errors import InputError, OutOfMemoryError

_MEMINFO = Path("/proc/meminfo")
_CONTROL = Path("/sys/fs/cgroup")
_CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),  # version 1
)
"""Where Linux says what a container may use, what it does, and what for."""

_ASKED: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()
"""What programs take. Asking the compiler costs tens of milliseconds, and every image wants to know of three."""


@dataclass(frozen=True)
class Memory:
    """Bytes that each device needs for a model at some size and batch.

    Attributes:
        weights: the parameters that lie on the device, exactly.
        programs: what each program takes beside them while it runs: "text encoder", "denoiser", "decoder"; the
            compiler's own figures.
        limit: what the device has for them; None if it does not tell.
    """

    weights: int
    programs: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        sizes = {"weights": self.weights, "limit": self.limit or 0, **self.programs}
        for name, size in sizes.items():
            if size < 0:
                raise InputError(name, size, "is fewer than 0 bytes")

    @property
    def total(self) -> int:
        """Weights and the largest program: the programs run one after the other."""
        return self.weights + max(self.programs.values(), default=0)

    @property
    def fits(self) -> bool | None:
        """Whether the device has as much; None if it does not tell."""
        return None if self.limit is None else self.total <= self.limit


def free_bytes(mesh: Mesh) -> int | None:
    """Bytes that are free on the fullest device of this process; None if the devices do not tell.

    CPU devices share the host's memory: each is counted an equal part of what is available.
    """
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if devices[0].platform == "cpu":
        available = available_bytes()
        return None if available is None else available // len(devices)
    free = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min(free, default=None)


def check_weights(needed: int, mesh: Mesh, what: str, dtype: str, *, quantized: bool = False) -> None:
    """Refuse to load weights of ``needed`` bytes a device that cannot fit.

    Raises:
        OutOfMemoryError: naming the estimate, the limit and the cures.
    """
    free = free_bytes(mesh)
    if free is None:
        return
    shared = mesh.devices.flat[0].platform == "cpu" and mesh.shape.get("model", 1) == 1
    if shared:  # whole weights are there once, whatever the number of CPU devices
        free *= sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if needed > free:
        raise OutOfMemoryError(
            f"the weights of {what} in {dtype} need {gigabytes(needed)} on each device, and {gigabytes(free)} are "
            f"free; {cures(mesh, dtype, quantized=quantized)}"
        )


def program_bytes(program: Any) -> int | None:
    """What a compiled program takes on a device beside its arguments, as its compiler says; None if it does not."""
    if program not in _ASKED:
        try:
            analysis = program.memory_analysis()
        except (NotImplementedError, jax.errors.JaxRuntimeError):  # a backend that does not tell
            analysis = None
        _ASKED[program] = (
            analysis and analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        )
    return _ASKED[program]


def check_programs(programs: Iterable[tuple[str, Any]], mesh: Mesh, cure: Callable[[], str]) -> None:
    """Refuse to run programs, each with its name, of which one takes more than is free.

    Raises:
        OutOfMemoryError: naming the program, what it takes, what there is and the cure.
    """
    free = free_bytes(mesh)
    for name, program in programs:
        needed = program_bytes(program)
        if free is not None and needed is not None and needed > free:
            raise OutOfMemoryError(
                f"the {name} needs {gigabytes(needed)} on each device beside the weights, and {gigabytes(free)} are "
                f"free; {cure()}"
            )


def check_least(needed: int, mesh: Mesh, cure: Callable[[], str]) -> None:
    """Refuse images of which the features alone are too large, before a compiler spends minutes on them.

    Args:
        needed: bytes on each device, less than a program will take.
        mesh: the devices in use.
        cure: says what helps.

    Raises:
        OutOfMemoryError: naming what is needed, what there is and the cure.
    """
    free = free_bytes(mesh)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"the denoiser needs more than {gigabytes(needed)} on each device, and {gigabytes(free)} are free; {cure()}"
        )


@contextmanager
def explained(cure: Callable[[], str]) -> Iterator[None]:
    """Turn a device's running out of memory, while compiling or running, into an error that names the cure.

    Raises:
        OutOfMemoryError: what is inside ran out of memory.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        text = str(error).strip()
        if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()):
            raise
        first = (text.splitlines() or ["out of memory"])[0][:200]
        raise OutOfMemoryError(f"the device ran out of memory ({first}); {cure()}") from error


def cures(
    mesh: Mesh, dtype: str, *, quantized: bool = False, batch: int | None = None, height: int = 0, width: int = 0
) -> str:
    """What would help against too little memory, most useful first.

    Args:
        mesh: the devices in use.
        dtype: the dtype of the weights.
        quantized: whether the large ones are of 8 bits already.
        batch: images generated at once; None while loading, when there are none yet.
        height: of an image, in pixels.
        width: likewise.
    """
    ways = []
    data, model = mesh.shape["data"], mesh.shape.get("model", 1)
    if batch is not None and batch > data:
        ways.append(f"generate fewer images at once (now {batch}; {data} or a multiple suits the mesh)")
    if batch is not None:
        ways.append(f"generate smaller images (now {width} x {height})")
    if dtype == "float32":
        ways.append("load in bfloat16, which takes half")
    if not quantized:
        ways.append("keep the large weights in 8 bits (quantize int8)")
    if data > 1:
        ways.append(f"split the weights over devices (mesh data={data // 2}, model={2 * model})")
    elif model == 1:
        ways.append("split the weights over more devices (mesh model=2)")
    return "; or ".join(ways) if ways else "use devices with more memory"


def gigabytes(size: int) -> str:
    """A size for people, in powers of ten."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def available_bytes() -> int | None:
    """Memory that programs can have without swapping, of the host or of the container that this process is in.

    None where the system does not tell.
    """
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    host = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return min((one for one in (host, *map(_left_in, _CONTAINERS)) if one is not None), default=None)


def _left_in(files: tuple[str, str, str]) -> int | None:
    """What a container's limit leaves, pages of files that can be dropped included; None without a limit."""
    try:
        limit, used, stat = ((_CONTROL / name).read_text(encoding="ascii").strip() for name in files)
        pages = dict(line.split() for line in stat.splitlines())
        cached = sum(int(pages.get(name, 0)) for name in ("active_file", "inactive_file"))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # there is none, or it is "max"
        return None
