"""``canvax train``: the model in the package, or a checkpoint on pictures of one's own."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.cli.terminal import complain, say
from canvax.errors import InputError, nearest
from canvax.parallel.mesh import make_mesh


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run a task; prints the folder of the finished model."""
    if arguments.task == "emoji-data":
        from canvax.train.emoji.drawings import prepare_drawings

        result: Path | None = prepare_drawings(arguments.output, packages=arguments.packages, progress=complain)
    else:
        try:
            result = (_finetune if arguments.task == "finetune" else _emoji)(arguments)
        except KeyboardInterrupt:
            complain("stopped; the same command goes on from the last state")
            raise
    report["output"] = None if result is None else str(result)
    report["finished"] = result is not None
    if result is None:
        complain("stopped as --stop-after asked; the same command goes on from here")
    elif not arguments.json:
        say(str(result))


def _emoji(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.emoji.recipe import RECIPES, Run, make_model

    mesh = make_mesh()
    usual = "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"
    name = arguments.recipe or usual
    if name not in RECIPES:
        raise InputError(f"--recipe {name!r} is not known; {nearest(name, list(RECIPES))}")
    recipe = RECIPES[name]
    shared = _given(seed=arguments.seed)
    vae = _given(steps=arguments.vae_steps, minutes=arguments.vae_minutes)
    denoiser = _given(
        steps=arguments.steps,
        minutes=arguments.minutes,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
    )
    recipe = replace(
        recipe,
        autoencoder=replace(recipe.autoencoder, **shared, **vae),
        decoder=replace(recipe.decoder, **shared, **_given(steps=arguments.decoder_steps)),
        diffusion=replace(recipe.diffusion, **shared, **denoiser),
    )
    task = Run(
        recipe,
        Path(arguments.data),
        Path(arguments.output),
        mesh,
        deadline=_deadline(arguments),
        say=complain,
        start=None if arguments.start is None else Path(arguments.start),
    )
    return make_model(task)


def _finetune(arguments: argparse.Namespace) -> Path | None:
    from canvax.pipelines.checks import parse_dtype
    from canvax.train.finetune import PLAN, FineTuning, finetune

    names = ("steps", "batch", "learning_rate", "warmup", "average", "seed")
    plan = replace(PLAN, **_given(**{name: getattr(arguments, name) for name in names}))
    # As many steps as were asked for, and not one more.
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
    return finetune(task, make_mesh(), deadline=_deadline(arguments), save_dtype=arguments.save_dtype, say=complain)


def _deadline(arguments: argparse.Namespace) -> float | None:
    if arguments.stop_after is None:
        return None
    if arguments.stop_after <= 0:
        raise InputError(f"--stop-after {arguments.stop_after} must be more than 0 minutes")
    return time.monotonic() + 60 * arguments.stop_after


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
