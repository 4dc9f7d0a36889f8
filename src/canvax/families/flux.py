"""FLUX.1 schnell, dev, Krea dev, Kontext and Fill (Black Forest Labs 2024), and Chroma (Lodestone Rock 2025).

FLUX.1 has CLIP's pooled text, T5's encoder, a double-stream transformer and a VAE; Chroma has no CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError
from canvax.families.base import (
    TOKENIZERS,
    Defaults,
    Family,
    Shapes,
    SingleFile,
    check_components,
    parsed,
    read_autoencoder,
    read_clip_tokenizer,
)
from canvax.families.flux2 import attention_norms
from canvax.families.language import FLOW, SHIFT_BY_SIZE, check_fit, read_padding_tokenizer
from canvax.families.z_image import VAE
from canvax.models.clip import PooledClip
from canvax.models.configs import ClipTextConfig, VaeConfig
from canvax.models.flux import ChromaConfig, FluxConfig, FluxDenoiser, FluxText
from canvax.models.flux_controlnet import FluxControlConfig
from canvax.models.networks import Networks
from canvax.models.presets import SD15_TEXT
from canvax.models.t5 import TEMPLATE, T5Config, T5Encoder
from canvax.models.text import FIRST, SECOND, TextEncoder, TextEncoders
from canvax.samplers import NoiseSchedule
from canvax.weights.files import ModelFiles
from canvax.weights.formats import numbered
from canvax.weights.rules import Rule

CLASSES = {
    "transformer": ("FluxTransformer2DModel",),
    FIRST: ("CLIPTextModel",),
    TOKENIZERS[FIRST]: ("CLIPTokenizer", "CLIPTokenizerFast"),
    SECOND: ("T5EncoderModel",),
    TOKENIZERS[SECOND]: ("T5TokenizerFast", "T5Tokenizer"),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    "scheduler": (),
}

CHROMA_CLASSES = {
    **{part: kinds for part, kinds in CLASSES.items() if part not in (SECOND, TOKENIZERS[SECOND])},
    "transformer": ("ChromaTransformer2DModel",),
    FIRST: CLASSES[SECOND],
    TOKENIZERS[FIRST]: CLASSES[TOKENIZERS[SECOND]],
}

ROWS, FEW_ROWS = 512, 256
"""Tokens of a text, padding included, of most models and of schnell."""

KONTEXT = "kontext"
"""In the name of a pipeline and of a file."""

CLIP, T5 = (Path(__file__).parent.parent / "assets" / name / "tokenizer" for name in ("clip", "t5"))
"""Folders of tokenizers."""

_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"

STACKS = (
    *(
        Rule(f"{_DOUBLE}.{ff}.net.{external}", f"{_DOUBLE}.{ff}.{internal}")
        for ff in ("ff", "ff_context")
        for external, internal in (("0.proj", "fc1"), ("2", "fc2"))
    ),
    Rule(f"{_SINGLE}.proj_mlp", f"{_SINGLE}.ff.fc1"),
    Rule(f"{_SINGLE}.proj_out", (f"{_SINGLE}.attn.to_out.0", f"{_SINGLE}.ff.fc2"), rows=(1, 4), axis=1),
)
"""Layers of the transformer that diffusers stores as one, or under other names."""


def _stream(
    external: str, norm: str, ff: str, projections: tuple[str, ...], out: str, norms: str, number: int
) -> list[Rule]:
    """Return the rules for a stream of a double block; ``number`` is that of XLabs' LoRAs."""
    return [
        Rule(f"{external}_mod.lin", f"{_DOUBLE}.{norm}.linear"),
        Rule(f"{external}_attn.qkv", tuple(f"{_DOUBLE}.attn.{name}" for name in projections)),
        Rule(f"{external}_attn.proj", f"{_DOUBLE}.attn.{out}"),
        Rule(f"{external}_mlp.0", f"{_DOUBLE}.{ff}.fc1"),
        Rule(f"{external}_mlp.2", f"{_DOUBLE}.{ff}.fc2"),
        *attention_norms(f"{external}_attn", f"{_DOUBLE}.attn.{norms}"),
        Rule(f"double_blocks.*.processor.qkv_lora{number}", tuple(f"{_DOUBLE}.attn.{name}" for name in projections)),
        Rule(f"double_blocks.*.processor.proj_lora{number}", f"{_DOUBLE}.attn.{out}"),
    ]


_QKV, _ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")

NAMES = (
    *STACKS,
    Rule("img_in", "x_embedder"),
    Rule("txt_in", "context_embedder"),
    Rule("final_layer.linear", "proj_out"),
    Rule("final_layer.adaLN_modulation.1", "norm_out.linear", "swapped halves"),
    *(
        Rule(f"{external}.{layer}", f"time_text_embed.{internal}_embedder.linear_{i}")
        for external, internal in (("time_in", "timestep"), ("guidance_in", "guidance"), ("vector_in", "text"))
        for i, layer in enumerate(("in_layer", "out_layer"), 1)
    ),
    *_stream("double_blocks.*.img", "norm1", "ff", _QKV, "to_out.0", "norm", 1),
    *_stream("double_blocks.*.txt", "norm1_context", "ff_context", _ADDED, "to_add_out", "norm_added", 2),
    Rule("single_blocks.*.linear1", (*(f"{_SINGLE}.attn.{name}" for name in _QKV), f"{_SINGLE}.ff.fc1"),
         rows=(1, 1, 1, 4)),
    Rule("single_blocks.*.linear2", (f"{_SINGLE}.attn.to_out.0", f"{_SINGLE}.ff.fc2"), rows=(1, 4), axis=1),
    Rule("single_blocks.*.modulation.lin", f"{_SINGLE}.norm.linear"),
    *attention_norms("single_blocks.*", f"{_SINGLE}.attn.norm"),
    Rule("distilled_guidance_layer.layers.*.in_layer", "distilled_guidance_layer.layers.*.linear_1"),
    Rule("distilled_guidance_layer.layers.*.out_layer", "distilled_guidance_layer.layers.*.linear_2"),
    Rule("distilled_guidance_layer.norms.*.scale", "distilled_guidance_layer.norms.*.weight"),
    Rule("pos_embed_input", "controlnet_x_embedder"),  # of XLabs' ControlNets
    Rule("input_hint_block.0", "input_hint_block.conv_in"),
    *(Rule(f"input_hint_block.{2 * i + 2}", f"input_hint_block.blocks.{i}") for i in range(6)),
    Rule("input_hint_block.14", "input_hint_block.conv_out"),
)  # fmt: skip
"""Names of the transformer and its ControlNets in diffusers, and in their authors' code and ComfyUI."""


def read(files: ModelFiles) -> Networks:
    """Return the networks; Kontext is known by its pipeline, schnell by its schedule."""
    check_components(files, CLASSES)
    transformer, clip = parsed(FluxConfig, files, "transformer"), parsed(ClipTextConfig, files, FIRST)
    t5, vae = parsed(T5Config, files, SECOND), read_autoencoder(files)
    latents = transformer.features, 4 * vae.latent_channels
    check_fit(files, latents=latents, text=(transformer.joint_attention_dim, t5.d_model))
    if transformer.pooled_projection_dim != clip.hidden_size:
        raise CheckpointError(
            f"{files}: the transformer reads pooled text of width {transformer.pooled_projection_dim}, and CLIP gives "
            f"{clip.hidden_size}"
        )
    few = not transformer.guidance_embeds and not files.config("scheduler").get("use_dynamic_shifting")
    edits = KONTEXT in str(files.index.get("_class_name")).lower()
    return _networks(transformer, clip, t5, vae, FEW_ROWS if few else ROWS, edits=edits)


def _networks(
    transformer: FluxConfig, clip: ClipTextConfig, t5: T5Config, vae: Any, rows: int, *, edits: bool = False
) -> Networks:
    text = FluxText((PooledClip(clip), T5Encoder(t5, SECOND, (rows,))))
    return Networks(FluxDenoiser(transformer, edits), vae, text, prediction="flow_prediction")


def read_chroma(files: ModelFiles) -> Networks:
    """Return the networks of Chroma."""
    check_components(files, CHROMA_CLASSES)
    transformer, t5 = parsed(ChromaConfig, files, "transformer"), parsed(T5Config, files, FIRST)
    vae = read_autoencoder(files)
    latents = transformer.features, 4 * vae.latent_channels
    check_fit(files, latents=latents, text=(transformer.joint_attention_dim, t5.d_model))
    return _chroma(transformer, t5, vae)


def _chroma(transformer: ChromaConfig, t5: T5Config, vae: Any) -> Networks:
    text = TextEncoders((T5Encoder(t5, FIRST, (ROWS,), masked=True),))
    return Networks(FluxDenoiser(transformer), vae, text, prediction="flow_prediction")


def tokenizer(files: ModelFiles, encoder: TextEncoder) -> Any:
    """Return the tokenizer of CLIP, or of T5; a folder with T5's SentencePiece model alone has that of the package."""
    if isinstance(encoder, PooledClip):
        return read_clip_tokenizer(files, encoder)
    if (files.folder(encoder.tokenizer) / "spiece.model").is_file() and not _has_tokenizer(files, encoder):
        return read_padding_tokenizer(files, encoder, TEMPLATE, T5)
    return read_padding_tokenizer(files, encoder, TEMPLATE)


def _has_tokenizer(files: ModelFiles, encoder: TextEncoder) -> bool:
    return (files.folder(encoder.tokenizer) / "tokenizer.json").is_file()


_DEV = Defaults(num_inference_steps=28, guidance_scale=3.5)


def _defaults(networks: Networks, schedule: NoiseSchedule | None) -> Defaults:
    """Return those of schnell for a model without guidance whose schedule does not depend on the size."""
    if not networks.embeds_guidance and not (schedule and schedule.size_shift):
        return Defaults(num_inference_steps=4, guidance_scale=1.0)
    if networks.inpaints:
        return Defaults(num_inference_steps=50, guidance_scale=30.0)
    return replace(_DEV, guidance_scale=2.5) if networks.denoiser.facts.edits else _DEV


def _config(shapes: Shapes) -> dict[str, Any]:
    (width, features), out = shapes["x_embedder.weight"], shapes["proj_out.weight"][0]
    head = next(shape[0] for name, shape in shapes.items() if name.endswith("transformer_blocks.0.attn.norm_q.weight"))
    return {
        "in_channels": features,
        "out_channels": None if out == features else out,
        "num_layers": numbered(shapes, r"transformer_blocks\.(\d+)\."),
        "num_single_layers": numbered(shapes, r"single_transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "axes_dims_rope": [head // 8, head // 16 * 7, head // 16 * 7],  # 16, 56 and 56 of the released models
    }


def _flux_config(shapes: Shapes) -> dict[str, Any]:
    return _config(shapes) | {
        "_class_name": CLASSES["transformer"][0],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def controlnet_config(shapes: Shapes, base: FluxConfig) -> dict[str, Any]:
    """Return the config of a ControlNet of a transformer from its arrays."""
    features, hint = shapes["controlnet_x_embedder.weight"][1], shapes.get("input_hint_block.conv_out.weight")
    return _flux_config({**shapes, "proj_out.weight": (features,)}) | {
        "_class_name": FluxControlConfig.CLASS,
        "axes_dims_rope": base.axes_dims_rope,
        "num_mode": shapes.get("controlnet_mode_embedder.weight", (None,))[0],
        "conditioning_embedding_channels": hint[0] if hint else None,
    }


def _chroma_config(shapes: Shapes) -> dict[str, Any]:
    hidden, channels = shapes["distilled_guidance_layer.in_proj.weight"]
    return _config(shapes) | {
        "_class_name": CHROMA_CLASSES["transformer"][0],
        "approximator_num_channels": channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": numbered(shapes, r"distilled_guidance_layer\.layers\.(\d+)\."),
    }


def _index(config: Mapping[str, Any], stem: str) -> dict[str, Any]:
    """Return the pipeline: the channels tell Fill, and only the name of a file Kontext."""
    if config["out_channels"]:
        return {"_class_name": FLUX.pipelines[-1]}
    return {"_class_name": FLUX.pipelines[3]} if KONTEXT in stem.lower() else {}


def _schedule(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of schnell for a model that does not read the guidance scale."""
    return {} if config["guidance_embeds"] else {"use_dynamic_shifting": False, "shift": 1.0}


_T5_FIELDS = {"architectures": ["T5EncoderModel"], "model_type": "t5", "feed_forward_proj": "gated-gelu"}
_CLIP_FIELDS = {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}
_BY_SIZE = FLOW | SHIFT_BY_SIZE | {"max_image_seq_len": 4096, "shift": 3.0}
_KL16 = VaeConfig.from_dict(VAE)

FLUX = Family(
    name="flux",
    title="FLUX.1",
    pipelines=(
        *("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
        *("FluxKontextPipeline", "FluxKontextInpaintPipeline", "FluxFillPipeline"),
    ),
    read=read,
    tokenizer=tokenizer,
    classes=CLASSES,
    defaults=_DEV,
    defaults_by_networks=_defaults,
    names=NAMES,
    stacks=STACKS,
    single_file=SingleFile(
        marks=("double_blocks.0.img_mod.", "vector_in."),
        config=_flux_config,
        configs={FIRST: _CLIP_FIELDS, SECOND: _T5_FIELDS, "vae": VAE, "scheduler": _BY_SIZE},
        tokenizer=T5,
        index=_index,
        schedule=_schedule,
        packaged={TOKENIZERS[FIRST]: CLIP},
    ),
    presets={
        "flux1-dev": _networks(FluxConfig(guidance_embeds=True), SD15_TEXT, T5Config(), _KL16, ROWS),
        "flux1-schnell": _networks(FluxConfig(), SD15_TEXT, T5Config(), _KL16, FEW_ROWS),
    },
)

CHROMA = Family(
    name="chroma",
    title="Chroma",
    pipelines=("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"),
    read=read_chroma,
    tokenizer=tokenizer,
    classes=CHROMA_CLASSES,
    defaults=Defaults(num_inference_steps=35, guidance_scale=5.0),
    names=NAMES,
    stacks=STACKS,
    single_file=SingleFile(
        marks=("distilled_guidance_layer.in_proj.",),
        config=_chroma_config,
        configs={FIRST: _T5_FIELDS, "vae": VAE, "scheduler": _BY_SIZE},
        tokenizer=T5,
    ),
    presets={"chroma1": _chroma(ChromaConfig(), T5Config(), _KL16)},
)
