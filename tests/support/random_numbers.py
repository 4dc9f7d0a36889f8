"""Random numbers of tests. Each test begins with the same ones, in any order and alone (``conftest.py``)."""

from __future__ import annotations

import numpy as np

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    """Normal numbers in float32."""
    return rng.standard_normal(shape, np.float32)


def begin_anew() -> None:
    """The numbers of a new test."""
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state
