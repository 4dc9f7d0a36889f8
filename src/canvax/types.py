"""The axis legend and the type aliases that all modules use.

Axis legend (each letter has the same meaning everywhere in canvax):

    B  images of a batch          H W  image height, width (pixels)
    T  text tokens (77)           h w  latent height, width (H/8, W/8 for Stable Diffusion)
    D  width of a token           C    channels
    N  attention heads            K    slots of sampler state (6)
    R  rows of a sampler table: each row is an evaluation of the network
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Array = jax.Array
"""A device array."""

HostArray = np.ndarray
"""An array in host memory."""

Params = dict[str, Any]
"""Nested dict of arrays; the keys along a path form the tensor's dotted name in the checkpoint."""

DType = Any
"""Anything that ``numpy.dtype`` accepts, including ``jax.numpy.bfloat16``."""
