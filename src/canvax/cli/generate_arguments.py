"""This module declares the flags of ``canvax generate``, and those of models that other commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from canvax.call import CONTROL, HIRES, IMAGE, PROMPTS, SAMPLING, SDXL, SUBJECT, Call, FromFiles, OptionRecord
from canvax.cli.adapters import add_adapters
from canvax.errors import NO_VALUE, InputError
from canvax.settings import add_flags

OUTPUT = "out"


class Once(argparse.Action):
    """A flag that is refused the second time, because people who repeat it mean both values."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise InputError(f"{option_string} is given twice; give it once")
        setattr(namespace, self.dest, values)


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax generate``."""
    for add in (
        *(_subject, _images, _control, _image_prompts, _settings, _hires, _sdxl, _model),
        *(add_adapters, _devices, _where_to),
    ):
        add(parser)


def add_upscale(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax upscale``."""
    parser.add_argument("file", metavar="IMAGE", help="a PNG, JPEG or WebP of any size")
    parser.add_argument("--scale", type=float, metavar="X", help="how many times larger, 1 to 16 (2)")
    parser.add_argument("--strength", type=float, metavar="X", help="0..1, how much the model may change (0.3)")
    parser.add_argument("--overlap", type=int, metavar="PIXELS", help="what tiles share (three eighths of a tile)")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="what the image shows")
    parser.add_argument("-N", "--negative-prompt", metavar="TEXT", help="what it should not show")
    parser.add_argument("-s", "--seed", type=int, metavar="SEED", help="(-1, the default: random)")
    group = parser.add_argument_group(
        "with a network for which each tile is a control image, such as a tile ControlNet"
    )
    add_controlnet(group)
    add_flags(group, OptionRecord, group=CONTROL)
    group = parser.add_argument_group("how each tile begins from the image")
    add_flags(group, OptionRecord, names=("strength_rule", "image_encoding"))
    for add in (_settings, _sdxl, _model, add_adapters, _devices, _where_to):
        add(parser)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax batch``."""
    parser.add_argument("file", metavar="FILE", help="rows: .jsonl, .csv, .parquet, or .txt with a prompt a line")
    group = parser.add_argument_group("settings of rows that do not say otherwise")
    add_flags(group, Call, names=("negative_prompt", "height", "width"))
    group.add_argument(
        "-s", "--seed", type=int, default=0, metavar="SEED", help="rows without a seed have one of their id and this"
    )
    for add in (_images, _control, _image_prompts, _settings, _hires, _sdxl, _model, add_adapters, _devices):
        add(parser)
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new one, or one to go on in")
    group.add_argument(
        "--into", choices=["files", "tar", "parquet"], default="files",
        help="a file for each image (the default), or shards: webdataset's tar files, or Parquet",
    )  # fmt: skip
    group.add_argument("--shard-size", type=int, metavar="N", help="images of a shard (1000)")
    group.add_argument("--format", choices=["png", "webp", "jpg"], default="png", help="of images (png)")
    group.add_argument("--quality", type=int, metavar="N", help="1..100, of jpg (95) and webp (lossless)")
    group.add_argument("--carry", nargs="+", default=[], metavar="NAME", help="columns to copy into manifest.jsonl")
    group.add_argument("--retry-errors", action="store_true", help="rows that failed in an earlier run again")
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once (chosen from their size)")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object: images, errors, images a second, ..."
    )
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    group = parser.add_argument_group("on a cluster")
    group.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS",
        help="generate on a Ray cluster: the one this machine is in, another's address, or local to start one here; "
        "with --distributed the machines of each TPU slice hold one model together",
    )  # fmt: skip
    group.add_argument("--actors", type=int, metavar="N", help="with --ray: models that are loaded (one a device)")
    group.add_argument(
        "--share", metavar="K/N", help="one of N jobs on one file and folder: every Nth row from number K, 0 to N-1"
    )


def _subject(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(SUBJECT)
    group.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to generate images from; one image for each prompt"
    )
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="PROMPT", help="another prompt")
    group.add_argument("--prompt-file", metavar="FILE", help="prompts from a file, - for stdin; see below")
    group.add_argument(
        "--from-image", metavar="PNG", help="take the settings from this image's metadata; flags override them"
    )
    add_flags(group, Call, group=SUBJECT)


def _group(parser: argparse.ArgumentParser, name: str, *first: Callable[[Any], None]) -> None:
    """Add a group of settings with all their flags, after those that ``first`` adds."""
    group = parser.add_argument_group(name)
    for add in first:
        add(group)
    for record in (Call, FromFiles, OptionRecord):
        add_flags(group, record, group=name)


def _images(parser: argparse.ArgumentParser) -> None:
    _group(parser, IMAGE)


def _control(parser: argparse.ArgumentParser) -> None:
    _group(parser, CONTROL, add_controlnet)


def _image_prompts(parser: argparse.ArgumentParser) -> None:
    _group(parser, PROMPTS, add_ip_adapter)


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``canvax control``."""
    parser.add_argument("kind", metavar="KIND", help="canny, invert, threshold or blur")
    parser.add_argument("file", metavar="IMAGE", help="a PNG, JPEG or WebP")
    parser.add_argument("output", metavar="OUTPUT", help="the file to write: .png, .jpg or .webp")
    parser.add_argument("--low", type=float, metavar="X", help="canny: gradients that go on with an edge (100)")
    parser.add_argument("--high", type=float, metavar="X", help="canny: gradients that are edges (200)")
    parser.add_argument("--at", type=float, metavar="X", help="threshold: the darkest white (127)")
    parser.add_argument("--radius", type=float, metavar="PIXELS", help="blur: its standard deviation (9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _settings(parser: argparse.ArgumentParser) -> None:
    _group(parser, SAMPLING)


def _hires(parser: argparse.ArgumentParser) -> None:
    _group(parser, HIRES)


def _sdxl(parser: argparse.ArgumentParser) -> None:
    _group(parser, SDXL)


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m", "--model", metavar="MODEL", help="emoji (the default), a folder, a safetensors or GGUF file, or a Hub id"
    )
    group.add_argument(
        "--safety-checker",
        action="store_true",
        help="check images with the model's safety checker, which makes those black that it refuses",
    )
    add_dtype(group)
    add_parts(group)
    add_source(group)


def _devices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--mesh", metavar="AXES", help="data=4,model=2 splits the batch 4 ways and the weights 2 ways (data)"
    )
    group.add_argument(
        "--offload",
        action="store_true",
        help="keep weights in the host's memory, and on the devices those of the network that runs",
    )
    group.add_argument(
        "--distributed", action="store_true",
        help="join the processes of a TPU pod, of Slurm or of the next three flags; each process generates and "
        "writes its "
        "own images",
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
        help=f"a folder, or NAME.png, .jpg or .webp for one image; with --grid, for the grid ({OUTPUT})",
    )
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once (chosen from their size)")
    group.add_argument("--preview", metavar="FILE", help="show in this image file what is being generated")
    group.add_argument("--grid", action="store_true", help="also write all images as one grid")
    group.add_argument("--json", action="store_true", help="print one JSON object: files, seeds, timings, ...")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def add_controlnet(group: Any) -> None:
    """Add the flag that names networks of control images."""
    group.add_argument(
        "--controlnet", "--control-net", action="append", metavar="NET",
        help="a ControlNet or T2I-Adapter: a folder, a Hub id or a safetensors file",
    )  # fmt: skip


def add_ip_adapter(group: Any) -> None:
    """Add the flags that name IP-Adapters and their image encoder."""
    group.add_argument(
        "--ip-adapter", action="append", metavar="FILE",
        help="an IP-Adapter, which reads image prompts: a safetensors file, here or OWNER/NAME/FILE on the Hub",
    )  # fmt: skip
    group.add_argument("--ip-encoder", metavar="FOLDER", help="CLIP's image encoder, if not the one beside the adapter")


def with_networks(pipe: Any, arguments: Any) -> Any:
    """Return a pipeline with the IP-Adapters of the flags; ``canvax.load`` takes the ControlNets."""
    if not getattr(arguments, "ip_adapter", None):  # not every command has the flag
        return pipe
    hub = {name: getattr(arguments, name) for name in ("token", "cache_dir", "local_files_only")}
    return pipe.with_ip_adapter(arguments.ip_adapter, arguments.ip_encoder, progress=not arguments.quiet, **hub)


def networks_of(arguments: Any) -> dict[str, Any]:
    """Return the networks that flags name, as fields of ``Source``; a command may have only some of these flags.

    Raises:
        InputError, CheckpointError: as ``check_ip_adapters``.
    """
    if hasattr(arguments, "ip_adapter"):
        check_ip_adapters(arguments)
    named = {name: tuple(getattr(arguments, name, None) or ()) for name in ("controlnet", "ip_adapter")}
    return {**named, "ip_encoder": getattr(arguments, "ip_encoder", None)}


def check_ip_adapters(arguments: Any) -> None:
    """Refuse an encoder without an adapter, and files that hold no adapter, before a model is downloaded.

    Raises:
        InputError: no adapter is named, or it cannot be read.
        CheckpointError: a file holds no adapter.
    """
    if arguments.ip_encoder is not None and not arguments.ip_adapter:
        raise InputError(
            "ip_encoder", NO_VALUE, "needs an adapter", "name the adapter that it is for with {ip_adapter}"
        )
    for name in arguments.ip_adapter or ():
        from canvax.weights.ip_adapter import check_ip_adapter
        from canvax.weights.location import Location

        check_ip_adapter(Location(name, cache_dir=arguments.cache_dir, token=arguments.token, argument="ip_adapter"))


def add_dtype(group: Any) -> None:
    """Add the flags that choose the number formats of a model."""
    group.add_argument(
        "--dtype", metavar="DTYPE", help="float32, bfloat16 or float16 (bfloat16 on TPU and GPU, float16 before Ampere)"
    )
    add_quantize(group)


def add_parts(group: Any) -> None:
    """Add the flags that correct what the files of a model say."""
    group.add_argument(
        "--prediction-type", metavar="TYPE", help="epsilon or v_prediction, where the model does not say or is wrong"
    )
    group.add_argument(
        "--zero-snr",
        action="store_true",
        help="the model was trained with zero terminal SNR, and its files do not say so",
    )


def add_source(group: Any, *, variant: bool = True) -> None:
    """Add the flags that say where a model and its parts come from."""
    group.add_argument(
        "--vae", metavar="VAE",
        help="another autoencoder: a folder, a Hub id or a safetensors file; madebyollin/taesd is a small one",
    )  # fmt: skip
    group.add_argument(
        "--text-encoder",
        metavar="FILE",
        help="the language model for a transformer in one file: a file, a folder or a Hub id",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="the language model's tokenizer: a folder or a Hub id (that in the text encoder's folder)",
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub id")
    if variant:
        group.add_argument("--variant", metavar="NAME", help="variant of the weights, such as fp16")
    group.add_argument(
        "--data-dir",
        metavar="FOLDER",
        help="folder of models as A1111 or ComfyUI have it, whose files are called by name (or CANVAX_DATA_DIR)",
    )
    group.add_argument("--cache-dir", metavar="FOLDER", help="folder of the files from the Hub")
    group.add_argument("--local-files-only", action="store_true", help="never ask the Hub")
    group.add_argument(
        "--token",
        metavar="TOKEN",
        help="Hub token; prefer the variable HF_TOKEN, since other users can see a command line",
    )


def add_quantize(group: Any) -> None:
    """Add the flag that keeps large weights in 8 bits."""
    group.add_argument(
        "--quantize",
        metavar="KIND",
        help="int8 or float8: large weights in 8 bits, to save memory; "
        "int8-w8a8 or float8-w8a8: matmuls in 8 bits as well",
    )


ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
"""The changes of a model's schedule that ``--zero-snr`` stands for."""

PART_FLAGS = ("vae", "text_encoder", "tokenizer", "prediction_type", "zero_snr")


def source_keywords(arguments: Any) -> dict[str, Any]:
    """Return the flags of ``add_source`` as keywords of ``canvax.load``."""
    return location_keywords(arguments) | part_keywords(arguments)


def location_keywords(arguments: Any) -> dict[str, Any]:
    """Return those that say where a model comes from; ``variant`` only where it is a flag."""
    names = ("revision", "variant", "token", "cache_dir", "local_files_only")
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def part_keywords(arguments: Any) -> dict[str, Any]:
    """Return those that name parts, and those of ``add_parts`` where a command has them."""
    given = {name: getattr(arguments, name) for name in PART_FLAGS if hasattr(arguments, name)}
    return given | ({"scheduler": ZERO_SNR if given.pop("zero_snr") else None} if "zero_snr" in given else {})
