"""``plan``: will a model fit on a TPU or GPU that is not there, and how long would a picture take?

The real programs are compiled for the real topology by the device's own compiler, with abstract weights. What it says
is an estimate: nothing has run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

from canvax._version import __version__
from canvax.checked import checked
from canvax.denoise import WINDOW
from canvax.errors import CanvaxError, CheckpointError, InputError, check_count, nearest
from canvax.families.read import family_of, read_networks
from canvax.files import named_path
from canvax.models.networks import Networks
from canvax.models.presets import PRESETS
from canvax.parallel.mesh import AXES
from canvax.pipelines.checks import check_size
from canvax.planning.compiling import compile_programs
from canvax.planning.job import PROGRAMS, Job
from canvax.planning.targets import Chip, Gpu, Target, parse_target
from canvax.quantize import check_kind
from canvax.types import DType
from canvax.weights.cast import parse_dtype
from canvax.weights.open import open_files
from canvax.weights.source import BUNDLED, Source, tell_of_idle_cache

Announce = Callable[[str, float | None], None]
"""Told of a compilation: ``(what, None)`` when it begins and ``(what, seconds)`` when it is done."""


@dataclass(frozen=True)
class ProgramPlan:
    """One program, on one device. Sizes are bytes, times seconds.

    Attributes:
        name: "encode", "denoise" or "decode".
        evaluations: how often it runs for a batch of pictures; for "denoise" the steps.
        compile_seconds: what compiling took, now or when it was done.
        reused: the figures are of an earlier plan.
        refused: why the compiler would not compile it (memory), else None.
        seconds: the compiler's estimate of one evaluation; None for GPUs, whose compiler makes none.
        setup_seconds: likewise of what "denoise" does before its first step.
        flops: matmuls, convolutions and kernels of one evaluation.
        hbm_bytes: to and from the device's memory in one evaluation, on GPUs through their L2 cache.
        kernels: what runs one after another in one evaluation.
        collectives: how many of each kind are in the program.
        collectives_in_loop: those in the loop over steps.
        unpriced: instructions that the estimate knows no time for.
        argument_bytes: weights and inputs.
        output_bytes: results.
        temporary_bytes: everything between.
        code_bytes: the program itself.
        cost_analysis: what the compiler's ``cost_analysis`` says, untouched; see docs/tpu.md for what is wrong with it.
    """

    name: str
    evaluations: int
    compile_seconds: float
    reused: bool = False
    refused: str | None = None
    seconds: float | None = None
    setup_seconds: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    kernels: int = 0
    collectives: Mapping[str, int] = field(default_factory=dict)
    collectives_in_loop: Mapping[str, int] = field(default_factory=dict)
    unpriced: tuple[str, ...] = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    cost_analysis: Mapping[str, float] = field(default_factory=dict)

    def bound_seconds(self, chip: Chip) -> float:
        """The least one evaluation can take: its FLOPs at the data sheet's peak, or its bytes at full bandwidth.

        Of a GPU, whose cache may spare the rest, these are the bytes of weights, inputs and results.
        """
        least = self.argument_bytes + self.output_bytes if isinstance(chip, Gpu) else self.hbm_bytes
        return max(self.flops / chip.flops, least / chip.bandwidth)


@dataclass(frozen=True)
class Plan:
    """What a batch of pictures needs on a target.

    Attributes:
        model: as it was asked for.
        target: the chips.
        mesh: devices along ``data`` and ``model``.
        batch: pictures at once, on all devices together.
        height: pixels.
        width: pixels.
        steps: evaluations of the denoiser.
        guided: whether guidance doubles the denoiser's batch.
        dtype: of weights and activations.
        quantize: what large weights are quantised to, or None.
        programs: the three programs.
        versions: of canvax, jax and libtpu.
    """

    model: str
    target: Target
    mesh: Mapping[str, int]
    batch: int
    height: int
    width: int
    steps: int
    guided: bool
    dtype: str
    quantize: str | None
    programs: tuple[ProgramPlan, ...]
    versions: Mapping[str, str]

    @property
    def resident_bytes(self) -> int:
        """On each device all the time: the weights of all programs, their inputs and the programs themselves."""
        return sum(program.argument_bytes + program.code_bytes for program in self.programs)

    @property
    def working_bytes(self) -> int:
        """On each device while the hungriest program runs: its temporaries and results."""
        return max(program.temporary_bytes + program.output_bytes for program in self.programs)

    @property
    def peak_bytes(self) -> int:
        """The most a device holds at any time."""
        return self.resident_bytes + self.working_bytes

    @property
    def fits(self) -> bool:
        """Whether that is no more than programs can have; the runtime's own share is taken off already."""
        return self.why_not is None

    @property
    def why_not(self) -> str | None:
        """Why it does not fit, or None."""
        refused = [f"{program.name}: {program.refused}" for program in self.programs if program.refused]
        if refused:
            return "; ".join(refused)
        missing = self.peak_bytes - self.target.chip.usable
        return f"{missing / 2**30:.2f} GiB too much on each {self.target.chip.device}" if missing > 0 else None

    @property
    def seconds(self) -> float | None:
        """The compiler's estimate for the whole batch, from token ids to pixels; None without one, as for GPUs."""
        calls = math.ceil(self.steps / WINDOW)
        times = [p.evaluations * p.seconds + calls * p.setup_seconds for p in self.programs if p.seconds is not None]
        return sum(times) if len(times) == len(self.programs) else None

    @property
    def bound_seconds(self) -> float:
        """The least the whole batch can take."""
        return sum(program.evaluations * program.bound_seconds(self.target.chip) for program in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        chip = self.target.chip
        same = {
            name: getattr(self, name)
            for name in ("batch", "height", "width", "steps", "guided", "dtype", "quantize", "fits")
        }
        programs = [
            {**dataclasses.asdict(program), "bound_seconds": program.bound_seconds(chip)} for program in self.programs
        ]
        whole = not any(program.refused for program in self.programs)
        return {
            "model": self.model,
            "target": str(self.target),
            "mesh": dict(self.mesh),
            "device": {
                "is": chip.device,
                "peak_flops_per_second": chip.flops,
                "hbm_bytes_per_second": chip.bandwidth,
                "hbm_bytes": chip.memory,
                "usable_bytes": chip.usable,
            },
            **same,
            "why_not": self.why_not,
            "memory": {
                "resident_bytes": self.resident_bytes,
                "working_bytes": self.working_bytes,
                "peak_bytes": self.peak_bytes,
            }
            if whole
            else None,
            "estimated_seconds": self.seconds if whole else None,
            "bound_seconds": self.bound_seconds if whole else None,
            "programs": programs,
            "versions": dict(self.versions),
        }


@checked
def plan(
    model: str | Path,
    target: str,
    *,
    batch: int | None = None,
    height: int | None = None,
    width: int | None = None,
    steps: int = 50,
    guided: bool = True,
    dtype: DType | None = None,
    quantize: str | None = None,
    mesh: Mapping[str, int] | None = None,
    reuse: bool = True,
    announce: Announce | None = None,
    **source: Any,
) -> Plan:
    """Compile a model for TPUs or GPUs that are not there, and say whether it fits and how long it takes at least.

    Needs libtpu (``pip install '.[tpu]'``) or JAX's CUDA plugin (``'.[cuda]'``), no device and no weights. A full SDXL
    takes some minutes for a TPU the first time on two cores, and one for a GPU; the result is kept, and the same
    program is not compiled again.

    Args:
        model: "sd14", "sd15", "sd21", "sdxl", "sdxl-refiner", "emoji", a folder, or a Hub id, of which no
            weights are fetched.
        target: such as "tpu-v5e:2x2", of v2, v3, v4, v5e, v5p and v6e, with chips along each axis; or "gpu-h100:8", of
            those in ``canvax.planning.targets.GPUS``, with how many there are.
        batch: pictures at once on all devices together; by default one on each.
        height: pixels, divisible by 8; by default the size the model was trained for.
        width: likewise.
        steps: evaluations of the denoiser.
        guided: whether the guidance scale is above 1.
        dtype: of weights and activations; by default bfloat16, float16 on GPUs before Ampere.
        quantize: "int8" or "float8" for large weights in 8 bits.
        mesh: devices along ``data`` and ``model``; by default all on ``data``.
        reuse: use what an earlier plan with the same versions has found.
        announce: told of each compilation.
        source: ``revision``, ``token``, ``cache_dir`` and ``local_files_only`` as in ``canvax.load``.

    Raises:
        InputError: an argument cannot be used; nothing has been compiled.
        CheckpointError, HubError: the model cannot be read.
        CanvaxError: the compiler is missing, or it failed.
    """
    for name in source.keys() - set(known := [one.name for one in dataclasses.fields(Source)][1:]):
        raise InputError(f"plan has no argument {name!r:.80}; {nearest(name, [*signature(plan).parameters, *known])}")
    aim = parse_target(target)
    if not isinstance(mesh, Mapping | None):
        raise InputError(f"mesh={mesh!r} does not map axes to devices, as {{'data': 4}} does")
    axes = check_axes(mesh, aim.devices, aim)
    batch = check_count("batch", axes["data"] if batch is None else batch)
    if batch % axes["data"]:
        up = -(-batch // axes["data"]) * axes["data"]
        raise InputError(f"batch={batch} cannot be split over data={axes['data']} devices; use {up}")
    check_count("steps", steps)
    computed = parse_dtype(aim.chip.half if dtype is None else dtype, quantizes=True).name
    check_kind(quantize)
    networks = architecture(model, **source)
    (tall, wide), factor = networks.native_size, networks.vae.factor
    job = Job(
        model=networks,
        target=str(aim),
        mesh=(axes["data"], axes["model"]),
        batch=batch,
        height=check_size("height", height, tall, factor),
        width=check_size("width", width, wide, factor),
        guided=guided,
        dtype=computed,
        quantize=quantize,
    )
    versions = {"canvax": __version__, "jax": version("jax"), **compiler_version(aim)}
    results = compile_programs(job, versions, reuse=reuse, announce=announce)
    evaluations = {"encode": 2 if guided else 1, "denoise": steps, "decode": 1}
    programs = tuple(_program(name, evaluations[name], results[name]) for name in PROGRAMS)
    said = (str(model), aim, axes, batch, job.height, job.width, steps, guided, computed, quantize)
    return Plan(*said, programs=programs, versions=versions)


def _program(name: str, evaluations: int, result: Mapping[str, Any]) -> ProgramPlan:
    return ProgramPlan(name, evaluations, **{**result, "unpriced": tuple(result.get("unpriced", ()))})


def check_axes(mesh: Mapping[str, int] | None, devices: int, target: Target) -> dict[str, int]:
    """Devices along each axis of the mesh.

    Raises:
        InputError: they are not the target's devices.
    """
    asked = {"model": 1, **(mesh or {})}
    for name, size in asked.items():
        if name not in AXES:
            raise InputError(f"mesh has an axis {name!r}; {nearest(name, AXES)}")
        check_count(f"mesh {name}", size)
    axes = {"data": devices // asked["model"], **asked}
    if axes["data"] * axes["model"] != devices:
        raise InputError(
            f"mesh data={axes['data']}, model={axes['model']} has {axes['data'] * axes['model']} devices, {target} has "
            f"{devices}; their product must be {devices}"
        )
    return axes


def architecture(model: str | Path, **source: Any) -> Networks:
    """The networks of a preset, a folder or a Hub id; no weights are read."""
    if isinstance(model, str) and model in PRESETS:
        Source(model, **source).tell_of_idle("model of canvax's own", "revision", "cache_dir")
        return PRESETS[model]
    try:
        files = open_files(Source(model, progress=False, **source), accept=family_of, weights=False)
        tell_of_idle_cache(source.get("cache_dir"), model)
    except CheckpointError as error:
        if isinstance(model, str) and "/" not in model and not named_path("model", model).exists():
            names = [*PRESETS, *BUNDLED]
            raise InputError(
                f"model={model!r} is no preset, folder or Hub id; {nearest(model, names)} Presets: {', '.join(names)}"
            ) from error
        raise
    return read_networks(files)


_COMPILERS = {"tpu": ("libtpu", "libtpu-nightly"), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


def compiler_version(target: Target) -> dict[str, str]:
    """The package of the compiler for a target, and its version.

    Raises:
        CanvaxError: it is not installed.
    """
    for name in _COMPILERS[target.platform]:
        try:
            return {name: version(name)}
        except PackageNotFoundError:
            continue
    cure = "jax[cuda13]" if target.platform == "gpu" else "libtpu"
    raise CanvaxError(
        f"planning for {target} needs {target.compiler}, which is not installed: pip install '{cure}'. No "
        f"{target.platform.upper()} is needed"
    )
