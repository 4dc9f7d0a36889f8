"""Qwen-Image, 2512 and Edit: a language model, a double-stream transformer and Wan's VAE (Qwen Team 2025).

Edit 2509 and 2511 see a small copy of each reference with the tower of Qwen2.5-VL, and read latents of a larger one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from canvax.families.base import Defaults, Family, Shapes, SingleFile, check_components, parsed
from canvax.families.language import FLOW, QWEN3_VL, SHIFT_BY_SIZE, TOKENIZER, check_fit, read_chat_tokenizer
from canvax.models.decoder_lm import SHORT, DecoderConfig, LanguageModel
from canvax.models.denoiser import MOST_REFERENCES
from canvax.models.krea2 import DROPPED, TEMPLATE  # those of this model, which Krea 2 took over
from canvax.models.networks import Networks
from canvax.models.qwen25_vision import PICTURE, WindowedConfig
from canvax.models.qwen_image_1 import PATCH, QwenImage1Config, QwenImage1Denoiser
from canvax.models.qwen_vision import SeeingLanguageModel
from canvax.models.text import FIRST, TextEncoder, TextEncoders
from canvax.models.wan_vae import WanAutoencoder, WanVaeConfig
from canvax.samplers import NoiseSchedule
from canvax.tokenizers.chat import ChatTokenizer
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": (QwenImage1Config.CLASS,),
    FIRST: ("Qwen2_5_VLForConditionalGeneration",),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKLQwenImage",),
    "scheduler": (),
}

EDIT = "QwenImageEditPlusPipeline"
"""The pipeline of Edit 2509 and 2511."""

FIRST_EDIT = "QwenImageEditPipeline"
"""The pipeline of the first Edit: one reference, which the tower sees in the size that the transformer reads."""

SYSTEM = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n"
)

EDIT_TEMPLATE = SYSTEM + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""Chat template of Edit. The features of its first ``EDIT_DROPPED`` tokens, those of ``SYSTEM`` and the next three, are
dropped."""

EDIT_DROPPED = 64

DEFAULTS = Defaults(num_inference_steps=50, guidance_scale=4.0)

LENGTHS = (128, 256, 512, 1152)
"""Text lengths that programs are compiled for."""

_BLOCK = "transformer_blocks.*"

MARK = "__index_timestep_zero__"
"""Empty array in ComfyUI's files of Edit 2511."""

NAMES = tuple(
    Rule(f"{_BLOCK}.{stream}_{external}", f"{_BLOCK}.{norm if external == 'mod.1' else ff}.{internal}")
    for stream, norm, ff in (("img", "norm1", "ff"), ("txt", "norm1_context", "ff_context"))
    for external, internal in (("mod.1", "linear"), ("mlp.net.0.proj", "fc1"), ("mlp.net.2", "fc2"))
)
"""Names of layers in diffusers and ComfyUI; canvax has those of FLUX.1's blocks."""

QWEN25_VL = QWEN3_VL | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": QWEN3_VL["text_config"] | {
        "model_type": "qwen2_5_vl_text",
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"model_type": "qwen2_5_vl_vision"},
}  # fmt: skip
"""Config fields that the arrays of a Qwen2.5-VL do not determine."""

QWEN25_VL_7B = DecoderConfig(
    model_type="qwen2_5_vl_text", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4,
)  # fmt: skip


def read(files: ModelFiles) -> Networks:
    """Return the networks; the transformer reads the language model's last state.

    A file of the language model may lack the vision tower: then Edit does not edit.
    """
    check_components(files, CLASSES)
    transformer, lm = parsed(QwenImage1Config, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    vae = WanAutoencoder(parsed(WanVaeConfig, files, "vae"))
    latents = transformer.in_channels, PATCH**2 * vae.latent_channels
    check_fit(files, latents=latents, text=(transformer.joint_attention_dim, lm.hidden_size))
    sees = _is_edit(files) and files.config(FIRST).get("vision_config", {"depth": 0}).get("depth", 1)
    eyes = parsed(WindowedConfig, files, FIRST) if sees else None
    if eyes and files.index["_class_name"] == FIRST_EDIT:
        eyes = replace(eyes, copies=False)
    return _networks(transformer, lm, vae, eyes, EDIT_DROPPED if _is_edit(files) else DROPPED)


def _is_edit(files: ModelFiles) -> bool:
    return files.index.get("_class_name") in (EDIT, FIRST_EDIT)


def _networks(
    transformer: QwenImage1Config, lm: DecoderConfig, vae: WanAutoencoder, eyes: WindowedConfig | None, dropped: int
) -> Networks:
    several = not eyes or eyes.copies
    picture = PICTURE if several else PICTURE.removeprefix("Picture {}: ")
    sees = partial(SeeingLanguageModel, eyes=eyes, picture=picture, between="", whole=True) if eyes else LanguageModel
    short = tuple(length for length in SHORT if length > dropped)
    text = sees(lm, lm.num_hidden_layers, lengths=LENGTHS, most=dropped + 1024, short=short)
    denoiser = QwenImage1Denoiser(transformer, dropped, MOST_REFERENCES if several else 1, edits=eyes is not None)
    return Networks(denoiser, vae, TextEncoders((text,)), prediction="flow_prediction")


def _tokenizer(files: ModelFiles, encoder: TextEncoder) -> ChatTokenizer:
    return read_chat_tokenizer(files, encoder, EDIT_TEMPLATE if _is_edit(files) else TEMPLATE, empty=" ")


def _defaults(networks: Networks, schedule: NoiseSchedule | None) -> Defaults:
    del schedule
    facts = networks.denoiser.facts
    return replace(DEFAULTS, num_inference_steps=40) if facts.edits and facts.most_references > 1 else DEFAULTS


def _config(shapes: Shapes) -> dict[str, Any]:
    width, features = shapes["img_in.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "_class_name": QwenImage1Config.CLASS,
        "in_channels": features,
        "out_channels": shapes["proj_out.weight"][0] // PATCH**2,
        "num_layers": numbered(shapes, r"transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": [head // 8, head // 16 * 7, head // 16 * 7],  # 16, 56 and 56 of the released models
        **({"zero_cond_t": True} if MARK in shapes else {}),
    }


def _by_name(stem: str) -> dict[str, Any]:
    """Return further fields of the config: references are at time 0 from Edit 2511 on."""
    return {"zero_cond_t": True} if "edit" in stem.lower() and "2511" in stem else {}


def _index(config: Mapping[str, Any], stem: str) -> dict[str, Any]:
    """Return the pipeline, that of Edit for files with its name or mark; names of the first Edit have no number."""
    if config.get("zero_cond_t") or re.search(r"edit.*(25\d\d|plus)", stem.lower()):
        return {"_class_name": EDIT}
    return {"_class_name": FIRST_EDIT} if "edit" in stem.lower() else {}


def file_title(names: Collection[str], stem: str) -> str:
    """Return the display name of the model of a transformer's file."""
    marked = any(name.endswith(MARK) for name in names)
    return "Qwen-Image-Edit" if _index({"zero_cond_t": marked}, stem) else QWEN_IMAGE_1.title


QWEN_IMAGE_1 = Family(
    name="qwen-image-1",
    title="Qwen-Image 1",
    pipelines=("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", EDIT, FIRST_EDIT),
    read=read,
    tokenizer=_tokenizer,
    classes=CLASSES,
    defaults=DEFAULTS,
    defaults_by_networks=_defaults,
    guidance="cfg_norm",
    names=NAMES,
    stacks=NAMES,
    single_file=SingleFile(
        marks=("txt_norm.", "transformer_blocks.0.img_mod."),
        config=_config,
        named=_by_name,
        index=_index,
        unused=(MARK,),
        configs={
            FIRST: QWEN25_VL,
            "vae": {"_class_name": "AutoencoderKLQwenImage"},
            "scheduler": FLOW | SHIFT_BY_SIZE | {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
        },
        tokenizer=TOKENIZER,
    ),
    presets={
        "qwen-image": _networks(QwenImage1Config(), QWEN25_VL_7B, WanAutoencoder(WanVaeConfig()), None, DROPPED),
        "qwen-image-edit-2511": _networks(
            QwenImage1Config(zero_cond_t=True),
            QWEN25_VL_7B,
            WanAutoencoder(WanVaeConfig()),
            WindowedConfig(),
            EDIT_DROPPED,
        ),
    },
)
