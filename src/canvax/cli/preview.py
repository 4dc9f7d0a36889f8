"""``--preview``: an image file that shows what is being generated, as it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from canvax.errors import CanvaxError
from canvax.files import temporary_name
from canvax.images.convert import to_pil
from canvax.images.formats import format_of, storable
from canvax.images.grid import make_grid
from canvax.pipelines.checks import is_tiled
from canvax.pipelines.options import Callback, Step
from canvax.types import HostArray

if TYPE_CHECKING:
    from canvax.pipelines.pipeline import Pipeline

SHARE = 0.2
"""Largest share of the time that is spent on previews."""


def _decoded(pipe: Pipeline, latents: HostArray) -> HostArray:
    """Decode latents [n, h, w, C] with the program that decodes finished images."""
    from canvax.compile.kinds import Kinds
    from canvax.engine.batch import filled
    from canvax.parallel.mesh import over_batch, padded_batch
    from canvax.parallel.place import put

    mesh, factor = pipe.programs.mesh, pipe.model.vae.factor
    whole = filled(latents, padded_batch(len(latents), mesh))
    way = "tiled" if is_tiled(latents.shape[1] * factor, latents.shape[2] * factor) else "whole"
    decode = pipe.programs.program("decoder", pipe.params, whole.shape, Kinds(guided=(), decoder=way))  # pyright: ignore[reportArgumentType]
    packed = pipe.model.networks.packing.pack(whole)
    return np.asarray(decode(pipe.params, put(packed, over_batch(mesh))))[: len(latents)]


@contextmanager
def previews(pipe: Pipeline, path: Path | None) -> Iterator[Callback | None]:
    """Yield a callback that writes the images as the network sees them, now and then; remove the file at the end."""
    if path is None:
        yield None
        return
    rests = 0.0

    def write(step: Step) -> None:
        nonlocal rests
        began = time.perf_counter()
        if began < rests and step.index + 1 < step.total:
            return
        draft = temporary_name(path.parent).with_suffix(path.suffix)
        try:
            storable(make_grid(to_pil(_decoded(pipe, step.denoised))), format_of(path)).save(draft)
            os.replace(draft, path)
        except OSError as error:
            raise CanvaxError(f"--preview {path}: cannot be written ({error.strerror or error})") from error
        finally:
            draft.unlink(missing_ok=True)
        took = time.perf_counter() - began
        rests = began + took / SHARE

    try:
        yield write
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
