"""What ``canvax generate --from-image`` and ``canvax info`` do with image prompts of an image."""

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


def flags_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Flags for the image prompts of an image, with names to be put in; keys end in a number, so that they differ."""
    prompts = metadata.get("image_prompts")
    prompts = [prompt for prompt in prompts if isinstance(prompt, dict)] if isinstance(prompts, list) else []
    adapters = metadata.get("ip_adapter")
    flags = {f"--ip-adapter {i}": str(name) for i, name in enumerate(adapters if isinstance(adapters, list) else [])}
    masked = any("mask_sha256" in prompt for prompt in prompts)
    for i, prompt in enumerate(prompts):
        scale = prompt.get("scale")
        suffix = f":{scale:g}" if isinstance(scale, int | float) and scale != 1 else ""
        flags[f"--ip-image {i}"] = f"PROMPT{i + 1}{suffix}"
        if masked:
            flags[f"--ip-mask {i}"] = f"MASK{i + 1}" if "mask_sha256" in prompt else NONE
    return flags
