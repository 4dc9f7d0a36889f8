"""From the name of a model to a folder on disk that holds one commit of it.

A name is the bundled model, a local folder, or a Hub id ``owner/name``. For a Hub id the commit is resolved first,
once, and every file is asked for by that commit, so that a repository which changes meanwhile cannot give a mixture.
Only files that will be read are fetched; none of them is code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError, nearest, warn
from canvax.weights.layout import (
    DEFAULTS,
    INDEX,
    KINDS,
    PICKLE_REFUSED,
    PICKLES,
    PLAIN_FILES,
    WeightPlan,
    check_variant,
    config_file,
    find_weights,
    plan_weights,
    read_json,
    shard_names,
    variants,
    why_no_index,
)
from canvax.weights.remote import Repo

BUNDLED = {"emoji": Path(__file__).parent.parent / "assets" / "emoji"}
"""Models inside the package, by name."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.\-+/]*", re.ASCII)
_LIBRARIES = {"diffusers", "transformers"}
_CONFIG = "config.json"

Accept = Callable[[Mapping[str, Any]], Any]
"""Looks at ``model_index.json`` before anything else is fetched; raises if the model is of no use."""


@dataclass(frozen=True)
class Checkout:
    """One commit of a checkpoint, on disk.

    Attributes:
        source: the model's name as it was given.
        folder: the folder that holds ``model_index.json``.
        revision: the commit sha, None for a local folder.
        variant: the variant asked for; components without it are read from their plain files.
        index: ``model_index.json``, parsed.
        components: folders that canvax reads, by name, with their class names (without ``Flax`` in front).
        unread: components of the checkpoint that canvax leaves alone, such as ``safety_checker``.
    """

    source: str
    folder: Path
    revision: str | None
    variant: str | None
    index: Mapping[str, Any]
    components: Mapping[str, str]
    unread: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source} at {self.revision[:12]}" if self.revision else str(self.source)

    def config(self, component: str) -> dict[str, Any]:
        """The parsed config of a component: ``config.json``, ``scheduler_config.json`` or ``tokenizer_config.json``.

        Raises:
            CheckpointError: the component or its config is missing or malformed.
        """
        if component not in self.components:
            raise CheckpointError(
                f"{self}: has no component {component!r} in its {INDEX}; it has {', '.join(self.components) or 'none'}."
            )
        return read_json(self.folder / component / config_file(component))

    def weights(self, component: str) -> list[Path]:
        """The weight files of a component."""
        return find_weights(self.folder / component, KINDS[component], self.variant)


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    accept: Accept | None = None,
    look: Callable[[Checkout], Any] | None = None,
    weights: bool = True,
) -> Checkout:
    """Find a model, fetching what is not on disk yet.

    Args:
        model: a bundled model's name (``emoji``), a folder in the diffusers layout, or a Hub id ``owner/name``. A
            folder that shares its name with a bundled model is reached as ``./emoji``.
        revision: branch, tag or commit of a Hub id; ``main`` if not given.
        variant: which of several sets of weights, for example ``fp16``.
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: where the Hub's files are kept; by default the cache shared by all Hub libraries.
        local_files_only: use the cache alone, as with HF_HUB_OFFLINE=1.
        progress: show download bars on stderr.
        accept: called with the parsed ``model_index.json`` before anything else is fetched.
        look: called with the checkout before weights are fetched, when all else is there.
        weights: without, they are neither fetched nor looked for.

    Raises:
        InputError: the arguments cannot mean anything.
        CheckpointError: the checkpoint is missing, incomplete, or holds only pickles.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    check_variant(variant)
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InputError(f"revision = {revision!r} is not a branch, tag or commit.")
    folder = _local_folder(model)
    if folder is not None:
        if revision is not None:
            warn(f"revision = {revision!r} is ignored: {str(model)!r} is a folder, not a Hub id")
        return _open_folder(str(model), folder, None, variant, accept, weights)
    repo = Repo(str(model), revision or "main", token, cache_dir, progress)
    sha, names = repo.current(local_files_only)
    if names is None:
        try:
            return _open_folder(str(model), repo.snapshot(sha), sha, variant, accept, weights)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (The Hub was not asked: only the cache at hand was used.)") from None
    index = read_json(repo.fetch(INDEX, sha, names))
    components = _accepted(str(model), index, accept)
    plans = _fetch_all_but_weights(repo, sha, names, components, variant)
    if look is not None:
        look(Checkout(str(model), repo.snapshot(sha), sha, variant, index, components, _unread(index)))
    for component, plan in plans.items() if weights else ():
        _fetch_weights(repo, sha, names, plan, f"{component}/")
    checkout = _open_folder(str(model), repo.snapshot(sha), sha, variant, None, weights)
    if weights:  # offline, what is remembered must be whole
        repo.remember(sha)
    return checkout


def _local_folder(model: str | Path) -> Path | None:
    """The folder that ``model`` names, or None if it is a Hub id."""
    if isinstance(model, str) and model in BUNDLED:
        return BUNDLED[model]
    if not isinstance(model, str | os.PathLike):
        raise InputError(f"model = {model!r} is no name; pass a folder, a Hub id 'owner/name', or 'emoji'.")
    text = str(model)
    if not text:
        raise InputError("model = '' names nothing; pass a folder, a Hub id 'owner/name', or 'emoji'.")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if text.lower().endswith(PICKLES):
        raise CheckpointError(f"{text}: {PICKLE_REFUSED}.")
    if path.is_file():
        raise CheckpointError(
            f"{text}: is a single file. Pass a folder in the diffusers layout ({INDEX}, unet/, vae/, ...)."
        )
    if isinstance(model, str) and _HUB_ID.fullmatch(text) and ".." not in text:
        return None
    hint = "" if "/" in text or "\\" in text else f" Bundled models: {nearest(text, list(BUNDLED))}"
    raise CheckpointError(f"model = {text!r}: there is no such folder, and it is not a Hub id 'owner/name'.{hint}")


def _accepted(source: str, index: Mapping[str, Any], accept: Accept | None) -> dict[str, str]:
    """The components to read, after the caller had a look at the index."""
    if accept is not None:
        accept(index)
    components = {}
    for name in (*KINDS, *PLAIN_FILES):
        value = index.get(name)
        if value is None or value == [None, None]:
            continue
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
            raise CheckpointError(
                f"{source}: {INDEX} describes {name!r} as {str(value)[:80]}, not as [library, class]."
            )
        if value[0] not in _LIBRARIES:
            raise CheckpointError(
                f"{source}: its {name} is {value[1]!r} from {value[0]!r}, code that comes with the checkpoint. "
                "canvax never runs code from a repository; use a checkpoint with the stock classes."
            )
        components[name] = value[1].removeprefix("Flax")
    return components


def _unread(index: Mapping[str, Any]) -> tuple[str, ...]:
    """Components that the index names and canvax does not read."""
    return tuple(
        name
        for name, value in index.items()
        if isinstance(value, list)
        and len(value) == 2
        and isinstance(value[1], str)
        and name not in (*KINDS, *PLAIN_FILES)
        and not name.startswith("_")
    )


def _open_folder(
    source: str, folder: Path, sha: str | None, variant: str | None, accept: Accept | None, weights: bool
) -> Checkout:
    """A checkout of what is on disk; reports all missing parts together."""
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{source}: {why_no_index([path.name for path in folder.iterdir()])}")
    index = read_json(folder / INDEX)
    components = _accepted(source, index, accept)
    checkout = Checkout(source, folder, sha, variant, index, components, _unread(index))
    faults = []
    for name in components:
        try:
            if name in KINDS and weights:
                checkout.weights(name)
            if name in KINDS or name == "scheduler":
                checkout.config(name)
            elif not (folder / name).is_dir():
                raise CheckpointError(f"{folder / name}: the folder is missing. Download the checkpoint again.")
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(f"{source}: the checkpoint is incomplete:\n  " + "\n  ".join(faults))
    if weights:
        held = {name: [path.name for path in (folder / name).iterdir()] for name in components if name in KINDS}
        _check_variant_exists(source, variant, held)
    return checkout


def _check_variant_exists(source: str, variant: str | None, held: Mapping[str, Collection[str]]) -> None:
    """Refuse a variant that no component has."""
    known = sorted({found for name, names in held.items() for found in variants(names, KINDS[name])})
    if variant is not None and variant not in known:
        cure = f"it has {', '.join(map(repr, known))}" if known else "it has none, leave variant out"
        raise CheckpointError(f"{source}: has no weights of variant = {variant!r}; {cure}.")


def _fetch_all_but_weights(
    repo: Repo, sha: str, names: Collection[str], components: Mapping[str, str], variant: str | None
) -> dict[str, WeightPlan]:
    """Fetch the small files of all components, after everything has been found in the list of ``names``.

    Returns:
        Which weights each component is to have.
    """
    held = {
        component: [name.removeprefix(f"{component}/") for name in names if name.startswith(f"{component}/")]
        for component in components
    }
    with_weights = {component: held[component] for component in components if component in KINDS}
    _check_variant_exists(repo.id, variant, with_weights)
    plans, faults = {}, []
    for component, inside in with_weights.items():
        try:
            plans[component] = plan_weights(inside, KINDS[component], variant, f"{repo.id}/{component}")
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(f"{repo.id}: the checkpoint is incomplete:\n  " + "\n  ".join(faults))
    if DEFAULTS in names:
        repo.fetch(DEFAULTS, sha, names)
    for component, inside in held.items():
        for name in PLAIN_FILES.get(component, ("config.json",)):
            if name in inside:
                repo.fetch(f"{component}/{name}", sha, names)
    return plans


def _fetch_weights(repo: Repo, sha: str, names: Collection[str], plan: WeightPlan, folder: str = "") -> None:
    """Fetch the weight file of a plan, or all shards of it; ``folder`` ends with a slash."""
    path = repo.fetch(folder + plan.file, sha, names)
    for shard in shard_names(path) if plan.sharded else ():
        repo.fetch(folder + shard, sha, names)


def resolve_component(
    model: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    accept: Accept | None = None,
) -> Checkout:
    """Find a network that is a repository or folder of its own: ``config.json`` and weights of diffusers at the top.

    ``accept`` looks at ``config.json`` before weights are fetched.

    Raises:
        InputError, CheckpointError, HubError: as :func:`resolve`.
    """
    check_variant(variant)
    folder, sha = _local_folder(model), None
    if folder is None:
        repo = Repo(str(model), revision or "main", token, cache_dir, progress, root=_CONFIG)
        sha, names = repo.current(local_files_only)
        if names is not None:
            plan = plan_weights([name for name in names if "/" not in name], "diffusers", variant, repo.id)
            config = repo.fetch(_CONFIG, sha, names)
            if accept is not None:
                accept(read_json(config))
            _fetch_weights(repo, sha, names, plan)
            repo.remember(sha)
        folder = repo.snapshot(sha)
    if accept is not None:
        accept(read_json(folder / _CONFIG))
    return Checkout(str(model), folder, sha, variant, {}, {}, ())


def fetch_config(
    model: str | Path,
    name: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> dict[str, Any]:
    """One JSON file of a model, such as ``scheduler/scheduler_config.json``; nothing else is fetched.

    Raises:
        InputError, CheckpointError, HubError: as :func:`resolve`.
    """
    folder = _local_folder(model)
    if folder is None:
        repo = Repo(str(model), revision or "main", token, cache_dir, False)
        sha, names = repo.current(local_files_only)
        if names is not None:
            return read_json(repo.fetch(name, sha, names))
        folder = repo.snapshot(sha)
    return read_json(folder / name)


def resolve_configs(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    accept: Accept | None = None,
) -> Checkout:
    """Like :func:`resolve`, but nothing is fetched or asked for beside the configs: the weights may be missing.

    Raises:
        InputError, CheckpointError, HubError: as :func:`resolve`.
    """
    folder, sha = _local_folder(model), None
    if folder is None:
        repo = Repo(str(model), revision or "main", token, cache_dir, False)
        sha, names = repo.current(local_files_only)
        if names is not None:
            index = read_json(repo.fetch(INDEX, sha, names))
            for component in _accepted(str(model), index, accept):
                if component in KINDS:
                    repo.fetch(f"{component}/config.json", sha, names)
        folder = repo.snapshot(sha)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{model}: {why_no_index([path.name for path in folder.iterdir()])}")
    index = read_json(folder / INDEX)
    return Checkout(str(model), folder, sha, None, index, _accepted(str(model), index, accept), _unread(index))
