"""The keys of an image's metadata, each declared once.

Writing and reading of files, the command that generates an image again, ``--from-image``, ``pipe.again`` and the page
of the server use this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from canvax.call import Call
from canvax.settings import declared


@dataclass(frozen=True)
class Key:
    """A key of metadata.

    Attributes:
        of: source of the value when an image is generated again: the call, loading the model, image files, adapters;
            or none, for facts about the run.
        kind: type of its value, on which readers rely; None for arguments of a call, which the call checks.
        has_paths: True if it may hold paths of local files, whose folders are private.
        argument: for image files, the argument of a call that names them.
        noun: for image files, their name in errors.
    """

    of: Literal["call", "model", "images", "adapters", "fact"]
    kind: type | None = None
    has_paths: bool = False
    argument: str = ""
    noun: str = ""


_GIVEN = ("num_images_per_prompt", "latents", "options", "image", "mask", "control", "image_prompt")
"""Arguments of a call that metadata stores in another form."""

KEYS: dict[str, Key] = {
    **{name: Key("call") for name in declared(Call) if name not in _GIVEN},
    "options": Key("call", dict),
    "upscale": Key("call", dict),
    "model": Key("model", str, has_paths=True),
    "revision": Key("model", str),
    "variant": Key("model", str),
    "dtype": Key("model", str),
    "quantize": Key("model", str),
    "precision": Key("model", str),
    "vae": Key("model", str, has_paths=True),
    "prediction_type": Key("model", str),
    "scheduler": Key("model", has_paths=True),
    "text_encoder": Key("model", str, has_paths=True),
    "text_encoder_2": Key("model", str, has_paths=True),
    "tokenizer": Key("model", str, has_paths=True),
    "controlnet": Key("model", list, has_paths=True),
    "ip_adapter": Key("model", list, has_paths=True),
    "ip_encoder": Key("model", str, has_paths=True),
    "image_sha256": Key("images", str, argument="image", noun="image"),
    "mask_sha256": Key("images", str, argument="mask", noun="mask"),
    "references_sha256": Key("images", list, argument="image", noun="reference image"),
    "control_sha256": Key("images", list, argument="control", noun="control image"),
    "image_prompts": Key("images", list, argument="image_prompt", noun="image prompt"),
    "adapters": Key("adapters", dict, has_paths=True),
    "embeddings": Key("adapters", dict, has_paths=True),
    **dict.fromkeys(("canvax", "sampler_label", "sampler_sha256", "noise", "steps_run", "nsfw", "id"), Key("fact")),
    **dict.fromkeys(("conditions", "grid"), Key("fact", list)),
    "model_sha256": Key("fact", str),
    "steered": Key("fact", bool),
    "other": Key("fact", dict),
}
"""``noise`` repeats the option of this name. ``other`` has the settings of another program that canvax lacks."""


def keys_of(of: str) -> dict[str, Key]:
    """Return the keys that one of ``Key.of`` repeats."""
    return {name: key for name, key in KEYS.items() if key.of == of}


def table_in(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table under a key; an empty one if there is none."""
    return value if isinstance(value := metadata.get(name), dict) else {}


def list_in(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list under a key; an empty one if there is none."""
    return value if isinstance(value := metadata.get(name), list) else []
