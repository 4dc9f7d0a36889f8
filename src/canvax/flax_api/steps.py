"""Single steps of a sampler, for user-written loops with a Flax scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from canvax.denoise import InFlight, StepInputs, denoise
from canvax.errors import InputError, check_count
from canvax.flax_api.keys import step_words, wrap_keys
from canvax.flax_api.output import by_name_or_index
from canvax.kernels.target import jitted
from canvax.models.denoiser import Denoiser
from canvax.params import Spec
from canvax.pipelines import functions
from canvax.samplers import SLOTS, SamplerTable, build_table, from_scheduler_config
from canvax.samplers.table import NOISE
from canvax.types import Array


@partial(jax.tree_util.register_dataclass, data_fields=["index", "slots"], meta_fields=["config", "steps"])
@dataclass(frozen=True)
class StepState:
    """The state of a loop: a pytree, which ``jax.lax.fori_loop`` can carry.

    Attributes:
        index: the next step, int32.
        slots: the sampler's memory of earlier steps [B, SLOTS, h, w, C].
        config: the scheduler's config as JSON.
        steps: number of steps.
    """

    index: Array
    slots: Array
    config: str
    steps: int

    @property
    def table(self) -> SamplerTable:
        """The sampler table of all steps."""
        return _table(self.config, self.steps)

    @property
    def timesteps(self) -> np.ndarray:
        """The timestep of each evaluation of the network."""
        steps = self.table.timestep
        return steps.astype(np.int32 if (steps == np.round(steps)).all() else np.float32)

    @property
    def init_noise_sigma(self) -> float:
        """The factor of unit noise before the first step."""
        return self.table.init_scale


class FlaxSchedulerOutput(NamedTuple):
    """The latents after a step, and the state for the next."""

    prev_sample: Array
    state: StepState

    __getitem__ = by_name_or_index

    def to_tuple(self) -> tuple[Array, StepState]:
        """Return both as a plain tuple."""
        return self.prev_sample, self.state


def begin(config: str, steps: int, shape: Any) -> StepState:
    """Return the state before the first step, for latents of ``shape`` [B, C, h, w].

    Raises:
        InputError: the shape is invalid, or the scheduler does not support this number of steps.
    """
    shape = tuple(shape) if isinstance(shape, list | tuple) else ()
    if len(shape) != 4 or not all(isinstance(side, int | np.integer) for side in shape):
        raise InputError(f"shape={shape}: give that of the latents, set_timesteps(state, steps, latents.shape)")
    steps = check_count("num_inference_steps", steps)
    _table(config, steps)
    batch, channels, height, width = shape
    slots = jnp.zeros((batch, SLOTS, height, width, channels), jnp.float32)
    return StepState(jnp.int32(0), slots, config, steps)


def check_alike(first: str, a: Any, second: str, b: Any) -> None:
    """Raise InputError unless a and b, traced or not, are arrays of numbers with the same shape."""
    shapes = functions.numbers(first, a).shape, functions.numbers(second, b).shape
    if shapes[0] != shapes[1]:
        raise InputError(f"{first} has shape {shapes[0]} and {second} {shapes[1]}; they must be alike")


def scaled(state: StepState, sample: Array) -> Array:
    """Return the network's input in the next step."""
    return _row(state.table.c_in.astype(np.float32), state.index) * sample


def step(state: StepState, model_output: Array, sample: Array, key: Any) -> FlaxSchedulerOutput:
    """Return the latents [B, C, h, w] after a step. It runs the denoising loop with a network of known output.

    Outside ``jax.jit`` it compiles once for each shape of the latents: the row of the table is an argument.

    Raises:
        InputError: the sampler needs noise, and ``key`` is None.
    """
    check_alike("sample", sample, "model_output", model_output)
    table, batch = state.table, sample.shape[0]
    if not isinstance(state.index, Tracer) and int(state.index) >= len(table):
        raise InputError(f"state: its {len(table)} steps are done; begin again with set_timesteps")
    noisy = table.M[:, :, NOISE].any(axis=1)
    if noisy.any() and key is None:
        raise InputError("key=None: this scheduler adds noise in each step; pass key=jax.random.key(0)")
    words = jnp.zeros((batch, 2), jnp.uint32) if key is None else step_words(wrap_keys(key), batch)
    row = {name: _row(column, state.index) for name, column in table.window(0, len(table)).items()}
    latents, slots = _stepped(state.slots, sample, model_output, words, row, _row(noisy, state.index))
    return FlaxSchedulerOutput(latents, StepState(state.index + 1, slots, state.config, state.steps))


def _row(column: Any, index: Array) -> Any:
    """Return a row of a column, on the host if the index is known there."""
    return jnp.asarray(column)[index] if isinstance(index, Tracer) else column[int(index)]


@partial(jitted, static_argnames=())
def _stepped(
    slots: Array, sample: Array, output: Array, words: Array, row: Mapping[str, Any], noisy: Any
) -> tuple[Array, Array]:
    """Return the latents [B, C, h, w] and the slots after a row that all images have."""
    rows = {name: jnp.broadcast_to(value, (len(slots), 1, *jnp.shape(value))) for name, value in row.items()}
    slots = slots.at[:, 0].set(jnp.moveaxis(sample, 1, -1).astype(jnp.float32))
    inputs = StepInputs(InFlight(slots, ({},), words), rows, {"noisy": jnp.asarray(noisy)[None]}, jnp.int32(1))
    slots, *_ = denoise({}, inputs, denoiser=_KnownOutput(jnp.moveaxis(output, 1, -1)))
    return jnp.moveaxis(slots[:, 0], -1, 1), slots


@dataclass(frozen=True, eq=False)
class _KnownOutput(Denoiser):
    """A denoiser that returns a known output."""

    output: Array

    @property
    def component(self) -> str:
        return ""

    @property
    def spec(self) -> Spec:
        return {}

    def prepare(self, p: Any, conditions: Any, latents: Any) -> None:
        del p, conditions, latents

    def apply(self, p: Any, x: Array, row: Any, prepared: Any, memory: Any) -> tuple[Array, Any]:
        del p, x, row, prepared
        return self.output, memory


@lru_cache(maxsize=16)
def _table(config: str, steps: int) -> SamplerTable:
    return build_table(from_scheduler_config(json.loads(config)), steps)
