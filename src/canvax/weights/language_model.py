"""A language model as the text encoder of a model whose files do not contain one.

ComfyUI, transformers    model.layers.0.self_attn.q_proj.weight, with or without lm_head.weight
Qwen3Model               layers.0.self_attn.q_proj.weight
Qwen3VLModel             language_model.layers.0.self_attn.q_proj.weight, with visual.*; prefixed model. with a head
llama.cpp                blk.0.attn_q.weight, in a GGUF file; T5 enc.blk.0.attn_q.weight
T5EncoderModel           encoder.block.0.layer.0.SelfAttention.q.weight
CLIPTextModel            text_model.encoder.layers.0.self_attn.q_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canvax.errors import CheckpointError
from canvax.weights.entries import Entry
from canvax.weights.files import NetworkFiles, open_weights
from canvax.weights.formats import LLAMA_CPP, T5_CPP, numbered, whole_name
from canvax.weights.identify import INSIDE, LANGUAGE_MODEL, T5, TEXT_ALONE, FileKind, Shapes, expect, identify
from canvax.weights.layouts import EMBEDDED, LAYER
from canvax.weights.location import Location, refuse_pickle
from canvax.weights.open import open_part

QWEN25_HEAD = 128
"""Channels of a head of every Qwen2.5-VL, whose arrays do not determine it."""
_INSIDE = re.compile(rf"{re.escape(INSIDE['text_encoder'])}(\w+)\.transformer\.")


def open_language_model(location: Location, usual: Mapping[str, Any]) -> NetworkFiles:
    """Find a language model and download missing files; no array is read.

    Args:
        location: a transformers folder, a folder that contains one as ``text_encoder``, a Hub id with an optional
            folder, or a safetensors or GGUF file.
        usual: the usual config, for fields that the shapes of a file do not determine.

    Raises:
        InputError, CheckpointError, HubError: it is missing, damaged or another kind of file.
    """
    name = location.text
    refuse_pickle(name)
    path = location.local()
    if path is not None and path.is_file():
        usual_kind = LLAMA_CPP.to_internal, LANGUAGE_MODEL, language_model_config
        named, wanted, config_of = _KINDS.get(str(usual["model_type"]), usual_kind)
        arrays = named(_inside(open_weights(path, plain_names=False), named, wanted))
        shapes = {array.name: array.shape for array in arrays}
        expect(f"{location.argument}={name!r}", shapes, wanted)
        try:
            config = config_of(shapes)
            if "text_config" in usual:
                eyes = {**usual["vision_config"], **vision_config(shapes)}
                config = {"text_config": {**usual["text_config"], **config}, "vision_config": eyes}
            return NetworkFiles(name, arrays, {**usual, **config}, path)
        except (KeyError, IndexError) as error:
            raise CheckpointError(
                f"{location.argument}={name!r}: is not a whole language model, it lacks {error}"
            ) from None

    def accept(config: Mapping[str, Any]) -> None:
        if (kind := config.get("model_type")) != usual["model_type"]:
            wanted = usual["model_type"]
            raise CheckpointError(f"{location.argument}={name!r}: its model_type is {str(kind)[:80]!r}, not {wanted!r}")

    return open_part(location, location.argument, accept, "transformers")


def _inside(entries: Sequence[Entry], named: Callable[[Sequence[Entry]], list[Entry]], kind: FileKind) -> list[Entry]:
    """Return the arrays of the text encoder of this kind in ComfyUI's file of a whole model; all of another file."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if match := _INSIDE.match(entry.name):
            groups.setdefault(match[1], []).append(replace(entry, name=entry.name[match.end() :]))
    for group in groups.values():
        if identify({entry.name: entry.shape for entry in named(group)}) is kind:
            return group
    return list(entries)


def language_model_config(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of a transformers config that shapes determine."""
    shapes = {whole_name(name): shape for name, shape in shapes.items()}
    vocabulary, width = shapes["model.embed_tokens.weight"]
    layer = "model.layers.0"
    norm = shapes.get(f"{layer}.self_attn.q_norm.weight")
    head = norm[0] if norm else QWEN25_HEAD
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes[f"{layer}.mlp.gate_proj.weight"][0],
        "num_hidden_layers": 1 + max(int(match[1]) for match in map(LAYER.match, shapes) if match),
        "num_attention_heads": shapes[f"{layer}.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes[f"{layer}.self_attn.k_proj.weight"][0] // head,
        **({"head_dim": head} if norm else {}),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }


def t5_config(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of T5's config that shapes determine."""
    vocabulary, width = shapes[EMBEDDED if EMBEDDED in shapes else "shared.weight"]
    attention = "encoder.block.0.layer.0.SelfAttention"
    buckets, heads = shapes[f"{attention}.relative_attention_bias.weight"]
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes[f"{attention}.q.weight"][0] // heads,
        "d_ff": shapes["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": numbered(shapes, r"encoder\.block\.(\d+)\."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }


def clip_config(shapes: Shapes) -> dict[str, Any]:
    """Return the config of CLIP's text encoder of Stable Diffusion 1.x and FLUX.1, with sizes from shapes."""
    vocabulary, width = shapes["text_model.embeddings.token_embedding.weight"]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": numbered(shapes, r"text_model\.encoder\.layers\.(\d+)\."),
        "num_attention_heads": max(1, width // 64),
        "max_position_embeddings": shapes["text_model.embeddings.position_embedding.weight"][0],
        "hidden_act": "quick_gelu",
        "eos_token_id": 2,
    }


def _whole_clip(entries: Sequence[Entry]) -> list[Entry]:
    """Return the arrays under names with ``text_model.``, which transformers omits since version 5."""
    inside = ("embeddings.", "encoder.", "final_layer_norm.")
    return [
        replace(entry, name=f"text_model.{entry.name}" if entry.name.startswith(inside) else entry.name)
        for entry in entries
    ]


_KINDS: dict[str, tuple[Callable[[Sequence[Entry]], list[Entry]], FileKind, Callable[[Shapes], dict[str, Any]]]] = {
    "t5": (T5_CPP.to_internal, T5, t5_config),
    "clip_text_model": (_whole_clip, TEXT_ALONE, clip_config),
}
"""Renaming, kind of file, and config from shapes, by ``model_type``."""


def vision_config(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of a vision tower's config that shapes determine; ``depth`` is 0 without a tower."""
    shapes = {whole_name(name): shape for name, shape in shapes.items()}
    depth = numbered(shapes, r"visual\.blocks\.(\d+)\.")
    if not depth:
        return {"depth": 0}
    if "visual.pos_embed.weight" not in shapes:  # Qwen2.5-VL's has no table of positions
        return {
            "depth": depth,
            "hidden_size": shapes["visual.patch_embed.proj.weight"][0],
            "intermediate_size": shapes["visual.blocks.0.mlp.gate_proj.weight"][0],
            "out_hidden_size": shapes["visual.merger.mlp.2.weight"][0],
        }
    positions, width = shapes["visual.pos_embed.weight"]
    return {
        "depth": depth,
        "hidden_size": width,
        "num_position_embeddings": positions,
        "intermediate_size": shapes["visual.blocks.0.mlp.linear_fc1.weight"][0],
        "out_hidden_size": shapes["visual.merger.linear_fc2.weight"][0],
    }
