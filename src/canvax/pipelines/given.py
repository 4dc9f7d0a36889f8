"""The image that a call begins from and the mask of what to generate in it, checked and brought to size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from PIL import Image

from canvax.denoise import Known
from canvax.errors import NO_VALUE, InputError
from canvax.images.given import MOST_PIXELS, fingerprint, read_images
from canvax.images.masks import (
    Box,
    around,
    as_floats,
    blurred,
    box_of,
    extended,
    painted_over,
    pixels_resized,
    resized,
    rounded,
)
from canvax.pipelines.checks import check_size
from canvax.pipelines.options import Options
from canvax.samplers.strength import check_strength
from canvax.types import HostArray

STRENGTH, STRENGTH_OF_MASKED = 0.8, 1.0
"""How much of the run is done if the call does not say: of a whole image, and of a masked one."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Given:
    """What a call was given, an entry for each image or one for all.

    Attributes:
        images: RGB, of the size that is generated.
        masks: L, of the same size: white is generated, black stays; empty if all is generated.
        strength: 0..1, how much of the run is done.
        fingerprints: of the images and masks as they were given, for metadata.
        whole: images and masks as they are in the end, where what is generated is a part of them; else the same.
        boxes: which part that is; empty where it is all.
        steps: of the whole run.
        skipped: how many of them are left out at its beginning.
        latents: of the images [n, h, w, C], where they are known already.
    """

    images: list[Image.Image]
    masks: list[Image.Image]
    strength: float
    fingerprints: dict[str, list[str]]
    whole: tuple[list[Image.Image], list[Image.Image]]
    boxes: list[Box]
    steps: int = 0
    skipped: int = 0
    latents: HostArray | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of what is generated."""
        return self.images[0].height, self.images[0].width

    @property
    def from_noise(self) -> bool:
        """Whether the run begins from noise alone: a masked part that is generated in full owes the image nothing."""
        return bool(self.masks) and self.strength == 1

    def known(self, latents: HostArray, factor: int, options: Options) -> Known | None:
        """What is to stay, for latents [n, h, w, C] of the images."""
        if not self.masks:
            return None
        masks = self.latent_masks(len(latents), factor, hard=options.mask_mode == "hard")
        return Known(masks, latents, np.full(len(latents), options.mask_mode == "graded"))

    def latent_masks(self, count: int, factor: int, *, hard: bool) -> HostArray:
        """Masks at the size of the latents [count, h, w, 1] float32 in 0..1: the mean of the pixels, or the largest."""
        masks = np.stack([_shrunk(mask, factor, hard=hard) for mask in self.masks])
        return np.broadcast_to(masks, (count, *masks.shape[1:]))

    def behind_latents(self, factor: int) -> tuple[list[HostArray], HostArray]:
        """For an inpainting network: images without what is to be generated, and masks [n, h, w, 1], 1 where that is.

        Both as Stable Diffusion's inpainting models were trained: grey in the holes, and a mask of 0 and 1 of which
        every ``factor``-th pixel is taken.
        """
        white = [Image.new("L", self.images[0].size, 255)]
        holes = [np.asarray(mask, np.float32)[..., None] >= 127.5 for mask in self.masks or white]
        count = max(len(holes), len(self.images))
        images = [np.where(entry(holes, i), np.float32(0.5), as_floats(entry(self.images, i))) for i in range(count)]
        return images, np.stack([hole[::factor, ::factor] for hole in holes]).astype(np.float32)

    def pasted(self, pixels: HostArray, indices: list[int]) -> HostArray:
        """Generated pixels [n, H, W, 3] of some images of the call, with the given ones where they stay."""
        if not self.masks or not len(pixels):
            return pixels
        return np.stack([self._pasted(one, i) for one, i in zip(pixels, indices, strict=True)])

    def _pasted(self, pixels: HostArray, index: int) -> HostArray:
        image, mask = as_floats(entry(self.whole[0], index)), as_floats(entry(self.whole[1], index))[..., None]
        if self.boxes:
            left, top, right, bottom = entry(self.boxes, index)
            part = pixels_resized(pixels, bottom - top, right - left)
            pixels = image.copy()
            pixels[top:bottom, left:right] = part
        return (1 - mask) * image + mask * pixels


def check_given(
    image: Any, mask: Any, strength: Any, size: tuple[Any, Any], count: int, factor: int, options: Options
) -> Given | None:
    """The image of a call at the size to generate, which is the image's own unless ``size`` says otherwise.

    Args:
        image: as in a call; None for none.
        mask: likewise.
        strength: likewise.
        size: height and width that were asked for, each or None.
        count: images of the call.
        factor: pixels per latent.
        options: of the call.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    if image is None:
        for name, value in (("mask", mask), ("strength", strength), *_given_options(options)):
            if value is not None:
                raise InputError(name, NO_VALUE, "needs an image", "give {image} as well")
        return None
    if options.denoising_start:
        raise InputError(
            "image",
            NO_VALUE,
            "cannot be combined with denoising_start: strength says where an image begins",
            "leave denoising_start out",
        )
    images = read_images("image", image, count)
    masks = [] if mask is None else read_images("mask", mask, count, grey=True)
    for i in range(len(masks)):
        if masks[i].size != entry(images, i).size:
            raise InputError(
                "mask",
                NO_VALUE,
                f"is {_size(masks[i])} and the image {_size(entry(images, i))}",
                "they must be of the same size",
            )
    fingerprints = {"image": [fingerprint(one) for one in images], "mask": [fingerprint(one) for one in masks]}
    fingerprints = {name: found for name, found in fingerprints.items() if found}
    if options.outpaint:
        sides = cast(Box, options.outpaint)  # as canvax.Options keeps it
        images, masks = _outpainted(images, masks, sides, 1 if any(size) else factor)
    if strength is None:
        strength = STRENGTH_OF_MASKED if masks else STRENGTH
    strength = check_strength(strength)
    height, width = _sides(images, size, factor)
    if options.padding_mask_crop is not None:
        return _cut_out(images, masks, strength, fingerprints, (height, width), options)
    images = [resized(one, height, width) for one in images]
    masks = [_edged(resized(one, height, width), options) for one in masks]
    return Given(_filled(images, masks, options), masks, strength, fingerprints, (images, masks), [])


def all_anew(height: int, width: int) -> Given:
    """What an inpainting model generates an image from that begins with nothing: grey, all of it masked."""
    grey, white = [Image.new("RGB", (width, height), (128, 128, 128))], [Image.new("L", (width, height), 255)]
    return Given(grey, white, 1.0, {}, (grey, white), [])


def entry(values: Sequence[T], index: int) -> T:
    """That of one image of the call, of one for all or one for each."""
    return values[index if len(values) > 1 else 0]


def _given_options(options: Options) -> list[tuple[str, Any]]:
    return [("outpaint", options.outpaint), ("padding_mask_crop", options.padding_mask_crop)]


def _sides(images: list[Image.Image], size: tuple[Any, Any], factor: int) -> tuple[int, int]:
    if None in size and len({one.size for one in images}) > 1:
        raise InputError(
            "image", NO_VALUE, "has images of several sizes", "give {height} and {width}, which they are resized to"
        )
    own = images[0].height, images[0].width
    for name, asked, side in zip(("height", "width"), size, own, strict=True):
        if asked is None and side % factor:
            below = side // factor * factor
            raise InputError(
                "image",
                NO_VALUE,
                f"has a {name} of {side} pixels, which is not a multiple of {factor}",
                f"give {f'{{{name}={below}}} or ' if below else ''}{{{name}={below + factor}}}, which it is resized to",
            )
    height, width = (check_size(*side, factor) for side in zip(("height", "width"), size, own, strict=True))
    return height, width


def _outpainted(
    images: list[Image.Image], masks: list[Image.Image], sides: Box, factor: int
) -> tuple[list[Any], list[Any]]:
    """Images with more on each side, and masks by which that is generated."""
    for image in images:
        if (image.width + sides[0] + sides[2]) * (image.height + sides[1] + sides[3]) > MOST_PIXELS:
            raise InputError("outpaint", sides, f"makes more than {MOST_PIXELS} pixels", "add fewer")
        added = sides[0] + sides[2], sides[1] + sides[3]
        for side, length, more in zip(("width", "height"), image.size, added, strict=True):
            if length % factor == 0 and more % factor:
                raise InputError(
                    "outpaint",
                    sides,
                    f"makes a {side} of {length + more} pixels",
                    f"add a multiple of {factor} to {length}",
                )
    given: Sequence[Any] = masks or [None]
    count = max(len(images), len(given))
    whole = [around(entry(given, i), entry(images, i).size, sides) for i in range(count)]
    return [extended(image, sides) for image in images], whole


def _cut_out(
    images: list[Image.Image], masks: list[Image.Image], strength: float, fingerprints: dict[str, list[str]],
    size: tuple[int, int], options: Options,
) -> Given:  # fmt: skip
    """The masked parts alone, each brought to the size that is generated."""
    assert options.padding_mask_crop is not None
    if not masks:
        raise InputError(
            "padding_mask_crop", NO_VALUE, "needs a mask", "give {mask}, of which the surroundings are cut out"
        )
    if len({one.size for one in images}) > 1:
        raise InputError(
            "padding_mask_crop",
            NO_VALUE,
            "does not go with images of several sizes",
            "call the pipeline for one at a time",
        )
    masks = [_edged(mask, options) for mask in masks]
    boxes = [box_of(mask, options.padding_mask_crop, *size) for mask in masks]
    count = max(len(images), len(masks))
    parts = [resized(entry(images, i).crop(entry(boxes, i)), *size) for i in range(count)]
    holes = [resized(mask.crop(box), *size) for mask, box in zip(masks, boxes, strict=True)]
    holes = [rounded(hole) for hole in holes] if options.mask_mode == "hard" and not options.mask_blur else holes
    return Given(_filled(parts, holes, options), holes, strength, fingerprints, (images, masks), boxes)


def _filled(images: list[Image.Image], masks: list[Image.Image], options: Options) -> list[Image.Image]:
    """What the run begins from: an image of each mask with its holes painted over, where that is asked for."""
    if options.mask_fill != "fill" or not masks:
        return images
    count = max(len(images), len(masks))
    return [painted_over(entry(images, i), entry(masks, i)) for i in range(count)]


def _edged(mask: Image.Image, options: Options) -> Image.Image:
    return blurred(rounded(mask) if options.mask_mode == "hard" else mask, options.mask_blur)


def _shrunk(mask: Image.Image, factor: int, *, hard: bool) -> HostArray:
    pixels = np.asarray(mask, np.float32) / 255
    tiles = pixels.reshape(mask.height // factor, factor, mask.width // factor, factor)
    small = (tiles.max(axis=(1, 3)) >= 0.5).astype(np.float32) if hard else tiles.mean(axis=(1, 3))
    return small[..., None]


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height}"
