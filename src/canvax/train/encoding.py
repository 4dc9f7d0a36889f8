"""Encodes images to latents and captions to features, once before a denoiser is trained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError, check_count, check_function
from canvax.kernels.target import compiling_on
from canvax.models.configs import AutoencoderConfig, TinyConfig
from canvax.models.decode import Autoencoder, autoencoder_of
from canvax.models.text import TextEncoders, encode_text
from canvax.originals import foreign
from canvax.parallel.mesh import over_batch, padded_batch, replicated
from canvax.parallel.place import put
from canvax.params import Params
from canvax.types import Array, HostArray


def encode_pictures(
    p: Params, pixels: HostArray, cfg: AutoencoderConfig | Autoencoder, mesh: Mesh, *, batch: int = 32
) -> HostArray:
    """Encode images to the means of their latents, scaled for the denoiser: [N, h, w, C] float32.

    Args:
        p: parameters of the autoencoder.
        pixels: images [N, H, W, 3] uint8, or with alpha if the autoencoder has it.
        cfg: the autoencoder, or its config.
        mesh: the devices.
        batch: images encoded at once.

    Raises:
        InputError: the autoencoder is an AutoencoderTiny, whose errors the denoiser would learn.
    """
    check_count("batch", batch)
    alpha = not isinstance(cfg, TinyConfig) and getattr(autoencoder_of(cfg), "channels", 3) == 4
    if pixels.ndim != 4 or pixels.shape[-1] not in ((3, 4) if alpha else (3,)):
        raise InputError("pixels", f"has shape {pixels.shape}, not [N, H, W, 3]")
    if isinstance(cfg, TinyConfig):
        raise InputError(
            "vae", "is an AutoencoderTiny, which is for looking", cure="train with the model's autoencoder"
        )
    autoencoder, batch = autoencoder_of(cfg), padded_batch(batch, mesh)
    return by_batches(_encoder(autoencoder, mesh, foreign(autoencoder)), p, pixels, mesh, batch)


def encode_captions(
    p: Params, inputs: Mapping[str, Mapping[str, HostArray]], text: TextEncoders, mesh: Mesh
) -> dict[str, HostArray]:
    """Encode the text encoders' inputs for captions into conditions, each [N, ...]; see ``encode_text``.

    Args:
        p: parameters of the text encoders, by component.
        inputs: arrays [N, ...] of each encoder, by component and name.
        text: the text encoders.
        mesh: the devices.
    """
    return by_batches(_text_encoder(text, mesh, foreign(text)), p, dict(inputs), mesh, padded_batch(4, mesh))


@lru_cache(maxsize=4)
def _text_encoder(text: TextEncoders, mesh: Mesh, code: tuple[Any, ...]) -> Any:
    del code

    return jitted(partial(encode_text, cfg=text), mesh)


def as_input(pixels: Array) -> Array:
    """Convert uint8 pixels to float32 in -1..1."""
    return pixels.astype(jnp.float32) / 127.5 - 1.0


@lru_cache(maxsize=4)
def _encoder(autoencoder: Autoencoder, mesh: Mesh, code: tuple[Any, ...]) -> Any:
    """Return the compiled encoder; cached, since a new function would be compiled again for every set of images."""
    del code

    def encode(p: Params, images: Array) -> Array:
        mean, _ = autoencoder.encode(p, images.astype(jnp.float32) / 255)
        return mean

    return jitted(encode, mesh)


def jitted(function: Any, mesh: Mesh) -> Any:
    """Compile ``function(p, batch)`` for a mesh: replicated parameters, a split batch, replicated results."""
    return jax.jit(function, in_shardings=(replicated(mesh), over_batch(mesh)), out_shardings=replicated(mesh))


def by_batches(program: Any, p: Params, inputs: Any, mesh: Mesh, batch: int) -> Any:
    """Call ``program(p, part)`` for batches of ``inputs``, a tree of arrays [N, ...]; the last batch is padded.

    Returns:
        What the program returns, of all N.
    """
    check_count("batch", batch)
    check_function("program", program, 2, "(parameters, part)")
    count = min(len(array) if array.ndim else 0 for array in jax.tree.leaves(inputs))
    if not count:
        raise InputError("there are no pictures to encode")
    p = jax.device_put(p, replicated(mesh))
    parts: list[Any] = []
    with compiling_on(mesh):
        for start in range(0, count, batch):
            rows = np.minimum(np.arange(start, start + batch), count - 1)
            result = program(p, jax.tree.map(lambda array, rows=rows: put(array[rows], over_batch(mesh)), inputs))
            kept = min(batch, count - start)
            parts.append(jax.tree.map(lambda array, kept=kept: np.asarray(array)[:kept], result))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
