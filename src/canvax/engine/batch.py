"""The images in flight on the devices: put one into a slot, step all of them, take one out.

Each image stands at its own row of its own table, with its own prompt, guidance and key, so a pipeline that starts all
its images together and a server that lets them come and go run the same programs. An image's latents depend on nothing
but itself: in any company, at any slot, they are the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from canvax.compile.programs import LatentShape, Programs, deep_features_shape
from canvax.denoise import IDLE_ROWS, WINDOW, Composed, InFlight, Known, StepInputs, Tuning
from canvax.engine.segments import DeepPlan, guided_rows
from canvax.errors import InputError
from canvax.models.text import Conditions
from canvax.parallel.mesh import over_batch, replicated
from canvax.parallel.place import own_rows, put
from canvax.params import Params
from canvax.samplers.table import NOISE, SLOTS, SamplerTable
from canvax.types import Array, HostArray

Denoisers = Mapping[bool, Callable[..., Any]]
"""The programs that may run: with guidance (True), without (False), or both."""


class Texts(NamedTuple):
    """What images are told from some row on, as in ``InFlight``."""

    conditions: Conditions
    negative: Conditions | None
    composed: Composed | None

    @property
    def halves(self) -> list[Conditions]:
        """All conditions."""
        others = self.composed.others if self.composed else ()
        return [half for half in (self.conditions, self.negative, *others) if half is not None]


@dataclass(eq=False)
class _Run:
    """An image on its way: its table, which rows of it are guided, and the row that comes next."""

    table: SamplerTable
    guided: np.ndarray
    row: int = 0

    @property
    def left(self) -> int:
        return len(self.table) - self.row


class Batch:
    """B slots of one size on the devices of a model.

    Args:
        programs: the model's programs.
        params: its parameters, on the devices.
        latents: [B, h, w, C]; B is a multiple of the ``data`` axis of the mesh.
        denoisers: the compiled denoisers. With both, rows of which no image needs guidance run at half the work; with
            the guided one alone, images without guidance have scale 1.

    Attributes:
        denoised: D of every slot at the last row run [B, h, w, C] float32, on the devices; None before.
    """

    def __init__(self, programs: Programs, params: Params, latents: LatentShape, denoisers: Denoisers) -> None:
        self.latents = latents
        self.denoised: Array | None = None
        self._programs, self._params, self._denoisers = programs, params, denoisers
        self._runs: list[_Run | None] = [None] * latents[0]
        self._flight: InFlight | None = None
        self._deep: DeepPlan | None = None
        self._later: Mapping[int, Texts] = {}
        self._features: Array | None = None

    def fill(
        self,
        noise: HostArray,
        conditions: Conditions,
        negative: Conditions | None,
        keys: HostArray,
        tables: Sequence[SamplerTable],
        deep: DeepPlan | None = None,
        images: HostArray | None = None,
        known: Known | None = None,
        composed: Composed | None = None,
        later: Mapping[int, Texts] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """Start images in the first slots, all at once and without a program; what was in flight is gone.

        Args:
            noise: initial noise of unit variance [n, h, w, C] float32, n at most B; slots that are left over repeat
                the last image.
            conditions: each [B, ...], on the devices.
            negative: the same of the negative prompts; None for a batch that is not guided.
            keys: threefry key words for step noise [n, 2] uint32.
            tables: one for each image, all with the same ``clip``.
            deep: which rows compute the deep features; all images have the same table then.
            images: latents [n, h, w, C] float32 of images to begin from, which ``noise`` is added to; else it is all.
            known: what stays of images, [n, ...] each, for denoisers that were made for it.
            composed: further prompts of each image, likewise, on the devices.
            tuning: numbers of other kinds of guidance, [n, ...] each, likewise.
            later: other texts from a row on, on the devices; all images have the same table then.
        """
        self._check_clip(tables[0], tables)
        runs = [_Run(table, guided_rows(table, guided=negative is not None)) for table in tables]
        state = np.zeros((len(noise), SLOTS, *noise.shape[1:]), np.float32)
        for i, table in enumerate(tables):
            scaled = np.float32(table.init_scale)
            state[i, 0] = noise[i] * scaled if images is None else table.noised(images[i], noise[i])
        self._runs = [*runs, *[None] * (self.latents[0] - len(runs))]
        self._flight = InFlight(
            self._put(state),
            conditions,
            negative,
            self._put(keys),
            known and Known(*map(self._put, known)),
            composed,
            Tuning(*(field if field is None else self._put(field) for field in tuning or Tuning())),
        )
        self._deep, self._features, self._later = deep, None, later or {}

    def admit(
        self,
        slot: int,
        latents: HostArray,
        conditions: Conditions,
        negative: Conditions | None,
        key: HostArray,
        table: SamplerTable,
        row: int = 0,
    ) -> None:
        """Put an image into a free slot while others are on their way.

        Args:
            slot: which one, 0..B - 1.
            latents: [h, w, C] float32: noise of unit variance, or for a ``row`` after the first x before that row.
            conditions: of this image, each [1, ...].
            negative: likewise; None for an image without guidance, whose table has scale 1.
            key: threefry key words [2] uint32.
            table: its sampler, with the ``clip`` that the denoisers were compiled for.
            row: the row to begin with.

        Raises:
            InputError: the slot is taken, the table clips otherwise than those of others, or the batch reuses deep
                features, which images at other rows cannot share.
        """
        if self._runs[slot] is not None:
            raise InputError(f"slot={slot} holds an image; take it out first, or admit into one of {self.free}")
        self._check_clip(next((run.table for run in self._runs if run), table), [table])
        if self._deep is not None:
            raise InputError("this batch reuses deep features, for which all its images stand at one row; fill it")
        mesh, guided = self._programs.mesh, True in self._denoisers
        if self._flight is None:
            abstract = self._programs.step_inputs(self._params, self.latents, guided=guided)
            empty = InFlight(abstract.state, abstract.conditions, abstract.negative, abstract.keys)
            self._flight = jax.tree.map(lambda leaf: put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), empty)
        state = np.zeros((1, SLOTS, *latents.shape), np.float32)
        state[0, 0] = latents * np.float32(table.init_scale) if row == 0 else latents
        image = InFlight(state, conditions, (negative or conditions) if guided else None, np.asarray(key)[None])
        image = jax.tree.map(lambda leaf: put(leaf, replicated(mesh)), image)
        insert = self._programs.insert(self._params, self.latents, guided=guided)
        self._flight = insert(self._flight, image, np.int32(slot))
        self._runs[slot] = _Run(table, guided_rows(table, guided=negative is not None), row)

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
        if texts := self._later.get(first.row):
            flight = self._flight = flight._replace(**texts._asdict())
        rows = min([rows, *(row - first.row for row in self._later if row > first.row)])
        guided, count = self._next(list(active.values()), rows)
        columns, noisy = self._window(active)
        inputs = StepInputs(
            flight.state,
            flight.conditions,
            flight.negative if guided else None,
            columns,
            flight.keys,
            noisy,
            np.int32(count),
            self._deep and self._deep_features(active, self._deep, guided=guided),
            *flight[4:],
        )
        weights = self._params[self._programs.networks.denoiser.component]
        state, self.denoised, self._features = self._denoisers[guided](weights, inputs)
        self._flight = flight._replace(state=jax.block_until_ready(state))
        for run in active.values():
            run.row += count
        return [slot for slot, run in active.items() if not run.left]

    def take(self, slot: int) -> HostArray:
        """The latents of a finished image [h, w, C] float32; its slot is free then."""
        assert self._flight is not None
        indices, rows = own_rows(self._flight.state)
        self._runs[slot] = None
        return rows[indices.index(slot), 0]

    def replace(self, latents: HostArray) -> None:
        """Go on from other latents [n, h, w, C] float32 in the first slots; needs all devices in this process."""
        assert self._flight is not None
        state = np.array(jax.device_get(self._flight.state))
        state[: len(latents), 0] = latents
        self._flight = self._flight._replace(state=self._put(state))

    @property
    def free(self) -> list[int]:
        """Slots without an image."""
        return [slot for slot, run in enumerate(self._runs) if run is None]

    @property
    def rows_left(self) -> int:
        """Rows of the image that has most of them to go."""
        return max((run.left for run in self._runs if run is not None), default=0)

    @property
    def state(self) -> Array:
        """The state of all slots [B, K, h, w, C] float32 on the devices; slot 0 of K is x."""
        assert self._flight is not None
        return self._flight.state

    def _check_clip(self, first: SamplerTable, tables: Sequence[SamplerTable]) -> None:
        if any(table.clip != first.clip for table in tables):
            raise InputError("the tables of one batch clip the denoised image differently; use a batch for each")

    def _next(self, active: Sequence[_Run], rows: int) -> tuple[bool, int]:
        """Whether the next call is guided, and for how many rows nothing changes."""
        most = min(rows, WINDOW, *(run.left for run in active))
        if len(self._denoisers) == 1:
            return next(iter(self._denoisers)), most
        needed = np.any([run.guided[run.row : run.row + most] for run in active], axis=0)
        changes = np.flatnonzero(needed != needed[0])
        return bool(needed[0]), int(changes[0]) if len(changes) else most

    def _window(self, active: Mapping[int, _Run]) -> tuple[dict[str, Array], np.ndarray]:
        """The next rows of all slots on the devices, and which of them use noise for any image."""
        windows: dict[tuple[int, int], dict[str, HostArray]] = {}
        for run in active.values():
            if (at := (id(run.table), run.row)) not in windows:
                windows[at] = run.table.window(run.row, WINDOW)
        own = [windows[id(run.table), run.row] if (run := active.get(i)) else None for i in range(len(self._runs))]
        noisy = np.any([window["M"][:, :, NOISE].any(axis=1) for window in windows.values()], axis=0)
        waiting = any(run is not None and not run.left for run in self._runs)
        split = over_batch(self._programs.mesh)
        columns = {}
        for name, idle in IDLE_ROWS.items():
            if len(windows) == 1 and not waiting:  # slots without an image too: nobody reads what becomes of them
                (window,) = windows.values()
                column = np.broadcast_to(window[name], (len(own), *idle.shape))
            else:
                column = np.stack([idle if window is None else window[name] for window in own])
            columns[name] = put(column, split)
        return columns, noisy

    def _deep_features(self, active: Mapping[int, _Run], plan: DeepPlan, *, guided: bool) -> Any:
        row = next(iter(active.values())).row
        if row in plan.starts:
            networks = self._programs.networks
            shape = deep_features_shape(networks, self.latents, plan.layers, guided=guided)
            dtype = networks.denoiser.dtype(self._params[networks.denoiser.component])
            self._features = put(np.zeros(shape, dtype), over_batch(self._programs.mesh))
        return plan.window(row, self._features)

    def _put(self, array: HostArray) -> Array:
        """On the devices, split over the batch, which is filled up with copies of its last entry."""
        return put(filled(array, self.latents[0]), over_batch(self._programs.mesh))


def filled(array: HostArray, batch: int) -> HostArray:
    """``array`` [n, ...] with copies of its last entry behind it: [batch, ...]."""
    missing = batch - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array
