"""The training loop: many steps per compiled call, on any mesh; it can be stopped and resumed at any time.

Every random choice is a function of seed and step, and the state is only written between calls of the program. So a run
that was killed resumes with exactly the same numbers.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from canvax.errors import CanvaxError, InputError, check_count, check_function, shown
from canvax.files import remove_leftovers
from canvax.kernels.target import compiled_on
from canvax.parallel import multihost
from canvax.parallel.memory import available_bytes, free_bytes
from canvax.parallel.mesh import replicated
from canvax.params import Params
from canvax.settings import check_all, check_setting
from canvax.train.progress import Progress
from canvax.train.settings import PlanRecord
from canvax.train.state import TrainState, check_arrays, load_state, new_state, on_host, read_facts, save_state
from canvax.types import Array, HostArray

STATE, LOG = "state.safetensors", "log.jsonl"
FIRST_STATE = 30.0
"""Seconds until the first state of a new run, where ``Session.save_every`` is longer."""
RESIDENT = 1 / 16
"""Fraction of a device's free memory up to which all samples are kept there: so little is hardly missed, and of 16 GB
it is enough for the latents of ten thousand images of 512 x 512 pixels."""
_OVER_BATCH = PartitionSpec(None, None, "data")
"""Sharding of samples [chunk, accumulate, B, ...]."""

Loss = Callable[[Params, Any, Any, Array], tuple[Array, dict[str, Array]]]
"""``(params, samples, shared, key) -> (loss, values to log)``; each array of the samples is [B, ...]."""


Program = Callable[[TrainState, Any, Any, Any, Any], tuple[TrainState, dict[str, Any]]]


@dataclass(frozen=True)
class Plan(PlanRecord):
    """The settings of a training run.

    Attributes:
        steps: number of updates.
        batch: samples per update.
        learning_rate: the highest learning rate, after the warm-up.
        warmup: steps of the warm-up; by default a tenth of ``steps``, at most 500.
        final: learning rate at the end of the cosine, as a fraction of the highest (Loshchilov & Hutter 2017).
        b2: decay of Adam's second moment.
        weight_decay: weight decay of matrices and convolutions only (Loshchilov and Hutter 2019).
        clip: bound on the norm of the gradient.
        average: decay of the moving average of the parameters; 0 for no averaging.
        seed: seed of every random choice.
        chunk: steps per call of the program, at most, and per line of the log.
        accumulate: batches per update, processed one after the other to save memory; the gradients are averaged.
        rates: top-level key of the parameters -> its learning rate, where it differs.
        minutes: choose ``steps`` to take about this long; measured once, at the beginning of the run.
    """

    def __post_init__(self) -> None:
        check_all(self)
        if not isinstance(self.rates, Mapping):
            raise InputError("rates", "is not a table of learning rates by part", value=self.rates)
        for name, rate in self.rates.items():
            try:
                check_setting(PlanRecord, "learning_rate", rate)
            except InputError as error:
                raise error.about(f"rates[{name!r}]") from None
        if self.warmup is None:
            object.__setattr__(self, "warmup", min(500, self.steps // 10))

    def indices(self, done: int, samples: int) -> HostArray:
        """Return the samples of the next chunk after ``done`` updates: int32 [chunk, accumulate, batch]."""
        flat = batch_indices(self.seed, done, self.chunk, self.accumulate * self.batch, samples)
        return flat.reshape(self.chunk, self.accumulate, self.batch)


@dataclass(frozen=True)
class Session:
    """The environment of a run: folder, devices, deadline and callbacks.

    Attributes:
        folder: folder of the run's state and log.
        name: name of the training in the progress line.
        mesh: the devices; the batch is split over ``data``.
        deadline: ``time.monotonic()`` at which to write the state and stop; None to run to the end.
        save_every: seconds between writing states, in parallel with the steps; at least as long as writing takes.
        about: further settings, in plain values, that must not change when a run is resumed.
        save: called with the step and the averaged parameters, after a state of this step was written. When a run
            resumes at that step, it is called again.
        save_steps: steps between calls of ``save``, which is not called after the last step; None for no calls.
        preview: called with the step and the averaged parameters, and always after the last step.
        preview_every: seconds between previews.
        preview_steps: steps between previews, instead of ``preview_every``.
        watch: called after each chunk with the step and the logged values, including learning rate and samples per
            second.
    """

    folder: Path
    name: str
    mesh: Mesh
    deadline: float | None = None
    save_every: float = 300.0
    about: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[int, Params], None] | None = None
    save_steps: int | None = None
    preview: Callable[[int, Params], None] | None = None
    preview_every: float = 900.0
    preview_steps: int | None = None
    watch: Callable[[int, Mapping[str, float]], None] | None = None

    def __post_init__(self) -> None:
        if not str(self.folder) or not self.name:
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
        for what, arguments in {"save": "parameters", "preview": "parameters", "watch": "numbers"}.items():
            if getattr(self, what) is not None:
                check_function(what, getattr(self, what), 2, f"(step, {arguments})")

    def next_stop(self, done: int, steps: int, plan: Plan) -> int:
        """Return the step after which the program returns, of which ``done`` of ``steps`` are done."""
        every = (plan.chunk, self.save_steps, self.preview_steps)
        return min(steps, *(done - done % count + count for count in every if count))

    def saves(self, done: int, steps: int) -> bool:
        """Return whether ``save`` is called after this step."""
        return self.save_steps is not None and 0 < done < steps and done % self.save_steps == 0


def fit(
    params: Params, loss: Loss, data: Any, samples: int, plan: Plan, session: Session, shared: Any = None
) -> tuple[Params, bool]:
    """Train, or resume the run in ``session.folder``.

    In the main thread SIGTERM and Ctrl-C take effect after the chunk, when its state is written; a second one at once.
    With several processes, each must call it with the same arguments and a disk that all can read; the first writes.

    Args:
        params: initial parameters, host or device arrays.
        loss: the loss to minimise.
        data: a pytree of arrays [samples, ...]. If it is small (``RESIDENT``), each device gets a copy of it, and with
            each chunk of steps only the indices of its samples. Otherwise, and with several processes, it stays on the
            host, and each device gets its part of the batches of a chunk. The numbers are the same.
        samples: number of samples.
        plan: settings of the run, which must not change when it is resumed; only ``chunk`` may, and at a constant
            learning rate ``steps`` may grow.
        session: folder, devices, deadline and callbacks.
        shared: a pytree of arrays that each step reads, replicated on every device.

    Returns:
        The averaged parameters, and whether the run is finished (False if the deadline came first).

    Raises:
        InputError: the folder contains a run with another plan or number of samples, or there are no samples.
        CanvaxError: the loss or a parameter is no longer finite.
    """
    if session.folder.exists() and not session.folder.is_dir():
        raise InputError("folder", "is not a folder", cure="choose another name", value=str(session.folder))
    if samples < 1:
        raise InputError("samples", "leaves nothing to train on", value=samples)
    check_arrays("params", params, trained=True)
    check_arrays("data", data)
    check_arrays("shared", shared)
    data = _on_host(data, samples)
    _check_loss(loss, params, data, shared, plan)
    if plan.batch % session.mesh.shape["data"]:
        raise InputError("batch", f"cannot be split over {session.mesh.shape['data']} devices", value=plan.batch)
    path, everywhere = session.folder / STATE, replicated(session.mesh)
    if path.is_file():
        check_same(path, plan, samples, session.about)
    optimizer = _optimizer(plan)
    state = jax.device_put(new_state(params, optimizer, averaged=plan.average > 0), everywhere)
    shared = jax.device_put(shared, everywhere)
    writes, spread = multihost.is_main_process(session.mesh), multihost.is_spread(session.mesh)
    progress = Progress(session.name, shown=writes)
    steps = plan.steps
    if path.is_file():
        steps = steps if plan.minutes is None else read_facts(path)["total"]
        state = load_state(path, state)
    done = int(state.step)
    if done >= steps and not spread:
        return _ema_or_params(state), True
    if not spread and _bytes(data) <= RESIDENT * (free_bytes(session.mesh) or 0):
        data, loss, shared = _indexed(data, samples, loss, shared, session.mesh)
    progress.say("compiling")
    program = _compile(partial(_update, loss=loss, optimizer=optimizer, plan=plan), state, data, shared, plan,
                       session.mesh)  # fmt: skip
    if plan.minutes is not None and not path.is_file():
        steps = _steps_in(plan, program, state, _chunk_of(data, plan.indices(0, samples), session.mesh), shared)
    if spread:
        regular = (plan.chunk, session.save_steps, session.preview_steps)
        (steps,) = multihost.broadcast_seeds([steps], facts_of(plan, samples), dict(session.about), done, regular)
    if not done and read_log(session.folder / LOG):
        progress.say("no state was saved, beginning again")
    if writes:
        remove_leftovers(session.folder)
        _cut_log(session.folder / LOG, done)
    facts = facts_of(plan, samples) | {**session.about, "total": steps}
    if 0 < done < steps:
        progress.say(f"going on from step {done} of {steps}")
    progress.begin(steps, plan.accumulate * plan.batch, done)
    saved = shown = time.monotonic()
    if not done:
        saved -= max(session.save_every - FIRST_STATE, 0)
    if session.save and session.saves(done, steps):
        session.save(done, _ema_or_params(state))
    chunk = _chunk_of(data, plan.indices(done, samples), session.mesh)
    with _Writer(path, facts) as writer, _signals() as signals:
        while done < steps:
            began = time.monotonic()
            count = session.next_stop(done, steps, plan) - done
            state, metrics = program(state, chunk, shared, np.int32(steps), np.int32(count))
            done += count
            if done < steps:  # while the devices are busy
                chunk = _chunk_of(data, plan.indices(done, samples), session.mesh)
            _check_finite("the loss", metrics["loss"], session.name, done)
            numbers = {name: float(value) for name, value in metrics.items()}
            now = time.monotonic()
            seconds = max(now - began, 1e-9)
            pace = {"images_per_second": count * plan.accumulate * plan.batch / seconds}
            if writes:
                _log(session.folder / LOG, done, {**numbers, "seconds": seconds, **pace})
            progress.advance(done, numbers["loss"])
            if session.watch:
                rate = float(learning_rate(jnp.int32(done - 1), jnp.int32(steps), plan))
                session.watch(done, {**numbers, "learning_rate": rate, **pace})
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
                _check_finite("a parameter", _largest(state.params), session.name, done)
                if writes:
                    writer.write(state, wait=last or saves)
                saved = now
            if session.save and saves:
                session.save(done, _ema_or_params(state))
            if session.preview and (done >= steps or preview):
                session.preview(done, _ema_or_params(state))
                shown = time.monotonic()
            if stop:
                break
    progress.close()
    return _ema_or_params(state), done >= steps


class _Writer:
    """Writes states in a thread, one at a time, while the next steps run.

    Where the host's memory has no room for a copy of the state, the steps wait.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
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

    def write(self, state: TrainState, *, wait: bool) -> None:
        """Write a state, and wait until it is there or only until it is copied: the next step overwrites it."""
        self._finish()
        room = available_bytes()
        if wait or room is None or 2 * _bytes(state) > room:
            save_state(self._path, state, self._facts)
        else:
            self._last = self._thread.submit(save_state, self._path, on_host(state), self._facts)

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
    """Move the data to host memory, in dtypes that JAX supports."""

    def host(path: Any, leaf: Any) -> HostArray:
        if not leaf.shape or len(leaf) != samples:
            where = "data" + jax.tree_util.keystr(path)
            raise InputError(f"{where} has shape {leaf.shape} and not one entry for each of samples={samples}")
        return np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)

    return jax.tree_util.tree_map_with_path(host, data)


def _bytes(data: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(data))


def _indexed(data: Any, samples: int, loss: Loss, shared: Any, mesh: Mesh) -> tuple[HostArray, Loss, Any]:
    """Put the data on each device; return ``fit``'s arguments data, loss and shared with indices as samples."""

    def gathered(params: Params, rows: Array, shared: Any, key: Array) -> tuple[Array, dict[str, Array]]:
        data, shared = shared
        return loss(params, jax.tree.map(lambda leaf: leaf[rows], data), shared, key)

    return np.arange(samples, dtype=np.int32), gathered, (jax.device_put(data, replicated(mesh)), shared)


def _chunk_of(data: Any, indices: HostArray, mesh: Mesh) -> Any:
    """Send the samples of a chunk, [chunk, accumulate, B, ...], to the devices; a process sends its devices' part."""
    split = NamedSharding(mesh, _OVER_BATCH)

    def put(leaf: HostArray) -> Array:
        shape = (*indices.shape, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, split, lambda index: leaf[indices[(index or ())[: indices.ndim]]])

    return jax.tree.map(put, data)


def _abstract(data: Any, *shape: int) -> Any:
    """Return the abstract arrays of samples with these leading axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape[1:]), leaf.dtype), data)


def _check_loss(loss: Loss, params: Params, data: Any, shared: Any, plan: Plan) -> None:
    """Refuse a loss that does not return ``(number, values to log)``; exceptions of the loss pass through."""
    check_function("loss", loss, 4, "(params, samples, shared, key)")
    result = jax.eval_shape(loss, params, _abstract(data, plan.batch), shared, jax.random.key(0))
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    if not pair or getattr(result[0], "shape", None) != () or not jnp.issubdtype(result[0].dtype, jnp.floating):
        raise InputError(
            "loss", f"returned {shown(result)}", cure="return (a number, {}), the second what else to log, by name"
        )


def _check_finite(quantity: str, number: Any, name: str, done: int) -> None:
    if not math.isfinite(number):
        raise CanvaxError(
            f"{name}: {quantity} is {float(number)} at step {done}; the last good state is kept. Train with a lower "
            "learning rate in another folder."
        )


@jax.jit
def _largest(params: Params) -> Array:
    """Return the largest magnitude of all parameters; not finite if any parameter is not."""
    return jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(params)]).max()


def _ema_or_params(state: TrainState) -> Params:
    return state.params if state.average is None else state.average


def batch_indices(seed: int, start: int, steps: int, batch: int, samples: int) -> HostArray:
    """Return the samples of ``steps`` updates from update ``start`` on: int32 [steps, batch].

    Each epoch is a random permutation of all samples, a function only of the seed and the position.
    """
    for name, value in (("steps", steps), ("batch", batch), ("samples", samples)):
        check_count(name, value)
    if seed < 0 or start < 0:
        raise InputError("seed", f"and start={start} are not whole numbers of at least 0", value=seed)
    first, last = start * batch, (start + steps) * batch
    out = np.empty(last - first, np.int32)
    for epoch in range(first // samples, -(-last // samples)):
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)
        begin, end = max(first, epoch * samples), min(last, (epoch + 1) * samples)
        out[begin - first : end - first] = order[begin - epoch * samples : end - epoch * samples]
    return out.reshape(steps, batch)


def step_key(seed: int, step: Array | int) -> Array:
    """Return the key of an update's random choices."""
    if isinstance(step, int) and step < 0:
        raise InputError("step", "is not a whole number of at least 0", value=step)
    return jax.random.fold_in(jax.random.key(seed), step)


def learning_rate(step: Array, steps: Array, plan: Plan) -> Array:
    """Compute the learning rate: linear warm-up, then half a cosine down to ``plan.final`` of the highest rate."""
    step, steps = step.astype(jnp.float32), steps.astype(jnp.float32)
    rise = jnp.minimum(1.0, (step + 1.0) / max(plan.warmup, 1))
    part = jnp.clip((step - plan.warmup) / jnp.maximum(steps - plan.warmup, 1.0), 0.0, 1.0)
    return plan.learning_rate * rise * (plan.final + (1.0 - plan.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * part)))


def _optimizer(plan: Plan) -> Any:
    """Return AdamW without learning rate, which depends on the number of steps, a runtime argument."""
    try:
        import optax
    except ImportError as error:
        raise InputError("training needs optax: pip install optax") from error

    def matrices(params: Params) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(plan.clip),
        optax.scale_by_adam(b2=plan.b2),
        optax.add_decayed_weights(plan.weight_decay, mask=matrices),
    )


def _update(
    state: TrainState, samples: Any, shared: Any, steps: Array, *, loss: Loss, optimizer: Any, plan: Plan
) -> tuple[TrainState, dict[str, Array]]:
    """Make an update from samples [accumulate, B, ...]; also return the values to log."""
    key = step_key(plan.seed, state.step)
    value_and_gradient = jax.value_and_grad(loss, has_aux=True)
    first = jax.tree.map(lambda leaf: leaf[0], samples)
    if plan.accumulate == 1:
        (value, logged), gradient = value_and_gradient(state.params, first, shared, key)
    else:

        def add_gradients(total: Any, part: tuple[Any, Array]) -> tuple[Any, None]:
            batch, index = part
            result = value_and_gradient(state.params, batch, shared, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, result), None

        shapes = jax.eval_shape(value_and_gradient, state.params, first, shared, key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, _ = jax.lax.scan(add_gradients, zeros, (samples, jnp.arange(plan.accumulate)))
        (value, logged), gradient = jax.tree.map(lambda leaf: leaf / plan.accumulate, total)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of its step
        changes, memory = optimizer.update(gradient, state.optimizer, state.params)
    rate = learning_rate(state.step, steps, plan)
    shares = {name: plan.rates.get(name, plan.learning_rate) / plan.learning_rate for name in state.params}

    def moved(part: Any, change: Any, share: float) -> Any:
        return jax.tree.map(lambda p, step: p - rate * share * step, part, change)

    params = {name: moved(part, changes[name], shares[name]) for name, part in state.params.items()}
    # A smaller decay at first, so that the average forgets the random initial values.
    done = state.step.astype(jnp.float32)
    decay = jnp.minimum(plan.average, (1.0 + done) / (10.0 + done))
    average = state.average
    if average is not None:
        average = jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), average, params)
    return TrainState(state.step + 1, params, average, memory), {"loss": value, **logged}


def _compile(update: Any, state: TrainState, data: Any, shared: Any, plan: Plan, mesh: Mesh) -> Program:
    """Compile ``(state, samples [chunk, accumulate, B, ...], shared, steps, count) -> (state, means of the logged
    values)``, which makes the first ``count`` updates of a chunk.

    The input state is donated. A chunk of steps is a single program, so that the device never waits for Python.
    ``count`` is an input, so that a step has the same numbers wherever a chunk ends.
    """
    everywhere = replicated(mesh)

    def chunk(
        state: TrainState, samples: Any, shared: Any, steps: Array, count: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        def step(index: Any, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
            part = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), samples)
            state, metrics = update(state, part, shared, steps)
            return state, jax.tree.map(lambda value: jnp.mean(value, dtype=jnp.float32), metrics)

        def add(index: Any, carried: Any) -> Any:
            state, total = carried
            state, metrics = step(index, state)
            return state, jax.tree.map(jnp.add, total, metrics)

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(step, 0, state)[1])
        state, total = jax.lax.fori_loop(0, count, add, (state, zeros))
        return state, jax.tree.map(lambda value: value / count.astype(jnp.float32), total)

    return compiled_on(
        mesh,
        chunk,
        state,
        _abstract(data, plan.chunk, plan.accumulate, plan.batch),
        shared,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        in_shardings=(everywhere, NamedSharding(mesh, _OVER_BATCH), everywhere, everywhere, everywhere),
        out_shardings=everywhere,
        donate_argnums=0,
    )


def _steps_in(plan: Plan, program: Any, state: TrainState, chunk: Any, shared: Any) -> int:
    """Return the number of steps that fit into ``plan.minutes``, by timing a chunk whose result is discarded."""
    seconds = []
    for _ in range(2):
        copy = jax.tree.map(jnp.copy, state)
        began = time.perf_counter()
        jax.block_until_ready(program(copy, chunk, shared, np.int32(plan.steps), np.int32(plan.chunk)))
        seconds.append(time.perf_counter() - began)
    return max(1, int((plan.minutes or 0) * 60 / min(seconds))) * plan.chunk


def facts_of(plan: Plan, samples: int) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed."""
    return {name: value for name, value in asdict(plan).items() if name != "chunk"} | {"samples": samples}


def is_longer(path: Path, plan: Plan) -> bool:
    """Return whether ``plan`` has more steps than the run of a state file, and the same learning rate in those before.

    Raises:
        InputError: it has more steps, and another learning rate in those before.
    """
    old = read_facts(path)["steps"]
    if plan.minutes is not None or plan.steps <= old:
        return False
    if plan.final != 1:
        raise InputError(
            "steps",
            f"was {old}, now {plan.steps}: a run whose learning rate falls until the last step cannot be made longer",
            cure="choose another folder",
        )
    return True


def check_same(path: Path, plan: Plan, samples: int, about: Mapping[str, Any] | None = None) -> None:
    """Raise InputError if a state file was written with another plan or other data; a plan may be longer."""
    # Compares values as JSON stores them; fields missing in files of earlier versions had these defaults.
    now = json.loads(json.dumps(facts_of(plan, samples) | dict(about or {})))
    old = {"accumulate": 1, "rates": {}} | read_facts(path)
    changed = {name: f"was {old.get(name)}, now {value}" for name, value in now.items() if old.get(name) != value}
    if changed.keys() == {"steps"} and is_longer(path, plan):
        return
    if changed:
        (name, first), *others = changed.items()
        cure = [*(f"{{{name}}} {words}" for name, words in others), f"use the same as in {path}, or another folder"]
        raise InputError(name, first, cure="; ".join(cure))


def _log(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


def read_log(path: Path) -> list[dict[str, float]]:
    """Read the lines of a log, without a last line that is incomplete because the process was killed."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _cut_log(path: Path, done: int) -> None:
    """Remove the lines that were logged after the state from which the run resumes."""
    if path.is_file():
        kept = [line for line in read_log(path) if line["step"] <= done]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
