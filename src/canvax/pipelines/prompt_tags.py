"""``<lora:name:0.8>`` in prompts, as A1111 writes it: which adapters a call uses, and how strongly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from canvax.errors import NO_VALUE, InputError
from canvax.images.infotext import without_networks

TAG = re.compile(r"<(?:lora|lyco):([^<>:]{1,200})((?::[^<>:]{0,40}){0,4})>", re.IGNORECASE)

Tags = dict[str, float | dict[str, float]]
"""Names of adapters, and their weights."""


def has_tags(prompt: Any) -> bool:
    """Whether a prompt, or one of several, names an adapter."""
    prompts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list | tuple) else []
    return any(isinstance(one, str) and TAG.search(one) for one in prompts)


def take_tags(prompts: Sequence[str]) -> tuple[list[str], Tags]:
    """The prompts without their tags, and the adapters that they all name.

    Raises:
        InputError: they name different ones, or a weight is no number.
    """
    if not prompts:
        raise InputError("prompt", [], "holds no prompt", "give at least one")
    found = [tags_of(prompt) for prompt in prompts]
    if any(tags != found[0] for tags in found):
        raise InputError(
            "prompts",
            NO_VALUE,
            "name different adapters (<lora:...>), and its images share the weights of the model",
            "call once for each",
        )
    return [without_networks(prompt) for prompt in prompts], found[0]


def tags_of(prompt: str) -> Tags:
    """The adapters that a prompt names, with their weights.

    ``<lora:name>``, ``<lora:name:0.8>``, ``<lora:name:0.5:0.8>`` for the text encoders and the UNet, and ``te=`` and
    ``unet=`` in place of these places.
    """
    tags: Tags = {}
    for name, rest in TAG.findall(prompt):
        places: dict[str, float] = {}
        for word in rest.split(":")[1:]:
            label, _, number = word.rpartition("=")
            label = label.strip() or ("te" if "te" not in places else "unet")
            if label not in ("te", "unet") or label in places:
                raise InputError(
                    "prompt",
                    NO_VALUE,
                    f"names <lora:{name}{rest}> with other parts than a weight, or te=0.5 and unet=0.8",
                )
            places[label] = _number(f"<lora:{name}{rest}>", number)
        text = places.get("te", 1.0)
        unet = places.get("unet", text)
        if name.strip() in tags:
            raise InputError("prompt", NO_VALUE, f"names the adapter {name!r} twice (<lora:...>)", "once is enough")
        tags[name.strip()] = text if text == unet else {"text_encoder": text, "text_encoder_2": text, "unet": unet}
    return tags


def _number(tag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            "prompt", NO_VALUE, f"names {tag}, where {text!r} is no weight", "write <lora:name:0.8>"
        ) from None
