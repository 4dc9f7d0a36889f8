"""``canvax compile``: compiles the programs of a model in advance."""

from __future__ import annotations

import argparse
import re
from typing import Any

from canvax.cli.generate_arguments import source_keywords
from canvax.cli.terminal import byte_size, complain, say, seconds, table
from canvax.errors import InputError


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile the programs of each size and batch, or load them from the cache."""
    sizes = [_size(text) for text in arguments.size or []]
    for batch in arguments.batch:
        if batch < 1:
            raise InputError(f"--batch {batch} is not a whole number of at least 1")
    from canvax.pipelines.checks import check_size
    from canvax.pipelines.open import open_model
    from canvax.pipelines.pipeline import StableDiffusion

    for width, height in sizes:
        check_size("width", width, 0)
        check_size("height", height, 0)
    if not arguments.quiet:
        complain(f"reading {arguments.model}")
    model, programs, params = open_model(
        arguments.model,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        progress=not arguments.quiet,
        weights=False,
        **source_keywords(arguments),
    )
    pipe = StableDiffusion(model, programs, params)
    report["programs"] = built = []
    for width, height in sizes or [model.native_size[::-1]]:
        for batch in arguments.batch:
            builds = pipe.compile(
                height,
                width,
                batch,
                guidance=not arguments.no_guidance,
                reuse_layers=arguments.reuse_layers,
                image=arguments.image,
                mask=arguments.mask,
                progress=not arguments.quiet,
            )
            for build in builds:
                sized = {} if build.program == "text encoder" else {"width": width, "height": height}
                built.append({"program": build.program, **sized, "batch": batch, "cached": build.cached,
                              "seconds": build.seconds, "bytes": build.size})  # fmt: skip
    if not arguments.json:
        _print(built)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[xX×](\d+)", text)
    if not match:
        raise InputError(f"--size {text} is not WIDTHxHEIGHT; write 1024x1024")
    return int(match[1]), int(match[2])


def _print(built: list[dict[str, Any]]) -> None:
    rows = [("program", "size", "batch", "", "time", "on disk")]
    for program in built:
        size = f"{program['width']}x{program['height']}" if "width" in program else "any"
        how = "from the cache" if program["cached"] else "compiled"
        disk = byte_size(program["bytes"]) if program["bytes"] else "not cached"
        rows.append((program["program"], size, str(program["batch"]), how, seconds(program["seconds"]), disk))
    for line in table(rows, right=(2, 4, 5)):
        say(line)
