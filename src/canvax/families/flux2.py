"""FLUX.2 klein: a language model read at three layers, a double-stream transformer and a VAE (Black Forest Labs 2026).

``Flux2Transformer2DModel`` is that of FLUX.2 dev, too, whose text encoder is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from canvax.errors import CheckpointError
from canvax.families.base import Defaults, Family, check_components, parsed
from canvax.families.language import check_fit, language_model_entries, read_chat_tokenizer, unused_options
from canvax.files import read_json
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.flux2 import ROWS, TEMPLATE, Flux2Config, Flux2Denoiser, taps
from canvax.models.flux2_vae import UNUSED, Flux2Autoencoder, Flux2VaeConfig
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoder, TextEncoders
from canvax.samplers import NoiseSchedule
from canvax.tokenizers.chat import ChatTokenizer
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles
from canvax.weights.formats import flux2_rules, flux2_stacks, vae_rules
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import Outgoing

CLASSES = {
    "transformer": ("Flux2Transformer2DModel",),
    FIRST: ("Qwen3Model", "Qwen3ForCausalLM"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "vae": ("AutoencoderKLFlux2",),
    "scheduler": (),
}

DISTILLED = Defaults(num_inference_steps=4, guidance_scale=1.0)


def read(files: ModelFiles) -> Networks:
    """The transformer reads three layers of the language model side by side; ``is_distilled`` is in the index."""
    check_components(files, CLASSES)
    transformer, lm = parsed(Flux2Config, files, "transformer"), parsed(DecoderConfig, files, FIRST)
    if transformer.guidance_embeds:
        raise CheckpointError(
            f"{files}: its transformer reads the guidance scale (guidance_embeds), as that of FLUX.2 dev does; "
            "take FLUX.2 klein, whose transformer does not"
        )
    vae = Flux2Autoencoder(parsed(Flux2VaeConfig, files, "vae"))
    *earlier, tap = taps(lm.num_hidden_layers)
    text = LanguageModel(lm, tap, tuple(earlier), (ROWS,), ROWS)
    check_fit(
        files,
        latents=(transformer.in_channels, vae.latent_channels),
        text=(transformer.joint_attention_dim, text.width),
    )
    denoiser = Flux2Denoiser(transformer, is_distilled=bool(files.index.get("is_distilled")))
    return Networks(denoiser, vae, TextEncoders((text,)), prediction="flow_prediction")


def _tokenizer(files: ModelFiles, encoder: TextEncoder) -> ChatTokenizer:
    """Padding is read by the transformer, so that its token matters."""
    tokenizer = read_chat_tokenizer(files, encoder, TEMPLATE)
    path = files.folder(encoder.tokenizer) / "tokenizer_config.json"
    pad = read_json(path).get("pad_token") if path.is_file() else None
    word = pad.get("content") if isinstance(pad, dict) else pad
    token = tokenizer.backend.token_to_id(word) if isinstance(word, str) else None
    if token is None:
        raise CheckpointError(f"{path}: names no pad_token of its tokenizer. Download the checkpoint again.")
    return replace(tokenizer, pad=token)


def _defaults_of(networks: Networks, schedule: NoiseSchedule) -> Defaults | None:
    del schedule
    return DISTILLED if networks.denoiser.distilled else None


def empirical_mu(tokens: int, steps: int) -> float:
    """The shift for an image: linear in its tokens for 10 steps and for 200, and between these linear in the steps."""
    few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    return many if tokens > 4300 else many + (many - few) / 190 * (steps - 200)


def _entries(networks: Networks, component: str, entries: Sequence[Entry]) -> Sequence[Entry]:
    """The arrays that are read, in the layout of diffusers or in the original one, each layer by itself."""
    if component == "transformer":
        return Names(flux2_rules(*_widths(networks))).to_ours(entries)
    if component == "vae":
        entries = [entry for entry in entries if entry.name not in UNUSED]
        return Names(vae_rules([entry.name for entry in entries])).to_ours(entries)
    return language_model_entries(networks.text.encoders[0], entries)


def _outgoing(networks: Networks, component: str, arrays: Sequence[Outgoing]) -> Sequence[Outgoing]:
    if component == "transformer":
        return Names(_stacks(networks)).to_theirs(arrays)
    if component == "vae":  # a count of training batches, which diffusers looks for
        zero = np.zeros((), np.int64)
        return [*arrays, *(Outgoing(name, zero.shape, zero.dtype, lambda: zero) for name in UNUSED)]
    return arrays


def _stacks(networks: Networks) -> Sequence[Rule]:
    return flux2_stacks(*_widths(networks))


def _widths(networks: Networks) -> tuple[int, int]:
    """Of a token and of a feed-forward."""
    cfg = networks.denoiser.cfg
    return cfg.dim, int(cfg.dim * cfg.mlp_ratio)


FLUX2 = Family(
    name="flux2",
    pipelines=("Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
    read=read,
    tokenizer=_tokenizer,
    defaults=Defaults(num_inference_steps=50, guidance_scale=4.0),
    defaults_of=_defaults_of,
    even_times=True,
    mu=empirical_mu,
    entries=_entries,
    outgoing=_outgoing,
    stacks=_stacks,
    unused_options=unused_options,
)
