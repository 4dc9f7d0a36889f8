"""The images and texts of a training: which there are, their sizes, and what the loss reads of them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.models.text import TextEncoders
from canvax.parallel.memory import available_bytes
from canvax.parallel.mesh import replicated
from canvax.parallel.multihost import fail_together, is_main_process, is_spread
from canvax.params import Params
from canvax.pipelines.references import References, check_references, reference_grids
from canvax.tokenizers.clip import TruncationWarning
from canvax.train.buckets import Size
from canvax.train.diffusion import Reader, denoising_data
from canvax.train.encoding import encode_pictures
from canvax.train.kept import ENCODED_AT_ONCE, Lazy, Store, fingerprint, in_batches, name_of
from canvax.train.pictures import MASK, MASK_ENDING, PictureFolder, frame_of
from canvax.types import HostArray

_Source = tuple[Size, int, Callable[[], HostArray]]
"""Size of an image, 1 for its mirror image or 0, and a function that reads it."""


@dataclass(frozen=True)
class Item:
    """An image of a training.

    Attributes:
        folder: the images that it is one of.
        index: its position there.
        sides: height and width of the upright image.
        size: height and width to which it is resized and cropped.
        content: hash of its file.
        beside: hash of its control image and mask, "" without them.
        repeats: how often it comes in an epoch.
        weight: weight of its loss.
        references: height and width of each reference as the model reads it, and the hash of its file.
    """

    folder: PictureFolder
    index: int
    sides: Size
    size: Size
    content: str
    beside: str = ""
    repeats: int = 1
    weight: float = 1.0
    references: tuple[tuple[Size, str], ...] = ()

    @property
    def captions(self) -> Sequence[str]:
        """The captions of the image."""
        return self.folder.captions[self.index]

    @property
    def pixels(self) -> HostArray:
        """The image [H, W, 3] uint8."""
        return self.folder.pixels(self.index, self.size)

    @property
    def mask(self) -> HostArray | None:
        """The mask of the image [H, W] uint8; None without a mask."""
        return self.folder.mask(self.index, self.size, self.sides)

    def read_references(self, model: Model) -> References:
        """Read its references as a call does.

        Raises:
            InputError: one cannot be used.
        """
        try:
            return check_references(self.folder.reference(self.index), model.networks)
        except InputError as error:
            raise error.about("references") from None

    @property
    def lost(self) -> float:
        """The fraction of its area that is cropped."""
        (height, width), (tall, wide) = self.sides, self.size
        return 1 - tall * wide / (max(tall / height, wide / width) ** 2 * height * width)


Sizes = Sequence[Size]


def items_of(
    folder: PictureFolder,
    fitted: Callable[[Size], Size],
    *,
    weight: float = 1.0,
    read: Callable[[Sizes], Sizes] = lambda sizes: sizes,
) -> list[Item]:
    """Return the images of a folder.

    Args:
        folder: the images.
        fitted: returns the size for the sides of an image.
        weight: weight of the loss of each.
        read: returns the sizes in which the model reads references of these sides.
    """
    items = []
    for index, repeats in enumerate(folder.repeats.tolist()):
        sides, content, beside = folder.header(index)
        pair = folder.pair(index)
        sizes = read([size for size, _ in pair]) if pair else ()
        references = tuple((size, of_file) for size, (_, of_file) in zip(sizes, pair, strict=True))
        items.append(Item(folder, index, sides, fitted(sides), content, beside, repeats, weight, references))
    return items


def evened(items: Sequence[Item], count: int) -> list[Item]:
    """Return class images that come ``count`` times in an epoch, as in kohya's trainers.

    They repeat more often, in turn, until they are as many; or the last ones are left out.
    """
    used, total = list[Item](), 0
    for item in items:
        if total < count:
            used.append(item)
            total += item.repeats
    more, rest = divmod(max(count - total, 0), len(used))
    return [replace(item, repeats=item.repeats + more + (i < rest)) for i, item in enumerate(used)]


def held_out(items: Sequence[Item], share: float) -> tuple[list[Item], list[Item]]:
    """Return the images to train on, and a share of images to hold out, at least one, chosen by their content.

    The choice depends neither on the seed nor on names: more images change little, and copies stay together.
    """
    contents = sorted({item.content for item in items})
    chosen = set(contents[: max(1, round(share * len(contents)))])
    return [item for item in items if item.content not in chosen], [item for item in items if item.content in chosen]


def digest(items: Iterable[Item]) -> str:
    """Return a short hash of images, captions, control images, masks, repeats, weights and references."""
    rows = [
        (item.content, item.beside, list(item.captions), item.repeats, item.weight, *item.references) for item in items
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:24]


def cropped(items: Iterable[Item]) -> str:
    """Return a clause on the images that lose a hundredth or more when they are cropped."""
    lost = [item.lost for item in items if item.lost >= 0.01]
    return f", {len(lost)} of them cropped by up to {max(lost):.0%}" if lost else ""


def check_masks(items: Sequence[Item], least: float | None) -> bool:
    """Return whether there are masks.

    Args:
        items: the images.
        least: weight of positions outside a mask, if it is set; with 1 masks are not read.

    Raises:
        InputError: a mask excludes a whole image, or differs in size from it, or ``least`` is set without masks.
    """
    masked = [item for item in items if item.beside and item.folder.masked]
    for item in masked:
        mask = item.mask
        if mask is not None and not least and mask.max() == 0:
            raise InputError(
                f"the mask of {item.folder.rows[item.index]['file_name']} is black all over what is kept of it, so "
                "that nothing is learned of it; paint white what counts, leave it out, or give an unmasked weight of "
                "0.1"
            )
    if any(item.folder.masks for item in items):
        return True
    if least is not None and least != 1:
        raise InputError(
            "unmasked_weight",
            "has no effect: no picture has a mask",
            cure=f"name their files in the column {MASK!r} of the table, or call the mask of a.png a{MASK_ENDING}",
            value=least,
        )
    return False


def by_size(items: Sequence[Item]) -> dict[Size, list[Item]]:
    """Return the images of each size, in the order of sizes."""
    groups: dict[Size, list[Item]] = {}
    for item in items:
        groups.setdefault(item.size, []).append(item)
    return dict(sorted(groups.items()))


def alike(items: Sequence[Item]) -> list[list[Item]]:
    """Return groups of images of one size with equally many references, whose samples have the same shapes."""
    groups: dict[tuple[Size, int], list[Item]] = {}
    for item in items:
        groups.setdefault((item.size, len(item.references)), []).append(item)
    return [group for _, group in sorted(groups.items())]


class SeenCaption(NamedTuple):
    """A caption that is encoded together with the references of an image.

    Attributes:
        text: the caption.
        item: the image.
    """

    text: str
    item: Item


Caption = str | SeenCaption


def sees_references(text: TextEncoders) -> bool:
    """Return whether text encoders see the references of a call."""
    return text.seeing([(512, 512)]) != text


@dataclass(frozen=True, eq=False)
class Encoder:
    """Makes the samples of ``denoising_data`` from images.

    Attributes:
        model: the model.
        vae: parameters of the autoencoder, on the devices.
        mesh: the devices.
        store: the folder of encoded images.
        forms: 2 to add the mirror image of each image, otherwise 1.
        least: weight of positions outside a mask; None without masks.
        weighted: whether images have weights.
        drops: whether captions are dropped.
        say: called with messages about the progress.
    """

    model: Model
    vae: Params
    mesh: Mesh
    store: Store
    forms: int = 1
    least: float | None = None
    weighted: bool = False
    drops: bool = True
    say: Callable[[str], None] = lambda _: None

    @classmethod
    def of(cls, model: Model, params: Params, mesh: Mesh, *rest: Any) -> Encoder:
        """Put the autoencoder on the devices."""
        return cls(model, jax.device_put(params["vae"], replicated(mesh)), mesh, *rest)

    def samples(
        self, items: Sequence[Item], readers: Mapping[str, Reader], captions: Sequence[Sequence[Any]], length: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the samples and the shared data of ``denoising_data`` for images of a size; they are encoded before.

        Captions are texts, or ``SeenCaption``.

        Arrays that are larger than a quarter of the free memory are ``Lazy``.
        """
        size, flips = items[0].size, range(self.forms)
        latents = self.store.rows(self._names(items), "latents")
        control, mask, time_ids, weight = None, None, None, None
        if items[0].folder.control:

            def hints(row: int) -> HostArray:
                image = items[row].folder.hint(items[row].index, size)
                return np.stack([image[:, :: -1 if flip else 1] for flip in flips])

            control = Lazy((len(items), self.forms, *size, 3), np.dtype(np.uint8), hints)
        if self.least is not None:
            weights = np.stack([self._weights(item) for item in items])
            mask = np.stack([weights[:, :, :: -1 if flip else 1] for flip in flips], axis=1)
        if self.model.networks.size_numbers:
            time_ids = np.stack([self._size_conditions(item) for item in items])
        if self.weighted:
            weight = np.array([item.weight for item in items], np.float32)
        arrays: dict[str, Any] = {"latents": latents, "control": control, "mask": mask, "time_ids": time_ids}
        if items[0].references:
            arrays["references"] = self._references(items)
        if isinstance(captions[0][0], SeenCaption):
            arrays["dropped"] = [of_each[0]._replace(text="") for of_each in captions] if self.drops else ()
        samples, shared = denoising_data(readers, captions=captions, length=length, weight=weight, **arrays)
        room = (available_bytes() or 1 << 34) // 4

        def held(array: Any) -> Any:
            return array[:] if isinstance(array, Lazy) and array.nbytes < room else array

        return jax.tree.map(held, samples), shared

    def encode(self, items: Sequence[Item]) -> None:
        """Encode the images that the store lacks, a few at once."""
        names, flips = self._names(items), range(self.forms)
        sources: list[_Source] = [(item.size, flip, partial(_pixels, item)) for item in items for flip in flips]
        self._encode(list(names.flat), sources, "images")
        names, sources = list[str](), []
        for item in items:
            names += self._reference_names(item).flat
            for flip in flips:
                sources += [(size, flip, partial(self._pixels, item, i)) for i, (size, _) in enumerate(item.references)]
        if names:
            self._encode(names, sources, "references")

    def _encode(self, names: Sequence[str], sources: Sequence[_Source], noun: str) -> None:
        missing = self.store.missing(names)
        self.say(self.store.progress(missing, names, noun))
        for part in in_batches(missing, lambda position: sources[position][:2]):
            flip = sources[part[0]][1]
            pixels = np.stack([sources[i][2]()[:, :: -1 if flip else 1] for i in part])
            latents = encode_pictures(self.vae, pixels, self.model.vae, self.mesh, batch=ENCODED_AT_ONCE)
            keep(self.store, [names[i] for i in part], [{"latents": array} for array in latents], self.mesh)

    def _pixels(self, item: Item, number: int) -> HostArray:
        """Return a reference [H, W, channels] uint8."""
        return np.asarray(item.read_references(self.model).images[number][0])

    def _reference_names(self, item: Item) -> HostArray:
        """Return the names of the encoded references of an image in the store, [forms, references].

        Their number is part of the names: some models read a single reference in another way.
        """
        count, flips = len(item.references), range(self.forms)
        names = [
            [name_of(self._network, "reference", content, size, flip, count) for size, content in item.references]
            for flip in flips
        ]
        return np.array(names, object)

    def _references(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the condition ``canvax.models.denoiser.REFERENCES`` of images with equally many references.

        ``tokens`` are [N, forms, R, C], padded to those of the image that has most.
        """
        networks = self.model.networks
        ids = [reference_grids([size for size, _ in item.references], networks.size_step) for item in items]
        counts = np.array([len(of_item) for of_item in ids], np.int32)
        room, channels = int(counts.max()), networks.vae.latent_channels * networks.packing.step**2
        store, names_of = self.store, [self._reference_names(item) for item in items]  # not self, which has the weights

        def tokens(row: int) -> HostArray:
            forms = [
                np.concatenate([networks.packing.pack(store.read(name)["latents"])[0] for name in names])
                for names in names_of[row]
            ]
            return np.pad(np.stack(forms), ((0, 0), (0, room - counts[row]), (0, 0)))

        return {
            "tokens": Lazy((len(items), self.forms, room, channels), np.dtype(np.float32), tokens),
            "ids": np.stack([np.pad(of_item, ((0, room - len(of_item)), (0, 0))) for of_item in ids]),
            "count": counts,
        }

    def _names(self, items: Sequence[Item]) -> HostArray:
        """Return the names of encoded images in the store, [N, forms]."""
        flips = range(self.forms)
        names = [[name_of(self._network, item.content, item.size, flip) for flip in flips] for item in items]
        return np.array(names, object)

    @cached_property
    def _network(self) -> list[str]:
        return ["image", fingerprint(self.model, ["vae"]), jax.tree.leaves(self.vae)[0].dtype.name]

    def _weights(self, item: Item) -> HostArray:
        """Return weights of the latents' positions [h, w] float32: means of the mask's pixels, at least ``least``."""
        factor, (height, width) = self.model.vae.factor, item.size
        if (mask := item.mask) is None:
            return np.ones((height // factor, width // factor), np.float32)
        cells = mask.reshape(height // factor, factor, width // factor, factor)
        return np.maximum(cells.mean((1, 3), dtype=np.float32) / 255, np.float32(self.least or 0.0))

    def _size_conditions(self, item: Item) -> np.ndarray:
        """Return SDXL's size conditions of an image: original size, corner of the crop, target size."""
        height, width, top, left = frame_of(item.sides, item.size)
        options = {"original_size": (height, width), "crops_coords_top_left": (top, left), "target_size": item.size}
        return self.model.size_conditions(*item.size, options)[0]["time_ids"]


def _pixels(item: Item) -> HostArray:
    return item.pixels


def varied(
    caption: str, random: np.random.Generator, *, keep: int = 0, shuffle: bool = True, dropout: float = 0.0
) -> str:
    """Return a caption with its comma-separated tags in random order, or without a share of them, as kohya's.

    The first ``keep`` tags stay where they are.
    """
    tags = [tag.strip() for tag in caption.split(",")]
    rest = tags[keep:]
    if shuffle:
        rest = [rest[i] for i in random.permutation(len(rest))]
    if dropout:
        rest = [tag for tag, number in zip(rest, random.random(len(rest)), strict=True) if number >= dropout]
    return ", ".join([*tags[:keep], *rest])


def varying(
    captions: Sequence[Sequence[Sequence[str]]],
    readers: Mapping[str, Reader],
    length: int,
    vary: Callable[[str, np.random.Generator], str],
) -> Callable[[int, HostArray, np.random.Generator], Mapping[str, Any]]:
    """Return ``Dataset.changed``: one of the captions of each sample, changed by ``vary``.

    Args:
        captions: for each part the captions of each image.
        readers: the tokenizers, see ``denoising_data``.
        length: T, tokens of a caption.
        vary: returns a caption with random changes.
    """

    def changed(part: int, rows: HostArray, random: np.random.Generator) -> Mapping[str, Any]:
        of_all: list[Sequence[str]] = [captions[part][int(row)] for row in rows]
        texts = [vary(own[int(random.integers(len(own)))], random) for own in of_all]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)  # seen before the first step
            return {"captions": {name: reader(texts, length=length)[:, None] for name, reader in readers.items()}}

    return changed


def keep(store: Store, names: Sequence[str], files: Sequence[Mapping[str, HostArray]], mesh: Mesh) -> None:
    """Write files; if several processes run, the first one does, and all wait."""
    with fail_together("keeping") if is_spread(mesh) else nullcontext():
        if is_main_process(mesh):
            for name, arrays in zip(names, files, strict=True):
                store.write(name, arrays)
