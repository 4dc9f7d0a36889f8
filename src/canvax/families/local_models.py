"""The models in the folder of models, and the files that complete a transformer in a separate file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from canvax.errors import CanvaxError, CheckpointError, InputError
from canvax.families.base import CLASSES, Family
from canvax.families.known import families
from canvax.families.read import read_networks
from canvax.weights.data_folder import by_name, data_folder, files
from canvax.weights.entries import PICKLES, UPSCALER, WEIGHTS, is_replaced, pickle_refused
from canvax.weights.files import open_weights
from canvax.weights.identify import (
    AUTOENCODER,
    DAMAGED,
    INSIDE,
    LANGUAGE_MODEL,
    MODEL,
    T5,
    TEXT_ALONE,
    TRANSFORMER,
    FileKind,
    FileReport,
    inspect,
    listing,
    transformer_family,
)
from canvax.weights.language_model import open_language_model
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.overrides import Overrides, vae_of_file
from canvax.weights.transformer_file import parts_beside

_KINDS: Mapping[str, tuple[FileKind, ...]] = {"vae": (AUTOENCODER,)}
_ENCODERS = (T5, LANGUAGE_MODEL, TEXT_ALONE)
_OF_TRANSFORMERS = ("diffusion_models", "unet")
"""ComfyUI's folders for transformers; the folders of the other parts are next to them."""


class LocalModels(NamedTuple):
    """Contents of the folder of models.

    Attributes:
        models: whole models, and transformers with all other parts, by name.
        left_out: unusable files, by name with suffix, with the reason and the cure.
    """

    models: dict[str, Path]
    left_out: dict[str, str]


def local_models() -> LocalModels:
    """Return the models of the folder of models, and its unusable files; only headers are read."""
    parts = files()
    faults = {part.path: fault for part in parts if (fault := fault_of(part, parts))}
    kinds = {part.path: part.kind for part in parts if part.kind}
    models = {
        name: path
        for name, path in by_name([*kinds]).items()
        if path not in faults and kinds[path] in (MODEL, TRANSFORMER)
    }
    left_out = {
        f"{name.removesuffix(path.suffix)}{path.suffix}": faults[path] for name, path in by_name([*faults]).items()
    }
    return LocalModels(models, left_out)


def byte_count(model: Path) -> int:
    """Return the bytes of a model's files, with those that complete a transformer."""
    parts = completed(Overrides(), Location(model)).parts
    paths = [model, *(path for part in parts.values() if (path := Location(part).local()))]
    return sum(
        file.stat().st_size
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.suffix.lower() in WEIGHTS
    )


def fault_of(part: FileReport, near: Sequence[FileReport] | None = None) -> str:
    """Return why a file cannot be used, with the cure; "" for usable files, images and replaced pickles.

    ``near``: see ``completed``.
    """
    if is_replaced(part.path):
        return ""
    if part.path.suffix.lower() in PICKLES and part.kind_name != UPSCALER:
        return f"a pickle: {pickle_refused(part.path)}"
    if part.kind is TRANSFORMER:
        with suppress(CanvaxError):
            if completed(Overrides(), Location(part.path), near).parts:
                return ""
        return f"the transformer of {part.family} alone: put its text encoders and its autoencoder into the folder"
    if part.kind is None:
        cure = ": copy or download it again" if part.kind_name == DAMAGED else ""
        return "" if part.kind_name == "an image" else f"{part.kind_name} {part.family}".rstrip() + cure
    return "" if part.kind.flag else f"{part.kind.name}: {part.kind.cure}"


def readers(part: FileReport) -> str:
    """Return the families of an autoencoder or a text encoder of a transformer, by kind and widths; "" if unknown."""
    if not part.path.is_file() or part.kind not in (AUTOENCODER, *_ENCODERS):
        return ""
    return ", ".join(dict.fromkeys(family.title for family in families() if _reads(family, part)))


def _reads(family: Family, part: FileReport) -> bool:
    """Return whether a published model of a family reads a part."""
    presets, path = family.presets.values(), part.path
    if part.kind is AUTOENCODER:
        with suppress(CheckpointError, InputError):
            config = vae_of_file(str(path), path, {}).config
            channels = {preset.vae.latent_channels for preset in presets}
            of_class = config["_class_name"] in family.classes["vae"]
            return of_class and (config["_class_name"] not in CLASSES["vae"] or config["latent_channels"] in channels)
        return False
    for name, usual in family.single_file.configs.items() if family.single_file else ():
        encoders = [encoder for preset in presets for encoder in preset.text.encoders if encoder.component == name]
        if encoders and ("vision_config" in usual) == _reads_images(path):
            with suppress(CheckpointError, InputError):
                config = open_language_model(Location(path, argument=name), usual).config
                config = config.get("text_config", config)
                size = "d_model" if "d_model" in config else "hidden_size"
                if any(config[size] == getattr(vars(encoder).get("cfg"), size, None) for encoder in encoders):
                    return True
    return False


def completed(overrides: Overrides, location: Location, near: Sequence[FileReport] | None = None) -> Overrides:
    """Add the text encoder and the autoencoder that a transformer in a separate file lacks.

    They may be in the same file. Other files are searched in the folder of models; without one, in ComfyUI's folders
    around the transformer. Among suitable files, the first by name is used. ``Overrides.reasons`` records the choice.

    Args:
        overrides: parts named by the caller.
        location: location of the model.
        near: the files to search, if the caller has listed them already.

    Returns:
        The overrides; unchanged for other models and if no file is suitable.
    """
    path = location.local()
    if path is None or not path.is_file() or (part := inspect(path)) is None or part.kind is not TRANSFORMER:
        return overrides
    arrays = [entry.name for entry in open_weights(path, plain_names=False)]
    family = transformer_family(arrays)
    assert family is not None  # since it is a transformer
    if not (missing := [name for name in parts_beside(family) if name not in overrides.parts]):
        return overrides
    inside = [name for name in missing if any(array.startswith(INSIDE[name]) for array in arrays)]
    if inside == missing:
        reasons = dict.fromkeys(inside, "in the same file")
        return replace(overrides, **dict.fromkeys(inside, str(path)), reasons=reasons)
    near = sorted(
        (part for part in (_around(path) if near is None else near) if part.kind), key=lambda part: part.path.name
    )
    names = {path: name for name, path in by_name([part.path for part in near]).items()}
    choices = [
        [path] if name in inside else [each.path for each in near if each.kind in _KINDS.get(name, _ENCODERS)]
        for name in missing
    ]
    for paths in product(*choices):
        parts = {name: names.get(path, str(path)) for name, path in zip(missing, paths, strict=True)}
        reasons = {name: f"{part}, the first file that fits" for name, part in parts.items()}
        chosen = replace(overrides, **parts, reasons=reasons)
        with suppress(CheckpointError, InputError):
            opened = chosen.apply(open_files(location, given=chosen.parts, weights=False))
            read_networks(opened)
            of_vision = "vision_config" in opened.configs["text_encoder"]
            if "text_encoder" not in parts or _reads_images(paths[missing.index("text_encoder")]) == of_vision:
                return chosen
    return overrides


def _around(path: Path) -> Iterator[FileReport]:
    """Yield the files in the folder of models, or in ComfyUI's folders around a transformer."""
    if data_folder() is not None:
        yield from files()
    elif (place := next((each for each in path.parents if each.name in _OF_TRANSFORMERS), None)) is not None:
        yield from listing(place.parent)


def _reads_images(path: Path) -> bool:
    """Return whether a language model has a vision tower, by its arrays or its name.

    The text layers of these models have other weights.
    """
    return "vl" in path.stem.lower() or any("visual." in entry.name for entry in open_weights(path, plain_names=False))
