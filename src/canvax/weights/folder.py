"""The diffusers layout: ``model_index.json``, and a folder with a config and weights for each component.

A repository often holds the same weights several times: float32 and float16 variants, pickles, Flax files. One set of
files is chosen for each component by file names, on the disk and the Hub alike: safetensors of the requested variant,
plain safetensors, then Flax msgpack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from canvax.errors import CheckpointError
from canvax.files import DAMAGED, read_json
from canvax.tokenizers.concepts import FILE as CONCEPTS
from canvax.weights.entries import PICKLES, Entry, pickle_refused
from canvax.weights.files import ModelFiles, open_weights
from canvax.weights.safetensors import open_safetensors

INDEX = "model_index.json"
MODULAR = "modular_model_index.json"
"""Name of the index in folders of diffusers' modular pipelines."""

INDICES = (INDEX, MODULAR)
"""Names of the index; the first that a folder has is read."""

DEFAULTS = "canvax.json"
"""Name of an optional file with steps and guidance that suit the model."""

Library = Literal["diffusers", "transformers"]

_PLAIN = re.compile(r"(scheduler|(?:t5_)?tokenizer|processor)(?:_\d+)?")
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)

STEMS: dict[Library, str] = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
FLAX_FILES: dict[Library, str] = {"diffusers": "diffusion_flax_model.msgpack", "transformers": "flax_model.msgpack"}

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_LIBRARIES = {"diffusers", "transformers"}

Accept = Callable[[Mapping[str, Any]], Any]
"""A function that reads ``model_index.json`` before other files are fetched, and raises if it refuses the model."""


@dataclass(frozen=True)
class WeightPlan:
    """The weight file chosen for a component.

    Attributes:
        file: name inside the component's folder; the index if the weights are sharded.
        sharded: True if ``file`` is an index.
        variant: the variant that the file belongs to, None for the plain one.
    """

    file: str
    sharded: bool
    variant: str | None


def plain_files(component: str) -> tuple[str, ...]:
    """Return the files that canvax reads or copies of a component without weights; () for others."""
    if is_tokenizer(component):
        return _TOKENIZER_FILES
    return ("scheduler_config.json",) if _PLAIN.fullmatch(component) else ()


def is_tokenizer(component: str) -> bool:
    """Return whether a component is a tokenizer, or the processor of images and text that contains it."""
    match = _PLAIN.fullmatch(component)
    return match is not None and match[1] != "scheduler"


def library_of(component: str) -> Library:
    """Return the library whose class a component is, and whose file names its weights have."""
    transformers = component.startswith(("text_encoder", "safety_checker")) or is_tokenizer(component)
    return "transformers" if transformers else "diffusers"


def read_index(
    name: str, path: Path, accept: Accept | None, names: Collection[str], known: Collection[str]
) -> Mapping[str, Any]:
    """Read ``model_index.json`` in a folder with files of these ``names``; ``accept`` may refuse the model.

    ``known`` are the components that canvax reads.

    Raises:
        CheckpointError: it is malformed or refused, or a component is in another repository.
    """
    index = read_json(path / (index_in(names) or INDEX))
    if index_in(names) == MODULAR:
        index = _plain(name, index, {file.split("/")[0] for file in names}, known)
    if accept is not None:
        try:
            accept(index)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    return index


def index_in(names: Collection[str]) -> str | None:
    """Return the index among the files of a folder."""
    return next((name for name in INDICES if name in names), None)


def _plain(name: str, index: Mapping[str, Any], folders: Collection[str], known: Collection[str]) -> dict[str, Any]:
    """Return the index of a modular pipeline as an ordinary one; its entries have library, class and source."""
    plain = dict(index)
    for part, entry in index.items():
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict):
            plain[part] = entry[2].get("type_hint") if entry[:2] == [None, None] else entry[:2]
            where = entry[2].get("pretrained_model_name_or_path")
            if part in known and part not in folders and where:
                raise CheckpointError(
                    f"{name}: has no folder {part}; its {part} is in another repository, {where!r:.99}. Download both, "
                    f"and put the files of the {part} into a folder {part} next to {MODULAR}."
                )
    return plain


def modular(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return an index as that of a modular pipeline, with all components in its folder."""
    name = str(index["_class_name"])
    result: dict[str, Any] = {"_blocks_class_name": name.replace("ModularPipeline", "AutoBlocks"), **index}
    for part, entry in index.items():
        if isinstance(entry, list) and not part.startswith("_"):
            where = {"pretrained_model_name_or_path": None, "subfolder": part, "variant": None, "revision": None}
            result[part] = [None, None, {"type_hint": entry, **where}]
    return {part: entry for part, entry in result.items() if index.get(part) != [None, None]}


def components_of(name: str, index: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the components of the index that are ``known``, and their classes; those with weights come first.

    The values of ``known`` are classes that may be of any library.

    Raises:
        CheckpointError: the index is malformed, or names code that comes with the checkpoint.
    """
    components = {}
    for component in sorted(known, key=lambda component: bool(plain_files(component))):
        value = index.get(component)
        if value is None or value == [None, None]:
            continue
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
            raise CheckpointError(
                f"{name}: {INDEX} describes {component!r} as {str(value)[:80]}, not as [library, class]."
            )
        if value[0] not in _LIBRARIES and value[1] not in known[component]:
            theirs = ", ".join(sorted(known[component]))
            cure = f"add it to the classes of its family (registered are {theirs})" if theirs else ""
            raise CheckpointError(
                f"{name}: its {component} is {value[1]!r} from {value[0]!r}, code that comes with the checkpoint. "
                f"canvax never runs code from a repository; {cure or 'use a checkpoint with the stock classes'}."
            )
        components[component] = value[1].removeprefix("Flax")
    return components


def read_folder(
    name: str,
    path: Path,
    index: Mapping[str, Any],
    revision: str | None,
    variant: str | None,
    known: Mapping[str, Collection[str]],
    *,
    weights: bool,
) -> ModelFiles:
    """Read the model in a folder with its configs; ``known`` are the components that canvax reads (``components_of``).

    Raises:
        CheckpointError: folders, configs or, with ``weights``, weight files are missing; the error lists all.
    """
    components, configs, faults = components_of(name, index, known), {}, []

    def files_of(component: str) -> list[Path]:
        return find_weights(path / component, library_of(component), variant)

    for component in components:
        try:
            if weights and not plain_files(component):
                files_of(component)
            if not plain_files(component) or component == "scheduler":
                configs[component] = read_json(path / component / config_file(component))
            else:
                names_in(path / component)
        except CheckpointError as error:
            faults.append(str(error))
    _report(name, faults)
    if weights:
        weighty = [part for part in components if not plain_files(part)]
        _check_variant_exists(name, variant, {part: names_in(path / part) for part in weighty})
    unread = tuple(
        component
        for component, value in index.items()
        if isinstance(value, list)
        and len(value) == 2
        and isinstance(value[1], str)
        and component not in known
        and not component.startswith("_")
    )

    def arrays(component: str) -> list[Entry]:
        return [entry for file in files_of(component) for entry in open_weights(file)]

    return ModelFiles(name, path, index, components, configs, arrays, path.joinpath, revision, variant, unread)


def config_file(component: str) -> str:
    """Return the name of a component's config file."""
    match = _PLAIN.fullmatch(component)
    return f"{match[1]}_config.json" if match else "config.json"


def small_files(components: Collection[str], names: Collection[str]) -> list[str]:
    """Return the ``names``, relative to the model's folder, of files besides the index and the weights."""
    wanted = [f"{part}/{file}" for part in components for file in plain_files(part) or ("config.json",)]
    return [name for name in (DEFAULTS, CONCEPTS, *wanted) if name in names]


def plan_components(
    name: str, components: Collection[str], names: Collection[str], variant: str | None
) -> dict[str, WeightPlan]:
    """Choose the weight file of each component with weights among ``names`` relative to the model's folder.

    Raises:
        CheckpointError: a component has no file that can be read, or no component has the variant.
    """
    inside = {
        part: [file.removeprefix(f"{part}/") for file in names if file.startswith(f"{part}/")]
        for part in components
        if not plain_files(part)
    }
    _check_variant_exists(name, variant, inside)
    plans, faults = {}, []
    for part, files in inside.items():
        try:
            plans[part] = plan_weights(files, library_of(part), variant, f"{name}/{part}")
        except CheckpointError as error:
            faults.append(str(error))
    _report(name, faults)
    return plans


def plan_weights(names: Collection[str], kind: Library, variant: str | None, where: str) -> WeightPlan:
    """Choose one weight file among the ``names`` in a component's folder; ``where`` names the folder in errors.

    Without a file of the ``variant``, the plain one is chosen: repositories often hold variants of some components
    only.

    Raises:
        CheckpointError: no file can be read; the error says which files there are.
    """
    stem = STEMS[kind]
    for wanted in dict.fromkeys((variant, None)):
        infix = f".{wanted}" if wanted else ""
        if f"{stem}{infix}.safetensors" in names:
            return WeightPlan(f"{stem}{infix}.safetensors", False, wanted)
        if f"{stem}.safetensors.index{infix}.json" in names:
            return WeightPlan(f"{stem}.safetensors.index{infix}.json", True, wanted)
    if FLAX_FILES[kind] in names:
        return WeightPlan(FLAX_FILES[kind], False, None)
    if others := _variants(names, kind):
        known = " or ".join(f"variant={other!r}" for other in others)
        raise CheckpointError(f"{where}: holds only variants of the weights; pass {known}.")
    if pickles := sorted(name for name in names if name.endswith(PICKLES)):
        raise CheckpointError(f"{where}: holds only {pickles[0]}. {pickle_refused(pickles[0])}.")
    raise CheckpointError(
        f"{where}: no weights found: neither {stem}.safetensors (or its index) nor {FLAX_FILES[kind]} is there. "
        "Download the folder again, or check that it is in the diffusers layout."
    )


def find_weights(folder: Path, kind: Library, variant: str | None = None) -> list[Path]:
    """Find the weight files of a component's folder: one file, or all shards.

    Raises:
        CheckpointError: the folder, its weights or a shard is missing, or there are only pickles.
    """
    plan = plan_weights(names_in(folder), kind, variant, str(folder))
    if not plan.sharded:
        return [folder / plan.file]
    index = folder / plan.file
    shards = {name: folder / name for name in shard_names(index)}
    if absent := [name for name, shard in shards.items() if not shard.is_file()]:
        raise CheckpointError(
            f"{folder}: {len(absent)} of {len(shards)} shards are missing, for example {absent[0]}. "
            "Download the checkpoint again."
        )
    held = {name: {entry.name for entry in open_safetensors(shard)} for name, shard in shards.items()}
    for tensor, shard in read_json(index)["weight_map"].items():
        if tensor not in held[shard]:
            raise CheckpointError(f"{index}: says that {tensor[:80]!r} is in {shard}, which has none. {DAMAGED}")
    return list(shards.values())


def shard_names(index: Path) -> list[str]:
    """Return the files that a sharded checkpoint's index names, which must be plain names in its folder."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index}: has no weight_map. {DAMAGED}")
    for name in table.values():
        plain = isinstance(name, str) and PurePosixPath(name).name == PureWindowsPath(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names the shard {str(name)[:80]!r}, which is not a safetensors file name.")
    return sorted(set(table.values()))


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder's files.

    Raises:
        CheckpointError: the folder is missing or cannot be read.
    """
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: the folder is missing. Download the checkpoint again.") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be read ({error.strerror}).") from None


def _variants(names: Collection[str], kind: Library) -> list[str]:
    """Return the variants for which safetensors files exist."""
    stem = re.escape(STEMS[kind])
    pattern = re.compile(rf"{stem}\.(?:safetensors\.index\.([\w\-]+)\.json|([\w\-]+)\.safetensors)")
    matches = [match for match in map(pattern.fullmatch, names) if match]
    return sorted({_SHARD.sub("", match[1] or match[2]) for match in matches})


def _check_variant_exists(name: str, variant: str | None, files: Mapping[str, Collection[str]]) -> None:
    """Refuse a variant that no component has; ``files`` are the file names of each."""
    known = sorted({other for part, inside in files.items() for other in _variants(inside, library_of(part))})
    if variant is not None and variant not in known:
        cure = f"it has {', '.join(map(repr, known))}" if known else "it has none, leave variant out"
        raise CheckpointError(f"{name}: has no weights of variant = {variant!r}; {cure}.")


def _report(name: str, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(f"{name}: the checkpoint is incomplete:\n  " + "\n  ".join(faults))
