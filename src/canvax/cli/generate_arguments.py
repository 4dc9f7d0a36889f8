"""The flags of ``canvax generate``, and those of models that other commands share."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.call import (
    CONTROL,
    HIRES,
    IMAGE,
    PROMPTS,
    SAMPLING,
    SDXL,
    SUBJECT,
    Call,
    Enlarging,
    FromFiles,
    Load,
    LoadFlags,
    OptionRecord,
)
from canvax.cli.adapters import add_adapters
from canvax.cli.loading import add_load
from canvax.errors import InputError
from canvax.settings import add_flags

OUTPUT = "out"


class Once(argparse.Action):
    """A flag that is refused the second time, because people who repeat it mean both values."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise InputError(f"{option_string} is given twice; give it once")
        setattr(namespace, self.dest, values)


def add_report(group: Any, json: str = "print one JSON object", quiet: str = "no progress on stderr") -> None:
    """Add the flags of what a command prints; without ``quiet`` the first alone."""
    group.add_argument("--json", action="store_true", help=json)
    if quiet:
        group.add_argument("-q", "--quiet", action="store_true", help=quiet)


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax generate``."""
    _subject(parser)
    _add_groups(parser, IMAGE, CONTROL, PROMPTS, SAMPLING, HIRES, SDXL)
    for add in (add_load, add_adapters, _processes, _where_to):
        add(parser)


def add_upscale(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax upscale``."""
    parser.add_argument("file", metavar="IMAGE", help="a PNG, JPEG or WebP")
    add_flags(parser, Enlarging, names=("scale", "strength", "overlap"))
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="text that fits every part")
    add_flags(parser, Call, names=("negative_prompt", "seed"), help={"seed": "seed (-1: random)"})
    group = parser.add_argument_group(
        "with a network for which each tile is a control image, such as a tile ControlNet"
    )
    add_flags(group, Load, group=CONTROL)
    add_flags(group, OptionRecord, group=CONTROL)
    group = parser.add_argument_group("image to image of each tile")
    add_flags(group, OptionRecord, names=("strength_rule", "image_encoding"))
    _add_groups(parser, SAMPLING, SDXL)
    for add in (add_load, add_adapters, _processes, _where_to):
        add(parser)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax batch``."""
    parser.add_argument("file", metavar="FILE", help=".jsonl, .csv, .parquet, or .txt with a prompt a line")
    group = parser.add_argument_group("settings of rows that lack them")
    add_flags(group, Call, names=("negative_prompt", "height", "width"))
    group.add_argument(
        "-s", "--seed", type=int, default=0, metavar="SEED", help="seed of rows without one, combined with their id"
    )
    _add_groups(parser, IMAGE, CONTROL, PROMPTS, SAMPLING, HIRES, SDXL)
    for add in (add_load, add_adapters, _processes):
        add(parser)
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new folder, or that of a job to resume")
    group.add_argument(
        "--into", choices=["files", "tar", "parquet"], default="files",
        help="a file for each image (the default), or shards: tar files of webdataset, or Parquet",
    )  # fmt: skip
    group.add_argument("--shard-size", type=int, metavar="N", help="images of a shard (1000)")
    group.add_argument("--format", choices=["png", "webp", "jpg"], default="png", help="format of images (png)")
    group.add_argument(
        "--file-quality", type=int, metavar="N",
        help="1..100, of jpg (95) and webp (lossless)",
    )  # fmt: skip
    group.add_argument("--carry", nargs="+", default=[], metavar="NAME", help="columns to copy into manifest.jsonl")
    group.add_argument("--retry-errors", action="store_true", help="generate failed rows again")
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once (chosen from their size)")
    add_report(group)
    group = parser.add_argument_group("on a cluster")
    group.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS",
        help="generate on a Ray cluster: this machine's, another's address, or local to start one here",
    )  # fmt: skip
    group.add_argument("--actors", type=int, metavar="N", help="with --ray: models (one a device)")
    group.add_argument(
        "--share", metavar="K/N", help="every Nth row from K, 0 to N-1, for N jobs on one file and folder"
    )


def _subject(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(SUBJECT)
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to generate images from")
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="PROMPT", help="another prompt")
    group.add_argument("--prompt-file", metavar="FILE", help="prompts from a file, - for stdin")
    group.add_argument("--from-image", metavar="PNG", help="settings from this image's metadata; flags override them")
    add_flags(group, Call, group=SUBJECT)


def _add_groups(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add groups of settings with all their flags."""
    for name in names:
        group = parser.add_argument_group(name)
        for record in (Load, LoadFlags, Call, FromFiles, OptionRecord):
            add_flags(group, record, group=name)


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax control``."""
    parser.add_argument("kind", metavar="KIND", help="canny, invert, threshold or blur")
    parser.add_argument("file", metavar="IMAGE", help="a PNG, JPEG or WebP")
    parser.add_argument("output", metavar="OUTPUT", help="a .png, .jpg or .webp to write")
    parser.add_argument("--low", type=float, metavar="X", help="canny: smallest gradient that continues an edge (100)")
    parser.add_argument("--high", type=float, metavar="X", help="canny: smallest gradient that begins an edge (200)")
    parser.add_argument("--at", type=float, metavar="X", help="threshold: the darkest white (127)")
    parser.add_argument("--radius", type=float, metavar="PIXELS", help="blur: its standard deviation (9)")
    add_report(parser, quiet="")


def _processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed", action="store_true",
        help="join the processes of a TPU pod, of Slurm or of the next three flags; each writes its images",
    )  # fmt: skip
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="number of this process, from 0")


def _where_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output",
        default=OUTPUT,
        metavar="PATH",
        help=f"a folder, or NAME.png, .jpg or .webp for one image or the grid ({OUTPUT})",
    )
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once (chosen from their size)")
    group.add_argument("--preview", metavar="FILE", help="image file that shows progress")
    group.add_argument("--grid", action="store_true", help="also write one grid of all images")
    add_report(group)
