"""A separate process that compiles for a TPU or GPU. It reads a job from a line of stdin and writes JSON lines.

It is separate because libtpu and JAX read their settings at import, and a compiler can crash or run out of memory;
neither must affect the caller, which may be using a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from canvax.compile.additions import ReadsReferences
from canvax.compile.inspect import collectives
from canvax.compile.kinds import DENOISERS, Kinds
from canvax.compile.programs import Programs, decode_images
from canvax.kernels.target import compiling_for
from canvax.models.text import encode_text
from canvax.parallel.mesh import AXES
from canvax.parallel.rules import abstract_params
from canvax.params import Params
from canvax.planning.flops import count_flops, evaluation_flops
from canvax.planning.hlo import Module, Work
from canvax.planning.job import Job
from canvax.planning.targets import parse_target


def main() -> int:
    """Compile the programs of the job whose names are the command's arguments."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps the compiler's output out of the report
    job = Job.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_caller, daemon=True).start()
    target = parse_target(job.target)
    try:
        topology = topologies.get_topology_desc(**target.topology)
    except Exception as error:
        _tell(report, refused=_first_line(error))
        return 1
    mesh = Mesh(np.asarray(topology.devices, dtype=object).reshape(job.mesh), AXES)
    for name in sys.argv[1:]:
        _tell(report, program=name)
        _tell(report, program=name, result=compile_program(job, name, mesh))
    return 0


def _end_with_caller() -> None:
    """Exit when stdin is closed, since the caller has then ended, even by a crash."""
    sys.stdin.read()
    os._exit(1)


def _tell(report: TextIO, **message: Any) -> None:
    print(json.dumps(message), file=report, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def compile_program(job: Job, name: str, mesh: Mesh) -> dict[str, Any]:
    """Compile a program and return its figures, the fields of ``canvax.planning.program.ProgramPlan``."""
    model = job.model
    programs, specs = Programs(model, mesh, described=True), model.specs(job.quantize, streamed=job.streamed)
    params = {name: abstract_params(spec, job.dtype, mesh) for name, spec in specs.items()}
    latents = model.latent_shape(job.batch, job.height, job.width)
    kind = {"encode": "text encoder", "denoise": DENOISERS[job.guided], "decode": "decoder"}.get(name, name)
    kinds = Kinds((job.guided,)).adding(job.references and ReadsReferences(job.references))
    began = time.perf_counter()
    try:
        compiled: Any = programs.program(kind, params, latents, kinds).executable
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fault = _first_line(error).removeprefix("RESOURCE_EXHAUSTED: ").removesuffix(".")
        return {"compile_seconds": time.perf_counter() - began, "refused": fault}
    seconds = time.perf_counter() - began
    text, memory = compiled.as_text(), compiled.memory_analysis()
    target = parse_target(job.target)
    module = Module(text, target.chip)
    setup, run = (module.setup(), module.step()) if name == "denoise" else (Work(), module.whole())
    cost = compiled.cost_analysis() or {}
    estimate = {} if target.platform == "gpu" else {
        # The estimated cycles do not include waiting for prefetches.
        "seconds": max(run.seconds, run.bytes / target.chip.bandwidth),
        "setup_seconds": setup.seconds,
        "unpriced": sorted(set(setup.unpriced + run.unpriced)),
    }  # fmt: skip
    return {
        "compile_seconds": seconds,
        **estimate,
        "flops": _flops(job, name, programs, params, latents) / mesh.size,
        "narrow_flops": _flops(job, name, programs, params, latents, narrow=True) / mesh.size,
        "hbm_bytes": run.bytes,
        "kernels": run.kernels,
        "collectives": collectives(text),
        "collectives_in_loop": collectives(module.step_text()),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "cost_analysis": {key: cost[key] for key in ("flops", "bytes accessed", "optimal_seconds") if key in cost},
    }


def _flops(
    job: Job, name: str, programs: Programs, params: Params, latents: tuple[int, int, int, int], *, narrow: bool = False
) -> float:
    """Count the FLOPs of an evaluation of a program on the whole batch, with ``narrow`` the denoiser's in 8 bits."""
    if narrow and name != "denoise":
        return 0.0
    model, shape = job.model, jax.ShapeDtypeStruct
    kinds = Kinds().adding(job.references and ReadsReferences(job.references))
    with compiling_for(parse_target(job.target).platform):
        if name == "encode":
            encode = programs.wanted(params, latents, kinds)["text encoder"]
            return count_flops(partial(encode_text, cfg=model.text.seeing(job.references)), params, *encode.inputs)
        if name == "decode":
            return count_flops(partial(decode_images, cfg=model.vae), params["vae"], shape(latents, jnp.float32))
        if name == "denoise":
            options: dict[str, Any] = {"guided": job.guided, "references": job.references, "narrow": narrow}
            return evaluation_flops(programs, params, latents, **options)
        encoder = programs.wanted(params, latents, kinds)[name]
        return count_flops(encoder.function, params["vae"], *encoder.inputs)


if __name__ == "__main__":
    sys.exit(main())
