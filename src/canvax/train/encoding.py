"""Pictures to latents: what a denoiser is trained on is encoded once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.errors import NO_VALUE, InputError, check_count, check_function
from canvax.kernels.target import compiling_on
from canvax.models.configs import AutoencoderConfig, TinyConfig, VaeConfig
from canvax.models.vae import vae_encode
from canvax.parallel.mesh import over_batch, padded_batch, replicated
from canvax.params import Params
from canvax.types import Array, HostArray


def encode_pictures(p: Params, pixels: HostArray, cfg: AutoencoderConfig, mesh: Mesh, *, batch: int = 32) -> HostArray:
    """Means of the latents of pictures [N, H, W, 3] uint8, scaled as the UNet sees them: [N, h, w, C] float32.

    Args:
        p: parameters of the autoencoder.
        pixels: the pictures.
        cfg: its config.
        mesh: the devices.
        batch: pictures encoded at once.

    Raises:
        InputError: the autoencoder is a tiny one, which would teach its own faults.
    """
    check_count("batch", batch)
    if pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise InputError("pixels", NO_VALUE, f"has shape {pixels.shape}, not [N, H, W, 3]")
    if isinstance(cfg, TinyConfig):
        raise InputError(
            "vae", NO_VALUE, "is an AutoencoderTiny, which is for looking", "train with the model's own autoencoder"
        )
    return by_batches(_encoder(cfg, mesh), p, pixels, mesh, padded_batch(batch, mesh))


def as_input(pixels: Array) -> Array:
    """uint8 pixels -> -1..1 float32."""
    return pixels.astype(jnp.float32) / 127.5 - 1.0


@lru_cache(maxsize=4)
def _encoder(cfg: VaeConfig, mesh: Mesh) -> Any:
    """Kept, because a new function would be compiled again for every set of pictures."""

    def encode(p: Params, images: Array) -> Array:
        mean, _ = vae_encode(p, as_input(images), cfg)
        return (mean - cfg.shift) / cfg.scale

    return jitted(encode, mesh)


def jitted(function: Any, mesh: Mesh) -> Any:
    """``function(p, batch)`` compiled for a mesh: parameters on every device, the batch split, all results on each."""
    return jax.jit(function, in_shardings=(replicated(mesh), over_batch(mesh)), out_shardings=replicated(mesh))


def by_batches(program: Any, p: Params, inputs: HostArray, mesh: Mesh, batch: int) -> HostArray:
    """``program(p, part)`` over parts of ``inputs``, the last one filled up."""
    check_count("batch", batch)
    check_function("program", program, 2, "(parameters, part)")
    if not inputs.ndim or not len(inputs):
        raise InputError("there are no pictures to encode")
    p = jax.device_put(p, replicated(mesh))
    parts: list[HostArray] = []
    with compiling_on(mesh):
        for start in range(0, len(inputs), batch):
            part = inputs[start : start + batch]
            missing = batch - len(part)
            filled = np.concatenate([part, np.repeat(part[-1:], missing, axis=0)]) if missing else part
            parts.append(np.asarray(program(p, np.ascontiguousarray(filled)))[: len(part)])
    return np.concatenate(parts)
