"""``canvax compile``: makes programs ready before they are needed."""

from __future__ import annotations

import argparse
import re
from typing import Any

from canvax.cli.terminal import byte_size, complain, say, seconds, table
from canvax.errors import InputError


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile, or find in the cache, the programs of every size and batch asked for."""
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
        revision=arguments.revision,
        variant=arguments.variant,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
        local_files_only=arguments.local_files_only,
        progress=not arguments.quiet,
        weights=False,
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
    for one in built:
        size = f"{one['width']}x{one['height']}" if "width" in one else "any"
        how = "from the cache" if one["cached"] else "compiled"
        disk = byte_size(one["bytes"]) if one["bytes"] else "not kept"
        rows.append((one["program"], size, str(one["batch"]), how, seconds(one["seconds"]), disk))
    for line in table(rows, right=(2, 4, 5)):
        say(line)
