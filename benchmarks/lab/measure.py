"""Runs the contenders by turns, compares what they give, and puts the figures together."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.job import PEERS, Job, make_inputs, names_of
from benchmarks.lab.process import Contender, Process
from canvax.errors import CanvaxError
from canvax.families.base import Model
from canvax.families.read import read_model
from canvax.models.clip import clip_configs
from canvax.parallel.memory import available_bytes
from canvax.params import count
from canvax.weights.folder import find_weights
from canvax.weights.location import Location
from canvax.weights.open import open_files

Tell = Callable[[str], None]
"""Called with a line about what is being done."""

BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""How far outputs may be apart, as the root mean square of the difference over that of a peer's output."""

DRIFT = 0.5
"""As ``BOUNDS``, of pictures of which one step is compared too, in 16 bits.

diffusers rounds the times of FLUX.2 and Krea 2 to the dtype of the weights, canvax none. Time 1, of the first step, is
no matter of rounding; other steps drift apart, and weights that are random make much of it."""

GPU_WORK = 4e9
"""Estimated bytes of GPU memory that a contender needs for each image of 1024 x 1024, in addition to the weights."""

_CHECK = 1e-3
"""How far the sums of squares of loaded weights may be apart."""

MOMENTS = ("imported", "loaded", "programs", "first_step", "picture")


def measure(
    job: Job,
    peers: Sequence[Contender],
    rounds: int,
    *,
    cold: bool = False,
    programs: str = "off",
    tell: Tell = print,
) -> dict[str, Any]:
    """Figures of canvax and its peers for a part, by contender; canvax is first.

    Args:
        job: the work.
        peers: who else takes part.
        rounds: turns of each.
        cold: for ``load``: files leave the page cache before each run, instead of being in it.
        programs: canvax's cache of compiled programs, a folder or "off"; not for ``start``, which has its own.
        tell: called with a line about what is being done.

    Raises:
        CanvaxError: a contender failed, or did other work than canvax.
    """
    with tempfile.TemporaryDirectory(prefix="canvax-bench-") as folder:
        scratch = Path(folder)
        model = read_model(open_files(Location(job.folder)), np.float32)
        files = [path for part in model.components for path in find_weights(job.folder / part.name, part.kind)]
        inputs = scratch / "inputs.npz"
        np.savez(inputs, **make_inputs(job, model))  # type: ignore[arg-type]
        if job.part == "load":
            readers = [Contender("read"), Contender("read and keep")]
            # Of a language model, and of an autoencoder for videos, canvax reads a part.
            checked = names_of("load" if clip_configs(model.text) else "denoiser", model)
            return _load(job, [Contender("canvax"), *readers, *peers], rounds, scratch, files, cold, checked, tell)
        if job.part == "start":
            return _start(job, peers, rounds, scratch, inputs, tell)
        contenders = [Contender("canvax", environment={"CANVAX_CACHE_DIR": programs}), *peers]
        run = _turns if _fit_together(job, model, len(contenders)) else _apart
        return run(job, contenders, rounds, scratch, inputs, tell)


def _fit_together(job: Job, model: Model, contenders: int) -> bool:
    """Whether memory holds the weights of all contenders and their work: as much again of the largest on a processor,
    some gigabytes for a picture on a GPU."""
    weights = sum(count(model.specs[name]) for name in names_of(job.part, model)) * np.dtype(job.dtype).itemsize
    if job.device != "cpu":
        return job.device_bytes is None or contenders * (weights + job.batch * GPU_WORK) < job.device_bytes
    available = available_bytes()
    return available is None or (contenders + 0.5) * weights < available


def _turns(
    job: Job, contenders: Sequence[Contender], rounds: int, scratch: Path, inputs: Path, tell: Tell
) -> dict[str, Any]:
    """Contenders that stay, and take turns."""
    with ExitStack() as stack:
        running, facts = [], {}
        for contender in contenders:  # one by one: they would disturb each other's compile times
            tell(f"loading and compiling: {contender.name}")
            process = stack.enter_context(Process(contender, job, scratch, inputs=inputs))
            facts[contender.name] = process.answer()
            running.append(process)
        differences = {process.name: _compare(job, running[0], process) for process in running[1:]}
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in facts}
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            for process in running:
                turns[process.name].append(process.turn())
    return _figures(turns, facts, differences)


def _apart(
    job: Job, contenders: Sequence[Contender], rounds: int, scratch: Path, inputs: Path, tell: Tell
) -> dict[str, Any]:
    """Contenders that take turns, each turn a process of its own: memory does not hold them all."""
    turns: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    facts, done, differences = {}, {}, {}
    for number in range(rounds):
        for contender in contenders:
            tell(f"round {number + 1} of {rounds}: {contender.name}, alone since memory does not hold all contenders")
            with Process(contender, job, scratch, inputs=inputs) as process:
                facts[contender.name] = process.answer()
                if number == 0:
                    done[contender.name] = process
                    if contender is not contenders[0]:
                        differences[contender.name] = _compare(job, done[contenders[0].name], process)
                turns[contender.name].append(process.turn())
    return _figures(turns, facts, differences)


def _figures(
    turns: Mapping[str, Sequence[dict[str, Any]]],
    facts: Mapping[str, dict[str, Any]],
    differences: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    return {
        name: summary([turn["seconds"] for turn in turns[name]])
        | {key: turns[name][-1][key] for key in ("host_peak_bytes", "device_peak_bytes")}
        | facts[name]
        | differences.get(name, {})
        for name in facts
    }


def _load(
    job: Job,
    contenders: Sequence[Contender],
    rounds: int,
    scratch: Path,
    files: list[Path],
    cold: bool,
    checked: list[str],
    tell: Tell,
) -> dict[str, Any]:
    """Each run a fresh process, with the files in the page cache or out of it."""
    runs: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            tell(f"round {number + 1} of {rounds}: {contender.name}")
            _settle_files(files, cold)
            check = number == 0 and not contender.name.startswith("read")
            extra = {"files": list(map(str, files)), "check": check, "checked": checked}
            with Process(contender, job, scratch, **extra) as process:
                runs[contender.name].append(process.answer())
    count, squares = runs["canvax"][0]["check"]
    reading = statistics.median(run["seconds"] for run in runs["read"])
    result = {}
    for name, each in runs.items():
        result[name] = each[0] | summary([run["seconds"] for run in each])
        result[name]["over_reading"] = result[name]["median_s"] / reading
        result[name]["host_peak_bytes"] = max(run["host_peak_bytes"] for run in each)
        if "weight_bytes" in each[0]:
            result[name]["peak_over_weights"] = result[name]["host_peak_bytes"] / each[0]["weight_bytes"]
        if name in PEERS:
            theirs, their_squares = each[0]["check"]
            difference = abs(their_squares / squares - 1)
            if theirs != count or difference > _CHECK:
                raise CanvaxError(
                    f"{name} loaded other weights: {theirs} numbers against canvax's {count}, sums of squares "
                    f"{difference:.1e} apart; nothing can be compared"
                )
            result[name]["differs_by"] = difference
    return result


def _start(
    job: Job, peers: Sequence[Contender], rounds: int, scratch: Path, inputs: Path, tell: Tell
) -> dict[str, Any]:
    """From the start of a process to a picture on disk, canvax with programs from its cache and without."""
    caches = [scratch / f"cache-{number}" for number in range(rounds)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("canvax", "canvax cold", *(p.name for p in peers))}
    differences: dict[str, Any] = {}
    for number, cache in enumerate(caches):
        cold = Contender("canvax cold", environment={"CANVAX_CACHE_DIR": str(cache)})
        warm = Contender("canvax", environment={"CANVAX_CACHE_DIR": str(caches[0])})  # filled by the first cold one
        done = {}
        for contender in (cold, warm, *peers):
            tell(f"round {number + 1} of {rounds}: {contender.name}")
            pictures = str(scratch / f"{contender.name}-{number}")
            with Process(contender, job, scratch, inputs=inputs, pictures=pictures, check=number == 0) as process:
                runs[contender.name].append(process.answer())
                done[contender.name] = process
        if number == 0:
            differences = {peer.name: _compare(job, done["canvax"], done[peer.name]) for peer in peers}
    result = {}
    for name, each in runs.items():
        result[name] = each[0] | summary([run["moments"]["picture"] for run in each]) | differences.get(name, {})
        result[name]["host_peak_bytes"] = max(run["host_peak_bytes"] for run in each)
        for counted in ("traces", "compilations"):
            if counted in each[0]:
                result[name][counted] = max(run[counted] for run in each)
        result[name]["moments"] = {
            moment: summary([run["moments"][moment] for run in each])
            for moment in MOMENTS
            if moment in each[0]["moments"]
        }
    return result


def _compare(job: Job, ours: Process, theirs: Process) -> dict[str, Any]:
    """How far the outputs are apart.

    Raises:
        CanvaxError: further than rounding explains: the work is not the same.
    """
    with np.load(ours.outputs) as a, np.load(theirs.outputs) as b:
        if a.files != b.files or any(a[name].shape != b[name].shape for name in a.files):
            raise CanvaxError(f"{theirs.name} gives {_shapes(b)}, canvax {_shapes(a)}; nothing has been timed")
        largest = {name: float(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max()) for name in a.files}
        spread = {name: float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in a.files}
    # TensorFloat-32 has the mantissa of float16, and both sides may use it.
    bound = BOUNDS["float16" if job.dtype == "float32" and job.device == "gpu" else job.dtype]
    one_step = [name for name in spread if name.startswith("one_step_")]
    bounds = {name: DRIFT if one_step and name not in one_step and job.dtype != "float32" else bound for name in spread}
    for name in spread:
        if not spread[name] <= bounds[name]:
            raise CanvaxError(
                f"{theirs.name} and canvax do different work: their {name} are {spread[name]:.1e} apart (largest "
                f"difference {largest[name]:.1e}), and {job.dtype} explains {bounds[name]:.0e}; nothing has been timed"
            )
    facts = {"differs_by": max(largest.values()), "differs_by_rms": max(spread.values()), "bound_rms": bound}
    if one_step:
        facts["one_step_differs_by_rms"] = max(spread[name] for name in one_step)
    return facts


def _shapes(outputs: Any) -> str:
    return ", ".join(f"{name} {outputs[name].shape}" for name in outputs.files)


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and all of some times."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "seconds": list(seconds),
    }


def _settle_files(files: Sequence[Path], cold: bool) -> None:
    """Bring files into the page cache, or out of it."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                block = bytearray(1 << 24)
                while file.readinto(block):
                    pass
