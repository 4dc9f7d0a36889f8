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


def kernels(folder: Path) -> dict[str, tuple[float, int]]:
    """Seconds and runs of each kernel of a trace, by its name; on a CPU, of each operation."""
    [file] = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    on_device = {pid for pid, name in processes.items() if "/device:" in name} or set(processes)
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event["pid"] not in on_device or "hlo_op" not in event.get("args", {}):
            continue
        # A GPU's streams have a thread each; the others are what the same kernels belong to.
        if len(on_device) < len(processes) and "Stream" not in threads.get((event["pid"], event["tid"]), ""):
            continue
        found[event["name"]].append(event["dur"] / 1e6)
    return {name: (sum(times), len(times)) for name, times in found.items()}


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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most", type=int, default=25, help="kernels to tell")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    width, height = (int(side) for side in arguments.size.split("x")) if arguments.size else (None, None)
    with tempfile.TemporaryDirectory() as traced:
        pipe = canvax.load(arguments.model, dtype=parse_dtype(arguments.dtype), progress=False)
        say: dict[str, Any] = {"num_inference_steps": arguments.steps, "seed": 0, "progress": False}
        say |= {"width": width, "height": height}
        prompts = ["a red apple"] * arguments.batch
        pipe(prompts, **say)
        with jax.profiler.trace(traced):
            result = pipe(prompts, **say)
        found = kernels(Path(traced))
    total = sum(seconds for seconds, _ in found.values())
    by_kind: dict[str, float] = defaultdict(float)
    for name, (seconds, _) in found.items():
        by_kind[kind_of(name)] += seconds
    largest = sorted(found.items(), key=lambda item: -item[1][0])[: arguments.most]
    report = {
        "model": arguments.model, "device": jax.devices()[0].device_kind, "steps": arguments.steps,
        "batch": arguments.batch, "timings": result.timings, "kernel_seconds": total,
        "by_kind": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "kernels": [{"name": name, "seconds": s, "runs": n, "share": s / total} for name, (s, n) in largest],
    }  # fmt: skip
    print(f"{total:.4f} s in {len(found)} kernels of {result.timings['total']:.4f} s; {report['by_kind']}")
    for row in report["kernels"]:
        print(f"{row['share']:6.1%} {row['seconds'] * 1e3:9.3f} ms {row['runs']:6d} x {row['name'][:120]}")
    if arguments.json:
        with written(arguments.json) as temporary:
            temporary.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
