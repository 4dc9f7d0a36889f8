"""From trained parameters to a model folder that canvax and PyTorch diffusers load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from canvax.compile.programs import Programs
from canvax.families.read import read_model
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.text import FIRST
from canvax.params import Params
from canvax.pipelines.pipeline import Pipeline
from canvax.samplers import from_scheduler_config
from canvax.samplers.schedule import NoiseSchedule
from canvax.tokenizers.clip import BOS, EOS, ClipTokenizer
from canvax.types import DType
from canvax.weights.folder import DEFAULTS
from canvax.weights.identify import INDEX
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.save import write_json

_VERSION = {"_diffusers_version": "0.42.1"}
"""Of the layout that is written."""


@dataclass(frozen=True)
class Design:
    """A Stable Diffusion of one text encoder, before it has weights.

    Attributes:
        text: config of the text encoder; its vocabulary is that of the tokenizer.
        unet: config of the UNet.
        vae: config of the autoencoder.
        scheduler: ``scheduler_config.json``: the noise trained with, and the sampler drawn with.
        defaults: ``canvax.json``: steps, guidance scale and strength of a second pass.
    """

    text: ClipTextConfig
    unet: UNetConfig
    vae: VaeConfig
    scheduler: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise to train with."""
        return from_scheduler_config(self.scheduler).schedule

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """``config.json`` of every component."""
        unet = {"_class_name": "UNet2DConditionModel", **_VERSION, **_given(self.unet)}
        side = (self.unet.sample_size or 64) * self.vae.factor
        vae = {"_class_name": "AutoencoderKL", **_VERSION, "sample_size": side, **_given(self.vae)}
        # transformers reads the ids of the special tokens from here, and the dtype of the weights.
        ids = {"bos_token_id": self.text.vocab_size - 2, "pad_token_id": self.text.vocab_size - 1}
        text = {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model", "dtype": "float32", **ids}
        return {
            "unet": unet,
            "vae": vae,
            FIRST: text | asdict(self.text) | {"eos_token_id": self.text.vocab_size - 1},
            "scheduler": {**_VERSION, **self.scheduler},
        }


INDEX_OF_PARTS = {
    "_class_name": "StableDiffusionPipeline",
    **_VERSION,
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", ""],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write_skeleton(folder: Path, design: Design) -> None:
    """Everything of a model but its weights; ``folder / "tokenizer"`` is there already."""
    for name, config in design.configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / name / ("scheduler_config.json" if name == "scheduler" else "config.json"), config)
    write_json(folder / DEFAULTS, design.defaults)
    write_json(folder / INDEX, {**INDEX_OF_PARTS, "scheduler": ["diffusers", design.scheduler["_class_name"]]})


def open_skeleton(folder: Path, mesh: Mesh) -> Pipeline:
    """A pipeline without parameters, which are passed to each call; compiles once whatever they become."""
    model = read_model(open_files(Location(folder), weights=False), "float32")
    return Pipeline(model, Programs(model.networks, mesh))


def save_model(skeleton: Pipeline, folder: Path, params: Params, dtype: DType) -> Path:
    """Write the finished model; the folder must not exist."""
    return skeleton.model.save(folder, jax.device_get(params), dtype=dtype)


def check_tokenizer(tokenizer: ClipTokenizer, text: ClipTextConfig) -> None:
    """The vocabulary that a text encoder was declared with must be the tokenizer's own."""
    size = tokenizer.backend.get_vocab_size()
    if size != text.vocab_size or tokenizer.eos != size - 1 or tokenizer.bos != size - 2:
        raise ValueError(f"{BOS} and {EOS} must end a vocabulary of {text.vocab_size} entries; this one has {size}")


def _given(config: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if value is not None}
