"""A folder of models as A1111 and ComfyUI lay it out, whose files are called by their names.

Every place where a model, an adapter or a network is named takes such a name: ``deliberate_v2`` for
``models/Stable-diffusion/sd15/deliberate_v2.safetensors``.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from canvax.errors import InputError, did_you_mean
from canvax.files import named_path

VARIABLE = "CANVAX_DATA_DIR"
"""The environment variable that names the folder; processes that a command starts see it too."""

_DESCRIBED = ("model_index.json", "config.json")
_LORAS = ("lora", "loras")
"""How A1111 and ComfyUI call the folder of LoRAs."""


def data_folder() -> Path | None:
    """The folder of models; None if the user has named none.

    Raises:
        InputError: it is not a folder.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    folder = named_path("data_dir", name)
    if not folder.is_dir():
        raise InputError("data_dir", name, "is not a folder")
    return folder


@contextmanager
def using(folder: str | None) -> Iterator[None]:
    """Make another folder the folder of models for a while, here and in processes started meanwhile; None: no change.

    Raises:
        InputError: it is not a folder.
    """
    before = os.environ.get(VARIABLE)
    if folder is not None:
        os.environ[VARIABLE] = str(named_path("data_dir", folder).absolute())
    try:
        data_folder()
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def lora_folder() -> Path | None:
    """The folder of LoRAs in the folder of models; None without any."""
    folder = data_folder()
    parts = [path for root in _roots(folder) for path in sorted(root.iterdir())] if folder else []
    return next((path for path in parts if path.name.lower() in _LORAS and any(path.rglob("*.safetensors"))), None)


def find_named(name: str, argument: str) -> Path | None:
    """The file or folder of a name in the folder of models.

    Args:
        name: a file's name, with or without its ending, or a folder's.
        argument: what it is to be, such as ``vae``. Of files of the same name the one of that kind is meant.

    Raises:
        InputError: several files have the name.
    """
    folder = data_folder()
    if folder is None or Path(name).name != name:
        return None
    from canvax.weights.entries import PICKLES, WEIGHTS  # JAX with it, which most commands do without
    from canvax.weights.identify import inspect

    endings = (*WEIGHTS, *PICKLES)
    paths = [path for root in _roots(folder) for path in _weights(root, endings) if name in (path.name, _stem(path))]
    if len(paths) > 1:
        flags = ("--lora", "--embedding") if argument == "source" else (f"--{argument.replace('_', '-')}",)
        kinds = {path: part.kind for path in paths if (part := inspect(path))}
        paths = [path for path in paths if (kind := kinds.get(path)) and kind.flag in flags] or paths
    if len(paths) > 1:
        files = " and ".join(str(path.relative_to(folder)) for path in paths[:3])
        raise InputError(argument, name, f"is the name of {files} in {folder}", "write the path of one")
    return paths[0] if paths else None


def meant_by(name: str) -> str:
    """What a name that is nothing may mean in the folder of models; "" if the user has named no folder."""
    folder = data_folder()
    if folder is None:
        return ""
    from canvax.weights.identify import listing

    names = [_stem(part.path) for root in _roots(folder) for part in listing(root)]
    part_of = next((each for each in names if name.lower() in each.lower()), None)
    near = f"did you mean {part_of!r}?" if part_of else did_you_mean(name, names)
    return near or f"canvax info {shlex.quote(str(folder))} lists the files there"


def models() -> dict[str, Path]:
    """The models of the folder by their names; of several of one name none, since the name means neither."""
    folder = data_folder()
    if folder is None:
        return {}
    from canvax.weights.identify import MODEL, listing

    paths = [part.path for root in _roots(folder) for part in listing(root) if part.kind is MODEL]
    counts = Counter(map(_stem, paths))
    return {_stem(path): path for path in paths if counts[_stem(path)] == 1}


def _roots(folder: Path) -> list[Path]:
    """The parts of an installation that hold models, so that its programs are not searched; else the folder itself."""
    return [path for part in ("models", "embeddings") if (path := folder / part).is_dir()] or [folder]


def _weights(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Files of weights, and folders that hold a model or a network in parts, which are not entered."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.is_dir():
            if any((path / name).is_file() for name in _DESCRIBED):
                yield path
            elif not entry.name.startswith("."):
                yield from _weights(path, endings)
        elif path.suffix.lower() in endings:
            yield path


def _stem(path: Path) -> str:
    return path.name if path.is_dir() else path.stem
