"""Checks of single values of a call: they know no model. Each error names the argument, the value and the cure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from canvax.call import MAX_SIDE, MOST_GUIDANCE, MOST_IMAGES, Tiling
from canvax.errors import InputError, check_count, check_number, plain, refuse_tracers, shown
from canvax.kernels.target import half_of
from canvax.noise import image_seeds
from canvax.types import DType

LONGEST_PROMPT = 100_000
"""Letters of a prompt, of which at most 8 chunks of 75 tokens are read: splitting more takes long and is in vain."""
SIZE_STEP = 8
LARGEST_WHOLE = 1536 * 1536
"""Pixels up to which images are decoded whole unless told otherwise. Free memory has no say: the same seed gives the
same image on every machine."""


def is_tiled(height: int, width: int, tiling: Tiling = "auto") -> bool:
    """Whether an image of that many pixels is decoded in tiles."""
    return height * width > LARGEST_WHOLE if tiling == "auto" else tiling == "on"


def check_prompts(prompt: Any, negative: Any, per_prompt: int) -> tuple[list[str], list[str]]:
    """One prompt and one negative prompt for each image: all images of the first prompt, then of the second, ..."""
    per_prompt = check_count("num_images_per_prompt", per_prompt)
    prompt, negative = (
        one.tolist() if isinstance(one, np.ndarray) and one.dtype.kind in "OUT" else one for one in (prompt, negative)
    )
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(prompts, list | tuple) and not prompts:
        raise InputError(f"prompt={prompt!r} is empty; give one prompt or more")
    if not isinstance(prompts, Sequence) or not all(isinstance(p, str) for p in prompts):
        embeds = "; write prompt={'text': array}, as pipe.encode gives it" if hasattr(prompt, "shape") else ""
        told = shown(prompt) if embeds else repr(prompt)
        raise InputError(f"prompt={told} is neither a string nor a list of strings{embeds}")
    negatives = [negative or ""] * len(prompts) if negative is None or isinstance(negative, str) else negative
    if not isinstance(negatives, Sequence) or not all(isinstance(n, str) for n in negatives):
        cure = (
            f"; a size is given by name: height={negative}, width={negative}"
            if type(negative) is int
            else "; give text, such as 'blurry'"
        )
        raise InputError(f"negative_prompt={shown(negative)} is neither a string nor a list of strings{cure}")
    check_length("prompt", prompts)
    check_length("negative_prompt", negatives)
    if len(prompts) * per_prompt > MOST_IMAGES:
        raise InputError(
            f"num_images_per_prompt={per_prompt} of {len(prompts)} prompts is more than {MOST_IMAGES} images at once; "
            "call the pipeline for some at a time"
        )
    if len(negatives) != len(prompts):
        raise InputError(
            f"negative_prompt has {len(negatives)} entries for {len(prompts)} prompts; give one string for all, "
            "or as many as there are prompts"
        )
    return (
        [p for p in prompts for _ in range(per_prompt)],
        [n for n in negatives for _ in range(per_prompt)],
    )


def check_second(name: str, value: Any, otherwise: list[str], per_prompt: int) -> list[str]:
    """What the second text encoder reads for each image: the same as the first unless told otherwise."""
    if value is None:
        return otherwise
    count = len(otherwise) // per_prompt
    values = [value] * count if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
        raise InputError(f"{name}={shown(value)} is neither a string nor a list of strings")
    check_length(name, values)
    if len(values) != count:
        raise InputError(f"{name} has {len(values)} entries for {count} prompts; give one string, or one for each")
    return [v for v in values for _ in range(per_prompt)]


def check_length(name: str, texts: Sequence[str]) -> None:
    """Refuse texts that no model reads to their end."""
    if (longest := max(map(len, texts), default=0)) > LONGEST_PROMPT:
        raise InputError(f"{name} has {longest} letters, more than {LONGEST_PROMPT}; shorten it")


def check_size(name: str, value: Any, default: int, factor: int = SIZE_STEP) -> int:
    """Height or width in pixels, for a VAE of ``factor`` pixels per latent."""
    if (value := plain(value, name)) is None:
        return default
    step = math.lcm(SIZE_STEP, factor)
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 < value <= MAX_SIDE:
        raise InputError(f"{name}={value!r} is not a whole number of pixels in {step}..{MAX_SIDE}")
    value = int(value)
    if value % step:
        down, up = value - value % step, value - value % step + step
        raise InputError(f"{name}={value} is not divisible by {step}; use {f'{down} or ' if down else ''}{up}")
    return value


def check_steps(value: Any, own: int | None, default: int, most: int) -> int:
    """Number of steps: as given, as the user's ``own`` levels or timesteps make, or the model's default."""
    if (value := plain(value, "num_inference_steps")) is None:
        return own or default
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
        raise InputError(f"num_inference_steps={value!r} is not a whole number in 1..{most}; 20 to 50 is usual")
    if own not in (None, int(value)):
        raise InputError(
            f"num_inference_steps={value} with {own} levels, timesteps or scales of your own (sigmas, timesteps, "
            "guidance_steps); leave it out"
        )
    return int(value)


def check_guidance(scale: Any, default: float) -> float:
    """Guidance scale: a number that leaves an image; beyond ``MOST_GUIDANCE`` there is none."""
    several = isinstance(scale, list | tuple) or getattr(scale, "ndim", 0)
    cure = "; one for each step is guidance_steps=" if several else "; 7.5 is usual, 1 or less switches it off"
    found = default if scale is None else check_number("guidance_scale", scale, cure)
    if abs(found) > MOST_GUIDANCE:
        raise InputError(f"guidance_scale={found:g} is beyond {MOST_GUIDANCE}{cure}")
    return found


def check_latents(latents: Any, shape: tuple[int, ...], name: str = "latents") -> np.ndarray | None:
    """Latents given by the caller, in the layout of ``Result.latents``."""
    if latents is None:
        return None
    refuse_tracers(name, latents)
    try:
        array = floats(latents)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        why = f" ({str(error).splitlines()[0]})" if isinstance(error, RuntimeError) else ""  # of torch, with the cure
        raise InputError(f"{name}: not an array of numbers{why}; this call needs [B, h, w, C] = {shape}") from None
    if array.shape != shape or array.dtype != np.float32:
        got = f"{array.dtype} {array.shape}"
        moved = " (move PyTorch's channels last: np.moveaxis(latents, 1, -1))" * _is_nchw(array.shape, shape)
        raise InputError(f"{name}: {got} is not float [B, h, w, C] = {shape}{moved}")
    if not np.isfinite(array).all():
        raise InputError(f"{name} has values that are not finite")
    return array


def floats(value: Any) -> Any:
    """An array of it, traced as it was: float32, but as it is of times, complex numbers and records.

    Raises:
        TypeError, ValueError, RuntimeError: no array of numbers comes of it; the last of a deleted one.
    """
    array = value if isinstance(value, Tracer) else np.asarray(value)
    return array if array.dtype.kind in "mMc" or array.dtype.fields else array.astype(np.float32)


def _is_nchw(got: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(got) == 4 and got == (shape[0], shape[3], shape[1], shape[2])


def check_seeds(seed: Any, count: int) -> list[int]:
    """A seed for each image: ``seed + i``, or the list or array given.

    Whole numbers of any library will do; keys of JAX and generators get a sentence.
    """
    refuse_tracers("seed", seed)
    if isinstance(seed, jax.Array) and (
        jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) or (seed.dtype == jnp.uint32 and seed.shape[-1:] == (2,))
    ):  # of jax.random.PRNGKey as well, which two seeds can look like
        cure = "write seed=1, or latents=jax.random.normal(key, (B, h, w, C)); of two seeds give seed.tolist()"
        raise InputError(f"seed is a JAX key; {cure}")
    if (initial := getattr(seed, "initial_seed", None)) is not None:
        raise InputError(f"seed is a generator; write generator=, or seed={initial()} and noise='torch'")
    if not isinstance(seed, str) and getattr(seed, "ndim", 0) == 1 and hasattr(seed, "tolist"):
        seed = seed.tolist()
    if isinstance(seed, list | tuple | range):
        if len(seed) != count:
            raise InputError(
                f"seed (or generator) has {len(seed)} entries for {count} images; give one, or one for each"
            )
        return [image_seeds(plain(own, "seed"), 1)[0] for own in seed]
    return image_seeds(plain(seed, "seed"), count)


def check_precision(precision: str | None) -> None:
    """Refuse a matmul precision that JAX has not."""
    try:
        with jax.default_matmul_precision("default" if precision is None else precision):
            pass
    except (TypeError, ValueError):
        raise InputError(f"precision={precision!r} is not known to JAX; 'highest' is real float32") from None


def default_dtype(mesh: Mesh, *, training: bool = False) -> DType:
    """bfloat16 on TPU and GPU, float32 on the CPU, which computes bfloat16 slower.

    float16 on NVIDIA's GPUs before Ampere (T4, RTX 20), whose matrix units have no bfloat16: XLA computes in float32
    there. Not for ``training``, since small gradients would be 0.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype("bfloat16" if training else half_of(device))
