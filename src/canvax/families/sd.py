"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, a UNet and a VAE (Rombach et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from canvax.families.base import (
    AESTHETICS,
    SECOND_PROMPTS,
    SIZES,
    TARGET_SIZES,
    Family,
    Model,
    latent_consistency,
    read_clip_tokenizer,
    read_clip_unet_vae,
)
from canvax.models.networks import Networks
from canvax.models.text import FIRST
from canvax.samplers import stable_diffusion_config
from canvax.weights.files import ModelFiles


def read(files: ModelFiles) -> Networks:
    """Its UNet is conditioned on the prompt alone."""
    return read_clip_unet_vae(files, [FIRST], _faults)


def _faults(networks: Networks, files: ModelFiles) -> list[str]:
    del files
    kind = networks.config.addition_embed_type
    return [f"addition_embed_type {kind!r} of the UNet does not suit its text encoders"] if kind else []


def _unused_options(model: Model) -> Mapping[str, str]:
    del model
    return dict.fromkeys((*SECOND_PROMPTS, *SIZES, *TARGET_SIZES, *AESTHETICS), "it is not an SDXL model")


SD = Family(
    name="sd",
    pipelines=(
        *("StableDiffusionPipeline", "FlaxStableDiffusionPipeline", "LatentConsistencyModelPipeline"),
        *("StableDiffusionInpaintPipeline", "FlaxStableDiffusionInpaintPipeline"),
        *("StableDiffusionImg2ImgPipeline", "FlaxStableDiffusionImg2ImgPipeline"),
    ),
    read=read,
    tokenizer=read_clip_tokenizer,
    defaults_of=latent_consistency,
    scheduler_config=partial(stable_diffusion_config, xl=False),
    unused_options=_unused_options,
)
