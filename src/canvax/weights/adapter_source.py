"""Where an adapter comes from: a file, a folder, or a repository on the Hub; and what is read of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, HubError, InputError
from canvax.files import read_json
from canvax.weights.hub import Commit, find_commit
from canvax.weights.layout import PICKLES, pickle_refused
from canvax.weights.safetensors import open_safetensors
from canvax.weights.source import Source

LORA_FILES = (("pytorch_lora_weights.safetensors",), ("adapter_model.safetensors",))
EMBEDDING_FILES = (("learned_embeds.safetensors", "learned_embeds_2.safetensors"),)
"""Names of such files in folders and repositories; those of a row belong together, and the later ones may lack."""

CONFIG = "adapter_config.json"
"""PEFT's, beside ``adapter_model.safetensors``."""

_HUB_ID = re.compile(
    r"(?![^/]*/[^/]*\.safetensors$)([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)(?:/(.+\.safetensors))?", re.ASCII
)
"""``owner/name``, or a file of it; a file of a folder that is not there is none."""


@dataclass(frozen=True)
class AdapterSource:
    """Where an adapter comes from.

    Attributes:
        name: a safetensors file, a folder, or a Hub id, ``owner/name`` or ``owner/name/file.safetensors``.
        weight_name: which file of a folder or repository; by default the usual one, or the only one.
        revision: branch, tag or commit of a Hub id.
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: where the Hub's files are kept.
        local_files_only: never ask the Hub.
        progress: show downloads on stderr.
    """

    name: str | Path
    weight_name: str | None = None
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str | os.PathLike) or not str(self.name) or "\0" in str(self.name):
            raise InputError(f"adapter {str(self.name)[:80]!r} names no file, folder or Hub id 'owner/name'")
        if self.weight_name is not None and (
            not isinstance(self.weight_name, str) or not self.weight_name.endswith(".safetensors")
        ):
            raise InputError(f"weight_name={self.weight_name!r:.80} is not the name of a safetensors file")
        self.source_of(self.name, self.revision)  # which looks at the rest

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments that find the same files again, without the token, which stays out of records."""
        return {name: getattr(self, name) for name in ("weight_name", "revision", "cache_dir", "local_files_only")}

    def source_of(self, name: str | Path, revision: str | None) -> Source:
        """Another name at the same Hub, fetched in the same way."""
        return Source(name, revision, None, self.token, self.cache_dir, self.local_files_only, self.progress)

    def find(self, usual: Sequence[Sequence[str]]) -> tuple[list[Path], dict[str, Any] | None]:
        """The files, fetched if need be, and PEFT's config if there is one beside them.

        Raises:
            InputError, CheckpointError: there is no such file, or only pickles.
            HubError: the Hub cannot be reached, or does not have it.
        """
        local = self._local(usual)
        if local is not None:
            self.source_of(self.name, self.revision).tell_of_idle("file", "revision")
            return local
        match = _HUB_ID.fullmatch(str(self.name))
        assert match is not None
        self._check_one_name(match[2])
        return replace(self, name=match[1], weight_name=self.weight_name or match[2])._fetched(usual)

    def check(self, usual: Sequence[Sequence[str]]) -> None:
        """Raise what ``find`` and reading would, as far as that can be told without the Hub."""
        if (local := self._local(usual)) is not None:
            for path in local[0]:
                open_safetensors(path, plain_names=False)

    def _local(self, usual: Sequence[Sequence[str]]) -> tuple[list[Path], dict[str, Any] | None] | None:
        """What ``find`` returns for a file or folder; None for a Hub id."""
        try:
            path = Path(self.name).expanduser()
            is_folder, is_file = path.is_dir(), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"adapter {str(self.name)[:200]!r} cannot be a file's name ({reason})") from None
        if is_file:
            if path.suffix.lower() != ".safetensors":
                raise CheckpointError(_other_file(path))
            self._check_one_name(path.name)
            return [path], _config(path.parent, path.name)
        if is_folder:
            names = self._chosen([one.name for one in path.iterdir() if one.is_file()], usual)
            return [path / name for name in names], _config(path, names[0])
        if not _HUB_ID.fullmatch(str(self.name)) or ".." in str(self.name) or path.is_absolute():
            several = "; of several each is given by itself" if "," in str(self.name) else ""
            raise InputError(
                f"adapter {str(self.name)[:200]!r}: there is no such file or folder, and it is no Hub id 'owner/name'"
                f"{several}"
            )
        if path.suffix.lower() in PICKLES:
            raise CheckpointError(f"{path}: {pickle_refused(path)}")
        return None

    def _fetched(self, usual: Sequence[Sequence[str]]) -> tuple[list[Path], dict[str, Any] | None]:
        """The files of a repository."""
        source = self.source_of(self.name, self.revision)
        if not self.weight_name and not usual:
            told = f"adapter {self.name!r} names a repository and no file in it"
            raise InputError(f"{told}; write {self.name}/FOLDER/FILE.safetensors")
        commit = self._commit(source, [self.weight_name] if self.weight_name else [row[0] for row in usual])
        if commit.names is None:
            folder = commit.folder
            names = [commit.root, *next((row[1:] for row in usual if row[0] == commit.root), ())]
            names = [name for name in names if (folder / name).is_file()]
        else:
            names = self._chosen(commit.names, usual)
            config = [CONFIG] if CONFIG in commit.names and names[0] == "adapter_model.safetensors" else []
            commit = replace(commit, root=names[0])
            folder = commit.fetch([*names, *config], progress=True)
            commit.remember()
        return [folder / name for name in names], _config(folder, names[0])

    def _commit(self, source: Source, roots: Sequence[str]) -> Commit:
        """The commit; offline, by whichever of the files is in the cache."""
        for root in roots[:-1]:
            try:
                commit = find_commit(source, root)
            except HubError:
                continue
            return commit
        return find_commit(source, roots[-1])

    def _check_one_name(self, file: str | None) -> None:
        """Refuse a ``weight_name`` that is not that of the ``file`` in ``name``."""
        if file is not None and self.weight_name is not None and self.weight_name != file:
            raise InputError(
                f"weight_name={self.weight_name!r:.80} beside {str(self.name)[:200]!r}, which is a file: give its "
                "folder or repository, or leave weight_name out"
            )

    def _chosen(self, names: Collection[str], usual: Sequence[Sequence[str]]) -> list[str]:
        """Which files of a folder to read."""
        if self.weight_name is not None:
            if self.weight_name in names:
                return [self.weight_name]
            raise CheckpointError(f"{self.name}: has no file {self.weight_name!r}{_there(names)}")
        for row in usual:
            if row[0] in names:
                return [name for name in row if name in names]
        tensors = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
        if len(tensors) == 1:
            return tensors
        if not tensors and (pickles := sorted(name for name in names if name.endswith(PICKLES))):
            name = pickles[0]
            raise CheckpointError(f"{self.name}: has only {name}. {pickle_refused(Path(name))}")
        several = "several files; name one of them, FOLDER/FILE"
        what = several if tensors else "no safetensors file"
        if "model_index.json" in names:
            what = "a whole model in it (model_index.json), and no adapter; canvax.load loads models"
        raise CheckpointError(f"{self.name}: has {what}{_there(names)}")


def _there(names: Collection[str]) -> str:
    tensors = sorted(name for name in names if name.endswith(".safetensors"))
    more = f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
    return f": {', '.join(tensors[:8])}{more}" if tensors else ""


def _config(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / CONFIG
    return read_json(path) if name == "adapter_model.safetensors" and path.is_file() else None


def _other_file(path: Path) -> str:
    if path.suffix.lower() in PICKLES:
        return f"{path}: {pickle_refused(path)}"
    return f"{path}: is no safetensors file, the one kind of file that canvax reads adapters from"
