"""A CLIP vocabulary learnt from captions: byte-level BPE (Sennrich et al. 2016, algorithm 1)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from canvax.tokenizers.clip import BOS, EOS

_WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|(?:[^\s\w]|_)+")
_END = "</w>"


def learn_vocabulary(captions: Iterable[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges, in CLIP's order: bytes, bytes that end a word, merges, begin, end.

    The most frequent pair is merged first, of equally frequent ones the first in alphabetical order, so that the same
    captions give the same vocabulary. Fewer entries come out when no pair is left that occurs twice.

    Args:
        captions: what to learn from.
        size: entries, at least the 514 that every vocabulary has.
    """
    symbols = sorted(_byte_symbols().values())
    words = Counter(word for caption in captions for word in _WORDS.findall(caption.lower()))
    spelled = {word: _spell(word) for word in words}
    pairs: Counter[tuple[str, str]] = Counter()
    holders: dict[tuple[str, str], set[str]] = {}
    for word, parts in spelled.items():
        _count(parts, word, words[word], pairs, holders)
    merges: list[tuple[str, str]] = []
    known = set(symbols) | {symbol + _END for symbol in symbols}
    while len(known) + 2 < size and pairs:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < 2:
            break
        merges.append(best)
        known.add(best[0] + best[1])
        for word in sorted(holders[best]):
            _count(spelled[word], word, -words[word], pairs, holders)
            spelled[word] = _merged(spelled[word], best)
            _count(spelled[word], word, words[word], pairs, holders)
    entries = [*symbols, *(symbol + _END for symbol in symbols)]
    entries += dict.fromkeys(left + right for left, right in merges)
    entries += [BOS, EOS]
    return {entry: i for i, entry in enumerate(entries)}, merges


def save_vocabulary(folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], length: int) -> None:
    """Write the tokenizer's folder: ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    config = {
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": length,
        "pad_token": EOS,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": EOS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_symbols() -> dict[int, str]:
    """A printable character for each byte: its own where Latin-1 has one, else one from 256 on (as GPT-2 does)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def _spell(word: str) -> list[str]:
    table = _byte_symbols()
    parts = [table[byte] for byte in word.encode()]
    return [*parts[:-1], parts[-1] + _END]


def _count(
    parts: list[str], word: str, times: int, pairs: Counter[tuple[str, str]], holders: dict[tuple[str, str], set[str]]
) -> None:
    """Add ``times`` to every pair of neighbours of a word; forget pairs that no word has."""
    for pair in pairwise(parts):
        pairs[pair] += times
        if times > 0:
            holders.setdefault(pair, set()).add(word)
        else:
            holders[pair].discard(word)
            if pairs[pair] <= 0:
                del pairs[pair]


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out
