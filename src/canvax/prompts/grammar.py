"""Weights in prompts, as A1111, ComfyUI and Compel write them: text in, pieces of text with their weights out.

What cannot be read as a weight is text; no prompt is refused for its brackets.
"""

from __future__ import annotations

import re

from canvax.call import PromptSyntax
from canvax.errors import InputError

Fragment = tuple[str, float]
"""A piece of text and its weight."""

BREAK: Fragment = ("BREAK", -1.0)
"""Stands between pieces where the text before fills its chunk of tokens."""

MOST_WEIGHT = 100.0

_DEEPEST = 100
"""Brackets that are open at once; more are text. Each weighs all that it holds: time goes with depth."""

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
    """The pieces of a prompt with their weights, neighbours of equal weight joined; at least one.

    Raises:
        InputError: a weight is too large, or there are weights and no words.
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
        raise InputError(f"prompt={prompt[:80]!r} has weights and no words; write (words:1.2)")
    return joined or [("", 1.0)]


def check_weight(prompt: str, weight: float) -> None:
    """Refuse a weight that leaves nothing of an image.

    Raises:
        InputError: naming it.
    """
    if abs(weight) > MOST_WEIGHT:
        raise InputError(
            f"prompt={prompt[:80]!r} has a weight of {weight:g}, more than {MOST_WEIGHT:g}; 0.5 to 1.5 is usual"
        )


def words_of(prompt: str, syntax: PromptSyntax) -> str:
    """The words of a prompt without its weights."""
    return "".join(text if (text, weight) != BREAK else " " for text, weight in fragments(prompt, syntax))


def _plain(prompt: str) -> list[Fragment]:
    return [(prompt, 1.0)]


def _a1111(prompt: str) -> list[Fragment]:
    """(more), [less], (words:1.3), escapes by backslash, BREAK. A bracket that is never closed counts to the end."""
    found: list[Fragment] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def times(factor: float, begin: int) -> None:
        found[begin:] = [(text, weight * factor) for text, weight in found[begin:]]

    for token in _A1111.findall(prompt):
        number = _number(token[1:-1]) if token[0] == ":" and token[-1] == ")" else None
        if token in opened and len(opened[token]) < _DEEPEST:
            opened[token].append(len(found))
        elif number is not None and opened["("]:
            times(number, opened["("].pop())
        elif token == ")" and opened["("]:
            times(_UP, opened["("].pop())
        elif token == "]" and opened["["]:
            times(1 / _UP, opened["["].pop())
        elif token[0] == "\\":
            found.append((token[1:] or token, 1.0))
        else:
            for i, text in enumerate(_BREAK.split(token)):
                found += [BREAK] * bool(i) + [(text, 1.0)]
    for begin in opened["("]:
        times(_UP, begin)
    for begin in opened["["]:
        times(1 / _UP, begin)
    # In brackets a BREAK has no longer its own weight, and is a word.
    return found


def _comfy(prompt: str) -> list[Fragment]:
    """(more), (words:1.3), escaped brackets. A number is the weight itself: outer brackets do not multiply it."""
    found: list[Fragment] = []
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
            found.append((token[1:] if token in ("\\(", "\\)") else token, weight))
    return found


def _compel(prompt: str) -> list[Fragment]:
    """word+, word--, (some words)++, (some words)1.3; brackets without a sign group alone; escapes by backslash."""
    found: list[Fragment] = []
    opened: list[int] = []
    for match in _COMPEL.finditer(prompt):
        if match["open"] and len(opened) < _DEEPEST:
            opened.append(len(found))
            found.append(("(", 1.0))  # which goes when it is closed
        elif match["close"] and opened:
            begin, factor = opened.pop(), _factor(match["group"] or "")
            found[begin:] = [(text, weight * factor) for text, weight in found[begin + 1 :]]
        elif match["sign"]:
            found.append((_ESCAPED.sub(r"\1", match["word"]), _factor(match["sign"])))
        else:
            found.append((_ESCAPED.sub(r"\1", match[0]), 1.0))
    return found


def _factor(sign: str) -> float:
    """What a sign of Compel multiplies with."""
    if sign[:1] in ("+", "-"):
        return (_UP if sign[0] == "+" else _DOWN) ** min(len(sign), 1000)  # which is far too much, and a number
    return float(sign or 1)


def _number(text: str) -> float | None:
    """A weight; None if it is not a number, as in "1.2.3"."""
    try:
        return float(text)
    except ValueError:
        return None
