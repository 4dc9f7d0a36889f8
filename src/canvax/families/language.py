"""What families whose text encoder is a language model share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from canvax.errors import CheckpointError
from canvax.families.base import AESTHETICS, SECOND_PROMPTS, SIZES, TARGET_SIZES, Model
from canvax.models.decoder_lm import LanguageModel
from canvax.models.text import TextEncoder
from canvax.tokenizers.chat import ChatTokenizer
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles
from canvax.weights.formats import whole_name

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_chat_tokenizer(files: ModelFiles, encoder: TextEncoder, template: str) -> ChatTokenizer:
    """The tokenizer of a language model, every id of which has an embedding there."""
    assert isinstance(encoder, LanguageModel)
    tokenizer, size = ChatTokenizer.from_folder(files.folder(encoder.tokenizer), template), encoder.cfg.vocab_size
    if tokenizer.largest >= size:
        raise CheckpointError(
            f"{files}: its tokenizer has the id {tokenizer.largest}, the encoder embeds 0..{size - 1}"
        )
    return tokenizer


def check_fit(files: ModelFiles, *, latents: tuple[int, int], text: tuple[int, int]) -> None:
    """Check what a transformer reads against what the other components give: channels of latents, widths of text.

    Raises:
        CheckpointError: they differ; names both numbers.
    """
    faults = []
    if latents[0] != latents[1]:
        faults.append(f"the transformer takes latents of {latents[0]}, the VAE has {latents[1]}")
    if text[0] != text[1]:
        faults.append(f"the transformer reads text of width {text[0]}, the encoder gives {text[1]}")
    if faults:
        raise CheckpointError(f"{files}: its components do not fit together: {'; '.join(faults)}")


def language_model_entries(encoder: TextEncoder, entries: Sequence[Entry]) -> list[Entry]:
    """The layers of a language model that are read, saved with or without its head and vision encoder."""
    assert isinstance(encoder, LanguageModel)
    unread = ("lm_head.", "visual.") if "norm" in encoder.spec["model"] else ("lm_head.", "model.norm.", "visual.")
    layers = []
    for entry in entries:
        name = whole_name(entry.name)
        layer = _LAYER.match(name)
        if not (name.startswith(unread) or (layer and int(layer[1]) >= encoder.tap)):
            layers.append(replace(entry, name=name))
    return layers


def unused_options(model: Model) -> Mapping[str, str]:
    """Options of SDXL."""
    del model
    return dict.fromkeys((*SECOND_PROMPTS, *SIZES, *TARGET_SIZES, *AESTHETICS), "it is not an SDXL model")
