"""Prompts of any length for CLIP: splits them into chunks and weights the features of each on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from canvax.errors import InputError
from canvax.prompts.grammar import BREAK, Fragment, PromptSyntax
from canvax.prompts.weigh import weighed

CHUNK = 77
"""Tokens that a text encoder reads at once: 75 of the prompt, between a begin and an end token."""

MOST_CHUNKS = 8

COUNTS = (1, 2, 4, 6, 8, 12, 24)
"""Numbers of chunks that the denoiser is compiled for. Repeating a shorter prompt does not change attention."""

_BACK = 20
"""A full chunk ends after its last comma if at most this many tokens follow the comma."""

Chunk = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and weights of a chunk, including its begin, end and padding tokens, whose weight is 1."""

_ALMOST_NOTHING = 1e-4
"""Replaces weights of 0 or less, where the tangent would be infinite (Compel)."""


class Variant(NamedTuple):
    """A text in chunks, and its share of the features."""

    chunks: tuple[Chunk, ...]
    share: float


class ChunkedWords(NamedTuple):
    """A prompt in chunks.

    Attributes:
        length: number of tokens of its chunks.
        variants: variants of the text with the same number of chunks.
        blank: chunk without words.
        syntax: prompt syntax, which determines how weights are applied.
        skip: number of last layers to skip (``clip_skip``).
    """

    length: int
    variants: tuple[Variant, ...]
    blank: Chunk
    syntax: PromptSyntax = "plain"
    skip: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks of each variant."""
        return len(self.variants[0].chunks)

    @property
    def is_plain(self) -> bool:
        """True for a single chunk without weights."""
        return len(self.variants) == self.chunks == 1 and set(self.variants[0].chunks[0][1]) == {1.0}


class Tokenizer(Protocol):
    """Tokenizer interface of ``chunked``."""

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
        """Return the ids of a text, without begin and end."""
        ...

    def units(self, text: str) -> list[tuple[int, ...]]:
        """Return the ids of a text, grouped: the ids of a group must be in the same chunk."""
        ...


def chunked(tokenizer: Tokenizer, fragments: Sequence[Fragment], length: int = CHUNK) -> list[Chunk]:
    """Split a prompt into chunks, at least one.

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
        raise InputError("prompt", problem, cure="shorten it", value=words[:60])
    return [_framed(tokenizer, chunk, length) for chunk in chunks]


def chunk_count(counts: Iterable[int]) -> int:
    """Return the number of chunks that prompts are repeated up to: one of ``COUNTS`` if possible."""
    together = math.lcm(*(counts := set(counts)))
    if together > COUNTS[-1]:
        together = max(counts)
    return next((count for count in COUNTS if count % together == 0), together)


def read_chunks(
    tokenizer: Tokenizer, pieces: Sequence[Fragment], syntax: PromptSyntax, length: int, skip: int
) -> ChunkedWords:
    """Read a prompt in chunks of ``length`` tokens.

    Raises:
        InputError: the prompt has more than ``MOST_CHUNKS`` chunks.
    """
    variants = [(chunked(tokenizer, some, length), share) for some, share in _variants(pieces, syntax)]
    (blank,) = chunked(tokenizer, [("", 1.0)], length)
    words = ChunkedWords(0, tuple(Variant(tuple(chunks), share) for chunks, share in variants), blank, syntax, skip)
    return extended(words, length * max(len(chunks) for chunks, _ in variants))


def _variants(pieces: Sequence[Fragment], syntax: PromptSyntax) -> list[tuple[Sequence[Fragment], float]]:
    """Return the text, and for Compel also the text without each piece of weight below 1.

    The share of a variant grows as the weight of its missing piece falls.
    """
    variants: list[tuple[Sequence[Fragment], float]] = [(pieces, 1.0)]
    if syntax == "compel":
        for i, (_, weight) in enumerate(pieces):
            if weight < 1:
                share = math.tan((1 - max(weight, _ALMOST_NOTHING)) * math.pi / 2)
                variants.append(([*pieces[:i], *pieces[i + 1 :]] or [("", 1.0)], share))
    total = sum(share for _, share in variants)
    return [(some, share / total) for some, share in variants]


def extended(words: ChunkedWords, length: int) -> ChunkedWords:
    """Return ``words`` at a length, each variant filled up with chunks without words."""
    count = length // len(words.blank[0])
    variants = [(*variant.chunks, *[words.blank] * (count - len(variant.chunks))) for variant in words.variants]
    shares = [variant.share for variant in words.variants]
    return words._replace(length=length, variants=tuple(map(Variant, variants, shares)))


class Mixture:
    """Computes the features of prompts from those of their chunks: weighted, concatenated and added up.

    Attributes:
        passes: chunk of each prompt, for each pass of the encoder.
    """

    def __init__(self, words: Sequence[ChunkedWords], count: int) -> None:
        """Plan the passes for prompts that are repeated up to ``count`` chunks."""
        self._words, self._count = words, count
        counts = max(len(prompt.variants) for prompt in words), max(prompt.chunks for prompt in words)
        self._chosen = [
            [[_nth(_nth(prompt.variants, v).chunks, c) for prompt in words] for c in range(counts[1])]
            for v in range(counts[0])
        ]
        self.passes: list[list[Chunk]] = []
        self._number: dict[tuple[tuple[int, ...], ...], int] = {}
        for chosen in (chosen for of_variant in self._chosen for chosen in of_variant):
            self._pass(chosen)
        variants = chain.from_iterable(prompt.variants for prompt in words)
        heavy = any(set(weights) != {1.0} for variant in variants for _, weights in variant.chunks)
        if heavy or any(count % prompt.chunks for prompt in words):
            self._pass(self._blank)

    def __call__(self, passes: Sequence[Any], rows: Sequence[int]) -> Any:
        """Return the features [n, count * T, D] float32 of the prompts at ``rows``, from those in each pass."""
        xp = passes[0].__array_namespace__()
        features = [xp.asarray(array, xp.float32) for array in passes]
        text: Any = 0.0
        for v, of_variant in enumerate(self._chosen):
            chunks = [self._weighed(features, chosen, rows) for chosen in of_variant]
            whole = xp.stack([self._lengthened(features, chunks, at, row) for at, row in enumerate(rows)])
            if len(self._chosen) > 1:
                variants = [self._words[row].variants for row in rows]
                shares = [some[v].share if v < len(some) else 0.0 for some in variants]
                whole = whole * xp.asarray(shares, xp.float32)[:, None, None]
            text = whole if v == 0 else text + whole
        return text

    @property
    def _blank(self) -> list[Chunk]:
        return [prompt.blank for prompt in self._words]

    def _pass(self, chosen: Sequence[Chunk]) -> int:
        """Return the pass that encodes these chunks, a new one if necessary."""
        ids = tuple(ids for ids, _ in chosen)
        if ids not in self._number:
            self._number[ids] = len(self.passes)
            self.passes.append(list(chosen))
        return self._number[ids]

    def _weighed(self, features: list[Any], chosen: Sequence[Chunk], rows: Sequence[int]) -> Any:
        """Return the features of one chunk of each prompt, multiplied by weights; bit-identical without weights."""
        plain, xp = features[self._pass(chosen)], features[0].__array_namespace__()
        weights = np.array([chosen[row][1] for row in rows], np.float32)
        if (weights == 1).all():
            return plain
        heavy = weighed(plain, weights, features[self._pass(self._blank)], self._words[0].syntax)
        return xp.where((weights == 1).all(axis=1)[:, None, None], plain, heavy)

    def _lengthened(self, features: list[Any], chunks: list[Any], at: int, row: int) -> Any:
        """Return the features of a prompt's chunks, repeated or followed by chunks without words."""
        xp, count = chunks[0].__array_namespace__(), self._words[row].chunks
        parts = [chunk[at] for chunk in chunks[:count]]
        if self._count % count == 0:
            return xp.concatenate(parts * (self._count // count))
        return xp.concatenate([*parts, *[features[self._pass(self._blank)][at]] * (self._count - count)])


def _nth(values: Sequence[Any], index: int) -> Any:
    return values[min(index, len(values) - 1)]


def _framed(tokenizer: Tokenizer, chunk: Sequence[tuple[int, float]], length: int) -> Chunk:
    filling = length - 2 - len(chunk)
    ids = (tokenizer.bos, *(token for token, _ in chunk), tokenizer.eos, *[tokenizer.pad] * filling)
    return ids, (1.0, *(weight for _, weight in chunk), *[1.0] * (filling + 1))
