"""The one loop that runs every sampler.

A sampler is a table of numbers (``samplers/table.py``); this loop reads one row for each evaluation of the network:

    output   = network(c_in * x, timestep)              guided
    D        = p * x + q * output                       the denoised image
    state'   = M @ [state; D; noise]                    slot 0 of the state is x

Everything a user changes between images is in the rows, the keys and the conditions, so nothing here compiles again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from canvax.guidance import Method, compose, guide, projected, zero_star
from canvax.models.controlled import ControlledDenoiser, of_halves
from canvax.models.deep_features import Recall
from canvax.models.denoiser import Denoiser
from canvax.models.text import Conditions
from canvax.params import Params
from canvax.samplers.table import DENOISED, EMPTY, NOISE, SLOTS
from canvax.types import Array

WINDOW = 64
"""Rows given to the program in one call. Longer tables are run window by window, so their length decides nothing."""

Rows = Mapping[str, Any]
"""Columns of a window of the table, each [B, WINDOW, ...], as ``SamplerTable.window`` makes them; images of one batch
may be at different rows of different tables."""


IDLE_ROWS = EMPTY.window(0, WINDOW)
"""A window of rows that change nothing, for a slot without an image: each column [WINDOW, ...]."""


class DeepFeatures(NamedTuple):
    """What a run needs that does not compute the deep features of the network in each row.

    Attributes:
        features: those of the last two rows that did, newest first [B, 2, h', w', C'], [2 B, ...] with guidance.
        full: [WINDOW] bool, which rows compute them; like ``noisy`` the same for all images.
        weights: [WINDOW, 2] float32, what each row makes of the two; (1, 0) where ``full``.
    """

    features: Any
    full: Any
    weights: Any


class Known(NamedTuple):
    """What is to stay of an image where another part of it is generated.

    Attributes:
        mask: [B, h, w, 1] float32, 1 where the image is generated, 0 where it stays.
        latents: those of the image [B, h, w, C] float32.
        graded: [B] bool, whether a grey mask says from which part of the run on a place is generated (Levin and Fried
            2023, "Differential Diffusion"): white from the beginning, dark grey near the end. Else it mixes.
    """

    mask: Any
    latents: Any
    graded: Any


class Composed(NamedTuple):
    """Further prompts of each image: the guided output is u + s * sum_k w_k (c_k - u) (Liu et al. 2022).

    Attributes:
        others: conditions of the second prompt, of the third, ...
        weights: w of all prompts, the first one's too [B, K] float32.
    """

    others: tuple[Conditions, ...]
    weights: Any


class Tuning(NamedTuple):
    """Numbers of other kinds of guidance, one row for each image; None where that kind is not used.

    Attributes:
        method: of ``canvax.guidance.SETTINGS``, in their order [B, 2] float32.
        pag: scale, and how it falls with the timestep [B, 2] float32: perturbed-attention guidance.
    """

    method: Any = None
    pag: Any = None


class StepInputs(NamedTuple):
    """Everything of a call of ``denoise`` but the parameters.

    Attributes:
        state: [B, K, h, w, C] float32; slot 0 is x.
        conditions: what each image is conditioned on, above all the features of its prompt.
        negative: the same of the negative prompts, or None: no guidance, half the work.
        rows: the window.
        keys: threefry key words of each image [B, 2] uint32; step noise depends on the key and the row alone.
        noisy: [WINDOW] bool, whether a row uses noise for any image; a host-side fact, so that no device has to ask
            the others.
        count: rows to run, an int32 scalar.
        deep: deep features, and which rows reuse them; None: every row computes all.
        known: what stays of images; None: nothing.
        composed: further prompts, only with ``negative``; None: there are none.
        tuning: numbers of other kinds of guidance.
        needed: [WINDOW, N] bool, which networks that read control images a row needs for any image, a host-side fact
            like ``noisy``. Then ``rows`` has a column "control" [B, WINDOW, N, 2, L]: how strong each of the network's
            layers is for the negative prompt and for the others. None without control images.
    """

    state: Any
    conditions: Conditions
    negative: Conditions | None
    rows: Rows
    keys: Any
    noisy: Any
    count: Any
    deep: DeepFeatures | None = None
    known: Known | None = None
    composed: Composed | None = None
    tuning: Tuning = Tuning()
    needed: Any = None


class InFlight(NamedTuple):
    """The part of ``StepInputs`` that belongs to the images of a batch and lies on the devices between calls."""

    state: Any
    conditions: Conditions
    negative: Conditions | None
    keys: Any
    known: Known | None = None
    composed: Composed | None = None
    tuning: Tuning = Tuning()


def denoise(
    params: Params,
    inputs: StepInputs,
    *,
    denoiser: Denoiser | ControlledDenoiser,
    deep_layers: int = 0,
    method: Method = "cfg",
) -> tuple[Array, Array, Array | None]:
    """Run the first ``count`` rows of a window.

    Args:
        params: the denoiser's parameters; their dtype is the dtype computed in. Of a ``ControlledDenoiser`` those of
            each of its networks, by name.
        inputs: the batch.
        denoiser: the network.
        deep_layers: with ``inputs.deep``, what is computed in any case: ``layers`` of
            ``canvax.models.deep_features.unet_reusing``.
        method: how the outputs for the prompt and for the negative prompt become one.

    Returns:
        The state after the last row run, D at that row [B, h, w, C] float32, and ``deep.features`` as they are then.
    """
    rows, deep = inputs.rows, inputs.deep
    conditions, composed = inputs.conditions, inputs.composed
    if inputs.negative is not None:
        several = [inputs.negative, conditions, *(composed.others if composed else ())]
    else:
        several = [conditions]
    tuning = inputs.tuning
    if tuning.pag is not None:  # the first prompt once more, perturbed
        several.append(inputs.conditions)
    if (times := len(several)) > 1:
        conditions = jax.tree.map(_side_by_side, *several)
    changed: dict[str, Any] = {}  # in the network itself
    if tuning.pag is not None:
        changed["perturbed"] = times
    prepared = denoiser.prepare(params, conditions)

    def network(x: Array, row: Rows, i: Array, features: Array | None) -> tuple[Array, Array | None]:
        """Outputs of each image [B, n, h, w, C]: for the negative prompt, the prompts, and the perturbed one."""
        x, timestep = _per_image(row["c_in"]) * x, row["timestep"]
        if times > 1:
            x, timestep = jnp.repeat(x, times, axis=0), jnp.repeat(timestep, times)
        if isinstance(denoiser, ControlledDenoiser):
            scales = of_halves(row["control"], times, guided=inputs.negative is not None)
            control = scales, inputs.needed[i]
            output = denoiser.apply(params, x, timestep, prepared, control=control, **changed)
        elif deep is None or features is None:
            output = denoiser.apply(params, x, timestep, prepared, **changed)
        else:
            recall = _recall(features, deep.full[i], deep.weights[i])
            output, features = denoiser.apply_reusing(
                params, x, timestep, prepared, layers=deep_layers, recall=recall, **changed
            )
        return output.astype(jnp.float32).reshape(-1, times, *output.shape[1:]), features

    def step(i: Array, carry: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array | None]:
        state, _, features = carry
        row = {name: jax.lax.dynamic_index_in_dim(column, i, axis=1, keepdims=False) for name, column in rows.items()}
        x = state[:, 0]
        outputs, features = network(x, row, i, features)
        denoised = _guided(x, outputs, row, inputs, method)
        if inputs.known is not None:
            denoised = _keep(denoised, inputs.known, row["progress"])
        noise = jax.lax.cond(
            inputs.noisy[i], lambda: step_noise(inputs.keys, row["row"], x.shape[1:]), lambda: jnp.zeros_like(x)
        )
        state = _combine(row["M"], state, denoised, noise)
        return state, denoised, features

    with jax.named_scope("denoise"):
        first = (inputs.state, jnp.zeros_like(inputs.state[:, 0]), deep and deep.features)
        return jax.lax.fori_loop(0, inputs.count, step, first)


def _guided(x: Array, outputs: Array, row: Rows, inputs: StepInputs, method: Method) -> Array:
    """D of outputs [B, n, h, w, C]: for the negative prompt, the prompts and the perturbed one, as far as there are."""
    guided, tuning = inputs.negative is not None, inputs.tuning

    def at(output: Array) -> Array:
        return _per_image(row["p"]) * x + _per_image(row["q"]) * output

    further: Array | float = 0.0
    if tuning.pag is not None:
        outputs, last = outputs[:, :-1], outputs[:, -1]
        scale = jnp.maximum(tuning.pag[:, 0] - tuning.pag[:, 1] * (1000 - row["timestep"]), 0)
        further = _per_image(scale) * (outputs[:, int(guided)] - last)
    if not guided:
        return at(outputs[:, 0] + further)
    negative, conditional = outputs[:, 0], outputs[:, 1]
    if inputs.composed:
        conditional = compose(negative, outputs[:, 1:], inputs.composed.weights)
    scale = row["guidance"]
    if method == "cfg":
        return at(guide(negative, conditional, scale, row["rescale"], further))
    numbers = tuning.method[:, 0], tuning.method[:, 1]
    if method == "cfg_zero":
        return at(zero_star(negative, conditional, scale, row["step"], numbers[0]) + further)
    return projected(at(negative), at(conditional), scale, *numbers) + _per_image(row["q"]) * further


def _recall(features: Array, full: Array, weights: Array) -> Recall:
    """The deep features of a row: computed where it is ``full``, else what ``weights`` make of the last two."""

    def recall(compute: Callable[[], Array]) -> tuple[Array, Array]:
        def fresh() -> Array:
            return jnp.stack([compute(), features[:, 0]], axis=1)

        last = jax.lax.cond(full, fresh, lambda: features)
        deep = weights[0] * last[:, 0].astype(jnp.float32) + weights[1] * last[:, 1].astype(jnp.float32)
        return deep.astype(features.dtype), last

    return recall


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


def _side_by_side(*halves: Array) -> Array:
    """[B, ...] n times -> [n B, ...]. Those of an image are neighbours: a batch over devices stays where it is."""
    return jnp.stack(halves, axis=1).reshape(-1, *halves[0].shape[1:])


def _per_image(column: Array) -> Array:
    return column[:, None, None, None]


def _combine(m: Array, state: Array, denoised: Array, noise: Array) -> Array:
    """``M @ [state; D; noise]`` as multiply-adds in float32: a matmul might run in lower precision."""
    m = m[..., None, None, None]
    total = m[:, :, DENOISED] * denoised[:, None] + m[:, :, NOISE] * noise[:, None]
    for slot in range(SLOTS):
        total = total + m[:, :, slot] * state[:, None, slot]
    return total


def _keep(denoised: Array, known: Known, progress: Array) -> Array:
    """D with the known latents where they stay. As part of D it suits every table, and is D itself where all is new."""
    begun = (known.mask >= 1 - _per_image(progress)).astype(jnp.float32)
    mask = jnp.where(_per_image(known.graded), begun, known.mask)
    return denoised + (1 - mask) * (known.latents - denoised)
