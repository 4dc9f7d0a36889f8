"""TPUs that can be planned for, and how to ask libtpu for them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canvax.errors import InputError, nearest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """What JAX calls one device of a TPU generation: a chip, or one of a chip's two cores in v2 and v3.

    Peak, bandwidth and memory are those of the vendor's data sheets (cloud.google.com/tpu/docs, system architecture).
    The clock is the one at which the data sheet's peak follows from the number of multipliers; for v2 to v4 it is also
    published (Jouppi et al. 2020, 2023). ``usable`` is what libtpu says it has when a program asks for too much: the
    data sheet's memory less what the runtime keeps for itself.

    Attributes:
        name: the generation.
        device: "chip" or "core".
        flops: peak bfloat16 FLOP/s.
        bandwidth: bytes/s of its memory.
        clock: Hz of its cores.
        memory: bytes of its memory.
        usable: bytes of it that programs can use.
        options: what else the topology is asked with.
    """

    name: str
    device: str
    flops: float
    bandwidth: float
    clock: float
    memory: float
    usable: float
    options: Mapping[str, Any] = field(default_factory=dict)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "core", 22.5e12, 350e9, 0.70e9, 8 * GIB, 7.48 * GIB),
        Chip("v3", "core", 61.5e12, 450e9, 0.94e9, 16 * GIB, 15.48 * GIB),
        # Both cores as one device, as JAX runs it; libtpu's own default for a topology is core by core.
        Chip("v4", "chip", 275e12, 1228e9, 1.05e9, 32 * GIB, 30.75 * GIB, {"chip_config_name": "megacore"}),
        Chip("v5e", "chip", 197e12, 819e9, 1.503e9, 16 * GIB, 15.75 * GIB),
        Chip("v5p", "chip", 459e12, 2765e9, 1.75e9, 96 * GIB, 95.74 * GIB),
        Chip("v6e", "chip", 918e12, 1640e9, 1.75e9, 32 * GIB, 31.25 * GIB),
    )
}

_TARGET = re.compile(r"(?:tpu[-:])?(\w+):(\d+(?:x\d+){1,2})", re.ASCII)
_HOST = 4
"""Chips of a host, as libtpu assumes unless told otherwise."""


@dataclass(frozen=True)
class Target:
    """Some chips, wired up.

    Attributes:
        chip: the generation.
        shape: chips along each axis, such as (2, 2).
    """

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"tpu-{self.topology}"

    @property
    def chips(self) -> int:
        """How many chips there are."""
        return math.prod(self.shape)

    @property
    def topology(self) -> str:
        """Its name for libtpu."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def options(self) -> dict[str, Any]:
        """What libtpu is told beside the name."""
        if self.chips >= _HOST:
            return dict(self.chip.options)
        return {**self.chip.options, "chips_per_host_bounds": (*self.shape, 1, 1)[:3]}


def parse_target(target: str) -> Target:
    """A target such as "tpu-v5e:2x2" or "v4:2x2x1".

    Raises:
        InputError: it is not of that form, or the generation is not known.
    """
    examples = "write it like 'tpu-v5e:2x2' (four chips) or 'tpu-v4:2x2x1'"
    if not isinstance(target, str) or not target:
        raise InputError(f"target={target!r} is not the name of a TPU; {examples}")
    match = _TARGET.fullmatch(target.lower())
    name = match[1] if match else re.sub(r"^tpu[-:]", "", target.lower()).partition(":")[0]
    if name not in CHIPS:
        raise InputError(
            f"target={target!r} is not known; {nearest(name, list(CHIPS))} There are {', '.join(CHIPS)}; {examples}"
        )
    if match is None:
        raise InputError(f"target={target!r} does not say how the chips are wired; {examples}")
    shape = tuple(int(side) for side in match[2].split("x"))
    if not all(shape):
        raise InputError(f"target={target!r} has no chips; {examples}")
    return Target(CHIPS[name], shape)


def environment() -> dict[str, str]:
    """Environment of a process that compiles for a TPU without one; it has to be there before JAX is imported.

    libtpu would otherwise look for a TPU to drive, ask the cloud's metadata server, complain on stderr, and refuse to
    be loaded twice on a machine.
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
