"""The loss of a text-to-image model on cached latents: what a step draws at random, and what it makes of it.

What is trained is said by a function, ``Assemble``, that makes all parameters of it: the parameters themselves,
low-rank factors beside them, rows of an embedding table, or a network of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, check_count
from canvax.models.clip import text_encoder_spec
from canvax.models.configs import ClipTextConfig, UNetConfig
from canvax.models.controlnet import ControlNet
from canvax.models.text import FIRST, Conditions, TextEncoders, encode_text
from canvax.models.unet import Residuals, Special, unet, unet_spec
from canvax.params import Params, init_params
from canvax.samplers.schedule import NoiseSchedule
from canvax.tokenizers.clip import ClipTokenizer
from canvax.train.loop import Loss
from canvax.train.objectives import add_noise, cast, check_trainable, loss_weights, squared_error, target_of
from canvax.types import Array, DType, HostArray
from canvax.weights.cast import parse_dtype

CONTROL = "controlnet"
"""The parameters of a ControlNet."""

Assemble = Callable[[Params, Params], Params]
"""``(what is trained, what is frozen) -> the parameters of each component``."""

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
    check_count("length", length)
    if length < 2 or not captions or not all(captions):
        raise InputError(
            "captions", captions, f"do not fit length={length}: each picture has a caption, of 2 tokens or more"
        )
    most = max(len(texts) for texts in captions)
    flat = [texts[i % len(texts)] for texts in captions for i in range(most)]
    return tokenizer(flat, length=length).reshape(len(captions), most, length)


def denoising_data(
    tokenizers: Mapping[str, ClipTokenizer],
    latents: HostArray,
    captions: Sequence[Sequence[str]],
    length: int,
    *,
    time_ids: HostArray | None = None,
    control: HostArray | None = None,
    mask: HostArray | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``denoising_loss`` reads: samples, and what they share.

    Samples under the key ``prior`` of what is shared are of pictures that keep a model from forgetting what it knew
    (Ruiz et al. 2023, section 3.2): for each batch as many are drawn from them, at random.

    Args:
        tokenizers: of each text encoder.
        latents: [N, V, h, w, C], V forms of each picture (shifted, mirrored) in any floating point dtype.
        captions: of each picture.
        length: T, tokens of a caption.
        time_ids: what SDXL is told of each picture's size and crop [N, n].
        control: control images [N, V, H, W, 3] uint8.
        mask: what the error of each place of the latents is multiplied with [N, V, h, w].
    """
    ids = {name: caption_ids(tokenizer, captions, length) for name, tokenizer in tokenizers.items()}
    samples = {"latents": latents, "ids": ids, "time_ids": time_ids, "control": control, "mask": mask}
    empty = {name: tokenizer([""], length=length)[0] for name, tokenizer in tokenizers.items()}
    return {name: array for name, array in samples.items() if array is not None}, {"empty": empty}


class Draw(NamedTuple):
    """What one step looks at.

    Attributes:
        x0: latents [B, h, w, C] float32.
        ids: of the captions, for each text encoder [B, T].
        conditions: ``time_ids`` of SDXL, ``control`` of a ControlNet: [B, ...].
        times: timesteps int32 [B].
        noise: [B, h, w, C] float32.
        mask: weights of the error [B, h, w] float32; None where all places count alike.
    """

    x0: Array
    ids: dict[str, Array]
    conditions: dict[str, Array]
    times: Array
    noise: Array
    mask: Array | None = None


def draw(
    samples: Mapping[str, Any],
    shared: Mapping[str, Any],
    key: Array,
    size: int,
    *,
    focus: tuple[float, float] | None,
    empty: float,
) -> Draw:
    """The random choices of one step: form, caption, time and noise of the samples of a batch.

    Samples of ``shared["prior"]``, which has masks where the batch has them, follow behind them: [2 B, ...].
    """
    form_key, caption_key, empty_key, order_key, time_key, noise_key = jax.random.split(key, 6)
    count, forms = samples["latents"].shape[:2]
    form = jax.random.randint(form_key, (count,), 0, forms)
    x0 = _picked(samples["latents"], form).astype(jnp.float32)
    captions = next(iter(samples["ids"].values())).shape[1]
    caption = jax.random.randint(caption_key, (count,), 0, captions)
    without = jax.random.uniform(empty_key, (count,)) < empty
    ids = {
        name: jnp.where(without[:, None], shared["empty"][name], _picked(of_all, caption))
        for name, of_all in samples["ids"].items()
    }
    conditions = {"time_ids": samples["time_ids"]} if "time_ids" in samples else {}
    if "control" in samples:
        conditions["control"] = _picked(samples["control"], form)
    times = training_times(order_key, time_key, count, size, focus)
    noise = jax.random.normal(noise_key, x0.shape, jnp.float32)
    mask = _picked(samples["mask"], form).astype(jnp.float32) if "mask" in samples else None
    drawn = Draw(x0, ids, conditions, times, noise, mask)
    if "prior" not in shared:
        return drawn
    which_key, key = jax.random.split(jax.random.fold_in(key, 1))
    which = jax.random.randint(which_key, (count,), 0, shared["prior"]["latents"].shape[0])
    prior = jax.tree.map(lambda leaf: leaf[which], shared["prior"])
    other = draw(prior, {"empty": shared["empty"]}, key, size, focus=focus, empty=empty)
    return jax.tree.map(lambda one, two: jnp.concatenate([one, two]), drawn, other)


def _picked(forms: Array, which: Array) -> Array:
    """Of each sample one form, [B, V, ...] and [B] -> [B, ...]; the batch stays split over the devices."""
    return jax.vmap(lambda sample, index: sample[index])(forms, which)


def replaced(trained: Params, frozen: Params) -> Params:
    """The ``Assemble`` of training whole components."""
    return {**frozen, **trained}


@dataclass(frozen=True)
class Objective:
    """What ``denoising_loss`` is made of; see there."""

    text: TextEncoders
    unet: UNetConfig
    schedule: NoiseSchedule
    gamma: float | None = 5.0
    focus: tuple[float, float] | None = None
    empty: float = EMPTY
    dtype: DType = jnp.float32
    remat: bool = False
    assemble: Assemble = replaced
    control: ControlNet | None = None
    prior: float = 1.0

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        if self.gamma is not None and self.gamma <= 0:
            raise InputError("gamma", self.gamma, "must be more than 0, or None for no min-SNR weights")
        if not 0 <= self.empty < 1:
            raise InputError("empty", self.empty, "is the share of empty captions", "it must be in 0..1, 1 excluded")
        if self.prior <= 0:
            raise InputError("prior", self.prior, "must be more than 0")
        if self.focus is not None and (len(self.focus) != 2 or self.focus[1] <= 0):
            raise InputError("focus", self.focus, "is not a mean and a spread of more than 0")


def denoising_loss(text: TextEncoders, unet: UNetConfig, schedule: NoiseSchedule, **options: Any) -> Loss:
    """The loss of a text-to-image model as a function of what is trained.

    Args:
        text: configs of the text encoders.
        unet: config of the UNet.
        schedule: the noise, and what the network predicts.
        options: of ``Objective``. ``gamma``: bound of the min-SNR weights, None for no weights. ``focus``: mean and
            spread of the logit of the training times, as shares of the schedule: a logit-normal distribution (Esser et
            al. 2024, section 3.1); None takes all times alike. ``empty``: share of empty captions. ``dtype``: computed
            in. ``remat``: compute the blocks again on the way back instead of keeping what they held. ``assemble``:
            makes the parameters of all components. ``control``: a ControlNet whose parameters are among them, as
            ``CONTROL``. ``prior``: weight of the loss on ``shared["prior"]``.

    Returns:
        A loss over ``denoising_data``. To what is shared ``frozen`` may be added: parameters that are used and not
        trained.

    Raises:
        InputError: what the network predicts cannot be trained, see ``check_trainable``.
    """
    check_trainable(schedule)
    alphas = jnp.asarray(schedule.alphas_cumprod, jnp.float32)
    objective = Objective(text, unet, schedule, **options)
    return partial(_denoising_loss, tables=(alphas, loss_weights(schedule, objective.gamma)), objective=objective)


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
    check_count("batch", batch)
    check_count("size", size)
    if focus is not None and len(focus) != 2:
        raise InputError("focus", focus, "is not a mean and a spread")
    part = (jax.random.permutation(order_key, batch) + jax.random.uniform(time_key, (batch,))) / batch
    if focus is not None:
        mean, spread = focus
        part = jax.nn.sigmoid(mean + spread * jax.scipy.stats.norm.ppf(part))
    return jnp.minimum((part * size).astype(jnp.int32), size - 1)


def _denoising_loss(
    p: Params,
    samples: dict[str, Any],
    shared: dict[str, Any],
    key: Array,
    *,
    tables: tuple[Array, Array],
    objective: Objective,
) -> tuple[Array, dict[str, Array]]:
    alphas, weights = tables
    x0, ids, conditions, times, noise, mask = draw(
        samples, shared, key, alphas.size, focus=objective.focus, empty=objective.empty
    )
    p = cast(objective.assemble(p, shared.get("frozen", {})), objective.dtype)
    hints = conditions.pop("control", None)
    told: Any = {**encode_text(p, ids, jnp.int32(0), cfg=objective.text), **conditions}
    noisy = add_noise(x0, noise, alphas[times]).astype(objective.dtype)
    residuals = None if hints is None else _residuals(p[CONTROL], noisy, times, told, hints, objective)
    special = Special(remat=objective.remat)
    output = unet(p["unet"], noisy, times, cfg=objective.unet, special=special, residuals=residuals, **told)
    errors = squared_error(output, target_of(x0, noise, alphas[times], objective.schedule.prediction_type), mask)
    weighted = (weights[times] * errors).reshape(-1, len(samples["latents"])).mean(1)
    loss = weighted[0] if "prior" not in shared else weighted[0] + objective.prior * weighted[1]
    return loss, {"mse": errors.mean()}


def _residuals(
    p: Params, noisy: Array, times: Array, told: Conditions, hints: Array, objective: Objective
) -> Residuals:
    """What the ControlNet that is trained adds to the UNet's features, for control images [B, H, W, 3] uint8."""
    net = objective.control
    assert net is not None

    def added(p: Params, noisy: Array, told: Conditions, images: Array) -> Residuals:
        scales = jnp.ones((noisy.shape[0], net.layers), jnp.float32)
        return net.residuals(p, noisy, times, net.prepare(p, told), net.encode(p, images), scales)

    return (jax.checkpoint(added) if objective.remat else added)(p, noisy, told, hints.astype(jnp.float32) / 255)
