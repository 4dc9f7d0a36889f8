"""``canvax control``: make a control image from an image."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.terminal import say
from canvax.images.formats import new_image
from canvax.images.inputs import read_images
from canvax.images.maps import control_map
from canvax.images.metadata import save_image


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Make a control image; ``report`` gets its name."""
    settings = {
        name: value for name in ("low", "high", "at", "radius") if (value := getattr(arguments, name)) is not None
    }
    output = new_image("output", arguments.output)
    (image,) = read_images("file", arguments.file, 1)
    path = save_image(output, control_map(arguments.kind, image, **settings), {"control": arguments.kind})
    report["files"] = [str(path)]
    if not arguments.json:
        say(str(path))
