"""Prompts of any length: chunks of as many tokens as the text encoder reads, each encoded by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from canvax.errors import InputError
from canvax.prompts.grammar import BREAK, Fragment

CHUNK = 77
"""Tokens that a text encoder reads at once: 75 of the prompt, one before and one behind them."""

MOST_CHUNKS = 8

_BACK = 20
"""Tokens behind a comma that move to the next chunk together with what follows, if the chunk ends among them."""

Chunk = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and weights of one chunk, with those of the tokens that begin, end and fill it up, whose weight is 1."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def bos(self) -> int:
        """Id that begins every prompt."""
        ...

    @property
    def eos(self) -> int:
        """Id that ends it."""
        ...

    @property
    def pad(self) -> int:
        """Id that fills up the rest."""
        ...

    def ids(self, text: str) -> list[int]:
        """Ids of a text, without those that begin and end it."""
        ...

    def units(self, text: str) -> list[tuple[int, ...]]:
        """The same, those together that belong in one chunk."""
        ...


def chunked(tokenizer: Tokenizer, fragments: Sequence[Fragment], length: int = CHUNK) -> list[Chunk]:
    """The chunks of a prompt, at least one.

    A chunk that is full ends behind its last comma, if there was one within 20 tokens.

    Raises:
        InputError: there would be more than ``MOST_CHUNKS``.
    """
    room, (comma,) = length - 2, tokenizer.ids(",") or [-1]
    full: list[list[tuple[int, float]]] = []
    current: list[tuple[int, float]] = []
    for fragment in fragments:
        if fragment == BREAK:
            full.append(current)
            current = []
            continue
        for unit in tokenizer.units(fragment[0]):
            while len(current) + len(unit) > room:
                commas = [i for i, (other, _) in enumerate(current) if other == comma]
                keep = commas[-1] + 1 if commas and room - commas[-1] <= _BACK and unit != (comma,) else room
                full.append(current[:keep])
                current = current[keep:]
            current += [(token, fragment[1]) for token in unit]
    chunks = [*full, current] if current or not full else full
    if len(chunks) > MOST_CHUNKS:
        words = "".join(text for text, _ in fragments)
        raise InputError(
            f"prompt={words[:60]!r}... has {len(chunks)} chunks of {room} tokens, more than {MOST_CHUNKS}; shorten it"
        )
    return [_framed(tokenizer, chunk, length) for chunk in chunks]


def _framed(tokenizer: Tokenizer, chunk: Sequence[tuple[int, float]], length: int) -> Chunk:
    filling = length - 2 - len(chunk)
    ids = (tokenizer.bos, *(token for token, _ in chunk), tokenizer.eos, *[tokenizer.pad] * filling)
    return ids, (1.0, *(weight for _, weight in chunk), *[1.0] * (filling + 1))


def as_arrays(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n, T] int32 and weights [n, T] float32 of chunks."""
    return np.array([ids for ids, _ in chunks], np.int32), np.array([weights for _, weights in chunks], np.float32)
