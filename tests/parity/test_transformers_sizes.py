"""Released sizes: every name and shape of the reference's checkpoints, and the published numbers of parameters."""

from __future__ import annotations

import json
from typing import Any

import diffusers
import pytest
import torch
import transformers

from benchmarks.lab.layouts import LAYOUTS, SMALL
from benchmarks.lab.models import random_arrays, usual_dtype
from canvax.families.flux2 import NAMES
from canvax.families.flux3 import STACKS
from canvax.families.known import PRESETS
from canvax.models.configs import VaeConfig
from canvax.models.decoder_lm import DecoderConfig, decoder_lm_spec
from canvax.models.flux2 import Flux2Config, flux2_spec
from canvax.models.flux2_vae import UNUSED, Flux2VaeConfig, flux2_vae_spec
from canvax.models.flux3 import Flux3Config, flux3_spec
from canvax.models.krea2 import Krea2Config, krea2_spec
from canvax.models.vae import vae_spec
from canvax.models.wan_vae import WanVaeConfig, wan_vae_spec
from canvax.models.z_image import ZImageConfig, z_image_spec
from canvax.params import count

from .test_transformers_autoencoders import frame_of
from .transformers_reference import same_names_and_shapes, stored, unfused

KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
            "guidance_embeds": False}  # fmt: skip
KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288,
            "guidance_embeds": False}  # fmt: skip

# Fields as released, tensors of the checkpoint and billions of parameters.
DENOISERS: dict[str, tuple[Any, Any, Any, dict[str, Any], int, float]] = {
    "Z-Image": (diffusers.ZImageTransformer2DModel, ZImageConfig, z_image_spec, {}, 521, 6.155),
    "FLUX.2 klein 4B": (diffusers.Flux2Transformer2DModel, Flux2Config, flux2_spec, KLEIN_4B, 169, 3.876),
    "FLUX.2 klein 9B": (diffusers.Flux2Transformer2DModel, Flux2Config, flux2_spec, KLEIN_9B, 233, 9.079),
    "FLUX.2 dev": (diffusers.Flux2Transformer2DModel, Flux2Config, flux2_spec, {}, 331, 32.223),
    "FLUX.3 klein base": (diffusers.Flux3Transformer2DModel, Flux3Config, flux3_spec, {}, 0, 5.538),
    "FLUX.3 klein": (diffusers.Flux3Transformer2DModel, Flux3Config, flux3_spec, {"flow_map": True}, 0, 5.549),
    "Krea 2": (diffusers.Krea2Transformer2DModel, Krea2Config, krea2_spec, {}, 0, 12.820),
}  # fmt: skip


@pytest.mark.parametrize("name", DENOISERS)
def test_denoiser(name: str) -> None:
    kind, config, spec_of, fields, tensors, billions = DENOISERS[name]
    with torch.device("meta"):
        theirs = kind(**fields)
    spec, state = spec_of(config.from_dict(dict(theirs.config))), stored(theirs)
    assert len(state) == tensors or not tensors
    rules = {Flux2Config: NAMES, Flux3Config: STACKS}.get(config, ())
    same_names_and_shapes(unfused(state, spec, rules), spec)
    assert count(spec) / 1e9 == pytest.approx(billions, abs=5e-4)


QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288}


@pytest.mark.parametrize(
    ("kind", "config", "fields", "billions"),
    [
        (transformers.Qwen3Model, transformers.Qwen3Config, QWEN3_4B, 4.02),
        (transformers.Qwen3Model, transformers.Qwen3Config, QWEN3_8B, 7.57),
        (transformers.Qwen3VLTextModel, transformers.Qwen3VLTextConfig, QWEN3_4B, 4.02),
    ],
    ids=["Qwen3-4B", "Qwen3-8B", "Qwen3-VL-4B"],
)
def test_text_encoder(kind: Any, config: Any, fields: dict[str, Any], billions: float) -> None:
    with torch.device("meta"):
        theirs = kind(config(**fields))
    cfg = DecoderConfig.from_dict(theirs.config.to_dict())
    state = {f"model.{name}": array for name, array in stored(theirs).items()}
    spec = decoder_lm_spec(cfg, cfg.num_hidden_layers)
    same_names_and_shapes(state, spec)
    assert count(spec) / 1e9 == pytest.approx(billions, abs=5e-3)


def test_flux2_autoencoder() -> None:
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLFlux2()
    spec = flux2_vae_spec(Flux2VaeConfig.from_dict(dict(theirs.config)))
    same_names_and_shapes({name: array for name, array in stored(theirs).items() if name not in UNUSED}, spec)
    assert count(spec) / 1e6 == pytest.approx(84, abs=0.5)


def test_wan_autoencoder() -> None:
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLQwenImage()
    state = stored(theirs)
    assert sum(array.size for array in state.values()) / 1e6 == pytest.approx(127, abs=0.5)
    same_names_and_shapes(frame_of(state), wan_vae_spec(WanVaeConfig.from_dict(dict(theirs.config))))


def test_flux_autoencoder() -> None:
    """That of FLUX.1 and Z-Image, by its released config."""
    fields = {
        "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "latent_channels": 16, "layers_per_block": 2,
        "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
    }  # fmt: skip
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKL(**fields)
    spec = vae_spec(VaeConfig.from_dict(dict(theirs.config)))
    same_names_and_shapes(stored(theirs), spec)
    assert count(spec) / 1e6 == pytest.approx(84, abs=0.5)


@pytest.mark.parametrize("name", ["z-image", "flux2-klein-4b", "krea-2", *SMALL])
def test_random_checkpoints_of_the_laboratory(name: str) -> None:
    """They have every name and shape that the reference expects, and no other."""
    preset = (PRESETS | SMALL)[name]
    layout, arrays = LAYOUTS[type(preset.denoiser)], random_arrays(preset, usual_dtype(preset))
    assert arrays.keys() == {"transformer", "text_encoder", "vae"}
    for part, fields in json.loads(json.dumps(layout.configs(preset))).items():
        kind = layout.classes[part]
        with torch.device("meta"):
            if part == "text_encoder":
                cls = getattr(transformers, kind)
                theirs = cls(cls.config_class.from_dict(fields))
            else:
                theirs = getattr(diffusers, kind).from_config(fields)
        want = {key: tuple(array.shape) for key, array in theirs.state_dict().items() if key != "lm_head.weight"}
        got = {array.name: tuple(array.shape) for array in arrays[part]}
        if kind == "Qwen3Model":  # which reads the names of the model with its head
            want = {f"model.{key}": shape for key, shape in want.items()}
        assert got == want, part
