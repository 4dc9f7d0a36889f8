"""A model small enough that the TPU's compiler takes seconds for it."""

from __future__ import annotations

from dataclasses import replace

from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import clip_encoders
from tests.support.small_checkpoint import TEXT, UNET, VAE

ONE_LEVEL = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
SHALLOW = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
TINY = Networks(
    UNetDenoiser(replace(UNET, block_out_channels=(32,), **SHALLOW)),
    replace(VAE, block_out_channels=(32,), **ONE_LEVEL),
    clip_encoders(TEXT),
)
