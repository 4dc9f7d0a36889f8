"""Control images computed from images without a network: edges, and simple changes of tone.

Maps such as depth and poses come from networks of other programs; pass their images unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from canvax.errors import InputError, nearest
from canvax.images.convert import on_white
from canvax.types import HostArray

SETTINGS: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "canny": {"low": (100, 0, 10_000), "high": (200, 0, 10_000)},
    "invert": {},
    "threshold": {"at": (127, 0, 255)},
    "blur": {"radius": (9, 0, 500)},
}
"""Kind of map -> its settings, each with (default, minimum, maximum)."""


def control_map(kind: str, image: Image.Image, **settings: float) -> Image.Image:
    """Compute a control image from an RGB image, of the same size.

    Args:
        kind: "canny": edges, white on black; "invert": for drawings, black on white; "threshold": black and white;
            "blur": for networks that sharpen.
        image: an RGB image; transparent parts are put on white.
        settings: see ``SETTINGS``.

    Raises:
        InputError: the kind or a setting is unknown.
    """
    numbers, image = _checked(kind, settings), on_white(image)
    if kind == "canny":
        pixels = canny(np.asarray(image), numbers["low"], numbers["high"])
        return Image.fromarray(pixels.astype(np.uint8) * 255).convert("RGB")
    if kind == "invert":
        return ImageOps.invert(image)
    if kind == "threshold":
        return image.convert("L").point([0 if level <= numbers["at"] else 255 for level in range(256)]).convert("RGB")
    return image.filter(ImageFilter.GaussianBlur(numbers["radius"]))


def _checked(kind: Any, settings: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(kind, str) or kind not in SETTINGS:
        raise InputError(
            "kind",
            "is not a kind of control image that is made here",
            cure=nearest(str(kind), list(SETTINGS)),
            value=kind,
        )
    numbers = {name: usual for name, (usual, _, _) in SETTINGS[kind].items()}
    for name, value in settings.items():
        if name not in numbers:
            raise InputError(f"{kind} has no {name!r}; it has {', '.join(numbers) or 'no settings'}")
        _, low, high = SETTINGS[kind][name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InputError(name, f"is not in {low:g}..{high:g}", value=value)
        numbers[name] = value
    if kind == "canny" and numbers["low"] > numbers["high"]:
        raise InputError("low", f"is above high={numbers['high']:g}", cure="give them in order", value=numbers["low"])
    return numbers


def canny(pixels: HostArray, low: float, high: float) -> HostArray:
    """Return the edges [H, W] bool of an image [H, W, C] uint8 (Canny 1986), the same pixels as OpenCV's ``Canny``.

    An edge pixel is a local maximum of the gradient along its direction that is above ``high``, or above ``low`` and
    connected to a pixel above ``high``. The gradient is Sobel's in the channel where it is largest; its size is
    |dx| + |dy|.
    """
    from scipy import ndimage

    padded = np.pad(pixels.astype(np.int64), ((1, 1), (1, 1), (0, 0)), mode="edge")
    down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    dx = down[:, 2:] - down[:, :-2]
    across = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    dy = across[2:] - across[:-2]
    channel = (np.abs(dx) + np.abs(dy)).argmax(axis=-1)[..., None]
    dx, dy = (np.take_along_axis(gradient, channel, axis=-1)[..., 0] for gradient in (dx, dy))
    size = np.abs(dx) + np.abs(dy)
    around = np.pad(size, 1)
    height, width = size.shape

    def at(row: int, column: int) -> HostArray:
        return around[1 + row : 1 + row + height, 1 + column : 1 + column + width]

    # The tangents of 22.5 and 67.5 degrees are t and t + 2, here in integers as multiples of 2^-15.
    flat = np.abs(dx) * 13573
    steep = np.abs(dy) << 15
    horizontal, vertical = steep < flat, steep > flat + (np.abs(dx) << 16)
    falling = (dx ^ dy) < 0
    peak = np.where(
        horizontal,
        (size > at(0, -1)) & (size >= at(0, 1)),
        np.where(
            vertical,
            (size > at(-1, 0)) & (size >= at(1, 0)),
            np.where(falling, (size > at(-1, 1)) & (size > at(1, -1)), (size > at(-1, -1)) & (size > at(1, 1))),
        ),
    )
    weak = peak & (size > np.floor(low))
    labelled: Any = ndimage.label(weak, np.ones((3, 3)))
    labels, count = labelled
    strong = np.zeros(count + 1, bool)
    strong[np.unique(labels[weak & (size > np.floor(high))])] = True
    strong[0] = False
    return strong[labels]
