"""The published models by name, as configs: what can be planned, measured or initialised without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

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
    UNetConfig,
    VaeConfig,
)
from canvax.models.text import TextEncoders
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.params import Spec


@dataclass(frozen=True)
class Preset:
    """A model's networks.

    Attributes:
        unet: config of the UNet.
        vae: config of the autoencoder.
        text: configs of the text encoders.
        prediction: what the UNet was trained to give, "epsilon" or "v_prediction".
    """

    unet: UNetConfig
    vae: VaeConfig
    text: TextEncoders
    prediction: str = "epsilon"

    @property
    def specs(self) -> dict[str, Spec]:
        """Declared parameters of each component."""
        return {"unet": unet_spec(self.unet), "vae": vae_spec(self.vae), **self.text.specs}


PRESETS = {
    "sd14": Preset(SD15_UNET, SD_VAE, TextEncoders(SD15_TEXT)),
    "sd15": Preset(SD15_UNET, SD_VAE, TextEncoders(SD15_TEXT)),
    "sd21": Preset(SD21_UNET, SD_VAE, TextEncoders(SD21_TEXT), "v_prediction"),
    "sdxl": Preset(SDXL_UNET, SDXL_VAE, TextEncoders(SDXL_TEXT, SDXL_TEXT_2)),
    "sdxl-refiner": Preset(SDXL_REFINER_UNET, SDXL_VAE, TextEncoders(None, SDXL_TEXT_2)),
}
"""Stable Diffusion 1.4 and 1.5 are one architecture."""
