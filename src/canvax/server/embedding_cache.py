"""The textual inversions of a server: files of the folder of models that prompts name.

A file is read in the thread of the first request that names it, and gets rows in the tables of the text encoders. The
engine writes the vectors into these rows before it encodes a prompt with them, unless they are there. A table keeps its
shape, so nothing is compiled. If a model has too few rows, the file that was named longest ago loses its rows; images
that still wait for it get its vectors written again when their turn comes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from canvax.errors import CanvaxError, HintWarning, InputError
from canvax.families.base import Model
from canvax.parallel.rules import place
from canvax.params import Params, flatten
from canvax.pipelines.adapter_files import sha256_of
from canvax.pipelines.merging import node_at, with_arrays
from canvax.server.jobs import LOOK_SECONDS, EmbeddingCard, unusable
from canvax.tokenizers.clip import words_in
from canvax.types import HostArray
from canvax.weights.data_folder import embedding_files, embedding_name
from canvax.weights.embeddings import Embedding, read_word
from canvax.weights.entries import PICKLES
from canvax.weights.lora import TABLE, token_widths


@dataclass(frozen=True, eq=False)
class Word:
    """A textual inversion with its rows.

    Attributes:
        name: the word, in the letters of its file.
        file: its file's name, without the folder.
        sha256: of the file.
        rows: the vector of each row of the table, by text encoder; in the order of the vectors.
    """

    name: str
    file: str
    sha256: str
    rows: Mapping[str, Mapping[int, HostArray]] = field(repr=False)

    @property
    def record(self) -> dict[str, str]:
        """The entry in the metadata of an image."""
        return {"file": self.file, "sha256": self.sha256}


Words = tuple[Word, ...]
"""The textual inversions of an image."""


def reading(model: Model, words: Words) -> Model:
    """Return the model with tokenizers that read these words."""
    if not words:
        return model
    tokenizers = dict(model.tokenizers)
    for part in words[0].rows:
        added = {word.name.lower(): tuple(word.rows[part]) for word in words}
        tokenizers[part] = replace(tokenizers[part], added={**tokenizers[part].added, **added})
    return replace(model, tokenizers=tokenizers)


class _File(NamedTuple):
    """A file of the folder: when it was changed, what it holds or why that cannot be used, and its hash."""

    changed: float
    read: Embedding | None
    fault: str
    sha256: str

    @property
    def shape(self) -> tuple[int, int]:
        """Vectors and their width in the first text encoder; zeros of a file that cannot be used."""
        count, width = next(iter(self.read.vectors.values())).shape if self.read else (0, 0)
        return count, width


class EmbeddingCache:
    """The textual inversions of one model.

    ``fill`` is the engine's thread's; the rest may be called in any.
    """

    def __init__(self, model: Model, mesh: Mesh) -> None:
        self._model = model
        self._widths = token_widths(model.networks.text.specs)
        self._files: dict[str, _File] = {}
        self._words: OrderedDict[str, Word] = OrderedDict()  # the last used last
        self._lock = threading.Lock()
        self._mesh = mesh
        self._tables: dict[str, Any] = {}
        self._written: dict[str, dict[int, HostArray]] = {}  # in a table, and what it was without them
        self._kept: dict[str, HostArray] = {}
        self.refresh()

    @cached_property
    def _spare(self) -> dict[str, list[int]]:
        """The rows that no text and no word of the pipeline has, by text encoder."""
        tokenizers = {part: self._model.tokenizers[part] for part in self._widths}
        taken = {part: {i for ids in tokenizer.added.values() for i in ids} for part, tokenizer in tokenizers.items()}
        return {part: [i for i in tokenizer.spare if i not in taken[part]] for part, tokenizer in tokenizers.items()}

    def refresh(self) -> None:
        """Look into the folder again."""
        self._looked = time.monotonic()
        loaded = {word for tokenizer in self._model.tokenizers.values() for word in getattr(tokenizer, "added", ())}
        paths = {name: path for name, path in embedding_files().items() if name not in loaded}
        with self._lock:
            self._paths = paths

    def renew(self) -> None:
        """Look for new files, at most once in ``LOOK_SECONDS``."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            with suppress(InputError, OSError):  # the folder is away for a while
                self.refresh()

    def cards(self) -> list[EmbeddingCard]:
        """Return cards of all files of the folder, with the reason if one does not fit this model."""
        with self._lock:
            read = [(embedding_name(name, path), self._read(name)) for name, path in self._paths.items()]
        return [EmbeddingCard(name, file.fault, *file.shape) for name, file in read]

    def summary(self) -> str:
        """Return lines for the operator: how many files can be named, and why others cannot; "" without files."""
        cards = self.cards()
        count = sum(not card.fault for card in cards)
        lines = [f"usable embeddings: {count}", *unusable(cards, "embeddings")]
        return "\n".join(lines) if cards else ""

    def named(self, texts: Sequence[str]) -> tuple[Words, tuple[HintWarning, ...]]:
        """Return the textual inversions that texts name, and a hint for each file that is named and cannot be used.

        Raises:
            InputError: the model has too few rows for all of them.
        """
        self.renew()  # any word of a text may be the name of a new file
        with self._lock:
            names = dict.fromkeys(word for text in texts for word, *_ in words_in(text, self._paths))
            read = {name: self._read(name) for name in names}
            fit = {name: file for name, file in read.items() if file.read is not None}
            words = tuple(self._word(name, fit) for name in fit)
        faults = {name: file.fault for name, file in read.items() if name not in fit}
        return words, tuple(
            HintWarning("prompt", f"has {name!r}, which is read as text: {fault}") for name, fault in faults.items()
        )

    def _read(self, name: str) -> _File:
        """Return a file of the folder. A changed file is read again."""
        path = self._paths[name]
        changed = path.stat().st_mtime if path.is_file() else 0.0
        if name in self._files and self._files[name].changed == changed:
            return self._files[name]
        self._words.pop(name, None)
        try:
            self._files[name] = _File(changed, read_word(path, name, self._widths), "", sha256_of(path))
        except (CanvaxError, OSError) as fault:
            why = str(fault).replace(str(path), path.name)  # the folders above it are the operator's business
            if path.suffix.lower() in PICKLES:
                why = f"{path.name} is a pickle; canvax convert makes a safetensors file of it"
            self._files[name] = _File(changed, None, why, "")
        return self._files[name]

    def _word(self, name: str, named: Mapping[str, _File]) -> Word:
        """Return a word with its rows. If too few are free, words that are not ``named`` lose theirs."""
        file = named[name]
        if name not in self._words and file.read is not None:
            vectors = file.read.vectors
            while True:
                taken = {part: {i for word in self._words.values() for i in word.rows[part]} for part in vectors}
                free = {part: [i for i in self._spare[part] if i not in taken[part]] for part in vectors}
                if all(len(free[part]) >= len(array) for part, array in vectors.items()):
                    break
                idle = next((other for other in self._words if other not in named), None)
                if idle is None:
                    problem = f"names textual inversions of more vectors than the model has room for, {name!r} the last"
                    raise InputError("prompt", problem, cure="name fewer")
                del self._words[idle]
            rows = {part: dict(zip(free[part], array, strict=False)) for part, array in vectors.items()}
            self._words[name] = Word(embedding_name(name, self._paths[name]), self._paths[name].name, file.sha256, rows)
        self._words.move_to_end(name)
        return self._words[name]

    # What follows is the engine's.

    def fill(self, params: Params, words: Words) -> Params:
        """Return parameters whose tables hold the vectors of these words; the same parameters if they do already.

        Raises:
            InputError: a vector overflows the dtype of the weights.
        """
        for part in self._widths:
            table = node_at(params[part], TABLE.split("."))
            wanted = {i: vector for word in words for i, vector in word.rows[part].items()}
            if table is not self._tables.get(part):  # loaded again
                self._written[part], self._kept[part] = {}, np.asarray(table)
            written = self._written[part]
            if all(written.get(i) is vector for i, vector in wanted.items()):
                continue
            filled = self._kept[part].copy()
            for i, vector in (written | wanted).items():
                with np.errstate(over="ignore"):
                    filled[i] = vector.astype(filled.dtype)
                if not np.isfinite(filled[i].astype(np.float32)).all():
                    problem = f"names an embedding that overflows in {filled.dtype}"
                    raise InputError("prompt", problem, cure="leave it out, or load the model in float32")
            param = dict(flatten(self._model.specs[part]))[TABLE]
            self._tables[part] = place(param, filled, self._mesh, table.sharding.memory_kind)
            params = with_arrays(params, {(part, TABLE): {TABLE: self._tables[part]}})
            self._written[part] = written | wanted
        return params
