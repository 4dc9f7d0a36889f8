"""How long a full-size model takes to compile for this machine, from nothing: no weights, no cache.

    python benchmarks/compile.py [--model sdxl] [--size 1024] [--batch 1]

For TPUs that are not there, ``canvax plan`` says the same.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["CANVAX_CACHE_DIR"] = "off"

import jax.numpy as jnp

from canvax.compile.programs import Programs
from canvax.models.presets import PRESETS
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import abstract_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl", choices=sorted(PRESETS))
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    model = PRESETS[arguments.model]
    mesh = make_mesh(data=1)
    programs = Programs(model.text, model.unet, model.vae, mesh)
    params = {name: abstract_params(spec, jnp.float32, mesh) for name, spec in model.specs.items()}
    side = arguments.size // model.vae.factor
    latents = (arguments.batch, side, side, model.unet.in_channels)
    calls = {
        "text encoder": lambda: programs.encode_text(params, arguments.batch),
        "denoiser": lambda: programs.denoise(params, latents, guided=True),
        "decoder": lambda: programs.decode(params, latents),
    }
    print(
        f"| {arguments.model}, {arguments.size} x {arguments.size}, float32 | seconds | of a processor |\n|---|---|---|"
    )
    for name, call in calls.items():
        began, used = time.perf_counter(), time.process_time()
        call()
        print(f"| {name} | {time.perf_counter() - began:.1f} | {time.process_time() - used:.1f} |")


if __name__ == "__main__":
    main()
