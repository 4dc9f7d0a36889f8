"""Everything about a picture that is seldom changed, in one frozen record shared by API, command line and metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np

from canvax.errors import InputError, check_count, nearest, plain, reading_arguments, refuse_tracers, shown
from canvax.familiar import CALL
from canvax.guidance import SETTINGS as METHODS
from canvax.guidance import Method
from canvax.noise import NoiseKind
from canvax.pipelines.checks import Tiling
from canvax.pipelines.option_checks import (
    check_callback,
    check_control_options,
    check_hires,
    check_kinds_of_guidance,
    check_noise,
    is_number,
    is_whole,
    numbers_of,
    pair_of,
    plain_value,
    settings_of,
    sides_of,
)
from canvax.prompts.grammar import PromptSyntax
from canvax.samplers.catalog import curve_named
from canvax.samplers.options import SPACINGS
from canvax.samplers.strength import StrengthRule


@dataclass(frozen=True)
class Step:
    """What a callback is told after each evaluation of the network.

    Attributes:
        index: the evaluation just done, from 0.
        total: how many there are.
        timestep: the timestep of it, of the checkpoint's 0..999.
        latents: the noisy latents after it [B, h, w, C] float32.
        denoised: the image the network sees in them [B, h, w, C] float32, for previews.
    """

    index: int
    total: int
    timestep: float
    latents: np.ndarray
    denoised: np.ndarray

    def __getattr__(self, name: str) -> Any:
        """Names that others' callbacks are told by."""
        if name.startswith("_"):
            raise AttributeError(name)
        meant = {"step": "index", "i": "index", "t": "timestep", "steps": "total", "images": "denoised"}.get(name)
        told = f"write step.{meant}" if meant else nearest(name, [field.name for field in dataclasses.fields(self)])
        raise AttributeError(f"{name!r:.80} is not an attribute of a step; {told}")


Callback = Callable[[Step], Any]
"""Called after each evaluation. It may return None to go on, False to cancel the image
(``canvax.errors.Cancelled``), or latents [B, h, w, C] to go on from in place of ``Step.latents``."""


ImageEncoding = Literal["mean", "sample"]
HiresMethod = Literal["pixel", "latent"]
MaskMode = Literal["hard", "soft", "graded"]
MaskBlend = Literal["denoised", "renoised"]
MaskFill = Literal["original", "fill", "noise", "nothing"]
_CHOICES = {
    "tiling": Tiling,
    "guidance_method": Method,
    "noise": NoiseKind,
    "prompt_syntax": PromptSyntax,
    "strength_rule": StrengthRule,
    "image_encoding": ImageEncoding,
    "mask_mode": MaskMode,
    "hires_method": HiresMethod,
    "mask_fill": MaskFill,
    "mask_blend": MaskBlend,
}

_OF_A_CALL = ("prompt", "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "seed")
_OF_A_CALL += ("num_images_per_prompt", "sampler", "latents", "image", "mask", "strength", "control", "image_prompt")
_OF_A_CALL += ("adapters",)

PAIRS = (
    *("original_size", "crops_coords_top_left", "target_size"),
    *("seed_size", "negative_original_size", "negative_crops_coords_top_left", "negative_target_size"),
)


@dataclass(frozen=True)
class Options:
    """Options of an image. Changing them does not recompile, except ``reuse`` and a guidance interval, which each add
    one program on first use.

    Attributes:
        eta: 0..1, randomness of DDIM and the ancestral samplers; None for the sampler's own.
        spacing: which timesteps are visited: "leading", "trailing" or "linspace"; None for the checkpoint's.
        sigmas: noise levels: a curve of ``canvax samplers curves`` such as "karras", or the levels themselves, falling
            (as for every list of numbers here, text with commas will do); None for what sampler and checkpoint say.
        sampler_settings: further settings of the sampler by name, such as ``{"s_churn": 10}``, ``{"solver_order": 3}``
            or ``{"timesteps": [999, 500, 250]}``; kept as ``("s_churn=10",)``.
        guidance_steps: the guidance scale of each step, in place of ``guidance_scale``.
        guidance_interval: the part of the run to guide, (from, to) in 0..1 from noise to picture; outside of it the
            prompt is followed without guidance, for half the work (Kynkaanniemi et al. 2024).
        guidance_rescale: 0..1, tames over-exposure at high guidance (Lin et al. 2024).
        guidance_method: how the outputs for the prompt and the negative prompt become one: "cfg", "cfg_zero" or
            "apg" (docs/guidance.md).
        guidance_settings: its numbers by name, such as ``{"eta": 0.0, "norm": 2.5}``; kept as ``("eta=0.0",)``.
        pag_scale: perturbed-attention guidance (Ahn et al. 2024), 3 is usual; 0 for none. Takes one evaluation more.
        pag_adaptive_scale: how much of it goes with each timestep; 0 for nothing.
        reuse: compute the deep features of the UNet, most of its work, in every n-th evaluation alone and forecast them
            in between (DeepCache: Ma et al. 2024; TaylorSeer: Liu et al. 2025). 1 computes them always.
        reuse_layers: how many of the outermost skip connections are computed always: more is truer and takes longer.
            Another number is another program, compiled once.
        tiling: decode the picture in tiles, in less memory: "on", "off", or "auto" for more than 1536 x 1536 pixels.
        clip_skip: layers of the text encoder left out at the end.
        noise: initial noise: "philox" (the same bits on every machine) or "torch" (PyTorch's CPU generator).
        prompt_syntax: what brackets in prompts mean: nothing ("plain"), or weights as "a1111", "comfy" or "compel"
            write them (docs/prompts.md).
        progress: show compiling and evaluations on stderr; "programs" shows compiling alone.
        callback: called after each step.
        strength_rule: what ``strength`` of an image means: "diffusers", "a1111" or "exact"
            (``canvax.samplers.strength``).
        image_encoding: latents of an image: the "mean" of what the encoder gives, or a "sample" by the seed.
        mask_mode: "hard": a mask's grey is rounded; "soft": it mixes; "graded": it says from when on in the run a place
            is generated, white from the beginning.
        mask_blur: standard deviation in pixels of the blur of a mask's edges.
        mask_fill: what the masked part is at first, below strength 1: the "original", "fill" for the colours around it,
            "noise" alone, or "nothing", which is latents of 0.
        mask_blend: what keeps the rest: the known image in place of the "denoised" one in each evaluation; or the known
            image with its noise in place of the noisy latents after each ("renoised", as PyTorch diffusers does it).
        padding_mask_crop: generate the masked part alone, at the size of a whole image, with this many pixels around
            it; None for the whole image.
        outpaint: pixels to add on each side of an image (left, top, right, bottom), or by name
            ``{"left": 64, "right": 64}``.
        control_scale: how strong a control image is, 1 as trained; one number, or one for each network (and so are the
            next three).
        control_start: 0..1, the part of the run after which it begins.
        control_end: 0..1, the part of the run after which it ends.
        control_mode: "balanced"; "guess", which needs no prompt: the network acts on the prompt's half of guidance
            alone, and its outer layers less; "prompt", where the prompt matters more: outer layers less; "control",
            where the image matters more: both.
        variation_seed: another seed, the same for all images; their noise goes towards its noise by
            ``variation_strength``.
        variation_strength: 0..1: 0 is the noise of ``seed``, 1 that of ``variation_seed``.
        seed_size: (height, width) whose noise the seed gives, put in the middle: keeps the composition
            at another size.
        hires: a second pass at so many times the size, begun from the first one's image.
        hires_method: what is made larger: the "pixel" image, or its "latent".
        hires_strength: of the second pass; None for 0.4, and 0.7 with "latent".
        hires_steps: steps that the second pass runs; None for as many as the first.
        hires_sampler: of the second pass; None for the same.
        hires_prompt: likewise; one for all, or one for each image.
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
    sigmas: str | Sequence[float] | None = None
    sampler_settings: Mapping[str, Any] | Sequence[str] = ()
    guidance_steps: Sequence[float] | None = None
    guidance_interval: Sequence[float] = (0.0, 1.0)
    guidance_rescale: float = 0.0
    guidance_method: Method = "cfg"
    guidance_settings: Mapping[str, Any] | Sequence[str] = ()
    pag_scale: float = 0.0
    pag_adaptive_scale: float = 0.0
    reuse: int = 1
    reuse_layers: int = 1
    tiling: Tiling = "auto"
    clip_skip: int = 0
    noise: NoiseKind = "philox"
    prompt_syntax: PromptSyntax = "plain"
    progress: bool | str = True
    callback: Callback | None = None
    strength_rule: StrengthRule = "diffusers"
    image_encoding: ImageEncoding = "mean"
    mask_mode: MaskMode = "hard"
    mask_blur: float = 0.0
    mask_fill: MaskFill = "original"
    mask_blend: MaskBlend = "denoised"
    padding_mask_crop: int | None = None
    outpaint: Any = None
    control_scale: float | Sequence[float] = 1.0
    control_start: float | Sequence[float] = 0.0
    control_end: float | Sequence[float] = 1.0
    control_mode: str | Sequence[str] = "balanced"
    variation_seed: int | None = None
    variation_strength: float = 0.0
    seed_size: tuple[int, int] | None = None
    hires: float = 1.0
    hires_method: HiresMethod = "pixel"
    hires_strength: float | None = None
    hires_steps: int | None = None
    hires_sampler: str | None = None
    hires_prompt: str | Sequence[str] | None = None
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

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        """Refuse unknown names in a sentence, before the constructor does in a bare one."""
        for name in keywords.keys() - set(_names()):
            meant = CALL[name].becomes if name in CALL else ""
            told = f"write {meant}" if meant else nearest(name, _names())
            if (meant or name) in _OF_A_CALL:
                told = f"{meant}: " * bool(meant) + "it is an argument of the call itself"
            raise InputError(f"canvax.Options has no {name!r}; {told}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        with reading_arguments(dict(vars(self))):
            self._check()

    def _check(self) -> None:
        """Every field, which it makes plain."""
        for field in dataclasses.fields(self):
            value = plain(getattr(self, field.name), field.name)
            if isinstance(value, np.ndarray) and field.name not in ("outpaint", "callback"):
                value = value.tolist()
            if isinstance(value, list | tuple | Mapping):
                refuse_tracers(field.name, value)
            object.__setattr__(self, field.name, value)  # metadata keeps plain values
        for name in ("sigmas", "guidance_steps", "guidance_interval"):
            object.__setattr__(self, name, numbers_of(name, getattr(self, name)))
        for name in ("reuse", "reuse_layers"):
            check_count(name, getattr(self, name))
        if self.spacing is not None and self.spacing not in SPACINGS:
            raise InputError(f"spacing={self.spacing!r} is not known; {nearest(str(self.spacing), SPACINGS)}")
        if isinstance(self.sigmas, str):
            curve_named(self.sigmas)
        for name in ("prompt_2", "negative_prompt_2", "hires_prompt"):
            texts = [value] if isinstance(value := getattr(self, name), str) else value
            if texts is not None and not (isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts)):
                raise InputError(f"{name}={shown(value)} is neither a string nor a list of strings")
        object.__setattr__(self, "sampler_settings", settings_of("sampler_settings", self.sampler_settings))
        object.__setattr__(self, "guidance_settings", settings_of("guidance_settings", self.guidance_settings))
        if not is_whole(self.clip_skip) or self.clip_skip < 0:
            raise InputError(f"clip_skip={self.clip_skip!r} is not a whole number of at least 0")
        if self.eta is not None and not (is_number(self.eta) and 0 <= self.eta <= 1):
            raise InputError(f"eta={self.eta!r} is not in 0..1; leave it out for the sampler's own")
        if not (is_number(self.guidance_rescale) and 0 <= self.guidance_rescale <= 1):
            raise InputError(f"guidance_rescale={self.guidance_rescale!r} is not in 0..1; 0.7 is usual")
        for name, kind in _CHOICES.items():
            if (value := getattr(self, name)) not in get_args(kind):
                array = name == "noise" and not isinstance(value, str)
                told = "an array is given as latents=" if array else nearest(shown(value), get_args(kind))
                raise InputError(f"{name}={shown(value)} is not known; {told}")
        if not (is_number(self.mask_blur) and 0 <= self.mask_blur <= 1000):
            raise InputError(f"mask_blur={self.mask_blur!r} is not in 0..1000 pixels; 4 is usual")
        if (crop := self.padding_mask_crop) is not None and not (is_whole(crop) and 0 <= crop <= 16384):
            raise InputError(f"padding_mask_crop={crop!r} is not a whole number of pixels of at least 0; 32 is usual")
        object.__setattr__(self, "outpaint", sides_of(self.outpaint))
        check_kinds_of_guidance(self)
        check_noise(self)
        check_control_options(self)
        check_hires(self)
        if not isinstance(self.progress, bool) and self.progress != "programs":
            raise InputError(f"progress={self.progress!r} is not True, False or 'programs'")
        if not (is_number(self.denoising_start) and is_number(self.denoising_end)) or not (
            0 <= self.denoising_start < self.denoising_end <= 1
        ):
            raise InputError(
                f"denoising_start={self.denoising_start!r} and denoising_end={self.denoising_end!r} are not in order; "
                "give 0 <= denoising_start < denoising_end <= 1, 0.8 is usual between base and refiner"
            )
        check_callback(self.callback)
        for name in PAIRS:
            object.__setattr__(self, name, pair_of(name, getattr(self, name)))
        for name in ("aesthetic_score", "negative_aesthetic_score"):
            if getattr(self, name) is not None and not is_number(getattr(self, name)):
                raise InputError(f"{name}={getattr(self, name)!r} is not a finite number; 6 is usual, 2.5 as negative")

    @property
    def settings(self) -> dict[str, Any]:
        """``sampler_settings`` by name."""
        pairs = (setting.partition("=") for setting in self.sampler_settings)
        return {name: plain_value(value) for name, _, value in pairs}

    @property
    def guidance_numbers(self) -> dict[str, float]:
        """The numbers of ``guidance_method`` by name, in their order."""
        given = {name: plain_value(value) for name, _, value in (one.partition("=") for one in self.guidance_settings)}
        return {name: given.get(name, usual) for name, (usual, _, _) in METHODS[self.guidance_method].items()}

    @property
    def own_steps(self) -> int | None:
        """How many steps levels, timesteps or guidance of the user's own make; None without any."""
        if isinstance(timesteps := self.settings.get("timesteps"), list):
            return len(timesteps)
        if isinstance(self.sigmas, tuple):
            return len(self.sigmas) - (self.sigmas[-1] == 0)
        return len(self.guidance_steps) if self.guidance_steps else None

    def given(self) -> set[str]:
        """Names of the options that differ from their defaults."""
        return {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults and decide the picture: what metadata keeps."""
        decisive = self.given() - {"progress", "callback"}
        return {name: getattr(self, name) for name in _names() if name in decisive}


def _refuse_change(options: Options, name: str, value: Any) -> None:
    cure = f"give {name}= to the call, or write dataclasses.replace(options, {name}=...)"
    cure = cure if name in _names() else nearest(name, _names())
    raise dataclasses.FrozenInstanceError(f"options.{name} cannot be set; {cure}")


setattr(Options, "__setattr__", _refuse_change)  # noqa: B010 (a frozen dataclass may not have its own)


def _names() -> list[str]:
    return [field.name for field in dataclasses.fields(Options)]


def check_options(options: Any) -> Options:
    """``options`` or, for None, all defaults.

    Raises:
        InputError: they are something else.
    """
    if options is None or isinstance(options, Options):
        return options or Options()
    such = "eta=0.5"
    if isinstance(options, Mapping) and options:
        such = ", ".join(f"{name}={value!r}" for name, value in options.items())
    raise InputError(f"options={shown(options)} is not a canvax.Options; write options=canvax.Options({such})")
