"""Training: of checkpoints on your images, and of anything else with the same parts.

    step = make_step(loss, optax.adam(1e-3))
    state, finished = run(step, step.init(params), data, 1000, Session("out/run"), batch=8)

``pictures`` reads captioned images, ``encoding`` encodes them to latents, ``dataset`` makes batches of several shapes,
``objectives`` and ``diffusion`` contain the loss, ``step`` and ``session`` the training step and the loop around it,
which can be killed and resumed at any time, ``loop`` both with a plan, and ``task`` trains from a checkpoint.
``recipes/emoji`` trains the bundled model with the same parts. It needs ``pip install ".[train]"``. Names are imported
when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from canvax.train.dataset import Dataset
    from canvax.train.log import TensorBoard, WeightsAndBiases
    from canvax.train.loop import Plan, fit
    from canvax.train.lora import Lora
    from canvax.train.session import Session, run
    from canvax.train.state import TrainState
    from canvax.train.step import TrainStep, averaged, make_step
    from canvax.train.task import Training, train

_HOMES = {
    "Dataset": "dataset",
    "Lora": "lora",
    "Plan": "loop",
    "Session": "session",
    "TensorBoard": "log",
    "TrainState": "state",
    "TrainStep": "step",
    "Training": "task",
    "WeightsAndBiases": "log",
    "averaged": "step",
    "fit": "loop",
    "make_step": "step",
    "run": "session",
    "train": "task",
}

__all__ = [
    "Dataset",
    "Lora",
    "Plan",
    "Session",
    "TensorBoard",
    "TrainState",
    "TrainStep",
    "Training",
    "WeightsAndBiases",
    "averaged",
    "fit",
    "make_step",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'canvax.train' has no attribute {name!r}")
    return getattr(import_module(f"canvax.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
