"""``canvax compile``: compiles the programs of a model in advance."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from canvax.cli.generate_arguments import check_ip_adapters, location_keywords, part_keywords
from canvax.cli.plan import parse_references, parse_size
from canvax.cli.terminal import byte_size, complain, say, seconds, table
from canvax.errors import CanvaxError, check_count

if TYPE_CHECKING:
    from canvax.pipelines.pipeline import Pipeline


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile the programs of each size and batch, or load them from the cache."""
    sizes = [parse_size(text) for text in arguments.size or []]
    references = parse_references(arguments.references)
    from canvax.pipelines.checks import MOST_IMAGES

    for batch in arguments.batch:
        check_count("batch", batch, MOST_IMAGES)
    check_ip_adapters(arguments)
    if arguments.reuse_layers:
        check_count("reuse_layers", arguments.reuse_layers, 1000)
    if not arguments.quiet:
        complain(f"reading {arguments.model}")
    pipe = open_pipeline(arguments.model, arguments)
    model = pipe.model
    report["programs"] = built = []
    for width, height in sizes or [model.native_size[::-1]]:
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
            for build in builds:
                sized = {} if build.program == "text encoder" else {"width": width, "height": height}
                built.append({"program": build.program, **sized, "batch": batch, "cached": build.cached,
                              "seconds": build.seconds, "bytes": build.size})  # fmt: skip
    if not arguments.json:
        _print(built)
    if not all(program["cached"] or program["bytes"] for program in built):
        raise CanvaxError("programs were compiled and not kept; canvax cache path prints the folder for them")


def open_pipeline(name: str, arguments: argparse.Namespace) -> Pipeline:
    """The pipeline of a model without weights, whose parameters are shapes, dtypes and shardings."""
    from canvax.parallel.mesh import mesh_of
    from canvax.pipelines.loaded import open_model
    from canvax.pipelines.pipeline import Pipeline
    from canvax.weights.overrides import Overrides

    opened = open_model(
        name,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        mesh=mesh_of(getattr(arguments, "mesh", None)),
        progress=not arguments.quiet,
        weights=False,
        overrides=Overrides.of(**part_keywords(arguments)),
        **location_keywords(arguments),
    )
    return Pipeline(*_with_networks(opened, arguments))


def _with_networks(opened: Any, arguments: argparse.Namespace) -> Any:
    """A model with the networks of control images and image prompts that are named: what they are, without weights."""
    from canvax.pipelines.networks import (
        control_sources,
        ip_adapter_sources,
        open_controls,
        with_controls,
        with_ip_adapters,
    )

    hub = {name: getattr(arguments, name) for name in ("token", "cache_dir", "local_files_only")}
    hub["progress"] = not arguments.quiet
    model, programs, params = opened
    if arguments.controlnet:
        nets = open_controls(model, control_sources(arguments.controlnet, **hub))
        model, programs, params = with_controls(model, programs, params, nets, weights=False)
    if arguments.ip_adapter:
        named = ip_adapter_sources(arguments.ip_adapter, arguments.ip_encoder, **hub)
        encoder = arguments.ip_encoder
        model, programs, params = with_ip_adapters(model, programs, params, named, encoder, weights=False)
    return model, programs, params


def _print(built: list[dict[str, Any]]) -> None:
    rows = [("program", "size", "batch", "", "time", "on disk")]
    for program in built:
        size = f"{program['width']}x{program['height']}" if "width" in program else "any"
        how = "from the cache" if program["cached"] else "compiled"
        disk = byte_size(program["bytes"]) if program["bytes"] else "not cached"
        rows.append((program["program"], size, str(program["batch"]), how, seconds(program["seconds"]), disk))
    for line in table(rows, right=(2, 4, 5)):
        say(line)
