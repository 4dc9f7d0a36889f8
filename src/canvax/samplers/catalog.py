"""The samplers by name, in every spelling people know, and the reading of a checkpoint's scheduler_config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np

from canvax.errors import InputError, nearest
from canvax.samplers import solvers
from canvax.samplers.config import CLASS_DEFAULTS, RELATIVES, faults_of, options_of, schedule_of
from canvax.samplers.options import SIGMAS, SPACINGS, SamplerOptions
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.table import SamplerTable

Solver = Callable[[NoiseSchedule, int, SamplerOptions], SamplerTable]


@dataclass(frozen=True)
class SamplerSpec:
    """One sampler of the catalogue.

    implied: options that its name fixes, whatever the checkpoint says. curves: takes Karras and other sigma curves.
    stochastic: draws noise in its steps at its usual eta (a table knows for itself). eta: has one to set.
    evaluations: of the network for each step ("n + 1": for a whole run of n steps).
    """

    name: str
    label: str
    diffusers_class: str
    k_diffusion: str | None
    comfyui: str | None
    solver: Solver
    stochastic: bool
    evaluations: str
    when: str
    source: str
    implied: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    curves: bool = False
    eta: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every name it answers to, the canonical one first."""
        known = (self.name, self.label, self.k_diffusion, self.comfyui, *self.also)
        return tuple(dict.fromkeys(name for name in known if name))


SAMPLERS = (
    SamplerSpec(
        name="ddim",
        label="DDIM",
        diffusers_class="DDIMScheduler",
        k_diffusion=None,
        comfyui="ddim",
        solver=solvers.ddim,
        stochastic=False,
        evaluations="1",
        when="The plain deterministic choice; 30 to 50 steps; eta > 0 adds noise. Safe with every prediction type.",
        source="Song et al. 2021, arXiv:2010.02502",
        eta=True,
    ),
    SamplerSpec(
        name="ddpm",
        label="DDPM",
        diffusers_class="DDPMScheduler",
        k_diffusion=None,
        comfyui="ddpm",
        solver=solvers.ddpm,
        stochastic=True,
        evaluations="1",
        when="The original random sampler; wants hundreds of steps. For comparison with papers.",
        source="Ho et al. 2020, arXiv:2006.11239",
    ),
    SamplerSpec(
        name="pndm",
        label="PLMS",
        diffusers_class="PNDMScheduler",
        k_diffusion=None,
        comfyui=None,
        solver=solvers.pndm,
        stochastic=False,
        evaluations="n + 1",
        when="What Stable Diffusion 1.x was released with; 50 steps. DPM++ 2M is as good in half of them.",
        source="Liu et al. 2022, arXiv:2202.09778",
        implied={"skip_prk_steps": True},
        also=("k_plms", "pndm_plms"),
    ),
    SamplerSpec(
        name="euler",
        label="Euler",
        diffusers_class="EulerDiscreteScheduler",
        k_diffusion="sample_euler",
        comfyui="euler",
        solver=solvers.euler,
        stochastic=False,
        evaluations="1",
        when="Simple and robust; 20 to 30 steps; the default of SDXL.",
        source="Karras et al. 2022, arXiv:2206.00364",
        also=("k_euler",),
        curves=True,
    ),
    SamplerSpec(
        name="euler_a",
        label="Euler a",
        diffusers_class="EulerAncestralDiscreteScheduler",
        k_diffusion="sample_euler_ancestral",
        comfyui="euler_ancestral",
        solver=solvers.euler_ancestral,
        stochastic=True,
        evaluations="1",
        when="Varied and soft pictures in 20 to 40 steps; the picture keeps changing with the number of steps.",
        source="Song et al. 2021, arXiv:2011.13456; k-diffusion",
        also=("k_euler_a", "k_euler_ancestral"),
        curves=True,
        eta=True,
    ),
    SamplerSpec(
        name="dpmpp_2m",
        label="DPM++ 2M",
        diffusers_class="DPMSolverMultistepScheduler",
        k_diffusion="sample_dpmpp_2m",
        comfyui="dpmpp_2m",
        solver=solvers.dpm_multistep,
        stochastic=False,
        evaluations="1",
        when="The best default: converged in 20 to 25 steps, with or without Karras sigmas.",
        source="Lu et al. 2022, arXiv:2211.01095",
        implied={"algorithm_type": "dpmsolver++", "solver_order": 2},
        also=("k_dpmpp_2m", "dpm_solver_multistep", "dpm_solver++", "dpm_multistep"),
        curves=True,
    ),
    SamplerSpec(
        name="dpmpp_2m_sde",
        label="DPM++ 2M SDE",
        diffusers_class="DPMSolverMultistepScheduler",
        k_diffusion="sample_dpmpp_2m_sde",
        comfyui="dpmpp_2m_sde",
        solver=solvers.dpm_multistep,
        stochastic=True,
        evaluations="1",
        when="DPM++ 2M with fresh noise in each step: more texture, 25 to 40 steps.",
        source="Lu et al. 2022, arXiv:2211.01095, appendix B",
        implied={"algorithm_type": "sde-dpmsolver++", "solver_order": 2},
        also=("k_dpmpp_2m_sde",),
        curves=True,
    ),
)


@dataclass(frozen=True)
class Scheduler:
    """What a scheduler_config.json says: the noise the model was trained with, its own sampler, and its options."""

    schedule: NoiseSchedule
    spec: SamplerSpec
    options: SamplerOptions
    config: Mapping[str, Any]


def find(name: str) -> tuple[SamplerSpec, dict[str, Any]]:
    """The sampler called `name` in any spelling, and the options that this name implies.

    A trailing "Karras" (or "_k") or "Exponential" chooses the sigmas. A class name (EulerDiscreteScheduler) implies
    nothing: its options are the checkpoint's.
    """
    key, classes = _plain(name), {_plain(spec.diffusers_class): spec for spec in reversed(SAMPLERS)}
    if key.removeprefix("flax") in classes:
        return classes[key.removeprefix("flax")], {}
    known = {_plain(spelling): spec for spec in reversed(SAMPLERS) for spelling in spec.spellings}
    for suffix, curve in (("", None), ("karras", "karras"), ("exponential", "exponential"), ("k", "karras")):
        spec = known.get(key.removesuffix(suffix)) if key.endswith(suffix) else None
        if spec is None:
            continue
        if curve and not spec.curves:
            raise InputError(f"sampler={name!r}: {spec.label} takes no {curve} sigmas; use {spec.label!r}")
        return spec, {**spec.implied, **({"sigmas": curve} if curve else {})}
    choices = [spelling for spec in SAMPLERS for spelling in (*spec.spellings, spec.diffusers_class)]
    choices += [f"{spec.label} Karras" for spec in SAMPLERS if spec.curves]
    raise InputError(f"sampler={name!r} is not known; {nearest(str(name), choices)}")


def _plain(name: str) -> str:
    return "".join(c for c in str(name).lower().replace("++", "pp") if c.isalnum())


def from_scheduler_config(config: Mapping[str, Any], *, sampler: str | None = None) -> Scheduler:
    """Read a scheduler_config.json. Raises InputError with every field and value that cannot be honoured, together.

    sampler: the default to use in place of the file's own class; needed where that class is a relative that canvax
    does not have (UniPC, Heun, ...), whose noise schedule is read all the same.
    """
    name = config.get("_class_name")
    stem = str(name).removeprefix("Flax")
    if stem not in CLASS_DEFAULTS and (sampler is None or stem not in RELATIVES):
        cure = "name a sampler, such as sampler='DPM++ 2M', to use this model" if stem in RELATIVES else ""
        raise InputError(
            f"_class_name={name!r} of the scheduler config is not supported; "
            f"{cure or nearest(stem, list(CLASS_DEFAULTS))} Supported: {', '.join(CLASS_DEFAULTS)}"
        )
    if sampler is None:
        spec, implied = find(stem)
    else:
        spec, implied = find(sampler)
    options = _read(config, spec, implied)
    if options.algorithm_type.startswith("sde"):
        spec, _ = find("dpmpp_2m_sde")
    return Scheduler(schedule_of(config), spec, options, dict(config))


def _read(config: Mapping[str, Any], spec: SamplerSpec, implied: Mapping[str, Any]) -> SamplerOptions:
    """The options of `config` for the sampler `spec`, all faults reported together."""
    faults = faults_of(config, spec.diffusers_class)
    if faults:
        raise InputError(
            f"the scheduler config, read as {spec.diffusers_class}, asks for what cannot be honoured: "
            + "; ".join(faults)
        )
    return replace(options_of(config, spec.diffusers_class), **implied)


def stable_diffusion_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as the pipelines of Stable Diffusion 1.x and 2.x read it: steps_offset 1 and no clip_sample, always.

    Early checkpoints left these out, and the reference pipelines have put them right ever since.
    """
    return {**config, "steps_offset": 1, "clip_sample": False}


def build_table(
    scheduler: Scheduler,
    steps: int,
    *,
    sampler: str | None = None,
    eta: float | None = None,
    spacing: str | None = None,
    sigmas: str | None = None,
    guidance: float = 1.0,
    rescale: float = 0.0,
    start: float = 0.0,
    end: float = 1.0,
) -> SamplerTable:
    """The table of one run.

    sampler: None for the checkpoint's own, else any name `find` knows, run on the checkpoint's noise schedule with the
    fields of its config that the named sampler understands and that sampler's own defaults for the rest.
    spacing, sigmas ("normal" switches a curve off), eta: None keeps what config and name say.
    start, end: the part of the run to do, as fractions of the training timesteps from noise to picture. A part that
    starts late begins from x as the part before it left it, and remembers nothing else.
    """
    train = scheduler.schedule.num_train_timesteps
    if isinstance(steps, bool) or not isinstance(steps, Integral) or not 1 <= steps <= train:
        raise InputError(f"steps={steps!r} is not a whole number in 1..{train}; 20 to 50 is usual")
    spec, options = scheduler.spec, scheduler.options
    if sampler is not None:
        spec, implied = find(sampler)
        options = _read(scheduler.config, spec, implied)
    for name, value in (("guidance", guidance), ("rescale", rescale)):
        if not math.isfinite(value) or (name == "rescale" and not 0 <= value <= 1):
            raise InputError(f"{name}={value} cannot be used; guidance is a number such as 7.5, rescale is in 0..1")
    changes = {"spacing": spacing, "sigmas": sigmas, "eta": eta}
    _check(spec, changes)
    options = replace(options, **{name: value for name, value in changes.items() if value is not None})
    if start:
        options = replace(options, restart=_cutoff(train, start))
    with np.errstate(all="ignore"):  # what is not finite is refused by name, not warned about
        table = spec.solver(scheduler.schedule, int(steps), options)
    return _part(table.with_guidance(guidance, rescale), train, start, end)


def _cutoff(train: int, fraction: float) -> int:
    """The timestep at a fraction of the way from noise to picture."""
    return round(train - fraction * train)


def _part(table: SamplerTable, train: int, start: float, end: float) -> SamplerTable:
    """The rows from `start` to `end`: timesteps at a limit belong to the part before it."""
    if not 0 <= start < end <= 1:
        raise InputError(f"start={start} and end={end} of the run are not in order; give 0 <= start < end <= 1")
    lo = int(np.sum(table.timestep >= _cutoff(train, start))) if start else 0
    hi = int(np.sum(table.timestep >= _cutoff(train, end))) if end < 1 else len(table)
    if lo >= hi:
        raise InputError(
            f"no step of this run lies between start={start} and end={end}; use more steps or a longer part"
        )
    part = table.take(lo, hi)
    return replace(part, init_scale=1.0) if start else part


def _check(spec: SamplerSpec, changes: Mapping[str, Any]) -> None:
    for name, allowed in (("spacing", SPACINGS), ("sigmas", SIGMAS)):
        if changes[name] is not None and changes[name] not in allowed:
            raise InputError(f"{name}={changes[name]!r} is not known; {nearest(str(changes[name]), allowed)}")
    if changes["sigmas"] not in (None, "normal") and not spec.curves:
        able = ", ".join(repr(other.name) for other in SAMPLERS if other.curves)
        raise InputError(
            f"sigmas={changes['sigmas']!r} does not apply to sampler={spec.name!r}; leave it out or use {able}"
        )
    if changes["eta"] and not spec.eta:
        able = ", ".join(repr(other.name) for other in SAMPLERS if other.eta)
        raise InputError(f"eta={changes['eta']} does not apply to sampler={spec.name!r}; leave it out or use {able}")
