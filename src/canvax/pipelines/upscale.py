"""Enlarge an image: resize it, then refine it tile by tile at the size that the model was trained for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from canvax.call import Enlarging
from canvax.errors import InputError, check_count
from canvax.families.base import Model
from canvax.images.convert import on_white, to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.inputs import MOST_PIXELS, fingerprint, read_images
from canvax.images.masks import as_floats, extended, resized
from canvax.images.metadata import prompt_in, prompt_of
from canvax.noise import NoiseKind, check_seed, initial_noise
from canvax.pipelines.options import Options
from canvax.pipelines.result import Result
from canvax.samplers.table import SamplerTable
from canvax.settings import check_setting
from canvax.types import HostArray

STRENGTH = 0.3
"""Default strength of enlarging, for models without a default."""


def usual_strength(model: Model, steps: int | None) -> float:
    """Return the strength of enlarging: at most that of a second pass, but at least one step."""
    one_step = (1 + 1e-9) / (steps or model.defaults.num_inference_steps)
    return min(1.0, max(one_step, min(STRENGTH, model.defaults.hires_strength)))


def upscaled(
    pipe: Callable[..., Result],
    model: Model,
    image: Any,
    prompt: str,
    *,
    how: Enlarging,
    seed: int | None,
    options: Options,
    **keywords: Any,
) -> Result:
    """See ``canvax.Pipeline.upscale``."""
    batch, control = how.batch, how.control
    check_for_upscale(options)
    if control and not model.networks.controls:
        raise InputError(
            "control", f"does not go with {model.name}, which has no ControlNet", cure="leave it out", value=True
        )
    (source,) = read_images("image", image, 1, alpha=True)
    if not isinstance(prompt, str):
        raise InputError("prompt", "is not text", cure="all tiles have one prompt", value=prompt)
    seed = check_seed(seed)
    shown = "" if prompt else _prompt_of(image)
    tiles = Tiles(model, source, scale=how.scale, overlap=how.overlap, seed=seed, noise=options.noise, prompt=shown)
    is_table = isinstance(keywords.get("sampler"), SamplerTable)  # it begins at its first row
    strength = (
        how.strength
        if how.strength is not None or is_table
        else usual_strength(model, keywords.get("num_inference_steps"))
    )
    results = []
    for begin in range(0, len(tiles), batch):
        some = list(range(begin, min(begin + batch, len(tiles))))
        filled = [tiles[i] for i in (*some, *[some[-1]] * (min(batch, len(tiles)) - len(some)))]
        images = [tile.image for tile in filled]
        shown = tiles_shown(model, images) if control else None
        result = pipe(
            [prompt] * len(filled), image=images, control=shown,
            latents=np.stack([tile.noise for tile in filled]), seed=[seed] * len(filled), options=options,
            strength=strength, **keywords,
        )  # fmt: skip
        for i, pixels in zip(some, result.pixels, strict=False):
            tiles.add(i, pixels)
        results.append(result)
    pixels, record = tiles.pixels()[None], tiles.recorded(results[0].metadata[0])
    if "nsfw" in record:
        record["nsfw"] = any(entry["nsfw"] for result in results for entry in result.metadata)
    timings = {name: sum(result.timings[name] for result in results) for name in results[0].timings}
    return replace(
        results[0],
        images=[GeneratedImage.of(image, record) for image in to_pil(pixels)],
        pixels=pixels,
        metadata=[record],
        timings=timings | {name: results[0].timings[name] for name in ("first_step", "step")},
        compilations=sum(result.compilations for result in results),
        indices=[0],
    )


def tiles_shown(model: Model, images: list[Image.Image]) -> Any:
    """Return tiles as the control images of every network."""
    nets = [net for _, net in model.networks.controls]
    shown = [[{"tile": image} for image in images] if net.slots else images for net in nets]
    return shown if len(shown) > 1 else shown[0]


def check_for_upscale(options: Options) -> None:
    """Refuse options that have no meaning for tiles.

    Raises:
        InputError: one is set.
    """
    names = ("hires", "outpaint", "padding_mask_crop", "denoising_start", "denoising_end")
    for name in sorted(options.changed_names().intersection(names)):
        raise InputError(name, "is not for tiles", cure="leave it out")


class Tile(NamedTuple):
    """A tile of an image.

    Attributes:
        row: row of its first pixel.
        column: column of its first pixel.
        image: the enlarged image there.
        noise: initial noise of its run, float32 [h, w, C].
    """

    row: int
    column: int
    image: Image.Image
    noise: HostArray


def check_scale(scale: Any, source: Image.Image) -> tuple[int, int]:
    """Return width and height of an enlarged image.

    Raises:
        InputError: ``scale`` is not in 1..16, or makes the image too large.
    """
    scale = check_setting(Enlarging, "scale", scale)
    width, height = (max(1, round(side * scale)) for side in source.size)
    if width * height > MOST_PIXELS:
        raise InputError(
            "scale", f"makes {width} x {height} pixels, more than {MOST_PIXELS}", cure="use less", value=scale
        )
    return width, height


def _prompt_of(image: Any) -> str:
    """Return the prompt in the metadata of an image file or image."""
    if isinstance(image, str | Path):
        with open(image, "rb") as file:
            return prompt_in(file)
    return prompt_of(getattr(image, "metadata", {}))


class Tiles:
    """An image, ``scale`` times as large, in tiles of the size that the model was trained for.

    Args:
        model: the model, which decides the size of a tile and of its noise.
        source: the image, RGB.
        scale: factor of width and height, 1..16.
        overlap: the fewest pixels that neighbours share; None for three eighths of a tile.
        seed: seed of the noise.
        noise: kind of the noise.
        prompt: prompt of the image, which metadata record if the tiles have none.

    Attributes:
        width: width of the whole, in pixels.
        height: height of the whole, in pixels.
        places: row and column at which each tile begins.
        large: the enlarged image.

    Raises:
        InputError: an argument cannot be used.
    """

    def __init__(
        self,
        model: Model,
        source: Image.Image,
        *,
        scale: Any,
        overlap: Any,
        seed: int,
        noise: NoiseKind,
        prompt: str = "",
    ) -> None:
        self.width, self.height = check_scale(scale, source)
        tall, wide = self._size = model.native_size
        overlap = min(tall, wide) * 3 // 8 if overlap is None else check_count("overlap", overlap, min(tall, wide) // 2)
        self._overlap, self._factor = overlap, model.vae.factor
        # A canvas of whole latents that holds at least one tile; the padding is cut off at the end.
        sides = ((self.height, tall), (self.width, wide))
        self._sides = rows, columns = [max(math.ceil(side / self._factor) * self._factor, tile) for side, tile in sides]
        down, across = (starts(side, tile, overlap, self._factor) for side, tile in ((rows, tall), (columns, wide)))
        self.places = [(row, column) for row in down for column in across]
        mode = model.networks.image_mode
        source = (on_white(source) if mode == "RGB" else source).convert(mode)
        large = resized(source, self.height, self.width)
        self.large = extended(large, (0, 0, columns - self.width, rows - self.height))
        (self._noise,) = initial_noise([seed], model.networks.latent_shape(1, rows, columns)[1:], noise)
        settings = {"scale": scale, "overlap": overlap} | ({"prompt": prompt} if prompt else {})
        self._record = {"noise": noise, "image_sha256": fingerprint(on_white(source)), "upscale": settings}
        self._lock = threading.Lock()
        self._sum: HostArray | None = None
        self._weight: HostArray | None = None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Tile:
        """Return a tile. Neighbours have the same noise where they overlap, so that they agree there."""
        (row, column), (tall, wide), factor = self.places[index], self._size, self._factor
        noise = self._noise[row // factor : (row + tall) // factor, column // factor : (column + wide) // factor]
        return Tile(row, column, self.large.crop((column, row, column + wide, row + tall)), noise)

    def add(self, index: int, pixels: HostArray) -> None:
        """Put in the pixels of a refined tile, float32 [tall, wide, C]; any thread may do this."""
        (row, column), (tall, wide), (rows, columns) = self.places[index], self._size, self._sides
        down, across = fade(row, tall, rows, self._overlap), fade(column, wide, columns, self._overlap)
        weight = down[:, None, None] * across[None, :, None]
        where = np.s_[row : row + tall, column : column + wide]
        with self._lock:
            if self._sum is None or self._weight is None:
                self._sum, self._weight = (
                    np.zeros((rows, columns, pixels.shape[-1]), np.float32),
                    np.zeros((rows, columns, 1), np.float32),
                )
            self._sum[where] += weight * pixels
            self._weight[where] += weight

    def pixels(self) -> HostArray:
        """Return the whole [height, width, C] float32, with the enlarged image where a tile is missing."""
        with self._lock:
            if self._sum is None or self._weight is None:
                whole = as_floats(self.large)
            elif self._weight.all():
                whole = self._sum / self._weight
            else:
                there = self._weight > 0
                whole = np.where(there, self._sum / np.where(there, self._weight, 1), as_floats(self.large))
        return np.ascontiguousarray(whole[: self.height, : self.width])

    def recorded(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata of the whole from that of a tile."""
        shared = {
            name: value for name, value in metadata.items() if name != "control_sha256"
        }  # which is that of a tile
        return shared | {"height": self.height, "width": self.width} | self._record


def starts(length: int, tile: int, overlap: int, step: int) -> list[int]:
    """Return the beginnings of tiles that cover ``length`` and overlap by at least so much, multiples of ``step``."""
    count = max(1, math.ceil((length - overlap) / (tile - overlap)))
    last = length - tile
    return sorted({round(last * i / max(1, count - 1) / step) * step for i in range(count)} | {0, last})


def fade(start: int, tile: int, length: int, overlap: int) -> HostArray:
    """Return the weights of a tile along one axis [tile] float32: 1, falling to almost 0 over the overlap.

    A model draws the borders of a tile as those of an image, such as white margins, and its decoder pads them with
    zeros. So the outermost pixels must weigh almost nothing: the weights fall as a squared sine.
    """
    ramp = np.sin(np.pi / 2 * (np.arange(overlap, dtype=np.float32) + 0.5) / overlap) ** 2
    weight = np.ones(tile, np.float32)
    if start > 0:
        weight[:overlap] = ramp
    if start + tile < length:
        weight[-overlap:] *= ramp[::-1]
    return weight
