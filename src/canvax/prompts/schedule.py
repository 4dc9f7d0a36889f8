"""A1111's prompt schedules ([from:to:when], [a|b]) and AND: turns a prompt into plain texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_AND = re.compile(r"\bAND\b")
_PART = re.compile(r"(.*?)(?:\s*:\s*([-+]?(?:\d+\.?|\d*\.\d+)))?\s*", re.DOTALL)
_WHEN = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*")
_TOKEN = re.compile(r"\\.|[\[\]():|]|[^\\\[\]():|]+", re.DOTALL)

_DEEPEST = 100
"""Limit on nested brackets: each level is a recursive call."""

At = Callable[[int], str]
"""Maps a step, counted from 1, to its text."""


def parts_of(prompt: str) -> list[tuple[str, float]]:
    """Split a prompt at AND; return each part with the weight after its colon, by default 1."""
    parts = []
    for text in _AND.split(prompt):
        match = _PART.fullmatch(text)
        assert match is not None  # it matches every text
        parts.append((match[1], float(match[2] or 1.0)))
    return parts


def schedule_of(prompt: str, steps: int) -> list[tuple[int, str]]:
    """Return the texts of a run, each with its first step, counted from 0.

    ``[from:to:when]`` changes after ``when`` steps, or after this fraction of the run if ``when`` has a decimal point.
    ``[a|b]`` alternates every step. As in A1111, a text lasts one step longer than ``when`` says, and the first text of
    an alternation lasts two steps.
    """
    try:
        tokens = _tokens(prompt)
        reader = _Reader(tokens, steps)
        at = reader.sequence(0, top=True)[0]
    except _Literal:
        return [(0, prompt)]
    ends = sorted({*reader.ends, steps})
    texts: list[tuple[int, str]] = []
    begin = 0
    for end in ends:
        text = at(end)
        if not texts or texts[-1][1] != text:
            texts.append((begin, text))
        begin = end + 1
    return [(begin, text) for begin, text in texts if begin < steps]


class _Literal(Exception):
    """The prompt does not follow the grammar, so all of it is plain text."""


def _tokens(prompt: str) -> list[str]:
    tokens = _TOKEN.findall(prompt)
    if sum(map(len, tokens)) != len(prompt):
        raise _Literal  # it ends with a backslash
    return tokens


@dataclass
class _Reader:
    """Parses tokens to a function from steps to texts; ``ends`` collects the steps after which the text changes."""

    tokens: list[str]
    steps: int

    def __post_init__(self) -> None:
        self.ends: set[int] = set()
        self.depth = 0

    def sequence(self, position: int, *, top: bool = False) -> tuple[At, int]:
        """Parse text and groups up to an outer separator or closing bracket; also return the position of that."""
        pieces: list[At] = []
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _Literal
        while position < len(self.tokens):
            token = self.tokens[position]
            if token == "[" and (group := self.group(position + 1)) is not None:
                piece, position = group
                pieces.append(piece)
                continue
            if token == "(" and (bracket := self.bracket(position + 1)) is not None:
                piece, position = bracket
                pieces.append(piece)
                continue
            if token == "|" and top:
                raise _Literal
            if not top and token in "[]():|":  # an opening bracket that reaches this line is never closed
                break
            pieces.append(_always(token))
            position += 1
        self.depth -= 1
        return (lambda step: "".join(piece(step) for piece in pieces)), position

    def bracket(self, position: int) -> tuple[At, int] | None:
        """Parse round brackets, which stay in the text; return None if they are not closed."""
        pieces = [_always("(")]
        while True:
            piece, position = self.sequence(position)
            pieces.append(piece)
            if position >= len(self.tokens) or self.tokens[position] not in ":)":
                return None
            pieces.append(_always(self.tokens[position]))
            position += 1
            if self.tokens[position - 1] == ")":
                return (lambda step: "".join(piece(step) for piece in pieces)), position

    def group(self, position: int) -> tuple[At, int] | None:
        """Parse square brackets: a schedule, an alternation, or plain text, which keeps its brackets.

        Returns None if they are not closed.
        """
        known = set(self.ends)
        items: list[At] = []
        begins, separators = [position], ""
        while True:
            piece, position = self.sequence(position)
            items.append(piece)
            if position >= len(self.tokens) or self.tokens[position] in "[()":
                self.ends = known
                return None
            position += 1
            if self.tokens[position - 1] == "]":
                break
            separators += self.tokens[position - 1]
            begins.append(position)
        if separators and set(separators) == {"|"}:
            self.ends |= set(range(1, self.steps + 1))
            return (lambda step: items[(step - 1) % len(items)](step)), position
        when = "".join(self.tokens[begins[-1] : position - 1])
        if separators in (":", "::") and _WHEN.fullmatch(when):
            return self.scheduled(items, when), position
        if "|" in separators:
            raise _Literal
        pieces = [_always("[")]
        for item, separator in zip(items, [*separators, "]"], strict=True):
            pieces += [item, _always(separator)]
        return (lambda step: "".join(piece(step) for piece in pieces)), position

    def scheduled(self, items: list[At], when: str) -> At:
        end = min(self.steps, int(float(when) * (self.steps if "." in when else 1)))
        if end >= 1:
            self.ends.add(end)
        before, after = (items[0], items[1]) if len(items) == 3 else (_always(""), items[0])
        return lambda step: before(step) if step <= end else after(step)


def _always(text: str) -> At:
    return lambda _: text
