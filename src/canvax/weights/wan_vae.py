"""Files of the video autoencoders of Wan and Qwen-Image, and the part of them that a single frame needs.

diffusers        decoder.up_blocks.0.resnets.0.conv_shortcut.weight
the authors      decoder.upsamples.0.shortcut.weight
Qwen-Image-2.1   decoder.upsamples.0.upsamples.0.shortcut.weight, in ComfyUI's file
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.models.qwen_vae import QwenVaeConfig
from canvax.models.wan_vae import UNUSED, WanVaeConfig, from_video
from canvax.types import HostArray
from canvax.weights.entries import Decode, Entry
from canvax.weights.formats import MOST, numbered
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import ArrayToSave

_WAN = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}  # fmt: skip
_RESAMPLED = re.compile(r"(encoder\.down|decoder\.up)samples\.(\d+)\.(down|up)samples\.\d+(?=\.resample\.1\.weight)")
"""The last layer of a level of Qwen-Image-2.1, which changes the size."""
_OF_QWEN = "encoder.down_blocks.0.resnets.0.conv1.weight"
"""An array that only Qwen-Image-2.1's autoencoder has."""


def wan_vae_rules(names: Collection[str]) -> list[Rule]:
    """Return the rules of names; the original code numbers all layers of the decoder, or those of each level."""
    rules = [Rule("conv1", "quant_conv"), Rule("conv2", "post_quant_conv")]
    rules.append(Rule("encoder.downsamples.*", "encoder.down_blocks.*"))
    blocks = [("encoder.downsamples.*", "encoder.down_blocks.*")]
    for side in ("encoder", "decoder"):
        parts = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out", "middle.1": "mid_block.attentions.0"}
        rules += [Rule(f"{side}.{external}", f"{side}.{internal}") for external, internal in parts.items()]
        blocks += [(f"{side}.middle.{2 * i}", f"{side}.mid_block.resnets.{i}") for i in range(2)]
    resampled = [match for match in map(re.compile(r"decoder\.upsamples\.(\d+)\.resample\.").match, names) if match]
    each = 1 + min((int(match[1]) for match in resampled), default=3)
    for i in range(min(numbered(names, r"decoder\.upsamples\.(\d+)\."), MOST)):
        level, place = f"decoder.up_blocks.{i // each}", i % each
        if place == each - 1:
            rules.append(Rule(f"decoder.upsamples.{i}", f"{level}.upsamplers.0"))
        else:
            blocks.append((f"decoder.upsamples.{i}", f"{level}.resnets.{place}"))
    rules += [Rule(at[0], f"{at[1]}_blocks.{at[2]}.{at[3]}sampler") for at in map(_RESAMPLED.match, names) if at]
    blocks += [
        (f"{side}.{way}samples.*.{way}samples.*", f"{side}.{way}_blocks.*.resnets.*")
        for side, way in (("encoder", "down"), ("decoder", "up"))
    ]
    return rules + [Rule(f"{block}.{old}", f"{name}.{new}") for block, name in blocks for old, new in _WAN.items()]


def wan_vae_config(arrays: Sequence[Entry]) -> dict[str, Any]:
    """Return the config of the autoencoder in a file.

    Raises:
        KeyError: an array is missing.
    """
    named = Names(wan_vae_rules([array.name for array in arrays])).to_internal(arrays)
    shapes = {array.name: array.shape for array in named}
    if _OF_QWEN in shapes:
        return _config_of_qwen(shapes)
    sizes = {"base_dim": "encoder.conv_in.bias", "z_dim": "post_quant_conv.bias"}
    return {"_class_name": WanVaeConfig.CLASS, **{size: shapes[name][0] for size, name in sizes.items()}}


def _config_of_qwen(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the config of the autoencoder of Qwen-Image-2.1."""
    levels, first = numbered(shapes, r"encoder\.down_blocks\.(\d+)\."), shapes["encoder.conv_in.weight"][0]
    widths = [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
    return {
        "_class_name": QwenVaeConfig.CLASS,
        "base_dim": first,
        "decoder_base_dim": shapes["decoder.conv_out.weight"][1] * first // widths[0],
        "z_dim": shapes["post_quant_conv.bias"][0],
        "dim_mult": [width // first for width in widths],
        "num_res_blocks": numbered(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "temperal_downsample": [
            f"encoder.down_blocks.{i}.downsampler.{UNUSED}.weight" in shapes for i in range(levels - 1)
        ],
    }


def of_one_frame(entries: Sequence[Entry]) -> list[Entry]:
    """Return the arrays that one frame needs, under the names of ``canvax.models.wan_vae``."""
    named = Names(wan_vae_rules([entry.name for entry in entries])).to_internal(entries)
    return [_frame(entry) for entry in named if UNUSED not in entry.name]


def _frame(entry: Entry) -> Entry:
    """Return ``from_video`` of an array as an entry; nothing is read. Arrays in other forms are refused later."""
    if entry.decode or not entry.is_float or not math.prod(entry.shape):
        return entry
    shape, kernel = from_video(np.broadcast_to(np.float32(0), entry.shape)).shape, entry.shape[2:]
    if math.prod(shape) == math.prod(entry.shape):
        return replace(entry, shape=shape)

    def begin(_: Entry) -> Callable[[HostArray, int], HostArray]:
        def last(kernels: HostArray, start: int) -> HostArray:
            del start
            return from_video(kernels.view(entry.dtype).reshape(-1, 1, *kernel)).astype(np.float32).reshape(-1)

        return last

    kernels = np.dtype((np.void, math.prod(kernel) * entry.dtype.itemsize))
    return replace(entry, shape=shape, dtype=kernels, decode=Decode(math.prod(kernel[1:]), begin))


def of_videos(arrays: Sequence[ArrayToSave]) -> list[ArrayToSave]:
    """Return the arrays of diffusers' file, with the part for one frame replaced by its current values.

    Args:
        arrays: the current values, and the arrays of the model's files.
    """
    read: dict[str, ArrayToSave] = {}
    videos: list[ArrayToSave] = []
    stored: Any = arrays
    named: Any = Names(wan_vae_rules([array.name for array in arrays])).to_internal(stored)  # these rules only rename
    for array in named:
        if array.name in read or UNUSED in array.name:
            videos.append(_as_video(array, read.get(array.name), has_time=_OF_QWEN not in read))
        else:
            read[array.name] = array
    return videos


def _as_video(whole: ArrayToSave, read: ArrayToSave | None, *, has_time: bool) -> ArrayToSave:
    """Return an array of a file, with the part for one frame replaced by its current values.

    Without ``has_time`` kernels lose their axis of time, which diffusers' file of Qwen-Image-2.1 does not have.
    """
    shape = whole.shape
    if not has_time and len(shape) == 5 and shape[2] == 1:
        shape = (*shape[:2], *shape[3:])

    def get() -> HostArray:
        array = whole.get()
        if read is not None:
            from_video(array)[...] = read.get()
        return array.reshape(shape)

    return replace(whole, shape=shape, get=get)
