"""Device memory: how much is free, how much a program needs, and clear errors before it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from canvax.errors import HintWarning, InputError, OutOfMemoryError, is_out_of_memory, warn

MOST_OFFLOADED = 0.9
"""Part of the free memory that a whole network may take; the rest is for its arrays, 1.5 to 2 GB for an image of 1024 x
1024."""

_MEMINFO = Path("/proc/meminfo")
_CONTROL = Path("/sys/fs/cgroup")
_CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),  # version 1
)
"""Linux's files with a container's memory limit, current use and statistics, for each cgroup version."""

_PROGRAM_BYTES: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()
"""Cache of ``program_bytes``. Asking the compiler takes tens of milliseconds, and each image needs three programs."""


@dataclass(frozen=True)
class Memory:
    """Bytes that each device needs for a model, an image size and a batch size.

    Attributes:
        weights: the exact size of the parameters on the device.
        programs: the additional memory of each running program: "text encoder", "denoiser", "decoder"; as reported by
            the compiler.
        limit: the memory available on the device; None if the device does not report it.
        parts: the size of the parameters that each program reads.
        streamed: the bytes needed with ``offload="layers"``: the weights that stay, and the largest program with two of
            its layers.
    """

    weights: int
    programs: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    streamed: int = 0

    def __post_init__(self) -> None:
        sizes = {"weights": self.weights, "limit": self.limit or 0, **self.programs}
        for name, size in sizes.items():
            if size < 0:
                raise InputError(name, "is fewer than 0 bytes", value=size)

    @property
    def total(self) -> int:
        """Weights and the largest program, since programs do not run at the same time."""
        return self.weights + max(self.programs.values(), default=0)

    @property
    def offloaded(self) -> int:
        """Bytes needed with ``offload=True``: the largest program with the weights that it reads."""
        return max((size + self.parts.get(name, 0) for name, size in self.programs.items()), default=0)

    @property
    def fits(self) -> bool | None:
        """True if ``total`` fits on the device; None if the device does not report its memory."""
        return None if self.limit is None else self.total <= self.limit


def free_bytes(mesh: Mesh) -> int | None:
    """Return the free bytes on the fullest device of this process; None if the devices do not report it.

    CPU devices share the host's memory: each counts as an equal part of what is available.
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


def check_weights(needed: int, mesh: Mesh, model: str, dtype: str, *, quantized: bool = False) -> None:
    """Raise OutOfMemoryError if weights of ``needed`` bytes per device do not fit; the error lists cures."""
    free = free_bytes(mesh)
    if free is None:
        return
    shared = mesh.devices.flat[0].platform == "cpu" and mesh.shape.get("model", 1) == 1
    if shared:  # unsplit weights exist once, whatever the number of CPU devices
        free *= sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if needed > free:
        raise OutOfMemoryError(
            f"the weights of {model} in {dtype} need {gigabytes(needed)} on each device, and {gigabytes(free)} are "
            f"free; {cures(mesh, dtype, quantized=quantized)}"
        )


def streams(needed: int, mesh: Mesh) -> bool:
    """Return whether a network of ``needed`` bytes leaves too little of the devices' memory for its own arrays.

    The weights of a CPU's devices are in the host's memory in any case.
    """
    free = None if mesh.devices.flat[0].platform == "cpu" else free_bytes(mesh)
    return free is not None and needed > MOST_OFFLOADED * free


def program_bytes(program: Any) -> int | None:
    """Return the bytes per device that a compiled program needs besides its arguments; None if not reported."""
    if program not in _PROGRAM_BYTES:
        try:
            analysis = program.memory_analysis()
        except (NotImplementedError, jax.errors.JaxRuntimeError):  # the backend does not report it
            analysis = None
        _PROGRAM_BYTES[program] = (
            analysis and analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        )
    return _PROGRAM_BYTES[program]


def check_programs(programs: Iterable[tuple[str, Any]], mesh: Mesh, cure: Callable[[], str]) -> None:
    """Raise OutOfMemoryError if one of the (name, program) pairs needs more memory than is free."""
    free = free_bytes(mesh)
    for name, program in programs:
        needed = program_bytes(program)
        if free is not None and needed is not None and needed > free:
            raise OutOfMemoryError(
                f"the {name} needs {gigabytes(needed)} on each device beside the weights, and {gigabytes(free)} are "
                f"free; {cure()}"
            )


def largest_layer_bytes(jaxpr: Any) -> int:
    """Return the most bytes that a convolution or matmul of a program reads and writes: the program needs more."""
    most = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            values = (*equation.invars, *equation.outvars)
            most = max(most, sum(value.aval.size * value.aval.dtype.itemsize for value in values))
        most = max(most, *map(largest_layer_bytes, jaxprs_in_params(equation.params)), 0)
    return most


def check_layers(name: str, jaxpr: Any, mesh: Mesh, cure: Callable[[], str]) -> None:
    """Compare a program's largest layer with the free memory of the devices.

    No program needs less, and most need twice as much or more (docs/design/experiments.md). So too little memory for
    the layer is an error, and for twice as much a warning.

    Args:
        name: the program, for messages.
        jaxpr: the whole program, for all devices.
        mesh: the devices.
        cure: gives the advice.

    Raises:
        OutOfMemoryError: the layer does not fit.
    """
    needed, free = largest_layer_bytes(jaxpr) // mesh.size, free_bytes(mesh)
    if free is None or 2 * needed <= free:
        return
    fact = f"one layer of the {name} needs {gigabytes(needed)} on each device, and {gigabytes(free)} are free"
    if needed > free:
        raise OutOfMemoryError(f"{fact}; {cure()}")
    warn(
        f"{fact}; most programs need twice as much or more, and this one may fail after it is compiled; {cure()}",
        HintWarning,
    )


@contextmanager
def explained(cure: Callable[[], str]) -> Iterator[None]:
    """Replace an out-of-memory error of compiling or running by an OutOfMemoryError with advice."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or ["out of memory"])[0][:200]
        raise OutOfMemoryError(f"the device ran out of memory ({first}); {cure()}") from error


def cures(
    mesh: Mesh, dtype: str, *, quantized: bool = False, batch: int | None = None, height: int = 0, width: int = 0
) -> str:
    """Return advice against a lack of memory, most useful first.

    Args:
        mesh: the devices in use.
        dtype: the dtype of the weights.
        quantized: whether the large weights already have 8 bits.
        batch: images generated at once; None while loading.
        height: height of an image in pixels.
        width: width of an image in pixels.
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
    if mesh.devices.flat[0].platform != "cpu":
        ways.append("keep weights in the host's memory (offload, or offload='layers' for networks that do not fit)")
    if data > 1:
        ways.append(f"split the weights over devices (mesh data={data // 2}, model={2 * model})")
    elif model == 1:
        ways.append("split the weights over more devices (mesh model=2)")
    return "; or ".join(ways) if ways else "use devices with more memory"


def gigabytes(size: int) -> str:
    """Format a number of bytes, in powers of ten."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def available_bytes() -> int | None:
    """Return the bytes available without swapping on the host or in this process's container; None if unknown."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    host = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return min((limit for limit in (host, *map(_left_in, _CONTAINERS)) if limit is not None), default=None)


def _left_in(files: tuple[str, str, str]) -> int | None:
    """Return the bytes left below a container's limit, where reclaimable file pages are free; None without a limit."""
    try:
        limit, used, stat = ((_CONTROL / name).read_text(encoding="ascii").strip() for name in files)
        pages = dict(line.split() for line in stat.splitlines())
        cached = sum(int(pages.get(name, 0)) for name in ("active_file", "inactive_file"))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # the file does not exist, or the limit is "max"
        return None
