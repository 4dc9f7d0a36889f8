"""The loss of a text-to-image model on cached latents, including the random choices of a step.

A function ``Assemble`` makes all parameters from the trained ones, which can be whole components, low-rank factors,
rows of an embedding table, or a separate network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, check_count
from canvax.kernels.outline import recomputed
from canvax.models.clip import text_encoder_spec
from canvax.models.configs import ClipTextConfig, UNetConfig
from canvax.models.controlnet import ControlNet
from canvax.models.denoiser import Denoiser, evaluate
from canvax.models.text import FIRST, Conditions, TextEncoders, encode_text
from canvax.models.unet import BlockOptions, Residuals, unet, unet_spec
from canvax.params import Params, init_params
from canvax.samplers.schedule import NoiseSchedule
from canvax.train.kept import Lazy
from canvax.train.objectives import add_noise, cast, check_trainable, flow, loss_weights, squared_error, target_of
from canvax.train.step import Loss
from canvax.types import Array, DType, HostArray
from canvax.weights.cast import parse_dtype

CONTROL = "controlnet"
"""Key of the ControlNet's parameters."""

Assemble = Callable[[Params, Params], Params]
"""``(trained parameters, frozen parameters) -> parameters of each component``."""

GUIDANCE = 1.0
"""Guidance scale that a distilled transformer reads in training, as in kohya's scripts and ai-toolkit."""
VALIDATION_TIMES = 4
"""Number of training times at which the error of a held-out image is computed."""

EMPTY = 0.1
"""Fraction of samples whose caption is dropped, which guidance needs (Ho & Salimans 2022)."""


def new_denoiser(text: ClipTextConfig, cfg: UNetConfig, seed: int) -> Params:
    """Make a random text encoder and UNet, ``{"text_encoder": ..., "unet": ...}``.

    The last layer of every residual branch of the UNet is zero (Goyal et al. 2017, section 5.1; Ho et al. 2020): the
    network starts as a shallow one and becomes deeper during training.
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


Reader = Callable[..., HostArray | Lazy]
"""``(captions, length=T) -> what is read of each [N, ...]``: a tokenizer, which gives ids [N, T], or kept features."""


def read_captions(reader: Reader, captions: Sequence[Sequence[str]], length: int) -> HostArray | Lazy:
    """Return what is read of each image's captions [N, M, ...]; an image with fewer than M captions repeats them."""
    check_count("length", length)
    if length < 2 or not captions or not all(captions):
        raise InputError(
            "captions", f"do not fit length={length}: each picture has a caption, of 2 tokens or more", value=captions
        )
    most = max(len(texts) for texts in captions)
    # Images share captions, and repeat theirs: each distinct text is read once.
    row = {text: index for index, text in enumerate(dict.fromkeys(chain.from_iterable(captions)))}
    rows = np.array([[row[texts[i % len(texts)]] for i in range(most)] for texts in captions])
    read = reader(list(row), length=length)
    if isinstance(read, Lazy):
        return Lazy((*rows.shape, *read.shape[1:]), read.dtype, lambda index: read[rows[index]])
    return read[rows]


def denoising_data(
    readers: Mapping[str, Reader],
    latents: HostArray,
    captions: Sequence[Sequence[str]],
    length: int,
    *,
    time_ids: HostArray | None = None,
    control: HostArray | None = None,
    mask: HostArray | None = None,
    weight: HostArray | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of ``denoising_loss``: the samples, and the data that all samples share.

    The caller can add ``prior`` to the shared data: samples of class images, which keep a model from forgetting (Ruiz
    et al. 2023, section 3.2). A step then draws as many of them at random as its batch has samples. An array of one
    entry belongs to all class images.

    Args:
        readers: the tokenizer of each text encoder; without text encoders a reader of each feature.
        latents: [N, V, h, w, C], V variants of each image (shifted, mirrored) in any floating-point dtype.
        captions: the captions of each image.
        length: T, tokens of a caption.
        time_ids: SDXL's size conditions of each image [N, n].
        control: control images [N, V, H, W, 3] uint8.
        mask: weights of the error at each position of the latents [N, V, h, w].
        weight: weights of the loss on each image [N].
    """
    texts = {name: read_captions(reader, captions, length) for name, reader in readers.items()}
    samples = {"latents": latents, "captions": texts, "time_ids": time_ids, "control": control, "mask": mask}
    samples["weight"] = weight
    empty = {name: reader([""], length=length)[0] for name, reader in readers.items()}
    return {name: array for name, array in samples.items() if array is not None}, {"empty": empty}


class Draw(NamedTuple):
    """The batch of a step, after all random choices.

    Attributes:
        x0: latents [B, h, w, C] float32.
        captions: token ids for each text encoder [B, T], or features by name [B, ...].
        conditions: ``time_ids`` for SDXL, ``control`` for a ControlNet: [B, ...].
        times: timesteps int32 [B].
        noise: [B, h, w, C] float32.
        mask: weights of the error [B, h, w] float32; None if all positions count equally.
        weight: weights of the loss on each image [B] float32; None if all images count equally.
    """

    x0: Array
    captions: dict[str, Array]
    conditions: dict[str, Array]
    times: Array
    noise: Array
    mask: Array | None = None
    weight: Array | None = None


def draw(
    samples: Mapping[str, Any],
    shared: Mapping[str, Any],
    key: Array,
    size: int,
    *,
    focus: tuple[float, float] | None,
    empty: float,
    noise_offset: float = 0.0,
) -> Draw:
    """Make the random choices of a step: variant, caption, timestep and noise of each sample.

    ``noise_offset`` adds noise of this strength that is the same at all positions of a channel (Guttenberg 2023).
    Samples of ``shared["prior"]``, if any, are appended: [2 B, ...]. They must have masks if the batch has masks.
    """
    form_key, caption_key, empty_key, order_key, time_key, noise_key = jax.random.split(key, 6)
    count, forms = samples["latents"].shape[:2]
    form = jax.random.randint(form_key, (count,), 0, forms)
    x0 = _picked(samples["latents"], form).astype(jnp.float32)
    caption = jax.random.randint(caption_key, (count,), 0, next(iter(samples["captions"].values())).shape[1])
    without = jax.random.uniform(empty_key, (count,)) < empty
    captions = {
        name: jax.vmap(jnp.where, (0, None, 0))(without, shared["empty"][name], _picked(of_all, caption))
        for name, of_all in samples["captions"].items()
    }
    conditions = {"time_ids": samples["time_ids"]} if "time_ids" in samples else {}
    if "control" in samples:
        conditions["control"] = _picked(samples["control"], form)
    times = training_times(order_key, time_key, count, size, focus)
    noise = jax.random.normal(noise_key, x0.shape, jnp.float32)
    if noise_offset:
        level = jax.random.normal(jax.random.fold_in(noise_key, 1), (count, 1, 1, x0.shape[-1]), jnp.float32)
        noise = noise + noise_offset * level
    mask = _picked(samples["mask"], form).astype(jnp.float32) if "mask" in samples else None
    drawn = Draw(x0, captions, conditions, times, noise, mask, samples.get("weight"))
    if "prior" not in shared:
        return drawn
    which_key, key = jax.random.split(jax.random.fold_in(key, 1))
    index = jax.random.randint(which_key, (count,), 0, shared["prior"]["latents"].shape[0])
    prior = jax.tree.map(lambda leaf: leaf[index % len(leaf)], shared["prior"])
    other = draw(prior, {"empty": shared["empty"]}, key, size, focus=focus, empty=empty, noise_offset=noise_offset)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), drawn, other)


def _picked(forms: Array, indices: Array) -> Array:
    """Select a variant of each sample, [B, V, ...] and [B] -> [B, ...]; the batch stays split over the devices."""
    return jax.vmap(lambda sample, index: sample[index])(forms, indices)


def replaced(trained: Params, frozen: Params) -> Params:
    """Assemble the parameters when whole components are trained."""
    return {**frozen, **trained}


@dataclass(frozen=True)
class Objective:
    """The settings of ``denoising_loss``, which documents them."""

    text: TextEncoders | None
    network: UNetConfig | Denoiser
    schedule: NoiseSchedule
    gamma: float | None = 5.0
    focus: tuple[float, float] | None = None
    empty: float = EMPTY
    dtype: DType = jnp.float32
    remat: bool = False
    assemble: Assemble = replaced
    control: ControlNet | None = None
    prior: float = 1.0
    noise_offset: float = 0.0

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        if self.gamma is not None and self.gamma <= 0:
            raise InputError("gamma", "must be more than 0, or None for no min-SNR weights", value=self.gamma)
        if not 0 <= self.empty < 1:
            raise InputError(
                "empty", "is the share of empty captions", cure="it must be in 0..1, 1 excluded", value=self.empty
            )
        if self.noise_offset and self.schedule.is_flow:
            problem = "is for diffusions, and the model is a flow"
            raise InputError("noise_offset", problem, cure="leave it out", value=self.noise_offset)
        if self.prior <= 0:
            raise InputError("prior", "must be more than 0", value=self.prior)
        if self.focus is not None and (len(self.focus) != 2 or self.focus[1] <= 0):
            raise InputError("focus", "is not a mean and a spread of more than 0", value=self.focus)


def denoising_loss(
    text: TextEncoders | None, network: UNetConfig | Denoiser, schedule: NoiseSchedule, **options: Any
) -> Loss:
    """Return the loss of a text-to-image model as a function of the trained parameters.

    Args:
        text: configs of the text encoders; None if the data contains features of the captions instead of token ids.
        network: config of the UNet, or another denoiser.
        schedule: the noise schedule and the prediction type.
        options: fields of ``Objective``. ``gamma``: bound of the min-SNR weights, None for no weights. ``focus``: mean
            and standard deviation of the logit of the training time as a fraction of the schedule, a logit-normal
            distribution (Esser et al. 2024, section 3.1); None for uniform times. ``empty``: fraction of empty
            captions. ``dtype``: dtype of the computation. ``remat``: recompute blocks in the backward pass instead of
            storing activations. ``assemble``: makes the parameters of all components. ``control``: a ControlNet, whose
            parameters are in the component ``CONTROL``. ``prior``: weight of the loss on ``shared["prior"]``.
            ``noise_offset``: see ``draw``; not for flow models.

    Returns:
        A loss over ``denoising_data``. The caller can add ``frozen`` to the shared data: parameters that are used but
        not trained.

    Raises:
        InputError: the schedule or prediction type cannot be trained, see ``check_trainable``.
    """
    check_trainable(schedule)
    levels = jnp.asarray(schedule.sigmas if schedule.is_flow else schedule.alphas_cumprod, jnp.float32)
    objective = Objective(text, network, schedule, **options)
    return partial(_denoising_loss, tables=(levels, loss_weights(schedule, objective.gamma)), objective=objective)


def training_times(
    order_key: Array, time_key: Array, batch: int, size: int, focus: tuple[float, float] | None = None
) -> Array:
    """Draw random timesteps, int32 [batch] in 0..size - 1, in random order.

    The distribution is divided into ``batch`` parts of equal probability, with a timestep from each. The loss has the
    same mean with less variance (Kingma et al. 2021, I.1).

    Args:
        order_key: key of the order.
        time_key: key of the positions within the parts.
        batch: number of timesteps.
        size: number of timesteps of the schedule.
        focus: mean and standard deviation of the logit of the time as a fraction of the schedule; None for uniform
            times.
    """
    check_count("batch", batch)
    check_count("size", size)
    if focus is not None and len(focus) != 2:
        raise InputError("focus", "is not a mean and a spread", value=focus)
    order = jax.random.permutation(order_key, batch).astype(jnp.float32)
    part = (order + jax.random.uniform(time_key, (batch,))) / batch
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
    levels, weights = tables
    choices: dict[str, Any] = {name: getattr(objective, name) for name in ("focus", "empty", "noise_offset")}
    drawn = draw(samples, shared, key, levels.size, **choices)
    errors = _errors(p, drawn, shared, levels, objective)
    weighted = weights[drawn.times] * errors * (1.0 if drawn.weight is None else drawn.weight)
    weighted = weighted.reshape(-1, len(samples["latents"])).mean(1)
    loss = weighted[0] if "prior" not in shared else weighted[0] + objective.prior * weighted[1]
    return loss, {"mse": errors.mean()}


def validation_errors(
    text: TextEncoders | None, network: UNetConfig | Denoiser, schedule: NoiseSchedule, **options: Any
) -> Callable[[Params, Any, Any, Array, Array], Array]:
    """Return the error of held-out images at fixed times and noise, without weights or random choices.

    The arguments are those of ``denoising_loss``. The function gets the trained parameters, samples of
    ``denoising_data``, the shared data, the number of each sample in the held-out images [B], and the number of the
    time; it returns the mean squared errors [B]. The ``VALIDATION_TIMES`` lie in the middle of parts of equal
    probability of ``schedule``. Noise depends on both numbers only.
    """
    levels = jnp.asarray(schedule.sigmas if schedule.is_flow else schedule.alphas_cumprod, jnp.float32)
    objective = Objective(text, network, schedule, **options)

    def errors(p: Params, samples: Any, shared: Any, numbers: Array, part: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(0), part)
        x0 = samples["latents"][:, 0].astype(jnp.float32)
        noise = jax.vmap(lambda n: jax.random.normal(jax.random.fold_in(key, n), x0.shape[1:], jnp.float32))(numbers)
        place = ((part.astype(jnp.float32) + 0.5) / VALIDATION_TIMES * levels.size).astype(jnp.int32)
        conditions = {"time_ids": samples["time_ids"]} if "time_ids" in samples else {}
        first = {name: samples[name][:, 0] for name in ("control", "mask") if name in samples}
        mask = first.pop("mask", None)
        times = jnp.full(numbers.shape, place)
        captions = {name: of_all[:, 0] for name, of_all in samples["captions"].items()}
        mask = None if mask is None else mask.astype(jnp.float32)
        return _errors(p, Draw(x0, captions, conditions | first, times, noise, mask), shared, levels, objective)

    return errors


def _errors(p: Params, drawn: Draw, shared: Mapping[str, Any], levels: Array, objective: Objective) -> Array:
    """Return the mean squared error of the network for each image of a batch [B]."""
    x0, captions, conditions, times, noise, mask, _ = drawn
    p = cast(objective.assemble(p, shared.get("frozen", {})), objective.dtype)
    hints = conditions.pop("control", None)
    text = captions
    if objective.text is not None:
        text = encode_text(p, {name: {"ids": ids} for name, ids in captions.items()}, cfg=objective.text)
    encoded: Any = {**text, **conditions}
    level, schedule = levels[times], objective.schedule
    if schedule.is_flow:
        noisy, target = flow(x0, noise, level)
        timestep = level * schedule.num_train_timesteps
    else:
        noisy = add_noise(x0, noise, level)
        target, timestep = target_of(x0, noise, level, schedule.prediction_type), times
    noisy = noisy.astype(objective.dtype)
    if isinstance(objective.network, UNetConfig):
        residuals = None if hints is None else _residuals(p[CONTROL], noisy, timestep, encoded, hints, objective)
        options = BlockOptions(remat=objective.remat)
        cfg = objective.network
        output = unet(p["unet"], noisy, timestep, cfg=cfg, options=options, residuals=residuals, **encoded)
    else:
        output = _evaluated(p, noisy, timestep, encoded, objective.network, remat=objective.remat)
    return squared_error(output, target, mask)


def _evaluated(
    p: Params, noisy: Array, timestep: Array, encoded: Conditions, network: Denoiser, *, remat: bool
) -> Array:
    """Return the output of a denoiser for latents [B, h, w, C], as the loop of a pipeline evaluates it."""
    if network.facts.embeds_guidance:
        encoded = {**encoded, "guidance": jnp.full(len(noisy), GUIDANCE, jnp.float32)}
    with recomputed(remat):
        return evaluate(network, p[network.component], noisy, timestep, encoded)


def _residuals(
    p: Params, noisy: Array, times: Array, encoded: Conditions, hints: Array, objective: Objective
) -> Residuals:
    """Return the trained ControlNet's additions to the UNet's features, for control images [B, H, W, 3] uint8."""
    net = objective.control
    assert net is not None

    def added(p: Params, noisy: Array, encoded: Conditions, images: Array) -> Residuals:
        scales = jnp.ones((noisy.shape[0], net.layers), jnp.float32)
        return net.residuals(p, noisy, times, net.prepare(p, encoded, noisy.shape), net.encode(p, images), scales)

    return (jax.checkpoint(added) if objective.remat else added)(p, noisy, encoded, hints.astype(jnp.float32) / 255)
