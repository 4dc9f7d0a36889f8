"""Which programs a run needs, and those of a run, compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from canvax.guidance import Method
from canvax.models.beside import Places
from canvax.models.text import Conditions
from canvax.types import Array

PROGRAMS = ("text encoder", "image encoder", "control encoder", "image prompt encoder", "denoiser", "decoder")
"""What they are called where they are announced."""

LatentShape = tuple[int, int, int, int]
"""[B, h, w, C]"""

TUNING = {"method": 2, "pag": 2}
"""Numbers of each field of ``canvax.denoise.Tuning``."""


class PromptKind(NamedTuple):
    """What decides the programs of the image prompts that one adapter reads.

    Attributes:
        component: of the adapter.
        images: of them, for each image of the batch.
        masked: whether one has a mask.
        reads: shape of what the adapter reads of an image.
    """

    component: str
    images: int
    masked: bool
    reads: tuple[int, ...]


class Kinds(NamedTuple):
    """Which programs a run needs, besides what the shapes of its arrays decide.

    Attributes:
        guided: denoisers with guidance (True), without (False), or both.
        deep_layers: for ``canvax.denoise.DeepFeatures``; 0 without.
        known: parts of images are kept (``canvax.denoise.Known``).
        decoder: None for none.
        image_encoder: which encoder of images; None for none.
        chunks: of each prompt.
        parts: prompts of each image that are added up (``canvax.denoise.Composed``); 0 without.
        method: of guidance.
        tuned: fields of ``canvax.denoise.Tuning`` that are given.
        controls: those of ``Networks.controls`` that read a control image.
        image_prompts: for each adapter that reads image prompts.
        sees: CLIP's image encoder is needed for them.
        places: for adapters beside the weights; None for weights alone.
    """

    guided: tuple[bool, ...] = (True,)
    deep_layers: int = 0
    known: bool = False
    decoder: Literal["whole", "tiled", None] = "whole"
    image_encoder: Literal["whole", "tiled", None] = None
    chunks: int = 1
    parts: int = 0
    method: Method = "cfg"
    tuned: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    image_prompts: tuple[PromptKind, ...] = ()
    sees: bool = False
    places: Places | None = None


class Ready(NamedTuple):
    """The programs of a run, compiled.

    Attributes:
        encode: the text encoder.
        denoisers: with guidance (True), without (False), or both.
        decode: the decoder, or None.
        encode_image: the encoder of one image, or None.
        encode_controls: of one control image, for each network that reads one.
        encode_prompts: of one image prompt, for each adapter that reads one, and CLIP's image encoder.
    """

    encode: Callable[..., Conditions]
    denoisers: Mapping[bool, Callable[..., Any]]
    decode: Callable[..., Array] | None
    encode_image: Callable[..., tuple[Array, Array]] | None = None
    encode_controls: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    encode_prompts: Mapping[str, Callable[..., Any]] = MappingProxyType({})

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Each with its name."""
        programs: list[tuple[str, Any]] = [("text encoder", self.encode), ("image encoder", self.encode_image)]
        programs += [("control encoder", encoder) for encoder in self.encode_controls.values()]
        programs += [("image prompt encoder", encoder) for encoder in self.encode_prompts.values()]
        programs += [("denoiser", denoiser) for denoiser in self.denoisers.values()]
        return [(name, program) for name, program in (*programs, ("decoder", self.decode)) if program]
