"""Compare the kinds of operations of Stable Diffusion 1.5's UNet with PyTorch, one by one: where does the time go?

    python -m benchmarks.operations [--dtype bfloat16] [--rounds 9] [--only attention]

Each operation has the shapes of a guided evaluation at 512 x 512. Both programs get the same inputs, and outputs that
differ by more than rounding are an error. They take turns in one process with all threads. The table gives medians, the
rate in GFLOP/s of the plain method (Winograd's and doubled products do less work, so a rate can exceed what the
processor multiplies), how often an evaluation does the operation, and what canvax gains or loses there. The rate
of the first row, a large product of matrices, is what either library can reach.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from canvax.kernels.attention import attention
from canvax.kernels.convolution import convolve, convolve_doubled
from canvax.kernels.matmul import matmul
from canvax.kernels.target import compiled_on
from canvax.nn import group_norm
from canvax.parallel.mesh import make_mesh

BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Root mean square of the difference over that of PyTorch's output."""

TURN = 0.1
"""Seconds of a turn, at least."""


class Operation(NamedTuple):
    """An operation in both libraries.

    Attributes:
        kind: what it is.
        shape: for the table.
        times: how often a guided evaluation does it.
        flops: of the plain method.
        ours: canvax's function of JAX arrays.
        theirs: PyTorch's function of tensors.
        inputs: arrays for canvax, channels last.
        layouts: for each input, the order of its axes in PyTorch.
        back: the order of axes that makes PyTorch's output that of canvax.
    """

    kind: str
    shape: str
    times: int
    flops: float
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    inputs: list[np.ndarray]
    layouts: list[tuple[int, ...]]
    back: tuple[int, ...]


def operations(rng: np.random.Generator) -> Iterator[Operation]:
    """The operations that take most of an evaluation, two samples."""

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(fan_in**0.5)

    image, kernel, plain, pixels = (0, 3, 1, 2), (3, 2, 0, 1), (0, 1), (0, 2, 3, 1)
    for rows, inner, outer, times in [
        (2048, 2048, 2048, 0), (8192, 320, 320, 40), (2048, 640, 640, 40), (512, 1280, 1280, 40), (8192, 320, 2560, 5),
        (8192, 1280, 320, 5), (2048, 640, 5120, 5), (2048, 2560, 640, 5), (512, 1280, 10240, 5), (512, 5120, 1280, 5),
    ]:  # fmt: skip
        inputs = [normal(rows, inner), normal(inner, outer, fan_in=inner)]
        flops = 2.0 * rows * inner * outer
        shape = f"{rows} x {inner} x {outer}"
        yield Operation("matmul", shape, times, flops, matmul, F.linear, inputs, [plain, (1, 0)], plain)
    for side, inner, outer, stride, times in [
        (64, 320, 320, 1, 7), (64, 640, 320, 1, 2), (64, 960, 320, 1, 1), (32, 640, 640, 1, 6), (32, 1280, 640, 1, 1),
        (32, 1920, 640, 1, 1), (16, 1280, 1280, 1, 6), (16, 2560, 1280, 1, 2), (8, 1280, 1280, 1, 11),
        (8, 2560, 1280, 1, 3), (64, 320, 320, 2, 1),
    ]:  # fmt: skip
        inputs = [normal(3, 3, inner, outer, fan_in=9 * inner), normal(2, side, side, inner)]
        flops = 2 * 2 * side**2 * 9.0 * inner * outer / stride**2
        shape = f"{side} x {side}, {inner} -> {outer}" + (", strided" if stride > 1 else "")

        def strided(weight: Any, x: Any, stride: int = stride) -> Any:
            return convolve(weight, x, stride=stride)

        def convolved(weight: Any, x: Any, stride: int = stride) -> Any:
            return F.conv2d(x, weight, padding=1, stride=stride)

        yield Operation("convolution", shape, times, flops, strided, convolved, inputs, [kernel, image], pixels)
    for side, width in [(8, 1280), (16, 1280), (32, 640)]:
        inputs = [normal(3, 3, width, width, fan_in=9 * width), normal(2, side, side, width)]

        def enlarged(weight: Any, x: Any) -> Any:
            return F.conv2d(F.interpolate(x, scale_factor=2.0), weight, padding=1)

        flops = 2 * 2 * (2 * side) ** 2 * 9.0 * width**2
        shape = f"{side} x {side}, {width}"
        layouts = [kernel, image]
        yield Operation("doubled convolution", shape, 1, flops, convolve_doubled, enlarged, inputs, layouts, pixels)
    for tokens, keys, width, times in [
        (4096, 4096, 40, 5), (1024, 1024, 80, 5), (256, 256, 160, 5), (4096, 77, 40, 5), (1024, 77, 80, 5),
    ]:  # fmt: skip
        inputs = [normal(2, count, 8, width) for count in (tokens, keys, keys)]
        flops = 4.0 * 2 * tokens * keys * 8 * width
        shape = f"{tokens} x {keys}, 8 heads of {width}"
        heads, theirs = (0, 2, 1, 3), F.scaled_dot_product_attention
        yield Operation("attention", shape, times, flops, attention, theirs, inputs, [heads] * 3, heads)
    for side, width, times in [(64, 320, 13), (32, 640, 11), (16, 1280, 11)]:
        inputs = [normal(2, side, side, width), normal(width), normal(width)]

        def normalized(x: Any, weight: Any, bias: Any) -> Any:
            return group_norm({"weight": weight, "bias": bias}, x, groups=32, eps=1e-5, activation=jax.nn.silu)

        def normalized_by_torch(x: Any, weight: Any, bias: Any) -> Any:
            return F.silu(F.group_norm(x, 32, weight, bias, 1e-5))

        flops, layouts = 8.0 * inputs[0].size, [image, (0,), (0,)]
        shape = f"{side} x {side} x {width}"
        kind, theirs = "group norm, SiLU", normalized_by_torch
        yield Operation(kind, shape, times, flops, normalized, theirs, inputs, layouts, pixels)


def compare(operation: Operation, dtype: str, rounds: int) -> tuple[float, float]:
    """Median seconds of canvax and of PyTorch."""
    ours = [jnp.asarray(x, dtype) for x in operation.inputs]
    theirs = [
        torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, dtype)).permute(layout)
        for x, layout in zip(ours, operation.layouts, strict=True)
    ]
    # Weights as PyTorch's layers keep them; images of the diffusers pipeline are channels last.
    if operation.kind == "matmul":
        theirs[1] = theirs[1].contiguous()
    elif "convolution" in operation.kind:
        theirs[0] = theirs[0].contiguous(memory_format=torch.channels_last)
    program = compiled_on(make_mesh(jax.devices()[:1]), operation.ours, *ours)
    want = operation.theirs(*theirs).float().permute(operation.back).numpy()
    difference = np.asarray(program(*ours), np.float32) - want
    far = float(np.sqrt(np.mean(difference**2) / np.mean(want**2)))
    if not far < BOUNDS[dtype]:
        raise SystemExit(f"{operation.kind} {operation.shape}: the outputs differ by {far:.1e}")
    calls = [lambda: jax.block_until_ready(program(*ours)), lambda: operation.theirs(*theirs)]
    repeats, seconds = [], [list[float](), list[float]()]
    for call in calls:
        began = time.perf_counter()
        call()
        repeats.append(max(1, int(TURN / (time.perf_counter() - began))))
    for _ in range(rounds):
        for call, repeat, times in zip(calls, repeats, seconds, strict=True):
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            times.append((time.perf_counter() - began) / repeat)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="the kind of operation")
    arguments = parser.parse_args()
    sums: dict[str, list[float]] = {}
    with torch.inference_mode():
        print(f"{'':48} {'canvax':>16} {'PyTorch':>18}  ratio  times   gain")
        for operation in operations(np.random.default_rng(0)):
            if not operation.kind.startswith(arguments.only):
                continue
            ours, theirs = compare(operation, arguments.dtype, arguments.rounds)
            gain = operation.times * (theirs - ours)
            rates = [operation.flops / seconds / 1e9 for seconds in (ours, theirs)]
            name = f"{operation.kind} {operation.shape}"
            print(
                f"{name:48} {ours * 1e3:7.1f} ms {rates[0]:5.0f} G {theirs * 1e3:8.1f} ms {rates[1]:5.0f} G"
                f" {ours / theirs:6.2f} {operation.times:6} {gain * 1e3:+6.0f} ms",
                flush=True,
            )
            total = sums.setdefault(operation.kind, [0, 0])
            total[0] += operation.times * ours
            total[1] += operation.times * theirs
    for kind, (ours, theirs) in {**sums, "all": [sum(column) for column in zip(*sums.values(), strict=True)]}.items():
        print(f"{kind:48} {ours:7.2f} s {theirs:16.2f} s {ours / theirs:14.2f}")


if __name__ == "__main__":
    main()
