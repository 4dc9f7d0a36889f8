"""The image that a call begins from and the mask of what to generate in it, checked and brought to size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from canvax.denoise import Known
from canvax.errors import InputError, check_number
from canvax.images.given import blurred, fingerprint, read_images, resized
from canvax.pipelines.options import Options
from canvax.types import HostArray

STRENGTH, STRENGTH_OF_MASKED = 0.8, 1.0
"""How much of the run is done if the call does not say: of a whole image, and of a masked one."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a call was given, an entry for each image or one for all.

    Attributes:
        images: RGB, of the size that is generated.
        masks: L, of the same size: white is generated, black stays; empty if all is generated.
        strength: 0..1, how much of the run is done.
        fingerprints: of the images and masks as they were given, for metadata.
        steps_run: how many of the steps asked for are run.
    """

    images: list[Image.Image]
    masks: list[Image.Image]
    strength: float
    fingerprints: dict[str, list[str]]
    steps_run: int = 0

    @property
    def from_noise(self) -> bool:
        """Whether the run begins from noise alone: a masked part that is generated in full owes the image nothing."""
        return bool(self.masks) and self.strength == 1

    def known(self, latents: HostArray, factor: int, options: Options) -> Known | None:
        """What is to stay, for latents [n, h, w, C] of the images."""
        if not self.masks:
            return None
        masks = np.stack([_shrunk(mask, factor, hard=options.mask_mode == "hard") for mask in self.masks])
        masks = np.broadcast_to(masks, (len(latents), *masks.shape[1:]))
        return Known(masks, latents, np.full(len(latents), options.mask_mode == "graded"))

    def behind_latents(self, factor: int) -> tuple[list[HostArray], HostArray]:
        """For an inpainting UNet: images without what is to be generated, and masks [n, h, w, 1], 1 where that is.

        Both as Stable Diffusion's inpainting models were trained: grey in the holes, and a mask of 0 and 1 of which
        every ``factor``-th pixel is taken.
        """
        holes = [np.asarray(mask, np.float32)[..., None] >= 127.5 for mask in self.masks or [_white(self.images[0])]]
        count = max(len(holes), len(self.images))
        images = [np.where(_at(holes, i), np.float32(0.5), as_floats(entry(self.images, i))) for i in range(count)]
        return images, np.stack([hole[::factor, ::factor] for hole in holes]).astype(np.float32)

    def pasted(self, pixels: HostArray, indices: list[int]) -> HostArray:
        """Generated pixels [n, H, W, 3] of some images of the call, with the given ones where they stay."""
        if not self.masks or not len(pixels):
            return pixels
        masks = np.stack([np.asarray(entry(self.masks, i), np.float32) / 255 for i in indices])[..., None]
        images = np.stack([as_floats(entry(self.images, i)) for i in indices])
        return (1 - masks) * images + masks * pixels


def check_given(
    image: Any, mask: Any, strength: Any, size: tuple[Any, Any], count: int, factor: int, options: Options
) -> tuple[Given | None, tuple[Any, Any]]:
    """The image of a call, and the size to generate: of what was not asked for, the image's own.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    if image is None:
        for name, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise InputError(f"{name} without an image: give image= as well")
        return None, size
    if options.denoising_start:
        raise InputError("image with denoising_start: strength says where an image begins; leave denoising_start out")
    images = read_images("image", image, count)
    masks = [] if mask is None else read_images("mask", mask, count, grey=True)
    for i in range(len(masks)):
        if masks[i].size != entry(images, i).size:
            raise InputError(
                f"mask is {_size(masks[i])} and the image {_size(entry(images, i))}; they must be of the same size"
            )
    height, width = size
    own = {one.size for one in images}
    if (height is None or width is None) and len(own) > 1:
        raise InputError(f"the images have {len(own)} sizes; give height and width, which they are resized to")
    height = _own_side("height", images[0].height, factor) if height is None else height
    width = _own_side("width", images[0].width, factor) if width is None else width
    if strength is None:
        strength = STRENGTH_OF_MASKED if masks else STRENGTH
    if not 0 < (strength := check_number("strength", strength, "; give one in 0..1")) <= 1:
        raise InputError(f"strength={strength:g} is not in 0..1, 0 left out; 0.8 changes much, 0.3 little")
    fingerprints = {"image": [fingerprint(one) for one in images], "mask": [fingerprint(one) for one in masks]}
    if not isinstance(height, int) or not isinstance(width, int):  # refused with the sizes of other calls
        return None, (height, width)
    images = [resized(one, height, width) for one in images]
    masks = [_edged(resized(one, height, width), options) for one in masks]
    fingerprints = {name: found for name, found in fingerprints.items() if found}
    return Given(images, masks, strength, fingerprints), (height, width)


def all_anew(height: int, width: int) -> Given:
    """What an inpainting model generates an image from that begins with nothing: grey, all of it masked."""
    return Given([Image.new("RGB", (width, height), (128, 128, 128))], [Image.new("L", (width, height), 255)], 1.0, {})


def _white(image: Image.Image) -> Image.Image:
    return Image.new("L", image.size, 255)


def _at(values: list[Any], index: int) -> Any:
    return values[index if len(values) > 1 else 0]


def as_floats(image: Image.Image) -> HostArray:
    """[H, W, 3] float32 in 0..1."""
    return np.asarray(image, np.float32) / np.float32(255)


def entry(values: list[Image.Image], index: int) -> Image.Image:
    """That of one image of the call."""
    return _at(values, index)


def _edged(mask: Image.Image, options: Options) -> Image.Image:
    if options.mask_mode == "hard":
        mask = mask.point([0] * 128 + [255] * 128)
    return blurred(mask, options.mask_blur)


def _shrunk(mask: Image.Image, factor: int, *, hard: bool) -> HostArray:
    """A mask at the size of the latents [h, w, 1] float32 in 0..1: the mean of its pixels, or the largest, rounded."""
    pixels = np.asarray(mask, np.float32) / 255
    tiles = pixels.reshape(mask.height // factor, factor, mask.width // factor, factor)
    small = (tiles.max(axis=(1, 3)) >= 0.5).astype(np.float32) if hard else tiles.mean(axis=(1, 3))
    return small[..., None]


def _own_side(name: str, side: int, factor: int) -> int:
    if side % factor:
        below = side // factor * factor
        raise InputError(
            f"the image has a {name} of {side} pixels, which is not a multiple of {factor}; give {name}="
            f"{below or factor} or {name}={below + factor}, which it is resized to"
        )
    return side


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height}"
