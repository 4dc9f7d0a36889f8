"""Short runs of small models, and how far two are apart."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import canvax
from canvax.parallel.mesh import make_mesh


def one_device() -> Mesh:
    return make_mesh(jax.devices()[:1])


@cache
def small_emoji() -> canvax.Pipeline:
    """The bundled model on one device, for all modules of servers: it is read once, and its programs are shared."""
    return canvax.load("emoji", progress=False, mesh=one_device())


def draw(pipe: canvax.Pipeline, prompt: Any = "a cat", **changes: Any) -> canvax.Result:
    return pipe(prompt, **{"num_inference_steps": 4, "seed": 1, "progress": False} | changes)


def far(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def psnr(got: Any, want: Any, peak: float = 1.0) -> float:
    """Return the peak signal-to-noise ratio in dB."""
    error = np.mean((np.asarray(got, np.float64) - np.asarray(want, np.float64)) ** 2)
    return float(10 * np.log10(peak**2 / max(error, 1e-30)))
