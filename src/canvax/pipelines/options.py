"""Everything about a picture that is seldom changed, in one frozen record shared by API, command line and metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from canvax.errors import InputError, nearest
from canvax.noise import NoiseKind


@dataclass(frozen=True)
class Step:
    """What a callback is told after each evaluation of the network.

    Attributes:
        index: the evaluation just done, from 0.
        total: how many there are.
        latents: the noisy latents after it [B, h, w, C] float32.
        denoised: the image the network sees in them [B, h, w, C] float32, for previews.
    """

    index: int
    total: int
    latents: np.ndarray
    denoised: np.ndarray


Callback = Callable[[Step], bool | None]
"""Called after each step; returning False cancels the picture (:class:`canvax.errors.Cancelled`)."""


PAIRS = (
    *("original_size", "crops_coords_top_left", "target_size"),
    *("negative_original_size", "negative_crops_coords_top_left", "negative_target_size"),
)
AESTHETICS = ("aesthetic_score", "negative_aesthetic_score")
XL_ONLY = ("prompt_2", "negative_prompt_2", *PAIRS, *AESTHETICS)
"""Options that mean nothing to Stable Diffusion 1.x and 2.x."""


@dataclass(frozen=True)
class Options:
    """Options of a picture. None of them ever compiles anything again.

    Attributes:
        eta: 0..1, randomness of DDIM and the ancestral samplers; None for the sampler's own.
        spacing: which timesteps are visited: "leading", "trailing" or "linspace"; None for the checkpoint's.
        sigmas: noise levels: "normal", "karras", "exponential"; None for what sampler and checkpoint say.
        guidance_rescale: 0..1, tames over-exposure at high guidance (Lin et al. 2024).
        clip_skip: layers of the text encoder left out at the end.
        noise: initial noise: "philox" (the same bits on every machine) or "torch" (PyTorch's CPU generator).
        progress: show compiling and steps on stderr.
        callback: called after each step.
        denoising_start: 0..1, the part of the run that is done already: ``latents`` are noisy latents as a run with
            ``denoising_end`` at this value left them.
        denoising_end: 0..1, where to stop: ``Result.latents`` are noisy latents then, and nothing is decoded.

    SDXL alone; sizes are (height, width), a crop is (top, left). What is left out of the negative side is as on the
    other.

    Attributes:
        prompt_2: what the second text encoder reads, if not ``prompt``; one for all, or one for each prompt.
        negative_prompt_2: likewise, if not ``negative_prompt``.
        original_size: size of the training picture to draw like; small is blurred. By default the size drawn.
        crops_coords_top_left: where the training picture was cropped; (0, 0) is well framed.
        target_size: size the training picture was brought to. By default the size drawn. Not for the refiner.
        negative_original_size: what to keep away from; likewise the next two.
        negative_crops_coords_top_left: see ``crops_coords_top_left``.
        negative_target_size: see ``target_size``.
        aesthetic_score: the refiner's: about 1..10, how beautiful, by default 6.
        negative_aesthetic_score: likewise what to keep away from, by default 2.5.
    """

    eta: float | None = None
    spacing: str | None = None
    sigmas: str | None = None
    guidance_rescale: float = 0.0
    clip_skip: int = 0
    noise: NoiseKind = "philox"
    progress: bool = True
    callback: Callback | None = None
    denoising_start: float = 0.0
    denoising_end: float = 1.0
    prompt_2: str | Sequence[str] | None = None
    negative_prompt_2: str | Sequence[str] | None = None
    original_size: tuple[int, int] | None = None
    crops_coords_top_left: tuple[int, int] = (0, 0)
    target_size: tuple[int, int] | None = None
    negative_original_size: tuple[int, int] | None = None
    negative_crops_coords_top_left: tuple[int, int] | None = None
    negative_target_size: tuple[int, int] | None = None
    aesthetic_score: float | None = None
    negative_aesthetic_score: float | None = None

    def __post_init__(self) -> None:
        if self.eta is not None and not (math.isfinite(self.eta) and 0 <= self.eta <= 1):
            raise InputError(f"eta={self.eta!r} is not in 0..1; leave it out for the sampler's own")
        if not (math.isfinite(self.guidance_rescale) and 0 <= self.guidance_rescale <= 1):
            raise InputError(f"guidance_rescale={self.guidance_rescale!r} is not in 0..1; 0.7 is usual")
        if self.noise not in get_args(NoiseKind):
            raise InputError(f"noise={self.noise!r} is not known; {nearest(str(self.noise), get_args(NoiseKind))}")
        if not (_is_number(self.denoising_start) and _is_number(self.denoising_end)) or not (
            0 <= self.denoising_start < self.denoising_end <= 1
        ):
            raise InputError(
                f"denoising_start={self.denoising_start!r} and denoising_end={self.denoising_end!r} are not in order; "
                "give 0 <= denoising_start < denoising_end <= 1, 0.8 is usual between base and refiner"
            )
        for name in PAIRS:
            object.__setattr__(self, name, _pair(name, getattr(self, name)))
        for name in AESTHETICS:
            if getattr(self, name) is not None and not _is_number(getattr(self, name)):
                raise InputError(f"{name}={getattr(self, name)!r} is not a finite number; 6 is usual, 2.5 as negative")

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults and decide the picture: what metadata keeps."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name not in ("progress", "callback") and (value := getattr(self, field.name)) != field.default
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _pair(name: str, value: Any) -> tuple[int, int] | None:
    """A size or a position as two plain integers; metadata gives it back as a list."""
    if value is None:
        return None
    whole = isinstance(value, Sequence | np.ndarray) and all(isinstance(v, int | np.integer) for v in value)
    lowest = 0 if "crops" in name else 1
    if not whole or len(value) != 2 or any(isinstance(v, bool) or v < lowest for v in value):
        order = "(top, left)" if "crops" in name else "(height, width)"
        raise InputError(f"{name}={value!r} is not {order} in whole pixels of at least {lowest}, such as (1024, 1024)")
    return int(value[0]), int(value[1])
