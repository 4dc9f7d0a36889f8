"""The files of a model, however they are stored: what loading, saving and reading configs ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from canvax.weights.entries import Entry
from canvax.weights.flax_msgpack import open_flax_msgpack
from canvax.weights.safetensors import open_safetensors


class ModelFiles(Protocol):
    """One commit of a model, on disk. ``str()`` of it is the model's name for messages."""

    @property
    def name(self) -> str:
        """The model as it was asked for."""
        ...

    @property
    def path(self) -> Path:
        """Where it is: a folder, or a single file."""
        ...

    @property
    def revision(self) -> str | None:
        """The commit sha; None if it is not from the Hub."""
        ...

    @property
    def variant(self) -> str | None:
        """The variant asked for; components without it are read from their plain files."""
        ...

    @property
    def index(self) -> Mapping[str, Any]:
        """``model_index.json``, parsed: the kind of pipeline and its components."""
        ...

    @property
    def components(self) -> Mapping[str, str]:
        """Components that canvax reads, by name, with their class names (without ``Flax`` in front)."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Components that canvax leaves alone, such as ``safety_checker``."""
        ...

    def config(self, component: str) -> dict[str, Any]:
        """The parsed config of a component.

        Raises:
            CheckpointError: the component or its config is missing or malformed.
        """
        ...

    def entries(self, component: str) -> list[Entry]:
        """The arrays in a component's weight files; no array is read.

        Raises:
            CheckpointError: the component has no weights, or a file is damaged.
        """
        ...

    def folder(self, component: str = "") -> Path:
        """The folder of a component's plain files, such as a tokenizer's; without a component, of the model's own."""
        ...


def open_weights(path: Path) -> list[Entry]:
    """The arrays of a weight file of either format; no array is read.

    Raises:
        CheckpointError: the file is damaged or something else.
    """
    return open_flax_msgpack(path) if path.suffix == ".msgpack" else open_safetensors(path)
