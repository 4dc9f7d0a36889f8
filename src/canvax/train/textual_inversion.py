"""Textual inversion (Gal et al. 2022): the model stays as it is, and a new word learns what pictures show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.checked import checked
from canvax.errors import InputError, check_count
from canvax.families.base import Model
from canvax.params import Params
from canvax.train.state import in_dtype
from canvax.train.task import PLAN, Start, Subject, Training, train
from canvax.types import Array, DType, HostArray
from canvax.weights.embeddings import MOST_VECTORS, check_token
from canvax.weights.safetensors import Outgoing, write_safetensors

EMBEDDING_PLAN = replace(PLAN, steps=5000, learning_rate=5e-4)
"""As the README of the scripts of diffusers has it."""

FILES = {"text_encoder": "learned_embeds.safetensors", "text_encoder_2": "learned_embeds_2.safetensors"}
"""The file of each text encoder's vectors, as the scripts of diffusers name them."""

CAPTIONS: Mapping[str, Sequence[str]] = {
    "object": (
        *("{}", "a photo of {}", "a picture of {}", "a close-up of {}", "one {}", "a small {}", "a large {}", "the {}"),
        *("{} on a plain background", "a drawing of {}", "a clear picture of {}", "{} in the middle", "this is {}"),
    ),
    "style": (
        *("a picture in the style of {}", "a drawing in the style of {}", "{} style", "something drawn as {}"),
        *("a scene in the style of {}", "an image that looks like {}", "a small picture in the style of {}"),
    ),
    "word": ("{}",),
}
"""What is said of every picture: what the word stands for, or nothing but the word."""


@checked
@dataclass(frozen=True)
class Inversion:
    """The ``Aim`` of training a word.

    Attributes:
        token: the word, as prompts write it.
        initializer: words whose vectors it begins with.
        vectors: how many tokens it is.
    """

    token: str
    initializer: str
    vectors: int = 1
    _ids: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    name = "textual inversion"
    part = "embedding"

    def __post_init__(self) -> None:
        check_token(self.token)
        check_count("vectors", self.vectors)
        if not self.initializer.strip():
            raise InputError(f"initializer={self.initializer!r} is empty; give the word to begin with, such as 'toy'")
        if self.vectors > MOST_VECTORS:
            raise InputError(f"vectors = {self.vectors} is more than {MOST_VECTORS}, the tokens of a prompt")

    @property
    def facts(self) -> dict[str, Any]:
        """The word and where it began."""
        return {"token": self.token, "initializer": self.initializer, "vectors": self.vectors}

    @property
    def rates(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def target(self, folder: Path) -> Path:
        """The vectors of the first text encoder; those of SDXL's second are in a file beside it."""
        return folder / FILES["text_encoder"]

    def check(self, model: Model, training: Training) -> None:
        """Refuse a word without a beginning, and one that the model knows as a token already."""
        for part, tokenizer in model.tokenizers.items():
            if len(tokenizer.spare) < self.vectors:
                raise InputError(f"{part} has room for {len(tokenizer.spare)} new vectors, not {self.vectors}")
            if not tokenizer.ids(self.initializer):
                raise InputError(f"initializer = {self.initializer!r} holds no word; give one, such as 'toy'")
            if len(tokenizer.ids(self.token)) == 1:
                raise InputError(
                    f"token = {self.token!r} is a common word, whose meaning would be lost; give another, such as "
                    f"'<{self.token}>'"
                )

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> Start:
        """Rows of the embedding tables that no text can reach become the word's, under the names of encoders."""
        rows: Params = {}
        for part, tokenizer in model.tokenizers.items():
            ids = tokenizer.ids(self.initializer)
            table = params[part]["text_model"]["embeddings"]["token_embedding"]["weight"]
            beginning = [ids[i % len(ids)] for i in range(self.vectors)]
            rows[part] = {"rows": np.asarray(table[np.asarray(beginning)], np.float32)}
            self._ids[part] = tokenizer.spare[: self.vectors]
            tokenizer.added[self.token.lower()] = self._ids[part]
        return Start(rows, in_dtype(params, ["unet", *model.text.names], dtype), self._with_rows)

    def _with_rows(self, trained: Params, params: Params) -> Params:
        """The parameters with the word's vectors in their rows."""
        found = dict(params)
        for part, of in trained.items():
            model = params[part]["text_model"]
            embeddings = model["embeddings"]
            table: Array = embeddings["token_embedding"]["weight"]
            table = jnp.asarray(table).at[jnp.array(self._ids[part])].set(of["rows"].astype(table.dtype))
            embeddings = {**embeddings, "token_embedding": {"weight": table}}
            found[part] = {**params[part], "text_model": {**model, "embeddings": embeddings}}
        return found

    def shown(self, params: Params, trained: Params) -> Params:
        """With the word as it is now."""
        return self._with_rows(trained, params)

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """In the format of diffusers."""
        names = FILES if len(trained) > 1 else dict.fromkeys(trained, FILES["text_encoder"])
        for part in reversed(list(trained)):  # the one that says that the run is finished comes last
            rows: HostArray = np.asarray(jax.device_get(trained[part]["rows"]))
            outgoing = Outgoing(self.token, rows.shape, rows.dtype, partial(np.asarray, rows))
            target.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(target.parent / names[part], [outgoing], {"format": "pt"})
        return target


@checked
def train_inversion(
    training: Training,
    inversion: Inversion,
    mesh: Mesh,
    *,
    learn: str = "object",
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train a word on pictures, all of which it stands for; see ``canvax.train.task.train``.

    Args:
        training: what to train on; captions of the pictures are not read.
        inversion: the word.
        mesh: see there.
        learn: a key of ``CAPTIONS``.
        deadline: see there.
        say: see there.
    """
    if learn not in CAPTIONS:
        raise InputError(f"learn = {learn!r} is not known; it is one of {', '.join(CAPTIONS)}")
    captions = tuple(text.format(inversion.token) for text in CAPTIONS[learn])
    return train(training, inversion, mesh, subject=Subject(captions), deadline=deadline, say=say)
