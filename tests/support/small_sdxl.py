"""A tiny SDXL with random weights, and its refiner, in the layout of the real ones and in either format of weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from canvax.models.clip import clip_configs, clip_encoders
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.text import TextEncoders
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.params import init_params
from canvax.weights.folder import FLAX_FILES
from canvax.weights.load import Component
from canvax.weights.location import BUNDLED
from canvax.weights.save import save_component
from tests.support.bundled import VOCABULARY
from tests.support.checkpoints import flax_bytes, flax_tree, write_json

TEXT = clip_encoders(
    ClipTextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ),
    ClipTextConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        hidden_act="gelu", projection_dim=8, eos_token_id=2,
    ),
)  # fmt: skip
REFINER_TEXT = clip_encoders(None, clip_configs(TEXT)["text_encoder_2"])
UNET = UNetConfig(
    sample_size=8, block_out_channels=(8, 16), layers_per_block=1, attention_head_dim=(1, 2), norm_num_groups=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=40, use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=4,
    projection_class_embeddings_input_dim=8 + 6 * 4,
)  # fmt: skip
REFINER_UNET = dataclasses.replace(UNET, cross_attention_dim=24, projection_class_embeddings_input_dim=8 + 5 * 4)
VAE = VaeConfig(
    block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=4,
    up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=0.13025,
)  # fmt: skip
CLASSES = {
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
}
SCHEDULER = {
    "_class_name": "EulerDiscreteScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading", "steps_offset": 1, "clip_sample": False, "skip_prk_steps": True,
}  # fmt: skip


def build(
    folder: Path,
    *,
    text: TextEncoders = TEXT,
    unet: UNetConfig = UNET,
    form: str = "torch",
    scheduler: dict[str, Any] = SCHEDULER,
    **index: Any,
) -> Path:
    """A tiny random checkpoint, as PyTorch or as Flax files."""
    flax = "Flax" if form == "flax" else ""
    values: dict[str, Any] = {"_class_name": f"{flax}StableDiffusionXLPipeline", "force_zeros_for_empty_prompt": True}
    configs: dict[str, Any] = {"unet": unet, "vae": VAE, **clip_configs(text)}
    parts = [Component(name, spec, "transformers") for name, spec in text.specs.items()]
    parts += [Component("unet", unet_spec(unet), "diffusers"), Component("vae", vae_spec(VAE), "diffusers")]
    for i, part in enumerate(parts):
        params = init_params(part.spec, i)
        values[part.name] = [part.kind, flax + CLASSES[part.name]]
        config = dataclasses.asdict(configs[part.name])
        config |= {"model_type": "clip_text_model"} if part.name in clip_configs(text) else {}
        if form == "flax":
            write_json(folder / part.name / "config.json", config)
            (folder / part.name / FLAX_FILES[part.kind]).write_bytes(flax_bytes(flax_tree(part, params)))
        else:
            save_component(folder / part.name, part, params, config)
    for name in clip_configs(text):
        target = name.replace("text_encoder", "tokenizer")
        values[target] = ["transformers", "CLIPTokenizer"]
        shutil.copytree(BUNDLED["emoji"] / "tokenizer", folder / target)
    class_name = flax + scheduler["_class_name"]
    values["scheduler"] = ["diffusers", class_name]
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler | {"_class_name": class_name})
    write_json(folder / "model_index.json", values | index)
    return folder


def build_refiner(folder: Path) -> Path:
    return build(
        folder, text=REFINER_TEXT, unet=REFINER_UNET, _class_name="StableDiffusionXLImg2ImgPipeline",
        requires_aesthetics_score=True, text_encoder=[None, None], tokenizer=[None, None],
    )  # fmt: skip
