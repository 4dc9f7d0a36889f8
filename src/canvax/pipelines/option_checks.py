"""Reading and checking the values of ``canvax.Options``: each error names the option, the value and the cure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from canvax.checked import check_function
from canvax.errors import InputError, nearest, shown
from canvax.guidance import SETTINGS as METHODS
from canvax.pipelines.checks import MAX_SIDE, MOST_GUIDANCE
from canvax.samplers.catalog import find

_SIDES = ("left", "top", "right", "bottom")
MOST_PIXELS = 1_000_000
"""Of a side of a picture that a model was trained on."""
_NUMBER = re.compile(r"[+-]?(\d{1,99}(?:\.\d{0,99})?|\.\d{1,99})(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
MOST_NUMBERS = 10_000
"""Numbers of a list: more than any run has steps. What has no end is not read to its end."""


def check_callback(callback: Any) -> None:
    """Refuse what cannot be called with one ``Step``, before anything runs."""
    also = "; callback_on_step_end takes a function of (pipe, index, timestep, tensors)"
    if callback is not None:
        check_function("callback", callback, 1, f"one argument, a canvax.Step{also}")


def check_step_end(callback: Any) -> None:
    """Refuse what cannot be called as a callback of diffusers is, before anything runs."""
    if callback is not None:
        check_function("callback_on_step_end", callback, 4, "(pipe, index, timestep, tensors)")


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return (
        isinstance(value, int | float | np.number)
        and not isinstance(value, bool)
        and bool(-math.inf < value < math.inf)
    )


def is_whole(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def numbers_of(name: str, value: Any) -> Any:
    """A list of numbers, also as text with commas, as a tuple; the name of a curve and None as they are."""
    if isinstance(value, str):
        if name == "sigmas" and re.match(r"\s*[a-zA-Z_]", value):
            return value
        value = value.split(",")
    given = value
    if value is None and name != "guidance_interval":
        return None
    if isinstance(value, bytes | set | frozenset | Mapping):  # which iterate as well, and mean something else
        value = ()
    try:
        numbers = tuple(_float(one) for one in islice(value or (), MOST_NUMBERS + 1))
    except (TypeError, ValueError, OverflowError):
        numbers = ()
    if len(numbers) > MOST_NUMBERS:
        raise InputError(f"{name} has more than {MOST_NUMBERS} numbers; give one for each step")
    if name == "guidance_interval" and not (len(numbers) == 2 and 0 <= numbers[0] < numbers[1] <= 1):
        raise InputError(f"guidance_interval={shown(given)} is not two fractions of the run in order, such as 0.2,0.8")
    if not numbers or not all(math.isfinite(one) for one in numbers):
        such = "14.6,6.5,2.7,0.9,0" if name == "sigmas" else "7.5,5,2.5,1"
        raise InputError(f"{name}={shown(given)} is not a list of numbers, such as {such}")
    return numbers


def _float(value: Any) -> float:
    return math.nan if isinstance(value, bool) else float(value)


def check_kinds_of_guidance(options: Any) -> None:
    """Refuse methods of guidance with numbers that they do not have."""
    method, own = options.guidance_method, METHODS[options.guidance_method]
    for name in (one.partition("=")[0] for one in options.guidance_settings):
        if name not in own:
            having = "".join(f"; guidance_method={one!r} has it" for one in METHODS if name in METHODS[one])
            raise InputError(f"guidance_settings: {method} has no {name!r}; it has {', '.join(own) or 'none'}{having}")
    for name, value in options.guidance_numbers.items():
        _, low, high = own[name]
        if not (is_number(value) and low <= value <= high):
            raise InputError(f"guidance_settings: {name}={value!r} is not in {low:g}..{high:g}")
    for name in ("pag_scale", "pag_adaptive_scale"):
        if not (is_number(value := getattr(options, name)) and 0 <= value <= 100):
            raise InputError(f"{name}={value!r} is not in 0..100; 3 is usual for pag_scale, 0 for none")
    if max(map(abs, options.guidance_steps or (0.0,))) > MOST_GUIDANCE:
        raise InputError(f"guidance_steps={options.guidance_steps!r} has one beyond {MOST_GUIDANCE}; 7.5 is usual")
    if options.guidance_rescale and method != "cfg":
        raise InputError(f"guidance_rescale with guidance_method={method!r}, which has its own way; leave one out")
    if options.reuse > 1 and options.pag_scale:
        raise InputError("reuse with pag_scale: deep features are taken as they are; leave one out")


CONTROL_MODES = ("balanced", "guess", "prompt", "control")


def check_control_options(options: Any) -> None:
    """Refuse strengths and windows of control images that are none; lists of them become tuples."""
    ranges = {"control_scale": (-10, 10, "1 is as trained"), "control_start": (0, 1, "0 is from the beginning")}
    ranges |= {"control_end": (0, 1, "1 is to the end")}
    for name, (low, high, usual) in ranges.items():
        given = getattr(options, name)
        values = _listed(given)
        if not values or not all(is_number(one) and low <= one <= high for one in values):
            raise InputError(f"{name}={given!r} is not in {low}..{high}; {usual}")
        object.__setattr__(options, name, values[0] if len(values) == 1 else values)
    modes = _listed(options.control_mode)
    for mode in modes or ("",):
        if is_number(mode):
            raise InputError(
                f"control_mode={options.control_mode!r}: the type of a ControlNet-Union stands with its image, "
                "control={'depth': image} or control={1: image}"
            )
        if mode not in CONTROL_MODES:
            raise InputError(f"control_mode={options.control_mode!r} is not known; {nearest(str(mode), CONTROL_MODES)}")
    object.__setattr__(options, "control_mode", modes[0] if len(modes) == 1 else modes)
    starts, ends = _listed(options.control_start), _listed(options.control_end)
    count = max(len(starts), len(ends))
    for i in range(count):
        start, end = starts[i % len(starts)], ends[i % len(ends)]
        if start >= end:
            raise InputError(f"control_start={start:g} is not before control_end={end:g}; give them in order")


def _listed(value: Any) -> tuple[Any, ...]:
    """Numbers or words as a tuple: one, several, or text with commas."""
    if isinstance(value, str):
        return tuple(plain_value(part.strip()) for part in value.split(","))
    return tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,)


def check_noise(options: Any) -> None:
    """Refuse variations that are none."""
    strength, seed = options.variation_strength, options.variation_seed
    if not (is_number(strength) and 0 <= strength <= 1):
        raise InputError(f"variation_strength={strength!r} is not in 0..1; 0.1 changes little")
    if seed is not None and not (is_whole(seed) and 0 <= seed < 2**64):
        raise InputError(f"variation_seed={seed!r} is not a whole number in 0..2**64-1")
    if strength and seed is None:
        raise InputError(f"variation_strength={strength:g} without variation_seed: give one, such as 1")


def check_hires(options: Any) -> None:
    """Refuse second passes that cannot be run."""
    if not (is_number(options.hires) and 1 <= options.hires <= 8):
        raise InputError(f"hires={options.hires!r} is not in 1..8, how many times larger; 2 is usual")
    strength, steps, sampler = options.hires_strength, options.hires_steps, options.hires_sampler
    if strength is not None and not (is_number(strength) and 0 < strength <= 1):
        raise InputError(f"hires_strength={strength!r} is not in 0..1, 0 left out; 0.4 is usual")
    if steps is not None and not (is_whole(steps) and steps >= 1):
        raise InputError(f"hires_steps={steps!r} is not a whole number of at least 1")
    if sampler is not None and not isinstance(sampler, str):
        raise InputError(f"hires_sampler={sampler!r} is not the name of a sampler; canvax samplers lists them")
    if sampler is not None:
        try:
            find(sampler)
        except InputError as error:  # of "sampler="
            raise InputError(f"hires_{error}") from None
    if options.hires == 1 and (given := [name for name in sorted(options.given()) if name.startswith("hires_")]):
        raise InputError(f"{given[0]} without hires: give hires=2 as well")


def check_once(name: str, parts: Iterable[str]) -> None:
    """Refuse a part of an option that is given twice, of which one would win without a word."""
    seen: set[str] = set()
    for part in parts:
        if part in seen:
            raise InputError(f"{name} has {part!r} twice; keep one")
        seen.add(part)


def sides_of(value: Any) -> tuple[int, int, int, int] | None:
    """Pixels on each side, also as text: ``left=64,right=64``, or four numbers."""
    if value is None:
        return None
    wrong = f"outpaint={value!r} is not pixels by side, such as left=64,right=64, or left, top, right and bottom"
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",")]
        named = "=" in value
        check_once("outpaint", (name.strip() for name, _, _ in pairs if named))
        value = {name.strip(): number for name, _, number in pairs} if named else [name for name, _, _ in pairs]
    if isinstance(value, Mapping):
        if value.keys() - set(_SIDES):
            raise InputError(wrong)
        value = [value.get(side, 0) for side in _SIDES]
    try:
        sides = tuple(int(side) if isinstance(side, str) else side for side in islice(value, 5))
    except (TypeError, ValueError):
        raise InputError(wrong) from None
    if len(sides) != 4 or not all(is_whole(side) and 0 <= side <= 16384 for side in sides) or not any(sides):
        raise InputError(wrong)
    left, top, right, bottom = map(int, sides)
    return left, top, right, bottom


def settings_of(name: str, value: Any) -> tuple[str, ...]:
    """Settings as ``name=value`` texts, the value in JSON."""
    if isinstance(value, Mapping):
        value = [f"{key}={json.dumps(one, default=_plain)}" for key, one in value.items()]
    if not isinstance(value, Sequence) or isinstance(value, str) or not all("=" in str(one) for one in value):
        such, table = ("s_churn=10", "{'s_churn': 10}") if name == "sampler_settings" else ("norm=2.5", "{'norm': 2.5}")
        told = f"is text; write a table, such as {table}" if isinstance(value, str) else None
        raise InputError(f"{name}={value!r} {told or f'are not names with values, such as {such}'}")
    check_once(name, (str(one).partition("=")[0] for one in value))
    return tuple(str(one) for one in value)


def _plain(value: Any) -> Any:
    """An array as lists, a numpy scalar as a number, for JSON."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)


def plain_value(text: str) -> Any:
    """A number, true, false, a list with or without its brackets, or a word."""
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except ValueError:
            continue
        except RecursionError:
            raise InputError(f"sampler_settings: {text[:40]}... is nested too deeply") from None
    inner = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    parts = [part.strip() for part in inner.split(",")]
    if all(map(_NUMBER.fullmatch, parts)):  # .5, 1. and +0.5, which are none in JSON
        numbers = [int(part) if part.lstrip("+-").isdigit() else float(part) for part in parts]
        return numbers if "," in text or inner != text else numbers[0]
    return {"True": True, "False": False}.get(text, text)


def pair_of(name: str, value: Any) -> tuple[int, int] | None:
    """A size or a position as two plain integers; metadata gives it back as a list."""
    if value is None:
        return None
    whole = isinstance(value, Sequence | np.ndarray) and all(isinstance(v, int | np.integer) for v in value)
    lowest, most = 0 if "crops" in name else 1, MAX_SIDE if name == "seed_size" else MOST_PIXELS
    if not whole or len(value) != 2 or any(isinstance(v, bool) or not lowest <= v <= most for v in value):
        order = "(top, left)" if "crops" in name else "(height, width)"
        told = f"{name}={value!r:.80} is not {order} in whole pixels of at least {lowest}"
        raise InputError(f"{told} and at most {most}, such as (1024, 1024)")
    return int(value[0]), int(value[1])
