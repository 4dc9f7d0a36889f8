"""``canvax plan MODEL --target CHIPS --rate IMAGES``: how many replicas does a load need?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from canvax.cli.generate_arguments import source_keywords
from canvax.cli.terminal import complain, say, table
from canvax.errors import InputError, check_count, check_number

if TYPE_CHECKING:
    from canvax.planning.targets import Target
    from canvax.scale.capacity import Fleet
    from canvax.scale.fleet import Outcome, Speed


def run_fleet(
    arguments: argparse.Namespace,
    width: int | None,
    height: int | None,
    report: dict[str, Any],
    compiling: Callable[[str, float | None], None],
) -> None:
    """Find the smallest fleet and print a table; ``compiling`` is told of each compilation."""
    arguments.p95, arguments.arrivals = (
        10.0 if arguments.p95 is None else arguments.p95,
        arguments.arrivals or "steady",
    )
    for name in ("p95", "price"):
        if (value := getattr(arguments, name)) is not None and check_number(f"--{name}", value) <= 0:
            raise InputError(f"--{name} {value:g} is not above 0")
    check_count("--steps", arguments.steps, 1000)
    here = arguments.target == "here"
    for name, idle in (("batch", "--rate, which tries several"), ("fresh", "--target here, where nothing is stored")):
        value = getattr(arguments, name)
        if (name == "batch" or here) and value is not None and value is not False:  # 0 is a value
            raise InputError(f"--{name} does not go with {idle}; leave it out")
    from canvax.scale.capacity import size_fleet
    from canvax.scale.fleet import Load, simpy_module

    simpy_module()  # before anything is compiled or measured
    load = Load(arguments.rate, arguments.arrivals, {arguments.steps: 1.0})
    if here:
        speed, chips, where = _here(arguments, width, height)
        bound = False
    else:
        speed, target = _there(arguments, width, height, compiling)
        chips, where, bound = target.devices, str(target), target.platform == "gpu"

    def announce(replicas: int, outcome: Outcome) -> None:
        if not arguments.quiet:
            complain(f"{replicas} replicas: 95 of 100 images in {outcome.percentile(95):.2f} s")

    fleet = size_fleet(
        speed, load, arguments.p95, chips=chips, price=arguments.price, at_least=bound, announce=announce
    )
    report |= fleet.to_dict() | {"model": arguments.model, "target": where, "steps": arguments.steps}
    if not arguments.json:
        for line in lines(fleet, arguments, where):
            say(line)


def _there(
    arguments: argparse.Namespace, width: int | None, height: int | None, compiling: Callable[[str, float | None], None]
) -> tuple[Speed, Target]:
    """A replica of chips that are not here, and which they are."""
    from canvax.parallel.mesh import parse_mesh
    from canvax.scale.capacity import planned_speed

    speed, first = planned_speed(
        arguments.model, arguments.target, height=height, width=width, steps=arguments.steps,
        guided=not arguments.no_guidance, dtype=arguments.dtype or "bfloat16", quantize=arguments.quantize,
        mesh=None if arguments.mesh is None else parse_mesh(arguments.mesh), reuse=not arguments.fresh,
        announce=None if arguments.quiet else compiling, **source_keywords(arguments),
    )  # fmt: skip
    return speed, first.target


def _here(arguments: argparse.Namespace, width: int | None, height: int | None) -> tuple[Speed, int, str]:
    """This machine as a replica."""
    import canvax
    from canvax.parallel.mesh import mesh_of
    from canvax.scale.capacity import measured_speed

    pipe = canvax.load(
        arguments.model, dtype=arguments.dtype, quantize=arguments.quantize, mesh=mesh_of(arguments.mesh),
        progress=not arguments.quiet, **source_keywords(arguments),
    )  # fmt: skip
    told = None if arguments.quiet else complain
    guidance = 1.0 if arguments.no_guidance else None
    call = {"width": width, "height": height, "guidance_scale": guidance}
    return measured_speed(pipe, steps=arguments.steps, announce=told, **call), len(pipe.devices), str(pipe.device)


def lines(fleet: Fleet, arguments: argparse.Namespace, where: str) -> list[str]:
    """The fleet as lines of text."""
    told, load = fleet.to_dict(), fleet.load
    steps = ", ".join(f"{batch}: {1e3 * seconds:.3g} ms" for batch, seconds in fleet.speed.row.items())
    rows = [
        ("a step of a batch of", steps),
        ("an image by itself", f"{fleet.speed.image(arguments.steps):.2f} s on the device"),
        ("a full replica", f"{told['images_per_second_of_a_full_replica']:.3g} images a second"),
        ("replicas", f"{fleet.replicas} of {fleet.chips} chip{'s' * (fleet.chips != 1)}"),
        ("latency", f"p50 {told['p50']:.2f} s, p95 {told['p95']:.2f} s, p99 {told['p99']:.2f} s"),
        ("busy", f"{fleet.outcome.busy:.0%} of the time, {fleet.outcome.filled:.1f} images in a batch"),
    ]
    if fleet.price is not None:
        rows.append(("cost", f"{told['per_hour']:.2f} an hour, {told['per_1000_images']:.2f} for 1000 images"))
    head = (
        f"{arguments.model} on {where}, {arguments.steps} steps: {load.rate:g} images a second ({load.arrivals}), "
        f"95 of 100 within {fleet.p95:g} s"
    )
    if arguments.target == "here":
        last = "Times were measured here, the fleet is simulated."
    elif fleet.at_least:
        last = "Times are the least that the data sheet allows: a real fleet is larger."
    else:
        last = "Times are the compiler's estimate, the fleet is simulated: nothing was run."
    return [head, "", *table(rows), "", f"{last} See docs/capacity.md."]
