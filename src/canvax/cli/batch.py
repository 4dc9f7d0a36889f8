"""``canvax batch``: generate the images of a file of prompts, and resume an interrupted job."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from canvax.call import IMAGE, Call, Load
from canvax.cli.arguments import versions
from canvax.cli.generate import check_against_model, description, join_others, load_model
from canvax.cli.images import check_table
from canvax.cli.loading import IN_PASSING, check_ip_adapters, load_of
from canvax.cli.terminal import complain, say, seconds, stoppable
from canvax.errors import InputError, check_count, conflict, nearest, needs
from canvax.files import named_path
from canvax.images.maps import SETTINGS as MAPS
from canvax.pipelines.checks import check_size
from canvax.pipelines.control import OPTIONS as CONTROL_OPTIONS
from canvax.pipelines.options import Options
from canvax.settings import declared, grouped

if TYPE_CHECKING:
    from canvax.scale.batch import Generate, Plan
    from canvax.scale.output import Output


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Generate the rows that are not done yet; ``report`` is updated after each batch."""
    from canvax.scale import batch
    from canvax.scale.rows import NAMES

    if arguments.quality and arguments.quality.isdecimal():  # its name before there was a quality of images
        arguments.file_quality, arguments.quality = int(arguments.quality), None
    defaults = {name: value for name in NAMES if (value := getattr(arguments, name, None)) is not None}
    seed = defaults.pop("seed")
    _check(arguments)
    load = load_of(arguments)
    check_ip_adapters(arguments)
    _check_flags(arguments, defaults, load)
    plan = batch.Plan.read(arguments.file, defaults, arguments.carry, seed, _share(arguments.share))
    spread = join_others(arguments)
    output = _output(arguments, plan, load, spread=spread)
    try:
        todo = _agreed(
            plan, plan.left(output.known, retry=arguments.retry_errors, begun=output.run.get("defaults")), spread=spread
        )
        report |= {"output": str(output.folder), "rows": len(plan.digests), "errors": 0}
        report["skipped"] = len(plan.digests) - len(todo)
        if report["skipped"] and (gone := output.gone()):
            cure = "take their lines out of manifest.jsonl to have them again"
            complain(f"{_count(gone, 'row')} done before, without a file in {output.folder}; {cure}", label="warning: ")
        if todo:
            generate = _generate(arguments, plan, load, output, report, spread=spread)
            shown = None if arguments.quiet else complain
            with stoppable():
                for tally in batch.run(plan, todo, output, generate, image_format=arguments.format,
                                 quality=arguments.file_quality, progress=shown):  # fmt: skip
                    report |= asdict(tally)
        output.close(done=True)
    finally:
        output.close(done=False)
    report["errors"] = sum(line.get("status") != "done" for line in output.known.values())
    _summarise(arguments, report)


def _check(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "shard_size", "actors"):
        if (value := getattr(arguments, name)) is not None:
            check_count(name, value, 1_000_000)
    named_path("output", arguments.output)
    if arguments.seed is not None and not 0 <= arguments.seed < 2**64:
        raise InputError("seed", "is not a whole number in 0..2**64-1", value=arguments.seed)
    if arguments.shard_size is not None and arguments.into == "files":
        raise needs("shard_size", "into=tar", "into=parquet")
    if arguments.file_quality is not None and not 1 <= arguments.file_quality <= 100:
        raise InputError("file_quality", "is not in 1..100", value=arguments.file_quality)
    if arguments.file_quality is not None and arguments.format == "png":
        raise InputError(
            "file_quality",
            "has no effect on PNG, which loses nothing",
            cure="leave it out, or write {format=webp}",
            value=arguments.file_quality,
        )
    if arguments.actors is not None and arguments.ray is None:
        raise needs("actors", "ray")
    if arguments.lora_dir is not None:
        raise InputError(
            "lora_dir",
            "does not go with a batch, whose adapters are the same for all rows",
            cure="write --lora FILE:0.8",
        )
    if arguments.ray is not None and arguments.distributed:
        raise conflict("ray", "distributed", why="JobSet starts --distributed on each TPU slice")
    for name in ("lora", "embedding", "safety_checker"):
        if arguments.ray is not None and getattr(arguments, name):
            raise conflict(name, "ray")
    if arguments.ray is not None:
        from canvax.scale.data import ray_module  # before anything is written

        ray_module()


def _share(text: str | None) -> tuple[int, int]:
    """Read ``--share K/N`` as two numbers."""
    if text is None:
        return 0, 1
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and len(text) < 12 and int(number) < int(count)):
        raise InputError("share", "is not a share", cure="write 0/4, 1/4, 2/4 and 3/4 for four jobs", value=text[:80])
    return int(number), int(count)


def _check_flags(arguments: argparse.Namespace, defaults: Mapping[str, Any], load: Load) -> None:
    """Refuse settings that no row can use, before any weights are read."""
    from canvax.scale.work import call_of

    # A row of the file may set further options.
    files = ("image", "mask", "reference", "control", "control_from", "ip_image", "ip_mask")
    call = call_of({"prompt": ""} | {name: defaults[name] for name in defaults if name not in files}, 0)
    if "ip_mask" in defaults and "ip_image" not in defaults and not arguments.ip_adapter:
        raise needs("ip_mask", "ip_adapter", cure="it is the network that reads the image")
    check_size("height", call.height, 0)
    check_size("width", call.width, 0)
    check_table(call, None)
    for kind in defaults.get("control_from", "none").split(","):
        if (kind := kind.strip()) not in (*MAPS, "none"):
            raise InputError("control_from", "is not made here", cure=nearest(kind, list(MAPS)), value=kind)
    for name in ("control", "control_from", *CONTROL_OPTIONS, "ip_image"):  # which all rows would lack
        networks = "ip_adapter" if name == "ip_image" else "controlnet"
        if name in defaults and not getattr(arguments, networks):
            raise needs(name, networks, cure="it is the network that reads the image")
    check_against_model([call], load)


def _output(arguments: argparse.Namespace, plan: Plan, load: Load, *, spread: bool) -> Output:
    import jax

    from canvax.scale.output import Output

    number, shares = _share(arguments.share)
    index, processes = (jax.process_index(), jax.process_count()) if spread else (0, 1)
    decisive = load.keywords([name for name in declared(Load) if name not in IN_PASSING])
    decisive |= {name: list(getattr(arguments, name) or ()) for name in ("controlnet", "ip_adapter")}
    decisive |= {name: getattr(arguments, name) for name in ("ip_encoder", "format", "batch_size", "seed")}
    decisive |= {"quality": arguments.file_quality}
    decisive |= {name: files for name in ("lora", "embedding") if (files := getattr(arguments, name))}
    return Output(
        arguments.output,
        {
            **decisive,
            "most": plan.total,
            "canvax": versions()["canvax"],
            "defaults": dict(plan.defaults),
        },
        into=arguments.into,
        shard_size=arguments.shard_size or 1000,
        process=number * processes + index,
        processes=shares * processes,
    )


def _agreed(plan: Plan, todo: set[str], *, spread: bool) -> set[str]:
    """Return the rows that no process has done; each process knows only the rows that it did itself."""
    if not spread:
        return todo
    import numpy as np

    from canvax.parallel import multihost

    multihost.broadcast_seeds([], list(plan.digests.items()))
    done = multihost.any_process(np.array([name not in todo for name in plan.digests]))
    return {name for name, over in zip(plan.digests, done, strict=True) if not over}


def _generate(arguments: argparse.Namespace, plan: Plan, load: Load, output: Output, report: dict[str, Any], *,
              spread: bool) -> Generate:  # fmt: skip
    """Return the function that generates the rows: with a model here, or with those of a cluster."""
    from canvax.scale.batch import windows
    from canvax.scale.rows import Row
    from canvax.scale.work import Made, Worker

    most = int(output.run["most"])
    if arguments.ray is not None:
        return _on_ray(arguments, plan, load, most)
    pipe = load_model(arguments, load)
    output.agree({"loaded": {"revision": pipe.model.revision, "dtype": pipe.model.dtype}})
    report |= description(pipe)
    worker = Worker(
        pipe, batch=arguments.batch_size, most=most, defaults=plan.defaults, carried=plan.carried, seed=plan.seed,
        progress=not arguments.quiet,
    )  # fmt: skip
    usual = worker.check(Row("", {"prompt": ""}))
    if isinstance(usual, Made) and not {*grouped(Call, IMAGE), *grouped(Options, IMAGE)} & plan.defaults.keys():
        raise InputError(usual.error)  # no row that only has a prompt, or an image where flags are for images
    return windows(worker.run)


def _on_ray(arguments: argparse.Namespace, plan: Plan, load: Load, most: int) -> Generate:
    from canvax.scale.data import on_ray

    if arguments.mesh:
        raise conflict("mesh", "ray", why="each model has all devices that Ray gives it")
    own = ("model", "mesh", "progress", "safety_checker")
    keywords = load.keywords([name for name in declared(Load) if name not in own])
    settings = {"batch_size": arguments.batch_size, "most": most, "quality": arguments.file_quality}
    settings |= {"model": load.model, "image_format": arguments.format, "load": keywords}
    settings |= {"ip_adapter": list(arguments.ip_adapter or ()), "ip_encoder": arguments.ip_encoder}
    return on_ray(plan, settings, address=arguments.ray, actors=arguments.actors)


def _summarise(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if not arguments.json:
        say(report["output"])
    failed = f"{_count(report['errors'], 'row')} with an error, see {report['output']}/manifest.jsonl"
    if arguments.quiet:
        if report["errors"]:
            complain(failed, label="warning: ")
        return
    parts = [f"{_count(report.get('done', 0), 'image')} in {seconds(report.get('seconds', 0.0))}"]
    if report.get("done"):
        parts.append(f"{report['images_per_second']:.3g} a second")
    if report["skipped"]:
        parts.append(f"done before: {_count(report['skipped'], 'row')}")
    if report["errors"]:
        parts.append(failed)
    complain("; ".join(parts))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
