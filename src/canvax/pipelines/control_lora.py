"""A ControlNet of a control-LoRA: weights of the UNet, what the file has in their place, and what it adds to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError, InputError
from canvax.families.base import Model
from canvax.params import Param, Params, flatten, unflatten
from canvax.types import Array, HostArray
from canvax.weights.controlnet import ControlFiles
from canvax.weights.load import Component, load_components

LISTED = 4
"""Faults that are spelled out."""


def control_lora(
    part: Component, files: ControlFiles, unet: Params, model: Model, placed: Callable[[Param, HostArray], Array]
) -> Params:
    """All parameters of the network.

    Args:
        part: of the network.
        files: where its own arrays are.
        unet: parameters of the UNet, which stay as they are.
        model: that of the UNet.
        placed: puts an array of its own on the devices.

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
    own = {one.name for one in files.arrays}
    _check(files, declared, base, own)
    spec = unflatten({name: param for name, param in declared.items() if name in own})
    found: dict[str, Array] = {}
    if own:
        loaded = load_components(files, [Component(part.name, spec, part.kind)], dtype=model.dtype, place=placed)
        found = dict(flatten(loaded[part.name]))
    for name, param in declared.items():
        if name in found:
            continue
        found[name] = base[name]
        if name in files.pairs:
            added = placed(param, _delta(name, param, files))
            both = added.astype(jnp.float32) + base[name].astype(jnp.float32)
            found[name] = jax.device_put(both.astype(base[name].dtype), base[name].sharding)
    return unflatten({name: found[name] for name in declared})


def _check(files: ControlFiles, declared: Mapping[str, Param], base: Mapping[str, Array], own: set[str]) -> None:
    """Refuse what does not make a whole network with this UNet."""
    faults = [f"{name}: nothing has such a weight" for name in files.pairs if name not in declared]
    for name, param in declared.items():
        if name in own:
            faults += [f"{name}: both whole and in factors"] if name in files.pairs else []
        elif name not in base:
            faults.append(f"{name}: missing")
        elif base[name].shape != param.shape:
            faults.append(f"{name}: {param.shape}, in the UNet {base[name].shape}")
        elif name in files.pairs and files.shapes[name] not in param.checkpoint_shapes:
            faults.append(f"{name}: factors of {files.shapes[name]} in place of {param.checkpoint_shapes[0]}")
    if faults:
        more = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise CheckpointError(f"{files}: is no whole control-LoRA for this model: {'; '.join(faults[:LISTED])}{more}")


def _delta(name: str, param: Param, files: ControlFiles) -> HostArray:
    """up times down as the parameter lies in memory, float32."""
    up, down = (one.read().astype(np.float32) for one in files.pairs[name])
    product = up.reshape(up.shape[0], -1) @ down.reshape(down.shape[0], -1)
    return np.ascontiguousarray(param.from_checkpoint(product.reshape(up.shape[0], *down.shape[1:])))
