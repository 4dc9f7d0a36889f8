"""A small Stable Diffusion 1.x with random weights, in the layout of the real ones and in either format of weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from canvax.models.clip import text_encoder_spec
from canvax.models.configs import ClipTextConfig, ClipVisionConfig, UNetConfig, VaeConfig
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.params import init_params
from canvax.pipelines.safety import COMPONENT, safety_spec
from canvax.weights.folder import FLAX_FILES
from canvax.weights.load import Component
from canvax.weights.location import BUNDLED
from canvax.weights.save import save_component
from tests.support.bundled import VOCABULARY
from tests.support.checkpoints import flax_bytes, flax_tree, write_json

UNET = UNetConfig(
    sample_size=8,
    block_out_channels=(32, 64),
    layers_per_block=1,
    attention_head_dim=4,
    cross_attention_dim=48,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
VAE = VaeConfig(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(32,) * 4,
)
CHECKER = ClipVisionConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
    projection_dim=16,
)  # fmt: skip
TEXT = ClipTextConfig(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
SCHEDULER = {
    "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
}  # fmt: skip
SHALLOW_UNET = dataclasses.replace(
    UNET, block_out_channels=(32,), down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",)
)
"""Of one level, whose gradient compiles in half the time."""
CLASSES = {
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
}


def write_small_checkpoint(
    folder: Path, form: str = "torch", scheduler: dict[str, Any] = SCHEDULER, unet: UNetConfig = UNET
) -> Path:
    """The checkpoint, its weights as safetensors (``form`` torch) or as Flax msgpack (flax); 64 x 64 pixels.

    Either form holds the same numbers. The safety checker of its index is not there; ``write_small_checker`` makes one.
    """
    parts = [
        (Component("unet", unet_spec(unet), "diffusers"), unet),
        (Component("vae", vae_spec(VAE), "diffusers"), VAE),
        (Component("text_encoder", text_encoder_spec(TEXT), "transformers"), TEXT),
    ]
    prefix = "Flax" if form == "flax" else ""
    folder.mkdir(parents=True)
    for seed, (part, config) in enumerate(parts):
        library, name = CLASSES[part.name]
        kind = {"_class_name": prefix + name} if library == "diffusers" else {"model_type": "clip_text_model"}
        values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None} | kind
        params = init_params(part.spec, seed)
        if form == "flax":
            write_json(folder / part.name / "config.json", values)
            (folder / part.name / FLAX_FILES[part.kind]).write_bytes(flax_bytes(flax_tree(part, params)))
        else:
            save_component(folder / part.name, part, params, values)
    shutil.copytree(BUNDLED["emoji"] / "tokenizer", folder / "tokenizer")
    class_name = prefix + scheduler["_class_name"]
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler | {"_class_name": class_name})
    index = {name: [library, prefix + kind] for name, (library, kind) in CLASSES.items()}
    index |= {
        "_class_name": f"{prefix}StableDiffusionPipeline",
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", class_name],
        "safety_checker": ["stable_diffusion", f"{prefix}StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
    }
    write_json(folder / "model_index.json", index)
    return folder


def write_small_checker(folder: Path, form: str = "torch") -> None:
    """A safety checker that refuses nothing."""
    part = Component(COMPONENT, safety_spec(CHECKER), "transformers")
    params = init_params(part.spec, 7)
    for name in ("concept_embeds", "special_care_embeds"):
        params[name] = np.random.default_rng(len(name)).standard_normal(params[name].shape, np.float32)
        params[f"{name}_weights"] = np.full(params[f"{name}_weights"].shape, 2.0, np.float32)
    config = {"vision_config": dataclasses.asdict(CHECKER), "projection_dim": CHECKER.projection_dim}
    if form == "flax":
        write_json(folder / "config.json", config)
        (folder / "flax_model.msgpack").write_bytes(flax_bytes(flax_tree(part, params)))
    else:
        save_component(folder, part, params, config)
