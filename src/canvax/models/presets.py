"""The published models by name, as configs: what can be planned, measured or initialised without a checkpoint."""

from __future__ import annotations

import dataclasses

from canvax.models.clip import clip_encoders
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.denoiser import UNetDenoiser
from canvax.models.flux2 import ROWS, Flux2Config, Flux2Denoiser, taps
from canvax.models.flux2_vae import Flux2Autoencoder, Flux2VaeConfig
from canvax.models.krea2 import LENGTHS, PROMPT, TAPS, Krea2Config, Krea2Denoiser
from canvax.models.networks import Networks
from canvax.models.text import TextEncoders
from canvax.models.wan_vae import WanAutoencoder, WanVaeConfig
from canvax.models.z_image import ZImageConfig, ZImageDenoiser

SD_VAE = VaeConfig(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
)
SD15_UNET = UNetConfig(sample_size=64, cross_attention_dim=768)
SD15_TEXT = ClipTextConfig(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, hidden_act="quick_gelu"
)
SD21_UNET = UNetConfig(
    sample_size=96,
    cross_attention_dim=1024,
    attention_head_dim=(5, 10, 20, 20),
    use_linear_projection=True,
    upcast_attention=True,
)
SD21_TEXT = ClipTextConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu"
)
SDXL_VAE = dataclasses.replace(SD_VAE, scaling_factor=0.13025)
SDXL_UNET = UNetConfig(
    sample_size=128,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(320, 640, 1280),
    attention_head_dim=(5, 10, 20),
    transformer_layers_per_block=(1, 2, 10),
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
SDXL_REFINER_UNET = UNetConfig(
    sample_size=128,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(384, 768, 1536, 1536),
    attention_head_dim=(6, 12, 24, 24),
    transformer_layers_per_block=4,
    cross_attention_dim=1280,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2560,
)
SDXL_TEXT = dataclasses.replace(SD15_TEXT, projection_dim=768, eos_token_id=2)
SDXL_TEXT_2 = ClipTextConfig(
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=32,
    num_attention_heads=20,
    hidden_act="gelu",
    projection_dim=1280,
    eos_token_id=2,
)

FLUX_VAE = dataclasses.replace(
    SD_VAE,
    latent_channels=16,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
QWEN3_4B = DecoderConfig(head_dim=128)
QWEN3_VL_4B = DecoderConfig(model_type="qwen3_vl_text", head_dim=128, rope_theta=5e6)
*_EARLIER, _TAP = taps(QWEN3_4B.num_hidden_layers)
FLUX2_KLEIN_4B = Flux2Config(
    num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
)

PRESETS = {
    "sd14": Networks(UNetDenoiser(SD15_UNET), SD_VAE, clip_encoders(SD15_TEXT)),
    "sd15": Networks(UNetDenoiser(SD15_UNET), SD_VAE, clip_encoders(SD15_TEXT)),
    "sd21": Networks(UNetDenoiser(SD21_UNET), SD_VAE, clip_encoders(SD21_TEXT), "v_prediction"),
    "sdxl": Networks(UNetDenoiser(SDXL_UNET), SDXL_VAE, clip_encoders(SDXL_TEXT, SDXL_TEXT_2)),
    "z-image": Networks(
        ZImageDenoiser(ZImageConfig()), FLUX_VAE, TextEncoders((LanguageModel(QWEN3_4B, 35),)), "flow_prediction"
    ),
    "flux2-klein-4b": Networks(
        Flux2Denoiser(FLUX2_KLEIN_4B, is_distilled=True),
        Flux2Autoencoder(Flux2VaeConfig()),
        TextEncoders((LanguageModel(QWEN3_4B, _TAP, tuple(_EARLIER), (ROWS,), ROWS),)),
        "flow_prediction",
    ),
    "krea-2": Networks(
        Krea2Denoiser(Krea2Config()),
        WanAutoencoder(WanVaeConfig()),
        TextEncoders((LanguageModel(QWEN3_VL_4B, TAPS[-1], TAPS[:-1], LENGTHS, PROMPT),)),
        "flow_prediction",
    ),
    "sdxl-refiner": Networks(UNetDenoiser(SDXL_REFINER_UNET), SDXL_VAE, clip_encoders(None, SDXL_TEXT_2)),
}
"""Stable Diffusion 1.4 and 1.5 are one architecture, and so are Z-Image and Z-Image-Turbo, Krea 2 Raw and Turbo."""
