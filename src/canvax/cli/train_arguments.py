"""The flags of ``canvax train``."""

from __future__ import annotations

import argparse
from typing import Any

_FINETUNE_HELP = """
Images are in a folder, or a zip file of one. Captions are in metadata.jsonl or metadata.csv with the columns file_name
and text, or in a .txt file beside each image. A stopped run can be resumed with the same command.
"""


def add_train(commands: Any) -> None:
    """Add ``canvax train finetune``."""
    train = commands.add_parser("train", help="train a model", description="Train a model.")
    tasks = train.add_subparsers(dest="task", metavar="TASK", required=True)
    _finetune(tasks)


def _finetune(tasks: Any) -> None:
    parser = tasks.add_parser(
        "finetune",
        help="train a checkpoint further on your own images",
        description="Train the UNet of a Stable Diffusion 1.x or 2.x checkpoint on captioned images.",
        epilog=_FINETUNE_HELP,
    )
    parser.add_argument("pictures", metavar="IMAGES", help="folder or zip file of captioned images")
    parser.add_argument("-m", "--model", default="emoji", help="emoji, a folder, or a Hub id owner/name")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="folder of the run; it gets the model in model/"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (1000)")
    parser.add_argument("-b", "--batch-size", type=int, dest="batch", metavar="N", help="images a training step (1)")
    parser.add_argument("--learning-rate", "--lr", type=float, metavar="X", help="learning rate (1e-5)")
    parser.add_argument("--warmup", type=int, metavar="N", help="steps of linear warm-up of the learning rate (0)")
    parser.add_argument(
        "--size", "--resolution", type=int, metavar="PIXELS", help="side of the square images (the model's own)"
    )
    parser.add_argument("--caption-column", default="text", metavar="NAME", help="column of the captions (text)")
    parser.add_argument("--flip", action="store_true", help="also train on a mirrored copy of each image")
    parser.add_argument("--min-snr", type=float, metavar="GAMMA", help="min-SNR weights, such as 5 (none)")
    parser.add_argument(
        "--ema", type=float, dest="average", metavar="DECAY", help="moving average, such as 0.999 (none)"
    )
    parser.add_argument("--remat", action="store_true", help="recompute activations: less memory, more time")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="dtype of the computation (bfloat16 on GPU and TPU, float32 on the CPU)"
    )
    parser.add_argument("--save-dtype", default="float32", metavar="DTYPE", help="dtype of the saved weights (float32)")
    parser.add_argument(
        "--preview", action="append", default=[], metavar="PROMPT", help="generate this prompt during training"
    )
    run_flags(parser)


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all training tasks share."""
    parser.add_argument("-s", "--seed", type=int, metavar="SEED", help="seed of all random choices (0)")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="save the state and stop after this time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
