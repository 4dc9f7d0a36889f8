"""Flags of ``canvax serve`` and ``canvax ui``."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.generate_arguments import OUTPUT
from canvax.cli.loading import add_load, add_networks

SERVE_EXAMPLES = """
examples:
  canvax serve                                             the model in the package, on http://127.0.0.1:7860
  canvax serve ./my-model --warm 512x512:1,4 768x512:1,4   two sizes, one image or four at a time
  canvax serve owner/name --host 0.0.0.0 --keys keys.txt   for other machines, with keys
  canvax serve owner/name --journal jobs.db                accepted jobs survive a kill
  canvax serve owner/name --controlnet owner/canny         requests may have control images
"""


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both commands."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folders, Hub ids, NAME=MODEL for another name (emoji, or the first of --data-dir)",
    )
    parser.add_argument("-m", "--model", nargs="+", default=[], metavar="MODEL", help="the same as MODEL")
    parser.add_argument(
        "--warm", nargs="+", metavar="WxH:B,B",
        help="sizes to make ready, and images at once: 512x512:1,4 (the model's size, 1 and 4)",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", nargs="+", type=int, metavar="N",
        help="lengths of prompts to make ready, in chunks of 75 tokens (1), of 128 with a language model (1 2; ui: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--references", type=int, default=1, metavar="N",
        help="reference images to make ready, for models that edit (1)",
    )  # fmt: skip
    parser.add_argument(
        "--compile-on-demand", action=argparse.BooleanOptionalAction,
        help="compile for other sizes, second passes and more reference images, up to 4 times the pixels of --warm "
        "(ui: yes; serve: no)",
    )  # fmt: skip
    parser.add_argument(
        "--compile-only", action="store_true",
        help="compile the programs of a start with these flags, without weights, and end",
    )  # fmt: skip
    _network(parser.add_argument_group("network"))
    _limits(parser.add_argument_group("limits"))
    add_load(parser, without=("model",), help={
        "safety_checker": "make images black that the models' safety checkers refuse; no previews",
        "offload": "keep text encoders and autoencoder in the host's memory while they do not run, and with 'layers' "
        "all but two layers of the denoiser",
    })  # fmt: skip
    images = parser.add_argument_group("networks for images of requests, each flag once for each network")
    add_networks(images)
    adapters = parser.add_argument_group("adapters that requests may name")
    adapters.add_argument("--lora-dir", metavar="FOLDER", help="LoRAs for <lora:name:0.8> in prompts, and for adapters")
    adapters.add_argument("--lora", nargs="+", default=[], metavar="FILE", help="LoRAs to load at the start")
    adapters.add_argument("--lora-rank", type=int, metavar="N", help="the highest rank of a LoRA (that of the files)")
    adapters.add_argument(
        "--lora-layers",
        choices=("attention", "transformer", "all"),
        help="layers that LoRAs may change (those of the files)",
    )
    adapters.add_argument(
        "--lora-places", type=int, metavar="N",
        help="LoRAs in use at a time; each costs memory and work (4)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FOLDER", help=f"save images there (ui: {OUTPUT}; serve: nowhere)")
    parser.add_argument("--no-output", action="store_true", help="save no images")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only errors on stderr")


def _network(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, default=None, metavar="N", help="port (7860); 0 for a free one")
    group.add_argument("--keys", metavar="FILE", help="clients' keys, lines of id:key (the variable CANVAX_KEYS)")
    group.add_argument("--no-keys", action="store_true", help="serve all who reach --host, without keys")
    group.add_argument("--allow-host", nargs="+", default=[], metavar="NAME", help="host names of the server")
    group.add_argument("--allow-origin", nargs="+", default=[], metavar="URL", help="websites that may send requests")
    group.add_argument("--no-page", action="store_true", help="no page, only the APIs")


def _limits(group: Any) -> None:
    group.add_argument("--queue-seconds", type=float, default=600.0, metavar="S", help="work that may wait (600)")
    group.add_argument("--queue-images", type=int, default=1000, metavar="N", help="images that may wait (1000)")
    group.add_argument("--rate", type=float, metavar="N", help="images a minute for each key (no limit)")
    group.add_argument(
        "--max-body", default="32MB", metavar="SIZE", help="bytes of a request (32MB; 256 KiB without images)"
    )
    group.add_argument("--memory", metavar="SIZE", help="weights on each device at a time: 20GB (what is free)")
    group.add_argument("--keep-seconds", type=float, default=600.0, metavar="S", help="time to keep results (600)")
    group.add_argument("--drain-seconds", type=float, default=30.0, metavar="S", help="time to finish at the end (30)")
    group.add_argument(
        "--stall-seconds", type=float, default=600.0, metavar="S",
        help="time without progress before /health fails (600)",
    )  # fmt: skip
    group.add_argument("--journal", metavar="FILE", help="keep accepted jobs in this file, for a restart")
    group.add_argument("--log-prompts", action="store_true", help="write prompts into the log")
    group.add_argument(
        "--batching", choices=["steps", "requests", "none"], default="steps",
        help="steps: images join and leave between steps; requests: whole batches; none: one by one",
    )  # fmt: skip
