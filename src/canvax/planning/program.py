"""The figures of a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from canvax.planning.targets import Chip, Gpu


@dataclass(frozen=True)
class ProgramPlan:
    """A program on a device. Sizes are in bytes, times in seconds.

    Attributes:
        name: "encode", "denoise" or "decode"; for reference images "image encoder WIDTHxHEIGHT".
        evaluations: number of runs for a batch of images; for "denoise" the number of steps.
        compile_seconds: time of compiling, now or in an earlier plan.
        reused: whether the figures come from an earlier plan.
        refused: why the compiler refused the program (memory), or None.
        seconds: the compiler's estimate of an evaluation; None for GPUs, whose compiler has no estimate.
        setup_seconds: the compiler's estimate of the work of "denoise" before its first step.
        flops: FLOPs of matmuls, convolutions and kernels in an evaluation.
        narrow_flops: those of them that multiply numbers of 8 bits.
        hbm_bytes: transfers to and from the device's memory in an evaluation; on GPUs through the L2 cache.
        kernels: number of kernels in an evaluation.
        collectives: number of collectives of each kind in the program.
        collectives_in_loop: number of collectives of each kind in the loop over steps.
        unpriced: instructions without an estimated time.
        argument_bytes: size of weights and inputs.
        output_bytes: size of the results.
        temporary_bytes: size of temporary arrays.
        code_bytes: size of the program.
        cost_analysis: the unchanged result of the compiler's ``cost_analysis``; docs/tpu.md lists its errors.
    """

    name: str
    evaluations: int
    compile_seconds: float
    reused: bool = False
    refused: str | None = None
    seconds: float | None = None
    setup_seconds: float = 0.0
    flops: float = 0.0
    narrow_flops: float = 0.0
    hbm_bytes: float = 0.0
    kernels: int = 0
    collectives: Mapping[str, int] = field(default_factory=dict)
    collectives_in_loop: Mapping[str, int] = field(default_factory=dict)
    unpriced: tuple[str, ...] = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    cost_analysis: Mapping[str, float] = field(default_factory=dict)

    def bound_seconds(self, chip: Chip) -> float:
        """Return a lower bound of an evaluation: its FLOPs at the data sheet's peak, or its bytes at full bandwidth.

        For a GPU only weights, inputs and results count, since its cache may avoid other transfers.
        """
        least = self.argument_bytes + self.output_bytes if isinstance(chip, Gpu) else self.hbm_bytes
        flops = self.flops - self.narrow_flops + self.narrow_flops / chip.narrow
        return max(flops / chip.flops, least / chip.bandwidth)
