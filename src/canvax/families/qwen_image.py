"""Qwen-Image-2.1 and Turbo: a language model, a causal transformer and an autoencoder with alpha (Qwen Team 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from canvax.errors import CheckpointError, HintWarning, warn
from canvax.families.base import Defaults, Family, Shapes, SingleFile, check_components, parsed
from canvax.families.language import (
    FLOW,
    QWEN3_VL,
    SHIFT_BY_SIZE,
    TOKENIZER,
    check_fit,
    read_chat_tokenizer,
)
from canvax.models.decoder_lm import SHORT, DecoderConfig, LanguageModel
from canvax.models.networks import Networks
from canvax.models.qwen_image import LENGTHS, TEMPLATE, QwenImageConfig, QwenImageDenoiser
from canvax.models.qwen_vae import QwenAutoencoder, QwenVaeConfig
from canvax.models.qwen_vision import SeeingLanguageModel, VisionConfig
from canvax.models.text import FIRST, TextEncoders
from canvax.samplers import NoiseSchedule, Scheduler, from_scheduler_config
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

PROCESSOR = "processor"
"""The folder of the tokenizer."""

CLASSES = {
    "transformer": ("QwenImage21Transformer2DModel",),
    FIRST: ("Qwen3VLForConditionalGeneration", "Qwen3VLModel"),
    PROCESSOR: ("Qwen3VLProcessor",),
    "vae": ("AutoencoderKLQwenImage21",),
    "scheduler": (),
}

NAMES = (
    Rule(
        "transformer_blocks.*.img_mlp.gate_up",
        ("transformer_blocks.*.img_mlp.gate_layer", "transformer_blocks.*.img_mlp.proj"),
    ),
)
"""Names of the transformer in ComfyUI: those of diffusers, with gate and values of the feed-forward as one array."""

TEXT = QWEN3_VL | {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "vision_config": QWEN3_VL["vision_config"] | {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
"""Config fields that the arrays of a Qwen3-VL-8B do not determine."""

MODULAR = "QwenImage21ModularPipeline", "QwenImage21TurboModularPipeline"
"""Modular pipelines of diffusers."""

DISTILLED = Defaults(num_inference_steps=8, guidance_scale=1.0)

QWEN3_VL_8B = DecoderConfig(
    model_type="qwen3_vl_text", hidden_size=4096, intermediate_size=12288, head_dim=128, rope_theta=5e6
)


def read(files: ModelFiles) -> Networks:
    """Return the networks of a checkpoint; the transformer reads the last layer of the language model.

    A file of the language model may lack the vision tower: then the model does not edit.
    """
    check_components(files, CLASSES)
    transformer, lm = parsed(QwenImageConfig, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    vae = QwenAutoencoder(parsed(QwenVaeConfig, files, "vae"))
    latents = transformer.in_channels, vae.latent_channels
    check_fit(files, latents=latents, text=(transformer.context_in_dim, lm.hidden_size))
    eyes = parsed(VisionConfig, files, FIRST) if files.config(FIRST).get("vision_config", {}).get("depth") else None
    return _networks(transformer, lm, vae, eyes)


def _networks(
    transformer: QwenImageConfig, lm: DecoderConfig, vae: QwenAutoencoder, eyes: VisionConfig | None
) -> Networks:
    kind = LanguageModel if eyes is None else partial(SeeingLanguageModel, eyes=eyes)
    text = kind(
        lm, lm.num_hidden_layers, lengths=LENGTHS, most=LENGTHS[-1], normalised=False, tokenizer=PROCESSOR, short=SHORT
    )
    denoiser = QwenImageDenoiser(transformer, edits=eyes is not None)
    return Networks(denoiser, vae, TextEncoders((text,)), prediction="flow_prediction")


def _scheduler(config: Mapping[str, Any], files: ModelFiles) -> Scheduler:
    """Return the scheduler of a config; the index of Turbo has the times of its steps, a modular one may omit them."""
    scheduler, times = from_scheduler_config(config), files.index.get("sample_sigmas")
    steps, guessed = DISTILLED.num_inference_steps, times is None and files.index.get("is_distilled")
    if guessed or (times is None and files.index["_class_name"] == MODULAR[1]):
        times = [1 - step / steps for step in range(steps)]
    if guessed:
        warn(
            HintWarning(
                f"{files}: the times of Turbo's steps are in the folder of its checkpoint and in no file; {steps} even "
                "ones are used. Load that folder, or give the times in a call: sigmas"
            )
        )
    if times is None:
        return scheduler
    falls = isinstance(times, list) and all(isinstance(time, int | float) for time in times)
    if not falls or not times or sorted({*times, 0.0, 1.0}, reverse=True)[-len(times) - 1 :] != [*times, 0.0]:
        raise CheckpointError(
            f"{files}: its model_index.json has sample_sigmas={times!r:.99}, not times in 0..1 that fall"
        )
    return replace(scheduler, schedule=replace(scheduler.schedule, run_times=tuple(map(float, times))))


def _is_turbo(schedule: NoiseSchedule) -> bool:
    return bool(schedule.run_times)


def _config(shapes: Shapes) -> dict[str, Any]:
    width, features = shapes["img_in.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "_class_name": "QwenImage21Transformer2DModel",
        "in_channels": features,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": numbered(shapes, r"transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "context_in_dim": shapes["txt_in.in_layer.weight"][1],
        "mlp_ratio": shapes["transformer_blocks.0.img_mlp.proj.weight"][0] // width,
        "axes_dims_rope": [head // 8, head // 16 * 7, head // 16 * 7],  # 16, 56 and 56 of the released models
    }


QWEN_IMAGE = Family(
    name="qwen-image",
    title="Qwen-Image",
    models="Qwen-Image-2.1",
    pipelines=("QwenImage21Pipeline", *MODULAR),
    read=read,
    tokenizer=partial(read_chat_tokenizer, template=TEMPLATE, empty=" "),
    classes=CLASSES,
    defaults=Defaults(num_inference_steps=40, guidance_scale=1.0),
    distilled=DISTILLED,
    is_distilled=_is_turbo,
    scheduler=_scheduler,
    names=NAMES,
    single_file=SingleFile(
        marks=("txt_in.text_norm.", "modulation.1."),
        config=_config,
        configs={
            FIRST: TEXT,
            "vae": {"_class_name": "AutoencoderKLQwenImage21"},
            "scheduler": FLOW | SHIFT_BY_SIZE,
        },
        tokenizer=TOKENIZER,
        stems=("", "turbo"),
    ),
    presets={
        "qwen-image-2.1": _networks(QwenImageConfig(), QWEN3_VL_8B, QwenAutoencoder(QwenVaeConfig()), VisionConfig())
    },
)
