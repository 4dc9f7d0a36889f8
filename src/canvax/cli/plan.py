"""``canvax plan``: estimate whether a model fits on a TPU or GPU, and how long an image takes."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from canvax.cli.loading import load_of
from canvax.cli.terminal import say, table
from canvax.errors import InputError, to_stderr

if TYPE_CHECKING:
    from canvax.planning.plan import Plan, ProgramPlan

GIB = 2**30

PARTS = ("revision", "token", "cache_dir", "local_files_only", "vae", "text_encoder", "text_encoder_2", "tokenizer")
"""Arguments of ``canvax.load`` that change what is planned."""

FLAGS = {"resident": "", "offloaded": "--offload", "streamed": "--offload-layers"}
"""Flags of other commands for each place of the weights."""

_NAMES = {"encode": "text encoder", "denoise": "denoiser, one evaluation", "decode": "decoder"}


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Plan and print a table."""
    check_sides(arguments)
    from canvax.parallel.mesh import parse_mesh
    from canvax.planning.plan import plan

    mesh = parse_mesh(arguments.mesh) if arguments.mesh is not None else None
    result = plan(
        arguments.model,
        arguments.target,
        batch=arguments.batch,
        height=arguments.height,
        width=arguments.width,
        steps=arguments.num_inference_steps,
        guided=False if arguments.no_guidance else None,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        mesh=mesh,
        references=parse_references(arguments.references),
        reuse=not arguments.fresh,
        announce=None if arguments.quiet else _announce,
        **load_of(arguments).keywords(PARTS),
    )
    report |= result.to_dict()
    if not arguments.json:
        for line in lines(result):
            say(line)


def check_sides(arguments: argparse.Namespace) -> None:
    """Refuse a ``width`` and a ``height`` that no image can have.

    Raises:
        InputError: a side cannot be used.
    """
    from canvax.pipelines.checks import check_size  # imports JAX, which the parser does without

    for name in ("width", "height"):
        check_size(name, getattr(arguments, name), 0)


def parse_size(text: str) -> tuple[int, int]:
    """Return width and height of "1024x768".

    Raises:
        InputError: the text is not a size, or no image can have it.
    """
    sides = argparse.Namespace(**dict(zip(("width", "height"), parse_sides("size", text), strict=True)))
    check_sides(sides)
    return sides.width, sides.height


def parse_sides(argument: str, text: str) -> tuple[int, int]:
    """Return the two numbers of "1024x768".

    Raises:
        InputError: the text has another form.
    """
    match = re.fullmatch(r"(\d{1,9})[x×](\d{1,9})", text.lower(), re.ASCII)
    if match is None:
        raise InputError(argument, "is not WIDTHxHEIGHT in pixels, such as 1024x768", value=text)
    return int(match[1]), int(match[2])


def parse_references(words: list[str] | None) -> int | list[tuple[int, int]]:
    """Return the number of reference images, or the height and width of each.

    Raises:
        InputError: the words are neither.
    """
    if not words or (len(words) == 1 and words[0].isdecimal()):
        return int(words[0]) if words else 0
    return [(height, width) for width, height in (parse_sides("references", word) for word in words)]


def from_references(count: int) -> str:
    """Return the words about the number of references, for the line about the size of the image."""
    return f" from {count} reference{'s' if count > 1 else ''}" if count else ""


def lines(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    chip, device = plan.target.chip, plan.target.chip.device
    guided = "guided evaluations" if plan.guided else "evaluations without guidance"
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh.items() if size > 1 or name == "data")
    images = "1 image" if plan.batch == 1 else f"{plan.batch} images"
    head = [
        f"{plan.model} on {plan.target} ({axes}): {images} of {plan.width} x {plan.height}"
        f"{from_references(len(plan.references))}, {plan.steps} {guided}, "
        f"{plan.dtype}" + (f" with {plan.quantize} weights" if plan.quantize else ""),
        "",
    ]
    last = "kernels" if plan.target.platform == "gpu" else "estimate ms"
    rows = [("program", "runs", "TFLOP", "GB moved", "temporary GiB", "bound ms", last, "collectives", "compiled in")]
    rows += [_row(plan, program) for program in plan.programs]
    text = [*head, *table(rows, right=range(1, 7)), ""]
    weights = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.weights.items())
    weights = f"weights on each {device}, which stay there: {weights} GiB"
    unpriced = Counter(re.sub(r"[.\d]+$", "", name) for program in plan.programs for name in program.unpriced)
    if any(program.refused for program in plan.programs):
        return [*text, weights, f"does not fit: {plan.why_not}", *_modes(plan)]
    memory = (
        f"{plan.peak_bytes / GIB:.2f} of {chip.usable / GIB:.2f} GiB on each {device}: weights, inputs and programs "
        f"{plan.resident_bytes / GIB:.2f}, temporaries and results {plan.working_bytes / GIB:.2f}"
    )
    verdict = "fits" if plan.fits else "does not fit"
    least = f"at least {_seconds(plan.bound_seconds)}"
    if plan.seconds is None:
        times = f"{least} for the batch, at most {plan.batch / plan.bound_seconds:.3g} images a second"
    else:
        estimate = f"{_seconds(plan.seconds)} for the batch by the compiler's estimate"
        times = f"{estimate}, {least}; {plan.batch / plan.seconds:.3g} images a second"
    text += [f"{verdict}: {memory}" if plan.fits else f"{verdict}: {plan.why_not}; {memory}", weights, f"time: {times}"]
    if unpriced:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(unpriced.items()))
        text.append(f"the estimate leaves these out: {counts}")
    page = f"docs/{plan.target.platform}.md"
    text += _modes(plan)
    return [*text, f"Figures are for one {device} and one run of each program; nothing was run. See {page}."]


def _modes(plan: Plan) -> list[str]:
    """Return the table of the places of the weights; nothing if no place helps."""
    if not plan.modes:
        return []
    chip = plan.target.chip
    rows = [("weights", "flags", f"of {chip.usable / GIB:.2f} GiB", "fits", "time of the batch")]
    for mode in plan.modes:
        eight = f"--quantize {mode.quantize}" if mode.quantize else ""
        time = ("at least " if plan.target.platform == "gpu" else "") + _seconds(mode.seconds)
        fits, flags = "yes" if mode.fits else "no", " ".join(filter(None, (eight, FLAGS[mode.place])))
        rows.append((mode.place, flags or "none", f"{mode.bytes / GIB:.2f}", fits, time))
    assumed = f"Copies from the host's memory take an assumed {chip.host / 1e9:.3g} GB/s for each {chip.device}"
    eight = "" if plan.quantize else "; rows with int8 have the times of the others"
    return ["", *table(rows, right=(2, 4)), "", f"{assumed}{eight}."]


def _row(plan: Plan, program: ProgramPlan) -> tuple[str, ...]:
    compiled = f"{program.compile_seconds:.0f} s" + (" (stored)" if program.reused else "")
    name = _NAMES.get(program.name, program.name)
    if program.refused:
        return (name, str(program.evaluations), *[""] * 6, compiled)
    return (
        name,
        str(program.evaluations),
        f"{program.flops / 1e12:.3g}",
        f"{program.hbm_bytes / 1e9:.3g}",
        f"{program.temporary_bytes / GIB:.2f}",
        f"{program.bound_seconds(plan.target.chip) * 1e3:.3g}",
        str(program.kernels) if program.seconds is None else f"{program.seconds * 1e3:.3g}",
        ", ".join(f"{count} {name}" for name, count in program.collectives.items()) or "none",
        compiled,
    )


def _seconds(amount: float) -> str:
    return f"{amount:.2f} s" if amount >= 1 else f"{amount * 1e3:.3g} ms"


def _announce(name: str, seconds: float | None) -> None:
    to_stderr(f"compiling the {name} ... " if seconds is None else f"{seconds:.1f} s\n")
