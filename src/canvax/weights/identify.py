"""What a file or folder of weights is and for which family, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from canvax.errors import CheckpointError
from canvax.files import read_json
from canvax.images.formats import FORMATS
from canvax.weights import controlnet, vae_file
from canvax.weights.adapter_names import all_begin
from canvax.weights.entries import Entry
from canvax.weights.layout import INDEX, PICKLES
from canvax.weights.lora import BASES, OTHERS, base_of
from canvax.weights.safetensors import open_safetensors, read_metadata
from canvax.weights.single_file import KINDS, PARTS, UNET, VAE
from canvax.weights.source import Source

MODEL, VAE_FILE, CONTROLNET, T2I = "a model", "an autoencoder", "a ControlNet", "a T2I-Adapter"
FLAGS = {
    MODEL: "--model", VAE_FILE: "--vae", CONTROLNET: "--controlnet", T2I: "--controlnet",
    "an IP-Adapter": "--ip-adapter", "a LoRA": "--lora", "a textual inversion": "--embedding",
}  # fmt: skip
"""The flag that takes each kind."""
_T2I = ("adapter.body.", "body.")


class Found(NamedTuple):
    """A file or folder.

    Attributes:
        path: where it is.
        kind: such as "a LoRA".
        family: of models that it is or is for, such as "Stable Diffusion 1.x"; "" where nothing tells.
    """

    path: Path
    kind: str
    family: str = ""


def identify(path: Path) -> Found | None:
    """What a file, or a folder in the diffusers layout, is; None for all else. No pickle is opened."""
    suffix = path.suffix.lower()
    if path.is_dir():
        return _folder(path)
    if suffix in PICKLES:
        return Found(path, "a pickle, which is not opened")
    if suffix in FORMATS:
        return Found(path, "an image")
    if suffix != ".safetensors":
        return Found(path, kind) if (kind := Source(path).other_kind()) else None
    try:
        entries, metadata = open_safetensors(path, plain_names=False), read_metadata(path)
    except CheckpointError:
        return Found(path, "damaged")
    kind = Source(path).other_kind()
    if kind == "a LoRA":
        return Found(path, kind, base_of(entries, metadata)[0])
    if kind == "a textual inversion":
        return Found(path, kind, _of_vectors(entries))
    kind, family = kind or _kind(entries), _family(entries)
    return Found(path, "weights that canvax does not run" if family in OTHERS.values() else kind, family)


def listing(folder: Path) -> Iterator[Found]:
    """What lies in a folder and in the folders in it."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name.lower())):
        found = identify(path)
        if found is not None:
            yield found
        elif path.is_dir() and not path.is_symlink():
            yield from listing(path)


def _folder(folder: Path) -> Found | None:
    if (folder / INDEX).is_file():
        unet = folder / "unet" / "config.json"
        return Found(folder, MODEL, _of_config(_json(unet)))
    config = _json(folder / "config.json")
    name = str(config.get("_class_name"))
    if name in vae_file.CLASSES:
        return Found(folder, VAE_FILE)
    if name in controlnet.CLASSES:
        return Found(folder, T2I if controlnet.CLASSES[name] == "adapter" else CONTROLNET, _of_config(config))
    return Found(folder, f"a network alone ({name})", _of_config(config)) if "_class_name" in config else None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def _kind(entries: list[Entry]) -> str:
    names = {entry.name for entry in entries}
    if all_begin(names, _T2I):
        return T2I
    for starts, kind, _ in PARTS:
        if all_begin(names, starts):
            return kind
    parts = [any(name.startswith(start) for name in names) for start in (UNET, VAE)]
    text = any(name.startswith(("cond_stage_model.", "conditioner.")) for name in names)
    if all(parts) and text:
        return MODEL
    if parts[0]:
        missing = [name for name, there in (("autoencoder", parts[1]), ("text encoder", text)) if not there]
        return f"a model without {' and '.join(missing)}"
    return "not recognised"


def _family(entries: list[Entry]) -> str:
    names = {entry.name for entry in entries}
    if other := next((family for piece, family in OTHERS.items() if any(piece in name for name in names)), None):
        return other
    for kind in KINDS:
        if all(any(name.startswith(start) for name in names) for start in kind.encoders.values()):
            return kind.name
    reads = (entry for entry in entries if entry.name.endswith(("attn2.to_k.weight", "to_k_ip.weight")))
    return next((BASES[entry.shape[-1]] for entry in reads if entry.shape and entry.shape[-1] in BASES), "")


def _of_vectors(entries: list[Entry]) -> str:
    if "clip_g" in {entry.name for entry in entries}:
        return BASES[2048]
    widths = {entry.shape[-1] for entry in entries if entry.shape}
    return BASES.get(widths.pop(), "") if len(widths) == 1 else ""


def _of_config(config: Mapping[str, Any]) -> str:
    width = config.get("cross_attention_dim")
    return BASES.get(width, "") if isinstance(width, int) else ""
