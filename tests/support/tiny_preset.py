"""A model small enough that the TPU's compiler takes seconds for it."""

from __future__ import annotations

from dataclasses import replace

from canvax.models.clip import clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from tests.support.small_checkpoint import SHALLOW_UNET, TEXT, VAE

ONE_LEVEL = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
TINY = Networks(
    UNetDenoiser(SHALLOW_UNET),
    replace(VAE, block_out_channels=(32,), **ONE_LEVEL),
    clip_encoders(TEXT),
)
