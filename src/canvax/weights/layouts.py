"""From the arrays of a component's files to those that its spec declares, and back, by the kind of network.

The names of a denoiser are data of its family. Autoencoders and language models are shared by families.

    AutoencoderKL           decoder.up_blocks.0.resnets.0.conv_shortcut   decoder.up.3.block.0.nin_shortcut
    AutoencoderKLFlux2      as these, with the count of training batches
    AutoencoderKLQwenImage  decoder.up_blocks.0.resnets.0.conv_shortcut   decoder.upsamples.0.shortcut, for videos
    Qwen3ForCausalLM        model.layers.0.mlp.up_proj, with lm_head
    Qwen3VLModel            language_model.layers.0.mlp.up_proj, with visual.*
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.models.configs import VaeConfig
from canvax.models.decoder_lm import LanguageModel
from canvax.models.flux2_vae import UNUSED as COUNTS
from canvax.models.flux2_vae import Flux2Autoencoder
from canvax.models.networks import Networks
from canvax.models.wan_vae import UNUSED as OF_TIME
from canvax.models.wan_vae import WanAutoencoder, from_video
from canvax.types import HostArray
from canvax.weights.entries import Decode, Entry
from canvax.weights.formats import MOST, numbered, vae_rules, whole_name
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import Outgoing

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WAN = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}  # fmt: skip


def arrays_read(networks: Networks, component: str, names: Sequence[Rule], entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the arrays of a component that are read, under the names of its spec, from files in any known layout.

    Args:
        networks: of the model.
        component: its name.
        names: the rules for the denoiser.
        entries: all arrays of its files.
    """
    network = _network(networks, component)
    if component == networks.denoiser.component:
        return Names(names).to_ours(entries)
    if isinstance(network, WanAutoencoder):
        named = Names(wan_vae_rules([entry.name for entry in entries])).to_ours(entries)
        return [_of_one_frame(entry) for entry in named if OF_TIME not in entry.name]
    if isinstance(network, Flux2Autoencoder):
        entries = [entry for entry in entries if entry.name not in COUNTS]
    if isinstance(network, VaeConfig | Flux2Autoencoder):
        return Names(vae_rules([entry.name for entry in entries])).to_ours(entries)
    if isinstance(network, LanguageModel):
        named = [replace(entry, name=whole_name(entry.name)) for entry in entries]
        return [entry for entry in named if _is_read(entry.name, network)]
    return entries


def arrays_to_save(
    networks: Networks, component: str, stacks: Sequence[Rule], arrays: Sequence[Outgoing]
) -> Sequence[Outgoing]:
    """Return the arrays of a component as diffusers stores them.

    Args:
        networks: of the model.
        component: its name.
        stacks: the rules for layers of the denoiser that diffusers stores as one.
        arrays: those under the names of its spec, and what else is in its files: the layers of a language model that
            are not read, all arrays of an autoencoder of videos.
    """
    network = _network(networks, component)
    if component == networks.denoiser.component:
        return Names(stacks).to_theirs(arrays)
    if isinstance(network, WanAutoencoder):
        return _of_videos(arrays)
    if isinstance(network, Flux2Autoencoder):  # diffusers looks for the count
        zero = np.zeros((), np.int64)
        return [*arrays, *(Outgoing(name, zero.shape, zero.dtype, lambda: zero) for name in COUNTS)]
    if isinstance(network, LanguageModel) and "_vl" in network.cfg.model_type:  # a part of a larger model
        return [replace(array, name=re.sub(r"^model\.", "language_model.", array.name)) for array in arrays]
    return arrays


def reads_parts_of_arrays(networks: Networks, component: str) -> bool:
    """Return whether a part of an array is read, so that the files of a component are needed to save it."""
    return isinstance(_network(networks, component), WanAutoencoder)


def _network(networks: Networks, component: str) -> Any:
    parts = {encoder.component: encoder for encoder in networks.text.encoders}
    return networks.vae if component == "vae" else parts.get(component)


def _is_read(name: str, model: LanguageModel) -> bool:
    """Whether an array of a language model is of the layers that are read: not of its head or vision encoder."""
    layer = _LAYER.match(name)
    if layer:
        return int(layer[1]) < model.tap
    return not name.startswith(("lm_head.", "visual.")) and (
        name != "model.norm.weight" or "norm" in model.spec["model"]
    )


def wan_vae_rules(names: Collection[str]) -> list[Rule]:
    """Those of the autoencoder of Wan and Qwen-Image. The original code numbers all layers of the decoder through."""
    rules = [Rule("conv1", "quant_conv"), Rule("conv2", "post_quant_conv")]
    rules.append(Rule("encoder.downsamples.*", "encoder.down_blocks.*"))
    blocks = [("encoder.downsamples.*", "encoder.down_blocks.*")]
    for side in ("encoder", "decoder"):
        parts = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out", "middle.1": "mid_block.attentions.0"}
        rules += [Rule(f"{side}.{theirs}", f"{side}.{ours}") for theirs, ours in parts.items()]
        blocks += [(f"{side}.middle.{2 * i}", f"{side}.mid_block.resnets.{i}") for i in range(2)]
    resampled = [match for match in map(re.compile(r"decoder\.upsamples\.(\d+)\.resample\.").match, names) if match]
    each = 1 + min((int(match[1]) for match in resampled), default=3)
    for i in range(min(numbered(names, r"decoder\.upsamples\.(\d+)\."), MOST)):
        level, place = f"decoder.up_blocks.{i // each}", i % each
        if place == each - 1:
            rules.append(Rule(f"decoder.upsamples.{i}", f"{level}.upsamplers.0"))
        else:
            blocks.append((f"decoder.upsamples.{i}", f"{level}.resnets.{place}"))
    return rules + [Rule(f"{block}.{part}", f"{ours}.{our}") for block, ours in blocks for part, our in _WAN.items()]


def _of_one_frame(entry: Entry) -> Entry:
    """Return ``from_video`` of an array as an entry; nothing is read. Arrays in another form stay, and are refused."""
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


def _of_videos(arrays: Sequence[Outgoing]) -> list[Outgoing]:
    """Return the arrays of files for videos, with what one frame reads of them as it is now."""
    read: dict[str, Outgoing] = {}
    videos: list[Outgoing] = []
    stored: Any = arrays
    named: Any = Names(wan_vae_rules([array.name for array in arrays])).to_ours(stored)  # rules that only rename
    for array in named:
        if array.name in read or OF_TIME in array.name:
            videos.append(_as_video(array, read.get(array.name)))
        else:
            read[array.name] = array
    return videos


def _as_video(whole: Outgoing, read: Outgoing | None) -> Outgoing:
    """Return an array of a file with what is read of it as it is now."""
    if read is None:
        return whole

    def get() -> HostArray:
        array = whole.get()
        from_video(array)[...] = read.get()
        return array

    return replace(whole, get=get)
