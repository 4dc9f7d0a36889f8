"""``plan``: estimates whether a model fits on a TPU or GPU that is not present, and how long an image takes.

The device's compiler compiles the real programs for the real topology, with abstract weights. The figures are
estimates: nothing is run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

from canvax._version import __version__
from canvax.compile.kinds import reference_encoder
from canvax.denoise import WINDOW
from canvax.errors import CanvaxError, InputError, check_count, did_you_mean, nearest
from canvax.families.base import Defaults, Family
from canvax.families.known import FAMILIES, PRESETS, family_of
from canvax.families.local_models import completed
from canvax.families.read import read_parts
from canvax.files import named_path
from canvax.models.networks import Networks
from canvax.parallel.mesh import AXES
from canvax.parallel.rules import device_bytes
from canvax.pipelines.checks import check_size
from canvax.pipelines.references import check_editing, reference_sizes
from canvax.planning.compiling import compile_programs
from canvax.planning.job import Job
from canvax.planning.modes import Mode, modes
from canvax.planning.program import ProgramPlan
from canvax.planning.targets import Target, parse_target
from canvax.quantize import check_kind
from canvax.types import DType
from canvax.weights.cast import parse_dtype
from canvax.weights.data_folder import find_named, meant_by
from canvax.weights.location import BUNDLED, Location, warn_unused_cache
from canvax.weights.open import open_files
from canvax.weights.overrides import Overrides

Announce = Callable[[str, float | None], None]
"""Callback for compilations: gets ``(name, None)`` when one begins and ``(name, seconds)`` when it is done."""


@dataclass(frozen=True)
class Plan:
    """The memory and time that a batch of images needs on a target.

    Attributes:
        model: the argument ``model``.
        target: the chips.
        mesh: number of devices along ``data`` and ``model``.
        batch: images at once, on all devices together.
        height: height of an image in pixels.
        width: width of an image in pixels.
        steps: number of evaluations of the denoiser.
        guided: whether guidance doubles the denoiser's batch.
        dtype: dtype of weights and activations.
        quantize: quantisation of large weights, or None.
        weights: bytes of each component's weights on each device.
        in_8_bits: bytes of all weights on each device if the large ones had 8 bits.
        programs: the three programs, and the image encoders of references.
        versions: versions of canvax, jax and the compiler.
        references: height and width of each reference image in pixels.
        modes: memory and time for each place of the weights; empty if a program is refused with streamed weights too.
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
    weights: Mapping[str, int]
    in_8_bits: int
    programs: tuple[ProgramPlan, ...]
    versions: Mapping[str, str]
    references: tuple[tuple[int, int], ...] = ()
    modes: tuple[Mode, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Permanent memory on each device: weights, inputs and code of all programs."""
        return sum(program.argument_bytes + program.code_bytes for program in self.programs)

    @property
    def working_bytes(self) -> int:
        """Memory on each device for temporaries and results of the largest program."""
        return max(program.temporary_bytes + program.output_bytes for program in self.programs)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a device."""
        return self.resident_bytes + self.working_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Peak memory of a device if weights are there only while their network runs (``offload=True``)."""
        code = sum(program.code_bytes for program in self.programs)
        return code + max(program.argument_bytes + program.temporary_bytes + program.output_bytes
                          for program in self.programs)  # fmt: skip

    @property
    def fits(self) -> bool:
        """True if the peak memory fits in the memory that programs can use (without the runtime's share)."""
        return self.why_not is None

    @property
    def why_not(self) -> str | None:
        """The reason why it does not fit, or None."""
        refused = [f"{program.name}: {program.refused}" for program in self.programs if program.refused]
        if refused:
            return "; ".join(refused)
        missing = self.peak_bytes - self.target.chip.usable
        return f"{missing / 2**30:.2f} GiB too much on each {self.target.chip.device}" if missing > 0 else None

    @property
    def seconds(self) -> float | None:
        """The compiler's estimate for the batch, from token ids to pixels; None without an estimate, as for GPUs."""
        calls = math.ceil(self.steps / WINDOW)
        times = [p.evaluations * p.seconds + calls * p.setup_seconds for p in self.programs if p.seconds is not None]
        return sum(times) if len(times) == len(self.programs) else None

    @property
    def bound_seconds(self) -> float:
        """Lower bound of the time for the whole batch."""
        return sum(program.evaluations * program.bound_seconds(self.target.chip) for program in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as a dict for JSON."""
        chip = self.target.chip
        same = {
            name: getattr(self, name)
            for name in ("batch", "height", "width", "steps", "guided", "dtype", "quantize", "references", "fits")
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
            "weights": dict(self.weights),
            "memory": {
                "resident_bytes": self.resident_bytes,
                "working_bytes": self.working_bytes,
                "peak_bytes": self.peak_bytes,
                "offloaded_bytes": self.offloaded_bytes,
            }
            if whole
            else None,
            "estimated_seconds": self.seconds if whole else None,
            "bound_seconds": self.bound_seconds if whole else None,
            "modes": [dataclasses.asdict(mode) for mode in self.modes],
            "programs": programs,
            "versions": dict(self.versions),
        }


def plan(
    model: str | Path,
    target: str,
    *,
    batch: int | None = None,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
    guided: bool | None = None,
    dtype: DType | None = None,
    quantize: str | None = None,
    mesh: Mapping[str, int] | None = None,
    references: int | Sequence[tuple[int, int]] = 0,
    reuse: bool = True,
    announce: Announce | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_encoder_2: str | Path | None = None,
    tokenizer: str | Path | None = None,
    **source: Any,
) -> Plan:
    """Compile a model for TPUs or GPUs that are not present, and report memory and time.

    It needs libtpu (``pip install ".[tpu]"``) or JAX's CUDA plugin (``".[cuda]"``), but no device and no weights. On
    two cores a full SDXL takes some minutes for a TPU, and one minute for a GPU. Results are stored, so that the same
    program is not compiled again.

    Args:
        model: "sd14", "sd15", "sd21", "sdxl", "sdxl-refiner", "z-image", "flux1-dev", "flux1-schnell", "chroma1",
            "flux2-klein-4b", "flux3-klein", "flux3-klein-base", "krea-2", "qwen-image", "qwen-image-edit-2511",
            "qwen-image-2.1", "anima", "emoji", a folder, or a Hub id (no weights are downloaded).
        target: a TPU with its chips along each axis, e.g. "tpu-v5e:2x2" (v2, v3, v4, v5e, v5p, v6e), or a GPU of
            ``canvax.planning.targets.GPUS`` with a number, e.g. "gpu-h100:8".
        batch: images at once on all devices together; by default one per device.
        height: height in pixels, a multiple of 8, 16 or 32, as the model needs; by default the size that it was
            trained for.
        width: width in pixels, with the rule and the default of ``height``.
        steps: number of evaluations of the denoiser; by default the model's default.
        guided: True with guidance; by default as in a call without a guidance scale.
        dtype: dtype of weights and activations; by default bfloat16, on GPUs before Ampere float16.
        quantize: as in ``canvax.load``, for large weights in 8 bits.
        mesh: number of devices along ``data`` and ``model``; by default all on ``data``.
        references: reference images of a model that edits: their number, each of the image's size, or the height and
            width of each.
        reuse: use the results of earlier plans with the same versions.
        announce: called at the begin and end of each compilation.
        vae: as in ``canvax.load``; a Hub id is downloaded completely.
        text_encoder: as ``vae``.
        text_encoder_2: as ``vae``.
        tokenizer: as ``vae``.
        source: ``revision``, ``token``, ``cache_dir`` and ``local_files_only`` as in ``canvax.load``.

    Raises:
        InputError: an argument is invalid; nothing has been compiled.
        CheckpointError, HubError: the model cannot be read.
        CanvaxError: the compiler is missing, or it failed.
    """
    for name in source.keys() - set(known := [entry.name for entry in dataclasses.fields(Location)][1:-2]):
        raise InputError(f"plan has no argument {name!r:.80}; {nearest(name, [*signature(plan).parameters, *known])}")
    aim = parse_target(target)
    if not isinstance(mesh, Mapping | None):
        raise InputError("mesh", "does not map axes to devices, as {'data': 4} does", value=mesh)
    axes = check_axes(mesh, aim.devices, aim)
    batch = check_count("batch", axes["data"] if batch is None else batch)
    if batch % axes["data"]:
        up = -(-batch // axes["data"]) * axes["data"]
        raise InputError("batch", f"cannot be split over data={axes['data']} devices", cure=f"use {up}", value=batch)
    if steps is not None:
        check_count("steps", steps)
    computed = parse_dtype(aim.chip.half if dtype is None else dtype, quantizes=True).name
    check_kind(quantize)
    overrides = Overrides.of(vae, text_encoder=text_encoder, text_encoder_2=text_encoder_2, tokenizer=tokenizer)
    networks, family, usual = _open(model, overrides, **source)
    if steps is None:
        steps = usual.num_inference_steps
    usually = family.guides(networks, usual.guidance_scale)
    guided = usually if guided is None else guided and not networks.unguided
    (tall, wide), factor = networks.native_size, networks.size_step
    height, width = check_size("height", height, tall, factor), check_size("width", width, wide, factor)
    if references:
        check_editing(networks, str(model))
    read = reference_sizes(references, (height, width), networks) if references else ()
    job = Job(
        model=networks,
        target=str(aim),
        mesh=(axes["data"], axes["model"]),
        batch=batch,
        height=height,
        width=width,
        guided=guided,
        dtype=computed,
        quantize=quantize,
        references=read,
    )
    versions = {"canvax": __version__, "jax": version("jax"), **compiler_version(aim)}
    results = compile_programs(job, versions, job.programs, reuse=reuse, announce=announce)
    evaluations = {"encode": 2 if guided else 1, "denoise": steps, "decode": 1, **Counter(map(reference_encoder, read))}
    programs = tuple(_program(name, evaluations[name], results[name]) for name in job.programs)
    weights, small = (
        {name: device_bytes(spec, parse_dtype(computed), axes) for name, spec in networks.specs(kind).items()}
        for kind in (quantize, quantize or "int8")
    )
    refused = [program.name for program in programs if program.refused]
    if streamed := [name for name in refused if name in ("encode", "denoise")]:
        job = dataclasses.replace(job, streamed=True)
        results |= compile_programs(job, versions, streamed, reuse=reuse, announce=announce)
    usable = [_program(name, evaluations[name], results[name]) for name in job.programs]
    held: dict[str, Any] = {"streamed": streamed, "quantize": quantize, "dtype": computed, "axes": axes}
    ways = () if any(program.refused for program in usable) else modes(networks, usable, aim.chip, **held)
    settings = (str(model), aim, axes, batch, height, width, steps, guided, computed, quantize)
    whole = {"programs": programs, "versions": versions, "references": read, "modes": ways}
    return Plan(*settings, weights, sum(small.values()), **whole)


def _program(name: str, evaluations: int, result: Mapping[str, Any]) -> ProgramPlan:
    return ProgramPlan(name, evaluations, **{**result, "unpriced": tuple(result.get("unpriced", ()))})


def check_axes(mesh: Mapping[str, int] | None, devices: int, target: Target) -> dict[str, int]:
    """Return the number of devices along each axis of the mesh.

    Raises:
        InputError: their product is not the target's number of devices.
    """
    asked = {"model": 1, **(mesh or {})}
    for name, size in asked.items():
        if name not in AXES:
            raise InputError("mesh", f"has an axis {name!r}", cure=nearest(name, AXES))
        check_count(name, size)
    axes = {"data": devices // asked["model"], **asked}
    if axes["data"] * axes["model"] != devices:
        raise InputError(
            "mesh",
            f"has {axes['data'] * axes['model']} devices, {target} has {devices}",
            cure=f"their product must be {devices}",
            value=axes,
        )
    return axes


def architecture(model: str | Path, overrides: Overrides | None = None, **source: Any) -> Networks:
    """Return the networks of a preset, a file, a folder or a Hub id, without reading weights."""
    return _open(model, overrides or Overrides(), **source)[0]


def _open(model: str | Path, overrides: Overrides, **source: Any) -> tuple[Networks, Family, Defaults]:
    """Return the networks, their family, and the default steps and guidance scale."""
    preset_of = next((family for family in FAMILIES if str(model) in family.presets), None)
    if isinstance(model, str) and preset_of:
        Location(model, **source).warn_unused("revision", "cache_dir")
        for name, part in overrides.parts.items():
            raise InputError(name, f"does not go with the preset {model}", cure="leave it out", value=part)
        networks = preset_of.presets[model]
        return networks, preset_of, preset_of.defaults_of(networks)
    try:
        origin = Location(model, progress=False, **source)
        overrides = completed(overrides, origin)
        files = open_files(origin, accept=family_of, weights=False, given=overrides.parts)
        files = overrides.apply(files, progress=False, **source)
        warn_unused_cache(source.get("cache_dir"), model, *overrides.parts.values())
    except InputError as error:
        is_name = isinstance(model, str) and "/" not in model and error.argument == "model"
        if is_name and not named_path("model", model).exists() and not find_named(str(model), "model"):
            names = [*PRESETS, *BUNDLED]
            meant = did_you_mean(str(model), names) or meant_by(str(model))
            raise InputError(
                "model",
                "is no preset, folder or Hub id",
                cure=f"{meant} presets: {', '.join(names)}".lstrip(),
                value=model,
            ) from error
        raise
    parts = read_parts(files)
    return parts.networks, parts.family, parts.defaults


_COMPILERS = {"tpu": ("libtpu", "libtpu-nightly"), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


def compiler_version(target: Target) -> dict[str, str]:
    """Return the package of the compiler for a target, with its version.

    Raises:
        CanvaxError: the compiler is not installed.
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
