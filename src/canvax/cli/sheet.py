"""``canvax sheet``: a grid over one or two settings, as one image with labels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from PIL import Image

from canvax.call import Call, Load
from canvax.cli.generate import (
    Destination,
    check_against_model,
    check_batch_size,
    description,
    generate_all,
    load_model,
)
from canvax.cli.images import ALIASES, SETTINGS, gather, in_usual_syntax, sized
from canvax.cli.plan import parse_size
from canvax.cli.preview import previews
from canvax.cli.terminal import complain, say, seconds
from canvax.errors import InputError, nearest
from canvax.images.formats import new_image
from canvax.images.grid import make_sheet
from canvax.noise import check_seed
from canvax.settings import plain_value

if TYPE_CHECKING:
    from canvax.pipelines.pipeline import Pipeline

MOST = 400
"""The largest number of images on a sheet."""

OF_LOAD, LORA = ("model", "vae"), "lora"
"""Axes that are no settings of an image: the model, its VAE, and the weight of a LoRA."""

SIZE = "size"
"""The axis of width and height."""

_TEXTS = ("prompt", "negative_prompt", "sampler", *OF_LOAD)


@dataclass(frozen=True)
class Axis:
    """A setting and its values along one side of the sheet."""

    name: str
    label: str
    values: list[Any]

    @classmethod
    def of(cls, argument: str, text: str) -> Self:
        """Read ``steps=10,20``; a text with a semicolon has its values between semicolons.

        Raises:
            InputError: the text is not a setting with values.
        """
        label, equals, values = text.partition("=")
        name = label.strip().lower().replace("-", "_")
        name = ALIASES.get(name, name)
        known = ["prompt", SIZE, *OF_LOAD, LORA, *SETTINGS]
        if name not in known or name == "num_images_per_prompt":
            raise InputError(
                argument,
                f"begins with {label!r}, which is not a setting",
                cure=nearest(name, [*known, *ALIASES]),
                value=text,
            )
        cells = [value.strip() for value in values.split(";" if ";" in values else ",")]
        if not equals or not all(cells):
            raise InputError(argument, "has no values", cure="write them behind =, such as steps=10,20,40", value=text)
        return cls(name, label.strip(), [_value(name, cell) for cell in cells])

    def labels(self) -> list[str]:
        """Return the label of each row or column."""
        return [str(value) if self.name in _TEXTS else f"{self.label} {value}" for value in self.values]


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Generate the images and put them on one sheet."""
    axes = [Axis.of(flag, text) for flag, text in (("x", arguments.x), ("y", arguments.y)) if text is not None]
    if not axes:
        raise InputError("no axis; try: canvax sheet \"a cat\" --x steps=10,20,40 --y sampler='Euler,DPM++ 2M'")
    if len({axis.name for axis in axes}) < len(axes):
        raise InputError("y", "is the setting of --x as well", cure="give two settings, or one", value=axes[0].name)
    if arguments.distributed or (arguments.num_images_per_prompt or 1) > 1 or arguments.grid:
        raise InputError("--distributed, --num-images and --grid do not go with a sheet; leave them out")
    for axis in axes:  # a prompt may come with an axis of prompts; the LoRA is the one of the weights
        if axis.name == LORA and len(arguments.lora) != 1:
            raise InputError(LORA, "is not given once, and the axis is of its weights", cure="give one")
        if axis.name not in ("prompt", LORA) and getattr(arguments, axis.name, None) not in (None, [], False):
            raise InputError(axis.name, "is given as a flag and along an axis", cure="leave out the flag")
    across, down = axes[0], axes[1] if len(axes) > 1 else None
    cells = [{across.name: x} | ({down.name: y} if down else {}) for y in (down.values if down else [None])
             for x in across.values]  # fmt: skip
    if len(cells) > MOST:
        raise InputError(f"a sheet of {len(cells)} images is more than {MOST}; give fewer values")
    if len(arguments.prompts) + len(arguments.prompt) > 1 or arguments.prompt_file is not None:
        raise InputError("a sheet has one prompt; write --y prompt='a cat;a dog' for several")
    if "prompt" in cells[0] and not arguments.prompts + arguments.prompt:
        arguments.prompts = [cells[0]["prompt"]]
    seed = check_seed(arguments.seed)
    check_batch_size(arguments.batch_size)
    preview = None if arguments.preview is None else new_image("preview", arguments.preview)
    loads = _loads(arguments, [{"seed": seed} | cell for cell in cells])
    where = Destination.checked(arguments, loads[0].calls[:1])
    for part in loads:
        check_against_model(part.calls, part.load)
    report |= {"files": [], "compilations": 0, "metadata": []}
    total, made = 0.0, dict[int, tuple[Image.Image, Mapping[str, Any]]]()
    try:
        for part in loads:
            for places, calls, pipe in part.run():
                report |= description(pipe)
                at = dict(zip(map(id, calls), places, strict=True))
                with previews(pipe, preview) as callback:
                    for batch, result in generate_all(pipe, calls, part.arguments, callback):
                        report["compilations"] += result.compilations
                        total += result.timings["total"]
                        drawn = zip(result.images, result.metadata, strict=True)
                        made |= zip((at[id(call)] for call in batch), drawn, strict=False)
            pipe = None  # free before the next one is loaded
    finally:  # an interrupted sheet has white cells
        if made:
            images = [made[i][0] if i in made else None for i in range(len(cells))]
            report["metadata"] = [made[i][1] for i in sorted(made)]
            sheet = make_sheet(images, across.labels(), down.labels() if down else [])
            path = where.save(sheet, {"grid": report["metadata"], "seed": seed})
            report["files"].append(str(path))
            if not arguments.json:
                say(str(path))
    if not arguments.quiet:
        complain(f"{len(cells)} images in {seconds(total)}; programs compiled: {report['compilations']}")


@dataclass(frozen=True)
class Cells:
    """The cells of one model and VAE.

    Attributes:
        arguments: arguments of the command, with this model and VAE.
        load: arguments for loading the model.
        cells: number of each cell, and the weight of the LoRA if that varies.
        calls: the call of each cell.
    """

    arguments: argparse.Namespace
    load: Load
    cells: list[tuple[int, float | None]]
    calls: list[Call]

    def run(self) -> Iterator[tuple[list[int], list[Call], Pipeline]]:
        """Load the model, and yield the cells and the calls of each weight of the LoRA."""
        pipe = load_model(self.arguments, self.load, self.calls)
        calls = in_usual_syntax(sized(self.calls, pipe.model), pipe.model, self.arguments)
        for weight in dict.fromkeys(weight for _, weight in self.cells):
            if weight is not None:
                pipe.adapters.set(dict.fromkeys(pipe.adapters, weight))
            same = [(i, call) for (i, other), call in zip(self.cells, calls, strict=True) if other == weight]
            yield [i for i, _ in same], [call for _, call in same], pipe


def _loads(arguments: argparse.Namespace, cells: Sequence[Mapping[str, Any]]) -> list[Cells]:
    """Return the cells by model and VAE, so that each is loaded once."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, cell in enumerate(cells):
        groups.setdefault(tuple((name, cell[name]) for name in OF_LOAD if name in cell), []).append(i)
    loads = []
    for named, places in groups.items():
        chosen = argparse.Namespace(**vars(arguments) | dict(named))
        calls, load = gather(chosen, [_settings(cells[i]) for i in places])
        loads.append(Cells(chosen, load, [(i, cells[i].get(LORA)) for i in places], calls))
    return loads


def _settings(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an image in a cell."""
    settings = {name: value for name, value in cell.items() if name not in (SIZE, LORA, *OF_LOAD)}
    if SIZE not in cell:
        return settings
    width, height = parse_size(cell[SIZE])
    return {**settings, "width": width, "height": height}


def _value(name: str, text: str) -> Any:
    """Return a number where the text is a number; prompts and samplers stay text."""
    if name == SIZE:
        parse_size(text)
    if name in _TEXTS or name == SIZE:
        return text
    value = plain_value(text)
    if name == LORA and not isinstance(value, int | float):
        raise InputError(LORA, "is no weight", cure="write lora=0,0.5,1 along the axis", value=text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text
