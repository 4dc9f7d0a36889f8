"""How a block of a network is given to XLA's CPU compiler: as a computation of its own, and some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec

from canvax.kernels.target import on_each_device, target_mesh, target_platform, weight_shards
from canvax.originals import replaced
from canvax.types import Array

ROWS = 512
"""Rows that ``by_rows`` takes at a time; measured on an EPYC with AVX-512 (experiments.md, "Kernels on a CPU")."""

LARGE_ROWS = 1024 * 1024
"""Numbers of an image, rows times channels, from which it does so; measured there too."""


Result = TypeVar("Result")


def outlined(function: Callable[..., Result]) -> Callable[..., Result]:
    """Keep this block a separate XLA computation (not inlined). Nested calls must be marked inlineable explicitly, or
    they inherit false.

    On the CPU alone, whose compiler then has many small programs to pass over and schedule, not one of tens of
    thousands of lines, and does not let the arrays of one block lie beside those of the next. For SDXL at 1024 x 1024
    the denoiser needs 1.2 GB beside its weights in place of 7.7, and compiles in three quarters of the time
    (docs/design/experiments.md, "Compiling SDXL").

    Positional arguments are arrays, those by keyword are static.
    """

    def inside(key: tuple[Mesh | None, Any], static: tuple[tuple[str, Any], ...], *arrays: Any) -> Result:
        del key  # the mesh and replaced code decide the kernels: a trace for others must not be used again
        with set_xla_metadata(inlineable="true"):  # for the calls that JAX makes, of loops for one, inside the block
            return function(*arrays, **dict(static))

    call = jax.jit(inside, static_argnums=(0, 1))

    @wraps(function)
    def block(*arrays: Any, **static: Any) -> Result:
        if target_platform() != "cpu":
            return function(*arrays, **static)
        with set_xla_metadata(inlineable="false"):
            return call((target_mesh(), replaced()), tuple(static.items()), *arrays)

    return block


def by_rows(function: Callable[..., Array], p: Any, x: Any, *shared: Any) -> Array:
    """``function(p, x, *shared)``, in which each row of [B, T, C] is made of the same row of ``x`` alone.

    On the CPU a few rows at a time, where the image is so large that what lies between the matmuls of ``function``
    would not stay in the caches: the feed-forward of 2 x 4,096 rows of 320 channels then takes half the time.

    Args:
        function: [B, T, C] -> [B, T, C'].
        p: its parameters, a tree of arrays.
        x: rows [B, T, C], or a tree of such arrays, the first of which decides.
        shared: trees of arrays [B, ...] that all rows of an image see.
    """
    _, rows, channels = jax.tree.leaves(x)[0].shape
    if target_platform() != "cpu" or rows * channels < LARGE_ROWS or weight_shards() > 1:
        return function(p, x, *shared)
    parts = -(-rows // ROWS)
    each = -(-rows // parts)

    def one_device(p: Any, x: Any, *shared: Any) -> Array:
        def filled(array: Array) -> Array:
            array = jnp.pad(array, ((0, 0), (0, parts * each - rows), (0, 0)))
            return array.reshape(-1, each, array.shape[-1])

        def one(part: Any) -> Array:
            return function(p, *jax.tree.map(lambda array: array[None], part))[0]

        repeated = jax.tree.map(lambda array: jnp.repeat(array, parts, 0), shared)
        y = jax.lax.map(one, (jax.tree.map(filled, x), *repeated))
        return y.reshape(-1, parts * each, y.shape[-1])[:, :rows]

    batch, whole = PartitionSpec("data"), PartitionSpec()
    specs = (whole, *(batch for _ in (x, *shared)))
    return on_each_device(one_device, specs, batch)(p, x, *shared)
