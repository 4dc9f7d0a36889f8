"""Files of IP-Adapters (Ye et al. 2023): one safetensors file, whose arrays determine the kind.

image_proj.*                          network that turns an image into tokens
ip_adapter.<1, 3, 5, ...>.to_k_ip     keys and values for the attentions to the text: down, up, middle
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, HubError, InputError
from canvax.models.configs import ClipVisionConfig, UNetConfig
from canvax.models.ip_adapter import HEAD, IPAdapter
from canvax.weights.files import EncoderFiles, NetworkFiles, open_weights
from canvax.weights.identify import IP_ADAPTER, expect
from canvax.weights.location import Location, refuse_pickle
from canvax.weights.open import check_adapter, find_adapter, open_network

FULL_TOKENS = 257
"""Tokens of CLIP's usual encoder with patches of 14 pixels, for the kind that reads all features."""

_LAYER = re.compile(r"ip_adapter\.(\d+)\.to_[kv]_ip\.weight")
_RESAMPLER_LAYER = re.compile(r"image_proj\.layers\.(\d+)\.")
_PLACES = ("models/image_encoder", "sdxl_models/image_encoder")
_FACE_ID = re.compile(r"\.to_[qk]_lora\.|perceiver_resampler")


def open_ip_adapter(location: Location) -> NetworkFiles:
    """Find an adapter and download it if necessary; no array is read.

    Raises:
        InputError, CheckpointError, HubError: it is missing, damaged, or another kind of file.
    """
    name = str(location.name)
    (path, *_), _ = find_adapter(location, ())
    arrays = open_weights(path)
    names = {array.name for array in arrays}
    expect(name, {array.name: array.shape for array in arrays}, IP_ADAPTER)
    if any(_FACE_ID.search(name) for name in names) or {"image_proj.norm.weight", "image_proj.proj.0.weight"} <= names:
        raise CheckpointError(
            f"{name}: is an IP-Adapter of the FaceID kind, which reads InsightFace's numbers of a face and not an "
            "image; canvax does not have it. The plus-face kind (ip-adapter-plus-face) reads images of faces"
        )
    if not any(map(_LAYER.fullmatch, names)):
        raise CheckpointError(f"{name}: is no IP-Adapter: it has no arrays such as ip_adapter.1.to_k_ip.weight")
    if not any(name.startswith("image_proj.") for name in names):
        raise CheckpointError(
            f"{name}: is a part of an IP-Adapter: it has no arrays image_proj.*, which make tokens of an image"
        )
    return NetworkFiles(name, arrays, path=path)


def check_ip_adapter(location: Location) -> None:
    """Refuse locations that cannot be an IP-Adapter, before downloads."""
    refuse_pickle(str(location.name))
    check_adapter(location, ())


def read_ip_adapter(files: NetworkFiles, unet: UNetConfig) -> IPAdapter:
    """Return the adapter that the arrays belong to.

    Raises:
        CheckpointError: canvax does not know this kind.
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
            return IPAdapter("full", shape("proj.0.weight")[1], shape("proj.3.weight")[0], FULL_TOKENS, unet)
        _, latent_width, hidden = shape("latents")
        depth = 1 + max(int(match[1]) for match in map(_RESAMPLER_LAYER.match, shapes) if match)
        heads = shape("layers.0.0.to_q.weight")[0] // HEAD
        reads, width = shape("proj_in.weight")[1], shape("proj_out.weight")[0]
        return IPAdapter("plus", reads, width, latent_width, unet, hidden, depth, max(1, heads))
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(f"{files}: is no IP-Adapter that canvax knows; it lacks {error}") from None


def count_layers(names: Iterable[str]) -> int:
    """Return the number of attentions that a file has keys for."""
    return len({match[1] for match in map(_LAYER.fullmatch, names) if match})


def encoder_fault(cfg: ClipVisionConfig, adapter: IPAdapter) -> str | None:
    """Return why an adapter cannot read an encoder's output; None if it can."""
    plain = adapter.kind == "plain"
    made = cfg.projection_dim if plain else cfg.hidden_size
    if made == adapter.reads:
        return None
    return f"it makes {'vectors' if plain else 'features'} of {made} numbers, the adapter reads {adapter.reads}"


def encoder_wanted(adapter: IPAdapter) -> str:
    """Return the released encoder that an adapter was trained with, by its widths."""
    vectors = {768: "CLIP ViT-L/14", 1024: "OpenCLIP ViT-H/14", 1280: "OpenCLIP ViT-bigG/14"}
    features = {1024: "CLIP ViT-L/14", 1280: "OpenCLIP ViT-H/14", 1664: "OpenCLIP ViT-bigG/14"}
    encoder = (vectors if adapter.kind == "plain" else features).get(adapter.reads)
    folder = {"OpenCLIP ViT-H/14": _PLACES[0], "OpenCLIP ViT-bigG/14": _PLACES[1]}.get(str(encoder))
    where = f"image_encoder='h94/IP-Adapter/{folder}'" if folder else "image_encoder= with its folder"
    return f"it needs {encoder or 'another image encoder'}: pass {where}"


def find_encoder(named: str | Path | None, adapter: IPAdapter, files: NetworkFiles, location: Location) -> EncoderFiles:
    """Return the encoder that was named or, for None, a suitable one next to the adapter.

    Raises:
        InputError: there is no suitable encoder.
        CheckpointError, HubError: it is damaged, cannot be fetched or does not suit the adapter.
    """
    if named is not None:
        likely = _like(location, named)
        return replace(
            _open_encoder(*((likely, "") if likely.local() else likely.on_hub()), adapter, files), named=True
        )
    fault = "there is no folder image_encoder next to it"
    for place in _beside(files, location):
        try:
            return _open_encoder(*place, adapter, files)
        except (HubError, CheckpointError) as error:
            fault = str(error) if isinstance(error, CheckpointError) else fault
    raise InputError("image_encoder", f"is needed for {files}: {fault}", cure=encoder_wanted(adapter))


def _beside(files: NetworkFiles, location: Location) -> list[tuple[Location, str]]:
    """Return where the encoders of released adapters are, relative to the adapter."""
    if location.local() is None:
        repository, file = location.on_hub()
        inside = "/".join([*file.split("/")[:-1], "image_encoder"])
        return [(_like(location, repository.text), place) for place in dict.fromkeys((inside, *_PLACES))]
    assert files.path is not None
    folder = files.path.parent
    near = [folder / "image_encoder", *(folder.parent / place for place in (*_PLACES, "image_encoder"))]
    return [(_like(location, place), "") for place in near if (place / "config.json").is_file()]


def _like(location: Location, name: str | Path) -> Location:
    """Return an encoder's location with the adapter's settings, and its commit if it is in the same repository."""
    other = replace(location, name=name, revision=None, weight_name=None, argument="image_encoder")
    same = location.repository and other.repository and location.repository[0] == other.repository[0]
    return replace(other, revision=location.revision) if same and not Path(name).exists() else other


def _open_encoder(location: Location, component: str, adapter: IPAdapter, files: NetworkFiles) -> EncoderFiles:
    name = f"{location.text}/{component}" if component else location.text

    def accept(config: Mapping[str, Any]) -> None:
        if (fault := encoder_fault(_config(name, config), adapter)) is not None:
            raise CheckpointError(f"image_encoder={name!r} does not suit {files}: {fault}; {encoder_wanted(adapter)}")

    opened = open_network(location, accept=accept, component=component, kind="transformers")
    return EncoderFiles(name, opened.arrays, opened.config, cfg=_config(name, opened.config))


def _config(name: str, config: Mapping[str, Any]) -> ClipVisionConfig:
    if "vision_config" in config:
        raise CheckpointError(
            f"{name}: is a whole CLIP model; take the image encoder alone (CLIPVisionModelWithProjection)"
        )
    try:
        return ClipVisionConfig.from_dict(config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
