"""The programs of a model on a mesh: select those that a call needs, and compile each once.

Networks, shapes, dtypes, mesh and guidance on or off decide a program; nothing else does. Each is compiled ahead of its
first call, so that compiling is shown and timed separately.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from canvax.compile import cache
from canvax.compile.abstract import abstract_of, on_each_device
from canvax.compile.additions import DeepFeatures, Keeps
from canvax.compile.aot import Build, BuildCallback, CacheEntry, find_entry, load_or_compile, plain_settings
from canvax.compile.at_once import at_once
from canvax.compile.features import Features
from canvax.compile.kinds import DENOISERS, Compiled, Kinds, LatentShape, ProgramSpec, Ready, Site
from canvax.denoise import IDLE_ROWS, WINDOW, InFlight, Known, StepInputs, denoise
from canvax.guidance import PROMPT, columns_of, memory_of, off
from canvax.kernels.target import code_of, compile_or_fall_back
from canvax.models.beside import ADAPTERS
from canvax.models.decode import decode_images, decode_packed
from canvax.models.networks import Networks
from canvax.models.text import TextEncoders, encode_and_join
from canvax.originals import foreign, replaced
from canvax.parallel.memory import check_layers, cures
from canvax.parallel.mesh import over_batch, replicated
from canvax.parallel.place import on_host
from canvax.params import Params
from canvax.quantize import compute_dtype
from canvax.samplers.table import SLOTS
from canvax.types import Array, DType

MOST_PROGRAMS = 64
"""The most programs in memory; the one that was used longest ago is dropped first."""

LARGE = 4
"""Images of as many times the pixels that a model was trained for are compared with the memory before compiling."""

PLAIN = Kinds()


class _CachedReady(NamedTuple):
    """Programs that ``Programs.ready`` returned for a request and for arrays of parameters (weak references)."""

    request: Any
    leaves: list[weakref.ref[Any]]
    ready: Ready


class _Call(NamedTuple):
    """A program with the abstract arguments that it is compiled for, and its key in memory."""

    program: ProgramSpec
    arguments: tuple[Any, ...]
    key: Any


@dataclass(frozen=True)
class Programs:
    """Compiles the programs of one model on one mesh, and holds them.

    Attributes:
        networks: the model.
        mesh: the devices.
        precision: JAX matmul precision of float32 ("highest" is real float32 on TPU and GPU), None for the default.
        stacked: every parameter has a leading axis that holds one copy for each device, as in the old Flax pipelines.
        described: the devices are those of a plan, or only figures are wanted: what does not fit is compiled as well.
        features: the outputs of its encoders, by content.
    """

    networks: Networks
    mesh: Mesh
    precision: str | None = None
    stacked: bool = False
    described: bool = False
    features: Features = field(default_factory=Features, repr=False, compare=False)
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _building: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _recent: deque[_CachedReady] = field(init=False, default_factory=lambda: deque(maxlen=8), repr=False, compare=False)

    def wanted(self, params: Params, latents: LatentShape, kinds: Kinds = PLAIN) -> dict[str, ProgramSpec]:
        """Return the programs of a run on latents [B, h, w, C].

        text encoder            what each text encoder reads -> conditions, and the outputs of each encoder; see
                                ``canvax.models.text.encode_and_join``
        decoder                 latents float32, as the loop has them -> images [B, H, W, 3] float32 in 0..1
        image encoder           images [1, H, W, 3] float32 in 0..1 -> mean, deviation; for each size of a reference
                                image, too
        denoiser                ``StepInputs``, as ``canvax.denoise``
        guided denoiser         the same with the negative prompt
        the component of a network that reads control images or image prompts: an image -> its encoding

        Args:
            params: the parameters or their shapes, whose dtypes decide.
            latents: shape of the batch's latents.
            kinds: the facts about the call that decide.
        """
        dtypes = {name: compute_dtype(part) for name, part in params.items() if name in self.networks.components}
        return self._wanted(dtypes, latents, kinds)

    def ready(
        self, params: Params, latents: LatentShape, kinds: Kinds = PLAIN, announce: BuildCallback | None = None
    ) -> Ready:
        """Return the programs of ``wanted``, compiled at the same time.

        ``params`` are the parameters or their shapes; ``announce`` is called for each program that is made.
        """
        # Checking the thousands of arrays of a model takes 3 to 30 ms, which a call like an earlier one can skip. A few
        # are kept, for users who switch between tasks or sizes. The part that differs most often is compared first.
        leaves, structure = jax.tree.flatten(params)
        code = replaced(), foreign(self.networks, kinds)
        request = latents, kinds, jax.config.values["jax_default_matmul_precision"], code, structure
        for last in tuple(self._recent):
            if last.request == request and all(ref() is leaf for ref, leaf in zip(last.leaves, leaves, strict=True)):
                return last.ready
        ready = self.compile(params, self.wanted(params, latents, kinds), announce)
        if all(isinstance(leaf, Array) for leaf in leaves):
            self._recent.append(_CachedReady(request, [weakref.ref(leaf) for leaf in leaves], ready))
        return ready

    def compile(
        self, params: Params, wanted: Mapping[str, ProgramSpec], announce: BuildCallback | None = None
    ) -> dict[str, Compiled]:
        """Return the ``wanted`` programs; compile those that are missing at the same time."""
        calls = {name: self._call(params, program) for name, program in wanted.items()}
        programs = {name: program for name, call in calls.items() if (program := self._held(call.key))}
        missing = [name for name in calls if name not in programs]
        made = at_once([partial(self._made, calls[name], announce) for name in missing])
        programs.update(zip(missing, made, strict=True))
        return {name: Compiled(call.program, programs[name]) for name, call in calls.items()}

    def program(
        self,
        name: str,
        params: Params,
        latents: LatentShape,
        kinds: Kinds = PLAIN,
        announce: BuildCallback | None = None,
    ) -> Compiled:
        """Return one of the programs of a run; ``params`` only need the components that it reads."""
        return self.compile(params, {name: self.wanted(params, latents, kinds)[name]}, announce)[name]

    def _wanted(self, dtypes: Mapping[str, DType], latents: LatentShape, kinds: Kinds) -> dict[str, ProgramSpec]:
        networks, batch, places = self.networks, latents[0], kinds.places
        site = Site(networks, self.mesh, latents, dtypes)
        text = replace(self._text(kinds), places=places)
        inputs: tuple[Any, ...] = (
            jax.tree.map(lambda leaf: site.batched((batch, *leaf.shape), leaf.dtype), text.inputs(kinds.lengths)),
        )
        if places is not None:
            inputs += (dict.fromkeys(text.names, site.batched((batch, places.count))),)
        encode, facts = partial(encode_and_join, cfg=text), {"batch": batch}
        programs = {"text encoder": ProgramSpec("text encoder", encode, text.names, inputs, places, facts)}
        if kinds.decoder:
            decode = partial(decode_images, cfg=networks.vae, **({"tiled": True} if kinds.decoder == "tiled" else {}))
            if site.loop != latents:
                decode = partial(decode_packed, packing=networks.packing, size=latents[1:3], **decode.keywords)
            facts = {"batch": batch, **site.size}
            programs["decoder"] = ProgramSpec("decoder", decode, "vae", (site.batched(site.loop),), facts=facts)
        programs |= {DENOISERS[guided]: self._denoiser(site, kinds, guided=guided) for guided in kinds.guided}
        return programs | {name: program for add in kinds.adds for name, program in add.programs(site).items()}

    def _text(self, kinds: Kinds) -> TextEncoders:
        """Return the text encoders with what they read of a call besides its prompts."""
        text = self.networks.text
        for add in kinds.adds:
            text = add.read_by(text)
        return text

    def _denoiser(self, site: Site, kinds: Kinds, *, guided: bool) -> ProgramSpec:
        networks, loop, dtypes, batch = self.networks, site.loop, site.dtypes, site.latents[0]
        guidance = kinds.guidance if guided else off(kinds.guidance)
        denoiser = networks.denoiser_of(guidance.samples)
        for add in kinds.adds:
            denoiser = add.around(denoiser, networks)
        text = self._text(kinds).conditions(batch, tuple(dtypes[name] for name in networks.text.names), kinds.lengths)
        reads = denoiser.inputs(loop, text, dtypes.__getitem__)
        sizes = networks.packing.sizes(batch, site.latents[2])
        shapes = {name: jax.ShapeDtypeStruct(size.shape, size.dtype) for name, size in sizes.items()}
        conditions = {**text, **reads.conditions, **shapes}
        if kinds.places is not None:
            conditions[ADAPTERS] = jax.ShapeDtypeStruct((batch, kinds.places.count), jnp.float32)
        for add in kinds.adds:
            conditions |= add.conditions(site)
        prompts = (conditions,) * (guided + guidance.samples.count(PROMPT))
        image = jax.ShapeDtypeStruct(loop, jnp.float32)
        flight = InFlight(
            jax.ShapeDtypeStruct((batch, SLOTS + memory_of(guidance), *loop[1:]), jnp.float32),
            prompts,
            jax.ShapeDtypeStruct((batch, 2), jnp.uint32),
            Known(image, image, jax.ShapeDtypeStruct((batch,), jnp.bool_)) if kinds.of(Keeps) else None,
        )
        columns = {**reads.columns, **columns_of(guidance)}
        rows = {name: (column.shape, column.dtype) for name, column in IDLE_ROWS.items()}
        rows |= {name: ((WINDOW, *column.shape), column.dtype) for name, column in columns.items()}
        shared = {"noisy": jax.ShapeDtypeStruct((), jnp.bool_), **reads.shared}
        samples = batch * len(guidance.samples)
        memory = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((samples, *leaf.shape), leaf.dtype), reads.memory)
        inputs = StepInputs(
            self._split(flight),
            {name: site.batched((batch, *shape), dtype) for name, (shape, dtype) in rows.items()},
            {name: self._whole((WINDOW, *column.shape), column.dtype) for name, column in shared.items()},
            self._one(),
            self._split(memory),
        )
        static: dict[str, Any] = {"denoiser": denoiser, "guidance": guidance, "places": kinds.places}
        further = tuple(name for add in kinds.adds for name in add.components)
        components = (denoiser.component, *further) if further else denoiser.component
        facts = {"batch": batch, **site.size, "guided": guided, "reuse": kinds.of(DeepFeatures) is not None}
        return ProgramSpec("denoiser", partial(denoise, **static), components, (inputs,), kinds.places, facts)

    def _split(self, shapes: Any) -> Any:
        """Return shapes of arrays that are split over the batch."""
        split = over_batch(self.mesh)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), shapes)

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

    def _one(self) -> jax.ShapeDtypeStruct:
        """Return the shape of an int32 scalar."""
        return self._whole((), jnp.int32)

    def _call(self, params: Params, program: ProgramSpec) -> _Call:
        arguments = (program.weights(params, abstract_of), *program.inputs)
        leaves, structure = jax.tree.flatten(arguments)
        signature = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        ambient = jax.config.values["jax_default_matmul_precision"]  # may be set around a single image
        static = tuple(sorted(program.function.keywords.items(), key=str))
        code = replaced(), foreign(program.function.keywords)
        return _Call(program, arguments, (program.name, static, structure, signature, ambient, code))

    def _made(self, call: _Call, announce: BuildCallback | None) -> Callable[..., Any]:
        """Return the program, compiled by one thread while others wait."""
        with self._lock:
            building = self._building.setdefault(call.key, threading.Lock())
        with building:
            program = self._held(call.key)
            if program is None:
                compile = partial(self._compile, call)
                program = load_or_compile(
                    call.program.name, compile, self._entry(call, lower=True), announce or _silent
                )
                with self._lock:
                    self._compiled[call.key] = program
                    while len(self._compiled) > MOST_PROGRAMS:
                        del self._compiled[next(iter(self._compiled))]
        with self._lock:
            self._building.pop(call.key, None)
        return program

    def _check_memory(self, call: _Call, jaxpr: Any) -> None:
        """Refuse a traced program for large images that cannot fit, before the minutes of compiling.

        Raises:
            OutOfMemoryError: a layer of it needs more memory than is free.
        """
        (tall, wide), facts = self.networks.native_size, call.program.facts
        size = {name: facts[name] for name in ("batch", "height", "width") if "height" in facts}
        if self.described or self.stacked or math.prod(size.values()) < LARGE * tall * wide:
            return
        weights = call.arguments[0]
        quantized = any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(weights))
        cure = partial(cures, self.mesh, compute_dtype(weights).name, quantized=quantized, **size)
        check_layers(call.program.name, jaxpr, self.mesh, cure)

    def _held(self, key: Any) -> Callable[..., Any] | None:
        """Return the program and mark it as used last; None if it is not compiled."""
        with self._lock:
            program = self._compiled.pop(key, None)
            if program is not None:
                self._compiled[key] = program
            return program

    def entry(self, name: str, params: Params, wanted: Sequence[ProgramSpec]) -> CacheEntry | None:
        """Return the place of an entry ``name`` about programs; None if one of them is not stored."""
        entries = [entry for program in wanted if (entry := self._entry(self._call(params, program)))]
        return entries[0].derived(name, entries[1:]) if len(entries) == len(wanted) else None

    def _entry(self, call: _Call, *, lower: bool = False) -> CacheEntry | None:
        """Return the place of a program in the cache; None if it is not stored.

        The names of user code may mean something else in other processes, so that its lowered code is in the key. It is
        only lowered with ``lower``.
        """
        function, decisive = call.program.function, {"precision": self.precision, "stacked": self.stacked}
        if foreign(function):
            if not lower or (code := self._lowered(call)) is None:
                return None
            function, decisive = partial(function.func), {**decisive, "code": code}
        description = call.program.description(call.arguments[0])
        return find_entry(function, call.arguments, self.mesh, description, **decisive)

    def _lowered(self, call: _Call) -> str | None:
        """Return a digest of a program's lowered code, which JAX holds for compiling; None if that is not all of it."""
        if cache.cache_path() is None:
            return None
        with plain_settings(), self._compiling(call) as (function, options):
            try:
                code = code_of(self.mesh, function, *call.arguments, **options)
            except (AttributeError, RuntimeError) as error:  # compiling reports or mends it
                cache.logger.debug("%s cannot be stored: %s", call.program.name, error)
                return None
        if code is None:
            cache.logger.debug("%s cannot be stored: JAX passes its constants as arguments", call.program.name)
        return code

    def _compile(self, call: _Call) -> tuple[Any, bool]:
        """Return the compiled program, and whether it may be stored for other processes."""
        arguments, check = call.arguments, partial(self._check_memory, call)
        streams = any(map(on_host, jax.tree.leaves(arguments)))
        with self._compiling(call) as (function, options):
            return compile_or_fall_back(self.mesh, function, *arguments, check=check, streams=streams, **options)

    @contextmanager
    def _compiling(self, call: _Call) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
        """Set the precision in the ``with`` block; yield the function to compile and further arguments."""
        function = call.program.function
        if self.stacked:
            function = on_each_device(function, self.mesh, call.arguments)
        with jax.default_matmul_precision(self.precision) if self.precision else nullcontext():
            yield function, {"split": not self.stacked, "out_shardings": over_batch(self.mesh)}


def _silent(build: Build) -> None:
    del build
