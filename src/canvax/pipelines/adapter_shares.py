"""How much of the adapters beside the weights every image of a call has: as set, as the call says, as prompts say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from canvax.errors import NO_VALUE, InputError
from canvax.pipelines.adapter_weights import Weights, parse_weight
from canvax.pipelines.adapters import Adapters
from canvax.pipelines.beside import Bank, Shares, parted
from canvax.pipelines.loaded_adapter import LoadedAdapter, file_of
from canvax.pipelines.prompt_tags import Tags, tags_of, without_networks
from canvax.types import HostArray

OwnAdapters = dict[str, Weights]
"""The adapters of one image, by name."""


def shares_of(
    adapters: Adapters, prompt: Any, asked: Any, per_prompt: int, *, as_set: bool
) -> tuple[Any, Shares | None]:
    """The prompts without the adapters that they name, and how much of each every image has; None if none has any.

    Args:
        adapters: of the pipeline.
        prompt: of the call.
        asked: its argument ``adapters``.
        per_prompt: images of each prompt.
        as_set: whether images of which nothing is said have the weights that are set.

    Raises:
        InputError: an adapter is not there, or not beside the weights.
    """
    bank = adapters.bank
    if bank is None:
        if asked is None:
            return prompt, None
        raise InputError(
            "adapters",
            asked,
            "needs an adapter beside the weights",
            "load with pipe.adapters.load(name, file, beside=True), or set weights for all images with "
            "pipe.adapters.set",
        )
    prompt, tags = _without_tags(prompt, read=adapters.folder is not None)
    usual = _as_set(adapters, bank) if as_set else {}
    images = [
        usual if one is None else {name: per_image(name, weight, bank.components) for name, weight in one.items()}
        for one in one_for_each(asked, len(tags), per_prompt)
    ]
    named = {name for one in (*tags, *images) for name in one}
    for tag in sorted({tag for one in tags for tag in one}):
        _put_beside(adapters, bank, tag, named)
    images = [
        image | {tag: per_image(tag, _there(weight, bank), bank.components) for tag, weight in own.items()}
        for image, own in zip(images, (one for one in tags for _ in range(per_prompt)), strict=True)
    ]
    for name in named:
        if adapters[name].place is None:
            raise InputError(
                "adapters",
                NO_VALUE,
                f"names {name!r}, which is merged and the same for all images",
                "load it with beside=True for images of a call to differ in it",
            )
    places = {name: place for name, one in adapters.items() if (place := one.place) is not None}
    weights = share_rows(images, places, bank)
    records = [
        {name: _told(adapters[name], weight, bank) for name, weight in image.items() if any(weight.values())}
        for image in images
    ]
    nothing = not any(array.any() for array in weights.values())
    return prompt, None if nothing else Shares(bank.places, bank.snapshot(), weights, records)


def _without_tags(prompt: Any, *, read: bool) -> tuple[Any, list[Tags]]:
    """The prompts without the adapters that they name, and these; an entry for each prompt."""
    if isinstance(prompt, Mapping):  # encoded already
        return prompt, [{}] * len(prompt.get("text", [None]))
    prompts: Any = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not all(isinstance(one, str) for one in prompts):
        return prompt, [{}]  # which is refused elsewhere
    tags = [tags_of(one) if read else {} for one in prompts]
    words = [without_networks(one) if own else one for one, own in zip(prompts, tags, strict=True)]
    return words[0] if isinstance(prompt, str) else words, tags


def _put_beside(adapters: Adapters, bank: Bank, tag: str, named: set[str]) -> None:
    """Have the adapter that a prompt means beside the weights; one of the folder takes the place of another of it."""
    if tag not in adapters:
        assert adapters.folder is not None
        path = file_of(adapters.folder, tag)
        held = [name for name, one in adapters.items() if one.place is not None]
        idle = [name for name in adapters.of_folder if name not in named]
        if len(held) == bank.places.count and idle:
            adapters.remove(idle[0])
        adapters.load(tag, path, 0.0, beside=True)
        adapters.of_folder[tag] = None
    elif tag in adapters.of_folder:
        del adapters.of_folder[tag]
        adapters.of_folder[tag] = None


def _there(weight: float | dict[str, float], bank: Bank) -> float | dict[str, float]:
    """Without networks that the model does not have."""
    return {part: w for part, w in weight.items() if part in bank.components} if isinstance(weight, dict) else weight


def _as_set(adapters: Adapters, bank: Bank) -> OwnAdapters:
    held = [one for one in adapters.values() if one.place is not None and any(one.weights.values())]
    return {one.name: parted(one.weights, bank.components)[1] for one in held}


def _told(one: LoadedAdapter, weights: Weights, bank: Bank) -> dict[str, Any]:
    """What the metadata of an image tells of an adapter that it has."""
    by_block, _ = parted(one.weights, bank.components)
    return {"file": one.source, "weight": one.weight if by_block else plain_weight(weights), "sha256": one.sha256}


def plain_weight(weights: Weights) -> float | dict[str, float]:
    """Weights as people write them."""
    return weights[""] if set(weights) == {""} else dict(weights)


def per_image(name: str, weight: Any, components: Sequence[str]) -> Weights:
    """The weight of an adapter in one image, by network, "" for all.

    Raises:
        InputError: it is no number and no table of numbers by network.
    """
    found = parse_weight(weight, None)
    if deeper := found.keys() - {"", *components}:
        raise InputError(
            "adapters",
            NO_VALUE,
            f"has a weight of {name!r:.80} for {min(deeper)!r:.80}",
            f"an image's weight is a number or a table by network ({', '.join(components)}); blocks have weights with "
            "pipe.adapters.set",
        )
    return found


def share_rows(images: Sequence[OwnAdapters], places: Mapping[str, int], bank: Bank) -> dict[str, HostArray]:
    """Weights of each image for each place [n, K] float32, by network; ``places`` are those of the names."""
    found = {component: np.zeros((len(images), bank.places.count), np.float32) for component in bank.components}
    for i, image in enumerate(images):
        for name, weights in image.items():
            for component, rows in found.items():
                rows[i, places[name]] = weights.get(component, weights.get("", 1.0))
    return found


def one_for_each(adapters: Any, prompts: int, per_prompt: int) -> list[Any]:
    """What is said of the adapters of each image: a table for all, or a list of one for each prompt or image.

    Raises:
        InputError: it is neither, or of another length.
    """
    count = prompts * per_prompt
    if adapters is None or isinstance(adapters, Mapping):
        return [adapters] * count
    if not isinstance(adapters, list | tuple) or not all(one is None or isinstance(one, Mapping) for one in adapters):
        raise InputError(
            "adapters", adapters, "is neither a table of weights by name, {'ink': 0.8}, nor a list of such"
        )
    if len(adapters) not in (prompts, count):
        raise InputError(
            "adapters", NO_VALUE, f"has {len(adapters)} entries for {prompts} prompts", "give one for each, or a table"
        )
    return [one or {} for one in adapters for _ in range(count // len(adapters))]
