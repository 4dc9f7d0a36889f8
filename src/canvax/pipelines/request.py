"""Turns the arguments of a call into one checked record, before anything is traced or compiled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from canvax.errors import InputError, check_count
from canvax.noise import image_seeds
from canvax.pipelines.conditions import check_for_model, check_start
from canvax.pipelines.options import Options, Tiling, check_options
from canvax.samplers.schedule import NoiseSchedule

if TYPE_CHECKING:
    from canvax.pipelines.checkpoint import Checkpoint

MAX_SIDE = 16384
SIZE_STEP = 8
LARGEST_WHOLE = 1536 * 1536
"""Pixels up to which pictures are decoded whole unless told otherwise. Free memory has no say: the same seed draws the
same picture on every machine."""


@dataclass(frozen=True, eq=False)
class Request:
    """One call, checked: an entry for each image where lists stand. ``shape`` is that of the latents, [B, h, w, C].

    ``zeros``: no negative prompt was given, not even an empty one, and the model wants zeros for that.
    """

    prompts: list[str]
    negatives: list[str]
    seeds: list[int]
    height: int
    width: int
    steps: int
    guidance: float
    sampler: str | None
    latents: np.ndarray | None
    shape: tuple[int, int, int, int]
    options: Options
    prompts_2: list[str]
    negatives_2: list[str]
    zeros: bool

    def said(self) -> list[Any]:
        """Everything but the seeds that must be the same in processes that draw together, by its ``repr``."""
        decided = {name: value for name, value in vars(self).items() if name not in ("seeds", "options", "latents")}
        given = None if self.latents is None else hashlib.sha256(self.latents.tobytes()).hexdigest()
        return [decided, given, self.options.changed(), self.options.callback is not None]

    @property
    def guided(self) -> bool:
        """Whether the negative prompt matters at all: at a guidance scale of 1 or less it does not."""
        return max(self.options.guidance_steps or (self.guidance,)) > 1


def is_tiled(height: int, width: int, tiling: Tiling = "auto") -> bool:
    """Whether a picture of that many pixels is decoded in tiles."""
    return height * width > LARGEST_WHOLE if tiling == "auto" else tiling == "on"


def make_request(
    checkpoint: Checkpoint,
    prompt: Any,
    negative: Any,
    per_prompt: int,
    *,
    size: tuple[Any, Any],
    steps: Any,
    guidance: Any,
    seed: Any,
    sampler: str | None,
    latents: Any,
    options: Any,
) -> Request:
    """A checked call; what is None is the checkpoint's default.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    options = check_options(options)
    check_for_model(options, checkpoint)
    prompts, negatives = check_prompts(prompt, negative, per_prompt)
    defaults = checkpoint.defaults
    height, width = (
        check_size(name, value, native)
        for name, value, native in zip(("height", "width"), size, checkpoint.native_size, strict=True)
    )
    factor = checkpoint.vae.factor
    shape = (len(prompts), height // factor, width // factor, checkpoint.unet.in_channels)
    request = Request(
        prompts=prompts,
        negatives=negatives,
        seeds=check_seeds(seed, len(prompts)),
        height=height,
        width=width,
        steps=check_steps(steps, options.own_steps, defaults.num_inference_steps, checkpoint.scheduler.schedule),
        guidance=check_guidance(guidance, defaults.guidance_scale),
        sampler=sampler,
        latents=check_latents(latents, shape),
        shape=shape,
        options=options,
        prompts_2=check_second("prompt_2", options.prompt_2, prompts, per_prompt),
        negatives_2=check_second("negative_prompt_2", options.negative_prompt_2, negatives, per_prompt),
        zeros=(negative, options.negative_prompt_2) == (None, None) and checkpoint.zeros_for_no_negative,
    )
    check_start(options, sampler, request.latents, checkpoint)
    return request


def check_prompts(prompt: Any, negative: Any, per_prompt: int) -> tuple[list[str], list[str]]:
    """One prompt and one negative prompt for each image: all images of the first prompt, then of the second, ..."""
    check_count("num_images_per_prompt", per_prompt)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, Sequence) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise InputError(f"prompt={prompt!r} is neither a string nor a list of strings")
    negatives = [negative or ""] * len(prompts) if negative is None or isinstance(negative, str) else negative
    if not isinstance(negatives, Sequence) or not all(isinstance(n, str) for n in negatives):
        raise InputError(f"negative_prompt={negative!r} is neither a string nor a list of strings")
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
        raise InputError(f"{name}={value!r} is neither a string nor a list of strings")
    if len(values) != count:
        raise InputError(f"{name} has {len(values)} entries for {count} prompts; give one string, or one for each")
    return [v for v in values for _ in range(per_prompt)]


def check_size(name: str, value: Any, default: int) -> int:
    """Height or width in pixels."""
    if value is None:
        return default
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 < value <= MAX_SIDE:
        raise InputError(f"{name}={value!r} is not a whole number of pixels in {SIZE_STEP}..{MAX_SIDE}")
    value = int(value)
    if value % SIZE_STEP:
        down, up = value - value % SIZE_STEP, value - value % SIZE_STEP + SIZE_STEP
        raise InputError(f"{name}={value} is not divisible by {SIZE_STEP}; use {f'{down} or ' if down else ''}{up}")
    return value


def check_steps(value: Any, own: int | None, default: int, schedule: NoiseSchedule) -> int:
    """Number of steps: as given, as the user's ``own`` levels or timesteps make, or the checkpoint's default."""
    most = schedule.alphas_cumprod.size
    if value is None:
        return own or default
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
        raise InputError(f"num_inference_steps={value!r} is not a whole number in 1..{most}; 20 to 50 is usual")
    if own not in (None, int(value)):
        raise InputError(
            f"num_inference_steps={value} with {own} levels, timesteps or scales of your own; leave it out"
        )
    return int(value)


def check_guidance(scale: Any, default: float) -> float:
    """Guidance scale: any finite number."""
    if scale is None:
        return default
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number) or not math.isfinite(scale):
        raise InputError(f"guidance_scale={scale!r} is not a finite number; 7.5 is usual, 1 or less switches it off")
    return float(scale)


def check_latents(latents: Any, shape: tuple[int, int, int, int]) -> np.ndarray | None:
    """Initial noise given by the caller, in the layout of ``Result.latents``."""
    if latents is None:
        return None
    try:
        array = np.asarray(latents, np.float32)
    except (TypeError, ValueError):
        raise InputError(f"latents={latents!r} is not an array; this call needs [B, h, w, C] = {shape}") from None
    if array.shape != shape:
        raise InputError(f"latents has shape {array.shape}; this call needs [B, h, w, C] = {shape}")
    if not np.isfinite(array).all():
        raise InputError("latents has values that are not finite")
    return array


def check_seeds(seed: Any, count: int) -> list[int]:
    """A seed for each image: ``seed + i``, or the list or array given."""
    if isinstance(seed, np.ndarray):
        return check_seeds(seed.tolist(), count)
    if isinstance(seed, list | tuple | range):
        if len(seed) != count:
            raise InputError(f"seed has {len(seed)} entries for {count} images; give one number, or one for each image")
        return [image_seeds(one, 1)[0] for one in seed]
    return image_seeds(seed, count)
