"""Finds samplers by name, reads a checkpoint's scheduler_config.json, and builds the table of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import numpy as np

from canvax.errors import FLOAT32_MAX, InputError, conflict, did_you_mean, nearest, shown
from canvax.samplers.config import ALIASES, CLASS_DEFAULTS, faults_of, options_of, schedule_of, without_nulls
from canvax.samplers.curve_names import CURVES, NAMES
from canvax.samplers.options import SamplerOptions, check_option, falling, fault_of
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.specs import SAMPLERS, SamplerSpec, Solver
from canvax.samplers.table import SamplerTable

SHAPES = ("rho", "sigma_min", "sigma_max", "steps_offset")
"""Settings of the noise levels, which every sampler accepts."""

IMPOSSIBLE = {
    "dpmadaptive": "DPM adaptive chooses its steps as it goes, and a table is made before; use 'DPM++ 2M'",
    "dpm2m": "DPM-Solver and DPM-Solver++ both have a 2M, which differ; use 'DPM++ 2M'",
    "dpmfast": "DPM fast is not in the catalogue; 'DPM++ 3S' (singlestep) is its successor",
    "ersde": "ER SDE is not in the catalogue; use 'DPM++ 2M SDE'",
    "gradientestimation": "gradient estimation is not in the catalogue; use 'DPM++ 2M'",
    "resmultistep": "RES multistep is not in the catalogue; use 'DPM++ 2M', which is of the same order",
    "restart": "Restart is not in the catalogue; use 'DPM++ SDE'",
}


@dataclass(frozen=True)
class Scheduler:
    """A checkpoint's scheduler_config.json: the noise schedule of its training, its default sampler and options.

    `config` has the fields of the file and `_class_name`. Other samplers read their fields there.
    """

    schedule: NoiseSchedule
    spec: SamplerSpec
    options: SamplerOptions
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(_table_of(self.config).get("_class_name"), str):
            cure = "give {'_class_name': 'MyScheduler'} and the fields of its file"
            raise InputError("config", "has no _class_name of the scheduler", cure=cure, value=self.config)

    def has_sampler(self, name: Any) -> bool:
        """Check if a name is of the default sampler, and of none in the catalogue."""
        return name in self.spec.spellings and all(self.spec.name != spec.name for spec in SAMPLERS)

    def trained_with(self, changes: Mapping[str, Any]) -> Scheduler:
        """Return the scheduler with other fields of its config; what they do not change stays as the family made it.

        Raises:
            InputError: a field or its value is not supported.
        """
        if not changes:
            return self
        before, after = (from_scheduler_config({**self.config, **more}) for more in ({}, changes))
        names = [field.name for field in fields(NoiseSchedule)]
        pairs = {name: (getattr(before.schedule, name), getattr(after.schedule, name)) for name in names}
        schedule = {name: new for name, (old, new) in pairs.items() if not np.array_equal(old, new)}
        return replace(after, schedule=replace(self.schedule, **schedule))


def find(name: str) -> tuple[SamplerSpec, dict[str, Any]]:
    """Find a sampler by any spelling of its name; also return the options that the name implies.

    The name may end with a curve of `canvax.samplers.CURVES` in any spelling ("Karras" or "k", "SGM Uniform", "AYS"),
    which selects the sigmas. A class name (EulerDiscreteScheduler) implies no options: the checkpoint decides them.
    """
    key, classes = (
        _plain(name),
        {_plain(spec.diffusers_class): spec for spec in reversed(SAMPLERS) if spec.diffusers_class},
    )
    of_class = key.removeprefix("flax").replace("parallelscheduler", "scheduler")
    if of_class in classes:
        return classes[of_class], {}
    known = {_plain(spelling): spec for spec in reversed(SAMPLERS) for spelling in spec.spellings}
    if key in known:
        return known[key], dict(known[key].implied)
    for suffix, curve in _SUFFIXES.items():
        spec = known.get(key.removesuffix(suffix)) if key.endswith(suffix) else None
        if spec is None:
            continue
        if not spec.curves:
            raise InputError(
                "sampler",
                f"names {curve} sigmas, which {spec.label} does not take",
                cure=f"use {spec.label!r}",
                value=name,
            )
        return spec, {**spec.implied, "sigmas": curve}
    for stem in (key, *map(key.removesuffix, _SUFFIXES)):
        if stem in IMPOSSIBLE:
            raise InputError("sampler", f"is not possible: {IMPOSSIBLE[stem]}", value=name)
    if key in _SUFFIXES:
        raise InputError(
            "sampler",
            "is a sigma schedule",
            cure=f"write {{sigmas={_SUFFIXES[key]!r}}}, or a name such as 'DPM++ 2M {name}'",
            value=name,
        )
    choices = [spec.label for spec in SAMPLERS]
    choices += [spelling for spec in SAMPLERS for spelling in (*spec.spellings, spec.diffusers_class) if spelling]
    choices += [f"{spec.label} Karras" for spec in SAMPLERS if spec.curves]
    raise InputError("sampler", "is not known", cure=nearest(str(name), choices, "canvax samplers"), value=name)


def with_a1111_curve(name: str) -> str:
    """Return a sampler's name with the curve that A1111 takes for the schedule type "Automatic"; unknown ones as is."""
    try:
        spec, implied = find(name)
    except InputError:
        return name
    return f"{name} {spec.a1111_curve}" if spec.a1111_curve and "sigmas" not in implied else name


def _plain(name: str) -> str:
    """Normalise a spelling: lower case, without spaces and separators. Other signs stay, so they match no name."""
    pluses = re.sub(r"(?<!\+)\+\+(?!\+)", "pp", str(name).lower())  # of three or more none is a separator
    return re.sub(r"[\s\-_.,;:*/()]|(?<!\+)\+(?!\+)", "", pluses)


# Longest first, so that "beta_sigmas" is tried before shorter suffixes.
_SUFFIXES = {
    _plain(spelling): curve.name
    for curve in CURVES
    for spelling in (curve.name, *curve.also)
    if curve.name != "automatic" or spelling == "automatic"
}
_SUFFIXES = dict(sorted(_SUFFIXES.items(), key=lambda pair: -len(pair[0])))


def curve_named(name: str) -> str:
    """Find a curve by any spelling of its name; return the canonical name."""
    if _plain(name) not in _SUFFIXES:
        raise InputError("sigmas", "is not known", cure=nearest(str(name), NAMES, "canvax samplers curves"), value=name)
    return _SUFFIXES[_plain(name)]


def from_scheduler_config(config: Mapping[str, Any]) -> Scheduler:
    """Read a scheduler_config.json. The InputError lists all unsupported fields and values together."""
    config = without_nulls(_table_of(config))
    name = config.get("_class_name")
    stem = str(name).removeprefix("Flax")
    stem = ALIASES.get(stem, stem)
    if stem not in CLASS_DEFAULTS:
        cure = did_you_mean(stem, list(CLASS_DEFAULTS)).removesuffix("?")
        raise InputError(
            "_class_name",
            "of the scheduler config is not supported",
            cure=f"{cure and f'{cure}; '}supported are the classes that canvax samplers lists",
            value=name,
        )
    spec, implied = find(stem)
    options = _read(config, spec, implied)
    return Scheduler(schedule_of(config, stem), _as_configured(spec, options), options, dict(config))


def _table_of(config: Any) -> Mapping[str, Any]:
    """Return ``config``, after checking that it is a mapping with string keys."""
    if not isinstance(config, Mapping):
        raise InputError("config", "is not a table, such as json.loads of a scheduler_config.json gives", value=config)
    if other := [name for name in config if not isinstance(name, str)]:
        raise InputError("config", f"has {other[0]!r:.80}, which is not the name of a field")
    return config


def _read(config: Mapping[str, Any], spec: SamplerSpec, implied: Mapping[str, Any]) -> SamplerOptions:
    """Read the options of `config` for the sampler `spec`; the InputError lists all faults together."""
    class_name = spec.diffusers_class or "EulerDiscreteScheduler"
    faults = faults_of(config, class_name)
    if faults:
        raise InputError(
            f"the scheduler config, read as {class_name}, asks for what cannot be honoured: " + "; ".join(faults)
        )
    return options_of(config, class_name, implied)


def _as_configured(spec: SamplerSpec, options: SamplerOptions) -> SamplerSpec:
    """Return the stochastic form of `spec`, with noise and an adjustable eta, if the config selects an SDE."""
    if spec.eta or not options.algorithm_type.startswith("sde"):
        return spec
    if spec.name == "dpmpp_2m":
        return find("dpmpp_2m_sde")[0]
    return replace(spec, stochastic=True, eta=True, settings=("s_noise", *spec.settings))


def stable_diffusion_config(config: Mapping[str, Any], *, xl: bool = False) -> dict[str, Any]:
    """Correct `config` as the pipelines of Stable Diffusion do: no class default clips latents to -1..1.

    Pipelines of 1.x and 2.x always use steps_offset 1 and no clip_sample: early checkpoints left these out, and the
    reference pipelines correct them. For SDXL (`xl`) the values in the config count. Invalid values are not replaced,
    so that they are reported.
    """
    config = _table_of(config)
    if xl:
        return {"clip_sample": False, **config}
    right = {"steps_offset": 1, "clip_sample": False}
    wrong = {name for name, value in right.items() if fault_of(name, config.get(name, value), value)}
    return {**config, **{name: value for name, value in right.items() if name not in wrong}}


def build_table(
    scheduler: Scheduler,
    steps: int | None,
    *,
    sampler: str | SamplerSpec | Solver | SamplerTable | None = None,
    eta: float | None = None,
    spacing: str | None = None,
    sigmas: str | Sequence[float] | None = None,
    guidance: float | Sequence[float] = 1.0,
    rescale: float = 0.0,
    start: float = 0.0,
    end: float = 1.0,
    skip: int = 0,
    guidance_interval: Sequence[float] = (0.0, 1.0),
    unguided_noise: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> SamplerTable:
    """Build the table of a run.

    steps: number of steps as usually counted (see `SamplerSpec.evaluations`); None if sigmas or timesteps are lists.
    sampler: None for the checkpoint's, otherwise any name that `find` accepts. It uses the checkpoint's noise schedule,
    the fields of its config that the named sampler supports, and that sampler's defaults for the rest. Or a spec that
    is not in the catalogue, or a solver: a function of (schedule, steps, options) that returns a table. Or a table,
    which then gets its guidance here and takes no `eta`, `spacing`, `sigmas`, `settings`, `start` and `end`.
    spacing, sigmas (a curve, "automatic" for none, or a list of levels), eta: None keeps the value of config and name.
    guidance: a number, or one for each step. Outside of `guidance_interval`, fractions of the run like `start` and
    `end`, it is 1 (Kynkaanniemi et al. 2024). With `unguided_noise` it is the lambda of CFG++ instead.
    skip: steps to omit at the beginning, as in image to image; x then starts from `SamplerTable.noised` latents.
    settings: further fields of SamplerOptions, e.g. {"s_churn": 10} or {"timesteps": [999, 500, 250]}; for flow models
    also `shift`, or `mu`, the shift for the image size, and `shift_terminal`, whatever the sampler.
    start, end: the part of the run to do, as fractions of the training timesteps from noise to image. With start > 0, x
    must be the result of the previous part, or `SamplerTable.noised` latents of an image.
    """
    if not isinstance(scheduler, Scheduler):
        raise InputError("scheduler", "is not a Scheduler", cure="take pipe.model.scheduler", value=scheduler)
    if isinstance(sampler, SamplerTable):
        _check_table(sampler, steps, skip)
        changes = {"eta": eta, "spacing": spacing, "sigmas": sigmas, "sampler_settings": settings or None}
        changes |= {"denoising_start": start or None, "denoising_end": None if end == 1 else end}
        if changes := {name: value for name, value in changes.items() if value is not None}:
            name, value = next(iter(changes.items()))
            raise InputError(
                name, "has no effect on a sampler that is a table", cure="build the table with it", value=value
            )
        return _guided(sampler, guidance, rescale, guidance_interval, scheduler.schedule, unguided_noise)
    settings = dict(settings or {})
    schedule = _schedule_for(scheduler.schedule, settings)
    train = schedule.num_train_timesteps
    spec, options, implied = scheduler.spec, scheduler.options, {}
    if sampler is not None:
        spec, implied = spec_of(sampler)
        options = _read(scheduler.config, spec, implied)
        spec = _as_configured(spec, options)
    options = replace(options, **_changes(spec, eta, spacing, sigmas, settings))
    if sigmas is not None and "sigmas" in implied and options.sigmas not in ("automatic", implied["sigmas"]):
        raise conflict("sigmas", f"sampler={sampler!r}", why="its name has a curve", value=sigmas)
    if options.s_churn and options.s_tmin > options.s_tmax:
        raise InputError("s_tmin", f"is above s_tmax={options.s_tmax:g}", cure="swap them", value=options.s_tmin)
    curve = implied.get("sigmas", "automatic") if sigmas is None else options.sigmas
    if options.timesteps is not None and curve != "automatic":
        other = f"sampler={sampler!r}" if sigmas is None else f"sigmas={sigmas!r}"
        raise conflict("timesteps", other, why="both place the steps", value=list(options.timesteps))
    if options.timesteps is not None and options.timesteps[0] > (last := schedule.last_timestep):
        raise InputError(
            "timesteps", f"has {options.timesteps[0]:g}, which is not in 0..{last}", value=list(options.timesteps)
        )
    steps = _steps(steps, options, train)
    if not np.all(np.abs(np.asarray(guidance, np.float64)) <= FLOAT32_MAX) or not 0 <= rescale <= 1:
        raise InputError(
            f"guidance={guidance} and rescale={rescale} cannot be used; guidance is a number such as 7.5, or one for "
            "each step; rescale is in 0..1"
        )
    if not 0 <= start < end <= 1:
        raise InputError(f"start={start} and end={end} of the run are not in order; give 0 <= start < end <= 1")
    if skip < 0:
        raise InputError("skip", "is not a number of steps to leave out", cure="give 0 or more", value=skip)
    if not spec.curves and (start or end < 1 or skip):
        raise InputError("sampler", "is run whole", cure="a part of it means nothing", value=spec.name)
    with np.errstate(all="ignore"):  # infinite or NaN values are refused below, without warnings
        try:
            table = spec.solver(schedule, steps, options)
        except np.linalg.LinAlgError:
            raise InputError(
                "steps", f"gives two levels of sampler={spec.name!r} that are the same", cure="use fewer", value=steps
            ) from None
        if spec not in SAMPLERS:
            _check_table(table)
        table = _guided(table, guidance, rescale, guidance_interval, schedule, unguided_noise)
        lo = max(skip, _steps_before(table, schedule, start) if start else 0)
        hi = _steps_before(table, schedule, end) if end < 1 else int(table.step[-1]) + 1
        if lo >= hi and skip >= hi:
            raise InputError(
                "skip",
                f"leaves none of {hi} steps (where strength begins after denoising_end)",
                cure="skip fewer, or take more steps",
                value=skip,
            )
        if lo >= hi:
            raise InputError(
                f"no step of this run lies between start={start} (denoising_start) and end={end} (denoising_end); use "
                "more steps or a longer part"
            )
        part = table.take(int(np.sum(table.step < lo)), int(np.sum(table.step < hi)))
        return _restarted(spec, schedule, steps, options, part, lo, hi) if lo else part


def spec_of(sampler: str | SamplerSpec | Solver) -> tuple[SamplerSpec, dict[str, Any]]:
    """Return the spec of a name or a solver; a spec is returned unchanged."""
    if isinstance(sampler, str):
        return find(sampler)
    spec = sampler if isinstance(sampler, SamplerSpec) else SamplerSpec.of(sampler)
    return spec, dict(spec.implied)


def _check_table(table: Any, steps: int | None = None, skip: int = 0) -> None:
    """Refuse what a sampler outside of the catalogue gave if it cannot be run."""
    if not isinstance(table, SamplerTable):
        raise InputError("sampler", f"returned {shown(table)}", cure="return a canvax.samplers.SamplerTable")
    if not len(table) or not table.finite:
        raise InputError("sampler", "is a table without rows, or with numbers that float32 cannot hold")
    if (table.guidance != 1).any() or table.rescale.any():
        raise InputError("sampler", "is a table with guidance", cure="leave it out there: {guidance_scale=7.5}")
    first, whole = int(table.step[0]), int(table.step[-1]) + 1
    if steps not in (None, whole):
        raise InputError(
            "num_inference_steps", f"is not the {whole} steps of the table", cure="leave it out", value=steps
        )
    if skip not in (0, first):
        raise InputError("sampler", f"is a table that begins at step {first}, not at {skip}")


FLOW_SETTINGS = ("mu", "shift", "shift_terminal")
"""Settings of a flow model's noise schedule, which every sampler accepts."""


def _schedule_for(schedule: NoiseSchedule, settings: dict[str, Any]) -> NoiseSchedule:
    """Return the model's noise schedule for this run; remove `FLOW_SETTINGS` from `settings`."""
    if not schedule.is_flow:
        return schedule
    taken = {name: settings.pop(name) for name in FLOW_SETTINGS if settings.get(name) is not None}
    for name, value in taken.items():
        check_option(name, value, 0.0)
    if "mu" in taken and schedule.size_shift is None:
        raise InputError(
            "mu",
            f"does not go with a model whose shift is always {schedule.shift:g}",
            cure="leave it out",
            value=taken["mu"],
        )
    if not taken.keys() & {"mu", "shift"} and schedule.size_shift is not None:
        raise InputError(
            "mu",
            "does not say the shift, which follows the size of the image for this model",
            cure="give {mu}",
            value=None,
        )
    if "mu" in taken:
        schedule = schedule.with_mu(float(taken["mu"]))
    if "shift" in taken:
        schedule = schedule.with_shift(float(taken["shift"]))
    return replace(schedule, shift_terminal=taken.get("shift_terminal", schedule.shift_terminal))


def _restarted(
    spec: SamplerSpec,
    schedule: NoiseSchedule,
    steps: int,
    options: SamplerOptions,
    part: SamplerTable,
    lo: int,
    hi: int,
) -> SamplerTable:
    """Return steps lo..hi as a run without memory of the earlier steps, with the guidance of `part`."""
    fresh = spec.solver(schedule, steps, replace(options, restart=lo))
    fresh = fresh.take(0, int(np.sum(fresh.step < hi - lo)))
    first = part.step - lo
    at = np.searchsorted(first, fresh.step)
    return replace(
        fresh,
        guidance=part.guidance[at],
        rescale=part.rescale[at],
        step=fresh.step + lo,
        first_row=part.first_row,
        init_scale=1.0,
    )


def _steps_before(table: SamplerTable, schedule: NoiseSchedule, fraction: float) -> int:
    """Count the steps in the part before `fraction` of the run."""
    return int(np.sum(_before(table, schedule, fraction)))


def _before(table: SamplerTable, schedule: NoiseSchedule, fraction: float) -> np.ndarray:
    """Return for each step whether it is before `fraction` of the run: its timestep is at the limit or above."""
    begins = table.timestep[np.searchsorted(table.step, np.arange(table.step[-1] + 1))]
    train = schedule.num_train_timesteps
    if schedule.timestep_unit == "index":
        return begins >= round(train - fraction * train)
    index = np.interp(begins, schedule.timestep_of(schedule.sigmas), np.arange(train))
    return index >= round(train - fraction * train)


def _guided(
    table: SamplerTable,
    guidance: float | Sequence[float],
    rescale: float,
    interval: Sequence[float],
    schedule: NoiseSchedule,
    unguided_noise: bool,
) -> SamplerTable:
    """Set the guidance of a table, 1 outside of the interval."""
    low, high = interval if len(interval) == 2 else (1, 0)
    if not 0 <= low < high <= 1:
        raise InputError(
            "guidance_interval",
            "is not in order",
            cure="give two fractions of the run, 0 <= a < b <= 1",
            value=interval,
        )
    table = table.with_guidance(guidance, rescale, unguided_noise=unguided_noise)
    if (low, high) == (0.0, 1.0):
        return table
    inside = ~_before(table, schedule, low)[table.step] if low else np.ones(len(table), bool)
    if high < 1:
        inside &= _before(table, schedule, high)[table.step]
    return replace(table, guidance=np.where(inside, table.guidance, 1.0))


def _steps(steps: int | None, options: SamplerOptions, train: int) -> int:
    """Check and return the number of steps; a list of levels or timesteps determines it."""
    listed = None
    if options.timesteps is not None:
        listed = len(options.timesteps)
    elif not isinstance(options.sigmas, str):
        listed = len(options.sigmas) - (options.sigmas[-1] == 0)
    if listed is not None and steps not in (None, listed):
        name = "sigmas" if options.timesteps is None else "timesteps"
        raise conflict("steps", name, why=f"they are {listed} steps", value=steps)
    steps = listed if listed is not None else steps
    if isinstance(steps, bool) or not isinstance(steps, Integral) or not 1 <= steps <= train:
        raise InputError("steps", f"is not a whole number in 1..{train}", cure="20 to 50 is usual", value=steps)
    return int(steps)


def _changes(
    spec: SamplerSpec,
    eta: float | None,
    spacing: str | None,
    sigmas: str | Sequence[float] | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Check the arguments of a call and return them as fields of SamplerOptions."""
    if spacing is not None:
        check_option("spacing", spacing)
    if eta is not None:
        check_option("eta", eta)
    if eta and not spec.eta:
        able = ", ".join(repr(other.name) for other in SAMPLERS if other.eta)
        raise InputError(
            "eta", f"does not apply to sampler={spec.name!r}", cure=f"leave it out or use {able}", value=eta
        )
    changes: dict[str, Any] = {"eta": eta, "spacing": spacing}
    if isinstance(sigmas, str):
        changes["sigmas"] = curve_named(sigmas)
    elif sigmas is not None:
        changes["sigmas"] = falling("sigmas", sigmas)
    if changes.get("sigmas", "automatic") != "automatic" and not spec.curves:
        raise InputError("sigmas", f"does not apply to sampler={spec.name!r}", cure="leave it out", value=sigmas)
    for name, value in settings.items():
        if name == "timesteps" and spec.curves:
            changes[name] = falling(name, value)
            continue
        able = (*SHAPES, *spec.settings)
        if name not in able:
            problem = f"has {name}={shown(value)}, which is not a setting of sampler={spec.name!r}"
            raise InputError("sampler_settings", problem, cure=f"it has {', '.join(able)}")
        check_option(name, value)
        changes[name] = tuple(value) if isinstance(value, list) else value
    return {name: value for name, value in changes.items() if value is not None}
