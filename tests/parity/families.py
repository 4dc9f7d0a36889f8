"""Small random checkpoints of the transformer families, in both libraries and in the files that people download.

A record of ``RECORDS`` says how a model is made and what is its own; the tests of ``test_families_*`` go over them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import diffusers
import diffusers.modular_pipelines as modular
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import canvax
from benchmarks.lab.layouts import CHAT_TEMPLATE
from canvax.families.flux import T5
from canvax.families.krea2 import NAMES as KREA2_NAMES
from canvax.families.qwen_image_1 import EDIT_DROPPED, EDIT_TEMPLATE
from canvax.models.dit import pack
from canvax.models.krea2 import DROPPED, TEMPLATE
from canvax.models.qwen_image import DROPPED as QWEN_DROPPED
from canvax.models.qwen_image import SYSTEM as QWEN_SYSTEM
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.weights.rules import Names
from canvax.weights.safetensors import ArrayToSave
from canvax.weights.single_file import CLIP
from canvax.weights.wan_vae import wan_vae_rules
from tests.support.ldm_files import ldm_vae
from tests.support.memory import forget_programs

from .reference import nchw, randomise
from .transformers_reference import without_torchvision

Arrays = dict[str, np.ndarray]
Factors = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Of some layers the change of the weight, as (up, down)."""

PROMPTS = ["a fox", "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas"]
LONG = "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas. " * 2
SEEDS = [11, 12]
HEIGHT, WIDTH = 48, 80
QUIET = canvax.Options(progress=False)


def tokenizer() -> Any:
    """A byte is a token, but for two merges."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "Ġa", "se"])}
    made = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[("Ġ", "a"), ("s", "e")])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHAT_TEMPLATE
    return made


def picture(height: int = HEIGHT, width: int = WIDTH, phase: float = 0.0) -> Image.Image:
    """An image in which every place differs from its neighbours."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 7 + phase), np.cos(y / 5 - phase), np.sin((x + 2 * y) / 11)]
    return Image.fromarray(np.uint8(127.5 + 127.5 * np.stack(waves, axis=-1)))


def half_mask(columns: int) -> Image.Image:
    """A mask of all columns from this one on."""
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, columns:] = 255
    return Image.fromarray(mask)


ONE, TWO = [picture(165, 215)], [picture(165, 215), picture(200, 130, 2.0)]
"""References of sizes that are no multiples."""


def _four_blocks(groups: int) -> dict[str, Any]:
    return {
        "block_out_channels": (2 * groups, 2 * groups, 4 * groups, 4 * groups), "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
        "norm_num_groups": groups,
    }  # fmt: skip


def _flux2_vae(groups: int, channels: int) -> Any:
    vae: Any = randomise(diffusers.AutoencoderKLFlux2(**_four_blocks(groups), latent_channels=channels), 2)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        vae.bn.running_mean.copy_(0.3 * torch.randn(vae.bn.running_mean.shape, generator=random))
        vae.bn.running_var.copy_(0.5 + torch.rand(vae.bn.running_var.shape, generator=random))
    return vae


def _qwen3(kind: Any, words: Any, width: int, layers: int, heads: int, theta: float, **more: Any) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=len(words) + 3, hidden_size=width, intermediate_size=3 * width // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, **more,
    )  # fmt: skip
    return randomise(kind(config), 1)


def _qwen3_vl(kind: Any, words: Any, width: int, layers: int, heads: int, **changes: Any) -> Any:
    lm = {"vocab_size": len(words) + 3, "hidden_size": width, "intermediate_size": 3 * width // 2,
          "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 8,
          "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}}  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    tokens = {"image_token_id": words.convert_tokens_to_ids("<|image_pad|>")} if changes else {}
    return randomise(kind(transformers.Qwen3VLConfig(text_config=lm, vision_config=eyes | changes, **tokens)), 1)


def build_z_image(folder: Path, *, shift: float = 3.0, released: bool = False) -> Path:
    """Write a checkpoint by diffusers itself. With ``released`` it has what no array of the released models tells."""
    words = tokenizer()
    transformer: Any = randomise(
        diffusers.ZImageTransformer2DModel(
            dim=64, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32,
            axes_dims=[4, 6, 6] if released else [8, 4, 4], axes_lens=[1024, 32, 32],
        )
    )  # fmt: skip
    text = _qwen3(transformers.Qwen3Model, words, 32, 3, 4, 1e6 if released else 1e4)
    vae = randomise(
        diffusers.AutoencoderKL(
            **_four_blocks(32 if released else 8), latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159,
            use_quant_conv=False, use_post_quant_conv=False,
        ),
        2,
    )  # fmt: skip
    with torch.no_grad():
        transformer.cap_embedder[1].weight.mul_(5)  # text must matter
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    diffusers.ZImagePipeline(scheduler, vae, text, words, transformer).save_pretrained(folder)
    return folder


def sharpened(module: Any, text: str, factor: float) -> Any:
    """Make text and references matter: large text and velocity, and attention that is far from even."""
    with torch.no_grad():
        module.get_submodule(text).weight.mul_(factor)
        module.proj_out.weight.mul_(2)
        for name, weight in module.named_parameters():
            if name.endswith(("norm_q.weight", "norm_added_q.weight")):
                weight.mul_(4)
    return module


def build_flux2(
    folder: Path, *, distilled: bool = True, layers: int = 4, released: bool = False, **changes: Any
) -> Path:
    """Likewise; ``changes`` are of the transformer. Of 4 layers of the language model the first three are read."""
    words = tokenizer()
    words.pad_token = "Z"  # whose features matter
    text = _qwen3(
        transformers.Qwen3ForCausalLM,
        words,
        16,
        28 if released else layers,
        2,
        1e6 if released else 1e4,
        tie_word_embeddings=True,
    )
    sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
             "num_attention_heads": 2, "joint_attention_dim": 48, "axes_dims_rope": (4, 4, 4, 4),
             "guidance_embeds": False}  # fmt: skip
    transformer = sharpened(randomise(diffusers.Flux2Transformer2DModel(**{**sizes, **changes})), "context_embedder", 2)
    vae = _flux2_vae(32 if released else 4, transformer.config.in_channels // 4)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, shift=3.0
    )
    pipe = diffusers.Flux2KleinPipeline(scheduler, vae, text, words, transformer, is_distilled=distilled)
    pipe.save_pretrained(folder)
    return folder


FLUX3_SIZES: dict[str, Any] = {
    "in_channels": 16, "cond_in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 3, "joint_attention_dim": 96, "axes_dims_rope": (4, 4, 4, 4), "timestep_channels": 32,
}  # fmt: skip


def flux3_network(flow_map: bool, **changes: Any) -> Any:
    """The transformer of a checkpoint, whose attention is far from even."""
    module: Any = randomise(diffusers.Flux3Transformer2DModel(**FLUX3_SIZES | changes, flow_map=flow_map), 3)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("norm_q.weight"):
                weight.mul_(4)
    return module


_FLUX3_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_flux3(folder: Path, *, distilled: bool, released: bool = False) -> Path:
    """Likewise."""
    words = tokenizer()
    words.pad_token, words.chat_template = "Z", _FLUX3_TEMPLATE  # a token whose features matter
    text = _qwen3_vl(transformers.Qwen3VLForConditionalGeneration, words, 16, 9, 2)
    transformer = flux3_network(distilled, joint_attention_dim=128)
    pipe = _flux3_pipeline(distilled)
    pipe.update_components(text_encoder=text, vae=_flux2_vae(32 if released else 4, 4), transformer=transformer)
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    words.save_pretrained(folder / "tokenizer")
    index = json.loads((folder / "modular_model_index.json").read_text())
    hint = {"pretrained_model_name_or_path": str(folder), "revision": None, "subfolder": "tokenizer", "variant": None}
    index["tokenizer"] = [None, None, hint | {"type_hint": ["transformers", "AutoProcessor"]}]
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    return folder


def _flux3_pipeline(distilled: bool) -> Any:
    blocks = modular.Flux3DistilledAutoBlocks() if distilled else modular.Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    return blocks.init_pipeline()


def build_krea2(folder: Path, *, released: bool = False, **index: Any) -> Path:
    """Likewise; ``index`` are arguments of the pipeline."""
    words = tokenizer()
    pieces = re.findall(r"<\|\w+\|>| ?\w+|\n|[,:]", TEMPLATE.partition("{}")[0])
    assert len(pieces) == DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece}))
    text = _qwen3_vl(transformers.Qwen3VLModel, words, 32, 36 if released else 6, 4)
    transformer: Any = randomise(
        diffusers.Krea2Transformer2DModel(
            in_channels=64 if released else 16, num_layers=2, attention_head_dim=16, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=96, text_hidden_dim=32, num_text_layers=12 if released else 3,
            text_num_attention_heads=4, text_num_key_value_heads=2, text_intermediate_size=48,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=2, axes_dims_rope=(4, 6, 6) if released else (8, 4, 4),
        ),
    )  # fmt: skip
    vae = randomise(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            dim_mult=[1, 2, 4, 4],
            temperal_downsample=[False, True, True],
            **({} if released else WAN_SIZES),
        ),
        2,
    )
    with torch.no_grad():
        transformer.txt_in.linear_2.weight.mul_(5)  # text must matter
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=10, max_image_seq_len=64
    )
    usual: dict[str, Any] = {} if released else {"text_encoder_select_layers": (1, 3, 5)}
    diffusers.Krea2Pipeline(scheduler, vae, text, words, transformer, **usual | index).save_pretrained(folder)
    return folder


WAN_SIZES: dict[str, Any] = {
    "z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.5, -0.2, 0.1, 0.7], "latents_std": [2.0, 1.5, 0.7, 1.1],
}  # fmt: skip
QWEN_SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4,
    "context_in_dim": 32, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
TURBO_TIMES = [1.0, 0.93, 0.7, 0.36]


def qwen_network(**changes: Any) -> Any:
    """The transformer of a checkpoint, whose attention is far from even."""
    module: Any = randomise(diffusers.QwenImage21Transformer2DModel(**QWEN_SIZES | changes), 3)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("norm_q.weight"):
                weight.mul_(4)
    return module


class _QwenProcessor(transformers.ProcessorMixin):
    """What Qwen-Image-2.1's pipeline asks of the released processor, without the libraries for videos."""

    def __init__(self, words: Any) -> None:
        self.tokenizer = words

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        (message,) = messages
        return [self.tokenizer(f"<|im_start|>system\n{message['content'][0]['text']}<|im_end|>\n").input_ids]

    def __call__(self, text: list[str], images: Sequence[Image.Image] = (), **keywords: Any) -> Any:
        """Images are read as they are, as the released processor does with those of usual sizes."""
        grids, patches = [], []
        for image in images:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
            pixels = (pixels.float() / 255 - 0.5) / 0.5
            rows, columns = (side // 16 for side in pixels.shape[1:])
            squares = pixels.reshape(3, rows // 2, 2, 16, columns // 2, 2, 16).permute(1, 4, 2, 5, 0, 3, 6)
            patches.append(squares[..., None, :, :].expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, -1))
            grids.append((1, rows, columns))
            slots = rows * columns // 4
            text = [words.replace("<|image_pad|>", "<|seen|>" * slots, 1) for words in text]
        found = self.tokenizer([words.replace("<|seen|>", "<|image_pad|>") for words in text], **keywords)
        if not images:
            return found
        token = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        found["mm_token_type_ids"] = (found["input_ids"] == token).int()
        found["pixel_values"], found["image_grid_thw"] = torch.cat(patches), torch.tensor(grids)
        return found


def build_qwen(folder: Path, *, released: bool = False, **index: Any) -> Path:
    """Likewise, without the processor of images; ``index`` are further fields of it."""
    words = tokenizer()
    pieces = re.findall(r"<\|\w+\|>|Comp|re(?=h)|hend| ?\w+|\n|[.]", QWEN_SYSTEM)
    assert len(pieces) == QWEN_DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece}))
    marks = [f"<|{mark}|>" for mark in ("im_start", "im_end", "image_pad", "vision_start", "vision_end")]
    words.add_special_tokens({"additional_special_tokens": marks})
    eyes: dict[str, Any] = {"depth": 3, "hidden_size": 32, "deepstack_visual_indexes": [0, 1]}
    eyes = (
        {"depth": 27, "hidden_size": 64, "num_heads": 16, "deepstack_visual_indexes": [8, 16, 24]} if released else eyes
    )
    small: dict[str, Any] = {
        "z_dim": 16, "latents_mean": [0.1 * i - 0.7 for i in range(16)],
        "latents_std": [1 + 0.1 * i for i in range(16)],
    }  # fmt: skip
    large = {"in_channels": 64, "out_channels": 64, "attention_head_dim": 32, "num_attention_heads": 2,
             "axes_dims_rope": (4, 14, 14)}  # fmt: skip
    sizes = {} if released else {"base_image_seq_len": 10, "max_image_seq_len": 64}
    parts: dict[str, Any] = {
        "transformer": qwen_network(**large if released else {}),
        "text_encoder": _qwen3_vl(transformers.Qwen3VLForConditionalGeneration, words, 32, 3, 4, **eyes),
        "vae": randomise(
            diffusers.AutoencoderKLQwenImage21(
                base_dim=4, decoder_base_dim=8, dim_mult=[1, 2, 2, 4, 4], num_res_blocks=1, **{} if released else small
            ),
            2,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
            **{"base_image_seq_len": 256, "max_image_seq_len": 4096} | sizes,
        ),
    }  # fmt: skip
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    words.save_pretrained(folder / "processor")
    classes = {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    classes["text_encoder"][0], classes["processor"] = "transformers", ["transformers", "Qwen3VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImage21Pipeline", **classes, **index}))
    return folder


QWEN_1_SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
    "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip


def qwen_1_network(**changes: Any) -> Any:
    """The transformer of a checkpoint, whose attention is far from even and in which text matters."""
    return sharpened(randomise(diffusers.QwenImageTransformer2DModel(**QWEN_1_SIZES | changes), 3), "txt_in", 3)


def build_qwen_1(folder: Path, *, released: bool = False) -> Path:
    """Likewise, of Qwen-Image 1."""
    words = tokenizer()
    pieces = re.findall(r"<\|\w+\|>| ?\w+|\n|[,:]", TEMPLATE.partition("{}")[0])
    assert len(pieces) == DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece}))
    words.pad_token = "Z"
    width, heads = (256, 2) if released else (32, 4)
    lm = {"vocab_size": len(words) + 3, "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": heads, "num_key_value_heads": heads // 2, "rms_norm_eps": 1e-6,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                              "mrope_section": [16, 24, 24] if released else [2, 1, 1]}}  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    text = randomise(kind(transformers.Qwen2_5_VLConfig(text_config=lm, vision_config=eyes)), 1)
    sizes: dict[str, Any] = (
        {"in_channels": 64, "out_channels": 16, "attention_head_dim": 32, "axes_dims_rope": (4, 14, 14)}
        if released else {}
    )  # fmt: skip
    transformer = qwen_1_network(joint_attention_dim=width, **sizes)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True],
        **({} if released else WAN_SIZES),
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, shift_terminal=0.02,
        **{"base_image_seq_len": 256, "max_image_seq_len": 8192} if released else
        {"base_image_seq_len": 10, "max_image_seq_len": 64},
    )  # fmt: skip
    diffusers.QwenImagePipeline(scheduler, randomise(vae, 2), text, words, transformer).save_pretrained(folder)
    return folder


def build_qwen_edit(folder: Path, *, released: bool = False, first: bool = False) -> Path:
    """Likewise, of Qwen-Image-Edit 2511 or the ``first``, without the processor of images."""
    build_qwen_1(folder, released=released)
    words = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    pieces = re.findall(r"<\|\w+\|>|'s|\),| ?\w+| ?\(|\n|[,.]", EDIT_TEMPLATE.partition("{}")[0])
    assert len(pieces) == EDIT_DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece}))
    marks = [f"<|{mark}|>" for mark in ("im_start", "im_end", "image_pad", "vision_start", "vision_end")]
    words.add_special_tokens({"additional_special_tokens": marks})
    config = transformers.Qwen2_5_VLConfig.from_pretrained(folder / "text_encoder")
    config.text_config.vocab_size = len(words) + 3
    config.image_token_id = words.convert_tokens_to_ids("<|image_pad|>")
    eyes = {"depth": 32, "hidden_size": 64} if released else {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [1],
    }  # fmt: skip
    for name, value in {**eyes, "intermediate_size": 48, "num_heads": eyes.get("num_heads", 16)}.items():
        setattr(config.vision_config, name, value)
    randomise(transformers.Qwen2_5_VLForConditionalGeneration(config), 1).save_pretrained(folder / "text_encoder")
    for part in ("tokenizer", "processor"):
        words.save_pretrained(folder / part)
    transformer: Any = diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for block in transformer.transformer_blocks:  # text must matter beside the rows of images
            block.attn.add_v_proj.weight.mul_(4)
    transformer.register_to_config(zero_cond_t=not first)
    transformer.save_pretrained(folder / "transformer")
    path, name = folder / "model_index.json", "QwenImageEditPipeline" if first else "QwenImageEditPlusPipeline"
    index: dict[str, Any] = {"_class_name": name, "processor": ["transformers", "Qwen2VLProcessor"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | index))
    return folder


FLUX_SIZES: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
    "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip


def flux_network(kind: str = "FluxTransformer2DModel", **changes: Any) -> Any:
    """The transformer of a checkpoint, whose attention is far from even and in which text matters."""
    module = randomise(getattr(diffusers, kind)(**FLUX_SIZES | {"in_channels": 16} | changes), 3)
    return sharpened(module, "context_embedder", 3)


def t5_network(**changes: Any) -> Any:
    """T5's encoder, of the released vocabulary."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 32128}
    config = transformers.T5Config(**sizes | changes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return randomise(transformers.T5EncoderModel(config), 1)


def build_flux(folder: Path, *, kind: str = "dev", released: bool = False) -> Path:
    """Likewise, FLUX.1 schnell, dev, kontext or fill, or chroma."""
    sizes: dict[str, Any] = {"attention_head_dim": 32, "axes_dims_rope": (4, 14, 14)} if released else {}
    sizes |= {"in_channels": 288, "out_channels": 16} if kind == "fill" else {}
    clip = transformers.CLIPTextConfig(
        hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=1 if released else 2,
        hidden_act="quick_gelu", eos_token_id=2, bos_token_id=0,
    )  # fmt: skip
    vae = randomise(
        diffusers.AutoencoderKL(
            **_four_blocks(32 if released else 8), latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159,
            use_quant_conv=False, use_post_quant_conv=False,
        ),
        2,
    )  # fmt: skip
    by_size = {} if released else {"base_image_seq_len": 10, "max_image_seq_len": 64}
    shift = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0} | by_size
    parts: dict[str, Any] = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**({"shift": 1.0} if kind == "schnell" else shift)),
        "vae": vae,
    }
    words = transformers.T5Tokenizer.from_pretrained(T5)
    if kind == "chroma":
        parts |= {"text_encoder": t5_network(), "tokenizer": words}
        rest = {"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2}
        parts["transformer"] = flux_network("ChromaTransformer2DModel", **sizes, **rest)
        diffusers.ChromaPipeline(**parts).save_pretrained(folder)
        return folder
    parts |= {
        "text_encoder": randomise(transformers.CLIPTextModel(clip), 4),
        "tokenizer": transformers.CLIPTokenizer.from_pretrained(CLIP / "tokenizer"),
        "text_encoder_2": t5_network(), "tokenizer_2": words,
        "transformer": flux_network(pooled_projection_dim=64, guidance_embeds=kind != "schnell", **sizes),
    }  # fmt: skip
    name = {"kontext": "FluxKontextPipeline", "fill": "FluxFillPipeline"}.get(kind, "FluxPipeline")
    getattr(diffusers, name)(**parts).save_pretrained(folder)
    return folder


def build_anima(folder: Path, *, released: bool = False) -> Path:
    """Likewise, a folder of a modular pipeline."""
    words, t5 = tokenizer(), transformers.T5Tokenizer.from_pretrained(T5)
    channels = 16 if released else 4
    transformer: Any = randomise(
        diffusers.CosmosTransformer3DModel(
            in_channels=channels, out_channels=channels, num_attention_heads=3, attention_head_dim=32, num_layers=2,
            mlp_ratio=4.0 if released else 3.0, text_embed_dim=24, adaln_lora_dim=8, extra_pos_embed_type=None,
            rope_scale=(1.0, 4.0, 4.0) if released else (1.0, 3.0, 2.0),
        ),
        3,
    )  # fmt: skip
    other: dict[str, Any] = {} if released else {"model_dim": 32, "min_sequence_length": 96}
    adapter = diffusers.AnimaTextConditioner(
        **{"source_dim": 32, "target_dim": 24, "model_dim": 24, "num_layers": 2, "num_attention_heads": 2, **other}
    )
    with torch.no_grad():  # attention is far from even, and the text matters
        for name, weight in transformer.named_parameters():
            if name.endswith("norm_q.weight"):
                weight.mul_(4)
            if name.endswith("attn2.to_out.0.weight"):
                weight.mul_(3)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True], **({} if released else WAN_SIZES)
    )
    pipe = modular.AnimaAutoBlocks().init_pipeline()
    pipe.update_components(
        transformer=transformer, text_conditioner=randomise(adapter, 4), vae=randomise(vae, 2), tokenizer=words,
        t5_tokenizer=t5, text_encoder=_qwen3(transformers.Qwen3Model, words, 32, 3, 4, 1e6 if released else 1e4),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def packed(latents: np.ndarray) -> torch.Tensor:
    """Latents as the pipelines of Krea 2 and FLUX.1 take them."""
    tokens = pack(jnp.asarray(latents, jnp.float32), channels_first=True)
    return torch.from_numpy(np.array(tokens.reshape(len(latents), -1, tokens.shape[-1])))


class _Processor:
    """What FLUX.3's pipeline asks of the released processor, without the libraries for videos."""

    def __init__(self, words: Any) -> None:
        self.tokenizer, self.apply_chat_template = words, words.apply_chat_template


def _open_anima(folder: Path) -> Any:
    without_torchvision()
    pipe = modular.AnimaAutoBlocks().init_pipeline(str(folder))
    pipe.load_components(torch_dtype=torch.float32)
    return pipe


def _guided(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """The guidance scale is a component's."""
    if (scale := keywords.pop("guidance_scale", None)) is not None:
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=scale))
    return _at_once(pipe, prompts, latents, keywords)


def _by_class(name: str) -> Callable[[Path], Any]:
    return lambda folder: getattr(diffusers, name).from_pretrained(folder)


def _open_flux3(folder: Path) -> Any:
    words = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    index = json.loads((folder / "modular_model_index.json").read_text())
    pipe = _flux3_pipeline("Distilled" in str(index))
    kinds = {"text_encoder": transformers.Qwen3VLForConditionalGeneration, "vae": diffusers.AutoencoderKLFlux2,
             "transformer": diffusers.Flux3Transformer2DModel}  # fmt: skip
    parts = {name: kind.from_pretrained(folder / name).eval() for name, kind in kinds.items()}
    pipe.update_components(**parts, tokenizer=_Processor(words))
    return pipe


def _open_qwen(folder: Path) -> Any:
    processor = _QwenProcessor(transformers.AutoTokenizer.from_pretrained(folder / "processor"))
    return diffusers.QwenImage21Pipeline.from_pretrained(folder, processor=processor)


def _at_once(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    lists = {name: [*value] if isinstance(value, list) else value for name, value in keywords.items()}
    return pipe(prompt=[*prompts], latents=latents, **lists).images  # which writes into lists that it is given


def _three_layers(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """Read those of the shallow language model; those of the usual one are 9 apart."""
    return _at_once(pipe, prompts, latents, {"text_encoder_out_layers": (1, 2, 3), **keywords})


def _one_by_one(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """One image at a time: the reference takes one prompt."""
    guidance, negatives = keywords.pop("guidance_scale", None), keywords.pop("negative_prompt", None)
    if guidance is not None:
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=guidance))
    images = []
    for i, prompt in enumerate(prompts):
        more = {} if negatives is None else {"negative_prompt": negatives[i]}
        more["text_encoder_out_layers"] = tuple(range(1, 9))
        images.append(pipe(prompt=prompt, latents=latents[i : i + 1], **more, **keywords).images[0])
    return np.stack(images)


def _qwen_one_by_one(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """One image at a time: in the reference the padding of a shorter prompt moves its image."""
    scale, negatives, images = keywords.pop("guidance_scale", 1.0), keywords.pop("negative_prompt", None), []
    keywords |= {"output_resolution": 128} if "image" in keywords else {}
    for i, prompt in enumerate(prompts):
        more = {} if negatives is None else {"negative_prompt": negatives[i], "true_cfg_scale": scale}
        images.append(pipe(prompt, latents=latents[i : i + 1], **more, **keywords).images[0])
    return np.stack(images)


def _qwen_1(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """An empty negative prompt is a space in canvax, as its authors advise."""
    keywords |= {"true_cfg_scale": keywords.pop("guidance_scale", 1.0)}
    if keywords.get("negative_prompt") is not None:
        keywords["negative_prompt"] = [text or " " for text in keywords["negative_prompt"]]
    return _at_once(pipe, prompts, latents, keywords)


class _EditProcessor(transformers.ProcessorMixin):
    """What Qwen-Image-Edit's pipeline asks of the released processor, without the libraries for videos."""

    def __init__(self, words: Any) -> None:
        self.tokenizer = words

    def __call__(self, text: list[str], images: Sequence[Image.Image], **keywords: Any) -> Any:
        seen = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384})(
            images, return_tensors="pt"
        )
        for slots in (seen["image_grid_thw"].prod(-1) // 4).tolist():
            text = [words.replace("<|image_pad|>", "<|seen|>" * slots, 1) for words in text]
        found = self.tokenizer([words.replace("<|seen|>", "<|image_pad|>") for words in text], **keywords)
        found.update(seen)
        return found


def _open_qwen_edit(folder: Path) -> Any:
    """The pipeline with positions of images: with transformers 5 diffusers forgets them (its issue 14194)."""
    processor = _EditProcessor(transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"))
    name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    pipe = getattr(diffusers, name).from_pretrained(folder, processor=processor)
    forward, token = pipe.text_encoder.forward, pipe.text_encoder.config.image_token_id

    def placed(input_ids: Any, **keywords: Any) -> Any:
        return forward(input_ids=input_ids, mm_token_type_ids=(input_ids == token).int(), **keywords)

    pipe.text_encoder.forward = placed
    return pipe


EDIT_PIXELS = {"CONDITION_IMAGE_SIZE": 224 * 224, "VAE_IMAGE_SIZE": 128 * 128}
"""Pixels of the references of tests, by their names in diffusers."""


def _qwen_edit(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """One image at a time, of one reference if none is given: the reference takes one prompt and needs an image."""
    scale, negatives, images = keywords.pop("guidance_scale", 4.0), keywords.pop("negative_prompt", None), []
    several = isinstance(pipe, diffusers.QwenImageEditPlusPipeline)
    area, size_of = EDIT_PIXELS["VAE_IMAGE_SIZE"], pipeline_qwenimage_edit.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        for name, pixels in EDIT_PIXELS.items():
            patch.setattr(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus.{name}", pixels)
        patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: size_of(area, ratio))
        for i, prompt in enumerate(prompts):
            given = {"image": ONE, **keywords, "negative_prompt": negatives[i] if negatives else " "}
            given |= {"true_cfg_scale": scale, "image": given["image"] if several else given["image"][0]}
            images.append(pipe(prompt=prompt, latents=latents[i : i + 1], **given).images[0])
    return np.stack(images)


def _open_chroma(folder: Path) -> Any:
    """The pipeline with the mask of its authors: diffusers adds 1 and 0 to scores where theirs is true and false."""
    pipe = diffusers.ChromaPipeline.from_pretrained(folder)
    mask_of = pipe._prepare_attention_mask
    pipe._prepare_attention_mask = lambda **given: None if (mask := mask_of(**given)) is None else mask.bool()
    return pipe


def _schnell(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    scale = keywords.pop("guidance_scale", 1.0)
    return _at_once(pipe, prompts, latents, keywords | {"true_cfg_scale": scale, "max_sequence_length": 256})


def _fill(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """Everything is masked unless an image is given; the VAE gives the mean."""
    size = keywords["width"], keywords["height"]
    keywords.pop("negative_prompt", None)
    usual = {"image": Image.new("RGB", size, 128), "mask_image": Image.new("L", size, 255)}
    moments = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "sample", lambda self, *_: self.mode())
        return _at_once(pipe, prompts, latents, usual | keywords)


def _kontext(pipe: Any, prompts: Sequence[str], latents: Any, keywords: dict[str, Any]) -> np.ndarray:
    """An image of the size that is asked for; a reference of the size of one of the list that fits."""
    return _at_once(pipe, prompts, latents, keywords | {"max_area": keywords["width"] * keywords["height"]})


def _swapped(array: np.ndarray) -> np.ndarray:
    return np.roll(array, len(array) // 2, axis=0)


def _renamed(arrays: Arrays, spelled: Mapping[str, str]) -> Arrays:
    for ours, theirs in spelled.items():
        arrays = {name.replace(ours, theirs): array for name, array in arrays.items()}
    return arrays


def _stacked(found: Arrays, last: str, parts: Sequence[str], stack: str) -> None:
    """Put the parts of each stack into one array; ``last`` is the end of the name of the first part."""
    for name in [name for name in found if name.endswith(last)]:
        stem = name.removesuffix(last)
        found[f"{stem}{stack}"] = np.concatenate([found.pop(f"{stem}{part}") for part in parts])


def z_image_original(found: Arrays) -> Arrays:
    """Arrays of the transformer under the names of its authors and of ComfyUI."""
    parts = [f"to_{part}.weight" for part in "qkv"]
    _stacked(found, parts[0], parts, "qkv.weight")
    return _renamed(found, {
        "to_out.0": "out", "norm_q": "q_norm", "norm_k": "k_norm", "all_x_embedder.2-1": "x_embedder",
        "all_final_layer.2-1": "final_layer",
    })  # fmt: skip


def flux2_original(found: Arrays) -> Arrays:
    """Likewise."""
    found["norm_out.linear.weight"] = _swapped(found["norm_out.linear.weight"])
    for stream, names in (("img", "to_{}"), ("txt", "add_{}_proj")):
        parts = [f"attn.{names.format(part)}.weight" for part in "qkv"]
        _stacked(found, parts[0], parts, f"{stream}_attn.qkv.weight")
    found = _renamed(found, {
        "single_transformer_blocks.": "single_blocks.", "transformer_blocks.": "double_blocks.",
        "attn.to_qkv_mlp_proj": "linear1", "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
        "attn.to_out": "linear2", "ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale", "modulation_img.linear": "modulation_img.lin",
        "modulation_txt.linear": "modulation_txt.lin", "stream_modulation.linear": "stream_modulation.lin",
        "norm_out.linear": "final_layer.adaLN_modulation.1", "x_embedder": "img_in", "context_embedder": "txt_in",
        "proj_out": "final_layer.linear", "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    })  # fmt: skip
    for part in ("query", "key"):
        ours = f"attn.norm_{part[0]}.weight"
        found = {
            name.replace(ours, f"{'norm' if 'single' in name else 'img_attn.norm'}.{part}_norm.scale"): array
            for name, array in found.items()
        }
    return found


def flux3_original(found: Arrays) -> Arrays:
    """Likewise, by a table that is the test's."""
    named = {}
    for name, array in found.items():
        array = _swapped(array) if name == "norm_out.linear.weight" else array
        name = f"content_{name}" if name.startswith("mode_blocks.") else name
        named[name.replace(".linear.", ".lin.") if "modulations" in name else name] = array
    return _renamed(named, {
        "single_transformer_blocks.": "single_blocks.", "x_embedders.": "emb_in.", "context_embedder.": "txt_in.",
        "attn.to_q.": "q_proj.", "attn.to_k.": "k_proj.", "attn.to_v.": "v_proj.", "attn.to_out.0.": "attn_out.",
        "attn.norm_q.weight": "norm.query_norm.scale", "attn.norm_k.weight": "norm.key_norm.scale",
        "ff.linear_in.": "mlp_in.", "ff.linear_out.": "mlp_out.", "target_timestep_embedder.": "ref_time_in.",
        "timestep_embedder.": "time_in.", "_in.linear_1.": "_in.in_layer.", "_in.linear_2.": "_in.out_layer.",
        "proj_out.": "final_layer.image.linear.", "norm_out.linear.": "final_layer.image.adaLN_modulation.1.",
    })  # fmt: skip


WAN_PLACES = [f"decoder.upsamples.{i}.resample.1.weight" for i in (3, 7, 11)] + [
    "decoder.upsamples.14.residual.0.gamma"
]
"""Layers of Krea 2's decoder that tell how many blocks are between them."""


def by_rules(found: Arrays, names: Names) -> Arrays:
    """Arrays under the names that rules give; tables of a block are one row."""
    outgoing = [ArrayToSave(name, array.shape, array.dtype, lambda array=array: array) for name, array in found.items()]
    named = {array.name: array.get() for array in names.to_external(outgoing)}
    return {name: array.reshape(-1) if name.endswith("mod.lin") else array for name, array in named.items()}


def krea2_original(found: Arrays) -> Arrays:
    """Likewise; diffusers reads the names in a test."""
    return by_rules(found, Names(KREA2_NAMES))


def _ldm(found: Arrays) -> Arrays:
    vae = ldm_vae({name: torch.from_numpy(array) for name, array in found.items()})
    return {name: array.numpy() for name, array in vae.items()}


def _flux2_ldm(found: Arrays) -> Arrays:
    vae = _ldm(found)
    for name in [name for name in vae if "quant_conv" in name]:
        vae[f"{'decoder' if name.startswith('post') else 'encoder'}.{name}"] = vae.pop(name)
    return vae


def _with_prefix(found: Arrays) -> Arrays:
    return {f"model.{name}": array for name, array in found.items()}


def _factors(sizes: Mapping[str, tuple[int, int]], scale: float, *, shared: bool = False) -> Factors:
    """Changes of rank 2 of layers of these sizes, (out, in); ``shared``: a stack has one down for all."""
    rng = np.random.default_rng(3)
    downs = {into: rng.standard_normal((2, into), np.float32) for _, into in sizes.values()} if shared else {}
    return {
        name: (
            scale * rng.standard_normal((out, 2), np.float32),
            downs[into] if shared else rng.standard_normal((2, into), np.float32),
        )
        for name, (out, into) in sizes.items()
    }


def z_image_factors() -> Factors:
    """Of some layers as diffusers has them."""
    sizes = {f"attention.{name}": (64, 64) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    sizes["feed_forward.w1"] = 170, 64
    return _factors({f"layers.0.{name}": size for name, size in sizes.items()}, 0.2, shared=True)


def flux2_factors() -> Factors:
    """Likewise."""
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    sizes = {f"attn.{name}": (32, 32) for name in attention}
    sizes |= {"ff.linear_in": (192, 32), "ff_context.linear_out": (32, 96)}
    layers = {f"transformer_blocks.0.{name}": size for name, size in sizes.items()}
    layers |= {"single_transformer_blocks.1.attn.to_qkv_mlp_proj": (288, 32), "norm_out.linear": (64, 32)}
    layers |= {"single_transformer_blocks.1.attn.to_out": (32, 128), "context_embedder": (32, 48)}
    return _factors(layers, 0.2, shared=True)


def flux3_factors() -> Factors:
    """Likewise, of all modes."""
    sizes = {f"single_transformer_blocks.1.attn.{name}": (48, 48) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    sizes |= {"mode_blocks.image.0.ff.linear_in": (288, 48), "mode_blocks.image_cond.1.attn.to_v": (48, 48)}
    sizes |= {"txt_mode_blocks.0.ff.linear_out": (48, 144), "single_transformer_blocks.0.ff.linear_in": (288, 48)}
    return _factors(sizes, 0.2)


KREA2_LAYERS: dict[str, tuple[int, int]] = {
    "blocks.0.attn.wq": (64, 64), "blocks.1.attn.wk": (32, 64), "blocks.0.attn.wo": (64, 64),
    "blocks.1.attn.gate": (64, 64), "blocks.0.mlp.gate": (96, 64), "blocks.1.mlp.down": (64, 96),
    "txtfusion.layerwise_blocks.0.attn.wv": (16, 32), "txtfusion.refiner_blocks.1.mlp.up": (48, 32),
    "first": (64, 16), "tproj.1": (384, 64), "txtmlp.3": (64, 64), "last.linear": (16, 64),
}  # fmt: skip
"""Some layers as the authors call them, (out, in)."""


def qwen_factors() -> Factors:
    """Likewise."""
    sizes = {f"transformer_blocks.1.attn.{name}": (64, 64) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    sizes |= {f"transformer_blocks.0.img_mlp.{name}": (192, 64) for name in ("gate_layer", "proj")}
    sizes |= {"transformer_blocks.2.img_mlp.out": (64, 192), "modulation.1": (256, 64), "txt_in.in_layer": (64, 32)}
    return _factors(sizes, 0.1, shared=True)


def _krea2_names() -> dict[str, str]:
    """What diffusers calls them, by its own conversion."""
    convert = diffusers.loaders.lora_conversion_utils._convert_non_diffusers_krea2_lora_to_diffusers
    theirs = convert({f"diffusion_model.{name}.lora_A.weight": name for name in KREA2_LAYERS})
    return {name: key.split(".", 1)[1].removesuffix(".lora_A.weight") for key, name in theirs.items()}


def krea2_factors() -> Factors:
    """Of some layers as diffusers has them."""
    names = _krea2_names()
    return {names[name]: pair for name, pair in _factors(KREA2_LAYERS, 0.1).items()}


def _z_image_authors(factors: Factors) -> Factors:
    factors = dict(factors)
    qkv = [factors.pop(f"layers.0.attention.to_{part}") for part in "qkv"]
    factors["layers.0.attention.qkv"] = np.concatenate([up for up, _ in qkv]), qkv[0][1]
    factors["layers.0.attention.out"] = factors.pop("layers.0.attention.to_out.0")
    return factors


_FLUX2_AUTHORS = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.0.ff.linear_in": "double_blocks.0.img_mlp.0",
    "transformer_blocks.0.ff_context.linear_out": "double_blocks.0.txt_mlp.2",
    "single_transformer_blocks.1.attn.to_qkv_mlp_proj": "single_blocks.1.linear1",
    "single_transformer_blocks.1.attn.to_out": "single_blocks.1.linear2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "context_embedder": "txt_in",
}


def _flux2_authors(factors: Factors) -> Factors:
    factors = dict(factors)
    for stream, names in (("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"))):
        parts = [factors.pop(f"transformer_blocks.0.attn.{name}") for name in names]
        factors[f"double_blocks.0.{stream}_attn.qkv"] = np.concatenate([up for up, _ in parts]), parts[0][1]
    factors = {_FLUX2_AUTHORS.get(name, name): pair for name, pair in factors.items()}
    up, down = factors["final_layer.adaLN_modulation.1"]
    return factors | {"final_layer.adaLN_modulation.1": (_swapped(up), down)}


def _flux3_authors(factors: Factors) -> Factors:
    spelled = {
        "single_transformer_blocks": "single_blocks", "mode_blocks.image": "content_mode_blocks.image",
        "attn.to_out.0": "attn_out", "attn.to_q": "q_proj", "attn.to_k": "k_proj", "attn.to_v": "v_proj",
        "ff.linear_in": "mlp_in", "ff.linear_out": "mlp_out",
    }  # fmt: skip
    for ours, theirs in spelled.items():
        factors = {name.replace(ours, theirs): pair for name, pair in factors.items()}
    return factors


def _krea2_authors(factors: Factors) -> Factors:
    names = {theirs: ours for ours, theirs in _krea2_names().items()}
    return {names[name]: pair for name, pair in factors.items()}


def write_factors(path: Path, spelling: str, factors: Factors) -> Path:
    """Write a LoRA as PEFT does for diffusers, as kohya's scripts do, or as trainers for ComfyUI do."""
    arrays = {}
    for name, (up, down) in factors.items():
        flat = "lora_unet_" + name.replace(".", "_")
        names = {
            "peft": (f"transformer.{name}.lora_A.weight", f"transformer.{name}.lora_B.weight"),
            "comfy": (f"diffusion_model.{name}.lora_A.weight", f"diffusion_model.{name}.lora_B.weight"),
            "kohya": (f"{flat}.lora_down.weight", f"{flat}.lora_up.weight"),
        }[spelling]
        arrays |= dict(zip(names, (down, up), strict=True))
    return write(path, arrays)


def write(path: Path, arrays: Arrays) -> Path:
    """Write a safetensors file, and the folders that it is in."""
    path.parent.mkdir(exist_ok=True, parents=True)
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


def arrays_of(folder: Path, component: str) -> Arrays:
    """The arrays of a component of a checkpoint."""
    (path,) = (folder / component).glob("*.safetensors")
    return safetensors.numpy.load_file(path)


@dataclass(frozen=True)
class Record:
    """A family, and a model of it.

    Attributes:
        title: of the family, as ``info`` says it.
        build: writes a checkpoint; with ``released`` it has what no array tells.
        how: further arguments of ``build``.
        open: opens a checkpoint in diffusers.
        ask: asks its pipeline for images.
        factor, channels: pixels of a latent, and numbers in it.
        latents: noise as the pipeline takes it.
        prompts, negatives: of the same number of tokens as few as possible.
        steps, guidance: that are usual.
        factors, authors: a LoRA under the names of diffusers, and under those of the authors.
        original: arrays of the transformer under the names of the authors.
        vae, text: those of the other parts in files.
        files: names of the files of transformer, text encoder, autoencoder and perhaps second text encoder.
        layer: a layer of the file of the transformer.
        words: the folder of the tokenizer.
        size: height and width that both can draw.
    """

    title: str
    build: Callable[..., Path]
    open: Callable[[Path], Any]
    factor: int
    channels: int
    steps: tuple[int, float]
    factors: Callable[[], Factors]
    authors: Callable[[Factors], Factors]
    original: Callable[[Arrays], Arrays]
    vae: Callable[[Arrays], Arrays]
    files: tuple[str, ...]
    layer: str
    text: Callable[[Arrays], Arrays] = lambda found: found
    how: Mapping[str, Any] = field(default_factory=dict)
    ask: Callable[..., np.ndarray] = _at_once
    latents: Callable[[np.ndarray], Any] = nchw
    prompts: tuple[str, str] = (PROMPTS[0], PROMPTS[1])
    negatives: tuple[str, str] = ("blurry", "")
    distilled: bool = False
    words: str = "tokenizer"
    size: tuple[int, int] = (HEIGHT, WIDTH)


def _flux2(**more: Any) -> Record:
    return Record(
        title="FLUX.2", build=build_flux2, open=_by_class("Flux2KleinPipeline"), factor=16, factors=flux2_factors,
        authors=_flux2_authors, original=flux2_original, vae=_flux2_ldm, layer="single_blocks.0.linear1.weight",
        files=("flux-2-klein-4b", "qwen_3_4b", "flux2-vae"), **more,
    )  # fmt: skip


def _flux3(**more: Any) -> Record:
    return Record(
        title="FLUX.3", build=build_flux3, open=_open_flux3, factor=16, channels=16, factors=flux3_factors,
        authors=_flux3_authors, original=flux3_original, vae=_flux2_ldm, layer="single_blocks.1.q_proj.weight",
        files=("flux-3-klein", "qwen3vl_4b_bf16", "flux2-vae"), ask=_one_by_one, prompts=(PROMPTS[0], LONG),
        negatives=(LONG, ""), **more,
    )  # fmt: skip


def _krea2(**more: Any) -> Record:
    return Record(
        title="Krea 2", build=build_krea2, open=_by_class("Krea2Pipeline"), factor=8, channels=4, latents=packed,
        factors=krea2_factors, authors=_krea2_authors, original=krea2_original, text=_with_prefix,
        vae=lambda found: by_rules(found, Names(wan_vae_rules(WAN_PLACES))), layer="blocks.1.attn.gate.weight",
        files=("krea2_turbo_bf16", "qwen3vl_4b_bf16", "qwen_image_vae"), **more,
    )  # fmt: skip


def qwen_original(found: Arrays) -> Arrays:
    """Likewise."""
    _stacked(found, "gate_layer.weight", ["gate_layer.weight", "proj.weight"], "gate_up.weight")
    return found


def qwen_vae_original(found: Arrays) -> Arrays:
    """The autoencoder as ComfyUI stores it: as of videos, with the layers of a level numbered."""
    layers = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
              "conv_shortcut": "shortcut"}  # fmt: skip
    ends = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2", "mid_block.attentions.0": "middle.1",
            "mid_block.resnets.0": "middle.0", "mid_block.resnets.1": "middle.2", "post_quant_conv": "conv2",
            "quant_conv": "conv1"}  # fmt: skip
    named = {}
    for name, array in found.items():
        way = "down" if name.startswith("encoder") else "up"
        size = max(int(i) for i in re.findall(rf"{way}_blocks\.0\.resnets\.(\d+)", " ".join(found))) + 1
        name = re.sub(rf"{way}_blocks\.(\d+)\.resnets", rf"{way}samples.\1.{way}samples", name)
        name = re.sub(rf"{way}_blocks\.(\d+)\.{way}sampler", rf"{way}samples.\1.{way}samples.{size}", name)
        for old, new in (layers | ends).items():
            name = re.sub(rf"(^|\.){re.escape(old)}(?=\.)", rf"\g<1>{new}", name)
        is_video = array.ndim == 4 and not re.search(r"gamma|resample|middle\.1", name)
        named[name] = array[:, :, None] if is_video else array
    return named


def _qwen_authors(factors: Factors) -> Factors:
    factors = dict(factors)
    both = [factors.pop(f"transformer_blocks.0.img_mlp.{name}") for name in ("gate_layer", "proj")]
    return factors | {"transformer_blocks.0.img_mlp.gate_up": (np.concatenate([up for up, _ in both]), both[0][1])}


def _qwen(**more: Any) -> Record:
    return Record(
        title="Qwen-Image", build=build_qwen, open=_open_qwen, factor=16, channels=16, factors=qwen_factors,
        authors=_qwen_authors, original=qwen_original, vae=qwen_vae_original,
        latents=lambda noise: torch.from_numpy(np.ascontiguousarray(noise.reshape(len(noise), -1, 16))),
        files=("qwen_image_2.1_bf16", "qwen3vl_8b_bf16", "qwen_image_2.1_vae_bf16"), ask=_qwen_one_by_one,
        words="processor", size=(64, 96), layer="transformer_blocks.1.img_mlp.gate_up.weight", **more,
    )  # fmt: skip


def qwen_1_factors() -> Factors:
    """Likewise."""
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    sizes = {f"transformer_blocks.0.attn.{name}": (48, 48) for name in attention}
    sizes |= {"transformer_blocks.1.img_mlp.net.0.proj": (192, 48), "transformer_blocks.0.txt_mlp.net.2": (48, 192)}
    sizes |= {"transformer_blocks.1.img_mod.1": (288, 48), "transformer_blocks.0.txt_mod.1": (288, 48)}
    return _factors(sizes | {"img_in": (48, 16), "proj_out": (16, 48)}, 0.2)


def _qwen_1_record(**more: Any) -> Record:
    usual: dict[str, Any] = {
        "build": build_qwen_1, "open": _by_class("QwenImagePipeline"), "ask": _qwen_1, "steps": (50, 4.0),
        "files": ("qwen_image_bf16", "qwen_2.5_vl_7b", "qwen_image_vae"),
    }  # fmt: skip
    return Record(
        title="Qwen-Image 1", factor=8, channels=4, latents=packed, factors=qwen_1_factors,
        authors=lambda factors: factors, original=lambda found: found, negatives=("blurry", " "),
        vae=lambda found: by_rules(found, Names(wan_vae_rules(WAN_PLACES))),
        layer="transformer_blocks.1.img_mlp.net.0.proj.weight", **usual | more,
    )  # fmt: skip


def flux_original(found: Arrays) -> Arrays:
    """Likewise, of FLUX.1 and Chroma, by a table that is the test's."""
    if "norm_out.linear.weight" in found:
        for end in ("weight", "bias"):
            found[f"norm_out.linear.{end}"] = _swapped(found[f"norm_out.linear.{end}"])
    for end in ("weight", "bias"):
        _stacked(found, f"attn.add_q_proj.{end}", [f"attn.add_{part}_proj.{end}" for part in "qkv"],
                 f"txt_attn.qkv.{end}")  # fmt: skip
        single = [f"attn.to_{part}.{end}" for part in "qkv"] + [f"proj_mlp.{end}"]
        for name in [name for name in found if name.startswith("single_") and name.endswith(f"proj_mlp.{end}")]:
            stem = name.removesuffix(f"proj_mlp.{end}")
            found[f"{stem}linear1.{end}"] = np.concatenate([found.pop(f"{stem}{part}") for part in single])
        _stacked(found, f"attn.to_q.{end}", [f"attn.to_{part}.{end}" for part in "qkv"], f"img_attn.qkv.{end}")
    found = _renamed(found, {
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale", "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin", "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
        "ff.net.0.proj": "img_mlp.0", "ff.net.2": "img_mlp.2", "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    })  # fmt: skip
    named = {}
    for name, array in found.items():
        norm = "norm" if name.startswith("single_") else "img_attn.norm"
        name = name.replace("attn.norm_q.weight", f"{norm}.query_norm.scale")
        name = name.replace("attn.norm_k.weight", f"{norm}.key_norm.scale")
        name = re.sub(r"(single_transformer_blocks\.\d+)\.norm\.linear", r"\1.modulation.lin", name)
        name = re.sub(r"(single_transformer_blocks\.\d+)\.proj_out", r"\1.linear2", name)
        name = re.sub(r"(guidance_layer\.norms\.\d+)\.weight", r"\1.scale", name)
        name = re.sub(r"(guidance_layer\.layers\.\d+)\.linear_1", r"\1.in_layer", name)
        named[re.sub(r"(guidance_layer\.layers\.\d+)\.linear_2", r"\1.out_layer", name)] = array
    return _renamed(named, {
        "single_transformer_blocks.": "single_blocks.", "transformer_blocks.": "double_blocks.",
        "norm_out.linear": "final_layer.adaLN_modulation.1", "x_embedder": "img_in", "context_embedder": "txt_in",
        "proj_out": "final_layer.linear", "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    })  # fmt: skip


def flux_factors() -> Factors:
    """Likewise."""
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    sizes = {f"transformer_blocks.0.attn.{name}": (48, 48) for name in attention}
    sizes |= {"transformer_blocks.1.ff.net.0.proj": (192, 48), "transformer_blocks.0.ff_context.net.2": (48, 192)}
    sizes |= {f"single_transformer_blocks.1.attn.to_{part}": (48, 48) for part in "qkv"}
    sizes |= {"single_transformer_blocks.1.proj_mlp": (192, 48), "single_transformer_blocks.0.proj_out": (48, 240)}
    return _factors(sizes | {"context_embedder": (48, 32)}, 0.2, shared=True)


_FLUX_AUTHORS = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.1.ff.net.0.proj": "double_blocks.1.img_mlp.0",
    "transformer_blocks.0.ff_context.net.2": "double_blocks.0.txt_mlp.2",
    "single_transformer_blocks.0.proj_out": "single_blocks.0.linear2", "context_embedder": "txt_in",
}  # fmt: skip


def _flux_authors(factors: Factors) -> Factors:
    factors, single = dict(factors), "single_transformer_blocks.1."
    stacks = {
        "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{part}" for part in "qkv"],
        "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{part}_proj" for part in "qkv"],
        "single_blocks.1.linear1": [*(f"{single}attn.to_{part}" for part in "qkv"), f"{single}proj_mlp"],
    }
    for name, layers in stacks.items():
        parts = [factors.pop(layer) for layer in layers]
        factors[name] = np.concatenate([up for up, _ in parts]), parts[0][1]
    return {_FLUX_AUTHORS.get(name, name): pair for name, pair in factors.items()}


def _flux(kind: str, **more: Any) -> Record:
    usual: dict[str, Any] = {
        "title": "FLUX.1", "open": _by_class("FluxPipeline"), "steps": (28, 3.5),
        "files": ("flux1-dev", "clip_l", "ae", "t5xxl_fp16"), "words": "tokenizer_2", "negatives": ("blurry", ""),
    }  # fmt: skip
    return Record(
        build=build_flux, how={"kind": kind}, factor=8, channels=4, latents=packed, factors=flux_factors, vae=_ldm,
        authors=_flux_authors, original=flux_original, layer="single_blocks.0.linear1.weight", **usual | more,
    )  # fmt: skip


def anima_original(found: Arrays) -> Arrays:
    """Likewise, by a table that is the test's; the adapter is in the same file."""
    named = {}
    for name, array in found.items():
        for i, part in enumerate(("self_attn", "cross_attn", "mlp"), 1):
            name = name.replace(f".norm{i}.linear_", f".adaln_modulation_{part}.").replace(f".attn{i}.", f".{part}.")
        named[name] = array
    return _renamed(named, {
        "transformer_blocks.": "blocks.", ".to_out.0.": ".output_proj.", ".to_q.": ".q_proj.", ".to_k.": ".k_proj.",
        ".to_v.": ".v_proj.", ".norm_q.": ".q_norm.", ".norm_k.": ".k_norm.", "ff.net.0.proj": "mlp.layer1",
        "ff.net.2": "mlp.layer2", "patch_embed.proj": "x_embedder.proj.1", "time_embed.t_embedder": "t_embedder.1",
        "time_embed.norm": "t_embedding_norm", "norm_out.linear_": "final_layer.adaln_modulation.",
        "proj_out": "final_layer.linear",
    })  # fmt: skip


def anima_factors() -> Factors:
    """Likewise."""
    sizes = {f"transformer_blocks.0.attn1.{name}": (96, 96) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    sizes |= {"transformer_blocks.1.attn2.to_v": (96, 24), "transformer_blocks.1.ff.net.0.proj": (288, 96)}
    sizes |= {"transformer_blocks.0.ff.net.2": (96, 288), "transformer_blocks.1.norm2.linear_2": (288, 8)}
    return _factors(sizes | {"norm_out.linear_1": (8, 96), "proj_out": (16, 96)}, 0.1)


def _anima_authors(factors: Factors) -> Factors:
    return {anima_name.removesuffix(".x"): pair for name, pair in factors.items()
            for anima_name in anima_original({f"{name}.x": pair[0]})}  # fmt: skip


RECORDS = {
    "anima": Record(
        title="Anima", build=build_anima, open=_open_anima, factor=8, channels=4, steps=(30, 4.0), ask=_guided,
        factors=anima_factors, authors=_anima_authors, original=anima_original, text=_with_prefix,
        vae=lambda found: by_rules(found, Names(wan_vae_rules(WAN_PLACES))), layer="blocks.1.self_attn.q_proj.weight",
        files=("anima-base-v1.0", "qwen_3_06b_base", "qwen_image_vae"),
        latents=lambda noise: nchw(noise)[:, :, None],
    ),
    "flux-schnell": _flux("schnell", ask=_schnell, steps=(4, 1.0), distilled=True),
    "flux-dev": _flux("dev"),
    "flux-kontext": _flux("kontext", open=_by_class("FluxKontextPipeline"), ask=_kontext, steps=(28, 2.5)),
    "flux-fill": _flux("fill", open=_by_class("FluxFillPipeline"), ask=_fill, steps=(50, 30.0)),
    "chroma": _flux(
        "chroma", title="Chroma", open=_open_chroma, steps=(35, 5.0), files=("Chroma1-HD", "t5xxl_fp16", "ae"),
        words="tokenizer",
    ),
    "z-image": Record(
        title="Z-Image", build=build_z_image, open=_by_class("ZImagePipeline"), factor=8, channels=16, steps=(8, 0.0),
        factors=z_image_factors, authors=_z_image_authors, original=z_image_original, vae=_ldm, text=_with_prefix,
        files=("z_image_turbo_bf16", "qwen_3_4b", "ae"), layer="layers.0.attention.qkv.weight", distilled=True,
    ),
    "flux2": _flux2(channels=16, steps=(4, 1.0), distilled=True, ask=_three_layers),
    "flux2-base": _flux2(
        channels=24, steps=(50, 4.0),
        how={
            "distilled": False, "layers": 30, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 24,
            "num_attention_heads": 3, "mlp_ratio": 2.5, "axes_dims_rope": (4, 6, 8, 6), "rope_theta": 500,
            "in_channels": 24,
        },
    ),
    "flux3": _flux3(steps=(16, 1.0), how={"distilled": True}, distilled=True),
    "flux3-base": _flux3(steps=(50, 3.5), how={"distilled": False}),
    "krea2": _krea2(steps=(28, 4.5)),
    "krea2-turbo": _krea2(steps=(8, 0.0), how={"is_distilled": True}, distilled=True),
    "qwen": _qwen(steps=(40, 1.0)),
    "qwen-1": _qwen_1_record(),
    "qwen-edit": _qwen_1_record(
        build=build_qwen_edit, open=_open_qwen_edit, ask=_qwen_edit, steps=(40, 4.0),
        files=("qwen_image_edit_2511_bf16", "qwen_2.5_vl_7b", "qwen_image_vae"),
    ),
    "qwen-edit-first": _qwen_1_record(
        build=build_qwen_edit, open=_open_qwen_edit, ask=_qwen_edit, steps=(50, 4.0), how={"first": True},
        files=("qwen_image_edit_bf16", "qwen_2.5_vl_7b", "qwen_image_vae"),
    ),
    "qwen-turbo": _qwen(steps=(4, 1.0), how={"sample_sigmas": TURBO_TIMES}, distilled=True),
}  # fmt: skip


class Model:
    """A checkpoint in both libraries."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.record = name, RECORDS[name]
        self.folder = self.record.build(folder, **self.record.how)
        self.theirs = self.opened()
        self.ours = self.loaded()

    def opened(self) -> Any:
        """The pipeline of diffusers, anew."""
        pipe = self.record.open(self.folder)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def loaded(self, folder: Path | None = None, **changes: Any) -> canvax.Pipeline:
        """The pipeline of canvax, anew: of this checkpoint on one device, but for ``changes``."""
        return load(folder or self.folder, **changes)

    @property
    def small(self) -> dict[str, Any]:
        """The size of an image, as arguments."""
        return dict(zip(("height", "width"), self.record.size, strict=True))

    def noise(self, *size: int) -> np.ndarray:
        """The same for both, of an image of this height and width."""
        sides = [side // self.record.factor for side in size or self.record.size]
        return initial_noise(SEEDS, (*sides, self.record.channels))

    def reference(
        self, prompts: Sequence[str] | None = None, latents: np.ndarray | None = None, pipe: Any = None, **keywords: Any
    ) -> Any:
        """Images of diffusers [2, H, W, 3], of the size of the latents."""
        latents = self.noise() if latents is None else latents
        height, width = (self.record.factor * side for side in latents.shape[1:3])
        usual = {"height": height, "width": width, "output_type": "np"}
        with torch.no_grad():
            prompts = self.record.prompts if prompts is None else prompts
            return self.record.ask(pipe or self.theirs, prompts, self.record.latents(latents), usual | keywords)

    def draw(self, pipe: canvax.Pipeline | None = None, **keywords: Any) -> canvax.Result:
        """Images of canvax, in few steps."""
        usual: dict[str, Any] = {"latents": self.noise(), "num_inference_steps": 2, "options": QUIET}
        if keywords.get("image") is None:
            usual |= self.small
        return (pipe or self.ours)(keywords.pop("prompt", [*self.record.prompts]), **usual | keywords)

    def lora(self, path: Path, spelling: str, **stray: Any) -> Path:
        """Write the adapter of the record, and ``stray`` layers."""
        factors = self.record.factors()
        factors = factors if spelling == "peft" else self.record.authors(factors)
        return write_factors(path, spelling, {**factors, **stray})


def over(*names: Any, slow: Sequence[str] = (), weekly: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Run a test for these models; the fixture ``model`` makes them. Those named again are ``slow`` or ``weekly``."""
    marked = [*(pytest.param(name, marks=pytest.mark.slow) for name in slow)]
    marked += [pytest.param(name, marks=pytest.mark.weekly) for name in weekly]
    return pytest.mark.parametrize("model", [*names, *marked], indirect=True)


def one_family(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """Remember what was made for the last family; what was compiled for the one before goes."""

    @lru_cache(1)
    def made(name: str) -> Any:
        forget_programs()
        return make(name)

    return made


class Files:
    """A checkpoint with what the released models have, and its parts as files that people download.

    Attributes:
        folder: the checkpoint as diffusers writes it.
        files: ``model``, the transformer; ``text_encoder``, ``vae`` and others; and ``tokenizer``, a folder.
        parts: components with weights.
        wanted: the checkpoint in canvax.
        sees: the text encoder has eyes, whose config no file of arrays tells.
    """

    def __init__(self, name: str, into: Path) -> None:
        self.name, self.record = name, RECORDS[name]
        self.sees = "vl" in self.record.files[1]
        self.folder = self.record.build(into / "folder", **self.record.how, released=True)
        self.parts = ("transformer", "text_encoder", "vae", "text_encoder_2")[: len(self.record.files)]
        found = {part: arrays_of(self.folder, part) for part in self.parts}
        if name == "anima":
            self.parts = (*self.parts, "text_conditioner")
            inside = arrays_of(self.folder, "text_conditioner").items()
            found["transformer"] |= {f"llm_adapter.{name}": array for name, array in inside}
        shutil.copytree(self.folder / self.record.words, into / "words")
        model, text, vae, *more = (into / f"{name}.safetensors" for name in self.record.files)
        self.files = {
            "model": write(model, self.record.original(found["transformer"])),
            "text_encoder": write(text, self.record.text(found["text_encoder"])),
            "vae": write(vae, self.record.vae(found["vae"])),
            **{part: write(path, found[part]) for part, path in zip(self.parts[3:], more, strict=False)},
            "tokenizer": into / "words",
        }
        self.wanted = load(self.folder)

    def arrays(self, part: str = "model") -> Arrays:
        """The arrays of a file."""
        return safetensors.numpy.load_file(self.files[part])

    def load(self, model: Path | None = None, **changes: Any) -> canvax.Pipeline:
        """Load a transformer with the other files, but for ``changes``; None leaves a part out."""
        given = {name: part for name, part in {**self.files, **changes}.items() if name != "model" and part is not None}
        return load(model or self.files["model"], **given)

    def flags(self) -> list[str]:
        """The flags of the other files."""
        return [word for name, part in self.files.items() if name != "model"
                for word in (f"--{name.replace('_', '-')}", str(part))]  # fmt: skip


def load(model: Path | str, **changes: Any) -> canvax.Pipeline:
    """Load in float32 on one device."""
    usual = {"dtype": "float32", "mesh": make_mesh(jax.devices()[:1]), "progress": False}
    return canvax.load(model, **usual | changes)


def assert_same(params: Any, wanted: Any) -> None:
    """All arrays are those, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
