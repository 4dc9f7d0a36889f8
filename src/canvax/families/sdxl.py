"""Stable Diffusion XL and its refiner: conditioned on sizes and a crop too (Podell et al. 2023, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from canvax.errors import CheckpointError
from canvax.families.base import AESTHETICS, SECOND_PROMPTS, TARGET_SIZES, TOKENIZERS, Defaults, Family, Model
from canvax.models.networks import Networks
from canvax.models.text import FIRST, SECOND
from canvax.samplers import stable_diffusion_config
from canvax.weights.files import ModelFiles

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


class StableDiffusionXLFamily(Family):
    """Two CLIP text encoders, the second with a pooled output; the refiner has the second alone."""

    name = "sdxl"
    pipelines = ("StableDiffusionXLPipeline", "FlaxStableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline")
    pipelines += ("StableDiffusionXLInpaintPipeline",)
    defaults = Defaults(guidance_scale=5.0)

    def encoders(self, files: ModelFiles) -> list[str]:
        return [FIRST, SECOND] if {FIRST, TOKENIZERS[FIRST]} & files.components.keys() else [SECOND]

    def faults(self, networks: Networks, files: ModelFiles) -> list[str]:
        self.zeros_for_no_negative(files)  # refuses another value than true and false
        kind, second = networks.denoiser.cfg.addition_embed_type, networks.text.second
        if kind is None or second is None:
            return [f"addition_embed_type {kind!r} of the UNet does not suit its text encoders"]
        try:
            got = networks.size_numbers
        except CheckpointError as error:
            return [f"{error} (projection_dim in text_encoder_2)"]
        faults, wanted = [], 5 if self.is_refiner(files) else 6
        if got != wanted:
            faults.append(
                f"the UNet is conditioned on {got} numbers about an image, the pipeline gives {wanted} "
                "(requires_aesthetics_score in model_index.json; in the UNet's config addition_time_embed_dim and "
                "projection_class_embeddings_input_dim)"
            )
        if not isinstance(second.eos_token_id, int):
            faults.append(f"eos_token_id {second.eos_token_id!r} of the second text encoder is not one token")
        return faults

    def scheduler_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return stable_diffusion_config(config, xl=True)

    def unused_options(self, model: Model) -> Mapping[str, str]:
        if model.is_refiner:
            return dict.fromkeys((*SECOND_PROMPTS, *TARGET_SIZES), "it is a refiner")
        one_encoder = SECOND_PROMPTS if model.text.first is None else ()
        return dict.fromkeys((*AESTHETICS, *one_encoder), "it is not a refiner")

    def size_conditions(
        self, model: Model, height: int, width: int, options: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
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
            np.array([*original, *crop, *target], np.float32),
            np.array([*negative_original, *negative_crop, *negative_target], np.float32),
        )

    def zeros_for_no_negative(self, files: ModelFiles) -> bool:
        return _flag(files, "force_zeros_for_empty_prompt", True)

    def is_refiner(self, files: ModelFiles) -> bool:
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
