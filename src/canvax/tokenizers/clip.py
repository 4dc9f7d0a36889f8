"""CLIP's tokenizer (Radford et al. 2021): lower-cased byte-level BPE, from a repository's own files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from canvax.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS = "<|startoftext|>", "<|endoftext|>"

# The words BPE works on: the special tokens, English contractions, runs of letters, single digits, runs of the rest.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class TruncationWarning(UserWarning):
    """A prompt was longer than the text encoder reads."""


@dataclass(frozen=True, eq=False)
class ClipTokenizer:
    """Prompts to ids.

    Attributes:
        backend: the BPE, without padding and truncation.
        bos: id that begins every prompt.
        eos: id that ends it.
        pad: id that fills up the rest: ``eos`` in Stable Diffusion 1.x, 0 in 2.x.
    """

    backend: Tokenizer
    bos: int
    eos: int
    pad: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read ``tokenizer.json``, or ``vocab.json`` with ``merges.txt``, and what ``tokenizer_config.json`` adds.

        Raises:
            CheckpointError: files are missing or damaged.
        """
        folder = Path(folder)
        try:
            vocab, merges, stored = _read_bpe(folder)
            backend = _build(vocab, merges)
            config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
            _add_tokens(backend, [*stored, *_added(folder, config)], config)
            ids = {name: backend.token_to_id(_content(config.get(name), EOS)) for name in ("eos_token", "pad_token")}
            bos, eos = backend.token_to_id(_content(config.get("bos_token"), BOS)), ids["eos_token"]
            if bos is None or eos is None:
                raise ValueError(f"its vocabulary lacks {BOS if bos is None else EOS}")
            return cls(backend, bos, eos, eos if ids["pad_token"] is None else ids["pad_token"])
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{folder}: the tokenizer cannot be read: {error}. Download it again.") from error

    def __call__(self, prompts: Sequence[str], *, length: int = 77) -> np.ndarray:
        """Ids of each prompt, int32 [B, length]: begin, text, end, padding.

        A prompt that is too long is cut, with a :class:`TruncationWarning` that names what was cut.

        Raises:
            InputError: a prompt is not a string, or not valid Unicode.
        """
        out = np.full((len(prompts), length), self.pad, np.int32)
        for row, prompt in zip(out, prompts, strict=True):
            ids, cut = self._encode(prompt, length - 2)
            if cut:
                warnings.warn(
                    f"the text encoder reads {length - 2} tokens of a prompt; cut off: {cut!r}",
                    TruncationWarning,
                    stacklevel=2,
                )
            row[: len(ids) + 2] = [self.bos, *ids, self.eos]
        return out

    def overflow(self, prompt: str, *, length: int = 77) -> str:
        """The end of ``prompt`` that does not fit, "" when all of it does."""
        return self._encode(prompt, length - 2)[1]

    def _encode(self, prompt: str, room: int) -> tuple[list[int], str]:
        if not isinstance(prompt, str):
            raise InputError(f"prompt={prompt!r} is not a string")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"prompt has a lone surrogate at {error.start}: {prompt!r}; pass valid Unicode") from error
        encoding = self.backend.encode(prompt, add_special_tokens=False)
        if len(encoding.ids) <= room:
            return encoding.ids, ""
        return encoding.ids[:room], prompt[encoding.offsets[room][0] :]


def _read_bpe(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]], list[Mapping[str, Any]]]:
    """Vocabulary, merges, and the added tokens that ``tokenizer.json`` lists."""
    if (folder / "tokenizer.json").is_file():
        whole = _read_json(folder / "tokenizer.json")
        model = whole["model"]
        merges = [_pair(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        return model["vocab"], merges, whole.get("added_tokens", [])
    missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {' and '.join(missing)} not found; a tokenizer is tokenizer.json, or vocab.json and merges.txt"
        )
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    pairs = [_pair(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    return _read_json(folder / "vocab.json"), pairs, []


def _pair(parts: Sequence[str]) -> tuple[str, str]:
    first, second = parts
    return first, second


def _build(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=EOS, continuing_subword_prefix="", end_of_word_suffix="</w>")
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


def _added(folder: Path, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Tokens added to the vocabulary (such as learned ones), in the order of their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    yield from (decoder[key] for key in sorted(decoder, key=int))
    extra = _read_json(folder / "added_tokens.json")
    yield from ({"content": token} for token in sorted(extra, key=extra.__getitem__))


def _add_tokens(backend: Tokenizer, stored: list[Mapping[str, Any]], config: Mapping[str, Any]) -> None:
    """Tell the backend which strings are tokens of their own wherever they stand in a prompt."""
    from tokenizers import AddedToken

    seen = set()
    for token in stored:
        seen.add(token["content"])
        flags = {key: bool(token.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
        added = AddedToken(token["content"], special=bool(token.get("special", False)), **flags)
        (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    special = [_content(config.get(name), default) for name, default in names.items()]
    backend.add_special_tokens([token for token in dict.fromkeys(special) if token not in seen])


def _content(token: Any, default: str) -> str:
    """A token is stored as a string or as ``{"content": ...}``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token or default


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value
