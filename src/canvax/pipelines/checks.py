"""Checks of single values of a call, independent of the model. Errors give the argument, the value and the cure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from canvax.call import MOST_IMAGES, Call, Tiling
from canvax.errors import InputError, conflict, miscounted, plain, refuse_tracers
from canvax.kernels.target import fast_16bit_dtype_of
from canvax.noise import image_seeds
from canvax.settings import check_setting, is_whole
from canvax.types import DType

LONGEST_PROMPT = 100_000
"""The most letters of a prompt. At most 8 chunks of 75 tokens are read, and splitting longer texts takes long."""
SIZE_STEP = 8
FITS_ALL = 32
"""Every model takes sizes that are multiples of this many pixels."""
USUAL_PIXELS = 1024 * 1024
"""Pixels of an image while the model is not known."""
LARGEST_WHOLE = 1536 * 1536
"""Images of up to this many pixels are decoded whole by default, whatever memory is free: the same seed gives the same
image on every machine."""


def is_tiled(height: int, width: int, tiling: Tiling = "auto") -> bool:
    """Return True if an image of this size is decoded in tiles."""
    return height * width > LARGEST_WHOLE if tiling == "auto" else tiling == "on"


def check_prompts(prompt: Any, negative: Any, per_prompt: int) -> tuple[list[str], list[str]]:
    """Return the prompt and the negative prompt of each image: all images of the first prompt, of the second, ..."""
    per_prompt = int(check_setting(Call, "num_images_per_prompt", per_prompt))
    prompt, negative = (
        text.tolist() if isinstance(text, np.ndarray) and text.dtype.kind in "OUT" else text
        for text in (prompt, negative)
    )
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(prompts, list | tuple) and not prompts:
        raise InputError("prompt", "is empty", cure="give one prompt or more", value=prompt)
    if not isinstance(prompts, Sequence) or not all(isinstance(p, str) for p in prompts):
        cure = "write prompt={'text': array}, as pipe.encode gives it" if hasattr(prompt, "shape") else ""
        raise InputError("prompt", "is neither a string nor a list of strings", cure=cure, value=prompt)
    negatives = [negative or ""] * len(prompts) if negative is None or isinstance(negative, str) else negative
    if not isinstance(negatives, Sequence) or not all(isinstance(n, str) for n in negatives):
        cure = (
            f"a size is given by name: {{height={negative}}}, {{width={negative}}}"
            if type(negative) is int
            else "give text, such as 'blurry'"
        )
        raise InputError("negative_prompt", "is neither a string nor a list of strings", cure=cure, value=negative)
    check_length("prompt", prompts)
    check_length("negative_prompt", negatives)
    if len(prompts) * per_prompt > MOST_IMAGES:
        raise InputError(
            "num_images_per_prompt",
            f"for {len(prompts)} prompts makes more than {MOST_IMAGES} images at once",
            cure="call the pipeline for some at a time",
            value=per_prompt,
        )
    if len(negatives) != len(prompts):
        raise InputError(
            "negative_prompt",
            f"has {len(negatives)} entries for {len(prompts)} prompts",
            cure="give one string for all, or as many as there are prompts",
        )
    return (
        [p for p in prompts for _ in range(per_prompt)],
        [n for n in negatives for _ in range(per_prompt)],
    )


def check_second(name: str, value: Any, otherwise: list[str], per_prompt: int) -> list[str]:
    """Return the text that the second text encoder reads for each image: by default ``otherwise``."""
    if value is None:
        return otherwise
    count = len(otherwise) // per_prompt
    values = [value] * count if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
        raise InputError(name, "is neither a string nor a list of strings", value=value)
    check_length(name, values)
    if len(values) != count:
        raise miscounted(name, len(values), count, "prompts")
    return [v for v in values for _ in range(per_prompt)]


def check_length(name: str, texts: Sequence[str]) -> None:
    """Refuse texts that are longer than any model reads."""
    if (longest := max(map(len, texts), default=0)) > LONGEST_PROMPT:
        raise InputError(name, f"has {longest} letters, more than {LONGEST_PROMPT}", cure="shorten it")


def check_size(name: str, value: Any, default: int, factor: int | None = None) -> int:
    """Return a height or width in pixels, a multiple of ``factor``, which is None while the model is not known."""
    if value is None:
        return default
    try:
        value = int(check_setting(Call, "height", value))
    except InputError as error:
        raise error.about(name) from None
    step = math.lcm(SIZE_STEP, factor or 1)
    if value % step:
        usable = step if factor else FITS_ALL
        down, up = value - value % usable, value - value % usable + usable
        raise InputError(
            name, f"is not divisible by {step}", cure=f"use {f'{down} or ' if down else ''}{up}", value=value
        )
    return value


def check_image_size(
    argument: str, size: tuple[int, int], asked: tuple[Any, Any], factor: int, native: tuple[int, int] | None
) -> None:
    """Refuse images whose height or width was not requested and is no multiple of ``factor``.

    Args:
        argument: the argument that has the images.
        size: their width and height.
        asked: requested height and width, or None.
        factor: pixels per latent; ``SIZE_STEP`` while the model is not known.
        native: height and width that the model was trained for; None while it is not known: the cure fits all models.

    Raises:
        InputError: a side cannot be generated; the error names a size that can, in the proportions of the image.
    """
    free = [name for name, side in zip(("width", "height"), reversed(asked), strict=True) if side is None]
    sides: dict[str, int] = dict(zip(("width", "height"), size, strict=True))
    if all(sides[name] % factor == 0 for name in free):
        return
    step = math.lcm(SIZE_STEP, factor) if native else FITS_ALL
    pixels = math.prod(native) if native else min(math.prod(size), USUAL_PIXELS)
    scale = math.sqrt(pixels / math.prod(size))
    for name, side in zip(("width", "height"), reversed(asked), strict=True):
        scale = side / sides[name] if is_whole(side) else scale
    usable = {name: max(step, round(sides[name] * scale / step) * step) for name in free}
    problem = f"is {size[0]} x {size[1]} pixels, and sides are multiples of {step}"
    cure = " and ".join(f"{{{name}={side}}}" for name, side in usable.items())
    raise InputError(argument, problem, cure=f"give {cure}, which it is resized to")


def check_steps(value: Any, listed: int | None, default: int, most: int) -> int:
    """Return the number of steps: the value, ``listed`` (that of sigmas or timesteps), or the model's default."""
    if (value := check_setting(Call, "num_inference_steps", value)) is None:
        return listed or default
    if value > most:
        raise InputError("num_inference_steps", f"is more than the {most} of the model's noise schedule", value=value)
    if listed not in (None, int(value)):
        why = f"they are {listed} steps"
        raise conflict("num_inference_steps", "sigmas", "timesteps", "guidance_steps", why=why, value=value)
    return int(value)


def check_strength(value: Any) -> float:
    """Return the checked part of the run to do."""
    return float(check_setting(Call, "strength", value))


def check_guidance(scale: Any, default: float) -> float:
    """Return the checked guidance scale."""
    if isinstance(scale, list | tuple) or getattr(scale, "ndim", 0):
        cure = "it is the same for all images of a call; {guidance_steps} has one for each step"
        raise InputError("guidance_scale", "is not a number", cure=cure, value=scale)
    return default if scale is None else float(check_setting(Call, "guidance_scale", scale))


def check_latents(latents: Any, shape: tuple[int, ...], name: str = "latents") -> np.ndarray | None:
    """Return the checked latents of the caller, in the layout of ``Result.latents``."""
    if latents is None:
        return None
    refuse_tracers(name, latents)
    try:
        array = floats(latents)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        why = f" ({str(error).splitlines()[0]})" if isinstance(error, RuntimeError) else ""  # of torch, with the cure
        raise InputError(
            name, f"is not an array of numbers{why}", cure=f"this call needs [B, h, w, C] = {shape}"
        ) from None
    if array.shape != shape or array.dtype != np.float32:
        got = f"{array.dtype} {array.shape}"
        channels_first = array.shape[1:] == (shape[-1], *shape[1:-1])
        moved = " (move PyTorch's channels last: np.moveaxis(latents, 1, -1))" * channels_first
        raise InputError(name, f"is {got}, not float [B, h, w, C] = {shape}{moved}")
    if not np.isfinite(array).all():
        raise InputError(name, "has values that are not finite")
    return array


def floats(value: Any) -> Any:
    """Return an array, traced if the value is; numbers become float32, times, complex numbers and records stay.

    Raises:
        TypeError, ValueError, RuntimeError: the value is not an array of numbers, or (the last) was deleted.
    """
    array = value if isinstance(value, Tracer) else np.asarray(value)
    return array if array.dtype.kind in "mMc" or array.dtype.fields else array.astype(np.float32)


def check_seeds(seed: Any, count: int) -> list[int]:
    """Return a seed for each image: ``seed + i``, or the list or array of seeds.

    The whole numbers of any library and keys of JAX (``seed_of_key``) are seeds.
    """
    refuse_tracers("seed", seed)
    if (initial := getattr(seed, "initial_seed", None)) is not None:
        cure = f"write {{generator}}, or {{seed={initial()}}} and {{noise='torch'}}"
        raise InputError("seed", "is a generator", cure=cure)
    seed = seed_of_key(seed)
    if not isinstance(seed, str) and getattr(seed, "ndim", 0) == 1 and hasattr(seed, "tolist"):
        seed = seed.tolist()
    if isinstance(seed, list | tuple | range):
        if len(seed) != count:
            raise miscounted("seed", len(seed), count)
        return [image_seeds(plain(seed_of_key(key), "seed"), 1)[0] for key in seed]
    return image_seeds(plain(seed, "seed"), count)


def seed_of_key(value: Any) -> Any:
    """Return the seed of a JAX key, or the list of seeds of an array of keys; return any other value unchanged.

    A key is typed, or raw words uint32 [2]; an array of raw keys is uint32 [n, 2]. The two words of a key are the high
    and the low half of its seed, so that ``jax.random.key(3)`` is seed 3. The seed of a typed key with more words
    (``rbg``) is the first 8 bytes of their SHA-256, little-endian.
    """
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(value))
    elif getattr(value, "dtype", None) == np.uint32 and value.shape[-1:] == (2,):
        if value.ndim == 1 and not isinstance(value, jax.Array):  # NumPy has no keys: these are two seeds
            return value
        words = np.asarray(value)
    else:
        return value
    if words.ndim > 2:
        raise InputError("seed", f"has keys in {words.ndim - 1} axes", cure="give one key, or one for each image")
    seeds = [_seed_of_words(key) for key in words.reshape(-1, words.shape[-1])]
    return seeds[0] if words.ndim == 1 else seeds


def _seed_of_words(words: np.ndarray) -> int:
    if len(words) == 2:
        return int(words[0]) << 32 | int(words[1])
    return int.from_bytes(hashlib.sha256(words.astype("<u4").tobytes()).digest()[:8], "little")


def check_precision(precision: str | None) -> None:
    """Refuse a matmul precision that JAX does not have."""
    try:
        with jax.default_matmul_precision("default" if precision is None else precision):
            pass
    except (TypeError, ValueError):
        raise InputError(
            "precision", "is not known to JAX", cure="'highest' is real float32", value=precision
        ) from None


def default_dtype(mesh: Mesh, *, training: bool = False) -> DType:
    """Return bfloat16 on TPU and GPU, float32 on the CPU, which computes bfloat16 slower.

    NVIDIA's GPUs before Ampere (T4, RTX 20) get float16: their matrix units have no bfloat16, for which XLA computes in
    float32. ``training`` gets bfloat16 there as well, since small gradients would be 0 in float16.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype("bfloat16" if training else fast_16bit_dtype_of(device))
