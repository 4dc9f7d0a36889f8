"""The one loop that runs every sampler.

A sampler is a table of numbers (``samplers/table.py``); this loop reads one row for each evaluation of the network:

    output   = network(c_in * x, row)                   guided
    D        = p * x + q * output                       the denoised image
    state'   = M @ [state; D; noise]                    slot 0 of the state is x

Everything a user changes between images is in the rows, the keys and the conditions, so nothing here compiles again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from canvax.guidance import PLAIN, Guidance, conditions_of, guided, per_image
from canvax.models.beside import ADAPTERS, Places, with_adapters
from canvax.models.denoiser import Conditions, Denoiser
from canvax.params import Params
from canvax.samplers.table import DENOISED, EMPTY, NOISE, SLOTS
from canvax.types import Array

WINDOW = 64
"""Rows given to the program in one call. Longer tables are run window by window, so their length decides nothing."""

Rows = Mapping[str, Any]
"""Columns of a window, each [B, WINDOW, ...]: those that ``SamplerTable.window`` makes, and those that the denoiser and
the guidance declare. Images of one batch may be at different rows of different tables."""

IDLE_ROWS = EMPTY.window(0, WINDOW)
"""A window of rows that change nothing, for a slot without an image: each column [WINDOW, ...]."""


class Known(NamedTuple):
    """What is to stay of an image where another part of it is generated.

    Attributes:
        mask: [B, h, w, C] float32, 1 where the image is generated, 0 where it stays.
        latents: those of the image [B, h, w, C] float32.
        graded: [B] bool, whether a grey mask says from which part of the run on a place is generated (Levin and Fried
            2023, "Differential Diffusion"): white from the beginning, dark grey near the end. Else it mixes.
    """

    mask: Any
    latents: Any
    graded: Any


class InFlight(NamedTuple):
    """The state of images on their way: all that lies on the devices between calls.

    Latents [B, h, w, C] lie here as ``canvax.models.denoiser.Packing`` of the denoiser says.

    Attributes:
        state: [B, K, h, w, C] float32; slot 0 is x.
        prompts: conditions that the denoiser is evaluated for: of the prompt alone, or with guidance of the negative
            prompt, of the prompt, and of further prompts that are added up.
        keys: threefry key words of each image [B, 2] uint32; step noise depends on the key and the row alone.
        known: what stays of images; None: nothing.
    """

    state: Any
    prompts: tuple[Conditions, ...]
    keys: Any
    known: Known | None = None


class StepInputs(NamedTuple):
    """Everything of a call of ``denoise`` but the parameters.

    Attributes:
        flight: the images.
        rows: the window.
        shared: columns that are the same for all images [WINDOW, ...]. ``noisy``, whether a row uses noise for any
            image, is a fact of the host, so that no device has to ask the others; the denoiser may declare others.
        count: rows to run, an int32 scalar.
        memory: what the denoiser remembers of the rows before.
    """

    flight: InFlight
    rows: Rows
    shared: Rows
    count: Any
    memory: Any = None


class StepOutputs(NamedTuple):
    """What ``denoise`` returns.

    Attributes:
        state: after the last row run.
        denoised: D at that row [B, h, w, C] float32.
        memory: of the denoiser.
        x: slot 0 of the state [B, h, w, C], so that nobody has to cut it out.
    """

    state: Array
    denoised: Array
    memory: Any
    x: Array


def denoise(
    params: Params,
    inputs: StepInputs,
    *,
    denoiser: Denoiser,
    guidance: Guidance = PLAIN,
    places: Places | None = None,
) -> StepOutputs:
    """Run the first ``count`` rows of a window.

    Args:
        params: the denoiser's parameters; their dtype is the dtype computed in.
        inputs: the batch.
        denoiser: the network.
        guidance: how its outputs for the prompts of an image become one.
        places: of adapters beside the denoiser's weights, of which each image has its part as a condition.
    """
    flight = inputs.flight
    batch, _, *shape = flight.state.shape
    samples = conditions_of(guidance, flight.prompts, batch)
    count = len(samples)
    conditions = jax.tree.map(_neighbours, *samples)
    if places is not None:
        params = with_adapters(params, conditions.pop(ADAPTERS), denoiser.spec, places, denoiser.component)
    prepared = denoiser.prepare(params, conditions, (count * batch, *shape))

    def step(i: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        state, _, memory = carry
        row = {name: _at(column, i, axis=1) for name, column in inputs.rows.items()}
        shared = {name: _at(column, i, axis=0) for name, column in inputs.shared.items()}
        x = state[:, 0]
        seen, rows = jax.tree.map(lambda array: jnp.repeat(array, count, axis=0), (per_image(row["c_in"]) * x, row))
        output, memory = denoiser.apply(params, seen, {**rows, **shared}, prepared, memory)
        outputs = output.astype(jnp.float32).reshape(batch, count, *shape)
        denoised = guided(guidance, x, outputs, row)
        if flight.known is not None:
            denoised = _keep(denoised, flight.known, row["progress"])
        noise = jax.lax.cond(
            shared["noisy"], lambda: step_noise(flight.keys, row["row"], tuple(shape)), lambda: jnp.zeros_like(x)
        )
        return _combine(row["M"], state, denoised, noise), denoised, memory

    with jax.named_scope("denoise"):
        first = flight.state, jnp.zeros_like(flight.state[:, 0]), inputs.memory
        state, denoised, memory = jax.lax.fori_loop(0, inputs.count, step, first)
        return StepOutputs(state, denoised, memory, state[:, 0])


def step_noise(keys: Array, rows: Array, shape: tuple[int, ...]) -> Array:
    """Noise of one row for each image, standard normal [B, *shape] float32.

    It depends on the image's key and the index of the row only, never on the batch or the devices.
    """

    def one(key: Array) -> Array:
        # Flat: of a last axis as short as the latents' XLA's CPU compiler makes a program of a quarter of a megabyte.
        return jax.random.normal(key, (math.prod(shape),), jnp.float32).reshape(shape)

    with jax.threefry_partitionable(True):
        row_keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), rows)
        return jax.vmap(one)(row_keys)


def _neighbours(*arrays: Array) -> Array:
    """[B, ...] n times -> [n B, ...]. Samples of an image are neighbours: a batch over devices stays where it is."""
    return jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def _at(column: Array, i: Array, *, axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(column, i, axis=axis, keepdims=False)


def _combine(m: Array, state: Array, denoised: Array, noise: Array) -> Array:
    """``M @ [state; D; noise]`` as multiply-adds in float32: a matmul might run in lower precision."""
    m = m[..., None, None, None]
    total = m[:, :, DENOISED] * denoised[:, None] + m[:, :, NOISE] * noise[:, None]
    for slot in range(SLOTS):
        total = total + m[:, :, slot] * state[:, None, slot]
    return total


def _keep(denoised: Array, known: Known, progress: Array) -> Array:
    """D with the known latents where they stay. As part of D it suits every table, and is D itself where all is new."""
    begun = (known.mask >= 1 - per_image(progress)).astype(jnp.float32)
    mask = jnp.where(per_image(known.graded), begun, known.mask)
    return denoised + (1 - mask) * (known.latents - denoised)
