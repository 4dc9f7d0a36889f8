"""An image that no batch has had yet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from canvax.denoise import InFlight
from canvax.engine.batch import ParkedImage, Prompts, Run
from canvax.engine.segments import guided_rows
from canvax.samplers.table import SLOTS, SamplerTable
from canvax.types import HostArray


def parked(
    latents: HostArray,
    prompts: Prompts,
    key: HostArray,
    table: SamplerTable,
    row: int = 0,
    columns: Mapping[str, HostArray] | None = None,
) -> ParkedImage:
    """An image from its noise [h, w, C], or for a ``row`` after the first from x before that row.

    ``prompts`` are [1, ...] each; the prompt alone stands for an image without guidance, whose table has scale 1.
    """
    state = np.zeros((1, SLOTS, *latents.shape), np.float32)
    state[0, 0] = latents * np.float32(table.init_scale) if row == 0 else latents
    run = Run(table, guided_rows(table, guided=len(prompts) > 1), row, columns=columns or {})
    return ParkedImage(InFlight(state, prompts, np.asarray(key)[None]), run)
