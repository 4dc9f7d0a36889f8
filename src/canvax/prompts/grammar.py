"""Prompt weights in the syntax of A1111, ComfyUI and Compel: splits a text into pieces with weights.

Anything that is not a valid weight is text. Brackets never cause an error.
"""

from __future__ import annotations

import re

from canvax.call import PromptSyntax
from canvax.errors import InputError

Fragment = tuple[str, float]
"""A piece of text and its weight."""

BREAK: Fragment = ("BREAK", -1.0)
"""Marks, between two pieces, that a new chunk of tokens begins."""

MOST_WEIGHT = 100.0

_DEEPEST = 100
"""Limit on nested brackets; deeper ones are text. Each bracket multiplies its pieces, so time grows with depth."""

_UP = 1.1
_DOWN = 0.9
"""Compel's minus sign."""

_A1111 = re.compile(r"\\[()\[\]\\]|\\|\(|\[|:\s*[+-]?[.\d]+\s*\)|\)|\]|[^\\()\[\]:]+|:")
_COMFY = re.compile(r"\\[()]|\(|\)|[^\\()]+|\\")
_COMFY_WEIGHT = re.compile(r"(.*):\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*", re.DOTALL)
_COMPEL = re.compile(
    r"(?P<open>\()|(?P<close>\))(?P<group>\++|-+|\d*\.?\d+)?"
    r"|(?P<word>(?:\\.|[^\s()\\+])*(?:\\.|[^\s()\\+-]))(?P<sign>\++|-+)(?=[\s),.]|$)"
    r"|(?:\\.|[^\s()\\+])+|[^\s()\\]+|\s+|\\"
)
_ESCAPED = re.compile(r"\\(.)")
_BREAK = re.compile(r"\s*\bBREAK\b\s*")


def fragments(prompt: str, syntax: PromptSyntax) -> list[Fragment]:
    """Split a prompt into pieces with weights, at least one; neighbours of equal weight are joined.

    Raises:
        InputError: a weight is too large, or the prompt has weights but no words.
    """
    reader = {"plain": _plain, "a1111": _a1111, "comfy": _comfy, "compel": _compel}[syntax]
    joined: list[Fragment] = []
    for text, weight in reader(prompt):
        check_weight(prompt, weight)
        if joined and joined[-1][1] == weight and (text, weight) != BREAK != joined[-1]:
            joined[-1] = joined[-1][0] + text, weight
        elif text:
            joined.append((text, weight))
    if not joined and prompt.strip():
        raise InputError("prompt", "has weights and no words", cure="write (words:1.2)", value=prompt[:80])
    return joined or [("", 1.0)]


def check_weight(prompt: str, weight: float) -> None:
    """Raise InputError for a weight above ``MOST_WEIGHT``, which would destroy the image."""
    if abs(weight) > MOST_WEIGHT:
        raise InputError(
            "prompt",
            f"has a weight of {weight:g}, more than {MOST_WEIGHT:g}",
            cure="0.5 to 1.5 is usual",
            value=prompt[:80],
        )


def words_of(prompt: str, syntax: PromptSyntax) -> str:
    """Return the words of a prompt without its weights."""
    return "".join(text if (text, weight) != BREAK else " " for text, weight in fragments(prompt, syntax))


def _plain(prompt: str) -> list[Fragment]:
    return [(prompt, 1.0)]


def _a1111(prompt: str) -> list[Fragment]:
    """Read (more), [less], (words:1.3), backslash escapes and BREAK. An unclosed bracket extends to the end."""
    pieces: list[Fragment] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def times(factor: float, begin: int) -> None:
        pieces[begin:] = [(text, weight * factor) for text, weight in pieces[begin:]]

    for token in _A1111.findall(prompt):
        number = _number(token[1:-1]) if token[0] == ":" and token[-1] == ")" else None
        if token in opened and len(opened[token]) < _DEEPEST:
            opened[token].append(len(pieces))
        elif number is not None and opened["("]:
            times(number, opened["("].pop())
        elif token == ")" and opened["("]:
            times(_UP, opened["("].pop())
        elif token == "]" and opened["["]:
            times(1 / _UP, opened["["].pop())
        elif token[0] == "\\":
            pieces.append((token[1:] or token, 1.0))
        else:
            for i, text in enumerate(_BREAK.split(token)):
                pieces += [BREAK] * bool(i) + [(text, 1.0)]
    for begin in opened["("]:
        times(_UP, begin)
    for begin in opened["["]:
        times(1 / _UP, begin)
    # A BREAK inside brackets no longer has its special weight, and is a word.
    return pieces


def _comfy(prompt: str) -> list[Fragment]:
    """Read (more), (words:1.3) and escaped brackets. A number is the final weight: outer brackets do not change it."""
    pieces: list[Fragment] = []
    tokens = _COMFY.findall(prompt)
    closes: dict[int, int] = {}
    opens: list[int] = []
    for i, token in enumerate(tokens):
        if token == "(":
            opens.append(i)
        elif token == ")" and opens:
            closes[opens.pop()] = i

    weight, outer = 1.0, list[float]()
    ends = set(closes.values())
    for i, token in enumerate(tokens):
        if i in closes:
            outer.append(weight)
            weight, last = weight * _UP, closes[i]
            number = _COMFY_WEIGHT.fullmatch(tokens[last - 1]) if last - 1 > i else None
            if number is not None and (value := _number(number[2])) is not None:
                tokens[last - 1], weight = number[1], value
        elif i in ends:
            weight = outer.pop()
        else:
            pieces.append((token[1:] if token in ("\\(", "\\)") else token, weight))
    return pieces


def _compel(prompt: str) -> list[Fragment]:
    """Read word+, word--, (two words)++, (two words)1.3 and backslash escapes; brackets without a sign only group."""
    pieces: list[Fragment] = []
    opened: list[int] = []
    for match in _COMPEL.finditer(prompt):
        if match["open"] and len(opened) < _DEEPEST:
            opened.append(len(pieces))
            pieces.append(("(", 1.0))  # removed when the bracket is closed
        elif match["close"] and opened:
            begin, factor = opened.pop(), _factor(match["group"] or "")
            pieces[begin:] = [(text, weight * factor) for text, weight in pieces[begin + 1 :]]
        elif match["sign"]:
            pieces.append((_ESCAPED.sub(r"\1", match["word"]), _factor(match["sign"])))
        else:
            pieces.append((_ESCAPED.sub(r"\1", match[0]), 1.0))
    return pieces


def _factor(sign: str) -> float:
    """Return the factor of a Compel sign."""
    if sign[:1] in ("+", "-"):
        return (_UP if sign[0] == "+" else _DOWN) ** min(len(sign), 1000)  # avoids overflow; far above MOST_WEIGHT
    return float(sign or 1)


def _number(text: str) -> float | None:
    """Return the weight, or None if the text is not a number, as in "1.2.3"."""
    try:
        return float(text)
    except ValueError:
        return None
