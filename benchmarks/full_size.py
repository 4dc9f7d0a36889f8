"""Full-size checkpoints with random weights, in the real layout: nobody has to download anything to measure."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from canvax.models.presets import PRESETS
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.params import init_params
from canvax.weights.hub import BUNDLED
from canvax.weights.load import Component
from canvax.weights.save import save_component

TEXT_CLASSES = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}


def write_checkpoint(folder: Path, family: str, *, seed: int = 0) -> Path:
    """A float32 checkpoint of ``family`` ("sd15", "sd21", "sdxl"), random weights; the tokenizer is the bundled one."""
    preset = PRESETS[family]
    unet, vae, text = preset.unet, preset.vae, preset.text
    parts: list[tuple[Component, Any, dict[str, Any]]] = [
        (Component("unet", unet_spec(unet), "diffusers"), unet, {"_class_name": "UNet2DConditionModel"}),
        (Component("vae", vae_spec(vae), "diffusers"), vae, {"_class_name": "AutoencoderKL"}),
    ]
    for name, config in text.parts.items():
        component = Component(name, text.specs[name], "transformers")
        parts.append((component, config, {"model_type": "clip_text_model"}))
    folder.mkdir(parents=True)
    for number, (component, config, extra) in enumerate(parts):
        params = init_params(component.spec, seed + number)
        save_component(folder / component.name, component, params, extra | dataclasses.asdict(config))
    tokenizers = [name.replace("text_encoder", "tokenizer") for name in text.parts]
    for name in tokenizers:
        shutil.copytree(BUNDLED["emoji"] / "tokenizer", folder / name)
    (folder / "scheduler").mkdir()
    scheduler = {
        "_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1, "prediction_type": preset.prediction,
    }  # fmt: skip
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {
        "_class_name": "StableDiffusionXLPipeline" if text.second else "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        **{name: ["transformers", TEXT_CLASSES[name]] for name in text.parts},
        **{name: ["transformers", "CLIPTokenizer"] for name in tokenizers},
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
