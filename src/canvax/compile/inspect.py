"""Read from its text what a compiled program does."""

from __future__ import annotations

import re

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Communication between devices, as XLA names it."""

_OPERATION = re.compile(rf"\s(ragged-)?({'|'.join(COLLECTIVES)})(-start)?\(")


def collectives(text: str) -> dict[str, int]:
    """Count each kind of collective in the text of a compiled program (``compiled.as_text()``).

    A collective that is split into start and end counts once, and one in a loop counts once, however often the loop
    runs. Kinds that do not occur are not in the result: if it is empty, devices never wait for each other.
    """
    counts: dict[str, int] = {}
    for match in _OPERATION.finditer(text):
        counts[match[2]] = counts.get(match[2], 0) + 1
    return counts
