"""Reads adapters of the LoRA family, of any trainer, strictly: each array is used or named in the error.

Other programs log a line for an ignored alpha, an unknown module or a file for another model, and generate slightly
wrong images. Here all faults of a file are one error.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from canvax.adapters import KINDS, Part, Window, faults, kind_of, rank
from canvax.errors import CheckpointError
from canvax.models.text import FIRST
from canvax.params import Param, Spec
from canvax.types import HostArray
from canvax.weights.adapter_names import Module, Stack, module_table, nearest_module, parameters, split_name
from canvax.weights.embeddings import BUNDLED, Embedding, bundled_embeddings
from canvax.weights.entries import Entry
from canvax.weights.identify import BASES, EMBEDDING, LORA, OTHERS, Shapes, expect, family_of, identify
from canvax.weights.safetensors import open_safetensors, read_metadata

_MOST_WORDS = 10

_COMPONENTS = (
    ("text encoder 2", re.compile(r"(lora_te2_|te2_|text_encoder_2\.|clip_g)")),
    ("text encoder", re.compile(r"(lora_te1?_|te1?_|text_encoder\.|clip_l|text_model\.)")),
)
RECORD = "canvax.training"
"""Key of a file's metadata: the settings of a training by canvax, as JSON."""
_SHOWN = {
    "title": "modelspec.title", "author": "modelspec.author", "license": "modelspec.license",
    "made for": "modelspec.architecture", "base model": "ss_base_model_version", "trained on": "ss_sd_model_name",
    "trainer": "ss_network_module", "declared rank": "ss_network_dim", "declared alpha": "ss_network_alpha",
    "settings": "ss_network_args", "name of the trainer": "ss_output_name", "description": "modelspec.description",
    "images": "ss_num_train_images", "size": "ss_resolution", "steps": "ss_steps", "clip skip": "ss_clip_skip",
    "training": RECORD,
}  # fmt: skip
"""Keys of a file's metadata (kohya's trainer; ModelSpec 1.0) that are displayed, and their labels."""

_OF_A_UNET = re.compile(r"(down|up|input|output)_blocks|mid(dle)?_block|conv_(in|out)")
"""Parts of the names of a UNet's layers."""

_CALL = ("sampler", "spacing", "eta", "num_inference_steps", "guidance_scale")
_STEPS = re.compile(r"(\d+)[ _-]?steps?")
_LONGEST = 300

LISTED = 4
"""Faults of one kind that are listed; the others are counted."""

_MOST_RANK = 1024
"""A larger rank that also exceeds both sides of the weight is not plausible."""

_DORA = {"dora_scale", "magnitude"}
_OF_BIAS = {"diff_b": "full", "set_b": "set", "up_bias": "full"}
TABLE = "text_model.embeddings.token_embedding.weight"
"""The token embeddings of a text encoder."""

Key = tuple[str, str]
"""A parameter: its component and its dotted name."""

_OF_STACKS = (("up", "up_bias", "diff", "diff_b"), ("down", "diff"))
"""Roles with a separate part for each of several stacked layers: rows if outputs are stacked, columns if inputs are."""
_SHARED = ("up", "down", "mid", "alpha", "scalar")
"""Roles that all stacked layers share otherwise."""
_OF_LOKR = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")
"""Roles of a LoKr, whose product is split into layers."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of the LoRA family, read and checked for one model.

    Attributes:
        path: the file.
        parts: the change of each parameter.
        embeddings: embeddings bundled with it.
        metadata: text in the file's header.
    """

    path: Path
    parts: Mapping[Key, Part]
    embeddings: Sequence[Embedding] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of changed weights by component and kind: "unet LoRA" -> 192."""
        names = Counter(f"{component} {_kind_name(part)}" for (component, _), part in self.parts.items())
        return dict(names)


def _kind_name(part: Part) -> str:
    name = KINDS[part.kind].name
    return f"{name} with DoRA" if part.arrays.keys() & _DORA else name


class _Faults(dict[str, list[str]]):
    """Faults of a file by kind."""

    def add(self, sort: str, problem: str) -> None:
        self.setdefault(sort, []).append(problem)

    def check(self, path: Path) -> None:
        """Raise all faults, if there are any."""
        parts = []
        for sort, problems in self.items():
            rest = f" and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            parts.append(f"{len(problems)} {sort}: {'; '.join(problems[:LISTED])}{rest}")
        if parts:
            raise CheckpointError(f"{path}: cannot be used with this model. {'. '.join(parts)}.")


def read_adapter(path: Path, specs: Mapping[str, Spec], config: Mapping[str, Any] | None = None) -> Adapter:
    """Read an adapter as changes of a model's parameters.

    Args:
        path: a safetensors file.
        specs: unquantised specs of the denoiser, then of the text encoders, by component.
        config: PEFT's ``adapter_config.json`` next to the file, if there is one.

    Raises:
        CheckpointError: the file is damaged, for another model, or has an unused array; lists all faults.
    """
    entries, metadata = open_safetensors(path, plain_names=False), read_metadata(path)
    shapes = {entry.name: entry.shape for entry in entries}
    has_unet = "unet" in specs
    if has_unet and identify(shapes) in (LORA, None):
        _check_base(path, shapes, specs, metadata)
    expect(path, shapes, LORA, for_unet=has_unet)
    problems = _Faults()
    groups, windows = _grouped(entries, specs, problems)
    declared, configs = parameters(specs), _configs(path, metadata, config, specs)
    parts: dict[Key, Part] = {}
    for module, roles in groups.items():
        for key, part in _parts(module, roles, declared, configs, problems, windows.get(module)):
            parts[key] = part
    problems.check(path)
    return Adapter(path, parts, bundled_embeddings(path, entries, token_widths(specs)), metadata)


def token_widths(specs: Mapping[str, Spec]) -> dict[str, int]:
    """Return the width of each text encoder's tokens, by component; nothing if one is not CLIP."""
    tables = ((component, param) for (component, name), param in parameters(specs).items() if name == TABLE)
    widths = {component: param.shape[1] for component, param in tables}
    return widths if all(name in widths for name in specs if name.startswith(FIRST)) else {}


def _grouped(
    entries: Sequence[Entry], specs: Mapping[str, Spec], problems: _Faults
) -> tuple[dict[Module, dict[str, Entry]], dict[Module, Window]]:
    """Return each module's arrays by role, and, for a LoKr of a stack, the part that each module is."""
    table, declared = module_table(specs), parameters(specs)
    groups: dict[Module, dict[str, Entry]] = {}
    windows: dict[Module, Window] = {}
    for entry in entries:
        if entry.name.startswith(BUNDLED):
            continue
        split = split_name(entry.name)
        if split is None:
            problems.add("arrays of an unknown kind", f"{entry.name} {entry.shape}")
            continue
        modules, axis, swapped = table.get(split.module.replace(".", "_"), Stack())
        if split.unknown:
            problems.add("arrays of algorithms that canvax does not have", f"{entry.name} is of {split.unknown}")
        elif not modules:
            problems.add("modules that the model does not have", entry.name + nearest_module(split.module, table))
        elif (len(modules) > 1 or swapped) and split.role not in (*_OF_STACKS[axis], *_SHARED, *_OF_LOKR):
            problems.add("arrays of algorithms that canvax does not have", f"{entry.name} is for a layer that differs")
        sizes = [declared[module.component, f"{module.name}.weight"].checkpoint_shapes[0][axis] for module in modules]
        total = sum(sizes)
        # An array of another size stays whole; its shape is then reported.
        stacked = len(modules) > 1 and split.role in _OF_STACKS[axis] and entry.shape[axis : axis + 1] == (sum(sizes),)
        stacked = stacked and (axis == 0 or len(entry.shape) == 2)
        for module, begin, end in zip(modules, accumulate([0, *sizes]), accumulate(sizes), strict=False):
            if split.role in (roles := groups.setdefault(module, {})):
                problems.add("given twice", f"{module}: as {roles[split.role].name} and as {entry.name}")
                continue
            roles[split.role] = entry
            if split.role in _OF_LOKR and (len(modules) > 1 or swapped):
                other = declared[module.component, f"{module.name}.weight"].checkpoint_shapes[0][1 - axis]
                shape = (total, other) if axis == 0 else (other, total)
                windows[module] = Window(shape, axis, begin, end, swapped)
            if swapped and split.role in _OF_STACKS[0] and entry.shape:
                roles[split.role] = entry.rows((entry.shape[0] // 2, entry.shape[0]), (0, entry.shape[0] // 2))
            if stacked:
                roles[split.role] = entry.columns(begin, end) if axis else entry.rows((begin, end))
    return groups, windows


def _parts(
    module: Module,
    roles: Mapping[str, Entry],
    declared: Mapping[Key, Param],
    configs: Mapping[str, Mapping[str, Any]],
    problems: _Faults,
    window: Window | None = None,
) -> list[tuple[Key, Part]]:
    """Return the changes of a module's weight and bias."""
    weight = {role: entry for role, entry in roles.items() if role not in _OF_BIAS}
    bias = {role: entry for role, entry in roles.items() if role in _OF_BIAS}
    if set(weight) == {"alpha"}:
        problems.add("incomplete", f"{module} has alpha alone")
        return []
    parts, scale = [], 1.0
    if weight:
        declaration = declared[module.component, f"{module.name}.weight"]
        part = _part(module, weight, declaration, configs, problems, window)
        if part is not None:
            parts.append(((module.component, f"{module.name}.weight"), part))
            scale = part.scale
    if bias:
        key = (module.component, f"{module.name}.bias")
        if key not in declared or len(bias) > 1:
            problems.add("wrong shapes", f"{module} has no bias, and is given {', '.join(bias)}")
        else:
            ((role, entry),) = bias.items()
            kind = _OF_BIAS[role]
            array = _read(entry, problems)
            if math.prod(entry.shape) != declared[key].size:
                problems.add("wrong shapes", f"{module}: {role} is {entry.shape}, not {declared[key].shape}")
            else:
                name = "diff" if kind == "full" else "set"
                parts.append((key, Part(kind, {name: array}, scale if role == "up_bias" else 1.0)))
    return parts


def _part(
    module: Module,
    roles: Mapping[str, Entry],
    param: Param,
    configs: Mapping[str, Mapping[str, Any]],
    problems: _Faults,
    window: Window | None = None,
) -> Part | None:
    """Return the change of a weight by arrays of these roles; None if they have a fault."""
    kind = kind_of(frozenset(roles))
    if kind is None:
        if set(roles) == {"weight"}:
            problems.add("arrays that are no adapter's but a model's", f"{roles['weight'].name}")
        else:
            why = ", which together are no known adapter" if len(roles) > 1 else " alone; what belongs to it is missing"
            problems.add("incomplete", f"{module} has {', '.join(sorted(roles))}{why}")
        return None
    stored = window.shape if window and kind == "lokr" else param.checkpoint_shapes[0]
    if param.layout == "plain" and kind not in ("full", "set"):
        problems.add("wrong shapes", f"{module} is no layer that {KINDS[kind].name} is for")
        return None
    shapes = {role: entry.shape for role, entry in roles.items()}
    if empty := [entry.name for entry in roles.values() if 0 in entry.shape]:
        problems.add("empty", ", ".join(empty))
        return None
    if wrong := faults(kind, {role: shape for role, shape in shapes.items() if role != "alpha"}, stored):
        problems.add("wrong shapes", f"{module} is {stored}: {', '.join(wrong)}")
        return None
    r = rank(kind, shapes, stored)
    if r > max(_MOST_RANK, stored[0], math.prod(stored[1:])):
        problems.add("wrong shapes", f"{module} is {stored}: a rank of {r} is more than it has")
        return None
    arrays = {role: _read(entry, problems) for role, entry in roles.items()}
    alpha = arrays.pop("alpha", None)
    if any(array is not None and array.size != 1 for array in (alpha, arrays.get("scalar"))):
        problems.add("wrong shapes", f"{module}: alpha is no single number")
        return None
    number = 0.0 if alpha is None else float(alpha.reshape(()))
    scale = _scale(module, kind, number, r, configs.get(module.component))
    return Part(kind, arrays, scale, window if kind == "lokr" else None)


def _scale(module: Module, kind: str, alpha: float, r: int, config: Mapping[str, Any] | None) -> float:
    """Return alpha / r, or 1 if the file has no alpha or 0."""
    if config:
        r = r if kind == "lora" else config["r"]
        pattern = config.get("alpha_pattern") or {}
        alphas = (value for name, value in pattern.items() if f".{module.name}".endswith(f".{name}"))
        alpha = float(next(alphas, config["lora_alpha"]))
        return alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    return alpha / r if alpha and r else 1.0


def _read(entry: Entry, problems: _Faults) -> HostArray:
    """Return an array in float32."""
    if entry.dtype.kind not in "fVib":
        problems.add("mistyped", f"{entry.name} is {entry.dtype.name}")
        return np.zeros(entry.shape, np.float32)
    array = entry.read()
    if not entry.is_float and entry.name.rpartition(".")[2] != "alpha":
        problems.add("mistyped", f"{entry.name} is {entry.dtype.name}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        problems.add("not finite", f"{entry.name} has NaN or infinity")
    return array


def _configs(
    path: Path, metadata: Mapping[str, str], config: Mapping[str, Any] | None, components: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Return PEFT's settings of each component, from a file next to this one or from its header."""
    configs: dict[str, dict[str, Any]] = {}
    if config:
        configs = {name: dict(config) for name in components}
    elif text := metadata.get("lora_adapter_metadata"):
        try:
            for key, value in json.loads(text).items():
                component, _, name = key.partition(".")
                configs.setdefault(component, {})[name] = value
        except (ValueError, AttributeError, RecursionError):
            raise CheckpointError(f"{path}: its lora_adapter_metadata is not JSON of a table. Save it again.") from None
    for component, settings in configs.items():
        patterns = settings.get("alpha_pattern") or {}
        r, alpha = settings.get("r", settings.get("rank")), settings.get("lora_alpha", settings.get("alpha"))
        numbers = [r, alpha, *(patterns.values() if isinstance(patterns, dict) else (None,))]
        if not all(map(_is_number, numbers)) or not r or r <= 0:
            raise CheckpointError(
                f"{path}: its settings of {component[:40]} are peft_type={settings.get('peft_type')!r:.40}, "
                f"r={r!r:.40}, lora_alpha={alpha!r:.40}, alpha_pattern={patterns!r:.40}: not "
                "what PEFT writes. Save it again."
            )
        settings |= {"r": r, "lora_alpha": alpha}
    return dict(configs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reads_width(specs: Mapping[str, Spec]) -> int:
    """Return the width of the text that a model's cross-attention reads; 0 without cross-attention."""
    widths = [param.shape[0] for (_, name), param in parameters(specs).items() if name.endswith("attn2.to_k.weight")]
    return widths[0] if widths else 0


def _check_base(path: Path, shapes: Shapes, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
    """Refuse an adapter of another family, instead of reporting each of its arrays."""
    family, width = family_of(shapes, metadata)
    model_width = _reads_width(specs)
    model_family = BASES.get(model_width, "")
    made_for = ""
    if width and model_width and width != model_width:
        made_for = f"another model: it reads text of width {width}{f' ({family})' if family else ''}"
    elif (
        not width and family in (*OTHERS.values(), *(BASES.values() if model_family else ())) and family != model_family
    ):
        made_for = family
    if made_for:
        this = f"this model reads text of width {model_width}{f' ({model_family})' if model_family else ''}"
        raise CheckpointError(
            f"{path}: was made for {made_for}; {this}. Load the model it was made for, or an adapter made for this one."
        )


def adapter_info(path: Path) -> dict[str, Any]:
    """Return the facts in an adapter's header: kind, base model, trigger words and usage."""
    entries, metadata = open_safetensors(path, plain_names=False), read_metadata(path)
    shapes = {entry.name: entry.shape for entry in entries}
    family, width = family_of(shapes, metadata)
    unet = family in BASES.values() or any(map(_OF_A_UNET.search, shapes))
    roles: dict[str, set[str]] = {}
    ranks: set[int] = set()
    for name, shape in shapes.items():
        if (split := split_name(name)) and split.role and not name.startswith(BUNDLED):
            roles.setdefault(split.module, set()).add(split.role)
            ranks |= {shape[0]} if split.role == "down" and shape else set()
    parts: Counter[str] = Counter()
    for module, held in roles.items():
        first, dot, _ = module.removeprefix("base_model.model.").partition(".")
        denoiser = "UNet" if unet else "transformer" if family else first if dot else "network"
        component = next((name for name, pattern in _COMPONENTS if pattern.match(module)), denoiser)
        kind = kind_of(frozenset(held - _OF_BIAS.keys()))
        dora = " with DoRA" if held & _DORA else ""
        parts[f"{component}: {KINDS[kind].name if kind else 'unknown'}{dora}"] += 1
    words = {
        name.removeprefix(BUNDLED).split(".")[0]: shape for name, shape in shapes.items() if name.startswith(BUNDLED)
    }
    if EMBEDDING.is_this(shapes) or not (roles or words):
        unnamed = shapes.keys() & {"emb_params", "clip_l", "clip_g", "string_to_param.*"}
        words = {path.stem: next(iter(shapes.values()))} if unnamed else dict(shapes)
    return {
        "adapter": str(path),
        "arrays": len(entries),
        "bytes": sum(entry.nbytes for entry in entries),
        "stored": dict(Counter(entry.dtype.name for entry in entries)),
        "parts": dict(parts),
        "ranks": sorted(ranks),
        "embeddings": {name: 1 if len(shape) == 1 else shape[0] for name, shape in words.items() if shape},
        "family": family or None,
        "text_width": width or None,
        "trigger_words": trigger_words(metadata),
        "suggested": suggested(path.stem, metadata, unet=unet),
        "metadata": {
            name: metadata[key][:_LONGEST]
            for name, key in _SHOWN.items()
            if metadata.get(key) not in (None, "", "None")
        },
    }


def trained_schedule(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ``scheduler_config.json`` in which the training differs from its base model.

    Raises:
        CheckpointError: the record of the training is damaged.
    """
    try:
        fields = _recorded(metadata, "scheduler")
    except ValueError:
        raise CheckpointError(f"{path}: its {RECORD} is not JSON of a table. Save it again.") from None
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _recorded(metadata: Mapping[str, str], part: str) -> dict[str, Any]:
    """Return a table in the record of a training, empty if it is not there; ValueError if the record is damaged."""
    try:
        fields = json.loads(metadata.get(RECORD, "{}")).get(part, {})
    except (AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(fields, dict):
        raise ValueError(f"{part} is no table")
    return fields


def trigger_words(metadata: Mapping[str, str]) -> list[str]:
    """Return the words that an adapter was trained with, the most frequent first (``ss_tag_frequency``)."""
    words = [word.strip() for word in metadata.get("modelspec.trigger_phrase", "").split(",") if word.strip()]
    counts: Counter[str] = Counter()
    try:
        for tags in json.loads(metadata.get("ss_tag_frequency") or "{}").values():
            counts.update({str(tag).strip()[:80]: int(count) for tag, count in tags.items()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return words
    return list(dict.fromkeys([*words, *(tag for tag, _ in counts.most_common(_MOST_WORDS) if tag)]))[:_MOST_WORDS]


def suggested(name: str, metadata: Mapping[str, str], *, unet: bool) -> dict[str, Any]:
    """Return the call's arguments that an adapter for few steps was trained for; empty for others.

    LCM (Luo et al. 2023), SDXL-Lightning (Lin et al. 2024), Hyper-SD (Ren et al. 2024), TCD (Zheng et al. 2024), DMD2
    (Yin et al. 2024), FLUX.1-Turbo-Alpha (Alimama 2024) and Qwen-Image-Lightning (LightX2V 2025) are recognised by the
    file's name or its title. Others record them as ``call`` in the record of their training. Without ``unet`` the
    adapter is for a transformer, which keeps its sampler and guidance scale.
    """
    with suppress(ValueError):
        call = _recorded(metadata, "call")
        if known := {key: call[key] for key in _CALL if isinstance(call.get(key), str | int | float)}:
            return known
    words = f"{name} {metadata.get('modelspec.title', '')}".lower().replace("_", "-")
    match = _STEPS.search(words)
    steps = int(match[1]) if match and 1 <= int(match[1]) <= 16 else None
    if not unet and "lightning" in words and "qwen" in words:  # a schedule that does not follow the size and ends at 0
        schedule = ["shift=3", "shift_terminal=0"]
        return {"sampler_settings": schedule, "num_inference_steps": steps or 4, "guidance_scale": 1.0}
    few: dict[str, Any] = {}
    if "lightning" in words:
        few = {"sampler": "Euler", "spacing": "trailing", "num_inference_steps": 4, "guidance_scale": 1.0}
    elif "hyper" in words and steps == 1:
        few = {"sampler": "TCD", "eta": 1.0, "guidance_scale": 1.0}
    elif "hyper" in words and ("hyper-sd" in words or "step" in words):
        guidance = 5.0 if "cfg" in words else 1.0
        few = {"sampler": "DDIM", "spacing": "trailing", "num_inference_steps": 8, "guidance_scale": guidance}
    elif re.search(r"(^|[^a-z])tcd([^a-z]|$)", words):
        few = {"sampler": "TCD", "eta": 0.3, "num_inference_steps": 4, "guidance_scale": 1.0}
    elif re.search(r"(^|[^a-z])(lcm|dmd2?)([^a-z]|$)", words):
        few = {"sampler": "LCM", "num_inference_steps": 4, "guidance_scale": 1.0}
    elif not unet and "flux" in words and "turbo" in words:
        few = {"num_inference_steps": 8}
    few |= {"num_inference_steps": steps} if few and steps else {}
    return few if unet else {name: value for name, value in few.items() if name == "num_inference_steps"}
