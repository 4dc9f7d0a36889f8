"""Checks the arguments of a call before anything is compiled, and brings them to a form without device axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from canvax.errors import FLOAT32_MAX, CheckpointError, InputError
from canvax.families.sdxl import SDXL
from canvax.flax_api.images import ControlImage, SourceImages
from canvax.flax_api.keys import LatentsShape, host_draw, wrap_keys
from canvax.models.clip import clip_configs
from canvax.models.text import Conditions, TextEncoders
from canvax.parallel.rules import check_params
from canvax.params import Params, Spec
from canvax.pipelines.checks import check_size, floats


class Call(NamedTuple):
    """The unchecked arguments of a pipeline's call; ``size`` is (height, width)."""

    prompt_ids: Any
    params: Params
    prng_seed: Any
    num_inference_steps: Any
    size: tuple[Any, Any]
    guidance_scale: Any
    latents: Any
    neg_prompt_ids: Any
    jit: bool


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a call for N = D * B images, ordered by device.

    ids [N, 77] or [N, 2, 77], negative ids of the same shape or None for zeros, noise [N, h, w, C] of unit variance,
    words [N, 2] for step noise, guidance [N], source images and control images.
    """

    ids: np.ndarray
    negative: np.ndarray | None
    noise: np.ndarray
    words: np.ndarray
    guidance: np.ndarray
    source: SourceImages | None = None
    control: ControlImage | None = None

    @property
    def guided(self) -> bool:
        """True if any image needs the negative prompt."""
        return bool((self.guidance > 1).any())


def check_ids(name: str, ids: Any, text: TextEncoders, jit: bool = False) -> Any:
    """Check token ids [B, 77], for two encoders [B, 2, 77], with ``jit`` [D, B, ...]; return them as int32.

    The result is on the host unless it is traced.

    Raises:
        InputError: the ids have another shape or dtype, or an id has no embedding.
    """
    parts = clip_configs(text)
    prompt = (len(parts), min(text.shortest))[-2 if len(parts) > 1 else -1 :]
    try:
        array = ids if isinstance(ids, Tracer) else np.asarray(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # e.g. deleted arrays
        raise InputError(f"{name} is not an array of whole numbers; pass what prepare_inputs returned") from None
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} has dtype {array.dtype}; token ids are whole numbers, as prepare_inputs makes them")
    shape = ", ".join(map(str, prompt))
    if array.ndim != len(prompt) + (2 if jit else 1):
        cure = (
            f"jit=True takes {name} [D, B, {shape}] for D devices: shard(prompt_ids)"
            if jit
            else f"jit=False takes {name} [B, {shape}] of prepare_inputs; for a device axis pass jit=True"
        )
        raise InputError(f"{name} has shape {array.shape}; {cure}")
    if array.shape[-len(prompt) :] != prompt or 0 in array.shape:
        raise InputError(f"{name} has shape {array.shape}; prepare_inputs makes [B, {shape}]")
    if not isinstance(array, Tracer):
        for i, (encoder, cfg) in enumerate(parts.items()):
            encoder_ids = array[..., i, :] if len(parts) > 1 else array
            check_embedded(name, encoder_ids, encoder, cfg.vocab_size)
    return array.astype(np.int32)


def check_embedded(name: str, ids: np.ndarray, encoder: str, count: int) -> None:
    """Refuse ids without an embedding: ``encoder`` has ``count`` of them, and JAX would silently clamp larger ids."""
    strange = ids[(ids < 0) | (ids >= count)]
    if strange.size:
        raise InputError(
            f"{name} has the id {strange[0]}, and {encoder} knows 0..{count - 1}; make ids with prepare_inputs of the "
            "same pipeline"
        )


def check_pair(ids: Any, neg_prompt_ids: Any, text: TextEncoders, jit: bool = False) -> Any:
    """Check the negative ids like :func:`check_ids`; they must have the shape of ``ids``."""
    negative = check_ids("neg_prompt_ids", neg_prompt_ids, text, jit)
    if negative.shape != ids.shape:
        raise InputError(
            f"neg_prompt_ids has shape {negative.shape} and prompt_ids {ids.shape}; give as many of one as of the other"
        )
    return negative


def check_inputs(
    call: Call,
    ids: np.ndarray,
    negative: np.ndarray | None,
    image_shape: tuple[int, int, int],
    lead: tuple[int, ...],
    noise: str,
) -> Inputs:
    """Check and convert the arguments of a call.

    Args:
        call: the arguments.
        ids: the checked token ids.
        negative: the checked negative ids.
        image_shape: C, h, w.
        lead: [B], or [D, B].
        noise: the name of ``call.latents`` in errors.

    Raises:
        InputError: key, latents or guidance scale are invalid.
    """
    jit, prompt = len(lead) == 2, ids.shape[len(lead) :]
    keys = wrap_keys(call.prng_seed, lead[0] if jit else None)
    shape = (lead[-1], *image_shape)
    drawn, words = host_draw(keys if jit else keys[None], shape)
    if call.latents is not None:
        drawn = check_latents(call.latents, (*lead[:-1], *shape), noise)
        drawn = np.ascontiguousarray(np.moveaxis(drawn, -3, -1)).reshape(-1, *shape[2:], shape[1])
    return Inputs(
        ids=ids.reshape(-1, *prompt),
        negative=None if negative is None else negative.reshape(-1, *prompt),
        noise=drawn,
        words=words,
        guidance=check_guidance(call.guidance_scale, lead),
    )


def latents_shape(batch: int, height: Any, width: Any, side: int, factor: int, channels: int) -> LatentsShape:
    """Return B, C, h, w of a device's latents for a size in pixels, by default ``side``.

    Raises:
        InputError: a size is traced, or not a multiple of 8.
    """
    for name, value in (("height", height), ("width", width)):
        check_static(name, value)
    height, width = check_size("height", height, side, factor), check_size("width", width, side, factor)
    return batch, channels, height // factor, width // factor


def check_static(name: str, value: Any) -> None:
    """Refuse a traced value that must be static."""
    if isinstance(value, Tracer):
        raise InputError(
            f"{name} decides the program and cannot be traced; with jax.pmap or jax.jit of _generate, make steps, "
            "height and width static: static_broadcasted_argnums=(3, 4, 5)"
        )


def refuse_traced(**arguments: Any) -> None:
    """Refuse traced arguments: a call compiles its programs; inside ``jax.jit`` and ``jax.pmap`` use ``_generate``."""
    for name, value in arguments.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise InputError(
                f"{name} is traced by JAX, and a call compiles by itself: take it out of jax.jit and jax.pmap; text to "
                "image has pipeline._generate to call inside"
            )


def weights_of(params: Any, components: Iterable[str]) -> Params:
    """Return the parameters of the ``components``, without scheduler state."""
    available = params if isinstance(params, Mapping) else {}
    if missing := [name for name in components if not available.get(name)]:
        raise InputError(f"params has no {', '.join(missing)}; pass what from_pretrained returned")
    return {name: params[name] for name in components}


def check_weights(specs: Mapping[str, Spec], weights: Params, *, stacked: bool = False) -> None:
    """Refuse parameters that do not match the specs; ``stacked``: all have a device axis."""
    try:
        for name, spec in specs.items():
            check_params(spec, weights[name], name, stacked=stacked)
    except InputError as error:
        axis = "after replicate" if stacked else "without a device axis"
        raise InputError(f"{error}; pass those that from_pretrained returned with this pipeline, {axis}") from None


def check_guidance(scale: Any, lead: tuple[int, ...]) -> np.ndarray:
    """Return the scale of each image [N] float32, from a number, one for each device, or one for each image."""
    cure = "7.5 is usual, 1 or less switches it off"
    try:
        array = np.asarray(scale)
        array = array.astype(np.float64) if array.dtype.kind in "iuf" or array.dtype.name == "bfloat16" else array
    except (TypeError, ValueError, OverflowError):
        array = np.asarray("")
    if array.dtype != np.float64:
        raise InputError(f"guidance_scale={scale!r} is not a number; {cure}")
    if array.ndim == 1 and len(lead) == 2 and array.shape[0] == lead[0]:
        array = array[:, None]
    try:
        array = np.broadcast_to(array, lead)
    except ValueError:
        raise InputError(
            f"guidance_scale has shape {array.shape}; give a number, or one for each of the images {list(lead)}"
        ) from None
    if not (np.abs(array) <= FLOAT32_MAX).all():
        raise InputError(f"guidance_scale={scale!r} is not finite; {cure}")
    # At 1 the negative prompt cancels out. Below 1 guidance is off too, as documented, and not reversed.
    return np.maximum(array, 1.0).astype(np.float32).reshape(-1)


def check_latents(latents: Any, shape: tuple[int, ...], name: str = "latents") -> Any:
    """Check latents of this shape, float32; the result is on the host unless it is traced."""
    try:
        array = floats(latents)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name} is not an array of numbers; this call needs {shape} of unit variance") from None
    if array.shape != shape or array.dtype != np.float32:
        raise InputError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; this call needs {shape} of unit variance"
        )
    if not isinstance(array, Tracer) and not np.isfinite(array).all():
        raise InputError(f"{name} has values that are not finite; jax.random.normal(key, shape) makes some")
    return array


def check_kind(name: str, xl: bool, index: Mapping[str, Any]) -> None:
    """Refuse a ``model_index.json`` of a kind that the class does not support."""
    is_xl = index.get("_class_name") in SDXL.pipelines
    if is_xl and index.get("requires_aesthetics_score"):
        raise CheckpointError(f"{name} is SDXL's refiner, which no old class drew; use canvax.load")
    if is_xl != xl:
        kind, right = ("an SDXL", "XL") if is_xl else ("no SDXL", "")
        raise CheckpointError(
            f"{name} is {kind} checkpoint; load it with FlaxStableDiffusion{right}Pipeline, or canvax.load"
        )


def zeros_like(conditions: Conditions) -> Conditions:
    """Return SDXL's conditions without a negative prompt: zeros, made on the host to avoid another program."""
    return {
        name: jax.device_put(np.zeros(array.shape, array.dtype), array.sharding) for name, array in conditions.items()
    }
