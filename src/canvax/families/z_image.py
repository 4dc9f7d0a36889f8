"""Z-Image and Z-Image-Turbo: a language model, a single-stream transformer and a VAE (Tongyi Lab 2025)."""

from __future__ import annotations

from functools import partial
from typing import Any

from canvax.families.base import Defaults, Family, Shapes, SingleFile, check_components, parsed, read_autoencoder
from canvax.families.language import (
    FLOW,
    QWEN3,
    QWEN3_4B,
    TOKENIZER,
    check_fit,
    read_chat_tokenizer,
)
from canvax.models.configs import VaeConfig
from canvax.models.decoder_lm import SHORT, DecoderConfig, LanguageModel
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoders
from canvax.models.z_image import TEMPLATE, ZImageConfig, ZImageDenoiser
from canvax.samplers import NoiseSchedule
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": ("ZImageTransformer2DModel",),
    FIRST: ("Qwen3Model", "Qwen3ForCausalLM"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    "scheduler": (),
}

LARGEST_TURBO_SHIFT = 4.0
"""Turbo has a shift of 3 and the base model of 6; their files do not differ otherwise."""

NAMES = (
    Rule("x_embedder", "all_x_embedder.2-1"),
    Rule("final_layer", "all_final_layer.2-1"),
    *(
        Rule(f"{blocks}.*.attention.{external}", internal)
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for external, internal in (
            ("qkv", tuple(f"{blocks}.*.attention.to_{part}" for part in "qkv")),
            ("out", f"{blocks}.*.attention.to_out.0"),
            ("q_norm", f"{blocks}.*.attention.norm_q"),
            ("k_norm", f"{blocks}.*.attention.norm_k"),
        )
    ),
)
"""Names of the transformer in its authors' code and ComfyUI, with queries, keys and values as one array."""


def read(files: ModelFiles) -> Networks:
    """Return the networks; the transformer reads the language model's last state but one."""
    check_components(files, CLASSES)
    transformer, lm = parsed(ZImageConfig, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    vae = read_autoencoder(files)
    check_fit(
        files, latents=(transformer.in_channels, vae.latent_channels), text=(transformer.cap_feat_dim, lm.hidden_size)
    )
    return _networks(transformer, lm, vae)


def _networks(transformer: ZImageConfig, lm: DecoderConfig, vae: Any) -> Networks:
    text = LanguageModel(lm, lm.num_hidden_layers - 1, short=SHORT)
    return Networks(ZImageDenoiser(transformer), vae, TextEncoders((text,)), prediction="flow_prediction")


def _is_turbo(schedule: NoiseSchedule) -> bool:
    return schedule.shift <= LARGEST_TURBO_SHIFT


def _config(shapes: Shapes) -> dict[str, Any]:
    width, features = shapes["all_x_embedder.2-1.weight"]
    head = shapes["layers.0.attention.norm_q.weight"][0]
    axes = [head // 4, head // 8 * 3, head // 8 * 3]  # 32, 48 and 48 of 128 channels in the released models
    return {
        "_class_name": "ZImageTransformer2DModel",
        "in_channels": features // 4,
        "dim": width,
        "n_layers": numbered(shapes, r"layers\.(\d+)\."),
        "n_refiner_layers": numbered(shapes, r"noise_refiner\.(\d+)\."),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "cap_feat_dim": shapes["cap_embedder.0.weight"][0],
        "axes_dims": axes,
        "axes_lens": [1536, 512, 512],
        "norm_eps": 1e-5,
        "qk_norm": True,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "all_patch_size": [2],
        "all_f_patch_size": [1],
    }


VAE = {
    "_class_name": "AutoencoderKL",
    "latent_channels": 16,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "force_upcast": True,
    "sample_size": 1024,
}
"""Config of FLUX.1's autoencoder."""

Z_IMAGE = Family(
    name="z-image",
    title="Z-Image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    read=read,
    tokenizer=partial(read_chat_tokenizer, template=TEMPLATE),
    classes=CLASSES,
    defaults=Defaults(num_inference_steps=50, guidance_scale=4.0),
    distilled=Defaults(num_inference_steps=8, guidance_scale=0.0),
    is_distilled=_is_turbo,
    guidance_off=0.0,
    names=NAMES,
    single_file=SingleFile(
        marks=("cap_pad_token", "noise_refiner."),
        config=_config,
        configs={FIRST: QWEN3, "vae": VAE, "scheduler": {**FLOW, "use_dynamic_shifting": False, "shift": 3.0}},
        tokenizer=TOKENIZER,
        stems=("base", "turbo"),
        base={"shift": 6.0},
        unused=("norm_final.weight",),
    ),
    presets={"z-image": _networks(ZImageConfig(), QWEN3_4B, VaeConfig.from_dict(VAE))},
)
