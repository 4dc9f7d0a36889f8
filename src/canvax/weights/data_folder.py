"""A folder of models in the layout of A1111 and ComfyUI, whose files users name without folder and ending.

All arguments that name a model, an adapter or a network take these names: ``deliberate_v2`` for
``models/Stable-diffusion/sd15/deliberate_v2.safetensors``.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from canvax.errors import InputError, did_you_mean
from canvax.files import named_path

if TYPE_CHECKING:
    from canvax.call import PromptSyntax
    from canvax.weights.identify import FileReport

VARIABLE = "CANVAX_DATA_DIR"
"""The environment variable that names the folder; processes that a command starts see it too."""

_DESCRIBED = ("model_index.json", "modular_model_index.json", "config.json")
_LORAS = ("lora", "loras")
"""Names of the folder of LoRAs in A1111 and ComfyUI."""


def data_folder() -> Path | None:
    """Return the folder of models; None if the user has named none.

    Raises:
        InputError: it is not a folder.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    folder = named_path("data_dir", name)
    if not folder.is_dir():
        raise InputError("data_dir", "is not a folder", value=name)
    return folder


@contextmanager
def using(folder: str | None) -> Iterator[None]:
    """Make another folder the folder of models, here and in processes started meanwhile; None changes nothing.

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


def usual_syntax() -> PromptSyntax:
    """Return the prompt syntax of the program whose folder the folder of models is; "plain" for other folders."""
    folder = data_folder()
    if folder and (folder / "models/Stable-diffusion").is_dir():
        return "a1111"
    return "comfy" if folder and (folder / "models/checkpoints").is_dir() else "plain"


def lora_folder() -> Path | None:
    """Return the folder of LoRAs in the folder of models, or None."""
    folder = data_folder()
    parts = [path for root in _roots(folder) for path in sorted(root.iterdir())] if folder else []
    return next((path for path in parts if path.name.lower() in _LORAS and any(path.rglob("*.safetensors"))), None)


def embedding_files() -> dict[str, Path]:
    """Return the files in the folders of textual inversions of the folder of models, by the names that prompts use.

    Names are in lower case. A pickle is left out if a safetensors file has the same name.
    """
    from canvax.weights.entries import PICKLES, is_replaced

    folder = data_folder()
    places = [folder / "embeddings", folder / "models/embeddings"] if folder else []
    paths = [path for place in places for path in sorted(place.rglob("*")) if path.is_file()]
    paths = [p for p in paths if p.suffix.lower() in (".safetensors", *PICKLES) and not is_replaced(p)]
    return {name.lower(): path for name, path in by_name(paths).items()}


def embedding_name(name: str, path: Path) -> str:
    """Return a name of ``embedding_files`` in the upper and lower case of its file."""
    return path.stem if path.stem.lower() == name else name


def vae_files() -> dict[str, Path]:
    """Return the autoencoders of the folder of models, by name."""
    from canvax.weights.identify import AUTOENCODER

    return by_name([part.path for part in files() if part.kind is AUTOENCODER])


def control_files() -> dict[str, Path]:
    """Return the networks of the folder of models that read control images, by name."""
    from canvax.weights.identify import CONTROLNET, T2I_ADAPTER

    return by_name([part.path for part in files() if part.kind in (CONTROLNET, T2I_ADAPTER)])


def find_named(name: str, argument: str) -> Path | None:
    """Find a file or folder of the folder of models by its name.

    Args:
        name: the file's name with or without its ending, or a folder's; folders before it narrow the search:
            ``sd15/deliberate_v2``, or the whole path in the folder of models.
        argument: the argument that names the file, such as ``vae``. Among files of the same name, the one of that kind
            is chosen.

    Raises:
        InputError: several files have the name.
    """
    paths = all_named(name, argument)
    if len(paths) > 1:
        names = " or ".join(list(paths)[:3])
        raise InputError(
            argument, f"is the name of {len(paths)} files in {data_folder()}", cure=f"write {names}", value=name
        )
    return next(iter(paths.values()), None)


def all_named(name: str, argument: str) -> dict[str, Path]:
    """Return the files and folders that a name may mean, by unambiguous names; arguments as in ``find_named``."""
    folder, wanted = data_folder(), tuple(name.replace("\\", "/").split("/"))
    if folder is None or any(part in ("", ".", "..") for part in wanted):
        return {}
    from canvax.weights.entries import PICKLES, WEIGHTS  # JAX with it, which most commands do without
    from canvax.weights.identify import inspect

    there = [path for root in _roots(folder) for path in _weights(root, (*WEIGHTS, *PICKLES))]
    paths = [path for path in there if _has_name(path, folder, wanted)]
    if not paths and argument == "model":
        flat = stem_of(name)
        paths = [path for path in there if flat in flat_names((*path.relative_to(folder).parts[:-1], _stem(path)))]
    if len(paths) > 1:
        flags = ("--lora", "--embedding") if argument == "source" else (f"--{argument.replace('_', '-')}",)
        kinds = {path: part.kind for path in paths if (part := inspect(path))}
        paths = [path for path in paths if (kind := kinds.get(path)) and kind.flag in flags] or paths
    return by_name(paths)


def meant_by(name: str) -> str:
    """Return a clause about the meaning of an unknown name in the folder of models; "" without a folder."""
    folder = data_folder()
    if folder is None:
        return ""
    names = [_stem(part.path) for part in files()]
    part_of = next((each for each in names if name.lower() in each.lower()), None)
    near = f"did you mean {part_of!r}?" if part_of else did_you_mean(name, names)
    return near or f"canvax info {shlex.quote(str(folder))} lists the files there"


def files() -> list[FileReport]:
    """Return reports of the files in the folder of models; empty without a folder."""
    from canvax.weights.identify import listing

    folder = data_folder()
    return [part for root in _roots(folder) for part in listing(root)] if folder else []


def by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Return files of the folder of models by their shortest unambiguous names; none without a folder.

    This is the file's name without its ending, with folders if other files have it too, or with the ending if names
    differ in nothing else.
    """
    folder = data_folder()
    if folder is None:
        return {}
    spellings: dict[Path, list[tuple[str, ...]]] = {}
    for path in paths:
        *folders, file = path.relative_to(folder).parts
        depths = range(len(folders) + 1)
        spellings[path] = [(*folders[len(folders) - depth :], last) for last in (_stem(path), file) for depth in depths]
    counts = Counter(name for names in spellings.values() for name in set(names))
    return {
        "/".join(next((name for name in names if counts[name] == 1), names[-1])): path
        for path, names in spellings.items()
    }


def flat_names(parts: Sequence[str]) -> set[str]:
    """Return names of a model as older A1111 wrote them: with "_" after each folder, for any number of folders.

    Args:
        parts: the model's folders, and its name without ending.
    """
    return {"_".join(parts[i:]) for i in range(len(parts) - 1)}


def stem_of(name: str) -> str:
    """Return a file's name without the ending of a file of weights."""
    from canvax.weights.entries import PICKLES, WEIGHTS

    ending = os.path.splitext(name)[1].lower()
    return name[: -len(ending)] if ending in (*WEIGHTS, *PICKLES) else name


def _has_name(path: Path, folder: Path, name: tuple[str, ...]) -> bool:
    """Return True if a file has a name, which may begin with its folders."""
    *folders, last = name
    behind = path.relative_to(folder).parts[:-1]
    return last in (path.name, _stem(path)) and behind[len(behind) - len(folders) :] == tuple(folders)


def _roots(folder: Path) -> list[Path]:
    """Return the folders of an installation that hold models, so its programs are not searched; else the folder."""
    if not (folder / "models").is_dir():
        return [folder]
    return [path for part in ("models", "embeddings") if (path := folder / part).is_dir()]


def _weights(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Yield files of weights, and folders that hold a model or a network in parts, which are not entered."""
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
