"""ControlEntry images that are named by text, in flags and in rows of files: read, and put together for a call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from PIL import Image

from canvax.errors import NO_VALUE, InputError
from canvax.images.given import fingerprint, read_images
from canvax.images.maps import control_map

ControlFile = tuple[str, str, str | None]
"""A type of a ControlNet-Union or "", the file of a control image, and the map to make of it first."""

ControlEntry = tuple[tuple[ControlFile, ...] | None, ...]
"""For each network its control images, of which there are several by type; None for one that is left out."""

_TYPED = re.compile(r",?([a-z_]+|[0-9]+)(:[+-]?[0-9.]+(?:e[+-]?[0-9]+)?)?=", re.IGNORECASE)

NONE = "none"


def control_of(settings: Mapping[str, Any]) -> ControlEntry:
    """The control images that flags or a line of a prompt file name.

    Raises:
        InputError: they are named otherwise than by text.
    """
    files, kinds = settings.get("control"), settings.get("control_from")
    if files is None:
        if kinds is not None:
            raise InputError("control_from", kinds, "needs a control image", "give {control} as well")
        return ()
    files = [files] if isinstance(files, str) else files
    kinds = kinds.split(",") if isinstance(kinds, str) else [] if kinds is None else kinds
    if not isinstance(files, list) or not files or not all(isinstance(one, str | None) for one in files):
        raise InputError("control", files, "is not the name of an image, nor a list of names")
    if (
        not isinstance(kinds, list)
        or not all(isinstance(one, str) for one in kinds)
        or len(kinds) not in (0, 1, len(files))
    ):
        raise InputError("control_from", kinds, f"is not a kind of map, or one for each of {len(files)} control images")
    found = []
    for i, file in enumerate(files):
        kind = kinds[i if len(kinds) > 1 else 0].strip() if kinds else NONE
        made = None if kind == NONE else kind
        found.append(None if file in (None, NONE) else tuple((*one, made) for one in _by_type(file)))
    return tuple(found)


def _by_type(text: str) -> list[tuple[str, str]]:
    """Types and files of "depth=a.png,canny:0.5=b.png"; a text that begins with none is the name of a file."""
    starts = [match for match in _TYPED.finditer(text) if match[0][0] == "," or match.start() == 0]
    if not starts or starts[0].start() or text.startswith(","):
        return [("", text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [(match[0].strip(",="), text[match.end() : end]) for match, end in zip(starts, ends, strict=True)]


def read_control(shown: Sequence[ControlFile]) -> Any:
    """A control image, made of its file where a map was asked for; those of several types are a dict."""
    images = {label: _read(*one) for label, *one in shown}
    if len(images) < len(shown):
        raise InputError("control", NO_VALUE, f"names a type twice: {', '.join((label for label, *_ in shown))}")
    return images.get("", images)


@lru_cache(maxsize=64)
def _read(file: str, kind: str | None) -> Image.Image:
    (image,) = read_images("control", file, 1)
    return image if kind is None else control_map(kind, image)


def control_files(control: ControlEntry) -> list[Image.Image]:
    """All of its images, read."""
    return [_read(*one) for shown in control if shown for _, *one in shown]


def control_marks(control: ControlEntry) -> list[Any]:
    """As metadata has them: for each network the SHA-256 of its image, or of those with types a dict."""
    found = []
    for shown in control:
        marks = {label: fingerprint(_read(*one)) for label, *one in shown or ()}
        found.append(marks.get("", marks) or None)
    return found


def control_argument(batch: Sequence[ControlEntry]) -> Any:
    """``control=`` of a call for images with these control images; one that all share is read once."""
    nets = []
    for i in range(len(batch[0])):
        own = [control[i] for control in batch]
        images = [None if one is None else read_control(one) for one in own]
        nets.append(images[0] if len(set(own)) == 1 else images)
    return nets if len(nets) > 1 else nets[0] if nets else None
