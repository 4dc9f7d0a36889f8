"""Captions of a drawing, in the forms people write, from its label, its tags and its style."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

STYLES = ("noto", "twemoji", "fluent", "fluent flat")
"""The drawing styles, as captions and prompts name them."""

FORMS = 20
"""Captions of each drawing. Training draws one of the first ``Recipe.forms``; the vocabulary is learnt from all."""

PLAIN = slice(10, 12)
"""Which of them are the label alone."""

WRAPPINGS = (
    "a picture of {one}", "a drawing of {one}", "a photo of {one}", "a painting of {one}", "an icon of {one}",
    "an illustration of {one}", "a slice of {name}", "a piece of {name}", "a bit of {name}", "a pair of {name}",
    "a good {name}", "a big {name}", "a cute {name}", "a happy {name}", "a nice {name}", "an old {name}",
    "a simple {name}", "a beautiful {name}", "one {name}", "the {name}", "my {name}", "this is {one}",
    "please draw {one}", "{one} on a table", "{one} on a white background", "{one} in the morning",
    "{one}, high quality", "{one} for my friend",
)  # fmt: skip
"""What people write around the name of a thing, and no drawing shows. No colours: those a drawing does show."""


def captions(label: str, tags: Sequence[str], style: str) -> list[str]:
    """The ``FORMS`` captions of a drawing.

    Ten name the style, two the label alone; in four it is among other words, so that words which no drawing shows
    do no harm; two more add a tag, and two know only tags, so that a general word ("fruit") is not unknown.

    Args:
        label: the concept, such as "red apple".
        tags: words about it, such as "fruit".
        style: one of :data:`STYLES`.
    """
    name = label.lower()
    one = with_article(name)
    tags = [tag.lower() for tag in tags if tag.lower() not in name] or [name]
    first, second, third = (tags[i % len(tags)] for i in range(3))
    choice = zlib.crc32(f"{name}/{style}".encode())
    wrapped = [WRAPPINGS[(choice + 7 * i) % len(WRAPPINGS)].format(one=one, name=name) for i in range(4)]
    return [
        plain_caption(label, style),
        f"{one} in {style} style",
        f"{one}, {style} style",
        f"{name} in the style of {style}",
        f"{name}, {style} style",
        f"{name} {style}",
        f"{style} {name}",
        f"{first}: {name} in the style of {style}",
        f"{name}, {second}, {third}, {style} style",
        f"an emoji of {one} in the style of {style}",
        one,
        name,
        f"{wrapped[0]} in the style of {style}",
        f"{wrapped[1]}, {style} style",
        f"{wrapped[2]} in {style} style",
        wrapped[3],
        f"{first}: {name}",
        f"{name}, {second}",
        f"{first} in the style of {style}",
        f"{second}, {third}, {style} style",
    ]


def plain_caption(label: str, style: str) -> str:
    """The caption that a model is tested with: "a red apple in the style of noto"."""
    return f"{with_article(label.lower())} in the style of {style}"


def with_article(name: str) -> str:
    """ "an apple", "a cat"; plurals and names that come with a number stay as they are."""
    last = name.rsplit(" ", 1)[-1]
    plural = last.endswith("s") and not last.endswith(("ss", "us", "is"))
    if plural or name[0].isdigit():
        return name
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
