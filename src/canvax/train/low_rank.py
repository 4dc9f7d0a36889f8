"""Low-rank factors of weights (Hu et al. 2021): the layers that have them, their initial values, and their files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.adapters import DECOMPOSED, NotLowRank, low_rank
from canvax.errors import InputError, check_count, nearest, shown
from canvax.models.text import FIRST
from canvax.nn import GAIN, LOW_RANK, product
from canvax.params import Axis, Param, Params, Spec, copied, flatten, halves_first, pairs_together
from canvax.quantize import SCALE, quantize
from canvax.types import Array, DType, HostArray
from canvax.weights.cast import parse_dtype
from canvax.weights.location import Location
from canvax.weights.lora import read_adapter
from canvax.weights.open import LORA_FILES, find_adapter
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import ArrayToSave, write_safetensors
from canvax.weights.save import narrowed

LAYERS: Mapping[str, str] = {
    "attention": "queries, keys, values and outputs of all attention",
    "transformer": "attention, feed-forward and the projections around them",
    "all": "every matrix and convolution of the blocks of the UNet or the transformer",
}
"""The layers of the denoiser that have factors. In a text encoder: with "attention" its attention, otherwise also its
feed-forward."""

_IN_BLOCK = re.compile(r"\.\d+\.")
_KOHYA = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}

MAGNITUDE = "magnitude"
"""Key of DoRA's magnitudes [outputs], in a pair of factors (Liu et al. 2024)."""

FORMATS = ("peft", "kohya")
"""Array names in a file: those of diffusers and PEFT, or of kohya and A1111."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with one pair of factors: a weight, or several that diffusers stores as one.

    Attributes:
        parts: the weights by their dotted names, in the order in which they are stacked.
        axis: 0 if their outputs are stacked, 1 if their inputs are.
        rank: rank of the factors; 0 for that of all.
    """

    parts: Mapping[str, Param]
    axis: int = 0
    rank: int = 0

    @property
    def axes(self) -> set[str | None]:
        """Names of the axes of the weights."""
        return {axis.name if isinstance(axis, Axis) else axis for param in self.parts.values() for axis in param.axes}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole in memory: kernel, inputs, outputs."""
        shapes = [param.shape for param in self.parts.values()]
        *kernel, inputs, outputs = shapes[0]
        if self.axis:
            return *kernel, sum(shape[-2] for shape in shapes), outputs
        return *kernel, inputs, sum(shape[-1] for shape in shapes)

    def split(self, pair: Mapping[str, Any]) -> Iterator[tuple[str, Param, dict[str, Any]]]:
        """Yield name, declaration and factors of each weight."""
        end = 0
        for name, param in self.parts.items():
            begin, end = end, end + param.shape[-2 if self.axis else -1]
            if len(self.parts) == 1:
                yield name, param, dict(pair)
            elif self.axis:
                yield name, param, {"down": pair["down"][begin:end], "up": pair["up"]}
            else:
                yield name, param, {"down": pair["down"], "up": pair["up"][:, begin:end]}


Targets = dict[str, dict[str, Layer]]
"""Component -> dotted name of a layer in diffusers, for the layers that have factors."""


def targets(specs: Mapping[str, Spec], layers: str, stacks: Sequence[Rule] = ()) -> Targets:
    """Select the layers of these components that get factors.

    Args:
        specs: of the components.
        layers: a key of ``LAYERS``.
        stacks: the layers of a transformer that diffusers stores as one.

    Raises:
        InputError: ``layers`` is unknown, or no component has any.
    """
    if layers not in LAYERS:
        raise InputError("layers", "is not known", cure=nearest(layers, list(LAYERS)), value=layers)
    chosen = {component: dict(_targets(spec, layers, Names(stacks))) for component, spec in specs.items()}
    if not any(chosen.values()):
        rule = "'attention' takes layers with an axis 'heads', 'transformer' also those with an axis 'mlp', "
        cure = f"{rule}'all' every matrix and convolution in a numbered block, such as 'blocks.0.out'"
        raise InputError("layers", f"fits no layer of {', '.join(specs)}", cure=cure, value=layers)
    return chosen


def _targets(spec: Spec, layers: str, stacks: Names) -> Iterator[tuple[str, Layer]]:
    declared = {
        name.removesuffix(".weight"): param
        for name, param in flatten(spec)
        if name.endswith(".weight") and param.layout != "plain"
    }
    whole = {
        name: Layer({part: declared[part] for part in parts}, rule.axis)
        for module in declared
        for name, parts, rule in stacks.external(module)
    }
    stacked = {part for layer in whole.values() for part in layer.parts}
    whole |= {module: Layer({module: param}) for module, param in declared.items() if module not in stacked}
    for name, layer in whole.items():
        attention = "heads" in layer.axes
        # The projections of a UNet's transformer blocks have none of these axes.
        transformer = attention or "mlp" in layer.axes or ".attentions." in name
        block = bool(_IN_BLOCK.search(name))
        if {"attention": attention, "transformer": transformer, "all": block}[layers]:
            yield name, layer


def with_ranks(chosen: Targets, ranks: Mapping[str, int], conv_rank: int | None = None) -> Targets:
    """Set the ranks of some layers.

    Args:
        chosen: the layers.
        ranks: by whole parts of a layer's name, such as "mid_block" or "unet.down_blocks.0"; the last that fits counts.
        conv_rank: that of other convolutions larger than 1 x 1.

    Raises:
        InputError: there is no such layer.
    """
    fitting: set[str] = set()

    def ranked(component: str, name: str, layer: Layer) -> Layer:
        found = [part for part in ranks if f".{part}." in f".{component}.{name}."]
        is_convolution = math.prod(layer.shape[:-2]) > 1
        fitting.update(found, ["conv_rank"] if is_convolution else [])
        return replace(layer, rank=ranks[found[-1]] if found else (conv_rank or 0) * is_convolution)

    result = {part: {name: ranked(part, name, layer) for name, layer in of.items()} for part, of in chosen.items()}
    if absent := [part for part in ranks if part not in fitting]:
        raise InputError("ranks", "is of no trained layer", cure="see {layers}", value=absent[0])
    if conv_rank and "conv_rank" not in fitting:
        raise InputError(
            "conv_rank", "is for 3 x 3 convolutions, and none is trained", cure="leave it out", value=conv_rank
        )
    return result


def new_factors(chosen: Targets, rank: int, seed: int) -> Params:
    """Make factors ``{component: {layer: {"down", "up"}}}`` that have no effect yet: ``up`` is zero.

    ``down`` is uniform with a variance of 1 / (3 x inputs), as in the original code and PEFT.
    """
    check_count("rank", rank)
    if seed < 0:
        raise InputError("seed", "is not a whole number of at least 0", value=seed)
    rng = np.random.default_rng(seed)

    def new_pair(layer: Layer) -> dict[str, HostArray]:
        *kernel, inputs, outputs = layer.shape
        bound = (math.prod(kernel) * inputs) ** -0.5
        down = rng.uniform(-bound, bound, (*kernel, inputs, layer.rank or rank)).astype(np.float32)
        return {"down": down, "up": np.zeros((layer.rank or rank, outputs), np.float32)}

    return {component: {name: new_pair(layer) for name, layer in of.items()} for component, of in chosen.items()}


def new_lokr(chosen: Targets, rank: int, factor: int, seed: int) -> Params:
    """Make factors of a LoKr (Yeh et al. 2024) that have no effect yet, as LyCORIS's.

    ``w1`` is [in, out] of the largest divisors of the weight's sides up to ``factor`` and their square roots. The other
    factor is ``up`` and ``down`` of this rank, or ``w2`` where that is not smaller.
    """
    check_count("rank", rank)
    check_count("factor", factor)
    check_single("lokr", chosen)
    rng = np.random.default_rng(seed)

    def uniform(inputs: int, *shape: int) -> HostArray:
        return rng.uniform(-(inputs**-0.5), inputs**-0.5, shape).astype(np.float32)

    def new_pair(layer: Layer) -> dict[str, HostArray]:
        *kernel, inputs, outputs = layer.shape
        r, (a, b) = layer.rank or rank, (_divisor(side, factor) for side in (inputs, outputs))
        inputs, outputs, w1 = inputs // a, outputs // b, uniform(a, a, b)
        if 2 * r >= max(inputs, outputs):
            return {"w1": w1, "w2": np.zeros((*kernel, inputs, outputs), np.float32)}
        return {"w1": w1, "down": np.zeros((*kernel, inputs, r), np.float32), "up": uniform(r, r, outputs)}

    return {component: {name: new_pair(layer) for name, layer in of.items()} for component, of in chosen.items()}


def _divisor(side: int, most: int) -> int:
    """Return the largest divisor of a side up to ``most`` and the side's square root."""
    return max(d for d in range(1, min(most, math.isqrt(side)) + 1) if side % d == 0)


def with_magnitudes(factors: Params, params: Params, chosen: Targets, *, scale: float) -> Params:
    """Add to factors without magnitudes those that have no effect yet: the norms of the changed weights (DoRA).

    Raises:
        InputError: a layer is stored as one with others, and its file has no magnitudes for each.
    """
    _check_factors(factors, params)

    def added(component: str, name: str, pair: Params) -> Params:
        if MAGNITUDE in pair:
            return pair
        ((part, _, factors),) = chosen[component][name].split(pair)
        norms = _norms(_changed(_layer(params[component], part), _scaled(factors, scale)))
        return {**pair, MAGNITUDE: np.asarray(norms)}

    check_single("dora", chosen)
    return {part: {name: added(part, name, pair) for name, pair in of.items()} for part, of in factors.items()}


def check_single(argument: str, chosen: Targets) -> None:
    """Raise InputError if the layers include one that diffusers stores as one with others."""
    for of in chosen.values():
        for name, layer in of.items():
            if len(layer.parts) > 1:
                problem = f"is not there for models with stacked layers, such as {name}"
                raise InputError(argument, problem, cure="leave it out, or choose other {layers}", value=True)


def read_factors(
    source: str | Path,
    specs: Mapping[str, Spec],
    chosen: Targets,
    rank: int,
    *,
    scale: float,
    dora: bool = False,
) -> Params:
    """Read the factors of a LoRA file, to train it further.

    Args:
        source: a file, a folder or a Hub id.
        specs: of all components that a LoRA of the model can have factors of.
        chosen: the weights that are trained.
        rank: rank of the factors.
        scale: what ``up`` x ``down`` is multiplied by; the file's may be another, and its change stays the same.
        dora: magnitudes are trained too; the file may be without.

    Raises:
        InputError: the file has factors of other weights, or of another rank.
        CheckpointError: the file is no adapter of the model.
    """
    (path, *_), config = find_adapter(Location(source, argument="start"), LORA_FILES)
    parts = read_adapter(path, specs, config).parts
    wanted = {(component, f"{part}.weight") for component, of in chosen.items() for layer in of.values()
              for part in layer.parts}  # fmt: skip
    if parts.keys() != wanted:
        component, name = sorted(parts.keys() ^ wanted)[0]
        has = "has" if (component, name) in parts else "lacks"
        problem = f"{has} factors of {component}.{name}"
        raise InputError("start", problem, cure="give the {layers} and {text} that it was trained with", value=source)
    factors: Params = {component: {} for component in chosen}
    for component, of in chosen.items():
        for name, layer in of.items():
            pairs, magnitude = [], {}
            for module, param in layer.parts.items():
                part = parts[component, f"{module}.weight"]
                if dora and (role := next((role for role in DECOMPOSED if role in part.arrays), None)):
                    by_inputs = role == "dora_scale" and part.arrays[role].shape[0] == 1 != param.shape[-1]
                    if by_inputs:
                        raise InputError("start", "has norms of inputs", cure="give another LoRA", value=source)
                    magnitude = {MAGNITUDE: _of_outputs(part.arrays[role], param)}
                    arrays = {role: array for role, array in part.arrays.items() if role not in DECOMPOSED}
                    part = replace(part, arrays=arrays)
                try:
                    down, up = low_rank(replace(part, scale=part.scale / scale), param.checkpoint_shapes[0])
                except NotLowRank as error:
                    cure = "give {dora=True}" if not dora and part.arrays.keys() & DECOMPOSED else "give a LoRA"
                    raise InputError("start", f"cannot be trained further: {error}", cure=cure, value=source) from None
                if len(down) != (wanted_rank := layer.rank or rank):
                    problem = f"is not that of {source}, {len(down)} in {module}"
                    cure = (
                        "give {ranks} and {conv_rank} of its training" if layer.rank else f"give {{rank={len(down)}}}"
                    )
                    raise InputError("rank", problem, cure=cure, value=wanted_rank)
                down = down.transpose(2, 3, 1, 0) if len(param.shape) == 4 else down.reshape(len(down), -1).T
                pairs.append((down, (halves_first(up, param.pairs) if param.pairs else up).T))
            factors[component][name] = _joined(layer, pairs, source) | magnitude
    return factors


def _of_outputs(array: HostArray, param: Param) -> HostArray:
    """Return the magnitudes of a file in the order of the outputs in memory."""
    flat = np.asarray(array, np.float32).reshape(-1)
    return np.ascontiguousarray(halves_first(flat, param.pairs) if param.pairs else flat)


def _joined(layer: Layer, pairs: Sequence[tuple[HostArray, HostArray]], source: str | Path) -> dict[str, HostArray]:
    """Return the factors of a layer from those of its weights."""
    downs, ups = zip(*pairs, strict=True)
    if any(not np.array_equal(first, other) for first, other in pairwise(ups if layer.axis else downs)):
        raise InputError(
            "start", f"has different factors for {', '.join(layer.parts)}", cure="give another LoRA", value=source
        )
    down = np.concatenate(downs) if layer.axis else downs[0]
    up = ups[0] if layer.axis else np.concatenate(ups, axis=1)
    return {"down": np.ascontiguousarray(down, np.float32), "up": np.ascontiguousarray(up, np.float32)}


def with_factors(factors: Params, params: Params, chosen: Targets, *, scale: float) -> Params:
    """Return the parameters with the factors added to the layers, in the form that ``canvax.nn`` reads."""
    result = dict(params)
    _check_factors(factors, params)
    for component, of in factors.items():
        tree = copied(params[component])
        for name, pair in of.items():
            for part, _, unscaled in chosen[component][name].split(pair):
                layer, scaled = _layer(tree, part), _scaled(unscaled, scale)
                gain = {GAIN: _gain(layer, pair, scaled) - 1.0} if MAGNITUDE in pair else {}
                layer[LOW_RANK] = {**scaled, **gain}
        result[component] = tree
    return result


def merged(factors: Params, params: Params, chosen: Targets, *, scale: float) -> Params:
    """Return the parameters with the factors merged into the weights, as a pipeline's programs need them.

    8-bit weights are rounded to 8 bits again.
    """
    _check_factors(factors, params)
    result = dict(params)
    for component, of in factors.items():
        tree = copied(params[component])
        for name, pair in of.items():
            for part, _, unscaled in chosen[component][name].split(pair):
                layer, scaled = _layer(tree, part), _scaled(unscaled, scale)
                weight, changed = layer["weight"], _changed(layer, scaled)
                if MAGNITUDE in pair:
                    changed = changed * _to_rank(_gain(layer, pair, scaled), changed.ndim)
                if SCALE in layer:
                    whole, scales = quantize(np.asarray(changed), weight.dtype)
                    layer[SCALE] = jax.device_put(scales, layer[SCALE].sharding)
                else:
                    whole = changed.astype(weight.dtype)
                layer["weight"] = jax.device_put(whole, weight.sharding)
        result[component] = tree
    return result


_to_rank = jax.lax.broadcast_to_rank


def _scaled(factors: Params, scale: float) -> Params:
    """Return the factors of a weight as ``canvax.nn`` reads them: multiplied by ``scale``, without magnitudes.

    A LoKr of two whole factors has no rank, and so no scale.
    """
    key, scale = "w1" if "w1" in factors else "up", 1.0 if "w2" in factors else scale
    return {name: array * scale if name == key else array for name, array in factors.items() if name != MAGNITUDE}


def _changed(layer: Params, scaled: Params) -> Array:
    """Return a weight with the product of its factors added, float32."""
    wide = layer["weight"].astype(jnp.float32)
    wide = wide * _to_rank(layer[SCALE], wide.ndim) if SCALE in layer else wide
    return wide + product(scaled)


def _norms(weight: Array) -> Array:
    return jnp.sqrt(jnp.square(weight).sum(tuple(range(weight.ndim - 1))))


def _gain(layer: Params, pair: Params, scaled: Params) -> Array:
    """Return what brings each output to its magnitude; its norm is a constant for gradients (section 4.3)."""
    return pair[MAGNITUDE] / jax.lax.stop_gradient(_norms(_changed(layer, scaled)))


def _check_factors(factors: Params, of: Mapping[str, Any]) -> None:
    """Refuse factors in a form other than that of ``new_factors``, or of components that are not in ``of``."""
    for component, layers in factors.items():
        if not isinstance(layers, Mapping) or not all(
            isinstance(pair, Mapping) and ({"down", "up"} <= pair.keys() or {"w1", "w2"} <= pair.keys())
            for pair in layers.values()
        ):
            raise InputError(
                "factors", f"has {component!r}: {shown(layers)}, which are no factors", cure="new_factors makes them"
            )
        if not isinstance(of.get(component), Mapping):
            raise InputError(
                "factors", f"are of {component!r}, and there is none", cure=nearest(component, list(of) or ["unet"])
            )


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
    rank: int | None = None,
    dtype: DType = "float32",
    metadata: Mapping[str, str],
) -> None:
    """Write a LoRA file for PyTorch diffusers and PEFT (``names`` "peft"), or for kohya's tools and A1111 ("kohya").

    The change of a weight is alpha / rank x up down, with ``rank`` by default that of the first layer. A layer of
    another rank has another alpha in the file, for the same alpha / rank. Only Stable Diffusion has names of kohya.
    """
    dtype = parse_dtype(dtype)
    if names not in FORMATS:
        raise InputError("names", "is not known", cure=nearest(names, FORMATS), value=names)
    _check_factors(factors, chosen)
    lokr = any("w1" in pair for of in factors.values() for pair in of.values())
    if lokr and names != "kohya":
        raise InputError("names", "has no LoKr", cure="give {names='kohya'}", value=names)
    if not any(factors.values()):
        raise InputError("factors", "holds none", cure="new_factors makes them", value={})
    if rank is None:
        rank = len(next(pair["up"] for of in factors.values() for pair in of.values()))
    scale = alpha / rank
    to_save: list[ArrayToSave] = []
    for component, of in factors.items():
        for name, pair in of.items():
            arrays = stored(chosen[component][name], pair)
            for key, array in _named(component, name, arrays, scale, names, len(factors)):
                array = array if key.endswith(".alpha") else narrowed(array, dtype)
                to_save.append(ArrayToSave(key, array.shape, array.dtype, partial(np.asarray, array)))
    text = {"format": "pt", "ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}", **metadata}
    if names == "peft":
        text["lora_adapter_metadata"] = json.dumps(_peft_settings(factors, chosen, rank, alpha), sort_keys=True)
    else:
        text["ss_network_module"] = "lycoris.kohya" if lokr else "networks.lora"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, to_save, text)


def stored(layer: Layer, pair: Mapping[str, Any]) -> dict[str, HostArray]:
    """Convert factors to the layout of files: (r, in, kh, kw) and (out, r, 1, 1), or (r, in) and (out, r).

    Magnitudes are (out, 1, 1, 1), or (out, 1).
    """
    if "w1" in pair:
        return _stored_lokr(layer, pair)
    down = np.asarray(pair["down"], np.float32)
    down = np.ascontiguousarray(down.transpose(3, 2, 0, 1) if down.ndim == 4 else down.T)
    ups = [
        pairs_together(up.T, param.pairs) if param.pairs else up.T
        for up, param in ((part["up"], param) for _, param, part in layer.split(pair))
    ]
    up = np.ascontiguousarray(ups[0] if layer.axis else np.concatenate(ups), np.float32)
    kernel = next(iter(layer.parts.values())).checkpoint_shapes[0][2:]
    ones = [1] * len(kernel)
    arrays = {"down": down.reshape(*down.shape[:2], *kernel), "up": up.reshape(*up.shape, *ones)}
    if MAGNITUDE in pair:
        (param,) = layer.parts.values()
        flat = np.asarray(pair[MAGNITUDE], np.float32)
        arrays[MAGNITUDE] = (pairs_together(flat, param.pairs) if param.pairs else flat).reshape(-1, 1, *ones)
    return arrays


def _stored_lokr(layer: Layer, pair: Mapping[str, Any]) -> dict[str, HostArray]:
    """Return LyCORIS's arrays: w1 (out, in); w2 (out, in, kh, kw), or w2_a (out, r) and w2_b (r, in kh kw)."""
    kernel = next(iter(layer.parts.values())).checkpoint_shapes[0][2:]
    arrays = {"lokr_w1": np.asarray(pair["w1"]).T}
    if "w2" in pair:
        w2 = np.moveaxis(np.asarray(pair["w2"]), (-1, -2), (0, 1))
        arrays["lokr_w2"] = w2.reshape(*w2.shape[:2], *kernel)
    else:
        down = np.moveaxis(np.asarray(pair["down"]), (-1, -2), (0, 1))
        arrays |= {"lokr_w2_a": np.asarray(pair["up"]).T, "lokr_w2_b": down.reshape(len(down), -1)}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def _named(
    component: str, name: str, pair: Mapping[str, HostArray], scale: float, names: str, components: int
) -> Iterator[tuple[str, HostArray]]:
    if names == "peft":
        yield f"{component}.{name}.lora_A.weight", pair["down"]
        yield f"{component}.{name}.lora_B.weight", pair["up"]
        if MAGNITUDE in pair:
            magnitude = pair[MAGNITUDE].swapaxes(0, 1)
            end = ".weight" if component.startswith(FIRST) else ""  # transformers drops those without it
            key = f"{component}.{name}.lora_magnitude_vector{end}"
            yield key, magnitude if magnitude.ndim == 4 else magnitude[0]
        return
    prefix = _KOHYA.get(component, f"lora_{component}_")
    module = ("lora_te_" if component == FIRST and components < 3 else prefix) + name.replace(".", "_")
    if "lokr_w1" in pair:
        for role, array in pair.items():
            yield f"{module}.{role}", array
        yield f"{module}.alpha", np.asarray(scale * len(pair.get("lokr_w2_b", "1")), np.float32)
        return
    yield f"{module}.lora_down.weight", pair["down"]
    yield f"{module}.lora_up.weight", pair["up"]
    yield f"{module}.alpha", np.asarray(scale * len(pair["down"]), np.float32)
    if MAGNITUDE in pair:
        yield f"{module}.dora_scale", pair[MAGNITUDE]


def _peft_settings(factors: Params, chosen: Targets, rank: int, alpha: float) -> dict[str, Any]:
    """Return the settings that PEFT needs to create the layers."""
    settings: dict[str, Any] = {}
    dora = any(MAGNITUDE in pair for of in factors.values() for pair in of.values())
    for component in factors:
        settings[f"{component}.r"], settings[f"{component}.lora_alpha"] = rank, alpha
        settings |= {f"{component}.use_dora": True} if dora else {}
        others = {name.removeprefix("text_model."): len(pair["up"]) for name, pair in factors[component].items()
                  if len(pair["up"]) != rank}  # fmt: skip
        if others:
            settings[f"{component}.rank_pattern"] = others
            settings[f"{component}.alpha_pattern"] = {name: alpha * r / rank for name, r in others.items()}
        # For text encoders only the last part of the name: versions of transformers differ in the rest.
        text = component.startswith(FIRST)
        names = {name.rpartition(".")[2] if text else name for name in chosen[component]}
        settings[f"{component}.target_modules"] = sorted(names)
    return settings
