"""Ways to present a block of a network to XLA's CPU compiler: as a separate computation, or some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec

from canvax.errors import InputError
from canvax.kernels.target import on_each_device, target_mesh, target_platform, weight_shards
from canvax.originals import replaced, stand_ins
from canvax.types import Array

ROWS = 512
"""Rows that ``by_rows`` computes at a time; measured on an EPYC with AVX-512 (experiments.md, "Kernels on a CPU")."""

LARGE_ROWS = 1024 * 1024
"""Rows times channels of an image from which ``by_rows`` divides the work; from the same measurement."""


Result = TypeVar("Result")

_RECOMPUTED: ContextVar[bool] = ContextVar("recomputed", default=False)


@contextmanager
def recomputed(recompute: bool) -> Iterator[None]:
    """Recompute blocks in gradients: ``outlined`` blocks keep only their inputs (Chen et al. 2016)."""
    token = _RECOMPUTED.set(recompute)
    try:
        yield
    finally:
        _RECOMPUTED.reset(token)


_where = jax.make_user_context("")
"""Part of JAX's trace context, so that no trace of one layer is reused for another."""


def where() -> str:
    """Return the path of the traced layer in the parameters; "" outside ``canvax.kernels.attention.using``.

    For example "down_blocks.1.attentions.0.transformer_blocks.0.attn1", or "single_transformer_blocks.5". What a
    ControlNet, a text encoder or an autoencoder computes has a prefix: "controlnet.", "text_encoder.", "vae.".
    """
    return _where.value or ""


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name the traced computations of the context: in profiles and, for an attention of ``using``, in ``where``.

    Scopes in a scope append to its name: "blocks.0", then "blocks.0.attn". A denoiser of yours names its layers so.
    """
    path = f"{where()}.{name}".lstrip(".")
    with jax.named_scope(name), _where(path) if stand_ins() else nullcontext():  # each path is traced by itself
        yield


_KEPT: ContextVar[dict[str, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping() -> Iterator[dict[str, Any]]:
    """Collect what ``keep`` gets in the context, by name."""
    kept: dict[str, Any] = {}
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)


def keep(name: str, array: Any) -> None:
    """Hand an array, or a tree of arrays, to ``record`` of ``canvax.rollout`` as ``Evaluation.kept[name]``.

    It may be called in all code that is traced into the network, such as an attention of ``using``. Elsewhere it has no
    effect.

    Raises:
        InputError: an evaluation of the network keeps two arrays of the same name.
    """
    if (kept := _KEPT.get()) is not None:
        _add(kept, {name: array})


def _add(kept: dict[str, Any], more: dict[str, Any]) -> None:
    for name in more.keys() & kept.keys():
        cure = "name each array; layers of a denoiser of yours have the name of their scope (kernels.attention.scope)"
        raise InputError("name", "is that of two arrays that an evaluation keeps", cure=cure, value=name)
    kept.update(more)


def outlined(function: Callable[..., Result]) -> Callable[..., Result]:
    """Keep a block a separate XLA computation, not inlined, on the CPU.

    The CPU compiler then optimises and schedules many small computations, not one of tens of thousands of lines, and
    the arrays of a block are freed before the next block runs. For SDXL at 1024 x 1024 the denoiser needs 1.2 GB
    besides its weights instead of 7.7 GB, and compiles in three quarters of the time (docs/design/experiments.md,
    "Compiling SDXL").

    Positional arguments must be arrays; keyword arguments are static, but ``where``, which is a ``scope``. Calls inside
    the block are marked inlineable, because they would inherit "false" otherwise.
    """

    def kept_beside(*arrays: Any, **static: Any) -> tuple[Result, dict[str, Any]]:
        with keeping() as kept:
            return function(*arrays, **static), kept

    def inside(key: tuple[Mesh | None, Any, bool], static: tuple[tuple[str, Any], ...], *arrays: Any) -> Any:
        # The mesh and replaced code decide the kernels: a trace for others must not be reused.
        run = kept_beside if key[-1] else function
        with set_xla_metadata(inlineable="true"):  # for calls that JAX itself makes inside the block, e.g. for loops
            return run(*arrays, **dict(static))

    call = jax.jit(inside, static_argnums=(0, 1))

    @wraps(function)
    def block(*arrays: Any, where: str = "", **static: Any) -> Result:
        if where:
            with scope(where):
                return block(*arrays, **static)
        on_cpu, kept = target_platform() == "cpu", _KEPT.get()
        apart = partial(call, (target_mesh(), replaced(), kept is not None), tuple(static.items()))
        compute: Any = apart if on_cpu else partial(function if kept is None else kept_beside, **static)
        if _RECOMPUTED.get():
            compute = jax.checkpoint(compute)
        with set_xla_metadata(inlineable="false") if on_cpu else nullcontext():
            result = compute(*arrays)
        if kept is None:
            return result
        _add(kept, result[1])
        return result[0]

    return block


def by_rows(function: Callable[..., Array], p: Any, x: Any, *shared: Any) -> Array:
    """Return ``function(p, x, *shared)``; each row of the result must depend only on the same row of ``x``.

    On the CPU this computes a few rows at a time if the image is so large that the intermediate results of ``function``
    would not stay in the caches: the feed-forward of 2 x 4,096 rows of 320 channels then takes half the time.

    Args:
        function: [B, T, C] -> [B, T, C'].
        p: its parameters, a tree of arrays.
        x: rows [B, T, C], or a tree of these arrays, of which the first decides.
        shared: trees of arrays [B, ...] that all rows of an image use.
    """
    _, rows, channels = jax.tree.leaves(x)[0].shape
    if target_platform() != "cpu" or rows * channels < LARGE_ROWS or weight_shards() > 1:
        return function(p, x, *shared)
    parts = -(-rows // ROWS)
    each = -(-rows // parts)

    def on_device(p: Any, x: Any, *shared: Any) -> Array:
        def filled(array: Array) -> Array:
            array = jnp.pad(array, ((0, 0), (0, parts * each - rows), (0, 0)))
            return array.reshape(-1, each, array.shape[-1])

        def compute_part(part: Any) -> Array:
            return function(p, *jax.tree.map(lambda array: array[None], part))[0]

        repeated = jax.tree.map(lambda array: jnp.repeat(array, parts, 0), shared)
        y = jax.lax.map(compute_part, (jax.tree.map(filled, x), *repeated))
        return y.reshape(-1, parts * each, y.shape[-1])[:, :rows]

    batch, whole = PartitionSpec("data"), PartitionSpec()
    specs = (whole, *(batch for _ in (x, *shared)))
    return on_each_device(on_device, specs, batch)(p, x, *shared)
