"""Networks as plain values and back, for other processes and for names of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, SECOND, clip_encoders


def describe(networks: Networks) -> dict[str, Any]:
    """Configs of the text encoders as ``text``, of the autoencoder as ``vae``, and of the denoiser by its component."""
    denoiser = networks.denoiser
    text = {name: asdict(config) for name, config in networks.text.parts.items()}
    return {"text": text, denoiser.component: asdict(denoiser.cfg), "vae": asdict(networks.vae)}


def networks_of(values: Mapping[str, Any]) -> Networks:
    """Inverse of ``describe``, for a UNet."""
    text = {name: ClipTextConfig.from_dict(config) for name, config in values["text"].items()}
    denoiser = UNetDenoiser(UNetConfig.from_dict(values["unet"]))
    return Networks(denoiser, VaeConfig.from_dict(values["vae"]), clip_encoders(text.get(FIRST), text.get(SECOND)))
