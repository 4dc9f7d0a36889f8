"""Maps the arrays of a component's files to those of its spec, and back, for each kind of network.

Names of a denoiser belong to its family. Autoencoders and language models are shared by families.

    AutoencoderKL           decoder.up_blocks.0.resnets.0.conv_shortcut   decoder.up.3.block.0.nin_shortcut
    AutoencoderKLFlux2      the same, with the count of training batches
    AutoencoderKLQwenImage  of videos, see ``canvax.weights.wan_vae``
    Qwen3ForCausalLM        model.layers.0.mlp.up_proj, with lm_head
    Qwen3VLModel            language_model.layers.0.mlp.up_proj, with visual.*
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.models.clip import PooledClip
from canvax.models.configs import VaeConfig
from canvax.models.decoder_lm import LanguageModel
from canvax.models.flux2_vae import UNUSED as COUNTS
from canvax.models.flux2_vae import Flux2Autoencoder
from canvax.models.networks import Networks
from canvax.models.t5 import T5Encoder
from canvax.models.wan_vae import FrameAutoencoder
from canvax.weights.entries import Entry
from canvax.weights.formats import vae_rules, whole_name
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import ArrayToSave
from canvax.weights.wan_vae import of_one_frame, of_videos

EMBEDDED = "encoder.embed_tokens.weight"
"""Another name of T5's embedding."""

UNUSED = ("text_projection.weight", "logit_scale")
"""Arrays in files of CLIP's text encoder that FLUX.1 does not use."""

LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""Index of the layer in an array's name in a language model."""


def arrays_read(networks: Networks, component: str, names: Sequence[Rule], entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the arrays of a component that are used, under the names of its spec, from files in any known layout.

    Args:
        networks: the model's networks.
        component: name of the component.
        names: the rules for the denoiser.
        entries: all arrays of its files.
    """
    network = _network(networks, component)
    if component == networks.denoiser.component:
        return Names(names).to_internal(entries)
    if isinstance(network, FrameAutoencoder):
        return of_one_frame(entries)
    if isinstance(network, Flux2Autoencoder):
        entries = [entry for entry in entries if entry.name not in COUNTS]
    if isinstance(network, VaeConfig | Flux2Autoencoder):
        return Names(vae_rules([entry.name for entry in entries])).to_internal(entries)
    if isinstance(network, LanguageModel):
        return _layers_read(network, entries)
    if isinstance(network, T5Encoder):  # some files have the embedding under two names, some the decoder
        entries = [entry for entry in entries if not entry.name.startswith(("decoder.", "lm_head."))]
        named = {"shared.weight" if entry.name == EMBEDDED else entry.name: entry for entry in entries}
        return [replace(entry, name=name) for name, entry in named.items()]
    if isinstance(network, PooledClip):
        return [entry for entry in entries if entry.name not in UNUSED]
    return entries


def arrays_to_save(
    networks: Networks, component: str, stacks: Sequence[Rule], arrays: Sequence[ArrayToSave]
) -> Sequence[ArrayToSave]:
    """Return the arrays of a component as diffusers stores them.

    Args:
        networks: the model's networks.
        component: name of the component.
        stacks: the rules for layers of the denoiser that diffusers stores as one.
        arrays: arrays under the names of its spec, and the other arrays of its files: unused layers of a language
            model, all arrays of an autoencoder of videos.
    """
    network = _network(networks, component)
    if component == networks.denoiser.component:
        return Names(stacks).to_external(arrays)
    if isinstance(network, FrameAutoencoder):
        return of_videos(arrays)
    if isinstance(network, Flux2Autoencoder):  # diffusers expects the count
        zero = np.zeros((), np.int64)
        return [*arrays, *(ArrayToSave(name, zero.shape, zero.dtype, lambda: zero) for name in COUNTS)]
    if isinstance(network, LanguageModel) and "qwen3_vl" in network.cfg.model_type:  # a part of a larger model
        return [replace(array, name=re.sub(r"^model\.", "language_model.", array.name)) for array in arrays]
    return arrays


def reads_parts_of_arrays(networks: Networks, component: str) -> bool:
    """Return whether only parts of arrays are used, so that saving a component needs its files."""
    return isinstance(_network(networks, component), FrameAutoencoder)


def _network(networks: Networks, component: str) -> Any:
    parts = {encoder.component: encoder for encoder in networks.text.encoders}
    return networks.vae if component == "vae" else parts.get(component)


def _layers_read(encoder: LanguageModel, entries: Sequence[Entry]) -> list[Entry]:
    """Return the arrays of the layers that are used, without the head and an unused vision encoder."""
    used = {**encoder.spec, **{f"model.{name}": part for name, part in encoder.spec["model"].items()}}
    unread = ("lm_head.", *(f"{name}." for name in ("visual", "model.norm") if name not in used))
    named = [replace(entry, name=whole_name(entry.name)) for entry in entries]
    layers = [LAYER.match(entry.name) for entry in named]
    return [
        entry
        for entry, layer in zip(named, layers, strict=True)
        if not (entry.name.startswith(unread) or (layer and int(layer[1]) >= encoder.tap))
    ]
