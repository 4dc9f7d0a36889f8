"""``canvax train finetune``: trains a checkpoint on the user's own images."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.cli.terminal import complain, say
from canvax.errors import InputError
from canvax.parallel.mesh import make_mesh


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Fine-tune; prints the folder of the finished model."""
    finish(_finetune, arguments, report)


def finish(task: Callable[[argparse.Namespace], Path | None], arguments: argparse.Namespace, report: Any) -> None:
    """Run a training task that may be stopped; prints the folder of the finished model."""
    try:
        result = task(arguments)
    except KeyboardInterrupt:
        complain("stopped; the same command resumes from the last saved state")
        raise
    report["output"] = None if result is None else str(result)
    report["finished"] = result is not None
    if result is None:
        complain("stopped after --stop-after; the same command resumes from here")
    elif not arguments.json:
        say(str(result))


def _finetune(arguments: argparse.Namespace) -> Path | None:
    from canvax.pipelines.checks import parse_dtype
    from canvax.train.finetune import PLAN, FineTuning, finetune

    names = ("steps", "batch", "learning_rate", "warmup", "average", "seed")
    plan = replace(PLAN, **given(**{name: getattr(arguments, name) for name in names}))
    # A chunk must divide the steps, or the run would do more steps than were asked for.
    plan = replace(plan, chunk=next(n for n in range(PLAN.chunk, 0, -1) if plan.steps % n == 0))
    task = FineTuning(
        model=arguments.model,
        pictures=arguments.pictures,
        folder=Path(arguments.output),
        plan=plan,
        size=arguments.size,
        caption_column=arguments.caption_column,
        flip=arguments.flip,
        gamma=arguments.min_snr,
        remat=arguments.remat,
        dtype=None if arguments.dtype is None else parse_dtype(arguments.dtype),
        prompts=tuple(arguments.preview),
    )
    return finetune(task, make_mesh(), deadline=deadline(arguments), save_dtype=arguments.save_dtype, say=complain)


def deadline(arguments: argparse.Namespace) -> float | None:
    if arguments.stop_after is None:
        return None
    if arguments.stop_after <= 0:
        raise InputError(f"--stop-after {arguments.stop_after} must be more than 0 minutes")
    return time.monotonic() + 60 * arguments.stop_after


def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
