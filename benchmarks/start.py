"""From the start of a process to its first denoising step and its first picture on disk: cold, warm, and PyTorch.

    python benchmarks/start.py                              # the model in the package
    python benchmarks/start.py --family sdxl --first-step   # full size, random weights: 25 GB of memory, 10 GB of disk
    python benchmarks/start.py --model FOLDER --size 512

Each run is a process of its own, and the contenders take turns. "cold" has an empty CANVAX_CACHE_DIR, "warm" one that
an earlier process has filled, "torch" is PyTorch diffusers on the same checkpoint, if it is installed. Times are
seconds since the process was started: Python and imports done, model loaded, programs ready, first step done, picture
on disk. Traces and compilations are counted by JAX's own events.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOMENTS = ("imported", "loaded", "programs", "first_step", "picture")
STEPS = 4


class Stopped(Exception):
    """Only the first step was wanted."""


def canvax(model: str, began: float, args: argparse.Namespace, out: Path) -> dict[str, float]:
    """Through ``canvax.load`` and one call."""
    import canvax
    from canvax.compile.monitor import compilations, traces

    moments = {}

    def note(name: str) -> None:
        moments.setdefault(name, time.time() - began)

    def step(_: canvax.Step) -> bool:
        note("first_step")
        return not args.first_step

    _ = canvax.StableDiffusion
    note("imported")
    pipe = canvax.load(model, dtype=args.dtype, progress=False)
    note("loaded")
    pipe.compile(args.size, args.size, progress=False)
    note("programs")
    options = canvax.Options(progress=False, callback=step)
    try:
        result = pipe("a cat", height=args.size, width=args.size, num_inference_steps=STEPS, seed=1, options=options)
        result.save(out)
        note("picture")
    except canvax.Cancelled:
        pass
    return moments | {"traces": traces(), "compilations": compilations()}


def torch(model: str, began: float, args: argparse.Namespace, out: Path) -> dict[str, float]:
    """PyTorch diffusers, eager."""
    import diffusers
    import torch

    diffusers.utils.logging.disable_progress_bar()
    moments = {"imported": time.time() - began}
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        model, dtype=getattr(torch, args.dtype or "float32"), local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    moments["loaded"] = moments["programs"] = time.time() - began

    def step(pipe: Any, index: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        moments.setdefault("first_step", time.time() - began)
        if args.first_step:
            raise Stopped
        return values

    try:
        image = pipe(
            "a cat", height=args.size, width=args.size, num_inference_steps=STEPS, callback_on_step_end=step
        ).images[0]
        out.mkdir()
        image.save(out / "picture.png")
        moments["picture"] = time.time() - began
    except Stopped:
        pass
    return moments


def run(contender: str, model: str, arguments: list[str], cache: Path, out: Path) -> dict[str, float]:
    """One process; its moments."""
    environment = os.environ | {"CANVAX_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *arguments, "--worker", contender, model, str(out), repr(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contender} failed; its message is above")
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, args: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """All runs of each contender."""
    arguments = [word for word in sys.argv[1:] if word != "--json"]
    contenders = ["cold", "warm"]
    if importlib.util.find_spec("torch") and importlib.util.find_spec("diffusers") and not args.no_torch:
        contenders.append("torch")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name in contenders:
            worker = "torch" if name == "torch" else "canvax"
            cache = scratch / ("warm" if number == 0 or name == "warm" else f"cold-{number}")
            runs[name].append(run(worker, model, arguments, cache, scratch / f"{name}-{number}-pictures"))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji", help="emoji or a folder")
    parser.add_argument("--family", choices=["sd15", "sd21", "sdxl"], help="a full-size checkpoint of random weights")
    parser.add_argument("--size", type=int, help="pixels (the model's own)")
    parser.add_argument("--dtype", help="of the weights (float32 on the CPU)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-step", action="store_true", help="stop after the first step")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        contender, model, out, began = args.worker
        print(json.dumps({"canvax": canvax, "torch": torch}[contender](model, float(began), args, Path(out))))
        return
    with tempfile.TemporaryDirectory(prefix="canvax-bench-") as folder:
        from canvax.weights.hub import BUNDLED

        model = str(BUNDLED.get(args.model, args.model))
        if args.family:
            from full_size import write_checkpoint

            model = str(write_checkpoint(Path(folder) / args.family, args.family))
        runs = measure(model, args, Path(folder))
    if args.json:
        print(json.dumps(runs))
        return
    print("| | " + " | ".join(MOMENTS).replace("_", " ") + " | traces | compilations |")
    print("|---" * (len(MOMENTS) + 3) + "|")
    for name, each in runs.items():
        cells = []
        for moment in MOMENTS:
            values = [one[moment] for one in each if moment in one]
            median, spread = (statistics.median(values), f"{min(values):.2f}-{max(values):.2f}") if values else (0, "")
            cells.append(f"{median:.2f} ({spread})" if values else "")
        cells += [str(max(one.get(count, 0) for one in each)) for count in ("traces", "compilations")]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
