"""The programs of a model: ``encode_text``, ``encode_images``, ``denoise`` and ``decode``.

A program is decided by the networks, the shapes, the dtypes, the mesh and guidance on or off; nothing else.
Each is compiled once, ahead of its first call, so that compiling is seen and timed as what it is.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from canvax.compile.abstract import abstract_of, on_each_device
from canvax.compile.aot import Build, BuildCallback, CacheEntry, find_entry, load_or_compile
from canvax.compile.at_once import MODE, NotReady, at_once
from canvax.compile.kinds import TUNING, Kinds, LatentShape, PromptKind, Ready
from canvax.denoise import (
    IDLE_ROWS,
    WINDOW,
    Composed,
    DeepFeatures,
    InFlight,
    Known,
    StepInputs,
    Tuning,
    denoise,
)
from canvax.kernels.target import compile_or_fall_back
from canvax.models.beside import ADAPTERS, Places, with_places
from canvax.models.controlled import ControlledDenoiser, encode_control
from canvax.models.decode import decode_images, encode_images
from canvax.models.networks import Networks
from canvax.models.text import IMAGE_ENCODER, IMAGE_PROMPTS, Conditions, encode_text
from canvax.originals import replaced
from canvax.parallel.mesh import over_batch, padded_batch, replicated
from canvax.params import Params
from canvax.quantize import compute_dtype
from canvax.samplers.table import SLOTS
from canvax.types import Array

MOST_PROGRAMS = 64
"""Programs that stay in memory; of more, the one that was not used for longest goes."""

PLAIN = Kinds()


class _Answer(NamedTuple):
    """Of ``Programs.ready``: what was asked, the arrays of the parameters, not kept alive by it, and the programs."""

    asked: Any
    leaves: list[weakref.ref[Any]]
    ready: Ready


@dataclass(frozen=True)
class Programs:
    """Compiles the programs of one model on one mesh, and holds them.

    Attributes:
        networks: the model.
        mesh: the devices.
        precision: JAX matmul precision of float32 ("highest" is real float32 on TPU and GPU), None for the default.
        stacked: every parameter has a leading axis that holds one copy for each device, as in the old Flax pipelines.
    """

    networks: Networks
    mesh: Mesh
    precision: str | None = None
    stacked: bool = False
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _building: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _answers: deque[_Answer] = field(init=False, default_factory=lambda: deque(maxlen=8), repr=False, compare=False)

    def encode_text(
        self, params: Params, batch: int, announce: BuildCallback | None = None, places: Places | None = None
    ) -> Callable[..., Conditions]:
        """Program ``(text_params(params), {component: ids [B, 77] int32}, skip int32) -> text`` and pooled text.

        With ``places`` it is also given how much of each every image has: {component: [B, K] float32}.
        """
        text = replace(self.networks.text, places=places)
        ids = self._batched((batch, text.tokens), jnp.int32)
        weights = abstract_of(self.text_params(params, places))
        arguments: tuple[Any, ...] = weights, dict.fromkeys(text.parts, ids), self._shared((), jnp.int32)
        if places is not None:
            arguments += (dict.fromkeys(text.parts, self._batched((batch, places.count), jnp.float32)),)
        return self._get("text encoder", partial(encode_text, cfg=text), arguments, announce)

    def text_params(self, params: Params, places: Places | None = None) -> Params:
        """The parameters of the text encoders; with ``places`` those are among them."""
        return {name: with_places(params, name, places) for name in self.networks.text.parts}

    def text_dtypes(self, params: Params, batch: int, chunks: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what ``batch`` prompts of so many chunks are encoded to."""
        text = self.networks.text
        return text.conditions(batch, tuple(compute_dtype(params[name]) for name in text.parts), chunks)

    def denoise(
        self,
        params: Params,
        latents: LatentShape,
        kinds: Kinds = PLAIN,
        *,
        guided: bool,
        announce: BuildCallback | None = None,
    ) -> Callable[..., tuple[Array, Array, Array | None]]:
        """Program ``(denoiser_params(params, controls), StepInputs)`` for latents [B, h, w, C], of ``canvax.denoise``.

        ``kinds`` says what else it can do; ``guided`` stands in place of theirs.
        """
        denoiser = self.networks.controlled(kinds.controls, kinds.places)
        static: dict[str, Any] = {"denoiser": denoiser}
        static |= {"deep_layers": kinds.deep_layers} if kinds.deep_layers else {}
        static |= {"method": kinds.method} if kinds.method != "cfg" else {}
        weights = abstract_of(self.denoiser_params(params, kinds.controls, kinds.places))
        arguments = weights, self.step_inputs(params, latents, kinds, guided=guided)
        return self._get("denoiser", partial(denoise, **static), arguments, announce)

    def denoiser_params(self, params: Params, controls: Sequence[str] = (), places: Places | None = None) -> Params:
        """The parameters that ``denoise`` is given: the denoiser's, or with ``controls`` a dict of all networks'."""
        component = self.networks.denoiser.component
        own = with_places(params, component, places)
        return {component: own, **{name: params[name] for name in controls}} if controls else own

    def encode_control(
        self, params: Params, name: str, shape: tuple[int, int, int, int], announce: BuildCallback | None = None
    ) -> Callable[..., tuple[Array, ...]]:
        """Program ``(params[name], images [B, H, W, 3] float32 in 0..1) ->`` what a network keeps of control images."""
        arguments = (abstract_of(params[name]), self._batched(shape, jnp.float32))
        read = partial(encode_control, net=dict(self.networks.controls)[name])
        return self._get("control encoder", read, arguments, announce)

    def encode_image_prompt(self, params: Params, announce: BuildCallback | None = None) -> Callable[..., Any]:
        """Program ``(params["image_encoder"], images [B, S, S, 3] float32 in 0..1) ->`` CLIP's vectors and features."""
        from canvax.models.ip_adapter import encode_image_prompt  # which most calls never need

        net = self.networks.image_encoder
        assert net is not None
        shape = (padded_batch(1, self.mesh), net.cfg.image_size, net.cfg.image_size, 3)
        arguments = (abstract_of(params[IMAGE_ENCODER]), self._batched(shape, jnp.float32))
        return self._get("image prompt encoder", partial(encode_image_prompt, net=net), arguments, announce)

    def read_image_prompt(
        self, params: Params, kind: PromptKind, announce: BuildCallback | None = None
    ) -> Callable[..., Any]:
        """Program ``(params[name], what an adapter reads [B, ...] float32) -> keys and values``."""
        from canvax.models.ip_adapter import read_image_prompt

        net = dict(self.networks.ip_adapters)[kind.component]
        shape = (padded_batch(1, self.mesh), *kind.reads)
        arguments = (abstract_of(params[kind.component]), self._batched(shape, jnp.float32))
        return self._get("image prompt encoder", partial(read_image_prompt, net=net), arguments, announce)

    def decode(
        self, params: Params, latents: LatentShape, announce: BuildCallback | None = None, *, tiled: bool = False
    ) -> Callable[..., Array]:
        """Program ``(params["vae"], latents [B, h, w, C] float32) -> images [B, H, W, 3] float32 in 0..1``.

        ``tiled``: tile by tile, in less memory.
        """
        arguments = (abstract_of(params["vae"]), self._batched(latents, jnp.float32))
        static = {"tiled": True} if tiled else {}
        return self._get("decoder", partial(decode_images, cfg=self.networks.vae, **static), arguments, announce)

    def encode_images(
        self,
        params: Params,
        shape: tuple[int, int, int, int],
        announce: BuildCallback | None = None,
        *,
        tiled: bool = False,
    ) -> Callable[..., tuple[Array, Array]]:
        """Program ``(params["vae"], images [B, H, W, 3] float32 in 0..1) -> mean, deviation``; as ``decode``."""
        arguments = (abstract_of(params["vae"]), self._batched(shape, jnp.float32))
        static = {"tiled": True} if tiled else {}
        encode = partial(encode_images, cfg=self.networks.vae, **static)
        return self._get("image encoder", encode, arguments, announce)

    def ready(self, params: Params, latents: LatentShape, kinds: Kinds, announce: BuildCallback | None = None) -> Ready:
        """All programs of a run on latents [B, h, w, C], made at the same time.

        ``params`` are the parameters or their shapes; ``announce`` is called for each program.
        """
        # Looking at the thousands of arrays of a model takes 3 to 30 ms, which a call like one before need not do. A
        # few are kept, for who goes to and fro between tasks or sizes. What differs soonest is compared first.
        leaves, structure = jax.tree.flatten(params)
        asked = latents, kinds, jax.config.values["jax_default_matmul_precision"], replaced(), structure
        for last in tuple(self._answers):
            if last.asked == asked and all(ref() is leaf for ref, leaf in zip(last.leaves, leaves, strict=True)):
                return last.ready
        encode, decode, encode_image, *rest = at_once(self._calls(params, latents, kinds, announce))
        denoisers = dict(zip(kinds.guided, rest, strict=False))  # what is left are encoders of other images
        controls = dict(zip(kinds.controls, rest[len(denoisers) :], strict=False))
        readers = [*(kind.component for kind in kinds.image_prompts), *([IMAGE_ENCODER] if kinds.sees else [])]
        prompts = dict(zip(readers, rest[len(denoisers) + len(controls) :], strict=True))
        ready = Ready(encode, denoisers, decode, encode_image, controls, prompts)
        if all(isinstance(leaf, Array) for leaf in leaves):
            self._answers.append(_Answer(asked, [weakref.ref(leaf) for leaf in leaves], ready))
        return ready

    def denoisers(
        self, params: Params, latents: LatentShape, kinds: Kinds, announce: BuildCallback | None = None
    ) -> Mapping[bool, Callable[..., Any]]:
        """The denoisers of ``ready`` alone, for batches that texts and images are encoded for one by one."""
        calls = self._calls(params, latents, kinds, announce)[3 : 3 + len(kinds.guided)]
        return dict(zip(kinds.guided, at_once(calls), strict=True))

    def stored(self, params: Params, latents: LatentShape, kinds: Kinds) -> list[dict[str, Any]] | None:
        """What the cache tells of the programs that ``ready`` would use; None if one would be compiled."""
        token = MODE.set("stored")
        try:
            return [call() for call in self._calls(params, latents, kinds, None) if call]
        except NotReady:
            return None
        finally:
            MODE.reset(token)

    def _calls(
        self, params: Params, latents: LatentShape, kinds: Kinds, announce: BuildCallback | None
    ) -> list[Callable[[], Any] | None]:
        """Text encoder, decoder, image encoder (None if not asked for), denoisers, other encoders: to be called."""
        factor, alone = self.networks.vae.factor, padded_batch(1, self.mesh)
        pixels = (alone, latents[1] * factor, latents[2] * factor, 3)
        return [
            partial(self.encode_text, params, latents[0], announce, kinds.places),
            partial(self.decode, params, latents, announce, tiled=kinds.decoder == "tiled") if kinds.decoder else None,
            partial(self.encode_images, params, pixels, announce, tiled=kinds.image_encoder == "tiled")
            if kinds.image_encoder
            else None,
            *(partial(self.denoise, params, latents, kinds, guided=g, announce=announce) for g in kinds.guided),
            *(partial(self.encode_control, params, name, pixels, announce) for name in kinds.controls),
            *(partial(self.read_image_prompt, params, kind, announce) for kind in kinds.image_prompts),
            *([partial(self.encode_image_prompt, params, announce)] if kinds.sees else []),
        ]

    def step_inputs(self, params: Params, latents: LatentShape, kinds: Kinds = PLAIN, *, guided: bool) -> StepInputs:
        """Shapes, dtypes and shardings of what the denoiser is given."""
        batch = latents[0]
        rows = {name: self._batched((batch, *column.shape), column.dtype) for name, column in IDLE_ROWS.items()}
        needed = None
        if isinstance(denoiser := self.networks.controlled(kinds.controls), ControlledDenoiser):
            read = (WINDOW, len(kinds.controls))
            rows["control"] = self._batched((batch, *read, 2, denoiser.layers), jnp.float32)
            needed = self._shared(read, jnp.bool_)
        noisy, count = self._shared((WINDOW,), jnp.bool_), self._shared((), jnp.int32)
        deep = None
        if kinds.deep_layers:
            shape = deep_features_shape(self.networks, latents, kinds.deep_layers, guided=guided)
            dtype = compute_dtype(params[self.networks.denoiser.component])
            weights = self._shared((WINDOW, 2), jnp.float32)
            deep = DeepFeatures(self._batched(shape, dtype), noisy, weights)
        flight = self._in_flight(params, latents, kinds, guided)
        return StepInputs(*flight[:3], rows, flight.keys, noisy, count, deep, *flight[4:], needed)

    def _in_flight(self, params: Params, latents: LatentShape, kinds: Kinds, guided: bool) -> InFlight:
        encoded = self.text_dtypes(params, latents[0], kinds.chunks)
        conditions: Any = {name: self._batched(leaf.shape, leaf.dtype) for name, leaf in encoded.items()}
        if numbers := self.networks.size_numbers:
            conditions["time_ids"] = self._batched((latents[0], numbers), jnp.float32)
        if self.networks.inpaints:
            conditions["masked"] = self._batched((*latents[:3], latents[3] + 1), jnp.float32)
        if self.networks.embeds_guidance:
            conditions["guidance"] = self._batched((latents[0],), jnp.float32)
        if kinds.places:
            conditions[ADAPTERS] = self._batched((latents[0], kinds.places.count), jnp.float32)
        for name, net in self.networks.controls:
            if name in kinds.controls:
                dtype = compute_dtype(params[name])
                conditions[name] = tuple(self._batched(shape, dtype) for shape in net.features(latents))
        if kinds.image_prompts:
            told = {kind.component: self._image_kv(params, kind, latents) for kind in kinds.image_prompts}
            conditions[IMAGE_PROMPTS] = told
        return InFlight(
            self._batched((latents[0], SLOTS, *latents[1:]), jnp.float32),
            conditions,
            conditions if guided else None,
            self._batched((latents[0], 2), jnp.uint32),
            Known(
                self._batched((*latents[:3], 1), jnp.float32),
                self._batched(latents, jnp.float32),
                self._batched((latents[0],), jnp.bool_),
            )
            if kinds.known
            else None,
            Composed((conditions,) * (kinds.parts - 1), self._batched((latents[0], kinds.parts), jnp.float32))
            if kinds.parts
            else None,
            Tuning(**{name: self._batched((latents[0], TUNING[name]), jnp.float32) for name in kinds.tuned}),
        )

    def _image_kv(self, params: Params, kind: PromptKind, latents: LatentShape) -> dict[str, Any]:
        """What one adapter has read for ``latents``, as ``canvax.models.ip_adapter.ImageKV``."""
        from canvax.models.ip_adapter import masked_levels

        net = dict(self.networks.ip_adapters)[kind.component]
        dtype, each = compute_dtype(params[kind.component]), (latents[0], kind.images)
        tokens = kind.reads[0] if net.kind == "full" else net.tokens
        shapes = [(*each, tokens, layer.heads, layer.channels // layer.heads) for layer in net.attentions]
        told: dict[str, Any] = {"kv": tuple((self._batched(shape, dtype),) * 2 for shape in shapes)}
        told["scale"] = self._batched((*each, len(shapes)), jnp.float32)
        if kind.masked:
            levels = masked_levels(net.unet, latents)
            told["masks"] = tuple(self._batched((latents[0], h * w, kind.images), jnp.float32) for h, w in levels)
        return told

    def _batched(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=over_batch(self.mesh))

    def _shared(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

    def _get(
        self, name: str, function: partial[Any], arguments: tuple[Any, ...], announce: BuildCallback | None
    ) -> Callable[..., Any]:
        leaves, structure = jax.tree.flatten(arguments)
        signature = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        ambient = jax.config.values["jax_default_matmul_precision"]  # may be set around a single image
        static = tuple(sorted(function.keywords.items(), key=str))
        key = (name, static, structure, signature, ambient, replaced())
        program, mode = self._held(key), MODE.get()
        if mode == "stored":
            entry = self._entry(name, function, arguments)
            header = entry.stored() if entry else {}
            if header or program:
                return header  # pyright: ignore[reportReturnType]
        elif program:
            return program
        if mode:
            raise NotReady
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            program = self._held(key)
            if program is None:
                program = self._build(name, function, arguments, announce)
                with self._lock:
                    self._compiled[key] = program
                    while len(self._compiled) > MOST_PROGRAMS:
                        del self._compiled[next(iter(self._compiled))]
        with self._lock:
            self._building.pop(key, None)
        return program

    def _held(self, key: Any) -> Callable[..., Any] | None:
        """The program, which becomes the last used; None if it is not there."""
        with self._lock:
            program = self._compiled.pop(key, None)
            if program is not None:
                self._compiled[key] = program
            return program

    def _build(
        self, name: str, function: partial[Any], arguments: tuple[Any, ...], announce: BuildCallback | None
    ) -> Callable[..., Any]:
        entry = self._entry(name, function, arguments)
        return load_or_compile(name, partial(self._compile, function, arguments), entry, announce or _silent)

    def _entry(self, name: str, function: partial[Any], arguments: tuple[Any, ...]) -> CacheEntry | None:
        decisive = {"precision": self.precision, "stacked": self.stacked}
        return find_entry(function, arguments, self.mesh, self._describe(name, arguments), **decisive)

    def _describe(self, name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """What ``canvax cache`` tells of a program."""
        weights = jax.tree.leaves(arguments[0])
        data = jax.tree.leaves(arguments[1])[0]
        description = {
            "program": name,
            "parameters": sum(math.prod(leaf.shape) for leaf in weights),
            "dtype": str(compute_dtype(arguments[0])),
            "batch": data.shape[0],
        }
        if name not in ("text encoder", "image prompt encoder"):
            factor = 1 if name in ("image encoder", "control encoder") else self.networks.vae.factor
            height, width = (side * factor for side in data.shape[-3:-1])
            description |= {"height": height, "width": width}
        if name == "denoiser":
            inputs: StepInputs = arguments[1]
            description |= {"guided": inputs.negative is not None, "reuse": inputs.deep is not None}
        return description

    def _compile(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, bool]:
        """The compiled program, and whether it may be stored for other processes."""
        precision = jax.default_matmul_precision(self.precision) if self.precision else nullcontext()
        if self.stacked:
            function = on_each_device(function, self.mesh, arguments)
        with precision:
            out = over_batch(self.mesh)
            return compile_or_fall_back(self.mesh, function, *arguments, split=not self.stacked, out_shardings=out)


def deep_features_shape(
    networks: Networks, latents: Sequence[int], deep_layers: int, *, guided: bool
) -> tuple[int, ...]:
    """Shape of ``DeepFeatures.features`` for latents [B, h, w, C]; before the first full row they are zeros."""
    batch, *deep = networks.denoiser.deep_shape(latents, deep_layers)
    return (2 * batch if guided else batch, 2, *deep)


def _silent(build: Build) -> None:
    del build
