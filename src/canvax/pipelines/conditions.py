"""What a model is told about a picture beside its prompt: SDXL's sizes and crop (Podell et al. 2023, section 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from canvax.errors import InputError
from canvax.models.text import Conditions
from canvax.models.unet import skip_connections
from canvax.parallel.place import put
from canvax.pipelines.options import AESTHETICS, XL_ONLY, Options
from canvax.samplers import find
from canvax.types import HostArray

if TYPE_CHECKING:
    from canvax.pipelines.checkpoint import Checkpoint

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


def check_for_model(options: Options, checkpoint: Checkpoint) -> None:
    """Refuse options that the model has no place for, rather than pass them over.

    Raises:
        InputError: naming the options and the kind of model they are for.
    """
    one_encoder = ("prompt_2", "negative_prompt_2")
    if not checkpoint.is_xl:
        useless, reason = XL_ONLY, "it is not an SDXL model"
    elif checkpoint.is_refiner:
        useless, reason = (*one_encoder, "target_size", "negative_target_size"), "it is a refiner"
    else:
        useless, reason = AESTHETICS, "it is not a refiner"
        useless += one_encoder if checkpoint.text.first is None else ()
    given = options.changed().keys() & set(useless)
    if given:
        raise InputError(f"options.{sorted(given)[0]} means nothing to {checkpoint.name}: {reason}; leave it out")
    limit = checkpoint.text.max_skip
    if not 0 <= options.clip_skip <= limit:
        raise InputError(f"clip_skip={options.clip_skip!r} is not in 0..{limit}")
    check_layers(options.reuse_layers, checkpoint)


def check_layers(layers: int, checkpoint: Checkpoint) -> None:
    """Refuse ``reuse_layers`` that the UNet has not.

    Raises:
        InputError: naming how many it has.
    """
    most = skip_connections(checkpoint.unet)
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= most:
        raise InputError(f"reuse_layers={layers!r} is not in 1..{most}, the skip connections of {checkpoint.name}")


def check_start(options: Options, sampler: str | None, latents: HostArray | None, checkpoint: Checkpoint) -> None:
    """Refuse a call that goes on from a picture but was given none.

    Raises:
        InputError: naming the option and what to pass.
    """
    started = options.denoising_start > 0
    if started and latents is None:
        raise InputError(
            "latents=None with options.denoising_start: pass result.latents of a run that stopped there, "
            "with options.denoising_end"
        )
    inverts = sampler is not None and find(sampler)[0].name == "ddim_inverse"
    if inverts and latents is None:
        raise InputError(
            f"latents=None with sampler={sampler!r}, which goes from a picture to its noise: pass the "
            "latents of the picture, such as result.latents"
        )
    if checkpoint.is_refiner and not started:
        raise InputError(
            f"{checkpoint.name} is a refiner, which only finishes pictures; in Python, pass latents of a base model "
            "that stopped at options.denoising_end=0.8, and options.denoising_start=0.8"
        )


def time_ids(options: Options, height: int, width: int, *, refiner: bool) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that SDXL is told, for the picture and for what to keep away from, each [n] float32.

    Original size, crop and target size; a refiner is told an aesthetic score in place of the last. A negative one that
    is left out is as the other.
    """
    size = (height, width)
    original, crop = options.original_size or size, options.crops_coords_top_left or (0, 0)
    target = options.target_size or size
    negative_original = options.negative_original_size or original
    negative_crop = options.negative_crops_coords_top_left or crop
    negative_target = options.negative_target_size or target
    if refiner:
        score, negative_score = options.aesthetic_score, options.negative_aesthetic_score
        target = (AESTHETIC_SCORE if score is None else score,)
        negative_target = (NEGATIVE_AESTHETIC_SCORE if negative_score is None else negative_score,)
    return (
        np.array([*original, *crop, *target], np.float32),
        np.array([*negative_original, *negative_crop, *negative_target], np.float32),
    )


def zeros_like(conditions: Conditions) -> Conditions:
    """What SDXL is told for no negative prompt. Made on the host: on the device it would be one more program."""
    return {name: put(np.zeros(array.shape, array.dtype), array.sharding) for name, array in conditions.items()}
