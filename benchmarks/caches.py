"""What canvax's cache of compiled programs is worth beside JAX's own persistent cache.

    python -m benchmarks.caches                                     # the bundled model
    python -m benchmarks.caches --model sd15 --size 512             # random weights, written to --scratch
    python -m benchmarks.caches --model sdxl --size 512 --dtype bfloat16
    python -m benchmarks.caches --model sdxl --size 512 --ready     # until the programs are ready; no weights

Each run is a process of its own, which generates one image; seconds count from the start of the process. The two
caches are filled first and then take turns, because a machine's speed drifts. JAX's cache skips the compiler but not
the trace; canvax's skips both. "processor till ready" is seconds of all its threads, which other work on the machine
changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS = ("loaded", "ready", "processor till ready", "first step", "image")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji", help="emoji, a folder, or a preset for random weights")
    parser.add_argument("--size", type=int, help="pixels of a side; by default the model's own")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--pairs", type=int, default=5, help="warm runs of each cache")
    parser.add_argument("--ready", action="store_true", help="make the programs of a preset ready, and no image")
    parser.add_argument("--scratch", type=Path, help="folder for caches and random weights; temporary by default")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(ready(arguments) if arguments.ready else image(arguments)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(arguments, arguments.scratch or Path(temporary))


def compare(arguments: argparse.Namespace, scratch: Path) -> None:
    """Fill both caches, run with each in turn, and print medians."""
    model = arguments.model if arguments.ready else str(weights(arguments.model, scratch))
    command = [sys.executable, __file__, "--run", "--model", model, "--dtype", arguments.dtype]
    command += ["--steps", str(arguments.steps)] + ["--ready"] * arguments.ready
    command += ["--size", str(arguments.size)] if arguments.size else []
    folders = {"JAX's cache": scratch / "jax-cache", "canvax's cache": scratch / "canvax-cache"}
    environments = {
        "JAX's cache": {
            "CANVAX_CACHE_DIR": "off",
            "JAX_COMPILATION_CACHE_DIR": str(folders["JAX's cache"]),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        "canvax's cache": {"CANVAX_CACHE_DIR": str(folders["canvax's cache"])},
    }

    def run(name: str) -> dict[str, float]:
        environment = os.environ | environments[name]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    cold = {name: run(name) for name in environments}
    warm: dict[str, list[dict[str, float]]] = {name: [] for name in environments}
    for i in range(arguments.pairs):
        for name in list(environments)[:: 1 if i % 2 else -1]:
            warm[name].append(run(name))
    columns = [column for column in COLUMNS if column in warm["JAX's cache"][0]]
    print(f"| {arguments.model}, {arguments.dtype} | {' | '.join(columns)} | MB on disk |")
    print("|---" * (len(columns) + 2) + "|")
    for name, folder in folders.items():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        medians = [statistics.median(one[column] for one in warm[name]) for column in columns]
        print(f"| {name}, empty | {' | '.join(f'{cold[name][column]:.2f}' for column in columns)} | |")
        print(f"| {name}, filled | {' | '.join(f'{value:.2f}' for value in medians)} | {size:.1f} |")


def weights(model: str, scratch: Path) -> Path | str:
    """A checkpoint: the model itself, or random weights of a preset, which are written once."""
    import numpy as np

    from benchmarks.lab.models import KNOWN, write_random

    preset, folder = KNOWN.get(model), scratch / model
    if preset and not folder.exists():
        write_random(folder, preset, dtype=np.float16)
    return folder if preset else model


def image(arguments: argparse.Namespace) -> dict[str, float]:
    """One image; seconds from the start of this process."""
    import canvax
    from canvax.compile.monitor import process_age

    pipe = canvax.load(arguments.model, dtype=arguments.dtype)
    seconds = {"loaded": process_age()}
    pipe.compile(arguments.size, arguments.size, progress=False)
    seconds |= {"ready": process_age(), "processor till ready": time.process_time()}
    result = pipe(
        "a cat", height=arguments.size, width=arguments.size, seed=1, guidance_scale=4.0,
        num_inference_steps=arguments.steps, options=canvax.Options(progress=False),
    )  # fmt: skip
    image = process_age()
    return seconds | {"first step": image - result.timings["total"] + result.timings["first_step"], "image": image}


def ready(arguments: argparse.Namespace) -> dict[str, float]:
    """The three programs of a preset, for weights that are only described."""
    import jax

    from canvax.compile.monitor import process_age
    from canvax.compile.programs import Programs
    from canvax.families.known import PRESETS
    from canvax.parallel.mesh import make_mesh
    from canvax.parallel.rules import abstract_params

    networks, mesh = PRESETS[arguments.model], make_mesh(jax.devices()[:1])
    programs = Programs(networks, mesh)
    params = {name: abstract_params(spec, arguments.dtype, mesh) for name, spec in networks.specs().items()}
    side = arguments.size or 512
    latents = networks.latent_shape(1, side, side)
    loaded = process_age()
    programs.ready(params, latents)
    return {"loaded": loaded, "ready": process_age(), "processor till ready": time.process_time()}


if __name__ == "__main__":
    main()
