"""Words of textual inversions that come in a LoRA's file: known in the requests that name it, and in no others.

A word has rows of its own in the tables of the text encoders, those of ids that no text has, for as long as anybody
holds it. The prompts of a request that names its adapter are read by tokenizers that know it. Tables with these rows
stand in place of the model's own, which stay as they are; they have the same shape, so nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.parallel.place import put
from canvax.params import Params
from canvax.types import Array, HostArray
from canvax.weights.embeddings import Embedding
from canvax.weights.lora import TABLE


@dataclass(frozen=True, eq=False)
class Word:
    """A word and its rows.

    Attributes:
        name: the word, as prompts write it.
        ids: by text encoder, an id for each vector.
        vectors: likewise [n, D] float32.
    """

    name: str
    ids: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, HostArray]


class Words:
    """Which words there are, and the tables with their rows.

    Tables are the engine's thread's. The rest may be called in any, ``placed`` by one at a time.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._placed: WeakSet[Word] = WeakSet()
        self._written: WeakSet[Word] = WeakSet()
        self._tables: dict[str, Array] = {}

    def placed(self, embeddings: Sequence[Embedding]) -> tuple[Word, ...]:
        """Embeddings with rows that nobody has.

        Raises:
            InputError: there are too few, or the vectors overflow the dtype of the model.
        """
        found: list[Word] = []
        largest = float(jnp.finfo(self._model.dtype).max)
        for embedding in embeddings:
            ids = {}
            for part, vectors in embedding.vectors.items():
                tokenizer = self._model.tokenizers[part]
                used = {i for word in (*self._placed, *found) for i in word.ids.get(part, ())}
                used.update(*tokenizer.added.values())
                free = [i for i in tokenizer.spare if i not in used]
                if len(free) < len(vectors):
                    raise InputError(
                        f"{embedding.name!r} has {len(vectors)} vectors, and {part} has room for {len(free)} more "
                        "beside those of adapters in use; ask again when other images are done"
                    )
                if not np.abs(vectors).max(initial=0) <= largest:  # NaN is not, either
                    raise InputError(f"{embedding.name!r}: its vectors overflow in {self._model.dtype}")
                ids[part] = tuple(free[: len(vectors)])
            found.append(Word(embedding.name, ids, embedding.vectors))
        self._placed.update(found)
        return tuple(found)

    def reader(self, words: Iterable[Word]) -> Model:
        """The model for reading a prompt that may have these words."""
        words = tuple(words)
        if not words:
            return self._model
        tokenizers = {
            part: replace(
                tokenizer,
                added=tokenizer.added | {word.name.lower(): word.ids[part] for word in words if part in word.ids},
            )
            for part, tokenizer in self._model.tokenizers.items()
        }
        return replace(self._model, tokenizers=tokenizers)

    def write(self, words: Iterable[Word], params: Params) -> None:
        """Have these words in the tables."""
        new = [word for word in words if word not in self._written]
        for part in {part for word in new for part in word.ids}:
            table = self._tables.get(part)
            table = _leaf(params[part]) if table is None else table
            rows = np.array(table)
            for word in new:
                if part in word.ids:
                    rows[list(word.ids[part])] = word.vectors[part].astype(rows.dtype)
            self._tables[part] = put(rows, table.sharding)
        self._written.update(new)

    def beside(self, params: Params) -> Params:
        """Parameters with these tables in place of the model's own."""
        own = {part: _replaced(params[part], TABLE.split("."), table) for part, table in self._tables.items()}
        return {**params, **own}

    def clear(self) -> None:
        """Free the tables; words are written anew when somebody wants them."""
        self._tables.clear()
        self._written.clear()


def _leaf(tree: Any) -> Array:
    for step in TABLE.split("."):
        tree = tree[step]
    return tree


def _replaced(tree: Params, path: Sequence[str], leaf: Array) -> Params:
    """The dicts on the way are new, the arrays are not."""
    first, *rest = path
    return {**tree, first: _replaced(tree[first], rest, leaf) if rest else leaf}
