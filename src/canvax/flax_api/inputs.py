"""Checks the arguments of a call before anything is compiled, and gives them one form, with a device axis or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.core import Tracer

from canvax.errors import InputError
from canvax.flax_api.keys import LatentsShape, host_draw, wrap_keys
from canvax.params import Params
from canvax.pipelines.checks import check_size


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call. N images, D * B of them, those of a device next to each other.

    ids [N, 77] or [N, 2, 77], negative the same or None for zeros, noise [N, h, w, C] of unit variance, words [N, 2]
    for step noise, guidance [N].
    """

    ids: np.ndarray
    negative: np.ndarray | None
    noise: np.ndarray
    words: np.ndarray
    guidance: np.ndarray

    @property
    def guided(self) -> bool:
        """Whether the negative prompt matters for any image."""
        return bool((self.guidance > 1).any())


def check_ids(name: str, ids: Any, prompt: tuple[int, ...], jit: bool) -> np.ndarray:
    """Token ids on the host: [B, *prompt], with ``jit`` [D, B, *prompt]; ``prompt`` is [77], or [2, 77] for SDXL."""
    array = np.asarray(ids)
    one = ", ".join(map(str, prompt))
    if array.ndim != len(prompt) + (2 if jit else 1) or not np.issubdtype(array.dtype, np.integer):
        cure = (
            f"jit=True takes {name} [D, B, {one}] for D devices: shard(prompt_ids)"
            if jit
            else f"jit=False takes {name} [B, {one}] and no device axis; pass jit=True for several devices"
        )
        raise InputError(f"{name} has shape {array.shape} and dtype {array.dtype}; {cure}")
    if array.shape[-len(prompt) :] != prompt or 0 in array.shape:
        raise InputError(f"{name} has shape {array.shape}; prepare_inputs makes [B, {one}]")
    return array.astype(np.int32)


def check_inputs(
    ids: np.ndarray,
    prng_seed: Any,
    guidance_scale: Any,
    latents: Any,
    neg_prompt_ids: Any,
    image_shape: tuple[int, int, int],
    lead: tuple[int, ...],
) -> Inputs:
    """The checked arguments. ``ids`` are checked, ``image_shape`` is C, h, w, and ``lead`` [B], with ``jit`` [D, B].

    Raises:
        InputError: naming the argument, what was given and the cure.
    """
    jit, prompt = len(lead) == 2, ids.shape[len(lead) :]
    negative = None
    if neg_prompt_ids is not None:
        negative = check_ids("neg_prompt_ids", neg_prompt_ids, prompt, jit)
        if negative.shape != ids.shape:
            raise InputError(
                f"neg_prompt_ids has shape {negative.shape} and prompt_ids {ids.shape}; give as many of one as of the "
                "other"
            )
    keys = wrap_keys(prng_seed, lead[0] if jit else None)
    shape = (lead[-1], *image_shape)
    noise, words = host_draw(keys if jit else keys[None], shape)
    if latents is not None:
        noise = _check_latents(latents, (*lead[:-1], *shape))
    return Inputs(
        ids=ids.reshape(-1, *prompt),
        negative=None if negative is None else negative.reshape(-1, *prompt),
        noise=noise,
        words=words,
        guidance=_check_guidance(guidance_scale, lead),
    )


def latents_shape(batch: int, height: Any, width: Any, side: int, factor: int, channels: int) -> LatentsShape:
    """B, C, h, w of one device's latents for a size in pixels; ``side`` is the model's own.

    Raises:
        InputError: a size that is traced, or not a multiple of 8.
    """
    for name, value in (("height", height), ("width", width)):
        check_static(name, value)
    height, width = check_size("height", height, side, factor), check_size("width", width, side, factor)
    return batch, channels, height // factor, width // factor


def check_static(name: str, value: Any) -> None:
    """Refuse a traced value where the shape of the program depends on it."""
    if isinstance(value, Tracer):
        raise InputError(
            f"{name} decides the program and cannot be traced; with jax.pmap or jax.jit of _generate, make steps, "
            "height and width static: static_broadcasted_argnums=(3, 4, 5)"
        )


def weights_of(params: Any, components: tuple[str, ...]) -> Params:
    """The parameters without the scheduler."""
    missing = [name for name in components if not isinstance(params, Mapping) or name not in params]
    if missing:
        raise InputError(f"params has no {', '.join(missing)}; pass what from_pretrained returned")
    return {name: params[name] for name in components}


def _check_guidance(scale: Any, lead: tuple[int, ...]) -> np.ndarray:
    """A scale for each image [N] float32, from one number, one for each device, or one for each image."""
    array = np.asarray(scale, np.float32)
    if array.ndim == 1 and len(lead) == 2 and array.shape[0] == lead[0]:
        array = array[:, None]
    try:
        array = np.broadcast_to(array, lead)
    except ValueError:
        raise InputError(
            f"guidance_scale has shape {array.shape}; give a number, or one for each of the images {list(lead)}"
        ) from None
    if not np.isfinite(array).all():
        raise InputError(f"guidance_scale={scale!r} is not finite; 7.5 is usual, 1 or less switches it off")
    # At 1 the negative prompt cancels out; below it guidance is off too, as documented, and not turned round.
    return np.maximum(array, 1.0).reshape(-1)


def _check_latents(latents: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Given latents, [N, h, w, C] float32."""
    array = np.asarray(latents, np.float32)
    if array.shape != shape:
        raise InputError(f"latents has shape {array.shape}; this call needs {shape} of unit variance")
    if not np.isfinite(array).all():
        raise InputError("latents has values that are not finite")
    return np.ascontiguousarray(np.moveaxis(array, -3, -1)).reshape(-1, *shape[-2:], shape[-3])
