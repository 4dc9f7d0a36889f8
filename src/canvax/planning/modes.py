"""Places of the weights: the memory and the time of each, from the figures of the compiled programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canvax.denoise import WINDOW
from canvax.models.networks import Networks
from canvax.parallel.rules import AHEAD, device_bytes, largest_layer
from canvax.params import Spec
from canvax.planning.program import ProgramPlan
from canvax.planning.targets import Chip
from canvax.weights.cast import parse_dtype


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

    The figures of programs with weights of 16 bits serve for those with 8 bits as well. Copies before the first step,
    which Qwen-Image needs to read its text, do not count.

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

    def weights(kind: str | None, *, streamed: bool) -> dict[str, int]:
        """Return the bytes on a device of each component, without those that are streamed."""
        return {name: size(spec) for name, spec in networks.specs(kind, streamed=streamed).items()}

    def read(sizes: Mapping[str, int], program: ProgramPlan) -> int:
        return sum(sizes[name] for name in reads.get(program.name, ("vae",)))

    def working(program: ProgramPlan) -> int:
        return program.temporary_bytes + program.output_bytes

    def seconds(program: ProgramPlan) -> float:
        return program.bound_seconds(chip) if program.seconds is None else program.seconds

    compiled = {held: weights(quantize, streamed=held) for held in (False, True)}
    others = sum(program.argument_bytes + program.code_bytes - read(compiled[program.name in streamed], program)
                 for program in programs)  # fmt: skip
    calls = math.ceil(max(program.evaluations for program in programs) / WINDOW)
    setup = calls * sum(program.setup_seconds for program in programs)
    compute = setup + sum(program.evaluations * seconds(program) for program in programs)
    found: list[Mode] = []
    for kind in dict.fromkeys((quantize, quantize or "int8")):
        whole, left = weights(kind, streamed=False), weights(kind, streamed=True)
        layers = {name: largest_layer(spec, size) for name, spec in networks.specs(kind).items()}
        offloaded = compute
        layered = setup
        at_once = 0
        for program in programs:
            in_layers = read(whole, program) - read(left, program)
            offloaded += read(whole, program) / chip.host * (1 if program.name == "denoise" else program.evaluations)
            layered += program.evaluations * max(seconds(program), in_layers / chip.host)
            ahead = in_layers and program.name not in streamed and max(layers[name] for name in reads[program.name])
            at_once = max(at_once, working(program) + AHEAD * ahead)
        for place, held, time in (
            ("resident", sum(whole.values()) + max(map(working, programs)), compute),
            ("offloaded", max(read(whole, program) + working(program) for program in programs), offloaded),
            ("streamed", sum(left.values()) + at_once, layered),
        ):
            found.append(Mode(place, kind, held + others, held + others <= chip.usable, time))
    return tuple(found)
