"""Adapter files by the names that prompts and clients give them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from canvax.errors import CheckpointError, InputError, nearest
from canvax.weights.safetensors import read_metadata


class AdapterFiles:
    """The files of a folder of adapters by their names.

    Args:
        folder: the folder, with the folders in it; None for ``more`` alone.
        more: further files, whose names are their stems whatever the folder holds.

    Attributes:
        paths: the path of each name. The name of a file is its stem, or its path in the folder (``style/ink``,
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
        """The name that kohya's trainer gave to each file. The first access reads all headers."""
        if self._aliases is None:
            self._aliases = {name: alias_of(path) for name, path in self.paths.items()}
        return self._aliases

    def matches(self, text: str) -> list[str]:
        """Return the names of the files that a text may mean. No path is made of the text."""
        if text in self.paths:
            return [text]
        plain = [name for name, path in self.paths.items() if text in (path.stem, self._inside[name])]
        return plain or [name for name, alias in self.aliases.items() if alias == text]


def several(text: str, names: Sequence[str]) -> str:
    """Return the problem and the cure for a text that means several files."""
    return f"{len(names)} files are called {text[:80]!r}; write {' or '.join(names[:8])}"


def file_of(folder: Path, tag: str) -> Path:
    """Return the file of the folder that a prompt names.

    Raises:
        InputError: there is none, or there are several.
    """
    files = AdapterFiles(folder)
    names = files.matches(tag)
    if not names:
        there = nearest(tag, list(files.paths)) if files.paths else "it holds no safetensors file"
        raise InputError("prompt", f"names <lora:{tag[:80]}>, and there is no such file in {folder}", cure=there)
    if len(names) > 1:
        raise InputError("prompt", f"names <lora:{tag[:80]}>: {several(tag, names)}")
    return files.paths[names[0]]


def alias_of(path: Path) -> str | None:
    """Return the name that kohya's trainer gave to a file."""
    try:
        return read_metadata(path).get("ss_output_name")
    except CheckpointError:
        return None


def sha256_of(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def a1111_hash_of(path: Path) -> str:
    """Return 12 hexadecimal digits by which A1111 and Civitai know a LoRA (AutoV3).

    They are the hash that kohya's trainer wrote into a safetensors file, or that of its arrays without the header.
    """
    with path.open("rb") as file:
        if path.suffix.lower() == ".safetensors":
            stated = read_metadata(path).get("sshs_model_hash", "")[:12]
            if re.fullmatch("[0-9a-f]{12}", stated):
                return stated
            file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
