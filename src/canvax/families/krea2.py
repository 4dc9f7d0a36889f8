"""Krea 2 Raw and Turbo: a language model read at twelve layers, a single-stream transformer and a VAE (Krea 2026)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.errors import CheckpointError
from canvax.families.base import Defaults, Family, check_components, parsed
from canvax.families.language import check_fit, language_model_entries, read_chat_tokenizer, unused_options
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.krea2 import LENGTHS, PROMPT, TAPS, TEMPLATE, Krea2Config, Krea2Denoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoder, TextEncoders
from canvax.models.wan_vae import UNUSED, WanAutoencoder, WanVaeConfig, from_video
from canvax.samplers import NoiseSchedule
from canvax.tokenizers.chat import ChatTokenizer
from canvax.types import HostArray
from canvax.weights.entries import Decode, Entry
from canvax.weights.files import ModelFiles
from canvax.weights.formats import KREA2 as KREA2_NAMES
from canvax.weights.formats import wan_vae_rules
from canvax.weights.rules import Names
from canvax.weights.safetensors import Outgoing

CLASSES = {
    "transformer": ("Krea2Transformer2DModel",),
    FIRST: ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKLQwenImage",),
    "scheduler": (),
}

TURBO = Defaults(num_inference_steps=8, guidance_scale=0.0)
TURBO_MU = 1.15


def read(files: ModelFiles) -> Networks:
    """The transformer reads layers of the language model that the index names, side by side."""
    check_components(files, CLASSES)
    transformer, lm = parsed(Krea2Config, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    vae = WanAutoencoder(parsed(WanVaeConfig, files, "vae"))
    taps = files.index.get("text_encoder_select_layers") or TAPS
    if not _is_rising(taps, lm.num_hidden_layers) or len(taps) != transformer.num_text_layers:
        wanted = f"{transformer.num_text_layers} of {lm.num_hidden_layers} layers in order"
        raise CheckpointError(
            f"{files}: its model_index.json has text_encoder_select_layers={taps!r:.99}, not {wanted}"
        )
    if (patch := files.index.get("patch_size", 2)) != 2:
        raise CheckpointError(f"{files}: its model_index.json has patch_size={patch!r:.80} (supported: 2)")
    check_fit(
        files,
        latents=(transformer.in_channels, 4 * vae.latent_channels),
        text=(transformer.text_hidden_dim, lm.hidden_size),
    )
    *earlier, tap = taps
    text = LanguageModel(lm, tap, tuple(earlier), LENGTHS, PROMPT)
    return Networks(Krea2Denoiser(transformer), vae, TextEncoders((text,)), prediction="flow_prediction")


def _is_rising(taps: object, layers: int) -> bool:
    """Whether these are numbers of layers that have features before the last normalisation, each larger than before."""
    if not isinstance(taps, list | tuple) or not all(type(tap) is int for tap in taps):
        return False
    return bool(taps) and list(taps) == sorted(set(taps)) and taps[0] >= 0 and 0 < taps[-1] < layers


def _tokenizer(files: ModelFiles, encoder: TextEncoder) -> ChatTokenizer:
    return read_chat_tokenizer(files, encoder, TEMPLATE)


def _schedule(files: ModelFiles, schedule: NoiseSchedule) -> NoiseSchedule:
    """The shift of Turbo is that of one size, whatever the size."""
    turbo = bool(schedule.size_shift) and bool(files.index.get("is_distilled"))
    return replace(schedule.with_mu(TURBO_MU), size_shift=None) if turbo else schedule


def _defaults_of(networks: Networks, schedule: NoiseSchedule) -> Defaults | None:
    del networks
    return None if schedule.size_shift else TURBO


def _entries(networks: Networks, component: str, entries: Sequence[Entry]) -> Sequence[Entry]:
    """The arrays that are read, in the layout of diffusers or in the original one.

    The vision encoder of the language model is not read, and of the autoencoder only what one frame needs.
    """
    if component == "vae":
        named = Names(wan_vae_rules([entry.name for entry in entries])).to_ours(entries)
        return [_of_one_frame(entry) for entry in named if UNUSED not in entry.name]
    if component != FIRST:
        named = KREA2_NAMES.to_ours(entries)
        return [_in_rows(entry) if entry.name.endswith("scale_shift_table") else entry for entry in named]
    return language_model_entries(networks.text.encoders[0], entries)


def _in_rows(entry: Entry) -> Entry:
    """A table of a block, which the authors store as one row of six."""
    return replace(entry, shape=(6, entry.shape[0] // 6)) if len(entry.shape) == 1 else entry


def _of_one_frame(entry: Entry) -> Entry:
    """``from_video`` of an array, as an entry; nothing is read. What is stored in another way stays, and is refused."""
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


def _outgoing(networks: Networks, component: str, arrays: Sequence[Outgoing]) -> Sequence[Outgoing]:
    """In the layout of diffusers the language model is a part of a larger one, and the autoencoder is for videos."""
    del networks
    if component == FIRST:
        return [replace(array, name=re.sub(r"^model\.", "language_model.", array.name)) for array in arrays]
    if component != "vae":
        return arrays
    read: dict[str, Outgoing] = {}
    videos: list[Outgoing] = []
    stored: Any = arrays
    named: Any = Names(wan_vae_rules([array.name for array in arrays])).to_ours(stored)  # rules that only rename
    for array in named:
        if array.name in read or UNUSED in array.name:
            videos.append(_as_video(array, read.get(array.name)))
        else:
            read[array.name] = array
    return videos


def _as_video(whole: Outgoing, read: Outgoing | None) -> Outgoing:
    """An array of a file with what is read of it as it is now."""
    if read is None:
        return whole

    def get() -> HostArray:
        array = whole.get()
        from_video(array)[...] = read.get()
        return array

    return replace(whole, get=get)


KREA2 = Family(
    name="krea-2",
    pipelines=("Krea2Pipeline",),
    read=read,
    tokenizer=_tokenizer,
    defaults=Defaults(num_inference_steps=28, guidance_scale=4.5),
    defaults_of=_defaults_of,
    schedule=_schedule,
    even_times=True,
    no_guidance=0.0,
    entries=_entries,
    copied=("vae",),
    outgoing=_outgoing,
    unused_options=unused_options,
)
