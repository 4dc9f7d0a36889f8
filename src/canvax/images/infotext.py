"""Writes and reads the text that A1111, Forge and stable-diffusion.cpp store in a PNG as ``parameters``.

    a red apple
    Negative prompt: blurry
    Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 1, Size: 512x512, Version: canvax 0.1.0

Values with a comma, a colon or a line break are written as JSON strings; Civitai writes JSON lists and tables, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from canvax.call import HIRES_STRENGTHS, Call, OptionRecord
from canvax.errors import InputError
from canvax.images.keys import list_in
from canvax.samplers.catalog import find, with_a1111_curve
from canvax.samplers.curve_names import CURVES, curve_label
from canvax.settings import Declared, declared

_NEGATIVE = "Negative prompt:"
_PLAIN_SCHEDULES = ("", "automatic", "discrete", "default")
_CURVES = {
    spelling.lower().replace("_", " "): curve.name
    for curve in CURVES
    for spelling in (*curve.also, curve.name)
    if spelling.lower() not in _PLAIN_SCHEDULES
}
"""Schedule type in lower case -> name of the curve in canvax."""
_KEY = re.compile(r"\s*([A-Za-z][\w /+\-]*):\s*")
_LORAS, _EMBEDDINGS = "Lora hashes", "TI hashes"
_FACTS = ("Version", "Model hash", "VAE hash", _LORAS, _EMBEDDINGS, "Hashes", "User", "Created Date")
"""Settings that do not affect images. ``embeddings_in`` reads embeddings."""
NETWORK = re.compile(r"<(?:lora|lyco|hypernet):[^<>]*>", re.IGNORECASE)
"""A network in a prompt, which is not text for the encoder."""
_SIZE = r"(\d{1,6})x(\d{1,6})"
_UPSCALERS = {"latent": "Latent", "pixel": "Lanczos"}
"""A1111's upscalers that equal canvax's methods of enlarging a first pass."""
_FIRST = ("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model hash", "Model")
"""A1111's order of the settings that every image has."""
_DISTILLED = "Distilled CFG Scale"
"""Forge's name of the scale that FLUX.1 reads as an input."""
_CFG_PP, _OF_LAMBDA = "DDIM CFG++", 12.5
"""A1111's sampler with CFG++, and the CFG scale that is a lambda of 1 there."""
_UNIT = (
    ("control_scale", "Weight", 1.0), ("control_start", "Guidance Start", 0.0), ("control_end", "Guidance End", 1.0),
    ("control_mode", "Control Mode", "balanced"),
)  # fmt: skip
"""Options of a ControlNet, their names in its extension for A1111, and defaults."""
_CONTROL_MODES = {
    "balanced": "Balanced", "prompt": "My prompt is more important", "control": "ControlNet is more important",
    "guess": "ControlNet is more important",
}  # fmt: skip
_FEWEST = 3
"""Minimum number of settings in the last line; with fewer it is the end of the prompt."""


def to_infotext(metadata: Mapping[str, Any]) -> str:
    """Return the text for an image.

    Args:
        metadata: as in ``canvax.Result.metadata``. An optional ``sampler_label`` ("DPM++ 2M Karras") is the name of the
            sampler in other programs.
    """
    networks = [f"<lora:{name}:{entry['weight']:g}>" for name, entry in _networks(metadata)]
    lines = [" ".join([str(metadata.get("prompt", "")), *networks])]
    if metadata.get("negative_prompt"):
        lines.append(f"{_NEGATIVE} {metadata['negative_prompt']}")
    settings = {name: value for name, value in _settings(metadata) if value not in (None, "")}
    settings = {name: settings[name] for name in (*_FIRST, *settings) if name in settings}
    lines.append(", ".join(f"{name}: {_quote(value)}" for name, value in settings.items()))
    return "\n".join(lines)


def _networks(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield adapters by the names that other programs write in a prompt, except those with a table of weights."""
    for entry in (metadata.get("adapters") or {}).values():
        if isinstance(entry["weight"], int | float):
            name = os.path.basename(os.path.normpath(entry["file"])).removesuffix(".safetensors")
            yield name, entry


def _settings(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    options = metadata.get("options") or {}
    yield from _written(Call, metadata)
    sampler, schedule = _split_sampler(metadata)
    yield "Sampler", sampler
    if options.get("guidance_method") == "cfg_pp" and sampler.lower() == "ddim" and "guidance_scale" in metadata:
        yield "Sampler", _CFG_PP
        yield "CFG scale", round(metadata["guidance_scale"] * _OF_LAMBDA, 6)
    yield "Schedule type", schedule
    if "width" in metadata and "height" in metadata:
        yield "Size", f"{metadata['width']}x{metadata['height']}"
    yield "Model hash", str(metadata.get("model_sha256") or "")[:10]
    model = str(metadata.get("model") or "")
    # The folders of a local model's path are private.
    local = os.path.isabs(model) or model.startswith("./") or os.path.isdir(model)
    yield "Model", os.path.basename(os.path.normpath(model)) if local else model
    yield "VAE", os.path.basename(os.path.normpath(metadata["vae"])) if metadata.get("vae") else ""
    loras = {name: entry["a1111_hash"] for name, entry in _networks(metadata) if entry.get("a1111_hash")}
    yield _LORAS, ", ".join(f"{re.sub('[:,]', '', name)}: {digits}" for name, digits in loras.items())
    words = metadata.get("embeddings") or {}
    hashes = {name: entry["sha256"][:12] for name, entry in words.items() if isinstance(entry, Mapping)}
    yield _EMBEDDINGS, ", ".join(f"{name}: {sha256}" for name, sha256 in hashes.items())
    yield "Denoising strength", metadata.get("strength")
    if options.get("hires", 1) > 1:
        method = options.get("hires_method", "pixel")
        yield "Denoising strength", HIRES_STRENGTHS[method]
        yield "Hires upscaler", _UPSCALERS[method]
    yield from _written(OptionRecord, {"noise": metadata.get("noise"), **options})
    if "mask_sha256" in metadata:
        yield "Mask blur", options.get("mask_blur", 0)
        fill = options.get("mask_fill", "original")
        yield "Masked content", fill if fill in ("original", "fill") else f"latent {fill}"
        if (padding := options.get("padding_mask_crop")) is not None:
            yield from (("Inpaint area", "Only masked"), ("Masked area padding", padding))
    yield from _controls(metadata, options)
    if "canvax" in metadata:
        yield "Version", f"canvax {metadata['canvax']}"


def _controls(metadata: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a unit of the ControlNet extension for each network that read an image, which is a finished map."""
    marks, used = list_in(metadata, "control_sha256"), 0
    for i, (file, mark) in enumerate(zip(list_in(metadata, "controlnet"), marks, strict=False)):
        if mark is None:
            continue
        model = os.path.basename(os.path.normpath(str(file))).removesuffix(".safetensors")
        unit = {"Module": "none", "Model": re.sub("[:,]", "", model)}
        for name, label, usual in _UNIT:
            value = options.get(name, usual)
            unit[label] = value[i] if isinstance(value, list | tuple) else value
        unit["Control Mode"] = _CONTROL_MODES.get(unit["Control Mode"], "Balanced")
        yield f"ControlNet {used}", ", ".join(f"{label}: {value}" for label, value in unit.items())
        used += 1


def _written(record: type, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a record that A1111 has, under its names."""
    for name, field in declared(record).items():
        if field.setting.infotext and values.get(name) not in (None, field.default):
            _, write = _FORMS.get(name, (None, lambda value: value))
            yield field.setting.infotext, write(values[name])


def _split_sampler(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return sampler and schedule type; an image's options override the schedule implied by the sampler's name."""
    options = metadata.get("options") or {}
    sampler = str(metadata.get("sampler_label") or metadata.get("sampler") or "")
    words, curve = sampler.lower().replace("_", " "), None
    if suffix := max((spelling for spelling in _CURVES if words.endswith(f" {spelling}")), key=len, default=""):
        sampler, curve = sampler[: -len(suffix)].rstrip(" _"), _CURVES[suffix]
    if "sigmas" in options:
        curve = _CURVES.get(str(options["sigmas"]).lower().replace("_", " "))
    if curve is None and options.get("spacing") == "trailing":
        curve = "sgm_uniform"
    return sampler, curve_label(curve) if curve else ""


def _quote(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(c in text for c in ',:\n"') else text


def from_infotext(text: str) -> dict[str, Any]:
    """Parse a text to the keys of ``canvax.Result.metadata``; ``other`` has the settings without a key in canvax."""
    prompt, negative, settings = parts_of(text)
    read = {"prompt": prompt, "negative_prompt": negative, **_read_settings(settings)}
    for table, name in ((read, "prompt"), (read, "negative_prompt"), (read["options"], "hires_prompt")):
        if name in table:
            read["other"] |= dict.fromkeys(NETWORK.findall(table[name]), "")
            table[name] = without_networks(table[name])
    return read


def settings_left(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return another program's settings that canvax cannot use, except versions and hashes, which change no image."""
    other = metadata.get("other")
    return {name: value for name, value in other.items() if name not in _FACTS} if isinstance(other, dict) else {}


def embeddings_in(metadata: Mapping[str, Any]) -> list[str]:
    """Return the textual inversions that an image was generated with, by the words of its prompts."""
    ours, other = metadata.get("embeddings"), metadata.get("other")
    hashes = str(other.get(_EMBEDDINGS) or "") if isinstance(other, dict) else ""
    theirs = [name.strip() for name, colon, _ in (part.rpartition(":") for part in hashes.split(",")) if colon]
    return list(dict.fromkeys([*map(str, ours if isinstance(ours, dict) else ()), *theirs]))


def parts_of(text: str) -> tuple[str, str, dict[str, str]]:
    """Split a text into prompt, negative prompt and settings, without converting them."""
    *head, last = text.replace("\r\n", "\n").strip().split("\n")
    settings = dict(_split(last))
    if len(settings) < _FEWEST:
        head, settings = [*head, last], {}
    at = next((i for i, line in enumerate(head) if line.startswith(_NEGATIVE)), len(head))
    negative = "\n".join(head[at:]).removeprefix(_NEGATIVE).strip()
    return "\n".join(head[:at]).strip(), negative, settings


def without_networks(prompt: str) -> str:
    """Replace each network and the blanks around it by one blank, and strip the ends of lines.

    It uses no regular expression for repeated blanks, which would take quadratic time on thousands of blanks.
    """
    parts = NETWORK.split(prompt)
    parts[1:] = [part.lstrip(" ") for part in parts[1:]]
    parts[:-1] = [part.rstrip(" ") for part in parts[:-1]]
    return "\n".join(line.rstrip(" ") for line in " ".join(parts).split("\n")).strip()


def _split(line: str) -> Iterator[tuple[str, str]]:
    """Yield the ``name: value`` pairs of a line; nothing if any part of the line is not a pair."""
    at, pairs, json_starts = 0, [], '"[{'
    while at < len(line):
        key = _KEY.match(line, at)
        if key is None:
            return
        at = key.end()
        start = at
        value: Any = None
        if at < len(line) and line[at] in json_starts:
            try:
                value, at = json.JSONDecoder(strict=False).raw_decode(line, at)
            except (ValueError, RecursionError):
                if line[at] == '"':
                    return
                json_starts = '"'  # one failure takes time by the length of the line
        comma = line.find(",", at)
        if not isinstance(value, str):  # Civitai writes lists and tables without quotes around them
            value = line[start : comma if comma >= 0 else len(line)]
        pairs.append((key[1].strip(), str(value).strip()))
        at = comma + 1 if comma >= 0 else len(line)
    yield from pairs


def _read_settings(settings: dict[str, str]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, field in declared(Call).items():
        _take(settings, field.setting.infotext, field.kind.value_type, metadata, name)
    if str(metadata.get("sampler")).lower() == _CFG_PP.lower():
        metadata["sampler"], options["guidance_method"] = "DDIM", "cfg_pp"
        if "guidance_scale" in metadata:
            metadata["guidance_scale"] = round(metadata["guidance_scale"] / _OF_LAMBDA, 6)
    embedded: dict[str, float] = {}
    _take(settings, _DISTILLED, float, embedded, "guidance_scale")
    if embedded and metadata.get("guidance_scale", 1) != 1:
        options["true_cfg_scale"] = metadata["guidance_scale"]
    metadata |= embedded
    _take(settings, "Model", str, metadata, "model")
    if settings.get("VAE", "none").lower() not in ("none", "automatic"):
        metadata["vae"] = settings["VAE"]
    settings.pop("VAE", None)
    if size := re.fullmatch(_SIZE, settings.get("Size", "")):
        metadata["width"], metadata["height"] = int(size[1]), int(size[2])
        del settings["Size"]
    schedule = settings.get("Schedule type", "").lower()
    curve = _CURVES.get(schedule.replace("_", " "))
    if curve in ("karras", "exponential") and "sampler" in metadata:
        metadata["sampler"] += f" {curve_label(curve)}"
    elif curve is not None:
        options["sigmas"] = curve
    elif schedule == "automatic" and "sampler" in metadata:  # before 1.9 the sampler's name held the curve
        metadata["sampler"] = with_a1111_curve(metadata["sampler"])
    if curve is not None or schedule in _PLAIN_SCHEDULES:
        settings.pop("Schedule type", None)
    for name, field in declared(OptionRecord).items():
        if _is_complete(field, settings, options):
            _take(settings, field.setting.infotext, _FORMS.get(name, (field.kind.value_type,))[0], options, name)
    if schedule == "automatic" and "hires_sampler" in options:
        options["hires_sampler"] = with_a1111_curve(options["hires_sampler"])
    if "noise" in options:
        metadata["noise"] = options["noise"]
    if options.get("hires", 0) > 1:
        upscaler = settings.get("Hires upscaler", "")
        options["hires_method"] = "latent" if upscaler.lower().startswith("latent") else "pixel"
        if upscaler.lower() in ("", *map(str.lower, _UPSCALERS.values())):
            settings.pop("Hires upscaler", None)
    if not settings.get("Version", "").startswith("canvax"):
        options["prompt_syntax"] = "a1111"  # all other programs that write this text use A1111's weights
    return metadata | {"options": options, "other": settings}


def _is_complete(field: Declared, settings: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Return whether all settings that an option requires are present."""
    known = declared(OptionRecord)
    required = field.setting.error_without.partition("=")[0]
    if required and options.get(required, known[required].default) == known[required].default:
        return False
    return all(known[name].setting.infotext in settings for name in field.setting.hint_without if name in known)


def _from_rng(text: str) -> str:
    if text.lower() != "cpu":
        raise ValueError
    return "torch"


def _from_size(text: str) -> list[int]:
    if (size := re.fullmatch(_SIZE, text)) is None:
        raise ValueError
    return [int(size[2]), int(size[1])]


def _sampler_label(name: str) -> str:
    try:
        spec, implied = find(name)
    except InputError:
        return name
    return f"{spec.label} {curve_label(curve)}" if (curve := implied.get("sigmas")) else spec.label


_FORMS: dict[str, tuple[Callable[[str], Any], Callable[[Any], Any]]] = {
    "clip_skip": (lambda text: max(int(text) - 1, 0), lambda skip: skip + 1),  # there, 1 is the last layer
    "noise": (_from_rng, {"torch": "CPU"}.get),
    "seed_size": (_from_size, lambda size: f"{size[1]}x{size[0]}"),
    "hires_sampler": (str, _sampler_label),
}
"""Settings that A1111 writes in another way: how such a text is read, and how it is written."""


def _take(settings: dict[str, str], name: str, kind: Any, into: dict[str, Any], key: str) -> None:
    """Move a setting from ``settings`` to ``into``; a setting that cannot be parsed stays."""
    if name in settings:
        try:
            into[key] = kind(settings[name])
        except ValueError:
            return
        del settings[name]
