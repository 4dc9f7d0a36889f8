"""JAX keys, and the noise that the Flax pipelines draw from them.

As in diffusers, the latents of a device are ``jax.random.normal(key, (B, C, h, w))``, float32. (In the native pipeline
noise belongs to the image instead.) JAX 0.5 changed the numbers of ``jax.random.normal``;
``jax.config.update("jax_threefry_partitionable", False)`` restores the earlier numbers, and works here too.
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
"""Shape of a device's latents in diffusers' order: B, C, h, w."""


def wrap_keys(keys: Any, devices: int | None = None) -> Array:
    """Convert keys of ``jax.random.key`` or ``jax.random.PRNGKey`` to typed keys, [] or [devices].

    Raises:
        InputError: ``keys`` is not a key, or not a key for each device.
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
    """Draw the latents of a device [B, h, w, C] float32, and the keys [B, 2] uint32 of the images' step noise."""
    latents = jax.random.normal(key, shape, jnp.float32)
    return jnp.moveaxis(latents, 1, -1), step_words(key, shape[0])


def step_words(key: Array, batch: int) -> Array:
    """Draw the keys of the images' step noise, two words for each: [B, 2] uint32."""
    return jax.random.bits(jax.random.fold_in(key, 1), (batch, 2), jnp.uint32)


def encoding_noise(keys: Array, shape: LatentsShape) -> np.ndarray:
    """Draw the noise of encoding images on the host, [D * B, h, w, C] float32, from ``keys`` [D].

    It equals the noise of diffusers' inpainting class. Their image to image used the key itself, and so the numbers
    of ``draw``.
    """
    batch, channels, *small = shape
    second = [jax.random.split(key)[1] for key in keys]
    return np.concatenate([jax.random.normal(key, (batch, *small, channels), jnp.float32) for key in second])


def host_draw(keys: Array, shape: LatentsShape) -> tuple[np.ndarray, np.ndarray]:
    """Call ``draw`` for each of ``keys`` [D]; return [D * B, h, w, C] and [D * B, 2] on the host."""
    latents, words = _draw_all(keys, shape)
    return np.asarray(latents).reshape(-1, *latents.shape[2:]), np.asarray(words).reshape(-1, 2)


@partial(jax.jit, static_argnums=1)
def _draw_all(keys: Array, shape: LatentsShape) -> tuple[Array, Array]:
    # Not vmap, under which the generator "rbg" uses only the first key.
    return jax.lax.map(partial(draw, shape=shape), keys)
