"""Models of PyTorch diffusers, small and random, and the single files that the original code would store them in.

The names are made here from those of diffusers, level by level, without what canvax reads such files with; the tests
let diffusers read them as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from canvax.weights.single_file import CLIP

Arrays = dict[str, torch.Tensor]
LAYERS = 2
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}


def unet(kind: str, channels: int = 4) -> UNet2DConditionModel:
    xl = {
        "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "transformer_layers_per_block": (1, 2),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }  # fmt: skip
    plain = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(
        sample_size=8, in_channels=channels, block_out_channels=(64, 128), layers_per_block=LAYERS,
        attention_head_dim=8 if kind == "sd1" else (1, 2), use_linear_projection=kind != "sd1",
        **{
            "sd1": {**plain, "cross_attention_dim": 64},
            "sd2": {**plain, "cross_attention_dim": 64},
            "xl": {**xl, "cross_attention_dim": 192, "projection_class_embeddings_input_dim": 128 + 6 * 256},
            "refiner": {**xl, "cross_attention_dim": 128, "projection_class_embeddings_input_dim": 128 + 5 * 256},
        }[kind],
    )  # fmt: skip


def vae(kind: str) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32, 32, 32, 32), down_block_types=("DownEncoderBlock2D",) * 4, layers_per_block=2,
        up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=0.13025 if kind in ("xl", "refiner") else 0.18215,
        sample_size=64,
    )  # fmt: skip


def text(width: int, layers: int, act: str, cls: type[Any]) -> Any:
    return cls(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            hidden_act=act,
            projection_dim=width,
            eos_token_id=49407,
            bos_token_id=49406,
        )
    )


def model(kind: str, channels: int = 4) -> dict[str, Any]:
    """Its components."""
    torch.manual_seed(3)
    encoders = {
        "sd1": {"text_encoder": text(64, 2, "quick_gelu", CLIPTextModel)},
        "sd2": {"text_encoder": text(64, 2, "gelu", CLIPTextModel)},
        "xl": {
            "text_encoder": text(64, 2, "quick_gelu", CLIPTextModel),
            "text_encoder_2": text(128, 3, "gelu", CLIPTextModelWithProjection),
        },
        "refiner": {"text_encoder_2": text(128, 3, "gelu", CLIPTextModelWithProjection)},
    }[kind]
    parts = {"unet": unet(kind, channels), "vae": vae(kind), **encoders}
    for part in parts.values():  # zeros and ones say nothing
        for array in part.parameters():
            array.data.add_(torch.randn_like(array) * 0.02)
    return parts


def write_folder(folder: Path, kind: str, parts: dict[str, Any], **scheduler: Any) -> Path:
    """The diffusers layout."""
    schedulers = {
        "sd1": PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1, **scheduler),
        "sd2": DDIMScheduler(**BETAS, set_alpha_to_one=False, clip_sample=False, steps_offset=1, **scheduler),
    }
    euler = EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1, **scheduler)
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "safety_checker": [None, None]}
    if kind in ("xl", "refiner"):
        index["_class_name"] = "StableDiffusionXLPipeline" if kind == "xl" else "StableDiffusionXLImg2ImgPipeline"
        index |= {"force_zeros_for_empty_prompt": kind == "xl", "requires_aesthetics_score": kind == "refiner"}
    for name, part in {**parts, "scheduler": schedulers.get(kind, euler)}.items():
        part.save_pretrained(folder / name)
        index[name] = ["transformers" if "text" in name else "diffusers", type(part).__name__]
    for name in [name for name in parts if "text" in name]:
        own = name.replace("text_encoder", "tokenizer")
        pads_zero = own == "tokenizer_2" or kind == "sd2"
        (folder / own).mkdir()
        for file in (CLIP / ("tokenizer_2" if pads_zero else "tokenizer")).iterdir():
            (folder / own / file.name).write_bytes(file.read_bytes())
        index[own] = ["transformers", "CLIPTokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_single(path: Path, kind: str, parts: dict[str, Any], **more: torch.Tensor) -> Path:
    """One file, with what training left there."""
    arrays = {f"model.diffusion_model.{name}": a for name, a in ldm_unet(parts["unet"].state_dict()).items()}
    arrays |= {f"first_stage_model.{name}": a for name, a in ldm_vae(parts["vae"].state_dict()).items()}
    ways: dict[str, list[tuple[str, str, Callable[[Arrays], Arrays]]]] = {
        "sd1": [("text_encoder", "cond_stage_model.transformer.", hf)],
        "sd2": [("text_encoder", "cond_stage_model.model.", lambda state: open_clip(state, extra=True))],
        "xl": [
            ("text_encoder", "conditioner.embedders.0.transformer.", hf),
            ("text_encoder_2", "conditioner.embedders.1.model.", open_clip),
        ],
        "refiner": [("text_encoder_2", "conditioner.embedders.0.model.", open_clip)],
    }
    for name, start, way in ways[kind]:
        arrays |= {start + key: array for key, array in way(parts[name].state_dict()).items()}
    arrays |= {
        "betas": torch.zeros(1000),
        "alphas_cumprod": torch.zeros(1000),
        "model_ema.decay": torch.zeros(()),
        **more,
    }
    save_file({name: array.clone().contiguous() for name, array in arrays.items()}, path, metadata={"format": "pt"})
    return path


def ldm_unet(state: Arrays) -> Arrays:
    """Under the names of the original code, which numbers its blocks through."""
    starts = {"conv_in.": "input_blocks.0.0.", "conv_norm_out.": "out.0.", "conv_out.": "out.2.",
              "time_embedding.linear_1.": "time_embed.0.", "time_embedding.linear_2.": "time_embed.2.",
              "add_embedding.linear_1.": "label_emb.0.0.", "add_embedding.linear_2.": "label_emb.0.2.",
              "mid_block.resnets.0.": "middle_block.0.", "mid_block.attentions.0.": "middle_block.1.",
              "mid_block.resnets.1.": "middle_block.2."}  # fmt: skip
    each, levels = LAYERS + 1, 1 + max(int(name.split(".")[1]) for name in state if name.startswith("down_blocks."))
    for level in range(levels):
        for i in range(LAYERS):
            starts[f"down_blocks.{level}.resnets.{i}."] = f"input_blocks.{1 + each * level + i}.0."
            starts[f"down_blocks.{level}.attentions.{i}."] = f"input_blocks.{1 + each * level + i}.1."
        starts[f"down_blocks.{level}.downsamplers.0.conv."] = f"input_blocks.{each * (level + 1)}.0.op."
        attention = any(name.startswith(f"up_blocks.{level}.attentions.") for name in state)
        for i in range(each):
            starts[f"up_blocks.{level}.resnets.{i}."] = f"output_blocks.{each * level + i}.0."
            starts[f"up_blocks.{level}.attentions.{i}."] = f"output_blocks.{each * level + i}.1."
        starts[f"up_blocks.{level}.upsamplers.0.conv."] = f"output_blocks.{each * level + 2}.{1 + attention}.conv."
    inner = {"norm1.": "in_layers.0.", "conv1.": "in_layers.2.", "time_emb_proj.": "emb_layers.1.",
             "norm2.": "out_layers.0.", "conv2.": "out_layers.3.", "conv_shortcut.": "skip_connection."}  # fmt: skip
    return _renamed(state, starts, inner)


def ldm_vae(state: Arrays) -> Arrays:
    """Attention as 1x1 convolutions, and the decoder's levels from the end."""
    starts: dict[str, str] = {}
    for side in ("encoder", "decoder"):
        starts |= {
            f"{side}.conv_norm_out.": f"{side}.norm_out.",
            f"{side}.mid_block.resnets.0.": f"{side}.mid.block_1.",
        }
        starts |= {f"{side}.mid_block.resnets.1.": f"{side}.mid.block_2."}
        starts |= {f"{side}.mid_block.attentions.0.": f"{side}.mid.attn_1."}
    for level in range(4):
        for i in range(3):
            starts[f"encoder.down_blocks.{level}.resnets.{i}."] = f"encoder.down.{level}.block.{i}."
            starts[f"decoder.up_blocks.{level}.resnets.{i}."] = f"decoder.up.{3 - level}.block.{i}."
        starts[f"encoder.down_blocks.{level}.downsamplers.0."] = f"encoder.down.{level}.downsample."
        starts[f"decoder.up_blocks.{level}.upsamplers.0."] = f"decoder.up.{3 - level}.upsample."
    inner = {"conv_shortcut.": "nin_shortcut.", "group_norm.": "norm.", "to_q.": "q.", "to_k.": "k.", "to_v.": "v.",
             "to_out.0.": "proj_out."}  # fmt: skip
    arrays = _renamed(state, starts, inner)
    return {name: array[:, :, None, None] if ".attn_1." in name and array.ndim == 2 else array
            for name, array in arrays.items()}  # fmt: skip


def _renamed(state: Arrays, starts: dict[str, str], inner: dict[str, str]) -> Arrays:
    arrays = {}
    for name, array in state.items():
        start = next((one for one in starts if name.startswith(one)), "")
        rest = name.removeprefix(start)
        own = next((one for one in inner if rest.startswith(one)), "") if start else ""
        arrays[starts.get(start, "") + inner.get(own, "") + rest.removeprefix(own)] = array
    return arrays


def hf(state: Arrays) -> Arrays:
    names = {name if name.startswith("text_model.") else f"text_model.{name}": array for name, array in state.items()}
    return {**names, "text_model.embeddings.position_ids": torch.arange(77)[None]}


def open_clip(state: Arrays, *, extra: bool = False) -> Arrays:
    """Queries, keys and values as one; ``extra``: one layer more, which 2.x has and does not use."""
    state = {name.removeprefix("text_model."): array for name, array in state.items()}
    ends = {"embeddings.token_embedding.weight": "token_embedding.weight",
            "embeddings.position_embedding.weight": "positional_embedding",
            "final_layer_norm.weight": "ln_final.weight", "final_layer_norm.bias": "ln_final.bias"}  # fmt: skip
    arrays = {new: state[old] for old, new in ends.items()}
    projection = state.get("text_projection.weight")
    arrays |= {
        "text_projection": torch.zeros(64, 64) if projection is None else projection.T,
        "logit_scale": torch.ones(()),
    }
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layers."))
    for i in range(layers + extra):
        start, new = f"encoder.layers.{min(i, layers - 1)}.", f"transformer.resblocks.{i}."
        for leaf in ("weight", "bias"):
            qkv = [state[f"{start}self_attn.{part}_proj.{leaf}"] for part in "qkv"]
            arrays[f"{new}attn.in_proj_{leaf}"] = torch.cat(qkv)
            for ours, theirs in {"self_attn.out_proj": "attn.out_proj", "layer_norm1": "ln_1", "layer_norm2": "ln_2",
                                 "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}.items():  # fmt: skip
                arrays[f"{new}{theirs}.{leaf}"] = state[f"{start}{ours}.{leaf}"]
    return arrays
