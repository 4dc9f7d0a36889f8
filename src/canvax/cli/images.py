"""Make a checked call of each image that a command line asks for, before any model is opened."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.call import ZERO_SNR, Call, FromFiles, Load
from canvax.cli.adapters import split_weight
from canvax.cli.again import (
    OF_MODEL,
    adapters_of,
    is_lora_here,
    is_lost,
    is_weight,
    layer_of,
    losses,
    lost_model,
    other_file,
    recorded_model,
    recorded_part,
    tags_for_prompt,
    vae_lost,
)
from canvax.cli.loading import check_ip_adapters, load_of
from canvax.cli.terminal import complain
from canvax.errors import InputError, nearest
from canvax.images.inputs import fingerprint, read_images
from canvax.models.clip import clip_configs
from canvax.noise import check_seed, image_seeds
from canvax.pipelines.again import CALL, compared, left_out, recorded, settings_of, skipped
from canvax.pipelines.checks import FITS_ALL, SIZE_STEP, check_prompts, check_size
from canvax.pipelines.control import size_of
from canvax.pipelines.options import Options
from canvax.pipelines.references import check_references, read_references
from canvax.pipelines.request import check_init_images, is_alone
from canvax.prompts.grammar import fragments
from canvax.samplers import Scheduler, build_table, find, from_scheduler_config
from canvax.scale.named_images import (
    control_files,
    control_marks,
    named_control,
    named_prompts,
    prompt_files,
    prompt_marks,
    structure,
)
from canvax.scale.rows import check_prompt_line, json_object, text_lines
from canvax.scale.work import call_of, check_references_of, grouped
from canvax.settings import aliases, declared, offered
from canvax.weights.data_folder import embedding_files, stem_of, usual_syntax

if TYPE_CHECKING:
    from canvax.families.base import Model

OPTIONS = tuple(offered(Options, "command"))
SETTINGS = (*(name for name in offered(Call, "command") if name != "prompt"), *declared(FromFiles), *OPTIONS)
"""Settings of an image, in addition to its prompt, that flags, prompt files and PNG metadata may have."""

_MAX_PROMPT_FILE = 64 << 20

_OF_ALL = {"model", "mesh", "batch_size", "output", "lora", "embedding", "controlnet", "ip_adapter", *OF_MODEL}
"""Flags of a whole command, which a line of a prompt file cannot set."""
ALIASES = {also: name for also, name in aliases(Call, FromFiles, Options).items() if also not in _OF_ALL}


def shared(call: Call) -> tuple[Any, ...]:
    """Return the settings that images of one batch share. SDXL distinguishes no negative prompt from an empty one."""
    settings = (call.height, call.width, call.num_inference_steps, call.guidance_scale, call.sampler, call.options)
    absent = (call.negative_prompt is None, call.image is None, call.mask is None)
    return *settings, *absent, call.strength, *structure(call)


def gather(arguments: argparse.Namespace, cells: Sequence[Mapping[str, Any]] = ()) -> tuple[list[Call], Load]:
    """Return a call for each image, and how to load the model, that the command line asks for.

    Settings come from ``--from-image``; flags override them, and a line of the prompt file overrides the flags.
    Image i uses seed + i, unless its line has a seed. With ``cells`` there is an image for each cell, whose settings
    override all others.

    Raises:
        InputError: a setting is wrong, or there is no prompt.
    """
    base: dict[str, Any] = {}
    load = load_of(arguments)
    check_ip_adapters(arguments)
    entries: list[tuple[str, dict[str, Any]]] = [
        ("", {"prompt": prompt}) for prompt in (*arguments.prompts, *arguments.prompt)
    ]
    if arguments.prompt_file is not None:
        entries += read_prompt_file(arguments.prompt_file)
    if arguments.from_image is not None:
        base, load = _from_image(arguments)
        entries = entries or [("", {"prompt": base.get("prompt", "")})]
    if not entries:
        cells_of = " --x steps=10,20" if arguments.command == "sheet" else ""
        raise InputError(f'no prompt; try: canvax {arguments.command} "a red apple"{cells_of}')
    if cells:
        entries = [(where, {**entry, **cell}) for where, entry in entries for cell in cells]
    flags = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    settings = {**{name: base[name] for name in SETTINGS if base.get(name) is not None}, **flags}
    calls = list(_calls(entries, settings, len(arguments.ip_adapter or ())))
    for call, *_ in grouped(calls, shared):
        check_table(call, None)
    return calls, load


def _calls(entries: Sequence[tuple[str, dict[str, Any]]], flags: Mapping[str, Any], adapters: int) -> Iterator[Call]:
    first = check_seed(flags.get("seed"))
    index, sizes = 0, dict[Any, tuple[Any, Any]]()
    for where, entry in entries:
        try:
            settings = {**flags, **entry}
            call, count = call_of(settings, adapters), settings.get("num_images_per_prompt", 1)
            check_prompts(call.prompt, call.negative_prompt, count)
            seeds = image_seeds(entry["seed"] if "seed" in entry else (first + index) % 2**64, count)
            height, width = (None if value is None else check_size(name, value, 0)
                             for name, value in (("height", call.height), ("width", call.width)))  # fmt: skip
            prompt_files(call.image_prompt)
            images = (call.image, call.mask, call.strength, height, width, call.options, call.control)
            if images not in sizes:  # each file is read once
                if is_alone(call, call.options):  # the model decides its size: see ``sized``
                    read_references(call.image, "reference")
                    source = None
                else:
                    check_references_of(call)
                    source = check_init_images(*images[:3], (height, width), 1, SIZE_STEP, call.options)
                fits = source is None or source.boxes or all(side % FITS_ALL == 0 for side in source.size)
                sizes[images] = source.size if source and fits and not source.boxes else (height, width)
                if call.control:  # each is read here, before anything is loaded
                    read = control_files(call.control)
                    size = size_of(read, (height, width), SIZE_STEP) if read else (height, width)
                    sizes[images] = sizes[images] if call.image is not None else size
            if call.sampler is not None and find(call.sampler)[0].name == "ddim_inverse":
                problem = "goes from an image to its noise, which no file stores"
                raise InputError("sampler", problem, cure="in Python, pass latents=result.latents", value=call.sampler)
        except InputError as error:
            if not where:
                raise
            raise InputError(f"{where}{error}") from None
        call = dataclasses.replace(call, height=sizes[images][0], width=sizes[images][1])
        yield from (dataclasses.replace(call, seed=seed) for seed in seeds)
        index += count


def sized(calls: Sequence[Call], model: Model) -> list[Call]:
    """Return the calls with the sizes that the model gives their images.

    Raises:
        InputError: an image cannot be used.
    """
    known: dict[Any, tuple[Any, Any]] = {}
    edits = model.networks.denoiser.facts.edits
    resized = []
    for call in calls:
        alone, asked = is_alone(call, call.options), (call.height, call.width)
        if alone or (call.image is not None and None in asked and call.options.padding_mask_crop is None):
            key = call.image, call.mask, call.strength, *asked, call.options
            if key not in known and alone and edits:
                height, width = check_references(call.image, model.networks, "reference").sizes[0]
                known[key] = call.height or height, call.width or width
            elif key not in known:
                check_references_of(call, model)
                step, native = model.networks.size_step, model.native_size
                source = check_init_images(*key[:3], asked, 1, step, call.options, native=native)
                assert source is not None
                known[key] = source.size
            call = dataclasses.replace(call, height=known[key][0], width=known[key][1])
        resized.append(call)
    return resized


def in_usual_syntax(calls: Sequence[Call], model: Model, arguments: argparse.Namespace) -> Sequence[Call]:
    """Return the calls with the prompt syntax of the program whose folder the folder of models is, and say so.

    Calls stay as they are for a model that reads no weights, and where a flag, a line of the prompt file or an image
    says the syntax.
    """
    syntax = usual_syntax()
    chosen = arguments.prompt_syntax or arguments.from_image or syntax == "plain"
    if chosen or any(call.options.prompt_syntax != "plain" for call in calls) or not clip_configs(model.text):
        return calls
    texts = [text for call in calls for text in (call.prompt, call.negative_prompt) if text]
    if any(fragments(text, syntax) != fragments(text, "plain") for text in texts) and not arguments.quiet:
        program = {"a1111": "A1111", "comfy": "ComfyUI"}[syntax]
        complain(f"brackets in prompts are read as {program} reads them; --prompt-syntax plain reads them as text")
    return [
        dataclasses.replace(call, options=dataclasses.replace(call.options, prompt_syntax=syntax)) for call in calls
    ]


def check_table(call: Call, scheduler: Scheduler | None) -> None:
    """Refuse settings that no sampler table can be built from: sampler, steps, spacing, sigmas, eta.

    Args:
        call: for one image.
        scheduler: the model's; None if the model is not on disk yet. Then checks that need it are left out.

    Raises:
        InputError: a setting cannot be used.
    """
    options, sampler, known = call.options, call.sampler, scheduler is not None
    settings = options.settings if sampler is not None or known else None
    if scheduler is not None and scheduler.schedule.size_shift:
        settings = {"mu": 1.0, **options.settings}  # whatever the size of the image
    if scheduler is None:
        scheduler = from_scheduler_config({"_class_name": "EulerAncestralDiscreteScheduler"})
    build_table(
        scheduler,
        (options.listed_steps or 1) if call.num_inference_steps is None else call.num_inference_steps,
        sampler=sampler,
        eta=options.eta,
        spacing=options.spacing,
        sigmas=options.sigmas,
        guidance=options.guidance_steps or 1.0,
        rescale=options.guidance_rescale,
        guidance_interval=options.guidance_interval,
        unguided_noise=options.unguided_noise,
        settings=settings,
    )


def read_prompt_file(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings of each line of a prompt file, with the place of the line for error messages.

    Raises:
        InputError: the file cannot be read, or a line is malformed.
    """
    if name == "-" and sys.stdin is None:
        raise InputError("prompt_file", "is standard input, which is closed", cure="name a file", value=name)
    entries = []
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
            data = file.read(_MAX_PROMPT_FILE + 1)
        if len(data) > _MAX_PROMPT_FILE:
            raise InputError("prompt_file", f"is longer than {_MAX_PROMPT_FILE} bytes", cure="split it", value=name)
        for number, line in text_lines(TextIOWrapper(BytesIO(data), "utf-8-sig", newline=""), name):
            if not line.startswith("#"):
                where = f"{name}, line {number}: "
                check_prompt_line(where, line)
                entries.append((where, _entry(where, line) if line.startswith("{") else {"prompt": line}))
    except OSError as error:
        raise InputError("prompt_file", f"cannot be read ({error.strerror})", value=name) from None
    except UnicodeDecodeError:
        raise InputError("prompt_file", "is not UTF-8 text", cure="save it as UTF-8", value=name) from None
    if not entries:
        raise InputError("prompt_file", "holds no prompt", cure="write one a line", value=name)
    return entries


def _entry(where: str, line: str) -> dict[str, Any]:
    """Return the settings of a line of JSON, by canvax's names."""
    if isinstance(fields := json_object(line), InputError):
        raise InputError(f"{where}{fields}; put text before {{ if it is a prompt")
    names = [ALIASES.get(name, name) for name, value in fields.items() if value is not None]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{where}{name} is given under two names; give it once")
        if name != "prompt" and name not in SETTINGS:
            flag = f"it is one for all images: --{name.replace('_', '-')}" if name in _OF_ALL else ""
            hint = flag or nearest(name, ["prompt", *SETTINGS, *ALIASES])
            raise InputError(f"{where}unknown field {name!r}; {hint}")
    return dict(zip(names, (value for value in fields.values() if value is not None), strict=True))


def _from_image(arguments: argparse.Namespace) -> tuple[dict[str, Any], Load]:
    """Return the settings in the metadata of an image, and how to load its model unless flags name another."""
    metadata, where = recorded(arguments.from_image)
    # A file must not choose which others are read.
    settings = {name: value for name, value in settings_of(metadata).items() if name in CALL or name in OPTIONS}
    here = {
        name: f"{file}:{weight}"
        for name, file, weight in adapters_of(metadata)
        if is_weight(weight) and is_lora_here(file)
    }
    named = {_lora_name(text) for text in arguments.lora}
    if loras := [lora for lora in here.values() if _lora_name(lora) not in named]:
        arguments.lora = [*arguments.lora, *loras]
        complain(f"{where}: was generated with --lora {' --lora '.join(loras)}, which is loaded")
    if not (arguments.prompts or arguments.prompt or arguments.prompt_file):
        tags = {
            name: tag
            for name, tag in tags_for_prompt(metadata).items()
            if not any(f":{other}:" in tag for other in named)
        }
        here |= tags
        settings["prompt"] = " ".join([settings.get("prompt") or "", *tags.values()]).lstrip()
    if unknown := [text for text in left_out(metadata) if text not in here]:
        complain(f"{where}: settings that cannot be read are left out: {', '.join(unknown)}", label="warning: ")
    lost = lost_model(metadata) if is_lost(metadata) and not arguments.model else ""
    try:
        for hint in compared(metadata, _marks(metadata, arguments), where):
            complain(hint.format(arguments.write), label="warning: ")
    except InputError as error:
        cure = f"{error.cure}, and your copy of the model with --model: the image {lost}"
        raise InputError(error.argument, error.problem, cure=cure) if lost and error.argument else error from None
    words = {word for word in map(str, metadata.get("embeddings") or ()) if word.lower() not in embedding_files()}
    used = {*map(str, metadata.get("adapters") or ()), *words} - here.keys()
    if used and not (named or arguments.embedding):
        complain(
            f"{where}: was generated with {', '.join(sorted(used))[:200]}; name the files with --lora and --embedding",
            label="warning: ",
        )
    past = {"model": recorded_model(metadata)} | {name: recorded_part(metadata, name) for name in OF_MODEL}
    model = arguments.model or past["model"]
    for clause in [*losses(metadata), *([] if arguments.vae else vae_lost(metadata)), *other_file(metadata, model)]:
        complain(f"{where}: {clause}", label="warning: ")
    if lost:
        raise InputError(f"{where}: {lost}; name your copy of it with --model")
    if arguments.model and arguments.model != past["model"]:
        past["revision"] = past["variant"] = None
    parts: dict[str, Any] = {name: getattr(arguments, name) or past[name] for name in OF_MODEL}
    if "canvax" in metadata and metadata.get("scheduler") == ZERO_SNR:
        parts["scheduler"] = ZERO_SNR
    load = load_of(arguments, model=model or "emoji", **parts)
    if "clip_skip" in settings:
        settings["clip_skip"] = skipped(metadata, layer_of(metadata, load) or 1)
    return settings, load


def _lora_name(text: str) -> str:
    """Return the name of the file in a ``--lora``."""
    return Path(stem_of(split_weight(text)[0])).name


def _marks(metadata: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how the metadata of a new image would identify the images that flags name."""
    named, marks = vars(arguments), dict[str, Any]()

    def mark(name: str, file: str) -> str:
        return fingerprint(read_images(name, file, 1, grey=name == "mask")[0])

    for name in ("image", "mask"):
        marks |= {f"{name}_sha256": mark(name, file)} if (file := named[name]) is not None else {}
    files = [*([named["image"]] if named["image"] else []), *(named["reference"] or [])]
    if "references_sha256" in metadata:
        marks["references_sha256"] = [mark("image", file) for file in files]
    if "control_sha256" in metadata:
        marks["control_sha256"] = control_marks(named_control(named))
    if "image_prompts" in metadata:
        marks["image_prompts"] = prompt_marks(named_prompts(named, len(named["ip_adapter"] or ())))
    return marks
