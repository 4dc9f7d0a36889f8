"""Prompts of any length, split into chunks of the text encoder's length, each encoded separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from canvax.errors import InputError
from canvax.prompts.grammar import BREAK, Fragment

CHUNK = 77
"""Tokens that a text encoder reads at once: 75 of the prompt, between a begin and an end token."""

MOST_CHUNKS = 8

_BACK = 20
"""A full chunk ends after its last comma if at most this many tokens follow the comma."""

Chunk = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and weights of a chunk, including its begin, end and padding tokens, whose weight is 1."""


class Tokenizer(Protocol):
    """The tokenizer interface that ``chunked`` needs."""

    @property
    def bos(self) -> int:
        """Id that begins every prompt."""
        ...

    @property
    def eos(self) -> int:
        """Id that ends every prompt."""
        ...

    @property
    def pad(self) -> int:
        """Id that pads a chunk."""
        ...

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a text, without begin and end."""
        ...

    def units(self, text: str) -> list[tuple[int, ...]]:
        """Returns the ids of a text, grouped: the ids of a group must be in the same chunk."""
        ...


def chunked(tokenizer: Tokenizer, fragments: Sequence[Fragment], length: int = CHUNK) -> list[Chunk]:
    """Splits a prompt into chunks, at least one.

    A full chunk ends after its last comma, if that is within its final 20 tokens.

    Raises:
        InputError: the prompt has more than ``MOST_CHUNKS`` chunks.
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
        problem = f"has {len(chunks)} chunks of {room} tokens, more than {MOST_CHUNKS}"
        raise InputError("prompt", words[:60], problem, "shorten it")
    return [_framed(tokenizer, chunk, length) for chunk in chunks]


def in_one(tokenizer: Tokenizer, fragments: Sequence[Fragment], length: int, most: int) -> list[Chunk]:
    """Splits the ids of a prompt that a language model reads at once into chunks of ``length``; padding fills the last.

    Raises:
        InputError: the prompt has weights, or more than ``most`` ids.
    """
    words = "".join(text for text, _ in fragments)
    if any(weight != 1 for _, weight in fragments):
        raise InputError("prompt", words[:60], "has weights or BREAK, which a language model does not read")
    if len(ids := tokenizer.ids(words)) > most:
        raise InputError("prompt", words[:60], f"has {len(ids)} tokens, more than {most}", "shorten it")
    ids = [*ids, *[tokenizer.pad] * (-len(ids) % length)]
    return [(tuple(ids[begin : begin + length]), (1.0,) * length) for begin in range(0, len(ids), length)]


def _framed(tokenizer: Tokenizer, chunk: Sequence[tuple[int, float]], length: int) -> Chunk:
    filling = length - 2 - len(chunk)
    ids = (tokenizer.bos, *(token for token, _ in chunk), tokenizer.eos, *[tokenizer.pad] * filling)
    return ids, (1.0, *(weight for _, weight in chunk), *[1.0] * (filling + 1))


def as_arrays(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Stacks chunks to ids [n, T] int32 and weights [n, T] float32."""
    return np.array([ids for ids, _ in chunks], np.int32), np.array([weights for _, weights in chunks], np.float32)
