"""``canvax convert``: write a model in another form, and print its name."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.call import LOCATION
from canvax.cli.loading import load_of
from canvax.cli.terminal import say


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Convert; ``report`` receives the name of what was written."""
    from canvax.families.convert import convert

    output = convert(
        arguments.model,
        arguments.output,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        progress=not arguments.quiet,
        **load_of(arguments).keywords((*LOCATION, "vae", "text_encoder", "text_encoder_2", "tokenizer")),
    )
    report["output"] = str(output)
    if not arguments.json:
        say(str(output))
