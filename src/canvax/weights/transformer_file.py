"""A transformer alone in one file, as ComfyUI has it; text encoder and autoencoder are given.

    Z-Image    [model.diffusion_model.]layers.0.attention.qkv.weight
    FLUX.2     [model.diffusion_model.]single_blocks.0.linear1.weight
    Krea 2     [model.diffusion_model.]blocks.0.attn.wq.weight

The file is a safetensors or a GGUF file. Sizes are read off shapes. What neither these nor the other parts tell is a
fact of the family, in its ``Layout``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles, open_weights
from canvax.weights.formats import KREA2 as KREA2_NAMES
from canvax.weights.formats import Z_IMAGE as Z_IMAGE_NAMES
from canvax.weights.formats import flux2_rules, numbered
from canvax.weights.identify import OF_TRANSFORMERS, UNET, Shapes, transformer_family
from canvax.weights.rules import Names

PARTS = ("text_encoder", "vae")
"""Arguments of ``canvax.load`` that name files with what such a file does not hold."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The transformer of a family in a file of its own.

    Attributes:
        pipeline: class of diffusers.
        classes: of the components, in ``model_index.json``.
        names: of its arrays, as far as ``config`` asks for them.
        unused: the arrays that it does not read.
        config: of the transformer, from its arrays under our names.
        configs: what the files of the other parts do not tell.
        marks: what the name of a file has in it if it is the base model, and if it is distilled.
        base: fields of the scheduler's config that tell the base model; without any, ``model_index.json`` does.
        index: further fields of ``model_index.json``.
    """

    pipeline: str
    classes: Mapping[str, tuple[str, str]]
    names: Names
    unused: re.Pattern[str]
    config: Callable[[Shapes], dict[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]
    marks: tuple[str, str]
    base: Mapping[str, Any] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)

    def is_distilled(self, stem: str) -> tuple[bool, str]:
        """Return whether the model of a file of this name is the distilled one, and how that is known."""
        base, distilled = (mark in stem.lower() for mark in self.marks)
        if base or distilled:
            return not base, f"by {self.marks[not base]!r} in the name of the file; no array tells"
        return True, (
            f"a guess: the name of the file has neither {self.marks[0]!r} nor {self.marks[1]!r} in it, and no array "
            f"tells; if it is the base model, put {self.marks[0]!r} into the name of the file"
        )


def open_transformer_file(name: str, path: Path, given: Collection[str] = ()) -> ModelFiles | None:
    """The files of a model whose transformer is in a file of its own; None for other files. No array is read.

    Args:
        name: as it was asked for.
        path: the file.
        given: parts that the caller gives.

    Raises:
        InputError: parts are neither in the file nor given.
        CheckpointError: the transformer is not whole.
    """
    entries = open_weights(path, plain_names=False)
    family = transformer_family({entry.name for entry in entries})
    if family not in LAYOUTS:
        return None
    layout = LAYOUTS[family]
    if missing := [f"{{{part}=FILE}}" for part in PARTS if part not in given]:
        raise InputError("model", name, f"is the transformer of {family} alone", f"add {' and '.join(missing)}")
    arrays = [replace(entry, name=entry.name.removeprefix(UNET)) for entry in entries]
    arrays = [array for array in arrays if not layout.unused.fullmatch(array.name)]
    try:
        config = layout.config({array.name: array.shape for array in layout.names.to_ours(arrays)})
    except (KeyError, IndexError) as error:
        raise CheckpointError(f"{name}: is not a whole transformer of {family}, it lacks {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from None

    def read(component: str) -> list[Entry]:
        return arrays if component == "transformer" else []

    classes = {part: list(kind) for part, kind in layout.classes.items()}
    is_distilled, why = layout.is_distilled(path.stem)
    configs = {"transformer": config, **layout.configs}
    if layout.base:  # the schedule of a checkpoint tells
        fact, index = next(iter(layout.base)), layout.index
        configs["scheduler"] = {**configs["scheduler"], **({} if is_distilled else layout.base)}
        value = configs["scheduler"][fact]
    else:
        fact, index = "is_distilled", {"is_distilled": is_distilled, **layout.index}
        value = "yes" if is_distilled else "no"
    return ModelFiles(
        name,
        path,
        {"_class_name": layout.pipeline, **index, **classes},
        {part: kind for part, (_, kind) in layout.classes.items() if part != "tokenizer"},
        configs,
        read,
        path.joinpath,
        reasons={
            "kind": f"{family}: it has {OF_TRANSFORMERS[family][0]}",
            fact: f"{value}, {why}",
        },
    )


def _z_image_config(shapes: Shapes) -> dict[str, Any]:
    width, features = shapes["all_x_embedder.2-1.weight"]
    head = shapes["layers.0.attention.norm_q.weight"][0]
    axes = [head // 4, head // 8 * 3, head // 8 * 3]  # 32, 48 and 48 of the 128 channels of the released models
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


def _flux2_config(shapes: Shapes) -> dict[str, Any]:
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


def _krea2_config(shapes: Shapes) -> dict[str, Any]:
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
        "axes_dims_rope": [head // 4, head // 8 * 3, head // 8 * 3],  # 32, 48 and 48 of the released models
        "rope_theta": 1000.0,
        "norm_eps": 1e-5,
    }


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""What the arrays of a Qwen3 do not tell."""

QWEN3_VL = {
    "architectures": ["Qwen3VLModel"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {
        **{name: value for name, value in QWEN3.items() if name not in ("architectures", "rope_theta")},
        "model_type": "qwen3_vl_text",
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
        "out_hidden_size": 2560, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
"""What the arrays of a Qwen3-VL-4B do not tell."""

FLUX_VAE = {
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
"""The autoencoder of FLUX.1, which Z-Image has too."""

FLUX2_VAE = {
    "_class_name": "AutoencoderKLFlux2",
    "block_out_channels": [128, 256, 512, 512],
    "force_upcast": True,
    "sample_size": 1024,
}

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
SHIFT_BY_SIZE = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256}


def _components(transformer: str, text_encoder: str, vae: str) -> dict[str, tuple[str, str]]:
    """The library and class of each component, as ``model_index.json`` has them."""
    return {
        "transformer": ("diffusers", transformer),
        "text_encoder": ("transformers", text_encoder),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "vae": ("diffusers", vae),
        "scheduler": ("diffusers", FLOW["_class_name"]),
    }


LAYOUTS: Mapping[str, Layout] = {
    "Z-Image": Layout(
        "ZImagePipeline",
        _components("ZImageTransformer2DModel", "Qwen3Model", "AutoencoderKL"),
        Z_IMAGE_NAMES,
        re.compile(r"norm_final\.weight"),
        _z_image_config,
        {
            "text_encoder": QWEN3,
            "vae": FLUX_VAE,
            "scheduler": {**FLOW, "use_dynamic_shifting": False, "shift": 3.0},
        },
        ("base", "turbo"),
        {"shift": 6.0},
    ),
    "FLUX.2": Layout(
        "Flux2KleinPipeline",
        _components("Flux2Transformer2DModel", "Qwen3ForCausalLM", "AutoencoderKLFlux2"),
        Names(flux2_rules()),
        re.compile(""),
        _flux2_config,
        {
            "text_encoder": QWEN3,
            "vae": FLUX2_VAE,
            "scheduler": {**FLOW, **SHIFT_BY_SIZE, "max_image_seq_len": 4096, "shift": 3.0},
        },
        ("base", "klein"),
    ),
    "Krea 2": Layout(
        "Krea2Pipeline",
        _components("Krea2Transformer2DModel", "Qwen3VLModel", "AutoencoderKLQwenImage"),
        KREA2_NAMES,
        re.compile(""),
        _krea2_config,
        {
            "text_encoder": QWEN3_VL,
            "vae": {"_class_name": "AutoencoderKLQwenImage"},
            "scheduler": {**FLOW, **SHIFT_BY_SIZE, "max_image_seq_len": 6400},
        },
        ("raw", "turbo"),
        index={"patch_size": 2},
    ),
}
"""By the families of ``canvax.weights.identify.transformer_family``."""
