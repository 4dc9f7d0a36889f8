"""``canvax compile``: compile the programs of a model in advance."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from canvax.cli.loading import check_ip_adapters, load_with
from canvax.cli.plan import check_sides, parse_references, parse_size
from canvax.cli.terminal import byte_size, complain, say, seconds, table
from canvax.errors import CanvaxError, check_count

if TYPE_CHECKING:
    from canvax.compile.aot import Build


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile the programs of each size and batch, or load them from the cache."""
    sizes = [parse_size(text) for text in arguments.size or []]
    check_sides(arguments)
    references = parse_references(arguments.references)
    from canvax.pipelines.checks import MOST_IMAGES

    for batch in arguments.batch:
        check_count("batch", batch, MOST_IMAGES)
    check_ip_adapters(arguments)
    if arguments.reuse_layers:
        check_count("reuse_layers", arguments.reuse_layers, 1000)
    if not arguments.quiet:
        complain(f"reading {arguments.model}")
    pipe = load_with(arguments, weights=False)
    model = pipe.model
    report["programs"] = built = []
    all_builds: list[Build] = []
    tall, wide = model.native_size
    if arguments.width or arguments.height or not sizes:
        sizes.append((arguments.width or wide, arguments.height or tall))
    for width, height in sizes:
        for batch in arguments.batch:
            builds = pipe.compile(
                height,
                width,
                batch,
                guidance=False if arguments.no_guidance else None,
                reuse_layers=arguments.reuse_layers,
                image=arguments.image,
                mask=arguments.mask,
                control=bool(arguments.controlnet),
                image_prompt=bool(arguments.ip_adapter),
                references=references,
                progress=not arguments.quiet,
            )
            all_builds += builds
            for build in builds:
                sized = {} if build.program == "text encoder" else {"width": width, "height": height}
                built.append({"program": build.program, **sized, "batch": batch, "cached": build.cached,
                              "seconds": build.seconds, "bytes": build.size})  # fmt: skip
    if not arguments.json:
        _print(built)
    check_kept(all_builds)


def check_kept(builds: Iterable[Build]) -> None:
    """Raise a ``CanvaxError`` if a program is not in the cache."""
    if lost := dict.fromkeys(build.program for build in builds if not (build.cached or build.size)):
        reasons = "docs/caching.md lists the reasons, and canvax cache path prints the folder"
        raise CanvaxError(f"compiled and not kept: {', '.join(lost)}; {reasons}")


def _print(built: list[dict[str, Any]]) -> None:
    rows = [("program", "size", "batch", "", "time", "on disk")]
    for program in built:
        size = f"{program['width']}x{program['height']}" if "width" in program else "any"
        how = "from the cache" if program["cached"] else "compiled"
        disk = byte_size(program["bytes"]) if program["bytes"] else "not cached"
        rows.append((program["program"], size, str(program["batch"]), how, seconds(program["seconds"]), disk))
    for line in table(rows, right=(2, 4, 5)):
        say(line)
