"""Krea 2 Raw and Turbo: a language model read at twelve layers, a single-stream transformer and a VAE (Krea 2026)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from canvax.errors import CheckpointError
from canvax.families.base import Defaults, Family, Shapes, SingleFile, check_components, parsed
from canvax.families.language import (
    FLOW,
    QWEN3_VL,
    QWEN3_VL_4B,
    SHIFT_BY_SIZE,
    TOKENIZER,
    check_fit,
    read_chat_tokenizer,
)
from canvax.models.decoder_lm import SHORT, DecoderConfig, LanguageModel
from canvax.models.krea2 import LENGTHS, PROMPT, TAPS, TEMPLATE, Krea2Config, Krea2Denoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoders
from canvax.models.wan_vae import WanAutoencoder, WanVaeConfig
from canvax.samplers import NoiseSchedule, Scheduler, from_scheduler_config
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": ("Krea2Transformer2DModel",),
    FIRST: ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKLQwenImage",),
    "scheduler": (),
}

TURBO_MU = 1.15


NAMES = (
    Rule("first", "img_in"),
    Rule("tmlp.0", "time_embed.linear_1"),
    Rule("tmlp.2", "time_embed.linear_2"),
    Rule("tproj.1", "time_mod_proj"),
    Rule("txtmlp.0.scale", "txt_in.norm.weight"),
    Rule("txtmlp.1", "txt_in.linear_1"),
    Rule("txtmlp.3", "txt_in.linear_2"),
    Rule("txtfusion.projector", "text_fusion.projector"),
    Rule("last.linear", "final_layer.linear"),
    Rule("last.norm.scale", "final_layer.norm.weight"),
    Rule("last.modulation.lin", "final_layer.scale_shift_table"),
    *(
        Rule(f"{blocks}.*.{external}", f"{our_blocks}.*.{internal}", "six rows in one" if external == "mod.lin" else "")
        for blocks, our_blocks in (
            ("blocks", "transformer_blocks"),
            ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
            ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
        )
        for external, internal in (
            *((f"attn.w{part}", f"attn.to_{part}") for part in "qkv"),
            ("attn.wo", "attn.to_out.0"),
            ("attn.gate", "attn.to_gate"),
            ("attn.qknorm.qnorm.scale", "attn.norm_q.weight"),
            ("attn.qknorm.knorm.scale", "attn.norm_k.weight"),
            *((f"mlp.{part}", f"ff.{part}") for part in ("gate", "up", "down")),
            ("prenorm.scale", "norm1.weight"),
            ("postnorm.scale", "norm2.weight"),
            ("mod.lin", "scale_shift_table"),
        )
    ),
)
"""Names of the transformer in its authors' code and ComfyUI."""


def read(files: ModelFiles) -> Networks:
    """Return the networks; the transformer reads the layers of the language model that the index names."""
    check_components(files, CLASSES)
    transformer, lm = parsed(Krea2Config, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    vae = WanAutoencoder(parsed(WanVaeConfig, files, "vae"))
    taps = files.index.get("text_encoder_select_layers") or TAPS
    if not _is_rising(taps, lm.num_hidden_layers) or len(taps) != transformer.num_text_layers:
        wanted = f"{transformer.num_text_layers} of {lm.num_hidden_layers} layers in order"
        raise CheckpointError(
            f"{files}: its model_index.json has text_encoder_select_layers={taps!r:.99}, not {wanted}"
        )
    if (patch := files.index.get("patch_size", 2)) != 2:
        raise CheckpointError(f"{files}: its model_index.json has patch_size={patch!r:.80} (supported: 2)")
    check_fit(
        files,
        latents=(transformer.in_channels, 4 * vae.latent_channels),
        text=(transformer.text_hidden_dim, lm.hidden_size),
    )
    return _networks(transformer, lm, vae, taps)


def _networks(transformer: Krea2Config, lm: DecoderConfig, vae: WanAutoencoder, taps: Sequence[int]) -> Networks:
    *earlier, tap = taps
    text = TextEncoders((LanguageModel(lm, tap, tuple(earlier), LENGTHS, PROMPT, short=SHORT[1:]),))
    return Networks(Krea2Denoiser(transformer), vae, text, prediction="flow_prediction")


def _is_rising(taps: object, layers: int) -> bool:
    """Return whether these are ascending indices of layers before the final normalisation."""
    if not isinstance(taps, list | tuple) or not all(type(tap) is int for tap in taps):
        return False
    return bool(taps) and list(taps) == sorted(set(taps)) and taps[0] >= 0 and 0 < taps[-1] < layers


def _scheduler(config: Mapping[str, Any], files: ModelFiles) -> Scheduler:
    """Return the scheduler of a config; Turbo's shift is the same for all sizes."""
    scheduler = from_scheduler_config(config)
    if not (schedule := scheduler.schedule).size_shift or not files.index.get("is_distilled"):
        return scheduler
    return replace(scheduler, schedule=replace(schedule.with_mu(TURBO_MU), size_shift=None))


def _is_turbo(schedule: NoiseSchedule) -> bool:
    return not schedule.size_shift


def _config(shapes: Shapes) -> dict[str, Any]:
    sizes: dict[str, Any] = {"in_channels": shapes["img_in.weight"][1]}
    for prefix, block in (("", "transformer_blocks.0"), ("text_", "text_fusion.refiner_blocks.0")):
        head, inner = shapes[f"{block}.attn.norm_q.weight"][0], shapes[f"{block}.ff.gate.weight"][0]
        heads = [shapes[f"{block}.attn.to_{part}.weight"][0] // head for part in "qk"]
        names = [f"{prefix}{name}" for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
        sizes |= dict(zip(names, (*heads, inner), strict=True))
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "_class_name": "Krea2Transformer2DModel",
        "num_layers": numbered(shapes, r"transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        **sizes,
        "timestep_embed_dim": shapes["time_embed.linear_1.weight"][1],
        "text_hidden_dim": shapes["txt_in.norm.weight"][0],
        "num_text_layers": shapes["text_fusion.projector.weight"][-1],
        "num_layerwise_text_blocks": numbered(shapes, r"text_fusion\.layerwise_blocks\.(\d+)\."),
        "num_refiner_text_blocks": numbered(shapes, r"text_fusion\.refiner_blocks\.(\d+)\."),
        "axes_dims_rope": [head // 4, head // 8 * 3, head // 8 * 3],  # 32, 48 and 48 in the released models
        "rope_theta": 1000.0,
        "norm_eps": 1e-5,
    }


KREA2 = Family(
    name="krea-2",
    title="Krea 2",
    pipelines=("Krea2Pipeline",),
    read=read,
    tokenizer=partial(read_chat_tokenizer, template=TEMPLATE),
    classes=CLASSES,
    defaults=Defaults(num_inference_steps=28, guidance_scale=4.5),
    distilled=Defaults(num_inference_steps=8, guidance_scale=0.0),
    is_distilled=_is_turbo,
    scheduler=_scheduler,
    guidance_off=0.0,
    names=NAMES,
    single_file=SingleFile(
        marks=("txtfusion.", "tproj."),
        config=_config,
        configs={
            FIRST: QWEN3_VL,
            "vae": {"_class_name": "AutoencoderKLQwenImage"},
            "scheduler": FLOW | SHIFT_BY_SIZE | {"max_image_seq_len": 6400},
        },
        tokenizer=TOKENIZER,
        stems=("raw", "turbo"),
        index={"patch_size": 2},
    ),
    presets={"krea-2": _networks(Krea2Config(), QWEN3_VL_4B, WanAutoencoder(WanVaeConfig()), TAPS)},
)
