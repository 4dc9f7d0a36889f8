"""The flags of ``canvax train``."""

from __future__ import annotations

import argparse
from typing import Any

_FINETUNE_HELP = """
Pictures are in a folder (or a zip file of one) with metadata.jsonl or metadata.csv, whose columns are file_name and
text, or with a .txt beside each picture. Stop it as you like: the same command goes on.
"""


def add_train(commands: Any) -> None:
    """Add ``canvax train finetune``."""
    train = commands.add_parser("train", help="train a model", description="Train a model.")
    tasks = train.add_subparsers(dest="task", metavar="TASK", required=True)
    _finetune(tasks)


def _finetune(tasks: Any) -> None:
    parser = tasks.add_parser(
        "finetune",
        help="go on with a checkpoint on pictures of your own",
        description="Train the UNet of a Stable Diffusion 1.x or 2.x checkpoint on captioned pictures.",
        epilog=_FINETUNE_HELP,
    )
    parser.add_argument("pictures", metavar="PICTURES", help="folder or zip file of captioned pictures")
    parser.add_argument("-m", "--model", default="emoji", help="emoji, a folder, or a Hub id owner/name")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="the run; the model is in its model/")
    parser.add_argument("--steps", type=int, metavar="N", help="updates (1000)")
    parser.add_argument("-b", "--batch-size", type=int, dest="batch", metavar="N", help="pictures an update (1)")
    parser.add_argument("--learning-rate", "--lr", type=float, metavar="X", help="(1e-5)")
    parser.add_argument("--warmup", type=int, metavar="N", help="updates until it is reached (0)")
    parser.add_argument("--size", "--resolution", type=int, metavar="PIXELS", help="of a side (the model's own)")
    parser.add_argument("--caption-column", default="text", metavar="NAME", help="(text)")
    parser.add_argument("--flip", action="store_true", help="show every picture mirrored as well")
    parser.add_argument("--min-snr", type=float, metavar="GAMMA", help="min-SNR weights, such as 5 (none)")
    parser.add_argument(
        "--ema", type=float, dest="average", metavar="DECAY", help="moving average, such as 0.999 (none)"
    )
    parser.add_argument("--remat", action="store_true", help="less memory, more time")
    parser.add_argument("--dtype", metavar="DTYPE", help="computed in (bfloat16 on GPU and TPU, float32 on the CPU)")
    parser.add_argument("--save-dtype", default="float32", metavar="DTYPE", help="of the finished weights (float32)")
    parser.add_argument("--preview", action="append", default=[], metavar="PROMPT", help="draw it along the way")
    run_flags(parser)


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every training."""
    parser.add_argument("-s", "--seed", type=int, metavar="SEED", help="decides every random choice (0)")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="write the state and stop then")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
