"""Training by a plan: AdamW with warm-up and cosine, gradient accumulation and a moving average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, conflict
from canvax.parallel import multihost
from canvax.params import Params
from canvax.settings import check_all, check_setting
from canvax.train.log import read_log
from canvax.train.session import (
    LOG,
    STATE,
    Session,
    another_run,
    batch_indices,
    check_data,
    differences,
    result_of,
    run_steps,
    step_key,
)
from canvax.train.settings import PlanRecord
from canvax.train.state import read_facts
from canvax.train.step import Loss, make_step
from canvax.types import Array, HostArray

__all__ = [
    "LOG", "STATE", "Loss", "Plan", "Session", "batch_indices", "check_same", "facts_of", "fit", "is_longer",
    "learning_rate", "read_log", "step_key",
]  # fmt: skip


@dataclass(frozen=True)
class Plan(PlanRecord):
    """The settings of a training run.

    Attributes:
        steps: number of updates.
        batch: samples per update.
        learning_rate: the highest learning rate, after the warm-up.
        warmup: steps of the warm-up; by default a tenth of ``steps``, at most 500.
        final: learning rate at the end of the cosine, as a fraction of the highest (Loshchilov & Hutter 2017).
        b2: decay of Adam's and Prodigy's second moment.
        weight_decay: weight decay of matrices and convolutions only (Loshchilov and Hutter 2019).
        clip: bound on the norm of the gradient.
        average: decay of the moving average of the parameters; 0 for no averaging.
        seed: seed of every random choice.
        chunk: steps per call of the program, at most, and per line of the log.
        accumulate: batches per update, processed one after the other to save memory; the gradients are averaged.
        rates: top-level key of the parameters -> its learning rate, where it differs.
        minutes: choose ``steps`` to take about this long; measured once, at the beginning of the run.
        optimizer: "adamw"; "adafactor", whose second moments are small (Shazeer and Stern 2018); "lion", which needs a
            tenth of the rate and ten times the decay (Chen et al. 2023); "prodigy" (Mishchenko and Defazio 2023),
            which finds its rate, of which ``learning_rate`` is a factor, and decays all arrays; or "schedule-free"
            (Defazio et al. 2024), AdamW at a constant rate that averages the parameters.
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
        if self.optimizer == "prodigy" and self.learning_rate < 0.1:
            problem = "is a factor of the rate that Prodigy finds"
            raise InputError("learning_rate", problem, cure="1 is usual", value=self.learning_rate)
        if self.optimizer == "schedule-free":
            for name, usual in (("final", 1), ("average", 0)):
                if (value := getattr(self, name)) != usual:
                    why = "it has a constant rate and its own average"
                    cure = f"give {{{name}={usual}}}"
                    raise conflict(name, "optimizer='schedule-free'", why=why, cure=cure, value=value)
        if self.warmup is None:
            object.__setattr__(self, "warmup", min(500, self.steps // 10))

    @property
    def batches(self) -> tuple[int, ...]:
        """The shape of an update's samples: (batch,) or (accumulate, batch)."""
        return (self.batch,) if self.accumulate == 1 else (self.accumulate, self.batch)

    def indices(self, done: int, samples: int) -> HostArray:
        """Return the samples of the next chunk after ``done`` updates: int32 [chunk, accumulate, batch]."""
        flat = batch_indices(self.seed, done, self.chunk, self.accumulate * self.batch, samples)
        return flat.reshape(self.chunk, self.accumulate, self.batch)


def fit(
    params: Params, loss: Loss, data: Any, samples: int, plan: Plan, session: Session, shared: Any = None
) -> tuple[Params, bool]:
    """Train by a plan, or resume the run in ``session.folder``: ``run`` with a step that ``make_step`` makes.

    Args:
        params: initial parameters, host or device arrays.
        loss: the loss to minimise; each array of its samples is [B, ...].
        data: a pytree of arrays [samples, ...]; or a function as for ``run``, such as a ``Dataset``.
        samples: number of samples of an epoch.
        plan: settings of the run, which must not change when it is resumed; only ``chunk`` may, and at a constant
            learning rate ``steps`` may grow.
        session: folder, devices, deadline and callbacks. ``Session.log`` also gets the learning rate.
        shared: a pytree of arrays that each step reads.

    Returns:
        The averaged parameters, and whether the run is finished (False if the deadline came first).

    Raises:
        InputError: the folder contains a run with another plan or number of samples, or there are no samples.
        CanvaxError: the loss or a parameter is no longer finite.
    """
    if samples < 1:
        raise InputError("samples", "leaves nothing to train on", value=samples)
    if not callable(data):
        check_data(data)
    steps, path = plan.steps, session.state
    if path and path.is_file():
        check_same(path, plan, samples, session.about)
    mesh = session.mesh if session.fsdp else None
    options: dict[str, Any] = {"accumulate": plan.accumulate, "average": plan.average, "mesh": mesh}

    def step(state: Any, samples: Any, shared: Any, key: Array) -> Any:
        shared, steps = shared  # an argument of the program, so that its numbers do not depend on it
        return make_step(loss, _optimizer(plan, steps), **options)(state, samples, shared, key)

    state = make_step(loss, _optimizer(plan, steps), **options).init(params)
    about = facts_of(plan, samples) | dict(session.about)
    more: dict[str, Any] = {"samples": samples, "batch": plan.batches, "seed": plan.seed, "facts": about}
    more["chunk"] = chunk = 1 if callable(data) else plan.chunk

    def advance(state: Any, steps: int, session: Session) -> Any:
        return run_steps(step, state, data, steps, session, shared=(shared, np.int32(steps)), **more)

    if plan.minutes is not None and path and path.is_file():
        steps = read_facts(path)["total"]
    elif plan.minutes is not None:
        steps = _steps_in(
            plan, lambda session: advance(jax.tree.map(jnp.copy, state), 2 * chunk, session), session, chunk
        )
    if log := session.log:

        def with_rate(step: int, values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
            if values:
                values = {**values, "learning_rate": float(learning_rate(jnp.int32(step - 1), jnp.int32(steps), plan))}
            log(step, values, images)

        session = replace(session, log=with_rate)
    state, finished = advance(state, steps, session)
    return result_of(state, session.mesh), finished


def _steps_in(plan: Plan, trial: Callable[[Session], Any], session: Session, chunk: int) -> int:
    """Return the number of steps that fit into ``plan.minutes``, by timing two chunks whose result is discarded."""
    seconds: list[float] = []

    def log(_: int, values: Mapping[str, float], __: Any) -> None:
        seconds.append(values["seconds"])

    trial(Session(None, session.name, session.mesh, log=log, lighter=session.lighter))
    steps = max(1, int((plan.minutes or 0) * 60 / min(seconds))) * chunk
    return multihost.broadcast_seeds([steps])[0] if multihost.is_spread(session.mesh) else steps


def learning_rate(step: Array, steps: Array, plan: Plan) -> Array:
    """Compute the learning rate: linear warm-up, then half a cosine down to ``plan.final`` of the highest rate."""
    step, steps = step.astype(jnp.float32), steps.astype(jnp.float32)
    rise = jnp.minimum(1.0, (step + 1.0) / max(plan.warmup, 1))
    part = jnp.clip((step - plan.warmup) / jnp.maximum(steps - plan.warmup, 1.0), 0.0, 1.0)
    return plan.learning_rate * rise * (plan.final + (1.0 - plan.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * part)))


def require_optax() -> Any:
    """Return the module of optax.

    Raises:
        InputError: it is not installed.
    """
    try:
        import optax
    except ImportError as error:
        raise InputError('training needs optax; install it from canvax\'s folder: pip install ".[train]"') from error
    return optax


def _optimizer(plan: Plan, steps: int | Array) -> Any:
    """Return the plan's optimizer with its learning rate for a run of ``steps``."""
    optax = require_optax()

    def matrices(params: Params) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    def rate_of(step: Any) -> Array:
        return learning_rate(jnp.asarray(step, jnp.int32), jnp.asarray(steps, jnp.int32), plan)

    def rated(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        rate = 1.0 if prodigy else -rate_of(more["step"])
        shares = {name: plan.rates.get(name, plan.learning_rate) / plan.learning_rate for name in updates}
        return {
            name: jax.tree.map(lambda change, share=share: rate * share * change, updates[name])
            for name, share in shares.items()
        }, state

    decay = optax.add_decayed_weights(plan.weight_decay, mask=matrices)
    if prodigy := plan.optimizer == "prodigy":  # its estimate needs the rate of each step
        parts = [optax.contrib.prodigy(rate_of, (0.9, plan.b2), weight_decay=plan.weight_decay)]
    elif plan.optimizer == "adafactor":
        parts = [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), decay]
    elif plan.optimizer == "lion":
        parts = [optax.scale_by_lion(), decay]
    else:
        parts = [optax.scale_by_adam(b2=plan.b2), decay]
    scale = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), rated)
    if plan.optimizer == "schedule-free":  # it counts from 1
        second = optax.scale_by_rms(plan.b2, eps_in_sqrt=False, bias_correction=True)
        base = optax.chain(second, decay, scale)
        free = optax.contrib.schedule_free(base, lambda count: rate_of(count - 1))
        return optax.chain(optax.clip_by_global_norm(plan.clip), free)
    return optax.chain(optax.clip_by_global_norm(plan.clip), *parts, scale)


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
    changed = differences(path, facts_of(plan, samples) | dict(about or {}))
    if changed and not (changed.keys() == {"steps"} and is_longer(path, plan)):
        raise another_run(path, changed)
