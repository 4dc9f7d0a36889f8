"""TPUs and NVIDIA GPUs that plans support, and the settings with which their compilers target them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canvax.errors import InputError, nearest
from canvax.kernels.target import fast_16bit_dtype

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """A JAX device: a TPU chip, for v2 and v3 one of a chip's two cores, or a GPU.

    Peak, bandwidth and memory come from the vendors' data sheets (cloud.google.com/tpu/docs, system architecture;
    NVIDIA's). The clock is computed from the data sheet's peak and the number of multipliers; for v2 to v4 it is also
    published (Jouppi et al. 2020, 2023). ``usable`` of a TPU is the limit in libtpu's out-of-memory error: the data
    sheet's memory minus the runtime's share. ``usable`` of a GPU is the part that JAX allocates.

    Attributes:
        name: the generation.
        device: "chip", "core" or "GPU".
        flops: peak bfloat16 FLOP/s.
        bandwidth: bytes/s of its memory.
        clock: clock of its cores in Hz.
        memory: bytes of its memory.
        usable: bytes of its memory that programs can use.
        options: further options of its topology.
        narrow: how many times faster it multiplies 8-bit numbers at most.
        host: bytes/s from the host's pinned memory. This is an assumption, not from a data sheet: 16 GB/s for TPUs;
            for GPUs 80 % of a PCIe link of 16 lanes.
    """

    name: str
    device: str
    flops: float
    bandwidth: float
    clock: float
    memory: float
    usable: float
    options: Mapping[str, Any] = field(default_factory=dict)
    narrow: float = 1.0
    host: float = 16e9

    @property
    def half(self) -> str:
        """The 16-bit dtype that it multiplies fast."""
        return "bfloat16"


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "core", 22.5e12, 350e9, 0.70e9, 8 * GIB, 7.48 * GIB),
        Chip("v3", "core", 61.5e12, 450e9, 0.94e9, 16 * GIB, 15.48 * GIB),
        # Both cores as one device, as JAX runs it; libtpu's default for a topology is a device per core.
        Chip("v4", "chip", 275e12, 1228e9, 1.05e9, 32 * GIB, 30.75 * GIB, {"chip_config_name": "megacore"}),
        Chip("v5e", "chip", 197e12, 819e9, 1.503e9, 16 * GIB, 15.75 * GIB, narrow=2),
        Chip("v5p", "chip", 459e12, 2765e9, 1.75e9, 96 * GIB, 95.74 * GIB, narrow=2),
        Chip("v6e", "chip", 918e12, 1640e9, 1.75e9, 32 * GIB, 31.25 * GIB, narrow=2),
    )
}


@dataclass(frozen=True)
class Gpu(Chip):
    """An NVIDIA GPU, by the vendor's data sheets and architecture white papers.

    ``flops`` is dense, with float32 sums; ``memory`` is the size that the driver reports.

    Attributes:
        capability: compute capability, e.g. (9, 0).
        processors: number of streaming multiprocessors.
        shared: bytes of shared memory of a multiprocessor.
        cache: bytes of the L2 cache.
    """

    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    shared: int = 0
    cache: int = 0

    @property
    def half(self) -> str:
        major, minor = self.capability
        return fast_16bit_dtype(float(f"{major}.{minor}"))

    @property
    def described(self) -> str:
        """The description for XLA's compiler: a GpuTargetConfigProto as text."""
        major, minor = self.capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_block_optin": self.shared - 1024,
            "shared_memory_per_core": self.shared,
            # 8.6 and 8.9 are consumer chips with smaller multiprocessors.
            "threads_per_core_limit": {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(self.capability, 2048),
            "core_count": self.processors,
            "fpus_per_core": 64 if self.capability <= (8, 0) else 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": int(self.bandwidth),
            "l2_cache_size": self.cache,
            "clock_rate_ghz": self.clock / 1e9,
            "device_memory_size": int(self.memory),
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        fields = "\n".join(f"  {name}: {value}" for name, value in device.items())
        return (
            f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 }\n"
            "runtime_version { major: 13 minor: 0 patch: 0 }\n"
            f'device_description_str: "{self.name}"\n'
        )


PREALLOCATED = 0.75
"""Fraction of a GPU's memory that JAX allocates by default (XLA_PYTHON_CLIENT_MEM_FRACTION)."""

_KIB, _MIB = 2**10, 2**20


def _gpu(
    name: str, tflops: float, bandwidth: float, clock: float, memory: float, capability: tuple[int, int],
    processors: int, shared: int, cache: float, link: int = 4,
) -> Gpu:  # fmt: skip
    """Make a ``Gpu`` from TFLOP/s, GB/s, GHz, GiB, capability, processors, KiB of shared memory, MiB of cache, and the
    generation of its PCIe link.
    """
    return Gpu(
        name, "GPU", tflops * 1e12, bandwidth * 1e9, clock * 1e9, memory * GIB, PREALLOCATED * memory * GIB,
        host=0.8 * 15.75e9 * 2 ** (link - 3), narrow=4 if name.startswith("rtx") else 2, capability=capability,
        processors=processors, shared=shared * _KIB, cache=int(cache * _MIB),
    )  # fmt: skip


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 65, 320, 1.59, 15.0, (7, 5), 40, 64, 4, 3),
        _gpu("rtx3090", 71, 936, 1.695, 24.0, (8, 6), 82, 100, 6),
        _gpu("rtx4090", 165.2, 1008, 2.52, 24.0, (8, 9), 128, 100, 72),
        _gpu("a10g", 70, 600, 1.71, 22.5, (8, 6), 80, 100, 6),
        _gpu("l4", 121, 300, 2.04, 22.5, (8, 9), 58, 100, 48),
        _gpu("l40s", 362, 864, 2.52, 45.0, (8, 9), 142, 100, 96),
        _gpu("a100-40gb", 312, 1555, 1.41, 39.6, (8, 0), 108, 164, 40),
        _gpu("a100-80gb", 312, 2039, 1.41, 79.2, (8, 0), 108, 164, 40),
        _gpu("h100", 989.4, 3352, 1.83, 79.6, (9, 0), 132, 228, 50, 5),
        _gpu("h200", 989.4, 4800, 1.83, 139.8, (9, 0), 132, 228, 50, 5),
        _gpu("b200", 2250, 8000, 1.856, 179.0, (10, 0), 148, 228, 126, 5),
    )
}

_TPU_NAME = re.compile(r"(?:tpu[-:])?(\w+):(\d{1,4}(?:x\d{1,4}){1,2})", re.ASCII)
_GPU_NAME = re.compile(r"(?:gpu[-:])?([\w-]+?)(?::(\d{1,6}))?", re.ASCII)
_SPATIAL = ("v4", "v5p")
"""Generations whose chips are connected along three axes."""
_HOST = 4
"""Chips per host that libtpu assumes by default."""


@dataclass(frozen=True)
class Target:
    """The chips of a machine.

    Attributes:
        chip: the type of chip.
        shape: number of TPU chips along each axis, e.g. (2, 2); the number of GPUs.
    """

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.platform}-{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def platform(self) -> str:
        """ "tpu" or "gpu"."""
        return "gpu" if isinstance(self.chip, Gpu) else "tpu"

    @property
    def compiler(self) -> str:
        """The compiler for this platform."""
        return "JAX's CUDA plugin" if self.platform == "gpu" else "libtpu"

    @property
    def chips(self) -> int:
        """The number of chips or GPUs."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """The number of JAX devices."""
        return self.chips * (2 if self.chip.device == "core" else 1)

    @property
    def topology(self) -> dict[str, Any]:
        """Arguments for ``jax.experimental.topologies.get_topology_desc``."""
        if isinstance(self.chip, Gpu):
            # Slices x hosts per slice x GPUs per host.
            topology = f"1x1x{self.shape[0]}"
            return {"platform": "cuda", "topology": topology, "target_config": self.chip.described}
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        options = {"topology_name": name, "platform": "tpu", **self.chip.options}
        if self.chips < _HOST:
            options["chips_per_host_bounds"] = (*self.shape, 1, 1)[:3]
        return options


def parse_target(target: str) -> Target:
    """Parse a target, e.g. "tpu-v5e:2x2", "v4:2x2x1", "gpu-h100:8" or "l4".

    Raises:
        InputError: ``target`` has another form, or the chip is unknown.
    """
    examples = "write it like 'tpu-v5e:2x2' (four chips), 'tpu-v4:2x2x1', 'gpu-h100' or 'gpu-h100:8'"
    if not isinstance(target, str) or not target:
        raise InputError("target", "is not the name of a TPU or GPU", cure=examples, value=target)
    text = target.lower()
    match = _GPU_NAME.fullmatch(text)
    if match and match[1] in GPUS and not text.startswith("tpu"):
        count = int(match[2] or 1)
        if not count:
            raise InputError("target", "has no GPUs", cure=examples, value=target)
        return Target(GPUS[match[1]], (count,))
    match = _TPU_NAME.fullmatch(text)
    name = match[1] if match else re.sub(r"^[tg]pu[-:]", "", text).partition(":")[0]
    if name not in CHIPS:
        begun = [repr(known) for known in (*CHIPS, *GPUS) if name and known.startswith(name) and known != name]
        hint = f"there are {' and '.join(begun)}" if begun else nearest(name, [*CHIPS, *GPUS])
        hint += f" There are {', '.join(CHIPS)} and {', '.join(GPUS)}" if hint.endswith("?") else ""
        raise InputError("target", "is not known", cure=f"{hint}; {examples}", value=target)
    if match is None:
        raise InputError("target", "does not say how the chips are wired", cure=examples, value=target)
    shape = tuple(int(side) for side in match[2].split("x"))
    if not all(shape):
        raise InputError("target", "has no chips", cure=examples, value=target)
    if name not in _SPATIAL and shape[2:] > (1,):
        raise InputError(
            "target",
            f"is not laid out as chips of a {name}, which lie in a plane, such as tpu-{name}:2x4",
            cure=examples,
            value=target,
        )
    return Target(CHIPS[name], shape)


def environment() -> dict[str, str]:
    """Return the environment of a process that compiles for absent devices; it must be set before importing JAX.

    Without it libtpu searches for a TPU, queries the cloud's metadata server, prints errors to stderr, and cannot be
    loaded twice on a machine.
    """
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    return {**os.environ, **quiet}
