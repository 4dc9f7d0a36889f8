"""``canvax upscale``: makes an image larger, tile by tile, and prints the file name of the result."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.generate import Destination, check_against_model, description, load_model
from canvax.cli.images import OPTIONS, ImageRequest, check_table, source_of
from canvax.cli.terminal import complain, say, seconds
from canvax.errors import NO_VALUE, InputError, check_count
from canvax.images.given import read_images
from canvax.noise import check_seed
from canvax.pipelines.checks import MAX_SIDE, MOST_IMAGES, check_guidance
from canvax.pipelines.control import OPTIONS as CONTROL_OPTIONS
from canvax.pipelines.options import Options
from canvax.pipelines.upscale import STRENGTH, check_for_upscale, check_scale
from canvax.samplers.strength import check_strength, steps_of_strength

MOST_STEPS = 100_000


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Make the image larger; ``report`` is updated on the way."""
    settings = {name: value for name in OPTIONS if (value := getattr(arguments, name, None)) is not None}
    options = Options(**settings, progress=not arguments.quiet)
    if not arguments.controlnet and (given := sorted({*CONTROL_OPTIONS} & {*settings})):
        raise InputError(
            given[0], NO_VALUE, "needs a ControlNet", "name the network that reads the tiles with {controlnet}"
        )
    request = _request(arguments, options)
    _check(arguments, request)
    where = Destination.checked(arguments, [request])
    source = source_of(arguments)
    check_against_model(arguments, [request], source)
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


def _check(arguments: argparse.Namespace, request: ImageRequest) -> None:
    """Refuse what no model could do, before one is read."""
    (image,) = read_images("file", arguments.file, 1)
    check_for_upscale(request.options)
    if arguments.scale is not None:
        check_scale(arguments.scale, image)
    if arguments.strength is not None:
        check_strength(arguments.strength)
    for name, most in (("overlap", MAX_SIDE), ("batch_size", MOST_IMAGES), ("num_inference_steps", MOST_STEPS)):
        if (value := getattr(arguments, name)) is not None:
            check_count(name, value, most)
    if arguments.num_inference_steps is not None:
        strength = STRENGTH if arguments.strength is None else arguments.strength
        steps_of_strength(strength, arguments.num_inference_steps, request.options.strength_rule, MOST_STEPS)
    if arguments.guidance_scale is not None:
        check_guidance(arguments.guidance_scale, 0)
    if arguments.seed is not None:
        check_seed(arguments.seed)
    for name in ("preview", "distributed", "coordinator", "num_processes", "process_id"):
        if (value := getattr(arguments, name)) is not None and value is not False:  # 0 is a value
            raise InputError(name, NO_VALUE, "does not go with tiles", "leave it out")
    check_table(request, None)


def _request(arguments: argparse.Namespace, options: Options) -> ImageRequest:
    """What the destination is checked for: one image."""
    if arguments.grid:
        raise InputError("grid", NO_VALUE, "does not go with one image", "leave it out")
    steps, sampler = arguments.num_inference_steps, arguments.sampler
    return ImageRequest(arguments.prompt or "", None, 0, None, None, steps, arguments.guidance_scale, sampler, options)
