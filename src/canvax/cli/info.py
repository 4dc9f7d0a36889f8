"""``canvax info``: describe a model, or how an image was generated. Only headers are read."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.call import PARTS
from canvax.cli.adapters import info_lines
from canvax.cli.again import adapters_of, again, is_lost, lost_model
from canvax.cli.loading import files_of, load_of, load_with, overrides_of
from canvax.cli.plan import check_sides, from_references, parse_references
from canvax.cli.terminal import byte_size, complain, say, table
from canvax.errors import CanvaxError, InputError, check_count
from canvax.files import named_path
from canvax.images.formats import FORMATS, HAVE_PATHS
from canvax.images.infotext import NETWORK
from canvax.images.keys import keys_of
from canvax.images.metadata import read_metadata
from canvax.pipelines.again import left_out
from canvax.tokenizers.concepts import Concepts
from canvax.weights.data_folder import find_named
from canvax.weights.entries import Entry
from canvax.weights.files import open_weights
from canvax.weights.folder import index_in
from canvax.weights.identify import EMBEDDING, LORA, MODEL, TRANSFORMER, FileReport, inspect, listing
from canvax.weights.location import BUNDLED, Location, warn_unused_cache
from canvax.weights.lora import adapter_info

if TYPE_CHECKING:
    from canvax.weights.files import ModelFiles

MEMORY_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a parameter, for each dtype that a model can be loaded in."""

_MEMORY_FLAGS = ("memory", "width", "height", "batch", "references", "dtype", "quantize", "mesh")
_MODEL_FLAGS = (*_MEMORY_FLAGS, "concepts", "revision", "variant", "cache_dir", "token", *PARTS)
"""Flags that apply to models only."""


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Describe a model or an image."""
    path = named_path("what", arguments.what)
    if not path.exists() and (named := find_named(arguments.what, "what")):
        path, arguments.what = named, str(named)
    suffix = path.suffix.lower()
    is_image = suffix in FORMATS
    if path.is_dir() and arguments.what not in BUNDLED and not index_in(os.listdir(path)):
        _refuse_flags(arguments, _MODEL_FLAGS, f"{path} is no model in the diffusers layout; leave it out")
        report |= folder_info(path)
        _show(arguments, _folder_lines(report))
        return
    file = inspect(path) if path.is_file() and not is_image else None
    is_whole = file is not None and file.kind is TRANSFORMER and any(getattr(arguments, name) for name in PARTS)
    part = file if file is not None and not is_whole and file.kind not in (None, MODEL) else None
    is_adapter = file is not None and file.kind in (LORA, EMBEDDING)
    kind = "an image" if is_image else part.kind_name if part else ""
    is_model = not kind
    names = (() if arguments.memory else _MEMORY_FLAGS) if is_model else _MODEL_FLAGS
    _refuse_flags(arguments, names, "it needs --memory; add that" if is_model else f"{path} is {kind}; leave it out")
    if is_image:
        report |= image_info(path, arguments.data_dir)
        lines = _image_lines(report)
    elif is_adapter:
        report |= adapter_info(path)
        lines = info_lines(report)
    elif part is not None:
        report |= part_info(part)
        lines = _part_lines(report)
    else:
        files = _files(arguments)
        report |= model_info(files)
        lines = _model_lines(report)
        if arguments.concepts:
            report["prompts"] = Concepts.of(files.folder()).names
            if not report["prompts"]:
                raise InputError(
                    "concepts",
                    f"is not for {arguments.what}, which has no list of concepts",
                    cure="it takes any prompt",
                )
            lines = report["prompts"]
        if arguments.memory:
            report["memory"] = memory_info(arguments)
            lines += ["", *_memory_lines(report["memory"])]
    _show(arguments, lines)


def _show(arguments: argparse.Namespace, lines: list[str]) -> None:
    if not arguments.json:
        for line in lines:
            say(line)


def _refuse_flags(arguments: argparse.Namespace, names: Sequence[str], cure: str) -> None:
    for name in names:
        if (value := getattr(arguments, name)) is not None and value is not False:  # 0 is a value
            raise InputError(name, "does not go with this file", cure=cure)


def folder_info(folder: Path) -> dict[str, Any]:
    """Describe a folder of models and related files.

    Raises:
        InputError: it holds no file that canvax knows, or cannot be read.
    """
    from canvax.families.local_models import fault_of, readers

    try:
        parts = [alone] if (alone := inspect(folder)) else list(listing(folder))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror}); choose another folder") from None
    if not parts:
        raise InputError(f"{folder}: holds no models, images, LoRAs or other files that canvax reads")
    rows = [
        {
            "file": str(part.path),
            "kind": part.kind_name,
            "family": part.family or readers(part) or None,
            "fault": fault_of(part) or None,
        }
        for part in parts
    ]
    return {"folder": str(folder), "files": rows}


def _folder_lines(report: Mapping[str, Any]) -> list[str]:
    root = Path(report["folder"])
    rows = [("file", "what it is", "for")]
    for part in report["files"]:
        path = Path(part["file"])
        rows.append((str(path.relative_to(root)) if path != root else str(path), part["kind"], part["family"] or ""))
    lines = table(rows)
    faults = [f"{Path(part['file']).name}: {part['fault']}" for part in report["files"] if part["fault"]]
    return [*lines, "", "These files cannot be used:", *faults] if faults else lines


def part_info(part: FileReport) -> dict[str, Any]:
    """Describe a file with a part of a model, or with an adapter or network for one."""
    from canvax.families.local_models import readers

    entries = open_weights(part.path, plain_names=False)
    stored = Counter(entry.stored for entry in entries)
    return {
        "file": str(part.path),
        "kind": part.kind_name,
        "family": part.family or readers(part) or None,
        "flag": part.kind.flag if part.kind else "",
        "arrays": len(entries),
        "bytes": sum(entry.nbytes for entry in entries),
        "stored": dict(stored),
    }


def _part_lines(report: Mapping[str, Any]) -> list[str]:
    facts = {
        "for": report["family"],
        "use with": report["flag"],
        "arrays": f"{report['arrays']} in {', '.join(report['stored'])}, {byte_size(report['bytes'])}",
    }
    return [f"{report['file']}: {report['kind']}", "", *(f"{name:<8}  {text}" for name, text in facts.items() if text)]


def image_info(path: Path, data_dir: str | None = None) -> dict[str, Any]:
    """Return the metadata of an image, the command that generates it again, and what this does not repeat."""
    metadata = read_metadata(path)
    members = _members(metadata)
    lines = [again(member, data_dir) for member in members]
    return {
        "image": str(path),
        "metadata": metadata,
        "commands": [line.command for line in lines],
        "losses": [line.losses for line in lines],
        "left_out": [[text for text in left_out(member) if not NETWORK.match(text)] for member in members],
    }


def _members(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metadata of each image of a grid, or of the image."""
    grid = metadata.get("grid")
    return [member for member in grid if isinstance(member, dict)] if isinstance(grid, list) else [metadata]


def _image_lines(report: Mapping[str, Any]) -> list[str]:
    metadata = report["metadata"]
    if "grid" in metadata:
        lines = [f"a grid of {len(report['commands'])} images"]
    else:
        nested = [inner for name in ("options", "other") if isinstance(inner := metadata.get(name), dict)]
        plain = {name: value for part in (metadata, *nested) for name, value in part.items()}
        hidden = ("options", "other", "sampler_label", "adapters", "embeddings", "image_prompts")
        shown = [
            (key, _text(value)) for key, value in plain.items() if value not in (None, "", {}, []) and key not in hidden
        ]
        width = max((len(key) for key, _ in shown), default=0)
        lines = [f"{key:<{width}}  {value}".replace("\n", "\n" + " " * (width + 2)) for key, value in shown]
    if any(name in member for member in _members(metadata) for name in keys_of("images")):
        lines.append("\nIts source images are not in the file: write their names instead of the words in capitals.")
    if any("'./" in repr(metadata.get(name)) for name in HAVE_PATHS):
        lines.append("\nFiles that begin with ./ were recorded without their folders, which are private.")
    other = metadata.get("other")
    found = [name for name, *_ in adapters_of(metadata)]
    tags = [name for name in (other if isinstance(other, dict) else ()) if name.startswith("<")]
    if networks := [name for name in tags if name not in found]:
        lines.append(f"\nIts prompt named {', '.join(networks)}; name the files with --lora FILE:WEIGHT.")
    if "grid" not in metadata and is_lost(metadata):
        lines.append(f"\nIt {lost_model(metadata)}: write the file of your copy instead of MODEL.")
    if unread := dict.fromkeys(text for each in report["left_out"] for text in each):
        lines.append(f"\nThe command does not repeat these settings: {', '.join(unread)}.")
    losses = dict.fromkeys(clause for each in report["losses"] for clause in each)
    lines += [f"\nThe command does not repeat that {clause}." for clause in losses]
    return [*lines, "\nTo generate it again:", *report["commands"]]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _files(arguments: argparse.Namespace) -> ModelFiles:
    """Return the files of the model. They are downloaded only if they are not on disk."""
    load = load_of(arguments, model=arguments.what)
    try:
        files = files_of(replace(load, local_files_only=True))
        warn_unused_cache(load.cache_dir, load.model, *overrides_of(load).parts.values())
        return files
    except CanvaxError:
        if load.local_files_only or os.path.lexists(load.model) or not Location(load.model).repository:
            raise
        complain(f"{load.model} is not on disk yet; downloading it")
        return files_of(load)


def model_info(files: ModelFiles) -> dict[str, Any]:
    """Describe components, parameters, memory and settings of a model, without its weights or a JAX backend."""
    from canvax.families.read import read_model
    from canvax.models.clip import clip_configs, most_skipped
    from canvax.weights.folder import plain_files

    model = read_model(files, "float32")
    parts = {name: {"class": kind, **({} if plain_files(name) else _weights(files, name))}
             for name, kind in files.components.items()}  # fmt: skip
    parameters = sum(part.get("parameters", 0) for part in parts.values())
    options, schedule = model.scheduler.options, model.scheduler.schedule
    return {
        "model": files.name,
        "folder": str(files.path),
        "revision": files.revision,
        "pipeline": files.index.get("_class_name"),
        "components": parts,
        "not_used": list(files.unread),
        "parameters": parameters,
        "memory_bytes": {dtype: parameters * size for dtype, size in MEMORY_DTYPES.items()},
        "height": model.native_size[0],
        "width": model.native_size[1],
        "prediction_type": schedule.prediction_type,
        "read_as": model.reasons,
        "train_timesteps": schedule.num_train_timesteps,
        "sampler": {
            "name": model.scheduler.spec.name,
            "label": model.scheduler.spec.label,
            "spacing": options.spacing,
            "sigmas": options.sigmas,
            "steps_offset": options.steps_offset,
        },
        "text": {
            "width": model.text.width,
            "layers": most_skipped(model.text) + 1 if clip_configs(model.text) else None,
            "tokens": min(model.text.shortest) if clip_configs(model.text) else model.text.room(),
        },
        "latents": {"channels": model.vae.latent_channels, "factor": model.vae.factor},
        "defaults": {
            "num_inference_steps": model.defaults.num_inference_steps,
            "guidance_scale": model.defaults.guidance_scale,
        },
    }


def memory_info(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the memory that each device of this machine needs, from the compiled programs, without weights."""
    from canvax.parallel.rules import device_bytes
    from canvax.pipelines.checks import MOST_IMAGES

    check_sides(arguments)
    if arguments.batch is not None:
        check_count("batch", arguments.batch, MOST_IMAGES)
    pipe = load_with(arguments, load_of(arguments, model=arguments.what), weights=False)
    model, mesh = pipe.model, pipe.programs.mesh
    height, width = (
        getattr(arguments, name) or side for name, side in zip(("height", "width"), model.native_size, strict=True)
    )
    batch = arguments.batch or mesh.shape["data"]
    references = parse_references(arguments.references)
    memory = pipe.memory(height, width, batch, references=references)
    sizes = {part.name: device_bytes(part.spec, pipe.dtype, mesh.shape) for part in model.components}
    return {
        "platform": mesh.devices.flat[0].platform,
        "mesh": dict(mesh.shape),
        "dtype": model.dtype,
        "quantize": model.quantize,
        "height": height,
        "width": width,
        "batch": batch,
        "references": references if isinstance(references, int) else len(references),
        "weights": memory.weights,
        "components": sizes,
        "programs": dict(memory.programs),
        "total": memory.total,
        "offloaded": memory.offloaded,
        "streamed": memory.streamed,
        "free": memory.limit,
    }


def _memory_lines(memory: Mapping[str, Any]) -> list[str]:
    mesh = ", ".join(f"{name}={size}" for name, size in memory["mesh"].items())
    rows = [("on each device", ""), ("weights", byte_size(memory["weights"]))]
    rows += [(f"  {name}", byte_size(size)) for name, size in memory["components"].items()]
    rows += [(f"{name}, while running", byte_size(size)) for name, size in memory["programs"].items()]
    rows.append(("largest total", byte_size(memory["total"])))
    rows.append(("with --offload", byte_size(memory["offloaded"])))
    rows.append(("with --offload-layers", byte_size(memory["streamed"])))
    if memory["free"] is not None:
        rows.append((f"free on this machine's {memory['platform']}", byte_size(memory["free"])))
    dtype = memory["dtype"] if memory["quantize"] is None else f"{memory['dtype']} with {memory['quantize']} weights"
    images = f"{memory['batch']} image{'s' if memory['batch'] > 1 else ''} of {memory['width']} x {memory['height']}"
    return [
        f"{images}{from_references(memory['references'])} at once, {dtype}, mesh {mesh}:",
        *table(rows, right=(1,)),
    ]


def _weights(files: ModelFiles, component: str) -> dict[str, Any]:
    """Return parameters, stored dtypes and files of a component, from the headers of its files."""
    entries = [entry for entry in files.entries(component) if entry.is_float]
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[entry.stored] += math.prod(entry.shape)
    return {
        "parameters": dtypes.total(),
        "stored": dict(dtypes),
        "files": _bytes_of(entries),
    }


def _bytes_of(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the bytes of the arrays in each file, which may hold those of several components."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.path.name] += entry.nbytes
    return dict(sizes)


def _model_lines(report: Mapping[str, Any]) -> list[str]:
    rows = [("component", "class", "parameters", "stored as", "on disk")]
    for name, part in report["components"].items():
        size = sum(part["files"].values()) if "files" in part else 0
        count = f"{part['parameters']:,}" if "parameters" in part else ""
        rows.append((name, part["class"], count, ", ".join(part.get("stored", ())), byte_size(size) if size else ""))
    rows.append(("total", "", f"{report['parameters']:,}", "", ""))
    commit = f" at {report['revision']}" if report["revision"] else ""
    sampler, text, latents, defaults = (report[name] for name in ("sampler", "text", "latents", "defaults"))
    memory = ", ".join(f"{byte_size(size)} in {dtype}" for dtype, size in report["memory_bytes"].items())
    facts = {
        "memory": f"{memory} (weights only)",
        "size": f"{report['width']} x {report['height']} pixels",
        "latents": f"{latents['channels']} channels, {latents['factor']} pixels each way",
        "text": f"{text['tokens']} tokens of width {text['width']}"
        + (f", {text['layers']} layers" if text["layers"] else ", read at once"),
        "prediction": f"{report['prediction_type']}, {report['train_timesteps']} training timesteps",
        **{f"read as: {name.replace('_', ' ')}": reason for name, reason in report["read_as"].items()},
        "sampler": f"{sampler['label']} ({sampler['name']}), spacing {sampler['spacing']}, sigmas {sampler['sigmas']}, "
        f"offset {sampler['steps_offset']}",
        "defaults": f"{defaults['num_inference_steps']} steps, guidance {defaults['guidance_scale']:g}",
        "folder": report["folder"],
    }
    lines = [f"{report['model']}{commit}: {report['pipeline']}", "", *table(rows, right=(2, 4)), ""]
    lines += [f"{name:<10}  {value}" for name, value in facts.items()]
    lines += [f"{name}: recognised, but not supported yet" for name in report["not_used"]]
    return lines
