"""Weights of the reference's transformers as canvax reads them, and what their tests share."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from diffusers.models.transformers import transformer_cosmos

from canvax.families.flux2 import NAMES
from canvax.params import Param, Params, Spec, flatten, unflatten
from canvax.weights.rules import Names, Rule, _longest

TOLERANCE = 1e-4
"""Largest difference over the largest value of the reference."""

State = dict[str, np.ndarray]


def to_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def stored(module: torch.nn.Module) -> State:
    """A checkpoint of the module; of one on the meta device arrays that take no memory."""

    def array(tensor: torch.Tensor) -> np.ndarray:
        return np.broadcast_to(np.float32(0), tensor.shape) if tensor.is_meta else tensor.numpy()

    return {name: array(tensor) for name, tensor in module.state_dict().items()}


def params_of(state: State, spec: Spec) -> Params:
    """Arrays in canvax's layout; fails unless names and shapes match the spec exactly."""
    declared = same_names_and_shapes(state, spec)
    return unflatten(
        (name, np.ascontiguousarray(param.from_checkpoint(state[name]))) for name, param in declared.items()
    )


def same_names_and_shapes(state: State, spec: Spec) -> dict[str, Param]:
    declared: dict[str, Param] = dict(flatten(spec))
    assert set(state) == set(declared), set(state) ^ set(declared)
    wrong = {name: state[name].shape for name, p in declared.items() if state[name].shape not in p.checkpoint_shapes}
    assert not wrong, wrong
    return declared


def unfused(state: State, spec: Spec, rules: Sequence[Rule] | None = None) -> State:
    """A checkpoint of FLUX.2, or with these rules, with each layer in an array of its own."""
    declared: dict[str, Param] = dict(flatten(spec))
    names, result = Names(NAMES if rules is None else rules), State()
    for name, array in state.items():
        match = _longest(names._external, name.split("."))
        if match is None:
            result[name] = array
            continue
        rule, _ = match.rules[0]
        keys = list(map(match.named, rule.parts))
        if array.ndim <= rule.axis:  # one bias of a sum
            result[keys[0]] = array
            continue
        ends = np.cumsum([declared[key].checkpoint_shapes[0][rule.axis] for key in keys])
        assert ends[-1] == array.shape[rule.axis], name
        result |= zip(keys, np.split(array, ends[:-1], rule.axis), strict=True)
    return result


def without_torchvision() -> None:
    """Give Anima's transformer what it asks of torchvision: the mask of padding, in the size of the latents."""
    resize = lambda mask, size, interpolation: torch.nn.functional.interpolate(mask, size=size)  # noqa: E731
    kinds = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST=0))
    transformer_cosmos.transforms = kinds  # type: ignore[attr-defined]
