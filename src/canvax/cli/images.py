"""One checked record for each image that was asked for, made before any model is opened."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.call import Call, FromFiles
from canvax.cli.generate_arguments import networks_of
from canvax.cli.image_prompts import check_same
from canvax.cli.terminal import complain
from canvax.errors import InputError, check_utf8, nearest
from canvax.files import once
from canvax.images.given import fingerprint, read_images
from canvax.images.metadata import check_kinds, read_metadata
from canvax.noise import check_seed, image_seeds
from canvax.pipelines.checks import SIZE_STEP, check_guidance, check_prompts, check_size
from canvax.pipelines.control import ControlEntry, control_argument, control_files, control_marks, control_of, size_of
from canvax.pipelines.image_prompts import (
    FilePrompt,
    image_prompt_argument,
    image_prompts_of,
    read_all,
    structure,
)
from canvax.pipelines.options import Options
from canvax.pipelines.request import check_given
from canvax.pipelines.texts import TAG
from canvax.samplers import Scheduler, build_table, find, from_scheduler_config
from canvax.scale.rows import check_prompt_line
from canvax.settings import aliases, check_setting, declared, offered
from canvax.weights.location import BUNDLED

if TYPE_CHECKING:
    from canvax.families.base import Model
    from canvax.pipelines.request import Request

OPTIONS = tuple(offered(Options, "command"))
SETTINGS = (*(name for name in offered(Call, "command") if name != "prompt"), *declared(FromFiles), *OPTIONS)
"""What flags, prompt files and PNG metadata may set for an image besides its prompt."""

ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
"""What ``--zero-snr`` says of a model's schedule."""

_MAX_PROMPT_FILE = 64 << 20

OF_MODEL = ("revision", "variant", "dtype", "quantize", "vae", "prediction_type")
"""What the metadata of an image holds about its model besides the name: fields of ``Source``."""
_OF_ALL = {"model", "mesh", "batch_size", "output", "lora", "embedding", "controlnet", "ip_adapter", *OF_MODEL}
"""What flags say of a whole command, and a line of a prompt file cannot."""
ALIASES = {also: name for also, name in aliases(Call, FromFiles, Options).items() if also not in _OF_ALL}

_RECORDED = {"prompt", "model", "scheduler", "canvax", "sampler_label", "noise", "steps_run", "other", "nsfw"}
_RECORDED |= {"controlnet", "ip_adapter", "adapters", "embeddings", "image_sha256", "mask_sha256", "control_sha256"}
_RECORDED |= {"references_sha256"}
_RECORDED |= {"image_prompts", "options", "upscale", "id", *OF_MODEL, *SETTINGS}
"""All that metadata of canvax holds about an image."""


@dataclass(frozen=True)
class ImageRequest:
    """One image to generate; None stands for the model's default."""

    prompt: str
    negative: str | None
    seed: int
    height: int | None
    width: int | None
    steps: int | None
    guidance: float | None
    sampler: str | None
    options: Options
    image: str | None = None
    mask: str | None = None
    strength: float | None = None
    adapters: tuple[Any, ...] = ()
    """That the prompt names, where such names are read."""
    control: ControlEntry = ()
    image_prompts: tuple[FilePrompt, ...] = ()

    @property
    def shared(self) -> tuple[Any, ...]:
        """What images of one call must have in common. SDXL treats no negative prompt unlike an empty one."""
        size, inputs = (self.height, self.width), (self.image is None, self.mask is None, self.strength)
        inputs = (*inputs, tuple(one is None for one in self.control), structure(self.image_prompts))
        key = (self.options, self.negative is None, *inputs, self.adapters)
        return *size, self.steps, self.guidance, self.sampler, *key

    def checked(self, model: Model) -> Request:
        """The call of a pipeline that generates this image alone."""
        from canvax.pipelines.request import Call, make_request

        call = Call(
            self.prompt, self.negative, self.height, self.width, self.steps, self.guidance, seed=self.seed,
            sampler=self.sampler, options=self.options, image=self.image, mask=self.mask, strength=self.strength,
            control=control_argument([self.control]), image_prompt=image_prompt_argument([self.image_prompts]),
        )  # fmt: skip
        return make_request(model, call)


@dataclass(frozen=True)
class Source:
    """Which model to load."""

    model: str
    revision: str | None
    variant: str | None
    dtype: str | None
    quantize: str | None
    vae: str | None = None
    prediction_type: str | None = None
    zero_snr: bool = False
    controlnet: tuple[str, ...] = ()
    ip_adapter: tuple[str, ...] = ()
    ip_encoder: str | None = None


def source_of(arguments: argparse.Namespace) -> Source:
    """The model that flags name."""
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in OF_MODEL}
    return Source(arguments.model or "emoji", **settings, **networks_of(arguments), zero_snr=arguments.zero_snr)


def gather(arguments: argparse.Namespace, cells: Sequence[Mapping[str, Any]] = ()) -> tuple[list[ImageRequest], Source]:
    """The images and the model that the command line asks for.

    Settings come from ``--from-image``; flags override them, and a line of the prompt file overrides the flags.
    Image i uses seed + i, unless its line has a seed of its own. With ``cells`` there is an image for each, with the
    settings of the cell above all others.

    Raises:
        InputError: a setting is wrong, or there is no prompt.
    """
    base: dict[str, Any] = {}
    source = source_of(arguments)
    entries: list[tuple[str, dict[str, Any]]] = [
        ("", {"prompt": prompt}) for prompt in (*arguments.prompts, *arguments.prompt)
    ]
    if arguments.prompt_file is not None:
        entries += read_prompt_file(arguments.prompt_file)
    if arguments.from_image is not None:
        base, source = _from_image(arguments)
        entries = entries or [("", {"prompt": base.get("prompt", "")})]
    zero_snr = source.zero_snr or arguments.zero_snr
    source = dataclasses.replace(source, **networks_of(arguments), zero_snr=zero_snr)
    if not entries:
        cells_of = " --x steps=10,20" if arguments.command == "sheet" else ""
        raise InputError(f'no prompt; try: canvax {arguments.command} "a red apple"{cells_of}')
    if cells:
        entries = [(where, {**entry, **cell}) for where, entry in entries for cell in cells]
    flags = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    shared = {**{name: base[name] for name in SETTINGS if base.get(name) is not None}, **flags}
    requests = list(_requests(entries, shared, len(source.ip_adapter)))
    if arguments.lora_dir is not None:
        requests = [dataclasses.replace(one, adapters=tuple(TAG.findall(one.prompt))) for one in requests]
    for request in without_prompts(requests):
        check_table(request, None)
    return requests, source


def without_prompts(requests: Sequence[ImageRequest]) -> list[ImageRequest]:
    """The distinct settings of the requests: each once, without its prompt and seed."""
    return list(dict.fromkeys(dataclasses.replace(request, prompt="", negative="", seed=0) for request in requests))


def _requests(
    entries: Sequence[tuple[str, dict[str, Any]]], shared: Mapping[str, Any], adapters: int
) -> Iterator[ImageRequest]:
    first = check_seed(shared.get("seed"))
    index, sizes = 0, dict[Any, tuple[Any, Any]]()
    for where, entry in entries:
        try:
            settings = {**shared, **entry}
            count = settings.get("num_images_per_prompt", 1)
            prompts, negatives = check_prompts(_text(settings, "prompt"), _text(settings, "negative_prompt"), count)
            seeds = (
                image_seeds(entry["seed"], count) if "seed" in entry else image_seeds((first + index) % 2**64, count)
            )
            for name in ("prompt_2", "negative_prompt_2"):
                _text(settings, name)
            options = Options(**{name: settings[name] for name in OPTIONS if name in settings})
            height, width = (None if name not in settings else check_size(name, settings[name], 0)
                             for name in ("height", "width"))  # fmt: skip
            image, mask, strength = _text(settings, "image"), _text(settings, "mask"), settings.get("strength")
            control, prompted = control_of(settings), image_prompts_of(settings, adapters)
            read_all(prompted)
            checked = (image, mask, strength, height, width, options, control)
            if checked not in sizes:  # each file is read once
                source = check_given(image, mask, strength, (height, width), 1, SIZE_STEP, options)
                sizes[checked] = (height, width) if source is None or source.boxes else source.size
                if control:  # each is read here, before anything is loaded
                    read = control_files(control)
                    size = size_of(read, (height, width), SIZE_STEP) if read else (height, width)
                    sizes[checked] = sizes[checked] if image is not None else size
            height, width = sizes[checked]
            guidance = check_guidance(settings["guidance_scale"], 1.0) if "guidance_scale" in settings else None
            steps = check_setting(Call, "num_inference_steps", settings.get("num_inference_steps"))
            sampler = _text(settings, "sampler")
            if sampler is not None and find(sampler)[0].name == "ddim_inverse":
                raise InputError(
                    f"sampler={sampler!r} goes from an image to its noise, which no file stores; in Python, pass "
                    "latents=result.latents"
                )
        except InputError as error:
            if not where:
                raise
            raise InputError(f"{where}{error}") from None
        except TypeError as error:  # a JSON field of another type than a flag could have
            raise InputError(f"{where}a setting has the wrong type: {error}") from None
        none = settings.get("negative_prompt") is None
        for prompt, negative, seed in zip(prompts, negatives, seeds, strict=True):
            negative = None if none else negative
            settled = (height, width, steps, guidance, sampler, options, image, mask, strength)
            yield ImageRequest(prompt, negative, seed, *settled, control=control, image_prompts=prompted)
        index += count


def _text(settings: Mapping[str, Any], name: str) -> Any:
    """A prompt, or None. Raises InputError if it is not text that can be encoded as UTF-8."""
    value = settings.get(name)
    if isinstance(value, str):
        check_utf8(name, value)
    elif value is not None:
        raise InputError(f"{name}={value!r} is not text")
    return value


def check_table(request: ImageRequest, scheduler: Scheduler | None) -> None:
    """Refuse settings that no sampler table can be built from: sampler, steps, spacing, sigmas, eta.

    Args:
        request: the image that was asked for.
        scheduler: the model's; None if the model is not on disk yet. Then checks that need it are left out.

    Raises:
        InputError: naming the setting.
    """
    options, sampler, known = request.options, request.sampler, scheduler is not None
    settings = options.settings if sampler is not None or known else None
    if scheduler is not None and scheduler.schedule.size_shift:
        settings = {"mu": 1.0, **options.settings}  # whatever the size of the image
    if scheduler is None:
        scheduler = from_scheduler_config({"_class_name": "EulerAncestralDiscreteScheduler"})
    build_table(
        scheduler,
        (options.own_steps or 1) if request.steps is None else request.steps,
        sampler=sampler,
        eta=options.eta,
        spacing=options.spacing,
        sigmas=options.sigmas,
        guidance=options.guidance_steps or 1.0,
        rescale=options.guidance_rescale,
        guidance_interval=options.guidance_interval,
        settings=settings,
    )


def read_prompt_file(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The settings of each line of a prompt file, each with its place in the file for error messages.

    Raises:
        InputError: the file cannot be read, or a line is malformed.
    """
    try:
        if name == "-" and sys.stdin is None:
            raise InputError("--prompt-file -: there is no standard input; name a file")
        data = sys.stdin.buffer.read(_MAX_PROMPT_FILE + 1) if name == "-" else _content(name)
        if len(data) > _MAX_PROMPT_FILE:
            raise InputError(f"--prompt-file {name}: is longer than {_MAX_PROMPT_FILE} bytes; split it")
        if data[:4] in (b"\x89PNG", b"RIFF") or data[:2] == b"\xff\xd8":
            raise InputError(f"--prompt-file {name}: is an image; --image or --from-image reads it")
        if b"\0" in data:  # UTF-16 without a mark at its beginning, or no text at all
            raise InputError(f"--prompt-file {name}: has bytes of 0, so that it is not UTF-8 text; save it as UTF-8")
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except OSError as error:
        raise InputError(f"--prompt-file {name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"--prompt-file {name}: is not UTF-8 text; save it as UTF-8") from None
    entries = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            where = f"{name}, line {number}: "
            check_prompt_line(where, line)
            entries.append((where, _json_line(where, line) if line.startswith("{") else {"prompt": line}))
    if not entries:
        raise InputError(f"--prompt-file {name}: holds no prompt; write one a line")
    return entries


def _content(name: str) -> bytes:
    """The content of a prompt file, at most a byte more than the limit."""
    with open(name, "rb") as file:
        return file.read(_MAX_PROMPT_FILE + 1)


def _json_line(where: str, line: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        cure = "write all of it on one line" if line.strip() == "{" else "put text before { if it is a prompt"
        fault = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where}starts with {{ but is not a JSON object ({fault}); {cure}") from None
    entry = {ALIASES.get(name, name): value for name, value in fields.items() if value is not None}
    if len(entry) < sum(value is not None for value in fields.values()):
        names = [ALIASES.get(name, name) for name, value in fields.items() if value is not None]
        raise InputError(
            f"{where}{next(n for n in names if names.count(n) > 1)} is given under two names; give it once"
        )
    for name in entry:
        if name != "prompt" and name not in SETTINGS:
            flag = f"it is one for all images: --{name.replace('_', '-')}" if name in _OF_ALL else ""
            hint = flag or nearest(name, ["prompt", *SETTINGS, *ALIASES])
            raise InputError(f"{where}unknown field {name!r}; {hint}")
    if "prompt" not in entry:
        raise InputError(where + ("'prompt' is null; write a text" if "prompt" in fields else "has no field 'prompt'"))
    return entry


def _from_image(arguments: argparse.Namespace) -> tuple[dict[str, Any], Source]:
    """The settings in the metadata of an image, and its model unless flags name another."""
    path = Path(arguments.from_image)
    metadata = read_metadata(path)
    check_kinds(path, metadata)
    try:
        check_seed(metadata.get("seed"))
    except InputError as error:
        raise InputError(f"{path}: its {error}; name another with --seed, or take another image") from None
    if "grid" in metadata:
        raise InputError(f"{path}: is a grid of several images; use one of them (canvax info lists them)")
    options = metadata.get("options")
    settings = {**metadata, **(options if isinstance(options, dict) else {})}
    if unknown := sorted(map(repr, settings.keys() - _RECORDED)):
        complain(f"{path}: unknown settings are left out: {', '.join(unknown)}", label="warning: ")
    # A file must not choose which others are read.
    for name in ("num_images_per_prompt", "image", "mask", "control", "control_from", "ip_image", "ip_mask"):
        settings.pop(name, None)
    for name in ("image", "mask"):
        _check_same(path, metadata, name, getattr(arguments, name))
    used = {*map(str, metadata.get("adapters") or ()), *map(str, metadata.get("embeddings") or ())}
    if used and not (arguments.lora or arguments.embedding):
        complain(
            f"{path}: was generated with {', '.join(sorted(used))[:200]}; name the files with --lora and --embedding",
            label="warning: ",
        )
    _check_control(path, metadata, arguments)
    check_same(path, metadata, arguments)
    if metadata.get("noise") == "given":
        settings.pop("noise")
        complain(f"{path}: its initial noise was given as an array and is not in the file", label="warning: ")
    elif "noise" in metadata:
        settings["noise"] = metadata["noise"]
    by_canvax = "canvax" in metadata
    recorded = {"model": recorded_model(metadata)} | {
        name: metadata.get(name) if by_canvax else None for name in OF_MODEL
    }
    if not by_canvax:
        _warn_of_losses(path, metadata)
        if not (arguments.model or recorded["model"]):
            model = f"was generated with {metadata['model']!r}" if metadata.get("model") else "does not name its model"
            raise InputError(f"{path}: {model}; name your copy of it with --model")
        settings["negative_prompt"] = settings.get("negative_prompt") or None  # others write "" for none
    for name, value in recorded.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"{path}: its {name} {value!r} is not text; name it with a flag")
    if arguments.model and arguments.model != recorded["model"]:
        recorded["revision"] = recorded["variant"] = None
    model = arguments.model or recorded["model"] or "emoji"
    own_parts: dict[str, Any] = {name: getattr(arguments, name) or recorded[name] for name in OF_MODEL}
    scheduler = metadata.get("scheduler") if by_canvax else None
    if scheduler and scheduler != ZERO_SNR:
        complain(f"{path}: its scheduler {scheduler} is for Python: canvax.load(scheduler=...)", label="warning: ")
    return settings, Source(model, **own_parts, zero_snr=scheduler == ZERO_SNR)


def _check_same(path: Path, metadata: Mapping[str, Any], name: str, given: str | None) -> None:
    """Ask for the image that another began from, and say so if it is not that one."""
    if (wanted := metadata.get(f"{name}_sha256")) is None:
        return
    if given is None:
        raise InputError(f"{path}: it began from {'an image' if name == 'image' else 'a mask'}; name it with --{name}")
    if fingerprint(read_images(name, given, 1, grey=name == "mask")[0]) != wanted:
        complain(f"--{name} {given}: is not the one that {path} began from", label="warning: ")


def _check_control(path: Path, metadata: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Ask for the control images of another image and their networks, and say so if they are others."""
    if not isinstance(wanted := metadata.get("control_sha256"), list):
        return
    named = control_of(vars(arguments))
    if len(named) != len(wanted) or not arguments.controlnet:
        nets = metadata.get("controlnet")
        raise InputError(
            f"{path}: it was generated with control images; name each with --control and its network with --controlnet "
            f"(they were {', '.join(map(str, nets)) if isinstance(nets, list) else 'not named'})"
        )
    for one, given, mark in zip(named, control_marks(named), wanted, strict=True):
        if given != mark:
            complain(f"--control {one and one[0][1]}: is not the one of {path}", label="warning: ")


def recorded_model(metadata: Mapping[str, Any]) -> Any:
    """The model of an image as ``--model`` takes it, or None: other programs name a file without its folder."""
    model = metadata.get("model")
    return model or None if "canvax" in metadata or model in list(BUNDLED) else None


def _warn_of_losses(path: Path, metadata: Mapping[str, Any]) -> None:
    if isinstance(other := metadata.get("other"), dict) and other:
        left = ", ".join(f"{name}: {value!s:.80}" if value else str(name) for name, value in other.items())
        complain(f"{path}: settings that cannot be read are left out: {left}", label="warning: ")
