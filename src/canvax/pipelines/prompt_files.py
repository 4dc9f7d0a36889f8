"""Image prompts that are named by text, in flags and in rows of files: read, and put together for a call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from PIL import Image

from canvax.errors import NO_VALUE, InputError
from canvax.images.given import read_images

NONE = "none"
SETTINGS = ("ip_image", "ip_mask")


class FilePrompt(NamedTuple):
    """An image prompt in files; ``mask`` None for everywhere, ``adapter`` counted from 0."""

    file: str
    scale: float
    mask: str | None
    adapter: int


def image_prompts_of(settings: Mapping[str, Any], adapters: int) -> tuple[FilePrompt, ...]:
    """The image prompts that flags or a line of a prompt file name, for so many adapters.

    Raises:
        InputError: they are named otherwise than by text, or are not as many as they have to be.
    """
    files, masks = (_listed(name, settings.get(name)) for name in SETTINGS)
    if not files:
        if masks:
            raise InputError("ip_mask", NO_VALUE, "has no effect without an image prompt", "give {ip_image} as well")
        return ()
    if not adapters:
        raise InputError(
            "ip_image", NO_VALUE, "needs an IP-Adapter", "name the adapter that reads the image with {ip_adapter}"
        )
    if adapters > 1 and len(files) != adapters:
        raise InputError(
            "ip_image",
            NO_VALUE,
            f"has {len(files)} images for {adapters} adapters",
            "give one image for each, in their order",
        )
    if masks and len(masks) != len(files):
        raise InputError(
            "ip_mask",
            NO_VALUE,
            f"has {len(masks)} masks for {len(files)} images",
            "give one for each; none for no mask",
        )
    found = []
    for i, text in enumerate(files):
        file, scale = _with_scale(text)
        mask = masks[i] if masks and masks[i] != NONE else None
        found.append(FilePrompt(file, scale, mask, i if adapters > 1 else 0))
    return tuple(found)


def _listed(name: str, value: Any) -> list[str]:
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise InputError(name, value, "is not the name of an image, nor a list of names")
    return values


def _with_scale(text: str) -> tuple[str, float]:
    """``photo.png:0.6`` as its parts; 1 where there is no strength."""
    file, colon, number = text.rpartition(":")
    if colon and file:
        try:
            return file, float(number)
        except ValueError:  # a name with a colon in it
            if os.path.isfile(file) and not os.path.exists(text):
                raise InputError(
                    "ip_image", text, f"ends in {number!r}, which is not a strength", f"write {file}:0.6"
                ) from None
    return text, 1.0


@lru_cache(maxsize=64)
def read(name: str, file: str, *, grey: bool = False) -> Image.Image:
    """An image, whichever prompts share it."""
    return read_images(name, file, 1, grey=grey)[0]


def read_all(prompts: Sequence[FilePrompt]) -> None:
    """Read every file, before anything is loaded."""
    for prompt in prompts:
        read("ip_image", prompt.file)
        if prompt.mask is not None:
            read("ip_mask", prompt.mask, grey=True)


def structure(prompts: Sequence[FilePrompt]) -> tuple[Any, ...]:
    """What image prompts of images in one call must have in common."""
    return tuple((prompt.adapter, prompt.mask is None) for prompt in prompts)


def image_prompt_argument(batch: Sequence[Sequence[FilePrompt]]) -> Any:
    """``image_prompt=`` of a call for images with these image prompts."""
    from canvax.pipelines.image_prompts import ImagePrompt

    def shared(values: list[Any]) -> Any:
        return values[0] if all(value is values[0] or value == values[0] for value in values) else values

    found = []
    for own in zip(*batch, strict=True):
        images = shared([read("ip_image", prompt.file) for prompt in own])
        masks = [prompt.mask and read("ip_mask", prompt.mask, grey=True) for prompt in own]
        mask = None if masks[0] is None else shared(masks)
        found.append(ImagePrompt(images, shared([prompt.scale for prompt in own]), mask, own[0].adapter))
    return found or None
