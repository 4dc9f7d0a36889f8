"""Places of the weights: the memory and the time of each, from the figures of the compiled programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from canvax.denoise import WINDOW
from canvax.models.networks import Networks
from canvax.parallel.rules import device_bytes
from canvax.params import Spec, flatten
from canvax.planning.targets import Chip
from canvax.weights.cast import parse_dtype

if TYPE_CHECKING:
    from canvax.planning.plan import ProgramPlan

AHEAD = 7
"""Streamed weights on the devices at a time: five copies that XLA has begun for a TPU, and those in use."""


@dataclass(frozen=True)
class Mode:
    """A place of the weights, with the memory and the time of a batch of images.

    Attributes:
        place: "resident" on the devices; "offloaded", on the devices while their network runs; or "streamed", on the
            devices while their layer runs.
        quantize: quantisation of large weights, or None.
        bytes: peak memory of a device.
        fits: True if the device has it.
        seconds: the compiler's estimate and the copies from the host's memory; for GPUs a lower bound.
    """

    place: str
    quantize: str | None
    bytes: int
    fits: bool
    seconds: float


def modes(
    networks: Networks,
    programs: Sequence[ProgramPlan],
    chip: Chip,
    *,
    streamed: Sequence[str],
    quantize: str | None,
    dtype: str,
    axes: Mapping[str, int],
) -> tuple[Mode, ...]:
    """Return the modes: with ``quantize``, or without it and with int8.

    The figures of programs with weights of 16 bits stand for those with 8 bits. What a model computes of the text
    before its first step is not a copy of its own.

    Args:
        networks: the model.
        programs: its programs, none of them refused.
        chip: the device.
        streamed: names of the programs that were compiled with streamed weights.
        quantize: quantisation of the compiled programs.
        dtype: dtype of the other weights.
        axes: number of devices along each axis of the mesh.
    """

    reads = {"encode": networks.text.names, "denoise": (networks.denoiser.component,)}

    def size(spec: Spec) -> int:
        return device_bytes(spec, parse_dtype(dtype), axes)

    def read(sizes: Mapping[str, int], program: ProgramPlan) -> int:
        return sum(sizes[name] for name in reads.get(program.name, ("vae",)))

    def weights(kind: str | None, *, streamed: bool) -> dict[str, int]:
        return {name: size(spec) for name, spec in networks.specs(kind, streamed=streamed).items()}

    def inputs(program: ProgramPlan) -> int:
        return (
            program.argument_bytes
            + program.code_bytes
            - read(weights(quantize, streamed=program.name in streamed), program)
        )

    def working(program: ProgramPlan) -> int:
        return program.temporary_bytes + program.output_bytes

    def seconds(program: ProgramPlan) -> float:
        return program.bound_seconds(chip) if program.seconds is None else program.seconds

    rest = sum(map(inputs, programs))
    setup = sum(math.ceil(program.evaluations / WINDOW) * program.setup_seconds for program in programs)
    compute = setup + sum(program.evaluations * seconds(program) for program in programs)
    found: list[Mode] = []
    for kind in dict.fromkeys((quantize, quantize or "int8")):
        whole, left = weights(kind, streamed=False), weights(kind, streamed=True)
        largest = {name: max((size({"": param}) for _, param in flatten(spec) if param.large), default=0)
                   for name, spec in networks.specs(kind).items() if left[name] < whole[name]}  # fmt: skip
        copied, waited, ahead = 0, setup, dict[str, int]()
        for program in programs:
            size_of_copy, runs = read(whole, program), program.evaluations
            copied += size_of_copy * (1 if program.name == "denoise" else runs)
            waited += runs * max(seconds(program), (size_of_copy - read(left, program)) / chip.host)
            layers = [largest.get(name, 0) for name in reads.get(program.name, ())]
            ahead[program.name] = 0 if program.name in streamed else AHEAD * max(layers, default=0)
        each = {
            "resident": (sum(whole.values()) + max(map(working, programs)), compute),
            "offloaded": (max(read(whole, program) + working(program) for program in programs),
                          compute + copied / chip.host),
            "streamed": (sum(left.values()) + max(working(program) + ahead[program.name] for program in programs),
                         waited),
        }  # fmt: skip
        found += [Mode(place, kind, size + rest, size + rest <= chip.usable, time)
                  for place, (size, time) in each.items()]  # fmt: skip
    return tuple(found)
