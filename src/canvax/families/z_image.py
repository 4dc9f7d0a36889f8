"""Z-Image and Z-Image-Turbo: a language model, a single-stream transformer and a VAE (Tongyi Lab 2025)."""

from __future__ import annotations

from collections.abc import Sequence

from canvax.families.base import Defaults, Family, check_components, parsed, read_autoencoder
from canvax.families.language import check_fit, language_model_entries, read_chat_tokenizer, unused_options
from canvax.models.configs import VaeConfig
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoder, TextEncoders
from canvax.models.z_image import TEMPLATE, ZImageConfig, ZImageDenoiser
from canvax.samplers import NoiseSchedule
from canvax.tokenizers.chat import ChatTokenizer
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles
from canvax.weights.formats import Z_IMAGE as Z_IMAGE_NAMES
from canvax.weights.formats import vae_rules
from canvax.weights.rules import Names

CLASSES = {
    "transformer": ("ZImageTransformer2DModel",),
    FIRST: ("Qwen3Model", "Qwen3ForCausalLM"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    "scheduler": (),
}

TURBO = Defaults(num_inference_steps=8, guidance_scale=0.0)
LARGEST_TURBO_SHIFT = 4.0
"""Turbo is shifted by 3 and the base model by 6; nothing else in their files differs."""


def read(files: ModelFiles) -> Networks:
    """The transformer reads the last but one of the states that the language model gives."""
    check_components(files, CLASSES)
    transformer, lm = parsed(ZImageConfig, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    vae = read_autoencoder(files)
    check_fit(
        files, latents=(transformer.in_channels, vae.latent_channels), text=(transformer.cap_feat_dim, lm.hidden_size)
    )
    text = LanguageModel(lm, lm.num_hidden_layers - 1)
    return Networks(ZImageDenoiser(transformer), vae, TextEncoders((text,)), prediction="flow_prediction")


def _tokenizer(files: ModelFiles, encoder: TextEncoder) -> ChatTokenizer:
    return read_chat_tokenizer(files, encoder, TEMPLATE)


def _defaults_of(networks: Networks, schedule: NoiseSchedule) -> Defaults | None:
    del networks
    return TURBO if schedule.shift <= LARGEST_TURBO_SHIFT else None


def _entries(networks: Networks, component: str, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Of the language model the layers that are read, whether it was saved with its head or without.

    Of the other parts all arrays, in the layout of diffusers or in the original one.
    """
    if component == "transformer":
        return Z_IMAGE_NAMES.to_ours(entries)
    if component == "vae" and isinstance(networks.vae, VaeConfig):
        return Names(vae_rules([entry.name for entry in entries])).to_ours(entries)
    if component != FIRST:
        return entries
    return language_model_entries(networks.text.encoders[0], entries)


Z_IMAGE = Family(
    name="z-image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    read=read,
    tokenizer=_tokenizer,
    defaults=Defaults(num_inference_steps=50, guidance_scale=4.0),
    defaults_of=_defaults_of,
    even_times=True,
    no_guidance=0.0,
    entries=_entries,
    unused_options=unused_options,
)
