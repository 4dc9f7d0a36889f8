"""Units of sd-webui-controlnet, which AUTOMATIC1111's clients send, as canvax means them; and what they ask for.

A control image is brought to the size of what is generated before its map is made, so ``processor_res`` and
``pixel_perfect`` have nothing to say here. ``low_vram``, ``hr_option`` and ``save_detected_map`` are not read either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from PIL import Image, ImageOps

from canvax.images.maps import control_map
from canvax.images.masks import resized
from canvax.server.images_in import Pixels
from canvax.server.jobs import ControlCard, ModelCard, PromptImage, Refused

SCRIPT = "controlnet"
VERSION = 3
"""Of the extension's API, whose fields these are."""

MOST_UNITS = 10

MOST_MAPPED = 1 << 22
"""Pixels of the largest image whose control image is made here, 2048 x 2048: edges take a hundred bytes for each."""

_RESIZE = ("just resize", "crop and resize", "resize and fill")
_MODES = {"balanced": "balanced", "my prompt is more important": "prompt", "controlnet is more important": "control"}
_TYPES = {
    "openpose": "openpose",
    "depth": "depth",
    "soft edge": "softedge",
    "hard edge": "canny",
    "normal map": "normal",
    "segmentation": "segment",
}
"""Of a union, by its name there."""

_MAPS = {
    "canny": ("canny", {"low": (1, 255, "Canny Low Threshold"), "high": (1, 255, "Canny High Threshold")}),
    "invert": ("invert", {}),
    "invert (from white bg & black line)": ("invert", {}),
    "threshold": ("threshold", {"at": (0, 255, "Binarization Threshold")}),
    "blur_gaussian": ("blur", {"radius": (0.01, 64, "Sigma")}),
}
"""The preprocessors that are made here, and which number each threshold is, within which range, by its name there."""
_USUAL = {"low": 100, "high": 200, "at": 127, "radius": 9}
_AS_SENT = ("none", "tile_resample")
_OF_PROMPTS = "ip-adapter"
_NOT_OFFERED = ("advanced_weighting", "effective_region_mask", "ipadapter_input", "mask", "mask_image")

Text = Annotated[str, Meta(max_length=200)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class UnitImage(Struct):
    """The image of a unit with its mask, which nothing here reads."""

    image: str
    mask: str | None = None


class Unit(Struct, kw_only=True):
    """A unit of sd-webui-controlnet: what is read of its fields."""

    enabled: bool | None = None
    image: str | UnitImage | None = None
    input_image: str | None = None
    module: Text | None = None
    model: Text | None = None
    weight: Annotated[float, Meta(ge=0, le=2)] | None = None
    resize_mode: int | Text | None = None
    threshold_a: float | None = None
    threshold_b: float | None = None
    guidance: Fraction | None = None
    guidance_start: Fraction | None = None
    guidance_end: Fraction | None = None
    control_mode: int | Text | None = None
    guessmode: bool | None = None
    union_control_type: Text | None = None
    # refused where they ask for something
    mask: str | None = None
    mask_image: str | None = None
    advanced_weighting: list[float] | None = None
    effective_region_mask: str | None = None
    ipadapter_input: str | list[str] | None = None


class Script(Struct):
    """What a script of AUTOMATIC1111 is given."""

    args: Annotated[list[Unit | bool | float | str | list[Any] | None], Meta(max_length=100)] = []
    image: Any = None
    """Of a unit that stands here, and not in ``args``."""


Scripts = dict[Text, Script]


@dataclass(frozen=True)
class Controlled:
    """What units ask for, as fields of an ask."""

    control: Any = None
    image_prompt: list[PromptImage] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Steer:
    """How strong a network is."""

    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: str = "balanced"


def units_of(scripts: Scripts | None) -> list[Unit]:
    """The units that are switched on.

    Raises:
        Refused: another script is asked for, or there are too many.
    """
    found: list[Unit] = []
    for name, script in (scripts or {}).items():
        if name.strip().lower() != SCRIPT:
            if script.args:
                raise _refused("alwayson_scripts", f"{name[:60]!r} is not offered by this server; leave it out")
            continue
        if script.image is not None and not script.args:
            raise _refused("alwayson_scripts", 'controlnet is a unit itself; put it into a list: {"args": [{...}]}')
        if not all(isinstance(one, Unit | None) for one in script.args):
            raise _refused("alwayson_scripts", "the args of controlnet are units, each an object")
        found += [one for one in script.args if isinstance(one, Unit) and one.enabled is not False]
    if len(found) > MOST_UNITS:
        raise _refused("alwayson_scripts", f"{len(found)} units are more than {MOST_UNITS}")
    return found


def controlled(units: Sequence[Unit], card: ModelCard, size: tuple[int, int], usual: Image.Image | None) -> Controlled:
    """What units ask for. Decodes their images.

    Args:
        units: those that are switched on.
        card: the model's.
        size: width and height of what is generated.
        usual: the image of a unit that brings none: what image to image begins from.

    Raises:
        Refused: naming the field.
    """
    if not units:
        return Controlled()
    _check_size(card, size)
    pixels = Pixels()
    shown: dict[str, Any] = {}
    steers: dict[str, _Steer] = {}
    prompts: list[PromptImage] = []
    for unit in units:
        for name in _NOT_OFFERED:
            if getattr(unit, name):
                raise _refused(name, "is not offered by this server; leave it out")
        image = _image_of(unit, pixels, usual)
        net = _network(unit, card)
        if isinstance(net, int):
            prompts.append(_prompt(unit, image, net))
            continue
        steer = _steer(unit)
        if steers.setdefault(net.name, steer) != steer:
            raise _refused("weight", f"units of {net.name} differ in weight, guidance or mode, of which it has one")
        image = _mapped(unit, _fitted(unit, image, size))
        if net.kind != "union":
            if net.name in shown:
                raise _refused("model", f"{net.name} is in two units; it reads one image")
            shown[net.name] = image
            continue
        label = _type(unit, net)
        if label in shown.setdefault(net.name, {}):
            raise _refused("union_control_type", f"{net.name} is given two images of the type {label}")
        shown[net.name][label] = image
    if not shown:
        return Controlled(image_prompt=prompts or None)
    each = [steers.get(net.name, _Steer()) for net in card.controls]
    options = {f"control_{name}": [getattr(one, name) for one in each] for name in ("scale", "start", "end", "mode")}
    return Controlled([shown.get(net.name) for net in card.controls], prompts or None, options)


def _check_size(card: ModelCard, size: tuple[int, int]) -> None:
    """Refuse what the engine would, before images are brought to such a size and maps are made of them."""
    if size not in card.sizes and not card.any_size:
        ready = " or ".join(f"{width}x{height}" for width, height in card.sizes)
        raise Refused(400, "size_not_ready", f"{size[0]}x{size[1]} is not ready here; ask for {ready}", param="width")
    if size[0] * size[1] > MOST_MAPPED:
        raise _refused("width", f"{size[0]} x {size[1]} are more than {MOST_MAPPED} pixels, too many for controlnet")


def _image_of(unit: Unit, pixels: Pixels, usual: Image.Image | None) -> Image.Image:
    given = unit.image or unit.input_image
    if isinstance(given, UnitImage):
        if given.mask:
            raise _refused("mask", "is not offered by this server; leave it out")
        given = given.image
    if given:
        return pixels.read("image", given)
    if usual is None:
        raise _refused("image", "there is none in a unit of controlnet; send it as base64")
    return usual


def _network(unit: Unit, card: ModelCard) -> ControlCard | int:
    """Which network a unit means, or the number of the IP-Adapter."""
    named = re.sub(r"\s*\[[0-9a-f]*\]\s*$", "", unit.model or "").strip()
    if named.lower() in ("", "none") and len(card.controls) + len(card.ip_adapters) == 1:
        return card.controls[0] if card.controls else 0
    for net in card.controls:
        if net.name.lower() == named.lower():
            return net
    for i, name in enumerate(card.ip_adapters):
        if name.lower() == named.lower():
            return i
    if not (card.controls or card.ip_adapters):
        raise _refused("model", "nothing here reads a unit of controlnet; the server was started without --controlnet")
    told = f"{named[:80]!r} is not there" if named else "is missing, and there are several"
    raise _refused("model", f"{told}; /controlnet/model_list lists {', '.join(models_of(card))}")


def _prompt(unit: Unit, image: Image.Image, adapter: int) -> PromptImage:
    module = (unit.module or "none").lower()
    if module not in _AS_SENT and not module.startswith(_OF_PROMPTS):
        raise _refused("module", f"{module[:60]!r} does not go with an IP-Adapter, which reads the image itself")
    if (unit.guidance_start or 0.0) > 0 or _end(unit) < 1:
        raise _refused("guidance_start", "an image prompt acts in the whole run; send 0, and guidance_end 1")
    return PromptImage(image, 1.0 if unit.weight is None else unit.weight, None, adapter)


def _steer(unit: Unit) -> _Steer:
    mode = unit.control_mode
    if isinstance(mode, str) and mode.isdecimal():
        mode = int(mode)
    if isinstance(mode, int) and 0 <= mode < len(_MODES):
        mode = tuple(_MODES)[mode]
    word = _MODES.get(str(mode or "balanced").strip().lower())
    if word is None:
        raise _refused("control_mode", f"{mode!r:.60} is not known; send 0, 1 or 2, or one of {', '.join(_MODES)}")
    start, end = unit.guidance_start or 0.0, _end(unit)
    if start >= end:
        raise _refused("guidance_start", f"{start:g} is not before guidance_end, {end:g}")
    scale = 1.0 if unit.weight is None else unit.weight
    return _Steer(scale, start, end, "guess" if unit.guessmode else word)


def _end(unit: Unit) -> float:
    return next((value for value in (unit.guidance_end, unit.guidance) if value is not None), 1.0)


def _fitted(unit: Unit, image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image at the size of what is generated, by the way that a unit names."""
    mode: Any = 1 if unit.resize_mode is None else unit.resize_mode
    if isinstance(mode, str):
        word = mode.strip().lower()
        word = {"scale to fit (inner fit)": _RESIZE[1], "envelope (outer fit)": _RESIZE[2]}.get(word, word)
        mode = int(word) if word.isdecimal() else _RESIZE.index(word) if word in _RESIZE else -1
    if mode not in range(len(_RESIZE)):
        raise _refused("resize_mode", f"{unit.resize_mode!r:.60} is not known; send 0, 1 or 2")
    if mode == 0:
        return resized(image, size[1], size[0])
    if mode == 1:
        return image if image.size == size else ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    pixels = np.asarray(image)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    red, green, blue = (int(level) for level in np.median(edge, axis=0))
    return ImageOps.pad(image, size, Image.Resampling.LANCZOS, color=(red, green, blue))


def _mapped(unit: Unit, image: Image.Image) -> Image.Image:
    """What a unit's preprocessor makes of its image."""
    module = (unit.module or "none").strip().lower()
    if module in _AS_SENT:
        return image
    if module not in _MAPS:
        known = ", ".join((*_AS_SENT, *_MAPS))
        raise _refused(
            "module", f"{module[:60]!r} is not made here: send its finished map with none; or one of {known}"
        )
    kind, sliders = _MAPS[module]
    sent = (unit.threshold_a, unit.threshold_b)
    numbers: dict[str, float] = {}
    for (name, (low, high, _)), value in zip(sliders.items(), sent, strict=False):
        numbers[name] = value if value is not None and low <= value <= high else _USUAL[name]  # as the extension does
    if kind == "canny":
        numbers["low"], numbers["high"] = sorted(numbers.values())
    return control_map(kind, image, **numbers)


def _type(unit: Unit, net: ControlCard) -> str:
    """Which type of control image a unit has for a union: as it says, or that of its preprocessor."""
    word = (unit.union_control_type or unit.module or "").strip().lower()
    label = _TYPES.get(word, word)
    if label not in net.types:
        raise _refused(
            "union_control_type",
            f"{word[:60]!r} is no type of {net.name}; send one of {', '.join((*_TYPES, *net.types))}",
        )
    return label


def models_of(card: ModelCard) -> list[str]:
    """Names for the field model."""
    return [*(net.name for net in card.controls), *card.ip_adapters]


def modules() -> dict[str, Any]:
    """Names for the field module, and the numbers of each."""
    details: dict[str, Any] = {name: {"model_free": False, "sliders": []} for name in (*_AS_SENT, *_MAPS)}
    for name, (_, sliders) in _MAPS.items():
        details[name]["sliders"] = [
            {"name": label, "value": _USUAL[own], "min": low, "max": high}
            for own, (low, high, label) in sliders.items()
        ]
        if sliders:
            details[name]["sliders"].insert(0, None)  # of the resolution, which is that of what is generated
    return {"module_list": list(details), "module_detail": details}


def _refused(param: str, why: str) -> Refused:
    return Refused(422, "invalid_value", f"{param}: {why}", param=param)
