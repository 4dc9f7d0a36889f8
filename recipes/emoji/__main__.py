"""The emoji model, from npm packages to a finished folder.

python -m recipes.emoji data out/emoji.zip
python -m recipes.emoji train out/emoji.zip --output out/emoji-model
python -m recipes.emoji quality --data out/emoji.zip --model out/emoji-model/model
python -m recipes.emoji sheets --output docs/images
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.cli import main
from canvax.cli.arguments import Parser
from canvax.cli.terminal import complain, say
from canvax.cli.train import deadline, finish, given
from canvax.cli.train_arguments import run_flags
from canvax.errors import InputError, nearest
from canvax.parallel.mesh import make_mesh
from recipes.emoji import measure
from recipes.emoji.drawings import prepare_drawings
from recipes.emoji.recipe import RECIPES, Run, make_model
from recipes.emoji.sheets import write_sheets

DATA_HELP = """
Fetches five npm packages with npm, from the registry that npm is configured for, renders the drawings and writes them
with their captions and licences into one zip file. Needs npm and pip install ".[train]".
"""
TRAIN_HELP = """
Stop it as you like: the same command goes on where the last state was written, with the same numbers.
"""


def run(arguments: Sequence[str], report: dict[str, Any]) -> None:
    """Parse the arguments and do the task."""
    parser = Parser(prog="python -m recipes.emoji", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tasks = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    _data(tasks)
    _train(tasks)
    measure.add_flags(
        tasks.add_parser("quality", help="measure how well images match their prompts", description=measure.__doc__)
    )
    sheets = tasks.add_parser("sheets", help="generate images for the docs with the model in the package")
    sheets.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to put them")
    sheets.add_argument("-m", "--model", default="emoji", help="another model (emoji)")
    sheets.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    if chosen.task == "train":
        finish(_make, chosen, report)
        return
    if chosen.task == "sheets":
        report |= {"output": [str(path) for path in write_sheets(Path(chosen.output), chosen.model)], "finished": True}
        return
    if chosen.task == "quality":
        report |= {"figures": measure.measure(chosen), "finished": True}
        return
    path = prepare_drawings(chosen.output, packages=chosen.packages, progress=complain)
    report |= {"output": str(path), "finished": True}
    if not chosen.json:
        say(str(path))


def _data(tasks: Any) -> None:
    parser = tasks.add_parser(
        "data",
        help="gather the drawings of the model in the package",
        description="Gather the drawings of the model in the package.",
        epilog=DATA_HELP,
    )
    parser.add_argument("output", metavar="FILE.zip", help="the file to write")
    parser.add_argument("--packages", metavar="FOLDER", help="tarballs that are here already, in place of npm")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _train(tasks: Any) -> None:
    parser = tasks.add_parser(
        "train",
        help="train the model",
        description="Train the model in the package from nothing: vocabulary, autoencoder, text encoder and UNet.",
        epilog=TRAIN_HELP,
    )
    parser.add_argument("data", metavar="FILE.zip", help="what the task data wrote")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="the run; the model is in its model/")
    parser.add_argument("--recipe", metavar="NAME", help="gpu, cpu or smoke (by the device)")
    parser.add_argument(
        "--start", metavar="FOLDER", help="a finished model, to train further; its vocabulary and latents stay"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="updates of text encoder and UNet (the recipe's)")
    parser.add_argument("--minutes", type=float, metavar="X", help="as many as fit into this time, in place of --steps")
    parser.add_argument("-b", "--batch-size", type=int, dest="batch", metavar="N", help="drawings an update")
    parser.add_argument("--learning-rate", "--lr", type=float, metavar="X", help="of text encoder and UNet")
    parser.add_argument("--vae-steps", type=int, metavar="N", help="updates of the autoencoder (the recipe's)")
    parser.add_argument("--vae-minutes", type=float, metavar="X", help="as many as fit into this time")
    parser.add_argument(
        "--decoder-steps", type=int, metavar="N", help="of its decoder on whole pictures (the recipe's)"
    )
    parser.add_argument("--pieces-steps", type=int, metavar="N", help="of the larger autoencoder on pieces")
    parser.add_argument("--whole-steps", type=int, metavar="N", help="of the larger autoencoder on whole pictures")
    run_flags(parser)


def _make(arguments: argparse.Namespace) -> Path | None:
    mesh = make_mesh()
    usual = "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"
    name = arguments.recipe or usual
    if name not in RECIPES:
        raise InputError(f"--recipe {name!r} is not known; {nearest(name, list(RECIPES))}")
    recipe = RECIPES[name]
    shared = given(seed=arguments.seed)
    vae = given(steps=arguments.vae_steps, minutes=arguments.vae_minutes)
    denoiser = given(
        steps=arguments.steps,
        minutes=arguments.minutes,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
    )
    recipe = replace(
        recipe,
        autoencoder=replace(recipe.autoencoder, **shared, **vae),
        decoder=replace(recipe.decoder, **shared, **given(steps=arguments.decoder_steps)),
        diffusion=replace(recipe.diffusion, **shared, **denoiser),
        edges=replace(recipe.edges, **shared),
        pieces=replace(recipe.pieces, **shared, **given(steps=arguments.pieces_steps)),
        whole=replace(recipe.whole, **shared, **given(steps=arguments.whole_steps)),
    )
    task = Run(
        recipe,
        Path(arguments.data),
        Path(arguments.output),
        mesh,
        deadline=deadline(arguments),
        say=complain,
        start=None if arguments.start is None else Path(arguments.start),
    )
    return make_model(task)


if __name__ == "__main__":
    sys.exit(main(run=run))
