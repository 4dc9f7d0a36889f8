"""The files of a model or a network, however they are stored: what loading, saving and reading configs ask of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from canvax.errors import CheckpointError
from canvax.models.configs import ClipVisionConfig
from canvax.weights.entries import Entry, with_scales
from canvax.weights.flax_msgpack import open_flax_msgpack
from canvax.weights.gguf import open_gguf
from canvax.weights.safetensors import open_safetensors

ControlKind = Literal["controlnet", "adapter"]


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """One commit of a model, on disk. ``str()`` of it is the model's name for messages.

    Attributes:
        name: the model as it was asked for.
        path: a folder, or a single file.
        index: ``model_index.json``, parsed: the kind of pipeline and its components.
        components: those that canvax reads, by name, with their class names (without ``Flax`` in front).
        configs: the parsed config of each component that has one.
        arrays: called with a component, opens its weight files; no array is read.
        folders: called with a component, gives the folder of its plain files, such as a tokenizer's; with "", that of
            the model.
        revision: the commit sha; None if it is not from the Hub.
        variant: the variant asked for; components without it are read from their plain files.
        unread: components that canvax leaves alone, such as ``safety_checker``.
        reasons: of a single file what was read off its arrays, and how that is known.
        overrides: what is not the model's, such as parts, as arguments of ``canvax.load``.
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
        """The parsed config of a component.

        Raises:
            CheckpointError: the model has no such component.
        """
        if component not in self.configs:
            raise CheckpointError(
                f"{self}: has no component {component!r}; it has {', '.join(self.components) or 'none'}."
            )
        return dict(self.configs[component])

    def entries(self, component: str) -> Sequence[Entry]:
        """The arrays in a component's weight files; no array is read.

        Raises:
            CheckpointError: the component has no weights, or a file is damaged.
        """
        return self.arrays(component)

    def folder(self, component: str = "") -> Path:
        """The folder of a component's plain files, or of the model."""
        return self.folders(component)


@dataclass(frozen=True, eq=False)
class NetworkFiles:
    """One network in files of its own.

    Attributes:
        name: as it was asked for.
        arrays: all of its arrays, under the names of diffusers.
        config: parsed; empty where there is none, and shapes say what it would.
        path: the file, or the folder of one with a config.
        revision: the commit of a Hub repository.
        variant: of the weights.
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
        """All arrays, whatever the component is called."""
        del component
        return self.arrays

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each array, as in PyTorch."""
        return {entry.name: entry.shape for entry in self.arrays}


@dataclass(frozen=True, eq=False)
class ControlFiles(NetworkFiles):
    """A ControlNet or a T2I-Adapter in files of its own.

    Attributes:
        kind: of network.
        difference: whether weights of the UNet's are what is to be added to those of the UNet itself.
        pairs: of a control-LoRA the two factors, [out, r] and [r, in] as PyTorch has them, of what is to be added to a
            weight of the UNet's; what is in neither is the UNet's.
    """

    kind: ControlKind = "controlnet"
    difference: bool = False
    pairs: Mapping[str, tuple[Entry, Entry]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each array and of the product of each pair, as in PyTorch."""
        whole = {name: (up.shape[0], *down.shape[1:]) for name, (up, down) in self.pairs.items()}
        return {entry.name: entry.shape for entry in self.arrays} | whole


@dataclass(frozen=True, eq=False)
class EncoderFiles(NetworkFiles):
    """CLIP's image encoder for adapters.

    Attributes:
        cfg: its config.
        named: whether the caller named it, so that it need not lie beside an adapter.
    """

    cfg: ClipVisionConfig = field(default_factory=ClipVisionConfig)
    named: bool = False


def open_weights(path: Path, *, plain_names: bool = True) -> list[Entry]:
    """The arrays of a weight file of any format; no array is read.

    Args:
        path: the file, whose ending says the format.
        plain_names: refuse names that no module has.

    Raises:
        CheckpointError: the file is damaged or something else.
        InputError: a package that reads it is missing.
    """
    if path.suffix == ".msgpack":
        return with_scales(open_flax_msgpack(path))
    if path.suffix.lower() == ".gguf":
        return open_gguf(path, plain_names=plain_names)
    return with_scales(open_safetensors(path, plain_names=plain_names))


def _at(name: str, revision: str | None) -> str:
    return f"{name} at {revision[:12]}" if revision else name
