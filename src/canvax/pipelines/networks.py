"""Add ControlNets or IP-Adapters to a pipeline: check their files before weights are fetched, then load them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from canvax.compile.additions import PromptKind
from canvax.compile.programs import Programs
from canvax.errors import CheckpointError, InputError, needs
from canvax.families.base import Model
from canvax.families.controls import component_name as control_name
from canvax.families.controls import control_of, read_control
from canvax.families.ip_adapters import component_name as ip_adapter_name
from canvax.families.ip_adapters import ip_adapter_of, with_encoder
from canvax.models.controlled import Control
from canvax.models.ip_adapter import ImageEncoder
from canvax.models.networks import Networks
from canvax.models.text import IMAGE_ENCODER
from canvax.parallel.memory import check_weights
from canvax.parallel.place import kind_of, on_devices
from canvax.parallel.rules import abstract_params, device_bytes, place
from canvax.params import Param, Params, flatten, unflatten
from canvax.types import Array, HostArray
from canvax.weights.controlnet import ControlFiles, ControlKind, open_control
from canvax.weights.ip_adapter import EncoderFiles, check_ip_adapter, find_encoder, open_ip_adapter
from canvax.weights.load import Component, check_finite, load_components
from canvax.weights.location import Location, check_source

MOST = 8
"""The most networks of a pipeline: a call evaluates each of them in each step."""


class HubSource(TypedDict, total=False):
    """The source of a network on the Hub."""

    token: str | bool | None
    """Hub token; by default HF_TOKEN or the stored login."""
    cache_dir: str | Path | None
    """Folder for the Hub's files."""
    local_files_only: bool
    """Never ask the Hub."""
    progress: bool
    """Show downloads on stderr."""


class ControlSource(HubSource, total=False):
    """The keywords of ``with_controlnet``."""

    variant: str | None
    """Name of a set of weights, for example "fp16"."""


class IPAdapterSource(HubSource, total=False):
    """The keywords of ``with_ip_adapter``."""

    weight_name: str | None
    """Name of the file in a folder or repository."""
    revision: str | None
    """Branch, tag or commit of a Hub id."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A network whose files exist and fit the model; no weights are read.

    Attributes:
        files: its files.
        net: its config.
    """

    files: ControlFiles
    net: Control


def control_sources(controlnet: Any, **source: Any) -> list[Location]:
    """Return the sources that ``controlnet=`` names, a name or a list of these.

    Raises:
        InputError: the value is something else.
    """
    names = [controlnet] if isinstance(controlnet, str | os.PathLike) else controlnet
    if not isinstance(names, Sequence) or not all(isinstance(name, str | os.PathLike) and name != "" for name in names):
        raise InputError(
            "controlnet", "is not a folder, a Hub id or a safetensors file, nor a list of these", value=controlnet
        )
    if len(names) > MOST:
        raise InputError(
            "controlnet", f"has {len(names)} entries", cure=f"a pipeline takes {MOST}, of which a call uses some"
        )
    check_source(source, "controlnet", *ControlSource.__annotations__)
    return [Location(os.fspath(name), argument="controlnet", **source) for name in names]


def open_controls(model: Model, sources: Sequence[Location]) -> list[Opened]:
    """Find the files of the networks and check that they fit the model.

    Raises:
        CheckpointError: one is missing, damaged, or made for another kind of model.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    opened = []
    for source in sources:

        def accept(kind: ControlKind, config: Mapping[str, Any], name: str = source.text) -> None:
            control_of(name, kind, config, model)

        files = open_control(source, accept=accept)
        opened.append(Opened(files, read_control(files, model)))
    return opened


def with_controls(
    model: Model,
    programs: Programs,
    params: Params,
    opened: Sequence[Opened],
    *,
    weights: bool = True,
    trained: Callable[[str], Params] | None = None,
) -> tuple[Model, Programs, Params]:
    """Return a model with these networks instead of its present ones; compiled programs and weights are shared.

    ``params`` None is refused: the caller keeps the parameters. Without ``weights`` the parameters of the networks are
    shapes, dtypes and shardings. ``trained`` returns the parameters of a component without adapters, to which a
    control-LoRA adds its own; by default those of ``params``.

    Raises:
        CheckpointError: weights cannot be used.
        OutOfMemoryError: they do not fit into the devices.
    """
    if params is None and opened:
        raise InputError("params", "are needed to load a ControlNet", cure="load the pipeline with its parameters")
    names = [control_name(i) for i in range(len(opened))]
    controls = tuple(zip(names, (part.net for part in opened), strict=True))
    networks = dataclasses.replace(model.networks, controls=controls)
    model = dataclasses.replace(model, networks=networks, controls=tuple(part.files for part in opened))
    programs = dataclasses.replace(programs, networks=networks)
    if params is None:
        return model, programs, None
    parts = [part for part in model.components if part.name in names]
    mesh = programs.mesh
    if not weights:
        shapes = {part.name: abstract_params(part.spec, model.dtype, mesh) for part in parts}
        return model, programs, {**params, **shapes}
    different = {files.name: part for part, files in zip(parts, model.controls, strict=True)}.values()
    needed = sum(device_bytes(part.spec, model.dtype, mesh.shape) for part in different)
    quantized = model.quantize is not None
    check_weights(needed, mesh, ", ".join(map(str, model.controls)), model.dtype, quantized=quantized)
    old = {name for name, _ in model.networks.controls} | {control_name(i) for i in range(MOST)}
    kept = {name: tree for name, tree in params.items() if name not in old}

    def unet() -> Params:
        component = model.networks.denoiser.component
        return trained(component) if trained else kept[component]

    names_of: dict[tuple[Any, ...], str] = {}
    for part, files in zip(parts, model.controls, strict=True):
        same = names_of.setdefault((files.name, files.revision, files.variant), part.name)
        if same != part.name:  # the same network for another control image: weights are shared
            kept[part.name] = kept[same]
            continue

        def placed(param: Param, array: HostArray, files: ControlFiles = files) -> Array:
            check_finite(files, array)
            return place(param, array, mesh, kind_of(params))

        if files.pairs:
            kept[part.name] = control_lora(part, files, unet(), model, placed)
            continue
        loaded = load_components(files, [part], dtype=model.dtype, place=placed)[part.name]
        kept[part.name] = whole_of(loaded, unet(), files, model) if files.difference else loaded
    return model, programs, kept


def whole_of(loaded: Params, unet: Params, files: ControlFiles, model: Model) -> Params:
    """Return the weights of a network whose file has some of them as differences from the UNet's."""
    if model.quantize is not None:
        raise InputError(
            f"{files}: holds differences to the weights of the UNet, which are quantised to {model.quantize}; load the "
            "model without quantize"
        )
    base = dict(flatten(unet))

    def total(name: str, leaf: Array) -> Array:
        return _sum(leaf, base[name], leaf) if name in base else leaf

    return unflatten({name: total(name, leaf) for name, leaf in flatten(loaded)})


def _sum(one: Array, other: Array, like: Array) -> Array:
    """Add two weights, in the dtype and on the devices of ``like``."""
    both = on_devices(one).astype(jnp.float32) + on_devices(other).astype(jnp.float32)
    return jax.device_put(both.astype(like.dtype), like.sharding)


EncoderName = str | Path | bool | None


def usual_kinds(networks: Networks, *, masked: bool = False) -> tuple[PromptKind, ...]:
    """Return what decides the programs of one image prompt for each adapter; empty without an image encoder."""
    if (encoder := networks.image_encoder) is None:
        return ()
    reads = {name: (net.reads,) if net.kind == "plain" else (encoder.cfg.tokens, net.reads)
             for name, net in networks.ip_adapters}  # fmt: skip
    return tuple(PromptKind(name, 1, masked, shape) for name, shape in reads.items())


def ip_adapter_sources(ip_adapter: Any, image_encoder: Any, **source: Any) -> list[Location]:
    """Return the sources that ``ip_adapter=`` names, a name or a list of these.

    Raises:
        InputError: the value is something else, or ``image_encoder`` is.
    """
    names = [ip_adapter] if isinstance(ip_adapter, str | os.PathLike) else ip_adapter
    if not isinstance(names, Sequence) or not all(isinstance(name, str | os.PathLike) and name != "" for name in names):
        raise InputError("ip_adapter", "is not a safetensors file or a Hub id, nor a list of these", value=ip_adapter)
    if len(names) > MOST:
        raise InputError("ip_adapter", f"has {len(names)} entries", cure=f"a pipeline takes {MOST}")
    if image_encoder is True or not isinstance(image_encoder, str | os.PathLike | bool | None):
        raise InputError(
            "image_encoder",
            "is not a folder or a Hub id",
            cure="give None for the one next to the adapter, or False for none",
            value=image_encoder,
        )
    if not names and (unused := [*map(str, source), *["image_encoder"] * bool(image_encoder)]):
        raise needs(unused[0], "ip_adapter")
    if "subfolder" in source:
        example = "'owner/name/folder/file.safetensors'"
        raise InputError("subfolder", "is a part of the name here", cure=f"write {example}", value=source["subfolder"])
    check_source(source, "ip_adapter", *IPAdapterSource.__annotations__)
    return [Location(os.fspath(name), argument="ip_adapter", **source) for name in names]


def with_ip_adapters(
    model: Model,
    programs: Programs,
    params: Params | None,
    sources: Sequence[Location],
    image_encoder: EncoderName,
    *,
    weights: bool = True,
) -> tuple[Model, Programs, Params]:
    """Return a model with these adapters instead of its present ones; compiled programs and weights are shared.

    Without ``weights`` their parameters are shapes, dtypes and shardings.

    Raises:
        InputError: there is no image encoder next to the adapter.
        CheckpointError: one is missing, damaged, or made for another kind of model.
        HubError: the Hub cannot be reached, refuses, or does not have it.
        OutOfMemoryError: they do not fit into the devices.
    """
    if params is None:
        raise InputError("params", "are needed to load an IP-Adapter", cure="load the pipeline with its parameters")
    for source in sources:
        check_ip_adapter(source)
    files = [open_ip_adapter(source) for source in sources]
    nets = [ip_adapter_of(file, model) for file in files]
    encoder: EncoderFiles | None = None
    if files and image_encoder is not False:
        named = None if image_encoder is None or image_encoder is True else image_encoder
        encoder = find_encoder(named, nets[0], files[0], sources[0])
        for net, opened_file, source in zip(nets[1:], files[1:], sources[1:], strict=True):
            find_encoder(encoder.name, net, opened_file, source)
    names = [ip_adapter_name(i) for i in range(len(files))]
    cfg = encoder.cfg if encoder else None
    networks = dataclasses.replace(
        model.networks,
        ip_adapters=tuple(zip(names, (with_encoder(net, cfg) for net in nets), strict=True)),
        image_encoder=ImageEncoder(cfg) if cfg else None,
    )
    old = model.image_encoder
    model = dataclasses.replace(model, networks=networks, ip_adapters=tuple(files), image_encoder=encoder)
    same = encoder is not None and old is not None and str(old) == str(encoder)
    if not weights:
        new = [part for part in model.components if part.name in (*names, IMAGE_ENCODER)]
        shapes = {part.name: abstract_params(part.spec, model.dtype, programs.mesh) for part in new}
        return model, dataclasses.replace(programs, networks=networks), {**params, **shapes}
    return model, dataclasses.replace(programs, networks=networks), _loaded(model, programs, params, names, same=same)


def _loaded(model: Model, programs: Programs, params: Params, names: Sequence[str], *, same: bool) -> Params:
    """Return the parameters with those of the adapters; the image encoder is kept if it is the ``same``."""
    mesh = programs.mesh
    new = [*names, *([IMAGE_ENCODER] if model.image_encoder and not same else [])]
    parts = [part for part in model.components if part.name in new]
    needed = sum(device_bytes(part.spec, model.dtype, mesh.shape) for part in parts)
    files = ", ".join(map(str, (*model.ip_adapters, *([model.image_encoder] if model.image_encoder else []))))
    check_weights(needed, mesh, files, model.dtype, quantized=model.quantize is not None)
    old = {ip_adapter_name(i) for i in range(MOST)} | (set() if same else {IMAGE_ENCODER})
    kept = {name: tree for name, tree in params.items() if name not in old}
    by_name: dict[str, Any] = dict(zip(names, model.ip_adapters, strict=True)) | {IMAGE_ENCODER: model.image_encoder}
    for part in parts:
        loaded = load_components(
            by_name[part.name],
            [part],
            dtype=model.dtype,
            place=lambda param, array: place(param, array, mesh, kind_of(params)),
            finite=(part.name,),
        )
        kept[part.name] = loaded[part.name]
    return kept


LISTED = 4
"""The most faults that an error lists."""


def control_lora(
    part: Component, files: ControlFiles, unet: Params, model: Model, placed: Callable[[Param, HostArray], Array]
) -> Params:
    """Return all parameters of a control-LoRA's network.

    Args:
        part: component of the network.
        files: files with its arrays.
        unet: parameters of the UNet, which are not changed.
        model: model of the UNet.
        placed: puts one of its arrays on the devices.

    Raises:
        CheckpointError: an array is missing, strange or of another shape.
        InputError: the UNet is quantised.
    """
    if model.quantize is not None:
        raise InputError(
            f"{files}: is a control-LoRA, which adds to the weights of the UNet, which are quantised to "
            f"{model.quantize}; load the model without quantize"
        )
    declared: dict[str, Param] = dict(flatten(part.spec))
    base: dict[str, Array] = dict(flatten(unet))
    stored = {array.name for array in files.arrays}
    _check(files, declared, base, stored)
    spec = unflatten({name: param for name, param in declared.items() if name in stored})
    weights: dict[str, Array] = {}
    if stored:
        loaded = load_components(files, [Component(part.name, spec, part.kind)], dtype=model.dtype, place=placed)
        weights = dict(flatten(loaded[part.name]))
    for name, param in declared.items():
        if name in weights:
            continue
        weights[name] = base[name]
        if name in files.pairs:
            weights[name] = _sum(placed(param, _delta(name, param, files)), base[name], base[name])
    return unflatten({name: weights[name] for name in declared})


def _check(files: ControlFiles, declared: Mapping[str, Param], base: Mapping[str, Array], stored: set[str]) -> None:
    """Refuse files that do not make a whole network with this UNet."""
    faults = [f"{name}: nothing has such a weight" for name in files.pairs if name not in declared]
    for name, param in declared.items():
        if name in stored:
            faults += [f"{name}: both whole and in factors"] if name in files.pairs else []
        elif name not in base:
            faults.append(f"{name}: missing")
        elif base[name].shape != param.shape:
            faults.append(f"{name}: {param.shape}, in the UNet {base[name].shape}")
        elif name in files.pairs and files.shapes[name] not in param.checkpoint_shapes:
            faults.append(f"{name}: factors of {files.shapes[name]} instead of {param.checkpoint_shapes[0]}")
    if faults:
        rest = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise CheckpointError(f"{files}: is no whole control-LoRA for this model: {'; '.join(faults[:LISTED])}{rest}")


def _delta(name: str, param: Param, files: ControlFiles) -> HostArray:
    """Return up times down in the parameter's layout, float32."""
    up, down = (entry.read().astype(np.float32) for entry in files.pairs[name])
    product = up.reshape(up.shape[0], -1) @ down.reshape(down.shape[0], -1)
    return np.ascontiguousarray(param.from_checkpoint(product.reshape(up.shape[0], *down.shape[1:])))
