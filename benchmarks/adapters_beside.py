"""What adapters beside the weights cost: putting one there, and a step with them.

    python -m benchmarks.adapters_beside swap [--rank 16] [--layers all]
    python -m benchmarks.adapters_beside step [--rank 16] [--places 4]

"swap" takes SDXL at its full size, whose places alone are made: nothing of a swap touches a weight. A LoRA for all of
its layers, or for its attention, is written to a file in float16 and exchanged: read (file to checked factors), packed
(factors to the array of a place, cast to bfloat16) and put (the array to the device, until it is there). What is packed
once can be put again.

"step" runs the bundled model without places, and with an adapter in one of them, taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

import canvax
from canvax.families.known import PRESETS
from canvax.models.beside import Places, slots
from canvax.pipelines.slots import Bank
from canvax.weights.lora import read_adapter


def swap(rank: int, layers: str, rounds: int) -> None:
    """Print the parts of a swap, the median and the least in milliseconds."""
    networks = PRESETS["sdxl"]
    specs = {"unet": networks.denoiser.spec, **networks.text.specs}
    bank = Bank(
        SimpleNamespace(dtype="bfloat16", networks=networks),  # pyright: ignore[reportArgumentType]
        canvax.make_mesh(jax.devices()[:1]), Places(4, rank, layers),
    )  # fmt: skip
    rng, arrays = np.random.default_rng(0), {}
    for name, slot in slots(networks.denoiser.spec, bank.places).items():
        out, *inner = slot.param.checkpoint_shapes[0]
        down = rng.standard_normal((rank, *inner), np.float32)
        up = rng.standard_normal((out, rank, *[1] * (len(inner) - 1)), np.float32)
        arrays |= {f"unet.{name}.lora_A.weight": down, f"unet.{name}.lora_B.weight": up}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "style.safetensors"
        save_file({name: array.astype(np.float16) for name, array in arrays.items()}, path)
        print(f"{len(arrays) // 2} layers, {path.stat().st_size / 1e6:.0f} MB in the file, rank {rank}")
        print(f"four places take {bank.bytes / 1e6:.0f} MB")
        taken: dict[str, list[tuple[float, float]]] = {"read": [], "packed": [], "put": []}
        for i in range(rounds):
            adapter = _timed(taken["read"], lambda: read_adapter(path, specs))
            packed = _timed(taken["packed"], lambda adapter=adapter: bank.pack("style", adapter))

            def put(place: int = i % 4, packed: Any = packed) -> None:
                bank.put(place, packed)
                jax.block_until_ready([of[str(place)] for of in bank.arrays.values()])

            _timed(taken["put"], put)
    for name, both in taken.items():
        seconds, used = zip(*both, strict=True)
        print(
            f"{name}: median {1e3 * statistics.median(seconds):.1f} ms, least {1e3 * min(seconds):.1f} ms; "
            f"of a processor {1e3 * statistics.median(used):.1f} ms"
        )


def _timed(taken: list[tuple[float, float]], run: Callable[[], Any]) -> Any:
    began, used = time.perf_counter(), time.process_time()
    found = run()
    taken.append((time.perf_counter() - began, time.process_time() - used))
    return found


def step(rank: int, places: int, rounds: int) -> None:
    """Print the time of a step with places, as a multiple of that without, for batches of 1 and 4."""
    plain = canvax.load("emoji", progress=False)
    for layers in ("attention", "all"):
        pipe = canvax.load("emoji", progress=False)
        pipe.adapters.beside(rank=rank, places=places, layers=layers)
        with tempfile.TemporaryDirectory() as folder:
            path, arrays = Path(folder) / "style.safetensors", {}
            name, slot = next(iter(slots(pipe.model.networks.denoiser.spec, Places(1, rank, layers)).items()))
            out, *inner = slot.param.checkpoint_shapes[0]
            arrays[f"unet.{name}.lora_A.weight"] = np.zeros((rank, *inner), np.float32)
            arrays[f"unet.{name}.lora_B.weight"] = np.zeros((out, rank, *[1] * (len(inner) - 1)), np.float32)
            save_file(arrays, path)
            pipe.adapters.load("style", path, beside=True)
        for batch in (1, 4):
            ratios = []
            for _ in range(rounds + 1):
                took = [
                    one(["a red apple"] * batch, seed=0, num_inference_steps=20).timings["step"]
                    for one in (plain, pipe)
                ]
                ratios.append(took[1] / took[0])
            print(f"{layers}, batch of {batch}: {statistics.median(ratios[1:]):.3f} times a step without")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("swap", "step"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--places", type=int, default=4)
    parser.add_argument("--layers", default="all")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.what == "swap":
        swap(arguments.rank, arguments.layers, arguments.rounds)
    else:
        step(arguments.rank, arguments.places, arguments.rounds)


if __name__ == "__main__":
    main()
