"""From a ``Source`` to the files of one commit of it on disk.

For a Hub id the commit is resolved first, once, and every file is asked for by that commit, so that a repository which
changes meanwhile cannot give a mixture. Only files that will be read are fetched; none of them is code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError
from canvax.files import read_json
from canvax.weights.diffusers_folder import Accept, DiffusersFolder, plan_components, read_folder, small_files
from canvax.weights.files import ModelFiles
from canvax.weights.hub import Commit, find_commit
from canvax.weights.layout import (
    INDEX,
    OTHER_KINDS,
    Kind,
    WeightPlan,
    names_in,
    plan_weights,
    shard_names,
    why_no_index,
)
from canvax.weights.single_file import open_single_file
from canvax.weights.source import Source

_CONFIG = "config.json"


def open_files(
    source: Source,
    *,
    accept: Accept | None = None,
    look: Callable[[ModelFiles], object] | None = None,
    weights: bool = True,
    prediction: str | None = None,
    vae: bool = True,
) -> ModelFiles:
    """Find a model, fetching what is not on disk yet.

    Args:
        source: where it comes from.
        accept: called with the parsed ``model_index.json`` before anything else is read or fetched.
        look: called once with the files before weights are fetched, when all else is there.
        weights: without, they are neither fetched nor looked for.
        prediction: of a model in one file, if the caller knows it.
        vae: whether a model in one file has to hold an autoencoder.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or holds only pickles.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    if (file := source.single_file()) is not None:
        single = open_single_file(source.name, file, prediction=prediction, vae=vae)
        if accept is not None:
            accept(single.index)
        if look is not None:
            look(single)
        return single
    path = source.local_folder()
    commit = find_commit(source, INDEX) if path is None else None
    if commit is None or commit.names is None:
        files = _open_local(source, path, commit, accept, weights)
        if look is not None:
            look(files)
        return files
    if INDEX not in commit.names:
        raise CheckpointError(f"{source.name}: {why_no_index(commit.names)}")
    files = read_folder(source.name, commit.fetch([INDEX]), commit.sha, source.variant, accept)
    wanted = weights or source.variant is not None  # a variant that is not there is told without weights as well
    plans = plan_components(files.name, files.components, commit.names, source.variant) if wanted else {}
    commit.fetch(small_files(files.components, commit.names))
    files.check(weights=False)
    if look is not None:
        look(files)
    if weights:
        _fetch_weights(commit, {f"{component}/": plan for component, plan in plans.items()})
        commit.remember()  # offline, what is remembered must be whole
    return files


def open_network(
    source: Source, *, accept: Accept | None = None, component: str = "", kind: Kind | None = None
) -> ModelFiles:
    """Find one network: ``config.json`` and weights at the top of a repository or folder, or in ``component``'s folder.

    It is the component ``component`` of the files. ``accept`` looks at ``config.json`` before weights are fetched.
    ``kind`` is the library whose file names it uses, where the component does not say.

    Raises:
        CheckpointError, HubError: as ``open_files``.
    """
    inside = f"{component}/" if component else ""
    path = source.local_folder()
    commit = find_commit(source, inside + _CONFIG) if path is None else None
    if commit is not None:
        path = commit.fetch([inside + _CONFIG])
    assert path is not None
    if not (path / inside / _CONFIG).exists():
        if component:
            raise CheckpointError(f"{source.name}: {component} is not there: it has no {inside}{_CONFIG}")
        what = "is a whole model, not a network alone" if (path / INDEX).exists() else f"has no {_CONFIG}"
        raise CheckpointError(f"{source.name}: {what}; give the folder or Hub id of the network itself")
    config = read_json(path / inside / _CONFIG)
    if accept is not None:
        accept(config)
    if commit is not None and commit.names is not None:
        names = [name.removeprefix(inside) for name in commit.names if name.startswith(inside)]
        own = [name for name in names if "/" not in name]
        library = kind or OTHER_KINDS.get(component, "diffusers")
        _fetch_weights(commit, {inside: plan_weights(own, library, source.variant, source.name)})
        commit.remember()
    components = {component: str(config.get("_class_name"))}
    sha = commit.sha if commit else None
    return DiffusersFolder(source.name, path, sha, source.variant, {}, components, kind=kind)


def read_config(source: Source, name: str) -> dict[str, Any]:
    """One JSON file of a model, such as ``scheduler/scheduler_config.json``; nothing else is fetched.

    Raises:
        CheckpointError, HubError: as ``open_files``.
    """
    path = source.local_folder()
    if path is not None and not (path / name).exists():
        inside = ", ".join(sorted(one.name for one in path.iterdir() if one.is_dir())) or "none"
        raise CheckpointError(f"{source.name}: there is no {name} in it; its folders (subfolder=) are {inside:.200}")
    return read_json((find_commit(source, name).fetch([name]) if path is None else path) / name)


def _open_local(
    source: Source, path: Path | None, commit: Commit | None, accept: Accept | None, weights: bool
) -> DiffusersFolder:
    """The files of a folder, or of a ``commit`` in the cache when the Hub is not asked."""
    path = commit.folder if commit is not None else path
    assert path is not None
    try:
        if INDEX not in (names := names_in(path)):
            raise CheckpointError(f"{source.name}: {why_no_index(names, path)}")
        files = read_folder(source.name, path, commit.sha if commit else None, source.variant, accept)
        files.check(weights=weights or source.variant is not None)
    except CheckpointError as error:
        if commit is None:
            raise
        raise CheckpointError(f"{error} (The Hub was not asked: only the cache at hand was used.)") from None
    return files


def _fetch_weights(commit: Commit, plans: dict[str, WeightPlan]) -> None:
    """Fetch the weight files of each folder's plan, or all shards of it; folders end with a slash."""
    indexes = {folder: folder + plan.file for folder, plan in plans.items() if plan.sharded}
    path = commit.fetch(list(indexes.values()))
    shards = [folder + shard for folder, index in indexes.items() for shard in shard_names(path / index)]
    whole = [folder + plan.file for folder, plan in plans.items() if not plan.sharded]
    commit.fetch([*whole, *shards], progress=True)
