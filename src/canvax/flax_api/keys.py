"""JAX keys and the noise that the old pipelines drew from them.

The law is theirs: the latents of a device are ``jax.random.normal(key, (B, C, h, w))``, float32. (The native pipeline
has another: there noise belongs to the image.) JAX 0.5 changed what ``jax.random.normal`` gives for a key;
``jax.config.update("jax_threefry_partitionable", False)`` brings back the numbers from before, and is respected here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError
from canvax.types import Array

LatentsShape = tuple[int, int, int, int]
"""Of one device, in the order of old: B, C, h, w."""


def wrap_keys(keys: Any, devices: int | None = None) -> Array:
    """Typed keys, [] or [devices], of ``jax.random.key`` or ``jax.random.PRNGKey`` keys.

    Raises:
        InputError: not a key, or not one for each device.
    """
    if not (isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)):
        try:
            keys = jax.random.wrap_key_data(jnp.asarray(keys))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"prng_seed is not a key ({error}); make one with jax.random.key(0)") from error
    wanted = () if devices is None else (devices,)
    if keys.shape != wanted:
        cure = (
            "pass one key" if devices is None else f"pass one for each device: jax.random.split(prng_seed, {devices})"
        )
        raise InputError(f"prng_seed holds keys of shape {keys.shape}; {cure}")
    return keys


def draw(key: Array, shape: LatentsShape) -> tuple[Array, Array]:
    """The latents of one device [B, h, w, C] float32, and two words [B, 2] uint32 for the step noise of each image."""
    latents = jax.random.normal(key, shape, jnp.float32)
    return jnp.moveaxis(latents, 1, -1), step_words(key, shape[0])


def step_words(key: Array, batch: int) -> Array:
    """Two words [B, 2] uint32 for the step noise of each image."""
    return jax.random.bits(jax.random.fold_in(key, 1), (batch, 2), jnp.uint32)


def encoding_noise(keys: Array, shape: LatentsShape) -> np.ndarray:
    """Noise for the encoding of the images of each of ``keys`` [D], on the host: [D * B, h, w, C] float32.

    The law is that of the old inpainting class. Image to image took the key itself, and so the numbers of ``draw``.
    """
    batch, channels, *small = shape
    second = [jax.random.split(key)[1] for key in keys]
    return np.concatenate([jax.random.normal(key, (batch, *small, channels), jnp.float32) for key in second])


def host_draw(keys: Array, shape: LatentsShape) -> tuple[np.ndarray, np.ndarray]:
    """``draw`` for each of ``keys`` [D], brought to the host: [D * B, h, w, C] and [D * B, 2]."""
    latents, words = _draw_all(keys, shape)
    return np.asarray(latents).reshape(-1, *latents.shape[2:]), np.asarray(words).reshape(-1, 2)


@partial(jax.jit, static_argnums=1)
def _draw_all(keys: Array, shape: LatentsShape) -> tuple[Array, Array]:
    # No vmap: under it the generator "rbg" heeds the first key alone.
    return jax.lax.map(partial(draw, shape=shape), keys)
