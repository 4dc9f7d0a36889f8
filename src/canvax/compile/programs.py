"""The three programs of a model: ``encode_text``, ``denoise``, ``decode``.

A program is decided by the config, the shapes, the dtypes, the mesh, guidance on or off and the clip; nothing else.
Each is compiled once, ahead of its first call, so that compiling is seen and timed as what it is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.compile.aot import Build, BuildCallback, find_entry, load_or_compile
from canvax.denoise import WINDOW, Reuse, denoise, features_shape
from canvax.kernels.target import batch_shards, compiled_on
from canvax.models.configs import UNetConfig, VaeConfig
from canvax.models.text import SECOND, Conditions, TextEncoders, encode_text
from canvax.models.vae import divisor, vae_decode, vae_decode_tiled
from canvax.parallel.mesh import over_batch, replicated
from canvax.params import Params
from canvax.samplers.table import SLOTS, Clip
from canvax.types import Array

PROGRAMS = ("text encoder", "denoiser", "decoder")
"""What they are called where they are announced."""


@dataclass(frozen=True)
class Programs:
    """Compiles the programs of one model on one mesh, and keeps them.

    Attributes:
        text: configs of the text encoders.
        unet: config of the UNet.
        vae: config of the autoencoder.
        mesh: the devices.
        precision: JAX matmul precision of float32 ("highest" is real float32 on TPU and GPU), None for the default.
        stacked: every parameter has a leading axis that holds one copy for each device, as in the old Flax pipelines.
    """

    text: TextEncoders
    unet: UNetConfig
    vae: VaeConfig
    mesh: Mesh
    precision: str | None = None
    stacked: bool = False
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _building: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def encode_text(
        self, params: Params, batch: int, announce: BuildCallback | None = None
    ) -> Callable[..., Conditions]:
        """Program ``(text_params(params), {component: ids [B, 77] int32}, skip int32) -> text`` and pooled text."""
        ids = self._batched((batch, self.text.tokens), jnp.int32)
        arguments = (
            _abstract(self.text_params(params)),
            dict.fromkeys(self.text.parts, ids),
            self._shared((), jnp.int32),
        )
        return self._get("text encoder", partial(encode_text, cfg=self.text), arguments, announce)

    def text_params(self, params: Params) -> Params:
        """The parameters of the text encoders."""
        return {name: params[name] for name in self.text.parts}

    def denoise(
        self,
        params: Params,
        latents: tuple[int, int, int, int],
        *,
        guided: bool,
        clip: Clip | None = None,
        layers: int = 0,
        merging: float = 0.0,
        announce: BuildCallback | None = None,
    ) -> Callable[..., tuple[Array, Array, Array | None]]:
        """Program with the arguments of :func:`canvax.denoise.denoise`, for latents of shape [B, h, w, C].

        With ``layers`` it can reuse what lies deeper (:class:`canvax.denoise.Reuse`); ``merging`` is the part of the
        tokens that it merges.
        """
        batch = latents[0]
        conditions = self._conditions(params, batch)
        f32 = jnp.float32
        rows = {name: self._batched((batch, WINDOW), f32) for name in _SCALARS}
        rows["row"] = self._batched((batch, WINDOW), jnp.int32)
        rows["M"] = self._batched((batch, WINDOW, SLOTS, SLOTS + 2), f32)
        rows["raw"] = self._batched((batch, WINDOW, SLOTS), f32)
        arguments = (
            _abstract(params["unet"]),
            self._batched((batch, SLOTS, *latents[1:]), f32),
            conditions,
            conditions if guided else None,
            rows,
            self._batched((batch, 2), jnp.uint32),
            self._shared((WINDOW,), jnp.bool_),
            self._shared((), jnp.int32),
            self._reuse(params, latents, guided, layers) if layers else None,
        )
        more = {name: value for name, value in (("layers", layers), ("merging", merging)) if value}
        return self._get("denoiser", partial(denoise, cfg=self.unet, clip=clip, **more), arguments, announce)

    def _reuse(self, params: Params, latents: tuple[int, int, int, int], guided: bool, layers: int) -> Reuse:
        shape = features_shape(self.unet, latents, layers, guided=guided)
        features = self._batched(shape, params["unet"]["conv_in"]["weight"].dtype)
        return Reuse(features, self._shared((WINDOW,), jnp.bool_), self._shared((WINDOW, 2), jnp.float32))

    def decode(
        self,
        params: Params,
        latents: tuple[int, int, int, int],
        announce: BuildCallback | None = None,
        *,
        tiled: bool = False,
    ) -> Callable[..., Array]:
        """Program ``(params["vae"], latents [B, h, w, C] float32) -> images [B, H, W, 3] float32 in 0..1``.

        ``tiled``: tile by tile, in less memory.
        """
        arguments = (_abstract(params["vae"]), self._batched(latents, jnp.float32))
        more = {"tiled": True} if tiled else {}
        return self._get("decoder", partial(decode_images, cfg=self.vae, **more), arguments, announce)

    def _conditions(self, params: Params, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What the UNet is told: the text encoders' output and, for SDXL, the numbers about the picture."""
        dtype = jnp.result_type(*(_dtype(params, name) for name in self.text.parts))
        told = {"text": self._batched((batch, self.text.tokens, self.text.width), dtype)}
        pooled = self.text.pooled_width
        if pooled:
            told["pooled"] = self._batched((batch, pooled), _dtype(params, SECOND))
            told["time_ids"] = self._batched((batch, self.unet.time_ids(pooled)), jnp.float32)
        return told

    def _batched(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=over_batch(self.mesh))

    def _shared(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

    def _get(
        self,
        name: str,
        function: partial[Any],
        arguments: tuple[Any, ...],
        announce: BuildCallback | None,
    ) -> Callable[..., Any]:
        leaves, structure = jax.tree.flatten(arguments)
        signature = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        ambient = jax.config.values["jax_default_matmul_precision"]  # may be set around a single picture
        key = (name, tuple(sorted(function.keywords.items(), key=str)), structure, signature, ambient)
        if key in self._compiled:
            return self._compiled[key]
        if _READY_ONLY.get():
            raise _NotReady
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            if key not in self._compiled:
                self._compiled[key] = self._build(name, function, arguments, announce)
            return self._compiled[key]

    def _build(
        self,
        name: str,
        function: partial[Any],
        arguments: tuple[Any, ...],
        announce: BuildCallback | None,
    ) -> Callable[..., Any]:
        more = {"precision": self.precision, "stacked": self.stacked}
        about = self._about(name, arguments, function.keywords)
        entry = find_entry(function, arguments, self.mesh, about, **more)
        return load_or_compile(name, partial(self._compile, function, arguments), entry, announce or _silent)

    def _about(self, name: str, arguments: tuple[Any, ...], static: Mapping[str, Any]) -> dict[str, Any]:
        """What ``canvax cache`` tells of a program."""
        weights = jax.tree.leaves(arguments[0])
        data = jax.tree.leaves(arguments[1])[0]
        about = {
            "program": name,
            "parameters": sum(math.prod(leaf.shape) for leaf in weights),
            "dtype": str(weights[0].dtype),
            "batch": data.shape[0],
        }
        if name != "text encoder":
            height, width = (side * self.vae.factor for side in data.shape[-3:-1])
            about |= {"height": height, "width": width}
        if name == "denoiser":
            about |= {"guided": arguments[3] is not None, "reuse": arguments[8] is not None}
            about["merging"] = static.get("merging", 0.0)
        return about

    def _compile(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, bool]:
        """The compiled program, and whether it may be kept for other processes."""
        precision = jax.default_matmul_precision(self.precision) if self.precision else nullcontext()
        if self.stacked:
            function = _on_each_device(function, self.mesh, arguments)
        with precision:
            out = over_batch(self.mesh)
            return compiled_on(self.mesh, function, *arguments, split=not self.stacked, out_shardings=out), True


_READY_ONLY: ContextVar[bool] = ContextVar("ready_only", default=False)
"""Whether a program that has to be made first is not wanted."""


class _NotReady(Exception):
    """There is no such program yet."""


def at_once(calls: Sequence[Callable[[], Callable[..., Any] | None]]) -> list[Any]:
    """What ``calls`` return, made at the same time: most of XLA's work on a program keeps a single processor busy.

    Where all of it is there already, as for every picture but the first, no thread is started. Ctrl-C does not wait
    for the compiler, which cannot be stopped.
    """
    token = _READY_ONLY.set(True)
    try:
        return [call() for call in calls]
    except _NotReady:
        pass
    finally:
        _READY_ONLY.reset(token)
    precision = jax.config.values["jax_default_matmul_precision"]  # what is set in a context holds in its thread alone

    made: list[Future[Any]] = [Future() for _ in calls]

    def one(call: Callable[[], Any], result: Future[Any]) -> None:
        try:
            with jax.default_matmul_precision(precision):
                result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    for call, result in zip(calls, made, strict=True):
        # Not a pool's: those are waited for when the process ends.
        # In a copy of the context, so that compilations count for the caller.
        target = copy_context().run
        threading.Thread(target=target, args=(one, call, result), name=_COMPILING, daemon=True).start()
    wait(made)
    return [result.result() for result in made]


def is_compiling() -> bool:
    """Whether a thread of :func:`at_once` is at work, also after Ctrl-C."""
    return any(thread.name == _COMPILING for thread in threading.enumerate())


_COMPILING = "canvax-compile"


def _silent(build: Build) -> None:
    del build


def _on_each_device(function: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """``function`` run by each device on its own part of the arguments, the first of which are stacked parameters."""

    def one(params: Params, *rest: Any) -> Any:
        return function(jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), params), *rest)

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=over_batch(mesh).spec, check_vma=False)


_SCALARS = ("timestep", "c_in", "p", "q", "guidance", "rescale")


DECODED = 1024 * 1024
"""Pixels of the pictures that a device decodes at once, if there is more than one: one of SDXL's, four of SD 1.5's.

Such a picture keeps a device busy. Of more at once only the memory grows, by 1.2 GiB for each of 1024 x 1024 pixels.
"""


def decode_images(params: Params, latents: Array, *, cfg: VaeConfig, tiled: bool = False) -> Array:
    """Latents [B, h, w, C] -> images [B, H, W, 3] float32 in 0..1, computed in the dtype of the parameters.

    In float32 instead where that is float16 and the config says that the VAE overflows in it. No more at once than
    :data:`DECODED`, where the devices are known.
    """
    dtype = params["decoder"]["conv_in"]["weight"].dtype
    if dtype == jnp.float16 and cfg.force_upcast:
        dtype = jnp.float32
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def some(latents: Array) -> Array:
        images = (vae_decode_tiled if tiled else vae_decode)(params, latents.astype(dtype), cfg)
        return jnp.clip(images.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)

    pixels = latents.shape[1] * latents.shape[2] * cfg.factor**2
    return _in_turns(some, latents, most=max(1, DECODED // pixels))


def _in_turns(function: Callable[[Array], Array], x: Array, *, most: int) -> Array:
    """``function`` of images [B, ...], ``most`` of each device's at a time."""
    shards = batch_shards()
    if shards is None or x.shape[0] <= shards * most:
        return function(x)
    each = x.shape[0] // shards
    now = divisor(each, most)

    def regrouped(x: Array, first: int, second: int) -> Array:
        """Its leading axes, of ``first`` x ``second`` x ``now``, with the first two changed about."""
        return x.reshape(first, second, now, *x.shape[-3:]).swapaxes(0, 1)

    turns = each // now
    y = jax.lax.map(function, regrouped(x, shards, turns).reshape(turns, shards * now, *x.shape[1:]))
    return regrouped(y, turns, shards).reshape(x.shape[0], *y.shape[2:])


def _abstract(params: Params) -> Any:
    def one(leaf: Array) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):  # P("model", None) and P("model") are the same, and not equal
            spec = list(sharding.spec)
            while spec and spec[-1] is None:
                spec.pop()
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, params)


def _dtype(params: Params, component: str) -> Any:
    return jax.tree.leaves(params[component])[0].dtype
