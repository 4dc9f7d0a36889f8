"""The loop that runs every sampler.

A sampler is a table of numbers (``samplers/table.py``); this loop reads one row for each evaluation of the network:

    output   = network(c_in * x, row)                   guided
    D        = p * x + q * output                       the denoised image
    state'   = M @ [state; D; noise]                    slot 0 of the state is x

All settings that differ between images are in the rows, the keys and the conditions, so changing them never recompiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.guidance import PLAIN, Guidance, conditions_of, guided, per_image
from canvax.models.beside import ADAPTERS, Places, with_adapters
from canvax.models.denoiser import Conditions, Denoiser, applied
from canvax.params import Params
from canvax.samplers.table import DENOISED, EMPTY, NOISE, SLOTS
from canvax.types import Array

WINDOW = 64
"""Rows per call of the program. Longer tables run window by window, so their length does not affect programs."""

Rows = Mapping[str, Any]
"""Columns of a window, each [B, WINDOW, ...]: those of ``SamplerTable.window``, and those that the denoiser and the
guidance declare. Images of one batch may be at different rows of different tables.
"""

IDLE_ROWS = EMPTY.window(0, WINDOW)
"""A window of rows without an effect, for an unused slot: each column [WINDOW, ...]."""


class Known(NamedTuple):
    """The part of an image to keep while another part is generated.

    Attributes:
        mask: [B, h, w, C] float32, 1 where the image is generated, 0 where it stays.
        latents: latents of the image [B, h, w, C] float32.
        graded: [B] bool, True if a grey mask gives the start of generation at each position (Levin and Fried 2023,
            "Differential Diffusion"): white from the beginning, dark grey near the end. False if it blends.
    """

    mask: Any
    latents: Any
    graded: Any


class InFlight(NamedTuple):
    """The state of unfinished images: all arrays that stay on the devices between calls.

    Latents [B, h, w, C] have the layout of the denoiser's ``canvax.models.denoiser.Packing``.

    Attributes:
        state: [B, K + n, h, w, C] float32; slot 0 is x, and the last n are the memory of the rule of guidance.
        prompts: conditions of each evaluation: those of the prompt, or with guidance those of the negative prompt, the
            prompt and further prompts that are added.
        keys: threefry key words of each image [B, 2] uint32; step noise depends only on the key and the row.
        known: the parts of images to keep; None for none.
    """

    state: Any
    prompts: tuple[Conditions, ...]
    keys: Any
    known: Known | None = None


class StepInputs(NamedTuple):
    """Inputs of ``denoise`` without the parameters.

    Attributes:
        flight: the images.
        rows: the window of rows.
        shared: columns that are the same for all images [WINDOW, ...]: ``noisy``, True if a row uses noise for any
            image, and those that the denoiser declares. The host computes them, so devices need no communication.
        count: number of rows to run, an int32 scalar.
        memory: the denoiser's memory of the previous rows.
    """

    flight: InFlight
    rows: Rows
    shared: Rows
    count: Any
    memory: Any = None


class StepOutputs(NamedTuple):
    """Outputs of ``denoise``.

    Attributes:
        state: state after the last row.
        denoised: D at that row [B, h, w, C] float32.
        memory: the denoiser's memory.
        x: slot 0 of the state [B, h, w, C].
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
        params: the denoiser's parameters; their dtype is the dtype of the computation.
        inputs: the batch.
        denoiser: the network.
        guidance: combines its outputs for the prompts of an image.
        places: adapter slots beside the weights of the denoiser; each image has a share of each slot as a condition.
    """
    flight = inputs.flight
    batch, _, *shape = flight.state.shape
    samples = conditions_of(guidance, flight.prompts, batch)
    conditions = neighbours(samples)
    if places is not None:
        params = with_adapters(params, conditions.pop(ADAPTERS), denoiser.spec, places, denoiser.component)
    prepared = denoiser.prepare(params, conditions, (len(samples) * batch, *shape))

    def step(i: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        state, _, memory = carry
        row = {name: _at(column, i, axis=1) for name, column in inputs.rows.items()}
        shared = {name: _at(column, i, axis=0) for name, column in inputs.shared.items()}
        denoised, kept, memory = evaluated(
            params, state, memory, row, shared, denoiser=denoiser, guidance=guidance, prepared=prepared
        )
        if flight.known is not None:
            denoised = _blend_known(denoised, flight.known, row["progress"])
        noise = row_noise(flight.keys, row["row"], shared["noisy"], denoised)
        return next_state(row["M"], state, denoised, noise, kept), denoised, memory

    with jax.named_scope("denoise"):
        first = flight.state, jnp.zeros_like(flight.state[:, 0]), inputs.memory
        state, denoised, memory = jax.lax.fori_loop(0, inputs.count, step, first)
        return StepOutputs(state, denoised, memory, state[:, 0])


def evaluated(
    params: Params,
    state: Array,
    memory: Any,
    row: Rows,
    shared: Rows,
    *,
    denoiser: Denoiser,
    guidance: Guidance,
    prepared: Any,
) -> tuple[Array, Array, Any]:
    """Evaluate the network for all samples of the images in one row.

    Args:
        params: the denoiser's parameters.
        state: as in ``InFlight``.
        memory: the denoiser's memory.
        row: columns of the row of each image, [B, ...].
        shared: columns that are the same for all images.
        denoiser: the network.
        guidance: combines its outputs.
        prepared: the return value of ``Denoiser.prepare`` for the samples in the order of ``neighbours``.

    Returns:
        D [B, h, w, C] float32, the new memory of the guidance [B, n, h, w, C], and that of the denoiser.
    """
    count, x = len(guidance.samples), state[:, 0]
    seen, rows = jax.tree.map(lambda array: jnp.repeat(array, count, axis=0), (per_image(row["c_in"]) * x, dict(row)))
    output, memory = applied(denoiser, params, seen, {**rows, **shared}, prepared, memory)
    outputs = output.astype(jnp.float32).reshape(len(x), count, *x.shape[1:])
    return *guided(guidance, x, outputs, row, state[:, SLOTS:]), memory


def row_noise(keys: Array, rows: Array, noisy: Array, latents: Array) -> Array:
    """Return ``step_noise`` of the shape of latents, or zeros if no image is ``noisy`` in this row."""
    shape = latents.shape[1:]
    return jax.lax.cond(noisy, lambda: step_noise(keys, rows, shape), lambda: jnp.zeros_like(latents))


def step_noise(keys: Array, rows: Array, shape: tuple[int, ...]) -> Array:
    """Return the noise of one row for each image, standard normal [B, *shape] float32.

    It depends only on the image's key and the index of the row, not on the batch or the devices.
    """

    def of_image(key: Array) -> Array:
        # Flat: for a last axis as short as that of latents, XLA's CPU compiler generates 256 KB of code.
        return jax.random.normal(key, (math.prod(shape),), jnp.float32).reshape(shape)

    with jax.threefry_partitionable(True):
        row_keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), rows)
        return jax.vmap(of_image)(row_keys)


def neighbours(samples: Sequence[Any]) -> Any:
    """Interleave n trees of arrays [B, ...] to one of [n B, ...].

    The samples of an image are neighbours, so that splitting the batch over devices moves no data. NumPy's arrays stay
    so: a denoiser reads the roles of the samples while it is traced.
    """

    def interleaved(*arrays: Any) -> Any:
        stack = np.stack if all(isinstance(array, np.ndarray) for array in arrays) else jnp.stack
        return stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

    return jax.tree.map(interleaved, *samples)


def _at(column: Array, i: Array, *, axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(column, i, axis=axis, keepdims=False)


def next_state(m: Array, state: Array, denoised: Array, noise: Array, kept: Array) -> Array:
    """Compute ``M @ [state; D; noise]`` as multiply-adds in float32: a matmul might run in lower precision.

    ``kept`` [B, n, h, w, C] is the memory of the guidance, which follows the slots of the sampler.
    """
    m = m[..., None, None, None]
    total = m[:, :, DENOISED] * denoised[:, None] + m[:, :, NOISE] * noise[:, None]
    for slot in range(SLOTS):
        total = total + m[:, :, slot] * state[:, None, slot]
    return jnp.concatenate([total, kept], axis=1) if kept.shape[1] else total


def _blend_known(denoised: Array, known: Known, progress: Array) -> Array:
    """Return D with the known latents pasted where they are kept. As part of D this works for every table."""
    active = (known.mask >= 1 - per_image(progress)).astype(jnp.float32)
    mask = jnp.where(per_image(known.graded), active, known.mask)
    return denoised + (1 - mask) * (known.latents - denoised)
