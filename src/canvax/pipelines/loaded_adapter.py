"""An adapter in a pipeline, its name and its file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canvax.errors import NO_VALUE, CheckpointError, InputError, nearest
from canvax.pipelines.adapter_weights import Weights
from canvax.weights.lora import Adapter, Key, suggested, trigger_words
from canvax.weights.safetensors import read_metadata

MOST_NAME = 100


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a pipeline.

    Attributes:
        name: what it is called there.
        source: the file, folder or Hub id, as it was given.
        adapter: what it does.
        weight: how strong it is, as it was given.
        sha256: of the file.
        words: textual inversions that came with it.
        place: where it lies beside the weights; None of one that is merged.
        source_keywords: arguments of ``load`` that its source was looked for with, without the token.
    """

    name: str
    source: str
    adapter: Adapter = field(repr=False)
    weight: Any
    sha256: str = field(repr=False)
    words: tuple[str, ...] = ()
    weights: Weights = field(default_factory=dict, repr=False)
    place: int | None = None
    source_keywords: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def suggested(self) -> dict[str, Any]:
        """Arguments of a call that it was made for, such as sampler and steps of LCM; of most adapters none."""
        return suggested(self.adapter.path.stem, self.adapter.metadata)

    @property
    def trigger_words(self) -> list[str]:
        """Words that it was trained with, the most frequent first, where its file tells."""
        return trigger_words(self.adapter.metadata)

    def factor(self, key: Key) -> float:
        """How strong it is for one parameter: by the longest name that leads there."""
        path = ".".join(key)
        found = [name for name in self.weights if not name or path == name or path.startswith(f"{name}.")]
        return self.weights[max(found, key=len)] if found else 1.0


class AdapterFiles:
    """The files of a folder of adapters by their names.

    Args:
        folder: the folder, with the folders in it; None for ``more`` alone.
        more: further files, which are called by their stems whatever the folder holds.

    Attributes:
        paths: the path of each name. A file is called by its stem, or by its path in the folder (``style/ink``,
            ``./ink``) where another file has the same stem.
    """

    def __init__(self, folder: Path | None, more: Sequence[Path] = ()) -> None:
        files = sorted(folder.rglob("*.safetensors")) if folder else []
        inside = {path: path.relative_to(folder).with_suffix("").as_posix() for path in files} if folder else {}
        stems = Counter(path.stem for path in files)
        self.paths: dict[str, Path] = {}
        for path, name in inside.items():
            plain = path.stem if stems[path.stem] == 1 else name if "/" in name else f"./{name}"
            self.paths[plain] = path
        self.paths |= {path.stem: path for path in more}
        self._inside = {name: inside.get(path) for name, path in self.paths.items()}
        self._aliases: dict[str, str | None] | None = None

    @property
    def aliases(self) -> dict[str, str | None]:
        """The name that kohya's trainer gave each file. Reads all headers, once."""
        if self._aliases is None:
            self._aliases = {name: alias_of(path) for name, path in self.paths.items()}
        return self._aliases

    def matches(self, text: str) -> list[str]:
        """The names of the files that a text may mean. No path is made of the text."""
        if text in self.paths:
            return [text]
        plain = [name for name, path in self.paths.items() if text in (path.stem, self._inside[name])]
        return plain or [name for name, alias in self.aliases.items() if alias == text]


def several(text: str, names: Sequence[str]) -> str:
    """The problem and the cure where a text means several files."""
    return f"{len(names)} files are called {text[:80]!r}; write {' or '.join(names[:8])}"


def file_of(folder: Path, tag: str) -> Path:
    """The file of the folder that a prompt means.

    Raises:
        InputError: there is none, or there are several.
    """
    files = AdapterFiles(folder)
    names = files.matches(tag)
    if not names:
        there = nearest(tag, list(files.paths)) if files.paths else "it holds no safetensors file"
        raise InputError("prompt", NO_VALUE, f"names <lora:{tag[:80]}>, and there is no such file in {folder}", there)
    if len(names) > 1:
        raise InputError("prompt", NO_VALUE, f"names <lora:{tag[:80]}>: {several(tag, names)}")
    return files.paths[names[0]]


def check_name(name: object, taken: Mapping[str, Any]) -> None:
    """Refuse what is no name, or is taken."""
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_NAME or not name.isprintable():
        raise InputError("name", name, "cannot be the name of an adapter", "give a word")
    if name in taken:
        raise InputError("name", name, "is loaded already", "remove it first, or set its weight with set")


def alias_of(path: Path) -> str | None:
    """The name that kohya's trainer gave a file."""
    try:
        return read_metadata(path).get("ss_output_name")
    except CheckpointError:
        return None


def sha256_of(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
