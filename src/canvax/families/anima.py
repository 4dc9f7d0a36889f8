"""Anima (CircleStone Labs 2026): Qwen3-0.6B, an adapter of texts, Cosmos-Predict2's transformer and Wan's VAE."""

from __future__ import annotations

from typing import Any

from canvax.families import flux
from canvax.families.base import SECOND_PROMPTS, Defaults, Family, Shapes, SingleFile, check_components, parsed
from canvax.families.language import FLOW, QWEN3, TOKENIZER, check_fit, read_chat_tokenizer
from canvax.models.anima import ADAPTER, AdapterConfig, AnimaText, CosmosConfig, CosmosDenoiser, TextAdapter
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoder
from canvax.models.wan_vae import WanAutoencoder, WanVaeConfig
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": ("CosmosTransformer3DModel",),
    ADAPTER: ("AnimaTextConditioner",),
    FIRST: ("Qwen3Model", "Qwen3ForCausalLM"),
    "t5_tokenizer": ("T5TokenizerFast", "T5Tokenizer"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKLQwenImage",),
    "scheduler": (),
}

QWEN3_06B = DecoderConfig(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, head_dim=128
)

NAMES = (
    Rule("x_embedder.proj.1", "patch_embed.proj"),
    Rule("t_embedder.1", "time_embed.t_embedder"),
    Rule("t_embedding_norm", "time_embed.norm"),
    *(
        Rule(f"{external}.{i}", f"{internal}.linear_{i}")
        for external, internal in (
            ("final_layer.adaln_modulation", "norm_out"),
            ("blocks.*.adaln_modulation_self_attn", "transformer_blocks.*.norm1"),
            ("blocks.*.adaln_modulation_cross_attn", "transformer_blocks.*.norm2"),
            ("blocks.*.adaln_modulation_mlp", "transformer_blocks.*.norm3"),
        )
        for i in (1, 2)
    ),
    *(
        Rule(f"blocks.*.{attention}.{external}", f"transformer_blocks.*.attn{i}.{internal}")
        for i, attention in enumerate(("self_attn", "cross_attn"), 1)
        for external, internal in (
            *((f"{part}_proj", f"to_{part}") for part in "qkv"),
            ("output_proj", "to_out.0"),
            ("q_norm", "norm_q"),
            ("k_norm", "norm_k"),
        )
    ),
    Rule("blocks.*.mlp.layer1", "transformer_blocks.*.ff.net.0.proj"),
    Rule("blocks.*.mlp.layer2", "transformer_blocks.*.ff.net.2"),
    Rule("final_layer.linear", "proj_out"),
)
"""Names of the transformer in its authors' code and ComfyUI."""


def read(files: ModelFiles) -> Networks:
    """Return the networks; the adapter reads the language model's last state."""
    check_components(files, CLASSES)
    transformer, lm = parsed(CosmosConfig, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    adapter, vae = parsed(AdapterConfig, files, ADAPTER), WanAutoencoder(parsed(WanVaeConfig, files, "vae"))
    check_fit(files, latents=(transformer.in_channels, vae.latent_channels), text=(adapter.source_dim, lm.hidden_size))
    check_fit(files, latents=(0, 0), text=(transformer.text_embed_dim, adapter.target_dim))
    return _networks(transformer, adapter, lm, vae, turbo=bool(files.index.get("is_distilled")))


def _networks(
    transformer: CosmosConfig, adapter: AdapterConfig, lm: DecoderConfig, vae: WanAutoencoder, *, turbo: bool = False
) -> Networks:
    text = AnimaText((LanguageModel(lm, lm.num_hidden_layers), TextAdapter(adapter)))
    return Networks(CosmosDenoiser(transformer, turbo), vae, text, prediction="flow_prediction")


def tokenizer(files: ModelFiles, encoder: TextEncoder) -> Any:
    """Return the language model's tokenizer, which has no chat template here, or T5's."""
    return read_chat_tokenizer(files, encoder, "{}") if encoder.component == FIRST else flux.tokenizer(files, encoder)


_BASE = Defaults(num_inference_steps=30, guidance_scale=4.0)


def _defaults(networks: Networks, *_: Any) -> Defaults:
    return Defaults(num_inference_steps=10, guidance_scale=1.0) if networks.denoiser.turbo else _BASE  # type: ignore


def _config(shapes: Shapes) -> dict[str, Any]:
    block = "transformer_blocks.0"
    width, features = shapes["patch_embed.proj.weight"]
    channels, head = shapes["proj_out.weight"][0] // 4, shapes[f"{block}.attn1.norm_q.weight"][0]
    return {
        "_class_name": CosmosConfig.CLASS,
        "in_channels": channels,
        "out_channels": channels,
        "concat_padding_mask": features // 4 > channels,
        "num_layers": numbered(shapes, r"transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "mlp_ratio": shapes[f"{block}.ff.net.2.weight"][1] / width,
        "text_embed_dim": shapes[f"{block}.attn2.to_k.weight"][1],
        "adaln_lora_dim": shapes[f"{block}.norm1.linear_1.weight"][0],
        "rope_scale": [1.0, 4.0, 4.0],
        "extra_pos_embed_type": None,
    }


def _adapter_config(shapes: Shapes) -> dict[str, Any]:
    vocabulary, target = shapes["embed.weight"]
    width, head = shapes["out_proj.weight"][1], shapes["blocks.0.self_attn.q_norm.weight"][0]
    return {
        "_class_name": AdapterConfig.CLASS,
        "source_dim": shapes["blocks.0.cross_attn.k_proj.weight"][1],
        "target_dim": target,
        "model_dim": width,
        "num_layers": numbered(shapes, r"blocks\.(\d+)\."),
        "num_attention_heads": width // head,
        "mlp_ratio": shapes["blocks.0.mlp.0.weight"][0] / width,
        "target_vocab_size": vocabulary,
    }


ANIMA = Family(
    name="anima",
    title="Anima",
    pipelines=("AnimaModularPipeline",),
    read=read,
    tokenizer=tokenizer,
    classes=CLASSES,
    defaults=_BASE,
    defaults_by_networks=_defaults,
    names=NAMES,
    single_file=SingleFile(
        marks=("llm_adapter.", "t_embedding_norm."),
        config=_config,
        configs={
            FIRST: QWEN3, "vae": {"_class_name": "AutoencoderKLQwenImage"},
            "scheduler": FLOW | {"use_dynamic_shifting": False, "shift": 3.0},
        },
        tokenizer=TOKENIZER,
        stems=("", "turbo"),
        inside={ADAPTER: ("llm_adapter.", _adapter_config)},
        packaged={"t5_tokenizer": flux.T5},
        unused=("pos_embedder.",),
    ),
    unused_options=dict.fromkeys(SECOND_PROMPTS, "its text encoders read the same prompt"),
    presets={"anima": _networks(CosmosConfig(), AdapterConfig(), QWEN3_06B, WanAutoencoder(WanVaeConfig()))},
)  # fmt: skip
