"""Files of IP-Adapters (Ye et al. 2023): one safetensors file, in which the arrays tell what kind it is.

image_proj.*                          what makes tokens of an image
ip_adapter.<1, 3, 5, ...>.to_k_ip     keys and values for the attentions to the text: down, up, middle
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, HubError, InputError
from canvax.files import named_path
from canvax.models.configs import ClipVisionConfig, UNetConfig
from canvax.models.ip_adapter import HEAD, IPAdapter
from canvax.weights.adapter_source import AdapterSource
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles
from canvax.weights.layout import PICKLE_REFUSED, PICKLES
from canvax.weights.open import open_network
from canvax.weights.safetensors import open_safetensors
from canvax.weights.source import Source

FULL_TOKENS = 257
"""What CLIP makes of an image with patches of 14 pixels: the usual number for the kind that reads all."""

_LAYER = re.compile(r"ip_adapter\.(\d+)\.to_[kv]_ip\.weight")
_RESAMPLER_LAYER = re.compile(r"image_proj\.layers\.(\d+)\.")
_PLACES = ("models/image_encoder", "sdxl_models/image_encoder")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)((?:/[\w.\-]+)*)", re.ASCII)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class IPAdapterFiles:
    """An adapter in a file of its own.

    Attributes:
        name: as it was asked for.
        path: the file.
        arrays: all that it holds.
    """

    name: str
    path: Path
    arrays: Sequence[Entry]

    def __str__(self) -> str:
        return self.name

    def entries(self, component: str) -> Sequence[Entry]:
        """As in ``ModelFiles``, of which this is the part that loading needs."""
        del component
        return self.arrays

    @property
    def shapes(self) -> Shapes:
        """Of each array, as in PyTorch."""
        return {one.name: one.shape for one in self.arrays}


@dataclass(frozen=True, eq=False)
class EncoderFiles:
    """CLIP's image encoder for adapters.

    Attributes:
        name: as it was asked for, or as it was found.
        files: where it is.
        component: its name in them.
        cfg: its config.
    """

    name: str
    files: ModelFiles
    component: str
    cfg: ClipVisionConfig

    def __str__(self) -> str:
        return self.name

    def entries(self, component: str) -> Sequence[Entry]:
        """As in ``ModelFiles``."""
        del component
        return self.files.entries(self.component)


def open_ip_adapter(source: AdapterSource) -> IPAdapterFiles:
    """Find an adapter, fetching it if need be; no array is read.

    Raises:
        InputError, CheckpointError, HubError: it is missing, damaged, or something else.
    """
    name = str(source.name)
    (path, *_), _ = source.find(())
    arrays = open_safetensors(path)
    if (fault := _other({one.name for one in arrays})) is not None:
        raise CheckpointError(f"{name}: is {fault}")
    return IPAdapterFiles(name, path, arrays)


def check_ip_adapter(source: AdapterSource) -> None:
    """Refuse what can be told to be none before anything is fetched."""
    if Path(source.name).suffix.lower() in PICKLES:
        raise CheckpointError(f"{source.name}: {PICKLE_REFUSED}")
    source.check(())


def _other(names: set[str]) -> str | None:
    """What a file is that people take for an IP-Adapter that canvax can use."""
    if (
        any(".to_q_lora." in one or ".to_k_lora." in one or "perceiver_resampler" in one for one in names)
        or {
            "image_proj.norm.weight",
            "image_proj.proj.0.weight",
        }
        <= names
    ):
        return (
            "an IP-Adapter of the FaceID kind, which reads numbers that InsightFace makes of a face and not an image; "
            "canvax does not have it. The plus-face kind (ip-adapter-plus-face) reads images of faces"
        )
    if not any(_LAYER.fullmatch(one) for one in names):
        return "no IP-Adapter: it has no arrays such as ip_adapter.1.to_k_ip.weight"
    if not any(one.startswith("image_proj.") for one in names):
        return "a part of an IP-Adapter: it has no arrays image_proj.*, which make tokens of an image"
    return None


def read_ip_adapter(files: IPAdapterFiles, unet: UNetConfig, tokens: int = FULL_TOKENS) -> IPAdapter:
    """The adapter that arrays are of; ``tokens`` of an image for the kind that reads all of CLIP's.

    Raises:
        CheckpointError: it is none that canvax knows.
    """
    shapes = files.shapes

    def shape(name: str) -> tuple[int, ...]:
        return shapes[f"image_proj.{name}"]

    try:
        if "image_proj.proj.weight" in shapes:
            rows, reads = shape("proj.weight")
            (width,) = shape("norm.weight")
            return IPAdapter("plain", reads, width, rows // width, unet)
        if "image_proj.proj.3.weight" in shapes:
            return IPAdapter("full", shape("proj.0.weight")[1], shape("proj.3.weight")[0], tokens, unet)
        _, own, hidden = shape("latents")
        depth = 1 + max(int(match[1]) for match in map(_RESAMPLER_LAYER.match, shapes) if match)
        heads = shape("layers.0.0.to_q.weight")[0] // HEAD
        reads, width = shape("proj_in.weight")[1], shape("proj_out.weight")[0]
        return IPAdapter("plus", reads, width, own, unet, hidden, depth, max(1, heads))
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(f"{files}: is no IP-Adapter that canvax knows; it lacks {error}") from None


def count_layers(names: Iterable[str]) -> int:
    """How many attentions a file has keys for."""
    return len({match[1] for match in map(_LAYER.fullmatch, names) if match})


def encoder_fault(cfg: ClipVisionConfig, adapter: IPAdapter) -> str | None:
    """Why an adapter cannot read what an encoder makes; None if it can."""
    plain = adapter.kind == "plain"
    made = cfg.projection_dim if plain else cfg.hidden_size
    if made == adapter.reads:
        return None
    return f"it makes {'vectors' if plain else 'features'} of {made} numbers, the adapter reads {adapter.reads}"


def encoder_wanted(adapter: IPAdapter) -> str:
    """The released encoder that an adapter was trained with, by its widths."""
    vectors = {768: "CLIP ViT-L/14", 1024: "OpenCLIP ViT-H/14", 1280: "OpenCLIP ViT-bigG/14"}
    features = {1024: "CLIP ViT-L/14", 1280: "OpenCLIP ViT-H/14", 1664: "OpenCLIP ViT-bigG/14"}
    found = (vectors if adapter.kind == "plain" else features).get(adapter.reads)
    folder = {"OpenCLIP ViT-H/14": _PLACES[0], "OpenCLIP ViT-bigG/14": _PLACES[1]}.get(str(found))
    where = f"image_encoder='h94/IP-Adapter/{folder}'" if folder else "image_encoder= with its folder"
    return f"it needs {found or 'another image encoder'}: pass {where}"


def find_encoder(
    named: str | Path | None, adapter: IPAdapter, files: IPAdapterFiles, source: AdapterSource
) -> EncoderFiles:
    """The image encoder that was named or, for None, the one that lies beside the adapter and suits it.

    Raises:
        InputError: there is none.
        CheckpointError, HubError: it is damaged, cannot be fetched or does not suit the adapter.
    """
    if named is not None:
        return _open_encoder(*_place(str(named), source), adapter, files)
    fault = "there is no folder image_encoder beside it"
    for place in _beside(files, source):
        try:
            return _open_encoder(*place, adapter, files)
        except (HubError, CheckpointError) as error:
            fault = str(error) if isinstance(error, CheckpointError) else fault
    raise InputError(f"image_encoder: {files}: {fault}; {encoder_wanted(adapter)}")


def _beside(files: IPAdapterFiles, source: AdapterSource) -> list[tuple[Source, str]]:
    """Where the encoders of released adapters are, as seen from the adapter."""
    folder = files.path.parent
    match = _HUB_ID.fullmatch(files.name)
    if not Path(files.name).expanduser().exists() and match:
        inside = [part for part in match[2].split("/")[1:-1] if part]
        own = ["/".join([*inside, "image_encoder"])]
        return [(_source(match[1], source), place) for place in dict.fromkeys((*own, *_PLACES))]
    near = [folder / "image_encoder", *(folder.parent / place for place in (*_PLACES, "image_encoder"))]
    return [(_source(place, source), "") for place in near if (place / "config.json").is_file()]


def _place(name: str, source: AdapterSource) -> tuple[Source, str]:
    """Where an encoder is that was named: a folder, or a Hub id with perhaps folders behind it."""
    match = _HUB_ID.fullmatch(name)
    folder = named_path("image_encoder", name)
    if not folder.is_dir() and (match is None or ".." in name):
        raise InputError(
            f"image_encoder={name!r:.200}: there is no such folder, and it is not a Hub id 'owner/name' with perhaps a "
            "folder behind it"
        )
    if folder.is_dir() or match is None:
        return _source(name, source), ""
    return _source(match[1], source), match[2].removeprefix("/")


def _source(model: str | Path, source: AdapterSource) -> Source:
    same_place = str(model) and str(source.name).startswith(str(model))
    revision = source.revision if same_place and not Path(model).exists() else None
    return source.source_of(model, revision)


def _open_encoder(source: Source, component: str, adapter: IPAdapter, files: IPAdapterFiles) -> EncoderFiles:
    name = f"{source.name}/{component}" if component else source.name

    def accept(config: Mapping[str, Any]) -> None:
        if (fault := encoder_fault(_config(name, config), adapter)) is not None:
            raise CheckpointError(f"image_encoder={name!r} does not suit {files}: {fault}; {encoder_wanted(adapter)}")

    opened = open_network(source, accept=accept, component=component, kind="transformers")
    return EncoderFiles(name, opened, component, _config(name, opened.config(component)))


def _config(name: str, config: Mapping[str, Any]) -> ClipVisionConfig:
    if "vision_config" in config:
        raise CheckpointError(
            f"{name}: is a whole CLIP model; take the image encoder alone (CLIPVisionModelWithProjection)"
        )
    try:
        return ClipVisionConfig.from_dict({key: value for key, value in config.items() if value is not None})
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
