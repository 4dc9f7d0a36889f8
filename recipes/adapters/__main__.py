"""Adapters for the emoji model: its data, the training, and the sheets of the docs.

python -m recipes.emoji data out/emoji.zip
python -m recipes.adapters data out/emoji.zip -o out/adapters
python -m recipes.adapters commands -o out/adapters
python -m recipes.adapters sheets -o out/adapters --images docs/images
python -m recipes.adapters measure out/emoji.zip -o out/adapters
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canvax.cli import main
from canvax.cli.arguments import Parser
from canvax.train.pictures import read_pictures
from recipes.adapters.sets import SIZE, write_edges, write_night, write_one
from recipes.adapters.sheets import covered, draw_sheets

CAPTIONS = 4
"""Of each drawing at night: those that name its style, which the model follows best."""

ALL_CAPTIONS = 12
"""Of each drawing with edges: with and without its style."""

COMMANDS = """
canvax train lora {0}/night -o {0}/trained/night --layers all --rank 8 --alpha 16 --steps 1000 -b 16 --lr 1.5e-3 \\
    --warmup 50 --final-lr 0.02 --min-snr 5 --ema 0.99 --empty-captions 0.1 --save-dtype float16
canvax train textual-inversion {0}/one -o {0}/trained/rainbow-flag --token "<rainbow-flag>" --initializer "rainbow" \\
    --vectors 4 --learn word --steps 1000 -b 8 --lr 5e-3
canvax train controlnet {0}/edges -o {0}/trained/edges --hint-channels 8,8,8,16,24,32 --steps 7000 -b 8 --lr 2e-3 \\
    --warmup 50 --final-lr 0.02 --min-snr 5 --empty-captions 0.5 --ema 0.998 --save-dtype float16
""".strip()
"""How the files in ``files`` and the sheets are made."""


def run(arguments: Sequence[str], report: dict[str, Any]) -> None:
    """Parse the arguments and do the task."""
    parser = Parser(
        prog="python -m recipes.adapters", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    data = tasks.add_parser("data", help="make the three data sets")
    data.add_argument("drawings", metavar="FILE.zip", help="what `python -m recipes.emoji data` wrote")
    data.add_argument("--packages", metavar="FOLDER", help="tarballs that are here already, in place of npm")
    commands = tasks.add_parser("commands", help="print the commands that train on them")
    sheets = tasks.add_parser("sheets", help="generate images with what was trained")
    sheets.add_argument("--images", required=True, metavar="FOLDER")
    measure = tasks.add_parser("measure", help="how well images follow edges of drawings that no training saw")
    measure.add_argument("drawings", metavar="FILE.zip", help="as for data")
    for task in (data, commands, sheets, measure):
        task.add_argument("-o", "--output", required=True, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    report["task"] = chosen.task
    folder = Path(chosen.output)
    if chosen.task == "commands":
        print(COMMANDS.format(folder))
    elif chosen.task == "data":
        drawings = read_pictures(chosen.drawings, SIZE).split("train")
        write_one(folder / "one", None if chosen.packages is None else Path(chosen.packages))  # first: it needs npm
        write_night(drawings.select(range(0, len(drawings), 3)), folder / "night", CAPTIONS)
        write_edges(drawings, folder / "edges", ALL_CAPTIONS)
    elif chosen.task == "measure":
        held_out = read_pictures(chosen.drawings, SIZE).split("test")
        for name, share in covered(folder / "trained" / "edges" / "controlnet", held_out).items():
            print(f"{share:.3f}  {name}")
    else:
        draw_sheets(folder, Path(chosen.images))


if __name__ == "__main__":
    sys.exit(main(run=run))
