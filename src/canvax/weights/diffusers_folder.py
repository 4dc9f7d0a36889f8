"""A model in the diffusers layout: ``model_index.json`` and a folder for each component."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError
from canvax.files import read_json
from canvax.tokenizers.concepts import FILE as CONCEPTS
from canvax.weights.entries import Entry
from canvax.weights.files import open_weights
from canvax.weights.layout import (
    DEFAULTS,
    INDEX,
    KINDS,
    OTHER_KINDS,
    PLAIN_FILES,
    Kind,
    WeightPlan,
    config_file,
    find_weights,
    names_in,
    plan_weights,
    variants,
)

_LIBRARIES = {"diffusers", "transformers"}

Accept = Callable[[Mapping[str, Any]], Any]
"""Looks at ``model_index.json`` before anything else is fetched; raises if the model is of no use."""


@dataclass(frozen=True)
class DiffusersFolder:
    """A ``canvax.weights.files.ModelFiles`` on disk: the user's own folder or a commit in the Hub's cache.

    Attributes:
        name: the model as it was asked for.
        path: the folder that holds ``model_index.json``; for a single network, ``config.json``.
        revision: as in ``ModelFiles``, and so are the others.
        kind: the library whose file names a single network uses; by default its name tells.
    """

    name: str
    path: Path
    revision: str | None
    variant: str | None
    index: Mapping[str, Any]
    components: Mapping[str, str]
    unread: tuple[str, ...] = ()
    kind: Kind | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.revision[:12]}" if self.revision else self.name

    def config(self, component: str) -> dict[str, Any]:
        """The parsed config of a component: ``config.json``, ``scheduler_config.json`` or ``tokenizer_config.json``.

        Raises:
            CheckpointError: the component or its config is missing or malformed.
        """
        if component not in self.components:
            raise CheckpointError(
                f"{self}: has no component {component!r} in its {INDEX}; it has {', '.join(self.components) or 'none'}."
            )
        return read_json(self.folder(component) / config_file(component))

    def entries(self, component: str) -> list[Entry]:
        """The arrays in a component's weight files; no array is read.

        Raises:
            CheckpointError: the component has no weights, or a file is damaged.
        """
        return [entry for path in self._weights(component) for entry in open_weights(path)]

    def folder(self, component: str = "") -> Path:
        """The folder of a component; without one, that of the model."""
        return self.path / component

    def check(self, *, weights: bool) -> None:
        """Look for everything that will be read, and report all that is missing together.

        Raises:
            CheckpointError: a folder, config or, with ``weights``, a weight file is missing.
        """
        faults = []
        for component in self.components:
            try:
                if component in KINDS and weights:
                    self._weights(component)
                if component in KINDS or component == "scheduler":
                    self.config(component)
                else:
                    names_in(self.folder(component))
            except CheckpointError as error:
                faults.append(str(error))
        _report(self.name, faults)
        if weights:
            parts = [component for component in self.components if component in KINDS]
            _check_variant_exists(self.name, self.variant, {part: names_in(self.folder(part)) for part in parts})

    def _weights(self, component: str) -> list[Path]:
        kinds: dict[str, Kind] = {**KINDS, **OTHER_KINDS}
        kind = self.kind or kinds.get(component, "diffusers")
        return find_weights(self.folder(component), kind, self.variant)


def read_folder(
    name: str, path: Path, revision: str | None = None, variant: str | None = None, accept: Accept | None = None
) -> DiffusersFolder:
    """The model in a folder, of which ``model_index.json`` alone is read; ``accept`` may refuse it.

    Raises:
        CheckpointError: the index is malformed, or names code that comes with the checkpoint.
    """
    index = read_json(path / INDEX)
    if accept is not None:
        try:
            accept(index)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    unread = tuple(
        component
        for component, value in index.items()
        if isinstance(value, list)
        and len(value) == 2
        and isinstance(value[1], str)
        and component not in (*KINDS, *PLAIN_FILES)
        and not component.startswith("_")
    )
    return DiffusersFolder(name, path, revision, variant, index, _components(name, index), unread)


def _components(name: str, index: Mapping[str, Any]) -> dict[str, str]:
    """The components to read, and their classes."""
    components = {}
    for component in (*KINDS, *PLAIN_FILES):
        value = index.get(component)
        if value is None or value == [None, None]:
            continue
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
            raise CheckpointError(
                f"{name}: {INDEX} describes {component!r} as {str(value)[:80]}, not as [library, class]."
            )
        if value[0] not in _LIBRARIES:
            raise CheckpointError(
                f"{name}: its {component} is {value[1]!r} from {value[0]!r}, code that comes with the checkpoint. "
                "canvax never runs code from a repository; use a checkpoint with the stock classes."
            )
        components[component] = value[1].removeprefix("Flax")
    return components


def small_files(components: Collection[str], names: Collection[str]) -> list[str]:
    """Those of ``names``, relative to the model's folder, that are read beside the index and the weights."""
    wanted = [f"{part}/{file}" for part in components for file in PLAIN_FILES.get(part, ("config.json",))]
    return [name for name in (DEFAULTS, CONCEPTS, *wanted) if name in names]


def plan_components(
    name: str, components: Collection[str], names: Collection[str], variant: str | None
) -> dict[str, WeightPlan]:
    """The weight file of each component that has weights, chosen among ``names`` relative to the model's folder.

    Raises:
        CheckpointError: there is nothing that can be read for a component, or no component has the variant.
    """
    inside = {
        part: [file.removeprefix(f"{part}/") for file in names if file.startswith(f"{part}/")]
        for part in components
        if part in KINDS
    }
    _check_variant_exists(name, variant, inside)
    plans, faults = {}, []
    for part, files in inside.items():
        try:
            plans[part] = plan_weights(files, KINDS[part], variant, f"{name}/{part}")
        except CheckpointError as error:
            faults.append(str(error))
    _report(name, faults)
    return plans


def _check_variant_exists(name: str, variant: str | None, files: Mapping[str, Collection[str]]) -> None:
    """Refuse a variant that no component has; ``files`` are the file names of each."""
    known = sorted({other for part, inside in files.items() for other in variants(inside, KINDS[part])})
    if variant is not None and variant not in known:
        cure = f"it has {', '.join(map(repr, known))}" if known else "it has none, leave variant out"
        raise CheckpointError(f"{name}: has no weights of variant = {variant!r}; {cure}.")


def _report(name: str, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(f"{name}: the checkpoint is incomplete:\n  " + "\n  ".join(faults))
