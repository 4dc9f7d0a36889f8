"""Stable Diffusion 1.5 at full size, random weights, 512 x 512, float32: canvax beside its peers, in one run.

    python benchmarks/sd15.py [--parts unet vae] [--rounds 5] [--flax-python PATH] [--json]

Peers are PyTorch diffusers (eager, channels last) and, where --flax-python names an interpreter with
diffusers==0.35.2 jax==0.4.38 flax==0.10.2 transformers==4.49.0, the old Flax classes. All load the same files, their
outputs are compared before anything is timed, and they take turns, so that a drift of the machine hits all alike.
The UNet gets a guided batch of 2; the VAE decodes one image.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from full_size import write_checkpoint

HERE = Path(__file__).parent


class Contender:
    """A worker process; see ``workers.py``."""

    def __init__(self, name: str, python: str, part: str, folder: Path) -> None:
        self.name = name
        command = [python, str(HERE / "workers.py"), name, part, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self._read()
        self.output = np.load(folder / f"{name}_{part}.npy")
        self.seconds: list[float] = []
        self.peak = 0

    def step(self) -> None:
        """Run once more."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._read()
        self.seconds.append(answer["seconds"])
        self.peak = answer["peak"]

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed; its message is above")
        return json.loads(line)


def measure(part: str, folder: Path, pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """Figures of every contender for one part."""
    contenders = [Contender(name, python, part, folder) for name, python in pythons.items()]
    reference = next(c for c in contenders if c.name == "torch").output
    table = {}
    for _ in range(rounds):
        for contender in contenders:
            contender.step()
    ours = statistics.median(contenders[0].seconds)
    for c in contenders:
        median = statistics.median(c.seconds)
        table[c.name] = {
            "median_s": median,
            "min_s": min(c.seconds),
            "max_s": max(c.seconds),
            "canvax_over_it": ours / median,
            "compile_s": c.first["compile"],
            "load_s": c.first["load"],
            "peak_gb": c.peak / 1e9,
            "relative_difference_to_torch": float(np.abs(c.output - reference).max() / np.abs(reference).max()),
        }
        c.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["unet", "vae"], default=["unet", "vae"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flax-python", help="interpreter that has the old Flax classes")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    pythons = {"canvax": sys.executable, "torch": sys.executable}
    if args.flax_python:
        pythons["flax"] = args.flax_python
    results = {}
    with tempfile.TemporaryDirectory(prefix="canvax-bench-") as scratch:
        folder = write_checkpoint(Path(scratch) / "sd15", "sd15")
        for part in args.parts:
            results[part] = measure(part, folder, pythons, args.rounds)
    if args.json:
        print(json.dumps(results))
        return
    for part, table in results.items():
        print(f"\n{part}: | contender | median s (min-max) | canvax / it | compile s | load s | peak GB | differs by |")
        for name, row in table.items():
            print(
                f"| {name} | {row['median_s']:.2f} ({row['min_s']:.2f}-{row['max_s']:.2f}) "
                f"| {row['canvax_over_it']:.2f} | {row['compile_s']:.1f} | {row['load_s']:.1f} | {row['peak_gb']:.1f} "
                f"| {row['relative_difference_to_torch']:.1e} |"
            )


if __name__ == "__main__":
    main()
