"""``canvax.Options``: the settings of an image that are seldom changed; and the record that callbacks get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from canvax.call import OptionRecord
from canvax.errors import InputError, check_function, conflict, shown
from canvax.guidance import KINDS, PERTURBED, Guidance, rule_of
from canvax.samplers.catalog import curve_named, find
from canvax.settings import check_all, declared, is_number, listed, markdown, plain_value


@dataclass(frozen=True)
class Step:
    """The state of a run after an evaluation of the network, for callbacks.

    Attributes:
        index: the evaluation just done, from 0.
        total: number of evaluations.
        timestep: its timestep, of the checkpoint's 0..999.
        latents: the noisy latents after it [B, h, w, C] float32.
        denoised: the image the network sees in them [B, h, w, C] float32, for previews.
        scale: ``latents / scale`` are the latents in diffusers' scheduler. With Euler, Heun, LMS, DPM2 and DPM++ SDE
            they have the image at full strength, and ``scale`` is its weight in ``latents``; else it is 1.
    """

    index: int
    total: int
    timestep: float
    latents: np.ndarray
    denoised: np.ndarray
    scale: float = 1.0


Callback = Callable[[Step], Any]
"""A function that is called after each evaluation. It may return None to continue, False to cancel the image
(``canvax.errors.Cancelled``), or latents [B, h, w, C] to continue from instead of ``Step.latents``."""


@dataclass(frozen=True)
class Options(OptionRecord):
    """Options of an image. Changing them does not recompile, except where noted.

    ``canvax/call.py`` declares each option with its range and help; docs/reference/settings.md lists them. Options may
    be arguments of a call as well: ``pipe("a cat", clip_skip=1)``.
    """

    def __post_init__(self) -> None:
        check_all(self)
        for rule in _RULES:
            rule(self)

    @property
    def settings(self) -> dict[str, Any]:
        """``sampler_settings`` by name."""
        return _by_name(self.sampler_settings)

    @property
    def guidance_numbers(self) -> dict[str, Any]:
        """Numbers for the rule of guidance, by name."""
        pag = {"pag_scale": self.pag_scale, "pag_adaptive_scale": self.pag_adaptive_scale}
        return pag | _by_name(self.guidance_settings)

    @property
    def unguided_noise(self) -> bool:
        """True for CFG++, which is ordinary guidance with other scales."""
        return self.guidance_method == "cfg_pp"

    def rule(self, usual: str, *, guided: bool = True, parts: int = 0) -> Guidance:
        """Return the rule of guidance of a call, for ``parts`` prompts that are added up; 0 for none.

        ``usual`` is the model's own kind.
        """
        method = (self.guidance_method if guided else None) or usual
        return rule_of(method, perturbs=self.pag_scale > 0, parts=parts)

    @property
    def listed_steps(self) -> int | None:
        """Number of steps in the user's list of levels, timesteps or guidance scales; None without a list."""
        if isinstance(timesteps := self.settings.get("timesteps"), list):
            return len(timesteps)
        if isinstance(self.sigmas, tuple):
            return len(self.sigmas) - (self.sigmas[-1] == 0)
        return len(self.guidance_steps) if self.guidance_steps else None

    def changed_names(self) -> set[str]:
        """Return the names of the options that differ from their defaults."""
        return {name for name, field in declared(type(self)).items() if getattr(self, name) != field.default}

    def changed(self) -> dict[str, Any]:
        """Return the options that metadata keeps: they decide the image and differ from their defaults."""
        decisive = self.changed_names() - {"progress", "callback"}
        changed = {name: getattr(self, name) for name in declared(type(self)) if name in decisive}
        if not isinstance(rule := changed.get("guidance_method", ""), str):
            changed["guidance_method"] = name_of(rule)
        return changed


def name_of(function: Any) -> str:
    """Return the name of a function as metadata writes it."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def _by_name(pairs: Any) -> dict[str, Any]:
    return {name: plain_value(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def _check_curve(options: Options) -> None:
    if isinstance(options.sigmas, str):
        curve_named(options.sigmas)


def _check_guidance(options: Options) -> None:
    rule = options.guidance_method or "cfg"
    method = rule if isinstance(rule, str) else name_of(rule)
    known = rule_of(rule).columns
    settings = _by_name(options.guidance_settings)
    for name, value in settings.items():
        if name not in known:
            having = "".join(f"; {{guidance_method={each}}} has it" for each in KINDS if name in KINDS[each].columns)
            cure = f"it has {', '.join(known) or 'none'}{having}"
            problem = f"has {name!r}, which {method} does not have"
            raise InputError("guidance_settings", problem, cure=cure, value=settings)
        usual, low, high = known[name]
        entries = value if isinstance(value, list) else [value]
        good = all(is_number(entry) and low <= entry <= high for entry in entries)
        if not good or np.shape(value) != np.shape(usual):
            problem = f"has {name}={shown(value)}, which is not in {low:g}..{high:g}"
            raise InputError("guidance_settings", problem, value=settings)
    low, high = options.guidance_interval
    if low >= high:
        raise InputError(
            "guidance_interval", "is not in order", cure="for example 0.2,0.8", value=options.guidance_interval
        )
    if options.guidance_rescale and method != "cfg":
        raise conflict("guidance_rescale", f"guidance_method={method!r}", value=options.guidance_rescale)
    if options.reuse > 1 and PERTURBED in options.rule("cfg").samples:
        raise conflict(
            "reuse", "pag_scale" if options.pag_scale else f"guidance_method={method!r}", value=options.reuse
        )


def _check_control(options: Options) -> None:
    starts, ends = listed(options.control_start), listed(options.control_end)
    for i in range(max(len(starts), len(ends))):
        start, end = starts[i % len(starts)], ends[i % len(ends)]
        if start >= end:
            raise InputError(
                "control_start", f"is not before control_end={end:g}", cure="give them in order", value=start
            )


def _check_window(options: Options) -> None:
    start, end = options.denoising_start, options.denoising_end
    if start >= end:
        cure = "0.8 is usual for both, between base and refiner"
        raise InputError("denoising_start", f"is not before denoising_end={end:g}", cure=cure, value=start)


def _check_hires_sampler(options: Options) -> None:
    if options.hires_sampler is not None:
        try:
            find(options.hires_sampler)
        except InputError as error:
            raise error.about("hires_sampler") from None


def _check_callback(options: Options) -> None:
    if options.callback is not None:
        check_function("callback", options.callback, 1, "one argument, a canvax.Step; callback_on_step_end takes a "
                       "function of (pipe, index, timestep, tensors)")  # fmt: skip


_RULES = (_check_curve, _check_guidance, _check_control, _check_window, _check_hires_sampler, _check_callback)
"""Checks of several options together, and of values that only samplers and guidance know."""

Options.__doc__ = f"{Options.__doc__}\n{markdown(Options)}"


def check_options(options: Any) -> Options:
    """Return ``options`` or, for None, all defaults.

    Raises:
        InputError: the value is something else.
    """
    if options is None or isinstance(options, Options):
        return options or Options()
    pairs = "eta=0.5"
    if isinstance(options, Mapping) and options:
        pairs = ", ".join(f"{name}={value!r}" for name, value in options.items())
    raise InputError("options", "is not a canvax.Options", cure=f"write options=canvax.Options({pairs})", value=options)
