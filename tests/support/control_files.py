"""Small random ControlNets and T2I-Adapters, written by canvax itself, for the model of a pipeline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from canvax.models.configs import UNetConfig
from canvax.models.controlnet import ControlNet, HintConfig
from canvax.models.controlnet_union import UnionNet
from canvax.models.t2i_adapter import AdapterConfig, T2IAdapter
from canvax.params import flatten, init_params, unflatten
from canvax.weights.load import Component
from canvax.weights.save import save_component


def config_of(unet: UNetConfig, channels: int, **changes: Any) -> dict[str, Any]:
    """``config.json`` of a ControlNet for a UNet."""
    left_out = ("up_block_types", "sample_size", "out_channels", "time_cond_proj_dim")
    config = {name: value for name, value in vars(unet).items() if name not in left_out and value is not None}
    hint = HintConfig(conditioning_embedding_out_channels=(8, 8, 16, 16))
    config |= {"_class_name": "ControlNetModel", **dataclasses.asdict(hint), "in_channels": channels}
    return config | changes


def controlnet(
    folder: Path, pipe: Any, seed: int = 1, strength: float = 1.0, sees: float = 1.0, **changes: Any
) -> Path:
    """A ControlNet for a pipeline's model; ``strength`` of what it adds, and of what it ``sees`` of its image."""
    config = config_of(pipe.model.unet, pipe.model.vae.latent_channels, **changes)
    spec = (UnionNet if "num_control_type" in changes else ControlNet).from_dict(config).spec
    params = dict(flatten(init_params(spec, seed)))
    rng = np.random.default_rng(seed)
    for name, leaf in params.items():
        if name.endswith("bias"):
            params[name] = 0.1 * rng.standard_normal(leaf.shape, np.float32)
        if name.startswith(("controlnet_down", "controlnet_mid")):
            params[name] = strength * params[name]
        if name.startswith("controlnet_cond_embedding.conv_out"):
            params[name] = sees * params[name]
    save_component(folder, Component("", spec, "diffusers"), unflatten(params), config)
    return folder


def union(folder: Path, pipe: Any, seed: int = 3, types: int = 8, **changes: Any) -> Path:
    """A ControlNet-Union for a pipeline's model."""
    first = pipe.model.unet.block_out_channels[0]
    sizes = {"num_control_type": types, "num_trans_channel": first, "num_proj_channel": first, "num_trans_head": 2}
    return controlnet(folder, pipe, seed, _class_name="ControlNetUnionModel", **sizes | changes)


def adapter(folder: Path, pipe: Any, seed: int = 2, **changes: Any) -> Path:
    """A T2I-Adapter for a pipeline's model."""
    config = {"channels": pipe.model.unet.block_out_channels, **changes}
    spec = T2IAdapter.from_dict(config, pipe.model.unet).spec
    whole = dataclasses.asdict(AdapterConfig.from_dict(config)) | {"_class_name": "T2IAdapter"}
    save_component(folder, Component("", spec, "diffusers"), init_params(spec, seed), whole)
    return folder


def edges(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Return white lines on black."""
    lines = np.random.default_rng(seed).random((size[1] // 8, size[0] // 8)) > 0.7
    return Image.fromarray(np.kron(lines, np.ones((8, 8))).astype(np.uint8) * 255).convert("RGB")
