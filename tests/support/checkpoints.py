"""Toy checkpoints in every form that canvax reads, for the loading tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
from safetensors.numpy import save_file

from canvax.nn import conv2d_spec, linear_spec, norm_spec
from canvax.params import Param, Spec, flatten, init_params, unflatten
from canvax.weights.folder import FLAX_FILES, STEMS
from canvax.weights.formats import flax_name
from canvax.weights.load import Component

INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "requires_safety_checker": True,
}

OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def toy_components() -> list[Component]:
    """Three tiny components with every layout and every name that is treated specially."""
    attention = {name: linear_spec(6, 6, bias=False) for name in ("to_q", "to_k", "to_v")}
    unet: Spec = {
        "conv_in": conv2d_spec(4, 6),
        "time_embedding": {"linear_1": linear_spec(6, 24), "linear_2": linear_spec(24, 24)},
        "down_blocks": {
            "0": {
                "attentions": {
                    "0": {
                        "norm": norm_spec(6),
                        "proj_in": linear_spec(6, 6, conv=True),
                        "transformer_blocks": {"0": {"attn1": {**attention, "to_out": {"0": linear_spec(6, 6)}}}},
                    }
                }
            }
        },
    }
    mid = {name: linear_spec(4, 4) for name in ("to_q", "to_k", "to_v")}
    block = {"group_norm": norm_spec(4), **mid, "to_out": {"0": linear_spec(4, 4)}}
    vae: Spec = {"decoder": {"mid_block": {"attentions": {"0": block}}}}
    text: Spec = {
        "text_model": {
            "embeddings": {"token_embedding": {"weight": Param((30, 5), (None, None))}},
            "encoder": {"layers": {"0": {"mlp": {"fc1": linear_spec(5, 7)}}}},
            "final_layer_norm": norm_spec(5),
        }
    }
    return [
        Component("unet", unet, "diffusers"),
        Component("vae", vae, "diffusers"),
        Component("text_encoder", text, "transformers"),
    ]


def toy_params(dtype: Any = np.float32) -> dict[str, Any]:
    """Random values for :func:`toy_components`."""
    return {part.name: init_params(part.spec, i, dtype) for i, part in enumerate(toy_components())}


def file_arrays(part: Component, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A component's arrays as a PyTorch file names and lays them out."""
    spec = dict(flatten(part.spec))
    return {name: spec[name].to_checkpoint(array) for name, array in flatten(params)}


def flax_tree(part: Component, params: Mapping[str, Any]) -> dict[str, Any]:
    """A component's arrays as a Flax file nests and lays them out, with the VAE's old attention names."""
    spec = dict(flatten(part.spec))
    tree = {}
    for name, array in flatten(params):
        old = name
        if part.name == "vae":
            for new, past in OLD_ATTENTION.items():
                old = old.replace(f".{new}.", f".{past}.")
        shape = (1, 1, *array.shape) if spec[name].layout == "conv1x1" else array.shape
        tree[flax_name(old, spec[name]).replace("/", ".")] = array.reshape(shape)
    return unflatten(tree)


def flax_bytes(tree: Any) -> bytes:
    """What ``flax.serialization.to_bytes`` writes for a nested dict of numpy arrays."""

    def extension(leaf: Any) -> msgpack.ExtType:
        array = np.asarray(leaf)
        return msgpack.ExtType(
            1 if isinstance(leaf, np.ndarray) else 3,
            msgpack.packb((array.shape, array.dtype.name, array.tobytes())),
        )

    return msgpack.packb(tree, default=extension, strict_types=True)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_frame(folder: Path, index: Mapping[str, Any] = INDEX) -> None:
    """Everything of a checkpoint but its weights."""
    write_json(folder / "model_index.json", index)
    for name in ("unet", "vae", "text_encoder"):
        write_json(folder / name / "config.json", {"_class_name": index[name][1], "sample_size": 8})
    write_json(folder / "canvax.json", {"num_inference_steps": 20})
    write_json(folder / "scheduler" / "scheduler_config.json", {"_class_name": "DDIMScheduler"})
    write_json(folder / "tokenizer" / "vocab.json", {"a</w>": 0})
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")


def write_checkpoint(folder: Path, params: Mapping[str, Any], *, form: str = "torch", infix: str = "") -> Path:
    """A whole toy checkpoint; ``form`` is torch, flax, or old (names and shapes of 2022's PyTorch files)."""
    write_frame(folder)
    for part in toy_components():
        target = folder / part.name
        if form == "flax":
            (target / FLAX_FILES[part.kind]).write_bytes(flax_bytes(flax_tree(part, params[part.name])))
            continue
        arrays = file_arrays(part, params[part.name])
        if form == "old":
            arrays = old_style(part.name, arrays)
        save_file(arrays, target / f"{STEMS[part.kind]}{infix}.safetensors", {"format": "pt"})
    return folder


def old_style(component: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Old VAE attention names in 1x1 convolutions; text encoder names without prefix, with leftovers."""
    result = {}
    for name, array in arrays.items():
        if component == "vae":
            for new, past in OLD_ATTENTION.items():
                if f".{new}." in name:
                    name = name.replace(f".{new}.", f".{past}.")
                    array = array[:, :, None, None] if array.ndim == 2 else array
        result[name.removeprefix("text_model.")] = array
    if component == "text_encoder":
        result["text_model.embeddings.position_ids"] = np.arange(77, dtype=np.int64)[None]
    return result


def raw_safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header (an object or bytes), any data and any claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
