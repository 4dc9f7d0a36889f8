"""Programs as values, and the facts about a call that decide which of them it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from canvax.guidance import PLAIN, Guidance
from canvax.models.beside import ADAPTERS, Places
from canvax.models.denoiser import Denoiser, Shapes
from canvax.models.networks import Networks
from canvax.models.text import TextEncoders
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import on_devices
from canvax.params import Params
from canvax.quantize import compute_dtype
from canvax.types import DType

PROGRAMS = ("text encoder", "image encoder", "control encoder", "image prompt encoder", "denoiser", "decoder")
"""Names of programs in announcements."""

DENOISERS = {True: "guided denoiser", False: "denoiser"}
"""Names of the denoisers among the programs of a run, with guidance and without."""


def reference_encoder(size: tuple[int, int]) -> str:
    """Return the name, among the programs of a run, of the encoder of a reference image of a height and width."""
    return f"image encoder {size[1]}x{size[0]}"


LatentShape = tuple[int, int, int, int]
"""[B, h, w, C]"""


@dataclass(frozen=True, eq=False)
class ProgramSpec:
    """A function of parameters and arrays to compile.

    Attributes:
        name: one of ``PROGRAMS``, for people.
        function: the function with its static keyword arguments.
        components: components of the parameters that it reads. With one name, its first argument is that component;
            with several, a dict.
        inputs: shapes, dtypes and shardings of its other arguments.
        places: slots of unmerged adapters, for the components that have them.
        facts: its description for ``canvax cache``.
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

    def weights(self, params: Params, of: Callable[[Params], Params] = lambda part: part) -> Params:
        """Return its first argument, of the results of ``of`` for components and for slots of adapters."""
        if isinstance(self.components, str):
            return self._component(params, self.components, of)
        return {name: self._component(params, name, of) for name in self.components}

    def _component(self, params: Params, name: str, of: Callable[[Params], Params]) -> Params:
        if self.places is None or name not in params[ADAPTERS]:
            return of(params[name])
        return {**of(params[name]), ADAPTERS: of(params[ADAPTERS][name])}

    def description(self, weights: Params) -> dict[str, Any]:
        """Return its description for ``canvax cache``, with these weights."""
        parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
        return {"program": self.name, "parameters": parameters, "dtype": str(compute_dtype(weights)), **self.facts}


class Compiled(NamedTuple):
    """A program that can be run.

    Attributes:
        program: the spec that it was compiled from.
        executable: a function of its weights and inputs.
    """

    program: ProgramSpec
    executable: Any

    def __call__(self, params: Params, *inputs: Any) -> Any:
        """Run it with the ``params`` of all components; those that are offloaded are on the devices meanwhile."""
        return self.executable(self.program.weights(params, on_devices), *inputs)


Ready = Mapping[str, Compiled]
"""The programs of a run, by the names that ``Programs.wanted`` gives them."""


@dataclass(frozen=True)
class Site:
    """The model, devices and shapes that programs are compiled for.

    Attributes:
        networks: the model.
        mesh: the devices.
        latents: shape of the batch's latents.
        dtypes: dtype of each component's parameters.
    """

    networks: Networks
    mesh: Mesh
    latents: LatentShape
    dtypes: Mapping[str, DType]

    @property
    def loop(self) -> tuple[int, ...]:
        """The shape of the latents in the loop."""
        return self.networks.packing.shape(self.latents)

    @property
    def size(self) -> dict[str, int]:
        """Height and width of the images in pixels."""
        _, height, width, _ = self.latents
        return {"height": height * self.networks.vae.factor, "width": width * self.networks.vae.factor}

    def batched(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """Return the shape of an array that is split over the batch."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=over_batch(self.mesh))

    def reader(self, name: str, read: partial[Any], component: str, *shape: int, **facts: Any) -> ProgramSpec:
        """Return a program that reads an input of this shape, float32, for one image at a time."""
        alone = padded_batch(1, self.mesh)
        inputs = (self.batched((alone, *shape)),)
        return ProgramSpec(name, read, component, inputs, facts={"batch": alone, **facts})


class Addition:
    """An addition of a call to its programs: a frozen record, equal if the programs are equal."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its programs among those of a run."""
        return ()

    @property
    def components(self) -> tuple[str, ...]:
        """Components that the denoiser reads in addition to its own parameters."""
        return ()

    def programs(self, site: Site) -> dict[str, ProgramSpec]:
        """Return its programs by ``names``."""
        return {}

    def conditions(self, site: Site) -> Shapes:
        """Return the shapes of its conditions, which are given for each prompt."""
        return {}

    def read_by(self, text: TextEncoders) -> TextEncoders:
        """Return the text encoders with what they read of it."""
        return text

    def around(self, denoiser: Denoiser, networks: Networks) -> Denoiser:
        """Return the denoiser, in a wrapper if the addition has one."""
        return denoiser


A = TypeVar("A", bound=Addition)


class Kinds(NamedTuple):
    """The facts about a call that decide its programs, in addition to the shapes of its arrays.

    Attributes:
        guided: denoisers with guidance (True), without (False), or both.
        guidance: the rule of denoisers with guidance; the others use that of ``canvax.guidance.off``.
        decoder: "whole", "tiled" or None.
        lengths: length of the prompts for each text encoder; the shortest ones if empty.
        places: slots of adapters beside the weights, or None.
        adds: additions of the call, at most one of each class (``canvax.compile.additions``).
    """

    guided: tuple[bool, ...] = (True,)
    guidance: Guidance = PLAIN
    decoder: Literal["whole", "tiled", None] = "whole"
    lengths: tuple[int, ...] = ()
    places: Places | None = None
    adds: tuple[Addition, ...] = ()

    def adding(self, *adds: Addition | Any) -> Kinds:
        """Return these kinds with additions that replace those of the same class; ignore false values."""
        by_class = {type(add).__name__: add for add in (*self.adds, *adds) if add}
        return self._replace(adds=tuple(by_class[name] for name in sorted(by_class)))

    def without(self, kind: type[Addition]) -> Kinds:
        """Return these kinds without the addition of a class."""
        return self._replace(adds=tuple(add for add in self.adds if not isinstance(add, kind)))

    def of(self, kind: type[A]) -> A | None:
        """Return the addition of a class, or None."""
        return next((add for add in self.adds if isinstance(add, kind)), None)
