"""The parser of the command line. It also takes the flag names of diffusers, A1111 and related programs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any, NoReturn

from canvax._version import __version__
from canvax.call import Call
from canvax.cli.generate_arguments import (
    BATCH,
    SIZE,
    Once,
    add_batch,
    add_control,
    add_generate,
    add_report,
    add_size,
    add_upscale,
)
from canvax.cli.loading import add_load, add_networks
from canvax.cli.parser import Parser, writer
from canvax.cli.serve_arguments import SERVE_EXAMPLES, add_serve
from canvax.cli.terminal import say
from canvax.cli.train_arguments import add_train
from canvax.errors import InputError, did_you_mean, slip
from canvax.settings import add_flags

_COMMANDS = "generate sheet upscale control batch serve compile convert info plan bench samplers cache train"
COMMANDS = {name: name for name in _COMMANDS.split()} | {"ui": "serve"}
"""Each command, with the module of this package that runs it."""

_EXAMPLES = """
examples:
  canvax generate "a red apple"                            one image, in the folder out
  canvax generate "a cat" "a dog" -n 4 --grid              eight images and a grid
  canvax generate "a cat" -s 7 --steps 30 -g 5 -o cat.png
  canvax generate --prompt-file prompts.txt -b 8 --json    many images, one JSON object on stdout
  canvax generate "a fox" -m owner/name --sampler "DPM++ 2M Karras"
  canvax generate --from-image out/00000-7.png --steps 50  the same image, with more steps
  canvax compile owner/name --size 1024x1024 --batch 1 4   later commands need not compile
"""
_SHEET_EXAMPLES = """
examples:
  canvax sheet "a cat" --x steps=5,10,20 --y sampler="Euler,DPM++ 2M,UniPC" -s 1
  canvax sheet "a cat" --x guidance=1,3,5,7 --y "prompt=a cat;a dog" -o sheet.png
  canvax sheet "a fox" --image lemon.png --x strength=0.3,0.5,0.7,0.9
  canvax sheet "a cat" --x size=512x512,768x512 --y "model=owner/name,./mine.safetensors"
  canvax sheet "a cat" --lora ink.safetensors --x lora=0,0.5,1 --y vae=owner/one,owner/two
"""
_BATCH_EXAMPLES = """
A row has a prompt and further settings: id, seed, steps, sampler, guidance_scale, width, negative_prompt, ...
  {"id": "fox-1", "prompt": "a fox in the snow", "seed": 7, "steps": 30}

examples:
  canvax batch prompts.jsonl -o images
  canvax batch prompts.csv -o shards -m owner/name --into tar --format webp --batch-size 16
  canvax batch prompts.parquet -o images --ray --actors 8
"""
_PLAN_EXAMPLES = """
examples:
  canvax plan sdxl --target tpu-v5e:2x2 --steps 20            one 1024 x 1024 image on each of four chips
  canvax plan sd15 --target tpu-v4:2x2x1 --batch 16 --size 768x512
  canvax plan sdxl --target gpu-l4                             does it fit into JAX's part of 24 GB?
  canvax plan qwen-image-edit-2511 --target tpu-v6e:2x2 --quantize int8 --references 2
  canvax plan ./my-model --target tpu-v6e:2x4 --json
"""
_BENCH_EXAMPLES = """
examples:
  canvax bench
  canvax bench owner/name --size 1024x1024 --batch 4 --steps 30 --dtype bfloat16
"""
_CONVERT_EXAMPLES = """
examples:
  canvax convert model.safetensors my-model              a folder in the diffusers layout
  canvax convert my-model model.safetensors --dtype float16
  canvax convert old.ckpt old.safetensors                the tensors of a pickle, without running it
  canvax convert embeddings embeddings                   all pickles of a folder
"""
_FILES = """
A prompt file holds one prompt a line. Empty lines and lines that start with # are ignored. A line that starts with {
is a JSON object: {"prompt": "a cat", "seed": 7, "steps": 30, "negative_prompt": "..."}. It overrides the flags.
"""


class _Version(argparse.Action):
    """An action that prints versions without starting a JAX backend, or even importing JAX."""

    def __call__(self, *_: Any) -> NoReturn:
        say(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise SystemExit(0)


def versions() -> dict[str, str]:
    """Return the versions of canvax, JAX and Python."""
    numbers = {"canvax": __version__}
    for name in ("jax", "jaxlib"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = "missing"
    return numbers | {"python": ".".join(map(str, sys.version_info[:3]))}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Words after ``--`` are prompts, whatever they start with.

    The result's ``write`` writes an argument as its flag, for errors.

    Raises:
        InputError: an argument is unknown or malformed.
    """
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    if words in ([], ["help"]):
        parser.print_help()
        raise SystemExit(0)
    if words[0] == "help" and words[1:2] and words[1] in COMMANDS:
        words, end = [words[1], "--help"], 2
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        word = words[0].lower()
        begun = (name for name in COMMANDS if len(word) > 1 and name.startswith(word))
        meant = slip(word, COMMANDS) or next(begun, None)
        if meant is None:  # a prompt, quoted or not
            meant = f"generate {shlex.quote(' '.join(takewhile(lambda word: not word.startswith('-'), words)))}"
        parser.error(f"{words[0]!r} is not a command; did you mean: canvax {meant}?")
    if words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        near = did_you_mean(words[0], ("--version", "--help"))
        cure = near or "a command comes first: canvax generate 'a cat'"
        parser.error(f"{words[0]!r} is not a flag of canvax alone; {cure}")
    arguments = parser.parse_args(words[:end])
    takes_prompts = arguments.command in ("generate", "sheet")
    if takes_prompts:
        _refuse_images(arguments)
    if words[end + 1 :]:
        if not takes_prompts:
            parser.error(f"{words[end + 1]!r} is not expected here")
        arguments.prompts += words[end + 1 :]
    arguments.write = writer(parser, arguments)
    return arguments


def _refuse_images(arguments: argparse.Namespace) -> None:
    """Refuse prompts that are files of images, as ``--image *.png`` leaves them.

    Raises:
        InputError: about the first of them.
    """
    prompts: list[str] = arguments.prompts
    for word in prompts:
        if not os.path.isfile(word):
            continue
        from PIL import Image  # here, since `canvax --help` does not import it

        if os.path.splitext(word)[1].lower() in Image.registered_extensions():
            use = "further references: --reference" if arguments.image else "an image to start from: --image"
            cure = f"{use} {shlex.quote(word)}; many images: canvax batch"
            raise InputError(f"{word!r} is a file, not a prompt; {cure}")


def build_parser() -> Parser:
    """Return the parser of the whole command."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="canvax",
        description="Images from text in JAX: Stable Diffusion, Z-Image, FLUX.1, Chroma, FLUX.2 klein, "
        "FLUX.3 klein, Krea 2, Qwen-Image 1 and Qwen-Image-2.1, Anima.",
        epilog=_EXAMPLES,
        formatter_class=plain,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate",
        usage="canvax generate PROMPT ... [flags]",
        help="generate images",
        description="Generate images. Prints the name of each file; everything else goes to stderr.",
        epilog=_FILES + _EXAMPLES,
        formatter_class=plain,
    )
    add_generate(generate)
    _derived(commands, plain)
    add_serve(commands.add_parser(
        "serve",
        help="generate images for programs and browsers: a server",
        description="Serve models over HTTP: a page for browsers, and the APIs of OpenAI, AUTOMATIC1111 and Hugging "
        "Face, besides canvax's own.",
        epilog=SERVE_EXAMPLES,
        formatter_class=plain,
    ))  # fmt: skip
    add_serve(commands.add_parser(
        "ui",
        help="generate images in the browser",
        description="Start the server and open its page in the browser. Flags are those of canvax serve.",
    ))  # fmt: skip
    _compile(commands.add_parser(
        "compile",
        help="compile a model's programs in advance",
        description="Compile the programs of a model and cache them, without reading its weights or generating "
        "images. For a server: canvax serve --compile-only, with the server's flags.",
    ))  # fmt: skip
    _convert(commands.add_parser(
        "convert",
        help="write a model in another form: a folder, one file, a pickle's tensors",
        description="Write a model as one safetensors file or as a folder in the diffusers layout, bit for bit. From "
        "a pickle (.ckpt, .bin, .pt) its tensors become a safetensors file; nothing in it is run.",
        epilog=_CONVERT_EXAMPLES,
        formatter_class=plain,
    ))  # fmt: skip
    _info(commands)
    _plan(commands.add_parser(
        "plan",
        help="estimate whether a model fits on a TPU or GPU, and its time (no device needed)",
        description="Compile a model for TPUs or GPUs that this machine does not have, and report memory, FLOPs and "
        "collectives; for TPUs also the compiler's estimate of the time. Needs pip install \".[tpu]\" or \".[cuda]\". "
        "Reads no weights.",
        epilog=_PLAN_EXAMPLES,
        formatter_class=plain,
    ))  # fmt: skip
    _bench(commands.add_parser(
        "bench",
        help="measure how fast this machine generates images",
        description="Time whole images, from text to pixels, on this machine. Compile time is reported separately.",
        epilog=_BENCH_EXAMPLES,
        formatter_class=plain,
    ))  # fmt: skip
    _samplers(commands)
    _cache(commands.add_parser(
        "cache",
        help="list or clear the cache of compiled programs",
        description="List the cached programs (list), print their folder (path), or remove them (clear).",
    ))  # fmt: skip
    add_train(commands)
    return parser


def _info(commands: Any) -> None:
    info = commands.add_parser(
        "info",
        help="describe a model or an image",
        description="Describe a model (only headers are read), or show how an image was generated.",
    )
    info.add_argument("what", metavar="MODEL|IMAGE.png", help="emoji, a folder, a Hub id owner/name, or a PNG")
    _memory(info)
    add_load(info, without=("model", "safety_checker", "offload"))
    info.add_argument(
        "--prompts", dest="concepts", action="store_true", help="list the concepts that a small model knows"
    )
    add_report(info, quiet="")


def _derived(commands: Any, plain: Any) -> None:
    """Add the commands that derive from ``generate``."""
    sheet = commands.add_parser(
        "sheet",
        usage="canvax sheet PROMPT --x NAME=VALUES [--y NAME=VALUES] [flags]",
        help="compare settings: a grid over one or two of them, as one image with labels",
        description="Generate one prompt over the values of one or two settings, with one seed, as one image with "
        "labels. The other flags are those of canvax generate.",
        epilog=_SHEET_EXAMPLES,
        formatter_class=plain,
    )
    sheet.add_argument(
        "--x",
        action=Once,
        metavar="NAME=VALUES",
        help="across: steps=10,20,40; values with commas: prompt='a;b'; "
        "besides settings: size, model, vae, lora (its weights)",
    )
    sheet.add_argument("--y", action=Once, metavar="NAME=VALUES", help="down: sampler='Euler,DPM++ 2M'")
    add_generate(sheet)
    upscale = commands.add_parser(
        "upscale",
        usage="canvax upscale IMAGE [--scale X] [-p PROMPT] [flags]",
        help="enlarge an image, with details that the model adds",
        description="Enlarge an image and refine it tile by tile at the size that the model was trained for.",
    )
    add_upscale(upscale)
    control = commands.add_parser(
        "control",
        usage="canvax control KIND IMAGE OUTPUT [flags]",
        help="turn an image into a control image, for example its edges",
        description="Make a control image from an image, for canvax generate --control.",
    )
    add_control(control)
    batch = commands.add_parser(
        "batch",
        usage="canvax batch FILE --output FOLDER [flags]",
        help="generate the images of a file of prompts; the same command resumes a stopped job",
        description="Generate an image for each row of a file. A row that cannot be generated becomes a line with its "
        "error in manifest.jsonl. The same command resumes a stopped job.",
        epilog=_BATCH_EXAMPLES,
        formatter_class=plain,
    )
    add_batch(batch)


def _references(group: Any) -> None:
    group.add_argument(
        "--references",
        nargs="+",
        metavar="N|WxH",
        help="for editing: number of reference images of the image's size, or the size of each: 640x480",
    )


def _model(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the name of the model, with its flag of other commands."""
    parser.add_argument("-m", "--model", default="emoji", metavar="MODEL", help="the same as MODEL")
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help)


def _size(group: Any) -> None:
    add_flags(group, Call, names=("width", "height"))
    add_size(group)


def _batch(group: Any, default: Any, help: str, **keywords: Any) -> None:
    group.add_argument(*BATCH, dest="batch", type=int, default=default, metavar="N", help=help, **keywords)


def _compile(parser: argparse.ArgumentParser) -> None:
    _model(parser, "emoji (the default), a folder, or a Hub id owner/name")
    add_flags(parser, Call, names=("width", "height"))
    parser.add_argument("--size", nargs="+", metavar="WxH", help=f"{SIZE}; one or more")
    _batch(parser, [1], "images at once (1)", nargs="+")
    parser.add_argument("--no-guidance", action="store_true", help="for images without guidance")
    parser.add_argument(
        "--reuse-layers",
        type=int,
        default=0,
        metavar="N",
        help="for --reuse-layers of generate --reuse (0: no reuse)",
    )
    parser.add_argument("--image", action="store_true", help="for generate --image and --hires")
    parser.add_argument("--mask", action="store_true", help="for generate --mask")
    _references(parser)
    networks = parser.add_argument_group("for control images and image prompts, each flag once for each network")
    add_networks(networks)
    add_load(parser, without=("model", "safety_checker"))  # programs do not depend on it
    add_report(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a file, a Hub id owner/name, a pickle, or a folder of pickles"
    )
    parser.add_argument("output", metavar="OUTPUT", help="a file that ends in .safetensors, or a folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a file, or write into a folder with files")
    without = ("model", "quantize", "precision", "safety_checker", "prediction_type", "scheduler", "mesh", "offload")
    add_load(parser, without=without, help={"dtype": "float16, bfloat16 or float32 (as they are)"})
    add_report(parser)


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["list", "path", "clear"], default="list", help="list is the default"
    )
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="with clear: only programs unused for this many days"
    )
    add_report(parser, quiet="")


def _samplers(commands: Any) -> None:
    parser = commands.add_parser(
        "samplers",
        help="list the samplers and sigma curves",
        description="List the samplers, or the sigma curves.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="list (the default) or curves")
    add_report(parser, quiet="")


def _memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--memory",
        action="store_true",
        help="compile, with --dtype, --mesh and others, and report the memory of each device",
    )
    _size(group)
    _batch(group, None, "images at once (one a device)")
    _references(group)


def _plan(parser: argparse.ArgumentParser) -> None:
    _model(
        parser,
        "sd14, sd15, sd21, sdxl, sdxl-refiner, z-image, flux1-dev, flux1-schnell, chroma1, flux2-klein-4b, "
        "flux3-klein, flux3-klein-base, krea-2, qwen-image, qwen-image-edit-2511, qwen-image-2.1, anima, "
        "emoji (the default), a folder, or a Hub id",
    )
    parser.add_argument(
        "--target", required=True, metavar="CHIPS", help="TPUs or GPUs: tpu-v5e:2x2, gpu-h100:8; a wrong name lists "
        "all",
    )  # fmt: skip
    _batch(parser, None, "images at once (one a chip)")
    _size(parser)
    _references(parser)
    add_flags(parser, Call, names=("num_inference_steps",),
              help={"num_inference_steps": "evaluations of the denoiser (the model's)"})  # fmt: skip
    parser.add_argument("--no-guidance", action="store_true", help="for images without guidance")
    parser.add_argument("--fresh", action="store_true", help="compile again despite a stored result")
    without = ("model", "precision", "safety_checker", "prediction_type", "scheduler", "variant", "offload")
    add_load(parser, without=without, help={
        "dtype": "float32, bfloat16 or float16 (bfloat16; before Ampere float16)",
        "mesh": "devices along each axis: data=4 (all on data)",
    })  # fmt: skip
    add_report(parser)


def _bench(parser: argparse.ArgumentParser) -> None:
    _model(parser, "emoji (the default), a folder, or a Hub id")
    _size(parser)
    _batch(parser, 1, "images at once (1)")
    add_flags(parser, Call, names=("num_inference_steps",))
    parser.add_argument("--tasks", action="store_true", help="also image to image and inpainting, as ratios")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of timed runs (3)")
    add_load(parser, without=("model", "safety_checker"))  # its time is not the model's
    add_report(parser)
