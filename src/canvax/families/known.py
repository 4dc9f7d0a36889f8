"""The families that canvax supports, and the tables derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from canvax.errors import CheckpointError, HintWarning, InputError, warn
from canvax.families.anima import ANIMA
from canvax.families.base import Family, no_networks
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
"""The families in the package. The first that matches a checkpoint is the checkpoint's."""

MODELS = ", ".join(dict.fromkeys(family.models or family.title for family in FAMILIES))
"""Display names of the supported models."""

PRESETS: dict[str, Networks] = {name: net for family in FAMILIES for name, net in family.presets.items()}
"""Published models by name, for planning, measuring or initialising without a checkpoint."""

AUTOENCODERS = tuple(dict.fromkeys(kind for family in FAMILIES for kind in family.classes.get("vae", ())))
"""Classes of autoencoders."""


GROUP = "canvax.families"
"""Group of the entry points with which installed packages register their families."""

_registered: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Let ``canvax.load``, the commands and the server read models of a family; it replaces the last of its name.

    It comes before the families of canvax, which read the same pipelines. A package does the same with an entry point
    in the group ``canvax.families``, in each process.

    Returns:
        The family.

    Raises:
        InputError: it has the name of a family of canvax, describes no files, or has a text instead of a tuple.
    """
    if any(known.name == family.name for known in FAMILIES):
        raise InputError("family", "has the name of a family of canvax", cure="choose another", value=family.name)
    if not family.pipelines or not family.classes or family.read is no_networks:
        problem = "describes no files, which need {pipelines}, {classes} and {read}"
        raise InputError("family", problem, cure="canvax.pipeline_of needs no registration", value=family.name)
    for names in (family.pipelines, *family.classes.values()):
        if isinstance(names, str):
            problem = f"has the text {names!r} instead of a tuple in {{pipelines}} or {{classes}}"
            raise InputError("family", problem, cure=f"write ({names!r},)", value=family.name)
    _registered[family.name] = family
    return family


def families() -> tuple[Family, ...]:
    """Return all families: those that were registered, then those of canvax."""
    _register_installed()
    return *_registered.values(), *FAMILIES


@cache
def _register_installed() -> None:
    """Register the families of installed packages; a warning names a package whose family cannot be used.

    A family of the same name that was registered before stays.
    """
    for point in entry_points(group=GROUP):
        try:
            family = point.load()
            if family.name not in _registered:
                register(family)
        except Exception as error:  # of the package's code
            problem = f"{type(error).__name__}: {error}"
            warn(f"the family {point.name} ({point.value}) cannot be used: {problem:.300}", HintWarning)


def known_components() -> dict[str, set[str]]:
    """Return the components that are read where ``model_index.json`` names them, with classes of other libraries.

    These are the classes of registered families, except those of canvax's families.
    """
    stock = {kind for family in FAMILIES for kinds in family.classes.values() for kind in kinds}
    known: dict[str, set[str]] = {}
    for family in families():
        for name, kinds in family.classes.items():
            known.setdefault(name, set()).update({*kinds} - stock)
    return known


def family_of(index: Mapping[str, Any]) -> Family:
    """Return the family of a ``model_index.json``.

    Raises:
        CheckpointError: it is of another kind of model.
    """
    name = index.get("_class_name")
    for family in families():
        if name in family.pipelines and all(index.get(key) == value for key, value in family.index.items()):
            return family
    known = dict.fromkeys(repr(pipeline) for family in families() for pipeline in family.pipelines)
    raise CheckpointError(f"model_index.json names the pipeline {name!r}; supported: {', '.join(known)} ({MODELS})")
