"""``canvax upscale``: makes an image larger, tile by tile, and prints the file name of the result."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from canvax.call import MOST_STEPS, Call, Enlarging
from canvax.cli.generate import Destination, check_against_model, description, load_model
from canvax.cli.images import OPTIONS, check_table
from canvax.cli.loading import load_of
from canvax.cli.terminal import complain, say, seconds
from canvax.errors import InputError, needs
from canvax.images.inputs import read_images
from canvax.pipelines.control import OPTIONS as CONTROL_OPTIONS
from canvax.pipelines.upscale import check_for_upscale, check_scale
from canvax.samplers.strength import steps_of_strength
from canvax.scale.work import call_of


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Make the image larger; ``report`` is updated on the way."""
    names = ("num_inference_steps", "guidance_scale", "sampler", "strength", "seed", *OPTIONS)
    settings = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    call = call_of({**settings, "prompt": arguments.prompt or ""}, 0, progress=not arguments.quiet)
    if not arguments.controlnet and (of_control := sorted({*CONTROL_OPTIONS} & {*settings})):
        raise needs(of_control[0], "controlnet", cure="it is the network that reads the tiles")
    given = {name: getattr(arguments, name) for name in ("scale", "strength", "overlap")}
    given |= {"batch": arguments.batch_size, "control": bool(arguments.controlnet)}
    how = Enlarging(**{name: value for name, value in given.items() if value is not None})
    _check(arguments, call, how)
    where = Destination.checked(arguments, [call])
    load = load_of(arguments)
    check_against_model([call], load)
    pipe = load_model(arguments, load, [replace(call, negative_prompt=arguments.negative_prompt)])
    report |= description(pipe)
    result = pipe.upscale(
        arguments.file,
        call.prompt,
        arguments.negative_prompt,
        num_inference_steps=call.num_inference_steps,
        guidance_scale=call.guidance_scale,
        sampler=call.sampler,
        options=call.options,
        seed=arguments.seed,
        **vars(how),
    )
    path = where.save(result.images[0], result.metadata[0])
    report |= {"files": [str(path)], "metadata": result.metadata, "timings": result.timings}
    report["compilations"] = result.compilations
    if not arguments.json:
        say(str(path))
    if not arguments.quiet:
        image = result.images[0]
        complain(f"{image.width} x {image.height} pixels in {seconds(result.timings['total'])}")


def _check(arguments: argparse.Namespace, call: Call, how: Enlarging) -> None:
    """Refuse what no model can do, before a model is read."""
    if arguments.grid:
        raise InputError("grid", "does not go with one image", cure="leave it out")
    (image,) = read_images("file", arguments.file, 1)
    check_for_upscale(call.options)
    check_scale(how.scale, image)
    for name in ("preview", "distributed", "coordinator", "num_processes", "process_id"):
        if (value := getattr(arguments, name)) is not None and value is not False:  # 0 is a value
            raise InputError(name, "does not go with tiles", cure="leave it out")
    check_table(call, None)
    if arguments.num_inference_steps is not None:
        steps_of_strength(how.strength, arguments.num_inference_steps, call.options.strength_rule, MOST_STEPS)
