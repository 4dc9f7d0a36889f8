"""Images of one size in one batch on the devices. Used by the engine's thread."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from canvax.compile.additions import ReadsImage, ReadsReferences
from canvax.compile.aot import BuildCallback, CacheEntry
from canvax.compile.kinds import DENOISERS, Ready
from canvax.compile.programs import Programs
from canvax.engine.batch import Batch, ParkedImage, filled
from canvax.families.base import Model
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.prepare import prepare
from canvax.server.policy import best_batch
from canvax.server.work import GroupKey, Item
from canvax.types import HostArray

T = TypeVar("T")

AT_ONCE = 0.2
"""Seconds that a call of the denoiser should take: who comes or goes waits for its end. With half of it one client's
images of 20 and 30 steps take 4 % longer."""

LOOKS = 3
"""Measurements of each batch, at different times: other work of the machine disturbs the quickest least."""

SLOW = 1.0
"""Seconds of a row that is measured once: the first of a start are waited for."""

_SMOOTH = 0.2
"""Weight of a new measurement among the old ones."""


def rows_at_once(row: float) -> int:
    """Return the rows of one call of the denoiser, from the seconds of a row."""
    return max(1, int(AT_ONCE / max(row, 1e-6)))


@dataclass
class Timings:
    """Seconds of each thing, as measured.

    Attributes:
        row: one row of the denoiser at each batch.
        encode: texts and images of one image.
        decode: one image.
        kept: whether they were measured at an earlier start.
        guessed: whether ``row`` is a guess, which the first measurement replaces.
    """

    row: dict[int, float] = field(default_factory=dict)
    encode: float = 0.0
    decode: float = 0.0
    kept: bool = False
    guessed: bool = False

    def image(self, rows: float) -> float:
        """Return the seconds of a single image of so many rows."""
        return self.encode + self.decode + rows * self.row[min(self.row)]

    def shared(self, rows: float) -> float:
        """Return the engine's seconds for an image of so many rows if enough images wait to fill the best batch."""
        return self.encode + self.decode + rows * min(seconds / images for images, seconds in self.row.items())

    def learn_row(self, batch: int, seconds: float) -> None:
        """Update with a new measurement of a row."""
        self.row[batch] += (1.0 if self.guessed else _SMOOTH) * (seconds - self.row[batch])
        self.guessed = False

    def learn_decode(self, seconds: float) -> None:
        """Update with a new measurement of decoding."""
        self.decode += (_SMOOTH if self.decode else 1.0) * (seconds - self.decode)


class Group:
    """The programs of a key and the images that they are run for.

    Args:
        key: what the programs are for.
        model: the model.
        programs: its programs.
        params: gives its parameters, which are on the devices while the group runs; with the vectors of the words,
            the autoencoder and the ControlNets that it is given.
        batches: images of one call of a denoiser; multiples of the mesh's ``data`` axis.

    Attributes:
        timings: what was measured.
        batches: images at once.
        alone: images at once that one call encodes or decodes: one for each part of the mesh.
        used: when it last ran, on the engine's clock.
    """

    def __init__(
        self,
        key: GroupKey,
        model: Model,
        programs: Programs,
        params: Callable[..., Params],
        batches: Sequence[int],
    ) -> None:
        self.key = key
        self.timings = Timings()
        self.used = 0.0
        self.alone = padded_batch(1, programs.mesh)
        self.batches = sorted({self.alone, *(padded_batch(batch, programs.mesh) for batch in batches)})
        self._model, self._programs, self._params = model, programs, params
        self._ready: Ready | None = None
        self._denoisers: dict[int, Ready] = {}
        self._batch: Batch | None = None
        self._seats: list[Item | None] = []

    def compile(self, params: Params, announce: BuildCallback | None = None, *, image: bool = True) -> None:
        """Make all programs ready, but without ``image`` not the encoder of images to begin from. May run in any
        thread; ``params`` may be shapes."""
        kinds, shape = self.key.kinds, self._latents(self.alone)
        self._ready = self._programs.ready(params, shape, kinds if image else kinds.without(ReadsImage), announce)
        self._denoisers = {self.alone: _denoisers(self._ready)}
        for batch in self.batches[1:]:
            wanted = self._programs.wanted(params, self._latents(batch), kinds)
            self._denoisers[batch] = self._programs.compile(params, _denoisers(wanted), announce)

    def compile_encoder(self, params: Params, announce: BuildCallback | None = None) -> None:
        """Make the encoder of images to begin from ready. May run in any thread; ``params`` may be shapes."""
        reads = self.key.kinds.of(ReadsImage)
        assert reads is not None
        assert self._ready is not None
        (name,) = reads.names
        encoder = self._programs.program(name, params, self._latents(self.alone), self.key.kinds, announce)
        self._ready = {**self._ready, name: encoder}

    def lacks(self, item: Item) -> bool:
        """Return whether an image begins from an image, whose encoder is not compiled yet."""
        images = item.request.init_images
        if images is None or images.latents is not None or self._ready is None:
            return False
        reads = self.key.kinds.of(ReadsImage)
        return reads is not None and not {*reads.names} <= self._ready.keys()

    def count(self, *, image: bool) -> int:
        """Return the number of programs that ``compile`` makes."""
        kinds = self.key.kinds if image else self.key.kinds.without(ReadsImage)
        shared = 1 + bool(kinds.decoder) + sum(len(add.names) for add in kinds.adds)
        return shared + len(kinds.guided) * len(self.batches)

    def measure(self, carry: ParkedImage) -> None:
        """Time a row of each batch."""
        for _ in range(LOOKS):
            for batch in self.batches:
                self.timings.row[batch] = self._measured(batch, carry, self.timings.row.get(batch))

    def entry(self, params: Params) -> CacheEntry | None:
        """Return the cache entry of the timings, next to their programs; None if these are not cached."""
        alone, *others = (self._programs.wanted(params, self._latents(size), self.key.kinds) for size in self.batches)
        programs = [*alone.values(), *(program for wanted in others for program in _denoisers(wanted).values())]
        return self._programs.entry("timings", params, programs)

    def keep(self, entry: CacheEntry) -> None:
        """Store what was measured for the next process."""
        timings = self.timings
        entry.keep(
            json.dumps({"rows": [*timings.row.items()], "encode": timings.encode, "decode": timings.decode}).encode()
        )

    def recall(self, entry: CacheEntry, carry: ParkedImage) -> bool:
        """Take what an earlier process has measured, and run each batch once; whether there was something."""
        if (kept := entry.read()) is None:
            return False
        kept = json.loads(kept)
        self.timings.row = dict(kept["rows"])
        self.timings.encode, self.timings.decode, self.timings.kept = kept["encode"], kept["decode"], True
        for images in self.batches:
            self._timed(images, carry, 1)  # the first call of a program is slower
        return True

    def _measured(self, images: int, carry: ParkedImage, before: float | None) -> float:
        """Return the seconds of a row of so many images; ``before`` is the result of earlier measurements, or None."""
        if before is None:
            self._timed(images, carry, 1)  # the first call of a program is slower
            before = self._timed(images, carry, 1)
        if before > SLOW:
            return before
        rows = min(len(carry.run.table), rows_at_once(before))  # a call has its own time, which these share
        return min(before, self._timed(images, carry, rows))

    def _timed(self, images: int, carry: ParkedImage, rows: int) -> float:
        """Return the seconds of each of so many rows of a full batch, in one call."""
        batch = self._new_batch(images)
        batch.join(dict.fromkeys(range(images), carry))
        began = time.perf_counter()
        batch.step(rows)
        return (time.perf_counter() - began) / rows

    def draw(self, carry: ParkedImage, rows: int) -> tuple[HostArray, bool]:
        """Return latents of an image [h, w, C] after at most so many rows, and if these were all rows."""
        batch = self._new_batch(self.alone)
        batch.join({0: carry})
        done: list[int] = []
        for _ in range(rows):
            done = done or batch.step()
        return batch.take(0), bool(done)

    def begin(self, item: Item) -> ParkedImage:
        """Encode what an item was given; it can be seated then."""
        if item.carried is None:
            assert self._ready is not None
            beside = item.beside
            if beside.shelf is not None:
                item.request = replace(item.request, beside=beside.shelf.shares(beside.adapters))
            params = self._params(beside.words, beside.vae, self.key.variant.controlnets)
            state, _ = prepare(self._model, self._programs, params, item.request, self._ready, item.table)
            item.carried = state.parked()[0]
        return item.carried

    def looked_up(self) -> dict[str, int]:
        """Return how many texts and images were encoded before ("hit") and were not ("miss"), since the last call."""
        return self._programs.features.taken()

    @property
    def seated(self) -> list[Item]:
        """The images in flight."""
        return [item for item in self._seats if item is not None]

    @property
    def size(self) -> int:
        """Slots of the present batch."""
        return len(self._seats)

    @property
    def room(self) -> int:
        """Number of tokens that a prompt may have, without those that the model adds."""
        references, text = self.key.kinds.of(ReadsReferences), self._model.text
        images = references.sizes if references else ()
        each = zip(text.encoders, self.key.kinds.lengths, strict=True)
        added = [(encoder, length, self._model.tokenizers[encoder.component]) for encoder, length in each]
        return min(encoder.room(length) - encoder.count(words, "", images) for encoder, length, words in added)

    def summary(self) -> str:
        """Return the measurements as a line for the operator."""
        rows = ", ".join(f"{batch}: {1e3 * seconds:.1f} ms" for batch, seconds in self.timings.row.items())
        decode = f"decoding {1e3 * self.timings.decode:.0f} ms"
        decode += ", as measured at an earlier start" if self.timings.kept else ""
        references = self.key.kinds.of(ReadsReferences)
        of = f", {len(references.sizes)} reference images" if references else ""
        of = f"{self.key.size}{of}, prompts of up to {self.room} tokens (--chunks)"
        return f"{self.key.model} is warm at {of}: a step of a batch of {rows}; {decode}"

    def scaled(self, key: GroupKey) -> Timings:
        """Return estimated timings of another size of the model, with programs for single images alone."""
        times = key.height * key.width / (self.key.height * self.key.width)
        timings = self.timings
        return Timings({self.alone: times * timings.row[self.alone]}, timings.encode, times * timings.decode)

    def assume(self, other: Group) -> None:
        """Take the timings of another size, scaled, since nothing was measured."""
        self.timings = other.scaled(self.key)
        self.batches = [self.alone]

    def batch_for(self, count: int) -> int:
        """Return the batch that finishes so many images first."""
        return best_batch(self.timings.row, count)

    def seat(self, items: Sequence[Item], size: int) -> None:
        """Have these images in flight, at most ``size``, and no others; those that leave can come back."""
        staying = [item for item in self.seated if item in items]
        leaving = [item for item in self.seated if item not in items and not item.over]
        coming = [item for item in items if item not in staying]
        resized = self._batch is None or len(self._seats) != size
        if self._batch is not None and (leaving or (resized and staying)):
            held = self._batch.carried()
            for slot, item in enumerate(self._seats):
                if item is not None and (item in leaving or resized):
                    item.carried = held[slot]
        if resized:
            self._batch = None
            self._seats = [None] * size
            coming = [*staying, *coming]
        else:
            for slot, item in enumerate(self._seats):
                if item is not None and item not in staying:
                    self._leave(slot)
        free = [slot for slot, item in enumerate(self._seats) if item is None]
        joining = dict(zip(free, coming, strict=False))
        for slot, item in joining.items():  # before anything that can fail: ``clear`` gives whom the fault concerns
            self._seats[slot] = item
        if joining:
            if self._batch is None:
                self._batch = self._new_batch(size)
            self._batch.join({slot: self.begin(item) for slot, item in joining.items()})

    def step(self) -> list[tuple[Item, HostArray]]:
        """Run some rows of all images in flight. Return the finished images, with their latents [h, w, C]."""
        assert self._batch is not None
        self.used = time.monotonic()
        began, seats = time.perf_counter(), list(enumerate(self._seats))
        before = {slot: self._batch.left(slot) for slot, item in seats if item}
        done = self._batch.step(self._rows())
        took = time.perf_counter() - began
        ran = 1
        for slot, item in seats:
            if item is not None:
                ran = max(ran, before[slot] - self._batch.left(slot))
                item.row = len(item.table) - self._batch.left(slot)
        if any(item.request.guided or item.request.embedded for item in self.seated):
            self.timings.learn_row(len(self._seats), took / ran)
        finished = [(item, self._batch.take(slot)) for slot, item in seats if item is not None and slot in done]
        for slot in done:
            self._leave(slot)
        return finished

    def denoised(self, item: Item) -> HostArray:
        """Return the model's prediction of an image in flight [h, w, C] float32."""
        assert self._batch is not None
        assert self._batch.denoised is not None
        return self._batch.unpacked(np.asarray(self._batch.denoised)[self._seats.index(item)])

    def decode(self, latents: Sequence[HostArray], vae: str | None = None) -> HostArray:
        """Return pixels [n, H, W, 3] float32 of at most ``alone`` images; ``vae`` is an autoencoder instead of the
        model's."""
        params, began = self._params(vae=vae), time.perf_counter()
        pixels = self._decode(params, latents)
        self.timings.learn_decode(time.perf_counter() - began)
        return pixels

    def _decode(self, params: Params, latents: Sequence[HostArray]) -> HostArray:
        assert self._ready is not None
        packed = self._programs.networks.packing.pack(np.stack(latents))
        sent = put(filled(packed, self.alone), over_batch(self._programs.mesh))
        return np.asarray(self._ready["decoder"](params, sent))[: len(latents)]

    def clear(self, *, smaller: bool = False) -> list[Item]:
        """Take everything off the devices, as after a fault. Return the images, which begin again and can be seated
        again.

        ``smaller``: never use the present batch again, which is not the smallest.
        """
        items, self._batch = self.seated, None
        if smaller:
            self.batches.remove(len(self._seats))
            self.timings.row = {batch: self.timings.row[batch] for batch in self.batches}
        self._seats = []
        for item in items:
            item.row = 0 if item.carried is None else item.carried.run.row
        return items

    def park(self) -> None:
        """Take all images off the devices; they can come back."""
        if self._batch is not None:
            self.seat([], len(self._seats))
        self._batch, self._seats = None, []

    def _rows(self) -> int:
        """Return the rows of the next call: as many as take ``AT_ONCE``, but not past a row with a preview."""
        rows = rows_at_once(self.timings.row[len(self._seats)])
        steps = [(item.picture.step, item.stops) for item in self.seated]
        return min([rows, *(row - step for step, stops in steps for row in stops if row > step)])

    def _new_batch(self, images: int) -> Batch:
        """Return an empty batch of so many images, for which there are programs."""
        params = self._params(controlnets=self.key.variant.controlnets)
        return Batch(self._denoisers[images], params, self._programs.mesh, self._latents(images))

    def _leave(self, slot: int) -> None:
        assert self._batch is not None
        self._batch.drop(slot)
        self._seats[slot] = None

    def _latents(self, batch: int) -> tuple[int, int, int, int]:
        return self._programs.networks.latent_shape(batch, self.key.height, self.key.width)


def _denoisers(programs: Mapping[str, T]) -> dict[str, T]:
    """Return the denoisers among the programs of a run."""
    return {name: programs[name] for name in DENOISERS.values() if name in programs}
