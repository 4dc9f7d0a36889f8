"""The published models by name, as configs: what can be planned, measured or initialised without a checkpoint."""

from __future__ import annotations

from canvax.models.configs import (
    SD15_TEXT,
    SD15_UNET,
    SD21_TEXT,
    SD21_UNET,
    SD_VAE,
    SDXL_REFINER_UNET,
    SDXL_TEXT,
    SDXL_TEXT_2,
    SDXL_UNET,
    SDXL_VAE,
)
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import TextEncoders

PRESETS = {
    "sd14": Networks(UNetDenoiser(SD15_UNET), SD_VAE, TextEncoders(SD15_TEXT)),
    "sd15": Networks(UNetDenoiser(SD15_UNET), SD_VAE, TextEncoders(SD15_TEXT)),
    "sd21": Networks(UNetDenoiser(SD21_UNET), SD_VAE, TextEncoders(SD21_TEXT), "v_prediction"),
    "sdxl": Networks(UNetDenoiser(SDXL_UNET), SDXL_VAE, TextEncoders(SDXL_TEXT, SDXL_TEXT_2)),
    "sdxl-refiner": Networks(UNetDenoiser(SDXL_REFINER_UNET), SDXL_VAE, TextEncoders(None, SDXL_TEXT_2)),
}
"""Stable Diffusion 1.4 and 1.5 are one architecture."""
