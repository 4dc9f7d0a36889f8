"""What a compiled program says about itself."""

from __future__ import annotations

import re

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast|ragged-all-to-all)"
    r"(?:-start)?\("
)


def collectives(text: str) -> dict[str, int]:
    """How many collectives of each kind are in the text of a compiled program, or of a part of it."""
    found: dict[str, int] = {}
    for name in _COLLECTIVE.findall(text):
        found[name] = found.get(name, 0) + 1
    return found
