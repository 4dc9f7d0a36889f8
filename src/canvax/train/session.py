"""The loop around a training step: many steps per compiled call, on any mesh; it can be stopped and resumed any time.

Every random choice is a function of seed and step, and the state is only written between calls of the program. So a run
that was killed resumes with exactly the same numbers.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.errors import CanvaxError, InputError, check_count, check_function, shown
from canvax.files import remove_leftovers
from canvax.kernels.target import compiled_on
from canvax.parallel import multihost
from canvax.parallel.memory import available_bytes, free_bytes, gigabytes, program_bytes
from canvax.parallel.mesh import make_mesh, replicated
from canvax.parallel.place import is_split, whole
from canvax.params import Params
from canvax.settings import declared
from canvax.train.log import Lines, Log, Progress, read_log
from canvax.train.settings import LoraRecord, PlanRecord, TrainingRecord
from canvax.train.state import TrainState, apart, check_arrays, load_state, on_host, read_facts, save_state
from canvax.train.step import averaged
from canvax.types import Array, HostArray

STATE, LOG = "state.safetensors", "log.jsonl"
FIRST_STATE = 30.0
"""Seconds until the first state of a new run, where ``Session.save_every`` is longer."""
RESIDENT = 1 / 16
"""Fraction of a device's free memory up to which all samples are kept there: so little is hardly missed, and of 16 GB
it is enough for the latents of ten thousand images of 512 x 512 pixels."""

Step = Callable[[Any, Any, Any, Array], tuple[Any, Mapping[str, Array]]]
"""``(state, samples, shared, key) -> (state, values to log)``, a pure function; the state is any pytree of arrays."""
Draw = Callable[[int, Any], Any]
"""``(number of steps done, state) -> samples of the next step``."""
State = TypeVar("State")


@dataclass(frozen=True)
class Session:
    """The environment of a run: folder, devices, deadline and callbacks.

    Attributes:
        folder: folder of the run's state and log; None to write nothing.
        name: name of the training in the progress line.
        mesh: the devices, by default all; a batch is split over ``data``.
        deadline: ``time.monotonic()`` at which to write the state and stop; None to run to the end.
        save_every: seconds between writing states, in parallel with the steps; at least as long as writing takes.
        about: further settings, in plain values, that must not change when a run is resumed.
        save: called with the step and the averaged parameters (``averaged(state)``), after a state of this step was
            written. When a run resumes at that step, it is called again.
        save_steps: steps between calls of ``save``, which is not called after the last step; None for no calls.
        preview: called with the step and the averaged parameters, and always after the last step. Images [H, W, 3]
            uint8 and numbers that it returns by name are passed to ``log``.
        preview_every: seconds between previews.
        preview_steps: steps between previews, instead of ``preview_every``.
        fsdp: ``fit`` also splits the trained parameters, their average and the optimizer's state over ``data``.
            With several processes callbacks get whole parameters.
        lighter: called if the compiled step does not fit into the devices' free memory; the step, then compiled again,
            must need less from now on. A resumed run calls it at once if the run had called it.
        log: called with the step, values and images: after each chunk with the means of the logged values and
            no images; after a preview with images and no values.
    """

    folder: Path | str | None = None
    name: str = "training"
    mesh: Mesh = field(default_factory=make_mesh)
    deadline: float | None = None
    save_every: float = 300.0
    about: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[int, Params], None] | None = None
    save_steps: int | None = None
    preview: Callable[[int, Params], Mapping[str, HostArray | float] | None] | None = None
    preview_every: float = 900.0
    preview_steps: int | None = None
    log: Log | None = None
    fsdp: bool = False
    lighter: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.folder == "" or not self.name:
            raise InputError(
                "folder",
                f"and name={self.name!r} cannot be used",
                cure="a run has a folder and a name",
                value=self.folder,
            )
        if "data" not in self.mesh.shape:
            raise InputError(
                "mesh", f"has the axes {tuple(self.mesh.shape)}, and no 'data'", cure="take canvax.make_mesh()"
            )
        for what in ("save_every", "preview_every"):
            if getattr(self, what) < 0:
                raise InputError(what, "is fewer than 0 seconds", value=getattr(self, what))
        for what in ("save_steps", "preview_steps"):
            if getattr(self, what) is not None:
                check_count(what, getattr(self, what))
        calls = {"save": "parameters", "preview": "parameters", "log": "values, images"}
        for what, arguments in calls.items():
            if getattr(self, what) is not None:
                check_function(what, getattr(self, what), 2 + arguments.count(","), f"(step, {arguments})")

    @property
    def state(self) -> Path | None:
        """Path of the state; None if nothing is written."""
        return None if self.folder is None else Path(self.folder) / STATE

    def next_stop(self, done: int, steps: int, chunk: int) -> int:
        """Return the step after which the program returns, of which ``done`` of ``steps`` are done."""
        every = (chunk, self.save_steps, self.preview_steps)
        return min(steps, *(done - done % count + count for count in every if count))

    def saves(self, done: int, steps: int) -> bool:
        """Return whether ``save`` is called after this step."""
        return self.save_steps is not None and 0 < done < steps and done % self.save_steps == 0


def run(
    step: Step,
    state: State,
    data: Any,
    steps: int,
    session: Session | None = None,
    *,
    batch: int | tuple[int, ...] = 1,
    shared: Any = None,
    seed: int = 0,
    chunk: int = 1,
) -> tuple[State, bool]:
    """Make training steps, or resume the run in ``session.folder``.

    In the main thread SIGTERM and Ctrl-C take effect after the chunk, when its state is written; a second one at once.
    With several processes, each must call it with the same arguments and a disk that all can read; the first writes.

    Args:
        step: ``make_step(...)``, or your function ``(state, samples, shared, key) -> (state, values to log)``. It is
            compiled.
        state: the state before the first step, a pytree of arrays, such as ``step.init(params)``. It is overwritten:
            use the one that is returned. Arrays that are on the devices of the mesh stay as they are split; others are
            copied to each device.
        data: a pytree of arrays [N, ...], of which each step gets ``batch``. Every sample comes once an epoch; a batch
            may have samples of two epochs, or of several if it is larger than N. If it is small (``RESIDENT``), each
            device gets a copy of it. Otherwise, and with several processes, it stays on the host, and each device gets
            its part of the batches of a chunk. The numbers are the same.
            Or a function ``(steps done, state) -> samples of the next step``, e.g. rollouts with the present
            parameters; to resume exactly, it must depend on nothing else. If its attribute ``ahead`` is true, as that
            of a ``Dataset``, it ignores the state and is called while the step before runs. None for a step without
            samples.
        steps: number of steps; a run can be resumed with more.
        session: folder, devices, deadline and callbacks; by default all devices, and nothing is written.
        batch: samples of a step; ``(accumulate, B)`` for ``make_step(accumulate=...)``. The last number is split over
            ``data``.
        shared: a pytree of arrays that each step reads.
        seed: seed of the order of samples and of the steps' keys.
        chunk: steps per call of the program, at most, and per call of ``Session.log``; 1 if ``data`` is a function.

    Returns:
        The state, and whether the run is finished (False if the deadline came first).

    Raises:
        InputError: an argument is invalid, or the folder contains another run.
        CanvaxError: a logged ``loss``, or a parameter of a ``TrainState``, is no longer finite.
    """
    session = session or Session()
    for name, count in {"steps": steps, "chunk": chunk}.items():
        check_count(name, count)
    check_function("step", step, 4, "(state, samples, shared, key)")
    facts: dict[str, Any] = {"seed": seed}
    rows = 1
    if not callable(data):
        check_data(data)
        leaves = jax.tree.leaves(data)
        rows = len(leaves[0]) if leaves and leaves[0].shape else 1
        facts |= {"samples": rows, "batch": batch}
    facts |= session.about
    if (path := session.state) is not None and path.is_file() and (changed := differences(path, facts)):
        raise another_run(path, changed)
    shape = (batch,) if isinstance(batch, int) else tuple(batch)
    return run_steps(
        step, state, data, steps, session, samples=rows, batch=shape, shared=shared, seed=seed, chunk=chunk, facts=facts
    )


def check_data(data: Any) -> None:
    """Refuse samples that are neither arrays nor a function."""
    if jax.tree_util.all_leaves([data]) and isinstance(data, Iterable) and not hasattr(data, "dtype"):
        cure = "give arrays, or a function (steps done, state) -> samples of the next step"
        raise InputError("data", "is read by iteration, which cannot be resumed", cure=cure, value=data)
    check_arrays("data", data)


def run_steps(
    step: Step,
    state: State,
    data: Any,
    steps: int,
    session: Session,
    *,
    samples: int,
    batch: tuple[int, ...],
    shared: Any,
    seed: int,
    chunk: int,
    facts: Mapping[str, Any],
) -> tuple[State, bool]:
    """Make steps as ``run``, after its checks of a state: ``facts`` are written with it, and ``samples`` is N."""
    folder, path, mesh = session.folder and Path(session.folder), session.state, session.mesh
    if folder and folder.exists() and not folder.is_dir():
        raise InputError("folder", "is not a folder", cure="choose another name", value=str(folder))
    check_arrays("state", state)
    check_arrays("shared", shared)
    writes, spread = multihost.is_main_process(mesh), multihost.is_spread(mesh)
    progress = Progress(session.name, shown=writes)
    drawn, ahead = callable(data), getattr(data, "ahead", not callable(data))
    if drawn:
        check_function("data", data, 2, "(steps done, state)")
        chunk = 1
    else:
        data = _on_host(data, samples)
        for number in batch:
            check_count("batch", number)
        _check_step(step, state, _abstract(data, *batch), shared)
        if batch[-1] % mesh.shape["data"] and jax.tree.leaves(data):
            raise InputError("batch", f"cannot be split over {mesh.shape['data']} devices", value=batch[-1])
    state, shared = _placed(state, mesh), _placed(shared, mesh)
    done, lightened = 0, False
    if path and path.is_file():
        loaded: Any = load_state(path, state)
        before = read_facts(path)
        state, done = loaded, before["done"] if "done" in before else int(loaded.step)  # earlier versions
        lightened = before.get("lightened", False)
    if done >= steps and not spread:
        return state, True
    if not drawn and not spread and _bytes(data) <= RESIDENT * (free_bytes(mesh) or 0):
        data, step, shared = _indexed(data, samples, step, shared, mesh)

    def draw(done: int, state: Any) -> Any:
        if not drawn:
            rows = batch_indices(seed, done, chunk, math.prod(batch), samples).reshape(chunk, *batch)
            return send(data, rows, mesh)
        return _placed(apart(data(done, state), state), mesh)

    programs: dict[Any, Program] = {}
    kept = {**facts, "lightened": lightened}
    if session.lighter and lightened:
        session.lighter()

    def program_of(samples: Any) -> Program:
        leaves, structure = jax.tree.flatten(samples)
        key = (structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if key not in programs:
            if drawn:
                _check_step(step, state, samples, shared)
            progress.say(f"compiling program {len(programs) + 1}" if programs else "compiling")
            programs[key] = _compile(step, state, samples, shared, mesh, seed, not drawn)
            if session.lighter and not kept["lightened"] and _is_too_large(programs[key], mesh, progress.say):
                session.lighter()
                kept["lightened"] = True
                programs.clear()  # as in a run that resumes from here
                programs[key] = _compile(step, state, samples, shared, mesh, seed, not drawn)
        return programs[key]

    waiting = None
    if done < steps:
        waiting = draw(done, state)
        program_of(waiting)  # before anything is written
    if spread:
        regular = (chunk, session.save_steps, session.preview_steps)
        (steps,) = multihost.broadcast_seeds([steps], dict(facts), done, regular)
    listeners: list[Log] = [progress]
    if session.log:
        listeners.append(session.log)
    if folder and writes:
        if not done and read_log(folder / LOG):
            progress.say("no state was saved, beginning again")
        remove_leftovers(folder)
        listeners.insert(0, Lines(folder / LOG, done))

    def log(values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
        for listener in listeners:
            listener(done, values, images)

    if 0 < done < steps:
        progress.say(f"going on from step {done} of {steps}")
    progress.begin(steps, done)
    saved = shown = time.monotonic()
    if not done:
        saved -= max(session.save_every - FIRST_STATE, 0)
    if session.save and session.saves(done, steps):
        session.save(done, result_of(state, mesh))
    kept["total"] = steps
    with _Writer(path if writes else None, kept) as writer, _signals() as signals:
        while done < steps:
            began = time.monotonic()
            part = draw(done, state) if waiting is None else waiting
            count = session.next_stop(done, steps, chunk) - done
            compiling = time.monotonic()
            program = program_of(part)
            began += (waited := time.monotonic() - compiling)
            progress.skip(waited)
            state, metrics = program(state, part, shared, np.int32(done), np.int32(count))
            done += count
            waiting = draw(done, state) if ahead and done < steps else None  # while the devices are busy
            values = {name: float(value) for name, value in metrics.items()}
            _check_finite("the loss", values.get("loss", 0.0), session.name, done)
            now = time.monotonic()
            seconds = max(now - began, 1e-9)
            pace = {} if not ahead else {"images_per_second": count * math.prod(batch) / seconds}
            log({**values, "seconds": seconds, **pace}, {})
            stop = bool(signals) or (session.deadline is not None and now >= session.deadline)
            save = now - saved >= session.save_every and not writer.busy()
            due = np.array([stop, save, now - shown >= session.preview_every])
            if spread:  # clocks and signals differ, and all processes must do the same
                due = multihost.any_process(due)
            stop, save, preview = due
            if session.preview_steps:
                preview = done % session.preview_steps == 0
            saves = session.saves(done, steps)
            last = done >= steps or stop
            if last or save or saves:
                # The loss only covers the parameters before the last update.
                _check_finite("a parameter", _largest(state), session.name, done)
                writer.write(state, done, wait=last or saves)
                saved = now
            if session.save and saves:
                session.save(done, result_of(state, mesh))
            if session.preview and (done >= steps or preview):
                seen = session.preview(done, result_of(state, mesh)) or {}
                numbers = {name: float(value) for name, value in seen.items() if np.ndim(value) == 0}
                images: dict[str, Any] = {name: image for name, image in seen.items() if name not in numbers}
                for part in ((numbers, {}), ({}, images)):
                    if any(part):
                        log(*part)
                shown = time.monotonic()
            if stop:
                break
    progress.close()
    return state, done >= steps


def result_of(state: Any, mesh: Mesh) -> Any:
    """Return ``averaged(state)``; what is split over processes is gathered on each device, as in a step."""
    if not any(map(is_split, jax.tree.leaves(state))):
        return averaged(state)
    return jax.jit(averaged, out_shardings=replicated(mesh))(state)


class _Writer:
    """Writes states in a thread, one at a time, while the next steps run.

    Where the host's memory has no room for a copy of the state, the steps wait.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path, self._facts = path, facts
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._thread.shutdown()
        if kind is None:
            self._finish()

    def busy(self) -> bool:
        """Return whether a state is being written; raise the error of the last one, if it could not be."""
        if self._last is not None and not self._last.done():
            return True
        self._finish()
        return False

    def write(self, state: Any, done: int, *, wait: bool) -> None:
        """Write a state, and wait until it is there or only until it is copied: the next step overwrites it."""
        self._finish()
        leaves = jax.tree.leaves(state)
        if self._path is None:
            for leaf in filter(is_split, leaves):  # with the process that writes
                whole(leaf)
            return
        room, facts = available_bytes(), {**self._facts, "done": done}
        copied = any(map(is_split, leaves)) or not (wait or room is None or 2 * _bytes(state) > room)
        held = on_host(state) if copied else state
        if copied and not wait:
            self._last = self._thread.submit(save_state, self._path, held, facts)
        else:
            save_state(self._path, held, facts)

    def _finish(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM during the block; what they do without it, they do at its end.

    So a run ends between two calls of the program, with a state. A second signal of a kind acts at once.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def heard(number: int, _: Any) -> None:
        seen.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, heard)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in seen:
        signal.raise_signal(number)


def _on_host(data: Any, samples: int) -> Any:
    """Move the data to host memory, in dtypes that JAX supports; leave what is read when it is indexed."""

    def host(path: Any, leaf: Any) -> HostArray:
        if not leaf.shape or len(leaf) != samples:
            where = "data" + jax.tree_util.keystr(path)
            raise InputError(f"{where} has shape {leaf.shape} and not one entry for each of samples={samples}")
        if not hasattr(leaf, "__array__"):  # read when it is indexed
            return leaf
        return np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)

    return jax.tree_util.tree_map_with_path(host, data)


def _placed(tree: State, mesh: Mesh) -> State:
    """Put arrays on each device of a mesh, except those that are on these devices in some way.

    One device has many equal shardings. They become one, since a program is compiled for each.
    """
    devices, everywhere = set(mesh.devices.flat), replicated(mesh)

    def put(leaf: Any) -> Array:
        there = isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices
        there = there and not (len(devices) == 1 and leaf.sharding.is_equivalent_to(everywhere, leaf.ndim))
        return leaf if there else jax.device_put(leaf, everywhere)

    return jax.tree.map(put, tree)


def _bytes(data: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(data))


def _is_too_large(program: Program, mesh: Mesh, say: Callable[[str], None]) -> bool:
    """Return whether a step needs more memory than is free; say both."""
    needed, free = program_bytes(program), free_bytes(mesh)
    if needed is None or free is None:
        return False
    then = "computing activations again, to save memory" if needed > free else "keeping activations"
    say(f"a step needs {gigabytes(needed)}, and {gigabytes(free)} are free: {then}")
    return needed > free


def _indexed(data: Any, samples: int, step: Step, shared: Any, mesh: Mesh) -> tuple[HostArray, Step, Any]:
    """Put the data on each device; return data, step and shared with indices as samples."""

    def gathered(state: Any, rows: Array, shared: Any, key: Array) -> tuple[Any, Mapping[str, Array]]:
        data, shared = shared
        return step(state, jax.tree.map(lambda leaf: leaf[rows], data), shared, key)

    whole = jax.tree.map(lambda leaf: leaf[:], data)
    return np.arange(samples, dtype=np.int32), gathered, (jax.device_put(whole, replicated(mesh)), shared)


def send(data: Any, indices: HostArray, mesh: Mesh) -> Any:
    """Send samples, [*indices.shape, ...], to the devices, split at the last axis of ``indices``.

    A process sends its devices' part.
    """
    split = NamedSharding(mesh, PartitionSpec(*[None] * (indices.ndim - 1), "data"))

    def put(leaf: HostArray) -> Array:
        shape = (*indices.shape, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, split, lambda index: leaf[indices[(index or ())[: indices.ndim]]])

    return jax.tree.map(put, data)


def _abstract(data: Any, *shape: int) -> Any:
    """Return the abstract arrays of samples with these leading axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape[1:]), leaf.dtype), data)


def _check_step(step: Step, state: Any, samples: Any, shared: Any) -> None:
    """Refuse a step that does not return ``(state, values to log)``; exceptions of the step pass through."""
    result = jax.eval_shape(step, state, samples, shared, jax.random.key(0))
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise InputError(
            "step", f"returned {shown(result)}", cure="return (state, {}), the second what to log, by name"
        )
    for name, value in result[1].items():
        if getattr(value, "shape", None) != ():
            problem = f"logs {shown(value)} as {name!r}, which is not a scalar"
            raise InputError("step", problem, cure="log a scalar, perhaps its mean")
    before, after = (
        {
            jax.tree_util.keystr(path): (leaf.shape, leaf.dtype)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (state, result[0])
    )
    if changed := [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]:
        (name, *_) = sorted(changed)
        problem = f"returned a state whose {name} is {after.get(name)}, and was {before.get(name)}"
        raise InputError("step", problem, cure="return arrays of the same names, shapes and dtypes")


def _check_finite(quantity: str, number: Any, name: str, done: int) -> None:
    if not math.isfinite(number):
        raise CanvaxError(
            f"{name}: {quantity} is {float(number)} at step {done}; the last good state is kept. Train with a lower "
            "learning rate in another folder."
        )


@jax.jit
def _largest(state: Any) -> Array:
    """Return the largest magnitude of all parameters of training states; not finite if any parameter is not."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, TrainState))
    leaves = jax.tree.leaves([part.params for part in parts if isinstance(part, TrainState)])
    return jnp.stack([jnp.zeros(()), *(jnp.abs(leaf).max() for leaf in leaves)]).max()


def batch_indices(seed: int, start: int, steps: int, batch: int, samples: int, stream: int = 0) -> HostArray:
    """Return the samples of ``steps`` updates from update ``start`` on: int32 [steps, batch].

    Each epoch is a random permutation of all samples, a function only of the seed and the position. Another ``stream``
    has other permutations.
    """
    for name, value in (("steps", steps), ("batch", batch), ("samples", samples)):
        check_count(name, value)
    if seed < 0 or start < 0:
        raise InputError("seed", f"and start={start} are not whole numbers of at least 0", value=seed)
    first, last = start * batch, (start + steps) * batch
    out = np.empty(last - first, np.int32)
    for epoch in range(first // samples, -(-last // samples)):
        order = _permutation(seed, epoch, samples, stream)
        begin, end = max(first, epoch * samples), min(last, (epoch + 1) * samples)
        out[begin - first : end - first] = order[begin - epoch * samples : end - epoch * samples]
    return out.reshape(steps, batch)


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, samples: int, stream: int) -> HostArray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, stream])).permutation(samples)


def step_key(seed: int, step: Array | int) -> Array:
    """Return the key of an update's random choices."""
    if isinstance(step, int) and step < 0:
        raise InputError("step", "is not a whole number of at least 0", value=step)
    return jax.random.fold_in(jax.random.key(seed), step)


Program = Callable[[Any, Any, Any, Any, Any], tuple[Any, dict[str, Any]]]


def _compile(step: Step, state: Any, samples: Any, shared: Any, mesh: Mesh, seed: int, chunked: bool) -> Program:
    """Compile ``(state, samples, shared, done, count) -> (state, means of the logged values)``, which makes ``count``
    steps after ``done`` ones.

    The input state is donated. A chunk of steps is a single program, so that the device never waits for Python.
    ``count`` is an input, so that a step has the same numbers wherever a chunk ends. If ``chunked``, samples are
    [chunk, ...]; otherwise they are those of each step.
    """
    everywhere = replicated(mesh)

    def program(state: Any, samples: Any, shared: Any, done: Array, count: Array) -> tuple[Any, dict[str, Array]]:
        def one(index: Any, state: Any) -> tuple[Any, dict[str, Array]]:
            part = samples
            if chunked:
                part = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), samples)
            state, values = step(state, part, shared, step_key(seed, done + index))
            return state, {name: jnp.mean(value, dtype=jnp.float32) for name, value in values.items()}

        def add(index: Any, carried: Any) -> Any:
            state, total = carried
            state, values = one(index, state)
            return state, jax.tree.map(jnp.add, total, values)

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(one, 0, state)[1])
        state, total = jax.lax.fori_loop(0, count, add, (state, zeros))
        return state, jax.tree.map(lambda value: value / count.astype(jnp.float32), total)

    inputs = jax.tree.map(lambda leaf: leaf.sharding, (state, samples, shared))
    return compiled_on(
        mesh,
        program,
        state,
        samples,
        shared,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        in_shardings=(*inputs, everywhere, everywhere),
        out_shardings=(inputs[0], everywhere),
        donate_argnums=0,
    )


def differences(path: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return which facts differ from those of a state file, and how."""
    # Compares values as JSON stores them; fields missing in files of earlier versions had these defaults.
    now = json.loads(json.dumps(dict(facts)))
    usual = {
        name: field.default
        for part in (PlanRecord, TrainingRecord, LoraRecord)
        for name, field in declared(part).items()
    }
    old = usual | {"rates": {}, "times": "uniform", "ranks": []} | read_facts(path)
    for name in ("pictures", "prior"):
        if len(str(old.get(name))) == 16 and name in now:  # a hash of pixels, by earlier versions
            old[name] = now[name]
    return {name: f"was {old.get(name)}, now {value}" for name, value in now.items() if old.get(name) != value}


def another_run(path: Path, changed: Mapping[str, str]) -> InputError:
    """Return the error of a run that differs from that of a state file."""
    (name, first), *others = changed.items()
    cure = [*(f"{{{name}}} {words}" for name, words in others), f"use the same as in {path}, or another folder"]
    return InputError(name, first, cure="; ".join(cure))
