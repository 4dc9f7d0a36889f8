"""What an adapter's file says of itself, without a model: what it is, for whom, its words, how to use it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canvax.adapters import KINDS, kind_of
from canvax.weights.adapter_names import split_name
from canvax.weights.embeddings import BUNDLED
from canvax.weights.entries import Entry
from canvax.weights.lora import base_of
from canvax.weights.safetensors import open_safetensors, read_metadata

MOST_WORDS = 10

_COMPONENTS = (
    ("text encoder 2", re.compile(r"(lora_te2_|te2_|text_encoder_2\.|clip_g)")),
    ("text encoder", re.compile(r"(lora_te1?_|te1?_|text_encoder\.|clip_l|text_model\.)")),
)
_SAID = {
    "title": "modelspec.title", "author": "modelspec.author", "license": "modelspec.license",
    "made for": "modelspec.architecture", "base model": "ss_base_model_version", "trained on": "ss_sd_model_name",
    "trainer": "ss_network_module", "rank as told": "ss_network_dim", "alpha as told": "ss_network_alpha",
    "settings": "ss_network_args", "name of the trainer": "ss_output_name", "description": "modelspec.description",
}  # fmt: skip
"""What is shown of a file's metadata, and its keys there (kohya's trainer; ModelSpec 1.0)."""

_STEPS = re.compile(r"(\d+)[ _-]?steps?")
_LONGEST = 300


def adapter_info(path: Path) -> dict[str, Any]:
    """What is in a file, from its header alone."""
    entries, metadata = open_safetensors(path, plain_names=False), read_metadata(path)
    said = {name: metadata[key][:_LONGEST] for name, key in _SAID.items() if metadata.get(key)}
    family, width = base_of(entries, metadata)
    return {
        "adapter": str(path),
        "arrays": len(entries),
        "bytes": sum(entry.nbytes for entry in entries),
        "stored": dict(Counter(entry.dtype.name for entry in entries)),
        "parts": _parts(entries),
        "ranks": _ranks(entries),
        "embeddings": _embeddings(path, entries),
        "family": family or None,
        "text_width": width or None,
        "trigger_words": trigger_words(metadata),
        "suggested": suggested(path.stem, metadata),
        "said": said,
    }


def _parts(entries: Sequence[Entry]) -> dict[str, int]:
    """How many modules of what kind each component has."""
    roles: dict[str, set[str]] = {}
    for entry in entries:
        if (split := split_name(entry.name)) and split.role and not entry.name.startswith(BUNDLED):
            roles.setdefault(split.module, set()).add(split.role)
    found: Counter[str] = Counter()
    for module, own in roles.items():
        component = next((name for name, pattern in _COMPONENTS if pattern.match(module)), "UNet")
        kind = kind_of(frozenset(own - {"diff_b", "set_b", "up_bias"}))
        name = KINDS[kind].name if kind else "unknown"
        found[f"{component}: {name}{' with DoRA' if own & {'dora_scale', 'magnitude'} else ''}"] += 1
    return dict(found)


def _ranks(entries: Sequence[Entry]) -> list[int]:
    """The ranks of plain LoRA, each once."""
    down = (entry for entry in entries if (split := split_name(entry.name)) and split.role == "down" and entry.shape)
    return sorted({entry.shape[0] for entry in down})


def _embeddings(path: Path, entries: Sequence[Entry]) -> dict[str, int]:
    """Words of textual inversions, and how many vectors each has."""
    names = {entry.name: entry.shape for entry in entries}
    words = {
        name.removeprefix(BUNDLED).split(".")[0]: shape for name, shape in names.items() if name.startswith(BUNDLED)
    }
    if not any(split_name(name) for name in names) and all(len(shape) in (1, 2) for shape in names.values()):
        unnamed = names.keys() & {"emb_params", "clip_l", "clip_g", "string_to_param.*"}
        words = {path.stem: next(iter(names.values()))} if unnamed else names
    return {name: 1 if len(shape) == 1 else shape[0] for name, shape in words.items()}


def trigger_words(metadata: Mapping[str, str]) -> list[str]:
    """The words that an adapter was trained with, the most frequent first (``ss_tag_frequency``)."""
    words = [word.strip() for word in metadata.get("modelspec.trigger_phrase", "").split(",") if word.strip()]
    counts: Counter[str] = Counter()
    try:
        for tags in json.loads(metadata.get("ss_tag_frequency") or "{}").values():
            counts.update({str(tag).strip()[:80]: int(count) for tag, count in tags.items()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return words
    return list(dict.fromkeys([*words, *(tag for tag, _ in counts.most_common(MOST_WORDS) if tag)]))[:MOST_WORDS]


def suggested(name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a call that an adapter for few steps was made for; none for others.

    LCM (Luo et al. 2023), SDXL-Lightning (Lin et al. 2024), Hyper-SD (Ren et al. 2024), TCD (Zheng et al. 2024), told
    by the file's name or its title.
    """
    words = f"{name} {metadata.get('modelspec.title', '')}".lower().replace("_", "-")
    match = _STEPS.search(words)
    steps = int(match[1]) if match and 1 <= int(match[1]) <= 16 else None
    if "lightning" in words:
        return {"sampler": "Euler", "spacing": "trailing", "num_inference_steps": steps or 4, "guidance_scale": 1.0}
    if "hyper" in words and ("hyper-sd" in words or "step" in words):
        if steps == 1:
            return {"sampler": "TCD", "eta": 1.0, "num_inference_steps": 1, "guidance_scale": 1.0}
        guidance = 5.0 if "cfg" in words else 1.0
        more = {"spacing": "trailing", "num_inference_steps": steps or 8, "guidance_scale": guidance}
        return {"sampler": "DDIM", **more}
    if re.search(r"(^|[^a-z])tcd([^a-z]|$)", words):
        return {"sampler": "TCD", "eta": 0.3, "num_inference_steps": steps or 4, "guidance_scale": 1.0}
    if re.search(r"(^|[^a-z])lcm([^a-z]|$)", words):
        return {"sampler": "LCM", "num_inference_steps": steps or 4, "guidance_scale": 1.0}
    return {}
