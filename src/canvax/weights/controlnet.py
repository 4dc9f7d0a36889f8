"""Files of networks that read control images: a diffusers folder, or one safetensors file with various names.

    diffusers           controlnet_cond_embedding.conv_in.weight, conv_in.weight, down_blocks. ..., and config.json
    the original code   control_model.input_hint_block.0.weight, input_blocks. ..., zero_convs. ..., middle_block. ...
    control-LoRAs       lora_controlnet, and NAME.up and NAME.down instead of the UNet's NAME.weight
    T2I-Adapters        adapter.body.0.resnets.0.block1.weight; in the original code body.0.block1.weight
    of FLUX.1           controlnet_x_embedder.weight; of XLabs pos_embed_input.weight

(Zhang et al. 2023; Mou et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canvax.errors import CheckpointError
from canvax.families.flux import NAMES
from canvax.weights.entries import PICKLES, Entry, pickle_refused
from canvax.weights.files import ControlFiles, ControlKind, open_weights
from canvax.weights.formats import controlnet_rules, t2i_adapter_rules
from canvax.weights.identify import (
    CLASSES,
    CONTROLNET,
    FLUX_CONTROLNET,
    T2I_ADAPTER,
    expect,
    identify,
    is_flux_control,
)
from canvax.weights.location import Location, refuse_pickle
from canvax.weights.open import open_network
from canvax.weights.rules import Names

_DIFFERENCE = "difference"
_CONTROL_LORA = "lora_controlnet"
_PREFIX = "control_model."


def open_control(location: Location, *, accept: Callable[[ControlKind, Mapping[str, Any]], object]) -> ControlFiles:
    """Find a ControlNet or a T2I-Adapter and download missing files; no array is read.

    Args:
        location: a folder, a Hub id, or a safetensors file.
        accept: called with the kind and the parsed ``config.json``, if there is one, before weights are fetched.

    Raises:
        InputError: the location does not exist.
        CheckpointError: it is damaged, or another kind of file.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    name = location.text
    refuse_pickle(name)
    path = location.local()
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.safetensors"))
        pickles = sorted(file for file in path.iterdir() if file.suffix.lower() in PICKLES)
        if pickles and not files:
            raise CheckpointError(f"{name}: holds only {pickles[0].name}. {pickle_refused(pickles[0])}")
        if len(files) != 1:
            raise CheckpointError(
                f"{name}: has no config.json and {len(files) or 'no'} safetensors files; name a folder of diffusers "
                "with config.json and diffusion_pytorch_model.safetensors, or one file"
            )
        path = files[0]
    if path is not None and path.is_file():
        return _of_arrays(name, open_weights(path))

    def kind_of(config: Mapping[str, Any]) -> ControlKind:
        cls = str(config.get("_class_name"))
        if (kind := CLASSES.get(cls)) not in (CONTROLNET, T2I_ADAPTER):
            raise CheckpointError(
                f"{name}: its config.json is of the class {cls[:80]!r}; canvax reads ControlNetModel, "
                f"ControlNetUnionModel, {FLUX_CONTROLNET} and T2IAdapter"
            )
        if cls == FLUX_CONTROLNET:
            return "transformer"
        return "controlnet" if kind is CONTROLNET else "adapter"

    files = open_network(location, accept=lambda config: accept(kind_of(config), config))
    kind = kind_of(files.config)
    arrays = Names(NAMES).to_internal(files.arrays) if kind == "transformer" else files.arrays
    return ControlFiles(name, arrays, files.config, files.path, files.revision, files.variant, kind)


def is_union(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a ControlNet-Union; early configs name the class of a plain ControlNet."""
    return "Union" in str(config.get("_class_name")) or "num_control_type" in config


def _of_arrays(name: str, arrays: Sequence[Entry]) -> ControlFiles:
    """Recognise a network by the names of its arrays."""
    shapes = {array.name: array.shape for array in arrays}
    if is_flux_control(shapes):
        return ControlFiles(name, Names(NAMES).to_internal(arrays), kind="transformer")
    expect(name, shapes, CONTROLNET, T2I_ADAPTER)
    if (kind := identify(shapes)) is None:
        raise CheckpointError(f"{name}: holds no ControlNet and no T2I-Adapter, as the names of its arrays say")
    if kind is T2I_ADAPTER:
        internal = any(key.startswith("adapter.") for key in shapes)
        entries = arrays if internal else Names(t2i_adapter_rules(shapes)).to_internal(arrays)
        return ControlFiles(name, entries, kind="adapter")
    arrays = [replace(array, name=array.name.removeprefix(_PREFIX)) for array in arrays
              if array.name not in (_DIFFERENCE, _CONTROL_LORA)]  # fmt: skip
    if _CONTROL_LORA in shapes:
        return _control_lora(name, arrays)
    return ControlFiles(name, _under_our_names(arrays), difference=_DIFFERENCE in shapes)


def _control_lora(name: str, arrays: Sequence[Entry]) -> ControlFiles:
    """Return a ControlNet as differences from a UNet, two factors for each weight (Stability AI, 2023)."""
    ups, downs = (
        {array.name.removesuffix(end): array for array in arrays if array.name.endswith(end)}
        for end in (".up", ".down")
    )
    unpaired = sorted(ups.keys() ^ downs.keys())
    if unpaired or not ups:
        fault = f"{unpaired[0]} has one of its two factors" if unpaired else "it has no factors"
        raise CheckpointError(f"{name}: is no whole control-LoRA: {fault}")
    for key in ups:
        up, down = ups[key], downs[key]
        if len(up.shape) < 2 or len(down.shape) < 2 or up.shape[1] != down.shape[0] or set(up.shape[2:]) - {1}:
            raise CheckpointError(f"{name}: the factors of {key}, {up.shape} and {down.shape}, do not fit together")
        if not up.is_float or not down.is_float:
            raise CheckpointError(f"{name}: the factors of {key} are no floating point numbers")
    whole = [array for array in arrays if not array.name.endswith((".up", ".down"))]
    # The rules count blocks by all names, with each factor instead of the weight.
    named = _under_our_names([*whole, *(replace(array, name=f"{key}.weight") for key, array in ups.items())])
    pairs = {up.name: (up, replace(downs[key], name=up.name)) for key, up in zip(ups, named[len(whole) :], strict=True)}
    return ControlFiles(name, named[: len(whole)], pairs=pairs)


def _under_our_names(arrays: Sequence[Entry]) -> list[Entry]:
    return Names(controlnet_rules([array.name for array in arrays])).to_internal(arrays)
