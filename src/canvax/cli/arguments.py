"""What can be typed. Both families of flags are understood: those of diffusers and those of A1111 and its relatives."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from canvax._version import __version__
from canvax.cli.train_arguments import add_train
from canvax.errors import InputError
from canvax.familiar import FLAGS

COMMANDS = {name: name for name in ("generate", "compile", "info", "plan", "bench", "samplers", "cache", "train")}
"""Commands, and the modules of this package that run them."""

OUTPUT = "out"

_EXAMPLES = """
examples:
  canvax generate "a red apple"                            one picture, in the folder out
  canvax generate "a cat" "a dog" -n 4 --grid              eight pictures and a grid
  canvax generate "a cat" -s 7 --steps 30 -g 5 -o cat.png
  canvax generate --prompt-file prompts.txt -b 8 --json    many pictures, one JSON object on stdout
  canvax generate "a fox" -m owner/name --sampler "DPM++ 2M Karras"
  canvax generate --from-image out/00000-7.png --steps 50  the same picture, with more steps
  canvax compile owner/name --size 1024x1024 --batch 1 4   so that no picture has to wait for it
"""
_PLAN_EXAMPLES = """
examples:
  canvax plan sdxl --target tpu-v5e:2x2 --steps 20            one 1024 x 1024 picture on each of four chips
  canvax plan sd15 --target tpu-v4:2x2x1 --batch 16 --size 768x512
  canvax plan sdxl --target gpu-l4                             does it fit into JAX's part of 24 GB?
  canvax plan ./my-model --target tpu-v6e:2x4 --json
"""
_BENCH_EXAMPLES = """
examples:
  canvax bench
  canvax bench owner/name --size 1024x1024 --batch 4 --steps 30 --dtype bfloat16
"""
_FILES = """
A prompt file holds one prompt a line. Empty lines and lines that start with # are left out. A line that starts with {
is a JSON object: {"prompt": "a cat", "seed": 7, "steps": 30, "negative_prompt": "..."}. It overrules the flags.
"""


class Parser(argparse.ArgumentParser):
    """Raises InputError for what cannot be parsed, and suggests the nearest flag for an unknown one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | keywords)

    def error(self, message: str) -> NoReturn:
        """Raise InputError."""
        if message.endswith("expected one argument"):
            message += "; a value that starts with - is written --flag=VALUE"
        raise InputError(f"{message} (see: {self.prog} --help)")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As ever, but prompts may stand between flags, and this parser reports what is left over itself.

        It knows the flags that are near; the parser of the whole command does not.
        """
        known = argparse.Namespace() if namespace is None else namespace
        _, rest = super().parse_known_args(args, known)
        unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if unknown and (entry := FLAGS.get(unknown[0].lstrip("-").lower().replace("_", "-"))):
            self.error(f"{unknown[0]}: {entry.answer}")
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            near = get_close_matches(unknown[0], flags, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]!r}?" if near else "a prompt that starts with - goes after --"
            self.error(f"{unknown[0]!r} is not a flag of {self.prog}; {hint}")
        if rest and "prompts" not in known:
            self.error(f"{rest[0]!r} is one word too many; quote what belongs together")
        if rest:
            known.prompts += rest
        return known, []


class _Version(argparse.Action):
    """Prints versions without starting a JAX backend, or even importing JAX."""

    def __call__(self, *_: Any) -> NoReturn:
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise SystemExit(0)


def versions() -> dict[str, str]:
    """Versions of canvax and of what it computes with."""
    found = {"canvax": __version__}
    for name in ("jax", "jaxlib"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found | {"python": ".".join(map(str, sys.version_info[:3]))}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What was typed. Words after ``--`` are prompts, whatever they start with.

    Raises:
        InputError: it cannot be understood.
    """
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    if not words:
        parser.print_help()
        raise SystemExit(0)
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        near = get_close_matches(words[0].lower(), COMMANDS, n=1, cutoff=0.6) or [
            name for name in COMMANDS if len(words[0]) > 1 and name.startswith(words[0].lower())
        ]
        meant = near[0] if near else f"generate {shlex.quote(words[0])}"
        parser.error(f"{words[0]!r} is not a command; did you mean: canvax {meant}?")
    arguments = parser.parse_args(words[:end])
    if words[end + 1 :]:
        if arguments.command != "generate":
            parser.error(f"{words[end + 1]!r} is one word too many")
        arguments.prompts += words[end + 1 :]
    return arguments


def build_parser() -> Parser:
    """The parser of the whole command."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="canvax",
        description="Text to image with Stable Diffusion in JAX.",
        epilog=_EXAMPLES,
        formatter_class=plain,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate",
        usage="canvax generate PROMPT ... [flags]",
        help="draw pictures",
        description="Draw pictures. Prints the name of each file; everything else goes to stderr.",
        epilog=_FILES + _EXAMPLES,
        formatter_class=plain,
    )
    _what_to_draw(generate)
    _how_to_draw(generate)
    _sdxl(generate)
    _model(generate)
    _devices(generate)
    _where_to(generate)
    _compile(commands.add_parser(
        "compile",
        help="compile a model before it is needed",
        description="Compile the programs of a model and keep them, without reading its weights or drawing anything.",
    ))  # fmt: skip
    info = commands.add_parser(
        "info",
        help="describe a model or a picture",
        description="Describe a model (nothing but headers is read) or tell how a picture was made.",
    )
    info.add_argument("what", metavar="MODEL|PICTURE.png", help="emoji, a folder, a Hub id owner/name, or a PNG")
    _source(info)
    _memory(info)
    info.add_argument(
        "--prompts", dest="concepts", action="store_true", help="what a small model can generate: its concepts"
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    _plan(commands.add_parser(
        "plan",
        help="will a model fit on a TPU or GPU, and how long would it take? None is needed",
        description="Compile a model for TPUs or GPUs that are not there: memory, FLOPs, collectives and, for TPUs, "
        "the compiler's own estimate of the time. Needs pip install '.[tpu]' or '.[cuda]'; no weights are read.",
        epilog=_PLAN_EXAMPLES,
        formatter_class=plain,
    ))  # fmt: skip
    _bench(commands.add_parser(
        "bench",
        help="how fast this machine generates images",
        description="Time whole images, text to pixels, on this machine. Compiling is reported apart.",
        epilog=_BENCH_EXAMPLES,
        formatter_class=plain,
    ))  # fmt: skip
    _samplers(commands)
    _cache(commands.add_parser(
        "cache",
        help="list or clear the compiled programs that are kept",
        description="The compiled programs that are kept, their folder (path), or their removal (clear).",
    ))  # fmt: skip
    add_train(commands)
    return parser


def _compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="emoji, a folder, or a Hub id owner/name")
    parser.add_argument("--size", nargs="+", metavar="WxH", help="pixels, such as 1024x768 (the model's own)")
    parser.add_argument("-b", "--batch", nargs="+", type=int, default=[1], metavar="N", help="pictures at once (1)")
    parser.add_argument("--no-guidance", action="store_true", help="for a guidance scale of 1 or less")
    parser.add_argument("--reuse-layers", type=int, default=0, metavar="N", help="for generate --reuse (there 1)")
    _dtype(parser)
    _source(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["list", "path", "clear"], default="list", help="list, if not said"
    )
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="with clear: only what has not been used for so many days"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _samplers(commands: Any) -> None:
    parser = commands.add_parser(
        "samplers",
        usage="canvax samplers [list | curves | plot [CURVE ...]] [flags]",
        help="list the samplers, or draw their noise levels",
        description="List the samplers, list the curves of noise levels, or draw curves and spacings as a PNG.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="list (the default), curves, or plot and what to plot")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    group = parser.add_argument_group("plot")
    group.add_argument("--steps", type=int, default=20, metavar="N", help="steps of the sampler (20)")
    group.add_argument("--sampler", default="euler", metavar="NAME", help="whose steps (euler)")
    group.add_argument(
        "--scheduler-config", metavar="FILE", help="a model's scheduler_config.json (Stable Diffusion's)"
    )
    group.add_argument(
        "-o", "--output", default="schedules.png", metavar="NAME.png", help="the picture (schedules.png)"
    )


def _what_to_draw(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to draw")
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to draw; several prompts, several pictures")
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="PROMPT", help="one more prompt")
    group.add_argument("--prompt-file", metavar="FILE", help="prompts from a file, - for stdin; see below")
    group.add_argument("--from-image", metavar="PNG", help="start from what a picture says; flags given overrule it")
    group.add_argument("-N", "--negative-prompt", "--negative", metavar="TEXT", help="what to keep away from")
    group.add_argument(
        "-n", "--num-images", "--num-images-per-prompt", type=int, dest="num_images_per_prompt", metavar="N",
        help="pictures for each prompt (1)",
    )  # fmt: skip
    group.add_argument(
        "-s", "--seed", type=int, metavar="SEED", help="picture i uses SEED + i (-1, the default: chosen)"
    )
    group.add_argument("-W", "--width", type=int, metavar="PIXELS", help="divisible by 8 (the model's own)")
    group.add_argument("-H", "--height", type=int, metavar="PIXELS", help="divisible by 8 (the model's own)")


def _how_to_draw(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to draw (changing these compiles nothing, but for guidance on or off)")
    group.add_argument(
        "--steps", "--num-inference-steps", type=int, dest="num_inference_steps", metavar="N",
        help="steps of the sampler (the model's own, else 50)",
    )  # fmt: skip
    group.add_argument(
        "-g", "--guidance-scale", "--guidance", "--cfg-scale", "--cfg", type=float, dest="guidance_scale", metavar="G",
        help="how closely to follow the prompt (the model's own, else 7.5); 1 or less halves the work",
    )  # fmt: skip
    group.add_argument("--sampler", "--scheduler", metavar="NAME", help="see canvax samplers (the model's own)")
    group.add_argument(
        "--sigmas", metavar="CURVE", help="noise levels: karras, ays, ... or a list such as 14.6,6,2,0.5,0"
    )
    group.add_argument("--spacing", metavar="KIND", help="timesteps: leading, trailing, linspace")
    group.add_argument("--eta", type=float, metavar="X", help="0..1, randomness of DDIM and ancestral samplers")
    group.add_argument(
        "--set", "--sampler-settings", action="append", dest="sampler_settings", metavar="NAME=VALUE",
        help="one more setting of the sampler, such as s_churn=10; see canvax samplers",
    )  # fmt: skip
    group.add_argument("--guidance-steps", metavar="G,G,...", help="the guidance scale of each step")
    group.add_argument("--guidance-interval", metavar="A,B", help="guide from A to B of the run alone (0,1); less work")
    group.add_argument("--guidance-rescale", type=float, metavar="X", help="0..1, against over-exposure")
    group.add_argument(
        "--reuse", type=int, metavar="N", help="compute all of the UNet in every N-th evaluation alone (1)"
    )
    group.add_argument(
        "--reuse-layers", type=int, metavar="N", help="of --reuse: skip connections always computed (1); compiles once"
    )
    group.add_argument(
        "--vae-tiling", "--tiling", dest="tiling", metavar="auto|on|off",
        help="decode in tiles, in less memory; auto: above 1536 x 1536 pixels",
    )  # fmt: skip
    group.add_argument("--clip-skip", type=int, metavar="N", help="last layers of the text encoder left out (0)")
    group.add_argument("--noise", metavar="KIND", help="initial noise: philox, or torch for PyTorch's")


def _sdxl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SDXL alone")
    group.add_argument("--prompt-2", metavar="TEXT", help="what the second text encoder reads (the prompt)")
    group.add_argument("--negative-prompt-2", metavar="TEXT", help="likewise (the negative prompt)")
    for name, axes, what in (
        ("original-size", ("HEIGHT", "WIDTH"), "size of the training picture to draw like (the size drawn)"),
        ("crops-coords-top-left", ("TOP", "LEFT"), "where it was cropped (0 0)"),
        ("target-size", ("HEIGHT", "WIDTH"), "size it was brought to (the size drawn)"),
    ):
        group.add_argument(f"--{name}", type=int, nargs=2, metavar=axes, help=what)
        group.add_argument(f"--negative-{name}", type=int, nargs=2, metavar=axes, help="what to keep away from")
    group.add_argument("--aesthetic-score", type=float, metavar="X", help="the refiner's (6)")
    group.add_argument("--negative-aesthetic-score", type=float, metavar="X", help="the refiner's (2.5)")


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="MODEL", help="emoji (the default), a folder, or a Hub id owner/name")
    _dtype(group)
    _source(group)


def _devices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("devices")
    group.add_argument("--mesh", metavar="AXES", help="data=4,model=2: the batch split 4 ways, the weights 2 (data)")
    group.add_argument(
        "--distributed", action="store_true",
        help="join the processes of a TPU pod, of Slurm or of the next three; each draws and writes its own part",
    )  # fmt: skip
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 can be reached")
    group.add_argument("--num-processes", type=int, metavar="N", help="how many processes there are")
    group.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")


def _memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument("--memory", action="store_true", help="what each device needs, by compiling")
    group.add_argument("-W", "--width", type=int, metavar="PIXELS", help="of the images (the model's own)")
    group.add_argument("-H", "--height", type=int, metavar="PIXELS", help="likewise")
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once (1 for each of data)")
    _dtype(group)
    group.add_argument("--mesh", metavar="AXES", help="data=4,model=2 (data over all devices)")


def _dtype(group: Any) -> None:
    group.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16 (bfloat16 on TPU and GPU)")
    _quantize(group)


def _quantize(group: Any) -> None:
    group.add_argument("--quantize", metavar="KIND", help="int8 or float8: large weights in 8 bits, to save memory")


def _source(group: Any, *, variant: bool = True) -> None:
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub id")
    if variant:
        group.add_argument("--variant", metavar="NAME", help="which set of weights, such as fp16")
    group.add_argument("--cache-dir", metavar="FOLDER", help="where the Hub's files are kept")
    group.add_argument("--local-files-only", action="store_true", help="never ask the Hub")
    group.add_argument(
        "--token", metavar="TOKEN", help="Hub token; better in the variable HF_TOKEN, others can see this"
    )


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="sd14, sd15, sd21, sdxl, sdxl-refiner, emoji, a folder, or a Hub id owner/name"
    )
    parser.add_argument(
        "--target", required=True, metavar="CHIPS", help="a TPU generation and its chips, tpu-v5e:2x2, or a GPU, "
        "gpu-h100 or gpu-h100:8; a wrong name lists all",
    )  # fmt: skip
    parser.add_argument("--mesh", metavar="AXES", help="devices along each axis: data=4 (all on data)")
    parser.add_argument("-b", "--batch", type=int, metavar="N", help="pictures at once on all chips (one on each)")
    parser.add_argument("--size", metavar="WIDTHxHEIGHT", help="pixels, divisible by 8 (the model's own)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="evaluations of the UNet (50)")
    parser.add_argument("--no-guidance", action="store_true", help="as with a guidance scale of 1: half the work")
    parser.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="of weights and activations (bfloat16)")
    _quantize(parser)
    parser.add_argument("--fresh", action="store_true", help="compile again what has been compiled before")
    _source(parser, variant=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="emoji", metavar="MODEL", help="emoji, a folder, or a Hub id")
    parser.add_argument("--size", metavar="WIDTHxHEIGHT", help="pixels (the model's own)")
    parser.add_argument("-b", "--batch", type=int, default=1, metavar="N", help="images at once (1)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the sampler (the model's own)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often it is timed (3)")
    parser.add_argument("--mesh", metavar="AXES", help="data=4,model=2 (data over all devices)")
    _dtype(parser)
    _source(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def _where_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output",
        default=OUTPUT,
        metavar="PATH",
        help=f"a folder, or NAME.png, .jpg or .webp for one image; with --grid, for the grid ({OUTPUT})",
    )
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="pictures drawn at once (as suits the size)")
    group.add_argument("--grid", action="store_true", help="write all pictures in one, too")
    group.add_argument("--json", action="store_true", help="print one JSON object: files, seeds, timings, ...")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
