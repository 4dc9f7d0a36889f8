"""The old scheduler classes, as names for canvax's samplers.

    scheduler, state = FlaxDPMSolverMultistepScheduler.from_pretrained(model, subfolder="scheduler")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model, scheduler=scheduler)
    params["scheduler"] = state

``params["scheduler"]`` decides which sampler draws. It holds a config and no arrays, so casting, replicating or
sharding the parameters with it inside leaves it as it is.
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

from canvax.checked import checked, is_deleted, placed
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
    """A scheduler config inside ``params``: a pytree without leaves, equal to any other of the same config.

    Attributes:
        text: the config as JSON; read ``config``.
    """

    text: str

    @classmethod
    @checked
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The state that stands for a scheduler_config.json."""
        if other := [name for name in config if not isinstance(name, str)]:
            raise InputError(f"config: {shown(other[0])} is not the name of a field")
        return cls(json.dumps(config, sort_keys=True, default=_plain))

    @property
    def config(self) -> dict[str, Any]:
        """The config, as scheduler_config.json has it."""
        return json.loads(self.text)


class FlaxScheduler:
    """A scheduler class of old: a name and a config. What it computes is canvax's table of that sampler."""

    CLASS: ClassVar[str]
    _xl = False

    def __init__(self, **config: Any) -> None:
        config.pop("dtype", None)  # tables are made in float64 whatever is asked for
        self._state = SchedulerState.of({**config, "_class_name": self.CLASS})
        from_scheduler_config(self.config)  # so that faults are told where the config is

    @property
    def config(self) -> dict[str, Any]:
        """The config, as scheduler_config.json has it."""
        return self._state.config

    @classmethod
    @checked
    def from_config(cls, config: Mapping[str, Any], **changes: Any) -> Self:
        """The scheduler of a config that may have been written for another class."""
        return cls(**{**config, **changes})

    @classmethod
    @checked
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
        """The scheduler and its state, from the scheduler_config.json of a model; ``changes`` are fields of it."""
        source = Location(
            pretrained_model_name_or_path, revision, None, token, cache_dir, local_files_only, progress=False
        )
        config = read_config(source, f"{subfolder}/scheduler_config.json" if subfolder else "scheduler_config.json")
        scheduler = cls.from_config(config, **changes)
        return scheduler, scheduler.create_state()

    @classmethod
    def of(cls, state: SchedulerState, *, xl: bool) -> FlaxScheduler:
        """The scheduler of a checkpoint, whatever its class; ``xl`` as for :func:`table_of`."""
        name = str(state.config.get("_class_name")).removeprefix("Flax")
        own = next((known for known in FlaxScheduler.__subclasses__() if name == known.CLASS), FlaxScheduler)
        scheduler = own.__new__(own)
        scheduler._state, scheduler._xl = state, xl
        return scheduler

    def create_state(self) -> SchedulerState:
        """The state to put into ``params["scheduler"]``."""
        return self._state

    @placed
    def set_timesteps(self, state: SchedulerState, num_inference_steps: int, shape: Sequence[int] = ()) -> StepState:
        """The state of a loop of one's own over latents [B, C, h, w] of this shape; it has ``timesteps``."""
        config = stable_diffusion_config(check_state(state).config, xl=self._xl)
        return begin(json.dumps(config, sort_keys=True), num_inference_steps, shape)

    @placed
    def scale_model_input(self, state: StepState, sample: Array, timestep: Any = None) -> Array:
        """What the network is given in the next step of ``state``, which knows its timestep."""
        del timestep
        return scaled(_begun(state), functions.numbers("sample", sample))

    @placed
    def step(
        self,
        state: StepState,
        model_output: Array,
        timestep: Any,
        sample: Array,
        key: Any = None,
        return_dict: bool = True,
    ) -> FlaxSchedulerOutput | tuple[Array, StepState]:
        """The latents after the next step of ``state``, which knows its timestep, and the state after it.

        Latents are of variance 1 or less throughout, also for Euler, whose old class had larger ones. ``key`` is for
        schedulers that add noise, the same in all steps.
        """
        check_flag("return_dict", return_dict)
        del timestep
        made = step(_begun(state), model_output, sample, key)
        return made if return_dict else made.to_tuple()

    @placed
    def add_noise(self, state: Any, original_samples: Array, noise: Array, timesteps: Any) -> Array:
        """Noisy samples [B, ...] at the training timesteps [B]."""
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
        """What the old classes had and this has not gets a sentence."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(answer(name, FLAX_ATTRIBUTES, dir(type(self)), "an attribute of a scheduler", FLAX_PAGE))


class FlaxDDIMScheduler(FlaxScheduler):
    """DDIM, deterministic."""

    CLASS = "DDIMScheduler"


class FlaxDDPMScheduler(FlaxScheduler):
    """DDPM: random in every step."""

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
    """The table of ``params["scheduler"]`` for a number of steps without the first ``skip``; guidance is set later.

    ``xl``: the config means what it says, also where those of Stable Diffusion 1.x and 2.x are known to be wrong.

    Raises:
        InputError: not a ``SchedulerState``, or its config or the steps cannot be used.
    """
    return build_table(_read(check_state(state), xl), steps, skip=skip)


def check_state(state: Any) -> SchedulerState:
    """Refuse what is no :class:`SchedulerState`."""
    if not isinstance(state, SchedulerState):
        raise InputError(
            f"params['scheduler']={shown(state)}: put back what from_pretrained returned there, or the "
            "state of a scheduler class of canvax.flax_api"
        )
    return state


def _begun(state: Any) -> StepState:
    if not isinstance(state, StepState):
        raise InputError(
            f"state is a {type(state).__name__}; write state = scheduler.set_timesteps(state, steps, latents.shape)"
        )
    return state


@lru_cache(maxsize=16)
def _read(state: SchedulerState, xl: bool) -> Scheduler:
    return from_scheduler_config(stable_diffusion_config(state.config, xl=xl))


def _plain(value: Any) -> Any:
    """JSON for what a config may hold besides plain values: arrays of betas."""
    array = None if is_deleted(value) or isinstance(value, Tracer) else np.asarray(value)
    if array is None or array.dtype.kind not in "biuf":
        raise InputError(f"the scheduler config holds {shown(value)}, which no scheduler_config.json has")
    return array.tolist()
