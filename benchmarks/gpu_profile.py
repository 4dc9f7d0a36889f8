"""Where the time of an image goes on a device, by kernel: from a trace of JAX's profiler.

python -m benchmarks.gpu_profile --model out/sdxl --size 1024x1024 --steps 4 --json out/profile.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax

import canvax
from canvax.files import written
from canvax.weights.cast import parse_dtype


def kernels(folder: Path) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Seconds and runs of each kernel of a trace, by program, operation and name; on a CPU, of each operation."""
    [file] = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    on_device = {pid for pid, name in processes.items() if "/device:" in name} or set(processes)
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event["pid"] not in on_device or "hlo_op" not in event.get("args", {}):
            continue
        # A GPU's streams have a thread each; the others are what the same kernels belong to.
        if len(on_device) < len(processes) and "Stream" not in threads.get((event["pid"], event["tid"]), ""):
            continue
        key = event["args"].get("hlo_module", ""), event["args"]["hlo_op"], event["name"]
        found[key].append(event["dur"] / 1e6)
    return {key: (sum(times), len(times)) for key, times in found.items()}


KINDS = {
    "attention": r"fmha|flash|sdpa|cudnn.*attn|mha", "convolution": r"conv|wgrad|dgrad|fprop|implicit|xmma",
    "matmul": r"gemm|matmul|cublas|nvjet|dot", "copy": r"copy|transpose|memcpy|memset",
    "fusion": r"fusion|loop|input_|reduce",
}  # fmt: skip
"""What a kernel is, by its name: the first that fits."""


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji", help="as for canvax.load")
    parser.add_argument("--size", default="")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timed", type=int, default=30, help="steps of the three calls before that, not traced")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most", type=int, default=400, help="kernels to write down")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path, help="folder for the compiled programs as text, which names operations")
    arguments = parser.parse_args()
    width, height = (int(side) for side in arguments.size.split("x")) if arguments.size else (None, None)
    with tempfile.TemporaryDirectory() as traced:
        pipe = canvax.load(arguments.model, dtype=parse_dtype(arguments.dtype), progress=False)
        say: dict[str, Any] = {"num_inference_steps": arguments.steps, "seed": 0, "progress": False}
        say |= {"width": width, "height": height}
        prompts = ["a red apple"] * arguments.batch
        pipe(prompts, **say)
        timed = [pipe(prompts, **say | {"num_inference_steps": arguments.timed}).timings for _ in range(3)]
        for timings in timed:
            print(f"{arguments.timed} steps: {timings}", flush=True)
        with jax.profiler.trace(traced):
            result = pipe(prompts, **say)
        found = kernels(Path(traced))
    if arguments.hlo:
        from canvax.pipelines.result import Display

        arguments.hlo.mkdir(parents=True, exist_ok=True)
        params = pipe._params(None)
        ready = pipe._ready(params, (height, width), arguments.batch, True, Display(shown=False))
        for name, program in ready.items():
            (arguments.hlo / f"{name.replace(' ', '-')}.txt").write_text(program.executable.as_text())
    total = sum(seconds for seconds, _ in found.values())
    by_kind: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (program, _, name), (seconds, _) in found.items():
        by_kind[program][kind_of(name)] += seconds
    largest = sorted(found.items(), key=lambda item: -item[1][0])[: arguments.most]
    report = {
        "model": arguments.model, "device": jax.devices()[0].device_kind, "steps": arguments.steps,
        "batch": arguments.batch, "timings": result.timings, "timed": timed, "timed_steps": arguments.timed,
        "kernel_seconds": total, "by_kind": by_kind,
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "kernels": [{"program": program, "operation": operation, "name": name, "seconds": s, "runs": n}
                    for (program, operation, name), (s, n) in largest],
    }  # fmt: skip
    print(f"{total:.4f} s in {len(found)} kernels of {result.timings['total']:.4f} s: {result.timings}")
    for program, kinds in by_kind.items():
        told = ", ".join(f"{kind} {s * 1e3:.2f}" for kind, s in sorted(kinds.items(), key=lambda item: -item[1]))
        print(f"{program}: {sum(kinds.values()) * 1e3:.2f} ms: {told}")
    for row in report["kernels"][:40]:
        share, milliseconds = row["seconds"] / total, row["seconds"] * 1e3
        print(f"{share:6.1%} {milliseconds:8.3f} ms {row['runs']:5d} x {row['operation'][:40]} {row['name'][:70]}")
    if arguments.json:
        with written(arguments.json) as temporary:
            temporary.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
