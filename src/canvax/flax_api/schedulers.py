"""The scheduler classes of diffusers' Flax API, as names for canvax's samplers.

    scheduler, state = FlaxDPMSolverMultistepScheduler.from_pretrained(model, subfolder="scheduler")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model, scheduler=scheduler)
    params["scheduler"] = state

``params["scheduler"]`` determines the sampler. It contains a config and no arrays, so casting, replicating or sharding
the parameters does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from canvax.errors import InputError, check_flag, shown
from canvax.familiar import FLAX_ATTRIBUTES, FLAX_PAGE, answer
from canvax.flax_api.steps import FlaxSchedulerOutput, StepState, begin, check_alike, scaled, step
from canvax.pipelines import functions
from canvax.samplers import SamplerTable, Scheduler, build_table, from_scheduler_config, stable_diffusion_config
from canvax.types import Array
from canvax.weights.location import Location
from canvax.weights.open import read_config


@jax.tree_util.register_static
@dataclass(frozen=True)
class SchedulerState:
    """A scheduler config inside ``params``: a pytree without leaves, equal to any other with the same config.

    Attributes:
        text: the config as JSON; read ``config``.
    """

    text: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Make the state for a scheduler_config.json."""
        if other := [name for name in config if not isinstance(name, str)]:
            raise InputError(f"config: {shown(other[0])} is not the name of a field")
        return cls(json.dumps(config, sort_keys=True, default=_plain))

    @property
    def config(self) -> dict[str, Any]:
        """The config as in scheduler_config.json."""
        return json.loads(self.text)


class FlaxScheduler:
    """A scheduler class of diffusers: a name and a config. It computes with canvax's table of the sampler."""

    CLASS: ClassVar[str]
    _xl = False

    def __init__(self, **config: Any) -> None:
        config.pop("dtype", None)  # tables are always float64
        self._state = SchedulerState.of({**config, "_class_name": self.CLASS})
        from_scheduler_config(self.config)  # reports faults of the config here

    @property
    def config(self) -> dict[str, Any]:
        """The config as in scheduler_config.json."""
        return self._state.config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **changes: Any) -> Self:
        """Make a scheduler from a config, which can be of another class."""
        return cls(**{**config, **changes})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        subfolder: str | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **changes: Any,
    ) -> tuple[Self, SchedulerState]:
        """Read a model's scheduler_config.json and replace fields by ``changes``; return scheduler and state."""
        source = Location(
            pretrained_model_name_or_path, revision, None, token, cache_dir, local_files_only, progress=False
        )
        config = read_config(source, f"{subfolder}/scheduler_config.json" if subfolder else "scheduler_config.json")
        scheduler = cls.from_config(config, **changes)
        return scheduler, scheduler.create_state()

    @classmethod
    def of(cls, state: SchedulerState, *, xl: bool) -> FlaxScheduler:
        """Make the scheduler of a checkpoint, whatever its class; ``xl`` as for :func:`table_of`."""
        name = str(state.config.get("_class_name")).removeprefix("Flax")
        subclass = next((known for known in FlaxScheduler.__subclasses__() if name == known.CLASS), FlaxScheduler)
        scheduler = subclass.__new__(subclass)
        scheduler._state, scheduler._xl = state, xl
        return scheduler

    def create_state(self) -> SchedulerState:
        """Return the state to put into ``params["scheduler"]``."""
        return self._state

    def set_timesteps(self, state: SchedulerState, num_inference_steps: int, shape: Sequence[int] = ()) -> StepState:
        """Return the initial state, with ``timesteps``, of a user-written loop; ``shape`` is that of the latents."""
        config = stable_diffusion_config(check_state(state).config, xl=self._xl)
        return begin(json.dumps(config, sort_keys=True), num_inference_steps, shape)

    def scale_model_input(self, state: StepState, sample: Array, timestep: Any = None) -> Array:
        """Return the network's input in the next step of ``state``, which determines the timestep."""
        del timestep
        return scaled(_check_step_state(state), functions.numbers("sample", sample))

    def step(
        self,
        state: StepState,
        model_output: Array,
        timestep: Any,
        sample: Array,
        key: Any = None,
        return_dict: bool = True,
    ) -> FlaxSchedulerOutput | tuple[Array, StepState]:
        """Return the latents and the state after the next step of ``state``, which determines the timestep.

        The variance of latents is at most 1, also for Euler, where it is larger in diffusers. ``key`` is for schedulers
        that add noise; pass the same key in all steps.
        """
        check_flag("return_dict", return_dict)
        del timestep
        output = step(_check_step_state(state), model_output, sample, key)
        return output if return_dict else output.to_tuple()

    def add_noise(self, state: Any, original_samples: Array, noise: Array, timesteps: Any) -> Array:
        """Add noise to samples [B, ...] at the training timesteps [B]."""
        if not isinstance(state, SchedulerState | StepState):
            raise InputError(f"state is a {type(state).__name__}; give that of create_state or set_timesteps")
        check_alike("original_samples", original_samples, "noise", noise)
        kept = _read(self._state, self._xl).schedule.alphas_cumprod
        times = functions.numbers("timesteps", timesteps)
        if not jnp.issubdtype(times.dtype, jnp.integer) or times.ndim > 1:
            raise InputError(f"timesteps={shown(timesteps)} are not whole numbers [B]")
        if not isinstance(times, Tracer) and not ((times >= 0) & (times < len(kept))).all():
            raise InputError(f"timesteps={timesteps!r:.80} are not in 0..{len(kept) - 1}")
        kept = jnp.asarray(kept, jnp.float32)[jnp.asarray(timesteps)]
        kept = kept.reshape(-1, *[1] * (jnp.ndim(original_samples) - 1))
        return jnp.sqrt(kept) * original_samples + jnp.sqrt(1 - kept) * noise

    def __getattr__(self, name: str) -> Any:
        """Explain, in the error, attributes of diffusers' classes that do not exist here."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(answer(name, FLAX_ATTRIBUTES, dir(type(self)), "an attribute of a scheduler", FLAX_PAGE))


class FlaxDDIMScheduler(FlaxScheduler):
    """DDIM, deterministic."""

    CLASS = "DDIMScheduler"


class FlaxDDPMScheduler(FlaxScheduler):
    """DDPM, stochastic."""

    CLASS = "DDPMScheduler"


class FlaxPNDMScheduler(FlaxScheduler):
    """PNDM, with or without its Runge-Kutta start."""

    CLASS = "PNDMScheduler"


class FlaxDPMSolverMultistepScheduler(FlaxScheduler):
    """DPM-Solver and DPM-Solver++, multistep."""

    CLASS = "DPMSolverMultistepScheduler"


class FlaxEulerDiscreteScheduler(FlaxScheduler):
    """Euler."""

    CLASS = "EulerDiscreteScheduler"


def table_of(state: Any, steps: int, *, xl: bool, skip: int = 0) -> SamplerTable:
    """Build the table of ``params["scheduler"]`` for ``steps`` without the first ``skip``; guidance is set later.

    With ``xl`` the config is used without the corrections for Stable Diffusion 1.x and 2.x.

    Raises:
        InputError: ``state`` is not a ``SchedulerState``, or its config or the steps are invalid.
    """
    return build_table(_read(check_state(state), xl), steps, skip=skip)


def check_state(state: Any) -> SchedulerState:
    """Raise InputError unless ``state`` is a :class:`SchedulerState`."""
    if not isinstance(state, SchedulerState):
        raise InputError(
            f"params['scheduler']={shown(state)}: put back what from_pretrained returned there, or the "
            "state of a scheduler class of canvax.flax_api"
        )
    return state


def _check_step_state(state: Any) -> StepState:
    if not isinstance(state, StepState):
        raise InputError(
            f"state is a {type(state).__name__}; write state = scheduler.set_timesteps(state, steps, latents.shape)"
        )
    return state


@lru_cache(maxsize=16)
def _read(state: SchedulerState, xl: bool) -> Scheduler:
    return from_scheduler_config(stable_diffusion_config(state.config, xl=xl))


def _plain(value: Any) -> Any:
    """Convert arrays in a config, e.g. of betas, to JSON."""
    array = None if isinstance(value, Tracer) else np.asarray(value)
    if array is None or array.dtype.kind not in "biuf":
        raise InputError(f"the scheduler config holds {shown(value)}, which no scheduler_config.json has")
    return array.tolist()
