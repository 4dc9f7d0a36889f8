"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, a UNet and a VAE (Rombach et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvax.families.base import (
    CLASSES,
    LATENT_CONSISTENCY,
    Family,
    read_clip_tokenizer,
    read_clip_unet_vae,
)
from canvax.models.clip import clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.presets import SD15_TEXT, SD15_UNET, SD21_TEXT, SD21_UNET, SD_VAE
from canvax.models.text import FIRST
from canvax.samplers import Scheduler, from_scheduler_config, stable_diffusion_config
from canvax.weights.files import ModelFiles


def read(files: ModelFiles) -> Networks:
    """Return the networks; the UNet is conditioned only on the prompt."""
    return read_clip_unet_vae(files, [FIRST], _faults)


def _faults(networks: Networks, files: ModelFiles) -> list[str]:
    del files
    kind = networks.config.addition_embed_type
    return [f"addition_embed_type {kind!r} of the UNet does not suit its text encoders"] if kind else []


def _scheduler(config: Mapping[str, Any], files: ModelFiles) -> Scheduler:
    del files
    return from_scheduler_config(stable_diffusion_config(config, xl=False))


_SD15 = Networks(UNetDenoiser(SD15_UNET), SD_VAE, clip_encoders(SD15_TEXT))

SD = Family(
    name="sd",
    title="Stable Diffusion",
    models="Stable Diffusion 1.x, 2.x",
    pipelines=(
        *("StableDiffusionPipeline", "FlaxStableDiffusionPipeline", "LatentConsistencyModelPipeline"),
        *("StableDiffusionInpaintPipeline", "FlaxStableDiffusionInpaintPipeline"),
        *("StableDiffusionImg2ImgPipeline", "FlaxStableDiffusionImg2ImgPipeline"),
    ),
    read=read,
    tokenizer=read_clip_tokenizer,
    classes=CLASSES,
    distilled=LATENT_CONSISTENCY,
    scheduler=_scheduler,
    even_times=False,
    presets={
        "sd14": _SD15,
        "sd15": _SD15,
        "sd21": Networks(UNetDenoiser(SD21_UNET), SD_VAE, clip_encoders(SD21_TEXT), "v_prediction"),
    },
)
