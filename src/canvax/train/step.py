"""A training step as a pure function of its state: any loss, any optimizer of optax, on any devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError, check_count, check_function, shown
from canvax.parallel import fsdp
from canvax.params import Params
from canvax.train.state import TrainState, apart, check_arrays
from canvax.types import Array

Tree = TypeVar("Tree")

Loss = Callable[[Params, Any, Any, Array], Array | tuple[Array, Mapping[str, Array]]]
"""``(params, samples, shared, key) -> (loss, values to log)``, or the loss alone."""


@dataclass(frozen=True, eq=False)
class TrainStep:
    """A training step: ``step(state, samples, shared, key) -> (state, values to log)``.

    Attributes:
        init: ``(params) -> state``, a copy, since ``run`` overwrites its state.
        update: the step, which is also called by ``step(...)``.
    """

    init: Callable[[Params], TrainState]
    update: Callable[[TrainState, Any, Any, Array], tuple[TrainState, dict[str, Array]]]

    def __call__(self, state: TrainState, samples: Any, shared: Any, key: Array) -> tuple[TrainState, dict[str, Array]]:
        """Make an update."""
        return self.update(state, samples, shared, key)


def make_step(
    loss: Loss, optimizer: Any, *, accumulate: int = 1, average: float = 0.0, mesh: Mesh | None = None
) -> TrainStep:
    """Make a step that minimises a loss: pure, for ``run``, for ``jax.jit``, or as a part of a larger step.

    Args:
        loss: the loss to minimise; it returns a number, or (a number, values to log by name).
        optimizer: an ``optax.GradientTransformation``. If it takes extra arguments, it gets ``step``, ``value`` (the
            loss) and ``grad``.
        accumulate: batches per update, processed one after the other to save memory; samples are then
            [accumulate, B, ...]. The gradients are averaged.
        average: decay of a moving average of the parameters, which ``averaged`` returns; 0 for no averaging.
        mesh: devices that share the parameters, their average and the optimizer's state, each with a part of every
            large array (FSDP; Rajbhandari et al. 2020, stage 3 of ZeRO), in one process or several. A step gathers the
            parameters, and has the same numbers. None: each device has all of them.

    Raises:
        InputError: an argument is invalid; or, when it is traced, the loss returns something else.
    """
    check_function("loss", loss, 4, "(params, samples, shared, key)")
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise InputError("optimizer", "is not a transformation of optax", cure="try optax.adam(1e-4)", value=optimizer)
    check_count("accumulate", accumulate)
    if not 0 <= average < 1:
        raise InputError("average", "is not a decay in 0..1, 1 excluded", cure="0.999 is usual", value=average)

    def begun(params: Params) -> TrainState:
        memory = apart(optimizer.init(params), params)  # Prodigy's begins with the parameters
        return TrainState(jnp.int32(0), params, _copy(params) if average else None, memory)

    def init(params: Params) -> TrainState:
        check_arrays("params", params, trained=True)
        if mesh is None:
            return begun(_copy(params))
        params = fsdp.split(params, mesh, np.float32)
        return jax.jit(begun, out_shardings=fsdp.shardings(jax.eval_shape(begun, params), mesh))(params)

    def checked(params: Params, samples: Any, shared: Any, key: Array) -> tuple[Array, dict[str, Array]]:
        return _checked(loss(fsdp.gathered(params, mesh) if mesh else params, samples, shared, key))

    def split(gradient: Tree) -> Tree:
        return fsdp.constrained(gradient, mesh) if mesh else gradient

    def update(state: TrainState, samples: Any, shared: Any, key: Array) -> tuple[TrainState, dict[str, Array]]:
        import optax

        value_and_gradient = jax.value_and_grad(checked, has_aux=True)
        if accumulate == 1:
            (value, logged), gradient = value_and_gradient(state.params, samples, shared, key)
        else:
            _check_parts(samples, accumulate)

            def add_gradients(total: Any, part: tuple[Any, Array]) -> tuple[Any, None]:
                batch, index = part
                result = value_and_gradient(state.params, batch, shared, jax.random.fold_in(key, index))
                return jax.tree.map(jnp.add, total, split(result)), None

            first = jax.tree.map(lambda leaf: leaf[0], samples)
            shapes = jax.eval_shape(value_and_gradient, state.params, first, shared, key)
            zeros = split(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
            total, _ = jax.lax.scan(add_gradients, zeros, (samples, jnp.arange(accumulate)))
            (value, logged), gradient = jax.tree.map(lambda leaf: leaf / accumulate, total)
        gradient = split(gradient)
        more = {"step": state.step, "value": value, "grad": gradient}
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of its step
            changes, memory = optax.with_extra_args_support(optimizer).update(
                gradient, state.optimizer, state.params, **more
            )
        params: Any = optax.apply_updates(state.params, changes)
        # A smaller decay at first, so that the average forgets the random initial values.
        done = state.step.astype(jnp.float32)
        decay = jnp.minimum(average, (1.0 + done) / (10.0 + done))
        old = state.average
        if old is not None:
            old = jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), old, params)
        return TrainState(state.step + 1, params, old, memory), {"loss": value, **logged}

    return TrainStep(init, update)


def averaged(state: Any) -> Any:
    """Return the parameters for inference of each ``TrainState`` in a tree: their moving average if there is one.

    It is that of ``make_step(average=...)``, or of a schedule-free optimizer (``optax.contrib.schedule_free``).
    """

    def chosen(part: Any) -> Any:
        if not isinstance(part, TrainState):
            return part
        if part.average is not None:
            return part.average
        from optax.contrib import ScheduleFreeState, schedule_free_eval_params

        inner = jax.tree.leaves(part.optimizer, is_leaf=lambda node: isinstance(node, ScheduleFreeState))
        free = next((node for node in inner if isinstance(node, ScheduleFreeState)), None)
        return part.params if free is None else schedule_free_eval_params(free, part.params)

    return jax.tree.map(chosen, state, is_leaf=lambda part: isinstance(part, TrainState))


def _copy(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), tree)


def _checked(result: Any) -> tuple[Array, dict[str, Array]]:
    """Refuse what a loss returns unless it is ``(number, values to log)``, or a number."""
    result = (result, {}) if getattr(result, "shape", None) == () else result
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    if not pair or getattr(result[0], "shape", None) != () or not jnp.issubdtype(result[0].dtype, jnp.floating):
        cure = "return a number, or (a number, values to log by name)"
        raise InputError("loss", f"returned {shown(result)}", cure=cure)
    if "loss" in result[1]:
        raise InputError("loss", "returned a value with the name 'loss', which the log has for the loss itself")
    return result[0], dict(result[1])


def _check_parts(samples: Any, accumulate: int) -> None:
    """Refuse samples that are not [accumulate, B, ...]."""
    for leaf in jax.tree.leaves(samples):
        if len(leaf.shape) < 2 or len(leaf) != accumulate:
            problem = f"gives samples of shape {leaf.shape}, not [{accumulate}, B, ...] for accumulate={accumulate}"
            raise InputError("batch", problem, cure=f"give {{batch=({accumulate}, B)}}")
