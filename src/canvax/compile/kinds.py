"""Programs as values, and what of a call decides which of them it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax

from canvax.guidance import PLAIN, Guidance
from canvax.models.beside import ADAPTERS, Places
from canvax.parallel.place import on_devices
from canvax.params import Params
from canvax.quantize import compute_dtype

PROGRAMS = ("text encoder", "image encoder", "control encoder", "image prompt encoder", "denoiser", "decoder")
"""What they are called where they are announced."""

DENOISERS = {True: "guided denoiser", False: "denoiser"}
"""Names of the denoisers of a run among its programs, with guidance and without."""


def reference_encoder(size: tuple[int, int]) -> str:
    """The name, among the programs of a run, of what encodes a reference image of a height and width."""
    return f"image encoder {size[1]}x{size[0]}"


LatentShape = tuple[int, int, int, int]
"""[B, h, w, C]"""


@dataclass(frozen=True, eq=False)
class ProgramSpec:
    """A function of parameters and arrays, to be compiled.

    Attributes:
        name: for people, one of ``PROGRAMS``.
        function: with its static keyword arguments.
        components: of the parameters that it reads. One name: its first argument is that component. Several: a dict.
        inputs: shapes, dtypes and shardings of its other arguments.
        places: slots of unmerged adapters, for the components that have such slots.
        facts: what ``canvax cache`` tells of it.
    """

    name: str
    function: partial[Any]
    components: str | tuple[str, ...]
    inputs: tuple[Any, ...]
    places: Places | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        """``components`` as a tuple."""
        return (self.components,) if isinstance(self.components, str) else self.components

    def weights(self, params: Params) -> Params:
        """Its first argument."""
        if isinstance(self.components, str):
            return self._component(params, self.components)
        return {name: self._component(params, name) for name in self.components}

    def _component(self, params: Params, name: str) -> Params:
        if self.places is None or name not in params[ADAPTERS]:
            return params[name]
        return {**params[name], ADAPTERS: params[ADAPTERS][name]}

    def description(self, weights: Params) -> dict[str, Any]:
        """What ``canvax cache`` tells of it, with these weights."""
        parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
        return {"program": self.name, "parameters": parameters, "dtype": str(compute_dtype(weights)), **self.facts}


class Compiled(NamedTuple):
    """A program that can be run.

    Attributes:
        program: what it was compiled from.
        executable: of its weights and inputs.
    """

    program: ProgramSpec
    executable: Any

    def __call__(self, params: Params, *inputs: Any) -> Any:
        """Its outputs; ``params`` are those of all components. Weights that wait are on the devices meanwhile."""
        present = {name: on_devices(params[name]) for name in self.program.reads}
        return self.executable(self.program.weights({**params, **present}), *inputs)


Ready = Mapping[str, Compiled]
"""The programs of a run, by the names that ``Programs.wanted`` gives them."""


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
    """What of a call decides its programs, besides the shapes of its arrays.

    Attributes:
        guided: denoisers with guidance (True), without (False), or both.
        deep_layers: ``layers`` of ``canvax.models.denoiser.Reusing``; 0 without.
        known: parts of images are kept (``canvax.denoise.Known``).
        decoder: None for none.
        image_encoder: which encoder of images; None for none.
        lengths: of each prompt, for each text encoder; the shortest ones if empty.
        guidance: the rule of denoisers with guidance; the others have that of ``canvax.guidance.off``.
        controls: those of ``Networks.controls`` that read a control image.
        image_prompts: for each adapter that reads image prompts.
        sees: CLIP's image encoder is needed for them.
        places: for adapters beside the weights; None for weights alone.
        references: height and width in pixels of reference images.
    """

    guided: tuple[bool, ...] = (True,)
    deep_layers: int = 0
    known: bool = False
    decoder: Literal["whole", "tiled", None] = "whole"
    image_encoder: Literal["whole", "tiled", None] = None
    lengths: tuple[int, ...] = ()
    guidance: Guidance = PLAIN
    controls: tuple[str, ...] = ()
    image_prompts: tuple[PromptKind, ...] = ()
    sees: bool = False
    places: Places | None = None
    references: tuple[tuple[int, int], ...] = ()
