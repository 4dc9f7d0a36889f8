"""The adapters beside the weights that each image of a call uses, from its prompts and its argument ``adapters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvax.errors import InputError
from canvax.images.infotext import without_networks
from canvax.pipelines.adapter_files import file_of
from canvax.pipelines.adapter_weights import Weights, parted, per_image, plain_weight
from canvax.pipelines.adapters import Adapters, LoadedAdapter
from canvax.pipelines.slots import Bank, OwnAdapters, Shares, share_rows
from canvax.pipelines.texts import Tags, tags_of


def shares_of(
    adapters: Adapters, prompt: Any, asked: Any, per_prompt: int, *, as_set: bool
) -> tuple[Any, Shares | None]:
    """Return prompts without their adapters' names, and the weights of adapters in each image, or None if all are 0.

    Args:
        adapters: adapters of the pipeline.
        prompt: prompt of the call.
        asked: the call's argument ``adapters``.
        per_prompt: images of each prompt.
        as_set: give images without ``asked`` the weights that are set.

    Raises:
        InputError: an adapter does not exist, or is not beside the weights.
    """
    bank = adapters._bank
    if bank is None:
        if asked is None:
            return prompt, None
        raise InputError(
            "adapters",
            "needs an adapter beside the weights",
            cure="load with pipe.adapters.load(name, file, beside=True), or set weights for all images with "
            "pipe.adapters.set",
            value=asked,
        )
    prompt, tags = _without_tags(prompt, adapters)
    usual = _as_set(adapters, bank) if as_set else {}
    images = [
        usual
        if asked_of_image is None
        else {name: per_image(name, weight, bank.components) for name, weight in asked_of_image.items()}
        for asked_of_image in adapters_of_images(asked, len(tags), per_prompt)
    ]
    named = {name for by_tag in (*tags, *images) for name in by_tag}
    for tag in sorted({tag for by_tag in tags for tag in by_tag}):
        _put_beside(adapters, bank, tag, named)
    images = [
        image | {tag: per_image(tag, _there(weight, bank), bank.components) for tag, weight in by_tag.items()}
        for image, by_tag in zip(images, (by_tag for by_tag in tags for _ in range(per_prompt)), strict=True)
    ]
    for name in named:
        if adapters[name].place is None:
            raise InputError(
                "adapters",
                f"names {name!r}, which is merged and the same for all images",
                cure="load it with beside=True for images of a call to differ in it",
            )
    places = {name: place for name, adapter in adapters.items() if (place := adapter.place) is not None}
    weights = share_rows(images, places, bank)
    records = [
        {
            name: _recorded(adapters[name], weight, bank)
            for name, weight in image.items()
            if any(weights[component][i, places[name]] for component, _ in adapters[name].adapter.parts)
        }
        for i, image in enumerate(images)
    ]
    return prompt, Shares(bank.places, bank.snapshot(), weights, records) if any(records) else None


def _without_tags(prompt: Any, adapters: Adapters) -> tuple[Any, list[Tags]]:
    """Return the prompts without the adapters that they name, and these adapters for each prompt."""
    if isinstance(prompt, Mapping):  # encoded already
        return prompt, [{}] * len(prompt.get("text", [None]))
    prompts: Any = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) for prompt in prompts):
        return prompt, [{}]  # which is refused elsewhere
    tags = [{} if adapters.folder is None else tags_of(prompt, adapters._denoiser) for prompt in prompts]
    words = [without_networks(prompt) if tag else prompt for prompt, tag in zip(prompts, tags, strict=True)]
    return words[0] if isinstance(prompt, str) else words, tags


def _put_beside(adapters: Adapters, bank: Bank, tag: str, named: set[str]) -> None:
    """Put the adapter that a prompt means beside the weights; it may replace another one from the folder."""
    if tag not in adapters:
        assert adapters.folder is not None
        path = file_of(adapters.folder, tag)
        held = [name for name, adapter in adapters.items() if adapter.place is not None]
        idle = [name for name in adapters._of_folder if name not in named]
        if len(held) == bank.places.count and idle:
            adapters.remove(idle[0])
        adapters._load_adapter_of_tag(tag, path, beside=True)
        adapters._of_folder[tag] = None
    elif tag in adapters._of_folder:
        del adapters._of_folder[tag]
        adapters._of_folder[tag] = None


def _there(weight: float | dict[str, float], bank: Bank) -> float | dict[str, float]:
    """Remove networks that the model does not have."""
    return {part: w for part, w in weight.items() if part in bank.components} if isinstance(weight, dict) else weight


def _as_set(adapters: Adapters, bank: Bank) -> OwnAdapters:
    held = [adapter for adapter in adapters.values() if adapter.place is not None and adapter.acts]
    return {adapter.name: parted(adapter.weights, bank.components)[1] for adapter in held}


def _recorded(adapter: LoadedAdapter, weights: Weights, bank: Bank) -> dict[str, Any]:
    """Return the entry of an adapter in the metadata of an image."""
    by_block, _ = parted(adapter.weights, bank.components)
    return adapter.record(adapter.weight if by_block else plain_weight(weights))


def adapters_of_images(adapters: Any, prompts: int, per_prompt: int) -> list[Any]:
    """Return the caller's adapters of each image, from a table for all or a list with one for each prompt or image.

    Raises:
        InputError: the value is neither, or the list has another length.
    """
    count = prompts * per_prompt
    if adapters is None or isinstance(adapters, Mapping):
        return [adapters] * count
    if not isinstance(adapters, list | tuple) or not all(
        adapter is None or isinstance(adapter, Mapping) for adapter in adapters
    ):
        raise InputError(
            "adapters", "is neither a table of weights by name, {'ink': 0.8}, nor a list of such", value=adapters
        )
    if len(adapters) not in (prompts, count):
        raise InputError(
            "adapters", f"has {len(adapters)} entries for {prompts} prompts", cure="give one for each, or a table"
        )
    return [adapter or {} for adapter in adapters for _ in range(count // len(adapters))]
