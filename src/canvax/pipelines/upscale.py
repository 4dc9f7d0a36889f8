"""An image made larger: enlarged, then gone over tile by tile at the size that the model was trained for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.errors import InputError, check_count, check_number
from canvax.families.base import Model
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.given import MOST_PIXELS, fingerprint, read_images
from canvax.images.masks import extended, resized
from canvax.noise import check_seed, initial_noise
from canvax.pipelines.options import Options
from canvax.pipelines.result import Result
from canvax.samplers.strength import check_strength
from canvax.types import HostArray

STRENGTH = 0.3
AT_ONCE = 4
"""Tiles of one call, unless told otherwise."""


def upscaled(
    pipe: Callable[..., Result],
    model: Model,
    image: Any,
    prompt: str,
    *,
    scale: float,
    strength: float,
    overlap: int | None,
    batch: int,
    seed: int | None,
    options: Options,
    **keywords: Any,
) -> Result:
    """See ``canvax.StableDiffusion.upscale``."""
    scale = check_number("scale", scale, "; 2 is usual")
    strength = check_strength(strength)
    factor, (tall, wide) = model.vae.factor, model.native_size
    if not 1 <= scale <= 16:
        raise InputError(f"scale={scale:g} is not in 1..16, how many times larger; 2 is usual")
    overlap = min(tall, wide) // 4 if overlap is None else check_count("overlap", overlap, min(tall, wide) // 2)
    check_count("batch", batch)
    if options.hires > 1 or options.outpaint or options.padding_mask_crop is not None:
        raise InputError("hires, outpaint and padding_mask_crop do not go with upscale; leave them out")
    (source,) = read_images("image", image, 1)
    width, height = (max(1, round(side * scale)) for side in source.size)
    if width * height > MOST_PIXELS:
        raise InputError(f"scale={scale:g} makes {width} x {height} pixels, more than {MOST_PIXELS}; use less")
    # A canvas of whole latents that holds a tile at least; what is added goes in the end.
    rows, columns = (max(math.ceil(side / factor) * factor, own) for side, own in ((height, tall), (width, wide)))
    large = extended(resized(source, height, width), (0, 0, columns - width, rows - height))
    places = [(y, x) for y in starts(rows, tall, overlap, factor) for x in starts(columns, wide, overlap, factor)]
    seed = check_seed(seed)
    shape = model.networks.latent_shape(1, rows, columns)[1:]
    (noise,) = initial_noise([seed], shape, options.noise)
    whole, total = np.zeros((rows, columns, 3), np.float32), np.zeros((rows, columns, 1), np.float32)
    results = []
    for begin in range(0, len(places), batch):
        some = places[begin : begin + batch]
        filled = [*some, *[some[-1]] * (min(batch, len(places)) - len(some))]
        # Neighbours have the same noise where they overlap, so that they agree there.
        parts = [noise[y // factor : (y + tall) // factor, x // factor : (x + wide) // factor] for y, x in filled]
        tiles = [large.crop((x, y, x + wide, y + tall)) for y, x in filled]
        result = pipe(
            [prompt] * len(filled), image=tiles, strength=strength, latents=np.stack(parts), seed=[seed] * len(filled),
            options=options, **keywords,
        )  # fmt: skip
        for (y, x), pixels in zip(some, result.pixels, strict=False):
            weight = fade(y, tall, rows, overlap)[:, None, None] * fade(x, wide, columns, overlap)[None, :, None]
            whole[y : y + tall, x : x + wide] += weight * pixels
            total[y : y + tall, x : x + wide] += weight
        results.append(result)
    pixels = np.ascontiguousarray((whole / total)[None, :height, :width])
    record = results[0].metadata[0] | {"height": height, "width": width, "noise": options.noise}
    record |= {"image_sha256": fingerprint(source), "upscale": {"scale": scale, "overlap": overlap}}
    timings = {name: sum(result.timings[name] for result in results) for name in results[0].timings}
    return replace(
        results[0],
        images=[GeneratedImage.of(one, record) for one in to_pil(pixels)],
        pixels=pixels,
        metadata=[record],
        timings=timings | {name: results[0].timings[name] for name in ("first_step", "step")},
        compilations=sum(result.compilations for result in results),
        indices=[0],
    )


def starts(length: int, tile: int, overlap: int, step: int) -> list[int]:
    """Where tiles begin that cover ``length`` and overlap by at least so much, each a multiple of ``step``."""
    count = max(1, math.ceil((length - overlap) / (tile - overlap)))
    last = length - tile
    return sorted({round(last * i / max(1, count - 1) / step) * step for i in range(count)} | {0, last})


def fade(start: int, tile: int, length: int, overlap: int) -> HostArray:
    """Weights of a tile along one axis [tile] float32: 1, falling to almost nothing over the overlap with others."""
    ramp = (np.arange(overlap, dtype=np.float32) + 0.5) / overlap
    weight = np.ones(tile, np.float32)
    if start > 0:
        weight[:overlap] = ramp
    if start + tile < length:
        weight[-overlap:] *= ramp[::-1]
    return weight
