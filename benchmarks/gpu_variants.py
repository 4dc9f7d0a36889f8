"""What settings of XLA, forms of kernels and matmuls in 8 bits give on a GPU: an evaluation or a decode, by turns.

    python -m benchmarks.gpu_variants --model out/sdxl --size 1024x1024 --json out/variants.json [--only base lt ...]

Everything is compiled at the same time, then timed by turns; outputs are compared with those of "base".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_checks import rms
from benchmarks.lab.job import Job, make_inputs
from benchmarks.lab.ours import _call, _load
from canvax import nn
from canvax.files import written
from canvax.kernels import gpu, target
from canvax.kernels.target import compiling_on
from canvax.params import Params
from canvax.quantize import KINDS

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "merged": {"xla_gpu_dot_merger_threshold_mb": "32"},
    "lt": {"xla_gpu_enable_cublaslt": True},
    "no-lt": {"xla_gpu_enable_cublaslt": False},
    "no-triton": {"xla_gpu_enable_triton_gemm": False},
    "runtime-fusion": {"xla_gpu_use_runtime_fusion": True},
    "conv-fusion": {"xla_gpu_experimental_enable_conv_fusion": True},
    "no-graphs": {"xla_gpu_enable_command_buffer": ""},
    "cudnn-gemm": {"xla_gpu_cudnn_gemm_fusion_level": "2"},
    "prompt-by-xla": {},
    "whole-sums": {},
}
"""Settings beside canvax's own, by name."""


@contextmanager
def form(name: str) -> Iterator[None]:
    """What else is different while that variant is traced."""
    fused = gpu.attend_by_cudnn

    def attend(q: Any, k: Any, v: Any, *masks: Any, scale: float) -> Any:
        if k.shape[1] > 128 or any(mask is not None for mask in masks):
            return fused(q, k, v, *masks, scale=scale)
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="xla")

    parts = nn._parts
    if name == "prompt-by-xla":
        gpu.attend_by_cudnn = attend
    if name == "whole-sums":  # of group normalisation
        nn._parts = lambda pixels: 1
    try:
        yield
    finally:
        gpu.attend_by_cudnn, nn._parts = fused, parts


def programs(job: Job, names: list[str]) -> dict[str, Callable[[], Any]]:
    """A call of each that compiles."""
    kinds = {name: name if name in KINDS else None for name in names}
    asked = {"folder": job.folder, "dtype": job.dtype, "part": job.part}
    loaded = {kind: _load(asked, kind) for kind in set(kinds.values())}
    calls = {
        kind: _call(job.part, model, params, make_inputs(job, model)) for kind, (model, params, _) in loaded.items()
    }

    def compiled(name: str, lowered: Any, params: Params, arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            options = dict(target.OPTIONS.get(jax.default_backend(), {})) | VARIANTS.get(name, {})
            program = lowered.compile(options)
            program(params, *arguments)
        except Exception as error:  # a setting that this XLA does not have, or that breaks it: the others go on
            print(f"{job.part} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return None
        print(f"{job.part} {name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)
        return lambda: jax.block_until_ready(program(params, *arguments))

    with ThreadPoolExecutor(len(names)) as pool:
        waiting = {}
        for name, kind in kinds.items():
            _, params, mesh = loaded[kind]
            function, arguments = calls[kind]
            arguments = jax.device_put(arguments, mesh.devices.flat[0])
            with form(name), compiling_on(mesh):  # a trace of its own for each: kernels are chosen there
                lowered = jax.jit(lambda *given, function=function: function(*given)).lower(params, *arguments)
            waiting[name] = pool.submit(compiled, name, lowered, params, arguments)
        return {name: future.result() for name, future in waiting.items() if future.result()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", nargs="+", choices=["denoiser", "vae"], default=["denoiser"])
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *KINDS], default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    width, height = (int(side) for side in arguments.size.split("x"))
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for part in arguments.parts:
        job = Job(part, arguments.model, width, height, arguments.batch, 1, arguments.dtype, jax.default_backend())
        runs = programs(job, arguments.only)
        outputs = {name: np.asarray(run(), np.float32) for name, run in runs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(20):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
        report[part] = {
            name: {"median_s": statistics.median(each), "differs_by_rms": rms(outputs[name], outputs["base"])}
            for name, each in seconds.items()
        }
        for name, row in report[part].items():
            print(f"{part} {name}: {row['median_s'] * 1e3:.2f} ms, {row['differs_by_rms']:.1e} from base", flush=True)
        if arguments.json:
            with written(arguments.json) as temporary:
                temporary.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
