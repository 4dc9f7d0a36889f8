"""The loop as a pure function: to be jitted, differentiated and mapped, with what each step is recorded as.

Reinforcement learning, reward gradients, distillation, attention maps and trajectories are all this function with
another ``record``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from canvax.call import read_guidance_method
from canvax.denoise import evaluated, neighbours, next_state, row_noise
from canvax.errors import InputError, check_function
from canvax.guidance import PLAIN, PROMPT, Alone, Guidance, conditions_of, filled_columns, memory_of, rule_of
from canvax.kernels.outline import keeping
from canvax.models.denoiser import Conditions
from canvax.models.networks import Networks
from canvax.params import Params
from canvax.samplers.table import NOISE, SLOTS, SamplerTable
from canvax.types import Array

Columns = Mapping[str, Any]
"""``SamplerTable.columns()``."""


class Start(NamedTuple):
    """The beginning of a run: the arguments of ``rollout`` after the parameters.

    A jitted function may take it: it is a pytree of its arrays. Its table is its ``columns()`` there.

    Attributes:
        noise: [B, h, w, C] float32 of unit variance.
        keys: keys of the step noise of each image, [B, 2] uint32, or [B] JAX keys of threefry.
        conditions: of the negative prompt and of the prompt; or of the prompt only, for a run without guidance.
        table: the sampler.
        guidance: the rule.
        guidance_settings: its numbers.
    """

    noise: Any
    keys: Any
    conditions: tuple[Conditions, ...]
    table: SamplerTable
    guidance: Guidance = PLAIN
    guidance_settings: Mapping[str, Any] = MappingProxyType({})


def _flat(start: Start) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    table = start.table.columns() if isinstance(start.table, SamplerTable) else start.table
    numbers = {
        name: tuple(np.ravel(value)) if np.ndim(value) else value for name, value in start.guidance_settings.items()
    }
    return (start.noise, start.keys, start.conditions, table), (start.guidance, tuple(numbers.items()))


def _from_flat(rule: tuple[Any, ...], arrays: Any) -> Start:
    (noise, keys, conditions, table), (guidance, settings) = arrays, rule
    return Start(noise, keys, conditions, table, guidance, dict(settings))


jax.tree_util.register_pytree_node(Start, _flat, _from_flat)


def _columns_alone(_: None, parts: Any) -> Any:
    return parts[0]


jax.tree_util.register_pytree_node(SamplerTable, lambda table: ((table.columns(),), None), _columns_alone)


class Evaluation(NamedTuple):
    """One row of a run, as ``record`` sees it.

    Attributes:
        row: columns of the row, numbers: among them ``timestep``, ``progress``, ``alpha`` and ``std``.
        state: state of the sampler and of the guidance before the row [B, K + n, h, w, C]; slot 0 is x.
        denoised: D, after guidance [B, h, w, C].
        sample: x after the row [B, h, w, C].
        log_prob: [B] float32, natural logarithm of the density of ``sample`` after ``state``, summed over all numbers
            of an image; 0 in rows without noise. Its gradient is that of the mean: the sample is a constant.
        kept: what code in the network gave to ``canvax.kernels.attention.keep``, by name. With guidance it has two
            samples for each image, neighbours: the negative prompt's, then the prompt's.
    """

    row: Columns
    state: Array
    denoised: Array
    sample: Array
    log_prob: Array
    kept: Mapping[str, Any]

    @property
    def x(self) -> Array:
        """Noisy latents before the row [B, h, w, C]."""
        return self.state[:, 0]

    @property
    def transition(self) -> tuple[Array, Array]:
        """The state before the row, and x after it, for ``rollout(along=...)``."""
        return self.state, self.sample


class Rollout(NamedTuple):
    """The result of ``rollout``.

    Attributes:
        latents: [B, h, w, C] float32.
        record: what ``record`` returned, stacked: each array [R, ...]; None without it.
    """

    latents: Array
    record: Any


class HasNetworks(Protocol):
    """A pipeline."""

    @property
    def model(self) -> Any: ...


def rollout(
    networks: Networks | HasNetworks,
    params: Mapping[str, Params],
    noise: Array,
    keys: Array,
    conditions: Conditions | Sequence[Conditions],
    table: SamplerTable | Columns,
    guidance: Guidance = PLAIN,
    guidance_settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    record: Callable[[Evaluation], Any] | None = None,
    along: tuple[Array, Array] | None = None,
    remat: bool = False,
) -> Rollout:
    """Run a sampler, as a pure function of its arrays: for ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

    ``canvax.rollout(pipe, pipe.params, *pipe.start("a red apple", seed=1)).latents`` are those of
    ``pipe("a red apple", seed=1)``. Masks, control images, image prompts, reference images and adapters beside the
    weights are not supported.

    Args:
        networks: a pipeline, or ``pipe.model.networks``.
        params: ``pipe.params``, or a dict with other parameters for the denoiser.
        noise: initial noise [B, h, w, C] of unit variance.
        keys: keys for the noise of the steps, one for each image: [B, 2] uint32, or [B] JAX keys.
        conditions: results of ``pipe.encode``, with arrays [B, ...] or [1, ...]: those of the prompt, or a pair of
            those of the negative prompt and of the prompt. A pair is guided at the scales of the table.
        table: the sampler, or its ``columns()``, which it becomes as an argument of a jitted function: samplers with as
            many rows share a program.
        guidance: a rule of guidance, or as ``guidance_method`` of a call; it has no effect without a pair of
            conditions.
        guidance_settings: the numbers of the rule.
        record: called with each ``Evaluation`` while the loop is traced; what it returns is stacked.
        along: ``transition`` of a run, as recorded: each row begins from its recorded state, and ``log_prob`` is that
            of the recorded sample. Rows are independent then, so these may be a part of all rows if the columns of the
            table are the same part.
        remat: recompute each row in the backward pass instead of storing it.

    Raises:
        InputError: the parameters, the noise, the keys, the conditions or the table have a wrong shape or type.
    """
    net: Networks = networks if isinstance(networks, Networks) else networks.model.networks
    denoiser, batch = net.denoiser, np.shape(noise)[0] if np.ndim(noise) == 4 else 0
    if not isinstance(params, Mapping) or denoiser.component not in params:
        cure = f"give pipe.params, or a dict with {denoiser.component!r} in it"
        raise InputError("params", f"has no parameters of {denoiser.component!r}", cure=cure)
    packing, weights = denoiser.facts.packing, params[denoiser.component]
    if not batch or np.shape(noise)[-1] != net.vae.latent_channels:
        raise InputError("noise", f"has shape {np.shape(noise)}, not [B, h, w, {net.vae.latent_channels}]")
    prompts = (conditions,) if isinstance(conditions, Mapping) else tuple(conditions)
    if not all(isinstance(prompt, Mapping) for prompt in prompts):
        problem = "is neither a result of pipe.encode nor a pair of them"
        raise InputError("conditions", problem, cure="the order is noise, keys, conditions, table", value=conditions)
    rule = rule_of(read_guidance_method("guidance_method", guidance))
    if len(prompts) not in (1, wanted := 1 + rule.samples.count(PROMPT)):
        name = type(getattr(rule, "rule", rule)).__name__
        raise InputError("conditions", f"has {len(prompts)} entries; {name} reads {wanted}")
    rule = rule if len(prompts) > 1 else Alone()
    net.check_roles(rule.samples)
    height, width = noise.shape[1:3]
    sizes = packing.sizes(batch, width)
    texts = [{**{name: _each(name, array, batch) for name, array in prompt.items()}, **sizes} for prompt in prompts]
    samples = conditions_of(rule, texts, batch)
    packed = packing.pack(jnp.asarray(noise, jnp.float32))
    read = net.conditions(packed.shape).keys() - {"guidance"}  # the network does without
    if missing := sorted({name for sample in samples for name in read - sample.keys()}):
        cure = "give what pipe.encode returns, or the conditions of pipe.start"
        raise InputError("conditions", f"have no {', '.join(map(repr, missing))}", cure=cure)
    denoiser = net.denoiser_of(rule.samples)
    prepared = denoiser.prepare(weights, neighbours(samples), (len(samples) * batch, *packed.shape[1:]))
    words = _words(keys, batch)
    if not isinstance(table, SamplerTable | Mapping):
        raise InputError("table", "is not a sampler table", cure="use pipe.start or build_table", value=table)
    columns = dict(table.columns() if isinstance(table, SamplerTable) else table)
    scale = columns.pop("init_scale")
    columns |= filled_columns(rule, guidance_settings, len(columns["row"]))
    if record is not None:
        check_function("record", record, 1, "(evaluation)")

    def evaluate(state: Array, inputs: tuple[Columns, Any]) -> tuple[Array, Any]:
        row, recorded = inputs
        state = state if recorded is None else recorded[0]
        each = {name: jnp.broadcast_to(number, (batch, *np.shape(number))) for name, number in row.items()}
        shared = {"noisy": (row["M"][:, NOISE] != 0).any()}
        with nullcontext({}) if record is None else keeping() as seen:
            denoised, kept, _ = evaluated(
                weights, state, None, each, shared, denoiser=denoiser, guidance=rule, prepared=prepared
            )
        fresh = row_noise(words, each["row"], shared["noisy"], denoised)
        after = next_state(each["M"], state, denoised, fresh, kept)
        if record is None:
            return after, None
        mean = next_state(each["M"], state, denoised, jnp.zeros_like(denoised), kept)[:, 0]
        drawn = after[:, 0] if recorded is None else recorded[1]
        log_prob = _log_prob(jax.lax.stop_gradient(drawn), mean, row["M"][0, NOISE])
        before, image, sample = (packing.unpack(array, height, width) for array in (state, denoised, drawn))
        return after, record(Evaluation(row, before, image, sample, log_prob, seen))

    slots = SLOTS + memory_of(rule)
    first = jnp.zeros((batch, slots, *packed.shape[1:]), jnp.float32).at[:, 0].set(scale * packed)
    if along is not None:
        along = (packing.pack(along[0]), packing.pack(along[1]))
        if along[0].shape[1:] != first.shape or len(along[0]) != len(columns["row"]):
            problem = f"has states of shape {along[0].shape}, not {(len(columns['row']), *first.shape)}"
            raise InputError("along", problem, cure="record evaluation.transition")
    last, seen = jax.lax.scan(jax.checkpoint(evaluate) if remat else evaluate, first, (columns, along))
    return Rollout(packing.unpack(last[:, 0] if along is None else along[1][-1], height, width), seen)


def _log_prob(sample: Array, mean: Array, deviation: Array) -> Array:
    """Return the logarithm of the normal density of each image, summed [B]; 0 where the deviation is 0."""
    noisy = deviation != 0
    scale = jnp.where(noisy, jnp.abs(deviation), 1.0)
    each = -0.5 * ((sample - mean) / scale) ** 2 - jnp.log(scale) - 0.5 * math.log(2 * math.pi)
    return jnp.where(noisy, each.sum(axis=tuple(range(1, each.ndim))), 0.0)


def _each(name: str, array: Any, batch: int) -> Array:
    """Return a condition [B, ...] of one that may be [1, ...]."""
    array = jnp.asarray(array)
    if array.ndim == 0 or len(array) not in (1, batch):
        raise InputError("conditions", f"has {name!r} of shape {array.shape}", cure=f"give one, or {batch}")
    return jnp.broadcast_to(array, (batch, *array.shape[1:]))


def _words(keys: Any, batch: int) -> Array:
    """Return the words of keys [B, 2]."""
    cure = "use jax.random.split(jax.random.key(0), B)"
    try:
        words = jnp.asarray(keys)
    except (TypeError, ValueError):
        raise InputError("keys", "are not an array", cure=cure, value=keys) from None
    words = jax.random.key_data(words) if jnp.issubdtype(words.dtype, jax.dtypes.prng_key) else words
    if words.shape != (batch, 2) or words.dtype != jnp.uint32:
        raise InputError("keys", f"are {words.dtype} {words.shape}, not uint32 [{batch}, 2]", cure=cure)
    return words
