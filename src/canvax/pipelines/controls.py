"""A pipeline with networks that read control images: found and checked before weights are fetched, then loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from canvax.compile.programs import Programs
from canvax.errors import NO_VALUE, InputError, nearest
from canvax.families.base import Model
from canvax.families.controls import component_name as control_name
from canvax.families.controls import control_of, read_control
from canvax.models.controlled import Control
from canvax.parallel.memory import check_weights
from canvax.parallel.rules import abstract_params, device_bytes, place
from canvax.params import Param, Params, flatten, unflatten
from canvax.pipelines.control_lora import control_lora
from canvax.types import Array, HostArray
from canvax.weights.controlnet import ControlFiles, ControlKind, open_control
from canvax.weights.load import check_finite, load_components
from canvax.weights.location import Location

MOST = 8
"""Networks of one pipeline: a call evaluates each of them in each step."""

_OF_SOURCE = ("token", "cache_dir", "local_files_only", "progress", "variant")


@dataclass(frozen=True, eq=False)
class Opened:
    """A network whose files are there and fit the model; no weights are read.

    Attributes:
        files: where they are.
        net: what it is.
    """

    files: ControlFiles
    net: Control


def control_sources(controlnet: Any, **source: Any) -> list[Location]:
    """What ``controlnet=`` names, a name or a list of them.

    Raises:
        InputError: it is something else.
    """
    names = [controlnet] if isinstance(controlnet, str | os.PathLike) else controlnet
    if not isinstance(names, Sequence) or not all(isinstance(name, str | os.PathLike) and name != "" for name in names):
        raise InputError(
            "controlnet", controlnet, "is not a folder, a Hub id or a safetensors file, nor a list of these"
        )
    if len(names) > MOST:
        raise InputError(
            "controlnet", NO_VALUE, f"has {len(names)} entries", f"a pipeline takes {MOST}, of which a call uses some"
        )
    if unknown := sorted(source.keys() - set(_OF_SOURCE)):
        raise InputError(unknown[0], NO_VALUE, "is not an argument beside controlnet", nearest(unknown[0], _OF_SOURCE))
    return [Location(os.fspath(name), argument="controlnet", **source) for name in names]


def open_controls(model: Model, sources: Sequence[Location]) -> list[Opened]:
    """The networks, found and held against the model.

    Raises:
        CheckpointError: one is missing, damaged, or made for another kind of model.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    found = []
    for source in sources:

        def accept(kind: ControlKind, config: Mapping[str, Any], name: str = source.text) -> None:
            control_of(name, kind, config, model)

        files = open_control(source, accept=accept)
        found.append(Opened(files, read_control(files, model)))
    return found


def with_controls(
    model: Model,
    programs: Programs,
    params: Params,
    opened: Sequence[Opened],
    *,
    weights: bool = True,
    trained: Callable[[str], Params] | None = None,
) -> tuple[Model, Programs, Params]:
    """A model with these networks in place of those that it has; compiled programs and weights are shared.

    ``params`` None is a caller's who keeps them, and who loads no networks so. Without ``weights`` the parameters of
    the networks are shapes, dtypes and shardings. ``trained`` gives the parameters of a component without adapters,
    which networks that add to the UNet's weights begin from; by default those of ``params``.

    Raises:
        CheckpointError: weights cannot be used.
        OutOfMemoryError: they do not fit into the devices.
    """
    if params is None and opened:
        raise InputError("params", None, "cannot be given a ControlNet", "load the pipeline whole")
    names = [control_name(i) for i in range(len(opened))]
    controls = tuple(zip(names, (one.net for one in opened), strict=True))
    networks = dataclasses.replace(model.networks, controls=controls)
    model = dataclasses.replace(model, networks=networks, controls=tuple(one.files for one in opened))
    programs = dataclasses.replace(programs, networks=networks)
    if params is None:
        return model, programs, None
    parts = [part for part in model.components if part.name in names]
    mesh = programs.mesh
    if not weights:
        shapes = {part.name: abstract_params(part.spec, model.dtype, mesh) for part in parts}
        return model, programs, {**params, **shapes}
    needed = sum(device_bytes(part.spec, model.dtype, mesh.shape) for part in parts)
    quantized = model.quantize is not None
    check_weights(needed, mesh, ", ".join(map(str, model.controls)), model.dtype, quantized=quantized)
    old = {name for name, _ in model.networks.controls} | {control_name(i) for i in range(MOST)}
    kept = {name: tree for name, tree in params.items() if name not in old}

    def unet() -> Params:
        component = model.networks.denoiser.component
        return trained(component) if trained else kept[component]

    for part, files in zip(parts, model.controls, strict=True):

        def placed(param: Param, array: HostArray, files: ControlFiles = files) -> Array:
            check_finite(files, array)
            return place(param, array, mesh)

        if files.pairs:
            kept[part.name] = control_lora(part, files, unet(), model, placed)
            continue
        loaded = load_components(files, [part], dtype=model.dtype, place=placed)[part.name]
        kept[part.name] = whole_of(loaded, unet(), files, model) if files.difference else loaded
    return model, programs, kept


def whole_of(loaded: Params, unet: Params, files: ControlFiles, model: Model) -> Params:
    """Weights of a network whose file has a part of them as what is to be added to the UNet's."""
    if model.quantize is not None:
        raise InputError(
            f"{files}: holds differences to the weights of the UNet, which are quantised to {model.quantize}; load the "
            "model without quantize"
        )
    base = dict(flatten(unet))

    def total(name: str, leaf: Array) -> Array:
        if name not in base:
            return leaf
        both = leaf.astype(jnp.float32) + base[name].astype(jnp.float32)
        return jax.device_put(both.astype(leaf.dtype), leaf.sharding)

    return unflatten({name: total(name, leaf) for name, leaf in flatten(loaded)})
