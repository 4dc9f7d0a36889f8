"""The text encoders of a model: from prompts to the conditions that its denoiser reads.

An encoder reads prompts into arrays of its own and encodes these. A family joins the outputs of its encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError
from canvax.models.beside import Places, with_adapters
from canvax.params import Params, Spec
from canvax.prompts.grammar import Fragment
from canvax.types import Array, DType, HostArray

Conditions = dict[str, Array]
"""What a denoiser reads beside latents and row, by name: ``text`` [B, T, D]; SDXL also ``pooled`` [B, P] and
``time_ids`` [B, n] float32; of language models ``length`` [B] int32, how many rows of ``text`` are the prompt. What
networks have read of images is a tree of arrays."""

Shapes = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of arrays, by name."""

TextInputs = dict[str, dict[str, Any]]
"""The arrays [B, ...] that text encoders read, by component and name."""

FIRST, SECOND = "text_encoder", "text_encoder_2"

IMAGE_PROMPTS = "image_prompts"
"""Among the conditions of an image: for each IP-Adapter, by its component, a ``canvax.models.ip_adapter.ImageKV``."""

IMAGE_ENCODER = "image_encoder"
"""The component of CLIP's image encoder, which all adapters of a pipeline share."""


class Words(NamedTuple):
    """What an encoder reads of a prompt; an encoder may return another record with a ``length``.

    Attributes:
        length: its tokens.
        text: the prompt.
        images: reference images beside it.
    """

    length: int
    text: str
    images: Sequence[Any] = ()


class Passes(NamedTuple):
    """How prompts are encoded.

    Attributes:
        inputs: arrays [n, ...] for each pass of the encoder.
        mix: makes the ``text`` of the prompts at the given indices from the ``text`` of these prompts in each pass;
            None if the first pass gives all that is needed.
    """

    inputs: Sequence[dict[str, HostArray]]
    mix: Callable[[Sequence[Any], Sequence[int]], Any] | None = None


class TextEncoder:
    """A text encoder: a frozen record with a ``repr`` that holds all that decides its program.

    One that reads a prompt as a whole declares ``component``, ``tokenizer``, ``lengths``, ``spec``, ``outputs`` and
    ``encode``, and ``inputs`` and ``read`` if it reads more than ids. What else is here is for encoders like CLIP's.

    Attributes:
        component: its key in ``params``, which is its folder in a checkpoint.
        lengths: the token lengths that programs are made for, from the shortest.
        tokenizer: the folder of its tokenizer in a checkpoint; empty if it has none.
    """

    component: str
    lengths: tuple[int, ...]
    tokenizer: str = ""

    @property
    def spec(self) -> Spec:
        """Its parameters."""
        raise NotImplementedError

    def outputs(self, length: int, dtype: DType) -> Shapes:
        """Return what ``encode`` gives for one prompt of ``length`` tokens and parameters of a dtype.

        It is declared, since tracing the encoder takes time that a process with cached programs need not spend.
        """
        raise NotImplementedError

    def encode(self, p: Params, *args: Any, **inputs: Any) -> Conditions:
        """Encode ``inputs`` [B, ...] to ``outputs`` [B, ...]."""
        raise NotImplementedError

    def inputs(self, length: int) -> Shapes:
        """Return the arrays that ``encode`` reads of one prompt of ``length`` tokens."""
        return {"ids": jax.ShapeDtypeStruct((length,), jnp.int32)}

    def count(self, tokenizer: Any, text: str, images: Sequence[Any]) -> int:
        """Return the tokens of a prompt, and of the reference images beside it where the encoder sees these."""
        del images
        return len(tokenizer.ids(text))

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        """Return ``inputs`` [n, ...] of prompts of at most ``length`` tokens, with the reference images beside each."""
        del images
        return {"ids": tokenizer(texts, length=length)}

    def room(self, length: int) -> int:
        """Return how many tokens of a prompt fit into ``length``."""
        return length

    def fit(self, needed: Iterable[int]) -> int:
        """Return the length that prompts of some lengths are brought to, so that they share a program."""
        longest = max(needed)
        return next((length for length in self.lengths if length >= longest), longest)

    def words(
        self, tokenizer: Any, pieces: Sequence[Fragment], options: Mapping[str, Any], images: Sequence[Any] = ()
    ) -> Any:
        """Read a prompt.

        Args:
            tokenizer: its tokenizer.
            pieces: the prompt, in pieces with weights.
            options: of the call, those that were given.
            images: reference images beside it.

        Returns:
            ``Words``, or another record with a ``length``.

        Raises:
            InputError: the prompt is too long, or has weights that the encoder does not read.
        """
        del options
        text, most = "".join(piece for piece, _ in pieces), self.room(self.lengths[-1])
        if any(weight != 1 for _, weight in pieces):
            raise InputError("prompt", text[:60], "has weights or BREAK, which a language model does not read")
        if (length := self.count(tokenizer, text, images)) > most:
            raise InputError("prompt", text[:60], f"has {length} tokens, more than {most}", "shorten it")
        return Words(length, text, images)

    def extended(self, words: Any, length: int) -> Any:
        """Return ``words`` at the length of what another encoder reads of the same image."""
        return words._replace(length=length)

    def passes(self, tokenizer: Any, words: Sequence[Any], length: int) -> Passes:
        """Return how prompts are encoded that were brought to ``length``."""
        return Passes([self.read(tokenizer, [one.text for one in words], length, [one.images for one in words])])

    def lengthened(self, text: HostArray, length: int) -> HostArray:
        """Return features [n, T, D] of a shorter length as those of ``length``."""
        return np.pad(text, ((0, 0), (0, length - text.shape[1]), (0, 0)))


@dataclass(frozen=True)
class TextEncoders:
    """The text encoders of a model as one. A family that joins their outputs in another way derives a class.

    Attributes:
        encoders: in the order of their outputs.
        places: for adapters beside their weights.
    """

    encoders: tuple[TextEncoder, ...]
    places: Places | None = None

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the encoders, arrays on a device or on the host: here ``text`` side by side."""
        if len(outputs) == 1:
            return outputs[0]
        joined = {name: value for output in outputs for name, value in output.items()}
        text = [output["text"] for output in outputs]
        return joined | {"text": text[0].__array_namespace__().concatenate(text, axis=-1)}

    @property
    def names(self) -> tuple[str, ...]:
        """Their components."""
        return tuple(encoder.component for encoder in self.encoders)

    @property
    def specs(self) -> dict[str, Spec]:
        """Parameters of each encoder."""
        return {encoder.component: encoder.spec for encoder in self.encoders}

    @property
    def shortest(self) -> tuple[int, ...]:
        """The shortest length of each encoder."""
        return tuple(encoder.lengths[0] for encoder in self.encoders)

    @property
    def width(self) -> int:
        """D: width of the joined text."""
        return self._features()["text"].shape[-1]

    @property
    def pooled_width(self) -> int:
        """P: width of the pooled output, 0 where there is none."""
        features = self._features()
        return features["pooled"].shape[-1] if "pooled" in features else 0

    def _features(self, lengths: Sequence[int] = ()) -> Shapes:
        return self.conditions(1, [jnp.float32] * len(self.encoders), lengths)

    def room(self, lengths: Sequence[int] = ()) -> int:
        """Return how many tokens of a prompt fit into a length of each encoder, the longest ones by default."""
        longest = lengths or [encoder.lengths[-1] for encoder in self.encoders]
        return min(encoder.room(length) for encoder, length in zip(self.encoders, longest, strict=True))

    def inputs(self, lengths: Sequence[int] = ()) -> dict[str, Shapes]:
        """Return what the encoders read of a prompt of these lengths, the shortest ones by default."""
        each = zip(self.encoders, lengths or self.shortest, strict=True)
        return {encoder.component: encoder.inputs(length) for encoder, length in each}

    def conditions(self, batch: int, dtypes: Sequence[DType], lengths: Sequence[int] = ()) -> Shapes:
        """Return shapes and dtypes of what ``encode_text`` gives.

        Args:
            batch: B.
            dtypes: of the parameters of each encoder.
            lengths: of each encoder, the shortest ones by default.
        """
        outputs = [
            {name: jax.ShapeDtypeStruct((batch, *one.shape), one.dtype) for name, one in shapes.items()}
            for encoder, length, dtype in zip(self.encoders, lengths or self.shortest, dtypes, strict=True)
            for shapes in [encoder.outputs(length, dtype)]
        ]
        alone = len(outputs) == 1 and type(self).join is TextEncoders.join
        return outputs[0] if alone else jax.eval_shape(self.join, outputs)

    def even(self, words: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the encoders read of an image; those of the same ``lengths`` read it at the same length."""
        needed: dict[tuple[int, ...], int] = {}
        for encoder, one in zip(self.encoders, words, strict=True):
            needed[encoder.lengths] = max(needed.get(encoder.lengths, 0), one.length)
        each = zip(self.encoders, words, strict=True)
        return tuple(encoder.extended(one, needed[encoder.lengths]) for encoder, one in each)

    def fit(self, needed: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Return the length of each encoder that prompts are brought to, which need the given lengths."""
        columns = zip(*needed, strict=True)
        return tuple(encoder.fit(column) for encoder, column in zip(self.encoders, columns, strict=True))

    def lengths_of(self, rows: int) -> tuple[int, ...] | None:
        """Return lengths of the encoders that give ``rows`` rows of text together; None if no lengths do."""
        kinds = list(dict.fromkeys(encoder.lengths for encoder in self.encoders))
        alike = [(rows,) * len(kinds)] if rows and all(rows % kind[0] == 0 for kind in kinds) else []
        for chosen in chain(alike, product(*kinds)):
            lengths = tuple(chosen[kinds.index(encoder.lengths)] for encoder in self.encoders)
            if self.rows(lengths) == rows:
                return lengths
        return None

    def rows(self, lengths: Sequence[int]) -> int:
        """Return how many rows of text prompts of these lengths give."""
        return self._features(lengths)["text"].shape[1]

    def is_lengthened(self, lengths: Sequence[int]) -> bool:
        """Return whether joined text of other lengths can be brought to these: its rows are those of each encoder."""
        return set(lengths) == {self.rows(lengths)}

    def lengthened(self, text: HostArray, lengths: Sequence[int]) -> HostArray:
        """Return joined text [n, T, D] at these lengths, see ``is_lengthened``."""
        return text if text.shape[1] == self.rows(lengths) else self.encoders[0].lengthened(text, lengths[0])


def encode_each(
    p: Params, inputs: TextInputs, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> tuple[Conditions, ...]:
    """Encode prompts with each encoder; arguments as of ``encode_text``."""
    if cfg.places is not None and shares is not None:
        p = {name: with_adapters(p[name], shares[name], spec, cfg.places) for name, spec in cfg.specs.items()}
    return tuple(encoder.encode(p[encoder.component], **inputs[encoder.component]) for encoder in cfg.encoders)


def encode_text(
    p: Params, inputs: TextInputs, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> Conditions:
    """Encode prompts to conditions.

    Args:
        p: parameters of each encoder, by component.
        inputs: what each encoder reads, by component and name: [B, ...].
        shares: with ``cfg.places``, how much of each adapter every image has [B, K] float32, for each encoder.
        cfg: the encoders.

    Returns:
        ``text`` [B, T, D] and, with a pooled output, ``pooled`` [B, P], in the dtype of the parameters.
    """
    return cfg.join(encode_each(p, inputs, shares, cfg=cfg))


def encode_and_join(
    p: Params, inputs: TextInputs, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> tuple[Conditions, tuple[Conditions, ...]]:
    """Return ``encode_text`` and the outputs of each encoder, which the host mixes where prompts have weights."""
    outputs = encode_each(p, inputs, shares, cfg=cfg)
    return cfg.join(outputs), outputs
