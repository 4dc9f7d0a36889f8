"""Images that flags and rows name: control images and image prompts, as text, as marks in metadata and as arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from canvax.call import Call
from canvax.errors import InputError, needs
from canvax.files import state_of
from canvax.images.inputs import fingerprint, read_images
from canvax.images.maps import control_map
from canvax.pipelines.image_prompts import ImagePrompt

NONE = "none"
"""The name of no image."""

Name = TypeVar("Name", bound=Hashable)

ControlFile = tuple[str, str, str | None]
"""A type of a ControlNet-Union or "", the file of a control image, and the map to make of it first."""

ControlEntry = tuple[tuple[ControlFile, ...] | None, ...]
"""For each network its control images, of which there are several by type; None for one that is left out."""

_TYPED = re.compile(r",?([a-z_]+|[0-9]+)(:[+-]?[0-9.]+(?:e[+-]?[0-9]+)?)?=", re.IGNORECASE)


class FilePrompt(NamedTuple):
    """An image prompt in files; ``mask`` None for everywhere, ``adapter`` counted from 0."""

    file: str
    scale: float
    mask: str | None
    adapter: int


def named_control(settings: Mapping[str, Any]) -> ControlEntry:
    """Return the control images that flags or a line of a prompt file name.

    Raises:
        InputError: they are named otherwise than by text.
    """
    files, kinds = _names("control", settings.get("control"), str | None), settings.get("control_from")
    if not files:
        if kinds is not None:
            raise needs("control_from", "control", value=kinds)
        return ()
    kinds = kinds.split(",") if isinstance(kinds, str) else [] if kinds is None else kinds
    if (
        not isinstance(kinds, list)
        or not all(isinstance(kind, str) for kind in kinds)
        or len(kinds) not in (0, 1, len(files))
    ):
        raise InputError(
            "control_from", f"is not a kind of map, or one for each of {len(files)} control images", value=kinds
        )
    entries = []
    for i, file in enumerate(files):
        kind = kinds[i if len(kinds) > 1 else 0].strip() if kinds else NONE
        made = None if kind == NONE else kind
        entries.append(None if file in (None, NONE) else tuple((*mark, made) for mark in _by_type(file)))
    return tuple(entries)


def _by_type(text: str) -> list[tuple[str, str]]:
    """Split "depth=a.png,canny:0.5=b.png" into types and files; a text that begins with no type is a file."""
    starts = [match for match in _TYPED.finditer(text) if match[0][0] == "," or match.start() == 0]
    if not starts or starts[0].start() or text.startswith(","):
        return [("", text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [(match[0].strip(",="), text[match.end() : end]) for match, end in zip(starts, ends, strict=True)]


def named_prompts(settings: Mapping[str, Any], adapters: int) -> tuple[FilePrompt, ...]:
    """Return the image prompts that flags or a line of a prompt file name, for so many adapters.

    Raises:
        InputError: they are named otherwise than by text, or are not as many as they have to be.
    """
    files, masks = (_names(name, settings.get(name), str) for name in ("ip_image", "ip_mask"))
    if not files:
        if masks:
            raise needs("ip_mask", "ip_image")
        return ()
    if not adapters:
        raise needs("ip_image", "ip_adapter", cure="it is the network that reads the image")
    if adapters > 1 and len(files) != adapters:
        problem = f"has {len(files)} images for {adapters} adapters"
        raise InputError("ip_image", problem, cure="give one image for each, in their order")
    if masks and len(masks) != len(files):
        problem = f"has {len(masks)} masks for {len(files)} images"
        raise InputError("ip_mask", problem, cure="give one for each; none for no mask")
    masks = masks or [NONE] * len(files)
    return tuple(
        FilePrompt(*_with_scale(file), None if mask == NONE else mask, i if adapters > 1 else 0)
        for i, (file, mask) in enumerate(zip(files, masks, strict=True))
    )


def _with_scale(text: str) -> tuple[str, float]:
    """Split ``photo.png:0.6`` into file and strength, 1 by default."""
    file, colon, number = text.rpartition(":")
    if colon and file:
        try:
            return file, float(number)
        except ValueError:  # a name with a colon in it
            if os.path.isfile(file) and not os.path.exists(text):
                raise InputError(
                    "ip_image", f"ends in {number!r}, which is not a strength", cure=f"write {file}:0.6", value=text
                ) from None
    return text, 1.0


def _names(name: str, value: Any, kind: Any) -> list[Any]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, kind) and each != "" for each in names):
        raise InputError(name, "is not the name of an image, nor a list of names", value=value)
    return names


def read(name: str, file: str, kind: str | None = None, *, grey: bool = False) -> Image.Image:
    """Return the image of an argument, once for all that share it, or the map to make of it."""
    return _read_once(name, file, kind, grey, state_of(file))


@lru_cache(maxsize=64)
def _read_once(name: str, file: str, kind: str | None, grey: bool, state: Any) -> Image.Image:
    del state  # another content is another image
    (image,) = read_images(name, file, 1, grey=grey)
    return image if kind is None else control_map(kind, image)


def control_files(control: ControlEntry) -> list[Image.Image]:
    """Read all control images."""
    return [read("control", file, kind) for shown in control if shown for _, file, kind in shown]


def prompt_files(prompts: Sequence[FilePrompt]) -> None:
    """Read every image prompt, before anything is loaded."""
    for prompt in prompts:
        read("ip_image", prompt.file)
        _mask(prompt.mask)


def _mask(file: str | None) -> Image.Image | None:
    return None if file is None else read("ip_mask", file, grey=True)


def control_marks(control: ControlEntry) -> list[Any]:
    """Return, as metadata has them, the SHA-256 of each network's image, or of those with types a dict."""
    entries = []
    for shown in control:
        marks = {label: fingerprint(read("control", file, kind)) for label, file, kind in shown or ()}
        entries.append(marks.get("", marks) or None)
    return entries


def prompt_marks(prompts: Sequence[FilePrompt]) -> list[dict[str, Any]]:
    """Return image prompts as metadata has them."""
    return [
        {"scale": prompt.scale, "sha256": fingerprint(read("ip_image", prompt.file))}
        | ({"mask_sha256": fingerprint(mask)} if (mask := _mask(prompt.mask)) else {})
        for prompt in prompts
    ]


def structure(call: Call) -> tuple[Any, ...]:
    """Return what the named images of images in one call must have in common."""
    prompts = tuple((prompt.adapter, prompt.mask is None) for prompt in call.image_prompt)
    return tuple(files is None for files in call.control), prompts


def control_argument(batch: Sequence[ControlEntry]) -> Any:
    """Return ``control=`` of a call for images with these control images."""
    nets = [_of_batch(entries, _shown) for entries in zip(*batch, strict=True)]
    return nets if len(nets) > 1 else nets[0] if nets else None


def _shown(shown: Sequence[ControlFile] | None) -> Any:
    """Read a control image; those of several types become a dict."""
    if shown is None:
        return None
    images = {label: read("control", file, kind) for label, file, kind in shown}
    if len(images) < len(shown):
        raise InputError("control", f"names a type twice: {', '.join(label for label, *_ in shown)}")
    return images.get("", images)


def image_prompt_argument(batch: Sequence[Sequence[FilePrompt]]) -> Any:
    """Return ``image_prompt=`` of a call for images with these image prompts."""
    prompts = []
    for entries in zip(*batch, strict=True):
        files, scales, masks, adapters = zip(*entries, strict=True)
        images = _of_batch(files, lambda file: read("ip_image", file))
        prompts.append(ImagePrompt(images, _of_batch(scales, float), _of_batch(masks, _mask), adapters[0]))
    return prompts or None


def _of_batch(names: Sequence[Name], read: Callable[[Name], Any]) -> Any:
    """Return one value where the whole batch has one name, otherwise a list."""
    return read(names[0]) if len(set(names)) == 1 else [read(name) for name in names]
