"""FLUX.2 klein: a language model read at three layers, a double-stream transformer and a VAE (Black Forest Labs 2026).

FLUX.2 dev has the same ``Flux2Transformer2DModel``, but another text encoder, and is not supported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from canvax.errors import CheckpointError
from canvax.families.base import Defaults, Family, Shapes, SingleFile, check_components, parsed
from canvax.families.language import (
    FLOW,
    QWEN3,
    QWEN3_4B,
    SHIFT_BY_SIZE,
    TOKENIZER,
    check_fit,
    read_padding_tokenizer,
)
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.flux2 import ROWS, TEMPLATE, Flux2Config, Flux2Denoiser, taps
from canvax.models.flux2_vae import Flux2Autoencoder, Flux2VaeConfig
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoders
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": ("Flux2Transformer2DModel",),
    FIRST: ("Qwen3ForCausalLM", "Qwen3Model"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKLFlux2",),
    "scheduler": (),
}

_SINGLE = "single_transformer_blocks.*"


def _parallel(first: str, last: str) -> list[Rule]:
    """Return the rules for the two arrays of a parallel block, whose first parts are as wide as a token."""
    parts = tuple(f"{_SINGLE}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "ff.gate", "ff.up"))
    return [
        Rule(first, parts, rows=(0, 0, 0, 1, 1)),
        Rule(last, (f"{_SINGLE}.attn.to_out.0", f"{_SINGLE}.ff.down"), rows=(0, 1), axis=1),
    ]


def attention_norms(external: str, internal: str) -> list[Rule]:
    """Return the rules for normalisations of queries and keys; the authors call the weight scale, ComfyUI weight."""
    pairs = [(f"{external}.norm.{part}_norm", f"{internal}_{part[0]}") for part in ("query", "key")]
    return [Rule(f"{old}{end}", f"{new}{weight}") for old, new in pairs
            for end, weight in ((".scale", ".weight"), ("", ""))]  # fmt: skip


def _stream(external: str, mlp: str, projections: tuple[str, ...], out: str, norm: str) -> list[Rule]:
    """Return the rules for a stream of a double block."""
    double = "transformer_blocks.*"
    return [
        Rule(f"{external}_mlp.2", f"{double}.{mlp}.down"),
        Rule(f"{external}_mlp.0", (f"{double}.{mlp}.gate", f"{double}.{mlp}.up")),
        Rule(f"{external}_attn.qkv", tuple(f"{double}.attn.{name}" for name in projections)),
        Rule(f"{external}_attn.proj", f"{double}.attn.{out}"),
        *attention_norms(f"{external}_attn", f"{double}.attn.{norm}"),
    ]


STACKS = (
    *(
        Rule(f"transformer_blocks.*.{mlp}.{external}", internal)
        for mlp in ("ff", "ff_context")
        for external, internal in (
            ("linear_in", (f"transformer_blocks.*.{mlp}.gate", f"transformer_blocks.*.{mlp}.up")),
            ("linear_out", f"transformer_blocks.*.{mlp}.down"),
        )
    ),
    *_parallel(f"{_SINGLE}.attn.to_qkv_mlp_proj", f"{_SINGLE}.attn.to_out"),
)
"""Layers of the transformer that diffusers stores as one."""

NAMES = (
    *STACKS,
    Rule("img_in", "x_embedder"),
    Rule("txt_in", "context_embedder"),
    Rule("final_layer.linear", "proj_out"),
    Rule("final_layer.adaLN_modulation.1", "norm_out.linear", "swapped halves"),
    *(
        Rule(f"{kind}.{layer}", f"time_guidance_embed.{internal}.linear_{i}")
        for kind, internal in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder"))
        for i, layer in enumerate(("in_layer", "out_layer"), 1)
    ),
    *(
        Rule(f"{name}.lin", f"{name}.linear")
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    ),
    *_stream("double_blocks.*.img", "ff", ("to_q", "to_k", "to_v"), "to_out.0", "norm"),
    *_stream(
        "double_blocks.*.txt", "ff_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "norm_added"
    ),
    *_parallel("single_blocks.*.linear1", "single_blocks.*.linear2"),
    *attention_norms("single_blocks.*", f"{_SINGLE}.attn.norm"),
)
"""Names of the transformer in diffusers, and in its authors' code and ComfyUI."""


def read(files: ModelFiles) -> Networks:
    """Return the networks; the transformer reads three layers of the language model."""
    check_components(files, CLASSES)
    transformer, lm = parsed(Flux2Config, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    if transformer.guidance_embeds:
        raise CheckpointError(
            f"{files}: its transformer reads the guidance scale (guidance_embeds), as that of FLUX.2 dev does; "
            "take FLUX.2 klein, whose transformer does not"
        )
    vae = Flux2Autoencoder(parsed(Flux2VaeConfig, files, "vae"))
    networks = _networks(transformer, lm, vae, is_distilled=bool(files.index.get("is_distilled")))
    check_fit(
        files,
        latents=(transformer.in_channels, vae.latent_channels),
        text=(transformer.joint_attention_dim, networks.text.width),
    )
    return networks


def _networks(transformer: Flux2Config, lm: DecoderConfig, vae: Flux2Autoencoder, *, is_distilled: bool) -> Networks:
    *earlier, tap = taps(lm.num_hidden_layers)
    text = TextEncoders((LanguageModel(lm, tap, tuple(earlier), (ROWS,), ROWS),))
    return Networks(Flux2Denoiser(transformer, is_distilled=is_distilled), vae, text, prediction="flow_prediction")


def empirical_mu(tokens: int, steps: int) -> float:
    """Return the shift for an image: linear in its tokens for 10 and 200 steps, interpolated for other steps."""
    few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    return many if tokens > 4300 else many + (many - few) / 190 * (steps - 200)


def _config(shapes: Shapes) -> dict[str, Any]:
    if "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes:
        raise ValueError("is FLUX.2 dev, whose text encoder canvax does not have; take FLUX.2 klein")
    width, features = shapes["x_embedder.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "_class_name": "Flux2Transformer2DModel",
        "in_channels": features,
        "num_layers": numbered(shapes, r"transformer_blocks\.(\d+)\."),
        "num_single_layers": numbered(shapes, r"single_transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": shapes["transformer_blocks.0.ff.down.weight"][1] / width,
        "axes_dims_rope": [head // 4] * 4,
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": False,
    }


VAE = {
    "_class_name": "AutoencoderKLFlux2",
    "block_out_channels": [128, 256, 512, 512],
    "force_upcast": True,
    "sample_size": 1024,
}

KLEIN_4B = Flux2Config(
    num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
)

FLUX2 = Family(
    name="flux2",
    title="FLUX.2",
    models="FLUX.2 klein",
    pipelines=("Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
    read=read,
    tokenizer=partial(read_padding_tokenizer, template=TEMPLATE),
    classes=CLASSES,
    defaults=Defaults(num_inference_steps=50, guidance_scale=4.0),
    distilled=Defaults(num_inference_steps=4, guidance_scale=1.0),
    mu=empirical_mu,
    names=NAMES,
    stacks=STACKS,
    single_file=SingleFile(
        marks=("double_stream_modulation_img.", "single_stream_modulation."),
        config=_config,
        configs={
            FIRST: QWEN3,
            "vae": VAE,
            "scheduler": FLOW | SHIFT_BY_SIZE | {"max_image_seq_len": 4096, "shift": 3.0},
        },
        tokenizer=TOKENIZER,
        stems=("base", "klein"),
    ),
    presets={"flux2-klein-4b": _networks(KLEIN_4B, QWEN3_4B, Flux2Autoencoder(Flux2VaeConfig()), is_distilled=True)},
)
