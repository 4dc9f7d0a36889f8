"""Finds the files of a ``Location`` and downloads them.

A Hub id is resolved to a commit once, and every file is requested from that commit, so that a repository that changes
meanwhile cannot give a mixture. Only files that will be read are downloaded; none of them is code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError
from canvax.families.known import families, family_of, known_components
from canvax.files import read_json
from canvax.weights.entries import PICKLES, WEIGHTS, pickle_refused
from canvax.weights.files import ModelFiles, NetworkFiles, open_weights
from canvax.weights.folder import (
    INDEX,
    INDICES,
    Accept,
    Library,
    WeightPlan,
    components_of,
    find_weights,
    index_in,
    library_of,
    names_in,
    plain_files,
    plan_components,
    plan_weights,
    read_folder,
    read_index,
    shard_names,
    small_files,
)
from canvax.weights.hub import Commit, find_commit
from canvax.weights.identify import CLASSES, TRANSFORMER, expect, unreadable
from canvax.weights.location import Location, refuse_pickle
from canvax.weights.safetensors import open_safetensors
from canvax.weights.single_file import open_single_file
from canvax.weights.transformer_file import open_transformer_file

LORA_FILES = (("pytorch_lora_weights.safetensors",), ("adapter_model.safetensors",))
EMBEDDING_FILES = (("learned_embeds.safetensors", "learned_embeds_2.safetensors"),)
"""Usual file names of embeddings; the files of a row belong together, and only the first is required."""

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZERS = ("tokenizer_2", "tokenizer", "processor")
"""Folders of a language model's tokenizer in a model; the first of two is CLIP's."""
_PEFT = "adapter_config.json"
"""PEFT's config next to ``adapter_model.safetensors``."""


def open_files(
    location: Location,
    *,
    accept: Accept | None = None,
    look: Callable[[ModelFiles], object] | None = None,
    weights: bool = True,
    prediction: str | None = None,
    given: Collection[str] = (),
) -> ModelFiles:
    """Find a model and download missing files.

    Args:
        location: the model's location.
        accept: called with the parsed ``model_index.json`` before anything else is read or downloaded.
        look: called once with all other files before weights are downloaded.
        weights: if False, weights are neither downloaded nor searched.
        prediction: prediction type of a single file, if the caller knows it.
        given: parts that the caller supplies, which a single file need not contain.

    Raises:
        InputError: the location does not exist.
        CheckpointError: the checkpoint is incomplete, damaged, or holds only pickles.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    name, path = location.text, location.local()
    wanted = weights or location.variant is not None  # a missing variant is refused without weights as well
    fetch: Callable[[], object] | None = None
    if path is not None and path.is_file():
        refuse_pickle(path)
        if path.suffix.lower() not in WEIGHTS:
            raise CheckpointError(
                f"{name}: is {unreadable(path)}. Pass a safetensors file of a whole model, or a folder in the "
                f"diffusers layout ({INDEX}, unet/, vae/, ...)."
            )
        location.warn_unused("revision", "variant")
        files = open_transformer_file(name, path, given)
        if files is None and path.suffix.lower() == ".gguf":
            expect(name, {entry.name: entry.shape for entry in open_weights(path, plain_names=False)}, TRANSFORMER)
            titles = ", ".join(family.title for family in families() if family.single_file)
            raise CheckpointError(f"{name}: is a GGUF file of none of {titles}; pass a safetensors file or a folder")
        files = files or open_single_file(name, path, prediction=prediction, vae="vae" not in given)
        if accept is not None:
            accept(files.index)
    elif path is not None:
        location.warn_unused("revision")
        files = _open_folder(location, path, None, accept, wanted)
    else:
        commit = find_commit(location, *INDICES)
        if commit.names is None:
            try:
                files = _open_folder(location, commit.folder, commit.sha, accept, wanted)
            except CheckpointError as error:
                raise CheckpointError(f"{error} (The Hub was not asked; only the local cache was used.)") from None
        else:
            if (file := index_in(commit.names)) is None:
                raise CheckpointError(f"{name}: {why_no_index(commit.names)}")
            path = commit.fetch([file])
            known = known_components()
            index = read_index(name, path, accept, commit.names, known)
            components = components_of(name, index, known)
            plans = plan_components(name, components, commit.names, location.variant) if wanted else {}
            commit.fetch(small_files(components, commit.names))
            files = read_folder(name, path, index, commit.sha, location.variant, known, weights=False)
            fetch = lambda: _fetch_weights(commit, {f"{part}/": plan for part, plan in plans.items()})  # noqa: E731
    if "_blocks_class_name" in files.index and "scheduler" not in files.components:
        files = _with_schedule(files)
    if look is not None:
        look(files)
    if fetch is not None and weights:
        fetch()
    return files


def _with_schedule(files: ModelFiles) -> ModelFiles:
    """Return the files of a modular pipeline with its family's schedule, which such a pipeline may omit."""
    if (layout := family_of(files.index).single_file) is None:
        return files
    config = layout.configs["scheduler"]
    kind = config["_class_name"]
    return replace(
        files,
        index={**files.index, "scheduler": ["diffusers", kind]},
        components={**files.components, "scheduler": kind},
        configs={**files.configs, "scheduler": config},
    )


def open_network(
    location: Location, *, accept: Accept | None = None, component: str = "", kind: Library | None = None
) -> NetworkFiles:
    """Find one network: ``config.json`` and weights at the top of a repository or folder, or in
    ``component``'s folder.

    ``accept`` looks at ``config.json`` before weights are fetched. ``kind`` is the library whose file names it uses,
    where the component does not say.

    Raises:
        InputError, CheckpointError, HubError: as ``open_files``.
    """
    name, inside = location.text, f"{component}/" if component else ""
    path = location.local()
    commit = find_commit(location, inside + _CONFIG) if path is None else None
    if path is not None:
        location.warn_unused("revision")
    else:
        assert commit is not None
        path = commit.fetch([inside + _CONFIG])
    folder = path / component
    if not (folder / _CONFIG).exists():
        if component:
            raise CheckpointError(f"{name}: {component} is not there: it has no {inside}{_CONFIG}")
        problem = "is a whole model, not a network alone" if index_in(names_in(path)) else f"has no {_CONFIG}"
        raise CheckpointError(f"{name}: {problem}; give the folder or Hub id of the network itself")
    config = read_json(folder / _CONFIG)
    if accept is not None:
        accept(config)
    library = kind or library_of(component)
    if commit is not None and commit.names is not None:
        names = [file.removeprefix(inside) for file in commit.names if file.startswith(inside)]
        top = [file for file in names if "/" not in file]
        _fetch_weights(commit, {inside: plan_weights(top, library, location.variant, name)})
    arrays = [entry for file in find_weights(folder, library, location.variant) for entry in open_weights(file)]
    return NetworkFiles(name, arrays, config, folder, commit.sha if commit else None, location.variant)


def open_part(location: Location, component: str, accept: Accept, kind: Library) -> NetworkFiles:
    """Find a network that replaces a part of a model: its folder, a folder that contains it as ``component``, or a Hub
    id with an optional folder. Its name is that of ``location``.

    Raises:
        InputError, CheckpointError, HubError: as ``open_network``.
    """
    path, place, inside = location.local(), location, ""
    if path is None:
        place, inside = location.on_hub()
    elif not (path / _CONFIG).is_file() and (path / component).is_dir():
        inside = component
    return replace(open_network(place, accept=accept, component=inside, kind=kind), name=location.text)


def read_config(location: Location, name: str) -> dict[str, Any]:
    """Read one JSON file of a model, such as ``scheduler/scheduler_config.json``, without other downloads.

    Raises:
        InputError, CheckpointError, HubError: as ``open_files``.
    """
    path = location.local()
    if path is not None and not (path / name).exists():
        inside = ", ".join(sorted(inside_it.name for inside_it in path.iterdir() if inside_it.is_dir())) or "none"
        raise CheckpointError(f"{location.text}: there is no {name} in it; its folders (subfolder=) are {inside:.200}")
    return read_json((find_commit(location, name).fetch([name]) if path is None else path) / name)


def find_adapter(location: Location, usual: Sequence[Sequence[str]]) -> tuple[list[Path], dict[str, Any] | None]:
    """Return the files of an adapter, downloaded if necessary, and PEFT's config next to them, if any.

    Args:
        location: the model's location.
        usual: usual names of its files in folders and repositories.

    Raises:
        InputError, CheckpointError: there is no such file, or only pickles.
        HubError: the Hub cannot be reached, or does not have it.
    """
    if (local := _local_adapter(location, usual)) is not None:
        location.warn_unused("revision")
        return local
    repository, file = location.on_hub()
    name, file = repository.text, _one_name(location, file)
    if not file and not usual:
        raise InputError(
            location.argument,
            "names a repository and no file in it",
            cure=f"write {name}/FOLDER/FILE.safetensors",
            value=name,
        )
    commit = find_commit(repository, *([file] if file else [row[0] for row in usual]))
    if commit.names is None:
        folder = commit.folder
        row = next((row[1:] for row in usual if row[0] == commit.root), ())
        names = [name for name in (commit.root, *row) if (folder / name).is_file()]
    else:
        names = _chosen(name, commit.names, usual, file)
        config = [_PEFT] if _PEFT in commit.names and names[0] == "adapter_model.safetensors" else []
        commit = replace(commit, root=names[0])
        folder = commit.fetch([*names, *config], progress=True)
        commit.remember()
    return [folder / name for name in names], _peft_config(folder, names[0])


def check_adapter(location: Location, usual: Sequence[Sequence[str]]) -> None:
    """Raise the errors of ``find_adapter`` and of reading that can be known without the Hub."""
    for path in (_local_adapter(location, usual) or ([], None))[0]:
        open_safetensors(path, plain_names=False)


def find_tokenizer(location: Location, *, otherwise: Path | None = None) -> Path:
    """Return the folder of a language model's ``tokenizer.json``, downloaded if necessary.

    Args:
        location: that folder or a file in it, a model's folder that contains it as ``tokenizer``, or a Hub id with an
            optional folder.
        otherwise: the folder to use if there is no tokenizer next to a local file.

    Raises:
        InputError, CheckpointError, HubError: it does not exist.
    """
    path = location.local()
    if path is not None:
        folder = path.parent if path.is_file() else path
        for directory in (folder, *(folder / name for name in _TOKENIZERS)):
            if (directory / _TOKENIZER).is_file():
                return directory
        if otherwise is not None:
            return otherwise
        cure = "name the folder of the tokenizer, or a Hub id"
        raise InputError(location.argument, f"has no {_TOKENIZER}", cure=cure, value=location.text)
    location, inside = location.on_hub()
    folders = [f"{inside}/"] if inside else [*(f"{name}/" for name in _TOKENIZERS), ""]
    commit = find_commit(location, *(folder + _TOKENIZER for folder in folders))
    if (names := commit.names) is not None:
        folder = next((place for place in folders if place + _TOKENIZER in names), None)
        if folder is None:
            raise CheckpointError(f"{location.argument}={location.text!r}: has no {_TOKENIZER} at commit {commit.sha}")
        commit = replace(commit, root=folder + _TOKENIZER)
        commit.fetch([folder + name for name in plain_files("tokenizer") if folder + name in names])
        commit.remember()
    return (commit.folder / commit.root).parent


def why_no_index(names: Collection[str], folder: Path | None = None) -> str:
    """Return why a ``folder`` with these files and no index is not a checkpoint, and the cure."""
    if folder is not None and "config.json" in names:
        with suppress(CheckpointError):
            name = str(read_json(folder / "config.json").get("_class_name"))
            if (kind := CLASSES.get(name)) is not None:
                return f"is a network alone ({name}), not a model; {kind.cure}."
    files = sorted(name for name in names if name.lower().endswith(WEIGHTS) and "/" not in name)
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not files:
        return f"has no {INDEX}, only {pickles[0]}. {pickle_refused(pickles[0])}."
    cure = f" If {files[0]} is a whole model, fetch it and pass the file." if files else ""
    if folder is not None:
        below = sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
        # Model folders of other programs.
        other = [file for name in ("checkpoints", "Stable-diffusion") for file in folder.glob(f"{name}/*.safetensors")]
        if below:
            cure = f" {below[0].name} in it has one: pass {below[0]}."
        elif files:
            cure = f" Pass one of its files, such as {folder / files[0]}; canvax info {folder} says what they are."
        elif other:
            cure = f" Pass the file of a model in it, such as {other[0]}."
    return f"has no {INDEX}, so it is not a checkpoint in the diffusers layout.{cure}"


def _open_folder(
    location: Location, path: Path, revision: str | None, accept: Accept | None, weights: bool
) -> ModelFiles:
    name = location.text
    if index_in(names := names_in(path)) is None:
        raise CheckpointError(f"{name}: {why_no_index(names, path)}")
    known = known_components()
    index = read_index(name, path, accept, names, known)
    return read_folder(name, path, index, revision, location.variant, known, weights=weights)


def _fetch_weights(commit: Commit, plans: Mapping[str, WeightPlan]) -> None:
    """Download the weight files, or all shards, of each folder's plan; folders end with a slash."""
    indexes = {folder: folder + plan.file for folder, plan in plans.items() if plan.sharded}
    path = commit.fetch(list(indexes.values()))
    shards = [folder + shard for folder, index in indexes.items() for shard in shard_names(path / index)]
    whole = [folder + plan.file for folder, plan in plans.items() if not plan.sharded]
    commit.fetch([*whole, *shards], progress=True)
    commit.remember()  # offline, a cached copy must be complete


def _local_adapter(
    location: Location, usual: Sequence[Sequence[str]]
) -> tuple[list[Path], dict[str, Any] | None] | None:
    """Return the result of ``find_adapter`` for a file or folder; None for a Hub id."""
    if location.variant is not None:
        raise InputError("variant", "is for models", cure="choose the file with {weight_name}", value=location.variant)
    path = location.local()
    if path is None:
        return None
    if path.is_file():
        refuse_pickle(path)
        if path.suffix.lower() != ".safetensors":
            raise CheckpointError(
                f"{path}: is no safetensors file, the one kind of file that canvax reads adapters from"
            )
        _one_name(location, path.name)
        return [path], _peft_config(path.parent, path.name)
    names = _chosen(
        location.text, [file.name for file in path.iterdir() if file.is_file()], usual, location.weight_name
    )
    return [path / name for name in names], _peft_config(path, names[0])


def _one_name(location: Location, file: str) -> str | None:
    """Return the file's name, which must match ``weight_name``."""
    weight_name = location.weight_name
    if file and weight_name is not None and weight_name != file:
        cure = "give its folder or repository, or leave weight_name out"
        raise InputError("weight_name", f"is another file than {location.text[:200]!r}", cure=cure, value=weight_name)
    return file or weight_name


def _chosen(name: str, names: Collection[str], usual: Sequence[Sequence[str]], wanted: str | None) -> list[str]:
    """Return the files of a folder to read."""
    tensors = sorted(file for file in names if file.endswith(".safetensors"))
    listed = (
        f": {', '.join(tensors[:8])}{f' and {len(tensors) - 8} more' if len(tensors) > 8 else ''}" if tensors else ""
    )
    if wanted is not None:
        if wanted in names:
            return [wanted]
        raise CheckpointError(f"{name}: has no file {wanted!r}{listed}")
    for row in usual:
        if row[0] in names:
            return [file for file in row if file in names]
    top = [file for file in tensors if "/" not in file]
    if len(top) == 1:
        return top
    if not top and (pickles := sorted(file for file in names if file.endswith(PICKLES))):
        raise CheckpointError(f"{name}: has only {pickles[0]}. {pickle_refused(pickles[0])}")
    problem = "several files; name one of them, FOLDER/FILE" if top else "no safetensors file"
    if index_in(names):
        problem = f"a whole model in it ({INDEX}), and no adapter; canvax.load loads models"
    raise CheckpointError(f"{name}: has {problem}{listed}")


def _peft_config(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / _PEFT
    return read_json(path) if name == "adapter_model.safetensors" and path.is_file() else None
