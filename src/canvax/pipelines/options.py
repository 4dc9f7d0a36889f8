"""Everything about a picture that is seldom changed, in one frozen record shared by API, command line and metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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
    """

    eta: float | None = None
    spacing: str | None = None
    sigmas: str | None = None
    guidance_rescale: float = 0.0
    clip_skip: int = 0
    noise: NoiseKind = "philox"
    progress: bool = True
    callback: Callback | None = None

    def __post_init__(self) -> None:
        if self.eta is not None and not (math.isfinite(self.eta) and 0 <= self.eta <= 1):
            raise InputError(f"eta={self.eta!r} is not in 0..1; leave it out for the sampler's own")
        if not (math.isfinite(self.guidance_rescale) and 0 <= self.guidance_rescale <= 1):
            raise InputError(f"guidance_rescale={self.guidance_rescale!r} is not in 0..1; 0.7 is usual")
        if self.noise not in get_args(NoiseKind):
            raise InputError(f"noise={self.noise!r} is not known; {nearest(str(self.noise), get_args(NoiseKind))}")

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults and decide the picture: what metadata keeps."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name not in ("progress", "callback") and (value := getattr(self, field.name)) != field.default
        }
