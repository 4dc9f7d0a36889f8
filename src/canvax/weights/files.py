"""The files of a model or a network in any layout: the interface for loading, saving and reading configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from canvax.errors import CheckpointError
from canvax.models.configs import ClipVisionConfig
from canvax.weights.entries import Entry
from canvax.weights.flax_msgpack import open_flax_msgpack
from canvax.weights.gguf import open_gguf
from canvax.weights.safetensors import open_safetensors
from canvax.weights.scales import with_scales

ControlKind = Literal["controlnet", "adapter", "transformer"]
"""A ControlNet of a UNet, a T2I-Adapter, or a ControlNet of FLUX.1."""


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """The files of one revision of a model on disk. ``str()`` returns the model's name for messages.

    Attributes:
        name: the model's name as the caller wrote it.
        path: a folder, or a single file.
        index: ``model_index.json``, parsed: the kind of pipeline and its components.
        components: class name, without the prefix ``Flax``, of each component that canvax reads.
        configs: parsed configs, by component.
        arrays: opens the weight files of a component; no array is read.
        folders: returns the folder of a component's other files, such as a tokenizer's; for "", the model's.
        revision: the commit sha; None if it is not from the Hub.
        variant: the requested variant; components without it are read from their default files.
        unread: components that canvax does not read, such as ``safety_checker``.
        reasons: for a single file, the properties inferred from its arrays, with the evidence.
        overrides: replaced parts and other changes, as arguments of ``canvax.load``.
    """

    name: str
    path: Path
    index: Mapping[str, Any]
    components: Mapping[str, str]
    configs: Mapping[str, Mapping[str, Any]]
    arrays: Callable[[str], Sequence[Entry]]
    folders: Callable[[str], Path]
    revision: str | None = None
    variant: str | None = None
    unread: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def none(cls, name: str) -> ModelFiles:
        """Return the files of a model that was made in Python."""

        def missing(component: str) -> Any:
            raise CheckpointError(f"{name}: was made in Python, and has no files of {component or 'a model'}")

        return cls(name, Path(name), {}, {}, {}, arrays=missing, folders=missing)

    def __str__(self) -> str:
        name = _at(self.name, self.revision)
        return f"{name} with vae={self.overrides['vae']!r}" if "vae" in self.overrides else name

    def config(self, component: str) -> dict[str, Any]:
        """Return the parsed config of a component.

        Raises:
            CheckpointError: the model has no such component.
        """
        if component not in self.configs:
            raise CheckpointError(
                f"{self}: has no component {component!r}; it has {', '.join(self.components) or 'none'}."
            )
        return dict(self.configs[component])

    def entries(self, component: str) -> Sequence[Entry]:
        """Return the arrays in a component's weight files; no array is read.

        Raises:
            CheckpointError: the component has no weights, or a file is damaged.
        """
        return self.arrays(component)

    def folder(self, component: str = "") -> Path:
        """Return the folder of a component's other files, or, for "", of the model."""
        return self.folders(component)


@dataclass(frozen=True, eq=False)
class NetworkFiles:
    """The files of a single network.

    Attributes:
        name: name as the caller wrote it.
        arrays: all arrays, under the names of diffusers.
        config: parsed config; empty if there is none and shapes have to determine it.
        path: the file, or the folder of a network with a config.
        revision: the commit of a Hub repository.
        variant: variant of the weights.
    """

    name: str
    arrays: Sequence[Entry]
    config: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    revision: str | None = None
    variant: str | None = None

    def __str__(self) -> str:
        return _at(self.name, self.revision)

    def entries(self, component: str) -> Sequence[Entry]:
        """Return all arrays; the component's name does not matter."""
        del component
        return self.arrays

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array, as in PyTorch."""
        return {entry.name: entry.shape for entry in self.arrays}


@dataclass(frozen=True, eq=False)
class ControlFiles(NetworkFiles):
    """The files of a ControlNet or a T2I-Adapter.

    Attributes:
        kind: kind of network.
        difference: True if weights of the UNet's layers are differences from those of the UNet.
        pairs: for a control-LoRA, the two factors, [out, r] and [r, in] as in PyTorch, of the difference from a weight
            of the UNet; all other weights are the UNet's.
    """

    kind: ControlKind = "controlnet"
    difference: bool = False
    pairs: Mapping[str, tuple[Entry, Entry]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array and of the product of each pair, as in PyTorch."""
        whole = {name: (up.shape[0], *down.shape[1:]) for name, (up, down) in self.pairs.items()}
        return {entry.name: entry.shape for entry in self.arrays} | whole


@dataclass(frozen=True, eq=False)
class EncoderFiles(NetworkFiles):
    """CLIP's image encoder for adapters.

    Attributes:
        cfg: its config.
        named: True if the caller named it, so that it need not be next to an adapter.
    """

    cfg: ClipVisionConfig = field(default_factory=ClipVisionConfig)
    named: bool = False


def open_weights(path: Path, *, plain_names: bool = True) -> list[Entry]:
    """Open a weight file of any format; no array is read.

    Args:
        path: the file; its suffix determines the format.
        plain_names: refuse names that cannot be a module's.

    Raises:
        CheckpointError: the file is damaged or another kind of file.
        InputError: a package needed to read it is missing.
    """
    if path.suffix == ".msgpack":
        return open_flax_msgpack(path)
    if path.suffix.lower() == ".gguf":
        return open_gguf(path, plain_names=plain_names)
    return with_scales(open_safetensors(path, plain_names=plain_names))


def _at(name: str, revision: str | None) -> str:
    return f"{name} at {revision[:12]}" if revision else name
