"""The images in flight on the devices: put an image into a slot, step all images, take an image out.

Each image is at a row of its table, with its prompt, guidance and key. A pipeline that starts all its images together
and a server whose images come and go run the same programs. An image's latents depend on the image alone: in any batch,
at any slot, they are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from canvax.compile.kinds import DENOISERS, Compiled, LatentShape, Ready
from canvax.denoise import IDLE_ROWS, WINDOW, InFlight, Known, StepInputs
from canvax.engine.segments import DeepPlan, guided_rows
from canvax.errors import InputError
from canvax.models.denoiser import Packing
from canvax.models.text import Conditions
from canvax.parallel.mesh import over_batch
from canvax.parallel.place import local_rows, map_parts, on_devices, put, put_all
from canvax.params import Params
from canvax.samplers.table import NOISE, SLOTS, SamplerTable
from canvax.types import Array, HostArray

Prompts = tuple[Conditions, ...]
"""Conditions of prompts; see ``InFlight.prompts``."""


@dataclass(eq=False)
class Run:
    """Progress of an image.

    Attributes:
        table: table of its sampler.
        guided: rows that need the negative prompt, [R] bool.
        row: the next row.
        later: prompts that replace the first ones from a row on, each [1, ...] on the host.
        columns: further numbers of each row that the denoiser and its guidance read, each [R, ...] float32; zeros if
            left out.
    """

    table: SamplerTable
    guided: np.ndarray
    row: int = 0
    later: Mapping[int, Prompts] = field(default_factory=dict)
    columns: Mapping[str, HostArray] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Rows to go."""
        return len(self.table) - self.row


class ParkedImage(NamedTuple):
    """The state of an image between batches: its progress, and its arrays, [1, ...] each.

    The arrays are on the host, except those from a batch of one image, which may be on its devices.
    """

    flight: InFlight
    run: Run


class Begun(NamedTuple):
    """The state of images at their first rows, [B, ...] on the devices.

    Attributes:
        flight: all that a batch holds of them.
        runs: of each slot.
        later: prompts that replace those of all images from a row on.
        deep: which rows compute the deep features.
    """

    flight: InFlight
    runs: list[Run | None]
    later: Mapping[int, Prompts] = MappingProxyType({})
    deep: DeepPlan | None = None

    def parked(self) -> dict[int, ParkedImage]:
        """Return the state of all images by slot. Needs all devices in this process."""
        alone = len(self.runs) == 1  # nothing is cut out of its arrays, and they do not change
        host, later = self.flight if alone else jax.device_get(self.flight), jax.device_get(dict(self.later))
        parked = {}
        for slot, run in enumerate(self.runs):
            if run is not None:
                flight = host if alone else _at(host, slot)
                prompts = {row: _at(array, slot) for row, array in later.items()}
                parked[slot] = ParkedImage(flight, replace(run, later=prompts or run.later))
        return parked


def begun(
    packing: Packing,
    split: NamedSharding,
    latents: LatentShape,
    noise: HostArray,
    prompts: Prompts,
    keys: HostArray,
    tables: Sequence[SamplerTable],
    deep: DeepPlan | None = None,
    images: HostArray | None = None,
    known: Known | None = None,
    later: Mapping[int, Prompts] | None = None,
    columns: Sequence[Mapping[str, HostArray]] | None = None,
    slots: int = SLOTS,
) -> Begun:
    """Return the state of images that begin, which ``Batch.begin`` takes.

    Args:
        packing: how the denoiser's loop holds latents.
        split: over the devices, for arrays [B, ...].
        latents: [B, h, w, C], as of ``Batch``.
        noise: initial noise of unit variance [n, h, w, C] float32, n at most B; slots that are left over repeat the
            last image.
        prompts: each [B, ...], on the devices; the prompt alone for a batch that is not guided.
        keys: threefry key words for step noise [n, 2] uint32.
        tables: one for each image.
        deep: which rows compute the deep features; all images have the same table then.
        images: latents [n, h, w, C] float32 of images to begin from, which ``noise`` is added to; else it is all.
        known: what stays of images, [n, ...] each, for denoisers that were made for it; its mask is [n, h, w, 1].
        later: prompts that replace these from a row on; all images must then have the same table.
        columns: of each image, as in ``Run``.
        slots: arrays of latent size in the state of each image: of the sampler, and of the rule of guidance.
    """

    def placed(array: HostArray) -> Array:
        return put(filled(array, latents[0]), split)

    guided = len(prompts) > 1
    runs = [
        Run(table, guided_rows(table, guided=guided), columns=columns_of_image)
        for table, columns_of_image in zip(tables, columns or [{}] * len(tables), strict=True)
    ]
    noise, images = packing.pack(noise), None if images is None else packing.pack(images)
    state = np.zeros((len(noise), slots, *noise.shape[1:]), np.float32)
    for i, table in enumerate(tables):
        scaled = np.float32(table.init_scale)
        state[i, 0] = noise[i] * scaled if images is None else table.noised(images[i], noise[i])
    if known is not None:
        mask = packing.pack(np.broadcast_to(known.mask, known.latents.shape))
        known = Known(*map(placed, (mask, packing.pack(known.latents), known.graded)))
    flight = InFlight(placed(state), prompts, placed(keys), known)
    return Begun(flight, [*runs, *[None] * (latents[0] - len(runs))], later or {}, deep)


class Batch:
    """B slots of one size on devices.

    Args:
        programs: among them one denoiser or both. With both, rows of which no image needs guidance run at half the
            work; with the guided one alone, images without guidance have scale 1.
        params: the model's parameters, on the devices.
        mesh: the devices.
        latents: [B, h, w, C]; B is a multiple of the ``data`` axis of the mesh.

    Arguments and results that are on the host have the height and width of ``latents``. On the devices, and in images
    that are parked, latents are packed as the denoiser's facts say; ``unpacked`` inverts that.

    Attributes:
        denoised: D of every slot at the last row run, packed, on the devices; None before.
    """

    def __init__(self, programs: Ready, params: Params, mesh: Mesh, latents: LatentShape) -> None:
        self.latents = latents
        self._x: Array | None = None
        self.denoised: Array | None = None
        self._denoisers = {guided: programs[name] for guided, name in DENOISERS.items() if name in programs}
        self._split = over_batch(mesh)
        first = next(iter(self._denoisers.values()))
        self._params = {**params, **{name: on_devices(params[name]) for name in first.program.reads}}  # for all rows
        self._packing: Packing = first.program.function.keywords["denoiser"].facts.packing
        self._runs: list[Run | None] = [None] * latents[0]
        self._flight: InFlight | None = None
        self._deep: DeepPlan | None = None
        self._later: Mapping[int, Prompts] = {}
        self._memory: Any = None

    def begin(self, state: Begun) -> None:
        """Start images in the first slots, all at once and without a program; what was in flight is gone."""
        self._flight, self._runs, self._later, self._deep = state
        self._x, self._memory = None, None

    def join(self, images: Mapping[int, ParkedImage]) -> None:
        """Put images into free slots while others are on their way. By way of the host, so that nothing compiles.

        Args:
            images: by slot; each with what the denoisers were made for.

        Raises:
            InputError: a slot is taken, or the batch reuses deep features, which images at other rows cannot share.
        """
        for slot in images:
            if self._runs[slot] is not None:
                raise InputError(
                    "slot", "holds an image", cure=f"take it out first, or choose one of {self.free}", value=slot
                )
        if self._deep is not None:
            raise InputError("this batch reuses deep features, which images at other rows cannot share; fill it")
        flights = {
            slot: image.flight._replace(prompts=self._suited(image.flight.prompts)) for slot, image in images.items()
        }
        if self.latents[0] == 1:
            (host,) = flights.values()  # as it is: it may be on the devices already
        else:
            host = self._on_host(next(iter(flights.values())))
            for slot, flight in flights.items():
                _write(host, slot, flight)
        self._runs = [replace(images[slot].run) if slot in images else run for slot, run in enumerate(self._runs)]
        self._flight, self._x = put_all(host, self._split), None

    def carried(self) -> dict[int, ParkedImage]:
        """Return the state of all images by slot, for another batch; this batch continues, too. Needs all devices in
        this process."""
        return {} if self._flight is None else Begun(self._flight, self._runs, self._later).parked()

    def step(self, rows: int = 1) -> list[int]:
        """Run up to ``rows`` rows of every image that is not finished.

        Fewer are run where an image finishes or another program has to go on: ``rows`` bounds how long a call takes.

        Returns:
            Slots whose images are finished now and wait to be taken.
        """
        active = {slot: run for slot, run in enumerate(self._runs) if run is not None and run.left}
        flight = self._flight
        if not active or flight is None:
            return []
        first = next(iter(active.values()))
        if prompts := self._later.get(first.row):
            flight = self._flight = flight._replace(prompts=prompts)
        rows = min([rows, *(row - first.row for row in self._later if row > first.row)])
        flight = self._change_prompts(active, flight)
        rows = min([rows, *(row - run.row for run in active.values() for row in run.later if row > run.row)])
        guided, count = self._next(list(active.values()), rows)
        denoiser = self._denoisers[guided]
        columns, shared = self._window(active, denoiser)
        prompts = flight.prompts if guided else _unguided(flight.prompts)
        memory = self._memory_at(first.row, denoiser)
        inputs = StepInputs(flight._replace(prompts=prompts), columns, shared, np.int32(count), memory)
        state, self.denoised, self._memory, self._x = denoiser(self._params, inputs)
        self._flight = flight._replace(state=jax.block_until_ready(state))
        for run in active.values():
            run.row += count
        return [slot for slot, run in active.items() if not run.left]

    def take(self, slot: int) -> HostArray:
        """Return the latents of a finished image [h, w, C] float32, and free its slot."""
        indices, rows = local_rows(self.samples)
        self._runs[slot] = None
        return self.unpacked(rows[indices.index(slot)])

    def replace(self, latents: HostArray) -> None:
        """Go on from other latents [n, h, w, C] float32 in the first slots; needs all devices in this process."""
        assert self._flight is not None
        state = np.array(jax.device_get(self._flight.state))
        state[: len(latents), 0] = self._packing.pack(latents)
        self._flight, self._x = self._flight._replace(state=self._put(state)), None

    def unpacked(self, packed: Any) -> Any:
        """Return latents [..., h, w, C] of those that are on the devices or were there."""
        return self._packing.unpack(packed, *self.latents[1:3])

    def drop(self, slot: int) -> None:
        """Free a slot, whatever is in it."""
        self._runs[slot] = None

    def left(self, slot: int) -> int:
        """Return the remaining rows of the image in a slot."""
        run = self._runs[slot]
        return run.left if run else 0

    @property
    def free(self) -> list[int]:
        """Slots without an image."""
        return [slot for slot, run in enumerate(self._runs) if run is None]

    @property
    def rows_left(self) -> int:
        """Rows of the image that has most of them to go."""
        return max((run.left for run in self._runs if run is not None), default=0)

    @property
    def samples(self) -> Array:
        """x of all slots, packed, on the devices: what the decoder takes."""
        assert self._flight is not None
        if self._x is None:  # before a row is run; cut out on the host, where nothing compiles
            self._x = map_parts(lambda part: part[:, 0], self._flight.state)
        return self._x

    def _on_host(self, like: InFlight) -> InFlight:
        """Return the arrays in flight, for writing; zeros for images such as ``like`` if there are none."""
        if self._flight is not None:
            return jax.tree.map(np.array, jax.device_get(self._flight))
        return jax.tree.map(lambda leaf: np.zeros((self.latents[0], *leaf.shape[1:]), leaf.dtype), like)

    def _suited(self, prompts: Prompts) -> Prompts:
        """Return the prompts of an image as this batch holds them: an image without guidance repeats its prompt."""
        if True not in self._denoisers:
            return _unguided(prompts)
        return prompts if len(prompts) > 1 else (*prompts, *prompts)

    def _change_prompts(self, active: Mapping[int, Run], flight: InFlight) -> InFlight:
        """Replace prompts of images that have come to a row with others."""
        changes = {slot: run.later[run.row] for slot, run in active.items() if run.row in run.later}
        if changes:
            host = jax.tree.map(np.array, jax.device_get(flight))
            for slot, prompts in changes.items():
                _write(host, slot, _at(host, slot)._replace(prompts=self._suited(prompts)))
            flight = self._flight = put_all(host, self._split)
        return flight

    def _next(self, active: Sequence[Run], rows: int) -> tuple[bool, int]:
        """Return if the next call is guided, and for how many rows that and the images stay the same."""
        most = min(rows, WINDOW, *(run.left for run in active))
        if len(self._denoisers) == 1:
            return next(iter(self._denoisers)), most
        needed = np.any([run.guided[run.row : run.row + most] for run in active], axis=0)
        changes = np.flatnonzero(needed != needed[0])
        return bool(needed[0]), int(changes[0]) if len(changes) else most

    def _window(
        self, active: Mapping[int, Run], denoiser: Compiled
    ) -> tuple[Mapping[str, Array], dict[str, HostArray]]:
        """Return the next rows of all slots on the devices, and the columns that all images share."""
        windows: dict[tuple[int, int], dict[str, HostArray]] = {}
        for run in active.values():
            if (at := (id(run.table), run.row)) not in windows:
                windows[at] = run.table.window(run.row, WINDOW)
        current = [windows[id(run.table), run.row] if (run := active.get(i)) else None for i in range(len(self._runs))]
        noisy = np.any([window["M"][:, :, NOISE].any(axis=1) for window in windows.values()], axis=0)
        waiting = any(run is not None and not run.left for run in self._runs)
        columns: dict[str, HostArray] = {}
        for name, idle in IDLE_ROWS.items():
            if len(windows) == 1 and not waiting:  # slots without an image too: their results are never read
                (window,) = windows.values()
                column = np.broadcast_to(window[name], (len(current), *idle.shape))
            else:
                column = np.stack([idle if window is None else window[name] for window in current])
            columns[name] = column
        (inputs,) = denoiser.program.inputs
        for name in inputs.rows.keys() - IDLE_ROWS.keys():
            columns[name] = column = np.zeros(inputs.rows[name].shape, np.float32)
            for slot, run in active.items():
                if (given := windows[id(run.table), run.row].get(name)) is not None:
                    column[slot] = given
                elif name in run.columns:
                    rows = run.columns[name][run.row : run.row + WINDOW]
                    column[slot, : len(rows)] = rows
        shared = {"noisy": noisy}
        for name, column in columns.items():
            if (needed := f"any {name}") in inputs.shared:
                shared[needed] = np.any(column, axis=(0, *range(3, column.ndim)))
        if self._deep is not None:
            shared |= self._deep.window(next(iter(active.values())).row)
        return put_all(columns, self._split), shared

    def _memory_at(self, row: int, denoiser: Compiled) -> Any:
        """Return the denoiser's memory of the rows before a row: zeros at the first row of a program."""
        if self._deep is not None and row not in self._deep.starts:
            return self._memory
        (inputs,) = denoiser.program.inputs
        return jax.tree.map(lambda leaf: put(np.zeros(leaf.shape, leaf.dtype), self._split), inputs.memory)

    def _put(self, array: HostArray) -> Array:
        """Put an array on the devices, split over the batch, which is filled up with copies of its last entry."""
        return put(filled(array, self.latents[0]), self._split)


def _unguided(prompts: Prompts) -> Prompts:
    """Return the prompt alone, without the negative prompt."""
    return prompts[:2][-1:]


def _at(host: Any, slot: int) -> Any:
    """Return one image of arrays on the host."""
    return jax.tree.map(lambda leaf: leaf[slot : slot + 1], host)


def _write(host: InFlight, slot: int, image: InFlight) -> None:
    """Put one image among arrays on the host."""
    jax.tree.map(lambda whole, single: whole.__setitem__(slot, np.asarray(single)[0]), host, image)


def filled(array: HostArray, batch: int) -> HostArray:
    """Return ``array`` [n, ...] with copies of its last entry after it, [batch, ...]."""
    missing = batch - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array
