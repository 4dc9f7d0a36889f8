"""CLIP's tokenizer (Radford et al. 2021): lower-cased byte-level BPE, read from a model's files."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from canvax.errors import CheckpointError, InputError, refuse_others, warn
from canvax.files import DAMAGED, MAX_JSON, read_bytes

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

BOS, EOS = "<|startoftext|>", "<|endoftext|>"

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULTS = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

# Words that BPE splits: special tokens, English contractions, runs of letters, single digits, runs of other characters.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


_SEEN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES = {byte: chr(byte) for byte in _SEEN}
_BYTES |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _BYTES)}
"""The character of each byte in the BPE (Radford et al. 2019): itself if printable, otherwise one from 256 on."""


class TruncationWarning(UserWarning):
    """A prompt was longer than the text encoder can read, and was cut."""


@dataclass(frozen=True, eq=False)
class ClipTokenizer:
    """Converts prompts to ids.

    Attributes:
        backend: the BPE, without padding and truncation.
        bos: id that begins every prompt.
        eos: id that ends every prompt.
        pad: id of the padding: ``eos`` in Stable Diffusion 1.x, 0 in 2.x.
        largest: the largest id of the vocabulary.
        added: words with special ids, e.g. of textual inversions; they are matched before the BPE.
        folder: folder of its files.
    """

    CLASS = "CLIPTokenizer"

    backend: Tokenizer
    bos: int
    eos: int
    pad: int
    largest: int
    added: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    folder: Path | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read a tokenizer in either form; the ids are those of ``transformers`` 5 for the same folder.

        Vocabulary and merges come from ``tokenizer.json`` if it exists, otherwise from ``vocab.json`` and
        ``merges.txt``. The names of the special tokens come from ``tokenizer_config.json``, and
        ``special_tokens_map.json`` overrides them unless the former has an ``added_tokens_decoder`` (newer
        repositories). Stable Diffusion 2.x needs this: its two files name different tokens for padding.

        Raises:
            CheckpointError: files are missing or damaged; names the file.
        """
        folder = Path(folder)
        vocab, merges, stored = _read_bpe(folder)
        if not merges:
            raise CheckpointError(f"{folder}: its tokenizer has no merges, so that every letter is a word. {DAMAGED}")
        try:
            # On a merge outside the vocabulary the library panics, which is not a Python Exception.
            if unknown := next((m for m in merges if not {m[0], m[1], m[0] + m[1]} <= vocab.keys()), None):
                raise ValueError(f"the vocabulary lacks a part of the merge {' '.join(unknown)!r}")
            config = _read_json(folder / "tokenizer_config.json")
            added, named = _special_tokens(folder, config, stored)
            content = {name: token.content for name, token in named.items()}
            backend = _build(vocab, merges, content["unk_token"])
            known = vocab.keys() | {token.content for token in added.values()}
            lacking = [content[name] for name in ("bos_token", "eos_token") if content[name] not in known]
            # For unknown letters the BPE looks up unk_token in its vocabulary only, not among the added tokens.
            lacking += [content["unk_token"]] if content["unk_token"] not in vocab else []
            if lacking:
                raise ValueError(f"the vocabulary lacks {' and '.join(map(repr, dict.fromkeys(lacking)))}")
            kind = config.get("tokenizer_class")
            if kind is not None and kind not in ("CLIPTokenizer", "CLIPTokenizerFast"):
                raise CheckpointError(f"{folder}: its tokenizer_class is {kind!r:.80}; canvax reads CLIPTokenizer")
            if "left" in (config.get("padding_side"), config.get("truncation_side")):
                raise CheckpointError(f"{folder}: pads or cuts prompts on the left; a CLIP tokenizer does on the right")
            _add_tokens(backend, list(added.values()), named, config)
            _check_ids(added, backend)
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{folder}: the tokenizer cannot be read: {error}. Download it again.") from error
        vocab = backend.get_vocab()
        special = (vocab[content[name]] for name in ("bos_token", "eos_token", "pad_token"))
        return cls(backend, *special, largest=max(vocab.values()), folder=folder)

    def __call__(self, prompts: Sequence[str], *, length: int = 77, **others: Any) -> np.ndarray:
        """Return the ids of each prompt, int32 [B, length]: begin, text, end, padding.

        A prompt that is too long is cut, with a ``TruncationWarning`` that shows the text cut off.

        Raises:
            InputError: a prompt is not a string, or not valid Unicode; or there are ``others``.
        """
        refuse_others(others, "write pipe.tokenizer([text]): it pads, cuts and returns the ids")
        if isinstance(prompts, str):
            raise InputError("prompts", "is one string", cure="pass a list of strings", value=prompts)
        out = np.full((len(prompts), length), self.pad, np.int32)
        for row, prompt in zip(out, prompts, strict=True):
            ids, cut = self._encode(prompt, length - 2)
            if cut:
                warn(f"the text encoder reads {length - 2} tokens of a prompt; cut off: {cut!r}", TruncationWarning)
            row[: len(ids) + 2] = [self.bos, *ids, self.eos]
        return out

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text of any length, without begin and end.

        Raises:
            InputError: ``text`` is not a string, or not valid Unicode.
        """
        return self._encode(text, sys.maxsize)[0]

    def units(self, text: str) -> list[tuple[int, ...]]:
        """Return ``ids`` in groups that must not be separated: the ids of an added word, otherwise single ids."""
        return [ids for ids, _ in self._units(text)]

    @cached_property
    def spare(self) -> tuple[int, ...]:
        """Ids that do not occur in any text, so that their rows of an embedding table are free.

        They are bytes that UTF-8 never contains, white space and upper-case letters, which the BPE never gets. Control
        characters follow, since these are too few.
        """
        vocabulary = self.backend.get_vocab()
        never = [*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ \t\n\v\f\r", 0xC0, 0xC1, *range(0xF5, 0x100)]
        never += [byte for byte in (*range(0x20), 0x7F) if byte not in never]
        words = [_BYTES[byte] + end for byte in never for end in ("", "</w>")]
        taken = {self.bos, self.eos, self.pad}
        return tuple(vocabulary[word] for word in words if word in vocabulary and vocabulary[word] not in taken)

    def _encode(self, prompt: str, room: int) -> tuple[list[int], str]:
        ids: list[int] = []
        for unit, begin in self._units(prompt):
            if len(ids) + len(unit) > room:
                return ids, prompt[begin:]
            ids += unit
        return ids, ""

    def _units(self, prompt: str) -> list[tuple[tuple[int, ...], int]]:
        """Return groups of ids that belong together, each with its position in the prompt."""
        if not isinstance(prompt, str):
            raise InputError("prompt", "is not a string", value=prompt)
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                "prompt", f"has a lone surrogate at {error.start}: {prompt!r}", cure="pass valid Unicode"
            ) from error
        units: list[tuple[tuple[int, ...], int]] = []
        begin = 0
        for word, start, end in words_in(prompt, self.added):
            units += self._plain(prompt, begin, start)
            units.append((self.added[word], start))
            begin = end
        return units + self._plain(prompt, begin, len(prompt))

    def _plain(self, prompt: str, begin: int, end: int) -> list[tuple[tuple[int, ...], int]]:
        if begin >= end:
            return []
        encoding = self.backend.encode(prompt[begin:end], add_special_tokens=False)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [((token,), begin + offset[0]) for token, offset in places]


def words_in(prompt: str, words: Collection[str]) -> list[tuple[str, int, int]]:
    """Find added words in a prompt: ``wool``, ``<wool>``, ``embedding:wool`` and ``embedding:wool.safetensors``.

    Args:
        prompt: the text. Case does not matter in it; of overlapping words the longest is found.
        words: in lower case.

    Returns:
        Each word, with its begin and its end in the prompt, in their order.
    """
    if not words:
        return []
    any_word = "|".join(map(_whole, sorted(words, key=len, reverse=True)))
    pattern = rf"\bembedding:({any_word})(?:\.(?:safetensors|pt|bin)\b)?|<({any_word})>|({any_word})"
    matches = [(match[match.lastindex or 0].lower(), *match.span()) for match in re.finditer(pattern, prompt, re.I)]
    return [match for match in matches if match[0] in words]


def _whole(word: str) -> str:
    """Return a pattern that matches ``word`` only as a whole word."""
    before, after = (r"\w" if re.match(r"\w", end) else "" for end in (word[0], word[-1]))
    return f"{f'(?<!{before})' if before else ''}{re.escape(word)}{f'(?!{after})' if after else ''}"


def _read_bpe(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]], list[Mapping[str, Any]]]:
    """Read vocabulary, merges, and the added tokens in ``tokenizer.json``."""
    if os.path.lexists(folder / "tokenizer.json"):
        path = folder / "tokenizer.json"
        try:
            whole = _read_json(path)
            model = whole["model"]
            merges = [_pair(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
            return _checked(model["vocab"]), merges, whole.get("added_tokens", [])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: is not a BPE tokenizer ({error!r}). Download it again.") from error
    missing = [name for name in ("vocab.json", "merges.txt") if not os.path.lexists(folder / name)]
    if missing:
        raise CheckpointError(
            f"{folder}: {' and '.join(missing)} not found; a tokenizer is tokenizer.json, or vocab.json and merges.txt"
        )
    path = folder / "vocab.json"
    try:
        vocab = _checked(_read_json(path))
        path = folder / "merges.txt"
        lines = read_bytes(path, MAX_JSON).decode().splitlines()
        return vocab, [_pair(line.split(" ")) for line in lines if line and not line.startswith("#version")], []
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is not part of a BPE tokenizer ({error}). Download it again.") from error


def _checked(vocab: Any) -> dict[str, int]:
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and 0 <= i < 2**31 for i in vocab.values()):
        raise ValueError("its vocabulary is not a table of tokens and ids")
    if len(set(vocab.values())) < len(vocab):
        first: dict[int, str] = {}
        token, i = next((token, i) for token, i in vocab.items() if first.setdefault(i, token) != token)
        raise ValueError(f"the tokens {first[i]!r} and {token!r} have the same id {i}")
    return vocab


def _pair(parts: Sequence[str]) -> tuple[str, str]:
    if len(parts) != 2:
        raise ValueError(f"a merge of {len(parts)} parts instead of 2: {' '.join(map(str, parts))[:60]!r}")
    return parts[0], parts[1]


def _build(vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    backend = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token=unknown, continuing_subword_prefix="", end_of_word_suffix="</w>"
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


def _special_tokens(
    folder: Path, config: dict[str, Any], stored: list[Mapping[str, Any]]
) -> tuple[dict[int, AddedToken], dict[str, AddedToken]]:
    """Return the added tokens by id, sorted, and the special tokens by name.

    Updates ``config`` with the entries that ``special_tokens_map.json`` overrides.
    """
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        if not isinstance(decoder, Mapping):
            raise ValueError(f"added_tokens_decoder={decoder!r:.80} is not a table of ids and tokens")
        added = {_id(i): _token(token) for i, token in decoder.items()}
    else:
        config |= _read_json(folder / "special_tokens_map.json")
        special = {_token(config[name]).content for name in _NAMED if config.get(name)}
        special |= {_token(token).content for token in _extra_tokens(config)}
        for text, i in _read_json(folder / "added_tokens.json").items():
            added[_id(i)] = _token({"content": text, "special": text in special, "normalized": text not in special})
        added |= {_id(token["id"]): _token(token) for token in stored}
    by_content = {token.content: token for token in added.values()}
    values = {name: config.get(name) or _DEFAULTS.get(name) for name in _NAMED}
    named = {name: _token(value) for name, value in values.items() if value}
    return dict(sorted(added.items())), {name: by_content.get(t.content, t) for name, t in named.items()}


def _check_ids(added: Mapping[int, AddedToken], backend: Tokenizer) -> None:
    """Refuse added tokens whose ids differ from the library's, which numbers them from the end of the vocabulary.

    Without this check a token with another id would silently use the wrong row of the embeddings.
    """
    for i, token in added.items():
        if (actual := backend.token_to_id(token.content)) != i:
            raise ValueError(f"the added token {token.content!r:.80} has the id {i}, where its vocabulary has {actual}")


def _add_tokens(
    backend: Tokenizer, added: list[AddedToken], named: Mapping[str, AddedToken], config: Mapping[str, Any]
) -> None:
    """Add the strings to the backend that are single tokens anywhere in a prompt.

    A string can occur several times with different flags ("<|endoftext|>" both ends and pads a prompt). The library
    uses the last, so the order must be that of transformers.
    """
    tokens = list(added)
    seen = {token.content for token in added}
    for token in [*named.values(), *(_token(extra) for extra in _extra_tokens(config))]:
        if token.content not in seen and token not in tokens:
            tokens.append(token)
    special = {token.content for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in special
    backend.add_tokens(tokens)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))


def _extra_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name, under the current key or its older name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return list(extra.values() if isinstance(extra, Mapping) else extra)


def _id(value: Any) -> int:
    """Parse the id of an added token; JSON keys are strings."""
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 10:
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{value!r:.80} is not the id of an added token, a whole number of at least 0")
    return value


def _token(value: Any) -> AddedToken:
    """Parse a token, stored as a string or as a table with ``content`` and flags."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise ValueError(f"the token {value!r:.80} is neither a text nor a table with its content")
    return AddedToken(value["content"], **{flag: bool(value[flag]) for flag in _FLAGS if flag in value})


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist."""
    if not os.path.lexists(path):
        return {}
    try:
        value = json.loads(read_bytes(path, MAX_JSON).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object. Download it again.")
    return value
