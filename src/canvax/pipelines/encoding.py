"""Texts on the devices: encoded chunk by chunk, weighed, brought to one length.

The text encoder is one program, which reads one chunk of tokens of each image at a time; everything else happens on
the host. So no syntax, weight, schedule or number of chunks compiles the encoder again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from canvax.compile.kinds import DENOISERS, Ready
from canvax.engine.batch import Prompts, filled
from canvax.families.base import Ids, Model
from canvax.models.text import Conditions
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import local_indices, local_rows, put
from canvax.params import Params
from canvax.pipelines.request import Request
from canvax.pipelines.texts import Embeds, Stage, Wording, count_of
from canvax.prompts import Chunk, PromptSyntax, chunked, weighed
from canvax.prompts.chunks import as_arrays
from canvax.samplers import SamplerTable
from canvax.types import Array, HostArray

EncodePass = Callable[[Ids], Mapping[str, Any]]
"""Features [B, T, D] of one chunk of each image and, for SDXL, the pooled output [B, P], as arrays that can be
computed with here."""


@dataclass
class Encoding:
    """Encodes wordings with passes of the text encoder, each distinct pass once.

    Attributes:
        model: whose text encoders they are for.
        syntax: what the weights of tokens mean.
        chunks: how many each text is brought to.
        encode: one pass.
        rows: the images that the passes return.
        xp: numpy, or jax.numpy inside of ``jax.jit``.
    """

    model: Model
    syntax: PromptSyntax
    chunks: int
    encode: EncodePass
    rows: Sequence[int]
    xp: Any = np

    def __post_init__(self) -> None:
        self._passes: dict[bytes, Mapping[str, Any]] = {}

    @cached_property
    def _empty(self) -> list[Chunk]:
        return [
            chunked(tokenizer, [("", 1.0)], self.model.text.tokens)[0] for tokenizer in self.model.tokenizers.values()
        ]

    def __call__(self, wordings: Sequence[Wording]) -> dict[str, Any]:
        """Conditions of each image: ``text`` [n, chunks * T, D] and, for SDXL, ``pooled`` [n, P]."""
        counts = [count_of(wording) for wording in wordings]
        variants = [len(wording[0]) for wording in wordings]
        text: Any = 0.0
        for v in range(max(variants)):
            chunks = [self._weighed(wordings, v, c) for c in range(max(counts))]
            whole = self.xp.stack([self._lengthened(chunks, counts, at) for at in range(len(self.rows))])
            if max(variants) > 1:
                shares = [wordings[i][0][v].share if v < variants[i] else 0.0 for i in self.rows]
                whole = whole * self.xp.asarray(shares, self.xp.float32)[:, None, None]
            text = whole if v == 0 else text + whole
        features = self._pass([[variants[0].chunks[0] for variants in wording] for wording in wordings])
        return {**{name: array for name, array in features.items() if name != "text"}, "text": text}

    def _lengthened(self, chunks: list[Any], counts: Sequence[int], at: int) -> Any:
        """The chunks of one image, repeated, or filled up with empty ones."""
        count = counts[self.rows[at]]
        features = [chunk[at] for chunk in chunks[:count]]
        if self.chunks % count == 0:
            return self.xp.concatenate(features * (self.chunks // count))
        return self.xp.concatenate([*features, *[self._empty_features(len(counts))[at]] * (self.chunks - count)])

    def _weighed(self, wordings: Sequence[Wording], variant: int, chunk: int) -> Any:
        """Features of one chunk of one variant of each image, with the weights of its tokens."""
        chosen = []
        for wording in wordings:
            variants = [of_encoder[min(variant, len(of_encoder) - 1)] for of_encoder in wording]
            chosen.append([variant.chunks[min(chunk, len(variant.chunks) - 1)] for variant in variants])
        features = self.xp.asarray(self._pass(chosen)["text"], self.xp.float32)
        weights = np.stack([[encoder[1] for encoder in image] for image in chosen])[list(self.rows)]  # [n, encoders, T]
        if (weights == 1).all():
            return features
        parts, begin, empty = [], 0, self._empty_features(len(chosen))
        for i, encoder in enumerate(self.model.text.encoders):
            columns = slice(begin, begin + encoder.width)
            heavy = weighed(features[..., columns], weights[:, i].astype(np.float32), empty[..., columns],
                            self.syntax)  # fmt: skip
            plain = (weights[:, i] == 1).all(axis=1)[:, None, None]  # the very bits where there is no weight
            parts.append(self.xp.where(plain, features[..., columns], heavy))
            begin += encoder.width
        return self.xp.concatenate(parts, axis=-1)

    def _empty_features(self, count: int) -> Any:
        return self.xp.asarray(self._pass([self._empty] * count)["text"], self.xp.float32)

    def _pass(self, chosen: Sequence[Sequence[Chunk]]) -> Mapping[str, Any]:
        """One pass: a chunk for each encoder, of each image."""
        names = list(self.model.tokenizers)
        ids = {name: as_arrays([image[i] for image in chosen])[0] for i, name in enumerate(names)}
        key = b"".join(array.tobytes() for array in ids.values())
        if key not in self._passes:
            self._passes[key] = self.encode(ids)
        return self._passes[key]


def is_plain(model: Model, wordings: Sequence[Wording], chunks: int) -> bool:
    """Whether the encoder's output is what the denoiser is given: one pass for each, without weights."""
    return model.text.whole or (
        chunks == 1
        and all(
            len(of_encoder) == 1 and set(of_encoder[0].chunks[0][1]) == {1.0}
            for wording in wordings
            for of_encoder in wording
        )
    )


def ids_of(model: Model, wordings: Sequence[Wording], chunks: int) -> Ids:
    """Ids [B, T] int32 of a pass, for each text encoder: of the first chunk, or of all ``chunks`` if it reads those."""
    tokens, encoded = model.text.tokens * (chunks if model.text.whole else 1), {}
    for i, (name, tokenizer) in enumerate(model.tokenizers.items()):
        encoded[name] = np.full((len(wordings), tokens), tokenizer.pad, np.int32)
        for row, wording in zip(encoded[name], wordings, strict=True):
            ids = [token for chunk, _ in wording[i][0].chunks for token in chunk][:tokens]
            row[: len(ids)] = ids
    return encoded


class Encoded(NamedTuple):
    """The conditions of the images of a call, on the devices.

    Attributes:
        first: from the beginning.
        later: from a row on.
    """

    first: Prompts
    later: dict[int, Prompts]


def conditions_of(ready: Ready) -> Mapping[str, Any]:
    """Shapes of the conditions of a prompt, as the denoiser takes them."""
    denoiser = next(ready[name] for name in DENOISERS.values() if name in ready)
    return denoiser.program.inputs[0].flight.prompts[0]


def encode(
    model: Model,
    ready: Ready,
    params: Params,
    mesh: Mesh,
    request: Request,
    table: SamplerTable,
) -> Encoded:
    """What each image is conditioned on and what it is guided away from, for each part of the run."""
    split = over_batch(mesh)
    batch = padded_batch(len(request.prompts), mesh)
    beside, skip = request.beside, np.int32(request.options.clip_skip)
    shapes = conditions_of(ready)
    encoded = ("text", "pooled") if model.text.pooled_width else ("text",)
    shares: tuple[Any, ...] = ()
    if beside is not None:
        shares = ({name: put(filled(beside.weights[name], batch), split) for name in model.tokenizers},)
    numbers = model.size_conditions(request.height, request.width, request.options.changed())
    rows = local_indices(batch, split)

    def on_devices(ids: Ids) -> Conditions:
        placed = {name: put(filled(array, batch), split) for name, array in ids.items()}
        return ready["text encoder"](params, placed, skip, *shares)

    def one_pass(ids: Ids) -> dict[str, HostArray]:
        return {name: local_rows(array, shared=True)[1] for name, array in on_devices(ids).items()}

    encoding = Encoding(model, request.texts.syntax, request.chunks, one_pass, rows)

    def spread(array: HostArray, dtype: Any) -> Array:
        """Rows of this process, at their places; nobody here asks for the others."""
        whole = np.zeros((batch, *array.shape[1:]), dtype)
        whole[rows] = array.astype(dtype)
        return put(whole, split)

    def conditions_for(wordings: list[Wording], embeds: Embeds | None, *, negative: bool) -> Conditions:
        if embeds is not None:
            text, rows_of_all = embeds["text"], request.chunks * model.text.tokens
            if model.text.whole:
                text = np.pad(text, ((0, 0), (0, rows_of_all - text.shape[1]), (0, 0)))
            else:
                text = np.tile(text, (1, rows_of_all // text.shape[1], 1))
            arrays = embeds | {"text": text}
            conditions = {
                name: put(filled(array.astype(shapes[name].dtype), batch), split) for name, array in arrays.items()
            }
        elif negative and request.zeros:
            conditions = {name: put(np.zeros(shapes[name].shape, shapes[name].dtype), split) for name in encoded}
        elif is_plain(model, wordings, request.chunks):
            conditions = on_devices(ids_of(model, wordings, request.chunks))
        else:
            whole = encoding([*wordings, *[wordings[-1]] * (batch - len(wordings))])
            conditions = {name: spread(array, shapes[name].dtype) for name, array in whole.items()}
        if model.networks.embeds_guidance:
            conditions["guidance"] = put(np.full(batch, request.guidance, np.float32), split)
        return conditions | {name: put(np.tile(row, (batch, 1)), split) for name, row in numbers[negative].items()}

    def at(stage: Stage) -> Prompts:
        prompts = [conditions_for(part, request.embeds[0], negative=False) for part in stage.parts]
        if request.guided:
            prompts.insert(0, conditions_for(stage.negatives, request.embeds[1], negative=True))
        return tuple(prompts)

    steps = table.step - (request.init_images.skipped if request.init_images else 0)
    # Of the stages that begin at or before the first row, the last one holds.
    stages = {int(np.argmax(steps >= stage.step)): stage for stage in request.texts.stages if stage.step <= steps[-1]}
    return Encoded(at(stages.pop(0)), {row: at(stage) for row, stage in stages.items()})
