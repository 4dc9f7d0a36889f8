"""The flags of ``canvax train``, read off the records of ``canvax.train.settings``."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.call import Load, LoadFlags
from canvax.cli.generate_arguments import add_report
from canvax.settings import add_flags
from canvax.train.settings import LOADING, TAGS, TASKS, PlanRecord, Task, TrainingRecord

_CAPTIONED = """
Images are in a folder, or a zip file of one. Captions are in metadata.jsonl or metadata.csv with the columns file_name
and text, or in a .txt file with the name of each image.
"""
_AGAIN = " A stopped run can be resumed with the same command."
_REQUIRED = ("prompt", "token", "initializer")


def add_train(commands: Any) -> None:
    """Add ``canvax train`` and its tasks."""
    train = commands.add_parser("train", help="train a model", description="Train a model.")
    tasks = train.add_subparsers(dest="task", metavar="|".join(TASKS), required=True)
    for name, task in TASKS.items():
        epilog = _CAPTIONED * task.captioned + _AGAIN
        _add_task(tasks.add_parser(name, help=task.summary, description=task.description, epilog=epilog), task)


def _add_task(parser: argparse.ArgumentParser, task: Task) -> None:
    parser.add_argument("pictures", metavar="IMAGES", help=f"folder or zip file of {task.images}")
    add_flags(parser, Load, names=("model", *LOADING))
    add_flags(parser, LoadFlags, names=("data_dir",))
    output = ("-o", "--output", "--output-dir")
    parser.add_argument(*output, required=True, metavar="FOLDER", help=f"folder of the run; {task.writes}")
    for record in task.records:
        seen = {action.dest for action in parser._actions}  # two records may share a setting
        add_flags(parser, record, without=seen)
    without = task.without if task.captioned else (*task.without, "caption_column", *TAGS)
    for record in (PlanRecord, TrainingRecord):
        add_flags(parser, record, without=(*without, "seed"), usual=task.usual)
    for action in parser._actions:
        action.required = action.required or action.dest in _REQUIRED
    run_flags(parser)


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all training tasks share."""
    add_flags(parser, PlanRecord, names=("seed",))
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="save the state and stop after this time")
    add_report(parser, quiet="")
