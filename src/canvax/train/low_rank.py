"""Low-rank factors of weights (Hu et al. 2021): the layers that have them, their initial values, and their files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from canvax.adapters import NotLowRank, low_rank
from canvax.errors import NO_VALUE, InputError, check_count, nearest, shown
from canvax.nn import LOW_RANK
from canvax.params import Param, Params, Spec, flatten
from canvax.types import DType, HostArray
from canvax.weights.cast import parse_dtype
from canvax.weights.location import Location
from canvax.weights.lora import read_adapter
from canvax.weights.open import LORA_FILES, find_adapter
from canvax.weights.safetensors import Outgoing, write_safetensors
from canvax.weights.save import narrowed

LAYERS: Mapping[str, str] = {
    "attention": "queries, keys, values and outputs of all attention",
    "transformer": "attention, feed-forward and the projections around them",
    "all": "every matrix and convolution of the UNet's blocks",
}
"""The layers of the UNet that have factors. In a text encoder: with "attention" its attention, otherwise also its
feed-forward."""

_ATTENTION = (".to_q", ".to_k", ".to_v", ".to_out.0")
_OF_TEXT = (".q_proj", ".k_proj", ".v_proj", ".out_proj")
_KOHYA = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}

FORMATS = ("peft", "kohya")
"""Array names in a file: those of diffusers and PEFT, or of kohya and A1111."""

Targets = dict[str, dict[str, Param]]
"""Component -> dotted name of a layer -> its weight, for the weights that have factors."""


def targets(specs: Mapping[str, Spec], layers: str) -> Targets:
    """Selects the weights of these components that get factors; ``layers`` is a key of ``LAYERS``."""
    if layers not in LAYERS:
        raise InputError("layers", layers, "is not known", nearest(layers, list(LAYERS)))
    return {component: dict(_targets(component, spec, layers)) for component, spec in specs.items()}


def _targets(component: str, spec: Spec, layers: str) -> Iterator[tuple[str, Param]]:
    for name, param in flatten(spec):
        module = name.removesuffix(".weight")
        if name == module or param.layout == "plain":
            continue
        if component == "unet":
            attention = module.endswith(_ATTENTION)
            transformer = ".attentions." in module
            block = module.startswith(("down_blocks.", "mid_block.", "up_blocks."))
            if {"attention": attention, "transformer": transformer, "all": block}[layers]:
                yield module, param
        elif module.endswith(_OF_TEXT) or (layers != "attention" and ".mlp." in module):
            yield module, param


def new_factors(chosen: Targets, rank: int, seed: int) -> Params:
    """Makes factors ``{component: {layer: {"down", "up"}}}`` that have no effect yet: ``up`` is zero.

    ``down`` is uniform with a variance of 1 / (3 x inputs), as in the original code and PEFT.
    """
    check_count("rank", rank)
    if seed < 0:
        raise InputError("seed", seed, "is not a whole number of at least 0")
    rng = np.random.default_rng(seed)

    def new_pair(param: Param) -> dict[str, HostArray]:
        *kernel, inputs, outputs = param.shape
        bound = (math.prod(kernel) * inputs) ** -0.5
        down = rng.uniform(-bound, bound, (*kernel, inputs, rank)).astype(np.float32)
        return {"down": down, "up": np.zeros((rank, outputs), np.float32)}

    return {component: {name: new_pair(param) for name, param in of.items()} for component, of in chosen.items()}


def read_factors(source: str | Path, specs: Mapping[str, Spec], chosen: Targets, rank: int, *, scale: float) -> Params:
    """Reads the factors of a LoRA file, to train it further.

    Args:
        source: a file, a folder or a Hub id.
        specs: of all components that a LoRA of the model can have factors of.
        chosen: the weights that are trained.
        rank: rank of the factors.
        scale: what ``up`` x ``down`` is multiplied by; the file's may be another, and its change stays the same.

    Raises:
        InputError: the file has factors of other weights, or of another rank.
        CheckpointError: the file is no adapter of the model.
    """
    (path, *_), config = find_adapter(Location(source, argument="start"), LORA_FILES)
    parts = read_adapter(path, specs, config).parts
    wanted = {(component, f"{name}.weight"): param for component, of in chosen.items() for name, param in of.items()}
    if parts.keys() != wanted.keys():
        component, name = sorted(parts.keys() ^ wanted.keys())[0]
        has = "has" if (component, name) in parts else "lacks"
        problem = f"{has} factors of {component}.{name}"
        raise InputError("start", source, problem, "give the {layers} and {text_encoder} that it was trained with")
    factors: Params = {component: {} for component in chosen}
    for (component, name), part in parts.items():
        param = wanted[component, name]
        try:
            down, up = low_rank(replace(part, scale=part.scale / scale), param.checkpoint_shapes[0])
        except NotLowRank as error:
            raise InputError("start", source, f"cannot be trained further: {error}", "give a LoRA") from None
        if len(down) != rank:
            raise InputError("rank", rank, f"is not that of {source}", f"give {{rank={len(down)}}}")
        down = down.transpose(2, 3, 1, 0) if len(param.shape) == 4 else down.reshape(rank, -1).T
        factors[component][name.removesuffix(".weight")] = {
            "down": np.ascontiguousarray(down, np.float32),
            "up": np.ascontiguousarray(up.T, np.float32),
        }
    return factors


def with_factors(factors: Params, params: Params, *, scale: float) -> Params:
    """Returns the parameters with the factors added to the layers, in the form that ``canvax.nn`` reads."""
    result = dict(params)
    _check_factors(factors, params)
    for component, of in factors.items():
        tree = _copied(params[component])
        for name, pair in of.items():
            _layer(tree, name)[LOW_RANK] = {"down": pair["down"], "up": pair["up"] * scale}
        result[component] = tree
    return result


def merged(factors: Params, params: Params, *, scale: float) -> Params:
    """Returns the parameters with the factors merged into the weights, as a pipeline's programs need them."""
    _check_factors(factors, params)
    result = dict(params)
    for component, of in factors.items():
        tree = _copied(params[component])
        for name, pair in of.items():
            layer = _layer(tree, name)
            added = jnp.einsum("...r,ro->...o", pair["down"], pair["up"]) * scale
            layer["weight"] = (layer["weight"] + added).astype(layer["weight"].dtype)
        result[component] = tree
    return result


def _check_factors(factors: Params, of: Mapping[str, Any]) -> None:
    """Refuses factors in a form other than that of ``new_factors``, or of components that are not in ``of``."""
    for component, layers in factors.items():
        if not isinstance(layers, Mapping) or not all(
            isinstance(pair, Mapping) and {"down", "up"} <= pair.keys() for pair in layers.values()
        ):
            raise InputError(
                "factors",
                NO_VALUE,
                f"has {component!r}: {shown(layers)}, which are no factors",
                "new_factors makes them",
            )
        if not isinstance(of.get(component), Mapping):
            raise InputError(
                "factors",
                NO_VALUE,
                f"are of {component!r}, and there is none",
                nearest(component, list(of) or ["unet"]),
            )


def _copied(tree: Params) -> Params:
    """Copies the dicts of a tree, but not the arrays."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _layer(tree: Params, name: str) -> Params:
    for step in name.split("."):
        tree = tree[step]
    return tree


def write_factors(
    path: Path,
    factors: Params,
    chosen: Targets,
    *,
    alpha: float,
    names: str,
    dtype: DType = "float32",
    metadata: Mapping[str, str],
) -> None:
    """Writes a LoRA file for PyTorch diffusers and PEFT (``names`` "peft"), or for kohya's tools and A1111 ("kohya").

    The change of a weight is alpha / rank x up down.
    """
    dtype = parse_dtype(dtype)
    if names not in FORMATS:
        raise InputError("names", names, "is not known", nearest(names, FORMATS))
    _check_factors(factors, chosen)
    if not any(factors.values()):
        raise InputError("factors", {}, "holds none", "new_factors makes them")
    outgoing: list[Outgoing] = []
    for component, of in factors.items():
        for name, pair in of.items():
            down, up = stored(chosen[component][name], pair)
            for key, array in _named(component, name, {"down": down, "up": up}, alpha, names, len(factors)):
                array = array if key.endswith(".alpha") else narrowed(array, dtype)
                outgoing.append(Outgoing(key, array.shape, array.dtype, partial(np.asarray, array)))
    rank = next(iter(next(iter(factors.values())).values()))["up"].shape[0]
    text = {"format": "pt", **metadata}
    if names == "peft":
        text["lora_adapter_metadata"] = json.dumps(_peft_settings(factors, chosen, rank, alpha), sort_keys=True)
    else:
        text |= {"ss_network_module": "networks.lora", "ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, outgoing, text)


def stored(param: Param, pair: Mapping[str, Any]) -> tuple[HostArray, HostArray]:
    """Converts both factors to the layout of files: (r, in, kh, kw) and (out, r, 1, 1), or (r, in) and (out, r)."""
    down, up = np.asarray(pair["down"], np.float32), np.asarray(pair["up"], np.float32)
    down = np.ascontiguousarray(down.transpose(3, 2, 0, 1) if down.ndim == 4 else down.T)
    up = np.ascontiguousarray(up.T)
    if len(param.checkpoint_shapes[0]) == 4:
        down, up = down.reshape(*down.shape[:2], *param.checkpoint_shapes[0][2:]), up[:, :, None, None]
    return down, up


def _named(
    component: str, name: str, pair: Mapping[str, HostArray], alpha: float, names: str, components: int
) -> Iterator[tuple[str, HostArray]]:
    if names == "peft":
        yield f"{component}.{name}.lora_A.weight", pair["down"]
        yield f"{component}.{name}.lora_B.weight", pair["up"]
        return
    prefix = "lora_te_" if component == "text_encoder" and components < 3 else _KOHYA[component]
    module = prefix + name.replace(".", "_")
    yield f"{module}.lora_down.weight", pair["down"]
    yield f"{module}.lora_up.weight", pair["up"]
    yield f"{module}.alpha", np.asarray(alpha, np.float32)


def _peft_settings(factors: Params, chosen: Targets, rank: int, alpha: float) -> dict[str, Any]:
    """Returns the settings that PEFT needs to create the layers."""
    settings: dict[str, Any] = {}
    for component in factors:
        settings[f"{component}.r"], settings[f"{component}.lora_alpha"] = rank, alpha
        # For text encoders only the last part of the name: versions of transformers differ in the rest.
        names = {name if component == "unet" else name.rpartition(".")[2] for name in chosen[component]}
        settings[f"{component}.target_modules"] = sorted(names)
    return settings
