"""FLUX.3 image klein, base and distilled (Black Forest Labs 2026).

It has a language model read at eight layers, a transformer of three modes and the autoencoder of FLUX.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from canvax.errors import CheckpointError
from canvax.families.base import Defaults, Family, Shapes, SingleFile, check_components, parsed
from canvax.families.flux2 import VAE
from canvax.families.language import (
    FLOW,
    QWEN3_VL,
    QWEN3_VL_4B,
    TOKENIZER,
    check_fit,
    read_padding_tokenizer,
)
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.flux2_vae import Flux2Autoencoder, Flux2VaeConfig
from canvax.models.flux3 import LENGTHS, PAD_POSITION, TEMPLATE, Flux3Config, Flux3Denoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoders
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": ("Flux3Transformer2DModel",),
    FIRST: ("Qwen3VLForConditionalGeneration", "Qwen3VLModel"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3VLProcessor", "AutoProcessor"),
    "vae": ("AutoencoderKLFlux2",),
    "scheduler": (),
}

_BLOCKS = {
    "content_mode_blocks.image.*": "mode_blocks.image.*",
    "content_mode_blocks.image_cond.*": "mode_blocks.image_cond.*",
    "txt_mode_blocks.*": "txt_mode_blocks.*",
    "single_blocks.*": "single_transformer_blocks.*",
}
"""Names of the blocks by the authors, and by diffusers."""

STACKS = tuple(
    rule
    for block in _BLOCKS.values()
    for rule in (
        Rule(f"{block}.ff.linear_in", (f"{block}.ff.gate", f"{block}.ff.up")),
        Rule(f"{block}.ff.linear_out", f"{block}.ff.down"),
    )
)
"""Layers of the transformer that diffusers stores as one."""

NAMES = (
    *STACKS,
    *(
        Rule(f"{external}.{layer}", internal)
        for external, block in _BLOCKS.items()
        for layer, internal in (
            *((f"{part}_proj", f"{block}.attn.to_{part}") for part in "qkv"),
            ("attn_out", f"{block}.attn.to_out.0"),
            ("mlp_in", (f"{block}.ff.gate", f"{block}.ff.up")),
            ("mlp_out", f"{block}.ff.down"),
            ("norm.query_norm.scale", f"{block}.attn.norm_q.weight"),
            ("norm.key_norm.scale", f"{block}.attn.norm_k.weight"),
            ("norm.query_norm", f"{block}.attn.norm_q"),
            ("norm.key_norm", f"{block}.attn.norm_k"),
        )
    ),
    *(
        Rule(f"{part}.{mode}.lin", f"{part}.{mode}.linear")
        for part in ("early_stream_modulations", "single_stream_modulations")
        for mode in ("image", "image_cond", "txt")
    ),
    *(Rule(f"emb_in.{mode}", f"x_embedders.{mode}") for mode in ("image", "image_cond")),
    *(
        Rule(f"{external}.{layer}", f"{internal}.linear_{i}")
        for external, internal in (("time_in", "timestep_embedder"), ("ref_time_in", "target_timestep_embedder"))
        for i, layer in enumerate(("in_layer", "out_layer"), 1)
    ),
    Rule("txt_in", "context_embedder"),
    Rule("final_layer.image.linear", "proj_out"),
    Rule("final_layer.image.adaLN_modulation.1", "norm_out.linear", "swapped halves"),
)
"""Names of the transformer in diffusers, and in its authors' code and ComfyUI."""


def read(files: ModelFiles) -> Networks:
    """Return the networks; the transformer reads evenly spaced layers of the language model, to fill its input."""
    check_components(files, CLASSES)
    transformer, lm = parsed(Flux3Config, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    count, rest = divmod(transformer.joint_attention_dim, lm.hidden_size)
    if rest or not 0 < count < lm.num_hidden_layers:
        raise CheckpointError(
            f"{files}: its transformer reads text of width {transformer.joint_attention_dim}, and layers of the text "
            f"encoder have {lm.hidden_size}"
        )
    networks = _networks(transformer, lm, Flux2Autoencoder(parsed(Flux2VaeConfig, files, "vae")))
    latents = transformer.in_channels, networks.vae.latent_channels
    check_fit(files, latents=latents, text=(transformer.joint_attention_dim, networks.text.width))
    return networks


def _networks(transformer: Flux3Config, lm: DecoderConfig, vae: Flux2Autoencoder) -> Networks:
    count = transformer.joint_attention_dim // lm.hidden_size
    step = lm.num_hidden_layers // (count + 1)
    *earlier, tap = (step * i for i in range(1, count + 1))
    text = LanguageModel(lm, tap, tuple(earlier), LENGTHS, LENGTHS[-1], PAD_POSITION)
    return Networks(Flux3Denoiser(transformer), vae, TextEncoders((text,)), prediction="flow_prediction")


def _config(shapes: Shapes) -> dict[str, Any]:
    width, features = shapes["x_embedders.image.weight"]
    head = shapes["single_transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "_class_name": "Flux3Transformer2DModel",
        "in_channels": features,
        "cond_in_channels": shapes["x_embedders.image_cond.weight"][1],
        "num_layers": numbered(shapes, r"txt_mode_blocks\.(\d+)\."),
        "num_single_layers": numbered(shapes, r"single_transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_channels": shapes["timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": shapes["single_transformer_blocks.0.ff.down.weight"][1] / width,
        "axes_dims_rope": [head // 4] * 4,
        "rope_theta": 10000,
        "eps": 1e-6,
        "flow_map": "target_timestep_embedder.linear_1.weight" in shapes,
    }


def _index(config: Mapping[str, Any], stem: str) -> dict[str, Any]:
    del stem
    return {"_class_name": _PIPELINES[config["flow_map"]]}


_PIPELINES = "Flux3ModularPipeline", "Flux3DistilledModularPipeline"

FLUX3 = Family(
    name="flux3",
    title="FLUX.3",
    models="FLUX.3 klein",
    pipelines=_PIPELINES,
    read=read,
    tokenizer=partial(read_padding_tokenizer, template=TEMPLATE),
    classes=CLASSES,
    defaults=Defaults(num_inference_steps=50, guidance_scale=3.5),
    distilled=Defaults(num_inference_steps=16, guidance_scale=1.0),
    names=NAMES,
    stacks=STACKS,
    single_file=SingleFile(
        marks=("early_stream_modulations.",),
        config=_config,
        configs={FIRST: QWEN3_VL, "vae": VAE, "scheduler": FLOW | {"shift": 6.93}},
        tokenizer=TOKENIZER,
        index=_index,
        unused=("repa_projectors.",),
    ),
    presets={
        name: _networks(Flux3Config(flow_map=name.endswith("klein")), QWEN3_VL_4B, Flux2Autoencoder(Flux2VaeConfig()))
        for name in ("flux3-klein", "flux3-klein-base")
    },
)
