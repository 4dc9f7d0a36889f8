"""The flags that name the model of a command, its source and form; and the model that they open."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from canvax.call import DEVICES, LOCATION, MODEL, PARTS, PROMPTS, Load, LoadFlags
from canvax.errors import CheckpointError, HubError, needs
from canvax.settings import add_flags, declared

if TYPE_CHECKING:
    from canvax.families.base import Model
    from canvax.pipelines.pipeline import Pipeline
    from canvax.weights.files import ModelFiles
    from canvax.weights.location import Location
    from canvax.weights.overrides import Overrides

IN_PASSING = ("token", "cache_dir", "local_files_only", "progress", "mesh", "offload", "safety_checker")
"""Arguments of ``canvax.load`` that do not change the images of a batch job."""


def add_load(
    parser: argparse.ArgumentParser, *, without: Iterable[str] = (), help: Mapping[str, str] | None = None
) -> None:
    """Add the flags of ``canvax.load``, except those of networks for images of a call (``add_networks``)."""
    for title in (MODEL, DEVICES):
        group = parser.add_argument_group(title)
        for record in (Load, LoadFlags):
            add_flags(group, record, group=title, without=without, help=help)


def add_networks(group: Any) -> None:
    """Add the flags that name networks for control images and image prompts."""
    add_flags(group, Load, names=("controlnet",))
    add_flags(group, LoadFlags, group=PROMPTS)


def load_of(arguments: argparse.Namespace, **changed: Any) -> Load:
    """Return the arguments of ``canvax.load`` that flags give, some of them ``changed``.

    Raises:
        InputError: a flag has a value that it cannot have.
    """
    given = {name: value for name in declared(Load) if (value := getattr(arguments, name, None)) is not None}
    return Load(**{"progress": not getattr(arguments, "quiet", True), **given, **changed})


def load_with(arguments: argparse.Namespace, load: Load | None = None, *, weights: bool = True) -> Pipeline:
    """Open the model that flags name, with its networks for control images and image prompts.

    Args:
        arguments: the flags; a command has some of them.
        load: the arguments of ``canvax.load``, by default those of the flags.
        weights: if False, parameters are shapes, dtypes and shardings, and no weights are fetched.
    """
    load = load or load_of(arguments)
    if not weights:
        return _without_weights(load, arguments)
    import canvax

    pipe = canvax.load(load.model, **load.keywords())
    if not getattr(arguments, "ip_adapter", None):
        return pipe
    return pipe.with_ip_adapter(arguments.ip_adapter, arguments.ip_encoder, **_hub(load))


def _without_weights(load: Load, arguments: argparse.Namespace) -> Pipeline:
    from canvax.pipelines.loaded import open_model
    from canvax.pipelines.networks import (
        ip_adapter_sources,
        open_controls,
        with_controls,
        with_ip_adapters,
    )
    from canvax.pipelines.pipeline import Pipeline

    names = ("dtype", "quantize", "mesh", "precision", "progress", "offload", *LOCATION)
    opened = open_model(load.model, weights=False, overrides=overrides_of(load), **load.keywords(names))
    if load.controlnet:
        opened = with_controls(*opened, open_controls(opened[0], controls_of(load)), weights=False)
    if named := getattr(arguments, "ip_adapter", None):
        sources = ip_adapter_sources(named, arguments.ip_encoder, **_hub(load))
        opened = with_ip_adapters(*opened, sources, arguments.ip_encoder, weights=False)
    return Pipeline(*opened)


def controls_of(load: Load) -> list[Location]:
    """Return the sources of the networks for control images."""
    from canvax.pipelines.networks import control_sources

    return control_sources(load.controlnet or [], variant=load.variant, **_hub(load))


def overrides_of(load: Load) -> Overrides:
    """Return the parts that replace those of the model."""
    from canvax.weights.overrides import Overrides

    return Overrides.of(**load.keywords(PARTS))


def files_of(load: Load) -> ModelFiles:
    """Open the files of a model, with the parts that the flags replace; no weights are read.

    Raises:
        InputError, CheckpointError, HubError: a file is missing, damaged or refused.
    """
    from canvax.families.known import family_of
    from canvax.families.local_models import completed
    from canvax.weights.location import Location
    from canvax.weights.open import open_files

    source = load.keywords(LOCATION)
    overrides = completed(overrides_of(load), origin := Location(load.model, **source))
    files = open_files(origin, accept=family_of, prediction=overrides.prediction, given=overrides.parts)
    return overrides.apply(files, **source)


def model_on_disk(load: Load) -> Model | None:
    """Return a model whose weights are not read; None if its files are not on disk, or there is none.

    Raises:
        InputError: a config or an argument is refused.
    """
    from canvax.families.read import read_model

    try:
        return read_model(files_of(dataclasses.replace(load, local_files_only=True)), "float32")
    except (CheckpointError, HubError):
        return None


def _hub(load: Load) -> dict[str, Any]:
    return load.keywords(("token", "cache_dir", "local_files_only", "progress"))


def check_ip_adapters(arguments: argparse.Namespace) -> None:
    """Refuse an encoder without an adapter, and files that hold no adapter, before a model is downloaded.

    Raises:
        InputError: no adapter is named, or it cannot be read.
        CheckpointError: a file holds no adapter.
    """
    if arguments.ip_encoder is not None and not arguments.ip_adapter:
        raise needs("ip_encoder", "ip_adapter")
    for name in arguments.ip_adapter or ():
        from canvax.weights.ip_adapter import check_ip_adapter
        from canvax.weights.location import Location

        check_ip_adapter(Location(name, cache_dir=arguments.cache_dir, token=arguments.token, argument="ip_adapter"))
