"""Configs of the networks of Stable Diffusion; the presets of all families are in ``canvax.families.known``."""

from __future__ import annotations

import dataclasses

from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig

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
