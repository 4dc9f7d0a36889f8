"""Read prompts for the text encoders: syntax, texts by step, ``<lora:...>`` tags.

Nothing here runs on a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.images.infotext import without_networks
from canvax.models.text import SECOND, TextEncoders, fits
from canvax.pipelines.options import Options
from canvax.pipelines.references import References
from canvax.prompts import PromptSyntax, check_weight, fragments, parts_of, schedule_of
from canvax.types import HostArray

MOST_PARTS = 16
"""The most prompts that are added up (AND); each takes an evaluation of the network."""

Wording = tuple[Any, ...]
"""The text of one image at one time, for each text encoder; see ``canvax.models.text.TextEncoder.words``."""


@dataclass(frozen=True)
class Stage:
    """The texts of a part of the run, an entry for each image.

    Attributes:
        step: its first step, counted from 0 among the steps that are run.
        parts: the texts between AND; usually one.
        negatives: texts of the negative prompts.
    """

    step: int
    parts: list[list[Wording]]
    negatives: list[Wording]


@dataclass(frozen=True)
class Texts:
    """All texts of a call.

    Attributes:
        stages: the stages in their order; usually one.
        weights: weights of the parts of each image [B, K] float32.
        encoders: the text encoders.
    """

    stages: list[Stage]
    weights: HostArray
    encoders: TextEncoders

    @property
    def parts(self) -> int:
        """Number of parts K, of the prompt that has most."""
        return self.weights.shape[1]

    @cached_property
    def lengths(self) -> frozenset[tuple[int, ...]]:
        """Lengths of the prompts, for each text encoder."""
        wordings = (wording for stage in self.stages for side in (*stage.parts, stage.negatives) for wording in side)
        return frozenset(tuple(words.length for words in wording) for wording in wordings)

    def longer(self, chunks: int) -> Texts:
        """Return the texts at ``chunks`` times the shortest length of each text encoder, or at its longest."""

        def long(wording: Wording) -> Wording:
            wanted = [min(chunks * encoder.lengths[0], encoder.lengths[-1]) for encoder in self.encoders.encoders]
            each = zip(self.encoders.encoders, wording, wanted, strict=True)
            return tuple(encoder.extended(words, max(words.length, length)) for encoder, words, length in each)

        stages = [
            Stage(stage.step, [[*map(long, part)] for part in stage.parts], [*map(long, stage.negatives)])
            for stage in self.stages
        ]
        return Texts(stages, self.weights, self.encoders)


def texts_of(prompt: Any, negative_prompt: Any, options: Any) -> list[str]:
    """Return all texts of a call that its text encoders read; ``options`` are ``canvax.Options``."""
    more = (options.prompt_2, options.negative_prompt_2, options.hires_prompt)
    sides = [side if isinstance(side, list | tuple) else [side] for side in (prompt, negative_prompt, *more)]
    return [text for side in sides for text in side if isinstance(text, str)]


def read_texts(
    model: Model,
    prompts: Sequence[Sequence[str]],
    negatives: Sequence[Sequence[str]],
    options: Options,
    steps: int,
    references: References | None = None,
) -> Texts:
    """Read the texts of a call.

    Args:
        model: the model with its tokenizers.
        prompts: the prompt of each image, for the first and the second text encoder.
        negatives: the negative prompts in the same form.
        options: options of the call, with the syntax.
        steps: number of steps that are run.
        references: reference images of the call, which some encoders read.

    Raises:
        InputError: a prompt is too long, or its weights are too large.
    """
    syntax, read = options.prompt_syntax, _Reader(model, options, references)
    composed = [[parts_of(text) if syntax == "a1111" else [(text, 1.0)] for text in side] for side in prompts]
    most = max(len(parts) for side in composed for parts in side)
    if most > MOST_PARTS:
        problem = f"adds up {most} prompts (AND), more than {MOST_PARTS}"
        raise InputError("prompt", problem, cure="leave some out", value=prompts[0][0][:60])
    weights = np.zeros((len(prompts[0]), most), np.float32)
    schedules: list[list[list[list[tuple[int, str]]]]] = []  # [part][side][image]
    for i, parts in enumerate(composed[0]):
        for text, weight in parts:
            check_weight(text, weight)
        weights[i, : len(parts)] = [weight for _, weight in parts]
    for k in range(most):
        texts = [[parts[k][0] if k < len(parts) else "" for parts in side] for side in composed]
        schedules.append([[_scheduled(text, syntax, steps) for text in side] for side in texts])
    against = [[_scheduled(text, syntax, steps) for text in side] for side in negatives]
    all_sides = [text for sides in (*schedules, against) for side in sides for text in side]
    begins = sorted({begin for schedule in all_sides for begin, _ in schedule})
    stages = [Stage(step, [read.all(sides, step) for sides in schedules], read.all(against, step)) for step in begins]
    return Texts(stages, weights, model.text)


def _scheduled(text: str, syntax: PromptSyntax, steps: int) -> list[tuple[int, str]]:
    return schedule_of(text, steps) if syntax == "a1111" else [(0, text)]


class _Reader:
    """A reader that reads each text once."""

    def __init__(self, model: Model, options: Options, references: References | None) -> None:
        self._model, self._options, self._references = model, options.changed(), references
        self._syntax: PromptSyntax = options.prompt_syntax
        self._read: dict[tuple[Any, ...], Any] = {}

    def all(self, sides: list[list[list[tuple[int, str]]]], step: int) -> list[Wording]:
        """Return the encoders' inputs at a step for each image, from the texts for the first and the second."""
        encoders = self._model.text.encoders
        of_encoders = [sides[len(encoders) > 1 and encoder.component == SECOND] for encoder in encoders]
        return [
            self._model.text.even([self.one(i, _at(side[image], step), image) for i, side in enumerate(of_encoders)])
            for image in range(len(sides[0]))
        ]

    def one(self, index: int, text: str, image: int) -> Any:
        """Return an encoder's input for the text of an image."""
        encoder, images = self._model.text.encoders[index], self._references.of(image) if self._references else ()
        key = encoder.component, text, *map(id, images)
        if key not in self._read:
            pieces = [(self._model.concepts.spelled(piece), weight) for piece, weight in fragments(text, self._syntax)]
            self._read[key] = encoder.words(self._model.tokenizers[encoder.component], pieces, self._options, images)
        return self._read[key]


def _at(schedule: list[tuple[int, str]], step: int) -> str:
    return [text for begin, text in schedule if begin <= step][-1]


Embeds = dict[str, HostArray]
"""Conditions instead of prompts: ``text`` [n, T, D] and, for SDXL, ``pooled`` [n, P]."""


def check_conditions(name: str, value: Mapping[str, Any], model: Model) -> Embeds:
    """Check conditions that replace prompts, as ``pipe.encode`` returns them; an entry for each image.

    Raises:
        InputError: arrays are missing, of other shapes or not finite.
    """
    text, shapes = model.text, model.text.patterns
    embeds: Embeds = {}
    if isinstance(value.get("prompt"), str):
        raise InputError(name, "is a table of settings", cure="write pipe(**settings), or give the prompt's text alone")
    numbers, _ = model.size_conditions(*model.native_size, {})
    if unknown := sorted(map(repr, value.keys() - shapes.keys() - numbers.keys() - {"guidance"})):
        if model.networks.denoiser.component in value:  # pipe(prompt, params, key), as in diffusers' Flax
            raise InputError(name, "is a model's weights", cure="a pipeline has its own, others are given as {params}")
        raise InputError(name, f"has unknown keys: {', '.join(unknown)}", cure="give what pipe.encode returns")
    for part, pattern in shapes.items():
        if part not in value:
            raise InputError(name, f"has no {part!r}", cure="give what pipe.encode returns")
        array = np.asarray(value[part])
        if not (array.ndim and len(array) and fits(array.shape[1:], pattern)):
            shape = ", ".join(["n", *("k" if size is None else str(size) for size in pattern)])
            problem = f"has {part!r} of shape {array.shape}, not ({shape})"
            raise InputError(name, problem, cure="give what pipe.encode returns")
        if not np.isfinite(array.astype(np.float32)).all():
            raise InputError(name, f"has {part!r} with values that are not finite")
        embeds[part] = array
    if len({len(array) for array in embeds.values()}) > 1:
        raise InputError(name, "has arrays of several lengths", cure="give an entry of each for each image")
    if (lengths := text.lengths_of(rows := embeds["text"].shape[1])) is None:
        raise InputError(name, f"has {rows} tokens, not a multiple of {text.rows(text.shortest)}")
    for part, leaf in text.conditions(1, [np.float32] * len(text.encoders), lengths).items():
        if embeds[part].shape[1:] != leaf.shape[1:]:
            problem = f"has {part!r} of shape {embeds[part].shape}, and its text has {rows} rows"
            raise InputError(name, problem, cure="give what pipe.encode returns")
    return embeds


TAG = re.compile(r"<(?:lora|lyco):([^<>:]{1,200})((?::[^<>:]{0,40}){0,4})>", re.IGNORECASE)

Tags = dict[str, float | dict[str, float]]
"""Names of adapters, and their weights."""


def has_tags(prompt: Any) -> bool:
    """Return True if a prompt, or one of several, names an adapter."""
    prompts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list | tuple) else []
    return any(isinstance(prompt, str) and TAG.search(prompt) for prompt in prompts)


def take_tags(prompts: Sequence[str], denoiser: str) -> tuple[list[str], Tags]:
    """Return prompts without their tags, and the adapters that they all name, with weights as by ``tags_of``.

    Raises:
        InputError: they name different adapters, or a weight is not a number.
    """
    if not prompts:
        raise InputError("prompt", "holds no prompt", cure="give at least one", value=[])
    tags_by_prompt = [tags_of(prompt, denoiser) for prompt in prompts]
    if any(tags != tags_by_prompt[0] for tags in tags_by_prompt):
        raise InputError(
            "prompts",
            "name different adapters (<lora:...>), and its images share the weights of the model",
            cure="call once for each",
        )
    return [without_networks(prompt) for prompt in prompts], tags_by_prompt[0]


def tags_of(prompt: str, denoiser: str) -> Tags:
    """Return the adapters that a prompt names, with their weights; ``denoiser`` is the model's component.

    Tags are ``<lora:name>``, ``<lora:name:0.8>``, or ``<lora:name:0.5:0.8>`` for the text encoders and the denoiser,
    whose weights may also be written with ``te=`` and ``unet=``.
    """
    tags: Tags = {}
    for name, rest in TAG.findall(prompt):
        places: dict[str, float] = {}
        for word in rest.split(":")[1:]:
            label, _, number = word.rpartition("=")
            label = label.strip() or ("te" if "te" not in places else "unet")
            if label not in ("te", "unet") or label in places:
                raise InputError(
                    "prompt", f"names <lora:{name}{rest}> with other parts than a weight, or te=0.5 and unet=0.8"
                )
            places[label] = _number(f"<lora:{name}{rest}>", number)
        text = places.get("te", 1.0)
        unet = places.get("unet", text)
        if name.strip() in tags:
            raise InputError("prompt", f"names the adapter {name!r} twice (<lora:...>)", cure="once is enough")
        tags[name.strip()] = text if text == unet else {"text_encoder": text, "text_encoder_2": text, denoiser: unet}
    return tags


def _number(tag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError("prompt", f"names {tag}, where {text!r} is no weight", cure="write <lora:name:0.8>") from None
