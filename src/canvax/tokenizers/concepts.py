"""The concepts that a small model was trained on, each with its emoji and words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError
from canvax.files import read_json

FILE = "concepts.json"
"""Optional file in the folder of ``model_index.json``: emoji -> [name, related word, ...]."""

STYLES = ("noto", "twemoji", "fluent", "fluent flat")
"""Styles of the drawings that these models were trained on."""

_STYLE = "an the of in on with and to for style noto twemoji fluent flat emoji icon drawing image photo big small"
_JOINT = re.compile(r"\b(?:and|with|without|on|in|at|under|over|beside|behind|near|next to)\b|[+&]")
"""Words between the things of a prompt, and behind the noun in the name of a concept."""

_WORD = re.compile(r"[^\W\d_]+")
_SELECTOR = "\N{VARIATION SELECTOR-16}"


@dataclass(frozen=True, eq=False)
class Concepts:
    """The concepts of a model; empty for most models.

    Attributes:
        words: emoji -> its name and related words.
    """

    words: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Concepts:
        """Read the concepts of a model's folder; empty without ``FILE``.

        Raises:
            CheckpointError: the file is malformed.
        """
        path = folder / FILE
        if not path.is_file():
            return cls()
        words: Any = read_json(path)
        if not all(isinstance(w, list) and w and all(isinstance(word, str) for word in w) for w in words.values()):
            raise CheckpointError(f"{path}: is not a list of words for each emoji; copy the model again.")
        return cls(words)

    @property
    def names(self) -> list[str]:
        """The name of each concept; each name can be used as a prompt."""
        return [words[0] for words in self.words.values()]

    def spelled(self, prompt: str) -> str:
        """Replace the emoji of concepts in ``prompt`` by their names."""
        if not self.words or prompt.isascii():
            return prompt
        text = self._emoji.sub(lambda match: f" {self._names[match[0].replace(_SELECTOR, '')]} ", prompt)
        return " ".join(text.split())

    def unknown(self, prompt: str) -> list[str]:
        """Return words and emoji of a prompt that the model was not trained on; empty if its concepts are unknown."""
        if not self.words:
            return []
        text = unicodedata.normalize("NFC", self.spelled(prompt).lower())
        letters = (letter if unicodedata.category(letter)[0] in "LM" and letter not in "ªº" else " " for letter in text)
        # Short English words are rarely concepts; in Chinese a single character can be a word.
        words = [word for word in "".join(letters).split() if len(word) > 2 or not word.isascii()]
        other_symbols = [character for character in text if unicodedata.category(character) == "So"]
        return [word for word in words if not self._known(word)] + other_symbols

    def things(self, prompt: str) -> list[str]:
        """Return the nouns of a prompt that combines several things, such as "a cat on a chair"; else an empty list."""
        things: dict[str, set[str]] = {}
        for part in _JOINT.split(self.spelled(prompt).lower()):
            nouns = [(noun, word) for word in _WORD.findall(part) if (noun := self._noun(word))]
            if nouns:
                noun, word = next((pair for pair in nouns[::-1] if pair[0] != "face"), nouns[-1])
                things.setdefault(noun, {noun, word})
        one = any(all(forms & words for forms in things.values()) for words in self._texts)
        return [] if len(things) < 2 or one else list(things)

    def nearest(self, word: str) -> str:
        """Return the word of the vocabulary that is spelled most like an unknown word; empty if none is near."""
        return next(iter(get_close_matches(word, self._vocabulary, 1, 0.75)), "")

    def _known(self, word: str) -> bool:
        return any(form in self._vocabulary for form in _forms(word))

    def _noun(self, word: str) -> str:
        return next((form for form in _forms(word) if form in self._nouns), "")

    @cached_property
    def _nouns(self) -> set[str]:
        """The last word in the name of each concept, before what it is with: cat of "smiling cat with heart-eyes"."""
        names = [_JOINT.split(name.lower())[0].removesuffix(" face").split() for name in self.names]
        return {name[-1] for name in names if name}

    @cached_property
    def _texts(self) -> list[set[str]]:
        return [set(_WORD.findall(" ".join(words).lower())) for words in self.words.values()]

    @cached_property
    def _vocabulary(self) -> set[str]:
        text = " ".join([_STYLE, *(" ".join(words) for words in self.words.values())])
        return set(_WORD.findall(text.lower()))

    @cached_property
    def _names(self) -> dict[str, str]:
        return {emoji.replace(_SELECTOR, ""): words[0] for emoji, words in self.words.items()}

    @cached_property
    def _emoji(self) -> re.Pattern[str]:
        longest_first = sorted(self._names, key=len, reverse=True)
        joined = (f"{_SELECTOR}?".join(map(re.escape, emoji)) for emoji in longest_first)
        return re.compile(f"(?:{'|'.join(joined)}){_SELECTOR}?")


def _forms(word: str) -> tuple[str, str, str]:
    """Return a word and its possible singulars."""
    return word, word.removesuffix("s"), word.removesuffix("es")
