"""The loss on held-out images, which shows when a training begins to learn its images by heart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.kernels.target import compiling_on
from canvax.parallel.mesh import padded_batch, replicated
from canvax.params import Params
from canvax.train.diffusion import VALIDATION_TIMES
from canvax.train.session import send
from canvax.types import Array


@dataclass(frozen=True, eq=False)
class Validation:
    """The mean error of held-out images, the same for the same parameters: noise and times are fixed.

    Attributes:
        errors: see ``canvax.train.diffusion.validation_errors``.
        parts: samples of ``denoising_data``, one set for each size of images.
        shared: the data that all samples share.
        mesh: the devices; a batch is split over ``data``.
        batch: images evaluated at once.
    """

    errors: Callable[[Params, Any, Any, Array, Array], Array]
    parts: Sequence[Any]
    shared: Any
    mesh: Mesh
    batch: int
    _program: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_program", jax.jit(self.errors, out_shardings=replicated(self.mesh)))

    def __call__(self, trained: Params) -> float:
        """Return the mean over images and times."""
        batch, total, first = padded_batch(self.batch, self.mesh), 0.0, 0
        for part in self.parts:
            count = len(jax.tree.leaves(part)[0])
            for start in range(0, count, batch):
                rows = np.minimum(np.arange(start, start + batch), count - 1)
                samples = send(part, rows, self.mesh)
                numbers = (first + rows).astype(np.int32)
                for time in range(VALIDATION_TIMES):
                    with compiling_on(self.mesh):
                        errors = self._program(trained, samples, self.shared, numbers, np.int32(time))
                    total += float(np.asarray(errors)[: count - start].sum(dtype=np.float64))
            first += count
        return total / (first * VALIDATION_TIMES)
