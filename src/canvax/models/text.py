"""The text encoders of a model: from prompts to the conditions that its denoiser reads.

An encoder reads prompts into its input arrays and encodes these. A family joins the outputs of its encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, shown
from canvax.models.beside import Places, with_adapters
from canvax.params import Params, Spec
from canvax.prompts.grammar import Fragment
from canvax.types import Array, DType, HostArray

Conditions = dict[str, Array]
"""Inputs of a denoiser besides latents and row, by name: ``text`` [B, T, D]; for SDXL also ``pooled`` [B, P] and
``time_ids`` [B, n] float32; for language models ``length`` [B] int32, the rows of ``text`` without padding. Features of
control images, image prompts and references are trees of arrays.
"""

Shapes = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of arrays, by name."""

Pattern = tuple[int | None, ...]
"""A shape, with None for axes of any size."""

TextInputs = dict[str, dict[str, Any]]
"""Input arrays [B, ...] of text encoders, by component and name."""

FIRST, SECOND = "text_encoder", "text_encoder_2"

PIXELS_OF_A_TOKEN = 2**13
"""A text is padded to at least a token for so many pixels of the image: 32 at 512 pixels, 128 at 1024. More programs
would save less than 3 % of the time."""

IMAGE_PROMPTS = "image_prompts"
"""Condition of an image: for each IP-Adapter, by its component, a ``canvax.models.ip_adapter.ImageKV``."""

IMAGE_ENCODER = "image_encoder"
"""Component of CLIP's image encoder, which all adapters of a pipeline share."""


class Words(NamedTuple):
    """A prompt as an encoder reads it; an encoder may return another record with a ``length``.

    Attributes:
        length: number of tokens.
        text: the prompt.
        images: the reference images of the call.
    """

    length: int
    text: str
    images: Sequence[Any] = ()


class Passes(NamedTuple):
    """Plan of encoding prompts.

    Attributes:
        inputs: input arrays [n, ...] for each pass of the encoder.
        mix: computes the ``text`` of the prompts at some indices from their ``text`` in each pass; None if the first
            pass is the result.
    """

    inputs: Sequence[dict[str, HostArray]]
    mix: Callable[[Sequence[Any], Sequence[int]], Any] | None = None


class TextEncoder:
    """A text encoder: a frozen record whose ``repr`` determines its program.

    An encoder that reads a prompt as a whole declares ``component``, ``tokenizer``, ``lengths``, ``spec``, ``outputs``
    and ``encode``, and also ``inputs`` and ``read`` if it reads more than ids. The other methods are for encoders like
    CLIP's.

    Attributes:
        component: its key in ``params``, which is its folder in a checkpoint.
        lengths: the token lengths that programs are compiled for, ascending.
        short: shorter lengths, for small images; the features of a prompt must not depend on its padding.
        tokenizer: the folder of its tokenizer in a checkpoint; empty if it has none.
    """

    component: str
    lengths: tuple[int, ...]
    short: tuple[int, ...] = ()
    tokenizer: str = ""

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no spec")

    def outputs(self, length: int, dtype: DType) -> Shapes:
        """Return the shapes of ``encode``'s result for one prompt of ``length`` tokens and parameters of a dtype.

        It is declared because tracing the encoder takes time that a process with cached programs can save.
        """
        raise NotImplementedError(f"{type(self).__name__} has no outputs")

    def encode(self, p: Params, *args: Any, **inputs: Any) -> Conditions:
        """Encode ``inputs`` [B, ...] to ``outputs`` [B, ...]."""
        raise NotImplementedError(f"{type(self).__name__} has no encode")

    def inputs(self, length: int) -> Shapes:
        """Return the shapes of ``encode``'s inputs for one prompt of ``length`` tokens."""
        return {"ids": jax.ShapeDtypeStruct((length,), jnp.int32)}

    def seeing(self, sizes: Sequence[tuple[int, int]]) -> TextEncoder:
        """Return the encoder for prompts with reference images of these heights and widths, which it may see."""
        del sizes
        return self

    def view(self, image: Any, fitted: Any) -> Any:
        """Return a reference image as the encoder sees it, if it does.

        Args:
            image: the image of the caller.
            fitted: the image at the size that the denoiser reads.
        """
        del image
        return fitted

    def count(self, tokenizer: Any, text: str, images: Sequence[Any]) -> int:
        """Return the number of tokens of a prompt, and of the reference images if the encoder sees them."""
        del images
        return len(tokenizer.ids(text))

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        """Return ``inputs`` [n, ...] of prompts of at most ``length`` tokens, with the reference images of each."""
        del images
        return {"ids": tokenizer(texts, length=length)}

    def room(self, length: int) -> int:
        """Return how many tokens of a prompt fit into ``length``."""
        return length

    def fit(self, needed: Iterable[int], pixels: int | None = None) -> int:
        """Return the length that prompts of these lengths are padded to, so that they share a program.

        With the ``pixels`` of an image it may be one of ``short``.
        """
        longest = max(needed)
        return next((length for length in (*self.short_for(pixels), *self.lengths) if length >= longest), longest)

    def short_for(self, pixels: int | None) -> list[int]:
        """Return those of ``short`` that are worth a program for an image of so many pixels."""
        return [] if pixels is None else [length for length in self.short if length * PIXELS_OF_A_TOKEN >= pixels]

    def words(
        self, tokenizer: Any, pieces: Sequence[Fragment], options: Mapping[str, Any], images: Sequence[Any] = ()
    ) -> Any:
        """Read a prompt.

        Args:
            tokenizer: its tokenizer.
            pieces: pieces of the prompt with their weights.
            options: explicit options of the call.
            images: the reference images of the call.

        Returns:
            ``Words``, or another record with a ``length``.

        Raises:
            InputError: the prompt is too long, or has weights that the encoder does not read.
        """
        del options
        text, most = "".join(piece for piece, _ in pieces), self.room(self.lengths[-1])
        if any(weight != 1 for _, weight in pieces):
            problem = "has weights or BREAK, which this text encoder does not read"
            cure = "take them out, or give {prompt_syntax='plain'}, which reads brackets as text"
            raise InputError("prompt", problem, cure=cure, value=text[:60])
        if (length := self.count(tokenizer, text, images)) > most:
            raise InputError("prompt", f"has {length} tokens, more than {most}", cure="shorten it", value=text[:60])
        return Words(length, text, images)

    def extended(self, words: Any, length: int) -> Any:
        """Return ``words`` at the length that another encoder needs for the same image."""
        return words._replace(length=length)

    def passes(self, tokenizer: Any, words: Sequence[Any], length: int) -> Passes:
        """Return the plan of encoding prompts of ``length`` tokens."""
        return Passes(
            [self.read(tokenizer, [prompt.text for prompt in words], length, [prompt.images for prompt in words])]
        )

    def lengthened(self, text: HostArray, length: int) -> HostArray:
        """Return features [n, T, D] of a shorter length as features of ``length``."""
        return np.pad(text, ((0, 0), (0, length - text.shape[1]), (0, 0)))


@dataclass(frozen=True)
class TextEncoders:
    """All text encoders of a model. A family that joins their outputs in another way defines a subclass.

    Attributes:
        encoders: the encoders in the order of their outputs.
        places: adapter slots beside the weights.
    """

    encoders: tuple[TextEncoder, ...]
    places: Places | None = None

    def __post_init__(self) -> None:
        if isinstance(self.encoders, list):  # no program can have it as an argument
            object.__setattr__(self, "encoders", tuple(self.encoders))

    def encode(self, p: Params, inputs: TextInputs) -> tuple[Conditions, ...]:
        """Return the output of each encoder; a subclass may pass the output of one to another."""
        return tuple(encoder.encode(p[encoder.component], **inputs[encoder.component]) for encoder in self.encoders)

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the encoders, on a device or on the host; by default, concatenate features."""
        if len(outputs) == 1:
            return outputs[0]
        joined = {name: value for output in outputs for name, value in output.items()}
        text = [output["text"] for output in outputs]
        return joined | {"text": text[0].__array_namespace__().concatenate(text, axis=-1)}

    @property
    def names(self) -> tuple[str, ...]:
        """Components of the encoders."""
        return tuple(encoder.component for encoder in self.encoders)

    def seeing(self, sizes: Sequence[tuple[int, int]]) -> Self:
        """Return the encoders for prompts with reference images of these heights and widths."""
        return replace(self, encoders=tuple(encoder.seeing(sizes) for encoder in self.encoders))

    def view(self, image: Any, fitted: Any) -> Any:
        """Return a reference image as the first encoder sees it."""
        return self.encoders[0].view(image, fitted)

    @property
    def specs(self) -> dict[str, Spec]:
        """Parameters of each encoder."""
        return {encoder.component: encoder.spec for encoder in self.encoders}

    @property
    def shortest(self) -> tuple[int, ...]:
        """Shortest length of each encoder."""
        return tuple(encoder.lengths[0] for encoder in self.encoders)

    @property
    def width(self) -> int:
        """D, the width of the joined text."""
        return self._features()["text"].shape[-1]

    @property
    def pooled_width(self) -> int:
        """P, the width of the pooled output; 0 for none."""
        features = self._features()
        return features["pooled"].shape[-1] if "pooled" in features else 0

    @property
    def patterns(self) -> dict[str, Pattern]:
        """Shape of each condition of one prompt, without [B]; None for axes that grow with the lengths."""
        some, more = (self._features([times * length for length in self.shortest]) for times in (1, 2))
        pairs = {name: zip(leaf.shape[1:], more[name].shape[1:], strict=True) for name, leaf in some.items()}
        return {name: tuple(size if size == grown else None for size, grown in pair) for name, pair in pairs.items()}

    def _features(self, lengths: Sequence[int] = ()) -> Shapes:
        return self.conditions(1, [jnp.float32] * len(self.encoders), lengths)

    def room(self, lengths: Sequence[int] = ()) -> int:
        """Return the number of prompt tokens that fit into a length of each encoder, by default the longest."""
        longest = lengths or [encoder.lengths[-1] for encoder in self.encoders]
        return min(encoder.room(length) for encoder, length in zip(self.encoders, longest, strict=True))

    def inputs(self, lengths: Sequence[int] = ()) -> dict[str, Shapes]:
        """Return the shapes of the encoders' inputs for one prompt of these lengths, by default the shortest."""
        each = zip(self.encoders, lengths or self.shortest, strict=True)
        return {encoder.component: encoder.inputs(length) for encoder, length in each}

    def conditions(self, batch: int, dtypes: Sequence[DType], lengths: Sequence[int] = ()) -> Shapes:
        """Return the shapes and dtypes of ``encode_text``'s result.

        Args:
            batch: B.
            dtypes: dtype of each encoder's parameters.
            lengths: length of each encoder, by default the shortest.
        """
        outputs = [
            {name: jax.ShapeDtypeStruct((batch, *output.shape), output.dtype) for name, output in shapes.items()}
            for encoder, length, dtype in zip(self.encoders, lengths or self.shortest, dtypes, strict=True)
            for shapes in [encoder.outputs(length, dtype)]
        ]
        is_single = len(outputs) == 1 and type(self).join is TextEncoders.join
        return outputs[0] if is_single else jax.eval_shape(self.join, outputs)

    def even(self, words: Sequence[Any]) -> tuple[Any, ...]:
        """Return the words of an image for each encoder; encoders with the same ``lengths`` get the same length."""
        needed: dict[tuple[int, ...], int] = {}
        for encoder, prompt in zip(self.encoders, words, strict=True):
            needed[encoder.lengths] = max(needed.get(encoder.lengths, 0), prompt.length)
        each = zip(self.encoders, words, strict=True)
        return tuple(encoder.extended(prompt, needed[encoder.lengths]) for encoder, prompt in each)

    def fit(self, needed: Iterable[Sequence[int]], pixels: int | None = None) -> tuple[int, ...]:
        """Return the length of each encoder that prompts of these lengths are padded to; see ``TextEncoder.fit``."""
        columns = zip(*needed, strict=True)
        return tuple(encoder.fit(column, pixels) for encoder, column in zip(self.encoders, columns, strict=True))

    def up_to_shortest(self, pixels: int) -> list[tuple[int, ...]]:
        """Return ``shortest``, after the short lengths of calls for an image of so many pixels."""
        return [*product(*([*encoder.short_for(pixels), encoder.lengths[0]] for encoder in self.encoders))]

    def without_short(self) -> TextEncoders:
        """Return the encoders without ``short``, so that small images with different prompts share a batch."""
        each = (replace(encoder, short=()) if encoder.short else encoder for encoder in self.encoders)  # pyright: ignore
        return replace(self, encoders=tuple(each))

    def lengths_of(self, rows: int) -> tuple[int, ...] | None:
        """Return the encoder lengths whose joined text has ``rows`` rows; None if there are none."""
        kinds = list(dict.fromkeys(encoder.lengths for encoder in self.encoders))
        alike = [(rows,) * len(kinds)] if rows and all(rows % kind[0] == 0 for kind in kinds) else []
        for chosen in chain(alike, product(*kinds)):
            lengths = tuple(chosen[kinds.index(encoder.lengths)] for encoder in self.encoders)
            if self.rows(lengths) == rows:
                return lengths
        return None

    def rows(self, lengths: Sequence[int]) -> int:
        """Return the number of rows of joined text of these lengths."""
        return self._features(lengths)["text"].shape[1]

    def is_lengthened(self, lengths: Sequence[int]) -> bool:
        """Return whether joined text can be lengthened to these lengths: its rows must be those of each encoder."""
        return set(lengths) == {self.rows(lengths)}

    def lengthened(self, text: HostArray, lengths: Sequence[int]) -> HostArray:
        """Return joined text [n, T, D] at these lengths; see ``is_lengthened``."""
        return text if text.shape[1] == self.rows(lengths) else self.encoders[0].lengthened(text, lengths[0])


def fits(shape: Sequence[int], pattern: Pattern) -> bool:
    """Return whether a shape is of a pattern."""
    return len(shape) == len(pattern) and all(want in (None, size) for size, want in zip(shape, pattern, strict=True))


def check_read(text: TextEncoders, inputs: TextInputs, declared: Mapping[str, Shapes]) -> None:
    """Refuse arrays that a user's encoder reads and does not declare.

    Args:
        text: the encoders.
        inputs: what they read.
        declared: shapes and dtypes of one prompt, by component and name.

    Raises:
        InputError: names, shapes or kinds of numbers are others.
    """
    for encoder in text.encoders:
        read = {
            name: (np.asarray(array).dtype, np.shape(array)[1:]) for name, array in inputs[encoder.component].items()
        }
        want = {name: (leaf.dtype, leaf.shape) for name, leaf in declared[encoder.component].items()}
        alike = {name: shape for name, (_, shape) in read.items()} == {name: shape for name, (_, shape) in want.items()}
        if not alike or not all(np.can_cast(kind, want[name][0], "same_kind") for name, (kind, _) in read.items()):
            got, asked = (
                ", ".join(f"{name} {np.dtype(kind).name}{[*shape]}" for name, (kind, shape) in sides.items())
                for sides in (read, want)
            )
            kind = type(encoder).__name__
            problem = f"{encoder.component} reads {got} in {kind}.read, and {kind}.inputs declares {asked}"
            raise InputError("text", problem, cure="let both have the same names and shapes")


def encode_each(
    p: Params, inputs: TextInputs, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> tuple[Conditions, ...]:
    """Encode prompts with each encoder; arguments as for ``encode_text``.

    Raises:
        InputError: an encoder returns other arrays than it declares.
    """
    if cfg.places is not None and shares is not None:
        p = {name: with_adapters(p[name], shares[name], spec, cfg.places) for name, spec in cfg.specs.items()}
    outputs = cfg.encode(p, inputs)
    for encoder, output in zip(cfg.encoders, outputs, strict=True):
        _check_outputs(encoder, inputs[encoder.component], output)
    return outputs


def _check_outputs(encoder: TextEncoder, inputs: Mapping[str, Any], output: Any) -> None:
    """Refuse an output that a user's encoder does not declare for these inputs, if it declares the inputs.

    Raises:
        InputError: names or shapes are others.
    """
    read = {name: array.shape[1:] for name, array in inputs.items()}
    lengths = [
        length
        for length in (*encoder.short, *encoder.lengths)
        if {name: leaf.shape for name, leaf in encoder.inputs(length).items()} == read
    ]
    declared = [{name: leaf.shape for name, leaf in encoder.outputs(length, jnp.float32).items()} for length in lengths]
    has_names = isinstance(output, Mapping)
    got = {name: jnp.shape(array)[1:] for name, array in output.items()} if has_names else shown(output)
    if declared and got not in declared:
        kind = type(encoder).__name__
        problem = (
            f"{encoder.component} returns {shown(got)} from {kind}.encode, and {kind}.outputs declares {declared[0]}"
        )
        raise InputError("text", problem, cure="let both have the same names and shapes")


def encode_text(
    p: Params, inputs: TextInputs, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> Conditions:
    """Encode prompts to conditions.

    Args:
        p: parameters of each encoder, by component.
        inputs: input arrays [B, ...] by component and name.
        shares: with ``cfg.places``, the weight of each adapter slot for each image [B, K] float32, by component.
        cfg: the text encoders.

    Returns:
        ``text`` [B, T, D] and, with a pooled output, ``pooled`` [B, P], in the dtype of the parameters.
    """
    return cfg.join(encode_each(p, inputs, shares, cfg=cfg))


def encode_and_join(
    p: Params, inputs: TextInputs, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> tuple[Conditions, tuple[Conditions, ...]]:
    """Return ``encode_text`` and the outputs of each encoder, which the host mixes for prompts with weights."""
    outputs = encode_each(p, inputs, shares, cfg=cfg)
    return cfg.join(outputs), outputs
