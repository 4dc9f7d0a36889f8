"""A tiny SDXL and its refiner, made of names and shapes alone: no model of canvax has a part in its files."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import canvax


@cache
def tiny_xl(model: str) -> Path:
    """The folder of a tiny "sdxl" of random weights, or its "refiner"; the same files for any version of canvax."""
    folder, refiner = Path(temporary().name) / model, model == "refiner"
    tokenizer = next(Path(canvax.__file__).parent.rglob("vocab.json")).parent
    vocabulary = len(json.loads((tokenizer / "vocab.json").read_text()))
    text = {"text_encoder": (16, "quick_gelu", 512, 49407), "text_encoder_2": (24, "gelu", 8, 2)}
    index: dict[str, Any] = {"force_zeros_for_empty_prompt": True}
    index["_class_name"] = "StableDiffusionXLPipeline"
    if refiner:
        del text["text_encoder"]
        empty = {name: [None, None] for name in ("text_encoder", "tokenizer")}
        index |= {"_class_name": "StableDiffusionXLImg2ImgPipeline", "requires_aesthetics_score": True, **empty}
    for name, (width, activation, projection, end) in text.items():
        config = {
            "model_type": "clip_text_model", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 77, "layer_norm_eps": 1e-5,
            "hidden_act": activation, "projection_dim": projection, "eos_token_id": end,
        }  # fmt: skip
        has = name == "text_encoder_2"
        shapes = dict(clip_shapes(vocabulary, width, 32, projection if has else None))
        _write_part(folder / name, "model.safetensors", config, shapes)
        shutil.copytree(tokenizer, folder / name.replace("text_encoder", "tokenizer"))
        index[name] = ["transformers", "CLIPTextModelWithProjection" if has else "CLIPTextModel"]
        index[name.replace("text_encoder", "tokenizer")] = ["transformers", "CLIPTokenizer"]
    context, told = sum(width for width, *_ in text.values()), 8 + (5 if refiner else 6) * 4
    config = {
        "_class_name": "UNet2DConditionModel", "sample_size": 8, "in_channels": 4, "out_channels": 4,
        "block_out_channels": [8, 16], "layers_per_block": 1, "attention_head_dim": [1, 2], "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": context,
        "transformer_layers_per_block": 1, "use_linear_projection": True, "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": told,
    }  # fmt: skip
    weights = "diffusion_pytorch_model.safetensors"
    _write_part(folder / "unet", weights, config, dict(unet_shapes(8, 16, context, told)))
    config = {
        "_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 3, "block_out_channels": [8, 8, 8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4, "scaling_factor": 0.13025,
    }  # fmt: skip
    _write_part(folder / "vae", weights, config, dict(vae_shapes(8, 4)))
    index |= {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    scheduler = {
        "_class_name": "EulerDiscreteScheduler", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False,
        "beta_schedule": "scaled_linear", "timestep_spacing": "leading", "steps_offset": 1, "skip_prk_steps": True,
    }  # fmt: skip
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    _write_json(folder / "model_index.json", index | {"scheduler": ["diffusers", scheduler["_class_name"]]})
    return folder


@cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """Where the models are; it goes when the process ends."""
    return tempfile.TemporaryDirectory()


def _write_part(folder: Path, file: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """A component of random weights. Each array depends on its name and shape alone."""
    _write_json(folder / "config.json", config)
    arrays = {}
    for name, shape in shapes.items():
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if len(shape) > 1:
            arrays[name] = values / np.float32(math.sqrt(math.prod(shape[1:])))
        else:
            arrays[name] = np.float32("norm" in name and name.endswith("weight")) + np.float32(0.1) * values
    save_file(arrays, folder / file, {"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of arrays as PyTorch files have them."""


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _conv(name: str, inputs: int, outputs: int, side: int = 3) -> Shapes:
    yield f"{name}.weight", (outputs, inputs, side, side)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _resnet(name: str, inputs: int, outputs: int, time: int = 0) -> Shapes:
    yield from _norm(f"{name}.norm1", inputs)
    yield from _conv(f"{name}.conv1", inputs, outputs)
    if time:
        yield from _linear(f"{name}.time_emb_proj", time, outputs)
    yield from _norm(f"{name}.norm2", outputs)
    yield from _conv(f"{name}.conv2", outputs, outputs)
    if inputs != outputs:
        yield from _conv(f"{name}.conv_shortcut", inputs, outputs, 1)


def _attention(name: str, width: int, context: int, bias: bool = False) -> Shapes:
    for one, inputs in (("to_q", width), ("to_k", context), ("to_v", context)):
        yield from _linear(f"{name}.{one}", inputs, width, bias)
    yield from _linear(f"{name}.to_out.0", width, width)


def _transformer(name: str, width: int, context: int) -> Shapes:
    yield from _norm(f"{name}.norm", width)
    yield from _linear(f"{name}.proj_in", width, width)
    block = f"{name}.transformer_blocks.0"
    for i in (1, 2, 3):
        yield from _norm(f"{block}.norm{i}", width)
    yield from _attention(f"{block}.attn1", width, width)
    yield from _attention(f"{block}.attn2", width, context)
    yield from _linear(f"{block}.ff.net.0.proj", width, 8 * width)
    yield from _linear(f"{block}.ff.net.2", 4 * width, width)
    yield from _linear(f"{name}.proj_out", width, width)


def unet_shapes(first: int, last: int, context: int, told: int) -> Shapes:
    """A UNet of two levels, with text in the second alone."""
    time = 4 * first
    yield from _conv("conv_in", 4, first)
    for name, inputs in (("time_embedding", first), ("add_embedding", told)):
        yield from _linear(f"{name}.linear_1", inputs, time)
        yield from _linear(f"{name}.linear_2", time, time)
    yield from _resnet("down_blocks.0.resnets.0", first, first, time)
    yield from _conv("down_blocks.0.downsamplers.0.conv", first, first)
    yield from _resnet("down_blocks.1.resnets.0", first, last, time)
    yield from _transformer("down_blocks.1.attentions.0", last, context)
    for i in (0, 1):
        yield from _resnet(f"mid_block.resnets.{i}", last, last, time)
        yield from _resnet(f"up_blocks.0.resnets.{i}", last + (last, first)[i], last, time)
        yield from _transformer(f"up_blocks.0.attentions.{i}", last, context)
        yield from _resnet(f"up_blocks.1.resnets.{i}", (last, first)[i] + first, first, time)
    yield from _transformer("mid_block.attentions.0", last, context)
    yield from _conv("up_blocks.0.upsamplers.0.conv", last, last)
    yield from _norm("conv_norm_out", first)
    yield from _conv("conv_out", first, 4)


def vae_shapes(width: int, latent: int) -> Shapes:
    """An autoencoder of four levels of the same width."""
    for half, blocks, resnets in (("encoder", "down", 1), ("decoder", "up", 2)):
        for i in range(4):
            block = f"{half}.{blocks}_blocks.{i}"
            for j in range(resnets):
                yield from _resnet(f"{block}.resnets.{j}", width, width)
            if i < 3:
                yield from _conv(f"{block}.{blocks}samplers.0.conv", width, width)
        for i in (0, 1):
            yield from _resnet(f"{half}.mid_block.resnets.{i}", width, width)
        yield from _norm(f"{half}.mid_block.attentions.0.group_norm", width)
        yield from _attention(f"{half}.mid_block.attentions.0", width, width, bias=True)
        yield from _conv(f"{half}.conv_in", 3 if half == "encoder" else latent, width)
        yield from _norm(f"{half}.conv_norm_out", width)
        yield from _conv(f"{half}.conv_out", width, 2 * latent if half == "encoder" else 3)
    yield from _conv("quant_conv", 2 * latent, 2 * latent, 1)
    yield from _conv("post_quant_conv", latent, latent, 1)


def clip_shapes(vocabulary: int, width: int, inner: int, projection: int | None) -> Shapes:
    """A text encoder of two layers."""
    yield "text_model.embeddings.token_embedding.weight", (vocabulary, width)
    yield "text_model.embeddings.position_embedding.weight", (77, width)
    for i in (0, 1):
        layer = f"text_model.encoder.layers.{i}"
        for one in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{one}", width, width)
        yield from _linear(f"{layer}.mlp.fc1", width, inner)
        yield from _linear(f"{layer}.mlp.fc2", inner, width)
        for one in ("layer_norm1", "layer_norm2"):
            yield from _norm(f"{layer}.{one}", width)
    yield from _norm("text_model.final_layer_norm", width)
    if projection:
        yield from _linear("text_projection", width, projection, bias=False)
