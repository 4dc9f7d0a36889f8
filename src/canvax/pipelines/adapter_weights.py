"""Weights of adapters: of all layers, of networks, and of blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from canvax.errors import HintWarning, InputError, check_number, nearest, warn
from canvax.weights.lora import Adapter

Weights = dict[str, float]
"""Weights by the beginnings of dotted names, "" for all."""

MOST = 1000.0
ODD = 10.0
"""A larger weight is probably meant in percent."""

_NETWORKS = ("text_encoder", "text_encoder_2", "unet", "transformer")
_LONG = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}
"""Names of a UNet's parts by those in diffusers' tables of weights."""


def parse_weight(weight: Any, adapter: Adapter | None, components: Collection[str] = ()) -> Weights:
    """Return the weight of a caller by the beginnings of the names of its layers.

    If ``adapter`` is None, the layers are not checked. ``components`` are those of the model that adapters can change.

    Raises:
        InputError: the weight is not a number, or is for layers that the adapter does not have.
    """
    if not isinstance(weight, Mapping):
        return {"": _number("weight", weight)}
    weights = dict(_flattened("", weight))
    if adapter is not None:
        paths = [".".join(key) for key in adapter.parts]
        parts = {key[0] for key in adapter.parts}
        for name in [name for name in weights if name in (*_NETWORKS, *components) and name not in parts]:
            if len(weights) > 1:  # many adapters change the UNet alone
                warn(f"weight of {name!r}: the adapter changes nothing there", HintWarning)
                del weights[name]
        for name in weights:
            if not any(path == name or path.startswith(f"{name}.") for path in paths):
                blocks = {".".join(path.split(".")[:end]) for path in paths for end in (1, 2, 3)}
                raise InputError(
                    "weight", f"has {name!r}, where the adapter changes nothing", cure=nearest(name, sorted(blocks))
                )
    return weights


def tell_of_odd(name: str, weights: Weights) -> None:
    """Warn if the weight of the adapter ``name`` is so large that images fall apart."""
    if weights and abs(worst := max(weights.values(), key=abs)) > ODD:
        warn(f"the weight of {name!r}, {worst:g}, is far beyond 1, as it was trained; 80 % is 0.8", HintWarning)


def _flattened(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if not isinstance(name, str) or not name:
            raise InputError("weight", f"has {name!r:.80} where the name of a part belongs, such as 'unet'")
        step = _LONG.get(name, name) if prefix == "unet" else name.removeprefix("block_")
        path = f"{prefix}.{step}" if prefix else step
        if isinstance(value, Mapping):
            yield from _flattened(path, value)
        elif isinstance(value, list | tuple):
            for i, weight in enumerate(value):
                yield f"{path}.attentions.{i}", _number(f"weight of {path}", weight)
        else:
            yield path, _number(f"weight of {path}", value)


def _number(name: str, value: Any) -> float:
    number = check_number(name, value, "0.5 to 1 is usual")
    if abs(number) > MOST:
        raise InputError(name, f"is beyond {MOST:g}", cure="0.5 to 1 is usual", value=number)
    return number


def parted(weights: Weights, components: Sequence[str]) -> tuple[Weights | None, Weights]:
    """Split weights into those written into a place (None for 1) and those that are inputs of each image."""
    by_block = bool(weights.keys() - {"", *components})
    return (weights, {"": 1.0}) if by_block else (None, weights)


def plain_weight(weights: Weights) -> float | dict[str, float]:
    """Return weights in the form that callers write."""
    return weights[""] if set(weights) == {""} else dict(weights)


def per_image(name: str, weight: Any, components: Sequence[str]) -> Weights:
    """Return the weight of an adapter in one image by network, "" for all.

    Raises:
        InputError: it is neither a number nor a table of numbers by network.
    """
    weights = parse_weight(weight, None)
    if deeper := weights.keys() - {"", *components}:
        problem = f"has a weight of {name!r:.80} for {min(deeper)!r:.80}"
        cure = f"an image's weight is a number or a table by network ({', '.join(components)})"
        raise InputError("adapters", problem, cure=f"{cure}; blocks have weights with pipe.adapters.set")
    return weights
