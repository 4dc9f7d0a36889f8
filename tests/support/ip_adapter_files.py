"""Small random IP-Adapters and their image encoder, written for a UNet as the released files are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from canvax.models.configs import ClipVisionConfig, UNetConfig
from canvax.models.ip_adapter import ImageEncoder, IPAdapter
from canvax.params import flatten, init_params, unflatten
from canvax.weights.load import Component
from canvax.weights.save import save_component

VISION = ClipVisionConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=28, patch_size=7,
    projection_dim=24, hidden_act="gelu",
)  # fmt: skip


def encoder(folder: Path, seed: int = 3, cfg: ClipVisionConfig = VISION) -> Path:
    """CLIP's image encoder, in the layout of transformers."""
    spec = ImageEncoder(cfg).spec
    config = {**dataclasses.asdict(cfg), "model_type": "clip_vision_model"}
    config["architectures"] = ["CLIPVisionModelWithProjection"]
    save_component(folder, Component("", spec, "transformers"), _livelier(init_params(spec, seed), seed), config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def record(kind: Any, unet: UNetConfig, cfg: ClipVisionConfig = VISION) -> IPAdapter:
    """An adapter of a kind that reads what ``cfg`` makes."""
    width = unet.cross_attention_dim
    if kind == "plain":
        return IPAdapter("plain", cfg.projection_dim, width, 4, unet)
    if kind == "full":
        return IPAdapter("full", cfg.hidden_size, width, cfg.tokens, unet)
    return IPAdapter("plus", cfg.hidden_size, width, 5, unet, hidden=32, depth=4, heads=2)


def arrays(kind: Any, unet: UNetConfig, seed: int = 7, cfg: ClipVisionConfig = VISION) -> dict[str, np.ndarray]:
    """The arrays of its file, by their names there, as PyTorch has them."""
    spec = record(kind, unet, cfg).spec
    declared = dict(flatten(spec))
    params = dict(flatten(_livelier(init_params(spec, seed), seed)))
    found = {}
    for name, param in declared.items():
        array = params[name]
        found[name] = np.ascontiguousarray(array.T if param.layout == "linear" else array)
    return found


def ip_adapter(path: Path, kind: Any, unet: UNetConfig, seed: int = 7, cfg: ClipVisionConfig = VISION) -> Path:
    """An adapter's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays(kind, unet, seed, cfg), path)
    return path


def _livelier(params: Any, seed: int) -> Any:
    """No bias is zero, no factor one, or they could hide."""
    rng = np.random.default_rng(seed)
    flat = dict(flatten(params))
    for name, leaf in flat.items():
        if name.endswith("bias"):
            flat[name] = 0.1 * rng.standard_normal(leaf.shape, np.float32)
        elif leaf.ndim == 1:
            flat[name] = leaf + 0.2 * rng.standard_normal(leaf.shape, np.float32)
        elif name.endswith("latents"):
            flat[name] = rng.standard_normal(leaf.shape, np.float32)
    return unflatten(flat)
