"""What ``canvax generate --from-image`` does with image prompts of an image."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canvax.cli.terminal import complain
from canvax.errors import InputError
from canvax.images.inputs import fingerprint
from canvax.pipelines.image_prompts import NONE, image_prompts_of, read


def check_same(path: Path, metadata: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Ask for the image prompts of another image and their adapters, and say so if they are others."""
    if not isinstance(wanted := metadata.get("image_prompts"), list):
        return
    adapters = arguments.ip_adapter or []
    named = image_prompts_of(vars(arguments), len(adapters)) if adapters else ()
    if len(named) != len(wanted):
        names = metadata.get("ip_adapter")
        raise InputError(
            f"{path}: it was generated with {len(wanted)} image prompts; name each with --ip-image and the adapter "
            f"with --ip-adapter (they were read by {', '.join(map(str, names)) if isinstance(names, list) else 'one'})"
        )
    for image_prompt, mark in zip(named, wanted, strict=True):
        if not isinstance(mark, dict):
            continue
        if fingerprint(read("ip_image", image_prompt.file)) != mark.get("sha256"):
            complain(f"--ip-image {image_prompt.file}: is not the one of {path}", label="warning: ")
        mask_mark = image_prompt.mask and fingerprint(read("ip_mask", image_prompt.mask, grey=True))
        if mask_mark != mark.get("mask_sha256"):
            complain(f"--ip-mask {image_prompt.mask or NONE}: is not the one of {path}", label="warning: ")
        if image_prompt.scale != mark.get("scale"):
            complain(
                f"--ip-image {image_prompt.file}: its strength was {mark.get('scale')} in {path}", label="warning: "
            )
