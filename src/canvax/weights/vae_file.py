"""An autoencoder that stands in for a model's own: a folder, a repository or one file, large or tiny.

AutoencoderKL     diffusers: encoder.down_blocks.0. ...; the original code: [first_stage_model.]encoder.down.0. ...
AutoencoderTiny   diffusers: decoder.layers.0.weight; TAESD itself: decoder.1.weight, which counts its clamp as 0
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError, shown, warn
from canvax.weights.entries import Entry
from canvax.weights.layout import PICKLE_REFUSED, PICKLES
from canvax.weights.ldm_names import vae_entries
from canvax.weights.open import open_network
from canvax.weights.safetensors import open_safetensors
from canvax.weights.single_file import VAE, vae_config
from canvax.weights.source import BUNDLED, Source

CLASSES = ("AutoencoderKL", "FlaxAutoencoderKL", "AutoencoderTiny")

_TINY = re.compile(r"(encoder|decoder)\.(layers\.)?(\d+)\.((?:conv\.\d+\.)?(?:weight|bias))")
_HALF = re.compile(r"\d+\.(?:conv\.\d+\.)?(?:weight|bias)")
_PASSED_OVER = re.compile(r"(first_stage_model\.)?(loss\..*|model_ema\..*|.*num_batches_tracked)")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)((?:/[\w.\-]+)*)", re.ASCII)


@dataclass(frozen=True, eq=False)
class VaeFiles:
    """An autoencoder in files of its own.

    Attributes:
        name: as it was asked for.
        config: of diffusers.
        arrays: all of its arrays, under the names of diffusers.
    """

    name: str
    config: Mapping[str, Any]
    arrays: Sequence[Entry]


def check_vae_name(vae: Any) -> None:
    """Refuse what can be told to be no autoencoder before anything is fetched.

    Raises:
        InputError, CheckpointError: saying why.
    """
    if not isinstance(vae, str | Path) or not str(vae) or "\0" in str(vae):
        raise InputError(f"vae={shown(vae)} is not a folder, a Hub id 'owner/name' or a safetensors file")
    if Path(vae).suffix.lower() in PICKLES:
        raise CheckpointError(f"vae={str(vae)!r}: {PICKLE_REFUSED}")


def open_vae(vae: str | Path, own: Mapping[str, Any], **source: Any) -> VaeFiles:
    """Find an autoencoder, fetching what is not on disk yet; no array is read.

    Args:
        vae: a folder of diffusers, one with such a folder ``vae`` in it, a Hub id with perhaps a folder behind it, or a
            safetensors file.
        own: config of the model's own, whose scaling factor a file without a config has.
        source: where the Hub's files are: fields of ``Source``.

    Raises:
        InputError, CheckpointError, HubError: it is missing, damaged or something else.
    """
    found = _open_vae(vae, own, **source)
    sizes = [_factor(config) for config in (found.config, own)]
    if "block_out_channels" in own and sizes[0] != sizes[1]:
        raise CheckpointError(
            f"vae={str(vae)!r}: makes one latent of {sizes[0]} x {sizes[0]} pixels, the model's own one of "
            f"{sizes[1]} x {sizes[1]}; it was made for another kind of model"
        )
    return found


def _factor(config: Mapping[str, Any]) -> int:
    """Pixels of a latent along an axis."""
    levels = config.get("num_decoder_blocks") or config.get("block_out_channels")
    return 2 ** (len(levels) - 1) if isinstance(levels, list | tuple) else 8


def _open_vae(vae: str | Path, own: Mapping[str, Any], **source: Any) -> VaeFiles:
    check_vae_name(vae)
    name, component = str(vae), ""
    try:
        path = BUNDLED.get(name) or Path(vae).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"vae={name[:80]!r} cannot be the name of a folder or file ({reason})") from None
    if is_file:
        return of_file(name, path, own)
    match = _HUB_ID.fullmatch(name)
    if is_folder:
        component = "vae" if not (path / "config.json").is_file() and (path / "vae").is_dir() else ""
    elif match and ".." not in name:
        name, component = match[1], match[2].removeprefix("/")
    else:
        raise CheckpointError(
            f"vae={name[:80]!r}: there is no such folder or file, and it is not a Hub id 'owner/name'"
        )

    def accept(config: Mapping[str, Any]) -> None:
        if config.get("_class_name") not in CLASSES:
            raise CheckpointError(
                f"vae={str(vae)!r}: its config.json is of the class {str(config.get('_class_name'))[:80]!r}; canvax "
                "reads AutoencoderKL and AutoencoderTiny"
            )

    files = open_network(Source(name, **source), accept=accept, component=component, kind="diffusers")
    config = files.config(component)
    found = VaeFiles(str(vae), config, files.entries(component))
    scale, usual = config.get("scaling_factor"), own.get("scaling_factor")
    if config["_class_name"] != "AutoencoderTiny" and usual is not None and scale != usual:
        warn(
            f"vae={str(vae)!r}: its scaling_factor is {scale}, that of the model's own {usual}; it was made for "
            "another kind of model, and colours may be wrong"
        )
    return found


def of_file(name: str, path: Path, own: Mapping[str, Any]) -> VaeFiles:
    """The autoencoder of one safetensors file, which may be a whole model's.

    Raises:
        CheckpointError: there is none in it.
    """
    arrays = [one for one in open_safetensors(path) if not _PASSED_OVER.fullmatch(one.name)]
    if any(one.name.startswith(VAE) for one in arrays):
        arrays = [replace(one, name=one.name.removeprefix(VAE)) for one in arrays if one.name.startswith(VAE)]
    names = {one.name for one in arrays}
    if any(_HALF.fullmatch(one) for one in names):
        raise CheckpointError(
            f"vae={name!r}: holds half of a TAESD, encoder or decoder alone; take the file that has both, or "
            "madebyollin/taesd"
        )
    tiny = [match for match in map(_TINY.fullmatch, names) if match]
    if tiny:
        return VaeFiles(name, *_tiny(name, arrays))
    if not any(one.startswith("decoder.") for one in names):
        raise CheckpointError(f"vae={name!r}: holds no autoencoder: no name of its arrays begins with decoder.")
    if any(one.startswith(("decoder.up.", "decoder.mid.block_1.")) for one in names):
        arrays = vae_entries(arrays)
    shapes = {one.name: one.shape for one in arrays}
    rest = {key: own[key] for key in ("scaling_factor", "sample_size", "force_upcast") if key in own}
    try:
        config = vae_config(shapes, rest)
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"vae={name!r}: is not a whole autoencoder, it lacks {error}") from None
    if odd := [width for width in config["block_out_channels"] if width % 32]:
        raise CheckpointError(
            f"vae={name!r}: has {odd[0]} channels in groups that no file tells of; pass its folder, with config.json"
        )
    config["use_quant_conv"] = "quant_conv.weight" in shapes
    config["use_post_quant_conv"] = "post_quant_conv.weight" in shapes
    return VaeFiles(name, config, arrays)


def _tiny(name: str, arrays: Sequence[Entry]) -> tuple[dict[str, Any], list[Entry]]:
    """Config and arrays of a TAESD, which has always the same layers, under the names of diffusers."""
    found = []
    for one in arrays:
        match = _TINY.fullmatch(one.name)
        if match is None:
            raise CheckpointError(f"vae={name!r}: holds an array that TAESD has no use for: {one.name}")
        number = int(match[3]) - (match[1] == "decoder" and match[2] is None)
        found.append(replace(one, name=f"{match[1]}.layers.{number}.{match[4]}"))
    shapes = {one.name: one.shape for one in found}
    missing = [half for half in ("encoder", "decoder") if f"{half}.layers.0.weight" not in shapes]
    if missing:
        raise CheckpointError(f"vae={name!r}: holds half of a TAESD, without the {missing[0]}; take the whole one")
    width, latents = shapes["decoder.layers.0.weight"][:2]
    return {
        "_class_name": "AutoencoderTiny",
        "latent_channels": latents,
        "encoder_block_out_channels": [width] * 4,
        "decoder_block_out_channels": [width] * 4,
    }, found
