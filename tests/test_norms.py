"""Normalisations against their definitions in float64, in 16 bits too, of inputs of any scale and shift."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from canvax.kernels.target import compiling_for
from canvax.nn import group_norm, layer_norm
from tests.support.random_numbers import rng

SCALES = {"plain": (0.0, 1.0), "small": (0.0, 3e-3), "shifted": (4.0, 0.5), "beyond float16 when squared": (0.0, 400.0)}
"""Mean and deviation of the inputs."""

ROUNDING = {"float32": 2e-5, "bfloat16": 2**-8, "float16": 2**-11}
"""What the result may be off by, as a part of its largest value: in 16 bits its own rounding."""

_weight, _bias = np.random.default_rng(0).standard_normal((2, 24))
PARAMS = {"weight": 1 + 0.2 * _weight, "bias": 0.1 * _bias}


def inputs(scale: str, dtype: str, sides: tuple[int, int] = (6, 5)) -> Any:
    mean, deviation = SCALES[scale]
    return jnp.asarray(mean + deviation * rng.standard_normal((2, *sides, 24)), dtype)


def check(got: Any, want: np.ndarray, dtype: str) -> None:
    assert got.dtype == dtype
    assert np.abs(np.asarray(got, np.float64) - want).max() <= ROUNDING[dtype] * np.abs(want).max()


def normalised(x: np.ndarray, axes: tuple[int, ...], eps: float) -> np.ndarray:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_layer_norm(scale: str, dtype: str) -> None:
    x = inputs(scale, dtype)
    params = {name: jnp.asarray(value, dtype) for name, value in PARAMS.items()}
    weight, bias = (np.asarray(params[name], np.float64) for name in ("weight", "bias"))
    want = normalised(np.asarray(x, np.float64), (-1,), 1e-5) * weight + bias
    check(layer_norm(params, x), want, dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("platform", "sides"), [("cpu", (6, 5)), ("gpu", (48, 33))])  # there, sums in parts
def test_group_norm(scale: str, dtype: str, platform: str, sides: tuple[int, int]) -> None:
    x = inputs(scale, dtype, sides)
    params = {name: jnp.asarray(value, dtype) for name, value in PARAMS.items()}
    weight, bias = (np.asarray(params[name], np.float64) for name in ("weight", "bias"))
    groups = np.asarray(x, np.float64).reshape(2, *sides, 8, 3)
    want = normalised(groups, (1, 2, 4), 1e-6).reshape(x.shape) * weight + bias
    with compiling_for(platform):
        check(group_norm(params, x, groups=8, eps=1e-6), want, dtype)
