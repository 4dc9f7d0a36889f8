"""From the names in a checkpoint to the names in a spec, and back for error messages.

A spec's names are those of today's PyTorch diffusers files, so most need no translation. What does:

    Flax trees            down_blocks_0/resnets_1/conv1/kernel -> down_blocks.0.resnets.1.conv1.weight
    old VAE attention     mid_block.attentions.0.query.weight -> mid_block.attentions.0.to_q.weight
    text encoders         embeddings.token_embedding.weight -> text_model.embeddings.token_embedding.weight
    image encoders        encoder.layers.0.mlp.fc1.weight -> vision_model.encoder.layers.0.mlp.fc1.weight
                          (newer files leave the prefix out)
"""

from __future__ import annotations

import re
from collections.abc import Container

from canvax.params import Param
from canvax.weights.entries import Entry

_FLAX_STEP = re.compile(r"^(?!linear_)(.+)_(\d+)$")
"""``resnets_1`` is item 1 of a list; ``linear_1`` is a name."""

_FLAX_LEAF = {"kernel": "weight", "scale": "weight", "embedding": "weight"}

_FLAX_LISTS = {"layers"}
"""Lists whose items Flax stores one level down, ``layers/0``, instead of as ``layers_0``."""

_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_OLD_ATTENTION_STEP = re.compile(r"\.(query|key|value|proj_attn)\.(?=(weight|bias)$)")

_PREFIXES = ("text_model.", "vision_model.")

_LEFTOVER = re.compile(r"(text_model\.|(vision_model\.){0,2})embeddings\.position_ids")
"""Not weights: the numbers from 0 on, which older files of encoders carry along."""


def spec_name(entry: Entry, known: Container[str]) -> str | None:
    """The spec's name for a file's array, or None if the spec has no such parameter."""
    if entry.order == "flax":
        name, unchanged = _from_flax(entry.name)
    else:
        name = unchanged = entry.name
    modern = _OLD_ATTENTION_STEP.sub(lambda match: f".{_OLD_ATTENTION[match[1]]}.", name)
    for candidate in (name, modern, *(prefix + name for prefix in _PREFIXES), unchanged):
        if candidate in known:
            return candidate
    return None


def is_leftover(entry: Entry) -> bool:
    """Whether an array is known to be of no use, so that leaving it unread is right."""
    return _LEFTOVER.fullmatch(entry.name.replace("/", ".")) is not None


def flax_name(name: str, param: Param) -> str:
    """The usual Flax path of a spec's parameter."""
    *steps, leaf = name.split(".")
    path: list[str] = []
    for step in steps:
        if step.isdigit() and path and path[-1] not in _FLAX_LISTS:
            path[-1] += f"_{step}"
        else:
            path.append(step)
    if leaf == "weight":
        leaf = "kernel" if param.layout != "plain" else "embedding" if len(param.shape) == 2 else "scale"
    return "/".join([*path, leaf])


def accepted_shapes(param: Param, entry: Entry) -> tuple[tuple[int, ...], ...]:
    """The shapes in which the entry's file format may store ``param``; the first is the usual one."""
    if entry.order == "torch":
        return param.checkpoint_shapes
    if param.layout in ("linear", "conv1x1"):
        both = (param.shape, (1, 1, *param.shape))
        return both if param.layout == "linear" else both[::-1]
    return (param.shape,)


def _from_flax(path: str) -> tuple[str, str]:
    """The dotted name with PyTorch's name of the leaf, and with the leaf's own, which a spec may have too."""
    *steps, leaf = path.split("/")
    parents = [_FLAX_STEP.sub(r"\1.\2", step) for step in steps]
    return ".".join([*parents, _FLAX_LEAF.get(leaf, leaf)]), ".".join([*parents, leaf])
