"""Released configs in the reference: names and shapes of every network, what null means, tokenizers and schedulers."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers

from canvax.errors import CheckpointError
from canvax.models.clip import text_encoder_spec
from canvax.models.configs import ClipTextConfig, TinyConfig, UNetConfig, VaeConfig
from canvax.models.controlnet import ControlNet
from canvax.models.controlnet_union import UnionNet
from canvax.models.decoder_lm import DecoderConfig, decoder_lm_spec
from canvax.models.flux2 import Flux2Config, flux2_spec
from canvax.models.flux2_vae import UNUSED, Flux2VaeConfig, flux2_vae_spec
from canvax.models.krea2 import Krea2Config, krea2_spec
from canvax.models.t5 import T5Config, t5_spec
from canvax.models.tiny import tiny_spec
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.models.wan_vae import WanVaeConfig, wan_vae_spec
from canvax.models.z_image import ZImageConfig, z_image_spec
from canvax.params import Spec, count, flatten
from canvax.samplers import build_table, from_scheduler_config
from canvax.tokenizers.clip import ClipTokenizer
from canvax.weights.controlnet import is_union
from canvax.weights.single_file import CLIP
from tests.support.released import ARRAYS, CONFIGS, kind_of
from tests.test_released import REFUSED

from .probe import compare, in_float64
from .test_transformers_autoencoders import frame_of
from .transformers_reference import State, same_names_and_shapes, stored, unfused

__all__ = ["in_float64"]
Fields = dict[str, Any]


def control(fields: Fields) -> Spec:
    return (UnionNet if is_union(fields) else ControlNet).from_dict(fields).spec


def clip(fields: Fields) -> Spec:
    projection = "WithProjection" in kind_of(fields)
    return text_encoder_spec(ClipTextConfig.from_dict(fields), projection=projection)


SPECS: dict[str, Callable[[Fields], Spec]] = {
    "UNet2DConditionModel": lambda fields: unet_spec(UNetConfig.from_dict(fields)),
    "AutoencoderKL": lambda fields: vae_spec(VaeConfig.from_dict(fields)),
    "AutoencoderTiny": lambda fields: tiny_spec(TinyConfig.from_dict(fields)),
    "AutoencoderKLFlux2": lambda fields: flux2_vae_spec(Flux2VaeConfig.from_dict(fields)),
    "AutoencoderKLQwenImage": lambda fields: wan_vae_spec(WanVaeConfig.from_dict(fields)),
    "ControlNetModel": control,
    "ZImageTransformer2DModel": lambda fields: z_image_spec(ZImageConfig.from_dict(fields)),
    "Flux2Transformer2DModel": lambda fields: flux2_spec(Flux2Config.from_dict(fields)),
    "Krea2Transformer2DModel": lambda fields: krea2_spec(Krea2Config.from_dict(fields)),
    "T5EncoderModel": lambda fields: t5_spec(T5Config.from_dict(fields)),
    "CLIPTextModel": clip,
    "CLIPTextModelWithProjection": clip,
}


def theirs_of(fields: Fields) -> State:
    """Return the arrays that the reference makes of a config, without memory."""
    kind = kind_of(fields)
    if kind == "ControlNetModel" and is_union(fields):
        kind = "ControlNetUnionModel"
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(diffusers, kind):
            module = getattr(diffusers, kind).from_config(dict(fields))
        else:
            cls = getattr(transformers, kind)
            module = cls(cls.config_class.from_dict(fields))
    state = stored(module)
    if kind == "CLIPTextModel":  # transformers 5 leaves out the name of its only part
        return {f"text_model.{name.removeprefix('text_model.')}": array for name, array in state.items()}
    return state


def check(state: State, fields: Fields) -> Spec:
    """Compare the names and shapes of both."""
    spec, kind = SPECS[kind_of(fields)](fields), kind_of(fields)
    if kind == "Flux2Transformer2DModel":
        state = unfused(state, spec)
    if kind == "AutoencoderKLQwenImage":
        state = frame_of(state)
    left = {*UNUSED, "text_model.embeddings.position_ids", "encoder.embed_tokens.weight"}
    same_names_and_shapes({name: array for name, array in state.items() if name not in left}, spec)
    return spec


def _distinct() -> list[str]:
    """The first config of each set of sizes."""
    names: dict[str, str] = {}
    for name, fields in CONFIGS.items():
        if kind_of(fields) in SPECS and name not in REFUSED:
            sizes = {key: param.checkpoint_shapes for key, param in flatten(SPECS[kind_of(fields)](fields))}
            names.setdefault(str(sizes), name)
    return list(names.values())


PARAMETERS = {"unet-5": 859_520_964, "unet-6": 865_910_724, "unet-8": 2_567_463_684}
"""As published: Stable Diffusion 1.5, 2.1 and XL."""


@pytest.mark.filterwarnings("ignore::canvax.errors.HintWarning")
@pytest.mark.parametrize("name", _distinct())
def test_names_and_shapes(name: str) -> None:
    spec = check(theirs_of(CONFIGS[name]), CONFIGS[name])
    if name in PARAMETERS:
        assert count(spec) == PARAMETERS[name]


def test_published_names_of_z_image() -> None:
    """The names and bytes that the index of the release has, of bfloat16."""
    transformer = z_image_spec(ZImageConfig.from_dict(CONFIGS["transformer-1"]))
    text = decoder_lm_spec(DecoderConfig.from_dict(CONFIGS["qwen-1"]), 36)
    for spec, config in ((transformer, "transformer-1"), (text, "qwen-1")):
        names, size = ARRAYS[config]
        assert set(dict(flatten(spec))) == names
        assert size == 2 * count(spec)


SMALL: dict[str, Fields] = {
    "UNet2DConditionModel": {
        "block_out_channels": [32, 64], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 16, "layers_per_block": 1,
    },
    "ControlNetModel": {
        "block_out_channels": [32, 64], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "cross_attention_dim": 16, "layers_per_block": 1, "conditioning_embedding_out_channels": [8, 16],
    },
    "AutoencoderKL": {
        "block_out_channels": [32, 64], "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
    "AutoencoderTiny": {},
    "AutoencoderKLFlux2": {
        "block_out_channels": [32, 64], "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2, "layers_per_block": 1,
    },
    "AutoencoderKLQwenImage": {},
    "ZImageTransformer2DModel": {"n_layers": 1},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "Krea2Transformer2DModel": {"num_layers": 1},
}  # fmt: skip


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in state.items()}


@pytest.mark.parametrize("kind", SMALL)
def test_null(kind: str) -> None:
    """Null in place of each field: the network of the reference.

    Refused may be a null that makes another network there, such as one without a middle, or names no kind of layer.
    """
    parameters = inspect.signature(getattr(diffusers, kind).__init__).parameters
    base = {"_class_name": kind, **SMALL[kind]}
    usual, same = shapes_of(theirs_of(base)), 0
    for name in [name for name in parameters if name not in ("self", "kwargs", "args")]:
        default, fields = parameters[name].default, base | {name: None}
        try:
            state = theirs_of(fields)
        except Exception:
            continue
        others = shapes_of(state) != usual
        try:
            SPECS[kind](fields)
        except CheckpointError:
            assert others or isinstance(default, str), name
            continue
        if isinstance(default, bool) or not others:
            check(state, fields)
            same += not others
    assert same > 1


TEXTS = ("a photo of a cat", "", "A red APPLE, 4k! <|endoftext|> x", "a" * 400, "naïve 猫 \U0001f408")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("tokenizer")])
def test_tokenizer(name: str, tmp_path: Path) -> None:
    """The ids of the reference, for the files of each release beside CLIP's vocabulary."""
    if name == "tokenizer-1":
        pytest.skip("ChatGLM's, of Kolors")
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).symlink_to(CLIP / "tokenizer" / file)
    for file, fields in CONFIGS[name].items():
        (tmp_path / file).write_text(json.dumps(fields))
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    want = theirs(list(TEXTS), padding="max_length", max_length=77, truncation=True)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(ClipTokenizer.from_folder(tmp_path)(TEXTS), want)


SCHEDULERS = [name for name in CONFIGS if name.startswith("scheduler") and name not in REFUSED]


@pytest.mark.filterwarnings("ignore")  # of the reference, about itself
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str) -> None:
    """Every coefficient of seven steps."""
    fields = CONFIGS[name]
    scheduler = from_scheduler_config(fields)
    mu = 0.9 if fields.get("use_dynamic_shifting") else None
    table = build_table(scheduler, 7, settings=None if mu is None else {"mu": mu})
    compare(table, kind_of(fields), fields, 7, mu=mu)
