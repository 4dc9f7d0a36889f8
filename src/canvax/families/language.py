"""Shared parts of families whose text encoder is a language model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from canvax.errors import CheckpointError
from canvax.files import read_json
from canvax.models.anima import TextAdapter
from canvax.models.decoder_lm import DecoderConfig, LanguageModel
from canvax.models.t5 import T5Encoder
from canvax.models.text import TextEncoder
from canvax.tokenizers.chat import ChatTokenizer
from canvax.weights.files import ModelFiles

TOKENIZER = Path(__file__).parent.parent / "assets" / "qwen" / "tokenizer"
"""Folder of Qwen3's tokenizer, which Qwen3-VL shares."""

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""Config fields that the arrays of a Qwen3 do not determine."""

QWEN3_VL = {
    "architectures": ["Qwen3VLModel"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {
        **{name: value for name, value in QWEN3.items() if name not in ("architectures", "rope_theta")},
        "model_type": "qwen3_vl_text",
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
        "out_hidden_size": 2560, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
"""Config fields that the arrays of a Qwen3-VL-4B do not determine."""

QWEN3_4B = DecoderConfig(head_dim=128)
QWEN3_VL_4B = DecoderConfig(model_type="qwen3_vl_text", head_dim=128, rope_theta=5e6)

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
SHIFT_BY_SIZE = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256}
"""Fields of scheduler configs."""


def read_chat_tokenizer(
    files: ModelFiles, encoder: TextEncoder, template: str, empty: str = "", folder: Path | None = None
) -> ChatTokenizer:
    """Return the tokenizer of a language model, after checking that the model has an embedding for every id.

    ``folder`` is used instead of the model's.
    """
    assert isinstance(encoder, LanguageModel | T5Encoder | TextAdapter)
    tokenizer = ChatTokenizer.from_folder(folder or files.folder(encoder.tokenizer), template)
    size = encoder.cfg.vocab_size
    if tokenizer.largest >= size:
        raise CheckpointError(
            f"{files}: its tokenizer has the id {tokenizer.largest}, the encoder embeds 0..{size - 1}"
        )
    return replace(tokenizer, empty=empty)


def read_padding_tokenizer(
    files: ModelFiles, encoder: TextEncoder, template: str, folder: Path | None = None
) -> ChatTokenizer:
    """Return the tokenizer of a model that reads padding, whose padding token must be known."""
    tokenizer = read_chat_tokenizer(files, encoder, template, folder=folder)
    path = (folder or files.folder(encoder.tokenizer)) / "tokenizer_config.json"
    pad = read_json(path).get("pad_token") if path.is_file() else None
    word = pad.get("content") if isinstance(pad, dict) else pad
    token = tokenizer.backend.token_to_id(word) if isinstance(word, str) else None
    if token is None:
        raise CheckpointError(f"{path}: names no pad_token of its tokenizer. Download the checkpoint again.")
    return replace(tokenizer, pad=token)


def check_fit(files: ModelFiles, *, latents: tuple[int, int], text: tuple[int, int]) -> None:
    """Check the transformer's inputs against the other components: channels of latents, widths of text.

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
