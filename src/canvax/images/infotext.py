"""The text that AUTOMATIC1111's web UI and its relatives keep in a picture, written and read.

    a red apple, studio light
    Negative prompt: blurry
    Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 1, Size: 512x512, Model: emoji

A value with a comma, a colon or a line break stands in JSON quotes. The form is not exact (a prompt may itself have a
line that looks like the last one), so PNG files of canvax carry their metadata as JSON too, and that is read first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Labels of that web UI for canvax's samplers; any other name is written as it is.
SAMPLER_LABELS = {
    "ddim": "DDIM",
    "ddpm": "DDPM",
    "pndm": "PLMS",
    "euler": "Euler",
    "euler_a": "Euler a",
    "heun": "Heun",
    "dpmpp_2m": "DPM++ 2M",
    "dpmpp_2m_sde": "DPM++ 2M SDE",
    "unipc": "UniPC",
    "lms": "LMS",
    "lcm": "LCM",
}

# Its schedule types, as options of canvax.
SCHEDULES: dict[str, dict[str, str]] = {
    "Karras": {"sigmas": "karras"},
    "Exponential": {"sigmas": "exponential"},
    "SGM Uniform": {"spacing": "trailing"},
    "Simple": {"spacing": "trailing"},
}

_NEGATIVE = "Negative prompt:"
# Bounded keys and a match at each position in turn keep reading linear in the length of the text.
_PARAMETER = re.compile(r'\s*(\w[\w \-/]{1,48}):\s*("(?:\\.|[^"\\])*"(?=\s*(?:,|$))|[^,]*)\s*(?:,|$)')


def to_infotext(metadata: Mapping[str, Any]) -> str:
    """The text of one picture; keys that are missing or None are left out."""
    options = metadata.get("options") or {}
    sampler, schedule = _split_sampler(str(metadata.get("sampler") or ""), options)
    fields = {
        "Steps": metadata.get("num_inference_steps"),
        "Sampler": SAMPLER_LABELS.get(sampler, sampler) or None,
        "Schedule type": schedule,
        "CFG scale": metadata.get("guidance_scale"),
        "Seed": metadata.get("seed"),
        "Size": f"{metadata['width']}x{metadata['height']}" if {"width", "height"} <= set(metadata) else None,
        "Model": metadata.get("model"),
        "Clip skip": options["clip_skip"] + 1 if options.get("clip_skip") else None,
        "Eta": options.get("eta"),
        "RNG": "CPU" if metadata.get("noise") == "torch" else None,
        "Version": f"canvax {metadata['canvax']}" if metadata.get("canvax") else None,
    }
    last = ", ".join(f"{key}: {_quote(value)}" for key, value in fields.items() if value is not None)
    lines = [str(metadata.get("prompt") or "")]
    if metadata.get("negative_prompt"):
        lines.append(f"{_NEGATIVE} {metadata['negative_prompt']}")
    return "\n".join([*lines, last])


def from_infotext(text: str) -> dict[str, Any]:
    """Metadata with canvax's keys; what has no such key is kept as text under ``extra``.

    A last line without ``Steps`` and with fewer than three fields counts as part of the prompt.
    """
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    fields = _parameters(lines[-1])
    if "Steps" in fields or len(fields) >= 3:
        lines = lines[:-1]
    else:
        fields = {}
    start = next((i for i, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    negative = "\n".join(lines[start:]).removeprefix(_NEGATIVE).strip()
    return {"prompt": "\n".join(lines[:start]).strip(), "negative_prompt": negative, **_canonical(fields)}


def _split_sampler(name: str, options: Mapping[str, Any]) -> tuple[str, str | None]:
    """A sampler's name without its schedule, and that schedule: ``dpmpp_2m_karras`` is DPM++ 2M with Karras."""
    for label, implied in SCHEDULES.items():
        curve = implied.get("sigmas")
        if curve and name.lower().endswith(curve):
            return name[: -len(curve)].rstrip("_ "), label
        if implied.items() <= options.items():
            return name, label
    return name, None


def _quote(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    needs = any(mark in text for mark in ",:\n\r") or text.startswith('"') or text != text.strip()
    return json.dumps(text, ensure_ascii=False) if needs else text


def _parameters(line: str) -> dict[str, str]:
    """The fields of the last line; empty when it is not one."""
    fields: dict[str, str] = {}
    position = 0
    while position < len(line):
        match = _PARAMETER.match(line, position)
        if match is None:
            return {}
        fields.setdefault(match[1], _unquote(match[2].strip()))
        position = match.end()
    return fields


def _unquote(text: str) -> str:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _canonical(fields: dict[str, str]) -> dict[str, Any]:
    """Fields of the last line under canvax's keys, as numbers where they are; the rest under ``extra``."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {}
    rest = dict(fields)

    def take(key: str, name: str, kind: type, into: dict[str, Any]) -> None:
        try:
            into[name] = kind(rest[key])
        except (KeyError, ValueError):
            return
        del rest[key]

    take("Steps", "num_inference_steps", int, found)
    take("CFG scale", "guidance_scale", float, found)
    take("Seed", "seed", int, found)
    take("Model", "model", str, found)
    take("Eta", "eta", float, options)
    if size := re.fullmatch(r"(\d{1,6})x(\d{1,6})", rest.get("Size", "")):
        found["width"], found["height"] = int(size[1]), int(size[2])
        del rest["Size"]
    if (skip := rest.get("Clip skip", "")).isascii() and skip.isdigit():
        options |= {"clip_skip": int(rest.pop("Clip skip")) - 1} if 1 < len(skip) + int(skip[:3]) else {}
    if "Sampler" in rest:
        found["sampler"], label = _split_sampler(rest.pop("Sampler"), {})
        found["sampler"] = {v: k for k, v in SAMPLER_LABELS.items()}.get(found["sampler"], found["sampler"])
        options |= SCHEDULES.get(label or "", {})
    if (schedule := rest.get("Schedule type")) in SCHEDULES:
        options |= SCHEDULES[rest.pop("Schedule type")] if schedule else {}
    if rest.get("RNG") == "CPU":
        found["noise"] = "torch"
        del rest["RNG"]
    if (version := rest.get("Version", "")).startswith("canvax "):
        found["canvax"] = version.removeprefix("canvax ")
        del rest["Version"]
    return found | {"options": options} | ({"extra": rest} if rest else {})
