"""Byte-level BPE of a language model, read from its ``tokenizer.json``, with a chat template around the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from canvax.errors import CheckpointError, InputError, refuse_others
from canvax.files import MAX_JSON, read_bytes
from canvax.types import HostArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """Converts prompts to ids.

    Attributes:
        backend: the BPE, without padding and truncation.
        template: chat template, with {} for the prompt.
        largest: the largest id.
        pad: id of the padding after a prompt.
        empty: text that replaces an empty prompt.
        added: words of textual inversions; always empty.
        folder: folder of its file.
    """

    CLASS = "PreTrainedTokenizerFast"

    backend: Tokenizer
    template: str
    largest: int
    pad: int = 0
    empty: str = ""
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def from_folder(cls, folder: str | Path, template: str) -> Self:
        """Read a tokenizer.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        from tokenizers import Tokenizer  # slow to import

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: the file is missing. Download the checkpoint again.")
        try:
            backend = Tokenizer.from_buffer(read_bytes(path, MAX_JSON))
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{path}: the tokenizer cannot be read: {error}. Download it again.") from error
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, template, max(backend.get_vocab().values(), default=0), folder=Path(folder))

    def ids(self, text: str) -> list[int]:
        """Return the ids of a prompt inside the template.

        Raises:
            InputError: ``text`` is not valid Unicode.
        """
        try:
            return self.backend.encode(self.template.format(text or self.empty), add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise InputError("prompt", f"is not valid Unicode: {text!r}", cure="pass valid Unicode") from None

    def __call__(self, texts: Sequence[str], *, length: int, **others: Any) -> HostArray:
        """Return the ids of prompts, padded to ``length``: int32 [B, T].

        Raises:
            InputError: a prompt has more tokens; or there are ``others``.
        """
        refuse_others(others, "write pipe.tokenizer([text], length=512): it pads and returns the ids")
        rows = [self.ids(text) for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if len(row) > length:
                raise InputError(
                    "prompt", f"has {len(row)} tokens, more than {length}", cure="shorten it", value=text[:60]
                )
        return np.array([row + [self.pad] * (length - len(row)) for row in rows], np.int32)
