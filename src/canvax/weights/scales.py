"""Weights of 8 bits with scales in safetensors files, as ComfyUI has them.

A weight is ``NAME.weight`` times ``NAME.weight_scale`` (``scale_weight`` in older files): one number, or one per row.
Its numbers are 8-bit floats or integers. The JSON in ``NAME.comfy_quant``, or in the header under
``_quantization_metadata``, names the format. Integers may be rotated ("convrot", from QuaRot, Ashkboos et al. 2024):
each group of inputs is multiplied by a symmetric orthogonal Hadamard matrix, which is its inverse.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from canvax.errors import CheckpointError
from canvax.files import DAMAGED
from canvax.types import HostArray
from canvax.weights.entries import Decode, Entry
from canvax.weights.safetensors import read_metadata

FORMATS = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "int8_tensorwise": "int8"}
"""Formats that are read, under ComfyUI's names -> dtype of the numbers."""

GROUPS = (4, 16, 64, 256, 1024)
"""Numbers of inputs that are rotated together."""

_MARKS = re.compile(r"(.*\.)?(scaled_fp8|scale_input|input_scale|comfy_quant|comfy_attention\.config)")
"""Names of arrays that say how ComfyUI computes, or what ``with_scales`` has used."""

_MOST = 4096
"""Largest ``comfy_quant`` that is read, in bytes."""

_PREFIX = "model.diffusion_model."


class UnreadFormat(CheckpointError):
    """A file has weights of a format that is not read.

    Attributes:
        format: its name.
    """

    def __init__(self, entry: Entry, kind: str) -> None:
        self.format = kind
        super().__init__(
            f"{entry.path}: array {entry.name!r} is {entry.dtype.name} of {kind}, which canvax does not read. Take a "
            "file of bfloat16, 8-bit floats (fp8_scaled), int8 (int8_convrot) or GGUF."
        )


def with_scales(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries in which scaled weights have their scales as companions; markers are dropped.

    Raises:
        UnreadFormat: weights have another format.
        CheckpointError: a marker is damaged or does not fit its weight.
    """
    named, header = {entry.name: entry for entry in entries}, cache(_layers)
    used = {name for name in named if _MARKS.fullmatch(name)}
    scaled: dict[str, Entry] = {}
    for name, entry in named.items():
        module = name.removesuffix("weight")
        if name == module or entry.dtype.itemsize != 1:
            continue
        scale = named.get(f"{module}scale_weight") or named.get(f"{module}weight_scale")
        mark, layer = named.get(f"{module}comfy_quant"), module.rstrip(".").removeprefix(_PREFIX)
        config = _marked(mark) if mark else header(entry.path).get(layer, {})
        kind = config.get("format")
        if kind is None and not entry.is_float:
            if scale is None:
                continue
            kind = "a format that the file does not name"  # it may be rotated or not
        if kind is not None and FORMATS.get(str(kind)) != entry.dtype.name:
            raise UnreadFormat(entry, str(kind)[:40])
        if scale is not None and scale.is_float and math.prod(scale.shape) in (1, *entry.shape[:1]):
            used.add(scale.name)
            scaled[name] = replace(_decoded(entry, config), companions={"scale": scale})
        elif not entry.is_float:
            raise CheckpointError(f"{entry.path}: array {name!r} has not one scale for each row. {DAMAGED}")
    return [scaled.get(name, entry) for name, entry in named.items() if name not in used]


def _marked(mark: Entry) -> Mapping[str, Any]:
    """Return what ``comfy_quant`` of a layer says."""
    with suppress(ValueError, RecursionError, TypeError):
        if mark.nbytes <= _MOST and isinstance(config := json.loads(mark.read().tobytes()), dict):
            return _flat(config)
    raise CheckpointError(f"{mark.path}: array {mark.name!r} is no table of JSON. {DAMAGED}")


def _layers(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return what the header of a file says about layers, which may lack the prefix that arrays have."""
    with suppress(ValueError, RecursionError, TypeError, AttributeError):
        layers = json.loads(read_metadata(path).get("_quantization_metadata", "{}")).get("layers", {})
        return {name.removeprefix(_PREFIX): _flat(config) for name, config in layers.items()}
    raise CheckpointError(f"{path}: _quantization_metadata in its header is no table of layers. {DAMAGED}")


def _flat(config: dict[str, Any]) -> Mapping[str, Any]:
    return {**config.get("params", {}), **config}


def _decoded(entry: Entry, config: Mapping[str, Any]) -> Entry:
    """Return a weight that is decoded by its scale and, if the config says so, rotated back."""
    if not config.get("convrot"):
        return replace(entry, decode=SCALED)
    if entry.is_float or len(entry.shape) != 2:
        raise UnreadFormat(entry, "rotated floats" if entry.is_float else "rotated convolutions")
    group = config.get("convrot_groupsize", 256)
    if type(group) is not int or group not in GROUPS or entry.shape[1] % group:
        raise CheckpointError(
            f"{entry.path}: array {entry.name!r}, {entry.dtype.name}{entry.shape}, cannot be rotated in groups of "
            f"{str(group)[:40]}. {DAMAGED}"
        )
    return replace(entry, dtype=np.dtype((np.void, group)), decode=Decode(group, _begin, "int8 (convrot)"))


def _begin(entry: Entry) -> Callable[[HostArray, int], HostArray]:
    """Return the decoder: numbers times scales. Sums of rotated integers are exact."""
    group = entry.decode.numbers if entry.decode else 1
    signs = _signs(group)
    scale = entry.companions["scale"].read().astype(np.float32).reshape(-1, 1) / np.float32(math.sqrt(group))
    groups = math.prod(entry.shape[1:]) // group

    def decoded(items: HostArray, start: int) -> HostArray:
        if group == 1:
            numbers = items.astype(np.float32).reshape(-1, 1)
        else:
            numbers = items.view(np.int8).reshape(-1, group).astype(np.float32) @ signs
        numbers *= scale if scale.size == 1 else scale[(start // group + np.arange(len(items))) // groups]
        return numbers.reshape(-1)

    return decoded


SCALED = Decode(1, _begin)
"""Decodes numbers times the companion ``scale``."""


@cache
def _signs(size: int) -> HostArray:
    """Return the Hadamard matrix of ConvRot times the root of its size, a power of 4: [size, size]."""
    four = np.ones((4, 4), np.float32) - 2 * np.eye(4, dtype=np.float32)[::-1]
    return np.ones((1, 1), np.float32) if size == 1 else np.kron(_signs(size // 4), four)
