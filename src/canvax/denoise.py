"""The one loop that runs every sampler.

A sampler is a table of numbers (``samplers/table.py``); this loop reads one row for each evaluation of the network:

    output   = network(c_in * x, timestep)              guided
    D        = p * x + q * output                       the denoised image
    state'   = M @ [state; D; noise]                    slot 0 of the state is x

Everything a user changes between pictures is in the rows, the keys and the text, so nothing here compiles again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.guidance import guide
from canvax.models.configs import UNetConfig
from canvax.models.merging import Merging
from canvax.models.text import Conditions
from canvax.models.unet import Recall, deep_shape, text_keys, unet, unet_reusing
from canvax.params import Params
from canvax.samplers.table import DENOISED, NOISE, SLOTS, Clip, SamplerTable
from canvax.types import Array

WINDOW = 64
"""Rows given to the program in one call. Longer tables are run window by window, so their length decides nothing."""

Rows = dict[str, Any]
"""Columns of a window of the table, each [B, WINDOW, ...], as ``SamplerTable.window`` makes them; images of one batch
may be at different rows of different tables."""


class Reuse(NamedTuple):
    """What a run needs that does not compute the deep features of the UNet in each row.

    Attributes:
        features: those of the last two rows that did, newest first [B, 2, h', w', C'], [2 B, ...] with guidance.
        full: [WINDOW] bool, which rows compute them; like ``noisy`` the same for all images.
        weights: [WINDOW, 2] float32, what each row makes of the two; (1, 0) where ``full``.
    """

    features: Any
    full: Any
    weights: Any


def denoise(
    params: Params,
    state: Array,
    conditions: Conditions,
    negative: Conditions | None,
    rows: Rows,
    keys: Array,
    noisy: Array,
    count: Array,
    reuse: Reuse | None = None,
    *,
    cfg: UNetConfig,
    clip: Clip | None = None,
    layers: int = 0,
    merging: float = 0.0,
) -> tuple[Array, Array, Array | None]:
    """Run the first ``count`` rows of a window.

    Args:
        params: the UNet's parameters; their dtype is the dtype computed in.
        state: [B, K, h, w, C] float32; slot 0 is x.
        conditions: what the UNet is told about each image, above all the features of its prompt.
        negative: the same of the negative prompts, or None: no guidance, half the work.
        rows: the window.
        keys: threefry key words of each image [B, 2] uint32; step noise depends on the key and the row alone.
        noisy: [WINDOW] bool, whether a row uses noise for any image; a host-side fact, so that no device has to ask
            the others.
        count: rows to run, an int32 scalar.
        reuse: deep features, and which rows reuse them; None: every row computes all.
        cfg: the UNet's config.
        clip: limits on D, a static property of the few models that want them.
        layers: with ``reuse``, what is computed in any case; see :func:`canvax.models.unet.unet_reusing`.
        merging: the part of the tokens that is merged for self-attention; see :class:`canvax.models.merging.Merging`.

    Returns:
        The state after the last row run, D at that row [B, h, w, C] float32, and ``reuse.features`` as they are then.
    """
    dtype = params["conv_in"]["weight"].dtype
    told = conditions if negative is None else jax.tree.map(_side_by_side, negative, conditions)
    # In each step alike. Of the blocks, which are calls on the CPU, the compiler would not move it out of the loop.
    told = {**told, "text": text_keys(params, told["text"].astype(dtype), cfg)}

    def network(x: Array, row: Rows, i: Array, features: Array | None) -> tuple[Array, Array | None]:
        x, timestep = (_per_image(row["c_in"]) * x).astype(dtype), row["timestep"]
        more: dict[str, Any] = {**told}
        if negative is not None:
            x, timestep = jnp.repeat(x, 2, axis=0), jnp.repeat(timestep, 2)
        if merging:
            words = _merging_keys(keys, row["row"])
            more["merging"] = Merging(merging, words if negative is None else jnp.repeat(words, 2, axis=0))
        if reuse is None or features is None:
            output = unet(params, x, timestep, cfg=cfg, **more)
        else:
            recall = _recall(features, reuse.full[i], reuse.weights[i])
            output, features = unet_reusing(params, x, timestep, cfg=cfg, **more, layers=layers, recall=recall)
        output = output.astype(jnp.float32)
        if negative is None:
            return output, features
        output = output.reshape(-1, 2, *output.shape[1:])
        return guide(output[:, 0], output[:, 1], row["guidance"], row["rescale"]), features

    def step(i: Array, carry: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array | None]:
        state, _, features = carry
        row = {name: jax.lax.dynamic_index_in_dim(column, i, axis=1, keepdims=False) for name, column in rows.items()}
        x = state[:, 0]
        output, features = network(x, row, i, features)
        raw = _per_image(row["p"]) * x + _per_image(row["q"]) * output
        denoised = raw if clip is None else _clip(raw, clip)
        noise = jax.lax.cond(noisy[i], lambda: step_noise(keys, row["row"], x.shape[1:]), lambda: jnp.zeros_like(x))
        state = _combine(row["M"], state, denoised, noise)
        if clip is not None:
            state = state + row["raw"][:, :, None, None, None] * raw[:, None]
        return state, denoised, features

    with jax.named_scope("denoise"):
        first = (state, jnp.zeros_like(state[:, 0]), reuse and reuse.features)
        return jax.lax.fori_loop(0, count, step, first)


def _recall(features: Array, full: Array, weights: Array) -> Recall:
    """The deep features of a row: computed where it is ``full``, else what ``weights`` make of the last two."""

    def recall(compute: Callable[[], Array]) -> tuple[Array, Array]:
        def fresh() -> Array:
            return jnp.stack([compute(), features[:, 0]], axis=1)

        kept = jax.lax.cond(full, fresh, lambda: features)
        deep = weights[0] * kept[:, 0].astype(jnp.float32) + weights[1] * kept[:, 1].astype(jnp.float32)
        return deep.astype(features.dtype), kept

    return recall


def step_noise(keys: Array, rows: Array, shape: tuple[int, ...]) -> Array:
    """Noise of one row for each image, standard normal [B, *shape] float32.

    It depends on the image's key and the index of the row only, never on the batch or the devices.
    """

    def one(key: Array) -> Array:
        # Flat: of a last axis as short as the latents' XLA's CPU compiler makes a program of a quarter of a megabyte.
        return jax.random.normal(key, (math.prod(shape),), jnp.float32).reshape(shape)

    with jax.threefry_partitionable(True):
        return jax.vmap(one)(_row_keys(keys, rows))


def _row_keys(keys: Array, rows: Array) -> Array:
    """A key for each image [B], of its own key words [B, 2] and the index of its row [B]."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), rows)


def _merging_keys(keys: Array, rows: Array) -> Array:
    """Key words that decide which tokens stay [B, 2]; the noise of the row is made of others."""
    return jax.vmap(lambda key: jax.random.key_data(jax.random.fold_in(key, 1)))(_row_keys(keys, rows))


def window_rows(table: SamplerTable, start: int, length: int, batch: int) -> tuple[Rows, np.ndarray]:
    """``length`` rows of a table from ``start``, the same for each image of a batch, on the host.

    Returns:
        The rows, each column [B, length, ...], and which of them use noise, [length] bool.
    """
    rows = table.window(start, length)
    noisy = np.asarray(rows["M"][:, :, NOISE].any(axis=1))
    return {name: np.broadcast_to(column, (batch, *column.shape)) for name, column in rows.items()}, noisy


def initial_state(noise: np.ndarray, init_scale: np.ndarray) -> np.ndarray:
    """State before the first row, on the host: slot 0 is the scaled noise [B, h, w, C], the others are empty."""
    state = np.zeros((noise.shape[0], SLOTS, *noise.shape[1:]), np.float32)
    state[:, 0] = noise * init_scale.astype(np.float32)[:, None, None, None]
    return state


def features_shape(cfg: UNetConfig, latents: Sequence[int], layers: int, *, guided: bool) -> tuple[int, ...]:
    """Shape of ``Reuse.features`` for latents of shape [B, h, w, C]; before the first full row they are zeros."""
    batch, *deep = deep_shape(cfg, latents, layers)
    return (2 * batch if guided else batch, 2, *deep)


def _side_by_side(negative: Array, positive: Array) -> Array:
    """[B, ...] twice -> [2 B, ...]. The halves of an image are neighbours: a batch over devices stays where it is."""
    return jnp.stack([negative, positive], axis=1).reshape(-1, *positive.shape[1:])


def _per_image(column: Array) -> Array:
    return column[:, None, None, None]


def _combine(m: Array, state: Array, denoised: Array, noise: Array) -> Array:
    """``M @ [state; D; noise]`` as multiply-adds in float32: a matmul might run in lower precision."""
    m = m[..., None, None, None]
    total = m[:, :, DENOISED] * denoised[:, None] + m[:, :, NOISE] * noise[:, None]
    for slot in range(SLOTS):
        total = total + m[:, :, slot] * state[:, None, slot]
    return total


def _clip(denoised: Array, clip: Clip) -> Array:
    """``Clip.apply`` on the device."""
    if clip.ratio is None:
        return jnp.clip(denoised, -clip.range, clip.range)
    size = jnp.quantile(jnp.abs(denoised).reshape(denoised.shape[0], -1), clip.ratio, axis=1)
    size = _per_image(jnp.clip(size, 1.0, clip.range))
    return jnp.clip(denoised, -size, size) / size
