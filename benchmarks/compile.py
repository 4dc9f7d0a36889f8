"""How long a full-size model takes to compile for this machine, from nothing: no weights, no cache.

    python benchmarks/compile.py [--model sdxl] [--size 1024] [--batch 1]

One program after another, and then all at once in another process, which is how canvax compiles them. ``--inlined`` is
what it would be if blocks were not computations of their own.

For TPUs that are not there, ``canvax plan`` says the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

os.environ["CANVAX_CACHE_DIR"] = "off"

import jax.numpy as jnp

from canvax.kernels import outline

if "--inlined" in sys.argv:  # before the models are imported, whose blocks it decorates
    outline.outlined = lambda function: function

from canvax.compile.programs import Programs
from canvax.families.known import PRESETS
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import abstract_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl", choices=sorted(PRESETS))
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--inlined", action="store_true", help="blocks are not computations of their own")
    parser.add_argument("--at-once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = PRESETS[arguments.model]
    mesh = make_mesh(data=1)
    programs = Programs(model, mesh)
    params = {name: abstract_params(spec, jnp.float32, mesh) for name, spec in model.specs().items()}
    latents = model.latent_shape(arguments.batch, arguments.size, arguments.size)
    if arguments.at_once:
        print(_row("all at once", lambda: programs.ready(params, latents)))
        return
    print(
        f"| {arguments.model}, {arguments.size} x {arguments.size}, float32 | seconds | of a processor |\n|---|---|---|"
    )
    for name in programs.wanted(params, latents):
        print(_row(name, partial(programs.program, name, params, latents)))
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--at-once"], check=True)


def _row(name: str, call: Callable[[], object]) -> str:
    began, used = time.perf_counter(), time.process_time()
    call()
    return f"| {name} | {time.perf_counter() - began:.1f} | {time.process_time() - used:.1f} |"


if __name__ == "__main__":
    main()
