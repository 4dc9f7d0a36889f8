"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, a UNet and a VAE (Rombach et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvax.families.base import AESTHETICS, SECOND_PROMPTS, SIZES, TARGET_SIZES, Defaults, Family, Model
from canvax.models.networks import Networks
from canvax.models.text import FIRST
from canvax.samplers import stable_diffusion_config
from canvax.weights.files import ModelFiles


class StableDiffusionFamily(Family):
    """Its UNet is conditioned on the prompt alone."""

    name = "sd"
    pipelines = ("StableDiffusionPipeline", "FlaxStableDiffusionPipeline", "LatentConsistencyModelPipeline")
    pipelines += ("StableDiffusionInpaintPipeline", "FlaxStableDiffusionInpaintPipeline")
    pipelines += ("StableDiffusionImg2ImgPipeline", "FlaxStableDiffusionImg2ImgPipeline")
    defaults = Defaults()

    def encoders(self, files: ModelFiles) -> list[str]:
        return [FIRST]

    def faults(self, networks: Networks, files: ModelFiles) -> list[str]:
        kind = networks.denoiser.cfg.addition_embed_type
        return [f"addition_embed_type {kind!r} of the UNet does not suit its text encoders"] if kind else []

    def scheduler_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return stable_diffusion_config(config, xl=False)

    def unused_options(self, model: Model) -> Mapping[str, str]:
        return dict.fromkeys((*SECOND_PROMPTS, *SIZES, *TARGET_SIZES, *AESTHETICS), "it is not an SDXL model")

    def size_conditions(self, model: Model, height: int, width: int, options: Mapping[str, Any]) -> None:
        return None

    def zeros_for_no_negative(self, files: ModelFiles) -> bool:
        return False
