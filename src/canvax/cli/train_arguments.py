"""The flags of ``canvax train``."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.generate_arguments import add_report

_CAPTIONED = """
Images are in a folder, or a zip file of one. Captions are in metadata.jsonl or metadata.csv with the columns file_name
and text, or in a .txt file beside each image.
"""
_AGAIN = " A stopped run can be resumed with the same command."


def add_train(commands: Any) -> None:
    """Add ``canvax train`` and its tasks."""
    train = commands.add_parser("train", help="train a model", description="Train a model.")
    kinds = "lora|dreambooth|textual-inversion|controlnet|finetune"
    tasks = train.add_subparsers(dest="task", metavar=kinds, required=True)
    _finetune(tasks)
    _lora(tasks)
    _dreambooth(tasks)
    _textual_inversion(tasks)
    _controlnet(tasks)


def _task(tasks: Any, name: str, summary: str, description: str, images: str, epilog: str = "") -> Any:
    """The parser of a task, with the flags of all of them."""
    parser = tasks.add_parser(name, help=summary, description=description, epilog=epilog + _AGAIN)
    parser.add_argument("pictures", metavar="IMAGES", help=f"folder or zip file of {images}")
    parser.add_argument("-m", "--model", default="emoji", help="emoji, a folder, a file, or a Hub id owner/name")
    return parser


def _finetune(tasks: Any) -> None:
    parser = _task(
        tasks,
        "finetune",
        "train a checkpoint further on your own images",
        "Train the UNet of a Stable Diffusion checkpoint (1.x, 2.x, XL) on captioned images.",
        "captioned images",
        _CAPTIONED,
    )
    _output(parser, "it gets the model in model/")
    _plan(parser, steps="1000", rate="1e-5")
    _images(parser, empty="0.1")
    _text_encoder(parser)
    _save_dtype(parser)
    run_flags(parser)


def _lora(tasks: Any) -> None:
    parser = _task(
        tasks,
        "lora",
        "train a LoRA on your own images",
        "Train low-rank factors beside the weights of a checkpoint (Stable Diffusion 1.x, 2.x and XL, Z-Image, FLUX.2 "
        "klein, Krea 2) on captioned images. The file loads in canvax, in PyTorch diffusers, and with --format kohya "
        "in A1111 and its relatives.",
        "captioned images",
        _CAPTIONED,
    )
    _output(parser, "it gets pytorch_lora_weights.safetensors")
    _plan(parser, steps="1000", rate="1e-4")
    _images(parser, empty="0")
    _text_encoder(parser)
    _lora_flags(parser)
    _save_dtype(parser)
    run_flags(parser)


def _dreambooth(tasks: Any) -> None:
    parser = _task(
        tasks,
        "dreambooth",
        "teach a model one thing, from a few images of it",
        "Train on a few images of one thing, with a rare word for it, and on images that the model generates of its "
        "class. Trains the whole UNet, or with --lora a LoRA.",
        "images of the thing; captions are not read",
    )
    parser.add_argument(
        "-p", "--instance-prompt", required=True, metavar="PROMPT", help='what they show: "a photo of sks dog"'
    )
    parser.add_argument("--class-prompt", metavar="PROMPT", help='"a photo of a dog"; with it, prior preservation')
    parser.add_argument(
        "--class-images", "--class-data-dir", metavar="FOLDER", help="of the class; what is lacking is generated"
    )
    parser.add_argument("--num-class-images", type=int, default=100, metavar="N", help="images of the class (100)")
    parser.add_argument(
        "--prior-weight", "--prior-loss-weight", type=float, default=1.0, metavar="X", help="of the loss on them (1)"
    )
    parser.add_argument("--lora", action="store_true", help="train a LoRA, not the whole UNet")
    _output(parser, "it gets the model in model/, or the LoRA")
    _plan(parser, steps="400", rate="5e-6, of a LoRA 1e-4")
    _images(parser, empty="0", captioned=False)
    _text_encoder(parser)
    _lora_flags(parser)
    _save_dtype(parser)
    run_flags(parser)


def _textual_inversion(tasks: Any) -> None:
    parser = _task(
        tasks,
        "textual-inversion",
        "teach a model a new word",
        "Train the vectors of a new word, and nothing else, on a few images of what it means.",
        "images of what the word means; captions are not read",
    )
    parser.add_argument("--token", "--placeholder-token", required=True, metavar="WORD", help='such as "<cat-toy>"')
    parser.add_argument(
        "--initializer", "--initializer-token", required=True, metavar="WORD", help="a known word to begin with: toy"
    )
    parser.add_argument("--vectors", "--num-vectors", type=int, default=1, metavar="N", help="tokens of the word (1)")
    parser.add_argument(
        "--learn", "--learnable-property", default="object", metavar="KIND", help="object, style, or word: no sentences"
    )
    _output(parser, "it gets learned_embeds.safetensors")
    _plan(parser, steps="5000", rate="5e-4")
    _images(parser, empty="0", captioned=False)
    run_flags(parser)


def _controlnet(tasks: Any) -> None:
    parser = _task(
        tasks,
        "controlnet",
        "train a ControlNet on pairs of images",
        "Train a copy of the UNet's way down to read control images. Rows of the table of captions name a control "
        "image beside each image.",
        "images, control images and captions",
        _CAPTIONED,
    )
    parser.add_argument(
        "--control-column", "--conditioning-image-column", default="conditioning_image", metavar="NAME",
        help="column of the files of control images (conditioning_image)",
    )  # fmt: skip
    parser.add_argument(
        "--hint-channels", metavar="N,N", help="channels of the network that reads the image (16,32,96,256)"
    )
    _output(parser, "it gets the network in controlnet/")
    _plan(parser, steps="5000", rate="1e-5")
    _images(parser, empty="0", preview=False)
    _save_dtype(parser)
    run_flags(parser)


def _output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "-o", "--output", "--output-dir", required=True, metavar="FOLDER", help=f"folder of the run; {what}"
    )
    parser.add_argument(
        "--save-every", "--checkpointing-steps", "--save-every-n-steps", "--save-steps", type=int, dest="save_steps",
        metavar="N", help="save the weights of every Nth step, as ...-000500 (the last ones alone)",
    )  # fmt: skip
    parser.add_argument(
        "--tensorboard", "--logging-dir", metavar="FOLDER", help="write curves and previews there, for TensorBoard"
    )


def _plan(parser: argparse.ArgumentParser, *, steps: str, rate: str) -> None:
    """How long and how."""
    parser.add_argument("--steps", "--max-train-steps", type=int, metavar="N", help=f"training steps ({steps})")
    parser.add_argument(
        "-b", "--batch-size", "--train-batch-size", type=int, dest="batch", metavar="N", help="images of a batch (1)"
    )
    parser.add_argument(
        "--accumulate", "--gradient-accumulation-steps", type=int, metavar="N", help="batches of a training step (1)"
    )
    parser.add_argument("--learning-rate", "--lr", type=float, metavar="RATE", help=f"learning rate ({rate})")
    parser.add_argument(
        "--warmup", "--lr-warmup-steps", type=int, metavar="N", help="steps of linear warm-up of the learning rate (0)"
    )
    parser.add_argument(
        "--final-lr", type=float, dest="final", metavar="SHARE",
        help="share of the learning rate that a cosine ends at (1: constant)",
    )  # fmt: skip
    parser.add_argument("--weight-decay", type=float, metavar="X", help="AdamW's, of matrices and convolutions (0.01)")
    parser.add_argument(
        "--ema", type=float, dest="average", metavar="DECAY", help="moving average, such as 0.999 (none)"
    )


def _images(parser: argparse.ArgumentParser, *, empty: str, captioned: bool = True, preview: bool = True) -> None:
    """What is seen of the images."""
    parser.add_argument(
        "--size",
        "--resolution",
        type=int,
        metavar="PIXELS",
        help="side of the square images (what the model was trained with)",
    )
    if captioned:
        parser.add_argument("--caption-column", default="text", metavar="NAME", help="column of the captions (text)")
    parser.add_argument("--flip", "--random-flip", action="store_true", help="also train on mirrored images")
    parser.add_argument(
        "--empty-captions", "--proportion-empty-prompts", type=float, dest="empty", default=float(empty),
        metavar="SHARE",
        help=f"share of captions that are left out ({empty})",
    )  # fmt: skip
    parser.add_argument(
        "--min-snr", "--snr-gamma", type=float, dest="gamma", metavar="GAMMA",
        help="gamma of min-SNR loss weighting; 5 is usual (none)",
    )  # fmt: skip
    parser.add_argument(
        "--unmasked-weight", type=float, metavar="WEIGHT",
        help="least weight of what masks leave out, 0 to 1 (0); 1 does not read masks",
    )  # fmt: skip
    parser.add_argument(
        "--remat", "--gradient-checkpointing", action="store_true", help="recompute activations: less memory, more time"
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="dtype of the computation (bfloat16 on GPU and TPU, float32 on the CPU)"
    )
    if preview:
        parser.add_argument(
            "--preview", "--validation-prompt", action="append", default=[], metavar="PROMPT",
            help="generate this prompt during training",
        )  # fmt: skip
        parser.add_argument(
            "--preview-every", "--validation-steps", "--sample-every-n-steps", type=int, dest="preview_steps",
            metavar="N", help="steps between previews (every 15 minutes)",
        )  # fmt: skip


def _text_encoder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-encoder", "--train-text-encoder", dest="text", action="store_true", help="train text encoders too"
    )
    parser.add_argument(
        "--text-lr", "--text-encoder-lr", dest="text_rate", type=float, metavar="RATE",
        help="their learning rate (the same)",
    )  # fmt: skip


def _lora_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", "--network-dim", type=int, default=4, metavar="N", help="rank of the factors (4)")
    parser.add_argument(
        "--alpha", "--network-alpha", type=float, metavar="X", help="the change is alpha / rank as strong (the rank)"
    )
    parser.add_argument(
        "--layers", default="attention", metavar="KIND", help="attention, transformer (with feed-forward), or all"
    )
    parser.add_argument(
        "--format", dest="names", default="peft", metavar="NAME", help="names in the file: peft (diffusers) or kohya"
    )
    parser.add_argument("--trigger", metavar="WORDS", help="words that call it up, for the file's metadata")
    parser.add_argument("--title", metavar="TEXT", help="title for the file's metadata (the name of the folder)")
    parser.add_argument(
        "--from", "--network-weights", dest="start", metavar="LORA",
        help="begin with this LoRA, of the same rank and layers: a file, a folder or a Hub id",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", metavar="KIND", help="int8 or float8: keep the frozen weights in 8 bits; implies --remat"
    )


def _save_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save-dtype", default="float32", metavar="DTYPE", help="dtype of the saved weights (float32)")


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all training tasks share."""
    parser.add_argument("-s", "--seed", type=int, metavar="SEED", help="seed of all random choices (0)")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="save the state and stop after this time")
    add_report(parser, quiet="")
