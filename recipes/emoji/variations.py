"""More pictures from the drawings, with captions that say what was changed: colours, pairs, counts, poses, mirrors.

A drawing alone teaches a model that a banana is yellow, stands upright in the middle and has no company. Here colours
have names, things have company, and a caption that leaves style, colour and pose open has pictures in all of them. Some
combinations are held out, so that it can be measured whether the model has learned to combine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from canvax.train.pictures import Pictures
from canvax.types import HostArray
from recipes.emoji.captions import captions, with_article
from recipes.emoji.enlarge import reduced

COLOURS = {
    "red": (221, 46, 68),
    "orange": (244, 144, 12),
    "yellow": (255, 204, 77),
    "green": (80, 170, 70),
    "blue": (60, 125, 220),
    "purple": (146, 80, 190),
    "pink": (244, 130, 180),
    "brown": (140, 85, 55),
}
"""sRGB of the colours that captions name."""

OTHER_COLOURS = ("black", "white", "grey", "gray", "light", "dark")
"""Further words that a recoloured thing loses."""

LEAST_SHARE = 0.45
"""Share of a drawing's pixels, without the white ground, that must have about one hue for it to be recoloured."""

_REACH, _RAMP = 32.0, 14.0
"""Degrees of hue around the main one that change with it, and degrees over which the change fades."""

_LEAST_CHROMA = 0.05
"""OKLab chroma below which a pixel counts as grey."""

TURN, SMALLEST = 25.0, 0.6
"""Degrees to either side by which a posed drawing is turned, and its least size."""

TILTED, SMALL = 10.0, 0.7
"""Degrees from which on captions may say "tilted", and the size below which they may say "small"."""

_TO_CONES = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
_TO_LAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                    [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip


@dataclass(frozen=True)
class Variation:
    """A picture made of drawings.

    Attributes:
        pixels: [H, W, 3] uint8.
        captions: what it shows, in several forms.
        kind: "mirrored", "coloured", "pair", "count" or "posed".
    """

    pixels: HostArray
    captions: Sequence[str]
    kind: str


def variations(drawings: Pictures, counts: Mapping[str, int], seed: int = 0) -> Iterator[Variation]:
    """Makes ``counts`` pictures of each kind; the same ones every time.

    Args:
        drawings: the drawings trained on; their rows have ``label`` and ``style``.
        counts: number of pictures of each kind of ``Variation``.
        seed: seed of the choices.
    """
    rng = np.random.default_rng(seed)
    main_of = cache(lambda i: main_colour(drawings.pixels[i]))
    of_style: dict[str, list[int]] = {}
    for i, row in enumerate(drawings.rows):
        of_style.setdefault(row["style"], []).append(i)
    for i in _order(rng, len(drawings), counts.get("mirrored", 0)):
        yield Variation(drawings.pixels[i][:, ::-1], drawings.captions[i], "mirrored")
    coloured = 0
    for i in _order(rng, len(drawings), 100 * counts.get("coloured", 0)):
        if coloured == counts.get("coloured", 0):
            break
        row, colour = drawings.rows[i], str(rng.choice(list(COLOURS)))
        main = main_of(i)
        if main is None or (colour != main.name and held_out_colour(row["label"], colour)):
            continue
        coloured += 1
        pixels = drawings.pixels[i] if colour == main.name else recoloured(drawings.pixels[i], main, colour)
        yield Variation(pixels, coloured_captions(row["label"], colour, row["style"]), "coloured")
    for _ in range(counts.get("pair", 0)):
        style = str(rng.choice(list(of_style)))
        a, b = (int(i) for i in rng.choice(of_style[style], 2, replace=False))
        names = drawings.rows[a]["label"].lower(), drawings.rows[b]["label"].lower()
        if not held_out_pair(*names):
            yield Variation(
                side_by_side([drawings.pixels[a], drawings.pixels[b]]), pair_captions(*names, style), "pair"
            )
    countable = [i for i, row in enumerate(drawings.rows) if plural(row["label"].lower())]
    for i in _order(rng, len(countable), counts.get("count", 0)):
        row, number = drawings.rows[countable[i]], int(rng.integers(2, 4))
        picture = side_by_side([drawings.pixels[countable[i]]] * number)
        yield Variation(picture, count_captions(number, row["label"].lower(), row["style"]), "count")
    for i in _order(rng, len(drawings), counts.get("posed", 0)):
        pixels, label, style = drawings.pixels[i], drawings.rows[i]["label"].lower(), drawings.rows[i]["style"]
        colour, main = str(rng.choice(list(COLOURS))), main_of(i) if rng.random() < 0.5 else None
        if main is not None and colour != main.name and not held_out_colour(label, colour):
            pixels, label = recoloured(pixels, main, colour), bare(label)
        degrees, scale = float(rng.uniform(-TURN, TURN)), float(rng.uniform(SMALLEST, 1))
        picture = posed(pixels, degrees, scale, rng.uniform(0.1, 0.9, 2))
        yield Variation(picture, posed_captions(label, style, abs(degrees) > TILTED, scale < SMALL), "posed")


def _order(rng: np.random.Generator, size: int, count: int) -> Iterator[int]:
    """``count`` indices below ``size``: all in a random order, then all again in another."""
    for start in range(0, count, max(size, 1)):
        yield from (int(i) for i in rng.permutation(size)[: count - start])


@dataclass(frozen=True)
class MainColour:
    """The colour that most of a drawing has.

    Attributes:
        name: the nearest of ``COLOURS``.
        lab: its mean in OKLab.
        share: share of the pixels that are not white.
    """

    name: str
    lab: HostArray
    share: float


def main_colour(pixels: HostArray) -> MainColour | None:
    """Returns the hue that most of the drawing [H, W, 3] has, or None if there is no such hue."""
    lab = to_oklab(pixels[::4, ::4])
    hue, chroma = _hue_and_chroma(lab)
    shown = np.abs(lab - to_oklab(np.full(3, 255, np.uint8))).max(-1) > 0.02
    vivid = shown & (chroma > _LEAST_CHROMA)
    if not vivid.any():
        return None
    bins, _ = np.histogram(hue[vivid], bins=36, range=(-180, 180), weights=chroma[vivid])
    peak = -175.0 + 10 * int(np.argmax(sum(np.roll(bins, shift) for shift in (-2, -1, 0, 1, 2))))
    near = vivid & (np.abs(_apart(hue, peak)) < _REACH)
    share = near.sum() / shown.sum()
    if share < LEAST_SHARE:
        return None
    mean = lab[near].mean(0)
    targets = {name: to_oklab(np.array(rgb, np.uint8)) for name, rgb in COLOURS.items()}
    return MainColour(min(targets, key=lambda name: np.square(targets[name] - mean).sum()), mean, float(share))


def recoloured(pixels: HostArray, main: MainColour, colour: str) -> HostArray:
    """The drawing with its main colour turned into another one; its other colours stay.

    Hue is turned, and chroma scaled, in OKLab (Ottosson 2020). Lightness moves with chroma, so that edges that fade
    into white still do.
    """
    lab = to_oklab(pixels)
    hue, chroma = _hue_and_chroma(lab)
    target = to_oklab(np.array(COLOURS[colour], np.uint8))
    (old_hue, old_chroma), (new_hue, new_chroma) = _hue_and_chroma(main.lab), _hue_and_chroma(target)
    weight = np.clip((_REACH + _RAMP - np.abs(_apart(hue, float(old_hue)))) / _RAMP, 0, 1)
    turn = np.deg2rad(new_hue - old_hue)
    scale = np.clip(new_chroma / old_chroma, 0.4, 2.0)
    a = scale * (np.cos(turn) * lab[..., 1] - np.sin(turn) * lab[..., 2])
    b = scale * (np.sin(turn) * lab[..., 1] + np.cos(turn) * lab[..., 2])
    lightness = lab[..., 0] + (target[0] - main.lab[0]) * np.clip(chroma / old_chroma, 0, 1)
    changed = np.stack([lightness, a, b], -1)
    return to_srgb(lab + weight[..., None] * (changed - lab))


def side_by_side(drawings: Sequence[HostArray]) -> HostArray:
    """Two or three drawings at half their size on white: left and right, the third below them."""
    size = drawings[0].shape[0]
    half = size // 2
    small = reduced(np.stack(drawings), 2)
    picture = np.full((size, size, 3), 255, np.uint8)
    for (top, left), drawing in zip(places(len(small), size), small, strict=True):
        picture[top : top + half, left : left + half] = drawing
    return picture


def places(count: int, size: int) -> list[tuple[int, int]]:
    """Top and left of each of two or three drawings in a picture of ``size`` pixels."""
    half = size // 2
    return [(half // 2, 0), (half // 2, half)] if count == 2 else [(0, 0), (0, half), (half, half // 2)]


def posed(pixels: HostArray, degrees: float, scale: float, place: HostArray) -> HostArray:
    """The drawing turned, made smaller and moved on white, with all of it in the picture.

    Args:
        pixels: [H, H, 3] uint8.
        degrees: clockwise.
        scale: of the largest size that fits and is not larger than the drawing.
        place: left and top, as shares of the room that is left.
    """
    size = len(pixels)
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    turn = np.array([[cos, -sin], [sin, cos]])
    shown = (np.argwhere((pixels < 250).any(-1))[:, ::-1] + 0.5) @ turn.T
    half = 0.5 * (abs(cos) + abs(sin))  # of a turned pixel
    low, high = shown.min(0) - half, shown.max(0) + half
    scale *= min(1.0, size / (high - low).max())
    corner = place * (size - scale * (high - low)) - scale * low
    back = turn.T / scale
    affine = np.concatenate([back, -(back @ corner)[:, None]], axis=1)
    image = Image.fromarray(pixels).transform(
        (size, size), Image.Transform.AFFINE, affine.ravel().tolist(), Image.Resampling.BICUBIC, fillcolor="white"
    )
    return np.asarray(image)


def held_out_colour(label: str, colour: str) -> bool:
    """Whether training never sees this thing in this colour, if it is not its own: a seventh of all."""
    return zlib.crc32(f"{bare(label)}/{colour}".encode()) % 7 == 0


def held_out_pair(a: str, b: str) -> bool:
    """Whether training never sees these two together: a seventh of all pairs."""
    return zlib.crc32("/".join(sorted((a, b))).encode()) % 7 == 0


def bare(label: str) -> str:
    """The name without colours: "red apple" is "apple"."""
    words = label.lower().split()
    left = [word for word in words if word not in COLOURS and word not in OTHER_COLOURS]
    return " ".join(left or words)


def coloured_captions(label: str, colour: str, style: str) -> list[str]:
    """Captions of a thing in a colour that the captions name."""
    forms = captions(f"{colour} {bare(label)}", [], style)
    return [*forms[:7], *forms[9:16]]


def pair_captions(a: str, b: str, style: str) -> list[str]:
    """Captions of ``a`` on the left and ``b`` on the right."""
    one, other = with_article(a), with_article(b)
    plain = [f"{one} and {other}", f"{a} and {b}", f"{one} with {other}", f"{one} next to {other}"]
    return _with_styles(plain, style)


def count_captions(number: int, label: str, style: str) -> list[str]:
    """Captions of several equal things."""
    things, word = plural(label), {2: "two", 3: "three"}[number]
    return _with_styles(
        [f"{word} {things}", f"{number} {things}", f"{word} {things}", f"a picture of {word} {things}"], style
    )


def posed_captions(label: str, style: str, tilted: bool, small: bool) -> list[str]:
    """Captions of a thing in a pose; most leave its style open."""
    thing = with_article(label)
    poses = [text for text, true in ((f"a tilted {label}", tilted), (f"a small {label}", small)) if true]
    in_style = [f"{text} in the style of {style}" for text in poses]
    return [thing, label, f"a picture of {thing}", f"an emoji of {thing}", *poses, *in_style]


def _with_styles(plain: Sequence[str], style: str) -> list[str]:
    endings = (" in the style of {}", ", {} style", " in {} style", " in the style of {}")
    return [*(text + end.format(style) for text, end in zip(plain, endings, strict=True)), *plain[:3]]


def plural(label: str) -> str | None:
    """ "apples" for "apple"; None where the plural is not regular, or there are more than two words."""
    words = label.split()
    last = words[-1]
    if len(words) > 2 or not last.isalpha() or last.endswith(("s", "f", "fe", "man", "fish", "sheep", "foot", "tooth")):
        return None
    if last.endswith(("x", "ch", "sh")):
        return f"{label}es"
    if last.endswith("y") and last[-2] not in "aeiou":
        return f"{label[:-1]}ies"
    return f"{label}s"


def to_oklab(srgb: HostArray) -> HostArray:
    """uint8 sRGB [..., 3] -> OKLab (Ottosson 2020)."""
    x = srgb.astype(np.float32) / 255
    linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _TO_CONES.T.astype(np.float32)) @ _TO_LAB.T.astype(np.float32)


def to_srgb(lab: HostArray) -> HostArray:
    """OKLab [..., 3] -> uint8 sRGB; colours outside are clipped."""
    linear = (lab @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_CONES).T
    x = np.clip(linear, 0, 1)
    encoded = np.where(x <= 0.0031308, 12.92 * x, 1.055 * x ** (1 / 2.4) - 0.055)
    return (255 * np.clip(encoded, 0, 1) + 0.5).astype(np.uint8)


def _hue_and_chroma(lab: HostArray) -> tuple[HostArray, HostArray]:
    """Degrees and distance from grey."""
    return np.rad2deg(np.arctan2(lab[..., 2], lab[..., 1])), np.hypot(lab[..., 1], lab[..., 2])


def _apart(hue: HostArray, other: float) -> HostArray:
    return (hue - other + 180) % 360 - 180
