"""Stable Diffusion XL and its refiner, also conditioned on sizes and a crop (Podell et al. 2023, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.errors import CheckpointError
from canvax.families.base import (
    AESTHETICS,
    CLASSES,
    LATENT_CONSISTENCY,
    SECOND_PROMPTS,
    TARGET_SIZES,
    TOKENIZERS,
    Defaults,
    Family,
    Model,
    SizeConditions,
    index_flag,
    read_clip_tokenizer,
    read_clip_unet_vae,
)
from canvax.models.clip import clip_configs, clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.presets import SDXL_REFINER_UNET, SDXL_TEXT, SDXL_TEXT_2, SDXL_UNET, SDXL_VAE
from canvax.models.text import FIRST, SECOND
from canvax.samplers import Scheduler, from_scheduler_config, stable_diffusion_config
from canvax.weights.files import ModelFiles

_REFINES = "requires_aesthetics_score"
"""Field of ``model_index.json`` that marks a refiner."""

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


def read(files: ModelFiles) -> Networks:
    """Return the networks: two CLIP text encoders, the second with a pooled output; the refiner has only the second."""
    both = {FIRST, TOKENIZERS[FIRST]} & files.components.keys()
    return read_clip_unet_vae(files, [FIRST, SECOND] if both else [SECOND], _faults)


def _faults(networks: Networks, files: ModelFiles) -> list[str]:
    index_flag(files, "force_zeros_for_empty_prompt", True)  # refuses other values than true and false
    kind, second = networks.config.addition_embed_type, clip_configs(networks.text).get(SECOND)
    if kind is None or second is None:
        return [f"addition_embed_type {kind!r} of the UNet does not suit its text encoders"]
    try:
        got = networks.size_numbers
    except CheckpointError as error:
        return [f"{error} (projection_dim in text_encoder_2)"]
    faults, wanted = [], 5 if index_flag(files, _REFINES, False) else 6
    if got != wanted:
        faults.append(
            f"the UNet is conditioned on {got} numbers about an image, the pipeline gives {wanted} "
            "(requires_aesthetics_score in model_index.json; in the UNet's config addition_time_embed_dim and "
            "projection_class_embeddings_input_dim)"
        )
    if not isinstance(second.eos_token_id, int):
        faults.append(f"eos_token_id {second.eos_token_id!r} of the second text encoder is not one token")
    return faults


def _scheduler(config: Mapping[str, Any], files: ModelFiles) -> Scheduler:
    del files
    return from_scheduler_config(stable_diffusion_config(config, xl=True))


def _size_conditions(
    model: Model, height: int, width: int, options: Mapping[str, Any]
) -> tuple[SizeConditions, SizeConditions]:
    """Return original size, crop and target size; a refiner has an aesthetic score instead of the target size.

    Negative values default to the positive ones.
    """
    size = (height, width)
    original, crop = options.get("original_size", size), options.get("crops_coords_top_left", (0, 0))
    target = options.get("target_size", size)
    negative_original = options.get("negative_original_size", original)
    negative_crop = options.get("negative_crops_coords_top_left", crop)
    negative_target = options.get("negative_target_size", target)
    if model.family.is_refiner:
        target = (options.get("aesthetic_score", AESTHETIC_SCORE),)
        negative_target = (options.get("negative_aesthetic_score", NEGATIVE_AESTHETIC_SCORE),)
    return (
        {"time_ids": np.array([*original, *crop, *target], np.float32)},
        {"time_ids": np.array([*negative_original, *negative_crop, *negative_target], np.float32)},
    )


SDXL = Family(
    name="sdxl",
    title="Stable Diffusion XL",
    pipelines=(
        *("StableDiffusionXLPipeline", "FlaxStableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"),
        "StableDiffusionXLInpaintPipeline",
    ),
    read=read,
    tokenizer=read_clip_tokenizer,
    classes=CLASSES | {SECOND: CLASSES[FIRST], TOKENIZERS[SECOND]: CLASSES[TOKENIZERS[FIRST]]},
    defaults=Defaults(guidance_scale=5.0),
    distilled=LATENT_CONSISTENCY,
    scheduler=_scheduler,
    even_times=False,
    unused_options=dict.fromkeys(AESTHETICS, "it is not a refiner"),
    size_conditions=_size_conditions,
    zero_negative_embeds=True,
    presets={"sdxl": Networks(UNetDenoiser(SDXL_UNET), SDXL_VAE, clip_encoders(SDXL_TEXT, SDXL_TEXT_2))},
)
SDXL_REFINER = replace(
    SDXL,
    name="sdxl-refiner",
    index={_REFINES: True},
    unused_options=dict.fromkeys((*SECOND_PROMPTS, *TARGET_SIZES), "it is a refiner"),
    is_refiner=True,
    presets={"sdxl-refiner": Networks(UNetDenoiser(SDXL_REFINER_UNET), SDXL_VAE, clip_encoders(None, SDXL_TEXT_2))},
)
"""Refiner, conditioned on an aesthetic score instead of a target size."""
