"""Vocabulary shared by every module: the axis legend and the type aliases.

Axis legend (a letter means the same thing everywhere in canvax):

    B  images of a batch          H W  image height, width (pixels)
    T  text tokens (77)           h w  latent height, width (H/8, W/8 for Stable Diffusion)
    D  width of a token           C    channels
    N  attention heads            K    slots of sampler state (6)
    R  rows of a sampler table: one row is one evaluation of the network
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
"""Nested dict of arrays; the keys along a path are the checkpoint's own dotted name."""

DType = Any
"""Whatever ``numpy.dtype`` accepts, ``jax.numpy.bfloat16`` included."""
