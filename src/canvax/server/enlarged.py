"""Images that are enlarged: their tiles are ordinary images of the batch, and are put together at the end."""

from __future__ import annotations

import threading
from dataclasses import replace

from canvax.families.base import Model
from canvax.noise import NoiseKind
from canvax.pipelines.request import Request
from canvax.pipelines.upscale import Tiles, tiles_shown, usual_strength
from canvax.server.images_in import MOST_PIXELS
from canvax.server.jobs import JobRequest, invalid
from canvax.types import HostArray

MOST_TILES = 256
"""Tiles of one image at most."""

_NOT_WITH = {
    "mask": "all of the image is gone over",
    "width": "the size is that of the image, so many times",
    "height": "the size is that of the image, so many times",
    "control": "it is of the whole image; send true, and each tile is its own",
    "image_prompt": "it is of the whole image, and each tile is a part",
}
_OPTIONS = ("outpaint", "padding_mask_crop", "variation_strength", "seed_size")


def cut(job_request: JobRequest, model: Model, seed: int, noise: NoiseKind) -> tuple[JobRequest, Tiles]:
    """Cut an image into tiles. Return the request for the first tile, and the tiles.

    Raises:
        Rejected: a field cannot be used.
    """
    if job_request.image is None or job_request.upscale is None:
        raise invalid("upscale", f"upscale={job_request.upscale} without an image: send image as well")
    for name, why in _NOT_WITH.items():
        if getattr(job_request, name) not in (None, True):
            raise invalid(name, f"{name} does not go with upscale: {why}; leave it out")
    if job_request.n != 1:
        raise invalid("n", f"n={job_request.n} does not go with upscale; send several jobs with other seeds")
    if unknown := [name for name in _OPTIONS if name in job_request.options]:
        raise invalid("options", f"options.{unknown[0]} does not go with upscale; leave it out")
    width, height = (round(side * job_request.upscale) for side in job_request.image.size)
    if width * height > MOST_PIXELS:
        size = f"{width} x {height} pixels, more than {MOST_PIXELS}"
        raise invalid("upscale", f"upscale={job_request.upscale:g} makes {size}; use less, or send a smaller image")
    scale, prompt = job_request.upscale, job_request.source_prompt
    tiles = Tiles(model, job_request.image, scale=scale, overlap=None, seed=seed, noise=noise, prompt=prompt)
    if len(tiles) > MOST_TILES:
        size = f"{len(tiles)} tiles, more than {MOST_TILES}"
        raise invalid("upscale", f"upscale={job_request.upscale:g} makes {size}; use less, or send a smaller image")
    strength = usual_strength(model, job_request.steps) if job_request.strength is None else job_request.strength
    control = job_request.control and tiles_shown(model, [tiles[0].image])
    return replace(job_request, image=tiles[0].image, strength=strength, control=control), tiles


def tile_request(request: Request, tiles: Tiles, index: int) -> Request:
    """Return the request of a tile, from the request of another tile."""
    assert request.init_images is not None
    tile = tiles[index]
    init = replace(request.init_images, images=[tile.image], whole=([tile.image], []))
    control = request.control
    if control is not None:
        shown = {name: [tuple(replace(hint, image=tile.image) for hint in images[0])]
                 for name, images in control.images.items()}  # fmt: skip
        control = replace(control, images=shown)
    return replace(request, init_images=init, control=control, latents=tile.noise[None])


class Enlarged:
    """Progress of the tiles of one image.

    Args:
        tiles: the tiles.
        previews: number of previews that the client asked for.
    """

    def __init__(self, tiles: Tiles, *, previews: int) -> None:
        self.tiles, self._previews = tiles, previews
        self._lock, self._added = threading.Lock(), 0

    def add(self, tile: int, pixels: HostArray) -> tuple[bool, int | None]:
        """Add a tile [H, W, C]. Return if it was the last, and the number of the preview that is due now, if any."""
        self.tiles.add(tile, pixels)
        with self._lock:
            before, self._added = self._added, self._added + 1
            due, had = (done * (self._previews + 1) // len(self.tiles) for done in (self._added, before))
            return self._added == len(self.tiles), due - 1 if had < due <= self._previews else None
