"""The old scheduler classes, as names for canvax's samplers.

    scheduler, state = FlaxDPMSolverMultistepScheduler.from_pretrained(model, subfolder="scheduler")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model, scheduler=scheduler)
    params["scheduler"] = state

``params["scheduler"]`` decides which sampler draws. It holds a config and no arrays, so casting, replicating or
sharding the parameters with it inside leaves it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np

from canvax.errors import InputError
from canvax.samplers import SamplerTable, Scheduler, build_table, from_scheduler_config, stable_diffusion_config
from canvax.weights.open import read_config
from canvax.weights.source import Source


@jax.tree_util.register_static
@dataclass(frozen=True)
class SchedulerState:
    """A scheduler config inside ``params``: a pytree without leaves, equal to any other of the same config.

    Attributes:
        text: the config as JSON; read ``config``.
    """

    text: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The state that stands for a scheduler_config.json."""
        return cls(json.dumps(config, sort_keys=True, default=_plain))

    @property
    def config(self) -> dict[str, Any]:
        """The config, as scheduler_config.json has it."""
        return json.loads(self.text)


class FlaxScheduler:
    """A scheduler class of old: a name and a config. What it computes is canvax's table of that sampler."""

    CLASS: ClassVar[str]

    def __init__(self, **config: Any) -> None:
        config.pop("dtype", None)  # tables are made in float64 whatever is asked for
        self._state = SchedulerState.of({**config, "_class_name": self.CLASS})
        from_scheduler_config(self.config)  # so that faults are told where the config is

    @property
    def config(self) -> dict[str, Any]:
        """The config, as scheduler_config.json has it."""
        return self._state.config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **changes: Any) -> Self:
        """The scheduler of a config that may have been written for another class."""
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
        """The scheduler and its state, from the scheduler_config.json of a model; ``changes`` are fields of it."""
        source = Source(
            pretrained_model_name_or_path, revision, None, token, cache_dir, local_files_only, progress=False
        )
        config = read_config(source, f"{subfolder}/scheduler_config.json" if subfolder else "scheduler_config.json")
        scheduler = cls.from_config(config, **changes)
        return scheduler, scheduler.create_state()

    def create_state(self) -> SchedulerState:
        """The state to put into ``params["scheduler"]``."""
        return self._state


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


def table_of(state: Any, steps: int, *, xl: bool) -> SamplerTable:
    """The table of ``params["scheduler"]`` for a number of steps; guidance is the caller's to set.

    ``xl``: the config means what it says, also where those of Stable Diffusion 1.x and 2.x are known to be wrong.

    Raises:
        InputError: not a ``SchedulerState``, or its config or the steps cannot be used.
    """
    if not isinstance(state, SchedulerState):
        raise InputError(
            f"params['scheduler'] is a {type(state).__name__}; put back what from_pretrained returned there, or the "
            "state of a scheduler class of canvax.flax_api"
        )
    return build_table(_read(state, xl), steps)


@lru_cache(maxsize=16)
def _read(state: SchedulerState, xl: bool) -> Scheduler:
    return from_scheduler_config(stable_diffusion_config(state.config, xl=xl))


def _plain(value: Any) -> Any:
    """JSON for what a config may hold besides plain values: arrays of betas."""
    return np.asarray(value).tolist()
