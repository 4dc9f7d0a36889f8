"""A pipeline with IP-Adapters: found and checked before weights are read, then loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canvax.compile.kinds import PromptKind
from canvax.compile.programs import Programs
from canvax.errors import NO_VALUE, InputError
from canvax.families.base import Model
from canvax.families.ip_adapters import component_name as ip_adapter_name
from canvax.families.ip_adapters import ip_adapter_of, with_encoder
from canvax.models.ip_adapter import ImageEncoder
from canvax.models.networks import Networks
from canvax.models.text import IMAGE_ENCODER
from canvax.parallel.memory import check_weights
from canvax.parallel.rules import abstract_params, device_bytes, place
from canvax.params import Params
from canvax.weights.ip_adapter import EncoderFiles, check_ip_adapter, find_encoder, open_ip_adapter
from canvax.weights.load import load_components
from canvax.weights.location import Location

EncoderName = str | Path | bool | None


def usual_kinds(networks: Networks, *, masked: bool = False) -> tuple[PromptKind, ...]:
    """What decides the programs of one image prompt for each adapter; none where no images are seen."""
    if (encoder := networks.image_encoder) is None:
        return ()
    reads = {name: (net.reads,) if net.kind == "plain" else (encoder.cfg.tokens, net.reads)
             for name, net in networks.ip_adapters}  # fmt: skip
    return tuple(PromptKind(name, 1, masked, shape) for name, shape in reads.items())


def ip_adapter_sources(ip_adapter: Any, image_encoder: Any, **source: Any) -> list[Location]:
    """What ``ip_adapter=`` names, a name or a list of them.

    Raises:
        InputError: it is something else, or ``image_encoder`` is.
    """
    names = [ip_adapter] if isinstance(ip_adapter, str | os.PathLike) else ip_adapter
    if not isinstance(names, Sequence) or not all(isinstance(name, str | os.PathLike) and name != "" for name in names):
        raise InputError("ip_adapter", ip_adapter, "is not a safetensors file or a Hub id, nor a list of these")
    if len(names) > MOST:
        raise InputError("ip_adapter", NO_VALUE, f"has {len(names)} entries", f"a pipeline takes {MOST}")
    if image_encoder is True or not isinstance(image_encoder, str | os.PathLike | bool | None):
        raise InputError(
            "image_encoder",
            image_encoder,
            "is not a folder or a Hub id",
            "nor None, for the one beside the adapter; nor False, for none",
        )
    if not names and (unused := [*map(str, source), *["image_encoder"] * bool(image_encoder)]):
        raise InputError(unused[0], NO_VALUE, "has no effect without ip_adapter", "give {ip_adapter}, or leave it out")
    if "subfolder" in source:
        example = "'owner/name/folder/file.safetensors'"
        raise InputError("subfolder", source["subfolder"], "is a part of the name here", f"write {example}")
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
    """A model with these adapters in place of those that it has; compiled programs and weights are shared.

    Without ``weights`` their parameters are shapes, dtypes and shardings.

    Raises:
        InputError: no image encoder is beside the adapter.
        CheckpointError: one is missing, damaged, or made for another kind of model.
        HubError: the Hub cannot be reached, refuses, or does not have it.
        OutOfMemoryError: they do not fit into the devices.
    """
    if params is None:
        raise InputError("params", None, "cannot be given an IP-Adapter", "load the pipeline whole")
    for source in sources:
        check_ip_adapter(source)
    files = [open_ip_adapter(source) for source in sources]
    nets = [ip_adapter_of(one, model) for one in files]
    encoder: EncoderFiles | None = None
    if files and image_encoder is not False:
        named = None if image_encoder is None or image_encoder is True else image_encoder
        encoder = find_encoder(named, nets[0], files[0], sources[0])
        for net, one, source in zip(nets[1:], files[1:], sources[1:], strict=True):
            find_encoder(encoder.name, net, one, source)
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
    """The parameters with those of the adapters; the image encoder stays if it is the ``same``."""
    mesh = programs.mesh
    new = [*names, *([IMAGE_ENCODER] if model.image_encoder and not same else [])]
    parts = [part for part in model.components if part.name in new]
    needed = sum(device_bytes(part.spec, model.dtype, mesh.shape) for part in parts)
    told = ", ".join(map(str, (*model.ip_adapters, *([model.image_encoder] if model.image_encoder else []))))
    check_weights(needed, mesh, told, model.dtype, quantized=model.quantize is not None)
    old = {ip_adapter_name(i) for i in range(MOST)} | (set() if same else {IMAGE_ENCODER})
    kept = {name: tree for name, tree in params.items() if name not in old}
    by_name: dict[str, Any] = dict(zip(names, model.ip_adapters, strict=True)) | {IMAGE_ENCODER: model.image_encoder}
    for part in parts:
        loaded = load_components(
            by_name[part.name],
            [part],
            dtype=model.dtype,
            place=lambda param, array: place(param, array, mesh),
            finite=(part.name,),
        )
        kept[part.name] = loaded[part.name]
    return kept
