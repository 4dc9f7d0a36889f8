"""Control images of a ControlNet-Union, each named by its type; and what a network is shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from canvax.errors import NO_VALUE, InputError, nearest
from canvax.images.given import fingerprint, read_images
from canvax.models.controlnet_union import TYPES, UnionNet
from canvax.settings import is_number

MOST_WEIGHT = 10


@dataclass(frozen=True, eq=False)
class Shown:
    """A control image as a network is shown it.

    Attributes:
        image: RGB, of whatever size.
        label: its type as it was named, ``"depth"`` or ``"depth:0.5"``; empty for a network without types.
        slot: the number of its type.
        weight: how strong it is beside the others.
    """

    image: Image.Image
    label: str = ""
    slot: int = 0
    weight: float = 1.0


def read_shown(value: Any, count: int) -> list[tuple[Shown, ...]]:
    """Of a network without types: one image for all of ``count``, or one for each.

    Raises:
        InputError: naming what is wrong with it.
    """
    if isinstance(value, Mapping):
        raise InputError(
            "control", value, "names types of images, which a ControlNet-Union alone takes", "give the image itself"
        )
    return [(Shown(image),) for image in read_images("control", value, count)]


def read_typed(net: UnionNet, value: Any, count: int) -> list[tuple[Shown, ...]]:
    """Of a ControlNet-Union: for all of ``count`` images, or for each, its control images by type.

    Args:
        net: the network.
        value: a dict of a type to an image, or to a list of one for each image of the call; or a list of such dicts. A
            type is a name or a number, and may have a weight behind it, "depth:0.5".
        count: images of the call.

    Raises:
        InputError: a type is unknown or there twice, or an image is none.
    """
    if isinstance(value, Mapping):
        own = {str(key): (_type_of(net, key), read_images("control", one, count)) for key, one in value.items()}
        if not own:
            raise InputError("control", value, "names no type of control image", _known(net))
        _check_once(own)
        several = max(len(images) for _, images in own.values())
        return [
            tuple(Shown(images[i % len(images)], label, *kind) for label, (kind, images) in own.items())
            for i in range(several)
        ]
    if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
        if len(value) not in (1, count):
            raise InputError(
                "control", NO_VALUE, f"has {len(value)} entries for {count} images", "give one for all, or one for each"
            )
        return [shown for one in value for shown in read_typed(net, one, 1)]
    raise InputError(
        "control",
        NO_VALUE,
        "is not a table, as a ControlNet-Union needs: the type and the image, {'depth': image}",
        _known(net),
    )


def mark_of(shown: Sequence[Shown]) -> Any:
    """The SHA-256 of an image, or where there are types a dict of them."""
    marks = {one.label: fingerprint(one.image) for one in shown}
    return marks.get("", marks)


def _type_of(net: UnionNet, key: Any) -> tuple[int, float]:
    """The number of a type and its weight."""
    if is_number(key) and key == int(key):
        name, weight = str(int(key)), ""
    else:
        name, colon, weight = str(key).partition(":")
        if not isinstance(key, str) or (colon and not weight):
            raise InputError("control", NO_VALUE, f"has {key!r}, which is no type of control image", _known(net))
    name = name.strip().lower()
    slot = TYPES.get(name, int(name) if name.isdecimal() else net.types)
    if slot >= net.types:
        close = "" if name.isdecimal() else f"{nearest(name, _names(net))}; "
        raise InputError("control", NO_VALUE, f"has {key!r}, which is no type of this network", f"{close}{_known(net)}")
    try:
        strength = float(weight or 1)
    except ValueError:
        strength = 0.0
    if not 0 < abs(strength) <= MOST_WEIGHT:
        raise InputError(
            "control",
            NO_VALUE,
            f"has {key!r}, where {weight!r} is no weight",
            f"write {name}:0.5, or leave the type out",
        )
    return slot, strength


def _check_once(own: Mapping[str, tuple[Any, ...]]) -> None:
    first: dict[int, str] = {}
    for label, ((slot, _), _) in own.items():
        if slot in first:
            raise InputError(
                "control", NO_VALUE, f"has {first[slot]!r} and {label!r}, which are one type of the network", "give one"
            )
        first[slot] = label


def _names(net: UnionNet) -> list[str]:
    return [name for name, slot in TYPES.items() if slot < net.types]


def _known(net: UnionNet) -> str:
    """The types of a network, for errors."""
    own = [" = ".join(name for name, at in TYPES.items() if at == slot) or "-" for slot in range(net.types)]
    return "its types are " + ", ".join(f"{slot} {names}" for slot, names in enumerate(own))
