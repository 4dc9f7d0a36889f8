"""``canvax upscale``: makes an image larger, tile by tile, and prints the file name of the result."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.generate import Destination, description, load_model
from canvax.cli.images import OPTIONS, ImageRequest, source_of
from canvax.cli.terminal import complain, say, seconds
from canvax.errors import InputError
from canvax.images.given import read_images
from canvax.pipelines.control_images import OPTIONS as CONTROL_OPTIONS
from canvax.pipelines.options import Options


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Make the image larger; ``report`` is updated on the way."""
    settings = {name: value for name in OPTIONS if (value := getattr(arguments, name, None)) is not None}
    options = Options(**settings, progress=not arguments.quiet)
    if not arguments.controlnet and (given := sorted({*CONTROL_OPTIONS} & {*settings})):
        raise InputError(f"--{given[0].replace('_', '-')} without --controlnet: name the network that reads the tiles")
    read_images("image", arguments.file, 1)
    where = Destination.checked(arguments, [_request(arguments, options)])
    source = source_of(arguments)
    pipe = load_model(arguments, source)
    report |= description(pipe)
    given = {name: getattr(arguments, name) for name in ("scale", "strength", "overlap", "batch_size", "seed")}
    named = {"batch" if name == "batch_size" else name: value for name, value in given.items() if value is not None}
    result = pipe.upscale(
        arguments.file,
        arguments.prompt or "",
        arguments.negative_prompt,
        num_inference_steps=arguments.num_inference_steps,
        guidance_scale=arguments.guidance_scale,
        sampler=arguments.sampler,
        options=options,
        control=bool(source.controlnet),
        **named,
    )
    path = where.save(result.images[0], result.metadata[0])
    report |= {"files": [str(path)], "metadata": result.metadata, "timings": result.timings}
    report["compilations"] = result.compilations
    if not arguments.json:
        say(str(path))
    if not arguments.quiet:
        image = result.images[0]
        complain(f"{image.width} x {image.height} pixels in {seconds(result.timings['total'])}")


def _request(arguments: argparse.Namespace, options: Options) -> ImageRequest:
    """What the destination is checked for: one image."""
    if arguments.grid:
        raise InputError("--grid: there is one image; leave it out")
    return ImageRequest(arguments.prompt or "", None, 0, None, None, None, None, None, options)
