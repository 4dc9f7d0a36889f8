"""An image made larger: enlarged, then gone over tile by tile at the size that the model was trained for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from canvax.errors import InputError, check_count, check_flag
from canvax.families.base import Model
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.given import read_images
from canvax.models.controlnet_union import UnionNet
from canvax.noise import check_seed
from canvax.pipelines.options import Options
from canvax.pipelines.result import Result
from canvax.pipelines.tiles import Tiles

AT_ONCE = 4
"""Tiles of one call, unless told otherwise."""


def upscaled(
    pipe: Callable[..., Result],
    model: Model,
    image: Any,
    prompt: str,
    *,
    scale: float,
    overlap: int | None,
    batch: int,
    seed: int | None,
    options: Options,
    control: bool,
    **keywords: Any,
) -> Result:
    """See ``canvax.StableDiffusion.upscale``."""
    check_count("batch", batch)
    check_for_upscale(options)
    check_flag("control", control)
    if control and not model.networks.controls:
        raise InputError("control", True, f"does not go with {model.name}, which has no ControlNet", "leave it out")
    (source,) = read_images("image", image, 1)
    if not isinstance(prompt, str):
        raise InputError("prompt", prompt, "is not text", "all tiles have one prompt")
    seed = check_seed(seed)
    tiles = Tiles(model, source, scale=scale, overlap=overlap, seed=seed, noise=options.noise)
    results = []
    for begin in range(0, len(tiles), batch):
        some = list(range(begin, min(begin + batch, len(tiles))))
        filled = [tiles[i] for i in (*some, *[some[-1]] * (min(batch, len(tiles)) - len(some)))]
        images = [tile.image for tile in filled]
        shown = tiles_shown(model, images) if control else None
        result = pipe(
            [prompt] * len(filled), image=images, control=shown,
            latents=np.stack([tile.noise for tile in filled]), seed=[seed] * len(filled), options=options, **keywords,
        )  # fmt: skip
        for i, pixels in zip(some, result.pixels, strict=False):
            tiles.add(i, pixels)
        results.append(result)
    pixels, record = tiles.pixels()[None], tiles.recorded(results[0].metadata[0])
    if "nsfw" in record:
        record["nsfw"] = any(told["nsfw"] for result in results for told in result.metadata)
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


def tiles_shown(model: Model, images: list[Image.Image]) -> Any:
    """Tiles as the control images of every network."""
    nets = [net for _, net in model.networks.controls]
    shown = [[{"tile": one} for one in images] if isinstance(net, UnionNet) else images for net in nets]
    return shown if len(shown) > 1 else shown[0]


def check_for_upscale(options: Options) -> None:
    """Refuse options that have no meaning for tiles.

    Raises:
        InputError: naming them.
    """
    if options.hires > 1 or options.outpaint or options.padding_mask_crop is not None:
        raise InputError("hires, outpaint and padding_mask_crop do not go with upscale; leave them out")
    if options.denoising_start or options.denoising_end < 1:
        raise InputError("denoising_start and denoising_end do not go with upscale, whose strength says what is run")
