"""Stable Diffusion XL and its refiner: conditioned on sizes and a crop too (Podell et al. 2023, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from canvax.errors import CheckpointError
from canvax.families.base import (
    AESTHETICS,
    SECOND_PROMPTS,
    TARGET_SIZES,
    TOKENIZERS,
    Defaults,
    Family,
    Model,
    Numbers,
    latent_consistency,
    read_clip_tokenizer,
    read_clip_unet_vae,
)
from canvax.models.clip import clip_configs
from canvax.models.networks import Networks
from canvax.models.text import FIRST, SECOND
from canvax.samplers import stable_diffusion_config
from canvax.weights.files import ModelFiles

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


def read(files: ModelFiles) -> Networks:
    """Two CLIP text encoders, the second with a pooled output; the refiner has the second alone."""
    both = {FIRST, TOKENIZERS[FIRST]} & files.components.keys()
    return read_clip_unet_vae(files, [FIRST, SECOND] if both else [SECOND], _faults)


def _faults(networks: Networks, files: ModelFiles) -> list[str]:
    _zero_empty_negative(files)  # refuses another value than true and false
    kind, second = networks.denoiser.cfg.addition_embed_type, clip_configs(networks.text).get(SECOND)
    if kind is None or second is None:
        return [f"addition_embed_type {kind!r} of the UNet does not suit its text encoders"]
    try:
        got = networks.size_numbers
    except CheckpointError as error:
        return [f"{error} (projection_dim in text_encoder_2)"]
    faults, wanted = [], 5 if _is_refiner(files) else 6
    if got != wanted:
        faults.append(
            f"the UNet is conditioned on {got} numbers about an image, the pipeline gives {wanted} "
            "(requires_aesthetics_score in model_index.json; in the UNet's config addition_time_embed_dim and "
            "projection_class_embeddings_input_dim)"
        )
    if not isinstance(second.eos_token_id, int):
        faults.append(f"eos_token_id {second.eos_token_id!r} of the second text encoder is not one token")
    return faults


def _unused_options(model: Model) -> Mapping[str, str]:
    if model.is_refiner:
        return dict.fromkeys((*SECOND_PROMPTS, *TARGET_SIZES), "it is a refiner")
    one_encoder = SECOND_PROMPTS if FIRST not in model.text.names else ()
    return dict.fromkeys((*AESTHETICS, *one_encoder), "it is not a refiner")


def _numbers(model: Model, height: int, width: int, options: Mapping[str, Any]) -> tuple[Numbers, Numbers]:
    """Original size, crop and target size; a refiner takes an aesthetic score in place of the last.

    A negative one that is left out is as the other.
    """
    size = (height, width)
    original, crop = options.get("original_size", size), options.get("crops_coords_top_left", (0, 0))
    target = options.get("target_size", size)
    negative_original = options.get("negative_original_size", original)
    negative_crop = options.get("negative_crops_coords_top_left", crop)
    negative_target = options.get("negative_target_size", target)
    if model.is_refiner:
        target = (options.get("aesthetic_score", AESTHETIC_SCORE),)
        negative_target = (options.get("negative_aesthetic_score", NEGATIVE_AESTHETIC_SCORE),)
    return (
        {"time_ids": np.array([*original, *crop, *target], np.float32)},
        {"time_ids": np.array([*negative_original, *negative_crop, *negative_target], np.float32)},
    )


def _zero_empty_negative(files: ModelFiles) -> bool:
    return _flag(files, "force_zeros_for_empty_prompt", True)


def _is_refiner(files: ModelFiles) -> bool:
    """It is conditioned on an aesthetic score in place of a target size."""
    return _flag(files, "requires_aesthetics_score", False)


def _flag(files: ModelFiles, name: str, usual: bool) -> bool:
    """A field of ``model_index.json`` that is true or false; null is what is usual.

    Raises:
        CheckpointError: it is something else.
    """
    value = files.index.get(name)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{files}: {name} = {value!r:.80} in its model_index.json is neither true nor false")
    return usual if value is None else value


SDXL = Family(
    name="sdxl",
    pipelines=(
        *("StableDiffusionXLPipeline", "FlaxStableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"),
        "StableDiffusionXLInpaintPipeline",
    ),
    read=read,
    tokenizer=read_clip_tokenizer,
    defaults=Defaults(guidance_scale=5.0),
    defaults_of=latent_consistency,
    scheduler_config=partial(stable_diffusion_config, xl=True),
    unused_options=_unused_options,
    numbers=_numbers,
    zero_empty_negative=_zero_empty_negative,
    is_refiner=_is_refiner,
)
