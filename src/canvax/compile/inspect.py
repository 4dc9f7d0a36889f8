"""What a compiled program does, read from its text."""

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
"""Operations by which devices talk to each other, as XLA names them."""

_OPERATION = re.compile(rf"\s(ragged-)?({'|'.join(COLLECTIVES)})(-start)?\(")


def collectives(text: str) -> dict[str, int]:
    """How often each kind of collective stands in the text of a compiled program (``compiled.as_text()``).

    One that is split into its start and its end counts once, and one in a loop counts once, however often the loop
    runs. A kind that does not occur is not in the result, so an empty one says that devices never wait for each other.
    """
    counts: dict[str, int] = {}
    for match in _OPERATION.finditer(text):
        counts[match[2]] = counts.get(match[2], 0) + 1
    return counts
