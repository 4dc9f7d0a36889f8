"""Textual inversion (Gal et al. 2022): the model is frozen, and only the embedding of a new word is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.params import Params
from canvax.settings import check_all, check_setting
from canvax.train.settings import TASKS, InversionRecord, Learn, WordCaptions
from canvax.train.state import in_dtype
from canvax.train.task import PLAN, InitialState, Subject, Training, recorded, train
from canvax.types import Array, DType, HostArray
from canvax.weights.embeddings import check_token
from canvax.weights.safetensors import ArrayToSave, write_safetensors

EMBEDDING_PLAN = replace(PLAN, **TASKS["textual-inversion"].plan)
"""Learning rate 5e-4, as in the README of diffusers' scripts."""

FILES = {"text_encoder": "learned_embeds.safetensors", "text_encoder_2": "learned_embeds_2.safetensors"}
"""The file of each text encoder's vectors, named as in diffusers' scripts."""

CAPTIONS: Mapping[Learn, Sequence[str]] = {
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
"""Kind of concept -> caption templates; with "word" the caption is only the word."""


@dataclass(frozen=True)
class Inversion(InversionRecord):
    """The ``TrainingTask`` of training a word.

    Attributes:
        token: the word, as written in prompts.
        initializer: words whose vectors are the initial values.
        vectors: number of vectors, and so of tokens.
    """

    _ids: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    name = "textual inversion"
    part = "embedding"
    for_transformers = False

    def __post_init__(self) -> None:
        check_token(self.token)
        check_all(self)
        if not self.initializer.strip():
            raise InputError(
                "initializer", "is empty", cure="give the word to begin with, such as 'toy'", value=self.initializer
            )

    @property
    def facts(self) -> dict[str, Any]:
        """The word and its initial values."""
        return {"token": self.token, "initializer": self.initializer, "vectors": self.vectors}

    @property
    def rates(self) -> dict[str, float]:
        """No component has a special learning rate."""
        return {}

    def files(self, folder: Path) -> Sequence[Path]:
        """Return the file of the first text encoder's vectors, and that of SDXL's second."""
        return [folder / name for name in FILES.values()]

    def check(self, model: Model, training: Training) -> None:
        """Refuse a word without initial values, and a word that is already a token of the model."""
        for part, tokenizer in model.tokenizers.items():
            if len(tokenizer.spare) < self.vectors:
                raise InputError(
                    "vectors",
                    f"is more than the {len(tokenizer.spare)} new vectors for which {part} has room",
                    value=self.vectors,
                )
            if not tokenizer.ids(self.initializer):
                raise InputError("initializer", "holds no word", cure="give one, such as 'toy'", value=self.initializer)
            if len(tokenizer.ids(self.token)) == 1:
                raise InputError(
                    "token",
                    "is a common word, whose meaning would be lost",
                    cure=f"give another, such as '<{self.token}>'",
                    value=self.token,
                )

    def exact(self, model: Model) -> Collection[str]:
        """Return the text encoders, whose vectors are the initial values."""
        return model.text.names

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> InitialState:
        """Assign the word to unused rows of each text encoder's embedding table; these rows are trained."""
        rows: Params = {}
        for part, tokenizer in model.tokenizers.items():
            ids = tokenizer.ids(self.initializer)
            table = params[part]["text_model"]["embeddings"]["token_embedding"]["weight"]
            beginning = [ids[i % len(ids)] for i in range(self.vectors)]
            rows[part] = {"rows": np.asarray(table[np.asarray(beginning)], np.float32)}
            self._ids[part] = tokenizer.spare[: self.vectors]
            tokenizer.added[self.token.lower()] = self._ids[part]
        return InitialState(rows, in_dtype(params, ["unet", *model.text.names], dtype), self._with_rows)

    def _with_rows(self, trained: Params, params: Params) -> Params:
        """Return the parameters with the word's vectors in the embedding tables."""
        result = dict(params)
        for part, of in trained.items():
            model = params[part]["text_model"]
            embeddings = model["embeddings"]
            table: Array = embeddings["token_embedding"]["weight"]
            table = jnp.asarray(table).at[jnp.array(self._ids[part])].set(of["rows"].astype(table.dtype))
            embeddings = {**embeddings, "token_embedding": {"weight": table}}
            result[part] = {**params[part], "text_model": {**model, "embeddings": embeddings}}
        return result

    def shown(self, model: Model, params: Params, trained: Params) -> Params:
        """Return the parameters with the word's current vectors."""
        return self._with_rows(trained, params)

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """Write the vectors in the format of diffusers."""
        names = FILES if len(trained) > 1 else dict.fromkeys(trained, FILES["text_encoder"])
        step = target.stem.removeprefix(Path(FILES["text_encoder"]).stem)  # empty at the end
        for part in reversed(list(trained)):  # ``target``, which marks the run as finished, is written last
            rows: HostArray = np.asarray(jax.device_get(trained[part]["rows"]))
            to_save = ArrayToSave(self.token, rows.shape, rows.dtype, partial(np.asarray, rows))
            target.parent.mkdir(parents=True, exist_ok=True)
            path = target.parent / names[part]
            metadata = {"format": "pt", **recorded(training, model.overrides)}
            write_safetensors(path.with_stem(path.stem + step), [to_save], metadata)
        return target


def train_inversion(
    training: Training,
    inversion: Inversion,
    mesh: Mesh,
    *,
    learn: Learn = "object",
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train a word on images of the word's object or style.

    Args:
        training: model and images; the captions of the images are not read.
        inversion: the word.
        mesh: the devices; the batch is split over ``data``.
        learn: a key of ``CAPTIONS``.
        deadline: ``time.monotonic()`` at which to write the state and stop.
        say: called with messages about the progress.

    Returns:
        The file of the first text encoder's vectors, or None if the deadline came first.
    """
    learn = check_setting(WordCaptions, "learn", learn)
    captions = tuple(text.format(inversion.token) for text in CAPTIONS[learn])
    return train(training, inversion, mesh, subject=Subject(captions), deadline=deadline, say=say)
