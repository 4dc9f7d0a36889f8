"""The families that canvax supports, and the tables derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvax.errors import CheckpointError
from canvax.families.anima import ANIMA
from canvax.families.base import Family
from canvax.families.flux import CHROMA, FLUX
from canvax.families.flux2 import FLUX2
from canvax.families.flux3 import FLUX3
from canvax.families.krea2 import KREA2
from canvax.families.qwen_image import QWEN_IMAGE
from canvax.families.qwen_image_1 import QWEN_IMAGE_1
from canvax.families.sd import SD
from canvax.families.sdxl import SDXL, SDXL_REFINER
from canvax.families.z_image import Z_IMAGE
from canvax.models.networks import Networks

FAMILIES: tuple[Family, ...] = (
    *(SD, SDXL_REFINER, SDXL, Z_IMAGE, FLUX, CHROMA, FLUX2, FLUX3, KREA2, QWEN_IMAGE, QWEN_IMAGE_1, ANIMA),
)
"""The first family that matches a checkpoint is the checkpoint's."""

MODELS = ", ".join(dict.fromkeys(family.models or family.title for family in FAMILIES))
"""Display names of the supported models."""

PRESETS: dict[str, Networks] = {name: net for family in FAMILIES for name, net in family.presets.items()}
"""Published models by name, for planning, measuring or initialising without a checkpoint."""

AUTOENCODERS = tuple(dict.fromkeys(kind for family in FAMILIES for kind in family.classes.get("vae", ())))
"""Classes of autoencoders."""


def component_names() -> tuple[str, ...]:
    """Return the components that models of some family have, which are read where ``model_index.json`` names them."""
    return tuple(dict.fromkeys(name for family in FAMILIES for name in family.classes))


def family_of(index: Mapping[str, Any]) -> Family:
    """Return the family of a ``model_index.json``.

    Raises:
        CheckpointError: it is of another kind of model.
    """
    name = index.get("_class_name")
    for family in FAMILIES:
        if name in family.pipelines and all(index.get(key) == value for key, value in family.index.items()):
            return family
    known = dict.fromkeys(repr(pipeline) for family in FAMILIES for pipeline in family.pipelines)
    raise CheckpointError(f"model_index.json names the pipeline {name!r}; supported: {', '.join(known)} ({MODELS})")
