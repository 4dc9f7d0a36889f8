"""``canvax sheet``: a grid over one or two settings, as one image with labels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from PIL import Image

from canvax.call import Call
from canvax.cli.generate import (
    Destination,
    check_against_model,
    check_batch_size,
    description,
    generate_all,
    load_model,
)
from canvax.cli.images import ALIASES, SETTINGS, gather, sized
from canvax.cli.preview import previews
from canvax.cli.terminal import complain, say, seconds
from canvax.errors import NO_VALUE, InputError, nearest
from canvax.images.formats import new_image
from canvax.images.grid import make_sheet
from canvax.noise import check_seed
from canvax.settings import plain_value

MOST = 400
"""The largest number of images on a sheet."""


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
        known = ["prompt", *SETTINGS]
        if name not in known or name == "num_images_per_prompt":
            raise InputError(
                argument, text, f"begins with {label!r}, which is not a setting", nearest(name, [*known, *ALIASES])
            )
        cells = [value.strip() for value in values.split(";" if ";" in values else ",")]
        if not equals or not all(cells):
            raise InputError(argument, text, "has no values", "write them behind =, such as steps=10,20,40")
        return cls(name, label.strip(), [_value(name, cell) for cell in cells])

    def labels(self) -> list[str]:
        """Return the label of each row or column."""
        return [str(value) if self.name in ("prompt", "sampler") else f"{self.label} {value}" for value in self.values]


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Generate the images and put them on one sheet."""
    axes = [Axis.of(flag, text) for flag, text in (("x", arguments.x), ("y", arguments.y)) if text is not None]
    if not axes:
        raise InputError("no axis; try: canvax sheet \"a cat\" --x steps=10,20,40 --y sampler='Euler,DPM++ 2M'")
    if len({axis.name for axis in axes}) < len(axes):
        raise InputError("y", axes[0].name, "is the setting of --x as well", "give two settings, or one")
    if arguments.distributed or (arguments.num_images_per_prompt or 1) > 1 or arguments.grid:
        raise InputError("--distributed, --num-images and --grid do not go with a sheet; leave them out")
    for axis in axes:  # a prompt beside an axis of prompts is what the usage has
        if axis.name != "prompt" and getattr(arguments, axis.name, None) not in (None, [], False):
            raise InputError(axis.name, NO_VALUE, "is given as a flag and along an axis", "leave out the flag")
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
    calls, source = gather(arguments, [{"seed": seed} | cell for cell in cells])
    _check_sizes(calls, axes)
    where = Destination.checked(arguments, calls[:1])
    check_batch_size(arguments.batch_size)
    preview = None if arguments.preview is None else new_image("preview", arguments.preview)
    check_against_model(arguments, calls, source)
    pipe = load_model(arguments, source, calls)
    report |= description(pipe) | {"files": [], "compilations": 0, "metadata": []}
    total, made = 0.0, dict[int, tuple[Image.Image, Mapping[str, Any]]]()
    calls = sized(calls, pipe.model)
    _check_sizes(calls, axes)
    try:
        with previews(pipe, preview) as callback:
            for batch, result in generate_all(pipe, calls, arguments, callback):
                report["compilations"] += result.compilations
                total += result.timings["total"]
                made |= zip(map(id, batch), zip(result.images, result.metadata, strict=True), strict=False)
    finally:  # an interrupted sheet has white cells
        if made:
            size = next(iter(made.values()))[0].size
            ordered = [made.get(id(call), (Image.new("RGB", size, "white"), {})) for call in calls]
            report["metadata"] = [metadata for _, metadata in ordered if metadata]
            sheet = make_sheet([image for image, _ in ordered], across.labels(), down.labels() if down else [])
            path = where.save(sheet, {"grid": report["metadata"], "seed": seed})
            report["files"].append(str(path))
            if not arguments.json:
                say(str(path))
    if not arguments.quiet:
        complain(f"{len(calls)} images in {seconds(total)}; programs compiled: {report['compilations']}")


def _check_sizes(calls: Sequence[Call], axes: Sequence[Axis]) -> None:
    """Refuse cells of different sizes, as far as these are known; calls are row by row."""
    sizes = [(call.height, call.width, call.options.hires) for call in calls]
    if len({*sizes}) > 1:
        axis = axes[0] if len({*sizes[: len(axes[0].values)]}) > 1 else axes[1]
        raise InputError(axis.name, NO_VALUE, "makes images of different sizes along an axis", "make a sheet for each")


def _value(name: str, text: str) -> Any:
    """Return a number where the text is a number; prompts and samplers stay text."""
    if name in ("prompt", "negative_prompt", "sampler"):
        return text
    value = plain_value(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text
