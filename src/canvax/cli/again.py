"""Make the command line that generates an image again from its metadata, and name the settings that it loses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from canvax.call import ZERO_SNR, Call, Load
from canvax.cli.loading import model_on_disk
from canvax.cli.terminal import command_line
from canvax.errors import InputError
from canvax.images.infotext import settings_left
from canvax.images.keys import keys_of, list_in, table_in
from canvax.models.clip import usual_layer
from canvax.pipelines.again import CALL, lost_settings, other_hash, settings_of
from canvax.pipelines.options import Options
from canvax.pipelines.texts import tags_of
from canvax.scale.named_images import NONE
from canvax.settings import as_flags, declared, offered
from canvax.weights.data_folder import all_named, embedding_files, stem_of, usual_syntax
from canvax.weights.identify import LORA, inspect
from canvax.weights.location import BUNDLED, Location

_NETWORKS = ("model", "scheduler", "controlnet", "ip_adapter", "ip_encoder")
OF_MODEL = tuple(name for name in keys_of("model") if name not in _NETWORKS)
"""Flags of ``canvax.load`` with one text each, besides the name of the model."""

_IN_FOLDER = ("model", "vae", "text_encoder", "text_encoder_2", "lora", "embedding", "controlnet")
"""Flags that take names of the folder of models."""

_ARGUMENTS = {name: field for name, field in offered(Call, "command").items() if name in CALL and name != "prompt"}
_OPTIONS = offered(Options, "command")


class Again(NamedTuple):
    """A command that generates an image again, with names in capitals where the user has to put files.

    Attributes:
        command: the line for a shell.
        losses: a clause for each thing that the command does not repeat.
    """

    command: str
    losses: list[str]


def again(metadata: Mapping[str, Any], data_dir: str | None = None) -> Again:
    """Return the command for the metadata of one image. ``data_dir``: the folder of models, where a flag named it."""
    model = recorded_model(metadata)
    layer = layer_of(metadata, Load(model=model) if model else None)
    settings, tiles = settings_of(metadata, layer=layer or 1), metadata.get("upscale")
    words = ["canvax", "generate"]
    if isinstance(tiles, dict):
        words = ["canvax", "upscale", "IMAGE"]
        settings |= {"height": None, "width": None}
    elif usual_syntax() != "plain":
        settings = {"prompt_syntax": "plain"} | settings
    prompt, tags = metadata.get("prompt", ""), tags_for_prompt(metadata).values()
    words += _flag("prompt", " ".join([str(prompt or ""), *tags]).lstrip() if tags else prompt)
    words += _flag("model", model or ("MODEL" if is_lost(metadata) else None))
    for name in OF_MODEL:
        words += _flag(name, recorded_part(metadata, name))
    words += ["--zero-snr"] * (metadata.get("scheduler") == ZERO_SNR)
    words += ["--safety-checker"] * (metadata.get("nsfw") is True)
    for name, field in _ARGUMENTS.items():
        words += as_flags(field, settings.get(name))
    words += [*_images(metadata), *_control(metadata), *_image_prompts(metadata)]
    for name, field in _OPTIONS.items():
        words += as_flags(field, settings.get(name))
    if isinstance(tiles, dict):
        words += [*_flag("scale", tiles.get("scale")), *_flag("overlap", tiles.get("overlap"))]
    words += [*_adapters(metadata)]
    words += _flag("data_dir", data_dir if data_dir and _is_in_folder(words) else None)
    clauses = [*losses(metadata), *vae_lost(metadata), *_image_prompts_lost(metadata)]
    clauses += other_file(metadata, model)
    if layer is None:
        clauses.append("its --clip-skip is one less for SDXL, which does not read the last layer")
    return Again(command_line(words), clauses)


def layer_of(metadata: Mapping[str, Any], load: Load | None) -> int | None:
    """Return the ``usual_layer`` of a model, if a setting of another program depends on it; None if it is not here."""
    if "canvax" in metadata or "clip_skip" not in table_in(metadata, "options"):
        return 1
    with suppress(InputError):  # loading refuses it
        if load and (model := model_on_disk(load)):
            return usual_layer(model.text)
    return None


def losses(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each setting and adapter that flags do not repeat."""
    yield from lost_settings(metadata).values()
    options, scheduler = table_in(metadata, "options"), metadata.get("scheduler")
    for name in declared(Options).keys() & options.keys() - _OPTIONS.keys():
        yield f"its {name} {options[name]!r} is for Python"
    if scheduler and scheduler != ZERO_SNR and "canvax" in metadata:
        yield f"its scheduler {scheduler} is for Python: canvax.load(scheduler=...)"
    yield from _adapters_lost(metadata)


def other_file(metadata: Mapping[str, Any], model: Any) -> list[str]:
    """Return a clause if the file of a model is another than that of an image, by known hashes; in a list, or none."""
    from canvax.server.hashes import known_hash

    path = None
    with suppress(InputError):  # loading refuses it
        path = Location(model).local() if model else None
    found = other_hash(metadata, [known_hash(path)] if path and path.is_file() else [])
    return [f"its model was the file with the {found}"] if found else []


def vae_lost(metadata: Mapping[str, Any]) -> list[str]:
    """Return a clause for a VAE that the folder of models does not have, or has several times; in a list, or none."""
    lost = metadata.get("vae") and recorded_part(metadata, "vae") is None
    return [f"its VAE was {_called(metadata, 'vae')}"] if lost else []


def recorded_model(metadata: Mapping[str, Any]) -> Any:
    """Return the model of an image as ``--model`` takes it, or None.

    Other programs name a file without its folder, and canvax writes ``./`` instead of the folder. If the file is
    missing there, it is searched in the folder of models, where only one file may have the name.
    """
    model, ours = metadata.get("model"), "canvax" in metadata
    if not isinstance(model, str):
        return model or None if ours else None
    if ours and _is_there(model):
        return model or None
    name = model.removeprefix("./")
    return model if model in BUNDLED else name if len(all_named(name, "model")) == 1 else None


def recorded_part(metadata: Mapping[str, Any], name: str) -> Any:
    """Return a flag of ``OF_MODEL`` as an image records it, or None. Other programs record a VAE by its file's name."""
    value = metadata.get(name)
    if "canvax" in metadata or not isinstance(value, str):
        return _in_folder(value, name) or None
    return stem_of(value) if name == "vae" and len(all_named(stem_of(value), name)) == 1 else None


def _is_there(name: str) -> bool:
    """Return whether a recorded name has no folder that was left out, or is a file here."""
    return not name.startswith("./") or Path(name).exists()


def _in_folder(value: Any, argument: str) -> Any:
    """Return the name in the folder of models for a file that was recorded without its folder; others unchanged."""
    if not isinstance(value, str) or _is_there(value):
        return value
    name = value.removeprefix("./")
    return next((each for each in (stem_of(name), name) if len(all_named(each, argument)) == 1), value)


def _is_in_folder(words: Sequence[str]) -> bool:
    """Return whether a flag of a command line names a file of the folder of models."""
    arguments = {f"--{name.replace('_', '-')}": name for name in _IN_FOLDER}
    named = [(arguments[flag], value) for flag, value in pairwise(words) if flag in arguments]
    return any(all_named(re.sub(r":[\d.e-]+$", "", value), argument) for argument, value in named)


def lost_model(metadata: Mapping[str, Any]) -> str:
    """Return a clause that names the model of an image, where the user has to name it."""
    if not metadata.get("model"):
        return "was generated with a model that the file does not name"
    return f"was generated with {_called(metadata, 'model')}"


def _called(metadata: Mapping[str, Any], part: str) -> str:
    """Return the recorded name of a model or VAE, with the names of several files that it may mean."""
    name = str(metadata[part])
    names = list(all_named(stem_of(name.removeprefix("./")), part))
    return f"{name!r:.200}" + (f", which may be {' or '.join(names[:5])}" if len(names) > 1 else "")


def is_lost(metadata: Mapping[str, Any]) -> bool:
    """Return True if the user has to name the model of an image."""
    return recorded_model(metadata) is None and (bool(metadata.get("model")) or "canvax" not in metadata)


def _images(metadata: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(metadata.get("upscale"), dict):
        for name in ("image", "mask"):
            yield from _flag(name, name.upper() if f"{name}_sha256" in metadata else None)
    for i, _ in enumerate(list_in(metadata, "references_sha256")):
        yield from _flag("reference" if i else "image", f"IMAGE{i + 1}")


def _control(metadata: Mapping[str, Any]) -> Iterator[str]:
    names, marks = list_in(metadata, "controlnet"), list_in(metadata, "control_sha256")
    images: dict[str, str] = {}

    def image(mark: Any) -> str:  # the same name for the same image
        return images.setdefault(str(mark), f"CONTROL{len(images) + 1}")

    for i in range(max(len(names), len(marks))):
        yield from _flag("controlnet", _in_folder(names[i], "controlnet") if i < len(names) else f"CONTROLNET{i + 1}")
        for mark in marks[i : i + 1]:
            types = [f"{label}={image(each)}" for label, each in mark.items()] if isinstance(mark, dict) else []
            yield from _flag("control", NONE if mark is None else ",".join(types) or image(mark))


def _image_prompts(metadata: Mapping[str, Any]) -> Iterator[str]:
    prompts, adapters = _prompts(metadata), list_in(metadata, "ip_adapter")
    for name in adapters:
        yield from _flag("ip_adapter", name)
    yield from _flag("ip_encoder", metadata.get("ip_encoder"))
    masked = any("mask_sha256" in prompt for prompt in prompts)
    for i, prompt in enumerate(prompts):
        scale = prompt.get("scale")
        yield from _flag("ip_image", f"PROMPT{i + 1}" + (f":{scale}" if is_weight(scale) and scale != 1 else ""))
        if masked:
            yield from _flag("ip_mask", f"MASK{i + 1}" if "mask_sha256" in prompt else NONE)


def _image_prompts_lost(metadata: Mapping[str, Any]) -> Iterator[str]:
    prompts, adapters = _prompts(metadata), list_in(metadata, "ip_adapter")
    for i, prompt in enumerate(prompts):
        if not is_weight(prompt.get("scale")):
            yield f"the scale of image prompt {i + 1} is {prompt.get('scale')}, and --ip-image takes one number"
        if prompt.get("embeds"):
            yield f"image prompt {i + 1} was given as an array and is not in the file"
    read_by = [prompt.get("adapter") for prompt in prompts]
    if prompts and len(adapters) > 1 and read_by != list(range(len(adapters))):
        yield f"its image prompts were read by the adapters {read_by}, and --ip-image gives one to each, in order"


def adapters_of(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each adapter of an image, its file as ``--lora`` takes it, and its weight.

    Other programs name adapters in the prompt; of these, those in the folder of models.
    """
    for name, entry in table_in(metadata, "adapters").items():
        if isinstance(entry, dict):
            yield name, _in_folder(entry.get("file"), "lora"), entry.get("weight")
    for tag in settings_left(metadata):
        with suppress(InputError):
            yield from ((tag, name, weight) for name, weight in tags_of(tag, "unet").items() if is_lora_here(name))


def tags_for_prompt(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the tag of each LoRA whose text encoders and denoiser have different weights, by its name.

    ``--lora`` takes one weight, a tag in the prompt two. Only LoRAs in the folder of models have a tag.
    """
    tags = {}
    for name, file, weight in adapters_of(metadata):
        if not isinstance(weight, dict) or not all(map(is_weight, weight.values())) or not is_lora_here(file):
            continue
        text = {weight[part] for part in weight if part.startswith("text_encoder")}
        others = {weight[part] for part in weight if not part.startswith("text_encoder")}
        if len(text) == len(others) == 1:
            tags[name] = f"<lora:{file}:{text.pop()}:{others.pop()}>"
    return tags


def is_lora_here(name: Any) -> bool:
    """Return whether a name means one file of the folder of models, which is a LoRA."""
    paths = [*all_named(name, "lora").values()] if isinstance(name, str) else []
    return len(paths) == 1 and (part := inspect(paths[0])) is not None and part.kind is LORA


def _adapters(metadata: Mapping[str, Any]) -> Iterator[str]:
    files = [entry.get("file") for entry in table_in(metadata, "adapters").values() if isinstance(entry, dict)]
    for _, file, weight in adapters_of(metadata):
        if is_weight(weight):
            yield from _flag("lora", f"{file}:{weight}")
    at_hand = embedding_files()
    for source in dict.fromkeys(source for name, source in _words(metadata) if name.lower() not in at_hand):
        if source not in files:  # words of an adapter come with it
            yield from _flag("embedding", _in_folder(source, "embedding"))


def _adapters_lost(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each adapter and each word that flags may load from another file."""
    tags = tags_for_prompt(metadata)
    for name, _, weight in adapters_of(metadata):
        if not is_weight(weight) and name not in tags:
            yield f"the weight of its adapter {name} is {weight}, and --lora takes one number"
        elif revision := table_in(metadata, "adapters").get(name, {}).get("revision"):
            yield f"its adapter {name} is of the revision {revision}, and --lora takes the newest"
    for name, source in _words(metadata):
        if name.lower() != Path(source).stem.lower() and not name.startswith("<"):
            yield f"the word of its embedding {source} was {name}, and --embedding takes the word in the file"


def _words(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each textual inversion with its file; older images hold the file alone."""
    for name, entry in table_in(metadata, "embeddings").items():
        yield name, str(entry.get("file") if isinstance(entry, dict) else entry)


def is_weight(value: Any) -> bool:
    """Return whether a weight is one number, not a table of them."""
    return isinstance(value, int | float)


def _prompts(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [prompt for prompt in list_in(metadata, "image_prompts") if isinstance(prompt, dict)]


def _flag(name: str, value: Any) -> list[str]:
    """Return a flag with its value; nothing for None."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    return [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
