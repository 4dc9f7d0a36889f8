"""Training a text encoder and a UNet, or a UNet alone, on cached latents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.models.clip import text_encoder, text_encoder_spec
from canvax.models.configs import ClipTextConfig, UNetConfig
from canvax.models.text import FIRST
from canvax.models.unet import unet, unet_spec
from canvax.params import Params, init_params
from canvax.samplers.schedule import NoiseSchedule
from canvax.tokenizers.clip import ClipTokenizer
from canvax.train.loop import Loss
from canvax.train.objectives import add_noise, cast, check_trainable, loss_weights, squared_error, target_of
from canvax.types import Array, DType, HostArray

EMPTY = 0.1
"""Share of samples whose caption is left out, so that guidance has something to lead away from (Ho & Salimans 2022)."""


def new_denoiser(text: ClipTextConfig, cfg: UNetConfig, seed: int) -> Params:
    """Random text encoder and UNet, ``{"text_encoder": ..., "unet": ...}``.

    The last layer of every residual branch of the UNet starts at zero (Goyal et al. 2017, section 5.1; Ho et al. 2020):
    the network begins as a short one and gets as deep as it needs.
    """
    params = {FIRST: init_params(text_encoder_spec(text), seed), "unet": init_params(unet_spec(cfg), seed + 1)}
    _zero_branches(params["unet"])
    return params


def _zero_branches(p: Params) -> None:
    for name, value in p.items():
        if not isinstance(value, dict):
            continue
        if name in ("conv2", "proj_out", "conv_out") and "weight" in value:
            value["weight"] = np.zeros_like(value["weight"])
        else:
            _zero_branches(value)


def caption_ids(tokenizer: ClipTokenizer, captions: Sequence[Sequence[str]], length: int) -> HostArray:
    """Ids of the captions of each picture, int32 [N, M, T]; a picture with fewer captions repeats its own."""
    most = max(len(texts) for texts in captions)
    flat = [texts[i % len(texts)] for texts in captions for i in range(most)]
    return tokenizer(flat, length=length).reshape(len(captions), most, length)


def denoising_data(tokenizer: ClipTokenizer, latents: HostArray, ids: HostArray) -> dict[str, HostArray]:
    """What ``denoising_loss`` reads.

    Args:
        tokenizer: for the empty caption.
        latents: [N, V, h, w, C], V forms of each picture (shifted, mirrored) in any floating point dtype.
        ids: [N, M, T].
    """
    return {"latents": latents, "ids": ids, "empty": tokenizer([""], length=ids.shape[-1])[0]}


def denoising_loss(
    text: ClipTextConfig,
    cfg: UNetConfig,
    schedule: NoiseSchedule,
    *,
    gamma: float | None = 5.0,
    focus: tuple[float, float] | None = None,
    empty: float = EMPTY,
    dtype: DType = jnp.float32,
    remat: bool = False,
) -> Loss:
    """The loss of a text-to-image model as a function of its parameters.

    Args:
        text: config of the text encoder.
        cfg: config of the UNet.
        schedule: the noise, and what the network predicts.
        gamma: bound of the min-SNR weights, None for no weights.
        focus: mean and spread of the logit of the training times, as shares of the schedule: a logit-normal
            distribution (Esser et al. 2024, section 3.1). None takes all times alike.
        empty: share of empty captions.
        dtype: dtype computed in.
        remat: compute the UNet's blocks again on the way back instead of keeping what they held.

    Returns:
        A loss over ``denoising_data``. A text encoder in ``data["frozen"]`` is used and not trained.

    Raises:
        InputError: what the network predicts cannot be trained, see ``check_trainable``.
    """
    check_trainable(schedule)
    alphas = jnp.asarray(schedule.alphas_cumprod, jnp.float32)
    return partial(
        _denoising_loss,
        tables=(alphas, loss_weights(schedule, gamma)),
        focus=focus,
        prediction_type=schedule.prediction_type,
        configs=(text, cfg),
        empty=empty,
        dtype=dtype,
        remat=remat,
    )


def training_times(
    order_key: Array, time_key: Array, batch: int, size: int, focus: tuple[float, float] | None = None
) -> Array:
    """Random timesteps, int32 [batch] in 0..size - 1, in random order.

    One from each of as many parts of the distribution, equal in probability: the same mean with less noise (Kingma et
    al. 2021, I.1).

    Args:
        order_key: key of the order.
        time_key: key of the places within the parts.
        batch: how many.
        size: timesteps of the schedule.
        focus: mean and spread of the logit of a time as a share of the schedule; None takes all times alike.
    """
    part = (jax.random.permutation(order_key, batch) + jax.random.uniform(time_key, (batch,))) / batch
    if focus is not None:
        mean, spread = focus
        part = jax.nn.sigmoid(mean + spread * jax.scipy.stats.norm.ppf(part))
    return jnp.minimum((part * size).astype(jnp.int32), size - 1)


def _denoising_loss(
    p: Params,
    data: dict[str, Any],
    chosen: Array,
    key: Array,
    *,
    tables: tuple[Array, Array],
    focus: tuple[float, float] | None,
    prediction_type: str,
    configs: tuple[ClipTextConfig, UNetConfig],
    empty: float,
    dtype: DType,
    remat: bool,
) -> tuple[Array, dict[str, Array]]:
    form_key, caption_key, empty_key, order_key, time_key, noise_key = jax.random.split(key, 6)
    batch = chosen.shape
    form = jax.random.randint(form_key, batch, 0, data["latents"].shape[1])
    x0 = data["latents"][chosen, form].astype(jnp.float32)
    caption = jax.random.randint(caption_key, batch, 0, data["ids"].shape[1])
    without = jax.random.uniform(empty_key, batch) < empty
    ids = jnp.where(without[:, None], data["empty"], data["ids"][chosen, caption])

    p = cast({**data.get("frozen", {}), **p}, dtype)
    features = text_encoder(p[FIRST], ids, configs[0])
    alphas, weights = tables
    times = training_times(order_key, time_key, batch[0], alphas.size, focus)
    noise = jax.random.normal(noise_key, x0.shape, jnp.float32)
    noisy = add_noise(x0, noise, alphas[times])
    output = unet(p["unet"], noisy.astype(dtype), times, features, configs[1], remat=remat)
    errors = squared_error(output, target_of(x0, noise, alphas[times], prediction_type))
    return (weights[times] * errors).mean(), {"mse": errors.mean()}
