"""The images in flight on the devices: put one into a slot, step all of them, take one out.

Each image stands at its own row of its own table, with its own prompt, guidance and key, so a pipeline that starts all
its images together and a server that lets them come and go run the same programs. An image's latents depend on nothing
but itself: in any company, at any slot, they are the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from canvax.compile.kinds import LatentShape
from canvax.compile.programs import Programs, deep_features_shape
from canvax.denoise import IDLE_ROWS, WINDOW, Composed, InFlight, Known, StepInputs, Tuning
from canvax.engine.segments import DeepPlan, guided_rows
from canvax.errors import InputError
from canvax.models.beside import Places
from canvax.models.controlled import ControlledDenoiser
from canvax.models.text import Conditions
from canvax.parallel.mesh import over_batch
from canvax.parallel.place import own_rows, put, put_all
from canvax.params import Params
from canvax.quantize import compute_dtype
from canvax.samplers.table import NOISE, SLOTS, SamplerTable
from canvax.types import Array, HostArray

Denoisers = Mapping[bool, Callable[..., Any]]
"""The programs that may run: with guidance (True), without (False), or both."""


class Texts(NamedTuple):
    """What images are told from some row on, as in ``InFlight``."""

    conditions: Conditions
    negative: Conditions | None
    composed: Composed | None = None

    @property
    def halves(self) -> list[Conditions]:
        """All conditions."""
        others = self.composed.others if self.composed else ()
        return [half for half in (self.conditions, self.negative, *others) if half is not None]


@dataclass(eq=False)
class Run:
    """An image on its way.

    Attributes:
        table: of its sampler.
        guided: [R] bool, rows that need the negative prompt.
        row: that comes next.
        later: other texts from a row on, each [1, ...] on the host.
        control: [R, N, 2, L] float32, how strong the networks that read control images are (``StepInputs.needed``).
    """

    table: SamplerTable
    guided: np.ndarray
    row: int = 0
    later: Mapping[int, Texts] = field(default_factory=dict)
    control: HostArray | None = None

    @property
    def left(self) -> int:
        """Rows to go."""
        return len(self.table) - self.row


class Carried(NamedTuple):
    """An image between batches: how far it is, and all that a batch holds of it, [1, ...] each.

    On the host, but for what is from a batch of one image, which may be on its devices.
    """

    flight: InFlight
    run: Run

    @classmethod
    def begin(
        cls,
        latents: HostArray,
        conditions: Conditions,
        negative: Conditions | None,
        key: HostArray,
        table: SamplerTable,
        row: int = 0,
        control: HostArray | None = None,
    ) -> Carried:
        """An image from its noise.

        Args:
            latents: [h, w, C] float32: noise of unit variance, or for a ``row`` after the first x before that row.
            conditions: each [1, ...].
            negative: likewise; None for an image without guidance, whose table has scale 1.
            key: threefry key words [2] uint32.
            table: its sampler.
            row: the row to begin with.
            control: as in ``Run``.
        """
        state = np.zeros((1, SLOTS, *latents.shape), np.float32)
        state[0, 0] = latents * np.float32(table.init_scale) if row == 0 else latents
        flight = InFlight(state, conditions, negative, np.asarray(key)[None])
        return cls(flight, Run(table, guided_rows(table, guided=negative is not None), row, control=control))


class Batch:
    """B slots of one size on the devices of a model.

    Args:
        programs: the model's programs.
        params: its parameters, on the devices.
        latents: [B, h, w, C]; B is a multiple of the ``data`` axis of the mesh.
        denoisers: the compiled denoisers. With both, rows of which no image needs guidance run at half the work; with
            the guided one alone, images without guidance have scale 1.
        controls: the networks that read control images, of which the denoisers know.
        places: for adapters beside the weights, likewise.

    Attributes:
        denoised: D of every slot at the last row run [B, h, w, C] float32, on the devices; None before.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        latents: LatentShape,
        denoisers: Denoisers,
        controls: Sequence[str] = (),
        places: Places | None = None,
    ) -> None:
        self.latents, self._controls, self._places = latents, tuple(controls), places
        self.denoised: Array | None = None
        self._programs, self._params, self._denoisers = programs, params, denoisers
        self._runs: list[Run | None] = [None] * latents[0]
        self._flight: InFlight | None = None
        self._deep: DeepPlan | None = None
        self._later: Mapping[int, Texts] = {}
        self._features: Array | None = None

    def fill(
        self,
        noise: HostArray,
        texts: Texts,
        keys: HostArray,
        tables: Sequence[SamplerTable],
        deep: DeepPlan | None = None,
        images: HostArray | None = None,
        known: Known | None = None,
        later: Mapping[int, Texts] | None = None,
        tuning: Tuning | None = None,
        control: Sequence[HostArray] | None = None,
    ) -> None:
        """Start images in the first slots, all at once and without a program; what was in flight is gone.

        Args:
            noise: initial noise of unit variance [n, h, w, C] float32, n at most B; slots that are left over repeat
                the last image.
            texts: each [B, ...], on the devices; without negative prompts the batch is not guided.
            keys: threefry key words for step noise [n, 2] uint32.
            tables: one for each image.
            deep: which rows compute the deep features; all images have the same table then.
            images: latents [n, h, w, C] float32 of images to begin from, which ``noise`` is added to; else it is all.
            known: what stays of images, [n, ...] each, for denoisers that were made for it.
            later: other texts from a row on, likewise; all images have the same table then.
            tuning: numbers of other kinds of guidance, [n, ...] each.
            control: of each image, as in ``Run``.
        """
        runs = [Run(table, guided_rows(table, guided=texts.negative is not None)) for table in tables]
        for run, strengths in zip(runs, control or (), strict=bool(control)):
            run.control = strengths
        state = np.zeros((len(noise), SLOTS, *noise.shape[1:]), np.float32)
        for i, table in enumerate(tables):
            scaled = np.float32(table.init_scale)
            state[i, 0] = noise[i] * scaled if images is None else table.noised(images[i], noise[i])
        self._runs = [*runs, *[None] * (self.latents[0] - len(runs))]
        self._flight = InFlight(
            self._put(state),
            texts.conditions,
            texts.negative,
            self._put(keys),
            known and Known(*map(self._put, known)),
            texts.composed,
            Tuning(*(field if field is None else self._put(field) for field in tuning or Tuning())),
        )
        self._deep, self._features, self._later = deep, None, later or {}

    def join(self, images: Mapping[int, Carried]) -> None:
        """Put images into free slots while others are on their way. By way of the host, so that nothing compiles.

        Args:
            images: by slot; each with what the denoisers were made for.

        Raises:
            InputError: a slot is taken, or the batch reuses deep features, which images at other rows cannot share.
        """
        for slot in images:
            if self._runs[slot] is not None:
                raise InputError(f"slot={slot} holds an image; take it out first, or choose one of {self.free}")
        if self._deep is not None:
            raise InputError("this batch reuses deep features, for which all its images stand at one row; fill it")
        flights = {slot: self._suited(image.flight) for slot, image in images.items()}
        if self.latents[0] == 1:
            (host,) = flights.values()  # as it is: it may be on the devices already
        else:
            host = self._on_host(next(iter(flights.values())))
            for slot, flight in flights.items():
                _write(host, slot, flight)
        self._runs = [replace(images[slot].run) if slot in images else run for slot, run in enumerate(self._runs)]
        self._flight = put_all(host, over_batch(self._programs.mesh))

    def carried(self) -> dict[int, Carried]:
        """All images by slot, to go on in another batch; this one goes on, too. Needs all devices in this process."""
        if self._flight is None:
            return {}
        alone = self.latents[0] == 1  # nothing is cut out of its arrays, and they do not change
        host = self._flight if alone else jax.device_get(self._flight)
        later = jax.device_get(dict(self._later))
        found = {}
        for slot, run in enumerate(self._runs):
            if run is not None:
                flight = host if alone else _at(host, slot)
                texts = {row: _at(one, slot) for row, one in later.items()}
                found[slot] = Carried(flight, replace(run, later=texts or run.later))
        return found

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
        flight = self._change_texts(active, flight)
        rows = min([rows, *(row - run.row for run in active.values() for row in run.later if row > run.row)])
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
        if self._controls:
            inputs = self._with_control(inputs, active)
        weights = self._programs.denoiser_params(self._params, self._controls, self._places)
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

    def drop(self, slot: int) -> None:
        """Free a slot, whatever is in it."""
        self._runs[slot] = None

    def left(self, slot: int) -> int:
        """Rows that the image in a slot has to go."""
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
    def rows_to_end(self) -> int:
        """Rows until the next image finishes; 0 if none is on its way."""
        return min((run.left for run in self._runs if run is not None and run.left), default=0)

    @property
    def state(self) -> Array:
        """The state of all slots [B, K, h, w, C] float32 on the devices; slot 0 of K is x."""
        assert self._flight is not None
        return self._flight.state

    def _on_host(self, like: InFlight) -> InFlight:
        """What is in flight, to write to; where nothing is, zeros for images such as ``like``."""
        if self._flight is not None:
            return jax.tree.map(np.array, jax.device_get(self._flight))
        return jax.tree.map(lambda leaf: np.zeros((self.latents[0], *leaf.shape[1:]), leaf.dtype), like)

    def _suited(self, flight: InFlight) -> InFlight:
        """What an image without guidance brings into a batch with it: the prompt in place of the negative one."""
        negative = flight.negative or flight.conditions
        return flight._replace(negative=negative if True in self._denoisers else None)

    def _change_texts(self, active: Mapping[int, Run], flight: InFlight) -> InFlight:
        """With the other texts of images that have come to them."""
        changes = {slot: run.later[run.row] for slot, run in active.items() if run.row in run.later}
        if changes:
            host = jax.tree.map(np.array, jax.device_get(flight))
            for slot, texts in changes.items():
                _write(host, slot, self._suited(_at(host, slot)._replace(**texts._asdict())))
            flight = self._flight = put_all(host, over_batch(self._programs.mesh))
        return flight

    def _next(self, active: Sequence[Run], rows: int) -> tuple[bool, int]:
        """Whether the next call is guided, and for how many rows nothing changes."""
        most = min(rows, WINDOW, *(run.left for run in active))
        if len(self._denoisers) == 1:
            return next(iter(self._denoisers)), most
        needed = np.any([run.guided[run.row : run.row + most] for run in active], axis=0)
        changes = np.flatnonzero(needed != needed[0])
        return bool(needed[0]), int(changes[0]) if len(changes) else most

    def _window(self, active: Mapping[int, Run]) -> tuple[Mapping[str, Array], np.ndarray]:
        """The next rows of all slots on the devices, and which of them use noise for any image."""
        windows: dict[tuple[int, int], dict[str, HostArray]] = {}
        for run in active.values():
            if (at := (id(run.table), run.row)) not in windows:
                windows[at] = run.table.window(run.row, WINDOW)
        own = [windows[id(run.table), run.row] if (run := active.get(i)) else None for i in range(len(self._runs))]
        noisy = np.any([window["M"][:, :, NOISE].any(axis=1) for window in windows.values()], axis=0)
        waiting = any(run is not None and not run.left for run in self._runs)
        columns: dict[str, HostArray] = {}
        for name, idle in IDLE_ROWS.items():
            if len(windows) == 1 and not waiting:  # slots without an image too: nobody reads what becomes of them
                (window,) = windows.values()
                column = np.broadcast_to(window[name], (len(own), *idle.shape))
            else:
                column = np.stack([idle if window is None else window[name] for window in own])
            columns[name] = column
        return put_all(columns, over_batch(self._programs.mesh)), noisy

    def _with_control(self, inputs: StepInputs, active: Mapping[int, Run]) -> StepInputs:
        """With the strengths of the networks that read control images, row by row, and which networks are needed."""
        denoiser = self._programs.networks.controlled(self._controls)
        assert isinstance(denoiser, ControlledDenoiser)
        column = np.zeros((len(self._runs), WINDOW, len(self._controls), 2, denoiser.layers), np.float32)
        for slot, run in active.items():
            if run.control is not None:
                rows = run.control[run.row : run.row + WINDOW]
                column[slot, : len(rows)] = rows
        needed = column.any(axis=(0, 3, 4))
        rows = {**inputs.rows, "control": put(column, over_batch(self._programs.mesh))}
        return inputs._replace(rows=rows, needed=needed)

    def _deep_features(self, active: Mapping[int, Run], plan: DeepPlan, *, guided: bool) -> Any:
        row = next(iter(active.values())).row
        if row in plan.starts:
            networks = self._programs.networks
            shape = deep_features_shape(networks, self.latents, plan.layers, guided=guided)
            dtype = compute_dtype(self._params[networks.denoiser.component])
            self._features = put(np.zeros(shape, dtype), over_batch(self._programs.mesh))
        return plan.window(row, self._features)

    def _put(self, array: HostArray) -> Array:
        """On the devices, split over the batch, which is filled up with copies of its last entry."""
        return put(filled(array, self.latents[0]), over_batch(self._programs.mesh))


def _at(host: Any, slot: int) -> Any:
    """One image of arrays on the host."""
    return jax.tree.map(lambda leaf: leaf[slot : slot + 1], host)


def _write(host: InFlight, slot: int, image: InFlight) -> None:
    """Put one image among arrays on the host."""
    jax.tree.map(lambda whole, single: whole.__setitem__(slot, np.asarray(single)[0]), host, image)


def filled(array: HostArray, batch: int) -> HostArray:
    """``array`` [n, ...] with copies of its last entry behind it: [batch, ...]."""
    missing = batch - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array
