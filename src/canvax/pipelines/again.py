"""Read from the metadata of an image how to generate it again: settings, losses, the same images and adapters.

``pipe.again``, ``canvax info``, ``canvax generate --from-image`` and the server's page share these functions. The keys
are in ``canvax.images.keys``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from PIL import Image

from canvax.call import GuidanceMethod
from canvax.errors import HintWarning, InputError
from canvax.families.base import Model
from canvax.images.formats import written
from canvax.images.infotext import embeddings_in, settings_left
from canvax.images.inputs import fingerprint, read_images
from canvax.images.keys import KEYS, keys_of, list_in, table_in
from canvax.images.metadata import check_kinds, metadata_of, read_metadata
from canvax.noise import check_seed
from canvax.pipelines.generate import record_of_model
from canvax.pipelines.options import Options
from canvax.samplers import find
from canvax.settings import declared
from canvax.weights.data_folder import embedding_files

if TYPE_CHECKING:
    from canvax.pipelines.adapters import Adapters

CALL = tuple(name for name, key in keys_of("call").items() if key.kind is None)
"""Arguments of a call that metadata holds under their names."""


def recorded(image: Any) -> tuple[dict[str, Any], str]:
    """Return the metadata of one image, checked, and a name of the image for messages.

    Args:
        image: a PNG, JPEG or WebP file, an image of PIL, or metadata as in ``canvax.Result.metadata``.

    Raises:
        InputError: it has no metadata, or metadata of several images, or an entry has the wrong type.
    """
    if isinstance(image, Mapping):
        metadata, where = dict(image), "the image"
    elif isinstance(image, Image.Image):
        where = getattr(image, "filename", "") or "the image"
        metadata = metadata_of(image, where)
    elif isinstance(image, str | Path):
        metadata, where = read_metadata(image), str(image)
    else:
        raise InputError(
            "image", "is not an image, a file or metadata", cure="give the image, or result.metadata[0]", value=image
        )
    if "grid" in metadata:
        raise InputError(f"{where}: is a grid of several images; use one of them (canvax info lists them)")
    check_kinds(where, metadata)
    try:
        check_seed(metadata.get("seed"))
    except InputError as error:
        raise InputError(f"{where}: its {error}; give another seed, or take another image") from None
    return metadata, where


def skipped(metadata: Mapping[str, Any], layer: int) -> Any:
    """Return the ``clip_skip`` of an image for a model, whose ``usual_layer`` is ``layer``.

    Other programs count from the last layer, which SDXL does not read: their "Clip skip: 2" leaves out nothing there.
    """
    skip = table_in(metadata, "options").get("clip_skip")
    return max(skip + 1 - layer, 0) if isinstance(skip, int) and "canvax" not in metadata else skip


def settings_of(metadata: Mapping[str, Any], but: Collection[str] = (), layer: int = 1) -> dict[str, Any]:
    """Return the arguments and options of the call, by name, without those that are lost.

    Args:
        metadata: of one image.
        but: further names to leave out.
        layer: the ``usual_layer`` of the model that will draw it.
    """
    options = table_in(metadata, "options")
    settings = {name: metadata.get(name) for name in CALL} | {name: options.get(name) for name in declared(Options)}
    settings["clip_skip"] = skipped(metadata, layer)
    if "canvax" not in metadata:  # other programs do not distinguish "" from none
        settings["negative_prompt"] = settings["negative_prompt"] or None
    left = {*lost_settings(metadata), *but}
    return {name: value for name, value in settings.items() if value is not None and name not in left}


def lost_settings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return what metadata cannot repeat, by the argument that gave it, each with a clause that says so."""
    lost = {}
    sampler, rule = metadata.get("sampler"), table_in(metadata, "options").get("guidance_method")
    if isinstance(sampler, str) and not _is_sampler(sampler):
        lost["sampler"] = f"its sampler {metadata.get('sampler_label') or sampler!r} has no name that canvax knows"
    if rule is not None and rule not in get_args(GuidanceMethod):
        lost["guidance_method"] = f"its guidance_method {rule!r} is a function of Python"
    if metadata.get("noise") == "given":
        lost["latents"] = "its initial noise was given as an array and is not in the file"
    for name in list_in(metadata, "conditions"):
        lost[str(name)] = f"its {name} was given as an array and is not in the file"
    if metadata.get("steered"):
        lost["callback"] = "a callback changed its latents on the way"
    return lost


def unknown_settings(metadata: Mapping[str, Any]) -> list[str]:
    """Return settings in metadata that canvax does not know, by name; with the values of another program's."""
    unknown = sorted(metadata.keys() - KEYS.keys())
    unknown += [f"options.{name}" for name in sorted(table_in(metadata, "options").keys() - declared(Options).keys())]
    return unknown + [f"{name}: {value}" if value else name for name, value in settings_left(metadata).items()]


def missing_embeddings(metadata: Mapping[str, Any]) -> list[str]:
    """Return the textual inversions of an image that are not in the data folder."""
    return [f"embedding {name}" for name in embeddings_in(metadata) if name.lower() not in embedding_files()]


def left_out(metadata: Mapping[str, Any]) -> list[str]:
    """Return the settings that a repeated call leaves out, for messages; adapters of canvax's images are separate."""
    unknown = [f"{text:.100}" for text in unknown_settings(metadata)]
    return unknown + ([] if "canvax" in metadata else missing_embeddings(metadata))


def not_repeated(metadata: Mapping[str, Any], changed: Collection[str]) -> Iterator[str]:
    """Yield a clause for everything that ``pipe.again`` does not repeat, except arguments that are changed."""
    yield from (clause for name, clause in lost_settings(metadata).items() if name not in changed)
    yield from (f"the setting {text} is left out" for text in left_out(metadata))


def _is_sampler(name: str) -> bool:
    try:
        find(name)
    except InputError:
        return False
    return True


def compared(metadata: Mapping[str, Any], other: Mapping[str, Any], where: str) -> Iterator[HintWarning]:
    """Compare the images that a new call reads with those that ``metadata`` identifies; yields what differs.

    Args:
        metadata: of the earlier image.
        other: of the new one, of which only images matter.
        where: name of the earlier image for messages.

    Raises:
        InputError: an image is missing.
    """
    for name, key in keys_of("images").items():
        if name not in metadata:
            continue
        wanted, found = (_entries(of.get(name)) for of in (metadata, other))
        if len(wanted) != len(found):
            raise _needed(metadata, name, found, where)
        for i, (mark, given) in enumerate(zip(wanted, found, strict=True), 1):
            place = f"number {i} " if len(wanted) > 1 else ""
            if isinstance(mark, dict) and "sha256" in mark and isinstance(given, dict):
                for part, noun in (("sha256", "image"), ("mask_sha256", "mask"), ("scale", "strength")):
                    if mark.get(part) != given.get(part):
                        yield HintWarning(key.argument, f"{place}has another {noun} than that of {where}")
            elif mark != given:
                yield HintWarning(key.argument, f"{place}is not the one of {where}")


def _entries(marks: Any) -> list[Any]:
    return marks if isinstance(marks, list) else [] if marks is None else [marks]


def check_named(metadata: Mapping[str, Any], arguments: Mapping[str, Any], where: str) -> None:
    """Check that the arguments of a new call name the images that the earlier one had.

    Raises:
        InputError: one of them is missing.
    """
    for name, key in keys_of("images").items():
        if name in metadata and arguments.get(key.argument) is None:
            raise _needed(metadata, name, [], where)


def _needed(metadata: Mapping[str, Any], name: str, found: list[Any], where: str) -> InputError:
    key, count = KEYS[name], len(_entries(metadata[name]))
    networks = list_in(metadata, {"control": "controlnet", "image_prompt": "ip_adapter"}.get(key.argument, ""))
    by = f" (read by {', '.join(map(str, networks))})" if networks else ""
    problem = f"is needed: {where} was made from {count} {key.noun}{'s' * (count > 1)}{by}"
    problem += f", and {len(found)} {'is' if len(found) == 1 else 'are'} given" if found else ""
    more = "; in the shell those after the first are --reference" if name == "references_sha256" and count > 1 else ""
    return InputError(key.argument, problem, cure=f"name the same again{more}")


def other_model(metadata: Mapping[str, Any], other: Mapping[str, Any], where: str) -> Iterator[HintWarning]:
    """Compare the models of two images, without their folders; other programs record the name alone."""
    ours, past, now = "canvax" in metadata, written(metadata), written(other)
    for name in keys_of("model"):
        if past.get(name) != now.get(name) and (ours or past.get(name)):
            yield HintWarning(f"{where}: its {name} was {past.get(name)!r:.200}, and here is {now.get(name)!r:.200}")


def other_hash(metadata: Mapping[str, Any], digests: Collection[str]) -> str:
    """Return the hash of an image's model and that of the model here, if they differ, for messages; else "".

    ``digests``: SHA-256 hashes of the models that it may be; "" for an unknown hash. A1111 writes the first 10 digits.
    """
    past = str(metadata.get("model_sha256") or table_in(metadata, "other").get("Model hash")).lower()
    known = [digest[:10] for digest in digests if digest]
    differs = known and re.fullmatch("[0-9a-f]{10,64}", past) and past[:10] not in known
    return f"hash {past[:10]} (here {' or '.join(known)})" if differs else ""


def settings_of_tiles(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that only ``upscale`` has, and None for arguments of a call that it does not have."""
    if not (tiles := table_in(metadata, "upscale")):
        return {}
    sizes = {"scale": tiles.get("scale"), "overlap": tiles.get("overlap")}  # a file must not name other files
    return {**sizes, "control": "controlnet" in metadata, "height": None, "width": None}


def record_of_tiles(model: Model, image: Any) -> dict[str, Any]:
    """Return the model and the image, unless it is None, as the metadata of an enlarged image holds them."""
    mark = {} if image is None else {"image_sha256": fingerprint(read_images("image", image, 1)[0])}
    networks = [files.name for files in model.controls]
    return record_of_model(model) | mark | ({"controlnet": networks} if networks else {})


def not_loaded(metadata: Mapping[str, Any], adapters: Adapters) -> list[str]:
    """Return the names of adapters of an image whose files are not loaded."""
    return [name for name, loaded in _loaded(metadata, adapters).items() if loaded is None]


def _loaded(metadata: Mapping[str, Any], adapters: Adapters) -> dict[str, str | None]:
    """Return for each adapter of an image the name under which its file is loaded, or None."""
    by_hash: dict[Any, str] = {adapter.sha256: name for name, adapter in adapters.items()}
    entries = {name: entry for name, entry in table_in(metadata, "adapters").items() if isinstance(entry, dict)}
    return {
        name: by_hash.get(entry["sha256"]) if "sha256" in entry else name if name in adapters else None
        for name, entry in entries.items()
    }


def weights_of(metadata: Mapping[str, Any], adapters: Adapters, where: str) -> dict[str, Any]:
    """Return the weights that an image had, by the names of adapters in this pipeline.

    Raises:
        InputError: an adapter or a word is not loaded.
    """
    weights, entries = {}, table_in(metadata, "adapters")
    for name, loaded in _loaded(metadata, adapters).items():
        if loaded is None:
            raise _not_loaded(where, name, f"pipe.adapters.load({name!r}, {entries[name].get('file')!r})")
        weights[loaded] = entries[name].get("weight", 1.0)
    for word, entry in table_in(metadata, "embeddings").items():
        file = entry.get("file") if isinstance(entry, dict) else entry
        if word not in adapters.words:
            raise _not_loaded(where, word, f"pipe.adapters.load_embedding({file!r}, token={word!r})")
    return weights


def _not_loaded(where: str, name: str, call: str) -> InputError:
    problem = f"lack {name!r:.200}, with which {where} was generated"
    return InputError("adapters", problem, cure=f"call {call:.400} first, or pass adapters=None to do without")
