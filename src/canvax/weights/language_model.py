"""A language model as the text encoder of a model whose files do not contain one.

ComfyUI, transformers    model.layers.0.self_attn.q_proj.weight, with or without lm_head.weight
Qwen3Model               layers.0.self_attn.q_proj.weight
Qwen3VLModel             language_model.layers.0.self_attn.q_proj.weight, with visual.*; prefixed model. with a head
llama.cpp                blk.0.attn_q.weight, in a GGUF file
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvax.errors import CheckpointError
from canvax.weights.files import NetworkFiles, open_weights
from canvax.weights.formats import LLAMA_CPP, numbered, whole_name
from canvax.weights.identify import LANGUAGE_MODEL, Shapes, expect
from canvax.weights.layouts import LAYER
from canvax.weights.location import Location, refuse_pickle
from canvax.weights.open import open_part


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
        arrays = LLAMA_CPP.to_internal(open_weights(path))
        shapes = {array.name: array.shape for array in arrays}
        expect(f"text_encoder={name!r}", shapes, LANGUAGE_MODEL)
        try:
            config = language_model_config(shapes)
            if "text_config" in usual:
                eyes = {**usual["vision_config"], **vision_config(shapes)}
                config = {"text_config": {**usual["text_config"], **config}, "vision_config": eyes}
            return NetworkFiles(name, arrays, {**usual, **config}, path)
        except (KeyError, IndexError) as error:
            raise CheckpointError(f"text_encoder={name!r}: is not a whole language model, it lacks {error}") from None

    def accept(config: Mapping[str, Any]) -> None:
        if (kind := config.get("model_type")) != usual["model_type"]:
            wanted = usual["model_type"]
            raise CheckpointError(f"text_encoder={name!r}: its model_type is {str(kind)[:80]!r}, not {wanted!r}")

    return open_part(location, "text_encoder", accept, "transformers")


def language_model_config(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of a transformers config that shapes determine."""
    shapes = {whole_name(name): shape for name, shape in shapes.items()}
    vocabulary, width = shapes["model.embed_tokens.weight"]
    layer = "model.layers.0"
    head = shapes[f"{layer}.self_attn.q_norm.weight"][0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes[f"{layer}.mlp.gate_proj.weight"][0],
        "num_hidden_layers": 1 + max(int(match[1]) for match in map(LAYER.match, shapes) if match),
        "num_attention_heads": shapes[f"{layer}.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes[f"{layer}.self_attn.k_proj.weight"][0] // head,
        "head_dim": head,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }


def vision_config(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of a vision tower's config that shapes determine; ``depth`` is 0 without a tower."""
    shapes = {whole_name(name): shape for name, shape in shapes.items()}
    depth = numbered(shapes, r"visual\.blocks\.(\d+)\.")
    if not depth:
        return {"depth": 0}
    positions, width = shapes["visual.pos_embed.weight"]
    return {
        "depth": depth,
        "hidden_size": width,
        "num_position_embeddings": positions,
        "intermediate_size": shapes["visual.blocks.0.mlp.linear_fc1.weight"][0],
        "out_hidden_size": shapes["visual.merger.linear_fc2.weight"][0],
    }
